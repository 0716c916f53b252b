/* bi_attn_score_wide: the first pass of attention on wgmma, for steps that fill the GPU.      Contract: N-ATT-1, N-ATT-3, N-SUM-2
 *
 * Grid: (row, SPAN classes, group of 8 * N8 heads), one a block of three warpgroups; see bi_attn_wide.cuh. A computing warpgroup takes every
 * other class of the span, all heads of the group: while one is at its exponentials, the other has the tensor cores. Shared memory: the
 * queries, 128 bytes a head and chunk of 64 columns, swizzled; one block of 64 latent rows in the same form, in whose chunks the blocks of
 * the two warpgroups follow each other; for each of them the weights of a block on their way out and partial results of a head. A chunk
 * has a `full` barrier for each warpgroup, so that neither has to see the other's blocks come and go.
 * S^T = K q^T as m64 n(8 * N8) k16, one accumulator over all columns in rising 16s. M is dealt out by the bits of the entry's number j,
 * which SUM64 folds from bit 5 down: bit 5 is the eight of a warp's 16 rows, bit 4 the upper or lower two warps, bits 3..1 the row in the
 * eight (shuffles), bit 0 the odd or even warp. Out: as bi_attn_score.cuh. */
#ifndef BI_ATTN_SCORE_WIDE_CUH
#define BI_ATTN_SCORE_WIDE_CUH

#include "bi_attn_score.cuh"
#include "bi_attn_wide.cuh"

enum { SWIDE_CHUNKS_MAX = 9 /* of columns: a stage each */ };

template <int N8>
struct score_wide_shared {
    enum {
        HEADS = 8 * N8,
        P_BYTES = HEADS * ATTN_P_BYTES,
        FLOATS = (7 + 16) * HEADS /* of a warpgroup */
    };
    unsigned char *q, *stage, *weight;
    float *top, *sum, *m, *half; /* (4 warps, HEADS), (2, HEADS), (HEADS); (2 warps, 2 * N8, 32 lanes): these and weight: this warpgroup's */
    attn_class *classes;
    uint64_t *full, *empty; /* (2 warpgroups, SWIDE_CHUNKS_MAX), (SWIDE_CHUNKS_MAX) */
    static size_t bytes(int32_t n_chunk) {
        return (size_t)n_chunk * HEADS * 128 + (size_t)n_chunk * WIDE_CHUNK_BYTES + 3 * SWIDE_CHUNKS_MAX * sizeof(uint64_t) +
               2 * (P_BYTES + FLOATS * sizeof(float)) +
               BI_ATT_CLASSES * sizeof(attn_class);
    }
#ifdef __CUDACC__
    __device__ __forceinline__ score_wide_shared(unsigned char *base, int32_t n_chunk, int group) {
        q = base;
        stage = q + (size_t)n_chunk * HEADS * 128;
        base = stage + n_chunk * WIDE_CHUNK_BYTES;
        weight = base + group * P_BYTES;
        base += 2 * P_BYTES;
        full = (uint64_t *)base;
        empty = full + 2 * SWIDE_CHUNKS_MAX;
        base = (unsigned char *)(empty + SWIDE_CHUNKS_MAX);
        top = (float *)base + group * FLOATS;
        sum = top + 4 * HEADS;
        m = sum + 2 * HEADS;
        half = m + HEADS;
        classes = (attn_class *)((float *)base + 2 * FLOATS);
    }
#endif
};

#ifdef __CUDACC__

static __device__ __forceinline__ int score_wide_entry(int row_of_64) {
    return (row_of_64 >> 3 & 1) * 32 + (row_of_64 >> 5) * 16 + (row_of_64 & 7) * 2 + (row_of_64 >> 4 & 1);
}

/* exp of x <= 0, or of a NaN (then anything): bi_exp without what only larger arguments need. p * 2^n is rounded once there and here,
 * because p * 2^(n + 64) is exact. */
