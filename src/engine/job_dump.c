/* job_dump: the bits of every stage of every row as hashes, by the scoring forward or by the paged engine.
 *
 * Layer: engine. Both ways look at the same rows, those that predict a given token, so that two dumps compare with plain
 * diff and the first differing line names the op. */
#include "engine_parts.h"
#include "score_input.h"
#include "scorer.h"
#include "stage_lines.h"

#include <stdio.h>
#include <string.h>

typedef struct dump {
    const br_dump_options *options;
    score_input input;
    stage_lines lines;
    int32_t *row_seq, *row_pos; /* (n_row_max) */
    br_engine *engine;          /* NULL: scoring */
    uint64_t *request;          /* (n_seq) ids, through the engine */
    int64_t n_tok;
} dump;

/* A sequence that ended in error has no rows that anybody computed. */
static int wanted(const dump *d, int64_t i) {
    return (d->options->seq < 0 || d->options->seq == i) && !d->input.seq[i].status;
}

/* Rows that predict a given token; the only row of a sequence of one token. */
static int row_wanted(const dump *d, const rollout_seq *seq, int32_t pos) {
    const br_dump_options *o = d->options;
    const int32_t last = seq->n_tok > 1 ? seq->n_tok - 2 : 0;
    return pos <= last && (o->pos_min < 0 || pos >= o->pos_min) && (o->pos_max < 0 || pos <= o->pos_max);
}

/* A line of a prompts file has no response: all but its first token then stand for one. */
static int32_t prompt_len_of(const dump *d, const rollout_seq *seq) {
    return d->input.from_rollout && seq->prompt_len < seq->n_tok ? seq->prompt_len : 1;
}

static void add_logprob(dump *d, int64_t i, int32_t pos, int32_t n_layer, uint32_t bits) {
    if (row_wanted(d, &d->input.seq[i], pos))
        stage_lines_add(&d->lines, (int32_t)i, pos, n_layer, BR_STAGE_LOGPROB, &bits, sizeof bits);
}

static br_status open_rows(dump *d, int32_t n_row_max) {
    BR_TRY(br_mem_alloc((void **)&d->row_seq, (size_t)n_row_max * sizeof(int32_t), "the dump"));
    BR_TRY(br_mem_alloc((void **)&d->row_pos, (size_t)n_row_max * sizeof(int32_t), "the dump"));
    d->lines.row_seq = d->row_seq;
    d->lines.row_pos = d->row_pos;
    d->lines.want_choices = d->options->choices;
    return BR_OK;
}

/* ---- the scoring forward --------------------------------------------------------------------------------------------------- */

static br_status score_one(dump *d, scorer *s, br_loaded *loaded, int64_t i, uint32_t *logprob, uint32_t *raw) {
    const rollout_seq *seq = &d->input.seq[i];
    const bi_bf16 *final;
    const char *adapter = d->options->adapter_override ? d->options->adapter_override : seq->adapter;
    scorer_seq item = {.token = seq->token, .n_tok = seq->n_tok, .temperature = seq->temperature, .logprob = logprob, .logprob_raw = raw};
    BR_TRY(br_loaded_slot(loaded, adapter, &item.slot));
    BR_TRY(br_loaded_check_length(loaded, seq->n_tok));
    for (int32_t t = 0; t < seq->n_tok; t++) {
        d->row_seq[t] = row_wanted(d, seq, t) ? (int32_t)i : -1;
        d->row_pos[t] = t;
    }
    d->lines.n_row = seq->n_tok;
    const br_trace trace = {.rows = stage_lines_rows, .context = &d->lines};
    d->lines.device = loaded->device;
    BR_TRY(scorer_forward(s, &item, 1, &trace, &final));
    BR_TRY(scorer_logprobs(s, &item, 1, final));
    if (item.fault)
        return br_loaded_fault(item.fault, item.fault_pos);
    for (int32_t t = prompt_len_of(d, seq); t < seq->n_tok; t++)
        add_logprob(d, i, t - 1, loaded->config.n_layer, logprob[t]);
    d->n_tok += seq->n_tok;
    return d->lines.status;
}

