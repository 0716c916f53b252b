/* bi_index_score_wide: scores of all visible positions on wgmma, keys by bulk copies.      Contract: N-IDX-3, N-CHAIN
 *
 * Grid: (chunk of blocks of 64 keys, rows of one segment), one warpgroup a block, IWIDE_PER_SM blocks an SM, IWIDE_PER_SM_MORE where rows
 * share keys. Shared memory: a ring of key blocks as they lie in the cache, each one bulk copy; the rows' queries, 128 bytes a head and
 * chunk of 64 columns, swizzled; their weights; the block numbers of the chunk.
 * Keys are on M, from registers, heads on N: accumulators lie as in bi_index_score.cuh, and so do the four chains p_r. Both are f16 here:
 * e4m3 codes are exact in it, the scores are those of bf16 (lab_index compares them), and one instruction widens two codes. */
#ifndef BI_INDEX_SCORE_WIDE_CUH
#define BI_INDEX_SCORE_WIDE_CUH

#include "bi_index_score.cuh"

enum {
    IWIDE_THREADS = 128,
    IWIDE_STAGES = 2,
    IWIDE_PER_SM = 6,
    IWIDE_PER_SM_MORE = 2,
    IWIDE_BLOCKS_MIN = 4, /* blocks of 64 keys in a chunk */
    IWIDE_BLOCKS_MAX = 64,
    IWIDE_WAVES = 8,
    IWIDE_SHARED_ONE = 36 << 10, /* bytes of a block, so that IWIDE_PER_SM or IWIDE_PER_SM_MORE fit */
    IWIDE_SHARED_MORE = 110 << 10
};

static inline size_t index_wide_shared(int32_t n_tile, int32_t d_pad, int32_t n_row) {
    const size_t block = (size_t)BR_PAGE_TOK * ((size_t)d_pad + sizeof(float));
    return (size_t)n_row * (index_query_bytes(n_tile, d_pad) + (size_t)n_tile * 8 * sizeof(float)) + IWIDE_STAGES * (block + 8) +
           IWIDE_BLOCKS_MAX * sizeof(int32_t) + 1024;
}

#ifdef __CUDACC__

static __device__ __forceinline__ uint32_t iwide_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void iwide_wait(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}\n"
                     : "=r"(done)
                     : "r"(iwide_shared(bar)), "r"(parity)
                     : "memory");
    } while (!done);
}

/* Four e4m3 codes as two pairs of f16, exact. */
static __device__ __forceinline__ void iwide_widen4(uint32_t codes, uint32_t *low, uint32_t *high) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(*low) : "h"((uint16_t)codes));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(*high) : "h"((uint16_t)(codes >> 16)));
}

/* A key block to its stage. Keys are read once; what they would push out of the L2 are the scores. */
static __device__ __forceinline__ void iwide_load(void *to, const void *from, uint32_t bytes, uint64_t *bar) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(iwide_shared(bar)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::"r"(
                     iwide_shared(to)),
                 "l"(from), "r"(bytes), "r"(iwide_shared(bar)), "l"(policy)
                 : "memory");
}

#define IWIDE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define IWIDE_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)

/* d (64 keys, heads) = a (64, 16) x b (heads, 16)^T, plus d where `keep`. */
static __device__ __forceinline__ void iwide_mma(float (&d)[1][4], const uint32_t a[4], uint64_t b, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;}\n"
                 : IWIDE_D4(0)
                 : IWIDE_A);
}

static __device__ __forceinline__ void iwide_mma(float (&d)[4][4], const uint32_t a[4], uint64_t b, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}\n"
                 : IWIDE_D4(0), IWIDE_D4(1), IWIDE_D4(2), IWIDE_D4(3)
                 : IWIDE_A);
}
#undef IWIDE_D4
#undef IWIDE_A

/* Shared memory of a block of the grid. */
struct iwide_layout {
    unsigned char *query, *stage;
    float *weight;
    int32_t *block;
    uint64_t *full;
    __device__ __forceinline__ iwide_layout(unsigned char *base, int32_t n_row, int32_t row_bytes, int32_t n_weight, int32_t block_bytes) {
        query = base + (1024 - iwide_shared(base) % 1024) % 1024;
        stage = query + n_row * row_bytes;
        full = (uint64_t *)(stage + IWIDE_STAGES * block_bytes);
        weight = (float *)(full + IWIDE_STAGES);
        block = (int32_t *)(weight + n_row * n_weight);
    }
};

/* The fragments of this warp's 16 keys of a block. */
template <int PIECES>
static __device__ __forceinline__ void iwide_keys(uint32_t (&a)[2 * PIECES][4], const unsigned char *block, int tid) {
    const uint4 *x = (const uint4 *)(block + tid / 32 * PIECES * INDEX_PIECE) + tid % 32;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint4 raw = x[i * 32];
        iwide_widen4(raw.x, &a[2 * i][0], &a[2 * i][2]);
        iwide_widen4(raw.y, &a[2 * i][1], &a[2 * i][3]);
        iwide_widen4(raw.z, &a[2 * i + 1][0], &a[2 * i + 1][2]);
        iwide_widen4(raw.w, &a[2 * i + 1][1], &a[2 * i + 1][3]);
    }
}

