/* Rows of the verb `bench`: the ceilings, the dense products, the head; see job_bench.h. */
#include "job_bench.h"

/* Inputs and outputs of the ten dense products of a K3.1 layer and its head, as a step runs them. */
static const struct {
    int32_t n_in, n_out;
} DENSE[] = {
    {7168, 49152},  /* KDA q, k, v, gate */
    {12288, 7168},  /* output of both attentions */
    {7168, 14560},  /* MLA: q and kv down, gate, index key and weights */
    {1536, 22528},  /* q up, index q */
    {512, 24576},   /* kv up */
    {7168, 3584},   /* latent down */
    {3584, 7168},   /* latent up */
    {7168, 12288},  /* shared experts: gate, up */
    {6144, 7168},   /* shared experts: down */
    {7168, 163840}, /* head */
};
static const int32_t SMALL_ROWS[] = {1, 16, 64};

enum { N_DENSE = sizeof DENSE / sizeof DENSE[0], N_SMALL = sizeof SMALL_ROWS / sizeof SMALL_ROWS[0], TWIN_ROWS = 64 };

static const double LARGE_WEIGHT_BYTES = 100e6; /* the share of the small products is that of weights as large as this */

/* ---- ceilings ---------------------------------------------------------------------------------------------------------- */

typedef struct copy_args {
    void *to;
    const void *from;
    size_t bytes;
} copy_args;

/* Of ours and the peer's. */
static double least_us(const bench_result *r) {
    return r->peer_us_min > 0 && r->peer_us_min < r->us_min ? r->peer_us_min : r->us_min;
}

static br_status run_copy(bench *b, const void *args) {
    const copy_args *a = args;
    return br_device_copy(b->device, a->to, a->from, a->bytes);
}

static br_status measure_copy(bench *b) {
    copy_args args = {.bytes = b->shape->copy_bytes};
    const bi_bf16 *from = NULL;
    bench_result result = {0};
    char request[64];
    bench_row row = {
        .name = "ceiling.copy", .op = run_copy, .args = &args, .n_variant = 1, .is_plain = 1, .is_ceiling = 1, .peer_name = "torch copy_",
        .request = request,
    };
    bench_forget(b);
    BR_TRY(bench_bf16(b, (int64_t)(args.bytes / sizeof *from), &from));
    BR_TRY(bench_take(b, args.bytes, "a copy", &args.to));
    args.from = from;
    snprintf(row.shape, sizeof row.shape, "%zu MiB read and written", args.bytes >> 20);
    snprintf(request, sizeof request, "copy %zu", args.bytes);
    BR_TRY(bench_measure(b, &row, &result));
    b->copy_rate = 2e6 * (double)args.bytes / least_us(&result);
    return BR_OK;
}

/* ---- one product ------------------------------------------------------------------------------------------------------- */

static br_status run_linear(bench *b, const void *args) {
    return b->backend.op->linear(b->backend.ctx, args);
}

/* Operand sets of x (n_row_x, n_in) W^T; the twin takes n_twin rows. */
static br_status lay_out_product(bench *b, int32_t n_row, int32_t n_twin, int32_t n_in, int32_t n_out, bi_linear_args *args,
                                 bi_linear_args *twin, bench_row *row) {
    const double set_bytes = 2.0 * ((double)n_in * n_out + (double)n_row * n_in + (double)n_row * n_out);
    const int32_t n_row_x = n_row > n_twin ? n_row : n_twin, n_set = bench_variants(b, set_bytes);
    const bi_bf16 *x;
    void *y = NULL, *twin_y = NULL;
    bi_mat w;
    row->n_variant = bench_least(n_set, 16);
    BR_TRY(bench_mat(b, n_out, n_in, row->n_variant, &w));
    BR_TRY(bench_bf16(b, (int64_t)row->n_variant * n_row_x * n_in, &x));
    BR_TRY(bench_take(b, sizeof *x * (size_t)row->n_variant * (size_t)n_row * (size_t)n_out, "outputs", &y));
    BR_TRY(bench_take(b, sizeof *x * (size_t)n_twin * (size_t)n_out, "outputs", &twin_y));
    for (int32_t i = 0; i < row->n_variant; i++) {
        args[i] = (bi_linear_args){
            .n_row = n_row, .n_head = 1, .x = x + (int64_t)i * n_row_x * n_in, .x_ld = n_in, .w = bi_mat_at(&w, i),
            .y = (bi_bf16 *)y + (int64_t)i * n_row * n_out, .y_ld = n_out, .fault = bench_fault(b),
        };
    }
    *twin = args[0];
    twin->n_row = n_twin;
    twin->y = twin_y;
    row->output[row->n_output++] = (bench_output){
        .all = y, .bytes = sizeof *x * (size_t)n_row * (size_t)n_out, .twin = twin_y,
        .twin_bytes = sizeof *x * (size_t)n_twin * (size_t)n_out, .hashed = 1,
    };
    return BR_OK;
}

