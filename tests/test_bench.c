/* The verb `bench`: a dry run of every row on the oracle, the table, the peer's protocol, and that wrong bits are caught. The
 * command runs as a process; what it cannot show, a wrong op, is put into the measuring functions themselves. */
#include "job_bench.h"
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
    ck_assert_int_eq(lines_of(table), 1 + n_row + 2 + 2); /* two ceilings, two means */
    for (const char *line = table + strlen(header); *line; line += strcspn(line, "\n") + 1) {
        field(line, 1, text);
        ck_assert_str_eq(text, "abc");
        field(line, 3, row);
        field(line, 5, text);
        ck_assert_msg(strstr(row, "geomean") || strtod(text, NULL) > 0, "%s takes '%s'", row, text);
        field(line, 13, text);
        ck_assert_msg(strstr(row, "geomean") || strcmp(row, "ceiling.copy") == 0 || strlen(text) == 32, "%s: digest '%s'", row, text);
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

START_TEST(geomean) {
    const double same[] = {3, 3, 3}, pair[] = {0.5, 8}, many[] = {1e-300, 1e300, 4, 0.25};
    ck_assert_double_eq_tol(bench_geomean(same, 3), 3, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(pair, 2), 2, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(many + 2, 2), 1, 1e-12);
    ck_assert_double_eq_tol(bench_geomean(many, 1), 1e-300, 1e-310);
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
    tcase_add_test(tcase, geomean);
    tcase_add_test(tcase, marks);
    suite_add_tcase(suite, tcase);
    return suite;
}
