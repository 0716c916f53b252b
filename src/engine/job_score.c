/* job_score: sequences through the trainer's forward into a file of the trainer's side.
 *
 * Layer: engine. Whole sequences in packs, in file order; the log-probs of every token but the first. A sequence that cannot
 * be scored is recorded with its error, the rest completes; where none can nothing is written. Nothing is committed on the way: no scoring
 * is resumed, so an older file stays until this one is whole. */
#include "job_output.h"
#include "job_report.h"
#include "logprob_digest.h"
#include "receipt.h"
#include "run_uid.h"
#include "score_input.h"
#include "scorer.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_PACK = 2048 };

typedef struct score {
    const br_score_options *options;
    const br_watch *watch;
    br_report *report;
    score_input input;
    br_loaded loaded;
    scorer *scorer;
    rollout_meta meta;
    rollout_writer *file;
    logprob_leaf *leaf; /* (n_seq) */
    uint32_t *bits;     /* four rows-long arrays: logprob, raw, entropy, unscored */
    int64_t n_seq_done;
    br_failure first_error;
} score;

static br_status fill_meta(score *s) {
    const br_loaded *loaded = &s->loaded;
    rollout_meta *meta = &s->meta;
    *meta = (rollout_meta){.weights_digest = loaded->weights_digest, .contract_digest = br_contract_digest(), .config_digest = loaded->config_digest,
                           .has_entropy = s->input.meta.has_entropy};
    snprintf(meta->producer, sizeof meta->producer, "trainer");
    snprintf(meta->backend, sizeof meta->backend, "%s", loaded->backend.op->name);
    report_stamp(meta->producer_stamp, "score", loaded->backend.op->name);
    if (s->input.from_rollout) {
        meta->run_uid = s->input.meta.run_uid;
        return BR_OK;
    }
    const run_identity run = {.contract = meta->contract_digest, .weights = meta->weights_digest, .n_adapter = s->report->n_adapter,
                              .adapter_name = s->report->adapter_name, .adapter_digest = s->report->adapter_digest,
                                      .n_sample = 1, .lines = s->input.lines};
    meta->run_uid = run_uid(&run);
    return BR_OK;
}

/* The record of input sequence i; log-probs unscored until the pack has run. */
static void begin_record(const score *s, int64_t i, rollout_seq *out) {
    *out = s->input.seq[i];
    out->logprob = out->logprob_raw = out->logprob_kept = out->entropy = NULL;
    out->top_token = NULL;
    out->top_logprob = NULL;
    out->status = 0;
    out->error = 0;
    if (s->options->adapter_override)
        snprintf(out->adapter, sizeof out->adapter, "%s", s->options->adapter_override);
}

static br_status note_error(score *s, rollout_seq *seq, br_status error) {
    seq->status = 1;
    seq->stop = BR_STOP_ERROR;
    seq->error = error;
    return report_error(s->report, &s->first_error, seq, error, br_last_error());
}

/* What can be wrong with a sequence before it runs. */
static br_status prepare(const score *s, const rollout_seq *seq, scorer_seq *out) {
    const int32_t first_asked = s->input.from_rollout ? seq->prompt_len : 1;
    *out = (scorer_seq){.token = seq->token, .n_tok = seq->n_tok, .first_asked = first_asked, .temperature = seq->temperature};
    BR_TRY(br_loaded_slot(&s->loaded, seq->adapter, &out->slot));
    BR_TRY(br_loaded_check_length(&s->loaded, seq->n_tok));
    for (int32_t t = 0; t < seq->n_tok; t++)
        if (seq->token[t] < 0 || seq->token[t] >= s->loaded.config.n_vocab)
            return br_fail(BR_E_ARG, "token %d at position %d: expected 0 to %d", seq->token[t], t, s->loaded.config.n_vocab - 1);
    return BR_OK;
}

static br_status write_record(score *s, int64_t i, rollout_seq *seq) {
    BR_TRY(receipt_make(&s->meta, seq));
    BR_TRY(rollout_append(s->file, seq));
    s->leaf[i] = logprob_leaf_of(seq);
    s->n_seq_done++;
    return BR_OK;
}

/* Points the records' arrays at slices of the pack's bits. row: where each sequence's slice begins. */
static void slice_bits(score *s, rollout_seq *seq, scorer_seq *item, int32_t row) {
    const size_t n = (size_t)s->loaded.n_row_max;
    uint32_t *logprob = s->bits + row, *raw = s->bits + n + (size_t)row, *entropy = s->bits + 2 * n + (size_t)row, *unscored = s->bits + 3 * n;
    for (int32_t t = 0; t < seq->n_tok; t++)
        logprob[t] = raw[t] = entropy[t] = BR_UNSCORED;
    item->logprob = logprob;
    item->logprob_raw = raw;
    item->entropy = s->meta.has_entropy ? entropy : NULL;
    seq->logprob = logprob;
    seq->logprob_raw = raw;
    seq->logprob_kept = unscored; /* the scorer does not sample: nothing is filtered */
    seq->entropy = entropy;
}

