/* Gradients of score and route on CUDA.      Contract: N-HEAD-1, N-ROUTE-1 without their roundings; formulas in bi_grad_head_host.c
 *
 * score: rows in parts of up to 2,048, the vocabulary in chunks of up to 4,096 columns, so that a chunk's f32 logits (32 MiB at most) are
 * still in the second-level cache when they are read. First pass over the chunks: logits by bi_grad_gemm, then head_stat, a block of 256
 * a row, which merges the chunk's max and sum into the row's. Second pass: the same logits, head_slope makes dz / T in bf16, and a product
 * with the chunk's rows of W adds to dx (beta 1), chunks in rising order.
 *
 * route: a block of 256 a row; x of the row in shared memory as f32 (4 bytes a column). A warp makes a chosen expert's logit, sixteen
 * bytes of W a lane; one thread makes the slopes of all; then dx, a thread eight columns, experts in the order given. */
#include "bi_grad_cuda.cuh"
#include "bi_grad_head_check.h"
#include "bi_linear_parts.cuh"

enum {
    PART_ROWS = 2048,
    CHUNK_COLUMNS = 4096,
    THREADS = 256,
    OWN_MAX = CHUNK_COLUMNS / THREADS, /* columns of a thread */
    VEC = 8,                           /* bf16 in sixteen bytes */
    ROUTE_SHARED_MAX = 200 << 10
};

/* Scratch of a part. */
typedef struct head_work {
    float *z;      /* (rows, z_ld) */
    bi_bf16 *dz;   /* (rows, z_ld) */
    float2 *stat;  /* (rows) max and sum */
    int32_t z_ld;
} head_work;

/* A row of a chunk: columns first .. first + n - 1 of the vocabulary. */
typedef struct head_chunk {
    const float *z;
    bi_bf16 *dz;
    float2 *stat;
    const int32_t *token;
    const float *temperature, *dlogprob;
    int32_t z_ld, first, n;
} head_chunk;

static head_work carve(bi_carver *carver, int32_t n_row, int32_t n_vocab) {
    head_work work;
    const size_t rows = (size_t)(n_row < PART_ROWS ? n_row : PART_ROWS);
    work.z_ld = n_vocab < CHUNK_COLUMNS ? (n_vocab + 15) / 16 * 16 : CHUNK_COLUMNS;
    work.z = (float *)bi_carve(carver, sizeof(float) * rows * (size_t)work.z_ld);
    work.dz = (bi_bf16 *)bi_carve(carver, sizeof(bi_bf16) * rows * (size_t)work.z_ld);
    work.stat = (float2 *)bi_carve(carver, sizeof(float2) * rows);
    return work;
}

size_t bi_grad_score_cuda_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    carve(&carver, limits->n_row, limits->n_vocab);
    return carver.used;
}

static __device__ __forceinline__ float inverse_temperature(const head_chunk &c, int32_t t) {
    const float temperature = c.temperature[t];
    return temperature == 0.0f ? 1.0f : 1.0f / temperature;
}

static __device__ __forceinline__ float2 merge(float2 a, float2 b) {
    const float top = b.x > a.x ? b.x : a.x;
    return make_float2(top, a.y * expf(a.x - top) + b.y * expf(b.x - top));
}

/* One row's max and sum over the chunk, a thread columns i, i + 256, ..; lanes, then warps, in a fixed tree. */
static __global__ void __launch_bounds__(THREADS) head_stat(const head_chunk c) {
    __shared__ float2 part[THREADS / 32];
    const int32_t t = (int32_t)blockIdx.x, i = (int32_t)threadIdx.x;
    const float inverse = inverse_temperature(c, t), lowest = -bi_f32_of(0x7f7fffffu);
    float z[OWN_MAX];
    float2 own = make_float2(lowest, 0.0f);
#pragma unroll
    for (int k = 0; k < OWN_MAX; k++) {
        z[k] = i + k * THREADS < c.n ? c.z[(int64_t)t * c.z_ld + i + k * THREADS] * inverse : lowest;
        own.x = z[k] > own.x ? z[k] : own.x;
    }
#pragma unroll
    for (int k = 0; k < OWN_MAX; k++)
        own.y += i + k * THREADS < c.n ? expf(z[k] - own.x) : 0.0f;
#pragma unroll
    for (int h = 16; h > 0; h >>= 1)
        own = merge(own, make_float2(__shfl_xor_sync(0xffffffffu, own.x, h), __shfl_xor_sync(0xffffffffu, own.y, h)));
    if (i % 32 == 0)
        part[i / 32] = own;
    __syncthreads();
    if (i == 0) {
        float2 all = c.first ? c.stat[t] : make_float2(lowest, 0.0f);
        for (int w = 0; w < THREADS / 32; w++)
            all = merge(all, part[w]);
        c.stat[t] = all;
    }
}

