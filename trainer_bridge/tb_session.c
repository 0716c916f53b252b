/* The worker's side of the bridge: opening, connections, flow; see tb_session.h. Layer: trainer_bridge. */
#include "tb_session_parts.h"

#include "br_mem.h"

#include <stdio.h>
#include <string.h>

enum { REQUEST_MOST = 1 << 14, REQUEST_DEFAULT = 64, PART_DEFAULT = 32, FLUSH_DEFAULT_MS = 50, STALL_DEFAULT_MS = 60000 };

br_status tb_session_open(const tb_session_options *options, tb_session **out) {
    tb_session *s;
    br_status status;
    *out = NULL;
    if (options->n_request_max < 0 || options->n_request_max > REQUEST_MOST || options->part_tok < 0 || options->part_tok > TB_PART_MAX)
        return br_fail(BR_E_ARG, "session: %d requests at once and parts of %d tokens: at most %d and %d", options->n_request_max,
                       options->part_tok, REQUEST_MOST, TB_PART_MAX);
    BR_TRY(br_mem_alloc((void **)&s, sizeof *s, "a session"));
    s->opt = *options;
    s->opt.n_request_max = options->n_request_max ? options->n_request_max : REQUEST_DEFAULT;
    s->opt.part_tok = options->part_tok ? options->part_tok : PART_DEFAULT;
    s->opt.flush_ms = options->flush_ms ? options->flush_ms : FLUSH_DEFAULT_MS;
    s->opt.stall_ms = options->stall_ms ? options->stall_ms : STALL_DEFAULT_MS;
    s->channel.opt = options->channel;
    s->channel.opt.me.role = TB_WORKER;
    s->track[TB_W_ADAPTER - 1] = (tb_track){.ops = options->weights, .live = options->channel.me.live_version, .is_empty = options->empty,
                                            .digest = options->channel.me.adapter};
    s->track[TB_W_FULL - 1] = (tb_track){.ops = options->full, .digest = options->channel.me.base};
    s->moving = tb_track_of(s, TB_W_ADAPTER);
    status = br_mem_alloc((void **)&s->slot, sizeof *s->slot * (size_t)s->opt.n_request_max, "a session's requests");
    if (status != BR_OK)
        br_mem_free(s);
    else
        *out = s;
    return status;
}

void tb_session_close(tb_session *s) {
    if (!s)
        return;
    tb_weights_drop(s);
    for (int32_t i = 0; i < s->opt.n_request_max; i++) {
        br_mem_free(s->slot[i].token);
        tb_buffer_close(&s->slot[i].request);
    }
    tb_channel_free(&s->channel);
    br_mem_free(s->slot);
    br_mem_free(s);
}

tb_channel *tb_session_channel(tb_session *s) {
    return &s->channel;
}

br_digest tb_session_live_digest(const tb_session *s) {
    return s->track[TB_W_ADAPTER - 1].digest;
}

tb_stats tb_session_stats(const tb_session *s) {
    return (tb_stats){
        .live_version = tb_live(s),
        .n_done = s->n_done,
        .n_tok = s->n_tok,
        .n_held = (uint32_t)tb_gen_count(s, GEN_WAITING),
        .n_running = (uint32_t)s->n_running,
        .n_unreleased = (uint32_t)tb_gen_count(s, GEN_UNRELEASED),
        .weights = s->weights,
        .paused = (uint32_t)s->paused,
        .mode = s->mode,
        .asleep = (uint32_t)s->asleep,
        .base_version = s->track[TB_W_FULL - 1].live,
        .adapter = tb_session_live_digest(s),
        .base = s->track[TB_W_FULL - 1].digest,
    };
}

/* ---- connections --------------------------------------------------------------------------------------------------------- */

void tb_session_connect(tb_session *s, int64_t now) {
    s->channel.grant_requests = (uint32_t)tb_gen_count(s, GEN_FREE);
    tb_channel_open(&s->channel, now);
}

/* What a trainer leaves behind when it goes, for whatever reason: the live version, and nothing else. A commit that was ordered is
 * done as soon as the aborted sequences have ended. */
static void forget_trainer(tb_session *s, int64_t now) {
    const tb_engine_ops *engine = s->opt.engine;
    const br_status status = s->asleep && engine->sleep ? engine->sleep(engine->context, 0) : BR_OK;
    if (status != BR_OK)
        tb_session_fail(s, status);
    s->asleep = 0;
    tb_weights_drop(s);
    tb_gen_orphan_all(s);
    for (int32_t i = 0; i < TB_W_KIND_COUNT; i++)
        s->track[i].manifest = 0;
    s->has_refused = 0;
    s->paused = s->owes_stats = 0;
    tb_weights_tick(s, now);
    s->mode = s->weights == TB_COMMITTING ? s->mode : TB_DRAIN;
}

void tb_session_fail(tb_session *s, br_status status) {
    if (s->failed != BR_OK)
        return;
    s->failed = status;
    snprintf(s->failure, sizeof s->failure, "%s", br_last_error());
    tb_channel_close(&s->channel, TB_FAILED, s->failure);
}

/* Every event ends here. */
static void settle(tb_session *s, int64_t now, tb_phase before) {
    if (s->channel.phase == TB_CLOSED && before != TB_CLOSED)
        forget_trainer(s, now);
}

