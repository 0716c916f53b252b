/* bi_kda_decode: the recurrence over segments of one row, head size 128.      Contract: N-KDA-2, N-KDA-3, N-KDA-4, N-SUM-1
 *
 * A step reads and writes every state once, which is all it takes time for. Eight threads share C columns and hold 16 keys of each; norms
 * and operands are computed by every eight threads anew. Both kernels give the same bits: no sum crosses columns.
 *
 * kda_decode_ring, for many states. 2 blocks an SM, each walks pieces (segment, head, RING_COLUMNS columns: 16 KB of state that lie
 * together) with a stride of the grid. Block RING_BLOCK threads of 4 columns. Shared memory: a ring of RING_SLOTS pieces, each with the
 * rows k, q, a and v of its head: one computed, one on its way back, the others on their way here, all by bulk copies: 128 KB an SM are
 * under way, always in long runs.
 * kda_decode, for few. Grid (head * 4 + quarter of its columns, segment), block 128 of 2 columns a thread; the operands are computed while
 * the state is on its way. Written states leave the second-level cache first: they are not read again in this step. */
#include "bi_kda_async.cuh"
#include "bi_kda_parts.cuh"

enum {
    DECODE_BLOCK = 128,
    DECODE_COLUMNS = 2,
    DECODE_KEYS = KDA_D_FAST / KDA_LANES,
    DECODE_PER_HEAD = KDA_D_FAST * KDA_LANES / (DECODE_COLUMNS * DECODE_BLOCK), /* blocks a head */
    RING_COLUMNS = 32,
    RING_THREAD_COLUMNS = 4,
    RING_BLOCK = RING_COLUMNS * KDA_LANES / RING_THREAD_COLUMNS,
    RING_PER_HEAD = KDA_D_FAST / RING_COLUMNS,
    RING_SLOTS = 6,
    RING_BLOCKS = 2, /* an SM */
    RING_FLOOR = 16, /* pieces a block, below which the plain kernel ends sooner */
    /* A slot, in bytes: the state, then the rows. */
    RING_STATE = RING_COLUMNS * KDA_D_FAST * 4,
    RING_K = RING_STATE,
    RING_Q = RING_K + KDA_D_FAST * 2,
    RING_V = RING_Q + KDA_D_FAST * 2,
    RING_A = RING_V + KDA_D_FAST * 2,
    RING_SLOT = RING_A + KDA_D_FAST * 4,
    RING_BYTES = RING_SLOTS * (RING_SLOT + 8)
};
static_assert(RING_SLOT % 128 == 0 && RING_BLOCKS * (RING_BYTES + 1024) <= 228 * 1024, "shared memory of an SM");

/* The lane's 16 keys of a bf16 row of 128, as pairs. */
static __device__ __forceinline__ void load_pairs(const bi_bf16 *row, int lane, uint32_t (&x)[DECODE_KEYS / 2]) {
#pragma unroll
    for (int j = 0; j < DECODE_KEYS / 4; j++) {
        const uint2 y = *(const uint2 *)(row + 32 * j + 4 * lane);
        x[2 * j] = y.x, x[2 * j + 1] = y.y;
    }
}

static __device__ __forceinline__ void load_keys(const float *column, int lane, float (&x)[DECODE_KEYS]) {
#pragma unroll
    for (int j = 0; j < DECODE_KEYS / 4; j++) {
        const float4 y = *(const float4 *)(column + 32 * j + 4 * lane);
        x[4 * j] = y.x, x[4 * j + 1] = y.y, x[4 * j + 2] = y.z, x[4 * j + 3] = y.w;
    }
}

static __device__ __forceinline__ void store_keys(float *column, int lane, const float (&x)[DECODE_KEYS]) {
#pragma unroll
    for (int j = 0; j < DECODE_KEYS / 4; j++)
        *(float4 *)(column + 32 * j + 4 * lane) = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}

static __device__ __forceinline__ float widen_key(const uint32_t (&pairs)[DECODE_KEYS / 2], int n) {
    return n % 2 ? kda_high(pairs[n / 2]) : kda_low(pairs[n / 2]);
}

