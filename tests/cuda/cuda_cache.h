/* cuda_cache: a cache for twin tests: both backends' own block layouts, one table. */
#ifndef CUDA_CACHE_H
#define CUDA_CACHE_H

#include "test_support.h"
#include "twin.h"

#include <string.h>

enum { CUDA_CACHE_SEG_MAX = 8, CUDA_CACHE_BLOCK_MAX = 1 << 15 };

typedef struct cuda_cache {
    bi_cache side[2];
} cuda_cache;

/* n_seq sequences of n_block blocks each: paged, with blocks dealt out at random, or contiguous. gap: bytes behind each block of the
 * GPU's side, a multiple of 4. */
static inline cuda_cache cuda_cache_of(twin *t, const size_t block_bytes[2], int n_seq, int n_block, int paged, size_t gap, op_random *random) {
    const int n = n_seq * n_block;
    int order[CUDA_CACHE_BLOCK_MAX];
    int32_t *table = TWIN_ARRAY(t, int32_t, "table", n), *first = TWIN_ARRAY(t, int32_t, "first", n_seq);
    cuda_cache cache;
    ck_assert_int_le(n, CUDA_CACHE_BLOCK_MAX);
    op_random_order(random, order, n);
    for (int i = 0; i < n; i++)
        table[i] = order[i];
    for (int s = 0; s < n_seq; s++)
        first[s] = (n_seq - 1 - s) * n_block;
    const size_t stride[2] = {block_bytes[TWIN_ORACLE], block_bytes[TWIN_CUDA] + gap};
    twin_block block = twin_private(t, stride[TWIN_ORACLE] * (size_t)n, stride[TWIN_CUDA] * (size_t)n);
    for (int side = 0; side < 2; side++) {
        const int32_t *own_table = twin_at(t, (twin_side)side, table), *own_first = twin_at(t, (twin_side)side, first);
        cache.side[side] = (bi_cache){block.side[side], stride[side], paged ? own_table : NULL, n_block, paged ? NULL : own_first};
    }
    return cache;
}

/* The rows that write whole sequences: sequence s has n_pos[s] positions. */
static inline twin_batch cuda_cache_fill(twin *t, const int32_t *n_pos, int n_seq) {
    bi_seg seg[CUDA_CACHE_SEG_MAX];
    for (int s = 0; s < n_seq; s++)
        seg[s] = (bi_seg){s, 0, n_pos[s], 0};
    return twin_batch_of(t, seg, n_seq);
}

/* The GPU's side gets two rows of no segment and a segment without rows behind the others: a graph's padding. Row arrays need room. */
static inline void cuda_cache_pad(twin *t, twin_batch *batch, const bi_seg *seg) {
    bi_batch *b = &batch->side[TWIN_CUDA];
    int32_t *row_seg = TWIN_ARRAY(t, int32_t, "padded row_seg", b->n_row + 2);
    bi_seg *segs = TWIN_ARRAY(t, bi_seg, "padded segments", b->n_seg + 1);
    for (int32_t i = 0, row = 0; i < b->n_seg; i++) {
        segs[i] = seg[i];
        segs[i].row = row;
        for (int32_t k = 0; k < seg[i].n_row; k++)
            row_seg[row++] = i;
    }
    segs[b->n_seg++] = (bi_seg){0, b->n_row, 0, 0};
    row_seg[b->n_row++] = -1;
    row_seg[b->n_row++] = -1;
    b->seg = twin_at(t, TWIN_CUDA, segs);
    b->row_seg = twin_at(t, TWIN_CUDA, row_seg);
}

/* Bytes that may differ, because their row carries a fault, become equal. */
static inline void cuda_cache_forgive(twin *t, void *host, size_t bytes) {
    memset(host, 0, bytes);
    CHECK_OK(br_device_upload(t->device, twin_at(t, TWIN_CUDA, host), host, bytes));
    CHECK_OK(br_device_wait(t->device));
}

#endif
