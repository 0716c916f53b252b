/* Attention residuals and the plain residual: the oracle against the slow form and the survival list. */
#include "row_case.h"
#include "slow_row.h"

#include <math.h>

enum { CODE = 91 };

/* One test's inputs, and the slow form's answer for all rows. */
static struct {
    int32_t n_row, d, n_bank;
    const bi_bf16 *bank[BR_BANK_MAX];
    bi_bf16 *p, *want;
    float *w, eps;
    uint32_t *want_fault;
} now;

static void prepare(int32_t n_row, int32_t d, int32_t n_bank, row_family family, uint64_t key) {
    row_case_arena.used = 0;
    now.n_row = n_row;
    now.d = d;
    now.n_bank = n_bank;
    now.eps = 1e-5f;
    for (int32_t i = 0; i < n_bank; i++)
        now.bank[i] = row_case_bf16_array(n_row * d, family, key + 10 + (uint64_t)i);
    now.p = row_case_bf16_array(n_row * d, family, key);
    now.w = row_case_f32_array(d, ROW_NORMAL, key + 1);
    for (int32_t i = 0; i < d; i++)
        now.w[i] /= 16.0f; /* scores near 1, so that no row's softmax is one-hot */
    now.want = ROW_CASE_ARRAY(bi_bf16, n_row * d);
    now.want_fault = ROW_CASE_ARRAY(uint32_t, n_row);
}

static void answer(void) {
    memset(now.want_fault, 0, sizeof(uint32_t) * (size_t)now.n_row);
    bi_attnres_args args = {now.n_row, now.d, now.n_bank, now.bank, now.p, now.w, now.eps, now.want, {now.want_fault, CODE}};
    slow_attnres(&args);
}

static bi_bf16 *picked(const bi_bf16 *rows, const int32_t *pick, int32_t n) {
    bi_bf16 *x = ROW_CASE_ARRAY(bi_bf16, (n + 1) * now.d);
    for (int32_t t = 0; t < n; t++)
        memcpy(x + t * now.d, rows + pick[t] * now.d, sizeof(bi_bf16) * (size_t)now.d);
    return x;
}

static void attempt(const bi_backend *backend, const int32_t *pick, int32_t n) {
    size_t used = row_case_arena.used;
    const bi_bf16 *bank[BR_BANK_MAX];
    for (int32_t i = 0; i < now.n_bank; i++)
        bank[i] = picked(now.bank[i], pick, n);
    bi_bf16 *p = picked(now.p, pick, n), *y = ROW_CASE_ARRAY(bi_bf16, (n + 1) * now.d);
    uint32_t *fault = ROW_CASE_ARRAY(uint32_t, n + 1);
    memset(fault, 0, sizeof(uint32_t) * (size_t)(n + 1));
    bi_attnres_args args = {n, now.d, now.n_bank, bank, p, now.w, now.eps, y, {fault, CODE}};
    CHECK_OK(backend->op->attnres(backend->ctx, &args));
    for (int32_t t = 0; t < n; t++) {
        row_case_same_bf16("y", y + t * now.d, now.want + pick[t] * now.d, now.d);
        ck_assert_uint_eq(fault[t], now.want_fault[pick[t]]);
    }
    row_case_untouched("the row after", y + n * now.d, sizeof(bi_bf16) * (size_t)now.d);
    row_case_arena.used = used;
}

START_TEST(equals_slow_form) {
    static const int32_t bank[] = {1, 2, 8, BR_BANK_MAX}, width[] = {33, 128, 257, 1000};
    for (int family = 0; family < ROW_FAMILIES; family++)
        for (int i = 0; i < 4; i++) {
            prepare(6, width[(family + i) % 4], bank[i], (row_family)family, test_seed() * 100 + (uint64_t)family);
            answer();
            row_case_survive(attempt, _i, now.n_row);
        }
}
END_TEST

/* Equal rows: every score is the same, so each row weighs exactly 1/4 and the mix is the row itself. */
START_TEST(equal_rows_mix_to_themselves) {
    prepare(5, 256, 3, ROW_NORMAL, 6);
    for (int32_t i = 0; i < 3; i++)
        now.bank[i] = now.p;
    answer();
    row_case_same_bf16("mix", now.want, now.p, now.n_row * now.d);
    row_case_survive(attempt, _i, now.n_row);
}
END_TEST

