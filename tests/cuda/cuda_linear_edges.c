/* linear on the GPU at the edges of its choices: groups, streams, cuBLASLt and its table. Against the oracle where shapes are small, else
 * one form of the GPU against the tiles, which the suite linear compares with the oracle. */
#include "bi_cuda_test.h"
#include "cuda_case.h"
#include "dense_forms.h"
#include "linear_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20, GUARD = 256 };

/* ---- against the oracle ---------------------------------------------------------------------------------------------- */

enum { GROUP = 3, ALONE_FROM = 513 };

static void try_group(twin *t, op_random *random, int n_row, int n_slot) {
    static const int shape[GROUP][2] = {{64, 48}, {208, 520}, {104, 8}};
    static linear_setup setup[GROUP];
    bi_linear_args args[2][GROUP];
    char what[80];
    twin_reset(t);
    for (int i = 0; i < GROUP; i++) {
        linear_case c = {.n_row = n_row, .n_head = 1, .n_in = shape[i][0], .n_out = shape[i][1], .y_f32 = i == 1, .bad_row = i ? n_row / 2 : -1};
        c.n_slot = c.slots_used = n_slot;
        linear_set_up(t, random, &c, &setup[i]);
        for (int side = 0; side < 2; side++) {
            args[side][i] = setup[i].args[side];
            args[side][i].fault = (bi_fault){setup[0].args[side].fault.row, (uint32_t)(9 + i)};
        }
    }
    snprintf(what, sizeof what, "a group of %d rows with %d slots", n_row, n_slot);
    twin_begin(t);
    TWIN_RUNS(t, side)
        CHECK_OK(t->backend[side].op->linear_group(t->backend[side].ctx, args[side], GROUP));
    twin_compare(t, what);
    if (n_row <= 64) /* T and y of all maps in one launch of the stream */
        twin_launched(t, what, "linear_small 1");
    else if (n_slot) /* T of all maps, then y of all */
        twin_launched(t, what, "lora_t 1, linear_wide 1");
    else if (n_row < ALONE_FROM) /* y of all */
        twin_launched(t, what, "linear_wide 1");
    else /* a launch a map: of cuBLASLt, or where that has no algorithm of tiles */
        twin_launched(t, what, "linear_large|linear_tile 3");
}

START_TEST(groups) {
    static const int rows[] = {64, 65, 512, 513};
    const bi_limits limits = {.n_row = 513, .d_in = 208, .d_out = 520, .rank = 48, .n_slot = LINEAR_SLOT_MAX};
    twin t;
    op_random random = {test_seed(), 20};
    twin_open(&t, &limits, 8 * MIB);
    for (int i = 0; i < 4; i++)
        for (int n_slot = 0; n_slot <= 4; n_slot += 4)
            try_group(&t, &random, rows[i], n_slot);
    twin_close(&t);
}
END_TEST

/* Few rows of short chains, many of them of one map, are no group without adapters: a launch a map. */
static void try_many_short(twin *t, op_random *random, int n_row, int n_out, int n_slot, const char *launched) {
    static linear_setup setup[2];
    bi_linear_args args[2][2];
    twin_reset(t);
    for (int i = 0; i < 2; i++) {
        linear_case c = {.n_row = n_row, .n_head = 1, .n_in = 72, .n_out = i ? n_out : 40, .bad_row = -1};
        c.n_slot = c.slots_used = n_slot;
        linear_set_up(t, random, &c, &setup[i]);
        args[0][i] = setup[i].args[0];
        args[1][i] = setup[i].args[1];
    }
    twin_begin(t);
    TWIN_RUNS(t, side)
        CHECK_OK(t->backend[side].op->linear_group(t->backend[side].ctx, args[side], 2));
    twin_compare(t, "many short chains");
    twin_launched(t, "many short chains", launched);
}

START_TEST(many_short) {
    const bi_limits limits = {.n_row = 65, .d_in = 72, .d_out = 16384, .rank = 48, .n_slot = LINEAR_SLOT_MAX};
    twin t;
    op_random random = {test_seed(), 23};
    twin_open(&t, &limits, 16 * MIB);
    try_many_short(&t, &random, 1, 16376, 0, "linear_small 1");
    try_many_short(&t, &random, 1, 16384, 0, "linear_small 2");
    try_many_short(&t, &random, 1, 16384, 1, "linear_small 1");
    try_many_short(&t, &random, 65, 16384, 0, "linear_wide 1");
    twin_close(&t);
}
END_TEST

