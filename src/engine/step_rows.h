/* step_rows: the rows of one step on both sides: filled on the host, uploaded in one piece, read by ops at fixed addresses.
 *
 * Layer: engine. Shared by the rollout engine (paged) and the scorer (contiguous). */
#ifndef STEP_ROWS_H
#define STEP_ROWS_H

#include "br_model.h"

typedef struct step_rows {
    br_device *device;
    br_mirror in;
    int32_t n_row_max, n_seg_max, page_ld; /* page_ld 0: contiguous */
    /* host side of the mirror */
    bi_seg *seg;
    int32_t *row_seg, *token, *row_slot;
    int32_t *page;        /* (n_seg_max, page_ld), or (n_seg_max) first pages */
    int32_t *state_index; /* (n_seg_max) */
    uint32_t *row_fault;  /* stays zero: each upload clears the device's */
    bi_batch batch;       /* with pointers of the device */
    bi_batch host;        /* the same with pointers of the host */
} step_rows;

size_t step_rows_bytes(int32_t n_row_max, int32_t n_seg_max, int32_t page_ld); /* of the device's memory */
br_status step_rows_open(step_rows *rows, br_device *device, int32_t n_row_max, int32_t n_seg_max, int32_t page_ld);
void step_rows_close(step_rows *rows);
void step_rows_begin(step_rows *rows);
/* Appends n_tok rows at positions pos .. of sequence `seq`, under an adapter slot. */
void step_rows_add(step_rows *rows, int32_t seq, int32_t pos, const int32_t *token, int32_t n_tok, int32_t slot);
/* Appends segments without rows and rows of no segment up to n_row, and rounds pos_max up: the shape of a recorded step. One row a
 * segment so far. */
void step_rows_pad(step_rows *rows, int32_t n_row, int32_t pos_max);
/* Uploads, and fills all of *step but the caches' bases and the trace. */
br_status step_rows_upload(step_rows *rows, br_step *step);

#endif
