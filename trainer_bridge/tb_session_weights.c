/* Two-phase commit of weights, the worker's side; see tb_session.h. Layer: trainer_bridge.
 *
 *                IDLE                        RECEIVING     PREPARED          COMMITTING
 *   MANIFEST     ask the op                  drop, NACK    drop, NACK        NACK busy
 *   W_BEGIN      version rules -> RECEIVING  drop, NACK    drop, NACK        NACK busy
 *   W_CHUNK      of a refused one: nothing   hand over     drop, NACK        NACK
 *                else NACK
 *   W_END        as W_CHUNK                  -> PREPARED   drop, NACK        NACK
 *   W_COMMIT     live: COMMITTED, else NACK  drop, NACK    -> COMMITTING     same version: nothing, else NACK
 *   W_ABORT      NACK aborted                drop, NACK    drop, NACK        NACK busy */
#include "tb_session_parts.h"

#include <stdio.h>
#include <string.h>

static void nack(tb_session *s, uint64_t version, tb_code code) {
    char text[TB_SENTENCE_BYTES];
    snprintf(text, sizeof text, "%s", br_last_error());
    const tb_message m = {.w_nack = {.code = code, .text = tb_text_of(text)}};
    tb_channel_send(&s->channel, TB_W_NACK, version, 0, &m);
}

void tb_weights_drop(tb_session *s) {
    if (s->weights != TB_RECEIVING && s->weights != TB_PREPARED)
        return;
    s->opt.weights->ws_abort(s->opt.weights->context);
    s->has_refused = 1;
    s->refused = s->staged;
    s->weights = TB_IDLE;
}

/* The sentence was set by the caller. */
static void refuse(tb_session *s, uint64_t version, tb_code code) {
    if (s->weights == TB_IDLE) {
        s->has_refused = 1;
        s->refused = version;
    }
    nack(s, version, code);
    tb_weights_drop(s);
}

static void committed(tb_session *s) {
    const tb_message m = {.w_committed = {.step = s->step, .digest = s->live_digest}};
    tb_channel_send(&s->channel, TB_W_COMMITTED, s->live, 0, &m);
}

static const char *state_name(const tb_session *s) {
    static const char *const name[] = {"no transfer", "a transfer", "a prepared version", "a commit"};
    return name[s->weights];
}

/* ---- messages ------------------------------------------------------------------------------------------------------------ */

static void take_manifest(tb_session *s, const tb_manifest *manifest, uint64_t hash) {
    tb_tensor tensor;
    tb_manifest_ack ack = {.hash = hash, .n_tensor = manifest->tensors.n};
    const br_status status = s->opt.weights->manifest(s->opt.weights->context, manifest);
    s->manifest = status == BR_OK ? hash : 0;
    if (status != BR_OK) {
        nack(s, s->live, tb_code_of(status));
        return;
    }
    for (uint64_t at = 0; tb_tensor_next(&manifest->tensors, &at, &tensor);)
        ack.n_bytes += tensor.n_bytes;
    tb_channel_send(&s->channel, TB_MANIFEST_ACK, s->live, 0, &(tb_message){.manifest_ack = ack});
}

static tb_code check_version(const tb_session *s, uint64_t version, uint32_t flags) {
    if (flags & TB_INITIAL && (version != 0 || (s->live != 0 && !(flags & TB_RESYNC))))
        return tb_fail(TB_BAD_VERSION, "version %llu with INITIAL while %llu is live: INITIAL is for version 0", (unsigned long long)version,
                       (unsigned long long)s->live);
    if (version != s->live + 1 && !(s->is_empty && version == 0) && !(flags & (TB_INITIAL | TB_RESYNC)))
        return tb_fail(TB_BAD_VERSION, "version %llu cannot follow %llu without RESYNC", (unsigned long long)version,
                       (unsigned long long)s->live);
    return TB_OK;
}

static void take_begin(tb_session *s, int64_t now, uint64_t version, const tb_w_begin *begin) {
    if (version == s->live && begin->flags == 0 && !s->is_empty) {
        committed(s);
        return;
    }
    tb_code code = check_version(s, version, begin->flags);
    if (code == TB_OK && (s->manifest == 0 || begin->manifest != s->manifest))
        code = tb_fail(TB_BAD_STATE, "W_BEGIN goes by manifest %016llx: %s", (unsigned long long)begin->manifest,
                       s->manifest ? "another one is in force" : "none was accepted");
    if (code == TB_OK)
        code = tb_code_of(s->opt.weights->ws_begin(s->opt.weights->context, version, begin));
    if (code != TB_OK) {
        refuse(s, version, code);
        return;
    }
    s->weights = TB_RECEIVING;
    s->has_refused = 0;
    s->staged = version;
    s->moved_ms = now;
}

static void take_chunk(tb_session *s, int64_t now, const tb_header *header, const tb_w_chunk *chunk) {
    const br_status status =
        s->opt.weights->ws_chunk(s->opt.weights->context, header->subject, chunk->offset, chunk->data.p, chunk->data.n);
    if (status != BR_OK)
        refuse(s, header->version, tb_code_of(status));
    s->moved_ms = now;
}