/* At few rows the floor is that of the weights alone. */
static br_status measure_product(bench *b, const char *name, int32_t n_row, int32_t n_in, int32_t n_out, int is_ceiling, bench_result *result) {
    bi_linear_args args[BENCH_VARIANT_MAX], twin;
    char request[64];
    const double weights = (double)n_in * n_out, rest = (double)n_row * ((double)n_in + n_out);
    bench_row row = {
        .name = name, .op = run_linear, .args = args, .args_bytes = sizeof args[0], .twin = &twin, .n_row = n_row,
        .bytes = 2 * (weights + (n_row > TWIN_ROWS ? rest : 0)), .flops = 2 * weights * n_row, .unit = BENCH_MMA,
        .is_ceiling = is_ceiling, .peer_name = "torch.mm", .request = request,
    };
    snprintf(row.shape, sizeof row.shape, "%d x %d -> %d bf16", n_row, n_in, n_out);
    snprintf(request, sizeof request, "mm %d %d %d", n_row, n_in, n_out);
    BR_TRY(lay_out_product(b, n_row, n_row > 1 ? 1 : bench_least(TWIN_ROWS, b->shape->prefill), n_in, n_out, args, &twin, &row));
    return bench_measure(b, &row, result);
}

static br_status measure_mma(bench *b) {
    const int32_t n = 8192 / b->shape->dense_divisor;
    bench_result result = {0};
    bench_forget(b);
    BR_TRY(bench_settle(b, "ceiling.mm", measure_product(b, "ceiling.mm", n, n, n, 1, &result)));
    b->mma_rate = result.us > 0 ? 2e6 * (double)n * n * n / least_us(&result) : 0;
    return BR_OK;
}

br_status bench_ceilings(bench *b) {
    BR_TRY(measure_copy(b));
    BR_TRY(measure_mma(b));
    bench_say(b, "ceilings of this run, by the least times: copy %.5g GB/s, bf16 %.4g TFLOP/s; assumed: fp8 twice that, fp32 60 TFLOP/s",
              1e-9 * b->copy_rate, 1e-12 * b->mma_rate);
    return BR_OK;
}

/* ---- all products ------------------------------------------------------------------------------------------------------ */

typedef struct means {
    double ratio[N_DENSE * N_SMALL], share[N_DENSE * N_SMALL];
    int n_ratio, n_share;
} means;

static void add_means(means *m, const bench_result *r, int with_share) {
    if (r->us > 0 && r->peer_us > 0)
        m->ratio[m->n_ratio++] = r->peer_us / r->us;
    if (with_share && r->us > 0 && r->floor_us > 0)
        m->share[m->n_share++] = r->floor_us / r->us;
}

static br_status record_means(bench *b, const char *name, const char *shape, const means *m) {
    const bench_result nothing = {0};
    bench_row row = {.name = name, .peer_name = "torch.mm"};
    if (m->n_ratio + m->n_share == 0)
        return BR_OK;
    snprintf(row.shape, sizeof row.shape, "%s: %d ratios %d shares", shape, m->n_ratio, m->n_share);
    return bench_record(b, &row, &nothing, m->n_share ? bench_geomean(m->share, m->n_share) : -1,
                        m->n_ratio ? bench_geomean(m->ratio, m->n_ratio) : -1);
}

static br_status dense_row(bench *b, const char *name, int i, int32_t n_row, means *m, int with_share) {
    bench_result result = {0};
    if (!bench_wants(b, name))
        return BR_OK;
    const int32_t divisor = b->shape->dense_divisor;
    BR_TRY(bench_settle(b, name, measure_product(b, name, n_row, DENSE[i].n_in / divisor, DENSE[i].n_out / divisor, 0, &result)));
    add_means(m, &result, with_share);
    return BR_OK;
}

