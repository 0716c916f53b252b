/* Gradients of attn and attn_gate on CUDA.      Contract: N-ATT without its roundings; formulas in bi_grad_attn_host.c
 *
 * The operands are first laid out for the tensor cores: [c | k_r], [q | q_r] and dz as bf16, rows padded with zeros to 32 columns, heads
 * to groups of 32. Queries go in chunks of 1,024, fixed by the limits. All score tiles are 64 latent rows x 32 heads, on 16 warps (4 of
 * rows, 4 of heads): s and dp of a tile, k rising; both kernels below use the same code, so they see the same p and dp.
 *
 * attn_rows: grid (query, group of heads, slab of columns). Q and dZ of the group stay in shared memory, latent rows pass in two stages.
 * First walk over the row's positions: each thread keeps max, sum of e and of e dp over the rows it sees, merged at the end (lanes,
 * then warps, in a fixed tree): max, 1 / L and delta go to scratch. Second walk: ds in bf16 through shared memory, dq += ds^T C.
 *
 * attn_latents: grid (64 latent rows, group of heads, slab). The latent tile stays, the queries of the chunk that read one of its rows pass
 * in rising order, found in a bitmap of (query, tile); dlatent += ds Q + p dZ in registers. After each chunk the sums are added to
 * those of the group in scratch, which one owner keeps; attn_sum adds the groups in rising order at the end.
 *
 * Shared memory at 512 + 64: 222 KiB and 224 KiB, one block of 512 threads an SM. Where two stages do not fit, one. */
#include "bi_grad_attn_parts.cuh"
#include "bi_grad_attn_check.h"

/* ---- layout ------------------------------------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(128) attn_pack_latent(const grad_attn g, const bi_bf16 *latent, int32_t latent_ld) {
    const int64_t row = blockIdx.x;
    for (int32_t k = (int32_t)threadIdx.x; k < g.ld; k += 128)
        g.latent[row * g.ld + k] = k < g.d + g.d_rope ? latent[row * latent_ld + k] : 0;
}

/* Grid (query, padded head). Padded queries and heads become zeros. */
static __global__ void __launch_bounds__(128) attn_pack_query(const grad_attn g, const bi_grad_attn_args a) {
    const int64_t t = g.row0 + (int64_t)blockIdx.x, h = blockIdx.y, to = (int64_t)blockIdx.x * gridDim.y + h, from = (t * g.n_head + h) * g.d;
    const int there = h < g.n_head && g.row_seg[t] >= 0;
    for (int32_t k = (int32_t)threadIdx.x; k < g.ld; k += 128) {
        bi_bf16 q = 0;
        if (there && k < g.d)
            q = a.q[from + k];
        else if (there && k < g.d + g.d_rope)
            q = a.q_r[t * a.q_r_ld + h * a.q_r_head_ld + k - g.d];
        g.q[to * g.ld + k] = q;
    }
    for (int32_t k = (int32_t)threadIdx.x; k < g.dz_ld; k += 128)
        g.dz[to * g.dz_ld + k] = there && k < g.d ? bi_round(a.dz[from + k]) : (bi_bf16)0;
}

/* A block a query: its bits of the bitmap. Shared memory: 8 bytes a tile. */
static __global__ void __launch_bounds__(256) attn_members(const grad_attn g) {
    extern __shared__ __align__(16) uint32_t member_words[];
    const grad_reach reach(g, g.row0 + (int32_t)blockIdx.x);
    for (int32_t i = (int32_t)threadIdx.x; i < 2 * g.n_tile; i += 256)
        member_words[i] = 0;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < reach.n; i += 256) {
        const int32_t row = reach.row(i);
        atomicOr(&member_words[row / 32], 1u << row % 32);
    }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < g.n_tile; i += 256)
        g.member[(int64_t)blockIdx.x * g.n_tile + i] = member_words[2 * i] | (unsigned long long)member_words[2 * i + 1] << 32;
}

/* ---- attn_rows --------------------------------------------------------------------------------------------------------- */

/* max, sum of e, sum of e dp over some positions. */
struct row_stat {
    float top, sum, dot;

