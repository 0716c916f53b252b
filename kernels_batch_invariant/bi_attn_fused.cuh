/* bi_attn_fused: the wide form of attention: scores, weights and values in one pass over a part.      Contract: N-ATT-1, N-ATT-3
 *
 * For latents of 512 + 64 columns. Grid: as many blocks as there are SMs, each of five warpgroups; a block goes through units, a unit
 * being (row, part, group of 8 * N8 heads). Shared memory: the unit's queries and two blocks of 64 latent rows, by chunks of 64 columns of
 * 128 bytes a head or row, swizzled; R(e), f and the sum of e of two blocks; what a head's statistics take.
 *   feeding   one warpgroup: latents, queries, and what the unit is (`info`)
 *   scoring   two, block about: S^T = K q^T as m64 n(8 * N8) k16, one accumulator over all columns in rising 16s; an entry is a row of M,
 *             so a sixteen of N-ATT-3's sum is a warp's, folded in registers and by shuffles, and the four are added by the head's thread.
 *             m passes from one warpgroup to the other with every block
 *   values    two, chunk of columns about: acc^T = c^T R(e)^T, columns on M, heads on N, entries on K in rising 16s, four tiles of 64
 *             columns in registers, scaled by f before each block but a part's first; l by the head's thread
 * A chunk goes back to the feeders when the values have been through it, that of the last 64 columns when the scores have. All counts of
 * blocks run on from unit to unit: block b is scored by warpgroup b % 2 from half b % 2 of the ring. */
#ifndef BI_ATTN_FUSED_CUH
#define BI_ATTN_FUSED_CUH

#include "bi_attn_score.cuh"
#include "bi_attn_wide.cuh"

enum {
    FUSED_THREADS = 5 * WIDE_GROUP,
    FUSED_KV = 512,
    FUSED_ROPE = 64,
    FUSED_ROW_BYTES = (FUSED_KV + FUSED_ROPE) * (int)sizeof(bi_bf16),
    FUSED_CHUNKS = (FUSED_KV + FUSED_ROPE) / ATTN_CHUNK,
    FUSED_TILES = FUSED_KV / ATTN_CHUNK / 2, /* of a warpgroup */
    FUSED_BLOCK_BYTES = FUSED_CHUNKS * WIDE_CHUNK_BYTES,
    FUSED_INFO = 8                           /* units known ahead: scores are never so far ahead of values */
};

