/* job_bench: what the files of the verb `bench` share: shapes, device arrays of random numbers, rows and how they are measured.
 *
 * Layer: bench. A family of rows (job_bench_<family>.c) names each of its rows to bench_wants, lays out its inputs with
 * bench_take and its kin, and hands a bench_row to bench_measure. Everything taken belongs to that row and goes with it. Inputs
 * are random, never zeros: a tensor core fed with zeros draws less power and runs faster. They depend on the row alone, so that
 * digests of two runs can be compared, whichever rows were chosen. */
#ifndef JOB_BENCH_H
#define JOB_BENCH_H

#include "bi_cuda_open.h"
#include "br_hash.h"
#include "br_mem.h"
#include "job_bench_peer.h"

#include <stdio.h>

enum {
    BENCH_PERIOD = 4194301,    /* random numbers before they repeat: a prime, so that no row length divides it */
    BENCH_WEIGHT_SHIFT = 6,    /* weights are 2^-6 as large as activations */
    BENCH_BLOCK_MAX = 64,      /* device blocks of one row */
    BENCH_VARIANT_MAX = 64,    /* operand sets that a row goes through in turn */
    BENCH_OUTPUT_MAX = BI_LINEAR_GROUP_MAX,
    BENCH_LORA_RANK = 32,
    BENCH_NAME_BYTES = 160,
};

/* The widths of K3.1 at full scale; at `tiny` small ones, for a dry run of the same code. */
typedef struct bench_shape {
    const char *name;
    int32_t d_model, n_vocab, prefill; /* prefill: rows of a large step */
    int32_t n_head, d_kv_latent, d_nope, d_rope;
    int32_t kda_n_head, kda_d;
    int32_t index_n_head, index_d, topk, n_pos, attn_n_pos;
    int32_t d_latent, d_ff, n_expert, expert_topk;
    int32_t dense_divisor, batch_divisor; /* of the dense shapes, of the batches of decode */
    const char *slice_preset;             /* of whole steps */
    int32_t slice_context;
    size_t copy_bytes, spread_bytes;      /* spread: what the operand sets of a row must exceed together, four times the L2 */
} bench_shape;

/* A measured row, microseconds; 0: not measured. */
typedef struct bench_result {
    double us, us_min, us_max, floor_us, peer_us, peer_us_min;
    br_digest digest;
    int has_digest;
} bench_result;

/* Products that were faster than the bf16 ceiling of the run: then the ceiling is too low, and floors and shares are too. */
typedef struct bench_over {
    int32_t n;
    double rate; /* of the fastest, operations a second */
    char name[BENCH_NAME_BYTES];
} bench_over;

/* The steps of a slice that are measured whole. */
typedef enum bench_step { BENCH_DECODE_1, BENCH_DECODE_8, BENCH_DECODE_64, BENCH_DECODE_256, BENCH_SCORE, BENCH_STEP_COUNT } bench_step;

typedef struct bench {
    const br_bench_options *options;
    const bench_shape *shape;
    br_pool *pool;
    br_device *device;
    bi_backend backend;
    bench_peer *peer; /* NULL: none */
    br_line line; /* NULL: silent */
    void *context;
    int naming;   /* rows are named and counted only */
    br_report *report;
    FILE *csv;
    char date[16];
    bi_bf16 *unit, *weight; /* BENCH_PERIOD random numbers of deviation 1, and 2^-6 of them */
    size_t draw;            /* numbers that the row at hand has used */
    void *block[BENCH_BLOCK_MAX];
    int n_block;
    uint32_t *fault;        /* (prefill) words of the row at hand, device memory */
    double copy_rate, mma_rate; /* bytes and operations a second, measured in this run; 0 before */
    bench_over *over;           /* NULL: nobody asks */
    bench_result step[BENCH_STEP_COUNT]; /* without an adapter; us 0: not measured */
    char failure[256];      /* of the first row that failed */
} bench;

/* The rates that floors divide by. */
typedef enum bench_unit {
    BENCH_MMA,    /* the bf16 rate of this run */
    BENCH_MMA_F8, /* twice that, as the datasheet has it */
    BENCH_FP32    /* 60 TFLOP/s outside the tensor cores, the datasheet's 67 derated */
} bench_unit;

typedef br_status (*bench_op)(bench *b, const void *args);

/* An output of the row, in device memory. twin: the same output of the twin call; the bytes that both have must be equal. */
typedef struct bench_output {
    const void *all, *twin; /* twin NULL: not compared */
    size_t bytes, twin_bytes;
    int hashed;             /* enters the digest; 0: its layout is the backend's own */
} bench_output;

typedef struct bench_row {
    const char *name;
    char shape[96];
    bench_op op;
    const void *args;       /* n_variant structs of args_bytes: equal calls on other addresses */
    size_t args_bytes;
    int32_t n_variant;
    const void *twin;       /* the call at another launch shape whose first rows are the same; NULL: none */
    bench_output output[BENCH_OUTPUT_MAX];
    int32_t n_output;
    bench_op read;          /* fills the outputs after the call: the op that reads what the row's stores; NULL: the call does */
    const void *read_args;
    int32_t n_row;          /* rows whose fault words must stay 0 */
    double bytes, flops;    /* of the floor; 0, 0: none */
    double floor_us;        /* a floor that is known already */
    int is_plain;           /* called, not recorded: a recorded copy goes to the slower copy engine */
    int is_ceiling;         /* more and shorter blocks, the least of which counts */
    bench_unit unit;
    const char *peer_name, *request; /* NULL: no peer does this */
} bench_row;

