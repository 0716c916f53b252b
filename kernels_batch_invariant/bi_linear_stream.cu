/* The dense products of few rows: weights pass once, at the rate of memory.      Contract: N-CHAIN, N-LIN, N-LORA
 *
 * y[t,h] = chain([x[t,h] | T], [W_h | B_h]) and T = R(RN(s * chain(x[t,h], A_h))) by wgmma m64nNk16 with rows of x, here called
 * tokens, on its M side and outputs on its N side, so that a tile may be any multiple of 8 outputs and the tiles fill the SMs
 * evenly. One accumulator an output runs over k in rising blocks of 16; nothing is split. What adapters add runs on
 * mma.sync m16n8k16, whose accumulators lie as wgmma's do (bi_linear_out.cuh).
 * Up to eight maps on the same rows share a launch. Grid: at most as many blocks as run at once, block b takes tiles b, b + grid,
 * ..: first the tiles of T (16 tokens; a slot's A takes the place of W), then those of y (16 to 64 tokens), maps with few outputs
 * first: their chains take as long as any. Tiles of y run their base chain first and then wait for all of T: tiles of T come
 * first and wait for nothing. The B of the tile's adapter is in registers by then.
 * Block: a warpgroup that multiplies, and a warp that keeps a ring in shared memory filled by tensor copies: stages of 64 or 128
 * columns of x and of the weights, up to 32 of them, 110 or 224 KiB. The stages of x lie before those of the weights and hold only
 * the tile's tokens; wgmma reads 64 rows and finds other numbers of the ring behind them, which end in accumulators that nobody
 * stores. The next launch may start when all copies of this one are under way. */
#include "bi_linear_map.cuh"
#include "bi_linear_out.cuh"
#include "bi_linear_wgmma.cuh"

enum {
    STREAM_K = 64,               /* columns of a block: of 1 or 2 blocks is a stage */
    STREAM_ROW = 2 * STREAM_K,   /* bytes */
    STREAM_BOX = 16,             /* tokens of a warp */
    STREAM_STAGES = 32,
    STREAM_THREADS = 160,
    STREAM_MAPS = 8,
    STREAM_SLOTS = 32,           /* of all maps of a launch */
    STREAM_RING_TWO = 110 << 10, /* of two blocks an SM */
    STREAM_RING_ONE = 224 << 10
};

typedef struct stream_slot {
    CUtensorMap a;
    dense_slot at;
} stream_slot;

/* One map of the launch; the fields that bi_linear_out.cuh reads have dense_job's names. */
typedef struct stream_map {
    CUtensorMap x, x_t, w; /* x_t: boxes of STREAM_BOX tokens */
    void *y;
    int64_t y_ld, y_head_ld;
    bi_fault fault;
    const int32_t *row_slot;
    bi_bf16 *t;
    int64_t t_head_ld;
    int32_t n_row, n_in, n_out, t_ld, y_f32, check, lowest;
    int32_t wide;                         /* y takes 16 bytes at a time */
    int32_t n_slot, first_slot, t_tiles;  /* t_tiles: of a slot, a head and 16 tokens */
    int32_t w_tiles, end_t, end_y;        /* tiles of T, and of y, up to and with this map's */
} stream_map;

/* The launch. */
typedef struct stream_grid {
    int32_t boxes;                   /* of STREAM_BOX tokens in a tile of y */
    int32_t token_tiles, token_boxes; /* of y, of T */
    int32_t n_t, n_y, n_wait;        /* n_wait: tiles of y that wait for T */
    int32_t stages, once;            /* once: no tile shares its weights with another */
    uint32_t *arrived;
} stream_grid;

template <int MAPS, int SLOTS> struct stream_args {
    static constexpr bool ADAPTERS = SLOTS > 1;
    stream_map map[MAPS];
    stream_slot slot[SLOTS];
    stream_grid grid;
};

/* What one tile is. */
typedef struct stream_tile {
    int32_t map, head, token, out, slot; /* slot: index into args.slot for a tile of T, -1 for one of y */
} stream_tile;

