/* bi_attn_score: the first pass of attention: scores, softmax weights and class statistics.      Contract: N-ATT-1, N-ATT-3, N-SUM-2
 *
 * Grid: (row, class, group of 32 * NJ heads), one a block of 256 threads; a class's blocks of 64 entries follow each other. Shared
 * memory: the group's queries, 128 bytes a head and chunk of 64 columns; a ring of STAGES chunks of 64 latent rows, which runs on
 * over the blocks; the weights of a block on their way out.
 * Scores are S^T = K q^T: entries on M, heads on N, warps 2 x 4, each 32 entries x 8 * NJ heads, one accumulator over all columns in
 * rising blocks of 16: the chain of N-ATT-1 whatever the tile. The fold of SUM64 is by halves of the entry's number j, bit 5 first, so
 * M is dealt out by its bits: bit 5 is the warp's 16-row tile, bits 4..2 the row in an eight (lane / 4, folded by shuffles), bit 1 the
 * warp, bit 0 the eight of the tile. Bits 5 to 2 fold in registers, bits 1 and 0 in shared memory by the thread that keeps m and l.
 * Out: R(e) of every block, f, and m, l of the class; the second pass is bi_attn_value.cuh. */
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

static inline size_t attn_score_shared(int32_t heads, int32_t n_chunk) {
    return (size_t)heads * (size_t)n_chunk * 128 + SCORE_STAGES * SCORE_STAGE_BYTES + (size_t)heads * (ATTN_P_BYTES + 6 * sizeof(float));
}

#ifdef __CUDACC__

/* Shared memory of the pass, laid out once. */
template <int NJ>
struct score_shared {
    enum { HEADS = 32 * NJ };
    unsigned char *q, *stage, *weight;
    float *top, *sum; /* (2 warps, HEADS); (2 warps, 2 eights, HEADS) */
    __device__ __forceinline__ score_shared(unsigned char *base, int32_t n_chunk) {
        q = base;
        stage = q + (size_t)n_chunk * HEADS * 128;
        weight = stage + SCORE_STAGES * SCORE_STAGE_BYTES;
        top = (float *)(weight + HEADS * ATTN_P_BYTES);
        sum = top + 2 * HEADS;
    }
};

/* Column k of [q~ | q_r] of one head; zero past its end. */
static __device__ __forceinline__ bi_bf16 score_query_at(const attn_rows &r, const attn_query &a, int64_t row, int32_t head, int32_t k) {
    if (k < r.d_kv_latent)
        return a.q[(row * r.n_head + head) * r.d_kv_latent + k];
    k -= r.d_kv_latent;
    return k < r.d_rope ? a.q_r[row * a.q_r_ld + head * a.q_r_head_ld + k] : (bi_bf16)0;
}

/* The queries of heads head0 .. to shared memory by the first ATTN_THREADS threads, chunk by chunk; heads past the last are zeros. ASYNC: on
 * their way, where they lie on 16 bytes. */
template <int HEADS, int ASYNC>
static __device__ __forceinline__ void score_load_query(const attn_rows &r, const attn_query &a, int64_t row, int32_t head0, unsigned char *q) {
    for (int32_t i = (int32_t)threadIdx.x; i < a.n_chunk * HEADS * 8; i += ATTN_THREADS) {
        const int32_t unit = i % 8, h = i / 8 % HEADS, chunk = i / 8 / HEADS, head = head0 + h, k = (chunk * 8 + unit) * ATTN_UNIT;
        bi_bf16 x[ATTN_UNIT] = {0, 0, 0, 0, 0, 0, 0, 0};
        uint4 *to = (uint4 *)(q + (size_t)chunk * HEADS * 128 + attn_swizzle(h, unit, 128));
        if (a.wide) {
            const bi_bf16 *from = a.q + (row * r.n_head + head) * r.d_kv_latent + k;
            const int wanted = head < r.n_head && k < r.d_kv_latent + r.d_rope;
            if (k >= r.d_kv_latent)
                from = a.q_r + row * a.q_r_ld + head * a.q_r_head_ld + (k - r.d_kv_latent);
            if (ASYNC)
                attn_copy16(to, wanted ? from : a.q, wanted);
            else
                *to = wanted ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
            continue;
        }
        for (int e = 0; e < ATTN_UNIT && head < r.n_head; e++)
            x[e] = score_query_at(r, a, row, head, k + e);
        *to = make_uint4(x[0] | (uint32_t)x[1] << 16, x[2] | (uint32_t)x[3] << 16, x[4] | (uint32_t)x[5] << 16, x[6] | (uint32_t)x[7] << 16);
    }
}

/* The entry in row p of a staged block: see the head of this file. */
static __device__ __forceinline__ int score_entry_of_row(int p) {
    const int warp = p >> 5, tile = p >> 4 & 1, eight = p >> 3 & 1, row = p & 7;
    return tile * 32 + row * 4 + warp * 2 + eight;
}

