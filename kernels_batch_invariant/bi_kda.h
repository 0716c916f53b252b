/* bi_kda_gate, bi_kda, bi_kda_norm: Kimi Delta Attention after its projections.      Contract: N-KDA, N-SUM
 *
 * bi_kda_gate: decay a = exp(g) and beta. f (n_row, n_head*d) bf16; b (n_row, n_head) bf16; a_log (n_head) f32;
 *   dt_bias (n_head*d) f32; bounded: g = lower_bound * sigmoid(..), else -exp(a_log) * softplus(..).
 *   a (n_row, n_head*d) f32; beta (n_row, n_head) f32.
 * bi_kda: the token recurrence. q, k, v (n_row, n_head*d) bf16 after conv, one row stride ld each; a, beta as above.
 *   state: n_head * d * d f32 a sequence (layout the backend's); zero before position 0. o (n_row, n_head*d) f32.
 *   d a multiple of 32, at most 256; scale = RN(d^-1/2). Fault: a sum of squares of q or k is not finite.
 * bi_kda_norm: y = R(RN(RN(RN(o*rstd)*w) * sigmoid(widen(gate)))), per head. o f32 (n_row, n_head, d); w (d) f32;
 *   gate (n_row, n_head*d) bf16; y (n_row, n_head*d) bf16. Fault: the sum of squares is not finite. */
#ifndef BI_KDA_H
#define BI_KDA_H
#include "bi_types.h"
typedef struct bi_kda_gate_args {
    int32_t n_row, n_head, d;
    const bi_bf16 *f, *b;
    const float *a_log, *dt_bias;
    int32_t bounded;
    float lower_bound;
    float *a, *beta;
} bi_kda_gate_args;
typedef struct bi_kda_args {
    const bi_batch *batch;
    int32_t n_head, d;
    const bi_bf16 *q, *k, *v;
    int32_t ld;
    const float *a, *beta;
    float scale;
    bi_state state;
    float *o;
    bi_fault fault;
} bi_kda_args;
typedef struct bi_kda_norm_args {
    int32_t n_row, n_head, d;
    const float *o, *w;
    const bi_bf16 *gate;
    float eps;
    bi_bf16 *y;
    bi_fault fault;
} bi_kda_norm_args;
#endif
