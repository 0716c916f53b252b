/* bi_attn_score_wide: the first pass of attention on wgmma, for steps that fill the GPU.      Contract: N-ATT-1, N-ATT-3, N-SUM-2
 *
 * Grid: (row, SPAN classes, group of 8 * N8 heads), two warpgroups a block. A warpgroup takes every other class of the span, all heads of
 * the group, and keeps its own time: while one is at its exponentials, the other has the tensor cores. Shared memory: the queries,
 * 128 bytes a head and chunk of 64 columns, swizzled; for each warpgroup a ring of WIDE_STAGES chunks of 64 latent rows in the same form,
 * the weights of a block on their way out, and partial results of a head.
 * S^T = K q^T as m64 n(8 * N8) k16, one accumulator over all columns in rising 16s. M is dealt out by the bits of the entry's number
 * j, which SUM64 folds from bit 5 down: bit 5 is the eight of a warp's 16 rows, bits 4..2 the row in it (shuffles), bits 1 and 0 the
 * warp (shared memory, by the thread that keeps m and l). Out: as bi_attn_score.cuh. */
#ifndef BI_ATTN_SCORE_WIDE_CUH
#define BI_ATTN_SCORE_WIDE_CUH

#include "bi_attn_score.cuh"

enum { WIDE_GROUP = 128, WIDE_STAGES = 5, WIDE_AHEAD = WIDE_STAGES - 2, WIDE_ATOM = 1024 };

static inline size_t attn_score_wide_shared(int32_t heads, int32_t n_chunk) {
    return (size_t)heads * (size_t)n_chunk * 128 +
           2 * (WIDE_STAGES * SCORE_STAGE_BYTES + (size_t)heads * (ATTN_P_BYTES + 9 * sizeof(float))) + BI_ATT_CLASSES * sizeof(attn_class);
}

#ifdef __CUDACC__

template <int N8>
struct wide_shared {
    enum { HEADS = 8 * N8 };
    unsigned char *q, *stage, *weight; /* stage, weight and the arrays below: this warpgroup's */
    float *top, *sum, *m;              /* (4 warps, HEADS), (4 warps, HEADS), (HEADS) */
    attn_class *classes;
    __device__ __forceinline__ wide_shared(unsigned char *base, int32_t n_chunk, int group) {
        q = base;
        base += (size_t)n_chunk * HEADS * 128;
        stage = base + group * WIDE_STAGES * SCORE_STAGE_BYTES;
        base += 2 * WIDE_STAGES * SCORE_STAGE_BYTES;
        weight = base + group * HEADS * ATTN_P_BYTES;
        base += 2 * HEADS * ATTN_P_BYTES;
        top = (float *)base + group * 9 * HEADS;
        sum = top + 4 * HEADS;
        m = sum + 4 * HEADS;
        classes = (attn_class *)((float *)base + 2 * 9 * HEADS);
    }
};

static __device__ __forceinline__ void wide_sync(int group) {
    asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");
}

