/* bi_experts_few: the grouped products of MXFP4 experts with few places, bound by the bytes of the weights.
 *                                                                       Contract: N-MOE-1, N-CHAIN, N-LORA, N-FP4, N-ACT
 *
 * Grid: three blocks of 256 threads an SM, each a run of neighbouring items (tile, slab of 128 or 256 outputs), so that a tile's
 * places change rarely. Shared memory: the rows of the tile's up to eight places over all k. A warp is alone with 16 outputs of two
 * maps, or 32 of one: its codes come from memory straight into the registers of its A fragments, FEW_AHEAD chunks of 64 k
 * ahead, across items; no barrier but where the tile changes. T may still be made while the first item is multiplied. Order of an
 * output: k ascending in blocks of 16 by mma.sync, then the k-blocks of its row's adapter (N-CHAIN). */
#ifndef BI_EXPERTS_FEW_CUH
#define BI_EXPERTS_FEW_CUH

#include "bi_experts_product.cuh"

enum { FEW_THREADS = 256, FEW_BLOCKS = 3, FEW_AHEAD = 2, FEW_CHUNK_BYTES = EXPERTS_FEW_MAX * EXPERTS_K * 2 };

/* A warp's codes and scales of one chunk of k. */
typedef struct few_chunk {
    uint4 code[2];
    uint32_t scales[2];
} few_chunk;

/* Where a thread's codes and scales of FEW_AHEAD chunks begin, of which the first n are there. */
typedef struct few_from {
    const unsigned char *code[2], *scale[2];
    int32_t n;
} few_from;

static __device__ __forceinline__ void few_item(const experts_product &p, int32_t i, pipe_item &item) {
    const int4 raw = *reinterpret_cast<const int4 *>(experts_few_tile(p.plan, i / p.n_part));
    item.tile.expert = raw.x;
    item.tile.begin = raw.y;
    item.tile.n = raw.z;
    item.tile.slots = (uint32_t)raw.w;
    item.slot = 0;
    item.slab = i % p.n_part;
}

/* Asks for the warp's rows of B of the tile's adapters: they are in the L2 when the chains of item i are through. */
template <experts_kind KIND> static __device__ __forceinline__ void few_foresee(const experts_product &p, const multiplier &me, int32_t i) {
    pipe_item item;
    few_item(p, i, item);
    const int sub = (int)me.group * 2 + (int)(me.lane / 16), map = sub_map<KIND>(sub);
    const int32_t row = sub_row<KIND>(item.slab, sub) + (int32_t)(me.warp * 16 + me.lane % 16);
    if (row >= p.n_out)
        return;
    for (uint32_t slots = item.tile.slots; slots; slots &= slots - 1) {
        const experts_side &side = p.side[map][__ffs((int)slots) - 1];
        const int32_t bytes = pad16(side.rank) * (int32_t)sizeof(bi_bf16);
        const unsigned char *b = side.data + side.stride * (size_t)item.tile.expert + (size_t)row * (size_t)bytes;
        for (int32_t at = 0; at < bytes; at += 128)
            asm volatile("prefetch.global.L2 [%0];\n" ::"l"(b + at));
    }
}

/* The first chunks of an item; a part without outputs reads those of another. */
template <experts_kind KIND>
static __device__ __forceinline__ void few_point(const experts_product &p, const multiplier &me, int32_t i, int32_t n_chunk, few_from &from) {
    pipe_item item;
    few_item(p, i, item);
    from.n = n_chunk;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int sub = (int)me.group * 2 + m;
        const unsigned char *block = fp4_blocks<KIND>(p, item, sub_used<KIND>(p, item, sub) ? sub : KIND == EXPERTS_DOWN ? 0 : m);
        from.code[m] = block + (me.warp * 32 + me.lane) * 16;
        from.scale[m] = block + EXPERTS_FP4_CODES + (me.warp * 8 + (me.lane >> 2)) * 4;
    }
}

static __device__ __forceinline__ uint4 load_once16(const unsigned char *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
static __device__ __forceinline__ uint32_t load_once4(const unsigned char *at) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];\n" : "=r"(v) : "l"(at));
    return v;
}

/* Asks for chunk j of those that begin at `from`. */
static __device__ __forceinline__ void few_ask(const few_from &from, int j, few_chunk &c) {
    if (j >= from.n)
        return;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        c.code[m] = load_once16(from.code[m] + j * EXPERTS_FP4_BLOCK);
        c.scales[m] = load_once4(from.scale[m] + j * EXPERTS_FP4_BLOCK);
    }
}

