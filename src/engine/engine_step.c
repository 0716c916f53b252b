/* One step of the engine: plan, copies, forward, sampling, outcomes.
 *
 * The order is fixed by br_sched.h: page and state copies come before the forward, kept states after it. */
#include "engine_parts.h"

#include "sampling.h"

#include <string.h>

static br_status copy_blocks(br_engine *e, unsigned char *base, size_t bytes, const sched_copy *copy, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        BR_TRY(br_device_copy(e->loaded.device, base + bytes * (size_t)copy[i].dst, base + bytes * (size_t)copy[i].src, bytes));
    return BR_OK;
}

static br_status copy_states(br_engine *e, const sched_copy *copy, int32_t n) {
    return copy_blocks(e, e->states, br_model_state_bytes(e->loaded.model), copy, n);
}

static void lay_out_rows(br_engine *e, const sched_plan *plan) {
    step_rows *rows = &e->rows;
    step_rows_begin(rows);
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        const size_t at = (size_t)seg->slot * (size_t)plan->table_ld, n_block = (size_t)(seg->pos + seg->n_tok - 1) / BR_PAGE_TOK + 1;
        step_rows_add(rows, seg->slot, seg->pos, seg->token, seg->n_tok, engine_find(e, seg->id)->slot); /* a swap may have moved it */
        memcpy(rows->page + at, plan->table + at, n_block * sizeof *plan->table);
        rows->state_index[seg->slot] = plan->state_index[seg->slot];
    }
}

/* Lists the last row of each segment that samples; returns how many. */
static int32_t list_samples(br_engine *e, const sched_plan *plan) {
    draw *d = &e->draw;
    int32_t n = 0;
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        const engine_request *request = engine_find(e, seg->id);
        if (!seg->sample || request->score_from)
            continue;
        d->row[n] = e->rows.seg[i].row + seg->n_tok - 1;
        d->setting[n] = request->setting;
        d->setting[n].position = seg->pos + seg->n_tok;
        d->forced[n] = request->forced ? request->forced[request->n_new] : -1;
        e->sample_seg[n++] = i;
    }
    return n;
}

/* The first row of a segment whose token's log-prob is asked for and was not handed out before the request was preempted. */
static int32_t first_scored(const engine_request *r, const sched_seg *seg) {
    const int32_t row = r->first + r->n_new - 1 - seg->pos;
    return row > 0 ? row : 0;
}

/* Lists the rows of scored requests, each with the token behind it. */
static void list_scores(br_engine *e, const sched_plan *plan) {
    score_rows_begin(&e->score);
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        const engine_request *r = engine_find(e, seg->id);
        for (int32_t t = r->score_from ? first_scored(r, seg) : seg->n_tok; t < seg->n_tok; t++)
            score_rows_add(&e->score, e->rows.seg[i].row + t, seg->token[t + 1], r->setting.temperature, r->setting.entropy);
    }
}

/* All that a step computes. A fault is found per segment: a row of the prefix before it cannot have one, it would have ended. */
static br_status run_ops(br_engine *e, const br_step *step) {
    const bi_bf16 *final;
    BR_TRY(br_model_forward(e->loaded.model, step, &final));
    BR_TRY(draw_ops(&e->draw, final, step->row_fault));
    BR_TRY(score_rows_run(&e->score, final));
    bi_seg_fault_args args = {.batch = step->batch, .row_fault = step->row_fault, .out = (bi_first_fault *)(void *)e->fault.device};
    return e->loaded.backend.op->seg_fault(e->loaded.backend.ctx, &args);
}

