/* Rows of the verb `bench`: a slice of the model at full width, whole steps; see job_bench.h.
 *
 * The model is the preset slice-full, 3 KDA layers and a sparse MLA one with 896 experts each, head and embedding, its weights made
 * on the device; opened without an adapter, with one of rank 32 on every map for all rows, and with two, where base and both take turns
 * over the rows. One sequence is prefilled to the context by real steps and its caches copied to the others, which go on with other
 * tokens. The first sequence has to draw the same token with the same log-prob in a step of any batch, without an adapter also beside
 * rows that have one: that is checked.
 * Floors are those of job_bench_floor.c. */
#include "job_bench_floor.h"

#include "br_file.h"
#include "draw.h"
#include "step_rows.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROOM_FOR_NEW = BR_PAGE_TOK, N_LORA = 2 };

/* Who has an adapter. */
typedef enum slice_use { USE_BASE, USE_LORA, USE_MIXED, USE_COUNT } slice_use;

static const struct {
    const char *suffix, *says;
    int32_t n_lora;
} USE[USE_COUNT] = {{"", "no adapter", 0}, {".lora", "rank 32 on every map", 1}, {".mixed", "base and two of rank 32 in turn", N_LORA}};

static const int32_t BATCH[BENCH_STEP_COUNT] = {1, 8, 64, 256, 0}; /* 0: scoring */

/* What the first sequence draws in a decode step. */
typedef struct drawn {
    br_digest digest;
    int is_known;
} drawn;

typedef struct slice {
    bench b; /* with the model's device */
    br_loaded loaded;
    step_rows rows;
    draw draw;
    br_step step;
    slice_use use;
    int32_t n_seq_max, context;
    int32_t n_page; /* of a sequence */
    unsigned char *pages, *states;
    int32_t *token, *next; /* (prefill) host; device */
    float *temperature, *logprob, *logprob_raw;
    uint32_t *score_fault;
    const bi_bf16 *final;
    drawn first;
} slice;

/* ---- open -------------------------------------------------------------------------------------------------------------------- */

typedef struct folders {
    char top[32], model[BR_PATH_BYTES], lora[N_LORA][BR_PATH_BYTES];
} folders;

static br_status make_folders(const bench *b, folders *f) {
    br_report report = {0};
    snprintf(f->top, sizeof f->top, "/tmp/bitroll-bench-XXXXXX");
    if (!mkdtemp(f->top))
        return br_fail(BR_E_IO, "cannot make a folder like %s", f->top);
    BR_TRY(br_file_join(f->model, f->top, "model"));
    BR_TRY(br_file_join(f->lora[0], f->top, "lora"));
    BR_TRY(br_file_join(f->lora[1], f->top, "lora2"));
    br_init_options options = {.preset = b->shape->slice_preset, .out_dir = f->model, .seed = 1, .recipe = 1, .lora_rank = BENCH_LORA_RANK};
    for (int32_t i = 0; i < N_LORA; i++) {
        options.lora_only = i > 0;
        options.lora_seed = (uint64_t)i + 1;
        options.lora_out_dir = f->lora[i];
        BR_TRY(br_job_init(&options, NULL, &report));
        br_report_free(&report);
    }
    return BR_OK;
}

static void remove_files(const char *dir) {
    static const char *const file[] = {"config.json", "generated.json", "adapter_config.json"};
    char path[BR_PATH_BYTES];
    for (int i = 0; i < 3; i++)
        if (dir[0] && br_file_join(path, dir, file[i]) == BR_OK)
            unlink(path);
    if (dir[0])
        rmdir(dir);
}

static void remove_folders(const folders *f) {
    remove_files(f->model);
    for (int32_t i = 0; i < N_LORA; i++)
        remove_files(f->lora[i]);
    rmdir(f->top);
}

static br_status take(slice *s, size_t bytes, const char *what, void *out_pointer) {
    void *block;
    BR_TRY(bench_take(&s->b, bytes, what, &block));
    memcpy(out_pointer, &block, sizeof block);
    return BR_OK;
}

