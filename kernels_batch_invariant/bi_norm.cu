/* bi_rmsnorm, bi_layernorm on the GPU.      Contract: N-NORM, N-SUM
 *
 * Grid: one block of 256 threads a row where rows are long; a warp a row, eight rows a block, up to NORM_WARP_D elements, where a
 * row's time is latency. Shared memory: the rows of the block (d bf16 each, rounded up to sixteen bytes), then 256 partials a sum.
 * Order: bi_row_sum, partial i of 256 over elements i, i + 256, .. rising, then the folds. Sums do not depend on the path; the wide
 * path moves sixteen bytes at a time, the other one element. y may be x: a row is in shared memory before any of it is written. */
#include "bi_row.cuh"

enum { NORM_WARP_D = 1024 };

typedef struct norm_row {
    const bi_bf16 *x; /* in shared memory */
    float *partial;   /* two sums */
    int t, i;         /* the row, the thread of it */
} norm_row;

/* Brings this thread's row in. t is n_row or more where there is no row left for a warp. */
template <int WARPS, int WIDE> static __device__ __forceinline__ norm_row stage(const bi_norm_args &a, unsigned char *shared) {
    constexpr int THREADS = 32 * WARPS, ROWS = BI_ROW_BLOCK / THREADS;
    const int at = (int)threadIdx.x / THREADS, bytes = (a.d * 2 + 15) / 16 * 16;
    bi_bf16 *row = (bi_bf16 *)(shared + (size_t)at * bytes);
    norm_row r = {row, (float *)(shared + (size_t)ROWS * bytes), (int)blockIdx.x * ROWS + at, (int)threadIdx.x % THREADS};
    if (r.t >= a.n_row)
        return r;
    const bi_bf16 *x = a.x + (int64_t)r.t * a.x_ld;
    if (WIDE) {
        bi_row_copy((uint4 *)row, (const uint4 *)x, a.d / BI_ROW_VEC, r.i, THREADS);
    } else {
        for (int j = r.i; j < a.d; j += THREADS)
            row[j] = x[j];
    }
    bi_row_sync<WARPS>();
    return r;
}

template <int WARPS, int WIDE> BI_ROW_KERNEL rmsnorm_kernel(const __grid_constant__ bi_norm_args a) {
    bi_cuda_begin();
    extern __shared__ __align__(16) unsigned char shared[];
    const norm_row r = stage<WARPS, WIDE>(a, shared);
    if (r.t >= a.n_row)
        return;
    const bi_bf16 *x = r.x;
    const float sum = bi_row_sum<WARPS>(a.d, r.partial, [x](float p, int j) { return BI_FMA(bi_widen(x[j]), bi_widen(x[j]), p); });
    if (r.i == 0)
        bi_cuda_fault(a.fault, r.t, sum);
    const float rstd = bi_rsqrt(BI_ADD(BI_DIV(sum, (float)a.d), a.eps));
    bi_bf16 *y = a.y + (int64_t)r.t * a.y_ld;
    if constexpr (WIDE) {
#pragma unroll 2
        for (int v = r.i; v < a.d / BI_ROW_VEC; v += 32 * WARPS) {
            float e[8], w[8];
            bi_row_widen8(((const uint4 *)x)[v], e);
            bi_row_weights8(a.w + v * BI_ROW_VEC, w);
#pragma unroll
            for (int k = 0; k < 8; k++)
                e[k] = BI_MUL(BI_MUL(e[k], rstd), w[k]);
            ((uint4 *)y)[v] = bi_row_round8(e);
        }
    } else {
        for (int j = r.i; j < a.d; j += 32 * WARPS)
            y[j] = bi_round(BI_MUL(BI_MUL(bi_widen(x[j]), rstd), a.w[j]));
    }
}

