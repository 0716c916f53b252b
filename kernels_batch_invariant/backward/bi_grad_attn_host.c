/* Gradients of attn and attn_gate, host form.      Contract: N-ATT without its roundings
 *
 * With [q | q_r] and [c | k_r] joined to q and c: s = alpha q . c, p = softmax(s), dp = dz . c over the values' part, delta = sum of
 * p dp, ds = p (dp - delta); dq = alpha sum over positions of ds c; dlatent = sum over queries and heads of alpha ds q + p dz.
 *
 * Two passes. The first has a job a query row: p and ds of its positions in rising order, dq, and what the second needs again: max
 * s, 1 / sum, delta of each head. The second has a job a tile of latent rows, which walks the queries that may see one of them, in
 * rising order, all heads of each, and computes s and dp anew. A tile of 16 latent rows is transposed, so that products with a
 * query run over the tile's rows and need no sum across lanes. */
#include "bi_grad_attn_check.h"
#include "bi_grad_host.h"

#include <math.h>
#include <string.h>

enum { TILE = 16 };

/* What the first pass leaves of a row and head. */
typedef struct head_stat {
    double top, inverse, delta;
} head_stat;

typedef struct attn_run {
    const bi_grad_ctx *ctx;
    const bi_grad_attn_args *a;
    head_stat *stat; /* (n_row, n_head) */
} attn_run;

/* What one job works in; a thread has one. */
typedef struct work {
    int32_t d_latent, ld; /* ld: places of s and dp a head, whole tiles */
    double *q, *dz;       /* (n_head, d_latent), (n_head, d_kv_latent) of one query */
    double *s, *dp;       /* (n_head, ld) */
    double *row, *column; /* (TILE, d_latent), (d_latent, TILE) latent rows */
    double *sum;          /* (n_head, d_latent) or (d_latent, TILE) */
} work;

static int32_t whole_tiles(int32_t n) {
    return (n + TILE - 1) / TILE * TILE;
}

static void carve(work *w, br_arena *arena, int32_t n_head, int32_t d_kv_latent, int32_t d_rope, int32_t n_place) {
    const size_t heads = (size_t)n_head, d = (size_t)d_kv_latent + (size_t)d_rope;
    w->d_latent = d_kv_latent + d_rope;
    w->ld = whole_tiles(n_place);
    w->q = BR_ARENA_ARRAY(arena, double, heads * d);
    w->dz = BR_ARENA_ARRAY(arena, double, heads * (size_t)d_kv_latent);
    w->s = BR_ARENA_ARRAY(arena, double, heads * (size_t)w->ld);
    w->dp = BR_ARENA_ARRAY(arena, double, heads * (size_t)w->ld);
    w->row = BR_ARENA_ARRAY(arena, double, d * TILE);
    w->column = BR_ARENA_ARRAY(arena, double, d * TILE);
    w->sum = BR_ARENA_ARRAY(arena, double, d * (heads > TILE ? heads : TILE));
}

bi_grad_scratch bi_grad_attn_host_scratch(const bi_limits *limits) {
    work w;
    br_arena thread = {0}, shared = {0};
    carve(&w, &thread, limits->n_head, limits->d_kv_latent, limits->d_rope, limits->n_pos);
    (void)BR_ARENA_ARRAY(&shared, head_stat, (size_t)limits->n_row * (size_t)limits->n_head);
    return (bi_grad_scratch){shared.used, thread.used};
}

static void widen_query(const bi_grad_attn_args *a, int32_t t, work *w) {
    const int32_t d = a->d_kv_latent;
    for (int32_t h = 0; h < a->n_head; h++) {
        const int64_t at = ((int64_t)t * a->n_head + h) * d;
        double *q = w->q + (size_t)h * (size_t)w->d_latent, *dz = w->dz + (size_t)h * (size_t)d;
        for (int32_t k = 0; k < d; k++) {
            q[k] = bi_wide(a->q[at + k]);
            dz[k] = (double)a->dz[at + k];
        }
        for (int32_t k = 0; k < a->d_rope; k++)
            q[d + k] = bi_wide(a->q_r[t * a->q_r_ld + h * a->q_r_head_ld + k]);
    }
}