    __device__ __forceinline__ void take(float s, float dp) {
        if (s > top) {
            const float f = expf(top - s);
            sum = sum * f + 1.0f;
            dot = dot * f + dp;
            top = s;
        } else {
            const float e = expf(s - top);
            sum += e;
            dot += e * dp;
        }
    }
    __device__ __forceinline__ void merge(const row_stat other) {
        if (other.sum == 0.0f)
            return;
        const float both = other.top > top ? other.top : top, f = sum == 0.0f ? 0.0f : expf(top - both), f_other = expf(other.top - both);
        sum = sum * f + other.sum * f_other;
        dot = dot * f + other.dot * f_other;
        top = both;
    }
};

struct rows_shared {
    bi_bf16 *q, *dz, *tile, *ds;
    row_stat *part; /* (4, HEADS) of the warps of rows */
    float4 *stat;   /* (HEADS) */
    size_t bytes;

    __host__ __device__ __forceinline__ rows_shared(unsigned char *base, int32_t ld, int32_t dz_ld, int n_stage) {
        q = (bi_bf16 *)base;
        dz = q + HEADS * (ld + ROW_GAP);
        tile = dz + HEADS * (dz_ld + ROW_GAP);
        ds = tile + n_stage * TILE_ROWS * (ld + ROW_GAP);
        stat = (float4 *)(ds + TILE_ROWS * P_LD);
        part = (row_stat *)(stat + HEADS);
        bytes = (size_t)((unsigned char *)(part + 4 * HEADS) - base);
    }
};

/* Positions 64 * tile .. of the row into a stage; zeros behind the last. */
static __device__ __forceinline__ void fetch_positions(const grad_attn &g, const grad_reach &reach, bi_bf16 *stage, int32_t tile) {
    for (int i = (int)threadIdx.x / 32; i < TILE_ROWS; i += WARPS) {
        const int32_t at = tile * TILE_ROWS + i, there = at < reach.n;
        copy_row(stage + i * (g.ld + ROW_GAP), g.latent + (int64_t)(there ? reach.row(at) : 0) * g.ld, g.ld, there);
    }
}

/* The threads' statistics of the group's heads, merged; to shared memory and to scratch. */
static __device__ __forceinline__ void merge_stats(row_stat own[2], const rows_shared &m, float4 *out) {
    const int lane = (int)threadIdx.x & 31, wm = (int)threadIdx.x >> 5 & 3, wn = (int)threadIdx.x >> 7;
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int h = 4; h < 32; h *= 2) {
            const row_stat other = {__shfl_xor_sync(0xffffffffu, own[c].top, h), __shfl_xor_sync(0xffffffffu, own[c].sum, h),
                                    __shfl_xor_sync(0xffffffffu, own[c].dot, h)};
            own[c].merge(other);
        }
        if (lane < 4)
            m.part[wm * HEADS + 8 * wn + 2 * lane + c] = own[c];
    }
    __syncthreads();
    if (threadIdx.x < HEADS) {
        row_stat all = m.part[threadIdx.x];
        for (int w = 1; w < 4; w++)
            all.merge(m.part[w * HEADS + threadIdx.x]);
        const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
        const float4 stat = make_float4(all.sum == 0.0f ? 0.0f : all.top, inverse, all.dot * inverse, 0.0f);
        m.stat[threadIdx.x] = stat;
        if (blockIdx.z == 0)
            out[threadIdx.x] = stat;
    }
    __syncthreads();
}

/* ds of n positions of a tile, to shared memory (64, 32): absent ones zero. */
static __device__ __forceinline__ void put_row_slopes(const grad_attn &g, const rows_shared &m, const float s[4], const float dp[4], int32_t n) {
    const int lane = (int)threadIdx.x & 31, wm = (int)threadIdx.x >> 5 & 3, wn = (int)threadIdx.x >> 7, head = 8 * wn + 2 * (lane & 3);
    const float4 low = m.stat[head], high = m.stat[head + 1];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = 16 * wm + 8 * r + (lane >> 2);
        const float x = back(s[2 * r], dp[2 * r], g.alpha, low.x, low.y, low.z).y;
        const float y = back(s[2 * r + 1], dp[2 * r + 1], g.alpha, high.x, high.y, high.z).y;
        store_pair(m.ds + i * P_LD + head, i < n ? x : 0.0f, i < n ? y : 0.0f);
    }
}

