/* Gradients of linear, glu and combine, host form: against central differences of the ops written down in binary64, with
 * mixed adapters, base rows, heads and ragged shapes; the same bytes at any thread count; errors. */
#include "grad_bound.h"
#include "grad_check.h"
#include "test_support.h"

#include "bi_grad.h"
#include "br_mem.h"

#include <math.h>
#include <string.h>

enum { THREADS_MAX = 3, PROBES = 24, SLOT_MAX = 3 };

static const int thread_counts[THREADS_MAX] = {1, 2, 5};

static void *take(size_t bytes) {
    void *block;
    CHECK_OK(br_mem_alloc(&block, bytes, "a gradient test"));
    return block;
}
#define TAKE(type, count) ((type *)take(sizeof(type) * (size_t)(count)))

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

/* An output: poisoned, every element must be written. */
static float *output(int n) {
    float *x = TAKE(float, n);
    memset(x, 0xff, sizeof *x * (size_t)n);
    return x;
}

static void check_same(const char *what, const float *x, const float *y, int n) {
    ck_assert_msg(memcmp(x, y, sizeof *x * (size_t)n) == 0, "%s: the bytes depend on threads, on what else is wanted or on rows of others", what);
}

static void check_zeros(const char *what, const float *x, int n) {
    for (int i = 0; i < n; i++)
        ck_assert_msg(x[i] == 0.0f, "%s[%d] is %g: expected 0", what, i, (double)x[i]);
}

/* ---- linear ---------------------------------------------------------------------------------------------------------- */

typedef struct linear_case {
    int n_row, n_head, n_in, n_out, n_slot, rank[SLOT_MAX]; /* rank 0: the slot leaves the map alone */
    int idle;                                               /* the slot that no row has; -1: none */
} linear_case;

typedef struct low_rank {
    bi_bf16 *a, *b;
    float *s, *da, *db;
    double *wide_a, *wide_b;
} low_rank;

/* Rows of x, dy and dx have a gap behind each head and each row. */
typedef struct linear_data {
    const linear_case *c;
    bi_bf16 *x, *w;
    float *dy, *dx;
    int32_t *row_slot;
    double *wide_x, *wide_w, *wide_dy;
    low_rank low[SLOT_MAX];
    bi_mat mat;
    bi_adapter adapter[SLOT_MAX];
} linear_data;

static int head_step(int n) { return n + 3; }
static int row_step(const linear_case *c, int n) { return c->n_head * head_step(n) + 5; }

static double loss_linear(void *context) {
    const linear_data *l = context;
    const linear_case *c = l->c;
    double loss = 0;
    for (int t = 0; t < c->n_row; t++)
        for (int h = 0; h < c->n_head; h++) {
            const double *x = l->wide_x + t * row_step(c, c->n_in) + h * head_step(c->n_in);
            const int slot = l->row_slot[t], rank = slot >= 0 ? c->rank[slot] : 0;
            double low[64] = {0};
            for (int r = 0; r < rank; r++)
                for (int k = 0; k < c->n_in; k++)
                    low[r] += (double)l->low[slot].s[h] * l->low[slot].wide_a[(h * rank + r) * c->n_in + k] * x[k];
            for (int o = 0; o < c->n_out; o++) {
                double y = 0;
                for (int k = 0; k < c->n_in; k++)
                    y += l->wide_w[(h * c->n_out + o) * c->n_in + k] * x[k];
                for (int r = 0; r < rank; r++)
                    y += l->low[slot].wide_b[(h * c->n_out + o) * rank + r] * low[r];
                loss += y * l->wide_dy[t * row_step(c, c->n_out) + h * head_step(c->n_out) + o];
            }
        }
    return loss;
}

