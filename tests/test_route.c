/* bi_route: the sigmoid router, against the slow form and on rows whose answer is written out. */
#include "test_support.h"

#include "bi_bits.h"
#include "op_rig.h"
#include "slow_block.h"
#include "slow_moe.h"

#include <math.h>
#include <string.h>

enum { ROW_MAX = 70, D_MAX = 128, EXPERT_MAX = 320, TOPK_MAX = 16 };

typedef struct route_case {
    int n_row, d, n_expert, topk, renormalize;
    float scale;
    bi_bf16 x[ROW_MAX * D_MAX], w[EXPERT_MAX * D_MAX];
    float bias[EXPERT_MAX];
} route_case;

typedef struct route_out {
    int32_t expert[ROW_MAX * EXPERT_MAX];
    float p[ROW_MAX * EXPERT_MAX], logit[ROW_MAX * EXPERT_MAX];
    uint32_t fault[ROW_MAX];
} route_out;

static void open_rig(op_rig *rig, const char *isa, int n_thread) {
    const bi_limits limits = {.n_row = ROW_MAX, .d_model = D_MAX, .n_expert = EXPERT_MAX, .n_expert_topk = TOPK_MAX};
    op_rig_open(rig, &limits, isa, n_thread);
}

static bi_route_args args_of(const route_case *c, const bi_mat *w, route_out *out) {
    memset(out, 0x5a, sizeof *out);
    memset(out->fault, 0, sizeof out->fault);
    bi_route_args a = {.n_row = c->n_row,
                       .d = c->d,
                       .n_expert = c->n_expert,
                       .topk = c->topk,
                       .x = c->x,
                       .w = *w,
                       .bias = c->bias,
                       .renormalize = c->renormalize,
                       .scale = c->scale,
                       .expert = out->expert,
                       .p = out->p,
                       .logit = out->logit,
                       .fault = {out->fault, 77}};
    return a;
}

static void run(op_rig *rig, const bi_route_args *a) {
    op_rig_poison(rig);
    CHECK_OK(rig->backend.op->route(rig->backend.ctx, a));
}

static void run_case(op_rig *rig, const route_case *c, route_out *out) {
    bi_mat w = op_rig_mat(rig, c->w, c->n_expert, c->d);
    bi_route_args a = args_of(c, &w, out);
    run(rig, &a);
}

static void check_bits(float got, float wanted, const char *what, int row, int i) {
    ck_assert_msg(bi_u32_of(got) == bi_u32_of(wanted), "row %d, %s %d is %08x (%a), wanted %08x (%a)", row, what, i,
                  bi_u32_of(got), (double)got, bi_u32_of(wanted), (double)wanted);
}

/* ---- random and adversarial rows against the slow form ------------------------------------------------------------- */

static void make_case(op_random *random, route_case *c, int round) {
    static const int experts[] = {32, 1, 33, 64, 16, 5, 320, 256};
    static const int widths[] = {128, 16, 40, 100, 7, 64};
    static const float scales[] = {1.0f, 2.446f, 2.5f};
    c->n_expert = experts[round % 8];
    c->d = widths[round % 6];
    c->n_row = c->n_expert > 64 ? 3 : 1 + op_random_below(random, 9);
    c->topk = 1 + op_random_below(random, c->n_expert < TOPK_MAX ? c->n_expert : TOPK_MAX);
    c->renormalize = op_random_below(random, 2);
    c->scale = scales[op_random_below(random, 3)];
    int kind = round % 7;
    float spread = kind == 1 ? 0.0f : kind == 2 ? 40.0f : kind == 3 ? 0x1p-66f : 0.3f;
    op_random_bf16s(random, kind == 3 ? 0x1p-66f : 1.0f, c->x, c->n_row * c->d);
    op_random_bf16s(random, spread, c->w, c->n_expert * c->d);
    op_random_normals(random, 0.2f, c->bias, c->n_expert);
    for (int e = 0; e < c->n_expert; e++) {
        if (kind == 4 && e % 3) /* equal rows of W: ties among experts */
            memcpy(c->w + e * c->d, c->w, sizeof *c->w * (size_t)c->d);
        if (kind == 1 || kind == 4)
            c->bias[e] = 0.0f;
        if (kind == 5) /* sigmoid is about 1/2: sums of +0 and -0 */
            c->bias[e] = e % 2 ? -0.5f : 0.0f;
        if (kind == 6) /* s + bias has few values: P-4 decides */
            c->bias[e] = (float)op_random_below(random, 3) * 0x1p20f;
    }
}

