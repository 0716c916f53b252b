/* bi_experts and bi_combine: against the slow form, against the composition of linear and glu, and in every grouping. */
#include "test_support.h"

#include "bi_bits.h"
#include "op_rig.h"
#include "slow_block.h"
#include "slow_moe.h"

#include <math.h>
#include <string.h>

enum { ROW_MAX = 80, D_MAX = 96, FF_MAX = 96, EXPERT_MAX = 12, TOPK_MAX = 4, SLOT_MAX = 3, RANK_MAX = 48 };

typedef struct adapter {
    int rank; /* 0: absent */
    float s;
    bi_bf16 a[RANK_MAX * D_MAX], b[D_MAX * RANK_MAX];
} adapter;

/* One layer of experts and its rows. Map 0 is w1, 1 is w3, 2 is w2. */
typedef struct experts_case {
    int n_row, d, d_ff, n_expert, topk, n_slot;
    bi_act act;
    bi_bf16 x[ROW_MAX * D_MAX], w[3][EXPERT_MAX][D_MAX * FF_MAX];
    adapter lora[3][SLOT_MAX][EXPERT_MAX];
    int32_t expert[ROW_MAX * TOPK_MAX], row_slot[ROW_MAX];
} experts_case;

typedef struct experts_out {
    bi_bf16 y[ROW_MAX * TOPK_MAX * D_MAX];
    uint32_t fault[ROW_MAX];
} experts_out;

/* The case in a backend's form. */
typedef struct packed_case {
    bi_mat w[3]; /* stacks of n_expert */
    bi_adapter lora[3][SLOT_MAX];
} packed_case;

static int n_out_of(const experts_case *c, int map) { return map == 2 ? c->d : c->d_ff; }
static int n_in_of(const experts_case *c, int map) { return map == 2 ? c->d_ff : c->d; }

static void open_rig(op_rig *rig, const char *isa, int n_thread) {
    const bi_limits limits = {.n_row = ROW_MAX, .d_in = D_MAX, .rank = RANK_MAX, .n_expert = EXPERT_MAX,
                              .n_expert_topk = TOPK_MAX, .d_expert = D_MAX, .d_expert_ff = FF_MAX, .d_model = D_MAX};
    op_rig_open(rig, &limits, isa, n_thread);
}

static void pack(op_rig *rig, const experts_case *c, packed_case *packed) {
    memset(packed, 0, sizeof *packed);
    static bi_bf16 dense[EXPERT_MAX * D_MAX * FF_MAX];
    for (int m = 0; m < 3; m++) {
        const size_t n = (size_t)(c->d * c->d_ff);
        for (int e = 0; e < c->n_expert; e++)
            memcpy(dense + (size_t)e * n, c->w[m][e], sizeof *dense * n);
        packed->w[m] = op_rig_stack(rig, dense, c->n_expert, n_out_of(c, m), n_in_of(c, m));
        for (int slot = 0; slot < c->n_slot; slot++) {
            op_low_rank low[EXPERT_MAX] = {{0}};
            for (int e = 0; e < c->n_expert; e++) {
                const adapter *from = &c->lora[m][slot][e];
                if (from->rank)
                    low[e] = (op_low_rank){from->a, from->b, from->rank, from->s};
            }
            packed->lora[m][slot] = op_rig_adapter(rig, low, c->n_expert, n_out_of(c, m), n_in_of(c, m));
        }
    }
}

static bi_experts_args args_of(const experts_case *c, const packed_case *p, experts_out *out) {
    memset(out, 0x5a, sizeof *out);
    memset(out->fault, 0, sizeof out->fault);
    bi_experts_args a = {.n_row = c->n_row, .d = c->d, .d_ff = c->d_ff, .n_expert = c->n_expert, .topk = c->topk, .x = c->x,
                         .expert = c->expert, .w1 = p->w[0], .w3 = p->w[1], .w2 = p->w[2], .act = c->act, .y = out->y,
                         .fault = {out->fault, 31}};
    if (c->n_slot) {
        a.lora1 = p->lora[0];
        a.lora3 = p->lora[1];
        a.lora2 = p->lora[2];
        a.n_slot = c->n_slot;
        a.row_slot = c->row_slot;
    }
    return a;
}

static void run(op_rig *rig, const bi_experts_args *a) {
    op_rig_poison(rig);
    CHECK_OK(rig->backend.op->experts(rig->backend.ctx, a));
}

