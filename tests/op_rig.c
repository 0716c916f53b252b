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

static void *mat_new(op_rig *rig, int n_out, int n_in) {
    ck_assert_int_lt(rig->n_mat, OP_RIG_MAT_MAX);
    CHECK_OK(br_mem_alloc(&rig->mat[rig->n_mat], rig->backend.op->mat_bytes(n_out, n_in), "a test's matrix"));
    return rig->mat[rig->n_mat++];
}

bi_mat op_rig_mat(op_rig *rig, const bi_bf16 *w, int n_out, int n_in) {
    void *data = mat_new(rig, n_out, n_in);
    CHECK_OK(rig->backend.op->mat_pack_bf16(rig->backend.ctx, data, n_out, n_in, w, n_in, 1));
    return (bi_mat){data, n_out, n_in};
}

bi_mat op_rig_mat_fp4(op_rig *rig, const uint8_t *code, const uint8_t *scale, int n_out, int n_in) {
    void *data = mat_new(rig, n_out, n_in);
    CHECK_OK(rig->backend.op->mat_pack_fp4(rig->backend.ctx, data, n_out, n_in, code, scale));
    return (bi_mat){data, n_out, n_in};
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
