/* The worker's loop; see tb_worker.h. Layer: trainer_bridge.
 *
 * Everything that has arrived is looked at before time is: after a long step of the engine the trainer's heartbeats lie in the inbox,
 * and it is not taken for dead. */
#include "tb_worker.h"

#include <stdio.h>

enum { IDLE_WAIT_MS = 20, FRAMES_A_TURN = 256 /* so that requests of one batch begin in one step */ };

static void take_frame(tb_session *s, const tb_frame *frame) {
    if (frame->fault != TB_OK)
        tb_session_broken(s, tb_now_ms(), frame->fault, frame->sentence);
    else
        tb_session_receive(s, frame->at_ms, &frame->header, frame->payload, frame->n);
}

/* Before HELLO_ACK goes out: what the trainer says to it may be large. */
static void let_in(tb_session *s, tb_link *link, const tb_frame *frame) {
    if (frame->header.type == TB_HELLO && tb_session_channel(s)->phase == TB_OPEN)
        tb_link_greeted(link);
}

/* A send failed: the peer may have said BYE, or why it closes, before it was gone. */
static void take_last_words(tb_session *s, tb_link *link, const char *failure) {
    tb_channel *c = tb_session_channel(s);
    char sentence[TB_SENTENCE_BYTES];
    tb_frame *frame;
    snprintf(sentence, sizeof sentence, "%s", failure);
    while (c->phase != TB_CLOSED && (frame = tb_link_receive(link, 0))) {
        if (frame->fault == TB_OK)
            take_frame(s, frame);
        tb_frame_free(frame);
        tb_out_clear(c);
    }
    tb_session_broken(s, tb_now_ms(), TB_LOST, sentence);
}

/* Sends all that the session has to say. A failure ends the connection. */
static void send_all(tb_session *s, tb_link *link) {
    tb_channel *c = tb_session_channel(s);
    const unsigned char *payload;
    tb_header header;
    br_status status = BR_OK;
    for (size_t at = 0; status == BR_OK && tb_out_next(c, &at, &header, &payload);)
        status = tb_link_put(link, &header, payload, header.n_payload);
    tb_out_clear(c);
    status = status == BR_OK ? tb_link_flush(link) : status;
    if (status != BR_OK)
        take_last_words(s, link, br_last_error());
}

static void take_arrived(tb_session *s, tb_link *link) {
    int64_t wait = tb_session_wants_pump(s) ? 0 : IDLE_WAIT_MS;
    tb_frame *frame;
    for (int i = 0; i < FRAMES_A_TURN && (frame = tb_link_receive(link, wait)); i++, wait = 0) {
        take_frame(s, frame);
        let_in(s, link, frame);
        tb_frame_free(frame);
    }
    send_all(s, link);
    if (tb_link_ended(link))
        tb_session_broken(s, tb_now_ms(), TB_LOST, "the stream ended");
}

/* Without a trainer: the aborted requests end, a commit that was ordered is done. */
static br_status finish(tb_session *s) {
    br_status status = BR_OK;
    tb_out_clear(tb_session_channel(s));
    while (status == BR_OK && tb_session_wants_pump(s)) {
        status = tb_session_pump(s, tb_now_ms());
        tb_session_tick(s, tb_now_ms(), 0);
    }
    return status;
}

br_status tb_worker_serve(tb_session *s, tb_transport *t, const tb_worker_options *options) {
    tb_channel *c = tb_session_channel(s);
    tb_link *link;
    br_failure failure = {BR_OK, ""}; /* of the engine: a link that fails behind it has sentences of its own */
    BR_TRY(tb_link_open(t, options->beat_ms, options->stall_ms, &link));
    tb_session_connect(s, tb_now_ms());
    while (c->phase != TB_CLOSED && failure.status == BR_OK) {
        take_arrived(s, link);
        tb_session_tick(s, tb_now_ms(), tb_link_heard(link));
        const br_status status = c->phase == TB_CLOSED ? BR_OK : tb_session_pump(s, tb_now_ms());
        if (status != BR_OK)
            failure = br_failure_keep(status);
        send_all(s, link);
    }
    tb_link_close(link);
    return failure.status == BR_OK ? finish(s) : br_fail_again(&failure);
}

int tb_worker_exit_code(tb_code end, br_status engine) {
    if (engine != BR_OK)
        return 6;
    switch (end) {
    case TB_OK: return 0;
    case TB_LOST:
    case TB_SILENT: return 3;
    case TB_DIFFERS: return 5;
    default: return 4;
    }
}
