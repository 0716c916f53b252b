/* score on the GPU: log-probs of given tokens, against the oracle, byte for byte. */
#include "cuda_case.h"
#include "test_support.h"
#include "twin.h"

#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20 };

typedef struct head_case {
    int n_row, d, n_vocab, entropy;
    int kind; /* of inputs, below */
    int bad_row;
    int at_one; /* all rows at T = 1 or 0 */
} head_case;

/* kind 1, 2: plateaus, equal rows of W; 3: tiny; 4: up to the bound of z and past it; 5: peaked; 6: most logits are +0. */
static void make_inputs(op_random *random, const head_case *c, bi_bf16 *x, bi_bf16 *w) {
    const size_t row = sizeof *w * (size_t)c->d;
    op_random_bf16s(random, c->kind == 3 ? 0x1p-70f : c->kind == 4 ? 0x1p60f : 1.0f, x, c->n_row * c->d);
    op_random_bf16s(random, c->kind == 3 ? 0x1p-70f : c->kind == 4 ? 0x1p56f : c->kind == 5 ? 2.0f : 0.4f, w, c->n_vocab * c->d);
    for (int v = 0; v < c->n_vocab; v++) {
        if (c->kind == 1 || (c->kind == 2 && v % 4))
            memcpy(w + (size_t)v * (size_t)c->d, w, row);
        if (c->kind == 6 && v % 5)
            memset(w + (size_t)v * (size_t)c->d, 0, row);
    }
    if (c->bad_row >= 0)
        x[c->bad_row * c->d] = c->bad_row % 2 ? 0x7fff : 0x7f80;
}

/* Rows go in parts of n_part_row. More than 64 of a vocabulary of whole tiles of 256, rows of x on 16 bytes, no entropies: one launch
 * that keeps the logits. Else the logits of so many sub-blocks of 128 as 32 MiB hold for these rows: a product and a launch each. */
static void check_launches(twin *t, const head_case *c, int n_part_row, const char *what) {
    int n_part = 0, n_head = 0, n_product = 0;
    char list[100];
    for (int row = 0; row < c->n_row; row += n_part_row, n_part++) {
        const int n = c->n_row - row < n_part_row ? c->n_row - row : n_part_row, fit = (32 << 20) / 4 / n / 128, n_block = (c->n_vocab + 127) / 128;
        const int is_whole = n > 64 && c->n_vocab % 256 == 0 && c->d % 8 == 0 && !c->entropy;
        const int n_chunk = is_whole ? 1 : (n_block + fit - 1) / fit;
        n_head += n_chunk;
        n_product += is_whole ? 0 : n_chunk;
    }
    const int used = snprintf(list, sizeof list, "head %d, head_merge %d", n_head, n_part);
    if (n_product)
        snprintf(list + used, sizeof list - (size_t)used, ", linear_small|linear_large|linear_tile %d", n_product);
    twin_launched(t, what, list);
}

/* n_part_row: of the limits. */
static void run_case(twin *t, op_random *random, const head_case *c, int n_part_row) {
    static const float temperatures[] = {1.0f, 0.0f, 0.7f, 1.0f, 1.3f, 0x1p-10f, 0x1p10f};
    char what[160];
    twin_reset(t);
    bi_bf16 *x = TWIN_ARRAY(t, bi_bf16, "x", c->n_row * c->d), *w = TWIN_ARRAY(t, bi_bf16, "weights", c->n_vocab * c->d);
    int32_t *token = TWIN_ARRAY(t, int32_t, "tokens", c->n_row);
    float *temperature = TWIN_ARRAY(t, float, "temperatures", c->n_row), *logprob = TWIN_ARRAY(t, float, "logprob", c->n_row);
    float *raw = TWIN_ARRAY(t, float, "logprob_raw", c->n_row), *entropy = c->entropy ? TWIN_ARRAY(t, float, "entropy", c->n_row) : NULL;
    uint32_t *fault = TWIN_ARRAY(t, uint32_t, "faults", c->n_row);
    make_inputs(random, c, x, w);
    for (int i = 0; i < c->n_row; i++) {
        token[i] = i == 0 ? c->n_vocab - 1 : op_random_below(random, c->n_vocab);
        temperature[i] = temperatures[op_random_below(random, c->at_one ? 2 : 7)];
        fault[i] = i % 7 == 6 ? 2 : 0;
    }
    twin_mat map = twin_stack(t, w, 1, c->n_vocab, c->d);
    twin_begin(t);
    TWIN_RUNS(t, side) {
        bi_score_args a = {.n_row = c->n_row, .d = c->d, .n_vocab = c->n_vocab, .x = twin_at(t, side, x), .w = map.side[side],
                           .token = twin_at(t, side, token), .temperature = twin_at(t, side, temperature),
                           .logprob = twin_at(t, side, logprob), .logprob_raw = twin_at(t, side, raw),
                           .entropy = twin_at(t, side, entropy), .fault = {twin_at(t, side, fault), 55}};
        CHECK_OK(t->backend[side].op->score(t->backend[side].ctx, &a));
    }
    snprintf(what, sizeof what, "%d rows of %d, %d tokens, kind %d, entropy %d", c->n_row, c->d, c->n_vocab, c->kind, c->entropy);
    twin_compare(t, what);
    check_launches(t, c, n_part_row, what);
}

