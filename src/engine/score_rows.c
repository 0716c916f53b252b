/* Log-probs of given tokens; see score_rows.h. */
#include "score_rows.h"

#include <string.h>

static void lay_out_in(score_rows *s, int32_t n, br_arena *arena) {
    s->row = BR_ARENA_ARRAY(arena, int32_t, n);
    s->token = BR_ARENA_ARRAY(arena, int32_t, n);
    s->temperature = BR_ARENA_ARRAY(arena, float, n);
}

static void *take_words(br_arena *arena, int32_t n) {
    return br_arena_take(arena, (size_t)n * sizeof(uint32_t), sizeof(uint32_t));
}

/* Without gaps, so that the beginning of the block holds all of n rows. */
static void lay_out_out(score_rows *s, int32_t n, br_arena *arena) {
    s->logprob = take_words(arena, n);
    s->logprob_raw = take_words(arena, n);
    s->fault = take_words(arena, n);
    s->entropy = take_words(arena, n);
}

static size_t bytes_of(score_rows *s, void (*lay_out)(score_rows *s, int32_t n, br_arena *arena)) {
    br_arena measure = {0};
    lay_out(s, s->n_max, &measure);
    return measure.used;
}

static size_t x_bytes(const br_loaded *loaded, int32_t n_max) {
    return (size_t)n_max * (size_t)loaded->config.d_model * sizeof(bi_bf16);
}

void score_rows_room(br_loaded *loaded, int32_t n_max) {
    score_rows s = {.loaded = loaded, .n_max = n_max};
    br_room_add(&loaded->room, "rows of a step", x_bytes(loaded, n_max) + bytes_of(&s, lay_out_in) + bytes_of(&s, lay_out_out));
}

static br_status open_mirror(score_rows *s, void (*lay_out)(score_rows *s, int32_t n, br_arena *arena), br_mirror *mirror) {
    const size_t bytes = bytes_of(s, lay_out);
    BR_TRY(br_mirror_open(s->loaded->device, bytes, "scored rows", mirror));
    br_arena real = {.base = mirror->host, .size = bytes};
    lay_out(s, s->n_max, &real);
    return BR_OK;
}

br_status score_rows_open(score_rows *s, br_loaded *loaded, int32_t n_max) {
    void *memory;
    *s = (score_rows){.loaded = loaded, .n_max = n_max};
    BR_TRY(open_mirror(s, lay_out_in, &s->in));
    BR_TRY(open_mirror(s, lay_out_out, &s->out));
    BR_TRY(br_device_alloc(loaded->device, x_bytes(loaded, n_max), "scored rows", &memory));
    s->x = memory;
    return BR_OK;
}

void score_rows_close(score_rows *s) {
    if (!s->loaded || !s->loaded->device)
        return;
    br_device_free(s->loaded->device, s->x);
    br_mirror_close(s->loaded->device, &s->in);
    br_mirror_close(s->loaded->device, &s->out);
}

void score_rows_begin(score_rows *s) {
    s->n = s->want_entropy = 0;
}

void score_rows_add(score_rows *s, int32_t row, int32_t token, float temperature, int want_entropy) {
    BR_ASSERT(s->n < s->n_max);
    s->row[s->n] = row;
    s->token[s->n] = token;
    s->temperature[s->n++] = temperature;
    s->want_entropy |= want_entropy;
}

br_status score_rows_run(score_rows *s, const bi_bf16 *final) {
    const int32_t n = s->n;
    br_device *device = s->loaded->device;
    const br_mirror *in = &s->in, *out = &s->out;
    br_arena room = {.base = out->host, .size = out->bytes};
    if (n == 0)
        return BR_OK;
    lay_out_out(s, n, &room);
    const float *end = s->want_entropy ? s->entropy + n : s->entropy;
    uint32_t *fault = br_mirror_at(out, s->fault);
    BR_TRY(br_device_upload(device, in->device, in->host, in->bytes));
    memset(s->fault, 0, (size_t)n * sizeof *s->fault);
    BR_TRY(br_device_upload(device, fault, s->fault, (size_t)n * sizeof *s->fault));
    bi_gather_args gather = {.n = n, .row_bytes = (size_t)s->loaded->config.d_model * sizeof *final, .x = final,
                             .row = br_mirror_at(in, s->row), .y = s->x};
    BR_TRY(s->loaded->backend.op->gather(s->loaded->backend.ctx, &gather));
    BR_TRY(br_model_score(s->loaded->model, n, s->x, br_mirror_at(in, s->token), br_mirror_at(in, s->temperature),
                          br_mirror_at(out, s->logprob), br_mirror_at(out, s->logprob_raw),
                          s->want_entropy ? br_mirror_at(out, s->entropy) : NULL, fault));
    return br_device_download(device, out->host, out->device, (size_t)((const unsigned char *)end - out->host));
}