template <class ARGS> static __device__ __forceinline__ stream_tile tile_of(const ARGS &a, int32_t b, int32_t n_out) {
    stream_tile tile;
    const bool is_t = b < a.grid.n_t;
    const int32_t left = is_t ? b : b - a.grid.n_t;
    int32_t m = 0, before = 0;
    while (left >= (is_t ? a.map[m].end_t : a.map[m].end_y)) {
        before = is_t ? a.map[m].end_t : a.map[m].end_y;
        m++;
    }
    const int32_t tokens = is_t ? a.grid.token_boxes : a.grid.token_tiles, tiles = is_t ? a.map[m].t_tiles : a.map[m].w_tiles;
    int32_t at = left - before;
    tile.map = m;
    tile.token = at % tokens * (is_t ? 1 : a.grid.boxes) * STREAM_BOX;
    at /= tokens;
    tile.out = at % tiles * n_out;
    at /= tiles;
    tile.slot = is_t ? a.map[m].first_slot + at % a.map[m].n_slot : -1;
    tile.head = is_t ? at / a.map[m].n_slot : at;
    return tile;
}

/* Whether a tile of T has a row of the slot. */
template <class ARGS> static __device__ __forceinline__ bool has_slot(const ARGS &a, const stream_tile &tile) {
    bool any = false;
    for (int32_t i = 0; i < STREAM_BOX; i++)
        any |= dense_slot_of(a.map[tile.map], tile.token + i) == a.slot[tile.slot].at.slot;
    return any;
}

/* The ring as one warp goes round it. */
typedef struct stream_ring {
    uint32_t x, w, full, empty; /* shared-memory addresses; barrier i is 8 i behind */
    int32_t x_block, w_block;   /* bytes of a block of columns */
    int32_t at;
    uint32_t phase;
} stream_ring;

static __device__ __forceinline__ void step_on(stream_ring &ring, int32_t stages) {
    if (++ring.at == stages) {
        ring.at = 0;
        ring.phase ^= 1;
    }
}

/* Blocks of columns in a stage of tiles of 8 n8 outputs: long stages where the tensor cores would wait for the loop. */
#define STREAM_BLOCKS(n8) ((n8) <= 12 ? 2 : 1)

/* Weights of the first stages, while the launch before still runs. */
template <int N8, class ARGS> static __device__ __forceinline__ void prefetch(const ARGS &a, uint32_t leader) {
    const stream_tile tile = tile_of(a, (int32_t)blockIdx.x, N8 * 8);
    const int32_t most = a.grid.stages * STREAM_BLOCKS(N8) * STREAM_K, n_in = a.map[tile.map].n_in;
    for (int32_t k = 0; tile.slot < 0 && k < most && k < n_in; k += STREAM_K)
        stream_prefetch(&a.map[tile.map].w, k, tile.out, tile.head, leader);
}

template <int N8, class ARGS> static __device__ void produce(const ARGS &a, stream_ring ring) {
    constexpr int BLOCKS = STREAM_BLOCKS(N8);
    const uint32_t leader = stream_leader();
    const uint64_t policy = stream_policy(a.grid.once);
    prefetch<N8>(a, leader);
    bi_cuda_await_before();
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, N8 * 8);
        const stream_map &map = a.map[tile.map];
        const bool is_t = tile.slot >= 0;
        if (is_t && (tile.out >= a.slot[tile.slot].at.rank || !has_slot(a, tile)))
            continue;
        const CUtensorMap *x = is_t ? &map.x_t : &map.x, *w = is_t ? &a.slot[tile.slot].a : &map.w;
        const int32_t x_block = is_t ? STREAM_BOX * STREAM_ROW : ring.x_block;
        for (int32_t k = 0; k < map.n_in; k += BLOCKS * STREAM_K) {
            const uint32_t full = ring.full + 8 * (uint32_t)ring.at;
            stream_wait(ring.empty + 8 * (uint32_t)ring.at, ring.phase ^ 1);
            stream_expect(full, BLOCKS * (x_block + ring.w_block), leader);
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                stream_copy_kept(ring.w + (uint32_t)((ring.at * BLOCKS + i) * ring.w_block), w, k + i * STREAM_K, tile.out, tile.head, full, policy,
                                 leader);
                stream_copy(ring.x + (uint32_t)(ring.at * BLOCKS * ring.x_block + i * x_block), x, k + i * STREAM_K, tile.token, tile.head, full,
                            leader);
            }
            step_on(ring, a.grid.stages);
        }
    }
    bi_cuda_let_next_start();
}

