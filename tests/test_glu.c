/* The gated activation, the embedding and the short convolution: the oracle against the slow forms and the survival list. */
#include "row_case.h"
#include "slow_row.h"

#include <math.h>

enum { GAP = 7 };

/* ---- activation ---- */

static struct {
    int32_t n_row, d;
    bi_act act;
    float *g, *u;
    bi_bf16 *want;
} glu;

static void prepare_glu(int32_t n_row, int32_t d, bi_act act, row_family family, uint64_t key) {
    row_case_arena.used = 0;
    glu.n_row = n_row;
    glu.d = d;
    glu.act = act;
    glu.g = row_case_f32_array(n_row * d, family, key);
    glu.u = row_case_f32_array(n_row * d, family, key + 1);
    glu.want = ROW_CASE_ARRAY(bi_bf16, n_row * d);
}

static void answer_glu(void) {
    bi_glu_args args = {glu.n_row, glu.d, glu.g, glu.u, glu.d, glu.act, glu.want};
    slow_glu(&args);
}

static void attempt_glu(const bi_backend *backend, const int32_t *pick, int32_t n) {
    size_t used = row_case_arena.used;
    int64_t ld = glu.d + GAP;
    float *g = ROW_CASE_ARRAY(float, (n + 1) * ld), *u = ROW_CASE_ARRAY(float, (n + 1) * ld);
    bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, (n + 1) * glu.d);
    for (int32_t t = 0; t < n; t++) {
        memcpy(g + t * ld, glu.g + pick[t] * glu.d, sizeof(float) * (size_t)glu.d);
        memcpy(u + t * ld, glu.u + pick[t] * glu.d, sizeof(float) * (size_t)glu.d);
    }
    bi_glu_args args = {n, glu.d, g, u, ld, glu.act, y};
    CHECK_OK(backend->op->glu(backend->ctx, &args));
    for (int32_t t = 0; t < n; t++)
        row_case_same_bf16("y", y + t * glu.d, glu.want + pick[t] * glu.d, glu.d);
    row_case_untouched("the row after", y + n * glu.d, sizeof(bi_bf16) * (size_t)glu.d);
    row_case_arena.used = used;
}

static const bi_act acts[] = {{1, 4.0f, 25.0f}, {1, 3.0f, 7.0f}, {0, 0.0f, 0.0f}};

START_TEST(glu_equals_slow_form) {
    static const int32_t width[] = {1, 15, 64, 515};
    for (int act = 0; act < 3; act++)
        for (int family = 0; family < ROW_FAMILIES; family++) {
            prepare_glu(5, width[(act + family) % 4], acts[act], (row_family)family, test_seed() * 10 + (uint64_t)family);
            answer_glu();
            row_case_survive(attempt_glu, _i, glu.n_row);
        }
}
END_TEST

/* NaN and Inf are not checked here: they come out as NaN (one pattern) or a number, in their own element only. */
START_TEST(glu_keeps_nan_in_place) {
    for (int act = 0; act < 3; act++) {
        prepare_glu(4, 40, acts[act], ROW_NORMAL, 3);
        glu.g[45] = NAN;
        glu.u[46] = -NAN;
        glu.g[47] = INFINITY;
        glu.g[48] = -INFINITY;
        glu.u[49] = INFINITY;
        answer_glu();
        ck_assert_uint_eq(glu.want[45], 0x7fff);
        ck_assert_uint_eq(glu.want[46], 0x7fff);
        row_case_survive(attempt_glu, _i, glu.n_row);
    }
}
END_TEST

START_TEST(glu_computes_the_activation) {
    for (int act = 0; act < 3; act++) {
        prepare_glu(4, 300, acts[act], ROW_NORMAL, 31);
        answer_glu();
        for (int32_t i = 0; i < glu.n_row * glu.d; i++) {
            double g = (double)glu.g[i], u = (double)glu.u[i], s = 1 / (1 + exp(-g));
            double beta = (double)acts[act].beta, linear = (double)acts[act].linear_beta;
            double want = acts[act].situ ? beta * tanh(g / beta) * s * linear * tanh(u / linear) : g * s * u;
            ck_assert_double_le(fabs((double)row_case_widen(glu.want[i]) - want), fabs(want) * 0x1.01p-8);
        }
    }
}
END_TEST

/* ---- embedding ---- */

