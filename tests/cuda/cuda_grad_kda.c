/* Gradients of Kimi Delta Attention and of the row ops around it: the GPU against the host form. */
#include "cuda_case.h"
#include "grad_twin.h"
#include "test_support.h"

enum { MEMORY = 48 << 20, GAP = 3 };

static grad_twin g;
static op_random rnd;

static void setup(void) {
    const bi_limits limits = {.n_row = 512, .d_in = 256, .d_out = 256, .rank = 16, .n_slot = 1, .n_head = 4, .d_kv_latent = 64, .d_rope = 16,
                              .index_n_head = 4, .index_d_head = 32, .n_pos = 256, .n_expert = 8, .n_expert_topk = 2, .d_expert = 64,
                              .d_expert_ff = 64, .kda_n_head = 96, .kda_d_head = 256, .n_vocab = 512, .d_model = 256};
    grad_twin_open(&g, &limits, MEMORY);
    rnd = (op_random){test_seed(), 0};
}

static void teardown(void) {
    grad_twin_close(&g);
}

#define AT(pointer) twin_at(&t->t, side, (pointer))

/* Inputs lie `off` elements behind an aligned address. */
static bi_bf16 *numbers(const char *name, int64_t n, float scale, int off) {
    bi_bf16 *x = TWIN_ARRAY(&g.t, bi_bf16, name, n + off) + off;
    op_random_bf16s(&rnd, scale, x, (int)n);
    return x;
}

static float *floats(const char *name, int64_t n, float scale, float shift, int off) {
    float *x = TWIN_ARRAY(&g.t, float, name, n + off) + off;
    op_random_normals(&rnd, scale, x, (int)n);
    for (int64_t i = 0; i < n; i++)
        x[i] += shift;
    return x;
}

/* The gradient of a normalised single number is eps against its square: too little for binary32 when eps is small. */
static float eps(int d) {
    return d == 1 ? 0.25f : 1e-5f;
}

/* Segments of given lengths, then rows of none. */
static twin_batch batch_of(const int *length, int n_seg, int n_pad) {
    enum { SEG_MAX = 96 };
    bi_seg seg[SEG_MAX];
    ck_assert_int_le(n_seg, SEG_MAX);
    for (int i = 0; i < n_seg; i++)
        seg[i] = (bi_seg){length[i] ? i : 0, 0, length[i], 0};
    twin_batch batch = twin_batch_of(&g.t, seg, n_seg);
    const int n_row = batch.side[0].n_row;
    int32_t *row_seg = TWIN_ARRAY(&g.t, int32_t, "row_seg with padding", n_row + n_pad);
    for (int i = 0; i < n_row + n_pad; i++)
        row_seg[i] = i < n_row ? batch.side[0].row_seg[i] : -1;
    for (int side = TWIN_ORACLE; side <= TWIN_CUDA; side++) {
        batch.side[side].n_row = n_row + n_pad;
        batch.side[side].row_seg = twin_at(&g.t, (twin_side)side, row_seg);
    }
    return batch;
}

/* ---- rmsnorm --------------------------------------------------------------------------------------------------------------------- */

static br_status call_norm(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    bi_grad_norm_args a = *(const bi_grad_norm_args *)context;
    a.x = AT(a.x), a.w = AT(a.w), a.dy = AT(a.dy), a.dx = AT(a.dx);
    return grad->op->rmsnorm(grad->ctx, &a);
}

START_TEST(rmsnorm) {
    static const int shape[][3] = {{1, 1, 0}, {3, 31, 1}, {9, 256, 0}, {2, 257, GAP}, {70, 512, 0}, {4, 1536, 8}, {3, 7168, 0}, {2, 16384, 0}};
    for (int i = 0; i < 8; i++) {
        const int n_row = shape[i][0], d = shape[i][1], ld = d + shape[i][2];
        grad_twin_reset(&g);
        bi_grad_norm_args a = {n_row, d, numbers("x", (int64_t)n_row * ld, 1.0f, i % 2), ld, floats("w", d, 0.5f, 1.0f, 0), eps(d),
                               floats("dy", (int64_t)n_row * d, 1.0f, 0.0f, 0), grad_twin_out(&g, "dx", (int64_t)n_row * d, d)};
        grad_twin_run(&g, "rmsnorm", call_norm, &a);
    }
}
END_TEST

/* ---- conv ------------------------------------------------------------------------------------------------------------------------ */

typedef struct conv_case {
    twin_batch batch;
    bi_grad_conv_args args;
} conv_case;

