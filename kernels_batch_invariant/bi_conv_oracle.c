/* bi_conv, oracle: causal depthwise convolution, then SiLU.      Contract: N-CONV
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. Work is cut into (segment, tile of channels): a
 * channel's history is read by the first rows and overwritten after the last, so one job owns it for the whole segment. */
#include "bi_rows.h"

#include "bi_contract.h"
#include "bi_fn.h"

#include <string.h>

enum { CONV_TILE = 256, CONV_KEPT = BI_CONV_TAPS - 1 };

static const bi_bf16 conv_no_input[CONV_TILE]; /* +0: the inputs before position 0 */

typedef struct conv_job {
    const bi_conv_args *args;
    const bi_seg *seg;
    bi_bf16 *history; /* (CONV_KEPT, n_chan) at this tile's first channel */
    int32_t chan, n;  /* the tile */
} conv_job;

/* The tile's inputs at row t of the segment, t >= -CONV_KEPT. */
static const bi_bf16 *input(const conv_job *c, int32_t t) {
    if (c->seg->pos + t < 0)
        return conv_no_input;
    if (t < 0)
        return c->history + (int64_t)(t + CONV_KEPT) * c->args->n_chan;
    return c->args->x + (int64_t)(c->seg->row + t) * c->args->x_ld + c->chan;
}

static void conv_row(const conv_job *c, float w[BI_CONV_TAPS][CONV_TILE], int32_t t) {
    float sum[CONV_TILE] = {0.0f};
    for (int32_t tap = 0; tap < BI_CONV_TAPS; tap++) {
        const bi_bf16 *x = input(c, t - CONV_KEPT + tap);
        for (int32_t i = 0; i < c->n; i++)
            sum[i] = BI_FMA(w[tap][i], bi_widen(x[i]), sum[i]);
    }
    bi_bf16 *y = c->args->y + (int64_t)(c->seg->row + t) * c->args->y_ld + c->chan;
    for (int32_t i = 0; i < c->n; i++)
        y[i] = bi_round(sum[i] * bi_sigmoid(sum[i]));
}

/* Row i of the history becomes the input CONV_KEPT - i rows before the segment's end. Rising i reads each old row before
 * it is overwritten, since a segment has at least one row. */
static void keep_history(const conv_job *c) {
    for (int32_t i = 0; i < CONV_KEPT; i++)
        memcpy(c->history + (int64_t)i * c->args->n_chan, input(c, c->seg->n_row - CONV_KEPT + i),
               sizeof(bi_bf16) * (size_t)c->n);
}

static void conv_tile(const void *args, int32_t job) {
    const bi_conv_args *a = args;
    int32_t n_tile = (a->n_chan + CONV_TILE - 1) / CONV_TILE, chan = job % n_tile * CONV_TILE;
    const bi_seg *seg = &a->batch->seg[job / n_tile];
    int32_t n = a->n_chan - chan < CONV_TILE ? a->n_chan - chan : CONV_TILE;
    conv_job c = {a, seg, (bi_bf16 *)(void *)bi_state_of(&a->history, seg->seq) + chan, chan, n};
    float w[BI_CONV_TAPS][CONV_TILE];
    for (int32_t i = 0; i < n; i++)
        for (int32_t tap = 0; tap < BI_CONV_TAPS; tap++)
            w[tap][i] = a->w[(int64_t)(chan + i) * BI_CONV_TAPS + tap];
    for (int32_t t = 0; t < seg->n_row; t++)
        conv_row(&c, w, t);
    if (seg->n_row > 0)
        keep_history(&c);
}

br_status BI_FN(bi_conv)(bi_ctx *ctx, const bi_conv_args *a) {
    if (a->batch->n_row < 0 || a->n_chan < 1)
        return br_fail(BR_E_SHAPE, "conv: %d rows of %d channels: expected n_row >= 0, n_chan >= 1", a->batch->n_row,
                       a->n_chan);
    if (a->x_ld < a->n_chan || a->y_ld < a->n_chan)
        return br_fail(BR_E_SHAPE, "conv: row strides %d and %d: expected at least %d", a->x_ld, a->y_ld, a->n_chan);
    if (((uintptr_t)a->history.base | a->history.seq_bytes) % sizeof(bi_bf16))
        return br_fail(BR_E_ALIGN, "conv: history at %p, %zu bytes a sequence: expected multiples of %zu",
                       (void *)a->history.base, a->history.seq_bytes, sizeof(bi_bf16));
    if (a->batch->n_row == 0 || a->batch->n_seg == 0)
        return BR_OK;
    int32_t n_tile = (a->n_chan + CONV_TILE - 1) / CONV_TILE;
    /* One element costs four taps and a sigmoid, about 8 plain element steps. */
    int64_t cost = 8 * (int64_t)a->batch->n_row * a->n_chan / ((int64_t)a->batch->n_seg * n_tile);
    bi_rows_run(ctx, conv_tile, a, a->batch->n_seg * n_tile, cost + 1);
    return BR_OK;
}

br_status BI_FN(bi_conv_group)(bi_ctx *ctx, const bi_conv_args *args, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        BR_TRY(BI_FN(bi_conv)(ctx, &args[i]));
    return BR_OK;
}
