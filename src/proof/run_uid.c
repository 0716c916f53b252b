/* The digest of everything that decides a run's bits; see run_uid.h. Layer: proof. */
#include "run_uid.h"

#include <string.h>

#define ADD(stream, value) br_hash_add((stream), &(value), sizeof(value))

static void add_text(br_hash_stream *s, const char *text) {
    br_hash_add(s, text, strlen(text) + 1);
}

static void add_sampling(br_hash_stream *s, const br_sampling *x) {
    ADD(s, x->temperature);
    ADD(s, x->min_p);
    ADD(s, x->top_p);
    ADD(s, x->top_k);
    ADD(s, x->max_new);
    ADD(s, x->min_new);
    ADD(s, x->ignore_eos);
    ADD(s, x->n_stop);
    br_hash_add(s, x->stop, (size_t)x->n_stop * sizeof x->stop[0]);
}

/* A line without "n" or "seed" takes the run's: the digest holds what is used, not where it was written. */
static void add_line(br_hash_stream *s, const run_identity *run, const prompt_line *line) {
    int32_t n_sample = line->has & PROMPT_HAS_N ? line->n_sample : run->n_sample;
    uint64_t seed = line->has & PROMPT_HAS_SEED ? line->seed : run->seed;
    add_text(s, line->uid);
    add_text(s, line->adapter ? line->adapter : "base");
    ADD(s, n_sample);
    ADD(s, seed);
    add_sampling(s, &line->sampling);
    ADD(s, line->n_token);
    br_hash_add(s, line->token, (size_t)line->n_token * sizeof line->token[0]);
}

/* By name, so that the order of the command line does not matter: the next name after `before` in byte order. */
static int32_t next_adapter(const run_identity *run, const char *before) {
    int32_t next = -1;
    for (int32_t i = 0; i < run->n_adapter; i++)
        if ((!before || strcmp(run->adapter_name[i], before) > 0) &&
            (next < 0 || strcmp(run->adapter_name[i], run->adapter_name[next]) < 0))
            next = i;
    return next;
}

br_digest run_uid(const run_identity *run) {
    br_hash_stream s;
    int64_t n_line = prompts_count(run->lines);
    br_hash_begin(&s);
    ADD(&s, run->contract);
    ADD(&s, run->weights);
    ADD(&s, run->n_adapter);
    for (int32_t i = next_adapter(run, NULL); i >= 0; i = next_adapter(run, run->adapter_name[i])) {
        add_text(&s, run->adapter_name[i]);
        ADD(&s, run->adapter_digest[i]);
    }
    ADD(&s, n_line);
    for (int64_t i = 0; i < n_line; i++)
        add_line(&s, run, prompts_at(run->lines, i));
    return br_hash_end(&s);
}
