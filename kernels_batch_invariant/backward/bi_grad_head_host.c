/* Gradients of score and route, host form.      Contract: N-HEAD-1, N-ROUTE-1 without their roundings
 *
 * score: z = W x / T; dz = dlogprob (onehot - softmax(z)); dx = W^T dz / T. Rows in chunks of 32, so that no more than 32 rows of
 * logits exist. A chunk takes three steps: the logits, a job a panel of 32 vocabulary entries; dz in their place, a job a row; dx, a
 * job 16 of its columns, which walks the panels in rising order. Lanes of a panel are summed in four chains and those added last.
 *
 * route: a job a row. Only the chosen experts' rows of W are unpacked. */
#include "bi_grad_head_check.h"
#include "bi_grad_host.h"

#include "bi_head_row.h"

#include <math.h>
#include <string.h>

enum {
    ROWS = 32,
    ROW_STEP = 4,  /* rows and lanes of a step of the logits: what fits into registers */
    LANE_STEP = 4,
    CHUNK_K = 128, /* 16 KiB of a panel, while the rows pass */
    COLUMNS = 16   /* of dx in a job */
};
_Static_assert(ROWS % ROW_STEP == 0 && BI_PANEL % LANE_STEP == 0, "whole steps");

typedef struct score_run {
    const bi_grad_score_args *a;
    int32_t first, n_row; /* rows of the chunk */
    size_t z_ld;          /* the vocabulary in whole panels */
    double *x;            /* (ROWS, d), absent rows zeros */
    double *z;            /* (ROWS, z_ld) logits, then dz / T */
} score_run;

static void carve(score_run *run, br_arena *arena, int32_t d, int32_t n_vocab) {
    run->z_ld = (size_t)bi_panel_count(n_vocab) * BI_PANEL;
    run->x = BR_ARENA_ARRAY(arena, double, (size_t)ROWS * (size_t)d);
    run->z = BR_ARENA_ARRAY(arena, double, ROWS * run->z_ld);
}

bi_grad_scratch bi_grad_score_host_scratch(const bi_limits *limits) {
    score_run run;
    br_arena shared = {0}, thread = {0};
    carve(&run, &shared, limits->d_model, limits->n_vocab);
    (void)BR_ARENA_ARRAY(&thread, double, (size_t)limits->n_expert_topk * (size_t)limits->d_model); /* route: rows of W */
    (void)BR_ARENA_ARRAY(&thread, double, 2 * (size_t)limits->n_expert_topk + 2 * (size_t)limits->d_model);
    return (bi_grad_scratch){shared.used, thread.used};
}

/* acc (4, 4) += x[r][k] * f[k][lane] over n_k. */
static void add_step(double *restrict z, size_t z_ld, const double *restrict x, size_t x_ld, const float *restrict f, int32_t n_k) {
    double acc[ROW_STEP][LANE_STEP];
    for (size_t r = 0; r < ROW_STEP; r++)
        memcpy(acc[r], z + r * z_ld, sizeof acc[r]);
    for (size_t k = 0; k < (size_t)n_k; k++) {
        double w[LANE_STEP];
        for (size_t l = 0; l < LANE_STEP; l++)
            w[l] = (double)f[k * BI_PANEL + l];
        for (size_t r = 0; r < ROW_STEP; r++)
            for (size_t l = 0; l < LANE_STEP; l++)
                acc[r][l] += x[r * x_ld + k] * w[l];
    }
    for (size_t r = 0; r < ROW_STEP; r++)
        memcpy(z + r * z_ld, acc[r], sizeof acc[r]);
}

static void logit_job(void *context, int panel, int thread) {
    (void)thread;
    const score_run *run = context;
    const size_t d = (size_t)run->a->d;
    const float *f = bi_panel_f(&run->a->w, panel);
    double *z = run->z + (size_t)panel * BI_PANEL;
    for (size_t r = 0; r < ROWS; r++)
        memset(z + r * run->z_ld, 0, sizeof *z * BI_PANEL);
    for (size_t k = 0; k < d; k += CHUNK_K)
        for (size_t r = 0; r < (size_t)run->n_row; r += ROW_STEP)
            for (size_t l = 0; l < BI_PANEL; l += LANE_STEP)
                add_step(z + r * run->z_ld + l, run->z_ld, run->x + r * d + k, d, f + k * BI_PANEL + l,
                         (int32_t)(d - k < CHUNK_K ? d - k : CHUNK_K));
}