static br_status open_parts(slice *s) {
    const br_model *model = s->loaded.model;
    const size_t n = (size_t)s->b.shape->prefill, n_seq = (size_t)s->n_seq_max;
    s->n_page = (s->context + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    BR_TRY(step_rows_open(&s->rows, s->loaded.device, s->loaded.n_row_max, s->n_seq_max, 0));
    BR_TRY(draw_open(&s->draw, &s->loaded, s->n_seq_max));
    BR_TRY(take(s, br_model_page_bytes(model) * (size_t)s->n_page * n_seq, "cache pages", &s->pages));
    BR_TRY(take(s, br_model_state_bytes(model) * n_seq, "KDA states", &s->states));
    BR_TRY(take(s, n * sizeof(int32_t), "tokens", &s->next));
    BR_TRY(take(s, n * sizeof(float), "temperatures", &s->temperature));
    BR_TRY(take(s, n * sizeof(float), "log-probs", &s->logprob));
    BR_TRY(take(s, n * sizeof(float), "log-probs", &s->logprob_raw));
    BR_TRY(take(s, n * sizeof(uint32_t), "faults", &s->score_fault));
    BR_TRY(br_mem_alloc((void **)&s->token, n * sizeof(int32_t), "tokens"));
    for (size_t i = 0; i < n; i++)
        s->token[i] = (int32_t)(br_hash_u64(&i, sizeof i) % (uint64_t)s->loaded.config.n_vocab);
    s->step = (br_step){.page_base = s->pages, .state_base = s->states};
    BR_TRY(br_device_upload(s->loaded.device, s->next, s->token, n * sizeof(int32_t)));
    return br_device_wait(s->loaded.device);
}

static void close_slice(slice *s) {
    if (s->loaded.device) {
        br_device_wait(s->loaded.device);
        draw_close(&s->draw);
        step_rows_close(&s->rows);
        bench_forget(&s->b);
    }
    br_loaded_close(&s->loaded);
    br_mem_free(s->token);
}

static br_status open_slice(bench *b, const folders *f, slice_use use, slice *s) {
    const br_adapter_source source[N_LORA] = {{.name = "lora", .dir = f->lora[0]}, {.name = "lora2", .dir = f->lora[1]}};
    const br_engine_options options = {.model_dir = f->model, .adapter = source, .n_adapter = USE[use].n_lora, .backend = b->options->backend,
                                       .n_thread = b->options->n_thread};
    *s = (slice){.use = use, .n_seq_max = bench_batch_size(b, BATCH[BENCH_DECODE_256]), .context = b->shape->slice_context};
    BR_TRY(br_loaded_open(&options, b->shape->prefill, s->context + ROOM_FOR_NEW, 0, &s->loaded));
    s->b = *b;
    s->b.device = s->loaded.device;
    s->b.n_block = 0;
    return open_parts(s);
}

/* ---- steps ------------------------------------------------------------------------------------------------------------------- */

/* The adapter slot of a sequence, -1 base. */
static int32_t slot_of(const slice *s, int32_t seq) {
    return s->use == USE_MIXED ? seq % (N_LORA + 1) - 1 : s->use == USE_LORA ? 0 : -1;
}

static br_status prefill(slice *s) {
    const int32_t chunk = s->b.shape->prefill < s->context ? s->b.shape->prefill : s->context;
    for (int32_t pos = 0; pos < s->context; pos += chunk) {
        const int32_t n = s->context - pos < chunk ? s->context - pos : chunk;
        step_rows_begin(&s->rows);
        s->rows.page[0] = 0;
        step_rows_add(&s->rows, 0, pos, s->token, n, slot_of(s, 0));
        BR_TRY(step_rows_upload(&s->rows, &s->step));
        BR_TRY(br_model_forward(s->loaded.model, &s->step, &s->final));
        BR_TRY(br_device_wait(s->loaded.device));
    }
    return BR_OK;
}

/* Every sequence becomes the first. */
static br_status copy_sequences(slice *s, int32_t n) {
    const size_t page_bytes = br_model_page_bytes(s->loaded.model) * (size_t)s->n_page, state_bytes = br_model_state_bytes(s->loaded.model);
    for (int32_t i = 1; i < n; i++) {
        BR_TRY(br_device_copy(s->loaded.device, s->pages + page_bytes * (size_t)i, s->pages, page_bytes));
        BR_TRY(br_device_copy(s->loaded.device, s->states + state_bytes * (size_t)i, s->states, state_bytes));
    }
    return br_device_wait(s->loaded.device);
}

static br_status lay_out_decode(slice *s, int32_t n) {
    step_rows_begin(&s->rows);
    for (int32_t i = 0; i < n; i++) {
        s->rows.page[i] = i * s->n_page;
        step_rows_add(&s->rows, i, s->context - 1, s->token + i, 1, slot_of(s, i)); /* other tokens, other experts */
        s->draw.row[i] = i;
        s->draw.forced[i] = -1;
        s->draw.setting[i] = (bi_sampling){.temperature = 1, .top_p_q32 = bi_sample_top_p(1), .seed = 7, .position = s->context};
    }
    BR_TRY(step_rows_upload(&s->rows, &s->step));
    return draw_upload(&s->draw, n);
}

static br_status run_decode(bench *b, const void *args) {
    slice *s = *(slice *const *)args;
    (void)b;
    BR_TRY(br_model_forward(s->loaded.model, &s->step, &s->final));
    return draw_ops(&s->draw, s->final, s->step.row_fault);
}

static br_status run_score(bench *b, const void *args) {
    slice *s = *(slice *const *)args;
    (void)b;
    BR_TRY(br_model_forward(s->loaded.model, &s->step, &s->final));
    return br_model_score(s->loaded.model, s->step.batch->n_row, s->final, s->next, s->temperature, s->logprob, s->logprob_raw, NULL,
                          s->score_fault);
}

/* The first sequence draws the same in a step of any size; nobody has a fault. */
static br_status check_first(slice *s, int32_t n, br_digest digest) {
    BR_TRY(draw_download(&s->draw));
    BR_TRY(br_device_wait(s->loaded.device));
    for (int32_t i = 0; i < n; i++)
        if (s->draw.fault[i])
            return br_fail(BR_E_NAN, "sequence %d of %d has a fault", i, n);
    if (s->first.is_known && !br_digest_equal(s->first.digest, digest))
        return br_fail(BR_E_MISMATCH, "in a step of %d sequences the first one draws another token or log-prob than before", n);
    s->first = (drawn){digest, 1};
    return BR_OK;
}

/* ---- rows -------------------------------------------------------------------------------------------------------------------- */

static double decode_floor(const slice *s, int32_t n) {
    int32_t lora_rows[N_LORA] = {0};
    for (int32_t i = 0; i < n; i++)
        if (slot_of(s, i) >= 0)
            lora_rows[slot_of(s, i)]++;
    return bench_floor_decode(&s->b, &s->loaded.config, n, s->context, lora_rows, USE[s->use].n_lora);
}

static br_status measure_decode(slice *s, const char *name, int32_t n, bench_result *result) {
    slice *self = s;
    bench_row row = {.name = name, .op = run_decode, .args = &self, .args_bytes = sizeof self, .n_variant = 1, .n_output = 2};
    BR_TRY(prefill(s)); /* a decode step moves the states on: each row begins with the same ones */
    BR_TRY(copy_sequences(s, n));
    BR_TRY(lay_out_decode(s, n));
    row.output[0] = (bench_output){.all = br_mirror_at(&s->draw.out, s->draw.logprob), .bytes = sizeof(float), .hashed = 1};
    row.output[1] = (bench_output){.all = br_mirror_at(&s->draw.out, s->draw.token), .bytes = sizeof(int32_t), .hashed = 1};
    row.floor_us = decode_floor(s, n);
    snprintf(row.shape, sizeof row.shape, "%d sequences at %d tokens, %s", n, s->context, USE[s->use].says);
    BR_TRY(bench_measure(&s->b, &row, result));
    return check_first(s, n, result->digest);
}

static br_status measure_score(slice *s, const char *name, bench_result *result) {
    const int32_t n = s->b.shape->prefill < s->context ? s->b.shape->prefill : s->context;
    slice *self = s;
    bench_row row = {.name = name, .op = run_score, .args = &self, .args_bytes = sizeof self, .n_variant = 1, .n_output = 1};
    step_rows_begin(&s->rows);
    s->rows.page[0] = 0;
    step_rows_add(&s->rows, 0, 0, s->token, n, slot_of(s, 0));
    BR_TRY(step_rows_upload(&s->rows, &s->step));
    row.output[0] = (bench_output){.all = s->logprob, .bytes = sizeof(float) * (size_t)n, .hashed = 1};
    row.floor_us = bench_floor_score(&s->b, &s->loaded.config, n, USE[s->use].n_lora > 0);
    snprintf(row.shape, sizeof row.shape, "one sequence of %d tokens, %s", n, USE[s->use].says);
    return bench_measure(&s->b, &row, result);
}

static const char *row_name(char text[40], int32_t batch, slice_use use) {
    if (batch)
        snprintf(text, 40, "slice.decode.b%d%s", batch, USE[use].suffix);
    else
        snprintf(text, 40, "slice.score.8192%s", USE[use].suffix);
    return text;
}

/* One sequence has nobody to take turns with. */
static int is_row(int i, slice_use use) {
    return use != USE_MIXED || BATCH[i] > 1;
}

static int wants_step(const bench *b, int i, slice_use use) {
    char name[40];
    return is_row(i, use) && (bench_is_chosen(b, row_name(name, BATCH[i], use)) || (use == USE_BASE && bench_price_needs(b, (bench_step)i)));
}

static br_status measure_all(slice *s, bench_result *result) {
    char name[40];
    for (int i = 0; i < BENCH_STEP_COUNT; i++) {
        if (!wants_step(&s->b, i, s->use))
            continue;
        row_name(name, BATCH[i], s->use);
        BR_TRY(bench_settle(&s->b, name, BATCH[i] ? measure_decode(s, name, bench_batch_size(&s->b, BATCH[i]), &result[i])
                                                  : measure_score(s, name, &result[i])));
    }
    return BR_OK;
}

/* Opens the model in one way and measures its rows. base: what the first sequence draws without an adapter, as far as it is known. */
static br_status measure_use(bench *b, const folders *f, slice_use use, drawn *base, bench_result *result) {
    slice s;
    br_status status = bench_settle(b, "slice", open_slice(b, f, use, &s));
    if (use == USE_MIXED)
        s.first = *base;
    if (status == BR_OK && s.token)
        status = measure_all(&s, result);
    if (use == USE_BASE)
        *base = s.first;
    if (s.token && !b->failure[0])
        memcpy(b->failure, s.b.failure, sizeof b->failure);
    close_slice(&s);
    return status;
}

/* How much longer a step takes with adapters. */
static void say_price(const bench *b, bench_result result[USE_COUNT][BENCH_STEP_COUNT]) {
    for (int use = USE_LORA; use < USE_COUNT; use++)
        for (int i = 0; i < BENCH_STEP_COUNT; i++)
            if (result[USE_BASE][i].us > 0 && result[use][i].us > 0)
                bench_say(b, "%s with %s takes %.3f times as long", BATCH[i] ? "decode" : "scoring", USE[use].says,
                          result[use][i].us / result[USE_BASE][i].us);
}

br_status bench_slice(bench *b) {
    char name[40];
    bench_result result[USE_COUNT][BENCH_STEP_COUNT] = {{{0}}};
    folders f = {"", "", {"", ""}};
    drawn base = {.is_known = 0};
    int n_wanted[USE_COUNT] = {0}, n = 0;
    for (int use = 0; use < USE_COUNT; use++)
        for (int i = 0; i < BENCH_STEP_COUNT; i++)
            if (is_row(i, use))
                n_wanted[use] += bench_wants(b, row_name(name, BATCH[i], use)) || (!b->naming && wants_step(b, i, use));
    for (int use = 0; use < USE_COUNT; use++)
        n += n_wanted[use];
    if (n == 0)
        return BR_OK;
    br_status status = make_folders(b, &f);
    for (int use = 0; use < USE_COUNT && status == BR_OK; use++)
        if (n_wanted[use])
            status = measure_use(b, &f, use, &base, result[use]);
    remove_folders(&f);
    memcpy(b->step, result[USE_BASE], sizeof b->step);
    say_price(b, result);
    return status;
}