/* Latent row `from` of the batch becomes row i of the tile; < 0: zeros. */
static void take_row(const bi_grad_attn_args *a, int64_t from, work *w, int i) {
    double *row = w->row + (size_t)i * (size_t)w->d_latent;
    const bi_bf16 *latent = a->latent + (from < 0 ? 0 : from) * a->latent_ld;
    for (int32_t k = 0; k < w->d_latent; k++)
        row[k] = from < 0 ? 0.0 : bi_wide(latent[k]);
}

static void transpose_tile(work *w) {
    for (int i = 0; i < TILE; i++)
        for (int32_t k = 0; k < w->d_latent; k++)
            w->column[(size_t)k * TILE + (size_t)i] = w->row[(size_t)i * (size_t)w->d_latent + (size_t)k];
}

/* out[i] = x . row i of the tile, its first n columns. */
static void tile_products(const double *restrict column, const double *restrict x, int32_t n, double *restrict out) {
    double acc[TILE] = {0};
    for (int32_t k = 0; k < n; k++)
        for (int i = 0; i < TILE; i++)
            acc[i] += x[k] * column[(size_t)k * TILE + (size_t)i];
    memcpy(out, acc, sizeof acc);
}

/* The positions first .. of the row's list, as many as fill a tile. */
static void take_tile(const bi_grad_attn_args *a, const bi_seg *seg, int32_t t, int32_t first, int32_t n, work *w) {
    const int32_t *select = a->select ? a->select + (int64_t)t * a->select_ld : NULL;
    for (int i = 0; i < TILE; i++) {
        const int32_t at = first + i;
        take_row(a, at < n ? (int64_t)seg->row + (select ? select[at] : at) : -1, w, i);
    }
}

/* s becomes p, dp becomes alpha ds. */
static head_stat softmax_back(double *restrict s, double *restrict dp, int32_t n, double alpha) {
    head_stat stat = {alpha * s[0], 0.0, 0.0};
    for (int32_t j = 1; j < n; j++)
        stat.top = alpha * s[j] > stat.top ? alpha * s[j] : stat.top;
    double sum = 0.0;
    for (int32_t j = 0; j < n; j++) {
        s[j] = exp(alpha * s[j] - stat.top);
        sum += s[j];
    }
    stat.inverse = 1.0 / sum;
    for (int32_t j = 0; j < n; j++) {
        s[j] *= stat.inverse;
        stat.delta += s[j] * dp[j];
    }
    for (int32_t j = 0; j < n; j++)
        dp[j] = alpha * (s[j] * (dp[j] - stat.delta));
    return stat;
}

/* sum += weight[i] * row i of the tile, four rows a step. */
static void add_rows(const work *w, const double *restrict weight, double *restrict sum) {
    const int32_t n = w->d_latent;
    for (int i = 0; i < TILE; i += 4) {
        const double *restrict r0 = w->row + (size_t)i * (size_t)n, *restrict r1 = r0 + n, *restrict r2 = r1 + n, *restrict r3 = r2 + n;
        for (int32_t k = 0; k < n; k++)
            sum[k] += (weight[i] * r0[k] + weight[i + 1] * r1[k]) + (weight[i + 2] * r2[k] + weight[i + 3] * r3[k]);
    }
}

static void write_query(const bi_grad_attn_args *a, int32_t t, const work *w) {
    const int32_t d = a->d_kv_latent, d_rope = a->d_rope;
    for (int32_t h = 0; h < a->n_head; h++) {
        const int64_t at = (int64_t)t * a->n_head + h;
        const double *sum = w ? w->sum + (size_t)h * (size_t)w->d_latent : NULL;
        for (int32_t k = 0; k < d && a->dq; k++)
            a->dq[at * d + k] = sum ? (float)sum[k] : 0.0f;
        for (int32_t k = 0; k < d_rope && a->dq_r; k++)
            a->dq_r[at * d_rope + k] = sum ? (float)sum[d + k] : 0.0f;
    }
}

