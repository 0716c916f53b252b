/* Requests that are scored instead of sampled: in any batch, chunk, order and cache their log-probs are the bytes of the rollout and of
 * the scorer. */
#include "engine_parts.h"
#include "swap_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 14 };

static rig_request request[N];
static rig_text sampled[N]; /* the rollout's */

static void make(void) {
    swap_models_make();
    br_engine_options options = rig_options(&swap_of.pico);
    rig_requests(&swap_of.pico, 5, N, 3, 90, 40, request);
    rig_generate(&options, request, NULL, N, sampled);
}

/* The text of a request, scored from a position on. */
static br_request scored_request(const rig_request *r, const rig_text *text, int32_t from) {
    br_request out = rig_br_request(r);
    out.prompt = text->token;
    out.n_prompt = text->n_tok;
    out.score_from = from;
    out.sampling.max_new = out.sampling.top_k = -7; /* of sampling nothing but the temperature counts */
    return out;
}

/* What was scored of one request; `next` is the position whose token has to come. */
typedef struct scoring {
    uint64_t id;
    int32_t next, ended;
    br_stop_reason stop;
    uint32_t logprob[RIG_TOK_MAX], raw[RIG_TOK_MAX], entropy[RIG_TOK_MAX];
} scoring;

static void take(scoring *s, const rig_text *text, const br_token *t) {
    ck_assert_int_eq(t->position, s->next);
    s->ended = t->last;
    s->stop = t->stop;
    if (t->token < 0)
        return;
    ck_assert_int_eq(t->token, text->token[t->position]);
    ck_assert_uint_eq(t->logprob_kept, BR_UNSCORED);
    s->logprob[s->next] = t->logprob;
    s->raw[s->next] = t->logprob_raw;
    s->entropy[s->next++] = t->entropy;
}

static void start(br_engine *e, const br_request *r, scoring *s) {
    s->next = r->score_from;
    s->ended = 0;
    CHECK_OK(br_submit(e, r, &s->id));
}

static void finish_one(br_engine *e, const rig_text *text, scoring *s) {
    br_token token[7];
    for (int32_t n, done = 0; !s->ended && !done;) {
        CHECK_OK(br_poll(e, token, 7, &n, &done));
        for (int32_t k = 0; k < n; k++)
            if (token[k].request == s->id)
                take(s, text, &token[k]);
    }
    ck_assert_int_eq(s->ended, 1);
}

static void expect_bits(const rig_text *want, int32_t from, const scoring *got, const char *what) {
    ck_assert_msg(got->next == want->n_tok && got->stop == BR_STOP_LENGTH, "%s: ended at %d of %d tokens, stop %d", what, got->next, want->n_tok,
                  got->stop);
    for (int32_t t = from; t < want->n_tok; t++)
        if (got->logprob[t] != want->logprob[0][t] || got->raw[t] != want->logprob[1][t])
            ck_abort_msg("%s: position %d: scored %08x and %08x, wanted %08x and %08x", what, t, got->logprob[t], got->raw[t], want->logprob[0][t],
                         want->logprob[1][t]);
}

/* ---- beside requests that are sampled -------------------------------------------------------------------------------------- */

static const struct {
    int32_t max_seqs, chunk_tokens, state_every, preempt_every, no_prefix_cache;
} schedule[] = {{1, 7, 0, 0, 0}, {3, 16, -1, 0, 0}, {3, 16, 64, 3, 0}, {7, 40, 64, 0, 1}, {60, 256, 64, 0, 0}, {60, 90, 0, 5, 0}};

