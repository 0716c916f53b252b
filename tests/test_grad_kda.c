/* Gradients of Kimi Delta Attention and of the row ops around it: the host form against central differences of float64 forwards, written
 * down from the contract without its roundings. */
#include "bi_grad.h"
#include "br_mem.h"
#include "grad_check.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

enum { BYTES = 8 << 20, OUT_MAX = 8, GAP = 5 };

static br_arena memory;
static op_random rnd;

/* What a case gave to its op: every output, so that other thread counts can be held against it. */
typedef struct result {
    float *at[OUT_MAX];
    size_t n[OUT_MAX];
    int n_out;
} result;
static result outs;

static const bi_limits limits = {.n_row = 64, .d_in = 256, .d_out = 256, .rank = 16, .n_slot = 2, .n_head = 2, .d_kv_latent = 64, .d_rope = 16,
                                 .index_n_head = 4, .index_d_head = 32, .n_pos = 64, .n_expert = 8, .n_expert_topk = 2, .d_expert = 64,
                                 .d_expert_ff = 64, .kda_n_head = 3, .kda_d_head = 64, .n_vocab = 512, .d_model = 256};

static void setup(void) {
    CHECK_OK(br_mem_alloc((void **)&memory.base, BYTES, "a test"));
    memory.used = 0;
    memory.size = BYTES;
    rnd = (op_random){test_seed(), 0};
}

static void teardown(void) {
    br_mem_free(memory.base);
}

#define ARRAY(type, count) BR_ARENA_ARRAY(&memory, type, count)

static void begin_case(void) {
    memory.used = 0;
    outs.n_out = 0;
}

/* Poisoned: every element must be written. */
static float *output(int64_t n) {
    float *x = ARRAY(float, n);
    memset(x, 0xff, sizeof *x * (size_t)n);
    outs.at[outs.n_out] = x;
    outs.n[outs.n_out++] = (size_t)n;
    return x;
}

static float *floats(int n, float scale, float shift) {
    float *x = ARRAY(float, n);
    op_random_normals(&rnd, scale, x, n);
    for (int i = 0; i < n; i++)
        x[i] += shift;
    return x;
}

static double *doubles(const float *x, int n) {
    double *out = ARRAY(double, n);
    grad_doubles(x, n, out);
    return out;
}

/* n_row rows of n numbers, ld apart, and the same as dense binary64. */
static bi_bf16 *numbers(int n_row, int n, int ld, float scale, double **dense) {
    bi_bf16 *x = ARRAY(bi_bf16, (int64_t)n_row * ld);
    *dense = ARRAY(double, (int64_t)n_row * n);
    op_random_bf16s(&rnd, scale, x, n_row * ld);
    for (int t = 0; t < n_row; t++)
        grad_widen(x + (int64_t)t * ld, n, *dense + (int64_t)t * n);
    return x;
}

/* The op with 1 thread, then with others: the same bytes; the outputs are those of the last. */
typedef br_status (*op_call)(const bi_grad *grad, const void *args);

static void run(op_call call, const void *args) {
    static const int threads[] = {1, 2, 5};
    float *first[OUT_MAX];
    for (int i = 0; i < 3; i++) {
        br_pool *pool;
        bi_grad grad;
        CHECK_OK(br_pool_open(threads[i], &pool));
        CHECK_OK(bi_grad_host_open(&limits, pool, &grad));
        for (int k = 0; k < outs.n_out && i == 0; k++)
            first[k] = ARRAY(float, outs.n[k]);
        for (int k = 0; k < outs.n_out && i > 0; k++) {
            if (i == 1)
                memcpy(first[k], outs.at[k], sizeof(float) * outs.n[k]);
            memset(outs.at[k], 0xff, sizeof(float) * outs.n[k]);
        }
        CHECK_OK(call(&grad, args));
        for (int k = 0; k < outs.n_out && i > 0; k++)
            ck_assert_msg(memcmp(first[k], outs.at[k], sizeof(float) * outs.n[k]) == 0, "output %d of %d threads differs", k, threads[i]);
        bi_grad_close(&grad);
        br_pool_close(pool);
    }
    for (int k = 0; k < outs.n_out; k++)
        for (size_t i = 0; i < outs.n[k]; i++)
            ck_assert_msg(isfinite(outs.at[k][i]), "element %zu of output %d was not written", i, k);
}