/* Feeds the ring: chunk after chunk, block after block. A thread copies one unit of two rows; it fetches the ids of the next block while
 * the chunks of this one are copied. */
struct score_feed {
    int32_t block, chunk, n_block;
    const unsigned char *from[2];
    int32_t next[2];

    __device__ __forceinline__ void fetch(const attn_rows &r, int32_t t, int32_t seq, attn_class k, int32_t c, int32_t at) {
        for (int i = 0; i < 2; i++)
            next[i] = attn_entry(r, t, seq, k, c, at * BI_ATT_BLOCK + score_entry_of_row((int)threadIdx.x / 8 + 32 * i));
    }

    /* Copies the next chunk to its stage; always one group. */
    __device__ __forceinline__ void step(const attn_rows &r, int32_t t, int32_t seq, attn_class k, int32_t c, int32_t n_chunk,
                                         unsigned char *stage) {
        if (block < n_block) {
            if (chunk == 0) {
                from[0] = attn_row_at(r, next[0]);
                from[1] = attn_row_at(r, next[1]);
                fetch(r, t, seq, k, c, block + 1);
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

/* acc (2 tiles of 16 entries, NJ of 8 heads) continues through the four blocks of 16 columns of one chunk. */
template <int NJ>
static __device__ __forceinline__ void score_chunk(float acc[2][NJ][4], const unsigned char *k, const unsigned char *q, int wm, int wn, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        uint32_t b[NJ][4];
#pragma unroll
        for (int j = 0; j < NJ; j++)
            attn_load_matrix(b[j], q + attn_swizzle((wn * NJ + j) * 8 + (lane & 7), pair * 4 + (lane >> 3), 128));
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                uint32_t a[4];
                attn_load_matrix(a, k + attn_swizzle(wm * 32 + tile * 16 + (lane & 15), pair * 4 + half * 2 + (lane >> 4), 128));
#pragma unroll
                for (int j = 0; j < NJ; j++)
                    bi_cuda_mma16(acc[tile][j], a, b[j] + half * 2);
            }
        }
    }
}

static __device__ __forceinline__ float score_larger(float a, float b) {
    return b > a ? b : a;
}

/* s = RN(alpha * acc) in place, and the largest of this warp's present entries a head, in shared memory. Returns 1 when a score of a
 * head that exists is not finite. */
template <int NJ>
static __device__ __forceinline__ int score_top(float acc[2][NJ][4], float alpha, int n, int heads_left, float *top, int wn, int wm, int lane) {
    int bad = 0;
#pragma unroll
    for (int j = 0; j < NJ; j++) {
#pragma unroll
        for (int col = 0; col < 2; col++) {
            const int head = (wn * NJ + j) * 8 + (lane & 3) * 2 + col;
            float most = bi_f32_of(0xff800000u);
#pragma unroll
            for (int i = 0; i < 4; i++) { /* tile i / 2, eight i % 2 */
                const float s = BI_MUL(alpha, acc[i >> 1][j][(i & 1) * 2 + col]);
                const int entry = (i >> 1) * 32 + (lane >> 2) * 4 + wm * 2 + (i & 1);
                acc[i >> 1][j][(i & 1) * 2 + col] = s;
                bad |= entry < n && head < heads_left && !bi_is_finite(s);
                most = entry < n ? score_larger(most, s) : most;
            }
#pragma unroll
            for (int h = 16; h >= 4; h >>= 1)
                most = score_larger(most, __shfl_xor_sync(0xffffffffu, most, h));
            if (lane < 4)
                top[wm * 32 * NJ + head] = most;
        }
    }
    return bad;
}

/* e = exp(RN(s - m)), R(e) to the weights in shared memory, and the folds of SUM64 down to two entries a warp. m (NJ, 2): before and
 * after this block. */
template <int NJ>
static __device__ __forceinline__ void score_weigh(float acc[2][NJ][4], float m[NJ][2], int n, const score_shared<NJ> &sh, int wn, int wm,
                                                   int lane) {
    enum { HEADS = 32 * NJ };
    const int row = lane >> 2;
#pragma unroll
    for (int j = 0; j < NJ; j++) {
#pragma unroll
        for (int col = 0; col < 2; col++) {
            const int head = (wn * NJ + j) * 8 + (lane & 3) * 2 + col;
            const float top = score_larger(score_larger(m[j][col], sh.top[head]), sh.top[HEADS + head]);
            float e[4];
            m[j][col] = top;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int entry = (i >> 1) * 32 + row * 4 + wm * 2 + (i & 1);
                const float x = bi_exp(BI_SUB(acc[i >> 1][j][(i & 1) * 2 + col], top));
                e[i] = entry < n ? x : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int entry = (i >> 1) * 32 + row * 4 + wm * 2; /* the even one of two */
                *(bi_bf16 *)(sh.weight + attn_swizzle(head, (entry >> 4) * 2 + (i & 1), ATTN_P_BYTES) + (entry & 14)) = bi_round(e[i]);
            }
#pragma unroll
            for (int eight = 0; eight < 2; eight++) {
                float p = BI_ADD(e[eight], e[2 + eight]);
#pragma unroll
                for (int h = 16; h >= 4; h >>= 1)
                    p = BI_ADD(p, __shfl_xor_sync(0xffffffffu, p, h));
                if (row == 0)
                    sh.sum[(wm * 2 + eight) * HEADS + head] = p;
            }
        }
    }
}