static void row_job(void *context, int t, int thread) {
    const attn_run *run = context;
    const bi_grad_attn_args *a = run->a;
    if (a->batch->row_seg[t] < 0) {
        write_query(a, t, NULL);
        return;
    }
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    const int32_t n = a->select ? a->n_select[t] : t - seg->row + 1;
    work w;
    br_arena arena = bi_grad_thread_arena(run->ctx, thread);
    carve(&w, &arena, a->n_head, a->d_kv_latent, a->d_rope, n);
    const size_t ld = (size_t)w.ld, d = (size_t)a->d_kv_latent, d_latent = (size_t)w.d_latent;
    widen_query(a, t, &w);
    for (int32_t first = 0; first < n; first += TILE) {
        take_tile(a, seg, t, first, n, &w);
        transpose_tile(&w);
        for (size_t h = 0; h < (size_t)a->n_head; h++) {
            tile_products(w.column, w.q + h * d_latent, w.d_latent, w.s + h * ld + first);
            tile_products(w.column, w.dz + h * d, a->d_kv_latent, w.dp + h * ld + first);
        }
    }
    for (size_t h = 0; h < (size_t)a->n_head; h++)
        run->stat[(size_t)t * (size_t)a->n_head + h] = softmax_back(w.s + h * ld, w.dp + h * ld, n, (double)a->alpha);
    if (!a->dq && !a->dq_r)
        return;
    memset(w.sum, 0, sizeof *w.sum * (size_t)a->n_head * d_latent);
    for (int32_t first = 0; first < n; first += TILE) {
        take_tile(a, seg, t, first, n, &w);
        for (size_t h = 0; h < (size_t)a->n_head; h++)
            add_rows(&w, w.dp + h * ld + first, w.sum + h * d_latent);
    }
    write_query(a, t, &w);
}

/* Which of the latent rows row0 .. row0 + TILE - 1 query t reads; returns how many. */
static int find_members(const bi_grad_attn_args *a, int32_t t, int32_t row0, int in[TILE]) {
    const int32_t seg_index = a->batch->row_seg[t];
    int count = 0;
    memset(in, 0, sizeof(int) * TILE);
    if (seg_index < 0)
        return 0;
    const int32_t first = row0 - a->batch->seg[seg_index].row, own = t - a->batch->seg[seg_index].row; /* first < 0: an earlier segment's rows */
    if (!a->select) {
        for (int32_t i = first < 0 ? -first : 0; i < TILE && first + i <= own; i++, count++)
            in[i] = 1;
        return count;
    }
    const int32_t *list = a->select + (int64_t)t * a->select_ld;
    int32_t low = 0, high = a->n_select[t];
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (list[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < a->n_select[t] && list[low] < first + TILE; low++, count++)
        in[list[low] - first] = 1;
    return count;
}

/* column sums (n, TILE) += x[k] * weight[i] */
static void add_outer(double *restrict sum, const double *restrict x, const double weight[TILE], int32_t n) {
    for (int32_t k = 0; k < n; k++)
        for (int i = 0; i < TILE; i++)
            sum[(size_t)k * TILE + (size_t)i] += x[k] * weight[i];
}

/* One query's part of the tile's gradients. */
static void add_query(const attn_run *run, int32_t t, const int in[TILE], work *w) {
    const bi_grad_attn_args *a = run->a;
    const double alpha = (double)a->alpha;
    widen_query(a, t, w);
    for (int32_t h = 0; h < a->n_head; h++) {
        const head_stat *stat = &run->stat[(size_t)t * (size_t)a->n_head + (size_t)h];
        const double *q = w->q + (size_t)h * (size_t)w->d_latent, *dz = w->dz + (size_t)h * (size_t)a->d_kv_latent;
        double s[TILE], dp[TILE];
        tile_products(w->column, q, w->d_latent, s);
        tile_products(w->column, dz, a->d_kv_latent, dp);
        for (int i = 0; i < TILE; i++) {
            s[i] = in[i] ? exp(alpha * s[i] - stat->top) * stat->inverse : 0.0;
            dp[i] = in[i] ? alpha * (s[i] * (dp[i] - stat->delta)) : 0.0;
        }
        add_outer(w->sum, q, dp, w->d_latent);
        add_outer(w->sum, dz, s, a->d_kv_latent);
    }
}

static void latent_job(void *context, int tile, int thread) {
    const attn_run *run = context;
    const bi_grad_attn_args *a = run->a;
    const bi_batch *batch = a->batch;
    const int32_t row0 = tile * TILE, n = batch->n_row - row0 < TILE ? batch->n_row - row0 : TILE;
    work w;
    br_arena arena = bi_grad_thread_arena(run->ctx, thread);
    carve(&w, &arena, a->n_head, a->d_kv_latent, a->d_rope, 0);
    memset(w.sum, 0, sizeof *w.sum * (size_t)w.d_latent * TILE);
    int32_t end = row0; /* behind the last query of the tile's last segment */
    for (int i = 0; i < TILE; i++)
        take_row(a, i < n ? row0 + i : -1, &w, i);
    for (int32_t r = row0; r < row0 + n; r++)
        if (batch->row_seg[r] >= 0)
            end = batch->seg[batch->row_seg[r]].row + batch->seg[batch->row_seg[r]].n_row;
    transpose_tile(&w);
    for (int32_t t = row0; t < end; t++) {
        int in[TILE];
        if (find_members(a, t, row0, in))
            add_query(run, t, in, &w);
    }
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < w.d_latent; k++)
            a->dlatent[(int64_t)(row0 + i) * w.d_latent + k] = (float)w.sum[(size_t)k * TILE + (size_t)i];
}

