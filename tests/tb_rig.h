/* tb_rig: both ends of a bridge for tests: an engine and weights that are made up, a worker around them, and a trainer's end that sends
 * frames as it likes. No call of Check, so that ranks of an MPI job can use it too: what fails is said by a text. */
#ifndef TB_RIG_H
#define TB_RIG_H

#include "br_hash.h"
#include "br_mem.h"
#include "tb_trainer.h"
#include "tb_worker.h"

#include <stddef.h>

/* A valid message of this type with everything drawn by the seed; texts and words live until the next call. */
void rig_message(const tb_spec *spec, uint64_t seed, tb_message *out);

/* ---- made-up weights of either kind: tensors A (4 x 8), B (8 x 4) and one without elements, bf16, kept as bytes ------------- */

enum { FAKE_TENSORS = 3, FAKE_BYTES = 64 };
typedef enum fake_death { DIE_NEVER, DIE_IN_BEGIN, DIE_IN_CHUNK, DIE_IN_END, DIE_BEFORE_COMMIT, DIE_AFTER_COMMIT } fake_death;

typedef struct fake_weights {
    unsigned char live[2][FAKE_BYTES], staged[2][FAKE_BYTES], seen[2][FAKE_BYTES];
    uint64_t version, step;
    uint32_t flags;
    int busy;         /* ws_begin and ws_commit answer BR_E_LIMIT so often */
    int n_abort, n_commit;
    tb_pause_mode mode; /* of the last commit */
    br_status late;     /* what a commit fails with after the version is live */
    fake_death death; /* where the process kills itself: states are reached by hooks */
} fake_weights;

tb_weights_ops fake_weights_ops(fake_weights *w);
/* The list that it accepts, of an adapter or (TB_W_FULL) as tensors of the base. */
void fake_manifest(uint32_t kind, tb_buffer *raw, tb_message *out);
void fake_version(uint64_t version, unsigned char out[2][FAKE_BYTES]);  /* bytes of a version; never zero */
br_digest fake_digest(unsigned char bytes[2][FAKE_BYTES]);

/* ---- a made-up engine: token i of a request is a number drawn from its uid and i. uid "hold": nothing until it is aborted. A scored
 * one has its adapter's name as uid, and its token at position i is number i. */

enum { FAKE_REQUESTS = 64 };
typedef struct fake_request {
    uint64_t id, uid;
    uint32_t n, n_max; /* of a scored one positions */
    int used, scored, hold, aborted;
} fake_request;

typedef struct fake_engine {
    fake_request request[FAKE_REQUESTS];
    uint64_t n_id;
    int full;     /* submit answers BR_E_LIMIT until the next poll */
    int n_poll;
    int broken;   /* poll fails */
    int asleep;
    br_versions versions; /* of every request; n_run 0: not found */
} fake_engine;

tb_engine_ops fake_engine_ops(fake_engine *e);
uint32_t fake_token(uint64_t uid, uint32_t i);
uint32_t fake_logprob(uint64_t uid, uint32_t i);
uint64_t fake_uid(const char *uid);

/* ---- a worker around them ---------------------------------------------------------------------------------------------------- */

typedef struct rig_worker {
    fake_weights weights, full;
    fake_engine engine;
    tb_weights_ops weights_ops, full_ops;
    tb_engine_ops engine_ops;
    tb_session *session;
} rig_worker;

enum { RIG_DEAD_MS = 1500, RIG_STALL_MS = 700, RIG_GRANT_BYTES = 1 << 16 };
tb_hello rig_hello(tb_role role);
tb_session_options rig_session_options(rig_worker *w);
br_status rig_worker_open(rig_worker *w);
void rig_worker_close(rig_worker *w);

typedef struct rig_outcome {
    uint32_t weights;
    uint64_t live;
    int code, n_abort;
    int64_t ms; /* from the beginning of the connection to its end */
} rig_outcome;
rig_outcome rig_serve(rig_worker *w, tb_transport *t, int64_t beat_ms); /* one connection */

/* ---- a trainer's end that says what it is told -------------------------------------------------------------------------------- */

typedef struct rig_peer {
    tb_transport *t;
    uint64_t sequence, session;
    tb_frame *frame; /* the last one expected */
    tb_message message;
    char text[512];  /* what went wrong */
} rig_peer;

void rig_peer_open(rig_peer *p, tb_transport *t);
void rig_peer_close(rig_peer *p);
int rig_say(rig_peer *p, tb_type type, uint64_t version, uint64_t subject, const tb_message *m); /* 1: sent */
int rig_say_batch(rig_peer *p, const tb_batch *batch); /* as it is */
/* Fields of the header that are 0 are filled in; n is what goes out, whatever the header says. */
int rig_say_raw(rig_peer *p, const unsigned char head[TB_HEADER_BYTES], const void *payload, uint64_t n);
void rig_head(rig_peer *p, tb_type type, uint64_t version, const void *payload, uint64_t n, tb_header *header, unsigned char head[TB_HEADER_BYTES]);
/* The next frame that is none of CREDIT, HEARTBEAT, GEN_PART and GEN_DONE must be of this type. 1: it is, decoded in p->message. */
int rig_expect(rig_peer *p, tb_type type, int64_t wait_ms);
int rig_expect_any(rig_peer *p, int64_t wait_ms); /* any of them; 0: none, or the end (p->frame says which) */

/* States of a worker that a fault can meet. */
typedef enum rig_state { AT_GREETING, AT_IDLE, AT_RECEIVING, AT_PREPARED, AT_COMMITTING, RIG_STATES } rig_state;
extern const char *const rig_state_name[RIG_STATES];
/* Drives the worker at the other end there: version 1 under way, in RECEIVING tensor 0 is in. AT_COMMITTING waits for request 900. */
int rig_reach(rig_peer *p, rig_state state);
int rig_say_begin(rig_peer *p, uint64_t version, uint32_t flags);
int rig_say_full(rig_peer *p, uint64_t version, uint32_t flags); /* W_BEGIN of full weights, by the manifest that is accepted */
int rig_say_score(rig_peer *p, uint64_t id, const char *adapter);
int rig_say_chunk(rig_peer *p, uint64_t version, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n);
int rig_say_end(rig_peer *p, uint64_t version, br_digest digest);
int rig_say_request(rig_peer *p, uint64_t id, const char *uid, uint32_t max_new, uint32_t flags);

#endif
