/* bi_experts, bi_combine, CUDA.      Contract: N-MOE, N-ACT, N-LORA, N-CHAIN, N-FP4
 *
 * Plan: up to eight blocks of 1,024 threads, one cluster, sort the pairs by expert, stable, and cut them into tiles. Then the products,
 * gate and up with the activation, and down, a launch a kind of tiles; before each, where adapters act, T of its maps. The order
 * inside an output is in bi_experts_wide.cuh, bi_experts_few.cuh and bi_experts_product.cuh; the plan moves no bit.
 * Combine: a thread eight elements of a row, the fma chain over its experts in their order (N-MOE-2). */
#include "bi_experts_act.cuh"

/* A block of the plan has at least PLAN_PAIRS pairs, or is alone. */
enum { PLAN_THREADS = 1024, PLAN_BLOCKS = 8, PLAN_PAIRS = 2048, PLAN_SHARED_MAX = 200 * 1024 };
enum { COMBINE_THREADS = 256, COMBINE_WIDTH = 8, COMBINE_AHEAD = 16 /* experts */ };

/* ---- plan ---------------------------------------------------------------------------------------------------------- */

typedef struct plan_args {
    experts_plan plan;
    const int32_t *expert, *row_slot;
    int32_t n_pair, topk, n_expert, n_slot;
    int32_t n_warp;  /* that count and place, each a run of pairs */
    int32_t few_max; /* places of a tile of few */
} plan_args;

/* Places of each tile of an expert with n pairs: as even as steps of 8 allow. */
static __device__ int32_t tile_places(int32_t n) {
    if (n <= EXPERTS_TILE_MAX)
        return n;
    const int32_t n_tile = (n + EXPERTS_TILE_MAX - 1) / EXPERTS_TILE_MAX, even = (n + n_tile - 1) / n_tile;
    return (even + 7) / 8 * 8;
}

