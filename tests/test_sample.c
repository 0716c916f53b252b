/* bi_sample: filters, draw and the log-probs of the drawn token, against the slow form and against probability theory. */
#include "test_support.h"

#include "bi_bits.h"
#include "op_rig.h"
#include "slow_head.h"

#include <stdlib.h>
#include <string.h>

#define P_OFF ((uint64_t)1 << 32)

enum { ROW_MAX = 64 };

/* Outputs of one call, poisoned before it. */
typedef struct outputs {
    int32_t token[ROW_MAX];
    float logprob[ROW_MAX], logprob_raw[ROW_MAX], logprob_kept[ROW_MAX], entropy[ROW_MAX];
    bi_top top[ROW_MAX][BR_TOP_LOGPROBS_MAX];
} outputs;

static bi_sample_args args_of(int n_row, int n_vocab, const float *logit, const bi_sampling *setting, outputs *out) {
    memset(out, 0x5a, sizeof *out);
    bi_sample_args a = {.n_row = n_row, .n_vocab = n_vocab, .logit = logit, .logit_ld = n_vocab, .setting = setting,
                        .token = out->token, .logprob = out->logprob, .logprob_raw = out->logprob_raw,
                        .logprob_kept = out->logprob_kept, .entropy = out->entropy, .top = out->top[0],
                        .top_ld = BR_TOP_LOGPROBS_MAX};
    return a;
}

static void run(op_rig *rig, const bi_sample_args *a) {
    op_rig_poison(rig);
    CHECK_OK(rig->backend.op->sample(rig->backend.ctx, a));
}

static void open_rig(op_rig *rig, const char *isa, int n_thread, int n_vocab) {
    const bi_limits limits = {.n_row = ROW_MAX, .n_vocab = n_vocab, .d_model = 16};
    op_rig_open(rig, &limits, isa, n_thread);
}

static void check_bits(float got, float wanted, const char *what, int row) {
    ck_assert_msg(bi_u32_of(got) == bi_u32_of(wanted), "row %d: %s is %08x (%a), wanted %08x (%a)", row, what,
                  bi_u32_of(got), (double)got, bi_u32_of(wanted), (double)wanted);
}

static void check_row(const outputs *out, int row, const slow_sampled *wanted, int n_top) {
    ck_assert_msg(out->token[row] == wanted->token, "row %d: token %d, wanted %d", row, out->token[row], wanted->token);
    check_bits(out->logprob[row], wanted->logprob, "logprob", row);
    check_bits(out->logprob_raw[row], wanted->logprob_raw, "logprob_raw", row);
    check_bits(out->logprob_kept[row], wanted->logprob_kept, "logprob_kept", row);
    check_bits(out->entropy[row], wanted->entropy, "entropy", row);
    for (int i = 0; i < n_top; i++) {
        ck_assert_int_eq(out->top[row][i].token, wanted->top[i].token);
        check_bits(out->top[row][i].logprob, wanted->top[i].logprob, "an alternative", row);
    }
}

/* ---- random and adversarial rows against the slow form ------------------------------------------------------------- */

/* Rows lie at a random stride, NaN between them. */
static void compare_batch(op_rig *rigs, int n_rig, op_random *random, int n_row, int n_vocab) {
    size_t ld = (size_t)n_vocab + (size_t)op_random_below(random, 100), n_logit = ld * (size_t)n_row;
    float *logit = malloc(sizeof *logit * n_logit);
    memset(logit, 0xff, sizeof *logit * n_logit);
    bi_sampling setting[ROW_MAX];
    int32_t forced[ROW_MAX];
    static slow_sampled wanted[ROW_MAX];
    for (int t = 0; t < n_row; t++) {
        float *row = logit + (size_t)t * ld;
        slow_logits(random, op_random_below(random, SLOW_LOGIT_KINDS), row, n_vocab);
        setting[t] = slow_setting(random, n_vocab);
        forced[t] = op_random_below(random, 3) ? -1 : op_random_below(random, n_vocab);
        slow_sample(row, n_vocab, &setting[t], slow_philox_u64(&setting[t]), forced[t], &wanted[t]);
    }
    for (int r = 0; r < n_rig; r++) {
        static outputs out;
        bi_sample_args a = args_of(n_row, n_vocab, logit, setting, &out);
        a.logit_ld = (int64_t)ld;
        a.forced = forced;
        run(&rigs[r], &a);
        for (int t = 0; t < n_row; t++)
            check_row(&out, t, &wanted[t], setting[t].n_top);
    }
    free(logit);
}

