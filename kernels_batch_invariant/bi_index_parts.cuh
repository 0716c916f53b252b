/* bi_index_parts: what the kernels of the indexer share: the layout of keys and queries, the rows of a launch.      Contract: N-IDX
 *
 * Internal to bi_index.cu. An index block is BR_PAGE_TOK keys of e4m3 codes, d padded with zeros to 32, then their f32 scales. Codes lie as
 * the tensor core's fragments want them: a tile of 16 keys is d / 32 pieces of 512 bytes, 16 bytes a lane (lane / 4 the key in an eight,
 * lane % 4 = r), which are columns 4r .. 4r + 3 of two blocks of 16 columns, of keys `lane / 4` and `lane / 4 + 8`. So a warp reads whole
 * lines and nothing is rearranged. A block of 16 is summed exactly, so the order of columns inside it is free as long as queries have the
 * same: codes 4r, 4r + 1 stand in the fragment's columns 2r, 2r + 1, codes 4r + 2, 4r + 3 eight further on. */
#ifndef BI_INDEX_PARTS_CUH
#define BI_INDEX_PARTS_CUH

#include "bi_cuda.cuh"

enum {
    INDEX_TILE = 16,
    INDEX_PIECE = 512,
    INDEX_KEYS = 32 /* keys a warp takes at once */
};

static inline BI_HD int32_t index_pad(int32_t d) {
    return (d + 31) / 32 * 32;
}

/* Byte of codes 4 * four .. + 3 of a key in its block. */
static inline BI_HD int32_t index_code_at(int32_t d_pad, int32_t key, int32_t four) {
    const int32_t block = four / 4, lane = key % 8 * 4 + four % 4;
    return key / INDEX_TILE * INDEX_TILE * d_pad + block / 2 * INDEX_PIECE + lane * 16 + block % 2 * 8 + key / 8 % 2 * 4;
}

/* Byte of columns 4 * four .. + 3 of head h in a row's packed queries: a piece of 512 bytes for eight heads and two blocks of columns. */
static inline BI_HD int32_t index_query_at(int32_t d_pad, int32_t h, int32_t four) {
    const int32_t block = four / 4, lane = h % 8 * 4 + four % 4;
    return (h / 8 * (d_pad / 32) + block / 2) * INDEX_PIECE + lane * 16 + block % 2 * 8;
}

/* The same for the wide form: rows of heads of 128 bytes, a chunk of 64 columns after the other, units of 16 bytes swizzled by h & 7. These
 * are the first two columns; the other two lie in the unit after it. */
static inline BI_HD int32_t index_query_wide_at(int32_t n_tile, int32_t h, int32_t four, int second) {
    const int32_t block = four / 4, unit = block % 4 * 2 + second;
    return (block / 4 * n_tile * 8 + h) * 128 + ((unit ^ (h & 7)) << 4) + four % 4 * 4;
}

/* The rows of one launch: row0 .. row0 + n_row - 1 of the step. Arrays of scratch are by row of the launch. */
typedef struct index_rows {
    const bi_seg *seg;
    const int32_t *row_seg;
    bi_cache cache;
    int32_t row0, n_row, n_head, n_tile, d_pad, topk; /* n_tile: eights of heads */
    int32_t wide;                                     /* blocks lie on 16 bytes */
    int32_t swizzled;                                 /* queries are packed for the wide form, as f16; else as bf16 */
    int32_t all;                                      /* rows that see no more than topk are scored as well */
    int32_t query_bytes;                              /* of a row's packed query */
    unsigned char *query;                             /* (n_row) of (8 * n_tile, d_pad), packed */
    float *weight;                                    /* (n_row, 8 * n_tile) */
    int32_t *bad;                                     /* (n_row) an element of q or w is not finite; NULL: of no row */
    float *score;                                     /* (n_row, score_ld) */
    int64_t score_ld;
} index_rows;

#ifdef __CUDACC__

static __device__ __forceinline__ int32_t index_visible(const bi_seg &seg, int32_t row) {
    return seg.pos + row - seg.row + 1;
}

/* The smallest power of two with scale * 448 >= max(amax, 1e-4), as in the oracle. amax: bits of the largest magnitude. */
static __device__ __forceinline__ float index_scale(uint32_t amax) {
    const uint32_t least = bi_u32_of(BI_IDX_AMAX_MIN), top = bi_u32_of(BI_IDX_E4M3_MAX);
    amax = amax > least ? amax : least;
    const uint32_t field = (amax >> 23) - (top >> 23) + ((amax & 0x7fffffu) > (top & 0x7fffffu));
    return bi_f32_of((field + 127) << 23);
}

/* Bits of the largest magnitude of x (d) over a warp; *finite 0 when one is not finite. */
static __device__ __forceinline__ uint32_t index_amax(const bi_bf16 *x, int32_t d, int lane, int *finite) {
    uint32_t amax = 0;
    for (int32_t i = lane; i < d; i += 32) {
        const uint32_t size = (uint32_t)(x[i] & 0x7fff) << 16;
        amax = size > amax ? size : amax;
    }
    for (int h = 16; h > 0; h >>= 1) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, amax, h);
        amax = other > amax ? other : amax;
    }
    *finite = amax < BI_F32_INF;
    return amax;
}

/* Codes of columns 4 * four .. + 3 of x (n); zeros past the last. */
static __device__ __forceinline__ uint32_t index_codes(const bi_bf16 *x, int32_t n, int32_t four, float scale) {
    uint32_t codes = 0;
    for (int i = 0; i < 4; i++)
        if (four * 4 + i < n)
            codes |= (uint32_t)bi_e4m3_of(BI_DIV(bi_widen(x[four * 4 + i]), scale)) << 8 * i;
    return codes;
}

#endif
#endif
