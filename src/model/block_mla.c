/* The MLA block in absorbed form, dense or over the indexer's selection.
 * Contract: N-LIN, N-LORA, N-IDX, N-ATT. Shapes: R rows, H heads, C d_kv_latent, r d_rope, D d_model. */
#include "model_parts.h"

/* One layer's part of the pages, latent rows or index keys. */
static bi_cache cache_at(const br_model *m, const br_step *s, size_t offset) {
    return (bi_cache){.base = s->page_base + offset, .block_bytes = m->page_bytes, .table = s->page_table,
                      .table_ld = s->page_ld, .first = s->page_first};
}

/* All maps of x (R, D): latent rows (R, C + r), queries or their low rank, the indexer's keys and weights, the output gate. */
static br_status project(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, int sparse) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[layer].mla;
    const model_map index_k = {.w = w->index_k}, index_weight = {.w = w->index_weight};
    const bi_fault qkv = model_fault(s, layer, BR_STAGE_QKV), index = model_fault(s, layer, BR_STAGE_INDEX_TOPK);
    model_work *b = &m->work;
    model_group group = {.n = 0};
    model_group_add(&group, m, s, &w->kv_a, x, b->latent, qkv);
    model_group_add(&group, m, s, c->d_q_latent ? &w->q_a : &w->q, x, c->d_q_latent ? b->cq : b->query, qkv);
    if (sparse) {
        model_group_add(&group, m, s, &index_k, x, b->index_k, index);         /* (R, d_I) */
        model_group_add_f32(&group, m, s, &index_weight, x, b->index_w, index); /* (R, H_I) */
    }
    if (c->mla_gate)
        model_group_add(&group, m, s, &w->g, x, b->gate, model_fault(s, layer, BR_STAGE_ATTN_OUT));
    return model_group_run(&group, m);
}

/* latent row [c | k_r] into the cache; c normed, k_r as projected */
static br_status store_latent(br_model *m, const br_step *s, int32_t layer) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[layer].mla;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row, d_latent = br_config_latent_dim(c);
    bi_norm_args norm = {
        .n_row = n_row, .d = c->d_kv_latent, .x = b->latent, .x_ld = d_latent, .w = w->kv_norm, .eps = c->lora_norm_eps,
        .y = b->latent, .y_ld = d_latent, .fault = model_fault(s, layer, BR_STAGE_QKV),
    };
    BR_TRY(m->backend.op->rmsnorm(m->backend.ctx, &norm));
    bi_latent_store_args store = {
        .batch = s->batch, .d_latent = d_latent, .x = b->latent, .x_ld = d_latent,
        .cache = cache_at(m, s, w->latent_offset),
    };
    return m->backend.op->latent_store(m->backend.ctx, &store);
}

/* queries (R, H, d_nope + d_rope) and the indexer's (R, H_I * d_I), then absorbed ones (R, H, C) */
static br_status make_query(br_model *m, const br_step *s, int32_t layer, int sparse) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[layer].mla;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row, d_query = c->d_nope + c->d_rope;
    bi_fault fault = model_fault(s, layer, BR_STAGE_QKV);
    if (c->d_q_latent) {
        const model_map index_q = {.w = w->index_q};
        model_group group = {.n = 0};
        bi_norm_args norm = {.n_row = n_row, .d = c->d_q_latent, .x = b->cq, .x_ld = c->d_q_latent, .w = w->q_norm,
                             .eps = c->lora_norm_eps, .y = b->cq, .y_ld = c->d_q_latent, .fault = fault};
        BR_TRY(m->backend.op->rmsnorm(m->backend.ctx, &norm));
        model_group_add(&group, m, s, &w->q_b, b->cq, b->query, fault);
        if (sparse)
            model_group_add(&group, m, s, &index_q, b->cq, b->index_q, model_fault(s, layer, BR_STAGE_INDEX_TOPK));
        BR_TRY(model_group_run(&group, m));
    }
    if (s->trace) {
        int64_t query_bytes = (int64_t)c->n_head * d_query * 2, latent_bytes = (int64_t)br_config_latent_dim(c) * 2;
        br_piece piece[2] = {{.data = b->query, .row_stride = query_bytes, .row_bytes = query_bytes},
                             {.data = b->latent, .row_stride = latent_bytes, .row_bytes = latent_bytes}};
        s->trace->rows(s->trace->context, BR_STAGE_QKV, layer, piece, 2);
    }
    bi_linear_args absorb = {
        .n_row = n_row, .n_head = c->n_head, .x = b->query, .x_ld = (int64_t)c->n_head * d_query, .x_head_ld = d_query, .w = w->w_uk,
        .lora = {.slot = w->lora_uk, .n_slot = m->n_slot, .row_slot = s->row_slot}, .y = b->absorbed, .y_ld = (int64_t)c->n_head * c->d_kv_latent,
        .y_head_ld = c->d_kv_latent, .fault = model_fault(s, layer, BR_STAGE_MLA),
    };
    return m->backend.op->linear(m->backend.ctx, &absorb);
}

