/* job_verify: is a file whole, and does the model really say what it says? Of a rollout file; a ledger has its own, job_verify_ledger.
 *
 * Layer: engine. First the hash chain is replayed, which needs no model. With a model, sequences drawn by seed are computed
 * again in the scoring form and every sampled token is drawn again from its logits: token and log-prob bits must be equal. */
#include "draw.h"
#include "job_report.h"
#include "job_verify_ledger.h"
#include "ledger_file.h"
#include "receipt.h"
#include "sampling.h"
#include "score_input.h"
#include "scorer.h"
#include "verify_chain.h"

#include <string.h>

enum { LOGIT_ROWS = 64, DEFAULT_RECOMPUTE = 4 };

typedef struct verify {
    const br_verify_options *options;
    const br_watch *watch;
    br_report *report;
    score_input input;
    br_loaded loaded;
    scorer *scorer;
    uint8_t *chosen; /* (n_seq) */
    draw draw; /* LOGIT_ROWS rows at a time */
} verify;

static bi_sampling setting_of(const rollout_seq *seq, int32_t position) {
    return (bi_sampling){.temperature = seq->temperature, .min_p = seq->min_p, .top_k = seq->top_k, .top_p_q32 = bi_sample_top_p(seq->top_p),
                         .entropy = 1, .seed = seq->seed, .uid_hash = seq->uid_hash, .sample = seq->sample, .position = position};
}

/* Notes the first difference of a sequence; returns 1 when the bits differ. */
static int differs(verify *v, int64_t i, int32_t position, const char *what, uint32_t file, float computed) {
    uint32_t bits;
    memcpy(&bits, &computed, sizeof bits);
    v->report->n_compared++;
    if (file == bits)
        return 0;
    v->report->n_differ++;
    if (v->report->first_seq < 0) {
        v->report->first_seq = i;
        v->report->first_pos = position;
    }
    br_fail(BR_E_MISMATCH, "%s#%u position %d: %s is %08x in the file and %08x when computed again", v->input.seq[i].uid,
            v->input.seq[i].sample, position, what, file, bits);
    return 1;
}

/* Positions first .. first + n - 1 of sequence i against their rows; row 0 of the block predicts position first. */
static br_status compare_block(verify *v, int64_t i, const bi_bf16 *final, int32_t first, int32_t n) {
    const rollout_seq *seq = &v->input.seq[i];
    const draw *d = &v->draw;
    for (int32_t t = 0; t < n; t++) {
        d->row[t] = first - 1 + t;
        d->setting[t] = setting_of(seq, first + t);
        d->forced[t] = -1;
    }
    BR_TRY(draw_upload(&v->draw, n));
    BR_TRY(draw_ops(&v->draw, final, scorer_row_fault(v->scorer)));
    BR_TRY(draw_download(&v->draw));
    BR_TRY(br_device_wait(v->loaded.device));
    for (int32_t t = 0; t < n; t++) {
        const int32_t position = first + t;
        if (!seq->mask[position])
            continue;
        if (d->fault[t])
            return br_loaded_fault(d->fault[t], position - 1);
        if (d->token[t] != seq->token[position]) {
            v->report->n_differ++;
            return br_fail(BR_E_MISMATCH, "%s#%u position %d: the file has token %d, the sampler draws %d", seq->uid,
                           seq->sample, position, seq->token[position], d->token[t]);
        }
        if (differs(v, i, position, "logprob", seq->logprob[position], d->logprob[t]) ||
            differs(v, i, position, "logprob_raw", seq->logprob_raw[position], d->logprob_raw[t]) ||
            (seq->logprob_kept[position] != BR_UNSCORED && /* a scorer does not sample: it leaves this one open */
             differs(v, i, position, "logprob_kept", seq->logprob_kept[position], d->logprob_kept[t])) ||
            (v->input.meta.has_entropy && differs(v, i, position, "entropy", seq->entropy[position], d->entropy[t])))
            return BR_E_MISMATCH;
    }
    return BR_OK;
}

/* A text ends exactly where its settings say. */
static br_status check_end(const verify *v, const rollout_seq *seq) {
    const br_sampling rules = {.max_new = seq->max_new, .min_new = seq->min_new, .ignore_eos = seq->ignore_eos, .n_stop = seq->n_stop};
    br_sampling s = rules;
    br_stop_reason reason;
    memcpy(s.stop, seq->stop_token, sizeof s.stop);
    for (int32_t n_new = 1; seq->prompt_len + n_new <= seq->n_tok; n_new++) {
        const int ends = sampling_ends(&s, v->loaded.config.eos_id, n_new, seq->token[seq->prompt_len + n_new - 1], &reason);
        const int last = seq->prompt_len + n_new == seq->n_tok;
        if (ends != last || (last && reason != (br_stop_reason)seq->stop))
            return br_fail(BR_E_MISMATCH, "%s#%u: ends with reason %d after %d tokens, which its settings do not say",
                           seq->uid, seq->sample, seq->stop, seq->n_tok - seq->prompt_len);
    }
    return BR_OK;
}

static br_status recompute(verify *v, int64_t i) {
    const rollout_seq *seq = &v->input.seq[i];
    const bi_bf16 *final;
    scorer_seq item = {.token = seq->token, .n_tok = seq->n_tok, .temperature = seq->temperature};
    BR_TRY(br_loaded_slot(&v->loaded, seq->adapter, &item.slot));
    BR_TRY(br_loaded_check_length(&v->loaded, seq->n_tok));
    if (seq->stop != BR_STOP_ABORT)
        BR_TRY(check_end(v, seq));
    BR_TRY(scorer_forward(v->scorer, &item, 1, NULL, &final));
    BR_TRY(scorer_faults(v->scorer, &item, 1));
    if (item.fault)
        return br_loaded_fault(item.fault, item.fault_pos);
    for (int32_t at = seq->prompt_len; at < seq->n_tok; at += LOGIT_ROWS) {
        const int32_t left = seq->n_tok - at;
        BR_TRY(compare_block(v, i, final, at, left < LOGIT_ROWS ? left : LOGIT_ROWS));
    }
    v->report->n_tok += seq->n_tok - seq->prompt_len;
    return BR_OK;
}

