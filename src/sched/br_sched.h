/* br_sched: which tokens of which sequence run in the next step, in which pages, from which state.
 *
 * Layer: sched; includes base and kv. A pure state machine: events in, plans out, integers only; no float, no clock, no
 * thread, no tensor. The same events give the same plans. It never sees a logit, so nothing it decides can depend on one but
 * through the tokens handed to it, and by the contract nothing it decides can move a bit.
 *
 * One step:  plan = sched_plan_step(s);  page_copy in order;  state_copy in order;  forward over seg;  keep in order;
 *            sched_result(s, outcome).   sched_submit and sched_abort may come at any time between.
 *
 * Policy. Requests start in order of arrival (FIFO); only those that wait for an equal prompt's prefill are passed by. Every
 * step gives one row to each decoding sequence, then prefill chunks, oldest first; the oldest running sequence always has a
 * row. When pages run out, idle index entries go first, then the youngest running sequence is preempted: it keeps its
 * tokens, gives everything else back and later resumes by prefill from its deepest prefix hit. The oldest is never preempted
 * for room, and a request that fits alone is the only kind accepted, so every request ends. A request that is scored has all its tokens
 * from the start and ends with the row before its last one; its rows are asked for from score_from - 1 on, so a prefix hit ends there,
 * as at prompt_len - 1 when a response is sampled.
 *
 * Invariants, checked by sched_check together with K-1.. of br_kv.h:
 *   S-1  a waiting request owns no slot, page or state
 *   S-2  running and waiting lists ascend by arrival; a request is in exactly one of them
 *   S-3  a running sequence has computed fewer positions than it has tokens, and owns pages for all of them
 *   S-4  its first n_indexed blocks are full nodes of the index, one the parent of the next, of its root and its tokens;
 *        of the later blocks only the last may be a node, a tail whose tokens are its own
 *   S-5  no page is twice in a sequence; a page outside the index is named by one sequence only
 *   S-6  every planned row writes a page that is its sequence's alone and not in the index
 *   S-7  a planned segment begins at the first position that is not computed, stays within the known tokens, and samples
 *        exactly when it reaches their end
 *   S-8  a plan has at most chunk_tokens rows and one segment a sequence; decode rows come first
 *   S-9  the oldest running sequence is in the plan; a plan is empty only when no request is left
 *   S-10 a keep lies where the plan cut the segment, before the first row that is asked for or at a multiple of state_every, and its
 *        target is owned by nobody else
 *   S-11 without a prefix cache the index is empty and no page has two references */
#ifndef BR_SCHED_H
#define BR_SCHED_H

#include "bitroll.h"
#include "br_status.h"

typedef struct sched sched;

typedef struct sched_options {
    int32_t n_seq_max;     /* sequences that run at once: the slots */
    int32_t chunk_tokens;  /* rows of a step */
    int32_t n_page, n_state;
    int32_t n_queue_max;   /* requests held at once, running ones included */
    int32_t n_tok_max;     /* longest sequence, prompt and response */
    int32_t state_every;   /* keep a state at its multiples, itself a multiple of BR_PAGE_TOK; -1: before the first row asked for only */
    int32_t preempt_every; /* test aid: preempt the youngest at every n-th step; 0: never */
    int32_t prefix_cache;  /* 0: nothing is shared between sequences */
} sched_options;

/* Everything is allocated here, in one block. Errors: BR_E_ARG naming the option, BR_E_NOMEM. *out is NULL on error. */
br_status sched_open(const sched_options *options, sched **out);
void sched_close(sched *s); /* NULL is a no-op */

typedef struct sched_request {
    uint64_t id;          /* unique among the requests held */
    const int32_t *token; /* (n_prompt) the prompt, copied */
    int32_t n_prompt;     /* >= 1 */
    int32_t max_new;      /* >= 1; 0 of one that is scored */
    int32_t score_from;   /* 0: tokens are sampled; 1 .. n_prompt - 1: the prompt's tokens from there on are scored */
    int32_t adapter;      /* slot, -1 base; handed through to the segments */
    br_digest root;       /* of weights, adapter and contract: prefixes are shared only under equal roots */
} sched_request;

/* Errors: BR_E_ARG; BR_E_CAPACITY when prompt and max_new could not run even alone; BR_E_LIMIT when n_queue_max are held. */
br_status sched_submit(sched *s, const sched_request *request);
/* The request is forgotten: at once, or at the sched_result to come when it is part of the plan (its outcome is not looked
 * at). BR_E_NOT_FOUND: no such request, or aborted before. */
br_status sched_abort(sched *s, uint64_t id);
int32_t sched_table_ld(const sched *s); /* the table_ld of every plan */
int32_t sched_n_left(const sched *s); /* requests held, aborted ones of a plan in flight included */

typedef struct sched_copy {
    int32_t src, dst;
} sched_copy;

typedef struct sched_seg {
    uint64_t id;
    int32_t slot;         /* row of the block table, index of state_index */
    int32_t adapter;
    int32_t pos, n_tok;   /* positions pos .. pos + n_tok - 1 of the sequence */
    const int32_t *token; /* (n_tok) their tokens; token - pos is the whole sequence. Valid until sched_result */
    int32_t sample;       /* 1: the last row's logits give the token at position pos + n_tok; of a scored request the last, token[n_tok] */
} sched_seg;

typedef struct sched_plan {
    int32_t n_seg, n_row; /* n_row: sum of n_tok */
    int32_t n_decode;     /* the first n_decode segments have one row each, the last known token of their sequence */
    const sched_seg *seg;
    int32_t n_page_copy, n_state_copy, n_keep;
    const sched_copy *page_copy;  /* before the forward, in this order */
    const sched_copy *state_copy; /* before the forward, in this order */
    const sched_copy *keep;       /* states, after the forward */
    const int32_t *table;         /* (n_seq_max, table_ld) pages; -1: none */
    int32_t table_ld;
    const int32_t *state_index;   /* (n_seq_max) live state of each slot; -1: empty slot */
} sched_plan;

/* The next plan; n_seg 0 exactly when no request is left. Pointers are valid until sched_result. The plan before must have
 * been answered. Never allocates, never fails. */
const sched_plan *sched_plan_step(sched *s);

typedef enum sched_verdict {
    SCHED_GO_ON, /* the segment was computed; a sampled token is appended */
    SCHED_END,   /* the same, and the sequence ends; its token is not looked at */
    SCHED_FAIL   /* NaN or Inf in a row of the segment: the request ends, nothing that this step computed for it is kept */
} sched_verdict;

typedef struct sched_outcome {
    sched_verdict verdict;
    int32_t token; /* of a segment that samples */
} sched_outcome;

/* One outcome a segment of the plan, in its order; n_seg 0 for an empty plan. Errors, before anything is changed: BR_E_ARG
 * (a count that is not the plan's, an unknown verdict, a negative token, SCHED_GO_ON with the max_new-th token). */
br_status sched_result(sched *s, const sched_outcome *outcome, int32_t n_outcome);

typedef struct sched_stats {
    int64_t n_step, n_row;      /* planned */
    int64_t n_hit_tok;          /* positions that started requests did not compute */
    int64_t n_preempt;          /* for room */
    int64_t n_preempt_forced;   /* by preempt_every */
    int64_t n_page_evicted, n_state_evicted;
    int32_t n_running, n_waiting;
    int32_t n_page_free, n_page_idle, n_state_free, n_state_kept;
} sched_stats;
sched_stats sched_stats_of(const sched *s);

/* Walks everything: BR_E_MISMATCH with the id of the first broken invariant in the sentence. May be called at any time. */
br_status sched_check(const sched *s);

#endif
