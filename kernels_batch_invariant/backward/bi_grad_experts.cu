/* Gradients of the routed experts, CUDA.      Contract: N-MOE-1, N-ACT, N-LORA, N-FP4
 *
 * A plan (bi_grad_experts_plan.cu), dy in bf16 by place, then over the tiles of the plan (grid: tile * slabs of 128 outputs; a tile that
 * the plan does not have ends at once; bi_grad_experts_product.cuh):
 *   low_kernel   T1, T3 = s A x, U2 = s dy B, later U1, U3 from dg, du and T2 from h; each the sum of two bf16, which costs little and
 *                leaves the roundings of dy, h, dg and du as the only ones
 *   up_kernel    g = W1 x + B1 T1, u = W3 x + B3 T3, dh = dy W2 + U2 A2; h, dg, du in bf16
 *   dx_kernel    dg W1 + U1 A1 + du W3 + U3 A3 of each pair, f32; sum_kernel adds a row's pairs, choices rising
 * and outer_kernel: da = U^T x and db = dy^T T of one expert and slot, its places rising; grid (expert, 128 of the wide side, 32 of the
 * rank), 256 threads, eight warps of 16 x 32. */
#include "bi_grad_experts_product.cuh"

enum {
    THREADS = 256,
    OUTER_LOW = 32, /* columns of the low side */
    OUTER_WIDE_LD = GE_OUTS + 8,
    OUTER_LOW_LD = OUTER_LOW + 8
};

/* One side, A or B, of the adapters of a map; rank 0: the slot leaves it alone. */
typedef struct ge_side {
    const unsigned char *data[GE_SLOT_MAX];
    size_t stride[GE_SLOT_MAX];
    int32_t rank[GE_SLOT_MAX];
} ge_side;

static __device__ __forceinline__ ge_mat mat_of(const bi_mat &stack, int32_t expert) {
    const ge_mat m = {(const unsigned char *)stack.data + stack.stride * (size_t)expert, stack.n_out, stack.n_in, stack.form == BI_FORM_FP4};
    return m;
}

/* A (rank, wide) when is_a, else B (wide, rank). */
static __device__ __forceinline__ ge_mat side_of(const ge_side &side, const ge_tile &tile, int32_t wide, bool is_a) {
    ge_mat m = {NULL, 0, 0, false};
    if (tile.slot >= 0 && side.rank[tile.slot] > 0) {
        const int32_t rank = side.rank[tile.slot];
        m.data = side.data[tile.slot] + side.stride[tile.slot] * (size_t)tile.expert;
        m.n_out = is_a ? rank : wide;
        m.n_in = is_a ? wide : rank;
    }
    return m;
}

/* The block's tile and first output; false: there is none. */
static __device__ __forceinline__ bool take_tile(const ge_plan &plan, int32_t n_out, ge_tile &tile, int32_t &first) {
    const int32_t n_slab = (n_out + GE_OUTS - 1) / GE_OUTS, at = (int32_t)blockIdx.x / n_slab;
    if (at >= *plan.n_tile)
        return false;
    tile = plan.tile[at];
    first = (int32_t)blockIdx.x % n_slab * GE_OUTS;
    return true;
}

/* ---- low ------------------------------------------------------------------------------------------------------------- */

typedef struct low_args {
    ge_plan plan;
    ge_rows rows;
    ge_side side;
    const float *s[GE_SLOT_MAX];
    bi_bf16 *to, *rest; /* (place, ld), zeros behind the rank; rest: what rounding took away */
    int32_t ld;
    experts_spread spread;
} low_args;

