/* bi_experts, bi_combine: routed experts and their weighted sum.      Contract: N-MOE, N-LORA, N-ACT
 *
 * bi_experts: y[t,i] = R(chain(act(chain(x[t], w1_e), chain(x[t], w3_e)), w2_e)), e = expert[t,i]. x (n_row, d) bf16;
 *   expert (n_row, topk); w1, w3 stacks of n_expert (d_ff, d), w2 of (d, d_ff). Adapters: lora1, lora3, lora2 (n_slot), of
 *   stacks as tall; NULL: none. y (n_row, topk, d) bf16. Fault: an element of T of N-LORA is not finite.
 * bi_combine: y[t] = R(fma chain from +0 over i of p[t,i] * widen(e[t,i])). The experts of a row are in ascending id. */
#ifndef BI_EXPERTS_H
#define BI_EXPERTS_H
#include "bi_glu.h"
typedef struct bi_experts_args {
    int32_t n_row, d, d_ff, n_expert, topk;
    const bi_bf16 *x;
    const int32_t *expert;
    bi_mat w1, w3, w2;
    const bi_adapter *lora1, *lora3, *lora2;
    int32_t n_slot;
    const int32_t *row_slot;                 /* (n_row), NULL: all base */
    bi_act act;
    bi_bf16 *y;
    bi_fault fault;
} bi_experts_args;
typedef struct bi_combine_args {
    int32_t n_row, d, topk;
    const bi_bf16 *e; /* (n_row, topk, d) */
    const float *p;   /* (n_row, topk) */
    bi_bf16 *y;       /* (n_row, d) */
} bi_combine_args;
#endif
