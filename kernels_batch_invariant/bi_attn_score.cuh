/* bi_attn_score: the first pass of the narrow form of attention: scores.      Contract: N-ATT-1
 *
 * Grid: (row, part, span of blocks, group of 32 heads), one a block of 256 threads. Shared memory: the group's queries, 128 bytes a head
 * and chunk of 64 columns; a ring of STAGES chunks of 64 latent rows, which runs on over the blocks.
 * Scores are S^T = K q^T: entries on M, heads on N, warps 2 x 4, each 32 entries x 8 heads, one accumulator over all columns in rising
 * blocks of 16: the chain of N-ATT-1 whatever the tile. Out: s; the second pass is bi_attn_value.cuh. */
#ifndef BI_ATTN_SCORE_CUH
#define BI_ATTN_SCORE_CUH

#include "bi_attn_parts.cuh"

typedef struct attn_query {
    const bi_bf16 *q, *q_r;
    int64_t q_r_ld, q_r_head_ld;
    float alpha;
    int32_t wide;                 /* all of it lies on 16 bytes, and both widths are whole units */
    int32_t n_chunk;              /* of 64 columns over d_kv_latent + d_rope */
    bi_fault fault;
} attn_query;

enum { SCORE_STAGES = 8, SCORE_STAGE_BYTES = BI_ATT_BLOCK * ATTN_CHUNK * (int)sizeof(bi_bf16) };

static inline size_t attn_score_shared(int32_t n_chunk) {
    return (size_t)ATTN_HEADS * (size_t)n_chunk * 128 + SCORE_STAGES * SCORE_STAGE_BYTES;
}

#ifdef __CUDACC__

/* Column k of [q~ | q_r] of one head; zero past its end. */
static __device__ __forceinline__ bi_bf16 score_query_at(const attn_rows &r, const attn_query &a, int64_t row, int32_t head, int32_t k) {
    if (k < r.d_kv_latent)
        return a.q[(row * r.n_head + head) * r.d_kv_latent + k];
    k -= r.d_kv_latent;
    return k < r.d_rope ? a.q_r[row * a.q_r_ld + head * a.q_r_head_ld + k] : (bi_bf16)0;
}

/* The queries of heads head0 .. to shared memory, chunk by chunk; heads past the last are zeros. */
static __device__ __forceinline__ void score_load_query(const attn_rows &r, const attn_query &a, int64_t row, int32_t head0, unsigned char *q) {
    for (int32_t i = (int32_t)threadIdx.x; i < a.n_chunk * ATTN_HEADS * 8; i += ATTN_THREADS) {
        const int32_t unit = i % 8, h = i / 8 % ATTN_HEADS, chunk = i / 8 / ATTN_HEADS, head = head0 + h, k = (chunk * 8 + unit) * ATTN_UNIT;
        bi_bf16 x[ATTN_UNIT] = {0, 0, 0, 0, 0, 0, 0, 0};
        uint4 *to = (uint4 *)(q + (size_t)chunk * ATTN_HEADS * 128 + attn_swizzle(h, unit, 128));
        if (a.wide) {
            const bi_bf16 *from = a.q + (row * r.n_head + head) * r.d_kv_latent + k;
            if (k >= r.d_kv_latent)
                from = a.q_r + row * a.q_r_ld + head * a.q_r_head_ld + (k - r.d_kv_latent);
            *to = head < r.n_head && k < r.d_kv_latent + r.d_rope ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
            continue;
        }
        for (int e = 0; e < ATTN_UNIT && head < r.n_head; e++)
            x[e] = score_query_at(r, a, row, head, k + e);
        *to = make_uint4(x[0] | (uint32_t)x[1] << 16, x[2] | (uint32_t)x[3] << 16, x[4] | (uint32_t)x[5] << 16, x[6] | (uint32_t)x[7] << 16);
    }
}

/* Feeds the ring: chunk after chunk, block after block up to `end`. A thread copies one unit of two rows; it fetches the ids of the next
 * block while the chunks of this one are copied. */
struct score_feed {
    int32_t block, chunk, end;
    const unsigned char *from[2];
    int32_t next[2];

    __device__ __forceinline__ void fetch(const attn_rows &r, int32_t row, attn_part p, int32_t at) {
        for (int i = 0; i < 2; i++)
            next[i] = attn_entry(r, row, p, at * BI_ATT_BLOCK + (int)threadIdx.x / 8 + 32 * i);
    }

