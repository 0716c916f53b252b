/* test_support: what the suites share. Every tests/test_<name>.c exports `Suite *test_<name>_suite(void)`. */
#ifndef TEST_SUPPORT_H
#define TEST_SUPPORT_H

#include <check.h>
#include <stdint.h>

#define SUITE(name) Suite *test_##name##_suite(void);
#include "suites.h"
#undef SUITE

int test_is_long(void);                       /* ./run test --long */
int test_thread_count(void);                  /* 2 */
const char *test_source_dir(void);            /* root of the source tree */
const char *test_tmp_dir(void);               /* an empty folder of this test process, removed at exit */
uint64_t test_mix(uint64_t x);                /* a 64-bit mixer: random inputs from counters */
/* Fresh random seed per run in --long, fixed otherwise; printed on failure by the suites that use it. */
uint64_t test_seed(void);

/* Begins a shell command of two ranks on this machine. The component of shared memory has another name since Open MPI 5, as in launch.sh. */
#define TEST_MPIRUN                                                                                                                  \
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1; "    \
    "case $(mpirun --version | head -n 1) in *' 4.'*) shared=vader ;; *) shared=sm ;; esac; "                                        \
    "timeout -k 5 90 mpirun -n 2 --mca pml ob1 --mca btl self,$shared --oversubscribe"

#define CHECK_OK(call)                                                                                   \
    do {                                                                                                 \
        br_status check_ok_status_ = (call);                                                             \
        ck_assert_msg(check_ok_status_ == BR_OK, "%s: %s: %s", #call, br_status_name(check_ok_status_), \
                      br_last_error());                                                                  \
    } while (0)
#define CHECK_FAILS(call, wanted)                                                                                            \
    do {                                                                                                                     \
        br_status check_fails_status_ = (call);                                                                              \
        ck_assert_msg(check_fails_status_ == (wanted), "%s: got %s (%s), wanted %s", #call,                                  \
                      br_status_name(check_fails_status_), br_last_error(), br_status_name(wanted));                         \
    } while (0)

#endif
