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
#include "bi_linear_out.cuh"
#include "bi_linear_wgmma.cuh"

#include <cuda.h>

enum {
    STREAM_K = 64,               /* columns of a block: of 1 or 2 blocks is a stage */
    STREAM_ROW = 2 * STREAM_K,
    STREAM_BOX = 16,             /* tokens of a warp */
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
    int32_t stages, blocks;      /* blocks: of STREAM_K columns in a stage */
    int32_t whole;               /* n_in is whole blocks, and one copy takes all of a stage */
    int32_t early;
    int32_t wide, once;          /* wide: y takes 16 bytes at a time; once: no tile shares its weights with another */
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

/* Whether a tile of T has a row of the slot. */
static __device__ __forceinline__ bool has_slot(const dense_job &job, const stream_tile &tile) {
    bool any = false;
    for (int32_t i = 0; i < STREAM_BOX; i++)
        any |= dense_slot_of(job, tile.token + i) == job.slot[tile.slot].slot;
    return any;
}

/* The ring as one warp goes round it. */
typedef struct stream_ring {
    uint32_t x, w, full, empty; /* shared-memory addresses; barrier i is 8 i behind */
    int32_t x_block, w_block;   /* bytes; a stage is grid.blocks of each */
    int32_t at;
    uint32_t phase;
} stream_ring;

static __device__ __forceinline__ void step_on(stream_ring &ring, int32_t stages) {
    if (++ring.at == stages) {
        ring.at = 0;
        ring.phase ^= 1;
    }
}

/* Where a copy of blocks from block b of the columns on starts. */
static __device__ __forceinline__ void place_of(int32_t at[4], const stream_args &a, int32_t b, int32_t row, int32_t head) {
    at[0] = a.grid.whole ? 0 : b * STREAM_K;
    at[1] = row;
    at[2] = a.grid.whole ? b : 0;
    at[3] = head;
}

static __device__ __forceinline__ void fill_stage(const stream_args &a, const stream_ring &ring, const stream_tile &tile, int32_t block, uint32_t leader) {
    const bool is_t = tile.slot >= 0;
    const CUtensorMap *x = is_t ? &a.maps.x_t : &a.maps.x, *w = is_t ? &a.maps.a[tile.slot] : &a.maps.w;
    const int32_t x_block = is_t ? STREAM_BOX * STREAM_ROW : ring.x_block, copies = a.grid.whole ? 1 : a.grid.blocks;
    const uint32_t full = ring.full + 8 * (uint32_t)ring.at;
    const uint64_t once = stream_policy(!is_t && a.grid.once), usual = stream_policy(false);
    stream_expect(full, a.grid.blocks * (x_block + ring.w_block), leader);
    for (int32_t i = 0; i < copies; i++) {
        int32_t at[4];
        place_of(at, a, block + i, tile.out, tile.head);
        stream_copy(ring.w + (uint32_t)((ring.at * a.grid.blocks + i) * ring.w_block), w, at, full, once, leader);
        at[1] = tile.token;
        stream_copy(ring.x + (uint32_t)(ring.at * a.grid.blocks * ring.x_block + i * x_block), x, at, full, usual, leader);
    }
}

/* Weights of the first stages, while the launch before still runs. */
static __device__ __forceinline__ void prefetch(const stream_args &a, int32_t n_out, uint32_t leader) {
    const stream_tile tile = tile_of(a, (int32_t)blockIdx.x, n_out);
    const int32_t step = a.grid.whole ? a.grid.blocks : 1;
    for (int32_t block = 0; tile.slot < 0 && block < a.grid.stages * a.grid.blocks && block * STREAM_K < a.job.n_in; block += step) {
        int32_t at[4];
        place_of(at, a, block, tile.out, tile.head);
        stream_prefetch(&a.maps.w, at, leader);
    }
}

static __device__ void produce(const stream_args &a, stream_ring ring, int32_t n_out) {
    const uint32_t leader = stream_leader();
    if (a.grid.early)
        prefetch(a, n_out, leader);
    stream_await_before();
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, n_out);
        if (tile.slot >= 0 && (tile.out >= a.job.slot[tile.slot].rank || !has_slot(a.job, tile)))
            continue;
        for (int32_t block = 0; block * STREAM_K < a.job.n_in; block += a.grid.blocks) {
            stream_wait(ring.empty + 8 * (uint32_t)ring.at, ring.phase ^ 1);
            fill_stage(a, ring, tile, block, leader);
            step_on(ring, a.grid.stages);
        }
    }
    stream_let_next_start();
}

template <int NT> static __device__ __forceinline__ void clear(float (&acc)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
}

/* Blocks of columns in a stage of tiles of 8 n8 outputs: long stages where the tensor cores would wait for the loop. */
#define STREAM_BLOCKS(n8) ((n8) <= 12 ? 2 : 1)

