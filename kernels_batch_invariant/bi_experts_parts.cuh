/* bi_experts_parts: what the files of the routed experts share: the plan, the products, the packed MXFP4 matrix.
 *
 * The (row, choice) pairs of a step are put in the order of their experts; a place is an index into that order. A tile is up to
 * EXPERTS_TILE_MAX places of one expert, which share one pass over its weights. A product is one launch: every (tile, slab of
 * output rows) is an item, and a persistent grid walks through the items. Which pairs share a tile moves no bit: each element
 * is one chain of its own (N-CHAIN), and columns of a tensor-core step do not see each other. */
#ifndef BI_EXPERTS_PARTS_CUH
#define BI_EXPERTS_PARTS_CUH

#include "bi_cuda.cuh"

enum {
    EXPERTS_TILE_MAX = 160, /* places; two maps of 64 rows an accumulator warpgroup leave no registers for more */
    EXPERTS_FEW_MAX = 8,    /* places up to which a tile of MXFP4 experts goes through bi_experts_few.cuh */
    EXPERTS_FEW_SHARED = 224 * 1024, /* that its rows may take */
    EXPERTS_CLASSES = 5,    /* of tiles of many, by the width of the tensor-core step that they take */
    EXPERTS_SLOT_MAX = 16,
    EXPERTS_K = 64,         /* products of a pipeline stage */
    EXPERTS_SUB = 64,       /* output rows of one map that a warpgroup holds */
    /* A block of the MXFP4 form: 64 outputs of 64 inputs. First 16 bytes a thread of a warpgroup, a word a k-block, its eight
     * codes those of the thread's A fragment; then four scales a row pair. */
    EXPERTS_FP4_CODES = 2048,
    EXPERTS_FP4_BLOCK = EXPERTS_FP4_CODES + 128,
};

typedef struct __align__(16) experts_tile {
    int32_t expert, begin, n;
    uint32_t slots; /* bit s: one of its rows has adapter s */
} experts_tile;

/* Device memory, made by the plan kernel. */
typedef struct experts_plan {
    experts_tile *tile;         /* (tile_max): those of many places from the front, those of few from the back */
    int32_t *n_tile;            /* many, few, then of each class */
    int32_t *of_class;          /* (EXPERTS_CLASSES, tile_max): which tiles of many are of a class, in any order */
    int32_t *pair, *row, *slot; /* of a place */
    int32_t tile_max;
} experts_plan;

/* A stack of bf16 matrices of one adapter; rank 0: the adapter leaves the map alone. */
typedef struct experts_side {
    const unsigned char *data;
    size_t stride;
    int32_t rank;
} experts_side;

/* Factors that fp4_expand moves codes by: 2^3, 2^6 + 2^1, 2^5 + 2^0. */
typedef struct experts_spread {
    uint32_t a1, a2, a3;
} experts_spread;

typedef enum experts_kind {
    EXPERTS_UP,   /* h = act(gate, up): two maps, 128 outputs an item */
    EXPERTS_DOWN, /* y = R(acc): one map, 256 outputs an item */
    EXPERTS_T     /* T of N-LORA of one slot: two adapters' A as maps, 128 outputs an item */
} experts_kind;

typedef struct experts_product {
    experts_plan plan;
    int32_t n_part, n_slab; /* items of a tile; n_slab of them a slot in EXPERTS_T, else all */
    int32_t n_in, n_out;
    const bi_bf16 *in; /* rows of n_in, stride in_ld; by row of the step when gather, else by place */
    int64_t in_ld;
    int32_t gather, in_aligned;
    int32_t blocked;        /* in: rows of tiles of many as bi_experts_wide.cuh has them, those of few by place at in_few */
    const bi_bf16 *in_few;
    const unsigned char *w[2];
    size_t w_stride[2];
    experts_side side[2][EXPERTS_SLOT_MAX]; /* of a map: B, or A in EXPERTS_T */
    const float *s[2][EXPERTS_SLOT_MAX];    /* EXPERTS_T only */
    bi_bf16 *t[2];                          /* T of a map by place, stride t_ld */
    int64_t t_ld;
    int32_t has_t;                          /* T is made by a launch before this one */
    experts_spread spread;
    bi_act act;
    float act_inverse[2]; /* RN(1 / beta), of both betas */
    bool act_plain;       /* bi_experts_act.cuh serves this act */
    bi_bf16 *out;
    int64_t out_ld; /* DOWN: by pair */
    int32_t out_aligned;
    int32_t out_blocked; /* UP: as bi_experts_wide.cuh has the rows of the next product */
    bi_fault fault;
} experts_product;

/* Tile i of those of few places. */
static inline __host__ __device__ experts_tile *experts_few_tile(const experts_plan &plan, int32_t i) {
    return plan.tile + plan.tile_max - 1 - i;
}

/* Rows in blocks: of a tile, 64 k after 64 k; there, eight places after eight, core matrices of 8 places x 16 bytes, k before places.
 * A tile begins at a row of its own, a multiple of 8, behind those of the tiles before it. */
static inline __host__ __device__ int32_t pad8(int32_t n) {
    return (n + 7) & ~7;
}
static inline __host__ __device__ int32_t blocked_row(const experts_tile &tile, int32_t i) {
    return pad8(tile.begin) + 8 * i;
}
/* Where eight k of a place stand in 64 k of a tile, in elements. */
static inline __host__ __device__ int32_t blocked_piece(int32_t place, int32_t piece) {
    return (place >> 3) * 8 * EXPERTS_K + piece * 64 + (place & 7) * 8;
}
static inline __host__ __device__ int32_t blocked_chunks(int32_t n_in) {
    return (n_in + EXPERTS_K - 1) / EXPERTS_K;
}

/* Places of a tile of class c, at most. */
static inline __host__ __device__ constexpr int32_t class_places(int32_t c) {
    return c == 0 ? EXPERTS_TILE_MAX : c == 1 ? 144 : c == 2 ? 128 : c == 3 ? 96 : 64;
}

/* The output row that stands at row i of 16 of an A fragment: after the transposition of the accumulators a thread then holds
 * four outputs in a row. */
static inline __host__ __device__ int32_t bi_experts_row(int32_t i) {
    return (i & 1) + ((i & 7) >> 1) * 4 + (i >> 3) * 2;
}

/* Launches on ctx->stream, one kernel each, for the tiles of many or of few places, T for all; in bi_experts_fp4.cu and bi_experts_bf16.cu. */
br_status bi_experts_rows_fp4(bi_ctx *ctx, const experts_product *p, bi_bf16 *to);
br_status bi_experts_up_fp4(bi_ctx *ctx, const experts_product *p, int32_t n_row);
br_status bi_experts_down_fp4(bi_ctx *ctx, const experts_product *p, int32_t n_row);
br_status bi_experts_up_few(bi_ctx *ctx, const experts_product *p);
br_status bi_experts_down_few(bi_ctx *ctx, const experts_product *p);
br_status bi_experts_up_bf16(bi_ctx *ctx, const experts_product *p);
br_status bi_experts_down_bf16(bi_ctx *ctx, const experts_product *p);
br_status bi_experts_t(bi_ctx *ctx, const experts_product *p);

#endif
