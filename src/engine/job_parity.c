/* The verb `parity`: two rollout files, bit for bit. Layer: engine. The comparison is stats/parity; here it becomes a
 * report. */
#include "job_report.h"
#include "logprob_digest.h"
#include "parity.h"

static br_status add_counts(br_report *report, const parity_result *p) {
    BR_TRY(report_line(report, "sequences   %lld joined, %lld only in the first file, %lld only in the second, %lld twice",
                       (long long)p->n_joined, (long long)p->n_only_a, (long long)p->n_only_b, (long long)p->n_doubled));
    BR_TRY(report_line(report, "errors      %lld sequences ended in error in either file", (long long)p->n_error));
    BR_TRY(report_line(report, "differing   %lld in tokens or masks, %lld in adapter, %lld in settings",
                       (long long)p->n_tokens_differ, (long long)p->n_adapter_differ, (long long)p->n_settings_differ));
    BR_TRY(report_line(report,
                       "log-probs   %lld compared, %lld differ, %lld NaN or missing; outside the mask %lld, %lld differ",
                       (long long)p->n_compared, (long long)p->n_differ, (long long)p->n_nan, (long long)p->n_other,
                       (long long)p->n_other_differ));
    BR_TRY(report_line(report, "k1 %.17g  k3 %.17g  max |d| %.17g  max ulp %lld", p->k1, p->k3, p->max_abs,
                       (long long)p->max_ulp));
    if (p->first.seq >= 0)
        BR_TRY(report_line(report, "first       sequence %lld (uid '%s', sample %u), position %lld: %08x against %08x",
                           (long long)p->first.seq, p->first.uid, p->first.sample, (long long)p->first.pos, p->first.bits_a,
                           p->first.bits_b));
    return BR_OK;
}

static br_status fill_report(const rollout_reader *a, const parity_result *p, br_report *report) {
    const rollout_meta *meta = rollout_reader_meta(a);
    report->n_seq = p->n_joined;
    report->n_tok = rollout_tok_count(a);
    report->n_error = p->n_error;
    report->weights_digest = meta->weights_digest;
    report->contract_digest = meta->contract_digest;
    report->n_compared = p->n_compared;
    report->n_differ = p->n_differ;
    report->first_seq = p->first.seq;
    report->first_pos = p->first.pos;
    report->max_ulp = p->max_ulp;
    report->k1 = p->k1;
    report->k3 = p->k3;
    BR_TRY(add_counts(report, p));
    BR_TRY(report_histogram(report, p->bucket));
    return logprob_digest_of_file(a, &report->logprob_digest);
}

br_status br_job_parity(const char *path_a, const char *path_b, br_report *report) {
    br_status status;
    rollout_reader *a = NULL, *b = NULL;
    parity_result result;
    double begin = report_clock();
    *report = (br_report){.first_seq = -1, .first_pos = -1};
    BR_TRY_GOTO(rollout_open(path_a, &a), exit);
    BR_TRY_GOTO(rollout_open(path_b, &b), exit);
    BR_TRY_GOTO(parity_compare(a, b, &result), exit);
    BR_TRY_GOTO(fill_report(a, &result, report), exit);
    report->seconds = report_clock() - begin;
    if (result.passed)
        report_errors_in_files(report, report->n_seq, a, b);
    else
        status = br_fail(BR_E_MISMATCH, "%s and %s: %s", path_a, path_b, result.reason);
exit:
    rollout_reader_close(b);
    rollout_reader_close(a);
    return status;
}
