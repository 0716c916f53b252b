/* bi_kda_prefill: the recurrence over segments of two rows and more, head size 128.      Contract: N-KDA-2, N-KDA-3, N-KDA-4
 *
 * Grid (groups of columns of all heads / GROUPS, some of the segments): WORKERS warps of a block run the recurrence, PREPARING warps
 * prepare its operands. Shared memory: a ring of SLOTS stages, a stage 8 tokens of each head that the block touches (one or two) as rows
 * ak, a, k, q in f32, v in bf16 and beta; behind it one buffer a preparing warp for the rows of q and k as they come. Its threads
 * copy those, a stage or more ahead, and a and v straight into their stage as soon as it is free, 16 bytes each at a time (a bulk copy of
 * a row would take ten instructions to start).
 *
 * A barrier tells phases apart by parity only, so nobody may run two phases ahead: the rows of one head in one slot are always prepared by
 * the same warp, which cannot begin a use of the slot before its last one was given back. A preparing warp that has to wait sleeps: its
 * polls would take issue slots from the recurrence.
 *
 * The order of every sum is the clause's: eight threads are its eight lanes, with 16 keys of C value columns each, two chains a
 * column, then the folds of bi_kda_parts.cuh; the squares of N-SUM meet in kda_sums8. C, the number of blocks an SM and of segments at
 * a time are free: no sum crosses columns. The state stays in registers from the first row of a segment to its last.
 *
 * Folding r of a token waits for three shuffles one after the other, so the output of the token before waits to be folded beside it,
 * and the decay of the state fills the gaps; the compiler does the weaving. */
#include "bi_kda_async.cuh"
#include "bi_kda_parts.cuh"

enum {
    KDA_KEYS_LANE = KDA_D_FAST / KDA_LANES,
    /* A prepared row, in floats; v takes half of its place, and the 4 behind it keep the row a multiple of 16 bytes. */
    KDA_AT_AK = 0,
    KDA_AT_A = KDA_D_FAST,
    KDA_AT_K = 2 * KDA_D_FAST,
    KDA_AT_Q = 3 * KDA_D_FAST,
    KDA_AT_V = 4 * KDA_D_FAST,
    KDA_AT_BETA = KDA_AT_V + KDA_D_FAST / 2,
    KDA_ROW = KDA_AT_BETA + 4,
    KDA_HEAD_BYTES = KDA_TILE * KDA_ROW * 4,
    /* Rows of q and k as they come, (8, 128) bf16 each; then the norms, four floats a token. */
    KDA_RAW_K = KDA_TILE * KDA_D_FAST * 2,
    KDA_RAW_NORM = 2 * KDA_RAW_K,
    KDA_RAW_BYTES = KDA_RAW_NORM + KDA_TILE * 16,
    KDA_PREFILL_ROWS = 2, /* shorter segments are the decode kernel's */
    KDA_SLEEP_NS = 500    /* a stage takes the recurrence two microseconds and more */
};
static_assert(KDA_HEAD_BYTES % 128 == 0 && KDA_RAW_BYTES % 128 == 0, "regions of shared memory stay aligned");

/* A tiling: columns a thread, heads a block can touch, warps that run the recurrence. With eight columns they are two on a scheduler
 * and hide each other's latencies. */
template <int COLUMNS_, int HEADS_, int WORKERS_> struct kda_tile {
    static constexpr int COLUMNS = COLUMNS_, HEADS = HEADS_, WORKERS = WORKERS_, SLOTS = 4;
    static constexpr int GROUPS = WORKERS * 32 / KDA_LANES; /* of columns, a block */
    static constexpr int PREPARING = WORKERS == 8 ? 4 : SLOTS * HEADS, TURNS = PREPARING / HEADS; /* stages prepared at a time */
    static constexpr int PER_HEAD = (KDA_D_FAST + COLUMNS - 1) / COLUMNS, THREADS = (WORKERS + PREPARING) * 32;
    static constexpr int BYTES = SLOTS * HEADS * KDA_HEAD_BYTES + PREPARING * KDA_RAW_BYTES + 8 * (2 * SLOTS + 2 * PREPARING);
    /* Registers a thread of either kind; UNEVEN: the recurrence takes some from the preparing warps. It would wait forever for too many. */
    static constexpr bool UNEVEN = WORKERS == 8 || HEADS == 2;
    static constexpr int MORE = WORKERS == 8 ? 224 : 240, FEWER = WORKERS == 8 ? 56 : 128, EVEN = 65536 / THREADS / 8 * 8;
    static_assert(!UNEVEN || WORKERS * MORE + PREPARING * FEWER <= (WORKERS + PREPARING) * EVEN, "registers of a block");
    static_assert(SLOTS % TURNS == 0, "a slot belongs to a warp");
    static_assert(HEADS == 2 || PER_HEAD % GROUPS == 0, "a block of one head");
    static_assert(BYTES <= 227 * 1024, "shared memory of an SM");
};

