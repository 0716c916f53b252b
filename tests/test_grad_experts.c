/* Gradients of the routed experts, host form: against central differences of the op written down in binary64, bf16 and MXFP4
 * experts, mixed adapters, idle experts; the same bytes at any thread count; errors. */
#include "grad_check.h"
#include "test_support.h"

#include "bi_grad.h"
#include "br_mem.h"

#include <math.h>
#include <string.h>

enum { ROW_MAX = 80, D_MAX = 64, EXPERT_MAX = 5, TOPK_MAX = 3, SLOT_MAX = 2, RANK_MAX = 33, PAIR_MAX = ROW_MAX * TOPK_MAX, PROBES = 20 };

static const int thread_counts[] = {1, 2, 5};
static const bi_limits limits = {.n_row = ROW_MAX, .rank = RANK_MAX, .n_slot = SLOT_MAX, .n_expert = EXPERT_MAX, .n_expert_topk = TOPK_MAX,
                                 .d_expert = D_MAX, .d_expert_ff = D_MAX};

typedef struct experts_case {
    int n_row, d, d_ff, n_expert, topk, n_slot, rank, fp4;
    bi_act act;
    int idle; /* the last expert is never chosen */
} experts_case;

/* Map 0 is w1, 1 is w3, 2 is w2. Adapter (map, slot) has rank - slot; (1, 1) is absent. */
typedef struct experts_data {
    experts_case c;
    double x[ROW_MAX * D_MAX], dy[PAIR_MAX * D_MAX];
    double w[3][EXPERT_MAX * D_MAX * D_MAX], a[3][SLOT_MAX][EXPERT_MAX * RANK_MAX * D_MAX], b[3][SLOT_MAX][EXPERT_MAX * RANK_MAX * D_MAX];
    float s[3][SLOT_MAX][EXPERT_MAX];
    bi_bf16 x_low[ROW_MAX * D_MAX];
    float dy_f[PAIR_MAX * D_MAX];
    int32_t expert[PAIR_MAX], row_slot[ROW_MAX];
    bi_mat mat[3];
    bi_adapter lora[3][SLOT_MAX];
} experts_data;

typedef struct experts_out {
    float dx[ROW_MAX * D_MAX], da[3][SLOT_MAX][EXPERT_MAX * RANK_MAX * D_MAX], db[3][SLOT_MAX][EXPERT_MAX * RANK_MAX * D_MAX];
} experts_out;

static int n_in_of(const experts_case *c, int map) { return map == 2 ? c->d_ff : c->d; }
static int n_out_of(const experts_case *c, int map) { return map == 2 ? c->d : c->d_ff; }
static int rank_of(const experts_case *c, int map, int slot) { return slot < 0 || (map == 1 && slot == 1) ? 0 : c->rank - slot; }

/* y = W x + s B A x of one expert's map. */
static void apply(const experts_data *l, int map, int slot, int e, const double *x, double *y) {
    const experts_case *c = &l->c;
    const int n_in = n_in_of(c, map), n_out = n_out_of(c, map), rank = c->n_slot ? rank_of(c, map, slot) : 0;
    double low[RANK_MAX] = {0};
    for (int r = 0; r < rank; r++)
        for (int k = 0; k < n_in; k++)
            low[r] += (double)l->s[map][slot][e] * l->a[map][slot][(e * rank + r) * n_in + k] * x[k];
    for (int o = 0; o < n_out; o++) {
        y[o] = 0;
        for (int k = 0; k < n_in; k++)
            y[o] += l->w[map][(e * n_out + o) * n_in + k] * x[k];
        for (int r = 0; r < rank; r++)
            y[o] += l->b[map][slot][(e * n_out + o) * rank + r] * low[r];
    }
}

