/* Runs of the whole engine for the suites; see engine_rig.h. */
#include "engine_rig.h"

#include "br_loaded.h"
#include "scorer.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNSCORED = 0x7fc00000 };

void *rig_alloc(size_t n, size_t bytes) {
    void *block = calloc(n, bytes);
    ck_assert_ptr_nonnull(block);
    return block;
}

void rig_model_make(rig_model *model, const char *preset) {
    br_report report;
    snprintf(model->preset, sizeof model->preset, "%s", preset);
    snprintf(model->dir, sizeof model->dir, "%s/%s", test_tmp_dir(), preset);
    for (int i = 0; i < RIG_ADAPTERS; i++) {
        snprintf(model->adapter_dir[i], sizeof model->adapter_dir[i], "%s/%s-%c", test_tmp_dir(), preset, 'a' + i);
        model->adapter[i] = (br_adapter_source){.name = i ? "b" : "a", .dir = model->adapter_dir[i]};
        br_init_options options = {.preset = preset, .out_dir = model->dir, .seed = 1, .lora_rank = 32, .lora_out_dir = model->adapter_dir[i],
                                   .lora_seed = (uint64_t)(7 + i), .lora_only = i > 0};
        CHECK_OK(br_job_init(&options, NULL, &report));
        br_report_free(&report);
    }
    model->n_vocab = strcmp(preset, "pico") == 0 ? 256 : 2304;
}

br_engine_options rig_options(const rig_model *model) {
    return (br_engine_options){.model_dir = model->dir, .adapter = model->adapter, .n_adapter = RIG_ADAPTERS, .n_thread = 1};
}

static int32_t draw(uint64_t seed, uint64_t a, uint64_t b, int32_t n) {
    return (int32_t)(test_mix(test_mix(seed ^ a << 32) ^ b) % (uint64_t)n);
}

void rig_requests(const rig_model *model, uint64_t seed, int n, int32_t n_min, int32_t n_max, int32_t max_new, rig_request *out) {
    for (int i = 0; i < n; i++) {
        rig_request *r = &out[i];
        if (i % 3 == 2) { /* another sample of the prompt before */
            *r = out[i - 1];
            r->sample++;
            continue;
        }
        *r = (rig_request){.adapter = i / 3 % 3 - 1, .max_new = max_new, .temperature = 1, .top_p = 1};
        snprintf(r->uid, sizeof r->uid, "p%d", i);
        r->n_prompt = n_min + draw(seed, (uint64_t)i, 1, n_max - n_min + 1);
        for (int32_t t = 0; t < r->n_prompt; t++)
            r->prompt[t] = draw(seed, (uint64_t)i, (uint64_t)(t + 100), model->n_vocab);
        if (i % 5 == 1) { /* a long common beginning with the request before: partial prefix hits */
            const rig_request *before = &out[i - 1];
            const int32_t shared = before->n_prompt < r->n_prompt ? before->n_prompt : r->n_prompt;
            memcpy(r->prompt, before->prompt, (size_t)(shared - shared / 4) * sizeof(int32_t));
            r->adapter = before->adapter;
        }
        if (i % 4 == 3) {
            r->temperature = 0.75f;
            r->top_k = 50;
            r->top_p = 0.9;
        }
        if (i % 7 == 6)
            r->temperature = 0;
    }
}

br_request rig_br_request(const rig_request *r) {
    br_request request = {.uid = r->uid, .prompt = r->prompt, .n_prompt = r->n_prompt, .sample = r->sample, .seed = 42,
                          .adapter = r->adapter < 0 ? NULL : r->adapter ? "b" : "a", .sampling = br_sampling_default()};
    request.sampling.temperature = r->temperature;
    request.sampling.top_k = r->top_k;
    request.sampling.top_p = r->top_p;
    request.sampling.max_new = r->max_new;
    return request;
}

static void begin_text(const rig_request *r, rig_text *text) {
    memset(text, 0, sizeof *text);
    text->n_tok = r->n_prompt;
    memcpy(text->token, r->prompt, (size_t)r->n_prompt * sizeof(int32_t));
    for (int k = 0; k < RIG_LOGPROBS; k++)
        for (int t = 0; t < RIG_TOK_MAX; t++)
            text->logprob[k][t] = UNSCORED;
}

static void take(rig_text *text, const br_token *token, br_engine *engine) {
    const char *sentence;
    if (token->last) {
        text->stop = token->stop;
        text->error = token->stop == BR_STOP_ERROR ? br_request_error(engine, token->request, &sentence) : BR_OK;
        if (text->error != BR_OK)
            snprintf(text->sentence, sizeof text->sentence, "%s", sentence);
    }
    if (token->token < 0)
        return;
    const int32_t at = token->position;
    text->token[at] = token->token;
    text->logprob[0][at] = token->logprob;
    text->logprob[1][at] = token->logprob_raw;
    text->logprob[2][at] = token->logprob_kept;
    text->n_tok = at + 1;
}