START_TEST(every_kind_and_size) {
    static const int vocabs[] = {300, 1, 127, 128, 129, 256, 1000, 31, 257, 1200, 1024, 1025, 8200};
    static const int rows[] = {1, 2, 8, 9, 33, 64, 65, 140};
    static const int widths[] = {64, 16, 71, 80};
    const bi_limits limits = {.n_row = 140, .d_in = 80, .d_model = 80, .n_vocab = 8200};
    twin t;
    op_random random = {test_seed(), 0};
    twin_open(&t, &limits, 6 * MIB);
    for (int v = 0; v < 13; v++)
        for (int kind = 0; kind < 7; kind++) {
            head_case c = {.n_row = rows[(v * 3 + kind) % 8], .d = widths[(v + kind) % 4], .n_vocab = vocabs[v], .kind = kind};
            c.entropy = (v + kind) % 3 != 0;
            c.bad_row = (v + kind) % 5 == 0 ? c.n_row - 1 : -1;
            run_case(&t, &random, &c, limits.n_row);
        }
    twin_close(&t);
}
END_TEST

/* Vocabularies of whole tiles, whose logits are never stored. */
START_TEST(whole_tiles) {
    static const int vocabs[] = {256, 512, 1280, 3328};
    static const int rows[] = {65, 127, 128, 129, 200, 257, 300};
    static const int widths[] = {64, 16, 72, 200};
    const bi_limits limits = {.n_row = 300, .d_in = 200, .d_model = 200, .n_vocab = 3328};
    twin t;
    op_random random = {test_seed(), 3};
    twin_open(&t, &limits, 16 * MIB);
    for (int i = 0; i < 56; i++) {
        head_case c = {.n_row = rows[i % 7], .d = widths[i / 7 % 4], .n_vocab = vocabs[i % 4], .at_one = i % 3 != 0};
        c.kind = (i + i / 7) % 7;
        c.entropy = i % 8 == 0;
        c.bad_row = i % 5 == 0 ? c.n_row / 2 : -1;
        run_case(&t, &random, &c, limits.n_row);
    }
    twin_close(&t);
}
END_TEST

/* Rows and the vocabulary are taken in parts; more than 1,024 sub-blocks are merged in rounds. */
START_TEST(many_parts) {
    const bi_limits limits = {.n_row = 96, .d_in = 32, .d_model = 32, .n_vocab = 140000};
    twin t;
    op_random random = {test_seed(), 1};
    twin_open(&t, &limits, 16 * MIB);
    static const int rows[] = {1, 64, 96, 200};
    for (int i = 0; i < 4; i++) {
        head_case c = {.n_row = rows[i], .d = 32, .n_vocab = 140000 - i * 3, .entropy = i % 2, .bad_row = -1};
        run_case(&t, &random, &c, limits.n_row);
    }
    twin_close(&t);
}
END_TEST

START_TEST(real_width) {
    const bi_limits limits = {.n_row = 130, .d_in = 7168, .d_model = 7168, .n_vocab = 4000};
    twin t;
    op_random random = {test_seed(), 2};
    twin_open(&t, &limits, 80 * MIB);
    static const int rows[] = {1, 16, 130};
    for (int i = 0; i < 3; i++) {
        head_case c = {.n_row = rows[i], .d = 7168, .n_vocab = 3000 + 8 * i, .entropy = 1, .bad_row = -1};
        run_case(&t, &random, &c, limits.n_row);
    }
    twin_close(&t);
}
END_TEST

START_TEST(refusals_are_the_oracles) {
    const bi_limits limits = {.n_row = 4, .d_in = 64, .d_model = 64, .n_vocab = 100};
    twin t;
    twin_open(&t, &limits, 1 * MIB);
    for (int side = 0; side < 2; side++) {
        static const bi_bf16 any;
        const bi_score_args good = {.n_row = 0, .d = 64, .n_vocab = 100, .w = {.data = &any, .n_out = 100, .n_in = 64}};
#define REFUSED(change)                                                                   \
    do {                                                                                  \
        bi_score_args a = good;                                                           \
        change;                                                                           \
        CHECK_FAILS(t.backend[side].op->score(t.backend[side].ctx, &a), BR_E_SHAPE);      \
    } while (0)
        REFUSED(a.n_row = -1);
        REFUSED(a.d = 0);
        REFUSED(a.d = 65);
        REFUSED(a.d = 63);
        REFUSED(a.n_vocab = 0);
        REFUSED(a.n_vocab = 101);
        REFUSED(a.n_vocab = 99);
        REFUSED(a.w.data = NULL);
#undef REFUSED
        CHECK_OK(t.backend[side].op->score(t.backend[side].ctx, &good));
    }
    twin_close(&t);
}
END_TEST

Suite *cuda_head_suite(void) {
    Suite *suite = suite_create("head");
    CUDA_CASE(suite, every_kind_and_size);
    CUDA_CASE(suite, whole_tiles);
    CUDA_CASE(suite, many_parts);
    CUDA_CASE(suite, real_width);
    CUDA_CASE(suite, refusals_are_the_oracles);
    return suite;
}
