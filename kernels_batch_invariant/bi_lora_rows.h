/* bi_lora_rows: rows of mixed adapters through one linear map, panel by panel.      Contract: N-CHAIN, N-LORA
 *
 * Layer: kernels_batch_invariant, internal to the oracle's op files linear and experts. Rows are taken in the order of their
 * adapter slots, so that the chains of one adapter run together over full tiles. Which rows stand together moves no bit:
 * each element is one chain of its own. */
#ifndef BI_LORA_ROWS_H
#define BI_LORA_ROWS_H

#include "bi_gemm.h"
#include "bi_rows.h"

enum { BI_LORA_ROWS = 32 }; /* places of one bi_lora_t; the largest tile of the two ops */

/* Packed rows: (n_row, ld) values and exponents. */
typedef struct bi_packed {
    float *f;
    int16_t *e;
    size_t ld;
} bi_packed;

/* Places begin .. end - 1, whose rows have adapter `slot` (-1: base). */
typedef struct bi_span {
    int32_t slot, begin, end;
} bi_span;

/* What the slots add to map `map` of a stack of n_map. slot NULL: nothing. */
typedef struct bi_lora_map {
    const bi_adapter *slot; /* (n_slot) */
    int32_t n_map, map;
} bi_lora_map;

static inline bi_packed bi_packed_from(bi_packed rows, int32_t row) {
    size_t at = (size_t)row * rows.ld;
    return (bi_packed){rows.f + at, rows.e + at, rows.ld};
}

/* The adapter of a slot, NULL when it leaves the map alone. */
static inline const bi_adapter *bi_lora_adapter(bi_lora_map lora, int32_t slot) {
    if (!lora.slot || slot < 0)
        return NULL;
    return lora.slot[slot].a.data ? &lora.slot[slot] : NULL;
}

/* BR_E_SHAPE unless the adapter of the slot, if there is one, fits maps (n_out, n_in) and the scratch. */
static inline br_status bi_lora_check(const bi_ctx *ctx, const char *op, bi_lora_map lora, int32_t slot, int32_t n_out,
                                      int32_t n_in) {
    const bi_adapter *adapter = bi_lora_adapter(lora, slot);
    if (!adapter)
        return BR_OK;
    const bi_mat *a = &adapter->a, *b = &adapter->b;
    if (a->n_in != n_in || b->n_out != n_out || a->n_out != b->n_in || !b->data || !adapter->s)
        return br_fail(BR_E_SHAPE, "%s: slot %d, A (%d, %d), B (%d, %d): expected A (r, %d), B (%d, r)", op, slot, a->n_out,
                       a->n_in, b->n_out, b->n_in, n_in, n_out);
    if (a->n_out < 1 || bi_pad_rank(a->n_out) > bi_pad_rank(ctx->limits.rank))
        return br_fail(BR_E_SHAPE, "%s: slot %d, rank %d: expected 1 to %d", op, slot, a->n_out, bi_pad_rank(ctx->limits.rank));
    return BR_OK;
}

/* Puts item (n) and slot (n) in the order of the slots; those of one slot keep their order. */
static inline void bi_lora_sort(int32_t *item, int32_t *slot, int32_t n) {
    for (int32_t i = 1; i < n; i++) {
        int32_t of_item = item[i], of_slot = slot[i], place = i;
        for (; place > 0 && slot[place - 1] > of_slot; place--) {
            item[place] = item[place - 1];
            slot[place] = slot[place - 1];
        }
        item[place] = of_item;
        slot[place] = of_slot;
    }
}

/* Cuts sorted places into spans of one slot and at most n_max places; returns how many. */
static inline int32_t bi_lora_cut(const int32_t *slot, int32_t n, int32_t n_max, bi_span *span) {
    int32_t n_span = 0;
    for (int32_t i = 0; i < n; i++) {
        if (i == 0 || slot[i] != slot[i - 1] || i - span[n_span - 1].begin == n_max)
            span[n_span++] = (bi_span){slot[i], i, i};
        span[n_span - 1].end = i + 1;
    }
    return n_span;
}

/* t = R(RN(s * chain(x, A))) of the span's places, packed and padded with zeros to whole k-blocks. row (places): which row
 * of the op a place holds, for its fault. At most BI_LORA_ROWS places. */
static inline void bi_lora_t(bi_lora_map lora, bi_packed x, bi_packed t, bi_span span, const int32_t *row,
                             const bi_fault *fault) {
    const bi_adapter *adapter = bi_lora_adapter(lora, span.slot);
    if (!adapter)
        return;
    int32_t rank = adapter->a.n_out, n = span.end - span.begin;
    bi_mat a = bi_mat_at(&adapter->a, lora.map);
    BR_ASSERT(n <= BI_LORA_ROWS);
    x = bi_packed_from(x, span.begin);
    t = bi_packed_from(t, span.begin);
    for (int32_t first = 0; first < rank; first += BI_PANEL) {
        float acc[BI_LORA_ROWS][BI_PANEL];
        memset(acc, 0, sizeof *acc * (size_t)n);
        int32_t width = rank - first < BI_PANEL ? rank - first : BI_PANEL, panel = first / BI_PANEL;
        bi_gemm_rows(n, x.f, x.e, x.ld, &a, panel, panel + 1, acc[0], BI_PANEL);
        for (int32_t i = 0; i < n; i++) {
            bi_bf16 rounded[BI_PANEL];
            for (int32_t l = 0; l < width; l++) {
                rounded[l] = bi_round(BI_MUL(adapter->s[lora.map], acc[i][l]));
                bi_fault_check(fault, row[span.begin + i], bi_widen(rounded[l]));
            }
            bi_packed to = bi_packed_from(t, i);
            BI_FN(bi_pack_row)(rounded, width, bi_pad_k(width), to.f + first, to.e + first);
        }
    }
}

/* acc (end - begin, 32): one panel of map lora.map of the stack for places begin .. end - 1. The base chain of all of them, continued span by
 * span through B. */
static inline void bi_lora_panel(const bi_mat *stack, bi_lora_map lora, bi_packed x, bi_packed t, const bi_span *span,
                                 int32_t n_span, int32_t begin, int32_t end, int32_t panel, float (*acc)[BI_PANEL]) {
    memset(acc, 0, sizeof *acc * (size_t)(end - begin));
    bi_packed base = bi_packed_from(x, begin);
    bi_mat w = bi_mat_at(stack, lora.map);
    bi_gemm_rows(end - begin, base.f, base.e, base.ld, &w, panel, panel + 1, acc[0], BI_PANEL);
    for (int32_t i = 0; i < n_span; i++) {
        const bi_adapter *adapter = bi_lora_adapter(lora, span[i].slot);
        int32_t from = span[i].begin > begin ? span[i].begin : begin, to = span[i].end < end ? span[i].end : end;
        if (!adapter || from >= to)
            continue;
        bi_packed low = bi_packed_from(t, from);
        bi_mat b = bi_mat_at(&adapter->b, lora.map);
        bi_gemm_rows(to - from, low.f, low.e, low.ld, &b, panel, panel + 1, acc[from - begin], BI_PANEL);
    }
}

#endif
