/* bi_fn: exp, log and their relatives, the same bits on host and device.      Contract: N-FN, N-F32
 *
 * Layer: numeric. Branch-free (selects only), so that gcc vectorises loops over arrays; every step is one IEEE operation of
 * N-F32. No conversion from float to integer: n = nearest integer of y is read from the bits of y + 1.5 * 2^23. A NaN in
 * gives a NaN out, of no particular pattern. The errors beside the functions are the largest of 20 million inputs. */
#ifndef BI_FN_H
#define BI_FN_H

#include "bi_bits.h"
#include "bi_contract.h"

#define BI_FN_ROUND_MAGIC 0x1.8p+23f
#define BI_FN_LOG2E 0x1.715476p+0f
/* ln2 in two parts; HI has 15 bits, so n * HI is exact for every n that occurs (|n| <= 173). */
#define BI_FN_LN2_HI 0x1.62e4p-1f
#define BI_FN_LN2_LO 0x1.7f7d1cp-20f
/* exp is +0 and silu -0 below MIN, exp is Inf above MAX: clamping there keeps n small. */
#define BI_FN_EXP_MIN -120.0f
#define BI_FN_EXP_MAX 89.0f
/* exp(r) = 1 + (r + r^2 * (E0 + E1 r + ..)), |r| <= ln2/2; minimax of the relative error, 2^-28.2. */
#define BI_FN_E0 0x1.fffffcp-2f
#define BI_FN_E1 0x1.555492p-3f
#define BI_FN_E2 0x1.5558b8p-5f
#define BI_FN_E3 0x1.1239b4p-7f
#define BI_FN_E4 0x1.6a4562p-10f
/* log(1+f) = f - f^2/2 + f^3 * (L0 + L1 f + ..), sqrt(1/2) <= 1+f <= sqrt(2); 2^-30.3. CUT: the bits of sqrt(1/2), where the
 * exponent changes. */
#define BI_FN_LOG_CUT 0x3f3504f3u
#define BI_FN_LOG_HALF 0.5f
#define BI_FN_L0 0x1.555548p-2f
#define BI_FN_L1 -0x1.000006p-2f
#define BI_FN_L2 0x1.99a478p-3f
#define BI_FN_L3 -0x1.555c4ep-3f
#define BI_FN_L4 0x1.233b78p-3f
#define BI_FN_L5 -0x1.fc26b2p-4f
#define BI_FN_L6 0x1.e6c048p-4f
#define BI_FN_L7 -0x1.de0fbcp-4f
#define BI_FN_L8 0x1.148456p-4f
/* log1p: the larger of 1 and x is the one to subtract from their sum first; x is the larger one from here on. */
#define BI_FN_LOG1P_CUT 1.0f
/* tanh(x) = x + x^3 * (T0 + T1 x^2 + ..), |x| < SMALL; 2^-33.0. */
#define BI_FN_TANH_SMALL 0.5625f
#define BI_FN_T0 -0x1.555554p-2f
#define BI_FN_T1 0x1.111084p-3f
#define BI_FN_T2 -0x1.b9f484p-5f
#define BI_FN_T3 0x1.63cb2ep-6f
#define BI_FN_T4 -0x1.0d1d3ap-7f
#define BI_FN_T5 0x1.1c9e78p-9f

/* Each coefficient once: the contract digest hashes names and values. */
#define BI_FN_COEFFICIENTS(X)                                                                                           \
    X(BI_FN_ROUND_MAGIC) X(BI_FN_LOG2E) X(BI_FN_LN2_HI) X(BI_FN_LN2_LO) X(BI_FN_EXP_MIN) X(BI_FN_EXP_MAX)               \
    X(BI_FN_E0) X(BI_FN_E1) X(BI_FN_E2) X(BI_FN_E3) X(BI_FN_E4)                                                         \
    X(BI_FN_LOG_CUT) X(BI_FN_LOG_HALF) X(BI_FN_L0) X(BI_FN_L1) X(BI_FN_L2) X(BI_FN_L3) X(BI_FN_L4) X(BI_FN_L5)          \
    X(BI_FN_L6) X(BI_FN_L7) X(BI_FN_L8) X(BI_FN_LOG1P_CUT)                                                              \
    X(BI_FN_TANH_SMALL) X(BI_FN_T0) X(BI_FN_T1) X(BI_FN_T2) X(BI_FN_T3) X(BI_FN_T4) X(BI_FN_T5)