static double loss_experts(void *context) {
    const experts_data *l = context;
    const experts_case *c = &l->c;
    double loss = 0, g[D_MAX], u[D_MAX], h[D_MAX], y[D_MAX];
    for (int pair = 0; pair < c->n_row * c->topk; pair++) {
        const int t = pair / c->topk, e = l->expert[pair], slot = c->n_slot ? l->row_slot[t] : -1;
        apply(l, 0, slot, e, l->x + t * c->d, g);
        apply(l, 1, slot, e, l->x + t * c->d, u);
        for (int i = 0; i < c->d_ff; i++) {
            const double sigmoid = 1 / (1 + exp(-g[i])), beta = (double)c->act.beta, linear = (double)c->act.linear_beta;
            h[i] = c->act.situ ? beta * tanh(g[i] / beta) * sigmoid * linear * tanh(u[i] / linear) : g[i] * sigmoid * u[i];
        }
        apply(l, 2, slot, e, h, y);
        for (int i = 0; i < c->d; i++)
            loss += y[i] * l->dy[pair * c->d + i];
    }
    return loss;
}

static void make_map(op_rig *rig, op_random *random, experts_data *l, int map) {
    static bi_bf16 w[EXPERT_MAX * D_MAX * D_MAX];
    static uint8_t code[EXPERT_MAX * D_MAX * D_MAX / 2], scale[EXPERT_MAX * D_MAX * D_MAX / 32];
    const experts_case *c = &l->c;
    const int n_in = n_in_of(c, map), n_out = n_out_of(c, map), n = c->n_expert * n_out * n_in;
    op_random_bf16s(random, 0.3f, w, n);
    for (int i = 0; c->fp4 && i < n; i++) {
        if (i % 32 == 0)
            scale[i / 32] = (uint8_t)(122 + op_random_below(random, 4));
        if (i % 2 == 0)
            code[i / 2] = (uint8_t)op_random_below(random, 256);
        w[i] = bi_fp4_to_bf16(i % 2 ? code[i / 2] >> 4 : code[i / 2] & 15, scale[i / 32]);
    }
    grad_widen(w, n, l->w[map]);
    l->mat[map] = c->fp4 ? op_rig_stack_fp4(rig, code, scale, c->n_expert, n_out, n_in) : op_rig_stack(rig, w, c->n_expert, n_out, n_in);
}

static void make_adapter(op_rig *rig, op_random *random, experts_data *l, int map, int slot) {
    static bi_bf16 a[EXPERT_MAX * RANK_MAX * D_MAX], b[EXPERT_MAX * RANK_MAX * D_MAX];
    const experts_case *c = &l->c;
    const int rank = rank_of(c, map, slot), n_a = c->n_expert * rank * n_in_of(c, map), n_b = c->n_expert * rank * n_out_of(c, map);
    if (!rank)
        return;
    op_random_bf16s(random, 0.3f, a, n_a);
    op_random_bf16s(random, 0.3f, b, n_b);
    op_random_normals(random, 1.0f, l->s[map][slot], c->n_expert);
    grad_widen(a, n_a, l->a[map][slot]);
    grad_widen(b, n_b, l->b[map][slot]);
    l->lora[map][slot] = (bi_adapter){op_rig_stack(rig, a, c->n_expert, rank, n_in_of(c, map)),
                                      op_rig_stack(rig, b, c->n_expert, n_out_of(c, map), rank), l->s[map][slot]};
}

static void make_case(op_rig *rig, op_random *random, const experts_case *c, experts_data *l) {
    memset(l, 0, sizeof *l);
    l->c = *c;
    op_random_bf16s(random, 1.0f, l->x_low, c->n_row * c->d);
    op_random_normals(random, 1.0f, l->dy_f, c->n_row * c->topk * c->d);
    grad_widen(l->x_low, c->n_row * c->d, l->x);
    grad_doubles(l->dy_f, c->n_row * c->topk * c->d, l->dy);
    for (int t = 0; t < c->n_row; t++) {
        int order[EXPERT_MAX], n = 0;
        char taken[EXPERT_MAX] = {0};
        op_random_order(random, order, c->n_expert - c->idle);
        for (int i = 0; i < c->topk; i++)
            taken[order[i]] = 1;
        for (int e = 0; e < c->n_expert; e++)
            if (taken[e])
                l->expert[t * c->topk + n++] = e;
        l->row_slot[t] = op_random_below(random, c->n_slot + 1) - 1;
    }
    for (int m = 0; m < 3; m++) {
        make_map(rig, random, l, m);
        for (int slot = 0; slot < c->n_slot; slot++)
            make_adapter(rig, random, l, m, slot);
    }
}

