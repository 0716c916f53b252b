/* bi_experts_product: one grouped product of bf16 experts, and T of the adapters of all; what bi_experts_few.cuh and
 * bi_experts_wide.cuh share with it.                                     Contract: N-MOE-1, N-CHAIN, N-LORA, N-ACT
 *
 * Grid: one block an SM, each walking items blockIdx.x, + gridDim.x, .. of a list made on the device. Block: two warpgroups that
 * multiply and one that copies (bi_experts_pipe.cuh), 384 threads; shared memory: a ring of stages, about 200 KB.
 * Weights stand on the M side of the tensor core, in registers, by ldmatrix. The tile's places stand on the N side in steps of 8:
 * mma.sync up to 32 places, wgmma above, two k-blocks at once, while the other warpgroup makes its fragments; both are N-MMA's
 * block. The order of an output is the stages' order: k ascending in blocks of 16, then the k-blocks of its row's adapter; a block
 * of zeros (another adapter's, or padding) returns the accumulator (N-CHAIN-1). */
#ifndef BI_EXPERTS_PRODUCT_CUH
#define BI_EXPERTS_PRODUCT_CUH

#include "bi_experts_act.cuh"
#include "bi_experts_expand.cuh"
#include "bi_experts_mma.cuh"
#include "bi_experts_pipe.cuh"

enum {
    PRODUCT_THREADS = 2 * 128 + PIPE_FEEDERS,
    PRODUCT_SYNC_MAX = 32,      /* places up to which mma.sync is used */
    PRODUCT_REGISTERS_FEED = 56, /* of 168 a thread, the rest goes to the two multiplying warpgroups */
    PRODUCT_REGISTERS = 224
};

/* ---- fragments from shared memory ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ void ldmatrix4(uint32_t from, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void ldmatrix2(uint32_t from, uint32_t (&r)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "r"(from) : "memory");
}

/* A of the thread's warp, 16 rows x 16 k, from a part of bf16 rows at `part` whose groups lie `group` bytes apart. */
static __device__ __forceinline__ void bf16_fragment(const multiplier &me, uint32_t part, uint32_t group, uint32_t (&a)[4]) {
    const uint32_t matrix = me.lane >> 3;
    ldmatrix4(part + (me.warp * 2 + (matrix & 1)) * group + (matrix >> 1) * PIPE_LEAD + (me.lane & 7) * 16, a);
}

/* acc[m] += a[m] x rows, and with TWO acc[1] += a[1] x rows1. */
template <int N, bool TWO>
static __device__ __forceinline__ void multiply_sync(const multiplier &me, float (&acc)[2][N / 2], const uint32_t (&a)[2][4], uint32_t rows,
                                                     uint32_t rows1, uint32_t group) {
    const uint32_t lane = (me.lane >> 3 & 1) * PIPE_LEAD + (me.lane & 7) * 16;
    if constexpr (N == 8) {
        uint32_t b[2];
        ldmatrix2(rows + lane, b);
        bi_cuda_mma16(acc[0], a[0], b);
        if constexpr (TWO)
            ldmatrix2(rows1 + lane, b);
        bi_cuda_mma16(acc[1], a[1], b);
    } else {
#pragma unroll
        for (uint32_t pair = 0; pair < N / 16; pair++) {
            const uint32_t at = lane + (pair * 2 + (me.lane >> 4)) * group;
            uint32_t b[4];
            ldmatrix4(rows + at, b);
            bi_cuda_mma16(&acc[0][pair * 8], a[0], b);
            bi_cuda_mma16(&acc[0][pair * 8 + 4], a[0], b + 2);
            if constexpr (TWO)
                ldmatrix4(rows1 + at, b);
            bi_cuda_mma16(&acc[1][pair * 8], a[1], b);
            bi_cuda_mma16(&acc[1][pair * 8 + 4], a[1], b + 2);
        }
    }
}

/* ---- results ------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t pack2(bi_bf16 low, bi_bf16 high) {
    return (uint32_t)low | (uint32_t)high << 16;
}
/* 8 x 8 values of a warp, two a register, transposed. */
static __device__ __forceinline__ uint32_t transpose8(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(d) : "r"(a));
    return d;
}

