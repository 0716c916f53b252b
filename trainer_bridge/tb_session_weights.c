/* Two-phase commit of weights, the worker's side; see tb_session.h. Layer: trainer_bridge.
 *
 *                IDLE                        RECEIVING     PREPARED          COMMITTING
 *   MANIFEST_REQ in every state the op's MANIFEST, or NACK
 *   MANIFEST     ask the op                  drop, NACK    drop, NACK        NACK busy
 *   W_BEGIN      version rules -> RECEIVING  drop, NACK    drop, NACK        NACK busy
 *   W_CHUNK      of a refused one: nothing   hand over     drop, NACK        NACK
 *                else NACK
 *   W_IPC        as W_CHUNK                  hand over     drop, NACK        NACK
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
    s->moving->ops->ws_abort(s->moving->ops->context);
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
    const tb_message m = {.w_committed = {.step = s->step, .digest = s->moving->digest}};
    tb_channel_send(&s->channel, TB_W_COMMITTED, s->moving->live, 0, &m);
}

static tb_code not_built(const char *what) {
    return tb_fail(TB_NOT_BUILT, "%s: this worker cannot change these weights: not built in", what);
}

static const char *state_name(const tb_session *s) {
    static const char *const name[] = {"no transfer", "a transfer", "a prepared version", "a commit"};
    return name[s->weights];
}

/* ---- messages ------------------------------------------------------------------------------------------------------------ */

/* A manifest is of the kind that its first tensor says; the op refuses one that is mixed. */
static void take_manifest(tb_session *s, const tb_manifest *manifest, uint64_t hash) {
    tb_tensor tensor;
    uint64_t first = 0;
    tb_manifest_ack ack = {.hash = hash, .n_tensor = manifest->tensors.n};
    (void)tb_tensor_next(&manifest->tensors, &first, &tensor);
    tb_track *track = tb_track_of(s, tensor.kind == TB_BASE ? TB_W_FULL : TB_W_ADAPTER);
    if (!track->ops) {
        nack(s, track->live, not_built("MANIFEST"));
        return;
    }
    const br_status status = track->ops->manifest(track->ops->context, manifest);
    track->manifest = status == BR_OK ? hash : 0;
    if (status != BR_OK) {
        nack(s, track->live, tb_code_of(status));
        return;
    }
    for (uint64_t at = 0; tb_tensor_next(&manifest->tensors, &at, &tensor);)
        ack.n_bytes += tensor.n_bytes;
    tb_channel_send(&s->channel, TB_MANIFEST_ACK, track->live, 0, &(tb_message){.manifest_ack = ack});
}

static void describe(tb_session *s, tb_text adapter) {
    const tb_track *track = tb_track_of(s, TB_W_ADAPTER);
    tb_buffer raw = {0};
    tb_message m = {.manifest = {.tensors = {.n = 0}}};
    if (!track->ops) {
        nack(s, track->live, not_built("MANIFEST_REQ"));
        return;
    }
    br_status status = track->ops->describe(track->ops->context, adapter, &raw, &m.manifest.tensors.n);
    status = status == BR_OK ? raw.failed : status;
    m.manifest.tensors.raw = (tb_bytes){raw.bytes, raw.n};
    if (status == BR_OK)
        tb_channel_send(&s->channel, TB_MANIFEST, track->live, 0, &m);
    else
        nack(s, track->live, tb_code_of(status));
    tb_buffer_close(&raw);
}

static tb_code check_version(const tb_track *track, uint32_t kind, uint64_t version, uint32_t flags) {
    if (flags & TB_INITIAL && (kind != TB_W_ADAPTER || version != 0 || (track->live != 0 && !(flags & TB_RESYNC))))
        return tb_fail(TB_BAD_VERSION, "version %llu with INITIAL while %llu is live: INITIAL is for version 0 of an adapter",
                       (unsigned long long)version, (unsigned long long)track->live);
    if (version != track->live + 1 && !(track->is_empty && version == 0) && !(flags & (TB_INITIAL | TB_RESYNC)))
        return tb_fail(TB_BAD_VERSION, "version %llu cannot follow %llu without RESYNC", (unsigned long long)version,
                       (unsigned long long)track->live);
    return TB_OK;
}

static void take_begin(tb_session *s, int64_t now, uint64_t version, const tb_w_begin *begin) {
    tb_track *track = tb_track_of(s, begin->kind);
    s->moving = track->ops ? track : s->moving;
    if (track->ops && version == track->live && begin->flags == 0 && !track->is_empty) {
        committed(s);
        return;
    }
    tb_code code = track->ops ? check_version(track, begin->kind, version, begin->flags) : not_built("W_BEGIN");
    if (code == TB_OK && (track->manifest == 0 || begin->manifest != track->manifest))
        code = tb_fail(TB_BAD_STATE, "W_BEGIN goes by manifest %016llx: %s", (unsigned long long)begin->manifest,
                       track->manifest ? "another one is in force" : "none was accepted");
    if (code == TB_OK)
        code = tb_code_of(track->ops->ws_begin(track->ops->context, version, begin));
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
        s->moving->ops->ws_chunk(s->moving->ops->context, header->subject, chunk->offset, chunk->data.p, chunk->data.n);
    if (status != BR_OK)
        refuse(s, header->version, tb_code_of(status));
    s->moved_ms = now;
}

