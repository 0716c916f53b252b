/* Gradients of attn, attn_gate, score and route, host form: against differences of the plain functions, and what they refuse. */
#include "bi_grad.h"
#include "grad_check.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

enum { ARENA_BYTES = 8 << 20, SEG_MAX = 4 };

static const bi_limits limits = {.n_row = 48, .n_head = 5, .d_kv_latent = 33, .d_rope = 8, .n_pos = 40, .n_expert = 40, .n_expert_topk = 8,
                                 .n_vocab = 300, .d_model = 200};

/* Arrays of a case. */
static _Alignas(64) unsigned char arena[ARENA_BYTES];
static size_t arena_used;

static void *take(size_t bytes) {
    void *at = arena + arena_used;
    arena_used += (bytes + 63) / 64 * 64;
    ck_assert_uint_le(arena_used, ARENA_BYTES);
    return memset(at, 0xff, bytes);
}
#define TAKE(type, count) ((type *)take(sizeof(type) * (size_t)(count)))

static bi_bf16 *random_bf16(op_random *random, float scale, int n) {
    bi_bf16 *x = TAKE(bi_bf16, n);
    op_random_bf16s(random, scale, x, n);
    return x;
}

static float *random_f32(op_random *random, float scale, int n) {
    float *x = TAKE(float, n);
    op_random_normals(random, scale, x, n);
    return x;
}

static double *widened(const bi_bf16 *x, int n) {
    double *out = TAKE(double, n);
    grad_widen(x, n, out);
    return out;
}

static double *doubled(const float *x, int n) {
    double *out = TAKE(double, n);
    grad_doubles(x, n, out);
    return out;
}

typedef struct rig {
    br_pool *pool;
    bi_grad grad;
} rig;

static void rig_open(rig *r, int n_thread) {
    CHECK_OK(br_pool_open(n_thread, &r->pool));
    CHECK_OK(bi_grad_host_open(&limits, r->pool, &r->grad));
}

static void rig_close(rig *r) {
    bi_grad_close(&r->grad);
    br_pool_close(r->pool);
}

/* ---- attn ---- */

typedef struct attn_case {
    int32_t n_head, d, d_rope, seg[SEG_MAX], n_pad; /* rows of each segment; padded rows behind them */
    int32_t topk;                                   /* 0: no list */
    float spread;
} attn_case;

typedef struct attn_data {
    const attn_case *c;
    bi_grad_attn_args args;
    bi_batch batch;
    bi_seg segs[SEG_MAX + 1];
    int32_t *row_seg, *select, *n_select;
    double *q, *q_r, *latent, *dz; /* dense */
} attn_data;

static void make_batch(attn_data *a) {
    int32_t n_row = 0;
    for (int i = 0; i < SEG_MAX; i++)
        n_row += a->c->seg[i];
    a->row_seg = TAKE(int32_t, n_row + a->c->n_pad);
    a->batch = (bi_batch){.n_row = n_row + a->c->n_pad, .seg = a->segs, .row_seg = a->row_seg};
    for (int i = 0, row = 0; i < SEG_MAX; row += a->c->seg[i++]) {
        if (!a->c->seg[i])
            continue;
        a->segs[a->batch.n_seg] = (bi_seg){i, row, a->c->seg[i], 0};
        for (int32_t k = 0; k < a->c->seg[i]; k++)
            a->row_seg[row + k] = a->batch.n_seg;
        a->batch.n_seg++;
    }
    for (int32_t t = n_row; t < a->batch.n_row; t++)
        a->row_seg[t] = -1;
    if (a->c->n_pad)
        a->segs[a->batch.n_seg++] = (bi_seg){0, n_row, 0, 0};
}

