/* One form of the dense product at a time; see dense_forms.h. */
#include "bi_linear_parts.cuh"

#include "bi_linear_lt_table.h"
extern "C" {
#include "dense_forms.h"
}

extern "C" int32_t dense_forms_sm_count(const bi_backend *cuda) {
    return cuda->ctx->n_sm;
}

extern "C" int32_t dense_forms_table(int32_t i, dense_forms_row *row) {
    if (i >= N_LT_TABLE)
        return 0;
    *row = {LT_TABLE[i].n_in, LT_TABLE[i].n_out, LT_TABLE[i].f32, LT_TABLE[i].rows_from, LT_TABLE[i].rows_to};
    return 1;
}

static dense_job job_of(const bi_linear_args *args) {
    dense_job job = bi_dense_job(&args->w, args->n_row, args->n_head, args->x, args->x_ld, args->x_head_ld);
    job.y = args->y;
    job.y_ld = args->y_ld;
    job.y_head_ld = args->y_head_ld;
    job.y_f32 = args->y_f32;
    return job;
}

extern "C" br_status dense_forms_tiles(const bi_backend *cuda, const bi_linear_args *args) {
    const dense_job job = job_of(args);
    return bi_dense_tiles(cuda->ctx, &job, cuda->ctx->stream);
}

extern "C" br_status dense_forms_library(const bi_backend *cuda, const bi_linear_args *args, int *done) {
    const dense_state *state = (const dense_state *)cuda->ctx->dense;
    const dense_job job = job_of(args);
    *done = 0;
    return state->lt && bi_dense_lt_fits(&job) ? bi_dense_lt_run(cuda->ctx, state->lt, &job, done) : BR_OK;
}

static br_status made(cudaError_t error) {
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "dense forms: %s", cudaGetErrorString(error));
}

extern "C" br_status dense_forms_poison(const bi_backend *cuda, void *array, size_t bytes) {
    return made(cudaMemsetAsync(array, 0xff, bytes, cuda->ctx->stream));
}

static __global__ void differ_kernel(const uint32_t *a, const uint32_t *b, size_t n, unsigned long long *n_differ) {
    unsigned long long mine = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        mine += a[i] != b[i];
    if (mine)
        atomicAdd(n_differ, mine);
}

extern "C" br_status dense_forms_differ(const bi_backend *cuda, const void *a, const void *b, size_t bytes, uint64_t *n) {
    const cudaStream_t stream = cuda->ctx->stream;
    unsigned long long *sum = NULL, host = 0;
    BR_TRY(made(cudaMalloc((void **)&sum, sizeof *sum)));
    cudaMemsetAsync(sum, 0, sizeof *sum, stream);
    differ_kernel<<<(unsigned)cuda->ctx->n_sm * 8, 256, 0, stream>>>((const uint32_t *)a, (const uint32_t *)b, bytes / 4, sum);
    cudaMemcpyAsync(&host, sum, sizeof host, cudaMemcpyDeviceToHost, stream);
    const br_status status = made(cudaStreamSynchronize(stream));
    cudaFree(sum);
    *n = host;
    return status;
}
