/* Packs of a ledger's sequences through the scorer; see ledger_rescore.h. Layer: engine. */
#include "ledger_rescore.h"

#include "job_report.h"
#include "scorer.h"
#include "verify_chain.h"

#include <string.h>

enum { PACK_TOKENS = 2048 };

typedef struct rescore {
    const ledger_reader *reader;
    const br_verify_options *options;
    const br_watch *watch;
    br_report *report;
    br_loaded loaded;
    scorer *scorer;
    uint32_t *bits; /* (2, n_row_max) */
    int64_t n_step, n_seq, n_tok, n_differ;
} rescore;

/* The slot that a step ran on; 0: its adapter is not among those loaded. */
static int slot_of(const rescore *r, br_digest adapter, int32_t *slot) {
    *slot = -1;
    if (!adapter.lo && !adapter.hi)
        return 1;
    for (int32_t i = 0; i < r->options->engine.n_adapter; i++)
        if (br_loaded_slot(&r->loaded, r->options->engine.adapter[i].name, slot) == BR_OK &&
            br_digest_equal(br_loaded_adapter_digest(&r->loaded, *slot), adapter))
            return 1;
    return 0;
}

static br_status open_model(rescore *r) {
    const ledger_run *run = ledger_run_of(r->reader);
    const int64_t *offset = ledger_offset(r->reader);
    int64_t longest = 1;
    for (int64_t i = 0; i < ledger_seq_count(r->reader); i++)
        longest = offset[i + 1] - offset[i] > longest ? offset[i + 1] - offset[i] : longest;
    BR_TRY(scorer_load(&r->options->engine, PACK_TOKENS, (int32_t)longest, &r->loaded));
    BR_TRY(br_loaded_report(&r->loaded, r->report));
    BR_TRY(report_backend(r->report, &r->loaded.backend));
    if (!br_digest_equal(run->contract, br_contract_digest()))
        return br_fail(BR_E_MISMATCH, "%s was made under another numeric contract than this build's", r->options->path);
    if (!br_digest_equal(run->base_rollout, r->loaded.weights_digest))
        return br_fail(BR_E_MISMATCH, "%s was made with other base weights than %s", r->options->path, r->options->engine.model_dir);
    BR_TRY(br_mem_alloc((void **)&r->bits, 2 * (size_t)r->loaded.n_row_max * sizeof *r->bits, "log-probs of a pack"));
    return scorer_open(&r->loaded, &r->scorer);
}

static br_status prepare(const rescore *r, const ledger_seq *seq, int32_t slot, int32_t row, scorer_seq *out) {
    uint32_t *const bits = r->bits + row;
    *out = (scorer_seq){.token = seq->token, .n_tok = seq->n_tok, .first_asked = seq->prompt_len, .slot = slot, .temperature = seq->temperature,
                        .logprob = bits, .logprob_raw = bits + r->loaded.n_row_max};
    BR_TRY(br_loaded_check_length(&r->loaded, seq->n_tok));
    for (int32_t t = 0; t < seq->n_tok; t++)
        if (seq->token[t] >= r->loaded.config.n_vocab)
            return br_fail(BR_E_ARG, "token %d at position %d: expected 0 to %d", seq->token[t], t, r->loaded.config.n_vocab - 1);
    return BR_OK;
}

static br_status compare(rescore *r, int64_t step, int64_t i, const ledger_seq *seq, const scorer_seq *item) {
    if (item->fault)
        return br_loaded_fault(item->fault, item->fault_pos);
    for (int32_t t = 0; t < seq->n_tok; t++) {
        const uint32_t file = seq->logprob[LEDGER_ROLLOUT][t];
        if (!seq->mask[t])
            continue;
        r->n_tok++;
        if (item->logprob[t] == file || r->n_differ++ > 0)
            continue;
        br_fail(BR_E_MISMATCH, "step %lld: %s#%u position %d: log-prob %08x in the ledger and %08x when computed again", (long long)step,
                seq->uid, seq->sample, t, file, item->logprob[t]);
        r->report->first_seq = i;
        r->report->first_pos = t;
    }
    r->n_seq++;
    return BR_OK;
}