START_TEST(sample_equals_slow_form) {
    static const int sizes[] = {1, 2, 3, 20, 127, 128, 129, 255, 256, 257, 300, 640, 1000, 2304};
    const char *isas[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isas), n_round = test_is_long() ? 2000 : 120;
    op_rig rigs[OP_RIG_ISA_MAX];
    for (int r = 0; r < n_isa; r++)
        open_rig(&rigs[r], isas[r], 1 + r, 2304);
    op_random random = {test_seed(), 0};
    for (int round = 0; round < n_round; round++)
        compare_batch(rigs, n_isa, &random, 1 + op_random_below(&random, 6), sizes[round % 14]);
    for (int r = 0; r < n_isa; r++)
        op_rig_close(&rigs[r]);
}
END_TEST

START_TEST(large_vocabulary_equals_slow_form) {
    int n_vocab = test_is_long() ? BR_VOCAB_MAX : 163840;
    const char *isas[OP_RIG_ISA_MAX];
    op_rig rig;
    open_rig(&rig, isas[op_rig_isas(isas) - 1], test_thread_count(), n_vocab);
    op_random random = {test_seed(), 1};
    compare_batch(&rig, 1, &random, 4, n_vocab);
    op_rig_close(&rig);
}
END_TEST

/* ---- a row is a function of itself --------------------------------------------------------------------------------- */

static void copy_row(outputs *to, int at, const outputs *from, int row) {
    to->token[at] = from->token[row];
    to->logprob[at] = from->logprob[row];
    to->logprob_raw[at] = from->logprob_raw[row];
    to->logprob_kept[at] = from->logprob_kept[row];
    to->entropy[at] = from->entropy[row];
    memcpy(to->top[at], from->top[row], sizeof to->top[at]);
}

START_TEST(batch_order_and_threads_do_not_matter) {
    enum { N_ROW = 33, N_VOCAB = 700 };
    static float logit[N_ROW][N_VOCAB], moved[N_ROW][N_VOCAB];
    static outputs base, out, back;
    bi_sampling setting[N_ROW], moved_setting[N_ROW];
    int order[N_ROW];
    op_random random = {test_seed(), 2};
    op_random_order(&random, order, N_ROW);
    for (int t = 0; t < N_ROW; t++) {
        slow_logits(&random, t % SLOW_LOGIT_KINDS, logit[t], N_VOCAB);
        setting[t] = slow_setting(&random, N_VOCAB);
    }
    for (int t = 0; t < N_ROW; t++) {
        memcpy(moved[t], logit[order[t]], sizeof moved[t]);
        moved_setting[t] = setting[order[t]];
    }
    static const int n_thread[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        op_rig rig;
        open_rig(&rig, NULL, n_thread[i], N_VOCAB + 1000 * i);
        bi_sample_args a = args_of(N_ROW, N_VOCAB, logit[0], setting, i ? &out : &base);
        run(&rig, &a);
        if (i)
            ck_assert_mem_eq(&out, &base, sizeof out);
        a = args_of(N_ROW, N_VOCAB, moved[0], moved_setting, &out);
        run(&rig, &a);
        memset(&back, 0x5a, sizeof back);
        for (int t = 0; t < N_ROW; t++)
            copy_row(&back, order[t], &out, t);
        ck_assert_mem_eq(&back, &base, sizeof back);
        memset(&back, 0x5a, sizeof back);
        for (int t = 0; t < N_ROW; t++) {
            a = args_of(1, N_VOCAB, logit[t], &setting[t], &out);
            run(&rig, &a);
            copy_row(&back, t, &out, 0);
        }
        ck_assert_mem_eq(&back, &base, sizeof back);
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- corner cases of the filters, with the expected answer written out --------------------------------------------- */

static op_rig corner;

static void corner_open(void) {
    open_rig(&corner, NULL, 1, 1024);
}

static void corner_close(void) {
    op_rig_close(&corner);
}

/* Which tokens the setting keeps, as a bit mask: a dropped token has logprob_kept -Inf when it is forced. n <= 32. */
static uint32_t kept_mask(const float *x, int n, bi_sampling setting) {
    uint32_t mask = 0;
    static outputs out;
    for (int32_t i = 0; i < n; i++) {
        bi_sample_args a = args_of(1, n, x, &setting, &out);
        a.forced = &i;
        run(&corner, &a);
        ck_assert_int_eq(out.token[0], i);
        if (bi_u32_of(out.logprob_kept[0]) != 0xff800000u)
            mask |= 1u << i;
    }
    return mask;
}

START_TEST(filters_keep_exactly_what_the_clause_says) {
    static const float x[8] = {1.0f, 3.0f, -0.0f, 3.0f, 0.0f, 3.0f, -50.0f, 2.0f};
    bi_sampling s = SLOW_PLAIN;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xff);
    s.top_k = 1;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0x02); /* the lowest of three equal maxima */
    s.top_k = 2;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0x0a);
    s.top_k = 6;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xaf); /* -0 at 2 ties with +0 at 4 and comes first */
    s.top_k = 7;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xbf);
    s.top_k = 8;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xff);
    s = SLOW_PLAIN;
    s.min_p = 1.0f;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0x2a);
    s.min_p = 0.13f; /* exp(1 - 3) = 0.1353 */
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xab);
    s.min_p = 0.14f;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xaa);
    s.top_k = 1;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0x02);
    s = SLOW_PLAIN;
    s.top_p_q32 = 1;
    ck_assert_uint_eq(kept_mask(x, 8, s), 0x02);
    s.top_p_q32 = P_OFF - 1; /* the weight of -50 is 0: the prefix before it holds all of W */
    ck_assert_uint_eq(kept_mask(x, 8, s), 0xbf);
}
END_TEST

