/* lab_lora: how long the dense maps of a layer take on this GPU with an adapter of rank 32 on each of them, and without.
 *
 * Layer: experiments. Links the objects of the CUDA backend and of src/device and src/base:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I<as the tree> lab_lora.cu <objects> -lcublasLt
 * Arguments: numbers of rows. Prints `call,rows,us,us_with,ratio,launches,launches_with`: medians of REPEATS graph replays. Random operands; the
 * weights of one call rotate beyond the second-level cache. The calls are those of a KDA layer, of an MLA layer, and of the
 * maps round the experts; `score` is the head with its log-probs. */
#include <algorithm>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>
#define _Noreturn [[noreturn]]
#define restrict __restrict__
extern "C" {
#include "bi_cuda_open.h"
#include "bi_cuda_test.h"
}

enum { RANK = 32, REPEATS = 7, MAPS = 6, ROWS = 8192, CACHE_BYTES = 160 << 20, D_MODEL = 7168, N_VOCAB = 163840 };

typedef struct call {
    const char *name;
    int32_t n_head, n_map;
    struct {
        int32_t n_in, n_out, f32;
    } map[MAPS];
} call;

static const call CALL[] = {
    {"kda.in", 1, 6, {{7168, 12288, 0}, {7168, 12288, 0}, {7168, 12288, 0}, {7168, 128, 0}, {7168, 96, 0}, {7168, 12288, 0}}},
    {"kda.f_b", 1, 1, {{128, 12288, 0}}},
    {"out", 1, 1, {{12288, 7168, 0}}},
    {"mla.in", 1, 5, {{7168, 576, 0}, {7168, 1536, 0}, {7168, 128, 0}, {7168, 32, 1}, {7168, 12288, 0}}},
    {"mla.q_b", 1, 2, {{1536, 18432, 0}, {1536, 4096, 0}}},
    {"mla.absorb", 96, 1, {{128, 512, 0}}},
    {"mla.values", 96, 1, {{512, 128, 1}}},
    {"moe.in", 1, 3, {{7168, 3584, 0}, {7168, 6144, 1}, {7168, 6144, 1}}},
    {"moe.up", 1, 1, {{3584, 7168, 0}}},
    {"moe.down", 1, 1, {{6144, 7168, 0}}},
};
enum { N_CALL = sizeof CALL / sizeof CALL[0] };

static br_device *device;
static bi_backend backend;
static bi_bf16 *x;
static unsigned char *y;
static float *scale;
static int32_t *row_slot;
static uint32_t *fault;

static void need(br_status status) {
    if (status == BR_OK)
        return;
    fprintf(stderr, "lab_lora: %s\n", br_last_error());
    exit(2);
}

static void need_cuda(cudaError_t error) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "lab_lora: %s\n", cudaGetErrorString(error));
    exit(2);
}

static cudaStream_t stream(void) {
    return (cudaStream_t)br_device_stream(device);
}

/* bf16 of size 2^-6 .. 1/4: logits of standard deviation 1 at 7,168 inputs. */
static __global__ void fill_bf16(bi_bf16 *p, size_t n, uint64_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t r = seed + i * 0x9e3779b97f4a7c15ull;
        r = (r ^ r >> 30) * 0xbf58476d1ce4e5b9ull;
        r = (r ^ r >> 27) * 0x94d049bb133111ebull;
        p[i] = (bi_bf16)((r >> 20 & 0x8000) | (121 + (r >> 40) % 4) << 7 | (r >> 50 & 127));
    }
}

static __global__ void fill_f32(float *p, int n, float value) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x))
        p[i] = value;
}

template <class T> static void take(T **out, size_t n, const char *what) {
    need(br_device_alloc(device, n * sizeof(T), what, (void **)out));
}

/* n packed matrices, filled. */
static bi_mat matrices(int32_t n, int32_t n_out, int32_t n_in, uint64_t seed) {
    const size_t bytes = backend.op->mat_bytes(BI_FORM_BF16, n_out, n_in);
    bi_bf16 *data;
    take(&data, bytes / sizeof *data * (size_t)n, "weights");
    fill_bf16<<<2048, 256, 0, stream()>>>(data, bytes / sizeof *data * (size_t)n, seed);
    bi_mat mat = {};
    mat.data = data, mat.n_out = n_out, mat.n_in = n_in, mat.form = BI_FORM_BF16, mat.stride = bytes;
    return mat;
}

