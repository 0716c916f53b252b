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

/* The best topk of all positions for the last token of each sequence. shared: all sequences have the pages of the first, so
 * that keys come from the L2 and little but the selection is left. The twin is the first sequence alone. */
static br_status measure_select(bench *b, bench_row *row, int32_t n_head, int32_t d, int shared) {
    const int32_t n_seq = bench_batch_size(b, 64), n_pos = b->shape->n_pos, topk = b->shape->topk;
    bi_index_select_args args = {.n_head = n_head, .d = d, .topk = topk, .c = bi_const_index_c(n_head, d), .fault = bench_fault(b)}, twin;
    bi_batch batch, twin_batch;
    BR_TRY(bench_batch(b, n_seq, 1, 0, n_pos - 1, &batch));
    BR_TRY(bench_batch(b, 1, 1, 0, n_pos - 1, &twin_batch));
    BR_TRY(bench_cache(b, b->backend.op->index_block_bytes(d), n_seq, n_pos, shared, &args.cache));
    BR_TRY(fill_keys(b, &args.cache, shared ? 1 : n_seq, n_pos, d));
    BR_TRY(bench_bf16(b, (int64_t)n_seq * n_head * d, &args.q));
    BR_TRY(bench_uniform(b, (int64_t)n_seq * n_head, -1, 1, &args.w));
    BR_TRY(take_choice(b, n_seq, topk, &args));
    args.batch = &batch;
    twin = args;
    twin.batch = &twin_batch;
    BR_TRY(take_choice(b, 1, topk, &twin));
    row->op = run_select;
    row->args = &args;
    row->args_bytes = sizeof args;
    row->n_variant = 1;
    row->twin = &twin;
    row->n_row = n_seq;
    row->n_output = 2;
    row->output[0] = ints_of(args.select, (size_t)n_seq * (size_t)topk, twin.select, (size_t)topk);
    row->output[1] = ints_of(args.n_select, (size_t)n_seq, twin.n_select, 1);
    return bench_measure(b, row, NULL);
}

/* Codes and scale of a key, and its score once. */
static br_status measure_index(bench *b, const char *name) {
    const bench_shape *s = b->shape;
    const double n = (double)bench_batch_size(b, 64) * s->n_pos;
    bench_row row = {
        .name = name, .bytes = n * (s->index_d + 4 + 4), .flops = 2 * n * s->index_n_head * s->index_d, .unit = BENCH_MMA_F8,
    };
    snprintf(row.shape, sizeof row.shape, "%d x %d positions; %d heads of %d; top %d", bench_batch_size(b, 64), s->n_pos, s->index_n_head,
             s->index_d, s->topk);
    return measure_select(b, &row, s->index_n_head, s->index_d, 0);
}

/* No op selects alone, so that this is an upper bound: the smallest scores that the indexer makes, and their selection. */
static br_status measure_topk(bench *b, const char *name) {
    enum { HEADS = 4, WIDTH = 32 };
    const bench_shape *s = b->shape;
    const double n_row = bench_batch_size(b, 64);
    char request[64];
    bench_row row = {
        .name = name, .bytes = n_row * 4 * ((double)s->n_pos + s->topk), .peer_name = "torch.topk", .request = request,
    };
    snprintf(row.shape, sizeof row.shape, "top %d of %.0f x %d; with scores by %d heads of %d from keys in L2", s->topk, n_row, s->n_pos, HEADS,
             WIDTH);
    snprintf(request, sizeof request, "topk %.0f %d %d", n_row, s->n_pos, s->topk);
    return measure_select(b, &row, HEADS, WIDTH, 1);
}

br_status bench_index(bench *b) {
    if (bench_wants(b, "index.decode.64x128k"))
        BR_TRY(bench_settle(b, "index.decode.64x128k", measure_index(b, "index.decode.64x128k")));
    if (bench_wants(b, "topk.64x128k"))
        BR_TRY(bench_settle(b, "topk.64x128k", measure_topk(b, "topk.64x128k")));
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

/* topk of the first pos + 1 positions of each row, rising: one drawn from each of as many equal parts. Row i sees the
 * positions up to pos + i % n_step. */
static br_status draw_choice(bench *b, int32_t n_row, int32_t n_step, int32_t pos, const int32_t **select, const int32_t **n_select) {
    const int32_t topk = b->shape->topk;
    const size_t bytes = sizeof(int32_t) * (size_t)n_row * (size_t)topk;
    void *select_at = NULL, *n_select_at = NULL;
    int32_t *choice;
    uint64_t state = 88172645463325252u;
    BR_TRY(br_mem_alloc((void **)&choice, bytes, "positions"));
    for (int32_t t = 0; t < n_row; t++) {
        const int64_t visible = pos + t % n_step + 1;
        for (int64_t i = 0; i < topk; i++) {
            const int64_t begin = visible * i / topk, end = visible * (i + 1) / topk;
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            choice[t * (int64_t)topk + i] = (int32_t)(begin + (int64_t)(state % (uint64_t)(end - begin)));
        }
    }
    br_status status = bench_upload(b, choice, bytes, "positions", &select_at);
    for (int32_t t = 0; t < n_row; t++)
        choice[t] = topk;
    if (status == BR_OK)
        status = bench_upload(b, choice, sizeof *choice * (size_t)n_row, "counts", &n_select_at);
    br_mem_free(choice);
    *select = select_at;
    *n_select = n_select_at;
    return status;
}

/* n_seq sequences of n_step new tokens each behind pos others, every query with topk positions of its own. The twin is the
 * first row alone. */
static br_status measure_attn(bench *b, const char *name, int32_t n_seq, int32_t n_step, int32_t pos) {
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
    return bench_measure(b, &row, NULL);
}

br_status bench_attn(bench *b) {
    const int32_t n_prefill = b->shape->prefill;
    if (bench_wants(b, "attn.decode.b64"))
        BR_TRY(bench_settle(b, "attn.decode.b64", measure_attn(b, "attn.decode.b64", bench_batch_size(b, 64), 1, b->shape->attn_n_pos - 1)));
    if (bench_wants(b, "attn.prefill.8192"))
        BR_TRY(bench_settle(b, "attn.prefill.8192", measure_attn(b, "attn.prefill.8192", 1, n_prefill, n_prefill)));
    return BR_OK;
}