static br_status call_conv(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    const conv_case *c = context;
    bi_grad_conv_args a = c->args;
    a.batch = &c->batch.side[side];
    a.x = AT(a.x), a.w = AT(a.w), a.dy = AT(a.dy), a.dx = AT(a.dx);
    return grad->op->conv(grad->ctx, &a);
}

static void try_conv(const int *length, int n_seg, int n_pad, int n_chan, int gap) {
    grad_twin_reset(&g);
    conv_case c = {.batch = batch_of(length, n_seg, n_pad)};
    const int64_t n_row = c.batch.side[0].n_row, n = n_row * n_chan;
    c.args = (bi_grad_conv_args){NULL, n_chan, numbers("x", n_row * (n_chan + gap), 1.0f, gap % 2), n_chan + gap,
                                 floats("w", (int64_t)n_chan * 4, 1.0f, 0.0f, 0), floats("dy", n, 1.0f, 0.0f, 0), grad_twin_out(&g, "dx", n, n_chan)};
    grad_twin_run(&g, "conv", call_conv, &c);
}

START_TEST(conv) {
    static const int one[] = {1}, some[] = {5, 1, 3, 0, 4, 2}, tile[] = {32, 64}, off[] = {31, 2, 33, 7}, wide[] = {29, 8, 1};
    try_conv(one, 1, 0, 1, 0);
    try_conv(some, 6, 3, 130, GAP);
    try_conv(tile, 2, 0, 127, 0);
    try_conv(off, 4, 40, 128, 1);
    try_conv(wide, 3, 2, 12288, 0);
}
END_TEST

/* ---- kda_gate -------------------------------------------------------------------------------------------------------------------- */

static br_status call_gate(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    bi_grad_kda_gate_args a = *(const bi_grad_kda_gate_args *)context;
    a.f = AT(a.f), a.b = AT(a.b), a.a_log = AT(a.a_log), a.dt_bias = AT(a.dt_bias), a.da = AT(a.da), a.dbeta = AT(a.dbeta);
    a.df = AT(a.df), a.db = AT(a.db);
    return grad->op->kda_gate(grad->ctx, &a);
}

START_TEST(kda_gate) {
    static const int shape[][3] = {{1, 1, 1}, {7, 3, 33}, {9, 2, 256}, {12, 96, 128}};
    for (int i = 0; i < 8; i++) {
        const int n_row = shape[i / 2][0], n_head = shape[i / 2][1], d = shape[i / 2][2];
        const int64_t n_beta = (int64_t)n_row * n_head, n = n_beta * d;
        grad_twin_reset(&g);
        bi_grad_kda_gate_args a = {n_row, n_head, d, numbers("f", n, 3.0f, i % 3), numbers("b", n_beta, 2.0f, 0),
                                   floats("a_log", n_head, 0.7f, 0.0f, 0), floats("dt_bias", (int64_t)n_head * d, 1.0f, 0.0f, 0), i % 2, -5.0f,
                                   floats("da", n, 1.0f, 0.0f, 0), floats("dbeta", n_beta, 1.0f, 0.0f, 0), grad_twin_out(&g, "df", n, d),
                                   grad_twin_out(&g, "db", n_beta, n_head)};
        grad_twin_run(&g, "kda_gate", call_gate, &a);
    }
}
END_TEST

/* ---- kda ------------------------------------------------------------------------------------------------------------------------- */

typedef struct kda_case {
    twin_batch batch;
    bi_grad_kda_args args;
} kda_case;

static br_status call_kda(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    const kda_case *c = context;
    bi_grad_kda_args a = c->args;
    a.batch = &c->batch.side[side];
    a.q = AT(a.q), a.k = AT(a.k), a.v = AT(a.v), a.a = AT(a.a), a.beta = AT(a.beta), a.d_o = AT(a.d_o);
    a.dq = AT(a.dq), a.dk = AT(a.dk), a.dv = AT(a.dv), a.da = AT(a.da), a.dbeta = AT(a.dbeta);
    return grad->op->kda(grad->ctx, &a);
}

/* Decays between `least` and 1, some of them 0 and 1. */
static float *decays(int64_t n, float least) {
    float *a = TWIN_ARRAY(&g.t, float, "a", n);
    for (int64_t i = 0; i < n; i++) {
        const int pick = op_random_below(&rnd, 1000);
        a[i] = pick < 10 ? 0.0f : pick < 40 ? 1.0f : least + (1.0f - least) * 0.001f * (float)pick;
    }
    return a;
}

