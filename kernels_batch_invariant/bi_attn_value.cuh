/* bi_attn_value: the second pass of attention: values, and the merge over the classes.      Contract: N-ATT-3, N-ATT-4
 *
 * Grid: (row, 128 columns of the latent, group of 32 * MT heads), one a block of 256 threads, two blocks an SM. Shared memory: a ring of
 * VALUE_STAGES blocks, each 64 latent rows x 128 columns, R(e) of the heads and f; the classes' weights of the merge; O, which a thread
 * touches when a class ends and keeps out of its registers, so that two blocks fit an SM.
 * A row's blocks come class by class in rising order: acc (heads on M, columns on N, entries on K in rising 16s) begins at +0 in the
 * first block of a class, is scaled by f in every later one, and joins O by one fma an element when the class ends. M, and with it every
 * merge weight, is known before: the first pass has been over all scores. */
#ifndef BI_ATTN_VALUE_CUH
#define BI_ATTN_VALUE_CUH

#include "bi_attn_parts.cuh"

enum {
    VALUE_COLUMNS = 128,
    VALUE_STAGES = 2,
    VALUE_ROW_BYTES = VALUE_COLUMNS * (int)sizeof(bi_bf16),
    VALUE_K_BYTES = BI_ATT_BLOCK * VALUE_ROW_BYTES
};

static inline size_t attn_value_shared(int32_t heads) {
    return VALUE_STAGES * (VALUE_K_BYTES + (size_t)heads * (ATTN_P_BYTES + sizeof(float))) +
           (size_t)heads * (BI_ATT_CLASSES + 1 + VALUE_COLUMNS) * sizeof(float) + BI_ATT_CLASSES * sizeof(attn_class);
}

#ifdef __CUDACC__

template <int MT>
struct value_shared {
    enum { HEADS = 32 * MT, STAGE_BYTES = VALUE_K_BYTES + HEADS * (ATTN_P_BYTES + (int)sizeof(float)) };
    unsigned char *stage;   /* latent rows, weights, f */
    float *merge, *inverse; /* (8, HEADS), (HEADS) */
    attn_class *classes;    /* (8) */
    float *out;             /* (16 * MT, ATTN_THREADS) O, element i of a thread */
    __device__ __forceinline__ explicit value_shared(unsigned char *base) {
        stage = base;
        merge = (float *)(base + VALUE_STAGES * STAGE_BYTES);
        inverse = merge + BI_ATT_CLASSES * HEADS;
        classes = (attn_class *)(inverse + HEADS);
        out = (float *)(classes + BI_ATT_CLASSES);
    }
};

/* A place in the row's order of blocks: block b of class c. The classes' sizes are in shared memory, to spare registers. */
struct value_place {
    int32_t c, b;

    /* Moves on to the first block that exists from (c, b) on; c = 8 when there is none. */
    __device__ __forceinline__ void settle(const attn_class *classes) {
        while (b * BI_ATT_BLOCK >= classes[c].n && ++c < BI_ATT_CLASSES)
            b = 0;
    }
    __device__ __forceinline__ int done(void) const {
        return c >= BI_ATT_CLASSES;
    }
};

/* Feeds the ring with whole blocks. A thread copies one unit of four latent rows; it fetches the ids of a block one step ahead. */
template <int MT>
struct value_feed {
    enum { HEADS = 32 * MT };
    value_place ahead; /* of which `next` holds the ids */
    int32_t next[4], n_copied;

