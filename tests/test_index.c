/* bi_index_store, bi_index_select: the oracle against the slow form, and the survival list. */
#include "cache_rig.h"
#include "row_case.h"
#include "slow_attn.h"

#include "bi_bits.h"

#include <math.h>

enum { CODE = 43, GAP = 3 };

typedef struct index_case {
    int32_t n_head, d, topk, n_pos[CACHE_RIG_SEQS];
    row_family key_family, query, weight;
    uint64_t key;
} index_case;

/* One test's inputs, by sequence. */
static struct {
    index_case c;
    float constant;
    bi_bf16 *k[CACHE_RIG_SEQS], *q[CACHE_RIG_SEQS];
    float *w[CACHE_RIG_SEQS];
} now;

typedef struct index_out {
    int32_t *select[CACHE_RIG_SEQS], *n_select[CACHE_RIG_SEQS]; /* (n_pos, topk), (n_pos) */
    float *score[CACHE_RIG_SEQS];                               /* (n_pos, n_pos); unwritten: all bits 1 */
    uint32_t *fault_k[CACHE_RIG_SEQS], *fault_q[CACHE_RIG_SEQS];
} index_out;

/* How the same positions are run. */
typedef struct index_run {
    const char *isa;
    int n_thread, paged, chunk, reversed, no_score, only; /* only: one sequence, or -1 */
} index_run;

static const index_run whole = {NULL, 1, 1, 4096, 0, 0, -1};

static void prepare(index_case c) {
    row_case_arena.used = 0;
    now.c = c;
    now.constant = (float)(1.0 / sqrt((double)c.n_head * c.d));
    for (uint64_t s = 0; s < CACHE_RIG_SEQS; s++) {
        int32_t n = c.n_pos[s];
        now.k[s] = row_case_bf16_array((int64_t)n * c.d, c.key_family, c.key + 10 * s);
        now.q[s] = row_case_bf16_array((int64_t)n * c.n_head * c.d, c.query, c.key + 10 * s + 1);
        now.w[s] = row_case_f32_array((int64_t)n * c.n_head, c.weight, c.key + 10 * s + 2);
    }
}

static index_out new_out(void) {
    index_out out;
    for (int s = 0; s < CACHE_RIG_SEQS; s++) {
        int64_t n = now.c.n_pos[s];
        out.select[s] = ROW_CASE_ARRAY(int32_t, n * now.c.topk);
        out.n_select[s] = ROW_CASE_ARRAY(int32_t, n);
        out.score[s] = ROW_CASE_ARRAY(float, n * n);
        out.fault_k[s] = memset(ROW_CASE_ARRAY(uint32_t, n), 0, sizeof(uint32_t) * (size_t)n);
        out.fault_q[s] = memset(ROW_CASE_ARRAY(uint32_t, n), 0, sizeof(uint32_t) * (size_t)n);
    }
    return out;
}

/* From the scores alone the same choice, and the scores stay as they are. */
static void select_again(const op_rig *rig, const bi_index_select_args *done) {
    const size_t used = row_case_arena.used;
    const int32_t n = done->batch->n_row;
    bi_index_select_args a = *done;
    float *before = ROW_CASE_ARRAY(float, n * a.score_ld);
    memcpy(before, a.score, sizeof *before * (size_t)(n * a.score_ld));
    a.scored = 1;
    a.q = NULL;
    a.w = NULL;
    a.select = ROW_CASE_ARRAY(int32_t, n * a.topk);
    a.n_select = ROW_CASE_ARRAY(int32_t, n);
    CHECK_OK(rig->backend.op->index_select(rig->backend.ctx, &a));
    ck_assert(!memcmp(a.n_select, done->n_select, sizeof *a.n_select * (size_t)(n - CACHE_RIG_PAD)));
    for (int32_t t = 0; t < n - CACHE_RIG_PAD; t++)
        ck_assert(!memcmp(a.select + t * a.topk, done->select + t * a.topk, sizeof *a.select * (size_t)a.n_select[t]));
    ck_assert(!memcmp(before, a.score, sizeof *before * (size_t)(n * a.score_ld)));
    row_case_arena.used = used;
}

