/* Gradients of the routed experts on the GPU against the host form: both weight forms, mixed adapters, tiles that split, idle experts
 * and slots, ragged and unaligned shapes, the widths of Kimi K3.1. */
#include "cuda_case.h"
#include "grad_twin.h"
#include "test_support.h"

#include "br_mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20, SLOTS = 3, EXPERT_MAX = 16 };

typedef struct experts_case {
    int n_row, d, d_ff, n_expert, topk;
    int fp4; /* 2: of scales above 1, with small rows */
    int n_slot, rank, silu;
    int hot;   /* every row chooses expert 1, none the last */
    int shift; /* elements by which x misses the alignment of its array */
    int want;  /* 1: dx, 2: adapters, 3: both */
} experts_case;

typedef struct experts_data {
    const experts_case *c;
    bi_bf16 *x;
    int32_t *expert, *row_slot;
    float *dy, *dx, *s[3][SLOTS], *da[3][SLOTS], *db[3][SLOTS];
    twin_mat w[3], a[3][SLOTS], b[3][SLOTS];
} experts_data;

static int n_in_of(const experts_case *c, int map) { return map == 2 ? c->d_ff : c->d; }
static int n_out_of(const experts_case *c, int map) { return map == 2 ? c->d : c->d_ff; }

/* Ranks differ from slot to slot; slot 1 leaves w3 alone. */
static int rank_of(const experts_case *c, int map, int slot) {
    return map == 1 && slot == 1 ? 0 : c->rank - slot * (c->rank / 4);
}

static void *temporary(size_t bytes) {
    void *block = NULL;
    CHECK_OK(br_mem_alloc(&block, bytes, "a test's weights"));
    return block;
}

static twin_mat make_bf16(twin *t, op_random *random, int n, int n_out, int n_in, float scale) {
    bi_bf16 *w = temporary(sizeof *w * (size_t)n * (size_t)n_out * (size_t)n_in);
    op_random_bf16s(random, scale, w, n * n_out * n_in);
    const twin_mat mat = twin_stack(t, w, n, n_out, n_in);
    br_mem_free(w);
    return mat;
}

/* Weights of about 1 / sqrt(n_in), codes are about 3 in size; or 2^8 times that. */
static twin_mat make_fp4(twin *t, op_random *random, int n, int n_out, int n_in, int large) {
    const size_t n_weight = (size_t)n * (size_t)n_out * (size_t)n_in;
    const int middle = 127 + 8 * large - (int)(log2((double)n_in) / 2 + 1.5);
    uint8_t *code = temporary(n_weight / 2), *scale = temporary(n_weight / 32);
    for (size_t i = 0; i < n_weight / 2; i += 8) {
        const uint64_t word = op_random_u64(random);
        memcpy(code + i, &word, n_weight / 2 - i < 8 ? n_weight / 2 - i : 8);
    }
    for (size_t i = 0; i < n_weight / 32; i++)
        scale[i] = (uint8_t)(middle - 1 + op_random_below(random, 3));
    const twin_mat mat = twin_stack_fp4(t, code, scale, n, n_out, n_in);
    br_mem_free(code);
    br_mem_free(scale);
    return mat;
}

static void make_rows(op_random *random, const experts_case *c, experts_data *l) {
    op_random_bf16s(random, c->fp4 == 2 ? 0x1p-8f : 1.0f, l->x, c->n_row * c->d);
    op_random_normals(random, 1.0f, l->dy, c->n_row * c->topk * c->d);
    for (int t = 0; t < c->n_row; t++) {
        char taken[EXPERT_MAX] = {0};
        int order[EXPERT_MAX], n = 0, left = c->topk;
        op_random_order(random, order, c->n_expert - (c->hot != 0));
        if (c->hot) {
            taken[1] = 1;
            left--;
        }
        for (int i = 0; left > 0; i++) {
            left -= !taken[order[i]];
            taken[order[i]] = 1;
        }
        for (int e = 0; e < c->n_expert; e++)
            if (taken[e])
                l->expert[t * c->topk + n++] = e;
        l->row_slot[t] = c->n_row > 8 ? op_random_below(random, c->n_slot + 1) - 1 : t % (c->n_slot + 1) ? -1 : 0;
    }
}