/* Up to topk of the visible positions, rising. */
static void choose(attn_data *a, op_random *random) {
    const int32_t topk = a->c->topk;
    a->select = TAKE(int32_t, a->batch.n_row * topk);
    a->n_select = TAKE(int32_t, a->batch.n_row);
    for (int32_t t = 0; t < a->batch.n_row; t++) {
        if (a->row_seg[t] < 0)
            continue;
        const int32_t visible = t - a->segs[a->row_seg[t]].row + 1, k = visible < topk ? visible : topk;
        int32_t n = 0;
        for (int32_t j = 0; j < visible; j++)
            if (op_random_below(random, visible - j) < k - n)
                a->select[t * topk + n++] = j;
        a->n_select[t] = n;
    }
}

static void make_attn(attn_data *a, const attn_case *c, uint64_t seed) {
    op_random random = {seed, 0};
    const int32_t d_latent = c->d + c->d_rope, latent_ld = d_latent + 3, head_ld = c->d_rope + 1;
    arena_used = 0;
    *a = (attn_data){.c = c};
    make_batch(a);
    if (c->topk)
        choose(a, &random);
    const int32_t n = a->batch.n_row, n_q = n * c->n_head;
    bi_bf16 *q = random_bf16(&random, c->spread, n_q * c->d), *q_r = random_bf16(&random, c->spread, n_q * head_ld);
    bi_bf16 *latent = random_bf16(&random, 1.0f, n * latent_ld);
    float *dz = random_f32(&random, 1.0f, n_q * c->d);
    a->q = widened(q, n_q * c->d);
    a->q_r = TAKE(double, n_q * c->d_rope + 1);
    a->latent = TAKE(double, n * d_latent);
    a->dz = doubled(dz, n_q * c->d);
    for (int32_t i = 0; i < n_q; i++)
        grad_widen(q_r + i * head_ld, c->d_rope, a->q_r + i * c->d_rope);
    for (int32_t i = 0; i < n; i++)
        grad_widen(latent + i * latent_ld, d_latent, a->latent + i * d_latent);
    a->args = (bi_grad_attn_args){&a->batch, c->n_head, c->d, c->d_rope, q, q_r, (int64_t)c->n_head * head_ld, head_ld, latent, latent_ld,
                                  a->select, a->n_select, c->topk, 0.3f, dz, TAKE(float, n_q * c->d), TAKE(float, n_q * c->d_rope + 1),
                                  TAKE(float, n * d_latent)};
}

/* dz . z of one row and head. */
static double attn_head_loss(const attn_data *a, int32_t t, int32_t h) {
    const attn_case *c = a->c;
    const bi_seg *seg = &a->segs[a->row_seg[t]];
    const int32_t at = t * c->n_head + h, n = c->topk ? a->n_select[t] : t - seg->row + 1;
    double s[64], top = -1e300, sum = 0, loss = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t j = c->topk ? a->select[t * c->topk + i] : i;
        const double *latent = a->latent + (seg->row + j) * (c->d + c->d_rope);
        s[i] = 0;
        for (int32_t k = 0; k < c->d; k++)
            s[i] += a->q[at * c->d + k] * latent[k];
        for (int32_t k = 0; k < c->d_rope; k++)
            s[i] += a->q_r[at * c->d_rope + k] * latent[c->d + k];
        s[i] *= (double)a->args.alpha;
        top = s[i] > top ? s[i] : top;
    }
    for (int32_t i = 0; i < n; i++)
        sum += exp(s[i] - top);
    for (int32_t i = 0; i < n; i++) {
        const int32_t j = c->topk ? a->select[t * c->topk + i] : i;
        for (int32_t k = 0; k < c->d; k++)
            loss += exp(s[i] - top) / sum * a->latent[(seg->row + j) * (c->d + c->d_rope) + k] * a->dz[at * c->d + k];
    }
    return loss;
}

static double attn_loss(void *context) {
    const attn_data *a = context;
    double loss = 0;
    for (int32_t t = 0; t < a->batch.n_row; t++)
        for (int32_t h = 0; h < a->c->n_head && a->row_seg[t] >= 0; h++)
            loss += attn_head_loss(a, t, h);
    return loss;
}

