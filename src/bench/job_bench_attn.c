/* Rows of the verb `bench`: the indexer and sparse attention; see job_bench.h. */
#include "job_bench.h"

/* ---- the indexer ------------------------------------------------------------------------------------------------------- */

static br_status run_select(bench *b, const void *args) {
    return b->backend.op->index_select(b->backend.ctx, args);
}

/* Keys at every position of n_seq sequences. */
static br_status fill_keys(bench *b, const bi_cache *cache, int32_t n_seq, int32_t n_pos, int32_t d) {
    bench_sweep sweep;
    const bi_bf16 *k;
    BR_TRY(bench_sweep_open(b, n_seq, n_pos, &sweep));
    BR_TRY(bench_bf16(b, (int64_t)(sweep.n_row + sweep.n_batch) * d, &k));
    for (int32_t i = 0; i < sweep.n_batch; i++) {
        const bi_batch batch = bench_sweep_at(&sweep, i);
        /* a row further each time, or all sequences would hold equal keys */
        const bi_index_store_args args = {.batch = &batch, .d = d, .k = k + (int64_t)i * d, .cache = *cache, .fault = bench_fault(b)};
        BR_TRY(b->backend.op->index_store(b->backend.ctx, &args));
    }
    return br_device_wait(b->device);
}

static br_status take_choice(bench *b, int32_t n_row, int32_t topk, bi_index_select_args *a) {
    BR_TRY(bench_take(b, sizeof(int32_t) * (size_t)n_row * (size_t)topk, "positions", (void **)&a->select));
    return bench_take(b, sizeof(int32_t) * (size_t)n_row, "counts", (void **)&a->n_select);
}

static bench_output ints_of(const void *all, size_t n, const void *twin, size_t n_twin) {
    return (bench_output){.all = all, .bytes = sizeof(int32_t) * n, .twin = twin, .twin_bytes = sizeof(int32_t) * n_twin, .hashed = 1};
}

/* How an index row is laid out: n_seq sequences of n_step new tokens each from position pos on. shared: all sequences have the pages
 * of the first, so that keys come from the L2 and little but the selection is left. alone: scores are made before, and only the
 * selection is timed. */
typedef struct select_shape {
    int32_t n_seq, n_step, pos, n_head, d, shared, alone;
} select_shape;

/* Calls that only select, each from scores of its own; what the op that makes them chooses lands elsewhere. */
static br_status lay_out_scored(bench *b, const bi_index_select_args *whole, int32_t n_row, int32_t n_set, bi_index_select_args *args) {
    const int64_t n_pos = (int64_t)whole->batch->pos_max + 1;
    bi_index_select_args scored = *whole;
    void *score = NULL;
    BR_TRY(bench_take(b, sizeof(float) * (size_t)n_set * (size_t)n_row * (size_t)n_pos, "scores", &score));
    BR_TRY(take_choice(b, n_row, whole->topk, &scored));
    scored.score_ld = n_pos;
    for (int32_t i = 0; i < n_set; i++) {
        scored.score = (float *)score + i * n_row * n_pos;
        BR_TRY(b->backend.op->index_select(b->backend.ctx, &scored));
        args[i] = scored;
        args[i].scored = 1;
        args[i].select = whole->select;
        args[i].n_select = whole->n_select;
    }
    return br_device_wait(b->device);
}

