/* tb_channel: what both sides of a connection agree on, before anything is said about weights or tokens: who they are, that no frame
 * is lost, repeated or damaged, that the other side lives, and how much either may send.
 *
 * Layer: trainer_bridge; includes base. A pure state machine: frames and times in, messages out into a buffer; no clock, no I/O.
 *
 * CLOSED --open--> GREETING --HELLO, HELLO_ACK, equal digests--> OPEN --BYE, a fatal error, silence, loss--> CLOSED
 *
 * Credit: the receiver grants requests and payload bytes. A paid message may be sent while the balance is above zero, and may take it
 * below; so what waits at the receiver is at most the grant and one message. What breaks a rule ends the connection: one side of it
 * does not do what its code says, and nothing that it sends later can be trusted. */
#ifndef TB_CHANNEL_H
#define TB_CHANNEL_H

#include "tb_message.h"

typedef enum tb_phase { TB_CLOSED = 0, TB_GREETING = 1, TB_OPEN = 2 } tb_phase;

typedef struct tb_channel_options {
    tb_hello me;          /* role and texts; texts outlive the channel */
    uint64_t session;     /* trainer: a random number, not 0. worker: takes the trainer's */
    int64_t dead_ms;      /* silence that ends the connection */
    int64_t greet_ms;     /* from the beginning to the greeting, whatever bytes come: the peer may have to load a model first [dead_ms] */
    uint64_t grant_bytes; /* what the peer may send at first */
} tb_channel_options;

enum { TB_BUILD_BYTES = 65, TB_SENTENCE_BYTES = 512 };

typedef struct tb_channel {
    tb_channel_options opt;
    tb_phase phase;
    uint64_t session, expected;      /* sequence number of the next frame */
    int64_t opened_ms, heard_ms;
    int64_t may_requests, may_bytes; /* ours to send */
    int64_t peer_requests, peer_bytes; /* the peer's */
    uint64_t owed_bytes;             /* consumed, not granted again yet */
    uint32_t grant_requests;         /* set by the owner before the peer's HELLO */
    tb_hello peer;                   /* build points to peer_build */
    char peer_build[TB_BUILD_BYTES];
    tb_code end;                     /* why it closed last; TB_OK: BYE, or never open */
    char sentence[TB_SENTENCE_BYTES];
    tb_buffer out;                   /* walked by tb_out_next */
} tb_channel;

void tb_channel_open(tb_channel *c, int64_t now); /* from CLOSED; the trainer says HELLO */
void tb_channel_free(tb_channel *c);
/* Takes in a frame. 1: `message` is decoded and is the owner's to answer. 0: it was for the channel, or it closed the channel. */
int tb_channel_receive(tb_channel *c, int64_t now, const tb_header *header, const void *payload, uint64_t n, tb_message *message);
/* Something of the peer arrived at `at_ms`; closes the channel when it is silent, or does not greet, for too long. */
void tb_channel_tick(tb_channel *c, int64_t now, int64_t at_ms);
/* Ends the connection from this side: ERROR to the peer where it may still listen, nothing when it is lost. TB_OK: BYE. */
void tb_channel_close(tb_channel *c, tb_code code, const char *sentence);

/* Adds a message to what is to be sent; a no-op when CLOSED. Spends credit when it is paid. */
void tb_channel_send(tb_channel *c, tb_type type, uint64_t version, uint64_t subject, const tb_message *message);
void tb_channel_consumed(tb_channel *c, uint64_t n_bytes); /* of a paid message; grants again by the quarter */
void tb_channel_grant(tb_channel *c, uint32_t requests);
void tb_channel_spend(tb_channel *c, tb_type type, uint64_t n_payload); /* of a message that is sent past the buffer */

/* The next message to send; 0 at the end. *at starts at 0. tb_out_clear when all are sent. */
int tb_out_next(const tb_channel *c, size_t *at, tb_header *header, const unsigned char **payload);
void tb_out_clear(tb_channel *c);

#endif
