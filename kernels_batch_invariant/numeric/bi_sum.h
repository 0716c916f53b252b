/* bi_sum: SUM(n) and its folds SUM64 and SUM128.      Contract: N-SUM
 *
 * Layer: numeric. Partial i of 256 takes elements i, i + 256, ... ascending, squares and products by fma, from +0; then
 * halves are added, 128 first. The inner loops run over partials, so they fill any vector width without moving a bit. */
#ifndef BI_SUM_H
#define BI_SUM_H

#include "bi_bits.h"
#include "bi_contract.h"

/* Adds the upper half of p[0 .. 2 * half) to the lower half until one is left. */
static inline float bi_sum_fold(float *p, int half) {
    for (; half >= 1; half /= 2)
        for (int i = 0; i < half; i++)
            p[i] = BI_ADD(p[i], p[i + half]);
    return p[0];
}

/* One SUM(n) function: `next` is the partial after element j joined it. */
#define BI_SUM_BODY(next)                                                            \
    float p[BI_SUM_LANES];                                                           \
    for (int i = 0; i < BI_SUM_LANES; i++)                                           \
        p[i] = 0.0f;                                                                 \
    for (int first = 0; first < n; first += BI_SUM_LANES) {                          \
        int lanes = n - first < BI_SUM_LANES ? n - first : BI_SUM_LANES;             \
        for (int i = 0; i < lanes; i++) {                                            \
            int j = first + i;                                                       \
            p[i] = (next);                                                           \
        }                                                                            \
    }                                                                                \
    return bi_sum_fold(p, BI_SUM_LANES / 2);

static inline float bi_sum_bf16(const bi_bf16 *x, int n) {
    BI_SUM_BODY(BI_ADD(p[i], bi_widen(x[j])))
}

static inline float bi_sum_sq_f32(const float *x, int n) {
    BI_SUM_BODY(BI_FMA(x[j], x[j], p[i]))
}

static inline float bi_sum_sq_bf16(const bi_bf16 *x, int n) {
    BI_SUM_BODY(BI_FMA(bi_widen(x[j]), bi_widen(x[j]), p[i]))
}

static inline float bi_sum_prod_bf16_f32(const bi_bf16 *x, const float *w, int n) {
    BI_SUM_BODY(BI_FMA(bi_widen(x[j]), w[j], p[i]))
}

/* SUM(n) of n <= lanes values: every partial holds at most one of them, so the folds above `lanes` add +0 only. */
static inline float bi_sum_short(const float *x, int n, int lanes) {
    float p[BI_SUM_LANES];
    for (int i = 0; i < lanes; i++)
        p[i] = 0.0f;
    for (int i = 0; i < n; i++)
        p[i] = BI_ADD(p[i], x[i]);
    return bi_sum_fold(p, lanes / 2);
}

/* n of 0..64 and 0..128 values; absent ones are +0. */
static inline float bi_sum64(const float *x, int n) {
    return bi_sum_short(x, n, 64);
}

static inline float bi_sum128(const float *x, int n) {
    return bi_sum_short(x, n, 128);
}

#endif
