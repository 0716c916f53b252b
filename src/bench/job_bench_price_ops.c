/* What the ops of a step take alone; see job_bench_price.h.
 *
 * Weights go through as many sets as exceed the L2 together, as in a step, which reads each once. Rows of a step have just been
 * written by the op before: they are one set, in the L2 as far as they fit. All numbers are random and made on the device. */
#include "job_bench_price.h"

#include <string.h>

enum { MAP_SETS = 64 };

/* ---- random numbers ---------------------------------------------------------------------------------------------------- */

static bi_weightgen new_gen(bench *b, bi_weightgen_kind kind, float offset, float spread, int32_t fan) {
    return bi_weightgen_make(bi_weightgen_key(b->draw++, "bench"), kind, offset, spread, fan);
}

static br_status make(bench *b, int64_t n, bi_generate_as as, bi_weightgen gen, void *out_pointer) {
    const size_t bytes = (size_t)n * (as == BI_GENERATE_BF16 ? sizeof(bi_bf16) : sizeof(float));
    bi_vector_generate_args args = {.n = n, .as = as, .gen = gen};
    BR_TRY(bench_take(b, bytes, "random numbers", &args.dst));
    BR_TRY(b->backend.op->vector_generate(b->backend.ctx, &args));
    memcpy(out_pointer, &args.dst, sizeof args.dst);
    return BR_OK;
}

/* Rows of deviation 1. */
static br_status make_rows(bench *b, int64_t n, void *out_pointer) {
    return make(b, n, BI_GENERATE_BF16, new_gen(b, BI_WEIGHTGEN_NORMAL, 0, 1, 1), out_pointer);
}

static br_status make_f32(bench *b, int64_t n, float low, float high, const float **out) {
    return make(b, n, BI_GENERATE_F32, new_gen(b, BI_WEIGHTGEN_UNIFORM, low, high - low, 1), out);
}

/* n matrices of outputs about as large as their inputs. */
static br_status make_mat(bench *b, int32_t n_out, int32_t n_in, int32_t n, bi_mat *out) {
    void *data = NULL;
    const size_t stride = b->backend.op->mat_bytes(BI_FORM_BF16, n_out, n_in);
    BR_TRY(bench_take(b, stride * (size_t)n, "packed matrices", &data));
    *out = (bi_mat){.data = data, .n_out = n_out, .n_in = n_in, .form = BI_FORM_BF16, .stride = stride};
    for (int32_t i = 0; i < n; i++) {
        const bi_mat_generate_args args = {
            .to = bi_mat_at(out, i), .have_out = n_out, .have_in = n_in, .stride_out = n_in, .stride_in = 1,
            .gen = new_gen(b, BI_WEIGHTGEN_NORMAL, 0, 1, n_in),
        };
        BR_TRY(b->backend.op->mat_generate(b->backend.ctx, &args));
    }
    return BR_OK;
}

/* An output of the row at hand, of n rows of row_bytes each. */
static br_status take_output(bench *b, bench_row *row, int64_t n, size_t row_bytes, void *out_pointer) {
    void *y = NULL;
    BR_TRY(bench_take(b, (size_t)n * row_bytes, "outputs", &y));
    row->output[row->n_output++] = (bench_output){.all = y, .bytes = (size_t)n * row_bytes, .hashed = 1};
    memcpy(out_pointer, &y, sizeof y);
    return BR_OK;
}

/* ---- one kind each ------------------------------------------------------------------------------------------------------ */

/* The row that is laid out. */
typedef struct place {
    bench *b;
    const price_step *step;
    const br_config *c;
    const price_op *op;
    bench_row *row;
    char *request;
    bench_result *result;
    int32_t n_row, d; /* of the step; of the op */
    int64_t n;        /* numbers of its rows: n_row * d */
} place;

enum { REQUEST_BYTES = 96 };

/* n_variant structs of `bytes` at args, which stay until the row is measured. */
static br_status measure(place *p, bench_op op, const void *args, size_t bytes, int32_t n_variant) {
    p->row->op = op;
    p->row->args = args;
    p->row->args_bytes = bytes;
    p->row->n_variant = n_variant;
    return bench_measure(p->b, p->row, p->result);
}

#define PEER(p, name, ...) ((p)->row->peer_name = (name), (p)->row->request = (p)->request, snprintf((p)->request, REQUEST_BYTES, __VA_ARGS__))

#define RUN(op_name)                                                 \
    static br_status run_##op_name(bench *b, const void *args) {     \
        return b->backend.op->op_name(b->backend.ctx, args);         \
    }