static void check_zeros(const char *what, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        ck_assert_msg(x[i] == 0.0f, "%s[%lld] of a padded row is %g", what, (long long)i, (double)x[i]);
}

static void check_attn(const rig *r, const attn_case *c, uint64_t seed) {
    attn_data a;
    make_attn(&a, c, seed);
    CHECK_OK(r->grad.op->attn(r->grad.ctx, &a.args));
    const int32_t n = a.batch.n_row - c->n_pad, n_q = n * c->n_head, d_latent = c->d + c->d_rope;
    int one = 1; /* every row of one position: the scores move nothing */
    for (int32_t t = 0; t < n; t++)
        one &= (c->topk ? a.n_select[t] : t - a.segs[a.row_seg[t]].row + 1) == 1;
    grad_check("latent", attn_loss, &a, a.latent, n * d_latent, a.args.dlatent, 60);
    if (one) {
        check_zeros("dq", a.args.dq, n_q * c->d);
    } else {
        grad_check("q", attn_loss, &a, a.q, n_q * c->d, a.args.dq, 60);
        if (c->d_rope)
            grad_check("q_r", attn_loss, &a, a.q_r, n_q * c->d_rope, a.args.dq_r, 40);
    }
    check_zeros("dq", a.args.dq + n_q * c->d, c->n_pad * c->n_head * c->d);
    check_zeros("dq_r", a.args.dq_r + n_q * c->d_rope, c->n_pad * c->n_head * c->d_rope);
    check_zeros("dlatent", a.args.dlatent + n * d_latent, c->n_pad * d_latent);
}

static const attn_case attn_cases[] = {
    {2, 8, 4, {5}, 0, 0, 1},
    {1, 1, 0, {3}, 0, 0, 1},
    {3, 7, 3, {1, 1}, 0, 0, 1},
    {3, 7, 3, {19, 1, 17}, 0, 0, 0.7f},
    {5, 33, 8, {33, 6}, 0, 5, 0.3f},
    {4, 16, 8, {10, 3, 21}, 4, 7, 0.5f},
    {2, 9, 0, {16, 16}, 2, 16, 0.5f},
    {2, 12, 5, {9, 2, 6, 8}, 1, 1, 1},
    {2, 6, 2, {40}, 3, 0, 1},
};
enum { N_ATTN = sizeof attn_cases / sizeof attn_cases[0] };

START_TEST(attn_is_the_slope) {
    rig r;
    rig_open(&r, 2);
    check_attn(&r, &attn_cases[_i], test_seed() + (uint64_t)_i);
    rig_close(&r);
}
END_TEST

/* ---- attn_gate ---- */

typedef struct gate_data {
    bi_grad_attn_gate_args args;
    double *o, *gate, *dy;
} gate_data;

static double gate_loss(void *context) {
    const gate_data *g = context;
    double loss = 0;
    for (int i = 0; i < g->args.n_row * g->args.d; i++)
        loss += g->dy[i] * g->o[i] / (1 + exp(-g->gate[i]));
    return loss;
}

static void make_gate(gate_data *g, int32_t n_row, int32_t d) {
    op_random random = {test_seed() + (uint64_t)d, 0};
    const int n = n_row * d;
    arena_used = 0;
    float *o = random_f32(&random, 1.0f, n), *dy = random_f32(&random, 1.0f, n);
    bi_bf16 *gate = random_bf16(&random, 3.0f, n);
    *g = (gate_data){{n_row, d, o, gate, dy, TAKE(float, n), TAKE(float, n)}, doubled(o, n), widened(gate, n), doubled(dy, n)};
}

