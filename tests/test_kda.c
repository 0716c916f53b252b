/* Kimi Delta Attention: gate, recurrence and gated norm, the oracle against the slow forms and the survival list. */
#include "row_case.h"
#include "slow_row.h"

#include <math.h>

enum { CODE = 13, GAP = 3 };

/* ---- gate ---- */

static struct {
    int32_t n_row, n_head, d, bounded;
    bi_bf16 *f, *b;
    float *a_log, *dt_bias, *want_a, *want_beta;
} gate;

static void prepare_gate(int32_t n_row, int32_t n_head, int32_t d, int bounded, row_family family, uint64_t key) {
    int32_t width = n_head * d;
    row_case_arena.used = 0;
    gate.n_row = n_row, gate.n_head = n_head, gate.d = d, gate.bounded = bounded;
    gate.f = row_case_bf16_array(n_row * width, family, key);
    gate.b = row_case_bf16_array(n_row * n_head, family, key + 1);
    gate.a_log = row_case_f32_array(n_head, ROW_NORMAL, key + 2);
    gate.dt_bias = row_case_f32_array(width, ROW_NORMAL, key + 3);
    gate.want_a = ROW_CASE_ARRAY(float, n_row * width);
    gate.want_beta = ROW_CASE_ARRAY(float, n_row * n_head);
    bi_kda_gate_args args = {n_row, n_head, d, gate.f, gate.b, gate.a_log, gate.dt_bias, bounded, -5.0f, gate.want_a,
                             gate.want_beta};
    slow_kda_gate(&args);
}

static void attempt_gate(const bi_backend *backend, const int32_t *pick, int32_t n) {
    size_t used = row_case_arena.used;
    int32_t width = gate.n_head * gate.d;
    bi_bf16 *f = ROW_CASE_ARRAY(bi_bf16, (n + 1) * width), *b = ROW_CASE_ARRAY(bi_bf16, (n + 1) * gate.n_head);
    float *a = ROW_CASE_ARRAY(float, (n + 1) * width), *beta = ROW_CASE_ARRAY(float, (n + 1) * gate.n_head);
    for (int32_t t = 0; t < n; t++) {
        memcpy(f + t * width, gate.f + pick[t] * width, sizeof(bi_bf16) * (size_t)width);
        memcpy(b + t * gate.n_head, gate.b + pick[t] * gate.n_head, sizeof(bi_bf16) * (size_t)gate.n_head);
    }
    bi_kda_gate_args args = {n, gate.n_head, gate.d, f, b, gate.a_log, gate.dt_bias, gate.bounded, -5.0f, a, beta};
    CHECK_OK(backend->op->kda_gate(backend->ctx, &args));
    for (int32_t t = 0; t < n; t++) {
        row_case_same_f32("a", a + t * width, gate.want_a + pick[t] * width, width);
        row_case_same_f32("beta", beta + t * gate.n_head, gate.want_beta + pick[t] * gate.n_head, gate.n_head);
    }
    row_case_untouched("the row after", a + n * width, sizeof(float) * (size_t)width);
    row_case_untouched("the row after", beta + n * gate.n_head, sizeof(float) * (size_t)gate.n_head);
    row_case_arena.used = used;
}

START_TEST(gate_equals_slow_form) {
    static const int32_t size[] = {1, 32, 100, 256};
    for (int bounded = 0; bounded < 2; bounded++)
        for (int family = 0; family < ROW_FAMILIES; family++) {
            uint64_t key = test_seed() * 10 + (uint64_t)family;
            prepare_gate(4, 3, size[(bounded + family) % 4], bounded, (row_family)family, key);
            row_case_survive(attempt_gate, _i, gate.n_row);
        }
}
END_TEST

