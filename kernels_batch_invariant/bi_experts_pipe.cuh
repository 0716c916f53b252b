/* bi_experts_pipe: the memory side of the products of the routed experts: which bytes a pipeline stage holds and who copies them.
 *
 * A stage holds 64 products of every output row of the item and of every place of its tile, or, behind the last of these, one
 * k-block of an adapter's B and T of each map (N-CHAIN-2). Layout: core matrices of 8 rows x 16 bytes, 128 bytes each, k before rows, so
 * that ldmatrix, wgmma without swizzle, and 16-byte copies all meet whole lines:
 *   row r, k of a stage   at (r / 8) * group + (k / 8) * 128 + (r % 8) * 16,   group 1,024 bytes, or 256 of an adapter's stage.
 * Output rows stand inside each 16 in the order of bi_experts_row. */
#ifndef BI_EXPERTS_PIPE_CUH
#define BI_EXPERTS_PIPE_CUH

#include "bi_experts_parts.cuh"

enum {
    PIPE_SUBS = 4, /* (warpgroup, map or half) of an item */
    PIPE_LEAD = 128,
    PIPE_GROUP = 1024,
    PIPE_GROUP_SIDE = 256,
    PIPE_ROWS_BYTES = EXPERTS_TILE_MAX * EXPERTS_K * 2,
    PIPE_SUB_SIDE = EXPERTS_SUB * BI_MMA_K * 2, /* of a part's B and of a map's T in an adapter's stage */
    PIPE_ROWS_SIDE = EXPERTS_TILE_MAX * BI_MMA_K * 2,
    PIPE_FEEDERS = 128,
    PIPE_SUB = EXPERTS_SUB * EXPERTS_K * 2,
    PIPE_WEIGHTS = PIPE_SUBS * PIPE_SUB,
    PIPE_STAGE = PIPE_WEIGHTS + PIPE_ROWS_BYTES,
    PIPE_STAGES = 4, /* about 200 KB in flight or in use */
    PIPE_OFFSETS = EXPERTS_TILE_MAX / 16, /* rows of a tile that one feeding thread copies */
    PIPE_SIDE_PLACES = (EXPERTS_TILE_MAX + 63) / 64 /* the same in an adapter's stage */
};

typedef struct pipe_item {
    experts_tile tile;
    int32_t slab, slot; /* slot: EXPERTS_T only */
    int32_t row;        /* of the first place, in inputs that are not gathered */
} pipe_item;

/* The place in the ring of stages; every role walks it alike. */
typedef struct pipe_ring {
    uint32_t full, empty, memory; /* shared-memory addresses */
    uint32_t stage, phase;
} pipe_ring;

static __device__ __forceinline__ void pipe_next(pipe_ring &ring) {
    if (++ring.stage == (uint32_t)PIPE_STAGES) {
        ring.stage = 0;
        ring.phase ^= 1;
    }
}

static __device__ __forceinline__ void bar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count) : "memory");
}
static __device__ __forceinline__ void bar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
static __device__ __forceinline__ void bar_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}
static __device__ __forceinline__ void proxy_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/* 16 bytes, or 16 zero bytes. */
static __device__ __forceinline__ void copy16(uint32_t to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void copy_block(uint32_t to, const void *from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}
/* The stage is full of what this thread has copied so far. */
static __device__ __forceinline__ void arrive_copied(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(bar) : "memory");
}

/* ---- items --------------------------------------------------------------------------------------------------------- */

template <experts_kind KIND> static __device__ __forceinline__ int32_t sub_map(int sub) {
    return KIND == EXPERTS_DOWN ? 0 : sub & 1;
}
template <experts_kind KIND> static __device__ __forceinline__ int32_t sub_row(int32_t slab, int sub) {
    return KIND == EXPERTS_DOWN ? (slab * PIPE_SUBS + sub) * EXPERTS_SUB : (slab * 2 + (sub >> 1)) * EXPERTS_SUB;
}
template <experts_kind KIND> static __device__ __forceinline__ int32_t sub_rows(const experts_product &p, int32_t slot, int sub) {
    return KIND == EXPERTS_T ? p.side[sub_map<KIND>(sub)][slot].rank : p.n_out;
}
/* Whether any output row of the part belongs to the map. */
template <experts_kind KIND> static __device__ __forceinline__ bool sub_used(const experts_product &p, const pipe_item &item, int sub) {
    return sub_row<KIND>(item.slab, sub) < sub_rows<KIND>(p, item.slot, sub);
}

