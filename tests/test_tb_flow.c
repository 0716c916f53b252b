/* Requests through the worker's state machine: what a commit does to running sequences, streaming, certificates, pauses, credit. */
#include "tb_drive.h"

#include <string.h>

/* ---- what running sequences see of a commit ------------------------------------------------------------------------------ */

static void start_running(tb_pause_mode mode) {
    reach(TB_PREPARED);
    give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = mode}});
    give(TB_RESUME, 0, 0, NULL); /* the mode stays for the commit */
    give_request(1, "one", 12, 0, 1);
    CHECK_OK(tb_session_pump(worker.session, now));
    CHECK_OK(tb_session_pump(worker.session, now));
    ck_assert_uint_eq(state().n_running, 1);
    forget();
    give(TB_W_COMMIT, NEXT, 0, NULL);
}

START_TEST(test_commit_modes) {
    for (int mode = 0; mode < TB_PAUSE_MODE_COUNT; mode++) {
        start_running((tb_pause_mode)mode);
        const int at_once = mode == TB_FINISH_OLD || mode == TB_IN_FLIGHT;
        ck_assert_int_eq(first_of(TB_W_COMMITTED) != NULL, at_once);
        give_request(2, "two", 3, 0, 1); /* waits while the commit does */
        ck_assert_uint_eq(state().n_running, at_once ? 2 : 1);
        settle();
        ck_assert_ptr_nonnull(first_of(TB_W_COMMITTED));
        ck_assert_int_eq(worker.weights.mode, mode);
        const tb_gen_done *one = NULL, *two = NULL;
        for (int i = 0; i < n_heard; i++) {
            if (heard[i].header.type == TB_GEN_DONE && heard[i].header.subject == 1)
                one = &heard[i].message.gen_done;
            if (heard[i].header.type == TB_GEN_DONE && heard[i].header.subject == 2)
                two = &heard[i].message.gen_done;
        }
        ck_assert_ptr_nonnull(one);
        ck_assert_ptr_nonnull(two);
        ck_assert_uint_eq(one->stop, mode == TB_STOP ? BR_STOP_ABORT : BR_STOP_LENGTH);
        ck_assert_uint_eq(one->n_tok, mode == TB_STOP ? 2 : 12);
        ck_assert_uint_eq(one->version_begin, LIVE);
        ck_assert_uint_eq(one->version_end, mode == TB_IN_FLIGHT ? NEXT : LIVE);
        ck_assert_uint_eq(one->certified, mode != TB_IN_FLIGHT);
        ck_assert_uint_eq(one->runs.n, mode == TB_IN_FLIGHT ? 6 : 3);
        if (mode == TB_IN_FLIGHT) {
            const uint32_t runs[6] = {LIVE, 0, 2, NEXT, 0, 10};
            ck_assert_mem_eq(one->runs.p, runs, sizeof runs);
        }
        ck_assert_uint_eq(two->version_begin, NEXT);
        ck_assert_uint_eq(two->certified, 1);
        close_session();
    }
}
END_TEST

/* Switched before its first token: the prompt was read under the old version, so that nothing certifies the response. */
START_TEST(test_switch_before_the_first_token) {
    reach(TB_PREPARED);
    give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_IN_FLIGHT}});
    give(TB_RESUME, 0, 0, NULL);
    give_request(1, "one", 3, 0, 1);
    forget();
    give(TB_W_COMMIT, NEXT, 0, NULL);
    settle();
    const tb_gen_done *done = &first_of(TB_GEN_DONE)->message.gen_done;
    ck_assert_uint_eq(done->version_begin, NEXT);
    ck_assert_uint_eq(done->runs.n, 3);
    ck_assert_uint_eq(done->certified, 0);
    close_session();
}
END_TEST

