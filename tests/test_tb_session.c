/* The worker's state machine: every message in every state against a second table, written by hand; greeting, versions, ends. No clock
 * and no transport: time is a number, frames are handed over. */
#include "tb_drive.h"

#include <stdio.h>
#include <string.h>

/* ---- the walk ------------------------------------------------------------------------------------------------------------ */

/* First answer (type, and of NACK and ERROR the code), state afterwards, live version, o open or c closed. */
typedef struct cell {
    int type;
    int code;
    char state;
    int live;
    char phase;
} cell;

#define I5o 'I', 5, 'o'
#define R5o 'R', 5, 'o'
#define P5o 'P', 5, 'o'
#define C5o 'C', 5, 'o'
#define NOTHING 0, 0
#define NACK(code) TB_W_NACK, code
#define SAID(code) TB_ERROR, code
#define FATAL(code) {TB_ERROR, code, 'I', 5, 'c'}, {TB_ERROR, code, 'I', 5, 'c'}, {TB_ERROR, code, 'I', 5, 'c'}, {TB_ERROR, code, 'I', 6, 'c'}
#define STAYS(answer) {answer, I5o}, {answer, R5o}, {answer, P5o}, {answer, C5o}
#define ANSWERS(type) STAYS(type COMMA_0)
#define COMMA_0 , 0

enum { NO_SUCH_TYPE = 200 };

/*                      IDLE                        RECEIVING                      PREPARED                        COMMITTING */
static const struct {
    int type;
    cell want[TB_WEIGHTS_STATE_COUNT];
} walk[] = {
    {TB_HELLO, {FATAL(TB_BAD_STATE)}},
    {TB_HELLO_ACK, {FATAL(TB_BAD_DIRECTION)}},
    {TB_HEARTBEAT, {STAYS(NOTHING)}},
    {TB_ERROR, {STAYS(NOTHING)}}, /* one that is not fatal */
    {TB_BYE, {{TB_BYE, 0, 'I', 5, 'c'}, {TB_BYE, 0, 'I', 5, 'c'}, {TB_BYE, 0, 'I', 5, 'c'}, {TB_BYE, 0, 'I', 6, 'c'}}},
    {TB_MANIFEST, {{TB_MANIFEST_ACK, 0, I5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BUSY), C5o}}},
    {TB_MANIFEST_ACK, {FATAL(TB_BAD_DIRECTION)}},
    {TB_MANIFEST_REQ, {ANSWERS(TB_MANIFEST)}},
    {TB_W_BEGIN, {{NOTHING, R5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BUSY), C5o}}},
    {TB_W_CHUNK, {{NACK(TB_BAD_STATE), I5o}, {NOTHING, R5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), C5o}}},
    {TB_W_END, {{NACK(TB_BAD_STATE), I5o}, {TB_W_PREPARED, 0, P5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), C5o}}},
    {TB_W_PREPARED, {FATAL(TB_BAD_DIRECTION)}},
    {TB_W_NACK, {FATAL(TB_BAD_DIRECTION)}},
    {TB_W_COMMIT, {{NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), I5o}, {TB_W_COMMITTED, 0, 'I', 6, 'o'}, {NOTHING, C5o}}},
    {TB_W_COMMITTED, {FATAL(TB_BAD_DIRECTION)}},
    {TB_W_ABORT, {{NACK(TB_ABORTED), I5o}, {NACK(TB_ABORTED), I5o}, {NACK(TB_ABORTED), I5o}, {NACK(TB_BUSY), C5o}}},
    {TB_W_IPC, {{NACK(TB_BAD_STATE), I5o}, {NACK(TB_NOT_BUILT), I5o}, {NACK(TB_BAD_STATE), I5o}, {NACK(TB_BAD_STATE), C5o}}},
    {TB_GEN_REQ, {{TB_GEN_PART, 0, I5o}, {TB_GEN_PART, 0, R5o}, {TB_GEN_PART, 0, P5o}, {NOTHING, C5o}}}, /* the last waits */
    {TB_GEN_PART, {FATAL(TB_BAD_DIRECTION)}},
    {TB_GEN_DONE, {FATAL(TB_BAD_DIRECTION)}},
    {TB_GEN_ABORT, {STAYS(NOTHING)}}, /* of a request that is gone */
    {TB_GEN_RELEASE, {STAYS(SAID(TB_BAD_STATE))}}, /* of the same */
    {TB_GEN_HELD, {FATAL(TB_BAD_DIRECTION)}},
    {TB_GEN_DISCARD, {STAYS(NOTHING)}},
    {TB_CREDIT, {STAYS(NOTHING)}},
    {TB_PAUSE, {{TB_STATS, 0, I5o}, {TB_STATS, 0, R5o}, {TB_STATS, 0, P5o}, {NOTHING, C5o}}}, /* drain: one runs still */
    {TB_RESUME, {ANSWERS(TB_STATS)}},
    {TB_SLEEP, {{TB_STATS, 0, I5o}, {TB_ERROR, TB_BUSY, R5o}, {TB_ERROR, TB_BUSY, P5o}, {TB_ERROR, TB_BUSY, C5o}}},
    {TB_WAKE, {ANSWERS(TB_STATS)}},
    {TB_SCORE_REQ, {{TB_SCORE_DONE, 0, I5o}, {TB_SCORE_DONE, 0, R5o}, {TB_SCORE_DONE, 0, P5o}, {NOTHING, C5o}}}, /* the last waits */
    {TB_SCORE_DONE, {FATAL(TB_BAD_DIRECTION)}},
    {TB_STATS_REQ, {ANSWERS(TB_STATS)}},
    {TB_STATS, {FATAL(TB_BAD_DIRECTION)}},
    {NO_SUCH_TYPE, {FATAL(TB_BAD_TYPE)}},
};

