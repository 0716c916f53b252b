/* bi_linear_parts: what the files of the dense products share: bi_linear*.cu, bi_route.cu, bi_head.cu.
 *
 * A job is n_head independent products y[t,h] = chain(x[t,h], W_h) of packed bf16 matrices, with or without adapters. Every
 * form below gives the same bits (N-CHAIN: one accumulator an output, k-blocks of 16 in rising order); which one runs is a
 * question of speed and alignment only. */
#ifndef BI_LINEAR_PARTS_CUH
#define BI_LINEAR_PARTS_CUH

#include "bi_cuda.cuh"

enum {
    DENSE_SLOT_MAX = 16,     /* adapters that touch one map */
    DENSE_SMALL_ROWS = 64,   /* up to here the weights pass once, by an own kernel or cuBLASLt */
    DENSE_ALIGN = 16         /* bytes; below it the element-wise form runs */
};

/* One adapter of the job; strides in elements, from map to map. */
typedef struct dense_slot {
    const bi_bf16 *a, *b; /* (rank, a_ld), (n_out, b_ld) */
    const float *s;
    int64_t a_stride, b_stride;
    int32_t slot, rank, a_ld, b_ld;
} dense_slot;

typedef struct dense_job {
    const bi_bf16 *x, *w;
    void *y;
    int64_t x_ld, x_head_ld, w_stride, y_ld, y_head_ld; /* elements */
    int32_t n_row, n_head, n_in, n_out, w_ld;
    int32_t y_f32, check;
    bi_fault fault;
    int32_t lowest; /* 0, or the lowest code of this launch: from there on a higher one gives way, whichever map came first */
    /* adapters; n_slot 0: none */
    const int32_t *row_slot;
    bi_bf16 *t; /* a row's T in the first pad(rank) of its t_ld places; only rows of a slot are written or read */
    int64_t t_head_ld;
    int32_t t_ld, n_slot;
    /* the launch */
    int32_t token_tiles, t_tiles, w_tiles; /* t_tiles: a slot and head; w_tiles: a head; either may be 0 */
    uint32_t *arrived; /* two counters at 0, when T and y come from one launch; 0 again when it ends */
    dense_slot slot[DENSE_SLOT_MAX];
} dense_job;

static inline int32_t dense_ld(int32_t n_in) {
    return (n_in + BI_MMA_K - 1) / BI_MMA_K * BI_MMA_K;
}

/* State of the dense products, made by bi_cuda_linear_open. */
typedef struct dense_lt dense_lt;
typedef struct dense_state {
    uint32_t *arrived; /* device memory, 0 */
    dense_lt *lt;      /* NULL: cuBLASLt is not to be had */
    void *encode;      /* the driver's maker of tensor maps; NULL: not to be had */
} dense_state;

/* Job without adapters, y in bf16 or f32: the fastest form that its rows and alignment allow. */
br_status bi_dense_base(bi_ctx *ctx, const dense_job *job);
/* The job as one packed matrix and rows of one head; y and the rest stay to be set. */
dense_job bi_dense_job(const bi_mat *w, int32_t n_row, int32_t n_head, const bi_bf16 *x, int64_t x_ld, int64_t x_head_ld);
/* The reference: always the own kernel for any number of rows. */
br_status bi_dense_tiles(bi_ctx *ctx, const dense_job *job, cudaStream_t stream);

/* bi_linear_lt.cu. fits: whether cuBLASLt may be asked at all. run: *done = 0 when no algorithm is inside the contract; then
 * nothing was launched. */
br_status bi_dense_lt_open(bi_ctx *ctx, dense_lt **out);
void bi_dense_lt_close(bi_ctx *ctx, dense_lt *lt);
void bi_dense_lt_note(const dense_lt *lt, char *note, size_t n); /* lt may be NULL; see bi_cuda_note */
int bi_dense_lt_fits(const dense_job *job);
br_status bi_dense_lt_run(bi_ctx *ctx, dense_lt *lt, const dense_job *job, int *done);

/* bi_linear_stream.cu: n maps on the same few rows, with or without adapters; x aligned. *done = 0 when they do not fit one launch
 * or the maps cannot be made; then nothing was launched. */
br_status bi_dense_stream_open(dense_state *state);
br_status bi_dense_stream(bi_ctx *ctx, const dense_job *job, int32_t n, int *done);

/* bi_linear_lora.cu: n maps on the same many rows, with T's place given; x aligned. *done as above; T may have been made in vain. */
br_status bi_dense_many_open(void);
br_status bi_dense_head_open(void); /* bi_head.cu */
br_status bi_dense_many(bi_ctx *ctx, const dense_job *job, int32_t n, int *done);

#endif