/* Tokens that the engine has sampled but not handed out at the commit are of the old version, in GEN_DONE and in the parts' headers. */
START_TEST(test_queued_tokens_keep_their_version) {
    for (int switched = 0; switched < 2; switched++) {
        uint32_t n_old = 0;
        reach(TB_PREPARED);
        give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_IN_FLIGHT}});
        give(TB_RESUME, 0, 0, NULL);
        give_request(1, "one", 12, 0, 1);
        CHECK_OK(tb_session_pump(worker.session, now));
        CHECK_OK(tb_session_pump(worker.session, now));
        worker.engine.versions = (br_versions){.run = {{LIVE, 5}, {NEXT, 0}}, .n_run = 1 + switched, .certified = !switched};
        forget();
        give(TB_W_COMMIT, NEXT, 0, NULL);
        settle();
        const tb_gen_done *done = &first_of(TB_GEN_DONE)->message.gen_done;
        const uint32_t runs[6] = {LIVE, 0, switched ? 5 : 12, NEXT, 0, 7};
        ck_assert_uint_eq(done->certified, !switched);
        ck_assert_uint_eq(done->runs.n, switched ? 6 : 3);
        ck_assert_mem_eq(done->runs.p, runs, 4 * done->runs.n);
        for (int i = 0; i < n_heard; i++) {
            const tb_gen_part *part = &heard[i].message.gen_part;
            if (heard[i].header.type != TB_GEN_PART)
                continue;
            ck_assert_uint_eq(heard[i].header.version, part->first < runs[2] ? LIVE : NEXT);
            n_old += heard[i].header.version == LIVE ? part->token.n : 0;
        }
        ck_assert_uint_eq(n_old, runs[2]);
        close_session();
    }
}
END_TEST

/* ---- generation ---------------------------------------------------------------------------------------------------------- */

/* The parts of a request in order, checked against the made-up engine; returns how many tokens. */
static uint32_t check_parts(uint64_t id, const char *uid, int held) {
    uint32_t n = 0;
    for (int i = 0; i < n_heard; i++) {
        const tb_gen_part *part = &heard[i].message.gen_part;
        uint32_t bits[64];
        if (heard[i].header.type != TB_GEN_PART || heard[i].header.subject != id)
            continue;
        ck_assert_uint_eq(part->first, n);
        ck_assert_uint_eq(part->logprob.n, held ? 0 : part->token.n);
        for (uint32_t t = 0; t < part->token.n; t++) {
            bits[t] = fake_logprob(fake_uid(uid), n + t);
            ck_assert_uint_eq(part->token.p[t], fake_token(fake_uid(uid), n + t));
            if (!held)
                ck_assert_uint_eq(part->logprob.p[t], bits[t]);
        }
        ck_assert(br_digest_equal(part->digest, br_hash_bytes(bits, 4 * (size_t)part->token.n)));
        n += part->token.n;
    }
    return n;
}

static br_digest digest_of(const char *uid, uint32_t n) {
    uint32_t bits[64];
    for (uint32_t t = 0; t < n; t++)
        bits[t] = fake_logprob(fake_uid(uid), t);
    return br_hash_bytes(bits, 4 * (size_t)n);
}

START_TEST(test_tokens_stream) {
    reach(TB_IDLE);
    give_request(1, "one", 11, 0, 1);
    give_request(2, "two", 3, 0, 1);
    settle();
    ck_assert_uint_eq(check_parts(1, "one", 0), 11);
    ck_assert_uint_eq(check_parts(2, "two", 0), 3);
    const answer *done = first_of(TB_GEN_DONE);
    ck_assert_uint_eq(done->header.subject, 2);
    ck_assert(br_digest_equal(done->message.gen_done.digest, digest_of("two", 3)));
    ck_assert_uint_eq(first_of(TB_GEN_PART)->message.gen_part.token.n, 3); /* the second ended with its third */
    ck_assert_uint_eq(heard[2].header.subject, 1);
    ck_assert_uint_eq(heard[2].message.gen_part.token.n, 4); /* part_tok */
    ck_assert_uint_eq(state().n_tok, 14);
    ck_assert_int_eq(channel()->peer_requests, 8); /* both credits are back */
    close_session();
}
END_TEST

/* Fewer than a part's tokens are sent when they are old. */
START_TEST(test_old_tokens_are_sent) {
    reach(TB_IDLE);
    give_request(1, "one", 40, 0, 1);
    CHECK_OK(tb_session_pump(worker.session, now));
    listen_to();
    ck_assert_int_eq(n_heard, 0);
    now += 50;
    tb_session_tick(worker.session, now, now);
    listen_to();
    ck_assert_int_eq(n_heard, 1);
    ck_assert_uint_eq(check_parts(1, "one", 0), 1);
    close_session();
}
END_TEST

