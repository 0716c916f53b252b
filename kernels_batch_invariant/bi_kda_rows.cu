/* bi_kda_gate and bi_kda_norm: the row-wise ops around the KDA recurrence.      Contract: N-KDA-1, N-KDA-5, N-NORM-1, N-SUM-1, N-FN
 *
 * Gate: elementwise. Grid (blocks of 256 threads over the columns + 1 for beta, chunks of rows); a thread keeps W neighbouring columns
 * and walks down its chunk, so that bias and exp(A_log) are read once.
 * Norm: for d = 32 .. 256 in steps of 32 a warp a head: thread l holds elements l + 32 j, or at d = 128 and aligned rows 4 l .. 4 l + 3;
 * for any other d a block of 256 a head, thread i partial i of N-SUM. N-SUM folds by 128, 64, .., 1: what one thread holds is folded
 * there, the rest by exchange with the partner at that distance; partials that are absent are +0 and change no square. */
#include "bi_cuda.cuh"

enum { GATE_BLOCK = 256, NORM_BLOCK = 256, NORM_WARPS = NORM_BLOCK / 32, NORM_D_WARP = 256 };

/* ---- gate ---- */

template <bool BOUNDED> static __device__ __forceinline__ float decay_of(float y, float rate, float lower_bound) {
    if constexpr (BOUNDED)
        return bi_exp(BI_MUL(lower_bound, bi_sigmoid(BI_MUL(rate, y))));
    else
        return bi_exp(-BI_MUL(rate, bi_softplus(y)));
}

static __device__ void beta_rows(const bi_kda_gate_args &p, int begin, int end) {
    const int64_t last = (int64_t)end * p.n_head;
    for (int64_t i = (int64_t)begin * p.n_head + threadIdx.x; i < last; i += GATE_BLOCK)
        p.beta[i] = bi_sigmoid(bi_widen(p.b[i]));
}

template <bool BOUNDED, int W> static __global__ void __launch_bounds__(GATE_BLOCK) kda_gate(bi_kda_gate_args p, int chunk) {
    bi_cuda_begin();
    const int begin = (int)blockIdx.y * chunk, end = begin + chunk < p.n_row ? begin + chunk : p.n_row;
    if (blockIdx.x == gridDim.x - 1) {
        beta_rows(p, begin, end);
        return;
    }
    const int width = p.n_head * p.d;
    const int column = ((int)blockIdx.x * GATE_BLOCK + (int)threadIdx.x) * W;
    if (column >= width)
        return;
    const float rate = bi_exp(p.a_log[column / p.d]);
    float bias[W];
#pragma unroll
    for (int i = 0; i < W; i++)
        bias[i] = p.dt_bias[column + i];
    const bi_bf16 *f = p.f + (int64_t)begin * width + column;
    float *a = p.a + (int64_t)begin * width + column;
#pragma unroll 2
    for (int t = begin; t < end; t++, f += width, a += width) {
        if constexpr (W == 4) {
            const uint2 x = *(const uint2 *)f;
            float4 y;
            y.x = decay_of<BOUNDED>(BI_ADD(bi_widen((bi_bf16)(x.x & 0xffffu)), bias[0]), rate, p.lower_bound);
            y.y = decay_of<BOUNDED>(BI_ADD(bi_widen((bi_bf16)(x.x >> 16)), bias[1]), rate, p.lower_bound);
            y.z = decay_of<BOUNDED>(BI_ADD(bi_widen((bi_bf16)(x.y & 0xffffu)), bias[2]), rate, p.lower_bound);
            y.w = decay_of<BOUNDED>(BI_ADD(bi_widen((bi_bf16)(x.y >> 16)), bias[3]), rate, p.lower_bound);
            *(float4 *)a = y;
        } else {
            *a = decay_of<BOUNDED>(BI_ADD(bi_widen(*f), bias[0]), rate, p.lower_bound);
        }
    }
}

static int aligned_to(const void *p, size_t bytes) {
    return (uintptr_t)p % bytes == 0;
}