/* What this thread wrote to shared memory is seen by the tensor cores of whoever meets it at a barrier. */
static __device__ __forceinline__ void wide_publish(void) {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/* Rows of 128 bytes, eights of rows 1,024 bytes apart, units swizzled by 128 bytes. */
static __device__ __forceinline__ uint64_t wide_matrix(const void *at) {
    return (uint64_t)(attn_shared(at) >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(WIDE_ATOM >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ __forceinline__ void wide_mma_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_mma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int N>
static __device__ __forceinline__ void wide_mma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

#define WIDE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

/* d (64 entries, 8 * N8 heads) = k (64, 16) x q (8 * N8, 16)^T, plus d where `keep`. */
static __device__ __forceinline__ void wide_mma(float (&d)[12][4], uint64_t k, uint64_t q, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
                 "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "
                 "%48, %49, p, 1, 1, 0, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3), WIDE_D4(4), WIDE_D4(5), WIDE_D4(6), WIDE_D4(7), WIDE_D4(8), WIDE_D4(9),
                   WIDE_D4(10), WIDE_D4(11)
                 : "l"(k), "l"(q), "r"(keep));
}

static __device__ __forceinline__ void wide_mma(float (&d)[4][4], uint64_t k, uint64_t q, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "%16, %17, p, 1, 1, 0, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3)
                 : "l"(k), "l"(q), "r"(keep));
}
#undef WIDE_D4

static __device__ __forceinline__ int wide_entry_of_row(int p) {
    return (p >> 3 & 1) * 32 + (p & 7) * 4 + (p >> 4);
}

/* A block of a class of this warpgroup: block b of class c; c >= end: none is left. */
struct wide_place {
    int32_t c, b, end;

    __device__ __forceinline__ void settle(const attn_class *classes) {
        while (c < end && b * BI_ATT_BLOCK >= classes[c].n) {
            c += 2;
            b = 0;
        }
    }
    __device__ __forceinline__ int done(void) const {
        return c >= end;
    }
};

/* Feeds a warpgroup's ring. A thread copies one unit of four rows; it fetches the ids of the next block while this one is copied. */
struct wide_feed {
    wide_place ahead; /* of which `next` holds the ids */
    int32_t chunk, next[4];
    const unsigned char *from[4];

    __device__ __forceinline__ void fetch(const attn_rows &r, int32_t t, int32_t seq, const attn_class *classes, int tid) {
        ahead.settle(classes);
        for (int i = 0; i < 4 && !ahead.done(); i++)
            next[i] = attn_entry(r, t, seq, classes[ahead.c], ahead.c, ahead.b * BI_ATT_BLOCK + wide_entry_of_row(tid / 8 + 16 * i));
    }

    /* Always one group. chunk counts through a block; between blocks it is 0 and the next block's ids are waiting. */
    __device__ __forceinline__ void step(const attn_rows &r, int32_t t, int32_t seq, const attn_class *classes, int32_t n_chunk,
                                         unsigned char *stage, int tid) {
        if (chunk || !ahead.done()) {
            if (chunk == 0) {
                for (int i = 0; i < 4; i++)
                    from[i] = attn_row_at(r, next[i]);
                ahead.b++;
                fetch(r, t, seq, classes, tid);
            }
            for (int i = 0; i < 4; i++)
                attn_copy_unit(r, stage + attn_swizzle(tid / 8 + 16 * i, tid % 8, 128), from[i], chunk * 8 + tid % 8);
            chunk = chunk + 1 == n_chunk ? 0 : chunk + 1;
        }
        attn_copy_commit();
    }
};

/* s = RN(alpha * acc) in place, the largest present one a warp and head, and then m of the class by the thread of a head, which also
 * has f for the second pass. Returns 1 when a score of a head that exists is not finite. */
template <int N8>
static __device__ __forceinline__ int wide_top(float acc[N8][4], float alpha, int n, int heads_left, int first, float2 &stat, float *f,
                                               const wide_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32, entry = (lane >> 2) * 4 + warp;
    int bad = 0;
#pragma unroll
    for (int j = 0; j < N8; j++) {
#pragma unroll
        for (int col = 0; col < 2; col++) {
            const int head = j * 8 + (lane & 3) * 2 + col;
            const float low = BI_MUL(alpha, acc[j][col]), high = BI_MUL(alpha, acc[j][2 + col]);
            float most = entry < n ? low : bi_f32_of(0xff800000u);
            most = entry + 32 < n ? score_larger(most, high) : most;
            acc[j][col] = low;
            acc[j][2 + col] = high;
            bad |= head < heads_left && ((entry < n && !bi_is_finite(low)) || (entry + 32 < n && !bi_is_finite(high)));
#pragma unroll
            for (int h = 16; h >= 4; h >>= 1)
                most = score_larger(most, __shfl_xor_sync(0xffffffffu, most, h));
            if (lane < 4)
                sh.top[warp * HEADS + head] = most;
        }
    }
    wide_sync(group);
    if (tid < HEADS) {
        const float *own = sh.top + tid;
        const float block = score_larger(score_larger(own[0], own[HEADS]), score_larger(own[2 * HEADS], own[3 * HEADS]));
        const float top = first ? block : score_larger(stat.x, block);
        *f = first ? 0.0f : bi_exp(BI_SUB(stat.x, top));
        sh.m[tid] = stat.x = top;
    }
    wide_sync(group);
    return bad;
}

/* e = exp(RN(s - m)), R(e) to shared memory, and the folds of SUM64 down to one value a warp. */
template <int N8>
static __device__ __forceinline__ void wide_weigh(const float acc[N8][4], int n, const wide_shared<N8> &sh, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32, entry = (lane >> 2) * 4 + warp;
#pragma unroll
    for (int j = 0; j < N8; j++) {
#pragma unroll
        for (int col = 0; col < 2; col++) {
            const int head = j * 8 + (lane & 3) * 2 + col;
            const float m = sh.m[head], low = bi_exp(BI_SUB(acc[j][col], m)), high = bi_exp(BI_SUB(acc[j][2 + col], m));
            const float e0 = entry < n ? low : 0.0f, e1 = entry + 32 < n ? high : 0.0f;
            *(bi_bf16 *)(sh.weight + attn_swizzle(head, entry >> 3, ATTN_P_BYTES) + (entry & 7) * 2) = bi_round(e0);
            *(bi_bf16 *)(sh.weight + attn_swizzle(head, (entry >> 3) + 4, ATTN_P_BYTES) + (entry & 7) * 2) = bi_round(e1);
            float p = BI_ADD(e0, e1);
#pragma unroll
            for (int h = 16; h >= 4; h >>= 1)
                p = BI_ADD(p, __shfl_xor_sync(0xffffffffu, p, h));
            if (lane < 4)
                sh.sum[warp * HEADS + head] = p;
        }
    }
}

/* The thread of a head joins the block's sum to l; all copy the block's weights out. at: of the block and the group's first head. */
template <int N8>
static __device__ __forceinline__ void wide_join(const attn_rows &r, int64_t at, int first, float2 &stat, float f, const wide_shared<N8> &sh,
                                                 int tid) {
    enum { HEADS = 8 * N8 };
    if (tid < HEADS) {
        const float *own = sh.sum + tid;
        const float sum = BI_ADD(BI_ADD(own[0], own[2 * HEADS]), BI_ADD(own[HEADS], own[3 * HEADS]));
        stat.y = first ? sum : BI_FMA(stat.y, f, sum);
        r.scale[at + tid] = f;
    }
    for (int i = tid; i < HEADS * ATTN_P_BYTES / 16; i += WIDE_GROUP)
        *(uint4 *)(r.weight + at * ATTN_P_BYTES + i * 16) = *(const uint4 *)(sh.weight + i * 16);
}

/* acc through one chunk of 64 columns, begun and not waited for. */
template <int N8>
static __device__ __forceinline__ void wide_chunk(float (&acc)[N8][4], const unsigned char *k, const unsigned char *q, int keep) {
    const uint64_t from = wide_matrix(k), by = wide_matrix(q);
    wide_mma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) /* 16 columns are 32 bytes */
        wide_mma(acc, from + 2 * (uint64_t)i, by + 2 * (uint64_t)i, keep || i);
    wide_mma_commit();
}

template <int N8>
static __global__ void __launch_bounds__(2 * WIDE_GROUP, 1) attn_score_wide(const attn_rows r, const attn_query a, const int32_t span) {
    enum { HEADS = 8 * N8 };
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const int tid = (int)threadIdx.x % WIDE_GROUP, group = (int)threadIdx.x / WIDE_GROUP;
    const wide_shared<N8> sh(attn_shared_bytes, a.n_chunk, group);
    const int32_t n_group = r.n_head_pad / HEADS, unit = (int32_t)blockIdx.x, head0 = unit % n_group * HEADS, n_span = BI_ATT_CLASSES / span;
    const int32_t c0 = unit / n_group % n_span * span, t = unit / n_group / n_span, row = r.row0 + t;
    if (r.row_seg[row] < 0)
        return;
    const bi_seg seg = r.seg[r.row_seg[row]];
    if (threadIdx.x < BI_ATT_CLASSES)
        sh.classes[threadIdx.x] = attn_class_of(r, t, seg.pos + row - seg.row + 1, (int32_t)threadIdx.x);
    __syncthreads();
    wide_place at = {c0 + group, 0, c0 + span};
    wide_feed feed = {at, 0, {-1, -1, -1, -1}, {NULL, NULL, NULL, NULL}};
    feed.fetch(r, t, seg.seq, sh.classes, tid);
    for (int s = 0; s < WIDE_AHEAD; s++)
        feed.step(r, t, seg.seq, sh.classes, a.n_chunk, sh.stage + s * SCORE_STAGE_BYTES, tid);
    score_load_query<HEADS>(r, a, row, head0, sh.q);
    wide_publish();
    __syncthreads();
    float2 stat = make_float2(0.0f, 0.0f);
    int bad = 0;
    int32_t step = 0;
    for (at.settle(sh.classes); !at.done(); at.settle(sh.classes)) {
        const attn_class k = sh.classes[at.c];
        const int32_t left = k.n - at.b * BI_ATT_BLOCK, n = left < BI_ATT_BLOCK ? left : BI_ATT_BLOCK;
        const int64_t place = ((int64_t)t * r.n_block_max + k.block + at.b) * r.n_head_pad + head0;
        float acc[N8][4], f = 0.0f;
        for (int32_t chunk = 0; chunk < a.n_chunk; chunk++, step++) {
            attn_copy_wait<WIDE_AHEAD - 1>();
            wide_publish();
            wide_sync(group);
            wide_chunk<N8>(acc, sh.stage + step % WIDE_STAGES * SCORE_STAGE_BYTES, sh.q + (size_t)chunk * HEADS * 128, chunk > 0);
            feed.step(r, t, seg.seq, sh.classes, a.n_chunk, sh.stage + (step + WIDE_AHEAD) % WIDE_STAGES * SCORE_STAGE_BYTES, tid);
            wide_mma_wait<1>(); /* the chunk before is done with its stage, for all warps from the next barrier on */
        }
        wide_mma_wait<0>();
        bad |= wide_top<N8>(acc, a.alpha, n, r.n_head - head0, at.b == 0, stat, &f, sh, group, tid);
        wide_weigh<N8>(acc, n, sh, tid);
        wide_sync(group);
        wide_join<N8>(r, place, at.b == 0, stat, f, sh, tid);
        if (left <= BI_ATT_BLOCK && tid < HEADS)
            r.stat[((int64_t)t * BI_ATT_CLASSES + at.c) * r.n_head_pad + head0 + tid] = stat;
        at.b++;
    }
    if (bad)
        bi_cuda_fault(a.fault, row, bi_f32_of(BI_F32_INF));
}

#endif
#endif