RUN(embed)
RUN(rmsnorm)
RUN(layernorm)
RUN(linear)
RUN(kda_gate)
RUN(kda_norm)
RUN(latent_store)
RUN(attn)
RUN(attn_gate)
RUN(index_store)
RUN(index_select)
RUN(route)
RUN(combine)
RUN(glu)
RUN(attnres)
RUN(residual)
RUN(gather)
RUN(sample)

static br_status measure_embed(place *p) {
    bench *b = p->b;
    bi_embed_args a = {.n_row = p->n_row, .d_model = p->d, .n_vocab = p->c->n_vocab};
    BR_TRY(bench_below(b, p->n_row, a.n_vocab, &a.token));
    BR_TRY(make_rows(b, (int64_t)a.n_vocab * p->d, &a.table));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    PEER(p, "torch embedding", "embedding %d %d %d", p->n_row, a.n_vocab, p->d);
    return measure(p, run_embed, &a, sizeof a, 1);
}

static br_status measure_norm(place *p) {
    bench *b = p->b;
    const int is_rms = p->op->kind == PRICE_RMSNORM;
    const int32_t ld = p->op->ld;
    bi_norm_args a = {.n_row = p->n_row, .d = p->d, .x_ld = ld, .eps = p->c->norm_eps, .y_ld = ld, .fault = bench_fault(b)};
    BR_TRY(make_rows(b, (int64_t)p->n_row * ld, &a.x));
    BR_TRY(make_f32(b, p->d, 0.5f, 1.5f, &a.w));
    if (!is_rms)
        BR_TRY(make_f32(b, p->d, -0.1f, 0.1f, &a.b));
    BR_TRY(take_output(b, p->row, (int64_t)p->n_row * ld, sizeof *a.y, &a.y)); /* gaps between rows stay 0 */
    PEER(p, is_rms ? "torch rms_norm" : "torch layer_norm", "%s %d %d", is_rms ? "rms_norm" : "layer_norm", p->n_row, p->d);
    return measure(p, is_rms ? run_rmsnorm : run_layernorm, &a, sizeof a, 1);
}

typedef struct group {
    bi_linear_args map[BI_LINEAR_GROUP_MAX];
    int32_t n;
} group;

static br_status run_group(bench *b, const void *args) {
    const group *g = args;
    return b->backend.op->linear_group(b->backend.ctx, g->map, g->n);
}

/* Map i of the op in each set; maps of a group share their input, and the sets one output. */
static br_status lay_out_map(place *p, int32_t i, const bi_bf16 *x, int32_t n_set, group *set) {
    bench *b = p->b;
    const price_op *op = p->op;
    const int32_t n_out = op->n_out[i], n_head = op->n_head, f32 = (int32_t)(op->f32 >> i & 1);
    const size_t stack_bytes = b->backend.op->mat_bytes(BI_FORM_BF16, n_out, p->d) * (size_t)n_head;
    bi_mat w;
    void *y = NULL;
    BR_TRY(make_mat(b, n_out, p->d, n_head * n_set, &w));
    BR_TRY(take_output(b, p->row, (int64_t)p->n_row * n_head * n_out, f32 ? sizeof(float) : sizeof(bi_bf16), &y));
    for (int32_t k = 0; k < n_set; k++) {
        set[k].map[i] = (bi_linear_args){
            .n_row = p->n_row, .n_head = n_head, .x = x, .x_ld = (int64_t)n_head * p->d, .x_head_ld = p->d, .w = w, .y = y,
            .y_ld = (int64_t)n_head * n_out, .y_head_ld = n_out, .y_f32 = f32, .check_logits = op->logits, .fault = bench_fault(b),
        };
        set[k].map[i].w.data = (const unsigned char *)w.data + stack_bytes * (size_t)k;
        set[k].n = i + 1;
    }
    return BR_OK;
}

/* The library multiplies with all matrices of a group as one. */
static br_status measure_linear(place *p) {
    const price_op *op = p->op;
    group set[MAP_SETS];
    const bi_bf16 *x;
    int32_t n_out = 0;
    for (int32_t i = 0; i < op->n_map; i++)
        n_out += op->n_out[i];
    const int32_t n_set = bench_variants(p->b, (double)sizeof *x * op->n_head * p->d * n_out);
    BR_TRY(make_rows(p->b, p->n * op->n_head, &x));
    for (int32_t i = 0; i < op->n_map; i++)
        BR_TRY(lay_out_map(p, i, x, n_set, set));
    if (op->n_head > 1)
        PEER(p, "torch.bmm", "bmm %d %d %d %d", op->n_head, p->n_row, p->d, n_out);
    else
        PEER(p, "torch.mm", "mm %d %d %d", p->n_row, p->d, n_out);
    return measure(p, op->n_map > 1 ? run_group : run_linear, set, sizeof set[0], n_set);
}

