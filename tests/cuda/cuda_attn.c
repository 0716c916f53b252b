/* bi_latent_store, bi_attn, bi_attn_gate on the GPU against the oracle. */
#include "cuda_cache.h"
#include "cuda_case.h"

#include <math.h>
#include <stdio.h>

enum { CODE = 41, SEQS = 3, POS_MAX = 4096, BLOCKS = POS_MAX / BR_PAGE_TOK, HEADS_MAX = 128, ROWS_MAX = 8192 };

static twin t;

typedef enum attn_choice { CHOICE_FREE, CHOICE_ALL } attn_choice;

typedef struct attn_case {
    const char *name;
    int32_t n_head, d_kv_latent, d_rope, topk; /* topk 0: no list */
    bi_seg seg[CUDA_CACHE_SEG_MAX];            /* of the attention step; every position before its end is in the cache */
    float spread;                              /* of queries: how far scores lie apart */
    float size;                                /* of latents */
    int rising, plateau, contiguous, loose, padded, faults;
    attn_choice choice;
} attn_case;

static int seg_count(const attn_case *c) {
    int n = 0;
    while (n < CUDA_CACHE_SEG_MAX && c->seg[n].n_row)
        n++;
    return n;
}

/* k of the visible positions, or all, rising. */
static int32_t choose(op_random *random, int32_t visible, int32_t k, attn_choice choice, int32_t *select) {
    int32_t n = 0, left = visible;
    k = k < left && choice != CHOICE_ALL ? k : left;
    for (int32_t j = 0; j < visible; j++)
        if (op_random_below(random, left--) < k - n)
            select[n++] = j;
    return n;
}

static void fill_latents(const attn_case *c, op_random *random, const int32_t *n_pos, bi_bf16 *x, int32_t x_ld) {
    const int32_t d = c->d_kv_latent + c->d_rope;
    for (int s = 0, row = 0; s < SEQS; s++) {
        for (int32_t j = 0; j < n_pos[s]; j++, row++) {
            op_random_bf16s(random, c->size, x + (int64_t)row * x_ld, d);
            if (c->plateau)
                memcpy(x + (int64_t)row * x_ld, x, sizeof *x * (size_t)d);
            for (int32_t k = 0; k < d && c->rising; k++)
                x[(int64_t)row * x_ld + k] = bi_round((float)(c->rising * j) * 0.02f);
        }
    }
}

/* A latent of sequence 0 and a query turn bad. */
static void spoil(const attn_case *c, bi_bf16 *x, int32_t x_ld, bi_bf16 *q) {
    x[(int64_t)(c->seg[0].pos / 2) * x_ld + 1] = 0x7fc1;
    q[(int64_t)(c->seg[0].n_row) * c->n_head * c->d_kv_latent] = 0x7f80; /* first row of the second segment */
}

static void check_launches(const attn_case *c, const bi_batch *step) {
    char list[100];
    /* A row has parts of 2,048 entries, of its list or of what it sees; where it may have several, the merge follows. */
    const int32_t visible = step->pos_max + 1, most = c->topk ? c->choice == CHOICE_ALL ? POS_MAX : c->topk : visible;
    const int several = (most < visible ? most : visible) > BI_ATT_PART;
    /* Latents of 512 + 64 on 16 bytes take the wide form, all others scores and then values; the rows of each case fit scratch at once. */
    const int wide = c->d_kv_latent == 512 && c->d_rope == 64 && !c->loose;
    snprintf(list, sizeof list, "latent_store 1, %s%s", wide ? "attn_fused 1" : "attn_score 1, attn_value 1", several ? ", attn_merge 1" : "");
    twin_launched(&t, c->name, list);
}

