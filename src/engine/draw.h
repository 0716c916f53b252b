/* draw: from rows of the last norm to tokens and their log-probs: gathered, multiplied with the head, sampled, read back.
 *
 * Layer: engine. Shared by the rollout engine and by `verify`, which draws every token again. */
#ifndef DRAW_H
#define DRAW_H

#include "br_loaded.h"

typedef struct draw {
    br_loaded *loaded;
    int32_t n, n_max; /* n: of the draw under way */
    /* in, host side: of each sample its row, its settings, and the token to take instead of drawing, -1: none */
    int32_t *row;
    bi_sampling *setting;
    int32_t *forced;
    /* out, host side, (n), placed by draw_upload, valid after br_device_wait. They lie one behind the other, what every sample has
     * first: one copy brings as much as the settings ask for, the rest stays where it is. */
    int32_t *token;
    float *logprob, *logprob_raw, *logprob_kept;
    uint32_t *fault; /* of the row, or of its logits */
    float *entropy;  /* when one setting at least asks for it */
    bi_top *top;     /* (n, BR_TOP_LOGPROBS_MAX) up to the last row whose setting asks */
    br_mirror in, out;
    bi_bf16 *x;      /* device (n_max, d_model) */
    float *logit;    /* device (n_max, n_vocab) */
    unsigned char *memory;
} draw;

void draw_room(br_loaded *loaded, int32_t n_max); /* adds to loaded->room what open will take */
br_status draw_open(draw *d, br_loaded *loaded, int32_t n_max);
void draw_close(draw *d);
/* Appends samples of no row up to n: nobody looks at what they draw. */
void draw_pad(draw *d, int32_t n_used, int32_t n);
/* Three parts of one draw, since the middle one may be recorded: settings of n samples to the device; tokens drawn from rows d->row[i]
 * of `final` (row_fault: the step's), both device memory; results on their way back. n 0: nothing is copied. */
br_status draw_upload(draw *d, int32_t n);
br_status draw_ops(draw *d, const bi_bf16 *final, const uint32_t *row_fault);
br_status draw_download(draw *d);

#endif