static __device__ __forceinline__ bi_bf16 act_of(const bi_act &act, float g, float u) {
    return act.situ ? bi_act_situ(g, u, act.beta, act.linear_beta) : bi_act_silu(g, u);
}

static __device__ __forceinline__ uint32_t round2(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

/* h of four elements, two a word; n: how many of a thread's two columns are real. */
static __device__ __forceinline__ void activate4(const experts_product &p, int32_t n, const float *g, const float *u, uint32_t (&h)[2]) {
    const bool plain = p.act_plain && (n < 1 || (act_is_plain(g[0], u[0]) && act_is_plain(g[2], u[2]))) &&
                       (n < 2 || (act_is_plain(g[1], u[1]) && act_is_plain(g[3], u[3])));
    if (__all_sync(0xffffffffu, plain)) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = act_situ_plain(p.act, p.act_inverse, g[i], u[i]);
        h[0] = round2(v[0], v[1]);
        h[1] = round2(v[2], v[3]);
    } else {
        h[0] = pack2(act_of(p.act, g[0], u[0]), act_of(p.act, g[1], u[1]));
        h[1] = pack2(act_of(p.act, g[2], u[2]), act_of(p.act, g[3], u[3]));
    }
}

/* Outputs col .. col + 3 of one place. */
static __device__ __forceinline__ void store4(bi_bf16 *row, int32_t col, int32_t n, uint32_t low, uint32_t high, bool aligned) {
    if (aligned && col + 4 <= n) {
        *reinterpret_cast<uint2 *>(row + col) = make_uint2(low, high);
        return;
    }
    const uint32_t word[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (col + i < n)
            row[col + i] = (bi_bf16)(word[i >> 1] >> (i & 1) * 16);
}

/* T of one place: marks its row, stores where the row has the slot. Outputs past the rank are zeros of padding. */
static __device__ __forceinline__ void finish_t(const experts_product &p, const pipe_item &item, int m, int32_t place, int32_t col,
                                                uint32_t low, uint32_t high) {
    const int32_t rank = p.side[m][item.slot].rank;
    const uint32_t word[2] = {low, high};
    if (col >= pad16(rank) || p.plan.slot[place] != item.slot)
        return;
    bi_bf16 *t = p.t[m] + (int64_t)place * p.t_ld;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bi_bf16 value = col + i < rank ? (bi_bf16)(word[i >> 1] >> (i & 1) * 16) : (bi_bf16)0;
        bi_cuda_fault(p.fault, p.plan.row[place], bi_widen(value));
        t[col + i] = value;
    }
}

/* The pair whose output a thread of DOWN stores, of the eight places from `first` on. */
template <experts_kind KIND>
static __device__ __forceinline__ int32_t pair_at(const experts_product &p, const pipe_item &item, const multiplier &me, int32_t first) {
    const int32_t at = first + (int32_t)(me.lane >> 2);
    return KIND == EXPERTS_DOWN && at < item.tile.n ? p.plan.pair[item.tile.begin + at] : 0;
}

