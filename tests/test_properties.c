/* What `init` promises of its random checkpoints, measured on the engine: logits that spread, experts that all work, an index
 * that chooses, adapters that matter. A preset without these would let the other suites pass on a model that tests nothing. */
#include "br_loaded.h"
#include "engine_rig.h"
#include "scorer.h"
#include "test_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PRESETS = 6, SEQ_LEN = 700, SEQ_COUNT = 3, TOKENS = SEQ_LEN * SEQ_COUNT, LOGIT_ROWS = 50 };

static const char *const preset[PRESETS] = {"nano", "k3-nano", "kimi-linear-nano", "pico", "mini", "small"};
static rig_model model[PRESETS];

static int preset_count(void) {
    return test_is_long() ? PRESETS : PRESETS - 1; /* small takes a minute */
}

static void make_models(void) {
    for (int i = 0; i < preset_count(); i++)
        rig_model_make(&model[i], preset[i]);
}

typedef struct watch {
    br_loaded loaded;
    scorer *scorer;
    int32_t *load;               /* (n_layer, n_expert) tokens of each expert */
    int64_t n_sparse, n_chosen; /* rows with more visible tokens than top-k; of these, other than the last k */
} watch;

static void look(void *context, br_stage stage, int32_t layer, const br_piece *piece, int32_t n_piece) {
    watch *w = context;
    const br_config *c = &w->loaded.config;
    const bi_batch *batch = scorer_batch(w->scorer);
    (void)n_piece;
    for (int32_t row = 0; row < batch->n_row; row++) {
        const int32_t *id = (const int32_t *)((const char *)piece->data + piece->row_stride * row);
        const bi_seg *seg = &batch->seg[batch->row_seg[row]];
        const int32_t pos = seg->pos + row - seg->row;
        for (int32_t k = 0; stage == BR_STAGE_ROUTE && k < c->n_expert_topk; k++)
            w->load[layer * c->n_expert + id[k]]++;
        if (stage == BR_STAGE_INDEX_TOPK && pos + 1 > c->index_topk) {
            w->n_sparse++;
            w->n_chosen += id[0] != pos + 1 - c->index_topk; /* ascending: the last k begin exactly there */
        }
    }
}

static void open_watch(watch *w, const rig_model *m) {
    const br_engine_options options = rig_options(m);
    memset(w, 0, sizeof *w);
    CHECK_OK(br_loaded_open(&options, SEQ_LEN, SEQ_LEN, 1, &w->loaded));
    CHECK_OK(scorer_open(&w->loaded, &w->scorer));
    w->load = rig_alloc((size_t)(w->loaded.config.n_layer * w->loaded.config.n_expert), sizeof *w->load);
}

static void close_watch(watch *w) {
    scorer_close(w->scorer);
    br_loaded_close(&w->loaded);
    free(w->load);
}

static void random_tokens(const watch *w, uint64_t seed, int32_t *token) {
    for (int32_t t = 0; t < SEQ_LEN; t++)
        token[t] = (int32_t)(test_mix(seed << 32 ^ (uint64_t)t) % (uint64_t)w->loaded.config.n_vocab);
}

/* Log-probs of one sequence under an adapter; final rows of it. */
static const bi_bf16 *run_one(watch *w, const int32_t *token, int32_t slot, const br_trace *trace, uint32_t *logprob) {
    static uint32_t raw[SEQ_LEN];
    const bi_bf16 *final;
    scorer_seq seq = {.token = token, .n_tok = SEQ_LEN, .slot = slot, .temperature = 1, .logprob = logprob, .logprob_raw = raw};
    CHECK_OK(scorer_forward(w->scorer, &seq, 1, trace, &final));
    CHECK_OK(scorer_logprobs(w->scorer, &seq, 1, final));
    ck_assert_int_eq(seq.fault, 0);
    return final;
}

static float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Mean over rows of the standard deviation of a row of logits. */
static double logit_spread(watch *w, const bi_bf16 *final) {
    const int32_t n = w->loaded.config.n_vocab;
    uint32_t fault[LOGIT_ROWS] = {0};
    float *logit = rig_alloc((size_t)LOGIT_ROWS * (size_t)n, sizeof *logit);
    double spread = 0;
    const bi_bf16 *last = final + (size_t)(SEQ_LEN - LOGIT_ROWS) * (size_t)w->loaded.config.d_model;
    CHECK_OK(br_model_logits(w->loaded.model, LOGIT_ROWS, last, logit, fault));
    for (int r = 0; r < LOGIT_ROWS; r++) {
        double sum = 0, squares = 0;
        for (int32_t i = 0; i < n; i++) {
            const double x = logit[(size_t)r * (size_t)n + (size_t)i];
            sum += x;
            squares += x * x;
        }
        spread += sqrt(squares / n - sum / n * (sum / n)) / LOGIT_ROWS;
    }
    free(logit);
    return spread;
}

START_TEST(a_checkpoint_is_alive) {
    watch w;
    int32_t token[SEQ_LEN];
    uint32_t base[SEQ_LEN], adapted[SEQ_LEN];
    open_watch(&w, &model[_i]);
    const br_config *c = &w.loaded.config;
    const br_trace trace = {.rows = look, .context = &w};
    for (int s = 0; s < SEQ_COUNT; s++) {
        random_tokens(&w, (uint64_t)s + 1, token);
        const bi_bf16 *final = run_one(&w, token, -1, &trace, base);
        const double spread = logit_spread(&w, final);
        ck_assert_msg(spread >= 1.5 && spread < 8, "%s: logits spread by %.3f", preset[_i], spread);
    }
    for (int32_t slot = 0; slot < RIG_ADAPTERS; slot++) {
        double moved = 0;
        run_one(&w, token, slot, NULL, adapted);
        for (int32_t t = 1; t < SEQ_LEN; t++)
            moved += fabs((double)number(adapted[t]) - (double)number(base[t])) / (SEQ_LEN - 1);
        ck_assert_msg(moved >= 0.05, "%s: adapter %d moves log-probs by %.4f", preset[_i], slot, moved);
    }
    for (int32_t l = c->n_dense_layer; l < c->n_layer; l++) {
        const double mean = (double)TOKENS * c->n_expert_topk / c->n_expert;
        for (int32_t e = 0; e < c->n_expert; e++) {
            const int32_t load = w.load[l * c->n_expert + e];
            ck_assert_msg(load > 0 && load <= 4 * mean, "%s: layer %d expert %d has %d tokens, mean %.1f", preset[_i], l, e, load, mean);
        }
    }
    if (c->index_topk && c->index_topk < SEQ_LEN)
        ck_assert_msg(w.n_sparse > 0 && 2 * w.n_chosen >= w.n_sparse, "%s: %lld of %lld index rows choose", preset[_i],
                      (long long)w.n_chosen, (long long)w.n_sparse);
    close_watch(&w);
}
END_TEST

Suite *test_properties_suite(void) {
    Suite *suite = suite_create("properties");
    TCase *tcase = tcase_create("presets");
    tcase_set_timeout(tcase, 600);
    tcase_add_unchecked_fixture(tcase, make_models, NULL);
    tcase_add_loop_test(tcase, a_checkpoint_is_alive, 0, preset_count());
    suite_add_tcase(suite, tcase);
    return suite;
}