static br_status score_pack(score *s, rollout_seq *seq, scorer_seq *item, const int64_t *index, int32_t n) {
    const bi_bf16 *final;
    for (int32_t i = 0, row = 0; i < n; row += item[i].n_tok, i++)
        slice_bits(s, &seq[i], &item[i], row);
    const double begin = report_clock();
    BR_TRY(scorer_forward(s->scorer, item, n, NULL, &final));
    BR_TRY(scorer_logprobs(s->scorer, item, n, final));
    s->report->forward_seconds += report_clock() - begin;
    for (int32_t i = 0; i < n; i++) {
        if (item[i].fault) {
            for (int32_t t = 0; t < seq[i].n_tok; t++)
                item[i].logprob[t] = item[i].logprob_raw[t] = BR_UNSCORED;
            if (item[i].entropy)
                memcpy(item[i].entropy, item[i].logprob, (size_t)seq[i].n_tok * sizeof(uint32_t));
            BR_TRY(note_error(s, &seq[i], br_loaded_fault(item[i].fault, item[i].fault_pos)));
        } else {
            seq[i].adapter_digest = br_loaded_adapter_digest(&s->loaded, item[i].slot);
            s->report->n_tok += seq[i].n_tok;
        }
        BR_TRY(write_record(s, index[i], &seq[i]));
    }
    return report_progress(s->watch, "sequences", s->n_seq_done, s->input.n_seq);
}

/* An input sequence that ended in error, or that cannot run here, goes through unscored. */
static br_status pass_through(score *s, int64_t i, rollout_seq *seq) {
    seq->logprob = seq->logprob_raw = seq->logprob_kept = seq->entropy = s->bits + 3 * (size_t)s->loaded.n_row_max;
    return write_record(s, i, seq);
}

static br_status run(score *s) {
    rollout_seq seq[SCORER_PACK_MAX];
    scorer_seq item[SCORER_PACK_MAX];
    int64_t index[SCORER_PACK_MAX], next = 0;
    int32_t n = 0;
    while (next < s->input.n_seq || n > 0) {
        int32_t n_fit = 0;
        if (n < SCORER_PACK_MAX && next < s->input.n_seq) {
            begin_record(s, next, &seq[n]);
            br_status ready = s->input.seq[next].status ? br_fail(BR_E_ARG, "the rollout ended in error") : prepare(s, &seq[n], &item[n]);
            if (ready != BR_OK && n == 0) { /* else the pack before it goes first: the file keeps the input's order */
                BR_TRY(note_error(s, &seq[n], ready));
                BR_TRY(pass_through(s, next++, &seq[n]));
                continue;
            }
            index[n] = next;
            if (ready == BR_OK)
                BR_TRY(scorer_fit(s->scorer, item, n + 1, &n_fit));
            if (ready == BR_OK && n_fit == n + 1) {
                n++;
                next++;
                continue;
            }
        }
        BR_TRY(score_pack(s, seq, item, index, n));
        n = 0;
    }
    return BR_OK;
}

/* The unscored array is as long as the longest sequence, one that is too long to run included. */
static br_status open_bits(score *s) {
    size_t n_row = (size_t)s->loaded.n_row_max, n_unscored = n_row;
    for (int64_t i = 0; i < s->input.n_seq; i++)
        n_unscored = (size_t)s->input.seq[i].n_tok > n_unscored ? (size_t)s->input.seq[i].n_tok : n_unscored;
    BR_TRY(br_mem_alloc((void **)&s->bits, (3 * n_row + n_unscored) * sizeof(uint32_t), "log-probs of a pack"));
    for (size_t t = 0; t < n_unscored; t++)
        s->bits[3 * n_row + t] = BR_UNSCORED;
    return BR_OK;
}

static br_status open_parts(score *s) {
    const br_score_options *o = s->options;
    const int32_t pack = o->pack_tokens ? o->pack_tokens : DEFAULT_PACK;
    if (pack < 1 || pack > BR_POSITION_MAX)
        return br_fail(BR_E_ARG, "pack_tokens %d: expected 1 to %d", pack, BR_POSITION_MAX);
    BR_TRY(job_output_check(o->out_path, o->in_path));
    BR_TRY(score_input_open(o->in_path, &s->input));
    BR_TRY(scorer_load(&o->engine, pack, s->input.n_tok_max ? s->input.n_tok_max : 1, &s->loaded));
    BR_TRY(br_loaded_report(&s->loaded, s->report));
    BR_TRY(report_backend(s->report, &s->loaded.backend));
    if (s->input.from_rollout && !br_digest_equal(s->input.meta.config_digest, s->loaded.config_digest))
        return br_fail(BR_E_MISMATCH, "%s was made with another model shape than %s", o->in_path, o->engine.model_dir);
    if (o->adapter_override) {
        int32_t slot;
        BR_TRY(br_loaded_slot(&s->loaded, o->adapter_override, &slot));
    }
    BR_TRY(scorer_open(&s->loaded, &s->scorer));
    BR_TRY(open_bits(s));
    BR_TRY(br_mem_alloc((void **)&s->leaf, (size_t)s->input.n_seq * sizeof *s->leaf, "digests of sequences"));
    BR_TRY(fill_meta(s));
    return rollout_create(o->out_path, &s->meta, &s->file);
}

br_status br_job_score(const br_score_options *options, const br_watch *watch, br_report *report) {
    br_status status;
    score s = {.options = options, .watch = watch, .report = report};
    memset(report, 0, sizeof *report);
    BR_TRY_GOTO(open_parts(&s), exit);
    const double begin = report_clock();
    BR_TRY_GOTO(run(&s), exit);
    report->seconds = report_clock() - begin;
    report->n_seq = s.n_seq_done;
    if (job_output_is_worth(report))
        report->logprob_digest = logprob_digest(s.leaf, s.n_seq_done);
exit:
    if (status == BR_OK)
        status = job_output_close(s.file, report);
    else
        rollout_abandon(s.file);
    scorer_close(s.scorer);
    br_loaded_close(&s.loaded);
    score_input_close(&s.input);
    br_mem_free(s.bits);
    br_mem_free(s.leaf);
    if (status == BR_OK)
        report_errors_told(report, report->n_seq, &s.first_error, job_output_is_worth(report) ? "" : "; nothing is written");
    return status;
}