static void try_kda(const int *length, int n_seg, int n_pad, int n_head, int d, int gap, float least) {
    grad_twin_reset(&g);
    kda_case c = {.batch = batch_of(length, n_seg, n_pad)};
    const int64_t n_row = c.batch.side[0].n_row, n_beta = n_row * n_head, n = n_beta * d;
    const int ld = n_head * d + gap, off = gap % 2;
    const bi_bf16 *q = numbers("q", n_row * ld, 1.0f, off), *k = numbers("k", n_row * ld, 1.0f, off), *v = numbers("v", n_row * ld, 1.0f, off);
    const float *a = decays(n, least), *beta = floats("beta", n_beta, 0.15f, 0.5f, 0), *d_o = floats("do", n, 1.0f, 0.0f, 0);
    c.args = (bi_grad_kda_args){NULL, n_head, d, q, k, v, ld, a, beta, bi_const_kda_scale(d), d_o, NULL, NULL, NULL, NULL, NULL};
    c.args.dq = grad_twin_out(&g, "dq", n, d);
    c.args.dk = grad_twin_out(&g, "dk", n, d);
    c.args.dv = grad_twin_out(&g, "dv", n, d);
    c.args.da = grad_twin_out(&g, "da", n, d);
    c.args.dbeta = grad_twin_out(&g, "dbeta", n_beta, n_head);
    grad_twin_run(&g, "kda", call_kda, &c);
}

START_TEST(kda_of_any_width) {
    static const int one[] = {2}, some[] = {5, 1, 0, 37, 4}, longer[] = {70, 33, 32, 1};
    for (int d = 32; d <= 256; d += 32) {
        try_kda(one, 1, 0, 1, d, 0, 0.2f);
        try_kda(some, 5, 2, 2, d, GAP, 0.2f);
    }
    try_kda(longer, 4, 0, 2, 128, 0, 0.9f);
    try_kda(longer, 4, 3, 1, 64, 8, 0.9f);
}
END_TEST

/* Lengths around the groups and chunks that the states are kept by. */
START_TEST(kda_of_any_length) {
    static const int length[] = {2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 35, 36, 37, 63, 64, 65, 97};
    for (int i = 0; i < 17; i++)
        try_kda(&length[i], 1, 0, 1, i % 2 ? 128 : 32, 0, 0.8f);
    try_kda(length, 13, 1, 3, 128, 0, 0.5f);
}
END_TEST

/* More heads of segments than clusters run at a time, and than there are slots for. */
START_TEST(kda_of_many_segments) {
    int length[90];
    for (int i = 0; i < 90; i++)
        length[i] = i % 7 ? 1 + i % 5 : 9;
    try_kda(length, 90, 0, 1, 256, 0, 0.5f);
    try_kda(length, 60, 0, 4, 96, 0, 0.5f);
}
END_TEST

START_TEST(kda_at_real_size) {
    static const int length[] = {35, 6};
    try_kda(length, 2, 1, 96, 128, 0, 0.7f);
}
END_TEST

/* ---- kda_norm -------------------------------------------------------------------------------------------------------------------- */

static br_status call_kda_norm(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    bi_grad_kda_norm_args a = *(const bi_grad_kda_norm_args *)context;
    a.o = AT(a.o), a.w = AT(a.w), a.gate = AT(a.gate), a.dy = AT(a.dy), a.d_o = AT(a.d_o), a.dgate = AT(a.dgate);
    return grad->op->kda_norm(grad->ctx, &a);
}

START_TEST(kda_norm) {
    static const int shape[][3] = {{1, 1, 1}, {7, 3, 33}, {9, 2, 256}, {12, 96, 128}};
    for (int i = 0; i < 4; i++) {
        const int n_row = shape[i][0], n_head = shape[i][1], d = shape[i][2];
        const int64_t n = (int64_t)n_row * n_head * d;
        grad_twin_reset(&g);
        bi_grad_kda_norm_args a = {n_row, n_head, d, floats("o", n, 1.0f, 0.0f, i % 2), floats("w", d, 0.5f, 1.0f, 0),
                                   numbers("gate", n, 2.0f, i % 3), eps(d), floats("dy", n, 1.0f, 0.0f, 0), grad_twin_out(&g, "do", n, d),
                                   grad_twin_out(&g, "dgate", n, d)};
        grad_twin_run(&g, "kda_norm", call_kda_norm, &a);
    }
}
END_TEST

/* ---- attnres --------------------------------------------------------------------------------------------------------------------- */

