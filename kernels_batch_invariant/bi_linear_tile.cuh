/* bi_linear_tile: the own kernel of the dense products.      Contract: N-CHAIN, N-LIN, N-LORA
 *
 * y[t,h] = chain([x[t,h] | T], [W_h | B_h]) and T = R(RN(s * chain(x[t,h], A_h))), by mma.sync m16n8k16 with weights on the M side
 * and rows of x, here called tokens, on the N side. One accumulator an output runs over k in rising blocks of 16; nothing is split.
 * Grid: one block a tile of `rows` outputs x `tokens` tokens of a head; first the tiles of T (a slot's A takes the place of W),
 * then those of y. Where both are in one launch the tiles of y run their base chain first and then wait for all of T: blocks
 * start in the order of their numbers, so what they wait for is running or done.
 * Block: WM x WN warps, a warp 16*MT outputs x 8*NT tokens. Shared memory: a ring of STAGES stages, each KS columns of the
 * weights and of x, filled by cp.async; columns past n_in, tokens past n_row and outputs past n_out are zeros there. Chunks of
 * 16 bytes are stored at chunk ^ (row & 7), so that ldmatrix meets no bank twice.
 * A token of another slot than the one whose B is taken keeps its accumulator by a select, not by a zero T: B may hold Inf. */
#ifndef BI_LINEAR_TILE_CUH
#define BI_LINEAR_TILE_CUH

#include "bi_linear_parts.cuh"

template <int WM_, int WN_, int MT_, int NT_, int KS_, int STAGES_, bool ALIGNED_> struct dense_shape {
    static constexpr int WM = WM_, WN = WN_, MT = MT_, NT = NT_, KS = KS_, STAGES = STAGES_;
    static constexpr bool ALIGNED = ALIGNED_; /* whether rows of x may be read 16 bytes at a time */
    static constexpr int ROWS = WM * MT * 16, TOKENS = WN * NT * 8, THREADS = WM * WN * 32;
    static constexpr int CHUNKS = KS / 8, ROW_BYTES = KS * 2, STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
    static_assert(KS % 64 == 0 && STAGES >= 2 && (NT == 1 || NT % 2 == 0), "a stage is whole swizzles, tokens load in pairs of tiles");
};

/* What one block works on. */
typedef struct dense_tile {
    const bi_bf16 *w;
    int32_t w_ld, n_out; /* outputs of this matrix: the rank for a tile of T */
    int32_t head, row, token, slot; /* slot: index into job.slot for a tile of T, -1 for one of y */
} dense_tile;

