/* bi_gather, bi_seg_fault, oracle: see bi_move.h.
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. */
#include "bi_rows.h"

#include <string.h>

static void gather_row(const void *args, int32_t i) {
    const bi_gather_args *a = args;
    if (a->row[i] >= 0)
        memcpy((unsigned char *)a->y + a->row_bytes * (size_t)i,
               (const unsigned char *)a->x + a->row_bytes * (size_t)a->row[i], a->row_bytes);
}

br_status BI_FN(bi_gather)(bi_ctx *ctx, const bi_gather_args *a) {
    if (a->n < 0 || a->row_bytes % 4)
        return br_fail(BR_E_SHAPE, "gather: %d rows of %zu bytes: expected at least 0, a multiple of 4", a->n, a->row_bytes);
    bi_rows_run(ctx, gather_row, a, a->n, (int64_t)(a->row_bytes / 4) + 1);
    return BR_OK;
}

br_status BI_FN(bi_seg_fault)(bi_ctx *ctx, const bi_seg_fault_args *a) {
    (void)ctx;
    for (int32_t s = 0; s < a->batch->n_seg; s++) {
        const bi_seg *seg = &a->batch->seg[s];
        a->out[s] = (bi_first_fault){0, 0};
        for (int32_t t = 0; t < seg->n_row && !a->out[s].code; t++)
            if (a->row_fault[seg->row + t])
                a->out[s] = (bi_first_fault){a->row_fault[seg->row + t], seg->pos + t};
    }
    return BR_OK;
}