/* Microseconds of one call: the median over replays of a graph of `calls` of them. */
template <class F> static double time_of(int calls, int64_t *launches, F &&run) {
    cudaEvent_t begin, end;
    br_graph *graph;
    std::vector<float> ms;
    const int64_t before = bi_cuda_launch_count(&backend, NULL);
    run(0);
    *launches = bi_cuda_launch_count(&backend, NULL) - before;
    need(br_device_wait(device));
    need(br_graph_begin(device));
    for (int i = 0; i < calls; i++)
        run(i);
    need(br_graph_end(device, &graph));
    need_cuda(cudaEventCreate(&begin));
    need_cuda(cudaEventCreate(&end));
    for (int i = 0; i < REPEATS + 2; i++) {
        float one;
        need_cuda(cudaEventRecord(begin, stream()));
        need(br_graph_run(device, graph));
        need_cuda(cudaEventRecord(end, stream()));
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

static void print_row(const char *name, int n_row, double us, double us_with, int64_t launches, int64_t launches_with) {
    printf("%s,%d,%.1f,%.1f,%.3f,%lld,%lld\n", name, n_row, us, us_with, us > 0 ? us_with / us : 0.0, (long long)launches, (long long)launches_with);
    fflush(stdout);
}

/* `sets` sets of a call's weights, and its adapters, which are few bytes and the same in all sets. */
typedef struct laid {
    bi_mat w[MAPS];
    bi_adapter adapter[MAPS];
    int32_t sets;
} laid;

static laid lay_out(const call *c) {
    laid l = {};
    size_t bytes = 0;
    for (int i = 0; i < c->n_map; i++)
        bytes += backend.op->mat_bytes(BI_FORM_BF16, c->map[i].n_out, c->map[i].n_in) * (size_t)c->n_head;
    l.sets = (int32_t)(CACHE_BYTES / bytes + 1);
    for (int i = 0; i < c->n_map; i++) {
        l.w[i] = matrices(l.sets * c->n_head, c->map[i].n_out, c->map[i].n_in, 7 + (uint64_t)i);
        l.adapter[i].a = matrices(c->n_head, RANK, c->map[i].n_in, 77 + (uint64_t)i);
        l.adapter[i].b = matrices(c->n_head, c->map[i].n_out, RANK, 177 + (uint64_t)i);
        l.adapter[i].s = scale;
    }
    return l;
}

static void run_call(const call *c, const laid *l, int32_t n_row, int with, int set) {
    bi_linear_args args[MAPS] = {};
    unsigned char *to = y;
    for (int i = 0; i < c->n_map; i++) {
        bi_linear_args *a = &args[i];
        const int32_t n_in = c->map[i].n_in, n_out = c->map[i].n_out;
        a->n_row = n_row, a->n_head = c->n_head, a->x = x, a->x_ld = (int64_t)n_in * c->n_head, a->x_head_ld = n_in;
        a->w = bi_mat_at(&l->w[i], set % l->sets * c->n_head);
        a->y = to, a->y_ld = (int64_t)n_out * c->n_head, a->y_head_ld = n_out, a->y_f32 = c->map[i].f32;
        to += (size_t)n_row * (size_t)n_out * (size_t)c->n_head * (c->map[i].f32 ? 4 : 2);
        a->fault.row = fault, a->fault.code = 1 + (uint32_t)i;
        if (with)
            a->lora.slot = &l->adapter[i], a->lora.n_slot = 1, a->lora.row_slot = row_slot;
    }
    need(c->n_map > 1 ? backend.op->linear_group(backend.ctx, args, c->n_map) : backend.op->linear(backend.ctx, args));
}

static void time_score(int n_row) {
    bi_score_args args = {};
    int64_t launches;
    float *out;
    args.n_row = n_row, args.d = D_MODEL, args.n_vocab = N_VOCAB, args.x = x, args.w = matrices(1, N_VOCAB, D_MODEL, 5);
    take(&out, 3 * ROWS, "log-probs");
    args.token = row_slot, args.temperature = out + 2 * ROWS, args.logprob = out, args.logprob_raw = out + ROWS;
    args.fault.row = fault, args.fault.code = 9;
    fill_f32<<<8, 256, 0, stream()>>>(out + 2 * ROWS, ROWS, 1.0f);
    bi_linear_args plain = {};
    plain.n_row = n_row, plain.n_head = 1, plain.x = x, plain.x_ld = D_MODEL, plain.w = args.w, plain.y = y, plain.y_ld = N_VOCAB;
    const double mm = time_of(1, &launches, [&](int) { need(backend.op->linear(backend.ctx, &plain)); });
    const double us = time_of(1, &launches, [&](int) { need(backend.op->score(backend.ctx, &args)); });
    print_row("score", n_row, mm, us, 1, launches);
    br_device_free(device, (void *)(uintptr_t)args.w.data);
    br_device_free(device, out);
}

int main(int argc, char **argv) {
    bi_limits limits = {};
    limits.n_row = ROWS, limits.d_in = 12288, limits.d_out = 96 * 512, limits.rank = RANK, limits.n_slot = 4, limits.n_head = 96;
    limits.d_model = D_MODEL, limits.n_vocab = N_VOCAB;
    need(br_device_open("cuda", &device));
    need(bi_backend_cuda_open(&limits, device, &backend));
    take(&x, (size_t)ROWS * 96 * 512, "x");
    take(&y, (size_t)ROWS * N_VOCAB * 2, "y");
    take(&scale, 96, "s");
    take(&row_slot, ROWS, "row_slot"); /* zeros: all rows have slot 0 */
    take(&fault, ROWS, "faults");
    fill_bf16<<<2048, 256, 0, stream()>>>(x, (size_t)ROWS * 96 * 512, 3);
    fill_f32<<<1, 96, 0, stream()>>>(scale, 96, 0.25f);
    printf("call,rows,us,us_with,ratio,launches,launches_with\n");
    for (int k = 0; k < N_CALL; k++) {
        const laid l = lay_out(&CALL[k]);
        for (int i = 1; i < argc; i++) {
            const int n_row = atoi(argv[i]), calls = n_row > 1024 ? 1 : l.sets < 4 ? 4 : l.sets < 16 ? l.sets : 16;
            int64_t launches[2];
            double us[2];
            for (int with = 0; with < 2; with++)
                us[with] = time_of(calls, &launches[with], [&](int set) { run_call(&CALL[k], &l, n_row, with, set); });
            print_row(CALL[k].name, n_row, us[0], us[1], launches[0], launches[1]);
        }
        for (int i = 0; i < CALL[k].n_map; i++) {
            br_device_free(device, (void *)(uintptr_t)l.w[i].data);
            br_device_free(device, (void *)(uintptr_t)l.adapter[i].a.data);
            br_device_free(device, (void *)(uintptr_t)l.adapter[i].b.data);
        }
    }
    for (int i = 1; i < argc; i++)
        if (atoi(argv[i]) >= 64)
            time_score(atoi(argv[i]));
    bi_backend_close(&backend);
    br_device_close(device);
    return 0;
}
