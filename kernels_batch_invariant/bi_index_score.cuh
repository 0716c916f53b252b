/* bi_index_score: scores of all visible positions.      Contract: N-IDX-3, N-CHAIN
 *
 * Grid: (chunk of keys, rows of one segment), four warps a block; a warp takes 32 keys at a time and all rows of the block with them.
 * Shared memory: the rows' packed queries, then their weights. Keys are on M, heads on N, so that thread lane % 4 = r of a quad holds the
 * heads 8i + 2r and 8i + 2r + 1: its fma chain over rising i is p_r of the clause, and two shuffles give (p0 + p1) + (p2 + p3). acc_h is
 * one chain over d in rising blocks of 16. */
#ifndef BI_INDEX_SCORE_CUH
#define BI_INDEX_SCORE_CUH

#include "bi_index_parts.cuh"

enum {
    SCORE_WARPS = 4,
    SCORE_THREADS = 32 * SCORE_WARPS,
    SCORE_ROWS_MAX = 8, /* rows that share a key's way to the registers */
    SCORE_PIECES = 4    /* of 32 columns held in registers */
};

static inline size_t index_query_bytes(int32_t n_tile, int32_t d_pad) {
    return (size_t)n_tile * 8 * (size_t)((d_pad + 63) / 64 * 64) * sizeof(bi_bf16); /* whole chunks of 64 columns for the wide form */
}

static inline size_t index_score_shared(int32_t n_tile, int32_t d_pad, int32_t n_row) {
    return (size_t)n_row * (index_query_bytes(n_tile, d_pad) + (size_t)n_tile * 8 * sizeof(float));
}

#ifdef __CUDACC__

static __device__ __forceinline__ uint32_t index_times_2_120(uint32_t pair) {
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(out) : "r"(pair), "r"(0x7b807b80u));
    return out;
}

/* Four e4m3 codes as two pairs of bf16, exact: the code read as a bf16 is 2^120 too small, its subnormals included. */
static __device__ __forceinline__ void index_widen4(uint32_t codes, uint32_t *low, uint32_t *high) {
    const uint32_t x = __byte_perm(codes, 0, 0x1404), y = __byte_perm(codes, 0, 0x3424);
    *low = index_times_2_120((x & 0x80008000u) | (x >> 4 & 0x07f007f0u));
    *high = index_times_2_120((y & 0x80008000u) | (y >> 4 & 0x07f007f0u));
}

/* The codes of 32 keys, up to 128 columns, as they lie in the cache. */
struct index_raw {
    uint4 x[2][SCORE_PIECES];

    /* Pieces piece0 .. of the keys from `key` (of the block) on. */
    __device__ __forceinline__ void load(const index_rows &r, const unsigned char *block, int32_t key, int32_t piece0, int lane) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
#pragma unroll
            for (int i = 0; i < SCORE_PIECES; i++) {
                const unsigned char *at =
                    block + (key / INDEX_TILE + tile) * INDEX_TILE * r.d_pad + (piece0 + i) * INDEX_PIECE + lane * 16;
                if ((piece0 + i) * 32 >= r.d_pad)
                    continue;
                const uint32_t *word = (const uint32_t *)at;
                x[tile][i] = r.wide ? __ldg((const uint4 *)at) : make_uint4(word[0], word[1], word[2], word[3]);
            }
        }
    }
};

/* Fragments of 32 keys: a[tile][block of 16 columns]. */
struct index_keys {
    uint32_t a[2][2 * SCORE_PIECES][4];

    __device__ __forceinline__ void widen(const index_raw &raw) {
#pragma unroll
        for (int i = 0; i < 2 * SCORE_PIECES; i++) {
            index_widen4(raw.x[i % 2][i / 2].x, &a[i % 2][i / 2 * 2][0], &a[i % 2][i / 2 * 2][2]);
            index_widen4(raw.x[i % 2][i / 2].y, &a[i % 2][i / 2 * 2][1], &a[i % 2][i / 2 * 2][3]);
            index_widen4(raw.x[i % 2][i / 2].z, &a[i % 2][i / 2 * 2 + 1][0], &a[i % 2][i / 2 * 2 + 1][2]);
            index_widen4(raw.x[i % 2][i / 2].w, &a[i % 2][i / 2 * 2 + 1][1], &a[i % 2][i / 2 * 2 + 1][3]);
        }
    }
};

/* acc (tiles of keys) of one eight of heads continues through the columns that keys holds. query: this eight's pieces. */
static __device__ __forceinline__ void index_chain(float acc[2][4], const index_keys &keys, const uint4 *query, int32_t n_piece, int lane) {
#pragma unroll
    for (int i = 0; i < SCORE_PIECES; i++) {
        if (i >= n_piece)
            break;
        const uint4 q = query[i * 32 + lane];
        const uint32_t b[2][2] = {{q.x, q.y}, {q.z, q.w}};
#pragma unroll
        for (int block = 0; block < 2; block++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                bi_cuda_mma16(acc[tile], keys.a[tile][2 * i + block], b[block]);
        }
    }
}

/* p (tile, eight of keys) takes this thread's two heads of one eight of heads. */
static __device__ __forceinline__ void index_heads(float p[2][2], const float acc[2][4], const float *weight, int32_t head, int32_t n_head) {
#pragma unroll
    for (int col = 0; col < 2; col++) {
        if (head + col >= n_head)
            break;
        const float w = weight[head + col];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = acc[i / 2][i % 2 * 2 + col];
            p[i / 2][i % 2] = BI_FMA(w, x > 0.0f ? x : 0.0f, p[i / 2][i % 2]);
        }
    }
}