/* Eight places from `first` on: acc[m] as mma.sync lays out 16 outputs x 8 places. */
template <experts_kind KIND, bool WIDE>
static __device__ __forceinline__ void finish8(const experts_product &p, const pipe_item &item, const multiplier &me, int32_t first,
                                               int32_t pair, const float *acc0, const float *acc1) {
    const int32_t at = first + (int32_t)(me.lane >> 2), place = item.tile.begin + at, col = (int32_t)(me.warp * 16 + (me.lane & 3) * 4);
    const bool real = at < item.tile.n;
    if (WIDE && first >= item.tile.n)
        return;
    if constexpr (KIND == EXPERTS_UP) {
        uint32_t h[2];
        activate4(p, item.tile.n - first - (int32_t)(me.lane & 3) * 2, acc0, acc1, h);
        const uint32_t low = transpose8(h[0]), high = transpose8(h[1]);
        const int32_t out = sub_row<KIND>(item.slab, (int)me.group * 2);
        if (WIDE && p.out_blocked) {
            bi_bf16 *block = p.out + (int64_t)item.row * p.out_ld + (int64_t)out * pad8(item.tile.n);
            *reinterpret_cast<uint2 *>(block + blocked_piece(at, col >> 3) + (col & 4)) = make_uint2(low, high);
        } else if (real) {
            store4(p.out + (int64_t)place * p.out_ld, out + col, (int32_t)p.out_ld, low, high, true);
        }
    } else {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int sub = (int)me.group * 2 + m;
            if (!sub_used<KIND>(p, item, sub))
                continue;
            const float *acc = m ? acc1 : acc0;
            bi_bf16 v[4];
            const float s = KIND == EXPERTS_T ? p.s[m][item.slot][item.tile.expert] : 1.0f;
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = bi_round(KIND == EXPERTS_T ? BI_MUL(s, acc[i]) : acc[i]);
            const uint32_t low = transpose8(pack2(v[0], v[1])), high = transpose8(pack2(v[2], v[3]));
            const int32_t out = sub_row<KIND>(item.slab, sub) + col;
            if (real && KIND == EXPERTS_T)
                finish_t(p, item, m, place, out, low, high);
            else if (real)
                store4(p.out + (int64_t)pair * p.out_ld, out, p.n_out, low, high, p.out_aligned);
        }
    }
}

/* All places of the tile, a few groups of 8 a turn: the accumulators move down between turns, which keeps the code short. */
template <experts_kind KIND, int N, bool WIDE>
static __device__ __forceinline__ void finish(const experts_product &p, const pipe_item &item, const multiplier &me, float (&acc)[2][N / 2]) {
    constexpr int GROUPS = N / 8 % 2 == 0 ? 2 : 1, VALUES = 4 * GROUPS;
    int32_t pair[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        pair[i] = pair_at<KIND>(p, item, me, 8 * i);
#pragma unroll 1
    for (int32_t first = 0; first < N && first < item.tile.n; first += 8 * GROUPS) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int32_t next = pair_at<KIND>(p, item, me, first + 8 * (GROUPS + i));
            finish8<KIND, WIDE>(p, item, me, first + 8 * i, pair[i], &acc[0][4 * i], &acc[1][4 * i]);
            pair[i] = next;
        }
#pragma unroll
        for (int i = 0; i < N / 2 - VALUES; i++) {
            acc[0][i] = acc[0][i + VALUES];
            acc[1][i] = acc[1][i + VALUES];
        }
    }
}

/* ---- one item ------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void release(const multiplier &me, uint32_t empty) {
    __syncwarp();
    if (me.lane == 0)
        bar_arrive(empty);
}

/* A of part m of the warpgroup. */
static __device__ __forceinline__ void fragment(const multiplier &me, uint32_t weights, int m, int block, uint32_t (&a)[4]) {
    bf16_fragment(me, weights + (me.group * 2 + (uint32_t)m) * PIPE_SUB + (uint32_t)block * 2 * PIPE_LEAD, PIPE_GROUP, a);
}

/* The adapter of side stage i. */
template <experts_kind KIND> static __device__ __forceinline__ int32_t side_slot(const experts_product &p, const pipe_item &item, int32_t i) {
    int32_t found = -1;
    each_side<KIND>(p, item, [&](int32_t slot, int32_t) { found = i-- == 0 ? slot : found; });
    return found;
}

/* Whether any weight of the warp's fragments of B is Inf or NaN: times the zeros that stand for the T of other rows it would be NaN. */
static __device__ __forceinline__ bool side_is_wild(const uint32_t (&a)[2][4]) {
    uint32_t wild = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        wild |= (a[i >> 2][i & 3] & 0x7f807f80u) + 0x00800080u;
    return __any_sync(0xffffffffu, (wild & 0x80008000u) != 0);
}

