/* Kimi K3 and K3.1: KDA and MLA layers over a residual bank (AttnRes), latent MoE. The two differ in one call: K3 attends to
 * every visible position, K3.1 to those its indexer selects.
 * Contract: N-RES, N-NORM. Shapes: R rows, D d_model. */
#include "model_parts.h"

#include <string.h>

typedef br_status (*attention_block)(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);

/* x (R, D) = mix of the bank's n_bank rows and the running sum p */
static br_status mix(br_model *m, const br_step *s, int32_t layer, br_stage stage, int32_t n_bank, const float *w) {
    model_work *b = &m->work;
    bi_attnres_args args = {
        .n_row = s->batch->n_row, .d = m->config.d_model, .n_bank = n_bank, .bank = (const bi_bf16 *const *)b->bank, .p = b->p,
        .w = w, .eps = m->config.norm_eps, .y = b->x, .fault = model_fault(s, layer, stage),
    };
    BR_TRY(m->backend.op->attnres(m->backend.ctx, &args));
    model_show(s, stage, layer, b->x, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

/* p (R, D) = R(p + branch) */
static br_status grow(br_model *m, const br_step *s, int32_t layer, br_stage stage) {
    model_work *b = &m->work;
    bi_residual_args add = {.n_row = s->batch->n_row, .d = m->config.d_model, .a = b->p, .b = b->branch, .y = b->p,
                            .fault = model_fault(s, layer, stage)};
    return m->backend.op->residual(m->backend.ctx, &add);
}

static br_status norm(br_model *m, const br_step *s, int32_t layer, br_stage stage, const float *w) {
    model_work *b = &m->work;
    BR_TRY(model_rmsnorm(m, s, b->x, w, b->normed, model_fault(s, layer, stage)));
    model_show(s, stage, layer, b->normed, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

static br_status forward(br_model *m, const br_step *s, attention_block mla) {
    const br_config *c = &m->config;
    model_work *b = &m->work;
    const size_t rows_bytes = (size_t)s->batch->n_row * (size_t)c->d_model * sizeof(bi_bf16);
    int32_t n_bank = 0;
    for (int32_t l = 0; l < c->n_layer; l++) {
        const model_layer *w = &m->layer[l];
        const int writes = l % c->res_block == 0;
        if (n_bank)
            BR_TRY(mix(m, s, l, BR_STAGE_RES_ATTN, n_bank, w->attn_res));
        else
            memcpy(b->x, b->p, rows_bytes); /* the bank is empty before layer 0 only */
        if (writes)
            memcpy(b->bank[n_bank++], b->p, rows_bytes); /* the mix above saw the bank without this row */
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_ATTN, w->input_norm));
        BR_TRY((c->layer_is_mla[l] ? mla : model_block_kda)(m, s, l, b->normed, b->branch));
        if (writes)
            memcpy(b->p, b->branch, rows_bytes); /* the running sum restarts after a write */
        else
            BR_TRY(grow(m, s, l, BR_STAGE_ATTN_OUT));
        BR_TRY(mix(m, s, l, BR_STAGE_RES_MLP, n_bank, w->mlp_res));
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_MLP, w->post_norm));
        BR_TRY((l < c->n_dense_layer ? model_block_mlp : model_block_moe_latent)(m, s, l, b->normed, b->branch));
        BR_TRY(grow(m, s, l, BR_STAGE_FFN_OUT));
    }
    BR_TRY(mix(m, s, c->n_layer, BR_STAGE_RES_ATTN, n_bank, m->out_res));
    return norm(m, s, c->n_layer, BR_STAGE_FINAL, m->final_norm);
}

br_status model_forward_kimi_k3(br_model *m, const br_step *s) {
    return forward(m, s, model_block_mla_dense);
}

br_status model_forward_kimi_k31(br_model *m, const br_step *s) {
    return forward(m, s, model_block_mla_sparse);
}