START_TEST(test_certificate_comes_first) {
    for (int honest = 0; honest < 2; honest++) {
        reach(TB_IDLE);
        give_request(1, "one", 9, TB_CERTIFY, 1);
        settle();
        ck_assert_uint_eq(check_parts(1, "one", 1), 9);
        ck_assert_ptr_nonnull(first_of(TB_GEN_DONE));
        ck_assert_ptr_null(first_of(TB_GEN_HELD));
        ck_assert_uint_eq(state().n_unreleased, 1);
        ck_assert_int_eq(channel()->peer_requests, 7); /* it holds its credit */
        br_digest certificate = digest_of("one", 9);
        certificate.lo ^= (uint64_t)!honest;
        say(TB_GEN_RELEASE, 0, 1, &(tb_message){.gen_release = {certificate}});
        ck_assert_int_eq(heard[0].header.type, TB_GEN_HELD);
        const tb_gen_held *held = &heard[0].message.gen_held;
        ck_assert_uint_eq(held->equal, honest);
        ck_assert_uint_eq(held->n_tok, 9);
        ck_assert_uint_eq(held->logprob.n, 9);
        for (uint32_t t = 0; t < 9; t++)
            ck_assert_uint_eq(held->logprob.p[t], fake_logprob(fake_uid("one"), t));
        ck_assert_uint_eq(state().n_unreleased, 0);
        ck_assert_int_eq(channel()->peer_requests, 8);
        close_session();
    }
    reach(TB_IDLE); /* who discards in place of certifying gets no bits */
    give_request(1, "one", 9, TB_CERTIFY, 1);
    settle();
    say(TB_GEN_DISCARD, 0, 1, NULL);
    ck_assert_int_eq(n_heard, 0);
    ck_assert_uint_eq(state().n_unreleased, 0);
    ck_assert_int_eq(channel()->peer_requests, 8);
    close_session();
    reach(TB_IDLE); /* a certificate of half a response certifies nothing */
    give_request(1, "hold", 9, TB_CERTIFY, 1);
    say(TB_GEN_RELEASE, 0, 1, &(tb_message){.gen_release = {{1, 1}}});
    ck_assert_uint_eq(heard[0].message.error.code, TB_BAD_STATE);
    ck_assert_int_eq(channel()->phase, TB_CLOSED);
    close_session();
}
END_TEST

START_TEST(test_abort_returns_what_there_is) {
    reach(TB_IDLE);
    give_request(1, "one", 40, 0, 1);
    for (int i = 0; i < 6; i++)
        CHECK_OK(tb_session_pump(worker.session, now));
    give(TB_GEN_ABORT, 0, 1, NULL);
    settle();
    ck_assert_uint_eq(check_parts(1, "one", 0), 6);
    ck_assert_uint_eq(first_of(TB_GEN_DONE)->message.gen_done.stop, BR_STOP_ABORT);
    forget();
    give(TB_GEN_ABORT, 0, 1, NULL); /* too late */
    settle();
    ck_assert_int_eq(n_heard, 0);
    close_session();
}
END_TEST

START_TEST(test_refused_request_ends_with_its_reason) {
    reach(TB_IDLE);
    give_request(1, "one", 4, 0, 666);
    const tb_gen_done *done = &first_of(TB_GEN_DONE)->message.gen_done;
    ck_assert_uint_eq(done->stop, BR_STOP_ERROR);
    ck_assert_uint_eq(done->status, BR_E_ARG);
    ck_assert_msg(tb_text_equal(done->text, tb_text_of("token 666 is out of range")), "%.*s", (int)done->text.n, done->text.p);
    worker.engine.full = 1; /* it waits, and the engine is polled although it holds nothing: what has ended makes room then */
    forget();
    give_request(2, "two", 4, 0, 1);
    settle();
    ck_assert_uint_eq(check_parts(2, "two", 0), 4);
    give_request(3, "hold", 4, 0, 1);
    forget();
    give_request(3, "again", 4, 0, 1);
    ck_assert_uint_eq(heard[0].message.error.code, TB_BAD_STATE);
    close_session();
    const uint32_t token[1] = {7};
    reach(TB_IDLE);
    give_request(3, "hold", 4, 0, 1);
    forget();
    give(TB_SCORE_REQ, 0, 3, &(tb_message){.score_req = {.token = {token, 1}}});
    ck_assert_uint_eq(heard[0].message.error.code, TB_BAD_STATE);
    close_session();
}
END_TEST