enum { N_WALK = sizeof walk / sizeof walk[0] };

static void give_walked(int type) {
    const tb_spec *spec = tb_spec_of((uint32_t)type);
    tb_message m;
    if (type == TB_MANIFEST)
        give_manifest();
    else if (type == TB_W_BEGIN)
        give_begin(NEXT, 0);
    else if (type == TB_W_CHUNK)
        give_chunk(NEXT, 2, 0, NULL, 0);
    else if (type == TB_W_END)
        give_end(NEXT);
    else if (type == TB_GEN_REQ)
        give_request(1, "walk", 4, 0, 1);
    else if (type == TB_SCORE_REQ)
        give_score(1, "walk", 2, 4);
    else {
        if (spec)
            rig_message(spec, 4, &m);
        if (type == TB_ERROR)
            m.error.fatal = 0;
        if (type == TB_PAUSE)
            m.pause.mode = TB_DRAIN;
        if (type == TB_HELLO)
            m.hello = rig_hello(TB_TRAINER);
        give((tb_type)type, NEXT, 1, spec ? &m : NULL);
    }
}

START_TEST(test_every_message_in_every_state) {
    for (int from = 0; from < TB_WEIGHTS_STATE_COUNT; from++) {
        const cell *want = &walk[_i].want[from];
        char what[64];
        snprintf(what, sizeof what, "%s in state %d", tb_type_name((uint32_t)walk[_i].type), from);
        reach((tb_weights_state)from);
        give_walked(walk[_i].type);
        settle();
        const int type = n_heard ? heard[0].header.type : 0;
        const int code = type == TB_W_NACK ? (int)heard[0].message.w_nack.code : type == TB_ERROR ? (int)heard[0].message.error.code : 0;
        ck_assert_msg(type == want->type && code == want->code, "%s: answered %s, code %d (%s)", what, tb_type_name((uint32_t)type), code,
                      br_last_error());
        ck_assert_msg("IRPC"[state().weights] == want->state, "%s: state %u afterwards", what, state().weights);
        ck_assert_msg((int)state().live_version == want->live, "%s: version %d afterwards", what, (int)state().live_version);
        ck_assert_msg((channel()->phase == TB_OPEN) == (want->phase == 'o'), "%s: phase %d", what, channel()->phase);
        ck_assert_int_eq(worker.weights.n_commit, want->live == NEXT);
        ck_assert_msg(worker.weights.n_abort == (strchr("RP", "IRPC"[from]) && want->state == 'I' && want->live == LIVE), "%s: staged data", what);
        close_session();
    }
}
END_TEST

START_TEST(test_the_walk_has_every_type) {
    ck_assert_int_eq(N_WALK, tb_spec_count + 1);
    for (int32_t i = 0; i < tb_spec_count; i++)
        ck_assert_int_eq(walk[i].type, (int)tb_specs[i].type);
}
END_TEST

