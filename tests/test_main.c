/* The one runner: `bitroll_tests SUITE...` runs the named suites, without a name all of them; `--help` lists them. Exit 1 when a check
 * failed. */
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    Suite *(*make)(void);
} suites[] = {
#define SUITE(name) {#name, test_##name##_suite},
#include "suites.h"
#undef SUITE
};

enum { SUITE_COUNT = sizeof suites / sizeof suites[0], A_LINE = 9 };

static int add_suite(SRunner *runner, const char *name) {
    for (int i = 0; i < SUITE_COUNT; i++) {
        if (strcmp(suites[i].name, name) != 0)
            continue;
        srunner_add_suite(runner, suites[i].make());
        return 1;
    }
    return 0;
}

static void list_suites(FILE *to) {
    fprintf(to, "usage: bitroll_tests [SUITE...]; the suites:\n");
    for (int i = 0; i < SUITE_COUNT; i++)
        fprintf(to, " %s%s", suites[i].name, (i + 1) % A_LINE == 0 || i + 1 == SUITE_COUNT ? "\n" : "");
}

int main(int argc, char **argv) {
    SRunner *runner = srunner_create(NULL);
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        list_suites(stdout);
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        if (add_suite(runner, argv[i]))
            continue;
        fprintf(stderr, "bitroll_tests: no suite '%s'\n", argv[i]);
        list_suites(stderr);
        return 2;
    }
    for (int i = 0; argc == 1 && i < SUITE_COUNT; i++)
        add_suite(runner, suites[i].name);
    srunner_run_all(runner, CK_ENV);
    const int n_failed = srunner_ntests_failed(runner), n_run = srunner_ntests_run(runner);
    srunner_free(runner);
    return n_failed > 0 || n_run == 0;
}
