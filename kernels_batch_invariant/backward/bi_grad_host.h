/* bi_grad_host: what the host form of the gradients shares. Internal to bi_grad_*_host.c; nobody else includes it.
 *
 * Arithmetic is plain binary64 in loops whose order depends on the shapes alone: threads take whole rows, heads or outputs, never
 * parts of a sum. */
#ifndef BI_GRAD_HOST_H
#define BI_GRAD_HOST_H

#define BI_ISA portable /* names of the shared header only */
#include "bi_gemm.h"
#include "bi_grad.h"
#include "br_mem.h"
#include "br_pool.h"

struct bi_grad_ctx {
    br_pool *pool;
    bi_limits limits;
    unsigned char *shared; /* one op at a time uses it */
    size_t shared_bytes;
    unsigned char *thread; /* n_thread slices of thread_bytes */
    size_t thread_bytes;
};

/* What an op needs of each at given limits; in its own file. An op that keeps all on the stack has none. */
typedef struct bi_grad_scratch {
    size_t shared, thread;
} bi_grad_scratch;
bi_grad_scratch bi_grad_linear_host_scratch(const bi_limits *limits);
bi_grad_scratch bi_grad_experts_host_scratch(const bi_limits *limits);
bi_grad_scratch bi_grad_kda_host_scratch(const bi_limits *limits);
bi_grad_scratch bi_grad_attn_host_scratch(const bi_limits *limits);
bi_grad_scratch bi_grad_score_host_scratch(const bi_limits *limits);

/* Scratch to lay arrays out in: the thread's slice, and what all threads share. */
static inline br_arena bi_grad_thread_arena(const bi_grad_ctx *ctx, int thread) {
    return (br_arena){.base = ctx->thread + ctx->thread_bytes * (size_t)thread, .size = ctx->thread_bytes};
}
static inline br_arena bi_grad_shared_arena(const bi_grad_ctx *ctx) {
    return (br_arena){.base = ctx->shared, .size = ctx->shared_bytes};
}

static inline double bi_wide(bi_bf16 x) {
    return (double)bi_widen(x);
}

/* Row o of a packed matrix, n_in values. */
void bi_grad_mat_row(const bi_mat *w, int32_t o, double *row);

br_status bi_grad_rmsnorm_host(bi_grad_ctx *, const bi_grad_norm_args *);
br_status bi_grad_linear_host(bi_grad_ctx *, const bi_grad_linear_args *);
br_status bi_grad_conv_host(bi_grad_ctx *, const bi_grad_conv_args *);
br_status bi_grad_kda_gate_host(bi_grad_ctx *, const bi_grad_kda_gate_args *);
br_status bi_grad_kda_host(bi_grad_ctx *, const bi_grad_kda_args *);
br_status bi_grad_kda_norm_host(bi_grad_ctx *, const bi_grad_kda_norm_args *);
br_status bi_grad_attn_host(bi_grad_ctx *, const bi_grad_attn_args *);
br_status bi_grad_attn_gate_host(bi_grad_ctx *, const bi_grad_attn_gate_args *);
br_status bi_grad_route_host(bi_grad_ctx *, const bi_grad_route_args *);
br_status bi_grad_experts_host(bi_grad_ctx *, const bi_grad_experts_args *);
br_status bi_grad_combine_host(bi_grad_ctx *, const bi_grad_combine_args *);
br_status bi_grad_glu_host(bi_grad_ctx *, const bi_grad_glu_args *);
br_status bi_grad_attnres_host(bi_grad_ctx *, const bi_grad_attnres_args *);
br_status bi_grad_score_host(bi_grad_ctx *, const bi_grad_score_args *);

#endif
