/* The promise itself: a sequence's tokens and log-prob bits do not depend on how it was run.
 *
 * Each axis alone in full on the three architectures, then mixes that cover every pair of settings, long prompts, and the
 * scorer on everything that was sampled. The first test guards the rig: another adapter does change the bits. */
#include "engine_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARCHS = 3, MANY = 130, FEW = 9 };

static rig_model model[ARCHS], mini;
static const char *const preset[ARCHS] = {"nano", "k3-nano", "kimi-linear-nano"};

static void make_models(void) {
    for (int i = 0; i < ARCHS; i++)
        rig_model_make(&model[i], preset[i]);
    rig_model_make(&mini, "mini");
    mini.n_vocab = 4096;
}

/* A set of requests with its reference: one sequence at a time, whole prompts, nothing shared; the scorer agrees with it. */
typedef struct fixed_set {
    rig_request *request;
    rig_text *want, *got;
    int n;
} fixed_set;

static fixed_set reference(const rig_model *m, uint64_t seed, int n, int32_t n_min, int32_t n_max, int32_t max_new) {
    fixed_set set = {.request = rig_alloc((size_t)n, sizeof(rig_request)), .want = rig_alloc((size_t)n, sizeof(rig_text)),
                     .got = rig_alloc((size_t)n, sizeof(rig_text)), .n = n};
    br_engine_options options = rig_options(m);
    rig_requests(m, seed, n, n_min, n_max, max_new, set.request);
    options.max_seqs = 1;
    options.chunk_tokens = n_max;
    options.kv_pages = 64;
    options.no_prefix_cache = 1;
    rig_generate(&options, set.request, NULL, n, set.want);
    rig_score(m, 2 * RIG_TOK_MAX, 2, set.request, set.want, n, set.got);
    rig_expect_scored(set.request, set.want, set.got, n, m->preset);
    return set;
}

static void expect(const fixed_set *set, const br_engine_options *options, const int *order, const char *what) {
    rig_generate(options, set->request, order, set->n, set->got);
    rig_expect_equal(set->request, set->want, set->got, set->n, what);
}

static void drop(fixed_set *set) {
    free(set->request);
    free(set->want);
    free(set->got);
}