static __device__ __forceinline__ float score_wide_exp(float x) {
    const float magic = 0x1.80008p+23f; /* BI_FN_ROUND_MAGIC + 64 */
    x = x > BI_FN_EXP_MIN ? x : BI_FN_EXP_MIN;
    const float shifted = BI_FMA(x, BI_FN_LOG2E, magic), fn = BI_SUB(shifted, magic);
    const float exact = BI_FMA(fn, -BI_FN_LN2_HI, x);
    const float r = BI_FMA(fn, -BI_FN_LN2_LO, exact), r_low = BI_FMA(fn, -BI_FN_LN2_LO, BI_SUB(exact, r));
    float q = BI_FMA(BI_FN_E4, r, BI_FN_E3);
    q = BI_FMA(q, r, BI_FN_E2);
    q = BI_FMA(q, r, BI_FN_E1);
    q = BI_FMA(q, r, BI_FN_E0);
    const float p = BI_ADD(1.0f, BI_ADD(r, BI_FMA(BI_MUL(r, r), q, r_low)));
    return BI_MUL(bi_f32_of(bi_u32_of(p) + (bi_u32_of(shifted) << 23)), 0x1p-64f);
}

/* The n classes of a block of the grid, the last one first: what the second pass reads first is what the L2 has seen last. */
struct score_wide_span {
    int32_t first, step, n;

    __device__ __forceinline__ int32_t id(int32_t i) const {
        return first + step * (n - 1 - i);
    }
};

/* The blocks of a span in the order of the ring: those of the two warpgroups in turn, then what one has more. */
struct score_wide_order {
    int32_t n0, n1; /* blocks of each */

    __device__ __forceinline__ score_wide_order(const attn_class *classes, int32_t span) {
        n0 = n1 = 0;
        for (int32_t c = 0; c < span; c += 2) {
            n0 += (classes[c].n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK;
            n1 += (classes[c + 1].n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK;
        }
    }
    /* Whose turn it is. */
    __device__ __forceinline__ int group(int32_t turn) const {
        return turn < 2 * (n0 < n1 ? n0 : n1) ? turn & 1 : n1 > n0;
    }
};

/* Units of four rows of a chunk; on to the next chunk. */
static __device__ __forceinline__ void score_wide_copy(wide_rows &rows, uint32_t to) {
    wide_copy<0, 0>(to, rows);
    wide_copy<1, 0>(to, rows);
    wide_copy<2, 0>(to, rows);
    wide_copy<3, 0>(to, rows);
    for (int i = 0; i < 4; i++)
        rows.from[i] += 128;
}

/* The feeding warpgroup. A thread copies units of four rows; it fetches the ids of the next block while this one is copied. own: whose the
 * block is that `next` has the ids of. */
template <int N8>
static __device__ __forceinline__ void score_wide_feed(const attn_rows &r, int32_t t, int32_t seq, score_wide_span span, int32_t n_chunk,
                                                       const score_wide_shared<N8> &sh, int tid) {
    const score_wide_order order(sh.classes, span.n);
    wide_place at0 = {0, 0, span.n}, at1 = {1, 0, span.n};
    const int whole = r.wide && n_chunk * 8 == r.row_ld / ATTN_UNIT;
    const int32_t entry = score_wide_entry(tid / 8), place0 = attn_swizzle(tid / 8, tid % 8, 128);
    int32_t next[4] = {-1, -1, -1, -1}, own = 0;
    for (int32_t turn = -1, n = order.n0 + order.n1; turn < n; turn++) {
        const int32_t id[4] = {next[0], next[1], next[2], next[3]};
        const int reader = own;
        wide_rows rows;
        rows.set(r, id, tid % 8);
        if (turn + 1 < n) {
            own = order.group(turn + 1);
            wide_place now;
            now.c = own ? at1.c : at0.c;
            now.b = own ? at1.b : at0.b;
            now.end = span.n;
            now.settle(sh.classes, 2);
            for (int i = 0; i < 4; i++)
                next[i] = attn_entry(r, t, seq, sh.classes[now.c], span.id(now.c), now.b * BI_ATT_BLOCK + entry + score_wide_entry(16 * i));
            now.b++;
            at0.c = own ? at0.c : now.c;
            at0.b = own ? at0.b : now.b;
            at1.c = own ? now.c : at1.c;
            at1.b = own ? now.b : at1.b;
        }
        for (int32_t chunk = 0; chunk < n_chunk && turn >= 0; chunk++) {
            if (turn)
                wide_wait(&sh.empty[chunk], (uint32_t)(turn - 1) & 1);
            unsigned char *to = sh.stage + chunk * WIDE_CHUNK_BYTES + place0;
            for (int i = 0; i < 4 && !whole; i++)
                attn_copy_unit(r, to + i * 2 * WIDE_ATOM, attn_row_at(r, id[i]), chunk * 8 + tid % 8);
            if (whole)
                score_wide_copy(rows, attn_shared(to));
            wide_arrive_copied(&sh.full[reader * SWIDE_CHUNKS_MAX + chunk]);
        }
    }
    attn_copy_commit();
    attn_copy_wait<0>();
}

/* One step of a fold over the eight rows: of n values a head, a lane keeps the half that its bit says and hands over the other. */
template <int N, int LARGEST>
static __device__ __forceinline__ void score_wide_halve(float *x, int bit, int lane) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float keep = lane & bit ? x[N / 2 + i] : x[i], give = lane & bit ? x[i] : x[N / 2 + i];
        const float other = __shfl_xor_sync(0xffffffffu, give, bit);
        x[i] = LARGEST ? score_larger(keep, other) : BI_ADD(keep, other);
    }
}

