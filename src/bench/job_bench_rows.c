/* Rows of the verb `bench`: ops on single rows, bound by memory; see job_bench.h. */
#include "job_bench.h"

static br_status run_rmsnorm(bench *b, const void *args) {
    return b->backend.op->rmsnorm(b->backend.ctx, args);
}

static br_status run_combine(bench *b, const void *args) {
    return b->backend.op->combine(b->backend.ctx, args);
}

static br_status run_residual(bench *b, const void *args) {
    return b->backend.op->residual(b->backend.ctx, args);
}

/* Rows of d numbers in n_variant sets; the twin's output is one of them. */
static br_status take_outputs(bench *b, bench_row *row, int32_t d, bi_bf16 **y, bi_bf16 **twin_y) {
    const size_t row_bytes = sizeof **y * (size_t)d, bytes = row_bytes * (size_t)row->n_row;
    BR_TRY(bench_take(b, bytes * (size_t)row->n_variant, "outputs", (void **)y));
    BR_TRY(bench_take(b, row_bytes, "outputs", (void **)twin_y));
    row->n_output = 1;
    row->output[0] = (bench_output){.all = *y, .bytes = bytes, .twin = *twin_y, .twin_bytes = row_bytes, .hashed = 1};
    return BR_OK;
}

static br_status measure_rmsnorm(bench *b, const char *name) {
    const int32_t n_row = b->shape->prefill, d = b->shape->d_model;
    const int64_t n = (int64_t)n_row * d;
    char request[64];
    const bi_bf16 *x;
    const float *w;
    bi_bf16 *y, *twin_y;
    bi_norm_args args[BENCH_VARIANT_MAX], twin;
    bench_row row = {
        .name = name, .op = run_rmsnorm, .args = args, .args_bytes = sizeof args[0], .twin = &twin, .n_row = n_row, .bytes = 4.0 * (double)n,
        .peer_name = "torch rms_norm", .request = request,
    };
    row.n_variant = bench_variants(b, row.bytes);
    BR_TRY(bench_bf16(b, n * row.n_variant, &x));
    BR_TRY(bench_uniform(b, d, 0.5f, 1.5f, &w));
    BR_TRY(take_outputs(b, &row, d, &y, &twin_y));
    for (int32_t i = 0; i < row.n_variant; i++)
        args[i] = (bi_norm_args){
            .n_row = n_row, .d = d, .x = x + n * i, .x_ld = d, .w = w, .eps = 1e-5f, .y = y + n * i, .y_ld = d, .fault = bench_fault(b),
        };
    twin = args[0];
    twin.n_row = 1;
    twin.y = twin_y;
    snprintf(row.shape, sizeof row.shape, "%d x %d bf16", n_row, d);
    snprintf(request, sizeof request, "rms_norm %d %d", n_row, d);
    return bench_measure(b, &row, NULL);
}

static br_status measure_combine(bench *b, const char *name) {
    const int32_t n_row = b->shape->prefill, d = b->shape->d_latent, topk = b->shape->expert_topk;
    bi_bf16 *twin_y;
    bi_combine_args args = {.n_row = n_row, .d = d, .topk = topk}, twin;
    bench_row row = {
        .name = name, .op = run_combine, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = n_row,
        .bytes = 2.0 * n_row * d * (topk + 1),
    };
    BR_TRY(bench_bf16(b, (int64_t)n_row * topk * d, &args.e));
    BR_TRY(bench_uniform(b, (int64_t)n_row * topk, 0, 0.125f, &args.p));
    BR_TRY(take_outputs(b, &row, d, &args.y, &twin_y));
    twin = args;
    twin.n_row = 1;
    twin.y = twin_y;
    snprintf(row.shape, sizeof row.shape, "%d x %d x %d bf16", n_row, topk, d);
    return bench_measure(b, &row, NULL);
}

static br_status measure_residual(bench *b, const char *name) {
    const int32_t n_row = b->shape->prefill, d = b->shape->d_model;
    const int64_t n = (int64_t)n_row * d;
    bi_bf16 *twin_y;
    bi_residual_args args = {.n_row = n_row, .d = d, .fault = bench_fault(b)}, twin;
    bench_row row = {
        .name = name, .op = run_residual, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = n_row,
        .bytes = 6.0 * (double)n,
    };
    BR_TRY(bench_bf16(b, n, &args.a));
    BR_TRY(bench_bf16(b, n, &args.b));
    BR_TRY(take_outputs(b, &row, d, &args.y, &twin_y));
    twin = args;
    twin.n_row = 1;
    twin.y = twin_y;
    snprintf(row.shape, sizeof row.shape, "%d x %d bf16", n_row, d);
    return bench_measure(b, &row, NULL);
}

br_status bench_row_ops(bench *b) {
    static const struct {
        const char *name;
        br_status (*measure)(bench *, const char *);
    } ROW[] = {{"rmsnorm.8192", measure_rmsnorm}, {"combine.8192", measure_combine}, {"residual.8192", measure_residual}};
    for (size_t i = 0; i < sizeof ROW / sizeof ROW[0]; i++)
        if (bench_wants(b, ROW[i].name))
            BR_TRY(bench_settle(b, ROW[i].name, ROW[i].measure(b, ROW[i].name)));
    return BR_OK;
}