/* The decay is in [0, 1] and reaches +0 and subnormals without a bound; the function is the published one. */
START_TEST(gate_computes_the_decay) {
    for (int bounded = 0; bounded < 2; bounded++) {
        prepare_gate(8, 4, 128, bounded, ROW_NORMAL, 5);
        for (int32_t i = 0; i < 8 * 4 * 128; i++) {
            double rate = exp((double)gate.a_log[i / 128 % 4]);
            double y = (double)(row_case_widen(gate.f[i]) + gate.dt_bias[i % (4 * 128)]);
            double g = bounded ? -5.0 / (1 + exp(-rate * y)) : -rate * log1p(exp(y)), want = exp(g);
            ck_assert_double_le(fabs((double)gate.want_a[i] - want), (want + 0x1p-149) * (fabs(g) + 1) * 0x1p-19);
        }
        for (int32_t i = 0; i < 8 * 4; i++) {
            double want = 1 / (1 + exp(-(double)row_case_widen(gate.b[i])));
            ck_assert_double_le(fabs((double)gate.want_beta[i] - want), want * 0x1p-20);
        }
    }
}
END_TEST

/* ---- recurrence ---- */

enum { SEQ_MAX = 3, TOK_MAX = 40 };

/* Sequences of n_tok tokens, and what the slow form makes of each as one segment. */
static struct {
    int32_t n_seq, n_tok, n_head, d, ld;
    bi_bf16 *q[SEQ_MAX], *k[SEQ_MAX], *v[SEQ_MAX]; /* (n_tok, ld) */
    float *a[SEQ_MAX], *beta[SEQ_MAX], *want[SEQ_MAX];
    uint32_t want_fault[SEQ_MAX][TOK_MAX];
    float *slow_state;
} kda;

static void answer_kda(int32_t s) {
    bi_seg seg = {0, 0, kda.n_tok, 0};
    bi_batch batch = {.n_row = kda.n_tok, .n_seg = 1, .seg = &seg};
    memset(kda.want_fault[s], 0, sizeof kda.want_fault[s]);
    bi_kda_args args = {&batch, kda.n_head, kda.d, kda.q[s], kda.k[s], kda.v[s], kda.ld, kda.a[s], kda.beta[s], 0,
                        {(unsigned char *)kda.slow_state, 0, NULL}, kda.want[s], {kda.want_fault[s], CODE}};
    slow_kda(&args);
}

/* Decays: most in 0.2 .. 1, some exactly 1, 0, and subnormal, as unbounded gates give. */
static float decay(uint64_t key, int64_t i) {
    uint64_t r = test_mix(key ^ (uint64_t)i * 77);
    switch (r % 12) {
    case 0: return 0.0f;
    case 1: return 1.0f;
    case 2: return 0x1p-149f * (float)(r >> 44);
    default: return 0.2f + 0.8f * (float)(r >> 40) * 0x1p-24f;
    }
}

static void prepare_kda(int32_t n_seq, int32_t n_tok, int32_t n_head, int32_t d, row_family family, uint64_t key) {
    int32_t width = n_head * d;
    row_case_arena.used = 0;
    kda.n_seq = n_seq, kda.n_tok = n_tok, kda.n_head = n_head, kda.d = d, kda.ld = width + GAP;
    kda.slow_state = ROW_CASE_ARRAY(float, width * d);
    for (int32_t s = 0; s < n_seq; s++) {
        uint64_t seed = key + 100 * (uint64_t)s;
        kda.q[s] = row_case_bf16_array(n_tok * kda.ld, family, seed);
        kda.k[s] = row_case_bf16_array(n_tok * kda.ld, family, seed + 1);
        kda.v[s] = row_case_bf16_array(n_tok * kda.ld, family, seed + 2);
        kda.a[s] = ROW_CASE_ARRAY(float, n_tok * width);
        kda.beta[s] = ROW_CASE_ARRAY(float, n_tok * n_head);
        for (int32_t i = 0; i < n_tok * width; i++)
            kda.a[s][i] = decay(seed + 3, i);
        for (int32_t i = 0; i < n_tok * n_head; i++)
            kda.beta[s][i] = (float)(test_mix(seed + 4 + (uint64_t)i) >> 40) * 0x1p-24f;
        kda.want[s] = ROW_CASE_ARRAY(float, n_tok * width);
        answer_kda(s);
    }
}

/* A run of the oracle: the states start poisoned, and sequence s owns slot[s]. */
typedef struct kda_run {
    const bi_backend *backend;
    unsigned char *state;
    size_t seq_bytes;
    int32_t slot[SEQ_MAX], done[SEQ_MAX];
} kda_run;

