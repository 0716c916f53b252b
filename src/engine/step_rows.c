/* Rows of a step; see step_rows.h. */
#include "step_rows.h"

static void lay_out(void *owner, br_arena *arena) {
    step_rows *r = owner;
    const size_t n_row = (size_t)r->n_row_max, n_seg = (size_t)r->n_seg_max;
    r->seg = BR_ARENA_ARRAY(arena, bi_seg, n_seg);
    r->row_seg = BR_ARENA_ARRAY(arena, int32_t, n_row);
    r->token = BR_ARENA_ARRAY(arena, int32_t, n_row);
    r->row_slot = BR_ARENA_ARRAY(arena, int32_t, n_row);
    r->row_fault = BR_ARENA_ARRAY(arena, uint32_t, n_row);
    r->state_index = BR_ARENA_ARRAY(arena, int32_t, n_seg);
    r->page = BR_ARENA_ARRAY(arena, int32_t, n_seg * (size_t)(r->page_ld ? r->page_ld : 1));
}

size_t step_rows_bytes(int32_t n_row_max, int32_t n_seg_max, int32_t page_ld) {
    step_rows r = {.n_row_max = n_row_max, .n_seg_max = n_seg_max, .page_ld = page_ld};
    return br_arena_measure(lay_out, &r);
}

br_status step_rows_open(step_rows *r, br_device *device, int32_t n_row_max, int32_t n_seg_max, int32_t page_ld) {
    *r = (step_rows){.device = device, .n_row_max = n_row_max, .n_seg_max = n_seg_max, .page_ld = page_ld};
    BR_TRY(br_mirror_lay_out(device, lay_out, r, "the rows of a step", &r->in));
    for (int32_t i = 0; i < n_seg_max; i++)
        r->state_index[i] = i;
    return BR_OK;
}

void step_rows_close(step_rows *r) {
    if (r->device)
        br_mirror_close(r->device, &r->in);
}

void step_rows_begin(step_rows *r) {
    r->host = (bi_batch){.seg = r->seg, .row_seg = r->row_seg};
}

void step_rows_add(step_rows *r, int32_t seq, int32_t pos, const int32_t *token, int32_t n_tok, int32_t slot) {
    bi_batch *b = &r->host;
    BR_ASSERT(b->n_seg < r->n_seg_max && n_tok <= r->n_row_max - b->n_row);
    r->seg[b->n_seg] = (bi_seg){.seq = seq, .row = b->n_row, .n_row = n_tok, .pos = pos};
    for (int32_t t = 0; t < n_tok; t++) {
        r->row_seg[b->n_row + t] = b->n_seg;
        r->token[b->n_row + t] = token[t];
        r->row_slot[b->n_row + t] = slot;
    }
    b->n_row += n_tok;
    b->n_seg++;
    b->seg_row_max = n_tok > b->seg_row_max ? n_tok : b->seg_row_max;
    b->pos_max = pos + n_tok - 1 > b->pos_max ? pos + n_tok - 1 : b->pos_max;
}

void step_rows_pad(step_rows *r, int32_t n_row, int32_t pos_max) {
    bi_batch *b = &r->host;
    BR_ASSERT(n_row <= r->n_row_max && n_row <= r->n_seg_max && b->n_row == b->n_seg);
    for (int32_t t = b->n_row; t < n_row; t++) {
        r->seg[t] = (bi_seg){.seq = 0, .row = t, .n_row = 0, .pos = 0};
        r->row_seg[t] = -1;
        r->token[t] = 0;
        r->row_slot[t] = -1;
    }
    b->n_row = b->n_seg = n_row;
    b->pos_max = pos_max;
}

br_status step_rows_upload(step_rows *r, br_step *step) {
    const br_mirror *in = &r->in;
    r->batch = r->host;
    r->batch.seg = br_mirror_at(in, r->seg);
    r->batch.row_seg = br_mirror_at(in, r->row_seg);
    step->batch = &r->batch;
    step->token = br_mirror_at(in, r->token);
    step->row_slot = br_mirror_at(in, r->row_slot);
    step->row_fault = br_mirror_at(in, r->row_fault);
    step->state_index = br_mirror_at(in, r->state_index);
    step->page_table = r->page_ld ? br_mirror_at(in, r->page) : NULL;
    step->page_first = r->page_ld ? NULL : br_mirror_at(in, r->page);
    step->page_ld = r->page_ld;
    if (br_device_is_host(r->device)) /* ops write faults into the host side, and no upload clears them */
        for (int32_t t = 0; t < r->host.n_row; t++)
            r->row_fault[t] = 0;
    return br_device_upload(r->device, in->device, in->host, in->bytes);
}
