/* job_generate: a prompts file through the engine into a rollout file.
 *
 * Layer: engine. Every (prompt line, sample) is one request; order of arrival, batch and cache are the engine's business and
 * cannot show in the file but through the order of its sequences. A request that fails is recorded with its error, the rest
 * completes; where none finishes nothing is written. */
#include "engine_parts.h"

#include "br_file.h"
#include "job_output.h"
#include "job_report.h"
#include "logprob_digest.h"
#include "prompts.h"
#include "receipt.h"
#include "record_writer.h"
#include "resume_check.h"
#include "run_uid.h"

#include <stdio.h>
#include <string.h>

enum { POLL_TOKENS = 256 };

/* One sample of one prompt line. */
typedef struct work_item {
    int32_t line;
    uint32_t sample;
    int64_t index; /* in file order */
} work_item;

typedef struct generate {
    const br_generate_options *options;
    const br_watch *watch;
    br_report *report;
    prompts *lines;
    br_engine *engine;
    rollout_meta meta;
    rollout_writer *file;
    record_writer *writer;
    work_item *item; /* (n_item) in order of arrival */
    int64_t n_item, next;
    int64_t *line_first; /* (n_line) index of the line's sample 0 */
    uint8_t *done;       /* (n_item) by index: in the file already */
    record **running; /* by index of the request id */
    int64_t n_new, n_new_total;
    br_failure first_error;
} generate;

static int64_t sample_count(const generate *g, const prompt_line *line) {
    if (line->has & PROMPT_HAS_N)
        return line->n_sample;
    return g->options->n_sample ? g->options->n_sample : 1;
}

/* Items in file order, or permuted by the shuffle seed (Fisher-Yates on a counter hash). */
static br_status list_items(generate *g) {
    for (int64_t i = 0; i < prompts_count(g->lines); i++)
        g->n_item += sample_count(g, prompts_at(g->lines, i));
    BR_TRY(br_mem_alloc((void **)&g->item, (size_t)g->n_item * sizeof *g->item, "the list of samples"));
    BR_TRY(br_mem_alloc((void **)&g->done, (size_t)g->n_item, "the list of samples"));
    BR_TRY(br_mem_alloc((void **)&g->line_first, (size_t)prompts_count(g->lines) * sizeof(int64_t), "the list of samples"));
    int64_t at = 0;
    for (int64_t i = 0; i < prompts_count(g->lines); i++) {
        const prompt_line *line = prompts_at(g->lines, i);
        g->line_first[i] = at;
        for (int64_t k = 0; k < sample_count(g, line); k++, at++) {
            g->item[at] = (work_item){.line = (int32_t)i, .sample = (uint32_t)k, .index = at};
            g->n_new_total += line->sampling.max_new;
        }
    }
    for (int64_t i = g->n_item - 1; i > 0 && g->options->shuffle_seed; i--) {
        const uint64_t counter[2] = {g->options->shuffle_seed, (uint64_t)i};
        const int64_t other = (int64_t)(br_hash_u64(counter, sizeof counter) % (uint64_t)(i + 1));
        const work_item swap = g->item[i];
        g->item[i] = g->item[other];
        g->item[other] = swap;
    }
    return BR_OK;
}

static void fill_meta(generate *g) {
    const br_loaded *loaded = &g->engine->loaded;
    snprintf(g->meta.producer, sizeof g->meta.producer, "rollout");
    snprintf(g->meta.backend, sizeof g->meta.backend, "%s", loaded->backend.op->name);
    report_stamp(g->meta.producer_stamp, "generate", loaded->backend.op->name);
    g->meta.weights_digest = loaded->weights_digest;
    g->meta.contract_digest = br_contract_digest();
    g->meta.config_digest = loaded->config_digest;
    g->meta.has_entropy = g->options->sampling.entropy;
    g->meta.n_top = g->options->sampling.top_logprobs;
    const run_identity run = {
        .contract = g->meta.contract_digest, .weights = g->meta.weights_digest, .n_adapter = g->report->n_adapter,
        .adapter_name = g->report->adapter_name, .adapter_digest = g->report->adapter_digest,
        .n_sample = g->options->n_sample ? g->options->n_sample : 1, .seed = g->options->seed, .lines = g->lines,
    };
    g->meta.run_uid = run_uid(&run);
}

/* The longest record: a text that fits, or the prompt of one that will be refused. */
static int32_t tok_max(const generate *g) {
    int64_t most = 1;
    for (int64_t i = 0; i < prompts_count(g->lines); i++) {
        const prompt_line *line = prompts_at(g->lines, i);
        const int64_t whole = (int64_t)line->n_token + line->sampling.max_new;
        const int64_t n = whole <= g->engine->loaded.n_pos_max ? whole : line->n_token;
        most = n > most ? n : most;
    }
    return (int32_t)most;
}

