/* Generation and scoring by an engine of bitroll.h: requests are translated, nothing is computed. Layer: trainer_bridge. */
#include "tb_worker.h"

#include <string.h>

static void text_to(char *out, size_t n_max, tb_text text) {
    BR_ASSERT(text.n < n_max);
    memcpy(out, text.p, text.n);
    out[text.n] = 0;
}

static br_status engine_submit(void *context, const tb_gen_req *r, uint64_t *id) {
    char uid[BR_UID_BYTES_MAX + 1], adapter[BR_UID_BYTES_MAX + 1];
    br_request request = {.uid = uid, .prompt = (const int32_t *)r->prompt.p, .n_prompt = (int32_t)r->prompt.n, .sample = r->sample,
                          .seed = r->seed, .adapter = r->adapter.n ? adapter : NULL, .sampling = br_sampling_default()};
    br_sampling *s = &request.sampling;
    text_to(uid, sizeof uid, r->uid);
    text_to(adapter, sizeof adapter, r->adapter);
    memcpy(&s->temperature, &r->temperature, sizeof s->temperature);
    memcpy(&s->min_p, &r->min_p, sizeof s->min_p);
    memcpy(&s->top_p, &r->top_p, sizeof s->top_p);
    s->top_k = (int32_t)r->top_k;
    s->max_new = (int32_t)r->max_new;
    s->min_new = (int32_t)r->min_new;
    s->ignore_eos = (int32_t)r->ignore_eos;
    s->n_stop = (int32_t)r->stop.n;
    memcpy(s->stop, r->stop.p, sizeof *r->stop.p * (size_t)r->stop.n);
    return br_submit(context, &request, id);
}

/* The log-prob of the first token is asked for in vain. */
static br_status engine_score(void *context, const tb_score_req *r, uint64_t *id) {
    char adapter[BR_UID_BYTES_MAX + 1];
    br_request request = {.uid = "scored", .prompt = (const int32_t *)r->token.p, .n_prompt = (int32_t)r->token.n,
                          .adapter = r->adapter.n ? adapter : NULL, .sampling = br_sampling_default(),
                          .score_from = r->first_asked ? (int32_t)r->first_asked : 1};
    text_to(adapter, sizeof adapter, r->adapter);
    memcpy(&request.sampling.temperature, &r->temperature, sizeof request.sampling.temperature);
    return br_submit(context, &request, id);
}

static br_status engine_cancel(void *context, uint64_t id) {
    return br_abort(context, id);
}

static br_status engine_poll(void *context, br_token *out, int32_t n_max, int32_t *n_out, int32_t *done) {
    return br_poll(context, out, n_max, n_out, done);
}

static br_status engine_error(void *context, uint64_t id, const char **sentence) {
    return br_request_error(context, id, sentence);
}

static br_status engine_versions(void *context, uint64_t id, br_versions *out) {
    return br_request_versions(context, id, out);
}

tb_engine_ops tb_engine_of(br_engine *engine) {
    return (tb_engine_ops){.context = engine, .submit = engine_submit, .cancel = engine_cancel, .poll = engine_poll, .versions = engine_versions,
                           .error = engine_error, .score = engine_score};
}