/* The rows of the tile: of each 32 k, a thread's B fragments of two k-blocks are 16 bytes. */
static __device__ __forceinline__ void few_rows(const experts_product &p, const experts_tile &tile, uint32_t rows, int32_t n_chunk) {
    for (int32_t place = 0; place < tile.n; place++) {
        const int32_t source = p.gather ? p.plan.row[tile.begin + place] : tile.begin + place;
        const bi_bf16 *in = p.in + (int64_t)source * p.in_ld;
        for (int32_t piece = (int32_t)threadIdx.x; piece < n_chunk * (EXPERTS_K / 8); piece += FEW_THREADS) {
            uint32_t word[4] = {0, 0, 0, 0};
            if (p.in_aligned && piece * 8 < p.n_in) {
                const uint4 raw = *reinterpret_cast<const uint4 *>(in + piece * 8);
                word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
            } else if (!p.in_aligned) {
                for (int i = 0; i < 8; i++)
                    if (piece * 8 + i < p.n_in)
                        word[i >> 1] |= (uint32_t)in[piece * 8 + i] << (i & 1) * 16;
            }
            const uint32_t to = rows + (uint32_t)(piece >> 2) * 512 + (uint32_t)place * 64 + (uint32_t)(piece & 3) * 4;
#pragma unroll
            for (uint32_t t = 0; t < 4; t++)
                asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to + t * 16), "r"(word[t]) : "memory");
        }
    }
}

/* One chunk: four k-blocks of both parts; rows: of this lane. */
static __device__ __forceinline__ void few_multiply(const experts_spread &by, const few_chunk &c, uint32_t rows, bool wide, float (&acc)[2][4]) {
    fp4_stage s;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        s.word[m][0] = c.code[m].x, s.word[m][1] = c.code[m].y, s.word[m][2] = c.code[m].z, s.word[m][3] = c.code[m].w;
        s.scales[m] = c.scales[m];
    }
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        uint32_t b[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(rows + (uint32_t)pair * 512));
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint32_t a[4];
                fp4_fragment(by, s, m, pair * 2 + i, wide, a);
                bi_cuda_mma16(acc[m], a, b + 2 * i);
            }
    }
}

/* Two elements in a row of a bf16 matrix, or zeros. */
static __device__ __forceinline__ uint32_t few_two(const bi_bf16 *row, int32_t k, bool real) {
    return real ? *reinterpret_cast<const uint32_t *>(row + k) : 0u;
}

/* The k-blocks of one adapter. Rows of others keep their accumulators, whatever B holds. */
template <experts_kind KIND>
static __device__ __forceinline__ void few_side(const experts_product &p, const pipe_item &item, const multiplier &me, int32_t slot,
                                                float (&acc)[2][4]) {
    const int32_t g = (int32_t)(me.lane >> 2), t = (int32_t)(me.lane & 3) * 2;
    const int32_t *slot_of = p.plan.slot + item.tile.begin;
    const bool mine = g < item.tile.n && slot_of[g] == slot;
    const bool own[2] = {t < item.tile.n && slot_of[t] == slot, t + 1 < item.tile.n && slot_of[t + 1] == slot};
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int sub = (int)me.group * 2 + m, map = sub_map<KIND>(sub);
        const experts_side &side = p.side[map][slot];
        const int32_t ld = pad16(side.rank), row = sub_row<KIND>(item.slab, sub) + (int32_t)me.warp * 16;
        const int32_t row0 = row + bi_experts_row(g), row8 = row + bi_experts_row(g + 8);
        const bi_bf16 *b = reinterpret_cast<const bi_bf16 *>(side.data + side.stride * (size_t)item.tile.expert);
        const bi_bf16 *x = p.t[map] + (int64_t)(item.tile.begin + g) * p.t_ld;
#pragma unroll 2
        for (int32_t k = t; k < ld; k += BI_MMA_K) {
            const uint32_t a[4] = {few_two(b + (int64_t)row0 * ld, k, row0 < p.n_out), few_two(b + (int64_t)row8 * ld, k, row8 < p.n_out),
                                   few_two(b + (int64_t)row0 * ld, k + 8, row0 < p.n_out), few_two(b + (int64_t)row8 * ld, k + 8, row8 < p.n_out)};
            const uint32_t in[2] = {few_two(x, k, mine), few_two(x, k + 8, mine)};
            float next[4] = {acc[m][0], acc[m][1], acc[m][2], acc[m][3]};
            bi_cuda_mma16(next, a, in);
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][i] = own[i & 1] ? next[i] : acc[m][i];
        }
    }
}

