/* Gradient of the delta rule in binary64.      Contract: N-KDA-2, N-KDA-4
 *
 * Layer: kernels_batch_invariant. A head of a segment belongs to one thread. With S the state before a token, [key][value column]:
 *   r = S^T (a k), u = beta (v - r), S' = a S + k u^T, o = S'^T q
 * and D = dL/dS' on the way back, from the last token to the first:
 *   D += q do^T;  du = D^T k;  dr = -beta du;  dv = beta du;  dbeta = du.(v - r)
 *   dq = a (S do) + k (u.do);  dk = D u + a (S dr);  da = D.S by rows + k (S dr);  D = a (D + k dr^T)
 * A first pass keeps the state before every chunk of about sqrt(rows) tokens; the second computes the states of a chunk again from it.
 * Nothing is divided by a, which may be zero. */
#include "bi_grad_host.h"
#include "bi_grad_kda_check.h"

#include <math.h>

enum { LANES = 4 };

/* One token's operands and what the way forward leaves for the way back. */
typedef struct token {
    double k[KDA_D_MAX], q[KDA_D_MAX], a[KDA_D_MAX];
    double d_o[KDA_D_MAX], u[KDA_D_MAX], v_r[KDA_D_MAX]; /* v_r: v - r */
    double beta, k_norm, q_norm;
} token;

typedef struct work {
    double *kept;  /* (chunk, d, d): the state before each chunk */
    double *state; /* (chunk + 1, d, d): before each token of a chunk, and after the last */
    double *slope; /* (d, d): D */
    token *token;  /* (chunk) */
} work;

static int32_t chunk_of(int32_t n_row) {
    int32_t chunk = 1;
    while (chunk * chunk < n_row)
        chunk++;
    return chunk;
}

static work lay_out(br_arena *arena, int32_t chunk, int32_t d) {
    const size_t square = (size_t)d * (size_t)d;
    work w;
    w.kept = BR_ARENA_ARRAY(arena, double, square * (size_t)chunk);
    w.state = BR_ARENA_ARRAY(arena, double, square * (size_t)(chunk + 1));
    w.slope = BR_ARENA_ARRAY(arena, double, square);
    w.token = BR_ARENA_ARRAY(arena, token, chunk);
    return w;
}

bi_grad_scratch bi_grad_kda_host_scratch(const bi_limits *limits) {
    br_arena arena = {0};
    if (limits->kda_n_head > 0)
        lay_out(&arena, chunk_of(limits->n_row), limits->kda_d_head);
    return (bi_grad_scratch){0, arena.used};
}

/* x over its norm; returns the norm. */
static double normalise(const bi_bf16 *x, int32_t d, double *out) {
    double sum = 0;
    for (int32_t i = 0; i < d; i++)
        sum += bi_wide(x[i]) * bi_wide(x[i]);
    const double norm = sqrt(sum + (double)BI_KDA_L2_EPS);
    for (int32_t i = 0; i < d; i++)
        out[i] = bi_wide(x[i]) / norm;
    return norm;
}

/* q without its scale, which goes to do: o = (scale S'^T) (x / norm). */
static void load(const bi_grad_kda_args *a, int32_t row, int32_t head, token *t) {
    const int64_t at = (int64_t)row * a->ld + (int64_t)head * a->d, dense = ((int64_t)row * a->n_head + head) * a->d;
    t->k_norm = normalise(a->k + at, a->d, t->k);
    t->q_norm = normalise(a->q + at, a->d, t->q);
    t->beta = (double)a->beta[(int64_t)row * a->n_head + head];
    for (int32_t i = 0; i < a->d; i++) {
        t->a[i] = (double)a->a[dense + i];
        t->d_o[i] = (double)a->scale * (double)a->d_o[dense + i];
        t->v_r[i] = bi_wide(a->v[at + i]);
    }
}

/* next = the state behind the token, from s before it; v_r holds v and becomes v - r. next may be s. */
static void forward(const double *s, token *t, int32_t d, double *next) {
    for (int32_t key = 0; key < d; key++) {
        const double decay = t->a[key], k = t->k[key];
        const double *from = s + (size_t)key * (size_t)d;
        double *to = next + (size_t)key * (size_t)d;
        for (int32_t c = 0; c < d; c++) {
            const double decayed = decay * from[c];
            to[c] = decayed;
            t->v_r[c] -= decayed * k;
        }
    }
    for (int32_t c = 0; c < d; c++)
        t->u[c] = t->beta * t->v_r[c];
    for (int32_t key = 0; key < d; key++) {
        const double k = t->k[key];
        double *to = next + (size_t)key * (size_t)d;
        for (int32_t c = 0; c < d; c++)
            to[c] += k * t->u[c];
    }
}