/* Items of the launch; T has those of all tiles. */
template <experts_kind KIND> static __device__ __forceinline__ int32_t item_count(const experts_product &p) {
    return (p.plan.n_tile[0] + (KIND == EXPERTS_T ? p.plan.n_tile[1] : 0)) * p.n_part;
}

/* Item i of the launch; false: nothing to do, the same for all roles. */
template <experts_kind KIND> static __device__ __forceinline__ bool item_at(const experts_product &p, int32_t i, pipe_item &item) {
    const int32_t at = i / p.n_part, n_many = p.plan.n_tile[0];
    const experts_tile *tile = KIND != EXPERTS_T || at < n_many ? p.plan.tile + at : experts_few_tile(p.plan, at - n_many);
    const int4 raw = *reinterpret_cast<const int4 *>(tile);
    const int32_t part = i % p.n_part;
    item.tile.expert = raw.x;
    item.tile.begin = raw.y;
    item.tile.n = raw.z;
    item.tile.slots = (uint32_t)raw.w;
    item.slot = part / p.n_slab;
    item.slab = part % p.n_slab;
    item.row = p.blocked && at < n_many ? blocked_row(item.tile, at) : item.tile.begin;
    return KIND != EXPERTS_T || ((item.tile.slots >> item.slot & 1u) && (p.side[0][item.slot].rank || p.side[1][item.slot].rank));
}

template <experts_kind KIND> static __device__ __forceinline__ constexpr int32_t side_maps(void) {
    return KIND == EXPERTS_UP ? 2 : KIND == EXPERTS_DOWN ? 1 : 0;
}
template <experts_kind KIND> static __device__ __forceinline__ int32_t side_rank(const experts_product &p, int32_t slot) {
    const int32_t rank0 = p.side[0][slot].rank, rank1 = side_maps<KIND>() == 2 ? p.side[1][slot].rank : 0;
    return rank0 > rank1 ? rank0 : rank1;
}

/* The stages of adapters behind an item's own, one a k-block of a slot for all maps, in the one order that all roles follow. */
template <experts_kind KIND, typename F>
static __device__ __forceinline__ void each_side(const experts_product &p, const pipe_item &item, F visit) {
    for (uint32_t left = side_maps<KIND>() ? item.tile.slots : 0; left; left &= left - 1) {
        const int32_t slot = __ffs((int)left) - 1, rank = side_rank<KIND>(p, slot);
        for (int32_t k = 0; k < rank; k += BI_MMA_K)
            visit(slot, k);
    }
}
template <experts_kind KIND> static __device__ __forceinline__ int32_t side_stages(const experts_product &p, const pipe_item &item) {
    int32_t n = 0;
    each_side<KIND>(p, item, [&](int32_t, int32_t) { n++; });
    return n;
}

static __device__ __forceinline__ int32_t pad16(int32_t n) {
    return (n + 15) & ~15;
}

/* ---- the feeding warpgroup ----------------------------------------------------------------------------------------- */

/* A feeding thread's share: row r of each group of 8, eight k from 8 h. */
typedef struct feeder {
    uint32_t thread, r, h, group;
    const bi_bf16 *from[PIPE_OFFSETS]; /* of places 8 group + r + 16 j: eight k of the chunk */
    int32_t step;                      /* to the next chunk's */
} feeder;

static __device__ __forceinline__ void feed_sources(const experts_product &p, const pipe_item &item, bool many, feeder &me) {
    const experts_tile &tile = item.tile;
    const bool blocked = p.blocked && many;
    const bi_bf16 *in = p.blocked && !many ? p.in_few : p.in;
    me.step = blocked ? pad8(tile.n) * EXPERTS_K : EXPERTS_K;
#pragma unroll
    for (int j = 0; j < PIPE_OFFSETS; j++) {
        const int32_t at = (int32_t)(me.group * 8 + me.r) + 16 * j, place = at < tile.n ? at : 0;
        if (blocked)
            me.from[j] = in + (int64_t)item.row * blocked_chunks(p.n_in) * EXPERTS_K + blocked_piece(place, (int32_t)me.h);
        else
            me.from[j] = in + (int64_t)(p.gather ? p.plan.row[tile.begin + place] : item.row + place) * p.in_ld + me.h * 8;
    }
}

