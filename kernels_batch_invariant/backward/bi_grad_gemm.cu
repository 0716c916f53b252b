/* Dense products of the gradients: row-major c = alpha * op(a) op(b) + beta * c, bf16 in, f32 out.
 *
 * By cuBLASLt where pointers and strides are aligned: as c^T = op(b)^T op(a)^T of column-major matrices, the first algorithm that its
 * heuristic names without a split or reduction over k, so that every element is one sum in one order; plans are kept by shape. Else
 * by the own kernel: grid (64 columns, 64 rows, batch), 128 threads, four warps of 32 x 32, steps of 32 over rising k, 10 KB shared. */
#include "bi_grad_cuda.cuh"

#include <cublasLt.h>

enum {
    GEMM_ANSWERS = 16,
    GEMM_PLANS = 1024, /* a power of two */
    GEMM_WORKSPACE = 32 << 20,
    GEMM_TILE = 64,
    GEMM_STEP = 32,
    GEMM_LD = GEMM_STEP + 8, /* of a row in shared memory: no two rows of a fragment meet in a bank */
    GEMM_THREADS = 128
};

/* What a plan was made for. No padding: keys are compared as bytes. */
typedef struct gemm_key {
    int64_t a_ld, b_ld, c_ld, a_stride, b_stride, c_stride;
    int32_t m, n, k, batch, a_t, b_t, adds, used;
} gemm_key;

typedef struct gemm_plan {
    gemm_key key;
    cublasLtMatmulAlgo_t algo;
    int usable;
} gemm_plan;

typedef struct gemm_state {
    cublasLtHandle_t handle;
    int has_library;
    unsigned char *workspace;
    gemm_plan plan[GEMM_PLANS];
    int n_plan;
} gemm_state;

/* ---- the own kernel -------------------------------------------------------------------------------------------------- */

/* Rows of a operand as the tensor core takes them: element (i, l) at i * row + l * k. */
typedef struct gemm_side {
    const bi_bf16 *base;
    int64_t row, k, stride;
    int32_t n_row;
} gemm_side;

static __device__ __forceinline__ void fill_side(bi_bf16 (&to)[GEMM_TILE][GEMM_LD], const gemm_side &side, const bi_bf16 *base, int32_t first,
                                                 int32_t k, int32_t n_k) {
    for (int32_t i = (int32_t)threadIdx.x; i < GEMM_TILE * GEMM_STEP; i += GEMM_THREADS) {
        const int32_t row = side.k == 1 ? i / GEMM_STEP : i % GEMM_TILE, at = side.k == 1 ? i % GEMM_STEP : i / GEMM_TILE;
        const bool real = first + row < side.n_row && k + at < n_k;
        to[row][at] = real ? base[(first + row) * side.row + (k + at) * side.k] : (bi_bf16)0;
    }
}

static __device__ __forceinline__ uint32_t pair_at(const bi_bf16 *p) {
    return *(const uint32_t *)(const void *)p;
}

static __global__ void __launch_bounds__(GEMM_THREADS) gemm_kernel(const gemm_side a, const gemm_side b, int32_t n_k, float alpha, float beta,
                                                                   float *c, int64_t c_ld, int64_t c_stride) {
    __shared__ __align__(16) bi_bf16 left[GEMM_TILE][GEMM_LD], right[GEMM_TILE][GEMM_LD];
    const int32_t lane = (int32_t)threadIdx.x % 32, warp = (int32_t)threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int32_t row0 = (int32_t)blockIdx.y * GEMM_TILE, col0 = (int32_t)blockIdx.x * GEMM_TILE;
    const int32_t row = warp % 2 * 32, col = warp / 2 * 32;
    const bi_bf16 *a_base = a.base + blockIdx.z * a.stride, *b_base = b.base + blockIdx.z * b.stride;
    float acc[2][4][4] = {};
    for (int32_t k = 0; k < n_k; k += GEMM_STEP) {
        fill_side(left, a, a_base, row0, k, n_k);
        fill_side(right, b, b_base, col0, k, n_k);
        __syncthreads();
#pragma unroll
        for (int32_t at = 2 * q; at < GEMM_STEP; at += 16) {
            uint32_t x[2][4], y[4][2];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    x[i][r] = pair_at(&left[row + 16 * i + g + 8 * (r & 1)][at + 8 * (r >> 1)]);
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    y[j][r] = pair_at(&right[col + 8 * j + g][at + 8 * r]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    bi_cuda_mma16(acc[i][j], x[i], y[j]);
        }
        __syncthreads();
    }
    c += blockIdx.z * c_stride;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int32_t to_row = row0 + row + 16 * (i / 16) + g + 8 * (i / 2 % 2), to_col = col0 + col + 8 * (i / 4 % 4) + 2 * q + i % 2;
        if (to_row >= a.n_row || to_col >= b.n_row)
            continue;
        float *to = c + to_row * c_ld + to_col;
        *to = alpha * acc[i / 16][i / 4 % 4][i % 4] + (beta == 0.0f ? 0.0f : beta * *to);
    }
}

