/* experts and combine on the GPU against the oracle, byte for byte: both weight forms, every tile width and its neighbours, ragged
 * shapes, adapters mixed in a tile, one of them with Inf and NaN, all MXFP4 scales, faults, the widths of Kimi K3.1. */
#include "cuda_case.h"
#include "test_support.h"
#include "twin.h"

#include "br_mem.h"

#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20, CODE = 61, SLOTS = 3, ROW_MAX = 400, EXPERT_MAX = 2000, RANK_MAX = 48, FEW_EXPERTS = 16 };

typedef enum input_kind { NORMAL, TINY, LARGE, PLATEAU, WIDE_SCALES, BAD_ROWS, KINDS, WILD_B = KINDS } input_kind;

typedef struct experts_case {
    int n_row, d, d_ff, n_expert, topk, fp4, n_slot, rank, silu;
    input_kind kind;
    int hot;   /* this many first rows choose expert 0; the others never do; 0: no such rule */
    int shift; /* elements by which x and y miss the alignment of their arrays */
} experts_case;

/* ---- inputs -------------------------------------------------------------------------------------------------------- */

static void *temporary(size_t bytes) {
    void *block = NULL;
    CHECK_OK(br_mem_alloc(&block, bytes, "a test's weights"));
    return block;
}

static void random_bytes(op_random *random, uint8_t *to, size_t n) {
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t word = op_random_u64(random);
        memcpy(to + i, &word, n - i < 8 ? n - i : 8);
    }
}

/* Scales around the one that gives weights of about 1 / sqrt(n_in). TINY: subnormal weights of gate and up, which large rows make
 * visible. WIDE_SCALES: one of every size an output, with small rows. */
static int scale_of(op_random *random, const experts_case *c, int output, int is_down) {
    const int spread = op_random_below(random, 7);
    if (c->kind == WIDE_SCALES)
        return (output * 37 + spread / 6) % (BI_FP4_SCALE_MAX + 1);
    return c->kind == TINY && !is_down ? 2 * spread : 118 + spread;
}

static twin_mat make_fp4(twin *t, op_random *random, const experts_case *c, int n_out, int n_in, int is_down) {
    const size_t n = (size_t)c->n_expert * (size_t)n_out * (size_t)n_in;
    uint8_t *code = temporary(n / 2), *scale = temporary(n / 32);
    random_bytes(random, code, n / 2);
    for (size_t i = 0; i < n / 32; i++)
        scale[i] = (uint8_t)scale_of(random, c, (int)(i / (size_t)(n_in / 32)), is_down);
    twin_mat mat = twin_stack_fp4(t, code, scale, c->n_expert, n_out, n_in);
    br_mem_free(code);
    br_mem_free(scale);
    return mat;
}

static twin_mat make_bf16(twin *t, op_random *random, int n, float size, int n_out, int n_in) {
    bi_bf16 *w = temporary(sizeof *w * (size_t)n * (size_t)n_out * (size_t)n_in);
    op_random_bf16s(random, size, w, n * n_out * n_in);
    twin_mat mat = twin_stack(t, w, n, n_out, n_in);
    br_mem_free(w);
    return mat;
}

/* B of an adapter; WILD_B: of the first one with Inf and NaN, which no row of another may feel. */
static twin_mat make_b(twin *t, op_random *random, const experts_case *c, int slot, int n_out, int rank) {
    const int n = c->n_expert * n_out * rank;
    bi_bf16 *w = temporary(sizeof *w * (size_t)n);
    op_random_bf16s(random, 0.2f, w, n);
    for (int i = 5; c->kind == WILD_B && slot == 0 && i < n; i += 97)
        w[i] = i % 3 ? (bi_bf16)(i % 2 ? 0xff80 : 0x7f80) : (bi_bf16)0x7fff;
    twin_mat mat = twin_stack(t, w, c->n_expert, n_out, rank);
    br_mem_free(w);
    return mat;
}

static twin_mat make_map(twin *t, op_random *random, const experts_case *c, int n_out, int n_in, int is_down) {
    const float size = c->kind == TINY ? 0x1p-6f : c->kind == LARGE ? 8.0f : 0.2f;
    return c->fp4 ? make_fp4(t, random, c, n_out, n_in, is_down) : make_bf16(t, random, c->n_expert, size, n_out, n_in);
}

