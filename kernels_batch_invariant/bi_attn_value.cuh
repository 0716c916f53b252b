/* bi_attn_value: the second pass of the narrow form of attention: weights and values; and the merge.      Contract: N-ATT-3, N-ATT-4
 *
 * attn_value: grid (row, part, 128 columns of the latent, group of 32 heads), one a block of 256 threads. Shared memory: a ring of
 * VALUE_STAGES blocks, each 64 latent rows x 128 columns and the scores of the heads; R(e) and f of the block at hand. Eight threads take
 * a head's scores, 8 entries each: the fold of a sixteen is one shuffle and three adds, that of the sixteens two shuffles. Then acc (heads
 * on M, columns on N, entries on K in rising 16s), from +0 in a part's first block, scaled by f in every later one.
 * attn_merge: grid (row, head), 128 threads; a thread has a column and takes the parts in rising order. */
#ifndef BI_ATTN_VALUE_CUH
#define BI_ATTN_VALUE_CUH

#include "bi_attn_parts.cuh"

enum {
    VALUE_COLUMNS = 128,
    VALUE_STAGES = 3,
    VALUE_EACH = 8,                       /* entries of a thread */
    VALUE_ROW_BYTES = VALUE_COLUMNS * (int)sizeof(bi_bf16),
    VALUE_K_BYTES = BI_ATT_BLOCK * VALUE_ROW_BYTES,
    VALUE_STAGE_BYTES = VALUE_K_BYTES + ATTN_HEADS * ATTN_S_BYTES,
    VALUE_SHARED = VALUE_STAGES * VALUE_STAGE_BYTES + ATTN_HEADS * (ATTN_P_BYTES + (int)sizeof(float)),
    MERGE_THREADS = 128
};

#ifdef __CUDACC__

/* Feeds the ring with whole blocks. A thread copies one unit of four latent rows; it fetches the ids of a block one step ahead. */
struct value_feed {
    int32_t block, end, next[4];

    __device__ __forceinline__ void fetch(const attn_rows &r, int32_t row, attn_part p) {
        for (int i = 0; i < 4; i++)
            next[i] = attn_entry(r, row, p, block * BI_ATT_BLOCK + (int)threadIdx.x / 16 + 16 * i);
    }
    /* Always one group. score: of the part's first block. */
    __device__ __forceinline__ void step(const attn_rows &r, int32_t row, attn_part p, int32_t unit0, const float *score, unsigned char *stage) {
        if (block < end) {
            const int tid = (int)threadIdx.x, unit = tid % 16;
            const unsigned char *s = (const unsigned char *)(score + (int64_t)block * r.n_head_pad * BI_ATT_BLOCK);
            for (int i = 0; i < 4; i++)
                attn_copy_unit(r, stage + attn_swizzle(tid / 16 + 16 * i, unit, VALUE_ROW_BYTES), attn_row_at(r, next[i]), unit0 + unit);
            for (int i = tid; i < ATTN_HEADS * ATTN_S_BYTES / 16; i += ATTN_THREADS)
                attn_copy16(stage + VALUE_K_BYTES + i * 16, s + i * 16, 1);
            block++;
            fetch(r, row, p);
        }
        attn_copy_commit();
    }
};