static void check_attn(const attn_case *c) {
    const int n_seg = seg_count(c);
    const int32_t d_latent = c->d_kv_latent + c->d_rope, gap = c->loose ? 3 : 0, x_ld = d_latent + gap, head_ld = c->d_rope + gap;
    int32_t n_pos[SEQS] = {0};
    op_random random = {77, 0};
    twin_reset(&t);
    for (int i = 0; i < n_seg; i++)
        n_pos[c->seg[i].seq] = c->seg[i].pos + c->seg[i].n_row;
    size_t bytes[2];
    for (int side = 0; side < 2; side++)
        bytes[side] = t.backend[side].op->latent_block_bytes(d_latent);
    cuda_cache cache = cuda_cache_of(&t, bytes, SEQS, BLOCKS, !c->contiguous, c->loose ? 4 : 0, &random);
    twin_batch fill = cuda_cache_fill(&t, n_pos, SEQS), step = twin_batch_of(&t, c->seg, n_seg);
    const int32_t n = step.side[0].n_row, select_ld = c->choice == CHOICE_ALL ? POS_MAX : c->topk;
    if (c->padded)
        cuda_cache_pad(&t, &step, c->seg);
    bi_bf16 *x = TWIN_ARRAY(&t, bi_bf16, "x", (int64_t)fill.side[0].n_row * x_ld);
    bi_bf16 *q = TWIN_ARRAY(&t, bi_bf16, "q", (int64_t)(n + 2) * c->n_head * c->d_kv_latent);
    bi_bf16 *q_r = TWIN_ARRAY(&t, bi_bf16, "q_r", (int64_t)(n + 2) * c->n_head * head_ld + 8);
    bi_bf16 *z = TWIN_ARRAY(&t, bi_bf16, "z", (int64_t)(n + 2) * c->n_head * c->d_kv_latent);
    int32_t *select = TWIN_ARRAY(&t, int32_t, "select", (int64_t)(n + 2) * (c->topk ? select_ld : 1));
    int32_t *n_select = TWIN_ARRAY(&t, int32_t, "n_select", n + 2);
    uint32_t *fault = TWIN_ARRAY(&t, uint32_t, "fault", n + 2);
    memset(fault, 0, sizeof *fault * (size_t)(n + 2));
    fill_latents(c, &random, n_pos, x, x_ld);
    op_random_bf16s(&random, c->spread, q, n * c->n_head * c->d_kv_latent);
    op_random_bf16s(&random, c->spread, q_r, n * c->n_head * head_ld);
    if (c->faults)
        spoil(c, x, x_ld, q);
    for (int32_t row = 0; row < n && c->topk; row++) {
        int i = 0;
        int32_t first = 0;
        while (row - first >= c->seg[i].n_row)
            first += c->seg[i++].n_row;
        n_select[row] = choose(&random, c->seg[i].pos + row - first + 1, c->topk, c->choice, select + (int64_t)row * select_ld);
    }
    twin_begin(&t);
    TWIN_RUNS(&t, s) {
        const int side = s;
        const bi_ops *op = t.backend[side].op;
        bi_latent_store_args store = {&fill.side[side], d_latent, twin_at(&t, s, x), x_ld, cache.side[side]};
        bi_attn_args attn = {&step.side[side], c->n_head, c->d_kv_latent, c->d_rope, twin_at(&t, s, q), twin_at(&t, s, q_r),
                             (int64_t)c->n_head * head_ld, head_ld, cache.side[side], c->topk ? twin_at(&t, s, select) : NULL,
                             c->topk ? twin_at(&t, s, n_select) : NULL, select_ld, 1.0f / sqrtf((float)d_latent), twin_at(&t, s, z),
                             {twin_at(&t, s, fault), CODE}};
        CHECK_OK(op->latent_store(t.backend[side].ctx, &store));
        CHECK_OK(op->attn(t.backend[side].ctx, &attn));
    }
    CHECK_OK(twin_wait(&t));
    int n_fault = 0;
    for (int32_t row = 0; row < n; row++) {
        const size_t row_bytes = sizeof *z * (size_t)(c->n_head * c->d_kv_latent);
        n_fault += fault[row] != 0;
        if (fault[row])
            cuda_cache_forgive(&t, z + (int64_t)row * c->n_head * c->d_kv_latent, row_bytes);
    }
    ck_assert_int_eq(n_fault != 0, c->faults);
    twin_compare(&t, c->name);
    check_launches(c, &step.side[TWIN_CUDA]);
}

#define NANO .n_head = 4, .d_kv_latent = 64, .d_rope = 16, .spread = 3, .size = 1
#define K31 .n_head = 96, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1

static void check_all(const attn_case *c, size_t n) {
    for (size_t i = 0; i < n; i++)
        check_attn(&c[i]);
}
#define CHECK_ALL(cases) check_all((cases), sizeof(cases) / sizeof *(cases))