START_TEST(gate_is_the_slope) {
    rig r;
    gate_data g;
    rig_open(&r, 2);
    for (int32_t d = 1; d < 60; d = d * 3 + 2) {
        make_gate(&g, 4, d);
        CHECK_OK(r.grad.op->attn_gate(r.grad.ctx, &g.args));
        grad_check("o", gate_loss, &g, g.o, 4 * d, g.args.d_o, 0);
        grad_check("gate", gate_loss, &g, g.gate, 4 * d, g.args.dgate, 0);
        memset(g.args.dgate, 0x55, sizeof(float));
        g.args.gate = NULL;
        CHECK_OK(r.grad.op->attn_gate(r.grad.ctx, &g.args));
        ck_assert_int_eq(memcmp(g.args.d_o, g.args.dy, sizeof(float) * 4 * (size_t)d), 0);
        ck_assert_uint_eq(((unsigned char *)g.args.dgate)[0], 0x55);
    }
    rig_close(&r);
}
END_TEST

/* ---- score ---- */

typedef struct score_data {
    bi_grad_score_args args;
    double *x, *w, *dlogprob;
} score_data;

static double score_loss(void *context) {
    const score_data *s = context;
    const bi_grad_score_args *a = &s->args;
    double loss = 0, z[300];
    for (int32_t t = 0; t < a->n_row; t++) {
        const double temperature = a->temperature[t] == 0.0f ? 1.0 : (double)a->temperature[t];
        double top = -1e300, sum = 0;
        for (int32_t v = 0; v < a->n_vocab; v++) {
            z[v] = 0;
            for (int32_t k = 0; k < a->d; k++)
                z[v] += s->w[v * a->d + k] * s->x[t * a->d + k];
            z[v] /= temperature;
            top = z[v] > top ? z[v] : top;
        }
        for (int32_t v = 0; v < a->n_vocab; v++)
            sum += exp(z[v] - top);
        loss += s->dlogprob[t] * (z[a->token[t]] - top - log(sum));
    }
    return loss;
}

/* The matrix packs for any pool's oracle alike. */
static void make_score(score_data *s, op_rig *packer, int32_t n_row, int32_t d, int32_t n_vocab) {
    static const float temperature[] = {1.0f, 0.0f, 0.5f, 3.0f, 0.7f};
    op_random random = {test_seed() + (uint64_t)d, 0};
    arena_used = 0;
    bi_bf16 *x = random_bf16(&random, 1.0f, n_row * d), *w = random_bf16(&random, 1.5f / sqrtf((float)d), n_vocab * d);
    float *t = TAKE(float, n_row), *dlogprob = random_f32(&random, 1.0f, n_row);
    int32_t *token = TAKE(int32_t, n_row);
    for (int32_t i = 0; i < n_row; i++) {
        t[i] = temperature[i % 5];
        token[i] = op_random_below(&random, n_vocab);
    }
    token[0] = n_vocab - 1;
    *s = (score_data){{n_row, d, n_vocab, x, op_rig_mat(packer, w, n_vocab, d), token, t, dlogprob, TAKE(float, n_row * d)},
                      widened(x, n_row * d), widened(w, n_vocab * d), doubled(dlogprob, n_row)};
}

START_TEST(score_is_the_slope) {
    static const int32_t shape[][3] = {{1, 1, 2}, {3, 17, 31}, {5, 8, 32}, {33, 16, 65}, {2, 200, 300}, {1, 129, 33}};
    rig r;
    op_rig packer;
    score_data s;
    rig_open(&r, 2);
    op_rig_open(&packer, &limits, "portable", 1);
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        make_score(&s, &packer, shape[i][0], shape[i][1], shape[i][2]);
        CHECK_OK(r.grad.op->score(r.grad.ctx, &s.args));
        grad_check("x", score_loss, &s, s.x, s.args.n_row * s.args.d, s.args.dx, 80);
    }
    op_rig_close(&packer);
    rig_close(&r);
}
END_TEST

/* ---- route ---- */

typedef struct route_data {
    bi_grad_route_args args;
    double *x, *w, *dp;
} route_data;

