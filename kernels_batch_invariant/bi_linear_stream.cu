/* The dense products of few rows: weights pass once, at the rate of memory.      Contract: N-CHAIN, N-LIN, N-LORA
 *
 * y[t,h] = chain([x[t,h] | T], [W_h | B_h]) and T = R(RN(s * chain(x[t,h], A_h))) by wgmma m64nNk16 with rows of x, here called
 * tokens, on its M side and outputs on its N side, so that a tile may be any multiple of 8 outputs and the tiles fill the SMs
 * evenly. One accumulator an output runs over k in rising blocks of 16; nothing is split. What adapters add runs on
 * mma.sync m16n8k16, whose accumulators lie as wgmma's do.
 * Grid: at most as many blocks as run at once, block b takes tiles b, b + grid, ..: first the tiles of T (16 tokens; a slot's A
 * takes the place of W), then those of y (16 to 64 tokens). Tiles of y run their base chain first and then wait for all of T:
 * tiles of T come first and wait for nothing.
 * Block: a warpgroup that multiplies, and a warp whose first thread keeps a ring in shared memory filled by tensor copies: stages of
 * 64 columns of x and of the weights, up to 32 of them, 110 or 224 KiB. The stages of x lie before those of the weights and hold
 * only the tile's tokens; wgmma reads 64 rows and finds other numbers of the ring behind them, which end in accumulators that nobody
 * stores. */
#include "bi_linear_parts.cuh"
#include "bi_linear_wgmma.cuh"

#include <cuda.h>

enum {
    STREAM_K = 64,          /* columns of a stage */
    STREAM_ROW = 2 * STREAM_K,
    STREAM_BOX = 16,        /* tokens of a warp */
    STREAM_STAGES = 32,
    STREAM_THREADS = 160,
    STREAM_RING_TWO = 110 << 10, /* of two blocks an SM */
    STREAM_RING_ONE = 224 << 10
};

typedef struct stream_maps {
    CUtensorMap x, x_t, w, a[DENSE_SLOT_MAX]; /* x_t: boxes of STREAM_BOX tokens */
} stream_maps;

/* The launch. */
typedef struct stream_grid {
    int32_t boxes;               /* of STREAM_BOX tokens in a tile of y */
    int32_t t_tiles, n_t, n_y;   /* t_tiles: of a slot, a head and 16 tokens */
    int32_t stages, wide, once;  /* wide: y takes 16 bytes at a time; once: no tile shares its weights with another */
} stream_grid;

typedef struct stream_args {
    stream_maps maps;
    dense_job job;
    stream_grid grid;
} stream_args;

/* What one tile is. */
typedef struct stream_tile {
    int32_t head, token, out, slot; /* slot: index into job.slot for a tile of T, -1 for one of y */
} stream_tile;

static __device__ __forceinline__ int32_t slot_of(const dense_job &job, int32_t token) {
    return token < job.n_row ? job.row_slot[token] : -1;
}

static __device__ __forceinline__ stream_tile tile_of(const stream_args &a, int32_t b, int32_t n_out) {
    stream_tile tile;
    if (b < a.grid.n_t) {
        const int32_t token_tiles = (a.job.n_row + STREAM_BOX - 1) / STREAM_BOX;
        tile.token = b % token_tiles * STREAM_BOX;
        b /= token_tiles;
        tile.out = b % a.grid.t_tiles * n_out;
        b /= a.grid.t_tiles;
        tile.slot = b % a.job.n_slot;
        tile.head = b / a.job.n_slot;
        return tile;
    }
    b -= a.grid.n_t;
    tile.token = b % a.job.token_tiles * a.grid.boxes * STREAM_BOX;
    b /= a.job.token_tiles;
    tile.out = b % a.job.w_tiles * n_out;
    tile.head = b / a.job.w_tiles;
    tile.slot = -1;
    return tile;
}

/* Whether a tile of T has any work: the producer and the others must agree. */
static __device__ __forceinline__ bool wanted(const dense_job &job, const stream_tile &tile) {
    bool any = false;
    for (int32_t i = 0; i < STREAM_BOX; i++)
        any |= slot_of(job, tile.token + i) == job.slot[tile.slot].slot;
    return any && tile.out < job.slot[tile.slot].rank;
}