template <int NT> static __device__ __forceinline__ void clear(float (&acc)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
}

/* The chains over all of K, one stage in the tensor cores while the next is awaited. */
template <int N8, int PARTS>
static __device__ __forceinline__ void chain(stream_ring &ring, int32_t stages, int32_t n_in, int32_t x_block, float (&acc)[N8 * PARTS][4]) {
    constexpr int BLOCKS = STREAM_BLOCKS(N8 * PARTS);
    const int32_t n_stage = (n_in + STREAM_K * BLOCKS - 1) / (STREAM_K * BLOCKS);
    uint32_t before = 0; /* the stage that is in the tensor cores */
    clear(acc);
    for (int32_t stage = 0; stage < n_stage; stage++) {
        stream_wait(ring.full + 8 * (uint32_t)ring.at, ring.phase);
        const uint32_t x = wgmma_tile(ring.x + (uint32_t)(ring.at * BLOCKS * ring.x_block));
        const uint32_t w = wgmma_tile(ring.w + (uint32_t)(ring.at * BLOCKS * ring.w_block));
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
#pragma unroll
            for (int k = 0; k < STREAM_K / BI_MMA_K; k++)
#pragma unroll
                for (int p = 0; p < PARTS; p++)
                    wgmma<N8>(acc + p * N8, x + (uint32_t)(i * x_block >> 4) + 2 * k, w + ((i * PARTS + p) * N8 * WGMMA_ATOM >> 4) + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (stage && (threadIdx.x & 31) == 0)
            stream_arrive(before);
        before = ring.empty + 8 * (uint32_t)ring.at;
        step_on(ring, stages);
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
static __device__ __forceinline__ void store_t(const stream_map &map, const dense_slot &slot, const stream_tile &tile, const float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    const float s = slot.s[tile.head];
    if (threadIdx.x >= 32)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t token = tile.token + (lane >> 2) + half * 8;
        if (dense_slot_of(map, token) != slot.slot)
            continue;
        bi_bf16 *t = map.t + tile.head * map.t_head_ld + (int64_t)token * map.t_ld;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t r = tile.out + n * 8 + (lane & 3) * 2 + e;
                const bi_bf16 v = r < slot.rank ? bi_round(BI_MUL(s, acc[n][half * 2 + e])) : (bi_bf16)0;
                if (r < slot.b_ld)
                    t[r] = v;
                dense_fault(map, token, bi_widen(v));
            }
    }
}

static __device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, 128;\n" ::: "memory");
}

/* Tells the tiles of y that this tile of T is written. */
static __device__ __forceinline__ void arrive(const stream_grid &grid) {
    __threadfence();
    meet();
    if (threadIdx.x == 0)
        atomicAdd(&grid.arrived[0], 1u);
}

/* Waits for all of T; the last tile of y that has waited puts the counters back. */
static __device__ __forceinline__ void await(const stream_grid &grid) {
    if (threadIdx.x == 0) {
        while (*(volatile uint32_t *)&grid.arrived[0] < (uint32_t)grid.n_t)
            __nanosleep(64);
        __threadfence();
        if (atomicAdd(&grid.arrived[1], 1u) == (uint32_t)grid.n_wait - 1) {
            atomicExch(&grid.arrived[0], 0u);
            atomicExch(&grid.arrived[1], 0u);
        }
    }
    meet();
}

enum {
    AHEAD_K = 2,  /* k-blocks of B that are taken ahead */
    AHEAD_N = 14  /* and fragments at most: what registers there are */
};

/* The B of one slot for a warp's tokens, as mma.sync.m16n8k16 wants it, asked for before the base chains so that nobody waits for it
 * behind them. slot: index into the map's; -1: none. */
