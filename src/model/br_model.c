/* Opening a model, its sizes, and the calls around a forward. */
#include "br_model.h"
#include "model_parts.h"

static int32_t max_of(int32_t a, int32_t b) {
    return a > b ? a : b;
}

/* Outputs of the widest map but the head. */
static int32_t d_out_max(const br_config *c) {
    const int32_t shared_ff = c->n_shared_expert * c->d_expert_ff;
    int32_t d = max_of(max_of(c->d_model, br_config_kda_width(c)), max_of(c->d_ff, shared_ff));
    d = max_of(d, max_of(c->n_head * (c->d_nope + c->d_rope), c->n_head * c->d_v));
    d = max_of(d, max_of(c->n_head * c->d_kv_latent, c->index_n_head * c->index_d_head));
    return max_of(d, max_of(max_of(c->d_q_latent, br_config_latent_dim(c)), max_of(c->d_latent, c->n_expert)));
}

bi_limits br_model_limits(const br_config *c, int32_t rank_max, int32_t n_slot, int32_t n_row_max, int32_t n_pos_max) {
    const int32_t width = br_config_kda_width(c), d_value = c->n_head * c->d_v, shared_ff = c->n_shared_expert * c->d_expert_ff;
    int32_t d_in = max_of(max_of(c->d_model, width), max_of(d_value, max_of(c->d_ff, shared_ff)));
    d_in = max_of(d_in, max_of(max_of(c->d_q_latent, c->d_kv_latent), max_of(c->d_latent, c->d_expert_ff)));
    return (bi_limits){
        .n_row = n_row_max, .d_in = d_in, .d_out = d_out_max(c), .rank = bi_pad_rank(rank_max), .n_slot = n_slot,
        .n_head = c->n_head, .d_kv_latent = c->d_kv_latent, .d_rope = c->d_rope,
        .index_n_head = c->index_n_head, .index_d_head = c->index_d_head, .n_pos = n_pos_max,
        .n_expert = c->n_expert, .n_expert_topk = c->n_expert_topk, .d_expert = br_config_expert_width(c), .d_expert_ff = c->d_expert_ff,
        .kda_n_head = c->kda_n_head, .kda_d_head = c->kda_d_head, .n_vocab = c->n_vocab, .d_model = c->d_model,
    };
}

static void fill(br_model *model, const br_model_options *options) {
    model->config = *options->config;
    model->backend = options->backend;
    model->device = options->device;
    model->comm = options->comm;
    model->n_row_max = options->n_row_max;
    model->swap_rank = options->swap_rank;
    model->n_slot = (options->adapters ? lora_count(options->adapters) : 0) * (options->swap_rank ? BR_MODEL_WAYS : 1);
    model->attn_alpha = bi_const_attn_alpha(model->config.d_nope, model->config.d_rope);
    model->index_c = model->config.index_topk ? bi_const_index_c(model->config.index_n_head, model->config.index_d_head) : 0;
    model->kda_scale = bi_const_kda_scale(model->config.kda_d_head);
    model->act = (bi_act){.situ = model->config.act_situ, .beta = model->config.situ_beta, .linear_beta = model->config.situ_linear_beta};
}

void br_model_measure(const br_model_options *options, br_model_sizes *out) {
    br_model model = {0};
    fill(&model, options);
    model_measure(&model, options, out);
    out->adapter_values = br_model_adapter_values(&model);
}

br_status br_model_open(const br_model_options *options, br_model **out) {
    br_model *model = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&model, sizeof *model, "the model"));
    fill(model, options);
    br_status status = model_bind(model, options);
    if (status == BR_OK && model->swap_rank)
        status = br_mem_alloc((void **)&model->swap_full, br_model_adapter_values(model) * sizeof *model->swap_full, "a matrix of an adapter");
    if (status != BR_OK) {
        br_model_close(model);
        return status;
    }
    *out = model;
    return BR_OK;
}

void br_model_close(br_model *model) {
    if (!model)
        return;
    br_device_free(model->device, model->memory.base);
    br_mem_free(model->arena.base);
    br_mem_free(model->swap_full);
    br_mem_free(model);
}

size_t br_model_page_bytes(const br_model *model) {
    return model->page_bytes;
}

size_t br_model_state_bytes(const br_model *model) {
    return model->state_bytes;
}

