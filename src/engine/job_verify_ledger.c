/* `verify` of a training run's ledger: replayed by proof, counted by stats, and put into words. Layer: engine. */
#include "job_verify_ledger.h"

#include "br_hash.h"
#include "br_mem.h"
#include "ledger_count.h"
#include "ledger_replay.h"
#include "ledger_rescore.h"
#include "job_report.h"

#include <stdio.h>
#include <string.h>

enum { LAST_STEPS = 10 }; /* whose mean reward the summary gives */

typedef struct audit {
    const br_verify_options *options;
    br_report *report;
    ledger_reader *reader;
    br_ledger_record *counted; /* (n_step) */
    int64_t n_step, n_line; /* n_line: about steps, or the run, where the two sides are not equal */
    char root[2 * BR_LEDGER_LINK_BYTES + 1], first[BR_SENTENCE_BYTES]; /* first: of these lines */
} audit;

/* ---- numbers ---------------------------------------------------------------------------------------------------------------- */

/* As the file bounds its sequences; where a bit of the bounds was flipped the replay does not look at the counts. */
static br_status count_steps(audit *a) {
    const int64_t *seq_begin = ledger_seq_begin(a->reader), *offset = ledger_offset(a->reader);
    BR_TRY(br_mem_alloc((void **)&a->counted, (size_t)a->n_step * sizeof *a->counted, "the counts of steps"));
    for (int64_t i = 0; i < a->n_step; i++) {
        ledger_seq *seq;
        const int64_t n = seq_begin[i + 1] - seq_begin[i];
        BR_TRY(br_mem_alloc((void **)&seq, (size_t)n * sizeof *seq, "the sequences of a step"));
        for (int64_t k = 0; k < n; k++)
            ledger_seq_at(a->reader, seq_begin[i] + k, offset[seq_begin[i] + k], offset[seq_begin[i] + k + 1], &seq[k]);
        ledger_count(seq, n, &a->counted[i]);
        br_mem_free(seq);
    }
    return BR_OK;
}

static void fill_report(audit *a) {
    br_report *r = a->report;
    const ledger_run *run = ledger_run_of(a->reader);
    r->n_seq = ledger_seq_count(a->reader);
    r->n_tok = ledger_tok_count(a->reader);
    r->contract_digest = run->contract;
    r->weights_digest = run->base_rollout;
    for (int64_t i = 0; i < a->n_step; i++) {
        const br_ledger_record *c = &a->counted[i];
        r->n_compared += c->n_compared;
        r->n_differ += c->n_differ;
        if (c->first_seq >= 0 && r->first_seq < 0) {
            r->first_seq = ledger_seq_begin(a->reader)[i] + c->first_seq;
            r->first_pos = c->first_pos;
        }
        r->k1 += c->k1 * (double)c->n_compared;
        r->k3 += c->k3 * (double)c->n_compared;
    }
    r->k1 = r->n_compared ? r->k1 / (double)r->n_compared : 0;
    r->k3 = r->n_compared ? r->k3 / (double)r->n_compared : 0;
}

static void take_root(audit *a) {
    br_ledger_record last;
    const uint8_t *link = ledger_run_of(a->reader)->link;
    if (a->n_step > 0) {
        ledger_record_at(a->reader, a->n_step - 1, &last);
        link = last.link;
    }
    for (int i = 0; i < BR_LEDGER_LINK_BYTES; i++) {
        a->root[2 * i] = "0123456789abcdef"[link[i] >> 4];
        a->root[2 * i + 1] = "0123456789abcdef"[link[i] & 15];
    }
}

/* ---- words ------------------------------------------------------------------------------------------------------------------ */

/* A finding: a line about a step whose two sides are not equal. The first is the sentence of the verdict, which counts them all. */
#define BAD_LINE(a, ...)                                           \
    do {                                                           \
        if ((a)->n_line == 0)                                      \
            snprintf((a)->first, sizeof (a)->first, __VA_ARGS__);  \
        if ((a)->n_line++ < REPORTED_ERRORS_MAX)                   \
            BR_TRY(report_line((a)->report, __VA_ARGS__));         \
    } while (0)