START_TEST(top_p_cuts_a_plateau_at_exact_weights) {
    float x[32];
    for (int i = 0; i < 32; i++)
        x[i] = -7.5f;
    bi_sampling s = SLOW_PLAIN;
    s.top_p_q32 = P_OFF / 4; /* 8 of 32 equal weights reach it exactly */
    ck_assert_uint_eq(kept_mask(x, 32, s), 0xff);
    s.top_p_q32 = P_OFF / 4 + 1; /* the ceiling asks for one more */
    ck_assert_uint_eq(kept_mask(x, 32, s), 0x1ff);
    s.top_p_q32 = P_OFF / 4 - 1;
    ck_assert_uint_eq(kept_mask(x, 32, s), 0xff);
    s.top_k = 4; /* top_p acts on what top_k left */
    s.top_p_q32 = P_OFF / 2;
    ck_assert_uint_eq(kept_mask(x, 32, s), 0x03);
    s.top_k = 0;
    x[9] = 0.0f; /* one entry holds more than half of W */
    s.top_p_q32 = P_OFF / 2;
    ck_assert_uint_eq(kept_mask(x, 32, s), 0x200);
}
END_TEST

/* Weights are truncated at 2^-40 and the target of top_p is rounded up: of 300 entries of weight 1 beside one of 2^40,
 * ceil((2^32 - 1) / 2^32 * W) = W - 256 keeps 44. With 39 bits they would weigh nothing. */
START_TEST(top_p_counts_single_units_of_weight) {
    float x[301];
    x[0] = 0.0f;
    for (int i = 1; i < 301; i++)
        x[i] = -27.3f; /* exp = 1.53 * 2^-40 */
    bi_sampling s = SLOW_PLAIN;
    s.top_p_q32 = P_OFF - 1;
    static outputs out;
    for (int32_t forced = 43; forced < 47; forced++) {
        bi_sample_args a = args_of(1, 301, x, &s, &out);
        a.forced = &forced;
        run(&corner, &a);
        ck_assert_int_eq(bi_is_finite(out.logprob_kept[0]), forced <= 44);
    }
}
END_TEST

/* -0 is +0 before anything else: the kept token is -0 at index 1, the maximum +0 at index 2. */
START_TEST(minus_zero_is_plus_zero) {
    static const float x[3] = {-5.0f, -0.0f, 0.0f};
    static outputs out;
    bi_sampling s = SLOW_PLAIN;
    s.top_k = 1;
    bi_sample_args a = args_of(1, 3, x, &s, &out);
    run(&corner, &a);
    ck_assert_int_eq(out.token[0], 1);
    check_bits(out.logprob_kept[0], 0.0f, "logprob_kept", 0);
}
END_TEST

