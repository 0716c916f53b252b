/* The indexer's key scan with keys and queries as bf16, beside that of the tree; see lab_index.cu. Layer: experiments. */
#ifndef LAB_INDEX_VERSIONS_CUH
#define LAB_INDEX_VERSIONS_CUH

#include "bi_index_score_wide.cuh"
#include "bi_index_topk.cuh"

template <int PIECES> static __device__ __forceinline__ void bf16_keys(uint32_t (&a)[2 * PIECES][4], const unsigned char *block, int tid) {
    const uint4 *x = (const uint4 *)(block + tid / 32 * PIECES * INDEX_PIECE) + tid % 32;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint4 raw = x[i * 32];
        index_widen4(raw.x, &a[2 * i][0], &a[2 * i][2]);
        index_widen4(raw.y, &a[2 * i][1], &a[2 * i][3]);
        index_widen4(raw.z, &a[2 * i + 1][0], &a[2 * i + 1][2]);
        index_widen4(raw.w, &a[2 * i + 1][1], &a[2 * i + 1][3]);
    }
}

static __device__ __forceinline__ void bf16_mma(float (&d)[4][4], const uint32_t a[4], uint64_t b, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}\n"
                 : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
                   "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

/* As iwide_score of four eights of heads. */
template <int PIECES>
static __device__ __forceinline__ float bf16_score(const uint32_t (&a)[2 * PIECES][4], const unsigned char *query, const float *weight, int lane) {
    const uint64_t b = (uint64_t)(iwide_shared(query) >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
    float acc[4][4], p[2] = {0.0f, 0.0f};
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < 2 * PIECES; k++)
        bf16_mma(acc, a[k], b + (uint64_t)(k / 4 * 4 * 1024 / 16 + k % 4 * 2), k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 w = *(const float2 *)(weight + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[i / 2] = BI_FMA(i % 2 ? w.y : w.x, acc[j][i] > 0.0f ? acc[j][i] : 0.0f, p[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        p[i] = BI_ADD(p[i], __shfl_xor_sync(0xffffffffu, p[i], 1));
        p[i] = BI_ADD(p[i], __shfl_xor_sync(0xffffffffu, p[i], 2));
    }
    return lane % 2 ? p[1] : p[0];
}

/* One row a segment, 32 heads of 128. */
static __global__ void __launch_bounds__(IWIDE_THREADS, IWIDE_PER_SM) score_bf16(const index_rows r, const int32_t n_chunk_key) {
    extern __shared__ __align__(128) unsigned char index_shared[];
    constexpr int PIECES = 4;
    const int32_t n_weight = 32, row_bytes = 32 * 2 * 128, block_bytes = BR_PAGE_TOK * (PIECES * 32 + 4);
    const index_group g = index_group_of(r, (int32_t)blockIdx.z, 1, 1);
    const int tid = (int)threadIdx.x, lane = tid % 32;
    const int32_t visible = index_visible(g.seg, g.first), begin = (int32_t)blockIdx.x * n_chunk_key;
    const int32_t end = begin + n_chunk_key < visible ? begin + n_chunk_key : visible, n_block = (end - begin + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    if (begin >= end)
        return;
    const iwide_layout sh(index_shared, 1, row_bytes, n_weight, block_bytes);
    const int64_t t0 = g.first - r.row0;
    iwide_begin(r, g, sh, begin / BR_PAGE_TOK, n_block, row_bytes, n_weight, block_bytes);
    for (int32_t n = 0; n < n_block; n++) {
        const int32_t stage = n % IWIDE_STAGES, key = tid / 32 * INDEX_TILE + lane / 4 + lane % 2 * 8, own = begin + n * BR_PAGE_TOK + key;
        unsigned char *block = sh.stage + stage * block_bytes;
        uint32_t a[2 * PIECES][4];
        iwide_wait(&sh.full[stage], (uint32_t)(n / IWIDE_STAGES) & 1);
        const float scale = ((const float *)(block + BR_PAGE_TOK * PIECES * 32))[key];
        bf16_keys<PIECES>(a, block, tid);
        __syncthreads();
        if (tid == 0 && n + IWIDE_STAGES < n_block)
            iwide_load(block, r.cache.base + r.cache.block_bytes * (size_t)sh.block[n + IWIDE_STAGES], (uint32_t)block_bytes, &sh.full[stage]);
        float x = BI_MUL(bf16_score<PIECES>(a, sh.query, sh.weight, lane), scale);
        x = bi_is_nan(x) ? bi_f32_of(BI_F32_NAN) : x;
        if (lane % 4 < 2 && own < visible)
            r.score[t0 * r.score_ld + own] = r.bad[t0] ? 0.0f : x;
    }
}

#endif
