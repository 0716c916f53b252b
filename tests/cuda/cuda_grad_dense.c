/* Gradients of linear, glu and combine on the GPU against the host form: heads, mixed adapters, ragged and unaligned shapes, few and
 * many rows, the widths of Kimi K3.1. */
#include "cuda_case.h"
#include "grad_twin.h"
#include "test_support.h"

#include "br_mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20, SLOTS = 3 };

/* ---- linear ---------------------------------------------------------------------------------------------------------- */

typedef struct linear_case {
    int n_row, n_head, n_in, n_out, n_slot, rank; /* rank: of the first slot; each next has 3 less */
    int shift;                                    /* elements by which x and dy miss the alignment of their arrays */
    int dx_only, adapters_only;
} linear_case;

typedef struct linear_data {
    const linear_case *c;
    bi_bf16 *x;
    float *dy, *dx, *s[SLOTS], *da[SLOTS], *db[SLOTS];
    int32_t *row_slot;
    twin_mat w, a[SLOTS], b[SLOTS];
} linear_data;

static int rank_of(const linear_case *c, int slot) {
    return c->rank - 3 * slot > 1 ? c->rank - 3 * slot : 1;
}

static twin_mat make_mat(twin *t, op_random *random, int n, int n_out, int n_in, float scale) {
    bi_bf16 *w;
    CHECK_OK(br_mem_alloc((void **)&w, sizeof *w * (size_t)n * (size_t)n_out * (size_t)n_in, "a test's weights"));
    op_random_bf16s(random, scale, w, n * n_out * n_in);
    const twin_mat mat = twin_stack(t, w, n, n_out, n_in);
    br_mem_free(w);
    return mat;
}

static void make_linear(grad_twin *g, op_random *random, const linear_case *c, linear_data *l) {
    const int n_x = c->n_row * c->n_head * c->n_in, n_dy = c->n_row * c->n_head * c->n_out;
    const float scale = 1.0f / sqrtf((float)c->n_in);
    grad_twin_reset(g);
    l->c = c;
    l->x = TWIN_ARRAY(&g->t, bi_bf16, "x", n_x + c->shift) + c->shift;
    l->dy = TWIN_ARRAY(&g->t, float, "dy", n_dy + c->shift) + c->shift;
    l->row_slot = TWIN_ARRAY(&g->t, int32_t, "slots", c->n_row);
    l->dx = c->adapters_only ? NULL : grad_twin_out(g, "dx", n_x, c->n_in);
    op_random_bf16s(random, 1.0f, l->x, n_x);
    op_random_normals(random, 1.0f, l->dy, n_dy);
    for (int i = 0; i < c->n_row; i++)
        l->row_slot[i] = c->n_row > 3 ? op_random_below(random, c->n_slot + 1) - 1 : i % 2;
    l->w = make_mat(&g->t, random, c->n_head, c->n_out, c->n_in, scale);
    for (int i = 0; i < c->n_slot; i++) {
        const int rank = rank_of(c, i);
        l->s[i] = TWIN_ARRAY(&g->t, float, "s", c->n_head);
        op_random_normals(random, 1.0f, l->s[i], c->n_head);
        l->a[i] = make_mat(&g->t, random, c->n_head, rank, c->n_in, scale);
        l->b[i] = make_mat(&g->t, random, c->n_head, c->n_out, rank, 0.3f);
        l->da[i] = c->dx_only ? NULL : grad_twin_out(g, "da", (int64_t)c->n_head * rank * c->n_in, c->n_in);
        l->db[i] = c->dx_only ? NULL : grad_twin_out(g, "db", (int64_t)c->n_head * c->n_out * rank, rank);
    }
}

static br_status call_linear(const bi_grad *grad, const grad_twin *g, twin_side side, void *context) {
    const linear_data *l = context;
    const linear_case *c = l->c;
    bi_adapter adapter[SLOTS];
    bi_grad_adapter want[SLOTS];
    bi_grad_linear_args a = {.n_row = c->n_row, .n_head = c->n_head, .x = twin_at(&g->t, side, l->x), .x_ld = c->n_head * c->n_in,
                             .x_head_ld = c->n_in, .w = l->w.side[side], .dy = twin_at(&g->t, side, l->dy), .dy_ld = c->n_head * c->n_out,
                             .dy_head_ld = c->n_out, .dx = twin_at(&g->t, side, l->dx), .dx_ld = c->n_head * c->n_in, .dx_head_ld = c->n_in};
    for (int i = 0; i < c->n_slot; i++) {
        adapter[i] = (bi_adapter){l->a[i].side[side], l->b[i].side[side], twin_at(&g->t, side, l->s[i])};
        want[i] = (bi_grad_adapter){twin_at(&g->t, side, l->da[i]), twin_at(&g->t, side, l->db[i])};
    }
    if (c->n_slot) {
        a.lora = (bi_lora){adapter, c->n_slot, twin_at(&g->t, side, l->row_slot)};
        a.slot = c->dx_only ? NULL : want;
    }
    return grad->op->linear(grad->ctx, &a);
}