static br_status run_kernel(bi_grad_ctx *ctx, const bi_grad_gemm_args *g) {
    const gemm_side a = {g->a, g->a_t ? 1 : g->a_ld, g->a_t ? g->a_ld : 1, g->a_stride, g->m};
    const gemm_side b = {g->b, g->b_t ? g->b_ld : 1, g->b_t ? 1 : g->b_ld, g->b_stride, g->n};
    const dim3 grid((unsigned)bi_ceil_div(g->n, GEMM_TILE), (unsigned)bi_ceil_div(g->m, GEMM_TILE), (unsigned)g->batch);
    gemm_kernel<<<grid, GEMM_THREADS, 0, ctx->cuda->stream>>>(a, b, g->k, g->alpha, g->beta, g->c, g->c_ld, g->c_stride);
    return bi_grad_launched("a product");
}

/* ---- cuBLASLt -------------------------------------------------------------------------------------------------------- */

typedef struct gemm_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t first, second, c; /* column-major, as the library sees them: b, a, c */
} gemm_problem;

/* A row-major matrix (n_row, n_col). */
static int set_layout(cublasLtMatrixLayoutOpaque_t *layout, cudaDataType_t type, int32_t n_row, int32_t n_col, int64_t ld, int32_t batch,
                      int64_t stride) {
    return cublasLtMatrixLayoutInit(layout, type, (uint64_t)n_col, (uint64_t)n_row, ld) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride) == CUBLAS_STATUS_SUCCESS;
}

static int problem_of(gemm_problem *p, const bi_grad_gemm_args *g) {
    const cublasOperation_t first = g->b_t ? CUBLAS_OP_T : CUBLAS_OP_N, second = g->a_t ? CUBLAS_OP_T : CUBLAS_OP_N;
    return cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) == CUBLAS_STATUS_SUCCESS &&
           set_layout(&p->first, CUDA_R_16BF, g->b_t ? g->n : g->k, g->b_t ? g->k : g->n, g->b_ld, g->batch, g->b_stride) &&
           set_layout(&p->second, CUDA_R_16BF, g->a_t ? g->k : g->m, g->a_t ? g->m : g->k, g->a_ld, g->batch, g->a_stride) &&
           set_layout(&p->c, CUDA_R_32F, g->m, g->n, g->c_ld, g->batch, g->c_stride);
}

static int set_preference(cublasLtMatmulPreferenceOpaque_t *preference) {
    const size_t workspace = GEMM_WORKSPACE;
    const uint32_t align = 16, none = CUBLASLT_REDUCTION_SCHEME_NONE;
    const cublasLtMatmulPreferenceAttributes_t side[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    int ok = cublasLtMatmulPreferenceInit(preference) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace) ==
                 CUBLAS_STATUS_SUCCESS &&
             cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none) ==
                 CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < 4; i++)
        ok = ok && cublasLtMatmulPreferenceSetAttribute(preference, side[i], &align, sizeof align) == CUBLAS_STATUS_SUCCESS;
    return ok;
}

/* One sum an element: no split over k, no reduction. */
static int is_single(const cublasLtMatmulAlgo_t *algo) {
    int32_t split = 0;
    uint32_t scheme = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split, sizeof split, &written) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written) ==
               CUBLAS_STATUS_SUCCESS &&
           split <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

static int ask(gemm_state *state, gemm_problem *p, cublasLtMatmulAlgo_t *out) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t answer[GEMM_ANSWERS];
    int n = 0;
    if (!set_preference(&preference) ||
        cublasLtMatmulAlgoGetHeuristic(state->handle, &p->desc, &p->first, &p->second, &p->c, &p->c, &preference, GEMM_ANSWERS, answer, &n) !=
            CUBLAS_STATUS_SUCCESS)
        return 0;
    for (int i = 0; i < n; i++)
        if (answer[i].state == CUBLAS_STATUS_SUCCESS && answer[i].workspaceSize <= GEMM_WORKSPACE && is_single(&answer[i].algo)) {
            *out = answer[i].algo;
            return 1;
        }
    return 0;
}