/* Before the greeting only HELLO has a place, and after the end nothing has. */
START_TEST(test_greeting_and_closed) {
    for (int i = 0; i < N_WALK; i++) {
        const int type = walk[i].type, spec_from = tb_spec_of((uint32_t)type) ? (int)tb_spec_of((uint32_t)type)->from : 0;
        open_session(LIVE);
        manifest_hash = 1;
        give_walked(type);
        if (type == TB_HELLO) {
            ck_assert_int_eq(heard[0].header.type, TB_HELLO_ACK);
            ck_assert_uint_eq(heard[0].message.hello.live_version, LIVE);
        } else if (type == TB_ERROR) {
            ck_assert_int_eq(n_heard, 0);
        } else { /* BYE too: nothing was agreed that could end so */
            ck_assert_int_eq(heard[0].header.type, TB_ERROR);
            ck_assert_uint_eq(heard[0].message.error.code, !spec_from ? TB_BAD_TYPE : spec_from == TB_WORKER ? TB_BAD_DIRECTION : TB_BAD_STATE);
            ck_assert_int_eq(channel()->phase, TB_CLOSED);
            ck_assert_int_eq(tb_worker_exit_code(channel()->end, BR_OK), 4);
            forget();
            give_walked(type);
            ck_assert_int_eq(n_heard, 0);
        }
        close_session();
    }
}
END_TEST

/* ---- greeting ------------------------------------------------------------------------------------------------------------ */

START_TEST(test_hello_names_what_differs) {
    static const struct { size_t at; const char *name; } fact[] = {
        {offsetof(tb_hello, contract), "contract"}, {offsetof(tb_hello, config), "config"}, {offsetof(tb_hello, base), "base weights"},
        {offsetof(tb_hello, tokenizer), "tokenizer"}, {offsetof(tb_hello, abi), "ABI"},
    };
    for (size_t i = 0; i < sizeof fact / sizeof *fact; i++) {
        tb_message m = {.hello = rig_hello(TB_TRAINER)};
        ((unsigned char *)&m.hello)[fact[i].at] ^= 1;
        open_session(LIVE);
        say(TB_HELLO, 0, 0, &m);
        ck_assert_int_eq(heard[0].header.type, TB_ERROR);
        ck_assert_uint_eq(heard[0].message.error.code, TB_DIFFERS);
        for (size_t j = 0; j < sizeof fact / sizeof *fact; j++)
            ck_assert_msg((strstr(channel()->sentence, fact[j].name) != NULL) == (i == j), "%s", channel()->sentence);
        ck_assert_int_eq(tb_worker_exit_code(channel()->end, BR_OK), 5);
        close_session();
    }
    tb_message m = {.hello = rig_hello(TB_TRAINER)};
    m.hello.build = tb_text_of("another build is no reason");
    m.hello.adapter.lo++;
    open_session(LIVE);
    say(TB_HELLO, 0, 0, &m);
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    close_session();
}
END_TEST

/* ---- versions ------------------------------------------------------------------------------------------------------------ */

START_TEST(test_versions) {
    static const struct { uint64_t live, version; uint32_t flags; int answer; tb_code code; } want[] = {
        {5, 6, 0, 0, TB_OK},                          {5, 5, 0, TB_W_COMMITTED, TB_OK},
        {5, 7, 0, TB_W_NACK, TB_BAD_VERSION},         {5, 4, 0, TB_W_NACK, TB_BAD_VERSION},
        {5, 0, 0, TB_W_NACK, TB_BAD_VERSION},         {5, 0, TB_INITIAL, TB_W_NACK, TB_BAD_VERSION},
        {5, 6, TB_INITIAL, TB_W_NACK, TB_BAD_VERSION}, {5, 9, TB_RESYNC, 0, TB_OK},
        {5, 5, TB_RESYNC, 0, TB_OK},                  {5, 0, TB_RESYNC, 0, TB_OK},
        {5, 0, TB_RESYNC | TB_INITIAL, 0, TB_OK},     {5, 9, TB_RESYNC | TB_INITIAL, TB_W_NACK, TB_BAD_VERSION},
        {0, 0, 0, TB_W_COMMITTED, TB_OK},             {0, 0, TB_INITIAL, 0, TB_OK},
        {0, 1, TB_INITIAL, TB_W_NACK, TB_BAD_VERSION}, {0, 1, 0, 0, TB_OK},
        {UINT64_MAX - 1, UINT64_MAX, 0, 0, TB_OK},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        open_session(want[i].live);
        greet();
        give_manifest();
        forget();
        give_begin(want[i].version, want[i].flags);
        ck_assert_msg((n_heard ? heard[0].header.type : 0) == want[i].answer, "row %zu: %s", i, br_last_error());
        if (want[i].answer == TB_W_NACK)
            ck_assert_uint_eq(heard[0].message.w_nack.code, want[i].code);
        ck_assert_uint_eq(state().weights, want[i].answer ? TB_IDLE : TB_RECEIVING);
        close_session();
    }
}
END_TEST

