/* The trainer's side of the bridge; see tb_trainer.h. Layer: trainer_bridge. */
#include "tb_trainer.h"

#include "br_mem.h"

#include <string.h>
#include <sys/random.h>

enum { WAIT_MS = 10000, LAST_WORDS_MS = 500, SLICE_MS = 100 /* silence is looked for so often */, GRANT_BYTES = 16 << 20 };

/* A message that came while the caller waited for credit. */
typedef struct waiting {
    struct waiting *next;
    tb_frame *frame;
} waiting;

struct tb_trainer {
    tb_trainer_options opt;
    tb_link *link;
    tb_channel channel;
    tb_buffer scratch;
    waiting *first, **end;
    tb_frame *shown; /* of the event handed out last */
};

static int64_t or_else(int64_t given, int64_t otherwise) {
    return given ? given : otherwise;
}

static br_status over(const tb_trainer *tr) {
    const tb_channel *c = &tr->channel;
    const br_status status = c->end == TB_OK ? BR_E_ABORTED : c->end == TB_DIFFERS ? BR_E_MISMATCH : c->end == TB_BUSY ? BR_E_LIMIT :
                             c->end == TB_LOST || c->end == TB_SILENT ? BR_E_IO : BR_E_FORMAT;
    return br_fail(status, "%s", c->sentence);
}

static br_status send_all(tb_trainer *tr) {
    const unsigned char *payload;
    tb_header header;
    br_status status = BR_OK;
    for (size_t at = 0; status == BR_OK && tb_out_next(&tr->channel, &at, &header, &payload);)
        status = tb_link_put(tr->link, &header, payload, header.n_payload);
    tb_out_clear(&tr->channel);
    return status == BR_OK ? tb_link_flush(tr->link) : status;
}

/* One frame, into the channel, if one comes within wait_ms or a slice; what was gathered goes out first. Messages for the caller are kept
 * in order. */
static br_status step(tb_trainer *tr, int64_t wait_ms) {
    tb_channel *c = &tr->channel;
    tb_message m;
    waiting *w;
    (void)tb_link_flush(tr->link); /* of a failure the stream's end says more */
    tb_frame *frame = tb_link_receive(tr->link, wait_ms < SLICE_MS ? wait_ms : SLICE_MS);
    if (!frame) {
        if (tb_link_ended(tr->link))
            tb_channel_close(c, TB_LOST, "the stream ended");
        tb_channel_tick(c, tb_now_ms(), tb_link_heard(tr->link));
    } else if (frame->fault != TB_OK) {
        tb_channel_close(c, frame->fault, frame->sentence);
        tb_frame_free(frame);
    } else if (!tb_channel_receive(c, frame->at_ms, &frame->header, frame->payload, frame->n, &m)) {
        tb_frame_free(frame);
    } else if (br_mem_alloc((void **)&w, sizeof *w, "a message") != BR_OK) {
        tb_frame_free(frame);
        tb_channel_close(c, TB_FAILED, br_last_error());
    } else {
        w->frame = frame;
        *tr->end = w;
        tr->end = &w->next;
    }
    (void)send_all(tr);
    return c->phase == TB_CLOSED ? over(tr) : BR_OK;
}

/* A send failed: the worker may have said why before it closed. */
static br_status take_last_words(tb_trainer *tr) {
    for (const int64_t last = tb_now_ms() + LAST_WORDS_MS; tb_now_ms() < last && step(tr, 1) == BR_OK;)
        continue;
    tb_channel_close(&tr->channel, TB_LOST, "the worker took no more");
    return over(tr);
}

static br_status draw_session(uint64_t *out) {
    do {
        if (getrandom(out, sizeof *out, 0) != sizeof *out)
            return br_fail(BR_E_IO, "the system gives no random bytes for a session number");
    } while (*out == 0);
    return BR_OK;
}

static br_status greet(tb_trainer *tr) {
    tb_channel_open(&tr->channel, tb_now_ms());
    br_status status = send_all(tr) == BR_OK ? BR_OK : take_last_words(tr);
    while (status == BR_OK && tr->channel.phase == TB_GREETING)
        status = step(tr, tr->opt.wait_ms);
    if (status == BR_OK)
        tb_link_greeted(tr->link);
    return status;
}

br_status tb_trainer_open(tb_transport *t, const tb_trainer_options *options, tb_trainer **out) {
    tb_trainer *tr;
    *out = NULL;
    br_status status = br_mem_alloc((void **)&tr, sizeof *tr, "a trainer's bridge");
    if (status != BR_OK) {
        tb_transport_close(t);
        return status;
    }
    tr->opt = *options;
    tr->opt.wait_ms = or_else(options->wait_ms, WAIT_MS);
    tr->end = &tr->first;
    tr->channel.opt = (tb_channel_options){.me = options->me, .dead_ms = or_else(options->dead_ms, TB_DEAD_MS), .greet_ms = tr->opt.wait_ms,
                                           .grant_bytes = options->grant_bytes ? options->grant_bytes : GRANT_BYTES};
    tr->channel.opt.me.role = TB_TRAINER;
    const int64_t beat = or_else(options->beat_ms, TB_BEAT_MS);
    BR_TRY_GOTO(tb_link_open(t, beat > 0 ? beat : 0, tr->channel.opt.dead_ms, &tr->link), fail);
    BR_TRY_GOTO(draw_session(&tr->channel.opt.session), fail);
    BR_TRY_GOTO(greet(tr), fail);
    *out = tr;
    return BR_OK;
fail:
    tb_trainer_close(tr, 0);
    return status;
}