static double route_loss(void *context) {
    const route_data *r = context;
    const bi_grad_route_args *a = &r->args;
    double loss = 0, s[8];
    for (int32_t t = 0; t < a->n_row; t++) {
        double sum = 1e-20;
        for (int32_t i = 0; i < a->topk; i++) {
            double logit = 0;
            for (int32_t k = 0; k < a->d; k++)
                logit += r->w[a->expert[t * a->topk + i] * a->d + k] * r->x[t * a->d + k];
            s[i] = 1 / (1 + exp(-logit));
            sum += s[i];
        }
        for (int32_t i = 0; i < a->topk; i++)
            loss += r->dp[t * a->topk + i] * (double)a->scale * (a->renormalize ? s[i] / sum : s[i]);
    }
    return loss;
}

static void make_route(route_data *r, op_rig *packer, int32_t n_row, int32_t d, int32_t n_expert, int32_t topk, int32_t renormalize) {
    op_random random = {test_seed() + (uint64_t)d, 0};
    arena_used = 0;
    bi_bf16 *x = random_bf16(&random, 1.0f, n_row * d), *w = random_bf16(&random, 2.0f / sqrtf((float)d), n_expert * d);
    float *dp = random_f32(&random, 1.0f, n_row * topk);
    int32_t *expert = TAKE(int32_t, n_row * topk);
    for (int32_t t = 0; t < n_row; t++)
        for (int32_t e = 0, n = 0; e < n_expert; e++)
            if (op_random_below(&random, n_expert - e) < topk - n)
                expert[t * topk + n++] = e;
    *r = (route_data){{n_row, d, n_expert, topk, x, op_rig_mat(packer, w, n_expert, d), expert, renormalize, 2.5f, dp, TAKE(float, n_row * d)},
                      widened(x, n_row * d), widened(w, n_expert * d), doubled(dp, n_row * topk)};
}

START_TEST(route_is_the_slope) {
    static const int32_t shape[][4] = {{1, 1, 3, 2}, {7, 17, 40, 8}, {2, 200, 33, 5}, {4, 16, 8, 8}};
    rig r;
    op_rig packer;
    route_data data;
    rig_open(&r, 2);
    op_rig_open(&packer, &limits, "portable", 1);
    for (int i = 0; i < 8; i++) {
        const int32_t *s = shape[i / 2];
        make_route(&data, &packer, s[0], s[1], s[2], s[3], i % 2);
        CHECK_OK(r.grad.op->route(r.grad.ctx, &data.args));
        grad_check("x", route_loss, &data, data.x, s[0] * s[1], data.args.dx, 80);
    }
    op_rig_close(&packer);
    rig_close(&r);
}
END_TEST

/* ---- all ---- */

/* Every output of every op, behind each other; returns how many floats. */
static size_t run_all(int n_thread, float *out) {
    rig r;
    op_rig packer;
    size_t n = 0;
    attn_data a;
    gate_data g;
    score_data s;
    route_data route;
    rig_open(&r, n_thread);
    op_rig_open(&packer, &limits, "portable", 1);
#define KEEP(from, count) (memcpy(out + n, (from), sizeof(float) * (size_t)(count)), n += (size_t)(count))
    for (int i = 3; i < 7; i++) {
        make_attn(&a, &attn_cases[i], 9);
        CHECK_OK(r.grad.op->attn(r.grad.ctx, &a.args));
        const int32_t n_row = a.batch.n_row, n_q = n_row * a.c->n_head;
        KEEP(a.args.dq, n_q * a.c->d);
        KEEP(a.args.dq_r, n_q * a.c->d_rope);
        KEEP(a.args.dlatent, n_row * (a.c->d + a.c->d_rope));
    }
    make_gate(&g, 7, 33);
    CHECK_OK(r.grad.op->attn_gate(r.grad.ctx, &g.args));
    KEEP(g.args.d_o, 7 * 33);
    KEEP(g.args.dgate, 7 * 33);
    make_score(&s, &packer, 37, 50, 200);
    CHECK_OK(r.grad.op->score(r.grad.ctx, &s.args));
    KEEP(s.args.dx, 37 * 50);
    make_route(&route, &packer, 19, 50, 40, 8, 1);
    CHECK_OK(r.grad.op->route(r.grad.ctx, &route.args));
    KEEP(route.args.dx, 19 * 50);
#undef KEEP
    op_rig_close(&packer);
    rig_close(&r);
    return n;
}

