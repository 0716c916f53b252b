/* Gradients of the row ops on the GPU: rmsnorm, conv, kda_gate, kda_norm, attnres.      Contract: N-NORM, N-CONV, N-KDA-1, N-KDA-5, N-RES
 *
 *   rmsnorm   a block of 256 threads a row
 *   conv      blocks of (128 channels, 32 rows), a thread a channel, from the last row to the first: dx of row t takes dc of rows t .. t + 3,
 *             which it keeps in registers; the three rows behind the tile are computed by two tiles
 *   kda_gate  a thread an element
 *   kda_norm  a warp a head of a row
 *   attnres   a block of 256 threads a row: three sums for each bank row, the softmax on one thread, then the outputs
 *
 * Sums: a thread adds elements i, i + threads, .. in rising order, the lanes of a warp fold by halves, warps are added in rising order. The
 * formulas are those of bi_grad_rows_host.c. */
#include "bi_grad_cuda.cuh"
#include "bi_grad_rows_check.h"

enum { THREADS = 256, WARPS = THREADS / 32, CONV_CHAN = 128, CONV_ROWS = 32, CONV_KEPT = BI_CONV_TAPS - 1 };

static __device__ __forceinline__ float warp_sum(float p) {
    for (int h = 16; h > 0; h >>= 1)
        p += __shfl_xor_sync(0xffffffffu, p, h);
    return p;
}

static __device__ __forceinline__ float warps_sum(const float *partial) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        sum += partial[w];
    return sum;
}

/* 1 / sqrt(sum / d + eps). */
static __device__ __forceinline__ float inverse_rms(float sum, int d, float eps) {
    return 1.0f / sqrtf(sum / (float)d + eps);
}

/* ---- rmsnorm --------------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) rmsnorm_kernel(bi_grad_norm_args a) {
    __shared__ float partial[2][WARPS];
    const int i0 = (int)threadIdx.x, warp = i0 / 32;
    const bi_bf16 *x = a.x + (int64_t)blockIdx.x * a.x_ld;
    const float *dy = a.dy + (int64_t)blockIdx.x * a.d;
    float *dx = a.dx + (int64_t)blockIdx.x * a.d, xx = 0.0f, xg = 0.0f;
#pragma unroll 4
    for (int i = i0; i < a.d; i += THREADS) {
        const float v = bi_widen(x[i]);
        xx = fmaf(v, v, xx);
        xg = fmaf(v, a.w[i] * dy[i], xg);
    }
    xx = warp_sum(xx);
    xg = warp_sum(xg);
    if (i0 % 32 == 0) {
        partial[0][warp] = xx;
        partial[1][warp] = xg;
    }
    __syncthreads();
    const float r = inverse_rms(warps_sum(partial[0]), a.d, a.eps), along = r * r * r / (float)a.d * warps_sum(partial[1]);
#pragma unroll 4
    for (int i = i0; i < a.d; i += THREADS)
        dx[i] = r * (a.w[i] * dy[i]) - along * bi_widen(x[i]);
}

br_status bi_grad_rmsnorm_cuda(bi_grad_ctx *ctx, const bi_grad_norm_args *a) {
    BR_TRY(bi_grad_check_rmsnorm(a));
    if (a->n_row == 0 || !a->dx)
        return BR_OK;
    rmsnorm_kernel<<<(unsigned)a->n_row, THREADS, 0, ctx->cuda->stream>>>(*a);
    return bi_grad_launched("rmsnorm");
}

/* ---- conv ------------------------------------------------------------------------------------------------------------------------ */

typedef struct conv_args {
    const bi_seg *seg;
    const int32_t *row_seg;
    const bi_bf16 *x;
    const float *w, *dy;
    float *dx;
    int32_t n_row, n_chan, x_ld;
} conv_args;

/* dc of row t, channel c, of a segment whose first row is `first`. */
static __device__ __forceinline__ float conv_dc(const conv_args &a, const float w[BI_CONV_TAPS], int t, int first, int c) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < BI_CONV_TAPS; tap++) {
        const int at = t - CONV_KEPT + tap;
        if (at >= first)
            sum = fmaf(w[tap], bi_widen(a.x[(int64_t)at * a.x_ld + c]), sum);
    }
    return a.dy[(int64_t)t * a.n_chan + c] * bi_sigmoid(sum) * fmaf(sum, bi_sigmoid(-sum), 1.0f);
}

