/* score_input: the sequences that `score` and `dump` read, from a rollout file or from a prompts file.
 * Layer: engine. A prompts line is one sequence that is all prompt: its own log-probs are what the scorer gives. */
#ifndef SCORE_INPUT_H
#define SCORE_INPUT_H

#include "prompts.h"
#include "rollout_file.h"

typedef struct score_input {
    rollout_seq *seq; /* (n_seq), in file order; pointers live as long as the input */
    int64_t n_seq;
    int32_t n_tok_max;   /* longest sequence that did not end in error; 0 when there is none */
    int32_t from_rollout;
    rollout_meta meta;   /* of a rollout file; zero otherwise */
    uint8_t *no_mask;    /* (n_tok_max) zeros: of a prompt nothing was sampled */
    rollout_reader *reader;
    prompts *lines;
} score_input;

/* A path ending in ".jsonl" is a prompts file, anything else a rollout file. */
br_status score_input_open(const char *path, score_input *out);
br_status score_input_open_rollout(const char *path, score_input *out);
void score_input_close(score_input *input);

#endif