/* Waiting requests run in the order in which they came, whatever places are free. */
START_TEST(test_order_of_arrival) {
    reach(TB_IDLE);
    give_request(1, "one", 1, 0, 1); /* its place is free again before the others' */
    give_request(2, "hold", 1, 0, 1);
    say(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_FINISH_OLD}});
    give_request(3, "three", 1, 0, 1);
    CHECK_OK(tb_session_pump(worker.session, now));
    give_request(4, "four", 1, 0, 1); /* in the place of 1 */
    give(TB_RESUME, 0, 0, NULL);
    for (int i = 0; i < FAKE_REQUESTS; i++)
        if (worker.engine.request[i].used && !worker.engine.request[i].hold)
            ck_assert_uint_eq(worker.engine.request[i].uid, fake_uid(worker.engine.request[i].id == 3 ? "three" : "four"));
    close_session();
}
END_TEST

START_TEST(test_broken_engine_is_said) {
    reach(TB_IDLE);
    give_request(1, "one", 4, 0, 1);
    worker.engine.broken = 1;
    forget();
    CHECK_FAILS(tb_session_pump(worker.session, now), BR_E_DEVICE);
    listen_to();
    ck_assert_uint_eq(heard[0].message.error.code, TB_FAILED);
    ck_assert_int_eq(tb_worker_exit_code(channel()->end, BR_E_DEVICE), 6);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    close_session();
    reach(TB_RECEIVING); /* and what was staged is dropped, as after every event */
    give_request(1, "one", 4, 0, 1);
    worker.engine.broken = 1;
    CHECK_FAILS(tb_session_pump(worker.session, now), BR_E_DEVICE);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    ck_assert_int_eq(worker.weights.n_abort, 1);
    close_session();
}
END_TEST

/* A commit that fails after the version went live is no refusal: the engine runs what nobody checked, and can only be closed. */
START_TEST(test_commit_that_fails_too_late) {
    static const br_status late[] = {BR_E_DEVICE, BR_E_LIMIT};
    for (size_t i = 0; i < sizeof late / sizeof *late; i++) {
        reach(TB_PREPARED);
        worker.weights.late = late[i];
        say(TB_W_COMMIT, NEXT, 0, NULL);
        ck_assert_int_eq(n_heard, 1);
        ck_assert_int_eq(heard[0].header.type, TB_ERROR);
        ck_assert_uint_eq(heard[0].message.error.code, TB_FAILED);
        ck_assert_int_eq(worker.weights.n_commit, 1);
        ck_assert_uint_eq(state().live_version, NEXT);
        ck_assert_int_eq(tb_session_wants_pump(worker.session), 1);
        CHECK_FAILS(tb_session_pump(worker.session, now), late[i]);
        ck_assert_msg(strstr(br_last_error(), "cannot be read") != NULL, "%s", br_last_error());
        close_session();
    }
}
END_TEST

