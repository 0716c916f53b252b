/* RMSNorm and LayerNorm: the oracle against the slow form and the survival list. */
#include "row_case.h"
#include "slow_row.h"

#include <math.h>

enum { CODE = 77, GAP = 5 };

typedef br_status (*norm_op)(bi_ctx *, const bi_norm_args *);

/* One test's inputs, and the slow form's answer for all rows. */
static struct {
    int layer, in_place;
    int32_t n_row, d;
    bi_bf16 *x, *want;
    float *w, *b, eps;
    uint32_t *want_fault;
} now;

static norm_op op_of(const bi_backend *backend) {
    return now.layer ? backend->op->layernorm : backend->op->rmsnorm;
}

static void prepare(int layer, int32_t n_row, int32_t d, row_family family, uint64_t key) {
    row_case_arena.used = 0;
    now.layer = layer;
    now.in_place = 0;
    now.n_row = n_row;
    now.d = d;
    now.eps = 1e-5f;
    now.x = row_case_bf16_array((int64_t)n_row * d, family, key);
    now.w = row_case_f32_array(d, ROW_NORMAL, key + 1);
    now.b = layer ? row_case_f32_array(d, ROW_NORMAL, key + 2) : NULL;
    now.want = ROW_CASE_ARRAY(bi_bf16, n_row * d);
    now.want_fault = ROW_CASE_ARRAY(uint32_t, n_row);
}

static void answer(void) {
    memset(now.want_fault, 0, sizeof(uint32_t) * (size_t)now.n_row);
    bi_norm_args args = {now.n_row, now.d, now.x, now.d, now.w, now.b, now.eps, now.want, now.d, {now.want_fault, CODE}};
    if (now.layer)
        slow_layernorm(&args);
    else
        slow_rmsnorm(&args);
}

/* Rows lie GAP apart in a poisoned array; the gaps must come out as they went in. */
static void attempt(const bi_backend *backend, const int32_t *pick, int32_t n) {
    size_t used = row_case_arena.used;
    int32_t ld = now.d + GAP;
    bi_bf16 *x = ROW_CASE_ARRAY(bi_bf16, (n + 1) * ld), *y = now.in_place ? x : ROW_CASE_ARRAY(bi_bf16, (n + 1) * ld);
    uint32_t *fault = ROW_CASE_ARRAY(uint32_t, n + 1);
    memset(fault, 0, sizeof(uint32_t) * (size_t)(n + 1));
    for (int32_t t = 0; t < n; t++)
        memcpy(x + t * ld, now.x + pick[t] * now.d, sizeof(bi_bf16) * (size_t)now.d);
    bi_norm_args args = {n, now.d, x, ld, now.w, now.b, now.eps, y, ld, {fault, CODE}};
    CHECK_OK(op_of(backend)(backend->ctx, &args));
    for (int32_t t = 0; t < n; t++) {
        row_case_same_bf16("y", y + t * ld, now.want + pick[t] * now.d, now.d);
        row_case_untouched("gap", y + t * ld + now.d, sizeof(bi_bf16) * GAP);
        ck_assert_uint_eq(fault[t], now.want_fault[pick[t]]);
    }
    row_case_arena.used = used;
}

START_TEST(equals_slow_form) {
    static const int32_t width[] = {1, 31, 128, 255, 256, 257, 768, 1000};
    for (int layer = 0; layer < 2; layer++)
        for (int family = 0; family < ROW_FAMILIES; family++)
            for (int w = 0; w < 8; w++) {
                prepare(layer, 9, width[w], (row_family)family, test_seed() * 100 + (uint64_t)family);
                if (layer && w % 4 == 0)
                    now.b = NULL;
                now.in_place = w % 2;
                answer();
                row_case_survive(attempt, _i, now.n_row);
            }
}
END_TEST

/* The row lands on ties of R, give or take the last bits of binary32. Eight rows of each op, since a wrong rstd differs in
 * some only. */
START_TEST(rounds_in_order) {
    enum { D = 1024 };
    for (int i = 0; i < 16; i++) {
        int layer = i % 2;
        prepare(layer, 1, D, ROW_NORMAL, 51 + (uint64_t)i);
        double mean = 0, square = 0, x[D];
        for (int j = 0; j < D; j++) {
            x[j] = (double)row_case_widen(now.x[j]);
            mean += layer ? x[j] / D : 0;
        }
        for (int j = 0; j < D; j++)
            square += (x[j] - mean) * (x[j] - mean) / D;
        for (int j = 0; j < D; j++) {
            double target = row_case_tie(5, j) - (layer ? (double)now.b[j] : 0);
            now.w[j] = (float)(target / ((x[j] - mean) / sqrt(square + (double)now.eps)));
        }
        answer();
        row_case_survive(attempt, _i, now.n_row);
    }
}
END_TEST

