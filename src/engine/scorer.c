/* Packs of whole sequences through the model; see scorer.h. */
#include "scorer.h"

#include "rollout_file.h"
#include "step_rows.h"

#include <string.h>

struct scorer {
    br_loaded *loaded;
    int32_t n_block_max;
    step_rows rows;
    /* scored rows, host side: which row of the step, the token it predicts, the temperature */
    int32_t *score_row, *next_token;
    float *temperature;
    /* back from the device, host side */
    float *logprob, *logprob_raw, *entropy;
    uint32_t *row_fault, *score_fault;
    br_mirror in, out;
    bi_bf16 *score_x;              /* device */
    unsigned char *pages, *states; /* device */
    unsigned char *memory;
};

static int32_t block_count(int32_t n_tok) {
    return (n_tok + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
}

static void lay_out_in(scorer *s, br_arena *arena) {
    const size_t n = (size_t)s->loaded->n_row_max;
    s->score_row = BR_ARENA_ARRAY(arena, int32_t, n);
    s->next_token = BR_ARENA_ARRAY(arena, int32_t, n);
    s->temperature = BR_ARENA_ARRAY(arena, float, n);
}

static void lay_out_out(scorer *s, br_arena *arena) {
    const size_t n = (size_t)s->loaded->n_row_max;
    s->logprob = BR_ARENA_ARRAY(arena, float, n);
    s->logprob_raw = BR_ARENA_ARRAY(arena, float, n);
    s->entropy = BR_ARENA_ARRAY(arena, float, n);
    s->row_fault = BR_ARENA_ARRAY(arena, uint32_t, n);
    s->score_fault = BR_ARENA_ARRAY(arena, uint32_t, n);
}

static br_status open_mirror(scorer *s, void (*lay_out)(scorer *s, br_arena *arena), br_mirror *mirror) {
    br_arena measure = {0};
    lay_out(s, &measure);
    BR_TRY(br_mirror_open(s->loaded->device, measure.used, "scored rows", mirror));
    br_arena real = {.base = mirror->host, .size = measure.used};
    lay_out(s, &real);
    return BR_OK;
}

static void lay_out_memory(scorer *s, br_arena *arena) {
    const br_model *model = s->loaded->model;
    s->score_x = br_arena_take(arena, (size_t)s->loaded->n_row_max * (size_t)s->loaded->config.d_model * sizeof(bi_bf16), 256);
    s->pages = br_arena_take(arena, br_model_page_bytes(model) * (size_t)s->n_block_max, 256);
    s->states = br_arena_take(arena, br_model_state_bytes(model) * SCORER_PACK_MAX, 256);
}

static br_status open_parts(scorer *s) {
    void *memory;
    br_arena measure = {0};
    BR_TRY(step_rows_open(&s->rows, s->loaded->device, s->loaded->n_row_max, SCORER_PACK_MAX, 0));
    BR_TRY(open_mirror(s, lay_out_in, &s->in));
    BR_TRY(open_mirror(s, lay_out_out, &s->out));
    lay_out_memory(s, &measure);
    BR_TRY(br_device_alloc(s->loaded->device, measure.used, "the scorer's caches", &memory));
    s->memory = memory;
    br_arena real = {.base = s->memory, .size = measure.used};
    lay_out_memory(s, &real);
    return BR_OK;
}

br_status scorer_open(br_loaded *loaded, scorer **out) {
    scorer *s = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&s, sizeof *s, "the scorer"));
    s->loaded = loaded;
    s->n_block_max = block_count(loaded->n_row_max) + SCORER_PACK_MAX; /* each sequence wastes less than one */
    br_status status = open_parts(s);
    if (status != BR_OK) {
        scorer_close(s);
        return status;
    }
    *out = s;
    return BR_OK;
}

void scorer_close(scorer *s) {
    if (!s)
        return;
    br_device_free(s->loaded->device, s->memory);
    br_mirror_close(s->loaded->device, &s->in);
    br_mirror_close(s->loaded->device, &s->out);
    step_rows_close(&s->rows);
    br_mem_free(s);
}

br_status scorer_fit(const scorer *s, const scorer_seq *seq, int32_t n, int32_t *n_fit) {
    int32_t rows = 0;
    *n_fit = 0;
    for (int32_t i = 0; i < n && i < SCORER_PACK_MAX && seq[i].n_tok <= s->loaded->n_row_max - rows; i++) {
        rows += seq[i].n_tok;
        *n_fit = i + 1;
    }
    if (n > 0 && *n_fit == 0)
        return br_fail(BR_E_LIMIT, "a sequence of %d tokens does not fit into a pack of %d", seq[0].n_tok, s->loaded->n_row_max);
    return BR_OK;
}