template <int N8>
struct fused_shared {
    enum {
        HEADS = 8 * N8,
        Q_CHUNK = HEADS * 128,
        P_BYTES = HEADS * ATTN_P_BYTES,
        FLOATS = (2 + 2 + 2 + 8 + 8 + 4) * HEADS,
        BARRIERS = 4 * FUSED_CHUNKS + 2 + 8 + FUSED_INFO,
        BYTES = 2 * FUSED_BLOCK_BYTES + FUSED_CHUNKS * Q_CHUNK + 2 * P_BYTES + FLOATS * 4 + FUSED_INFO * 16 + BARRIERS * 8
    };
    unsigned char *ring, *q, *weight; /* (2, chunks), (chunks), (2) */
    float *scale, *sum, *m;           /* (2, HEADS) of a block: f, sum of e, m */
    float *top, *fold;                /* (2 warpgroups, 4 warps, HEADS) */
    float *inverse;                   /* (2 units, 2 warpgroups, HEADS) */
    int4 *info;                       /* (FUSED_INFO) unit, entries, several; no entries: the end */
    uint64_t *full, *empty;           /* (2, FUSED_CHUNKS) */
    uint64_t *q_full, *q_empty, *p_full, *p_empty, *m_full, *sum_full, *info_full;
#ifdef __CUDACC__
    __device__ __forceinline__ explicit fused_shared(unsigned char *base) {
        ring = base;
        q = ring + 2 * FUSED_BLOCK_BYTES;
        weight = q + FUSED_CHUNKS * Q_CHUNK;
        scale = (float *)(weight + 2 * P_BYTES);
        sum = scale + 2 * HEADS;
        m = sum + 2 * HEADS;
        top = m + 2 * HEADS;
        fold = top + 8 * HEADS;
        inverse = fold + 8 * HEADS;
        info = (int4 *)(inverse + 4 * HEADS);
        full = (uint64_t *)(info + FUSED_INFO);
        empty = full + 2 * FUSED_CHUNKS;
        q_full = empty + 2 * FUSED_CHUNKS;
        q_empty = q_full + 1;
        p_full = q_empty + 1;
        p_empty = p_full + 2;
        m_full = p_empty + 2;
        sum_full = m_full + 2;
        info_full = sum_full + 2;
    }
    /* By one thread. */
    __device__ __forceinline__ void init(void) const {
        for (int i = 0; i < 2 * FUSED_CHUNKS; i++) {
            wide_bar_init(&full[i], WIDE_GROUP);
            wide_bar_init(&empty[i], WIDE_GROUP / 32); /* a chunk has one last reader */
        }
        wide_bar_init(q_full, WIDE_GROUP);
        wide_bar_init(q_empty, 2 * WIDE_GROUP / 32);
        for (int i = 0; i < 2; i++) {
            wide_bar_init(&p_full[i], WIDE_GROUP / 32);
            wide_bar_init(&sum_full[i], 2);
            wide_bar_init(&p_empty[i], 2 * WIDE_GROUP / 32);
            wide_bar_init(&m_full[i], 2);
        }
        for (int i = 0; i < FUSED_INFO; i++)
            wide_bar_init(&info_full[i], 1);
        wide_bar_init_done();
    }
#endif
};

#ifdef __CUDACC__

/* exp of x <= 0, or of a NaN (then anything): bi_exp without what only larger arguments need. p * 2^n is rounded once there and here,
 * because p * 2^(n + 64) is exact. */