template <int WARPS, int WIDE> BI_ROW_KERNEL layernorm_kernel(const __grid_constant__ bi_norm_args a) {
    bi_cuda_begin();
    extern __shared__ __align__(16) unsigned char shared[];
    const norm_row r = stage<WARPS, WIDE>(a, shared);
    if (r.t >= a.n_row)
        return;
    const bi_bf16 *x = r.x;
    const float n = (float)a.d;
    const float mean = BI_DIV(bi_row_sum<WARPS>(a.d, r.partial, [x](float p, int j) { return BI_ADD(p, bi_widen(x[j])); }), n);
    const float sum = bi_row_sum<WARPS>(a.d, r.partial + BI_SUM_LANES, [x, mean](float p, int j) {
        float d = BI_SUB(bi_widen(x[j]), mean);
        return BI_FMA(d, d, p);
    });
    if (r.i == 0)
        bi_cuda_fault(a.fault, r.t, sum);
    const float rstd = bi_rsqrt(BI_ADD(BI_DIV(sum, n), a.eps));
    bi_bf16 *y = a.y + (int64_t)r.t * a.y_ld;
    if constexpr (WIDE) {
#pragma unroll 2
        for (int v = r.i; v < a.d / BI_ROW_VEC; v += 32 * WARPS) {
            float e[8], w[8], b[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            bi_row_widen8(((const uint4 *)x)[v], e);
            bi_row_weights8(a.w + v * BI_ROW_VEC, w);
            if (a.b)
                bi_row_weights8(a.b + v * BI_ROW_VEC, b);
#pragma unroll
            for (int k = 0; k < 8; k++)
                e[k] = BI_ADD(BI_MUL(BI_MUL(BI_SUB(e[k], mean), rstd), w[k]), b[k]);
            ((uint4 *)y)[v] = bi_row_round8(e);
        }
    } else {
        for (int j = r.i; j < a.d; j += 32 * WARPS)
            y[j] = bi_round(BI_ADD(BI_MUL(BI_MUL(BI_SUB(bi_widen(x[j]), mean), rstd), a.w[j]), a.b ? a.b[j] : 0.0f));
    }
}

static br_status check(const bi_norm_args *a, const char *op) {
    if (a->n_row < 0 || a->d < 1 || a->d > BR_D_MODEL_MAX)
        return br_fail(BR_E_SHAPE, "%s: %d rows of %d: expected n_row >= 0 and 1 to %d elements", op, a->n_row, a->d, BR_D_MODEL_MAX);
    if (a->x_ld < a->d || a->y_ld < a->d)
        return br_fail(BR_E_SHAPE, "%s: row strides %d and %d: expected at least %d", op, a->x_ld, a->y_ld, a->d);
    if (a->x == a->y && a->x_ld != a->y_ld)
        return br_fail(BR_E_SHAPE, "%s: in place with row strides %d and %d: expected equal strides", op, a->x_ld, a->y_ld);
    return BR_OK;
}

typedef void (*norm_kernel)(const bi_norm_args);

/* kernel: [a warp a row][wide]. At most 32 KiB of row and 2 KiB of partials: no attribute to set. */
static br_status launch(bi_ctx *ctx, const bi_norm_args *a, const norm_kernel kernel[2][2], bi_cuda_kernel name, const char *op) {
    BR_TRY(check(a, op));
    if (a->n_row == 0)
        return BR_OK;
    const int wide = bi_row_wide_rows(a->x, a->x_ld, a->d) && bi_row_wide_rows(a->y, a->y_ld, a->d) && bi_row_wide(a->w) && bi_row_wide(a->b);
    const int by_warp = a->d <= NORM_WARP_D, rows = by_warp ? BI_ROW_BLOCK / 32 : 1;
    const size_t bytes = (size_t)rows * (size_t)((a->d * 2 + 15) / 16 * 16) + (by_warp ? 0 : 2 * BI_SUM_LANES * sizeof(float));
    bi_cuda_launch(ctx, kernel[by_warp][wide], (unsigned)bi_ceil_div(a->n_row, rows), BI_ROW_BLOCK, bytes, *a);
    return bi_cuda_launched(ctx, name, op);
}

br_status bi_cuda_rmsnorm(bi_ctx *ctx, const bi_norm_args *a) {
    static const norm_kernel kernel[2][2] = {{rmsnorm_kernel<8, 0>, rmsnorm_kernel<8, 1>}, {rmsnorm_kernel<1, 0>, rmsnorm_kernel<1, 1>}};
    return launch(ctx, a, kernel, BI_K_rmsnorm, "rmsnorm");
}

br_status bi_cuda_layernorm(bi_ctx *ctx, const bi_norm_args *a) {
    static const norm_kernel kernel[2][2] = {{layernorm_kernel<8, 0>, layernorm_kernel<8, 1>}, {layernorm_kernel<1, 0>, layernorm_kernel<1, 1>}};
    return launch(ctx, a, kernel, BI_K_layernorm, "layernorm");
}