/* Folds x (2 * N8: column by eight of heads) over the eight rows of a warp, bit 2 of the row first; lanes keep N8 / 4 results each. */
template <int N8, int LARGEST>
static __device__ __forceinline__ void score_wide_fold(float *x, float *out, int lane) {
    enum { LEFT = N8 / 4 };
    score_wide_halve<2 * N8, LARGEST>(x, 16, lane);
    score_wide_halve<N8, LARGEST>(x, 8, lane);
    score_wide_halve<N8 / 2, LARGEST>(x, 4, lane);
    const int first = (lane & 16 ? N8 : 0) + (lane & 8 ? N8 / 2 : 0) + (lane & 4 ? LEFT : 0);
#pragma unroll
    for (int i = 0; i < LEFT; i++)
        out[(first + i) / 2 * 8 + (lane & 3) * 2 + (first + i) % 2] = x[i];
}

/* s = RN(alpha * acc) in place, -Inf for what is absent; m of the class by the thread of a head, which also has f for the second pass.
 * Returns 1 when a score is not finite. Heads past the last are zeros and absent rows too: they are not finite only when what they meet is
 * not, and that meets what exists as well. */
template <int N8>
static __device__ __forceinline__ int score_wide_top(float (&acc)[N8][4], float alpha, int n, int first, float2 &stat, float *f,
                                                     const score_wide_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32, entry = score_wide_entry(warp * 16 + (lane >> 2));
    float most[2 * N8];
    float zero = 0.0f;
#pragma unroll
    for (int j = 0; j < N8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float s = BI_MUL(alpha, acc[j][i]);
            zero = BI_FMA(s, 0.0f, zero);
            s = entry + i / 2 * 32 < n ? s : bi_f32_of(0xff800000u);
            acc[j][i] = s;
            most[2 * j + i % 2] = i < 2 ? s : score_larger(most[2 * j + i % 2], s);
        }
    }
    score_wide_fold<N8, 1>(most, sh.top + warp * HEADS, lane);
    wide_sync(group + 1, WIDE_GROUP);
    if (tid < HEADS) {
        const float *own = sh.top + tid;
        const float block = score_larger(score_larger(own[0], own[HEADS]), score_larger(own[2 * HEADS], own[3 * HEADS]));
        const float top = first ? block : score_larger(stat.x, block);
        *f = first ? 0.0f : bi_exp(BI_SUB(stat.x, top));
        sh.m[tid] = stat.x = top;
    }
    wide_sync(group + 1, WIDE_GROUP);
    return bi_is_nan(zero);
}