static void make_linear(op_rig *rig, op_random *random, const linear_case *c, linear_data *l) {
    const int n_x = c->n_row * row_step(c, c->n_in), n_dy = c->n_row * row_step(c, c->n_out), n_w = c->n_head * c->n_out * c->n_in;
    memset(l, 0, sizeof *l);
    l->c = c;
    l->x = random_bf16(random, 1.0f, n_x);
    l->w = random_bf16(random, 0.3f, n_w);
    l->dy = random_f32(random, 1.0f, n_dy);
    l->dx = output(n_x);
    l->row_slot = TAKE(int32_t, c->n_row);
    for (int t = 0; t < c->n_row; t++)
        do
            l->row_slot[t] = op_random_below(random, c->n_slot + 1) - 1;
        while (c->n_slot && l->row_slot[t] == c->idle && c->idle >= 0);
    l->wide_x = widened(l->x, n_x);
    l->wide_w = widened(l->w, n_w);
    l->wide_dy = doubled(l->dy, n_dy);
    l->mat = op_rig_stack(rig, l->w, c->n_head, c->n_out, c->n_in);
    for (int i = 0; i < c->n_slot; i++) {
        const int n_a = c->n_head * c->rank[i] * c->n_in, n_b = c->n_head * c->n_out * c->rank[i];
        low_rank *low = &l->low[i];
        if (!c->rank[i])
            continue;
        low->a = random_bf16(random, 0.3f, n_a);
        low->b = random_bf16(random, 0.3f, n_b);
        low->s = random_f32(random, 1.5f, c->n_head);
        low->wide_a = widened(low->a, n_a);
        low->wide_b = widened(low->b, n_b);
        low->da = output(n_a);
        low->db = output(n_b);
        l->adapter[i] = (bi_adapter){op_rig_stack(rig, low->a, c->n_head, c->rank[i], c->n_in),
                                     op_rig_stack(rig, low->b, c->n_head, c->n_out, c->rank[i]), low->s};
    }
}

static bi_grad_linear_args linear_args(const linear_data *l, bi_grad_adapter want[SLOT_MAX]) {
    const linear_case *c = l->c;
    bi_grad_linear_args a = {.n_row = c->n_row, .n_head = c->n_head, .x = l->x, .x_ld = row_step(c, c->n_in), .x_head_ld = head_step(c->n_in),
                             .w = l->mat, .dy = l->dy, .dy_ld = row_step(c, c->n_out), .dy_head_ld = head_step(c->n_out), .dx = l->dx,
                             .dx_ld = row_step(c, c->n_in), .dx_head_ld = head_step(c->n_in)};
    for (int i = 0; i < c->n_slot; i++)
        want[i] = (bi_grad_adapter){l->low[i].da, l->low[i].db};
    if (c->n_slot) {
        a.lora = (bi_lora){l->adapter, c->n_slot, l->row_slot};
        a.slot = want;
    }
    return a;
}

static void check_linear(linear_data *l) {
    const linear_case *c = l->c;
    for (int t = 0; t < c->n_row; t += 1 + c->n_row / 4)
        for (int h = 0; h < c->n_head; h++) {
            const int at = t * row_step(c, c->n_in) + h * head_step(c->n_in);
            grad_check("dx of linear", loss_linear, l, l->wide_x + at, c->n_in, l->dx + at, 6);
            ck_assert_msg(isnan(l->dx[at + c->n_in]), "linear wrote behind a row of dx");
        }
    for (int i = 0; i < c->n_slot; i++) {
        const int n_a = c->n_head * c->rank[i] * c->n_in, n_b = c->n_head * c->n_out * c->rank[i];
        int used = 0;
        for (int t = 0; t < c->n_row; t++)
            used |= l->row_slot[t] == i;
        if (!used) {
            check_zeros("da of an idle adapter", l->low[i].da, n_a);
            check_zeros("db of an idle adapter", l->low[i].db, n_b);
        } else if (c->rank[i]) {
            grad_check("da of linear", loss_linear, l, l->low[i].wide_a, n_a, l->low[i].da, PROBES);
            grad_check("db of linear", loss_linear, l, l->low[i].wide_b, n_b, l->low[i].db, PROBES);
        }
    }
}

