/* bi_attn_value_wide: the second pass of attention on wgmma, for steps that fill the GPU.      Contract: N-ATT-3, N-ATT-4
 *
 * Grid: (row, 256 columns of the latent, group of 8 * N8 heads), one a block of three warpgroups; see bi_attn_wide.cuh. Shared memory: a
 * ring of stages, each 64 latent rows x 256 columns by chunks of 64, R(e) of the heads, and f; the classes' weights of the merge. At the
 * end z passes through the ring's place.
 * Columns are on M, heads on N, entries on K: O^T = c^T R(e)^T. A warpgroup has 128 columns, in registers acc and O of two tiles of 64.
 * Order and merge are those of bi_attn_value.cuh: acc from +0 through a class's blocks in rising 16s, scaled by f before every later
 * block; one fma into O when the class ends. */
#ifndef BI_ATTN_VALUE_WIDE_CUH
#define BI_ATTN_VALUE_WIDE_CUH

#include "bi_attn_value.cuh"
#include "bi_attn_wide.cuh"

enum { VWIDE_COLUMNS = 256, VWIDE_CHUNKS = VWIDE_COLUMNS / ATTN_CHUNK, VWIDE_STAGES = 5, VWIDE_Z_ROW = VWIDE_COLUMNS * 2 + 16 };

template <int N8>
struct value_wide_shared {
    enum {
        HEADS = 8 * N8,
        P_BYTES = HEADS * ATTN_P_BYTES,
        STAGE_BYTES = VWIDE_CHUNKS * WIDE_CHUNK_BYTES + P_BYTES,
        BYTES = VWIDE_STAGES * (STAGE_BYTES + HEADS * 4 + 16) + (BI_ATT_CLASSES + 1) * HEADS * 4 + BI_ATT_CLASSES * (int)sizeof(attn_class)
    };
    unsigned char *stage;
    float *scale, *merge, *inverse; /* (VWIDE_STAGES, HEADS), (8, HEADS), (HEADS) */
    attn_class *classes;            /* (8) */
    uint64_t *full, *empty;
#ifdef __CUDACC__
    __device__ __forceinline__ explicit value_wide_shared(unsigned char *base) {
        stage = base;
        full = (uint64_t *)(base + VWIDE_STAGES * STAGE_BYTES);
        empty = full + VWIDE_STAGES;
        scale = (float *)(empty + VWIDE_STAGES);
        merge = scale + VWIDE_STAGES * HEADS;
        inverse = merge + BI_ATT_CLASSES * HEADS;
        classes = (attn_class *)(inverse + HEADS);
    }
#endif
};

#ifdef __CUDACC__

/* Units of four rows of a block, all chunks. */
static __device__ __forceinline__ void value_wide_copy(const wide_rows &rows, uint32_t to) {
#define VALUE_WIDE_ROW(i) wide_copy<i, 0>(to, rows), wide_copy<i, 1>(to, rows), wide_copy<i, 2>(to, rows), wide_copy<i, 3>(to, rows)
    VALUE_WIDE_ROW(0);
    VALUE_WIDE_ROW(1);
    VALUE_WIDE_ROW(2);
    VALUE_WIDE_ROW(3);
#undef VALUE_WIDE_ROW
}

/* The same where the cache does not lie on 16 bytes, or rows end among the columns. */
static __device__ __forceinline__ void value_wide_copy_any(const attn_rows &r, const int32_t id[4], unsigned char *to, int32_t unit) {
    for (int i = 0; i < 4; i++)
        for (int chunk = 0; chunk < VWIDE_CHUNKS; chunk++)
            attn_copy_unit(r, to + i * 2 * WIDE_ATOM + chunk * WIDE_CHUNK_BYTES, attn_row_at(r, id[i]), unit + chunk * 8);
}

/* The feeding warpgroup: all blocks of the row in class order. A thread copies units of four rows; it fetches the ids of the next block
 * while this one is copied. */
