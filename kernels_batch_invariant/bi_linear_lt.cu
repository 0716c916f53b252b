/* Base chains by cuBLASLt, of large steps and of short chains.      Contract: N-CHAIN, N-LIN
 *
 * Algorithm 66 with split-K 1 runs one accumulator an output over k in rising blocks of 16, whatever its tile, cluster and
 * stages, and rounds to bf16 once; other algorithms, and split-K, do not, and are never taken. Which tile and cluster run is
 * written in bi_linear_lt_table.h for the shapes of the model; for others, the first of those that the library's own heuristic names
 * for a class of row counts: a function of shapes and the library's version, not of time.
 * Before a configuration is used for the first time (those of the table that the limits allow: when the backend opens) it runs two
 * test problems (zeros, wide exponents, subnormals; whole clusters of its own tiles, and ragged edges) on a stream of its own, and the
 * outcome is compared with the own kernel's, bit by bit; one that differs is refused and the next is tried. That takes milliseconds once
 * a configuration, touches nothing of the steps, and is allowed while one is being recorded. */
#include "bi_linear_parts.cuh"

#include "bi_linear_lt_table.h"

#include <cublasLt.h>

enum {
    LT_ID = 66,
    LT_ANSWERS = 16,          /* of one question to the heuristic */
    LT_PLANS = 1024,          /* a power of two */
    LT_PROOFS = 256,
    LT_WORKSPACE = 32 << 20,
    TEST_ROWS = 1048, /* two clusters of any tile of the table each way, and an edge */
    TEST_OUT = 1064,
    TEST_IN = 1000,
    TEST_LD = 1024    /* zeros from TEST_IN on, which move no bit: whole blocks of k */
};

/* What a plan was made for. No padding: keys are compared as bytes. */
typedef struct lt_key {
    int64_t x_ld, x_head_ld, w_stride, y_ld, y_head_ld;
    int32_t n_row, n_head, n_in, n_out, w_ld, y_f32, align, used;
} lt_key;

typedef struct lt_plan {
    lt_key key;
    cublasLtMatmulAlgo_t algo;
    int usable;
} lt_plan;

/* A configuration that was tested. */
typedef struct lt_proof {
    int32_t tile, stages, cluster, custom, swizzle, inner, y_f32;
    int equal;
} lt_proof;

struct dense_lt {
    cublasLtHandle_t handle;
    cudaStream_t side;           /* for tests */
    unsigned char *workspace[2]; /* of the steps, of tests */
    bi_bf16 *test_x, *test_w;
    float *test_want;
    void *test_y;
    uint32_t *test_differ;
    lt_plan plan[LT_PLANS];
    int n_plan;
    lt_proof proof[LT_PROOFS];
    int n_proof;
    int n_taken, n_refused;      /* of the table's configurations, each once */
};

/* ---- one problem ------------------------------------------------------------------------------------------------------ */

typedef struct lt_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t w, x, y; /* column-major, as the library sees them: W^T x = y^T */
} lt_problem;

static int set_batch(cublasLtMatrixLayout_t layout, int32_t n, int64_t stride) {
    return cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride) ==
               CUBLAS_STATUS_SUCCESS;
}

static int problem_of(lt_problem *p, const dense_job *job, int32_t n_row) {
    const cublasOperation_t turned = CUBLAS_OP_T;
    const cudaDataType_t out = job->y_f32 ? CUDA_R_32F : CUDA_R_16BF;
    int ok = cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatrixLayoutInit(&p->w, CUDA_R_16BF, (uint64_t)job->n_in, (uint64_t)job->n_out, job->w_ld) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatrixLayoutInit(&p->x, CUDA_R_16BF, (uint64_t)job->n_in, (uint64_t)n_row, job->x_ld) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatrixLayoutInit(&p->y, out, (uint64_t)job->n_out, (uint64_t)n_row, job->y_ld) == CUBLAS_STATUS_SUCCESS;
    if (ok && job->n_head > 1)
        ok = set_batch(&p->w, job->n_head, job->w_stride) && set_batch(&p->x, job->n_head, job->x_head_ld) &&
             set_batch(&p->y, job->n_head, job->y_head_ld);
    return ok;
}

