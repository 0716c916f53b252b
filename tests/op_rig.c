/* Backends and random inputs for op tests; see op_rig.h. */
#include "op_rig.h"

#include "bi_bits.h"
#define BI_ISA portable
#include "bi_oracle.h"
#include "br_mem.h"
#include "test_support.h"

int op_rig_isas(const char *names[OP_RIG_ISA_MAX]) {
    static const char *const all[OP_RIG_ISA_MAX] = {"portable", "avx2", "avx512"};
    const bi_limits limits = {.n_row = 1};
    int n = 0;
    br_pool *pool;
    CHECK_OK(br_pool_open(1, &pool));
    for (int i = 0; i < OP_RIG_ISA_MAX; i++) {
        bi_backend backend;
        br_status status = bi_backend_oracle_open(&limits, pool, all[i], &backend);
        if (status == BR_E_UNSUPPORTED)
            continue;
        CHECK_OK(status);
        bi_backend_close(&backend);
        names[n++] = all[i];
    }
    br_pool_close(pool);
    ck_assert_int_ge(n, 1);
    return n;
}

void op_rig_open(op_rig *rig, const bi_limits *limits, const char *isa, int n_thread) {
    CHECK_OK(br_pool_open(n_thread, &rig->pool));
    CHECK_OK(bi_backend_oracle_open(limits, rig->pool, isa, &rig->backend));
    rig->n_mat = 0;
}

void op_rig_close(op_rig *rig) {
    while (rig->n_mat > 0)
        br_mem_free(rig->mat[--rig->n_mat]);
    bi_backend_close(&rig->backend);
    br_pool_close(rig->pool);
}

static void *block_new(op_rig *rig, size_t bytes) {
    ck_assert_int_lt(rig->n_mat, OP_RIG_MAT_MAX);
    CHECK_OK(br_mem_alloc(&rig->mat[rig->n_mat], bytes, "a test's matrix"));
    return rig->mat[rig->n_mat++];
}

static bi_mat stack_new(op_rig *rig, bi_form form, int n, int n_out, int n_in) {
    const size_t stride = rig->backend.op->mat_bytes(form, n_out, n_in);
    return (bi_mat){.data = block_new(rig, stride * (size_t)n), .n_out = n_out, .n_in = n_in, .form = form, .stride = stride};
}

static void *data_at(const bi_mat *stack, int i) {
    return (void *)(uintptr_t)bi_mat_at(stack, i).data;
}

bi_mat op_rig_stack(op_rig *rig, const bi_bf16 *w, int n, int n_out, int n_in) {
    const bi_mat stack = stack_new(rig, BI_FORM_BF16, n, n_out, n_in);
    for (int i = 0; i < n; i++, w += (size_t)n_out * (size_t)n_in)
        CHECK_OK(rig->backend.op->mat_pack_bf16(rig->backend.ctx, data_at(&stack, i), n_out, n_in, w, n_in, 1));
    return stack;
}

bi_mat op_rig_stack_fp4(op_rig *rig, const uint8_t *code, const uint8_t *scale, int n, int n_out, int n_in) {
    const bi_mat stack = stack_new(rig, BI_FORM_FP4, n, n_out, n_in);
    const size_t n_weight = (size_t)n_out * (size_t)n_in;
    for (size_t i = 0; i < (size_t)n; i++)
        CHECK_OK(rig->backend.op->mat_pack_fp4(rig->backend.ctx, data_at(&stack, (int)i), n_out, n_in, code + i * n_weight / 2,
                                               scale + i * n_weight / 32));
    return stack;
}

bi_mat op_rig_mat(op_rig *rig, const bi_bf16 *w, int n_out, int n_in) {
    return op_rig_stack(rig, w, 1, n_out, n_in);
}

bi_mat op_rig_mat_fp4(op_rig *rig, const uint8_t *code, const uint8_t *scale, int n_out, int n_in) {
    return op_rig_stack_fp4(rig, code, scale, 1, n_out, n_in);
}

bi_adapter op_rig_adapter(op_rig *rig, const op_low_rank *map, int n, int n_out, int n_in) {
    int rank = 0;
    for (int i = 0; i < n; i++)
        rank = map[i].rank > rank ? map[i].rank : rank;
    if (rank == 0)
        return (bi_adapter){0};
    bi_bf16 *a, *b;
    CHECK_OK(br_mem_alloc((void **)&a, sizeof *a * (size_t)(n * rank * n_in), "an adapter"));
    CHECK_OK(br_mem_alloc((void **)&b, sizeof *b * (size_t)(n * n_out * rank), "an adapter"));
    float *s = block_new(rig, sizeof *s * (size_t)n);
    for (int i = 0; i < n; i++) {
        s[i] = map[i].s;
        if (map[i].rank)
            memcpy(a + i * rank * n_in, map[i].a, sizeof *a * (size_t)(map[i].rank * n_in));
        for (int o = 0; o < n_out && map[i].rank; o++)
            memcpy(b + (i * n_out + o) * rank, map[i].b + o * map[i].rank, sizeof *b * (size_t)map[i].rank);
    }
    bi_adapter adapter = {.a = op_rig_stack(rig, a, n, rank, n_in), .b = op_rig_stack(rig, b, n, n_out, rank), .s = s};
    br_mem_free(a);
    br_mem_free(b);
    return adapter;
}

void op_rig_poison(op_rig *rig) {
    bi_ctx *ctx = rig->backend.ctx;
    memset(ctx->shared, 0xff, ctx->shared_bytes);
    memset(ctx->thread, 0xff, ctx->thread_bytes * (size_t)br_pool_thread_count(rig->pool));
}

uint64_t op_random_u64(op_random *random) {
    return test_mix(random->seed * 0x9e3779b97f4a7c15ull + random->at++);
}

int op_random_below(op_random *random, int n) {
    return (int)(op_random_u64(random) % (uint64_t)n);
}

float op_random_normal(op_random *random) {
    /* Twelve uniforms of 16 bits add up to variance 1. */
    int64_t sum = 0;
    for (int i = 0; i < 3; i++)
        for (uint64_t u = op_random_u64(random), k = 0; k < 4; k++, u >>= 16)
            sum += (int64_t)(u & 0xffff);
    return (float)(sum - 6 * 65535) * 0x1p-16f;
}

void op_random_normals(op_random *random, float scale, float *x, int n) {
    for (int i = 0; i < n; i++)
        x[i] = scale * op_random_normal(random);
}

void op_random_bf16s(op_random *random, float scale, bi_bf16 *x, int n) {
    for (int i = 0; i < n; i++)
        x[i] = bi_round(scale * op_random_normal(random));
}

void op_random_order(op_random *random, int *order, int n) {
    for (int i = 0; i < n; i++)
        order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        int j = op_random_below(random, i + 1), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
}
