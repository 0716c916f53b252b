/* bi_attnres, bi_attnres_weight, bi_residual on the GPU.      Contract: N-RES, N-NORM, N-SUM, N-FN
 *
 * attnres: one block of 512 threads a row t of the step. Its rows v_0.. (bank, then p) are brought into shared memory, each with
 * one bulk copy and a barrier of its own, as many as fit (RES_ROW_BYTES); the others are read twice. Two groups of 256 threads
 * score alternate v_i: thread k of a group owns partial k of both sums, over elements k, k + 256, .. rising; one warp of the
 * group, another for each row, does the folds while the group goes on. Then a warp does the softmax (E is one add chain over i), and
 * all threads mix: an fma chain over i an element. Without sixteen-byte alignment everything is read from global memory.
 *
 * attnres_weight, residual: 256 threads, elements on their own. */
#include "bi_row.cuh"

enum { RES_GROUPS = 2, RES_THREADS = RES_GROUPS * BI_ROW_BLOCK, RES_ROWS_MAX = BR_BANK_MAX + 1, RES_ROW_BYTES = 208 * 1024 };
enum { RES_ROW_BYTES_PLAIN = 32 * 1024 /* needs no leave of the driver */ };

typedef struct res_run {
    int32_t n_row, d, n, n_kept; /* n: bank and p; the first n_kept stay in shared memory */
    const bi_bf16 *v[RES_ROWS_MAX];
    const float *w;
    float eps;
    bi_bf16 *y;
    bi_fault fault;
} res_run;

/* partial[group][which of two][sum of squares, product][256] */
typedef struct res_shared {
    float partial[RES_GROUPS][2][2][BI_SUM_LANES];
    float s[RES_ROWS_MAX], pi[RES_ROWS_MAX];
    alignas(8) uint64_t arrived[RES_ROWS_MAX];
} res_shared;

static __device__ __forceinline__ uint32_t shared_address(const void *x) {
    return (uint32_t)__cvta_generic_to_shared(x);
}

/* One thread: a bulk copy of each kept row, announced on the row's barrier. */
static __device__ __forceinline__ void fetch_rows(const res_run &a, res_shared *s, unsigned char *rows) {
    const uint32_t bytes = (uint32_t)a.d * 2;
    for (int i = 0; i < a.n_kept; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s->arrived[i])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int i = 0; i < a.n_kept; i++) {
        const uint32_t barrier = shared_address(&s->arrived[i]), to = shared_address(rows + (size_t)i * bytes);
        const bi_bf16 *from = a.v[i] + (int64_t)blockIdx.x * a.d;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                     "r"(barrier)
                     : "memory");
    }
}

static __device__ __forceinline__ void wait_row(res_shared *s, int i) {
    const uint32_t barrier = shared_address(&s->arrived[i]);
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier)
                     : "memory");
}

/* This thread's partials of both sums over v. */
static __device__ __forceinline__ float2 score_partial(const bi_bf16 *v, const float *w, int d) {
    float2 sum = {0.0f, 0.0f};
#pragma unroll 4
    for (int j = (int)threadIdx.x % BI_SUM_LANES; j < d; j += BI_SUM_LANES) {
        const float x = bi_widen(v[j]);
        sum.x = BI_FMA(x, x, sum.x);
        sum.y = BI_FMA(x, __ldg(w + j), sum.y);
    }
    return sum;
}

/* s_i of the rows i = group, group + 2, ..: thread k of the group. */
static __device__ __forceinline__ void score_rows(const res_run &a, res_shared *s, const unsigned char *rows) {
    const int group = (int)threadIdx.x / BI_ROW_BLOCK, k = (int)threadIdx.x % BI_ROW_BLOCK;
    int turn = 0;
    for (int i = group; i < a.n; i += RES_GROUPS, turn++) {
        float2 sum;
        if (i < a.n_kept) {
            wait_row(s, i);
            sum = score_partial((const bi_bf16 *)(rows + (size_t)i * a.d * 2), a.w, a.d);
        } else {
            sum = score_partial(a.v[i] + (int64_t)blockIdx.x * a.d, a.w, a.d);
        }
        float(*partial)[BI_SUM_LANES] = s->partial[group][turn % 2];
        partial[0][k] = sum.x;
        partial[1][k] = sum.y;
        /* The warp that folded this buffer's last row has met the group at the row between. */
        asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
        if (k / 32 != turn % 8)
            continue;
        const float square = bi_row_fold_shared(partial[0]), product = bi_row_fold_shared(partial[1]);
        if (k % 32 == 0) {
            bi_cuda_fault(a.fault, (int32_t)blockIdx.x, square);
            s->s[i] = BI_MUL(product, bi_rsqrt(BI_ADD(BI_DIV(square, (float)a.d), a.eps)));
        }
    }
}

