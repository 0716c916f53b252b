/* sim_sched: random schedules for the scheduler, run on a device that stores hashes instead of latent rows and states.
 *
 * A case is drawn from one seed: options, prompts, arrival steps, aborts, failures, stop points. The device does what an
 * engine does with a plan, but a cell (page, position) holds the hash of the token prefix that ends there, a state the hash
 * of the prefix it stands for, both bound to the request's root. Before each segment every earlier cell of the sequence and
 * its live state are compared with the hashes of its own tokens: any error of sharing, copying, evicting or preempting shows
 * up as a wrong hash at the first place where a real engine would have read wrong numbers. */
#ifndef SIM_SCHED_H
#define SIM_SCHED_H

#include "br_sched.h"

enum { SIM_REQUEST_MAX = 10, SIM_TOK_MAX = 320, SIM_PAGE_MAX = 48, SIM_STATE_MAX = 16, SIM_SEQ_MAX = 8, SIM_SENTENCE = 256 };

typedef struct sim_request {
    int32_t token[SIM_TOK_MAX];
    int32_t n_prompt, max_new;
    int32_t score_from;   /* 0: sampled; else the prompt is scored from there on, max_new is 0 */
    int32_t root;         /* which of the case's roots */
    int32_t arrival;      /* the step before whose plan it is submitted (later when the queue is full) */
    int32_t abort_step;   /* aborted at this step, -1 never */
    int32_t abort_inside; /* 1: while that step's plan is in flight */
    int32_t fail_pos;     /* the segment that computes this position fails; -1 never */
    uint64_t text;        /* decides its tokens and where it stops, together with its prefix */
} sim_request;

typedef struct sim_case {
    sched_options opt;
    int32_t n_request, n_vocab;
    sim_request request[SIM_REQUEST_MAX];
} sim_case;

/* What the simulator does wrong on purpose; each kind must be noticed. */
typedef enum sim_fault {
    SIM_FAULT_NONE,
    SIM_FAULT_SKIP_PAGE_COPY,
    SIM_FAULT_SKIP_STATE_COPY,
    SIM_FAULT_SKIP_KEEP,
    SIM_FAULT_EARLY_KEEP,    /* states are kept before the forward instead of after */
    SIM_FAULT_LATE_COPY,     /* pages are copied after the forward instead of before */
    SIM_FAULT_TABLE_ENTRY,   /* one block table entry is one page too high */
    SIM_FAULT_STATE_INDEX,   /* two slots have their states exchanged */
    SIM_FAULT_STALE_TABLE,   /* the block table of the step before is used */
    SIM_FAULT_POSITION,      /* a segment begins one position too late */
    SIM_FAULT_SHARED_ROOT,   /* the scheduler is told one root for requests of different roots */
    SIM_FAULT_HIDDEN_FAIL,   /* a failed segment is reported as computed */
    SIM_FAULT_LOST_TOKEN,    /* a sampled token is reported wrongly */
    SIM_FAULT_COUNT
} sim_fault;

typedef struct sim_report {
    int32_t n_step, n_ended, n_aborted, n_failed, n_planted;
    uint64_t plan_hash;   /* of every plan of the run */
    sched_stats stats;
    char sentence[SIM_SENTENCE]; /* what was found */
} sim_report;

void sim_case_draw(uint64_t seed, sim_case *out);
/* 1: the schedule ran to its end and every check held. */
int sim_case_run(const sim_case *c, uint64_t seed, sim_fault fault, sim_report *report);

#endif
