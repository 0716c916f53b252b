/* bi_experts_wide: the grouped products of MXFP4 experts with many places, bound by the tensor cores.
 *                                                                       Contract: N-MOE-1, N-CHAIN, N-LORA, N-FP4, N-ACT
 *
 * One launch a class of tiles, so that the width of the tensor-core step is a constant: with a choice of widths in the main loop the
 * compiler does not overlap anything. Grid: one block an SM, each walking items (tile, slab of 128 or 256 outputs) blockIdx.x,
 * + gridDim.x, ... Block: two warpgroups that multiply and one that copies; shared memory: a ring of stages of 64 k, about
 * 200 KB. The rows of the tiles lie in memory as the stages have them (wide_rows_kernel, and h as the product before leaves it), so a
 * stage is five bulk copies. Weights stand on the M side, expanded in registers: the fragments of a k-block are made while the
 * tensor cores still work on the one before. Order of an output: k ascending in blocks of 16 by wgmma, then the k-blocks of its
 * row's adapter (N-CHAIN). */
#ifndef BI_EXPERTS_WIDE_CUH
#define BI_EXPERTS_WIDE_CUH

#include "bi_experts_product.cuh"

enum {
    WIDE_THREADS = 3 * 128,
    WIDE_REGISTERS_FEED = 40, /* of 168 a thread, the rest goes to the two multiplying warpgroups */
    WIDE_REGISTERS = 232,
    WIDE_WEIGHTS = PIPE_SUBS * EXPERTS_FP4_BLOCK,
    WIDE_STAGE = PIPE_ROWS_BYTES + WIDE_WEIGHTS, /* rows, weights */
    WIDE_STAGES = 7,
    WIDE_GATHER_THREADS = 256,
    WIDE_GATHER_BLOCKS = 8
};

/* The place in the ring of stages; every role walks it alike. */
typedef struct wide_ring {
    uint32_t stage, phase;
} wide_ring;

static __device__ __forceinline__ void wide_next(wide_ring &ring) {
    if (++ring.stage == WIDE_STAGES) {
        ring.stage = 0;
        ring.phase ^= 1;
    }
}

static __device__ __forceinline__ void wide_skip(wide_ring &ring, uint32_t n) {
    n += ring.stage;
    ring.stage = n % WIDE_STAGES;
    ring.phase ^= n / WIDE_STAGES & 1;
}

/* Shared-memory addresses: stages, then where a stage is full, then where it is empty. */
typedef struct wide_memory {
    uint32_t stages, bars;
} wide_memory;

static __device__ __forceinline__ uint32_t wide_full(const wide_memory &memory, uint32_t stage) {
    return memory.bars + 8 * stage;
}
static __device__ __forceinline__ uint32_t wide_empty(const wide_memory &memory, uint32_t stage) {
    return memory.bars + 8 * (WIDE_STAGES + stage);
}

/* Item i of the tiles of class c. */
static __device__ __forceinline__ pipe_item wide_item_at(const experts_product &p, int32_t c, int32_t i) {
    const int32_t at = p.plan.of_class[c * p.plan.tile_max + i / p.n_part];
    const int4 raw = *reinterpret_cast<const int4 *>(p.plan.tile + at);
    pipe_item item = {{raw.x, raw.y, raw.z, (uint32_t)raw.w}, i % p.n_part, 0, 0};
    item.row = blocked_row(item.tile, at);
    return item;
}

/* ---- rows in blocks ------------------------------------------------------------------------------------------------ */

/* The rows of each tile as its stages have them. */
static __global__ void __launch_bounds__(WIDE_GATHER_THREADS) wide_rows_kernel(const __grid_constant__ experts_product p, bi_bf16 *to) {
    const int32_t n_chunk = blocked_chunks(p.n_in), n = p.plan.n_tile[0] * n_chunk;
    for (int32_t i = (int32_t)blockIdx.x; i < n; i += (int32_t)gridDim.x) {
        const int32_t at = i / n_chunk, chunk = i % n_chunk;
        const experts_tile tile = p.plan.tile[at];
        const int32_t n8 = pad8(tile.n);
        bi_bf16 *block = to + ((int64_t)blocked_row(tile, at) * n_chunk + (int64_t)chunk * n8) * EXPERTS_K;
#pragma unroll 2
        for (int32_t piece = (int32_t)threadIdx.x; piece < n8 * 8; piece += WIDE_GATHER_THREADS) {
            const int32_t place = (piece >> 6) * 8 + (piece & 7), part = piece >> 3 & 7, k = chunk * EXPERTS_K + part * 8;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (place < tile.n && k < p.n_in) {
                const int32_t source = p.gather ? p.plan.row[tile.begin + place] : tile.begin + place;
                const bi_bf16 *row = p.in + (int64_t)source * p.in_ld;
                value = p.in_aligned ? *reinterpret_cast<const uint4 *>(row + k) : piece_slowly(row, k, p.n_in);
            }
            *reinterpret_cast<uint4 *>(block + blocked_piece(place, part)) = value;
        }
    }
}