static br_status make_batch(place *p, bi_batch *batch) {
    return bench_batch(p->b, p->step->n_seq, p->step->n_tok, 0, p->step->pos, batch);
}

/* Of each row position 0 and its own; the one of a row at 0. */
static br_status first_and_own(place *p, const int32_t **select, const int32_t **n_select) {
    const int32_t n = p->n_row;
    void *select_at = NULL, *n_select_at = NULL;
    int32_t *host;
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host * 3 * (size_t)n, "positions"));
    for (int32_t t = 0; t < n; t++) {
        const int32_t own = p->step->pos + t % p->step->n_tok;
        host[2 * t + 1] = own; /* the other is 0 */
        host[2 * n + t] = own > 0 ? 2 : 1;
    }
    br_status status = bench_upload(p->b, host, sizeof *host * 2 * (size_t)n, "positions", &select_at);
    if (status == BR_OK)
        status = bench_upload(p->b, host + 2 * n, sizeof *host * (size_t)n, "counts", &n_select_at);
    br_mem_free(host);
    *select = select_at;
    *n_select = n_select_at;
    return status;
}

typedef struct conv_group {
    bi_conv_args stream[BI_CONV_GROUP_MAX];
    int32_t n;
} conv_group;

static br_status run_conv_group(bench *b, const void *args) {
    const conv_group *g = args;
    return b->backend.op->conv_group(b->backend.ctx, g->stream, g->n);
}

/* The library takes the streams of a layer as one of more channels. */
static br_status measure_conv(place *p) {
    bench *b = p->b;
    bi_batch batch;
    conv_group g = {.n = p->op->n_map};
    const int64_t n_history = (int64_t)(BR_CONV_TAP - 1) * p->d;
    BR_TRY(make_batch(p, &batch));
    for (int32_t i = 0; i < g.n; i++) {
        bi_conv_args *a = &g.stream[i];
        *a = (bi_conv_args){.batch = &batch, .n_chan = p->d, .x_ld = p->d, .y_ld = p->d, .history.seq_bytes = sizeof *a->x * (size_t)n_history};
        BR_TRY(make_rows(b, p->n, &a->x));
        BR_TRY(make_f32(b, (int64_t)BR_CONV_TAP * p->d, -0.5f, 0.5f, &a->w));
        BR_TRY(make_rows(b, n_history * p->step->n_seq, &a->history.base));
        BR_TRY(take_output(b, p->row, p->n, sizeof *a->y, &a->y));
    }
    PEER(p, "torch conv1d silu", "conv %d %d %d", p->step->n_seq, g.n * p->d, p->step->n_tok);
    return measure(p, run_conv_group, &g, sizeof g, 1);
}

static br_status measure_kda_gate(place *p) {
    bench *b = p->b;
    const int64_t width = (int64_t)p->op->n_head * p->d;
    bi_kda_gate_args a = {.n_row = p->n_row, .n_head = p->op->n_head, .d = p->d, .bounded = p->c->kda_bounded, .lower_bound = p->c->kda_lower_bound};
    BR_TRY(make_rows(b, p->n_row * width, &a.f));
    BR_TRY(make_rows(b, (int64_t)p->n_row * a.n_head, &a.b));
    BR_TRY(make_f32(b, a.n_head, 0, 2, &a.a_log));
    BR_TRY(make_f32(b, width, -2, 0.25f, &a.dt_bias));
    BR_TRY(take_output(b, p->row, p->n_row * width, sizeof *a.a, &a.a));
    BR_TRY(take_output(b, p->row, (int64_t)p->n_row * a.n_head, sizeof *a.beta, &a.beta));
    return measure(p, run_kda_gate, &a, sizeof a, 1);
}

static br_status measure_kda(place *p) {
    const price_step *s = p->step;
    return s->pos > 0 ? bench_kda_decode(p->b, p->row->name, s->n_seq, p->result)
                      : bench_kda_prefill(p->b, p->row->name, s->n_seq, s->n_tok, p->result);
}