/* Eight k of a row whose 16-byte pieces do not lie at 16-byte addresses. */
static __device__ __forceinline__ uint4 piece_slowly(const bi_bf16 *row, int32_t k, int32_t n_in) {
    uint32_t word[4];
    for (int i = 0; i < 4; i++) {
        const int32_t at = k + 2 * i;
        const uint32_t low = at < n_in ? row[at] : 0u, high = at + 1 < n_in ? row[at + 1] : 0u;
        word[i] = low | high << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

static __device__ __forceinline__ void feed_rows(const experts_product &p, const experts_tile &tile, feeder &me, int32_t k, uint32_t to) {
    const int32_t first = (int32_t)(me.group * 8 + me.r);
    to += me.group * PIPE_GROUP + me.h * PIPE_LEAD + me.r * 16;
    if (p.in_aligned) {
        const bool real = k < p.n_in;
#pragma unroll
        for (int j = 0; j < PIPE_OFFSETS; j++) {
            if (first + 16 * j < tile.n)
                copy16(to + (uint32_t)j * 2 * PIPE_GROUP, real ? me.from[j] : p.in, real);
            me.from[j] += me.step;
        }
        return;
    }
#pragma unroll 1
    for (int32_t place = first; place < tile.n; place += 16, to += 2 * PIPE_GROUP) {
        const int32_t source = p.gather ? p.plan.row[tile.begin + place] : tile.begin + place;
        const uint4 value = piece_slowly(p.in + (int64_t)source * p.in_ld, k, p.n_in);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                     : "memory");
    }
}

template <experts_kind KIND>
static __device__ __forceinline__ void feed_bf16(const experts_product &p, const pipe_item &item, const feeder &me, int32_t k, uint32_t to) {
    const int32_t ld = pad16(p.n_in);
#pragma unroll 1
    for (int sub = 0; sub < PIPE_SUBS; sub++) {
        if (!sub_used<KIND>(p, item, sub))
            continue;
        const int map = sub_map<KIND>(sub);
        const int32_t first = sub_row<KIND>(item.slab, sub), n = sub_rows<KIND>(p, item.slot, sub);
        const unsigned char *data = KIND == EXPERTS_T ? p.side[map][item.slot].data : p.w[map];
        const size_t stride = KIND == EXPERTS_T ? p.side[map][item.slot].stride : p.w_stride[map];
        const bi_bf16 *w = reinterpret_cast<const bi_bf16 *>(data + stride * (size_t)item.tile.expert);
#pragma unroll 2
        for (uint32_t group = 0; group < 8; group += 2) {
            const int32_t at = (int32_t)((group + me.group) * 8 + me.r), row = first + (at & ~15) + bi_experts_row(at & 15);
            const bool real = row < n && k < ld;
            copy16(to + (uint32_t)sub * PIPE_SUB + (group + me.group) * PIPE_GROUP + me.h * PIPE_LEAD + me.r * 16,
                   real ? w + (int64_t)row * ld + k : w, real);
        }
    }
}

/* The first MXFP4 block of a part. */
template <experts_kind KIND>
static __device__ __forceinline__ const unsigned char *fp4_blocks(const experts_product &p, const pipe_item &item, int sub) {
    const int map = sub_map<KIND>(sub);
    const size_t n_chunk = (size_t)((p.n_in + EXPERTS_K - 1) / EXPERTS_K), first = (size_t)(sub_row<KIND>(item.slab, sub) / EXPERTS_SUB);
    return p.w[map] + p.w_stride[map] * (size_t)item.tile.expert + first * n_chunk * EXPERTS_FP4_BLOCK;
}

/* The first place of eight after eight that a feeding thread copies in an adapter's stage; its others lie 64 apart. */
static __device__ __forceinline__ int32_t side_place(uint32_t thread) {
    return (int32_t)(thread >> 4) * 8 + (int32_t)(thread & 7);
}

/* Bit j: that place + 64 j has the slot. The loads do not wait for one another. */
static __device__ __forceinline__ uint32_t side_own(const experts_product &p, const experts_tile &tile, int32_t slot, uint32_t thread) {
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < PIPE_SIDE_PLACES; j++) {
        const int32_t place = side_place(thread) + 64 * j;
        own |= place < tile.n && p.plan.slot[tile.begin + place] == slot ? 1u << j : 0u;
    }
    return own;
}

