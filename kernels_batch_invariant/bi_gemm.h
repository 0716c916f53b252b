/* bi_gemm: the oracle's packed matrix, and rows times it on one thread.      Contract: N-CHAIN, N-LIN
 *
 * Layer: kernels_batch_invariant, internal to the oracle's op files. A matrix (n_out, n_in) is packed as panels of 32 output
 * columns; n_in is padded to 16 and n_out to 32 with zeros. A panel of bf16 weights holds n_in_padded * 32 binary32 values,
 * k rising, 32 columns a k, and after them as many int16 exponents (bi_chain.h): 6 bytes a weight, ready for bi_chain_panel.
 * A panel of MXFP4 weights holds their codes, 16 bytes a k with columns l and l + 16 in one, and after them the scale bytes, 32 a
 * group of 32 k: it is expanded piece by piece while it is used, so that 896 experts of full width fit into a host's memory. */
#ifndef BI_GEMM_H
#define BI_GEMM_H

#include "bi_chain.h"
#include "bi_types.h"

enum {
    BI_GEMM_ROWS = 64,     /* rows of one pass over a panel */
    BI_GEMM_CHUNK_K = 128, /* products of a panel that stay in the first-level cache (24 KiB) while the rows pass */
    BI_FP4_GROUP = 32,     /* inputs that share a scale */
    BI_FP4_PAIR = BI_PANEL / 2
};
static_assert(BI_GEMM_CHUNK_K % BI_FP4_GROUP == 0, "a piece of a panel is whole groups");

static inline int32_t bi_panel_count(int32_t n_out) {
    return (n_out + BI_PANEL - 1) / BI_PANEL;
}

static inline size_t bi_panel_bytes(bi_form form, int32_t n_in) {
    const size_t n_k = (size_t)bi_pad_k(n_in);
    return form == BI_FORM_FP4 ? n_k * BI_FP4_PAIR + n_k / BI_FP4_GROUP * BI_PANEL : n_k * BI_PANEL * BI_PACKED_BYTES;
}

static inline const unsigned char *bi_panel_at(const bi_mat *w, int32_t panel) {
    return (const unsigned char *)w->data + bi_panel_bytes(w->form, w->n_in) * (size_t)panel;
}

static inline const float *bi_panel_f(const bi_mat *w, int32_t panel) {
    return (const float *)(const void *)bi_panel_at(w, panel);
}

static inline const int16_t *bi_panel_e(const bi_mat *w, int32_t panel) {
    return (const int16_t *)(bi_panel_f(w, panel) + (size_t)bi_pad_k(w->n_in) * BI_PANEL);
}

/* One k of an MXFP4 panel: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^exponent. In 32-bit lanes, which is what vectors are
 * made of; the values are those of bi_fp4_to_bf16. */
static inline BI_HD void bi_panel_expand_k(const uint8_t *restrict code, const float *restrict power, const int32_t *restrict exponent,
                                           float *restrict f, int16_t *restrict e) {
    enum { HALF_BITS = 126 << 23, FRACTION_ONE = 1 << 22 };
    int32_t c[BI_PANEL];
    for (int l = 0; l < BI_FP4_PAIR; l++) {
        c[l] = code[l] & 15;
        c[l + BI_FP4_PAIR] = code[l] >> 4;
    }
    for (int l = 0; l < BI_PANEL; l++) {
        const int32_t m = c[l] & 7, some = -(m != 0);
        const int32_t bits = (m * FRACTION_ONE + HALF_BITS - (m == 1) * FRACTION_ONE) & some;
        const int32_t top = exponent[l] + (m >> 1) - 1, clamped = top > -126 ? top : -126;
        f[l] = bi_f32_of(bi_u32_of(BI_MUL(bi_f32_of((uint32_t)bits), power[l])) | (uint32_t)(c[l] & 8) << 28);
        e[l] = (int16_t)((clamped & some) | (BI_EXP_ZERO & ~some));
    }
}

/* Products k_begin .. k_begin + n_k - 1 of an MXFP4 panel as bi_chain_panel takes them. */
static inline void bi_panel_expand(const bi_mat *w, int32_t panel, int32_t k_begin, int32_t n_k, float *restrict f,
                                   int16_t *restrict e) {
    const uint8_t *code = bi_panel_at(w, panel) + (size_t)k_begin * BI_FP4_PAIR;
    const uint8_t *scale = bi_panel_at(w, panel) + (size_t)w->n_in * BI_FP4_PAIR + (size_t)(k_begin / BI_FP4_GROUP) * BI_PANEL;
    for (int32_t k = 0; k < n_k; k += BI_FP4_GROUP, scale += BI_PANEL) {
        float power[BI_PANEL];
        int32_t exponent[BI_PANEL];
        for (int l = 0; l < BI_PANEL; l++) {
            power[l] = bi_f32_of(scale[l] ? (uint32_t)scale[l] << 23 : 0x00400000u);
            exponent[l] = scale[l] - 127;
        }
        for (int32_t i = 0; i < BI_FP4_GROUP; i++, code += BI_FP4_PAIR, f += BI_PANEL, e += BI_PANEL)
            bi_panel_expand_k(code, power, exponent, f, e);
    }
}

/* Continues the chains of n_row <= BI_GEMM_ROWS rows through panels [panel_begin, panel_end) of w. Row r of x, packed by
 * bi_pack_row to bi_pad_k(n_in), at xf + r * x_ld and xe + r * x_ld. acc (n_row, 32 * panels) with row stride acc_ld. */
static inline void bi_gemm_rows(int32_t n_row, const float *xf, const int16_t *xe, size_t x_ld, const bi_mat *w,
                                int32_t panel_begin, int32_t panel_end, float *acc, size_t acc_ld) {
    BR_ASSERT(n_row <= BI_GEMM_ROWS);
    const float *row_f[BI_GEMM_ROWS];
    const int16_t *row_e[BI_GEMM_ROWS];
    float expanded_f[BI_GEMM_CHUNK_K * BI_PANEL];
    int16_t expanded_e[BI_GEMM_CHUNK_K * BI_PANEL];
    int32_t n_k = bi_pad_k(w->n_in);
    for (int32_t panel = panel_begin; panel < panel_end; panel++)
        for (int32_t k = 0; k < n_k; k += BI_GEMM_CHUNK_K) {
            for (int32_t r = 0; r < n_row; r++) {
                row_f[r] = xf + (size_t)r * x_ld + k;
                row_e[r] = xe + (size_t)r * x_ld + k;
            }
            const int32_t n = n_k - k < BI_GEMM_CHUNK_K ? n_k - k : BI_GEMM_CHUNK_K;
            const float *f = expanded_f;
            const int16_t *e = expanded_e;
            if (w->form == BI_FORM_FP4) {
                bi_panel_expand(w, panel, k, n, expanded_f, expanded_e);
            } else {
                f = bi_panel_f(w, panel) + (size_t)k * BI_PANEL;
                e = bi_panel_e(w, panel) + (size_t)k * BI_PANEL;
            }
            BI_FN(bi_chain_panel)(n_row, row_f, row_e, n, f, e, BI_PANEL, acc + (size_t)(panel - panel_begin) * BI_PANEL, acc_ld);
        }
}

#endif