static __device__ __forceinline__ float fused_exp(float x) {
    const float magic = 0x1.80008p+23f; /* BI_FN_ROUND_MAGIC + 64 */
    x = fmaxf(x, BI_FN_EXP_MIN);
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

/* The larger of two: which zero comes out of +0 and -0 moves no bit of exp(s - m), and a NaN ends the row anyway. */
static __device__ __forceinline__ float fused_larger(float a, float b) {
    return fmaxf(a, b);
}

/* What a unit of the grid is. */
struct fused_unit {
    int32_t t, part, head0, row;

    __device__ __forceinline__ fused_unit(const attn_rows &r, int32_t unit, int32_t heads) {
        const int32_t n_group = r.n_head_pad / heads;
        head0 = unit % n_group * heads;
        part = r.part0 + unit / n_group % r.n_part;
        t = unit / n_group / r.n_part;
        row = r.row0 + t;
    }
};

static __device__ __forceinline__ int32_t fused_units(const attn_rows &r, int32_t heads) {
    return r.n_row * r.n_part * (r.n_head_pad / heads);
}

/* The queries of a unit on their way, chunk by chunk; heads past the last are zeros. */
template <int N8>
static __device__ __forceinline__ void fused_query(const attn_rows &r, const attn_query &a, const fused_unit &u, const fused_shared<N8> &sh,
                                                   int tid) {
    enum { HEADS = 8 * N8 };
    const int32_t unit = tid % 8;
    for (int32_t h = tid / 8; h < HEADS; h += WIDE_GROUP / 8) {
        const int32_t head = u.head0 + h, wanted = head < r.n_head;
        const bi_bf16 *q = wanted ? a.q + ((int64_t)u.row * r.n_head + head) * FUSED_KV + unit * ATTN_UNIT : a.q;
        const bi_bf16 *q_r = wanted ? a.q_r + u.row * a.q_r_ld + head * a.q_r_head_ld + unit * ATTN_UNIT : a.q;
        unsigned char *to = sh.q + attn_swizzle(h, unit, 128);
#pragma unroll
        for (int chunk = 0; chunk < FUSED_CHUNKS; chunk++)
            attn_copy16(to + chunk * sh.Q_CHUNK, chunk < FUSED_CHUNKS - 1 ? q + chunk * ATTN_CHUNK : q_r, wanted);
    }
}

/* A block on its way through the feeders: of which unit, and where in it; entries 0: there is none. */
struct fused_place {
    int32_t unit, at, row;
    attn_part p;

    /* On to the next block there is. */
    __device__ __forceinline__ void advance(const attn_rows &r, int32_t heads) {
        at += BI_ATT_BLOCK;
        while (at >= p.n) {
            unit += (int32_t)gridDim.x;
            p.n = at = 0;
            if (unit >= fused_units(r, heads))
                return;
            const fused_unit u(r, unit, heads);
            row = u.row;
            p = attn_part_of(r, row, u.part);
        }
    }
};

/* A warp's sixteen latent rows on their way, row w * 4 + q + 16k with lane 4k + q: the positions of a block are fetched two blocks ahead of
 * its copies, their pages one ahead, and nothing waits for a load where it is made. Past the part's end stands its last entry. */
struct fused_ahead {
    int32_t position, page, later, entry; /* entry: in the block */

    __device__ __forceinline__ void fetch_later(const attn_rows &r, const fused_place &x) {
        if (!x.p.n)
            return;
        const int32_t i = x.at + entry < x.p.n ? x.at + entry : x.p.n - 1;
        later = r.select ? r.select[(int64_t)x.row * r.select_ld + x.p.first + i] : x.p.first + i;
    }
    __device__ __forceinline__ void fetch_page(const attn_rows &r, const fused_place &x) {
        if (!x.p.n)
            return;
        position = later;
        page = attn_block_at(r.cache, x.p.seq, position / BR_PAGE_TOK);
    }
    /* The rows k / 8 + 16i of thread k, of which `left` entries on there is none. */
    __device__ __forceinline__ wide_rows rows(const attn_rows &r, int32_t left, int lane) const {
        const unsigned long long own = r.cache.block_bytes * (size_t)page + (size_t)(position % BR_PAGE_TOK * FUSED_ROW_BYTES);
        wide_rows out;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            out.from[k] = r.cache.base + lane % 8 * 16 + __shfl_sync(0xffffffffu, own, k * 4 + lane / 8);
            out.bytes[k] = 16 * k < left ? 16 : 0;
        }
        return out;
    }
};

/* Chunk CHUNK of a block, when its place is free. */
template <int N8, int CHUNK>
static __device__ __forceinline__ void fused_chunk(const fused_shared<N8> &sh, const wide_rows &rows, uint32_t to, uint32_t b) {
    const uint32_t at = b % 2 * FUSED_CHUNKS + CHUNK;
    if (b >= 2)
        wide_wait(&sh.empty[at], (b / 2 - 1) & 1);
    wide_copy<CHUNK>(to, rows);
    wide_arrive_copied(&sh.full[at]);
}