    /* Copies the next chunk to its stage; always one group. */
    __device__ __forceinline__ void step(const attn_rows &r, int32_t row, attn_part p, int32_t n_chunk, unsigned char *stage) {
        if (block < end) {
            if (chunk == 0) {
                from[0] = attn_row_at(r, next[0]);
                from[1] = attn_row_at(r, next[1]);
                fetch(r, row, p, block + 1);
            }
            const int unit = (int)threadIdx.x % 8;
            for (int i = 0; i < 2; i++)
                attn_copy_unit(r, stage + attn_swizzle((int)threadIdx.x / 8 + 32 * i, unit, 128), from[i], chunk * 8 + unit);
            if (++chunk == n_chunk) {
                chunk = 0;
                block++;
            }
        }
        attn_copy_commit();
    }
};

/* acc (2 tiles of 16 entries, 8 heads) continues through the four blocks of 16 columns of one chunk. */
static __device__ __forceinline__ void score_chunk(float acc[2][4], const unsigned char *k, const unsigned char *q, int wm, int wn, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        uint32_t b[4];
        attn_load_matrix(b, q + attn_swizzle(wn * 8 + (lane & 7), pair * 4 + (lane >> 3), 128));
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                uint32_t a[4];
                attn_load_matrix(a, k + attn_swizzle(wm * 32 + tile * 16 + (lane & 15), pair * 4 + half * 2 + (lane >> 4), 128));
                bi_cuda_mma16(acc[tile], a, b + half * 2);
            }
        }
    }
}

/* s = RN(alpha * acc) of a block of n entries to `score` (heads, 64). Returns 1 when a score of a head that exists is not finite. */
static __device__ __forceinline__ int score_store(const float acc[2][4], float alpha, int n, int heads_left, float *score, int wm, int wn, int lane) {
    int bad = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int entry = wm * 32 + i / 4 * 16 + i % 4 / 2 * 8 + (lane >> 2), head = wn * 8 + (lane & 3) * 2 + i % 2;
        const float s = BI_MUL(alpha, acc[i / 4][i % 4]);
        bad |= entry < n && head < heads_left && !bi_is_finite(s);
        score[head * BI_ATT_BLOCK + entry] = s;
    }
    return bad;
}

static __global__ void __launch_bounds__(ATTN_THREADS, 2) attn_score(const attn_rows r, const attn_query a, const int32_t n_span) {
    bi_cuda_begin();
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const int32_t n_group = r.n_head_pad / ATTN_HEADS, unit = (int32_t)blockIdx.x, head0 = unit % n_group * ATTN_HEADS;
    const int32_t span = unit / n_group % n_span, at = unit / n_group / n_span, row = r.row0 + at / r.n_part, each = ATTN_BLOCKS / n_span;
    const int tid = (int)threadIdx.x, lane = tid % 32, wm = tid / 32 % 2, wn = tid / 64;
    const attn_part p = attn_part_of(r, row, r.part0 + at % r.n_part);
    const int32_t n_block = (p.n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK, first = span * each, end = first + each < n_block ? first + each : n_block;
    unsigned char *ring = attn_shared_bytes + (size_t)a.n_chunk * ATTN_HEADS * 128;
    score_feed feed = {first, 0, end, {NULL, NULL}, {-1, -1}};
    const int32_t n_step = (end - first) * a.n_chunk;
    if (n_step <= 0)
        return;
    feed.fetch(r, row, p, first);
    for (int s = 0; s < SCORE_STAGES - 1; s++)
        feed.step(r, row, p, a.n_chunk, ring + s * SCORE_STAGE_BYTES);
    score_load_query(r, a, row, head0, attn_shared_bytes);
    float acc[2][4];
    int bad = 0;
    for (int32_t step = 0, chunk = 0, block = first; step < n_step; step++) {
        attn_copy_wait<SCORE_STAGES - 2>();
        __syncthreads();
        feed.step(r, row, p, a.n_chunk, ring + (step + SCORE_STAGES - 1) % SCORE_STAGES * SCORE_STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < 8 && chunk == 0; i++)
            acc[i / 4][i % 4] = 0.0f;
        score_chunk(acc, ring + step % SCORE_STAGES * SCORE_STAGE_BYTES, attn_shared_bytes + (size_t)chunk * ATTN_HEADS * 128, wm, wn, lane);
        if (++chunk < a.n_chunk)
            continue;
        bad |= score_store(acc, a.alpha, p.n - block * BI_ATT_BLOCK, r.n_head - head0,
                           r.score + (((int64_t)at * ATTN_BLOCKS + block) * r.n_head_pad + head0) * BI_ATT_BLOCK, wm, wn, lane);
        chunk = 0;
        block++;
    }
    if (bad)
        bi_cuda_fault(a.fault, row, bi_f32_of(BI_F32_INF));
}

#endif
#endif
