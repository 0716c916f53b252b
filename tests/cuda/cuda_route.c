/* route on the GPU: the router with its ties, against the oracle, byte for byte. */
#include "cuda_case.h"
#include "test_support.h"
#include "twin.h"

#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20 };

typedef struct route_case {
    int n_row, d, n_expert, topk, renormalize, with_logit;
    int kind; /* of inputs, below */
    int bad_row;
} route_case;

/* kind 1: all logits 0; 2: large; 3: tiny; 4: equal rows of W; 5: sums of +0 and -0; 6: a few values of s + bias. */
static void make_weights(op_random *random, const route_case *c, bi_bf16 *w, float *bias) {
    const float spread = c->kind == 1 ? 0.0f : c->kind == 2 ? 40.0f : c->kind == 3 ? 0x1p-66f : 0.3f;
    op_random_bf16s(random, spread, w, c->n_expert * c->d);
    op_random_normals(random, 0.2f, bias, c->n_expert);
    for (int e = 0; e < c->n_expert; e++) {
        if (c->kind == 4 && e % 3)
            memcpy(w + (size_t)e * (size_t)c->d, w, sizeof *w * (size_t)c->d);
        if (c->kind == 1 || c->kind == 4)
            bias[e] = 0.0f;
        if (c->kind == 5)
            bias[e] = e % 2 ? -0.5f : 0.0f;
        if (c->kind == 6)
            bias[e] = (float)op_random_below(random, 3) * 0x1p20f;
    }
}

/* Up to 64 rows the own kernel of few rows, or more of cuBLASLt where widths and strides are in its steps, else the tiles; then a launch. */
static void check_launches(twin *t, const route_case *c, const char *what) {
    if (c->n_row <= 64)
        twin_launched(t, what, "linear_small 1, route 1");
    else if (c->d % 8 == 0 && c->n_expert % 8 == 0)
        twin_launched(t, what, "linear_large|linear_tile 1, route 1");
    else
        twin_launched(t, what, "linear_tile 1, route 1");
}

/* fits: scratch takes the logits of all rows at once. */
static void run_case(twin *t, op_random *random, const route_case *c, int fits) {
    char what[160];
    twin_reset(t);
    bi_bf16 *x = TWIN_ARRAY(t, bi_bf16, "x", c->n_row * c->d), *w = TWIN_ARRAY(t, bi_bf16, "weights", c->n_expert * c->d);
    float *bias = TWIN_ARRAY(t, float, "bias", c->n_expert), *p = TWIN_ARRAY(t, float, "p", c->n_row * c->topk);
    float *logit = c->with_logit ? TWIN_ARRAY(t, float, "logits", c->n_row * c->n_expert) : NULL;
    int32_t *expert = TWIN_ARRAY(t, int32_t, "experts", c->n_row * c->topk);
    uint32_t *fault = TWIN_ARRAY(t, uint32_t, "faults", c->n_row);
    op_random_bf16s(random, c->kind == 3 ? 0x1p-66f : 1.0f, x, c->n_row * c->d);
    make_weights(random, c, w, bias);
    memset(fault, 0, sizeof *fault * (size_t)c->n_row);
    if (c->bad_row >= 0)
        x[c->bad_row * c->d] = c->bad_row % 2 ? 0x7fff : 0xff80;
    twin_mat map = twin_stack(t, w, 1, c->n_expert, c->d);
    twin_begin(t);
    TWIN_RUNS(t, side) {
        bi_route_args a = {.n_row = c->n_row, .d = c->d, .n_expert = c->n_expert, .topk = c->topk, .x = twin_at(t, side, x),
                           .w = map.side[side], .bias = twin_at(t, side, bias), .renormalize = c->renormalize, .scale = 2.446f,
                           .expert = twin_at(t, side, expert), .p = twin_at(t, side, p), .logit = twin_at(t, side, logit),
                           .fault = {twin_at(t, side, fault), 77}};
        CHECK_OK(t->backend[side].op->route(t->backend[side].ctx, &a));
    }
    snprintf(what, sizeof what, "%d rows of %d, %d of %d experts, kind %d, logits %d", c->n_row, c->d, c->topk, c->n_expert, c->kind,
             c->with_logit);
    twin_compare(t, what);
    if (fits)
        check_launches(t, c, what);
}

static const int ROWS[] = {1, 3, 8, 9, 64, 65, 130, 600};