START_TEST(top_p_quantises_from_binary64) {
    ck_assert_uint_eq(bi_sample_top_p(1.0), P_OFF);
    ck_assert_uint_eq(bi_sample_top_p(0.5), P_OFF / 2);
    ck_assert_uint_eq(bi_sample_top_p(1e-300), 1);
    ck_assert_uint_eq(bi_sample_top_p(0.95), 4080218931u); /* trunc(0.95 * 2^32) */
}
END_TEST

START_TEST(one_kept_token_is_the_greedy_token_and_certain) {
    enum { N_VOCAB = 300 };
    static float x[N_VOCAB];
    static outputs greedy, out;
    op_random random = {test_seed(), 4};
    for (int round = 0; round < 40; round++) {
        slow_logits(&random, round % SLOW_LOGIT_KINDS, x, N_VOCAB);
        bi_sampling s = SLOW_PLAIN;
        s.temperature = 0.0f;
        bi_sample_args a = args_of(1, N_VOCAB, x, &s, &greedy);
        run(&corner, &a);
        check_bits(greedy.logprob_kept[0], 0.0f, "logprob_kept at T = 0", 0);
        check_bits(greedy.logprob[0], greedy.logprob_raw[0], "logprob at T = 0", 0);
        s.temperature = 1.0f;
        s.seed = op_random_u64(&random);
        for (int filter = 0; filter < 2; filter++) {
            s.top_k = filter ? 0 : 1;
            s.top_p_q32 = filter ? 1 : P_OFF;
            a = args_of(1, N_VOCAB, x, &s, &out);
            run(&corner, &a);
            ck_assert_int_eq(out.token[0], greedy.token[0]);
            check_bits(out.logprob_kept[0], 0.0f, "logprob_kept of the only token", 0);
            check_bits(out.logprob[0], greedy.logprob[0], "logprob", 0);
        }
    }
}
END_TEST

START_TEST(a_dropped_forced_token_has_no_kept_probability) {
    static const float x[4] = {2.0f, 1.0f, 0.0f, -1.0f};
    static outputs out;
    bi_sampling s = SLOW_PLAIN;
    s.temperature = 0.0f;
    int32_t forced = 2;
    bi_sample_args a = args_of(1, 4, x, &s, &out);
    a.forced = &forced;
    run(&corner, &a);
    ck_assert_int_eq(out.token[0], 2);
    check_bits(out.logprob_kept[0], bi_f32_of(0xff800000u), "logprob_kept at T = 0", 0);
    forced = 0;
    run(&corner, &a);
    check_bits(out.logprob_kept[0], 0.0f, "logprob_kept at T = 0", 0);
    s.temperature = 1.0f;
    s.top_k = 2;
    run(&corner, &a);
    /* Kept are 2 and 1: log(1 / (1 + exp(-1))). */
    ck_assert_msg(fabsf(out.logprob_kept[0] + 0.31326169f) < 1e-6f, "logprob_kept %g", (double)out.logprob_kept[0]);
}
END_TEST

/* ---- the function is the right one (binary64, the only tolerances here) -------------------------------------------- */

START_TEST(logprobs_and_entropy_are_those_of_the_softmax) {
    enum { N_VOCAB = 1000 };
    static float x[N_VOCAB];
    static outputs out;
    op_random random = {test_seed(), 5};
    for (int round = 0; round < 60; round++) {
        bi_sampling s = SLOW_PLAIN;
        s.temperature = (float)(1 + op_random_below(&random, 30)) * 0.1f;
        s.entropy = 1;
        op_random_normals(&random, 4.0f, x, N_VOCAB);
        bi_sample_args a = args_of(1, N_VOCAB, x, &s, &out);
        run(&corner, &a);
        double sum = 0.0, sum_raw = 0.0, entropy = 0.0, t = (double)s.temperature;
        for (int i = 0; i < N_VOCAB; i++) {
            sum += exp((double)x[i] / t);
            sum_raw += exp((double)x[i]);
        }
        for (int i = 0; i < N_VOCAB; i++)
            entropy -= exp((double)x[i] / t) / sum * ((double)x[i] / t - log(sum));
        double at = (double)x[out.token[0]];
        ck_assert_double_eq_tol((double)out.logprob[0], at / t - log(sum), 2e-5);
        ck_assert_double_eq_tol((double)out.logprob_raw[0], at - log(sum_raw), 1e-5);
        ck_assert_double_eq_tol((double)out.logprob_kept[0], at / t - log(sum), 2e-5);
        ck_assert_double_eq_tol((double)out.entropy[0], entropy, 2e-5);
    }
}
END_TEST