/* acc (16 heads, 8 * NT columns from `column` on) += ds^T C of a tile. */
template <int NT>
static __device__ __forceinline__ void add_tile(float acc[NT][4], const bi_bf16 *ds, const bi_bf16 *tile, int32_t ld, int32_t column) {
    const int lane = (int)threadIdx.x & 31, am = (int)threadIdx.x >> 5 & 1;
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k += 16) {
        uint32_t a[4], b[4];
        load_matrix_trans(a, ds + (k + (lane >> 4) * 8 + (lane & 7)) * P_LD + 16 * am + (lane >> 3 & 1) * 8);
        const bi_bf16 *b_at = tile + (k + (lane & 15)) * (ld + ROW_GAP) + column;
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            const int pair = j + 1 < NT; /* without one the second half repeats the first, unused */
            if (column + 8 * j >= ld)
                continue;
            load_matrix_trans(b, b_at + 8 * j + (pair ? (lane >> 4) * 8 : 0));
            bi_cuda_mma16(acc[j], a, b);
            if (pair)
                bi_cuda_mma16(acc[pair ? j + 1 : j], a, b + 2);
        }
    }
}

static __device__ __forceinline__ void store_dq(const grad_attn &g, int64_t t, int32_t head, int32_t column, float value) {
    if (head >= g.n_head)
        return;
    if (column < g.d) {
        if (g.dq)
            g.dq[(t * g.n_head + head) * g.d + column] = value;
    } else if (column < g.d + g.d_rope && g.dq_r) {
        g.dq_r[(t * g.n_head + head) * g.d_rope + column - g.d] = value;
    }
}

template <int NT> static __global__ void __launch_bounds__(THREADS) attn_rows(const grad_attn g) {
    extern __shared__ __align__(16) unsigned char attn_shared[];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, am = warp & 1, group = (int)blockIdx.y;
    const int32_t t = g.row0 + (int32_t)blockIdx.x, column = ((int32_t)blockIdx.z * 8 + (warp >> 1)) * 8 * NT;
    const int64_t query = ((int64_t)blockIdx.x * g.n_group + group) * HEADS;
    const grad_reach reach(g, t);
    const rows_shared m(attn_shared, g.ld, g.dz_ld, g.n_stage);
    const int32_t n_tile = (reach.n + TILE_ROWS - 1) / TILE_ROWS, n_step = g.dq || g.dq_r ? 2 * n_tile : n_tile, two = g.n_stage == 2;
    const int32_t stage_size = TILE_ROWS * (g.ld + ROW_GAP);
    row_stat own[2] = {{-bi_f32_of(BI_F32_INF), 0.0f, 0.0f}, {-bi_f32_of(BI_F32_INF), 0.0f, 0.0f}};
    float acc[NT][4] = {};
    copy_heads(m.q, g.q + query * g.ld, g.ld);
    copy_heads(m.dz, g.dz + query * g.dz_ld, g.dz_ld);
    if (n_step)
        fetch_positions(g, reach, m.tile, 0);
    copy_commit();
    for (int32_t step = 0; step < n_step; step++) {
        const int32_t tile = step < n_tile ? step : step - n_tile, n = reach.n - tile * TILE_ROWS;
        const bi_bf16 *stage = m.tile + (two ? step & 1 : 0) * stage_size;
        float s[4], dp[4];
        if (two && step + 1 < n_step)
            fetch_positions(g, reach, m.tile + (step + 1 & 1) * stage_size, (step + 1) % n_tile);
        copy_commit();
        copy_wait(two);
        __syncthreads();
        if (step == n_tile)
            merge_stats(own, m, g.stat + query);
        score_tile(s, dp, stage, m.q, m.dz, g.ld, g.dz_ld);
        if (step < n_tile) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (16 * (warp & 3) + 8 * (i >> 1) + (lane >> 2) < n)
                    own[i & 1].take(g.alpha * s[i], dp[i]);
        } else {
            put_row_slopes(g, m, s, dp, n);
            __syncthreads();
            add_tile<NT>(acc, m.ds, stage, g.ld, column);
        }
        __syncthreads();
        if (!two && step + 1 < n_step)
            fetch_positions(g, reach, m.tile, (step + 1) % n_tile);
    }
    if (n_step <= n_tile)
        merge_stats(own, m, g.stat + query);
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_dq(g, t, group * HEADS + 16 * am + 8 * (i >> 1) + (lane >> 2), column + 8 * j + 2 * (lane & 3) + (i & 1), acc[j][i]);
}

