/* The KDA block: projections, short convolutions, decay gate, recurrence, gated norm, output projection.
 * Contract: N-LIN, N-LORA, N-CONV, N-KDA. Shapes: R rows, H heads, d head size, P = H * d, D d_model. */
#include "model_parts.h"

static void show_three(const br_step *s, br_stage stage, int32_t layer, const void *a, const void *b, const void *c, int64_t row_bytes) {
    if (!s->trace)
        return;
    br_piece piece[3] = {{.data = a, .row_stride = row_bytes, .row_bytes = row_bytes},
                         {.data = b, .row_stride = row_bytes, .row_bytes = row_bytes},
                         {.data = c, .row_stride = row_bytes, .row_bytes = row_bytes}};
    s->trace->rows(s->trace->context, stage, layer, piece, 3);
}

/* x (R, P) -> y (R, P); stream 0 q, 1 k, 2 v picks the history in the sequence's state. */
static bi_conv_args convolution(const br_model *m, const br_step *s, const kda_weights *w, int stream, const bi_bf16 *x, const float *taps,
                                bi_bf16 *y) {
    const int32_t n_chan = br_config_kda_width(&m->config);
    return (bi_conv_args){
        .batch = s->batch, .n_chan = n_chan, .x = x, .x_ld = n_chan, .w = taps, .y = y, .y_ld = n_chan,
        .history = {.base = s->state_base + w->history_offset + (size_t)stream * model_history_bytes(&m->config),
                    .seq_bytes = m->state_bytes, .index = s->state_index},
    };
}

/* q, k, v before conv (R, P), the gates' inputs: f (R, P) behind its low rank, b (R, H), output gate (R, P) */
static br_status project(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x) {
    const kda_weights *w = &m->layer[layer].kda;
    model_work *b = &m->work;
    const bi_fault qkv = model_fault(s, layer, BR_STAGE_QKV), gate = model_fault(s, layer, BR_STAGE_GATE);
    const int full = m->config.kda_full_gate;
    model_group first = {.n = 0}, second = {.n = 0};
    model_group_add(&first, m, s, &w->q, x, b->q_in, qkv);
    model_group_add(&first, m, s, &w->k, x, b->k_in, qkv);
    model_group_add(&first, m, s, &w->v, x, b->v_in, qkv);
    model_group_add(&first, m, s, &w->f_a, x, b->low, gate); /* (R, d_gate_low) */
    model_group_add(&first, m, s, &w->b, x, b->b, gate);
    model_group_add(&first, m, s, full ? &w->g : &w->g_a, x, full ? b->gate : b->gate_low, gate);
    BR_TRY(model_group_run(&first, m));
    model_group_add(&second, m, s, &w->f_b, b->low, b->f, gate);
    if (!full)
        model_group_add(&second, m, s, &w->g_b, b->gate_low, b->gate, gate);
    return model_group_run(&second, m);
}

static br_status convolve_all(br_model *m, const br_step *s, int32_t layer) {
    const kda_weights *w = &m->layer[layer].kda;
    model_work *b = &m->work;
    const int64_t p_bytes = (int64_t)br_config_kda_width(&m->config) * 2;
    show_three(s, BR_STAGE_QKV, layer, b->q_in, b->k_in, b->v_in, p_bytes);
    const bi_conv_args conv[] = {convolution(m, s, w, 0, b->q_in, w->conv_q, b->q), convolution(m, s, w, 1, b->k_in, w->conv_k, b->k),
                                 convolution(m, s, w, 2, b->v_in, w->conv_v, b->v)};
    BR_TRY(m->backend.op->conv_group(m->backend.ctx, conv, BI_CONV_GROUP_MAX));
    show_three(s, BR_STAGE_CONV, layer, b->q, b->k, b->v, p_bytes);
    return BR_OK;
}

/* decay (R, P) f32, beta (R, H) f32 */
static br_status gates(br_model *m, const br_step *s, int32_t layer) {
    const br_config *c = &m->config;
    const kda_weights *w = &m->layer[layer].kda;
    model_work *b = &m->work;
    const int64_t p = br_config_kda_width(c);
    bi_kda_gate_args args = {
        .n_row = s->batch->n_row, .n_head = c->kda_n_head, .d = c->kda_d_head, .f = b->f, .b = b->b, .a_log = w->a_log,
        .dt_bias = w->dt_bias, .bounded = c->kda_bounded, .lower_bound = c->kda_lower_bound, .a = b->decay, .beta = b->beta,
    };
    BR_TRY(m->backend.op->kda_gate(m->backend.ctx, &args));
    if (s->trace) {
        int64_t beta_bytes = (int64_t)c->kda_n_head * 4;
        br_piece piece[3] = {{.data = b->decay, .row_stride = p * 4, .row_bytes = p * 4},
                             {.data = b->beta, .row_stride = beta_bytes, .row_bytes = beta_bytes},
                             {.data = b->gate, .row_stride = p * 2, .row_bytes = p * 2}};
        s->trace->rows(s->trace->context, BR_STAGE_GATE, layer, piece, 3);
    }
    return BR_OK;
}

br_status model_block_kda(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    const br_config *c = &m->config;
    const kda_weights *w = &m->layer[layer].kda;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row, p = br_config_kda_width(c);
    BR_TRY(project(m, s, layer, x));
    BR_TRY(convolve_all(m, s, layer));
    BR_TRY(gates(m, s, layer));
    bi_kda_args recur = {
        .batch = s->batch, .n_head = c->kda_n_head, .d = c->kda_d_head, .q = b->q, .k = b->k, .v = b->v, .ld = p,
        .a = b->decay, .beta = b->beta, .scale = m->kda_scale, .o = b->o, .fault = model_fault(s, layer, BR_STAGE_KDA),
        .state = {.base = s->state_base + w->state_offset, .seq_bytes = m->state_bytes, .index = s->state_index},
    };
    BR_TRY(m->backend.op->kda(m->backend.ctx, &recur)); /* o (R, P) f32 */
    model_show(s, BR_STAGE_KDA, layer, b->o, (int64_t)p * 4);
    bi_kda_norm_args norm = {
        .n_row = n_row, .n_head = c->kda_n_head, .d = c->kda_d_head, .o = b->o, .w = w->o_norm, .gate = b->gate,
        .eps = c->norm_eps, .y = b->mixed, .fault = model_fault(s, layer, BR_STAGE_ATTN_OUT),
    };
    BR_TRY(m->backend.op->kda_norm(m->backend.ctx, &norm)); /* (R, P) */
    BR_TRY(br_comm_gather_columns(&m->comm, b->mixed, n_row, (int64_t)p * 2));
    BR_TRY(model_linear(m, s, &w->o, b->mixed, out, model_fault(s, layer, BR_STAGE_ATTN_OUT))); /* (R, D) */
    BR_TRY(br_comm_gather_columns(&m->comm, out, n_row, (int64_t)c->d_model * 2));
    model_show(s, BR_STAGE_ATTN_OUT, layer, out, (int64_t)c->d_model * 2);
    return BR_OK;
}