template <int NT> struct stream_ahead {
    uint32_t b[AHEAD_K][NT][2];
    int32_t slot;
};

/* Of the first slot that a token of the warp has, where its rank allows. */
template <int NT, class ARGS>
static __device__ __forceinline__ void take_ahead(stream_ahead<NT> &ahead, const ARGS &a, const stream_map &map, const dense_place &place) {
    const int lane = (int)threadIdx.x & 31;
    const int32_t had = map.n_slot && lane < STREAM_BOX ? dense_slot_of(map, place.token + lane) : -1;
    ahead.slot = -1;
    for (int32_t i = 0; i < map.n_slot && ahead.slot < 0; i++)
        if (__any_sync(0xffffffffu, had == a.slot[map.first_slot + i].at.slot))
            ahead.slot = a.slot[map.first_slot + i].at.b_ld <= AHEAD_K * BI_MMA_K ? i : map.n_slot;
    if (ahead.slot < 0 || ahead.slot == map.n_slot) {
        ahead.slot = -1;
        return;
    }
    const dense_slot &slot = a.slot[map.first_slot + ahead.slot].at;
    const bi_bf16 *b = slot.b + slot.b_stride * place.head + 2 * (lane & 3);
#pragma unroll
    for (int k = 0; k < AHEAD_K; k++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int32_t out = place.out + n * 8 + (lane >> 2);
            const bi_bf16 *at = b + (int64_t)out * slot.b_ld + k * BI_MMA_K;
            const bool there = out < map.n_out && k * BI_MMA_K < slot.b_ld;
            ahead.b[k][n][0] = there ? dense_pair(at) : 0;
            ahead.b[k][n][1] = there ? dense_pair(at + 8) : 0;
        }
}

/* As dense_continue, with B already here. */
template <int NT>
static __device__ __forceinline__ void continue_ahead(const stream_ahead<NT> &ahead, const stream_map &map, const dense_place &place,
                                                      const dense_slot &slot, float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    const int32_t token = place.token + (lane >> 2);
    const bool mine[2] = {dense_slot_of(map, token) == slot.slot, dense_slot_of(map, token + 8) == slot.slot};
    const bi_bf16 *t = map.t + place.head * map.t_head_ld + (int64_t)token * map.t_ld + 2 * (lane & 3);
    uint32_t x[AHEAD_K][4];
#pragma unroll
    for (int i = 0; i < AHEAD_K * 4; i++) {
        const int k = i >> 2, half = i & 1, high = i >> 1 & 1;
        x[k][i & 3] = mine[half] && k * BI_MMA_K < slot.b_ld ? dense_pair(t + half * 8 * (int64_t)map.t_ld + k * BI_MMA_K + high * 8) : 0;
    }
#pragma unroll
    for (int k = 0; k < AHEAD_K; k++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float next[4] = {acc[n][0], acc[n][1], acc[n][2], acc[n][3]};
            bi_cuda_mma16(next, x[k], ahead.b[k][n]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[n][e] = mine[e >> 1] ? next[e] : acc[n][e];
        }
}

template <int N8, int PARTS, class ARGS> static __device__ void consume(const ARGS &a, stream_ring ring) {
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, N8 * PARTS * 8);
        const stream_map &map = a.map[tile.map];
        float acc[N8 * PARTS][4];
        if (tile.slot >= 0) {
            const dense_slot &slot = a.slot[tile.slot].at;
            if (has_slot(a, tile)) {
                if (tile.out < slot.rank)
                    chain<N8, PARTS>(ring, a.grid.stages, map.n_in, STREAM_BOX * STREAM_ROW, acc);
                else
                    clear(acc);
                store_t(map, slot, tile, acc);
            }
            arrive(a.grid);
            continue;
        }
        const dense_place place = {tile.head, tile.token + (int32_t)(threadIdx.x >> 5) * STREAM_BOX, tile.out};
        stream_ahead<N8 * PARTS> ahead;
        ahead.slot = -1;
        if constexpr (ARGS::ADAPTERS && N8 * PARTS <= AHEAD_N)
            take_ahead(ahead, a, map, place);
        chain<N8, PARTS>(ring, a.grid.stages, map.n_in, ring.x_block, acc);
        if (ARGS::ADAPTERS && map.n_slot)
            await(a.grid);
        if ((int32_t)(threadIdx.x >> 5) >= a.grid.boxes)
            continue; /* a warp without tokens */
        for (int32_t i = 0; ARGS::ADAPTERS && i < map.n_slot; i++)
            if (N8 * PARTS <= AHEAD_N && i == ahead.slot)
                continue_ahead(ahead, map, place, a.slot[map.first_slot + i].at, acc);
            else
                dense_continue(map, place, a.slot[map.first_slot + i].at, map.t, acc);
        dense_store(map, place, map.wide, acc);
    }
}