static void free_linear(linear_data *l) {
    void *const all[] = {l->x, l->w, l->dy, l->dx, l->row_slot, l->wide_x, l->wide_w, l->wide_dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        br_mem_free(all[i]);
    for (int i = 0; i < SLOT_MAX; i++) {
        void *const low[] = {l->low[i].a, l->low[i].b, l->low[i].s, l->low[i].da, l->low[i].db, l->low[i].wide_a, l->low[i].wide_b};
        for (size_t k = 0; k < sizeof low / sizeof low[0]; k++)
            br_mem_free(low[k]);
    }
}

static const bi_limits limits = {.n_row = 140, .d_in = 140, .d_out = 140, .rank = 48, .n_slot = SLOT_MAX, .n_head = 2, .n_expert = 6,
                                 .n_expert_topk = 4, .d_expert = 96, .d_expert_ff = 96};

static const linear_case linear_cases[] = {
    {1, 1, 5, 3, 1, {1}, -1},           {7, 1, 40, 70, 2, {8, 3}, -1},  {66, 1, 33, 65, 2, {16, 5}, -1}, {5, 3, 20, 17, 3, {5, 0, 40}, -1},
    {3, 1, 64, 64, 0, {0}, -1},         {130, 1, 16, 32, 3, {3, 48, 2}, 2}, {4, 2, 131, 129, 1, {33}, -1},
};

START_TEST(linear_is_differentiated) {
    op_rig rig;
    op_random random = {test_seed(), (uint64_t)_i};
    bi_grad grad;
    linear_data l;
    bi_grad_adapter want[SLOT_MAX];
    op_rig_open(&rig, &limits, NULL, 2);
    CHECK_OK(bi_grad_host_open(&limits, rig.pool, &grad));
    make_linear(&rig, &random, &linear_cases[_i], &l);
    bi_grad_linear_args a = linear_args(&l, want);
    CHECK_OK(grad.op->linear(grad.ctx, &a));
    check_linear(&l);
    free_linear(&l);
    bi_grad_close(&grad);
    op_rig_close(&rig);
}
END_TEST

/* Each output by itself, at each thread count. */
START_TEST(linear_keeps_its_bytes) {
    op_rig rig;
    op_random random = {test_seed(), 50 + (uint64_t)_i};
    linear_data l;
    bi_grad_adapter want[SLOT_MAX];
    op_rig_open(&rig, &limits, NULL, 1);
    make_linear(&rig, &random, &linear_cases[_i], &l);
    const linear_case *c = l.c;
    const int n_x = c->n_row * row_step(c, c->n_in);
    float *const first = output(n_x);
    for (int n = 0; n < THREADS_MAX; n++) {
        br_pool *pool;
        bi_grad grad;
        CHECK_OK(br_pool_open(thread_counts[n], &pool));
        CHECK_OK(bi_grad_host_open(&limits, pool, &grad));
        bi_grad_linear_args a = linear_args(&l, want);
        if (n == 0) {
            CHECK_OK(grad.op->linear(grad.ctx, &a));
            memcpy(first, l.dx, sizeof *first * (size_t)n_x);
        } else {
            memset(l.dx, 0xff, sizeof *first * (size_t)n_x);
            a.slot = NULL;
            CHECK_OK(grad.op->linear(grad.ctx, &a));
            check_same("dx", l.dx, first, n_x);
        }
        for (int i = 0; n > 0 && i < 2 * c->n_slot; i++) {
            const int n_value = c->n_head * c->rank[i / 2] * (i % 2 ? c->n_out : c->n_in);
            float *const again = output(n_value), *const once = i % 2 ? l.low[i / 2].db : l.low[i / 2].da;
            bi_grad_adapter one[SLOT_MAX] = {{NULL, NULL}};
            if (c->rank[i / 2])
                *(i % 2 ? &one[i / 2].db : &one[i / 2].da) = again;
            a.dx = NULL;
            a.slot = one;
            CHECK_OK(grad.op->linear(grad.ctx, &a));
            check_same("da or db", again, once ? once : again, n_value);
            br_mem_free(again);
        }
        bi_grad_close(&grad);
        br_pool_close(pool);
    }
    br_mem_free(first);
    free_linear(&l);
    op_rig_close(&rig);
}
END_TEST

/* NaN in x and dy of every row of another slot, or of none. */
START_TEST(linear_leaves_out_rows_of_other_slots) {
    static const linear_case c = {66, 2, 33, 65, 2, {16, 5}, -1};
    const int n_a = c.n_head * c.rank[0] * c.n_in, n_b = c.n_head * c.n_out * c.rank[0];
    op_rig rig;
    op_random random = {test_seed(), 80};
    bi_grad grad;
    linear_data l;
    bi_grad_adapter want[SLOT_MAX] = {{NULL, NULL}};
    op_rig_open(&rig, &limits, NULL, 2);
    CHECK_OK(bi_grad_host_open(&limits, rig.pool, &grad));
    make_linear(&rig, &random, &c, &l);
    bi_grad_linear_args a = linear_args(&l, want);
    CHECK_OK(grad.op->linear(grad.ctx, &a));
    float *const da = output(n_a), *const db = output(n_b);
    for (int t = 0; t < c.n_row; t++)
        if (l.row_slot[t] != 0) {
            memset(l.x + t * row_step(&c, c.n_in), 0xff, sizeof *l.x * (size_t)row_step(&c, c.n_in));
            memset(l.dy + t * row_step(&c, c.n_out), 0xff, sizeof *l.dy * (size_t)row_step(&c, c.n_out));
        }
    want[0] = (bi_grad_adapter){da, db};
    CHECK_OK(grad.op->linear(grad.ctx, &a));
    check_same("da", da, l.low[0].da, n_a);
    check_same("db", db, l.low[0].db, n_b);
    br_mem_free(da);
    br_mem_free(db);
    free_linear(&l);
    bi_grad_close(&grad);
    op_rig_close(&rig);
}
END_TEST

START_TEST(linear_refuses_wrong_arguments) {
    op_rig rig;
    op_random random = {test_seed(), 90};
    bi_grad grad;
    linear_data l;
    bi_grad_adapter want[SLOT_MAX];
    op_rig_open(&rig, &limits, NULL, 1);
    CHECK_OK(bi_grad_host_open(&limits, rig.pool, &grad));
    make_linear(&rig, &random, &linear_cases[1], &l);
    const bi_grad_linear_args good = linear_args(&l, want);
    bi_grad_linear_args a = good;
    a.n_row = -1;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_SHAPE);
    a = good, a.n_head = 0;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_SHAPE);
    a = good, a.n_row = limits.n_row + 1;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_LIMIT);
    a = good, a.w.n_in++;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_SHAPE);
    a = good, a.w.data = NULL;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_SHAPE);
    a = good, a.w.n_out = limits.d_out + 1;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_LIMIT);
    a = good, a.lora.slot = NULL;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_ARG);
    l.adapter[0].a.n_out = l.adapter[0].b.n_in = 49;
    CHECK_FAILS(grad.op->linear(grad.ctx, &good), BR_E_LIMIT);
    l.adapter[0].a.n_out = 8;
    CHECK_FAILS(grad.op->linear(grad.ctx, &good), BR_E_SHAPE);
    l.adapter[0].b.n_in = 8;
    l.adapter[1].a.data = NULL;
    CHECK_FAILS(grad.op->linear(grad.ctx, &good), BR_E_ARG);
    l.row_slot[2] = 2;
    a = good, a.slot = NULL;
    CHECK_FAILS(grad.op->linear(grad.ctx, &a), BR_E_SHAPE);
    for (int i = 0; i < l.c->n_row * row_step(l.c, l.c->n_in); i++)
        ck_assert(isnan(l.dx[i]));
    free_linear(&l);
    bi_grad_close(&grad);
    op_rig_close(&rig);
}
END_TEST

