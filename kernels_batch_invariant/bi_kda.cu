/* bi_kda: the op, and its kernel for every shape.      Contract: N-KDA-2, N-KDA-3, N-KDA-4, N-SUM-1
 *
 * State of a sequence: (n_head, value column, key) f32: 128 keys of a column are four full cache lines.
 *
 * Four kernels share the work of a step by the length of a segment and the shape: at d = 128 with aligned rows segments of one row go to
 * one of bi_kda_decode.cu and longer ones to kda_prefill (bi_kda_prefill.cu); everything else goes to kda_general. All give the same bits:
 * eight threads are the clause's lanes everywhere, and the rest is their own keys in rising order.
 *
 * kda_general. Grid (head * blocks of 32 columns, segment), block 256: eight threads share one column. A warp prepares one of eight tokens
 * in shared memory (thread l element l + 32 j: N-SUM's folds by 128, 64 and 32 are its own, 16 .. 1 are exchanges), then all run them. */
#include "bi_kda_parts.cuh"

enum { GENERAL_BLOCK = 256, GENERAL_COLUMNS = GENERAL_BLOCK / KDA_LANES };

/* ---- every shape ---- */

template <int J> struct general_tile {
    float a[KDA_TILE][32 * J], ak[KDA_TILE][32 * J], k[KDA_TILE][32 * J], q[KDA_TILE][32 * J];
    float v[KDA_TILE][GENERAL_COLUMNS], beta[KDA_TILE];
};

/* SUM(x*x), element l + 32 j in x[j] of thread l; every thread gets it. */
template <int J> static __device__ __forceinline__ float general_sum(const float (&x)[J]) {
    float part[KDA_D_MAX / 32];
#pragma unroll
    for (int j = 0; j < KDA_D_MAX / 32; j++)
        part[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < J; j++)
        part[j] = BI_MUL(x[j], x[j]);
#pragma unroll
    for (int half = KDA_D_MAX / 64; half >= 1; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++)
            part[j] = BI_ADD(part[j], part[j + half]);
    float sum = part[0];
#pragma unroll
    for (int mask = 16; mask >= 1; mask /= 2)
        sum = BI_ADD(sum, kda_swap(sum, mask));
    return sum;
}

/* One warp prepares token t of the tile. */
template <int J>
static __device__ __forceinline__ void general_prepare(const kda_launch &p, int row, int head, int column, int t, general_tile<J> &tile) {
    const int lane = (int)threadIdx.x & 31;
    const int64_t at = (int64_t)row * p.ld + (int64_t)head * p.d, at_head = (int64_t)row * p.n_head + head;
    float k[J], q[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        k[j] = bi_widen(p.k[at + lane + 32 * j]);
        q[j] = bi_widen(p.q[at + lane + 32 * j]);
    }
    const float k_sum = general_sum(k), q_sum = general_sum(q);
    if (lane == 0) {
        bi_cuda_fault(p.fault, row, k_sum);
        bi_cuda_fault(p.fault, row, q_sum);
        tile.beta[t] = p.beta[at_head];
    }
    const float k_norm = BI_SQRT(BI_ADD(k_sum, BI_KDA_L2_EPS)), q_norm = BI_SQRT(BI_ADD(q_sum, BI_KDA_L2_EPS));
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int i = lane + 32 * j;
        const float a = p.a[at_head * p.d + i], k_unit = BI_DIV(k[j], k_norm);
        tile.a[t][i] = a;
        tile.k[t][i] = k_unit;
        tile.ak[t][i] = BI_MUL(a, k_unit);
        tile.q[t][i] = BI_MUL(BI_DIV(q[j], q_norm), p.scale);
    }
    tile.v[t][lane] = bi_widen(p.v[at + column + lane]);
}

/* The lane's e + d of dot(S, x); x points at the lane's first key. */
template <int J> static __device__ __forceinline__ float general_dot(const float (&s)[4 * J], const float *x) {
    float chain[2];
#pragma unroll
    for (int n = 0; n < 4 * J; n++) {
        const float key = x[32 * (n / 4) + n % 4];
        chain[n % 2] = n < 2 ? BI_MUL(s[n], key) : BI_FMA(s[n], key, chain[n % 2]);
    }
    return BI_ADD(chain[0], chain[1]);
}

/* One token; every lane gets the output of its column. */
template <int J>
static __device__ __forceinline__ float general_token(const general_tile<J> &tile, int t, int lane, int column, float (&s)[4 * J]) {
    const float *a = tile.a[t] + 4 * lane, *k = tile.k[t] + 4 * lane;
    float r[1] = {general_dot<J>(s, tile.ak[t] + 4 * lane)}, o[1];
    kda_fold(r, lane);
    const float u = BI_MUL(tile.beta[t], BI_SUB(tile.v[t][column], r[0]));
#pragma unroll
    for (int n = 0; n < 4 * J; n++) {
        const int at = 32 * (n / 4) + n % 4;
        s[n] = BI_FMA(k[at], u, BI_MUL(a[at], s[n]));
    }
    o[0] = general_dot<J>(s, tile.q[t] + 4 * lane);
    kda_fold(o, lane);
    return o[0];
}