template <int N8, int PARTS, int MAPS, int SLOTS>
static __global__ void __launch_bounds__(STREAM_THREADS, 2) stream_kernel(const __grid_constant__ stream_args<MAPS, SLOTS> a) {
    extern __shared__ unsigned char stream_memory[];
    __shared__ uint64_t barrier[2 * STREAM_STAGES];
    stream_ring ring;
    ring.x_block = a.grid.boxes * STREAM_BOX * STREAM_ROW;
    ring.w_block = N8 * PARTS * 8 * STREAM_ROW;
    ring.x = ((uint32_t)__cvta_generic_to_shared(stream_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    ring.w = ring.x + (uint32_t)(a.grid.stages * STREAM_BLOCKS(N8 * PARTS) * ring.x_block);
    ring.full = (uint32_t)__cvta_generic_to_shared(barrier);
    ring.empty = ring.full + 8 * STREAM_STAGES;
    ring.at = 0;
    ring.phase = 0;
    asm volatile("" : "+r"(ring.x), "+r"(ring.w), "+r"(ring.full), "+r"(ring.empty)); /* kept, not made anew in the loops */
    if ((int32_t)threadIdx.x < a.grid.stages) {
        stream_barrier_init(ring.full + 8 * threadIdx.x, 1);
        stream_barrier_init(ring.empty + 8 * threadIdx.x, 4);
        stream_barrier_publish();
    }
    __syncthreads();
    if (__shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0) == 4) {
        produce<N8 * PARTS>(a, ring);
        return;
    }
    bi_cuda_await_before();
    consume<N8, PARTS>(a, ring);
}

/* ---- the host's side -------------------------------------------------------------------------------------------------- */

typedef stream_args<1, 1> args_plain; /* one map without adapters */
typedef stream_args<STREAM_MAPS, STREAM_SLOTS> args_group;

typedef struct stream_form {
    void (*plain)(const args_plain);
    void (*group)(const args_group);
    int outs;
} stream_form;

#define STREAM_FORM(n8, parts) {stream_kernel<n8, parts, 1, 1>, stream_kernel<n8, parts, STREAM_MAPS, STREAM_SLOTS>, n8 * parts * 8}
static const stream_form FORM[] = {
    STREAM_FORM(2, 1), STREAM_FORM(3, 1), STREAM_FORM(4, 1),  STREAM_FORM(6, 1), STREAM_FORM(7, 1),  STREAM_FORM(8, 1),
    STREAM_FORM(10, 1), STREAM_FORM(12, 1), STREAM_FORM(7, 2), STREAM_FORM(8, 2),
};
enum { N_FORM = sizeof FORM / sizeof FORM[0] };

br_status bi_dense_stream_open(dense_state *state) {
    const int most = STREAM_RING_ONE + WGMMA_ATOM;
    cudaDriverEntryPointQueryResult found;
    for (int i = 0; i < N_FORM; i++)
        if (cudaFuncSetAttribute((const void *)FORM[i].plain, cudaFuncAttributeMaxDynamicSharedMemorySize, most) != cudaSuccess ||
            cudaFuncSetAttribute((const void *)FORM[i].group, cudaFuncAttributeMaxDynamicSharedMemorySize, most) != cudaSuccess)
            return br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", most);
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &state->encode, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        state->encode = NULL;
    cudaGetLastError(); /* without it the other forms do all */
    return BR_OK;
}

static int32_t rank_max(const dense_job *job) {
    int32_t most = 0;
    for (int32_t i = 0; i < job->n_slot; i++)
        most = job->slot[i].rank > most ? job->slot[i].rank : most;
    return most;
}

/* Outputs and 16s of tokens of a tile of y; alone: one block an SM, with all of its shared memory. */
typedef struct stream_plan {
    int32_t outs, boxes, alone;
} stream_plan;

/* What the tiles need of a job; end_t and end_y are set by the caller. */
static int set_map(const dense_state *state, stream_map *map, stream_slot *slot, const dense_job *job, stream_plan plan, int32_t first_slot) {
    dense_fill_map(map, job, first_slot);
    map->t_tiles = (int32_t)bi_ceil_div(bi_pad_rank(rank_max(job)), plan.outs);
    map->w_tiles = (int32_t)bi_ceil_div(job->n_out, plan.outs);
    int ok = dense_map(state, &map->x, dense_x_of(job), plan.boxes * STREAM_BOX) && dense_map(state, &map->x_t, dense_x_of(job), STREAM_BOX) &&
             dense_map(state, &map->w, dense_w_of(job), plan.outs);
    for (int i = 0; ok && i < job->n_slot; i++) {
        const dense_slot *from = &job->slot[i];
        const dense_operand a = {from->a, from->a_ld, from->rank, job->n_head, from->a_ld, from->a_stride};
        slot[first_slot + i].at = *from;
        ok = dense_map(state, &slot[first_slot + i].a, a, plan.outs);
    }
    return ok;
}

/* Maps with few outputs first. */
static void order_of(int32_t order[STREAM_MAPS], const dense_job *job, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        int32_t at = i;
        for (; at > 0 && job[order[at - 1]].n_out > job[i].n_out; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
}

static int set_maps(const dense_state *state, stream_grid *grid, stream_map *map, stream_slot *slot, const dense_job *job, int32_t n,
                    stream_plan plan) {
    int32_t order[STREAM_MAPS], first_slot = 0;
    order_of(order, job, n);
    for (int32_t i = 0; i < n; i++) {
        const dense_job *from = &job[order[i]];
        if (!set_map(state, &map[i], slot, from, plan, first_slot))
            return 0;
        const int32_t n_y = from->n_head * map[i].w_tiles * grid->token_tiles;
        first_slot += from->n_slot;
        grid->n_t += from->n_head * from->n_slot * map[i].t_tiles * grid->token_boxes;
        grid->n_y += n_y;
        grid->n_wait += from->n_slot ? n_y : 0;
        map[i].end_t = grid->n_t;
        map[i].end_y = grid->n_y;
    }
    return 1;
}

/* The launch may start before the one ahead of it ends. */
template <class ARGS> static br_status launch(bi_ctx *ctx, void (*kernel)(const ARGS), const ARGS &args, int alone) {
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    const int n_tile = args.grid.n_t + args.grid.n_y, at_once = ctx->n_sm * (alone ? 1 : 2);
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(n_tile < at_once ? n_tile : at_once));
    config.blockDim = dim3(STREAM_THREADS);
    config.dynamicSmemBytes = (size_t)(alone ? STREAM_RING_ONE : STREAM_RING_TWO) + WGMMA_ATOM;
    config.stream = ctx->stream;
    config.attrs = &early;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, args);
    return bi_cuda_launched(ctx, BI_K_linear_small, "linear");
}

