/* bi_gather, bi_seg_fault: rows and faults of a step, moved and found without arithmetic.
 *
 * bi_gather: y[i] = x[row[i]] for n rows of row_bytes bytes, a multiple of 4. row (n); row[i] = -1 leaves y[i] as it is. y may
 *   not overlap x.
 * bi_seg_fault: for each segment its first row with a fault: out[s] = {row's code, its position}, {0, 0} when none. row_fault
 *   (n_row). */
#ifndef BI_MOVE_H
#define BI_MOVE_H
#include "bi_types.h"
typedef struct bi_gather_args {
    int32_t n;
    size_t row_bytes;
    const void *x;
    const int32_t *row;
    void *y;
} bi_gather_args;
typedef struct bi_first_fault {
    uint32_t code;
    int32_t pos;
} bi_first_fault;
typedef struct bi_seg_fault_args {
    const bi_batch *batch;
    const uint32_t *row_fault;
    bi_first_fault *out; /* (n_seg) */
} bi_seg_fault_args;
#endif