static __device__ __forceinline__ uint32_t dense_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void dense_copy_w(uint32_t dst, const void *src, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

/* x goes through the first-level cache: the blocks of one SM read the same rows at about the same time. */
static __device__ __forceinline__ void dense_copy_x(uint32_t dst, const void *src, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void dense_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

template <int N> static __device__ __forceinline__ void dense_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void dense_ldmatrix4(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

static __device__ __forceinline__ void dense_ldmatrix2(uint32_t r[2], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
}

template <class S> static __device__ __forceinline__ uint32_t dense_chunk(int row, int chunk) {
    return (uint32_t)(row * S::ROW_BYTES + ((chunk ^ (row & 7)) << 4));
}

static __device__ __forceinline__ uint32_t dense_pair(const bi_bf16 *p) {
    return __ldcg((const unsigned int *)p);
}

/* The tile of block b, tiles of T first. */
template <class S> static __device__ __forceinline__ dense_tile dense_tile_of(const dense_job &job, int32_t b) {
    dense_tile tile;
    const int32_t n_t = job.n_head * job.n_slot * job.t_tiles * job.token_tiles;
    const bool is_t = b < n_t;
    const int32_t tiles = is_t ? job.t_tiles : job.w_tiles;
    int32_t left = is_t ? b : b - n_t;
    tile.token = left % job.token_tiles * S::TOKENS;
    left /= job.token_tiles;
    tile.row = left % tiles * S::ROWS;
    left /= tiles;
    tile.slot = is_t ? left % job.n_slot : -1;
    tile.head = is_t ? left / job.n_slot : left;
    if (is_t) {
        const dense_slot &slot = job.slot[tile.slot];
        tile.w = slot.a + slot.a_stride * tile.head;
        tile.w_ld = slot.a_ld;
        tile.n_out = slot.rank;
    } else {
        tile.w = job.w + job.w_stride * tile.head;
        tile.w_ld = job.w_ld;
        tile.n_out = job.n_out;
    }
    return tile;
}

/* Columns k .. k + KS - 1 of the tile's weights. */
template <class S> static __device__ __forceinline__ void dense_load_w(const dense_tile &tile, uint32_t stage, int32_t k) {
#pragma unroll
    for (int i = 0; i < (S::ROWS * S::CHUNKS + S::THREADS - 1) / S::THREADS; i++) {
        const int c = (int)threadIdx.x + i * S::THREADS, row = c / S::CHUNKS, chunk = c % S::CHUNKS;
        if (S::ROWS * S::CHUNKS % S::THREADS && c >= S::ROWS * S::CHUNKS)
            break;
        const bool there = tile.row + row < tile.n_out && k + chunk * 8 < tile.w_ld;
        const bi_bf16 *from = there ? tile.w + (int64_t)(tile.row + row) * tile.w_ld + k + chunk * 8 : tile.w;
        dense_copy_w(stage + dense_chunk<S>(row, chunk), from, there ? 16 : 0);
    }
}

/* Eight elements of x where 16-byte alignment does not hold. */
static __device__ __forceinline__ uint4 dense_gather(const bi_bf16 *x, int32_t n) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t low = 2 * i < n ? x[2 * i] : 0, high = 2 * i + 1 < n ? x[2 * i + 1] : 0;
        pair[i] = low | high << 16;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

template <class S>
static __device__ __forceinline__ void dense_load_x(const dense_job &job, const dense_tile &tile, unsigned char *stage, int32_t k) {
#pragma unroll
    for (int i = 0; i < (S::TOKENS * S::CHUNKS + S::THREADS - 1) / S::THREADS; i++) {
        const int c = (int)threadIdx.x + i * S::THREADS, row = c / S::CHUNKS, chunk = c % S::CHUNKS;
        if (S::TOKENS * S::CHUNKS % S::THREADS && c >= S::TOKENS * S::CHUNKS)
            break;
        const int32_t token = tile.token + row, left = token < job.n_row ? job.n_in - k - chunk * 8 : 0;
        const bi_bf16 *from = job.x + (left > 0 ? token * job.x_ld + tile.head * job.x_head_ld + k + chunk * 8 : 0);
        unsigned char *to = stage + dense_chunk<S>(row, chunk);
        if (S::ALIGNED)
            dense_copy_x(dense_shared(to), from, left <= 0 ? 0 : left >= 8 ? 16 : left * 2);
        else
            *(uint4 *)to = dense_gather(from, left);
    }
}

template <class S> struct dense_fragments {
    uint32_t w[S::MT][4], x[S::NT][2];
};

/* Block kb of a stage, as mma.sync.m16n8k16 wants it. */
template <class S>
static __device__ __forceinline__ void dense_take(dense_fragments<S> &f, uint32_t w, uint32_t x, int kb) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int row = warp % S::WM * S::MT * 16 + (lane & 15), token = warp / S::WM * S::NT * 8;
#pragma unroll
    for (int m = 0; m < S::MT; m++)
        dense_ldmatrix4(f.w[m], w + dense_chunk<S>(row + m * 16, 2 * kb + (lane >> 4)));
    if constexpr (S::NT == 1) {
        dense_ldmatrix2(f.x[0], x + dense_chunk<S>(token + (lane & 7), 2 * kb + (lane >> 3 & 1)));
    } else {
#pragma unroll
        for (int n = 0; n < S::NT; n += 2) {
            uint32_t two[4];
            dense_ldmatrix4(two, x + dense_chunk<S>(token + n * 8 + (lane & 7) + (lane >> 4) * 8, 2 * kb + (lane >> 3 & 1)));
            f.x[n][0] = two[0];
            f.x[n][1] = two[1];
            f.x[n + 1][0] = two[2];
            f.x[n + 1][1] = two[3];
        }
    }
}

template <class S>
static __device__ __forceinline__ void dense_stage(float (&acc)[S::MT][S::NT][4], uint32_t w, uint32_t x) {
    dense_fragments<S> f[2];
    dense_take<S>(f[0], w, x, 0);
#pragma unroll
    for (int kb = 0; kb < S::KS / BI_MMA_K; kb++) {
        if (kb + 1 < S::KS / BI_MMA_K)
            dense_take<S>(f[(kb + 1) & 1], w, x, kb + 1);
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int n = 0; n < S::NT; n++)
                bi_cuda_mma16(acc[m][n], f[kb & 1].w[m], f[kb & 1].x[n]);
    }
}

/* The chains over all of K. */
template <class S>
static __device__ __forceinline__ void dense_chain(const dense_job &job, const dense_tile &tile, unsigned char *ring,
                                                   float (&acc)[S::MT][S::NT][4]) {
    const int32_t n_step = (job.n_in + S::KS - 1) / S::KS;
    const uint32_t base = dense_shared(ring);
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
        if (s < n_step) {
            dense_load_w<S>(tile, base + s * S::STAGE_BYTES, s * S::KS);
            dense_load_x<S>(job, tile, ring + s * S::STAGE_BYTES + S::ROWS * S::ROW_BYTES, s * S::KS);
        }
        dense_commit();
    }
    int use = 0, fill = S::STAGES - 1; /* stages of the ring */
    for (int32_t step = 0; step < n_step; step++) {
        dense_wait<S::STAGES - 2>();
        __syncthreads(); /* stage `use` is there for all, and all are done with stage `fill` */
        const int32_t next = step + S::STAGES - 1;
        if (next < n_step) {
            dense_load_w<S>(tile, base + fill * S::STAGE_BYTES, next * S::KS);
            dense_load_x<S>(job, tile, ring + fill * S::STAGE_BYTES + S::ROWS * S::ROW_BYTES, next * S::KS);
        }
        dense_commit();
        const uint32_t at = base + use * S::STAGE_BYTES;
        dense_stage<S>(acc, at, at + S::ROWS * S::ROW_BYTES);
        use = use + 1 == S::STAGES ? 0 : use + 1;
        fill = fill + 1 == S::STAGES ? 0 : fill + 1;
    }
}

