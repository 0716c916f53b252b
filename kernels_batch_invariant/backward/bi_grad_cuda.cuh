/* bi_grad_cuda: what the CUDA form of the gradients shares. Internal to bi_grad_*.cu; nobody else includes it.
 *
 * Determinism: every sum has one owner and a fixed order; no float atomics; cuBLASLt without split-K. Plain operators on floats are
 * allowed here: no gradient is under the bit contract. Launches go to ctx->cuda->stream; nothing waits, allocates after open, or
 * reads device memory from the host. */
#ifndef BI_GRAD_CUDA_CUH
#define BI_GRAD_CUDA_CUH

#include "bi_cuda.cuh"
extern "C" {
#include "bi_grad.h"
}

struct bi_grad_ctx {
    bi_backend forward;     /* its own, for values that the backward computes again */
    bi_ctx *cuda;           /* forward.ctx */
    br_device *device;
    unsigned char *scratch; /* one op at a time uses it; the forward's scratch is another */
    size_t scratch_bytes;
    void *gemm;             /* state of bi_grad_gemm.cu */
};

/* Device scratch of each family at given limits; each in its own file. */
size_t bi_grad_linear_cuda_scratch(const bi_limits *limits);
size_t bi_grad_experts_cuda_scratch(const bi_limits *limits);
size_t bi_grad_kda_cuda_scratch(const bi_limits *limits);
size_t bi_grad_attn_cuda_scratch(const bi_limits *limits);
size_t bi_grad_score_cuda_scratch(const bi_limits *limits);

static inline bi_carver bi_grad_cuda_carver(bi_grad_ctx *ctx) {
    bi_carver carver = {ctx->scratch, 0, ctx->scratch_bytes};
    return carver;
}

static inline br_status bi_grad_launched(const char *op) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "gradient of %s: the GPU refused the launch: %s", op, cudaGetErrorString(error));
}

/* Dense products through cuBLASLt, row-major: c (m, n) f32 = alpha * op(a) op(b) + beta * c, batched with strides (batch 1: one).
 * a is (m, k), or (k, m) when a_t; b is (k, n), or (n, k) when b_t; both bf16. Row strides a_ld, b_ld, c_ld in elements. Any sizes and
 * alignment; k = 0 scales c by beta. */
typedef struct bi_grad_gemm_args {
    int32_t m, n, k, batch;
    const bi_bf16 *a, *b;
    int64_t a_ld, b_ld, c_ld, a_stride, b_stride, c_stride;
    int32_t a_t, b_t;
    float alpha, beta;
    float *c;
} bi_grad_gemm_args;
br_status bi_grad_gemm_open(bi_grad_ctx *ctx);
void bi_grad_gemm_close(bi_grad_ctx *ctx);
br_status bi_grad_gemm(bi_grad_ctx *ctx, const bi_grad_gemm_args *args);

br_status bi_grad_rmsnorm_cuda(bi_grad_ctx *, const bi_grad_norm_args *);
br_status bi_grad_linear_cuda(bi_grad_ctx *, const bi_grad_linear_args *);
br_status bi_grad_conv_cuda(bi_grad_ctx *, const bi_grad_conv_args *);
br_status bi_grad_kda_gate_cuda(bi_grad_ctx *, const bi_grad_kda_gate_args *);
br_status bi_grad_kda_cuda(bi_grad_ctx *, const bi_grad_kda_args *);
br_status bi_grad_kda_norm_cuda(bi_grad_ctx *, const bi_grad_kda_norm_args *);
br_status bi_grad_attn_cuda(bi_grad_ctx *, const bi_grad_attn_args *);
br_status bi_grad_attn_gate_cuda(bi_grad_ctx *, const bi_grad_attn_gate_args *);
br_status bi_grad_route_cuda(bi_grad_ctx *, const bi_grad_route_args *);
br_status bi_grad_experts_cuda(bi_grad_ctx *, const bi_grad_experts_args *);
br_status bi_grad_combine_cuda(bi_grad_ctx *, const bi_grad_combine_args *);
br_status bi_grad_glu_cuda(bi_grad_ctx *, const bi_grad_glu_args *);
br_status bi_grad_attnres_cuda(bi_grad_ctx *, const bi_grad_attnres_args *);
br_status bi_grad_score_cuda(bi_grad_ctx *, const bi_grad_score_args *);

#endif