static br_status dump_scored(dump *d, br_report *report) {
    br_status status;
    br_loaded loaded;
    scorer *s = NULL;
    uint32_t *bits = NULL;
    BR_TRY(scorer_load(&d->options->engine, d->input.n_tok_max, d->input.n_tok_max, &loaded));
    const int32_t n_row_max = loaded.n_row_max;
    BR_TRY_GOTO(open_rows(d, n_row_max), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&bits, (size_t)n_row_max * 2 * sizeof *bits, "the dump"), exit);
    BR_TRY_GOTO(scorer_open(&loaded, &s), exit);
    for (int64_t i = 0; i < d->input.n_seq; i++)
        if (wanted(d, i))
            BR_TRY_GOTO(score_one(d, s, &loaded, i, bits, bits + n_row_max), exit);
    BR_TRY_GOTO(br_loaded_report(&loaded, report), exit);
exit:
    scorer_close(s);
    br_mem_free(bits);
    br_loaded_close(&loaded);
    return status;
}

/* ---- through the engine ------------------------------------------------------------------------------------------------------ */

static int64_t seq_of_request(const dump *d, uint64_t id) {
    for (int64_t i = 0; i < d->input.n_seq; i++)
        if (d->request[i] == id)
            return i;
    return -1;
}

/* The first stage of a step tells which sequence each row belongs to. */
static void watch_rows(void *context, br_stage stage, int32_t layer, const br_piece *piece, int32_t n_piece) {
    dump *d = context;
    if (stage == BR_STAGE_EMBED) {
        const sched_plan *plan = d->engine->plan;
        int32_t row = 0;
        for (int32_t i = 0; i < plan->n_seg; i++) {
            const int64_t seq = seq_of_request(d, plan->seg[i].id);
            for (int32_t t = 0; t < plan->seg[i].n_tok; t++, row++) {
                d->row_pos[row] = plan->seg[i].pos + t;
                d->row_seq[row] = row_wanted(d, &d->input.seq[seq], d->row_pos[row]) ? (int32_t)seq : -1;
            }
        }
        d->lines.n_row = row;
    }
    stage_lines_rows(&d->lines, stage, layer, piece, n_piece);
}

static br_status submit_next(dump *d, int64_t i) {
    const rollout_seq *seq = &d->input.seq[i];
    const int32_t prompt_len = prompt_len_of(d, seq), given = seq->n_tok - prompt_len;
    br_request request = {
        .uid = seq->uid, .prompt = seq->token, .n_prompt = prompt_len, .sample = seq->sample, .seed = seq->seed,
        .adapter = d->options->adapter_override ? d->options->adapter_override : seq->adapter, .sampling = br_sampling_default(),
    };
    request.sampling.temperature = seq->temperature;
    request.sampling.max_new = given > 0 ? given : 1;
    return engine_submit_forced(d->engine, &request, given > 0 ? seq->token + prompt_len : NULL, &d->request[i]);
}

static br_status take_tokens(dump *d, int32_t *done) {
    br_token token[64];
    int32_t n;
    BR_TRY(br_poll(d->engine, token, 64, &n, done));
    for (int32_t k = 0; k < n; k++) {
        const int64_t i = seq_of_request(d, token[k].request);
        const char *sentence;
        if (token[k].stop == BR_STOP_ERROR && token[k].last) {
            br_status error = br_request_error(d->engine, token[k].request, &sentence);
            return br_fail(error, "sequence %s: %s", d->input.seq[i].uid, sentence);
        }
        if (d->input.seq[i].n_tok > 1)
            add_logprob(d, i, token[k].position - 1, d->engine->loaded.config.n_layer, token[k].logprob);
        d->n_tok++;
    }
    return d->lines.status;
}

