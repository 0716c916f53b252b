/* bi_score: log-probs of given tokens, against the slow form and against the head's linear map followed by bi_sample. */
#include "test_support.h"

#include "bi_bits.h"
#include "op_rig.h"
#include "slow_block.h"
#include "slow_head.h"
#include "slow_moe.h"

#include <math.h>
#include <string.h>

enum { ROW_MAX = 140, D_MAX = 80, VOCAB_MAX = 1200 };

typedef struct head_case {
    int n_row, d, n_vocab;
    bi_bf16 x[ROW_MAX * D_MAX], w[VOCAB_MAX * D_MAX];
    int32_t token[ROW_MAX];
    float temperature[ROW_MAX];
} head_case;

typedef struct head_out {
    float logprob[ROW_MAX], logprob_raw[ROW_MAX], entropy[ROW_MAX];
    uint32_t fault[ROW_MAX];
} head_out;

static void open_rig(op_rig *rig, const char *isa, int n_thread) {
    const bi_limits limits = {.n_row = ROW_MAX, .d_in = D_MAX, .d_model = D_MAX, .n_vocab = VOCAB_MAX};
    op_rig_open(rig, &limits, isa, n_thread);
}

static bi_score_args args_of(const head_case *c, const bi_mat *w, head_out *out) {
    memset(out, 0x5a, sizeof *out);
    memset(out->fault, 0, sizeof out->fault);
    bi_score_args a = {.n_row = c->n_row, .d = c->d, .n_vocab = c->n_vocab, .x = c->x, .w = *w, .token = c->token,
                       .temperature = c->temperature, .logprob = out->logprob, .logprob_raw = out->logprob_raw,
                       .entropy = out->entropy, .fault = {out->fault, 55}};
    return a;
}

static void run(op_rig *rig, const bi_score_args *a) {
    op_rig_poison(rig);
    CHECK_OK(rig->backend.op->score(rig->backend.ctx, a));
}

static void run_case(op_rig *rig, const head_case *c, head_out *out) {
    bi_mat w = op_rig_mat(rig, c->w, c->n_vocab, c->d);
    bi_score_args a = args_of(c, &w, out);
    run(rig, &a);
}

static void check_bits(float got, float wanted, const char *what, int row) {
    ck_assert_msg(bi_u32_of(got) == bi_u32_of(wanted), "row %d: %s is %08x (%a), wanted %08x (%a)", row, what,
                  bi_u32_of(got), (double)got, bi_u32_of(wanted), (double)wanted);
}

/* ---- random and adversarial rows against the slow form ------------------------------------------------------------- */

static void make_case(op_random *random, head_case *c, int round) {
    static const int vocabs[] = {300, 1, 127, 128, 129, 256, 1000, 31, 257, VOCAB_MAX};
    static const float temperatures[] = {1.0f, 0.0f, 0.7f, 1.0f, 1.3f, 0x1p-10f, 0x1p10f};
    c->n_vocab = vocabs[round % 10];
    c->d = round % 3 == 0 ? 64 : round % 3 == 1 ? 16 : 71;
    c->n_row = 1 + op_random_below(random, 5);
    int kind = round % 7;
    op_random_bf16s(random, kind == 3 ? 0x1p-70f : kind == 4 ? 0x1p60f : 1.0f, c->x, c->n_row * c->d);
    op_random_bf16s(random, kind == 3 ? 0x1p-70f : kind == 4 ? 0x1p56f : kind == 5 ? 2.0f : 0.4f, c->w, c->n_vocab * c->d);
    for (int v = 0; v < c->n_vocab; v++) {
        if (kind == 1 || (kind == 2 && v % 4)) /* plateaus: equal rows of W */
            memcpy(c->w + v * c->d, c->w, sizeof *c->w * (size_t)c->d);
        if (kind == 6 && v % 5) /* most logits are +0 */
            memset(c->w + v * c->d, 0, sizeof *c->w * (size_t)c->d);
    }
    for (int t = 0; t < c->n_row; t++) {
        c->token[t] = op_random_below(random, c->n_vocab);
        c->temperature[t] = temperatures[op_random_below(random, 7)];
    }
}

static void check_case(const head_case *c, const head_out *out) {
    slow_map map = {.n_out = c->n_vocab, .n_in = c->d, .w = c->w};
    for (int t = 0; t < c->n_row; t++) {
        float logit[VOCAB_MAX];
        slow_map_apply(&map, c->x + t * c->d, logit);
        slow_softmax scaled = slow_softmax_of(logit, c->n_vocab, c->temperature[t]);
        slow_softmax raw = slow_softmax_of(logit, c->n_vocab, 1.0f);
        float x = logit[c->token[t]];
        ck_assert_uint_eq(out->fault[t], 0);
        check_bits(out->logprob[t], slow_logprob(&scaled, slow_z(x, c->temperature[t])), "logprob", t);
        check_bits(out->logprob_raw[t], slow_logprob(&raw, slow_z(x, 1.0f)), "logprob_raw", t);
        check_bits(out->entropy[t], scaled.entropy, "entropy", t);
    }
}