/* The chains over all of K, one stage in the tensor cores while the next is awaited. */
template <int N8, int PARTS>
static __device__ __forceinline__ void chain(const stream_args &a, stream_ring &ring, int32_t x_block, float (&acc)[N8 * PARTS][4]) {
    constexpr int BLOCKS = STREAM_BLOCKS(N8 * PARTS);
    const int32_t n_stage = (a.job.n_in + STREAM_K * BLOCKS - 1) / (STREAM_K * BLOCKS);
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
        step_on(ring, a.grid.stages);
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
        if (dense_slot_of(job, token) != slot.slot)
            continue;
        bi_bf16 *t = job.t + tile.head * job.t_head_ld + (int64_t)token * job.t_ld;
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

template <int N8, int PARTS> static __device__ void consume(const stream_args &a, stream_ring ring) {
    for (int32_t b = (int32_t)blockIdx.x; b < a.grid.n_t + a.grid.n_y; b += (int32_t)gridDim.x) {
        const stream_tile tile = tile_of(a, b, N8 * PARTS * 8);
        float acc[N8 * PARTS][4];
        if (tile.slot >= 0) {
            if (has_slot(a.job, tile)) {
                if (tile.out < a.job.slot[tile.slot].rank)
                    chain<N8, PARTS>(a, ring, STREAM_BOX * STREAM_ROW, acc);
                else
                    clear(acc);
                store_t(a.job, tile, acc);
            }
            arrive(a.job);
            continue;
        }
        chain<N8, PARTS>(a, ring, ring.x_block, acc);
        if (a.job.n_slot)
            await(a);
        if ((int32_t)(threadIdx.x >> 5) >= a.grid.boxes)
            continue; /* a warp without tokens */
        const dense_place place = {tile.head, tile.token + (int32_t)(threadIdx.x >> 5) * STREAM_BOX, tile.out};
        for (int32_t i = 0; i < a.job.n_slot; i++)
            dense_continue(a.job, place, a.job.slot[i], acc);
        dense_store(a.job, place, a.grid.wide, acc);
    }
}

template <int N8, int PARTS> static __global__ void __launch_bounds__(STREAM_THREADS) stream_kernel(const __grid_constant__ stream_args a) {
    extern __shared__ unsigned char stream_memory[];
    __shared__ uint64_t barrier[2 * STREAM_STAGES];
    stream_ring ring;
    const uint32_t base = ((uint32_t)__cvta_generic_to_shared(stream_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    ring.x_block = a.grid.boxes * STREAM_BOX * STREAM_ROW;
    ring.w_block = N8 * PARTS * 8 * STREAM_ROW;
    ring.x = base;
    ring.w = base + (uint32_t)(a.grid.stages * a.grid.blocks * ring.x_block);
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
        produce(a, ring, N8 * PARTS * 8);
        return;
    }
    stream_await_before();
    consume<N8, PARTS>(a, ring);
}

/* ---- the host's side -------------------------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

typedef struct stream_form {
    void (*kernel)(const stream_args);
    int outs;
} stream_form;

#define STREAM_FORM(n8, parts) {stream_kernel<n8, parts>, n8 * parts * 8}
static const stream_form FORM[] = {
    STREAM_FORM(1, 1), STREAM_FORM(2, 1), STREAM_FORM(3, 1), STREAM_FORM(4, 1),  STREAM_FORM(5, 1), STREAM_FORM(6, 1),  STREAM_FORM(7, 1), STREAM_FORM(8, 1),
    STREAM_FORM(10, 1), STREAM_FORM(12, 1), STREAM_FORM(7, 2), STREAM_FORM(8, 2), STREAM_FORM(10, 2), STREAM_FORM(11, 2), STREAM_FORM(12, 2),
};
enum { N_FORM = sizeof FORM / sizeof FORM[0] };

br_status bi_dense_stream_open(dense_state *state) {
    cudaDriverEntryPointQueryResult found;
    for (int i = 0; i < N_FORM; i++)
        if (cudaFuncSetAttribute((const void *)FORM[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STREAM_RING_ONE + WGMMA_ATOM) != cudaSuccess)
            return br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", STREAM_RING_ONE + WGMMA_ATOM);
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &state->encode, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        state->encode = NULL;
    cudaGetLastError(); /* without it the other forms do all */
    return BR_OK;
}

/* n_head matrices of n_row rows, n_k elements each, ld and head_ld elements apart; boxes of box_rows rows and, where n_k is whole
 * blocks, of `blocks` blocks of columns behind each other. */
typedef struct stream_operand {
    const bi_bf16 *base;
    int32_t n_k, n_row, n_head;
    int64_t ld, head_ld;
} stream_operand;

static int map_of(const dense_state *state, const stream_grid *grid, CUtensorMap *map, stream_operand m, int32_t box_rows) {
    const cuuint64_t bytes = sizeof *m.base, n_k = (cuuint64_t)m.n_k, column = STREAM_K;
    const int whole = grid->whole;
    const cuuint64_t size[4] = {whole ? column : n_k, (cuuint64_t)m.n_row, whole ? n_k / column : 1, (cuuint64_t)m.n_head};
    const cuuint64_t stride[3] = {(cuuint64_t)m.ld * bytes, STREAM_ROW, (cuuint64_t)(m.n_head > 1 ? m.head_ld : m.ld) * bytes};
    const cuuint32_t box[4] = {STREAM_K, (cuuint32_t)box_rows, whole ? (cuuint32_t)grid->blocks : 1, 1}, step[4] = {1, 1, 1, 1};
    return ((encode_fn)state->encode)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)(uintptr_t)m.base, size, stride, box, step,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static int set_maps(const dense_state *state, stream_args *args, int32_t n_out) {
    const dense_job *job = &args->job;
    const stream_grid *grid = &args->grid;
    stream_maps *maps = &args->maps;
    const stream_operand x = {job->x, job->n_in, job->n_row, job->n_head, job->x_ld, job->x_head_ld};
    int ok = map_of(state, grid, &maps->x, x, grid->boxes * STREAM_BOX) && map_of(state, grid, &maps->x_t, x, STREAM_BOX) &&
             map_of(state, grid, &maps->w, stream_operand{job->w, job->w_ld, job->n_out, job->n_head, job->w_ld, job->w_stride}, n_out);
    for (int i = 0; ok && i < job->n_slot; i++) {
        const dense_slot *slot = &job->slot[i];
        ok = map_of(state, grid, &maps->a[i], stream_operand{slot->a, slot->a_ld, slot->rank, job->n_head, slot->a_ld, slot->a_stride}, n_out);
    }
    return ok;
}

static int32_t rank_max(const dense_job *job) {
    int32_t most = 0;
    for (int32_t i = 0; i < job->n_slot; i++)
        most = job->slot[i].rank > most ? job->slot[i].rank : most;
    return most;
}

static const stream_form *form_of(int32_t outs) {
    for (int i = 0; i < N_FORM; i++)
        if (FORM[i].outs == outs)
            return &FORM[i];
    return NULL;
}

/* The launch may start before the one ahead of it ends. */
static br_status launch(bi_ctx *ctx, const stream_form *form, const stream_args *args, int n_block, int shared) {
    cudaLaunchAttribute early;
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)n_block);
    config.blockDim = dim3(STREAM_THREADS);
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = ctx->stream;
    config.attrs = &early;
    config.numAttrs = args->grid.early ? 1 : 0;
    cudaLaunchKernelEx(&config, form->kernel, *args);
    return bi_cuda_launched(ctx, BI_K_linear_small, "linear");
}