static void take_ipc(tb_session *s, int64_t now, const tb_header *header, const tb_w_ipc *m) {
    const tb_weights_ops *ops = s->moving->ops;
    br_ipc from = {.offset = m->offset};
    memcpy(from.handle, m->handle.p, sizeof from.handle);
    const br_status status = ops->ws_ipc ? ops->ws_ipc(ops->context, header->subject, &from) : BR_OK;
    if (!ops->ws_ipc || status != BR_OK)
        refuse(s, header->version, ops->ws_ipc ? tb_code_of(status) : not_built("W_IPC"));
    s->moved_ms = now;
}

static void take_end(tb_session *s, int64_t now, br_digest digest) {
    const br_status status = s->moving->ops->ws_end(s->moving->ops->context, digest);
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
                   (unsigned long long)(s->weights == TB_IDLE ? s->moving->live : s->staged)));
}

static void when_idle(tb_session *s, int64_t now, const tb_header *header, const tb_message *m, uint64_t hash) {
    const int is_stale = s->has_refused && header->version == s->refused;
    switch (header->type) {
    case TB_MANIFEST: take_manifest(s, &m->manifest, hash); break;
    case TB_W_BEGIN: take_begin(s, now, header->version, &m->w_begin); break;
    case TB_W_CHUNK:
    case TB_W_IPC:
    case TB_W_END:
        if (!is_stale)
            out_of_place(s, header);
        break;
    case TB_W_COMMIT:
        if (header->version == s->moving->live && !s->moving->is_empty && s->moving->ops)
            committed(s);
        else
            out_of_place(s, header);
        break;
    default: nack(s, header->version, tb_fail(TB_ABORTED, "aborted by the trainer; version %llu serves", (unsigned long long)s->moving->live));
    }
}

static void when_committing(tb_session *s, const tb_header *header) {
    if (header->type == TB_W_COMMIT && header->version == s->staged)
        return;
    const int is_chunk = header->type == TB_W_CHUNK || header->type == TB_W_IPC || header->type == TB_W_END || header->type == TB_W_COMMIT;
    nack(s, header->version, tb_fail(is_chunk ? TB_BAD_STATE : TB_BUSY, "%s while version %llu is being committed", tb_type_name(header->type),
                                     (unsigned long long)s->staged));
}

static void when_staged(tb_session *s, int64_t now, const tb_header *header, const tb_message *m) {
    const int is_ours = header->version == s->staged;
    if (header->type == TB_W_ABORT)
        refuse(s, header->version, tb_fail(TB_ABORTED, "aborted by the trainer; version %llu serves", (unsigned long long)s->moving->live));
    else if (s->weights == TB_RECEIVING && header->type == TB_W_CHUNK && is_ours)
        take_chunk(s, now, header, &m->w_chunk);
    else if (s->weights == TB_RECEIVING && header->type == TB_W_IPC && is_ours)
        take_ipc(s, now, header, &m->w_ipc);
    else if (s->weights == TB_RECEIVING && header->type == TB_W_END && is_ours)
        take_end(s, now, m->w_digest.digest);
    else if (s->weights == TB_PREPARED && header->type == TB_W_COMMIT && is_ours)
        take_commit(s, now);
    else
        out_of_place(s, header);
}

void tb_weights_receive(tb_session *s, int64_t now, const tb_header *header, const tb_message *m, uint64_t payload_hash) {
    if (!s->track[0].ops && !s->track[1].ops)
        nack(s, header->version, not_built(tb_type_name(header->type)));
    else if (header->type == TB_MANIFEST_REQ)
        describe(s, m->manifest_req.adapter);
    else if (s->weights == TB_IDLE)
        when_idle(s, now, header, m, payload_hash);
    else if (s->weights == TB_COMMITTING)
        when_committing(s, header);
    else
        when_staged(s, now, header, m);
    if (header->type == TB_W_CHUNK)
        tb_channel_consumed(&s->channel, header->n_payload);
}

/* What the next trainer is told of what is live. */
static void introduce(tb_session *s) {
    tb_hello *me = &s->channel.opt.me;
    me->live_version = tb_live(s);
    me->adapter = tb_session_live_digest(s);
    me->base = tb_track_of(s, TB_W_FULL)->digest;
}

static void commit(tb_session *s) {
    br_digest digest = {0};
    uint64_t step = 0;
    tb_track *track = s->moving;
    const tb_weights_ops *ops = track->ops;
    const br_status status = ops->ws_commit(ops->context, s->mode, &step, &digest);
    const int is_live = status == BR_OK || step != 0;
    if (status == BR_E_LIMIT && !is_live)
        return;
    s->weights = TB_IDLE;
    if (!is_live) {
        nack(s, s->staged, TB_FAILED);
        ops->ws_abort(ops->context);
        return;
    }
    track->live = s->staged;
    track->digest = digest;
    track->is_empty = 0;
    s->step = step;
    introduce(s);
    if (status != BR_OK) {
        tb_session_fail(s, status);
        return;
    }
    if (s->mode == TB_IN_FLIGHT && track == tb_track_of(s, TB_W_ADAPTER))
        tb_gen_version(s);
    committed(s);
}

void tb_weights_tick(tb_session *s, int64_t now) {
    const int is_staged = s->weights == TB_RECEIVING || s->weights == TB_PREPARED;
    if (is_staged && now - s->moved_ms >= s->opt.stall_ms)
        refuse(s, s->staged, tb_fail(TB_ABORTED, "the transfer of version %llu did not move for %lld ms; version %llu serves",
                                     (unsigned long long)s->staged, (long long)(now - s->moved_ms), (unsigned long long)s->moving->live));
    if (s->weights == TB_COMMITTING && (s->n_running == 0 || s->mode == TB_FINISH_OLD || s->mode == TB_IN_FLIGHT))
        commit(s);
}