static void make_maps(grad_twin *g, op_random *random, const experts_case *c, experts_data *l) {
    for (int m = 0; m < 3; m++) {
        const int n_in = n_in_of(c, m), n_out = n_out_of(c, m);
        const float scale = 1.0f / sqrtf((float)n_in);
        l->w[m] = c->fp4 ? make_fp4(&g->t, random, c->n_expert, n_out, n_in, c->fp4 == 2)
                         : make_bf16(&g->t, random, c->n_expert, n_out, n_in, scale);
        for (int i = 0; i < c->n_slot; i++) {
            const int rank = rank_of(c, m, i);
            if (!rank)
                continue;
            l->s[m][i] = TWIN_ARRAY(&g->t, float, "s", c->n_expert);
            op_random_normals(random, 0.5f, l->s[m][i], c->n_expert);
            l->a[m][i] = make_bf16(&g->t, random, c->n_expert, rank, n_in, scale);
            l->b[m][i] = make_bf16(&g->t, random, c->n_expert, n_out, rank, 0.3f);
            if (c->want & 2) {
                l->da[m][i] = grad_twin_out(g, m == 0 ? "da of w1" : m == 1 ? "da of w3" : "da of w2", (int64_t)c->n_expert * rank * n_in, n_in);
                l->db[m][i] = grad_twin_out(g, m == 0 ? "db of w1" : m == 1 ? "db of w3" : "db of w2", (int64_t)c->n_expert * rank * n_out, rank);
            }
        }
    }
}

static br_status call_experts(const bi_grad *grad, const grad_twin *g, twin_side side, void *context) {
    const experts_data *l = context;
    const experts_case *c = l->c;
    bi_adapter lora[3][SLOTS];
    bi_grad_adapter want[3][SLOTS];
    bi_grad_experts_args a = {.n_row = c->n_row, .d = c->d, .d_ff = c->d_ff, .n_expert = c->n_expert, .topk = c->topk,
                              .x = twin_at(&g->t, side, l->x), .expert = twin_at(&g->t, side, l->expert), .w1 = l->w[0].side[side],
                              .w3 = l->w[1].side[side], .w2 = l->w[2].side[side], .dy = twin_at(&g->t, side, l->dy),
                              .dx = twin_at(&g->t, side, l->dx)};
    memset(lora, 0, sizeof lora);
    memset(want, 0, sizeof want);
    a.act = c->silu ? (bi_act){0, 0.0f, 0.0f} : (bi_act){1, 4.0f, 25.0f};
    for (int m = 0; m < 3; m++)
        for (int i = 0; i < c->n_slot; i++)
            if (rank_of(c, m, i)) {
                lora[m][i] = (bi_adapter){l->a[m][i].side[side], l->b[m][i].side[side], twin_at(&g->t, side, l->s[m][i])};
                want[m][i] = (bi_grad_adapter){twin_at(&g->t, side, l->da[m][i]), twin_at(&g->t, side, l->db[m][i])};
            }
    if (c->n_slot) {
        a.lora1 = lora[0];
        a.lora3 = lora[1];
        a.lora2 = lora[2];
        a.n_slot = c->n_slot;
        a.row_slot = twin_at(&g->t, side, l->row_slot);
        a.slot1 = c->want & 2 ? want[0] : NULL;
        a.slot3 = c->want & 2 ? want[1] : NULL;
        a.slot2 = c->want & 2 ? want[2] : NULL;
    }
    return grad->op->experts(grad->ctx, &a);
}

static void run_case(grad_twin *g, op_random *random, const experts_case *c) {
    char what[200];
    experts_data l = {.c = c};
    grad_twin_reset(g);
    l.x = TWIN_ARRAY(&g->t, bi_bf16, "x", c->n_row * c->d + c->shift) + c->shift;
    l.dy = TWIN_ARRAY(&g->t, float, "dy", c->n_row * c->topk * c->d);
    l.expert = TWIN_ARRAY(&g->t, int32_t, "experts", c->n_row * c->topk);
    l.row_slot = TWIN_ARRAY(&g->t, int32_t, "slots", c->n_row);
    l.dx = c->want & 1 ? grad_twin_out(g, "dx", c->n_row * c->d, c->d) : NULL;
    make_rows(random, c, &l);
    make_maps(g, random, c, &l);
    snprintf(what, sizeof what, "%d rows, %d -> %d, %d of %d experts, %s, %d slots of rank %d, hot %d, shift %d", c->n_row, c->d, c->d_ff, c->topk,
             c->n_expert, c->fp4 ? "MXFP4" : "bf16", c->n_slot, c->rank, c->hot, c->shift);
    grad_twin_run(g, what, call_experts, &l);
}