static kda_run kda_begin(const bi_backend *backend) {
    size_t bytes = sizeof(float) * (size_t)(kda.n_head * kda.d * kda.d) + 16;
    kda_run run = {backend, ROW_CASE_ARRAY(unsigned char, SEQ_MAX * bytes), bytes, {2, 0, 1}, {0}};
    return run;
}

/* Copies of the operand rows of a step, in the order of its segments; gaps between rows stay poisoned. */
typedef struct kda_rows {
    bi_bf16 *q, *k, *v;
    float *a, *beta, *o;
    uint32_t *fault;
    int32_t n_row;
} kda_rows;

static kda_rows kda_rows_new(int32_t n_max) {
    int32_t width = kda.n_head * kda.d;
    kda_rows rows = {ROW_CASE_ARRAY(bi_bf16, n_max * kda.ld), ROW_CASE_ARRAY(bi_bf16, n_max * kda.ld),
                     ROW_CASE_ARRAY(bi_bf16, n_max * kda.ld), ROW_CASE_ARRAY(float, n_max * width),
                     ROW_CASE_ARRAY(float, n_max * kda.n_head), ROW_CASE_ARRAY(float, n_max * width),
                     ROW_CASE_ARRAY(uint32_t, n_max), 0};
    memset(rows.fault, 0, sizeof(uint32_t) * (size_t)n_max);
    return rows;
}

static void kda_rows_add(kda_rows *rows, int32_t s, int32_t t) {
    int32_t width = kda.n_head * kda.d, to = rows->n_row++;
    memcpy(rows->q + to * kda.ld, kda.q[s] + t * kda.ld, sizeof(bi_bf16) * (size_t)width);
    memcpy(rows->k + to * kda.ld, kda.k[s] + t * kda.ld, sizeof(bi_bf16) * (size_t)width);
    memcpy(rows->v + to * kda.ld, kda.v[s] + t * kda.ld, sizeof(bi_bf16) * (size_t)width);
    memcpy(rows->a + to * width, kda.a[s] + t * width, sizeof(float) * (size_t)width);
    memcpy(rows->beta + to * kda.n_head, kda.beta[s] + t * kda.n_head, sizeof(float) * (size_t)kda.n_head);
}

/* One step: the next n[i] tokens of sequence order[i], checked at once. */
static void kda_step(kda_run *run, const int32_t *order, int32_t n_seq, const int32_t *n) {
    size_t used = row_case_arena.used;
    int32_t width = kda.n_head * kda.d;
    kda_rows rows = kda_rows_new(SEQ_MAX * TOK_MAX);
    bi_seg seg[SEQ_MAX];
    for (int32_t i = 0; i < n_seq; i++) {
        seg[i] = (bi_seg){order[i], rows.n_row, n[i], run->done[order[i]]};
        for (int32_t t = 0; t < n[i]; t++)
            kda_rows_add(&rows, order[i], seg[i].pos + t);
    }
    bi_batch batch = {.n_row = rows.n_row, .n_seg = n_seq, .seg = seg};
    bi_kda_args args = {&batch, kda.n_head, kda.d, rows.q, rows.k, rows.v, kda.ld, rows.a, rows.beta,
                        bi_const_kda_scale(kda.d), {run->state, run->seq_bytes, run->slot}, rows.o, {rows.fault, CODE}};
    CHECK_OK(run->backend->op->kda(run->backend->ctx, &args));
    for (int32_t i = 0; i < n_seq; i++) {
        row_case_same_f32("o", rows.o + seg[i].row * width, kda.want[order[i]] + seg[i].pos * width, n[i] * width);
        for (int32_t t = 0; t < n[i]; t++)
            ck_assert_uint_eq(rows.fault[seg[i].row + t], kda.want_fault[order[i]][seg[i].pos + t]);
        run->done[order[i]] += n[i];
        size_t end = (size_t)(run->slot[order[i]] + 1) * run->seq_bytes;
        row_case_untouched("the bytes after a state", run->state + end - 16, 16);
    }
    row_case_arena.used = used;
}

static const int32_t in_order[] = {0, 1, 2}, turned[] = {2, 0, 1};

