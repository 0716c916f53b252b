/* The verb `bench`: a dry run of every row on the oracle, the table, the peer's protocol, and that wrong bits are caught. The
 * command runs as a process; what it cannot show, a wrong op, is put into the measuring functions themselves. */
#include "checkpoint.h"
#include "config_json.h"
#include "draw.h"
#include "init_presets.h"
#include "job_bench_floor.h"
#include "job_bench_price.h"
#include "step_rows.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

enum { TEXT_BYTES = 1 << 17 };

#define DRY "bench --backend oracle --scale tiny --quick --threads 2 "
#define FAKE_PEER "--peer 'echo ready fake; while read -r line; do echo \"$line\" >>asked.txt; echo 12.5; done' "

static char out[TEXT_BYTES], err[TEXT_BYTES];

static void read_text(const char *name, char text[TEXT_BYTES]) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", test_tmp_dir(), name);
    FILE *file = fopen(path, "r");
    ck_assert_msg(file != NULL, "no %s", path);
    text[fread(text, 1, TEXT_BYTES - 1, file)] = 0;
    fclose(file);
}

static int bitroll(const char *arguments) {
    char command[2048];
    snprintf(command, sizeof command, "cd %s && exec %s/bitroll %s >stdout.txt 2>stderr.txt </dev/null", test_tmp_dir(), BITROLL_BINARY_DIR,
             arguments);
    const int status = system(command);
    ck_assert_msg(WIFEXITED(status), "bitroll %s: ended by a signal", arguments);
    read_text("stdout.txt", out);
    read_text("stderr.txt", err);
    return WEXITSTATUS(status);
}

/* Field i of a line of the table, from 0. */
static void field(const char *line, int i, char text[128]) {
    while (i-- > 0) {
        line += strcspn(line, ",\n");
        ck_assert_int_eq(*line, ',');
        line++;
    }
    snprintf(text, 128, "%.*s", (int)strcspn(line, ",\n"), line);
}

/* Field i of the row of that name. */
static void row_field(const char *table, const char *name, int i, char text[128]) {
    for (const char *line = table; *line; line += strcspn(line, "\n") + 1) {
        field(line, 3, text);
        if (strcmp(text, name) != 0)
            continue;
        field(line, i, text);
        return;
    }
    ck_abort_msg("no row %s", name);
}

static int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

/* ---- the command ----------------------------------------------------------------------------------------------------------- */

START_TEST(dry_run) {
    static char table[TEXT_BYTES], row[128], text[128];
    ck_assert_msg(bitroll("bench --list") == 0, "%s", err);
    const int n_row = lines_of(out) - 1;
    ck_assert_int_gt(n_row, 50);
    ck_assert_msg(bitroll(DRY "--csv bench.csv --commit abc") == 0, "%s", err);
    read_text("bench.csv", table);
    const char *const header = "date,commit,gpu,row,shape,us,us_min,us_max,floor_us,share,peer,peer_us,ratio,digest\n";
    ck_assert_int_eq(strncmp(table, header, strlen(header)), 0);
    int n_part = 0; /* the ops that a price is made of */
    for (const char *line = table + strlen(header); *line; line += strcspn(line, "\n") + 1) {
        field(line, 3, row);
        n_part += strncmp(row, "price.", 6) == 0 && strstr(row, ".x") != NULL;
    }
    ck_assert_int_gt(n_part, 3 * 25);
    ck_assert_int_eq(lines_of(table), 1 + n_row + n_part + 2 + 2); /* two ceilings, two means */
    row_field(table, "index.decode.64x128k", 13, row);
    row_field(table, "topk.alone.64x128k", 13, text);
    ck_assert_str_eq(text, row); /* from the same scores the same choice */
    row_field(table, "slice.decode.b1", 13, row);
    row_field(table, "slice.decode.b256.mixed", 13, text);
    ck_assert_str_eq(text, row); /* the first sequence has no adapter, whatever its neighbours have */
    for (const char *line = table + strlen(header); *line; line += strcspn(line, "\n") + 1) {
        field(line, 1, text);
        ck_assert_str_eq(text, "abc");
        field(line, 3, row);
        field(line, 5, text);
        ck_assert_msg(strstr(row, "geomean") || strtod(text, NULL) > 0, "%s takes '%s'", row, text);
        field(line, 13, text);
        const int is_price = strncmp(row, "price.", 6) == 0 && !strstr(row, ".x");
        ck_assert_msg(strstr(row, "geomean") || is_price || strcmp(row, "ceiling.copy") == 0 || strlen(text) == 32, "%s: digest '%s'", row, text);
    }
}
END_TEST