static void softmax_job(void *context, int r, int thread) {
    (void)thread;
    const score_run *run = context;
    const bi_grad_score_args *a = run->a;
    const int32_t t = run->first + r, n = a->n_vocab, token = a->token[t];
    const double inverse_t = 1.0 / (double)bi_head_score_temperature(a->temperature[t]), g = (double)a->dlogprob[t] * inverse_t;
    double *z = run->z + (size_t)r * run->z_ld, top, sum = 0.0, others = 0.0;
    for (int32_t v = 0; v < n; v++)
        z[v] *= inverse_t;
    top = z[0];
    for (int32_t v = 1; v < n; v++)
        top = z[v] > top ? z[v] : top;
    for (int32_t v = 0; v < n; v++) {
        z[v] = exp(z[v] - top);
        sum += z[v];
        others += v == token ? 0.0 : z[v];
    }
    for (int32_t v = 0; v < n; v++)
        z[v] *= -g / sum;
    z[token] = g * (others / sum); /* 1 - p without cancellation */
    for (size_t v = (size_t)n; v < run->z_ld; v++)
        z[v] = 0.0;
}

/* sum[0..3] += the 32 products of a panel's row k with dz. */
static void add_lanes(double sum[LANE_STEP], const double *restrict dz, const double *restrict w) {
    double acc[LANE_STEP];
    memcpy(acc, sum, sizeof acc);
    for (size_t l = 0; l < BI_PANEL; l += LANE_STEP)
        for (size_t i = 0; i < LANE_STEP; i++)
            acc[i] += dz[l + i] * w[l + i];
    memcpy(sum, acc, sizeof acc);
}

static void dx_job(void *context, int job, int thread) {
    (void)thread;
    const score_run *run = context;
    const bi_grad_score_args *a = run->a;
    double sum[ROWS][COLUMNS][LANE_STEP] = {0};
    const int32_t first = job * COLUMNS, n = a->d - first < COLUMNS ? a->d - first : COLUMNS, n_panel = bi_panel_count(a->n_vocab);
    for (int32_t panel = 0; panel < n_panel; panel++) {
        const float *f = bi_panel_f(&a->w, panel) + (size_t)first * BI_PANEL;
        for (int32_t k = 0; k < n; k++) {
            double w[BI_PANEL];
            for (int l = 0; l < BI_PANEL; l++)
                w[l] = (double)f[k * BI_PANEL + l];
            for (int32_t r = 0; r < run->n_row; r++)
                add_lanes(sum[r][k], run->z + (size_t)r * run->z_ld + (size_t)panel * BI_PANEL, w);
        }
    }
    for (int32_t r = 0; r < run->n_row; r++)
        for (int32_t k = 0; k < n; k++)
            a->dx[(int64_t)(run->first + r) * a->d + first + k] = (float)((sum[r][k][0] + sum[r][k][1]) + (sum[r][k][2] + sum[r][k][3]));
}

static br_status check_score(const bi_limits *limits, const bi_grad_score_args *a) {
    BR_TRY(bi_grad_check_score(limits, a));
    for (int32_t t = 0; t < a->n_row; t++) {
        if (a->token[t] < 0 || a->token[t] >= a->n_vocab)
            return br_fail(BR_E_SHAPE, "gradient of score: row %d asks for token %d: expected 0 to %d", t, a->token[t], a->n_vocab - 1);
        if (!bi_head_temperature_ok(a->temperature[t]))
            return br_fail(BR_E_ARG, "gradient of score: row %d has temperature %g: expected 0 or 2^-10 to 2^10", t, (double)a->temperature[t]);
    }
    return BR_OK;
}

