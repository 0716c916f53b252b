/* Gradients of linear, glu and combine, CUDA.      Contract: N-LIN, N-LORA, N-ACT, N-MOE-2
 *
 * linear: dy in bf16 into scratch, (head, row, whole 16s); dx = dy W; then a slot after the other U = s dy B and T = s A x in f32 by a
 * product, rounded to bf16 with zeros in rows of other slots (low_kernel), dx += U A, da = U^T x, db = dy^T T. As many heads at a time
 * as the scratch takes. Products: bi_grad_gemm.cu, one sum an element.
 * convert_kernel, low_kernel: a thread four and one elements, grid (columns, rows, heads). glu: a thread an element. combine: a warp a
 * pair, lanes over the columns, their sums folded by 16, 8, 4, 2, 1. */
#include "bi_grad_dense.cuh"

enum { THREADS = 256 };

/* ---- linear: kernels ------------------------------------------------------------------------------------------------- */

typedef struct convert_args {
    const float *from;
    int64_t ld, head_ld;
    bi_bf16 *to; /* (head, n_row, to_ld) */
    int32_t n_row, n, to_ld, wide;
} convert_args;

static __global__ void __launch_bounds__(THREADS) convert_kernel(const convert_args a) {
    const int32_t col = ((int32_t)blockIdx.x * THREADS + (int32_t)threadIdx.x) * 4;
    if (col >= a.to_ld)
        return;
    for (int32_t row = (int32_t)blockIdx.y; row < a.n_row; row += (int32_t)gridDim.y) {
        const float *from = a.from + row * a.ld + blockIdx.z * a.head_ld + col;
        float v[4];
        if (a.wide && col + 4 <= a.n) {
            const float4 all = *(const float4 *)(const void *)from;
            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
        } else {
            for (int i = 0; i < 4; i++)
                v[i] = col + i < a.n ? from[i] : 0.0f;
        }
        uint2 out;
        out.x = (uint32_t)bi_round(v[0]) | (uint32_t)bi_round(v[1]) << 16;
        out.y = (uint32_t)bi_round(v[2]) | (uint32_t)bi_round(v[3]) << 16;
        *(uint2 *)(void *)(a.to + ((int64_t)blockIdx.z * a.n_row + row) * a.to_ld + col) = out;
    }
}

typedef struct low_args {
    const float *from;  /* (head, n_row, ld), `rank` wide */
    const float *s;     /* of a head */
    const int32_t *row_slot;
    bi_bf16 *to;        /* (head, n_row, ld) */
    int32_t n_row, ld, rank, slot;
} low_args;

static __global__ void __launch_bounds__(THREADS) low_kernel(const low_args a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int32_t row = (int32_t)(i / a.ld), r = (int32_t)(i % a.ld);
    if (row >= a.n_row)
        return;
    const int64_t at = ((int64_t)blockIdx.y * a.n_row + row) * a.ld + r;
    a.to[at] = r < a.rank && a.row_slot[row] == a.slot ? bi_round(a.s[blockIdx.y] * a.from[at]) : (bi_bf16)0;
}

/* ---- linear ---------------------------------------------------------------------------------------------------------- */

typedef struct linear_scratch {
    bi_bf16 *dy, *low; /* low: U or T */
    float *low_f;
    int64_t dy_max;    /* elements */
    int32_t head_max, low_ld;
} linear_scratch;

static linear_scratch carve_linear(bi_carver *carver, const bi_limits *limits) {
    const int64_t n_row = limits->n_row > 0 ? limits->n_row : 0;
    linear_scratch s;
    s.head_max = limits->n_head > 1 ? limits->n_head : 1;
    s.low_ld = grad_ld(limits->rank > 0 ? limits->rank : 0);
    s.dy_max = n_row * grad_ld(limits->d_out);
    s.dy = (bi_bf16 *)bi_carve(carver, (size_t)s.dy_max * sizeof(bi_bf16));
    s.low = (bi_bf16 *)bi_carve(carver, (size_t)(n_row * s.head_max * s.low_ld) * sizeof(bi_bf16));
    s.low_f = (float *)bi_carve(carver, (size_t)(n_row * s.head_max * s.low_ld) * sizeof(float));
    return s;
}

size_t bi_grad_linear_cuda_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    carve_linear(&carver, limits);
    return carver.used;
}

/* Heads head .. head + n - 1 of the call. */
typedef struct linear_part {
    bi_grad_ctx *ctx;
    const bi_grad_linear_args *args;
    linear_scratch scratch;
    int32_t head, n, dy_ld;
} linear_part;