START_TEST(embed_copies_rows) {
    static const int threads[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        bi_backend backend;
        br_pool *pool;
        if (!row_case_open(_i, threads[i], &backend, &pool))
            return;
        row_case_arena.used = 0;
        enum { N = 90, D = 513, V = 41 };
        bi_bf16 *table = row_case_bf16_array(V * D, ROW_RAW, 8), *got = ROW_CASE_ARRAY(bi_bf16, (N + 1) * D);
        bi_bf16 *want = ROW_CASE_ARRAY(bi_bf16, (N + 1) * D);
        table[5] = 0x7fc1; /* copied as it is, payload included */
        int32_t token[N];
        for (int t = 0; t < N; t++)
            token[t] = (int32_t)(test_mix((uint64_t)t) % V);
        token[0] = 0;
        token[N - 1] = V - 1;
        bi_embed_args args = {N, D, V, token, table, want};
        slow_embed(&args);
        args.y = got;
        CHECK_OK(backend.op->embed(backend.ctx, &args));
        row_case_same_bf16("y", got, want, (N + 1) * D);
        memset(got, 0xff, sizeof(bi_bf16) * N * D);
        token[N - 1] = V;
        CHECK_FAILS(backend.op->embed(backend.ctx, &args), BR_E_SHAPE);
        token[N - 1] = -1;
        CHECK_FAILS(backend.op->embed(backend.ctx, &args), BR_E_SHAPE);
        args.n_row = 0;
        CHECK_OK(backend.op->embed(backend.ctx, &args));
        row_case_untouched("y", got, sizeof(bi_bf16) * N * D);
        row_case_close(&backend, pool);
    }
}
END_TEST

/* ---- convolution ---- */

enum { N_TOK = 40, N_CHAN = 300, X_LD = N_CHAN + 3, Y_LD = N_CHAN + 5, N_SEQ = 3 };

/* N_SEQ sequences of N_TOK tokens, and what the slow form makes of each as one segment. */
static struct {
    bi_bf16 *x[N_SEQ], *want[N_SEQ], *want_history[N_SEQ];
    float *w;
} conv;

static void prepare_conv(row_family family, uint64_t key) {
    row_case_arena.used = 0;
    conv.w = row_case_f32_array(N_CHAN * 4, ROW_NORMAL, key);
    for (int s = 0; s < N_SEQ; s++) {
        conv.x[s] = row_case_bf16_array(N_TOK * X_LD, family, key + 1 + (uint64_t)s);
        conv.want[s] = ROW_CASE_ARRAY(bi_bf16, N_TOK * Y_LD);
        conv.want_history[s] = ROW_CASE_ARRAY(bi_bf16, 3 * N_CHAN);
        bi_seg seg = {0, 0, N_TOK, 0};
        bi_batch batch = {.n_row = N_TOK, .n_seg = 1, .seg = &seg};
        bi_state history = {(unsigned char *)conv.want_history[s], 0, NULL};
        bi_conv_args args = {&batch, N_CHAN, conv.x[s], X_LD, conv.w, history, conv.want[s], Y_LD};
        slow_conv(&args);
    }
}

/* The sequences under test: slot[s] of the history array is sequence s's, all start poisoned. */
typedef struct conv_run {
    const bi_backend *backend;
    bi_bf16 *history;
    int32_t slot[N_SEQ], done[N_SEQ];
} conv_run;

static conv_run conv_begin(const bi_backend *backend) {
    conv_run run = {backend, ROW_CASE_ARRAY(bi_bf16, N_SEQ * 3 * N_CHAN), {2, 0, 1}, {0}};
    return run;
}

/* One step: the next n[s] tokens of each sequence, sequences in the given order, checked at once. */
static void conv_step(conv_run *run, const int32_t *order, int32_t n_seq, const int32_t *n) {
    size_t used = row_case_arena.used;
    bi_seg seg[N_SEQ];
    int32_t n_row = 0;
    bi_bf16 *x = ROW_CASE_ARRAY(bi_bf16, N_SEQ * N_TOK * X_LD), *y = ROW_CASE_ARRAY(bi_bf16, N_SEQ * N_TOK * Y_LD);
    for (int32_t i = 0; i < n_seq; i++) {
        int32_t s = order[i];
        seg[i] = (bi_seg){s, n_row, n[i], run->done[s]};
        for (int32_t t = 0; t < n[i]; t++)
            memcpy(x + (n_row + t) * X_LD, conv.x[s] + (run->done[s] + t) * X_LD, sizeof(bi_bf16) * N_CHAN);
        n_row += n[i];
    }
    bi_batch batch = {.n_row = n_row, .n_seg = n_seq, .seg = seg};
    bi_state history = {(unsigned char *)run->history, sizeof(bi_bf16) * 3 * N_CHAN, run->slot};
    bi_conv_args args = {&batch, N_CHAN, x, X_LD, conv.w, history, y, Y_LD};
    CHECK_OK(run->backend->op->conv(run->backend->ctx, &args));
    for (int32_t i = 0; i < n_seq; i++)
        for (int32_t t = 0; t < n[i]; t++) {
            const bi_bf16 *want = conv.want[order[i]] + (run->done[order[i]] + t) * Y_LD;
            row_case_same_bf16("y", y + (seg[i].row + t) * Y_LD, want, N_CHAN);
            row_case_untouched("gap", y + (seg[i].row + t) * Y_LD + N_CHAN, sizeof(bi_bf16) * (Y_LD - N_CHAN));
        }
    for (int32_t i = 0; i < n_seq; i++)
        run->done[order[i]] += n[i];
    row_case_arena.used = used;
}

