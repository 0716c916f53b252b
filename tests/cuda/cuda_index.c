/* bi_index_store, bi_index_select on the GPU against the oracle. */
#include "cuda_cache.h"
#include "cuda_case.h"

#include <math.h>

enum { CODE = 43, SEQS = 3, MANY = 1 << 20, POS_MAX = MANY, ROWS_MAX = MANY, HEADS_MAX = 64, D_MAX = 160 };

static twin t;

typedef struct index_case {
    const char *name;
    int32_t n_head, d, topk;
    bi_seg seg[CUDA_CACHE_SEG_MAX]; /* of the selecting step; every position before its end is in the cache */
    float size;                     /* of keys */
    int plateau;                    /* keys repeat every so many positions: ties */
    int32_t flat;                   /* from this position on all keys are the same */
    int no_weight, contiguous, loose, padded, faults;
} index_case;

static int seg_count(const index_case *c) {
    int n = 0;
    while (n < CUDA_CACHE_SEG_MAX && c->seg[n].n_row)
        n++;
    return n;
}

static void fill_keys(const index_case *c, op_random *random, bi_bf16 *k, int32_t n) {
    op_random_bf16s(random, c->size, k, n * c->d);
    for (int32_t i = 0; c->plateau && i < n; i++)
        memcpy(k + (int64_t)i * c->d, k + (int64_t)(i % c->plateau) * c->d, sizeof *k * (size_t)c->d);
    for (int32_t i = 0; i < n; i += 5) /* keys far apart in size, so that codes reach their smallest numbers */
        k[(int64_t)i * c->d] = bi_round(c->size * (i % 2 ? 300.0f : -0.001f));
    for (int32_t i = c->flat + 1; c->flat && i < n; i++)
        memcpy(k + (int64_t)i * c->d, k + (int64_t)c->flat * c->d, sizeof *k * (size_t)c->d);
}

/* A key of sequence 0, a query of the first segment and a weight of the second turn bad. */
static void spoil(const index_case *c, bi_bf16 *k, bi_bf16 *q, float *w) {
    k[(int64_t)(c->seg[0].pos / 2) * c->d + 1] = 0x7fc1;
    q[c->n_head * c->d - 1] = 0xff80;
    w[(int64_t)c->seg[0].n_row * c->n_head + 1] = INFINITY;
}