/* SUM(x*x) over the row of 128: folds 64 and 32 are the thread's own, 16, 8, 4 go to lanes 4, 2, 1 apart, 2 and 1 are its own again. */
static __device__ __forceinline__ float sum_squares(const uint32_t (&pairs)[DECODE_KEYS / 2]) {
    float part[4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        float square[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            square[j] = BI_MUL(widen_key(pairs, 4 * j + m), widen_key(pairs, 4 * j + m));
        part[m] = BI_ADD(BI_ADD(square[0], square[2]), BI_ADD(square[1], square[3]));
    }
#pragma unroll
    for (int mask = 4; mask >= 1; mask /= 2)
#pragma unroll
        for (int m = 0; m < 4; m++)
            part[m] = BI_ADD(part[m], kda_swap(part[m], mask));
    return BI_ADD(BI_ADD(part[0], part[2]), BI_ADD(part[1], part[3]));
}

/* x = RN(row / norm). */
static __device__ __forceinline__ void unit_keys(const uint32_t (&pairs)[DECODE_KEYS / 2], float norm, float (&x)[DECODE_KEYS]) {
    const float inverse = BI_DIV(1.0f, norm);
    uint32_t least = 0x7fff7fffu;
#pragma unroll
    for (int i = 0; i < DECODE_KEYS / 2; i++)
        least = kda_least(least, pairs[i]);
    if (__all_sync(0xffffffffu, kda_pair_fast(least) && norm < KDA_NORM_FAST)) {
#pragma unroll
        for (int n = 0; n < DECODE_KEYS; n++)
            x[n] = kda_divide(widen_key(pairs, n), norm, inverse);
    } else {
#pragma unroll
        for (int n = 0; n < DECODE_KEYS; n++)
            x[n] = BI_DIV(widen_key(pairs, n), norm);
    }
}

/* part = the lane's e + d of dot(S, x). */
template <int C>
static __device__ __forceinline__ void dot_keys(const float (&s)[C][DECODE_KEYS], const float (&x)[DECODE_KEYS], float (&part)[C]) {
#pragma unroll
    for (int c = 0; c < C; c++) {
        float chain[2] = {BI_MUL(s[c][0], x[0]), BI_MUL(s[c][1], x[1])};
#pragma unroll
        for (int n = 2; n < DECODE_KEYS; n++)
            chain[n % 2] = BI_FMA(s[c][n], x[n], chain[n % 2]);
        part[c] = BI_ADD(chain[0], chain[1]);
    }
}

/* What a token brings to eight threads. */
struct decode_rows {
    uint32_t k[DECODE_KEYS / 2], q[DECODE_KEYS / 2]; /* pairs of bf16 */
    float a[DECODE_KEYS];
    float v, beta; /* v of the column whose sums end in the thread */
};

/* One token on the state in registers, which goes to `keep` before the output is computed. Returns the output of the thread's own column. */
template <int C, class F>
static __device__ __forceinline__ float decode_token(const kda_launch &p, const decode_rows &in, int row, bool reports, int lane,
                                                     float (&s)[C][DECODE_KEYS], F &&keep) {
    const float k_sum = sum_squares(in.k), q_sum = sum_squares(in.q);
    if (reports) {
        bi_cuda_fault(p.fault, row, k_sum);
        bi_cuda_fault(p.fault, row, q_sum);
    }
    float k[DECODE_KEYS], x[DECODE_KEYS], r[C], u[C], o[C];
    unit_keys(in.k, BI_SQRT(BI_ADD(k_sum, BI_KDA_L2_EPS)), k);
#pragma unroll
    for (int n = 0; n < DECODE_KEYS; n++)
        x[n] = BI_MUL(in.a[n], k[n]);
    dot_keys(s, x, r);
    kda_fold(r, lane);
    unit_keys(in.q, BI_SQRT(BI_ADD(q_sum, BI_KDA_L2_EPS)), x);
    const float u_own = BI_MUL(in.beta, BI_SUB(in.v, r[0]));
#pragma unroll
    for (int c = 0; c < C; c++)
        u[c] = kda_slot_mask(C, c) ? kda_swap(u_own, kda_slot_mask(C, c)) : u_own;
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
        for (int n = 0; n < DECODE_KEYS; n++)
            s[c][n] = BI_FMA(k[n], u[c], BI_MUL(in.a[n], s[c][n]));
    keep();
#pragma unroll
    for (int n = 0; n < DECODE_KEYS; n++)
        x[n] = BI_MUL(x[n], p.scale);
    dot_keys(s, x, o);
    kda_fold(o, lane);
    return o[0];
}

/* ---- few states ---- */

static __device__ __forceinline__ void store_keys_once(float *column, int lane, const float (&x)[DECODE_KEYS]) {
#pragma unroll
    for (int j = 0; j < DECODE_KEYS / 4; j++)
        kda_store_once(column + 32 * j + 4 * lane, make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]));
}