    __device__ __forceinline__ void fetch(const attn_rows &r, int32_t t, int32_t seq, const attn_class *classes) {
        ahead.settle(classes);
        for (int i = 0; i < 4 && !ahead.done(); i++)
            next[i] = attn_entry(r, t, seq, classes[ahead.c], ahead.c, ahead.b * BI_ATT_BLOCK + attn_entry_of_place((int)threadIdx.x / 16 + 16 * i));
    }
    /* Always one group. */
    __device__ __forceinline__ void step(const attn_rows &r, int32_t t, int32_t seq, const attn_class *classes, int32_t unit0, int32_t head0,
                                         unsigned char *stage) {
        if (!ahead.done()) {
            const int tid = (int)threadIdx.x, unit = tid % 16;
            const int64_t at = ((int64_t)t * r.n_block_max + n_copied++) * r.n_head_pad + head0;
            for (int i = 0; i < 4; i++)
                attn_copy_unit(r, stage + attn_swizzle(tid / 16 + 16 * i, unit, VALUE_ROW_BYTES), attn_row_at(r, next[i]), unit0 + unit);
            for (int i = tid; i < HEADS * ATTN_P_BYTES / 16; i += ATTN_THREADS)
                attn_copy16(stage + VALUE_K_BYTES + i * 16, r.weight + at * ATTN_P_BYTES + i * 16, 1);
            if (tid < HEADS / 4)
                attn_copy16(stage + VALUE_K_BYTES + HEADS * ATTN_P_BYTES + tid * 16, r.scale + at + tid * 4, 1);
            ahead.b++;
            fetch(r, t, seq, classes);
        }
        attn_copy_commit();
    }
};

/* What N-ATT-4 multiplies by: w of each class and 1 / L, by the thread of a head. merge (8, heads), inverse (heads). */
static __device__ __forceinline__ void value_merge_weights(const attn_rows &r, int32_t t, int32_t head0, int heads, const attn_class *classes,
                                                           float *merge, float *inverse) {
    const int h = (int)threadIdx.x;
    const float2 *stat = r.stat + (int64_t)t * BI_ATT_CLASSES * r.n_head_pad + head0 + h;
    float top = 0.0f, sum = 0.0f;
    int n_class = 0;
    for (int c = 0; c < BI_ATT_CLASSES; c++) {
        if (!classes[c].n)
            continue;
        const float m = stat[(int64_t)c * r.n_head_pad].x;
        top = n_class++ == 0 || m > top ? m : top;
    }
    for (int c = 0; c < BI_ATT_CLASSES; c++) {
        if (!classes[c].n)
            continue;
        const float2 own = stat[(int64_t)c * r.n_head_pad];
        const float w = bi_exp(BI_SUB(own.x, top));
        merge[c * heads + h] = w;
        sum = BI_FMA(own.y, w, sum);
    }
    inverse[h] = BI_DIV(1.0f, sum);
}

/* acc continues through one block of n entries. */
template <int MT>
static __device__ __forceinline__ void value_block(float acc[MT][4][4], const unsigned char *stage, int n, int wm, int wn, int lane) {
    const unsigned char *weight = stage + VALUE_K_BYTES;
    for (int k = 0; k < n; k += BI_MMA_K) {
        uint32_t b[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
            attn_load_matrix_trans(b[pair], stage + attn_swizzle(k + (lane & 15), wn * 4 + pair * 2 + (lane >> 4), VALUE_ROW_BYTES));
#pragma unroll
        for (int tile = 0; tile < MT; tile++) {
            uint32_t a[4];
            attn_load_matrix(a, weight + attn_swizzle((wm * MT + tile) * 16 + (lane & 15), k / 8 + (lane >> 4), ATTN_P_BYTES));
#pragma unroll
            for (int j = 0; j < 4; j++)
                bi_cuda_mma16(acc[tile][j], a, b[j / 2] + j % 2 * 2);
        }
    }
}

/* Two neighbouring columns of z; the second may lie past the end. */
static __device__ __forceinline__ void value_store(bi_bf16 *z, int32_t col, int32_t d, float x, float y) {
    if (col + 1 < d && d % 2 == 0)
        *(uint32_t *)(z + col) = bi_round(x) | (uint32_t)bi_round(y) << 16;
    else if (col < d) {
        z[col] = bi_round(x);
        if (col + 1 < d)
            z[col + 1] = bi_round(y);
    }
}

template <int MT>
static __device__ __forceinline__ void value_out(const attn_rows &r, bi_bf16 *z, const float *out, const float *inverse, int32_t head0,
                                                 int32_t col0, int wm, int wn, int lane) {
#pragma unroll
    for (int tile = 0; tile < MT; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int h = (wm * MT + tile) * 16 + half * 8 + (lane >> 2);
            if (head0 + h >= r.n_head)
                continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *pair = out + ((tile * 4 + j) * 4 + half * 2) * ATTN_THREADS;
                value_store(z + (int64_t)(head0 + h) * r.d_kv_latent, col0 + wn * 32 + j * 8 + (lane & 3) * 2, r.d_kv_latent,
                            BI_MUL(pair[0], inverse[h]), BI_MUL(pair[ATTN_THREADS], inverse[h]));
            }
        }
    }
}