/* One step: the batch's rows, gathered from the inputs, and back. */
static void step(const op_rig *rig, const bi_batch *batch, const bi_cache *cache, int no_score, index_out *out) {
    size_t used = row_case_arena.used;
    int32_t n = batch->n_row, d = now.c.d, n_head = now.c.n_head, topk = now.c.topk, score_ld = 0;
    for (int s = 0; s < CACHE_RIG_SEQS; s++)
        score_ld = score_ld > now.c.n_pos[s] + GAP ? score_ld : now.c.n_pos[s] + GAP;
    bi_bf16 *k = ROW_CASE_ARRAY(bi_bf16, n * d), *q = ROW_CASE_ARRAY(bi_bf16, n * n_head * d);
    float *w = ROW_CASE_ARRAY(float, n * n_head), *score = ROW_CASE_ARRAY(float, n * score_ld);
    int32_t *select = ROW_CASE_ARRAY(int32_t, n * topk), *n_select = ROW_CASE_ARRAY(int32_t, n);
    uint32_t *fault_k = memset(ROW_CASE_ARRAY(uint32_t, n), 0, sizeof(uint32_t) * (size_t)n);
    uint32_t *fault_q = memset(ROW_CASE_ARRAY(uint32_t, n), 0, sizeof(uint32_t) * (size_t)n);
    for (int32_t t = 0; t < n - CACHE_RIG_PAD; t++) {
        const bi_seg *seg = &batch->seg[batch->row_seg[t]];
        int64_t pos = seg->pos + t - seg->row;
        memcpy(k + t * d, now.k[seg->seq] + pos * d, sizeof *k * (size_t)d);
        memcpy(q + t * n_head * d, now.q[seg->seq] + pos * n_head * d, sizeof *q * (size_t)(n_head * d));
        memcpy(w + t * n_head, now.w[seg->seq] + pos * n_head, sizeof *w * (size_t)n_head);
    }
    bi_index_store_args store = {batch, d, k, *cache, {fault_k, CODE}};
    bi_index_select_args args = {batch,    n_head, d, topk, q, w, now.constant, *cache, select, n_select,
                                 no_score ? NULL : score, score_ld, {fault_q, CODE + 1}, 0};
    CHECK_OK(rig->backend.op->index_store(rig->backend.ctx, &store));
    CHECK_OK(rig->backend.op->index_select(rig->backend.ctx, &args));
    if (!no_score)
        select_again(rig, &args);
    for (int32_t t = 0; t < n - CACHE_RIG_PAD; t++) {
        const bi_seg *seg = &batch->seg[batch->row_seg[t]];
        int s = seg->seq;
        int64_t pos = seg->pos + t - seg->row;
        memcpy(out->select[s] + pos * topk, select + t * topk, sizeof *select * (size_t)topk);
        memcpy(out->score[s] + pos * now.c.n_pos[s], score + t * score_ld, sizeof *score * (size_t)now.c.n_pos[s]);
        out->n_select[s][pos] = n_select[t];
        out->fault_k[s][pos] = fault_k[t];
        out->fault_q[s][pos] = fault_q[t];
    }
    row_case_arena.used = used;
}

/* Steps of at most `chunk` rows of each sequence, until all have run. */
static void run(index_run how, index_out *out) {
    static batch_rig rows;
    const index_case *c = &now.c;
    bi_limits limits = {.n_row = CACHE_RIG_ROWS + CACHE_RIG_PAD, .index_n_head = c->n_head, .index_d_head = c->d,
                        .n_pos = CACHE_RIG_BLOCKS * BR_PAGE_TOK};
    op_rig rig;
    cache_rig cache;
    op_rig_open(&rig, &limits, how.isa, how.n_thread);
    op_rig_poison(&rig);
    cache_rig_open(&cache, rig.backend.op->index_block_bytes(c->d), how.paged, c->key);
    for (int32_t pos = 0;; pos += how.chunk) {
        batch_rig_begin(&rows);
        for (int i = 0; i < CACHE_RIG_SEQS; i++) {
            int s = how.reversed ? CACHE_RIG_SEQS - 1 - i : i;
            int32_t left = c->n_pos[s] - pos;
            if (left > 0 && (how.only < 0 || how.only == s))
                batch_rig_add(&rows, s, pos, left < how.chunk ? left : how.chunk);
        }
        if (!rows.batch.n_row)
            break;
        batch_rig_pad(&rows);
        step(&rig, &rows.batch, &cache.cache, how.no_score, out);
    }
    cache_rig_close(&cache);
    op_rig_close(&rig);
}