static __global__ void __launch_bounds__(DECODE_BLOCK, 4) kda_decode(kda_launch p) {
    bi_cuda_begin();
    const int lane = (int)threadIdx.x % KDA_LANES, group = (int)threadIdx.x / KDA_LANES;
    const int head = (int)blockIdx.x / DECODE_PER_HEAD;
    const int first = ((int)blockIdx.x % DECODE_PER_HEAD * (DECODE_BLOCK / KDA_LANES) + group) * DECODE_COLUMNS;
    const bool reports = (int)blockIdx.x % DECODE_PER_HEAD == 0 && threadIdx.x == 0;
    /* Slot 0 of a lane is the column whose sums end in it. */
    const int own = kda_own<DECODE_COLUMNS>(lane), column[DECODE_COLUMNS] = {first + own, first + 1 - own};
    for (int i = (int)blockIdx.y; i < p.n_seg; i += (int)gridDim.y) {
        const bi_seg seg = p.seg[i];
        if (seg.n_row != 1)
            continue;
        float *state = kda_head_state(p, seg, head);
        float s[DECODE_COLUMNS][DECODE_KEYS] = {};
        if (seg.pos > 0)
#pragma unroll
            for (int c = 0; c < DECODE_COLUMNS; c++)
                load_keys(state + column[c] * KDA_D_FAST, lane, s[c]);
        const int64_t at = (int64_t)seg.row * p.ld + (int64_t)head * KDA_D_FAST;
        const int64_t at_head = (int64_t)seg.row * p.n_head + head;
        decode_rows in;
        load_pairs(p.k + at, lane, in.k);
        load_pairs(p.q + at, lane, in.q);
        load_keys(p.a + at_head * KDA_D_FAST, lane, in.a);
        in.v = bi_widen(p.v[at + column[0]]), in.beta = p.beta[at_head];
        const float o = decode_token(p, in, seg.row, reports, lane, s, [&] {
#pragma unroll
            for (int c = 0; c < DECODE_COLUMNS; c++)
                store_keys_once(state + column[c] * KDA_D_FAST, lane, s[c]);
        });
        if (lane % (KDA_LANES / DECODE_COLUMNS) == 0)
            p.o[at_head * KDA_D_FAST + column[0]] = o;
    }
}

/* ---- many states ---- */

/* Piece number i: columns part * RING_COLUMNS and on of a head of a segment. */
struct ring_piece {
    bi_seg seg;
    int head, part;
};

static __device__ __forceinline__ ring_piece piece_of(const kda_launch &p, int i) {
    const int heads = i / RING_PER_HEAD;
    return {p.seg[heads / p.n_head], heads % p.n_head, i % RING_PER_HEAD};
}

static __device__ __forceinline__ float *piece_state(const kda_launch &p, const ring_piece &piece) {
    return kda_head_state(p, piece.seg, piece.head) + piece.part * RING_COLUMNS * KDA_D_FAST;
}

/* One thread starts the copies of a piece into a slot. */
static __device__ __forceinline__ void ring_fetch(const kda_launch &p, const ring_piece &piece, uint32_t slot, uint32_t barrier) {
    const bi_seg seg = piece.seg;
    const int64_t at = (int64_t)seg.row * p.ld + (int64_t)piece.head * KDA_D_FAST;
    const int64_t at_head = (int64_t)seg.row * p.n_head + piece.head;
    if (seg.n_row != 1)
        return;
    kda_arrive_expect(barrier, (seg.pos > 0 ? RING_STATE : 0) + RING_SLOT - RING_STATE);
    if (seg.pos > 0)
        kda_copy(slot, piece_state(p, piece), RING_STATE, barrier);
    kda_copy(slot + RING_K, p.k + at, KDA_D_FAST * 2, barrier);
    kda_copy(slot + RING_Q, p.q + at, KDA_D_FAST * 2, barrier);
    kda_copy(slot + RING_V, p.v + at, KDA_D_FAST * 2, barrier);
    kda_copy(slot + RING_A, p.a + at_head * KDA_D_FAST, KDA_D_FAST * 4, barrier);
}