/* The feeding warpgroup. A thread copies units of four rows. */
template <int N8>
static __device__ __forceinline__ void fused_feed(const attn_rows &r, const attn_query &a, const fused_shared<N8> &sh, int tid) {
    enum { HEADS = 8 * N8 };
    const int32_t entry = tid / 8; /* the first of this thread's rows */
    uint32_t b = 0, i = 0;
    fused_place now = {(int32_t)blockIdx.x - (int32_t)gridDim.x, 0, 0, {0, 0, 0, 0}}, next;
    fused_ahead ahead = {0, 0, 0, tid / 32 * 4 + tid % 4 + tid / 4 % 4 * 16};
    now.advance(r, HEADS);
    ahead.fetch_later(r, now);
    ahead.fetch_page(r, now);
    next = now;
    next.advance(r, HEADS);
    ahead.fetch_later(r, next);
    for (; now.p.n; b++) {
        const uint32_t to = attn_shared(sh.ring + b % 2 * FUSED_BLOCK_BYTES + attn_swizzle(entry, tid % 8, 128));
        const wide_rows rows = ahead.rows(r, now.p.n - now.at - entry, tid % 32);
        ahead.fetch_page(r, next);
        if (now.at == 0) {
            if (i)
                wide_wait(sh.q_empty, (i - 1) & 1);
            if (tid == 0) {
                sh.info[i % FUSED_INFO] = make_int4(now.unit, now.p.n, now.p.several, 0);
                wide_arrive(&sh.info_full[i % FUSED_INFO]);
            }
            fused_query<N8>(r, a, fused_unit(r, now.unit, HEADS), sh, tid);
            wide_arrive_copied(sh.q_full);
            i++;
        }
        fused_chunk<N8, 8>(sh, rows, to, b); /* free before the others */
        now = next;
        next.advance(r, HEADS);
        ahead.fetch_later(r, next);
        fused_chunk<N8, 0>(sh, rows, to, b);
        fused_chunk<N8, 1>(sh, rows, to, b);
        fused_chunk<N8, 2>(sh, rows, to, b);
        fused_chunk<N8, 3>(sh, rows, to, b);
        fused_chunk<N8, 4>(sh, rows, to, b);
        fused_chunk<N8, 5>(sh, rows, to, b);
        fused_chunk<N8, 6>(sh, rows, to, b);
        fused_chunk<N8, 7>(sh, rows, to, b);
    }
    if (tid == 0) {
        sh.info[i % FUSED_INFO] = make_int4(0, 0, 0, 0);
        wide_arrive(&sh.info_full[i % FUSED_INFO]);
    }
    attn_copy_commit();
    attn_copy_wait<0>();
}

/* The i-th unit; entries (.y) 0: there is none. */
template <int N8>
static __device__ __forceinline__ int4 fused_info(const fused_shared<N8> &sh, uint32_t i) {
    wide_wait(&sh.info_full[i % FUSED_INFO], i / FUSED_INFO & 1);
    return sh.info[i % FUSED_INFO];
}

/* One step of a fold over the eight rows: of n values a head, a lane keeps the half that its bit says and hands over the other. */
template <int N, int LARGEST>
static __device__ __forceinline__ void fused_halve(float *x, int bit, int lane) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float keep = lane & bit ? x[N / 2 + i] : x[i], give = lane & bit ? x[i] : x[N / 2 + i];
        const float other = __shfl_xor_sync(0xffffffffu, give, bit);
        x[i] = LARGEST ? fused_larger(keep, other) : BI_ADD(keep, other);
    }
}

/* Folds x (2 * N8: column by eight of heads) over the eight rows of a warp, bit 2 of the row first; a lane, or a pair of lanes, keeps N8 / 2
 * results. */
template <int N8, int LARGEST>
static __device__ __forceinline__ void fused_fold(float *x, float *out, int lane) {
    fused_halve<2 * N8, LARGEST>(x, 16, lane);
    fused_halve<N8, LARGEST>(x, 8, lane);
    const int first = (lane & 16 ? N8 : 0) + (lane & 8 ? N8 / 2 : 0);
#pragma unroll
    for (int i = 0; i < N8 / 2; i++) {
        const float other = __shfl_xor_sync(0xffffffffu, x[i], 4);
        out[(first + i) / 2 * 8 + (lane & 3) * 2 + (first + i) % 2] = LARGEST ? fused_larger(x[i], other) : BI_ADD(x[i], other);
    }
}

/* The scores of block b, one of this warpgroup's, before alpha. A fence costs as much as a few products: one for several chunks, but not for
 * those that land last. */
