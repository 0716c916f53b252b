/* Hashing rows between ops; see stage_lines.h. */
#include "stage_lines.h"

#include <stdlib.h>
#include <string.h>

/* A watched forward runs inside the sealed phase of a step, and a dump cannot know its number of lines before. */
static int make_room(stage_lines *lines, void **block, int64_t used, int64_t *room, size_t item_bytes) {
    if (used < *room)
        return 1;
    const int64_t grown = *room ? *room * 2 : 1024;
    const char *phase = br_mem_exempt_begin();
    lines->status = br_mem_grow(block, (size_t)*room * item_bytes, (size_t)grown * item_bytes, "stage lines");
    br_mem_exempt_end(phase);
    if (lines->status != BR_OK)
        return 0;
    *room = grown;
    return 1;
}

static stage_line *new_line(stage_lines *lines, int32_t seq, int32_t pos, int32_t layer, br_stage stage) {
    if (lines->status != BR_OK || !make_room(lines, (void **)&lines->line, lines->n_line, &lines->n_line_room, sizeof *lines->line))
        return NULL;
    stage_line *line = &lines->line[lines->n_line++];
    *line = (stage_line){.seq = seq, .pos = pos, .layer = layer, .stage = stage, .choice = -1};
    return line;
}

static void keep_choices(stage_lines *lines, stage_line *line, const int32_t *id, int64_t n) {
    line->choice = lines->n_choice;
    for (int64_t i = 0; i < n; i++) {
        if (!make_room(lines, (void **)&lines->choice, lines->n_choice, &lines->n_choice_room, sizeof *lines->choice))
            return;
        lines->choice[lines->n_choice++] = id[i];
    }
    line->n_choice = (int32_t)n;
}

static size_t whole(size_t bytes) {
    return (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

static br_status fetch(stage_lines *lines, const void *from, size_t bytes, size_t *used, const void **out) {
    *out = lines->fetched + *used;
    *used += whole(bytes);
    return br_device_download(lines->device, (void *)(uintptr_t)*out, from, bytes);
}

/* All rows that the pieces show, where the host can read them. */
static br_status fetch_all(stage_lines *lines, br_piece *piece, int32_t n_piece) {
    const size_t n_row = (size_t)lines->n_row, count_bytes = n_row * sizeof(int32_t);
    size_t need = 0, used = 0;
    for (int32_t i = 0; i < n_piece; i++)
        need += whole((size_t)piece[i].row_stride * n_row) + whole(count_bytes);
    if (need > lines->fetched_room) {
        const char *phase = br_mem_exempt_begin();
        br_status status = br_mem_grow((void **)&lines->fetched, 0, need, "rows of a stage");
        br_mem_exempt_end(phase);
        BR_TRY(status);
        lines->fetched_room = need;
    }
    for (int32_t i = 0; i < n_piece; i++) {
        BR_TRY(fetch(lines, piece[i].data, (size_t)piece[i].row_stride * n_row, &used, &piece[i].data));
        if (piece[i].row_count)
            BR_TRY(fetch(lines, piece[i].row_count, count_bytes, &used, (const void **)&piece[i].row_count));
    }
    return br_device_wait(lines->device);
}

void stage_lines_rows(void *context, br_stage stage, int32_t layer, const br_piece *shown, int32_t n_piece) {
    stage_lines *lines = context;
    br_piece piece[STAGE_PIECE_MAX];
    BR_ASSERT(n_piece <= STAGE_PIECE_MAX);
    memcpy(piece, shown, (size_t)n_piece * sizeof *piece);
    if (lines->status == BR_OK)
        lines->status = fetch_all(lines, piece, n_piece);
    if (lines->status != BR_OK)
        return;
    const int choices = lines->want_choices && (stage == BR_STAGE_ROUTE || stage == BR_STAGE_INDEX_TOPK);
    for (int32_t row = 0; row < lines->n_row; row++) {
        if (lines->row_seq[row] < 0)
            continue;
        br_hash_stream stream;
        br_hash_begin(&stream);
        for (int32_t i = 0; i < n_piece; i++) {
            const int64_t n = piece[i].row_bytes * (piece[i].row_count ? piece[i].row_count[row] : 1);
            br_hash_add(&stream, (const unsigned char *)piece[i].data + piece[i].row_stride * row, (size_t)n);
        }
        stage_line *line = new_line(lines, lines->row_seq[row], lines->row_pos[row], layer, stage);
        if (!line)
            return;
        line->hash = br_hash_end(&stream).lo;
        if (choices) { /* the ids are the first piece of both stages */
            const int64_t n = piece[0].row_count ? piece[0].row_count[row] : piece[0].row_bytes / (int64_t)sizeof(int32_t);
            keep_choices(lines, line, (const int32_t *)((const unsigned char *)piece[0].data + piece[0].row_stride * row), n);
        }
    }
}

void stage_lines_add(stage_lines *lines, int32_t seq, int32_t pos, int32_t layer, br_stage stage, const void *bytes, size_t n) {
    stage_line *line = new_line(lines, seq, pos, layer, stage);
    if (line)
        line->hash = br_hash_bytes(bytes, n).lo;
}

static int compare_lines(const void *left, const void *right) {
    const stage_line *a = left, *b = right;
    if (a->seq != b->seq)
        return a->seq < b->seq ? -1 : 1;
    if (a->pos != b->pos)
        return a->pos < b->pos ? -1 : 1;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return a->stage < b->stage ? -1 : a->stage > b->stage;
}

void stage_lines_sort(stage_lines *lines) {
    if (lines->n_line)
        qsort(lines->line, (size_t)lines->n_line, sizeof *lines->line, compare_lines);
}

void stage_lines_free(stage_lines *lines) {
    br_mem_free(lines->line);
    br_mem_free(lines->choice);
    br_mem_free(lines->fetched);
    memset(lines, 0, sizeof *lines);
}
