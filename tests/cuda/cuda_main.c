/* The runner on a GPU: `bitroll_cuda_tests SUITE...`, without a name all. Every case compares the CUDA backend with the oracle,
 * byte for byte. Exit 1 when a check failed, 2 without a GPU. */
#include "br_device.h"

#include <check.h>
#include <stdio.h>
#include <string.h>

#define SUITE(name) Suite *cuda_##name##_suite(void);
#include "cuda_suites.h"
#undef SUITE

static const struct {
    const char *name;
    Suite *(*make)(void);
} suites[] = {
#define SUITE(name) {#name, cuda_##name##_suite},
#include "cuda_suites.h"
#undef SUITE
};

enum { SUITE_COUNT = sizeof suites / sizeof suites[0] };

static int named(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return 1;
    return argc == 1;
}

static void run(Suite *suite, int *n_failed, int *n_run) {
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK); /* a CUDA context does not survive a fork */
    srunner_run_all(runner, CK_ENV);
    *n_failed += srunner_ntests_failed(runner);
    *n_run += srunner_ntests_run(runner);
    srunner_free(runner);
}

int main(int argc, char **argv) {
    br_device *device;
    if (br_device_open("cuda", &device) != BR_OK) {
        fprintf(stderr, "%s\n", br_last_error());
        return 2;
    }
    br_device_close(device);
    setvbuf(stdout, NULL, _IOLBF, 0);
    int n_failed = 0, n_run = 0;
    for (int i = 0; i < SUITE_COUNT; i++) /* a runner each, so that what was seen is said before the next begins */
        if (named(suites[i].name, argc, argv))
            run(suites[i].make(), &n_failed, &n_run);
    return n_failed > 0 || n_run == 0;
}