/* Scores 1,000 apart: the smaller weight is exactly +0, and a bank row of zeros has score +0 by eps, not NaN. */
START_TEST(far_scores_and_zero_rows) {
    prepare(4, 64, 2, ROW_PLATEAU, 6);
    bi_bf16 *low = row_case_bf16_array(4 * 64, ROW_PLATEAU, 1), *zero = row_case_bf16_array(4 * 64, ROW_ZEROS, 1);
    for (int32_t i = 0; i < 4 * 64; i++) {
        low[i] ^= 0x8000;
        zero[i] &= 0x8000;
    }
    for (int32_t i = 0; i < 64; i++)
        now.w[i] = 16.0f;
    now.bank[0] = low;
    now.bank[1] = zero;
    answer();
    row_case_same_bf16("mix", now.want, now.p, now.n_row * now.d);
    row_case_survive(attempt, _i, now.n_row);
}
END_TEST

START_TEST(faults_stay_in_their_row) {
    static const bi_bf16 bad[] = {0x7fc1, 0xff80, 0x6000};
    for (int where = 0; where < 3; where++)
        for (int i = 0; i < 3; i++) {
            prepare(5, 300, 2, ROW_NORMAL, 9);
            answer();
            bi_bf16 *clean = ROW_CASE_ARRAY(bi_bf16, now.n_row * now.d);
            memcpy(clean, now.want, sizeof(bi_bf16) * (size_t)(now.n_row * now.d));
            bi_bf16 *rows = where < 2 ? (bi_bf16 *)(uintptr_t)now.bank[where] : now.p;
            rows[2 * now.d + 257] = bad[i];
            answer();
            for (int32_t t = 0; t < now.n_row; t++)
                ck_assert_uint_eq(now.want_fault[t], t == 2 ? CODE : 0);
            row_case_same_bf16("rows before", now.want, clean, 2 * now.d);
            row_case_same_bf16("rows after", now.want + 3 * now.d, clean + 3 * now.d, 2 * now.d);
            row_case_survive(attempt, _i, now.n_row);
        }
}
END_TEST

/* The right function, in binary64. */
START_TEST(computes_the_mix) {
    prepare(3, 200, 4, ROW_NORMAL, 12);
    answer();
    for (int32_t t = 0; t < now.n_row; t++) {
        double v[5][200], e[5], total = 0;
        for (int r = 0; r < 5; r++) {
            double square = 0, score = 0;
            for (int i = 0; i < 200; i++) {
                v[r][i] = (double)row_case_widen((r < 4 ? now.bank[r] : now.p)[t * 200 + i]);
                square += v[r][i] * v[r][i] / 200;
                score += v[r][i] * (double)now.w[i];
            }
            e[r] = exp(score / sqrt(square + (double)now.eps));
            total += e[r];
        }
        for (int i = 0; i < 200; i++) {
            double want = 0, size = 0;
            for (int r = 0; r < 5; r++) {
                want += e[r] / total * v[r][i];
                size += e[r] / total * fabs(v[r][i]);
            }
            double got = (double)row_case_widen(now.want[t * 200 + i]);
            ck_assert_double_le(fabs(got - want), fabs(want) * 0x1p-8 + size * 0x1p-18);
        }
    }
}
END_TEST

START_TEST(weight_is_the_rounded_product) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    for (int family = 0; family < ROW_FAMILIES; family++) {
        row_case_arena.used = 0;
        float *norm = row_case_f32_array(301, (row_family)family, 1), *proj = row_case_f32_array(301, (row_family)family, 2);
        float *got = ROW_CASE_ARRAY(float, 302), *want = ROW_CASE_ARRAY(float, 302);
        CHECK_OK(backend.op->attnres_weight(backend.ctx, got, norm, proj, 301));
        slow_attnres_weight(want, norm, proj, 301);
        row_case_same_f32("w", got, want, 302);
    }
    row_case_close(&backend, pool);
}
END_TEST

