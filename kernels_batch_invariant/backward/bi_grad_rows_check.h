/* bi_grad_rows_check: what both forms of the gradients of the row ops ask of their arguments. Internal to bi_grad_rows*.
 *
 * Layer: kernels_batch_invariant. Where conv's segments begin is the host form's to check: the GPU's lie in its memory. */
#ifndef BI_GRAD_ROWS_CHECK_H
#define BI_GRAD_ROWS_CHECK_H

#include "bi_grad.h"

static inline br_status bi_grad_check_rmsnorm(const bi_grad_norm_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->d > BR_D_MODEL_MAX)
        return br_fail(BR_E_SHAPE, "gradient of rmsnorm: %d rows of %d: expected n_row >= 0 and 1 to %d elements", a->n_row, a->d, BR_D_MODEL_MAX);
    if (a->x_ld < a->d)
        return br_fail(BR_E_SHAPE, "gradient of rmsnorm: row stride %d: expected at least %d", a->x_ld, a->d);
    return BR_OK;
}

static inline br_status bi_grad_check_conv(const bi_grad_conv_args *a) {
    const bi_batch *batch = a->batch;
    if (batch->n_row < 0 || a->n_chan < 1)
        return br_fail(BR_E_SHAPE, "gradient of conv: %d rows of %d channels: expected n_row >= 0, n_chan >= 1", batch->n_row, a->n_chan);
    if (a->x_ld < a->n_chan)
        return br_fail(BR_E_SHAPE, "gradient of conv: row stride %d: expected at least %d", a->x_ld, a->n_chan);
    return BR_OK;
}

static inline br_status bi_grad_check_kda_gate(const bi_grad_kda_gate_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "gradient of kda_gate: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row, a->n_head,
                       a->d);
    return BR_OK;
}

static inline br_status bi_grad_check_kda_norm(const bi_grad_kda_norm_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "gradient of kda_norm: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row, a->n_head,
                       a->d);
    return BR_OK;
}

static inline br_status bi_grad_check_attnres(const bi_grad_attnres_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->n_bank < 1 || a->n_bank > BR_BANK_MAX)
        return br_fail(BR_E_SHAPE, "gradient of attnres: %d rows of %d, bank of %d: expected n_row >= 0, d >= 1, a bank of 1 to %d", a->n_row, a->d,
                       a->n_bank, BR_BANK_MAX);
    return BR_OK;
}

#endif
