/* Rows of the verb `bench`: routed experts; see job_bench.h. */
#include "job_bench.h"

#include <string.h>

typedef enum routing { UNIFORM, SKEWED } routing;

static br_status run_experts(bench *b, const void *args) {
    return b->backend.op->experts(b->backend.ctx, args);
}

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

/* SKEWED: the product of two uniforms, so that low ids are drawn more often, the first about seven times the mean. */
static int32_t draw_expert(uint64_t *state, int32_t n_expert, routing how) {
    const uint64_t n = (uint64_t)n_expert, a = next(state) % n, c = next(state) % n;
    return (int32_t)(how == UNIFORM ? a : a * c / n);
}

/* topk different experts a row, in ascending order; count (n_expert): how many rows each has. */
static void draw_routing(int32_t n_row, int32_t n_expert, int32_t topk, routing how, int32_t *expert, int32_t *count) {
    uint64_t state = 88172645463325252u;
    memset(count, 0, sizeof *count * (size_t)n_expert);
    for (int32_t t = 0; t < n_row; t++, expert += topk) {
        for (int32_t n = 0; n < topk;) {
            const int32_t e = draw_expert(&state, n_expert, how);
            int32_t at = n;
            while (at > 0 && expert[at - 1] > e)
                at--;
            if (at > 0 && expert[at - 1] == e)
                continue;
            memmove(expert + at + 1, expert + at, sizeof *expert * (size_t)(n - at));
            expert[at] = e;
            count[e]++;
            n++;
        }
    }
}

/* `grouped_mm rows d d_ff count,count,...`: the peer takes the same experts' loads. */
static void write_request(const bench_shape *s, int32_t n_row, const int32_t *count, char *request, size_t bytes) {
    int used = snprintf(request, bytes, "grouped_mm %d %d %d ", n_row, s->d_latent, s->d_ff);
    for (int32_t e = 0; e < s->n_expert; e++)
        used += snprintf(request + used, bytes - (size_t)used, "%s%d", e ? "," : "", count[e]);
}

static int32_t touched(const int32_t *count, int32_t n_expert) {
    int32_t n = 0;
    for (int32_t e = 0; e < n_expert; e++)
        n += count[e] > 0;
    return n;
}

static br_status take_routing(bench *b, int32_t n_row, routing how, bi_experts_args *a, int32_t *count) {
    const size_t bytes = sizeof(int32_t) * (size_t)n_row * (size_t)a->topk;
    int32_t *expert;
    void *at = NULL;
    BR_TRY(br_mem_alloc((void **)&expert, bytes, "chosen experts"));
    draw_routing(n_row, a->n_expert, a->topk, how, expert, count);
    br_status status = bench_upload(b, expert, bytes, "chosen experts", &at);
    br_mem_free(expert);
    a->expert = at;
    return status;
}

/* Decode counts the weights that are touched; prefill also what moves between the products. */
static void set_floor(bench_row *row, const bi_experts_args *a, int32_t n_touched) {
    const double one = 3.0 * a->d * a->d_ff, pairs = (double)a->n_row * a->topk;
    row->bytes = n_touched * one * (0.5 + 1.0 / 32);
    if (a->n_row > 256)
        row->bytes += pairs * 2 * (2.0 * a->d + 3.0 * a->d_ff);
    row->flops = 2 * pairs * one;
    row->unit = BENCH_MMA;
}

/* The twin is the first row alone. */
static br_status measure_experts(bench *b, const char *name, int32_t n_row, routing how, int32_t *count, char *request,
                                 bench_result *result) {
    const bench_shape *s = b->shape;
    const size_t row_bytes = sizeof(bi_bf16) * (size_t)s->expert_topk * (size_t)s->d_latent;
    bi_experts_args args = {
        .n_row = n_row, .d = s->d_latent, .d_ff = s->d_ff, .n_expert = s->n_expert, .topk = s->expert_topk,
        .act = {.situ = 1, .beta = 4, .linear_beta = 25}, .fault = bench_fault(b),
    }, twin;
    bench_row row = {
        .name = name, .op = run_experts, .args = &args, .args_bytes = sizeof args, .n_variant = 1, .twin = &twin, .n_row = n_row,
        .n_output = 1, .peer_name = "torch._grouped_mm bf16 both", .request = request,
    };
    BR_TRY(bench_mat_fp4(b, s->d_ff, s->d_latent, s->n_expert, &args.w1));
    BR_TRY(bench_mat_fp4(b, s->d_ff, s->d_latent, s->n_expert, &args.w3));
    BR_TRY(bench_mat_fp4(b, s->d_latent, s->d_ff, s->n_expert, &args.w2));
    BR_TRY(bench_bf16(b, (int64_t)n_row * s->d_latent, &args.x));
    BR_TRY(take_routing(b, n_row, how, &args, count));
    BR_TRY(bench_take(b, row_bytes * (size_t)n_row, "outputs", (void **)&args.y));
    twin = args;
    twin.n_row = 1;
    BR_TRY(bench_take(b, row_bytes, "outputs", (void **)&twin.y));
    row.output[0] = (bench_output){.all = args.y, .bytes = row_bytes * (size_t)n_row, .twin = twin.y, .twin_bytes = row_bytes, .hashed = 1};
    const int32_t n_touched = touched(count, s->n_expert);
    set_floor(&row, &args, n_touched);
    write_request(s, n_row, count, request, BENCH_PEER_LINE_BYTES);
    snprintf(row.shape, sizeof row.shape, "%d rows x %d of %d MXFP4 (%d touched); %d and %d; %s", n_row, s->expert_topk, s->n_expert, n_touched,
             s->d_latent, s->d_ff, how == UNIFORM ? "uniform" : "skewed");
    return bench_measure(b, &row, result);
}

static br_status experts_row(bench *b, const char *name, int32_t n_row, routing how, bench_result *result) {
    int32_t *count = NULL;
    char *request = NULL;
    br_status status;
    BR_TRY_GOTO(br_mem_alloc((void **)&count, sizeof *count * (size_t)b->shape->n_expert, "loads of experts"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&request, BENCH_PEER_LINE_BYTES, "a request"), exit);
    status = measure_experts(b, name, n_row, how, count, request, result);
exit:
    br_mem_free(count);
    br_mem_free(request);
    return status;
}

br_status bench_experts_uniform(bench *b, const char *name, int32_t n_row, bench_result *result) {
    return experts_row(b, name, n_row, UNIFORM, result);
}

br_status bench_experts(bench *b) {
    static const struct {
        const char *name;
        int32_t n_seq; /* 0: a large step */
        routing how;
    } ROW[] = {
        {"experts.decode.b1", 1, UNIFORM},           {"experts.decode.b64", 64, UNIFORM},
        {"experts.decode.b64.skewed", 64, SKEWED},   {"experts.prefill.8192", 0, UNIFORM},
        {"experts.prefill.8192.skewed", 0, SKEWED},
    };
    for (size_t i = 0; i < sizeof ROW / sizeof ROW[0]; i++) {
        const int32_t n_row = ROW[i].n_seq ? bench_batch_size(b, ROW[i].n_seq) : b->shape->prefill;
        if (bench_wants(b, ROW[i].name))
            BR_TRY(bench_settle(b, ROW[i].name, experts_row(b, ROW[i].name, n_row, ROW[i].how, NULL)));
    }
    return BR_OK;
}