static void run_linear(grad_twin *g, op_random *random, const linear_case *c) {
    char what[160];
    linear_data l = {0};
    make_linear(g, random, c, &l);
    snprintf(what, sizeof what, "%d rows of %d maps (%d, %d), %d slots of rank %d, shift %d", c->n_row, c->n_head, c->n_out, c->n_in, c->n_slot,
             c->rank, c->shift);
    grad_twin_run(g, what, call_linear, &l);
}

START_TEST(linear_of_any_shape) {
    static const bi_limits limits = {.n_row = 600, .d_in = 640, .d_out = 640, .rank = 48, .n_slot = SLOTS, .n_head = 6};
    static const linear_case cases[] = {
        {8, 1, 64, 64, 1, 16, 0, 0, 0},    {1, 1, 200, 136, 1, 32, 0, 0, 0},  {16, 1, 128, 256, 3, 32, 0, 0, 0}, {27, 1, 33, 65, 2, 5, 0, 0, 0},
        {65, 1, 40, 24, 1, 8, 1, 0, 0},    {129, 1, 130, 127, 2, 48, 3, 0, 0}, {64, 6, 64, 48, 2, 16, 0, 0, 0},  {30, 5, 31, 40, 1, 33, 0, 0, 0},
        {600, 1, 256, 384, 2, 32, 0, 0, 0}, {33, 1, 640, 640, 0, 0, 0, 0, 0},  {40, 1, 96, 80, 1, 32, 0, 1, 0},  {40, 2, 96, 80, 2, 32, 0, 0, 1},
        {100, 3, 72, 88, 3, 24, 5, 0, 0},
    };
    grad_twin g;
    op_random random = {test_seed(), 0};
    grad_twin_open(&g, &limits, 32 * MIB);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        run_linear(&g, &random, &cases[i]);
    grad_twin_close(&g);
}
END_TEST

/* More maps than the scratch takes at once. */
START_TEST(linear_of_many_heads) {
    static const bi_limits limits = {.n_row = 40, .d_in = 64, .d_out = 160, .rank = 16, .n_slot = 1, .n_head = 3};
    static const linear_case cases[] = {{40, 7, 64, 72, 1, 16, 0, 0, 0}, {20, 5, 48, 33, 1, 8, 0, 0, 0}};
    grad_twin g;
    op_random random = {test_seed(), 1};
    grad_twin_open(&g, &limits, 8 * MIB);
    for (int i = 0; i < 2; i++)
        run_linear(&g, &random, &cases[i]);
    grad_twin_close(&g);
}
END_TEST

START_TEST(linear_of_real_widths) {
    static const bi_limits limits = {.n_row = 48, .d_in = 12288, .d_out = 12288, .rank = 32, .n_slot = 2, .n_head = 64};
    static const linear_case cases[] = {
        {24, 1, 7168, 1536, 1, 32, 0, 0, 0}, {9, 1, 3584, 7168, 2, 32, 0, 0, 0}, {48, 1, 2048, 3584, 1, 32, 0, 0, 0},
        {20, 64, 128, 512, 1, 32, 0, 0, 0},  {1, 1, 7168, 576, 1, 32, 0, 0, 0},
    };
    grad_twin g;
    op_random random = {test_seed(), 2};
    grad_twin_open(&g, &limits, 64 * MIB);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        run_linear(&g, &random, &cases[i]);
    grad_twin_close(&g);
}
END_TEST

/* No row: gradients of adapters are zeros, nothing else is touched. */
START_TEST(linear_of_no_row) {
    static const bi_limits limits = {.n_row = 8, .d_in = 64, .d_out = 64, .rank = 16, .n_slot = 1};
    static const linear_case c = {0, 1, 64, 40, 1, 16, 0, 0, 0};
    grad_twin g;
    op_random random = {test_seed(), 3};
    grad_twin_open(&g, &limits, MIB);
    run_linear(&g, &random, &c);
    grad_twin_close(&g);
}
END_TEST

/* ---- glu and combine ------------------------------------------------------------------------------------------------- */

typedef struct glu_data {
    int n_row, d, ld;
    bi_act act;
    float *gate, *up, *dy, *dg, *du;
} glu_data;