/* Of a block of n entries: R(e) to `weight`, f to `scale`; m and l of the part. Eight threads a head, all with the head's m and l. */
static __device__ __forceinline__ void value_weigh(const unsigned char *score, int n, int first, float2 &stat, unsigned char *weight, float *scale) {
    const int h = (int)threadIdx.x / VALUE_EACH, q = (int)threadIdx.x % VALUE_EACH;
    const float *s = (const float *)(score + h * ATTN_S_BYTES) + q * VALUE_EACH;
    float e[VALUE_EACH], top = bi_f32_of(0xff800000u);
#pragma unroll
    for (int i = 0; i < VALUE_EACH; i++) {
        e[i] = q * VALUE_EACH + i < n ? s[i] : bi_f32_of(0xff800000u);
        top = attn_larger(top, e[i]);
    }
#pragma unroll
    for (int x = 1; x < VALUE_EACH; x <<= 1)
        top = attn_larger(top, __shfl_xor_sync(0xffffffffu, top, x));
    top = first ? top : attn_larger(stat.x, top);
    const float f = first ? 0.0f : bi_exp(BI_SUB(stat.x, top));
    uint32_t pair[VALUE_EACH / 2];
#pragma unroll
    for (int i = 0; i < VALUE_EACH; i++)
        e[i] = bi_exp(BI_SUB(e[i], top));
#pragma unroll
    for (int i = 0; i < VALUE_EACH; i += 2)
        pair[i / 2] = bi_round(e[i]) | (uint32_t)bi_round(e[i + 1]) << 16;
    *(uint4 *)(weight + attn_swizzle(h, q, ATTN_P_BYTES)) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
#pragma unroll
    for (int i = 0; i < VALUE_EACH; i++)
        e[i] = BI_ADD(e[i], __shfl_xor_sync(0xffffffffu, e[i], 1));
#pragma unroll
    for (int half = VALUE_EACH / 2; half > 0; half >>= 1) {
#pragma unroll
        for (int i = 0; i < half; i++)
            e[i] = BI_ADD(e[i], e[i + half]);
    }
    e[0] = BI_ADD(e[0], __shfl_xor_sync(0xffffffffu, e[0], 4));
    e[0] = BI_ADD(e[0], __shfl_xor_sync(0xffffffffu, e[0], 2));
    stat.y = first ? e[0] : BI_FMA(stat.y, f, e[0]);
    stat.x = top;
    if (q == 0)
        scale[h] = f;
}

/* acc (16 heads, 32 columns) continues through one block of n entries. */
static __device__ __forceinline__ void value_block(float acc[4][4], const unsigned char *v, const unsigned char *weight, int n, int wm, int wn,
                                                   int lane) {
    for (int k = 0; k < n; k += BI_MMA_K) {
        uint32_t a[4], b[2][4];
        attn_load_matrix(a, weight + attn_swizzle(wm * 16 + (lane & 15), k / 8 + (lane >> 4), ATTN_P_BYTES));
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
            attn_load_matrix_trans(b[pair], v + attn_swizzle(k + (lane & 15), wn * 4 + pair * 2 + (lane >> 4), VALUE_ROW_BYTES));
#pragma unroll
        for (int j = 0; j < 4; j++)
            bi_cuda_mma16(acc[j], a, b[j / 2] + j % 2 * 2);
    }
}

/* Two neighbouring columns of z; the second may lie past the end. */
static __device__ __forceinline__ void value_store(bi_bf16 *z, int32_t col, int32_t d, float x, float y) {
    if (col + 1 < d && d % 2 == 0)
        *(uint32_t *)(z + col) = bi_round(x) | (uint32_t)bi_round(y) << 16;
    else if (col < d) {
        z[col] = bi_round(x);
        if (col + 1 < d)
            z[col + 1] = bi_round(y);
    }
}

/* z where the row has this part alone; else acc. scale: 1 / l of the heads. */
static __device__ __forceinline__ void value_out(const attn_rows &r, const float acc[4][4], const float *scale, int32_t t, int32_t part, int several,
                                                 int32_t head0, int32_t col0, int lane, int wm) {
    for (int i = 0; i < 8; i++) {
        const int h = wm * 16 + i / 4 * 8 + (lane >> 2), j = i % 4;
        const int32_t col = col0 + j * 8 + (lane & 3) * 2, d = r.d_kv_latent;
        const float x = i / 4 ? acc[j][2] : acc[j][0], y = i / 4 ? acc[j][3] : acc[j][1];
        if (head0 + h >= r.n_head)
            continue;
        if (!several) {
            value_store(r.z + ((int64_t)(r.row0 + t) * r.n_head + head0 + h) * d, col, d, BI_MUL(x, scale[h]), BI_MUL(y, scale[h]));
            continue;
        }
        float *to = r.acc + (((int64_t)t * r.n_part_max + part) * r.n_head + head0 + h) * d + col;
        if (col < d)
            to[0] = x;
        if (col + 1 < d)
            to[1] = y;
    }
}

