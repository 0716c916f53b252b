/* job_report: filling a br_report. Layer: engine. */
#ifndef JOB_REPORT_H
#define JOB_REPORT_H

#include "bi_backend.h"
#include "parity.h"

enum { REPORTED_ERRORS_MAX = 100 }; /* requests that are listed; the others are only counted */

/* Adds a line to report->text. */
br_status report_line(br_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
br_status report_histogram(br_report *report, const int64_t bucket[PARITY_BUCKET_COUNT]); /* a line a bucket that is not empty */
/* One more sequence that ended in error: counted, and listed while there are few. `first` keeps the first of them. */
br_status report_error(br_report *report, br_failure *first, const rollout_seq *seq, br_status error, const char *sentence);
/* The last act of a job that is done: where sequences ended in error, br_last_error() says how many of n and which first. after: what follows
 * from it, or "". */
void report_errors_told(const br_report *report, int64_t n, const br_failure *first, const char *after);
/* The same of files that say only which status it was; NULL: no such file. */
void report_errors_in_files(const br_report *report, int64_t n, const rollout_reader *a, const rollout_reader *b);
/* Sets report->summary. */
br_status report_summary(br_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
double report_clock(void); /* seconds of a clock that only rises */
/* Lines of what the backend found when it was opened; of the oracle none. */
br_status report_backend(br_report *report, const bi_backend *backend);
/* Names one producer: verb, backend and a nonce that no other run has. */
void report_stamp(char stamp[ROLLOUT_STAMP_BYTES], const char *verb, const char *backend);
/* Reports progress; BR_E_ABORTED when the watcher wants to stop. */
br_status report_progress(const br_watch *watch, const char *what, int64_t done, int64_t total);

#endif
