/* tb_worker: joins a transport, a session and the engine: one connection from greeting to end. Layer: trainer_bridge; includes base
 * and bitroll.h. */
#ifndef TB_WORKER_H
#define TB_WORKER_H

#include "tb_link.h"
#include "tb_session.h"

typedef struct tb_worker_options {
    int64_t beat_ms;  /* 0: no heartbeat thread, for tests */
    int64_t stall_ms; /* how long a send may move nothing */
} tb_worker_options;

/* Serves until the connection ends; why it did is in tb_session_channel(s)->end and ->sentence. Owns and closes t. Afterwards the
 * engine holds no request, and a commit that was ordered is done. Errors: those of the engine, which can then only be closed. */
br_status tb_worker_serve(tb_session *s, tb_transport *t, const tb_worker_options *options);

/* What the process says to its shell: 0 BYE, 3 the trainer is lost or silent, 4 the protocol was broken, 5 HELLO found a difference,
 * 6 the engine failed. */
int tb_worker_exit_code(tb_code end, br_status engine);

/* Generation and scoring by an engine of bitroll.h; the engine stays the caller's. */
tb_engine_ops tb_engine_of(br_engine *engine);

/* Weights by the swaps of bitroll.h: of one adapter of an engine that was opened with swap_rank. Both stay the caller's. */
typedef struct tb_swap {
    br_engine *engine;
    const char *adapter;
    int64_t version; /* under way */
    uint64_t n_commit;
} tb_swap;
tb_weights_ops tb_weights_of(tb_swap *swap);

/* Full weights by br_base of bitroll.h. engine and model_dir, the folder that it was opened on, are the caller's. */
typedef struct tb_base {
    br_engine *engine;
    const char *model_dir;
    br_base *base;    /* from the first manifest on */
    int64_t *place;   /* (n_tensor) which tensor of the base each of the manifest is */
    int64_t n_tensor; /* of the manifest that was accepted last */
    uint64_t n_commit;
} tb_base;
tb_weights_ops tb_full_of(tb_base *base);
void tb_base_close(tb_base *base); /* before the engine */

#endif
