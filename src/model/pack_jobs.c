/* Packing jobs; see pack_jobs.h. */
#include "pack_jobs.h"

#include "bi_bits.h"

#include <string.h>

static void add(pack_job *list, int32_t *n, pack_job job) {
    if (list)
        list[*n] = job;
    (*n)++;
}

void pack_jobs_add(pack_jobs *jobs, pack_job job) {
    add(jobs->job, &jobs->n_job, job);
}

void pack_jobs_add_last(pack_jobs *jobs, pack_job job) {
    add(jobs->last, &jobs->n_last, job);
}

br_status pack_jobs_open(pack_jobs *jobs) {
    BR_TRY(br_mem_alloc((void **)&jobs->job, (size_t)jobs->n_job * sizeof(pack_job), "the list of matrices to pack"));
    BR_TRY(br_mem_alloc((void **)&jobs->last, (size_t)jobs->n_last * sizeof(pack_job), "the list of vectors to make"));
    jobs->n_job = jobs->n_last = 0;
    return BR_OK;
}

void pack_jobs_close(pack_jobs *jobs) {
    br_mem_free(jobs->job);
    br_mem_free(jobs->last);
}

/* A source smaller than the matrix: its zeros are written out first. */
static br_status pack_filled_up(const pack_jobs *jobs, const pack_job *job) {
    const bi_mat *to = &job->to;
    const bi_bf16 *src = job->src.data;
    bi_bf16 *full;
    BR_TRY(br_mem_alloc((void **)&full, (size_t)to->n_out * (size_t)to->n_in * sizeof *full, "a matrix to pack"));
    for (int64_t o = 0; o < job->have_out; o++)
        for (int64_t i = 0; i < job->have_in; i++)
            full[o * to->n_in + i] = src[o * job->stride_out + i * job->stride_in];
    br_status status = jobs->backend->op->mat_pack_bf16(jobs->backend->ctx, (void *)(uintptr_t)to->data, to->n_out, to->n_in, full, to->n_in, 1);
    br_mem_free(full);
    return status;
}

static br_status upload(const pack_jobs *jobs, void *dst, const void *src, int64_t n) {
    BR_TRY(br_device_upload(jobs->device, dst, src, (size_t)n));
    return br_device_wait(jobs->device);
}

static br_status widen(const pack_jobs *jobs, const pack_job *job) {
    float *wide;
    BR_TRY(br_mem_alloc((void **)&wide, (size_t)job->n * sizeof *wide, "a vector to widen"));
    for (int64_t i = 0; i < job->n; i++) {
        bi_bf16 x;
        memcpy(&x, (const unsigned char *)job->src.data + (size_t)i * sizeof x, sizeof x); /* files need not align it */
        wide[i] = bi_widen(x);
    }
    br_status status = upload(jobs, job->dst, wide, job->n * (int64_t)sizeof *wide);
    br_mem_free(wide);
    return status;
}

static br_status generate(const pack_jobs *jobs, const pack_job *job) {
    const bi_ops *op = jobs->backend->op;
    static const bi_generate_as AS[] = {
        [PACK_WIDEN] = BI_GENERATE_F32_WIDENED, [PACK_F32] = BI_GENERATE_F32, [PACK_COPY] = BI_GENERATE_BF16};
    if (job->kind == PACK_BF16 || job->kind == PACK_FP4) {
        bi_mat_generate_args args = {.to = job->to, .have_out = job->have_out, .have_in = job->have_in, .first = job->src.first,
                                     .stride_out = job->stride_out, .stride_in = job->stride_in, .gen = *job->src.gen};
        if (job->kind == PACK_FP4)
            args.gen_scale = *job->scale.gen;
        return op->mat_generate(jobs->backend->ctx, &args);
    }
    const bi_vector_generate_args args = {.dst = job->dst, .n = job->n, .as = AS[job->kind], .first = job->src.first, .gen = *job->src.gen};
    return op->vector_generate(jobs->backend->ctx, &args);
}

static br_status run(const pack_jobs *jobs, const pack_job *job) {
    const bi_ops *op = jobs->backend->op;
    bi_ctx *ctx = jobs->backend->ctx;
    const bi_mat *to = &job->to;
    if (job->src.gen)
        return generate(jobs, job);
    switch (job->kind) {
    case PACK_BF16:
        if (job->have_out < to->n_out || job->have_in < to->n_in)
            return pack_filled_up(jobs, job);
        return op->mat_pack_bf16(ctx, (void *)(uintptr_t)to->data, to->n_out, to->n_in, job->src.data, job->stride_out, job->stride_in);
    case PACK_FP4: return op->mat_pack_fp4(ctx, (void *)(uintptr_t)to->data, to->n_out, to->n_in, job->src.data, job->scale.data);
    case PACK_WIDEN: return widen(jobs, job);
    case PACK_F32: return upload(jobs, job->dst, job->src.data, job->n * (int64_t)sizeof(float));
    case PACK_COPY: return upload(jobs, job->dst, job->src.data, job->n * (int64_t)sizeof(bi_bf16));
    case PACK_RES: return op->attnres_weight(ctx, job->dst, job->src.data, job->scale.data, (int32_t)job->n);
    }
    return BR_E_ARG;
}

/* Jobs run on several threads, and a thread keeps its sentence to itself: the caller gets a new one. */
static void run_job(void *context, int i, int thread) {
    (void)thread;
    pack_jobs *jobs = context;
    const char *phase = br_mem_exempt_begin(); /* jobs of the pool are sealed, but a model is being opened */
    br_status status = run(jobs, &jobs->job[i]);
    br_mem_exempt_end(phase);
    if (status != BR_OK)
        __atomic_store_n(&jobs->status, status, __ATOMIC_RELAXED);
}

br_status pack_jobs_run(pack_jobs *jobs, const bi_backend *backend, br_device *device, br_pool *pool) {
    jobs->backend = backend;
    jobs->device = device;
    br_pool_run(pool, run_job, jobs, jobs->n_job);
    if (jobs->status != BR_OK)
        return br_fail(jobs->status, "the backend could not pack the weights: %s", br_status_name(jobs->status));
    for (int32_t i = 0; i < jobs->n_last; i++)
        BR_TRY(run(jobs, &jobs->last[i]));
    return br_device_wait(device);
}
