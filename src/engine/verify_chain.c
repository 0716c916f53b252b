/* The ledger's verdict on a file, as a report; see verify_chain.h. Layer: engine. */
#include "verify_chain.h"
#include "br_mem.h"
#include "job_report.h"
#include "rollout_replay.h"
#include "logprob_digest.h"

static int64_t count_errors(const rollout_reader *reader) {
    int64_t n = 0;
    for (int64_t i = 0; i < rollout_seq_count(reader); i++) {
        rollout_seq seq;
        rollout_seq_at(reader, i, &seq);
        n += seq.status != 0;
    }
    return n;
}

static br_status add_lines(const rollout_reader *reader, const rollout_replay *ledger, br_report *report) {
    const rollout_meta *meta = rollout_reader_meta(reader);
    char link[BR_DIGEST_TEXT_BYTES];
    br_digest_text(ledger->link, link);
    BR_TRY(report_line(report, "chain       %lld sequences, %lld faults, last link %s", (long long)ledger->n_seq,
                       (long long)ledger->n_fault, link));
    if (meta->n_seq_closed < 0)
        BR_TRY(report_line(report, "not closed  its run goes on or was stopped; this is the committed part"));
    for (int32_t i = 0; i < ledger->n_line; i++)
        BR_TRY(report_line(report, "%s", ledger->line[i]));
    return BR_OK;
}

br_status verify_chain(const rollout_reader *reader, br_report *report) {
    br_status status;
    rollout_replay *ledger;
    const rollout_meta *meta = rollout_reader_meta(reader);
    BR_TRY(br_mem_alloc((void **)&ledger, sizeof *ledger, "the replay of the chain"));
    br_status verdict = rollout_replay_check(reader, ledger);
    report->n_seq = ledger->n_seq;
    report->n_tok = rollout_tok_count(reader);
    report->n_error = count_errors(reader);
    report->weights_digest = meta->weights_digest;
    report->contract_digest = meta->contract_digest;
    report->first_seq = ledger->first_seq;
    report->first_pos = -1;
    BR_TRY_GOTO(add_lines(reader, ledger, report), exit);
    BR_TRY_GOTO(logprob_digest_of_file(reader, &report->logprob_digest), exit);
    status = verdict;
exit:
    br_mem_free(ledger);
    return status;
}