static __global__ void __launch_bounds__(ATTN_THREADS, 2) attn_value(const attn_rows r, const int32_t n_column) {
    bi_cuda_begin();
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    unsigned char *weight = attn_shared_bytes + VALUE_STAGES * VALUE_STAGE_BYTES;
    float *scale = (float *)(weight + ATTN_HEADS * ATTN_P_BYTES);
    const int32_t n_group = r.n_head_pad / ATTN_HEADS, unit = (int32_t)blockIdx.x, head0 = unit % n_group * ATTN_HEADS;
    const int32_t col0 = unit / n_group % n_column * VALUE_COLUMNS, at = unit / n_group / n_column, t = at / r.n_part, row = r.row0 + t;
    const int32_t part = r.part0 + at % r.n_part;
    const int tid = (int)threadIdx.x, lane = tid % 32, wm = tid / 32 % 2, wn = tid / 64;
    const attn_part p = attn_part_of(r, row, part);
    if (!p.n)
        return;
    const float *score = r.score + ((int64_t)at * ATTN_BLOCKS * r.n_head_pad + head0) * BI_ATT_BLOCK;
    const int32_t n_block = (p.n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK;
    value_feed feed = {0, n_block, {-1, -1, -1, -1}};
    float2 stat = make_float2(0.0f, 0.0f);
    float acc[4][4];
    feed.fetch(r, row, p);
    for (int s = 0; s < VALUE_STAGES - 1; s++)
        feed.step(r, row, p, col0 / ATTN_UNIT, score, attn_shared_bytes + s * VALUE_STAGE_BYTES);
    for (int32_t block = 0; block < n_block; block++) {
        const unsigned char *stage = attn_shared_bytes + block % VALUE_STAGES * VALUE_STAGE_BYTES;
        const int32_t left = p.n - block * BI_ATT_BLOCK, n = left < BI_ATT_BLOCK ? left : BI_ATT_BLOCK;
        attn_copy_wait<VALUE_STAGES - 2>();
        __syncthreads();
        feed.step(r, row, p, col0 / ATTN_UNIT, score, attn_shared_bytes + (block + VALUE_STAGES - 1) % VALUE_STAGES * VALUE_STAGE_BYTES);
        value_weigh(stage + VALUE_K_BYTES, n, block == 0, stat, weight, scale);
        __syncthreads();
        const float low = scale[wm * 16 + (lane >> 2)], high = scale[wm * 16 + 8 + (lane >> 2)];
#pragma unroll
        for (int i = 0; i < 16; i++)
            acc[i / 4][i % 4] = block ? BI_MUL(acc[i / 4][i % 4], i % 4 / 2 ? high : low) : 0.0f;
        value_block(acc, stage, weight, n, wm, wn, lane);
    }
    __syncthreads();
    if (tid % VALUE_EACH == 0)
        scale[tid / VALUE_EACH] = BI_DIV(1.0f, stat.y);
    if (tid % VALUE_EACH == 0 && col0 == 0 && p.several && head0 + tid / VALUE_EACH < r.n_head)
        r.stat[((int64_t)t * r.n_part_max + part) * r.n_head + head0 + tid / VALUE_EACH] = stat;
    __syncthreads();
    value_out(r, acc, scale, t, part, p.several, head0, col0 + wn * 32, lane, wm);
}

/* Rows of several parts. */
static __global__ void __launch_bounds__(MERGE_THREADS) attn_merge(const attn_rows r) {
    bi_cuda_begin();
    const int32_t t = (int32_t)blockIdx.x / r.n_head, h = (int32_t)blockIdx.x % r.n_head, row = r.row0 + t, d = r.d_kv_latent;
    if (!attn_part_of(r, row, 0).several)
        return;
    const float2 *stat = r.stat + (int64_t)t * r.n_part_max * r.n_head + h;
    for (int32_t col = (int32_t)threadIdx.x; col < d; col += MERGE_THREADS) {
        const float *acc = r.acc + ((int64_t)t * r.n_part_max * r.n_head + h) * d + col;
        float top = stat[0].x, sum = stat[0].y, out = acc[0];
        for (int32_t part = 1; attn_part_of(r, row, part).n; part++) {
            const float2 own = stat[(int64_t)part * r.n_head];
            const float now = attn_larger(top, own.x), f = bi_exp(BI_SUB(top, now)), w = bi_exp(BI_SUB(own.x, now));
            sum = BI_FMA(own.y, w, BI_MUL(sum, f));
            out = BI_FMA(acc[(int64_t)part * r.n_head * d], w, BI_MUL(out, f));
            top = now;
        }
        r.z[((int64_t)row * r.n_head + h) * d + col] = bi_round(BI_MUL(out, BI_DIV(1.0f, sum)));
    }
}

#endif
#endif
