/* bi_linear_wide: the own kernel of many rows, for what cuBLASLt cannot add to a product before it is rounded.
 * Contract: N-CHAIN, N-LIN, N-LORA
 *
 * wgmma m64n256k16 (or n128, where tiles are few), rows of x (tokens) on the M side; one accumulator an output over k in rising
 * blocks of 16, first those of x and W, then those of T and the B of the tile's adapter: a tile whose rows all have one adapter
 * goes on through it as through more columns, zeros behind its rank. Rows of several adapters in one tile are continued in the epilogue.
 * Grid: pairs of blocks (clusters), a block an SM, each pair taking pairs of tiles of 128 tokens x OUTS outputs in turn, eight pairs of
 * token tiles before the next outputs, so that those at work share their operands in the second-level cache. The two tiles of a
 * pair have their outputs in common, or with up to 128 rows their tokens; of what they share each block copies one half to both. Both
 * take the same number of stages: what a tile lacks are stages of zeros. Maps of one launch follow each other.
 * Block: two warpgroups of 64 tokens each, and one whose first warp keeps a ring of stages of 64 columns (192 KiB) filled by
 * tensor copies, on into the next tile while this one ends. What becomes of the accumulators is the epilogue's: fragment n of a
 * warpgroup's 64 x OUTS lies as mma.sync.m16n8k16 lays it out. */
#ifndef BI_LINEAR_WIDE_CUH
#define BI_LINEAR_WIDE_CUH

#include "bi_linear_map.cuh"
#include "bi_linear_out.cuh"
#include "bi_linear_wgmma.cuh"

enum {
    WIDE_TOKENS = 128,
    WIDE_K = 64,
    WIDE_ROW = 2 * WIDE_K, /* bytes */
    WIDE_GROUP = 8,        /* pairs of token tiles that go together */
    WIDE_THREADS = 384,
    WIDE_X = WIDE_TOKENS * WIDE_ROW,
    WIDE_RING = 192 << 10,
    WIDE_SHARED = WIDE_RING + WGMMA_ATOM,
    WIDE_STAGES_MAX = 8,
    WIDE_BEHIND = 1 << 30, /* behind the last column of any map: zeros */
    WIDE_NONE = -1, /* no row of the tile has an adapter on the map */
    WIDE_MIXED = -2 /* rows of several, or of one and none */
};

/* One map of the launch; the fields that bi_linear_out.cuh reads have dense_job's names. x: boxes of 64 tokens; w: of half a tile's outputs. */
typedef struct wide_map {
    CUtensorMap x, w;
    void *y;
    int64_t y_ld, y_head_ld;
    bi_fault fault;
    const int32_t *row_slot;
    bi_bf16 *t;
    int64_t t_head_ld;
    int32_t n_row, n_in, n_out, t_ld, y_f32, check, lowest;
    int32_t wide;                /* y takes 16 bytes at a time */
    int32_t n_slot, first_slot;  /* in args.slot */
    int32_t outs, end;           /* pairs of tiles along the outputs; of all, up to and with this map's */
} wide_map;

typedef struct wide_slot {
    CUtensorMap t, b; /* as x and w; zeros behind the slot's rank */
    dense_slot at;
} wide_slot;

template <int MAPS, int SLOTS> struct wide_args {
    wide_map map[MAPS];
    wide_slot slot[SLOTS];
    int32_t n_tile, tokens; /* pairs of tiles; of them along the tokens of a head */
    int32_t shares_w;       /* whether a pair has its outputs in common */
};

/* One block's tile; pair: the first token of its pair. */
typedef struct wide_tile {
    int32_t map, head, token, out, pair;
} wide_tile;

