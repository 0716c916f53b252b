/* Opens the CUDA backend: the op table, the scratch, the launch counters; see bi_cuda.cuh. */
#include "bi_cuda.cuh"
extern "C" {
#include "bi_cuda_test.h"
}

static const char *const KERNEL_NAME[BI_K_COUNT] = {
#define BI_CUDA_NAME(name) #name,
    BI_CUDA_KERNELS(BI_CUDA_NAME)
#undef BI_CUDA_NAME
};

static void close_cuda(bi_ctx *ctx) {
    bi_cuda_linear_close(ctx);
    br_device_free(ctx->device, ctx->scratch);
    br_mem_free(ctx);
}

static const bi_ops *table(void) {
    static bi_ops ops;
    ops.name = "cuda";
    ops.close = close_cuda;
    ops.mat_bytes = bi_cuda_mat_bytes;
    ops.mat_pack_bf16 = bi_cuda_mat_pack_bf16;
    ops.mat_pack_fp4 = bi_cuda_mat_pack_fp4;
    ops.mat_generate = bi_cuda_mat_generate;
    ops.vector_generate = bi_cuda_vector_generate;
    ops.kda_state_bytes = bi_cuda_kda_state_bytes;
    ops.latent_block_bytes = bi_cuda_latent_block_bytes;
    ops.index_block_bytes = bi_cuda_index_block_bytes;
    ops.embed = bi_cuda_embed;
    ops.rmsnorm = bi_cuda_rmsnorm;
    ops.layernorm = bi_cuda_layernorm;
    ops.linear = bi_cuda_linear;
    ops.linear_group = bi_cuda_linear_group;
    ops.conv = bi_cuda_conv;
    ops.conv_group = bi_cuda_conv_group;
    ops.kda_gate = bi_cuda_kda_gate;
    ops.kda = bi_cuda_kda;
    ops.kda_norm = bi_cuda_kda_norm;
    ops.latent_store = bi_cuda_latent_store;
    ops.attn = bi_cuda_attn;
    ops.attn_gate = bi_cuda_attn_gate;
    ops.index_store = bi_cuda_index_store;
    ops.index_select = bi_cuda_index_select;
    ops.route = bi_cuda_route;
    ops.experts = bi_cuda_experts;
    ops.combine = bi_cuda_combine;
    ops.glu = bi_cuda_glu;
    ops.attnres = bi_cuda_attnres;
    ops.attnres_weight = bi_cuda_attnres_weight;
    ops.residual = bi_cuda_residual;
    ops.gather = bi_cuda_gather;
    ops.seg_fault = bi_cuda_seg_fault;
    ops.score = bi_cuda_score;
    ops.sample = bi_cuda_sample;
    ops.mat_pack_f32 = bi_cuda_mat_pack_f32;
    ops.mat_unpack = bi_cuda_mat_unpack;
    ops.mat_row = bi_cuda_mat_row;
    return &ops;
}

static size_t scratch_for(const bi_limits *limits) {
    size_t (*const family[])(const bi_limits *) = {
        bi_cuda_linear_scratch, bi_cuda_experts_scratch, bi_cuda_kda_scratch,  bi_cuda_attn_scratch,
        bi_cuda_index_scratch,  bi_cuda_route_scratch,   bi_cuda_head_scratch, bi_cuda_sample_scratch,
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++) {
        size_t need = family[i](limits);
        most = need > most ? need : most;
    }
    return most;
}

extern "C" br_status bi_backend_cuda_open(const bi_limits *limits, br_device *device, bi_backend *out) {
    bi_ctx *ctx = NULL;
    br_status status;
    out->op = NULL;
    out->ctx = NULL;
    if (br_device_is_host(device))
        return br_fail(BR_E_UNSUPPORTED, "the CUDA backend on device '%s': expected a CUDA device", br_device_name(device));
    if (limits->n_slot > BI_CUDA_SLOT_MAX)
        return br_fail(BR_E_LIMIT, "the CUDA backend with %d adapters: expected at most %d", limits->n_slot, BI_CUDA_SLOT_MAX);
    BR_TRY(br_mem_alloc((void **)&ctx, sizeof *ctx, "the CUDA backend"));
    ctx->limits = *limits;
    ctx->device = device;
    ctx->stream = (cudaStream_t)br_device_stream(device);
    ctx->scratch_bytes = scratch_for(limits);
    cudaDeviceGetAttribute(&ctx->n_sm, cudaDevAttrMultiProcessorCount, 0);
    BR_TRY_GOTO(br_device_alloc(device, ctx->scratch_bytes, "scratch of the ops", (void **)&ctx->scratch), fail);
    BR_TRY_GOTO(bi_cuda_linear_open(ctx), fail);
    out->op = table();
    out->ctx = ctx;
    return BR_OK;
fail:
    close_cuda(ctx);
    return status;
}

extern "C" void bi_cuda_note(const bi_backend *backend, char note[BI_CUDA_NOTE_BYTES]) {
    note[0] = 0;
    if (backend->op == table())
        bi_cuda_linear_note(backend->ctx, note, BI_CUDA_NOTE_BYTES);
}

extern "C" void bi_cuda_launch_reset(const bi_backend *backend) {
    memset(backend->ctx->launch, 0, sizeof backend->ctx->launch);
}

/* Nothing in scratch has to be zero between calls. Counts that lie there are cleared as their op begins: of tiles by class
 * (plan_kernel), of weights by bin (sample's bound_kernel). What must be zero between launches, the arrivals of the dense products
 * (dense_state), has memory of its own and stays; so have cuBLASLt's workspaces. */
extern "C" br_status bi_cuda_poison(const bi_backend *backend) {
    const bi_ctx *ctx = backend->ctx;
    const cudaError_t error = ctx->scratch_bytes ? cudaMemsetAsync(ctx->scratch, 0xff, ctx->scratch_bytes, ctx->stream) : cudaSuccess;
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "the GPU poisons no scratch: %s", cudaGetErrorString(error));
}

extern "C" int64_t bi_cuda_launch_count(const bi_backend *backend, const char *name) {
    int64_t sum = 0;
    for (int i = 0; i < BI_K_COUNT; i++)
        if (!name || strcmp(name, KERNEL_NAME[i]) == 0)
            sum += backend->ctx->launch[i];
    return sum;
}