/* The k-block of such an adapter: rows of others keep their accumulators. */
template <int N>
static __device__ __forceinline__ void multiply_own(const experts_product &p, const pipe_item &item, const multiplier &me, int32_t slot,
                                                    float (&acc)[2][N / 2], const uint32_t (&a)[2][4], uint32_t rows0, uint32_t rows1) {
    const uint32_t lane = (me.lane >> 3 & 1) * PIPE_LEAD + (me.lane & 7) * 16;
    const int32_t *slot_of = p.plan.slot + item.tile.begin;
#pragma unroll
    for (int group = 0; group < N / 8; group++) {
        const int32_t col = group * 8 + (int32_t)(me.lane & 3) * 2;
        const bool own[2] = {col < item.tile.n && slot_of[col] == slot, col + 1 < item.tile.n && slot_of[col + 1] == slot};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            uint32_t b[2];
            ldmatrix2((m ? rows1 : rows0) + (uint32_t)group * PIPE_GROUP_SIDE + lane, b);
            float *old = &acc[m][group * 4], next[4] = {old[0], old[1], old[2], old[3]};
            bi_cuda_mma16(next, a[m], b);
#pragma unroll
            for (int i = 0; i < 4; i++)
                old[i] = own[i & 1] ? next[i] : old[i];
        }
    }
}

/* The A fragments of an adapter's stage. */
static __device__ __forceinline__ void side_fragments(const multiplier &me, uint32_t weights, uint32_t (&a)[2][4]) {
    bf16_fragment(me, weights + me.group * 2 * PIPE_SUB_SIDE, PIPE_GROUP_SIDE, a[0]);
    bf16_fragment(me, weights + (me.group * 2 + 1) * PIPE_SUB_SIDE, PIPE_GROUP_SIDE, a[1]);
}

/* One stage of few places. */
template <int N>
static __device__ __forceinline__ void multiply_stage(const multiplier &me, uint32_t weights, uint32_t rows, float (&acc)[2][N / 2]) {
#pragma unroll
    for (int block = 0; block < EXPERTS_K / BI_MMA_K; block++) {
        const uint32_t from = rows + (uint32_t)block * 2 * PIPE_LEAD;
        uint32_t a[2][4];
        fragment(me, weights, 0, block, a[0]);
        fragment(me, weights, 1, block, a[1]);
        multiply_sync<N, false>(me, acc, a, from, from, PIPE_GROUP);
    }
}

/* The chains of few places through n stages of the item's own and n_side of adapters. */
template <experts_kind KIND, int N>
static __device__ __forceinline__ void multiply_few(const experts_product &p, const pipe_item &item, int32_t n, int32_t n_side,
                                                    pipe_ring &ring, const multiplier &me, float (&acc)[2][N / 2]) {
#pragma unroll 1
    for (int32_t i = 0; i < n + n_side; i++) {
        const uint32_t weights = ring.memory + ring.stage * PIPE_STAGE, rows = weights + PIPE_WEIGHTS;
        bar_wait(ring.full + 8 * ring.stage, ring.phase);
        if (i < n) {
            multiply_stage<N>(me, weights, rows, acc);
        } else {
            uint32_t a[2][4];
            side_fragments(me, weights, a);
            if (!side_is_wild(a))
                multiply_sync<N, side_maps<KIND>() == 2>(me, acc, a, rows, rows + PIPE_ROWS_SIDE, PIPE_GROUP_SIDE);
            else
                multiply_own<N>(p, item, me, side_slot<KIND>(p, item, i - n), acc, a, rows,
                                rows + (side_maps<KIND>() == 2 ? (uint32_t)PIPE_ROWS_SIDE : 0u));
            proxy_fence();
        }
        release(me, ring.empty + 8 * ring.stage);
        pipe_next(ring);
    }
}

/* Keeps the compiler from moving uses of the accumulators across: it does not know that wgmma ends later. */
template <int VALUES> static __device__ __forceinline__ void pin(float (&acc)[2][VALUES]) {
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        asm volatile("" : "+f"(acc[0][i]), "+f"(acc[1][i])::"memory");
}

/* Which width of wgmma n places take, the largest first. */
static __device__ __forceinline__ int32_t width_of(int32_t n) {
    return n > 152 ? 0 : n > 144 ? 1 : n > 136 ? 2 : n > 128 ? 3 : n > 112 ? 4 : n > 96 ? 5 : n > 80 ? 6 : n > 64 ? 7 : n > 48 ? 8 : 9;
}