static void kda_whole(const bi_backend *backend) {
    size_t used = row_case_arena.used;
    int32_t n[] = {kda.n_tok, kda.n_tok, kda.n_tok};
    kda_run run = kda_begin(backend), alone = kda_begin(backend);
    kda_step(&run, in_order, kda.n_seq, n);
    for (int32_t s = 0; s < kda.n_seq; s++)
        kda_step(&alone, &s, 1, n);
    /* Once more on the used states: position 0 begins anew. */
    memset(run.done, 0, sizeof run.done);
    kda_step(&run, kda.n_seq == 3 ? turned : in_order, kda.n_seq, n);
    row_case_same_f32("state", (float *)(void *)run.state, (float *)(void *)alone.state,
                      (int64_t)(SEQ_MAX * run.seq_bytes / sizeof(float)));
    row_case_arena.used = used;
}

START_TEST(equals_slow_form) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 2, &backend, &pool))
        return;
    for (int32_t d = 32; d <= 256; d += 32) {
        int n_tok = test_is_long() ? TOK_MAX : 17; /* more than two tiles of the oracle, the last one short */
        prepare_kda(d <= 128 ? 2 : 1, n_tok, d <= 64 ? 3 : 1, d, ROW_NORMAL, test_seed() + (uint64_t)d);
        kda_whole(&backend);
    }
    for (int family = 0; family < ROW_FAMILIES; family++) {
        prepare_kda(3, 12, 2, 32, (row_family)family, test_seed() * 10 + (uint64_t)family);
        kda_whole(&backend);
    }
    row_case_close(&backend, pool);
}
END_TEST

/* All cuts of one sequence, then two sequences in one batch that are cut at different places, for 1, 2 and 5 threads. */
START_TEST(survives_every_cut) {
    static const int threads[] = {1, 2, 5};
    static const int32_t pair[] = {2, 0};
    prepare_kda(3, TOK_MAX, 2, 32, ROW_NORMAL, test_seed());
    for (int i = 0; i < 3; i++) {
        bi_backend backend;
        br_pool *pool;
        if (!row_case_open(_i, threads[i], &backend, &pool))
            return;
        size_t used = row_case_arena.used;
        for (int32_t cut = 1; cut < TOK_MAX; cut++) {
            kda_run run = kda_begin(&backend);
            int32_t part[] = {cut, TOK_MAX - cut}, swapped[] = {TOK_MAX - cut, cut};
            kda_step(&run, &in_order[1], 1, &part[0]);
            kda_step(&run, &in_order[1], 1, &part[1]);
            kda_step(&run, pair, 2, part);
            kda_step(&run, pair, 2, swapped);
            row_case_arena.used = used;
        }
        kda_whole(&backend);
        row_case_close(&backend, pool);
    }
}
END_TEST

/* Token by token, three sequences whose order in the batch turns at each step. */
START_TEST(decodes_like_prefill) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 5, &backend, &pool))
        return;
    prepare_kda(3, TOK_MAX, 2, 64, ROW_NORMAL, 8);
    kda_run run = kda_begin(&backend);
    for (int32_t t = 0; t < TOK_MAX; t++) {
        int32_t order[] = {t % 3, (t + 1) % 3, (t + 2) % 3}, n[] = {1, 1, 1};
        kda_step(&run, order, 3, n);
    }
    row_case_close(&backend, pool);
}
END_TEST

/* A row is marked when q's or k's squares are not finite; NaN in v passes unmarked; other sequences keep their bits. */
START_TEST(faults_stay_in_their_sequence) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 2, &backend, &pool))
        return;
    for (int where = 0; where < 4; where++) {
        prepare_kda(3, 12, 2, 64, ROW_NORMAL, 17);
        bi_bf16 *row = (where == 0 ? kda.q : where == 3 ? kda.v : kda.k)[1] + 5 * kda.ld;
        row[64 + 3] = where == 1 ? 0x7fc1 : where == 2 ? 0x6000 : 0xff80;
        answer_kda(1);
        for (int32_t t = 0; t < 12; t++)
            ck_assert_uint_eq(kda.want_fault[1][t], t == 5 && where != 3 ? CODE : 0);
        for (int32_t i = 0; i < 5 * 128; i++) /* the tokens before, and head 0 of that token */
            ck_assert(isfinite(kda.want[1][i]));
        kda_whole(&backend);
    }
    row_case_close(&backend, pool);
}
END_TEST

