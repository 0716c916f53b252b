/* bi_rows: how the oracle's row-wise ops are cut over threads, and how a row reports a fault.
 *
 * Layer: kernels_batch_invariant, internal to the oracle's op files. Knows nothing of any op. The cut never changes a bit:
 * a row function writes its own row only and reads no other row's output. */
#ifndef BI_ROWS_H
#define BI_ROWS_H

#include "bi_bits.h"
#include "bi_oracle.h"

typedef void (*bi_row_fn)(const void *args, int32_t row);

/* Element steps of one pool job, about 10 us: a job hand-over costs about 1 us, so smaller work stays on the caller. */
enum { BI_ROWS_JOB_COST = 1 << 14 };

typedef struct bi_rows {
    bi_row_fn row;
    const void *args;
    int32_t n_row, n_job_row;
} bi_rows;

static inline void bi_rows_job(void *context, int job, int thread) {
    (void)thread;
    const bi_rows *rows = context;
    int32_t begin = job * rows->n_job_row;
    int32_t end = rows->n_row - begin < rows->n_job_row ? rows->n_row : begin + rows->n_job_row;
    for (int32_t t = begin; t < end; t++)
        rows->row(rows->args, t);
}

/* Calls row(args, t) for t = 0..n_row-1. row_cost: element steps of one row, at least 1. */
static inline void bi_rows_run(bi_ctx *ctx, bi_row_fn row, const void *args, int32_t n_row, int64_t row_cost) {
    int32_t n_job_row = row_cost < BI_ROWS_JOB_COST ? (int32_t)(BI_ROWS_JOB_COST / row_cost) : 1;
    bi_rows rows = {row, args, n_row, n_job_row};
    br_pool_run(ctx->pool, bi_rows_job, &rows, (int)(((int64_t)n_row + n_job_row - 1) / n_job_row));
}

/* Marks the row unless it is marked or `value` is finite. Heads of one row run on different threads and store one code, so
 * relaxed atomics are enough. */
static inline void bi_fault_check(const bi_fault *fault, int32_t row, float value) {
    if (fault->row && !bi_is_finite(value) && __atomic_load_n(&fault->row[row], __ATOMIC_RELAXED) == 0)
        __atomic_store_n(&fault->row[row], fault->code, __ATOMIC_RELAXED);
}

/* A cache's blocks hold what the op writes into them, aligned for binary32. */
static inline br_status bi_cache_check(const char *op, const bi_cache *cache, size_t block_bytes) {
    if (cache->block_bytes < block_bytes)
        return br_fail(BR_E_SHAPE, "%s: a block of %zu bytes: expected at least %zu", op, cache->block_bytes, block_bytes);
    if ((uintptr_t)cache->base % sizeof(float) || cache->block_bytes % sizeof(float))
        return br_fail(BR_E_ALIGN, "%s: cache at %p, %zu bytes a block: expected multiples of %zu", op, (void *)cache->base,
                       cache->block_bytes, sizeof(float));
    return BR_OK;
}

static inline void bi_round_row(bi_bf16 *restrict y, const float *restrict x, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        y[i] = bi_round(x[i]);
}

#endif
