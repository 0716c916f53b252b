/* Log-probs of given tokens; see score_rows.h. */
#include "score_rows.h"

#include <string.h>

static void lay_out_in(void *owner, br_arena *arena) {
    score_rows *s = owner;
    s->row = BR_ARENA_ARRAY(arena, int32_t, s->n_max);
    s->token = BR_ARENA_ARRAY(arena, int32_t, s->n_max);
    s->temperature = BR_ARENA_ARRAY(arena, float, s->n_max);
}

/* Without gaps, so that the beginning of the block holds all of n rows. */
static void lay_out_out(void *owner, br_arena *arena) {
    score_rows *s = owner;
    s->logprob = BR_ARENA_NEXT(arena, float, s->n);
    s->logprob_raw = BR_ARENA_NEXT(arena, float, s->n);
    s->fault = BR_ARENA_NEXT(arena, uint32_t, s->n);
    s->entropy = BR_ARENA_NEXT(arena, float, s->n);
}

static size_t x_bytes(const br_loaded *loaded, int32_t n_max) {
    return (size_t)n_max * (size_t)loaded->config.d_model * sizeof(bi_bf16);
}

void score_rows_room(br_loaded *loaded, int32_t n_max) {
    score_rows s = {.loaded = loaded, .n = n_max, .n_max = n_max};
    br_room_add(&loaded->room, "rows of a step",
                x_bytes(loaded, n_max) + br_arena_measure(lay_out_in, &s) + br_arena_measure(lay_out_out, &s));
}

br_status score_rows_open(score_rows *s, br_loaded *loaded, int32_t n_max) {
    void *memory;
    *s = (score_rows){.loaded = loaded, .n = n_max, .n_max = n_max};
    BR_TRY(br_mirror_lay_out(loaded->device, lay_out_in, s, "scored rows", &s->in));
    BR_TRY(br_mirror_lay_out(loaded->device, lay_out_out, s, "scored rows", &s->out));
    BR_TRY(br_device_alloc(loaded->device, x_bytes(loaded, n_max), "scored rows", &memory));
    s->x = memory;
    score_rows_begin(s);
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
    lay_out_out(s, &room);
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
