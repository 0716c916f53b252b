/* Gradients of attn, attn_gate, score and route on the GPU against the host form. */
#include "cuda_case.h"
#include "grad_twin.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

enum { SEGS = 4, TWIN_BYTES = 192 << 20 };

static grad_twin g;

static const bi_limits limits = {.n_row = 2400, .n_head = 128, .d_kv_latent = 640, .d_rope = 64, .n_pos = 2400, .n_expert = 896,
                                 .n_expert_topk = 16, .n_vocab = 9000, .d_model = 7168};

/* ---- attn ---- */

typedef struct attn_case {
    const char *name;
    int32_t n_head, d, d_rope, topk; /* topk 0: no list */
    int32_t seg[SEGS];               /* rows of each segment */
    int pad;                         /* two padded rows and a segment without rows behind them */
    int loose;                       /* strides that are no multiple of 16 bytes */
    int without;                     /* bit 0: no dq, 1: no dq_r, 2: no dlatent */
    float spread;
} attn_case;

typedef struct attn_call {
    const attn_case *c;
    bi_batch batch[2];
    bi_bf16 *q, *q_r, *latent;
    int32_t *select, *n_select;
    int32_t latent_ld, head_ld;
    float *dz, *dq, *dq_r, *dlatent;
} attn_call;

static br_status call_attn(const bi_grad *grad, const grad_twin *both, twin_side side, void *context) {
    const attn_call *x = context;
    const attn_case *c = x->c;
    const twin *t = &both->t;
    const bi_grad_attn_args args = {.batch = &x->batch[side],
                                    .n_head = c->n_head,
                                    .d_kv_latent = c->d,
                                    .d_rope = c->d_rope,
                                    .q = twin_at(t, side, x->q),
                                    .q_r = twin_at(t, side, x->q_r),
                                    .q_r_ld = (int64_t)c->n_head * x->head_ld,
                                    .q_r_head_ld = x->head_ld,
                                    .latent = twin_at(t, side, x->latent),
                                    .latent_ld = x->latent_ld,
                                    .select = twin_at(t, side, x->select),
                                    .n_select = twin_at(t, side, x->n_select),
                                    .select_ld = c->topk,
                                    .alpha = 1.0f / sqrtf((float)(c->d + c->d_rope)),
                                    .dz = twin_at(t, side, x->dz),
                                    .dq = twin_at(t, side, x->dq),
                                    .dq_r = twin_at(t, side, x->dq_r),
                                    .dlatent = twin_at(t, side, x->dlatent)};
    return grad->op->attn(grad->ctx, &args);
}

/* Both sides see the same padding. */
static void make_batch(attn_call *x) {
    int32_t n_row = 0, n_seg = 0;
    bi_batch batch = {0};
    for (int i = 0; i < SEGS; i++)
        n_row += x->c->seg[i];
    bi_seg *segs = TWIN_ARRAY(&g.t, bi_seg, "segments", SEGS + 1);
    int32_t *row_seg = TWIN_ARRAY(&g.t, int32_t, "row_seg", n_row + 2);
    for (int32_t i = 0, row = 0; i < SEGS; row += x->c->seg[i++]) {
        if (!x->c->seg[i])
            continue;
        for (int32_t k = 0; k < x->c->seg[i]; k++)
            row_seg[row + k] = n_seg;
        segs[n_seg++] = (bi_seg){i, row, x->c->seg[i], 0};
        batch.seg_row_max = x->c->seg[i] > batch.seg_row_max ? x->c->seg[i] : batch.seg_row_max;
    }
    if (x->c->pad) {
        row_seg[n_row] = row_seg[n_row + 1] = -1;
        segs[n_seg++] = (bi_seg){0, n_row, 0, 0};
        n_row += 2;
    }
    batch.n_row = n_row;
    batch.n_seg = n_seg;
    batch.pos_max = batch.seg_row_max - 1;
    for (int side = 0; side < 2; side++) {
        x->batch[side] = batch;
        x->batch[side].seg = twin_at(&g.t, (twin_side)side, segs);
        x->batch[side].row_seg = twin_at(&g.t, (twin_side)side, row_seg);
    }
}