/* The ring as one thread or warp goes round it. */
typedef struct stream_ring {
    uint32_t x, w, full, empty; /* shared-memory addresses; barrier i is 8 i behind */
    int32_t x_bytes, w_bytes, stages;
    int32_t at;
    uint32_t phase;
} stream_ring;

static __device__ __forceinline__ void step_on(stream_ring &ring) {
    if (++ring.at == ring.stages) {
        ring.at = 0;
        ring.phase ^= 1;
    }
}

static __device__ void produce(const stream_args &a, stream_ring ring, int32_t n_out) {
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, n_out);
        if (tile.slot >= 0 && !wanted(a.job, tile))
            continue;
        const CUtensorMap *x = tile.slot >= 0 ? &a.maps.x_t : &a.maps.x, *w = tile.slot >= 0 ? &a.maps.a[tile.slot] : &a.maps.w;
        const int32_t bytes = (tile.slot >= 0 ? STREAM_BOX * STREAM_ROW : ring.x_bytes) + ring.w_bytes;
        const bool once = tile.slot < 0 && a.grid.once;
        for (int32_t k = 0; k < a.job.n_in; k += STREAM_K) {
            const uint32_t full = ring.full + 8 * (uint32_t)ring.at;
            stream_wait(ring.empty + 8 * (uint32_t)ring.at, ring.phase ^ 1);
            stream_expect(full, bytes);
            if (once)
                stream_copy_once(ring.w + (uint32_t)(ring.at * ring.w_bytes), w, k, tile.out, tile.head, full);
            else
                stream_copy(ring.w + (uint32_t)(ring.at * ring.w_bytes), w, k, tile.out, tile.head, full);
            stream_copy(ring.x + (uint32_t)(ring.at * ring.x_bytes), x, k, tile.token, tile.head, full);
            step_on(ring);
        }
    }
}

/* The chains over all of K, one stage in the tensor cores while the next is awaited. */
template <int N8, int PARTS>
static __device__ __forceinline__ void chain(stream_ring &ring, int32_t n_step, float (&acc)[N8 * PARTS][4]) {
    uint32_t before = 0;
#pragma unroll
    for (int n = 0; n < N8 * PARTS; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (int32_t step = 0; step < n_step; step++) {
        stream_wait(ring.full + 8 * (uint32_t)ring.at, ring.phase);
        const uint64_t x = wgmma_tile(ring.x + (uint32_t)(ring.at * ring.x_bytes));
        const uint64_t w = wgmma_tile(ring.w + (uint32_t)(ring.at * ring.w_bytes));
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < STREAM_K / BI_MMA_K; k++)
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                wgmma<N8>(acc + p * N8, x + 2 * k, w + 2 * k + p * (N8 * WGMMA_ATOM >> 4));
        wgmma_commit();
        if (step) {
            wgmma_wait<1>();
            if ((threadIdx.x & 31) == 0)
                stream_arrive(before);
        }
        before = ring.empty + 8 * (uint32_t)ring.at;
        step_on(ring);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < N8 * PARTS; n++) /* no use of them before */
        asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
    if ((threadIdx.x & 31) == 0)
        stream_arrive(before);
}

/* T of the tokens that have the tile's slot, zeros from the rank up to whole k-blocks. */
template <int NT>
static __device__ __forceinline__ void store_t(const dense_job &job, const stream_tile &tile, const float (&acc)[NT][4]) {
    const dense_slot &slot = job.slot[tile.slot];
    const int lane = (int)threadIdx.x & 31;
    const float s = slot.s[tile.head];
    if (threadIdx.x >= 32)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t token = tile.token + (lane >> 2) + half * 8;
        if (slot_of(job, token) != slot.slot)
            continue;
        bi_bf16 *t = job.t + ((int64_t)tile.head * job.n_row + token) * job.t_ld;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t r = tile.out + n * 8 + (lane & 3) * 2 + e;
                const bi_bf16 v = r < slot.rank ? bi_round(BI_MUL(s, acc[n][half * 2 + e])) : (bi_bf16)0;
                if (r < slot.b_ld)
                    t[r] = v;
                bi_cuda_fault(job.fault, token, bi_widen(v));
            }
    }
}