template <int N8>
static __device__ __forceinline__ void value_wide_feed(const attn_rows &r, int32_t t, int32_t seq, int32_t unit0, int32_t head0,
                                                       const value_wide_shared<N8> &sh, int tid) {
    typedef value_wide_shared<N8> shape;
    const int whole = r.wide && unit0 + VWIDE_COLUMNS / ATTN_UNIT <= r.row_ld / ATTN_UNIT;
    const int32_t entry = attn_entry_of_place(tid / 8), place0 = attn_swizzle(tid / 8, tid % 8, 128);
    wide_place at = {0, 0, BI_ATT_CLASSES};
    int32_t next[4] = {-1, -1, -1, -1}, stage = 0;
    uint32_t round = 0;
    at.settle(sh.classes, 1);
    for (int i = 0; i < 4; i++)
        next[i] = attn_entry(r, t, seq, sh.classes[at.c], at.c, entry + 16 * i);
    for (int32_t n = 0; !at.done(); n++) {
        const int32_t id[4] = {next[0], next[1], next[2], next[3]};
        const int64_t place = ((int64_t)t * r.n_block_max + n) * r.n_head_pad + head0;
        unsigned char *to = sh.stage + stage * shape::STAGE_BYTES;
        wide_rows rows;
        rows.set(r, id, unit0 + tid % 8);
        at.b++;
        at.settle(sh.classes, 1);
        for (int i = 0; i < 4 && !at.done(); i++)
            next[i] = attn_entry(r, t, seq, sh.classes[at.c], at.c, at.b * BI_ATT_BLOCK + entry + 16 * i);
        for (int i = 0; i < 4 && r.list && !at.done(); i++) /* ids of the block after the next one */
            wide_prefetch(r.list + (int64_t)t * r.list_ld + sh.classes[at.c].first + (at.b + 1) * BI_ATT_BLOCK + entry + 16 * i);
        if (n >= VWIDE_STAGES)
            wide_wait(&sh.empty[stage], (round - 1) & 1);
        if (tid == 0) {
            wide_arrive_expect(&sh.full[stage], shape::P_BYTES + shape::HEADS * 4);
            wide_bulk_load(to + VWIDE_CHUNKS * WIDE_CHUNK_BYTES, r.weight + place * ATTN_P_BYTES, shape::P_BYTES, &sh.full[stage]);
            wide_bulk_load(sh.scale + stage * shape::HEADS, r.scale + place, shape::HEADS * 4, &sh.full[stage]);
        }
        if (whole)
            value_wide_copy(rows, attn_shared(to + place0));
        else
            value_wide_copy_any(r, id, to + place0, unit0 + tid % 8);
        wide_arrive_copied(&sh.full[stage]);
        round += stage == VWIDE_STAGES - 1;
        stage = stage == VWIDE_STAGES - 1 ? 0 : stage + 1;
    }
    attn_copy_commit();
    attn_copy_wait<0>();
}

/* acc of two tiles through a block, from +0 or, where `keep`, from what it is. Absent entries are zeros, and a step of zeros changes nothing.
 * v: this warpgroup's two chunks of columns. */
template <int N8>
static __device__ __forceinline__ void value_wide_block(float (&acc)[2][N8][4], const unsigned char *v, const unsigned char *weight, int keep) {
    const uint64_t a = wide_matrix(v), b = wide_matrix(weight);
    wide_mma_begin();
#pragma unroll
    for (int k = 0; k < BI_ATT_BLOCK / BI_MMA_K; k++) { /* 16 entries are 16 rows of 128 bytes, or 32 bytes of a row */
        wide_mma<1>(acc[0], a + (uint64_t)(k * 128), b + (uint64_t)(k * 2), keep || k);
        wide_mma<1>(acc[1], a + (uint64_t)(WIDE_CHUNK_BYTES / 16 + k * 128), b + (uint64_t)(k * 2), keep || k);
    }
    wide_mma_commit();
    wide_mma_wait<0>();
}

/* z of the warpgroup's columns to shared memory, a head a row. */
template <int N8>
static __device__ __forceinline__ void value_wide_stage_z(const float (&out)[2][N8][4], const float *inverse, unsigned char *z, int group, int tid) {
    const int lane = tid % 32, warp = tid / 32, matrix = lane >> 3;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
        for (int j = 0; j < N8; j += 2) {
            const float2 low = *(const float2 *)(inverse + j * 8 + (lane & 3) * 2), high = *(const float2 *)(inverse + j * 8 + 8 + (lane & 3) * 2);
            const float *x = out[tile][j], *y = out[tile][j + 1];
            const uint32_t pair[4] = {wide_pair(BI_MUL(x[0], low.x), BI_MUL(x[1], low.y)), wide_pair(BI_MUL(x[2], low.x), BI_MUL(x[3], low.y)),
                                      wide_pair(BI_MUL(y[0], high.x), BI_MUL(y[1], high.y)), wide_pair(BI_MUL(y[2], high.x), BI_MUL(y[3], high.y))};
            const int head = (j + (matrix >> 1)) * 8 + (lane & 7), column = group * 128 + tile * 64 + warp * 16 + (matrix & 1) * 8;
            wide_store_trans(z + head * VWIDE_Z_ROW + column * 2, pair);
        }
    }
}

/* From shared memory to the rows of z; columns from col0. */
static __device__ __forceinline__ void value_wide_store_z(bi_bf16 *z, const unsigned char *from, int32_t n_head, int32_t d, int32_t col0) {
    const int wide = d % ATTN_UNIT == 0 && (uintptr_t)z % 16 == 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n_head * (VWIDE_COLUMNS / ATTN_UNIT); i += 2 * WIDE_GROUP) {
        const int32_t h = i / (VWIDE_COLUMNS / ATTN_UNIT), col = i % (VWIDE_COLUMNS / ATTN_UNIT) * ATTN_UNIT;
        const bi_bf16 *x = (const bi_bf16 *)(from + h * VWIDE_Z_ROW + col * 2);
        bi_bf16 *to = z + (int64_t)h * d + col0 + col;
        if (wide && col0 + col < d)
            *(uint4 *)to = *(const uint4 *)x;
        for (int e = 0; !wide && e < ATTN_UNIT && col0 + col + e < d; e++)
            to[e] = x[e];
    }
}