START_TEST(test_pauses) {
    reach(TB_IDLE);
    give_request(1, "one", 6, 0, 1);
    say(TB_SLEEP, 0, 0, NULL);
    ck_assert_uint_eq(heard[0].message.error.code, TB_BUSY);
    ck_assert_int_eq(worker.engine.asleep, 0);
    say(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_DRAIN}});
    give_request(2, "two", 3, 0, 1);
    ck_assert_int_eq(n_heard, 0); /* not yet: one runs */
    settle();
    ck_assert_uint_eq(check_parts(1, "one", 0), 6);
    ck_assert_uint_eq(first_of(TB_STATS)->message.stats.n_running, 0);
    ck_assert_uint_eq(first_of(TB_STATS)->message.stats.paused, 1);
    ck_assert_uint_eq(state().n_held, 1);
    say(TB_SLEEP, 0, 0, NULL);
    ck_assert_int_eq(worker.engine.asleep, 1);
    say(TB_RESUME, 0, 0, NULL);
    settle();
    ck_assert_uint_eq(state().n_held, 1); /* asleep still */
    say(TB_WAKE, 0, 0, NULL);
    settle();
    ck_assert_uint_eq(check_parts(2, "two", 0), 3);
    give_request(3, "hold", 3, 0, 1);
    say(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_STOP}});
    settle();
    ck_assert_uint_eq(first_of(TB_GEN_DONE)->message.gen_done.stop, BR_STOP_ABORT);
    ck_assert_ptr_nonnull(first_of(TB_STATS));
    say(TB_SLEEP, 0, 0, NULL);
    ck_assert_int_eq(worker.engine.asleep, 1);
    tb_session_broken(worker.session, now, TB_LOST, "gone"); /* the next trainer finds it awake */
    ck_assert_int_eq(worker.engine.asleep, 0);
    ck_assert_uint_eq(state().asleep, 0);
    close_session();
}
END_TEST

/* ---- scores ---------------------------------------------------------------------------------------------------------------- */

static const tb_score_done *scored(uint64_t id) {
    for (int i = 0; i < n_heard; i++)
        if (heard[i].header.type == TB_SCORE_DONE && heard[i].header.subject == id)
            return &heard[i].message.score_done;
    return NULL;
}

static void expect_scored(uint64_t id, const char *adapter, uint32_t first, uint32_t n_tok) {
    const tb_score_done *done = scored(id);
    ck_assert_ptr_nonnull(done);
    ck_assert_uint_eq(done->status, BR_OK);
    ck_assert_uint_eq(done->logprob.n, n_tok);
    for (uint32_t t = 0; t < n_tok; t++)
        ck_assert_uint_eq(done->logprob.p[t], t < first ? BR_UNSCORED : fake_logprob(fake_uid(adapter), t));
}

START_TEST(test_scores) {
    reach(TB_IDLE);
    give_request(1, "one", 9, 0, 1);
    give_score(4, "policy", 3, 20);
    give_score(5, "", 0, 4);
    ck_assert_uint_eq(state().n_running, 3);
    ck_assert_int_eq(channel()->peer_requests, 5);
    settle();
    expect_scored(4, "policy", 3, 20);
    expect_scored(5, "", 1, 4);
    ck_assert_uint_eq(check_parts(1, "one", 0), 9);
    ck_assert_uint_eq(state().n_tok, 9); /* those that were sampled */
    ck_assert_uint_eq(state().n_done, 3);
    forget();
    give_score(6, "policy", 4, 4); /* the engine refuses it */
    ck_assert_uint_eq(scored(6)->status, BR_E_ARG);
    ck_assert_uint_eq(scored(6)->logprob.n, 0);
    ck_assert(tb_text_equal(scored(6)->text, tb_text_of("nothing is asked for")));
    worker.engine.full = 1; /* it waits */
    forget();
    give_score(7, "policy", 1, 4);
    ck_assert_int_eq(n_heard, 0);
    settle();
    expect_scored(7, "policy", 1, 4);
    worker.engine_ops.score = NULL;
    forget();
    give_score(8, "policy", 1, 3);
    ck_assert_uint_eq(scored(8)->status, BR_E_UNSUPPORTED);
    ck_assert_int_eq(channel()->peer_requests, 8);
    close_session();
}
END_TEST

START_TEST(test_scores_wait_and_end_as_others) {
    reach(TB_IDLE);
    say(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_DRAIN}});
    give_score(1, "policy", 1, 4);
    ck_assert_uint_eq(state().n_held, 1);
    say(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_STOP}}); /* ends what waits */
    ck_assert_uint_eq(scored(1)->status, BR_E_ABORTED);
    say(TB_RESUME, 0, 0, NULL);
    give_score(2, "hold", 1, 4);
    forget();
    give(TB_GEN_ABORT, 0, 2, NULL);
    settle();
    ck_assert_uint_eq(scored(2)->status, BR_E_ABORTED);
    ck_assert_uint_eq(scored(2)->logprob.n, 0);
    ck_assert_int_eq(channel()->peer_requests, 8);
    give_score(3, "hold", 1, 4);
    tb_session_broken(worker.session, now, TB_LOST, "gone"); /* nothing of it is left for the next trainer */
    settle();
    ck_assert_uint_eq(state().n_running, 0);
    tb_session_connect(worker.session, now);
    sequence = 0;
    greet();
    ck_assert_int_eq(channel()->peer_requests, 8);
    ck_assert_int_eq(n_heard, 1);
    close_session();
}
END_TEST

