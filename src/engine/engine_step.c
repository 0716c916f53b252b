/* One step of the engine: plan, copies, forward, sampling, outcomes.
 *
 * The order is fixed by br_sched.h: page and state copies come before the forward, kept states after it. */
#include "engine_parts.h"

#include "sampling.h"

#include <string.h>

static void copy_pages(br_engine *e, const sched_plan *plan) {
    const size_t bytes = br_model_page_bytes(e->loaded.model);
    for (int32_t i = 0; i < plan->n_page_copy; i++)
        memcpy(e->pages + bytes * (size_t)plan->page_copy[i].dst, e->pages + bytes * (size_t)plan->page_copy[i].src, bytes);
}

static void copy_states(br_engine *e, const sched_copy *copy, int32_t n) {
    const size_t bytes = br_model_state_bytes(e->loaded.model);
    for (int32_t i = 0; i < n; i++)
        memcpy(e->states + bytes * (size_t)copy[i].dst, e->states + bytes * (size_t)copy[i].src, bytes);
}

static void lay_out_rows(br_engine *e, const sched_plan *plan) {
    int32_t row = 0;
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        e->seg[i] = (bi_seg){.seq = seg->slot, .row = row, .n_row = seg->n_tok, .pos = seg->pos};
        for (int32_t t = 0; t < seg->n_tok; t++, row++) {
            e->row_seg[row] = i;
            e->token[row] = seg->token[t];
            e->row_slot[row] = seg->adapter;
            e->row_fault[row] = 0;
        }
    }
    e->batch = (bi_batch){.n_row = row, .n_seg = plan->n_seg, .seg = e->seg, .row_seg = e->row_seg};
}

static br_status forward(br_engine *e, const sched_plan *plan, const bi_bf16 **final) {
    br_step step = {
        .batch = &e->batch, .token = e->token, .row_slot = e->row_slot, .page_base = e->pages, .page_table = plan->table,
        .page_ld = plan->table_ld, .state_base = e->states, .state_index = plan->state_index, .row_fault = e->row_fault, .trace = e->trace,
    };
    return br_model_forward(e->loaded.model, &step, final);
}

/* Gathers the last row of each segment that samples; returns how many. */
static int32_t gather_samples(br_engine *e, const sched_plan *plan, const bi_bf16 *final) {
    const size_t d = (size_t)e->loaded.config.d_model;
    int32_t n = 0;
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        if (!seg->sample)
            continue;
        const engine_request *request = engine_find(e, seg->id);
        const int32_t row = e->seg[i].row + seg->n_tok - 1;
        memcpy(e->sample_x + (size_t)n * d, final + (size_t)row * d, d * sizeof *final);
        e->sample_seg[n] = i;
        e->sample_fault[n] = e->row_fault[row];
        e->setting[n] = request->setting;
        e->setting[n].position = seg->pos + seg->n_tok;
        e->forced[n] = request->forced ? request->forced[request->n_new] : -1;
        n++;
    }
    return n;
}

static br_status draw(br_engine *e, int32_t n) {
    if (n == 0)
        return BR_OK;
    BR_TRY(br_model_logits(e->loaded.model, n, e->sample_x, e->logit, e->sample_fault));
    bi_sample_args args = {
        .n_row = n, .n_vocab = e->loaded.config.n_vocab, .logit = e->logit, .logit_ld = e->loaded.config.n_vocab, .setting = e->setting,
        .forced = e->forced, .token = e->sampled, .logprob = e->logprob, .logprob_raw = e->logprob_raw, .logprob_kept = e->logprob_kept,
        .entropy = e->entropy, .top = e->top, .top_ld = BR_TOP_LOGPROBS_MAX, .row_fault = e->sample_fault,
    };
    return br_model_ops(e->loaded.model)->sample(e->loaded.backend.ctx, &args);
}

