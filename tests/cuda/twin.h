/* twin: one op, both backends, twin memory: equal inputs go in, and every byte of the memory must come out equal.
 *
 * A test takes its arrays from the twin, fills the host side, calls twin_begin, runs the op in a loop of TWIN_RUNS with pointers
 * twin_at(.., side, ..), and calls twin_compare. The oracle works in place on the host side; the GPU on a copy of what lay there at
 * twin_begin. Since all bytes are compared, a write outside an output shows as well: arrays have guard gaps between them, and all
 * is poisoned (NaN, negative integers) until filled. The GPU runs twice from the same memory, once with its scratch poisoned, once
 * with what the first run left there, and every byte of both must be equal; BITROLL_GPU_RUNS=1 in the environment leaves that out, where what
 * looks at each access makes a run long. */
#ifndef TWIN_H
#define TWIN_H

#include "bi_cuda_open.h"
#include "op_rig.h"

typedef enum twin_side { TWIN_ORACLE, TWIN_CUDA } twin_side;

enum { TWIN_ARRAY_MAX = 128, TWIN_BLOCK_MAX = 512 };

/* Memory whose layout is the backend's own: packed matrices, states, cache blocks. */
typedef struct twin_block {
    void *side[2];
    size_t bytes[2];
    unsigned char *before, *first; /* of the GPU's side, where ops write to it: at twin_begin, and what the first run left */
} twin_block;

typedef struct twin {
    br_pool *pool;
    br_device *device;
    bi_backend backend[2];
    unsigned char *host, *back, *first, *device_side; /* first: what the first run of the GPU left */
    size_t used, size;
    int n_gpu_run, run; /* of a case: the GPU's, then one of the oracle; the next one */
    struct {
        const char *name;
        size_t at, bytes;
    } array[TWIN_ARRAY_MAX];
    int n_array;
    twin_block block[TWIN_BLOCK_MAX];
    int n_block;
} twin;

/* bytes: room for all arrays of a case. */
void twin_open(twin *t, const bi_limits *limits, size_t bytes);
void twin_close(twin *t);
void twin_reset(twin *t); /* forgets arrays and blocks; the oracle's scratch is poisoned where a test does so itself */

void *twin_take(twin *t, const char *name, size_t bytes); /* host side, poisoned; name a literal */
#define TWIN_ARRAY(t, type, name, count) ((type *)twin_take((t), (name), sizeof(type) * (size_t)(count)))
void *twin_at(const twin *t, twin_side side, const void *host); /* NULL stays NULL */
/* Equal poison on both sides, then filled by ops only. */
twin_block twin_private(twin *t, size_t bytes_oracle, size_t bytes_cuda);

/* A packed stack of n matrices (n_out, n_in) on both sides. w: all of them, one after the other, host memory of any origin. */
typedef struct twin_mat {
    bi_mat side[2];
} twin_mat;
twin_mat twin_stack(twin *t, const bi_bf16 *w, int n, int n_out, int n_in);
twin_mat twin_stack_fp4(twin *t, const uint8_t *code, const uint8_t *scale, int n, int n_out, int n_in);

void twin_begin(twin *t);
/* The runs of a case: the GPU, again where it runs twice, the oracle. Begin and end between them are the twin's; do not leave the loop early. */
#define TWIN_RUNS(t, side) for (twin_side side; twin_next((t), &side);)
int twin_next(twin *t, twin_side *side);
void twin_compare(twin *t, const char *what); /* fails the test with array, index and both patterns */
/* A run of the GPU since twin_begin launched exactly this; launch_list.h. */
void twin_launched(twin *t, const char *what, const char *list);
br_status twin_wait(twin *t);

/* A batch over host arrays made from segments {seq, n_row, pos}, on both sides: batch[side]. Take it before twin_begin. */
typedef struct twin_batch {
    bi_batch side[2];
} twin_batch;
twin_batch twin_batch_of(twin *t, const bi_seg *seg, int n_seg);

#endif