/* Where element e of fragment (m, n) of this thread belongs. */
template <class S> static __device__ __forceinline__ int32_t dense_out_of(const dense_tile &tile, int m, int e) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    return tile.row + (warp % S::WM * S::MT + m) * 16 + (lane >> 2) + (e >> 1) * 8;
}
template <class S> static __device__ __forceinline__ int32_t dense_token_of(const dense_tile &tile, int n, int e) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    return tile.token + (warp / S::WM * S::NT + n) * 8 + (lane & 3) * 2 + (e & 1);
}

static __device__ __forceinline__ int32_t dense_slot_of(const dense_job &job, int32_t token) {
    return token < job.n_row ? job.row_slot[token] : -1;
}

/* T of the tokens that have the tile's slot, zeros from the rank up to whole k-blocks. */
template <class S>
static __device__ __forceinline__ void dense_store_t(const dense_job &job, const dense_tile &tile, const float (&acc)[S::MT][S::NT][4]) {
    const dense_slot &slot = job.slot[tile.slot];
    const float s = slot.s[tile.head];
#pragma unroll
    for (int n = 0; n < S::NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int32_t token = dense_token_of<S>(tile, n, e);
            if (dense_slot_of(job, token) != slot.slot)
                continue;
            bi_bf16 *t = job.t + tile.head * job.t_head_ld + (int64_t)token * job.t_ld;
#pragma unroll
            for (int m = 0; m < S::MT; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int32_t r = dense_out_of<S>(tile, m, half * 2);
                    const bi_bf16 v = r < slot.rank ? bi_round(BI_MUL(s, acc[m][n][half * 2 + e])) : (bi_bf16)0;
                    if (r < slot.b_ld)
                        t[r] = v;
                    bi_cuda_fault(job.fault, token, bi_widen(v));
                }
        }
}