/* Zero rows of q and k have norm sqrt(1e-6), a decay of 1 keeps the state, beta 0 leaves it alone. */
START_TEST(neutral_tokens_keep_the_state) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    prepare_kda(1, 12, 1, 64, ROW_NORMAL, 23);
    for (int32_t t = 4; t < 8; t++)
        for (int32_t i = 0; i < 64; i++) {
            kda.k[0][t * kda.ld + i] = 0x8000;
            kda.q[0][t * kda.ld + i] = kda.q[0][8 * kda.ld + i];
            kda.v[0][t * kda.ld + i] = 0;
            kda.a[0][t * 64 + i] = 1.0f;
            kda.beta[0][t] = 0.0f;
        }
    answer_kda(0);
    row_case_same_f32("o", kda.want[0] + 5 * 64, kda.want[0] + 4 * 64, 64);
    row_case_same_f32("o", kda.want[0] + 7 * 64, kda.want[0] + 4 * 64, 64);
    kda_whole(&backend);
    row_case_close(&backend, pool);
}
END_TEST

/* The first product of a chain is rounded, not added to +0: an empty state and a negative query give -0. */
START_TEST(zero_keeps_its_sign) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    prepare_kda(1, 2, 1, 64, ROW_NORMAL, 25);
    for (int32_t i = 0; i < 64; i++) {
        kda.q[0][i] |= 0x8000;
        kda.v[0][i] = 0;
        kda.a[0][i] = 1.0f;
    }
    answer_kda(0);
    for (int32_t i = 0; i < 64; i++)
        ck_assert(kda.want[0][i] == 0.0f && signbit(kda.want[0][i]));
    kda_whole(&backend);
    row_case_close(&backend, pool);
}
END_TEST

/* The slow form finds RN(d^-1/2) from its definition; the oracle's must be the same bits in equals_slow_form. */
START_TEST(scale_is_the_inverse_root) {
    for (int32_t d = 32; d <= 256; d += 32)
        ck_assert_double_le(fabs((double)slow_inverse_sqrt(d) * (double)slow_inverse_sqrt(d) * d - 1), 0x1p-23);
    ck_assert_float_eq(slow_inverse_sqrt(64), 0.125f);
    ck_assert_float_eq(slow_inverse_sqrt(256), 0.0625f);
}
END_TEST

/* The published recurrence, in binary64, one head. */
START_TEST(computes_the_recurrence) {
    enum { D = 64, T = 20 };
    static double state[D][D];
    prepare_kda(1, T, 1, D, ROW_NORMAL, 29);
    memset(state, 0, sizeof state);
    for (int t = 0; t < T; t++) {
        double k[D], q[D], k_sum = 1e-6, q_sum = 1e-6, error = 0, size = 0;
        for (int i = 0; i < D; i++) {
            k[i] = (double)row_case_widen(kda.k[0][t * kda.ld + i]);
            q[i] = (double)row_case_widen(kda.q[0][t * kda.ld + i]);
            k_sum += k[i] * k[i];
            q_sum += q[i] * q[i];
        }
        for (int j = 0; j < D; j++) {
            double r = 0, o = 0;
            for (int i = 0; i < D; i++) {
                state[i][j] *= (double)kda.a[0][t * D + i];
                r += state[i][j] * k[i] / sqrt(k_sum);
            }
            double u = (double)kda.beta[0][t] * ((double)row_case_widen(kda.v[0][t * kda.ld + j]) - r);
            for (int i = 0; i < D; i++) {
                state[i][j] += k[i] / sqrt(k_sum) * u;
                o += state[i][j] * q[i] / sqrt(q_sum * D);
            }
            error += (o - (double)kda.want[0][t * D + j]) * (o - (double)kda.want[0][t * D + j]);
            size += o * o;
        }
        ck_assert_double_le(sqrt(error), sqrt(size) * 0x1p-19);
    }
}
END_TEST

/* ---- gated norm ---- */