/* Where the parts of a block's shared memory lie, and which heads it works on. */
struct kda_block {
    unsigned char *stage, *raw;
    uint32_t full, empty, raw_in, stage_in; /* barriers: SLOTS, SLOTS, PREPARING, PREPARING */
    int head, n_head;                       /* the first one, 1 or 2 of them */
};

template <class T> static __device__ __forceinline__ kda_block kda_block_of(unsigned char *memory, int n_head) {
    const int first = (int)blockIdx.x * T::GROUPS;
    int last = (first + T::GROUPS - 1) / T::PER_HEAD;
    last = last < n_head ? last : n_head - 1;
    kda_block block;
    block.stage = memory;
    block.raw = memory + T::SLOTS * T::HEADS * KDA_HEAD_BYTES;
    block.full = kda_shared(block.raw + T::PREPARING * KDA_RAW_BYTES);
    block.empty = block.full + 8 * T::SLOTS;
    block.raw_in = block.empty + 8 * T::SLOTS;
    block.stage_in = block.raw_in + 8 * T::PREPARING;
    block.head = first / T::PER_HEAD;
    block.n_head = last - block.head + 1;
    return block;
}

template <class T> static __device__ __forceinline__ unsigned char *kda_slot(const kda_block &block, uint32_t slot, int head) {
    return block.stage + ((int)slot * T::HEADS + head) * KDA_HEAD_BYTES;
}

/* Calls work(segment) for the long segments whose number among the long ones is blockIdx.y, + gridDim.y, ..; both kinds of warp walk
 * the same list. */
template <class F> static __device__ __forceinline__ void kda_each_segment(const kda_launch &p, int lane, F &&work) {
    unsigned number = 0;
    for (int first = 0; first < p.n_seg; first += 32) {
        const int i = first + lane;
        uint32_t found = __ballot_sync(0xffffffffu, i < p.n_seg && p.seg[i].n_row >= KDA_PREFILL_ROWS);
        for (; found; found &= found - 1)
            if (number++ % gridDim.y == blockIdx.y)
                work(p.seg[first + __ffs((int)found) - 1]);
    }
}

/* ---- the preparing warps ---- */

/* Starts the copies of rows of q and k of tokens row .. row + n_tok - 1 into a raw buffer: 16 threads a row. Of a short stage the last
 * token fills the rest. */
static __device__ __forceinline__ void kda_fetch_raw(const kda_launch &p, int row, int n_tok, int head, unsigned char *raw,
                                                     uint32_t barrier, int lane) {
    const int64_t at = (int64_t)row * p.ld + head * KDA_D_FAST + (lane & 15) * 8;
    const bi_bf16 *q = p.q + at, *k = p.k + at;
    const uint32_t to = kda_shared(raw) + (uint32_t)(lane * 16);
#pragma unroll
    for (int t = 0; t < KDA_TILE; t += 2) {
        const int token = t + (lane >> 4), from = (token < n_tok ? token : n_tok - 1) * p.ld;
        kda_copy16(to + (uint32_t)(t * KDA_D_FAST * 2), q + from);
        kda_copy16(to + (uint32_t)(KDA_RAW_K + t * KDA_D_FAST * 2), k + from);
    }
    kda_copies_arrive(barrier);
}