/* Inputs depend on the row alone, so that digests are equal whichever rows run and however often. */
START_TEST(digests_stay) {
    static char table[TEXT_BYTES], row[2][128], digest[2][128];
    ck_assert_msg(bitroll(DRY "--rows kda.prefill,experts.decode.b64.skewed --csv a.csv") == 0, "%s", err);
    ck_assert_msg(bitroll(DRY "--rows experts.decode.b64.skewed --threads 1 --csv a.csv") == 2, "%s", err); /* --threads twice */
    ck_assert_msg(bitroll("bench --backend oracle --scale tiny --threads 1 --rows experts.decode.b64.skewed --csv a.csv") == 0, "%s", err);
    read_text("a.csv", table);
    ck_assert_int_eq(lines_of(table), 1 + 2 + 3 + 2 + 1); /* one header for both runs */
    const char *line = table;
    for (int i = 0; i < 9; i++, line += strcspn(line, "\n") + 1) {
        if (i != 5 && i != 8)
            continue;
        field(line, 3, row[i == 8]);
        field(line, 13, digest[i == 8]);
    }
    ck_assert_str_eq(row[0], "experts.decode.b64.skewed");
    ck_assert_str_eq(row[1], row[0]);
    ck_assert_str_eq(digest[1], digest[0]);
}
END_TEST

START_TEST(peer_columns) {
    static char table[TEXT_BYTES], asked[TEXT_BYTES], text[128];
    ck_assert_msg(bitroll(DRY FAKE_PEER "--rows dense.small.7168x3584,kda.decode.b1,experts.decode.b1 --csv p.csv") == 0, "%s", err);
    read_text("asked.txt", asked);
    ck_assert_ptr_nonnull(strstr(asked, "copy 1048576\n"));
    ck_assert_ptr_nonnull(strstr(asked, "mm 16 112 56\n"));
    ck_assert_ptr_nonnull(strstr(asked, "grouped_mm 1 64 96 "));
    read_text("p.csv", table);
    for (const char *line = strchr(table, '\n') + 1; *line; line += strcspn(line, "\n") + 1) {
        field(line, 3, text);
        const int has_peer = strcmp(text, "kda.decode.b1") != 0, is_mean = strstr(text, "geomean") != NULL;
        field(line, 11, text);
        ck_assert_str_eq(text, has_peer && !is_mean ? "12.500" : "");
        field(line, 12, text);
        ck_assert_int_eq(text[0] != 0, has_peer);
    }
}
END_TEST

static const struct {
    const char *arguments, *sentence;
} refused[] = {
    {"bench --backend oracle", "expected scale tiny"},
    {"bench --scale huge --backend oracle", "expected full or tiny"},
    {"bench --backend abacus", "backend 'abacus': expected oracle or cuda"},
    {DRY "--rows nothing", "no row begins with any of 'nothing'"},
    {DRY "--rows kda.decode.b1 --csv no/such/folder.csv", "no/such/folder.csv: cannot append"},
    {DRY "--rows kda.decode.b1 --peer true", "peer 'true': the peer has ended"},
    {DRY "--rows kda.decode.b1 --peer 'echo hello'", "expected 'ready NAME', found 'hello'"},
};

START_TEST(refusals) {
    ck_assert_int_eq(bitroll(refused[_i].arguments), 2);
    ck_assert_msg(strstr(err, refused[_i].sentence) != NULL, "expected '%s', found '%s'", refused[_i].sentence, err);
    ck_assert_int_eq(lines_of(err), 1);
}
END_TEST

/* A peer that cannot, or is gone, leaves columns empty; the run goes on. */
START_TEST(peer_ends) {
    ck_assert_msg(bitroll(DRY "--rows kda.decode.b1 --peer 'echo ready fake; read x; echo error no; read x'") == 0, "%s", err);
    ck_assert_ptr_nonnull(strstr(out, "no time of torch copy_: the peer answers 'error no'"));
    ck_assert_ptr_nonnull(strstr(out, "no time of torch.mm: the peer has ended"));
    ck_assert_ptr_nonnull(strstr(out, "kda.decode.b1"));
}
END_TEST

/* ---- the measuring functions ----------------------------------------------------------------------------------------------- */

static const br_bench_options quick = {.quick = 1};
static const bench_shape shape = {.name = "test", .prefill = 8};
static br_report report;