static br_status check_row(const bi_grad_attn_args *a, int32_t t) {
    const int32_t seg = a->batch->row_seg[t];
    if (seg < 0)
        return BR_OK;
    const int32_t own = t - a->batch->seg[seg].row;
    if (seg >= a->batch->n_seg || a->batch->seg[seg].pos != 0 || own < 0 || own >= a->batch->seg[seg].n_row)
        return br_fail(BR_E_SHAPE, "gradient of attn: row %d: expected to lie in its segment, which begins at position 0", t);
    if (!a->select)
        return BR_OK;
    const int32_t n = a->n_select[t], *list = a->select + (int64_t)t * a->select_ld;
    if (n < 1 || n > a->select_ld || n > own + 1)
        return br_fail(BR_E_SHAPE, "gradient of attn: row %d at position %d selects %d: expected 1 to %d", t, own, n,
                       own + 1 < a->select_ld ? own + 1 : a->select_ld);
    for (int32_t i = 0; i < n; i++)
        if (list[i] < (i ? list[i - 1] + 1 : 0) || list[i] > own)
            return br_fail(BR_E_SHAPE, "gradient of attn: row %d at position %d selects %d: expected rising positions up to its own", t, own,
                           list[i]);
    return BR_OK;
}

static br_status check_attn(const bi_limits *limits, const bi_grad_attn_args *a) {
    const bi_batch *batch = a->batch;
    BR_TRY(bi_grad_check_attn(limits, a));
    for (int32_t i = 0; i < batch->n_seg; i++)
        if (batch->seg[i].n_row > limits->n_pos)
            return br_fail(BR_E_LIMIT, "gradient of attn: a segment of %d rows: expected at most %d", batch->seg[i].n_row, limits->n_pos);
    for (int32_t t = 0; t < batch->n_row; t++)
        BR_TRY(check_row(a, t));
    return BR_OK;
}

br_status bi_grad_attn_host(bi_grad_ctx *ctx, const bi_grad_attn_args *a) {
    BR_TRY(check_attn(&ctx->limits, a));
    br_arena shared = bi_grad_shared_arena(ctx);
    attn_run run = {ctx, a, BR_ARENA_ARRAY(&shared, head_stat, (size_t)a->batch->n_row * (size_t)a->n_head)};
    br_pool_run(ctx->pool, row_job, &run, a->batch->n_row);
    if (a->dlatent)
        br_pool_run(ctx->pool, latent_job, &run, (a->batch->n_row + TILE - 1) / TILE);
    return BR_OK;
}

static void gate_job(void *context, int t, int thread) {
    (void)thread;
    const bi_grad_attn_gate_args *a = context;
    const int64_t at = (int64_t)t * a->d;
    for (int64_t i = at; i < at + a->d; i++) {
        const double dy = (double)a->dy[i], gate = a->gate ? bi_wide(a->gate[i]) : 0.0;
        const double e = exp(-fabs(gate)), high = 1.0 / (1.0 + e), open = gate < 0.0 ? e * high : high;
        if (a->d_o)
            a->d_o[i] = a->gate ? (float)(dy * open) : a->dy[i];
        if (a->gate && a->dgate)
            a->dgate[i] = (float)(dy * (double)a->o[i] * (e * high * high));
    }
}

br_status bi_grad_attn_gate_host(bi_grad_ctx *ctx, const bi_grad_attn_gate_args *a) {
    BR_TRY(bi_grad_check_attn_gate(a));
    bi_grad_attn_gate_args args = *a;
    br_pool_run(ctx->pool, gate_job, &args, a->n_row);
    return BR_OK;
}