/* The unscaled scores of the warp's keys lane / 4 and lane / 4 + 8 for one row; lanes with lane % 2 == 1 return the second. */
template <int N8, int PIECES>
static __device__ __forceinline__ float iwide_score(const uint32_t (&a)[2 * PIECES][4], const unsigned char *query, const float *weight,
                                                    int32_t n_head, int lane) {
    const uint64_t b = (uint64_t)(iwide_shared(query) >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
    float acc[N8][4], p[2] = {0.0f, 0.0f};
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < 2 * PIECES; k++)
        iwide_mma(acc, a[k], b + (uint64_t)(k / 4 * N8 * 1024 / 16 + k % 4 * 2), k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
    for (int j = 0; j < N8; j++) {
        const float2 w = *(const float2 *)(weight + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = acc[j][i], positive = x > 0.0f ? x : 0.0f;
            if (N8 > 1 || lane % 4 * 2 + i % 2 < n_head)
                p[i / 2] = BI_FMA(i % 2 ? w.y : w.x, positive, p[i / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        p[i] = BI_ADD(p[i], __shfl_xor_sync(0xffffffffu, p[i], 1));
        p[i] = BI_ADD(p[i], __shfl_xor_sync(0xffffffffu, p[i], 2));
    }
    return lane % 2 ? p[1] : p[0];
}

/* What the block's chunk and rows are, and its first copies begun. The kernel before this one packs the queries; keys, tables and segments are
 * from before that one, so they are asked for before the wait. */
static __device__ __forceinline__ void iwide_begin(const index_rows &r, const index_group &g, const iwide_layout &sh, int32_t block0, int32_t n_block,
                                                   int32_t row_bytes, int32_t n_weight, int32_t block_bytes) {
    const int tid = (int)threadIdx.x;
    const int64_t t0 = g.first - r.row0;
    if (tid < IWIDE_STAGES) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::"r"(
                         iwide_shared(&sh.full[tid]))
                     : "memory");
    }
    for (int32_t i = tid; i < n_block; i += IWIDE_THREADS)
        sh.block[i] = r.cache.table ? r.cache.table[(int64_t)g.seg.seq * r.cache.table_ld + block0 + i] : r.cache.first[g.seg.seq] + block0 + i;
    __syncthreads();
    for (int32_t i = 0; i < IWIDE_STAGES && i < n_block && tid == 0; i++)
        iwide_load(sh.stage + i * block_bytes, r.cache.base + r.cache.block_bytes * (size_t)sh.block[i], (uint32_t)block_bytes, &sh.full[i]);
    bi_cuda_await_before();
    bi_cuda_let_next_start();
    for (int32_t i = tid; i < g.n * row_bytes / 16; i += IWIDE_THREADS)
        ((uint4 *)sh.query)[i] = ((const uint4 *)(r.query + t0 * row_bytes))[i];
    for (int32_t i = tid; i < g.n * n_weight; i += IWIDE_THREADS)
        sh.weight[i] = r.weight[t0 * n_weight + i];
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    __syncthreads();
}

template <int N8, int PIECES>
static __global__ void __launch_bounds__(IWIDE_THREADS, IWIDE_PER_SM)
    index_score_wide(const index_rows r, const int32_t n_group, const int32_t n_row_max, const int32_t n_chunk_key) {
    extern __shared__ __align__(128) unsigned char index_shared[];
    const int32_t n_weight = N8 * 8, row_bytes = N8 * 8 * ((PIECES + 1) / 2) * 128, block_bytes = BR_PAGE_TOK * (PIECES * 32 + 4);
    const index_group g = index_group_of(r, (int32_t)(blockIdx.z * gridDim.y + blockIdx.y), n_group, n_row_max);
    const int tid = (int)threadIdx.x, lane = tid % 32;
    const int32_t visible = index_visible(g.seg, g.first + g.n - 1), begin = (int32_t)blockIdx.x * n_chunk_key;
    const int32_t end = begin + n_chunk_key < visible ? begin + n_chunk_key : visible, n_block = (end - begin + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    if (g.n <= 0 || begin >= end || (!r.all && visible <= r.topk)) {
        bi_cuda_await_before();
        return;
    }
    const iwide_layout sh(index_shared, n_row_max, row_bytes, n_weight, block_bytes);
    const int64_t t0 = g.first - r.row0;
    iwide_begin(r, g, sh, begin / BR_PAGE_TOK, n_block, row_bytes, n_weight, block_bytes);
    for (int32_t n = 0; n < n_block; n++) {
        const int32_t stage = n % IWIDE_STAGES, key = tid / 32 * INDEX_TILE + lane / 4 + lane % 2 * 8, own = begin + n * BR_PAGE_TOK + key;
        unsigned char *block = sh.stage + stage * block_bytes;
        uint32_t a[2 * PIECES][4];
        iwide_wait(&sh.full[stage], (uint32_t)(n / IWIDE_STAGES) & 1);
        const float scale = ((const float *)(block + BR_PAGE_TOK * PIECES * 32))[key];
        iwide_keys<PIECES>(a, block, tid);
        __syncthreads();
        if (tid == 0 && n + IWIDE_STAGES < n_block)
            iwide_load(block, r.cache.base + r.cache.block_bytes * (size_t)sh.block[n + IWIDE_STAGES], (uint32_t)block_bytes, &sh.full[stage]);
        for (int32_t i = 0; i < g.n; i++) {
            const float sum = iwide_score<N8, PIECES>(a, sh.query + i * row_bytes, sh.weight + i * n_weight, r.n_head, lane);
            float x = BI_MUL(sum, scale);
            x = bi_is_nan(x) ? bi_f32_of(BI_F32_NAN) : x;
            if (lane % 4 < 2 && own < index_visible(g.seg, g.first + i))
                r.score[(t0 + i) * r.score_ld + own] = r.bad[t0 + i] ? 0.0f : x;
        }
    }
}

#endif
#endif