template <int OUTS, class ARGS> static __device__ __forceinline__ wide_tile wide_tile_of(const ARGS &a, int32_t b, int32_t rank) {
    wide_tile tile;
    int32_t m = 0, before = 0;
    while (b >= a.map[m].end)
        before = a.map[m++].end;
    const int32_t outs = a.map[m].outs, in_map = b - before, in_head = in_map % (a.tokens * outs);
    const int32_t first = in_head / (WIDE_GROUP * outs) * WIDE_GROUP, in_group = in_head - first * outs;
    const int32_t width = a.tokens - first < WIDE_GROUP ? a.tokens - first : WIDE_GROUP;
    const int32_t token = first + in_group % width, out = in_group / width;
    tile.map = m;
    tile.head = in_map / (a.tokens * outs);
    tile.pair = token * (a.shares_w ? 2 * WIDE_TOKENS : WIDE_TOKENS);
    tile.token = tile.pair + (a.shares_w ? rank * WIDE_TOKENS : 0);
    tile.out = (a.shares_w ? out : 2 * out + rank) * OUTS;
    return tile;
}

/* Which adapters the rows of the pair have: lane l has those of rows l + 32 i of the pair's first token on; -1 behind the last. */
typedef struct wide_rows {
    int32_t slot[8];
} wide_rows;

static __device__ __forceinline__ wide_rows wide_rows_of(const wide_map &map, const wide_tile &tile, int32_t shares_w) {
    wide_rows rows;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int32_t token = tile.pair + (int32_t)(threadIdx.x & 31) + 32 * i;
        rows.slot[i] = map.n_slot && (shares_w || i < 4) && token < map.n_row ? map.row_slot[token] : -1;
    }
    return rows;
}

/* The slot, an index into args.slot, of all rows of tile `half` of the pair. */
template <class ARGS> static __device__ __forceinline__ int32_t wide_kind(const ARGS &a, const wide_tile &tile, const wide_rows &rows, int half) {
    const wide_map &map = a.map[tile.map];
    const int32_t token = tile.pair + half * WIDE_TOKENS, first = __shfl_sync(0xffffffffu, half ? rows.slot[4] : rows.slot[0], 0);
    bool same = true;
#pragma unroll
    for (int i = 0; i < 4; i++)
        same &= (half ? rows.slot[4 + i] : rows.slot[i]) == first || token + (int32_t)(threadIdx.x & 31) + 32 * i >= map.n_row;
    if (token >= map.n_row || map.n_slot == 0)
        return WIDE_NONE;
    if (!__all_sync(0xffffffffu, same))
        return WIDE_MIXED;
    for (int32_t i = 0; i < map.n_slot; i++)
        if (a.slot[map.first_slot + i].at.slot == first)
            return map.first_slot + i;
    return WIDE_NONE;
}

/* What follows the columns of x: this tile's slot, its stages, and those of the pair. */
typedef struct wide_more {
    int32_t kind, mine, both;
} wide_more;

template <class ARGS> static __device__ __forceinline__ int32_t wide_stages_of(const ARGS &a, int32_t kind) {
    return kind >= 0 ? (a.slot[kind].at.b_ld + WIDE_K - 1) / WIDE_K : 0;
}

template <class ARGS>
static __device__ __forceinline__ wide_more wide_more_of(const ARGS &a, const wide_tile &tile, const wide_rows &rows, int32_t rank) {
    const int32_t first = wide_kind(a, tile, rows, 0), second = a.shares_w ? wide_kind(a, tile, rows, 1) : first;
    const int32_t n_first = wide_stages_of(a, first), n_second = wide_stages_of(a, second);
    wide_more more;
    more.kind = rank ? second : first;
    more.mine = rank ? n_second : n_first;
    more.both = __shfl_sync(0xffffffffu, n_first > n_second ? n_first : n_second, 0);
    return more;
}

typedef struct wide_ring {
    uint32_t x, w, full, empty; /* shared-memory addresses; barrier i is 8 i behind */
    uint32_t release;           /* of lanes 0 and 1: the empty barriers of block 0 and 1 of the pair */
    uint32_t at, phase;
} wide_ring;

template <int OUTS> struct wide_shape {
    static constexpr int W = OUTS * WIDE_ROW, STAGES = WIDE_RING / (WIDE_X + W), N8 = OUTS / 8;
};