static __device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, 128;\n" ::: "memory");
}

/* Tells the tiles of y that this tile of T is written. */
static __device__ __forceinline__ void arrive(const dense_job &job) {
    __threadfence();
    meet();
    if (threadIdx.x == 0)
        atomicAdd(&job.arrived[0], 1u);
}

/* Waits for all of T; the last tile of y that has waited puts the counters back. */
static __device__ __forceinline__ void await(const stream_args &a) {
    if (threadIdx.x == 0) {
        while (*(volatile uint32_t *)&a.job.arrived[0] < (uint32_t)a.grid.n_t)
            __nanosleep(64);
        __threadfence();
        if (atomicAdd(&a.job.arrived[1], 1u) == (uint32_t)a.grid.n_y - 1) {
            atomicExch(&a.job.arrived[0], 0u);
            atomicExch(&a.job.arrived[1], 0u);
        }
    }
    meet();
}

static __device__ __forceinline__ uint32_t pair_of(const bi_bf16 *p) {
    return __ldcg((const unsigned int *)p);
}

/* Continues the chains of this warp's tokens that have the slot through its B; the others' keep theirs by a select, not by a zero T:
 * B may hold Inf. */
template <int NT>
static __device__ __forceinline__ void continue_slot(const dense_job &job, const stream_tile &tile, const dense_slot &slot, float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    const int32_t token = tile.token + (int32_t)(threadIdx.x >> 5) * STREAM_BOX + (lane >> 2);
    const bool mine[2] = {slot_of(job, token) == slot.slot, slot_of(job, token + 8) == slot.slot};
    if (!__any_sync(0xffffffffu, mine[0] || mine[1]))
        return;
    const bi_bf16 *b = slot.b + slot.b_stride * tile.head, *t = job.t + ((int64_t)tile.head * job.n_row + token) * job.t_ld + 2 * q;
    for (int32_t k = 0; k < slot.b_ld; k += BI_MMA_K) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = mine[i & 1] ? pair_of(t + (i & 1) * 8 * (int64_t)job.t_ld + k + (i >> 1) * 8) : 0;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int32_t out = tile.out + n * 8 + (lane >> 2);
            const bi_bf16 *at = b + (int64_t)out * slot.b_ld + k + 2 * q;
            const uint32_t w[2] = {out < job.n_out ? pair_of(at) : 0, out < job.n_out ? pair_of(at + 8) : 0};
            float next[4] = {acc[n][0], acc[n][1], acc[n][2], acc[n][3]};
            bi_cuda_mma16(next, x, w);
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[n][e] = mine[e >> 1] ? next[e] : acc[n][e];
        }
    }
}

/* Four neighbouring words of four lanes, turned: lane q of each four gets word q of all. */
static __device__ __forceinline__ uint4 turn4(const uint32_t w[4], int q) {
    const bool odd = q & 1, high = q & 2;
    const uint32_t got0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1), got1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
    const uint32_t r0 = odd ? got0 : w[0], r1 = odd ? w[1] : got0, r2 = odd ? got1 : w[2], r3 = odd ? w[3] : got1;
    const uint32_t far0 = __shfl_xor_sync(0xffffffffu, high ? r0 : r2, 2), far1 = __shfl_xor_sync(0xffffffffu, high ? r1 : r3, 2);
    return high ? make_uint4(far0, far1, r2, r3) : make_uint4(r0, r1, far0, far1);
}