/* ---- the copying warps --------------------------------------------------------------------------------------------- */

/* Asked anew where it is needed: there are few registers. */
static __device__ __forceinline__ uint32_t this_lane(void) {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
    return lane;
}
static __device__ __forceinline__ uint32_t this_thread(void) {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return thread;
}

/* The item's own stages, by the first copying warp: lanes 0..3 ask for the weights of the parts, lane 4 for the rows. */
template <experts_kind KIND>
static __device__ __forceinline__ void wide_feed_own(const experts_product &p, const pipe_item &item, const wide_memory &memory,
                                                     wide_ring &ring) {
    const uint32_t lane = this_lane();
    const int32_t n_chunk = blocked_chunks(p.n_in), row_bytes = pad8(item.tile.n) * EXPERTS_K * (int32_t)sizeof(bi_bf16);
    const bool asks = lane < PIPE_SUBS ? sub_used<KIND>(p, item, (int)lane) : lane == PIPE_SUBS;
    const uint32_t bytes = lane < PIPE_SUBS ? (uint32_t)EXPERTS_FP4_BLOCK : (uint32_t)row_bytes;
    const unsigned char *from = (const unsigned char *)(p.in + (int64_t)item.row * n_chunk * EXPERTS_K);
    if (lane < PIPE_SUBS && asks)
        from = fp4_blocks<KIND>(p, item, (int)lane);
    const uint32_t all = __reduce_add_sync(0xffffffffu, asks ? bytes : 0u);
#pragma unroll 1
    for (int32_t chunk = 0; chunk < n_chunk; chunk++) {
        const uint32_t full = wide_full(memory, ring.stage), to = memory.stages + ring.stage * WIDE_STAGE;
        bar_wait(wide_empty(memory, ring.stage), ring.phase ^ 1);
        if (lane == 0)
            bar_expect(full, all);
        __syncwarp();
        if (asks)
            copy_block(lane < PIPE_SUBS ? to + PIPE_ROWS_BYTES + lane * EXPERTS_FP4_BLOCK : to, from, bytes, full);
        from += bytes;
        wide_next(ring);
    }
}

static __device__ __forceinline__ void feeders_sync(void) {
    asm volatile("barrier.sync 1, 128;\n" ::: "memory");
}

/* The stages of adapters, by all four: their rows lie apart, so they are many small copies, each with an address of its own. */
template <experts_kind KIND>
static __device__ __forceinline__ void wide_feed_sides(const experts_product &p, const pipe_item &item, const wide_memory &memory,
                                                       wide_ring &ring) {
    each_side<KIND>(p, item, [&](int32_t slot, int32_t k) {
        const uint32_t thread = this_thread() - 2 * 128, to = memory.stages + ring.stage * WIDE_STAGE;
        const uint32_t own = side_own(p, item.tile, slot, thread);
        if (thread < 32) /* the others may be turns of the ring ahead, where a phase says nothing */
            bar_wait(wide_empty(memory, ring.stage), ring.phase ^ 1);
        feeders_sync();
        feed_side<KIND>(p, item, slot, k, own, thread, to + PIPE_ROWS_BYTES, to);
        asm volatile("cp.async.wait_all;\n" ::: "memory");
        proxy_fence();
        feeders_sync();
        if (thread == 0)
            bar_arrive(wide_full(memory, ring.stage));
        wide_next(ring);
    });
}

template <experts_kind KIND>
static __device__ __forceinline__ void wide_feed(const experts_product &p, int32_t c, volatile const int32_t *n_item, const wide_memory &memory,
                                                 wide_ring ring) {
    for (int32_t i = (int32_t)blockIdx.x; i < *n_item; i += (int32_t)gridDim.x) {
        const pipe_item item = wide_item_at(p, c, i);
        if (this_thread() < 2 * 128 + 32)
            wide_feed_own<KIND>(p, item, memory, ring);
        else
            wide_skip(ring, (uint32_t)blocked_chunks(p.n_in));
        wide_feed_sides<KIND>(p, item, memory, ring);
    }
}

