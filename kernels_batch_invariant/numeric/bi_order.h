/* bi_order: the total order of discrete choices, and the exact top-k under it.      Contract: P-4
 *
 * Layer: numeric. (value descending, index ascending) on ordered-integer keys, -0 made +0 first. Selection is by histograms
 * of the keys, O(n) for every input; it reads each value four times and needs 8 KiB of stack, nothing else. Host only. */
#ifndef BI_ORDER_H
#define BI_ORDER_H

#include "bi_bits.h"

/* Larger key: earlier. Defined for every pattern; a NaN sorts past the infinity of its sign. */
static inline BI_HD uint32_t bi_order_key(float x) {
    uint32_t u = bi_u32_of(x);
    u = u == 0x80000000u ? 0 : u;
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

enum { BI_ORDER_BINS = 2048 };

/* The k-th key in order, 1 <= k <= n, and how many of the values with exactly that key are among the first k: the lowest
 * *n_tie indices of them. Everything with a larger key is among the first k. */
static inline uint32_t bi_order_kth(const float *x, int32_t n, int32_t k, int32_t *n_tie) {
    static const int shift[3] = {21, 10, 0}, width[3] = {11, 11, 10};
    uint32_t prefix = 0, mask = 0;
    uint32_t left = (uint32_t)k;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t count[BI_ORDER_BINS];
        memset(count, 0, sizeof count);
        uint32_t bin_mask = (1u << width[pass]) - 1;
        for (int32_t i = 0; i < n; i++) {
            uint32_t key = bi_order_key(x[i]);
            count[(key >> shift[pass]) & bin_mask] += (key & mask) == prefix;
        }
        uint32_t bin = bin_mask;
        while (count[bin] < left)
            left -= count[bin--];
        prefix |= bin << shift[pass];
        mask |= bin_mask << shift[pass];
    }
    *n_tie = (int32_t)left;
    return prefix;
}

/* The first min(k, n) of x in order; their indices ascending. Returns their number. */
static inline int32_t bi_order_topk(const float *x, int32_t n, int32_t k, int32_t *index) {
    if (k > n)
        k = n;
    if (k <= 0)
        return 0;
    int32_t n_tie, n_out = 0;
    uint32_t kth = bi_order_kth(x, n, k, &n_tie);
    for (int32_t i = 0; i < n && n_out < k; i++) {
        uint32_t key = bi_order_key(x[i]);
        if (key > kth || (key == kth && n_tie-- > 0))
            index[n_out++] = i;
    }
    return n_out;
}

#endif
