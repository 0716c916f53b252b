/* The one runner: `bitroll_tests SUITE...` runs the named suites, without a name all of them. Exit 1 when a check failed. */
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

enum { SUITE_COUNT = sizeof suites / sizeof suites[0] };

static int add_suite(SRunner *runner, const char *name) {
    for (int i = 0; i < SUITE_COUNT; i++) {
        if (strcmp(suites[i].name, name) != 0)
            continue;
        srunner_add_suite(runner, suites[i].make());
        return 1;
    }
    fprintf(stderr, "no suite '%s'\n", name);
    return 0;
}

int main(int argc, char **argv) {
    SRunner *runner = srunner_create(NULL);
    for (int i = 1; i < argc; i++)
        if (!add_suite(runner, argv[i]))
            return 2;
    for (int i = 0; argc == 1 && i < SUITE_COUNT; i++)
        add_suite(runner, suites[i].name);
    srunner_run_all(runner, CK_ENV);
    const int n_failed = srunner_ntests_failed(runner), n_run = srunner_ntests_run(runner);
    srunner_free(runner);
    return n_failed > 0 || n_run == 0;
}
