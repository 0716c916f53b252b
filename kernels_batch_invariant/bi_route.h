/* bi_route: sigmoid router with a selection bias.      Contract: N-ROUTE, P-4
 * x (n_row, d) bf16; w packed (n_expert, d); bias (n_expert) f32. expert (n_row, topk) ascending ids; p (n_row, topk) f32.
 * renormalize 0: p = RN(s * scale). logit NULL or (n_row, n_expert) f32: tests hold its bits, since a choice alone
 * shows a wrong logit only where it crosses another. Fault: a logit is not finite (the row then takes experts 0..topk-1 with
 * p = 0). */
#ifndef BI_ROUTE_H
#define BI_ROUTE_H
#include "bi_types.h"
typedef struct bi_route_args {
    int32_t n_row, d, n_expert, topk;
    const bi_bf16 *x;
    bi_mat w;
    const float *bias;
    int32_t renormalize;
    float scale;
    int32_t *expert;
    float *p;
    float *logit;
    bi_fault fault;
} bi_route_args;
#endif