/* e = exp(RN(s - m)), R(e) to shared memory, and the folds of SUM64 down to two values a head. */
template <int N8>
static __device__ __forceinline__ void score_wide_weigh(float (&acc)[N8][4], const score_wide_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32, matrix = lane >> 3;
    float p[2 * N8];
#pragma unroll
    for (int j = 0; j < N8; j++) {
        const float2 m = *(const float2 *)(sh.m + j * 8 + (lane & 3) * 2);
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[j][i] = score_wide_exp(BI_SUB(acc[j][i], i % 2 ? m.y : m.x));
        p[2 * j] = BI_ADD(acc[j][0], acc[j][2]);
        p[2 * j + 1] = BI_ADD(acc[j][1], acc[j][3]);
    }
#pragma unroll
    for (int j = 0; j < N8; j += 2) {
        const uint32_t pair[4] = {wide_pair(acc[j][0], acc[j][1]), wide_pair(acc[j][2], acc[j][3]), wide_pair(acc[j + 1][0], acc[j + 1][1]),
                                  wide_pair(acc[j + 1][2], acc[j + 1][3])};
        const int head = (j + (matrix >> 1)) * 8 + (lane & 7), unit = (matrix & 1) * 4 + (warp >> 1) * 2 + (warp & 1);
        wide_store_trans(sh.weight + attn_swizzle(head, unit, ATTN_P_BYTES), pair);
    }
    float *half = sh.half + (warp & 1) * 2 * N8 * 32 + lane;
#pragma unroll
    for (int i = 0; i < 2 * N8 && warp >= 2; i++)
        half[i * 32] = p[i];
    wide_sync(group + 1, WIDE_GROUP);
    if (warp >= 2)
        return;
#pragma unroll
    for (int i = 0; i < 2 * N8; i++)
        p[i] = BI_ADD(p[i], half[i * 32]);
    score_wide_fold<N8, 0>(p, sh.sum + warp * HEADS, lane);
}

/* The scores of a block before alpha. A chunk goes back to the feeders when the products after it have begun. */
template <int N8>
static __device__ __forceinline__ void score_wide_mma(float (&acc)[N8][4], int32_t n_chunk, uint32_t parity, const score_wide_shared<N8> &sh,
                                                      int group, int lane) {
    for (int32_t chunk = 0; chunk < n_chunk; chunk++) {
        const uint64_t from = wide_matrix(sh.stage + chunk * WIDE_CHUNK_BYTES), by = wide_matrix(sh.q + (size_t)chunk * 8 * N8 * 128);
        wide_wait(&sh.full[group * SWIDE_CHUNKS_MAX + chunk], parity);
        wide_mma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) /* 16 columns are 32 bytes */
            wide_mma<0>(acc, from + (uint64_t)(i * 2), by + (uint64_t)(i * 2), chunk || i);
        wide_mma_commit();
        wide_mma_wait<1>();
        if (chunk && lane == 0)
            wide_arrive(&sh.empty[chunk - 1]);
    }
    wide_mma_wait<0>();
    if (lane == 0)
        wide_arrive(&sh.empty[n_chunk - 1]);
}

