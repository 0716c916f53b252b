/* Rows of the verb `bench`: Kimi Delta Attention; see job_bench.h. */
#include "job_bench.h"

static br_status run_kda(bench *b, const void *args) {
    return b->backend.op->kda(b->backend.ctx, args);
}

/* n_row rows of random inputs for calls of n_head heads; q, k and v are what a convolution leaves, of deviation 1. */
static br_status take_inputs(bench *b, int64_t n_row, bi_kda_args *a) {
    const int64_t width = (int64_t)a->n_head * a->d;
    BR_TRY(bench_bf16(b, n_row * width, &a->q));
    BR_TRY(bench_bf16(b, n_row * width, &a->k));
    BR_TRY(bench_bf16(b, n_row * width, &a->v));
    BR_TRY(bench_uniform(b, n_row * width, 0.5f, 1, &a->a));
    BR_TRY(bench_uniform(b, n_row * a->n_head, 0, 1, &a->beta));
    return bench_take(b, sizeof(float) * (size_t)(n_row * width), "outputs", (void **)&a->o);
}

static bi_kda_args new_args(const bench *b) {
    const int32_t n_head = b->shape->kda_n_head, d = b->shape->kda_d;
    return (bi_kda_args){
        .n_head = n_head, .d = d, .ld = n_head * d, .scale = bi_const_kda_scale(d), .fault = bench_fault(b),
        .state.seq_bytes = b->backend.op->kda_state_bytes(n_head, d),
    };
}

/* The same rows `row` onwards. */
static void skip_rows(bi_kda_args *a, int64_t row) {
    const int64_t width = (int64_t)a->n_head * a->d;
    a->q += row * width;
    a->k += row * width;
    a->v += row * width;
    a->a += row * width;
    a->beta += row * a->n_head;
    a->o += row * width;
}

static br_status take_states(bench *b, int32_t n_seq, bi_state *state) {
    return bench_take(b, state->seq_bytes * (size_t)n_seq, "KDA states", (void **)&state->base);
}

/* Bytes and operations of a step: inputs and outputs of n_row rows, states of n_seq sequences read and written. */
static void set_floor(bench_row *row, const bi_kda_args *a, double n_row, double n_seq) {
    const double width = (double)a->n_head * a->d;
    row->bytes = n_row * (width * (3 * sizeof(bi_bf16) + 2 * sizeof(float)) + a->n_head * sizeof(float)) +
                 n_seq * 2 * (double)a->n_head * a->d * a->d * sizeof(float);
    row->flops = 7 * n_row * width * a->d;
    row->unit = BENCH_FP32;
}

static bench_output output_of(const bi_kda_args *args, int32_t n_row, const bi_kda_args *twin, int32_t n_twin) {
    const size_t row_bytes = sizeof(float) * (size_t)args->n_head * (size_t)args->d;
    return (bench_output){
        .all = args->o, .bytes = row_bytes * (size_t)n_row, .twin = twin->o, .twin_bytes = row_bytes * (size_t)n_twin, .hashed = 1,
    };
}

/* n_seq sequences of n_tok tokens from their first on. The twin takes the first tokens of the first sequence alone. */
br_status bench_kda_prefill(bench *b, const char *name, int32_t n_seq, int32_t n_tok, bench_result *result) {
    const int32_t n_row = n_seq * n_tok, n_twin = n_seq > 1 ? n_tok : n_tok / 8 + 1;
    bi_kda_args args = new_args(b), twin;
    bi_batch batch, twin_batch;
    bench_row row = {
        .name = name, .op = run_kda, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = n_row, .n_output = 1,
    };
    BR_TRY(bench_batch(b, n_seq, n_tok, 0, 0, &batch));
    BR_TRY(bench_batch(b, 1, n_twin, 0, 0, &twin_batch));
    BR_TRY(take_inputs(b, n_row, &args));
    BR_TRY(take_states(b, n_seq, &args.state));
    args.batch = &batch;
    twin = args;
    twin.batch = &twin_batch;
    BR_TRY(take_states(b, 1, &twin.state));
    BR_TRY(bench_take(b, sizeof(float) * (size_t)n_twin * (size_t)args.n_head * (size_t)args.d, "outputs", (void **)&twin.o));
    row.output[0] = output_of(&args, n_row, &twin, n_twin);
    set_floor(&row, &args, n_row, n_seq);
    snprintf(row.shape, sizeof row.shape, "%d x %d tokens; %d heads of %d", n_seq, n_tok, args.n_head, args.d);
    return bench_measure(b, &row, result);
}

