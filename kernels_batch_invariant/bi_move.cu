/* bi_gather, bi_seg_fault on the GPU: see bi_move.h.
 *
 * gather: grid (rows, pieces of a long row), block 256 threads, sixteen or four bytes at a time. seg_fault: a block of 256 threads
 * a segment; the first row with a fault is the smallest of its threads' firsts, a minimum of integers, which has no order. */
#include "bi_row.cuh"

#include <limits.h>

enum { GATHER_CUT = 1 << 16 /* bytes of a row that one block moves */ };

template <class Piece> BI_ROW_KERNEL gather_kernel(const __grid_constant__ bi_gather_args a) {
    bi_cuda_begin();
    const int32_t from = a.row[blockIdx.x];
    if (from < 0)
        return;
    const size_t begin = (size_t)blockIdx.y * GATHER_CUT, left = a.row_bytes - begin;
    const int n = (int)((left < GATHER_CUT ? left : GATHER_CUT) / sizeof(Piece));
    const Piece *x = (const Piece *)((const unsigned char *)a.x + a.row_bytes * (size_t)from + begin);
    Piece *y = (Piece *)((unsigned char *)a.y + a.row_bytes * (size_t)blockIdx.x + begin);
    if constexpr (sizeof(Piece) == sizeof(uint4)) {
        bi_row_copy(y, x, n, (int)threadIdx.x, BI_ROW_BLOCK);
    } else {
        for (int i = (int)threadIdx.x; i < n; i += BI_ROW_BLOCK)
            y[i] = x[i];
    }
}

br_status bi_cuda_gather(bi_ctx *ctx, const bi_gather_args *a) {
    if (a->n < 0 || a->row_bytes % 4)
        return br_fail(BR_E_SHAPE, "gather: %d rows of %zu bytes: expected at least 0, a multiple of 4", a->n, a->row_bytes);
    if (a->n == 0 || a->row_bytes == 0)
        return BR_OK;
    const dim3 grid((unsigned)a->n, (unsigned)bi_ceil_div((int64_t)a->row_bytes, GATHER_CUT));
    if (a->row_bytes % sizeof(uint4) == 0 && bi_row_wide(a->x) && bi_row_wide(a->y))
        bi_cuda_launch(ctx, gather_kernel<uint4>, grid, BI_ROW_BLOCK, 0, *a);
    else
        bi_cuda_launch(ctx, gather_kernel<uint32_t>, grid, BI_ROW_BLOCK, 0, *a);
    return bi_cuda_launched(ctx, BI_K_gather, "gather");
}

BI_ROW_KERNEL seg_fault_kernel(const bi_seg *segs, const uint32_t *row_fault, bi_first_fault *out) {
    bi_cuda_begin();
    __shared__ int first;
    const bi_seg seg = segs[blockIdx.x];
    if (threadIdx.x == 0)
        first = INT_MAX;
    __syncthreads();
    int mine = INT_MAX;
    for (int t = (int)threadIdx.x; t < seg.n_row && mine == INT_MAX; t += BI_ROW_BLOCK)
        mine = row_fault[seg.row + t] ? t : INT_MAX;
    if (mine != INT_MAX)
        atomicMin(&first, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        bi_first_fault found = {0, 0};
        if (first != INT_MAX) {
            found.code = row_fault[seg.row + first];
            found.pos = seg.pos + first;
        }
        out[blockIdx.x] = found;
    }
}

br_status bi_cuda_seg_fault(bi_ctx *ctx, const bi_seg_fault_args *a) {
    if (a->batch->n_seg <= 0)
        return BR_OK;
    bi_cuda_launch(ctx, seg_fault_kernel, (unsigned)a->batch->n_seg, BI_ROW_BLOCK, 0, a->batch->seg, a->row_fault, a->out);
    return bi_cuda_launched(ctx, BI_K_seg_fault, "seg_fault");
}