void tb_session_broken(tb_session *s, int64_t now, tb_code code, const char *sentence) {
    const tb_phase before = s->channel.phase;
    tb_channel_close(&s->channel, code, sentence);
    settle(s, now, before);
}

/* ---- flow ---------------------------------------------------------------------------------------------------------------- */

static void send_stats(tb_session *s) {
    const tb_message m = {.stats = tb_session_stats(s)};
    s->owes_stats = 0;
    tb_channel_send(&s->channel, TB_STATS, tb_live(s), 0, &m);
}

void tb_session_say_error(tb_session *s, tb_code code, uint64_t subject) {
    char text[TB_SENTENCE_BYTES];
    snprintf(text, sizeof text, "%s", br_last_error());
    const tb_message m = {.error = {.code = code, .text = tb_text_of(text)}};
    tb_channel_send(&s->channel, TB_ERROR, tb_live(s), subject, &m);
}

/* What is asked for, and not only told: with the digest of the live memory as it is now. */
static void answer_stats(tb_session *s) {
    const tb_weights_ops *ops = tb_track_of(s, TB_W_ADAPTER)->ops;
    tb_message m = {.stats = tb_session_stats(s)};
    const br_status status = ops && ops->ws_live ? ops->ws_live(ops->context, &m.stats.adapter) : BR_OK;
    if (status != BR_OK)
        tb_session_say_error(s, tb_code_of(status), 0);
    else
        tb_channel_send(&s->channel, TB_STATS, tb_live(s), 0, &m);
}

/* A pause holds when nothing runs; the modes that let sequences go on hold at once. */
static void answer_pause(tb_session *s) {
    if (s->owes_stats && (s->n_running == 0 || s->mode == TB_FINISH_OLD || s->mode == TB_IN_FLIGHT))
        send_stats(s);
}

static void pause_for(tb_session *s, tb_pause_mode mode) {
    s->paused = 1;
    s->mode = mode;
    s->owes_stats = 1;
    if (mode == TB_STOP)
        tb_gen_stop_all(s);
    answer_pause(s);
}

static void sleep_now(tb_session *s, int asleep) {
    const tb_engine_ops *engine = s->opt.engine;
    const int is_busy = asleep && (s->n_running > 0 || s->weights != TB_IDLE);
    br_status status = is_busy ? br_fail(BR_E_LIMIT, "SLEEP while %d requests run and %s weights are under way: PAUSE first", s->n_running,
                                         s->weights == TB_IDLE ? "no" : "new")
                               : BR_OK;
    if (status == BR_OK && engine->sleep && asleep != s->asleep)
        status = engine->sleep(engine->context, asleep);
    if (status != BR_OK) {
        tb_session_say_error(s, tb_code_of(status), 0);
        return;
    }
    s->asleep = asleep;
    send_stats(s);
}

static void take_flow(tb_session *s, const tb_header *header, const tb_message *m) {
    switch (header->type) {
    case TB_PAUSE: pause_for(s, (tb_pause_mode)m->pause.mode); break;
    case TB_RESUME:
        s->paused = 0;
        send_stats(s);
        break;
    case TB_SLEEP: sleep_now(s, 1); break;
    case TB_WAKE: sleep_now(s, 0); break;
    case TB_STATS_REQ: answer_stats(s); break;
    default: break; /* ERROR that is not fatal: the trainer's own affair */
    }
}

/* ---- events -------------------------------------------------------------------------------------------------------------- */

static void go_on(tb_session *s, int64_t now) {
    tb_weights_tick(s, now);
    tb_gen_submit_waiting(s);
    tb_gen_flush(s, now);
    answer_pause(s);
}

void tb_session_receive(tb_session *s, int64_t now, const tb_header *header, const void *payload, uint64_t n) {
    const tb_phase before = s->channel.phase;
    tb_message m;
    if (tb_channel_receive(&s->channel, now, header, payload, n, &m)) {
        if (header->type >= TB_MANIFEST && header->type <= TB_W_IPC)
            tb_weights_receive(s, now, header, &m, header->payload_hash);
        else if ((header->type >= TB_GEN_REQ && header->type <= TB_GEN_DISCARD) || header->type == TB_SCORE_REQ)
            tb_gen_receive(s, now, header, payload, &m);
        else
            take_flow(s, header, &m);
    }
    if (s->channel.phase == TB_OPEN)
        go_on(s, now);
    settle(s, now, before);
}

void tb_session_tick(tb_session *s, int64_t now, int64_t heard_ms) {
    const tb_phase before = s->channel.phase;
    tb_channel_tick(&s->channel, now, heard_ms);
    go_on(s, now);
    settle(s, now, before);
}

br_status tb_session_pump(tb_session *s, int64_t now) {
    const tb_phase before = s->channel.phase;
    if (!tb_session_wants_pump(s))
        return BR_OK;
    br_status status = s->failed == BR_OK ? tb_gen_pump(s, now) : s->failed;
    settle(s, now, before);
    status = status == BR_OK ? s->failed : status;
    return status == BR_OK ? BR_OK : br_fail(status, "%s", s->failure);
}