START_TEST(every_kind_and_size) {
    static const int experts[] = {1, 5, 16, 31, 32, 33, 255, 256, 257, 896, 1023, 1024, 1025, 2000};
    const bi_limits limits = {.n_row = 600, .d_in = 128, .d_model = 128, .n_expert = 2000, .n_expert_topk = 64};
    twin t;
    op_random random = {test_seed(), 0};
    twin_open(&t, &limits, 12 * MIB);
    for (int e = 0; e < 14; e++)
        for (int kind = 0; kind < 7; kind++) {
            static const int widths[] = {128, 16, 40, 100, 7, 64};
            route_case c = {.n_row = ROWS[(e + kind) % 8], .d = widths[(e * 7 + kind) % 6], .n_expert = experts[e], .kind = kind, .bad_row = -1};
            c.topk = kind == 0 ? c.n_expert : 1 + op_random_below(&random, c.n_expert < 40 ? c.n_expert : 40);
            c.renormalize = (e + kind) % 2;
            c.with_logit = (e + kind) % 3 == 0;
            c.bad_row = kind % 2 ? c.n_row / 2 : -1;
            run_case(&t, &random, &c, c.n_row <= limits.n_row);
        }
    twin_close(&t);
}
END_TEST

START_TEST(more_rows_than_the_scratch_was_sized_for) {
    const bi_limits limits = {.n_row = 70, .d_in = 64, .d_model = 64, .n_expert = 96, .n_expert_topk = 8};
    twin t;
    op_random random = {test_seed(), 1};
    twin_open(&t, &limits, 6 * MIB);
    for (int i = 0; i < 8; i++) {
        route_case c = {.n_row = ROWS[i], .d = 64, .n_expert = 96, .topk = 8, .renormalize = 1, .bad_row = -1};
        run_case(&t, &random, &c, c.n_row <= limits.n_row);
    }
    twin_close(&t);
}
END_TEST

START_TEST(real_widths) {
    static const int rows[] = {1, 16, 64, 65, 128};
    const bi_limits limits = {.n_row = 128, .d_in = 7168, .d_model = 7168, .n_expert = 896, .n_expert_topk = 16};
    twin t;
    op_random random = {test_seed(), 2};
    twin_open(&t, &limits, 24 * MIB);
    for (int i = 0; i < 5; i++) {
        route_case c = {.n_row = rows[i], .d = 7168, .n_expert = 896, .topk = 16, .renormalize = 1, .with_logit = i % 2, .bad_row = -1};
        run_case(&t, &random, &c, c.n_row <= limits.n_row);
    }
    twin_close(&t);
}
END_TEST

START_TEST(refusals_are_the_oracles) {
    const bi_limits limits = {.n_row = 70, .d_in = 64, .d_model = 64, .n_expert = 96, .n_expert_topk = 8};
    twin t;
    twin_open(&t, &limits, 1 * MIB);
    for (int side = 0; side < 2; side++) {
        static const bi_bf16 any;
        const bi_route_args good = {.n_row = 1, .d = 64, .n_expert = 96, .topk = 8, .w = {.data = &any, .n_out = 96, .n_in = 64}};
#define REFUSED(change)                                                                   \
    do {                                                                                  \
        bi_route_args a = good;                                                           \
        change;                                                                           \
        CHECK_FAILS(t.backend[side].op->route(t.backend[side].ctx, &a), BR_E_SHAPE);      \
    } while (0)
        REFUSED(a.n_row = -1);
        REFUSED(a.d = 0);
        REFUSED(a.d = 65);
        REFUSED(a.d = 63);
        REFUSED(a.n_expert = 0);
        REFUSED(a.n_expert = 97);
        REFUSED(a.n_expert = 95);
        REFUSED(a.topk = 0);
        REFUSED(a.topk = 97);
        REFUSED(a.w.data = NULL);
#undef REFUSED
        bi_route_args none = good;
        none.n_row = 0;
        CHECK_OK(t.backend[side].op->route(t.backend[side].ctx, &none));
    }
    twin_close(&t);
}
END_TEST

Suite *cuda_route_suite(void) {
    Suite *suite = suite_create("route");
    CUDA_CASE(suite, every_kind_and_size);
    CUDA_CASE(suite, more_rows_than_the_scratch_was_sized_for);
    CUDA_CASE(suite, real_widths);
    CUDA_CASE(suite, refusals_are_the_oracles);
    return suite;
}