/* Everything, byte by byte: the parts of a row that no op may write keep their poison in both. */
static void same_sequence(const char *what, int s, const index_out *got, const index_out *want, int no_score) {
    size_t n = (size_t)now.c.n_pos[s];
    ck_assert_msg(!memcmp(got->fault_k[s], want->fault_k[s], 4 * n), "%s: sequence %d: faults of the store differ", what, s);
    ck_assert_msg(!memcmp(got->fault_q[s], want->fault_q[s], 4 * n), "%s: sequence %d: faults differ", what, s);
    ck_assert_msg(!memcmp(got->n_select[s], want->n_select[s], 4 * n), "%s: sequence %d: counts differ", what, s);
    ck_assert_msg(!memcmp(got->select[s], want->select[s], 4 * n * (size_t)now.c.topk), "%s: sequence %d: selections differ",
                  what, s);
    if (!no_score)
        ck_assert_msg(!memcmp(got->score[s], want->score[s], 4 * n * n), "%s: sequence %d: scores differ", what, s);
}

/* The slow form of one position. */
static void same_as_slow(const char *what, int s, int32_t t, const index_out *got) {
    size_t used = row_case_arena.used;
    const index_case *c = &now.c;
    slow_index args = {c->n_head, c->d, c->topk, t + 1, now.q[s] + (int64_t)t * c->n_head * c->d,
                       now.w[s] + (int64_t)t * c->n_head, now.k[s], now.constant};
    float *score = ROW_CASE_ARRAY(float, c->n_pos[s]);
    int32_t *select = ROW_CASE_ARRAY(int32_t, c->topk);
    int32_t n = slow_index_row(&args, score, select);
    for (int32_t j = 0; j < c->n_pos[s]; j++)
        if (bi_u32_of(got->score[s][(int64_t)t * c->n_pos[s] + j]) != bi_u32_of(score[j]))
            ck_abort_msg("%s: family %d %d %d: sequence %d query %d key %d: score %a, wanted %a", what, c->key_family,
                         c->query, c->weight, s, t, j, (double)got->score[s][(int64_t)t * c->n_pos[s] + j],
                         (double)score[j]);
    ck_assert_int_eq(got->n_select[s][t], n);
    for (int32_t i = 0; i < c->topk; i++)
        if (got->select[s][t * c->topk + i] != select[i])
            ck_abort_msg("%s: family %d %d %d: sequence %d query %d: choice %d is %d, wanted %d", what, c->key_family,
                         c->query, c->weight, s, t, i, got->select[s][t * c->topk + i], select[i]);
    row_case_arena.used = used;
}

/* Runs the case on every instruction set; some positions meet the slow form, and the sets must be equal everywhere. */
static void check_case(index_case c, int every) {
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    every = test_is_long() ? every / 8 + 1 : every;
    prepare(c);
    index_out first = new_out();
    for (int i = 0; i < n_isa; i++) {
        size_t used = row_case_arena.used;
        index_out out = i ? new_out() : first;
        index_run how = whole;
        how.isa = isa[i];
        run(how, &out);
        for (int s = 0; s < CACHE_RIG_SEQS && i; s++)
            same_sequence(isa[i], s, &out, &first, 0);
        row_case_arena.used = i ? used : row_case_arena.used;
    }
    for (int s = 0; s < CACHE_RIG_SEQS; s++)
        for (int32_t t = 0; t < c.n_pos[s]; t++)
            if (t % every == 0 || t == c.n_pos[s] - 1 || (t >= c.topk - 1 && t <= c.topk + 1))
                same_as_slow(isa[0], s, t, &first);
}

static const index_case nano = {4, 32, 16, {150, 40, 1}, ROW_NORMAL, ROW_NORMAL, ROW_NORMAL, 1};

START_TEST(equals_slow_form) {
    index_case c = nano;
    c.n_pos[0] = 700;
    c.key = test_seed();
    check_case(c, 67);
}
END_TEST

START_TEST(equals_slow_form_families) {
    for (int f = 0; f < ROW_FAMILIES; f++) {
        for (int part = 0; part < 4; part++) {
            index_case c = nano;
            c.key = test_seed() + (uint64_t)f;
            c.key_family = part == 0 || part == 3 ? (row_family)f : ROW_NORMAL;
            c.query = part == 1 || part == 3 ? (row_family)f : ROW_NORMAL;
            c.weight = part == 2 ? (row_family)f : ROW_NORMAL;
            if (f == ROW_RAW || f == ROW_HUGE)
                continue; /* scores leave binary32: see overflow_is_ordered */
            check_case(c, 37);
        }
    }
}
END_TEST

