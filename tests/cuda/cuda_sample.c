/* bi_sample on the GPU against the oracle: every mixture of filters over rows of every kind, and the corners of each filter. */
#include "cuda_case.h"
#include "slow_head.h"
#include "test_support.h"
#include "twin.h"

#include <string.h>

enum { ROW_MAX = 300, VOCAB_MAX = 163840, TOP_LD = BR_TOP_LOGPROBS_MAX, TWIN_BYTES = 24 << 20 };
#define P_OFF ((uint64_t)1 << 32)

static twin t;
static op_random rnd;

static void open_twin(void) {
    const bi_limits limits = {.n_row = ROW_MAX, .d_in = 256, .d_out = 256, .rank = 16, .n_slot = 2, .n_head = 2, .d_kv_latent = 64,
                              .d_rope = 16, .index_n_head = 4, .index_d_head = 32, .n_pos = 256, .n_expert = 8, .n_expert_topk = 2,
                              .d_expert = 64, .d_expert_ff = 64, .kda_n_head = 2, .kda_d_head = 64, .n_vocab = VOCAB_MAX, .d_model = 256};
    twin_open(&t, &limits, TWIN_BYTES);
    rnd = (op_random){test_seed(), 0};
}

static void close_twin(void) {
    twin_close(&t);
}

/* One call: its inputs lie in the twin and may be changed until sample_case_run. */
typedef struct sample_case {
    int n_row, n_vocab, ld;
    float *logit;
    bi_sampling *setting;
    int32_t *forced;
    uint32_t *fault;
} sample_case;

static sample_case new_case(int n_row, int n_vocab, int gap) {
    twin_reset(&t);
    sample_case c = {n_row, n_vocab, n_vocab + gap, NULL, NULL, NULL, NULL};
    c.logit = TWIN_ARRAY(&t, float, "logit", (int64_t)n_row * c.ld);
    c.setting = TWIN_ARRAY(&t, bi_sampling, "setting", n_row);
    c.forced = TWIN_ARRAY(&t, int32_t, "forced", n_row);
    c.fault = TWIN_ARRAY(&t, uint32_t, "row_fault", n_row);
    for (int r = 0; r < n_row; r++) {
        c.setting[r] = SLOW_PLAIN;
        c.setting[r].seed = op_random_u64(&rnd);
        c.setting[r].position = op_random_below(&rnd, 1 << 20);
        c.forced[r] = -1;
        c.fault[r] = 0;
    }
    return c;
}

static float *row_of(const sample_case *c, int r) {
    return c->logit + (int64_t)r * c->ld;
}

static void run_case(const sample_case *c, const char *what) {
    int32_t *token = TWIN_ARRAY(&t, int32_t, "token", c->n_row);
    float *logprob = TWIN_ARRAY(&t, float, "logprob", c->n_row), *raw = TWIN_ARRAY(&t, float, "logprob_raw", c->n_row),
          *kept = TWIN_ARRAY(&t, float, "logprob_kept", c->n_row), *entropy = TWIN_ARRAY(&t, float, "entropy", c->n_row);
    bi_top *top = TWIN_ARRAY(&t, bi_top, "top", c->n_row * TOP_LD);
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_sample_args a = {.n_row = c->n_row, .n_vocab = c->n_vocab, .logit = twin_at(&t, side, c->logit), .logit_ld = c->ld,
                            .setting = twin_at(&t, side, c->setting), .forced = twin_at(&t, side, c->forced),
                            .token = twin_at(&t, side, token), .logprob = twin_at(&t, side, logprob),
                            .logprob_raw = twin_at(&t, side, raw), .logprob_kept = twin_at(&t, side, kept),
                            .entropy = twin_at(&t, side, entropy), .top = twin_at(&t, side, top), .top_ld = TOP_LD,
                            .row_fault = twin_at(&t, side, c->fault)};
        CHECK_OK(t.backend[side].op->sample(t.backend[side].ctx, &a));
    }
    twin_compare(&t, what);
    /* part, bound, weight, top_p, weight again, draw, of up to 256 rows at a time */
    twin_launched(&t, what, c->n_row > 256 ? "sample 12" : "sample 6");
}