/* ---- the draw at chosen numbers ------------------------------------------------------------------------------------ */

static void check_draw(const float *x, int n, uint64_t u, int wanted) {
    static outputs out;
    bi_sampling s = slow_setting_drawing(u);
    bi_sample_args a = args_of(1, n, x, &s, &out);
    run(&corner, &a);
    ck_assert_msg(out.token[0] == wanted, "u = %016llx of %d tokens: %d, wanted %d", (unsigned long long)u, n, out.token[0],
                  wanted);
}

START_TEST(the_first_id_whose_prefix_sum_exceeds_r_is_drawn) {
    float x[256] = {0}; /* every weight is 2^40 */
    check_draw(x, 4, 0, 0);
    check_draw(x, 4, ((uint64_t)1 << 62) - 1, 0);
    check_draw(x, 4, (uint64_t)1 << 62, 1); /* r = 2^40: the first prefix equals it and does not exceed it */
    check_draw(x, 4, UINT64_MAX, 3);
    check_draw(x, 256, ((uint64_t)1 << 63) - 1, 127); /* the last id of the first sub-block */
    check_draw(x, 256, (uint64_t)1 << 63, 128);
    check_draw(x, 256, UINT64_MAX, 255);
    check_draw(x, 3, 0x5555555555555555u, 0); /* W = 3 * 2^40, r = floor(2^40 - 2^-24) */
    check_draw(x, 3, 0x5555555555555556u, 1);
    x[0] = x[2] = -60.0f; /* weight 0: never drawn, at either end */
    check_draw(x, 3, 0, 1);
    check_draw(x, 3, UINT64_MAX, 1);
}
END_TEST

/* ---- statistics of the draw ---------------------------------------------------------------------------------------- */

enum { CHI_VOCAB = 24, CHI_DRAWS = 64 * 400 };

/* chi-square of CHI_DRAWS draws against the exact probabilities of the kept tokens; *n_free: degrees of freedom. */
static double chi_square(const float *x, bi_sampling setting, int vary, int *n_free) {
    static float logit[ROW_MAX][CHI_VOCAB];
    static outputs out;
    bi_sampling settings[ROW_MAX];
    double count[CHI_VOCAB] = {0}, p[CHI_VOCAB], sum = 0.0, chi = 0.0;
    for (int t = 0; t < ROW_MAX; t++)
        memcpy(logit[t], x, sizeof logit[t]);
    for (int first = 0; first < CHI_DRAWS; first += ROW_MAX) {
        for (int t = 0; t < ROW_MAX; t++) {
            settings[t] = setting;
            settings[t].position += vary == 0 ? first + t : 0;
            settings[t].sample += vary == 1 ? (uint32_t)(first + t) : 0;
            settings[t].seed += vary == 2 ? (uint64_t)(first + t) << 20 : 0;
            settings[t].uid_hash += vary == 3 ? (uint64_t)(first + t) << 32 : 0;
        }
        bi_sample_args a = args_of(ROW_MAX, CHI_VOCAB, logit[0], settings, &out);
        run(&corner, &a);
        for (int t = 0; t < ROW_MAX; t++)
            count[out.token[t]] += 1.0;
    }
    uint32_t kept = kept_mask(x, CHI_VOCAB, setting);
    for (int i = 0; i < CHI_VOCAB; i++)
        sum += p[i] = kept >> i & 1 ? exp((double)x[i] / (double)setting.temperature) : 0.0;
    *n_free = -1;
    for (int i = 0; i < CHI_VOCAB; i++) {
        double expected = p[i] / sum * CHI_DRAWS;
        ck_assert_msg(expected > 0.0 || count[i] == 0.0, "token %d is dropped and was drawn", i);
        if (expected > 0.0) {
            chi += (count[i] - expected) * (count[i] - expected) / expected;
            ++*n_free;
        }
    }
    return chi;
}