template <int N8>
static __device__ __forceinline__ void fused_scores(float (&acc)[N8][4], const fused_shared<N8> &sh, uint32_t b, int group, int lane) {
    const uint32_t from = wide_matrix(sh.ring + group * FUSED_BLOCK_BYTES), by = wide_matrix(sh.q);
    uint64_t *full = sh.full + group * FUSED_CHUNKS;
#pragma unroll
    for (int chunk = 0; chunk < FUSED_CHUNKS; chunk++) {
        wide_wait(&full[chunk], b / 2 & 1);
        if (chunk == 0 || chunk == 1 || chunk == 3 || chunk == 4 || chunk == 7)
            continue; /* with the next one */
        const int first = chunk == 2 ? 0 : chunk == 5 ? 3 : chunk == 8 ? 7 : chunk;
        wide_proxy_fence();
        wide_mma_begin();
#pragma unroll
        for (int i = first * 4; i < chunk * 4 + 4; i++) /* 16 columns are 32 bytes */
            wide_mma<0>(acc, from + (uint32_t)(i / 4 * WIDE_CHUNK_BYTES / 16 + i % 4 * 2), by + (uint32_t)(i / 4 * sh.Q_CHUNK / 16 + i % 4 * 2), i);
        wide_mma_commit();
    }
    wide_mma_wait<0>();
    if (lane == 0)
        wide_arrive(&sh.empty[group * FUSED_CHUNKS + FUSED_CHUNKS - 1]);
}

/* s = RN(alpha * acc) in place, -Inf past the block's n entries, and the largest of a warp's sixteen a head. Returns 1 when a score is not
 * finite. Heads past the last are zeros and absent rows too: they are not finite only when what they meet is not, and that meets what exists
 * as well. */
template <int N8>
static __device__ __forceinline__ int fused_top(float (&acc)[N8][4], float alpha, int n, float *top, int lane, int warp) {
    const int entry = warp * 16 + (lane >> 2);
    float most[2 * N8], zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N8 * 4; i++)
        acc[i / 4][i % 4] = BI_MUL(alpha, acc[i / 4][i % 4]);
    if (n < BI_ATT_BLOCK) {
#pragma unroll
        for (int i = 0; i < N8 * 4; i++) {
            zero = BI_FMA(acc[i / 4][i % 4], 0.0f, zero);
            acc[i / 4][i % 4] = entry + i % 4 / 2 * 8 < n ? acc[i / 4][i % 4] : bi_f32_of(0xff800000u);
        }
    }
#pragma unroll
    for (int j = 0; j < N8; j++) {
        most[2 * j] = fused_larger(acc[j][0], acc[j][2]);
        most[2 * j + 1] = fused_larger(acc[j][1], acc[j][3]);
    }
    fused_fold<N8, 1>(most, top + warp * 8 * N8, lane);
#pragma unroll
    for (int i = 0; i < N8 * 4 && n >= BI_ATT_BLOCK; i++)
        zero = BI_FMA(acc[i / 4][i % 4], 0.0f, zero);
    return bi_is_nan(zero);
}

/* e = exp(RN(s - m)) in place, and R(e) to shared memory. */
template <int N8>
static __device__ __forceinline__ void fused_weigh(float (&acc)[N8][4], const float *m, unsigned char *weight, int lane, int warp) {
    const int matrix = lane >> 3;
#pragma unroll
    for (int j = 0; j < N8; j++) {
        const float2 top = *(const float2 *)(m + j * 8 + (lane & 3) * 2);
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[j][i] = fused_exp(BI_SUB(acc[j][i], i % 2 ? top.y : top.x));
    }
#pragma unroll
    for (int j = 0; j < N8; j += 2) {
        const uint32_t pair[4] = {wide_pair(acc[j][0], acc[j][1]), wide_pair(acc[j][2], acc[j][3]), wide_pair(acc[j + 1][0], acc[j + 1][1]),
                                  wide_pair(acc[j + 1][2], acc[j + 1][3])};
        wide_store_trans(weight + attn_swizzle((j + (matrix >> 1)) * 8 + (lane & 7), warp * 2 + (matrix & 1), ATTN_P_BYTES), pair);
    }
}