/* And those of a and v, which need no work, into their stage. */
static __device__ __forceinline__ void kda_fetch_stage(const kda_launch &p, int row, int n_tok, int head, unsigned char *stage,
                                                       uint32_t barrier, int lane) {
    const bi_bf16 *v = p.v + (int64_t)row * p.ld + head * KDA_D_FAST + (lane & 15) * 8;
    const float *a = p.a + ((int64_t)row * p.n_head + head) * KDA_D_FAST + lane * 4;
    const uint32_t to = kda_shared(stage) + (uint32_t)(lane * 16);
    const uint32_t to_v = kda_shared(stage) + (uint32_t)((lane >> 4) * KDA_ROW * 4 + KDA_AT_V * 4 + (lane & 15) * 16);
#pragma unroll
    for (int t = 0; t < KDA_TILE; t++)
        kda_copy16(to + (uint32_t)(t * KDA_ROW * 4 + KDA_AT_A * 4), a + (t < n_tok ? t : n_tok - 1) * (p.n_head * KDA_D_FAST));
#pragma unroll
    for (int t = 0; t < KDA_TILE; t += 2) {
        const int token = t + (lane >> 4);
        kda_copy16(to_v + (uint32_t)(t * KDA_ROW * 4), v + (token < n_tok ? token : n_tok - 1) * p.ld);
    }
    kda_copies_arrive(barrier);
}

/* SUM(x*x) of eight rows of 128 bf16 at once; thread 4t + i gets that of row t. A thread reads elements 2 lane, + 1, + 64, + 65 of
 * each row, so that the folds by 128 (zeros) and 64 are its own, 32, 16 and 8 hand rows to partners (slot i is row i ^ (lane / 4), so
 * the upper half goes), 4 hands over the odd or even elements, and 2 and 1 add what is left. FUSED: every square is exact, so that one of
 * each first two need not be rounded by itself. */
template <bool FUSED>
static __device__ __forceinline__ float kda_sums8(const unsigned char *rows, int lane, uint32_t *least) {
    float even[KDA_TILE], odd[KDA_TILE];
#pragma unroll
    for (int i = 0; i < KDA_TILE; i++) {
        const uint32_t *row = (const uint32_t *)(rows + (i ^ (lane >> 2)) * (KDA_D_FAST * 2)) + lane;
        const uint32_t x = row[0], y = row[32];
        *least = kda_least(kda_least(*least, x), y);
        if constexpr (FUSED) {
            even[i] = BI_FMA(kda_low(x), kda_low(x), BI_MUL(kda_low(y), kda_low(y)));
            odd[i] = BI_FMA(kda_high(x), kda_high(x), BI_MUL(kda_high(y), kda_high(y)));
        } else {
            even[i] = BI_ADD(BI_MUL(kda_low(x), kda_low(x)), BI_MUL(kda_low(y), kda_low(y)));
            odd[i] = BI_ADD(BI_MUL(kda_high(x), kda_high(x)), BI_MUL(kda_high(y), kda_high(y)));
        }
    }
#pragma unroll
    for (int half = KDA_TILE / 2; half >= 1; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) {
            even[i] = BI_ADD(even[i], kda_swap(even[i + half], 4 * half));
            odd[i] = BI_ADD(odd[i], kda_swap(odd[i + half], 4 * half));
        }
    const bool second = lane & 2;
    float sum = BI_ADD(second ? odd[0] : even[0], kda_swap(second ? even[0] : odd[0], 2));
    sum = BI_ADD(sum, kda_swap(sum, 1));
    return BI_ADD(sum, kda_swap(sum, 2));
}

/* Out of line: it is rare, and its registers are not to be had. */
static __device__ __noinline__ float kda_sums8_slow(const unsigned char *rows, int lane) {
    uint32_t least = 0;
    return kda_sums8<false>(rows, lane, &least);
}

/* Norms of the tokens in a raw buffer, and faults; true when kda_divide may be used for all of them. */
static __device__ __forceinline__ bool kda_norms8(const kda_launch &p, unsigned char *raw, int row, int n_tok, int lane) {
    uint32_t least = 0x7fff7fffu;
    float k_sum = kda_sums8<true>(raw + KDA_RAW_K, lane, &least), q_sum = kda_sums8<true>(raw, lane, &least);
    const bool large = __all_sync(0xffffffffu, kda_pair_fast(least));
    if (!large)
        k_sum = kda_sums8_slow(raw + KDA_RAW_K, lane), q_sum = kda_sums8_slow(raw, lane);
    const int t = lane >> 2;
    const float k_norm = BI_SQRT(BI_ADD(k_sum, BI_KDA_L2_EPS)), q_norm = BI_SQRT(BI_ADD(q_sum, BI_KDA_L2_EPS));
    if ((lane & 3) == 0) {
        *(float4 *)(raw + KDA_RAW_NORM + t * 16) = make_float4(k_norm, BI_DIV(1.0f, k_norm), q_norm, BI_DIV(1.0f, q_norm));
        if (t < n_tok) {
            bi_cuda_fault(p.fault, row + t, k_sum);
            bi_cuda_fault(p.fault, row + t, q_sum);
        }
    }
    const bool fast = large && k_norm < KDA_NORM_FAST && q_norm < KDA_NORM_FAST;
    return __all_sync(0xffffffffu, fast);
}

