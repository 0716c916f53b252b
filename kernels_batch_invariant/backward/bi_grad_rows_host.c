/* Gradients of the row ops in binary64: rmsnorm, conv, kda_gate, kda_norm, attnres.      Contract: N-NORM, N-CONV, N-KDA-1, N-KDA-5, N-RES
 *
 * Layer: kernels_batch_invariant. A row (conv: a tile of channels of a segment) belongs to one thread. Sums run in eight lanes, lane l the
 * elements l, l + 8, .., which are added up at the end. */
#include "bi_grad_host.h"
#include "bi_grad_rows_check.h"

#include <math.h>

enum { LANES = 8, CONV_TILE = 128, JOB_COST = 1 << 14 /* element steps, about 10 us */ };

/* ---- what the ops share ---------------------------------------------------------------------------------------------------------- */

typedef void (*row_fn)(const void *args, int32_t row);

typedef struct rows {
    row_fn row;
    const void *args;
    int32_t n_row, n_job_row;
} rows;

static void rows_job(void *context, int job, int thread) {
    const rows *r = context;
    const int32_t begin = job * r->n_job_row, rest = r->n_row - begin;
    (void)thread;
    for (int32_t t = begin; t < begin + (rest < r->n_job_row ? rest : r->n_job_row); t++)
        r->row(r->args, t);
}

/* row(args, t) for t = 0 .. n_row - 1; cost: element steps of one. */
static void rows_run(const bi_grad_ctx *ctx, row_fn row, const void *args, int32_t n_row, int64_t cost) {
    rows r = {row, args, n_row, cost < JOB_COST ? (int32_t)(JOB_COST / cost) : 1};
    br_pool_run(ctx->pool, rows_job, &r, (int)(((int64_t)n_row + r.n_job_row - 1) / r.n_job_row));
}