br_status bi_cuda_kda_gate(bi_ctx *ctx, const bi_kda_gate_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "kda_gate: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row, a->n_head, a->d);
    if (a->n_row == 0)
        return BR_OK;
    const int wide = a->d % 4 == 0 && aligned_to(a->f, 8) && aligned_to(a->a, 16);
    const int64_t across = bi_ceil_div((int64_t)a->n_head * a->d, (int64_t)GATE_BLOCK * (wide ? 4 : 1));
    /* About sixteen blocks an SM, and no more chunks than a grid has rows for. */
    int64_t chunk = bi_ceil_div(a->n_row * across, (int64_t)16 * ctx->n_sm);
    chunk = chunk > bi_ceil_div(a->n_row, 65535) ? chunk : bi_ceil_div(a->n_row, 65535);
    const dim3 grid((unsigned)(across + 1), (unsigned)bi_ceil_div(a->n_row, chunk));
    if (a->bounded && wide)
        bi_cuda_launch(ctx, kda_gate<true, 4>, grid, GATE_BLOCK, 0, *a, (int)chunk);
    else if (a->bounded)
        bi_cuda_launch(ctx, kda_gate<true, 1>, grid, GATE_BLOCK, 0, *a, (int)chunk);
    else if (wide)
        bi_cuda_launch(ctx, kda_gate<false, 4>, grid, GATE_BLOCK, 0, *a, (int)chunk);
    else
        bi_cuda_launch(ctx, kda_gate<false, 1>, grid, GATE_BLOCK, 0, *a, (int)chunk);
    return bi_cuda_launched(ctx, BI_K_kda_gate, "kda_gate");
}

/* ---- gated norm ---- */

static __device__ __forceinline__ float rstd_of(float sum, int d, float eps) {
    return bi_rsqrt(BI_ADD(BI_DIV(sum, (float)d), eps));
}

static __device__ __forceinline__ bi_bf16 gated(float o, float rstd, float w, float gate) {
    return bi_round(BI_MUL(BI_MUL(BI_MUL(o, rstd), w), bi_sigmoid(gate)));
}

