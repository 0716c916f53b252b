/* Opens the oracle backend: picks the instruction set, makes the scratch; and the constants of a model, rounded once.
 *
 * Layer: kernels_batch_invariant. Compiled once. The instruction set changes the speed only: the tables have equal bits. */
#define BI_ISA portable /* names of the shared header only; the tables of all three are declared below */
#include "bi_oracle.h"

extern const bi_ops bi_ops_portable, bi_ops_avx2, bi_ops_avx512;

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int has_portable(void) {
    return 1;
}

/* Best first. */
static const struct {
    const char *name;
    const bi_ops *op;
    int (*supported)(void);
} instruction_set[] = {
    {"avx512", &bi_ops_avx512, has_avx512},
    {"avx2", &bi_ops_avx2, has_avx2},
    {"portable", &bi_ops_portable, has_portable},
};

enum { N_INSTRUCTION_SET = sizeof instruction_set / sizeof instruction_set[0] };

static br_status pick(const char *isa, const bi_ops **out) {
    for (int i = 0; i < N_INSTRUCTION_SET; i++) {
        if (isa && strcmp(isa, instruction_set[i].name) != 0)
            continue;
        if (instruction_set[i].supported()) {
            *out = instruction_set[i].op;
            return BR_OK;
        }
        if (isa)
            return br_fail(BR_E_UNSUPPORTED, "this processor has no %s, which the oracle was asked to use", isa);
    }
    return br_fail(BR_E_ARG, "oracle instruction set '%s': expected portable, avx2 or avx512", isa);
}

static bi_scratch scratch_for(const bi_limits *limits) {
    bi_scratch (*const family[])(const bi_limits *) = {
        bi_linear_scratch, bi_experts_scratch, bi_attn_scratch, bi_index_scratch, bi_route_scratch, bi_head_scratch,
    };
    bi_scratch most = {0, 0};
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++) {
        bi_scratch need = family[i](limits);
        most.shared = need.shared > most.shared ? need.shared : most.shared;
        most.thread = need.thread > most.thread ? need.thread : most.thread;
    }
    most.thread = (most.thread + 63) / 64 * 64; /* each slice starts on a cache line of its own */
    return most;
}

br_status bi_backend_oracle_open(const bi_limits *limits, br_pool *pool, const char *isa, bi_backend *out) {
    *out = (bi_backend){NULL, NULL};
    bi_backend backend = {NULL, NULL};
    BR_TRY(pick(isa, &backend.op));
    bi_scratch scratch = scratch_for(limits);
    size_t n_thread = (size_t)br_pool_thread_count(pool);
    br_status status = BR_OK;
    BR_TRY(br_mem_alloc((void **)&backend.ctx, sizeof *backend.ctx, "the oracle backend"));
    bi_ctx *ctx = backend.ctx;
    ctx->pool = pool;
    ctx->limits = *limits;
    ctx->shared_bytes = scratch.shared;
    ctx->thread_bytes = scratch.thread;
    BR_TRY_GOTO(br_mem_alloc((void **)&ctx->shared, scratch.shared, "the oracle's shared scratch"), fail);
    BR_TRY_GOTO(br_mem_alloc((void **)&ctx->thread, scratch.thread * n_thread, "the oracle's thread scratch"), fail);
    *out = backend;
    return BR_OK;
fail:
    bi_oracle_close(ctx);
    return status;
}

void bi_oracle_close(bi_ctx *ctx) {
    br_mem_free(ctx->shared);
    br_mem_free(ctx->thread);
    br_mem_free(ctx);
}

/* 1, 0, -1: alpha^2 is above, equal to, below middle^2 * n; both sides exact in 128 bits. alpha has 53 bits, middle 25, and
 * n stays below 2^48, so that the right side, at most 16 times apart from the left one, shifts left to meet it. */
static int compare_squares(double alpha, double middle, uint64_t n) {
    int alpha_exp, middle_exp;
    uint64_t a = (uint64_t)ldexp(frexp(alpha, &alpha_exp), 53), m = (uint64_t)ldexp(frexp(middle, &middle_exp), 25);
    unsigned __int128 left = (unsigned __int128)a * a, right = (unsigned __int128)(m * m) * n;
    right <<= 2 * (middle_exp - 25) - 2 * (alpha_exp - 53);
    return left == right ? 0 : left > right ? 1 : -1;
}

/* RN(alpha / sqrt n) of the exact quotient, alpha >= 0. Through binary64 alone it would be rounded twice; the exact
 * comparison with the middle of the two neighbours decides instead, subnormal ones and the step to Inf included. Quotients
 * outside these bounds are further from the last such middle than the two roundings of binary64 reach. */
static float over_sqrt(double alpha, uint64_t n) {
    double quotient = alpha / sqrt((double)n);
    if (!(quotient >= 0x1p-151 && quotient < 0x1p128))
        return (float)quotient;
    uint32_t low = bi_u32_of((float)quotient);
    if ((double)bi_f32_of(low) > quotient)
        low--;
    double above = low + 1 == BI_F32_INF ? 0x1p128 : (double)bi_f32_of(low + 1);
    int side = compare_squares(alpha, ((double)bi_f32_of(low) + above) / 2, n);
    return bi_f32_of(low + (uint32_t)(side > 0 || (side == 0 && (low & 1))));
}

float bi_const_attn_alpha(int32_t d_nope, int32_t d_rope) {
    return over_sqrt(1, (uint64_t)d_nope + (uint64_t)d_rope);
}

float bi_const_index_c(int32_t n_head, int32_t d) {
    return over_sqrt(1, (uint64_t)n_head * (uint64_t)d);
}

float bi_const_kda_scale(int32_t d) {
    return over_sqrt(1, (uint64_t)d);
}

float bi_const_lora_s(double alpha, int32_t rank, int32_t rslora) {
    float size = over_sqrt(fabs(alpha), rslora ? (uint64_t)rank : (uint64_t)rank * (uint64_t)rank);
    return alpha < 0 ? -size : size;
}
