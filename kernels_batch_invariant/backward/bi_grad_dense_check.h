/* bi_grad_dense_check: which arguments of the gradients of linear, glu, experts and combine are refused; both forms ask it. Only
 * shapes and pointers are looked at: what lies in device memory is not.
 *
 * Layer: kernels_batch_invariant, internal to bi_grad_dense* and bi_grad_experts*. */
#ifndef BI_GRAD_DENSE_CHECK_H
#define BI_GRAD_DENSE_CHECK_H

#include "bi_grad.h"

/* Adapter `slot` of maps (n_out, n_in); absent ones fit. want: the gradients asked for, may be NULL. */
static inline br_status bi_grad_check_adapter(const bi_limits *limits, const char *op, int32_t slot, const bi_adapter *adapter, int32_t n_out,
                                              int32_t n_in, const bi_grad_adapter *want) {
    const bi_mat *a = &adapter->a, *b = &adapter->b;
    if (!a->data && want && (want->da || want->db))
        return br_fail(BR_E_ARG, "gradient of %s: slot %d leaves the map alone: expected no gradients of it", op, slot);
    if (!a->data)
        return BR_OK;
    if (a->n_in != n_in || b->n_out != n_out || a->n_out != b->n_in || a->n_out < 1 || !b->data || !adapter->s)
        return br_fail(BR_E_SHAPE, "gradient of %s: slot %d, A (%d, %d), B (%d, %d): expected A (r, %d), B (%d, r)", op, slot, a->n_out, a->n_in,
                       b->n_out, b->n_in, n_in, n_out);
    if (a->form != BI_FORM_BF16 || b->form != BI_FORM_BF16)
        return br_fail(BR_E_UNSUPPORTED, "gradient of %s: slot %d in MXFP4: expected bf16", op, slot);
    if (bi_pad_rank(a->n_out) > bi_pad_rank(limits->rank))
        return br_fail(BR_E_LIMIT, "gradient of %s: slot %d, rank %d: expected at most %d", op, slot, a->n_out, bi_pad_rank(limits->rank));
    return BR_OK;
}

static inline br_status bi_grad_check_linear(const bi_limits *limits, const bi_grad_linear_args *a) {
    const bi_mat *w = &a->w;
    if (a->n_row < 0 || a->n_head < 1)
        return br_fail(BR_E_SHAPE, "gradient of linear: %d rows of %d maps: expected at least 0 and 1", a->n_row, a->n_head);
    if (w->n_in < 1 || w->n_out < 1 || !w->data)
        return br_fail(BR_E_SHAPE, "gradient of linear: a map (%d, %d): expected at least 1 input and 1 output", w->n_out, w->n_in);
    if (a->n_row > limits->n_row || w->n_in > limits->d_in || w->n_out > limits->d_out)
        return br_fail(BR_E_LIMIT, "gradient of linear: %d rows of a map (%d, %d): expected at most %d of (%d, %d)", a->n_row, w->n_out, w->n_in,
                       limits->n_row, limits->d_out, limits->d_in);
    if (a->slot && !a->lora.slot)
        return br_fail(BR_E_ARG, "gradient of linear: gradients of adapters wanted where there are none");
    if (a->lora.slot && (a->lora.n_slot < 0 || !a->lora.row_slot))
        return br_fail(BR_E_ARG, "gradient of linear: %d adapters: expected at least 0, and a slot for every row", a->lora.n_slot);
    for (int32_t i = 0; a->lora.slot && i < a->lora.n_slot; i++)
        BR_TRY(bi_grad_check_adapter(limits, "linear", i, &a->lora.slot[i], w->n_out, w->n_in, a->slot ? &a->slot[i] : NULL));
    return BR_OK;
}

static inline br_status bi_grad_check_map(const bi_mat *map, const char *name, int32_t n_out, int32_t n_in) {
    if (!map->data || map->n_out != n_out || map->n_in != n_in)
        return br_fail(BR_E_SHAPE, "gradient of experts: %s is (%d, %d): expected (%d, %d)", name, map->n_out, map->n_in, n_out, n_in);
    return BR_OK;
}

static inline br_status bi_grad_check_side(const bi_limits *limits, const bi_grad_experts_args *a, const char *name, const bi_adapter *lora,
                                           const bi_grad_adapter *want, int32_t n_out, int32_t n_in) {
    if (want && !lora)
        return br_fail(BR_E_ARG, "gradient of %s: gradients of adapters wanted where there are none", name);
    for (int32_t i = 0; lora && i < a->n_slot; i++)
        BR_TRY(bi_grad_check_adapter(limits, name, i, &lora[i], n_out, n_in, want ? &want[i] : NULL));
    return BR_OK;
}

static inline br_status bi_grad_check_experts(const bi_limits *limits, const bi_grad_experts_args *a) {
    if (a->n_row < 0 || a->topk < 1 || a->n_expert < 1 || a->d < 1 || a->d_ff < 1 || a->n_slot < 0)
        return br_fail(BR_E_SHAPE, "gradient of experts: %d rows, %d of %d experts, widths %d and %d: expected 0 rows or more, at least 1 of each",
                       a->n_row, a->topk, a->n_expert, a->d, a->d_ff);
    if (a->n_row > limits->n_row || a->topk > limits->n_expert_topk || a->n_expert > limits->n_expert || a->d > limits->d_expert ||
        a->d_ff > limits->d_expert_ff)
        return br_fail(BR_E_LIMIT, "gradient of experts: %d rows, %d of %d experts (%d, %d): expected at most %d, %d of %d (%d, %d)", a->n_row,
                       a->topk, a->n_expert, a->d_ff, a->d, limits->n_row, limits->n_expert_topk, limits->n_expert, limits->d_expert_ff,
                       limits->d_expert);
    if (a->n_slot > limits->n_slot)
        return br_fail(BR_E_LIMIT, "gradient of experts: %d adapters: expected at most %d", a->n_slot, limits->n_slot);
    BR_TRY(bi_grad_check_map(&a->w1, "w1", a->d_ff, a->d));
    BR_TRY(bi_grad_check_map(&a->w3, "w3", a->d_ff, a->d));
    BR_TRY(bi_grad_check_map(&a->w2, "w2", a->d, a->d_ff));
    if (a->w1.form != a->w3.form)
        return br_fail(BR_E_UNSUPPORTED, "gradient of experts: w1 and w3 of two forms: expected one");
    BR_TRY(bi_grad_check_side(limits, a, "experts: w1", a->lora1, a->slot1, a->d_ff, a->d));
    BR_TRY(bi_grad_check_side(limits, a, "experts: w3", a->lora3, a->slot3, a->d_ff, a->d));
    return bi_grad_check_side(limits, a, "experts: w2", a->lora2, a->slot2, a->d, a->d_ff);
}

static inline br_status bi_grad_check_combine(const bi_grad_combine_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->topk < 1)
        return br_fail(BR_E_SHAPE, "gradient of combine: %d rows of %d from %d experts: expected n_row >= 0, d >= 1, topk >= 1", a->n_row, a->d,
                       a->topk);
    return BR_OK;
}

static inline br_status bi_grad_check_glu(const bi_grad_glu_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->ld < a->d)
        return br_fail(BR_E_SHAPE, "gradient of glu: %d rows of %d at stride %lld: expected n_row >= 0, d >= 1, stride >= d", a->n_row, a->d,
                       (long long)a->ld);
    return BR_OK;
}

#endif
