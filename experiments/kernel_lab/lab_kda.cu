/* lab_kda: how long bi_kda, bi_kda_gate and bi_kda_norm take on this GPU, beside the copy bandwidth of the same run.
 *
 * Layer: experiments. Links the objects of the CUDA backend and of src/device and src/base:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I<as the tree> lab_kda.cu <objects> -lcublasLt
 * Prints `row,shape,us,floor_us,share`: the median of REPEATS graph replays; share = floor / time. The floor of a prefill row is
 * the four multiply-add instructions that each state element costs a token, at full rate and top clock; of all others the bytes at the
 * copy bandwidth. Random operands; states and rows rotate beyond the second-level cache. */
#include <algorithm>
#include <assert.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>
#define _Noreturn [[noreturn]]
#define restrict __restrict__
extern "C" {
#include "bi_cuda_open.h"
}

enum { N_HEAD = 96, D = 128, N_ROW = 8192, N_STATE = 512, REPEATS = 9, CACHE_BYTES = 240 << 20 };

static br_device *device;
static bi_backend backend;
static bi_bf16 *q, *k, *v, *gate_out;
static float *a, *beta, *o, *norm_w, *a_log, *dt_bias;
static unsigned char *state;
static uint32_t *fault;
static double copy_rate; /* bytes a second, read and written ones */

static void need(br_status status) {
    if (status == BR_OK)
        return;
    fprintf(stderr, "lab_kda: %s\n", br_last_error());
    exit(2);
}

static void need_cuda(cudaError_t error) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "lab_kda: %s\n", cudaGetErrorString(error));
    exit(2);
}

/* ---- data ---- */

static __device__ float uniform(uint64_t i) {
    i ^= i >> 30;
    i *= 0xbf58476d1ce4e5b9ull;
    i ^= i >> 27;
    i *= 0x94d049bb133111ebull;
    i ^= i >> 31;
    return (float)(i >> 40) * 0x1p-24f;
}

static __global__ void fill_f32(float *x, size_t n, float low, float high, uint64_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        x[i] = low + (high - low) * uniform(seed + i * 0x9e3779b97f4a7c15ull);
}

static __global__ void fill_bf16(bi_bf16 *x, size_t n, uint64_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        x[i] = (bi_bf16)(__float_as_uint(4.0f * uniform(seed + i * 0x9e3779b97f4a7c15ull) - 2.0f) >> 16);
}

template <class T> static void take(T **out, size_t n, const char *what) {
    need(br_device_alloc(device, n * sizeof(T), what, (void **)out));
}

static void make_data(void) {
    const size_t n = (size_t)N_ROW * N_HEAD * D;
    cudaStream_t stream = (cudaStream_t)br_device_stream(device);
    take(&q, n, "q");
    take(&k, n, "k");
    take(&v, n, "v");
    take(&gate_out, n, "y");
    take(&a, n, "a");
    take(&o, n, "o");
    take(&beta, (size_t)N_ROW * N_HEAD, "beta");
    take(&norm_w, D, "w");
    take(&a_log, N_HEAD, "a_log");
    take(&dt_bias, (size_t)N_HEAD * D, "dt_bias");
    take(&fault, N_ROW, "faults");
    take(&state, (size_t)N_STATE * N_HEAD * D * D * 4, "states");
    bi_bf16 *const rows[] = {q, k, v};
    for (int i = 0; i < 3; i++)
        fill_bf16<<<2048, 256, 0, stream>>>(rows[i], n, 1 + (uint64_t)i);
    fill_f32<<<2048, 256, 0, stream>>>(a, n, 0.3f, 1.0f, 11);
    fill_f32<<<2048, 256, 0, stream>>>(beta, (size_t)N_ROW * N_HEAD, 0.0f, 1.0f, 12);
    fill_f32<<<2048, 256, 0, stream>>>((float *)state, (size_t)N_STATE * N_HEAD * D * D, -0.05f, 0.05f, 13);
    fill_f32<<<1, 256, 0, stream>>>(norm_w, D, 0.5f, 1.5f, 14);
    fill_f32<<<1, 256, 0, stream>>>(a_log, N_HEAD, -1.0f, 1.0f, 15);
    fill_f32<<<1, 256, 0, stream>>>(dt_bias, (size_t)N_HEAD * D, -1.0f, 1.0f, 16);
    need_cuda(cudaGetLastError());
    need(br_device_wait(device));
}

