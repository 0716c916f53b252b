/* The error sentence of each thread, and the table of status names. */
#include "br_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SENTENCE_BYTES = 1024 };

static _Thread_local char sentence[SENTENCE_BYTES];

br_status br_fail(br_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    return status;
}

br_status br_fail_context(br_status status, const char *format, ...) {
    char whole[SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(whole, sizeof whole, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof whole)
        snprintf(whole + n, sizeof whole - (size_t)n, ": %.*s", (int)sizeof whole - n - 3, sentence);
    memcpy(sentence, whole, sizeof sentence);
    return status;
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
