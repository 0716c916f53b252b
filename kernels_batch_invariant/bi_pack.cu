/* A trainer's masters into packed matrices, and the way back; see bi_pack.h.      Contract: R
 *
 * Packed is row-major with rows of dense_ld(n_in) elements, zeros behind n_in (bi_linear_parts.cuh). A thread an element of the packed
 * form (pack) or of the dense one (unpack), blocks of 256, grid (blocks of one matrix, matrices). No order: nothing is summed. */
#include "bi_linear_parts.cuh"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS) pack_f32(const bi_mat_pack_f32_args a, int32_t ld) {
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, m = blockIdx.y;
    const int32_t o = (int32_t)(at / ld), i = (int32_t)(at % ld);
    if (o >= a.to.n_out)
        return;
    bi_bf16 *to = (bi_bf16 *)((unsigned char *)a.to.data + a.to.stride * (size_t)m);
    to[at] = i < a.to.n_in ? bi_round(a.src[m * a.stride + o * a.stride_out + i * a.stride_in]) : (bi_bf16)0;
}

static __global__ void __launch_bounds__(THREADS) unpack(const bi_mat_unpack_args a, int32_t ld) {
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, m = blockIdx.y, n = (int64_t)a.from.n_out * a.from.n_in;
    if (at >= n)
        return;
    const bi_bf16 *from = (const bi_bf16 *)((const unsigned char *)a.from.data + a.from.stride * (size_t)m);
    a.dst[m * n + at] = from[at / a.from.n_in * ld + at % a.from.n_in];
}

static br_status check(const char *op, int32_t n, const bi_mat *mat) {
    if (mat->n_out < 1 || mat->n_in < 1)
        return br_fail(BR_E_SHAPE, "%s: a matrix (%d, %d): expected at least 1 output, inputs in multiples of 1", op, mat->n_out, mat->n_in);
    if (n < 0 || mat->form != BI_FORM_BF16)
        return br_fail(BR_E_ARG, "%s: %d matrices of form %d: expected at least 0 of bf16", op, n, (int)mat->form);
    return BR_OK;
}

/* Blocks of so many elements; matrices in the second dimension, which holds 65,535. */
static br_status grid_of(const char *op, int64_t elements, int32_t n, dim3 *grid) {
    const int64_t blocks = bi_ceil_div(elements, THREADS);
    if (blocks > INT32_MAX || n > 65535)
        return br_fail(BR_E_LIMIT, "%s: %d matrices of %lld elements: expected at most 65535 of 2^39", op, n, (long long)elements);
    *grid = dim3((unsigned)blocks, (unsigned)n);
    return BR_OK;
}

br_status bi_cuda_mat_pack_f32(bi_ctx *ctx, const bi_mat_pack_f32_args *args) {
    const int32_t ld = dense_ld(args->to.n_in);
    dim3 grid;
    BR_TRY(check("mat_pack_f32", args->n, &args->to));
    BR_TRY(grid_of("mat_pack_f32", (int64_t)args->to.n_out * ld, args->n, &grid));
    if (args->n == 0)
        return BR_OK;
    pack_f32<<<grid, THREADS, 0, ctx->stream>>>(*args, ld);
    return bi_cuda_launched(ctx, BI_K_mat_pack_f32, "mat_pack_f32");
}

br_status bi_cuda_mat_unpack(bi_ctx *ctx, const bi_mat_unpack_args *args) {
    dim3 grid;
    BR_TRY(check("mat_unpack", args->n, &args->from));
    BR_TRY(grid_of("mat_unpack", (int64_t)args->from.n_out * args->from.n_in, args->n, &grid));
    if (args->n == 0)
        return BR_OK;
    unpack<<<grid, THREADS, 0, ctx->stream>>>(*args, dense_ld(args->from.n_in));
    return bi_cuda_launched(ctx, BI_K_mat_unpack, "mat_unpack");
}