static br_status measure_kda_norm(place *p) {
    bench *b = p->b;
    const int64_t width = (int64_t)p->op->n_head * p->d;
    bi_kda_norm_args a = {.n_row = p->n_row, .n_head = p->op->n_head, .d = p->d, .eps = p->c->norm_eps, .fault = bench_fault(b)};
    BR_TRY(make_f32(b, p->n_row * width, -1, 1, &a.o));
    BR_TRY(make_f32(b, p->d, 0.5f, 1.5f, &a.w));
    BR_TRY(make_rows(b, p->n_row * width, &a.gate));
    BR_TRY(take_output(b, p->row, p->n_row * width, sizeof *a.y, &a.y));
    return measure(p, run_kda_norm, &a, sizeof a, 1);
}

/* A block's layout is the backend's own: the digest is that of what attention reads from the stored rows. A row looks at position 0, which
 * may be empty, and at its own, so that both parts of the stored row count: one in the score, one in the sum. */
static br_status measure_latent_store(place *p) {
    enum { LOOKS = 2 };
    bench *b = p->b;
    const br_config *c = p->c;
    const int64_t width = (int64_t)c->n_head * c->d_kv_latent;
    bi_batch batch;
    bi_latent_store_args a = {.batch = &batch, .d_latent = p->d, .x_ld = p->d};
    bi_attn_args look = {.batch = &batch, .n_head = c->n_head, .d_kv_latent = c->d_kv_latent, .d_rope = c->d_rope, .q_r_head_ld = c->d_rope,
                         .q_r_ld = (int64_t)c->n_head * c->d_rope, .select_ld = LOOKS, .alpha = bi_const_attn_alpha(c->d_nope, c->d_rope),
                         .fault = bench_fault(b)};
    BR_TRY(make_batch(p, &batch));
    BR_TRY(make_rows(b, p->n, &a.x));
    BR_TRY(bench_cache(b, b->backend.op->latent_block_bytes(p->d), p->step->n_seq, p->step->pos + p->step->n_tok, 0, &a.cache));
    BR_TRY(first_and_own(p, &look.select, &look.n_select));
    BR_TRY(make_rows(b, p->n_row * width, &look.q));
    BR_TRY(make_rows(b, p->n_row * look.q_r_ld, &look.q_r));
    BR_TRY(take_output(b, p->row, p->n_row * width, sizeof *look.z, &look.z));
    look.cache = a.cache;
    p->row->read = run_attn;
    p->row->read_args = &look;
    return measure(p, run_latent_store, &a, sizeof a, 1);
}

/* The digest is that of the scores that the stored keys get. */
static br_status measure_index_store(place *p) {
    bench *b = p->b;
    const br_config *c = p->c;
    const int64_t n_pos = p->step->pos + p->step->n_tok;
    bi_batch batch;
    bi_index_store_args a = {.batch = &batch, .d = p->d, .fault = bench_fault(b)};
    bi_index_select_args look = {.batch = &batch, .n_head = c->index_n_head, .d = p->d, .topk = 1, .c = bi_const_index_c(c->index_n_head, p->d),
                                 .score_ld = n_pos, .fault = bench_fault(b)};
    BR_TRY(make_batch(p, &batch));
    BR_TRY(make_rows(b, p->n, &a.k));
    BR_TRY(bench_cache(b, b->backend.op->index_block_bytes(p->d), p->step->n_seq, p->step->pos + p->step->n_tok, 0, &a.cache));
    BR_TRY(make_rows(b, (int64_t)p->n_row * look.n_head * p->d, &look.q));
    BR_TRY(make_f32(b, (int64_t)p->n_row * look.n_head, -1, 1, &look.w));
    BR_TRY(take_output(b, p->row, p->n_row * n_pos, sizeof *look.score, &look.score)); /* those of later positions stay 0 */
    BR_TRY(bench_take(b, sizeof *look.select * (size_t)p->n_row, "positions", (void **)&look.select));
    BR_TRY(bench_take(b, sizeof *look.n_select * (size_t)p->n_row, "counts", (void **)&look.n_select));
    look.cache = a.cache;
    p->row->read = run_index_select;
    p->row->read_args = &look;
    return measure(p, run_index_store, &a, sizeof a, 1);
}

static br_status measure_select(place *p) {
    const price_step *s = p->step;
    return bench_index_select(p->b, p->row->name, s->n_seq, s->n_tok, s->pos, p->result);
}

static br_status measure_attn(place *p) {
    const price_step *s = p->step;
    return bench_attn_sparse(p->b, p->row->name, s->n_seq, s->n_tok, s->pos, p->result);
}