static br_status convert(const linear_part *p) {
    const bi_grad_linear_args *a = p->args;
    convert_args c = {a->dy + p->head * a->dy_head_ld, a->dy_ld, a->dy_head_ld, p->scratch.dy, a->n_row, a->w.n_out, p->dy_ld, 0};
    c.wide = (uintptr_t)c.from % 16 == 0 && c.ld % 4 == 0 && (p->n == 1 || c.head_ld % 4 == 0);
    if (a->n_row == 0)
        return BR_OK;
    const dim3 grid((unsigned)bi_ceil_div(p->dy_ld, 4 * THREADS), grad_rows_y(a->n_row), (unsigned)p->n);
    convert_kernel<<<grid, THREADS, 0, p->ctx->cuda->stream>>>(c);
    return bi_grad_launched("linear");
}

/* The operand of a product that lies in scratch, or the map's or adapter's matrices of these heads. */
typedef struct operand {
    const bi_bf16 *base;
    int64_t ld, stride;
} operand;

static operand dy_of(const linear_part *p) {
    const operand o = {p->scratch.dy, p->dy_ld, (int64_t)p->args->n_row * p->dy_ld};
    return o;
}
static operand low_of(const linear_part *p) {
    const operand o = {p->scratch.low, p->scratch.low_ld, (int64_t)p->args->n_row * p->scratch.low_ld};
    return o;
}
static operand x_of(const linear_part *p) {
    const operand o = {p->args->x + p->head * p->args->x_head_ld, p->args->x_ld, p->args->x_head_ld};
    return o;
}
static operand mat_of(const linear_part *p, const bi_mat *stack) {
    const operand o = {(const bi_bf16 *)bi_mat_at(stack, p->head).data, grad_ld(stack->n_in), (int64_t)(stack->stride / sizeof(bi_bf16))};
    return o;
}

/* c (m, n) = op(a) op(b) + beta c of all heads. */
static br_status multiply(const linear_part *p, int32_t m, int32_t n, int32_t k, operand a, int a_t, operand b, int b_t, float beta, float *c,
                          int64_t c_ld, int64_t c_stride) {
    bi_grad_gemm_args g;
    memset(&g, 0, sizeof g);
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = p->n;
    g.a = a.base;
    g.a_ld = a.ld;
    g.a_stride = a.stride;
    g.a_t = a_t;
    g.b = b.base;
    g.b_ld = b.ld;
    g.b_stride = b.stride;
    g.b_t = b_t;
    g.alpha = 1.0f;
    g.beta = beta;
    g.c = c;
    g.c_ld = c_ld;
    g.c_stride = c_stride;
    return bi_grad_gemm(p->ctx, &g);
}

/* low = op(a) op(b) of the slot's rows, times s; zeros in the others. */
static br_status make_low(const linear_part *p, int32_t slot, int32_t k, operand a, operand b, int b_t) {
    const bi_adapter *adapter = &p->args->lora.slot[slot];
    const int32_t rank = adapter->a.n_out, n_row = p->args->n_row, ld = p->scratch.low_ld;
    if (n_row == 0)
        return BR_OK;
    BR_TRY(multiply(p, n_row, rank, k, a, 0, b, b_t, 0.0f, p->scratch.low_f, ld, (int64_t)n_row * ld));
    const low_args l = {p->scratch.low_f, adapter->s + p->head, p->args->lora.row_slot, p->scratch.low, n_row, ld, rank, slot};
    const dim3 grid((unsigned)bi_ceil_div((int64_t)n_row * ld, THREADS), (unsigned)p->n);
    low_kernel<<<grid, THREADS, 0, p->ctx->cuda->stream>>>(l);
    return bi_grad_launched("linear");
}

static br_status run_slot(const linear_part *p, int32_t slot) {
    const bi_grad_linear_args *a = p->args;
    const bi_adapter *adapter = &a->lora.slot[slot];
    const int32_t n_in = a->w.n_in, n_out = a->w.n_out, rank = adapter->a.n_out;
    float *da = a->slot ? a->slot[slot].da : NULL, *db = a->slot ? a->slot[slot].db : NULL;
    if (a->dx || da)
        BR_TRY(make_low(p, slot, n_out, dy_of(p), mat_of(p, &adapter->b), 0));
    if (a->dx)
        BR_TRY(multiply(p, a->n_row, n_in, rank, low_of(p), 0, mat_of(p, &adapter->a), 0, 1.0f, a->dx + p->head * a->dx_head_ld, a->dx_ld,
                        a->dx_head_ld));
    if (da)
        BR_TRY(multiply(p, rank, n_in, a->n_row, low_of(p), 1, x_of(p), 0, 0.0f, da + (int64_t)p->head * rank * n_in, n_in, (int64_t)rank * n_in));
    if (!db)
        return BR_OK;
    BR_TRY(make_low(p, slot, n_in, x_of(p), mat_of(p, &adapter->a), 1));
    return multiply(p, n_out, rank, a->n_row, dy_of(p), 1, low_of(p), 0, 0.0f, db + (int64_t)p->head * n_out * rank, rank, (int64_t)n_out * rank);
}

