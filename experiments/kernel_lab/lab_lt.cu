/* lab_lt: which tile, cluster and option of cuBLASLt's algorithm 66 is fastest for the dense products of a K3.1 layer on this GPU.
 *
 * Layer: experiments. Stands alone:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a lab_lt.cu -lcublasLt
 * Arguments: numbers of rows. For each shape and number of rows: the heuristic's answers inside the contract (algorithm 66, split-K 1)
 * give the tiles; each runs with every cluster shape and option that the library takes, once after a warming run, within a budget of
 * time; the fastest BEST and the heuristic's first run again in turns. Prints `n_in,n_out,f32,rows,tile,stages,cluster,custom,us,first_us`,
 * medians of TURNS; the winner first, and the heuristic's first as a row of its own. Operands rotate beyond the cache. Before it
 * counts a configuration has to give the heuristic's first answer's bits. */
#include <algorithm>
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

enum { LT_ID = 66, ANSWERS = 24, BEST = 5, TURNS = 7, WORKSPACE = 32 << 20, SET_BYTES = 120 << 20 };

/* The ten of the benchmark, and what a step has instead of them; the third number: whether the outputs are f32. */
static const int SHAPE[][3] = {{7168, 49152, 0}, {12288, 7168, 0}, {7168, 14560, 0}, {1536, 22528, 0}, {512, 24576, 0}, {7168, 3584, 0},
                               {3584, 7168, 0},  {7168, 12288, 0}, {6144, 7168, 0},  {7168, 163840, 0}, {7168, 6144, 1}, {1536, 18432, 0}};
static const int CLUSTER[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1, CUBLASLT_CLUSTER_SHAPE_2x2x1,
                              CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1};

static void need(int ok, const char *what) {
    if (ok)
        return;
    fprintf(stderr, "lab_lt: %s\n", what);
    exit(2);
}

static cublasLtHandle_t handle;
static unsigned char *workspace;
static uint16_t *x, *w;
static unsigned char *y, *want;
static uint32_t *differ;
static cudaEvent_t mark[2];

typedef struct config {
    cublasLtMatmulAlgo_t algo;
    int tile, stages, cluster, custom;
    float us;
    std::vector<float> turn;
} config;

typedef struct problem {
    int n_in, n_out, f32, n_row, sets;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t lw, lx, ly;
} problem;

static __global__ void fill(uint16_t *p, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t r = i * 0x9e3779b97f4a7c15ull;
        r = (r ^ r >> 30) * 0xbf58476d1ce4e5b9ull;
        p[i] = (uint16_t)((r >> 20 & 0x8000) | (123 + (r >> 40) % 4) << 7 | (r >> 50 & 127));
    }
}

static int attribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name, size_t bytes) {
    uint32_t value = 0;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(algo, name, &value, bytes, &written);
    return (int)value;
}

static void read_config(config *c) {
    c->tile = attribute(&c->algo, CUBLASLT_ALGO_CONFIG_TILE_ID, 4);
    c->stages = attribute(&c->algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, 4);
    c->cluster = attribute(&c->algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2);
    c->custom = attribute(&c->algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4);
}

static problem problem_of(int n_in, int n_out, int f32, int n_row) {
    problem p = {};
    const cublasOperation_t turned = CUBLAS_OP_T;
    const size_t bytes = 2 * (size_t)n_in * (size_t)n_out;
    p.n_in = n_in, p.n_out = n_out, p.f32 = f32, p.n_row = n_row, p.sets = n_row > 1024 ? 1 : (int)(SET_BYTES / bytes + 1);
    need(cublasLtMatmulDescInit(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == 0 &&
             cublasLtMatmulDescSetAttribute(&p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) == 0 &&
             cublasLtMatrixLayoutInit(&p.lw, CUDA_R_16BF, (uint64_t)n_in, (uint64_t)n_out, n_in) == 0 &&
             cublasLtMatrixLayoutInit(&p.lx, CUDA_R_16BF, (uint64_t)n_in, (uint64_t)n_row, n_in) == 0 &&
             cublasLtMatrixLayoutInit(&p.ly, f32 ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)n_out, (uint64_t)n_row, n_out) == 0,
         "the library makes no problem");
    return p;
}

