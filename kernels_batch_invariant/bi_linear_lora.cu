/* Large steps with adapters: T of all maps of a group in one launch, and y of all of them in another.
 * Contract: N-CHAIN, N-LIN, N-LORA, P-5
 *
 * T = R(RN(s * chain(x, A))) by wgmma m64nNk16 with rows of x on its M side. Up to 32 rows of one A are a unit; units on the same x
 * are taken together, 1, 4 or 8, where tokens are enough to fill the SMs: x then passes once. Grid: a block a tile of 64 tokens
 * of a head and a bundle of units. Block: a warpgroup that multiplies, and a warp that keeps a ring of up to 16 stages of 64
 * columns (at most 192 KiB) filled by tensor copies. One accumulator an element over k in rising blocks of 16; a bundle none of whose
 * tokens has its slots is left out.
 * y: bi_linear_wide.cuh, whose launch starts while T is being made and waits for it where its own chains end. */
#include "bi_linear_wide.cuh"

enum {
    T_TOKENS = 64,
    T_UNIT = 32, /* rows of A */
    T_BUNDLE = 8,
    T_UNITS = 32, /* of a launch */
    T_THREADS = 160,
    T_STAGES = 16,
    T_X = T_TOKENS * WIDE_ROW,
    T_A = T_UNIT * WIDE_ROW,
    T_RING = 192 << 10,
    T_SHARED = T_RING + WGMMA_ATOM,
    MANY_MAPS = BI_LINEAR_GROUP_MAX,
    MANY_SLOTS = 32
};

/* Rows first .. first + 31 of one slot's A; the fields that bi_linear_out.cuh reads have dense_job's names. */
typedef struct t_unit {
    CUtensorMap a;
    bi_fault fault;
    int32_t lowest, n_row, first;
    const int32_t *row_slot;
    const float *s;
    bi_bf16 *t;
    int64_t t_head_ld;
    int32_t t_ld, slot, rank, b_ld;
} t_unit;

/* Units on one x. */
typedef struct t_bundle {
    CUtensorMap x; /* boxes of 64 tokens */
    int32_t n_in, first, n, end; /* first, n: units; end: tiles of all, up to and with this bundle's */
} t_bundle;

typedef struct t_args {
    t_unit unit[T_UNITS];
    t_bundle bundle[T_UNITS];
    int32_t n_bundle, n_unit, n_tile, tokens; /* tokens: tiles of them */
    int32_t stages;
} t_args;

/* Whether a row of the tile has a slot of the bundle; the same answer in all warps. */
static __device__ __forceinline__ bool t_wanted(const t_args &a, const t_bundle &bundle, int32_t token) {
    bool any = false;
    for (int32_t u = 0; u < bundle.n; u++)
        for (int i = 0; i < T_TOKENS; i += 32)
            any |= dense_slot_of(a.unit[bundle.first + u], token + (int32_t)(threadIdx.x & 31) + i) == a.unit[bundle.first + u].slot;
    return __any_sync(0xffffffffu, any);
}

template <int N>
static __device__ __forceinline__ void t_produce(const t_args &a, const t_bundle &bundle, uint32_t ring, uint32_t barrier, int32_t token,
                                                 int32_t head) {
    constexpr int STAGE = T_X + N * T_A;
    const uint32_t leader = stream_leader();
    uint32_t at = 0, phase = 0;
    for (int32_t k = 0; k < bundle.n_in; k += WIDE_K) {
        const uint32_t full = barrier + 8 * at, stage = ring + at * STAGE;
        stream_wait(full + 8 * T_STAGES, phase ^ 1);
        stream_expect(full, T_X + bundle.n * T_A, leader);
        stream_copy(stage, &bundle.x, k, token, head, full, leader);
        for (int32_t u = 0; u < bundle.n; u++)
            stream_copy(stage + T_X + (uint32_t)u * T_A, &a.unit[bundle.first + u].a, k, a.unit[bundle.first + u].first, head, full, leader);
        if (++at == (uint32_t)a.stages) {
            at = 0;
            phase ^= 1;
        }
    }
}