static __device__ __forceinline__ float swap(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

/* The SUM of 128 squares, four neighbours a thread: folds 64 and 32 hand over halves, 16 to 4 add, 2 and 1 go back over the same
 * partners. Every thread gets it. */
static __device__ __forceinline__ float sum128(float4 o, int lane) {
    const float x = BI_MUL(o.x, o.x), y = BI_MUL(o.y, o.y), z = BI_MUL(o.z, o.z), w = BI_MUL(o.w, o.w);
    const bool far = lane & 16, near = lane & 8;
    const float first = BI_ADD(far ? z : x, swap(far ? x : z, 16)), second = BI_ADD(far ? w : y, swap(far ? y : w, 16));
    float sum = BI_ADD(near ? second : first, swap(near ? first : second, 8));
#pragma unroll
    for (int mask = 4; mask >= 1; mask /= 2)
        sum = BI_ADD(sum, swap(sum, mask));
    sum = BI_ADD(sum, swap(sum, 16));
    return BI_ADD(sum, swap(sum, 8));
}

/* d = 128, a warp two heads at a time so that loads overlap. n_all = n_row * n_head. */
static __global__ void __launch_bounds__(NORM_BLOCK) kda_norm_128(bi_kda_norm_args p, int64_t n_all) {
    bi_cuda_begin();
    const int lane = (int)threadIdx.x & 31;
    const int64_t first = ((int64_t)blockIdx.x * NORM_WARPS + (threadIdx.x >> 5)) * 2;
    const float4 w = *((const float4 *)p.w + lane);
    float4 o[2];
    uint2 g[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t at = first + i < n_all ? first + i : n_all - 1;
        o[i] = *((const float4 *)(p.o + at * 128) + lane);
        g[i] = *((const uint2 *)(p.gate + at * 128) + lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = sum128(o[i], lane), rstd = rstd_of(sum, 128, p.eps);
        const int64_t at = first + i;
        if (at >= n_all)
            return;
        if (lane == 0)
            bi_cuda_fault(p.fault, (int32_t)(at / p.n_head), sum);
        const uint32_t x = gated(o[i].x, rstd, w.x, bi_widen((bi_bf16)(g[i].x & 0xffffu)));
        const uint32_t y = gated(o[i].y, rstd, w.y, bi_widen((bi_bf16)(g[i].x >> 16)));
        const uint32_t z = gated(o[i].z, rstd, w.z, bi_widen((bi_bf16)(g[i].y & 0xffffu)));
        const uint32_t v = gated(o[i].w, rstd, w.w, bi_widen((bi_bf16)(g[i].y >> 16)));
        *((uint2 *)(p.y + at * 128) + lane) = make_uint2(x | y << 16, z | v << 16);
    }
}

/* d = 32 J. */
template <int J> static __global__ void __launch_bounds__(NORM_BLOCK) kda_norm_warp(bi_kda_norm_args p, int64_t n_all) {
    bi_cuda_begin();
    const int lane = (int)threadIdx.x & 31;
    const int64_t head = (int64_t)blockIdx.x * NORM_WARPS + (threadIdx.x >> 5), at = head * p.d + lane;
    if (head >= n_all)
        return;
    float o[J], part[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
        part[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < J; j++) {
        o[j] = p.o[at + 32 * j];
        part[j] = BI_MUL(o[j], o[j]);
    }
#pragma unroll
    for (int half = 4; half >= 1; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++)
            part[j] = BI_ADD(part[j], part[j + half]);
    float sum = part[0];
#pragma unroll
    for (int mask = 16; mask >= 1; mask /= 2)
        sum = BI_ADD(sum, swap(sum, mask));
    if (lane == 0)
        bi_cuda_fault(p.fault, (int32_t)(head / p.n_head), sum);
    const float rstd = rstd_of(sum, p.d, p.eps);
#pragma unroll
    for (int j = 0; j < J; j++)
        p.y[at + 32 * j] = gated(o[j], rstd, p.w[lane + 32 * j], bi_widen(p.gate[at + 32 * j]));
}

/* Any d. */
static __global__ void __launch_bounds__(NORM_BLOCK) kda_norm_block(bi_kda_norm_args p) {
    bi_cuda_begin();
    __shared__ float shared[NORM_BLOCK];
    const int64_t head = blockIdx.x, at = head * p.d;
    float part = 0.0f;
    for (int i = (int)threadIdx.x; i < p.d; i += NORM_BLOCK)
        part = BI_FMA(p.o[at + i], p.o[at + i], part);
    const float sum = bi_cuda_sum256(part, shared), rstd = rstd_of(sum, p.d, p.eps);
    if (threadIdx.x == 0)
        bi_cuda_fault(p.fault, (int32_t)(head / p.n_head), sum);
    for (int i = (int)threadIdx.x; i < p.d; i += NORM_BLOCK)
        p.y[at + i] = gated(p.o[at + i], rstd, p.w[i], bi_widen(p.gate[at + i]));
}

static void launch_norm_warp(const bi_ctx *ctx, const bi_kda_norm_args *a, int64_t n_all) {
    static void (*const kernel[])(bi_kda_norm_args, int64_t) = {kda_norm_warp<1>, kda_norm_warp<2>, kda_norm_warp<3>, kda_norm_warp<4>,
                                                                kda_norm_warp<5>, kda_norm_warp<6>, kda_norm_warp<7>, kda_norm_warp<8>};
    bi_cuda_launch(ctx, kernel[a->d / 32 - 1], (unsigned)bi_ceil_div(n_all, NORM_WARPS), NORM_BLOCK, 0, *a, n_all);
}

br_status bi_cuda_kda_norm(bi_ctx *ctx, const bi_kda_norm_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "kda_norm: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row, a->n_head, a->d);
    if (a->n_row == 0)
        return BR_OK;
    const int64_t n_all = (int64_t)a->n_row * a->n_head;
    if (a->d == 128 && aligned_to(a->o, 16) && aligned_to(a->w, 16) && aligned_to(a->gate, 8) && aligned_to(a->y, 8))
        bi_cuda_launch(ctx, kda_norm_128, (unsigned)bi_ceil_div(n_all, 2 * NORM_WARPS), NORM_BLOCK, 0, *a, n_all);
    else if (a->d % 32 == 0 && a->d <= NORM_D_WARP)
        launch_norm_warp(ctx, a, n_all);
    else
        bi_cuda_launch(ctx, kda_norm_block, (unsigned)n_all, NORM_BLOCK, 0, *a);
    return bi_cuda_launched(ctx, BI_K_kda_norm, "kda_norm");
}
