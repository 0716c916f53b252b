/* bi_grad_experts_product: a tile of a grouped product of the experts' gradients, on mma.sync. Internal to bi_grad_experts.cu.
 *
 * A tile is up to 64 places (pairs of one expert and adapter slot) x 128 outputs; 256 threads, eight warps of 32 x 32; steps of 64
 * products over rising k in two stages of shared memory, one computed while the next is copied. A matrix always lies in a stage as
 * its rows of outputs: the product with W^T (TURNED false) reads fragments as they lie, the one with W through a transposition.
 * MXFP4 (the layout of bi_experts_parts.cuh) is expanded between global and shared memory. */
#ifndef BI_GRAD_EXPERTS_PRODUCT_CUH
#define BI_GRAD_EXPERTS_PRODUCT_CUH

#include "bi_experts_product.cuh"
#include "bi_grad_experts_parts.cuh"

enum {
    GE_OUTS = 128,
    GE_STEP = 64,
    GE_THREADS = 256,
    /* Row strides in shared memory, in elements: eight rows of 16 bytes meet all banks. */
    GE_ROW_LD = GE_STEP + 8,
    GE_TURNED_LD = GE_OUTS + 8,
    GE_ROWS_BYTES = GE_PLACES * GE_ROW_LD * 2,
    GE_STAGE_BYTES = GE_ROWS_BYTES + GE_OUTS * GE_ROW_LD * 2,
    GE_SHARED = 2 * GE_STAGE_BYTES
};
static_assert(GE_STEP * GE_TURNED_LD <= GE_OUTS * GE_ROW_LD, "both layouts of a matrix fit");

/* Rows of places: bf16, 16-byte aligned, zeros from n up to the next multiple of 8. rest: what rounding to them took away, as such
 * rows again; NULL: not kept. */
typedef struct ge_rows {
    const bi_bf16 *base, *rest;
    const int32_t *index; /* row of a place; NULL: the place itself */
    int64_t ld;
    int32_t n;
} ge_rows;

/* One packed matrix. */
typedef struct ge_mat {
    const unsigned char *data; /* NULL: absent */
    int32_t n_out, n_in;
    bool fp4;
} ge_mat;

/* What a thread holds of an accumulator: [16 rows][8 columns][fragment]. */
typedef float ge_acc[2][4][4];