template <bool FAST> static __device__ __forceinline__ float4 kda_unit(uint2 x, float n, float inverse) {
    if constexpr (FAST)
        return make_float4(kda_divide(kda_low(x.x), n, inverse), kda_divide(kda_high(x.x), n, inverse),
                           kda_divide(kda_low(x.y), n, inverse), kda_divide(kda_high(x.y), n, inverse));
    else
        return make_float4(BI_DIV(kda_low(x.x), n), BI_DIV(kda_high(x.x), n), BI_DIV(kda_low(x.y), n), BI_DIV(kda_high(x.y), n));
}

static __device__ __forceinline__ float4 kda_mul4(float4 x, float4 y) {
    return make_float4(BI_MUL(x.x, y.x), BI_MUL(x.y, y.y), BI_MUL(x.z, y.z), BI_MUL(x.w, y.w));
}

/* The rows ak, k and q of n_tok tokens, four elements of each a thread; a is there. */
template <bool FAST>
static __device__ __forceinline__ void kda_rows8(const unsigned char *raw, unsigned char *stage, int n_tok, float scale, int lane) {
    const float4 scales = make_float4(scale, scale, scale, scale);
#pragma unroll 2
    for (int t = 0; t < n_tok; t++) {
        const float4 norm = *(const float4 *)(raw + KDA_RAW_NORM + t * 16);
        const uint2 *in = (const uint2 *)(raw + t * KDA_D_FAST * 2) + lane;
        const uint2 q = in[0], k = in[KDA_RAW_K / 8];
        float4 *row = (float4 *)(stage + t * KDA_ROW * 4) + lane;
        const float4 a = row[KDA_AT_A / 4];
        const float4 k_unit = kda_unit<FAST>(k, norm.x, norm.y);
        row[KDA_AT_AK / 4] = kda_mul4(a, k_unit);
        row[KDA_AT_K / 4] = k_unit;
        row[KDA_AT_Q / 4] = kda_mul4(kda_unit<FAST>(q, norm.z, norm.w), scales);
    }
}

/* Tokens of stage n of a segment. */
static __device__ __forceinline__ int kda_stage_tokens(const bi_seg &seg, int n) {
    const int left = seg.n_row - n * KDA_TILE;
    return left < KDA_TILE ? left : KDA_TILE;
}

/* Stages are numbered through all segments of the block; a warp prepares one head of every TURNS-th. */
template <class T> static __device__ __forceinline__ void kda_prepare(const kda_launch &p, const kda_block &block, int warp, int lane) {
    const int head_slot = warp % T::HEADS, head = block.head + head_slot;
    if (warp >= T::PREPARING || head_slot >= block.n_head)
        return;
    unsigned char *raw = block.raw + warp * KDA_RAW_BYTES;
    const uint32_t raw_in = block.raw_in + 8 * (uint32_t)warp, stage_in = block.stage_in + 8 * (uint32_t)warp;
    const uint32_t turn = (uint32_t)(warp / T::HEADS);
    uint32_t stage0 = 0, n_fetched = 0;
    kda_each_segment(p, lane, [&](const bi_seg seg) {
        const int n_stage = (seg.n_row + KDA_TILE - 1) / KDA_TILE;
        float beta = 0.0f;
        auto fetch = [&](int n) {
            const int row = seg.row + n * KDA_TILE, n_tok = kda_stage_tokens(seg, n);
            kda_fetch_raw(p, row, n_tok, head, raw, raw_in, lane);
            if (lane < n_tok)
                beta = p.beta[(int64_t)(row + lane) * p.n_head + head];
            __syncwarp();
        };
        int n = (int)((turn + T::TURNS - stage0 % T::TURNS) % T::TURNS);
        if (n < n_stage)
            fetch(n);
        for (; n < n_stage; n += T::TURNS) {
            const int n_tok = kda_stage_tokens(seg, n);
            const uint32_t number = stage0 + (uint32_t)n, slot = number % T::SLOTS;
            unsigned char *stage = kda_slot<T>(block, slot, head_slot);
            kda_wait_asleep<KDA_SLEEP_NS>(block.empty + 8 * slot, (number / T::SLOTS & 1) ^ 1);
            kda_fetch_stage(p, seg.row + n * KDA_TILE, n_tok, head, stage, stage_in, lane);
            kda_wait_asleep<KDA_SLEEP_NS>(raw_in, n_fetched & 1);
            const bool fast = kda_norms8(p, raw, seg.row + n * KDA_TILE, n_tok, lane);
            __syncwarp();
            kda_wait_asleep<KDA_SLEEP_NS>(stage_in, n_fetched++ & 1);
            if (fast)
                kda_rows8<true>(raw, stage, n_tok, p.scale, lane);
            else
                kda_rows8<false>(raw, stage, n_tok, p.scale, lane);
            if (lane < n_tok)
                *(float *)(stage + (lane * KDA_ROW + KDA_AT_BETA) * 4) = beta;
            __syncwarp();
            if (lane == 0)
                kda_arrive(block.full + 8 * slot);
            if (n + T::TURNS < n_stage)
                fetch(n + T::TURNS);
        }
        stage0 += (uint32_t)n_stage;
    });
}