/* Continues the chains of the tokens that have slot i of the job through its B. */
template <class S>
static __device__ __forceinline__ void dense_continue(const dense_job &job, const dense_tile &tile, const dense_slot &slot,
                                                      float (&acc)[S::MT][S::NT][4]) {
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    int mine = 0; /* bits 2 n + e */
#pragma unroll
    for (int n = 0; n < S::NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            mine |= (dense_slot_of(job, dense_token_of<S>(tile, n, e)) == slot.slot) << (2 * n + e);
    if (!__any_sync(0xffffffffu, mine))
        return;
    const bi_bf16 *b = slot.b + slot.b_stride * tile.head;
    for (int32_t k = 0; k < slot.b_ld; k += BI_MMA_K) {
        uint32_t w[S::MT][4];
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t out = dense_out_of<S>(tile, m, (i & 1) * 2);
                w[m][i] = out < job.n_out ? dense_pair(b + (int64_t)out * slot.b_ld + k + 2 * q + (i >> 1) * 8) : 0;
            }
#pragma unroll
        for (int n = 0; n < S::NT; n++) {
            const int32_t token = dense_token_of<S>(tile, n, 0) - 2 * q + (lane >> 2); /* column lane / 4 of the operand */
            const bi_bf16 *t = job.t + tile.head * job.t_head_ld + (int64_t)token * job.t_ld + k + 2 * q;
            const bool there = dense_slot_of(job, token) == slot.slot;
            const uint32_t x[2] = {there ? dense_pair(t) : 0, there ? dense_pair(t + 8) : 0};
#pragma unroll
            for (int m = 0; m < S::MT; m++) {
                float next[4] = {acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]};
                bi_cuda_mma16(next, w[m], x);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[m][n][e] = mine >> (2 * n + (e & 1)) & 1 ? next[e] : acc[m][n][e];
            }
        }
    }
}

/* Tells the tiles of y that this tile of T is written. */
static __device__ __forceinline__ void dense_arrive(const dense_job &job) {
    if (!job.arrived)
        return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        atomicAdd(&job.arrived[0], 1u);
}

/* Waits for all of T; the last block that has waited puts the counters back. */
static __device__ __forceinline__ void dense_await(const dense_job &job) {
    if (!job.arrived)
        return;
    if (threadIdx.x == 0) {
        const uint32_t n_t = (uint32_t)(job.n_head * job.n_slot * job.t_tiles * job.token_tiles);
        const uint32_t n_y = (uint32_t)(job.n_head * job.w_tiles * job.token_tiles);
        while (*(volatile uint32_t *)&job.arrived[0] < n_t)
            __nanosleep(64);
        __threadfence();
        if (atomicAdd(&job.arrived[1], 1u) == n_y - 1) {
            atomicExch(&job.arrived[0], 0u);
            atomicExch(&job.arrived[1], 0u);
        }
    }
    __syncthreads();
}

template <class S>
static __device__ __forceinline__ void dense_store_y(const dense_job &job, const dense_tile &tile, const float (&acc)[S::MT][S::NT][4]) {
#pragma unroll
    for (int n = 0; n < S::NT; n++)
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t token = dense_token_of<S>(tile, n, e), out = dense_out_of<S>(tile, m, e);
                if (token >= job.n_row || out >= job.n_out)
                    continue;
                const int64_t at = token * job.y_ld + tile.head * job.y_head_ld + out;
                if (job.y_f32)
                    ((float *)job.y)[at] = acc[m][n][e];
                else
                    ((bi_bf16 *)job.y)[at] = bi_round(acc[m][n][e]);
                if (job.check)
                    bi_cuda_fault(job.fault, token, acc[m][n][e]);
            }
}

/* Whether a token of the tile has the slot. */
template <class S> static __device__ __forceinline__ bool dense_wanted(const dense_job &job, const dense_tile &tile) {
    int mine = 0;
    for (int i = (int)threadIdx.x; i < S::TOKENS; i += S::THREADS)
        mine |= dense_slot_of(job, tile.token + i) == job.slot[tile.slot].slot;
    return __syncthreads_or(mine) != 0;
}

template <class S> __global__ void __launch_bounds__(S::THREADS) dense_kernel(const __grid_constant__ dense_job job) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char dense_ring[];
    const dense_tile tile = dense_tile_of<S>(job, (int32_t)blockIdx.x);
    float acc[S::MT][S::NT][4];
#pragma unroll
    for (int m = 0; m < S::MT; m++)
#pragma unroll
        for (int n = 0; n < S::NT; n++)
            acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.0f;
    if (tile.slot >= 0) {
        if (tile.row < tile.n_out && dense_wanted<S>(job, tile)) {
            dense_chain<S>(job, tile, dense_ring, acc);
            dense_store_t<S>(job, tile, acc);
        }
        dense_arrive(job);
        return;
    }
    dense_chain<S>(job, tile, dense_ring, acc);
    if (job.n_slot) {
        dense_await(job);
        for (int32_t i = 0; i < job.n_slot; i++)
            dense_continue<S>(job, tile, job.slot[i], acc);
    }
    dense_store_y<S>(job, tile, acc);
}

#endif