/* Log-probs of two versions are no answer; a score of the base is not touched by a new adapter. */
START_TEST(test_scores_of_one_version) {
    for (int base = 0; base < 2; base++) {
        reach(TB_PREPARED);
        give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = TB_IN_FLIGHT}});
        give(TB_RESUME, 0, 0, NULL);
        give_score(1, base ? "base" : "policy", 1, 12);
        CHECK_OK(tb_session_pump(worker.session, now));
        forget();
        give(TB_W_COMMIT, NEXT, 0, NULL);
        ck_assert_ptr_nonnull(first_of(TB_W_COMMITTED));
        settle();
        if (base)
            expect_scored(1, "base", 1, 12);
        else
            ck_assert_uint_eq(scored(1)->status, BR_E_ABORTED);
        close_session();
    }
}
END_TEST

/* What a certificate is about cannot be had by a score. */
START_TEST(test_scores_feed_no_certificate) {
    static const uint32_t phase_flags[] = {TB_CERTIFY, 0};
    for (int k = 0; k < 2; k++) {
        const int certifies = phase_flags[k] != 0;
        reach(TB_IDLE);
        give_request(1, "one", 9, phase_flags[k], 1);
        give_score(2, "policy", 1, 4); /* while it runs */
        settle();
        give_score(3, "policy", 1, 4); /* while it is not released */
        give_score(4, "", 1, 4);
        give_score(5, "other", 1, 4);
        settle();
        for (uint64_t id = 2; id <= 5; id++)
            ck_assert_uint_eq(scored(id)->status, certifies && id <= 3 ? BR_E_LIMIT : BR_OK);
        if (certifies)
            give(TB_GEN_RELEASE, 0, 1, &(tb_message){.gen_release = {digest_of("one", 9)}});
        give_score(6, "policy", 1, 4);
        settle();
        expect_scored(6, "policy", 1, 4);
        close_session();
    }
    reach(TB_IDLE);
    give_score(7, "hold", 1, 4);
    forget();
    give(TB_GEN_RELEASE, 0, 7, &(tb_message){.gen_release = {{1, 1}}});
    ck_assert_uint_eq(heard[0].message.error.code, TB_BAD_STATE);
    close_session();
}
END_TEST

/* ---- credit -------------------------------------------------------------------------------------------------------------- */

/* Without credit for results the engine is not asked, and nothing piles up; with it everything comes, once. */
START_TEST(test_slow_reader_stops_the_engine) {
    open_session(LIVE);
    say(TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)});
    give_request(1, "one", 40, 0, 1);
    settle();
    ck_assert_int_eq(worker.engine.n_poll, 0);
    ck_assert_int_eq(n_heard, 1); /* HELLO_ACK */
    credit(1);
    settle();
    const int n_poll = worker.engine.n_poll;
    ck_assert_int_ge(n_poll, 1);
    ck_assert_int_lt(n_poll, 8); /* one part took the balance below zero */
    settle();
    ck_assert_int_eq(worker.engine.n_poll, n_poll);
    credit(1 << 20);
    settle();
    ck_assert_uint_eq(check_parts(1, "one", 0), 40);
    close_session();
}
END_TEST

static br_status any_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    (void)context, (void)tensor, (void)offset, (void)bytes, (void)n;
    return BR_OK;
}