/* ---- the recurrence ---- */

/* What a thread of a recurrence warp knows of its columns. */
template <int C> struct kda_thread {
    int lane;      /* 0 .. 7 */
    int head;      /* of the model */
    int head_slot; /* of the block */
    int column;    /* the first of the group */
    int own;       /* column + own is the one whose sums end here */
    int valid;     /* and it is there, and no lower lane has it too */
    int live;      /* the group is one of a head */
    uint32_t zero; /* 0, which the compiler does not know */
    int source[C]; /* the lane that has the sum of the column in a slot */
};

template <class T>
static __device__ __forceinline__ kda_thread<T::COLUMNS> kda_thread_of(const kda_launch &p, const kda_block &block, int warp, int lane) {
    constexpr int C = T::COLUMNS, per_head = T::PER_HEAD;
    kda_thread<C> me;
    int group = (int)blockIdx.x * T::GROUPS + warp * (32 / KDA_LANES) + lane / KDA_LANES;
    me.live = group < p.n_head * per_head;
    group = me.live ? group : p.n_head * per_head - 1;
    me.lane = lane % KDA_LANES;
    me.zero = (uint32_t)p.d & 1;
    me.head = group / per_head;
    me.head_slot = me.head - block.head;
    me.column = group % per_head * C;
    me.own = kda_own<C>(me.lane);
    me.valid = me.live && me.column + me.own < KDA_D_FAST && kda_source<C>(me.own) == me.lane;
    int column[C];
    kda_columns<C, 4>(me.lane, column);
#pragma unroll
    for (int c = 0; c < C; c++)
        me.source[c] = kda_source<C>(column[c]);
    return me;
}

/* x, by way of an instruction that the compiler must keep: zero is 0. */
static __device__ __forceinline__ float kda_untied(float x, uint32_t zero) {
    return bi_f32_of(bi_u32_of(x) | zero);
}

/* The state between memory and registers, four keys at a time. Vectors tie registers together, and the recurrence loses much by bank
 * conflicts then: every value passes through an instruction that lets it lie where it likes. */
template <int C, bool STORE>
static __device__ __forceinline__ void kda_state_move(float *head_state, const kda_thread<C> &me, float (&s)[C][KDA_KEYS_LANE]) {
    int column[C];
    kda_columns<C, 4>(me.lane, column);
#pragma unroll
    for (int c = 0; c < C; c++) {
        const int at = me.column + column[c];
        float4 *x = (float4 *)(head_state + (at < KDA_D_FAST ? at : KDA_D_FAST - 1) * KDA_D_FAST) + me.lane;
        if (STORE && !(me.live && at < KDA_D_FAST))
            continue;
#pragma unroll
        for (int n = 0; n < KDA_KEYS_LANE; n += 4) {
            if (STORE) {
                x[2 * n] = make_float4(kda_untied(s[c][n], me.zero), kda_untied(s[c][n + 1], me.zero), kda_untied(s[c][n + 2], me.zero),
                                       kda_untied(s[c][n + 3], me.zero));
            } else {
                const float4 y = x[2 * n];
                s[c][n] = kda_untied(y.x, me.zero), s[c][n + 1] = kda_untied(y.y, me.zero);
                s[c][n + 2] = kda_untied(y.z, me.zero), s[c][n + 3] = kda_untied(y.w, me.zero);
            }
        }
    }
}