/* One k-block of a slot: B into the place of the weights, T of the slot's own rows behind it, map after map. Zeros for the rows of
 * other slots, and for a map whose adapter is absent or of a lower rank. own: of side_own. */
template <experts_kind KIND>
static __device__ __forceinline__ void feed_side(const experts_product &p, const pipe_item &item, int32_t slot, int32_t k, uint32_t own,
                                                 uint32_t thread, uint32_t weights, uint32_t rows) {
    const int32_t h = (int32_t)(thread >> 3 & 1), group = (int32_t)(thread >> 4), first = side_place(thread);
    const uint32_t to = (uint32_t)(group * PIPE_GROUP_SIDE + h * PIPE_LEAD + (first & 7) * 16);
    k += h * 8;
#pragma unroll 1
    for (int sub = 0; sub < PIPE_SUBS; sub++) {
        if (!sub_used<KIND>(p, item, sub))
            continue;
        const experts_side &side = p.side[sub_map<KIND>(sub)][slot];
        const bi_bf16 *b = reinterpret_cast<const bi_bf16 *>(side.data + side.stride * (size_t)item.tile.expert);
        const int32_t row = sub_row<KIND>(item.slab, sub) + (first & ~15) + bi_experts_row(first & 15), ld = pad16(side.rank);
        const bool real = k < ld && row < p.n_out;
        copy16(weights + (uint32_t)sub * PIPE_SUB_SIDE + to, real ? b + (int64_t)row * ld + k : p.t[0], real);
    }
#pragma unroll
    for (int32_t map = 0; map < side_maps<KIND>(); map++) {
        const bool have = k < pad16(p.side[map][slot].rank);
        const bi_bf16 *t = p.t[map] + (int64_t)(item.tile.begin + first) * p.t_ld + k;
#pragma unroll
        for (int j = 0; j < PIPE_SIDE_PLACES; j++) {
            const uint32_t at = rows + (uint32_t)map * PIPE_ROWS_SIDE + to + (uint32_t)(8 * j) * PIPE_GROUP_SIDE;
            const bool is_own = have && (own >> j & 1u);
            if (first + 64 * j < item.tile.n)
                copy16(at, is_own ? t + 64 * j * p.t_ld : p.t[0], is_own);
        }
    }
}

template <experts_kind KIND>
static __device__ __forceinline__ void feed_item(const experts_product &p, const pipe_item &item, bool many, pipe_ring &ring, feeder &me) {
    feed_sources(p, item, many, me);
    const uint32_t thread = me.thread;
#pragma unroll 1
    for (int32_t chunk = 0; chunk * EXPERTS_K < p.n_in; chunk++) {
        const uint32_t full = ring.full + 8 * ring.stage, to = ring.memory + ring.stage * PIPE_STAGE;
        const int32_t k = chunk * EXPERTS_K + (int32_t)me.h * 8;
        bar_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
        feed_bf16<KIND>(p, item, me, k, to);
        feed_rows(p, item.tile, me, k, to + PIPE_WEIGHTS);
        if (p.in_aligned) {
            arrive_copied(full);
        } else {
            asm volatile("cp.async.wait_all;\n" ::: "memory");
            bar_arrive(full);
        }
        pipe_next(ring);
    }
    each_side<KIND>(p, item, [&](int32_t slot, int32_t k) {
        const uint32_t to = ring.memory + ring.stage * PIPE_STAGE, own = side_own(p, item.tile, slot, thread);
        bar_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
        feed_side<KIND>(p, item, slot, k, own, thread, to, to + PIPE_WEIGHTS);
        arrive_copied(ring.full + 8 * ring.stage);
        pipe_next(ring);
    });
}

template <experts_kind KIND> static __device__ __forceinline__ void feed(const experts_product &p, pipe_ring ring) {
    feeder me;
    me.thread = threadIdx.x % PIPE_FEEDERS;
    me.r = me.thread & 7;
    me.h = me.thread >> 3 & 7;
    me.group = me.thread >> 6;
    const int32_t n_item = item_count<KIND>(p);
    for (int32_t i = (int32_t)blockIdx.x; i < n_item; i += (int32_t)gridDim.x) {
        pipe_item item;
        if (item_at<KIND>(p, i, item))
            feed_item<KIND>(p, item, i / p.n_part < p.plan.n_tile[0], ring, me);
    }
}

#endif