/* The sum of v over all threads before this one; *total over all. */
static __device__ uint64_t scan_block(uint64_t v, uint64_t *total) {
    __shared__ uint64_t of_warp[PLAN_THREADS / 32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = v;
    for (uint32_t h = 1; h < 32; h *= 2) {
        const uint64_t from = __shfl_up_sync(0xffffffffu, sum, h);
        sum += lane >= h ? from : 0;
    }
    if (lane == 31)
        of_warp[warp] = sum;
    __syncthreads();
    uint64_t before = 0, all = 0;
    for (uint32_t i = 0; i < PLAN_THREADS / 32; i++) {
        before += i < warp ? of_warp[i] : 0;
        all += of_warp[i];
    }
    __syncthreads();
    *total = all;
    return before + sum - v;
}

/* A warp's run of pairs, 32 at a time: visit(pair, expert or -1, lanes with the same expert). */
template <typename F> static __device__ __forceinline__ void each_pair(const plan_args &a, F visit) {
    const int32_t warp = (int32_t)threadIdx.x / 32, lane = (int32_t)threadIdx.x % 32, n_run = a.n_warp * (int32_t)gridDim.x;
    const int32_t run = ((a.n_pair + n_run - 1) / n_run + 31) & ~31, begin = ((int32_t)blockIdx.x * a.n_warp + warp) * run;
    const int32_t end = begin + run < a.n_pair ? begin + run : a.n_pair;
    if (warp >= a.n_warp)
        return;
    int32_t ahead = begin + lane < end ? a.expert[begin + lane] : -1;
    for (int32_t pair = begin + lane; pair - lane < end; pair += 32) {
        const int32_t expert = ahead;
        ahead = pair + 32 < end ? a.expert[pair + 32] : -1;
        visit(pair, expert, __match_any_sync(0xffffffffu, expert));
    }
}

/* All blocks of the grid, which is one cluster. */
static __device__ __forceinline__ void sync_blocks(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
/* The word at the place of *own in the shared memory of another block. */
static __device__ __forceinline__ int32_t word_of_block(const int32_t *own, uint32_t block) {
    uint32_t at;
    int32_t word;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(block));
    asm volatile("ld.shared::cluster.s32 %0, [%1];\n" : "=r"(word) : "r"(at) : "memory");
    return word;
}

/* What lies before an expert: pairs, tiles of few places above bit 24, tiles of many above bit 44. */
enum { PLAN_FEW_SHIFT = 24, PLAN_MANY_SHIFT = 44 };

/* Tile i of many, of n places, to the list of its class. The order there is nobody's business: no bit depends on it. */
static __device__ void put_class(const experts_plan &plan, int32_t n, int32_t i) {
    int32_t c = EXPERTS_CLASSES - 1;
    while (n > class_places(c))
        c--;
    plan.of_class[c * plan.tile_max + atomicAdd(plan.n_tile + 2 + c, 1)] = i;
}

/* The tiles of expert e: `before` counts what lies before them. */
static __device__ void put_tiles(const plan_args &a, int32_t e, int32_t n, int32_t n_tile, int32_t step, uint64_t before) {
    const int32_t begin = (int32_t)(before & ((1 << PLAN_FEW_SHIFT) - 1));
    const int32_t few = (int32_t)(before >> PLAN_FEW_SHIFT) & ((1 << (PLAN_MANY_SHIFT - PLAN_FEW_SHIFT)) - 1);
    const int32_t many = (int32_t)(before >> PLAN_MANY_SHIFT);
    for (int32_t i = 0; i < n_tile; i++) {
        const experts_tile tile = {e, begin + i * step, n - i * step < step ? n - i * step : step, 0};
        *(n <= a.few_max ? experts_few_tile(a.plan, few) : a.plan.tile + many + i) = tile;
        if (n > a.few_max)
            put_class(a.plan, tile.n, many + i);
    }
}

/* From counts of each warp to where each warp's first pair of an expert stands; tiles of all experts. total: pairs of each expert in
 * this block. */
static __device__ void plan_tiles(const plan_args &a, int32_t *count, int32_t *total) {
    for (int32_t e = (int32_t)threadIdx.x; e < a.n_expert; e += PLAN_THREADS) {
        int32_t n = 0;
        for (int32_t w = 0; w < a.n_warp; w++)
            n += count[w * a.n_expert + e];
        total[e] = n;
    }
    sync_blocks();
    uint64_t carry = 0;
    for (int32_t block = 0; block < a.n_expert; block += PLAN_THREADS) {
        const int32_t e = block + (int32_t)threadIdx.x;
        int32_t n = 0, n_before = 0;
        for (uint32_t b = 0; e < a.n_expert && b < gridDim.x; b++) {
            n_before = b == blockIdx.x ? n : n_before;
            n += word_of_block(total + e, b);
        }
        const int32_t step = tile_places(n), n_tile = n ? (n + step - 1) / step : 0;
        uint64_t all;
        const uint64_t before = carry + scan_block((uint64_t)n_tile << (n <= a.few_max ? PLAN_FEW_SHIFT : PLAN_MANY_SHIFT) | (uint32_t)n, &all);
        carry += all;
        int32_t place = (int32_t)(before & ((1 << PLAN_FEW_SHIFT) - 1)) + n_before;
        for (int32_t w = 0; e < a.n_expert && w < a.n_warp; w++) {
            const int32_t of_warp = count[w * a.n_expert + e];
            count[w * a.n_expert + e] = place;
            place += of_warp;
        }
        if (blockIdx.x == 0)
            put_tiles(a, e, n, n_tile, step, before);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        a.plan.n_tile[0] = (int32_t)(carry >> PLAN_MANY_SHIFT);
        a.plan.n_tile[1] = (int32_t)(carry >> PLAN_FEW_SHIFT) & ((1 << (PLAN_MANY_SHIFT - PLAN_FEW_SHIFT)) - 1);
    }
}

static __device__ uint32_t slot_bit(const plan_args &a, int32_t place) {
    const int32_t slot = a.plan.slot[place];
    return slot >= 0 ? 1u << slot : 0u;
}

/* Which adapters the rows of each tile have: a warp a tile of many places, a thread a tile of few. */
static __device__ void plan_slots(const plan_args &a) {
    const int32_t lane = (int32_t)threadIdx.x % 32, n_many = a.plan.n_tile[0], n_few = a.plan.n_tile[1];
    const int32_t thread = (int32_t)(blockIdx.x * PLAN_THREADS + threadIdx.x), n_thread = (int32_t)gridDim.x * PLAN_THREADS;
    for (int32_t i = thread / 32; i < n_many; i += n_thread / 32) {
        experts_tile *tile = a.plan.tile + i;
        uint32_t slots = 0;
        for (int32_t place = lane; place < tile->n; place += 32)
            slots |= slot_bit(a, tile->begin + place);
        slots = __reduce_or_sync(0xffffffffu, slots);
        if (lane == 0)
            tile->slots = slots;
    }
    for (int32_t i = thread; i < n_few; i += n_thread) {
        const experts_tile tile = *experts_few_tile(a.plan, i);
        uint32_t slots = 0;
        for (int32_t place = 0; place < tile.n; place++)
            slots |= slot_bit(a, tile.begin + place);
        experts_few_tile(a.plan, i)->slots = slots;
    }
}

static __global__ void __launch_bounds__(PLAN_THREADS) plan_kernel(const __grid_constant__ plan_args a) {
    bi_cuda_begin();
    extern __shared__ int32_t count[]; /* (n_warp, n_expert), then total (n_expert) */
    const uint32_t lane = threadIdx.x % 32;
    for (int32_t i = (int32_t)threadIdx.x; i < a.n_warp * a.n_expert; i += PLAN_THREADS)
        count[i] = 0;
    if (blockIdx.x == 0 && threadIdx.x < EXPERTS_CLASSES)
        a.plan.n_tile[2 + threadIdx.x] = 0;
    __syncthreads();
    int32_t *own = count + (int32_t)threadIdx.x / 32 * a.n_expert;
    each_pair(a, [&](int32_t, int32_t expert, uint32_t same) {
        if (expert >= 0 && (uint32_t)__ffs((int)same) == lane + 1)
            own[expert] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
    plan_tiles(a, count, count + a.n_warp * a.n_expert);
    __syncthreads();
    each_pair(a, [&](int32_t pair, int32_t expert, uint32_t same) {
        if (expert >= 0) {
            const int32_t place = own[expert] + __popc(same & ((1u << lane) - 1)), row = pair / a.topk;
            const int32_t slot = a.row_slot ? a.row_slot[row] : -1;
            a.plan.pair[place] = pair;
            a.plan.row[place] = row;
            a.plan.slot[place] = slot < a.n_slot ? slot : -1;
        }
        __syncwarp();
        if (expert >= 0 && (uint32_t)__ffs((int)same) == lane + 1)
            own[expert] += __popc(same);
        __syncwarp();
    });
    sync_blocks();
    if (a.n_slot > 0)
        plan_slots(a);
}

static br_status launch_plan(bi_ctx *ctx, const bi_experts_args *a, const experts_plan *plan, int32_t few_max) {
    const int32_t n_pair = a->n_row * a->topk, fit = PLAN_SHARED_MAX / (int32_t)sizeof(int32_t) / a->n_expert - 1;
    const int32_t use = (n_pair + 31) / 32, most = use < PLAN_THREADS / 32 ? use : PLAN_THREADS / 32;
    const plan_args args = {*plan, a->expert, a->row_slot, n_pair, a->topk, a->n_expert, a->n_slot, fit < most ? fit : most, few_max};
    const int32_t n_block = n_pair / PLAN_PAIRS < 1 ? 1 : n_pair / PLAN_PAIRS < PLAN_BLOCKS ? n_pair / PLAN_PAIRS : PLAN_BLOCKS;
    cudaLaunchAttribute attribute[2];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    attribute[1].id = cudaLaunchAttributeClusterDimension;
    attribute[1].val.clusterDim.x = (unsigned)n_block;
    attribute[1].val.clusterDim.y = attribute[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3((unsigned)n_block);
    launch.blockDim = dim3(PLAN_THREADS);
    launch.dynamicSmemBytes = sizeof(int32_t) * (size_t)a->n_expert * (size_t)(args.n_warp + 1);
    launch.stream = ctx->stream;
    launch.attrs = attribute;
    launch.numAttrs = n_block > 1 ? 2 : 1;
    cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, PLAN_SHARED_MAX);
    cudaLaunchKernelEx(&launch, plan_kernel, args);
    return bi_cuda_launched(ctx, BI_K_experts_plan, "experts");
}

/* ---- scratch ------------------------------------------------------------------------------------------------------- */

static int32_t whole16(int32_t n) {
    return (n + 15) / 16 * 16;
}

static size_t whole64(int32_t n) {
    return (size_t)blocked_chunks(n) * EXPERTS_K;
}

/* The plan; T of two maps; inputs in blocks, and when they are used up h of tiles of few by place; h in blocks or by place. */
typedef struct experts_scratch {
    experts_plan plan;
    bi_bf16 *t[2], *in, *h;
} experts_scratch;

static experts_scratch carve(bi_carver *carver, int32_t n_row, int32_t topk, int32_t n_expert, int32_t d, int32_t d_ff, int32_t rank) {
    const size_t n_pair = (size_t)n_row * (size_t)topk, n_tile = (size_t)n_expert + n_pair / EXPERTS_TILE_MAX;
    const size_t n_blocked = n_pair + 8 * (n_tile + 1);
    experts_scratch s;
    s.plan.tile = (experts_tile *)bi_carve(carver, n_tile * sizeof(experts_tile));
    s.plan.tile_max = (int32_t)n_tile;
    s.plan.n_tile = (int32_t *)bi_carve(carver, (2 + EXPERTS_CLASSES) * sizeof(int32_t));
    s.plan.of_class = (int32_t *)bi_carve(carver, EXPERTS_CLASSES * n_tile * sizeof(int32_t));
    s.plan.pair = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    s.plan.row = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    s.plan.slot = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    for (int m = 0; m < 2; m++)
        s.t[m] = (bi_bf16 *)bi_carve(carver, n_pair * (size_t)rank * sizeof(bi_bf16));
    s.in = (bi_bf16 *)bi_carve(carver, n_blocked * whole64(d > d_ff ? d : d_ff) * sizeof(bi_bf16));
    s.h = (bi_bf16 *)bi_carve(carver, n_blocked * whole64(d_ff) * sizeof(bi_bf16));
    return s;
}

size_t bi_cuda_experts_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    carve(&carver, limits->n_row, limits->n_expert_topk, limits->n_expert, limits->d_expert, limits->d_expert_ff, bi_pad_rank(limits->rank));
    return carver.used;
}

/* ---- the op -------------------------------------------------------------------------------------------------------- */

static br_status check_map(const bi_mat *map, const char *name, int32_t n_out, int32_t n_in) {
    if (!map->data || map->n_out != n_out || map->n_in != n_in)
        return br_fail(BR_E_SHAPE, "experts: %s is (%d, %d): expected (%d, %d)", name, map->n_out, map->n_in, n_out, n_in);
    return BR_OK;
}

static br_status check_lora(const bi_ctx *ctx, const bi_experts_args *a, const bi_adapter *lora, const char *name, int32_t n_out,
                            int32_t n_in) {
    for (int32_t slot = 0; lora && slot < a->n_slot; slot++) {
        const bi_mat *A = &lora[slot].a, *b = &lora[slot].b;
        if (!A->data)
            continue;
        if (A->n_in != n_in || b->n_out != n_out || A->n_out != b->n_in || !b->data || !lora[slot].s)
            return br_fail(BR_E_SHAPE, "experts: %s: slot %d, A (%d, %d), B (%d, %d): expected A (r, %d), B (%d, r)", name, slot, A->n_out,
                           A->n_in, b->n_out, b->n_in, n_in, n_out);
        if (A->n_out < 1 || bi_pad_rank(A->n_out) > bi_pad_rank(ctx->limits.rank))
            return br_fail(BR_E_SHAPE, "experts: %s: slot %d, rank %d: expected 1 to %d", name, slot, A->n_out, bi_pad_rank(ctx->limits.rank));
    }
    return BR_OK;
}

static br_status check_args(const bi_ctx *ctx, const bi_experts_args *a) {
    const bi_limits *l = &ctx->limits;
    if (a->n_row < 0 || a->n_row > l->n_row || a->topk < 1 || a->topk > l->n_expert_topk || a->n_expert < 1 || a->n_expert > l->n_expert)
        return br_fail(BR_E_SHAPE, "experts: %d rows, %d of %d experts: expected 0 to %d, 1 to %d, 1 to %d", a->n_row, a->topk, a->n_expert,
                       l->n_row, l->n_expert_topk, l->n_expert);
    if (a->d < 1 || a->d > l->d_expert || a->d_ff < 1 || a->d_ff > l->d_expert_ff)
        return br_fail(BR_E_SHAPE, "experts: widths %d and %d: expected 1 to %d, 1 to %d", a->d, a->d_ff, l->d_expert, l->d_expert_ff);
    BR_TRY(check_map(&a->w1, "w1", a->d_ff, a->d));
    BR_TRY(check_map(&a->w3, "w3", a->d_ff, a->d));
    BR_TRY(check_map(&a->w2, "w2", a->d, a->d_ff));
    if (a->w1.form != a->w3.form)
        return br_fail(BR_E_UNSUPPORTED, "experts: w1 and w3 of two forms: expected one");
    if (a->n_slot > EXPERTS_SLOT_MAX || a->n_expert > PLAN_SHARED_MAX / (int32_t)sizeof(int32_t) / 2)
        return br_fail(BR_E_LIMIT, "experts: %d adapters, %d experts: expected at most %d, %d", a->n_slot, a->n_expert, EXPERTS_SLOT_MAX,
                       PLAN_SHARED_MAX / (int)sizeof(int32_t) / 2);
    if ((int64_t)a->n_row * a->topk >= 1 << PLAN_FEW_SHIFT)
        return br_fail(BR_E_LIMIT, "experts: %d rows of %d experts: expected less than %d pairs", a->n_row, a->topk, 1 << PLAN_FEW_SHIFT);
    BR_TRY(check_lora(ctx, a, a->lora1, "w1", a->d_ff, a->d));
    BR_TRY(check_lora(ctx, a, a->lora3, "w3", a->d_ff, a->d));
    return check_lora(ctx, a, a->lora2, "w2", a->d, a->d_ff);
}

/* Puts the adapters of one map into the product: their B, or A and s for T. Returns the largest rank. */
static int32_t put_side(experts_product *p, int map, const bi_adapter *lora, int32_t n_slot, int for_t) {
    int32_t most = 0;
    for (int32_t slot = 0; slot < EXPERTS_SLOT_MAX; slot++) {
        const int have = lora && slot < n_slot && lora[slot].a.data;
        const bi_mat *mat = !have ? NULL : for_t ? &lora[slot].a : &lora[slot].b;
        experts_side side = {NULL, 0, 0};
        if (have) {
            side.data = (const unsigned char *)mat->data;
            side.stride = mat->stride;
            side.rank = lora[slot].a.n_out;
        }
        p->side[map][slot] = side;
        p->s[map][slot] = have ? lora[slot].s : NULL;
        most = side.rank > most ? side.rank : most;
    }
    return most;
}

/* T of up to two maps of one input, before the product that they continue. */
static br_status launch_t(bi_ctx *ctx, const experts_product *of, const bi_experts_args *a, const bi_adapter *lora0, const bi_adapter *lora1) {
    experts_product p = *of;
    const int32_t rank0 = put_side(&p, 0, lora0, a->n_slot, 1), rank1 = put_side(&p, 1, lora1, a->n_slot, 1);
    const int32_t rank = rank0 > rank1 ? rank0 : rank1;
    if (rank == 0)
        return BR_OK;
    p.n_slab = (rank + 2 * EXPERTS_SUB - 1) / (2 * EXPERTS_SUB);
    p.n_part = p.n_slab * a->n_slot;
    return bi_experts_t(ctx, &p);
}

/* Which tiles a step can have: both kinds, or by the number of its rows only one. p: inputs by place, or gathered; MXFP4 takes
 * those of many places from blocks, which are made here where the product before has not left them so. */
static br_status launch_up_many(bi_ctx *ctx, experts_product p, const bi_experts_args *a, const experts_scratch *s) {
    if (a->w2.form == BI_FORM_FP4 && a->w1.form == BI_FORM_FP4) {
        p.out_blocked = 1;
        p.out_ld = (int64_t)whole64(a->d_ff);
    }
    if (a->w1.form != BI_FORM_FP4)
        return bi_experts_up_bf16(ctx, &p);
    BR_TRY(bi_experts_rows_fp4(ctx, &p, s->in));
    p.in = s->in;
    p.gather = 0;
    p.blocked = 1;
    return bi_experts_up_fp4(ctx, &p, a->n_row);
}

static br_status launch_up(bi_ctx *ctx, const experts_product *p, const bi_experts_args *a, const experts_scratch *s, int32_t few_max) {
    experts_product few = *p;
    few.out = s->in;
    if (a->n_row > few_max)
        BR_TRY(launch_up_many(ctx, *p, a, s));
    return few_max ? bi_experts_up_few(ctx, &few) : BR_OK;
}

static br_status launch_down(bi_ctx *ctx, const experts_product *p, const bi_experts_args *a, const experts_scratch *s, int32_t few_max) {
    experts_product few = *p, many = *p;
    few.in = s->in;
    few.blocked = 0;
    if (few_max)
        BR_TRY(bi_experts_down_few(ctx, &few));
    if (a->n_row <= few_max)
        return BR_OK;
    if (a->w2.form != BI_FORM_FP4)
        return bi_experts_down_bf16(ctx, &many);
    if (!many.blocked) {
        BR_TRY(bi_experts_rows_fp4(ctx, &many, s->in));
        many.in = s->in;
        many.blocked = 1;
    }
    return bi_experts_down_fp4(ctx, &many, a->n_row);
}

/* Places up to which a tile is one of few: none where a matrix is bf16, or its rows do not fit. */
static int32_t choose_few(const bi_experts_args *a) {
    const int32_t n_in = a->d > a->d_ff ? a->d : a->d_ff;
    const int64_t bytes = bi_ceil_div(n_in, EXPERTS_K) * EXPERTS_K * EXPERTS_FEW_MAX * (int64_t)sizeof(bi_bf16);
    return a->w1.form == BI_FORM_FP4 && a->w2.form == BI_FORM_FP4 && bytes <= EXPERTS_FEW_SHARED ? EXPERTS_FEW_MAX : 0;
}

static br_status gate_and_up(bi_ctx *ctx, const bi_experts_args *a, experts_product p, const experts_scratch *s, int32_t few_max) {
    p.n_slab = p.n_part = (a->d_ff + 2 * EXPERTS_SUB - 1) / (2 * EXPERTS_SUB);
    p.n_in = a->d;
    p.n_out = a->d_ff;
    p.in = a->x;
    p.in_ld = a->d;
    p.gather = 1;
    p.in_aligned = a->d % 8 == 0 && (uintptr_t)a->x % 16 == 0;
    p.w[0] = (const unsigned char *)a->w1.data;
    p.w[1] = (const unsigned char *)a->w3.data;
    p.w_stride[0] = a->w1.stride;
    p.w_stride[1] = a->w3.stride;
    p.out = s->h;
    p.out_ld = whole16(a->d_ff);
    BR_TRY(launch_t(ctx, &p, a, a->lora1, a->lora3));
    const int32_t rank1 = put_side(&p, 0, a->lora1, a->n_slot, 0), rank3 = put_side(&p, 1, a->lora3, a->n_slot, 0);
    p.has_t = rank1 || rank3;
    return launch_up(ctx, &p, a, s, few_max);
}

static br_status down(bi_ctx *ctx, const bi_experts_args *a, experts_product p, const experts_scratch *s, int32_t few_max) {
    p.n_slab = p.n_part = (a->d + 4 * EXPERTS_SUB - 1) / (4 * EXPERTS_SUB);
    p.n_in = a->d_ff;
    p.n_out = a->d;
    p.in = s->h;
    p.in_ld = whole16(a->d_ff);
    p.in_few = s->in;
    p.gather = 0;
    p.blocked = a->w1.form == BI_FORM_FP4 && a->w2.form == BI_FORM_FP4;
    p.in_aligned = 1; /* whole 16s of h, zeros behind d_ff */
    p.w[0] = (const unsigned char *)a->w2.data;
    p.w_stride[0] = a->w2.stride;
    p.out = a->y;
    p.out_ld = a->d;
    p.out_aligned = a->d % 4 == 0 && (uintptr_t)a->y % 8 == 0;
    BR_TRY(launch_t(ctx, &p, a, a->lora2, NULL));
    p.has_t = put_side(&p, 0, a->lora2, a->n_slot, 0) != 0;
    put_side(&p, 1, NULL, 0, 0);
    return launch_down(ctx, &p, a, s, few_max);
}

br_status bi_cuda_experts(bi_ctx *ctx, const bi_experts_args *a) {
    BR_TRY(check_args(ctx, a));
    if (a->n_row == 0)
        return BR_OK;
    const int32_t rank = bi_pad_rank(ctx->limits.rank);
    bi_carver carver = bi_cuda_scratch(ctx);
    const experts_scratch s = carve(&carver, a->n_row, a->topk, a->n_expert, a->d, a->d_ff, rank);
    experts_product p = {};
    p.plan = s.plan;
    p.t[0] = s.t[0];
    p.t[1] = s.t[1];
    p.t_ld = rank;
    p.spread = (experts_spread){8, 66, 33};
    p.act = a->act;
    p.act_plain = act_has_plain(&a->act);
    p.act_inverse[0] = p.act_plain ? 1.0f / a->act.beta : 0.0f;
    p.act_inverse[1] = p.act_plain ? 1.0f / a->act.linear_beta : 0.0f;
    p.fault = a->fault;
    const int32_t few_max = choose_few(a);
    BR_TRY(launch_plan(ctx, a, &s.plan, few_max));
    BR_TRY(gate_and_up(ctx, a, p, &s, few_max));
    return down(ctx, a, p, &s, few_max);
}

/* ---- combine ------------------------------------------------------------------------------------------------------- */

/* WIDE: eight elements a thread by 16-byte loads; else one. All experts of a row are on their way at once. */
template <bool WIDE> static __global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(const __grid_constant__ bi_combine_args a) {
    bi_cuda_begin();
    constexpr int WIDTH = WIDE ? COMBINE_WIDTH : 1;
    const int64_t i = (int64_t)blockIdx.x * COMBINE_THREADS + threadIdx.x;
    const int32_t n = a.d / WIDTH, row = (int32_t)(i / n), col = (int32_t)(i % n) * WIDTH;
    if (row >= a.n_row)
        return;
    const bi_bf16 *e = a.e + (int64_t)row * a.topk * a.d + col;
    const float *p = a.p + (int64_t)row * a.topk;
    float acc[WIDTH] = {};
    for (int32_t first = 0; first < a.topk; first += COMBINE_AHEAD) {
        uint4 raw[COMBINE_AHEAD];
        float weight[COMBINE_AHEAD];
#pragma unroll
        for (int k = 0; k < COMBINE_AHEAD; k++)
            if (first + k < a.topk) {
                const bi_bf16 *from = e + (int64_t)(first + k) * a.d;
                raw[k] = WIDE ? *reinterpret_cast<const uint4 *>(from) : make_uint4(*from, 0, 0, 0);
                weight[k] = p[first + k];
            }
#pragma unroll
        for (int k = 0; k < COMBINE_AHEAD; k++)
            if (first + k < a.topk) {
                const uint32_t word[4] = {raw[k].x, raw[k].y, raw[k].z, raw[k].w};
#pragma unroll
                for (int c = 0; c < WIDTH; c++)
                    acc[c] = BI_FMA(weight[k], bi_f32_of(c & 1 ? word[c / 2] & 0xffff0000u : word[c / 2] << 16), acc[c]);
            }
    }
    bi_bf16 *y = a.y + (int64_t)row * a.d + col;
    if constexpr (WIDE) {
        uint32_t word[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            word[c] = (uint32_t)bi_round(acc[2 * c]) | (uint32_t)bi_round(acc[2 * c + 1]) << 16;
        *reinterpret_cast<uint4 *>(y) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
        *y = bi_round(acc[0]);
    }
}

br_status bi_cuda_combine(bi_ctx *ctx, const bi_combine_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->topk < 1)
        return br_fail(BR_E_SHAPE, "combine: %d rows of %d from %d experts: expected n_row >= 0, d >= 1, topk >= 1", a->n_row, a->d, a->topk);
    if (a->n_row == 0)
        return BR_OK;
    const bool wide = a->d % COMBINE_WIDTH == 0 && (uintptr_t)a->e % 16 == 0 && (uintptr_t)a->y % 16 == 0;
    const int64_t n = (int64_t)a->n_row * (a->d / (wide ? COMBINE_WIDTH : 1));
    const unsigned grid = (unsigned)bi_ceil_div(n, COMBINE_THREADS);
    if (wide)
        bi_cuda_launch(ctx, combine_kernel<true>, grid, COMBINE_THREADS, 0, *a);
    else
        bi_cuda_launch(ctx, combine_kernel<false>, grid, COMBINE_THREADS, 0, *a);
    return bi_cuda_launched(ctx, BI_K_combine, "combine");
}

/* ---- the MXFP4 form ------------------------------------------------------------------------------------------------ */

/* Blocks of 64 outputs x 64 inputs, those of 64 outputs one after the other; zeros fill up. */
size_t bi_cuda_fp4_bytes(int32_t n_out, int32_t n_in) {
    const size_t blocks = (size_t)bi_ceil_div(n_out, EXPERTS_SUB) * (size_t)bi_ceil_div(n_in, EXPERTS_K);
    return (blocks * EXPERTS_FP4_BLOCK + 255) / 256 * 256;
}

/* Bits of a byte's two codes in a word, as register r of the fragment; fp4_expand takes them apart. */
typedef struct fp4_spread {
    uint32_t of[4][256];
} fp4_spread;

static void make_spread(fp4_spread *spread) {
    static const int sign_at[4] = {15, 12, 14, 13}, size_at[4] = {6, 3, 0, 9};
    for (int r = 0; r < 4; r++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t word = 0;
            for (int half = 0; half < 2; half++) {
                const uint32_t code = byte >> 4 * half & 15u;
                word |= ((code >> 3) << sign_at[r] | (code & 7u) << size_at[r]) << 16 * half;
            }
            spread->of[r][byte] = word;
        }
}

/* The codes and scales of row pair g of warp w in one block: rows that stand at g and g + 8 of the warp's 16. NULL: no such row. */
static void pack_pair(unsigned char *block, const fp4_spread *spread, int w, int g, const uint8_t *const code[2],
                      const uint8_t *const scale[2], int32_t chunk, int32_t n_in) {
    const int32_t n_k = n_in - chunk * EXPERTS_K < EXPERTS_K ? n_in - chunk * EXPERTS_K : EXPERTS_K;
    for (int q = 0; q < 4; q++) {
        uint32_t word[4] = {0, 0, 0, 0};
        for (int s = 0; 16 * s < n_k; s++)
            for (int r = 0; r < 4; r++)
                if (code[r & 1])
                    word[s] |= spread->of[r][code[r & 1][chunk * (EXPERTS_K / 2) + s * 8 + (r >> 1) * 4 + q]];
        memcpy(block + ((w * 8 + g) * 4 + q) * 16, word, sizeof word);
    }
    uint8_t scales[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; i++)
        if (scale[i >> 1] && 32 * (i & 1) < n_k)
            scales[i] = scale[i >> 1][chunk * 2 + (i & 1)];
    memcpy(block + EXPERTS_FP4_CODES + (w * 8 + g) * 4, scales, sizeof scales);
}

static void pack_all(unsigned char *packed, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale) {
    fp4_spread spread;
    const int32_t n_chunk = (n_in + EXPERTS_K - 1) / EXPERTS_K;
    make_spread(&spread);
    for (int32_t first = 0; first < n_out; first += EXPERTS_SUB)
        for (int w = 0; w < 4; w++)
            for (int g = 0; g < 8; g++) {
                const uint8_t *codes[2] = {NULL, NULL}, *scales[2] = {NULL, NULL};
                for (int i = 0; i < 2; i++) {
                    const int32_t row = first + w * 16 + bi_experts_row(g + 8 * i);
                    if (row < n_out) {
                        codes[i] = code + (size_t)row * (size_t)(n_in / 2);
                        scales[i] = scale + (size_t)row * (size_t)(n_in / 32);
                    }
                }
                unsigned char *block = packed + (size_t)(first / EXPERTS_SUB) * (size_t)n_chunk * EXPERTS_FP4_BLOCK;
                for (int32_t chunk = 0; chunk < n_chunk; chunk++)
                    pack_pair(block + (size_t)chunk * EXPERTS_FP4_BLOCK, &spread, w, g, codes, scales, chunk, n_in);
            }
}

br_status bi_cuda_mat_pack_fp4(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale) {
    if (n_out < 1 || n_in < 1 || n_in % 32 != 0)
        return br_fail(BR_E_SHAPE, "mat_pack_fp4: (%d, %d): expected at least one output, inputs in multiples of 32", n_out, n_in);
    const size_t bytes = bi_cuda_fp4_bytes(n_out, n_in);
    unsigned char *packed = NULL;
    br_status status;
    BR_TRY(br_mem_alloc((void **)&packed, bytes, "a packed matrix"));
    pack_all(packed, n_out, n_in, code, scale);
    BR_TRY_GOTO(br_device_upload(ctx->device, dst, packed, bytes), end);
    BR_TRY_GOTO(br_device_wait(ctx->device), end);
end:
    br_mem_free(packed);
    return status;
}
