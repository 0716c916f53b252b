/* bi_chain: chains of blocks over packed operands, 32 columns at a time.      Contract: N-MMA, N-CHAIN
 *
 * Layer: numeric. bi_chain.c is compiled once for each instruction set; the bits are those of bi_block16 block by block.
 * A packed operand is its bf16 values as binary32 (`f`: the widened bits themselves, NaN and Inf included) and for each an
 * int16 exponent (`e`): max(field, 1) - 127, so that the exponent of a product is one addition. Zero gets BI_EXP_ZERO, which
 * no sum lifts to a vote; NaN and Inf get BI_EXP_SPECIAL, which no sum hides from the range check. */
#ifndef BI_CHAIN_H
#define BI_CHAIN_H

#include "bi_bits.h"
#include "bi_contract.h"
#include "bi_isa.h"
#include <stddef.h>

enum {
    BI_PANEL = 32, /* columns computed together; a storage width, it moves no bit */
    BI_EXP_ZERO = -8000,
    BI_EXP_SPECIAL = 16000,
    BI_EXP_FAST_MAX = 100, /* the fast form is exact for blocks with |exponent| up to here */
    BI_PACKED_BYTES = sizeof(float) + sizeof(int16_t) /* of one packed value */
};

static inline int32_t bi_pad_k(int32_t n) {
    return (n + BI_MMA_K - 1) / BI_MMA_K * BI_MMA_K;
}

static inline BI_HD int16_t bi_chain_exponent(bi_bf16 x) {
    int32_t field = (x >> 7) & 255;
    int32_t e = (field ? field : 1) - 127;
    e = field == 255 ? BI_EXP_SPECIAL : e;
    return (int16_t)((x & 0x7fff) == 0 ? BI_EXP_ZERO : e);
}

/* f, e (n_pad) of x (n); positions n .. n_pad - 1 become zeros. */
void BI_FN(bi_pack_row)(const bi_bf16 *x, int n, int n_pad, float *f, int16_t *e);

/* acc (n_row, 32) with row stride acc_ld, in and out: each element's chain CONTINUES through n_k products, k ascending.
 * Row r: xf[r], xe[r] (n_k) packed. Column l, product k: bf[k * b_ld + l], be[k * b_ld + l]. n_k a multiple of 16.
 * No pointer needs alignment. acc overlaps nothing. A NaN comes out as 0x7fffffff, a zero as +0. */
void BI_FN(bi_chain_panel)(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf,
                           const int16_t *be, size_t b_ld, float *acc, size_t acc_ld);

#endif
