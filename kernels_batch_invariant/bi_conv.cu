/* bi_conv on the GPU: causal depthwise convolution, then SiLU.      Contract: N-CONV, N-FN
 *
 * A thread owns CHAN neighbouring channels (4 where all is aligned to it, else 1) and walks down rows with the last three
 * inputs in registers; a channel's sum is one fma chain over its four taps. Block 256 threads, no shared memory.
 *
 * A group of convolutions of one batch and width (q, k and v of a layer) is one launch, its members along z.
 *
 * The history of a sequence is read by its first rows and overwritten after its last. Short segments (a decode step): one thread
 * walks the whole segment and then writes the history, grid (channels, segments). Long segments are cut into tiles of CONV_TILE
 * rows, grid (channels, tiles), and a second kernel in stream order writes the histories when all rows have read them. */
#include "bi_row.cuh"

enum {
    CONV_KEPT = BI_CONV_TAPS - 1,
    CONV_OWN = 4, /* rows of a short segment */
    CONV_TILE = 32,
    CONV_AHEAD = 4,
    CONV_VEC = 4
};

/* CHAN neighbouring inputs as stored. */
template <int CHAN> struct conv_in {
    typedef uint2 type;
};
template <> struct conv_in<1> {
    typedef bi_bf16 type;
};

typedef struct conv_run {
    int32_t n_row, n_seg, n_chan, x_ld, y_ld;
    const bi_seg *seg;
    const int32_t *row_seg;
    const bi_bf16 *x;
    const float *w;
    bi_state history;
    bi_bf16 *y;
} conv_run;

/* What a launch takes, by value. */
typedef struct conv_group {
    conv_run run[BI_CONV_GROUP_MAX];
} conv_group;

/* The inputs at row t of the segment, t >= -CONV_KEPT. */
template <int CHAN> static __device__ __forceinline__ typename conv_in<CHAN>::type input(const conv_run &c, bi_seg seg, int chan, int t) {
    typedef typename conv_in<CHAN>::type In;
    if (seg.pos + t < 0)
        return In{};
    if (t < 0)
        return *(const In *)((const bi_bf16 *)bi_cuda_state(c.history, seg.seq) + (int64_t)(t + CONV_KEPT) * c.n_chan + chan);
    return *(const In *)(c.x + (int64_t)(seg.row + t) * c.x_ld + chan);
}

static __device__ __forceinline__ void widen_in(uint2 in, float *x) {
    bi_row_widen2(in.x, x);
    bi_row_widen2(in.y, x + 2);
}

static __device__ __forceinline__ void widen_in(bi_bf16 in, float *x) {
    x[0] = bi_widen(in);
}

template <int CHAN> struct conv_taps {
    float w[CHAN][BI_CONV_TAPS];
};

template <int CHAN> static __device__ __forceinline__ conv_taps<CHAN> load_taps(const conv_run &c, int chan) {
    conv_taps<CHAN> taps;
    const float *w = c.w + (int64_t)chan * BI_CONV_TAPS;
#pragma unroll
    for (int i = 0; i < CHAN; i++) {
        if (CHAN > 1) {
            const float4 four = __ldg((const float4 *)w + i);
            taps.w[i][0] = four.x, taps.w[i][1] = four.y, taps.w[i][2] = four.z, taps.w[i][3] = four.w;
        } else {
            for (int tap = 0; tap < BI_CONV_TAPS; tap++)
                taps.w[i][tap] = w[tap];
        }
    }
    return taps;
}