static int multiply(dense_lt *lt, const dense_job *job, const cublasLtMatmulAlgo_t *algo, void *workspace, cudaStream_t stream) {
    lt_problem p;
    const float one = 1.0f, zero = 0.0f;
    if (problem_of(&p, job, job->n_row) &&
        cublasLtMatmul(lt->handle, &p.desc, &one, job->w, &p.w, job->x, &p.x, &zero, job->y, &p.y, job->y, &p.y, algo, workspace,
                       LT_WORKSPACE, stream) == CUBLAS_STATUS_SUCCESS)
        return 1;
    cudaGetLastError(); /* a refusal that is not remembered */
    return 0;
}

/* ---- the test --------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* A tile, or a cluster of tiles, as the library sees them: outputs by rows of x. */
typedef struct lt_extent {
    int32_t n_out, n_row;
} lt_extent;

#define EXTENT(kind, m, n, rest)              \
    case CUBLASLT_##kind##_##m##x##n##rest:   \
        return {m, n}

/* Those of the table; {0, 0}: another one. */
static lt_extent tile_extent(int32_t tile) {
    switch (tile) {
        EXTENT(MATMUL_TILE, 64, 64, );
        EXTENT(MATMUL_TILE, 128, 64, );
        EXTENT(MATMUL_TILE, 128, 128, );
        EXTENT(MATMUL_TILE, 256, 64, );
        EXTENT(MATMUL_TILE, 128, 256, );
        EXTENT(MATMUL_TILE, 256, 128, );
        EXTENT(MATMUL_TILE, 96, 64, );
        EXTENT(MATMUL_TILE, 96, 128, );
        EXTENT(MATMUL_TILE, 80, 128, );
        EXTENT(MATMUL_TILE, 112, 128, );
        EXTENT(MATMUL_TILE, 168, 128, );
        EXTENT(MATMUL_TILE, 176, 128, );
        EXTENT(MATMUL_TILE, 192, 64, );
        EXTENT(MATMUL_TILE, 224, 64, );
    }
    return {0, 0};
}

static lt_extent cluster_extent(int32_t cluster) {
    switch (cluster) {
        EXTENT(CLUSTER_SHAPE, 1, 1, x1);
        EXTENT(CLUSTER_SHAPE, 2, 1, x1);
        EXTENT(CLUSTER_SHAPE, 4, 1, x1);
        EXTENT(CLUSTER_SHAPE, 1, 2, x1);
        EXTENT(CLUSTER_SHAPE, 2, 2, x1);
        EXTENT(CLUSTER_SHAPE, 1, 4, x1);
    }
    return {0, 0};
}

/* Rows of three families in turn: near 1; zeros and exponents of 33 binades; down to the subnormals. Zeros past TEST_IN. */
static __global__ void test_fill_kernel(bi_bf16 *a, int32_t n_row, uint32_t seed) {
    const int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x), row = i / TEST_LD;
    if (row >= n_row)
        return;
    const uint32_t r = mixed(seed ^ mixed((uint32_t)i)), family = (uint32_t)row % 3, draw = r >> 16 & 1023;
    uint32_t exponent = 121 + draw % 9;
    if (family == 1)
        exponent = 111 + draw % 33;
    else if (family == 2)
        exponent = draw % 107;
    const uint32_t magnitude = family && draw < 200 ? 0 : exponent << 7 | (r >> 8 & 127);
    a[i] = i % TEST_LD < TEST_IN ? (bi_bf16)((r & 1) << 15 | magnitude) : (bi_bf16)0;
}

/* The first n_row rows and n_out outputs are those wanted, the others were left alone. */
static __global__ void test_compare_kernel(const float *want, const void *y, int y_f32, int32_t n_row, int32_t n_out, uint32_t *differ) {
    const int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= TEST_ROWS * TEST_OUT)
        return;
    const bool inside = i / TEST_OUT < n_row && i % TEST_OUT < n_out;
    const uint32_t found = y_f32 ? bi_u32_of(((const float *)y)[i]) : ((const bi_bf16 *)y)[i];
    const uint32_t wanted = inside ? y_f32 ? bi_u32_of(want[i]) : bi_round(want[i]) : y_f32 ? 0xffffffffu : 0xffffu;
    if (found != wanted)
        atomicAdd(differ, 1u);
}

static dense_job test_job(const dense_lt *lt, void *y, int y_f32, int32_t n_row, int32_t n_out, int32_t n_in) {
    dense_job job;
    memset(&job, 0, sizeof job);
    job.x = lt->test_x;
    job.w = lt->test_w;
    job.y = y;
    job.x_ld = TEST_LD;
    job.w_ld = TEST_LD;
    job.y_ld = TEST_OUT;
    job.n_row = n_row;
    job.n_head = 1;
    job.n_in = n_in;
    job.n_out = n_out;
    job.y_f32 = y_f32;
    return job;
}

