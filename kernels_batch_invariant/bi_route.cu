/* bi_route on CUDA.      Contract: N-ROUTE, N-CHAIN, P-4
 *
 * The logits come from the dense product in f32 (bi_linear.cu), into scratch or the caller's array. Then a warp takes a row,
 * four a block: lane l holds experts l, l + 32, .. as ordered keys of RN(s + bias), in registers up to 1,024 experts, in shared
 * memory (4 bytes an expert and row) beyond. The k-th key is found bit by bit from the top by counting; everything above it is
 * chosen, and of its equals those of the lowest ids. Experts leave in rising id, and their s are added in that order. */
#include "bi_linear_parts.cuh"

enum {
    ROUTE_WARPS = 4,
    ROUTE_SHARED_MAX = 200 << 10
};

size_t bi_cuda_route_scratch(const bi_limits *limits) {
    const size_t n_row = limits->n_row > 0 ? (size_t)limits->n_row : 1;
    return limits->n_expert > 0 ? n_row * (size_t)limits->n_expert * sizeof(float) + 512 : 0;
}

/* The row of a request that ends here: any experts, without weight. */
static __device__ void route_nowhere(const bi_route_args &a, int32_t t, int lane) {
    for (int32_t i = lane; i < a.topk; i += 32) {
        a.expert[(int64_t)t * a.topk + i] = i;
        a.p[(int64_t)t * a.topk + i] = 0.0f;
    }
    if (lane == 0)
        bi_cuda_fault(a.fault, t, bi_f32_of(BI_F32_INF));
}

/* p of the chosen experts, which every lane may read. */
static __device__ void route_weights(const bi_route_args &a, int32_t t, int lane, const float *logit) {
    const int32_t *expert = a.expert + (int64_t)t * a.topk;
    float *p = a.p + (int64_t)t * a.topk;
    float sum = 0.0f;
    for (int32_t first = 0; first < a.topk; first += 32) {
        const int32_t n = a.topk - first < 32 ? a.topk - first : 32;
        const float s = lane < n ? bi_sigmoid(logit[expert[first + lane]]) : 0.0f;
        for (int32_t i = 0; i < n; i++)
            sum = BI_ADD(sum, __shfl_sync(0xffffffffu, s, i));
    }
    sum = BI_ADD(sum, BI_ROUTE_SUM_EPS);
    for (int32_t i = lane; i < a.topk; i += 32) {
        const float s = bi_sigmoid(logit[expert[i]]);
        p[i] = BI_MUL(a.renormalize ? BI_DIV(s, sum) : s, a.scale);
    }
}

/* PER experts a lane in registers; 0: all in shared memory. */
template <int PER> struct route_keys {
    uint32_t own[PER ? PER : 1];
    uint32_t *shared; /* this warp's */
    int lane, n_step;
    __device__ __forceinline__ int steps() const {
        return PER ? PER : n_step;
    }
    __device__ __forceinline__ uint32_t get(int i) const {
        return PER ? own[PER ? i : 0] : shared[i * 32 + lane];
    }
    __device__ __forceinline__ void put(int i, uint32_t key) {
        if (PER)
            own[PER ? i : 0] = key;
        else
            shared[i * 32 + lane] = key;
    }
};

/* Fills the keys of the row; an expert that is not there gets 0, which no finite sum has. Returns whether all logits are finite. */
template <int PER>
static __device__ __forceinline__ int route_fill(const bi_route_args &a, const float *logit, route_keys<PER> &keys) {
    int finite = 1;
#pragma unroll
    for (int i = 0; i < keys.steps(); i++) {
        const int32_t e = i * 32 + keys.lane;
        const float x = e < a.n_expert ? logit[e] : 0.0f;
        finite &= bi_is_finite(x);
        keys.put(i, e < a.n_expert ? bi_order_key(BI_ADD(bi_sigmoid(x), a.bias[e])) : 0);
    }
    return __all_sync(0xffffffffu, finite);
}

template <int PER> static __device__ __forceinline__ int route_count(const route_keys<PER> &keys, uint32_t least) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < keys.steps(); i++)
        count += keys.get(i) >= least;
    return __reduce_add_sync(0xffffffffu, count);
}

/* The first topk under P-4, ids rising. */
template <int PER>
static __device__ __forceinline__ void route_choose(const bi_route_args &a, const route_keys<PER> &keys, int32_t *expert) {
    uint32_t kth = 0;
    for (int bit = 31; bit >= 0; bit--)
        kth = route_count(keys, kth | 1u << bit) >= a.topk ? kth | 1u << bit : kth;
    const uint32_t below = (1u << keys.lane) - 1;
    int n_out = 0, ties = a.topk - (kth == 0xffffffffu ? 0 : route_count(keys, kth + 1));
#pragma unroll
    for (int i = 0; i < keys.steps(); i++) {
        const int32_t e = i * 32 + keys.lane;
        const uint32_t key = keys.get(i);
        const uint32_t equal = __ballot_sync(0xffffffffu, e < a.n_expert && key == kth);
        const int take = key > kth || (e < a.n_expert && key == kth && __popc(equal & below) < ties);
        const uint32_t taken = __ballot_sync(0xffffffffu, take);
        if (take)
            expert[n_out + __popc(taken & below)] = e;
        n_out += __popc(taken);
        ties -= __popc(equal);
    }
}