/* ---- the multiplying warpgroups ------------------------------------------------------------------------------------ */

/* One k-block of both parts, asynchronously. */
template <int W>
static __device__ __forceinline__ void wide_block(float (&acc)[2][W / 2], const fragments &a, uint64_t rows0, uint64_t rows1) {
    wgmma_fence();
    wgmma<W>(acc[0], a[0], rows0);
    wgmma<W>(acc[1], a[1], rows1);
    wgmma_commit();
}

/* Where a scale passes 128, 2^(scale - 1) is a product of two; the fragments get the second one here. */
static __device__ __forceinline__ void wide_more(const uint32_t (&more)[2], int block, fragments &a) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint32_t more0 = fp4_power(fp4_scale(more[m], block >> 1)), more8 = fp4_power(fp4_scale(more[m], 2 + (block >> 1)));
        a[m][0] = mul_bf16x2(a[m][0], more0);
        a[m][1] = mul_bf16x2(a[m][1], more8);
        a[m][2] = mul_bf16x2(a[m][2], more0);
        a[m][3] = mul_bf16x2(a[m][3], more8);
    }
}

/* The item's own stages. The fragments of a k-block are made while the k-block before is multiplied. */
template <int W>
static __device__ __forceinline__ void wide_chain(const experts_spread &by, int32_t n, const wide_memory &memory, wide_ring &ring,
                                                  float (&acc)[2][W / 2]) {
    const multiplier me = this_multiplier();
    fragments a[2];
    uint32_t before = 0;
#pragma unroll 1
    for (int32_t i = 0; i < n; i++) {
        const uint32_t stage = memory.stages + ring.stage * WIDE_STAGE, weights = stage + PIPE_ROWS_BYTES;
        const uint64_t rows = wgmma_desc(stage, PIPE_LEAD, PIPE_GROUP);
        fp4_stage s;
        bar_wait(wide_full(memory, ring.stage), ring.phase);
        fp4_load(me, weights, s);
        uint32_t more[2] = {0, 0};
        if (s.wide)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint32_t low = __vminu4(s.scales[m], 0x80808080u);
                more[m] = s.scales[m] - low;
                s.scales[m] = low;
            }
#pragma unroll
        for (int block = 0; block < EXPERTS_K / BI_MMA_K; block++) {
            wgmma_wait<1>();
            if (block == 1 && i > 0)
                release(me, before);
            fragments &now = a[block & 1];
            fp4_fragment(by, s, 0, block, false, now[0]);
            fp4_fragment(by, s, 1, block, false, now[1]);
            if (s.wide)
                wide_more(more, block, now);
            const uint64_t at = rows + (uint64_t)(block * 2 * PIPE_LEAD >> 4);
            wide_block<W>(acc, now, at, at);
        }
        before = wide_empty(memory, ring.stage);
        wide_next(ring);
    }
    wgmma_wait<0>();
    release(me, before);
}

/* The k-blocks of adapters. A warp whose B is wild gives zeros to the step that all four share, and does its own afterwards. */
template <experts_kind KIND, int W>
static __device__ __forceinline__ void wide_sides(const experts_product &p, const pipe_item &item, const wide_memory &memory, wide_ring &ring,
                                                  float (&acc)[2][W / 2]) {
    const multiplier me = this_multiplier();
    const int32_t n = side_stages<KIND>(p, item);
#pragma unroll 1
    for (int32_t i = 0; i < n; i++) {
        const uint32_t rows = memory.stages + ring.stage * WIDE_STAGE, weights = rows + PIPE_ROWS_BYTES;
        const uint32_t rows1 = rows + (side_maps<KIND>() == 2 ? (uint32_t)PIPE_ROWS_SIDE : 0u);
        bar_wait(wide_full(memory, ring.stage), ring.phase);
        fragments b, one;
        side_fragments(me, weights, b);
        const bool wild = side_is_wild(b);
#pragma unroll
        for (int k = 0; k < 8; k++)
            one[k >> 2][k & 3] = wild ? 0 : b[k >> 2][k & 3];
        wide_block<W>(acc, one, wgmma_desc(rows, PIPE_LEAD, PIPE_GROUP_SIDE), wgmma_desc(rows1, PIPE_LEAD, PIPE_GROUP_SIDE));
        wgmma_wait<0>();
        if (wild)
            multiply_own<W>(p, item, me, side_slot<KIND>(p, item, i), acc, b, rows, rows1);
        release(me, wide_empty(memory, ring.stage));
        wide_next(ring);
    }
}