static void run_case(op_rig *rig, const experts_case *c, experts_out *out) {
    static packed_case packed;
    pack(rig, c, &packed);
    bi_experts_args a = args_of(c, &packed, out);
    run(rig, &a);
}

/* ---- cases --------------------------------------------------------------------------------------------------------- */

static void make_adapters(op_random *random, experts_case *c) {
    static const int ranks[] = {8, 16, 32, 40, 1, 48};
    static const float scales[] = {2.0f, 0.3f, 1.0f, 16.0f};
    for (int m = 0; m < 3; m++)
        for (int slot = 0; slot < c->n_slot; slot++)
            for (int e = 0; e < c->n_expert; e++) {
                adapter *lora = &c->lora[m][slot][e];
                lora->rank = op_random_below(random, 5) ? ranks[op_random_below(random, 6)] : 0;
                lora->s = scales[op_random_below(random, 4)];
                op_random_bf16s(random, 0.2f, lora->a, lora->rank * n_in_of(c, m));
                op_random_bf16s(random, 0.2f, lora->b, lora->rank * n_out_of(c, m));
            }
}

static void make_choices(op_random *random, experts_case *c, int hot) {
    for (int t = 0; t < c->n_row; t++) {
        int order[EXPERT_MAX], n = 0;
        op_random_order(random, order, c->n_expert);
        char taken[EXPERT_MAX] = {0};
        for (int i = 0; i < c->topk; i++)
            taken[order[i]] = 1;
        if (hot && !taken[hot - 1]) {
            taken[order[0]] = 0;
            taken[hot - 1] = 1;
        }
        for (int e = 0; e < c->n_expert; e++)
            if (taken[e])
                c->expert[t * c->topk + n++] = e;
        c->row_slot[t] = op_random_below(random, c->n_slot + 1) - 1;
    }
}

enum { KINDS = 6 };

static void make_case(op_random *random, experts_case *c, int kind, int n_row, int d, int d_ff) {
    c->n_row = n_row;
    c->d = d;
    c->d_ff = d_ff;
    c->n_expert = kind == 1 ? 1 : 2 + op_random_below(random, EXPERT_MAX - 1);
    c->topk = 1 + op_random_below(random, c->n_expert < TOPK_MAX ? c->n_expert : TOPK_MAX);
    c->n_slot = op_random_below(random, SLOT_MAX + 1);
    c->act = op_random_below(random, 3) ? (bi_act){1, 4.0f, 25.0f} : (bi_act){0, 0.0f, 0.0f};
    float x_scale = kind == 3   ? 0x1p-126f
                    : kind == 4 ? 0x1p40f
                                : 1.0f,
          w_scale = kind == 3   ? 0x1p-6f
                    : kind == 4 ? 8.0f
                                : 0.3f;
    op_random_bf16s(random, x_scale, c->x, n_row * d);
    for (int m = 0; m < 3; m++)
        for (int e = 0; e < c->n_expert; e++)
            op_random_bf16s(random, w_scale, c->w[m][e], d * d_ff);
    for (int i = 0; kind == 5 && i < n_row * d; i++) /* +-0 and one plateau */
        c->x[i] = i % 3 ? (bi_bf16)(i % 2 ? 0x8000 : 0) : bi_round(0.75f);
    make_adapters(random, c);
    make_choices(random, c, kind == 2 ? 1 : 0);
}

static slow_map slow_of(const experts_case *c, int map, int expert, int slot) {
    slow_map slow = {.n_out = n_out_of(c, map), .n_in = n_in_of(c, map), .w = c->w[map][expert]};
    const adapter *lora = slot >= 0 ? &c->lora[map][slot][expert] : NULL;
    if (lora && lora->rank) {
        slow.a = lora->a;
        slow.b = lora->b;
        slow.rank = lora->rank;
        slow.s = lora->s;
    }
    return slow;
}

static void check_rows(const experts_case *c, const experts_out *out) {
    for (int pair = 0; pair < c->n_row * c->topk; pair++) {
        int t = pair / c->topk, e = c->expert[pair], slot = c->n_slot ? c->row_slot[t] : -1;
        slow_map w1 = slow_of(c, 0, e, slot), w3 = slow_of(c, 1, e, slot), w2 = slow_of(c, 2, e, slot);
        bi_bf16 y[D_MAX];
        slow_expert(&w1, &w3, &w2, &c->act, c->x + t * c->d, y);
        for (int i = 0; i < c->d; i++)
            ck_assert_msg(out->y[pair * c->d + i] == y[i], "row %d, expert %d, slot %d, element %d: %04x, wanted %04x", t, e,
                          slot, i, out->y[pair * c->d + i], y[i]);
        ck_assert_uint_eq(out->fault[t], 0);
    }
}