/* want: 1 dx, 2 adapters, 3 both. */
static br_status differentiate(const bi_grad *grad, const experts_data *l, experts_out *out, int want) {
    const experts_case *c = &l->c;
    bi_grad_adapter slot[3][SLOT_MAX] = {{{NULL, NULL}}};
    bi_grad_experts_args a = {.n_row = c->n_row, .d = c->d, .d_ff = c->d_ff, .n_expert = c->n_expert, .topk = c->topk, .x = l->x_low,
                              .expert = l->expert, .w1 = l->mat[0], .w3 = l->mat[1], .w2 = l->mat[2], .act = c->act, .dy = l->dy_f};
    memset(out, 0xff, sizeof *out);
    a.dx = want & 1 ? out->dx : NULL;
    if (c->n_slot) {
        a.lora1 = l->lora[0];
        a.lora3 = l->lora[1];
        a.lora2 = l->lora[2];
        a.n_slot = c->n_slot;
        a.row_slot = l->row_slot;
        for (int m = 0; m < 3; m++)
            for (int i = 0; i < c->n_slot; i++)
                if (l->lora[m][i].a.data)
                    slot[m][i] = (bi_grad_adapter){out->da[m][i], out->db[m][i]};
        a.slot1 = want & 2 ? slot[0] : NULL;
        a.slot3 = want & 2 ? slot[1] : NULL;
        a.slot2 = want & 2 ? slot[2] : NULL;
    }
    return grad->op->experts(grad->ctx, &a);
}

