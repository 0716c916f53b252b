/* cuda_case: a TCase for each test, so that CK_RUN_CASE=TEST runs it alone: sanitizers take minutes for one. */
#ifndef CUDA_CASE_H
#define CUDA_CASE_H

#include <check.h>

/* set_up and tear_down may be NULL. */
static inline void cuda_case(Suite *suite, const char *name, const TTest *test, SFun set_up, SFun tear_down) {
    TCase *one = tcase_create(name);
    tcase_set_timeout(one, 0);
    if (set_up)
        tcase_add_unchecked_fixture(one, set_up, tear_down);
    tcase_add_test(one, test);
    suite_add_tcase(suite, one);
}
#define CUDA_CASE(suite, test) cuda_case(suite, #test, test, NULL, NULL)
#define CUDA_CASE_IN(suite, test, set_up, tear_down) cuda_case(suite, #test, test, set_up, tear_down)

#endif