/* Tiles of y, and of T, of all maps. */
static int64_t tiles_of(const dense_job *job, int32_t n, int32_t outs, int with_t) {
    int64_t tiles = 0;
    for (int32_t m = 0; m < n; m++) {
        const int64_t t_tiles = bi_ceil_div(bi_pad_rank(rank_max(&job[m])), outs) * bi_ceil_div(job[m].n_row, STREAM_BOX);
        tiles += job[m].n_head * (bi_ceil_div(job[m].n_out, outs) + (with_t ? job[m].n_slot * t_tiles : 0));
    }
    return tiles;
}

/* Tiles of T that run, as if all tokens had one of the adapters: a few of them too many would cost a round. Not counted for up to 16
 * tokens, where they are one a map and the plan without them is the faster one: measured. */
static int64_t t_tiles_of(const dense_job *job, int32_t n, int32_t outs) {
    int64_t tiles = 0;
    for (int32_t m = 0; m < n; m++)
        if (job[m].n_slot && job[m].n_head == 1 && job[m].n_row > STREAM_BOX)
            tiles += bi_ceil_div(bi_pad_rank(rank_max(&job[m])), outs) * bi_ceil_div(job[m].n_row, STREAM_BOX);
    return tiles;
}

/* The fewest outputs in the rounds of tiles an SM takes; of equals the smaller tile, down to 48 outputs and four tiles an SM. More
 * than 128 outputs leave too few stages. Measured on the ten shapes of the layer at 1, 16, 64 rows; so is when a block had better
 * be alone. */
