/* golden_write OUT_DIR: writes golden/ops, golden/inspect.txt and golden/MANIFEST anew.
 *
 * Layer: tests. A file is admitted when the oracle on every instruction set of this processor and the slow form give the
 * same bits; the first difference ends the program with exit 1 and leaves the rest unwritten. Run it on a processor with
 * AVX-512: the manifest names the sets that agreed. The files of OUT_DIR/bugs keep their inputs and get their outputs anew;
 * those of OUT_DIR/hw_probe came from hardware and are listed only. */
#include "golden_file.h"
#include "golden_make.h"
#include "golden_manifest.h"
#include "golden_play.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

static const char *out_dir;
static golden_manifest manifest;

static void path_of(char path[BR_PATH_BYTES], const char *file) {
    CHECK_OK(br_file_join(path, out_dir, file));
}

static void list_file(const char *file, const char *op, const char *clauses, const char *agreed) {
    golden_entry *e = &manifest.entry[manifest.n++];
    ck_assert_int_le(manifest.n, GOLDEN_ENTRY_MAX);
    snprintf(e->file, sizeof e->file, "%s", file);
    snprintf(e->op, sizeof e->op, "%s", op);
    snprintf(e->clauses, sizeof e->clauses, "%s", clauses);
    snprintf(e->agreed, sizeof e->agreed, "%s", agreed);
    golden_file_digest(out_dir, file, e->digest);
}

/* Runs every case in every form and keeps the outputs. Returns the forms that agreed. */
static void admit(const golden_op *op, golden_set *set, char agreed[GOLDEN_FIELD_BYTES]) {
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    static golden_case first, other;
    for (int i = 0; i < set->n; i++) {
        golden_run(op, isa[0], &set->item[i], &first);
        for (int k = 1; k <= n_isa; k++) {
            const char *form = k < n_isa ? isa[k] : NULL;
            golden_run(op, form, &set->item[i], &other);
            golden_same(op->name, form ? form : "the slow form", &other, &first);
        }
        set->item[i] = first;
    }
    int at = snprintf(agreed, GOLDEN_FIELD_BYTES, "slow");
    for (int k = 0; k < n_isa; k++)
        at += snprintf(agreed + at, GOLDEN_FIELD_BYTES - (size_t)at, ",oracle-%s", isa[k]);
}

static void write_op(const golden_maker *maker) {
    static golden_set set;
    char file[GOLDEN_FIELD_BYTES], path[BR_PATH_BYTES], head[512], agreed[GOLDEN_FIELD_BYTES];
    const golden_op *op = golden_op_named(maker->op);
    golden_open(&set);
    maker->make(&set);
    admit(op, &set, agreed);
    snprintf(file, sizeof file, "ops/%s.txt", op->name);
    snprintf(head, sizeof head,
             "# %s: inputs and outputs as hex bits, last index fastest. Clauses %s.\n# Written by golden_write; "
             "MANIFEST says who agreed.\n",
             op->name, op->clauses);
    path_of(path, file);
    golden_write(&set, path, head);
    list_file(file, op->name, op->clauses, agreed);
    golden_close(&set);
}

static void write_inspect(void) {
    char path[BR_PATH_BYTES], *text = golden_inspect_text();
    path_of(path, "inspect.txt");
    CHECK_OK(br_file_write(path, text, strlen(text)));
    br_mem_free(text);
    list_file("inspect.txt", "inspect", "-", "text");
}

/* The comment lines that a file begins with. */
static void head_of(const char *path, char *head, size_t n_max) {
    br_map map;
    size_t n = 0;
    CHECK_OK(br_file_map(path, &map));
    while (n < map.n && map.bytes[n] == '#') {
        const unsigned char *stop = memchr(map.bytes + n, '\n', map.n - n);
        n = stop ? (size_t)(stop - map.bytes) + 1 : map.n;
    }
    ck_assert_uint_lt(n, n_max);
    memcpy(head, map.bytes, n);
    head[n] = 0;
    br_file_unmap(&map);
}

/* bugs/OP-WHAT.txt: its inputs and head stay, its outputs are made anew. */
static void write_bug(const char *file) {
    static golden_set set;
    char op_name[GOLDEN_FIELD_BYTES], path[BR_PATH_BYTES], head[4096], agreed[GOLDEN_FIELD_BYTES];
    ck_assert_int_eq(sscanf(file, "bugs/%127[^-]", op_name), 1);
    const golden_op *op = golden_op_named(op_name);
    path_of(path, file);
    head_of(path, head, sizeof head);
    golden_read(&set, path);
    admit(op, &set, agreed);
    golden_write(&set, path, head);
    list_file(file, op->name, op->clauses, agreed);
    golden_close(&set);
}

/* What is in the folder but not made here. */
static void list_others(void) {
    static char file[GOLDEN_ENTRY_MAX][GOLDEN_FIELD_BYTES];
    int n = golden_files(out_dir, file);
    for (int i = 0; i < n; i++) {
        if (strncmp(file[i], "bugs/", 5) == 0)
            write_bug(file[i]);
        if (strncmp(file[i], "hw_probe/", 9) == 0)
            list_file(file[i], "block", "N-MMA-1", "hardware");
    }
}

START_TEST(write_all) {
    static const golden_maker *const table[] = {golden_make_numeric, golden_make_row, golden_make_mat, golden_make_head};
    char path[BR_PATH_BYTES];
    int n_op = 0;
    path_of(path, "ops");
    CHECK_OK(br_file_make_dir(path));
    for (int i = 0; i < 4; i++)
        for (const golden_maker *m = table[i]; m->op; m++, n_op++)
            write_op(m);
    ck_assert_int_eq(n_op, golden_op_count);
    write_inspect();
    list_others();
    golden_manifest_write(out_dir, &manifest);
}
END_TEST

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: golden_write OUT_DIR\n");
        return 2;
    }
    out_dir = argv[1];
    Suite *suite = suite_create("golden_write");
    TCase *tcase = tcase_create("write");
    tcase_add_test(tcase, write_all);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed > 0;
}