template <int N>
static __device__ __forceinline__ void t_chain(int32_t n_in, uint32_t stages, uint32_t ring, uint32_t barrier, float (&acc)[N * 4][4]) {
    constexpr int STAGE = T_X + N * T_A;
    uint32_t at = 0, phase = 0, before = 0;
#pragma unroll
    for (int n = 0; n < N * 4; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (int32_t k = 0; k < n_in; k += WIDE_K) {
        stream_wait(barrier + 8 * at, phase);
        const uint32_t x = wgmma_tile(ring + at * STAGE), w = wgmma_tile(ring + at * STAGE + T_X);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < WIDE_K / BI_MMA_K; i++)
            wgmma<N * 4>(acc, x + 2 * i, w + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        if (k && (threadIdx.x & 31) == 0)
            stream_arrive(before);
        before = barrier + 8 * (T_STAGES + at);
        if (++at == stages) {
            at = 0;
            phase ^= 1;
        }
    }
    wide_settle<N * 4>(acc);
}

/* T of the tokens that have the unit's slot, zeros from the rank up to whole k-blocks. */
static __device__ __forceinline__ void t_store(const t_unit &unit, int32_t token, int32_t head, const float (*acc)[4]) {
    const int lane = (int)threadIdx.x & 31;
    const float s = unit.s[head];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t row = token + (lane >> 2) + half * 8;
        if (dense_slot_of(unit, row) != unit.slot)
            continue;
        bi_bf16 *t = unit.t + head * unit.t_head_ld + (int64_t)row * unit.t_ld;
#pragma unroll
        for (int n = 0; n < T_UNIT / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t r = unit.first + n * 8 + (lane & 3) * 2 + e;
                const bi_bf16 v = r < unit.rank ? bi_round(BI_MUL(s, acc[n][half * 2 + e])) : (bi_bf16)0;
                if (r < unit.b_ld)
                    t[r] = v;
                dense_fault(unit, row, bi_widen(v));
            }
    }
}

template <int N> static __global__ void __launch_bounds__(T_THREADS, 1) t_kernel(const __grid_constant__ t_args a) {
    extern __shared__ unsigned char t_memory[];
    __shared__ uint64_t barrier[2 * T_STAGES];
    const uint32_t ring = ((uint32_t)__cvta_generic_to_shared(t_memory) + WGMMA_ATOM - 1) / WGMMA_ATOM * WGMMA_ATOM;
    const uint32_t full = (uint32_t)__cvta_generic_to_shared(barrier);
    int32_t m = 0, before = 0;
    while ((int32_t)blockIdx.x >= a.bundle[m].end)
        before = a.bundle[m++].end;
    const t_bundle &bundle = a.bundle[m];
    const int32_t in_bundle = (int32_t)blockIdx.x - before, token = in_bundle % a.tokens * T_TOKENS, head = in_bundle / a.tokens;
    bi_cuda_let_next_start();
    if (!t_wanted(a, bundle, token))
        return;
    if (threadIdx.x < T_STAGES) {
        stream_barrier_init(full + 8 * threadIdx.x, 1);
        stream_barrier_init(full + 8 * (T_STAGES + threadIdx.x), 4);
        stream_barrier_publish();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);
    if (warp == 4) {
        t_produce<N>(a, bundle, ring, full, token, head);
        return;
    }
    float acc[N * 4][4];
    t_chain<N>(bundle.n_in, (uint32_t)a.stages, ring, full, acc);
#pragma unroll
    for (int u = 0; u < N; u++)
        if (u < bundle.n)
            t_store(a.unit[bundle.first + u], token + warp * 16, head, acc + u * 4);
}

/* ---- the host's side: T ----------------------------------------------------------------------------------------------- */

static int set_unit(const dense_state *state, t_unit *unit, const dense_job *job, const dense_slot *slot, int32_t first) {
    const dense_operand a = {slot->a, slot->a_ld, slot->rank, job->n_head, slot->a_ld, slot->a_stride};
    unit->fault = job->fault;
    unit->lowest = job->lowest;
    unit->n_row = job->n_row;
    unit->first = first;
    unit->row_slot = job->row_slot;
    unit->s = slot->s;
    unit->t = job->t;
    unit->t_head_ld = job->t_head_ld;
    unit->t_ld = job->t_ld;
    unit->slot = slot->slot;
    unit->rank = slot->rank;
    unit->b_ld = slot->b_ld;
    return (uintptr_t)slot->a % DENSE_ALIGN == 0 && dense_map(state, &unit->a, a, T_UNIT);
}