START_TEST(score_equals_slow_form) {
    const char *isas[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isas), n_round = test_is_long() ? 1500 : 70;
    static head_case c;
    static head_out out, first;
    op_rig rig[OP_RIG_ISA_MAX];
    for (int r = 0; r < n_isa; r++)
        open_rig(&rig[r], isas[r], 1 + r);
    op_random random = {test_seed(), 0};
    for (int round = 0; round < n_round; round++) {
        make_case(&random, &c, round);
        for (int r = 0; r < n_isa; r++) {
            run_case(&rig[r], &c, r ? &out : &first);
            if (r)
                ck_assert_msg(memcmp(&out, &first, sizeof out) == 0, "%s differs from %s", isas[r], isas[0]);
        }
        check_case(&c, &first);
    }
    for (int r = 0; r < n_isa; r++)
        op_rig_close(&rig[r]);
}
END_TEST

/* ---- score is what rollout's sampler says about the same token ----------------------------------------------------- */

START_TEST(score_equals_linear_then_forced_sample) {
    static head_case c;
    static head_out out;
    static float logit[ROW_MAX * VOCAB_MAX];
    op_random random = {test_seed(), 1};
    op_rig rig;
    open_rig(&rig, NULL, 2);
    for (int round = 0; round < 10; round++) {
        make_case(&random, &c, round);
        bi_mat w = op_rig_mat(&rig, c.w, c.n_vocab, c.d);
        bi_score_args score = args_of(&c, &w, &out);
        run(&rig, &score);
        bi_linear_args linear = {
            .n_row = c.n_row, .n_head = 1, .x = c.x, .x_ld = c.d, .w = w, .y = logit, .y_ld = c.n_vocab, .y_f32 = 1};
        CHECK_OK(rig.backend.op->linear(rig.backend.ctx, &linear));
        bi_sampling setting[ROW_MAX];
        int32_t token[ROW_MAX];
        float logprob[ROW_MAX], raw[ROW_MAX], kept[ROW_MAX], entropy[ROW_MAX];
        for (int t = 0; t < c.n_row; t++)
            setting[t] = (bi_sampling){.temperature = c.temperature[t], .top_p_q32 = (uint64_t)1 << 32, .entropy = 1};
        bi_sample_args sample = {.n_row = c.n_row,
                                 .n_vocab = c.n_vocab,
                                 .logit = logit,
                                 .logit_ld = c.n_vocab,
                                 .setting = setting,
                                 .forced = c.token,
                                 .token = token,
                                 .logprob = logprob,
                                 .logprob_raw = raw,
                                 .logprob_kept = kept,
                                 .entropy = entropy};
        CHECK_OK(rig.backend.op->sample(rig.backend.ctx, &sample));
        for (int t = 0; t < c.n_row; t++) {
            check_bits(out.logprob[t], logprob[t], "logprob", t);
            check_bits(out.logprob_raw[t], raw[t], "logprob_raw", t);
            check_bits(out.entropy[t], entropy[t], "entropy", t);
        }
    }
    op_rig_close(&rig);
}
END_TEST

/* ---- a row is a function of itself --------------------------------------------------------------------------------- */

static void make_many_rows(op_random *random, head_case *c) {
    make_case(random, c, 6);
    c->n_row = ROW_MAX; /* more than two chunks of 64 */
    op_random_bf16s(random, 1.0f, c->x, c->n_row * c->d);
    op_random_bf16s(random, 0.4f, c->w, c->n_vocab * c->d);
    for (int t = 0; t < ROW_MAX; t++) {
        c->token[t] = op_random_below(random, c->n_vocab);
        c->temperature[t] = t % 3 ? 1.0f : 0.6f;
    }
}

static void take_row(head_case *to, int at, const head_case *from, int t) {
    memcpy(to->x + at * from->d, from->x + t * from->d, sizeof *from->x * (size_t)from->d);
    to->token[at] = from->token[t];
    to->temperature[at] = from->temperature[t];
}

static void check_same_row(const head_out *a, int at, const head_out *b, int t) {
    check_bits(a->logprob[at], b->logprob[t], "logprob", t);
    check_bits(a->logprob_raw[at], b->logprob_raw[t], "logprob_raw", t);
    check_bits(a->entropy[at], b->entropy[t], "entropy", t);
}