template <int PER>
static __global__ void __launch_bounds__(ROUTE_WARPS * 32) route_kernel(const bi_route_args a, const float *logits, int n_warp) {
    bi_cuda_begin();
    extern __shared__ uint32_t route_shared[];
    const int warp = (int)threadIdx.x >> 5;
    const int32_t t = (int32_t)blockIdx.x * n_warp + warp;
    if (t >= a.n_row)
        return;
    route_keys<PER> keys;
    keys.lane = (int)threadIdx.x & 31;
    keys.n_step = (a.n_expert + 31) / 32;
    keys.shared = route_shared + (size_t)warp * (size_t)keys.n_step * 32;
    const float *logit = logits + (int64_t)t * a.n_expert;
    if (!route_fill<PER>(a, logit, keys)) {
        route_nowhere(a, t, keys.lane);
        return;
    }
    route_choose<PER>(a, keys, a.expert + (int64_t)t * a.topk);
    __syncwarp();
    route_weights(a, t, keys.lane, logit);
}

static br_status launch_route(bi_ctx *ctx, const bi_route_args *a, const float *logits) {
    const size_t shared = (size_t)bi_ceil_div(a->n_expert, 32) * 32 * sizeof(uint32_t);
    if (a->n_expert <= 1024) {
        const int n_warp = a->n_row < ROUTE_WARPS * ctx->n_sm ? 1 : ROUTE_WARPS; /* few rows: one a block, so that all SMs work */
        const unsigned n_block = (unsigned)bi_ceil_div(a->n_row, n_warp);
        if (a->n_expert <= 256)
            bi_cuda_launch(ctx, route_kernel<8>, n_block, n_warp * 32, 0, *a, logits, n_warp);
        else
            bi_cuda_launch(ctx, route_kernel<32>, n_block, n_warp * 32, 0, *a, logits, n_warp);
        return bi_cuda_launched(ctx, BI_K_route, "route");
    }
    if (shared > ROUTE_SHARED_MAX)
        return br_fail(BR_E_LIMIT, "route: %d experts: expected at most %d", a->n_expert, (int)(ROUTE_SHARED_MAX / sizeof(uint32_t)));
    if (cudaFuncSetAttribute((const void *)route_kernel<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared) != cudaSuccess)
        return br_fail(BR_E_DEVICE, "route: the GPU grants no %zu bytes of shared memory", shared);
    bi_cuda_launch(ctx, route_kernel<0>, (unsigned)a->n_row, 32, shared, *a, logits, 1);
    return bi_cuda_launched(ctx, BI_K_route, "route");
}

static br_status check_args(const bi_ctx *ctx, const bi_route_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->d > ctx->limits.d_model || a->n_expert < 1 || a->n_expert > ctx->limits.n_expert)
        return br_fail(BR_E_SHAPE, "route: %d rows of %d, %d experts: expected n_row >= 0, 1 to %d, 1 to %d", a->n_row, a->d, a->n_expert,
                       ctx->limits.d_model, ctx->limits.n_expert);
    if (a->topk < 1 || a->topk > a->n_expert)
        return br_fail(BR_E_SHAPE, "route: %d of %d experts: expected 1 to %d", a->topk, a->n_expert, a->n_expert);
    if (!a->w.data || a->w.n_out != a->n_expert || a->w.n_in != a->d)
        return br_fail(BR_E_SHAPE, "route: the router is (%d, %d): expected (%d, %d)", a->w.n_out, a->w.n_in, a->n_expert, a->d);
    if (a->w.form != BI_FORM_BF16)
        return br_fail(BR_E_UNSUPPORTED, "route: a router in MXFP4: expected bf16");
    return BR_OK;
}

/* Rows row .. row + n - 1 of the op. */
static bi_route_args rows_of(const bi_route_args *a, int32_t row, int32_t n) {
    bi_route_args part = *a;
    part.n_row = n;
    part.x += (int64_t)row * a->d;
    part.expert += (int64_t)row * a->topk;
    part.p += (int64_t)row * a->topk;
    part.logit = a->logit ? a->logit + (int64_t)row * a->n_expert : NULL;
    part.fault.row = a->fault.row ? a->fault.row + row : NULL;
    return part;
}

br_status bi_cuda_route(bi_ctx *ctx, const bi_route_args *a) {
    BR_TRY(check_args(ctx, a));
    const int64_t fit = (int64_t)(ctx->scratch_bytes / ((size_t)a->n_expert * sizeof(float)));
    const int64_t n_part = a->logit || fit > a->n_row ? a->n_row : fit;
    for (int64_t row = 0; row < a->n_row; row += n_part) {
        const bi_route_args part = rows_of(a, (int32_t)row, (int32_t)(a->n_row - row < n_part ? a->n_row - row : n_part));
        float *logits = part.logit ? part.logit : (float *)ctx->scratch;
        dense_job job = bi_dense_job(&part.w, part.n_row, 1, part.x, part.d, 0);
        job.y = logits;
        job.y_ld = part.n_expert;
        job.y_f32 = 1;
        BR_TRY(bi_dense_base(ctx, &job));
        BR_TRY(launch_route(ctx, &part, logits));
    }
    return BR_OK;
}