static __global__ void compare(const uint32_t *a, const uint32_t *b, size_t n, uint32_t *out) {
    uint32_t bad = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        bad += a[i] != b[i];
    if (bad)
        atomicAdd(out, bad);
}

static bool multiply(problem *p, const config *c, int set, unsigned char *to) {
    const float one = 1, zero = 0;
    const uint16_t *from = w + (size_t)(set % p->sets) * (size_t)p->n_in * (size_t)p->n_out;
    return cublasLtMatmul(handle, &p->desc, &one, from, &p->lw, x, &p->lx, &zero, to, &p->ly, to, &p->ly, &c->algo, workspace, WORKSPACE, 0) == 0;
}

static bool is_equal(problem *p, const config *c) {
    const size_t n = (size_t)p->n_row * (size_t)p->n_out / (p->f32 ? 1 : 2);
    uint32_t bad = 1;
    cudaMemsetAsync(y, 0xff, 4 * n);
    cudaMemsetAsync(differ, 0, 4);
    if (!multiply(p, c, 0, y))
        return false;
    compare<<<2048, 256>>>((const uint32_t *)y, (const uint32_t *)want, n, differ);
    return cudaMemcpy(&bad, differ, 4, cudaMemcpyDeviceToHost) == 0 && bad == 0;
}

/* Microseconds of n runs after one that warms, or -1. */
static float time_of(problem *p, const config *c, int n) {
    float ms = -1;
    for (int i = 0; i <= n; i++) {
        if (i == 1)
            cudaEventRecord(mark[0]);
        if (!multiply(p, c, i, y))
            return -1;
    }
    cudaEventRecord(mark[1]);
    if (cudaEventSynchronize(mark[1]) != cudaSuccess || cudaEventElapsedTime(&ms, mark[0], mark[1]) != cudaSuccess)
        return -1;
    return ms * 1e3f / (float)n;
}

static std::vector<config> answers_of(problem *p) {
    std::vector<config> found;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t answer[ANSWERS];
    const size_t bytes = WORKSPACE;
    int n = 0;
    need(cublasLtMatmulPreferenceInit(&preference) == 0 &&
             cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes) == 0,
         "the library takes no preference");
    cublasLtMatmulAlgoGetHeuristic(handle, &p->desc, &p->lw, &p->lx, &p->ly, &p->ly, &preference, ANSWERS, answer, &n);
    for (int i = 0; i < n; i++) {
        config c = {};
        c.algo = answer[i].algo;
        read_config(&c);
        if (attribute(&c.algo, CUBLASLT_ALGO_CONFIG_ID, 4) == LT_ID && attribute(&c.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4) <= 1)
            found.push_back(c);
    }
    return found;
}

static bool set(cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name, int value, size_t bytes) {
    return cublasLtMatmulAlgoConfigSetAttribute(algo, name, &value, bytes) == 0;
}

/* The answers' tiles and those of neighbours, with every cluster and option. */
static std::vector<config> configs_of(problem *p, const std::vector<config> &answer) {
    std::vector<config> all(answer);
    std::vector<int> tiles = {CUBLASLT_MATMUL_TILE_128x256, CUBLASLT_MATMUL_TILE_256x128, CUBLASLT_MATMUL_TILE_192x128, CUBLASLT_MATMUL_TILE_128x192};
    for (const config &c : answer)
        if (std::find(tiles.begin(), tiles.end(), c.tile) == tiles.end())
            tiles.push_back(c.tile);
    for (int tile : tiles)
        for (int cluster : CLUSTER)
            for (int custom = 0; custom < 4; custom++) {
                config c = {};
                cublasLtMatmulHeuristicResult_t result;
                const cudaDataType_t out = p->f32 ? CUDA_R_32F : CUDA_R_16BF;
                cublasLtMatmulAlgoInit(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF, out, out, LT_ID, &c.algo);
                if (!set(&c.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, tile, 4) ||
                    !set(&c.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, answer[0].stages, 4) ||
                    !set(&c.algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster, 2) ||
                    !set(&c.algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, custom, 4))
                    continue;
                if (cublasLtMatmulAlgoCheck(handle, &p->desc, &p->lw, &p->lx, &p->ly, &p->ly, &c.algo, &result) != 0 ||
                    result.workspaceSize > WORKSPACE)
                    continue;
                read_config(&c);
                all.push_back(c);
            }
    return all;
}