static void take_end(tb_session *s, int64_t now, br_digest digest) {
    const br_status status = s->opt.weights->ws_end(s->opt.weights->context, digest);
    if (status != BR_OK) {
        refuse(s, s->staged, tb_code_of(status));
        return;
    }
    s->weights = TB_PREPARED;
    s->moved_ms = now;
    tb_channel_send(&s->channel, TB_W_PREPARED, s->staged, 0, &(tb_message){.w_digest = {digest}});
}

static void take_commit(tb_session *s, int64_t now) {
    s->weights = TB_COMMITTING;
    if (s->mode == TB_STOP)
        tb_gen_stop_all(s);
    tb_weights_tick(s, now);
}

/* ---- states -------------------------------------------------------------------------------------------------------------- */

static void out_of_place(tb_session *s, const tb_header *header) {
    refuse(s, header->version,
           tb_fail(TB_BAD_STATE, "%s of version %llu while there is %s of version %llu", tb_type_name(header->type),
                   (unsigned long long)header->version, state_name(s),
                   (unsigned long long)(s->weights == TB_IDLE ? s->live : s->staged)));
}

static void when_idle(tb_session *s, int64_t now, const tb_header *header, const tb_message *m, uint64_t hash) {
    const int is_stale = s->has_refused && header->version == s->refused;
    switch (header->type) {
    case TB_MANIFEST: take_manifest(s, &m->manifest, hash); break;
    case TB_W_BEGIN: take_begin(s, now, header->version, &m->w_begin); break;
    case TB_W_CHUNK:
    case TB_W_END:
        if (!is_stale)
            out_of_place(s, header);
        break;
    case TB_W_COMMIT:
        if (header->version == s->live && !s->is_empty)
            committed(s);
        else
            out_of_place(s, header);
        break;
    default: nack(s, header->version, tb_fail(TB_ABORTED, "aborted by the trainer; version %llu serves", (unsigned long long)s->live));
    }
}

static void when_committing(tb_session *s, const tb_header *header) {
    if (header->type == TB_W_COMMIT && header->version == s->staged)
        return;
    const int is_chunk = header->type == TB_W_CHUNK || header->type == TB_W_END || header->type == TB_W_COMMIT;
    nack(s, header->version, tb_fail(is_chunk ? TB_BAD_STATE : TB_BUSY, "%s while version %llu is being committed", tb_type_name(header->type),
                                     (unsigned long long)s->staged));
}

static void when_staged(tb_session *s, int64_t now, const tb_header *header, const tb_message *m) {
    const int is_ours = header->version == s->staged;
    if (header->type == TB_W_ABORT)
        refuse(s, header->version, tb_fail(TB_ABORTED, "aborted by the trainer; version %llu serves", (unsigned long long)s->live));
    else if (s->weights == TB_RECEIVING && header->type == TB_W_CHUNK && is_ours)
        take_chunk(s, now, header, &m->w_chunk);
    else if (s->weights == TB_RECEIVING && header->type == TB_W_END && is_ours)
        take_end(s, now, m->w_digest.digest);
    else if (s->weights == TB_PREPARED && header->type == TB_W_COMMIT && is_ours)
        take_commit(s, now);
    else
        out_of_place(s, header);
}

void tb_weights_receive(tb_session *s, int64_t now, const tb_header *header, const tb_message *m, uint64_t payload_hash) {
    if (!s->opt.weights)
        nack(s, header->version, tb_fail(TB_NOT_BUILT, "%s: this worker cannot change its weights: not built in", tb_type_name(header->type)));
    else if (s->weights == TB_IDLE)
        when_idle(s, now, header, m, payload_hash);
    else if (s->weights == TB_COMMITTING)
        when_committing(s, header);
    else
        when_staged(s, now, header, m);
    if (header->type == TB_W_CHUNK)
        tb_channel_consumed(&s->channel, header->n_payload);
}

static void commit(tb_session *s) {
    br_digest digest = {0};
    uint64_t step = 0;
    const br_status status = s->opt.weights->ws_commit(s->opt.weights->context, s->mode, &step, &digest);
    const int is_live = status == BR_OK || step != 0;
    if (status == BR_E_LIMIT && !is_live)
        return;
    s->weights = TB_IDLE;
    if (!is_live) {
        nack(s, s->staged, TB_FAILED);
        s->opt.weights->ws_abort(s->opt.weights->context);
        return;
    }
    s->live = s->staged;
    s->live_digest = digest;
    s->step = step;
    s->is_empty = 0;
    s->channel.opt.me.live_version = s->live;
    s->channel.opt.me.adapter = digest;
    if (status != BR_OK) {
        tb_session_fail(s, status);
        return;
    }
    if (s->mode == TB_IN_FLIGHT)
        tb_gen_version(s);
    committed(s);
}

void tb_weights_tick(tb_session *s, int64_t now) {
    const int is_staged = s->weights == TB_RECEIVING || s->weights == TB_PREPARED;
    if (is_staged && now - s->moved_ms >= s->opt.stall_ms)
        refuse(s, s->staged, tb_fail(TB_ABORTED, "the transfer of version %llu did not move for %lld ms; version %llu serves",
                                     (unsigned long long)s->staged, (long long)(now - s->moved_ms), (unsigned long long)s->live));
    if (s->weights == TB_COMMITTING && (s->n_running == 0 || s->mode == TB_FINISH_OLD || s->mode == TB_IN_FLIGHT))
        commit(s);
}