/* ---- attn_latents ------------------------------------------------------------------------------------------------------ */

struct latents_shared {
    bi_bf16 *tile, *p, *ds;
    unsigned char *stage; /* q, dz, stat of a query */
    uint16_t *list;       /* (CHUNK_ROWS) queries that read the tile */
    int32_t *count;       /* (WARPS) */
    int32_t dz_at, stat_at, stage_bytes;
    size_t bytes;

    __host__ __device__ __forceinline__ latents_shared(unsigned char *base, int32_t ld, int32_t dz_ld, int n_stage) {
        dz_at = HEADS * (ld + ROW_GAP) * (int32_t)sizeof(bi_bf16);
        stat_at = dz_at + HEADS * (dz_ld + ROW_GAP) * (int32_t)sizeof(bi_bf16);
        stage_bytes = stat_at + HEADS * (int32_t)sizeof(float4);
        tile = (bi_bf16 *)base;
        p = tile + TILE_ROWS * (ld + ROW_GAP);
        ds = p + TILE_ROWS * P_LD;
        stage = (unsigned char *)(ds + TILE_ROWS * P_LD);
        count = (int32_t *)(stage + n_stage * stage_bytes);
        list = (uint16_t *)(count + WARPS);
        bytes = (size_t)((unsigned char *)(list + CHUNK_ROWS) - base);
    }
};

/* The queries of the chunk that read a row of the tile, in rising order; returns how many. */
static __device__ __forceinline__ int32_t list_queries(const grad_attn &g, const latents_shared &m, int32_t tile) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int32_t n = 0;
    for (int32_t first = 0; first < g.n_query; first += THREADS) {
        const int32_t t = first + (int32_t)threadIdx.x;
        const int reads = t < g.n_query && g.member[(int64_t)t * g.n_tile + tile] != 0;
        const uint32_t all = __ballot_sync(0xffffffffu, reads);
        if (lane == 0)
            m.count[warp] = __popc(all);
        __syncthreads();
        int32_t at = n + __popc(all & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            at += w < warp ? m.count[w] : 0;
            n += m.count[w];
        }
        if (reads)
            m.list[at] = (uint16_t)t;
        __syncthreads();
    }
    return n;
}

static __device__ __forceinline__ void fetch_query(const grad_attn &g, const latents_shared &m, unsigned char *stage, int32_t t) {
    const int64_t query = ((int64_t)t * g.n_group + blockIdx.y) * HEADS;
    copy_heads((bi_bf16 *)stage, g.q + query * g.ld, g.ld);
    copy_heads((bi_bf16 *)(stage + m.dz_at), g.dz + query * g.dz_ld, g.dz_ld);
    if (threadIdx.x < HEADS)
        copy16(stage + m.stat_at + threadIdx.x * sizeof(float4), g.stat + query + threadIdx.x, 1);
}

/* p and ds of a tile to shared memory; members: bit i for latent row i. */
static __device__ __forceinline__ void put_slopes(const grad_attn &g, const latents_shared &m, const float4 *stat, const float s[4],
                                                  const float dp[4], unsigned long long members) {
    const int lane = (int)threadIdx.x & 31, wm = (int)threadIdx.x >> 5 & 3, wn = (int)threadIdx.x >> 7, head = 8 * wn + 2 * (lane & 3);
    const float4 low = stat[head], high = stat[head + 1];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = 16 * wm + 8 * r + (lane >> 2), reads = (int)(members >> i & 1);
        const float2 x = back(s[2 * r], dp[2 * r], g.alpha, low.x, low.y, low.z);
        const float2 y = back(s[2 * r + 1], dp[2 * r + 1], g.alpha, high.x, high.y, high.z);
        store_pair(m.p + i * P_LD + head, reads ? x.x : 0.0f, reads ? y.x : 0.0f);
        store_pair(m.ds + i * P_LD + head, reads ? x.y : 0.0f, reads ? y.y : 0.0f);
    }
}

