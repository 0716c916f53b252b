/* Opens the CUDA form of the gradients: the table, a forward backend of its own, the scratch. */
#include "bi_grad_cuda.cuh"
extern "C" {
#include "bi_cuda_test.h"
}

static void close_cuda(bi_grad_ctx *ctx) {
    bi_grad_gemm_close(ctx);
    bi_backend_close(&ctx->forward);
    br_device_free(ctx->device, ctx->scratch);
    br_mem_free(ctx);
}

static const bi_grad_ops *table(void) {
    static bi_grad_ops ops;
    ops.name = "cuda";
    ops.close = close_cuda;
    ops.rmsnorm = bi_grad_rmsnorm_cuda;
    ops.linear = bi_grad_linear_cuda;
    ops.conv = bi_grad_conv_cuda;
    ops.kda_gate = bi_grad_kda_gate_cuda;
    ops.kda = bi_grad_kda_cuda;
    ops.kda_norm = bi_grad_kda_norm_cuda;
    ops.attn = bi_grad_attn_cuda;
    ops.attn_gate = bi_grad_attn_gate_cuda;
    ops.route = bi_grad_route_cuda;
    ops.experts = bi_grad_experts_cuda;
    ops.combine = bi_grad_combine_cuda;
    ops.glu = bi_grad_glu_cuda;
    ops.attnres = bi_grad_attnres_cuda;
    ops.score = bi_grad_score_cuda;
    return &ops;
}

static size_t scratch_for(const bi_limits *limits) {
    size_t (*const family[])(const bi_limits *) = {
        bi_grad_linear_cuda_scratch, bi_grad_experts_cuda_scratch, bi_grad_kda_cuda_scratch, bi_grad_attn_cuda_scratch,
        bi_grad_score_cuda_scratch,
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++) {
        const size_t need = family[i](limits);
        most = need > most ? need : most;
    }
    return most;
}

/* Nothing in scratch has to be zero between calls: attention's partial sums, which are added to, are cleared as it begins. */
extern "C" br_status bi_grad_cuda_poison(const bi_grad *grad) {
    const bi_grad_ctx *ctx = grad->ctx;
    const cudaError_t error = ctx->scratch_bytes ? cudaMemsetAsync(ctx->scratch, 0xff, ctx->scratch_bytes, ctx->cuda->stream) : cudaSuccess;
    return error == cudaSuccess ? bi_cuda_poison(&ctx->forward) : br_fail(BR_E_DEVICE, "the GPU poisons no scratch: %s", cudaGetErrorString(error));
}

extern "C" br_status bi_grad_cuda_open(const bi_limits *limits, br_device *device, bi_grad *out) {
    bi_grad_ctx *ctx = NULL;
    br_status status;
    out->op = NULL;
    out->ctx = NULL;
    BR_TRY(br_mem_alloc((void **)&ctx, sizeof *ctx, "the gradients"));
    ctx->device = device;
    BR_TRY_GOTO(bi_backend_cuda_open(limits, device, &ctx->forward), fail);
    ctx->cuda = ctx->forward.ctx;
    ctx->scratch_bytes = scratch_for(limits);
    BR_TRY_GOTO(br_device_alloc(device, ctx->scratch_bytes, "scratch of the gradients", (void **)&ctx->scratch), fail);
    BR_TRY_GOTO(bi_grad_gemm_open(ctx), fail);
    out->op = table();
    out->ctx = ctx;
    return BR_OK;
fail:
    close_cuda(ctx);
    return status;
}
