/* linear on the GPU: packed matrices, every form of the dense product and its thresholds, mixed adapters, faults, recorded
 * steps; all against the oracle, byte for byte. */
#include "bi_cuda_test.h"
#include "cuda_case.h"
#include "linear_rig.h"
#include "test_support.h"

#include <string.h>

enum { MIB = 1 << 20 };

static const bi_limits SMALL = {.n_row = 70, .d_in = 1100, .d_out = 700, .rank = 48, .n_slot = LINEAR_SLOT_MAX};
static const int ROWS[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 200, 257};
enum { ROW_COUNT = sizeof ROWS / sizeof ROWS[0] };

static const int SHAPE[][2] = {/* n_in, n_out */
                               {64, 64}, {1, 1}, {7, 5}, {17, 33}, {40, 104}, {100, 7}, {71, 129}, {1000, 520},
                               {1001, 521}, {16, 16}, {264, 8}, {128, 130}};
enum { SHAPE_COUNT = sizeof SHAPE / sizeof SHAPE[0] };

START_TEST(every_shape_and_row_count) {
    twin t;
    op_random random = {test_seed(), 0};
    twin_open(&t, &SMALL, 6 * MIB);
    for (int k = 0; k < SHAPE_COUNT; k++)
        for (int r = 0; r < ROW_COUNT; r++) {
            linear_case c = {.n_row = ROWS[r], .n_head = 1, .n_in = SHAPE[k][0], .n_out = SHAPE[k][1], .bad_row = -1};
            c.y_f32 = (k + r) % 2;
            c.family = (linear_family)((k + r / 2) % LINEAR_FAMILIES);
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

START_TEST(mixed_adapters) {
    twin t;
    op_random random = {test_seed(), 1};
    twin_open(&t, &SMALL, 6 * MIB);
    for (int k = 0; k < SHAPE_COUNT; k++)
        for (int r = 0; r < ROW_COUNT; r++) {
            linear_case c = {.n_row = ROWS[r], .n_head = 1, .n_in = SHAPE[k][0], .n_out = SHAPE[k][1], .bad_row = -1};
            c.n_slot = 1 + (k + r) % 6;
            c.slots_used = r % 7 == 6 ? 0 : c.n_slot;
            c.y_f32 = r % 2;
            c.family = (linear_family)((k + r / 2) % LINEAR_FAMILIES);
            c.bad_b = (k + r) % 4 == 1;
            c.bad_row = (k + r) % 3 == 0 ? ROWS[r] / 2 : -1;
            linear_run_case(&t, &random, &c);
        }
    linear_case most = {.n_row = 70, .n_head = 1, .n_in = 64, .n_out = 72, .n_slot = LINEAR_SLOT_MAX, .slots_used = LINEAR_SLOT_MAX, .bad_row = -1};
    linear_run_case(&t, &random, &most);
    most.n_row = 40;
    linear_run_case(&t, &random, &most);
    twin_close(&t);
}
END_TEST

START_TEST(strides_and_alignment) {
    static const int gaps[][3] = {{0, 8, 8}, {0, 16, 0}, {1, 0, 0}, {0, 1, 3}, {8, 4, 1}, {3, 5, 2}, {2, 6, 4}};
    twin t;
    op_random random = {test_seed(), 2};
    twin_open(&t, &SMALL, 6 * MIB);
    for (int k = 0; k < 8; k++)
        for (int g = 0; g < 7; g++) {
            static const int rows[] = {1, 5, 16, 40, 64, 65, 130, 200};
            linear_case c = {.n_row = rows[k], .n_head = 1, .n_in = k % 2 ? 104 : 99, .n_out = 136, .bad_row = -1};
            c.x_shift = gaps[g][0], c.x_gap = gaps[g][1], c.y_gap = gaps[g][2];
            c.y_f32 = g % 2;
            c.n_slot = k % 3 ? 3 : 0;
            c.slots_used = c.n_slot;
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

START_TEST(stacks_of_heads) {
    static const int rows[] = {1, 3, 8, 16, 17, 33, 64, 65, 100};
    const bi_limits limits = {.n_row = 128, .d_in = 600, .d_out = 12 * 512, .rank = 48, .n_slot = LINEAR_SLOT_MAX, .n_head = 12};
    twin t;
    op_random random = {test_seed(), 3};
    twin_open(&t, &limits, 24 * MIB);
    for (int r = 0; r < 9; r++)
        for (int k = 0; k < 4; k++) {
            linear_case c = {.n_row = rows[r], .n_head = k == 3 ? 3 : 12, .bad_row = -1};
            c.n_in = k == 0 ? 128 : k == 1 ? 512 : k == 2 ? 24 : 37;
            c.n_out = k == 0 ? 512 : k == 1 ? 128 : k == 2 ? 40 : 19;
            c.x_gap = k == 0 ? 64 : 0;
            c.heads_apart = k == 2 || k == 3;
            c.y_f32 = k % 2;
            c.n_slot = (r + k) % 2 ? 4 : 0;
            c.slots_used = c.n_slot;
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

START_TEST(real_widths) {
    static const int shape[][2] = {{7168, 3584}, {3584, 7168}, {12288, 1024}, {768, 10496}, {768, 10560}, {512, 26112}, {256, 42304}, {7168, 896}};
    static const int rows[] = {1, 8, 9, 16, 17, 32, 33, 64, 65, 96};
    const bi_limits limits = {.n_row = 128, .d_in = 12288, .d_out = 42304, .rank = 32, .n_slot = 4};
    twin t;
    op_random random = {test_seed(), 4};
    twin_open(&t, &limits, 96 * MIB);
    for (int k = 0; k < 8; k++)
        for (int r = k % 3; r < 10; r += k < 3 ? 3 : 1) {
            linear_case c = {.n_row = rows[r], .n_head = 1, .n_in = shape[k][0], .n_out = shape[k][1], .bad_row = -1};
            c.y_f32 = r % 2;
            c.n_slot = (k + r) % 2 ? 3 : 0;
            c.slots_used = c.n_slot;
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

START_TEST(checked_logits) {
    static const int rows[] = {1, 9, 40, 64, 65, 130};
    twin t;
    op_random random = {test_seed(), 5};
    twin_open(&t, &SMALL, 6 * MIB);
    for (int r = 0; r < 6; r++)
        for (int k = 0; k < 3; k++) {
            linear_case c = {.n_row = rows[r], .n_head = 1, .n_in = 200, .n_out = k == 1 ? 333 : 512, .y_f32 = 1, .check = 1};
            c.bad_row = k == 2 ? -1 : rows[r] - 1;
            c.n_slot = k == 2 ? 3 : 0;
            c.bad_b = k == 2;
            c.slots_used = c.n_slot;
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

/* Groups: as the oracle's calls in order, also where several maps find a fault in one row. */
START_TEST(groups_of_maps) {
    static const int rows[] = {1, 7, 16, 33, 64, 65, 140};
    static const int shape[][2] = {{64, 48}, {208, 520}, {104, 8}, {64, 129}, {1000, 40}, {16, 200}, {72, 16}, {99, 31}};
    static linear_setup setup[BI_LINEAR_GROUP_MAX];
    twin t;
    op_random random = {test_seed(), 9};
    twin_open(&t, &SMALL, 6 * MIB);
    for (int n = 1; n <= BI_LINEAR_GROUP_MAX; n++)
        for (int r = 0; r < 7; r++) {
            bi_linear_args args[2][BI_LINEAR_GROUP_MAX];
            twin_reset(&t);
            for (int i = 0; i < n; i++) {
                const int k = (i + r) % (n == 8 ? 8 : 7); /* the last shape has rows that are not aligned */
                linear_case c = {.n_row = rows[r], .n_head = i == 4 ? 3 : 1, .n_in = shape[k][0], .n_out = shape[k][1], .bad_row = -1};
                c.y_f32 = (i + n) % 3 == 0;
                c.n_slot = (i + r + n) % 3 ? 1 + i % 4 : 0;
                c.slots_used = c.n_slot;
                c.run = r > 4 && n % 2 ? 128 : 0;
                c.family = (linear_family)((i + n) % LINEAR_FAMILIES);
                c.bad_row = (i + r) % 3 == 1 ? rows[r] / 2 : -1;
                linear_set_up(&t, &random, &c, &setup[i]);
            }
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < n; i++) {
                    args[side][i] = setup[i].args[side];
                    args[side][i].fault = (bi_fault){setup[0].args[side].fault.row, (uint32_t)(9 + i)};
                }
            twin_begin(&t);
            TWIN_RUNS(&t, side)
                CHECK_OK(t.backend[side].op->linear_group(t.backend[side].ctx, args[side], n));
            twin_compare(&t, "a group of maps");
        }
    twin_close(&t);
}
END_TEST

/* Tiles whose rows all have one adapter, or none, beside mixed ones, in pairs of every kind. */
START_TEST(runs_of_rows) {
    static const int rows[] = {65, 128, 129, 256, 257, 384, 700};
    static const int run[] = {1000, 256, 128, 64, 300};
    static const int shape[][2] = {{64, 72}, {208, 520}, {16, 264}, {1000, 700}, {72, 8}};
    const bi_limits limits = {.n_row = 700, .d_in = 1000, .d_out = 700, .rank = 48, .n_slot = LINEAR_SLOT_MAX, .n_head = 3};
    twin t;
    op_random random = {test_seed(), 11};
    twin_open(&t, &limits, 48 * MIB);
    for (int r = 0; r < 7; r++)
        for (int k = 0; k < 5; k++) {
            linear_case c = {.n_row = rows[r], .n_head = (r + k) % 4 == 3 ? 3 : 1, .n_in = shape[k][0], .n_out = shape[k][1], .bad_row = -1};
            c.n_slot = 1 + (r + k) % 6;
            c.slots_used = c.n_slot;
            c.run = run[(r + 2 * k) % 5];
            c.y_f32 = (r + k) % 2;
            c.bad_b = (r + k) % 4 == 1;
            c.bad_row = (r + k) % 3 == 0 ? rows[r] / 2 : -1;
            c.family = (linear_family)((r + k) % LINEAR_FAMILIES);
            linear_run_case(&t, &random, &c);
        }
    twin_close(&t);
}
END_TEST

/* Many rows and outputs with adapters. */
START_TEST(many_rows_with_adapters) {
    const bi_limits limits = {.n_row = 2200, .d_in = 112, .d_out = 4900, .rank = 48, .n_slot = LINEAR_SLOT_MAX};
    twin t;
    op_random random = {test_seed(), 10};
    twin_open(&t, &limits, 64 * MIB);
    for (int k = 0; k < 3; k++) {
        linear_case c = {.n_row = 2180 + k, .n_head = 1, .n_in = k == 1 ? 64 : 104, .n_out = k == 2 ? 4869 : 4872, .bad_row = 700};
        c.y_f32 = k == 0;
        c.n_slot = 3 + k;
        c.slots_used = c.n_slot;
        c.bad_b = k == 1;
        c.check = k == 0;
        c.family = (linear_family)k;
        linear_run_case(&t, &random, &c);
    }
    twin_close(&t);
}
END_TEST

static int64_t launches(const twin *t, const char *name) {
    return bi_cuda_launch_count(&t->backend[TWIN_CUDA], name);
}

/* On the library that the table was made with none of its configurations may be refused: all of the table where the limits allow its shapes,
 * nothing of it where they do not. */
START_TEST(table_is_taken) {
    static const struct {
        bi_limits limits;
        int is_all;
    } open[] = {{{.n_row = 8192, .d_in = 12288, .d_out = 49152, .n_vocab = 163840}, 1}, {{.n_row = 256, .d_in = 1100, .d_out = 700}, 0}};
    char note[BI_CUDA_NOTE_BYTES];
    twin t;
    for (int i = 0; i < 2; i++) {
        twin_open(&t, &open[i].limits, MIB);
        bi_cuda_note(&t.backend[TWIN_ORACLE], note);
        ck_assert_str_eq(note, "");
        bi_cuda_note(&t.backend[TWIN_CUDA], note);
        ck_assert_msg(strncmp(note, "cuBLASLt version ", 17) == 0, "%s", note);
        ck_assert_msg(strstr(note, "\nwarning: ") || strstr(note, " taken, 0 refused"), "%s", note);
        ck_assert_msg((strstr(note, ": 0 configurations ") == NULL) == open[i].is_all, "%s", note);
        twin_close(&t);
    }
}
END_TEST

/* Which kernels run, and that a recorded step gives the same bits, also where its plan is made while it is recorded. */
START_TEST(launches_and_recorded_steps) {
    static const struct {
        int n_row, n_slot;
        const char *kernel;
    } step[] = {{1, 0, "linear_small"}, {64, 3, "linear_small"}, {65, 0, "linear_large"}, {192, 3, "linear_wide"}, {256, 2, "lora_t"}};
    const bi_limits limits = {.n_row = 256, .d_in = 1100, .d_out = 700, .rank = 48, .n_slot = LINEAR_SLOT_MAX};
    twin t;
    op_random random = {test_seed(), 6};
    twin_open(&t, &limits, 6 * MIB);
    for (int i = 0; i < 5; i++) {
        linear_case c = {.n_row = step[i].n_row, .n_head = 1, .n_in = 208 + 16 * i, .n_out = 320, .bad_row = -1, .n_slot = step[i].n_slot};
        linear_setup s;
        br_graph *graph;
        c.slots_used = c.n_slot;
        twin_reset(&t);
        linear_set_up(&t, &random, &c, &s);
        twin_begin(&t);
        const int64_t before = launches(&t, step[i].kernel);
        CHECK_OK(br_graph_begin(t.device));
        CHECK_OK(linear_run(&t, &s, TWIN_CUDA));
        CHECK_OK(br_graph_end(t.device, &graph));
        ck_assert_int_eq((int)(launches(&t, step[i].kernel) - before), 1);
        for (int again = 0; again < 3; again++)
            CHECK_OK(br_graph_run(t.device, graph));
        CHECK_OK(twin_wait(&t));
        br_graph_free(graph);
        CHECK_OK(linear_run(&t, &s, TWIN_ORACLE));
        twin_compare(&t, step[i].kernel);
    }
    twin_close(&t);
}
END_TEST

/* A stack packed with strides is the stack packed from contiguous rows: seen through the map. */
START_TEST(packing_with_strides) {
    enum { N_OUT = 70, N_IN = 45, N_ROW = 9 };
    twin t;
    op_random random = {test_seed(), 7};
    twin_open(&t, &SMALL, 6 * MIB);
    bi_bf16 *w = TWIN_ARRAY(&t, bi_bf16, "weights", N_OUT * N_IN), *x = TWIN_ARRAY(&t, bi_bf16, "x", N_ROW * N_IN);
    float *y = TWIN_ARRAY(&t, float, "y", N_ROW * N_OUT);
    linear_fill(&random, LINEAR_NORMAL, w, N_OUT * N_IN);
    linear_fill(&random, LINEAR_NORMAL, x, N_ROW * N_IN);
    size_t bytes[2];
    for (int side = 0; side < 2; side++)
        bytes[side] = t.backend[side].op->mat_bytes(BI_FORM_BF16, N_OUT, N_IN);
    twin_block block = twin_private(&t, bytes[0], bytes[1]);
    for (int side = 0; side < 2; side++) {
        const bi_ops *op = t.backend[side].op;
        CHECK_OK(op->mat_pack_bf16(t.backend[side].ctx, block.side[side], N_OUT, N_IN, w, 1, N_OUT));
        CHECK_FAILS(op->mat_pack_bf16(t.backend[side].ctx, block.side[side], 0, N_IN, w, 1, N_OUT), BR_E_SHAPE);
        CHECK_FAILS(op->mat_pack_bf16(t.backend[side].ctx, block.side[side], N_OUT, 0, w, 1, N_OUT), BR_E_SHAPE);
    }
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_linear_args args = {.n_row = N_ROW, .n_head = 1, .x = twin_at(&t, side, x), .x_ld = N_IN,
                               .w = {.data = block.side[side], .n_out = N_OUT, .n_in = N_IN}, .y = twin_at(&t, side, y), .y_ld = N_OUT,
                               .y_f32 = 1};
        CHECK_OK(t.backend[side].op->linear(t.backend[side].ctx, &args));
    }
    twin_compare(&t, "a transposed matrix");
    twin_close(&t);
}
END_TEST

START_TEST(refusals_are_the_oracles) {
    twin t;
    op_random random = {test_seed(), 8};
    twin_open(&t, &SMALL, 6 * MIB);
    linear_case c = {.n_row = 5, .n_head = 1, .n_in = 64, .n_out = 48, .y_f32 = 1, .n_slot = 1, .slots_used = 1, .bad_row = -1};
    linear_setup s;
    linear_set_up(&t, &random, &c, &s);
    for (int i = 0; i < 5; i++) {
        const int32_t row = 0;
        memcpy((void *)(uintptr_t)s.args[TWIN_ORACLE].lora.row_slot + i * 4, &row, sizeof row);
    }
    twin_begin(&t);
    for (int side = 0; side < 2; side++) {
        const bi_ops *op = t.backend[side].op;
        bi_ctx *ctx = t.backend[side].ctx;
#define REFUSED(status, change)                     \
    do {                                            \
        linear_setup saved = s;                     \
        bi_linear_args *a = &s.args[side];          \
        bi_adapter *slot = &s.slot[side][0];        \
        (void)slot;                                 \
        change;                                     \
        a->lora.slot = s.slot[side];                \
        CHECK_FAILS(op->linear(ctx, a), status);    \
        s = saved;                                  \
    } while (0)
        REFUSED(BR_E_SHAPE, a->n_row = -1);
        REFUSED(BR_E_SHAPE, a->n_head = 0);
        REFUSED(BR_E_ARG, (a->check_logits = 1, a->y_f32 = 0));
        REFUSED(BR_E_SHAPE, a->w.n_in = 0);
        REFUSED(BR_E_SHAPE, a->w.n_in = 1101);
        REFUSED(BR_E_SHAPE, a->w.n_out = 0);
        REFUSED(BR_E_SHAPE, a->w.data = NULL);
        REFUSED(BR_E_SHAPE, slot->a.n_in = 63);
        REFUSED(BR_E_SHAPE, slot->b.n_out = 47);
        REFUSED(BR_E_SHAPE, slot->b.n_in = 9);
        REFUSED(BR_E_SHAPE, slot->b.data = NULL);
        REFUSED(BR_E_SHAPE, slot->s = NULL);
        REFUSED(BR_E_SHAPE, slot->a.n_out = slot->b.n_in = 49);
#undef REFUSED
        s.args[side].n_row = 0;
        CHECK_OK(op->linear(ctx, &s.args[side]));
    }
    twin_compare(&t, "refused calls write nothing");
    twin_close(&t);
}
END_TEST

Suite *cuda_linear_suite(void) {
    Suite *suite = suite_create("linear");
    CUDA_CASE(suite, every_shape_and_row_count);
    CUDA_CASE(suite, mixed_adapters);
    CUDA_CASE(suite, strides_and_alignment);
    CUDA_CASE(suite, stacks_of_heads);
    CUDA_CASE(suite, real_widths);
    CUDA_CASE(suite, checked_logits);
    CUDA_CASE(suite, groups_of_maps);
    CUDA_CASE(suite, runs_of_rows);
    CUDA_CASE(suite, many_rows_with_adapters);
    CUDA_CASE(suite, launches_and_recorded_steps);
    CUDA_CASE(suite, packing_with_strides);
    CUDA_CASE(suite, refusals_are_the_oracles);
    CUDA_CASE(suite, table_is_taken);
    return suite;
}
