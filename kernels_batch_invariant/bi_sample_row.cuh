/* bi_sample_row: one row of logits on the GPU, for the kernels of bi_sample.cu.      Contract: N-HEAD, N-SAMPLE, P-4
 *
 * Layer: kernels_batch_invariant, internal to bi_sample*.cu. A row is read in sub-blocks of 128 entries, one warp a sub-block: lane l
 * holds entries l, l + 32, l + 64, l + 96, so that the folds of SUM128 at 64 and 32 stay in the lane. Sub-blocks carry their maximum,
 * which lets every later pass leave out sub-blocks that cannot matter. */
#ifndef BI_SAMPLE_ROW_CUH
#define BI_SAMPLE_ROW_CUH

#include "bi_row.cuh"

enum {
    SAMPLE_ROWS = 256,                        /* rows in flight: more are done in turn */
    SAMPLE_ENTRIES = BI_HEAD_BLOCK / 32,      /* of a lane */
    SAMPLE_BLOCK_MAX = 24,                    /* sub-blocks of one block of threads: 3,072 weights of 2^40 in two 32-bit sums */
    SAMPLE_BINS = 2048,                       /* of a row's weights by distance from the maximum */
    SAMPLE_AHEAD = 2,                         /* sub-blocks of a warp under way, where rows are visited whole */
    SAMPLE_ROW_THREADS = 512                  /* of kernels with one block a row */
};
#define SAMPLE_TOP_P_OFF ((uint64_t)1 << BI_SAMPLE_P_BITS)
#define SAMPLE_NOT_ASKED 0x7fc00000u
#define SAMPLE_MINUS_INF 0xff800000u
/* exp(x) * 2^40 < 0.77 for x < -28: such a weight is 0. */
#define SAMPLE_NO_WEIGHT -28.0f

/* Kept: every entry with a larger z, and those of equal z up to this index. */
typedef struct sample_bound {
    float z;
    int32_t index;
} sample_bound;

typedef struct sample_row {
    int32_t skip;                                   /* a fault, or a NaN among the logits */
    float max, log_sum, entropy, raw_max, raw_log_sum;
    sample_bound kept;
    float bin_scale;                                /* bin = trunc((max - z) * bin_scale) */
} sample_row;

/* A call's rows first .. first + R - 1 and their scratch. */
typedef struct sample_run {
    bi_sample_args a;
    int32_t first, n_block;
    sample_row *row;                                /* (R) */
    float *max, *sum, *dot, *raw_max, *raw_sum;     /* (R, n_block): m_b, l_b, d_b; at T = 1 */
    uint64_t *weight;                               /* (R, n_block): of what is kept */
    uint64_t *bin;                                  /* (R, SAMPLE_BINS) */
} sample_run;

/* A row as a thread sees it. */
typedef struct sample_view {
    const float *logit;
    int32_t n_vocab, n_block;
    float temperature;
    const float *max; /* (n_block) */
} sample_view;

static __device__ __forceinline__ sample_view sample_view_of(const sample_run &s, int r) {
    const float temperature = s.a.setting[s.first + r].temperature;
    sample_view v = {s.a.logit + (int64_t)(s.first + r) * s.a.logit_ld, s.a.n_vocab, s.n_block, temperature == 0.0f ? 1.0f : temperature,
                     s.max + (int64_t)r * s.n_block};
    return v;
}

/* z = RN(x / T), within +-BI_HEAD_Z_MAX, -0 made +0. RN(x / 1) is x. */
static __device__ __forceinline__ float sample_z(float x, float temperature) {
    float z = temperature == 1.0f ? x : BI_DIV(x, temperature);
    z = z > BI_HEAD_Z_MAX ? BI_HEAD_Z_MAX : z;
    z = z < -BI_HEAD_Z_MAX ? -BI_HEAD_Z_MAX : z;
    return BI_ADD(z, 0.0f);
}

static __device__ __forceinline__ int sample_entry(int b, int k) {
    return b * BI_HEAD_BLOCK + 32 * k + (int)(threadIdx.x & 31);
}

/* This lane's logits of sub-block b; 0 where absent. */
static __device__ __forceinline__ void sample_load(const float *logit, int n_vocab, int b, float x[SAMPLE_ENTRIES]) {
#pragma unroll
    for (int k = 0; k < SAMPLE_ENTRIES; k++)
        x[k] = sample_entry(b, k) < n_vocab ? logit[sample_entry(b, k)] : 0.0f;
}

static __device__ __forceinline__ float sample_of_key(uint32_t key) {
    return bi_f32_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/* The largest of a warp's numbers, none of them -0. */
static __device__ __forceinline__ float sample_warp_max(float x) {
    return sample_of_key(__reduce_max_sync(0xffffffffu, bi_order_key(x)));
}

static __device__ __forceinline__ int sample_keeps(sample_bound kept, float z, int32_t index) {
    return (z > kept.z) | ((z == kept.z) & (index <= kept.index));
}

static __device__ __forceinline__ sample_bound sample_stricter(sample_bound a, sample_bound b) {
    return a.z > b.z || (a.z == b.z && a.index < b.index) ? a : b;
}

/* w = trunc(exp(RN(z - m)) * 2^40) */
static __device__ __forceinline__ uint64_t sample_weight(float z, float max) {
    return (uint64_t)(int64_t)BI_MUL(bi_exp(BI_SUB(z, max)), (float)((uint64_t)1 << BI_SAMPLE_WEIGHT_BITS));
}

/* Larger z, smaller bin or the same: a division of the entries into runs of the P-4 order, for speed only. */
static __device__ __forceinline__ int sample_bin(float z, float max, float scale) {
    const float at = BI_MUL(BI_SUB(max, z), scale);
    return at < (float)(SAMPLE_BINS - 1) ? (int)at : SAMPLE_BINS - 1;
}

/* ---- a block's sums of integers; every thread gets them ---------------------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t sample_warp_sum(uint64_t x) {
    for (int h = 16; h > 0; h >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, h);
    return x;
}

/* shared: 32 numbers. The caller need not synchronise around it. */
static __device__ __forceinline__ uint64_t sample_block_sum(uint64_t x, uint64_t *shared) {
    const int lane = (int)threadIdx.x & 31, n_warp = (int)blockDim.x / 32;
    x = sample_warp_sum(x);
    if (lane == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = sample_warp_sum(lane < n_warp ? shared[lane] : 0);
    __syncthreads();
    return x;
}

/* The sum of x of the threads below this one; *total is that of all. */
static __device__ __forceinline__ uint64_t sample_block_before(uint64_t x, uint64_t *shared, uint64_t *total) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, n_warp = (int)blockDim.x / 32;
    uint64_t upto = x, before = 0;
    for (int h = 1; h < 32; h <<= 1) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, upto, h);
        upto += lane >= h ? other : 0;
    }
    if (lane == 31)
        shared[warp] = upto;
    __syncthreads();
    *total = 0;
    for (int w = 0; w < n_warp; w++) {
        before += w < warp ? shared[w] : 0;
        *total += shared[w];
    }
    __syncthreads();
    return before + upto - x;
}

/* What the routines of a block a row share. */
typedef struct sample_shared {
    uint64_t sum[32];
    uint64_t left;
    uint32_t count[SAMPLE_BINS];
    uint32_t bin, n_equal;
    int32_t n_list, index;
    uint32_t key_low, key_high;
    uint32_t list_key[SAMPLE_BINS];
    int32_t list_index[SAMPLE_BINS];
} sample_shared;

#endif