/* TURNED: U = s rows B, else T = s rows A^T. */
template <bool TURNED> static __global__ void __launch_bounds__(GE_THREADS) low_kernel(const __grid_constant__ low_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    ge_tile tile;
    int32_t first;
    if (!take_tile(a.plan, a.ld, tile, first))
        return;
    const ge_mat w = side_of(a.side, tile, a.rows.n, !TURNED);
    if (!w.data)
        return;
    ge_acc acc = {};
    if (first < (TURNED ? w.n_in : w.n_out))
        ge_multiply<TURNED>(acc, a.rows, w, tile, first, a.spread, shared);
    const float s = a.s[tile.slot][tile.expert];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t row = ge_row_of(i, e), col = first + ge_col_of(j, e);
                if (row >= tile.n || col >= a.ld)
                    continue;
                const int64_t at = (int64_t)(tile.begin + row) * a.ld + col;
                const float v = s * acc[i][j][e];
                a.to[at] = bi_round(v);
                a.rest[at] = bi_round(v - bi_widen(bi_round(v)));
            }
}

/* ---- up -------------------------------------------------------------------------------------------------------------- */

typedef struct up_args {
    ge_plan plan;
    ge_rows x, dy, t1, t3, u2;
    bi_mat w1, w3, w2;
    ge_side b1, b3, a2;
    bi_act act;
    bi_bf16 *h, *dg, *du; /* (place, ld), zeros behind d_ff */
    int32_t d_ff, ld;
    experts_spread spread;
} up_args;

/* acc of a map and its adapter: wide W, then low, and the rest of low, with the adapter's side. */
template <bool TURNED>
static __device__ __forceinline__ void add_map(ge_acc &acc, const ge_rows &wide, const ge_mat &w, const ge_rows &low, const ge_mat &side,
                                               const ge_tile &tile, int32_t first, const experts_spread &spread, unsigned char *shared) {
    const int n = side.data ? 3 : 1;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        ge_rows rows = i ? low : wide;
        const ge_mat mat = i ? side : w;
        rows.base = i == 2 ? low.rest : rows.base;
        rows.n = TURNED ? mat.n_out : mat.n_in;
        ge_multiply<TURNED>(acc, rows, mat, tile, first, spread, shared);
    }
}

static __global__ void __launch_bounds__(GE_THREADS) up_kernel(const __grid_constant__ up_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    ge_tile tile;
    int32_t first;
    if (!take_tile(a.plan, a.d_ff, tile, first))
        return;
    ge_acc g = {}, u = {}, dh = {};
    add_map<false>(g, a.x, mat_of(a.w1, tile.expert), a.t1, side_of(a.b1, tile, a.d_ff, false), tile, first, a.spread, shared);
    add_map<false>(u, a.x, mat_of(a.w3, tile.expert), a.t3, side_of(a.b3, tile, a.d_ff, false), tile, first, a.spread, shared);
    add_map<true>(dh, a.dy, mat_of(a.w2, tile.expert), a.u2, side_of(a.a2, tile, a.d_ff, true), tile, first, a.spread, shared);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t row = ge_row_of(i, e), col = first + ge_col_of(j, e);
                if (row >= tile.n || col >= a.ld)
                    continue;
                const int64_t at = (int64_t)(tile.begin + row) * a.ld + col;
                const grad_act slope = grad_act_of(a.act, g[i][j][e], u[i][j][e], dh[i][j][e]);
                a.h[at] = bi_round(slope.h);
                a.dg[at] = bi_round(slope.dg);
                a.du[at] = bi_round(slope.du);
            }
}

/* ---- dx -------------------------------------------------------------------------------------------------------------- */

typedef struct dx_args {
    ge_plan plan;
    ge_rows dg, du, u1, u3;
    bi_mat w1, w3;
    ge_side a1, a3;
    float *to; /* (pair, d) */
    int32_t d;
    experts_spread spread;
} dx_args;

static __global__ void __launch_bounds__(GE_THREADS) dx_kernel(const __grid_constant__ dx_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    ge_tile tile;
    int32_t first;
    if (!take_tile(a.plan, a.d, tile, first))
        return;
    ge_acc acc = {};
    add_map<true>(acc, a.dg, mat_of(a.w1, tile.expert), a.u1, side_of(a.a1, tile, a.d, true), tile, first, a.spread, shared);
    add_map<true>(acc, a.du, mat_of(a.w3, tile.expert), a.u3, side_of(a.a3, tile, a.d, true), tile, first, a.spread, shared);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t row = ge_row_of(i, 2 * half);
            if (row >= tile.n)
                continue;
            float *to = a.to + (int64_t)a.plan.pair[tile.begin + row] * a.d;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (first + ge_col_of(j, e) < a.d)
                        to[first + ge_col_of(j, e)] = acc[i][j][2 * half + e];
        }
}