static __global__ void __launch_bounds__(CONV_CHAN) conv_kernel(conv_args a) {
    const int c = (int)(blockIdx.x * CONV_CHAN + threadIdx.x), begin = (int)blockIdx.y * CONV_ROWS, end = begin + CONV_ROWS;
    int t = (end + CONV_KEPT < a.n_row ? end + CONV_KEPT : a.n_row) - 1, current = -1;
    float w[BI_CONV_TAPS], dc[BI_CONV_TAPS] = {0.0f}; /* dc[i]: of row t + i */
    if (c >= a.n_chan)
        return;
#pragma unroll
    for (int tap = 0; tap < BI_CONV_TAPS; tap++)
        w[tap] = a.w[(int64_t)c * BI_CONV_TAPS + tap];
    for (; t >= begin; t--) {
        const int s = a.row_seg[t];
        float dx = 0.0f;
#pragma unroll
        for (int i = CONV_KEPT; i > 0; i--)
            dc[i] = s == current ? dc[i - 1] : 0.0f;
        current = s;
        dc[0] = s < 0 ? 0.0f : conv_dc(a, w, t, a.seg[s].row, c);
#pragma unroll
        for (int tap = 0; tap < BI_CONV_TAPS; tap++)
            dx = fmaf(w[tap], dc[CONV_KEPT - tap], dx);
        if (t < end)
            a.dx[(int64_t)t * a.n_chan + c] = dx;
    }
}

br_status bi_grad_conv_cuda(bi_grad_ctx *ctx, const bi_grad_conv_args *a) {
    const bi_batch *batch = a->batch;
    const conv_args args = {batch->seg, batch->row_seg, a->x, a->w, a->dy, a->dx, batch->n_row, a->n_chan, a->x_ld};
    BR_TRY(bi_grad_check_conv(a));
    if (batch->n_row == 0 || !a->dx)
        return BR_OK;
    const dim3 grid((unsigned)bi_ceil_div(a->n_chan, CONV_CHAN), (unsigned)bi_ceil_div(batch->n_row, CONV_ROWS));
    conv_kernel<<<grid, CONV_CHAN, 0, ctx->cuda->stream>>>(args);
    return bi_grad_launched("conv");
}

/* ---- kda_gate -------------------------------------------------------------------------------------------------------------------- */

/* Elements of f, then those of b. */
static __global__ void __launch_bounds__(THREADS) kda_gate_kernel(bi_grad_kda_gate_args a) {
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, n_beta = (int64_t)a.n_row * a.n_head, n = n_beta * a.d;
    if (at < n && a.df) {
        const int head = (int)(at / a.d % a.n_head);
        const float rate = bi_exp(a.a_log[head]), y = bi_widen(a.f[at]) + a.dt_bias[(int64_t)head * a.d + at % a.d];
        float g, slope;
        if (a.bounded) {
            const float s = bi_sigmoid(rate * y);
            g = a.lower_bound * s;
            slope = a.lower_bound * rate * s * bi_sigmoid(-(rate * y));
        } else {
            g = -(rate * bi_softplus(y));
            slope = -(rate * bi_sigmoid(y));
        }
        a.df[at] = a.da[at] * bi_exp(g) * slope;
    }
    if (at >= n && at < n + n_beta && a.db) {
        const float b = bi_widen(a.b[at - n]);
        a.db[at - n] = a.dbeta[at - n] * bi_sigmoid(b) * bi_sigmoid(-b);
    }
}

br_status bi_grad_kda_gate_cuda(bi_grad_ctx *ctx, const bi_grad_kda_gate_args *a) {
    BR_TRY(bi_grad_check_kda_gate(a));
    if (a->n_row == 0)
        return BR_OK;
    const int64_t n = (int64_t)a->n_row * a->n_head * (a->d + 1);
    kda_gate_kernel<<<(unsigned)bi_ceil_div(n, THREADS), THREADS, 0, ctx->cuda->stream>>>(*a);
    return bi_grad_launched("kda_gate");
}

/* ---- kda_norm -------------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) kda_norm_kernel(bi_grad_kda_norm_args a) {
    const int64_t head = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, at = head * a.d;
    const int lane = (int)threadIdx.x % 32;
    float oo = 0.0f, og = 0.0f;
    if (head >= (int64_t)a.n_row * a.n_head)
        return;
    for (int i = lane; i < a.d; i += 32) {
        const float o = a.o[at + i];
        oo = fmaf(o, o, oo);
        og = fmaf(o, a.w[i] * a.dy[at + i] * bi_sigmoid(bi_widen(a.gate[at + i])), og);
    }
    const float r = inverse_rms(warp_sum(oo), a.d, a.eps), along = r * r * r / (float)a.d * warp_sum(og);
    for (int i = lane; i < a.d; i += 32) {
        const float o = a.o[at + i], gate = bi_widen(a.gate[at + i]), s = bi_sigmoid(gate), g = a.w[i] * a.dy[at + i];
        if (a.d_o)
            a.d_o[at + i] = r * g * s - along * o;
        if (a.dgate)
            a.dgate[at + i] = g * o * r * s * bi_sigmoid(-gate);
    }
}

br_status bi_grad_kda_norm_cuda(bi_grad_ctx *ctx, const bi_grad_kda_norm_args *a) {
    BR_TRY(bi_grad_check_kda_norm(a));
    if (a->n_row == 0)
        return BR_OK;
    kda_norm_kernel<<<(unsigned)bi_ceil_div((int64_t)a->n_row * a->n_head, WARPS), THREADS, 0, ctx->cuda->stream>>>(*a);
    return bi_grad_launched("kda_norm");
}

/* ---- attnres --------------------------------------------------------------------------------------------------------------------- */