static void try_map(twin *t, op_random *random, int n_row, int n_head, int n_out, int y_gap) {
    const linear_case c = {.n_row = n_row, .n_head = n_head, .n_in = 72, .n_out = n_out, .y_gap = y_gap, .bad_row = -1};
    linear_run_case(t, random, &c);
    twin_launched(t, "a map of few rows", "linear_small 1"); /* the stream or the tiles */
}

/* Up to 16 rows: fewer tiles of 64 outputs than half the SMs stream, and so does one map of more than 1,024. A stride of y that cuBLASLt
 * does not take keeps it out. */
START_TEST(streams) {
    static const int rows[] = {1, 8, 9, 16, 17, 64};
    const bi_limits limits = {.n_row = 64, .d_in = 72, .d_out = 65664, .n_head = 128};
    twin t;
    op_random random = {test_seed(), 21};
    twin_open(&t, &limits, 48 * MIB);
    const int most = (dense_forms_sm_count(&t.backend[TWIN_CUDA]) - 1) / 2;
    for (int i = 0; i < 6; i++) {
        for (int tiles = most - 1; tiles <= most + 1; tiles++)
            try_map(&t, &random, rows[i], 1, 64 * tiles - 8 * (i % 2), 0);
        try_map(&t, &random, rows[i], most + 1, 40, 0); /* as many tiles, one a map */
        try_map(&t, &random, rows[i], 1, 1024 * 64, 1);
        try_map(&t, &random, rows[i], 1, 1024 * 64 + 8, 1);
        try_map(&t, &random, rows[i], 2, 513 * 64, 1); /* 1,026 tiles, but of two maps */
    }
    twin_close(&t);
}
END_TEST

/* ---- one form against another ---------------------------------------------------------------------------------------- */

typedef struct forms {
    br_device *device;
    bi_backend cuda;
} forms;

static void open_forms(forms *f) {
    const bi_limits limits = {.n_row = 64, .d_in = 12288};
    CHECK_OK(br_device_open("cuda", &f->device));
    CHECK_OK(bi_backend_cuda_open(&limits, f->device, &f->cuda));
}

static void close_forms(forms *f) {
    CHECK_OK(br_device_wait(f->device));
    bi_backend_close(&f->cuda);
    br_device_close(f->device);
}

/* One map and rows for it, made on the device. */
typedef struct forms_map {
    bi_linear_args args;
    void *w, *x, *y[2];
    size_t y_bytes;
} forms_map;

static void *new_array(const forms *f, size_t bytes) {
    void *array;
    CHECK_OK(br_device_alloc(f->device, bytes, "a test's array", &array));
    return array;
}

static void open_map(const forms *f, forms_map *m, int n_row_max, int n_in, int n_out, int y_f32) {
    const bi_ops *op = f->cuda.op;
    m->w = new_array(f, op->mat_bytes(BI_FORM_BF16, n_out, n_in));
    m->x = new_array(f, sizeof(bi_bf16) * (size_t)n_row_max * (size_t)n_in);
    m->y_bytes = (y_f32 ? sizeof(float) : sizeof(bi_bf16)) * (size_t)n_row_max * (size_t)n_out + GUARD;
    for (int i = 0; i < 2; i++)
        m->y[i] = new_array(f, m->y_bytes);
    m->args = (bi_linear_args){.n_head = 1, .x = m->x, .x_ld = n_in, .w = {.data = m->w, .n_out = n_out, .n_in = n_in}, .y_ld = n_out};
    m->args.y_f32 = y_f32;
    const bi_mat_generate_args w = {.to = m->args.w, .have_out = n_out, .have_in = n_in, .stride_out = n_in, .stride_in = 1,
                                    .gen = bi_weightgen_make(bi_weightgen_key(test_seed(), "w"), BI_WEIGHTGEN_NORMAL, 0, 1.0f, n_in)};
    const bi_vector_generate_args x = {.dst = m->x, .n = (int64_t)n_row_max * n_in, .as = BI_GENERATE_BF16,
                                       .gen = bi_weightgen_make(bi_weightgen_key(test_seed(), "x"), BI_WEIGHTGEN_NORMAL, 0, 1.0f, 1)};
    CHECK_OK(op->mat_generate(f->cuda.ctx, &w));
    CHECK_OK(op->vector_generate(f->cuda.ctx, &x));
}

static void close_map(const forms *f, forms_map *m) {
    CHECK_OK(br_device_wait(f->device));
    br_device_free(f->device, m->w);
    br_device_free(f->device, m->x);
    br_device_free(f->device, m->y[0]);
    br_device_free(f->device, m->y[1]);
}

