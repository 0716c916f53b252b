/* The feed-forward blocks: dense MLP, latent MoE (K3, K3.1), plain MoE (Kimi-Linear).
 * Contract: N-LIN, N-LORA, N-ACT, N-ROUTE, N-MOE. Shapes: R rows, D d_model, L expert width, k experts a token. */
#include "model_parts.h"

static void add_gate_and_up(model_group *group, br_model *m, const br_step *s, const mlp_weights *w, const bi_bf16 *x, bi_fault fault) {
    model_group_add_f32(group, m, s, &w->gate, x, m->work.gate_f32, fault); /* (R, d_ff) f32 */
    model_group_add_f32(group, m, s, &w->up, x, m->work.up_f32, fault);
}

/* out (R, D) = down(act(gate, up)) of what add_gate_and_up computes */
static br_status act_and_down(br_model *m, const br_step *s, const mlp_weights *w, bi_bf16 *out, bi_fault fault) {
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row;
    bi_glu_args glu = {.n_row = n_row, .d = w->d_ff, .g = b->gate_f32, .u = b->up_f32, .ld = w->d_ff, .act = m->act, .y = b->act};
    BR_TRY(m->backend.op->glu(m->backend.ctx, &glu));
    BR_TRY(br_comm_gather_columns(&m->comm, b->act, n_row, (int64_t)w->d_ff * 2));
    BR_TRY(model_linear(m, s, &w->down, b->act, out, fault));
    return br_comm_gather_columns(&m->comm, out, n_row, (int64_t)m->config.d_model * 2);
}

br_status model_block_mlp(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    const mlp_weights *w = &m->layer[layer].mlp;
    const bi_fault fault = model_fault(s, layer, BR_STAGE_FFN_OUT);
    model_group group = {.n = 0};
    add_gate_and_up(&group, m, s, w, x, fault);
    BR_TRY(model_group_run(&group, m));
    BR_TRY(act_and_down(m, s, w, out, fault));
    model_show(s, BR_STAGE_FFN_OUT, layer, out, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

/* expert ids (R, k) ascending and their weights (R, k) f32 */
static br_status choose_experts(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x) {
    const br_config *c = &m->config;
    const moe_weights *w = &m->layer[layer].moe;
    model_work *b = &m->work;
    bi_route_args route = {
        .n_row = s->batch->n_row, .d = c->d_model, .n_expert = c->n_expert, .topk = c->n_expert_topk, .x = x, .w = w->router,
        .bias = w->router_bias, .renormalize = c->renormalize, .scale = c->route_scale, .expert = b->expert, .p = b->p_expert,
        .fault = model_fault(s, layer, BR_STAGE_ROUTE),
    };
    BR_TRY(m->backend.op->route(m->backend.ctx, &route));
    if (s->trace) {
        int64_t row_bytes = (int64_t)c->n_expert_topk * 4;
        br_piece piece[2] = {{.data = b->expert, .row_stride = row_bytes, .row_bytes = row_bytes},
                             {.data = b->p_expert, .row_stride = row_bytes, .row_bytes = row_bytes}};
        s->trace->rows(s->trace->context, BR_STAGE_ROUTE, layer, piece, 2);
    }
    return BR_OK;
}

/* combined (R, L) = the chosen experts of z (R, L), weighted */
static br_status run_experts(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *z, bi_bf16 *combined) {
    const br_config *c = &m->config;
    const moe_weights *w = &m->layer[layer].moe;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row, width = br_config_expert_width(c);
    bi_experts_args experts = {
        .n_row = n_row, .d = width, .d_ff = c->d_expert_ff, .n_expert = c->n_expert, .topk = c->n_expert_topk, .x = z,
        .expert = b->expert, .w1 = w->w1, .w3 = w->w3, .w2 = w->w2, .lora1 = w->lora1, .lora3 = w->lora3, .lora2 = w->lora2,
        .n_slot = m->n_slot, .row_slot = s->row_slot, .act = m->act, .y = b->slots, .fault = model_fault(s, layer, BR_STAGE_EXPERTS),
    };
    BR_TRY(m->backend.op->experts(m->backend.ctx, &experts)); /* (R, k, L) */
    BR_TRY(br_comm_return_slots(&m->comm, b->slots, n_row, c->n_expert_topk, (int64_t)width * 2));
    bi_combine_args combine = {.n_row = n_row, .d = width, .topk = c->n_expert_topk, .e = b->slots, .p = b->p_expert, .y = combined};
    BR_TRY(m->backend.op->combine(m->backend.ctx, &combine));
    model_show(s, BR_STAGE_EXPERTS, layer, combined, (int64_t)width * 2);
    return BR_OK;
}

/* out (R, D) = R(routed + shared experts), whose gate and up are there */
static br_status add_shared(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *routed, bi_bf16 *out) {
    model_work *b = &m->work;
    BR_TRY(act_and_down(m, s, &m->layer[layer].moe.shared, b->shared, model_fault(s, layer, BR_STAGE_FFN_OUT)));
    bi_residual_args add = {.n_row = s->batch->n_row, .d = m->config.d_model, .a = routed, .b = b->shared, .y = out};
    BR_TRY(m->backend.op->residual(m->backend.ctx, &add));
    model_show(s, BR_STAGE_FFN_OUT, layer, out, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

br_status model_block_moe_latent(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    const br_config *c = &m->config;
    const moe_weights *w = &m->layer[layer].moe;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row;
    model_group group = {.n = 0};
    BR_TRY(choose_experts(m, s, layer, x)); /* the router reads x, not the latent */
    model_group_add(&group, m, s, &w->latent_down, x, b->down_in, model_fault(s, layer, BR_STAGE_EXPERTS)); /* (R, L) */
    add_gate_and_up(&group, m, s, &w->shared, x, model_fault(s, layer, BR_STAGE_FFN_OUT));
    BR_TRY(model_group_run(&group, m));
    BR_TRY(br_comm_gather_columns(&m->comm, b->down_in, n_row, (int64_t)c->d_latent * 2));
    BR_TRY(run_experts(m, s, layer, b->down_in, b->combined)); /* (R, L) */
    if (c->latent_norm) {
        bi_norm_args norm = {.n_row = n_row, .d = c->d_latent, .x = b->combined, .x_ld = c->d_latent, .w = w->latent_norm, .eps = c->norm_eps,
                             .y = b->combined, .y_ld = c->d_latent, .fault = model_fault(s, layer, BR_STAGE_FFN_OUT)};
        BR_TRY(m->backend.op->rmsnorm(m->backend.ctx, &norm));
    }
    BR_TRY(model_linear(m, s, &w->latent_up, b->combined, out, model_fault(s, layer, BR_STAGE_FFN_OUT))); /* (R, D) */
    BR_TRY(br_comm_gather_columns(&m->comm, out, n_row, (int64_t)c->d_model * 2));
    return add_shared(m, s, layer, out, out);
}

br_status model_block_moe_plain(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    model_group group = {.n = 0};
    BR_TRY(choose_experts(m, s, layer, x));
    add_gate_and_up(&group, m, s, &m->layer[layer].moe.shared, x, model_fault(s, layer, BR_STAGE_FFN_OUT));
    BR_TRY(model_group_run(&group, m));
    BR_TRY(run_experts(m, s, layer, x, out)); /* (R, D) */
    return add_shared(m, s, layer, out, out);
}