static br_status check_adapter(const verify *v, const rollout_seq *seq) {
    int32_t slot;
    BR_TRY(br_loaded_slot(&v->loaded, seq->adapter, &slot));
    if (br_digest_equal(seq->adapter_digest, br_loaded_adapter_digest(&v->loaded, slot)))
        return BR_OK;
    return br_fail(BR_E_MISMATCH, "%s#%u: made with another adapter '%s' than the one given", seq->uid, seq->sample, seq->adapter);
}

/* Of every finished sequence, not only of those that are drawn. The first is named, all of its kind are counted; where an adapter is absent
 * nothing can be said of the file, so that comes before one that is another. */
static br_status check_adapters(const verify *v) {
    br_failure first[2] = {{BR_OK, ""}, {BR_OK, ""}}; /* absent, another */
    int64_t n[2] = {0, 0};
    for (int64_t i = 0; i < v->input.n_seq; i++) {
        const rollout_seq *seq = &v->input.seq[i];
        const br_status status = seq->status ? BR_OK : check_adapter(v, seq);
        const int kind = status == BR_E_MISMATCH;
        if (status != BR_OK && n[kind]++ == 0)
            first[kind] = br_failure_keep(status);
    }
    const int kind = n[0] == 0;
    if (n[kind] == 0)
        return BR_OK;
    return br_fail(first[kind].status, "%s (%lld sequence%s in all)", first[kind].sentence, (long long)n[kind], n[kind] == 1 ? "" : "s");
}

static br_status open_model(verify *v) {
    const rollout_meta *meta = &v->input.meta;
    BR_TRY(br_loaded_prepare(&v->options->engine, LOGIT_ROWS, v->input.n_tok_max, 1, &v->loaded));
    draw_room(&v->loaded, LOGIT_ROWS);
    scorer_room(&v->loaded);
    BR_TRY(br_loaded_pack(&v->loaded));
    BR_TRY(br_loaded_report(&v->loaded, v->report));
    BR_TRY(report_backend(v->report, &v->loaded.backend));
    if (!br_digest_equal(meta->contract_digest, br_contract_digest()))
        return br_fail(BR_E_MISMATCH, "%s was made under another numeric contract than this build's", v->options->path);
    if (!br_digest_equal(meta->weights_digest, v->loaded.weights_digest))
        return br_fail(BR_E_MISMATCH, "%s was made with other weights than %s", v->options->path, v->options->engine.model_dir);
    BR_TRY(check_adapters(v));
    BR_TRY(draw_open(&v->draw, &v->loaded, LOGIT_ROWS));
    return scorer_open(&v->loaded, &v->scorer);
}

/* Draws n_recompute finished sequences without repetition; all of them when there are no more. */
static br_status choose(verify *v, int64_t *n_chosen) {
    const int64_t want = v->options->n_recompute ? v->options->n_recompute : DEFAULT_RECOMPUTE;
    int64_t left = 0, need = want;
    BR_TRY(br_mem_alloc((void **)&v->chosen, (size_t)v->input.n_seq + 1, "the drawn sequences"));
    for (int64_t i = 0; i < v->input.n_seq; i++)
        left += !v->input.seq[i].status;
    need = need < left ? need : left;
    *n_chosen = need;
    for (int64_t i = 0; i < v->input.n_seq && need > 0; i++)
        if (!v->input.seq[i].status)
            v->chosen[i] = (uint8_t)verify_draw(v->options->seed, i, &left, &need);
    return BR_OK;
}

static br_status run(verify *v) {
    int64_t n_chosen, n_done = 0;
    v->report->n_tok = v->report->n_compared = 0; /* from here on: what is computed again */
    BR_TRY(choose(v, &n_chosen));
    for (int64_t i = 0; i < v->input.n_seq; i++) {
        if (!v->chosen[i])
            continue;
        BR_TRY(recompute(v, i));
        BR_TRY(report_progress(v->watch, "sequences", ++n_done, n_chosen));
    }
    return report_line(v->report, "recomputed %lld of %lld sequences, %lld tokens drawn again: equal", (long long)n_chosen,
                       (long long)v->input.n_seq, (long long)v->report->n_tok);
}

static void close_all(verify *v) {
    draw_close(&v->draw);
    scorer_close(v->scorer);
    br_loaded_close(&v->loaded);
    score_input_close(&v->input);
    br_mem_free(v->chosen);
}

br_status br_job_verify(const br_verify_options *options, const br_watch *watch, br_report *report) {
    br_status status;
    verify v = {.options = options, .watch = watch, .report = report};
    memset(report, 0, sizeof *report);
    report->first_seq = report->first_pos = -1;
    if (ledger_is_at(options->path))
        return job_verify_ledger(options, watch, report);
    BR_TRY(score_input_open_rollout(options->path, &v.input));
    BR_TRY_GOTO(verify_chain(v.input.reader, report), exit);
    if (options->engine.model_dir && v.input.n_tok_max > 0) {
        BR_TRY_GOTO(open_model(&v), exit);
        const double begin = report_clock();
        BR_TRY_GOTO(run(&v), exit);
        report->seconds = report_clock() - begin;
    }
    report_errors_in_files(report, report->n_seq, v.input.reader, NULL);
exit:
    close_all(&v);
    return status;
}