START_TEST(test_more_than_granted_is_refused) {
    static unsigned char big[RIG_GRANT_BYTES];
    reach(TB_RECEIVING);
    worker.weights_ops.ws_chunk = any_chunk;
    for (int i = 0; i < 50; i++) /* consumed chunks are granted again: this goes on for ever */
        give_chunk(NEXT, 0, 0, big, sizeof big / 2);
    ck_assert_int_eq(n_heard, 0);
    give(TB_W_END, NEXT, 0, &(tb_message){.w_digest = {{0, 0}}}); /* refused: its fake has no such tensors */
    channel()->peer_bytes = 0; /* as if nothing were consumed */
    forget();
    give_chunk(NEXT, 0, 0, big, 1);
    ck_assert_uint_eq(heard[0].message.error.code, TB_NO_CREDIT);
    ck_assert_int_eq(tb_worker_exit_code(channel()->end, BR_OK), 4);
    close_session();
    reach(TB_IDLE);
    for (uint64_t id = 0; id < 8; id++)
        give_request(id, "hold", 4, 0, 1);
    ck_assert_int_eq(n_heard, 0);
    give_request(8, "hold", 4, 0, 1);
    ck_assert_uint_eq(heard[0].message.error.code, TB_NO_CREDIT);
    close_session();
}
END_TEST

/* ---- tensors that do not travel ---------------------------------------------------------------------------------------------- */

static br_ipc seen_ipc;
static uint64_t seen_tensor;

static br_status keep_ipc(void *context, uint64_t tensor, const br_ipc *from) {
    (void)context;
    seen_tensor = tensor;
    seen_ipc = *from;
    return tensor == 9 ? br_fail(BR_E_NOT_FOUND, "nobody's") : BR_OK;
}

START_TEST(test_a_tensor_by_its_handle) {
    unsigned char handle[BR_IPC_HANDLE_BYTES];
    for (int i = 0; i < BR_IPC_HANDLE_BYTES; i++)
        handle[i] = (unsigned char)(i * 3);
    const tb_message m = {.w_ipc = {.offset = (1ull << 40) + 6, .handle = {handle, sizeof handle}}};
    reach(TB_RECEIVING);
    worker.weights_ops.ws_ipc = keep_ipc;
    say(TB_W_IPC, NEXT, 8, &m);
    ck_assert_int_eq(n_heard, 0);
    ck_assert(seen_tensor == 8 && seen_ipc.offset == (1ull << 40) + 6 && memcmp(seen_ipc.handle, handle, sizeof handle) == 0);
    ck_assert_uint_eq(state().weights, TB_RECEIVING);
    say(TB_W_IPC, NEXT, 9, &m);
    ck_assert(n_heard == 1 && heard[0].header.type == TB_W_NACK && heard[0].message.w_nack.code == TB_BAD_TENSOR);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    say(TB_W_CHUNK, NEXT, 1, &(tb_message){.w_chunk = {.offset = 0}}); /* still under way: dropped unanswered */
    ck_assert_int_eq(n_heard, 0);
    close_session();
}
END_TEST

Suite *test_tb_flow_suite(void) {
    Suite *s = suite_create("tb_flow");
    TCase *t = tcase_create("flow");
    tcase_add_test(t, test_commit_modes);
    tcase_add_test(t, test_switch_before_the_first_token);
    tcase_add_test(t, test_queued_tokens_keep_their_version);
    tcase_add_test(t, test_order_of_arrival);
    tcase_add_test(t, test_commit_that_fails_too_late);
    tcase_add_test(t, test_tokens_stream);
    tcase_add_test(t, test_old_tokens_are_sent);
    tcase_add_test(t, test_certificate_comes_first);
    tcase_add_test(t, test_abort_returns_what_there_is);
    tcase_add_test(t, test_refused_request_ends_with_its_reason);
    tcase_add_test(t, test_broken_engine_is_said);
    tcase_add_test(t, test_pauses);
    tcase_add_test(t, test_scores);
    tcase_add_test(t, test_scores_wait_and_end_as_others);
    tcase_add_test(t, test_scores_of_one_version);
    tcase_add_test(t, test_scores_feed_no_certificate);
    tcase_add_test(t, test_slow_reader_stops_the_engine);
    tcase_add_test(t, test_more_than_granted_is_refused);
    tcase_add_test(t, test_a_tensor_by_its_handle);
    suite_add_tcase(s, t);
    return s;
}