/* ---- glu and combine ------------------------------------------------------------------------------------------------- */

static double act_of(const bi_act *act, double g, double u) {
    const double sigmoid = 1 / (1 + exp(-g)), beta = (double)act->beta, linear = (double)act->linear_beta;
    return act->situ ? beta * tanh(g / beta) * sigmoid * (linear * tanh(u / linear)) : g * sigmoid * u;
}

typedef struct glu_data {
    int n_row, d, ld;
    bi_act act;
    double *g, *u, *dy;
} glu_data;

static double loss_glu(void *context) {
    const glu_data *l = context;
    double loss = 0;
    for (int t = 0; t < l->n_row; t++)
        for (int i = 0; i < l->d; i++)
            loss += l->dy[t * l->d + i] * act_of(&l->act, l->g[t * l->ld + i], l->u[t * l->ld + i]);
    return loss;
}

static const bi_act acts[] = {{1, 4.0f, 25.0f}, {1, 3.0f, 7.0f}, {0, 0.0f, 0.0f}};

START_TEST(glu_is_differentiated) {
    static const int shape[3][3] = {{1, 1, 1}, {5, 33, 40}, {3, 100, 100}};
    for (int s = 0; s < 3; s++)
        for (int n = 0; n < THREADS_MAX; n++) {
            op_random random = {test_seed(), 100 + (uint64_t)s};
            br_pool *pool;
            bi_grad grad;
            const int n_row = shape[s][0], d = shape[s][1], ld = shape[s][2];
            float *g = random_f32(&random, 3.0f, n_row * ld), *u = random_f32(&random, 3.0f, n_row * ld), *dy = random_f32(&random, 1.0f, n_row * d);
            float *dg = output(n_row * d), *du = output(n_row * d);
            CHECK_OK(br_pool_open(thread_counts[n], &pool));
            CHECK_OK(bi_grad_host_open(&limits, pool, &grad));
            bi_grad_glu_args a = {n_row, d, g, u, ld, acts[_i], dy, dg, du};
            CHECK_OK(grad.op->glu(grad.ctx, &a));
            glu_data l = {n_row, d, ld, acts[_i], doubled(g, n_row * ld), doubled(u, n_row * ld), doubled(dy, n_row * d)};
            for (int t = 0; t < n_row; t++) {
                grad_check("dg", loss_glu, &l, l.g + t * ld, d, dg + t * d, PROBES);
                grad_check("du", loss_glu, &l, l.u + t * ld, d, du + t * d, PROBES);
            }
            a.ld = d - 1;
            CHECK_FAILS(grad.op->glu(grad.ctx, &a), BR_E_SHAPE);
            void *const all[] = {g, u, dy, dg, du, l.g, l.u, l.dy};
            for (int i = 0; i < 8; i++)
                br_mem_free(all[i]);
            bi_grad_close(&grad);
            br_pool_close(pool);
        }
}
END_TEST