START_TEST(batch_order_and_threads_do_not_matter) {
    static head_case c, part;
    static head_out base, out;
    op_random random = {test_seed(), 2};
    make_many_rows(&random, &c);
    int order[ROW_MAX];
    op_random_order(&random, order, ROW_MAX);
    static const int n_thread[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        op_rig rig;
        open_rig(&rig, NULL, n_thread[i]);
        bi_mat w = op_rig_mat(&rig, c.w, c.n_vocab, c.d);
        bi_score_args a = args_of(&c, &w, i ? &out : &base);
        run(&rig, &a);
        if (i)
            ck_assert_mem_eq(&out, &base, sizeof out);
        part = c;
        for (int t = 0; t < ROW_MAX; t++)
            take_row(&part, t, &c, order[t]);
        a = args_of(&part, &w, &out);
        run(&rig, &a);
        for (int t = 0; t < ROW_MAX; t++)
            check_same_row(&out, t, &base, order[t]);
        static const int batches[] = {1, 63, 64, 65}; /* a chunk holds 64 */
        for (int k = 0; k < 4; k++)
            for (int t = 0; t + batches[k] <= ROW_MAX; t += batches[k]) {
                part.n_row = batches[k];
                for (int r = 0; r < batches[k]; r++)
                    take_row(&part, r, &c, t + r);
                a = args_of(&part, &w, &out);
                run(&rig, &a);
                for (int r = 0; r < batches[k]; r++)
                    check_same_row(&out, r, &base, t + r);
            }
        op_rig_close(&rig);
    }
}
END_TEST

START_TEST(entropy_is_optional_and_moves_nothing) {
    static head_case c;
    static head_out base, out;
    op_random random = {test_seed(), 3};
    make_many_rows(&random, &c);
    op_rig rig;
    open_rig(&rig, NULL, 1);
    bi_mat w = op_rig_mat(&rig, c.w, c.n_vocab, c.d);
    bi_score_args a = args_of(&c, &w, &base);
    run(&rig, &a);
    a = args_of(&c, &w, &out);
    a.entropy = NULL;
    run(&rig, &a);
    ck_assert_mem_eq(out.logprob, base.logprob, sizeof out.logprob);
    ck_assert_mem_eq(out.logprob_raw, base.logprob_raw, sizeof out.logprob_raw);
    op_rig_close(&rig);
}
END_TEST

/* ---- the function is the right one (binary64) ---------------------------------------------------------------------- */

START_TEST(logprobs_are_those_of_the_softmax) {
    static head_case c;
    static head_out out;
    op_random random = {test_seed(), 4};
    make_many_rows(&random, &c);
    op_rig rig;
    open_rig(&rig, NULL, 1);
    run_case(&rig, &c, &out);
    for (int t = 0; t < c.n_row; t++) {
        double logit[VOCAB_MAX], temperature = (double)c.temperature[t], sum = 0.0, raw = 0.0, entropy = 0.0;
        for (int v = 0; v < c.n_vocab; v++) {
            logit[v] = 0.0;
            for (int i = 0; i < c.d; i++)
                logit[v] += (double)bi_widen(c.x[t * c.d + i]) * (double)bi_widen(c.w[v * c.d + i]);
            sum += exp(logit[v] / temperature);
            raw += exp(logit[v]);
        }
        for (int v = 0; v < c.n_vocab; v++)
            entropy -= exp(logit[v] / temperature) / sum * (logit[v] / temperature - log(sum));
        ck_assert_double_eq_tol((double)out.logprob[t], logit[c.token[t]] / temperature - log(sum), 5e-5);
        ck_assert_double_eq_tol((double)out.logprob_raw[t], logit[c.token[t]] - log(raw), 5e-5);
        ck_assert_double_eq_tol((double)out.entropy[t], entropy, 5e-5);
    }
    op_rig_close(&rig);
}
END_TEST

/* ---- faults and refusals ------------------------------------------------------------------------------------------- */

START_TEST(a_row_with_a_bad_logit_faults_alone) {
    static head_case c;
    static head_out base, out;
    op_random random = {test_seed(), 5};
    make_many_rows(&random, &c);
    c.n_row = 4;
    op_rig rig;
    open_rig(&rig, NULL, 2);
    bi_mat w = op_rig_mat(&rig, c.w, c.n_vocab, c.d);
    bi_score_args a = args_of(&c, &w, &base);
    run(&rig, &a);
    static const uint16_t bad[] = {0x7fff, 0x7f80, 0xff80};
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < 4; t++) {
            bi_bf16 kept = c.x[t * c.d + 3];
            c.x[t * c.d + 3] = bad[i];
            a = args_of(&c, &w, &out);
            run(&rig, &a);
            for (int r = 0; r < 4; r++) {
                ck_assert_uint_eq(out.fault[r], r == t ? 55 : 0);
                if (r != t)
                    check_same_row(&out, r, &base, r);
            }
            check_bits(out.logprob[t], 0.0f, "logprob of a faulted row", t);
            check_bits(out.logprob_raw[t], 0.0f, "logprob_raw of a faulted row", t);
            check_bits(out.entropy[t], 0.0f, "entropy of a faulted row", t);
            out.fault[t] = 8; /* the first fault of a row stays */
            run(&rig, &a);
            ck_assert_uint_eq(out.fault[t], 8);
            c.x[t * c.d + 3] = kept;
        }
    a.fault.row = NULL;
    c.x[3] = 0x7fff;
    run(&rig, &a);
    check_bits(out.logprob[0], 0.0f, "logprob of a faulted row", 0);
    op_rig_close(&rig);
}
END_TEST