/* What of a sequence is known before its first token, but the token ids and what its adapter is made of. */
static void begin_seq(const generate *g, rollout_seq *seq, int64_t line_index, uint32_t sample) {
    const prompt_line *line = prompts_at(g->lines, line_index);
    const br_sampling *s = &line->sampling;
    snprintf(seq->uid, sizeof seq->uid, "%s", line->uid);
    snprintf(seq->adapter, sizeof seq->adapter, "%s", line->adapter ? line->adapter : "base");
    seq->prompt_index = (uint32_t)line_index;
    seq->sample = sample;
    seq->seed = line->has & PROMPT_HAS_SEED ? line->seed : g->options->seed;
    seq->temperature = s->temperature;
    seq->min_p = s->min_p;
    seq->top_p = s->top_p;
    seq->top_k = s->top_k;
    seq->max_new = s->max_new;
    seq->min_new = s->min_new;
    seq->ignore_eos = s->ignore_eos;
    seq->n_stop = s->n_stop;
    memcpy(seq->stop_token, s->stop, sizeof seq->stop_token);
    seq->prompt_len = seq->n_tok = line->n_token;
}

static void begin_record(const generate *g, record *r, const work_item *item) {
    const prompt_line *line = prompts_at(g->lines, item->line);
    begin_seq(g, &r->seq, item->line, item->sample);
    memcpy(r->token, line->token, (size_t)line->n_token * sizeof(int32_t));
}

/* A sequence of the file is done when this run would begin it just so. */
static br_status check_done(const generate *g, const rollout_seq *have) {
    rollout_seq want = {0};
    int32_t slot;
    begin_seq(g, &want, have->prompt_index, have->sample);
    want.token = prompts_at(g->lines, have->prompt_index)->token;
    if (have->status == 0) {
        BR_TRY(br_loaded_slot(&g->engine->loaded, want.adapter, &slot));
        want.adapter_digest = br_loaded_adapter_digest(&g->engine->loaded, slot);
    }
    return resume_check(g->options->out_path, have, &want);
}

static br_status mark_done(generate *g, const rollout_reader *reader) {
    for (int64_t i = 0; i < rollout_seq_count(reader); i++) {
        rollout_seq seq;
        rollout_seq_at(reader, i, &seq);
        if (seq.prompt_index >= prompts_count(g->lines) || seq.sample >= sample_count(g, prompts_at(g->lines, seq.prompt_index)))
            return br_fail(BR_E_ARG, "%s: cannot resume: it holds %s#%u, which the prompts do not ask for", g->options->out_path, seq.uid,
                           seq.sample);
        BR_TRY(check_done(g, &seq));
        if (seq.status)
            BR_TRY(report_error(g->report, &g->first_error, &seq, (br_status)seq.error, br_status_name((br_status)seq.error)));
        g->done[g->line_first[seq.prompt_index] + seq.sample] = 1;
        g->n_new_total -= prompts_at(g->lines, seq.prompt_index)->sampling.max_new;
    }
    return BR_OK;
}

static br_status open_file(generate *g) {
    const char *path = g->options->out_path;
    if (!g->options->resume || !br_file_exists(path))
        return rollout_create(path, &g->meta, &g->file);
    rollout_reader *reader;
    BR_TRY(rollout_open(path, &reader));
    br_status status = mark_done(g, reader);
    rollout_reader_close(reader);
    BR_TRY(status);
    return rollout_resume(path, &g->meta, &g->file);
}

static br_status end_record(generate *g, record *r, br_stop_reason stop, br_status error, const char *sentence) {
    rollout_seq *seq = &r->seq;
    seq->stop = (uint8_t)stop;
    if (error != BR_OK) {
        seq->status = 1;
        seq->stop = BR_STOP_ERROR;
        seq->error = error;
        BR_TRY(report_error(g->report, &g->first_error, seq, error, sentence));
    }
    BR_TRY(receipt_make(&g->meta, seq));
    return record_give(g->writer, r);
}

/* Submits items while there is room. A request that is refused is recorded as an error at once. */
static br_status submit_some(generate *g) {
    for (; g->next < g->n_item; g->next++) {
        const work_item *item = &g->item[g->next];
        const prompt_line *line = prompts_at(g->lines, item->line);
        uint64_t id = 0;
        record *r;
        if (g->done[item->index])
            continue;
        br_status status = record_take(g->writer, &r);
        if (status == BR_E_LIMIT)
            return BR_OK;
        BR_TRY(status);
        begin_record(g, r, item);
        br_request request = {.uid = line->uid, .prompt = line->token, .n_prompt = line->n_token, .sample = item->sample, .seed = r->seq.seed,
                              .adapter = line->adapter, .sampling = line->sampling};
        request.sampling.entropy = g->options->sampling.entropy;
        request.sampling.top_logprobs = g->options->sampling.top_logprobs;
        status = br_submit(g->engine, &request, &id);
        if (status == BR_E_LIMIT) { /* as many requests are held as records exist; this one waits */
            BR_TRY(record_return(g->writer, r));
            return BR_OK;
        }
        if (status != BR_OK) {
            BR_TRY(end_record(g, r, BR_STOP_ERROR, status, br_last_error()));
            g->n_new_total -= line->sampling.max_new;
            continue;
        }
        int32_t slot;
        BR_TRY(br_loaded_slot(&g->engine->loaded, line->adapter, &slot));
        r->seq.adapter_digest = br_loaded_adapter_digest(&g->engine->loaded, slot);
        g->running[engine_request_index(id)] = r;
    }
    return BR_OK;
}

