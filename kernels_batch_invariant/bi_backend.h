/* bi_backend: the op table. The model is written against it once; each backend fills it with the same bits.
 *
 * Layer: kernels_batch_invariant. Open: bi_backend_oracle_open, bi_backend_cuda_open. All ops: see their headers. */
#ifndef BI_BACKEND_H
#define BI_BACKEND_H

#include "bi_attn.h"
#include "bi_attnres.h"
#include "bi_conv.h"
#include "bi_embed.h"
#include "bi_experts.h"
#include "bi_generate.h"
#include "bi_glu.h"
#include "bi_head.h"
#include "bi_index.h"
#include "bi_kda.h"
#include "bi_linear.h"
#include "bi_move.h"
#include "bi_norm.h"
#include "bi_pack.h"
#include "bi_route.h"
#include "bi_sample.h"
#include "br_pool.h"

typedef struct bi_ops {
    const char *name; /* "oracle-portable", "oracle-avx2", "oracle-avx512", "cuda" */

    /* Frees what open made. */
    void (*close)(bi_ctx *);

    /* Packed matrices, at load: bytes of one, which is also the stride of a stack. Sources lie in host memory; element (o, i)
     * at src[o * stride_out + i * stride_in]. BR_E_SHAPE when a size is below 1. Several threads may pack at once. */
    size_t (*mat_bytes)(bi_form form, int32_t n_out, int32_t n_in);
    br_status (*mat_pack_bf16)(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out,
                               int64_t stride_in);
    /* code (n_out, n_in/2) two a byte, low nibble first; scale (n_out, n_in/32) E8M0 bytes 0..252; n_in a multiple of 32 */
    br_status (*mat_pack_fp4)(bi_ctx *, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale);
    /* The same from a recipe instead of a source, and vectors; see bi_generate.h. */
    br_status (*mat_generate)(bi_ctx *, const bi_mat_generate_args *);
    br_status (*vector_generate)(bi_ctx *, const bi_vector_generate_args *);
    /* Bytes of what a layer keeps of a sequence, and of a block of cached positions. */
    size_t (*kda_state_bytes)(int32_t n_head, int32_t d);
    size_t (*latent_block_bytes)(int32_t d_latent);
    size_t (*index_block_bytes)(int32_t d);

    br_status (*embed)(bi_ctx *, const bi_embed_args *);
    br_status (*rmsnorm)(bi_ctx *, const bi_norm_args *);
    br_status (*layernorm)(bi_ctx *, const bi_norm_args *);
    br_status (*linear)(bi_ctx *, const bi_linear_args *);
    br_status (*linear_group)(bi_ctx *, const bi_linear_args *, int32_t n);
    br_status (*conv)(bi_ctx *, const bi_conv_args *);
    br_status (*kda_gate)(bi_ctx *, const bi_kda_gate_args *);
    br_status (*kda)(bi_ctx *, const bi_kda_args *);
    br_status (*kda_norm)(bi_ctx *, const bi_kda_norm_args *);
    br_status (*latent_store)(bi_ctx *, const bi_latent_store_args *);
    br_status (*attn)(bi_ctx *, const bi_attn_args *);
    br_status (*attn_gate)(bi_ctx *, const bi_attn_gate_args *);
    br_status (*index_store)(bi_ctx *, const bi_index_store_args *);
    br_status (*index_select)(bi_ctx *, const bi_index_select_args *);
    br_status (*route)(bi_ctx *, const bi_route_args *);
    br_status (*experts)(bi_ctx *, const bi_experts_args *);
    br_status (*combine)(bi_ctx *, const bi_combine_args *);
    br_status (*glu)(bi_ctx *, const bi_glu_args *);
    br_status (*attnres)(bi_ctx *, const bi_attnres_args *);
    br_status (*attnres_weight)(bi_ctx *, float *w, const float *norm, const float *proj, int32_t d);
    br_status (*residual)(bi_ctx *, const bi_residual_args *);
    br_status (*gather)(bi_ctx *, const bi_gather_args *);
    br_status (*seg_fault)(bi_ctx *, const bi_seg_fault_args *);
    br_status (*score)(bi_ctx *, const bi_score_args *);
    br_status (*sample)(bi_ctx *, const bi_sample_args *);
    br_status (*mat_pack_f32)(bi_ctx *, const bi_mat_pack_f32_args *);
    br_status (*mat_unpack)(bi_ctx *, const bi_mat_unpack_args *);
    br_status (*conv_group)(bi_ctx *, const bi_conv_args *, int32_t n);
    /* BI_FORM_BF16 as rows of bf16: elements from one row (n_in, zeros behind) to the next. NULL where it is another form. */
    int64_t (*mat_row)(int32_t n_in);
} bi_ops;

typedef struct bi_backend {
    const bi_ops *op;
    bi_ctx *ctx;
} bi_backend;

/* isa: NULL picks the best this processor has; else "portable", "avx2", "avx512" (BR_E_UNSUPPORTED when it lacks it).
 * The pool stays the caller's and must outlive the backend. Scratch is sized from the limits. */
br_status bi_backend_oracle_open(const bi_limits *limits, br_pool *pool, const char *isa, bi_backend *out);

/* Closes a backend of any kind; one that never opened, or is closed already, is a no-op. */
static inline void bi_backend_close(bi_backend *backend) {
    if (backend->ctx)
        backend->op->close(backend->ctx);
    *backend = (bi_backend){NULL, NULL};
}

/* Constants of a model that the contract rounds once from their exact value. */
float bi_const_attn_alpha(int32_t d_nope, int32_t d_rope);      /* (d_nope + d_rope)^-1/2 */
float bi_const_index_c(int32_t n_head, int32_t d);              /* (n_head * d)^-1/2 */
float bi_const_kda_scale(int32_t d);                            /* d^-1/2 */
/* alpha/r, or alpha/sqrt r */
float bi_const_lora_s(double alpha, int32_t rank, int32_t rslora);

#endif