static struct {
    int32_t n_row, n_head, d;
    float *o, *w;
    bi_bf16 *gate, *want;
    uint32_t *want_fault;
} norm;

static void answer_norm(void) {
    memset(norm.want_fault, 0, sizeof(uint32_t) * (size_t)norm.n_row);
    bi_kda_norm_args args = {norm.n_row, norm.n_head, norm.d, norm.o, norm.w, norm.gate, 1e-5f, norm.want,
                             {norm.want_fault, CODE}};
    slow_kda_norm(&args);
}

static void prepare_norm(int32_t n_row, int32_t n_head, int32_t d, row_family family, uint64_t key) {
    row_case_arena.used = 0;
    norm.n_row = n_row, norm.n_head = n_head, norm.d = d;
    norm.o = row_case_f32_array(n_row * n_head * d, family, key);
    norm.w = row_case_f32_array(d, ROW_NORMAL, key + 1);
    norm.gate = row_case_bf16_array(n_row * n_head * d, family, key + 2);
    norm.want = ROW_CASE_ARRAY(bi_bf16, n_row * n_head * d);
    norm.want_fault = ROW_CASE_ARRAY(uint32_t, n_row);
    answer_norm();
}

static void attempt_norm(const bi_backend *backend, const int32_t *pick, int32_t n) {
    size_t used = row_case_arena.used;
    int32_t width = norm.n_head * norm.d;
    float *o = ROW_CASE_ARRAY(float, (n + 1) * width);
    bi_bf16 *g = ROW_CASE_ARRAY(bi_bf16, (n + 1) * width), *y = ROW_CASE_ARRAY(bi_bf16, (n + 1) * width);
    uint32_t *fault = ROW_CASE_ARRAY(uint32_t, n + 1);
    memset(fault, 0, sizeof(uint32_t) * (size_t)(n + 1));
    for (int32_t t = 0; t < n; t++) {
        memcpy(o + t * width, norm.o + pick[t] * width, sizeof(float) * (size_t)width);
        memcpy(g + t * width, norm.gate + pick[t] * width, sizeof(bi_bf16) * (size_t)width);
    }
    bi_kda_norm_args args = {n, norm.n_head, norm.d, o, norm.w, g, 1e-5f, y, {fault, CODE}};
    CHECK_OK(backend->op->kda_norm(backend->ctx, &args));
    for (int32_t t = 0; t < n; t++) {
        row_case_same_bf16("y", y + t * width, norm.want + pick[t] * width, width);
        ck_assert_uint_eq(fault[t], norm.want_fault[pick[t]]);
    }
    row_case_untouched("the row after", y + n * width, sizeof(bi_bf16) * (size_t)width);
    row_case_arena.used = used;
}

START_TEST(norm_equals_slow_form) {
    static const int32_t size[] = {32, 128, 256, 33};
    for (int family = 0; family < ROW_FAMILIES; family++) {
        prepare_norm(5, 3, size[family % 4], (row_family)family, test_seed() * 10 + (uint64_t)family);
        row_case_survive(attempt_norm, _i, norm.n_row);
    }
    prepare_norm(5, 2, 64, ROW_NORMAL, 2);
    norm.o[2 * 128 + 64 + 9] = -INFINITY;
    answer_norm();
    for (int32_t t = 0; t < 5; t++)
        ck_assert_uint_eq(norm.want_fault[t], t == 2 ? CODE : 0);
    row_case_survive(attempt_norm, _i, norm.n_row);
}
END_TEST

/* Row 0, head 0 lands on ties of R, give or take the last bits of binary32. */
START_TEST(norm_rounds_in_order) {
    enum { D = 4096 };
    prepare_norm(1, 1, D, ROW_NORMAL, 61);
    double square = 0;
    for (int i = 0; i < D; i++)
        square += (double)norm.o[i] * (double)norm.o[i] / D;
    for (int i = 0; i < D; i++) {
        double scaled = (double)norm.o[i] / sqrt(square + 1e-5) / (1 + exp(-(double)row_case_widen(norm.gate[i])));
        norm.w[i] = (float)(row_case_tie(6, i) / scaled);
    }
    answer_norm();
    row_case_survive(attempt_norm, _i, norm.n_row);
}
END_TEST

