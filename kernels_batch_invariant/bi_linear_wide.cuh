/* bi_linear_wide: the own kernel of many rows, for what cuBLASLt cannot add to a product before it is rounded.
 * Contract: N-CHAIN
 *
 * wgmma m64n256k16, rows of x (tokens) on the M side; one accumulator an output over k in rising blocks of 16. Grid: one block an
 * SM, each taking tiles of 128 tokens x 256 outputs in turn, 16 tiles of tokens before the next outputs, so that those at work share
 * their operands in the second-level cache. Block: two warpgroups of 64 tokens each, and one whose first warp keeps a ring
 * of four stages of 64 columns (192 KiB) filled by tensor copies, on into the next tile while this one ends. What becomes of
 * the accumulators is the epilogue's: fragment n of a warpgroup's 64 x 256 lies as mma.sync.m16n8k16 lays it out. */
#ifndef BI_LINEAR_WIDE_CUH
#define BI_LINEAR_WIDE_CUH

#include "bi_linear_parts.cuh"
#include "bi_linear_wgmma.cuh"

#include <cuda.h>

enum {
    WIDE_TOKENS = 128,
    WIDE_OUTS = 256,
    WIDE_K = 64,
    WIDE_N8 = WIDE_OUTS / 8,
    WIDE_GROUP = 16, /* tiles of tokens that go together */
    WIDE_STAGES = 4,
    WIDE_THREADS = 384,
    WIDE_X = WIDE_TOKENS * WIDE_K * 2,
    WIDE_W = WIDE_OUTS * WIDE_K * 2,
    WIDE_SHARED = WIDE_STAGES * (WIDE_X + WIDE_W) + WGMMA_ATOM
};

typedef struct wide_args {
    CUtensorMap x, w;
    dense_job job;
    int32_t token_tiles, w_tiles, n_tile;
} wide_args;

typedef struct wide_tile {
    int32_t head, token, out;
} wide_tile;

/* Maps and tiles of a job whose x is aligned; 0: the maps cannot be made. */
int bi_dense_wide_args(const dense_state *state, const dense_job *job, wide_args *args);

static __device__ __forceinline__ wide_tile wide_tile_of(const wide_args &a, int32_t b) {
    wide_tile tile;
    const int32_t head_tiles = a.token_tiles * a.w_tiles, in_head = b % head_tiles;
    const int32_t first = in_head / (WIDE_GROUP * a.w_tiles) * WIDE_GROUP, in_group = in_head - first * a.w_tiles;
    const int32_t width = a.token_tiles - first < WIDE_GROUP ? a.token_tiles - first : WIDE_GROUP;
    tile.head = b / head_tiles;
    tile.token = (first + in_group % width) * WIDE_TOKENS;
    tile.out = in_group / width * WIDE_OUTS;
    return tile;
}

typedef struct wide_ring {
    uint32_t x, w, full, empty; /* shared-memory addresses; barrier i is 8 i behind */
    uint32_t at, phase;
} wide_ring;

static __device__ __forceinline__ void wide_step(wide_ring &ring) {
    if (++ring.at == WIDE_STAGES) {
        ring.at = 0;
        ring.phase ^= 1;
    }
}

static __device__ __forceinline__ void wide_produce(const wide_args &a, wide_ring ring) {
    const uint32_t leader = stream_leader();
    const uint64_t usual = stream_policy(false);
    for (int32_t b = (int32_t)blockIdx.x; b < a.n_tile; b += (int32_t)gridDim.x) {
        const wide_tile tile = wide_tile_of(a, b);
        for (int32_t k = 0; k < a.job.n_in; k += WIDE_K) {
            const uint32_t full = ring.full + 8 * ring.at;
            const int32_t x_at[4] = {k, tile.token, 0, tile.head}, w_at[4] = {k, tile.out, 0, tile.head};
            stream_wait(ring.empty + 8 * ring.at, ring.phase ^ 1);
            stream_expect(full, WIDE_X + WIDE_W, leader);
            stream_copy(ring.x + ring.at * WIDE_X, &a.x, x_at, full, usual, leader);
            stream_copy(ring.w + ring.at * WIDE_W, &a.w, w_at, full, usual, leader);
            wide_step(ring);
        }
    }
}

/* This warpgroup's 64 tokens of the tile. */
static __device__ __forceinline__ void wide_chain(const wide_args &a, wide_ring &ring, int group, float (&acc)[WIDE_N8][4]) {
    const int32_t n_step = (a.job.n_in + WIDE_K - 1) / WIDE_K;
    uint32_t before = 0;
#pragma unroll
    for (int n = 0; n < WIDE_N8; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (int32_t step = 0; step < n_step; step++) {
        stream_wait(ring.full + 8 * ring.at, ring.phase);
        const uint32_t x = wgmma_tile(ring.x + ring.at * WIDE_X + (uint32_t)group * (WIDE_X / 2)), w = wgmma_tile(ring.w + ring.at * WIDE_W);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < WIDE_K / BI_MMA_K; k++)
            wgmma<WIDE_N8>(acc, x + 2 * k, w + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step && (threadIdx.x & 31) == 0)
            stream_arrive(before);
        before = ring.empty + 8 * ring.at;
        wide_step(ring);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < WIDE_N8; n++) /* no use of them before */
        asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
    if ((threadIdx.x & 31) == 0)
        stream_arrive(before);
}

/* EPILOGUE: called by each warp as epilogue(args, tile, the token of its lane 0, acc). */
template <class EPILOGUE>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) wide_kernel(const __grid_constant__ wide_args a, const __grid_constant__ EPILOGUE epilogue) {
    extern __shared__ unsigned char wide_memory[];
    __shared__ uint64_t barrier[2 * WIDE_STAGES];
    wide_ring ring;
    ring.x = ((uint32_t)__cvta_generic_to_shared(wide_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    ring.w = ring.x + WIDE_STAGES * WIDE_X;
    ring.full = (uint32_t)__cvta_generic_to_shared(barrier);
    ring.empty = ring.full + 8 * WIDE_STAGES;
    ring.at = 0;
    ring.phase = 0;
    asm volatile("" : "+r"(ring.x), "+r"(ring.w), "+r"(ring.full), "+r"(ring.empty)); /* kept, not made anew in the loops */
    if (threadIdx.x < WIDE_STAGES) {
        stream_barrier_init(ring.full + 8 * threadIdx.x, 1);
        stream_barrier_init(ring.empty + 8 * threadIdx.x, 8);
        stream_barrier_publish();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), group = warp >> 2;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (warp == 8)
            wide_produce(a, ring);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
    for (int32_t b = (int32_t)blockIdx.x; b < a.n_tile; b += (int32_t)gridDim.x) {
        float acc[WIDE_N8][4];
        const wide_tile tile = wide_tile_of(a, b);
        wide_chain(a, ring, group, acc);
        epilogue(a, tile, tile.token + warp * 16, acc);
    }
}

template <class EPILOGUE> static cudaError_t wide_allow() {
    return cudaFuncSetAttribute((const void *)wide_kernel<EPILOGUE>, cudaFuncAttributeMaxDynamicSharedMemorySize, WIDE_SHARED);
}

template <class EPILOGUE> static void wide_launch(const bi_ctx *ctx, const wide_args *args, const EPILOGUE &epilogue) {
    const int n_block = args->n_tile < ctx->n_sm ? args->n_tile : ctx->n_sm;
    wide_kernel<<<n_block, WIDE_THREADS, WIDE_SHARED, ctx->stream>>>(*args, epilogue);
}

#endif
