/* stage_lines: collects one line per (sequence, position, layer, stage) from a watched forward and hands them out sorted.
 * Layer: engine. A line holds a 64-bit hash of the bits that the stage shows of a row, and where asked the chosen ids. */
#ifndef STAGE_LINES_H
#define STAGE_LINES_H

#include "br_model.h"

enum { STAGE_PIECE_MAX = 3 };

typedef struct stage_line {
    int32_t seq, pos, layer;
    br_stage stage;
    uint64_t hash;
    int64_t choice; /* first id in the list of choices; -1 none */
    int32_t n_choice;
} stage_line;

typedef struct stage_lines {
    stage_line *line;
    int64_t n_line, n_line_room;
    int32_t *choice;
    int64_t n_choice, n_choice_room;
    int32_t want_choices;
    br_status status; /* first failure; later rows are dropped */
    /* which rows of the coming forward are looked at: row r is position pos[r] of sequence seq[r], seq -1: not wanted */
    const int32_t *row_seq, *row_pos;
    int32_t n_row;
    br_device *device; /* where the rows are */
    unsigned char *fetched; /* the rows of a stage, read back */
    size_t fetched_room;
} stage_lines;

void stage_lines_rows(void *lines, br_stage stage, int32_t layer, const br_piece *piece, int32_t n_piece); /* a br_trace.rows */
void stage_lines_add(stage_lines *lines, int32_t seq, int32_t pos, int32_t layer, br_stage stage, const void *bytes, size_t n);
void stage_lines_sort(stage_lines *lines);
void stage_lines_free(stage_lines *lines);

#endif