static __device__ __forceinline__ void ge_commit(void) {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int LEFT> static __device__ __forceinline__ void ge_wait(void) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}
static __device__ __forceinline__ void ge_copy16(uint32_t to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void ge_ldmatrix4(uint32_t from, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void ge_ldmatrix4_turned(uint32_t from, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ uint32_t ge_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copies `rows` x `cols` elements of `from` to a stage; (row, col) is real below (n_row, n_col), else zeros. */
template <int ROWS, int COLS, int LD>
static __device__ __forceinline__ void ge_copy_block(uint32_t to, const bi_bf16 *from, int64_t ld, int32_t n_row, int32_t n_col) {
#pragma unroll
    for (int i = 0; i < ROWS * COLS / 8 / GE_THREADS; i++) {
        const int32_t at = (int32_t)threadIdx.x + i * GE_THREADS, row = at / (COLS / 8), col = at % (COLS / 8) * 8;
        const bool real = row < n_row && col < n_col;
        ge_copy16(to + (uint32_t)(row * LD + col) * 2, from + (real ? row * ld + col : 0), real);
    }
}

/* Places of a tile: two rows a thread, whose addresses it keeps. */
typedef struct ge_sources {
    const bi_bf16 *row[2]; /* NULL: no such place */
} ge_sources;

static __device__ __forceinline__ ge_sources ge_sources_of(const ge_rows &rows, const ge_tile &tile) {
    ge_sources s;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t place = (int32_t)threadIdx.x / 8 + 32 * i;
        s.row[i] = NULL;
        if (place < tile.n)
            s.row[i] = rows.base + (rows.index ? rows.index[tile.begin + place] : tile.begin + place) * rows.ld;
    }
    return s;
}

static __device__ __forceinline__ void ge_copy_rows(uint32_t to, const ge_rows &rows, const ge_sources &s, int32_t k) {
    const int32_t col = (int32_t)threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool real = s.row[i] && k + col < rows.n;
        ge_copy16(to + (uint32_t)(((int32_t)threadIdx.x / 8 + 32 * i) * GE_ROW_LD + col) * 2, real ? s.row[i] + k + col : rows.base, real);
    }
}

/* A step of a bf16 matrix: outputs `first` .. or, TURNED, inputs `first` ..; k of the other kind. */
template <bool TURNED> static __device__ __forceinline__ void ge_copy_bf16(uint32_t to, const ge_mat &w, int32_t first, int32_t k) {
    const int32_t out = TURNED ? k : first, in = TURNED ? first : k, ld = (w.n_in + 15) / 16 * 16;
    const bi_bf16 *from = (const bi_bf16 *)(const void *)w.data + (int64_t)out * ld + in;
    if constexpr (TURNED)
        ge_copy_block<GE_STEP, GE_OUTS, GE_TURNED_LD>(to, from, ld, w.n_out - out, ld - in);
    else
        ge_copy_block<GE_OUTS, GE_STEP, GE_ROW_LD>(to, from, ld, w.n_out - out, ld - in);
}

/* Sixteen bytes of codes and four scales of a thread: two blocks of 64 x 64 a step, one for 128 threads each. */
typedef struct ge_codes {
    uint32_t word[4], scales;
} ge_codes;

template <bool TURNED> static __device__ __forceinline__ ge_codes ge_load_codes(const ge_mat &w, int32_t first, int32_t k) {
    const int32_t half = (int32_t)threadIdx.x / 128, thread = (int32_t)threadIdx.x % 128, n_chunk = (w.n_in + EXPERTS_K - 1) / EXPERTS_K;
    const int32_t out = TURNED ? k / EXPERTS_SUB : first / EXPERTS_SUB + half, chunk = TURNED ? first / EXPERTS_K + half : k / EXPERTS_K;
    ge_codes c = {{0, 0, 0, 0}, 0};
    if (out * EXPERTS_SUB < w.n_out && chunk < n_chunk) {
        const unsigned char *block = w.data + ((int64_t)out * n_chunk + chunk) * EXPERTS_FP4_BLOCK;
        const uint4 all = *(const uint4 *)(const void *)(block + thread * 16);
        c.word[0] = all.x;
        c.word[1] = all.y;
        c.word[2] = all.z;
        c.word[3] = all.w;
        c.scales = *(const uint32_t *)(const void *)(block + EXPERTS_FP4_CODES + thread / 4 * 4);
    }
    return c;
}

/* Rows g and g + 8 of the warp's sixteen stand at outputs bi_experts_row(g) and two behind. */
template <bool TURNED> static __device__ __forceinline__ void ge_store_codes(unsigned char *to, const ge_codes &c, const experts_spread &spread) {
    const int32_t half = (int32_t)threadIdx.x / 128, warp = (int32_t)threadIdx.x % 128 / 32, lane = (int32_t)threadIdx.x % 32;
    const int32_t row = warp * 16 + bi_experts_row(lane / 4), ld = TURNED ? (int)GE_TURNED_LD : (int)GE_ROW_LD;
    bi_bf16 *at = (bi_bf16 *)(void *)to + (TURNED ? row * ld + half * 64 : (half * 64 + row) * ld) + lane % 4 * 2;
    const bool wide = (c.scales & 0x80808080u) != 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t scale0 = fp4_scale(c.scales, s >> 1), scale8 = fp4_scale(c.scales, 2 + (s >> 1));
        uint32_t a[4];
        if (wide)
            fp4_expand_wide(spread, c.word[s], scale0, scale8, a);
        else
            fp4_expand(spread, c.word[s], fp4_factor(scale0), fp4_factor(scale8), a);
#pragma unroll
        for (int r = 0; r < 4; r++)
            *(uint32_t *)(void *)(at + 2 * (r & 1) * ld + s * 16 + 8 * (r >> 1)) = a[r];
    }
}