/* The sum of a warp's sixteen a head. */
template <int N8>
static __device__ __forceinline__ void fused_sum(const float (&acc)[N8][4], float *fold, int lane, int warp) {
    float p[2 * N8];
#pragma unroll
    for (int j = 0; j < N8; j++) {
        p[2 * j] = BI_ADD(acc[j][0], acc[j][2]);
        p[2 * j + 1] = BI_ADD(acc[j][1], acc[j][3]);
    }
    fused_fold<N8, 0>(p, fold + warp * 8 * N8, lane);
}

/* What the thread of a head adds to fused_top and fused_weigh: m and f. */
template <int N8>
static __device__ __forceinline__ void fused_join(const fused_shared<N8> &sh, const float *top, uint32_t b, int first, int h) {
    enum { HEADS = 8 * N8 };
    const uint32_t own = b % 2, other = 1 - own;
    if (b)
        wide_wait(&sh.m_full[other], (b - 1) / 2 & 1);
    if (h < HEADS) {
        const float block = fused_larger(fused_larger(top[h], top[HEADS + h]), fused_larger(top[2 * HEADS + h], top[3 * HEADS + h]));
        const float before = sh.m[other * HEADS + h], m = first ? block : fused_larger(before, block);
        sh.scale[own * HEADS + h] = first ? 0.0f : bi_exp(BI_SUB(before, m));
        sh.m[own * HEADS + h] = m;
    }
    __syncwarp();
    if (h % 32 == 0)
        wide_arrive(&sh.m_full[own]);
}