/* acc (16 latent rows, 8 * NT columns) += ds Q + p dZ of a query; NT even. */
template <int NT>
static __device__ __forceinline__ void add_query(float acc[NT][4], const latents_shared &m, const bi_bf16 *q, const bi_bf16 *dz, int32_t ld,
                                                 int32_t dz_ld, int32_t column) {
    const int lane = (int)threadIdx.x & 31, wm = (int)threadIdx.x >> 5 & 3, half = (lane >> 4) * 8;
#pragma unroll 1
    for (int k = 0; k < HEADS; k += 16) {
        uint32_t ds[4], p[4], b[4];
        load_matrix(ds, m.ds + (16 * wm + (lane & 15)) * P_LD + k + half);
        load_matrix(p, m.p + (16 * wm + (lane & 15)) * P_LD + k + half);
        const bi_bf16 *q_at = q + (k + (lane & 15)) * (ld + ROW_GAP) + column + half;
        const bi_bf16 *dz_at = dz + (k + (lane & 15)) * (dz_ld + ROW_GAP) + column + half;
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            if (column + 8 * j >= ld)
                continue;
            load_matrix_trans(b, q_at + 8 * j);
            bi_cuda_mma16(acc[j], ds, b);
            bi_cuda_mma16(acc[j + 1], ds, b + 2);
            if (column + 8 * j >= dz_ld)
                continue;
            load_matrix_trans(b, dz_at + 8 * j);
            bi_cuda_mma16(acc[j], p, b);
            bi_cuda_mma16(acc[j + 1], p, b + 2);
        }
    }
}

template <int NT> static __global__ void __launch_bounds__(THREADS) attn_latents(const grad_attn g) {
    extern __shared__ __align__(16) unsigned char attn_shared[];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, wm = warp & 3;
    const int32_t tile = (int32_t)blockIdx.x, row0 = tile * TILE_ROWS, column = ((int32_t)blockIdx.z * 4 + (warp >> 2)) * 8 * NT;
    const latents_shared m(attn_shared, g.ld, g.dz_ld, g.n_stage);
    const int32_t n = list_queries(g, m, tile), two = g.n_stage == 2;
    float acc[NT][4] = {};
    if (n == 0)
        return;
    for (int i = warp; i < TILE_ROWS; i += WARPS) {
        const int there = row0 + i < g.n_row;
        copy_row(m.tile + i * (g.ld + ROW_GAP), g.latent + (int64_t)(there ? row0 + i : 0) * g.ld, g.ld, there);
    }
    fetch_query(g, m, m.stage, m.list[0]);
    copy_commit();
    for (int32_t i = 0; i < n; i++) {
        const unsigned char *stage = m.stage + (two ? i & 1 : 0) * m.stage_bytes;
        const bi_bf16 *q = (const bi_bf16 *)stage, *dz = (const bi_bf16 *)(stage + m.dz_at);
        const unsigned long long members = g.member[(int64_t)m.list[i] * g.n_tile + tile];
        float s[4], dp[4];
        if (two && i + 1 < n)
            fetch_query(g, m, m.stage + (i + 1 & 1) * m.stage_bytes, m.list[i + 1]);
        copy_commit();
        copy_wait(two);
        __syncthreads();
        score_tile(s, dp, m.tile, q, dz, g.ld, g.dz_ld);
        put_slopes(g, m, (const float4 *)(stage + m.stat_at), s, dp, members);
        __syncthreads();
        add_query<NT>(acc, m, q, dz, g.ld, g.dz_ld, column);
        __syncthreads();
        if (!two && i + 1 < n)
            fetch_query(g, m, m.stage, m.list[i + 1]);
    }
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t row = row0 + 16 * wm + 8 * (i >> 1) + (lane >> 2), at = column + 8 * j + 2 * (lane & 3) + (i & 1);
            if (row < g.n_row && at < g.ld)
                g.partial[((int64_t)blockIdx.y * g.n_row + row) * g.ld + at] += acc[j][i];
        }
}