typedef uint32_t fragments[2][4]; /* of both parts */

/* BLOCKS k-blocks of both parts, asynchronously. */
template <int W, int BLOCKS>
static __device__ __forceinline__ void multiply_width(float (&acc)[2][EXPERTS_TILE_MAX / 2], const fragments (&a)[BLOCKS], uint64_t rows0,
                                                      uint64_t rows1) {
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        wgmma<W>(acc[0], a[block][0], rows0 + (uint64_t)(block * 2 * PIPE_LEAD >> 4));
        wgmma<W>(acc[1], a[block][1], rows1 + (uint64_t)(block * 2 * PIPE_LEAD >> 4));
    }
    wgmma_commit();
}

/* The accumulators are those of the largest tile whatever the width is: a copy of the loop for each width would not fit the registers
 * together. */
static __device__ __forceinline__ void multiply_blocks(int32_t width, float (&acc)[2][EXPERTS_TILE_MAX / 2], const fragments (&a)[2],
                                                       uint64_t rows) {
    switch (width) {
    case 0: multiply_width<160>(acc, a, rows, rows); break;
    case 1: multiply_width<152>(acc, a, rows, rows); break;
    case 2: multiply_width<144>(acc, a, rows, rows); break;
    case 3: multiply_width<136>(acc, a, rows, rows); break;
    case 4: multiply_width<128>(acc, a, rows, rows); break;
    case 5: multiply_width<112>(acc, a, rows, rows); break;
    case 6: multiply_width<96>(acc, a, rows, rows); break;
    case 7: multiply_width<80>(acc, a, rows, rows); break;
    case 8: multiply_width<64>(acc, a, rows, rows); break;
    default: multiply_width<48>(acc, a, rows, rows); break;
    }
}

/* The chains of many places. One loop for both kinds of stages: with two, the accumulators would change registers between them. A
 * warp whose B is wild gives zeros to the step that all four share, and does its own afterwards. */
template <experts_kind KIND>
static __device__ __forceinline__ void multiply_many(const experts_product &p, const pipe_item &item, int32_t n, int32_t n_side,
                                                     pipe_ring &ring, const multiplier &me, float (&acc)[2][EXPERTS_TILE_MAX / 2]) {
    const int32_t width = width_of(item.tile.n);
    pin(acc);
#pragma unroll 1
    for (int32_t i = 0; i < n + n_side; i++) {
        const uint32_t weights = ring.memory + ring.stage * PIPE_STAGE, rows = weights + PIPE_WEIGHTS;
        bar_wait(ring.full + 8 * ring.stage, ring.phase);
        proxy_fence();
        if (i < n) {
#pragma unroll
            for (int first = 0; first < 4; first += 2) {
                fragments a[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    fragment(me, weights, 0, first + k, a[k][0]);
                    fragment(me, weights, 1, first + k, a[k][1]);
                }
                multiply_blocks(width, acc, a, wgmma_desc(rows + (uint32_t)first * 2 * PIPE_LEAD, PIPE_LEAD, PIPE_GROUP));
                wgmma_wait<0>();
            }
        } else {
            const uint32_t rows1 = rows + (side_maps<KIND>() == 2 ? (uint32_t)PIPE_ROWS_SIDE : 0u);
            fragments b, one[1];
            side_fragments(me, weights, b);
            const bool wild = side_is_wild(b);
#pragma unroll
            for (int k = 0; k < 8; k++)
                one[0][k >> 2][k & 3] = wild ? 0 : b[k >> 2][k & 3];
            multiply_width<EXPERTS_TILE_MAX>(acc, one, wgmma_desc(rows, PIPE_LEAD, PIPE_GROUP_SIDE), wgmma_desc(rows1, PIPE_LEAD, PIPE_GROUP_SIDE));
            wgmma_wait<0>();
            if (wild)
                multiply_own<EXPERTS_TILE_MAX>(p, item, me, side_slot<KIND>(p, item, i - n), acc, b, rows, rows1);
        }
        release(me, ring.empty + 8 * ring.stage);
        pipe_next(ring);
    }
    pin(acc);
}

