/* bi_grad_attn_check: what both forms of the gradients of attn and attn_gate ask of their arguments. Internal to bi_grad_attn*.
 *
 * Layer: kernels_batch_invariant. Segments and selected positions are the host form's to check: the GPU's lie in its memory. */
#ifndef BI_GRAD_ATTN_CHECK_H
#define BI_GRAD_ATTN_CHECK_H

#include "bi_grad.h"

static inline br_status bi_grad_check_attn(const bi_limits *limits, const bi_grad_attn_args *a) {
    if (a->n_head < 1 || a->d_kv_latent < 1 || a->d_rope < 0 || a->batch->n_row < 0)
        return br_fail(BR_E_SHAPE, "gradient of attn: %d rows, %d heads of %d + %d: expected at least 0, 1, 1, 0", a->batch->n_row, a->n_head,
                       a->d_kv_latent, a->d_rope);
    if (a->latent_ld < a->d_kv_latent + a->d_rope)
        return br_fail(BR_E_SHAPE, "gradient of attn: latent rows of %d + %d at stride %d: expected stride >= them", a->d_kv_latent, a->d_rope,
                       a->latent_ld);
    if (a->n_head > limits->n_head || a->d_kv_latent > limits->d_kv_latent || a->d_rope > limits->d_rope || a->batch->n_row > limits->n_row)
        return br_fail(BR_E_LIMIT, "gradient of attn: %d rows, %d heads of %d + %d: expected at most %d, %d, %d, %d", a->batch->n_row, a->n_head,
                       a->d_kv_latent, a->d_rope, limits->n_row, limits->n_head, limits->d_kv_latent, limits->d_rope);
    if (a->batch->n_row && a->batch->pos_max >= limits->n_pos)
        return br_fail(BR_E_LIMIT, "gradient of attn: positions up to %d: expected at most %d", a->batch->pos_max, limits->n_pos - 1);
    return BR_OK;
}

static inline br_status bi_grad_check_attn_gate(const bi_grad_attn_gate_args *a) {
    if (a->n_row < 0 || a->d < 1)
        return br_fail(BR_E_SHAPE, "gradient of attn_gate: %d rows of %d: expected n_row >= 0 and d >= 1", a->n_row, a->d);
    return BR_OK;
}

#endif