/* pi of the block's row, by one warp; lane l has rows l and l + 32. A NaN among the scores makes every pi NaN, whichever is max. */
static __device__ __forceinline__ void softmax(res_shared *s, int n) {
    static_assert(RES_ROWS_MAX <= 64, "two rows a lane");
    const int lane = (int)threadIdx.x;
    float max = s->s[0], sum = 0.0f;
    for (int i = 1; i < n; i++)
        max = s->s[i] > max ? s->s[i] : max;
    for (int i = lane; i < n; i += 32)
        s->pi[i] = bi_exp(BI_SUB(s->s[i], max));
    __syncwarp();
    for (int i = 0; i < n; i++)
        sum = BI_ADD(sum, s->pi[i]);
    __syncwarp();
    for (int i = lane; i < n; i += 32)
        s->pi[i] = BI_DIV(s->pi[i], sum);
}

static __device__ __forceinline__ void mix_wide(const res_run &a, const res_shared *s, const unsigned char *rows) {
    for (int at = (int)threadIdx.x; at < a.d / BI_ROW_VEC; at += RES_THREADS) {
        float out[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        for (int i = 0; i < a.n; i++) {
            float x[8];
            if (i < a.n_kept)
                bi_row_widen8(((const uint4 *)(rows + (size_t)i * a.d * 2))[at], x);
            else
                bi_row_widen8(((const uint4 *)(a.v[i] + (int64_t)blockIdx.x * a.d))[at], x);
            const float pi = s->pi[i];
#pragma unroll
            for (int k = 0; k < 8; k++)
                out[k] = BI_FMA(pi, x[k], out[k]);
        }
        ((uint4 *)(a.y + (int64_t)blockIdx.x * a.d))[at] = bi_row_round8(out);
    }
}

static __device__ __forceinline__ void mix(const res_run &a, const res_shared *s) {
    const int64_t at = (int64_t)blockIdx.x * a.d;
    for (int j = (int)threadIdx.x; j < a.d; j += RES_THREADS) {
        float out = 0.0f;
        for (int i = 0; i < a.n; i++)
            out = BI_FMA(s->pi[i], bi_widen(a.v[i][at + j]), out);
        a.y[at + j] = bi_round(out);
    }
}

template <int WIDE> static __global__ void __launch_bounds__(RES_THREADS) attnres_kernel(const __grid_constant__ res_run a) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char rows[];
    __shared__ res_shared s;
    if (WIDE && threadIdx.x == 0)
        fetch_rows(a, &s, rows);
    __syncthreads();
    score_rows(a, &s, rows);
    __syncthreads();
    if (threadIdx.x < 32)
        softmax(&s, a.n);
    __syncthreads();
    if (WIDE)
        mix_wide(a, &s, rows);
    else
        mix(a, &s);
}

br_status bi_cuda_attnres(bi_ctx *ctx, const bi_attnres_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->n_bank < 1 || a->n_bank > BR_BANK_MAX)
        return br_fail(BR_E_SHAPE, "attnres: %d rows of %d, bank of %d: expected n_row >= 0, d >= 1, a bank of 1 to %d", a->n_row, a->d,
                       a->n_bank, BR_BANK_MAX);
    if (a->n_row == 0)
        return BR_OK;
    res_run run = {.n_row = a->n_row, .d = a->d, .n = a->n_bank + 1, .n_kept = 0, .v = {}, .w = a->w, .eps = a->eps, .y = a->y, .fault = a->fault};
    int wide = bi_row_wide_rows(a->y, a->d, a->d);
    for (int i = 0; i < run.n; i++) {
        run.v[i] = i < a->n_bank ? a->bank[i] : a->p;
        wide = wide && bi_row_wide(run.v[i]);
    }
    const int64_t fit = RES_ROW_BYTES / ((int64_t)a->d * 2);
    run.n_kept = !wide ? 0 : fit < run.n ? (int32_t)fit : run.n;
    const size_t bytes = (size_t)run.n_kept * (size_t)a->d * 2;
    if (!wide) {
        bi_cuda_launch(ctx, attnres_kernel<0>, (unsigned)a->n_row, RES_THREADS, 0, run);
        return bi_cuda_launched(ctx, BI_K_attnres, "attnres");
    }
    cudaError_t error = cudaSuccess;
    if (bytes > RES_ROW_BYTES_PLAIN)
        error = cudaFuncSetAttribute(attnres_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, RES_ROW_BYTES);
    if (error != cudaSuccess)
        return br_fail(BR_E_DEVICE, "attnres: %d bytes of shared memory: %s", RES_ROW_BYTES, cudaGetErrorString(error));
    bi_cuda_launch(ctx, attnres_kernel<1>, (unsigned)a->n_row, RES_THREADS, bytes, run);
    return bi_cuda_launched(ctx, BI_K_attnres, "attnres");
}