/* The adapters of one map for both sides; some slots leave the map alone, ranks differ from slot to slot. */
static void make_lora(twin *t, op_random *random, const experts_case *c, int n_out, int n_in, bi_adapter side[2][SLOTS]) {
    memset(side[0], 0, 2 * sizeof side[0]);
    for (int slot = 0; slot < c->n_slot; slot++) {
        const int cut = op_random_below(random, 4), rank = cut ? c->rank : (c->rank + 1) / 2;
        if (c->n_slot > 1 && op_random_below(random, 5) == 0)
            continue;
        float *s = TWIN_ARRAY(t, float, "s", c->n_expert);
        op_random_normals(random, 1.0f, s, c->n_expert);
        twin_mat a = make_bf16(t, random, c->n_expert, 0.2f, rank, n_in), b = make_b(t, random, c, slot, n_out, rank);
        for (int i = 0; i < 2; i++)
            side[i][slot] = (bi_adapter){a.side[i], b.side[i], twin_at(t, (twin_side)i, s)};
    }
}

static void make_rows(op_random *random, const experts_case *c, bi_bf16 *x, int32_t *expert, int32_t *row_slot) {
    const float tiny = c->fp4 ? 0x1p64f : 0x1p-126f;
    op_random_bf16s(random, c->kind == TINY ? tiny : c->kind == LARGE ? 0x1p40f : c->kind == WIDE_SCALES ? 0x1p-100f : 1.0f, x, c->n_row * c->d);
    for (int i = 0; c->kind == PLATEAU && i < c->n_row * c->d; i++)
        x[i] = i % 3 ? (bi_bf16)(i % 2 ? 0x8000 : 0) : bi_round(0.75f);
    for (int row = 0; row < c->n_row; row++) {
        char taken[EXPERT_MAX] = {0};
        int first = 0, n = 0;
        if (c->hot) {
            taken[0] = row < c->hot;
            first = 1;
        }
        for (int left = c->topk - (c->hot && row < c->hot); left > 0;) {
            const int e = first + op_random_below(random, c->n_expert - first);
            left -= !taken[e];
            taken[e] = 1;
        }
        for (int e = 0; e < c->n_expert; e++)
            if (taken[e])
                expert[row * c->topk + n++] = e;
        row_slot[row] = op_random_below(random, c->n_slot + 1) - 1;
    }
    for (int row = 1; c->kind == BAD_ROWS && row < c->n_row; row += 3)
        x[row * c->d + row % c->d] = row % 2 ? 0x7fff : 0x7f80;
}

/* ---- launches ------------------------------------------------------------------------------------------------------ */

/* Up to 8 places a tile of MXFP4 experts is one of few. */
enum { FEW = 8 };

static int any_adapter(const bi_adapter lora[SLOTS], int n_slot) {
    for (int i = 0; i < n_slot; i++)
        if (lora[i].a.data)
            return 1;
    return 0;
}

static void check_launches(twin *t, const experts_case *c, bi_adapter lora[3][2][SLOTS], const char *what) {
    char list[120];
    /* T of gate and up together, and of down, where an adapter acts on them */
    const int n_t = (any_adapter(lora[0][TWIN_CUDA], c->n_slot) || any_adapter(lora[1][TWIN_CUDA], c->n_slot)) +
                    any_adapter(lora[2][TWIN_CUDA], c->n_slot);
    /* MXFP4: tiles of few in one launch, and where a step has rows for more, one a class of tiles that those can fill: up to 64, 96, 128,
     * 144, 160 places; their rows are put into blocks before, counted with the plan. bf16: one for all. */
    const int many = c->n_row > FEW, classes = many * (1 + (c->n_row > 64) + (c->n_row > 96) + (c->n_row > 128) + (c->n_row > 144));
    const int n_plan = c->fp4 ? 1 + many : 1, n = c->fp4 ? 1 + classes : 1;
    const int used = snprintf(list, sizeof list, "experts_plan %d, experts_up %d, experts_down %d", n_plan, n, n);
    if (n_t)
        snprintf(list + used, sizeof list - (size_t)used, ", experts_t %d", n_t);
    twin_launched(t, what, list);
}

/* ---- one case ------------------------------------------------------------------------------------------------------ */