/* ---- job_bench.c ---- */

/* Is this row chosen, and to be measured? A yes forgets what the row before has taken. */
int bench_wants(bench *b, const char *name);
int bench_is_chosen(const bench *b, const char *name); /* only asks */
int bench_price_needs(const bench *b, bench_step step);  /* is a chosen price made of this step's time? */
void bench_say(const bench *b, const char *format, ...) __attribute__((format(printf, 2, 3))); /* a line for the reader */
/* Prints and records a row; called by bench_measure, and for means of rows. share < 0, ratio < 0: empty. */
br_status bench_record(bench *b, const bench_row *row, const bench_result *result, double share, double ratio);
/* What a family's row function returns goes through here: a failed row is told and does not stop the run, but a lost device
 * and a table that cannot be written do. */
br_status bench_settle(bench *b, const char *name, br_status status);
double bench_geomean(const double *x, int n);

/* ---- job_bench_time.c ---- */

/* Digest, twin, faults, then times, ours and the peer's in turn. result may be NULL. */
br_status bench_measure(bench *b, const bench_row *row, bench_result *result);

/* ---- job_bench_data.c ---- */

br_status bench_data_open(bench *b);
void bench_data_close(bench *b);
void bench_forget(bench *b);
br_status bench_take(bench *b, size_t bytes, const char *what, void **out);
br_status bench_upload(bench *b, const void *host, size_t bytes, const char *what, void **out);
br_status bench_bf16(bench *b, int64_t n, const bi_bf16 **out);                      /* deviation 1 */
br_status bench_uniform(bench *b, int64_t n, float low, float high, const float **out);
br_status bench_below(bench *b, int64_t n, int32_t bound, const int32_t **out);      /* integers 0 .. bound - 1 */
/* n_copy packed matrices of equal content. */
br_status bench_mat(bench *b, int32_t n_out, int32_t n_in, int32_t n_copy, bi_mat *out);
/* A stack of n MXFP4 matrices, of which the first few are drawn and the others are copies of them. */
br_status bench_mat_fp4(bench *b, int32_t n_out, int32_t n_in, int32_t n, bi_mat *out);
/* n_seg segments of n_row rows each from position pos on; sequences seq, seq + 1, ... */
br_status bench_batch(bench *b, int32_t n_seg, int32_t n_row, int32_t seq, int32_t pos, bi_batch *out);
/* An empty cache of n_seq sequences of n_pos positions. shared: all sequences lie on the pages of the first. */
br_status bench_cache(bench *b, size_t block_bytes, int32_t n_seq, int32_t n_pos, int shared, bi_cache *out);
/* Batches of one segment of n_row rows each that cover n_seq sequences of n_pos positions; bench_sweep_at gives the i-th. */
typedef struct bench_sweep {
    int32_t n_batch, n_row;
    bi_batch batch;
} bench_sweep;
br_status bench_sweep_open(bench *b, int32_t n_seq, int32_t n_pos, bench_sweep *out);
bi_batch bench_sweep_at(const bench_sweep *sweep, int32_t i);

static inline bi_fault bench_fault(const bench *b) {
    return (bi_fault){.row = b->fault, .code = 1};
}
static inline int32_t bench_least(int32_t a, int32_t b) {
    return a < b ? a : b;
}
/* Operand sets of so many bytes that together exceed the caches. */
static inline int32_t bench_variants(const bench *b, double bytes) {
    const double n = (double)b->shape->spread_bytes / bytes + 1;
    return n < BENCH_VARIANT_MAX ? (int32_t)n : BENCH_VARIANT_MAX;
}
/* Rows of a decode step of n sequences. */
static inline int32_t bench_batch_size(const bench *b, int32_t n) {
    return n > b->shape->batch_divisor ? n / b->shape->batch_divisor : 1;
}

/* ---- single rows that the price of a step is made of; sizes that are not given are those of b->shape. result may be NULL ---- */

br_status bench_kda_prefill(bench *b, const char *name, int32_t n_seq, int32_t n_tok, bench_result *result);
br_status bench_kda_decode(bench *b, const char *name, int32_t n_seq, bench_result *result);
br_status bench_index_select(bench *b, const char *name, int32_t n_seq, int32_t n_step, int32_t pos, bench_result *result);
br_status bench_attn_sparse(bench *b, const char *name, int32_t n_seq, int32_t n_step, int32_t pos, bench_result *result);
br_status bench_experts_uniform(bench *b, const char *name, int32_t n_row, bench_result *result);
br_status bench_head_score(bench *b, const char *name, int32_t n_row, bench_result *result);

/* ---- the families ---- */

/* Fills copy_rate and mma_rate: from the least time that ours or the peer's took, so that no share is flattered by clocks that fell. */
br_status bench_ceilings(bench *b);
br_status bench_dense(bench *b);
br_status bench_head(bench *b);
br_status bench_kda(bench *b);
br_status bench_index(bench *b);
br_status bench_attn(bench *b);
br_status bench_experts(bench *b);
br_status bench_row_ops(bench *b);
br_status bench_slice(bench *b); /* fills step */
br_status bench_price(bench *b); /* after it */

#endif
