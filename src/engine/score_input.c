/* Two kinds of files as one list of sequences; see score_input.h. */
#include "score_input.h"

#include "br_mem.h"

#include <stdio.h>
#include <string.h>

static int is_prompts_path(const char *path) {
    const size_t n = strlen(path);
    return n >= 6 && strcmp(path + n - 6, ".jsonl") == 0;
}

static br_status take_line(const prompt_line *line, int64_t index, rollout_seq *out) {
    *out = (rollout_seq){
        .uid_hash = br_hash_xxh64(line->uid, strlen(line->uid)), .prompt_index = (uint32_t)index, .seed = line->seed,
        .temperature = line->sampling.temperature, .min_p = line->sampling.min_p, .top_p = line->sampling.top_p,
        .top_k = line->sampling.top_k, .prompt_len = line->n_token, .n_tok = line->n_token, .stop = BR_STOP_LENGTH, .token = line->token,
    };
    const char *adapter = line->adapter ? line->adapter : "base";
    if (strlen(adapter) >= sizeof out->adapter)
        return br_fail(BR_E_LIMIT, "prompt '%s': adapter name of %zu bytes: expected less than %zu", line->uid, strlen(adapter), sizeof out->adapter);
    memcpy(out->adapter, adapter, strlen(adapter) + 1);
    snprintf(out->uid, sizeof out->uid, "%s", line->uid);
    return BR_OK;
}

static br_status open_prompts(const char *path, score_input *input) {
    const br_sampling defaults = br_sampling_default();
    BR_TRY(prompts_read(path, &defaults, &input->lines));
    input->n_seq = prompts_count(input->lines);
    BR_TRY(br_mem_alloc((void **)&input->seq, (size_t)input->n_seq * sizeof *input->seq, "the sequences to score"));
    for (int64_t i = 0; i < input->n_seq; i++)
        BR_TRY(take_line(prompts_at(input->lines, i), i, &input->seq[i]));
    size_t n_tok_max = 0;
    for (int64_t i = 0; i < input->n_seq; i++)
        n_tok_max = (size_t)input->seq[i].n_tok > n_tok_max ? (size_t)input->seq[i].n_tok : n_tok_max;
    BR_TRY(br_mem_alloc((void **)&input->no_mask, n_tok_max, "the sequences to score"));
    for (int64_t i = 0; i < input->n_seq; i++)
        input->seq[i].mask = input->no_mask;
    return BR_OK;
}

static br_status open_rollout(const char *path, score_input *input) {
    BR_TRY(rollout_open(path, &input->reader));
    input->from_rollout = 1;
    input->meta = *rollout_reader_meta(input->reader);
    input->n_seq = rollout_seq_count(input->reader);
    BR_TRY(br_mem_alloc((void **)&input->seq, (size_t)input->n_seq * sizeof *input->seq, "the sequences to score"));
    for (int64_t i = 0; i < input->n_seq; i++)
        rollout_seq_at(input->reader, i, &input->seq[i]);
    return BR_OK;
}

static br_status finish(br_status status, score_input *input) {
    if (status != BR_OK)
        score_input_close(input);
    for (int64_t i = 0; i < input->n_seq; i++)
        if (!input->seq[i].status && input->seq[i].n_tok > input->n_tok_max)
            input->n_tok_max = input->seq[i].n_tok;
    return status;
}

br_status score_input_open_rollout(const char *path, score_input *out) {
    memset(out, 0, sizeof *out);
    return finish(open_rollout(path, out), out);
}

br_status score_input_open(const char *path, score_input *out) {
    if (!is_prompts_path(path))
        return score_input_open_rollout(path, out);
    memset(out, 0, sizeof *out);
    return finish(open_prompts(path, out), out);
}

void score_input_close(score_input *input) {
    br_mem_free(input->seq);
    br_mem_free(input->no_mask);
    rollout_reader_close(input->reader);
    prompts_close(input->lines);
    memset(input, 0, sizeof *input);
}