static void check_history(const conv_run *run, int32_t s) {
    row_case_same_bf16("history", run->history + run->slot[s] * 3 * N_CHAN, conv.want_history[s], 3 * N_CHAN);
}

static void conv_every_cut(const bi_backend *backend) {
    static const int32_t one[] = {1}, two[] = {2, 0};
    for (int32_t cut = 0; cut < N_TOK; cut++) {
        size_t used = row_case_arena.used;
        conv_run run = conv_begin(backend);
        int32_t first = cut, rest = N_TOK - cut;
        if (first)
            conv_step(&run, one, 1, &first);
        conv_step(&run, one, 1, &rest);
        check_history(&run, 1);
        row_case_arena.used = used;
    }
    conv_run run = conv_begin(backend);
    for (int32_t t = 0; t < N_TOK; t += 2) { /* two sequences in one batch, cut at odd places: 1, 2, .., 3 and 3, 2, .., 1 */
        int32_t n[] = {t == 0 ? 1 : t == N_TOK - 2 ? 3 : 2, t == 0 ? 3 : t == N_TOK - 2 ? 1 : 2};
        conv_step(&run, two, 2, n);
    }
    check_history(&run, 0);
    check_history(&run, 2);
}

START_TEST(conv_survives_every_cut) {
    static const int threads[] = {1, 2, 5};
    for (int family = 0; family < ROW_FAMILIES; family++) {
        prepare_conv((row_family)family, test_seed() + (uint64_t)family);
        for (int i = 0; i < 3; i++) {
            bi_backend backend;
            br_pool *pool;
            if (family != ROW_NORMAL && i != family % 3 && !test_is_long())
                continue;
            if (!row_case_open(_i, threads[i], &backend, &pool))
                return;
            conv_every_cut(&backend);
            row_case_close(&backend, pool);
        }
    }
}
END_TEST

/* Token by token, all three sequences in changing order; and history rows before position 0 come out as +0. */
START_TEST(conv_decodes_like_prefill) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 2, &backend, &pool))
        return;
    prepare_conv(ROW_NORMAL, 44);
    conv_run run = conv_begin(&backend);
    for (int32_t t = 0; t < N_TOK; t++) {
        int32_t order[] = {t % 3, (t + 1) % 3, (t + 2) % 3}, n[] = {1, 1, 1};
        conv_step(&run, order, 3, n);
        for (int i = 0; t == 0 && i < 2 * N_CHAN; i++)
            ck_assert_uint_eq(run.history[i], 0);
    }
    for (int32_t s = 0; s < N_SEQ; s++)
        check_history(&run, s);
    row_case_close(&backend, pool);
}
END_TEST

/* A NaN input reaches its own channel's next four outputs in its own sequence, nothing else. */
START_TEST(conv_keeps_nan_in_its_channel) {
    static const int32_t order[] = {0, 1, 2}, n[] = {N_TOK, N_TOK, N_TOK};
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 2, &backend, &pool))
        return;
    prepare_conv(ROW_NORMAL, 45);
    conv_run run = conv_begin(&backend);
    conv.x[1][10 * X_LD + 7] = 0x7fc1;
    for (int t = 10; t < 14; t++)
        conv.want[1][t * Y_LD + 7] = 0x7fff;
    conv_step(&run, order, 3, n);
    row_case_close(&backend, pool);
}
END_TEST