START_TEST(experts_equal_slow_form) {
    static const struct {
        int n_row, d, d_ff;
    } shape[] = {{5, 64, 64}, {40, 16, 32}, {7, 40, 24}, {3, 96, 96}, {70, 32, 16}, {4, 7, 33}};
    const char *isas[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isas), n_round = test_is_long() ? 600 : 36;
    static experts_case c;
    static experts_out out, first;
    op_random random = {test_seed(), 0};
    for (int round = 0; round < n_round; round++) {
        int s = op_random_below(&random, 6);
        make_case(&random, &c, round % KINDS, shape[s].n_row, shape[s].d, shape[s].d_ff);
        for (int r = 0; r < n_isa; r++) {
            op_rig rig;
            open_rig(&rig, isas[r], 1 + r);
            run_case(&rig, &c, r ? &out : &first);
            op_rig_close(&rig);
            if (r)
                ck_assert_msg(memcmp(&out, &first, sizeof out) == 0, "%s differs from %s", isas[r], isas[0]);
        }
        check_rows(&c, &first);
    }
}
END_TEST

/* silu(-102) is 364 quanta of the subnormals; -102 * sigmoid(-102) would be 408, sigmoid having lost its last bits. A factor
 * u = 2^100 shows them. */
START_TEST(silu_keeps_its_precision_far_below_zero) {
    static experts_case c;
    static experts_out out;
    memset(&c, 0, sizeof c);
    c.n_row = c.d = c.d_ff = c.n_expert = c.topk = 1;
    c.x[0] = c.w[2][0][0] = bi_round(1.0f);
    c.w[0][0][0] = bi_round(-102.0f);
    c.w[1][0][0] = bi_round(0x1p100f);
    op_rig rig;
    open_rig(&rig, NULL, 1);
    run_case(&rig, &c, &out);
    check_rows(&c, &out);
    ck_assert_float_eq_tol(bi_widen(out.y[0]), (float)(-102.0 * exp(-102.0) * 0x1p100), 3e-15f);
    op_rig_close(&rig);
}
END_TEST

/* ---- a row is a function of itself --------------------------------------------------------------------------------- */

static void take_row(experts_case *to, int at, const experts_case *from, int t) {
    memcpy(to->x + at * from->d, from->x + t * from->d, sizeof *from->x * (size_t)from->d);
    memcpy(to->expert + at * from->topk, from->expert + t * from->topk, sizeof *from->expert * (size_t)from->topk);
    to->row_slot[at] = from->row_slot[t];
}

static void check_same_row(const experts_case *c, const experts_out *a, int at, const experts_out *b, int t) {
    int n = c->topk * c->d;
    ck_assert_msg(memcmp(a->y + at * n, b->y + t * n, sizeof *a->y * (size_t)n) == 0, "row %d at %d has other bits", t, at);
}

