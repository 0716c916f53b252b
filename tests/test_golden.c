/* golden: the oracle on every instruction set, and the slow form, give the bits of golden/; the manifest names each file and
 * its digest; the constants of the contract are those of golden/inspect.txt. */
#include "bi_contract.h"
#include "golden_manifest.h"
#include "golden_play.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

static golden_manifest manifest;
static char golden_dir[BR_PATH_BYTES];

static void read_manifest(void) {
    snprintf(golden_dir, sizeof golden_dir, "%s/golden", test_source_dir());
    golden_manifest_read(golden_dir, &manifest);
}

/* ---- bits ------------------------------------------------------------------------------------------------------------- */

static void check_file(const golden_entry *entry) {
    static golden_set set;
    static golden_case played;
    char path[BR_PATH_BYTES];
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    const golden_op *op = golden_op_named(entry->op);
    CHECK_OK(br_file_join(path, golden_dir, entry->file));
    golden_read(&set, path);
    ck_assert_int_gt(set.n, 0);
    for (int i = 0; i < set.n; i++)
        for (int k = 0; k <= n_isa; k++) {
            const char *form = k < n_isa ? isa[k] : NULL;
            golden_run(op, form, &set.item[i], &played);
            golden_same(entry->file, form ? form : "the slow form", &played, &set.item[i]);
        }
    golden_close(&set);
}

/* Test i is file i of golden_ops. */
START_TEST(op_keeps_its_bits) {
    char file[GOLDEN_FIELD_BYTES];
    snprintf(file, sizeof file, "ops/%s.txt", golden_ops[_i].name);
    for (int i = 0; i < manifest.n; i++)
        if (strcmp(manifest.entry[i].file, file) == 0) {
            ck_assert_str_eq(manifest.entry[i].op, golden_ops[_i].name);
            ck_assert_str_eq(manifest.entry[i].clauses, golden_ops[_i].clauses);
            check_file(&manifest.entry[i]);
            return;
        }
    ck_abort_msg("MANIFEST does not name %s", file);
}
END_TEST

START_TEST(bugs_stay_away) {
    int n = 0;
    for (int i = 0; i < manifest.n; i++)
        if (strncmp(manifest.entry[i].file, "bugs/", 5) == 0) {
            check_file(&manifest.entry[i]);
            n++;
        }
    ck_assert_int_gt(n, 0);
}
END_TEST

/* ---- manifest --------------------------------------------------------------------------------------------------------- */

START_TEST(manifest_names_every_file) {
    static char file[GOLDEN_ENTRY_MAX][GOLDEN_FIELD_BYTES];
    int n = golden_files(golden_dir, file);
    for (int i = 0; i < n && i < manifest.n; i++)
        ck_assert_msg(strcmp(file[i], manifest.entry[i].file) == 0, "file %d of golden/ is %s, MANIFEST names %s", i,
                      file[i], manifest.entry[i].file);
    ck_assert_msg(n == manifest.n, "golden/ has %d files, MANIFEST names %d", n, manifest.n);
    for (int i = 0; i < n; i++) {
        char digest[BR_DIGEST_TEXT_BYTES];
        golden_file_digest(golden_dir, file[i], digest);
        ck_assert_msg(strcmp(digest, manifest.entry[i].digest) == 0, "%s has digest %s, MANIFEST says %s", file[i], digest,
                      manifest.entry[i].digest);
    }
}
END_TEST

/* A file of an op needs the slow form and all three instruction sets behind it, a probe file the hardware. */
START_TEST(manifest_says_who_agreed) {
    for (int i = 0; i < manifest.n; i++) {
        const golden_entry *e = &manifest.entry[i];
        const char *wanted = "slow,oracle-portable,oracle-avx2,oracle-avx512";
        wanted = strncmp(e->file, "hw_probe/", 9) == 0 ? "hardware" : strcmp(e->file, "inspect.txt") == 0 ? "text" : wanted;
        ck_assert_msg(strcmp(e->agreed, wanted) == 0, "%s: agreed are %s, wanted %s", e->file, e->agreed, wanted);
    }
}
END_TEST

START_TEST(contract_digest_is_the_recorded_one) {
    char digest[BR_DIGEST_TEXT_BYTES];
    br_digest_text(bi_contract_digest(), digest);
    ck_assert_str_eq(digest, manifest.contract);
}
END_TEST

/* Version, limits, layouts and each constant by name: what no arithmetic uses yet is held here alone. */
START_TEST(inspect_is_the_recorded_text) {
    br_map map;
    char path[BR_PATH_BYTES], *text = golden_inspect_text(), *rest = text;
    CHECK_OK(br_file_join(path, golden_dir, "inspect.txt"));
    CHECK_OK(br_file_map(path, &map));
    const char *wanted = (const char *)map.bytes, *end = wanted + map.n;
    for (int line = 1; wanted < end || *rest; line++) {
        const char *stop = wanted < end ? memchr(wanted, '\n', (size_t)(end - wanted)) : NULL;
        int n_wanted = stop ? (int)(stop - wanted) : (int)(end - wanted), n = (int)strcspn(rest, "\n");
        if (n != n_wanted || strncmp(rest, wanted, (size_t)n) != 0)
            ck_abort_msg("line %d of inspect is '%.*s', golden/inspect.txt has '%.*s'", line, n, rest, n_wanted, wanted);
        wanted = stop ? stop + 1 : end;
        rest += rest[n] ? n + 1 : n;
    }
    br_file_unmap(&map);
    br_mem_free(text);
}
END_TEST

Suite *test_golden_suite(void) {
    Suite *suite = suite_create("golden");
    TCase *text = tcase_create("manifest"), *bugs = tcase_create("bugs");
    tcase_add_unchecked_fixture(text, read_manifest, NULL);
    tcase_add_test(text, manifest_names_every_file);
    tcase_add_test(text, manifest_says_who_agreed);
    tcase_add_test(text, contract_digest_is_the_recorded_one);
    tcase_add_test(text, inspect_is_the_recorded_text);
    suite_add_tcase(suite, text);
    tcase_add_unchecked_fixture(bugs, read_manifest, NULL);
    tcase_add_test(bugs, bugs_stay_away);
    suite_add_tcase(suite, bugs);
    for (int i = 0; i < golden_op_count; i++) { /* a test case an op, so that each can run alone */
        TCase *tcase = tcase_create(golden_ops[i].name);
        tcase_set_timeout(tcase, 60);
        tcase_add_unchecked_fixture(tcase, read_manifest, NULL);
        tcase_add_loop_test(tcase, op_keeps_its_bits, i, i + 1);
        suite_add_tcase(suite, tcase);
    }
    return suite;
}