static stream_plan plan_of(const bi_ctx *ctx, const dense_job *job, int32_t n) {
    stream_plan plan = {0, (int32_t)bi_ceil_div(job->n_row, STREAM_BOX), 0};
    int64_t least = INT64_MAX;
    for (int i = N_FORM - 1; i >= 0; i--) {
        const int32_t outs = FORM[i].outs;
        const int64_t tiles = tiles_of(job, n, outs, 0) + t_tiles_of(job, n, outs), cost = bi_ceil_div(tiles, ctx->n_sm) * outs;
        if (cost < least || (cost == least && outs >= 48 && tiles <= 4 * ctx->n_sm)) {
            least = cost;
            plan.outs = outs;
        }
    }
    plan.alone = plan.boxes > 2 && tiles_of(job, n, plan.outs, 1) <= ctx->n_sm;
    return plan;
}

static const stream_form *form_of(int32_t outs) {
    const stream_form *form = FORM;
    while (form->outs != outs)
        form++;
    return form;
}

static stream_grid grid_of(const dense_state *state, const dense_job *job, stream_plan plan) {
    const int32_t room = plan.alone ? STREAM_RING_ONE : STREAM_RING_TWO, columns = STREAM_BLOCKS(plan.outs / 8) * STREAM_ROW;
    stream_grid grid;
    memset(&grid, 0, sizeof grid);
    grid.boxes = plan.boxes;
    grid.token_tiles = (int32_t)bi_ceil_div(job->n_row, plan.boxes * STREAM_BOX);
    grid.token_boxes = (int32_t)bi_ceil_div(job->n_row, STREAM_BOX);
    grid.stages = room / ((plan.boxes * STREAM_BOX + plan.outs) * columns);
    grid.stages = grid.stages > STREAM_STAGES ? STREAM_STAGES : grid.stages;
    grid.once = grid.token_tiles == 1;
    grid.arrived = state->arrived;
    return grid;
}

template <class ARGS>
static br_status run(bi_ctx *ctx, void (*kernel)(const ARGS), const dense_job *job, int32_t n, stream_plan plan, int *done) {
    const dense_state *state = (const dense_state *)ctx->dense;
    ARGS args;
    args.grid = grid_of(state, job, plan);
    *done = set_maps(state, &args.grid, args.map, args.slot, job, n, plan);
    return *done ? launch(ctx, kernel, args, plan.alone) : BR_OK;
}

br_status bi_dense_stream(bi_ctx *ctx, const dense_job *job, int32_t n, int *done) {
    const stream_plan plan = plan_of(ctx, job, n);
    const stream_form *form = form_of(plan.outs);
    int32_t n_slot = 0;
    for (int32_t i = 0; i < n; i++)
        n_slot += job[i].n_slot;
    *done = 0;
    if (n > STREAM_MAPS || n_slot > STREAM_SLOTS)
        return BR_OK;
    if (n == 1 && n_slot == 0)
        return run(ctx, form->plain, job, n, plan, done);
    return run(ctx, form->group, job, n, plan, done);
}