static const bi_limits small = {.n_row = 300, .rank = 48, .n_slot = SLOTS, .n_expert = EXPERT_MAX, .n_expert_topk = 4, .d_expert = 320,
                                .d_expert_ff = 320};

START_TEST(experts_of_any_shape) {
    static const experts_case cases[] = {
        {15, 64, 64, 4, 2, 1, 1, 16, 0, 0, 0, 3},   {40, 16, 32, 6, 3, 0, 2, 8, 0, 0, 0, 3},   {27, 40, 24, 4, 2, 0, 3, 32, 1, 0, 1, 3},
        {33, 96, 160, 5, 2, 1, 2, 48, 0, 1, 0, 3},  {70, 32, 64, 3, 2, 1, 1, 40, 1, 1, 0, 3},  {20, 37, 51, 9, 4, 0, 2, 17, 0, 1, 0, 3},
        {1, 128, 96, 16, 4, 1, 1, 32, 0, 0, 0, 3},  {150, 72, 136, 2, 1, 0, 1, 24, 0, 1, 3, 3}, {300, 160, 32, 4, 4, 1, 2, 32, 0, 0, 0, 3},
        {64, 320, 160, 4, 2, 1, 1, 32, 0, 0, 0, 1}, {30, 24, 320, 4, 2, 0, 2, 32, 0, 0, 0, 2},  {12, 64, 96, 4, 2, 1, 0, 0, 1, 0, 0, 1},
        {130, 48, 40, 8, 3, 0, 0, 0, 0, 0, 0, 1},   {65, 320, 288, 3, 1, 1, 3, 48, 0, 0, 0, 3}, {64, 33, 129, 2, 2, 0, 1, 16, 0, 0, 0, 3},
        {40, 128, 96, 4, 2, 2, 1, 32, 0, 0, 0, 3},
    };
    grad_twin g;
    op_random random = {test_seed(), 10};
    grad_twin_open(&g, &small, 64 * MIB);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        run_case(&g, &random, &cases[i]);
    grad_twin_close(&g);
}
END_TEST

/* Rows of one expert around the size of a tile, each form. */
START_TEST(experts_of_every_tile) {
    static const int rows[] = {9, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    grad_twin g;
    op_random random = {test_seed(), 11};
    grad_twin_open(&g, &small, 16 * MIB);
    for (int i = 0; i < 20; i++) {
        const experts_case c = {rows[i / 2], 64, 32, 3, 1, i % 2, 1, 16, 0, 1, 0, 3};
        run_case(&g, &random, &c);
    }
    grad_twin_close(&g);
}
END_TEST

START_TEST(experts_of_no_row) {
    static const experts_case c = {0, 64, 32, 3, 1, 1, 1, 16, 0, 0, 0, 2};
    grad_twin g;
    op_random random = {test_seed(), 12};
    grad_twin_open(&g, &small, 4 * MIB);
    run_case(&g, &random, &c);
    grad_twin_close(&g);
}
END_TEST

START_TEST(experts_of_real_widths) {
    static const bi_limits limits = {.n_row = 80, .rank = 32, .n_slot = 1, .n_expert = 4, .n_expert_topk = 2, .d_expert = 3584, .d_expert_ff = 3072};
    static const experts_case cases[] = {{24, 3584, 3072, 4, 2, 1, 1, 32, 0, 0, 0, 3}, {80, 2304, 1024, 2, 1, 0, 1, 32, 1, 0, 0, 3}};
    grad_twin g;
    op_random random = {test_seed(), 13};
    grad_twin_open(&g, &limits, 64 * MIB);
    for (int i = 0; i < 2; i++)
        run_case(&g, &random, &cases[i]);
    grad_twin_close(&g);
}
END_TEST

Suite *cuda_grad_experts_suite(void) {
    Suite *suite = suite_create("grad_experts");
    CUDA_CASE(suite, experts_of_any_shape);
    CUDA_CASE(suite, experts_of_every_tile);
    CUDA_CASE(suite, experts_of_no_row);
    CUDA_CASE(suite, experts_of_real_widths);
    return suite;
}
