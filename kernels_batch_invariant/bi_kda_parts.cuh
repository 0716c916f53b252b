/* bi_kda_parts: what the recurrence kernels of bi_kda share: the folds over the eight lanes, and the division of a row by its norm.
 *
 * Contract: N-KDA-2, N-KDA-3. Internal to bi_kda*.cu.
 *
 * Eight neighbouring threads are the clause's lanes. They hold C value columns together, and each holds its keys of all C. A fold
 * must give every column p_l + p_(l+4), then + 2, then + 1; with C columns at a time the threads share the work: at each step a
 * thread keeps half of its columns and hands the other half to its partner. So slot c of a thread is not column c but column
 * kda_columns(lane)[c], arranged so that what is handed over is always the upper half, and no step needs a select but the one
 * after three columns. The sums are commutative, so which of the two partners adds does not matter. */
#ifndef BI_KDA_PARTS_CUH
#define BI_KDA_PARTS_CUH

#include "bi_cuda.cuh"

enum {
    KDA_LANES = BI_KDA_LANES,
    KDA_D_FAST = 128,       /* the head size of the fast kernels */
    KDA_D_MAX = 256,
    KDA_TILE = 8,           /* tokens prepared at a time */
    KDA_GRID_Y_MAX = 65535
};
static_assert(BI_KDA_LANES == 8 && BI_KDA_KEYS == 4 && BI_KDA_CHAINS == 2, "the kernels are written for these");

/* What the recurrence kernels take, by value. */
typedef struct kda_launch {
    const bi_seg *seg;
    int32_t n_seg, n_head, d, ld;
    const bi_bf16 *q, *k, *v;
    const float *a, *beta;
    float scale;
    bi_state state;
    float *o;
    bi_fault fault;
} kda_launch;

/* The prefill kernel for d = 128 and aligned rows, over segments of at least two rows (bi_kda_prefill.cu). */
br_status bi_kda_prefill_fast(bi_ctx *ctx, const kda_launch *p, int32_t n_row, int32_t seg_row_max);

/* The same for segments of one row (bi_kda_decode.cu). */
br_status bi_kda_decode_fast(bi_ctx *ctx, const kda_launch *p);

#ifdef __CUDACC__

static __device__ __forceinline__ float *kda_head_state(const kda_launch &p, const bi_seg &seg, int head) {
    return (float *)bi_cuda_state(p.state, seg.seq) + (int64_t)head * p.d * p.d;
}

static __device__ __forceinline__ float kda_swap(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

/* One step of the fold with partner lane ^ M, N slots before it; what is left afterwards are slots 0 .. kda_left(N)-1. CHOOSE: the
 * step before had three columns, so that both partners hold the same two. */
static constexpr __host__ __device__ int kda_left(int n) {
    return n == 1 ? 1 : n == 3 ? 2 : n / 2;
}

template <int N, bool CHOOSE, int M, int SLOTS> static __device__ __forceinline__ void kda_fold_step(float (&x)[SLOTS], int lane) {
    if constexpr (N == 1) {
        x[0] = BI_ADD(x[0], kda_swap(x[0], M));
    } else if constexpr (CHOOSE) {
        const bool second = lane & M;
        const float keep = second ? x[1] : x[0], give = second ? x[0] : x[1];
        x[0] = BI_ADD(keep, kda_swap(give, M));
    } else if constexpr (N == 3) {
        x[0] = BI_ADD(x[0], kda_swap(x[2], M));
        x[1] = BI_ADD(x[1], kda_swap(x[1], M));
    } else {
        static_assert(N % 2 == 0, "a step halves the columns");
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            x[i] = BI_ADD(x[i], kda_swap(x[i + N / 2], M));
    }
}

/* x[0] of each thread becomes dot() of the column kda_own(lane). */
template <int C> static __device__ __forceinline__ void kda_fold(float (&x)[C], int lane) {
    constexpr int N1 = kda_left(C), N2 = kda_left(N1);
    kda_fold_step<C, false, 4>(x, lane);
    kda_fold_step<N1, C == 3, 2>(x, lane);
    kda_fold_step<N2, N1 == 3, 1>(x, lane);
}

/* The column, 0..C-1, in each slot of a lane. */
template <int N, int M> static __device__ __forceinline__ void kda_columns(int lane, int *column) {
    const bool upper = lane & M;
    if constexpr (N == 1) {
        column[0] = 0;
    } else if constexpr (N == 3) {
        column[0] = upper ? 2 : 0;
        column[1] = 1;
        column[2] = upper ? 0 : 2;
    } else {
        int half[N / 2];
        kda_columns<N / 2, M / 2>(lane, half);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            column[i] = (upper ? N / 2 : 0) + half[i];
            column[i + N / 2] = (upper ? 0 : N / 2) + half[i];
        }
    }
}

/* The column whose sum a lane holds after the fold: slot 0, but where a step chose. */
template <int C> static __device__ __forceinline__ int kda_own(int lane) {
    constexpr int chooser = C == 3 ? 2 : C == 6 ? 1 : 0;
    int column[C];
    kda_columns<C, 4>(lane, column);
    if constexpr (chooser != 0)
        return lane & chooser ? column[1] : column[0];
    else
        return column[0];
}

/* Where lane finds the sum of the column in its slot c: the lowest lane that owns it. */
template <int C> static __device__ __forceinline__ int kda_source(int column) {
    int source = 0;
    for (int lane = KDA_LANES - 1; lane >= 0; lane--)
        source = kda_own<C>(lane) == column ? lane : source;
    return source;
}

/* The partner of slot c where C is a power of two: its owner is lane ^ mask. */
static constexpr __host__ __device__ int kda_slot_mask(int n_column, int c) {
    int mask = 0;
    for (int s = 1; (n_column >> s) > 0; s++)
        mask |= c & (n_column >> s) ? KDA_LANES >> s : 0;
    return mask;
}

/* Division by a norm. x is bf16, so the quotient's last bit hangs on 8 bits of x and 24 of n only: q = x * RN(1/n) corrected once by
 * its exact remainder equals RN(x / n) for all 2^30 pairs of significands. Nothing may underflow on the way, hence the bounds:
 * a norm below 2^20 (it is above 2^-10), and every |x| at least 2^-70. The bound is 2^-63, above which squares are exact as well. */
#define KDA_NORM_FAST 0x1p+20f
enum { KDA_BF16_FAST = (127 - 63) << 7 };

static __device__ __forceinline__ float kda_divide(float x, float n, float inverse) {
    const float q = BI_MUL(x, inverse);
    return BI_FMA(-BI_FMA(q, n, -x), inverse, q);
}

/* Two bf16 in one word. */
static __device__ __forceinline__ float kda_low(uint32_t pair) {
    return bi_f32_of(pair << 16);
}

static __device__ __forceinline__ float kda_high(uint32_t pair) {
    return bi_f32_of(pair & 0xffff0000u);
}

/* The smaller magnitudes of two pairs, under signs of no meaning. Of a NaN and a number it is the number: a NaN shows in the norm. */
static __device__ __forceinline__ uint32_t kda_least(uint32_t least, uint32_t pair) {
    asm("min.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(least) : "r"(pair));
    return least;
}

/* No magnitude of a pair of least ones lies under the bound. Zeros do, and take the slow way. */
static __device__ __forceinline__ bool kda_pair_fast(uint32_t least) {
    return (least & 0x7fffu) >= KDA_BF16_FAST && (least >> 16 & 0x7fffu) >= KDA_BF16_FAST;
}

#endif
#endif