START_TEST(threads_change_nothing) {
    static float one[1 << 16], more[1 << 16];
    static const int threads[] = {2, 3, 7};
    const size_t n = run_all(1, one);
    ck_assert_uint_le(n, 1 << 16);
    for (int i = 0; i < 3; i++) {
        ck_assert_uint_eq(run_all(threads[i], more), n);
        ck_assert_int_eq(memcmp(one, more, sizeof(float) * n), 0);
    }
}
END_TEST

/* An output that is not wanted changes no other. */
START_TEST(outputs_stand_alone) {
    static float q[1 << 14], q_r[1 << 14], latent[1 << 14];
    rig r;
    attn_data a;
    rig_open(&r, 2);
    make_attn(&a, &attn_cases[5], 4);
    const size_t n_q = sizeof(float) * (size_t)(a.batch.n_row * a.c->n_head), n_row = sizeof(float) * (size_t)a.batch.n_row;
    const bi_grad_attn_args all = a.args;
    CHECK_OK(r.grad.op->attn(r.grad.ctx, &all));
    memcpy(q, all.dq, n_q * (size_t)a.c->d);
    memcpy(q_r, all.dq_r, n_q * (size_t)a.c->d_rope);
    memcpy(latent, all.dlatent, n_row * (size_t)(a.c->d + a.c->d_rope));
    for (int i = 0; i < 3; i++) {
        make_attn(&a, &attn_cases[5], 4);
        a.args.dq = i == 0 ? all.dq : NULL;
        a.args.dq_r = i == 1 ? all.dq_r : NULL;
        a.args.dlatent = i == 2 ? all.dlatent : NULL;
        CHECK_OK(r.grad.op->attn(r.grad.ctx, &a.args));
        ck_assert_int_eq(memcmp(q, all.dq, n_q * (size_t)a.c->d) != 0, i != 0);
        ck_assert_int_eq(memcmp(q_r, all.dq_r, n_q * (size_t)a.c->d_rope) != 0, i != 1);
        ck_assert_int_eq(memcmp(latent, all.dlatent, n_row * (size_t)(a.c->d + a.c->d_rope)) != 0, i != 2);
    }
    rig_close(&r);
}
END_TEST

#define REFUSED(op_name, good, change, wanted)                              \
    do {                                                                    \
        __typeof__(good) args = (good);                                     \
        change;                                                             \
        CHECK_FAILS(r.grad.op->op_name(r.grad.ctx, &args), (wanted));       \
    } while (0)

