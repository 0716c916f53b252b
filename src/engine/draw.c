/* Drawing tokens; see draw.h. */
#include "draw.h"

static void lay_out_in(void *owner, br_arena *arena) {
    draw *d = owner;
    d->row = BR_ARENA_ARRAY(arena, int32_t, d->n_max);
    d->setting = BR_ARENA_ARRAY(arena, bi_sampling, d->n_max);
    d->forced = BR_ARENA_ARRAY(arena, int32_t, d->n_max);
}

/* Without gaps, so that the beginning of the block holds all of n rows. */
static void lay_out_out(void *owner, br_arena *arena) {
    draw *d = owner;
    d->token = BR_ARENA_NEXT(arena, int32_t, d->n);
    d->logprob = BR_ARENA_NEXT(arena, float, d->n);
    d->logprob_raw = BR_ARENA_NEXT(arena, float, d->n);
    d->logprob_kept = BR_ARENA_NEXT(arena, float, d->n);
    d->fault = BR_ARENA_NEXT(arena, uint32_t, d->n);
    d->entropy = BR_ARENA_NEXT(arena, float, d->n);
    d->top = BR_ARENA_NEXT(arena, bi_top, (size_t)d->n * BR_TOP_LOGPROBS_MAX);
}

/* A function of n alone, so that a recorded step of n rows finds them there again. */
static void place_out(draw *d) {
    br_arena out = {.base = d->out.host, .size = d->out.bytes};
    lay_out_out(d, &out);
}

static void lay_out_memory(void *owner, br_arena *arena) {
    enum { ALIGN = 256 };
    draw *d = owner;
    d->x = br_arena_take(arena, (size_t)d->n_max * (size_t)d->loaded->config.d_model * sizeof *d->x, ALIGN);
    d->logit = br_arena_take(arena, (size_t)d->n_max * (size_t)d->loaded->config.n_vocab * sizeof *d->logit, ALIGN);
}

void draw_room(br_loaded *loaded, int32_t n_max) {
    draw d = {.loaded = loaded, .n = n_max, .n_max = n_max};
    br_room_add(&loaded->room, "logits", br_arena_measure(lay_out_memory, &d));
    br_room_add(&loaded->room, "rows of a step", br_arena_measure(lay_out_in, &d) + br_arena_measure(lay_out_out, &d));
}

br_status draw_open(draw *d, br_loaded *loaded, int32_t n_max) {
    void *memory;
    *d = (draw){.loaded = loaded, .n = n_max, .n_max = n_max};
    BR_TRY(br_mirror_lay_out(loaded->device, lay_out_in, d, "samples of a step", &d->in));
    BR_TRY(br_mirror_lay_out(loaded->device, lay_out_out, d, "samples of a step", &d->out));
    const size_t bytes = br_arena_measure(lay_out_memory, d);
    BR_TRY(br_device_alloc(loaded->device, bytes, "logits", &memory));
    d->memory = memory;
    br_arena real = {.base = d->memory, .size = bytes};
    lay_out_memory(d, &real);
    return BR_OK;
}

void draw_close(draw *d) {
    if (!d->loaded || !d->loaded->device)
        return;
    br_device_free(d->loaded->device, d->memory);
    br_mirror_close(d->loaded->device, &d->in);
    br_mirror_close(d->loaded->device, &d->out);
}

static br_status gather(draw *d, int32_t n, const void *x, size_t row_bytes, void *y) {
    bi_gather_args args = {.n = n, .row_bytes = row_bytes, .x = x, .row = br_mirror_at(&d->in, d->row), .y = y};
    return d->loaded->backend.op->gather(d->loaded->backend.ctx, &args);
}

void draw_pad(draw *d, int32_t n_used, int32_t n) {
    BR_ASSERT(n <= d->n_max);
    for (int32_t i = n_used; i < n; i++) {
        d->row[i] = -1;
        d->setting[i] = (bi_sampling){.top_p_q32 = bi_sample_top_p(1)};
        d->forced[i] = -1;
    }
}

br_status draw_upload(draw *d, int32_t n) {
    d->n = n;
    place_out(d);
    return n ? br_device_upload(d->loaded->device, d->in.device, d->in.host, d->in.bytes) : BR_OK;
}

/* The end of what the settings ask for. */
static const void *end_of_asked(const draw *d) {
    const void *end = d->entropy;
    for (int32_t i = 0; i < d->n; i++)
        if (d->setting[i].entropy)
            end = d->top;
    for (int32_t i = 0; i < d->n; i++)
        if (d->setting[i].n_top)
            end = d->top + (size_t)(i + 1) * BR_TOP_LOGPROBS_MAX;
    return end;
}

br_status draw_download(draw *d) {
    if (d->n == 0)
        return BR_OK;
    const size_t bytes = (size_t)((const unsigned char *)end_of_asked(d) - d->out.host);
    return br_device_download(d->loaded->device, d->out.host, d->out.device, bytes);
}

br_status draw_ops(draw *d, const bi_bf16 *final, const uint32_t *row_fault) {
    const int32_t n = d->n;
    const br_config *c = &d->loaded->config;
    const br_mirror *out = &d->out;
    if (n == 0)
        return BR_OK;
    uint32_t *fault = br_mirror_at(out, d->fault);
    BR_TRY(gather(d, n, final, (size_t)c->d_model * sizeof *final, d->x));
    BR_TRY(gather(d, n, row_fault, sizeof *row_fault, fault));
    BR_TRY(br_model_logits(d->loaded->model, n, d->x, d->logit, fault));
    bi_sample_args args = {
        .n_row = n, .n_vocab = c->n_vocab, .logit = d->logit, .logit_ld = c->n_vocab, .setting = br_mirror_at(&d->in, d->setting),
        .forced = br_mirror_at(&d->in, d->forced), .token = br_mirror_at(out, d->token), .logprob = br_mirror_at(out, d->logprob),
        .logprob_raw = br_mirror_at(out, d->logprob_raw), .logprob_kept = br_mirror_at(out, d->logprob_kept),
        .entropy = br_mirror_at(out, d->entropy), .top = br_mirror_at(out, d->top), .top_ld = BR_TOP_LOGPROBS_MAX, .row_fault = fault,
    };
    return d->loaded->backend.op->sample(d->loaded->backend.ctx, &args);
}