static void check_index(const index_case *c, int with_score) {
    const int n_seg = seg_count(c);
    int32_t n_pos[SEQS] = {0}, most = 0;
    op_random random = {99, 0};
    twin_reset(&t);
    for (int i = 0; i < n_seg; i++) {
        n_pos[c->seg[i].seq] = c->seg[i].pos + c->seg[i].n_row;
        most = most > n_pos[c->seg[i].seq] ? most : n_pos[c->seg[i].seq];
    }
    size_t bytes[2];
    for (int side = 0; side < 2; side++)
        bytes[side] = t.backend[side].op->index_block_bytes(c->d);
    const int n_seq = n_seg < SEQS ? SEQS : n_seg, n_block = (most + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    cuda_cache cache = cuda_cache_of(&t, bytes, most > 60000 ? 1 : n_seq, n_block, !c->contiguous, c->loose ? 4 : 0, &random);
    twin_batch fill = cuda_cache_fill(&t, n_pos, most > 60000 ? 1 : SEQS), step = twin_batch_of(&t, c->seg, n_seg);
    const int32_t n = step.side[0].n_row, n_fill = fill.side[0].n_row, score_ld = most + 3;
    if (c->padded)
        cuda_cache_pad(&t, &step, c->seg);
    bi_bf16 *k = TWIN_ARRAY(&t, bi_bf16, "k", (int64_t)n_fill * c->d);
    bi_bf16 *q = TWIN_ARRAY(&t, bi_bf16, "q", (int64_t)(n + 2) * c->n_head * c->d);
    float *w = TWIN_ARRAY(&t, float, "w", (int64_t)(n + 2) * c->n_head);
    int32_t *select = TWIN_ARRAY(&t, int32_t, "select", (int64_t)(n + 2) * c->topk);
    int32_t *n_select = TWIN_ARRAY(&t, int32_t, "n_select", n + 2);
    float *score = TWIN_ARRAY(&t, float, "score", (int64_t)(n + 2) * score_ld);
    int32_t *again = TWIN_ARRAY(&t, int32_t, "select, from the scores", (int64_t)(n + 2) * c->topk);
    int32_t *n_again = TWIN_ARRAY(&t, int32_t, "n_select, from the scores", n + 2);
    uint32_t *fault = TWIN_ARRAY(&t, uint32_t, "fault", n + 2), *fault_k = TWIN_ARRAY(&t, uint32_t, "fault of keys", n_fill);
    memset(fault, 0, sizeof *fault * (size_t)(n + 2));
    memset(fault_k, 0, sizeof *fault_k * (size_t)n_fill);
    fill_keys(c, &random, k, n_fill);
    op_random_bf16s(&random, 1.0f, q, n * c->n_head * c->d);
    op_random_normals(&random, c->no_weight ? 0.0f : 1.0f, w, n * c->n_head);
    if (c->faults)
        spoil(c, k, q, w);
    twin_begin(&t);
    TWIN_RUNS(&t, s) {
        const int side = s;
        const bi_ops *op = t.backend[side].op;
        bi_index_store_args store = {&fill.side[side], c->d, twin_at(&t, s, k), cache.side[side], {twin_at(&t, s, fault_k), CODE}};
        bi_index_select_args args = {&step.side[side], c->n_head, c->d, c->topk, twin_at(&t, s, q), twin_at(&t, s, w),
                                     1.0f / sqrtf((float)(c->n_head * c->d)), cache.side[side], twin_at(&t, s, select),
                                     twin_at(&t, s, n_select), with_score ? twin_at(&t, s, score) : NULL, score_ld,
                                     {twin_at(&t, s, fault), CODE + 1}, 0};
        CHECK_OK(op->index_store(t.backend[side].ctx, &store));
        CHECK_OK(op->index_select(t.backend[side].ctx, &args));
        if (!with_score)
            continue;
        args.scored = 1;
        args.select = twin_at(&t, s, again);
        args.n_select = twin_at(&t, s, n_again);
        CHECK_OK(op->index_select(t.backend[side].ctx, &args));
    }
    twin_compare(&t, c->name);
    /* All rows fit scratch at once; with scores a second selection from them follows; without a row that sees more
     * than topk nothing is scored unless the caller wants the scores. */
    const int scored = step.side[TWIN_CUDA].pos_max >= c->topk;
    twin_launched(&t, c->name,
                  with_score ? "index_store 1, index_query 1, index_score 1, index_topk 2"
                  : scored   ? "index_store 1, index_query 1, index_score 1, index_topk 1"
                             : "index_store 1, index_query 1, index_topk 1");
}

static void check_all(const index_case *c, size_t n) {
    for (size_t i = 0; i < n; i++) {
        check_index(&c[i], 1);
        check_index(&c[i], 0);
    }
}
#define CHECK_ALL(cases) check_all((cases), sizeof(cases) / sizeof *(cases))
#define NANO .n_head = 4, .d = 32, .size = 1
#define LEAN .n_head = 4, .d = 16, .size = 1

/* Rows that see few positions: all of them, or all but a few. */
START_TEST(few_positions) {
    static const index_case cases[] = {
        {"first rows", NANO, .topk = 5, .seg = {{0, 0, 40, 0}, {1, 0, 1, 0}}},
        {"fewer than topk, topk, one more", NANO, .topk = 64, .seg = {{0, 0, 3, 62}, {1, 0, 1, 200}, {2, 0, 2, 10}}},
        {"topk and fewer", NANO, .topk = 64, .seg = {{0, 0, 3, 61}, {1, 0, 1, 20}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(selections) {
    static const index_case cases[] = {
        {"one", NANO, .topk = 1, .seg = {{0, 0, 3, 500}, {1, 0, 1, 0}}},
        {"half", NANO, .topk = 300, .seg = {{0, 0, 9, 600}, {2, 0, 2, 1025}}},
        {"all but one", NANO, .topk = 1024, .seg = {{0, 0, 1, 1024}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(places_of_keys) {
    static const index_case cases[] = {
        {"contiguous", NANO, .topk = 20, .contiguous = 1, .seg = {{0, 0, 2, 100}, {1, 0, 1, 300}}},
        {"padding", NANO, .topk = 20, .padded = 1, .seg = {{0, 0, 2, 100}, {1, 0, 1, 300}}},
        {"blocks off 16 bytes", NANO, .topk = 20, .loose = 1, .seg = {{0, 0, 2, 100}, {1, 0, 1, 300}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(ties) {
    static const index_case cases[] = {
        {"one plateau", NANO, .topk = 100, .plateau = 1, .seg = {{0, 0, 2, 700}}},
        {"three plateaus", NANO, .topk = 100, .plateau = 3, .seg = {{0, 0, 2, 700}, {1, 0, 1, 150}}},
        {"plateaus of ten", NANO, .topk = 64, .plateau = 77, .seg = {{0, 0, 2, 770}}},
        {"scores of zero", NANO, .topk = 64, .no_weight = 1, .seg = {{0, 0, 2, 770}}},
        {"keys of zero", .n_head = 4, .d = 32, .size = 0, .topk = 64, .seg = {{0, 0, 2, 300}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(odd_shapes) {
    static const index_case cases[] = {
        {"width 1", .n_head = 4, .d = 1, .size = 1, .topk = 9, .seg = {{0, 0, 2, 90}}},
        {"width 40, 12 heads", .n_head = 12, .d = 40, .size = 2, .topk = 33, .seg = {{0, 0, 2, 200}, {1, 0, 1, 31}}},
        {"width 144, 20 heads", .n_head = 20, .d = 144, .size = 1, .topk = 33, .seg = {{0, 0, 2, 200}}},
        {"64 heads of 128", .n_head = 64, .d = 128, .size = 1, .topk = 100, .seg = {{0, 0, 2, 300}}},
        {"large keys", .n_head = 8, .d = 64, .size = 0x1p100f, .topk = 40, .seg = {{0, 0, 2, 300}}},
        {"tiny keys", .n_head = 8, .d = 64, .size = 0x1p-130f, .topk = 40, .seg = {{0, 0, 2, 300}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(full_width) {
    static const index_case cases[] = {
        {"decode", .n_head = 32, .d = 128, .size = 1, .topk = 256, .seg = {{0, 0, 1, 2500}, {1, 0, 1, 1000}, {2, 0, 1, 255}}},
        {"prefill", .n_head = 32, .d = 128, .size = 1, .topk = 128, .seg = {{0, 0, 21, 490}, {1, 0, 10, 120}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* Far more positions than the selection keeps in shared memory, and up to all of them selected: narrow, so that the oracle is quick. */
START_TEST(long_rows) {
    static const index_case cases[] = {
        {"2,048 of 2^20", LEAN, .topk = 2048, .seg = {{0, 0, 1, MANY - 1}}},
        {"half of 2^20", LEAN, .topk = MANY / 2, .seg = {{0, 0, 1, MANY - 1}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(long_rows_but_one) {
    static const index_case cases[] = {
        {"2^20 - 1 of a plateau", LEAN, .plateau = 1, .topk = MANY - 1, .seg = {{0, 0, 1, MANY - 1}}},
        {"2^20 of as many and one less", LEAN, .topk = MANY, .seg = {{0, 0, 2, MANY - 2}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* As many positions as the oracle takes seconds for. */
START_TEST(long_rows_of_full_width) {
    static const index_case cases[] = {
        {"2,048", .n_head = 32, .d = 128, .size = 1, .topk = 2048, .seg = {{0, 0, 2, 20000}}},
        {"half of three plateaus", .n_head = 32, .d = 128, .size = 1, .plateau = 3, .topk = 10000, .seg = {{0, 0, 1, 20000}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* All keys of a row gathered, or those that a sample leaves; then fewer blocks, four and two. */
START_TEST(eight_blocks_a_row) {
    static const index_case cases[] = {
        {"8,192 positions and one more", LEAN, .topk = 2048, .seg = {{0, 0, 2, 8191}}},
        {"16 rows", LEAN, .topk = 700, .seg = {{0, 0, 16, 9000}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(fewer_blocks_a_row) {
    static const index_case cases[] = {
        {"17 rows", LEAN, .topk = 700, .seg = {{0, 0, 17, 9000}}},
        {"34 rows", LEAN, .topk = 700, .seg = {{0, 0, 34, 9000}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* A sample that misleads; more equal keys than are gathered. */
START_TEST(equal_keys) {
    static const index_case cases[] = {
        {"a sample that sees one key of a period", LEAN, .topk = 500, .plateau = 16, .seg = {{0, 0, 3, 40000}}},
        {"9,000 equal keys", LEAN, .topk = 2048, .flat = 11000, .seg = {{0, 0, 6, 20000}}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* More equal keys in one warp than it lists, in the rows that like that key. */
START_TEST(long_lists) {
    static const index_case cases[] = {
        {"long lists", LEAN, .topk = 2048, .flat = 48600, .seg = {{0, 0, 36, 50000}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(faults) {
    static const index_case cases[] = {
        {"a bad key, a bad query, a bad weight", NANO, .faults = 1, .topk = 30, .seg = {{0, 0, 3, 70}, {1, 0, 2, 20}, {2, 0, 1, 200}}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(refuses_bad_shapes) {
    bi_batch batch = {.n_row = 0};
    bi_index_select_args good = {.batch = &batch, .n_head = 4, .d = 16, .topk = 1};
    good.cache.block_bytes = t.backend[TWIN_CUDA].op->index_block_bytes(16);
    bi_index_select_args a = good;
    bi_ctx *ctx = t.backend[TWIN_CUDA].ctx;
    const bi_ops *op = t.backend[TWIN_CUDA].op;
    CHECK_OK(op->index_select(ctx, &a));
#define REFUSED(change, status) ((void)(a = good, change)); CHECK_FAILS(op->index_select(ctx, &a), status)
    REFUSED(a.n_head = 6, BR_E_SHAPE);
    REFUSED(a.n_head = HEADS_MAX + 4, BR_E_SHAPE);
    REFUSED(a.d = 0, BR_E_SHAPE);
    REFUSED(a.topk = 0, BR_E_SHAPE);
    REFUSED(a.scored = 1, BR_E_SHAPE);
    REFUSED(a.cache.block_bytes -= 4, BR_E_SHAPE);
    REFUSED(a.cache.block_bytes += 2, BR_E_ALIGN);
#undef REFUSED
}
END_TEST

static void set_up(void) {
    const bi_limits limits = {
        .n_row = ROWS_MAX, .index_n_head = HEADS_MAX, .index_d_head = D_MAX, .n_pos = POS_MAX, .d_in = 64, .d_out = 64};
    twin_open(&t, &limits, (size_t)160 << 20);
}

static void tear_down(void) {
    twin_close(&t);
}

Suite *cuda_index_suite(void);
Suite *cuda_index_suite(void) {
    Suite *suite = suite_create("cuda_index");
    CUDA_CASE_IN(suite, few_positions, set_up, tear_down);
    CUDA_CASE_IN(suite, selections, set_up, tear_down);
    CUDA_CASE_IN(suite, places_of_keys, set_up, tear_down);
    CUDA_CASE_IN(suite, ties, set_up, tear_down);
    CUDA_CASE_IN(suite, odd_shapes, set_up, tear_down);
    CUDA_CASE_IN(suite, full_width, set_up, tear_down);
    CUDA_CASE_IN(suite, long_rows, set_up, tear_down);
    CUDA_CASE_IN(suite, long_rows_but_one, set_up, tear_down);
    CUDA_CASE_IN(suite, long_rows_of_full_width, set_up, tear_down);
    CUDA_CASE_IN(suite, eight_blocks_a_row, set_up, tear_down);
    CUDA_CASE_IN(suite, fewer_blocks_a_row, set_up, tear_down);
    CUDA_CASE_IN(suite, equal_keys, set_up, tear_down);
    CUDA_CASE_IN(suite, long_lists, set_up, tear_down);
    CUDA_CASE_IN(suite, faults, set_up, tear_down);
    CUDA_CASE_IN(suite, refuses_bad_shapes, set_up, tear_down);
    return suite;
}