/* One row of the thread's channels from the inputs at t - 3 .. t. */
template <int CHAN, class In>
static __device__ __forceinline__ void conv_row(const conv_taps<CHAN> &taps, const In window[BI_CONV_TAPS], bi_bf16 *y) {
    float sum[CHAN];
#pragma unroll
    for (int i = 0; i < CHAN; i++)
        sum[i] = 0.0f;
#pragma unroll
    for (int tap = 0; tap < BI_CONV_TAPS; tap++) {
        float x[CHAN];
        widen_in(window[tap], x);
#pragma unroll
        for (int i = 0; i < CHAN; i++)
            sum[i] = BI_FMA(taps.w[i][tap], x[i], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < CHAN; i++)
        sum[i] = BI_MUL(sum[i], bi_sigmoid(sum[i]));
    if constexpr (CHAN > 1)
        *(uint2 *)y = make_uint2(bi_row_round2(sum), bi_row_round2(sum + 2));
    else
        *y = bi_round(sum[0]);
}

template <class In> static __device__ __forceinline__ void shift(In window[BI_CONV_TAPS], In next) {
#pragma unroll
    for (int i = 0; i < CONV_KEPT; i++)
        window[i] = window[i + 1];
    window[CONV_KEPT] = next;
}

/* Short segments: blockIdx.y and on. After the last row the window's last three are the new history, whatever was before them. */
template <int CHAN> BI_ROW_KERNEL conv_own_kernel(const __grid_constant__ conv_group group) {
    bi_cuda_begin();
    typedef typename conv_in<CHAN>::type In;
    const conv_run &c = group.run[blockIdx.z];
    const int chan = ((int)blockIdx.x * BI_ROW_BLOCK + (int)threadIdx.x) * CHAN;
    if (chan >= c.n_chan)
        return;
    const conv_taps<CHAN> taps = load_taps<CHAN>(c, chan);
    for (int s = (int)blockIdx.y; s < c.n_seg; s += (int)gridDim.y) {
        const bi_seg seg = c.seg[s];
        if (seg.n_row <= 0)
            continue;
        In window[BI_CONV_TAPS];
#pragma unroll
        for (int i = 0; i < BI_CONV_TAPS; i++)
            window[i] = input<CHAN>(c, seg, chan, i - CONV_KEPT);
        for (int t = 0; t < seg.n_row; t++) {
            if (t > 0)
                shift(window, input<CHAN>(c, seg, chan, t));
            conv_row<CHAN>(taps, window, c.y + (int64_t)(seg.row + t) * c.y_ld + chan);
        }
        bi_bf16 *kept = (bi_bf16 *)bi_cuda_state(c.history, seg.seq) + chan;
#pragma unroll
        for (int i = 0; i < CONV_KEPT; i++)
            *(In *)(kept + (int64_t)i * c.n_chan) = window[i + 1];
    }
}

/* Rows of the step blockIdx.y * CONV_TILE and on; where a segment begins, the last three inputs are read anew. CONV_AHEAD rows of
 * one segment are read before the first of them is worked on. */
template <int CHAN> BI_ROW_KERNEL conv_tile_kernel(const __grid_constant__ conv_group group) {
    typedef typename conv_in<CHAN>::type In;
    const conv_run &c = group.run[blockIdx.z];
    const int chan = ((int)blockIdx.x * BI_ROW_BLOCK + (int)threadIdx.x) * CHAN;
    if (chan >= c.n_chan)
        return;
    const conv_taps<CHAN> taps = load_taps<CHAN>(c, chan);
    const int begin = (int)blockIdx.y * CONV_TILE, end = c.n_row - begin < CONV_TILE ? c.n_row : begin + CONV_TILE;
    In window[CONV_KEPT + CONV_AHEAD];
    bi_seg seg = {0, 0, 0, 0};
    int at = -1;
    for (int row = begin; row < end;) {
        const int s = c.row_seg[row];
        if (s < 0)
            break;
        if (s != at) {
            at = s;
            seg = c.seg[s];
#pragma unroll
            for (int i = 0; i < CONV_KEPT; i++)
                window[i] = input<CHAN>(c, seg, chan, row - seg.row + i - CONV_KEPT);
        }
        int n = seg.row + seg.n_row - row;
        n = n < end - row ? n : end - row;
        n = n < CONV_AHEAD ? n : CONV_AHEAD;
#pragma unroll
        for (int k = 0; k < CONV_AHEAD; k++)
            if (k < n)
                window[CONV_KEPT + k] = input<CHAN>(c, seg, chan, row - seg.row + k);
#pragma unroll
        for (int k = 0; k < CONV_AHEAD; k++)
            if (k < n)
                conv_row<CHAN>(taps, window + k, c.y + (int64_t)(row + k) * c.y_ld + chan);
        /* When n is smaller the segment or the tile ends here, and the window is not used again. */
#pragma unroll
        for (int i = 0; i < CONV_KEPT; i++)
            window[i] = window[CONV_AHEAD + i];
        row += n;
    }
}

/* Row i of the history becomes the input three - i rows before the segment's end; all are read before one is written. */
template <int CHAN> BI_ROW_KERNEL conv_history_kernel(const __grid_constant__ conv_group group) {
    typedef typename conv_in<CHAN>::type In;
    const conv_run &c = group.run[blockIdx.z];
    const int chan = ((int)blockIdx.x * BI_ROW_BLOCK + (int)threadIdx.x) * CHAN;
    const bi_seg seg = c.seg[blockIdx.y];
    if (chan >= c.n_chan || seg.n_row <= 0)
        return;
    In last[CONV_KEPT];
#pragma unroll
    for (int i = 0; i < CONV_KEPT; i++)
        last[i] = input<CHAN>(c, seg, chan, seg.n_row - CONV_KEPT + i);
    bi_bf16 *kept = (bi_bf16 *)bi_cuda_state(c.history, seg.seq) + chan;
#pragma unroll
    for (int i = 0; i < CONV_KEPT; i++)
        *(In *)(kept + (int64_t)i * c.n_chan) = last[i];
}

template <int CHAN> static br_status launch(bi_ctx *ctx, const bi_batch *batch, const conv_group &group, int n) {
    const conv_run &c = group.run[0]; /* the others have its shape */
    const unsigned n_chan = (unsigned)bi_ceil_div(c.n_chan, BI_ROW_BLOCK * CHAN);
    if (batch->seg_row_max <= CONV_OWN) {
        /* A few waves of blocks; each then keeps its taps for several segments. */
        const int64_t wanted = bi_ceil_div(12 * (int64_t)ctx->n_sm, n_chan * (unsigned)n);
        const dim3 grid(n_chan, (unsigned)(c.n_seg < wanted ? c.n_seg : wanted), (unsigned)n);
        bi_cuda_launch(ctx, conv_own_kernel<CHAN>, grid, BI_ROW_BLOCK, 0, group);
        return bi_cuda_launched(ctx, BI_K_conv, "conv");
    }
    const dim3 tiles(n_chan, (unsigned)bi_ceil_div(c.n_row, CONV_TILE), (unsigned)n), segments(n_chan, (unsigned)c.n_seg, (unsigned)n);
    conv_tile_kernel<CHAN><<<tiles, BI_ROW_BLOCK, 0, ctx->stream>>>(group);
    BR_TRY(bi_cuda_launched(ctx, BI_K_conv, "conv"));
    conv_history_kernel<CHAN><<<segments, BI_ROW_BLOCK, 0, ctx->stream>>>(group);
    return bi_cuda_launched(ctx, BI_K_conv, "conv");
}

static br_status check(const bi_conv_args *a) {
    const bi_batch *batch = a->batch;
    if (batch->n_row < 0 || a->n_chan < 1)
        return br_fail(BR_E_SHAPE, "conv: %d rows of %d channels: expected n_row >= 0, n_chan >= 1", batch->n_row, a->n_chan);
    if (a->x_ld < a->n_chan || a->y_ld < a->n_chan)
        return br_fail(BR_E_SHAPE, "conv: row strides %d and %d: expected at least %d", a->x_ld, a->y_ld, a->n_chan);
    if (((uintptr_t)a->history.base | a->history.seq_bytes) % sizeof(bi_bf16))
        return br_fail(BR_E_ALIGN, "conv: history at %p, %zu bytes a sequence: expected multiples of %zu", (void *)a->history.base,
                       a->history.seq_bytes, sizeof(bi_bf16));
    return BR_OK;
}

static int is_wide(const bi_conv_args *a) {
    const uintptr_t all = (uintptr_t)a->x | (uintptr_t)a->y | (uintptr_t)a->history.base | (uintptr_t)a->history.seq_bytes;
    return all % sizeof(uint2) == 0 && (a->x_ld | a->y_ld | a->n_chan) % CONV_VEC == 0 && bi_row_wide(a->w);
}

/* n checked calls of one batch, width and kind. */
static br_status run_together(bi_ctx *ctx, const bi_conv_args *args, int n) {
    const bi_batch *batch = args->batch;
    conv_group group = {};
    if (batch->n_row == 0 || batch->n_seg == 0)
        return BR_OK;
    for (int i = 0; i < n; i++) {
        const bi_conv_args *a = &args[i];
        const conv_run run = {batch->n_row, batch->n_seg, a->n_chan,  a->x_ld, a->y_ld, batch->seg, batch->row_seg,
                              a->x,         a->w,         a->history, a->y};
        group.run[i] = run;
    }
    return is_wide(args) ? launch<CONV_VEC>(ctx, batch, group, n) : launch<1>(ctx, batch, group, n);
}

br_status bi_cuda_conv(bi_ctx *ctx, const bi_conv_args *a) {
    BR_TRY(check(a));
    return run_together(ctx, a, 1);
}

br_status bi_cuda_conv_group(bi_ctx *ctx, const bi_conv_args *args, int32_t n) {
    int together = n <= BI_CONV_GROUP_MAX;
    for (int32_t i = 0; i < n; i++) {
        BR_TRY(check(&args[i]));
        together = together && args[i].batch == args->batch && args[i].n_chan == args->n_chan && is_wide(&args[i]) == is_wide(args);
    }
    if (together && n > 0)
        return run_together(ctx, args, n);
    for (int32_t i = 0; i < n; i++)
        BR_TRY(run_together(ctx, &args[i], 1));
    return BR_OK;
}