/* Enough rows that several pool jobs exist, at the width of the real model. */
START_TEST(many_rows_equal_slow_form) {
    for (int layer = 0; layer < 2; layer++) {
        prepare(layer, 12, 7168, ROW_NORMAL, test_seed());
        answer();
        row_case_survive(attempt, _i, now.n_row);
    }
}
END_TEST

/* A row whose squares are not finite is marked, once, and changes nothing else; a row that merely overflows y is not. */
START_TEST(faults_stay_in_their_row) {
    static const bi_bf16 bad[] = {0x7fc1, 0xff80, 0x7f80, 0x6000};
    for (int layer = 0; layer < 2; layer++)
        for (int i = 0; i < 4; i++) {
            prepare(layer, 5, 300, ROW_NORMAL, 9);
            answer();
            bi_bf16 *clean = ROW_CASE_ARRAY(bi_bf16, now.n_row * now.d);
            memcpy(clean, now.want, sizeof(bi_bf16) * (size_t)(now.n_row * now.d));
            now.x[2 * now.d + 257] = bad[i];
            answer();
            for (int32_t t = 0; t < now.n_row; t++)
                ck_assert_uint_eq(now.want_fault[t], t == 2 ? CODE : 0);
            row_case_same_bf16("rows before", now.want, clean, 2 * now.d);
            row_case_same_bf16("rows after", now.want + 3 * now.d, clean + 3 * now.d, 2 * now.d);
            row_case_survive(attempt, _i, now.n_row);
        }
}
END_TEST

START_TEST(first_fault_is_kept) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    for (int layer = 0; layer < 2; layer++) {
        prepare(layer, 2, 64, ROW_HUGE, 3);
        uint32_t fault[2] = {5, 0};
        bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, 2 * 64);
        bi_norm_args args = {2, 64, now.x, 64, now.w, now.b, now.eps, y, 64, {fault, CODE}};
        CHECK_OK(op_of(&backend)(backend.ctx, &args));
        ck_assert_uint_eq(fault[0], 5);
        ck_assert_uint_eq(fault[1], CODE);
        args.fault.row = NULL;
        CHECK_OK(op_of(&backend)(backend.ctx, &args));
    }
    row_case_close(&backend, pool);
}
END_TEST

/* The right function, in binary64: 2^-8 relative is one rounding to bf16. */
START_TEST(computes_the_norm) {
    for (int layer = 0; layer < 2; layer++) {
        prepare(layer, 4, 500, ROW_NORMAL, 21);
        answer();
        for (int32_t t = 0; t < now.n_row; t++) {
            double mean = 0, square = 0, x[500];
            for (int i = 0; i < 500; i++) {
                x[i] = (double)row_case_widen(now.x[t * 500 + i]);
                mean += layer ? x[i] / 500 : 0;
            }
            for (int i = 0; i < 500; i++)
                square += (x[i] - mean) * (x[i] - mean) / 500;
            for (int i = 0; i < 500; i++) {
                double scaled = (x[i] - mean) / sqrt(square + (double)now.eps) * (double)now.w[i];
                double want = scaled + (layer ? (double)now.b[i] : 0);
                double got = (double)row_case_widen(now.want[t * 500 + i]);
                ck_assert_double_le(fabs(got - want), fabs(want) * 0x1p-8 + fabs(scaled) * 0x1p-20);
            }
        }
    }
}
END_TEST

START_TEST(refuses_wrong_shapes) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    for (int layer = 0; layer < 2; layer++) {
        prepare(layer, 2, 64, ROW_NORMAL, 4);
        bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, 2 * 70);
        bi_norm_args good = {2, 64, now.x, 64, now.w, now.b, now.eps, y, 64, {NULL, 0}}, args = good;
        args.n_row = -1;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        args = good, args.d = 0;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        args = good, args.d = args.x_ld = args.y_ld = BR_D_MODEL_MAX + 1;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        args = good, args.x_ld = 63;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        args = good, args.y_ld = 63;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        args = good, args.y = now.x, args.y_ld = 65;
        CHECK_FAILS(op_of(&backend)(backend.ctx, &args), BR_E_SHAPE);
        row_case_untouched("y", y, sizeof(bi_bf16) * 2 * 70);
    }
    row_case_close(&backend, pool);
}
END_TEST

Suite *test_norm_suite(void) {
    Suite *suite = suite_create("norm");
    TCase *tcase = tcase_create("norm");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_loop_test(tcase, equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, rounds_in_order, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, many_rows_equal_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, faults_stay_in_their_row, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, first_fault_is_kept, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, computes_the_norm);
    tcase_add_loop_test(tcase, refuses_wrong_shapes, 0, ROW_CASE_ISAS);
    suite_add_tcase(suite, tcase);
    return suite;
}
