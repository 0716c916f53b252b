/* bi_oracle: what the oracle's op files share. Internal to the oracle; nobody else includes it.
 *
 * Every bi_<op>_oracle.c (and numeric/bi_chain.c, bi_backend_oracle.c) is compiled three times (bi_isa.h), with the machine
 * flags of its instruction set. The source is one, the bits are one: no contraction, no reassociation, explicit fmaf; the
 * compiler only fills wider lanes. bi_ops_<isa> is the table. What needs no copy stands under `#ifdef BI_ISA_portable`. */
#ifndef BI_ORACLE_H
#define BI_ORACLE_H

#include "bi_backend.h"
#include "bi_isa.h"
#include "br_mem.h"

struct bi_ctx {
    br_pool *pool;
    bi_limits limits;
    unsigned char *shared; /* one op at a time uses it */
    size_t shared_bytes;
    unsigned char *thread; /* n_thread slices of thread_bytes */
    size_t thread_bytes;
};

static inline unsigned char *bi_thread_scratch(const bi_ctx *ctx, int thread, size_t bytes) {
    BR_ASSERT(bytes <= ctx->thread_bytes);
    return ctx->thread + ctx->thread_bytes * (size_t)thread;
}
/* The thread's whole slice, to lay arrays out in. */
static inline br_arena bi_thread_arena(const bi_ctx *ctx, int thread) {
    return (br_arena){.base = bi_thread_scratch(ctx, thread, 0), .size = ctx->thread_bytes};
}
static inline unsigned char *bi_shared_scratch(const bi_ctx *ctx, size_t bytes) {
    BR_ASSERT(bytes <= ctx->shared_bytes);
    return ctx->shared;
}

/* Scratch of each op family at given limits; bi_backend_oracle_open takes the maxima. In each op's own file, compiled with
 * the portable copy only. Ops that are not here keep all they need on the stack. */
typedef struct bi_scratch { size_t shared, thread; } bi_scratch;
bi_scratch bi_linear_scratch(const bi_limits *limits);
bi_scratch bi_experts_scratch(const bi_limits *limits);
bi_scratch bi_attn_scratch(const bi_limits *limits);
bi_scratch bi_index_scratch(const bi_limits *limits);
bi_scratch bi_route_scratch(const bi_limits *limits);
bi_scratch bi_head_scratch(const bi_limits *limits);   /* score and sample */

void bi_oracle_close(bi_ctx *ctx); /* the same for all three */

/* The ops, one per bi_<op>_oracle.c. */
size_t BI_FN(bi_mat_bytes)(bi_form form, int32_t n_out, int32_t n_in);
br_status BI_FN(bi_mat_pack_bf16)(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out,
                                  int64_t stride_in);
br_status BI_FN(bi_mat_pack_fp4)(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code,
                                 const uint8_t *scale);
br_status BI_FN(bi_mat_pack_f32)(bi_ctx *, const bi_mat_pack_f32_args *);
br_status BI_FN(bi_mat_unpack)(bi_ctx *, const bi_mat_unpack_args *);
br_status BI_FN(bi_mat_generate)(bi_ctx *, const bi_mat_generate_args *);
br_status BI_FN(bi_vector_generate)(bi_ctx *, const bi_vector_generate_args *);
size_t BI_FN(bi_kda_state_bytes)(int32_t n_head, int32_t d);
size_t BI_FN(bi_latent_block_bytes)(int32_t d_latent);
size_t BI_FN(bi_index_block_bytes)(int32_t d);
br_status BI_FN(bi_embed)(bi_ctx *, const bi_embed_args *);
br_status BI_FN(bi_rmsnorm)(bi_ctx *, const bi_norm_args *);
br_status BI_FN(bi_layernorm)(bi_ctx *, const bi_norm_args *);
br_status BI_FN(bi_linear)(bi_ctx *, const bi_linear_args *);
br_status BI_FN(bi_linear_group)(bi_ctx *, const bi_linear_args *, int32_t n);
br_status BI_FN(bi_conv)(bi_ctx *, const bi_conv_args *);
br_status BI_FN(bi_conv_group)(bi_ctx *, const bi_conv_args *, int32_t n);
br_status BI_FN(bi_kda_gate)(bi_ctx *, const bi_kda_gate_args *);
br_status BI_FN(bi_kda)(bi_ctx *, const bi_kda_args *);
br_status BI_FN(bi_kda_norm)(bi_ctx *, const bi_kda_norm_args *);
br_status BI_FN(bi_latent_store)(bi_ctx *, const bi_latent_store_args *);
br_status BI_FN(bi_attn)(bi_ctx *, const bi_attn_args *);
br_status BI_FN(bi_attn_gate)(bi_ctx *, const bi_attn_gate_args *);
br_status BI_FN(bi_index_store)(bi_ctx *, const bi_index_store_args *);
br_status BI_FN(bi_index_select)(bi_ctx *, const bi_index_select_args *);
br_status BI_FN(bi_route)(bi_ctx *, const bi_route_args *);
br_status BI_FN(bi_experts)(bi_ctx *, const bi_experts_args *);
br_status BI_FN(bi_combine)(bi_ctx *, const bi_combine_args *);
br_status BI_FN(bi_glu)(bi_ctx *, const bi_glu_args *);
br_status BI_FN(bi_attnres)(bi_ctx *, const bi_attnres_args *);
br_status BI_FN(bi_attnres_weight)(bi_ctx *, float *w, const float *norm, const float *proj, int32_t d);
br_status BI_FN(bi_residual)(bi_ctx *, const bi_residual_args *);
br_status BI_FN(bi_gather)(bi_ctx *, const bi_gather_args *);
br_status BI_FN(bi_seg_fault)(bi_ctx *, const bi_seg_fault_args *);
br_status BI_FN(bi_score)(bi_ctx *, const bi_score_args *);
br_status BI_FN(bi_sample)(bi_ctx *, const bi_sample_args *);

#endif
