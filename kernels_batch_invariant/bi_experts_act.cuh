/* bi_experts_act: SiTU of the routed experts in fewer instructions, with the bits of bi_act.h.      Contract: N-ACT, N-FN
 *
 * For arguments of ordinary size, which the caller has checked, three things need no care: exp does not leave the normal numbers,
 * so that its scaling is one integer addition; a quotient by Newton's steps needs no test of its exponents; and tanh is 1 from
 * where exp(2x) passes 2^25, so that its argument may be cut there. Every rounding that the function names stays as it is: the
 * last step of a quotient rounds q + r / d with r the exact remainder of a faithful q, which is the rounded quotient. */
#ifndef BI_EXPERTS_ACT_CUH
#define BI_EXPERTS_ACT_CUH

#include "bi_experts_parts.cuh"

/* What act_is_plain asks: up to 64 exp(-|g|) and the remainders of its quotients stay exact; down to 2^-80 those of g and u do. */
#define ACT_GATE_MAX 64.0f
#define ACT_UP_MAX 0x1p20f
#define ACT_LEAST 0x1p-80f
#define ACT_TANH_ONE 40.0f

static __device__ __forceinline__ bool act_is_plain(float g, float u) {
    return fabsf(g) < ACT_GATE_MAX && fabsf(g) >= ACT_LEAST && fabsf(u) < ACT_UP_MAX && fabsf(u) >= ACT_LEAST;
}

/* x / d, with inverse = RN(1 / d). */
static __device__ __forceinline__ float act_by_constant(float x, float d, float inverse) {
    float q = BI_MUL(x, inverse);
    q = BI_FMA(BI_FMA(-q, d, x), inverse, q);
    return BI_FMA(BI_FMA(-q, d, x), inverse, q);
}

/* a / d, d from 1 to 2^60, a not below 2^-100. */
static __device__ __forceinline__ float act_divide(float a, float d) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(inverse) : "f"(d));
    inverse = BI_FMA(inverse, BI_FMA(-d, inverse, 1.0f), inverse);
    return act_by_constant(a, d, inverse);
}

/* bi_exp, x from -64 to 40. */
static __device__ __forceinline__ float act_exp(float x) {
    const float shifted = BI_FMA(x, BI_FN_LOG2E, BI_FN_ROUND_MAGIC), fn = BI_SUB(shifted, BI_FN_ROUND_MAGIC);
    const float exact = BI_FMA(fn, -BI_FN_LN2_HI, x);
    const float r = BI_FMA(fn, -BI_FN_LN2_LO, exact), r_low = BI_FMA(fn, -BI_FN_LN2_LO, BI_SUB(exact, r));
    float q = BI_FMA(BI_FN_E4, r, BI_FN_E3);
    q = BI_FMA(q, r, BI_FN_E2);
    q = BI_FMA(q, r, BI_FN_E1);
    q = BI_FMA(q, r, BI_FN_E0);
    const float p = BI_ADD(1.0f, BI_ADD(r, BI_FMA(BI_MUL(r, r), q, r_low)));
    /* The magic number has no bit below 2^9: what is left of it above 23 places is n. */
    return bi_f32_of(bi_u32_of(p) + (bi_u32_of(shifted) << 23));
}

/* bi_tanh, |x| at least 2^-110. */
static __device__ __forceinline__ float act_tanh(float x) {
    const float size = fabsf(x), z = BI_MUL(size, size);
    float p = BI_FMA(BI_FN_T5, z, BI_FN_T4);
    p = BI_FMA(p, z, BI_FN_T3);
    p = BI_FMA(p, z, BI_FN_T2);
    p = BI_FMA(p, z, BI_FN_T1);
    p = BI_FMA(p, z, BI_FN_T0);
    const float near = BI_FMA(BI_MUL(size, z), p, size), two = BI_ADD(size, size);
    const float far = BI_SUB(1.0f, act_divide(2.0f, BI_ADD(act_exp(two < ACT_TANH_ONE ? two : ACT_TANH_ONE), 1.0f)));
    return copysignf(size < BI_FN_TANH_SMALL ? near : far, x);
}

/* bi_act_situ before its last rounding, of a plain g and u. */
static __device__ __forceinline__ float act_situ_plain(const bi_act &act, const float (&inverse)[2], float g, float u) {
    const float e = act_exp(-fabsf(g));
    const float sigmoid = act_divide(g >= 0.0f ? 1.0f : e, BI_ADD(1.0f, e));
    const float gate = BI_MUL(act.beta, BI_MUL(act_tanh(act_by_constant(g, act.beta, inverse[0])), sigmoid));
    const float up = BI_MUL(act.linear_beta, act_tanh(act_by_constant(u, act.linear_beta, inverse[1])));
    return BI_MUL(gate, up);
}

/* Whether the two betas are such that the above holds. */
static inline bool act_has_plain(const bi_act *act) {
    return act->situ && act->beta >= 0x1p-10f && act->beta <= 0x1p10f && act->linear_beta >= 0x1p-10f && act->linear_beta <= 0x1p10f;
}

#endif