/* acc += the step in a stage. */
template <bool TURNED> static __device__ __forceinline__ void ge_compute(ge_acc &acc, uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, eight = lane & 7, odd = lane >> 3 & 1, high = lane >> 4;
    const uint32_t rows = stage + ((warp & 1) * 32 + eight + odd * 8) * (GE_ROW_LD * 2) + high * 16;
    const uint32_t mat = stage + GE_ROWS_BYTES +
                         (TURNED ? (eight + odd * 8) * (GE_TURNED_LD * 2) + ((warp >> 1) * 32 + high * 8) * 2
                                 : ((warp >> 1) * 32 + eight + high * 8) * (GE_ROW_LD * 2) + odd * 16);
#pragma unroll
    for (uint32_t k = 0; k < GE_STEP; k += 16) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            ge_ldmatrix4(rows + i * 16 * (GE_ROW_LD * 2) + k * 2, a[i]);
            if constexpr (TURNED)
                ge_ldmatrix4_turned(mat + k * (GE_TURNED_LD * 2) + i * 32, b[i]);
            else
                ge_ldmatrix4(mat + i * 16 * (GE_ROW_LD * 2) + k * 2, b[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                bi_cuda_mma16(acc[i][j], a[i], &b[j / 2][j % 2 * 2]);
    }
}

/* acc += rows W^T of outputs first .., or rows W of inputs first .. (TURNED). All threads of the block; shared: GE_SHARED bytes. */
template <bool TURNED>
static __device__ __forceinline__ void ge_multiply(ge_acc &acc, const ge_rows &rows, const ge_mat &w, const ge_tile &tile, int32_t first,
                                                   const experts_spread &spread, unsigned char *shared) {
    const int32_t n_k = TURNED ? w.n_out : w.n_in;
    const ge_sources sources = ge_sources_of(rows, tile);
    const uint32_t base = ge_shared(shared);
    ge_copy_rows(base, rows, sources, 0);
    if (w.fp4)
        ge_store_codes<TURNED>(shared + GE_ROWS_BYTES, ge_load_codes<TURNED>(w, first, 0), spread);
    else
        ge_copy_bf16<TURNED>(base + GE_ROWS_BYTES, w, first, 0);
    ge_commit();
    uint32_t stage = 0;
#pragma unroll 1
    for (int32_t k = 0; k < n_k; k += GE_STEP, stage ^= GE_STAGE_BYTES) {
        const uint32_t next = stage ^ GE_STAGE_BYTES;
        const bool more = k + GE_STEP < n_k;
        ge_codes codes = {{0, 0, 0, 0}, 0};
        if (more) {
            ge_copy_rows(base + next, rows, sources, k + GE_STEP);
            if (w.fp4)
                codes = ge_load_codes<TURNED>(w, first, k + GE_STEP);
            else
                ge_copy_bf16<TURNED>(base + next + GE_ROWS_BYTES, w, first, k + GE_STEP);
        }
        ge_commit();
        ge_wait<1>();
        __syncthreads();
        ge_compute<TURNED>(acc, base + stage);
        if (more && w.fp4)
            ge_store_codes<TURNED>(shared + next + GE_ROWS_BYTES, codes, spread);
        __syncthreads();
    }
}

/* Row and column of element e of a thread's accumulator. */
static __device__ __forceinline__ int32_t ge_row_of(int i, int e) {
    return (int32_t)(threadIdx.x / 32 & 1) * 32 + i * 16 + (int32_t)(threadIdx.x % 32) / 4 + (e >> 1) * 8;
}
static __device__ __forceinline__ int32_t ge_col_of(int j, int e) {
    return (int32_t)(threadIdx.x / 64) * 32 + j * 8 + (int32_t)(threadIdx.x % 4) * 2 + (e & 1);
}

#endif
