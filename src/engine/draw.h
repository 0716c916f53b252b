/* draw: from rows of the last norm to tokens and their log-probs: gathered, multiplied with the head, sampled, read back.
 *
 * Layer: engine. Shared by the rollout engine and by `verify`, which draws every token again. */
#ifndef DRAW_H
#define DRAW_H

#include "br_loaded.h"

typedef struct draw {
    br_loaded *loaded;
    int32_t n_max;
    /* in, host side: of each sample its row, its settings, and the token to take instead of drawing, -1: none */
    int32_t *row;
    bi_sampling *setting;
    int32_t *forced;
    /* out, host side, valid after br_device_wait */
    int32_t *token;
    float *logprob, *logprob_raw, *logprob_kept, *entropy;
    uint32_t *fault; /* of the row, or of its logits */
    bi_top *top;     /* (n_max, BR_TOP_LOGPROBS_MAX) */
    br_mirror in, out;
    bi_bf16 *x;      /* device (n_max, d_model) */
    float *logit;    /* device (n_max, n_vocab) */
    unsigned char *memory;
} draw;

br_status draw_open(draw *d, br_loaded *loaded, int32_t n_max);
void draw_close(draw *d);
/* Appends samples of no row up to n: nobody looks at what they draw. */
void draw_pad(draw *d, int32_t n_used, int32_t n);
/* Three parts of one draw, since the middle one may be recorded: settings to the device; n tokens drawn from rows d->row[i] of
 * `final` (row_fault: the step's), both device memory; results on their way back. */
br_status draw_upload(draw *d);
br_status draw_ops(draw *d, int32_t n, const bi_bf16 *final, const uint32_t *row_fault);
br_status draw_download(draw *d);

#endif