START_TEST(attn_refuses) {
    rig r;
    attn_data a;
    rig_open(&r, 1);
    make_attn(&a, &attn_cases[5], 1);
    REFUSED(attn, a.args, args.n_head = 0, BR_E_SHAPE);
    REFUSED(attn, a.args, args.d_rope = -1, BR_E_SHAPE);
    REFUSED(attn, a.args, args.latent_ld = 23, BR_E_SHAPE);
    REFUSED(attn, a.args, args.n_head = limits.n_head + 1, BR_E_LIMIT);
    REFUSED(attn, a.args, args.d_kv_latent = limits.d_kv_latent + 1; args.latent_ld = 99, BR_E_LIMIT);
    REFUSED(attn, a.args, a.batch.n_row = limits.n_row + 1, BR_E_LIMIT);
    make_attn(&a, &attn_cases[5], 1);
    REFUSED(attn, a.args, a.segs[1].pos = 1, BR_E_SHAPE);
    a.segs[1].pos = 0;
    REFUSED(attn, a.args, a.n_select[20] = 0, BR_E_SHAPE);
    REFUSED(attn, a.args, a.n_select[20] = 8, BR_E_SHAPE);
    make_attn(&a, &attn_cases[5], 1);
    REFUSED(attn, a.args, a.select[20 * 7 + 1] = a.select[20 * 7], BR_E_SHAPE);
    make_attn(&a, &attn_cases[5], 1);
    REFUSED(attn, a.args, a.select[20 * 7 + 6] = 8, BR_E_SHAPE);
    ck_assert_int_eq(((unsigned char *)a.args.dq)[0], 0xff);
    ck_assert_int_eq(((unsigned char *)a.args.dlatent)[0], 0xff);
    bi_batch none = {0};
    a.args.batch = &none;
    CHECK_OK(r.grad.op->attn(r.grad.ctx, &a.args));
    gate_data g;
    make_gate(&g, 2, 3);
    REFUSED(attn_gate, g.args, args.d = 0, BR_E_SHAPE);
    REFUSED(attn_gate, g.args, args.n_row = -1, BR_E_SHAPE);
    rig_close(&r);
}
END_TEST

START_TEST(score_and_route_refuse) {
    rig r;
    op_rig packer;
    score_data s;
    route_data route;
    rig_open(&r, 1);
    op_rig_open(&packer, &limits, "portable", 1);
    make_score(&s, &packer, 4, 8, 40);
    int32_t *token = (int32_t *)(uintptr_t)s.args.token;
    float *temperature = (float *)(uintptr_t)s.args.temperature;
    REFUSED(score, s.args, args.d = 0, BR_E_SHAPE);
    REFUSED(score, s.args, args.n_vocab = 41, BR_E_SHAPE);
    REFUSED(score, s.args, args.n_vocab = limits.n_vocab + 1, BR_E_LIMIT);
    REFUSED(score, s.args, args.w.data = NULL, BR_E_SHAPE);
    REFUSED(score, s.args, token[3] = 40, BR_E_SHAPE);
    token[3] = 0;
    REFUSED(score, s.args, temperature[1] = 2000.0f, BR_E_ARG);
    ck_assert_int_eq(((unsigned char *)s.args.dx)[0], 0xff);
    make_route(&route, &packer, 4, 8, 10, 3, 1);
    int32_t *expert = (int32_t *)(uintptr_t)route.args.expert;
    REFUSED(route, route.args, args.topk = 11, BR_E_SHAPE);
    REFUSED(route, route.args, args.w.n_out = 11, BR_E_SHAPE);
    REFUSED(route, route.args, args.n_expert = limits.n_expert + 1, BR_E_LIMIT);
    REFUSED(route, route.args, expert[11] = 10, BR_E_SHAPE);
    ck_assert_int_eq(((unsigned char *)route.args.dx)[0], 0xff);
    op_rig_close(&packer);
    rig_close(&r);
}
END_TEST

Suite *test_grad_attn_suite(void);
Suite *test_grad_attn_suite(void) {
    Suite *suite = suite_create("grad_attn");
    TCase *tcase = tcase_create("gradients of attn, score, route");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, attn_is_the_slope, 0, N_ATTN);
    tcase_add_test(tcase, gate_is_the_slope);
    tcase_add_test(tcase, score_is_the_slope);
    tcase_add_test(tcase, route_is_the_slope);
    tcase_add_test(tcase, threads_change_nothing);
    tcase_add_test(tcase, outputs_stand_alone);
    tcase_add_test(tcase, attn_refuses);
    tcase_add_test(tcase, score_and_route_refuse);
    suite_add_tcase(suite, tcase);
    return suite;
}
