/* cache_rig: a paged or contiguous cache full of poison, and the rows of a step.
 *
 * Layer: tests, for the suites of ops that read a cache. A paged cache gives each sequence its own shuffled blocks, so that
 * a wrong block shows. */
#ifndef CACHE_RIG_H
#define CACHE_RIG_H

#include "bi_types.h"
#include "br_mem.h"
#include "op_rig.h"
#include "test_support.h"

#include <string.h>

enum { CACHE_RIG_SEQS = 3, CACHE_RIG_BLOCKS = 40, CACHE_RIG_ROWS = 4096, CACHE_RIG_PAD = 2 };

typedef struct cache_rig {
    bi_cache cache;
    int32_t table[CACHE_RIG_SEQS * CACHE_RIG_BLOCKS], first[CACHE_RIG_SEQS];
} cache_rig;

static inline void cache_rig_open(cache_rig *rig, size_t block_bytes, int paged, uint64_t seed) {
    enum { BLOCKS = CACHE_RIG_SEQS * CACHE_RIG_BLOCKS };
    op_random random = {seed, 0};
    int order[BLOCKS];
    void *base;
    CHECK_OK(br_mem_alloc(&base, block_bytes * BLOCKS, "a cache"));
    memset(base, 0xff, block_bytes * BLOCKS);
    op_random_order(&random, order, BLOCKS);
    for (int i = 0; i < BLOCKS; i++)
        rig->table[i] = order[i];
    for (int s = 0; s < CACHE_RIG_SEQS; s++)
        rig->first[s] = (CACHE_RIG_SEQS - 1 - s) * CACHE_RIG_BLOCKS;
    bi_cache cache = {base, block_bytes, paged ? rig->table : NULL, CACHE_RIG_BLOCKS, paged ? NULL : rig->first};
    rig->cache = cache;
}

static inline void cache_rig_close(cache_rig *rig) {
    br_mem_free(rig->cache.base);
}

typedef struct batch_rig {
    bi_batch batch;
    bi_seg seg[CACHE_RIG_SEQS];
    int32_t row_seg[CACHE_RIG_ROWS + CACHE_RIG_PAD];
} batch_rig;

static inline void batch_rig_begin(batch_rig *rig) {
    bi_batch batch = {.seg = rig->seg, .row_seg = rig->row_seg};
    rig->batch = batch;
}

/* Adds n_row positions of sequence seq from pos on. */
static inline void batch_rig_add(batch_rig *rig, int32_t seq, int32_t pos, int32_t n_row) {
    bi_batch *b = &rig->batch;
    bi_seg seg = {seq, b->n_row, n_row, pos};
    ck_assert(b->n_seg < CACHE_RIG_SEQS && b->n_row + n_row <= CACHE_RIG_ROWS);
    for (int32_t i = 0; i < n_row; i++)
        rig->row_seg[b->n_row + i] = b->n_seg;
    rig->seg[b->n_seg++] = seg;
    b->n_row += n_row;
}

/* Rows of padding behind all segments. */
static inline void batch_rig_pad(batch_rig *rig) {
    for (int i = 0; i < CACHE_RIG_PAD; i++)
        rig->row_seg[rig->batch.n_row++] = -1;
}

#endif
