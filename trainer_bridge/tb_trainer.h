/* tb_trainer: the trainer's side of the bridge, for the Python package (through ctypes) and for the tests. Calls wait, with deadlines;
 * a thread keeps the connection alive while the caller computes.
 *
 * Layer: trainer_bridge; includes base. One thread at a time. Sentences are br_last_error(). */
#ifndef TB_TRAINER_H
#define TB_TRAINER_H

#include "tb_channel.h"
#include "tb_link.h"

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

typedef struct tb_trainer_options {
    tb_hello me;          /* digests, rank and alpha that must be the worker's; role is set here */
    uint64_t grant_bytes; /* results that may wait here [16 MiB] */
    int64_t beat_ms;      /* [1,000]; below 0: no thread */
    int64_t dead_ms;      /* [10,000] */
    int64_t wait_ms;      /* deadline of the greeting (a worker may have to load first) and of every wait for credit [10,000] */
} tb_trainer_options;

typedef struct tb_trainer tb_trainer;

/* Greets over t, which it owns, also on error. BR_E_MISMATCH: it runs another contract, model or tokenizer, or takes no
 * such adapters. BR_E_LIMIT: the worker serves another trainer.
 * BR_E_IO: it is lost or silent. BR_E_FORMAT: it does not keep the protocol. */
br_status tb_trainer_open(tb_transport *t, const tb_trainer_options *options, tb_trainer **out);
/* What the worker said of itself: live version and adapter digest are what a restarted trainer goes on from. Its alpha is not kept. */
const tb_hello *tb_trainer_worker(const tb_trainer *tr);

int64_t tb_trainer_requests(const tb_trainer *tr); /* that may be sent now, without waiting */

/* Messages are gathered and go out in batches: when one is full, by tb_trainer_flush, before any wait of tb_trainer_next or for credit.
 * So what is asked for together reaches the worker together. A paid message or a request waits for credit, BR_E_LIMIT after wait_ms
 * without.
 * tb_trainer_send sends only what a worker can take in: BR_E_ARG, with the field's name, for a type that a trainer does not send, a number
 * or a length out of its bounds, a text with a zero byte, or a list of tensors that is none. Nothing has gone out then, and the connection
 * lives on. */
br_status tb_trainer_send(tb_trainer *tr, tb_type type, uint64_t version, uint64_t subject, const tb_message *message);
br_status tb_trainer_send_payload(tb_trainer *tr, uint32_t type, uint64_t version, uint64_t subject, const void *payload, uint64_t n);
br_status tb_trainer_flush(tb_trainer *tr);
br_status tb_trainer_send_chunk(tb_trainer *tr, uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n);

/* A message of the worker, in order; its bytes are granted again when it is handed out, by the quarter of grant_bytes. */
typedef struct tb_event {
    tb_header header;
    const unsigned char *payload; /* (header.n_payload) until the next call of tb_trainer_next */
    tb_message message;           /* decoded; points into payload */
} tb_event;
/* BR_E_NOT_FOUND: nothing came within wait_ms. BR_E_ABORTED: the worker said BYE. Else the connection is over. */
br_status tb_trainer_next(tb_trainer *tr, int64_t wait_ms, tb_event *out);
tb_code tb_trainer_end(const tb_trainer *tr); /* why the connection is over, in the codes of the wire */
/* 1: BYE is said first. NULL is a no-op. */
void tb_trainer_close(tb_trainer *tr, int bye);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