/* select (R, topk) of the visible positions */
static br_status select_positions(br_model *m, const br_step *s, int32_t layer) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[layer].mla;
    const bi_ops *op = m->backend.op;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row;
    bi_cache keys = cache_at(m, s, w->index_offset);
    bi_fault fault = model_fault(s, layer, BR_STAGE_INDEX_TOPK);
    bi_norm_args norm = {.n_row = n_row, .d = c->index_d_head, .x = b->index_k, .x_ld = c->index_d_head, .w = w->index_norm,
                         .b = w->index_norm_bias, .eps = c->norm_eps, .y = b->index_k, .y_ld = c->index_d_head, .fault = fault};
    BR_TRY(op->layernorm(m->backend.ctx, &norm));
    bi_index_store_args store = {.batch = s->batch, .d = c->index_d_head, .k = b->index_k, .cache = keys, .fault = fault};
    BR_TRY(op->index_store(m->backend.ctx, &store));
    bi_index_select_args choose = {
        .batch = s->batch, .n_head = c->index_n_head, .d = c->index_d_head, .topk = c->index_topk, .q = b->index_q, .w = b->index_w,
        .c = m->index_c, .cache = keys, .select = b->select, .n_select = b->n_select, .fault = fault,
    };
    BR_TRY(op->index_select(m->backend.ctx, &choose));
    if (s->trace) {
        br_piece piece = {.data = b->select, .row_stride = (int64_t)c->index_topk * 4, .row_bytes = 4, .row_count = b->n_select};
        s->trace->rows(s->trace->context, BR_STAGE_INDEX_TOPK, layer, &piece, 1);
    }
    return BR_OK;
}

/* attention over `select` (NULL: all visible), values, output gate, output projection */
static br_status attend(br_model *m, const br_step *s, int32_t layer, const int32_t *select, bi_bf16 *out) {
    const br_config *c = &m->config;
    const mla_weights *w = &m->layer[layer].mla;
    const bi_ops *op = m->backend.op;
    model_work *b = &m->work;
    const int32_t n_row = s->batch->n_row, d_query = c->d_nope + c->d_rope, d_out = c->n_head * c->d_v;
    bi_fault fault = model_fault(s, layer, BR_STAGE_MLA);
    bi_attn_args attn = {
        .batch = s->batch, .n_head = c->n_head, .d_kv_latent = c->d_kv_latent, .d_rope = c->d_rope, .q = b->absorbed,
        .q_r = b->query + c->d_nope, .q_r_ld = (int64_t)c->n_head * d_query, .q_r_head_ld = d_query,
        .cache = cache_at(m, s, w->latent_offset),
        .select = select, .n_select = b->n_select, .select_ld = c->index_topk, .alpha = m->attn_alpha, .z = b->z, .fault = fault,
    };
    BR_TRY(op->attn(m->backend.ctx, &attn)); /* z (R, H, C) */
    model_show(s, BR_STAGE_MLA, layer, b->z, (int64_t)c->n_head * c->d_kv_latent * 2);
    bi_linear_args values = {
        .n_row = n_row, .n_head = c->n_head, .x = b->z, .x_ld = (int64_t)c->n_head * c->d_kv_latent, .x_head_ld = c->d_kv_latent, .w = w->w_uv,
        .lora = {.slot = w->lora_uv, .n_slot = m->n_slot, .row_slot = s->row_slot}, .y = b->o, .y_ld = d_out, .y_head_ld = c->d_v, .y_f32 = 1,
        .fault = model_fault(s, layer, BR_STAGE_ATTN_OUT),
    };
    BR_TRY(op->linear(m->backend.ctx, &values)); /* o (R, H, d_v) f32 */
    bi_attn_gate_args gate = {.n_row = n_row, .d = d_out, .o = b->o, .gate = c->mla_gate ? b->gate : NULL, .y = b->mixed};
    BR_TRY(op->attn_gate(m->backend.ctx, &gate));
    BR_TRY(br_comm_gather_columns(&m->comm, b->mixed, n_row, (int64_t)d_out * 2));
    BR_TRY(model_linear(m, s, &w->o, b->mixed, out, model_fault(s, layer, BR_STAGE_ATTN_OUT))); /* (R, D) */
    BR_TRY(br_comm_gather_columns(&m->comm, out, n_row, (int64_t)c->d_model * 2));
    model_show(s, BR_STAGE_ATTN_OUT, layer, out, (int64_t)c->d_model * 2);
    return BR_OK;
}

br_status model_block_mla_dense(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    BR_TRY(project(m, s, layer, x, 0));
    BR_TRY(store_latent(m, s, layer));
    BR_TRY(make_query(m, s, layer, 0));
    return attend(m, s, layer, NULL, out);
}

br_status model_block_mla_sparse(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out) {
    BR_TRY(project(m, s, layer, x, 1));
    BR_TRY(store_latent(m, s, layer));
    BR_TRY(make_query(m, s, layer, 1));
    BR_TRY(select_positions(m, s, layer));
    return attend(m, s, layer, m->work.select, out);
}
