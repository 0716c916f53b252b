/* The library as others meet it: what it exports, its header as C99 and C++11, the installed tree, the example built against
 * that tree with nothing but pkg-config. */
#include "rollout_file.h"
#include "test_support.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

enum { TEXT_BYTES = 1 << 16, NAME_MAX_COUNT = 256, NAME_BYTES = 64 };

static char folder[128];        /* of the whole suite */
static char output[TEXT_BYTES]; /* of the last command: stdout and stderr together */

/* Runs a shell command with P as the installed prefix and SRC as the source tree; returns its exit code. */
static int shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int shell(const char *format, ...) {
    char line[1024], command[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    snprintf(command, sizeof command, "exec 2>&1; P=%s/prefix SRC=%s; cd %s && { %s; }", folder, test_source_dir(), folder,
             line);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    output[fread(output, 1, sizeof output - 1, pipe)] = 0;
    return WEXITSTATUS(pclose(pipe));
}

#define SHELL_OK(...) ck_assert_msg(shell(__VA_ARGS__) == 0, "failed: %s", output)

static void install(void) {
    snprintf(folder, sizeof folder, "%s", test_tmp_dir());
    SHELL_OK("cmake --install %s --prefix $P", BITROLL_BINARY_DIR);
}

START_TEST(installed_files) {
    SHELL_OK("find $P ! -type d ! -path '*/include/bitroll/*' -printf '%%f\\n' | sort | tr '\\n' ' '");
    ck_assert_str_eq(output, "bitroll bitroll-worker bitroll.h bitroll.pc bitroll_ledger.h libbitroll.so libbitroll.so.0 "
                             "libbitroll.so." BR_VERSION_TEXT " libbitroll_bridge.so ");
}
END_TEST

/* Beside the headers of the ops lie those that they include, and no other. */
START_TEST(installed_headers_of_the_ops) {
    SHELL_OK("wanted=$(echo '#include \"bitroll_ops.h\"' | cc -I$P/include/bitroll -I$P/include -M -x c - | tr ' ' '\\n' | "
             "sed -n 's|.*/include/bitroll/||p' | sort -u); test \"$wanted\" = \"$(ls $P/include/bitroll | sort)\" || { ls $P/include/bitroll; "
             "echo expected: $wanted; exit 1; }");
}
END_TEST

/* ---- names ---------------------------------------------------------------------------------------------------------------- */

typedef struct names {
    int n;
    char name[NAME_MAX_COUNT][NAME_BYTES];
} names;

static int has(const names *list, const char *name) {
    for (int i = 0; i < list->n; i++)
        if (strcmp(list->name[i], name) == 0)
            return 1;
    return 0;
}

/* The lines of the last output. */
static void take_lines(names *list) {
    list->n = 0;
    for (char *line = strtok(output, "\n"); line; line = strtok(NULL, "\n")) {
        ck_assert_int_lt(list->n, NAME_MAX_COUNT);
        snprintf(list->name[list->n++], NAME_BYTES, "%s", line);
    }
}

START_TEST(exports_the_headers_only) {
    static names exported, declared;
    SHELL_OK("nm -D --defined-only $(find $P -name libbitroll.so) | awk '{print $3}'");
    take_lines(&exported);
    SHELL_OK("sed -n 's/^[a-z].*[ *]\\(br_[a-z_0-9]*\\)(.*/\\1/p' $P/include/bitroll.h $P/include/bitroll_ledger.h $P/include/bitroll/bitroll_ops.h");
    take_lines(&declared);
    ck_assert_int_gt(declared.n, 20);
    for (int i = 0; i < exported.n; i++) {
        ck_assert_msg(strncmp(exported.name[i], "br_", 3) == 0, "exported without our prefix: %s", exported.name[i]);
        ck_assert_msg(has(&declared, exported.name[i]), "exported, but in no header: %s", exported.name[i]);
    }
    for (int i = 0; i < declared.n; i++)
        ck_assert_msg(has(&exported, declared.name[i]), "in the header, but not exported: %s", declared.name[i]);
}
END_TEST

START_TEST(headers_alone) {
    SHELL_OK("echo '#include <bitroll_ledger.h>' >h.c && cc -std=c99 -Wall -Wextra -pedantic -Werror -I$P/include -fsyntax-only h.c");
    SHELL_OK("echo '#include <bitroll_ops.h>' >o.c && cc -std=gnu11 -Wall -Wextra -Werror -I$P/include -I$P/include/bitroll -fsyntax-only o.c");
    SHELL_OK("cp h.c h.cc && c++ -std=c++11 -Wall -Wextra -pedantic -Werror -I$P/include -fsyntax-only h.cc");
}
END_TEST

/* ---- the example ---------------------------------------------------------------------------------------------------------- */

/* The command gives the same tokens and bits for the same request: both are one engine. */
static void expect_same_as_command(const char *printed) {
    char path[256];
    rollout_reader *reader;
    rollout_seq seq;
    SHELL_OK("echo '{\"uid\": \"example\", \"prompt\": [17, 4, 99, 23]}' >p.jsonl && $P/bin/bitroll generate --model pico "
             "--prompts p.jsonl --seed 7 --max-new 8 --ignore-eos --out r.h5");
    snprintf(path, sizeof path, "%s/r.h5", folder);
    CHECK_OK(rollout_open(path, &reader));
    rollout_seq_at(reader, 0, &seq);
    ck_assert_int_eq(seq.n_tok, 12);
    for (int t = 4; t < 12; t++) {
        char line[128];
        snprintf(line, sizeof line, "sample 0 position %d token %d logprob %08x", t, seq.token[t], seq.logprob[t]);
        ck_assert_msg(strstr(printed, line) != NULL, "expected '%s' in: %s", line, printed);
    }
    rollout_reader_close(reader);
}

START_TEST(example) {
    static char printed[TEXT_BYTES];
    char pkg[256];
    snprintf(pkg, sizeof pkg, "PKG_CONFIG_PATH=$(dirname $(find $P -name bitroll.pc)) pkg-config");
    SHELL_OK("cc -std=c99 -Wall -Wextra -pedantic -Werror $SRC/examples/rollout.c $(%s --cflags --libs bitroll) -Wl,-rpath,$(%s "
             "--variable=libdir bitroll) -o rollout", pkg, pkg);
    SHELL_OK("$P/bin/bitroll init --preset pico --out pico");
    SHELL_OK("./rollout pico");
    ck_assert_ptr_nonnull(strstr(output, "sample 1 position 4 token -1 logprob 7fc00000 aborted\n"));
    ck_assert_ptr_nonnull(strstr(output, " end\n"));
    memcpy(printed, output, sizeof printed);
    expect_same_as_command(printed);
    ck_assert_int_eq(shell("./rollout nowhere"), 1);
    ck_assert_ptr_nonnull(strstr(output, "open: nowhere/config.json"));
}
END_TEST

START_TEST(example_is_short) {
    SHELL_OK("wc -l <$SRC/examples/rollout.c");
    ck_assert_int_le(atoi(output), 45);
}
END_TEST

Suite *test_library_suite(void) {
    Suite *suite = suite_create("library");
    TCase *tcase = tcase_create("library");
    tcase_set_timeout(tcase, 60);
    tcase_add_unchecked_fixture(tcase, install, NULL);
    tcase_add_test(tcase, installed_files);
    tcase_add_test(tcase, installed_headers_of_the_ops);
    tcase_add_test(tcase, exports_the_headers_only);
    tcase_add_test(tcase, headers_alone);
    tcase_add_test(tcase, example);
    tcase_add_test(tcase, example_is_short);
    suite_add_tcase(suite, tcase);
    return suite;
}