static void lay_out_rows(scorer *s, const scorer_seq *seq, int32_t n) {
    int32_t block = 0;
    step_rows_begin(&s->rows);
    for (int32_t i = 0; i < n; i++) {
        s->rows.page[i] = block;
        step_rows_add(&s->rows, i, 0, seq[i].token, seq[i].n_tok, seq[i].slot);
        block += block_count(seq[i].n_tok);
    }
    BR_ASSERT(block <= s->n_block_max);
}

static void note_fault(scorer_seq *seq, uint32_t code, int32_t position) {
    if (code && (!seq->fault || position < seq->fault_pos)) {
        seq->fault = code;
        seq->fault_pos = position;
    }
}

br_status scorer_forward(scorer *s, scorer_seq *seq, int32_t n, const br_trace *trace, const bi_bf16 **final) {
    br_device *device = s->loaded->device;
    br_step step = {.page_base = s->pages, .state_base = s->states, .trace = trace};
    lay_out_rows(s, seq, n);
    BR_TRY(step_rows_upload(&s->rows, &step));
    BR_TRY(br_model_forward(s->loaded->model, &step, final));
    BR_TRY(br_device_download(device, s->row_fault, step.row_fault, (size_t)s->rows.host.n_row * sizeof *s->row_fault));
    BR_TRY(br_device_wait(device));
    for (int32_t i = 0; i < n; i++) {
        seq[i].fault = 0;
        for (int32_t t = 0; t == 0 || t + 1 < seq[i].n_tok; t++)
            note_fault(&seq[i], s->row_fault[s->rows.seg[i].row + t], t);
    }
    return BR_OK;
}

const bi_batch *scorer_batch(const scorer *s) {
    return &s->rows.host;
}

const uint32_t *scorer_row_fault(const scorer *s) {
    return br_mirror_at(&s->rows.in, s->rows.row_fault);
}

/* Scores n rows that are listed; row t predicts token t + 1. */
static br_status score_rows(scorer *s, int32_t n, const bi_bf16 *final, int want_entropy) {
    br_device *device = s->loaded->device;
    const br_mirror *in = &s->in, *out = &s->out;
    uint32_t *fault = br_mirror_at(out, s->score_fault);
    BR_TRY(br_device_upload(device, in->device, in->host, in->bytes));
    memset(s->score_fault, 0, (size_t)n * sizeof *s->score_fault);
    BR_TRY(br_device_upload(device, fault, s->score_fault, (size_t)n * sizeof *s->score_fault));
    bi_gather_args gather = {.n = n, .row_bytes = (size_t)s->loaded->config.d_model * sizeof *final, .x = final,
                             .row = br_mirror_at(in, s->score_row), .y = s->score_x};
    BR_TRY(s->loaded->backend.op->gather(s->loaded->backend.ctx, &gather));
    BR_TRY(br_model_score(s->loaded->model, n, s->score_x, br_mirror_at(in, s->next_token), br_mirror_at(in, s->temperature),
                          br_mirror_at(out, s->logprob), br_mirror_at(out, s->logprob_raw),
                          want_entropy ? br_mirror_at(out, s->entropy) : NULL, fault));
    BR_TRY(br_device_download(device, out->host, out->device, out->bytes));
    return br_device_wait(device);
}

br_status scorer_logprobs(scorer *s, scorer_seq *seq, int32_t n, const bi_bf16 *final) {
    int32_t n_score = 0, want_entropy = 0;
    for (int32_t i = 0; i < n; i++) {
        want_entropy |= seq[i].entropy != NULL;
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++, n_score++) {
            s->score_row[n_score] = s->rows.seg[i].row + t;
            s->next_token[n_score] = seq[i].token[t + 1];
            s->temperature[n_score] = seq[i].temperature;
        }
    }
    BR_TRY(score_rows(s, n_score, final, want_entropy));
    for (int32_t i = 0, at = 0; i < n; i++) {
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++, at++) {
            memcpy(&seq[i].logprob[t + 1], &s->logprob[at], sizeof(float));
            memcpy(&seq[i].logprob_raw[t + 1], &s->logprob_raw[at], sizeof(float));
            if (seq[i].entropy)
                memcpy(&seq[i].entropy[t + 1], &s->entropy[at], sizeof(float));
            if (!s->score_fault[at])
                continue;
            seq[i].logprob[t + 1] = seq[i].logprob_raw[t + 1] = BR_UNSCORED;
            if (t + 1 >= seq[i].first_asked)
                note_fault(&seq[i], s->score_fault[at], t);
        }
    }
    return BR_OK;
}