/* Nothing is live yet: version 0 is not answered by what is not there, it has to come. */
START_TEST(test_empty_has_no_version) {
    open_session(0);
    tb_session_options o = rig_session_options(&worker);
    o.empty = 1;
    tb_session_close(worker.session);
    CHECK_OK(tb_session_open(&o, &worker.session));
    sequence = 0;
    tb_session_connect(worker.session, now);
    greet();
    give_manifest();
    say(TB_W_COMMIT, 0, 0, NULL);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_STATE);
    forget();
    give_begin(0, 0);
    ck_assert_int_eq(n_heard, 0);
    ck_assert_uint_eq(state().weights, TB_RECEIVING);
    give_whole(0);
    give_end(0);
    say(TB_W_COMMIT, 0, 0, NULL);
    ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
    forget();
    give_begin(0, 0);
    ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
    ck_assert_int_eq(worker.weights.n_commit, 1);
    close_session();
}
END_TEST

START_TEST(test_commit_twice_is_one_commit) {
    reach(TB_PREPARED);
    say(TB_W_COMMIT, NEXT, 0, NULL);
    const br_digest digest = heard[0].message.w_committed.digest;
    ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
    ck_assert_uint_eq(heard[0].header.version, NEXT);
    for (int i = 0; i < 2; i++) {
        forget();
        if (i == 0)
            give(TB_W_COMMIT, NEXT, 0, NULL);
        else
            give_begin(NEXT, 0); /* a trainer that did not hear the answer sends the version again */
        ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
        ck_assert(br_digest_equal(heard[0].message.w_committed.digest, digest));
        ck_assert_uint_eq(heard[0].message.w_committed.step, 1);
    }
    ck_assert_int_eq(worker.weights.n_commit, 1);
    ck_assert(br_digest_equal(tb_session_live_digest(worker.session), digest));
    close_session();
}
END_TEST

START_TEST(test_begin_needs_the_manifest) {
    open_session(LIVE);
    greet();
    manifest_hash = 1;
    forget();
    give_begin(NEXT, 0);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_STATE);
    give_manifest();
    manifest_hash++;
    forget();
    give_begin(NEXT, 0);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_STATE);
    close_session();
}
END_TEST

START_TEST(test_busy_ops) {
    reach(TB_IDLE);
    worker.weights.busy = 1;
    give_begin(NEXT, 0);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BUSY);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    close_session();
    reach(TB_PREPARED);
    worker.weights.busy = 3;
    say(TB_W_COMMIT, NEXT, 0, NULL);
    ck_assert_int_eq(n_heard, 0);
    ck_assert_uint_eq(state().weights, TB_COMMITTING);
    settle();
    ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
    ck_assert_uint_eq(state().live_version, NEXT);
    close_session();
}
END_TEST

/* What of a refused transfer is still under way is dropped, and gives its credit back all the same. */
START_TEST(test_refused_transfer_is_answered_once) {
    reach(TB_RECEIVING);
    const int64_t before = channel()->peer_bytes + (int64_t)channel()->owed_bytes;
    give_chunk(NEXT, 0, 1, "x", 1); /* overlaps */
    for (int i = 0; i < 5; i++)
        give_chunk(NEXT, 1, 0, "abcd", 4);
    give_end(NEXT);
    ck_assert_int_eq(n_heard, 1);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_TENSOR);
    ck_assert_int_eq(channel()->peer_bytes + (int64_t)channel()->owed_bytes, before);
    forget();
    give(TB_W_COMMIT, NEXT, 0, NULL); /* but a commit is never dropped */
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_STATE);
    give_begin(NEXT, 0); /* the same version again, from its beginning */
    give_whole(NEXT);
    give_end(NEXT);
    ck_assert_uint_eq(state().weights, TB_PREPARED);
    give(TB_W_COMMIT, NEXT, 0, NULL);
    forget();
    give_chunk(NEXT, 0, 0, "x", 1); /* of a transfer that is over, not of one that was refused */
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_STATE);
    close_session();
}
END_TEST