static void open_rig(bench *b) {
    *b = (bench){.options = &quick, .shape = &shape, .report = &report};
    report = (br_report){0};
    CHECK_OK(br_device_open("host", &b->device));
    CHECK_OK(bench_data_open(b));
}

static void close_rig(bench *b) {
    bench_data_close(b);
    br_device_close(b->device);
}

/* An op of 8 rows that writes its row numbers; as a twin, of 2 rows, with an error in the last byte when wrong. */
typedef struct fake_args {
    int32_t *y, n, wrong;
} fake_args;

static br_status run_fake(bench *b, const void *args) {
    const fake_args *a = args;
    for (int32_t i = 0; i < a->n; i++)
        a->y[i] = i;
    a->y[a->n - 1] ^= a->wrong << 24;
    b->fault[3] = (uint32_t)(a->wrong == 2);
    return BR_OK;
}

static br_status measure_fake(bench *b, int32_t wrong, int32_t twin_wrong, bench_result *result) {
    int32_t y[8], twin_y[2];
    const fake_args args = {y, 8, wrong}, twin = {twin_y, 2, twin_wrong};
    const bench_row row = {
        .name = "fake", .op = run_fake, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = 8, .n_output = 1,
        .output[0] = {.all = y, .bytes = sizeof y, .twin = twin_y, .twin_bytes = sizeof twin_y, .hashed = 1},
    };
    return bench_measure(b, &row, result);
}

START_TEST(wrong_bits) {
    bench b;
    bench_result result = {0};
    const int32_t expected[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    open_rig(&b);
    CHECK_OK(measure_fake(&b, 0, 0, &result));
    ck_assert(result.us > 0 && result.us_min <= result.us && result.us <= result.us_max);
    ck_assert(br_digest_equal(result.digest, br_hash_bytes(expected, sizeof expected)));
    CHECK_FAILS(measure_fake(&b, 0, 1, NULL), BR_E_MISMATCH);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "byte 7"));
    CHECK_FAILS(measure_fake(&b, 2, 0, NULL), BR_E_NAN);
    ck_assert_uint_eq(b.fault[3], 0);
    CHECK_OK(bench_settle(&b, "fake", measure_fake(&b, 0, 1, NULL)));
    ck_assert_int_eq(report.n_error, 1);
    ck_assert_ptr_nonnull(strstr(b.failure, "fake: output 0 differs"));
    close_rig(&b);
}
END_TEST

/* A product that beats the ceiling is told and counted, at full sizes; one that does not is not. */
START_TEST(beaten_ceiling) {
    static const bench_shape full = {.name = "full", .prefill = 8, .dense_divisor = 1};
    const fake_args args = {(int32_t[8]){0}, 8, 0};
    bench_row row = {.name = "product", .op = run_fake, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .n_row = 8, .flops = 1e12};
    bench_over over = {0};
    bench_result result;
    bench b;
    open_rig(&b);
    b.over = &over;
    b.mma_rate = 1e12;
    CHECK_OK(bench_measure(&b, &row, &result)); /* a small shape */
    ck_assert_int_eq(over.n, 0);
    b.shape = &full;
    CHECK_OK(bench_measure(&b, &row, &result));
    ck_assert_int_eq(over.n, 1);
    ck_assert_str_eq(over.name, "product");
    ck_assert_double_eq_tol(over.rate, 1e18 / result.us, 1e-9 * over.rate);
    row.unit = BENCH_FP32;
    CHECK_OK(bench_measure(&b, &row, &result));
    row.unit = BENCH_MMA;
    row.flops = 1;
    CHECK_OK(bench_measure(&b, &row, &result));
    ck_assert_int_eq(over.n, 1);
    close_rig(&b);
}
END_TEST

START_TEST(geomean) {
    const double same[] = {3, 3, 3}, pair[] = {0.5, 8}, many[] = {1e-300, 1e300, 4, 0.25};
    ck_assert_double_eq_tol(bench_geomean(same, 3), 3, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(pair, 2), 2, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(many + 2, 2), 1, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(many, 1), 1e-300, 1e-310);
}
END_TEST

/* Floors of decode steps of slice-full, in microseconds at a copy bandwidth of 4.30 TB/s and 790 TFLOP/s, worked out apart from
 * this code, from the sizes of K3.1's tensors. */