template <int OUTS> static __device__ __forceinline__ void wide_step(wide_ring &ring) {
    if (++ring.at == wide_shape<OUTS>::STAGES) {
        ring.at = 0;
        ring.phase ^= 1;
    }
}

/* Columns k .. k + 63 of 128 rows of x and OUTS of w, each in two boxes; shared: each block of the pair copies one half to both. */
template <int OUTS>
static __device__ __forceinline__ void wide_fill(const wide_ring &ring, const CUtensorMap *x, const CUtensorMap *w, const wide_tile &tile,
                                                 int32_t k, int shares_x, int shares_w, uint32_t rank, uint32_t leader) {
    constexpr uint32_t HALF_X = WIDE_X / 2, HALF_W = wide_shape<OUTS>::W / 2;
    const uint32_t full = ring.full + 8 * ring.at, to_x = ring.x + ring.at * WIDE_X, to_w = ring.w + ring.at * wide_shape<OUTS>::W;
    stream_expect(full, WIDE_X + wide_shape<OUTS>::W, leader);
    if (shares_x) {
        stream_copy_both(to_x + rank * HALF_X, x, k, tile.token + (int32_t)rank * 64, tile.head, full, leader);
    } else {
        stream_copy(to_x, x, k, tile.token, tile.head, full, leader);
        stream_copy(to_x + HALF_X, x, k, tile.token + 64, tile.head, full, leader);
    }
    if (shares_w) {
        stream_copy_both(to_w + rank * HALF_W, w, k, tile.out + (int32_t)rank * (OUTS / 2), tile.head, full, leader);
    } else {
        stream_copy(to_w, w, k, tile.out, tile.head, full, leader);
        stream_copy(to_w + HALF_W, w, k, tile.out + OUTS / 2, tile.head, full, leader);
    }
}

template <int OUTS, class ARGS> static __device__ void wide_produce(const ARGS &a, wide_ring ring, uint32_t rank) {
    const uint32_t leader = stream_leader();
    for (int32_t b = (int32_t)blockIdx.x / 2; b < a.n_tile; b += (int32_t)gridDim.x / 2) {
        const wide_tile tile = wide_tile_of<OUTS>(a, b, (int32_t)rank);
        const wide_map &map = a.map[tile.map];
        const wide_rows rows = wide_rows_of(map, tile, a.shares_w);
        for (int32_t k = 0; k < map.n_in; k += WIDE_K) {
            stream_wait(ring.empty + 8 * ring.at, ring.phase ^ 1);
            wide_fill<OUTS>(ring, &map.x, &map.w, tile, k, !a.shares_w, a.shares_w, rank, leader);
            wide_step<OUTS>(ring);
        }
        if (map.n_slot == 0)
            continue;
        const wide_more more = wide_more_of(a, tile, rows, (int32_t)rank);
        bi_cuda_await_before(); /* T */
        for (int32_t i = 0; i < more.both; i++) {
            const bool there = i < more.mine;
            const CUtensorMap *x = there ? &a.slot[more.kind].t : &map.x, *w = there ? &a.slot[more.kind].b : &map.w;
            stream_wait(ring.empty + 8 * ring.at, ring.phase ^ 1);
            wide_fill<OUTS>(ring, x, w, tile, there ? i * WIDE_K : WIDE_BEHIND, 0, 0, rank, leader);
            wide_step<OUTS>(ring);
        }
    }
}

static __device__ __forceinline__ void wide_release(const wide_ring &ring, uint32_t at) {
    if ((threadIdx.x & 31) < 2)
        stream_arrive_pair(ring.release + 8 * at);
}

template <int N8> static __device__ __forceinline__ void wide_settle(float (&acc)[N8][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < N8; n++) /* no use of them before */
        asm volatile("" : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])::"memory");
}