BI_ROW_KERNEL attnres_weight_kernel(float *w, const float *norm, const float *proj, int32_t d) {
    const int32_t i = (int32_t)(blockIdx.x * BI_ROW_BLOCK + threadIdx.x);
    if (i < d)
        w[i] = BI_MUL(norm[i], proj[i]);
}

br_status bi_cuda_attnres_weight(bi_ctx *ctx, float *w, const float *norm, const float *proj, int32_t d) {
    if (d <= 0)
        return BR_OK;
    attnres_weight_kernel<<<(unsigned)bi_ceil_div(d, BI_ROW_BLOCK), BI_ROW_BLOCK, 0, ctx->stream>>>(w, norm, proj, d);
    return bi_cuda_launched(ctx, BI_K_attnres_weight, "attnres_weight");
}

/* A sum of finite bf16 can round to Inf, so it is the rounded row that is checked. */
template <int WIDE> BI_ROW_KERNEL residual_kernel(const __grid_constant__ bi_residual_args r) {
    bi_cuda_begin();
    constexpr int VEC = WIDE ? BI_ROW_VEC : 1;
    const int j = ((int)blockIdx.y * BI_ROW_BLOCK + (int)threadIdx.x) * VEC;
    if (j >= r.d)
        return;
    const int64_t at = (int64_t)blockIdx.x * r.d + j;
    bool bad = false;
    if constexpr (WIDE) {
        float a[8], b[8];
        bi_row_widen8(bi_row_load(r.a + at), a);
        bi_row_widen8(bi_row_load(r.b + at), b);
#pragma unroll
        for (int k = 0; k < 8; k++)
            a[k] = BI_ADD(a[k], b[k]);
        const uint4 y = bi_row_round8(a);
        *(uint4 *)(r.y + at) = y;
        bi_row_widen8(y, a);
#pragma unroll
        for (int k = 0; k < 8; k++)
            bad |= !bi_is_finite(a[k]);
    } else {
        const bi_bf16 y = bi_round(BI_ADD(bi_widen(r.a[at]), bi_widen(r.b[at])));
        r.y[at] = y;
        bad = !bi_is_finite(bi_widen(y));
    }
    if (bad)
        bi_cuda_fault(r.fault, (int32_t)blockIdx.x, bi_f32_of(0x7f800000u));
}

br_status bi_cuda_residual(bi_ctx *ctx, const bi_residual_args *a) {
    if (a->n_row < 0 || a->d < 1)
        return br_fail(BR_E_SHAPE, "residual: %d rows of %d: expected n_row >= 0 and d >= 1", a->n_row, a->d);
    if (a->n_row == 0)
        return BR_OK;
    const int wide = bi_row_wide_rows(a->a, a->d, a->d) && bi_row_wide(a->b) && bi_row_wide(a->y);
    const dim3 grid((unsigned)a->n_row, (unsigned)bi_ceil_div(a->d, BI_ROW_BLOCK * (wide ? BI_ROW_VEC : 1)));
    if (wide)
        bi_cuda_launch(ctx, residual_kernel<1>, grid, BI_ROW_BLOCK, 0, *a);
    else
        bi_cuda_launch(ctx, residual_kernel<0>, grid, BI_ROW_BLOCK, 0, *a);
    return bi_cuda_launched(ctx, BI_K_residual, "residual");
}