static void print_row(const problem *p, const config *c, float first) {
    printf("%d,%d,%d,%d,%d,%d,%d,%d,%.2f,%.2f\n", p->n_in, p->n_out, p->f32, p->n_row, c->tile, c->stages, c->cluster,
           c->custom, (double)c->us, (double)first);
    fflush(stdout);
}

static void search(problem *p, float budget_us) {
    std::vector<config> answer = answers_of(p);
    need(!answer.empty(), "no answer inside the contract");
    std::vector<config> all = configs_of(p, answer);
    const int n = p->n_row > 1024 ? 1 : 8;
    float used = 0;
    for (config &c : all) {
        c.us = used < budget_us ? time_of(p, &c, n) : -1;
        used += c.us > 0 ? c.us * (float)(n + 1) : 0;
        c.us = c.us > 0 ? c.us : 1e9f;
    }
    std::vector<config> best = {all[0]};
    need(multiply(p, &all[0], 0, want), "the first answer does not run");
    std::stable_sort(all.begin(), all.end(), [](const config &a, const config &b) { return a.us < b.us; });
    for (int i = 0; i < (int)all.size() && (int)best.size() <= BEST; i++) {
        if (is_equal(p, &all[(size_t)i]))
            best.push_back(all[(size_t)i]);
        else
            printf("# %d,%d,%d: tile %d cluster %d custom %d gives other bits\n", p->n_in, p->n_out, p->n_row, all[(size_t)i].tile,
                   all[(size_t)i].cluster, all[(size_t)i].custom);
    }
    for (int turn = 0; turn < TURNS; turn++)
        for (config &c : best)
            c.turn.push_back(time_of(p, &c, n));
    for (config &c : best) {
        std::sort(c.turn.begin(), c.turn.end());
        c.us = c.turn[TURNS / 2];
    }
    const config first = best[0];
    std::stable_sort(best.begin(), best.end(), [](const config &a, const config &b) { return a.us < b.us; });
    print_row(p, &best[0], first.us);
    print_row(p, &first, first.us);
}

int main(int argc, char **argv) {
    need(cublasLtCreate(&handle) == 0, "no library");
    const size_t most = (size_t)8192 * 163840 * 2;
    need(cudaMalloc(&workspace, WORKSPACE) == 0 && cudaMalloc(&differ, 4) == 0 && cudaMalloc(&x, (size_t)8192 * 12288 * 2) == 0 &&
             cudaMalloc(&w, (size_t)163840 * 7168 * 2) == 0 && cudaMalloc(&y, most) == 0 && cudaMalloc(&want, most) == 0 &&
             cudaEventCreate(&mark[0]) == 0 && cudaEventCreate(&mark[1]) == 0,
         "too little memory");
    fill<<<2048, 256>>>(x, (size_t)8192 * 12288);
    fill<<<2048, 256>>>(w, (size_t)163840 * 7168);
    printf("library %zu\nn_in,n_out,f32,rows,tile,stages,cluster,custom,us,first_us\n", cublasLtGetVersion());
    for (int i = 1; i < argc; i++)
        for (const int(&shape)[3] : SHAPE) {
            const int n_row = atoi(argv[i]);
            problem p = problem_of(shape[0], shape[1], shape[2], n_row);
            search(&p, n_row <= 1024 ? 60e3f : shape[1] > 100000 ? 900e3f : 300e3f);
        }
    return 0;
}