/* The best topk of the positions that each row sees. The twin is the first row alone, by the whole op. */
static br_status measure_select(bench *b, bench_row *row, const select_shape *s, bench_result *result) {
    const int32_t n_row = s->n_seq * s->n_step, n_pos = s->pos + s->n_step, topk = b->shape->topk;
    const int32_t n_set = s->alone ? bench_least(bench_variants(b, 4.0 * n_row * n_pos), 16) : 1;
    bi_index_select_args set[BENCH_VARIANT_MAX], twin;
    bi_index_select_args args = {.n_head = s->n_head, .d = s->d, .topk = topk, .c = bi_const_index_c(s->n_head, s->d), .fault = bench_fault(b)};
    bi_batch batch, twin_batch;
    BR_TRY(bench_batch(b, s->n_seq, s->n_step, 0, s->pos, &batch));
    BR_TRY(bench_batch(b, 1, 1, 0, s->pos, &twin_batch));
    BR_TRY(bench_cache(b, b->backend.op->index_block_bytes(s->d), s->n_seq, n_pos, s->shared, &args.cache));
    BR_TRY(fill_keys(b, &args.cache, s->shared ? 1 : s->n_seq, n_pos, s->d));
    BR_TRY(bench_bf16(b, (int64_t)n_row * s->n_head * s->d, &args.q));
    BR_TRY(bench_uniform(b, (int64_t)n_row * s->n_head, -1, 1, &args.w));
    BR_TRY(take_choice(b, n_row, topk, &args));
    args.batch = &batch;
    twin = args;
    twin.batch = &twin_batch;
    BR_TRY(take_choice(b, 1, topk, &twin));
    set[0] = args;
    if (s->alone)
        BR_TRY(lay_out_scored(b, &args, n_row, n_set, set));
    row->op = run_select;
    row->args = set;
    row->args_bytes = sizeof set[0];
    row->n_variant = n_set;
    row->twin = &twin;
    row->n_row = n_row;
    row->n_output = 2;
    const int32_t n_first = bench_least(topk, s->pos + 1);
    row->output[0] = ints_of(args.select, (size_t)n_row * (size_t)topk, twin.select, (size_t)n_first);
    row->output[0].hashed = n_first == topk; /* what lies behind a row's choice is not written */
    row->output[1] = ints_of(args.n_select, (size_t)n_row, twin.n_select, 1);
    return bench_measure(b, row, result);
}

/* Codes and scale of a key, and its score once. */
br_status bench_index_select(bench *b, const char *name, int32_t n_seq, int32_t n_step, int32_t pos, bench_result *result) {
    const bench_shape *s = b->shape;
    const select_shape shape = {.n_seq = n_seq, .n_step = n_step, .pos = pos, .n_head = s->index_n_head, .d = s->index_d};
    const double pairs = (double)n_seq * n_step * (pos + 0.5 * (n_step + 1)), keys = (double)n_seq * (pos + n_step);
    bench_row row = {
        .name = name, .bytes = keys * (s->index_d + 4) + 4 * pairs, .flops = 2 * pairs * s->index_n_head * s->index_d, .unit = BENCH_MMA_F8,
    };
    if (n_step == 1)
        snprintf(row.shape, sizeof row.shape, "%d x %d positions; %d heads of %d; top %d", n_seq, pos + 1, s->index_n_head, s->index_d, s->topk);
    else
        snprintf(row.shape, sizeof row.shape, "%d x %d queries at position %d; %d heads of %d; top %d", n_seq, n_step, pos, s->index_n_head,
                 s->index_d, s->topk);
    return measure_select(b, &row, &shape, result);
}

/* The selection alone, from scores that lie in memory, as its peer takes them. */
static br_status measure_topk_alone(bench *b, const char *name) {
    const bench_shape *s = b->shape;
    const select_shape shape = {
        .n_seq = bench_batch_size(b, 64), .n_step = 1, .pos = s->n_pos - 1, .n_head = s->index_n_head, .d = s->index_d, .alone = 1,
    };
    char request[64];
    bench_row row = {
        .name = name, .bytes = shape.n_seq * 4 * ((double)s->n_pos + s->topk), .peer_name = "torch.topk", .request = request,
    };
    snprintf(row.shape, sizeof row.shape, "top %d of %d x %d given scores", s->topk, shape.n_seq, s->n_pos);
    snprintf(request, sizeof request, "topk %d %d %d", shape.n_seq, s->n_pos, s->topk);
    return measure_select(b, &row, &shape, NULL);
}

