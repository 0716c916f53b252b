/* bi_grad_head_check: what both forms of the gradients of score and route ask of their arguments. Internal to bi_grad_head*.
 *
 * Layer: kernels_batch_invariant. Tokens, temperatures and chosen experts are the host form's to check: the GPU's lie in its memory. */
#ifndef BI_GRAD_HEAD_CHECK_H
#define BI_GRAD_HEAD_CHECK_H

#include "bi_grad.h"

static inline br_status bi_grad_check_score(const bi_limits *limits, const bi_grad_score_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->n_vocab < 1)
        return br_fail(BR_E_SHAPE, "gradient of score: %d rows of %d, %d tokens: expected at least 0, 1, 1", a->n_row, a->d, a->n_vocab);
    if (a->d > limits->d_model || a->n_vocab > limits->n_vocab)
        return br_fail(BR_E_LIMIT, "gradient of score: rows of %d, %d tokens: expected at most %d, %d", a->d, a->n_vocab, limits->d_model,
                       limits->n_vocab);
    if (!a->w.data || a->w.n_out != a->n_vocab || a->w.n_in != a->d || a->w.form != BI_FORM_BF16)
        return br_fail(BR_E_SHAPE, "gradient of score: the head is (%d, %d): expected (%d, %d) in bf16", a->w.n_out, a->w.n_in, a->n_vocab, a->d);
    return BR_OK;
}

static inline br_status bi_grad_check_route(const bi_limits *limits, const bi_grad_route_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->n_expert < 1 || a->topk < 1 || a->topk > a->n_expert)
        return br_fail(BR_E_SHAPE, "gradient of route: %d rows of %d, %d of %d experts: expected at least 0, 1, 1, as many", a->n_row, a->d,
                       a->topk, a->n_expert);
    if (a->d > limits->d_model || a->n_expert > limits->n_expert || a->topk > limits->n_expert_topk)
        return br_fail(BR_E_LIMIT, "gradient of route: rows of %d, %d of %d experts: expected at most %d, %d of %d", a->d, a->topk, a->n_expert,
                       limits->d_model, limits->n_expert_topk, limits->n_expert);
    if (!a->w.data || a->w.n_out != a->n_expert || a->w.n_in != a->d || a->w.form != BI_FORM_BF16)
        return br_fail(BR_E_SHAPE, "gradient of route: the router is (%d, %d): expected (%d, %d) in bf16", a->w.n_out, a->w.n_in, a->n_expert,
                       a->d);
    return BR_OK;
}

#endif
