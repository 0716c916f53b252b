/* Random schedules of the whole engine: random sizes, arrivals, preemption, aborts; the tokens and bits must be the reference's,
 * and those of an aborted request a beginning of it. A failing seed is printed; BITROLL_TEST_SEED=seed runs it first. */
#include "engine_parts.h"
#include "engine_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARCHS = 3, REQUESTS = 6, SETS = 3, SCHEDULES = 300, SCHEDULES_LONG = 10000, MAX_NEW = 6 };

static rig_model model[ARCHS];
static const char *const preset[ARCHS] = {"pico", "k3-nano", "kimi-linear-nano"};

static void make_models(void) {
    for (int i = 0; i < ARCHS; i++)
        rig_model_make(&model[i], preset[i]);
}

typedef struct request_set {
    rig_request request[REQUESTS];
    rig_text want[REQUESTS];
} request_set;

static void fill_set(const rig_model *m, uint64_t seed, request_set *set) {
    br_engine_options options = rig_options(m);
    rig_requests(m, seed, REQUESTS, 2, 70, MAX_NEW, set->request);
    options.max_seqs = 1;
    options.chunk_tokens = 128;
    options.no_prefix_cache = 1;
    options.kv_pages = 4;
    rig_generate(&options, set->request, NULL, REQUESTS, set->want);
}

static uint64_t roll(uint64_t *state, uint64_t n) {
    *state = test_mix(*state);
    return (*state >> 16) % n;
}

static br_engine_options random_options(const rig_model *m, uint64_t *state) {
    static const int32_t every[] = {-1, 64, 128};
    br_engine_options o = rig_options(m);
    o.max_seqs = 1 + (int32_t)roll(state, 7);
    o.chunk_tokens = o.max_seqs + (int32_t)roll(state, 100);
    o.kv_pages = 2 + (int32_t)roll(state, 14);
    o.state_every = every[roll(state, 3)];
    o.preempt_every = roll(state, 3) ? 0 : 1 + (int32_t)roll(state, 6);
    o.no_prefix_cache = roll(state, 4) == 0;
    o.n_thread = roll(state, 4) ? 1 : 2;
    return o;
}

typedef struct live {
    uint64_t id;
    int32_t n_seen;
    int submitted, aborted, ended;
} live;

static void check_token(const request_set *set, live *l, int i, const br_token *token, uint64_t seed) {
    const rig_text *want = &set->want[i];
    if (token->last)
        l->ended = 1;
    if (token->token < 0) {
        ck_assert_msg(l->aborted && token->stop == BR_STOP_ABORT, "seed %llu: request %d ended without a token", (unsigned long long)seed, i);
        return;
    }
    const int32_t at = set->request[i].n_prompt + l->n_seen++;
    if (token->position != at || token->token != want->token[at] || token->logprob != want->logprob[0][at] ||
        token->logprob_raw != want->logprob[1][at] || token->logprob_kept != want->logprob[2][at])
        ck_abort_msg("seed %llu: request %d position %d: token %d bits %08x, wanted position %d token %d bits %08x", (unsigned long long)seed, i,
                  token->position, token->token, token->logprob, at, want->token[at], want->logprob[0][at]);
}