const tb_hello *tb_trainer_worker(const tb_trainer *tr) {
    return &tr->channel.peer;
}

tb_code tb_trainer_end(const tb_trainer *tr) {
    return tr->channel.phase == TB_CLOSED ? tr->channel.end : TB_OK;
}

void tb_trainer_close(tb_trainer *tr, int bye) {
    if (!tr)
        return;
    if (bye && tr->link && tr->channel.phase == TB_OPEN) {
        tb_channel_close(&tr->channel, TB_OK, "the trainer is done");
        (void)send_all(tr);
    }
    while (tr->first) {
        waiting *next = tr->first->next;
        tb_frame_free(tr->first->frame);
        br_mem_free(tr->first);
        tr->first = next;
    }
    tb_frame_free(tr->shown);
    tb_link_close(tr->link);
    tb_channel_free(&tr->channel);
    tb_buffer_close(&tr->scratch);
    br_mem_free(tr);
}

/* ---- sending ------------------------------------------------------------------------------------------------------------- */

static int has_credit(const tb_channel *c, const tb_spec *spec) {
    const int asks = spec->type == TB_GEN_REQ || spec->type == TB_SCORE_REQ;
    return (!spec->paid || c->may_bytes > 0) && (!asks || c->may_requests > 0);
}

int64_t tb_trainer_requests(const tb_trainer *tr) {
    return tr->channel.may_requests;
}

br_status tb_trainer_flush(tb_trainer *tr) {
    if (tr->channel.phase != TB_OPEN)
        return over(tr);
    return tb_link_flush(tr->link) == BR_OK ? BR_OK : take_last_words(tr);
}

br_status tb_trainer_send_payload(tb_trainer *tr, uint32_t type, uint64_t version, uint64_t subject, const void *payload, uint64_t n) {
    tb_channel *c = &tr->channel;
    const tb_spec *spec = tb_spec_of(type);
    const int64_t until = tb_now_ms() + tr->opt.wait_ms;
    if (!spec || n > TB_PAYLOAD_MAX)
        return br_fail(BR_E_ARG, "message type %u with %llu bytes: no such type, or more than a frame holds", type, (unsigned long long)n);
    while (c->phase == TB_OPEN && !has_credit(c, spec)) {
        const int64_t left = until - tb_now_ms();
        if (left <= 0)
            return br_fail(BR_E_LIMIT, "%s: the worker granted no credit within %lld ms", spec->name, (long long)tr->opt.wait_ms);
        BR_TRY(step(tr, left));
    }
    if (c->phase != TB_OPEN)
        return over(tr);
    const tb_header header = {.type = (uint16_t)type, .session = c->session, .version = version, .subject = subject};
    if (tb_link_put(tr->link, &header, payload, n) != BR_OK)
        return take_last_words(tr);
    tb_channel_spend(c, spec->type, n);
    return BR_OK;
}

/* The payload, into scratch, if a worker can decode it: else that would end the connection. */
static br_status encode(tb_trainer *tr, tb_type type, const tb_message *message) {
    tb_message decoded;
    tb_code code = tb_message_check(type, message);
    if (code == TB_OK && !(tb_spec_of(type)->from & TB_TRAINER))
        code = tb_fail(TB_BAD_DIRECTION, "%s is the worker's to say", tb_type_name(type));
    tr->scratch.n = 0;
    if (code == TB_OK)
        tb_message_encode(type, message, &tr->scratch);
    BR_TRY(tr->scratch.failed);
    if (code == TB_OK)
        code = tb_message_decode(type, tr->scratch.bytes, tr->scratch.n, &decoded);
    return code == TB_OK ? BR_OK : br_fail(BR_E_ARG, "%s", br_last_error());
}

br_status tb_trainer_send(tb_trainer *tr, tb_type type, uint64_t version, uint64_t subject, const tb_message *message) {
    BR_TRY(encode(tr, type, message));
    return tb_trainer_send_payload(tr, type, version, subject, tr->scratch.bytes, tr->scratch.n);
}

br_status tb_trainer_send_chunk(tb_trainer *tr, uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n) {
    const tb_message m = {.w_chunk = {.offset = offset, .data = {bytes, n}}};
    return tb_trainer_send(tr, TB_W_CHUNK, version, tensor, &m);
}

/* ---- receiving ----------------------------------------------------------------------------------------------------------- */

static void show_first(tb_trainer *tr, tb_event *out) {
    waiting *w = tr->first;
    tb_frame_free(tr->shown);
    tr->shown = w->frame;
    tr->first = w->next;
    tr->end = tr->first ? tr->end : &tr->first;
    br_mem_free(w);
    out->header = tr->shown->header;
    out->payload = tr->shown->payload;
    const tb_code code = tb_message_decode(out->header.type, tr->shown->payload, tr->shown->n, &out->message);
    BR_ASSERT(code == TB_OK);
    if (tb_spec_of(out->header.type)->paid)
        tb_channel_consumed(&tr->channel, tr->shown->n);
    (void)send_all(tr);
}

br_status tb_trainer_next(tb_trainer *tr, int64_t wait_ms, tb_event *out) {
    const int64_t until = tb_now_ms() + wait_ms;
    while (!tr->first) {
        const int64_t left = until - tb_now_ms();
        if (tr->channel.phase != TB_OPEN)
            return over(tr);
        BR_TRY(step(tr, left > 0 ? left : 0));
        if (!tr->first && left <= 0)
            return br_fail(BR_E_NOT_FOUND, "the worker sent nothing for %lld ms", (long long)wait_ms);
    }
    show_first(tr, out);
    return BR_OK;
}
