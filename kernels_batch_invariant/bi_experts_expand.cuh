/* bi_experts_expand: MXFP4 codes to A fragments of the tensor cores, exactly.      Contract: N-FP4 */
#ifndef BI_EXPERTS_EXPAND_CUH
#define BI_EXPERTS_EXPAND_CUH

#include "bi_experts_parts.cuh"

/* A multiplying thread: of warpgroup group, warp of it, lane. */
typedef struct multiplier {
    uint32_t group, warp, lane;
} multiplier;

/* Asked anew for every item: kept for all tile sizes at once, what follows from it would not fit the registers. */
static __device__ __forceinline__ multiplier this_multiplier(void) {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    const multiplier me = {thread / 128, thread / 32 % 4, thread % 32};
    return me;
}

static __device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/* 2^(scale - 1) twice as bf16, scale 0..128; 2^n twice, n 0..127. */
static __device__ __forceinline__ uint32_t fp4_factor(uint32_t scale) {
    return scale * 0x00800080u + 0x3f003f00u;
}
static __device__ __forceinline__ uint32_t fp4_power(uint32_t n) {
    return n * 0x00800080u + 0x3f803f80u;
}
static __device__ __forceinline__ uint32_t fp4_scale(uint32_t scales, int i) {
    return __byte_perm(scales, 0, 0x4440 + i);
}

/* Eight codes to the four registers of an A fragment, times factors of row g and row g + 8. A code's sign at bit 15 and its other
 * bits at 8..6 are the bf16 of code * 2^-126, subnormal where the code is; the word keeps the codes where few steps put them there
 * (pack_pair). A product moves the sign and the rest at once, no two bits of it meet; its factor is an argument of the kernel, so
 * that it stays a product, for which another pipe has room. bf16 products are exact: the factor is a power of two and the
 * result is a bf16 (N-FP4). */
static __device__ __forceinline__ void fp4_expand(const experts_spread &by, uint32_t word, uint32_t factor0, uint32_t factor8, uint32_t (&a)[4]) {
    const uint32_t all = 0x81c081c0u;
    a[0] = mul_bf16x2(word & all, factor0);
    a[1] = mul_bf16x2(word * by.a1 & all, factor8);
    a[2] = mul_bf16x2((word & 0x40074007u) * by.a2 & all, factor0);
    a[3] = mul_bf16x2((word >> 3 & 0x05c005c0u) * by.a3 & all, factor8);
}

/* The same where a scale passes 128: 2^(scale - 1) as a product of two. */
static __device__ __forceinline__ void fp4_expand_wide(const experts_spread &by, uint32_t word, uint32_t scale0, uint32_t scale8, uint32_t (&a)[4]) {
    const uint32_t low0 = scale0 < 128 ? scale0 : 128, low8 = scale8 < 128 ? scale8 : 128;
    fp4_expand(by, word, fp4_factor(low0), fp4_factor(low8), a);
    const uint32_t more0 = fp4_power(scale0 - low0), more8 = fp4_power(scale8 - low8);
    a[0] = mul_bf16x2(a[0], more0);
    a[1] = mul_bf16x2(a[1], more8);
    a[2] = mul_bf16x2(a[2], more0);
    a[3] = mul_bf16x2(a[3], more8);
}

/* A thread's codes and scales of one stage: a word a k-block of each part. */
typedef struct fp4_stage {
    uint32_t word[2][4], scales[2];
    bool wide; /* of the whole warp */
} fp4_stage;

static __device__ __forceinline__ void fp4_load(const multiplier &me, uint32_t weights, fp4_stage &s) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const uint32_t at = weights + (me.group * 2 + (uint32_t)m) * EXPERTS_FP4_BLOCK;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(s.word[m][0]), "=r"(s.word[m][1]), "=r"(s.word[m][2]), "=r"(s.word[m][3])
                     : "r"(at + (me.warp * 32 + me.lane) * 16));
        asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(s.scales[m]) : "r"(at + EXPERTS_FP4_CODES + (me.warp * 8 + (me.lane >> 2)) * 4));
    }
    s.wide = __any_sync(0xffffffffu, ((s.scales[0] | s.scales[1]) & 0x80808080u) != 0);
}

static __device__ __forceinline__ void fp4_fragment(const experts_spread &by, const fp4_stage &s, int m, int block, bool wide, uint32_t (&a)[4]) {
    const uint32_t scale0 = fp4_scale(s.scales[m], block >> 1), scale8 = fp4_scale(s.scales[m], 2 + (block >> 1));
    if (!wide)
        fp4_expand(by, s.word[m][block], fp4_factor(scale0), fp4_factor(scale8), a);
    else
        fp4_expand_wide(by, s.word[m][block], scale0, scale8, a);
}

#endif
