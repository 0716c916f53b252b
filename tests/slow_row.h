/* slow_row: the literal forms of the row-wise ops (norms, conv, KDA, AttnRes, activation, embedding) that the oracle must
 * equal.
 *
 * Layer: tests. Written from the clauses alone with the clauses' numbers spelled out, so that a constant changed in
 * bi_contract.h parts the two. Shares nothing with the oracle but the argument structs; the functions of N-FN are
 * those of slow_fn. One thread, one element at a time; shapes are taken as valid. */
#ifndef SLOW_ROW_H
#define SLOW_ROW_H

#include "bi_backend.h"

void slow_embed(const bi_embed_args *a);
void slow_rmsnorm(const bi_norm_args *a);
void slow_layernorm(const bi_norm_args *a);
void slow_conv(const bi_conv_args *a);
void slow_kda_gate(const bi_kda_gate_args *a);
void slow_kda(const bi_kda_args *a); /* its own layout of the state: (n_head, key, value) */
void slow_kda_norm(const bi_kda_norm_args *a);
void slow_glu(const bi_glu_args *a);
void slow_attnres(const bi_attnres_args *a);
void slow_attnres_weight(float *w, const float *norm, const float *proj, int32_t d);
void slow_residual(const bi_residual_args *a);

/* SUM(n) of x[j] * y[j] by fma, and of x[j]. */
float slow_sum_of_products(const float *x, const float *y, int32_t n);
float slow_sum_of_values(const float *x, int32_t n);

/* R and RN(d^-1/2) from their definitions: the nearer neighbour by exact comparison, ties to even. */
bi_bf16 slow_round(float x);
float slow_inverse_sqrt(int32_t d);

#endif
