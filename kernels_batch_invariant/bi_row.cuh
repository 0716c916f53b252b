/* bi_row: what the CUDA row ops share: sixteen bytes of a row at a time, and SUM(n) over a row in shared memory.      Contract: N-SUM
 *
 * Layer: kernels_batch_invariant, internal to the bi_*.cu files of row ops. A row belongs to 32 * WARPS threads, a warp or a
 * block of eight. Thread i of them owns the partials i, i + 32 * WARPS, .. of the 256; wide loads would give a thread other elements,
 * so a row goes through shared memory and is summed from there in rising order. */
#ifndef BI_ROW_CUH
#define BI_ROW_CUH

#include "bi_cuda.cuh"

enum { BI_ROW_BLOCK = 256, BI_ROW_VEC = 8 /* bf16 elements in sixteen bytes */ };
#define BI_ROW_KERNEL static __global__ void __launch_bounds__(BI_ROW_BLOCK)

/* ---- host: which path holds ---------------------------------------------------------------------------------------------------- */

static inline int bi_row_wide(const void *x) {
    return (uintptr_t)x % 16 == 0;
}

/* A bf16 array whose rows of d elements can be moved sixteen bytes at a time. */
static inline int bi_row_wide_rows(const void *x, int64_t ld, int64_t d) {
    return bi_row_wide(x) && ld % BI_ROW_VEC == 0 && d % BI_ROW_VEC == 0;
}

/* ---- device: sixteen bytes ------------------------------------------------------------------------------------------------------ */

/* Read once by this kernel: it need not stay in L1, where the weights of all rows lie. */
static __device__ __forceinline__ uint4 bi_row_load(const void *x) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
    return v;
}

/* n_vec sixteen-byte pieces from x to `to`, by `threads` threads of which this is thread i. Four loads are under way at a time. */
static __device__ __forceinline__ void bi_row_copy(uint4 *to, const uint4 *x, int n_vec, int i, int threads) {
    for (int first = i; first < n_vec; first += 4 * threads) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * threads < n_vec)
                v[k] = bi_row_load(x + first + k * threads);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * threads < n_vec)
                to[first + k * threads] = v[k];
    }
}

static __device__ __forceinline__ void bi_row_widen2(uint32_t pair, float *x) {
    x[0] = bi_f32_of(pair << 16);
    x[1] = bi_f32_of(pair & 0xffff0000u);
}

static __device__ __forceinline__ void bi_row_widen8(uint4 v, float x[8]) {
    bi_row_widen2(v.x, x);
    bi_row_widen2(v.y, x + 2);
    bi_row_widen2(v.z, x + 4);
    bi_row_widen2(v.w, x + 6);
}

/* R of two numbers; the hardware's NaN is 0x7fff as well. */
static __device__ __forceinline__ uint32_t bi_row_round2(const float *x) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[1]), "f"(x[0]));
    return pair;
}

static __device__ __forceinline__ uint4 bi_row_round8(const float x[8]) {
    return make_uint4(bi_row_round2(x), bi_row_round2(x + 2), bi_row_round2(x + 4), bi_row_round2(x + 6));
}

/* Eight f32 at x, sixteen-byte aligned, which many blocks read. */
static __device__ __forceinline__ void bi_row_weights8(const float *w, float x[8]) {
    float4 low = __ldg((const float4 *)w), high = __ldg((const float4 *)w + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

/* ---- device: SUM(n) -------------------------------------------------------------------------------------------------------------- */

/* The folds of N-SUM below 32: lane i adds lane i + h, and lane i + h the same two numbers. Every lane gets the sum. */
static __device__ __forceinline__ float bi_row_fold_warp(float p) {
    for (int h = 16; h > 0; h >>= 1)
        p = BI_ADD(p, __shfl_xor_sync(0xffffffffu, p, h));
    return p;
}

/* The folds over 256 partials, of which this lane holds lane + 32 * w as q[w]. */
static __device__ __forceinline__ float bi_row_fold(const float q[8]) {
    float a[4], b[2];
#pragma unroll
    for (int w = 0; w < 4; w++)
        a[w] = BI_ADD(q[w], q[w + 4]);
#pragma unroll
    for (int w = 0; w < 2; w++)
        b[w] = BI_ADD(a[w], a[w + 2]);
    return bi_row_fold_warp(BI_ADD(b[0], b[1]));
}

/* The folds over 256 partials that lie in shared memory, on one warp. */
static __device__ __forceinline__ float bi_row_fold_shared(const float *partial) {
    float q[8];
#pragma unroll
    for (int w = 0; w < 8; w++)
        q[w] = partial[(threadIdx.x & 31) + 32 * w];
    return bi_row_fold(q);
}

template <int WARPS> static __device__ __forceinline__ void bi_row_sync(void) {
    if (WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
}

/* SUM over j = 0 .. n-1 of what `next` makes of (partial, j), for the threads of one row; every thread gets it.
 * shared: 256 floats for this row and this sum alone, unused by a warp on its own. */
template <int WARPS, class Next> static __device__ __forceinline__ float bi_row_sum(int n, float *shared, Next next) {
    constexpr int THREADS = 32 * WARPS, OWN = 8 / WARPS;
    const int i = (int)threadIdx.x % THREADS;
    float p[OWN];
#pragma unroll
    for (int o = 0; o < OWN; o++)
        p[o] = 0.0f;
    const int whole = n / BI_SUM_LANES * BI_SUM_LANES;
#pragma unroll 4
    for (int first = 0; first < whole; first += BI_SUM_LANES)
#pragma unroll
        for (int o = 0; o < OWN; o++)
            p[o] = next(p[o], first + o * THREADS + i);
#pragma unroll
    for (int o = 0; o < OWN; o++)
        if (whole + o * THREADS + i < n)
            p[o] = next(p[o], whole + o * THREADS + i);
    if constexpr (WARPS == 1)
        return bi_row_fold(p);
    shared[i] = p[0];
    __syncthreads();
    return bi_row_fold_shared(shared);
}

#endif