enum { RES_MAX = BR_BANK_MAX + 1, RES_SUMS = 3 };

typedef struct res_args {
    const bi_bf16 *v[RES_MAX]; /* the bank, then p */
    float *dv[RES_MAX];        /* NULL: not wanted */
    const float *w, *dy;
    float eps;
    int32_t n, d;
} res_args;

typedef struct res_shared {
    float partial[RES_MAX][RES_SUMS][WARPS]; /* v.v, v.W, v.dy */
    float s[RES_MAX], r[RES_MAX], dpi[RES_MAX];
    float pi[RES_MAX], along_w[RES_MAX], along_v[RES_MAX]; /* dv = pi dy + along_w W - along_v v */
} res_shared;

static __device__ __forceinline__ void res_sums(const res_args &a, res_shared &m, int row, int64_t at) {
    float sum[RES_SUMS] = {0.0f};
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < a.d; i += THREADS) {
        const float v = bi_widen(a.v[row][at + i]);
        sum[0] = fmaf(v, v, sum[0]);
        sum[1] = fmaf(v, a.w[i], sum[1]);
        sum[2] = fmaf(v, a.dy[at + i], sum[2]);
    }
#pragma unroll
    for (int k = 0; k < RES_SUMS; k++) {
        sum[k] = warp_sum(sum[k]);
        if (threadIdx.x % 32 == 0)
            m.partial[row][k][threadIdx.x / 32] = sum[k];
    }
}

/* On one thread: the softmax, and what the outputs are made of. */
static __device__ void res_softmax(const res_args &a, res_shared &m) {
    float max = m.s[0], sum = 0.0f, mean = 0.0f;
    for (int i = 1; i < a.n; i++)
        max = m.s[i] > max ? m.s[i] : max;
    for (int i = 0; i < a.n; i++)
        sum += m.pi[i] = bi_exp(m.s[i] - max);
    for (int i = 0; i < a.n; i++) {
        m.pi[i] /= sum;
        mean = fmaf(m.pi[i], m.dpi[i], mean);
    }
    for (int i = 0; i < a.n; i++) {
        const float ds = m.pi[i] * (m.dpi[i] - mean);
        m.along_w[i] = ds * m.r[i];
        m.along_v[i] = ds * m.s[i] * m.r[i] * m.r[i] / (float)a.d;
    }
}

static __global__ void __launch_bounds__(THREADS) attnres_kernel(res_args a) {
    __shared__ res_shared m;
    const int64_t at = (int64_t)blockIdx.x * a.d;
    const int i0 = (int)threadIdx.x;
    for (int row = 0; row < a.n; row++)
        res_sums(a, m, row, at);
    __syncthreads();
    if (i0 < a.n) {
        m.r[i0] = inverse_rms(warps_sum(m.partial[i0][0]), a.d, a.eps);
        m.s[i0] = warps_sum(m.partial[i0][1]) * m.r[i0];
        m.dpi[i0] = warps_sum(m.partial[i0][2]);
    }
    __syncthreads();
    if (i0 == 0)
        res_softmax(a, m);
    __syncthreads();
    for (int row = 0; row < a.n; row++) {
        const float pi = m.pi[row], along_w = m.along_w[row], along_v = m.along_v[row];
        if (!a.dv[row])
            continue;
#pragma unroll 4
        for (int i = i0; i < a.d; i += THREADS)
            a.dv[row][at + i] = fmaf(pi, a.dy[at + i], fmaf(along_w, a.w[i], -(along_v * bi_widen(a.v[row][at + i]))));
    }
}

br_status bi_grad_attnres_cuda(bi_grad_ctx *ctx, const bi_grad_attnres_args *a) {
    BR_TRY(bi_grad_check_attnres(a));
    res_args args = {};
    args.w = a->w;
    args.dy = a->dy;
    args.eps = a->eps;
    args.n = a->n_bank + 1;
    args.d = a->d;
    for (int i = 0; i < a->n_bank; i++) {
        args.v[i] = a->bank[i];
        args.dv[i] = a->dbank ? a->dbank[i] : NULL;
    }
    args.v[a->n_bank] = a->p;
    args.dv[a->n_bank] = a->dp;
    if (a->n_row == 0)
        return BR_OK;
    attnres_kernel<<<(unsigned)a->n_row, THREADS, 0, ctx->cuda->stream>>>(args);
    return bi_grad_launched("attnres");
}