static double lane_sum(const double lane[LANES]) {
    double sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* ---- rmsnorm --------------------------------------------------------------------------------------------------------------------- */

/* y = x r w with r = (x.x / d + eps)^-1/2, so dx = r (w dy - x r^2 / d * sum of x w dy). */
static void rmsnorm_row(const void *args, int32_t t) {
    const bi_grad_norm_args *a = args;
    const bi_bf16 *x = a->x + (int64_t)t * a->x_ld;
    const float *w = a->w, *dy = a->dy + (int64_t)t * a->d;
    float *dx = a->dx + (int64_t)t * a->d;
    double xx[LANES] = {0}, xg[LANES] = {0};
    int32_t i = 0;
    for (; i + LANES <= a->d; i += LANES)
        for (int l = 0; l < LANES; l++) {
            const double v = bi_wide(x[i + l]);
            xx[l] += v * v;
            xg[l] += v * ((double)w[i + l] * (double)dy[i + l]);
        }
    for (int l = 0; i < a->d; i++, l++) {
        xx[l] += bi_wide(x[i]) * bi_wide(x[i]);
        xg[l] += bi_wide(x[i]) * ((double)w[i] * (double)dy[i]);
    }
    const double r = 1 / sqrt(lane_sum(xx) / a->d + (double)a->eps), along = r * r * r / a->d * lane_sum(xg);
    for (i = 0; i < a->d; i++)
        dx[i] = (float)(r * ((double)w[i] * (double)dy[i]) - along * bi_wide(x[i]));
}

br_status bi_grad_rmsnorm_host(bi_grad_ctx *ctx, const bi_grad_norm_args *a) {
    BR_TRY(bi_grad_check_rmsnorm(a));
    if (a->dx)
        rows_run(ctx, rmsnorm_row, a, a->n_row, 4 * (int64_t)a->d);
    return BR_OK;
}

/* ---- conv ------------------------------------------------------------------------------------------------------------------------ */

enum { CONV_KEPT = BI_CONV_TAPS - 1 };

/* dc of one row of a segment, for n channels: y = c s(c) with the sigmoid s, so dc = dy s (1 + c (1 - s)). */
static void conv_dc(const bi_grad_conv_args *a, const bi_seg *seg, int32_t t, int32_t chan, int32_t n, double w[BI_CONV_TAPS][CONV_TILE],
                    double *dc) {
    double c[CONV_TILE] = {0};
    for (int32_t tap = 0; tap < BI_CONV_TAPS; tap++) {
        const int32_t at = t - CONV_KEPT + tap;
        if (at < 0)
            continue;
        const bi_bf16 *x = a->x + (int64_t)(seg->row + at) * a->x_ld + chan;
        for (int32_t i = 0; i < n; i++)
            c[i] += w[tap][i] * bi_wide(x[i]);
    }
    const float *dy = a->dy + (int64_t)(seg->row + t) * a->n_chan + chan;
    for (int32_t i = 0; i < n; i++) {
        const double s = sigmoid(c[i]);
        dc[i] = (double)dy[i] * s * (1 + c[i] * (1 - s));
    }
}

/* From the last row to the first: dx of row t takes dc of rows t .. t + 3, which pass through a ring. */
static void conv_tile(const void *args, int32_t job) {
    const bi_grad_conv_args *a = args;
    const int32_t n_tile = (a->n_chan + CONV_TILE - 1) / CONV_TILE, chan = job % n_tile * CONV_TILE;
    const int32_t n = a->n_chan - chan < CONV_TILE ? a->n_chan - chan : CONV_TILE;
    const bi_seg *seg = &a->batch->seg[job / n_tile];
    double w[BI_CONV_TAPS][CONV_TILE], ring[BI_CONV_TAPS][CONV_TILE] = {{0}};
    for (int32_t i = 0; i < n; i++)
        for (int32_t tap = 0; tap < BI_CONV_TAPS; tap++)
            w[tap][i] = (double)a->w[(int64_t)(chan + i) * BI_CONV_TAPS + tap];
    for (int32_t t = seg->n_row - 1; t >= 0; t--) {
        double sum[CONV_TILE] = {0};
        float *dx = a->dx + (int64_t)(seg->row + t) * a->n_chan + chan;
        conv_dc(a, seg, t, chan, n, w, ring[t % BI_CONV_TAPS]);
        for (int32_t tap = 0; tap < BI_CONV_TAPS; tap++) {
            const double *dc = ring[(t + CONV_KEPT - tap) % BI_CONV_TAPS];
            for (int32_t i = 0; i < n; i++)
                sum[i] += w[tap][i] * dc[i];
        }
        for (int32_t i = 0; i < n; i++)
            dx[i] = (float)sum[i];
    }
}

br_status bi_grad_conv_host(bi_grad_ctx *ctx, const bi_grad_conv_args *a) {
    const bi_batch *batch = a->batch;
    int32_t end = 0;
    BR_TRY(bi_grad_check_conv(a));
    for (int32_t i = 0; i < batch->n_seg; i++) {
        if (batch->seg[i].n_row && batch->seg[i].pos)
            return br_fail(BR_E_ARG, "gradient of conv: segment %d begins at position %d: expected 0", i, batch->seg[i].pos);
        end += batch->seg[i].n_row;
    }
    if (batch->n_row == 0 || !a->dx)
        return BR_OK;
    const int32_t n_tile = (a->n_chan + CONV_TILE - 1) / CONV_TILE;
    if (batch->n_seg)
        rows_run(ctx, conv_tile, a, batch->n_seg * n_tile, 16 * (int64_t)batch->n_row * CONV_TILE / batch->n_seg + 1);
    memset(a->dx + (int64_t)end * a->n_chan, 0, sizeof(float) * (size_t)(batch->n_row - end) * (size_t)a->n_chan);
    return BR_OK;
}

/* ---- kda_gate -------------------------------------------------------------------------------------------------------------------- */

/* With rate = exp(a_log), y = f + bias: g = bound s(rate y), or -rate softplus(y), whose slope is -rate s(y); a = exp(g). */
static void gate_head(const bi_grad_kda_gate_args *a, int64_t at, int32_t h) {
    const double rate = exp((double)a->a_log[h]), bound = (double)a->lower_bound;
    for (int32_t i = 0; i < a->d; i++) {
        const double y = bi_wide(a->f[at + i]) + (double)a->dt_bias[(int64_t)h * a->d + i];
        double g, slope;
        if (a->bounded) {
            const double s = sigmoid(rate * y);
            g = bound * s;
            slope = bound * rate * s * sigmoid(-rate * y);
        } else {
            g = -rate * (y > 0 ? y + log1p(exp(-y)) : log1p(exp(y)));
            slope = -rate * sigmoid(y);
        }
        a->df[at + i] = (float)((double)a->da[at + i] * exp(g) * slope);
    }
}

static void gate_row(const void *args, int32_t t) {
    const bi_grad_kda_gate_args *a = args;
    for (int32_t h = 0; h < a->n_head; h++) {
        const int64_t at = (int64_t)t * a->n_head + h;
        if (a->df)
            gate_head(a, at * a->d, h);
        if (a->db) {
            const double b = bi_wide(a->b[at]);
            a->db[at] = (float)((double)a->dbeta[at] * sigmoid(b) * sigmoid(-b));
        }
    }
}

br_status bi_grad_kda_gate_host(bi_grad_ctx *ctx, const bi_grad_kda_gate_args *a) {
    BR_TRY(bi_grad_check_kda_gate(a));
    if (a->df || a->db)
        rows_run(ctx, gate_row, a, a->n_row, 16 * (int64_t)a->n_head * a->d);
    return BR_OK;
}

/* ---- kda_norm -------------------------------------------------------------------------------------------------------------------- */

/* y = o r w s(gate): of o as rmsnorm has it with s dy for dy. */
static void kda_norm_head(const bi_grad_kda_norm_args *a, int64_t at) {
    const float *o = a->o + at, *dy = a->dy + at, *w = a->w;
    double oo[LANES] = {0}, og[LANES] = {0};
    for (int32_t i = 0; i < a->d; i++) {
        const double v = (double)o[i];
        oo[i % LANES] += v * v;
        og[i % LANES] += v * ((double)w[i] * (double)dy[i] * sigmoid(bi_wide(a->gate[at + i])));
    }
    const double r = 1 / sqrt(lane_sum(oo) / a->d + (double)a->eps), along = r * r * r / a->d * lane_sum(og);
    for (int32_t i = 0; i < a->d; i++) {
        const double gate = bi_wide(a->gate[at + i]), s = sigmoid(gate), g = (double)w[i] * (double)dy[i];
        if (a->d_o)
            a->d_o[at + i] = (float)(r * g * s - along * (double)o[i]);
        if (a->dgate)
            a->dgate[at + i] = (float)(g * (double)o[i] * r * s * sigmoid(-gate));
    }
}

static void kda_norm_row(const void *args, int32_t t) {
    const bi_grad_kda_norm_args *a = args;
    for (int32_t h = 0; h < a->n_head; h++)
        kda_norm_head(a, ((int64_t)t * a->n_head + h) * a->d);
}

br_status bi_grad_kda_norm_host(bi_grad_ctx *ctx, const bi_grad_kda_norm_args *a) {
    BR_TRY(bi_grad_check_kda_norm(a));
    if (a->d_o || a->dgate)
        rows_run(ctx, kda_norm_row, a, a->n_row, 32 * (int64_t)a->n_head * a->d);
    return BR_OK;
}

/* ---- attnres --------------------------------------------------------------------------------------------------------------------- */

typedef struct res_row {
    const bi_bf16 *v;
    float *dv;             /* NULL: not wanted */
    double vw, r, dpi, pi; /* v.W, 1 / rms, dy.v, the weight */
} res_row;

static void res_sums(const bi_grad_attnres_args *a, const float *dy, res_row *row) {
    double vv[LANES] = {0}, vw[LANES] = {0}, vg[LANES] = {0};
    int32_t i = 0;
    for (; i + LANES <= a->d; i += LANES)
        for (int l = 0; l < LANES; l++) {
            const double v = bi_wide(row->v[i + l]);
            vv[l] += v * v;
            vw[l] += v * (double)a->w[i + l];
            vg[l] += v * (double)dy[i + l];
        }
    for (int l = 0; i < a->d; i++, l++) {
        const double v = bi_wide(row->v[i]);
        vv[l] += v * v;
        vw[l] += v * (double)a->w[i];
        vg[l] += v * (double)dy[i];
    }
    row->r = 1 / sqrt(lane_sum(vv) / a->d + (double)a->eps);
    row->vw = lane_sum(vw);
    row->dpi = lane_sum(vg);
}

/* pi = softmax of v.W r; returns the sum of pi dpi. */
static double res_softmax(res_row *row, int32_t n) {
    double max = row[0].vw * row[0].r, sum = 0, mean = 0;
    for (int32_t i = 1; i < n; i++)
        max = row[i].vw * row[i].r > max ? row[i].vw * row[i].r : max;
    for (int32_t i = 0; i < n; i++)
        sum += row[i].pi = exp(row[i].vw * row[i].r - max);
    for (int32_t i = 0; i < n; i++) {
        row[i].pi /= sum;
        mean += row[i].pi * row[i].dpi;
    }
    return mean;
}

/* s = v.W r: dv = pi dy + ds (r W - v.W r^3 / d v), ds = pi (dpi - mean). */
static void attnres_row(const void *args, int32_t t) {
    const bi_grad_attnres_args *a = args;
    const int64_t at = (int64_t)t * a->d;
    const float *dy = a->dy + at;
    const int32_t n = a->n_bank + 1;
    res_row row[BR_BANK_MAX + 1];
    for (int32_t i = 0; i < n; i++) {
        float *dv = i < a->n_bank ? (a->dbank ? a->dbank[i] : NULL) : a->dp;
        row[i].v = (i < a->n_bank ? a->bank[i] : a->p) + at;
        row[i].dv = dv ? dv + at : NULL;
        res_sums(a, dy, &row[i]);
    }
    const double mean = res_softmax(row, n);
    for (int32_t i = 0; i < n; i++) {
        const double pi = row[i].pi, along_w = pi * (row[i].dpi - mean) * row[i].r, along_v = along_w * row[i].vw * row[i].r * row[i].r / a->d;
        for (int32_t k = 0; k < a->d && row[i].dv; k++)
            row[i].dv[k] = (float)(pi * (double)dy[k] + along_w * (double)a->w[k] - along_v * bi_wide(row[i].v[k]));
    }
}

br_status bi_grad_attnres_host(bi_grad_ctx *ctx, const bi_grad_attnres_args *a) {
    BR_TRY(bi_grad_check_attnres(a));
    rows_run(ctx, attnres_row, a, a->n_row, 6 * (int64_t)a->d * (a->n_bank + 1));
    return BR_OK;
}