/* A scoring warpgroup: every other block. */
template <int N8>
static __device__ __forceinline__ void fused_score(const attn_rows &r, const attn_query &a, const fused_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32;
    float *top = sh.top + group * 4 * HEADS, *fold = sh.fold + group * 4 * HEADS;
    uint32_t b0 = 0;
    for (uint32_t i = 0;; i++) {
        const int4 info = fused_info<N8>(sh, i);
        if (!info.y)
            return;
        const fused_unit u(r, info.x, HEADS);
        const uint32_t n_block = (uint32_t)(info.y + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK;
        uint32_t k = (b0 ^ (uint32_t)group) & 1;
        int bad = 0;
        wide_wait(sh.q_full, i & 1);
        if (k >= n_block && lane == 0)
            wide_arrive(sh.q_empty);
        for (; k < n_block; k += 2) {
            const uint32_t b = b0 + k;
            float acc[N8][4];
            fused_scores<N8>(acc, sh, b, group, lane);
            if (k + 2 >= n_block && lane == 0)
                wide_arrive(sh.q_empty);
            bad |= fused_top<N8>(acc, a.alpha, info.y - (int)k * BI_ATT_BLOCK, top, lane, warp);
            if (b >= 2)
                wide_wait(&sh.p_empty[group], (b / 2 - 1) & 1);
            wide_sync(1 + group, WIDE_GROUP);
            if (warp < 2)
                fused_join<N8>(sh, top, b, k == 0, tid);
            wide_sync(1 + group, WIDE_GROUP);
            fused_weigh<N8>(acc, sh.m + group * HEADS, sh.weight + group * sh.P_BYTES, lane, warp);
            __syncwarp();
            if (lane == 0)
                wide_arrive(&sh.p_full[group]);
            fused_sum<N8>(acc, fold, lane, warp);
            wide_sync(1 + group, WIDE_GROUP);
            if (tid < HEADS)
                sh.sum[group * HEADS + tid] = BI_ADD(BI_ADD(fold[tid], fold[2 * HEADS + tid]), BI_ADD(fold[HEADS + tid], fold[3 * HEADS + tid]));
            __syncwarp();
            if (warp < 2 && lane == 0)
                wide_arrive(&sh.sum_full[group]);
            if (info.z && k + 1 == n_block && tid < HEADS && u.head0 + tid < r.n_head)
                r.stat[((int64_t)u.t * r.n_part_max + u.part) * r.n_head + u.head0 + tid].x = sh.m[group * HEADS + tid];
        }
        if (bad)
            bi_cuda_fault(a.fault, u.row, bi_f32_of(BI_F32_INF));
        b0 += n_block;
    }
}

/* acc of a warpgroup's tiles through block b, from +0 or, where `keep`, from what it is. Absent entries are zeros, and a step of zeros
 * changes nothing. */
template <int N8>
static __device__ __forceinline__ void fused_values(float (&acc)[FUSED_TILES][N8][4], const fused_shared<N8> &sh, uint32_t b, int group, int keep,
                                                    int lane) {
    const uint32_t from = wide_matrix(sh.ring + b % 2 * FUSED_BLOCK_BYTES + group * WIDE_CHUNK_BYTES);
    const uint32_t by = wide_matrix(sh.weight + b % 2 * sh.P_BYTES);
    uint64_t *empty = sh.empty + b % 2 * FUSED_CHUNKS + group;
    wide_mma_begin();
#pragma unroll
    for (int tile = 0; tile < FUSED_TILES; tile++) {
#pragma unroll
        for (int k = 0; k < BI_ATT_BLOCK / BI_MMA_K; k++) /* 16 entries are 16 rows of 128 bytes, or 32 bytes of a row */
            wide_mma<1>(acc[tile], from + (uint32_t)(2 * tile * WIDE_CHUNK_BYTES / 16 + k * 128), by + (uint32_t)(k * 2), keep || k);
        wide_mma_commit();
        if (tile)
            wide_mma_wait<1>();
        if (tile && lane == 0)
            wide_arrive(empty + 2 * (tile - 1));
    }
    wide_mma_wait<0>();
    if (lane == 0)
        wide_arrive(empty + 2 * (FUSED_TILES - 1));
}

/* z of the warpgroup's columns: eights of heads and columns turn round in registers, and a quad of lanes writes 32 bytes of a head. */
template <int N8>
static __device__ __forceinline__ void fused_out(const attn_rows &r, const float (&acc)[FUSED_TILES][N8][4], const float *inverse,
                                                 const fused_unit &u, int group, int lane, int warp) {
    const int quad = lane & 3, odd = quad & 1;
#pragma unroll
    for (int j = 0; j < N8; j++) {
        const float2 by = *(const float2 *)(inverse + j * 8 + quad * 2);
        const int32_t head = u.head0 + j * 8 + (lane >> 2);
        bi_bf16 *z = r.z + ((int64_t)u.row * r.n_head + head) * FUSED_KV + warp * 16 + odd * 8 + (quad & 2) * 2;
#pragma unroll
        for (int tile = 0; tile < FUSED_TILES; tile++) {
            const float *x = acc[tile][j];
            const uint32_t low = wide_transpose(wide_pair(BI_MUL(x[0], by.x), BI_MUL(x[1], by.y)));
            const uint32_t high = wide_transpose(wide_pair(BI_MUL(x[2], by.x), BI_MUL(x[3], by.y)));
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
            if (head < r.n_head)
                *(uint2 *)(z + (2 * tile + group) * ATTN_CHUNK) = odd ? make_uint2(other, high) : make_uint2(low, other);
        }
    }
}

/* acc of a row of several parts. */
template <int N8>
static __device__ __forceinline__ void fused_keep(const attn_rows &r, const float (&acc)[FUSED_TILES][N8][4], const fused_unit &u, int group,
                                                  int lane, int warp) {
    float *to = r.acc + ((int64_t)u.t * r.n_part_max + u.part) * r.n_head * FUSED_KV + group * ATTN_CHUNK + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < FUSED_TILES * N8 * 4; i++) {
        const int tile = i / (4 * N8), j = i / 4 % N8, e = i % 4;
        const int32_t head = u.head0 + j * 8 + (lane & 3) * 2 + e % 2;
        if (head < r.n_head)
            to[(int64_t)head * FUSED_KV + 2 * tile * ATTN_CHUNK + e / 2 * 8] = acc[tile][j][e];
    }
}