static gemm_key key_of(const bi_grad_gemm_args *g) {
    gemm_key key;
    memset(&key, 0, sizeof key);
    key.a_ld = g->a_ld;
    key.b_ld = g->b_ld;
    key.c_ld = g->c_ld;
    key.a_stride = g->a_stride;
    key.b_stride = g->b_stride;
    key.c_stride = g->c_stride;
    key.m = g->m;
    key.n = g->n;
    key.k = g->k;
    key.batch = g->batch;
    key.a_t = g->a_t != 0;
    key.b_t = g->b_t != 0;
    key.adds = g->beta != 0.0f;
    key.used = 1;
    return key;
}

static gemm_plan *plan_of(gemm_state *state, const bi_grad_gemm_args *g, gemm_problem *p) {
    const gemm_key key = key_of(g);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof key; i++)
        hash = (hash ^ ((const unsigned char *)&key)[i]) * 0x100000001b3u;
    if (state->n_plan > GEMM_PLANS / 4 * 3) {
        memset(state->plan, 0, sizeof state->plan);
        state->n_plan = 0;
    }
    uint32_t at = (uint32_t)(hash >> 32) & (GEMM_PLANS - 1);
    for (; state->plan[at].key.used; at = (at + 1) & (GEMM_PLANS - 1))
        if (memcmp(&state->plan[at].key, &key, sizeof key) == 0)
            return &state->plan[at];
    gemm_plan *plan = &state->plan[at];
    plan->key = key;
    plan->usable = ask(state, p, &plan->algo);
    state->n_plan++;
    return plan;
}

static int is_aligned(const void *base, int64_t ld, int64_t stride, int64_t step) {
    return (uintptr_t)base % 16 == 0 && ld % step == 0 && stride % step == 0;
}

static int by_library(bi_grad_ctx *ctx, const bi_grad_gemm_args *g) {
    gemm_state *state = (gemm_state *)ctx->gemm;
    gemm_problem p;
    if (!state || !state->has_library || g->k == 0 || !is_aligned(g->a, g->a_ld, g->a_stride, 8) || !is_aligned(g->b, g->b_ld, g->b_stride, 8) ||
        !is_aligned(g->c, g->c_ld, g->c_stride, 4) || !problem_of(&p, g))
        return 0;
    gemm_plan *plan = plan_of(state, g, &p);
    if (plan->usable && cublasLtMatmul(state->handle, &p.desc, &g->alpha, g->b, &p.first, g->a, &p.second, &g->beta, g->c, &p.c, g->c, &p.c,
                                       &plan->algo, state->workspace, GEMM_WORKSPACE, ctx->cuda->stream) == CUBLAS_STATUS_SUCCESS)
        return 1;
    if (plan->usable)
        cudaGetLastError(); /* a refusal that is not remembered */
    plan->usable = 0;
    return 0;
}

/* ---- the door -------------------------------------------------------------------------------------------------------- */

br_status bi_grad_gemm_open(bi_grad_ctx *ctx) {
    gemm_state *state = NULL;
    BR_TRY(br_mem_alloc((void **)&state, sizeof *state, "plans of the gradients' products"));
    ctx->gemm = state;
    state->has_library = cublasLtCreate(&state->handle) == CUBLAS_STATUS_SUCCESS; /* else the own kernel does all */
    return br_device_alloc(ctx->device, GEMM_WORKSPACE, "workspace of cuBLASLt", (void **)&state->workspace);
}

void bi_grad_gemm_close(bi_grad_ctx *ctx) {
    gemm_state *state = (gemm_state *)ctx->gemm;
    if (!state)
        return;
    if (state->has_library)
        cublasLtDestroy(state->handle);
    br_device_free(ctx->device, state->workspace);
    br_mem_free(state);
    ctx->gemm = NULL;
}

br_status bi_grad_gemm(bi_grad_ctx *ctx, const bi_grad_gemm_args *args) {
    bi_grad_gemm_args g = *args;
    if (g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0)
        return br_fail(BR_E_SHAPE, "a product of the gradients (%d, %d, %d) x %d: expected nothing below 0", g.m, g.n, g.k, g.batch);
    if (g.m == 0 || g.n == 0 || g.batch == 0)
        return BR_OK;
    if (g.batch == 1)
        g.a_stride = g.b_stride = g.c_stride = 0;
    return by_library(ctx, &g) ? BR_OK : run_kernel(ctx, &g);
}