/* One logit of -Inf in the last, short sub-block, and the token elsewhere: every logit is checked, the small ones too. */
START_TEST(one_infinite_logit_far_from_the_token_faults) {
    static head_case c;
    static head_out out;
    memset(&c, 0, sizeof c);
    c.n_row = c.d = 1;
    c.n_vocab = 260;
    c.x[0] = 0x7f00;
    c.temperature[0] = 1.0f;
    c.w[259] = 0xff00;
    op_rig rig;
    open_rig(&rig, NULL, 1);
    run_case(&rig, &c, &out);
    ck_assert_uint_eq(out.fault[0], 55);
    c.w[259] = 0;
    run_case(&rig, &c, &out);
    ck_assert_uint_eq(out.fault[0], 0);
    ck_assert_double_eq_tol((double)out.logprob[0], -log(260.0), 1e-6);
    op_rig_close(&rig);
}
END_TEST

START_TEST(bad_arguments_are_refused_before_any_output) {
    static head_case c;
    static head_out out, untouched;
    op_random random = {test_seed(), 6};
    make_many_rows(&random, &c);
    c.n_row = 3;
    op_rig rig;
    open_rig(&rig, NULL, 1);
    bi_mat w = op_rig_mat(&rig, c.w, c.n_vocab, c.d);
    (void)args_of(&c, &w, &untouched);
#define REFUSED(change, status)                                                \
    do {                                                                       \
        head_case broken = c;                                                  \
        bi_score_args a = args_of(&broken, &w, &out);                          \
        change;                                                                \
        CHECK_FAILS(rig.backend.op->score(rig.backend.ctx, &a), status);       \
        ck_assert_mem_eq(&out, &untouched, sizeof out);                        \
    } while (0)
    REFUSED(a.n_row = -1, BR_E_SHAPE);
    REFUSED(a.d = 0, BR_E_SHAPE);
    REFUSED(a.d = D_MAX + 1, BR_E_SHAPE);
    REFUSED(a.d = c.d - 1, BR_E_SHAPE);
    REFUSED(a.n_vocab = 0, BR_E_SHAPE);
    REFUSED(a.n_vocab = VOCAB_MAX + 1, BR_E_SHAPE);
    REFUSED(a.n_vocab = c.n_vocab - 1, BR_E_SHAPE);
    REFUSED(a.w.data = NULL, BR_E_SHAPE);
    REFUSED(broken.token[2] = -1, BR_E_SHAPE);
    REFUSED(broken.token[2] = c.n_vocab, BR_E_SHAPE);
    REFUSED(broken.temperature[2] = -1.0f, BR_E_ARG);
    REFUSED(broken.temperature[2] = bi_f32_of(0x7fc00000u), BR_E_ARG);
    REFUSED(broken.temperature[2] = 0x1.8p10f, BR_E_ARG);
    REFUSED(broken.temperature[2] = 0x1p-11f, BR_E_ARG);
#undef REFUSED
    bi_score_args a = args_of(&c, &w, &out);
    a.n_row = 0;
    run(&rig, &a);
    ck_assert_mem_eq(&out, &untouched, sizeof out);
    op_rig_close(&rig);
}
END_TEST

Suite *test_head_suite(void) {
    Suite *suite = suite_create("head");
    TCase *tcase = tcase_create("score");
    tcase_set_timeout(tcase, test_is_long() ? 600 : 30);
    tcase_add_test(tcase, score_equals_slow_form);
    tcase_add_test(tcase, score_equals_linear_then_forced_sample);
    tcase_add_test(tcase, batch_order_and_threads_do_not_matter);
    tcase_add_test(tcase, entropy_is_optional_and_moves_nothing);
    tcase_add_test(tcase, logprobs_are_those_of_the_softmax);
    tcase_add_test(tcase, a_row_with_a_bad_logit_faults_alone);
    tcase_add_test(tcase, one_infinite_logit_far_from_the_token_faults);
    tcase_add_test(tcase, bad_arguments_are_refused_before_any_output);
    suite_add_tcase(suite, tcase);
    return suite;
}
