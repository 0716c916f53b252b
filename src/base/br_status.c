/* The error sentence of each thread, and the table of status names. */
#include "br_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WHOLE_BYTES = 8192, HEAD_BYTES = 500 };

static _Thread_local char sentence[BR_SENTENCE_BYTES];

/* A sentence is one line that is safe on a terminal, whatever bytes the names in it have: they come from anybody's files.
 * Of a long one the middle goes: a path stands in front, the reason at the end. */
static void keep(char *whole) {
    const size_t n = strlen(whole), n_tail = BR_SENTENCE_BYTES - HEAD_BYTES - 3;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)whole[i] < 0x20 || whole[i] == 0x7f)
            whole[i] = '?';
    if (n < BR_SENTENCE_BYTES) {
        memcpy(sentence, whole, n + 1);
        return;
    }
    memcpy(sentence, whole, HEAD_BYTES);
    memcpy(sentence + HEAD_BYTES, "...", 3);
    memcpy(sentence + HEAD_BYTES + 3, whole + n + 1 - n_tail, n_tail);
}

br_status br_fail(br_status status, const char *format, ...) {
    char whole[WHOLE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(whole, sizeof whole, format, args);
    va_end(args);
    keep(whole);
    return status;
}

br_status br_fail_context(br_status status, const char *format, ...) {
    char whole[WHOLE_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(whole, sizeof whole, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof whole)
        snprintf(whole + n, sizeof whole - (size_t)n, ": %s", sentence);
    keep(whole);
    return status;
}

br_failure br_failure_keep(br_status status) {
    br_failure failure = {.status = status};
    memcpy(failure.sentence, sentence, sizeof sentence);
    return failure;
}

br_status br_fail_again(const br_failure *failure) {
    memcpy(sentence, failure->sentence, sizeof sentence);
    return failure->status;
}

const char *br_last_error(void) {
    return sentence;
}

const char *br_status_name(br_status status) {
    switch (status) {
    case BR_OK: return "ok";
    case BR_E_ARG: return "bad argument";
    case BR_E_SHAPE: return "bad shape";
    case BR_E_ALIGN: return "bad alignment";
    case BR_E_LIMIT: return "limit exceeded";
    case BR_E_IO: return "input or output failed";
    case BR_E_FORMAT: return "bad file";
    case BR_E_NOT_FOUND: return "not found";
    case BR_E_UNSUPPORTED: return "not supported";
    case BR_E_NOMEM: return "out of memory";
    case BR_E_CAPACITY: return "capacity exhausted";
    case BR_E_NAN: return "not a number in the forward pass";
    case BR_E_MISMATCH: return "check failed";
    case BR_E_ABORTED: return "aborted";
    case BR_E_DEVICE: return "device failed";
    }
    return "unknown status";
}

void br_assert_failed(const char *expression, const char *file, int line) {
    fprintf(stderr, "bitroll: assertion failed: %s (%s:%d)\n", expression, file, line);
    abort();
}