static const experts_case cases[] = {
    {1, 3, 2, 2, 1, 1, 1, 0, {1, 4.0f, 25.0f}, 0},
    {9, 20, 33, 5, 3, 2, 5, 0, {1, 3.0f, 7.0f}, 0},
    {6, 64, 32, 4, 2, 2, 33, 1, {1, 4.0f, 25.0f}, 1},
    {80, 5, 4, 2, 2, 2, 3, 0, {0, 0.0f, 0.0f}, 0}, /* 80 pairs an expert: more than a tile */
    {7, 32, 64, 5, 3, 0, 0, 1, {0, 0.0f, 0.0f}, 1},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static void check_case(experts_data *l, const experts_out *out) {
    const experts_case *c = &l->c;
    for (int t = 0; t < c->n_row; t += 1 + c->n_row / 5)
        grad_check("dx of experts", loss_experts, l, l->x + t * c->d, c->d, out->dx + t * c->d, 6);
    for (int m = 0; m < 3; m++)
        for (int slot = 0; slot < c->n_slot; slot++) {
            const int rank = rank_of(c, m, slot), n_a = rank * n_in_of(c, m), n_b = rank * n_out_of(c, m);
            int used = 0;
            for (int t = 0; t < c->n_row; t++)
                used |= l->row_slot[t] == slot;
            if (used && rank) {
                grad_check("da of experts", loss_experts, l, l->a[m][slot], c->n_expert * n_a, out->da[m][slot], PROBES);
                grad_check("db of experts", loss_experts, l, l->b[m][slot], c->n_expert * n_b, out->db[m][slot], PROBES);
            }
            for (int i = 0; rank && c->idle && i < n_a; i++)
                ck_assert_msg(out->da[m][slot][(c->n_expert - 1) * n_a + i] == 0.0f, "da of an idle expert is not 0");
            for (int i = 0; rank && c->idle && i < n_b; i++)
                ck_assert_msg(out->db[m][slot][(c->n_expert - 1) * n_b + i] == 0.0f, "db of an idle expert is not 0");
        }
}

static experts_data data;
static experts_out first, again;

START_TEST(experts_are_differentiated) {
    op_rig rig;
    op_random random = {test_seed(), 200 + (uint64_t)_i};
    bi_grad grad;
    op_rig_open(&rig, &limits, NULL, 2);
    CHECK_OK(bi_grad_host_open(&limits, rig.pool, &grad));
    make_case(&rig, &random, &cases[_i], &data);
    CHECK_OK(differentiate(&grad, &data, &first, 3));
    check_case(&data, &first);
    bi_grad_close(&grad);
    op_rig_close(&rig);
}
END_TEST

START_TEST(experts_keep_their_bytes) {
    op_rig rig;
    op_random random = {test_seed(), 230 + (uint64_t)_i};
    op_rig_open(&rig, &limits, NULL, 1);
    make_case(&rig, &random, &cases[_i], &data);
    for (int n = 0; n < 3; n++) {
        br_pool *pool;
        bi_grad grad;
        CHECK_OK(br_pool_open(thread_counts[n], &pool));
        CHECK_OK(bi_grad_host_open(&limits, pool, &grad));
        CHECK_OK(differentiate(&grad, &data, n ? &again : &first, 3));
        ck_assert_msg(!n || memcmp(&again, &first, sizeof first) == 0, "%d threads: other bytes", thread_counts[n]);
        for (int want = 1; want < 3; want++) {
            CHECK_OK(differentiate(&grad, &data, &again, want));
            if (want == 1)
                ck_assert(memcmp(again.dx, first.dx, sizeof first.dx) == 0 && isnan(again.da[0][0][0]));
            else
                ck_assert(memcmp(again.da, first.da, sizeof first.da + sizeof first.db) == 0 && isnan(again.dx[0]));
        }
        bi_grad_close(&grad);
        br_pool_close(pool);
    }
    op_rig_close(&rig);
}
END_TEST

START_TEST(experts_refuse_wrong_arguments) {
    op_rig rig;
    op_random random = {test_seed(), 260};
    bi_grad grad;
    op_rig_open(&rig, &limits, NULL, 1);
    CHECK_OK(bi_grad_host_open(&limits, rig.pool, &grad));
    make_case(&rig, &random, &cases[1], &data);
    experts_data *bad = &data;
#define REFUSES(field, value, status)                                   \
    do {                                                                \
        const int kept = (int)bad->field;                               \
        bad->field = (value);                                           \
        CHECK_FAILS(differentiate(&grad, bad, &first, 3), status);      \
        bad->field = kept;                                              \
    } while (0)
    REFUSES(c.n_row, -1, BR_E_SHAPE);
    REFUSES(c.d, 0, BR_E_SHAPE);
    REFUSES(c.d, 21, BR_E_SHAPE);
    REFUSES(c.d_ff, 32, BR_E_SHAPE);
    REFUSES(c.topk, 0, BR_E_SHAPE);
    REFUSES(c.n_row, ROW_MAX + 1, BR_E_LIMIT);
    REFUSES(c.n_expert, EXPERT_MAX + 1, BR_E_LIMIT);
    REFUSES(expert[4], 5, BR_E_SHAPE);
    REFUSES(expert[4], -1, BR_E_SHAPE);
    REFUSES(row_slot[4], 2, BR_E_SHAPE);
    REFUSES(mat[2].n_in, 20, BR_E_SHAPE);
    REFUSES(lora[2][1].a.n_in, 20, BR_E_SHAPE);
    REFUSES(lora[0][0].b.n_in, 4, BR_E_SHAPE);
    for (int i = 0; i < ROW_MAX * D_MAX; i++)
        ck_assert(isnan(first.dx[i]));
    bi_grad_close(&grad);
    op_rig_close(&rig);
}
END_TEST

Suite *test_grad_experts_suite(void) {
    Suite *suite = suite_create("grad_experts");
    TCase *tcase = tcase_create("experts");
    tcase_set_timeout(tcase, 120);
    tcase_add_loop_test(tcase, experts_are_differentiated, 0, CASES);
    tcase_add_loop_test(tcase, experts_keep_their_bytes, 0, CASES);
    tcase_add_test(tcase, experts_refuse_wrong_arguments);
    suite_add_tcase(suite, tcase);
    return suite;
}