static int same_x(const dense_job *a, const dense_job *b) {
    return a->x == b->x && a->x_ld == b->x_ld && a->x_head_ld == b->x_head_ld && a->n_in == b->n_in && a->n_head == b->n_head;
}

/* No more stages than the longest chain has, and than leave room for a second block where blocks are many. */
static int32_t stages_of(const bi_ctx *ctx, const t_args *args, int n) {
    const int stage = T_X + n * T_A, room = n == 1 && args->n_tile > ctx->n_sm ? T_RING / 2 : T_RING;
    int32_t stages = room / stage < T_STAGES ? room / stage : T_STAGES, steps = 1;
    for (int32_t i = 0; i < args->n_bundle; i++) {
        const int32_t n_step = (int32_t)bi_ceil_div(args->bundle[i].n_in, WIDE_K);
        steps = n_step > steps ? n_step : steps;
    }
    return steps < stages ? steps : stages;
}

static br_status launch_t(bi_ctx *ctx, t_args *args, int n) {
    args->stages = stages_of(ctx, args, n);
    const size_t shared = (size_t)args->stages * (size_t)(T_X + n * T_A) + WGMMA_ATOM;
    if (n == 1)
        t_kernel<1><<<(unsigned)args->n_tile, T_THREADS, shared, ctx->stream>>>(*args);
    else if (n == 4)
        t_kernel<4><<<(unsigned)args->n_tile, T_THREADS, shared, ctx->stream>>>(*args);
    else
        t_kernel<T_BUNDLE><<<(unsigned)args->n_tile, T_THREADS, shared, ctx->stream>>>(*args);
    return bi_cuda_launched(ctx, BI_K_lora_t, "linear");
}

/* Units of a job whose slots come first .. ; where a unit does not fit the launch any more, *slot and *row say where to go on. */
typedef struct t_cursor {
    int32_t map, slot, row;
} t_cursor;

/* Fills a launch from the cursor on, up to n units a bundle: those of one slot and x. */
static int fill_t(const dense_state *state, t_args *args, const dense_job *job, int32_t n_job, t_cursor *at, int n) {
    const dense_job *last = NULL;
    t_bundle *bundle = args->bundle;
    args->n_bundle = args->n_unit = args->n_tile = 0;
    args->tokens = (int32_t)bi_ceil_div(job->n_row, T_TOKENS);
    for (; at->map < n_job; at->map++, at->slot = 0)
        for (; at->slot < job[at->map].n_slot; at->slot++, at->row = 0) {
            const dense_job *from = &job[at->map];
            const dense_slot *slot = &from->slot[at->slot];
            for (; at->row < slot->b_ld; at->row += T_UNIT) {
                if (args->n_unit == T_UNITS)
                    return 1;
                if (!last || !same_x(last, from) || bundle->n == n) {
                    bundle = &args->bundle[args->n_bundle++];
                    bundle->n_in = from->n_in;
                    bundle->first = args->n_unit;
                    bundle->n = 0;
                    args->n_tile += from->n_head * args->tokens;
                    bundle->end = args->n_tile;
                    if (!dense_map(state, &bundle->x, dense_x_of(from), T_TOKENS))
                        return 0;
                }
                last = from;
                bundle->n++;
                if (!set_unit(state, &args->unit[args->n_unit++], from, slot, at->row))
                    return 0;
            }
        }
    return 1;
}

/* Units a bundle: as many as leave every SM a block. */
static int bundle_of(const bi_ctx *ctx, const dense_job *job, int32_t n_job) {
    int64_t units = 0;
    for (int32_t i = 0; i < n_job; i++)
        for (int32_t s = 0; s < job[i].n_slot; s++)
            units += job[i].n_head * bi_ceil_div(job[i].slot[s].b_ld, T_UNIT);
    const int64_t tokens = bi_ceil_div(job->n_row, T_TOKENS);
    return units * tokens <= ctx->n_sm ? 1 : bi_ceil_div(units, 4) * tokens <= ctx->n_sm ? 4 : T_BUNDLE;
}

static br_status run_t(bi_ctx *ctx, const dense_job *job, int32_t n_job, int *done) {
    t_cursor at = {0, 0, 0};
    t_args args;
    const int n = bundle_of(ctx, job, n_job);
    *done = 1;
    while (*done && at.map < n_job) {
        *done = fill_t((const dense_state *)ctx->dense, &args, job, n_job, &at, n);
        if (*done && args.n_tile)
            BR_TRY(launch_t(ctx, &args, n));
    }
    return BR_OK;
}