/* The inputs of all tests, and what the own kernel makes of them. */
static br_status make_test(bi_ctx *ctx, dense_lt *lt) {
    test_fill_kernel<<<(TEST_ROWS * TEST_LD + 255) / 256, 256, 0, lt->side>>>(lt->test_x, TEST_ROWS, 1u);
    test_fill_kernel<<<(TEST_OUT * TEST_LD + 255) / 256, 256, 0, lt->side>>>(lt->test_w, TEST_OUT, 2u);
    const dense_job job = test_job(lt, lt->test_want, 1, TEST_ROWS, TEST_OUT, TEST_LD);
    return bi_dense_tiles(ctx, &job, lt->side);
}

/* One problem; what differs is added up. 0: the library does not take it. */
static int run_test(dense_lt *lt, const cublasLtMatmulAlgo_t *algo, int y_f32, int32_t n_row, int32_t n_out, int32_t n_in) {
    const dense_job job = test_job(lt, lt->test_y, y_f32, n_row, n_out, n_in);
    cudaMemsetAsync(lt->test_y, 0xff, sizeof(float) * TEST_ROWS * TEST_OUT, lt->side);
    if (!multiply(lt, &job, algo, lt->workspace[1], lt->side))
        return 0;
    test_compare_kernel<<<(TEST_ROWS * TEST_OUT + 255) / 256, 256, 0, lt->side>>>(lt->test_want, lt->test_y, y_f32, n_row, n_out, lt->test_differ);
    return 1;
}

/* Two whole clusters of the configuration's tiles each way, where they are known, and a problem that no tile divides. What is larger than
 * the test, as no configuration of the table is, is refused. */
static int test_equal(dense_lt *lt, const cublasLtMatmulAlgo_t *algo, const lt_proof *proof) {
    uint32_t differ = 1;
    const lt_extent tile = tile_extent(proof->tile), cluster = cluster_extent(proof->cluster);
    const int32_t n_row = 2 * tile.n_row * cluster.n_row, n_out = 2 * tile.n_out * cluster.n_out;
    if (n_row > TEST_ROWS || n_out > TEST_OUT)
        return 0;
    cudaMemsetAsync(lt->test_differ, 0, sizeof differ, lt->side);
    if (n_row && !run_test(lt, algo, proof->y_f32, n_row, n_out, TEST_LD))
        return 0;
    if (!run_test(lt, algo, proof->y_f32, TEST_ROWS, TEST_OUT, TEST_IN))
        return 0;
    cudaMemcpyAsync(&differ, lt->test_differ, sizeof differ, cudaMemcpyDeviceToHost, lt->side);
    return cudaStreamSynchronize(lt->side) == cudaSuccess && differ == 0;
}

static int32_t config_of(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t name) {
    size_t written = 0;
    uint32_t value = 0; /* the library's little-endian integers of 2 or 4 bytes */
    const size_t bytes = name == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || name == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ? 2 : 4;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, name, &value, bytes, &written) != CUBLAS_STATUS_SUCCESS)
        return -1;
    return (int32_t)value;
}