static void choose(attn_call *x, op_random *random) {
    const bi_batch *batch = &x->batch[TWIN_ORACLE];
    const int32_t topk = x->c->topk;
    x->select = TWIN_ARRAY(&g.t, int32_t, "select", (int64_t)batch->n_row * topk);
    x->n_select = TWIN_ARRAY(&g.t, int32_t, "n_select", batch->n_row);
    for (int32_t t = 0; t < batch->n_row; t++) {
        if (batch->row_seg[t] < 0)
            continue;
        const int32_t visible = t - batch->seg[batch->row_seg[t]].row + 1, k = visible < topk ? visible : topk;
        int32_t n = 0;
        for (int32_t j = 0; j < visible; j++)
            if (op_random_below(random, visible - j) < k - n)
                x->select[(int64_t)t * topk + n++] = j;
        x->n_select[t] = n;
    }
}

static void check_attn(const attn_case *c) {
    op_random random = {31, 0};
    attn_call x = {.c = c};
    grad_twin_reset(&g);
    make_batch(&x);
    if (c->topk)
        choose(&x, &random);
    const int32_t n = x.batch[TWIN_ORACLE].n_row, real = c->pad ? n - 2 : n, d_latent = c->d + c->d_rope; /* padded rows stay poison: NaN */
    const int64_t n_q = (int64_t)n * c->n_head;
    x.latent_ld = d_latent + (c->loose ? 3 : 0);
    x.head_ld = c->d_rope + (c->loose ? 1 : 0);
    x.q = TWIN_ARRAY(&g.t, bi_bf16, "q", n_q * c->d);
    x.q_r = TWIN_ARRAY(&g.t, bi_bf16, "q_r", n_q * x.head_ld + 1);
    x.latent = TWIN_ARRAY(&g.t, bi_bf16, "latent", (int64_t)n * x.latent_ld);
    x.dz = TWIN_ARRAY(&g.t, float, "dz", n_q * c->d);
    op_random_bf16s(&random, c->spread, x.q, real * c->n_head * c->d);
    op_random_bf16s(&random, c->spread, x.q_r, real * c->n_head * x.head_ld);
    op_random_bf16s(&random, 1.0f, x.latent, real * x.latent_ld);
    op_random_normals(&random, 1.0f, x.dz, real * c->n_head * c->d);
    x.dq = c->without & 1 ? NULL : grad_twin_out(&g, "dq", n_q * c->d, c->d);
    x.dq_r = c->without & 2 || !c->d_rope ? NULL : grad_twin_out(&g, "dq_r", n_q * c->d_rope, c->d_rope);
    x.dlatent = c->without & 4 ? NULL : grad_twin_out(&g, "dlatent", (int64_t)n * d_latent, d_latent);
    grad_twin_run(&g, c->name, call_attn, &x);
}

static void check_all(const attn_case *c, size_t n) {
    for (size_t i = 0; i < n; i++)
        check_attn(&c[i]);
}
#define CHECK_ALL(cases) check_all((cases), sizeof(cases) / sizeof *(cases))

#define NANO .n_head = 4, .d = 32, .d_rope = 16, .spread = 1
#define K31 .n_head = 96, .d = 512, .d_rope = 64, .spread = 1

