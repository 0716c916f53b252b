/* The writer of ledgers: an empty file or the first steps of another, steps, and the packed form. Layer: io. See ledger_file.h. */
#include "br_mem.h"
#include "h5_stream.h"
#include "ledger_layout.h"

#include <stdio.h>
#include <string.h>

struct ledger_writer {
    h5_stream stream;
    int64_t n_step, n_seq, n_tok;
};

/* ---- an empty file ---------------------------------------------------------------------------------------------------- */

static br_status write_run(ledger_writer *w, const ledger_run *run, const char *config) {
    const int64_t zero = 0;
    for (int c = LEDGER_COL_FIELD; c < LEDGER_COLUMN_COUNT; c++)
        if (ledger_columns[c].space == LEDGER_SPACE_RUN)
            BR_TRY(h5_stream_rows(&w->stream, c, 0, 1, (const char *)run + ledger_columns[c].field));
    BR_TRY(h5_stream_rows(&w->stream, LEDGER_COL_CONFIG, 0, run->n_config, config));
    BR_TRY(h5_stream_rows(&w->stream, LEDGER_COL_SEQ_BEGIN, 0, 1, &zero));
    return h5_stream_rows(&w->stream, LEDGER_COL_OFFSET, 0, 1, &zero);
}

static br_status create_all(ledger_writer *w, const char *path, const ledger_run *run, const char *config, int packed) {
    BR_TRY(h5_stream_create(&w->stream, path, packed, ledger_columns, LEDGER_COLUMN_COUNT));
    BR_TRY(h5_stream_text(&w->stream, "format", LEDGER_FORMAT));
    BR_TRY(h5_stream_text(&w->stream, "format_version", "1"));
    BR_TRY(h5_stream_columns(&w->stream));
    return write_run(w, run, config);
}

static br_status close_writer(ledger_writer *w) {
    br_status status = h5_stream_close(&w->stream);
    h5_stream_discard(&w->stream);
    br_mem_free(w);
    return status;
}

/* ---- a file in its place ---------------------------------------------------------------------------------------------- */

static br_status commit(ledger_writer *w) {
    const uint64_t count[H5_SPACE_MAX] = {[LEDGER_SPACE_STEP] = (uint64_t)w->n_step, [LEDGER_SPACE_SEQ] = (uint64_t)w->n_seq,
                                          [LEDGER_SPACE_TOK] = (uint64_t)w->n_tok};
    return h5_stream_commit(&w->stream, count);
}

static br_status copy_steps(ledger_writer *w, const ledger_reader *from, int64_t n_step) {
    const int64_t n_seq = ledger_seq_begin(from)[n_step], n_tok = ledger_offset(from)[n_seq];
    const int64_t rows[] = {[LEDGER_SPACE_STEP] = n_step, [LEDGER_SPACE_SEQ] = n_seq, [LEDGER_SPACE_TOK] = n_tok};
    for (int c = 0; c < LEDGER_COLUMN_COUNT; c++) {
        const int32_t space = ledger_columns[c].space;
        const int one_more = c == LEDGER_COL_SEQ_BEGIN || c == LEDGER_COL_OFFSET;
        if (space != LEDGER_SPACE_RUN)
            BR_TRY(h5_stream_rows(&w->stream, c, 0, rows[space] + one_more, ledger_reader_column(from, c)));
    }
    w->n_step = n_step;
    w->n_seq = n_seq;
    w->n_tok = n_tok;
    return BR_OK;
}

/* The file with the first n_step steps of `from`, or with none, committed and at `path`. packed: its finished form; else a stream. */
static br_status open_writer(const char *path, const ledger_run *run, const char *config, int packed, const ledger_reader *from, int64_t n_step,
                             ledger_writer **out) {
    br_status status;
    ledger_writer *w;
    ledger_run stored = *run;
    stored.n_step_closed = packed ? n_step : -1;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "the ledger's writer"));
    BR_TRY_GOTO(create_all(w, path, &stored, config, packed), fail);
    if (from)
        BR_TRY_GOTO(copy_steps(w, from, n_step), fail);
    BR_TRY_GOTO(commit(w), fail);
    *out = w;
    return BR_OK;
fail:
    (void)close_writer(w);
    return status;
}