static void check_case(const route_case *c, const route_out *out) {
    for (int t = 0; t < c->n_row; t++) {
        float logit[EXPERT_MAX], p[EXPERT_MAX];
        int expert[EXPERT_MAX];
        slow_map map = {.n_out = c->n_expert, .n_in = c->d, .w = c->w};
        slow_map_apply(&map, c->x + t * c->d, logit);
        slow_route(logit, c->bias, c->n_expert, c->topk, c->renormalize, c->scale, expert, p);
        for (int e = 0; e < c->n_expert; e++)
            check_bits(out->logit[t * c->n_expert + e], logit[e], "logit", t, e);
        for (int i = 0; i < c->topk; i++) {
            ck_assert_msg(out->expert[t * c->topk + i] == expert[i], "row %d: choice %d is expert %d, wanted %d", t, i,
                          out->expert[t * c->topk + i], expert[i]);
            check_bits(out->p[t * c->topk + i], p[i], "p", t, i);
        }
        ck_assert_uint_eq(out->fault[t], 0);
    }
}

START_TEST(route_equals_slow_form) {
    const char *isas[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isas), n_round = test_is_long() ? 4000 : 336;
    static route_case c;
    static route_out out;
    op_random random = {test_seed(), 0};
    for (int r = 0; r < n_isa; r++) {
        op_rig rig;
        open_rig(&rig, isas[r], 1 + r);
        op_random again = random;
        for (int round = 0; round < n_round; round++) {
            make_case(&again, &c, round);
            run_case(&rig, &c, &out);
            check_case(&c, &out);
        }
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- rows whose answer is written out ------------------------------------------------------------------------------ */

/* One row x = 1 of width 1: the logits are the weights themselves. */
static void one_row(route_case *c, const float *logit, int n_expert, int topk) {
    memset(c, 0, sizeof *c);
    c->n_row = c->d = c->renormalize = 1;
    c->n_expert = n_expert;
    c->topk = topk;
    c->scale = 1.0f;
    c->x[0] = bi_round(1.0f);
    for (int e = 0; e < n_expert; e++)
        c->w[e] = bi_round(logit[e]);
}

static void check_choice(op_rig *rig, const route_case *c, const int *expert, const double *p) {
    static route_out out;
    run_case(rig, c, &out);
    for (int i = 0; i < c->topk; i++) {
        ck_assert_int_eq(out.expert[i], expert[i]);
        ck_assert_double_eq_tol((double)out.p[i], p[i], 1e-6);
    }
}

START_TEST(bias_selects_and_does_not_weigh) {
    static const float logit[4] = {0.0f, 2.0f, -1.0f, 1.0f};
    static route_case c;
    op_rig rig;
    open_rig(&rig, NULL, 1);
    double s0 = 0.5, s1 = 1 / (1 + exp(-2.0)), s2 = 1 / (1 + exp(1.0)), s3 = 1 / (1 + exp(-1.0));
    one_row(&c, logit, 4, 2);
    check_choice(&rig, &c, (const int[]){1, 3}, (const double[]){s1 / (s1 + s3), s3 / (s1 + s3)});
    c.bias[2] = 5.0f; /* the worst expert is chosen; its weight stays its own */
    check_choice(&rig, &c, (const int[]){1, 2}, (const double[]){s1 / (s1 + s2), s2 / (s1 + s2)});
    c.renormalize = 0;
    c.scale = 2.5f;
    check_choice(&rig, &c, (const int[]){1, 2}, (const double[]){2.5 * s1, 2.5 * s2});
    c.bias[2] = -5.0f;
    c.bias[1] = -5.0f;
    check_choice(&rig, &c, (const int[]){0, 3}, (const double[]){2.5 * s0, 2.5 * s3});
    op_rig_close(&rig);
}
END_TEST

START_TEST(ties_take_the_lower_expert_and_zero_scores_stay_finite) {
    float logit[6] = {1.0f, 3.0f, 3.0f, 3.0f, 3.0f, 1.0f};
    static route_case c;
    op_rig rig;
    open_rig(&rig, NULL, 1);
    one_row(&c, logit, 6, 2);
    check_choice(&rig, &c, (const int[]){1, 2}, (const double[]){0.5, 0.5});
    one_row(&c, logit, 6, 5);
    double s = 1 / (1 + exp(-3.0)), low = 1 / (1 + exp(-1.0)), sum = 4 * s + low;
    check_choice(&rig, &c, (const int[]){0, 1, 2, 3, 4}, (const double[]){low / sum, s / sum, s / sum, s / sum, s / sum});
    for (int e = 0; e < 6; e++)
        logit[e] = -300.0f; /* every sigmoid is +0: 0 / 1e-20 */
    one_row(&c, logit, 6, 3);
    check_choice(&rig, &c, (const int[]){0, 1, 2}, (const double[]){0, 0, 0});
    for (int e = 0; e < 6; e++)
        logit[e] = -46.0f; /* sigmoid is about 1e-20, as large as the constant of the clause */
    one_row(&c, logit, 6, 1);
    double tiny = exp(-46.0);
    check_choice(&rig, &c, (const int[]){0}, (const double[]){tiny / (tiny + 1e-20)});
    op_rig_close(&rig);
}
END_TEST

/* ---- a row is a function of itself --------------------------------------------------------------------------------- */

START_TEST(batch_order_and_threads_do_not_matter) {
    static route_case c, part;
    static route_out base, out;
    op_random random = {test_seed(), 1};
    make_case(&random, &c, 0);
    c.n_row = ROW_MAX; /* more than one tile */
    op_random_bf16s(&random, 1.0f, c.x, c.n_row * c.d);
    int order[ROW_MAX];
    op_random_order(&random, order, ROW_MAX);
    static const int n_thread[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        op_rig rig;
        open_rig(&rig, NULL, n_thread[i]);
        run_case(&rig, &c, i ? &out : &base);
        if (i)
            ck_assert_mem_eq(&out, &base, sizeof out);
        part = c;
        for (int t = 0; t < ROW_MAX; t++)
            memcpy(part.x + t * c.d, c.x + order[t] * c.d, sizeof *c.x * (size_t)c.d);
        run_case(&rig, &part, &out);
        for (int t = 0; t < ROW_MAX; t++) {
            ck_assert_mem_eq(out.p + t * c.topk, base.p + order[t] * c.topk, sizeof *out.p * (size_t)c.topk);
            ck_assert_mem_eq(out.expert + t * c.topk, base.expert + order[t] * c.topk, sizeof *out.expert * (size_t)c.topk);
        }
        part.n_row = 1;
        for (int t = 0; t < ROW_MAX; t++) {
            memcpy(part.x, c.x + t * c.d, sizeof *c.x * (size_t)c.d);
            run_case(&rig, &part, &out);
            ck_assert_mem_eq(out.p, base.p + t * c.topk, sizeof *out.p * (size_t)c.topk);
            ck_assert_mem_eq(out.expert, base.expert + t * c.topk, sizeof *out.expert * (size_t)c.topk);
        }
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- faults and refusals ------------------------------------------------------------------------------------------- */

START_TEST(a_row_with_a_bad_logit_faults_alone) {
    static route_case c;
    static route_out base, out;
    op_random random = {test_seed(), 2};
    make_case(&random, &c, 0);
    c.n_row = 3;
    c.topk = 4;
    op_random_bf16s(&random, 1.0f, c.x, c.n_row * c.d);
    op_rig rig;
    open_rig(&rig, NULL, 2);
    run_case(&rig, &c, &base);
    static const uint16_t bad[] = {0x7fff, 0x7f80, 0x7f00}; /* NaN; Inf; finite, with a product beyond binary32 */
    bi_bf16 kept_x = c.x[c.d], kept_w = c.w[9 * c.d];
    for (int i = 0; i < 3; i++) {
        c.x[c.d] = bad[i];
        c.w[9 * c.d] = i == 2 ? 0x7f00 : kept_w;
        run_case(&rig, &c, &out);
        ck_assert_uint_eq(out.fault[1], 77);
        for (int k = 0; k < c.topk; k++) {
            ck_assert_int_eq(out.expert[c.topk + k], k);
            check_bits(out.p[c.topk + k], 0.0f, "p", 1, k);
        }
        ck_assert_uint_eq(out.fault[0], 0);
        ck_assert_uint_eq(out.fault[2], 0);
        if (i == 2)
            continue; /* the neighbours saw another weight */
        ck_assert_mem_eq(out.p, base.p, sizeof *out.p * (size_t)c.topk);
        ck_assert_mem_eq(out.p + 2 * c.topk, base.p + 2 * c.topk, sizeof *out.p * (size_t)c.topk);
        ck_assert_mem_eq(out.expert + 2 * c.topk, base.expert + 2 * c.topk, sizeof *out.expert * (size_t)c.topk);
    }
    c.w[9 * c.d] = kept_w;
    c.x[c.d] = 0x7fff;
    bi_mat w = op_rig_mat(&rig, c.w, c.n_expert, c.d);
    bi_route_args a = args_of(&c, &w, &out);
    out.fault[1] = 5; /* the first fault of a row stays */
    a.logit = NULL;
    run(&rig, &a);
    ck_assert_uint_eq(out.fault[1], 5);
    a.fault.row = NULL;
    run(&rig, &a);
    c.x[c.d] = kept_x;
    op_rig_close(&rig);
}
END_TEST

START_TEST(bad_shapes_are_refused_before_any_output) {
    static route_case c;
    static route_out out, untouched;
    op_random random = {test_seed(), 3};
    make_case(&random, &c, 0);
    op_rig rig;
    open_rig(&rig, NULL, 1);
    bi_mat w = op_rig_mat(&rig, c.w, c.n_expert, c.d);
    (void)args_of(&c, &w, &untouched);
#define REFUSED(field, value)                                                     \
    do {                                                                          \
        bi_route_args a = args_of(&c, &w, &out);                                  \
        a.field = (value);                                                        \
        CHECK_FAILS(rig.backend.op->route(rig.backend.ctx, &a), BR_E_SHAPE);      \
        ck_assert_mem_eq(&out, &untouched, sizeof out);                           \
    } while (0)
    REFUSED(n_row, -1);
    REFUSED(d, 0);
    REFUSED(d, D_MAX + 1);
    REFUSED(d, c.d - 1);
    REFUSED(n_expert, 0);
    REFUSED(n_expert, EXPERT_MAX + 1);
    REFUSED(n_expert, c.n_expert - 1);
    REFUSED(topk, 0);
    REFUSED(topk, c.n_expert + 1);
    REFUSED(w.data, NULL);
#undef REFUSED
    bi_route_args a = args_of(&c, &w, &out);
    a.n_row = 0;
    run(&rig, &a);
    ck_assert_mem_eq(&out, &untouched, sizeof out);
    op_rig_close(&rig);
}
END_TEST

Suite *test_route_suite(void) {
    Suite *suite = suite_create("route");
    TCase *tcase = tcase_create("route");
    tcase_set_timeout(tcase, test_is_long() ? 600 : 30);
    tcase_add_test(tcase, route_equals_slow_form);
    tcase_add_test(tcase, bias_selects_and_does_not_weigh);
    tcase_add_test(tcase, ties_take_the_lower_expert_and_zero_scores_stay_finite);
    tcase_add_test(tcase, batch_order_and_threads_do_not_matter);
    tcase_add_test(tcase, a_row_with_a_bad_logit_faults_alone);
    tcase_add_test(tcase, bad_shapes_are_refused_before_any_output);
    suite_add_tcase(suite, tcase);
    return suite;
}