/* Whether the algorithm is of the one family that the contract takes, and has passed its test. */
static int inside_contract(dense_lt *lt, const cublasLtMatmulAlgo_t *algo, int y_f32) {
    if (config_of(algo, CUBLASLT_ALGO_CONFIG_ID) != LT_ID || config_of(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1)
        return 0;
    const lt_proof wanted = {config_of(algo, CUBLASLT_ALGO_CONFIG_TILE_ID),          config_of(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                             config_of(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID), config_of(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                             config_of(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),    config_of(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
                             y_f32,                                                  0};
    for (int i = 0; i < lt->n_proof; i++)
        if (memcmp(&lt->proof[i], &wanted, offsetof(lt_proof, equal)) == 0)
            return lt->proof[i].equal;
    if (lt->n_proof == LT_PROOFS)
        return 0;
    lt->proof[lt->n_proof] = wanted;
    lt->proof[lt->n_proof].equal = test_equal(lt, algo, &wanted);
    return lt->proof[lt->n_proof++].equal;
}

/* ---- plans ------------------------------------------------------------------------------------------------------------ */

/* Row counts of one class share a plan, made for the largest. */
static int32_t class_of(int32_t n_row) {
    const int32_t step = n_row <= 512 ? 64 : n_row <= 2048 ? 256 : 1024;
    return (int32_t)(bi_ceil_div(n_row, step) * step);
}

static uint32_t align_of(const dense_job *job) {
    const uintptr_t bits = (uintptr_t)job->x | (uintptr_t)job->w | (uintptr_t)job->y | 256;
    return (uint32_t)(bits & (~bits + 1));
}

static lt_key key_of(const dense_job *job) {
    lt_key key;
    memset(&key, 0, sizeof key);
    key.x_ld = job->x_ld;
    key.x_head_ld = job->n_head > 1 ? job->x_head_ld : 0;
    key.w_stride = job->n_head > 1 ? job->w_stride : 0;
    key.y_ld = job->y_ld;
    key.y_head_ld = job->n_head > 1 ? job->y_head_ld : 0;
    key.n_row = class_of(job->n_row);
    key.n_head = job->n_head;
    key.n_in = job->n_in;
    key.n_out = job->n_out;
    key.w_ld = job->w_ld;
    key.y_f32 = job->y_f32 != 0;
    key.align = (int32_t)align_of(job);
    key.used = 1;
    return key;
}

static int set_preference(cublasLtMatmulPreferenceOpaque_t *preference, size_t workspace, uint32_t align) {
    int ok = cublasLtMatmulPreferenceInit(preference) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace) ==
                 CUBLAS_STATUS_SUCCESS;
    const cublasLtMatmulPreferenceAttributes_t side[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        ok = ok && cublasLtMatmulPreferenceSetAttribute(preference, side[i], &align, sizeof align) == CUBLAS_STATUS_SUCCESS;
    return ok;
}

/* The configuration of a row of the table. */
static int init_choice(dense_lt *lt, const lt_choice *choice, cublasLtMatmulAlgo_t *algo) {
    const cudaDataType_t out = choice->f32 ? CUDA_R_32F : CUDA_R_16BF;
    const uint32_t tile = (uint32_t)choice->tile, stages = (uint32_t)choice->stages, custom = (uint32_t)choice->custom;
    const uint16_t cluster = (uint16_t)choice->cluster;
    return cublasLtMatmulAlgoInit(lt->handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF, out, out, LT_ID, algo) ==
               CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, sizeof cluster) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigSetAttribute(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &custom, sizeof custom) == CUBLAS_STATUS_SUCCESS;
}

/* The table's configuration for the shape, where it has one that the library takes and the contract too. */
static int look_up(dense_lt *lt, const lt_problem *p, const lt_key *key, cublasLtMatmulAlgo_t *out) {
    for (int i = 0; i < N_LT_TABLE && key->n_head == 1; i++) {
        const lt_choice *c = &LT_TABLE[i];
        cublasLtMatmulHeuristicResult_t result;
        lt_problem q = *p;
        if (c->n_in != key->n_in || c->n_out != key->n_out || c->f32 != key->y_f32 || key->n_row < c->rows_from || key->n_row > c->rows_to)
            continue;
        return init_choice(lt, c, out) &&
               cublasLtMatmulAlgoCheck(lt->handle, &q.desc, &q.w, &q.x, &q.y, &q.y, out, &result) == CUBLAS_STATUS_SUCCESS &&
               result.workspaceSize <= LT_WORKSPACE && inside_contract(lt, out, key->y_f32);
    }
    return 0;
}

static int is_same_configuration(const lt_choice *a, const lt_choice *b) {
    return a->tile == b->tile && a->stages == b->stages && a->cluster == b->cluster && a->custom == b->custom && a->f32 == b->f32;
}

/* Whether a map of the backend can be of the row's shape. */
static int is_within(const lt_choice *c, const bi_limits *limits) {
    const int32_t n_out = limits->d_out > limits->n_vocab ? limits->d_out : limits->n_vocab;
    return c->n_in <= limits->d_in && c->n_out <= n_out && c->rows_from <= limits->n_row;
}

/* Tests each configuration once that the table has for a shape within the limits; one that fails is refused where it would be used. */
static void test_table(dense_lt *lt, const bi_limits *limits) {
    cublasLtMatmulAlgo_t algo;
    for (int i = 0; i < N_LT_TABLE; i++) {
        int first = 0;
        while (!is_within(&LT_TABLE[first], limits) || !is_same_configuration(&LT_TABLE[first], &LT_TABLE[i]))
            if (++first > i)
                break;
        if (first != i)
            continue;
        const int taken = init_choice(lt, &LT_TABLE[i], &algo) && inside_contract(lt, &algo, LT_TABLE[i].f32);
        *(taken ? &lt->n_taken : &lt->n_refused) += 1;
    }
}

void bi_dense_lt_note(const dense_lt *lt, char *note, size_t n) {
    const size_t version = cublasLtGetVersion();
    int used;
    if (!lt) {
        snprintf(note, n, "cuBLASLt is not to be had: own kernels compute all dense products");
        return;
    }
    used = snprintf(note, n, "cuBLASLt version %zu: %d configurations of the table taken, %d refused", version, lt->n_taken, lt->n_refused);
    if (version != LT_TABLE_LIBRARY && used >= 0 && (size_t)used < n)
        snprintf(note + used, n - (size_t)used, "\nwarning: the table was made with cuBLASLt version %d, this is %zu: equal bits, maybe slower",
                 LT_TABLE_LIBRARY, version);
}

/* The first answer that the contract takes. split 0: asks for algorithms without a reduction only. */
static int ask(dense_lt *lt, const lt_problem *p, uint32_t align, int split, int y_f32, cublasLtMatmulAlgo_t *out) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t answer[LT_ANSWERS];
    const uint32_t none = 0;
    int n = 0;
    lt_problem q = *p;
    if (!set_preference(&preference, LT_WORKSPACE, align))
        return 0;
    if (!split && cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none) !=
                      CUBLAS_STATUS_SUCCESS)
        return 0;
    if (cublasLtMatmulAlgoGetHeuristic(lt->handle, &q.desc, &q.w, &q.x, &q.y, &q.y, &preference, LT_ANSWERS, answer, &n) !=
        CUBLAS_STATUS_SUCCESS)
        return 0;
    for (int i = 0; i < n; i++)
        if (answer[i].state == CUBLAS_STATUS_SUCCESS && answer[i].workspaceSize <= LT_WORKSPACE &&
            inside_contract(lt, &answer[i].algo, y_f32)) {
            *out = answer[i].algo;
            return 1;
        }
    return 0;
}

static lt_plan *plan_of(dense_lt *lt, const dense_job *job) {
    const lt_key key = key_of(job);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof key; i++)
        hash = (hash ^ ((const unsigned char *)&key)[i]) * 0x100000001b3u;
    if (lt->n_plan > LT_PLANS / 4 * 3) {
        memset(lt->plan, 0, sizeof lt->plan);
        lt->n_plan = 0;
    }
    uint32_t at = (uint32_t)(hash >> 32) & (LT_PLANS - 1);
    for (; lt->plan[at].key.used; at = (at + 1) & (LT_PLANS - 1))
        if (memcmp(&lt->plan[at].key, &key, sizeof key) == 0)
            return &lt->plan[at];
    lt_plan *plan = &lt->plan[at];
    lt_problem problem;
    plan->key = key;
    lt->n_plan++;
    plan->usable = problem_of(&problem, job, key.n_row) &&
                   (look_up(lt, &problem, &key, &plan->algo) || ask(lt, &problem, (uint32_t)key.align, 1, key.y_f32, &plan->algo) ||
                    ask(lt, &problem, (uint32_t)key.align, 0, key.y_f32, &plan->algo));
    return plan;
}

