/* engine_parts: what is behind br_engine, and the inner calls that `dump` and the tests use. Internal to src/engine. */
#ifndef ENGINE_PARTS_H
#define ENGINE_PARTS_H

#include "br_sched.h"
#include "draw.h"
#include "engine_swap.h"
#include "score_rows.h"
#include "step_rows.h"

enum { ENGINE_GRAPH_MAX = 256 };
enum { ENGINE_ERROR_BYTES = 192, ENGINE_INDEX_BITS = 16, ENGINE_REQUEST_MAX = 1 << ENGINE_INDEX_BITS };

/* A request from submit until its last token is handed out and the next poll begins. */
typedef struct engine_request {
    uint64_t id; /* 0: free */
    bi_sampling setting; /* for the sampler */
    int32_t first, n_new;  /* position of the first token that is handed out; how many were */
    int32_t score_from;    /* as submitted */
    br_sampling sampling;  /* as submitted: where the text ends */
    const int32_t *forced; /* NULL, or max_new tokens that are taken instead of drawn ones; the caller's */
    int32_t slot;          /* adapter slot of its rows, -1 base */
    br_versions versions;
    int32_t ended;
    br_status error;
    char sentence[ENGINE_ERROR_BYTES];
    int32_t n_top;
    br_top_logprob top[BR_TOP_LOGPROBS_MAX];
} engine_request;

/* A decode step of one shape, recorded the second time it comes: the first run loads what the ops need. */
typedef struct engine_graph {
    int32_t n_row, pos_max;
    br_graph *graph; /* NULL: was seen once */
} engine_graph;

struct br_engine {
    br_loaded loaded;
    br_engine_options options; /* defaults filled in */
    int32_t n_tok_max;         /* the longest sequence of caller and model, in a cache that has the pages for it */
    sched *sched;
    engine_request *request; /* (n_request_max) */
    int32_t n_request_max;
    uint64_t n_submitted;
    br_digest *root;         /* (n_slot + 1) of slot - 1: what prefixes are bound to */
    engine_swap *swap;       /* NULL without swap_rank */
    /* tokens to hand out */
    br_token *queue; /* (n_queue_max) ring */
    int32_t n_queue_max, queue_first, queue_count;
    /* one step */
    step_rows rows;
    draw draw;             /* of the rows that sample, at most one a sequence */
    int32_t *sample_seg;
    score_rows score;      /* of rows whose tokens are given */
    br_mirror fault;       /* (max_seqs) bi_first_fault of each segment */
    sched_outcome *outcome;
    unsigned char *pages, *states; /* caches, device */
    engine_graph graph[ENGINE_GRAPH_MAX];
    int32_t n_graph;
    br_arena arena;
    const br_trace *trace;     /* NULL: nobody watches */
    const sched_plan *plan;    /* of the step that runs, for the watcher: which sequence a row belongs to */
    int32_t peak_seqs;         /* the most segments that a plan had */
    br_status broken;          /* a step failed as a whole */
};

/* One step: plan, copies, forward, sampling, outcomes; tokens go to the queue. */
br_status engine_step(br_engine *engine);
void engine_push(br_engine *engine, const br_token *token);
void engine_push_end(br_engine *engine, const engine_request *request, br_stop_reason stop); /* an end without a token */
/* Where a request is held: its id is serial << ENGINE_INDEX_BITS | index. */
static inline int32_t engine_request_index(uint64_t id) { return (int32_t)(id & (ENGINE_REQUEST_MAX - 1)); }
engine_request *engine_find(const br_engine *engine, uint64_t id); /* NULL: not held */
void engine_end(engine_request *request, br_status error);
/* What prefixes under a slot are bound to: equal weights, adapter and contract. epoch, nonzero where adapters are swapped, sets them apart
 * further. */
void engine_bind_root(br_engine *engine, int32_t slot, uint64_t epoch);
void engine_bind_roots(br_engine *engine); /* of all slots, after other base weights */

/* br_submit with the response given: position by position the tokens `response` (max_new of the sampling) are taken instead of
 * drawn. `response` must live until the request ends. */
br_status engine_submit_forced(br_engine *engine, const br_request *request, const int32_t *response, uint64_t *id);

#endif
