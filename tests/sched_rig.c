/* See sched_rig.h. */
#include "sched_rig.h"

enum { TOK_MAX = 1024 };

sched *rig;
int32_t rig_total[RIG_ID_MAX];

const sched_options RIG_BASE = {.n_seq_max = 4, .chunk_tokens = 64, .n_page = 32, .n_state = 16, .n_queue_max = 16,
                                .n_tok_max = 512, .state_every = 64, .prefix_cache = 1};

void rig_open(sched_options options) {
    CHECK_OK(sched_open(&options, &rig));
}

const int32_t *rig_tokens(int32_t stream) {
    static int32_t token[TOK_MAX];
    for (int32_t i = 0; i < TOK_MAX; i++)
        token[i] = (int32_t)(test_mix((uint64_t)(stream * TOK_MAX + i)) % 50000);
    return token;
}

br_status rig_try_submit(uint64_t id, int32_t stream, int32_t n_prompt, int32_t max_new) {
    sched_request r = {.id = id, .token = rig_tokens(stream), .n_prompt = n_prompt, .max_new = max_new, .root = {5, 6}};
    return sched_submit(rig, &r);
}

void rig_submit(uint64_t id, int32_t stream, int32_t n_prompt, int32_t max_new) {
    rig_total[id] = n_prompt + max_new;
    CHECK_OK(rig_try_submit(id, stream, n_prompt, max_new));
}

const sched_plan *rig_plan(void) {
    const sched_plan *plan = sched_plan_step(rig);
    CHECK_OK(sched_check(rig));
    return plan;
}

void rig_answer(const sched_plan *plan, uint64_t fail) {
    sched_outcome outcome[RIG_ID_MAX];
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        int ends = seg->sample && seg->pos + seg->n_tok + 1 == rig_total[seg->id];
        outcome[i] = (sched_outcome){.verdict = seg->id == fail ? SCHED_FAIL : ends ? SCHED_END : SCHED_GO_ON,
                                     .token = (int32_t)seg->id};
    }
    CHECK_OK(sched_result(rig, outcome, plan->n_seg));
    CHECK_OK(sched_check(rig));
}

int64_t rig_drive(void) {
    int64_t n_row = 0;
    while (sched_n_left(rig)) {
        const sched_plan *plan = rig_plan();
        n_row += plan->n_row;
        ck_assert_int_gt(plan->n_row, 0);
        rig_answer(plan, RIG_NOBODY);
    }
    return n_row;
}

void rig_check_seg(const sched_plan *plan, int32_t i, uint64_t id, int32_t pos, int32_t n_tok) {
    ck_assert_int_lt(i, plan->n_seg);
    const sched_seg *seg = &plan->seg[i];
    ck_assert_msg(seg->id == id && seg->pos == pos && seg->n_tok == n_tok,
                  "segment %d: request %d at %d, %d rows; wanted %d at %d, %d rows", i, (int)seg->id, seg->pos, seg->n_tok,
                  (int)id, pos, n_tok);
}

int32_t rig_indexed_count(void) {
    int32_t n = 0;
    for (int32_t i = 0; i < rig->opt.n_page; i++)
        n += kv_page_indexed(&rig->kv, i);
    return n;
}