/* ---- checked logits --------------------------------------------------------------------------------------------------- */

/* Grid: (parts of a row, rows). Every logit is looked at. */
static __global__ void __launch_bounds__(256) check_kernel(const float *y, int64_t y_ld, int64_t y_head_ld, int32_t n_out, bi_fault fault) {
    const float *row = y + blockIdx.y * y_ld + blockIdx.z * y_head_ld;
    int bad = 0;
    for (int32_t i = (int32_t)(blockIdx.x * 256 + threadIdx.x); i < n_out; i += (int32_t)(gridDim.x * 256))
        bad |= !bi_is_finite(row[i]);
    if (__syncthreads_or(bad) && threadIdx.x == 0)
        bi_cuda_fault(fault, (int32_t)blockIdx.y, bi_f32_of(BI_F32_INF));
}

/* ---- the door --------------------------------------------------------------------------------------------------------- */

int bi_dense_lt_fits(const dense_job *job) {
    const int64_t step = job->y_f32 ? 4 : 8;
    const int x_ok = (uintptr_t)job->x % DENSE_ALIGN == 0 && job->x_ld % 8 == 0 && job->x_ld >= job->n_in;
    const int y_ok = (uintptr_t)job->y % DENSE_ALIGN == 0 && job->y_ld % step == 0 && job->y_ld >= job->n_out;
    const int heads_ok = job->n_head == 1 || (job->x_head_ld % 8 == 0 && job->y_head_ld % step == 0);
    return x_ok && y_ok && heads_ok && job->n_in % 8 == 0 && job->n_out % 8 == 0;
}