/* The thread of a head joins a block to the class: m, l, and f for the second pass. */
template <int NJ>
static __device__ __forceinline__ void score_join(float2 &stat, int first, const score_shared<NJ> &sh, float *scale) {
    enum { HEADS = 32 * NJ };
    const int h = (int)threadIdx.x;
    const float block = score_larger(sh.top[h], sh.top[HEADS + h]), top = first ? block : score_larger(stat.x, block);
    const float sum = BI_ADD(BI_ADD(sh.sum[h], sh.sum[2 * HEADS + h]), BI_ADD(sh.sum[HEADS + h], sh.sum[3 * HEADS + h]));
    const float f = first ? 0.0f : bi_exp(BI_SUB(stat.x, top));
    stat.y = first ? sum : BI_FMA(stat.y, f, sum);
    scale[h] = f;
    stat.x = top;
}

template <int NJ>
static __global__ void __launch_bounds__(ATTN_THREADS, 1) attn_score(const attn_rows r, const attn_query a) {
    enum { HEADS = 32 * NJ };
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const score_shared<NJ> sh(attn_shared_bytes, a.n_chunk);
    const int32_t n_group = r.n_head_pad / HEADS, unit = (int32_t)blockIdx.x, group = unit % n_group;
    const int32_t c = unit / n_group % BI_ATT_CLASSES, t = unit / n_group / BI_ATT_CLASSES, row = r.row0 + t;
    const int tid = (int)threadIdx.x, lane = tid % 32, wm = tid / 32 % 2, wn = tid / 64;
    if (r.row_seg[row] < 0)
        return;
    const bi_seg seg = r.seg[r.row_seg[row]];
    const attn_class k = attn_class_of(r, t, seg.pos + row - seg.row + 1, c);
    score_feed feed = {0, 0, (k.n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK, {NULL, NULL}, {-1, -1}};
    const int32_t n_step = feed.n_block * a.n_chunk;
    if (n_step == 0)
        return;
    feed.fetch(r, t, seg.seq, k, c, 0);
    for (int s = 0; s < SCORE_STAGES - 1; s++)
        feed.step(r, t, seg.seq, k, c, a.n_chunk, sh.stage + s * SCORE_STAGE_BYTES);
    score_load_query<HEADS, 0>(r, a, row, group * HEADS, sh.q);
    float acc[2][NJ][4], m[NJ][2];
    float2 stat = make_float2(0.0f, 0.0f);
    int bad = 0;
    for (int i = 0; i < NJ * 2; i++)
        m[i / 2][i % 2] = bi_f32_of(0xff800000u);
    for (int32_t step = 0, chunk = 0, block = 0; step < n_step; step++) {
        attn_copy_wait<SCORE_STAGES - 2>();
        __syncthreads();
        feed.step(r, t, seg.seq, k, c, a.n_chunk, sh.stage + (step + SCORE_STAGES - 1) % SCORE_STAGES * SCORE_STAGE_BYTES);
        if (chunk == 0) {
#pragma unroll
            for (int i = 0; i < 2 * NJ * 4; i++)
                acc[i / (4 * NJ)][i / 4 % NJ][i % 4] = 0.0f;
        }
        score_chunk<NJ>(acc, sh.stage + step % SCORE_STAGES * SCORE_STAGE_BYTES, sh.q + (size_t)chunk * HEADS * 128, wm, wn, lane);
        if (++chunk < a.n_chunk)
            continue;
        const int32_t left = k.n - block * BI_ATT_BLOCK, n = left < BI_ATT_BLOCK ? left : BI_ATT_BLOCK;
        const int64_t at = ((int64_t)t * r.n_block_max + k.block + block) * r.n_head_pad + group * HEADS;
        bad |= score_top<NJ>(acc, a.alpha, n, r.n_head - group * HEADS, sh.top, wn, wm, lane);
        __syncthreads();
        score_weigh<NJ>(acc, m, n, sh, wn, wm, lane);
        __syncthreads();
        if (tid < HEADS)
            score_join<NJ>(stat, block == 0, sh, r.scale + at);
        for (int i = tid; i < HEADS * ATTN_P_BYTES / 16; i += ATTN_THREADS)
            *(uint4 *)(r.weight + at * ATTN_P_BYTES + i * 16) = *(const uint4 *)(sh.weight + i * 16);
        chunk = 0;
        block++;
    }
    if (tid < HEADS)
        r.stat[((int64_t)t * BI_ATT_CLASSES + c) * r.n_head_pad + group * HEADS + tid] = stat;
    if (bad)
        bi_cuda_fault(a.fault, row, bi_f32_of(BI_F32_INF));
}

#endif
#endif