/* Rows of any kind with any settings; some with a fault, some with a NaN that nobody has marked. */
static void try_any(int n_row, int n_vocab, int gap) {
    sample_case c = new_case(n_row, n_vocab, gap);
    for (int r = 0; r < n_row; r++) {
        slow_logits(&rnd, op_random_below(&rnd, SLOW_LOGIT_KINDS), row_of(&c, r), n_vocab);
        c.setting[r] = slow_setting(&rnd, n_vocab);
        c.forced[r] = op_random_below(&rnd, 3) ? -1 : op_random_below(&rnd, n_vocab);
        c.fault[r] = op_random_below(&rnd, 12) ? 0 : 9;
        if (op_random_below(&rnd, 12) == 0)
            row_of(&c, r)[op_random_below(&rnd, n_vocab)] = bi_f32_of(op_random_below(&rnd, 2) ? 0x7fc00000u : 0xffffffffu);
    }
    run_case(&c, "any mixture");
}

START_TEST(any_mixture) {
    static const int sizes[] = {1, 2, 3, 20, 127, 128, 129, 255, 256, 257, 300, 640, 1000, 2304};
    for (int i = 0; i < 14; i++)
        for (int round = 0; round < 3; round++)
            try_any(1 + op_random_below(&rnd, 24), sizes[i], op_random_below(&rnd, 40));
    try_any(ROW_MAX, 200, 0); /* more rows than are in flight at once */
}
END_TEST

START_TEST(any_mixture_of_a_large_vocabulary) {
    try_any(9, VOCAB_MAX, 0);
    try_any(6, VOCAB_MAX - 1, 4);
    try_any(12, 65537, 1);
    try_any(40, 12345, 3);
}
END_TEST

/* Rows without filters, as a rollout has them. */
START_TEST(plain_rows) {
    sample_case c = new_case(16, VOCAB_MAX, 0);
    for (int r = 0; r < 16; r++) {
        slow_logits(&rnd, r % 2 ? 0 : 8, row_of(&c, r), VOCAB_MAX);
        c.setting[r].temperature = r % 4 == 3 ? 0.7f : 1.0f;
        c.setting[r].entropy = r % 3 == 0;
        c.setting[r].n_top = r == 5 ? 20 : 0;
    }
    run_case(&c, "plain rows");
}
END_TEST

/* Each filter at its edges on each kind of row: k around sub-blocks, ties and the whole row, P around exact shares. */
START_TEST(filters_at_their_edges) {
    enum { N = 1000 };
    static const int k[] = {1, 2, 7, 8, 9, 127, 128, 129, N - 1, N, N + 1, 500};
    static const uint64_t p[] = {1, 2, P_OFF / 4 - 1, P_OFF / 4, P_OFF / 4 + 1, P_OFF / 2, 4080218931u, P_OFF - 1, P_OFF, 1u << 20, 3, 77};
    static const float min_p[] = {0x1p-149f, 1e-30f, 0x1p-40f, 0.01f, 0.1353352f, 0.5f, 0.99999994f, 1.0f, 0.25f, 1e-3f, 1e-12f, 0.0f};
    for (int kind = 0; kind < SLOW_LOGIT_KINDS; kind++)
        for (int mixed = 0; mixed < 2; mixed++) {
            sample_case c = new_case(36, N, 0);
            for (int r = 0; r < 36; r++) {
                bi_sampling *s = &c.setting[r];
                slow_logits(&rnd, kind, row_of(&c, r), N);
                s->top_k = r / 12 == 0 || mixed ? k[r % 12] : 0;
                s->top_p_q32 = r / 12 == 1 || mixed ? p[(r + 5 * mixed) % 12] : P_OFF;
                s->min_p = r / 12 == 2 ? min_p[r % 12] : 0.0f;
                s->n_top = r % (TOP_LD + 1);
                s->temperature = mixed && r % 3 == 0 ? 4.0f : 1.0f;
            }
            run_case(&c, "filters at their edges");
        }
}
END_TEST

