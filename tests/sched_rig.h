/* sched_rig: one scheduler driven by hand, for the suites that look at single plans. */
#ifndef SCHED_RIG_H
#define SCHED_RIG_H

#include "br_hash.h"
#include "br_mem.h"
#include "sched_core.h"
#include "test_support.h"

enum { RIG_ID_MAX = 128, RIG_NOBODY = RIG_ID_MAX };

extern sched *rig;
extern int32_t rig_total[RIG_ID_MAX]; /* tokens of each request, prompt and response: the last one ends it */
extern const sched_options RIG_BASE;

void rig_open(sched_options options);
/* RIG_OPEN(o_.n_page = 3): the base options with these changes. */
#define RIG_OPEN(...) rig_open(({ sched_options o_ = RIG_BASE; __VA_ARGS__; o_; }))

const int32_t *rig_tokens(int32_t stream); /* (1024), valid until the next call */
br_status rig_try_submit(uint64_t id, int32_t stream, int32_t n_prompt, int32_t max_new);
void rig_submit(uint64_t id, int32_t stream, int32_t n_prompt, int32_t max_new);
const sched_plan *rig_plan(void); /* the next plan, invariants checked */
/* Every segment goes on until its request has all its tokens, which are its id; the one of `fail` fails. */
void rig_answer(const sched_plan *plan, uint64_t fail);
int64_t rig_drive(void); /* until nothing is left; rows computed */
void rig_check_seg(const sched_plan *plan, int32_t i, uint64_t id, int32_t pos, int32_t n_tok);
int32_t rig_indexed_count(void); /* pages in the index */

#endif