/* States that some tokens have passed through. */
static br_status warm_states(bench *b, const bi_kda_args *decode, int32_t n_seq, int32_t n_tok) {
    const int32_t n_part = bench_least(n_seq, b->shape->prefill / n_tok);
    bi_kda_args args = *decode;
    bi_batch batch;
    BR_TRY(take_inputs(b, (int64_t)n_part * n_tok, &args));
    for (int32_t seq = 0; seq < n_seq; seq += n_part) {
        BR_TRY(bench_batch(b, bench_least(n_part, n_seq - seq), n_tok, seq, 0, &batch));
        args.batch = &batch;
        BR_TRY(b->backend.op->kda(b->backend.ctx, &args));
        BR_TRY(br_device_wait(b->device));
    }
    return BR_OK;
}

/* One token each for n_seq sequences. The twin is the first of them alone. */
br_status bench_kda_decode(bench *b, const char *name, int32_t n_seq, bench_result *result) {
    enum { WARM_TOKENS = 4 };
    bi_kda_args args[BENCH_VARIANT_MAX], twin, first = new_args(b);
    bi_batch batch, twin_batch;
    bench_row row = {
        .name = name, .op = run_kda, .args = args, .args_bytes = sizeof args[0], .twin = &twin, .n_row = n_seq, .n_output = 2,
    };
    row.n_variant = bench_variants(b, (double)n_seq * (double)first.state.seq_bytes);
    BR_TRY(bench_batch(b, n_seq, 1, 0, WARM_TOKENS, &batch));
    BR_TRY(bench_batch(b, 1, 1, 0, WARM_TOKENS, &twin_batch));
    BR_TRY(take_states(b, n_seq * row.n_variant, &first.state));
    BR_TRY(warm_states(b, &first, n_seq * row.n_variant, WARM_TOKENS));
    BR_TRY(take_inputs(b, (int64_t)n_seq * row.n_variant, &first));
    first.batch = &batch;
    twin = first;
    for (int32_t i = 0; i < row.n_variant; i++) {
        args[i] = first;
        skip_rows(&args[i], (int64_t)i * n_seq);
        args[i].state.base += first.state.seq_bytes * (size_t)(i * n_seq);
    }
    twin.batch = &twin_batch;
    BR_TRY(take_states(b, 1, &twin.state));
    BR_TRY(br_device_copy(b->device, twin.state.base, first.state.base, first.state.seq_bytes));
    BR_TRY(bench_take(b, sizeof(float) * (size_t)first.ld, "outputs", (void **)&twin.o));
    row.output[0] = output_of(&first, n_seq, &twin, 1);
    row.output[1] = (bench_output){
        .all = first.state.base, .bytes = first.state.seq_bytes, .twin = twin.state.base, .twin_bytes = first.state.seq_bytes,
    };
    set_floor(&row, &first, n_seq, n_seq);
    snprintf(row.shape, sizeof row.shape, "%d sequences; %d heads of %d", n_seq, first.n_head, first.d);
    return bench_measure(b, &row, result);
}

br_status bench_kda(bench *b) {
    static const int32_t BATCH[] = {1, 8, 64, 256};
    const int32_t n_row = b->shape->prefill;
    char name[64];
    if (bench_wants(b, "kda.prefill.one"))
        BR_TRY(bench_settle(b, "kda.prefill.one", bench_kda_prefill(b, "kda.prefill.one", 1, n_row, NULL)));
    if (bench_wants(b, "kda.prefill.packed"))
        BR_TRY(bench_settle(b, "kda.prefill.packed", bench_kda_prefill(b, "kda.prefill.packed", 8, n_row / 8, NULL)));
    for (size_t i = 0; i < sizeof BATCH / sizeof BATCH[0]; i++) {
        snprintf(name, sizeof name, "kda.decode.b%d", BATCH[i]);
        if (bench_wants(b, name))
            BR_TRY(bench_settle(b, name, bench_kda_decode(b, name, bench_batch_size(b, BATCH[i]), NULL)));
    }
    return BR_OK;
}