/* The sum over the four chains; lane 4g + r keeps the one of key 8r + g. */
static __device__ __forceinline__ float index_fold(float p[2][2], int lane) {
    float out = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = p[i / 2][i % 2];
        x = BI_ADD(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = BI_ADD(x, __shfl_xor_sync(0xffffffffu, x, 2));
        out = lane % 4 == i ? x : out;
    }
    return out;
}

/* The unscaled score of this lane's key for one row. LONG: keys have more columns than `keys` holds, and are read again for each eight
 * of heads. */
template <int LONG>
static __device__ __forceinline__ float index_score_row(const index_rows &r, index_keys &keys, const unsigned char *block, int32_t key,
                                                        const unsigned char *query, const float *weight, int lane) {
    const int32_t n_piece = r.d_pad / 32;
    float p[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    for (int32_t tile = 0; tile < r.n_tile; tile++) {
        const uint4 *own = (const uint4 *)(query + (size_t)tile * (size_t)n_piece * INDEX_PIECE);
        float acc[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        if (!LONG)
            index_chain(acc, keys, own, n_piece, lane);
        for (int32_t piece = 0; LONG && piece < n_piece; piece += SCORE_PIECES) {
            index_raw raw;
            raw.load(r, block, key, piece, lane);
            keys.widen(raw);
            index_chain(acc, keys, own + piece * 32, n_piece - piece, lane);
        }
        index_heads(p, acc, weight, tile * 8 + lane % 4 * 2, r.n_head);
    }
    return index_fold(p, lane);
}

/* The block's rows: rows first .. first + n - 1 of the step, all of one segment. */
typedef struct index_group {
    bi_seg seg;
    int32_t first, n;
} index_group;

static __device__ __forceinline__ index_group index_group_of(const index_rows &r, int32_t unit, int32_t n_group, int32_t n_row_max) {
    index_group g;
    g.seg = r.seg[unit / n_group];
    const int32_t begin = g.seg.row > r.row0 ? g.seg.row : r.row0;
    const int32_t seg_end = g.seg.row + g.seg.n_row, end = seg_end < r.row0 + r.n_row ? seg_end : r.row0 + r.n_row;
    g.first = begin + unit % n_group * n_row_max;
    g.n = end - g.first < n_row_max ? end - g.first : n_row_max;
    return g;
}

template <int LONG>
static __global__ void __launch_bounds__(SCORE_THREADS, LONG ? 1 : 3)
    index_score(const index_rows r, const int32_t n_group, const int32_t n_row_max, const int32_t n_chunk_key) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char index_shared[];
    const int32_t n_weight = r.n_tile * 8, row_bytes = n_weight * ((r.d_pad + 63) / 64 * 64) * 2;
    const index_group g = index_group_of(r, (int32_t)(blockIdx.z * gridDim.y + blockIdx.y), n_group, n_row_max);
    const int tid = (int)threadIdx.x, lane = tid % 32;
    if (g.n <= 0)
        return;
    const int32_t visible = index_visible(g.seg, g.first + g.n - 1), begin = (int32_t)blockIdx.x * n_chunk_key;
    const int32_t end = begin + n_chunk_key < visible ? begin + n_chunk_key : visible;
    if (begin >= end || (!r.all && visible <= r.topk))
        return;
    float *weight = (float *)(index_shared + (size_t)n_row_max * row_bytes);
    const int64_t t0 = g.first - r.row0;
    for (int32_t i = tid; i < g.n * row_bytes / 16; i += SCORE_THREADS)
        ((uint4 *)index_shared)[i] = ((const uint4 *)(r.query + t0 * row_bytes))[i];
    for (int32_t i = tid; i < g.n * n_weight; i += SCORE_THREADS)
        weight[i] = r.weight[t0 * n_weight + i];
    __syncthreads();
    index_raw raw;
    int32_t key = begin + tid / 32 * INDEX_KEYS;
    const unsigned char *block = key < end ? bi_cuda_cache_block(r.cache, g.seg.seq, key / BR_PAGE_TOK) : NULL;
    if (!LONG && key < end)
        raw.load(r, block, key % BR_PAGE_TOK, 0, lane);
    for (; key < end; key += SCORE_WARPS * INDEX_KEYS) {
        const int32_t own = key + lane % 4 * 8 + lane / 4, next = key + SCORE_WARPS * INDEX_KEYS;
        const unsigned char *now = block;
        const float scale = ((const float *)(now + BR_PAGE_TOK * r.d_pad))[own % BR_PAGE_TOK];
        index_keys keys;
        if (!LONG)
            keys.widen(raw);
        if (next < end)
            block = bi_cuda_cache_block(r.cache, g.seg.seq, next / BR_PAGE_TOK);
        if (!LONG && next < end)
            raw.load(r, block, next % BR_PAGE_TOK, 0, lane);
        for (int32_t i = 0; i < g.n; i++) {
            if (key >= index_visible(g.seg, g.first + i))
                continue;
            const unsigned char *query = index_shared + (size_t)i * row_bytes;
            float x = BI_MUL(index_score_row<LONG>(r, keys, now, key % BR_PAGE_TOK, query, weight + i * n_weight, lane), scale);
            x = bi_is_nan(x) ? bi_f32_of(BI_F32_NAN) : x;
            if (own < index_visible(g.seg, g.first + i))
                r.score[(t0 + i) * r.score_ld + own] = r.bad[t0 + i] ? 0.0f : x;
        }
    }
}

#endif
#endif
