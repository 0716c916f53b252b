/* bi_attn_parts: what the passes of attention share: class lists, latent rows, warp-level moves.      Contract: N-ATT-2
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
    ATTN_P_BYTES = BI_ATT_BLOCK * (int)sizeof(bi_bf16) /* weights of one head and block */
};

static inline int32_t attn_row_ld(int32_t d_latent) {
    return (d_latent + ATTN_UNIT - 1) / ATTN_UNIT * ATTN_UNIT;
}

/* The rows of one launch: `row0` .. of the step, their caches and lists, and where the passes meet. Arrays are by row of the launch. */
typedef struct attn_rows {
    const bi_seg *seg;
    const int32_t *row_seg;
    bi_cache cache;
    int32_t row0, row_ld, wide;           /* wide: rows of the cache lie on 16 bytes */
    int32_t n_head, n_head_pad, d_kv_latent, d_rope, n_block_max;
    const int32_t *list;                  /* (n_row, list_ld) ids of latent rows by class; NULL: every visible position */
    const int32_t *count;                 /* (n_row, 8) */
    int32_t list_ld;
    unsigned char *weight;                /* (n_row, n_block_max, n_head_pad, 64) R(e) in bf16 by place, units swizzled by head & 7 */
    float *scale;                         /* (n_row, n_block_max, n_head_pad) f; 0 for a first block, which does not use it */
    float2 *stat;                         /* (n_row, 8, n_head_pad) m and l of a class */
} attn_rows;

#ifdef __CUDACC__

/* One row's class: n entries, the first at `first` of its list, its first block at `block` of the row's blocks. */
typedef struct attn_class {
    int32_t n, first, block;
} attn_class;

static __device__ __forceinline__ int32_t attn_class_count(const attn_rows &r, int32_t t, int32_t visible, int32_t c) {
    if (r.list)
        return r.count[t * BI_ATT_CLASSES + c];
    const int32_t round = BI_ATT_BLOCK * BI_ATT_CLASSES, rest = visible % round - BI_ATT_BLOCK * c;
    return visible / round * BI_ATT_BLOCK + (rest < 0 ? 0 : rest > BI_ATT_BLOCK ? BI_ATT_BLOCK : rest);
}

static __device__ __forceinline__ attn_class attn_class_of(const attn_rows &r, int32_t t, int32_t visible, int32_t c) {
    attn_class out = {0, 0, 0};
    for (int32_t i = 0; i < c; i++) {
        const int32_t n = attn_class_count(r, t, visible, i);
        out.first += n;
        out.block += (n + BI_ATT_BLOCK - 1) / BI_ATT_BLOCK;
    }
    out.n = attn_class_count(r, t, visible, c);
    return out;
}

static __device__ __forceinline__ int32_t attn_block_at(const bi_cache &c, int32_t seq, int32_t page) {
    return c.table ? c.table[(int64_t)seq * c.table_ld + page] : c.first[seq] + page;
}

/* The latent row of entry i of class c; -1 for an absent one. */
static __device__ __forceinline__ int32_t attn_entry(const attn_rows &r, int32_t t, int32_t seq, attn_class k, int32_t c, int32_t i) {
    if (i >= k.n)
        return -1;
    if (r.list)
        return r.list[(int64_t)t * r.list_ld + k.first + i];
    return attn_block_at(r.cache, seq, i / BI_ATT_BLOCK * BI_ATT_CLASSES + c) * BR_PAGE_TOK + i % BI_ATT_BLOCK;
}

/* Which entry of a block of 64 has place p among the weights of a head, and in the second pass among the latent rows. A step of 16 entries
 * is summed exactly, so inside it they may lie in any order: eight even ones first, then the odd ones, is what the first pass has at hand. */
static __device__ __forceinline__ int attn_entry_of_place(int p) {
    return (p & 48) + (p & 7) * 2 + (p >> 3 & 1);
}

static __device__ __forceinline__ uint32_t attn_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* A kernel launched `early` begins while the one before it ends: here it waits until that one, and all it wrote, is there. */
static __device__ __forceinline__ void attn_wait_before(void) {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

/* From here on the kernel after this one may begin, where an SM has room. */
static __device__ __forceinline__ void attn_let_next(void) {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
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