/* ---- y ---------------------------------------------------------------------------------------------------------------- */

/* A tile without outputs past the last, y aligned, nothing to check: nine of ten. */
template <int NT>
static __device__ __forceinline__ void store_whole(const wide_map &map, const wide_tile &tile, int32_t token, const float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    const int32_t first = token + (lane >> 2), left = map.n_row - first;
    const int64_t ld = map.y_ld, at = first * ld + tile.head * map.y_head_ld + tile.out;
    if (map.y_f32) {
        float *y = (float *)map.y + at + 2 * q;
#pragma unroll
        for (int half = 0; half < 2; half++, y += 8 * ld)
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (half * 8 < left)
                    *(float2 *)(y + n * 8) = make_float2(acc[n][half * 2], acc[n][half * 2 + 1]);
        return;
    }
    bi_bf16 *y = (bi_bf16 *)map.y + at + 8 * q;
#pragma unroll
    for (int half = 0; half < 2; half++, y += 8 * ld)
#pragma unroll
        for (int n = 0; n < NT; n += 4) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = dense_round2(acc[n + i][half * 2], acc[n + i][half * 2 + 1]);
            const uint4 eight = dense_turn4(word, q);
            if (half * 8 < left)
                *(uint4 *)(y + n * 8) = eight;
        }
}

typedef struct wide_store {
    static constexpr bool ADAPTERS = true;
    template <int NT>
    __device__ __forceinline__ void operator()(const wide_map &map, const wide_tile &tile, int32_t token, float (&acc)[NT][4]) const {
        const dense_place place = {tile.head, token, tile.out};
        if (map.wide && !map.check && tile.out + NT * 8 <= map.n_out)
            store_whole(map, tile, token, acc);
        else
            dense_store(map, place, map.wide, acc);
    }
} wide_store;

typedef wide_args<MANY_MAPS, MANY_SLOTS> args_many;

br_status bi_dense_many_open(void) {
    const void *const kernel[] = {(const void *)t_kernel<1>, (const void *)t_kernel<4>, (const void *)t_kernel<8>};
    for (int i = 0; i < 3; i++)
        if (cudaFuncSetAttribute(kernel[i], cudaFuncAttributeMaxDynamicSharedMemorySize, T_SHARED) != cudaSuccess)
            return br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", (int)T_SHARED);
    BR_TRY((wide_allow<128, args_many, wide_store>()));
    return wide_allow<256, args_many, wide_store>();
}

/* Rounds of pairs of tiles over the SMs, in outputs. */
static int64_t rounds_of(const bi_ctx *ctx, const dense_job *job, int32_t n, int outs) {
    const int64_t token_tiles = bi_ceil_div(job->n_row, WIDE_TOKENS);
    int64_t pairs = 0;
    for (int32_t i = 0; i < n; i++)
        pairs += job[i].n_head * (token_tiles > 1 ? (token_tiles + 1) / 2 * bi_ceil_div(job[i].n_out, outs) : bi_ceil_div(job[i].n_out, 2 * outs));
    return bi_ceil_div(pairs, ctx->n_sm / 2) * outs;
}

template <int OUTS> static br_status run_y(bi_ctx *ctx, const dense_job *job, int32_t n, int early, int *done) {
    args_many args;
    *done = wide_set((const dense_state *)ctx->dense, &args, job, n, OUTS);
    if (!*done)
        return BR_OK;
    wide_launch<OUTS>(ctx, args, wide_store{}, early);
    return bi_cuda_launched(ctx, BI_K_linear_wide, "linear");
}

br_status bi_dense_many(bi_ctx *ctx, const dense_job *job, int32_t n, int *done) {
    int32_t n_slot = 0;
    for (int32_t i = 0; i < n; i++)
        n_slot += job[i].n_slot;
    *done = 0;
    if (n > MANY_MAPS || n_slot > MANY_SLOTS)
        return BR_OK;
    if (n_slot)
        BR_TRY(run_t(ctx, job, n, done));
    if (n_slot && !*done)
        return BR_OK;
    if (rounds_of(ctx, job, n, 128) * 11 < rounds_of(ctx, job, n, 256) * 10)
        return run_y<128>(ctx, job, n, n_slot > 0, done);
    return run_y<256>(ctx, job, n, n_slot > 0, done);
}