/* This warpgroup's 64 tokens of the tile. */
template <int OUTS> static __device__ __forceinline__ void wide_chain(wide_ring &ring, int32_t n_step, int group, float (&acc)[OUTS / 8][4]) {
    constexpr int N8 = OUTS / 8;
    uint32_t before = 0;
#pragma unroll
    for (int n = 0; n < N8; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (int32_t step = 0; step < n_step; step++) {
        stream_wait(ring.full + 8 * ring.at, ring.phase);
        const uint32_t x = wgmma_tile(ring.x + ring.at * WIDE_X + (uint32_t)group * (WIDE_X / 2));
        const uint32_t w = wgmma_tile(ring.w + ring.at * wide_shape<OUTS>::W);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < WIDE_K / BI_MMA_K; k++)
            wgmma<N8>(acc, x + 2 * k, w + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step)
            wide_release(ring, before);
        before = ring.at;
        wide_step<OUTS>(ring);
    }
    wide_settle<N8>(acc);
    wide_release(ring, before);
}

/* The chains of a tile whose rows have several adapters, or some none, go on by mma.sync. */
template <int OUTS, class ARGS>
static __device__ __forceinline__ void wide_chain_mixed(const ARGS &a, const wide_tile &tile, int32_t token, float (&acc)[OUTS / 8][4]) {
    const wide_map &map = a.map[tile.map];
    const dense_place place = {tile.head, token, tile.out};
    bi_cuda_await_before();
    for (int32_t i = 0; i < map.n_slot; i++)
        dense_continue(map, place, a.slot[map.first_slot + i].at, map.t, acc);
}

/* EPILOGUE: called by each warp as epilogue(map, tile, the token of its lane 0, acc). ADAPTERS: whether a map of the launch has some. */
template <int OUTS, class ARGS, class EPILOGUE>
static __device__ __forceinline__ void wide_consume(const ARGS &a, const EPILOGUE &epilogue, wide_ring ring, uint32_t rank, int warp) {
    for (int32_t b = (int32_t)blockIdx.x / 2; b < a.n_tile; b += (int32_t)gridDim.x / 2) {
        float acc[OUTS / 8][4];
        const wide_tile tile = wide_tile_of<OUTS>(a, b, (int32_t)rank);
        const wide_map &map = a.map[tile.map];
        const int32_t n_step = (map.n_in + WIDE_K - 1) / WIDE_K;
        wide_more more = {WIDE_NONE, 0, 0};
        if constexpr (EPILOGUE::ADAPTERS)
            if (map.n_slot)
                more = wide_more_of(a, tile, wide_rows_of(map, tile, a.shares_w), (int32_t)rank);
        wide_chain<OUTS>(ring, n_step + more.both, warp >> 2, acc);
        if constexpr (EPILOGUE::ADAPTERS)
            if (more.kind == WIDE_MIXED)
                wide_chain_mixed<OUTS>(a, tile, tile.token + warp * 16, acc);
        epilogue(map, tile, tile.token + warp * 16, acc);
    }
}