/* The whole op, with the smallest scores that the indexer makes, beside a peer that selects only. */
static br_status measure_topk(bench *b, const char *name) {
    const bench_shape *s = b->shape;
    const select_shape shape = {.n_seq = bench_batch_size(b, 64), .n_step = 1, .pos = s->n_pos - 1, .n_head = 4, .d = 32, .shared = 1};
    char request[64];
    bench_row row = {
        .name = name, .bytes = shape.n_seq * 4 * ((double)s->n_pos + s->topk), .peer_name = "torch.topk without scores", .request = request,
    };
    snprintf(row.shape, sizeof row.shape, "scores by %d heads of %d from keys in L2; then top %d of %d x %d: the whole op", shape.n_head, shape.d,
             s->topk, shape.n_seq, s->n_pos);
    snprintf(request, sizeof request, "topk %d %d %d", shape.n_seq, s->n_pos, s->topk);
    return measure_select(b, &row, &shape, NULL);
}

br_status bench_index(bench *b) {
    const char *const decode = "index.decode.64x128k", *const topk = "topk.64x128k", *const alone = "topk.alone.64x128k";
    if (bench_wants(b, decode))
        BR_TRY(bench_settle(b, decode, bench_index_select(b, decode, bench_batch_size(b, 64), 1, b->shape->n_pos - 1, NULL)));
    if (bench_wants(b, topk))
        BR_TRY(bench_settle(b, topk, measure_topk(b, topk)));
    if (bench_wants(b, alone))
        BR_TRY(bench_settle(b, alone, measure_topk_alone(b, alone)));
    return BR_OK;
}

/* ---- sparse attention -------------------------------------------------------------------------------------------------- */

static br_status run_attn(bench *b, const void *args) {
    return b->backend.op->attn(b->backend.ctx, args);
}

static br_status fill_latents(bench *b, const bi_cache *cache, int32_t n_seq, int32_t n_pos) {
    const int32_t d = b->shape->d_kv_latent + b->shape->d_rope;
    bench_sweep sweep;
    const bi_bf16 *x;
    BR_TRY(bench_sweep_open(b, n_seq, n_pos, &sweep));
    BR_TRY(bench_bf16(b, (int64_t)(sweep.n_row + sweep.n_batch) * d, &x));
    for (int32_t i = 0; i < sweep.n_batch; i++) {
        const bi_batch batch = bench_sweep_at(&sweep, i);
        const bi_latent_store_args args = {.batch = &batch, .d_latent = d, .x = x + (int64_t)i * d, .x_ld = d, .cache = *cache};
        BR_TRY(b->backend.op->latent_store(b->backend.ctx, &args));
    }
    return br_device_wait(b->device);
}

/* topk of the positions that a row sees, or all of fewer, rising: one drawn from each of as many equal parts. Row i sees those up to
 * pos + i % n_step. */
static br_status draw_choice(bench *b, int32_t n_row, int32_t n_step, int32_t pos, const int32_t **select, const int32_t **n_select) {
    const int32_t topk = b->shape->topk;
    const size_t bytes = sizeof(int32_t) * (size_t)n_row * (size_t)topk;
    void *select_at = NULL, *n_select_at = NULL;
    int32_t *choice;
    uint64_t state = 88172645463325252u;
    BR_TRY(br_mem_alloc((void **)&choice, bytes, "positions"));
    for (int32_t t = 0; t < n_row; t++) {
        const int64_t visible = pos + t % n_step + 1;
        const int64_t n = visible < topk ? visible : topk;
        for (int64_t i = 0; i < n; i++) {
            const int64_t begin = visible * i / n, end = visible * (i + 1) / n;
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            choice[t * (int64_t)topk + i] = (int32_t)(begin + (int64_t)(state % (uint64_t)(end - begin)));
        }
    }
    br_status status = bench_upload(b, choice, bytes, "positions", &select_at);
    for (int32_t t = 0; t < n_row; t++)
        choice[t] = bench_least(topk, pos + t % n_step + 1);
    if (status == BR_OK)
        status = bench_upload(b, choice, sizeof *choice * (size_t)n_row, "counts", &n_select_at);
    br_mem_free(choice);
    *select = select_at;
    *n_select = n_select_at;
    return status;
}