static void run_schedule(const rig_model *m, const request_set *set, uint64_t seed) {
    br_engine *engine;
    live l[REQUESTS] = {0};
    int order[REQUESTS], next = 0;
    int32_t n, done = 0;
    uint64_t state = test_mix(seed);
    const br_engine_options options = random_options(m, &state);
    CHECK_OK(br_engine_open(&options, &engine));
    for (int i = 0; i < REQUESTS; i++) {
        const int j = (int)roll(&state, (uint64_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    while (!done || next < REQUESTS) {
        while (next < REQUESTS && roll(&state, 3)) {
            const int i = order[next];
            br_request request = rig_br_request(&set->request[i]);
            br_status status = br_submit(engine, &request, &l[i].id);
            if (status == BR_E_LIMIT)
                break;
            next++;
            l[i].submitted = status == BR_OK; /* with few pages a request may never fit: a clear refusal */
            ck_assert_msg(status == BR_OK || status == BR_E_CAPACITY, "seed %llu: %s", (unsigned long long)seed, br_last_error());
        }
        br_token token[8];
        CHECK_OK(br_poll(engine, token, 1 + (int32_t)roll(&state, 8), &n, &done));
        for (int32_t k = 0; k < n; k++)
            for (int i = 0; i < REQUESTS; i++)
                if (l[i].submitted && l[i].id == token[k].request)
                    check_token(set, &l[i], i, &token[k], seed);
        const int victim = (int)roll(&state, REQUESTS * 12);
        if (victim < REQUESTS && l[victim].submitted && !l[victim].ended && !l[victim].aborted)
            l[victim].aborted = br_abort(engine, l[victim].id) == BR_OK;
    }
    for (int i = 0; i < REQUESTS; i++)
        ck_assert_msg(!l[i].submitted || (l[i].ended && (l[i].aborted || l[i].n_seen == set->want[i].n_tok - set->request[i].n_prompt)),
                      "seed %llu: request %d has %d tokens", (unsigned long long)seed, i, l[i].n_seen);
    br_engine_close(engine);
}

START_TEST(random_schedules) {
    const rig_model *m = &model[_i];
    request_set *set = rig_alloc(SETS, sizeof *set);
    const uint64_t first = test_seed(), n = test_is_long() ? SCHEDULES_LONG : SCHEDULES;
    for (uint64_t k = 0; k < SETS; k++)
        fill_set(m, 11 + k, &set[k]);
    for (uint64_t k = 0; k < n; k++)
        run_schedule(m, &set[(first + k) % SETS], first + k);
    free(set);
}
END_TEST

/* The checks above must be able to fail: a live KDA state that is another sequence's, and a page that was not written. */
static int differs_when_broken(const rig_model *m, const request_set *set, int break_page) {
    br_engine *engine;
    int32_t n, done = 0, step = 0;
    uint64_t id;
    int n_differ = 0;
    br_engine_options options = rig_options(m);
    const br_request request = rig_br_request(&set->request[0]);
    options.max_seqs = 1;
    CHECK_OK(br_engine_open(&options, &engine));
    CHECK_OK(br_submit(engine, &request, &id));
    while (!done) {
        br_token token[4];
        CHECK_OK(br_poll(engine, token, 4, &n, &done));
        for (int32_t k = 0; k < n; k++)
            n_differ += token[k].logprob != set->want[0].logprob[0][token[k].position];
        if (++step == 2) {
            const sched_plan *plan = engine->plan;
            if (break_page)
                memset(engine->pages + br_model_page_bytes(engine->loaded.model) * (size_t)plan->table[0], 0x11,
                       br_model_page_bytes(engine->loaded.model));
            else
                memset(engine->states + br_model_state_bytes(engine->loaded.model) * (size_t)plan->state_index[0], 0x11,
                       br_model_state_bytes(engine->loaded.model));
        }
    }
    br_engine_close(engine);
    return n_differ;
}

START_TEST(a_broken_cache_is_noticed) {
    const rig_model *m = &model[_i];
    request_set *set = rig_alloc(1, sizeof *set);
    fill_set(m, 11, set);
    ck_assert_int_gt(differs_when_broken(m, set, 0), 0);
    ck_assert_int_gt(differs_when_broken(m, set, 1), 0);
    free(set);
}
END_TEST

Suite *test_schedules_suite(void) {
    Suite *suite = suite_create("schedules");
    TCase *tcase = tcase_create("random");
    tcase_set_timeout(tcase, test_is_long() ? 7200 : 900);
    tcase_add_unchecked_fixture(tcase, make_models, NULL);
    tcase_add_loop_test(tcase, a_broken_cache_is_noticed, 0, ARCHS);
    tcase_add_loop_test(tcase, random_schedules, 0, ARCHS);
    suite_add_tcase(suite, tcase);
    return suite;
}