static br_status tell_run(audit *a) {
    const ledger_run *run = ledger_run_of(a->reader);
    char contract[BR_DIGEST_TEXT_BYTES], rollout[BR_DIGEST_TEXT_BYTES], trainer[BR_DIGEST_TEXT_BYTES], config[BR_DIGEST_TEXT_BYTES];
    br_digest_text(run->contract, contract);
    br_digest_text(run->base_rollout, rollout);
    br_digest_text(run->base_trainer, trainer);
    br_digest_text(run->config_digest, config);
    BR_TRY(report_line(a->report, "run         contract %s, base %s, config %s (%lld bytes)", contract, rollout, config, (long long)run->n_config));
    if (run->n_step_closed < 0)
        BR_TRY(report_line(a->report, "not closed  its run goes on or was stopped; this is the committed part"));
    if (strcmp(rollout, trainer) != 0)
        BAD_LINE(a, "run: base digests differ: rollout %s, trainer %s", rollout, trainer);
    return BR_OK;
}

static br_status tell_differing(audit *a, const br_ledger_record *record, int64_t seq_begin) {
    const int64_t i = seq_begin + record->first_seq, *offset = ledger_offset(a->reader);
    const int32_t t = (int32_t)record->first_pos;
    ledger_seq seq;
    ledger_seq_at(a->reader, i, offset[i], offset[i + 1], &seq);
    BAD_LINE(a, "step %lld: %lld of %lld log-probs differ, first at sequence %lld (uid '%s', sample %u), position %d: rollout %08x, again %08x, "
             "update %08x; k1 %.3e, k3 %.3e", (long long)record->step, (long long)record->n_differ, (long long)record->n_compared,
             (long long)record->first_seq, seq.uid, seq.sample, t, seq.logprob[LEDGER_ROLLOUT][t],
             seq.logprob[LEDGER_AGAIN][t], seq.logprob[LEDGER_UPDATE][t], record->k1, record->k3);
    return BR_OK;
}

static br_status tell_versions(audit *a, const br_ledger_record *record, int64_t begin, int64_t end) {
    const int64_t *offset = ledger_offset(a->reader);
    int64_t n = 0;
    for (int64_t i = begin; i < end; i++) {
        ledger_seq seq;
        ledger_seq_at(a->reader, i, offset[i], offset[i + 1], &seq);
        n += seq.version_begin != seq.version_end;
    }
    if (n > 0)
        BAD_LINE(a, "step %lld: %lld sequences were sampled under more than one weight version: not certified", (long long)record->step,
                 (long long)n);
    return BR_OK;
}

static br_status tell_steps(audit *a) {
    const int64_t *seq_begin = ledger_seq_begin(a->reader);
    for (int64_t i = 0; i < a->n_step; i++) {
        br_ledger_record record;
        char rollout[BR_DIGEST_TEXT_BYTES], trainer[BR_DIGEST_TEXT_BYTES];
        ledger_record_at(a->reader, i, &record);
        br_digest_text(record.adapter_rollout, rollout);
        br_digest_text(record.adapter_trainer, trainer);
        if (record.first_seq >= 0)
            BR_TRY(tell_differing(a, &record, seq_begin[i]));
        if (strcmp(rollout, trainer) != 0)
            BAD_LINE(a, "step %lld: adapter digests differ: rollout %s, trainer %s", (long long)record.step, rollout, trainer);
        BR_TRY(tell_versions(a, &record, seq_begin[i], seq_begin[i + 1]));
    }
    if (a->n_line > REPORTED_ERRORS_MAX)
        BR_TRY(report_line(a->report, "and %lld lines like these", (long long)(a->n_line - REPORTED_ERRORS_MAX)));
    return BR_OK;
}

