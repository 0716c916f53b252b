/* Kimi K3 and K3.1: KDA and MLA layers over a residual bank (AttnRes), latent MoE. The two differ in one call: K3 attends to
 * every visible position, K3.1 to those its indexer selects.
 * Contract: N-RES, N-NORM. Shapes: R rows, D d_model. */
#include "model_parts.h"

typedef br_status (*attention_block)(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);

/* The residual stream of one forward: which buffers (R, D) hold the bank, the running sum, and the output of the next block.
 * Nothing is copied: a row put into the bank stays where it is, and a fresh buffer takes its part. */
typedef struct stream {
    const bi_bf16 *bank[BR_BANK_MAX];
    int32_t n_bank;
    bi_bf16 *p, *branch;
} stream;

/* x (R, D) = mix of the bank's rows and the running sum p */
static br_status mix(br_model *m, const br_step *s, const stream *r, int32_t layer, br_stage stage, const float *w) {
    bi_attnres_args args = {
        .n_row = s->batch->n_row, .d = m->config.d_model, .n_bank = r->n_bank, .bank = r->bank, .p = r->p,
        .w = w, .eps = m->config.norm_eps, .y = m->work.x, .fault = model_fault(s, layer, stage),
    };
    BR_TRY(m->backend.op->attnres(m->backend.ctx, &args));
    model_show(s, stage, layer, m->work.x, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

/* p (R, D) = R(p + branch) */
static br_status grow(br_model *m, const br_step *s, const stream *r, int32_t layer, br_stage stage) {
    bi_residual_args add = {.n_row = s->batch->n_row, .d = m->config.d_model, .a = r->p, .b = r->branch, .y = r->p,
                            .fault = model_fault(s, layer, stage)};
    return m->backend.op->residual(m->backend.ctx, &add);
}

/* normed (R, D) = norm of x */
static br_status norm(br_model *m, const br_step *s, int32_t layer, br_stage stage, const bi_bf16 *x, const float *w) {
    model_work *b = &m->work;
    BR_TRY(model_rmsnorm(m, s, x, w, b->normed, model_fault(s, layer, stage)));
    model_show(s, stage, layer, b->normed, (int64_t)m->config.d_model * 2);
    return BR_OK;
}

/* The running sum goes into the bank; the block's output becomes the new one. */
static void put_into_bank(stream *r, bi_bf16 *fresh) {
    r->bank[r->n_bank++] = r->p;
    r->p = r->branch;
    r->branch = fresh;
}

static br_status forward(br_model *m, const br_step *s, attention_block mla) {
    const br_config *c = &m->config;
    model_work *b = &m->work;
    stream r = {.p = b->p, .branch = b->branch};
    for (int32_t l = 0; l < c->n_layer; l++) {
        const model_layer *w = &m->layer[l];
        const int writes = l % c->res_block == 0, empty = r.n_bank == 0; /* the bank is empty before layer 0 only */
        if (!empty)
            BR_TRY(mix(m, s, &r, l, BR_STAGE_RES_ATTN, w->attn_res));
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_ATTN, empty ? r.p : b->x, w->input_norm));
        BR_TRY((c->layer_is_mla[l] ? mla : model_block_kda)(m, s, l, b->normed, r.branch));
        if (writes) /* after the mix above, which saw the bank without this row */
            put_into_bank(&r, b->bank_room[r.n_bank]);
        else
            BR_TRY(grow(m, s, &r, l, BR_STAGE_ATTN_OUT));
        BR_TRY(mix(m, s, &r, l, BR_STAGE_RES_MLP, w->mlp_res));
        BR_TRY(norm(m, s, l, BR_STAGE_NORM_MLP, b->x, w->post_norm));
        BR_TRY((l < c->n_dense_layer ? model_block_mlp : model_block_moe_latent)(m, s, l, b->normed, r.branch));
        BR_TRY(grow(m, s, &r, l, BR_STAGE_FFN_OUT));
    }
    BR_TRY(mix(m, s, &r, c->n_layer, BR_STAGE_RES_ATTN, m->out_res));
    return norm(m, s, c->n_layer, BR_STAGE_FINAL, b->x, m->final_norm);
}

br_status model_forward_kimi_k3(br_model *m, const br_step *s) {
    return forward(m, s, model_block_mla_dense);
}

br_status model_forward_kimi_k31(br_model *m, const br_step *s) {
    return forward(m, s, model_block_mla_sparse);
}
