/* The oracle's op table of one instruction set; see bi_oracle.h. Compiled once for each. */
#include "bi_oracle.h"

#define BI_TEXT_(x) #x
#define BI_TEXT(x) BI_TEXT_(x)

extern const bi_ops BI_FN(bi_ops);

const bi_ops BI_FN(bi_ops) = {
    .name = "oracle-" BI_TEXT(BI_ISA),
    .close = bi_oracle_close,
    .mat_bytes = BI_FN(bi_mat_bytes),
    .mat_pack_bf16 = BI_FN(bi_mat_pack_bf16),
    .mat_pack_fp4 = BI_FN(bi_mat_pack_fp4),
    .mat_generate = BI_FN(bi_mat_generate),
    .vector_generate = BI_FN(bi_vector_generate),
    .kda_state_bytes = BI_FN(bi_kda_state_bytes),
    .latent_block_bytes = BI_FN(bi_latent_block_bytes),
    .index_block_bytes = BI_FN(bi_index_block_bytes),
    .embed = BI_FN(bi_embed),
    .rmsnorm = BI_FN(bi_rmsnorm),
    .layernorm = BI_FN(bi_layernorm),
    .linear = BI_FN(bi_linear),
    .linear_group = BI_FN(bi_linear_group),
    .conv = BI_FN(bi_conv),
    .conv_group = BI_FN(bi_conv_group),
    .kda_gate = BI_FN(bi_kda_gate),
    .kda = BI_FN(bi_kda),
    .kda_norm = BI_FN(bi_kda_norm),
    .latent_store = BI_FN(bi_latent_store),
    .attn = BI_FN(bi_attn),
    .attn_gate = BI_FN(bi_attn_gate),
    .index_store = BI_FN(bi_index_store),
    .index_select = BI_FN(bi_index_select),
    .route = BI_FN(bi_route),
    .experts = BI_FN(bi_experts),
    .combine = BI_FN(bi_combine),
    .glu = BI_FN(bi_glu),
    .attnres = BI_FN(bi_attnres),
    .attnres_weight = BI_FN(bi_attnres_weight),
    .residual = BI_FN(bi_residual),
    .gather = BI_FN(bi_gather),
    .seg_fault = BI_FN(bi_seg_fault),
    .score = BI_FN(bi_score),
    .sample = BI_FN(bi_sample),
    .mat_pack_f32 = BI_FN(bi_mat_pack_f32),
    .mat_unpack = BI_FN(bi_mat_unpack),
};
