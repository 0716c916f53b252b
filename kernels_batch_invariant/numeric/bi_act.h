/* bi_act: the gated activation of one element, from f32 accumulators to bf16.      Contract: N-ACT, N-FN
 *
 * Layer: numeric; one source for both backends. Shared by bi_glu (dense and shared MLPs) and bi_experts, so that the fused
 * experts equal the composition of their parts. */
#ifndef BI_ACT_H
#define BI_ACT_H

#include "bi_bits.h"
#include "bi_fn.h"

/* R(RN(RN(beta * RN(tanh(RN(g/beta)) * sigmoid(g))) * RN(linear_beta * tanh(RN(u/linear_beta))))) */
static inline BI_HD bi_bf16 bi_act_situ(float g, float u, float beta, float linear_beta) {
    float gate = BI_MUL(beta, BI_MUL(bi_tanh(BI_DIV(g, beta)), bi_sigmoid(g)));
    float up = BI_MUL(linear_beta, bi_tanh(BI_DIV(u, linear_beta)));
    return bi_round(BI_MUL(gate, up));
}

/* R(RN(silu(g) * u)) */
static inline BI_HD bi_bf16 bi_act_silu(float g, float u) {
    return bi_round(BI_MUL(bi_silu(g), u));
}

#endif