void rig_generate(const br_engine_options *options, const rig_request *request, const int *order, int n, rig_text *out) {
    br_engine *engine;
    br_token token[64];
    int32_t n_token, done = 0;
    int next = 0;
    uint64_t *id = rig_alloc((size_t)n, sizeof *id);
    CHECK_OK(br_engine_open(options, &engine));
    while (!done || next < n) {
        for (; next < n; next++) {
            const int i = order ? order[next] : next;
            const br_request submitted = rig_br_request(&request[i]);
            begin_text(&request[i], &out[i]);
            br_status status = br_submit(engine, &submitted, &id[i]);
            if (status == BR_E_LIMIT)
                break;
            CHECK_OK(status);
        }
        CHECK_OK(br_poll(engine, token, 64, &n_token, &done));
        for (int k = 0; k < n_token; k++)
            for (int i = 0; i < n; i++)
                if (id[i] == token[k].request)
                    take(&out[i], &token[k], engine);
    }
    br_engine_close(engine);
    free(id);
}

void rig_score(const rig_model *model, int32_t pack, int32_t n_thread, const rig_request *request, const rig_text *text, int n, rig_text *out) {
    br_loaded loaded;
    scorer *s;
    br_engine_options options = rig_options(model);
    scorer_seq *seq = rig_alloc((size_t)n, sizeof *seq);
    options.n_thread = n_thread;
    CHECK_OK(br_loaded_open(&options, pack, RIG_TOK_MAX, 1, &loaded));
    CHECK_OK(scorer_open(&loaded, &s));
    for (int i = 0; i < n; i++) {
        out[i] = text[i];
        memset(out[i].logprob, 0xff, sizeof out[i].logprob); /* poison */
        seq[i] = (scorer_seq){.token = text[i].token, .n_tok = text[i].n_tok, .slot = request[i].adapter, .temperature = request[i].temperature,
                              .logprob = out[i].logprob[0], .logprob_raw = out[i].logprob[1]};
    }
    for (int at = 0; at < n;) {
        int32_t n_fit;
        const bi_bf16 *final;
        CHECK_OK(scorer_fit(s, seq + at, n - at, &n_fit));
        CHECK_OK(scorer_forward(s, seq + at, n_fit, NULL, &final));
        CHECK_OK(scorer_logprobs(s, seq + at, n_fit, final));
        at += n_fit;
    }
    for (int i = 0; i < n; i++)
        ck_assert_msg(seq[i].fault == 0, "request %d: fault %x at position %d", i, seq[i].fault, seq[i].fault_pos);
    scorer_close(s);
    br_loaded_close(&loaded);
    free(seq);
}

void rig_expect_equal(const rig_request *request, const rig_text *want, const rig_text *got, int n, const char *what) {
    for (int i = 0; i < n; i++) {
        ck_assert_msg(want[i].error == got[i].error && want[i].stop == got[i].stop && want[i].n_tok == got[i].n_tok,
                      "%s: request %d (%s#%u): status %d, stop %d, %d tokens; wanted %d, %d, %d", what, i, request[i].uid, request[i].sample,
                      got[i].error, got[i].stop, got[i].n_tok, want[i].error, want[i].stop, want[i].n_tok);
        for (int32_t t = 0; t < want[i].n_tok; t++) {
            if (want[i].token[t] != got[i].token[t]) /* a passing ck_assert costs a system call: too much for every token */
                ck_abort_msg("%s: request %d (%s#%u) position %d: token %d, wanted %d", what, i, request[i].uid,
                             request[i].sample, t, got[i].token[t], want[i].token[t]);
            for (int k = 0; k < RIG_LOGPROBS; k++)
                if (want[i].logprob[k][t] != got[i].logprob[k][t])
                    ck_abort_msg("%s: request %d (%s#%u) position %d: log-prob %d is %08x, wanted %08x", what, i,
                                 request[i].uid, request[i].sample, t, k,
                                 got[i].logprob[k][t], want[i].logprob[k][t]);
        }
    }
}

void rig_expect_scored(const rig_request *request, const rig_text *sampled, const rig_text *scored, int n, const char *what) {
    int64_t n_compared = 0;
    for (int i = 0; i < n; i++) {
        for (int32_t t = request[i].n_prompt; t < sampled[i].n_tok; t++, n_compared++)
            for (int k = 0; k < 2; k++)
                if (sampled[i].logprob[k][t] != scored[i].logprob[k][t])
                    ck_abort_msg("%s: request %d (%s#%u) position %d: sampled with %08x, scored %08x", what, i, request[i].uid, request[i].sample, t,
                                 sampled[i].logprob[k][t], scored[i].logprob[k][t]);
    }
    ck_assert_int_gt(n_compared, 0);
}