/* The two computing warpgroups. */
template <int N8>
static __device__ __forceinline__ void value_wide_compute(const attn_rows &r, bi_bf16 *z, int32_t t, int32_t head0, int32_t col0,
                                                          const value_wide_shared<N8> &sh, int group, int tid) {
    typedef value_wide_shared<N8> shape;
    const int lane = tid % 32;
    float acc[2][N8][4], out[2][N8][4];
    if ((int)threadIdx.x < shape::HEADS)
        value_merge_weights(r, t, head0, shape::HEADS, sh.classes, sh.merge, sh.inverse);
    wide_sync(1, 2 * WIDE_GROUP);
#pragma unroll
    for (int i = 0; i < 2 * N8 * 4; i++)
        out[i / (4 * N8)][i / 4 % N8][i % 4] = acc[i / (4 * N8)][i / 4 % N8][i % 4] = 0.0f;
    wide_place at = {0, 0, BI_ATT_CLASSES};
    at.settle(sh.classes, 1);
    for (int32_t n = 0; !at.done(); n++) {
        const int32_t stage = n % VWIDE_STAGES, left = sh.classes[at.c].n - at.b * BI_ATT_BLOCK;
        const unsigned char *from = sh.stage + stage * shape::STAGE_BYTES;
        wide_wait(&sh.full[stage], (uint32_t)(n / VWIDE_STAGES) & 1);
        const float *scale = sh.scale + stage * shape::HEADS + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < N8; j++) {
            const float2 f = *(const float2 *)(scale + j * 8);
#pragma unroll
            for (int i = 0; i < 8; i++)
                acc[i / 4][j][i % 4] = BI_MUL(acc[i / 4][j][i % 4], i % 2 ? f.y : f.x); /* a first block leaves it */
        }
        const unsigned char *v = from + group * 2 * WIDE_CHUNK_BYTES, *weight = from + VWIDE_CHUNKS * WIDE_CHUNK_BYTES;
        value_wide_block<N8>(acc, v, weight, at.b > 0);
        if (lane == 0)
            wide_arrive(&sh.empty[stage]);
        if (left <= BI_ATT_BLOCK) {
            const float *merge = sh.merge + at.c * shape::HEADS + (lane & 3) * 2;
#pragma unroll
            for (int j = 0; j < N8; j++) {
                const float2 w = *(const float2 *)(merge + j * 8);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    out[i / 4][j][i % 4] = BI_FMA(acc[i / 4][j][i % 4], i % 2 ? w.y : w.x, out[i / 4][j][i % 4]);
            }
        }
        at.b++;
        at.settle(sh.classes, 1);
    }
    wide_sync(1, 2 * WIDE_GROUP); /* both are done with the ring */
    value_wide_stage_z<N8>(out, sh.inverse, sh.stage, group, tid);
    wide_sync(1, 2 * WIDE_GROUP);
    const int32_t heads_left = r.n_head - head0;
    value_wide_store_z(z + (int64_t)head0 * r.d_kv_latent, sh.stage, heads_left < shape::HEADS ? heads_left : shape::HEADS, r.d_kv_latent, col0);
}

template <int N8>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) attn_value_wide(attn_rows r, bi_bf16 *z, int32_t n_column) {
    typedef value_wide_shared<N8> shape;
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const shape sh(attn_shared_bytes);
    const int32_t n_group = r.n_head_pad / shape::HEADS, unit = (int32_t)blockIdx.x, head0 = unit / n_column % n_group * shape::HEADS;
    const int32_t col0 = unit % n_column * VWIDE_COLUMNS, t = unit / n_group / n_column, row = r.row0 + t;
    const int tid = (int)threadIdx.x % WIDE_GROUP, group = (int)threadIdx.x / WIDE_GROUP;
    if (r.row_seg[row] < 0)
        return;
    const bi_seg seg = r.seg[r.row_seg[row]];
    attn_wait_before();
    if (threadIdx.x < BI_ATT_CLASSES)
        sh.classes[threadIdx.x] = attn_class_of(r, t, seg.pos + row - seg.row + 1, (int32_t)threadIdx.x);
    if (threadIdx.x < VWIDE_STAGES) {
        wide_bar_init(&sh.full[threadIdx.x], WIDE_GROUP + 1);
        wide_bar_init(&sh.empty[threadIdx.x], 2 * WIDE_GROUP / 32);
        wide_bar_init_done();
    }
    __syncthreads();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        value_wide_feed<N8>(r, t, seg.seq, col0 / ATTN_UNIT, head0, sh, tid);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
    value_wide_compute<N8>(r, z + (int64_t)row * r.n_head * r.d_kv_latent, t, head0, col0, sh, group, tid);
}

#endif
#endif