static void shuffled(uint64_t seed, int n, int *order) {
    for (int i = 0; i < n; i++)
        order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = (int)(test_mix(seed ^ (uint64_t)i) % (uint64_t)(i + 1)), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

START_TEST(an_adapter_changes_the_bits) {
    const rig_model *m = &model[_i];
    fixed_set set = reference(m, 1, 3, 20, 30, 8);
    br_engine_options options = rig_options(m);
    set.request[0].adapter = set.request[0].adapter == 0 ? 1 : 0;
    rig_generate(&options, set.request, NULL, set.n, set.got);
    ck_assert_int_ne(memcmp(set.want[0].logprob, set.got[0].logprob, sizeof set.got[0].logprob), 0);
    drop(&set);
}
END_TEST

START_TEST(every_chunk_cut) {
    const rig_model *m = &model[_i];
    fixed_set set = reference(m, 2, 1, 150, 150, 4);
    br_engine_options options = rig_options(m);
    options.n_adapter = 0; /* the one request is a base one, and half of the time of an open goes into adapters */
    options.max_seqs = 1;
    options.kv_pages = 4;
    for (int cut = 1; cut < 150; cut++) {
        char what[64];
        snprintf(what, sizeof what, "%s cut at %d", m->preset, cut);
        options.chunk_tokens = cut;
        expect(&set, &options, NULL, what);
    }
    drop(&set);
}
END_TEST

START_TEST(every_batch_size) {
    static const int32_t size[] = {1, 3, 15, 16, 17, 63, 64, 65, 130};
    const rig_model *m = &model[_i];
    fixed_set set = reference(m, 3, MANY, 3, 24, 5);
    for (size_t k = 0; k < sizeof size / sizeof size[0]; k++) {
        char what[64];
        br_engine_options options = rig_options(m);
        snprintf(what, sizeof what, "%s batch of %d", m->preset, size[k]);
        options.max_seqs = size[k];
        expect(&set, &options, NULL, what);
    }
    drop(&set);
}
END_TEST

/* 4 pages run the longest of these alone; 6 and 9 evict prefixes while samples of them still run. */
START_TEST(every_page_count) {
    const rig_model *m = &model[_i];
    fixed_set set = reference(m, 4, FEW, 60, 240, 10);
    for (int32_t pages = 4; pages <= 24; pages += pages < 10 ? 1 : 7) {
        char what[64];
        br_engine_options options = rig_options(m);
        snprintf(what, sizeof what, "%s with %d pages", m->preset, pages);
        options.max_seqs = 6;
        options.kv_pages = pages;
        options.state_every = 64;
        expect(&set, &options, NULL, what);
    }
    drop(&set);
}
END_TEST

START_TEST(preemption_at_every_nth_step) {
    const rig_model *m = &model[_i];
    fixed_set set = reference(m, 5, FEW, 10, 90, 8);
    for (int32_t every = 1; every <= 12; every++) {
        char what[64];
        br_engine_options options = rig_options(m);
        snprintf(what, sizeof what, "%s preempting at every step %d", m->preset, every);
        options.max_seqs = 5;
        options.chunk_tokens = 40;
        options.preempt_every = every;
        expect(&set, &options, NULL, what);
    }
    drop(&set);
}
END_TEST

START_TEST(threads_orders_and_prefix_cache) {
    static const int32_t threads[] = {1, 2, 5};
    const rig_model *m = &model[_i];
    int order[FEW];
    fixed_set set = reference(m, 6, FEW, 10, 200, 8);
    for (uint64_t k = 0; k < 9; k++) {
        for (int32_t off = 0; off <= 1; off++) {
            char what[96];
            br_engine_options options = rig_options(m);
            snprintf(what, sizeof what, "%s with %d threads, order %d, prefix cache %s", m->preset, threads[k % 3], (int)k, off ? "off" : "on");
            shuffled(k, FEW, order);
            options.n_thread = threads[k % 3];
            options.max_seqs = 7;
            options.no_prefix_cache = off;
            expect(&set, &options, order, what);
        }
    }
    drop(&set);
}
END_TEST

/* ---- every pair of settings -------------------------------------------------------------------------------------------------- */

enum { FACTORS = 8, LEVELS_MAX = 4, MIX_MIN = 40 };
static const int level_count[FACTORS] = {4, 4, 3, 4, 3, 3, 2, 3};

static br_engine_options mix_options(const rig_model *m, const int *level) {
    static const int32_t batch[] = {1, 3, 6, 16}, chunk[] = {16, 33, 64, 300}, pages[] = {4, 9, 64}, preempt[] = {0, 1, 3,
            7}, threads[] = {1, 2, 5}, every[] = {-1, 64, 128};
    br_engine_options options = rig_options(m);
    options.max_seqs = batch[level[0]];
    options.chunk_tokens = chunk[level[1]];
    options.kv_pages = pages[level[2]];
    options.preempt_every = preempt[level[3]];
    options.n_thread = threads[level[4]];
    options.no_prefix_cache = level[6];
    options.state_every = every[level[7]];
    return options;
}

typedef uint8_t pair_table[FACTORS][LEVELS_MAX][FACTORS][LEVELS_MAX];

static int new_pairs(const int *level, pair_table seen, int mark) {
    int n = 0;
    for (int a = 0; a < FACTORS; a++) {
        for (int b = a + 1; b < FACTORS; b++) {
            n += !seen[a][level[a]][b][level[b]];
            if (mark)
                seen[a][level[a]][b][level[b]] = 1;
        }
    }
    return n;
}

/* The best of some random candidates, again and again until nothing is new and there are enough mixes. */
static int next_mix(uint64_t round, pair_table seen, int *level) {
    int best = -1;
    for (uint64_t candidate = 0; candidate < 200; candidate++) {
        int trial[FACTORS];
        for (int f = 0; f < FACTORS; f++)
            trial[f] = (int)(test_mix(round << 40 ^ candidate << 8 ^ (uint64_t)f) % (uint64_t)level_count[f]);
        const int n = new_pairs(trial, seen, 0);
        if (n > best) {
            best = n;
            memcpy(level, trial, sizeof trial);
        }
    }
    new_pairs(level, seen, 1);
    return best;
}

START_TEST(pairwise_mixes) {
    const rig_model *m = &model[_i];
    pair_table seen = {0};
    int level[FACTORS], order[FEW], n_mix = 0;
    fixed_set set = reference(m, 7, FEW, 10, 170, 6);
    while (next_mix((uint64_t)n_mix, seen, level) > 0 || n_mix < MIX_MIN) {
        char what[128];
        const br_engine_options options = mix_options(m, level);
        snprintf(what, sizeof what, "%s mix %d: %d %d %d %d %d %d %d %d", m->preset, n_mix, level[0], level[1], level[2],
                 level[3], level[4], level[5], level[6], level[7]);
        shuffled((uint64_t)level[5], FEW, order);
        expect(&set, &options, order, what);
        n_mix++;
    }
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++)
            for (int x = 0; x < level_count[a]; x++)
                for (int y = 0; y < level_count[b]; y++)
                    ck_assert_msg(seen[a][x][b][y], "settings %d=%d and %d=%d never met", a, x, b, y);
    drop(&set);
}
END_TEST

/* mini's top-k of 640 puts more than 64 entries into a class, k3-nano attends to all: the running maximum inside a class moves. */
START_TEST(long_prompts) {
    const rig_model *m = _i ? &model[1] : &mini;
    static const int32_t length[] = {900, 1300};
    for (int k = 0; k < 2; k++) {
        char what[64];
        fixed_set set = reference(m, 8, 2, length[k], length[k], 6);
        br_engine_options options = rig_options(m);
        snprintf(what, sizeof what, "%s with a prompt of %d", m->preset, length[k]);
        options.max_seqs = 4;
        options.chunk_tokens = 97;
        options.kv_pages = 64;
        options.n_thread = 2;
        expect(&set, &options, NULL, what);
        options.preempt_every = 5;
        options.chunk_tokens = 256;
        expect(&set, &options, NULL, what);
        drop(&set);
    }
}
END_TEST

Suite *test_invariance_suite(void) {
    Suite *suite = suite_create("invariance");
    TCase *tcase = tcase_create("schedules");
    tcase_set_timeout(tcase, 900);
    tcase_add_unchecked_fixture(tcase, make_models, NULL);
    tcase_add_loop_test(tcase, an_adapter_changes_the_bits, 0, ARCHS);
    tcase_add_loop_test(tcase, every_chunk_cut, 0, ARCHS);
    tcase_add_loop_test(tcase, every_batch_size, 0, ARCHS);
    tcase_add_loop_test(tcase, every_page_count, 0, ARCHS);
    tcase_add_loop_test(tcase, preemption_at_every_nth_step, 0, ARCHS);
    tcase_add_loop_test(tcase, threads_orders_and_prefix_cache, 0, ARCHS);
    tcase_add_loop_test(tcase, pairwise_mixes, 0, ARCHS);
    tcase_add_loop_test(tcase, long_prompts, 0, 2);
    suite_add_tcase(suite, tcase);
    return suite;
}