static __global__ void __launch_bounds__(256) attn_sum(const grad_attn g) {
    const int64_t row = blockIdx.x;
    for (int32_t k = (int32_t)threadIdx.x; k < g.d + g.d_rope; k += 256) {
        float sum = 0.0f;
        for (int32_t i = 0; i < g.n_group; i++)
            sum += g.partial[((int64_t)i * g.n_row + row) * g.ld + k];
        g.dlatent[row * (g.d + g.d_rope) + k] = sum;
    }
}

/* ---- host -------------------------------------------------------------------------------------------------------------- */

static void carve(grad_attn *g, bi_carver *carver, int32_t n_row, int32_t n_head, int32_t d, int32_t d_rope) {
    g->n_row = n_row;
    g->n_head = n_head;
    g->d = d;
    g->d_rope = d_rope;
    g->n_group = (n_head + HEADS - 1) / HEADS;
    g->ld = padded(d + d_rope);
    g->dz_ld = padded(d);
    g->n_tile = (n_row + TILE_ROWS - 1) / TILE_ROWS;
    const size_t n_query = (size_t)(n_row < CHUNK_ROWS ? n_row : CHUNK_ROWS), n_place = n_query * (size_t)g->n_group * HEADS;
    g->latent = (bi_bf16 *)bi_carve(carver, sizeof(bi_bf16) * (size_t)n_row * (size_t)g->ld);
    g->q = (bi_bf16 *)bi_carve(carver, sizeof(bi_bf16) * n_place * (size_t)g->ld);
    g->dz = (bi_bf16 *)bi_carve(carver, sizeof(bi_bf16) * n_place * (size_t)g->dz_ld);
    g->stat = (float4 *)bi_carve(carver, sizeof(float4) * n_place);
    g->member = (unsigned long long *)bi_carve(carver, sizeof *g->member * n_query * (size_t)g->n_tile);
    g->partial = (float *)bi_carve(carver, sizeof(float) * (size_t)g->n_group * (size_t)n_row * (size_t)g->ld);
}

size_t bi_grad_attn_cuda_scratch(const bi_limits *limits) {
    grad_attn g = {};
    bi_carver carver = {NULL, 0, 0};
    carve(&g, &carver, limits->n_row, limits->n_head, limits->d_kv_latent, limits->d_rope);
    return carver.used;
}

/* Two stages where they fit, else one; 0: not even that. */
template <class Shared> static int stages_of(const grad_attn *g) {
    for (int n_stage = 2; n_stage > 0; n_stage--)
        if (Shared(NULL, g->ld, g->dz_ld, n_stage).bytes <= (size_t)SHARED_MAX)
            return n_stage;
    return 0;
}

