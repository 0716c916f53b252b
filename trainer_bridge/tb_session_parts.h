/* tb_session_parts: the session's own structures. Layer: trainer_bridge; private to tb_session*.c. */
#ifndef TB_SESSION_PARTS_H
#define TB_SESSION_PARTS_H

#include "tb_session.h"

typedef enum gen_phase {
    GEN_FREE,
    GEN_WAITING,    /* the engine does not know it yet */
    GEN_RUNNING,
    GEN_SENDING,    /* ended; parts and GEN_DONE go out as credit allows */
    GEN_UNRELEASED, /* the trainer has all but the log-probs */
    GEN_RELEASED,   /* they go out as credit allows */
    GEN_SCORED,     /* ended; the answer to SCORE_REQ goes out as credit allows */
    GEN_ORPHAN      /* aborted, its trainer is gone; the engine still owes its last token */
} gen_phase;

typedef struct gen_slot {
    gen_phase phase;
    uint64_t id, engine_id, version; /* version: that its next token comes from */
    uint64_t adapter; /* 0: base; else a hash of the name */
    int scored;       /* SCORE_REQ: token is not used, logprob is by position */
    uint32_t flags, n_max, n_tok, n_sent;
    uint32_t *token, *logprob; /* (n_max) */
    tb_buffer request;         /* the payload of GEN_REQ or SCORE_REQ while it waits */
    uint64_t ticket;           /* order of arrival */
    int64_t unsent_ms;         /* since when the oldest token waits to be sent */
    uint32_t run[3 * TB_RUN_MAX], n_run, n_booked; /* n_booked: tokens of all runs; above n_tok while the engine queues some */
    int switched;              /* it went on under another version, perhaps before its first token */
    br_stop_reason stop;
    br_status status;
    br_digest digest, certificate;
    char sentence[256];
} gen_slot;

/* One kind of weights. */
typedef struct tb_track {
    const tb_weights_ops *ops; /* NULL: not built in */
    uint64_t live;
    br_digest digest;  /* of the live version */
    int is_empty;      /* nothing is live yet */
    uint64_t manifest; /* hash of the one in force; 0: none */
} tb_track;

struct tb_session {
    tb_session_options opt;
    tb_channel channel;
    /* weights */
    tb_weights_state weights;
    tb_track track[TB_W_KIND_COUNT]; /* by kind - 1 */
    tb_track *moving;          /* of the transfer under way, else of the last */
    uint64_t staged, step;
    uint64_t refused;          /* a transfer of this version was refused: what comes of it until W_BEGIN is dropped */
    int has_refused;
    int64_t moved_ms;          /* when the transfer last moved */
    /* flow */
    br_status failed;          /* the engine can only be closed; why is in failure */
    char failure[TB_SENTENCE_BYTES];
    int paused, asleep, owes_stats; /* owes_stats: PAUSE is answered when it holds */
    tb_pause_mode mode;
    /* generation */
    gen_slot *slot;   /* (n_request_max) */
    int32_t n_used;   /* those behind are free */
    int32_t expected; /* whose token is likely the next: an engine hands them out in the same order step by step */
    uint64_t n_done, n_tok, n_ticket;
    int32_t n_running; /* RUNNING and ORPHAN: what the engine holds */
    int engine_full;   /* it refused a request until it is polled */
};

/* tb_session.c: the engine failed, br_last_error says how: the trainer is told, and tb_session_pump returns it. */
void tb_session_fail(tb_session *s, br_status status);
/* An ERROR that ends nothing; the sentence is br_last_error(). */
void tb_session_say_error(tb_session *s, tb_code code, uint64_t subject);

/* tb_session_weights.c: answers a weight message; drops what is staged; tries to commit. */
void tb_weights_receive(tb_session *s, int64_t now, const tb_header *header, const tb_message *m, uint64_t payload_hash);
void tb_weights_drop(tb_session *s);
void tb_weights_tick(tb_session *s, int64_t now);
static inline tb_track *tb_track_of(tb_session *s, uint32_t kind) { return &s->track[kind - 1]; }
static inline uint64_t tb_live(const tb_session *s) { return s->track[TB_W_ADAPTER - 1].live; } /* of the adapter */

/* tb_session_gen.c */
void tb_gen_receive(tb_session *s, int64_t now, const tb_header *header, const void *payload, const tb_message *m);
void tb_gen_submit_waiting(tb_session *s); /* unless paused, asleep or committing */
void tb_gen_stop_all(tb_session *s);       /* running and waiting ones */
void tb_gen_orphan_all(tb_session *s);     /* the trainer is gone */
void tb_gen_version(tb_session *s);        /* running sequences go on with the live version */
void tb_gen_flush(tb_session *s, int64_t now); /* sends what credit allows */
br_status tb_gen_pump(tb_session *s, int64_t now); /* one step of the engine */
int32_t tb_gen_count(const tb_session *s, gen_phase phase);

#endif