/* Which tokens are kept, one forced token a row: plateaus that a filter cuts, and levels below the smallest weight. */
START_TEST(forced_tokens_show_what_is_kept) {
    enum { N = 300 };
    for (int kind = 0; kind < SLOW_LOGIT_KINDS; kind++)
        for (int filter = 0; filter < 4; filter++) {
            sample_case c = new_case(N, N, 0);
            float x[N];
            slow_logits(&rnd, kind, x, N);
            for (int r = 0; r < N; r++) {
                memcpy(row_of(&c, r), x, sizeof x);
                c.forced[r] = r;
                c.setting[r].top_k = filter == 0 ? 131 : filter == 3 ? 77 : 0;
                c.setting[r].top_p_q32 = filter == 1 ? P_OFF / 3 : filter == 3 ? P_OFF - 1 : P_OFF;
                c.setting[r].min_p = filter == 2 ? 0.2f : 0.0f;
            }
            run_case(&c, "forced tokens");
        }
}
END_TEST

/* Draws at the ends of the unit interval, where the prefix sums decide by one. */
START_TEST(draws_at_the_ends) {
    enum { N = 513 };
    static const uint64_t u[] = {0, 1, UINT64_MAX, UINT64_MAX - 1, (uint64_t)1 << 63, INT64_MAX, 1 << 24, 0x5555555555555555ull};
    for (int kind = 0; kind < SLOW_LOGIT_KINDS; kind++) {
        sample_case c = new_case(16, N, 0);
        for (int r = 0; r < 16; r++) {
            slow_logits(&rnd, kind, row_of(&c, r), N);
            c.setting[r] = slow_setting_drawing(u[r % 8]);
            c.setting[r].top_k = r < 8 ? 0 : 5;
        }
        run_case(&c, "draws at the ends");
    }
}
END_TEST

/* All weights in one bin of the search for top_p, more of them than its list holds, and a plateau of them. */
START_TEST(top_p_of_crowded_bins) {
    enum { N = 20000 };
    sample_case c = new_case(12, N, 0);
    for (int r = 0; r < 12; r++) {
        float *x = row_of(&c, r);
        for (int i = 0; i < N; i++)
            x[i] = r % 3 == 0 ? 1.0f : r % 3 == 1 ? 0x1p-12f * op_random_normal(&rnd) : 0x1p-20f * (float)op_random_below(&rnd, 5);
        x[N / 2] = r < 6 ? 12.0f : x[N / 2];
        c.setting[r].top_p_q32 = bi_sample_top_p(r % 2 ? 0.9 : 0.5);
        c.setting[r].top_k = r > 8 ? 15000 : 0;
    }
    run_case(&c, "crowded bins");
}
END_TEST

Suite *cuda_sample_suite(void) {
    Suite *suite = suite_create("sample");
    CUDA_CASE_IN(suite, any_mixture, open_twin, close_twin);
    CUDA_CASE_IN(suite, any_mixture_of_a_large_vocabulary, open_twin, close_twin);
    CUDA_CASE_IN(suite, plain_rows, open_twin, close_twin);
    CUDA_CASE_IN(suite, filters_at_their_edges, open_twin, close_twin);
    CUDA_CASE_IN(suite, forced_tokens_show_what_is_kept, open_twin, close_twin);
    CUDA_CASE_IN(suite, draws_at_the_ends, open_twin, close_twin);
    CUDA_CASE_IN(suite, top_p_of_crowded_bins, open_twin, close_twin);
    return suite;
}