/* n_seq sequences of n_step new tokens each behind pos others, every query with topk positions of its own. The twin is the
 * first row alone. */
br_status bench_attn_sparse(bench *b, const char *name, int32_t n_seq, int32_t n_step, int32_t pos, bench_result *result) {
    const bench_shape *s = b->shape;
    const int32_t n_row = n_seq * n_step, d_all = s->d_kv_latent + s->d_rope;
    const size_t z_bytes = sizeof(bi_bf16) * (size_t)s->n_head * (size_t)s->d_kv_latent;
    const double latent_bytes = (double)n_row * s->topk * d_all * sizeof(bi_bf16) / (n_step > 1 ? 8 : 1); /* rows of a sequence share */
    bi_attn_args args[BENCH_VARIANT_MAX], twin, first = {
        .n_head = s->n_head, .d_kv_latent = s->d_kv_latent, .d_rope = s->d_rope, .q_r_ld = (int64_t)s->n_head * s->d_rope,
        .q_r_head_ld = s->d_rope, .select_ld = s->topk, .alpha = bi_const_attn_alpha(s->d_nope, s->d_rope), .fault = bench_fault(b),
    };
    bi_batch batch, twin_batch;
    bench_row row = {
        .name = name, .op = run_attn, .args = args, .args_bytes = sizeof args[0], .twin = &twin, .n_row = n_row, .n_output = 1,
        .bytes = latent_bytes + (double)n_row * s->n_head * (d_all + s->d_kv_latent) * sizeof(bi_bf16),
        .flops = 2.0 * n_row * s->n_head * s->topk * (d_all + s->d_kv_latent), .unit = BENCH_MMA,
    };
    row.n_variant = n_step > 1 ? 1 : bench_least(bench_variants(b, latent_bytes), 16);
    BR_TRY(bench_batch(b, n_seq, n_step, 0, pos, &batch));
    BR_TRY(bench_batch(b, 1, 1, 0, pos, &twin_batch));
    BR_TRY(bench_cache(b, b->backend.op->latent_block_bytes(d_all), n_seq, pos + n_step, 0, &first.cache));
    BR_TRY(fill_latents(b, &first.cache, n_seq, pos + n_step));
    BR_TRY(bench_bf16(b, (int64_t)n_row * s->n_head * s->d_kv_latent, &first.q));
    BR_TRY(bench_bf16(b, (int64_t)n_row * s->n_head * s->d_rope, &first.q_r));
    BR_TRY(draw_choice(b, n_row * row.n_variant, n_step, pos, &first.select, &first.n_select));
    BR_TRY(bench_take(b, z_bytes * (size_t)n_row, "outputs", (void **)&first.z));
    first.batch = &batch;
    for (int32_t i = 0; i < row.n_variant; i++) {
        args[i] = first;
        args[i].select += (int64_t)i * n_row * s->topk;
    }
    twin = first;
    twin.batch = &twin_batch;
    BR_TRY(bench_take(b, z_bytes, "outputs", (void **)&twin.z));
    row.output[0] = (bench_output){.all = first.z, .bytes = z_bytes * (size_t)n_row, .twin = twin.z, .twin_bytes = z_bytes, .hashed = 1};
    snprintf(row.shape, sizeof row.shape, "%d x %d queries at position %d; %d heads; %d keys", n_seq, n_step, pos, s->n_head, s->topk);
    return bench_measure(b, &row, result);
}

br_status bench_attn(bench *b) {
    const char *const decode = "attn.decode.b64", *const prefill = "attn.prefill.8192";
    const int32_t n = b->shape->prefill;
    if (bench_wants(b, decode))
        BR_TRY(bench_settle(b, decode, bench_attn_sparse(b, decode, bench_batch_size(b, 64), 1, b->shape->attn_n_pos - 1, NULL)));
    if (bench_wants(b, prefill))
        BR_TRY(bench_settle(b, prefill, bench_attn_sparse(b, prefill, 1, n, n, NULL)));
    return BR_OK;
}
