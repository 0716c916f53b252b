/* bi_latent_store, bi_attn, bi_attn_gate: absorbed MLA over the latent cache.      Contract: N-ATT
 *
 * bi_latent_store: writes row t, [c | k_r] (d_latent = d_kv_latent + d_rope bf16, row stride x_ld), at its position's place
 *   in the cache. The block layout is the backend's; bytes of a block: backend->latent_block_bytes.
 * bi_attn: z[t,h] = R(RN(O * RN(1/L))) over the selected positions. q (n_row, n_head, d_kv_latent) bf16, absorbed;
 *   q_r[t,h] at q_r + t*q_r_ld + h*q_r_head_ld, d_rope long. select (n_row, select_ld) ascending positions <= the row's own,
 *   n_select (n_row) >= 1; select NULL: every position up to the row's own. alpha = RN((d_nope + d_rope)^-1/2).
 *   z (n_row, n_head, d_kv_latent) bf16. Fault: a score s is not finite.
 *   Row t reads the cache at its own sequence's positions <= its own, which this step's store has already written.
 * bi_attn_gate: y = R(RN(o * sigmoid(widen(gate)))), gate NULL: R(o). o (n_row, d) f32; gate, y (n_row, d) bf16. */
#ifndef BI_ATTN_H
#define BI_ATTN_H
#include "bi_types.h"
typedef struct bi_latent_store_args {
    const bi_batch *batch;
    int32_t d_latent;
    const bi_bf16 *x;
    int32_t x_ld;
    bi_cache cache;
} bi_latent_store_args;
typedef struct bi_attn_args {
    const bi_batch *batch;
    int32_t n_head, d_kv_latent, d_rope;
    const bi_bf16 *q, *q_r;
    int64_t q_r_ld, q_r_head_ld;
    bi_cache cache;
    const int32_t *select, *n_select;
    int32_t select_ld;
    float alpha;
    bi_bf16 *z;
    bi_fault fault;
} bi_attn_args;
typedef struct bi_attn_gate_args {
    int32_t n_row, d;
    const float *o;
    const bi_bf16 *gate;
    bi_bf16 *y;
} bi_attn_gate_args;
#endif