/* The tiles into y[0], cuBLASLt into y[1]. Returns whether that could. */
static int try_library(const forms *f, forms_map *m, int n_row) {
    uint64_t n_differ;
    int done;
    m->args.n_row = n_row;
    for (int i = 0; i < 2; i++)
        CHECK_OK(dense_forms_poison(&f->cuda, m->y[i], m->y_bytes));
    m->args.y = m->y[1];
    CHECK_OK(dense_forms_library(&f->cuda, &m->args, &done));
    if (!done)
        return 0;
    m->args.y = m->y[0];
    CHECK_OK(dense_forms_tiles(&f->cuda, &m->args));
    CHECK_OK(dense_forms_differ(&f->cuda, m->y[0], m->y[1], m->y_bytes, &n_differ));
    ck_assert_msg(n_differ == 0, "%d rows of a map (%d, %d), f32 %d: %llu words of cuBLASLt differ from the tiles'", n_row, m->args.w.n_out,
                  m->args.w.n_in, m->args.y_f32, (unsigned long long)n_differ);
    return 1;
}

/* Inside a row of the table cuBLASLt always can; the counts beside it are another's, or the heuristic's. */
START_TEST(table) {
    dense_forms_row row;
    forms f;
    open_forms(&f);
    ck_assert_int_eq(dense_forms_table(0, &row), 1);
    for (int32_t i = 0; dense_forms_table(i, &row); i++) {
        forms_map m;
        open_map(&f, &m, row.rows_to + 1, row.n_in, row.n_out, row.f32);
        try_library(&f, &m, row.rows_from - 1);
        try_library(&f, &m, row.rows_to + 1);
        ck_assert_msg(try_library(&f, &m, row.rows_from) && try_library(&f, &m, row.rows_to),
                      "cuBLASLt makes no %d to %d rows of a map (%d, %d)", row.rows_from, row.rows_to, row.n_out, row.n_in);
        close_map(&f, &m);
    }
    close_forms(&f);
}
END_TEST

/* Few rows go to cuBLASLt from 9 rows, up to 2,048 inputs, from 16,384 outputs on: the op is what the tiles are on both sides. */
START_TEST(short_chains) {
    static const int rows[] = {8, 9, 64, 65}, n_in[] = {2048, 2056}, n_out[] = {16376, 16384};
    forms f;
    open_forms(&f);
    for (int k = 0; k < 16; k++) {
        const int n_row = rows[k % 4], in = n_in[k / 4 % 2], out = n_out[k / 8];
        uint64_t n_differ;
        forms_map m;
        open_map(&f, &m, n_row, in, out, k % 3 == 0);
        const int can = try_library(&f, &m, n_row), wants = n_row > 64 || (n_row > 8 && in <= 2048 && out >= 16384);
        const int64_t before = bi_cuda_launch_count(&f.cuda, "linear_large"), all = bi_cuda_launch_count(&f.cuda, NULL);
        m.args.n_row = n_row;
        m.args.y = m.y[1];
        CHECK_OK(dense_forms_poison(&f.cuda, m.y[1], m.y_bytes));
        CHECK_OK(f.cuda.op->linear(f.cuda.ctx, &m.args));
        ck_assert_int_eq((int)(bi_cuda_launch_count(&f.cuda, NULL) - all), 1);
        ck_assert_msg(bi_cuda_launch_count(&f.cuda, "linear_large") - before == (can && wants), "%d rows of a map (%d, %d)", n_row, out, in);
        m.args.y = m.y[0];
        CHECK_OK(dense_forms_poison(&f.cuda, m.y[0], m.y_bytes));
        CHECK_OK(dense_forms_tiles(&f.cuda, &m.args));
        CHECK_OK(dense_forms_differ(&f.cuda, m.y[0], m.y[1], m.y_bytes, &n_differ));
        ck_assert_msg(n_differ == 0, "%d rows of a map (%d, %d): %llu words differ from the tiles'", n_row, out, in, (unsigned long long)n_differ);
        close_map(&f, &m);
    }
    close_forms(&f);
}
END_TEST

Suite *cuda_linear_edges_suite(void) {
    Suite *suite = suite_create("linear_edges");
    CUDA_CASE(suite, groups);
    CUDA_CASE(suite, many_short);
    CUDA_CASE(suite, streams);
    CUDA_CASE(suite, short_chains);
    return suite;
}

/* Apart, because its shapes are too large for the tools of sanitize.sh. */
Suite *cuda_linear_table_suite(void) {
    Suite *suite = suite_create("linear_table");
    CUDA_CASE(suite, table);
    return suite;
}