START_TEST(draws_follow_the_distribution) {
    float x[CHI_VOCAB];
    for (int i = 0; i < CHI_VOCAB; i++)
        x[i] = (float)((i * 7) % CHI_VOCAB) * 0.15f;
    for (int vary = 0; vary < 4; vary++)
        for (int filter = 0; filter < 5; filter++) {
            bi_sampling s = SLOW_PLAIN;
            s.seed = 77 + (uint64_t)filter;
            s.uid_hash = 12345;
            s.temperature = filter == 4 ? 0.5f : 1.0f;
            s.top_k = filter == 1 ? 9 : 0;
            s.min_p = filter == 2 ? 0.2f : 0.0f;
            s.top_p_q32 = filter >= 3 ? bi_sample_top_p(0.8) : P_OFF;
            int n_free;
            double chi = chi_square(x, s, vary, &n_free);
            /* Mean n_free, deviation sqrt(2 n_free). Five deviations: a probability shifted by 0.02 moves chi by more, and
             * a draw that repeats itself is too even. */
            ck_assert_msg(fabs(chi - n_free) < 5.0 * sqrt(2.0 * n_free), "filter %d, vary %d: chi-square %g of %d", filter,
                          vary, chi, n_free);
        }
}
END_TEST

START_TEST(every_word_of_the_counter_moves_the_draw) {
    enum { N_VOCAB = 1024 };
    static float x[N_VOCAB];
    static outputs out;
    bi_sampling s[7];
    for (int t = 0; t < 7; t++)
        s[t] = SLOW_PLAIN;
    s[1].seed = 1;
    s[2].seed = 1ull << 32;
    s[3].position = 1;
    s[4].sample = 1;
    s[5].uid_hash = 1;
    s[6].uid_hash = 1ull << 32;
    for (int t = 0; t < 7; t++) { /* a flat row: token = top ten bits of u */
        bi_sample_args a = args_of(1, N_VOCAB, x, &s[t], &out);
        run(&corner, &a);
        ck_assert_int_eq(out.token[0], (int)(slow_philox_u64(&s[t]) >> 54));
        for (int u = 0; u < t; u++)
            ck_assert_uint_ne(slow_philox_u64(&s[t]), slow_philox_u64(&s[u]));
    }
}
END_TEST

/* ---- faults and refusals ------------------------------------------------------------------------------------------- */

START_TEST(a_faulted_row_is_skipped_and_its_neighbours_keep_their_bits) {
    enum { N_VOCAB = 300 };
    static float x[3 * N_VOCAB];
    static outputs base, out;
    uint32_t fault[3] = {0, 9, 0};
    bi_sampling s[3] = {SLOW_PLAIN, SLOW_PLAIN, SLOW_PLAIN};
    s[0].entropy = s[1].entropy = s[2].n_top = 1;
    op_random random = {test_seed(), 6};
    op_random_normals(&random, 2.0f, x, 3 * N_VOCAB);
    bi_sample_args a = args_of(3, N_VOCAB, x, s, &base);
    run(&corner, &a);
    for (int marked = 1; marked >= 0; marked--) { /* a NaN that nobody marked is skipped as well */
        x[N_VOCAB + 17] = marked ? x[N_VOCAB + 17] : bi_f32_of(0x7fffffffu);
        x[N_VOCAB + 18] = marked ? x[N_VOCAB + 18] : INFINITY;
        a = args_of(3, N_VOCAB, x, s, &out);
        a.row_fault = marked ? fault : NULL;
        run(&corner, &a);
        ck_assert_int_eq(out.token[1], -1);
        check_bits(out.logprob[1], 0.0f, "logprob of a skipped row", 1);
        check_bits(out.logprob_raw[1], 0.0f, "logprob_raw of a skipped row", 1);
        check_bits(out.logprob_kept[1], 0.0f, "logprob_kept of a skipped row", 1);
        check_bits(out.entropy[1], bi_f32_of(0x7fc00000u), "entropy of a skipped row", 1);
        copy_row(&out, 1, &base, 1);
        ck_assert_mem_eq(&out, &base, sizeof out);
    }
}
END_TEST

/* The second of two rows is bad: nothing of the first may be written either. */
static void refused(bi_sampling setting, int32_t forced, br_status wanted) {
    static const float x[16] = {0};
    static outputs out, untouched;
    const bi_sampling s[2] = {SLOW_PLAIN, setting};
    const int32_t force[2] = {-1, forced};
    bi_sample_args a = args_of(2, 8, x, s, &untouched);
    a = args_of(2, 8, x, s, &out);
    a.forced = force;
    CHECK_FAILS(corner.backend.op->sample(corner.backend.ctx, &a), wanted);
    ck_assert_mem_eq(&out, &untouched, sizeof out);
}

