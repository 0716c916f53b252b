/* bi_rmsnorm, bi_layernorm: row norms.      Contract: N-NORM, N-SUM
 * x (n_row, d) bf16, row stride x_ld; w (d) f32 (and b (d) f32 for layernorm, may be NULL = zeros); y (n_row, d) bf16, row
 * stride y_ld; y may be x with the same stride. Fault: the sum of squares is not finite. */
#ifndef BI_NORM_H
#define BI_NORM_H
#include "bi_types.h"
typedef struct bi_norm_args {
    int32_t n_row, d;
    const bi_bf16 *x;
    int32_t x_ld;
    const float *w, *b;
    float eps;
    bi_bf16 *y;
    int32_t y_ld;
    bi_fault fault;
} bi_norm_args;
#endif