static void run_case(twin *t, op_random *random, const experts_case *c) {
    char what[200];
    bi_adapter lora[3][2][SLOTS];
    twin_reset(t);
    bi_bf16 *x = TWIN_ARRAY(t, bi_bf16, "x", c->n_row * c->d + c->shift) + c->shift;
    bi_bf16 *y = TWIN_ARRAY(t, bi_bf16, "y", c->n_row * c->topk * c->d + c->shift) + c->shift;
    int32_t *expert = TWIN_ARRAY(t, int32_t, "experts", c->n_row * c->topk), *row_slot = TWIN_ARRAY(t, int32_t, "slots", c->n_row);
    uint32_t *fault = TWIN_ARRAY(t, uint32_t, "faults", c->n_row);
    make_rows(random, c, x, expert, row_slot);
    for (int i = 0; i < c->n_row; i++)
        fault[i] = i % 11 == 10 ? 2 : 0;
    const twin_mat w1 = make_map(t, random, c, c->d_ff, c->d, 0), w3 = make_map(t, random, c, c->d_ff, c->d, 0);
    const twin_mat w2 = make_map(t, random, c, c->d, c->d_ff, 1);
    for (int m = 0; m < 3; m++)
        make_lora(t, random, c, m == 2 ? c->d : c->d_ff, m == 2 ? c->d_ff : c->d, lora[m]);
    twin_begin(t);
    TWIN_RUNS(t, side) {
        const int i = side;
        bi_experts_args a = {.n_row = c->n_row, .d = c->d, .d_ff = c->d_ff, .n_expert = c->n_expert, .topk = c->topk,
                             .x = twin_at(t, side, x), .expert = twin_at(t, side, expert), .w1 = w1.side[i], .w3 = w3.side[i],
                             .w2 = w2.side[i], .y = twin_at(t, side, y), .fault = {twin_at(t, side, fault), CODE}};
        a.act = c->silu ? (bi_act){0, 0.0f, 0.0f} : (bi_act){1, 4.0f, 25.0f};
        if (c->n_slot) {
            a.lora1 = lora[0][i];
            a.lora3 = lora[1][i];
            a.lora2 = lora[2][i];
            a.n_slot = c->n_slot;
            a.row_slot = twin_at(t, side, row_slot);
        }
        CHECK_OK(t->backend[i].op->experts(t->backend[i].ctx, &a));
    }
    snprintf(what, sizeof what, "%d rows, %d -> %d, %d of %d experts, %s, %d slots of rank %d, kind %d, hot %d, shift %d", c->n_row, c->d,
             c->d_ff, c->topk, c->n_expert, c->fp4 ? "MXFP4" : "bf16", c->n_slot, c->rank, (int)c->kind, c->hot, c->shift);
    twin_compare(t, what);
    check_launches(t, c, lora, what);
}

static void open_small(twin *t) {
    const bi_limits limits = {.n_row = ROW_MAX, .d_in = 96, .d_out = 96, .rank = RANK_MAX, .n_slot = SLOTS, .n_expert = FEW_EXPERTS,
                              .n_expert_topk = 4, .d_expert = 320, .d_expert_ff = 320, .d_model = 320};
    twin_open(t, &limits, 16 * MIB);
}

START_TEST(shapes_and_kinds) {
    static const struct {
        int n_row, d, d_ff;
    } shape[] = {{5, 64, 64}, {40, 16, 32}, {7, 40, 24}, {3, 96, 96}, {70, 32, 16}, {4, 7, 33}, {130, 72, 136}, {64, 320, 160}, {9, 128, 288}};
    static const int ranks[] = {8, 16, 32, 40, 1, 48};
    twin t;
    op_random random = {test_seed(), 0};
    open_small(&t);
    for (int round = 0; round < 9 * KINDS * 2; round++) {
        const int s = round % 9;
        experts_case c = {.n_row = shape[s].n_row, .d = shape[s].d, .d_ff = shape[s].d_ff, .kind = (input_kind)(round / 9 % KINDS)};
        c.fp4 = c.d % 32 == 0 && c.d_ff % 32 == 0 && round % 2 == 0;
        c.n_expert = 4 + op_random_below(&random, FEW_EXPERTS - 3);
        c.topk = 1 + op_random_below(&random, 4);
        c.n_slot = op_random_below(&random, SLOTS + 1);
        c.rank = ranks[op_random_below(&random, 6)];
        c.silu = op_random_below(&random, 3) == 0;
        c.shift = op_random_below(&random, 4) == 0;
        run_case(&t, &random, &c);
    }
    twin_close(&t);
}
END_TEST