template <experts_kind KIND, int N>
static __device__ __forceinline__ void multiply_item(const experts_product &p, const pipe_item &item, pipe_ring &ring) {
    const multiplier me = this_multiplier();
    const int32_t n = (p.n_in + EXPERTS_K - 1) / EXPERTS_K, n_side = side_stages<KIND>(p, item);
    float acc[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        acc[0][i] = acc[1][i] = 0.0f;
    if constexpr (N <= PRODUCT_SYNC_MAX)
        multiply_few<KIND, N>(p, item, n, n_side, ring, me, acc);
    else
        multiply_many<KIND>(p, item, n, n_side, ring, me, acc);
    finish<KIND, N, false>(p, item, me, acc);
}

/* Of an item none of whose outputs are this warpgroup's: only keeps step. */
template <experts_kind KIND>
static __device__ __forceinline__ void pass_item(const experts_product &p, const pipe_item &item, pipe_ring &ring) {
    const multiplier me = this_multiplier();
    for (int32_t n = (p.n_in + EXPERTS_K - 1) / EXPERTS_K + side_stages<KIND>(p, item); n > 0; n--) {
        bar_wait(ring.full + 8 * ring.stage, ring.phase);
        release(me, ring.empty + 8 * ring.stage);
        pipe_next(ring);
    }
}

template <experts_kind KIND>
static __device__ __forceinline__ void multiply_any(const experts_product &p, const pipe_item &item, pipe_ring &ring) {
    const int32_t n = item.tile.n;
    if (!sub_used<KIND>(p, item, (int)(threadIdx.x / 128) * 2) && !sub_used<KIND>(p, item, (int)(threadIdx.x / 128) * 2 + 1))
        pass_item<KIND>(p, item, ring);
    else if (n <= 8)
        multiply_item<KIND, 8>(p, item, ring);
    else if (n <= 16)
        multiply_item<KIND, 16>(p, item, ring);
    else if (n <= PRODUCT_SYNC_MAX)
        multiply_item<KIND, PRODUCT_SYNC_MAX>(p, item, ring);
    else
        multiply_item<KIND, EXPERTS_TILE_MAX>(p, item, ring);
}

template <experts_kind KIND> static __device__ __forceinline__ void multiply(const experts_product &p, pipe_ring ring) {
    const int32_t n_item = item_count<KIND>(p);
    for (int32_t i = (int32_t)blockIdx.x; i < n_item; i += (int32_t)gridDim.x) {
        pipe_item item;
        if (item_at<KIND>(p, i, item))
            multiply_any<KIND>(p, item, ring);
    }
}

template <experts_kind KIND>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_kernel(const __grid_constant__ experts_product p) {
    bi_cuda_begin();
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t bars[2 * PIPE_STAGES];
    const uint32_t bar = (uint32_t)__cvta_generic_to_shared(bars);
    pipe_ring ring = {bar, bar + 8 * PIPE_STAGES, (uint32_t)__cvta_generic_to_shared(memory), 0, 0};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < (uint32_t)PIPE_STAGES; i++) {
            bar_init(ring.full + 8 * i, PIPE_FEEDERS);
            bar_init(ring.empty + 8 * i, 2 * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 2 * 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"((int)PRODUCT_REGISTERS_FEED));
        feed<KIND>(p, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"((int)PRODUCT_REGISTERS));
        multiply<KIND>(p, ring);
    }
}

template <experts_kind KIND> static br_status launch_product(bi_ctx *ctx, const experts_product *p, bi_cuda_kernel name) {
    const int bytes = PIPE_STAGES * PIPE_STAGE;
    cudaFuncSetAttribute(product_kernel<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    bi_cuda_launch(ctx, product_kernel<KIND>, (unsigned)ctx->n_sm, PRODUCT_THREADS, (size_t)bytes, *p);
    return bi_cuda_launched(ctx, name, "experts");
}

#endif
