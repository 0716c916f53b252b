/* bi_index_store, bi_index_select: the DSA indexer.      Contract: N-IDX, P-4
 *
 * bi_index_store: quantises key row t (d bf16) to e4m3 with one power-of-two scale and writes it at its position.
 *   Fault: an element is not finite. Bytes of a block: backend->index_block_bytes.
 * bi_index_select: the min(topk, pos + 1) visible positions of largest score, ascending by position. q (n_row, n_head, d)
 *   bf16 before quantisation; w (n_row, n_head) f32, the bare chain; c = RN((n_head*d)^-1/2). n_head a multiple of 4.
 *   select (n_row, topk), n_select (n_row); score NULL or (n_row, score_ld) f32, the scores of all visible positions:
 *   tests hold their bits, since a choice alone shows a wrong score only where it crosses another. Fault: an
 *   element of q or w is not finite (the row then selects its first positions).
 *   scored 1: score holds the scores already, and only the selection runs; q and w are not read, no fault is found. */
#ifndef BI_INDEX_H
#define BI_INDEX_H
#include "bi_types.h"
typedef struct bi_index_store_args {
    const bi_batch *batch;
    int32_t d;
    const bi_bf16 *k; /* (n_row, d) */
    bi_cache cache;
    bi_fault fault;
} bi_index_store_args;
typedef struct bi_index_select_args {
    const bi_batch *batch;
    int32_t n_head, d, topk;
    const bi_bf16 *q;
    const float *w;
    float c;
    bi_cache cache;
    int32_t *select, *n_select;
    float *score;
    int64_t score_ld;
    bi_fault fault;
    int32_t scored;
} bi_index_select_args;
#endif