static int32_t power_of_two(int32_t n) {
    int32_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

/* Pads a step of decode rows to the shape of a recorded one; 0: this step is not to be recorded. */
static int pad_to_recorded(br_engine *e, const sched_plan *plan, int32_t n_sample) {
    const br_engine_options *o = &e->options;
    const int32_t most = o->max_seqs < o->chunk_tokens ? o->max_seqs : o->chunk_tokens, last = e->loaded.n_pos_max - 1;
    int32_t n_row = power_of_two(plan->n_row), pos_max = power_of_two(e->rows.host.pos_max + 1) - 1;
    n_row = n_row < most ? n_row : most;
    pos_max = pos_max < last ? pos_max : last;
    if (br_device_is_host(e->loaded.device) || e->trace || plan->n_decode != plan->n_seg || n_sample != plan->n_seg)
        return 0;
    step_rows_pad(&e->rows, n_row, pos_max);
    draw_pad(&e->draw, n_sample, n_row);
    return 1;
}

static engine_graph *graph_of(br_engine *e, const bi_batch *batch) {
    for (int32_t i = 0; i < e->n_graph; i++)
        if (e->graph[i].n_row == batch->n_row && e->graph[i].pos_max == batch->pos_max)
            return &e->graph[i];
    return NULL;
}

static br_status record(br_engine *e, const br_step *step, br_graph **graph) {
    br_device *device = e->loaded.device;
    BR_TRY(br_graph_begin(device));
    const br_status status = run_ops(e, step);
    return status == BR_OK ? br_graph_end(device, graph) : br_graph_break(device, status);
}

static br_status run_recorded(br_engine *e, const br_step *step) {
    const bi_batch *batch = step->batch;
    engine_graph *known = graph_of(e, batch);
    if (!known) {
        if (e->n_graph < ENGINE_GRAPH_MAX)
            e->graph[e->n_graph++] = (engine_graph){.n_row = batch->n_row, .pos_max = batch->pos_max};
        return run_ops(e, step);
    }
    if (!known->graph)
        BR_TRY(record(e, step, &known->graph));
    return br_graph_run(e->loaded.device, known->graph);
}

/* Where a call in the middle fails, what was queued before it still runs, and nothing waits for it here: the host memory that it reads and
 * writes is the engine's own mirrors, no further step lays anything out in them (`broken`), and closing them waits. */
static br_status compute(br_engine *e, const sched_plan *plan, int32_t n_sample) {
    br_device *device = e->loaded.device;
    br_step step = {.page_base = e->pages, .state_base = e->states, .trace = e->trace};
    const int recorded = pad_to_recorded(e, plan, n_sample);
    BR_TRY(copy_blocks(e, e->pages, br_model_page_bytes(e->loaded.model), plan->page_copy, plan->n_page_copy));
    BR_TRY(copy_states(e, plan->state_copy, plan->n_state_copy));
    BR_TRY(step_rows_upload(&e->rows, &step));
    BR_TRY(draw_upload(&e->draw, recorded ? step.batch->n_row : n_sample));
    BR_TRY(recorded ? run_recorded(e, &step) : run_ops(e, &step));
    BR_TRY(draw_download(&e->draw));
    BR_TRY(br_device_download(device, e->fault.host, e->fault.device, (size_t)plan->n_seg * sizeof(bi_first_fault)));
    BR_TRY(copy_states(e, plan->keep, plan->n_keep));
    return br_device_wait(device);
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
    engine_push_end(e, r, BR_STOP_ERROR);
    return (sched_outcome){.verdict = SCHED_FAIL};
}

/* Row i of the samples belongs to request r. */
static sched_outcome take_sample(br_engine *e, engine_request *r, int32_t i) {
    const draw *d = &e->draw;
    br_token token = {
        .request = r->id, .token = d->token[i], .position = r->first + r->n_new, .logprob = bits_of(d->logprob[i]),
        .logprob_raw = bits_of(d->logprob_raw[i]), .logprob_kept = bits_of(d->logprob_kept[i]),
        .entropy = r->setting.entropy ? bits_of(d->entropy[i]) : BR_UNSCORED,
    };
    token.last = ends_text(e, r, token.token, &token.stop);
    r->n_top = r->setting.n_top;
    for (int32_t k = 0; k < r->n_top; k++) {
        const bi_top *top = &d->top[(size_t)i * BR_TOP_LOGPROBS_MAX + (size_t)k];
        r->top[k] = (br_top_logprob){.token = top->token, .logprob = bits_of(top->logprob)};
    }
    r->n_new++;
    r->versions.run[r->versions.n_run - 1].n_tok++;
    if (token.last)
        engine_end(r, BR_OK);
    engine_push(e, &token);
    return (sched_outcome){.verdict = token.last ? SCHED_END : SCHED_GO_ON, .token = token.token};
}

/* Hands out what a segment of a scored request has; `at` is the first of its listed rows. Tokens in front of a fault are handed out, so
 * that chunks of any size give the same ones. */
static sched_outcome take_scores(br_engine *e, engine_request *r, const sched_seg *seg, const bi_first_fault *fault, int32_t at) {
    const score_rows *s = &e->score;
    for (int32_t t = first_scored(r, seg); t < seg->n_tok; t++, at++) {
        if (fault->code && fault->pos <= seg->pos + t)
            break;
        if (s->fault[at])
            return fail_request(e, r, s->fault[at], seg->pos + t);
        br_token token = {
            .request = r->id, .token = s->token[at], .position = r->first + r->n_new, .logprob = bits_of(s->logprob[at]),
            .logprob_raw = bits_of(s->logprob_raw[at]), .logprob_kept = BR_UNSCORED,
            .entropy = r->setting.entropy ? bits_of(s->entropy[at]) : BR_UNSCORED, .last = seg->sample && t + 1 == seg->n_tok, .stop = BR_STOP_LENGTH,
        };
        r->n_new++;
        r->versions.run[r->versions.n_run - 1].n_tok++;
        engine_push(e, &token);
    }
    if (fault->code)
        return fail_request(e, r, fault->code, fault->pos);
    if (seg->sample)
        engine_end(r, BR_OK);
    return (sched_outcome){.verdict = seg->sample ? SCHED_END : SCHED_GO_ON};
}

static void decide(br_engine *e, const sched_plan *plan, int32_t n_sample) {
    const bi_first_fault *fault = (const bi_first_fault *)(const void *)e->fault.host;
    int32_t next = 0, next_score = 0;
    for (int32_t i = 0; i < plan->n_seg; i++) {
        const sched_seg *seg = &plan->seg[i];
        engine_request *r = engine_find(e, seg->id);
        const int32_t sample = next < n_sample && e->sample_seg[next] == i ? next++ : -1;
        if (r->score_from) {
            const int32_t at = next_score, from = first_scored(r, seg);
            next_score += from < seg->n_tok ? seg->n_tok - from : 0;
            e->outcome[i] = take_scores(e, r, seg, &fault[i], at);
        } else if (fault[i].code) {
            e->outcome[i] = fail_request(e, r, fault[i].code, fault[i].pos);
        } else if (sample >= 0 && e->draw.fault[sample]) {
            e->outcome[i] = fail_request(e, r, e->draw.fault[sample], seg->pos + seg->n_tok - 1);
        } else if (sample >= 0) {
            e->outcome[i] = take_sample(e, r, sample);
        } else {
            e->outcome[i] = (sched_outcome){.verdict = SCHED_GO_ON};
        }
    }
}

br_status engine_step(br_engine *e) {
    const sched_plan *plan = sched_plan_step(e->sched);
    e->plan = plan;
    e->peak_seqs = plan->n_seg > e->peak_seqs ? plan->n_seg : e->peak_seqs;
    if (plan->n_seg > 0) {
        lay_out_rows(e, plan);
        const int32_t n_sample = list_samples(e, plan);
        list_scores(e, plan);
        BR_TRY(compute(e, plan, n_sample));
        decide(e, plan, n_sample);
    }
    return sched_result(e->sched, e->outcome, plan->n_seg);
}