static br_status measure_attn_gate(place *p) {
    bench *b = p->b;
    bi_attn_gate_args a = {.n_row = p->n_row, .d = p->d};
    BR_TRY(make_f32(b, p->n, -1, 1, &a.o));
    if (p->c->mla_gate)
        BR_TRY(make_rows(b, p->n, &a.gate));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    return measure(p, run_attn_gate, &a, sizeof a, 1);
}

static br_status measure_route(place *p) {
    bench *b = p->b;
    const br_config *c = p->c;
    bi_route_args set[MAP_SETS], a = {.n_row = p->n_row, .d = p->d, .n_expert = c->n_expert, .topk = c->n_expert_topk,
                                      .renormalize = c->renormalize, .scale = c->route_scale, .fault = bench_fault(b)};
    const int32_t n_set = bench_variants(b, 2.0 * c->n_expert * p->d);
    bi_mat w;
    BR_TRY(make_rows(b, p->n, &a.x));
    BR_TRY(make_mat(b, c->n_expert, p->d, n_set, &w));
    BR_TRY(make_f32(b, c->n_expert, -0.01f, 0.01f, &a.bias));
    BR_TRY(take_output(b, p->row, (int64_t)p->n_row * a.topk, sizeof *a.expert, &a.expert));
    BR_TRY(take_output(b, p->row, (int64_t)p->n_row * a.topk, sizeof *a.p, &a.p));
    for (int32_t i = 0; i < n_set; i++) {
        set[i] = a;
        set[i].w = bi_mat_at(&w, i);
    }
    PEER(p, "torch.mm sigmoid topk gather", "route %d %d %d %d", p->n_row, p->d, c->n_expert, c->n_expert_topk);
    return measure(p, run_route, set, sizeof set[0], n_set);
}

static br_status measure_experts(place *p) {
    return bench_experts_uniform(p->b, p->row->name, p->n_row, p->result);
}

static br_status measure_combine(place *p) {
    bench *b = p->b;
    bi_combine_args a = {.n_row = p->n_row, .d = p->d, .topk = p->c->n_expert_topk};
    BR_TRY(make_rows(b, p->n * a.topk, &a.e));
    BR_TRY(make_f32(b, (int64_t)p->n_row * a.topk, 0, 0.125f, &a.p));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    PEER(p, "torch.bmm", "combine %d %d %d", p->n_row, a.topk, p->d);
    return measure(p, run_combine, &a, sizeof a, 1);
}

static br_status measure_glu(place *p) {
    bench *b = p->b;
    const br_config *c = p->c;
    const bi_act act = {.situ = c->act_situ, .beta = c->situ_beta, .linear_beta = c->situ_linear_beta};
    bi_glu_args a = {.n_row = p->n_row, .d = p->d, .ld = p->d, .act = act};
    BR_TRY(make_f32(b, p->n, -2, 2, &a.g));
    BR_TRY(make_f32(b, p->n, -2, 2, &a.u));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    return measure(p, run_glu, &a, sizeof a, 1);
}

static br_status measure_attnres(place *p) {
    bench *b = p->b;
    const bi_bf16 *bank[BR_BANK_MAX];
    bi_attnres_args a = {.n_row = p->n_row, .d = p->d, .n_bank = p->op->n_bank, .bank = bank, .eps = p->c->norm_eps, .fault = bench_fault(b)};
    for (int32_t i = 0; i < a.n_bank; i++)
        BR_TRY(make_rows(b, p->n, &bank[i]));
    BR_TRY(make_rows(b, p->n, &a.p));
    BR_TRY(make_f32(b, p->d, -0.01f, 0.01f, &a.w));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    return measure(p, run_attnres, &a, sizeof a, 1);
}

static br_status measure_residual(place *p) {
    bench *b = p->b;
    bi_residual_args a = {.n_row = p->n_row, .d = p->d, .fault = bench_fault(b)};
    BR_TRY(make_rows(b, p->n, &a.a));
    BR_TRY(make_rows(b, p->n, &a.b));
    BR_TRY(take_output(b, p->row, p->n, sizeof *a.y, &a.y));
    PEER(p, "torch add", "add %d %d", p->n_row, p->d);
    return measure(p, run_residual, &a, sizeof a, 1);
}