/* The real shape, and widths and head counts beside the paddings. */
START_TEST(odd_shapes) {
    static const int32_t shape[][3] = {{4, 1, 1}, {8, 16, 2}, {12, 17, 63}, {16, 33, 64}, {32, 128, 40}, {20, 31, 65}};
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        index_case c = {shape[i][0], shape[i][1], shape[i][2], {97, 33, 2}, ROW_NORMAL, ROW_NORMAL, ROW_NORMAL, 7 + i};
        check_case(c, 32);
    }
}
END_TEST

/* One key element sets amax on and beside every edge of the scale: 1.75 * 2^e, powers of two, 1e-4 and zero. */
START_TEST(scale_edges) {
    index_case c = nano;
    prepare(c);
    for (int32_t j = 0; j < c.n_pos[0]; j++) {
        int32_t around = j % 5 - 2, power = j / 10 * 17 % 250 - 120;
        float edge = j % 10 < 5 ? ldexpf(1.75f, power) : ldexpf(1.0f, power);
        bi_bf16 *k = now.k[0] + j * c.d, near_min = (bi_bf16)((bi_u32_of(1e-4f) >> 16) + (uint32_t)(j % 4) - 1);
        memset(k, 0, sizeof *k * (size_t)c.d);
        k[j % c.d] = j < 30 ? near_min : (bi_bf16)((int32_t)(bi_u32_of(edge) >> 16) + around);
        k[(j + 1) % c.d] = (bi_bf16)(0x8000 | k[j % c.d] / 2);
        for (int32_t h = 0; h < c.n_head; h++) {
            bi_bf16 *q = now.q[0] + ((int64_t)j * c.n_head + h) * c.d;
            q[0] = h % 2 ? q[0] : (bi_bf16)((int32_t)(bi_u32_of(ldexpf(1.75f, 10 + h)) >> 16) + around);
        }
    }
    index_out out = new_out();
    run(whole, &out);
    for (int32_t t = 0; t < c.n_pos[0]; t++)
        same_as_slow("scale edges", 0, t, &out);
}
END_TEST

/* Equal scores fall to the lower position, -0 is +0, and what lies above a tie stays in front of it. */
START_TEST(ties_fall_to_the_first) {
    index_case c = nano;
    c.key_family = ROW_PLATEAU;
    for (int sign = 0; sign < 3; sign++) {
        prepare(c);
        for (int64_t i = 0; i < (int64_t)c.n_pos[0] * c.n_head; i++)
            now.w[0][i] = sign == 0 ? 1.0f : sign == 1 ? -1.0f : (i % 2 ? -0.0f : 0.0f);
        if (sign == 0)
            for (int32_t i = 0; i < c.n_head * c.d; i++)
                now.q[0][(int64_t)149 * c.n_head * c.d + i] = 0x3f80;
        now.k[0][100 * c.d] = 0x4080; /* one key above the plateau for a query of ones */
        index_out out = new_out();
        run(whole, &out);
        for (int32_t t = 16; t < c.n_pos[0]; t += 19)
            same_as_slow("ties", 0, t, &out);
        for (int32_t i = 0; i < 16; i++) {
            ck_assert_int_eq(out.select[0][99 * 16 + i], i);
            ck_assert_int_eq(out.select[0][149 * 16 + i], i == 15 && sign == 0 ? 100 : i);
        }
    }
}
END_TEST

START_TEST(few_visible_select_everything) {
    index_case c = nano;
    prepare(c);
    index_out out = new_out();
    run(whole, &out);
    for (int32_t t = 0; t < 40; t++) {
        int32_t n = t + 1 < 16 ? t + 1 : 16;
        ck_assert_int_eq(out.n_select[0][t], n);
        for (int32_t i = 0; i < n; i++) {
            int32_t position = out.select[0][t * 16 + i];
            ck_assert(position <= t && (i == 0 || position > out.select[0][t * 16 + i - 1]));
            ck_assert(t >= 16 || position == i);
        }
    }
}
END_TEST

START_TEST(survives_every_way_to_run) {
    static const index_run ways[] = {
        {NULL, 1, 0, 4096, 0, 0, -1}, {NULL, 2, 1, 4096, 0, 0, -1}, {NULL, 5, 0, 4096, 0, 0, -1},
        {NULL, 1, 1, 4096, 1, 0, -1}, {NULL, 1, 1, 4096, 0, 1, -1}, {NULL, 1, 1, 1, 0, 0, -1},
        {NULL, 2, 0, 1, 1, 1, -1},    {NULL, 1, 1, 64, 0, 0, -1},   {NULL, 1, 1, 4096, 0, 0, -1},
        {NULL, 1, 1, 4096, 0, 0, 0},  {NULL, 1, 1, 4096, 0, 0, 1},  {NULL, 1, 1, 4096, 0, 0, 2},
    };
    index_case c = nano;
    c.key = test_seed();
    prepare(c);
    index_out want = new_out();
    run(whole, &want);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        index_out got = new_out();
        run(ways[i], &got);
        for (int s = 0; s < CACHE_RIG_SEQS; s++)
            if (ways[i].only < 0 || ways[i].only == s)
                same_sequence("another way to run", s, &got, &want, ways[i].no_score);
    }
}
END_TEST

