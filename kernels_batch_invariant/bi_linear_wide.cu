/* Many rows with adapters in one pass: the base chains go on through the adapters before they are rounded.
 * Contract: N-CHAIN, N-LIN, N-LORA
 *
 * The kernel is bi_linear_wide.cuh's; T is there before it runs. A warp holds 16 tokens x 256 outputs: it adds each slot
 * that one of its tokens has, and writes y. */
#include "bi_linear_out.cuh"
#include "bi_linear_wide.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

typedef struct wide_store {
    int wide;
    __device__ __forceinline__ void operator()(const wide_args &a, const wide_tile &tile, int32_t token, float (&acc)[WIDE_N8][4]) const {
        const dense_place place = {tile.head, token, tile.out};
        for (int32_t i = 0; i < a.job.n_slot; i++)
            dense_continue(a.job, place, a.job.slot[i], acc);
        dense_store(a.job, place, wide, acc);
    }
} wide_store;

br_status bi_dense_wide_open(void) {
    return wide_allow<wide_store>() == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", (int)WIDE_SHARED);
}

static int map_of(const dense_state *state, CUtensorMap *map, const bi_bf16 *base, int32_t n_k, int32_t n_row, int32_t n_head, int64_t ld,
                  int64_t head_ld, int box_rows) {
    const cuuint64_t bytes = sizeof *base, row = (cuuint64_t)ld * bytes, head = (cuuint64_t)head_ld * bytes;
    const cuuint64_t size[4] = {(cuuint64_t)n_k, (cuuint64_t)n_row, 1, (cuuint64_t)n_head}, stride[3] = {row, row, n_head > 1 ? head : row};
    const cuuint32_t box[4] = {WIDE_K, (cuuint32_t)box_rows, 1, 1}, step[4] = {1, 1, 1, 1};
    return ((encode_fn)state->encode)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)(uintptr_t)base, size, stride, box, step,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int bi_dense_wide_args(const dense_state *state, const dense_job *job, wide_args *args) {
    args->job = *job;
    args->token_tiles = (int32_t)bi_ceil_div(job->n_row, WIDE_TOKENS);
    args->w_tiles = (int32_t)bi_ceil_div(job->n_out, WIDE_OUTS);
    args->n_tile = job->n_head * args->token_tiles * args->w_tiles;
    return map_of(state, &args->x, job->x, job->n_in, job->n_row, job->n_head, job->x_ld, job->x_head_ld, WIDE_TOKENS) &&
           map_of(state, &args->w, job->w, job->w_ld, job->n_out, job->n_head, job->w_ld, job->w_stride, WIDE_OUTS);
}

br_status bi_dense_wide(bi_ctx *ctx, const dense_job *job, int *done) {
    wide_args args;
    const int64_t tiles = job->n_head * bi_ceil_div(job->n_row, WIDE_TOKENS) * bi_ceil_div(job->n_out, WIDE_OUTS);
    const wide_store store = {dense_is_wide(job)};
    *done = tiles >= 2 * ctx->n_sm && bi_dense_wide_args((const dense_state *)ctx->dense, job, &args);
    if (!*done)
        return BR_OK;
    wide_launch(ctx, &args, store);
    return bi_cuda_launched(ctx, BI_K_linear_tile, "linear");
}