static br_status run_part(const linear_part *p) {
    const bi_grad_linear_args *a = p->args;
    BR_TRY(convert(p));
    if (a->dx)
        BR_TRY(multiply(p, a->n_row, a->w.n_in, a->w.n_out, dy_of(p), 0, mat_of(p, &a->w), 0, 0.0f, a->dx + p->head * a->dx_head_ld, a->dx_ld,
                        a->dx_head_ld));
    for (int32_t slot = 0; a->lora.slot && slot < a->lora.n_slot; slot++)
        if (a->lora.slot[slot].a.data)
            BR_TRY(run_slot(p, slot));
    return BR_OK;
}

br_status bi_grad_linear_cuda(bi_grad_ctx *ctx, const bi_grad_linear_args *a) {
    BR_TRY(bi_grad_check_linear(&ctx->cuda->limits, a));
    if (a->w.form != BI_FORM_BF16)
        return br_fail(BR_E_UNSUPPORTED, "gradient of linear: a map in MXFP4: expected bf16; only experts are kept in MXFP4");
    bi_carver carver = bi_grad_cuda_carver(ctx);
    linear_part p = {ctx, a, carve_linear(&carver, &ctx->cuda->limits), 0, 0, grad_ld(a->w.n_out)};
    const int64_t of_head = (int64_t)a->n_row * p.dy_ld, fit = of_head > 0 ? p.scratch.dy_max / of_head : p.scratch.head_max;
    const int32_t most = fit < p.scratch.head_max ? (int32_t)fit : p.scratch.head_max;
    for (; p.head < a->n_head; p.head += most) {
        p.n = a->n_head - p.head < most ? a->n_head - p.head : most;
        BR_TRY(run_part(&p));
    }
    return BR_OK;
}

/* ---- glu ------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) glu_kernel(const __grid_constant__ bi_grad_glu_args a) {
    const int32_t col = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    if (col >= a.d)
        return;
    for (int32_t row = (int32_t)blockIdx.y; row < a.n_row; row += (int32_t)gridDim.y) {
        const int64_t from = row * a.ld + col, at = (int64_t)row * a.d + col;
        const grad_act slope = grad_act_of(a.act, a.g[from], a.u[from], a.dy[at]);
        if (a.dg)
            a.dg[at] = slope.dg;
        if (a.du)
            a.du[at] = slope.du;
    }
}

br_status bi_grad_glu_cuda(bi_grad_ctx *ctx, const bi_grad_glu_args *a) {
    BR_TRY(bi_grad_check_glu(a));
    if (a->n_row == 0)
        return BR_OK;
    const dim3 grid((unsigned)bi_ceil_div(a->d, THREADS), grad_rows_y(a->n_row));
    glu_kernel<<<grid, THREADS, 0, ctx->cuda->stream>>>(*a);
    return bi_grad_launched("glu");
}

/* ---- combine --------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) combine_kernel(const __grid_constant__ bi_grad_combine_args a) {
    const int64_t pair = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int32_t lane = (int32_t)threadIdx.x % 32;
    if (pair >= (int64_t)a.n_row * a.topk)
        return;
    const float *dy = a.dy + pair / a.topk * a.d;
    const float p = a.p[pair];
    const bi_bf16 *e = a.e + pair * a.d;
    float sum = 0.0f;
    for (int32_t c = lane; c < a.d; c += 32) {
        sum += dy[c] * bi_widen(e[c]);
        if (a.de)
            a.de[pair * a.d + c] = p * dy[c];
    }
    for (int h = 16; h > 0; h >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, h);
    if (lane == 0 && a.dp)
        a.dp[pair] = sum;
}

br_status bi_grad_combine_cuda(bi_grad_ctx *ctx, const bi_grad_combine_args *a) {
    BR_TRY(bi_grad_check_combine(a));
    if (a->n_row == 0)
        return BR_OK;
    const unsigned grid = (unsigned)bi_ceil_div((int64_t)a->n_row * a->topk, THREADS / 32);
    combine_kernel<<<grid, THREADS, 0, ctx->cuda->stream>>>(*a);
    return bi_grad_launched("combine");
}