/* The next pack of chosen[from ..]; *next is behind it. */
static br_status run_pack(rescore *r, int64_t step, int32_t slot, const int64_t *chosen, int64_t n, int64_t from, int64_t *next) {
    ledger_seq seq[SCORER_PACK_MAX];
    scorer_seq item[SCORER_PACK_MAX];
    const int64_t *offset = ledger_offset(r->reader);
    const bi_bf16 *final;
    int32_t n_item = 0, n_fit = 0, row = 0;
    for (; n_item < SCORER_PACK_MAX && from + n_item < n; n_item++) {
        const int64_t i = chosen[from + n_item];
        ledger_seq_at(r->reader, i, offset[i], offset[i + 1], &seq[n_item]);
        BR_TRY(prepare(r, &seq[n_item], slot, row, &item[n_item]));
        BR_TRY(scorer_fit(r->scorer, item, n_item + 1, &n_fit));
        if (n_fit <= n_item)
            break;
        row += seq[n_item].n_tok;
    }
    BR_TRY(scorer_forward(r->scorer, item, n_fit, NULL, &final));
    BR_TRY(scorer_logprobs(r->scorer, item, n_fit, final));
    for (int32_t k = 0; k < n_fit; k++)
        BR_TRY(compare(r, step, chosen[from + k], &seq[k], &item[k]));
    *next = from + n_fit;
    return BR_OK;
}

static br_status run_step(rescore *r, int64_t i) {
    br_status status = BR_OK;
    br_ledger_record record;
    int64_t *chosen, n = 0, begin = ledger_seq_begin(r->reader)[i], end = ledger_seq_begin(r->reader)[i + 1], left = end - begin;
    int64_t need = r->options->n_recompute && r->options->n_recompute < left ? r->options->n_recompute : left;
    int32_t slot;
    ledger_record_at(r->reader, i, &record);
    if (!slot_of(r, record.adapter_rollout, &slot))
        return BR_OK;
    BR_TRY(br_mem_alloc((void **)&chosen, (size_t)left * sizeof *chosen, "the drawn sequences"));
    for (int64_t k = begin; k < end; k++)
        if (verify_draw(r->options->seed, k, &left, &need))
            chosen[n++] = k;
    for (int64_t at = 0; at < n && status == BR_OK;) {
        status = run_pack(r, record.step, slot, chosen, n, at, &at);
        if (status == BR_OK)
            status = report_progress(r->watch, "sequences of a step", at, n);
    }
    br_mem_free(chosen);
    r->n_step++;
    return status;
}

/* Is this adapter among those loaded? */
static int is_given(const rescore *r, br_digest adapter) {
    int32_t slot;
    return (adapter.lo || adapter.hi) && slot_of(r, adapter, &slot);
}

/* The usual reasons: of a training run that is done, `adapter` has seen one update more than the last step of the ledger; and a run whose
 * rollout is stale keeps what either side ran on, in two folders. */
static br_status say_nothing_fits(const rescore *r) {
    br_ledger_record last;
    char given[BR_DIGEST_TEXT_BYTES] = "none", wanted[BR_DIGEST_TEXT_BYTES], trained[BR_DIGEST_TEXT_BYTES];
    int32_t slot;
    ledger_record_at(r->reader, ledger_step_count(r->reader) - 1, &last);
    br_digest_text(last.adapter_rollout, wanted);
    br_digest_text(last.adapter_trainer, trained);
    if (is_given(r, last.adapter_trainer))
        memcpy(given, trained, sizeof given);
    else if (r->options->engine.n_adapter > 0 && br_loaded_slot(&r->loaded, r->options->engine.adapter[0].name, &slot) == BR_OK)
        br_digest_text(br_loaded_adapter_digest(&r->loaded, slot), given);
    if (!br_digest_equal(last.adapter_rollout, last.adapter_trainer))
        return br_fail(BR_E_MISMATCH, "%s: no step was sampled with an adapter that is given, nothing was computed again: given is %s, the rollout "
                       "of the last step ran on %s, which a run of arm M3 leaves in its folder adapter_last_rollout; adapter_last_step is what its "
                       "trainer ran on, %s",
                       r->options->path, given, wanted, trained);
    return br_fail(BR_E_MISMATCH, "%s: no step was sampled with an adapter that is given, nothing was computed again: given is %s, the last step ran "
                   "on %s, which a training run leaves in its folder adapter_last_step", r->options->path, given, wanted);
}

static br_status run(rescore *r) {
    BR_TRY(open_model(r));
    for (int64_t i = 0; i < ledger_step_count(r->reader); i++)
        BR_TRY(run_step(r, i));
    if (r->n_step == 0 && ledger_step_count(r->reader) > 0)
        return say_nothing_fits(r);
    BR_TRY(report_line(r->report, "recomputed  %lld sequences of %lld steps: %lld of %lld log-probs differ", (long long)r->n_seq,
                       (long long)r->n_step, (long long)r->n_differ, (long long)r->n_tok));
    return r->n_differ ? BR_E_MISMATCH : BR_OK;
}

br_status ledger_rescore(const ledger_reader *reader, const br_verify_options *options, const br_watch *watch, br_report *report) {
    rescore r = {.reader = reader, .options = options, .watch = watch, .report = report};
    const double begin = report_clock();
    br_status status = run(&r);
    report->seconds = report_clock() - begin;
    scorer_close(r.scorer);
    br_loaded_close(&r.loaded);
    br_mem_free(r.bits);
    return status;
}