static __global__ void __launch_bounds__(THREADS) head_slope(const head_chunk c) {
    const int32_t t = (int32_t)blockIdx.x, token = c.token[t] - c.first;
    const float inverse = inverse_temperature(c, t), slope = c.dlogprob[t] * inverse;
    const float2 stat = c.stat[t];
    const float log_sum = logf(stat.y), share = slope / stat.y;
    for (int32_t i = (int32_t)threadIdx.x; i < c.n; i += THREADS) {
        const float z = c.z[(int64_t)t * c.z_ld + i] * inverse - stat.x;
        /* 1 - p of the token without cancellation */
        c.dz[(int64_t)t * c.z_ld + i] = bi_round(i == token ? -slope * expm1f(z - log_sum) : -share * expf(z));
    }
}

/* The logits of a chunk of a part of n_row rows that begins at row0. */
static br_status logits(bi_grad_ctx *ctx, const bi_grad_score_args *a, const head_work *work, const head_chunk *c, int32_t row0, int32_t n_row) {
    bi_grad_gemm_args gemm = {};
    gemm.m = n_row, gemm.n = c->n, gemm.k = a->d, gemm.batch = 1;
    gemm.a = a->x + (int64_t)row0 * a->d, gemm.a_ld = a->d;
    gemm.b = (const bi_bf16 *)a->w.data + (int64_t)c->first * dense_ld(a->d), gemm.b_ld = dense_ld(a->d), gemm.b_t = 1;
    gemm.c = work->z, gemm.c_ld = work->z_ld;
    gemm.alpha = 1.0f;
    return bi_grad_gemm(ctx, &gemm);
}

/* dx of the part += dz of the chunk times its rows of W. */
static br_status add_dx(bi_grad_ctx *ctx, const bi_grad_score_args *a, const head_work *work, const head_chunk *c, int32_t row0, int32_t n_row) {
    bi_grad_gemm_args gemm = {};
    gemm.m = n_row, gemm.n = a->d, gemm.k = c->n, gemm.batch = 1;
    gemm.a = work->dz, gemm.a_ld = work->z_ld;
    gemm.b = (const bi_bf16 *)a->w.data + (int64_t)c->first * dense_ld(a->d), gemm.b_ld = dense_ld(a->d);
    gemm.c = a->dx + (int64_t)row0 * a->d, gemm.c_ld = a->d;
    gemm.alpha = 1.0f, gemm.beta = c->first ? 1.0f : 0.0f;
    return bi_grad_gemm(ctx, &gemm);
}

static br_status score_part(bi_grad_ctx *ctx, const bi_grad_score_args *a, const head_work *work, int32_t row0, int32_t n_row) {
    head_chunk c = {work->z, work->dz, work->stat, a->token + row0, a->temperature + row0, a->dlogprob + row0, work->z_ld, 0, 0};
    for (int pass = 0; pass < 2; pass++)
        for (c.first = 0; c.first < a->n_vocab; c.first += work->z_ld) {
            c.n = a->n_vocab - c.first < work->z_ld ? a->n_vocab - c.first : work->z_ld;
            BR_TRY(logits(ctx, a, work, &c, row0, n_row));
            if (pass == 0)
                head_stat<<<(unsigned)n_row, THREADS, 0, ctx->cuda->stream>>>(c);
            else
                head_slope<<<(unsigned)n_row, THREADS, 0, ctx->cuda->stream>>>(c);
            BR_TRY(bi_grad_launched("score"));
            if (pass == 1)
                BR_TRY(add_dx(ctx, a, work, &c, row0, n_row));
        }
    return BR_OK;
}

br_status bi_grad_score_cuda(bi_grad_ctx *ctx, const bi_grad_score_args *a) {
    BR_TRY(bi_grad_check_score(&ctx->cuda->limits, a));
    bi_carver carver = bi_grad_cuda_carver(ctx);
    const int32_t most = ctx->cuda->limits.n_row < PART_ROWS ? ctx->cuda->limits.n_row : PART_ROWS;
    const head_work work = carve(&carver, most, a->n_vocab);
    for (int32_t row = 0; a->dx && row < a->n_row; row += most)
        BR_TRY(score_part(ctx, a, &work, row, a->n_row - row < most ? a->n_row - row : most));
    return BR_OK;
}

