/* bi_attn_parts: what the forms of attention share: a row's parts, latent rows, warp-level moves.      Contract: N-ATT-2
 *
 * Internal to bi_attn.cu. A latent block is BR_PAGE_TOK rows of d_latent bf16, row-major, a row padded with zeros to 16 bytes. A
 * latent row has an id, block * BR_PAGE_TOK + place in the block, so that an address is two multiplications away. */
#ifndef BI_ATTN_PARTS_CUH
#define BI_ATTN_PARTS_CUH

#include "bi_cuda.cuh"

enum {
    ATTN_CHUNK = 64,                      /* columns staged together: 128 bytes, 8 units of 16 bytes */
    ATTN_UNIT = 8,                        /* bf16 in a unit */
    ATTN_THREADS = 256,
    ATTN_HEADS = 32,                      /* of a block of the narrow form */
    ATTN_BLOCKS = BI_ATT_PART / BI_ATT_BLOCK,
    ATTN_P_BYTES = BI_ATT_BLOCK * (int)sizeof(bi_bf16), /* weights of one head and block */
    ATTN_S_BYTES = BI_ATT_BLOCK * (int)sizeof(float)    /* its scores */
};

static inline int32_t attn_row_ld(int32_t d_latent) {
    return (d_latent + ATTN_UNIT - 1) / ATTN_UNIT * ATTN_UNIT;
}

/* The rows and parts of one launch: `row0` .. of the step, `part0` .. of each row, n_part of them. Arrays are by row of the launch. */
typedef struct attn_rows {
    const bi_seg *seg;
    const int32_t *row_seg;
    bi_cache cache;
    int32_t row0, n_row, part0, n_part;
    int32_t row_ld, wide;                 /* wide: rows of the cache lie on 16 bytes */
    int32_t n_head, n_head_pad, d_kv_latent, d_rope;
    const int32_t *select, *n_select;     /* NULL: every visible position */
    int32_t select_ld;
    float *score;                         /* (n_row, n_part, 32, n_head_pad, 64) between the passes of the narrow form */
    int32_t n_part_max;                   /* of a row; above 1, a row of several parts leaves them here: */
    float *acc;                           /* (n_row, n_part_max, n_head, d_kv_latent) */
    float2 *stat;                         /* (n_row, n_part_max, n_head) m and l */
    bi_bf16 *z;
} attn_rows;

#ifdef __CUDACC__

/* One part of a row: n entries from `first` of its list; n = 0: there is no such part, or no such row. */
typedef struct attn_part {
    int32_t n, first, seq, several; /* several: the row has other parts */
} attn_part;

static __device__ __forceinline__ attn_part attn_part_of(const attn_rows &r, int32_t row, int32_t part) {
    attn_part p = {0, part * BI_ATT_PART, 0, 0};
    const int32_t i = r.row_seg[row];
    if (i < 0)
        return p;
    const bi_seg seg = r.seg[i];
    const int32_t n = r.select ? r.n_select[row] : seg.pos + row - seg.row + 1, left = n - p.first;
    p.n = left < 0 ? 0 : left < BI_ATT_PART ? left : BI_ATT_PART;
    p.seq = seg.seq;
    p.several = n > BI_ATT_PART;
    return p;
}

static __device__ __forceinline__ int32_t attn_block_at(const bi_cache &c, int32_t seq, int32_t page) {
    return c.table ? c.table[(int64_t)seq * c.table_ld + page] : c.first[seq] + page;
}

/* The latent row of entry i of a part; -1 for an absent one. */
static __device__ __forceinline__ int32_t attn_entry(const attn_rows &r, int32_t row, attn_part p, int32_t i) {
    if (i >= p.n)
        return -1;
    const int32_t position = r.select ? r.select[(int64_t)row * r.select_ld + p.first + i] : p.first + i;
    return attn_block_at(r.cache, p.seq, position / BR_PAGE_TOK) * BR_PAGE_TOK + position % BR_PAGE_TOK;
}

static __device__ __forceinline__ float attn_larger(float a, float b) {
    return b > a ? b : a;
}

static __device__ __forceinline__ uint32_t attn_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void attn_copy16(void *to, const void *from, int wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(attn_shared(to)), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void attn_copy4(void *to, const void *from, int wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(attn_shared(to)), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}

static __device__ __forceinline__ void attn_copy_commit(void) {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Waits until at most N of this thread's groups are on their way. */
template <int N>
static __device__ __forceinline__ void attn_copy_wait(void) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

/* Where latent row `id` lies; NULL for an absent one. */
static __device__ __forceinline__ const unsigned char *attn_row_at(const attn_rows &r, int32_t id) {
    if (id < 0)
        return NULL;
    return r.cache.base + r.cache.block_bytes * (size_t)(id / BR_PAGE_TOK) + sizeof(bi_bf16) * (size_t)(id % BR_PAGE_TOK) * (size_t)r.row_ld;
}

/* Unit `unit` (columns 8 * unit ..) of a latent row to shared memory; zeros for an absent row and past the row's end. */
static __device__ __forceinline__ void attn_copy_unit(const attn_rows &r, void *to, const unsigned char *row, int32_t unit) {
    const int wanted = row && unit * ATTN_UNIT < r.row_ld;
    const unsigned char *from = wanted ? row + unit * 16 : r.cache.base;
    if (r.wide) {
        attn_copy16(to, from, wanted);
        return;
    }
    for (int i = 0; i < 16; i += 4)
        attn_copy4((unsigned char *)to + i, wanted ? from + i : from, wanted);
}

static __device__ __forceinline__ void attn_load_matrix(uint32_t d[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(attn_shared(row)));
}

static __device__ __forceinline__ void attn_load_matrix_trans(uint32_t d[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(attn_shared(row)));
}

/* Where unit `unit` of row `row` lies when rows of 128 * 2^n bytes have their units exchanged by row & 7: eight rows of one unit fall on
 * eight different bank groups. */
static __device__ __forceinline__ int attn_swizzle(int row, int unit, int row_bytes) {
    return row * row_bytes + ((unit ^ (row & 7)) << 4);
}

#endif
#endif
