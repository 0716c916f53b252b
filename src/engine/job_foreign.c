/* The comparison of `parity --foreign`: files of any stacks. Layer: engine. The comparison is stats/foreign_*; here it becomes a report. */
#include "foreign_hints.h"
#include "job_report.h"

/* Bad input rather than a difference: no slot has a log-prob on both sides. */
static int nothing_compared(const foreign_result *r) {
    return r->n_compared == 0 && r->n_nan == 0;
}

static br_status add_counts(br_report *report, const foreign_files *files, const foreign_result *r) {
    BR_TRY(report_line(report, "files       %s (%s) against %s (%s), log-probs of kind %s", files->meta_a->source, files->meta_a->producer,
                       files->meta_b->source, files->meta_b->producer, foreign_quantity_name(files->quantity)));
    BR_TRY(report_line(report, "sequences   %lld joined, %lld only in the first file, %lld only in the second, %lld twice",
                       (long long)r->n_joined, (long long)r->n_only_a, (long long)r->n_only_b, (long long)r->n_doubled));
    BR_TRY(report_line(report, "differing   %lld sequences in token ids; %lld tokens in one mask only; %lld sequences ended in error",
                       (long long)r->n_tokens_differ, (long long)r->n_mask_differ, (long long)r->n_error));
    if (r->first_token.pos >= 0)
        BR_TRY(report_line(report, "first id    uid '%s', sample %u, position %lld: %d against %d (-1: the sequence ends)",
                           r->first_token.uid, r->first_token.sample, (long long)r->first_token.pos, (int32_t)r->first_token.bits_a,
                           (int32_t)r->first_token.bits_b));
    return report_line(report, "log-probs   %lld compared, %lld differ, %lld NaN, %lld in one file only", (long long)r->n_compared,
                       (long long)r->n_differ, (long long)r->n_nan, (long long)r->n_missing);
}

static br_status add_distances(br_report *report, const foreign_result *r) {
    BR_TRY(report_line(report, "k1 %.17g  k3 %.17g  max |d| %.17g  max ulp %lld", r->k1, r->k3, r->max_abs, (long long)r->max_ulp));
    BR_TRY(report_line(report, "probs       |p - q| max %.9g, mean %.9g, std %.9g", r->max_prob, r->prob.mean,
                       foreign_mean_deviation(&r->prob)));
    if (!r->has_pearson)
        return report_line(report, "pearson     undefined: one side is constant");
    return report_line(report, "pearson     %.9g", r->pearson);
}

static br_status add_sequences(br_report *report, const foreign_result *r) {
    for (int64_t i = 0; i < r->n_seq_differ && i < FOREIGN_LISTED_MAX; i++) {
        const foreign_listed *at = &r->listed[i];
        BR_TRY(report_line(report, "first       uid '%s', sample %u, position %lld: %.9g (%08x) against %.9g (%08x); %lld of %lld differ",
                           at->place.uid, at->place.sample, (long long)at->place.pos, parity_value(at->place.bits_a), at->place.bits_a,
                           parity_value(at->place.bits_b), at->place.bits_b, (long long)at->n_differ, (long long)at->n_compared));
    }
    if (r->n_seq_differ > FOREIGN_LISTED_MAX)
        return report_line(report, "            and %lld more sequences", (long long)(r->n_seq_differ - FOREIGN_LISTED_MAX));
    return BR_OK;
}

typedef struct hint_lines {
    br_report *report;
    br_status status;
} hint_lines;

static void add_hint(void *context, const char *sentence) {
    hint_lines *lines = context;
    if (lines->status == BR_OK)
        lines->status = report_line(lines->report, "hint        %s", sentence);
}

static br_status fill_report(const foreign_files *files, const foreign_result *r, br_report *report) {
    hint_lines lines = {.report = report};
    report->n_seq = r->n_joined;
    report->n_tok = rollout_tok_count(files->a);
    report->n_compared = r->n_compared;
    report->n_differ = r->n_differ;
    if (r->n_seq_differ > 0) {
        report->first_seq = r->listed[0].place.seq;
        report->first_pos = r->listed[0].place.pos;
    }
    report->max_ulp = r->max_ulp;
    report->k1 = r->k1;
    report->k3 = r->k3;
    BR_TRY(add_counts(report, files, r));
    if (!nothing_compared(r)) {
        BR_TRY(add_distances(report, r));
        BR_TRY(report_histogram(report, r->bucket));
        BR_TRY(add_sequences(report, r));
    }
    foreign_hints(files, r, add_hint, &lines);
    return lines.status;
}

/* The sentence names why: two stacks that name their sequences differently, other texts, other slots. */
static br_status say_nothing_compared(const char *path_a, const char *path_b, const foreign_files *files, const foreign_result *r) {
    rollout_seq a, b;
    if (rollout_seq_count(files->a) == 0 || rollout_seq_count(files->b) == 0)
        return br_fail(BR_E_ARG, "%s and %s: nothing was compared: the %s file holds no sequence", path_a, path_b,
                       rollout_seq_count(files->a) == 0 ? "first" : "second");
    rollout_seq_at(files->a, 0, &a);
    rollout_seq_at(files->b, 0, &b);
    if (r->n_joined == 0)
        return br_fail(BR_E_ARG, "%s and %s: nothing was compared: no sequence is in both; they are joined by (uid, sample), such as "
                       "('%.80s', %u) in the first file and ('%.80s', %u) in the second: give equal texts equal uids in both dumps",
                       path_a, path_b, a.uid, a.sample, b.uid, b.sample);
    if (r->n_error == r->n_joined)
        return br_fail(BR_E_ARG, "%s and %s: nothing was compared: every sequence that is in both ended in error", path_a, path_b);
    if (r->n_tokens_differ > 0 && r->n_missing == 0)
        return br_fail(BR_E_ARG, "%s and %s: nothing was compared: %lld of %lld sequences that are in both have other token ids before the first "
                       "log-prob", path_a, path_b, (long long)r->n_tokens_differ, (long long)r->n_joined);
    return br_fail(BR_E_ARG, "%s and %s: nothing was compared: no token of either mask has a log-prob in both files", path_a, path_b);
}

br_status br_job_parity_foreign(const char *path_a, const char *path_b, br_report *report) {
    br_status status;
    rollout_reader *a = NULL, *b = NULL;
    foreign_files files = {0};
    foreign_result result;
    const double begin = report_clock();
    *report = (br_report){.first_seq = -1, .first_pos = -1};
    BR_TRY_GOTO(rollout_open_foreign(path_a, &a), exit);
    BR_TRY_GOTO(rollout_open_foreign(path_b, &b), exit);
    BR_TRY_GOTO(foreign_files_open(a, b, &files), exit);
    foreign_compare(&files, &result);
    if (!nothing_compared(&result) || result.n_joined > result.n_error) /* else there is nothing to count or to hint at */
        BR_TRY_GOTO(fill_report(&files, &result, report), exit);
    report->seconds = report_clock() - begin;
    if (nothing_compared(&result))
        status = say_nothing_compared(path_a, path_b, &files, &result);
    else if (!result.passed)
        status = br_fail(BR_E_MISMATCH, "%s and %s: %s", path_a, path_b, result.reason);
exit:
    foreign_files_close(&files);
    rollout_reader_close(b);
    rollout_reader_close(a);
    return status;
}