START_TEST(test_closing_drops_what_is_staged) {
    reach(TB_RECEIVING);
    close_session();
    ck_assert_int_eq(worker.weights.n_abort, 1);
}
END_TEST

START_TEST(test_stalled_transfer_is_dropped) {
    for (tb_weights_state from = TB_IDLE; from <= TB_PREPARED; from++) {
        reach(from);
        if (from == TB_IDLE) /* a transfer of which nothing but its beginning came */
            give_begin(NEXT, 0);
        for (int i = 0; i < 59; i++) {
            now += 1000;
            say(TB_HEARTBEAT, 0, 0, NULL);
            settle();
        }
        ck_assert_uint_eq(state().weights, from == TB_PREPARED ? TB_PREPARED : TB_RECEIVING);
        now += 1000;
        say(TB_HEARTBEAT, 0, 0, NULL);
        settle();
        ck_assert_uint_eq(heard[0].message.w_nack.code, TB_ABORTED);
        ck_assert_uint_eq(state().weights, TB_IDLE);
        ck_assert_int_eq(worker.weights.n_abort, 1);
        close_session();
    }
}
END_TEST

START_TEST(test_without_weights_ops) {
    static const tb_type type[] = {TB_MANIFEST, TB_MANIFEST_REQ, TB_W_BEGIN, TB_W_CHUNK, TB_W_END, TB_W_COMMIT, TB_W_ABORT};
    open_session(LIVE);
    tb_session_options o = rig_session_options(&worker);
    o.weights = o.full = NULL;
    tb_session_close(worker.session);
    CHECK_OK(tb_session_open(&o, &worker.session));
    sequence = 0;
    tb_session_connect(worker.session, now);
    greet();
    for (size_t i = 0; i < sizeof type / sizeof *type; i++) {
        forget();
        give_walked(type[i]);
        ck_assert_int_eq(n_heard, 1);
        ck_assert_uint_eq(heard[0].message.w_nack.code, TB_NOT_BUILT);
        ck_assert_int_eq(channel()->phase, TB_OPEN);
    }
    close_session();
}
END_TEST

/* Offsets and sizes beyond 2^31 and 2^32 reach the ops as they are: a sparse tensor, a few bytes at its boundaries. */
static uint64_t seen_tensor, seen_offset, seen_n;

static br_status sparse_chunk(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    (void)context, (void)bytes;
    seen_tensor = tensor;
    seen_offset = offset;
    seen_n = n;
    return BR_OK;
}

START_TEST(test_offsets_beyond_two_to_the_31) {
    static const uint64_t offset[] = {(1ull << 31) - 3, 1ull << 31, (1ull << 32) - 3, 1ull << 32, (1ull << 40) - 7};
    reach(TB_RECEIVING);
    worker.weights_ops.ws_chunk = sparse_chunk;
    for (size_t i = 0; i < sizeof offset / sizeof *offset; i++) {
        give_chunk(NEXT, (1ull << 33) + i, offset[i], "1234567", 7);
        ck_assert_uint_eq(seen_tensor, (1ull << 33) + i);
        ck_assert_uint_eq(seen_offset, offset[i]);
        ck_assert_uint_eq(seen_n, 7);
    }
    ck_assert_uint_eq(state().weights, TB_RECEIVING);
    close_session();
}
END_TEST

/* ---- the end of a connection --------------------------------------------------------------------------------------------- */