/* First fault of a segment by position, 0 when none. A row of the prefix before it cannot have one: it would have ended. */
static uint32_t seg_fault(const br_engine *e, const sched_seg *seg, int32_t first_row, int32_t *position) {
    for (int32_t t = 0; t < seg->n_tok; t++) {
        *position = seg->pos + t;
        if (e->row_fault[first_row + t])
            return e->row_fault[first_row + t];
    }
    return 0;
}

/* A forced response goes on to its given end, whatever its tokens are. */
static int ends_text(const br_engine *e, const engine_request *r, int32_t token, br_stop_reason *reason) {
    if (!r->forced)
        return sampling_ends(&r->sampling, e->loaded.config.eos_id, r->n_new + 1, token, reason);
    *reason = BR_STOP_LENGTH;
    return r->n_new + 1 == r->sampling.max_new;
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static sched_outcome fail_request(br_engine *e, engine_request *r, uint32_t code, int32_t position) {
    engine_end(r, br_loaded_fault(code, position));
    br_token token = {.request = r->id, .token = -1, .position = r->n_prompt + r->n_new, .logprob = BR_UNSCORED, .logprob_raw = BR_UNSCORED,
                      .logprob_kept = BR_UNSCORED, .entropy = BR_UNSCORED, .last = 1, .stop = BR_STOP_ERROR};
    engine_push(e, &token);
    return (sched_outcome){.verdict = SCHED_FAIL};
}

/* Row i of the samples belongs to request r. */
static sched_outcome take_sample(br_engine *e, engine_request *r, int32_t i) {
    br_token token = {
        .request = r->id, .token = e->sampled[i], .position = r->n_prompt + r->n_new, .logprob = bits_of(e->logprob[i]),
        .logprob_raw = bits_of(e->logprob_raw[i]), .logprob_kept = bits_of(e->logprob_kept[i]), .entropy = bits_of(e->entropy[i]),
    };
    token.last = ends_text(e, r, token.token, &token.stop);
    r->n_top = r->setting.n_top;
    for (int32_t k = 0; k < r->n_top; k++) {
        const bi_top *top = &e->top[(size_t)i * BR_TOP_LOGPROBS_MAX + (size_t)k];
        r->top[k] = (br_top_logprob){.token = top->token, .logprob = bits_of(top->logprob)};
    }
    r->n_new++;
    if (token.last)
        engine_end(r, BR_OK);
    engine_push(e, &token);
    return (sched_outcome){.verdict = token.last ? SCHED_END : SCHED_GO_ON, .token = token.token};
}

static void decide(br_engine *e, const sched_plan *plan, int32_t n_sample) {
    int32_t next = 0;
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        engine_request *r = engine_find(e, seg->id);
        const int32_t sample = next < n_sample && e->sample_seg[next] == i ? next++ : -1;
        int32_t position = 0;
        uint32_t code = seg_fault(e, seg, e->seg[i].row, &position);
        if (!code && sample >= 0)
            code = e->sample_fault[sample];
        if (code)
            e->outcome[i] = fail_request(e, r, code, position);
        else if (sample >= 0)
            e->outcome[i] = take_sample(e, r, sample);
        else
            e->outcome[i] = (sched_outcome){.verdict = SCHED_GO_ON};
    }
}

br_status engine_step(br_engine *e) {
    const bi_bf16 *final;
    const sched_plan *plan = sched_plan_step(e->sched);
    e->plan = plan;
    if (plan->n_seg > 0) {
        copy_pages(e, plan);
        copy_states(e, plan->state_copy, plan->n_state_copy);
        lay_out_rows(e, plan);
        BR_TRY(forward(e, plan, &final));
        const int32_t n_sample = gather_samples(e, plan, final);
        BR_TRY(draw(e, n_sample));
        copy_states(e, plan->keep, plan->n_keep);
        decide(e, plan, n_sample);
    }
    return sched_result(e->sched, e->outcome, plan->n_seg);
}