static const struct {
    int32_t n, context, n_lora, lora_rows[2];
    double us;
} floors[] = {
    {1, 32768, 0, {0}, 1901.900},       {8, 32768, 0, {0}, 3679.271},        {64, 32768, 0, {0}, 12326.869},
    {256, 32768, 0, {0}, 19502.225},    {1, 32768, 1, {1}, 1927.964},        {8, 32768, 1, {8}, 3829.301},
    {64, 32768, 1, {64}, 13062.874},    {256, 32768, 1, {256}, 20566.625},   {1, 131072, 1, {1}, 1930.982},
    {8, 131072, 1, {8}, 3853.443},      {64, 131072, 1, {64}, 13256.007},    {256, 131072, 1, {256}, 21339.157},
    {8, 32768, 2, {3, 2}, 3787.108},    {64, 32768, 2, {21, 21}, 13012.080}, {256, 32768, 2, {85, 85}, 21186.062},
};

START_TEST(decode_floors) {
    const bench b = {.copy_rate = 4.30e12, .mma_rate = 790e12};
    const init_preset *preset = init_preset_find("slice-full");
    br_config c;
    CHECK_OK(br_config_parse(preset->name, preset->config_json, strlen(preset->config_json), &c));
    const double us = bench_floor_decode(&b, &c, floors[_i].n, floors[_i].context, floors[_i].lora_rows, floors[_i].n_lora);
    ck_assert_double_eq_tol(us, floors[_i].us, 1e-3 * floors[_i].us);
}
END_TEST

/* Marks of the host device, and those that no device has. */
START_TEST(marks) {
    br_device *device;
    double us = -1;
    CHECK_OK(br_device_open("host", &device));
    CHECK_OK(br_device_mark(device, 0));
    CHECK_OK(br_device_mark(device, BR_DEVICE_MARKS - 1));
    CHECK_OK(br_device_elapsed(device, 0, BR_DEVICE_MARKS - 1, &us));
    ck_assert(us >= 0 && us < 1e7);
    CHECK_FAILS(br_device_mark(device, BR_DEVICE_MARKS), BR_E_ARG);
    CHECK_FAILS(br_device_elapsed(device, -1, 0, &us), BR_E_ARG);
    br_device_close(device);
}
END_TEST

/* ---- the ops of a step ----------------------------------------------------------------------------------------------------- */

static const bi_ops *real;
static price_list seen;

#define WATCH(name, ...)                                            \
    static br_status watch_##name(bi_ctx *ctx, const bi_##name##_args *a) { \
        price_list_add(&seen, (price_op){__VA_ARGS__});             \
        return real->name(ctx, a);                                  \
    }
WATCH(embed, .kind = PRICE_EMBED, .d = a->d_model)
WATCH(kda_gate, .kind = PRICE_KDA_GATE, .d = a->d, .n_head = a->n_head)
WATCH(kda, .kind = PRICE_KDA, .d = a->d, .n_head = a->n_head)
WATCH(kda_norm, .kind = PRICE_KDA_NORM, .d = a->d, .n_head = a->n_head)
WATCH(latent_store, .kind = PRICE_LATENT_STORE, .d = a->d_latent)
WATCH(attn, .kind = PRICE_ATTN, .d = a->d_kv_latent, .n_head = a->n_head)
WATCH(attn_gate, .kind = PRICE_ATTN_GATE, .d = a->d)
WATCH(index_store, .kind = PRICE_INDEX_STORE, .d = a->d)
WATCH(index_select, .kind = PRICE_INDEX_SELECT, .d = a->d, .n_head = a->n_head)
WATCH(route, .kind = PRICE_ROUTE, .d = a->d)
WATCH(experts, .kind = PRICE_EXPERTS, .d = a->d)
WATCH(combine, .kind = PRICE_COMBINE, .d = a->d)
WATCH(glu, .kind = PRICE_GLU, .d = a->d)
WATCH(attnres, .kind = PRICE_ATTNRES, .d = a->d, .n_bank = a->n_bank)
WATCH(residual, .kind = PRICE_RESIDUAL, .d = a->d)
WATCH(gather, .kind = PRICE_GATHER, .d = (int32_t)a->row_bytes)
WATCH(sample, .kind = PRICE_SAMPLE, .d = a->n_vocab)
WATCH(score, .kind = PRICE_SCORE, .d = a->d)

static br_status watch_rmsnorm(bi_ctx *ctx, const bi_norm_args *a) {
    price_list_add(&seen, (price_op){.kind = PRICE_RMSNORM, .d = a->d, .ld = a->x_ld});
    return real->rmsnorm(ctx, a);
}