START_TEST(test_silence) {
    reach(TB_RECEIVING);
    now += RIG_DEAD_MS - 1;
    tb_session_tick(worker.session, now, 0);
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    say(TB_HEARTBEAT, 0, 0, NULL);
    now += RIG_DEAD_MS - 1;
    tb_session_tick(worker.session, now, now - 5); /* half a frame has come since */
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    now += RIG_DEAD_MS - 6;
    tb_session_tick(worker.session, now, 0);
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    now++;
    tb_session_tick(worker.session, now, 0);
    ck_assert_int_eq(channel()->phase, TB_CLOSED);
    ck_assert_int_eq(channel()->end, TB_SILENT);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    ck_assert_int_eq(tb_worker_exit_code(channel()->end, BR_OK), 3);
    close_session();
    open_session(LIVE); /* and one that never greets, although bytes of it come */
    now += RIG_DEAD_MS - 1;
    tb_session_tick(worker.session, now, now);
    ck_assert_int_eq(channel()->phase, TB_GREETING);
    now++;
    tb_session_tick(worker.session, now, now);
    ck_assert_int_eq(channel()->end, TB_SILENT);
    close_session();
    open_session(LIVE); /* one that may take its time to greet, but not afterwards */
    channel()->opt.greet_ms = 10 * RIG_DEAD_MS;
    now += 10 * RIG_DEAD_MS - 1;
    tb_session_tick(worker.session, now, 0);
    greet();
    now += RIG_DEAD_MS;
    tb_session_tick(worker.session, now, 0);
    ck_assert_int_eq(channel()->end, TB_SILENT);
    close_session();
}
END_TEST

/* The connection is lost in each state; a second trainer finds what is live and can go on from there. */
START_TEST(test_lost_in_every_state) {
    for (int from = 0; from < TB_WEIGHTS_STATE_COUNT; from++) {
        const uint64_t live = from == TB_COMMITTING ? NEXT : LIVE;
        reach((tb_weights_state)from);
        give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = from == TB_COMMITTING ? TB_DRAIN : TB_FINISH_OLD}});
        give_request(1, "one", 4, TB_CERTIFY, 1); /* waits */
        forget();
        tb_session_broken(worker.session, now, TB_LOST, "gone");
        settle();
        ck_assert_int_eq(n_heard, 0);
        ck_assert_uint_eq(state().weights, TB_IDLE);
        ck_assert_uint_eq(state().live_version, live);
        ck_assert_uint_eq(state().n_running + state().n_held + state().n_unreleased + state().paused, 0);
        ck_assert_uint_eq(state().mode, TB_DRAIN);
        ck_assert_int_eq(worker.weights.n_abort, from == TB_RECEIVING || from == TB_PREPARED);
        sequence = 0;
        tb_session_connect(worker.session, now);
        greet();
        ck_assert_uint_eq(heard[0].message.hello.live_version, live);
        ck_assert_int_eq(channel()->peer_requests, 8);
        ck_assert_int_eq(channel()->peer_bytes, RIG_GRANT_BYTES);
        ck_assert_uint_eq(channel()->owed_bytes, 0);
        give_manifest();
        forget();
        give_begin(3, TB_RESYNC);
        give_whole(3);
        give_end(3);
        give(TB_W_COMMIT, 3, 0, NULL);
        ck_assert_ptr_nonnull(first_of(TB_W_COMMITTED));
        ck_assert_uint_eq(state().live_version, 3);
        close_session();
    }
}
END_TEST

/* A request that the engine still holds keeps its place until it is gone; a new trainer is not promised it. */
START_TEST(test_orphans_keep_their_place) {
    reach(TB_IDLE);
    for (uint64_t id = 0; id < 8; id++)
        give_request(id, "hold", 4, 0, 1);
    tb_session_broken(worker.session, now, TB_LOST, "gone");
    sequence = 0;
    tb_session_connect(worker.session, now);
    greet();
    ck_assert_int_eq(channel()->peer_requests, 0);
    settle();
    ck_assert_int_eq(channel()->peer_requests, 8);
    close_session();
}
END_TEST

/* Each allocation of a whole round fails once: no crash, nothing half done; the connection or the request ends, or it succeeds. */
START_TEST(test_every_allocation_fails_once) {
    for (long nth = 1, done = 0; !done; nth++) {
        ck_assert_int_lt(nth, 200);
        reach(TB_PREPARED);
        const long before = br_mem_alloc_count();
        br_mem_fail_nth(nth);
        const uint32_t prompt[2] = {1, 2};
        const tb_message m = {.gen_req = {.flags = TB_CERTIFY, .max_new = 9, .uid = tb_text_of("one"), .prompt = {prompt, 2}}};
        tb_buffer out = {0};
        tb_message_encode(TB_GEN_REQ, &m, &out);
        tb_header h = {.type = TB_GEN_REQ, .session = 77, .sequence = sequence++, .subject = 1};
        unsigned char head[TB_HEADER_BYTES];
        if (out.failed == BR_OK) {
            tb_header_seal(&h, out.bytes, out.n, head);
            tb_session_receive(worker.session, now, &h, out.bytes, out.n);
        }
        tb_session_pump(worker.session, now);
        done = br_mem_alloc_count() - before < nth;
        br_mem_fail_nth(0);
        tb_buffer_close(&out);
        settle();
        ck_assert_uint_eq(state().n_running, 0);
        ck_assert_uint_eq(state().live_version, LIVE);
        close_session();
    }
}
END_TEST