/* The main loop of item i from the chunks already asked for; at its end it asks for the first of the next item below `end`. */
template <experts_kind KIND>
static __device__ __forceinline__ void few_chain(const experts_product &p, int32_t i, int32_t end, const multiplier &me, int32_t n_chunk,
                                                 uint32_t rows, few_from &from, few_chunk (&ahead)[FEW_AHEAD], float (&acc)[2][4]) {
    rows += me.lane * 16;
#pragma unroll 1
    for (int32_t left = n_chunk; left > 0; left -= FEW_AHEAD) {
        from.n = left - FEW_AHEAD;
        if (left > FEW_AHEAD) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                from.code[m] += FEW_AHEAD * EXPERTS_FP4_BLOCK;
                from.scale[m] += FEW_AHEAD * EXPERTS_FP4_BLOCK;
            }
        } else {
            few_point<KIND>(p, me, i + (i + 1 < end), n_chunk, from);
        }
#pragma unroll
        for (int j = 0; j < FEW_AHEAD; j++) {
            if (j < left) {
                if (!__any_sync(0xffffffffu, ((ahead[j].scales[0] | ahead[j].scales[1]) & 0x80808080u) != 0))
                    few_multiply(p.spread, ahead[j], rows + (uint32_t)j * FEW_CHUNK_BYTES, false, acc);
                else
                    few_multiply(p.spread, ahead[j], rows + (uint32_t)j * FEW_CHUNK_BYTES, true, acc);
            }
            few_ask(from, j, ahead[j]);
        }
        rows += FEW_AHEAD * FEW_CHUNK_BYTES;
    }
}

/* Adapters and results of item i. */
template <experts_kind KIND>
static __device__ __forceinline__ void few_finish(const experts_product &p, int32_t i, const multiplier &me, float (&acc)[2][4]) {
    pipe_item item;
    few_item(p, i, item);
    for (uint32_t slots = item.tile.slots; slots; slots &= slots - 1)
        few_side<KIND>(p, item, me, __ffs((int)slots) - 1, acc);
    if (KIND != EXPERTS_UP || sub_used<KIND>(p, item, (int)me.group * 2))
        finish8<KIND, false>(p, item, me, 0, pair_at<KIND>(p, item, me, 0), acc[0], acc[1]);
}

template <experts_kind KIND>
static __global__ void __launch_bounds__(FEW_THREADS, FEW_BLOCKS) few_kernel(const __grid_constant__ experts_product p) {
    bool waits = p.has_t; /* for T: its launch awaits before another starts, and the first of many tiles behind it is plain: all else is there */
    if (!waits)
        bi_cuda_begin();
    extern __shared__ __align__(1024) unsigned char memory[];
    const multiplier me = {threadIdx.x / 128, threadIdx.x / 32 % 4, threadIdx.x % 32};
    const uint32_t rows = (uint32_t)__cvta_generic_to_shared(memory);
    const int32_t n_chunk = (p.n_in + EXPERTS_K - 1) / EXPERTS_K;
    const int64_t n_item = (int64_t)p.plan.n_tile[1] * p.n_part;
    int32_t i = (int32_t)(n_item * blockIdx.x / gridDim.x);
    const int32_t end = (int32_t)(n_item * (blockIdx.x + 1) / gridDim.x);
    if (i >= end) {
        bi_cuda_await_before();
        return;
    }
    few_chunk ahead[FEW_AHEAD];
    few_from from;
    few_point<KIND>(p, me, i, n_chunk, from);
#pragma unroll
    for (int j = 0; j < FEW_AHEAD; j++)
        few_ask(from, j, ahead[j]);
#pragma unroll 1
    for (bool fresh = true; i < end; i++) {
        if (fresh || i % p.n_part == 0) {
            __syncthreads();
            few_rows(p, *experts_few_tile(p.plan, i / p.n_part), rows, n_chunk);
            __syncthreads();
            fresh = false;
        }
        if (p.has_t)
            few_foresee<KIND>(p, me, i);
        float acc[2][4] = {};
        few_chain<KIND>(p, i, end, me, n_chunk, rows, from, ahead, acc);
        if (waits)
            bi_cuda_begin();
        waits = false;
        few_finish<KIND>(p, i, me, acc);
    }
}

/* Bytes of shared memory that the rows take. */
static inline size_t few_bytes(int32_t n_in) {
    return (size_t)bi_ceil_div(n_in, EXPERTS_K) * FEW_CHUNK_BYTES;
}

template <experts_kind KIND> static br_status launch_few(bi_ctx *ctx, const experts_product *p, bi_cuda_kernel name) {
    const size_t bytes = few_bytes(p->n_in);
    cudaFuncSetAttribute(few_kernel<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, EXPERTS_FEW_SHARED);
    bi_cuda_launch(ctx, few_kernel<KIND>, (unsigned)(ctx->n_sm * FEW_BLOCKS), FEW_THREADS, bytes, *p);
    return bi_cuda_launched(ctx, name, "experts");
}

#endif