br_status bench_dense(bench *b) {
    char name[64];
    means large = {0}, small = {0};
    for (int i = 0; i < N_DENSE; i++) {
        snprintf(name, sizeof name, "dense.large.%dx%d", DENSE[i].n_in, DENSE[i].n_out);
        BR_TRY(dense_row(b, name, i, b->shape->prefill, &large, 1));
    }
    BR_TRY(record_means(b, "dense.large.geomean", "of dense.large", &large));
    for (int i = 0; i < N_DENSE; i++) {
        const int with_share = 2.0 * DENSE[i].n_in * DENSE[i].n_out >= LARGE_WEIGHT_BYTES;
        for (int m = 0; m < N_SMALL; m++) {
            snprintf(name, sizeof name, "dense.small.%dx%d.m%d", DENSE[i].n_in, DENSE[i].n_out, SMALL_ROWS[m]);
            BR_TRY(dense_row(b, name, i, SMALL_ROWS[m], &small, with_share));
        }
    }
    return record_means(b, "dense.small.geomean", "of dense.small; shares of weights >= 100 MB", &small);
}

/* ---- the head ---------------------------------------------------------------------------------------------------------- */

static const char HEAD_CHAIN[] = "torch.mm log_softmax gather";

static br_status run_score(bench *b, const void *args) {
    return b->backend.op->score(b->backend.ctx, args);
}

static br_status measure_head(bench *b, const char *name, int32_t n_row, const char *peer_name, const char *peer_op,
                              bench_result *result) {
    const int32_t d = b->shape->d_model, n_vocab = b->shape->n_vocab;
    const size_t out_bytes = sizeof(float) * (size_t)n_row;
    char request[64];
    bi_score_args args = {.n_row = n_row, .d = d, .n_vocab = n_vocab, .fault = bench_fault(b)}, twin;
    bench_row row = {
        .name = name, .op = run_score, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = n_row,
        .bytes = 2.0 * n_vocab * d + 2.0 * n_row * d, .flops = 2.0 * n_vocab * d * n_row, .unit = BENCH_MMA,
        .peer_name = peer_name, .request = request,
    };
    BR_TRY(bench_mat(b, n_vocab, d, 1, &args.w));
    BR_TRY(bench_bf16(b, (int64_t)n_row * d, &args.x));
    BR_TRY(bench_below(b, n_row, n_vocab, &args.token));
    BR_TRY(bench_uniform(b, n_row, 1, 1, &args.temperature));
    BR_TRY(bench_take(b, out_bytes, "log-probs", (void **)&args.logprob));
    BR_TRY(bench_take(b, out_bytes, "log-probs", (void **)&args.logprob_raw));
    twin = args;
    twin.n_row = 1;
    BR_TRY(bench_take(b, sizeof(float), "log-probs", (void **)&twin.logprob));
    BR_TRY(bench_take(b, sizeof(float), "log-probs", (void **)&twin.logprob_raw));
    row.n_output = 2;
    row.output[0] = (bench_output){.all = args.logprob, .bytes = out_bytes, .twin = twin.logprob, .twin_bytes = sizeof(float), .hashed = 1};
    row.output[1] = (bench_output){.all = args.logprob_raw, .bytes = out_bytes, .twin = twin.logprob_raw, .twin_bytes = sizeof(float), .hashed = 1};
    snprintf(row.shape, sizeof row.shape, "%d x %d -> %d; log-probs of given tokens", n_row, d, n_vocab);
    snprintf(request, sizeof request, "%s %d %d %d", peer_op, n_row, d, n_vocab);
    return bench_measure(b, &row, result);
}

br_status bench_head_score(bench *b, const char *name, int32_t n_row, bench_result *result) {
    return measure_head(b, name, n_row, HEAD_CHAIN, "mm_logprob", result);
}

br_status bench_head(bench *b) {
    const struct {
        const char *name;
        int32_t n_row;
        const char *peer_name, *peer_op;
    } row[] = {
        {"head.m64", bench_least(64, b->shape->prefill), "torch.mm", "mm"},
        {"head.m8192", b->shape->prefill, "torch.mm", "mm"},
        {"head.chain.m64", bench_least(64, b->shape->prefill), HEAD_CHAIN, "mm_logprob"},
        {"head.chain.m8192", b->shape->prefill, HEAD_CHAIN, "mm_logprob"},
    };
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)
        if (bench_wants(b, row[i].name))
            BR_TRY(bench_settle(b, row[i].name, measure_head(b, row[i].name, row[i].n_row, row[i].peer_name, row[i].peer_op, NULL)));
    return BR_OK;
}
