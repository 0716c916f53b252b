/* tb_session: the worker's side of the bridge, which serves one trainer at a time: weights come in and are committed, requests are
 * generated, credits and pauses are kept.
 *
 * Layer: trainer_bridge; includes base and bitroll.h. A pure state machine: frames and times in, messages into the channel's buffer
 * and calls of two op tables out; no clock, no I/O, no thread. Whoever owns it sends what tb_session_channel(s)->out holds after each
 * call.
 *
 * Weights:  IDLE --W_BEGIN--> RECEIVING --W_END--> PREPARED --W_COMMIT--> COMMITTING --engine at rest--> IDLE, one version later
 *   Any error, abort, stall or loss in RECEIVING or PREPARED drops what was staged: the live version serves on. COMMITTING is past
 *   that point: the commit happens also when the trainer is lost, and HELLO_ACK tells the next one. A version may begin when it is the
 *   live one plus 1, with RESYNC any, with INITIAL version 0 only; the live one itself is answered COMMITTED at once.
 *   An adapter and full weights have versions and manifests of their own; one transfer is under way at a time. Full weights are committed
 *   when no request runs, whatever the mode.
 *   After a W_NACK what is still under way of that transfer is dropped unanswered.
 *
 * Requests: held back (paused, asleep, committing) -> running -> sent whole -> when certifying unreleased until GEN_RELEASE or
 *   GEN_DISCARD. A request keeps its credit until it is gone, so a slow trainer stops admission; tokens wait here, and the engine is not
 *   asked for more, while the trainer grants no bytes.
 *   GEN_ABORT ends what has not ended and changes nothing else: it may cross a GEN_DONE. GEN_DISCARD drops log-probs that are held;
 *   GEN_RELEASE of what is not held is answered by an ERROR of that subject, and the session goes on. Either of the two before the
 *   GEN_DONE breaks the protocol.
 *   A request that is scored goes the same way and is answered whole. It never feeds a certificate: while certifying requests of an adapter
 *   are not released, nothing is scored under that adapter. */
#ifndef TB_SESSION_H
#define TB_SESSION_H

#include "bitroll.h"
#include "tb_channel.h"

typedef enum tb_weights_state { TB_IDLE = 0, TB_RECEIVING = 1, TB_PREPARED = 2, TB_COMMITTING = 3, TB_WEIGHTS_STATE_COUNT = 4 } tb_weights_state;

/* Staging and committing of one kind of weights. Statuses become codes by tb_code_of: BR_E_LIMIT is BUSY, BR_E_MISMATCH a bad digest, BR_E_ARG,
 * BR_E_SHAPE, BR_E_FORMAT, BR_E_NOT_FOUND and BR_E_NAN a bad tensor, BR_E_UNSUPPORTED not built in. Sentences are br_last_error(). */
typedef struct tb_weights_ops {
    void *context;
    br_status (*manifest)(void *context, const tb_manifest *manifest); /* does it fit the model? */
    /* BR_E_LIMIT: sequences still run on the version before the live one. */
    br_status (*ws_begin)(void *context, uint64_t version, const tb_w_begin *begin);
    br_status (*ws_chunk)(void *context, uint64_t tensor, uint64_t offset, const void *bytes, uint64_t n);
    br_status (*ws_end)(void *context, br_digest digest); /* whole, finite, of this digest */
    /* Between engine steps. BR_E_LIMIT: not yet, ask again. digest: of the live memory; of full weights, as staged. A failure
     * that leaves *step not 0 came after the version went live: the engine can then only be closed. */
    br_status (*ws_commit)(void *context, tb_pause_mode mode, uint64_t *step, br_digest *digest);
    void (*ws_abort)(void *context);
    br_status (*ws_live)(void *context, br_digest *digest); /* of the live memory, computed now; NULL: as it was committed */
    br_status (*describe)(void *context, tb_text adapter, tb_buffer *raw, uint32_t *n_tensor); /* of an adapter: what a manifest has to be,
                                                                                                * by tb_tensor_add */
    br_status (*ws_ipc)(void *context, uint64_t tensor, const br_ipc *from); /* a whole tensor; NULL: not built in */
} tb_weights_ops;

/* Generation and scoring. score and sleep may be NULL. */
typedef struct tb_engine_ops {
    void *context;
    br_status (*submit)(void *context, const tb_gen_req *request, uint64_t *id); /* BR_E_LIMIT: later */
    br_status (*cancel)(void *context, uint64_t id); /* its last token comes by poll */
    br_status (*poll)(void *context, br_token *out, int32_t n_max, int32_t *n_out, int32_t *done);
    br_status (*versions)(void *context, uint64_t id, br_versions *out); /* as br_request_versions; NULL: polls leave nothing queued */
    br_status (*error)(void *context, uint64_t id, const char **sentence); /* of a request that ended with BR_STOP_ERROR */
    br_status (*score)(void *context, const tb_score_req *request, uint64_t *id); /* as submit; every position asked for comes by poll */
    br_status (*sleep)(void *context, int asleep);
} tb_engine_ops;

typedef struct tb_session_options {
    tb_channel_options channel;
    const tb_weights_ops *weights; /* of an adapter; NULL: every message of that kind is answered W_NACK, not built in */
    const tb_weights_ops *full;    /* the same of full weights */
    const tb_engine_ops *engine;
    int empty;             /* 1: no adapter is live yet, version 0 is the first to come */
    int32_t n_request_max; /* requests held at once [64] */
    int32_t part_tok;      /* tokens that make a GEN_PART [32] */
    int64_t flush_ms;      /* age at which fewer are sent [50] */
    int64_t stall_ms;      /* a transfer that does not move for so long is dropped [60,000] */
} tb_session_options;

typedef struct tb_session tb_session;

br_status tb_session_open(const tb_session_options *options, tb_session **out); /* BR_E_ARG, BR_E_NOMEM */
void tb_session_close(tb_session *s); /* NULL is a no-op */

void tb_session_connect(tb_session *s, int64_t now); /* a connection begins: the trainer is to greet */
void tb_session_receive(tb_session *s, int64_t now, const tb_header *header, const void *payload, uint64_t n);
/* The stream ended, or something came that is no frame: code and sentence as tb_frame has them. */
void tb_session_broken(tb_session *s, int64_t now, tb_code code, const char *sentence);
/* Time passed; something of the trainer last arrived at heard_ms. Also goes on with whatever waited. */
void tb_session_tick(tb_session *s, int64_t now, int64_t heard_ms);
/* One step of the engine, if tb_session_wants_pump. A failure of the engine itself is returned, after the trainer was told. */
br_status tb_session_pump(tb_session *s, int64_t now);
int tb_session_wants_pump(const tb_session *s);

tb_channel *tb_session_channel(tb_session *s);
tb_stats tb_session_stats(const tb_session *s);
br_digest tb_session_live_digest(const tb_session *s);

#endif
