/* bi_route, oracle.      Contract: N-ROUTE, N-CHAIN, P-4
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. One job a tile of rows. */
#include "bi_gemm.h"
#include "bi_oracle.h"
#include "bi_rows.h"

#include "bi_fn.h"
#include "bi_order.h"

typedef struct route_run {
    bi_ctx *ctx;
    const bi_route_args *args;
    int32_t job_rows;
} route_run;

static size_t thread_bytes(int32_t k_pad, int32_t n_column) {
    return (size_t)BI_GEMM_ROWS * ((size_t)k_pad * BI_PACKED_BYTES + (size_t)n_column * sizeof(float)) +
           (size_t)n_column * 2 * sizeof(float);
}

#ifdef BI_ISA_portable
bi_scratch bi_route_scratch(const bi_limits *limits) {
    bi_scratch need = {0, thread_bytes(bi_pad_k(limits->d_model), bi_panel_count(limits->n_expert) * BI_PANEL)};
    return need;
}
#endif

static int row_is_finite(const float *x, int32_t n) {
    int finite = 1;
    for (int32_t e = 0; e < n; e++)
        finite &= bi_is_finite(x[e]);
    return finite;
}

/* The row of a request that ends here: any experts, without weight. */
static void route_nowhere(const bi_route_args *a, int32_t t) {
    for (int32_t i = 0; i < a->topk; i++) {
        a->expert[(int64_t)t * a->topk + i] = i;
        a->p[(int64_t)t * a->topk + i] = 0.0f;
    }
    bi_fault_check(&a->fault, t, bi_f32_of(BI_F32_NAN));
}

/* s, rank (n_expert): scratch. */
static void route_row(const bi_route_args *a, int32_t t, const float *logit, float *s, float *rank) {
    int32_t *expert = a->expert + (int64_t)t * a->topk;
    float *p = a->p + (int64_t)t * a->topk;
    if (!row_is_finite(logit, a->n_expert)) {
        route_nowhere(a, t);
        return;
    }
    for (int32_t e = 0; e < a->n_expert; e++) {
        s[e] = bi_sigmoid(logit[e]);
        rank[e] = BI_ADD(s[e], a->bias[e]);
    }
    bi_order_topk(rank, a->n_expert, a->topk, expert);
    float sum = 0.0f;
    for (int32_t i = 0; i < a->topk; i++)
        sum = BI_ADD(sum, s[expert[i]]);
    sum = BI_ADD(sum, BI_ROUTE_SUM_EPS);
    for (int32_t i = 0; i < a->topk; i++)
        p[i] = BI_MUL(a->renormalize ? BI_DIV(s[expert[i]], sum) : s[expert[i]], a->scale);
}

static void tile_job(void *context, int job, int thread) {
    const route_run *run = context;
    const bi_route_args *a = run->args;
    int32_t begin = job * run->job_rows, n = a->n_row - begin < run->job_rows ? a->n_row - begin : run->job_rows;
    int32_t k_pad = bi_pad_k(a->d), n_panel = bi_panel_count(a->n_expert), n_column = n_panel * BI_PANEL;
    float *xf = (float *)bi_thread_scratch(run->ctx, thread, thread_bytes(k_pad, n_column));
    float *logit = xf + (size_t)n * (size_t)k_pad, *s = logit + (size_t)n * (size_t)n_column, *rank = s + n_column;
    int16_t *xe = (int16_t *)(rank + n_column);
    for (int32_t r = 0; r < n; r++) {
        size_t at = (size_t)r * (size_t)k_pad;
        BI_FN(bi_pack_row)(a->x + (size_t)(begin + r) * (size_t)a->d, a->d, k_pad, xf + at, xe + at);
    }
    memset(logit, 0, sizeof *logit * (size_t)n * (size_t)n_column);
    bi_gemm_rows(n, xf, xe, (size_t)k_pad, &a->w, 0, n_panel, logit, (size_t)n_column);
    for (int32_t r = 0; r < n; r++) {
        const float *row = logit + (size_t)r * (size_t)n_column;
        if (a->logit)
            memcpy(a->logit + (int64_t)(begin + r) * a->n_expert, row, sizeof *row * (size_t)a->n_expert);
        route_row(a, begin + r, row, s, rank);
    }
}

br_status BI_FN(bi_route)(bi_ctx *ctx, const bi_route_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->d > ctx->limits.d_model || a->n_expert < 1 || a->n_expert > ctx->limits.n_expert)
        return br_fail(BR_E_SHAPE, "route: %d rows of %d, %d experts: expected n_row >= 0, 1 to %d, 1 to %d", a->n_row, a->d,
                       a->n_expert, ctx->limits.d_model, ctx->limits.n_expert);
    if (a->topk < 1 || a->topk > a->n_expert)
        return br_fail(BR_E_SHAPE, "route: %d of %d experts: expected 1 to %d", a->topk, a->n_expert, a->n_expert);
    if (!a->w.data || a->w.n_out != a->n_expert || a->w.n_in != a->d)
        return br_fail(BR_E_SHAPE, "route: the router is (%d, %d): expected (%d, %d)", a->w.n_out, a->w.n_in, a->n_expert,
                       a->d);
    int32_t n_thread = br_pool_thread_count(ctx->pool), share = (a->n_row + n_thread - 1) / n_thread;
    route_run run = {ctx, a, share < 1 ? 1 : share > BI_GEMM_ROWS ? BI_GEMM_ROWS : share};
    br_pool_run(ctx->pool, tile_job, &run, (a->n_row + run.job_rows - 1) / run.job_rows);
    return BR_OK;
}
