/* bi_embed, oracle: rows of the table, copied.      Contract: N-EMB-1
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. */
#include "bi_rows.h"

#include <string.h>

static void embed_row(const void *args, int32_t t) {
    const bi_embed_args *a = args;
    memcpy(a->y + (int64_t)t * a->d_model, a->table + (int64_t)a->token[t] * a->d_model,
           sizeof(bi_bf16) * (size_t)a->d_model);
}

br_status BI_FN(bi_embed)(bi_ctx *ctx, const bi_embed_args *a) {
    if (a->n_row < 0 || a->d_model < 1 || a->n_vocab < 1)
        return br_fail(BR_E_SHAPE, "embed: %d rows of %d from %d tokens: expected n_row >= 0, d_model and n_vocab >= 1",
                       a->n_row, a->d_model, a->n_vocab);
    for (int32_t t = 0; t < a->n_row; t++)
        if (a->token[t] < 0 || a->token[t] >= a->n_vocab)
            return br_fail(BR_E_SHAPE, "embed: token %d in row %d: expected 0 to %d", a->token[t], t, a->n_vocab - 1);
    bi_rows_run(ctx, embed_row, a, a->n_row, a->d_model);
    return BR_OK;
}