static br_status watch_layernorm(bi_ctx *ctx, const bi_norm_args *a) {
    price_list_add(&seen, (price_op){.kind = PRICE_LAYERNORM, .d = a->d, .ld = a->x_ld});
    return real->layernorm(ctx, a);
}

static br_status watch_linear_group(bi_ctx *ctx, const bi_linear_args *a, int32_t n) {
    price_op op = {.kind = PRICE_LINEAR, .d = a->w.n_in, .n_head = a->n_head, .n_map = n, .logits = a->check_logits};
    for (int32_t i = 0; i < n; i++) {
        op.n_out[i] = a[i].w.n_out;
        op.f32 |= (uint32_t)a[i].y_f32 << i;
    }
    price_list_add(&seen, op);
    return n > 1 ? real->linear_group(ctx, a, n) : real->linear(ctx, a);
}

static br_status watch_conv_group(bi_ctx *ctx, const bi_conv_args *a, int32_t n) {
    price_list_add(&seen, (price_op){.kind = PRICE_CONV, .d = a->n_chan, .n_map = n});
    return real->conv_group(ctx, a, n);
}

static br_status watch_linear(bi_ctx *ctx, const bi_linear_args *a) {
    return watch_linear_group(ctx, a, 1);
}

/* The model is opened again, on ops that are counted. */
static void open_watched(const char *preset, br_loaded *loaded) {
    static bi_ops ops;
    char command[256], dir[600];
    br_weights *weights;
    snprintf(command, sizeof command, "init --preset %s --recipe --out %s", preset, preset);
    ck_assert_msg(bitroll(command) == 0, "%s", err);
    snprintf(dir, sizeof dir, "%s/%s", test_tmp_dir(), preset);
    const br_engine_options options = {.model_dir = dir, .backend = "oracle", .n_thread = 1};
    CHECK_OK(br_loaded_open(&options, 8, 64, 0, loaded));
    real = loaded->backend.op;
    ops = *real;
#define PUT(name) ops.name = watch_##name
    PUT(embed); PUT(rmsnorm); PUT(layernorm); PUT(linear); PUT(linear_group); PUT(conv_group); PUT(kda_gate); PUT(kda); PUT(kda_norm);
    PUT(latent_store); PUT(attn); PUT(attn_gate); PUT(index_store); PUT(index_select); PUT(route); PUT(experts); PUT(combine);
    PUT(glu); PUT(attnres); PUT(residual); PUT(gather); PUT(sample); PUT(score);
#undef PUT
    br_model_close(loaded->model);
    loaded->backend.op = &ops;
    CHECK_OK(checkpoint_open(dir, &loaded->config, &weights));
    const br_model_options model = {.config = &loaded->config, .weights = weights, .adapters = loaded->adapters, .backend = loaded->backend,
                                    .device = loaded->device, .pool = loaded->pool, .comm = {.n_rank = 1}, .n_row_max = loaded->n_row_max};
    CHECK_OK(br_model_open(&model, &loaded->model));
    br_weights_close(weights);
}

static void expect_list(const br_config *c, int32_t is_score) {
    price_list list;
    CHECK_OK(price_list_make(c, is_score, &list));
    for (int32_t i = 0; i < list.n; i++) {
        int32_t n = 0;
        for (int32_t k = 0; k < seen.n; k++)
            n += memcmp(&list.op[i], &seen.op[k], sizeof seen.op[k]) == 0;
        ck_assert_msg(n == 1, "%d times %s of %d: the model does not call it so", list.op[i].count, price_kind_name(list.op[i].kind), list.op[i].d);
    }
    ck_assert_int_eq(list.n, seen.n);
}

