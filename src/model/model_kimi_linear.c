/* Kimi-Linear: KDA and dense MLA layers over a plain residual stream, MoE at full width.
 * Contract: N-RES (plain form), N-NORM. Shapes: R rows, D d_model. */
#include "model_parts.h"

static br_status norm(br_model *m, const br_step *s, int32_t layer, br_stage stage, const float *w) {
    model_work *b = &m->work;
    BR_TRY(model_rmsnorm(m, s, b->p, w, b->normed, model_fault(s, layer, stage)));
    model_show(s, stage, layer, b->normed, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

/* p (R, D) = R(p + branch) */
static br_status grow(br_model *m, const br_step *s, int32_t layer, br_stage stage) {
    model_work *b = &m->work;
    bi_residual_args add = {.n_row = s->batch->n_row, .d = m->config.d_model, .a = b->p, .b = b->branch, .y = b->p,
                            .fault = model_fault(s, layer, stage)};
    return m->backend.op->residual(m->backend.ctx, &add);
}

br_status model_forward_kimi_linear(br_model *m, const br_step *s) {
    const br_config *c = &m->config;
    model_work *b = &m->work;
    const int64_t row_bytes = (int64_t)c->d_model * 2;
    for (int32_t l = 0; l < c->n_layer; l++) {
        const model_layer *w = &m->layer[l];
        model_show(s, BR_STAGE_RES_ATTN, l, b->p, row_bytes);
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_ATTN, w->input_norm));
        BR_TRY((c->layer_is_mla[l] ? model_block_mla_dense : model_block_kda)(m, s, l, b->normed, b->branch));
        BR_TRY(grow(m, s, l, BR_STAGE_ATTN_OUT));
        model_show(s, BR_STAGE_RES_MLP, l, b->p, row_bytes);
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_MLP, w->post_norm));
        BR_TRY((l < c->n_dense_layer ? model_block_mlp : model_block_moe_plain)(m, s, l, b->normed, b->branch));
        BR_TRY(grow(m, s, l, BR_STAGE_FFN_OUT));
    }
    return norm(m, s, c->n_layer, BR_STAGE_FINAL, m->final_norm);
}