/* Rows of one expert at each width of the tensor-core step, one below and one above; tiles that split. */
START_TEST(every_width) {
    static const int hot[] = {1,  7,  8,  9,  15,  16,  17,  31,  32,  33,  47,  48,  49,  63,  64,  65,  79,  80,  81,  95,  96, 97,
                              112, 113, 127, 128, 129, 136, 137, 143, 144, 145, 152, 153, 159, 160, 161, 168, 192, 320, 321, 397};
    twin t;
    op_random random = {test_seed(), 1};
    open_small(&t);
    for (int i = 0; i < (int)(sizeof hot / sizeof hot[0]); i++)
        for (int fp4 = 0; fp4 < 2; fp4++) {
            experts_case c = {.n_row = hot[i] + 3, .d = 128, .d_ff = 160, .n_expert = 3, .topk = 1, .fp4 = fp4, .hot = hot[i], .rank = 32};
            c.n_slot = (i + fp4) % 4;
            run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

/* The plan is one block up to 4,095 pairs, then a cluster of one a 2,048 pairs, at most eight; more experts than it has threads, and so
 * many that its shared memory takes the counts of fewer warps. */
typedef struct plan_case {
    int n_row, topk, n_expert, hot;
} plan_case;

static void check_plans(const plan_case *plan, size_t n) {
    const bi_limits limits = {.n_row = 4100, .d_in = 32, .d_out = 32, .rank = 16, .n_slot = 1, .n_expert = EXPERT_MAX, .n_expert_topk = 4,
                              .d_expert = 32, .d_expert_ff = 32, .d_model = 32};
    twin t;
    op_random random = {test_seed(), 5};
    twin_open(&t, &limits, 16 * MIB);
    for (size_t i = 0; i < n; i++)
        for (int fp4 = 0; fp4 < 2; fp4++) {
            experts_case c = {.n_row = plan[i].n_row, .d = 32, .d_ff = 32, .n_expert = plan[i].n_expert, .topk = plan[i].topk, .fp4 = fp4};
            c.hot = plan[i].hot;
            c.rank = 16;
            c.n_slot = (int)(i + (size_t)fp4) % 2;
            run_case(&t, &random, &c);
        }
    twin_close(&t);
}
#define CHECK_PLANS(plans) check_plans((plans), sizeof(plans) / sizeof *(plans))

START_TEST(plans_of_one_block) {
    static const plan_case plan[] = {{4095, 1, 16, 0}, {1365, 3, 16, 0}, {1023, 4, 2000, 0}};
    CHECK_PLANS(plan);
}
END_TEST

START_TEST(plans_of_two_blocks) {
    static const plan_case plan[] = {{4096, 1, 16, 900}, {1024, 4, 16, 0}, {4097, 1, 1025, 0}, {1024, 4, 1024, 0}, {1024, 4, 1025, 0}};
    CHECK_PLANS(plan);
}
END_TEST

START_TEST(plans_of_large_clusters) {
    static const plan_case plan[] = {{4095, 4, 16, 0}, {4096, 4, 16, 0}, {4100, 4, 16, 0}};
    CHECK_PLANS(plan);
}
END_TEST

START_TEST(plans_of_many_experts) {
    static const plan_case plan[] = {{4096, 4, 2000, 0}};
    CHECK_PLANS(plan);
}
END_TEST

/* Inf and NaN in B of one adapter, in tiles that it shares with others. SiTU keeps h finite or NaN. */
START_TEST(wild_adapters) {
    static const int rows[] = {3, 8, 14, 30, 70, 150};
    twin t;
    op_random random = {test_seed(), 4};
    open_small(&t);
    for (int i = 0; i < 24; i++) {
        experts_case c = {.n_row = rows[i % 6], .d = 128, .d_ff = 160, .n_expert = 2, .topk = 1, .fp4 = i / 6 % 2, .kind = WILD_B, .rank = 16};
        c.n_slot = SLOTS;
        run_case(&t, &random, &c);
    }
    twin_close(&t);
}
END_TEST

/* Two experts of Kimi K3.1 with a few and with many rows; bf16 experts of Kimi-Linear. */
START_TEST(real_widths) {
    const bi_limits limits = {.n_row = 160, .d_in = 3584, .d_out = 3584, .rank = 32, .n_slot = 2, .n_expert = 4, .n_expert_topk = 2,
                              .d_expert = 3584, .d_expert_ff = 3072, .d_model = 3584};
    twin t;
    op_random random = {test_seed(), 2};
    twin_open(&t, &limits, 16 * MIB);
    const experts_case large = {.n_row = 153, .d = 3584, .d_ff = 3072, .n_expert = 2, .topk = 1, .fp4 = 1, .hot = 147, .n_slot = 2, .rank = 32};
    const experts_case linear = {.n_row = 90, .d = 2304, .d_ff = 1024, .n_expert = 4, .topk = 2, .hot = 70, .silu = 1};
    run_case(&t, &random, &large);
    run_case(&t, &random, &linear);
    twin_close(&t);
}
END_TEST

START_TEST(combine_rows) {
    static const int widths[] = {1, 7, 8, 64, 130, 3584}, topks[] = {1, 2, 8, 16}, rows[] = {1, 3, 70};
    const bi_limits limits = {.n_row = 70, .d_model = 3584, .d_expert = 3584, .d_expert_ff = 64, .n_expert = 16, .n_expert_topk = 16};
    twin t;
    op_random random = {test_seed(), 3};
    twin_open(&t, &limits, 32 * MIB);
    for (int i = 0; i < 6 * 4 * 3; i++) {
        const int d = widths[i % 6], topk = topks[i / 6 % 4], n_row = rows[i / 24], shift = i % 5 == 4;
        char what[80];
        twin_reset(&t);
        bi_bf16 *e = TWIN_ARRAY(&t, bi_bf16, "experts' rows", n_row * topk * d + shift) + shift, *y = TWIN_ARRAY(&t, bi_bf16, "y", n_row * d);
        float *p = TWIN_ARRAY(&t, float, "p", n_row * topk);
        op_random_bf16s(&random, i % 7 == 3 ? 0x1p-126f : 1.0f, e, n_row * topk * d);
        op_random_normals(&random, 0.3f, p, n_row * topk);
        twin_begin(&t);
        TWIN_RUNS(&t, side) {
            const bi_combine_args a = {.n_row = n_row, .d = d, .topk = topk, .e = twin_at(&t, side, e), .p = twin_at(&t, side, p),
                                       .y = twin_at(&t, side, y)};
            CHECK_OK(t.backend[side].op->combine(t.backend[side].ctx, &a));
        }
        snprintf(what, sizeof what, "%d rows of %d from %d, shift %d", n_row, d, topk, shift);
        twin_compare(&t, what);
        twin_launched(&t, what, "combine 1");
    }
    twin_close(&t);
}
END_TEST

START_TEST(shapes_refused) {
    twin t;
    open_small(&t);
    const bi_mat up = {.data = &t, .n_out = 64, .n_in = 32}, down = {.data = &t, .n_out = 32, .n_in = 64};
    const bi_experts_args good = {.n_row = 0, .d = 32, .d_ff = 64, .n_expert = 4, .topk = 2, .w1 = up, .w3 = up, .w2 = down};
    for (int side = 0; side < 2; side++) {
        br_status (*experts)(bi_ctx *, const bi_experts_args *) = t.backend[side].op->experts;
        bi_experts_args bad = good;
        CHECK_OK(experts(t.backend[side].ctx, &good));
        bad.w2 = up;
        CHECK_FAILS(experts(t.backend[side].ctx, &bad), BR_E_SHAPE);
        bad = good;
        bad.n_row = ROW_MAX + 1;
        CHECK_FAILS(experts(t.backend[side].ctx, &bad), BR_E_SHAPE);
        bad = good;
        bad.topk = 5;
        CHECK_FAILS(experts(t.backend[side].ctx, &bad), BR_E_SHAPE);
    }
    twin_close(&t);
}
END_TEST

Suite *cuda_experts_suite(void) {
    Suite *suite = suite_create("cuda_experts");
    CUDA_CASE(suite, shapes_and_kinds);
    CUDA_CASE(suite, every_width);
    CUDA_CASE(suite, plans_of_one_block);
    CUDA_CASE(suite, plans_of_two_blocks);
    CUDA_CASE(suite, plans_of_large_clusters);
    CUDA_CASE(suite, plans_of_many_experts);
    CUDA_CASE(suite, wild_adapters);
    CUDA_CASE(suite, real_widths);
    CUDA_CASE(suite, combine_rows);
    CUDA_CASE(suite, shapes_refused);
    return suite;
}
