/* score_rows: the log-probs of given tokens, from rows of the last norm: gathered, through the head, read back.
 *
 * Layer: engine. Shared by the scorer and by the rollout engine, whose requests may be scored instead of sampled. */
#ifndef SCORE_ROWS_H
#define SCORE_ROWS_H

#include "br_loaded.h"

typedef struct score_rows {
    br_loaded *loaded;
    int32_t n, n_max;     /* n: listed */
    int want_entropy;     /* of one of them at least; else entropy is left alone */
    /* in, host side: of each its row, the token that the row predicts, the temperature */
    int32_t *row, *token;
    float *temperature;
    /* out, host side, (n), valid after br_device_wait. One behind the other, what is always there first: one copy brings what is asked for */
    float *logprob, *logprob_raw;
    uint32_t *fault; /* of its logits */
    float *entropy;
    br_mirror in, out;
    bi_bf16 *x; /* device (n_max, d_model) */
} score_rows;

void score_rows_room(br_loaded *loaded, int32_t n_max); /* adds to loaded->room what open will take */
br_status score_rows_open(score_rows *s, br_loaded *loaded, int32_t n_max);
void score_rows_close(score_rows *s);
void score_rows_begin(score_rows *s);
void score_rows_add(score_rows *s, int32_t row, int32_t token, float temperature, int want_entropy);
/* What is listed, from rows of `final`, device memory; nothing is a no-op. */
br_status score_rows_run(score_rows *s, const bi_bf16 *final);

#endif
