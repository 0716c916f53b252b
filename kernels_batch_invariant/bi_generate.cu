/* Weights made by recipe in the packed forms of the GPU; see bi_generate.h.      Contract: none; bits are those of the packed source
 *
 * An element is a function of its number alone (bi_weightgen.h), so no order and no launch shape can move a bit.
 * generate_bf16: a thread an aligned run of 8 elements of a row (16 bytes), padding of the row included; blocks of 256, grid over
 *   all runs. generate_fp4: a block of 128 threads a block of 64 x 64 weights, as bi_experts_parts.cuh lays it out: a thread makes
 *   the 32 codes of its fragments, and one of four lanes the scales of its two rows. generate_vector: a thread an element.
 * No shared memory. A 64-bit mix an element, about 60 instructions: tens of gigabytes in about a second. */
#include "bi_experts_parts.cuh"

enum { THREADS = 256, RUN = 8 };

/* Blocks for n threads; more than that go round again. */
static unsigned grid_of(int64_t n) {
    const int64_t n_block = bi_ceil_div(n, THREADS), most = 1 << 20;
    return (unsigned)(n_block < most ? n_block : most);
}

/* Several threads launch at once while a model is opened. */
static br_status launched(bi_ctx *ctx, bi_cuda_kernel kernel, const char *op) {
    cudaError_t error = cudaGetLastError();
    __atomic_fetch_add(&ctx->launch[kernel], 1, __ATOMIC_RELAXED);
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "%s: the GPU refused the launch: %s", op, cudaGetErrorString(error));
}

/* ---- bf16 ------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ uint32_t element_bf16(const bi_mat_generate_args &a, int32_t o, int32_t i) {
    if (o >= a.have_out || i >= a.have_in)
        return 0;
    return bi_round(bi_weightgen_value(&a.gen, a.first + (uint64_t)(o * a.stride_out + i * a.stride_in)));
}

static __global__ void __launch_bounds__(THREADS) generate_bf16(const bi_mat_generate_args a) {
    const int32_t runs = (a.to.n_in + 15) / 16 * 16 / RUN;
    const int64_t n_run = (int64_t)a.to.n_out * runs, step = (int64_t)gridDim.x * THREADS;
    uint4 *to = (uint4 *)a.to.data;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n_run; at += step) {
        const int32_t o = (int32_t)(at / runs), i = (int32_t)(at % runs) * RUN;
        uint32_t word[RUN / 2];
#pragma unroll
        for (int w = 0; w < RUN / 2; w++)
            word[w] = element_bf16(a, o, i + 2 * w) | element_bf16(a, o, i + 2 * w + 1) << 16;
        to[at] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

/* ---- MXFP4 ----------------------------------------------------------------------------------------------------------- */

/* Where a code of register r (0..3) of an A fragment stands in a half of its word: the sign's bit, and the lowest bit of the rest. */
static __device__ __forceinline__ uint32_t place_code(uint32_t code, int r) {
    const int sign = r == 0 ? 15 : r == 1 ? 12 : r == 2 ? 14 : 13, size = r == 0 ? 6 : r == 1 ? 3 : r == 2 ? 0 : 9;
    return (code >> 3) << sign | (code & 7) << size;
}

static __device__ __forceinline__ uint32_t code_at(const bi_mat_generate_args &a, int32_t o, int32_t i) {
    if (o >= a.to.n_out || i >= a.to.n_in)
        return 0;
    return (uint32_t)bi_weightgen_fp4_code(&a.gen, a.first + (uint64_t)o * (uint32_t)a.to.n_in + (uint32_t)i);
}

static __device__ __forceinline__ uint32_t scale_at(const bi_mat_generate_args &a, int32_t o, int32_t i) {
    if (o >= a.to.n_out || i >= a.to.n_in)
        return 0;
    return bi_weightgen_fp4_scale(&a.gen_scale, (a.first + (uint64_t)o * (uint32_t)a.to.n_in + (uint32_t)i) / BI_GENERATE_GROUP);
}

/* Eight codes of a k-block: registers 0 and 1 are rows o[0] and o[1] at i and i + 1, registers 2 and 3 the same at i + 8 and i + 9. */
static __device__ __forceinline__ uint32_t word_at(const bi_mat_generate_args &a, const int32_t o[2], int32_t i) {
    uint32_t word = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int32_t at = i + (r >> 1) * 8;
        word |= place_code(code_at(a, o[r & 1], at), r) | place_code(code_at(a, o[r & 1], at + 1), r) << 16;
    }
    return word;
}

static __global__ void __launch_bounds__(128) generate_fp4(const bi_mat_generate_args a) {
    const int32_t n_chunk = (a.to.n_in + EXPERTS_K - 1) / EXPERTS_K, block = (int32_t)blockIdx.x;
    const int32_t warp = (int32_t)threadIdx.x >> 5, g = (int32_t)(threadIdx.x & 31) >> 2, t = (int32_t)threadIdx.x & 3;
    const int32_t first_o = block / n_chunk * EXPERTS_SUB + warp * 16, first_i = block % n_chunk * EXPERTS_K;
    const int32_t o[2] = {first_o + bi_experts_row(g), first_o + bi_experts_row(g + 8)};
    unsigned char *to = (unsigned char *)a.to.data + (size_t)block * EXPERTS_FP4_BLOCK;
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        word[k] = word_at(a, o, first_i + k * BI_MMA_K + 2 * t);
    ((uint4 *)to)[threadIdx.x] = make_uint4(word[0], word[1], word[2], word[3]);
    if (t == 0) {
        const int32_t second_i = first_i + BI_GENERATE_GROUP;
        ((uint32_t *)(to + EXPERTS_FP4_CODES))[warp * 8 + g] = scale_at(a, o[0], first_i) | scale_at(a, o[0], second_i) << 8 |
                                                               scale_at(a, o[1], first_i) << 16 | scale_at(a, o[1], second_i) << 24;
    }
}

br_status bi_cuda_mat_generate(bi_ctx *ctx, const bi_mat_generate_args *a) {
    BR_TRY(bi_mat_generate_check(a));
    if (a->to.form == BI_FORM_FP4) {
        const int64_t n_block = bi_ceil_div(a->to.n_out, EXPERTS_SUB) * bi_ceil_div(a->to.n_in, EXPERTS_K);
        generate_fp4<<<(unsigned)n_block, 128, 0, ctx->stream>>>(*a);
    } else {
        const int64_t n_run = (int64_t)a->to.n_out * (bi_ceil_div(a->to.n_in, 16) * 16 / RUN);
        generate_bf16<<<grid_of(n_run), THREADS, 0, ctx->stream>>>(*a);
    }
    return launched(ctx, BI_K_generate_mat, "mat_generate");
}

/* ---- vectors --------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) generate_vector(const bi_vector_generate_args a) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        const float value = bi_weightgen_value(&a.gen, a.first + (uint64_t)i);
        if (a.as == BI_GENERATE_BF16)
            ((bi_bf16 *)a.dst)[i] = bi_round(value);
        else
            ((float *)a.dst)[i] = a.as == BI_GENERATE_F32 ? value : bi_widen(bi_round(value));
    }
}

br_status bi_cuda_vector_generate(bi_ctx *ctx, const bi_vector_generate_args *a) {
    if (a->n < 0)
        return br_fail(BR_E_SHAPE, "vector_generate: %lld elements: expected at least 0", (long long)a->n);
    if (a->n == 0)
        return BR_OK;
    generate_vector<<<grid_of(a->n), THREADS, 0, ctx->stream>>>(*a);
    return launched(ctx, BI_K_generate_vector, "vector_generate");
}