START_TEST(norm_computes_the_gated_norm) {
    prepare_norm(3, 2, 128, ROW_NORMAL, 41);
    for (int32_t i = 0; i < 3 * 2 * 128; i++) {
        double square = 0;
        for (int32_t j = i / 128 * 128; j < i / 128 * 128 + 128; j++)
            square += (double)norm.o[j] * (double)norm.o[j] / 128;
        double want = (double)norm.o[i] / sqrt(square + 1e-5) * (double)norm.w[i % 128];
        want /= 1 + exp(-(double)row_case_widen(norm.gate[i]));
        ck_assert_double_le(fabs((double)row_case_widen(norm.want[i]) - want), fabs(want) * 0x1.01p-8);
    }
}
END_TEST

START_TEST(refuses_wrong_shapes) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    prepare_kda(1, 1, 1, 32, ROW_NORMAL, 1);
    bi_seg seg = {0, 0, 1, 0};
    bi_batch batch = {.n_row = 1, .n_seg = 1, .seg = &seg}, none = {0}, padding = {.n_row = 1};
    kda_run run = kda_begin(&backend);
    float *o = ROW_CASE_ARRAY(float, 512), *beta = ROW_CASE_ARRAY(float, 1);
    bi_kda_args good = {&batch, 1, 32, kda.q[0], kda.k[0], kda.v[0], kda.ld, kda.a[0], kda.beta[0], 1,
                        {run.state, run.seq_bytes, NULL}, o, {NULL, 0}};
    static const int32_t wrong[] = {0, 16, 33, 48, 288};
    for (int i = 0; i < 5; i++) {
        bi_kda_args args = good;
        args.d = wrong[i], args.ld = 512;
        CHECK_FAILS(backend.op->kda(backend.ctx, &args), BR_E_SHAPE);
    }
    bi_kda_args args = good;
    args.ld = 31;
    CHECK_FAILS(backend.op->kda(backend.ctx, &args), BR_E_SHAPE);
    args = good, args.state.base++;
    CHECK_FAILS(backend.op->kda(backend.ctx, &args), BR_E_ALIGN);
    args = good, args.state.seq_bytes += 2;
    CHECK_FAILS(backend.op->kda(backend.ctx, &args), BR_E_ALIGN);
    args = good, args.batch = &none;
    CHECK_OK(backend.op->kda(backend.ctx, &args));
    args.batch = &padding; /* was divided by its no segments */
    CHECK_OK(backend.op->kda(backend.ctx, &args));
    bi_kda_gate_args decay_args = {-1, 1, 32, kda.q[0], kda.q[0], kda.a[0], kda.a[0], 1, -5.0f, o, beta};
    CHECK_FAILS(backend.op->kda_gate(backend.ctx, &decay_args), BR_E_SHAPE);
    bi_kda_norm_args norm_args = {1, 0, 32, kda.a[0], kda.a[0], kda.q[0], 1e-5f, kda.v[0], {NULL, 0}};
    CHECK_FAILS(backend.op->kda_norm(backend.ctx, &norm_args), BR_E_SHAPE);
    row_case_untouched("o", o, sizeof(float) * 512);
    CHECK_OK(backend.op->kda(backend.ctx, &good));
    row_case_close(&backend, pool);
}
END_TEST

Suite *test_kda_suite(void) {
    Suite *suite = suite_create("kda");
    TCase *tcase = tcase_create("kda");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_loop_test(tcase, gate_equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, gate_computes_the_decay);
    tcase_add_loop_test(tcase, equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, survives_every_cut, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, decodes_like_prefill, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, faults_stay_in_their_sequence, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, neutral_tokens_keep_the_state, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, zero_keeps_its_sign, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, scale_is_the_inverse_root);
    tcase_add_test(tcase, computes_the_recurrence);
    tcase_add_loop_test(tcase, norm_equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, norm_rounds_in_order, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, norm_computes_the_gated_norm);
    tcase_add_loop_test(tcase, refuses_wrong_shapes, 0, ROW_CASE_ISAS);
    suite_add_tcase(suite, tcase);
    return suite;
}
