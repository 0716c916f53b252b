/* pack_jobs: what has to be put into device memory when a model is opened, listed first and then done by several threads.
 *
 * Layer: model. A list counts until pack_jobs_open, and takes jobs from then on. */
#ifndef PACK_JOBS_H
#define PACK_JOBS_H

#include "model_parts.h"

typedef enum pack_kind {
    PACK_BF16,  /* a matrix of elements src[o * stride_out + i * stride_in] */
    PACK_FP4,   /* codes src, scales scale */
    PACK_WIDEN, /* n numbers of f32 out of bf16 */
    PACK_F32,   /* n numbers as they are */
    PACK_COPY,  /* n numbers of bf16 as they are */
    PACK_RES    /* n numbers of W of N-RES from norm src and proj scale, both in device memory already */
} pack_kind;

/* Elements that lie at data, or that gen makes from number `first` on. */
typedef struct pack_source {
    const void *data;
    const bi_weightgen *gen;
    uint64_t first;
} pack_source;

typedef struct pack_job {
    pack_kind kind;
    bi_mat to;                 /* PACK_BF16, PACK_FP4 */
    int32_t have_out, have_in; /* PACK_BF16: what the source has of it; zeros fill up the rest */
    int64_t stride_out, stride_in;
    void *dst;
    pack_source src, scale;
    int64_t n;
} pack_job;

typedef struct pack_jobs {
    pack_job *job, *last; /* last: those that read what others write */
    int32_t n_job, n_last;
    br_status status;
    const bi_backend *backend;
    br_device *device;
} pack_jobs;

static inline int pack_source_is_equal(pack_source a, pack_source b) {
    return a.data == b.data && a.gen == b.gen && a.first == b.first;
}

/* The source from its n-th bf16 element on. */
static inline pack_source pack_source_from(pack_source source, size_t n) {
    if (source.gen)
        return (pack_source){.gen = source.gen, .first = source.first + n};
    return (pack_source){.data = (const bi_bf16 *)source.data + n};
}

void pack_jobs_add(pack_jobs *jobs, pack_job job);
void pack_jobs_add_last(pack_jobs *jobs, pack_job job);
/* Makes room for as many jobs as were counted, and starts the list again. */
br_status pack_jobs_open(pack_jobs *jobs);
br_status pack_jobs_run(pack_jobs *jobs, const bi_backend *backend, br_device *device, br_pool *pool);
void pack_jobs_close(pack_jobs *jobs);

#endif