START_TEST(dense) {
    static const attn_case cases[] = {
        {"nano", NANO, .seg = {70, 1, 130}},
        {"one row", NANO, .seg = {1}},
        {"single rows", .n_head = 60, .d = 32, .d_rope = 16, .spread = 1, .seg = {1, 1, 1, 2}},
        {"whole tiles", NANO, .seg = {64, 128}},
        {"padding", NANO, .pad = 1, .seg = {62, 64}},
        {"padding in the last tile", NANO, .pad = 1, .seg = {5, 3}},
        {"more than a chunk", .n_head = 2, .d = 16, .d_rope = 8, .spread = 1, .seg = {700, 900}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(selections) {
    static const attn_case cases[] = {
        {"one of all", NANO, .topk = 1, .seg = {40, 3}},
        {"few", NANO, .topk = 7, .seg = {90, 1, 65}},
        {"many", NANO, .topk = 150, .pad = 1, .seg = {300, 20}},
        {"as many as there are", NANO, .topk = 64, .seg = {64, 63}},
        {"more than a chunk", .n_head = 2, .d = 16, .d_rope = 8, .spread = 1, .topk = 40, .pad = 1, .seg = {1030, 1200, 1}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(odd_shapes) {
    static const attn_case cases[] = {
        {"one head of one", .n_head = 1, .d = 1, .d_rope = 0, .spread = 1, .seg = {40}},
        {"odd widths", .n_head = 5, .d = 33, .d_rope = 7, .spread = 2, .topk = 30, .seg = {80, 3}},
        {"odd widths, loose", .n_head = 33, .d = 45, .d_rope = 15, .spread = 2, .loose = 1, .pad = 1, .seg = {70, 3}},
        {"no rope", .n_head = 32, .d = 96, .d_rope = 0, .spread = 1, .seg = {66}},
        {"a width of three quarters", .n_head = 3, .d = 80, .d_rope = 16, .spread = 1, .loose = 1, .seg = {66}},
        {"more heads than three groups", .n_head = 97, .d = 72, .d_rope = 8, .spread = 1, .topk = 20, .seg = {70}},
        {"wider than a slab", .n_head = 4, .d = 640, .d_rope = 64, .spread = 1, .topk = 50, .seg = {70}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(wanted_outputs) {
    static const attn_case cases[] = {
        {"dq alone", NANO, .without = 6, .seg = {70, 3}},       {"dq_r alone", NANO, .without = 5, .seg = {70, 3}},
        {"dlatent alone", NANO, .without = 3, .seg = {70, 3}}, {"no dlatent", NANO, .without = 4, .topk = 9, .seg = {70, 3}},
        {"no dq_r", NANO, .without = 2, .seg = {70, 3}},
    };
    CHECK_ALL(cases);
}
END_TEST

START_TEST(full_width) {
    static const attn_case cases[] = {
        {"96 heads, dense", K31, .seg = {70, 3}},
        {"96 heads, a list", K31, .topk = 33, .pad = 1, .seg = {40, 1, 50}},
        {"32 heads", .n_head = 32, .d = 512, .d_rope = 64, .spread = 1, .loose = 1, .topk = 70, .seg = {140}},
        {"one row", K31, .seg = {1}},
    };
    CHECK_ALL(cases);
}
END_TEST

/* ---- attn_gate ---- */

typedef struct gate_call {
    int32_t n_row, d;
    bi_bf16 *gate;
    float *o, *dy, *d_o, *dgate;
} gate_call;

static br_status call_gate(const bi_grad *grad, const grad_twin *both, twin_side side, void *context) {
    const gate_call *x = context;
    const twin *t = &both->t;
    const bi_grad_attn_gate_args args = {x->n_row, x->d, twin_at(t, side, x->o), twin_at(t, side, x->gate), twin_at(t, side, x->dy),
                                         twin_at(t, side, x->d_o), twin_at(t, side, x->dgate)};
    return grad->op->attn_gate(grad->ctx, &args);
}

static void check_gate(int32_t n_row, int32_t d, int gated) {
    const int n = n_row * d;
    op_random random = {(uint64_t)d, 0};
    gate_call x = {.n_row = n_row, .d = d};
    grad_twin_reset(&g);
    x.o = TWIN_ARRAY(&g.t, float, "o", n);
    x.dy = TWIN_ARRAY(&g.t, float, "dy", n);
    x.gate = gated ? TWIN_ARRAY(&g.t, bi_bf16, "gate", n) : NULL;
    op_random_normals(&random, 1.0f, x.o, n);
    op_random_normals(&random, 1.0f, x.dy, n);
    if (gated)
        op_random_bf16s(&random, d % 2 ? 3.0f : 90.0f, x.gate, n);
    x.d_o = grad_twin_out(&g, "do", n, d);
    x.dgate = gated ? grad_twin_out(&g, "dgate", n, d) : TWIN_ARRAY(&g.t, float, "no dgate", n);
    grad_twin_run(&g, "gate", call_gate, &x);
}

START_TEST(gates) {
    for (int32_t d = 1; d <= 400; d = d * 3 + 2)
        check_gate(7, d, d % 4 != 1);
    check_gate(5, 12288, 1);
    check_gate(5, 12288, 0);
}
END_TEST

/* ---- score ---- */

typedef struct score_call {
    int32_t n_row, d, n_vocab;
    twin_mat w;
    bi_bf16 *x;
    int32_t *token;
    float *temperature, *dlogprob, *dx;
} score_call;

static br_status call_score(const bi_grad *grad, const grad_twin *both, twin_side side, void *context) {
    const score_call *x = context;
    const twin *t = &both->t;
    const bi_grad_score_args args = {x->n_row, x->d, x->n_vocab, twin_at(t, side, x->x), x->w.side[side], twin_at(t, side, x->token),
                                     twin_at(t, side, x->temperature), twin_at(t, side, x->dlogprob), twin_at(t, side, x->dx)};
    return grad->op->score(grad->ctx, &args);
}

static void check_score(int32_t n_row, int32_t d, int32_t n_vocab, float spread) {
    static const float temperature[] = {1.0f, 0.0f, 0.5f, 3.0f};
    op_random random = {(uint64_t)(d + n_vocab), 0};
    score_call x = {.n_row = n_row, .d = d, .n_vocab = n_vocab};
    grad_twin_reset(&g);
    bi_bf16 *w = TWIN_ARRAY(&g.t, bi_bf16, "w", (int64_t)n_vocab * d);
    x.x = TWIN_ARRAY(&g.t, bi_bf16, "x", (int64_t)n_row * d);
    x.token = TWIN_ARRAY(&g.t, int32_t, "token", n_row);
    x.temperature = TWIN_ARRAY(&g.t, float, "temperature", n_row);
    x.dlogprob = TWIN_ARRAY(&g.t, float, "dlogprob", n_row);
    op_random_bf16s(&random, spread / sqrtf((float)d), w, n_vocab * d);
    op_random_bf16s(&random, 1.0f, x.x, n_row * d);
    op_random_normals(&random, 1.0f, x.dlogprob, n_row);
    for (int32_t t = 0; t < n_row; t++) {
        x.temperature[t] = temperature[t % 4];
        x.token[t] = op_random_below(&random, n_vocab);
    }
    x.token[n_row - 1] = n_vocab - 1;
    if (n_row > 2)
        x.dlogprob[1] = 0.0f;
    x.w = twin_stack(&g.t, w, 1, n_vocab, d);
    x.dx = grad_twin_out(&g, "dx", (int64_t)n_row * d, d);
    grad_twin_run(&g, "score", call_score, &x);
}

START_TEST(scores) {
    check_score(1, 1, 2, 2);
    check_score(5, 17, 31, 2);
    check_score(33, 64, 512, 3);
    check_score(3, 16, 4096, 3);
    check_score(7, 24, 4097, 3);
    check_score(4, 40, 9000, 5);
    check_score(2049, 16, 300, 2);
    check_score(3, 7168, 2000, 3);
}
END_TEST

/* ---- route ---- */

typedef struct route_call {
    int32_t n_row, d, n_expert, topk, renormalize;
    twin_mat w;
    bi_bf16 *x;
    int32_t *expert;
    float *dp, *dx;
} route_call;

static br_status call_route(const bi_grad *grad, const grad_twin *both, twin_side side, void *context) {
    const route_call *x = context;
    const twin *t = &both->t;
    const bi_grad_route_args args = {x->n_row, x->d, x->n_expert, x->topk, twin_at(t, side, x->x), x->w.side[side], twin_at(t, side, x->expert),
                                     x->renormalize, 2.5f, twin_at(t, side, x->dp), twin_at(t, side, x->dx)};
    return grad->op->route(grad->ctx, &args);
}

static void check_route(int32_t n_row, int32_t d, int32_t n_expert, int32_t topk, int32_t renormalize) {
    op_random random = {(uint64_t)(d + n_expert), 0};
    route_call x = {.n_row = n_row, .d = d, .n_expert = n_expert, .topk = topk, .renormalize = renormalize};
    grad_twin_reset(&g);
    bi_bf16 *w = TWIN_ARRAY(&g.t, bi_bf16, "w", (int64_t)n_expert * d);
    x.x = TWIN_ARRAY(&g.t, bi_bf16, "x", (int64_t)n_row * d);
    x.expert = TWIN_ARRAY(&g.t, int32_t, "expert", (int64_t)n_row * topk);
    x.dp = TWIN_ARRAY(&g.t, float, "dp", (int64_t)n_row * topk);
    op_random_bf16s(&random, 2.0f / sqrtf((float)d), w, n_expert * d);
    op_random_bf16s(&random, 1.0f, x.x, n_row * d);
    op_random_normals(&random, 1.0f, x.dp, n_row * topk);
    for (int32_t t = 0; t < n_row; t++)
        for (int32_t e = 0, n = 0; e < n_expert; e++)
            if (op_random_below(&random, n_expert - e) < topk - n)
                x.expert[t * topk + n++] = e;
    x.w = twin_stack(&g.t, w, 1, n_expert, d);
    x.dx = grad_twin_out(&g, "dx", (int64_t)n_row * d, d);
    grad_twin_run(&g, "route", call_route, &x);
}

START_TEST(routes) {
    for (int renormalize = 0; renormalize < 2; renormalize++) {
        check_route(1, 1, 3, 2, renormalize);
        check_route(70, 17, 40, 8, renormalize);
        check_route(9, 32, 16, 16, renormalize);
        check_route(5, 255, 33, 5, renormalize);
        check_route(40, 7168, 896, 16, renormalize);
    }
}
END_TEST

/* ---- refusals ---- */

START_TEST(refusals) {
    const bi_batch batch = {.n_row = 2, .pos_max = 1};
    const bi_grad_attn_args attn = {.batch = &batch, .n_head = 4, .d_kv_latent = 32, .d_rope = 16, .latent_ld = 48};
    const bi_grad *grad = &g.grad[TWIN_CUDA];
    bi_grad_attn_args args = attn;
    args.latent_ld = 47;
    CHECK_FAILS(grad->op->attn(grad->ctx, &args), BR_E_SHAPE);
    args = attn, args.n_head = 129;
    CHECK_FAILS(grad->op->attn(grad->ctx, &args), BR_E_LIMIT);
    bi_batch large = {.n_row = 2401, .pos_max = 1};
    args = attn, args.batch = &large;
    CHECK_FAILS(grad->op->attn(grad->ctx, &args), BR_E_LIMIT);
    large = (bi_batch){.n_row = 2, .pos_max = 2400};
    CHECK_FAILS(grad->op->attn(grad->ctx, &args), BR_E_LIMIT);
    bi_grad_attn_gate_args gate = {.n_row = 1};
    CHECK_FAILS(grad->op->attn_gate(grad->ctx, &gate), BR_E_SHAPE);
    bi_grad_score_args score = {.n_row = 1, .d = 4, .n_vocab = 9};
    CHECK_FAILS(grad->op->score(grad->ctx, &score), BR_E_SHAPE);
    score.n_vocab = 9001;
    CHECK_FAILS(grad->op->score(grad->ctx, &score), BR_E_LIMIT);
    bi_grad_route_args route = {.d = 4, .n_expert = 9, .topk = 10, .w = {.data = &batch, .n_out = 9, .n_in = 4}};
    CHECK_FAILS(grad->op->route(grad->ctx, &route), BR_E_SHAPE);
    route.topk = 2;
    route.w.data = NULL;
    CHECK_FAILS(grad->op->route(grad->ctx, &route), BR_E_SHAPE);
    route.n_expert = 897;
    CHECK_FAILS(grad->op->route(grad->ctx, &route), BR_E_LIMIT);
}
END_TEST

static void setup(void) {
    grad_twin_open(&g, &limits, TWIN_BYTES);
}

static void teardown(void) {
    grad_twin_close(&g);
}

Suite *cuda_grad_attn_suite(void);
Suite *cuda_grad_attn_suite(void) {
    Suite *suite = suite_create("gradients of attn, score, route on the GPU");
    CUDA_CASE_IN(suite, dense, setup, teardown);
    CUDA_CASE_IN(suite, selections, setup, teardown);
    CUDA_CASE_IN(suite, odd_shapes, setup, teardown);
    CUDA_CASE_IN(suite, wanted_outputs, setup, teardown);
    CUDA_CASE_IN(suite, full_width, setup, teardown);
    CUDA_CASE_IN(suite, gates, setup, teardown);
    CUDA_CASE_IN(suite, scores, setup, teardown);
    CUDA_CASE_IN(suite, routes, setup, teardown);
    CUDA_CASE_IN(suite, refusals, setup, teardown);
    return suite;
}
