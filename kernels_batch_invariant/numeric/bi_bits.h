/* bi_bits: bit patterns, and conversions between binary32, bf16, e4m3, MXFP4.      Contract: N-F32, N-CHAIN, N-FP4, N-IDX
 *
 * Layer: numeric. One source for both backends: BI_HD functions compile for host and device, and BI_FMA and its like are the
 * single IEEE operations of N-F32, which no compiler may merge or reorder. Branch-free: loops over arrays vectorise. */
#ifndef BI_BITS_H
#define BI_BITS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define BI_HD __host__ __device__
#else
#define BI_HD __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define BI_FMA(a, b, c) __fmaf_rn((a), (b), (c))
#define BI_ADD(a, b) __fadd_rn((a), (b))
#define BI_SUB(a, b) __fsub_rn((a), (b))
#define BI_MUL(a, b) __fmul_rn((a), (b))
#define BI_DIV(a, b) __fdiv_rn((a), (b))
#define BI_SQRT(a) __fsqrt_rn(a)
#else
#define BI_FMA(a, b, c) fmaf((a), (b), (c))
#define BI_ADD(a, b) ((float)(a) + (float)(b))
#define BI_SUB(a, b) ((float)(a) - (float)(b))
#define BI_MUL(a, b) ((float)(a) * (float)(b))
#define BI_DIV(a, b) ((float)(a) / (float)(b))
#define BI_SQRT(a) sqrtf(a)
#endif

typedef uint16_t bi_bf16; /* the high half of a binary32 */

enum { BI_F32_INF = 0x7f800000, BI_F32_NAN = 0x7fffffff, BI_BF16_NAN = 0x7fff, BI_FP4_SCALE_MAX = 252 };

static inline BI_HD uint32_t bi_u32_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline BI_HD float bi_f32_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline BI_HD int bi_is_finite(float x) {
    return (bi_u32_of(x) & BI_F32_INF) != BI_F32_INF;
}

static inline BI_HD int bi_is_nan(float x) {
    return (bi_u32_of(x) & 0x7fffffffu) > BI_F32_INF;
}

/* widen(x) of N-CHAIN: exact. */
static inline BI_HD float bi_widen(bi_bf16 x) {
    return bi_f32_of((uint32_t)x << 16);
}

/* R(x) of N-CHAIN: nearest even, subnormals kept, overflow to Inf; every NaN becomes 0x7fff. */
static inline BI_HD bi_bf16 bi_round(float x) {
    uint32_t u = bi_u32_of(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return (bi_bf16)((u & 0x7fffffffu) > BI_F32_INF ? (uint32_t)BI_BF16_NAN : rounded);
}

/* To e4m3: nearest even, subnormals kept. N-IDX never passes more than 448; beyond it the largest number comes out, and 0x7f
 * for NaN, as the hardware's saturating conversion does. */
static inline BI_HD uint8_t bi_e4m3_of(float x) {
    uint32_t u = bi_u32_of(x), magnitude = u & 0x7fffffffu;
    /* Normal range: cut 20 fraction bits and move the bias from 127 to 7. Below 2^-6: the sum with 2^14 rounds at 2^-9. */
    uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = bi_u32_of(BI_ADD(bi_f32_of(magnitude), 16384.0f)) - 0x46800000u;
    uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
    code = magnitude > 0x43e00000u ? 0x7eu : code;
    code = magnitude > BI_F32_INF ? 0x7fu : code;
    return (uint8_t)(code | ((u >> 24) & 0x80u));
}

/* From e4m3: exact; codes 0x7f and 0xff are NaN. */
static inline BI_HD float bi_e4m3_widen(uint8_t code) {
    uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    /* The code read as a binary32 is 2^120 too small, its subnormals included. */
    float scaled = BI_MUL(bi_f32_of(magnitude << 20), 0x1p120f);
    return bi_f32_of((magnitude == 0x7fu ? (uint32_t)BI_F32_NAN : bi_u32_of(scaled)) | sign);
}

/* One MXFP4 element: E2M1 code 0..15 times 2^(scale - 127), exact in bf16 for scale 0..BI_FP4_SCALE_MAX. */
static inline BI_HD bi_bf16 bi_fp4_to_bf16(uint8_t code, uint8_t scale) {
    uint32_t half = code & 1u, exponent = (code >> 1) & 3u, sign = (uint32_t)(code & 8u) << 28;
    /* Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. */
    uint32_t magnitude = exponent ? ((126u + exponent) << 23) | (half << 22) : half * 0x3f000000u;
    uint32_t power = scale ? (uint32_t)scale << 23 : 0x00400000u;
    return (bi_bf16)((bi_u32_of(BI_MUL(bi_f32_of(magnitude), bi_f32_of(power))) | sign) >> 16);
}

#endif
