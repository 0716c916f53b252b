/* bi_grad_attn_parts: what the passes of attention's gradients share: the call, moves to shared memory, score tiles.
 *
 * Internal to bi_grad_attn.cu, whose first comment says how the work is cut. */
#ifndef BI_GRAD_ATTN_PARTS_CUH
#define BI_GRAD_ATTN_PARTS_CUH

#include "bi_grad_cuda.cuh"

enum {
    CHUNK_ROWS = 1024, /* queries of a chunk */
    TILE_ROWS = 64,    /* latent rows of a tile */
    HEADS = 32,        /* of a group */
    THREADS = 512,
    WARPS = THREADS / 32,
    COLUMN_PAD = 32,
    ROW_GAP = 8,       /* bf16 behind a row in shared memory: an odd number of 16-byte units a row, so that eight rows use all banks */
    P_LD = HEADS + ROW_GAP,
    SHARED_MAX = 227 << 10,
    N_CARVED = 6,
    ROWS_WIDE = 9,     /* n8 tiles of a warp in attn_rows: a slab of 64 * 9 columns */
    LATENTS_WIDE = 18  /* in attn_latents: a slab of 32 * 18 */
};

/* One call. Arrays of scratch by query are by query of the chunk. */
typedef struct grad_attn {
    const bi_seg *seg;
    const int32_t *row_seg, *select, *n_select;
    int32_t select_ld, n_row, n_head, n_group, d, d_rope, ld, dz_ld; /* ld, dz_ld: of padded rows, in scratch */
    int32_t row0, n_query, n_tile, n_stage;
    float alpha;
    bi_bf16 *latent;            /* (n_row, ld) */
    bi_bf16 *q, *dz;            /* (n_query, n_group * 32, ld), (.., dz_ld) */
    float4 *stat;               /* (n_query, n_group * 32) max, 1 / L, delta */
    unsigned long long *member; /* (n_query, n_tile) bit i: the query reads row 64 * tile + i */
    float *partial;             /* (n_group, n_row, ld) */
    float *dq, *dq_r, *dlatent;
} grad_attn;

static inline int32_t padded(int32_t n) {
    return (n + COLUMN_PAD - 1) / COLUMN_PAD * COLUMN_PAD;
}

/* ---- moves ------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t shared_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void copy16(void *to, const void *from, int wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_at(to)), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void copy_commit(void) {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

static __device__ __forceinline__ void copy_wait(int one_left) {
    if (one_left)
        asm volatile("cp.async.wait_group 1;\n" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;\n" ::: "memory");
}

static __device__ __forceinline__ void load_matrix(uint32_t d[4], const bi_bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_at(row)));
}

static __device__ __forceinline__ void load_matrix_trans(uint32_t d[4], const bi_bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_at(row)));
}

static __device__ __forceinline__ void store_pair(bi_bf16 *to, float low, float high) {
    *(uint32_t *)to = (uint32_t)bi_round(low) | (uint32_t)bi_round(high) << 16;
}

/* A row of n elements, a multiple of 8; zeros unless wanted. By one warp. */
static __device__ __forceinline__ void copy_row(bi_bf16 *to, const bi_bf16 *from, int32_t n, int wanted) {
    for (int32_t i = 8 * ((int)threadIdx.x & 31); i < n; i += 8 * 32)
        copy16(to + i, from + i, wanted);
}

/* HEADS rows of ld elements, one behind the other in `from`. */
static __device__ __forceinline__ void copy_heads(bi_bf16 *to, const bi_bf16 *from, int32_t ld) {
    for (int i = (int)threadIdx.x / 32; i < HEADS; i += WARPS)
        copy_row(to + i * (ld + ROW_GAP), from + (int64_t)i * ld, ld, 1);
}

/* What a query reads: the first latent row of its segment, how many positions, their list. */
struct grad_reach {
    int32_t first, n;
    const int32_t *list; /* NULL: all of 0 .. n - 1 */

    __device__ __forceinline__ grad_reach(const grad_attn &g, int32_t t) {
        const int32_t seg = g.row_seg[t];
        first = seg < 0 ? 0 : g.seg[seg].row;
        n = seg < 0 ? 0 : g.select ? g.n_select[t] : t - first + 1;
        list = g.select ? g.select + (int64_t)t * g.select_ld : NULL;
    }
    __device__ __forceinline__ int32_t row(int32_t i) const {
        return first + (list ? list[i] : i);
    }
};

/* ---- tiles ------------------------------------------------------------------------------------------------------------- */

/* s and dp of a tile, unscaled: this warp's 16 latent rows x 8 heads as mma lays out its accumulators. latent (64, ld), q (32, ld), dz (32,
 * dz_ld), each row with its gap. */
static __device__ __forceinline__ void score_tile(float s[4], float dp[4], const bi_bf16 *latent, const bi_bf16 *q, const bi_bf16 *dz, int32_t ld,
                                                  int32_t dz_ld) {
    const int lane = (int)threadIdx.x & 31, wm = (int)threadIdx.x >> 5 & 3, wn = (int)threadIdx.x >> 7;
    const bi_bf16 *a_at = latent + (16 * wm + (lane & 15)) * (ld + ROW_GAP) + (lane >> 4) * 8;
    const bi_bf16 *q_at = q + (8 * wn + (lane & 7)) * (ld + ROW_GAP) + (lane >> 3) * 8;
    const bi_bf16 *dz_at = dz + (8 * wn + (lane & 7)) * (dz_ld + ROW_GAP) + (lane >> 3) * 8;
#pragma unroll
    for (int i = 0; i < 4; i++)
        s[i] = dp[i] = 0.0f;
#pragma unroll 2
    for (int32_t k = 0; k < ld; k += 32) {
        uint32_t a[2][4], b[4];
        load_matrix(a[0], a_at + k);
        load_matrix(a[1], a_at + k + 16);
        load_matrix(b, q_at + k);
        bi_cuda_mma16(s, a[0], b);
        bi_cuda_mma16(s, a[1], b + 2);
        if (k < dz_ld) {
            load_matrix(b, dz_at + k);
            bi_cuda_mma16(dp, a[0], b);
            bi_cuda_mma16(dp, a[1], b + 2);
        }
    }
}

/* p and alpha ds of an element; stat: max, 1 / L, delta of its head. */
static __device__ __forceinline__ float2 back(float s, float dp, float alpha, float top, float inverse, float delta) {
    const float p = expf(alpha * s - top) * inverse;
    return make_float2(p, alpha * (p * (dp - delta)));
}

#endif