/* ---- timing ---- */

/* Microseconds of one call: the median over replays of a graph of `calls` of them. */
template <class F> static double time_of(int calls, F &&call) {
    cudaStream_t stream = (cudaStream_t)br_device_stream(device);
    cudaEvent_t begin, end;
    br_graph *graph;
    std::vector<float> ms;
    call(0);
    need(br_device_wait(device));
    need(br_graph_begin(device));
    for (int i = 0; i < calls; i++)
        call(i);
    need(br_graph_end(device, &graph));
    need_cuda(cudaEventCreate(&begin));
    need_cuda(cudaEventCreate(&end));
    for (int i = 0; i < REPEATS + 2; i++) {
        float one;
        need_cuda(cudaEventRecord(begin, stream));
        need(br_graph_run(device, graph));
        need_cuda(cudaEventRecord(end, stream));
        need(br_device_wait(device));
        need_cuda(cudaEventElapsedTime(&one, begin, end));
        if (i >= 2)
            ms.push_back(one);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    br_graph_free(graph);
    std::sort(ms.begin(), ms.end());
    return (double)ms[ms.size() / 2] * 1e3 / calls;
}

static void print_row(const char *row, const char *shape, double us, double floor_us) {
    printf("%s,%s,%.2f,%.2f,%.3f\n", row, shape, us, floor_us, floor_us / us);
    fflush(stdout);
}

static double by_bytes(double bytes) {
    return bytes / copy_rate * 1e6;
}

static void measure_copy(void) {
    const size_t half = (size_t)N_STATE * N_HEAD * D * D * 4 / 2;
    const double us = time_of(1, [&](int) { need(br_device_copy(device, state, state + half, half)); });
    char shape[64];
    copy_rate = 2.0 * (double)half / us * 1e6;
    snprintf(shape, sizeof shape, "%.0f GB/s", copy_rate * 1e-9);
    print_row("copy", shape, us, us);
    fill_f32<<<2048, 256, 0, (cudaStream_t)br_device_stream(device)>>>((float *)state, (size_t)N_STATE * N_HEAD * D * D, -0.05f, 0.05f, 13);
}

/* ---- rows ---- */

/* n_seg sequences of n rows at positions 1 .. n: states are read. */
static void time_kda(const char *row, int n_seg, int n, int n_head) {
    const int n_row = n_seg * n, turns = N_STATE * N_HEAD / (n_seg * n_head);
    const double state_bytes = 2.0 * n_seg * n_head * D * D * 4, row_bytes = (double)n_row * n_head * (D * (3 * 2 + 4 + 4) + 4);
    int calls = 1;
    while (n == 1 && calls < 64 && 2 * calls <= turns && calls * state_bytes / 2 < 4.0 * CACHE_BYTES)
        calls *= 2;
    std::vector<bi_seg> seg((size_t)n_seg);
    for (int i = 0; i < n_seg; i++)
        seg[(size_t)i] = bi_seg{i, i * n, n, 1};
    bi_seg *seg_device;
    take(&seg_device, (size_t)n_seg, "segments");
    need(br_device_upload(device, seg_device, seg.data(), sizeof(bi_seg) * seg.size()));
    need(br_device_wait(device));
    bi_batch batch = {n_row, n_seg, n, n, seg_device, NULL};
    const double us = time_of(calls, [&](int i) {
        const size_t seq_bytes = backend.op->kda_state_bytes(n_head, D), first = (size_t)(i * n_row % (N_ROW - n_row + 1));
        bi_kda_args args = {};
        args.batch = &batch;
        args.n_head = n_head, args.d = D, args.ld = n_head * D;
        args.q = q + first * n_head * D, args.k = k + first * n_head * D, args.v = v + first * n_head * D;
        args.a = a + first * n_head * D, args.beta = beta + first * n_head;
        args.scale = bi_const_kda_scale(D);
        args.state.base = state + seq_bytes * (size_t)(i % turns) * (size_t)n_seg, args.state.seq_bytes = seq_bytes;
        args.o = o + first * n_head * D;
        args.fault.row = fault, args.fault.code = 1;
        need(backend.op->kda(backend.ctx, &args));
    });
    br_device_free(device, seg_device);
    int clock_khz, n_sm;
    need_cuda(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
    need_cuda(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0));
    const double by_rate = 4.0 * D * D * n_head * n_row / (128.0 * n_sm * clock_khz * 1e3) * 1e6;
    char shape[64];
    snprintf(shape, sizeof shape, "%dx%d h%d", n_seg, n, n_head);
    print_row(row, shape, us, n == 1 ? by_bytes(state_bytes + row_bytes) : by_rate);
}

static void time_gate(int n_row) {
    char shape[64];
    const int calls = n_row < 1024 ? 16 : 1;
    const double us = time_of(calls, [&](int i) {
        const size_t first = (size_t)(i * n_row % (N_ROW - n_row + 1)) * N_HEAD * D;
        bi_kda_gate_args args = {n_row, N_HEAD, D, q + first, k, a_log, dt_bias, 1, -5.0f, o + first, beta};
        need(backend.op->kda_gate(backend.ctx, &args));
    });
    snprintf(shape, sizeof shape, "%dx%d", n_row, N_HEAD * D);
    print_row("kda_gate", shape, us, by_bytes((double)n_row * N_HEAD * (D * 6 + 6)));
}

static void time_norm(int n_row) {
    char shape[64];
    const int calls = n_row < 1024 ? 16 : 1;
    const double us = time_of(calls, [&](int i) {
        const size_t first = (size_t)(i * n_row % (N_ROW - n_row + 1)) * N_HEAD * D;
        bi_kda_norm_args args = {n_row, N_HEAD, D, o + first, norm_w, q + first, 1e-5f, gate_out + first, {fault, 1}};
        need(backend.op->kda_norm(backend.ctx, &args));
    });
    snprintf(shape, sizeof shape, "%dx%d", n_row, N_HEAD * D);
    print_row("kda_norm", shape, us, by_bytes((double)n_row * N_HEAD * D * 8));
}

int main(void) {
    bi_limits limits = {};
    limits.n_row = 64, limits.d_in = limits.d_out = 64, limits.rank = 16, limits.n_slot = 1, limits.n_head = 1, limits.d_kv_latent = 64;
    limits.d_rope = 16, limits.index_n_head = 4, limits.index_d_head = 32, limits.n_pos = 64, limits.n_expert = 1;
    limits.n_expert_topk = 1, limits.d_expert = limits.d_expert_ff = 64, limits.kda_n_head = N_HEAD, limits.kda_d_head = D;
    limits.n_vocab = 256, limits.d_model = 64;
    need(br_device_open("cuda", &device));
    need(bi_backend_cuda_open(&limits, device, &backend));
    make_data();
    printf("row,shape,us,floor_us,share\n");
    measure_copy();
    time_kda("kda_prefill", 1, 8192, 96);
    time_kda("kda_prefill", 1, 1024, 96);
    time_kda("kda_packed", 2, 4096, 96);
    time_kda("kda_packed", 4, 2048, 96);
    time_kda("kda_packed", 8, 1024, 96);
    time_kda("kda_packed", 64, 128, 96);
    time_kda("kda_prefill", 1, 8192, 48);
    time_kda("kda_prefill", 1, 8192, 32);
    time_kda("kda_prefill", 1, 8192, 12);
    for (int n_seg = 1; n_seg <= 512; n_seg *= n_seg == 1 ? 8 : n_seg == 8 ? 8 : 4)
        time_kda("kda_decode", n_seg, 1, 96);
    time_gate(64);
    time_gate(8192);
    time_norm(64);
    time_norm(8192);
    bi_backend_close(&backend);
    br_device_close(device);
    return 0;
}