static void take_top(const generate *g, record *r, const br_token *token) {
    br_top_logprob top[BR_TOP_LOGPROBS_MAX];
    const int32_t n = br_top_logprobs(g->engine, token->request, top), n_top = g->meta.n_top;
    for (int32_t k = 0; k < n; k++) {
        r->top_token[(size_t)token->position * (size_t)n_top + (size_t)k] = top[k].token;
        r->top_logprob[(size_t)token->position * (size_t)n_top + (size_t)k] = top[k].logprob;
    }
}

static br_status take_token(generate *g, const br_token *token) {
    record *r = g->running[engine_request_index(token->request)];
    if (token->token >= 0) {
        const int32_t at = token->position;
        r->token[at] = token->token;
        r->logprob[at] = token->logprob;
        r->logprob_raw[at] = token->logprob_raw;
        r->logprob_kept[at] = token->logprob_kept;
        r->entropy[at] = token->entropy;
        r->mask[at] = 1;
        r->seq.n_tok = at + 1;
        take_top(g, r, token);
        g->n_new++;
    }
    if (!token->last)
        return BR_OK;
    g->running[engine_request_index(token->request)] = NULL;
    g->n_new_total -= r->seq.max_new - (r->seq.n_tok - r->seq.prompt_len); /* texts that end early leave less to do */
    const char *sentence = "";
    br_status error = token->stop == BR_STOP_ERROR ? br_request_error(g->engine, token->request, &sentence) : BR_OK;
    return end_record(g, r, token->stop, error, sentence);
}

static br_status run(generate *g) {
    br_token token[POLL_TOKENS];
    int32_t n, done = 0;
    while (!done || g->next < g->n_item) {
        BR_TRY(submit_some(g));
        BR_TRY(br_poll(g->engine, token, POLL_TOKENS, &n, &done));
        for (int32_t i = 0; i < n; i++)
            BR_TRY(take_token(g, &token[i]));
        BR_TRY(report_progress(g->watch, "tokens", g->n_new, g->n_new_total));
    }
    return BR_OK;
}

/* The digest is taken from the file itself, so that it covers what an earlier, killed run committed. */
static br_status digest_file(generate *g) {
    rollout_reader *reader;
    if (!job_output_is_worth(g->report))
        return BR_OK;
    BR_TRY(rollout_open(g->options->out_path, &reader));
    g->report->n_seq = rollout_seq_count(reader);
    br_status status = g->report->n_seq == g->n_item
                           ? logprob_digest_of_file(reader, &g->report->logprob_digest)
                           : br_fail(BR_E_IO, "%s holds %lld of %lld sequences: another process wrote to this path", g->options->out_path,
                                     (long long)g->report->n_seq, (long long)g->n_item);
    rollout_reader_close(reader);
    return status;
}

static br_status open_parts(generate *g) {
    const br_generate_options *o = g->options;
    if (o->n_sample < 0 || o->n_sample >= 1 << 24)
        return br_fail(BR_E_ARG, "%d samples a prompt: expected 1 to 2^24 - 1", o->n_sample);
    BR_TRY(job_output_check(o->out_path, o->prompts_path));
    BR_TRY(prompts_read(o->prompts_path, &o->sampling, &g->lines));
    BR_TRY(br_engine_open(&o->engine, &g->engine));
    BR_TRY(br_loaded_report(&g->engine->loaded, g->report));
    BR_TRY(report_backend(g->report, &g->engine->loaded.backend));
    BR_TRY(list_items(g));
    g->report->n_seq = g->n_item;
    BR_TRY(br_mem_alloc((void **)&g->running, (size_t)g->engine->n_request_max * sizeof(record *), "running records"));
    fill_meta(g);
    BR_TRY(open_file(g));
    return record_writer_open(g->file, g->engine->n_request_max + 8, tok_max(g), g->meta.n_top, o->commit_every, &g->writer);
}

br_status br_job_generate(const br_generate_options *options, const br_watch *watch, br_report *report) {
    br_status status, closed;
    generate g = {.options = options, .watch = watch, .report = report};
    memset(report, 0, sizeof *report);
    BR_TRY_GOTO(open_parts(&g), exit);
    const double begin = report_clock();
    status = run(&g);
    report->seconds = report_clock() - begin;
    report->n_tok = g.n_new;
    report->peak_seqs = g.engine->peak_seqs;
exit:
    closed = record_writer_close(g.writer);
    if (status == BR_OK)
        status = closed;
    if (status == BR_OK)
        status = job_output_close(g.file, report);
    else
        rollout_abandon(g.file);
    if (status == BR_OK)
        status = digest_file(&g);
    br_engine_close(g.engine);
    prompts_close(g.lines);
    br_mem_free(g.item);
    br_mem_free(g.done);
    br_mem_free(g.line_first);
    br_mem_free(g.running);
    if (status == BR_OK)
        report_errors_told(report, report->n_seq, &g.first_error, job_output_is_worth(report) ? "" : "; nothing is written");
    return status;
}