START_TEST(conv_computes_the_convolution) {
    prepare_conv(ROW_NORMAL, 46);
    for (int32_t t = 0; t < N_TOK; t++)
        for (int32_t c = 0; c < N_CHAN; c++) {
            double sum = 0, size = 0;
            for (int tap = 0; tap < 4; tap++) {
                double x = t - 3 + tap < 0 ? 0 : (double)row_case_widen(conv.x[0][(t - 3 + tap) * X_LD + c]);
                sum += (double)conv.w[c * 4 + tap] * x;
                size += fabs((double)conv.w[c * 4 + tap] * x);
            }
            double got = (double)row_case_widen(conv.want[0][t * Y_LD + c]);
            double want = sum / (1 + exp(-sum));
            ck_assert_double_le(fabs(got - want), fabs(want) * 0x1p-8 + size * 0x1p-20);
        }
}
END_TEST

START_TEST(refuses_wrong_shapes) {
    bi_backend backend;
    br_pool *pool;
    if (!row_case_open(_i, 1, &backend, &pool))
        return;
    prepare_glu(2, 8, acts[0], ROW_NORMAL, 1);
    bi_bf16 *y = ROW_CASE_ARRAY(bi_bf16, 16);
    bi_glu_args good = {2, 8, glu.g, glu.u, 8, acts[0], y}, args = good;
    args.ld = 7;
    CHECK_FAILS(backend.op->glu(backend.ctx, &args), BR_E_SHAPE);
    args = good, args.n_row = -1;
    CHECK_FAILS(backend.op->glu(backend.ctx, &args), BR_E_SHAPE);
    args = good, args.d = 0;
    CHECK_FAILS(backend.op->glu(backend.ctx, &args), BR_E_SHAPE);
    row_case_untouched("y", y, sizeof(bi_bf16) * 16);
    prepare_conv(ROW_NORMAL, 1);
    bi_seg seg = {0, 0, 1, 0};
    bi_batch batch = {.n_row = 1, .n_seg = 1, .seg = &seg}, none = {0}, padding = {.n_row = 1};
    bi_bf16 *out = ROW_CASE_ARRAY(bi_bf16, Y_LD), *kept = ROW_CASE_ARRAY(bi_bf16, 3 * N_CHAN);
    bi_state history = {(unsigned char *)kept, 6 * N_CHAN, NULL};
    bi_conv_args fine = {&batch, N_CHAN, conv.x[0], X_LD, conv.w, history, out, Y_LD}, odd = fine;
    odd.x_ld = N_CHAN - 1;
    CHECK_FAILS(backend.op->conv(backend.ctx, &odd), BR_E_SHAPE);
    odd = fine, odd.y_ld = N_CHAN - 1;
    CHECK_FAILS(backend.op->conv(backend.ctx, &odd), BR_E_SHAPE);
    odd = fine, odd.n_chan = 0;
    CHECK_FAILS(backend.op->conv(backend.ctx, &odd), BR_E_SHAPE);
    odd = fine, odd.history.base++;
    CHECK_FAILS(backend.op->conv(backend.ctx, &odd), BR_E_ALIGN);
    odd = fine, odd.history.seq_bytes++;
    CHECK_FAILS(backend.op->conv(backend.ctx, &odd), BR_E_ALIGN);
    odd = fine, odd.batch = &none;
    CHECK_OK(backend.op->conv(backend.ctx, &odd));
    odd.batch = &padding; /* was divided by its no segments */
    CHECK_OK(backend.op->conv(backend.ctx, &odd));
    row_case_untouched("y", out, sizeof(bi_bf16) * Y_LD);
    row_case_untouched("history", kept, sizeof(bi_bf16) * 3 * N_CHAN);
    row_case_close(&backend, pool);
}
END_TEST

Suite *test_glu_suite(void) {
    Suite *suite = suite_create("glu");
    TCase *tcase = tcase_create("glu, embed, conv");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, row_case_setup, row_case_teardown);
    tcase_add_loop_test(tcase, glu_equals_slow_form, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, glu_keeps_nan_in_place, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, glu_computes_the_activation);
    tcase_add_loop_test(tcase, embed_copies_rows, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, conv_survives_every_cut, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, conv_decodes_like_prefill, 0, ROW_CASE_ISAS);
    tcase_add_loop_test(tcase, conv_keeps_nan_in_its_channel, 0, ROW_CASE_ISAS);
    tcase_add_test(tcase, conv_computes_the_convolution);
    tcase_add_loop_test(tcase, refuses_wrong_shapes, 0, ROW_CASE_ISAS);
    suite_add_tcase(suite, tcase);
    return suite;
}