/* The piece in a slot, whose barrier has been waited for: its state is overwritten there, its outputs written. */
static __device__ __forceinline__ void ring_run(const kda_launch &p, const ring_piece &piece, unsigned char *slot, float beta) {
    constexpr int C = RING_THREAD_COLUMNS;
    const int lane = (int)threadIdx.x % KDA_LANES;
    int column[C];
    kda_columns<C, 4>(lane, column);
#pragma unroll
    for (int c = 0; c < C; c++)
        column[c] += (int)threadIdx.x / KDA_LANES * C;
    float *state = (float *)slot, s[C][DECODE_KEYS] = {};
    decode_rows in;
    load_pairs((const bi_bf16 *)(slot + RING_K), lane, in.k);
    load_pairs((const bi_bf16 *)(slot + RING_Q), lane, in.q);
    load_keys((const float *)(slot + RING_A), lane, in.a);
    in.v = bi_widen(((const bi_bf16 *)(slot + RING_V))[piece.part * RING_COLUMNS + column[0]]), in.beta = beta;
    if (piece.seg.pos > 0)
#pragma unroll
        for (int c = 0; c < C; c++)
            load_keys(state + column[c] * KDA_D_FAST, lane, s[c]);
    const float o = decode_token(p, in, piece.seg.row, piece.part == 0 && threadIdx.x == 0, lane, s, [&] {
#pragma unroll
        for (int c = 0; c < C; c++)
            store_keys(state + column[c] * KDA_D_FAST, lane, s[c]);
        kda_copy_fence();
    });
    if (lane % (KDA_LANES / C) == 0)
        p.o[((int64_t)piece.seg.row * p.n_head + piece.head) * KDA_D_FAST + piece.part * RING_COLUMNS + column[0]] = o;
}

static __global__ void __launch_bounds__(RING_BLOCK, RING_BLOCKS) kda_decode_ring(kda_launch p, int n_piece) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t slots = kda_shared(memory), barriers = slots + RING_SLOTS * RING_SLOT;
    const int step = (int)gridDim.x;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING_SLOTS; i++)
            kda_barrier_init(barriers + 8 * i, 1);
        kda_barrier_publish();
        for (int i = 0; i < RING_SLOTS - 2 && (int)blockIdx.x + i * step < n_piece; i++)
            ring_fetch(p, piece_of(p, (int)blockIdx.x + i * step), slots + i * RING_SLOT, barriers + 8 * i);
    }
    __syncthreads();
    uint32_t slot = 0, ahead = RING_SLOTS - 2, phases = 0;
    for (int i = (int)blockIdx.x; i < n_piece; i += step) {
        if (threadIdx.x == 0) {
            /* The piece before may still be on its way back; the one before that has left its slot. This comes first: with the reads of
             * the own piece before it a step took 5 % longer. */
            kda_copies_out_but<1>();
            if (i + (RING_SLOTS - 2) * step < n_piece)
                ring_fetch(p, piece_of(p, i + (RING_SLOTS - 2) * step), slots + ahead * RING_SLOT, barriers + 8 * ahead);
        }
        const ring_piece piece = piece_of(p, i);
        if (piece.seg.n_row == 1) {
            const float beta = p.beta[(int64_t)piece.seg.row * p.n_head + piece.head];
            kda_wait(barriers + 8 * slot, phases >> slot & 1);
            phases ^= 1u << slot;
            ring_run(p, piece, memory + slot * RING_SLOT, beta);
            __syncthreads();
            if (threadIdx.x == 0)
                kda_copy_out(piece_state(p, piece), slots + slot * RING_SLOT, RING_STATE);
        }
        if (threadIdx.x == 0)
            kda_copies_out_commit();
        slot = slot + 1 == RING_SLOTS ? 0 : slot + 1;
        ahead = ahead + 1 == RING_SLOTS ? 0 : ahead + 1;
    }
    if (threadIdx.x == 0)
        kda_copies_out_done();
}

br_status bi_kda_decode_fast(bi_ctx *ctx, const kda_launch *p) {
    const int64_t n_piece = (int64_t)p->n_seg * p->n_head * RING_PER_HEAD, n_block = (int64_t)RING_BLOCKS * ctx->n_sm;
    if (n_piece < RING_FLOOR * n_block || n_piece > INT32_MAX / 2) {
        const dim3 grid((unsigned)(p->n_head * DECODE_PER_HEAD), (unsigned)(p->n_seg < KDA_GRID_Y_MAX ? p->n_seg : KDA_GRID_Y_MAX));
        bi_cuda_launch(ctx, kda_decode, grid, DECODE_BLOCK, 0, *p);
        return bi_cuda_launched(ctx, BI_K_kda_decode, "kda");
    }
    if (cudaFuncSetAttribute(kda_decode_ring, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES) != cudaSuccess)
        return br_fail(BR_E_DEVICE, "kda: the GPU refused %d bytes of shared memory: expected an H100 or H200", RING_BYTES);
    bi_cuda_launch(ctx, kda_decode_ring, (unsigned)n_block, RING_BLOCK, RING_BYTES, *p, (int)n_piece);
    return bi_cuda_launched(ctx, BI_K_kda_decode_ring, "kda");
}
