/* bi_embed on the GPU: rows of the table, copied.      Contract: N-EMB
 *
 * Grid: rows; block: 256 threads, which copy one row sixteen bytes or one element at a time. No shared memory, no arithmetic. The
 * ids lie on the device, so the host cannot refuse one; a row without a token (padding) becomes zeros. */
#include "bi_row.cuh"

template <class Piece> BI_ROW_KERNEL embed_kernel(const __grid_constant__ bi_embed_args a) {
    bi_cuda_begin();
    const int t = (int)blockIdx.x, n = a.d_model / (int)(sizeof(Piece) / sizeof(bi_bf16));
    const int32_t token = a.token[t];
    Piece *y = (Piece *)(a.y + (int64_t)t * a.d_model);
    if (token < 0 || token >= a.n_vocab) {
        for (int i = (int)threadIdx.x; i < n; i += BI_ROW_BLOCK)
            y[i] = Piece{};
        return;
    }
    const Piece *x = (const Piece *)(a.table + (int64_t)token * a.d_model);
    if constexpr (sizeof(Piece) == sizeof(uint4)) {
        bi_row_copy(y, x, n, (int)threadIdx.x, BI_ROW_BLOCK);
    } else {
        for (int i = (int)threadIdx.x; i < n; i += BI_ROW_BLOCK)
            y[i] = x[i];
    }
}

br_status bi_cuda_embed(bi_ctx *ctx, const bi_embed_args *a) {
    if (a->n_row < 0 || a->d_model < 1 || a->n_vocab < 1)
        return br_fail(BR_E_SHAPE, "embed: %d rows of %d from %d tokens: expected n_row >= 0, d_model and n_vocab >= 1", a->n_row, a->d_model,
                       a->n_vocab);
    if (a->n_row == 0)
        return BR_OK;
    if (bi_row_wide_rows(a->table, a->d_model, a->d_model) && bi_row_wide(a->y))
        bi_cuda_launch(ctx, embed_kernel<uint4>, (unsigned)a->n_row, BI_ROW_BLOCK, 0, *a);
    else
        bi_cuda_launch(ctx, embed_kernel<bi_bf16>, (unsigned)a->n_row, BI_ROW_BLOCK, 0, *a);
    return bi_cuda_launched(ctx, BI_K_embed, "embed");
}