/* ---- route ------------------------------------------------------------------------------------------------------------- */

/* Eight columns of a row of packed W, whose rows are zeros from n_in to a multiple of 16. */
static __device__ __forceinline__ void widen8(const bi_bf16 *w, float out[VEC]) {
    const uint4 v = *(const uint4 *)w;
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = bi_f32_of(pair[i] << 16);
        out[2 * i + 1] = bi_f32_of(pair[i] & 0xffff0000u);
    }
}

/* d of the chosen logits, in place of those. */
static __device__ void route_slopes(const bi_grad_route_args &a, int32_t t, float *logit) {
    const float *dp = a.dp + (int64_t)t * a.topk;
    float sum = BI_ROUTE_SUM_EPS, mean = 0.0f;
    for (int32_t i = 0; i < a.topk; i++) {
        const float e = expf(-fabsf(logit[i])), high = 1.0f / (1.0f + e), s = logit[i] < 0.0f ? e * high : high;
        sum += s;
        mean += dp[i] * s;
    }
    mean /= sum;
    for (int32_t i = 0; i < a.topk; i++) {
        const float e = expf(-fabsf(logit[i])), high = 1.0f / (1.0f + e);
        logit[i] = a.scale * (e * high * high) * (a.renormalize ? (dp[i] - mean) / sum : dp[i]);
    }
}

static __global__ void __launch_bounds__(THREADS) route_back(const bi_grad_route_args a, int32_t w_ld) {
    extern __shared__ __align__(16) float route_x[]; /* (w_ld) x, then (topk) logits */
    float *logit = route_x + w_ld;
    const int32_t t = (int32_t)blockIdx.x, lane = (int32_t)threadIdx.x & 31;
    const int32_t *expert = a.expert + (int64_t)t * a.topk;
    for (int32_t k = (int32_t)threadIdx.x; k < w_ld; k += THREADS)
        route_x[k] = k < a.d ? bi_widen(a.x[(int64_t)t * a.d + k]) : 0.0f;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x / 32; i < a.topk; i += THREADS / 32) {
        const bi_bf16 *row = (const bi_bf16 *)a.w.data + (int64_t)expert[i] * w_ld;
        float sum = 0.0f;
        for (int32_t k = VEC * lane; k < w_ld; k += VEC * 32) {
            float w[VEC];
            widen8(row + k, w);
#pragma unroll
            for (int l = 0; l < VEC; l++)
                sum += route_x[k + l] * w[l];
        }
#pragma unroll
        for (int h = 16; h > 0; h >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, h);
        if (lane == 0)
            logit[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        route_slopes(a, t, logit);
    __syncthreads();
    for (int32_t k = VEC * (int32_t)threadIdx.x; k < w_ld; k += VEC * THREADS) {
        float sum[VEC] = {};
        for (int32_t i = 0; i < a.topk; i++) {
            float w[VEC];
            widen8((const bi_bf16 *)a.w.data + (int64_t)expert[i] * w_ld + k, w);
#pragma unroll
            for (int l = 0; l < VEC; l++)
                sum[l] += logit[i] * w[l];
        }
#pragma unroll
        for (int l = 0; l < VEC; l++)
            if (k + l < a.d)
                a.dx[(int64_t)t * a.d + k + l] = sum[l];
    }
}

br_status bi_grad_route_cuda(bi_grad_ctx *ctx, const bi_grad_route_args *a) {
    BR_TRY(bi_grad_check_route(&ctx->cuda->limits, a));
    const int32_t w_ld = dense_ld(a->d);
    const size_t shared = sizeof(float) * (size_t)(w_ld + a->topk);
    if (shared > (size_t)ROUTE_SHARED_MAX)
        return br_fail(BR_E_LIMIT, "gradient of route: rows of %d, %d experts: expected them in %d bytes of shared memory", a->d, a->topk,
                       (int)ROUTE_SHARED_MAX);
    if (a->n_row == 0 || !a->dx)
        return BR_OK;
    cudaFuncSetAttribute(route_back, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    route_back<<<(unsigned)a->n_row, THREADS, shared, ctx->cuda->stream>>>(*a, w_ld);
    return bi_grad_launched("route");
}