static br_status call_glu(const bi_grad *grad, const grad_twin *g, twin_side side, void *context) {
    const glu_data *l = context;
    const bi_grad_glu_args a = {l->n_row, l->d, twin_at(&g->t, side, l->gate), twin_at(&g->t, side, l->up), l->ld, l->act,
                                twin_at(&g->t, side, l->dy), twin_at(&g->t, side, l->dg), twin_at(&g->t, side, l->du)};
    return grad->op->glu(grad->ctx, &a);
}

START_TEST(glu) {
    static const bi_limits limits = {.n_row = 8};
    static const bi_act acts[] = {{1, 4.0f, 25.0f}, {1, 3.0f, 7.0f}, {0, 0.0f, 0.0f}};
    static const int shape[][3] = {{1, 1, 1}, {5, 33, 40}, {3, 1000, 1000}, {40000, 3, 3}, {4, 18432, 36864}};
    static const float scale[] = {1.0f, 30.0f, 0.01f};
    grad_twin g;
    op_random random = {test_seed(), 4};
    grad_twin_open(&g, &limits, 16 * MIB);
    for (int i = 0; i < 15; i++) {
        const int *s = shape[i % 5];
        char what[80];
        glu_data l = {.n_row = s[0], .d = s[1], .ld = s[2], .act = acts[i % 3]};
        grad_twin_reset(&g);
        l.gate = TWIN_ARRAY(&g.t, float, "g", l.n_row * l.ld);
        l.up = TWIN_ARRAY(&g.t, float, "u", l.n_row * l.ld);
        l.dy = TWIN_ARRAY(&g.t, float, "dy", l.n_row * l.d);
        l.dg = grad_twin_out(&g, "dg", l.n_row * l.d, l.d);
        l.du = grad_twin_out(&g, "du", l.n_row * l.d, l.d);
        op_random_normals(&random, scale[i / 5], l.gate, l.n_row * l.ld);
        op_random_normals(&random, scale[i / 5], l.up, l.n_row * l.ld);
        op_random_normals(&random, 1.0f, l.dy, l.n_row * l.d);
        snprintf(what, sizeof what, "glu of %d rows of %d, scale %g", l.n_row, l.d, (double)scale[i / 5]);
        grad_twin_run(&g, what, call_glu, &l);
    }
    grad_twin_close(&g);
}
END_TEST

typedef struct combine_data {
    int n_row, d, topk;
    bi_bf16 *e;
    float *p, *dy, *de, *dp;
} combine_data;

static br_status call_combine(const bi_grad *grad, const grad_twin *g, twin_side side, void *context) {
    const combine_data *l = context;
    const bi_grad_combine_args a = {l->n_row, l->d, l->topk, twin_at(&g->t, side, l->e), twin_at(&g->t, side, l->p),
                                    twin_at(&g->t, side, l->dy), twin_at(&g->t, side, l->de), twin_at(&g->t, side, l->dp)};
    return grad->op->combine(grad->ctx, &a);
}

START_TEST(combine) {
    static const bi_limits limits = {.n_row = 8};
    static const int shape[][3] = {{1, 1, 1}, {5, 33, 3}, {1, 3584, 16}, {100, 100, 8}, {20, 7168, 16}};
    grad_twin g;
    op_random random = {test_seed(), 5};
    grad_twin_open(&g, &limits, 32 * MIB);
    for (int i = 0; i < 5; i++) {
        char what[80];
        combine_data l = {.n_row = shape[i][0], .d = shape[i][1], .topk = shape[i][2]};
        const int n_pair = l.n_row * l.topk;
        grad_twin_reset(&g);
        l.e = TWIN_ARRAY(&g.t, bi_bf16, "e", n_pair * l.d);
        l.p = TWIN_ARRAY(&g.t, float, "p", n_pair);
        l.dy = TWIN_ARRAY(&g.t, float, "dy", l.n_row * l.d);
        l.de = grad_twin_out(&g, "de", n_pair * l.d, l.d);
        l.dp = grad_twin_out(&g, "dp", n_pair, l.topk);
        op_random_bf16s(&random, 1.0f, l.e, n_pair * l.d);
        op_random_normals(&random, 0.3f, l.p, n_pair);
        op_random_normals(&random, 1.0f, l.dy, l.n_row * l.d);
        snprintf(what, sizeof what, "combine of %d rows of %d, %d experts", l.n_row, l.d, l.topk);
        grad_twin_run(&g, what, call_combine, &l);
    }
    grad_twin_close(&g);
}
END_TEST

Suite *cuda_grad_dense_suite(void) {
    Suite *suite = suite_create("grad_dense");
    CUDA_CASE(suite, linear_of_any_shape);
    CUDA_CASE(suite, linear_of_many_heads);
    CUDA_CASE(suite, linear_of_real_widths);
    CUDA_CASE(suite, linear_of_no_row);
    CUDA_CASE(suite, glu);
    CUDA_CASE(suite, combine);
    return suite;
}