br_status bi_dense_stream_plan(bi_ctx *ctx, const dense_job *job, dense_stream_plan plan, int *done) {
    const dense_state *state = (const dense_state *)ctx->dense;
    const stream_form *form = form_of(plan.outs);
    const int32_t room = plan.alone ? STREAM_RING_ONE : STREAM_RING_TWO;
    stream_args args;
    args.job = *job;
    args.grid.boxes = plan.boxes;
    args.job.token_tiles = (int32_t)bi_ceil_div(job->n_row, plan.boxes * STREAM_BOX);
    args.job.w_tiles = (int32_t)bi_ceil_div(job->n_out, plan.outs);
    args.job.arrived = job->n_slot ? state->arrived : NULL;
    args.grid.t_tiles = (int32_t)bi_ceil_div(bi_pad_rank(rank_max(job)), plan.outs);
    args.grid.n_t = job->n_head * job->n_slot * args.grid.t_tiles * (int32_t)bi_ceil_div(job->n_row, STREAM_BOX);
    args.grid.n_y = job->n_head * args.job.w_tiles * args.job.token_tiles;
    args.grid.whole = job->n_in % STREAM_K == 0;
    args.grid.wide = dense_is_wide(job);
    args.grid.early = !plan.late;
    args.grid.once = args.job.token_tiles == 1;
    args.grid.blocks = STREAM_BLOCKS(plan.outs / 8);
    args.grid.stages = room / ((plan.boxes * STREAM_BOX + plan.outs) * STREAM_ROW * args.grid.blocks);
    args.grid.stages = args.grid.stages > STREAM_STAGES ? STREAM_STAGES : args.grid.stages;
    *done = form && set_maps(state, &args, plan.outs);
    if (!*done)
        return BR_OK;
    const int n_tile = args.grid.n_t + args.grid.n_y, at_once = ctx->n_sm * (plan.alone ? 1 : 2);
    return launch(ctx, form, &args, n_tile < at_once ? n_tile : at_once, room + WGMMA_ATOM);
}

/* The tile that lets all tiles run at once, or in rounds that leave the fewest SMs without work. */
static dense_stream_plan plan_of(const bi_ctx *ctx, const dense_job *job) {
    dense_stream_plan plan = {0, (int32_t)bi_ceil_div(job->n_row, STREAM_BOX), 0, 0};
    int64_t least = INT64_MAX;
    for (int i = 0; i < N_FORM; i++) {
        const int64_t tiles = job->n_head * bi_ceil_div(job->n_out, FORM[i].outs), rounds = bi_ceil_div(tiles, ctx->n_sm);
        const int64_t cost = rounds * (FORM[i].outs + plan.boxes * STREAM_BOX / 4);
        if (cost <= least) {
            least = cost;
            plan.outs = FORM[i].outs;
        }
    }
    return plan;
}

br_status bi_dense_stream(bi_ctx *ctx, const dense_job *job, int *done) {
    return bi_dense_stream_plan(ctx, job, plan_of(ctx, job), done);
}
