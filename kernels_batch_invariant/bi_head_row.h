/* bi_head_row: the softmax of one row of logits in sub-blocks of 128, for score and sample.      Contract: N-HEAD, N-SUM
 *
 * Layer: kernels_batch_invariant, internal to the oracle's op files. A row is cut into sub-blocks; each gives a bi_head_part
 * on its own, and the parts are merged in ascending order once the true maximum is known. So a part may be computed by any
 * thread, straight from the accumulators of the head's product (score) or from stored logits (sample), with equal bits. */
#ifndef BI_HEAD_ROW_H
#define BI_HEAD_ROW_H

#include "bi_contract.h"
#include "bi_fn.h"
#include "bi_sum.h"

/* Why |z| is cut at BI_HEAD_Z_MAX: x/T leaves binary32 when |x| >= 2^118 at T = 2^-10, and the spread of two finite logits
 * can leave it as well: either would put Inf - Inf or 0 * Inf into a row whose logits passed their check. With this bound
 * the largest step of the merge is l_b <= 2^7 times a spread of 2^119. */

typedef struct bi_head_part {
    float max, sum, dot; /* m_b, l_b, d_b */
} bi_head_part;

typedef struct bi_head_row {
    float max, log_sum, entropy; /* M, log(L), H */
} bi_head_row;

static inline int32_t bi_head_block_count(int32_t n_vocab) {
    return (n_vocab + BI_HEAD_BLOCK - 1) / BI_HEAD_BLOCK;
}

static inline int32_t bi_head_block_size(int32_t n_vocab, int32_t block) {
    int32_t left = n_vocab - block * BI_HEAD_BLOCK;
    return left < BI_HEAD_BLOCK ? left : BI_HEAD_BLOCK;
}

/* Scratch of one row in sample: z and exp(z - m) of every entry of every sub-block, each sub-block's weight and part. */
static inline size_t bi_sample_row_bytes(int32_t n_vocab) {
    size_t n_block = (size_t)bi_head_block_count(n_vocab);
    return n_block * (BI_HEAD_BLOCK * 2 * sizeof(float) + sizeof(uint64_t) + sizeof(bi_head_part));
}

static inline int bi_head_temperature_ok(float t) {
    return t == 0.0f || (t >= 0x1p-10f && t <= 0x1p10f);
}

/* The temperature that `logprob` is taken at: T = 0 draws greedily and is scored at T = 1. */
static inline float bi_head_score_temperature(float t) {
    return t == 0.0f ? 1.0f : t;
}

/* z = RN(x/T), within +-BI_HEAD_Z_MAX, -0 made +0. */
static inline float bi_head_z(float x, float t) {
    float z = BI_DIV(x, t);
    z = z > BI_HEAD_Z_MAX ? BI_HEAD_Z_MAX : z;
    z = z < -BI_HEAD_Z_MAX ? -BI_HEAD_Z_MAX : z;
    return BI_ADD(z, 0.0f);
}

/* z of one sub-block of n logits. Absent entries get the lowest z, so that they pass no maximum and rank last under P-4. */
static inline void bi_head_z_block(const float *x, int32_t n, float t, float z[BI_HEAD_BLOCK]) {
    for (int32_t i = 0; i < n; i++)
        z[i] = bi_head_z(x[i], t);
    for (int32_t i = n; i < BI_HEAD_BLOCK; i++)
        z[i] = -BI_HEAD_Z_MAX;
}

/* The largest of a whole block; sixteen running maxima, because gcc will not reorder a float maximum by itself. */
static inline float bi_head_block_max(const float z[BI_HEAD_BLOCK]) {
    float lane[16];
    for (int l = 0; l < 16; l++)
        lane[l] = z[l];
    for (int first = 16; first < BI_HEAD_BLOCK; first += 16)
        for (int l = 0; l < 16; l++)
            lane[l] = z[first + l] > lane[l] ? z[first + l] : lane[l];
    for (int half = 8; half >= 1; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
    return lane[0];
}

/* m_b, l_b and, when asked for, d_b of a block whose first n entries are present. */
static inline bi_head_part bi_head_block_part(const float z[BI_HEAD_BLOCK], int32_t n, int want_dot) {
    bi_head_part part = {bi_head_block_max(z), 0.0f, 0.0f};
    float e[BI_HEAD_BLOCK];
    for (int i = 0; i < BI_HEAD_BLOCK; i++)
        e[i] = bi_exp(BI_SUB(z[i], part.max));
    part.sum = bi_sum128(e, n);
    if (want_dot) {
        for (int i = 0; i < BI_HEAD_BLOCK; i++)
            e[i] = BI_MUL(e[i], BI_SUB(z[i], part.max));
        part.dot = bi_sum128(e, n);
    }
    return part;
}

/* M, log(L) and H of a row from its parts in ascending order; H means something only if the parts have their d_b. */
static inline bi_head_row bi_head_merge(const bi_head_part *part, int32_t n_block) {
    float max = part[0].max, sum = 0.0f, dot = 0.0f;
    for (int32_t b = 1; b < n_block; b++)
        max = part[b].max > max ? part[b].max : max;
    for (int32_t b = 0; b < n_block; b++) {
        float shift = BI_SUB(part[b].max, max), w = bi_exp(shift);
        sum = BI_FMA(part[b].sum, w, sum);
        dot = BI_FMA(BI_FMA(part[b].sum, shift, part[b].dot), w, dot);
    }
    float log_sum = bi_log(sum);
    bi_head_row row = {max, log_sum, BI_SUB(log_sum, BI_DIV(dot, sum))};
    return row;
}

static inline float bi_head_logprob(const bi_head_row *row, float z) {
    return BI_SUB(BI_SUB(z, row->max), row->log_sum);
}

#endif