#define CALL(name, type)                                                  \
    static br_status call_##name(const bi_grad *grad, const void *args) { \
        return grad->op->name(grad->ctx, (const type *)args);             \
    }
CALL(rmsnorm, bi_grad_norm_args)
CALL(conv, bi_grad_conv_args)
CALL(kda_gate, bi_grad_kda_gate_args)
CALL(kda, bi_grad_kda_args)
CALL(kda_norm, bi_grad_kda_norm_args)
CALL(attnres, bi_grad_attnres_args)

/* Segments of given lengths, then rows of none. */
static bi_batch batch_of(const int *length, int n_seg, int n_pad) {
    bi_seg *seg = ARRAY(bi_seg, n_seg);
    bi_batch batch = {.n_seg = n_seg, .seg = seg};
    for (int i = 0; i < n_seg; i++) {
        seg[i] = (bi_seg){i, batch.n_row, length[i], 0};
        batch.n_row += length[i];
        batch.seg_row_max = length[i] > batch.seg_row_max ? length[i] : batch.seg_row_max;
    }
    int32_t *row_seg = ARRAY(int32_t, batch.n_row + n_pad);
    for (int i = 0; i < n_seg; i++)
        for (int t = 0; t < length[i]; t++)
            row_seg[seg[i].row + t] = i;
    for (int t = 0; t < n_pad; t++)
        row_seg[batch.n_row + t] = -1;
    batch.n_row += n_pad;
    batch.pos_max = batch.seg_row_max - 1;
    batch.row_seg = row_seg;
    return batch;
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* ---- rmsnorm --------------------------------------------------------------------------------------------------------------------- */

typedef struct row_loss {
    int n_row, d;
    double *x, *w, *dy, eps;
} row_loss;

static double rmsnorm_loss(void *context) {
    const row_loss *c = context;
    double loss = 0;
    for (int t = 0; t < c->n_row; t++) {
        const double *x = c->x + t * c->d;
        double sum = 0;
        for (int i = 0; i < c->d; i++)
            sum += x[i] * x[i];
        for (int i = 0; i < c->d; i++)
            loss += c->dy[t * c->d + i] * x[i] / sqrt(sum / c->d + c->eps) * c->w[i];
    }
    return loss;
}

START_TEST(rmsnorm) {
    static const int shape[][3] = {{1, 1, 1}, {3, 7, 0}, {5, 64, GAP}, {2, 130, 1}}; /* rows, width, gap */
    for (int i = 0; i < 4; i++) {
        begin_case();
        const int n_row = shape[i][0], d = shape[i][1], ld = d + shape[i][2];
        row_loss c = {.n_row = n_row, .d = d, .eps = (double)1e-2f};
        const bi_bf16 *x = numbers(n_row, d, ld, 1.0f, &c.x);
        const float *w = floats(d, 0.5f, 1.0f), *dy = floats(n_row * d, 1.0f, 0.0f);
        c.w = doubles(w, d);
        c.dy = doubles(dy, n_row * d);
        bi_grad_norm_args args = {n_row, d, x, ld, w, 1e-2f, dy, output(n_row * d)};
        run(call_rmsnorm, &args);
        grad_check("rmsnorm dx", rmsnorm_loss, &c, c.x, n_row * d, args.dx, 0);
    }
}
END_TEST

/* ---- conv ------------------------------------------------------------------------------------------------------------------------ */

typedef struct conv_loss {
    const bi_batch *batch;
    int n_chan;
    double *x, *w, *dy;
} conv_loss;

static double conv_sum(void *context) {
    const conv_loss *c = context;
    double loss = 0;
    for (int s = 0; s < c->batch->n_seg; s++)
        for (int t = 0; t < c->batch->seg[s].n_row; t++)
            for (int i = 0; i < c->n_chan; i++) {
                const int row = c->batch->seg[s].row + t;
                double sum = 0;
                for (int tap = 0; tap < 4; tap++)
                    if (t - 3 + tap >= 0)
                        sum += c->w[i * 4 + tap] * c->x[(row - 3 + tap) * c->n_chan + i];
                loss += c->dy[row * c->n_chan + i] * sum * sigmoid(sum);
            }
    return loss;
}

static void try_conv(const int *length, int n_seg, int n_pad, int n_chan, int gap, int n_probe) {
    begin_case();
    const bi_batch batch = batch_of(length, n_seg, n_pad);
    conv_loss c = {.batch = &batch, .n_chan = n_chan};
    const bi_bf16 *x = numbers(batch.n_row, n_chan, n_chan + gap, 1.0f, &c.x);
    const float *w = floats(n_chan * 4, 1.0f, 0.0f), *dy = floats(batch.n_row * n_chan, 1.0f, 0.0f);
    c.w = doubles(w, n_chan * 4);
    c.dy = doubles(dy, batch.n_row * n_chan);
    bi_grad_conv_args args = {&batch, n_chan, x, n_chan + gap, w, dy, output((int64_t)batch.n_row * n_chan)};
    run(call_conv, &args);
    grad_check("conv dx", conv_sum, &c, c.x, batch.n_row * n_chan, args.dx, n_probe);
}

START_TEST(conv) {
    static const int one[] = {1}, some[] = {5, 1, 3, 0, 4, 2}, none[] = {2, 0};
    try_conv(one, 1, 0, 1, 0, 0);
    try_conv(some, 6, 2, 3, GAP, 0);
    try_conv(some, 5, 0, 130, 0, 97);
    try_conv(none, 2, 1, 7, 1, 0);
}
END_TEST

/* ---- kda_gate -------------------------------------------------------------------------------------------------------------------- */

typedef struct gate_loss {
    int n_row, n_head, d, bounded;
    double lower_bound, *f, *b, *a_log, *dt_bias, *da, *dbeta;
} gate_loss;

static double gate_sum(void *context) {
    const gate_loss *c = context;
    double loss = 0;
    for (int t = 0; t < c->n_row; t++)
        for (int h = 0; h < c->n_head; h++) {
            for (int i = 0; i < c->d; i++) {
                const int at = (t * c->n_head + h) * c->d + i;
                const double y = c->f[at] + c->dt_bias[h * c->d + i], rate = exp(c->a_log[h]);
                const double g = c->bounded ? c->lower_bound * sigmoid(rate * y) : -rate * log(1 + exp(y));
                loss += c->da[at] * exp(g);
            }
            loss += c->dbeta[t * c->n_head + h] * sigmoid(c->b[t * c->n_head + h]);
        }
    return loss;
}

START_TEST(kda_gate) {
    static const int shape[][3] = {{1, 1, 1}, {3, 2, 32}, {2, 3, 7}};
    for (int i = 0; i < 6; i++) {
        begin_case();
        const int n_row = shape[i / 2][0], n_head = shape[i / 2][1], d = shape[i / 2][2], width = n_head * d;
        gate_loss c = {.n_row = n_row, .n_head = n_head, .d = d, .bounded = i % 2, .lower_bound = -5.0};
        const bi_bf16 *f = numbers(n_row, width, width, 2.0f, &c.f), *b = numbers(n_row, n_head, n_head, 1.0f, &c.b);
        const float *a_log = floats(n_head, 0.5f, 0.0f), *bias = floats(width, 1.0f, 0.0f);
        const float *da = floats(n_row * width, 1.0f, 0.0f), *dbeta = floats(n_row * n_head, 1.0f, 0.0f);
        c.a_log = doubles(a_log, n_head);
        c.dt_bias = doubles(bias, width);
        c.da = doubles(da, n_row * width);
        c.dbeta = doubles(dbeta, n_row * n_head);
        bi_grad_kda_gate_args args = {n_row, n_head, d, f, b, a_log, bias, i % 2, -5.0f, da, dbeta, output(n_row * width), output(n_row * n_head)};
        run(call_kda_gate, &args);
        grad_check("kda_gate df", gate_sum, &c, c.f, n_row * width, args.df, 0);
        grad_check("kda_gate db", gate_sum, &c, c.b, n_row * n_head, args.db, 0);
    }
}
END_TEST

/* ---- kda ------------------------------------------------------------------------------------------------------------------------- */

enum { D_MAX = 64 };

typedef struct kda_loss {
    const bi_batch *batch;
    int n_head, d;
    double scale, *q, *k, *v, *a, *beta, *d_o;
} kda_loss;

static double norm_of(const double *x, int d) {
    double sum = 0;
    for (int i = 0; i < d; i++)
        sum += x[i] * x[i];
    return sqrt(sum + (double)1e-6f);
}

/* One token of one head at `at`; what its outputs add to the loss. */
static double kda_token(const kda_loss *c, int64_t at, double beta, double s[D_MAX][D_MAX]) {
    const double *q = c->q + at, *k = c->k + at, *v = c->v + at, *a = c->a + at, q_norm = norm_of(q, c->d), k_norm = norm_of(k, c->d);
    double loss = 0;
    for (int col = 0; col < c->d; col++) {
        double r = 0, o = 0;
        for (int key = 0; key < c->d; key++)
            r += s[key][col] * (a[key] * (k[key] / k_norm));
        const double u = beta * (v[col] - r);
        for (int key = 0; key < c->d; key++) {
            s[key][col] = k[key] / k_norm * u + a[key] * s[key][col];
            o += s[key][col] * (q[key] / q_norm * c->scale);
        }
        loss += c->d_o[at + col] * o;
    }
    return loss;
}

static double kda_sum(void *context) {
    static double s[D_MAX][D_MAX];
    const kda_loss *c = context;
    double loss = 0;
    for (int i = 0; i < c->batch->n_seg; i++)
        for (int h = 0; h < c->n_head; h++) {
            memset(s, 0, sizeof s);
            for (int t = 0; t < c->batch->seg[i].n_row; t++) {
                const int64_t at = (int64_t)(c->batch->seg[i].row + t) * c->n_head + h;
                loss += kda_token(c, at * c->d, c->beta[at], s);
            }
        }
    return loss;
}

/* Decays between 0.2 and 1, some of them 0 and 1. */
static float *decays(int n) {
    float *a = ARRAY(float, n);
    for (int i = 0; i < n; i++) {
        const int pick = op_random_below(&rnd, 1000);
        a[i] = pick < 30 ? 0.0f : pick < 60 ? 1.0f : 0.2f + 0.0008f * (float)pick;
    }
    return a;
}

static void try_kda(const int *length, int n_seg, int n_pad, int n_head, int d, int gap, int n_probe) {
    begin_case();
    const bi_batch batch = batch_of(length, n_seg, n_pad);
    const int width = n_head * d, ld = width + gap, n = batch.n_row * width, n_beta = batch.n_row * n_head;
    kda_loss c = {.batch = &batch, .n_head = n_head, .d = d, .scale = (double)bi_const_kda_scale(d)};
    const bi_bf16 *q = numbers(batch.n_row, width, ld, 1.0f, &c.q), *k = numbers(batch.n_row, width, ld, 1.0f, &c.k);
    const bi_bf16 *v = numbers(batch.n_row, width, ld, 1.0f, &c.v);
    const float *a = decays(n), *beta = floats(n_beta, 0.15f, 0.5f), *d_o = floats(n, 1.0f, 0.0f);
    c.a = doubles(a, n);
    c.beta = doubles(beta, n_beta);
    c.d_o = doubles(d_o, n);
    bi_grad_kda_args args = {&batch, n_head, d, q, k, v, ld, a, beta, bi_const_kda_scale(d), d_o, output(n), output(n), output(n), output(n),
                             output(n_beta)};
    run(call_kda, &args);
    grad_check("kda dq", kda_sum, &c, c.q, n, args.dq, n_probe);
    grad_check("kda dk", kda_sum, &c, c.k, n, args.dk, n_probe);
    grad_check("kda dv", kda_sum, &c, c.v, n, args.dv, n_probe);
    grad_check("kda dbeta", kda_sum, &c, c.beta, n_beta, args.dbeta, n_probe);
    if (batch.seg_row_max > 1) /* the first token's decay meets an empty state */
        grad_check("kda da", kda_sum, &c, c.a, n, args.da, n_probe);
}

START_TEST(kda) {
    static const int one[] = {1}, two[] = {2}, some[] = {5, 1, 0, 3}, nine[] = {9}, longer[] = {26, 1, 11};
    try_kda(one, 1, 0, 1, 32, 0, 0);
    try_kda(two, 1, 0, 2, 32, GAP, 0);
    try_kda(some, 4, 2, 2, 32, 1, 101);
    try_kda(nine, 1, 0, 1, 64, 0, 83);
    try_kda(longer, 3, 0, 3, 32, 0, 31);
}
END_TEST

/* ---- kda_norm -------------------------------------------------------------------------------------------------------------------- */

typedef struct gated_loss {
    int n, d; /* heads of all rows */
    double *o, *w, *gate, *dy, eps;
} gated_loss;

static double kda_norm_sum(void *context) {
    const gated_loss *c = context;
    double loss = 0;
    for (int h = 0; h < c->n; h++) {
        const double *o = c->o + h * c->d;
        double sum = 0;
        for (int i = 0; i < c->d; i++)
            sum += o[i] * o[i];
        for (int i = 0; i < c->d; i++)
            loss += c->dy[h * c->d + i] * o[i] / sqrt(sum / c->d + c->eps) * c->w[i] * sigmoid(c->gate[h * c->d + i]);
    }
    return loss;
}

START_TEST(kda_norm) {
    static const int shape[][3] = {{1, 1, 1}, {3, 2, 32}, {2, 3, 7}};
    for (int i = 0; i < 3; i++) {
        begin_case();
        const int n_row = shape[i][0], n_head = shape[i][1], d = shape[i][2], n = n_row * n_head * d;
        gated_loss c = {.n = n_row * n_head, .d = d, .eps = (double)1e-2f};
        const float *o = floats(n, 1.0f, 0.0f), *w = floats(d, 0.5f, 1.0f), *dy = floats(n, 1.0f, 0.0f);
        const bi_bf16 *gate = numbers(n_row, n_head * d, n_head * d, 1.5f, &c.gate);
        c.o = doubles(o, n);
        c.w = doubles(w, d);
        c.dy = doubles(dy, n);
        bi_grad_kda_norm_args args = {n_row, n_head, d, o, w, gate, 1e-2f, dy, output(n), output(n)};
        run(call_kda_norm, &args);
        grad_check("kda_norm do", kda_norm_sum, &c, c.o, n, args.d_o, 0);
        grad_check("kda_norm dgate", kda_norm_sum, &c, c.gate, n, args.dgate, 0);
    }
}
END_TEST

/* ---- attnres --------------------------------------------------------------------------------------------------------------------- */

typedef struct res_loss {
    int n_row, d, n; /* n: the bank and p */
    double *v[BR_BANK_MAX + 1], *w, *dy, eps;
} res_loss;

static double attnres_sum(void *context) {
    const res_loss *c = context;
    double loss = 0;
    for (int t = 0; t < c->n_row; t++) {
        double e[BR_BANK_MAX + 1], total = 0;
        for (int r = 0; r < c->n; r++) {
            const double *v = c->v[r] + t * c->d;
            double vv = 0, vw = 0;
            for (int i = 0; i < c->d; i++) {
                vv += v[i] * v[i];
                vw += v[i] * c->w[i];
            }
            total += e[r] = exp(vw / sqrt(vv / c->d + c->eps));
        }
        for (int r = 0; r < c->n; r++)
            for (int i = 0; i < c->d; i++)
                loss += c->dy[t * c->d + i] * e[r] / total * c->v[r][t * c->d + i];
    }
    return loss;
}

START_TEST(attnres) {
    static const int shape[][3] = {{1, 1, 1}, {3, 20, 2}, {2, 67, 4}}; /* rows, width, bank */
    for (int i = 0; i < 3; i++) {
        begin_case();
        const int n_row = shape[i][0], d = shape[i][1], n_bank = shape[i][2];
        const bi_bf16 *v[BR_BANK_MAX + 1];
        float *dv[BR_BANK_MAX + 1];
        res_loss c = {.n_row = n_row, .d = d, .n = n_bank + 1, .eps = (double)1e-2f};
        for (int r = 0; r <= n_bank; r++) {
            v[r] = numbers(n_row, d, d, 1.0f, &c.v[r]);
            dv[r] = r == 1 && n_bank > 2 ? NULL : output(n_row * d); /* one of the largest case is not wanted */
        }
        const float *w = floats(d, 0.3f, 0.0f), *dy = floats(n_row * d, 1.0f, 0.0f);
        c.w = doubles(w, d);
        c.dy = doubles(dy, n_row * d);
        bi_grad_attnres_args args = {n_row, d, n_bank, v, v[n_bank], w, 1e-2f, dy, dv, dv[n_bank]};
        run(call_attnres, &args);
        for (int r = 0; r <= n_bank; r++)
            if (dv[r])
                grad_check("attnres dv", attnres_sum, &c, c.v[r], n_row * d, dv[r], 0);
    }
}
END_TEST

/* ---- errors ---------------------------------------------------------------------------------------------------------------------- */

START_TEST(refuses_wrong_shapes) {
    br_pool *pool;
    bi_grad g;
    CHECK_OK(br_pool_open(1, &pool));
    CHECK_OK(bi_grad_host_open(&limits, pool, &g));
    begin_case();
    const bi_bf16 *x = ARRAY(bi_bf16, 64 * 256);
    const float *f = ARRAY(float, 64 * 256);
    float *y = output(64 * 256);
    bi_seg late = {0, 0, 2, 1}, good = {0, 0, 2, 0};
    bi_batch from_one = {.n_row = 2, .n_seg = 1, .seg = &late}, batch = {.n_row = 2, .n_seg = 1, .seg = &good};
    bi_batch many = {.n_row = 65, .n_seg = 1, .seg = &good};
#define NORM(n, d, ld) &(bi_grad_norm_args){n, d, x, ld, f, 1e-5f, f, y}
    CHECK_FAILS(g.op->rmsnorm(g.ctx, NORM(-1, 8, 8)), BR_E_SHAPE);
    CHECK_FAILS(g.op->rmsnorm(g.ctx, NORM(1, 0, 8)), BR_E_SHAPE);
    CHECK_FAILS(g.op->rmsnorm(g.ctx, NORM(1, 8, 7)), BR_E_SHAPE);
#define CONV(batch, n, ld) &(bi_grad_conv_args){batch, n, x, ld, f, f, y}
    CHECK_FAILS(g.op->conv(g.ctx, CONV(&batch, 0, 8)), BR_E_SHAPE);
    CHECK_FAILS(g.op->conv(g.ctx, CONV(&batch, 8, 7)), BR_E_SHAPE);
    CHECK_FAILS(g.op->conv(g.ctx, CONV(&from_one, 8, 8)), BR_E_ARG);
#define GATE(n, h, d) &(bi_grad_kda_gate_args){n, h, d, x, x, f, f, 0, 0.0f, f, f, y, y}
    CHECK_FAILS(g.op->kda_gate(g.ctx, GATE(-1, 1, 1)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda_gate(g.ctx, GATE(1, 0, 1)), BR_E_SHAPE);
#define KDA(batch, h, d, ld) &(bi_grad_kda_args){batch, h, d, x, x, x, ld, f, f, 1.0f, f, y, y, y, y, y}
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 1, 31, 64)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 1, 288, 288)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 0, 32, 32)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 2, 32, 63)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 4, 32, 128)), BR_E_LIMIT);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&batch, 1, 96, 96)), BR_E_LIMIT);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&many, 1, 32, 32)), BR_E_LIMIT);
    CHECK_FAILS(g.op->kda(g.ctx, KDA(&from_one, 1, 32, 32)), BR_E_ARG);
