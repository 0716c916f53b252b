/* bi_gemm: the oracle's packed matrix, and rows times it on one thread.      Contract: N-CHAIN, N-LIN
 *
 * Layer: kernels_batch_invariant, internal to the oracle's op files. A matrix (n_out, n_in) is packed as panels of 32 output
 * columns; n_in is padded to 16 and n_out to 32 with zeros. A panel holds n_in_padded * 32 binary32 values, k rising, 32
 * columns a k, and after them as many int16 exponents (bi_chain.h): 6 bytes a weight, ready for bi_chain_panel. */
#ifndef BI_GEMM_H
#define BI_GEMM_H

#include "bi_chain.h"
#include "bi_types.h"

enum {
    BI_GEMM_ROWS = 64,   /* rows of one pass over a panel */
    BI_GEMM_CHUNK_K = 128 /* products of a panel that stay in the first-level cache (24 KiB) while the rows pass */
};

static inline int32_t bi_panel_count(int32_t n_out) {
    return (n_out + BI_PANEL - 1) / BI_PANEL;
}

static inline size_t bi_panel_bytes(int32_t n_in) {
    return (size_t)bi_pad_k(n_in) * BI_PANEL * BI_PACKED_BYTES;
}

static inline const float *bi_panel_f(const bi_mat *w, int32_t panel) {
    return (const float *)((const unsigned char *)w->data + bi_panel_bytes(w->n_in) * (size_t)panel);
}

static inline const int16_t *bi_panel_e(const bi_mat *w, int32_t panel) {
    return (const int16_t *)(bi_panel_f(w, panel) + (size_t)bi_pad_k(w->n_in) * BI_PANEL);
}

/* Continues the chains of n_row <= BI_GEMM_ROWS rows through panels [panel_begin, panel_end) of w. Row r of x, packed by
 * bi_pack_row to bi_pad_k(n_in), at xf + r * x_ld and xe + r * x_ld. acc (n_row, 32 * panels) with row stride acc_ld. */
static inline void bi_gemm_rows(int32_t n_row, const float *xf, const int16_t *xe, size_t x_ld, const bi_mat *w,
                                int32_t panel_begin, int32_t panel_end, float *acc, size_t acc_ld) {
    BR_ASSERT(n_row <= BI_GEMM_ROWS);
    const float *row_f[BI_GEMM_ROWS];
    const int16_t *row_e[BI_GEMM_ROWS];
    int32_t n_k = bi_pad_k(w->n_in);
    for (int32_t panel = panel_begin; panel < panel_end; panel++)
        for (int32_t k = 0; k < n_k; k += BI_GEMM_CHUNK_K) {
            for (int32_t r = 0; r < n_row; r++) {
                row_f[r] = xf + (size_t)r * x_ld + k;
                row_e[r] = xe + (size_t)r * x_ld + k;
            }
            size_t at = (size_t)k * BI_PANEL;
            BI_FN(bi_chain_panel)(n_row, row_f, row_e, n_k - k < BI_GEMM_CHUNK_K ? n_k - k : BI_GEMM_CHUNK_K,
                                  bi_panel_f(w, panel) + at, bi_panel_e(w, panel) + at, BI_PANEL,
                                  acc + (size_t)(panel - panel_begin) * BI_PANEL, acc_ld);
        }
}

#endif