START_TEST(settings_out_of_range_are_refused_before_any_output) {
    bi_sampling s = SLOW_PLAIN;
#define REFUSED(field, value, status) s = SLOW_PLAIN, s.field = (value), refused(s, -1, status)
    REFUSED(temperature, -1.0f, BR_E_ARG);
    REFUSED(temperature, bi_f32_of(0x7fc00000u), BR_E_ARG);
    REFUSED(temperature, 0x1.fffffep-11f, BR_E_ARG);
    REFUSED(temperature, 0x1.000002p10f, BR_E_ARG);
    REFUSED(min_p, -0.1f, BR_E_ARG);
    REFUSED(min_p, 1.0000001f, BR_E_ARG);
    REFUSED(min_p, bi_f32_of(0x7fc00000u), BR_E_ARG);
    REFUSED(top_k, -1, BR_E_ARG);
    REFUSED(top_p_q32, 0, BR_E_ARG);
    REFUSED(top_p_q32, P_OFF + 1, BR_E_ARG);
    REFUSED(n_top, -1, BR_E_SHAPE);
    REFUSED(n_top, 9, BR_E_SHAPE); /* of 8 tokens */
    REFUSED(n_top, BR_TOP_LOGPROBS_MAX + 1, BR_E_SHAPE);
#undef REFUSED
    refused(SLOW_PLAIN, 8, BR_E_SHAPE);
    static float x[1025];
    static outputs out;
    bi_sample_args a = args_of(1, 1025, x, &SLOW_PLAIN, &out);
    CHECK_FAILS(corner.backend.op->sample(corner.backend.ctx, &a), BR_E_SHAPE);
    a.n_vocab = 0;
    CHECK_FAILS(corner.backend.op->sample(corner.backend.ctx, &a), BR_E_SHAPE);
    a.n_vocab = 8;
    a.logit_ld = 7;
    CHECK_FAILS(corner.backend.op->sample(corner.backend.ctx, &a), BR_E_SHAPE);
    a.logit_ld = 8;
    s = SLOW_PLAIN;
    s.n_top = 5;
    a.setting = &s;
    a.top_ld = 4; /* places in `top` */
    CHECK_FAILS(corner.backend.op->sample(corner.backend.ctx, &a), BR_E_SHAPE);
    a.n_row = 0;
    CHECK_OK(corner.backend.op->sample(corner.backend.ctx, &a));
}
END_TEST

Suite *test_sample_suite(void) {
    Suite *suite = suite_create("sample");
    TCase *slow = tcase_create("slow form");
    tcase_set_timeout(slow, test_is_long() ? 600 : 30);
    tcase_add_test(slow, sample_equals_slow_form);
    tcase_add_test(slow, large_vocabulary_equals_slow_form);
    tcase_add_test(slow, batch_order_and_threads_do_not_matter);
    suite_add_tcase(suite, slow);
    TCase *cases = tcase_create("cases");
    tcase_set_timeout(cases, 30);
    tcase_add_checked_fixture(cases, corner_open, corner_close);
    tcase_add_test(cases, filters_keep_exactly_what_the_clause_says);
    tcase_add_test(cases, top_p_cuts_a_plateau_at_exact_weights);
    tcase_add_test(cases, top_p_counts_single_units_of_weight);
    tcase_add_test(cases, minus_zero_is_plus_zero);
    tcase_add_test(cases, top_p_quantises_from_binary64);
    tcase_add_test(cases, one_kept_token_is_the_greedy_token_and_certain);
    tcase_add_test(cases, a_dropped_forced_token_has_no_kept_probability);
    tcase_add_test(cases, logprobs_and_entropy_are_those_of_the_softmax);
    tcase_add_test(cases, the_first_id_whose_prefix_sum_exceeds_r_is_drawn);
    tcase_add_test(cases, draws_follow_the_distribution);
    tcase_add_test(cases, every_word_of_the_counter_moves_the_draw);
    tcase_add_test(cases, a_faulted_row_is_skipped_and_its_neighbours_keep_their_bits);
    tcase_add_test(cases, settings_out_of_range_are_refused_before_any_output);
    suite_add_tcase(suite, cases);
    return suite;
}