template <int NT> static br_status launch_rows(cudaStream_t stream, grad_attn g) {
    const dim3 grid((unsigned)g.n_query, (unsigned)g.n_group, (unsigned)bi_ceil_div(g.ld, 64 * NT));
    g.n_stage = stages_of<rows_shared>(&g);
    const size_t bytes = rows_shared(NULL, g.ld, g.dz_ld, g.n_stage).bytes;
    cudaFuncSetAttribute(attn_rows<NT>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    attn_rows<NT><<<grid, THREADS, bytes, stream>>>(g);
    return bi_grad_launched("attn");
}

template <int NT> static br_status launch_latents(cudaStream_t stream, grad_attn g) {
    const dim3 grid((unsigned)bi_ceil_div(g.row0 + g.n_query, TILE_ROWS), (unsigned)g.n_group, (unsigned)bi_ceil_div(g.ld, 32 * NT));
    g.n_stage = stages_of<latents_shared>(&g);
    const size_t bytes = latents_shared(NULL, g.ld, g.dz_ld, g.n_stage).bytes;
    cudaFuncSetAttribute(attn_latents<NT>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    attn_latents<NT><<<grid, THREADS, bytes, stream>>>(g);
    return bi_grad_launched("attn");
}

/* The queries g->row0 .. of the chunk. */
static br_status chunk_back(cudaStream_t stream, const bi_grad_attn_args *a, const grad_attn *g) {
    attn_pack_query<<<dim3((unsigned)g->n_query, (unsigned)g->n_group * HEADS), 128, 0, stream>>>(*g, *a);
    BR_TRY(bi_grad_launched("attn"));
    BR_TRY(g->ld > 64 ? launch_rows<ROWS_WIDE>(stream, *g) : launch_rows<1>(stream, *g));
    if (!g->dlatent)
        return BR_OK;
    attn_members<<<(unsigned)g->n_query, 256, 8 * (size_t)g->n_tile, stream>>>(*g);
    BR_TRY(bi_grad_launched("attn"));
    return g->ld > 64 ? launch_latents<LATENTS_WIDE>(stream, *g) : launch_latents<2>(stream, *g);
}

br_status bi_grad_attn_cuda(bi_grad_ctx *ctx, const bi_grad_attn_args *a) {
    const int32_t n_row = a->batch->n_row;
    const cudaStream_t stream = ctx->cuda->stream;
    grad_attn g = {};
    BR_TRY(bi_grad_check_attn(&ctx->cuda->limits, a));
    bi_carver carver = bi_grad_cuda_carver(ctx);
    carve(&g, &carver, n_row, a->n_head, a->d_kv_latent, a->d_rope);
    if (!stages_of<rows_shared>(&g) || !stages_of<latents_shared>(&g) || g.n_tile > 48 << 7)
        return br_fail(BR_E_LIMIT, "gradient of attn: %d rows, latents of %d + %d: expected to fit shared memory", n_row, g.d, g.d_rope);
    if (n_row == 0 || (!a->dq && !a->dq_r && !a->dlatent))
        return BR_OK;
    g.seg = a->batch->seg, g.row_seg = a->batch->row_seg;
    g.select = a->select, g.n_select = a->n_select, g.select_ld = a->select_ld;
    g.alpha = a->alpha;
    g.dq = a->dq, g.dq_r = a->dq_r, g.dlatent = a->dlatent;
    attn_pack_latent<<<(unsigned)n_row, 128, 0, stream>>>(g, a->latent, a->latent_ld);
    BR_TRY(bi_grad_launched("attn"));
    const size_t partial_bytes = sizeof(float) * (size_t)g.n_group * (size_t)n_row * (size_t)g.ld;
    if (g.dlatent && cudaMemsetAsync(g.partial, 0, partial_bytes, stream) != cudaSuccess)
        return br_fail(BR_E_DEVICE, "gradient of attn: the GPU refused to clear %zu bytes", partial_bytes);
    for (g.row0 = 0; g.row0 < n_row; g.row0 += CHUNK_ROWS) {
        g.n_query = n_row - g.row0 < CHUNK_ROWS ? n_row - g.row0 : CHUNK_ROWS;
        BR_TRY(chunk_back(stream, a, &g));
    }
    if (!g.dlatent)
        return BR_OK;
    attn_sum<<<(unsigned)n_row, 256, 0, stream>>>(g);
    return bi_grad_launched("attn");
}

/* ---- attn_gate --------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(256) attn_gate_back(const bi_grad_attn_gate_args a, int64_t n) {
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 256) {
        const float dy = a.dy[i];
        if (!a.gate) {
            a.d_o[i] = dy;
            continue;
        }
        const float gate = bi_widen(a.gate[i]), e = expf(-fabsf(gate)), high = 1.0f / (1.0f + e);
        if (a.d_o)
            a.d_o[i] = dy * (gate < 0.0f ? e * high : high);
        if (a.dgate)
            a.dgate[i] = dy * a.o[i] * (e * high * high);
    }
}

br_status bi_grad_attn_gate_cuda(bi_grad_ctx *ctx, const bi_grad_attn_gate_args *a) {
    BR_TRY(bi_grad_check_attn_gate(a));
    const int64_t n = (int64_t)a->n_row * a->d, n_block = bi_ceil_div(n, 256), most = 16 * (int64_t)ctx->cuda->n_sm;
    if (n == 0 || (!a->d_o && (!a->gate || !a->dgate)))
        return BR_OK;
    attn_gate_back<<<(unsigned)(n_block < most ? n_block : most), 256, 0, ctx->cuda->stream>>>(*a, n);
    return bi_grad_launched("attn_gate");
}