/* Outputs out and out + 1 of a token. */
static __device__ __forceinline__ void store_pair(const dense_job &job, int64_t at, int32_t out, float v0, float v1, int wide) {
    if (wide && out + 1 < job.n_out) {
        if (job.y_f32)
            *(float2 *)((float *)job.y + at) = make_float2(v0, v1);
        else
            *(uint32_t *)((bi_bf16 *)job.y + at) = bi_round(v0) | (uint32_t)bi_round(v1) << 16;
        return;
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
        if (out + e < job.n_out) {
            if (job.y_f32)
                ((float *)job.y)[at + e] = e ? v1 : v0;
            else
                ((bi_bf16 *)job.y)[at + e] = bi_round(e ? v1 : v0);
        }
}

template <int NT>
static __device__ __forceinline__ void store_y(const stream_args &a, const stream_tile &tile, const float (&acc)[NT][4]) {
    const dense_job &job = a.job;
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    const bool fours = a.grid.wide && !job.y_f32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t token = tile.token + (int32_t)(threadIdx.x >> 5) * STREAM_BOX + (lane >> 2) + half * 8;
        const int64_t row = token * job.y_ld + tile.head * job.y_head_ld;
#pragma unroll
        for (int n = 0; n + 4 <= NT; n += 4) {
            uint32_t word[4];
            if (!fours || tile.out + n * 8 + 32 > job.n_out)
                continue;
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = bi_round(acc[n + i][half * 2]) | (uint32_t)bi_round(acc[n + i][half * 2 + 1]) << 16;
            const uint4 eight = turn4(word, q);
            if (token < job.n_row)
                *(uint4 *)((bi_bf16 *)job.y + row + tile.out + (n + q) * 8) = eight;
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int32_t out = tile.out + n * 8 + q * 2;
            const float v0 = acc[n][half * 2], v1 = acc[n][half * 2 + 1];
            if (token >= job.n_row || out >= job.n_out)
                continue;
            if (!(fours && n / 4 * 4 + 4 <= NT && tile.out + n / 4 * 32 + 32 <= job.n_out))
                store_pair(job, row + out, out, v0, v1, a.grid.wide);
            if (job.check) {
                bi_cuda_fault(job.fault, token, v0);
                if (out + 1 < job.n_out)
                    bi_cuda_fault(job.fault, token, v1);
            }
        }
    }
}

template <int N8, int PARTS> static __device__ void consume(const stream_args &a, stream_ring ring) {
    const int32_t n_step = (a.job.n_in + STREAM_K - 1) / STREAM_K;
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, N8 * PARTS * 8);
        float acc[N8 * PARTS][4];
        if (tile.slot >= 0) {
            if (wanted(a.job, tile)) {
                chain<N8, PARTS>(ring, n_step, acc);
                store_t(a.job, tile, acc);
            }
            arrive(a.job);
            continue;
        }
        chain<N8, PARTS>(ring, n_step, acc);
        if (a.job.n_slot)
            await(a);
        if ((int32_t)(threadIdx.x >> 5) >= a.grid.boxes)
            continue; /* a warp without tokens */
        for (int32_t i = 0; i < a.job.n_slot; i++)
            continue_slot(a.job, tile, a.job.slot[i], acc);
        store_y(a, tile, acc);
    }
}

template <int N8, int PARTS> static __global__ void __launch_bounds__(STREAM_THREADS, 2) stream_kernel(const __grid_constant__ stream_args a) {
    extern __shared__ unsigned char stream_memory[];
    __shared__ uint64_t barrier[2 * STREAM_STAGES];
    stream_ring ring;
    const uint32_t base = ((uint32_t)__cvta_generic_to_shared(stream_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    ring.stages = a.grid.stages;
    ring.x_bytes = a.grid.boxes * STREAM_BOX * STREAM_ROW;
    ring.w_bytes = N8 * PARTS * 8 * STREAM_ROW;
    ring.x = base;
    ring.w = base + (uint32_t)(ring.stages * ring.x_bytes);
    ring.full = (uint32_t)__cvta_generic_to_shared(barrier);
    ring.empty = ring.full + 8 * STREAM_STAGES;
    ring.at = 0;
    ring.phase = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < ring.stages; i++) {
            stream_barrier_init(ring.full + 8 * i, 1);
            stream_barrier_init(ring.empty + 8 * i, 4);
        }
        stream_barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x < 128)
        consume<N8, PARTS>(a, ring);
    else if (threadIdx.x == 128)
        produce(a, ring, N8 * PARTS * 8);
}
