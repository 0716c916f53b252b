/* bi_grad_kda_check: what both forms of the gradient of kda ask of their arguments. Internal to bi_grad_kda*.
 *
 * Layer: kernels_batch_invariant. Where segments begin is the host form's to check: the GPU's lie in its memory. */
#ifndef BI_GRAD_KDA_CHECK_H
#define BI_GRAD_KDA_CHECK_H

#include "bi_grad.h"

enum { KDA_D_MIN = 32, KDA_D_MAX = 256 };

static inline br_status bi_grad_check_kda(const bi_limits *limits, const bi_grad_kda_args *a) {
    const int32_t n_row = a->batch->n_row;
    if (n_row < 0 || a->n_head < 1 || a->d < KDA_D_MIN || a->d > KDA_D_MAX || a->d % KDA_D_MIN)
        return br_fail(BR_E_SHAPE, "gradient of kda: %d rows of %d heads of %d: expected n_row >= 0, n_head >= 1, d a multiple of %d up to %d",
                       n_row, a->n_head, a->d, KDA_D_MIN, KDA_D_MAX);
    if (a->ld < a->n_head * a->d)
        return br_fail(BR_E_SHAPE, "gradient of kda: row stride %d: expected at least %d", a->ld, a->n_head * a->d);
    if (n_row > limits->n_row || a->n_head > limits->kda_n_head || a->d > limits->kda_d_head)
        return br_fail(BR_E_LIMIT, "gradient of kda: %d rows of %d heads of %d: opened for %d of %d of %d", n_row, a->n_head, a->d, limits->n_row,
                       limits->kda_n_head, limits->kda_d_head);
    return BR_OK;
}

#endif
