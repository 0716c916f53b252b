/* model_parts: the packed weights and work buffers behind br_model, and the blocks the three architectures are made of.
 * Internal to src/model. */
#ifndef MODEL_PARTS_H
#define MODEL_PARTS_H

#include "br_model.h"

/* A linear map and what each adapter slot adds to it. */
typedef struct model_map {
    bi_mat w;
    const bi_adapter *lora; /* (n_slot), NULL: no adapter touches it */
} model_map;

typedef struct kda_weights {
    model_map q, k, v, f_a, f_b, b, o;
    model_map g;        /* full-rank output gate */
    model_map g_a, g_b; /* or low-rank, Kimi-Linear */
    const float *conv_q, *conv_k, *conv_v, *a_log, *dt_bias, *o_norm;
    size_t history_offset, state_offset; /* in a sequence's state: three conv histories, and S */
} kda_weights;

typedef struct mla_weights {
    model_map q_a, q_b; /* or q alone, Kimi-Linear */
    model_map q, kv_a, g, o;
    bi_mat w_uk, w_uv;                      /* stacks of n_head, halves of kv_b: (d_kv_latent, d_nope), (d_v, d_kv_latent) */
    const bi_adapter *lora_uk, *lora_uv;    /* (n_slot), of stacks as tall */
    const float *q_norm, *kv_norm;
    bi_mat index_q, index_k, index_weight;
    const float *index_norm, *index_norm_bias;
    size_t latent_offset, index_offset;     /* in a page */
} mla_weights;

typedef struct mlp_weights {
    model_map gate, up, down;
    int32_t d_ff;
} mlp_weights;

typedef struct moe_weights {
    bi_mat router;
    const float *router_bias;
    model_map latent_down, latent_up;
    const float *latent_norm;
    bi_mat w1, w3, w2;                        /* stacks of n_expert */
    const bi_adapter *lora1, *lora3, *lora2;  /* (n_slot), of stacks as tall */
    mlp_weights shared;
} moe_weights;

typedef struct model_layer {
    const float *input_norm, *post_norm;
    const float *attn_res, *mlp_res; /* W of N-RES; NULL in a plain residual stream */
    kda_weights kda;
    mla_weights mla;
    mlp_weights mlp;
    moe_weights moe;
} model_layer;

/* Work buffers of one step, R = n_row_max rows each, in the device's memory. */
typedef struct model_work {
    bi_bf16 *bank_room[BR_BANK_MAX]; /* (R, d_model), one for each row that a forward puts into the bank */
    bi_bf16 *p, *x, *normed, *branch; /* (R, d_model): running sum, mixed row, its norm, output of a block */
    /* KDA (R, n_head * d_head) */
    bi_bf16 *q_in, *k_in, *v_in, *q, *k, *v, *low, *gate_low, *f, *b, *gate, *mixed;
    float *decay, *beta, *o;
    /* MLA */
    bi_bf16 *cq, *query, *latent, *absorbed, *z;
    bi_bf16 *index_q, *index_k;
    float *index_w;
    int32_t *select, *n_select;
    /* feed-forward */
    float *up_f32, *gate_f32, *p_expert;
    bi_bf16 *act, *down_in, *slots, *combined, *shared;
    int32_t *expert;
} model_work;

struct br_model {
    br_config config;
    bi_backend backend;
    br_device *device;
    br_comm comm;
    int32_t n_row_max, n_slot;
    int32_t swap_rank;    /* 0: no adapter is swapped */
    uint16_t *swap_full;  /* host, one matrix of an adapter at swap_rank; NULL without */
    const bi_bf16 *embed; /* (n_vocab, d_model) */
    bi_mat head;
    const float *final_norm, *out_res;
    model_layer *layer;
    model_work work;
    float attn_alpha, index_c, kda_scale;
    bi_act act;
    size_t page_bytes, state_bytes;
    br_arena arena;  /* structs, in host memory */
    br_arena memory; /* packed weights and work buffers, in the device's */
};

/* Bytes of the weights and of the work buffers (model_bind.c). */
void model_measure(br_model *model, const br_model_options *options, br_model_sizes *out);
/* Fills everything but the sizes known from the config; runs twice, measuring and real (model_bind.c). */
br_status model_bind(br_model *model, const br_model_options *options);

/* Of one matrix of an adapter (model_adapter.c): its stacks, data NULL where nothing was reserved; kv_b has two in their place, lora_uk
 * and lora_uv. Its shape at a rank; where s lies, n of them; and what s is. */
bi_adapter model_adapter_of(const br_model *m, const br_model_matrix *at);
bi_adapter model_absorbed_of(const bi_adapter *slot, const br_model_matrix *at);
void model_adapter_shape(const br_model *m, const br_model_matrix *at, int32_t rank, int32_t *n_row, int32_t *n_col);
const float *model_adapter_s(const br_model *m, const br_model_matrix *at, int32_t *n);
float model_adapter_scale(const br_model_matrix *at, double alpha, int32_t rslora);

/* Blocks: x (n_row, d_model) normed row in, out (n_row, d_model) bf16. */
br_status model_block_kda(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);
br_status model_block_mla_dense(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);
br_status model_block_mla_sparse(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);
br_status model_block_mlp(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);
br_status model_block_moe_latent(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);
br_status model_block_moe_plain(br_model *m, const br_step *s, int32_t layer, const bi_bf16 *x, bi_bf16 *out);

br_status model_forward_kimi_k31(br_model *m, const br_step *s);
br_status model_forward_kimi_k3(br_model *m, const br_step *s);
br_status model_forward_kimi_linear(br_model *m, const br_step *s);

/* Bytes of one stream's convolution history; a layer's state begins with those of q, k and v. */
static inline size_t model_history_bytes(const br_config *c) {
    return (size_t)(BR_CONV_TAP - 1) * (size_t)br_config_kda_width(c) * sizeof(bi_bf16);
}

/* Small phrases that every block speaks. */
static inline bi_fault model_fault(const br_step *s, int32_t layer, br_stage stage) {
    return (bi_fault){.row = s->row_fault, .code = br_fault_code(layer, stage)};
}

static inline void model_show(const br_step *s, br_stage stage, int32_t layer, const void *rows, int64_t row_bytes) {
    if (!s->trace)
        return;
    br_piece piece = {.data = rows, .row_stride = row_bytes, .row_bytes = row_bytes};
    s->trace->rows(s->trace->context, stage, layer, &piece, 1);
}

/* Maps of one input, or of several, computed together; their stages ascend. */
typedef struct model_group {
    bi_linear_args map[BI_LINEAR_GROUP_MAX];
    int32_t n;
} model_group;
void model_group_add(model_group *group, br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, bi_bf16 *y, bi_fault fault);
void model_group_add_f32(model_group *group, br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, float *y, bi_fault fault);
br_status model_group_run(model_group *group, br_model *m);

/* y (n_row, n_out) = map(x (n_row, n_in)), dense rows. */
br_status model_linear(br_model *m, const br_step *s, const model_map *map, const bi_bf16 *x, bi_bf16 *y, bi_fault fault);
br_status model_rmsnorm(br_model *m, const br_step *s, const bi_bf16 *x, const float *w, bi_bf16 *y, bi_fault fault);

#endif