const bi_ops *br_model_ops(const br_model *model) {
    return model->backend.op;
}

br_status br_model_forward(br_model *m, const br_step *s, const bi_bf16 **final) {
    const br_config *c = &m->config;
    BR_ASSERT(s->batch->n_row <= m->n_row_max);
    bi_embed_args embed = {.n_row = s->batch->n_row, .d_model = c->d_model, .n_vocab = c->n_vocab, .token = s->token,
                           .table = m->embed, .y = m->work.p};
    BR_TRY(m->backend.op->embed(m->backend.ctx, &embed));
    model_show(s, BR_STAGE_EMBED, -1, m->work.p, (int64_t)c->d_model * 2);
    *final = m->work.normed;
    switch (c->arch) {
    case BR_ARCH_KIMI_K31: return model_forward_kimi_k31(m, s);
    case BR_ARCH_KIMI_K3: return model_forward_kimi_k3(m, s);
    case BR_ARCH_KIMI_LINEAR: return model_forward_kimi_linear(m, s);
    }
    return br_fail(BR_E_UNSUPPORTED, "architecture %d has no forward pass", (int)c->arch);
}

static bi_fault head_fault(const br_model *m, uint32_t *row_fault) {
    return (bi_fault){.row = row_fault, .code = br_fault_code(m->config.n_layer, BR_STAGE_LOGPROB)};
}

br_status br_model_logits(br_model *m, int32_t n_row, const bi_bf16 *x, float *logit, uint32_t *row_fault) {
    bi_linear_args args = {
        .n_row = n_row, .n_head = 1, .x = x, .x_ld = m->config.d_model, .w = m->head, .y = logit, .y_ld = m->config.n_vocab,
        .y_f32 = 1, .check_logits = 1, .fault = head_fault(m, row_fault),
    };
    return m->backend.op->linear(m->backend.ctx, &args);
}

br_status br_model_score(br_model *m, int32_t n_row, const bi_bf16 *x, const int32_t *token, const float *temperature,
                         float *logprob, float *logprob_raw, float *entropy, uint32_t *row_fault) {
    bi_score_args args = {
        .n_row = n_row, .d = m->config.d_model, .n_vocab = m->config.n_vocab, .x = x, .w = m->head, .token = token,
        .temperature = temperature, .logprob = logprob, .logprob_raw = logprob_raw, .entropy = entropy, .fault = head_fault(m, row_fault),
    };
    return m->backend.op->score(m->backend.ctx, &args);
}

static void group_add(model_group *group, br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, void *y, int32_t y_f32,
                      bi_fault fault) {
    BR_ASSERT(group->n < BI_LINEAR_GROUP_MAX);
    group->map[group->n++] = (bi_linear_args){
        .n_row = s->batch->n_row, .n_head = 1, .x = x, .x_ld = map->w.n_in, .w = map->w,
        .lora = {.slot = map->lora, .n_slot = m->n_slot, .row_slot = s->row_slot}, .y = y, .y_ld = map->w.n_out, .y_f32 = y_f32, .fault = fault,
    };
}

void model_group_add(model_group *group, br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, bi_bf16 *y, bi_fault fault) {
    group_add(group, m, s, map, x, y, 0, fault);
}

void model_group_add_f32(model_group *group, br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, float *y, bi_fault fault) {
    group_add(group, m, s, map, x, y, 1, fault);
}

br_status model_group_run(model_group *group, br_model *m) {
    return m->backend.op->linear_group(m->backend.ctx, group->map, group->n);
}

br_status model_linear(br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, bi_bf16 *y, bi_fault fault) {
    model_group one = {.n = 0};
    model_group_add(&one, m, s, map, x, y, fault);
    return m->backend.op->linear(m->backend.ctx, one.map);
}

br_status model_rmsnorm(br_model *m, const br_step *s, const bi_bf16 *x, const float *w, bi_bf16 *y, bi_fault fault) {
    const int32_t d = m->config.d_model;
    bi_norm_args args = {.n_row = s->batch->n_row, .d = d, .x = x, .x_ld = d, .w = w, .eps = m->config.norm_eps, .y = y, .y_ld = d, .fault = fault};
    return m->backend.op->rmsnorm(m->backend.ctx, &args);
}