static __device__ __forceinline__ void kda_load_keys(const float *row, float (&x)[KDA_KEYS_LANE]) {
#pragma unroll
    for (int j = 0; j < KDA_KEYS_LANE / 4; j++) {
        const float4 y = *(const float4 *)(row + 32 * j);
        x[4 * j] = y.x, x[4 * j + 1] = y.y, x[4 * j + 2] = y.z, x[4 * j + 3] = y.w;
    }
}

/* Orders in which a thread may go through its keys and columns; no sum depends on it. A step of the recurrence is 500 independent
 * multiply-adds and more, and from their order in the source the compiler makes the order of the instructions and picks registers. What
 * it costs are reads of registers beyond what the two banks can do, up to a fifth of the time: of the orders tried these took least. */
enum kda_order {
    KDA_PLAIN,     /* key by key */
    KDA_BACKWARDS, /* the same, the last column first */
    KDA_HALVES,    /* key by key for one half of the columns, then for the other */
    KDA_CHAINS     /* all even keys, then all odd ones */
};

/* The orders of r's dot, of the decay, of the update and of o's dot; and after how many of the first two fences stand. */
template <int C> struct kda_orders {
    static constexpr kda_order R = KDA_PLAIN, DECAY = KDA_PLAIN, UPDATE = KDA_PLAIN, O = KDA_PLAIN;
    static constexpr int FENCES = 0;
};
template <> struct kda_orders<6> {
    static constexpr kda_order R = KDA_HALVES, DECAY = KDA_PLAIN, UPDATE = KDA_CHAINS, O = KDA_BACKWARDS;
    static constexpr int FENCES = 1;
};
template <> struct kda_orders<8> {
    static constexpr kda_order R = KDA_HALVES, DECAY = KDA_BACKWARDS, UPDATE = KDA_HALVES, O = KDA_CHAINS;
    static constexpr int FENCES = 2;
};

template <int C, kda_order order, class F> static __device__ __forceinline__ void kda_walk(F &&work) {
    constexpr int PARTS = order == KDA_HALVES ? 2 : 1, STEP = order == KDA_CHAINS ? 2 : 1;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int first = 0; first < STEP; first++)
#pragma unroll
            for (int n = first; n < KDA_KEYS_LANE; n += STEP)
#pragma unroll
                for (int i = 0; i < C / PARTS; i++) {
                    const int c = part * (C / PARTS) + i;
                    work(n, order == KDA_BACKWARDS ? C - 1 - c : c);
                }
}

/* e + d of N-KDA-3 for every column: this lane's part of dot(S, x). */
template <kda_order ORDER, int C>
static __device__ __forceinline__ void kda_dot_lane(const float (&s)[C][KDA_KEYS_LANE], const float (&x)[KDA_KEYS_LANE], float (&p)[C]) {
    float odd[C];
    kda_walk<C, ORDER>([&](int n, int c) {
        float *chain = n % 2 ? &odd[c] : &p[c];
        *chain = n < 2 ? BI_MUL(s[c][n], x[n]) : BI_FMA(s[c][n], x[n], *chain);
    });
#pragma unroll
    for (int c = 0; c < C; c++)
        p[c] = BI_ADD(p[c], odd[c]);
}

/* Every thread's sum to all threads that hold its column. */
template <int C> static __device__ __forceinline__ void kda_spread(const kda_thread<C> &me, float u, float (&to)[C]) {
#pragma unroll
    for (int c = 0; c < C; c++) {
        if constexpr ((C & (C - 1)) == 0)
            to[c] = kda_slot_mask(C, c) ? kda_swap(u, kda_slot_mask(C, c)) : u;
        else
            to[c] = __shfl_sync(0xffffffffu, u, me.source[c], KDA_LANES);
    }
}

/* The output of the token before: its lane sums wait for the folds of the next token. */
template <int C> struct kda_pending {
    float part[C];
    float *to;
    int store;
};