#define KDA_NORM(n, h, d) &(bi_grad_kda_norm_args){n, h, d, f, f, x, 1e-5f, f, y, y}
    CHECK_FAILS(g.op->kda_norm(g.ctx, KDA_NORM(1, 1, 0)), BR_E_SHAPE);
    CHECK_FAILS(g.op->kda_norm(g.ctx, KDA_NORM(-1, 1, 1)), BR_E_SHAPE);
#define RES(n, d, bank) &(bi_grad_attnres_args){n, d, bank, &x, x, f, 1e-5f, f, &y, y}
    CHECK_FAILS(g.op->attnres(g.ctx, RES(1, 8, 0)), BR_E_SHAPE);
    CHECK_FAILS(g.op->attnres(g.ctx, RES(1, 0, 1)), BR_E_SHAPE);
    CHECK_FAILS(g.op->attnres(g.ctx, RES(1, 8, BR_BANK_MAX + 1)), BR_E_SHAPE);
    CHECK_OK(g.op->rmsnorm(g.ctx, NORM(0, 8, 8)));
    for (size_t i = 0; i < outs.n[0]; i++)
        ck_assert_msg(isnan(y[i]), "an output was touched");
    bi_grad_close(&g);
    br_pool_close(pool);
}
END_TEST

Suite *test_grad_kda_suite(void) {
    Suite *suite = suite_create("grad_kda");
    TCase *tcase = tcase_create("gradients of kda and rows");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, rmsnorm);
    tcase_add_test(tcase, conv);
    tcase_add_test(tcase, kda_gate);
    tcase_add_test(tcase, kda);
    tcase_add_test(tcase, kda_norm);
    tcase_add_test(tcase, attnres);
    tcase_add_test(tcase, refuses_wrong_shapes);
    suite_add_tcase(suite, tcase);
    return suite;
}
