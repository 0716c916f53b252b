/* Rows of the verb `bench`: the price of invariance of whole steps; see job_bench_price.h.
 *
 * The step is that of slice.decode or slice.score without an adapter, its time measured there in the same run. Each of its ops is
 * timed alone, and beside it the library's where one does the same work: torch.mm on the maps of a group as one matrix,
 * split-K allowed, and its kin; a chain of calls where one call does not do. The experts' peer multiplies with weights in bf16, four
 * times as many bytes as MXFP4: the price is told with and without it. */
#include "job_bench_price.h"

#include "br_model.h"
#include "config_json.h"
#include "init_presets.h"

#include <string.h>

static const struct {
    const char *name;
    bench_step step;
    int32_t n_seq; /* 0: one sequence is scored */
} ROW[] = {
    {"price.decode.b1", BENCH_DECODE_1, 1},
    {"price.decode.b64", BENCH_DECODE_64, 64},
    {"price.score.8192", BENCH_SCORE, 0},
};

enum { N_ROW = sizeof ROW / sizeof ROW[0] };

int bench_price_needs(const bench *b, bench_step step) {
    for (int i = 0; i < N_ROW; i++)
        if (ROW[i].step == step && bench_is_chosen(b, ROW[i].name))
            return 1;
    return 0;
}

/* The bench with the sizes of a model. */
typedef struct model_bench {
    bench b;
    bench_shape shape;
    br_config config;
} model_bench;

static bench_shape shape_of(const bench_shape *s, const br_config *c) {
    return (bench_shape){
        .name = s->name, .d_model = c->d_model, .n_vocab = c->n_vocab, .prefill = s->prefill, .n_head = c->n_head,
        .d_kv_latent = c->d_kv_latent, .d_nope = c->d_nope, .d_rope = c->d_rope, .kda_n_head = c->kda_n_head, .kda_d = c->kda_d_head,
        .index_n_head = c->index_n_head, .index_d = c->index_d_head, .topk = c->index_topk, .n_pos = s->slice_context,
        .attn_n_pos = s->slice_context, .d_latent = c->d_latent, .d_ff = c->d_expert_ff, .n_expert = c->n_expert,
        .expert_topk = c->n_expert_topk, .dense_divisor = s->dense_divisor, .batch_divisor = s->batch_divisor,
        .slice_preset = s->slice_preset, .slice_context = s->slice_context, .copy_bytes = s->copy_bytes, .spread_bytes = s->spread_bytes,
    };
}

static br_status open_model_bench(bench *b, model_bench *m) {
    const init_preset *preset = init_preset_find(b->shape->slice_preset);
    BR_TRY(br_config_parse(preset->name, preset->config_json, strlen(preset->config_json), &m->config));
    m->shape = shape_of(b->shape, &m->config);
    m->b = *b;
    m->b.shape = &m->shape;
    m->b.n_block = 0;
    m->b.backend = (bi_backend){NULL, NULL};
    bench_forget(b);
    const bi_limits limits = br_model_limits(&m->config, 0, 0, b->shape->prefill, b->shape->slice_context);
    return br_device_is_host(b->device) ? bi_backend_oracle_open(&limits, b->pool, NULL, &m->b.backend)
                                        : bi_backend_cuda_open(&limits, b->device, &m->b.backend);
}

static void close_model_bench(bench *b, model_bench *m) {
    bench_forget(&m->b);
    bi_backend_close(&m->b.backend);
    b->peer = m->b.peer; /* it may have ended */
}

/* name.kind, what tells it from others of its kind, and how often a step runs it. */
static void name_op(const char *name, const price_op *op, char *out, size_t bytes) {
    int used = snprintf(out, bytes, "%s.%s", name, op->logits ? "logits" : price_kind_name(op->kind));
    if (op->n_head > 1)
        used += snprintf(out + used, bytes - (size_t)used, ".%dx%d", op->n_head, op->d);
    else
        used += snprintf(out + used, bytes - (size_t)used, ".%d", op->d);
    for (int32_t i = 0; i < op->n_map && op->n_out[i]; i++)
        used += snprintf(out + used, bytes - (size_t)used, "%c%d", i ? '+' : '-', op->n_out[i]);
    snprintf(out + used, bytes - (size_t)used, ".x%d", op->count);
}

typedef struct sums {
    double ours, best, best_fp4; /* best_fp4: of the experts ours */
    int32_t n_call;
} sums;

static br_status measure_ops(bench *b, const char *name, const price_step *step, const price_list *list, sums *sum) {
    char op_name[160];
    for (int32_t i = 0; i < list->n; i++) {
        const price_op *op = &list->op[i];
        bench_result r = {0};
        name_op(name, op, op_name, sizeof op_name);
        br_status status = price_measure(b, step, op, op_name, &r);
        if (status != BR_OK)
            return br_fail_context(status, "%s", op_name);
        const double best = r.peer_us > 0 && r.peer_us < r.us ? r.peer_us : r.us;
        sum->n_call += op->count;
        sum->ours += op->count * r.us;
        sum->best += op->count * best;
        sum->best_fp4 += op->count * (op->kind == PRICE_EXPERTS ? r.us : best);
    }
    return BR_OK;
}

static br_status measure_price(bench *b, const char *name, const br_config *c, int32_t n_seq, const bench_result *whole) {
    const bench_shape *s = b->shape;
    const price_step step = n_seq ? (price_step){.c = c, .n_seq = bench_batch_size(b, n_seq), .n_tok = 1, .pos = s->slice_context - 1}
                                  : (price_step){.c = c, .n_seq = 1, .n_tok = bench_least(s->prefill, s->slice_context), .score = 1};
    price_list list;
    sums sum = {0};
    bench_result result = {.us = whole->us, .us_min = whole->us_min, .us_max = whole->us_max};
    bench_row row = {.name = name, .peer_name = "the faster of ours and torch op by op"};
    if (whole->us <= 0)
        return br_fail(BR_E_NOT_FOUND, "the whole step was not measured");
    BR_TRY(price_list_make(c, step.score, &list));
    BR_TRY(measure_ops(b, name, &step, &list, &sum));
    result.peer_us = sum.best;
    snprintf(row.shape, sizeof row.shape, "price %.3f; experts MXFP4 only %.3f; over ours alone %.3f; %d calls", whole->us / sum.best,
             whole->us / sum.best_fp4, whole->us / sum.ours, sum.n_call);
    return bench_record(b, &row, &result, -1, sum.best / whole->us);
}

br_status bench_price(bench *b) {
    model_bench m;
    int wanted[N_ROW], n_wanted = 0;
    br_status status;
    memset(&m, 0, sizeof m);
    for (int i = 0; i < N_ROW; i++)
        n_wanted += wanted[i] = bench_wants(b, ROW[i].name);
    if (n_wanted == 0)
        return BR_OK;
    status = bench_settle(b, "price", open_model_bench(b, &m));
    for (int i = 0; i < N_ROW && status == BR_OK && m.b.backend.ctx; i++)
        if (wanted[i])
            status = bench_settle(&m.b, ROW[i].name, measure_price(&m.b, ROW[i].name, &m.config, ROW[i].n_seq, &b->step[ROW[i].step]));
    if (m.b.backend.ctx && !b->failure[0])
        memcpy(b->failure, m.b.failure, sizeof b->failure);
    if (m.b.device)
        close_model_bench(b, &m);
    return status;
}