static br_status call_attnres(const bi_grad *grad, const grad_twin *t, twin_side side, void *context) {
    bi_grad_attnres_args a = *(const bi_grad_attnres_args *)context;
    const bi_bf16 *bank[BR_BANK_MAX];
    float *dbank[BR_BANK_MAX];
    for (int i = 0; i < a.n_bank; i++) {
        bank[i] = AT(a.bank[i]);
        dbank[i] = AT(a.dbank[i]);
    }
    a.bank = bank, a.dbank = dbank, a.p = AT(a.p), a.w = AT(a.w), a.dy = AT(a.dy), a.dp = AT(a.dp);
    return grad->op->attnres(grad->ctx, &a);
}

START_TEST(attnres) {
    static const int shape[][3] = {{1, 1, 1}, {5, 33, 2}, {3, 256, BR_BANK_MAX}, {2, 1000, 7}, {4, 7168, 5}};
    for (int i = 0; i < 5; i++) {
        const int n_row = shape[i][0], d = shape[i][1], n_bank = shape[i][2];
        const int64_t n = (int64_t)n_row * d;
        const bi_bf16 *bank[BR_BANK_MAX];
        float *dbank[BR_BANK_MAX];
        grad_twin_reset(&g);
        for (int k = 0; k < n_bank; k++) {
            bank[k] = numbers("bank", n, 1.0f, k % 2);
            dbank[k] = k == 3 ? NULL : grad_twin_out(&g, "dbank", n, d); /* not wanted */
        }
        bi_grad_attnres_args a = {n_row, d, n_bank, bank, numbers("p", n, 1.0f, 0), floats("w", d, d > 100 ? 0.05f : 0.6f, 0.0f, 0), eps(d),
                                  floats("dy", n, 1.0f, 0.0f, 0), dbank, i == 3 ? NULL : grad_twin_out(&g, "dp", n, d)};
        grad_twin_run(&g, "attnres", call_attnres, &a);
    }
}
END_TEST

/* ---- errors ---------------------------------------------------------------------------------------------------------------------- */

START_TEST(refuses_wrong_shapes) {
    const bi_grad *cuda = &g.grad[TWIN_CUDA];
    bi_batch two = {.n_row = 2, .n_seg = 1}, many = {.n_row = 513, .n_seg = 1}, none = {0};
    CHECK_FAILS(cuda->op->rmsnorm(cuda->ctx, &(bi_grad_norm_args){.n_row = 1, .d = 8, .x_ld = 7}), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->conv(cuda->ctx, &(bi_grad_conv_args){.batch = &two, .n_chan = 8, .x_ld = 7}), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->kda_gate(cuda->ctx, &(bi_grad_kda_gate_args){.n_row = -1, .n_head = 1, .d = 1}), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->kda_norm(cuda->ctx, &(bi_grad_kda_norm_args){.n_row = 1, .n_head = 0, .d = 1}), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->attnres(cuda->ctx, &(bi_grad_attnres_args){.n_row = 1, .d = 8, .n_bank = 0}), BR_E_SHAPE);
#define KDA(b, h, width, stride) &(bi_grad_kda_args){.batch = (b), .n_head = (h), .d = (width), .ld = (stride)}
    CHECK_FAILS(cuda->op->kda(cuda->ctx, KDA(&two, 1, 48, 48)), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->kda(cuda->ctx, KDA(&two, 1, 288, 288)), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->kda(cuda->ctx, KDA(&two, 2, 32, 63)), BR_E_SHAPE);
    CHECK_FAILS(cuda->op->kda(cuda->ctx, KDA(&two, 97, 32, 97 * 32)), BR_E_LIMIT);
    CHECK_FAILS(cuda->op->kda(cuda->ctx, KDA(&many, 1, 32, 32)), BR_E_LIMIT);
    CHECK_OK(cuda->op->kda(cuda->ctx, KDA(&none, 1, 32, 32)));
}
END_TEST

Suite *cuda_grad_kda_suite(void) {
    Suite *suite = suite_create("grad_kda");
    CUDA_CASE_IN(suite, rmsnorm, setup, teardown);
    CUDA_CASE_IN(suite, conv, setup, teardown);
    CUDA_CASE_IN(suite, kda_gate, setup, teardown);
    CUDA_CASE_IN(suite, kda_of_any_width, setup, teardown);
    CUDA_CASE_IN(suite, kda_of_any_length, setup, teardown);
    CUDA_CASE_IN(suite, kda_of_many_segments, setup, teardown);
    CUDA_CASE_IN(suite, kda_at_real_size, setup, teardown);
    CUDA_CASE_IN(suite, kda_norm, setup, teardown);
    CUDA_CASE_IN(suite, attnres, setup, teardown);
    CUDA_CASE_IN(suite, refuses_wrong_shapes, setup, teardown);
    return suite;
}