/* A warpgroup of values. */
template <int N8>
static __device__ __forceinline__ void fused_value(const attn_rows &r, const fused_shared<N8> &sh, int group, int tid) {
    enum { HEADS = 8 * N8 };
    const int lane = tid % 32, warp = tid / 32;
    float acc[FUSED_TILES][N8][4];
    uint32_t b = 0;
#pragma unroll
    for (int i = 0; i < FUSED_TILES * N8 * 4; i++)
        acc[i / (4 * N8)][i / 4 % N8][i % 4] = 0.0f;
    for (uint32_t i = 0;; i++) {
        const int4 info = fused_info<N8>(sh, i);
        float l = 0.0f;
        if (!info.y)
            return;
        for (int32_t at = 0; at < info.y; at += BI_ATT_BLOCK, b++) {
            wide_wait(&sh.m_full[b % 2], b / 2 & 1); /* f is there long before R(e) */
            const float *scale = sh.scale + b % 2 * HEADS;
#pragma unroll
            for (int j = 0; j < N8; j++) {
                const float2 f = *(const float2 *)(scale + j * 8 + (lane & 3) * 2);
#pragma unroll
                for (int k = 0; k < FUSED_TILES * 4; k++)
                    acc[k / 4][j][k % 4] = BI_MUL(acc[k / 4][j][k % 4], k % 2 ? f.y : f.x); /* a first block leaves it */
            }
            wide_wait(&sh.p_full[b % 2], b / 2 & 1);
            wide_proxy_fence();
            fused_values<N8>(acc, sh, b, group, at > 0, lane);
            wide_wait(&sh.sum_full[b % 2], b / 2 & 1);
            if (tid < HEADS)
                l = at ? BI_FMA(l, scale[tid], sh.sum[b % 2 * HEADS + tid]) : sh.sum[b % 2 * HEADS + tid];
            __syncwarp();
            if (lane == 0)
                wide_arrive(&sh.p_empty[b % 2]);
        }
        const fused_unit u(r, info.x, HEADS);
        if (info.z) {
            fused_keep<N8>(r, acc, u, group, lane, warp);
            if (group == 0 && tid < HEADS && u.head0 + tid < r.n_head)
                r.stat[((int64_t)u.t * r.n_part_max + u.part) * r.n_head + u.head0 + tid].y = l;
            continue;
        }
        float *inverse = sh.inverse + (i % 2 * 2 + (uint32_t)group) * HEADS;
        if (tid < HEADS)
            inverse[tid] = BI_DIV(1.0f, l);
        wide_sync(3 + group, WIDE_GROUP);
        fused_out<N8>(r, acc, inverse, u, group, lane, warp);
    }
}

template <int N8>
static __global__ void __launch_bounds__(FUSED_THREADS, 1) attn_fused(const attn_rows r, const attn_query a) {
    bi_cuda_begin();
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const fused_shared<N8> sh(attn_shared_bytes);
    const int tid = (int)threadIdx.x % WIDE_GROUP, group = __shfl_sync(0xffffffffu, (int)threadIdx.x / WIDE_GROUP, 0); /* one for the warp */
    if (threadIdx.x == 0)
        sh.init();
    __syncthreads();
    if (group < 2) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N8 > 4 ? 128 : 112));
        fused_value<N8>(r, sh, group, tid);
    } else if (group < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;\n");
        fused_score<N8>(r, a, sh, group - 2, tid);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N8 > 4 ? 48 : 80));
        fused_feed<N8>(r, a, sh, tid);
    }
}

#endif
#endif
