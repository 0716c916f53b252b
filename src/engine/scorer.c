/* Packs of whole sequences through the model; see scorer.h. */
#include "scorer.h"

#include "rollout_file.h"
#include "score_rows.h"
#include "step_rows.h"

#include <string.h>

struct scorer {
    br_loaded *loaded;
    int32_t n_block_max;
    step_rows rows;
    score_rows score;
    br_mirror row_fault;           /* (n_row_max) of the last forward */
    unsigned char *pages, *states; /* device */
    unsigned char *memory;
};

static int32_t block_count(int32_t n_tok) {
    return (n_tok + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
}

static int32_t block_max(const br_loaded *loaded) {
    return block_count(loaded->n_row_max) + SCORER_PACK_MAX; /* each sequence wastes less than one */
}

static void lay_out_memory(void *owner, br_arena *arena) {
    scorer *s = owner;
    s->pages = br_arena_take(arena, s->loaded->size.page * (size_t)s->n_block_max, 256);
    s->states = br_arena_take(arena, s->loaded->size.state * SCORER_PACK_MAX, 256);
}

static size_t row_fault_bytes(const br_loaded *loaded) {
    return (size_t)loaded->n_row_max * sizeof(uint32_t);
}

void scorer_room(br_loaded *loaded) {
    scorer s = {.loaded = loaded, .n_block_max = block_max(loaded)};
    br_room_add(&loaded->room, "cache pages and KDA states", br_arena_measure(lay_out_memory, &s));
    br_room_add(&loaded->room, "rows of a step", step_rows_bytes(loaded->n_row_max, SCORER_PACK_MAX, 0) + row_fault_bytes(loaded));
    score_rows_room(loaded, loaded->n_row_max);
}

br_status scorer_load(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, br_loaded *out) {
    BR_TRY(br_loaded_prepare(options, n_row_max, n_pos_max, 1, out));
    scorer_room(out);
    return br_loaded_pack(out);
}

static br_status open_parts(scorer *s) {
    void *memory;
    const size_t bytes = br_arena_measure(lay_out_memory, s);
    BR_TRY(step_rows_open(&s->rows, s->loaded->device, s->loaded->n_row_max, SCORER_PACK_MAX, 0));
    BR_TRY(score_rows_open(&s->score, s->loaded, s->loaded->n_row_max));
    BR_TRY(br_mirror_open(s->loaded->device, row_fault_bytes(s->loaded), "faults", &s->row_fault));
    BR_TRY(br_device_alloc(s->loaded->device, bytes, "the scorer's caches", &memory));
    s->memory = memory;
    br_arena real = {.base = s->memory, .size = bytes};
    lay_out_memory(s, &real);
    return BR_OK;
}

br_status scorer_open(br_loaded *loaded, scorer **out) {
    scorer *s = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&s, sizeof *s, "the scorer"));
    s->loaded = loaded;
    s->n_block_max = block_max(loaded);
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
    br_mirror_close(s->loaded->device, &s->row_fault);
    score_rows_close(&s->score);
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

br_status scorer_forward(scorer *s, const scorer_seq *seq, int32_t n, const br_trace *trace, const bi_bf16 **final) {
    br_device *device = s->loaded->device;
    br_step step = {.page_base = s->pages, .state_base = s->states, .trace = trace};
    lay_out_rows(s, seq, n);
    BR_TRY(step_rows_upload(&s->rows, &step));
    BR_TRY(br_model_forward(s->loaded->model, &step, final));
    return br_device_download(device, s->row_fault.host, step.row_fault, (size_t)s->rows.host.n_row * sizeof *step.row_fault);
}

br_status scorer_faults(scorer *s, scorer_seq *seq, int32_t n) {
    const uint32_t *row_fault = (const uint32_t *)(const void *)s->row_fault.host;
    BR_TRY(br_device_wait(s->loaded->device));
    for (int32_t i = 0; i < n; i++) {
        seq[i].fault = 0;
        for (int32_t t = 0; t == 0 || t + 1 < seq[i].n_tok; t++)
            note_fault(&seq[i], row_fault[s->rows.seg[i].row + t], t);
    }
    return BR_OK;
}

const bi_batch *scorer_batch(const scorer *s) {
    return &s->rows.host;
}

const uint32_t *scorer_row_fault(const scorer *s) {
    return br_mirror_at(&s->rows.in, s->rows.row_fault);
}

/* Row t predicts token t + 1. */
br_status scorer_logprobs(scorer *s, scorer_seq *seq, int32_t n, const bi_bf16 *final) {
    score_rows *score = &s->score;
    score_rows_begin(score);
    for (int32_t i = 0; i < n; i++)
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++)
            score_rows_add(score, s->rows.seg[i].row + t, seq[i].token[t + 1], seq[i].temperature, seq[i].entropy != NULL);
    BR_TRY(score_rows_run(score, final));
    BR_TRY(scorer_faults(s, seq, n));
    for (int32_t i = 0, at = 0; i < n; i++) {
        for (int32_t t = 0; t + 1 < seq[i].n_tok; t++, at++) {
            memcpy(&seq[i].logprob[t + 1], &score->logprob[at], sizeof(float));
            memcpy(&seq[i].logprob_raw[t + 1], &score->logprob_raw[at], sizeof(float));
            if (seq[i].entropy)
                memcpy(&seq[i].entropy[t + 1], &score->entropy[at], sizeof(float));
            if (!score->fault[at])
                continue;
            seq[i].logprob[t + 1] = seq[i].logprob_raw[t + 1] = BR_UNSCORED;
            if (t + 1 >= seq[i].first_asked)
                note_fault(&seq[i], score->fault[at], t);
        }
    }
    return BR_OK;
}
