/* Gradients on both sides; see grad_twin.h. */
#include "grad_twin.h"

#include "bi_cuda_test.h"
#include "br_mem.h"
#include "grad_bound.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

static const double BOUND = 4e-3;

void grad_twin_open(grad_twin *g, const bi_limits *limits, size_t bytes) {
    memset(g, 0, sizeof *g);
    twin_open(&g->t, limits, bytes);
    CHECK_OK(bi_grad_host_open(limits, g->t.pool, &g->grad[TWIN_ORACLE]));
    CHECK_OK(bi_grad_cuda_open(limits, g->t.device, &g->grad[TWIN_CUDA]));
}

void grad_twin_close(grad_twin *g) {
    CHECK_OK(twin_wait(&g->t));
    bi_grad_close(&g->grad[TWIN_CUDA]);
    bi_grad_close(&g->grad[TWIN_ORACLE]);
    twin_close(&g->t);
}

void grad_twin_reset(grad_twin *g) {
    twin_reset(&g->t);
    g->n_out = 0;
}

float *grad_twin_out(grad_twin *g, const char *name, int64_t n, int64_t width) {
    ck_assert_int_lt(g->n_out, GRAD_TWIN_OUT_MAX);
    float *host = TWIN_ARRAY(&g->t, float, name, n);
    g->out[g->n_out].name = name;
    g->out[g->n_out].host = host;
    g->out[g->n_out].width = width;
    g->out[g->n_out++].n = n;
    return host;
}

/* From the twin's host side, as it stands, and poisoned scratch to `after`. */
static void run_on_gpu(grad_twin *g, const char *what, grad_twin_call call, void *context, unsigned char *after) {
    twin_begin(&g->t);
    CHECK_OK(bi_grad_cuda_poison(&g->grad[TWIN_CUDA]));
    const br_status status = call(&g->grad[TWIN_CUDA], g, TWIN_CUDA, context);
    ck_assert_msg(status == BR_OK, "%s on the GPU: %s", what, br_last_error());
    CHECK_OK(br_device_download(g->t.device, after, g->t.device_side, g->t.used));
    CHECK_OK(twin_wait(&g->t));
}

static int in_output(const grad_twin *g, size_t at) {
    const unsigned char *byte = g->t.host + at;
    for (int i = 0; i < g->n_out; i++)
        if (byte >= (unsigned char *)g->out[i].host && byte < (unsigned char *)(g->out[i].host + g->out[i].n))
            return 1;
    return 0;
}

static void compare_elements(const grad_twin *g, const char *what, int i, const float *gpu) {
    const int64_t n = g->out[i].n, width = g->out[i].width;
    float *largest;
    CHECK_OK(br_mem_alloc((void **)&largest, sizeof *largest * (size_t)width, "columns of a gradient"));
    const int64_t at = grad_bound_first(g->out[i].host, gpu, n / width, width, largest);
    br_mem_free(largest);
    ck_assert_msg(at == n, "%s: %s[%lld] of rows of %lld is %.6e on the GPU, %.6e on the host", what, g->out[i].name, (long long)at,
                  (long long)width, at < n ? (double)gpu[at] : 0, at < n ? (double)g->out[i].host[at] : 0);
}

static void compare_output(const grad_twin *g, const char *what, int i) {
    const float *host = g->out[i].host;
    const float *gpu = (const float *)(const void *)(g->t.first + ((const unsigned char *)host - g->t.host));
    double off = 0, size = 0;
    for (int64_t k = 0; k < g->out[i].n; k++) {
        ck_assert_msg(isfinite(host[k]), "%s: %s[%lld] of the host is not finite, or was not written", what, g->out[i].name, (long long)k);
        ck_assert_msg(isfinite(gpu[k]), "%s: %s[%lld] of the GPU is not finite, or was not written", what, g->out[i].name, (long long)k);
        off += ((double)gpu[k] - host[k]) * ((double)gpu[k] - host[k]);
        size += (double)host[k] * host[k];
    }
    ck_assert_msg(sqrt(off) <= BOUND * sqrt(size), "%s: %s is off by %.3e of its norm %.3e", what, g->out[i].name, sqrt(off / size), sqrt(size));
    compare_elements(g, what, i, gpu);
}

void grad_twin_run(grad_twin *g, const char *what, grad_twin_call call, void *context) {
    run_on_gpu(g, what, call, context, g->t.first);
    if (g->t.n_gpu_run == 2) {
        run_on_gpu(g, what, call, context, g->t.back);
        ck_assert_msg(memcmp(g->t.first, g->t.back, g->t.used) == 0, "%s: two runs on the GPU differ", what);
    }
    for (size_t at = 0; at < g->t.used; at++)
        if (g->t.first[at] != g->t.host[at])
            ck_assert_msg(in_output(g, at), "%s: the GPU wrote at byte %zu, outside the outputs", what, at);
    const br_status status = call(&g->grad[TWIN_ORACLE], g, TWIN_ORACLE, context);
    ck_assert_msg(status == BR_OK, "%s on the host: %s", what, br_last_error());
    for (int i = 0; i < g->n_out; i++)
        compare_output(g, what, i);
}