/* exp(x) = p * scale[0] * scale[1], x clamped to EXP_MIN..EXP_MAX. Two factors, because n reaches 128 and -173. */
typedef struct bi_exp_parts {
    float p, scale0, scale1;
} bi_exp_parts;

static inline BI_HD bi_exp_parts bi_exp_reduce(float x) {
    x = x < BI_FN_EXP_MAX ? x : BI_FN_EXP_MAX;
    x = x > BI_FN_EXP_MIN ? x : BI_FN_EXP_MIN;
    float shifted = BI_FMA(x, BI_FN_LOG2E, BI_FN_ROUND_MAGIC);
    int32_t n = (int32_t)(bi_u32_of(shifted) - bi_u32_of(BI_FN_ROUND_MAGIC)), half = n >> 1;
    float fn = BI_SUB(shifted, BI_FN_ROUND_MAGIC);
    /* r + r_low: without what r rounds away the error passes 1 ulp, by 0.013. */
    float exact = BI_FMA(fn, -BI_FN_LN2_HI, x);
    float r = BI_FMA(fn, -BI_FN_LN2_LO, exact), r_low = BI_FMA(fn, -BI_FN_LN2_LO, BI_SUB(exact, r));
    float q = BI_FMA(BI_FN_E4, r, BI_FN_E3);
    q = BI_FMA(q, r, BI_FN_E2);
    q = BI_FMA(q, r, BI_FN_E1);
    q = BI_FMA(q, r, BI_FN_E0);
    bi_exp_parts parts = {BI_ADD(1.0f, BI_ADD(r, BI_FMA(BI_MUL(r, r), q, r_low))), bi_f32_of((uint32_t)(half + 127) << 23),
                          bi_f32_of((uint32_t)(n - half + 127) << 23)};
    return parts;
}

/* 0.88 ulp, over all inputs. exp(0) = 1, exp(x) <= 1 for x <= 0, exp(-Inf) = +0, exp(Inf) = Inf. */
static inline BI_HD float bi_exp(float x) {
    bi_exp_parts parts = bi_exp_reduce(x);
    float y = BI_MUL(BI_MUL(parts.p, parts.scale0), parts.scale1);
    return bi_is_nan(x) ? x : y;
}

/* 0.77 ulp. log(1) = +0, log(+-0) = -Inf, log(Inf) = Inf, NaN below zero. */
static inline BI_HD float bi_log(float x) {
    uint32_t u = bi_u32_of(x);
    int subnormal = u < 0x00800000u;
    uint32_t v = bi_u32_of(subnormal ? BI_MUL(x, 0x1p+23f) : x);
    int32_t k = (int32_t)(v - BI_FN_LOG_CUT) >> 23; /* sqrt(1/2) <= m < sqrt(2) */
    float f = BI_SUB(bi_f32_of(v - ((uint32_t)k << 23)), 1.0f);
    float fk = (float)(k - (subnormal ? 23 : 0));
    float p = BI_FMA(BI_FN_L8, f, BI_FN_L7);
    p = BI_FMA(p, f, BI_FN_L6);
    p = BI_FMA(p, f, BI_FN_L5);
    p = BI_FMA(p, f, BI_FN_L4);
    p = BI_FMA(p, f, BI_FN_L3);
    p = BI_FMA(p, f, BI_FN_L2);
    p = BI_FMA(p, f, BI_FN_L1);
    p = BI_FMA(p, f, BI_FN_L0);
    float z = BI_MUL(f, f);
    float low = BI_FMA(fk, BI_FN_LN2_LO, BI_MUL(BI_MUL(p, f), z));
    float y = BI_FMA(fk, BI_FN_LN2_HI, BI_ADD(f, BI_FMA(-BI_FN_LOG_HALF, z, low)));
    y = (u & 0x7fffffffu) == 0 ? bi_f32_of(0xff800000u) : y;
    y = (u & 0x7fffffffu) != 0 && u > BI_F32_INF ? bi_f32_of(BI_F32_NAN) : y;
    return u == BI_F32_INF ? x : y;
}