br_status bi_grad_score_host(bi_grad_ctx *ctx, const bi_grad_score_args *a) {
    BR_TRY(check_score(&ctx->limits, a));
    score_run run = {.a = a};
    br_arena shared = bi_grad_shared_arena(ctx);
    carve(&run, &shared, a->d, a->n_vocab);
    for (run.first = 0; a->dx && run.first < a->n_row; run.first += ROWS) {
        const bi_bf16 *x = a->x + (int64_t)run.first * a->d;
        run.n_row = a->n_row - run.first < ROWS ? a->n_row - run.first : ROWS;
        for (int64_t i = 0; i < (int64_t)ROWS * a->d; i++)
            run.x[i] = i < (int64_t)run.n_row * a->d ? bi_wide(x[i]) : 0.0;
        br_pool_run(ctx->pool, logit_job, &run, bi_panel_count(a->n_vocab));
        br_pool_run(ctx->pool, softmax_job, &run, run.n_row);
        br_pool_run(ctx->pool, dx_job, &run, (a->d + COLUMNS - 1) / COLUMNS);
    }
    return BR_OK;
}

/* ---- route ---- */

typedef struct route_run {
    const bi_grad_ctx *ctx;
    const bi_grad_route_args *a;
} route_run;

/* d of the chosen logits, from those logits. s (topk): scratch. */
static void logit_slopes(const bi_grad_route_args *a, int32_t t, double *logit, double *s) {
    const float *dp = a->dp + (int64_t)t * a->topk;
    double sum = (double)BI_ROUTE_SUM_EPS, mean = 0.0;
    for (int32_t i = 0; i < a->topk; i++) {
        const double e = exp(-fabs(logit[i])), high = 1.0 / (1.0 + e);
        s[i] = logit[i] < 0.0 ? e * high : high;
        logit[i] = (double)a->scale * (e * high * high);
        sum += s[i];
    }
    for (int32_t i = 0; i < a->topk; i++)
        mean += (double)dp[i] * (s[i] / sum);
    for (int32_t i = 0; i < a->topk; i++)
        logit[i] *= a->renormalize ? ((double)dp[i] - mean) / sum : (double)dp[i];
}

static void route_job(void *context, int t, int thread) {
    const route_run *run = context;
    const bi_grad_route_args *a = run->a;
    const size_t d = (size_t)a->d, topk = (size_t)a->topk;
    br_arena arena = bi_grad_thread_arena(run->ctx, thread);
    double *w = BR_ARENA_ARRAY(&arena, double, topk * d), *x = BR_ARENA_ARRAY(&arena, double, 2 * topk + 2 * d);
    double *sum = x + d, *logit = sum + d, *s = logit + topk;
    memset(sum, 0, sizeof *sum * (d + topk)); /* and the logits behind it */
    for (size_t k = 0; k < d; k++)
        x[k] = bi_wide(a->x[(size_t)t * d + k]);
    for (size_t i = 0; i < topk; i++) {
        bi_grad_mat_row(&a->w, a->expert[(size_t)t * topk + i], w + i * d);
        for (size_t k = 0; k < d; k++)
            logit[i] += x[k] * w[i * d + k];
    }
    logit_slopes(a, t, logit, s);
    for (size_t i = 0; i < topk; i++)
        for (size_t k = 0; k < d; k++)
            sum[k] += logit[i] * w[i * d + k];
    for (size_t k = 0; k < d; k++)
        a->dx[(size_t)t * d + k] = (float)sum[k];
}

static br_status check_route(const bi_limits *limits, const bi_grad_route_args *a) {
    BR_TRY(bi_grad_check_route(limits, a));
    for (int64_t i = 0; i < (int64_t)a->n_row * a->topk; i++)
        if (a->expert[i] < 0 || a->expert[i] >= a->n_expert)
            return br_fail(BR_E_SHAPE, "gradient of route: row %d chose expert %d: expected 0 to %d", (int)(i / a->topk), a->expert[i],
                           a->n_expert - 1);
    return BR_OK;
}

br_status bi_grad_route_host(bi_grad_ctx *ctx, const bi_grad_route_args *a) {
    BR_TRY(check_route(&ctx->limits, a));
    route_run run = {ctx, a};
    if (a->dx)
        br_pool_run(ctx->pool, route_job, &run, a->n_row);
    return BR_OK;
}