br_status bi_dense_lt_run(bi_ctx *ctx, dense_lt *lt, const dense_job *job, int *done) {
    lt_plan *plan = plan_of(lt, job);
    *done = plan->usable && multiply(lt, job, &plan->algo, lt->workspace[0], ctx->stream);
    if (!*done) {
        plan->usable = 0;
        return BR_OK;
    }
    BR_TRY(bi_cuda_launched(ctx, BI_K_linear_large, "linear"));
    for (int32_t row = 0; job->check && row < job->n_row; row += 65535) {
        const int32_t n = job->n_row - row < 65535 ? job->n_row - row : 65535;
        bi_fault fault = job->fault;
        fault.row = fault.row ? fault.row + row : NULL;
        const dim3 grid((unsigned)bi_ceil_div(job->n_out, 256 * 32), (unsigned)n, (unsigned)job->n_head);
        check_kernel<<<grid, 256, 0, ctx->stream>>>((const float *)job->y + row * job->y_ld, job->y_ld, job->y_head_ld, job->n_out, fault);
        BR_TRY(bi_cuda_launched(ctx, BI_K_linear_check, "linear"));
    }
    return BR_OK;
}

static br_status open_memory(bi_ctx *ctx, dense_lt *lt) {
    for (int i = 0; i < 2; i++)
        BR_TRY(br_device_alloc(ctx->device, LT_WORKSPACE, "workspace of cuBLASLt", (void **)&lt->workspace[i]));
    BR_TRY(br_device_alloc(ctx->device, sizeof(bi_bf16) * TEST_ROWS * TEST_LD, "a test of cuBLASLt", (void **)&lt->test_x));
    BR_TRY(br_device_alloc(ctx->device, sizeof(bi_bf16) * TEST_OUT * TEST_LD, "a test of cuBLASLt", (void **)&lt->test_w));
    BR_TRY(br_device_alloc(ctx->device, sizeof(float) * TEST_ROWS * TEST_OUT, "a test of cuBLASLt", (void **)&lt->test_want));
    BR_TRY(br_device_alloc(ctx->device, sizeof(float) * TEST_ROWS * TEST_OUT, "a test of cuBLASLt", &lt->test_y));
    BR_TRY(br_device_alloc(ctx->device, sizeof(uint32_t), "a test of cuBLASLt", (void **)&lt->test_differ));
    return br_device_wait(ctx->device); /* all of it is cleared before the other stream touches it */
}

br_status bi_dense_lt_open(bi_ctx *ctx, dense_lt **out) {
    dense_lt *lt = NULL;
    br_status status;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&lt, sizeof *lt, "plans of cuBLASLt"));
    if (cublasLtCreate(&lt->handle) != CUBLAS_STATUS_SUCCESS) {
        br_mem_free(lt);
        return BR_OK; /* the own kernel does all */
    }
    if (cudaStreamCreateWithFlags(&lt->side, cudaStreamNonBlocking) != cudaSuccess) {
        cublasLtDestroy(lt->handle);
        br_mem_free(lt);
        return br_fail(BR_E_DEVICE, "linear: the GPU opens no second stream");
    }
    BR_TRY_GOTO(open_memory(ctx, lt), fail);
    BR_TRY_GOTO(make_test(ctx, lt), fail);
    test_table(lt, &ctx->limits);
    *out = lt;
    return BR_OK;
fail:
    bi_dense_lt_close(ctx, lt);
    return status;
}

void bi_dense_lt_close(bi_ctx *ctx, dense_lt *lt) {
    cudaStreamSynchronize(lt->side);
    for (int i = 0; i < 2; i++)
        br_device_free(ctx->device, lt->workspace[i]);
    br_device_free(ctx->device, lt->test_x);
    br_device_free(ctx->device, lt->test_w);
    br_device_free(ctx->device, lt->test_want);
    br_device_free(ctx->device, lt->test_y);
    br_device_free(ctx->device, lt->test_differ);
    cublasLtDestroy(lt->handle);
    cudaStreamDestroy(lt->side);
    br_mem_free(lt);
}