template <int J> static __global__ void __launch_bounds__(GENERAL_BLOCK) kda_general(kda_launch p) {
    __shared__ general_tile<J> tile;
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x % KDA_LANES, column = (int)threadIdx.x / KDA_LANES;
    const int head = (int)blockIdx.x / J, first = (int)blockIdx.x % J * GENERAL_COLUMNS;
    for (int i = (int)blockIdx.y; i < p.n_seg; i += (int)gridDim.y) {
        const bi_seg seg = p.seg[i];
        if (seg.n_row < 1)
            continue;
        float *state = kda_head_state(p, seg, head) + (int64_t)(first + column) * p.d + 4 * lane;
        float s[4 * J];
#pragma unroll
        for (int n = 0; n < 4 * J; n++)
            s[n] = seg.pos > 0 ? state[32 * (n / 4) + n % 4] : 0.0f;
        for (int begin = 0; begin < seg.n_row; begin += KDA_TILE) {
            const int n_tok = seg.n_row - begin < KDA_TILE ? seg.n_row - begin : KDA_TILE;
            __syncthreads();
            if (warp < n_tok)
                general_prepare<J>(p, seg.row + begin + warp, head, first, warp, tile);
            __syncthreads();
            for (int t = 0; t < n_tok; t++) {
                const float o = general_token<J>(tile, t, lane, column, s);
                if (lane == 0)
                    p.o[((int64_t)(seg.row + begin + t) * p.n_head + head) * p.d + first + column] = o;
            }
        }
#pragma unroll
        for (int n = 0; n < 4 * J; n++)
            state[32 * (n / 4) + n % 4] = s[n];
    }
}
static_assert(GENERAL_BLOCK / 32 == KDA_TILE, "a warp a token");

/* ---- the op ---- */

size_t bi_cuda_kda_state_bytes(int32_t n_head, int32_t d) {
    return sizeof(float) * (size_t)n_head * (size_t)d * (size_t)d;
}

size_t bi_cuda_kda_scratch(const bi_limits *limits) {
    (void)limits;
    return 0;
}

static br_status check(const bi_kda_args *a) {
    if (a->batch->n_row < 0 || a->n_head < 1 || a->d < 32 || a->d > KDA_D_MAX || a->d % 32)
        return br_fail(BR_E_SHAPE, "kda: %d rows of %d heads of %d: expected n_row >= 0, n_head >= 1, d a multiple of 32 up to %d",
                       a->batch->n_row, a->n_head, a->d, KDA_D_MAX);
    if (a->ld < a->n_head * a->d)
        return br_fail(BR_E_SHAPE, "kda: row stride %d: expected at least %d", a->ld, a->n_head * a->d);
    if (((uintptr_t)a->state.base | a->state.seq_bytes) % sizeof(float))
        return br_fail(BR_E_ALIGN, "kda: state at %p, %zu bytes a sequence: expected multiples of %zu", (void *)a->state.base,
                       a->state.seq_bytes, sizeof(float));
    return BR_OK;
}

/* The fast kernels move 16 bytes at a time. */
static int is_fast(const kda_launch *p) {
    const uintptr_t all = (uintptr_t)p->q | (uintptr_t)p->k | (uintptr_t)p->v | (uintptr_t)p->a | (uintptr_t)p->state.base |
                          (uintptr_t)p->state.seq_bytes;
    return p->d == KDA_D_FAST && all % 16 == 0 && p->ld % 8 == 0;
}

static br_status launch_general(bi_ctx *ctx, const kda_launch *p) {
    static void (*const kernel[])(kda_launch) = {kda_general<1>, kda_general<2>, kda_general<3>, kda_general<4>,
                                                 kda_general<5>, kda_general<6>, kda_general<7>, kda_general<8>};
    const int blocks = p->d / 32;
    const dim3 grid((unsigned)(p->n_head * blocks), (unsigned)(p->n_seg < KDA_GRID_Y_MAX ? p->n_seg : KDA_GRID_Y_MAX));
    kernel[blocks - 1]<<<grid, GENERAL_BLOCK, 0, ctx->stream>>>(*p);
    return bi_cuda_launched(ctx, BI_K_kda_general, "kda");
}

br_status bi_cuda_kda(bi_ctx *ctx, const bi_kda_args *a) {
    BR_TRY(check(a));
    const bi_batch *batch = a->batch;
    if (batch->n_row == 0 || batch->n_seg == 0)
        return BR_OK;
    const kda_launch p = {batch->seg, batch->n_seg, a->n_head, a->d, a->ld, a->q,    a->k,    a->v,
                          a->a,       a->beta,      a->scale,  a->state, a->o, a->fault};
    if (!is_fast(&p))
        return launch_general(ctx, &p);
    if (batch->seg_row_max > 1)
        BR_TRY(bi_kda_prefill_fast(ctx, &p, batch->n_row, batch->seg_row_max));
    /* A single segment of several rows leaves nothing for the other kernel. */
    if (batch->seg_row_max > 1 && batch->n_seg == 1)
        return BR_OK;
    return bi_kda_decode_fast(ctx, &p);
}
