/* bi_linear: y[t,h] = R(chain([x[t,h] | T], [W_h | B_h])), T = R(RN(s * chain(x[t,h], A_h))).
 * Contract: N-CHAIN, N-LIN, N-LORA
 * n_head independent maps in one call (n_head = 1: a plain linear layer). x[t,h] at x + t*x_ld + h*x_head_ld, n_in long;
 * w a stack of n_head, and so are a and b of lora.slot. y[t,h] at t*y_ld + h*y_head_ld, n_out long: bf16, or f32 unrounded
 * when y_f32. y may not overlap x. Fault: an element of T is not finite. check_logits, with y_f32 only (else
 * BR_E_ARG): y is logits that will be sampled from, and an element that is not finite is a fault too (P-5).
 *
 * bi_linear_group: n calls of bi_linear on the rows of one step, as if made in order; none reads what another writes. Their fault
 * codes ascend: a row with faults in several keeps the lowest, which is the first. One launch where the backend can: a map with
 * few outputs takes as long as its chain, alone or beside a large one. */
#ifndef BI_LINEAR_H
#define BI_LINEAR_H
#include "bi_types.h"
enum { BI_LINEAR_GROUP_MAX = 8 };
typedef struct bi_linear_args {
    int32_t n_row, n_head;
    const bi_bf16 *x;
    int64_t x_ld, x_head_ld;
    bi_mat w;
    bi_lora lora;
    void *y;
    int64_t y_ld, y_head_ld;
    int32_t y_f32, check_logits;
    bi_fault fault;
} bi_linear_args;
#endif