/* 1.5 ulp: log of u = RN(1 + x), and what that sum dropped divided by u. */
static inline BI_HD float bi_log1p(float x) {
    float u = BI_ADD(1.0f, x);
    float dropped = x >= BI_FN_LOG1P_CUT ? BI_SUB(1.0f, BI_SUB(u, x)) : BI_SUB(x, BI_SUB(u, 1.0f));
    float log_u = bi_log(u);
    float correction = bi_is_finite(log_u) ? BI_DIV(dropped, u) : 0.0f;
    return BI_ADD(log_u, correction);
}

/* 2.5 ulp: 1 / (1 + exp(-x)) for x >= 0, e / (1 + e) with e = exp(x) below. */
static inline BI_HD float bi_sigmoid(float x) {
    float e = bi_exp(bi_f32_of(bi_u32_of(x) | 0x80000000u));
    return BI_DIV(x >= 0.0f ? 1.0f : e, BI_ADD(1.0f, e));
}

/* 1.4 ulp. tanh(+-0) = +-0, tanh(+-Inf) = +-1. */
static inline BI_HD float bi_tanh(float x) {
    uint32_t sign = bi_u32_of(x) & 0x80000000u;
    float size = bi_f32_of(bi_u32_of(x) ^ sign), z = BI_MUL(size, size);
    float p = BI_FMA(BI_FN_T5, z, BI_FN_T4);
    p = BI_FMA(p, z, BI_FN_T3);
    p = BI_FMA(p, z, BI_FN_T2);
    p = BI_FMA(p, z, BI_FN_T1);
    p = BI_FMA(p, z, BI_FN_T0);
    float near = BI_FMA(BI_MUL(size, z), p, size);
    float far = BI_SUB(1.0f, BI_DIV(2.0f, BI_ADD(bi_exp(BI_ADD(size, size)), 1.0f)));
    return bi_f32_of(bi_u32_of(size < BI_FN_TANH_SMALL ? near : far) | sign);
}

/* 3.2 ulp: x * sigmoid(x) with one rounding less. x joins the numerator before exp is scaled, so that results down to the
 * subnormals keep their precision where sigmoid has lost it. silu(-Inf) = -0. */
static inline BI_HD float bi_silu(float x) {
    bi_exp_parts parts = bi_exp_reduce(bi_f32_of(bi_u32_of(x) | 0x80000000u));
    float e = BI_MUL(BI_MUL(parts.p, parts.scale0), parts.scale1);
    float clamped = x < BI_FN_EXP_MIN ? BI_FN_EXP_MIN : x;
    float below = BI_MUL(BI_MUL(BI_MUL(clamped, parts.p), parts.scale0), parts.scale1);
    return BI_DIV(x >= 0.0f ? x : below, BI_ADD(1.0f, e));
}

/* 1.9 ulp */
static inline BI_HD float bi_softplus(float x) {
    return x > BI_SOFTPLUS_LINEAR ? x : bi_log1p(bi_exp(x));
}

/* 1.5 ulp: RN(1 / RN(sqrt x)) */
static inline BI_HD float bi_rsqrt(float x) {
    return BI_DIV(1.0f, BI_SQRT(x));
}

#endif