static br_status summarize(audit *a) {
    char kl[96], reward[64] = "";
    int64_t n_off = 0, n_last = a->n_step < LAST_STEPS ? a->n_step : LAST_STEPS;
    double k3 = 0, last = 0;
    for (int64_t i = 0; i < a->n_step; i++) {
        const br_ledger_record *c = &a->counted[i];
        n_off += c->k1 != 0 || c->k3 != 0;
        k3 = c->k3 > k3 ? c->k3 : k3;
        last += i >= a->n_step - n_last ? c->reward_mean : 0;
    }
    snprintf(kl, sizeof kl, "%s", a->report->n_compared ? "KL 0 at every step" : "nothing was compared");
    if (n_off > 0)
        snprintf(kl, sizeof kl, "KL not 0 at %lld steps, at most %.3e", (long long)n_off, k3);
    if (a->n_step > 0)
        snprintf(reward, sizeof reward, "reward %.3f -> %.3f, ", a->counted[0].reward_mean, last / (double)n_last);
    return report_summary(a->report, "ledger: %lld steps, %lld of %lld log-probs differ, %s, %sroot %s", (long long)a->n_step,
                          (long long)a->report->n_differ, (long long)a->report->n_compared, kl, reward, a->root);
}

/* ---- the verdict ------------------------------------------------------------------------------------------------------------ */

static br_status replay(audit *a) {
    br_status status;
    ledger_replay *result;
    BR_TRY(br_mem_alloc((void **)&result, sizeof *result, "the replay of the ledger"));
    const br_status verdict = ledger_replay_check(a->reader, a->counted, result);
    for (int32_t i = 0; i < result->n_line; i++)
        BR_TRY_GOTO(report_line(a->report, "%s", result->line[i]), exit);
    if (verdict == BR_E_MISMATCH) {
        a->report->first_seq = result->first_seq;
        a->report->first_pos = result->first_pos;
        BR_TRY_GOTO(report_summary(a->report, "ledger: %lld steps, %lld faults: not what was written, root %s as stored", (long long)a->n_step,
                                   (long long)result->n_fault, a->root), exit);
        (void)br_fail(verdict, "%s: %s (%lld fault%s in all)", a->options->path, result->line[0], (long long)result->n_fault,
                      result->n_fault == 1 ? "" : "s");
    }
    status = verdict;
exit:
    br_mem_free(result);
    return status;
}

/* Are the two sides equal at every step, of which there is one at least? */
static br_status sides(const audit *a) {
    if (a->n_line == 0 && a->report->n_compared == 0)
        return br_fail(BR_E_MISMATCH, "%s: it holds %lld steps and no sampled token: nothing was compared", a->options->path, (long long)a->n_step);
    if (a->n_line == 0)
        return BR_OK;
    return br_fail(BR_E_MISMATCH, "%s (%lld finding%s in all)", a->first, (long long)a->n_line, a->n_line == 1 ? "" : "s");
}

br_status job_verify_ledger(const br_verify_options *options, const br_watch *watch, br_report *report) {
    br_status status;
    audit a = {.options = options, .report = report};
    BR_TRY(ledger_open(options->path, &a.reader));
    a.n_step = ledger_step_count(a.reader);
    take_root(&a);
    BR_TRY_GOTO(count_steps(&a), exit);
    fill_report(&a);
    BR_TRY_GOTO(replay(&a), exit);
    BR_TRY_GOTO(summarize(&a), exit);
    BR_TRY_GOTO(tell_run(&a), exit);
    BR_TRY_GOTO(tell_steps(&a), exit);
    if (options->engine.model_dir)
        BR_TRY_GOTO(ledger_rescore(a.reader, options, watch, report), exit);
    status = sides(&a);
exit:
    ledger_close(a.reader);
    br_mem_free(a.counted);
    return status;
}
