/* bi_attnres, bi_attnres_weight, bi_residual: the residual stream.      Contract: N-RES, N-SUM
 *
 * bi_attnres: out = R(sum_i pi_i v_i), v_0.. = bank rows in order, last = p. bank: n_bank pointers to (n_row, d) bf16,
 *   1 <= n_bank <= BR_BANK_MAX; w (d) f32 from bi_attnres_weight. y (n_row, d) bf16, overlaps nothing. Fault: a sum of
 *   squares is not finite.
 * bi_attnres_weight: w[i] = RN(norm[i] * proj[i]), at load.
 * bi_residual: y = R(RN(widen(a) + widen(b))); y may be a or b. Fault: a result is not finite (only when fault.row). */
#ifndef BI_ATTNRES_H
#define BI_ATTNRES_H
#include "bi_types.h"
typedef struct bi_attnres_args {
    int32_t n_row, d, n_bank;
    const bi_bf16 *const *bank;
    const bi_bf16 *p;
    const float *w;
    float eps;
    bi_bf16 *y;
    bi_fault fault;
} bi_attnres_args;
typedef struct bi_residual_args {
    int32_t n_row, d;
    const bi_bf16 *a, *b;
    bi_bf16 *y;
    bi_fault fault;
} bi_residual_args;
#endif