/* One stage of n_tok tokens, whose outputs lie out_step apart. */
template <int C>
static __device__ __forceinline__ void kda_run_stage(const kda_thread<C> &me, const float *row, int n_tok, int64_t out_step,
                                                     float (&s)[C][KDA_KEYS_LANE], kda_pending<C> &before) {
    typedef kda_orders<C> orders;
    const float *keys = row + 4 * me.lane, *beta_at = row + KDA_AT_BETA;
    const bi_bf16 *value = (const bi_bf16 *)(row + KDA_AT_V) + me.column + me.own;
    float ak[KDA_KEYS_LANE], a[KDA_KEYS_LANE], k[KDA_KEYS_LANE], q[KDA_KEYS_LANE];
    kda_load_keys(keys + KDA_AT_AK, ak);
#pragma unroll 1
    for (int t = 0; t < n_tok; t++) {
        const float beta = *beta_at, v = bi_widen(*value);
        float r[C], u[C];
        kda_load_keys(keys + KDA_AT_A, a);
        kda_dot_lane<orders::R>(s, ak, r);
        if constexpr (orders::FENCES >= 1)
            kda_fence_order();
        kda_load_keys(keys + KDA_AT_K, k);
        kda_fold(before.part, me.lane);
        kda_fold(r, me.lane);
        kda_walk<C, orders::DECAY>([&](int n, int c) { s[c][n] = BI_MUL(a[n], s[c][n]); });
        kda_spread(me, BI_MUL(beta, BI_SUB(v, r[0])), u);
        kda_store_if(before.to, before.part[0], before.store);
        before.to += out_step;
        before.store = me.valid;
        kda_load_keys(keys + KDA_AT_Q, q);
        if constexpr (orders::FENCES >= 2)
            kda_fence_order();
        kda_walk<C, orders::UPDATE>([&](int n, int c) { s[c][n] = BI_FMA(k[n], u[c], s[c][n]); });
        /* The last token of a stage loads itself again: the next stage may not be there yet. */
        const int step = t + 1 < n_tok ? KDA_ROW : 0;
        keys += step, value += 2 * step, beta_at += step;
        kda_load_keys(keys + KDA_AT_AK, ak);
        kda_dot_lane<orders::O>(s, q, before.part);
    }
}

template <class T> static __device__ __forceinline__ void kda_recur(const kda_launch &p, const kda_block &block, int warp, int lane) {
    constexpr int C = T::COLUMNS;
    const kda_thread<C> me = kda_thread_of<T>(p, block, warp, lane);
    const int64_t out_step = (int64_t)p.n_head * KDA_D_FAST;
    uint32_t stage0 = 0;
    kda_each_segment(p, lane, [&](const bi_seg seg) {
        float s[C][KDA_KEYS_LANE];
        float *head_state = (float *)bi_cuda_state(p.state, seg.seq) + (int64_t)me.head * KDA_D_FAST * KDA_D_FAST;
        if (seg.pos > 0) {
            kda_state_move<C, false>(head_state, me, s);
        } else {
#pragma unroll
            for (int n = 0; n < KDA_KEYS_LANE; n++)
#pragma unroll
                for (int c = 0; c < C; c++)
                    s[c][n] = 0.0f;
        }
        float *out = p.o + (int64_t)seg.row * out_step + (int64_t)me.head * KDA_D_FAST + me.column + me.own;
        kda_pending<C> before = {{0.0f}, out - out_step, 0};
        const int n_stage = (seg.n_row + KDA_TILE - 1) / KDA_TILE;
        for (int n = 0; n < n_stage; n++) {
            const uint32_t number = stage0 + (uint32_t)n, slot = number % T::SLOTS;
            kda_wait(block.full + 8 * slot, number / T::SLOTS & 1);
            kda_run_stage(me, (const float *)kda_slot<T>(block, slot, me.head_slot), kda_stage_tokens(seg, n),
                          out_step, s, before);
            __syncwarp();
            if (lane == 0)
                kda_arrive(block.empty + 8 * slot);
        }
        kda_fold(before.part, me.lane);
        kda_store_if(before.to, before.part[0], before.store);
        kda_state_move<C, true>(head_state, me, s);
        stage0 += (uint32_t)n_stage;
    });
}