static __global__ void __launch_bounds__(THREADS) sum_kernel(const float *from, float *dx, int32_t n_row, int32_t topk, int32_t d) {
    const int32_t col = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    if (col >= d)
        return;
    for (int32_t row = (int32_t)blockIdx.y; row < n_row; row += (int32_t)gridDim.y) {
        const float *pair = from + (int64_t)row * topk * d + col;
        float sum = 0.0f;
        for (int32_t i = 0; i < topk; i++, pair += d)
            sum += *pair;
        dx[(int64_t)row * d + col] = sum;
    }
}

/* ---- rows in bf16 ---------------------------------------------------------------------------------------------------- */

/* dy by place; or x by row, where it is not aligned. */
typedef struct gather_args {
    const float *dy;
    const bi_bf16 *x;
    const int32_t *pair; /* with dy */
    bi_bf16 *to;         /* (n, ld), zeros behind d */
    int32_t n, d, ld;
    const int32_t *n_real; /* of the n with dy */
} gather_args;

static __global__ void __launch_bounds__(THREADS) gather_kernel(const gather_args a) {
    const int32_t col = (int32_t)(blockIdx.x * THREADS + threadIdx.x), n = a.dy ? *a.n_real : a.n;
    if (col >= a.ld)
        return;
    for (int32_t row = (int32_t)blockIdx.y; row < n; row += (int32_t)gridDim.y) {
        bi_bf16 v = 0;
        if (col < a.d)
            v = a.dy ? bi_round(a.dy[(int64_t)a.pair[row] * a.d + col]) : a.x[(int64_t)row * a.d + col];
        a.to[(int64_t)row * a.ld + col] = v;
    }
}

/* ---- da, db ---------------------------------------------------------------------------------------------------------- */

typedef struct outer_args {
    ge_plan plan;
    ge_rows wide, low;
    int32_t slot, rank, is_a;
    float *to; /* (expert, rank, wide) when is_a, else (expert, wide, rank) */
} outer_args;

/* Rows of places begin .. of columns first .. first + COLS - 1 into shared memory. */
template <int COLS, int LD>
static __device__ __forceinline__ void copy_places(uint32_t to, const ge_rows &rows, const bi_bf16 *base, int32_t begin, int32_t n,
                                                   int32_t first) {
#pragma unroll
    for (int i = 0; i < GE_PLACES * COLS / 8 / GE_THREADS; i++) {
        const int32_t at = (int32_t)threadIdx.x + i * GE_THREADS, place = at / (COLS / 8), col = at % (COLS / 8) * 8;
        const bool real = place < n && first + col < rows.n;
        const int64_t row = !real ? 0 : rows.index ? rows.index[begin + place] : begin + place;
        ge_copy16(to + (uint32_t)(place * LD + col) * 2, base + (real ? row * rows.ld + first + col : 0), real);
    }
}