typedef struct combine_data {
    int n_row, d, topk;
    double *e, *p, *dy;
} combine_data;

static double loss_combine(void *context) {
    const combine_data *l = context;
    double loss = 0;
    for (int t = 0; t < l->n_row; t++)
        for (int i = 0; i < l->topk; i++)
            for (int c = 0; c < l->d; c++)
                loss += l->dy[t * l->d + c] * l->p[t * l->topk + i] * l->e[(t * l->topk + i) * l->d + c];
    return loss;
}

START_TEST(combine_is_differentiated) {
    static const int shape[3][3] = {{1, 1, 1}, {5, 33, 3}, {9, 70, 4}};
    const int n_row = shape[_i][0], d = shape[_i][1], topk = shape[_i][2], n_pair = n_row * topk;
    op_random random = {test_seed(), 120 + (uint64_t)_i};
    br_pool *pool;
    bi_grad grad;
    bi_bf16 *e = random_bf16(&random, 1.0f, n_pair * d);
    float *p = random_f32(&random, 1.0f, n_pair), *dy = random_f32(&random, 1.0f, n_row * d), *de = output(n_pair * d), *dp = output(n_pair);
    CHECK_OK(br_pool_open(2, &pool));
    CHECK_OK(bi_grad_host_open(&limits, pool, &grad));
    bi_grad_combine_args a = {n_row, d, topk, e, p, dy, de, dp};
    CHECK_OK(grad.op->combine(grad.ctx, &a));
    combine_data l = {n_row, d, topk, widened(e, n_pair * d), doubled(p, n_pair), doubled(dy, n_row * d)};
    grad_check("de", loss_combine, &l, l.e, n_pair * d, de, 50);
    grad_check("dp", loss_combine, &l, l.p, n_pair, dp, 50);
    a.topk = 0;
    CHECK_FAILS(grad.op->combine(grad.ctx, &a), BR_E_SHAPE);
    void *const all[] = {e, p, dy, de, dp, l.e, l.p, l.dy};
    for (int i = 0; i < 8; i++)
        br_mem_free(all[i]);
    bi_grad_close(&grad);
    br_pool_close(pool);
}
END_TEST

