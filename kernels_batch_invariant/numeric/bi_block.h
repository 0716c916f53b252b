/* bi_block: the tensor core's block of 16 bf16 products onto one accumulator, in integers.      Contract: N-MMA
 *
 * Layer: numeric. This is the clause itself, and the slow path of bi_chain where the fast form does not reach: NaN, Inf,
 * blocks whose exponent leaves -100..100, and sums of 2^31 - 2^26 or more. */
#ifndef BI_BLOCK_H
#define BI_BLOCK_H

#include "bi_bits.h"
#include "bi_contract.h"
#include <stddef.h>

/* value = s * 2^(e - fraction bits), s signed; subnormals stay un-normalised. */
typedef struct bi_decoded {
    int32_t s, e;
} bi_decoded;

static inline BI_HD bi_decoded bi_decode_bf16(bi_bf16 x) {
    int32_t field = (x >> 7) & 255, s = (x & 127) | (field ? 128 : 0);
    bi_decoded d = {x & 0x8000 ? -s : s, (field ? field : 1) - 127};
    return d;
}

static inline BI_HD bi_decoded bi_decode_f32(float x) {
    uint32_t u = bi_u32_of(x);
    int32_t field = (int32_t)(u >> 23) & 255, s = (int32_t)(u & 0x7fffff) | (field ? 0x800000 : 0);
    bi_decoded d = {u >> 31 ? -s : s, (field ? field : 1) - 127};
    return d;
}

/* s * 2^(BI_MMA_FRACTION - p) / 2^(exp_max - e) cut toward zero; below 2^27. */
static inline BI_HD int64_t bi_block_term(bi_decoded d, int p, int32_t exp_max) {
    int32_t drop = exp_max - d.e;
    int64_t magnitude = (int64_t)(d.s < 0 ? -d.s : d.s) << (BI_MMA_FRACTION - p);
    magnitude = drop > 62 ? 0 : magnitude >> drop;
    return d.s < 0 ? -magnitude : magnitude;
}

/* sum * 2^scale cut toward zero to binary32; subnormals kept, overflow to Inf, zero is +0. */
static inline BI_HD float bi_block_finish(int64_t sum, int32_t scale) {
    if (sum == 0)
        return 0.0f;
    uint32_t sign = sum < 0 ? 0x80000000u : 0;
    uint64_t magnitude = (uint64_t)(sum < 0 ? -sum : sum);
    int32_t top = 63;
    while (!(magnitude >> top))
        top--;
    /* The quantum of the result: 23 bits below the top bit, not below 2^-149. */
    int32_t quantum = top + scale - 23 < -149 ? -149 : top + scale - 23;
    int32_t drop = quantum - scale;
    uint32_t kept = (uint32_t)(drop > 0 ? (drop > 63 ? 0 : magnitude >> drop) : magnitude << -drop);
    if (quantum + 23 > 127)
        return bi_f32_of(sign | BI_F32_INF);
    if (kept == 0)
        return 0.0f;
    /* The hidden bit of a normal number adds the last one to the exponent field. */
    return bi_f32_of(sign | (((uint32_t)(quantum + 149) << 23) + kept));
}

/* The result when NaN or Inf is among c and the factors: 0x7fffffff or that Inf. *found 0: there is none. */
static inline BI_HD float bi_block_special(float c, const bi_bf16 *a, ptrdiff_t a_stride, const bi_bf16 *b,
                                           ptrdiff_t b_stride, int *found) {
    int nan = bi_is_nan(c), plus = bi_u32_of(c) == BI_F32_INF, minus = bi_u32_of(c) == (0x80000000u | BI_F32_INF);
    for (int k = 0; k < BI_MMA_K; k++) {
        uint32_t x = a[k * a_stride], y = b[k * b_stride], x_size = x & 0x7fff, y_size = y & 0x7fff;
        int infinite = x_size == 0x7f80 || y_size == 0x7f80;
        nan |= x_size > 0x7f80 || y_size > 0x7f80 || (infinite && (x_size == 0 || y_size == 0));
        plus |= infinite && !((x ^ y) & 0x8000);
        minus |= infinite && ((x ^ y) & 0x8000);
    }
    *found = nan | plus | minus;
    if (nan || (plus && minus))
        return bi_f32_of(BI_F32_NAN);
    return bi_f32_of((minus ? 0x80000000u : 0) | BI_F32_INF);
}

/* block(c, a, b); a[k * a_stride], b[k * b_stride], k = 0..15. */
static inline BI_HD float bi_block16(float c, const bi_bf16 *a, ptrdiff_t a_stride, const bi_bf16 *b, ptrdiff_t b_stride) {
    int found;
    float special = bi_block_special(c, a, a_stride, b, b_stride, &found);
    if (found)
        return special;
    bi_decoded term[BI_MMA_K], acc = bi_decode_f32(c);
    int32_t exp_max = BI_MMA_EXP_MIN;
    if (acc.s && acc.e > exp_max)
        exp_max = acc.e;
    for (int k = 0; k < BI_MMA_K; k++) {
        bi_decoded x = bi_decode_bf16(a[k * a_stride]), y = bi_decode_bf16(b[k * b_stride]);
        term[k].s = x.s * y.s;
        term[k].e = x.e + y.e;
        if (term[k].s && term[k].e > exp_max)
            exp_max = term[k].e;
    }
    int64_t sum = acc.s ? bi_block_term(acc, 23, exp_max) : 0;
    for (int k = 0; k < BI_MMA_K; k++)
        sum += term[k].s ? bi_block_term(term[k], 14, exp_max) : 0;
    return bi_block_finish(sum, exp_max - BI_MMA_FRACTION);
}

#endif
