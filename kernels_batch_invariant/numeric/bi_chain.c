/* The fast form of the block: see bi_chain.h. Compiled once for each instruction set; plain loops over 32 lanes, which gcc
 * turns into vectors of any width.
 *
 * Why it is exact where it is used, |Emax| <= 100 with Emax the block's exponent of N-MMA. A product of two bf16 has 16
 * significant bits, so a*b is exact in binary32 unless it is below 2^-133, where the clause leaves nothing of it either.
 * Times 2^(25 - Emax), exact again, it is below 2^27, and the conversion to an integer cuts toward zero as the clause asks.
 * Sixteen of them add up to at most 16 * 255^2 * 2^11 < 2^31, in any order. c is cut the same way. The result is zero or at
 * least 2^-125. */
#include "bi_chain.h"
#include "bi_block.h"

enum { NOTHING_VOTES = -4000 }; /* above any sum with BI_EXP_ZERO in it, below any other */

void BI_FN(bi_pack_row)(const bi_bf16 *x, int n, int n_pad, float *f, int16_t *e) {
    for (int k = 0; k < n; k++) {
        f[k] = bi_widen(x[k]);
        e[k] = bi_chain_exponent(x[k]);
    }
    for (int k = n; k < n_pad; k++) {
        f[k] = 0.0f;
        e[k] = BI_EXP_ZERO;
    }
}

/* The block's exponent of each lane; 0 where nothing votes, since any scale suits a block of zeros. acc has no subnormal.
 * Returns 0 when every lane is within the range of the fast form. */
static inline uint16_t block_exponents(const int16_t *restrict xe, const int16_t *restrict be, size_t b_ld,
                                       const float *restrict acc, int16_t *restrict exp_max) {
    int16_t top[BI_PANEL];
    for (int l = 0; l < BI_PANEL; l++)
        top[l] = INT16_MIN;
    for (int k = 0; k < BI_MMA_K; k++)
        for (int l = 0; l < BI_PANEL; l++) {
            int16_t e = (int16_t)(xe[k] + be[(size_t)k * b_ld + (size_t)l]);
            top[l] = top[l] > e ? top[l] : e;
        }
    uint16_t outside = 0;
    for (int l = 0; l < BI_PANEL; l++) {
        int16_t field = (int16_t)(bi_u32_of(acc[l]) << 1 >> 24), e = top[l];
        /* Masks by product: gcc turns selects here into jumps, which cost a third of the chain's speed. */
        int16_t e_acc = (int16_t)(field - 127 + (field == 0) * BI_EXP_ZERO);
        e = e > e_acc ? e : e_acc;
        e = (int16_t)(e * (e >= NOTHING_VOTES));
        exp_max[l] = e;
        outside |= (uint16_t)(e + BI_EXP_FAST_MAX) > 2 * BI_EXP_FAST_MAX;
    }
    return outside;
}

static inline void fast_block(const float *restrict xf, const float *restrict bf, size_t b_ld,
                              const int16_t *restrict exp_max, float *restrict acc) {
    float scale[BI_PANEL];
    int32_t sum[BI_PANEL];
    for (int l = 0; l < BI_PANEL; l++) {
        scale[l] = bi_f32_of((uint32_t)(BI_MMA_FRACTION + 127 - exp_max[l]) << 23);
        sum[l] = 0;
    }
    for (int k = 0; k < BI_MMA_K; k++)
        for (int l = 0; l < BI_PANEL; l++)
            sum[l] += (int32_t)((xf[k] * bf[(size_t)k * b_ld + (size_t)l]) * scale[l]);
    for (int l = 0; l < BI_PANEL; l++) {
        /* sum + c needs 33 bits: both halves are exact in binary32, and so is what their sum rounds away. Where it rounded
         * away from zero, the number below is the sum cut to 24 bits. */
        int32_t c = (int32_t)(acc[l] * scale[l]);
        float high = (float)((sum[l] >> 16) + (c >> 16)) * 65536.0f, low = (float)((sum[l] & 0xffff) + (c & 0xffff));
        float near = high + low, rest = low - (near - high);
        uint32_t cut = bi_u32_of(near) - (rest * near < 0.0f);
        acc[l] = bi_f32_of(cut) * bi_f32_of((uint32_t)(exp_max[l] + 127 - BI_MMA_FRACTION) << 23);
    }
}

/* One block of all lanes by the clause itself. */
static void slow_block(const float *xf, const float *bf, size_t b_ld, float *acc) {
    bi_bf16 a[BI_MMA_K], b[BI_MMA_K];
    for (int k = 0; k < BI_MMA_K; k++)
        a[k] = (bi_bf16)(bi_u32_of(xf[k]) >> 16);
    for (int l = 0; l < BI_PANEL; l++) {
        for (int k = 0; k < BI_MMA_K; k++)
            b[k] = (bi_bf16)(bi_u32_of(bf[(size_t)k * b_ld + (size_t)l]) >> 16);
        acc[l] = bi_block16(acc[l], a, 1, b, 1);
    }
}

/* The fast form reads c's exponent field alone, so a subnormal c is not for it. It makes none itself. */
static inline uint32_t has_subnormal(const float *acc) {
    uint32_t found = 0;
    for (int l = 0; l < BI_PANEL; l++) {
        uint32_t size = bi_u32_of(acc[l]) & 0x7fffffffu;
        found |= size - 1 < 0x007fffffu;
    }
    return found;
}

void BI_FN(bi_chain_panel)(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf,
                           const int16_t *be, size_t b_ld, float *acc, size_t acc_ld) {
    for (int r = 0; r < n_row; r++) {
        float lane[BI_PANEL];
        memcpy(lane, acc + (size_t)r * acc_ld, sizeof lane);
        uint32_t subnormal = has_subnormal(lane);
        for (int k = 0; k < n_k; k += BI_MMA_K) {
            int16_t exp_max[BI_PANEL];
            const float *b = bf + (size_t)k * b_ld;
            if (!subnormal && !block_exponents(xe[r] + k, be + (size_t)k * b_ld, b_ld, lane, exp_max)) {
                fast_block(xf[r] + k, b, b_ld, exp_max, lane);
            } else {
                slow_block(xf[r] + k, b, b_ld, lane);
                subnormal = has_subnormal(lane);
            }
        }
        memcpy(acc + (size_t)r * acc_ld, lane, sizeof lane);
    }
}
