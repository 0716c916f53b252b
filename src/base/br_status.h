/* br_status: how every function of ours says no.
 *
 * Layer: base, includes libc and the public enum only. Owns the sentence of the last error of each thread.
 * An operating error (bad file, full disk, NaN in a request) is a status with a sentence that names what was expected and
 * what was found. A programmer's error is BR_ASSERT, which stays on in release builds. */
#ifndef BR_STATUS_H
#define BR_STATUS_H

#include "bitroll.h"

enum { BR_SENTENCE_BYTES = 1024 };

/* A failure and its sentence, for who goes on to calls that may fail too and then tells the first one. */
typedef struct br_failure {
    br_status status;
    char sentence[BR_SENTENCE_BYTES];
} br_failure;

/* Records the sentence for this thread and returns `status`, so that a failing line reads `return br_fail(BR_E_IO, ...)`. */
br_status br_fail(br_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "what: " before the sentence of the last error of this thread, when a caller knows the file or request concerned. */
br_status br_fail_context(br_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The last failure of this thread, which was `status`; and that of `failure` as the last one again, which returns its status. */
br_failure br_failure_keep(br_status status);
br_status br_fail_again(const br_failure *failure);

_Noreturn void br_assert_failed(const char *expression, const char *file, int line);

/* Forwards the first status that is not BR_OK. */
#define BR_TRY(call)                                   \
    do {                                               \
        br_status br_try_status_ = (call);             \
        if (br_try_status_ != BR_OK)                   \
            return br_try_status_;                     \
    } while (0)

/* The same inside a function that cleans up: sets `status` and jumps to the one exit label. */
#define BR_TRY_GOTO(call, label)                       \
    do {                                               \
        status = (call);                               \
        if (status != BR_OK)                           \
            goto label;                                \
    } while (0)

#define BR_ASSERT(condition) ((condition) ? (void)0 : br_assert_failed(#condition, __FILE__, __LINE__))

#endif