static br_status measure_gather(place *p) {
    bench *b = p->b;
    const int32_t n_half = p->d / (int32_t)sizeof(bi_bf16);
    bi_gather_args a = {.n = p->n_row, .row_bytes = (size_t)p->d};
    BR_TRY(make_rows(b, (int64_t)p->n_row * n_half, &a.x));
    BR_TRY(bench_below(b, p->n_row, p->n_row, &a.row));
    BR_TRY(take_output(b, p->row, p->n_row, a.row_bytes, &a.y));
    if (n_half >= 64)
        PEER(p, "torch embedding", "embedding %d %d %d", p->n_row, p->n_row, n_half);
    return measure(p, run_gather, &a, sizeof a, 1);
}

/* At temperature 1, without filters, as slice.decode draws. */
static br_status measure_sample(place *p) {
    bench *b = p->b;
    bi_sample_args a = {.n_row = p->n_row, .n_vocab = p->d, .logit_ld = p->d, .top_ld = BR_TOP_LOGPROBS_MAX};
    void *setting_at = NULL;
    bi_sampling *setting;
    BR_TRY(br_mem_alloc((void **)&setting, sizeof *setting * (size_t)p->n_row, "settings"));
    for (int32_t i = 0; i < p->n_row; i++)
        setting[i] = (bi_sampling){.temperature = 1, .top_p_q32 = bi_sample_top_p(1), .seed = 7, .position = p->step->pos};
    br_status status = bench_upload(b, setting, sizeof *setting * (size_t)p->n_row, "settings", &setting_at);
    br_mem_free(setting);
    BR_TRY(status);
    a.setting = setting_at;
    BR_TRY(make(b, p->n, BI_GENERATE_F32, new_gen(b, BI_WEIGHTGEN_NORMAL, 0, 2.2f, 1), &a.logit));
    BR_TRY(take_output(b, p->row, p->n_row, sizeof *a.token, &a.token));
    BR_TRY(take_output(b, p->row, p->n_row, sizeof *a.logprob, &a.logprob));
    BR_TRY(bench_take(b, sizeof(float) * (size_t)p->n_row, "log-probs", (void **)&a.logprob_raw));
    BR_TRY(bench_take(b, sizeof(float) * (size_t)p->n_row, "log-probs", (void **)&a.logprob_kept));
    BR_TRY(bench_take(b, sizeof(float) * (size_t)p->n_row, "entropies", (void **)&a.entropy));
    BR_TRY(bench_take(b, sizeof *a.top * BR_TOP_LOGPROBS_MAX * (size_t)p->n_row, "best tokens", (void **)&a.top));
    PEER(p, "torch log_softmax argmax gather", "sample %d %d", p->n_row, p->d);
    return measure(p, run_sample, &a, sizeof a, 1);
}

static br_status measure_score(place *p) {
    return bench_head_score(p->b, p->row->name, p->n_row, p->result);
}

static br_status (*const MEASURE[PRICE_KIND_COUNT])(place *) = {
    [PRICE_EMBED] = measure_embed, [PRICE_RMSNORM] = measure_norm, [PRICE_LAYERNORM] = measure_norm, [PRICE_LINEAR] = measure_linear,
    [PRICE_CONV] = measure_conv, [PRICE_KDA_GATE] = measure_kda_gate, [PRICE_KDA] = measure_kda, [PRICE_KDA_NORM] = measure_kda_norm,
    [PRICE_LATENT_STORE] = measure_latent_store, [PRICE_ATTN] = measure_attn, [PRICE_ATTN_GATE] = measure_attn_gate,
    [PRICE_INDEX_STORE] = measure_index_store, [PRICE_INDEX_SELECT] = measure_select, [PRICE_ROUTE] = measure_route,
    [PRICE_EXPERTS] = measure_experts, [PRICE_COMBINE] = measure_combine, [PRICE_GLU] = measure_glu, [PRICE_ATTNRES] = measure_attnres,
    [PRICE_RESIDUAL] = measure_residual, [PRICE_GATHER] = measure_gather, [PRICE_SAMPLE] = measure_sample, [PRICE_SCORE] = measure_score,
};

br_status price_measure(bench *b, const price_step *step, const price_op *op, const char *name, bench_result *result) {
    char request[REQUEST_BYTES];
    const int32_t n_row = step->n_seq * step->n_tok;
    bench_row row = {.name = name, .n_row = n_row};
    place p = {.b = b, .step = step, .c = step->c, .op = op, .row = &row, .request = request, .result = result, .n_row = n_row, .d = op->d,
               .n = (int64_t)n_row * op->d};
    snprintf(row.shape, sizeof row.shape, "%d rows", n_row);
    bench_forget(b);
    return MEASURE[op->kind](&p);
}