/* The finished form of the file at `path`, which is closed and committed. */
static br_status pack(const char *path) {
    ledger_reader *reader = NULL;
    ledger_writer *w = NULL;
    BR_TRY(ledger_open(path, &reader));
    br_status status = open_writer(path, ledger_run_of(reader), ledger_config_of(reader), 1, reader, ledger_step_count(reader), &w);
    br_mem_free(w);
    ledger_close(reader);
    return status;
}

/* ---- the public writer ------------------------------------------------------------------------------------------------ */

br_status ledger_writer_open(const char *path, const ledger_run *run, const char *config, const ledger_reader *prefix, int64_t n_step,
                             ledger_writer **out) {
    h5_scope scope = h5_scope_begin();
    br_status status = open_writer(path, run, config, 0, prefix, n_step, out);
    h5_scope_end(scope);
    return status;
}

/* The rows of a column of one step, side by side. */
static void gather(const h5_column *column, const br_ledger_record *record, const ledger_seq *seq, char *to) {
    const size_t row_bytes = h5_column_row_bytes(column);
    if (column->space == LEDGER_SPACE_STEP)
        memcpy(to, (const char *)record + column->field, row_bytes);
    for (int64_t i = 0; i < record->n_seq && column->space != LEDGER_SPACE_STEP; i++) {
        const void *from = (const char *)&seq[i] + column->field;
        size_t n = row_bytes;
        if (column->space == LEDGER_SPACE_TOK) {
            memcpy(&from, from, sizeof from);
            n *= (size_t)seq[i].n_tok;
        }
        memcpy(to, from, n);
        to += n;
    }
}

static br_status append_rows(ledger_writer *w, const br_ledger_record *record, const ledger_seq *seq, char *buffer) {
    const int64_t begin[] = {[LEDGER_SPACE_STEP] = w->n_step, [LEDGER_SPACE_SEQ] = w->n_seq, [LEDGER_SPACE_TOK] = w->n_tok};
    const int64_t rows[] = {[LEDGER_SPACE_STEP] = 1, [LEDGER_SPACE_SEQ] = record->n_seq, [LEDGER_SPACE_TOK] = record->n_tok};
    for (int c = LEDGER_COL_ID; c < LEDGER_COLUMN_COUNT; c++) {
        const h5_column *column = &ledger_columns[c];
        if (column->space == LEDGER_SPACE_RUN)
            continue;
        gather(column, record, seq, buffer);
        BR_TRY(h5_stream_rows(&w->stream, c, begin[column->space], rows[column->space], buffer));
    }
    int64_t *offset = (int64_t *)(void *)buffer, at = w->n_tok;
    for (int64_t i = 0; i < record->n_seq; i++)
        offset[i] = at += seq[i].n_tok;
    BR_TRY(h5_stream_rows(&w->stream, LEDGER_COL_OFFSET, w->n_seq + 1, record->n_seq, offset));
    offset[0] = w->n_seq + record->n_seq;
    BR_TRY(h5_stream_rows(&w->stream, LEDGER_COL_SEQ_BEGIN, w->n_step + 1, 1, offset));
    w->n_step++;
    w->n_seq += record->n_seq;
    w->n_tok += record->n_tok;
    return commit(w);
}

br_status ledger_writer_append(ledger_writer *w, const br_ledger_record *record, const ledger_seq *seq) {
    char *buffer;
    const size_t by_seq = ((size_t)record->n_seq + 1) * LEDGER_UID_BYTES, by_tok = (size_t)record->n_tok * sizeof(uint32_t);
    BR_TRY(h5_stream_check(&w->stream));
    BR_TRY(br_mem_alloc((void **)&buffer, by_seq > by_tok ? by_seq : by_tok, "the rows of a step"));
    h5_scope scope = h5_scope_begin();
    br_status status = append_rows(w, record, seq, buffer);
    h5_scope_end(scope);
    br_mem_free(buffer);
    return status;
}

br_status ledger_writer_close(ledger_writer *w) {
    char path[BR_PATH_BYTES];
    if (!w)
        return BR_OK;
    memcpy(path, w->stream.path, sizeof path);
    h5_scope scope = h5_scope_begin();
    br_status status = close_writer(w);
    if (status == BR_OK)
        status = pack(path);
    h5_scope_end(scope);
    return status;
}