template <int MT>
static __global__ void __launch_bounds__(ATTN_THREADS, 2) attn_value(const attn_rows r, bi_bf16 *z, const int32_t n_column) {
    enum { HEADS = 32 * MT };
    extern __shared__ __align__(1024) unsigned char attn_shared_bytes[];
    const value_shared<MT> sh(attn_shared_bytes);
    const int32_t n_group = r.n_head_pad / HEADS, unit = (int32_t)blockIdx.x, head0 = unit % n_group * HEADS;
    const int32_t col0 = unit / n_group % n_column * VALUE_COLUMNS, t = unit / n_group / n_column, row = r.row0 + t;
    const int tid = (int)threadIdx.x, lane = tid % 32, wm = tid / 32 % 2, wn = tid / 64;
    if (r.row_seg[row] < 0)
        return;
    const bi_seg seg = r.seg[r.row_seg[row]];
    if (tid < BI_ATT_CLASSES)
        sh.classes[tid] = attn_class_of(r, t, seg.pos + row - seg.row + 1, tid);
    __syncthreads();
    value_place at = {0, 0};
    value_feed<MT> feed = {{0, 0}, {-1, -1, -1, -1}, 0};
    feed.fetch(r, t, seg.seq, sh.classes);
    for (int s = 0; s < VALUE_STAGES - 1; s++)
        feed.step(r, t, seg.seq, sh.classes, col0 / ATTN_UNIT, head0, sh.stage + s * sh.STAGE_BYTES);
    if (tid < HEADS)
        value_merge_weights(r, t, head0, HEADS, sh.classes, sh.merge, sh.inverse);
    float acc[MT][4][4], *out = sh.out + tid;
#pragma unroll
    for (int i = 0; i < MT * 16; i++)
        out[i * ATTN_THREADS] = acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
    at.settle(sh.classes);
    for (int32_t step = 0; !at.done(); step++) {
        attn_copy_wait<VALUE_STAGES - 2>();
        __syncthreads();
        feed.step(r, t, seg.seq, sh.classes, col0 / ATTN_UNIT, head0, sh.stage + (step + VALUE_STAGES - 1) % VALUE_STAGES * sh.STAGE_BYTES);
        const unsigned char *stage = sh.stage + step % VALUE_STAGES * sh.STAGE_BYTES;
        const float *scale = (const float *)(stage + VALUE_K_BYTES + HEADS * ATTN_P_BYTES);
        const int32_t left = sh.classes[at.c].n - at.b * BI_ATT_BLOCK;
#pragma unroll
        for (int i = 0; i < MT * 16; i++) {
            const int h = (wm * MT + i / 16) * 16 + i % 4 / 2 * 8 + (lane >> 2);
            acc[i / 16][i / 4 % 4][i % 4] = at.b ? BI_MUL(acc[i / 16][i / 4 % 4][i % 4], scale[h]) : 0.0f;
        }
        value_block<MT>(acc, stage, left < BI_ATT_BLOCK ? left : BI_ATT_BLOCK, wm, wn, lane);
        if (left <= BI_ATT_BLOCK) {
#pragma unroll
            for (int i = 0; i < MT * 16; i++) {
                const int h = (wm * MT + i / 16) * 16 + i % 4 / 2 * 8 + (lane >> 2);
                out[i * ATTN_THREADS] = BI_FMA(acc[i / 16][i / 4 % 4][i % 4], sh.merge[at.c * HEADS + h], out[i * ATTN_THREADS]);
            }
        }
        at.b++;
        at.settle(sh.classes);
    }
    value_out<MT>(r, z + (int64_t)row * r.n_head * r.d_kv_latent, out, sh.inverse, head0, col0, wm, wn, lane);
}

#endif
#endif