START_TEST(survives_every_chunk_cut) {
    index_case c = nano;
    c.n_pos[0] = 40;
    c.n_pos[1] = 70;
    prepare(c);
    index_out want = new_out();
    run(whole, &want);
    for (int chunk = 1; chunk < 71; chunk++) {
        size_t used = row_case_arena.used;
        index_out got = new_out();
        index_run how = whole;
        how.chunk = chunk;
        run(how, &got);
        for (int s = 0; s < CACHE_RIG_SEQS; s++)
            same_sequence("another chunk", s, &got, &want, 0);
        row_case_arena.used = used;
    }
}
END_TEST

/* The bad row reports and selects its first positions; every other row keeps its bytes. */
START_TEST(a_bad_query_or_weight_ends_its_row) {
    for (int where = 0; where < 3; where++) {
        index_case c = nano;
        prepare(c);
        index_out clean = new_out(), got = new_out();
        run(whole, &clean);
        if (where == 0)
            now.q[0][(90 * c.n_head + 3) * c.d + 31] = 0x7f80;
        if (where == 1)
            now.q[0][90 * c.n_head * c.d] = 0xffc0;
        if (where == 2)
            now.w[0][90 * c.n_head + 2] = -INFINITY;
        run(whole, &got);
        ck_assert_uint_eq(got.fault_q[0][90], CODE + 1);
        ck_assert_int_eq(got.n_select[0][90], 16);
        for (int32_t i = 0; i < 16; i++)
            ck_assert_int_eq(got.select[0][90 * 16 + i], i);
        got.fault_q[0][90] = 0;
        memcpy(got.select[0] + 90 * 16, clean.select[0] + 90 * 16, 16 * sizeof(int32_t));
        memcpy(got.score[0] + 90 * 150, clean.score[0] + 90 * 150, 150 * sizeof(float));
        for (int s = 0; s < CACHE_RIG_SEQS; s++)
            same_sequence("beside a fault", s, &got, &clean, 0);
    }
}
END_TEST

START_TEST(a_bad_key_ends_its_row) {
    index_case c = nano;
    prepare(c);
    index_out clean = new_out(), got = new_out();
    run(whole, &clean);
    now.k[0][70 * c.d + 3] = 0x7fff;
    now.k[1][20 * c.d + 31] = 0xff80;
    run(whole, &got);
    for (int32_t t = 0; t < c.n_pos[0]; t++)
        ck_assert_uint_eq(got.fault_k[0][t], t == 70 ? CODE : 0);
    ck_assert_uint_eq(got.fault_k[1][20], CODE);
    for (int32_t t = 70; t < c.n_pos[0]; t++) /* the key counts as zeros: no score is NaN */
        ck_assert(bi_u32_of(got.score[0][t * 150 + 70]) << 1 == 0);
    ck_assert(!memcmp(got.score[0], clean.score[0], sizeof(float) * 150 * 70));
    ck_assert(!memcmp(got.select[0], clean.select[0], sizeof(int32_t) * 16 * 70));
    same_sequence("the neighbour", 2, &got, &clean, 0);
}
END_TEST

/* Finite operands whose scores overflow: Inf is a value like another, Inf - Inf is the one NaN pattern, on every set. */
START_TEST(overflow_is_ordered) {
    static const row_family family[] = {ROW_HUGE, ROW_RAW};
    int n_nan = 0, n_inf = 0;
    for (int i = 0; i < 2; i++) {
        index_case c = nano;
        c.key_family = c.query = c.weight = family[i];
        const char *isa[OP_RIG_ISA_MAX];
        int n_isa = op_rig_isas(isa);
        prepare(c);
        index_out first = new_out();
        for (int k = 0; k < n_isa; k++) {
            index_out out = new_out();
            index_run how = whole;
            how.isa = isa[k];
            run(how, k ? &out : &first);
            for (int s = 0; s < CACHE_RIG_SEQS && k; s++)
                same_sequence(isa[k], s, &out, &first, 0);
        }
        for (int32_t t = 0; t < 150; t++) {
            for (int32_t j = 0; j <= t; j++) {
                uint32_t u = bi_u32_of(first.score[0][t * 150 + j]);
                n_nan += u == BI_F32_NAN;
                n_inf += (u & 0x7fffffffu) == BI_F32_INF;
                ck_assert_msg((u & 0x7fffffffu) <= BI_F32_INF || u == BI_F32_NAN, "score %08x", u);
            }
        }
    }
    ck_assert_int_gt(n_nan, 0);
    ck_assert_int_gt(n_inf, 0);
}
END_TEST