static br_status dump_rolled(dump *d, br_report *report) {
    br_status status;
    int32_t done = 0;
    int64_t next = 0;
    br_engine_options options = d->options->engine;
    options.no_prefix_cache = 1; /* a cache hit would leave out the lines of the shared rows */
    BR_TRY(br_engine_open(&options, &d->engine));
    BR_TRY_GOTO(open_rows(d, d->engine->options.chunk_tokens), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&d->request, (size_t)d->input.n_seq * sizeof *d->request, "the dump"), exit);
    const br_trace trace = {.rows = watch_rows, .context = d};
    d->lines.device = d->engine->loaded.device;
    d->engine->trace = &trace;
    while (!done || next < d->input.n_seq) {
        for (; next < d->input.n_seq; next++) {
            status = wanted(d, next) ? submit_next(d, next) : BR_OK;
            if (status == BR_E_LIMIT)
                break; /* the queue is full: run some steps first */
            BR_TRY_GOTO(status, exit);
        }
        BR_TRY_GOTO(take_tokens(d, &done), exit);
    }
    BR_TRY_GOTO(br_loaded_report(&d->engine->loaded, report), exit);
exit:
    br_engine_close(d->engine);
    return status;
}

/* ---- lines out --------------------------------------------------------------------------------------------------------------- */

/* "uid#sample pos layer stage hash [id,id,...]"; a preempted sequence computes rows twice, with equal bits:
 * one line is enough. Were they not equal, both lines would stand here. */
static br_status print_lines(dump *d, br_line line, void *context) {
    char *text = NULL;
    size_t room = 0;
    for (int64_t i = 0; i < d->lines.n_line; i++) {
        const stage_line *at = &d->lines.line[i], *before = i ? at - 1 : NULL;
        if (before && before->seq == at->seq && before->pos == at->pos && before->layer == at->layer &&
            before->stage == at->stage && before->hash == at->hash)
            continue;
        const rollout_seq *seq = &d->input.seq[at->seq];
        const size_t need = 512 + (size_t)at->n_choice * 12;
        if (need > room) {
            br_mem_free(text);
            BR_TRY(br_mem_alloc((void **)&text, need, "a line of the dump"));
            room = need;
        }
        int n = snprintf(text, room, "%s#%u %d %d %s %016llx", seq->uid, seq->sample, at->pos, at->layer,
                         br_stage_name(at->stage), (unsigned long long)at->hash);
        for (int32_t k = 0; k < at->n_choice; k++)
            n += snprintf(text + n, room - (size_t)n, "%c%d", k ? ',' : ' ', d->lines.choice[at->choice + k]);
        line(context, text);
    }
    br_mem_free(text);
    return BR_OK;
}

static br_status check_selection(const dump *d) {
    const br_dump_options *o = d->options;
    if (d->input.n_tok_max == 0)
        return br_fail(BR_E_ARG, "%s holds no sequence", o->in_path);
    if (o->seq >= d->input.n_seq)
        return br_fail(BR_E_ARG, "%s: sequence %d: expected 0 to %lld", o->in_path, o->seq, (long long)d->input.n_seq - 1);
    if (o->pos_min >= 0 && o->pos_max >= 0 && o->pos_min > o->pos_max)
        return br_fail(BR_E_ARG, "positions %d to %d: expected the first not behind the last", o->pos_min, o->pos_max);
    return BR_OK;
}

br_status br_job_dump(const br_dump_options *options, br_line line, void *context, br_report *report) {
    br_status status;
    dump d = {.options = options};
    memset(report, 0, sizeof *report);
    BR_TRY(score_input_open(options->in_path, &d.input));
    BR_TRY_GOTO(check_selection(&d), exit);
    BR_TRY_GOTO(options->through_engine ? dump_rolled(&d, report) : dump_scored(&d, report), exit);
    BR_TRY_GOTO(d.lines.n_line ? BR_OK : br_fail(BR_E_ARG, "%s: no row is within what --seq, --pos-min, --pos-max select", options->in_path), exit);
    stage_lines_sort(&d.lines);
    BR_TRY_GOTO(print_lines(&d, line, context), exit);
    report->n_seq = d.input.n_seq;
    report->n_tok = d.n_tok;
exit:
    stage_lines_free(&d.lines);
    br_mem_free(d.row_seq);
    br_mem_free(d.row_pos);
    br_mem_free(d.request);
    score_input_close(&d.input);
    return status;
}