/* A message for which there is no memory leaves nothing behind the ones before it. */
START_TEST(test_no_memory_leaves_whole_messages) {
    const tb_message m = {.stats = {0}};
    const unsigned char *payload;
    tb_header header;
    int n = 0;
    reach(TB_IDLE);
    tb_channel *c = channel();
    do
        tb_channel_send(c, TB_HEARTBEAT, 0, 0, NULL);
    while (c->out.n + sizeof(tb_header) > c->out.n_max || c->out.n + 2 * sizeof(tb_header) <= c->out.n_max);
    br_mem_fail_nth(1);
    tb_channel_send(c, TB_STATS, 0, 0, &m);
    br_mem_fail_nth(0);
    ck_assert_int_eq(c->phase, TB_CLOSED);
    for (size_t at = 0; tb_out_next(c, &at, &header, &payload); n++)
        ck_assert_int_eq(header.type, TB_HEARTBEAT);
    ck_assert_int_gt(n, 0);
    close_session();
}
END_TEST

/* A trainer hears why it is refused also when the worker knows no session yet. */
START_TEST(test_refusal_of_no_session) {
    for (uint32_t fatal = 0; fatal < 2; fatal++) {
        tb_channel c = {.opt = {.me = rig_hello(TB_TRAINER), .session = 77, .dead_ms = 1000}};
        const tb_message m = {.error = {.code = TB_BAD_TYPE, .fatal = fatal, .text = tb_text_of("the reason")}};
        tb_header h = {.type = TB_ERROR};
        unsigned char head[TB_HEADER_BYTES];
        tb_buffer out = {0};
        tb_message got;
        tb_message_encode(TB_ERROR, &m, &out);
        tb_header_seal(&h, out.bytes, out.n, head);
        tb_channel_open(&c, 0);
        ck_assert_int_eq(tb_channel_receive(&c, 0, &h, out.bytes, out.n, &got), 0);
        ck_assert_int_eq(c.phase, TB_CLOSED);
        ck_assert_int_eq(c.end, fatal ? TB_BAD_TYPE : TB_BAD_SESSION);
        ck_assert_int_eq(strstr(c.sentence, "the reason") != NULL, fatal);
        tb_buffer_close(&out);
        tb_channel_free(&c);
    }
}
END_TEST

Suite *test_tb_session_suite(void) {
    Suite *s = suite_create("tb_session");
    TCase *t = tcase_create("session");
    tcase_add_loop_test(t, test_every_message_in_every_state, 0, N_WALK);
    tcase_add_test(t, test_the_walk_has_every_type);
    tcase_add_test(t, test_greeting_and_closed);
    tcase_add_test(t, test_hello_names_what_differs);
    tcase_add_test(t, test_versions);
    tcase_add_test(t, test_empty_has_no_version);
    tcase_add_test(t, test_no_memory_leaves_whole_messages);
    tcase_add_test(t, test_refusal_of_no_session);
    tcase_add_test(t, test_commit_twice_is_one_commit);
    tcase_add_test(t, test_begin_needs_the_manifest);
    tcase_add_test(t, test_busy_ops);
    tcase_add_test(t, test_refused_transfer_is_answered_once);
    tcase_add_test(t, test_closing_drops_what_is_staged);
    tcase_add_test(t, test_stalled_transfer_is_dropped);
    tcase_add_test(t, test_without_weights_ops);
    tcase_add_test(t, test_offsets_beyond_two_to_the_31);
    tcase_add_test(t, test_silence);
    tcase_add_test(t, test_lost_in_every_state);
    tcase_add_test(t, test_orphans_keep_their_place);
    tcase_add_test(t, test_every_allocation_fails_once);
    suite_add_tcase(s, t);
    return s;
}