template <class T> static __global__ void __launch_bounds__(T::THREADS, 1) kda_prefill(kda_launch p) {
    extern __shared__ __align__(128) unsigned char memory[];
    const kda_block block = kda_block_of<T>(memory, p.n_head);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = (int)threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::SLOTS; i++) {
            kda_barrier_init(block.full + 8 * i, block.n_head);
            kda_barrier_init(block.empty + 8 * i, T::WORKERS);
        }
        for (int i = 0; i < T::PREPARING; i++)
            kda_barrier_init(block.raw_in + 8 * i, 32), kda_barrier_init(block.stage_in + 8 * i, 32);
        kda_barrier_publish();
    }
    __syncthreads();
    if (warp >= T::WORKERS) {
        if constexpr (T::UNEVEN)
            kda_registers_fewer<T::FEWER>();
        kda_prepare<T>(p, block, warp - T::WORKERS, lane);
    } else {
        if constexpr (T::UNEVEN)
            kda_registers_more<T::MORE>();
        kda_recur<T>(p, block, warp, lane);
    }
}

/* ---- the choice of a tiling ---- */

typedef struct kda_tiling {
    int columns;
    int groups; /* of columns, a block */
    int cycles; /* a token, measured or between measured ones, with a block on every SM */
} kda_tiling;

static const kda_tiling TILING[] = {{1, 16, 330}, {2, 16, 380}, {3, 16, 470}, {4, 16, 560}, {6, 16, 735}, {8, 32, 1680}};

/* Blocks that one segment needs. */
static int64_t blocks_of(const kda_tiling *tiling, int n_head) {
    return bi_ceil_div((int64_t)n_head * ((KDA_D_FAST + tiling->columns - 1) / tiling->columns), tiling->groups);
}

/* The tiling with the shortest estimated time for n_seg segments of n_row rows. */
static int choose(const bi_ctx *ctx, int n_head, int64_t n_seg) {
    int best = 0;
    int64_t best_time = INT64_MAX;
    for (int i = 0; i < (int)(sizeof TILING / sizeof TILING[0]); i++) {
        const int64_t waves = bi_ceil_div(blocks_of(&TILING[i], n_head) * n_seg, ctx->n_sm);
        const int64_t time = waves * TILING[i].cycles;
        if (time < best_time)
            best = i, best_time = time;
    }
    return best;
}

template <class T> static br_status launch(bi_ctx *ctx, const kda_launch *p, dim3 grid) {
    if (cudaFuncSetAttribute(kda_prefill<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::BYTES) != cudaSuccess)
        return br_fail(BR_E_DEVICE, "kda: the GPU refused %d bytes of shared memory: expected an H100 or H200", T::BYTES);
    kda_prefill<T><<<grid, T::THREADS, T::BYTES, ctx->stream>>>(*p);
    return bi_cuda_launched(ctx, BI_K_kda_prefill, "kda");
}

br_status bi_kda_prefill_fast(bi_ctx *ctx, const kda_launch *p, int32_t n_row, int32_t seg_row_max) {
    /* As many segments as long as the longest hold all rows but one a segment; more than that many are short ones. */
    const int64_t beyond = n_row > p->n_seg ? n_row - p->n_seg : 1;
    const int64_t n_long = bi_ceil_div(beyond, seg_row_max > 1 ? seg_row_max - 1 : 1);
    const int tiling = choose(ctx, p->n_head, n_long);
    /* Long segments beyond the grid are walked by its blocks in turn. */
    int64_t side_by_side = p->n_seg < n_row / KDA_PREFILL_ROWS ? p->n_seg : n_row / KDA_PREFILL_ROWS;
    side_by_side = side_by_side < 1 ? 1 : side_by_side > 256 ? 256 : side_by_side;
    const dim3 grid((unsigned)blocks_of(&TILING[tiling], p->n_head), (unsigned)side_by_side);
    switch (TILING[tiling].columns) {
    case 1:
        return launch<kda_tile<1, 1, 4>>(ctx, p, grid);
    case 2:
        return launch<kda_tile<2, 1, 4>>(ctx, p, grid);
    case 3:
        return launch<kda_tile<3, 2, 4>>(ctx, p, grid);
    case 4:
        return launch<kda_tile<4, 1, 4>>(ctx, p, grid);
    case 6:
        return launch<kda_tile<6, 2, 4>>(ctx, p, grid);
    default:
        return launch<kda_tile<8, 2, 8>>(ctx, p, grid);
    }
}