static void check_refused(const op_rig *rig, const bi_index_select_args *a, br_status status) {
    CHECK_FAILS(rig->backend.op->index_select(rig->backend.ctx, a), status);
}

START_TEST(refuses_bad_shapes) {
    static batch_rig rows;
    op_rig rig;
    cache_rig cache;
    bi_limits limits = {.n_row = 4, .index_n_head = 8, .index_d_head = 16, .n_pos = 64};
    op_rig_open(&rig, &limits, NULL, 1);
    cache_rig_open(&cache, rig.backend.op->index_block_bytes(16), 1, 1);
    batch_rig_begin(&rows);
    batch_rig_add(&rows, 0, 0, 4);
    bi_bf16 k[64] = {0}, q[512] = {0};
    float w[32] = {0}, score[4 * 64];
    int32_t select[8], n_select[4];
    bi_index_store_args store = {&rows.batch, 16, k, cache.cache, {NULL, CODE}};
    const bi_index_select_args good = {&rows.batch, 8,        16,    2,  q, w, 0.1f, cache.cache, select,
                                       n_select,    score, 64, {NULL, CODE}, 0};
    CHECK_OK(rig.backend.op->index_store(rig.backend.ctx, &store));
    CHECK_OK(rig.backend.op->index_select(rig.backend.ctx, &good));
    bi_index_select_args a = good;
#define REFUSED(change, status) ((void)(a = good, change), check_refused(&rig, &a, status))
    REFUSED(a.n_head = 6, BR_E_SHAPE);
    REFUSED(a.n_head = 0, BR_E_SHAPE);
    REFUSED(a.n_head = 12, BR_E_SHAPE);
    REFUSED(a.d = 17, BR_E_SHAPE);
    REFUSED(a.d = 0, BR_E_SHAPE);
    REFUSED(a.topk = 0, BR_E_SHAPE);
    REFUSED(a.score_ld = 3, BR_E_SHAPE);
    REFUSED((a.scored = 1, a.score = NULL), BR_E_SHAPE);
    REFUSED(rows.seg[0].pos = 61, BR_E_SHAPE);
    rows.seg[0].pos = 0;
    REFUSED(a.cache.block_bytes -= 4, BR_E_SHAPE);
    REFUSED(a.cache.base += 1, BR_E_ALIGN);
    REFUSED(a.cache.block_bytes += 2, BR_E_ALIGN);
#undef REFUSED
    store.cache.block_bytes -= 4;
    CHECK_FAILS(rig.backend.op->index_store(rig.backend.ctx, &store), BR_E_SHAPE);
    store.d = 0;
    CHECK_FAILS(rig.backend.op->index_store(rig.backend.ctx, &store), BR_E_SHAPE);
    rows.batch.n_row = 0;
    CHECK_OK(rig.backend.op->index_select(rig.backend.ctx, &good));
    cache_rig_close(&cache);
    op_rig_close(&rig);
}
END_TEST

Suite *test_index_suite(void);
Suite *test_index_suite(void) {
    Suite *suite = suite_create("index");
    TCase *tcase = tcase_create("index");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_test(tcase, equals_slow_form);
    tcase_add_test(tcase, equals_slow_form_families);
    tcase_add_test(tcase, odd_shapes);
    tcase_add_test(tcase, scale_edges);
    tcase_add_test(tcase, ties_fall_to_the_first);
    tcase_add_test(tcase, few_visible_select_everything);
    tcase_add_test(tcase, survives_every_way_to_run);
    tcase_add_test(tcase, survives_every_chunk_cut);
    tcase_add_test(tcase, a_bad_query_or_weight_ends_its_row);
    tcase_add_test(tcase, a_bad_key_ends_its_row);
    tcase_add_test(tcase, overflow_is_ordered);
    tcase_add_test(tcase, refuses_bad_shapes);
    suite_add_tcase(suite, tcase);
    return suite;
}