/* ---- the bound on elements that the GPU's gradients are held to ---------------------------------------------------------------------- */

/* out (n, width) = a^T b over n_term terms; a (n_term, n), b (n_term, width); rounded: both factors to bf16. */
static void outer_sum(const float *a, const float *b, int n_term, int n, int width, int rounded, float *out) {
    for (int i = 0; i < n * width; i++) {
        double sum = 0;
        for (int t = 0; t < n_term; t++) {
            const float x = a[t * n + i / width], y = b[t * width + i % width];
            sum += rounded ? (double)bi_widen(bi_round(x)) * bi_widen(bi_round(y)) : (double)x * y;
        }
        out[i] = (float)sum;
    }
}

/* The largest of the row: what a wrong element of a large gradient is. */
static int largest_of(const float *row, int width) {
    int at = 0;
    for (int c = 1; c < width; c++)
        at = fabsf(row[c]) > fabsf(row[at]) ? c : at;
    return at;
}

/* Both factors rounded, of one term to many; then one element is wrong: missing, twice itself, or of the other sign. */
START_TEST(bound_takes_roundings_and_no_wrong_element) {
    static const int shape[][3] = {{1, 900, 32}, {1, 32, 900}, {2, 48, 700}, {3, 200, 200}, {64, 300, 32}, {64, 1, 700}, {500, 100, 60}, {1, 2, 1}};
    const int n_term = shape[_i][0], n = shape[_i][1], width = shape[_i][2], all = n * width;
    op_random random = {test_seed(), 140 + (uint64_t)_i};
    float *a = random_f32(&random, 1.0f, n_term * n), *b = random_f32(&random, 1.0f, n_term * width), *largest = output(width);
    float *exact = output(all), *found = output(all);
    outer_sum(a, b, n_term, n, width, 0, exact);
    outer_sum(a, b, n_term, n, width, 1, found);
    ck_assert_int_eq(grad_bound_first(exact, found, n, width, largest), all);
    for (int c = 0; c < width; c++) { /* a row far larger than the others */
        exact[all - width + c] *= 1024.0f;
        found[all - width + c] *= 1024.0f;
    }
    ck_assert_int_eq(grad_bound_first(exact, found, n, width, largest), all);
    for (int i = 0; i < 3; i++) {
        const int at = all - width + largest_of(exact + all - width, width);
        const float kept = found[at];
        found[at] = i == 0 ? 0.0f : i == 1 ? 2 * kept : -kept;
        ck_assert_int_eq(grad_bound_first(exact, found, n, width, largest), at);
        found[at] = kept;
    }
    for (int row = 0; row < n - 1; row++) { /* among rows of one size */
        const int at = row * width + largest_of(exact + row * width, width);
        const float kept = found[at];
        found[at] = 0.0f;
        const int seen = grad_bound_first(exact, found, n - 1, width, largest) == at;
        ck_assert_msg(seen || fabsf(exact[at]) < 0.05f * largest[at % width], "row %d", row);
        found[at] = kept;
    }
    found[all - 1] = NAN;
    ck_assert_int_eq(grad_bound_first(exact, found, n, width, largest), all - 1);
    float *const block[] = {a, b, largest, exact, found};
    for (int i = 0; i < 5; i++)
        br_mem_free(block[i]);
}
END_TEST

Suite *test_grad_dense_suite(void) {
    Suite *suite = suite_create("grad_dense");
    TCase *tcase = tcase_create("linear, glu, combine");
    const int n_linear = (int)(sizeof linear_cases / sizeof linear_cases[0]);
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, linear_is_differentiated, 0, n_linear);
    tcase_add_loop_test(tcase, linear_keeps_its_bytes, 0, n_linear);
    tcase_add_test(tcase, linear_leaves_out_rows_of_other_slots);
    tcase_add_test(tcase, linear_refuses_wrong_arguments);
    tcase_add_loop_test(tcase, glu_is_differentiated, 0, 3);
    tcase_add_loop_test(tcase, combine_is_differentiated, 0, 3);
    tcase_add_loop_test(tcase, bound_takes_roundings_and_no_wrong_element, 0, 8);
    suite_add_tcase(suite, tcase);
    return suite;
}