template <int OUTS, class ARGS, class EPILOGUE>
static __global__ void __cluster_dims__(2) __launch_bounds__(WIDE_THREADS, 1)
    wide_kernel(const __grid_constant__ ARGS a, const __grid_constant__ EPILOGUE epilogue) {
    extern __shared__ unsigned char wide_memory[];
    __shared__ uint64_t barrier[2 * WIDE_STAGES_MAX];
    constexpr int STAGES = wide_shape<OUTS>::STAGES;
    const uint32_t rank = stream_rank();
    wide_ring ring;
    ring.x = ((uint32_t)__cvta_generic_to_shared(wide_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    ring.w = ring.x + STAGES * WIDE_X;
    ring.full = (uint32_t)__cvta_generic_to_shared(barrier);
    ring.empty = ring.full + 8 * WIDE_STAGES_MAX;
    ring.release = stream_of_pair(ring.empty, threadIdx.x & 1);
    ring.at = 0;
    ring.phase = 0;
    asm volatile("" : "+r"(ring.x), "+r"(ring.w), "+r"(ring.full), "+r"(ring.empty), "+r"(ring.release)); /* kept, not made anew in the loops */
    if (threadIdx.x < STAGES) {
        stream_barrier_init(ring.full + 8 * threadIdx.x, 1);
        stream_barrier_init(ring.empty + 8 * threadIdx.x, 16); /* warps that multiply, of both blocks */
        stream_barrier_publish();
    }
    __syncthreads();
    stream_meet_pair();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
    if (warp >> 2 == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (warp == 8)
            wide_produce<OUTS>(a, ring, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        wide_consume<OUTS>(a, epilogue, ring, rank, warp);
    }
    bi_cuda_await_before(); /* nobody may take this launch for done while T is being made */
    __syncwarp();
    stream_meet_pair(); /* the other block's copies and arrivals end here too */
}

/* ---- the host's side -------------------------------------------------------------------------------------------------- */

template <int OUTS, class ARGS, class EPILOGUE> static br_status wide_allow(void) {
    const void *kernel = (const void *)wide_kernel<OUTS, ARGS, EPILOGUE>;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, WIDE_SHARED) != cudaSuccess)
        return br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", (int)WIDE_SHARED);
    return BR_OK;
}

/* What the tiles need of a job whose x, T and adapters are aligned; 0: the driver makes no such maps. */
static inline int wide_set_map(const dense_state *state, wide_map *map, wide_slot *slot, const dense_job *job, int32_t first_slot, int outs) {
    dense_fill_map(map, job, first_slot);
    int ok = dense_map(state, &map->x, dense_x_of(job), 64) && dense_map(state, &map->w, dense_w_of(job), outs / 2);
    for (int i = 0; ok && i < job->n_slot; i++) {
        const dense_slot *from = &job->slot[i];
        const dense_operand t = {job->t, from->b_ld, job->n_row, job->n_head, job->t_ld, job->t_head_ld};
        const dense_operand b = {from->b, from->b_ld, job->n_out, job->n_head, from->b_ld, from->b_stride};
        slot[first_slot + i].at = *from;
        ok = (uintptr_t)from->b % DENSE_ALIGN == 0 && dense_map(state, &slot[first_slot + i].t, t, 64) &&
             dense_map(state, &slot[first_slot + i].b, b, outs / 2);
    }
    return ok;
}

/* Pairs of tiles of n jobs of the same rows. */
template <class ARGS> static int wide_set(const dense_state *state, ARGS *args, const dense_job *job, int32_t n, int outs) {
    int32_t first_slot = 0;
    const int32_t token_tiles = (int32_t)bi_ceil_div(job->n_row, WIDE_TOKENS);
    args->n_tile = 0;
    args->shares_w = token_tiles > 1;
    args->tokens = args->shares_w ? (token_tiles + 1) / 2 : token_tiles;
    for (int32_t i = 0; i < n; i++) {
        wide_map *map = &args->map[i];
        if (!wide_set_map(state, map, args->slot, &job[i], first_slot, outs))
            return 0;
        first_slot += job[i].n_slot;
        map->outs = (int32_t)bi_ceil_div(job[i].n_out, args->shares_w ? outs : 2 * outs);
        args->n_tile += job[i].n_head * args->tokens * map->outs;
        map->end = args->n_tile;
    }
    return 1;
}

/* early: the launch may start before the one ahead of it, which makes T and nothing else, is done. */
template <int OUTS, class ARGS, class EPILOGUE>
static void wide_launch(const bi_ctx *ctx, const ARGS &args, const EPILOGUE &epilogue, int early) {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    const int pairs = args.n_tile < ctx->n_sm / 2 ? args.n_tile : ctx->n_sm / 2;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = early;
    config.gridDim = dim3((unsigned)(2 * pairs));
    config.blockDim = dim3(WIDE_THREADS);
    config.dynamicSmemBytes = WIDE_SHARED;
    config.stream = ctx->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, wide_kernel<OUTS, ARGS, EPILOGUE>, args, epilogue);
}

#endif