static double lane_sum(const double lane[LANES]) {
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

/* Gradients of one key of the token: of q and k as they came out of the norm. `row` of D becomes that of the token before. */
static void backward_key(const double *restrict s, const token *t, const double *restrict dr, int32_t key, int32_t d, double u_do,
                         double *restrict row, double out[3]) {
    double s_do[LANES] = {0}, s_dr[LANES] = {0}, d_u[LANES] = {0}, d_s[LANES] = {0};
    const double decay = t->a[key], k = t->k[key];
    for (int32_t c = 0; c < d; c += LANES)
        for (int l = 0; l < LANES; l++) {
            s_do[l] += s[c + l] * t->d_o[c + l];
            s_dr[l] += s[c + l] * dr[c + l];
            d_u[l] += row[c + l] * t->u[c + l];
            d_s[l] += row[c + l] * s[c + l];
            row[c + l] = decay * (row[c + l] + k * dr[c + l]);
        }
    out[0] = decay * lane_sum(s_do) + k * u_do;
    out[1] = lane_sum(d_u) + decay * lane_sum(s_dr);
    out[2] = lane_sum(d_s) + k * lane_sum(s_dr);
}

/* Through x / norm: (g - n (n.g)) / norm, n the normalised row. */
static void through_norm(const double *n, const double *g, double norm, int32_t d, float *out) {
    double along = 0;
    for (int32_t i = 0; i < d; i++)
        along += n[i] * g[i];
    for (int32_t i = 0; i < d; i++)
        out[i] = (float)((g[i] - n[i] * along) / norm);
}

/* s: the state before the token; slope: D behind it comes in, D before it goes out. */
static void backward(const bi_grad_kda_args *a, int32_t row, int32_t head, const double *s, const token *t, double *slope) {
    const int64_t dense = ((int64_t)row * a->n_head + head) * a->d;
    const int32_t d = a->d;
    double dr[KDA_D_MAX] = {0}, dq[KDA_D_MAX], dk[KDA_D_MAX], u_do = 0, dbeta = 0; /* dr holds du first */
    for (int32_t key = 0; key < d; key++) {
        double *line = slope + (size_t)key * (size_t)d;
        for (int32_t c = 0; c < d; c++) {
            line[c] += t->q[key] * t->d_o[c];
            dr[c] += line[c] * t->k[key];
        }
    }
    for (int32_t c = 0; c < d; c++) {
        dbeta += dr[c] * t->v_r[c];
        u_do += t->u[c] * t->d_o[c];
        dr[c] *= -t->beta;
        a->dv[dense + c] = (float)-dr[c];
    }
    a->dbeta[(int64_t)row * a->n_head + head] = (float)dbeta;
    for (int32_t key = 0; key < d; key++) {
        double out[3];
        const size_t line = (size_t)key * (size_t)d;
        backward_key(s + line, t, dr, key, d, u_do, slope + line, out);
        dq[key] = out[0];
        dk[key] = out[1];
        a->da[dense + key] = (float)out[2];
    }
    through_norm(t->q, dq, t->q_norm, d, a->dq + dense);
    through_norm(t->k, dk, t->k_norm, d, a->dk + dense);
}

static void chunk_back(const bi_grad_kda_args *a, const bi_seg *seg, int32_t head, int32_t begin, int32_t n, const work *w) {
    const size_t square = (size_t)a->d * (size_t)a->d;
    for (int32_t t = 0; t < n; t++) {
        load(a, seg->row + begin + t, head, &w->token[t]);
        forward(w->state + square * (size_t)t, &w->token[t], a->d, w->state + square * (size_t)(t + 1));
    }
    for (int32_t t = n - 1; t >= 0; t--)
        backward(a, seg->row + begin + t, head, w->state + square * (size_t)t, &w->token[t], w->slope);
}

typedef struct call {
    bi_grad_ctx *ctx;
    const bi_grad_kda_args *args;
} call;

static void head_job(void *context, int job, int thread) {
    const call *c = context;
    const bi_grad_kda_args *a = c->args;
    const bi_seg *seg = &a->batch->seg[job / a->n_head];
    const int32_t head = job % a->n_head, n = seg->n_row, chunk = chunk_of(n);
    const size_t square = (size_t)a->d * (size_t)a->d, bytes = sizeof(double) * square;
    if (n == 0)
        return;
    br_arena arena = bi_grad_thread_arena(c->ctx, thread);
    const work w = lay_out(&arena, chunk, a->d);
    const int32_t last = (n - 1) / chunk;
    memset(w.state, 0, bytes);
    memset(w.slope, 0, bytes);
    for (int32_t t = 0; t < last * chunk; t++) {
        if (t % chunk == 0)
            memcpy(w.kept + square * (size_t)(t / chunk), w.state, bytes);
        load(a, seg->row + t, head, w.token);
        forward(w.state, w.token, a->d, w.state);
    }
    memcpy(w.kept + square * (size_t)last, w.state, bytes);
    for (int32_t i = last; i >= 0; i--) {
        memcpy(w.state, w.kept + square * (size_t)i, bytes);
        chunk_back(a, seg, head, i * chunk, i == last ? n - i * chunk : chunk, &w);
    }
}

static void zero_rows(const bi_grad_kda_args *a, int32_t begin) {
    const size_t width = (size_t)a->n_head * (size_t)a->d, n = (size_t)(a->batch->n_row - begin);
    float *const wide[] = {a->dq, a->dk, a->dv, a->da};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++)
        memset(wide[i] + width * (size_t)begin, 0, sizeof(float) * width * n);
    memset(a->dbeta + (size_t)a->n_head * (size_t)begin, 0, sizeof(float) * (size_t)a->n_head * n);
}

static br_status check(const bi_limits *limits, const bi_grad_kda_args *a) {
    const bi_batch *batch = a->batch;
    BR_TRY(bi_grad_check_kda(limits, a));
    for (int32_t i = 0; i < batch->n_seg; i++)
        if (batch->seg[i].n_row && batch->seg[i].pos)
            return br_fail(BR_E_ARG, "gradient of kda: segment %d begins at position %d: expected 0", i, batch->seg[i].pos);
    return BR_OK;
}

br_status bi_grad_kda_host(bi_grad_ctx *ctx, const bi_grad_kda_args *a) {
    call c = {ctx, a};
    int32_t end = 0;
    BR_TRY(check(&ctx->limits, a));
    if (a->batch->n_row == 0)
        return BR_OK;
    for (int32_t i = 0; i < a->batch->n_seg; i++)
        end += a->batch->seg[i].n_row;
    if (a->batch->n_seg)
        br_pool_run(ctx->pool, head_job, &c, a->batch->n_seg * a->n_head);
    zero_rows(a, end);
    return BR_OK;
}