static __global__ void __launch_bounds__(GE_THREADS) outer_kernel(const __grid_constant__ outer_args a) {
    __shared__ __align__(128) bi_bf16 wide[GE_PLACES * OUTER_WIDE_LD], low[2 * GE_PLACES * OUTER_LOW_LD];
    const int32_t expert = (int32_t)blockIdx.x, wide0 = (int32_t)blockIdx.y * GE_OUTS, low0 = (int32_t)blockIdx.z * OUTER_LOW;
    const int32_t *offset = a.plan.offset + expert * a.plan.n_key + a.slot + 1;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, eight = lane & 7, odd = lane >> 3 & 1, high = lane >> 4;
    const uint32_t wide_at = ge_shared(wide) + ((high * 8 + eight) * OUTER_WIDE_LD + warp * 16 + odd * 8) * 2;
    const uint32_t low_at = ge_shared(low) + ((odd * 8 + eight) * OUTER_LOW_LD + high * 8) * 2;
    float acc[4][4] = {};
    for (int32_t begin = offset[0]; begin < offset[1]; begin += GE_PLACES) {
        const int32_t n = offset[1] - begin;
        copy_places<GE_OUTS, OUTER_WIDE_LD>(ge_shared(wide), a.wide, a.wide.base, begin, n, wide0);
        copy_places<OUTER_LOW, OUTER_LOW_LD>(ge_shared(low), a.low, a.low.base, begin, n, low0);
        copy_places<OUTER_LOW, OUTER_LOW_LD>(ge_shared(low + GE_PLACES * OUTER_LOW_LD), a.low, a.low.rest, begin, n, low0);
        ge_commit();
        ge_wait<0>();
        __syncthreads();
#pragma unroll
        for (uint32_t k = 0; k < GE_PLACES; k += 16) {
            uint32_t x[4];
            ge_ldmatrix4_turned(wide_at + k * OUTER_WIDE_LD * 2, x);
#pragma unroll
            for (uint32_t part = 0; part < 2; part++) {
                const uint32_t at = low_at + (part * GE_PLACES + k) * OUTER_LOW_LD * 2;
                uint32_t y[2][4];
                ge_ldmatrix4_turned(at, y[0]);
                ge_ldmatrix4_turned(at + 32, y[1]);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    bi_cuda_mma16(acc[j], x, &y[j / 2][j % 2 * 2]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int32_t at = wide0 + (int32_t)warp * 16 + (int32_t)lane / 4 + 8 * (e >> 1), r = low0 + j * 8 + (int32_t)lane % 4 * 2 + (e & 1);
            if (at < a.wide.n && r < a.rank)
                a.to[a.is_a ? ((int64_t)expert * a.rank + r) * a.wide.n + at : ((int64_t)expert * a.wide.n + at) * a.rank + r] = acc[j][e];
        }
}

/* ---- scratch --------------------------------------------------------------------------------------------------------- */

typedef enum map_name { MAP_1, MAP_3, MAP_2, MAPS } map_name;

typedef struct experts_scratch {
    ge_plan plan;
    bi_bf16 *x, *dy, *h, *dg, *du, *t[MAPS], *down[MAPS]; /* t and down: and behind them what rounding took away */
    float *dx; /* (pair, d), where dy and h lay */
    int32_t d_ld, ff_ld, low_ld;
} experts_scratch;

static experts_scratch carve(bi_carver *carver, int32_t n_row, int32_t topk, int32_t n_expert, int32_t n_key, int32_t d, int32_t d_ff, int32_t rank) {
    const size_t n_pair = (size_t)n_row * (size_t)topk, n_group = (size_t)n_expert * (size_t)n_key, two = sizeof(bi_bf16);
    const size_t n_tile = (n_group < n_pair ? n_group : n_pair) + n_pair / GE_PLACES;
    experts_scratch s;
    s.d_ld = grad_ld(d);
    s.ff_ld = grad_ld(d_ff);
    s.low_ld = grad_ld(rank);
    s.plan.n_key = n_key;
    s.plan.n_group = (int32_t)n_group;
    s.plan.n_pair = (int32_t)n_pair;
    s.plan.tile_max = (int32_t)n_tile;
    s.plan.key = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    s.plan.pair = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    s.plan.row = (int32_t *)bi_carve(carver, n_pair * sizeof(int32_t));
    s.plan.offset = (int32_t *)bi_carve(carver, (n_group + 1) * sizeof(int32_t));
    s.plan.tile = (ge_tile *)bi_carve(carver, n_tile * sizeof(ge_tile));
    s.plan.n_tile = (int32_t *)bi_carve(carver, sizeof(int32_t));
    s.x = (bi_bf16 *)bi_carve(carver, (size_t)n_row * (size_t)s.d_ld * two);
    const size_t dy = (n_pair * (size_t)s.d_ld * two + 255) / 256 * 256, h = n_pair * (size_t)s.ff_ld * two, dx = n_pair * (size_t)d * sizeof(float);
    unsigned char *both = (unsigned char *)bi_carve(carver, dy + h > dx ? dy + h : dx);
    s.dy = (bi_bf16 *)both;
    s.h = (bi_bf16 *)(both ? both + dy : NULL);
    s.dx = (float *)both;
    s.dg = (bi_bf16 *)bi_carve(carver, n_pair * (size_t)s.ff_ld * two);
    s.du = (bi_bf16 *)bi_carve(carver, n_pair * (size_t)s.ff_ld * two);
    for (int m = 0; m < MAPS; m++) {
        s.t[m] = (bi_bf16 *)bi_carve(carver, 2 * n_pair * (size_t)s.low_ld * two);
        s.down[m] = (bi_bf16 *)bi_carve(carver, 2 * n_pair * (size_t)s.low_ld * two);
    }
    return s;
}

size_t bi_grad_experts_cuda_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    if (limits->n_expert > 0)
        carve(&carver, limits->n_row, limits->n_expert_topk, limits->n_expert, limits->n_slot + 1, limits->d_expert, limits->d_expert_ff,
              limits->rank > 0 ? limits->rank : 0);
    return carver.used;
}

/* ---- launches -------------------------------------------------------------------------------------------------------- */

static const experts_spread SPREAD = {8, 66, 33};

typedef struct experts_run {
    bi_grad_ctx *ctx;
    const bi_grad_experts_args *args;
    experts_scratch s;
    const bi_adapter *lora[MAPS];
    const bi_grad_adapter *want[MAPS];
} experts_run;

static unsigned tiles_of(const experts_run *run, int32_t n_out) {
    return (unsigned)(run->s.plan.tile_max * bi_ceil_div(n_out, GE_OUTS));
}

static ge_rows rows_of(const bi_bf16 *base, const int32_t *index, int64_t ld, int32_t n) {
    const ge_rows rows = {base, NULL, index, ld, n};
    return rows;
}

static int64_t low_elements(const experts_run *run) {
    return (int64_t)run->s.plan.n_pair * run->s.low_ld;
}

static ge_rows low_rows(const experts_run *run, const bi_bf16 *base) {
    ge_rows rows = rows_of(base, NULL, run->s.low_ld, run->s.low_ld);
    rows.rest = base + low_elements(run);
    return rows;
}

static int has_adapter(const experts_run *run, int map) {
    for (int32_t i = 0; run->lora[map] && i < run->args->n_slot; i++)
        if (run->lora[map][i].a.data)
            return 1;
    return 0;
}

static ge_side side_args(const experts_run *run, int map, int is_a) {
    ge_side side;
    memset(&side, 0, sizeof side);
    for (int32_t i = 0; run->lora[map] && i < run->args->n_slot; i++) {
        const bi_adapter *adapter = &run->lora[map][i];
        const bi_mat *mat = is_a ? &adapter->a : &adapter->b;
        if (!adapter->a.data)
            continue;
        side.data[i] = (const unsigned char *)mat->data;
        side.stride[i] = mat->stride;
        side.rank[i] = adapter->a.n_out;
    }
    return side;
}

static br_status launch_low(const experts_run *run, int map, ge_rows rows, int turned, bi_bf16 *to) {
    low_args a;
    if (!has_adapter(run, map))
        return BR_OK;
    memset(&a, 0, sizeof a);
    a.plan = run->s.plan;
    a.rows = rows;
    a.side = side_args(run, map, !turned);
    for (int32_t i = 0; i < run->args->n_slot; i++)
        a.s[i] = run->lora[map][i].s;
    a.to = to;
    a.rest = to + low_elements(run);
    a.ld = run->s.low_ld;
    a.spread = SPREAD;
    const unsigned grid = tiles_of(run, a.ld);
    if (turned) {
        cudaFuncSetAttribute(low_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, GE_SHARED);
        low_kernel<true><<<grid, GE_THREADS, GE_SHARED, run->ctx->cuda->stream>>>(a);
    } else {
        cudaFuncSetAttribute(low_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, GE_SHARED);
        low_kernel<false><<<grid, GE_THREADS, GE_SHARED, run->ctx->cuda->stream>>>(a);
    }
    return bi_grad_launched("experts");
}

static br_status launch_up(const experts_run *run, ge_rows x, ge_rows dy) {
    const bi_grad_experts_args *args = run->args;
    up_args a;
    memset(&a, 0, sizeof a);
    a.plan = run->s.plan;
    a.x = x;
    a.dy = dy;
    a.t1 = low_rows(run, run->s.t[MAP_1]);
    a.t3 = low_rows(run, run->s.t[MAP_3]);
    a.u2 = low_rows(run, run->s.down[MAP_2]);
    a.w1 = args->w1;
    a.w3 = args->w3;
    a.w2 = args->w2;
    a.b1 = side_args(run, MAP_1, 0);
    a.b3 = side_args(run, MAP_3, 0);
    a.a2 = side_args(run, MAP_2, 1);
    a.act = args->act;
    a.h = run->s.h;
    a.dg = run->s.dg;
    a.du = run->s.du;
    a.d_ff = args->d_ff;
    a.ld = run->s.ff_ld;
    a.spread = SPREAD;
    cudaFuncSetAttribute(up_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GE_SHARED);
    up_kernel<<<tiles_of(run, a.d_ff), GE_THREADS, GE_SHARED, run->ctx->cuda->stream>>>(a);
    return bi_grad_launched("experts");
}

static br_status launch_dx(const experts_run *run, ge_rows dg, ge_rows du) {
    const bi_grad_experts_args *args = run->args;
    dx_args a;
    memset(&a, 0, sizeof a);
    a.plan = run->s.plan;
    a.dg = dg;
    a.du = du;
    a.u1 = low_rows(run, run->s.down[MAP_1]);
    a.u3 = low_rows(run, run->s.down[MAP_3]);
    a.w1 = args->w1;
    a.w3 = args->w3;
    a.a1 = side_args(run, MAP_1, 1);
    a.a3 = side_args(run, MAP_3, 1);
    a.to = run->s.dx;
    a.d = args->d;
    a.spread = SPREAD;
    cudaFuncSetAttribute(dx_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GE_SHARED);
    dx_kernel<<<tiles_of(run, a.d), GE_THREADS, GE_SHARED, run->ctx->cuda->stream>>>(a);
    BR_TRY(bi_grad_launched("experts"));
    const dim3 grid((unsigned)bi_ceil_div(a.d, THREADS), grad_rows_y(args->n_row));
    sum_kernel<<<grid, THREADS, 0, run->ctx->cuda->stream>>>(run->s.dx, args->dx, args->n_row, args->topk, a.d);
    return bi_grad_launched("experts");
}

static br_status launch_outer(const experts_run *run, int32_t slot, int32_t rank, ge_rows wide, const bi_bf16 *low, int is_a, float *to) {
    outer_args a;
    memset(&a, 0, sizeof a);
    if (!to)
        return BR_OK;
    a.plan = run->s.plan;
    a.wide = wide;
    a.low = low_rows(run, low);
    a.slot = slot;
    a.rank = rank;
    a.is_a = is_a;
    a.to = to;
    const dim3 grid((unsigned)run->args->n_expert, (unsigned)bi_ceil_div(wide.n, GE_OUTS), (unsigned)bi_ceil_div(rank, OUTER_LOW));
    outer_kernel<<<grid, GE_THREADS, 0, run->ctx->cuda->stream>>>(a);
    return bi_grad_launched("experts");
}

/* da and db of the slots of one map: x and dy are its input and the gradient of its output. */
static br_status launch_sums(const experts_run *run, int map, ge_rows x, ge_rows dy) {
    for (int32_t i = 0; run->want[map] && i < run->args->n_slot; i++) {
        const int32_t rank = run->lora[map][i].a.data ? run->lora[map][i].a.n_out : 0;
        BR_TRY(launch_outer(run, i, rank, x, run->s.down[map], 1, run->want[map][i].da));
        BR_TRY(launch_outer(run, i, rank, dy, run->s.t[map], 0, run->want[map][i].db));
    }
    return BR_OK;
}

static br_status launch_gather(const experts_run *run, const float *dy, const bi_bf16 *x, int32_t n, bi_bf16 *to) {
    const experts_scratch *s = &run->s;
    const gather_args a = {dy, x, s->plan.pair, to, n, run->args->d, s->d_ld, s->plan.offset + s->plan.n_group};
    const dim3 grid((unsigned)bi_ceil_div(a.ld, THREADS), grad_rows_y(n));
    gather_kernel<<<grid, THREADS, 0, run->ctx->cuda->stream>>>(a);
    return bi_grad_launched("experts");
}

/* ---- the op ---------------------------------------------------------------------------------------------------------- */

static br_status run_tiles(const experts_run *run, ge_rows x, ge_rows dy, ge_rows h, ge_rows dg, ge_rows du) {
    BR_TRY(launch_gather(run, run->args->dy, NULL, run->s.plan.n_pair, run->s.dy));
    BR_TRY(launch_low(run, MAP_1, x, 0, run->s.t[MAP_1]));
    BR_TRY(launch_low(run, MAP_3, x, 0, run->s.t[MAP_3]));
    BR_TRY(launch_low(run, MAP_2, dy, 1, run->s.down[MAP_2]));
    BR_TRY(launch_up(run, x, dy));
    BR_TRY(launch_low(run, MAP_1, dg, 1, run->s.down[MAP_1]));
    BR_TRY(launch_low(run, MAP_3, du, 1, run->s.down[MAP_3]));
    return run->want[MAP_2] ? launch_low(run, MAP_2, h, 0, run->s.t[MAP_2]) : BR_OK;
}

br_status bi_grad_experts_cuda(bi_grad_ctx *ctx, const bi_grad_experts_args *a) {
    BR_TRY(bi_grad_check_experts(&ctx->cuda->limits, a));
    if (a->n_slot > GE_SLOT_MAX)
        return br_fail(BR_E_LIMIT, "gradient of experts: %d adapters: expected at most %d", a->n_slot, (int)GE_SLOT_MAX);
    const int32_t rank = ctx->cuda->limits.rank > 0 ? ctx->cuda->limits.rank : 0;
    bi_carver carver = bi_grad_cuda_carver(ctx);
    experts_run run;
    run.ctx = ctx;
    run.args = a;
    run.s = carve(&carver, a->n_row, a->topk, a->n_expert, a->n_slot + 1, a->d, a->d_ff, rank);
    run.lora[MAP_1] = a->lora1;
    run.lora[MAP_3] = a->lora3;
    run.lora[MAP_2] = a->lora2;
    run.want[MAP_1] = a->slot1;
    run.want[MAP_3] = a->slot3;
    run.want[MAP_2] = a->slot2;
    const bool direct = a->d % 8 == 0 && (uintptr_t)a->x % 16 == 0;
    const ge_rows x = rows_of(direct ? a->x : run.s.x, run.s.plan.row, direct ? a->d : run.s.d_ld, a->d);
    const ge_rows dy = rows_of(run.s.dy, NULL, run.s.d_ld, a->d);
    const ge_rows h = rows_of(run.s.h, NULL, run.s.ff_ld, a->d_ff), dg = rows_of(run.s.dg, NULL, run.s.ff_ld, a->d_ff);
    const ge_rows du = rows_of(run.s.du, NULL, run.s.ff_ld, a->d_ff);
    BR_TRY(bi_grad_experts_plan(ctx, &run.s.plan, a->expert, a->row_slot, a->topk, a->n_expert));
    if (a->n_row > 0 && !direct)
        BR_TRY(launch_gather(&run, NULL, a->x, a->n_row, run.s.x));
    if (a->n_row > 0)
        BR_TRY(run_tiles(&run, x, dy, h, dg, du));
    BR_TRY(launch_sums(&run, MAP_1, x, dg));
    BR_TRY(launch_sums(&run, MAP_3, x, du));
    BR_TRY(launch_sums(&run, MAP_2, h, dy));
    return a->dx && a->n_row > 0 ? launch_dx(&run, dg, du) : BR_OK;
}