/* Requests k < N are sampled, N + i scores the text of i; both kinds arrive mixed. */
START_TEST(the_rollout_s_bits_in_any_batch) {
    br_engine *e;
    br_token token[64];
    int order[2 * N], n_ended = 0, next = 0;
    uint64_t id[2 * N] = {0};
    rig_text *got = rig_alloc(N, sizeof *got);
    scoring *score = rig_alloc(N, sizeof *score);
    br_engine_options options = rig_options(&swap_of.pico);
    options.max_seqs = schedule[_i].max_seqs;
    options.chunk_tokens = schedule[_i].chunk_tokens;
    options.state_every = schedule[_i].state_every;
    options.preempt_every = schedule[_i].preempt_every;
    options.no_prefix_cache = schedule[_i].no_prefix_cache;
    CHECK_OK(br_engine_open(&options, &e));
    for (int i = 0; i < 2 * N; i++) {
        const int j = (int)(test_mix((uint64_t)(i + 100 * _i)) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    while (n_ended < 2 * N) {
        for (; next < 2 * N; next++) {
            const int i = order[next] % N, is_scored = order[next] >= N;
            const br_request r = is_scored ? scored_request(&request[i], &sampled[i], request[i].n_prompt) : rig_br_request(&request[i]);
            const br_status status = br_submit(e, &r, &id[order[next]]);
            if (status == BR_E_LIMIT)
                break;
            CHECK_OK(status);
            score[i].next = is_scored ? r.score_from : score[i].next;
            if (!is_scored)
                got[i] = sampled[i];
        }
        int32_t n, done;
        CHECK_OK(br_poll(e, token, 64, &n, &done));
        for (int32_t k = 0; k < n; k++) {
            int i = 0;
            while (id[i] != token[k].request)
                i++;
            n_ended += token[k].last;
            if (i >= N)
                take(&score[i - N], &sampled[i - N], &token[k]);
            else if (token[k].token != sampled[i].token[token[k].position] || token[k].logprob != sampled[i].logprob[0][token[k].position])
                ck_abort_msg("schedule %d: request %d is sampled differently at %d beside scored ones", _i, i, token[k].position);
        }
        CHECK_OK(sched_check(e->sched));
    }
    for (int i = 0; i < N; i++)
        expect_bits(&sampled[i], request[i].n_prompt, &score[i], request[i].uid);
    br_engine_close(e);
    free(got);
    free(score);
}
END_TEST

/* ---- alone: every position, every chunk, from the cache --------------------------------------------------------------------- */

START_TEST(the_scorer_s_bits_from_any_position) {
    static const int32_t CHUNK[] = {1, 5, 64, 300}, ADAPTER[] = {-1, 0, 1};
    rig_text *text = rig_alloc(1, sizeof *text), *want = rig_alloc(1, sizeof *want);
    scoring *s = rig_alloc(1, sizeof *s);
    rig_request r = request[0];
    *text = (rig_text){.n_tok = 150};
    for (int32_t t = 0; t < text->n_tok; t++)
        text->token[t] = (int32_t)(test_mix((uint64_t)t) % (uint64_t)swap_of.pico.n_vocab);
    for (int k = 0; k < 12; k++) {
        br_engine *e;
        br_engine_options options = rig_options(&swap_of.pico);
        options.chunk_tokens = options.max_seqs = CHUNK[k % 4];
        options.state_every = 64;
        r.adapter = ADAPTER[k / 4];
        r.temperature = k % 2 ? 0.5f : 1;
        rig_score(&swap_of.pico, 256, 1, &r, text, 1, want);
        CHECK_OK(br_engine_open(&options, &e));
        static const int32_t FROM[] = {1, 100, 65, 64, 66, 149, 100, 1, 129};
        for (size_t i = 0; i < sizeof FROM / sizeof FROM[0]; i++) {
            const br_request one = scored_request(&r, text, FROM[i]);
            const int64_t hit = sched_stats_of(e->sched).n_hit_tok;
            start(e, &one, s);
            finish_one(e, text, s);
            expect_bits(want, FROM[i], s, "alone");
            if (i == 6) /* the second from there: what lies in front of it is found, and no row that is asked for */
                ck_assert_int_eq(sched_stats_of(e->sched).n_hit_tok - hit, 99);
            if (FROM[i] == 1)
                ck_assert_int_eq(sched_stats_of(e->sched).n_hit_tok, hit);
        }
        br_engine_close(e);
    }
    free(text);
    free(want);
    free(s);
}
END_TEST

/* A prompt's own rollout leaves the state that its scoring begins with, and the other way round. */
START_TEST(a_prompt_s_cache_serves_both) {
    br_engine *e;
    scoring *s = rig_alloc(1, sizeof *s);
    const br_engine_options options = rig_options(&swap_of.pico);
    int i = 0;
    while (request[i].n_prompt < 20)
        i++;
    for (int scored_first = 0; scored_first < 2; scored_first++) {
        CHECK_OK(br_engine_open(&options, &e));
        for (int turn = 0; turn < 2; turn++) {
            const int is_scored = turn != scored_first;
            const br_request r = is_scored ? scored_request(&request[i], &sampled[i], request[i].n_prompt) : rig_br_request(&request[i]);
            s->ended = 0;
            s->next = request[i].n_prompt;
            CHECK_OK(br_submit(e, &r, &s->id));
            br_token token[32];
            for (int32_t n, done = 0; !done;) {
                CHECK_OK(br_poll(e, token, 32, &n, &done));
                for (int32_t k = 0; k < n; k++)
                    ck_assert_uint_eq(token[k].logprob, sampled[i].logprob[0][token[k].position]);
            }
            ck_assert_int_eq(sched_stats_of(e->sched).n_hit_tok, turn ? request[i].n_prompt - 1 : 0);
        }
        br_engine_close(e);
    }
    free(s);
}
END_TEST

START_TEST(entropy_is_the_rollout_s) {
    br_engine *e;
    br_token token[64];
    uint32_t entropy[RIG_TOK_MAX] = {0};
    scoring *s = rig_alloc(1, sizeof *s);
    const br_engine_options options = rig_options(&swap_of.pico);
    br_request r = rig_br_request(&request[0]);
    uint64_t id;
    r.sampling.entropy = 1;
    CHECK_OK(br_engine_open(&options, &e));
    CHECK_OK(br_submit(e, &r, &id));
    for (int32_t n, done = 0; !done;) {
        CHECK_OK(br_poll(e, token, 64, &n, &done));
        for (int32_t k = 0; k < n; k++)
            entropy[token[k].position] = token[k].entropy;
    }
    r = scored_request(&request[0], &sampled[0], request[0].n_prompt);
    for (int want = 0; want < 2; want++) {
        r.sampling.entropy = want;
        start(e, &r, s);
        finish_one(e, &sampled[0], s);
        for (int32_t t = request[0].n_prompt; t < sampled[0].n_tok; t++)
            ck_assert_uint_eq(s->entropy[t], want ? entropy[t] : BR_UNSCORED);
    }
    br_engine_close(e);
    free(s);
}
END_TEST

/* ---- ends ------------------------------------------------------------------------------------------------------------------- */

/* The longest text, whose first tokens are handed out and whose last ones never are. */
static br_request long_request(rig_text *text) {
    br_request r = rig_br_request(&request[0]);
    text->n_tok = 400;
    for (int32_t t = 0; t < text->n_tok; t++)
        text->token[t] = t % swap_of.pico.n_vocab;
    r.prompt = text->token;
    r.n_prompt = text->n_tok;
    r.score_from = 2;
    r.adapter = "a";
    return r;
}

START_TEST(an_abort_in_the_middle) {
    br_engine *e;
    br_token token[64];
    int32_t n = 0, done = 0;
    rig_text *text = rig_alloc(1, sizeof *text);
    scoring *cut = rig_alloc(1, sizeof *cut), *other = rig_alloc(1, sizeof *other);
    const char *sentence;
    br_engine_options options = rig_options(&swap_of.pico);
    const br_request r = long_request(text), beside = scored_request(&request[1], &sampled[1], request[1].n_prompt);
    options.chunk_tokens = options.max_seqs = 16;
    CHECK_OK(br_engine_open(&options, &e));
    start(e, &r, cut);
    while (cut->next < 20) {
        CHECK_OK(br_poll(e, token, 64, &n, &done));
        for (int32_t k = 0; k < n; k++)
            take(cut, text, &token[k]);
    }
    start(e, &beside, other);
    const int32_t at = cut->next;
    CHECK_OK(br_abort(e, cut->id));
    CHECK_FAILS(br_abort(e, cut->id), BR_E_NOT_FOUND);
    CHECK_OK(br_poll(e, token, 1, &n, &done));
    take(cut, text, &token[0]);
    ck_assert(n == 1 && cut->ended && cut->stop == BR_STOP_ABORT && cut->next == at);
    ck_assert_int_eq(br_request_error(e, cut->id, &sentence), BR_E_ABORTED);
    finish_one(e, &sampled[1], other);
    expect_bits(&sampled[1], request[1].n_prompt, other, "beside an abort");
    CHECK_OK(sched_check(e->sched));
    ck_assert_int_eq(sched_n_left(e->sched), 0);
    br_engine_close(e);
    free(text);
    free(cut);
    free(other);
}
END_TEST

START_TEST(what_is_refused_and_what_fits) {
    br_engine *e;
    uint64_t id;
    rig_text *text = rig_alloc(1, sizeof *text);
    scoring *s = rig_alloc(1, sizeof *s);
    br_engine_options options = rig_options(&swap_of.pico);
    br_request r = long_request(text);
    options.kv_pages = 2;
    options.max_seqs = 2;
    CHECK_OK(br_engine_open(&options, &e));
    r.n_prompt = text->n_tok = 128;
    static const int32_t FROM[] = {-1, INT32_MIN, 128, 129, INT32_MAX};
    for (size_t i = 0; i < sizeof FROM / sizeof FROM[0]; i++) {
        r.score_from = FROM[i];
        CHECK_FAILS(br_submit(e, &r, &id), BR_E_ARG);
        ck_assert_msg(strstr(br_last_error(), "expected 1 to 127") != NULL, "%s", br_last_error());
    }
    r.score_from = 127;
    r.sampling.temperature = -1;
    CHECK_FAILS(br_submit(e, &r, &id), BR_E_ARG);
    r.sampling.temperature = 1;
    r.sampling.entropy = 2;
    CHECK_FAILS(br_submit(e, &r, &id), BR_E_ARG);
    r.sampling.entropy = 0;
    r.adapter = "none";
    CHECK_FAILS(br_submit(e, &r, &id), BR_E_NOT_FOUND);
    r.adapter = NULL;
    r.n_prompt = 129;
    CHECK_FAILS(br_submit(e, &r, &id), BR_E_CAPACITY);
    r.n_prompt = 128; /* no room for a new token is needed */
    start(e, &r, s);
    finish_one(e, text, s);
    ck_assert(s->next == 128 && s->stop == BR_STOP_LENGTH);
    r.score_from = 0;
    CHECK_FAILS(br_submit(e, &r, &id), BR_E_CAPACITY);
    br_engine_close(e);
    free(text);
    free(s);
}
END_TEST

/* ---- beside a new version of the adapter ------------------------------------------------------------------------------------- */

START_TEST(a_swap_treats_it_as_the_others) {
    br_token token[64];
    br_versions versions;
    int32_t n, done;
    rig_text *text = rig_alloc(1, sizeof *text);
    scoring *s = rig_alloc(1, sizeof *s);
    const br_request r = long_request(text);
    br_engine *e = swap_engine_of_steps(swap_of.dir[0], 16);
    static const br_swap_mode MODE[] = {BR_SWAP_DRAIN, BR_SWAP_STOP, BR_SWAP_FINISH_OLD, BR_SWAP_IN_FLIGHT};
    for (int k = 0; k < 4; k++) {
        const br_swap_answer wanted = MODE[k] == BR_SWAP_DRAIN ? BR_SWAP_WAITS : BR_SWAP_COMMITTED;
        start(e, &r, s);
        while (s->next < 40) {
            CHECK_OK(br_poll(e, token, 64, &n, &done));
            for (int32_t i = 0; i < n; i++)
                take(s, text, &token[i]);
        }
        const int32_t at = s->next;
        swap_prepare(e, k + 1, k + 1);
        swap_commit(e, k + 1, MODE[k], wanted);
        CHECK_OK(br_request_versions(e, s->id, &versions));
        finish_one(e, text, s);
        const int stops = MODE[k] == BR_SWAP_STOP, switches = MODE[k] == BR_SWAP_IN_FLIGHT;
        ck_assert_int_eq(s->stop, stops ? BR_STOP_ABORT : BR_STOP_LENGTH);
        ck_assert_int_eq(s->next, stops ? at : text->n_tok);
        ck_assert(versions.certified == !switches && versions.n_run == 1 + switches && versions.run[0].version == k &&
                  versions.run[0].n_tok == at - r.score_from);
        CHECK_OK(br_poll(e, token, 64, &n, &done));
        swap_commit(e, k + 1, BR_SWAP_DRAIN, BR_SWAP_COMMITTED);
    }
    br_engine_close(e);
    free(text);
    free(s);
}
END_TEST

Suite *test_scored_suite(void) {
    Suite *s = suite_create("scored");
    TCase *t = tcase_create("scored");
    tcase_add_unchecked_fixture(t, make, NULL);
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, the_rollout_s_bits_in_any_batch, 0, sizeof schedule / sizeof schedule[0]);
    tcase_add_test(t, the_scorer_s_bits_from_any_position);
    tcase_add_test(t, a_prompt_s_cache_serves_both);
    tcase_add_test(t, entropy_is_the_rollout_s);
    tcase_add_test(t, an_abort_in_the_middle);
    tcase_add_test(t, what_is_refused_and_what_fits);
    tcase_add_test(t, a_swap_treats_it_as_the_others);
    suite_add_tcase(s, t);
    return s;
}