/* y apart, y = a, y = b; marks exactly the rows that hold a NaN or Inf after rounding. */
static void try_residual(const bi_backend *backend, int32_t n_row, int32_t d, row_family family, int alias) {
    row_case_arena.used = 0;
    bi_bf16 *a = row_case_bf16_array(n_row * d, family, 5), *b = row_case_bf16_array(n_row * d, family, 6);
    a[d + d / 2] = 0x7f7f; /* the largest twice leaves bf16 */
    b[d + d / 2] = 0x7f7f;
    a[2 * d + d - 1] = 0x7fa0; /* NaN */
    a[3 * d] = 0x7f7f; /* 2^119 more rounds to Inf in bf16 though the binary32 sum is finite */
    b[3 * d] = 0x7b00;
    bi_bf16 *want = ROW_CASE_ARRAY(bi_bf16, n_row * d), *apart = ROW_CASE_ARRAY(bi_bf16, n_row * d);
    uint32_t *fault = ROW_CASE_ARRAY(uint32_t, n_row), *want_fault = ROW_CASE_ARRAY(uint32_t, n_row);
    memset(fault, 0, sizeof(uint32_t) * (size_t)n_row);
    memset(want_fault, 0, sizeof(uint32_t) * (size_t)n_row);
    bi_residual_args args = {n_row, d, a, b, want, {want_fault, CODE}};
    slow_residual(&args);
    for (int32_t t = 1; t < 4; t++)
        ck_assert_uint_eq(want_fault[t], CODE);
    args.y = alias == 0 ? apart : alias == 1 ? a : b;
    args.fault.row = fault;
    CHECK_OK(backend->op->residual(backend->ctx, &args));
    row_case_same_bf16("p", args.y, want, n_row * d);
    for (int32_t t = 0; t < n_row; t++)
        ck_assert_uint_eq(fault[t], want_fault[t]);
}

START_TEST(residual_equals_slow_form) {
    static const int32_t width[] = {1, 127, 128, 129, 1000};
    static const int threads[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        bi_backend backend;
        br_pool *pool;
        if (!row_case_open(_i, threads[i], &backend, &pool))
            return;
        for (int family = 0; family < ROW_FAMILIES; family++)
            for (int w = 0; w < 5; w++)
                for (int alias = 0; alias < 3; alias++)
                    try_residual(&backend, w == 4 ? 50 : 4, width[w], (row_family)family, alias);
        row_case_close(&backend, pool);
    }
}
END_TEST

START_TEST(refuses_wrong_shapes) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    prepare(2, 64, 2, ROW_NORMAL, 4);
    bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, 2 * 64);
    bi_attnres_args good = {2, 64, 2, now.bank, now.p, now.w, now.eps, y, {NULL, 0}}, args = good;
    args.n_bank = 0;
    CHECK_FAILS(backend.op->attnres(backend.ctx, &args), BR_E_SHAPE);
    args.n_bank = BR_BANK_MAX + 1;
    CHECK_FAILS(backend.op->attnres(backend.ctx, &args), BR_E_SHAPE);
    args = good, args.n_row = -1;
    CHECK_FAILS(backend.op->attnres(backend.ctx, &args), BR_E_SHAPE);
    args = good, args.d = 0;
    CHECK_FAILS(backend.op->attnres(backend.ctx, &args), BR_E_SHAPE);
    bi_residual_args sum = {-1, 64, now.p, now.p, y, {NULL, 0}};
    CHECK_FAILS(backend.op->residual(backend.ctx, &sum), BR_E_SHAPE);
    sum.n_row = 2, sum.d = 0;
    CHECK_FAILS(backend.op->residual(backend.ctx, &sum), BR_E_SHAPE);
    row_case_untouched("y", y, sizeof(bi_bf16) * 2 * 64);
    CHECK_OK(backend.op->attnres(backend.ctx, &good));
    row_case_close(&backend, pool);
}
END_TEST

Suite *test_attnres_suite(void) {
    Suite *suite = suite_create("attnres");
    TCase *tcase = tcase_create("attnres");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_loop_test(tcase, equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, equal_rows_mix_to_themselves, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, far_scores_and_zero_rows, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, faults_stay_in_their_row, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, computes_the_mix);
    tcase_add_loop_test(tcase, weight_is_the_rounded_product, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, residual_equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, refuses_wrong_shapes, 0, ROW_CASE_ISAS);
    suite_add_tcase(suite, tcase);
    return suite;
}
