/* Text, clock and stamps of reports; see report.h. */
#include "job_report.h"

#include "bi_cuda_open.h"
#include "br_mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

br_status report_line(br_report *report, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    const size_t used = report->text ? strlen(report->text) : 0, n = strlen(line);
    const char *phase = br_mem_exempt_begin();
    br_status status = br_mem_grow((void **)&report->text, used, used + n + 2, "the report");
    br_mem_exempt_end(phase);
    BR_TRY(status);
    memcpy(report->text + used, line, n);
    report->text[used + n] = '\n';
    return BR_OK;
}

br_status report_error(br_report *report, br_failure *first, const rollout_seq *seq, br_status error, const char *sentence) {
    if (report->n_error < REPORTED_ERRORS_MAX)
        BR_TRY(report_line(report, "error: %s#%u: %s", seq->uid, seq->sample, sentence));
    (void)br_fail(error, "%s#%u: %s", seq->uid, seq->sample, sentence);
    if (report->n_error++ == 0)
        *first = br_failure_keep(error);
    return BR_OK;
}

void report_errors_told(const br_report *report, int64_t n, const br_failure *first, const char *after) {
    if (report->n_error > 0)
        (void)br_fail(first->status, "%lld of %lld sequence%s ended in error, the first: %s%s", (long long)report->n_error, (long long)n,
                      n == 1 ? "" : "s", first->sentence, after);
}

void report_errors_in_files(const br_report *report, int64_t n, const rollout_reader *a, const rollout_reader *b) {
    const rollout_reader *file[] = {a, b};
    for (int k = 0; k < 2 && report->n_error > 0; k++)
        for (int64_t i = 0; file[k] && i < rollout_seq_count(file[k]); i++) {
            rollout_seq seq;
            rollout_seq_at(file[k], i, &seq);
            if (!seq.status)
                continue;
            (void)br_fail((br_status)seq.error, "%s#%u: %s", seq.uid, seq.sample, br_status_name((br_status)seq.error));
            const br_failure first = br_failure_keep((br_status)seq.error);
            report_errors_told(report, n, &first, "");
            return;
        }
}

br_status report_backend(br_report *report, const bi_backend *backend) {
    char note[BI_CUDA_NOTE_BYTES];
    bi_cuda_note(backend, note);
    return note[0] ? report_line(report, "%s", note) : BR_OK;
}

br_status report_histogram(br_report *report, const int64_t bucket[PARITY_BUCKET_COUNT]) {
    for (int i = 0; i < PARITY_BUCKET_COUNT; i++) {
        int64_t first, last;
        parity_bucket_range(i, &first, &last);
        if (bucket[i] > 0 && first == last)
            BR_TRY(report_line(report, "ulp %-23lld %lld", (long long)first, (long long)bucket[i]));
        else if (bucket[i] > 0)
            BR_TRY(report_line(report, "ulp %10lld..%-11lld %lld", (long long)first, (long long)last,
                               (long long)bucket[i]));
    }
    return BR_OK;
}

br_status report_summary(br_report *report, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    br_mem_free(report->summary);
    BR_TRY(br_mem_alloc((void **)&report->summary, (size_t)n + 1, "the summary of a report"));
    va_start(args, format);
    vsnprintf(report->summary, (size_t)n + 1, format, args);
    va_end(args);
    return BR_OK;
}

void br_report_free(br_report *report) {
    for (int32_t i = 0; i < report->n_adapter; i++)
        br_mem_free((void *)(uintptr_t)report->adapter_name[i]);
    br_mem_free(report->adapter_name);
    br_mem_free(report->adapter_digest);
    br_mem_free(report->text);
    br_mem_free(report->summary);
    memset(report, 0, sizeof *report);
}

double report_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void report_stamp(char stamp[ROLLOUT_STAMP_BYTES], const char *verb, const char *backend) {
    struct timespec now;
    uint64_t nonce = 0;
    clock_gettime(CLOCK_REALTIME, &now);
    if (getrandom(&nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce)
        nonce = (uint64_t)now.tv_nsec << 32 | (uint64_t)getpid();
    snprintf(stamp, ROLLOUT_STAMP_BYTES, "%s/%s/%016llx", verb, backend, (unsigned long long)nonce);
}

br_status report_progress(const br_watch *watch, const char *what, int64_t done, int64_t total) {
    if (watch && watch->call && watch->call(watch->context, what, done, total) != 0)
        return br_fail(BR_E_ABORTED, "stopped by the caller after %lld of %lld %s", (long long)done, (long long)total, what);
    return BR_OK;
}