/* What the price of a step counts is what the model calls, for tokens that are drawn and for those that are given. */
START_TEST(ops_of_a_step) {
    static const char *const PRESET[] = {"pico", "nano", "mini"};
    int32_t token[4] = {5, 6, 7, 8};
    float temperature[4] = {1, 1, 1, 1}, logprob[4], logprob_raw[4];
    uint32_t fault[4] = {0};
    const bi_bf16 *final;
    br_loaded loaded;
    step_rows rows;
    draw d;
    br_step step = {0};
    open_watched(PRESET[_i], &loaded);
    CHECK_OK(step_rows_open(&rows, loaded.device, 8, 1, 0));
    CHECK_OK(draw_open(&d, &loaded, 4));
    void *pages, *states;
    CHECK_OK(br_device_alloc(loaded.device, br_model_page_bytes(loaded.model), "a page", &pages));
    CHECK_OK(br_device_alloc(loaded.device, br_model_state_bytes(loaded.model), "a state", &states));
    step.page_base = pages;
    step.state_base = states;
    step_rows_begin(&rows);
    rows.page[0] = 0;
    step_rows_add(&rows, 0, 0, token, 4, -1);
    CHECK_OK(step_rows_upload(&rows, &step));
    for (int is_score = 0; is_score < 2; is_score++) {
        seen.n = 0;
        CHECK_OK(br_model_forward(loaded.model, &step, &final));
        if (is_score)
            CHECK_OK(br_model_score(loaded.model, 4, final, token, temperature, logprob, logprob_raw, NULL, fault));
        for (int32_t i = 0; i < 4; i++) {
            d.row[i] = i;
            d.forced[i] = -1;
            d.setting[i] = (bi_sampling){.temperature = 1, .top_p_q32 = bi_sample_top_p(1), .position = 4};
        }
        CHECK_OK(draw_upload(&d, 4));
        if (!is_score)
            CHECK_OK(draw_ops(&d, final, step.row_fault));
        expect_list(&loaded.config, is_score);
    }
    br_device_free(loaded.device, pages);
    br_device_free(loaded.device, states);
    draw_close(&d);
    step_rows_close(&rows);
    br_loaded_close(&loaded);
}
END_TEST

static double field_number(const char *table, const char *name, int i) {
    char text[128];
    row_field(table, name, i, text);
    return strtod(text, NULL);
}

/* The price is the step's time over the sum of calls, of which the faster counts: here the peer's 0.001 us, where it is asked. */
START_TEST(price_of_a_step) {
    static char table[TEXT_BYTES], asked[TEXT_BYTES], text[128];
    double sum = 0;
    int n_call = 0;
    ck_assert_msg(bitroll(DRY "--peer 'echo ready fake; while read -r line; do echo \"$line\" >>price.txt; echo 0.001; done' "
                          "--rows price.decode.b1 --csv price.csv") == 0, "%s", err);
    read_text("price.txt", asked);
    ck_assert_ptr_nonnull(strstr(asked, "mm 1 128 548\n")); /* q, k, v, gate and two small ones as one matrix */
    ck_assert_ptr_nonnull(strstr(asked, "bmm 4 1 32 64\n"));
    ck_assert_ptr_nonnull(strstr(asked, "rms_norm 1 128\n"));
    ck_assert_ptr_nonnull(strstr(asked, "grouped_mm 1 64 64 "));
    read_text("price.csv", table);
    for (const char *line = table; *line; line += strcspn(line, "\n") + 1) {
        field(line, 3, text);
        if (strncmp(text, "price.decode.b1.", 16) != 0)
            continue;
        const long count = strtol(strrchr(text, '.') + 2, NULL, 10);
        ck_assert_int_gt(count, 0);
        n_call += (int)count;
        field(line, 11, text);
        if (!text[0])
            field(line, 5, text);
        sum += (double)count * strtod(text, NULL);
    }
    const double whole = field_number(table, "price.decode.b1", 5), least = field_number(table, "price.decode.b1", 11);
    ck_assert_double_eq_tol(least, sum, 0.0005 * (n_call + 1)); /* the table's three digits */
    ck_assert_double_eq_tol(whole, field_number(table, "slice.decode.b1", 5), 1e-9);
    ck_assert_double_eq_tol(field_number(table, "price.decode.b1", 12), least / whole, 1e-3 * least / whole + 1e-4);
}
END_TEST

Suite *test_bench_suite(void) {
    Suite *suite = suite_create("bench");
    TCase *tcase = tcase_create("bench");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, dry_run);
    tcase_add_test(tcase, digests_stay);
    tcase_add_test(tcase, peer_columns);
    tcase_add_loop_test(tcase, refusals, 0, sizeof refused / sizeof refused[0]);
    tcase_add_test(tcase, peer_ends);
    tcase_add_test(tcase, wrong_bits);
    tcase_add_test(tcase, beaten_ceiling);
    tcase_add_test(tcase, geomean);
    tcase_add_loop_test(tcase, decode_floors, 0, sizeof floors / sizeof floors[0]);
    tcase_add_test(tcase, marks);
    tcase_add_loop_test(tcase, ops_of_a_step, 0, 3);
    tcase_add_test(tcase, price_of_a_step);
    suite_add_tcase(suite, tcase);
    return suite;
}
