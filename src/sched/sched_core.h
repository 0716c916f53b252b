/* sched_core: the scheduler's own structures. Layer: sched; private to src/sched. */
#ifndef SCHED_CORE_H
#define SCHED_CORE_H

#include "br_kv.h"
#include "br_sched.h"

/* One request held. Numbers of this array are called seq; the list it is in tells its phase: waiting ring, running, or
 * neither (free). */
typedef struct sched_seq {
    uint64_t id, arrival; /* arrival rises by one a request */
    uint64_t prefix_hash; /* of root and the first n_prefix tokens: equal for what could be shared there */
    br_digest root;
    int32_t *token;       /* (n_tok_max) prompt, then what was sampled */
    int32_t n_prompt, max_new, adapter;
    int32_t n_prefix;     /* positions before the first row that is asked for */
    int32_t n_done;       /* the most positions computed so far: rows that are not asked for again */
    int32_t n_tok;        /* tokens known */
    int32_t slot;         /* -1: waiting */
    int32_t pos;          /* positions computed; the next to run */
    int32_t n_block;      /* entries of its block table row */
    int32_t n_indexed;    /* leading blocks that are full nodes of the index */
    int32_t n_row;        /* rows in this plan */
    int32_t keep;         /* state that this plan's keep fills; -1 */
    int32_t n_sampled;    /* since it was started last */
    int32_t aborted;      /* while in the plan: ends at its result */
} sched_seq;

struct sched {
    sched_options opt;
    kv_cache kv;
    sched_seq *seq;      /* (n_queue_max) */
    kv_pool seq_pool;
    kv_ring waiting;     /* seq, by arrival */
    int32_t *running;    /* (n_seq_max) seq, by arrival */
    int32_t n_running;
    int32_t *table;      /* (n_seq_max, table_ld) */
    int32_t table_ld;
    int32_t *state_index; /* (n_seq_max) -1: empty slot */
    int32_t *path;       /* (table_ld + 1) pages of a look-up */
    int32_t *leader;     /* (n_seq_max) running seq that have not reached n_prefix; made for each plan */
    int32_t n_leader;
    uint64_t n_arrived;
    int32_t in_flight;   /* a plan waits for its result */
    sched_plan plan;
    sched_seg *seg;      /* (n_seg_max); all plan arrays have n_seq_max places */
    int32_t *seg_seq;    /* seq of each segment */
    sched_copy *page_copy, *state_copy, *keep;
    int32_t *page_held, *state_held; /* scratch of sched_check */
    sched_stats stats;
};

static inline int32_t sched_block_count(int32_t n_tok) { return (n_tok + BR_PAGE_TOK - 1) / BR_PAGE_TOK; }
static inline int32_t *sched_row_of(const sched *s, const sched_seq *q) {
    return s->table + (size_t)q->slot * (size_t)s->table_ld;
}

/* A running sequence gives back its slot, pages and states; it is in no list afterwards. */
void sched_release(sched *s, int32_t seq);
/* Into the waiting ring at the place of its arrival. */
void sched_enqueue(sched *s, int32_t seq);

#endif