template <experts_kind KIND, int W>
static __device__ __forceinline__ void wide_item(const experts_product &p, const pipe_item &item, const wide_memory &memory, wide_ring &ring) {
    const int32_t n = blocked_chunks(p.n_in);
    const multiplier me = this_multiplier();
    if (!sub_used<KIND>(p, item, (int)me.group * 2) && !sub_used<KIND>(p, item, (int)me.group * 2 + 1)) {
        for (int32_t left = n + side_stages<KIND>(p, item); left > 0; left--) {
            bar_wait(wide_full(memory, ring.stage), ring.phase);
            release(me, wide_empty(memory, ring.stage));
            wide_next(ring);
        }
        return;
    }
    float acc[2][W / 2];
#pragma unroll
    for (int i = 0; i < W / 2; i++)
        acc[0][i] = acc[1][i] = 0.0f;
    pin(acc);
    wide_chain<W>(p.spread, n, memory, ring, acc);
    pin(acc);
    if (side_maps<KIND>() && item.tile.slots)
        wide_sides<KIND, W>(p, item, memory, ring, acc);
    pin(acc);
    finish<KIND, W, true>(p, item, this_multiplier(), acc);
}

/* CLASS: of the tiles. The launch for the next class begins on an SM when this one's block leaves it, and ends after this one. */
template <experts_kind KIND, int CLASS>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) wide_kernel(const __grid_constant__ experts_product p) {
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ uint64_t bars[2 * WIDE_STAGES];
    __shared__ int32_t n_item; /* no register is kept for it */
    const wide_memory memory = {(uint32_t)__cvta_generic_to_shared(stages), (uint32_t)__cvta_generic_to_shared(bars)};
    wide_ring ring = {0, 0};
    bi_cuda_let_next_start();
    if (threadIdx.x == 0) {
        n_item = p.plan.n_tile[2 + CLASS] * p.n_part;
        for (uint32_t i = 0; i < WIDE_STAGES; i++) {
            bar_init(wide_full(memory, i), 1);
            bar_init(wide_empty(memory, i), 2 * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (this_thread() >= 2 * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"((int)WIDE_REGISTERS_FEED));
        wide_feed<KIND>(p, CLASS, &n_item, memory, ring);
        bi_cuda_await_before(); /* so that this launch ends behind the one before */
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"((int)WIDE_REGISTERS));
        for (int32_t i = (int32_t)blockIdx.x; i < *(volatile int32_t *)&n_item; i += (int32_t)gridDim.x)
            wide_item<KIND, class_places(CLASS)>(p, wide_item_at(p, CLASS, i), memory, ring);
    }
}

/* together: beside the launch before it, whose tiles are others. */
template <experts_kind KIND, int CLASS>
static br_status launch_class(bi_ctx *ctx, const experts_product *p, bool together, bi_cuda_kernel name) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)ctx->n_sm);
    launch.blockDim = dim3(WIDE_THREADS);
    launch.dynamicSmemBytes = (size_t)WIDE_STAGES * WIDE_STAGE;
    launch.stream = ctx->stream;
    launch.attrs = &early;
    launch.numAttrs = together ? 1 : 0;
    cudaFuncSetAttribute(wide_kernel<KIND, CLASS>, cudaFuncAttributeMaxDynamicSharedMemorySize, WIDE_STAGES * WIDE_STAGE);
    cudaLaunchKernelEx(&launch, wide_kernel<KIND, CLASS>, *p);
    return bi_cuda_launched(ctx, name, "experts");
}

/* The classes that tiles of at most n_row places can have, the widest first. */
template <experts_kind KIND, int CLASS = 0>
static br_status launch_wide(bi_ctx *ctx, const experts_product *p, int32_t n_row, bi_cuda_kernel name, bool together = false) {
    if constexpr (CLASS == EXPERTS_CLASSES) {
        return BR_OK;
    } else {
        const bool can = CLASS + 1 == EXPERTS_CLASSES || n_row > class_places(CLASS + 1);
        if (can)
            BR_TRY((launch_class<KIND, CLASS>(ctx, p, together, name)));
        return launch_wide<KIND, CLASS + 1>(ctx, p, n_row, name, together || can);
    }
}

#endif