START_TEST(batch_order_and_threads_do_not_matter) {
    static experts_case c, moved;
    static experts_out base, out;
    static packed_case packed;
    op_random random = {test_seed(), 1};
    do /* many rows, a hot expert of several tiles, adapters mixed */
        make_case(&random, &c, 2, ROW_MAX, 48, 32);
    while (c.n_slot < 2);
    moved = c;
    int order[ROW_MAX];
    op_random_order(&random, order, ROW_MAX);
    for (int t = 0; t < ROW_MAX; t++)
        take_row(&moved, t, &c, order[t]);
    static const int n_thread[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        op_rig rig;
        open_rig(&rig, NULL, n_thread[i]);
        pack(&rig, &c, &packed);
        bi_experts_args a = args_of(&c, &packed, i ? &out : &base);
        run(&rig, &a);
        if (i)
            ck_assert_mem_eq(&out, &base, sizeof out);
        a = args_of(&moved, &packed, &out);
        run(&rig, &a);
        for (int t = 0; t < ROW_MAX; t++)
            check_same_row(&c, &out, t, &base, order[t]);
        static const int batches[] = {1, 2, 31, 32, 33, 64, 65}; /* a tile holds 32 */
        for (int k = 0; k < 7; k++)
            for (int t = 0; t + batches[k] <= ROW_MAX; t += batches[k]) {
                experts_case *part = &moved;
                part->n_row = batches[k];
                for (int r = 0; r < batches[k]; r++)
                    take_row(part, r, &c, t + r);
                a = args_of(part, &packed, &out);
                run(&rig, &a);
                for (int r = 0; r < batches[k]; r++)
                    check_same_row(&c, &out, r, &base, t + r);
            }
        moved.n_row = ROW_MAX;
        for (int t = 0; t < ROW_MAX; t++)
            take_row(&moved, t, &c, order[t]);
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- equal to other ways ------------------------------------------------------------------------------------------- */

/* Map e of a stack, with the adapter's; slot -1: none. */
static void linear(op_rig *rig, const bi_bf16 *x, const bi_mat *w, const bi_adapter *lora, int slot, int e, void *y, int f32) {
    const int32_t row_slot = 0;
    bi_adapter one = {0};
    if (slot >= 0 && lora[slot].a.data)
        one = (bi_adapter){bi_mat_at(&lora[slot].a, e), bi_mat_at(&lora[slot].b, e), lora[slot].s + e};
    bi_linear_args a = {.n_row = 1, .n_head = 1, .x = x, .x_ld = w->n_in, .w = bi_mat_at(w, e), .lora = {&one, 1, &row_slot}, .y = y,
                        .y_ld = w->n_out, .y_f32 = f32};
    CHECK_OK(rig->backend.op->linear(rig->backend.ctx, &a));
}

START_TEST(fused_experts_equal_linear_then_glu_then_linear) {
    static experts_case c;
    static experts_out out;
    static packed_case packed;
    op_random random = {test_seed(), 2};
    op_rig rig;
    open_rig(&rig, NULL, 2);
    for (int round = 0; round < 8; round++) {
        make_case(&random, &c, round % KINDS, 20, round % 2 ? 64 : 40, round % 2 ? 64 : 24);
        pack(&rig, &c, &packed);
        bi_experts_args a = args_of(&c, &packed, &out);
        run(&rig, &a);
        for (int pair = 0; pair < c.n_row * c.topk; pair++) {
            int t = pair / c.topk, e = c.expert[pair], slot = c.row_slot[t];
            float g[FF_MAX], u[FF_MAX];
            bi_bf16 h[FF_MAX], y[D_MAX];
            linear(&rig, c.x + t * c.d, &packed.w[0], packed.lora[0], slot, e, g, 1);
            linear(&rig, c.x + t * c.d, &packed.w[1], packed.lora[1], slot, e, u, 1);
            bi_glu_args glu = {.n_row = 1, .d = c.d_ff, .g = g, .u = u, .ld = c.d_ff, .act = c.act, .y = h};
            CHECK_OK(rig.backend.op->glu(rig.backend.ctx, &glu));
            linear(&rig, h, &packed.w[2], packed.lora[2], slot, e, y, 0);
            ck_assert_mem_eq(out.y + pair * c.d, y, sizeof *y * (size_t)c.d);
        }
    }
    op_rig_close(&rig);
}
END_TEST

START_TEST(fp4_experts_equal_their_bf16_expansion) {
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    static experts_case c;
    static experts_out expanded, out;
    static packed_case packed;
    op_random random = {test_seed(), 3};
    make_case(&random, &c, 0, 20, 64, 96);
    c.n_slot = 0;
    op_rig rig;
    open_rig(&rig, NULL, 2);
    static uint8_t codes[EXPERT_MAX * D_MAX * FF_MAX / 2], scales[EXPERT_MAX * D_MAX * FF_MAX / 32];
    for (int m = 0; m < 3; m++) {
        for (int e = 0; e < c.n_expert; e++) {
            int n = c.d * c.d_ff;
            uint8_t *code = codes + e * n / 2, *scale = scales + e * n / 32;
            for (int i = 0; i < n / 2; i++)
                code[i] = (uint8_t)op_random_below(&random, 256);
            for (int i = 0; i < n / 32; i++) /* mostly near 1, and every byte 0..252 somewhere */
                scale[i] = (uint8_t)(i % 4 ? 120 + op_random_below(&random, 8) : op_random_below(&random, 150));
            for (int i = 0; i < n; i++) {
                int nibble = code[i / 2] >> (i % 2 ? 4 : 0) & 15;
                float value = ldexpf(magnitude[nibble & 7], scale[i / 32] - 127);
                c.w[m][e][i] = (bi_bf16)(bi_u32_of(nibble & 8 ? -value : value) >> 16);
            }
        }
        packed.w[m] = op_rig_stack_fp4(&rig, codes, scales, c.n_expert, n_out_of(&c, m), n_in_of(&c, m));
    }
    run_case(&rig, &c, &expanded);
    static packed_case bf16;
    pack(&rig, &c, &bf16);
    bi_experts_args a = args_of(&c, &bf16, &expanded);
    run(&rig, &a);
    a = args_of(&c, &packed, &out);
    run(&rig, &a);
    ck_assert_mem_eq(&out, &expanded, sizeof out);
    check_rows(&c, &expanded);
    op_rig_close(&rig);
}
END_TEST

START_TEST(a_zero_b_and_a_base_row_give_the_base_bits) {
    static experts_case c;
    static experts_out base, out;
    op_random random = {test_seed(), 4};
    do
        make_case(&random, &c, 0, 40, 64, 64);
    while (c.n_slot < 2);
    op_rig rig;
    open_rig(&rig, NULL, 1);
    int n_slot = c.n_slot, differ = 0;
    c.n_slot = 0;
    run_case(&rig, &c, &base);
    c.n_slot = n_slot;
    run_case(&rig, &c, &out);
    for (int t = 0; t < c.n_row; t++)
        if (c.row_slot[t] < 0)
            check_same_row(&c, &out, t, &base, t);
        else
            differ += memcmp(out.y + t * c.topk * c.d, base.y + t * c.topk * c.d, sizeof *out.y * (size_t)(c.topk * c.d)) != 0;
    ck_assert_int_gt(differ, 0);
    for (int m = 0; m < 3; m++)
        for (int slot = 0; slot < n_slot; slot++)
            for (int e = 0; e < c.n_expert; e++)
                memset(c.lora[m][slot][e].b, 0, sizeof c.lora[m][slot][e].b);
    run_case(&rig, &c, &out);
    ck_assert_mem_eq(&out, &base, sizeof out);
    op_rig_close(&rig);
}
END_TEST

/* ---- faults and refusals ------------------------------------------------------------------------------------------- */

static void set_s(packed_case *p, int n_expert, float s) {
    for (int i = 0; i < 2 * n_expert; i++)
        ((float *)(uintptr_t)p->lora[i % 2][0].s)[i / 2] = s;
}

START_TEST(a_row_whose_t_is_not_finite_faults_alone) {
    static experts_case c;
    static experts_out base, out;
    static packed_case packed;
    op_random random = {test_seed(), 5};
    do
        make_case(&random, &c, 2, 6, 32, 32);
    while (c.n_slot < 1);
    for (int t = 0; t < c.n_row; t++)
        c.row_slot[t] = t == 5 ? -1 : 0;
    for (int m = 0; m < 3; m++)
        for (int e = 0; e < c.n_expert; e++) {
            adapter *lora = &c.lora[m][0][e];
            lora->rank = 8;
            lora->s = 1.0f;
            op_random_bf16s(&random, 0.2f, lora->a, 8 * D_MAX);
            op_random_bf16s(&random, 0.2f, lora->b, 8 * D_MAX);
        }
    op_rig rig;
    open_rig(&rig, NULL, 2);
    pack(&rig, &c, &packed);
    bi_experts_args a = args_of(&c, &packed, &base);
    run(&rig, &a);
    for (int t = 0; t < c.n_row; t++)
        ck_assert_uint_eq(base.fault[t], 0);
    bi_bf16 kept[D_MAX];
    for (int bad = 3; bad < 6; bad++) { /* row 3: T beyond binary32; row 4: a NaN; row 5: no adapter, so nothing is checked */
        memcpy(kept, c.x + bad * c.d, sizeof *kept * (size_t)c.d);
        for (int i = 0; i < c.d; i++)
            c.x[bad * c.d + i] = bad == 4 ? 0x7fff : (bi_bf16)(0x7f00 | (c.lora[0][0][c.expert[bad * c.topk]].a[i] & 0x8000));
        if (bad == 3)
            set_s(&packed, c.n_expert, 0x1p20f);
        a = args_of(&c, &packed, &out);
        run(&rig, &a);
        for (int t = 0; t < c.n_row; t++) {
            uint32_t wanted = t == bad && bad < 5 ? 31 : 0;
            ck_assert_msg(out.fault[t] == wanted, "bad row %d: fault of row %d is %u", bad, t, out.fault[t]);
            if (t != bad && (bad != 3 || t == 5)) /* with another s the others have other bits */
                check_same_row(&c, &out, t, &base, t);
        }
        set_s(&packed, c.n_expert, 1.0f);
        if (bad == 4) {
            out.fault[4] = 9; /* the first fault of a row stays */
            a.fault.row[4] = 9;
            run(&rig, &a);
            ck_assert_uint_eq(out.fault[4], 9);
            a.fault.row = NULL;
            run(&rig, &a);
        }
        memcpy(c.x + bad * c.d, kept, sizeof *kept * (size_t)c.d);
    }
    op_rig_close(&rig);
}
END_TEST

START_TEST(bad_shapes_are_refused_before_any_output) {
    static experts_case c;
    static experts_out out, untouched;
    static packed_case packed, broken;
    op_random random = {test_seed(), 6};
    do
        make_case(&random, &c, 0, 6, 32, 48);
    while (c.n_slot < 1 || c.n_expert < 3 || c.lora[0][0][c.expert[0]].rank == 0 || c.lora[2][0][c.expert[0]].rank == 0);
    c.row_slot[0] = 0;
    op_rig rig;
    open_rig(&rig, NULL, 1);
    pack(&rig, &c, &packed);
    (void)args_of(&c, &packed, &untouched);
#define REFUSED(change)                                                             \
    do {                                                                            \
        broken = packed;                                                            \
        bi_experts_args a = args_of(&c, &broken, &out);                             \
        change;                                                                     \
        CHECK_FAILS(rig.backend.op->experts(rig.backend.ctx, &a), BR_E_SHAPE);      \
        ck_assert_mem_eq(&out, &untouched, sizeof out);                             \
    } while (0)
    REFUSED(a.n_row = -1);
    REFUSED(a.n_row = ROW_MAX + 1);
    REFUSED(a.topk = 0);
    REFUSED(a.topk = TOPK_MAX + 1);
    REFUSED(a.n_expert = 0);
    REFUSED(a.n_expert = EXPERT_MAX + 1);
    REFUSED(a.d = 0);
    REFUSED(a.d = D_MAX + 1);
    REFUSED(a.d_ff = FF_MAX + 1);
    REFUSED(a.d = 31);
    REFUSED(a.d_ff = 47);
    REFUSED(a.w1.data = NULL);
    REFUSED(a.w3.n_in = 16);
    REFUSED(a.w2.n_out = 16);
    REFUSED(broken.lora[0][0].b.data = NULL);
    REFUSED(broken.lora[0][0].b.n_out++);
    REFUSED(broken.lora[0][0].a.n_in++);
    REFUSED(broken.lora[0][0].a.n_out++);
    REFUSED(broken.lora[0][0].s = NULL);
    REFUSED((broken.lora[2][0].a.n_out = RANK_MAX + 1, broken.lora[2][0].b.n_in = RANK_MAX + 1));
    c.expert[1] = -1;
    REFUSED((void)0);
    c.expert[1] = c.n_expert;
    REFUSED(a.topk = a.topk);
#undef REFUSED
    bi_experts_args none = args_of(&c, &packed, &out);
    none.n_row = 0;
    run(&rig, &none);
    ck_assert_mem_eq(&out, &untouched, sizeof out);
    op_rig_close(&rig);
}
END_TEST

/* ---- combine ------------------------------------------------------------------------------------------------------- */

START_TEST(combine_equals_slow_form) {
    enum { D = 600, TOPK = 16, ROWS = 40 };
    static bi_bf16 e[ROWS * TOPK * D], y[ROWS * D], alone[D], wanted[D];
    static float p[ROWS * TOPK];
    static const struct { int d, topk; } shape[] = {{64, 4}, {D, TOPK}, {1, 1}, {255, 3}, {256, 16}, {257, 2}};
    const char *isas[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isas);
    op_random random = {test_seed(), 7};
    for (int r = 0; r < n_isa; r++) {
        op_rig rig;
        open_rig(&rig, isas[r], 1 + 2 * r);
        for (int s = 0; s < 6; s++) {
            int d = shape[s].d, topk = shape[s].topk;
            op_random_bf16s(&random, s == 3 ? 0x1p-130f : 1.0f, e, ROWS * topk * d);
            op_random_normals(&random, 0.5f, p, ROWS * topk);
            memset(y, 0x5a, sizeof y);
            bi_combine_args a = {.n_row = ROWS, .d = d, .topk = topk, .e = e, .p = p, .y = y};
            CHECK_OK(rig.backend.op->combine(rig.backend.ctx, &a));
            for (int t = 0; t < ROWS; t++) {
                slow_combine(d, topk, e + t * topk * d, p + t * topk, wanted);
                ck_assert_mem_eq(y + t * d, wanted, sizeof *y * (size_t)d);
                bi_combine_args one = a;
                one.n_row = 1;
                one.e += t * topk * d;
                one.p += t * topk;
                one.y = alone;
                CHECK_OK(rig.backend.op->combine(rig.backend.ctx, &one));
                ck_assert_mem_eq(alone, wanted, sizeof *y * (size_t)d);
            }
        }
        bi_combine_args bad = {.n_row = 1, .d = 0, .topk = 1, .e = e, .p = p, .y = y};
        CHECK_FAILS(rig.backend.op->combine(rig.backend.ctx, &bad), BR_E_SHAPE);
        op_rig_close(&rig);
    }
}
END_TEST

START_TEST(combine_is_an_ascending_fma_chain_from_plus_zero) {
    /* 2^24, 1, -2^24 with weight 1: ascending gives 0, any other order 1. All products -0 give +0. */
    static const float value[3] = {0x1p24f, 1.0f, -0x1p24f};
    bi_bf16 e[6], y[2];
    float p[3] = {1.0f, 1.0f, 1.0f};
    for (int i = 0; i < 3; i++) {
        e[2 * i] = bi_round(value[i]);
        e[2 * i + 1] = 0x8000;
    }
    op_rig rig;
    open_rig(&rig, NULL, 1);
    bi_combine_args a = {.n_row = 1, .d = 2, .topk = 3, .e = e, .p = p, .y = y};
    CHECK_OK(rig.backend.op->combine(rig.backend.ctx, &a));
    ck_assert_uint_eq(y[0], 0);
    ck_assert_uint_eq(y[1], 0);
    e[2] = bi_round(-0x1p24f);
    e[4] = bi_round(1.0f);
    CHECK_OK(rig.backend.op->combine(rig.backend.ctx, &a));
    ck_assert_uint_eq(y[0], bi_round(1.0f));
    /* p e - p e: the fma keeps what rounding p e lost, 2^-30 of (1 + 2^-7)(1 + 2^-23); a rounded product loses it. */
    p[0] = p[1] = 0x1.000002p0f;
    e[0] = bi_round(0x1.02p0f);
    e[1] = bi_round(-0x1.02p0f);
    bi_combine_args fused = {.n_row = 1, .d = 1, .topk = 2, .e = e, .p = p, .y = y};
    CHECK_OK(rig.backend.op->combine(rig.backend.ctx, &fused));
    ck_assert_uint_eq(y[0], bi_round(-0x1p-30f));
    op_rig_close(&rig);
}
END_TEST

Suite *test_experts_suite(void) {
    Suite *suite = suite_create("experts");
    TCase *tcase = tcase_create("experts");
    tcase_set_timeout(tcase, test_is_long() ? 600 : 30);
    tcase_add_test(tcase, experts_equal_slow_form);
    tcase_add_test(tcase, silu_keeps_its_precision_far_below_zero);
    tcase_add_test(tcase, batch_order_and_threads_do_not_matter);
    tcase_add_test(tcase, fused_experts_equal_linear_then_glu_then_linear);
    tcase_add_test(tcase, fp4_experts_equal_their_bf16_expansion);
    tcase_add_test(tcase, a_zero_b_and_a_base_row_give_the_base_bits);
    tcase_add_test(tcase, a_row_whose_t_is_not_finite_faults_alone);
    tcase_add_test(tcase, bad_shapes_are_refused_before_any_output);
    tcase_add_test(tcase, combine_equals_slow_form);
    tcase_add_test(tcase, combine_is_an_ascending_fma_chain_from_plus_zero);
    suite_add_tcase(suite, tcase);
    return suite;
}