START_TEST(every_visible_position) {
    static const attn_case cases[] = {
        {"first rows", NANO, .seg = {{0, 0, 70, 0}, {2, 0, 1, 0}}},
        {"block edges", NANO, .seg = {{1, 0, 5, 61}, {0, 0, 5, 509}, {2, 0, 4, 574}}},
        {"second round", NANO, .seg = {{0, 0, 3, 1090}, {1, 0, 1, 700}, {2, 0, 2, 63}}},
        {"contiguous", NANO, .contiguous = 1, .seg = {{2, 0, 9, 255}, {0, 0, 2, 600}, {1, 0, 1, 5}}},
        {"a row of padding", NANO, .padded = 1, .seg = {{2, 0, 3, 100}, {1, 0, 1, 5}}},
        {"rows off 16 bytes", NANO, .loose = 1, .seg = {{2, 0, 3, 130}, {1, 0, 1, 5}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(selections) {
    static const attn_case cases[] = {
        {"one", NANO, .topk = 1, .seg = {{0, 0, 5, 0}, {2, 0, 3, 700}}},
        {"few", NANO, .topk = 7, .seg = {{0, 0, 9, 3}, {2, 0, 3, 1000}}},
        {"many", NANO, .topk = 300, .seg = {{0, 0, 2, 290}, {1, 0, 3, 1500}}},
        {"a thousand", NANO, .topk = 1100, .seg = {{0, 0, 1, 2000}, {1, 0, 1, 1099}}},
        {"a block less one", NANO, .topk = 63, .seg = {{0, 0, 2, 900}}},
        {"a block", NANO, .topk = 64, .seg = {{0, 0, 2, 900}}},
        {"a block and one", NANO, .topk = 65, .seg = {{0, 0, 2, 900}}},
        {"two blocks and some", NANO, .topk = 140, .seg = {{0, 0, 3, 1100}}},
        {"all", NANO, .topk = 4000, .choice = CHOICE_ALL, .seg = {{0, 0, 3, 510}, {1, 0, 2, 64}}},
        {"contiguous", NANO, .topk = 50, .contiguous = 1, .seg = {{0, 0, 3, 510}, {1, 0, 2, 64}}},
        {"padding", NANO, .topk = 50, .padded = 1, .seg = {{0, 0, 3, 510}, {1, 0, 2, 64}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(values_of_every_kind) {
    static const attn_case cases[] = {
        {"wide scores", .n_head = 4, .d_kv_latent = 64, .d_rope = 16, .spread = 60, .size = 1, .seg = {{0, 0, 2, 1200}}},
        {"rising scores", NANO, .rising = 1, .seg = {{0, 0, 2, 1200}}},
        {"falling scores", NANO, .rising = -1, .seg = {{0, 0, 2, 1200}}},
        {"equal latents", NANO, .plateau = 1, .seg = {{0, 0, 2, 900}}},
        {"subnormal latents", .n_head = 4, .d_kv_latent = 64, .d_rope = 16, .spread = 1, .size = 0x1p-128f, .seg = {{0, 0, 2, 300}}},
        {"zeros", .n_head = 4, .d_kv_latent = 64, .d_rope = 16, .spread = 0, .size = 1, .topk = 90, .seg = {{0, 0, 2, 300}}},
        {"huge", .n_head = 4, .d_kv_latent = 64, .d_rope = 16, .spread = 0x1p-60f, .size = 0x1p100f, .seg = {{0, 0, 2, 300}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(odd_shapes) {
    static const attn_case cases[] = {
        {"one head of one", .n_head = 1, .d_kv_latent = 1, .d_rope = 0, .spread = 1, .size = 1, .seg = {{0, 0, 3, 70}}},
        {"odd widths", .n_head = 5, .d_kv_latent = 33, .d_rope = 7, .spread = 2, .size = 1, .topk = 80, .seg = {{0, 0, 2, 400}, {1, 0, 1, 3}}},
        {"odd widths, loose", .n_head = 3, .d_kv_latent = 130, .d_rope = 5, .spread = 2, .size = 1, .loose = 1, .seg = {{0, 0, 2, 200}}},
        {"no rope", .n_head = 32, .d_kv_latent = 72, .d_rope = 0, .spread = 2, .size = 1, .seg = {{0, 0, 2, 200}}},
        {"rope alone is a chunk", .n_head = 33, .d_kv_latent = 128, .d_rope = 64, .spread = 2, .size = 1, .seg = {{0, 0, 1, 140}}},
        {"so many elements that a rounding of L shows", .n_head = 32, .d_kv_latent = 512, .d_rope = 16, .spread = 3, .size = 1,
         .seg = {{0, 0, 25, 60}}},
        {"more heads than a group", .n_head = 97, .d_kv_latent = 136, .d_rope = 8, .spread = 2, .size = 1, .topk = 70, .seg = {{0, 0, 2, 200}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* Many rows, at widths that the oracle is quick at. */
START_TEST(many_rows) {
    static const attn_case cases[] = {
        {"32 heads, dense", .n_head = 32, .d_kv_latent = 64, .d_rope = 16, .spread = 30, .size = 1, .seg = {{0, 0, 40, 480}, {1, 0, 3, 1100}}},
        {"32 heads, a list", .n_head = 32, .d_kv_latent = 64, .d_rope = 16, .spread = 9, .size = 1, .topk = 140,
         .seg = {{0, 0, 30, 1100}, {2, 0, 10, 20}}},
        {"96 heads", .n_head = 96, .d_kv_latent = 72, .d_rope = 8, .spread = 9, .size = 1, .topk = 300, .padded = 1,
         .seg = {{0, 0, 20, 600}, {1, 0, 15, 60}, {2, 0, 1, 1300}}},
        {"96 heads, rising scores", .n_head = 96, .d_kv_latent = 40, .d_rope = 8, .spread = 2, .size = 1, .rising = 1,
         .seg = {{0, 0, 31, 1200}, {1, 0, 9, 60}}},
        {"96 heads, bad rows, loose", .n_head = 96, .d_kv_latent = 33, .d_rope = 8, .spread = 2, .size = 1, .loose = 1, .faults = 1, .topk = 20,
         .seg = {{0, 0, 30, 70}, {1, 0, 9, 60}}},
        {"96 heads, 80 rows", .n_head = 96, .d_kv_latent = 16, .d_rope = 8, .spread = 2, .size = 1, .topk = 90,
         .seg = {{0, 0, 70, 170}, {1, 0, 60, 60}, {2, 0, 10, 200}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(full_width) {
    static const attn_case cases[] = {
        {"32 heads", .n_head = 32, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1, .seg = {{0, 0, 2, 600}}},
        {"32 heads, many rows", .n_head = 32, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1, .seg = {{0, 0, 30, 200}, {1, 0, 3, 1}}},
        {"32 heads, as many as fill the GPU", .n_head = 32, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1, .topk = 90,
         .seg = {{0, 0, 60, 200}, {1, 0, 60, 1}, {2, 0, 10, 600}}},
        {"96 heads, as many as fill the GPU", K31, .topk = 100, .seg = {{0, 0, 30, 300}, {1, 0, 30, 20}, {2, 0, 3, 700}}},
        {"96 heads, dense", K31, .seg = {{0, 0, 58, 10}, {1, 0, 4, 540}}},
        {"96 heads, one row", K31, .topk = 200, .seg = {{0, 0, 1, 2000}}},
        {"96 heads, many rows", K31, .topk = 70, .seg = {{0, 0, 18, 300}, {1, 0, 18, 60}, {2, 0, 1, 700}}},
        {"96 heads, a block a row, many units a block of the grid", K31, .topk = 40, .seg = {{0, 0, 90, 60}, {1, 0, 60, 0}, {2, 0, 10, 90}}},
        {"96 heads, padded", K31, .topk = 90, .padded = 1, .seg = {{0, 0, 8, 300}}},
        {"96 heads, rising", K31, .rising = 1, .seg = {{0, 0, 9, 300}}},
        {"96 heads, bad rows", K31, .faults = 1, .topk = 20, .seg = {{0, 0, 30, 70}, {1, 0, 9, 60}}},
        {"90 heads", .n_head = 90, .d_kv_latent = 512, .d_rope = 64, .spread = 30, .size = 1, .topk = 130, .seg = {{0, 0, 9, 200}}},
        {"40 heads, contiguous", .n_head = 40, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1, .contiguous = 1, .seg = {{0, 0, 14, 150}}},
        {"96 heads, off 16 bytes", K31, .loose = 1, .topk = 70, .seg = {{0, 0, 18, 100}}},
        {"96 heads, wider than the wide path", .n_head = 96, .d_kv_latent = 576, .d_rope = 64, .spread = 3, .size = 1, .topk = 40,
         .seg = {{0, 0, 34, 70}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* Rows of more than 2,048 entries, beside rows of fewer. */
START_TEST(several_parts) {
    static const attn_case cases[] = {
        {"dense", NANO, .seg = {{0, 0, 4, 2045}, {1, 0, 2, 4093}, {2, 0, 3, 100}}},
        {"selections", NANO, .topk = 2500, .seg = {{0, 0, 2, 2300}, {1, 0, 1, 3600}, {2, 0, 3, 2047}}},
        {"rising", NANO, .rising = 1, .choice = CHOICE_ALL, .topk = 1, .seg = {{0, 0, 1, 4090}}},
        {"falling, odd widths", .n_head = 5, .d_kv_latent = 33, .d_rope = 7, .spread = 2, .size = 1, .rising = -1, .seg = {{0, 0, 1, 4000}}},
        {"96 heads, a few rows", K31, .seg = {{0, 0, 1, 2100}}},
        {"96 heads", K31, .seg = {{0, 0, 4, 2046}, {1, 0, 2, 100}}},
        {"32 heads", .n_head = 32, .d_kv_latent = 512, .d_rope = 64, .spread = 3, .size = 1, .topk = 2300,
         .seg = {{0, 0, 10, 2400}, {1, 0, 4, 2046}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* Only rows that read a bad latent or are of a bad query have a fault; the bits of all others stay. */
START_TEST(faults) {
    static const attn_case cases[] = {
        {"a bad latent and a bad query", NANO, .faults = 1, .seg = {{0, 0, 3, 70}, {1, 0, 2, 9}}},
        {"selected or not", NANO, .faults = 1, .topk = 30, .seg = {{0, 0, 12, 70}, {1, 0, 2, 90}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(gates) {
    for (int32_t d = 1; d <= 400; d = d * 3 + 2) {
        const int32_t n_row = 7, n = n_row * d;
        op_random random = {(uint64_t)d, 0};
        twin_reset(&t);
        float *o = TWIN_ARRAY(&t, float, "o", n);
        bi_bf16 *gate = TWIN_ARRAY(&t, bi_bf16, "gate", n), *y = TWIN_ARRAY(&t, bi_bf16, "y", n), *bare = TWIN_ARRAY(&t, bi_bf16, "bare", n);
        op_random_normals(&random, d % 2 ? 1.0f : 0x1p-127f, o, n);
        op_random_bf16s(&random, d % 2 ? 3.0f : 90.0f, gate, n);
        twin_begin(&t);
        TWIN_RUNS(&t, side) {
            bi_attn_gate_args a = {n_row, d, twin_at(&t, side, o), twin_at(&t, side, gate), twin_at(&t, side, y)};
            CHECK_OK(t.backend[side].op->attn_gate(t.backend[side].ctx, &a));
            a.gate = NULL;
            a.y = twin_at(&t, side, bare);
            CHECK_OK(t.backend[side].op->attn_gate(t.backend[side].ctx, &a));
        }
        twin_compare(&t, "a gate");
        twin_launched(&t, "a gate", "attn_gate 2");
    }
}
END_TEST

START_TEST(refuses_bad_shapes) {
    bi_batch batch = {.n_row = 0};
    bi_attn_args good = {.batch = &batch, .n_head = 2, .d_kv_latent = 16, .d_rope = 16, .select_ld = 1};
    good.cache.block_bytes = t.backend[TWIN_CUDA].op->latent_block_bytes(32);
    bi_attn_args a = good;
    bi_ctx *ctx = t.backend[TWIN_CUDA].ctx;
    const bi_ops *op = t.backend[TWIN_CUDA].op;
    CHECK_OK(op->attn(ctx, &a));
#define REFUSED(change, status) ((void)(a = good, change)); CHECK_FAILS(op->attn(ctx, &a), status)
    REFUSED(a.n_head = HEADS_MAX + 1, BR_E_SHAPE);
    REFUSED(a.n_head = 0, BR_E_SHAPE);
    REFUSED(a.d_kv_latent = 0, BR_E_SHAPE);
    REFUSED(a.d_rope = -1, BR_E_SHAPE);
    REFUSED(a.cache.block_bytes -= 4, BR_E_SHAPE);
    REFUSED(a.cache.block_bytes += 2, BR_E_ALIGN);
#undef REFUSED
}
END_TEST

static void set_up(void) {
    const bi_limits limits = {.n_row = ROWS_MAX, .n_head = HEADS_MAX, .d_kv_latent = 576, .d_rope = 64, .n_pos = POS_MAX, .d_in = 64, .d_out = 64};
    twin_open(&t, &limits, (size_t)96 << 20);
}

static void tear_down(void) {
    twin_close(&t);
}

Suite *cuda_attn_suite(void);
Suite *cuda_attn_suite(void) {
    Suite *suite = suite_create("cuda_attn");
    CUDA_CASE_IN(suite, every_visible_position, set_up, tear_down);
    CUDA_CASE_IN(suite, selections, set_up, tear_down);
    CUDA_CASE_IN(suite, values_of_every_kind, set_up, tear_down);
    CUDA_CASE_IN(suite, odd_shapes, set_up, tear_down);
    CUDA_CASE_IN(suite, many_rows, set_up, tear_down);
    CUDA_CASE_IN(suite, full_width, set_up, tear_down);
    CUDA_CASE_IN(suite, several_parts, set_up, tear_down);
    CUDA_CASE_IN(suite, faults, set_up, tear_down);
    CUDA_CASE_IN(suite, gates, set_up, tear_down);
    CUDA_CASE_IN(suite, refuses_bad_shapes, set_up, tear_down);
    return suite;
}