/* This warpgroup's blocks. */
template <int N8>
static __device__ __forceinline__ int score_wide_compute(const attn_rows &r, const attn_query &a, int32_t t, int32_t head0, score_wide_span span,
                                                         const score_wide_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    wide_place at = {group, 0, span.n};
    float2 stat = make_float2(0.0f, 0.0f);
    int bad = 0;
    at.settle(sh.classes, 2);
    for (int32_t i = 0; !at.done(); i++) {
        const attn_class k = sh.classes[at.c];
        const int32_t left = k.n - at.b * BI_ATT_BLOCK, n = left < BI_ATT_BLOCK ? left : BI_ATT_BLOCK;
        const int64_t place = ((int64_t)t * r.n_block_max + k.block + at.b) * r.n_head_pad + head0;
        float acc[N8][4], f = 0.0f;
        score_wide_mma<N8>(acc, a.n_chunk, (uint32_t)i & 1, sh, group, tid % 32);
        bad |= score_wide_top<N8>(acc, a.alpha, n, at.b == 0, stat, &f, sh, group, tid);
        score_wide_weigh<N8>(acc, sh, group, tid);
        wide_sync(group + 1, WIDE_GROUP);
#pragma unroll
        for (int j = tid; j < HEADS * ATTN_P_BYTES / 16; j += WIDE_GROUP)
            *(uint4 *)(r.weight + place * ATTN_P_BYTES + j * 16) = *(const uint4 *)(sh.weight + j * 16);
        if (tid < HEADS) {
            const float sum = BI_ADD(sh.sum[tid], sh.sum[HEADS + tid]);
            stat.y = at.b ? BI_FMA(stat.y, f, sum) : sum;
            r.scale[place + tid] = f;
        }
        if (left <= BI_ATT_BLOCK && tid < HEADS)
            r.stat[((int64_t)t * BI_ATT_CLASSES + span.id(at.c)) * r.n_head_pad + head0 + tid] = stat;
        at.b++;
        at.settle(sh.classes, 2);
    }
    return bad;
}

template <int N8>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) attn_score_wide(attn_rows r, attn_query a, int32_t n_class) {
    enum { HEADS = 8 * N8 };
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const int tid = (int)threadIdx.x % WIDE_GROUP, group = (int)threadIdx.x / WIDE_GROUP;
    const score_wide_shared<N8> sh(attn_shared_bytes, a.n_chunk, group & 1);
    const int32_t n_group = r.n_head_pad / HEADS, unit = (int32_t)blockIdx.x, head0 = unit % n_group * HEADS, n_span = BI_ATT_CLASSES / n_class;
    const int32_t t = unit / n_group / n_span, row = r.row0 + t;
    const score_wide_span span = {unit / n_group % n_span, n_span, n_class};
    attn_let_next();
    if (r.row_seg[row] < 0)
        return;
    const bi_seg seg = r.seg[r.row_seg[row]];
    if (group == 2)
        attn_wait_before(); /* the lists; queries and what else is read here are older than they */
    if ((int)threadIdx.x - 2 * WIDE_GROUP >= 0 && tid < n_class)
        sh.classes[tid] = attn_class_of(r, t, seg.pos + row - seg.row + 1, span.id(tid));
    if (threadIdx.x < SWIDE_CHUNKS_MAX) {
        wide_bar_init(&sh.full[threadIdx.x], WIDE_GROUP);
        wide_bar_init(&sh.full[SWIDE_CHUNKS_MAX + threadIdx.x], WIDE_GROUP);
        wide_bar_init(&sh.empty[threadIdx.x], WIDE_GROUP / 32); /* a block has one reader */
        wide_bar_init_done();
    }
    if (group < 2) {
        score_load_query<HEADS, 1>(r, a, row, head0, sh.q);
        attn_copy_commit();
        attn_copy_wait<0>();
        wide_publish();
    }
    __syncthreads();
    if (group == 2) {
        score_wide_feed<N8>(r, t, seg.seq, span, a.n_chunk, sh, tid);
        return;
    }
    if (score_wide_compute<N8>(r, a, t, head0, span, sh, group, tid))
        bi_cuda_fault(a.fault, row, bi_f32_of(BI_F32_INF));
}

#endif
#endif
