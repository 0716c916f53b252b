/* The reader of ledgers: everything that was committed, in memory, bounds checked. Layer: io. See ledger_file.h. */
#include "br_mem.h"
#include "h5_source.h"
#include "ledger_layout.h"

#include <stdio.h>
#include <string.h>

struct ledger_reader {
    h5_source source; /* open only inside ledger_open */
    ledger_run run;
    int64_t n_step, n_seq, n_tok;
    void *column[LEDGER_COLUMN_COUNT];
};

const void *ledger_reader_column(const ledger_reader *r, int column) {
    return r->column[column];
}

const int64_t *ledger_seq_begin(const ledger_reader *r) {
    return r->column[LEDGER_COL_SEQ_BEGIN];
}

const int64_t *ledger_offset(const ledger_reader *r) {
    return r->column[LEDGER_COL_OFFSET];
}

/* Row `i` of every column of a space into the fields of its record. */
static void take_fields(const ledger_reader *r, int32_t space, int64_t i, void *record) {
    for (int c = LEDGER_COL_FIELD; c < LEDGER_COLUMN_COUNT; c++) {
        const h5_column *column = &ledger_columns[c];
        const size_t n = h5_column_row_bytes(column);
        if (column->space == space)
            memcpy((char *)record + column->field, (const char *)r->column[c] + (size_t)i * n, n);
    }
}

/* ---- reading ---------------------------------------------------------------------------------------------------------- */

static void name_rows(const void *owner, const h5_column *column, int64_t begin, int64_t end, char *text, size_t n) {
    static const char *const row[] = {"steps", "sequences", "tokens", "bytes"};
    (void)owner;
    snprintf(text, n, "%s %lld..%lld of the file", row[column->space], (long long)begin, (long long)end - 1);
}

static br_status read_format(const ledger_reader *r) {
    char text[H5_TEXT_BYTES];
    BR_TRY(h5_source_text(&r->source, "format", text));
    if (strcmp(text, LEDGER_FORMAT) != 0)
        return br_fail(BR_E_FORMAT, "%s: attribute format is '%s': expected '" LEDGER_FORMAT "'", r->source.path, text);
    BR_TRY(h5_source_text(&r->source, "format_version", text));
    if (strcmp(text, "1") != 0)
        return br_fail(BR_E_FORMAT, "%s: attribute format_version is '%s': expected '1'", r->source.path, text);
    return BR_OK;
}

static br_status read_commit(ledger_reader *r) {
    uint64_t count[H5_SPACE_MAX];
    BR_TRY(h5_source_commit(&r->source, count));
    const uint64_t n_step = count[LEDGER_SPACE_STEP], n_seq = count[LEDGER_SPACE_SEQ], n_tok = count[LEDGER_SPACE_TOK];
    if (n_step > INT32_MAX || n_seq > INT32_MAX || n_tok < n_seq || n_tok > n_seq * LEDGER_SEQ_TOK_MAX)
        return br_fail(BR_E_FORMAT, "%s: %llu steps, %llu sequences with %llu tokens: expected 1 to 2^20 tokens each", r->source.path,
                       (unsigned long long)n_step, (unsigned long long)n_seq, (unsigned long long)n_tok);
    r->n_step = (int64_t)n_step;
    r->n_seq = (int64_t)n_seq;
    r->n_tok = (int64_t)n_tok;
    return BR_OK;
}

/* Offsets rise from 0 to n_end, by `least` to `most` each. what: of which thing they bound. */
static br_status check_bounds(const ledger_reader *r, int column, const char *what, int64_t n, int64_t least, int64_t most, int64_t n_end) {
    const int64_t *at = r->column[column];
    const char *name = ledger_columns[column].path;
    if (at[0] != 0 || at[n] != n_end)
        return br_fail(BR_E_FORMAT, "%s: %s runs from %lld to %lld: expected 0 to %lld", r->source.path, name, (long long)at[0],
                       (long long)at[n], (long long)n_end);
    for (int64_t i = 0; i < n; i++)
        if (at[i + 1] < at[i] || at[i + 1] > n_end || at[i + 1] - at[i] < least || at[i + 1] - at[i] > most)
            return br_fail(BR_E_FORMAT, "%s: %s behind %s %lld is %lld: expected %lld to %lld more than %lld, at most %lld", r->source.path,
                           name, what, (long long)i, (long long)at[i + 1], (long long)least, (long long)most, (long long)at[i],
                           (long long)n_end);
    return BR_OK;
}

static br_status read_column(ledger_reader *r, int column, int64_t rows) {
    return h5_source_column(&r->source, &ledger_columns[column], rows, &r->column[column]);
}

/* What a later step trusts: that a text ends, that the config is as long as it says, that the counts are no surprise. */
static br_status check_fields(ledger_reader *r) {
    ledger_run *run = &r->run;
    take_fields(r, LEDGER_SPACE_RUN, 0, run);
    memcpy(run->format, LEDGER_FORMAT, sizeof run->format);
    run->version = LEDGER_FORMAT_VERSION;
    if (run->n_config < 0 || run->n_config > BR_LEDGER_CONFIG_BYTES_MAX)
        return br_fail(BR_E_FORMAT, "%s: /run/n_config is %lld: expected 0 to %d", r->source.path, (long long)run->n_config,
                       BR_LEDGER_CONFIG_BYTES_MAX);
    if (run->n_step_closed != -1 && run->n_step_closed != r->n_step)
        return br_fail(BR_E_FORMAT, "%s: /run/n_step_closed: the file was closed with %lld steps and holds %lld", r->source.path,
                       (long long)run->n_step_closed, (long long)r->n_step);
    for (int64_t i = 0; i < r->n_seq; i++) {
        ledger_seq seq;
        take_fields(r, LEDGER_SPACE_SEQ, i, &seq);
        if (seq.uid[LEDGER_UID_BYTES - 1])
            return br_fail(BR_E_FORMAT, "%s: /seq/uid of sequence %lld has no end", r->source.path, (long long)i);
    }
    return BR_OK;
}

static br_status read_all(ledger_reader *r, const char *path) {
    BR_TRY(h5_source_open(&r->source, path));
    BR_TRY(read_format(r));
    BR_TRY(read_commit(r));
    const int64_t rows[] = {
        [LEDGER_SPACE_STEP] = r->n_step, [LEDGER_SPACE_SEQ] = r->n_seq, [LEDGER_SPACE_TOK] = r->n_tok, [LEDGER_SPACE_RUN] = 1};
    BR_TRY(read_column(r, LEDGER_COL_SEQ_BEGIN, r->n_step + 1));
    BR_TRY(check_bounds(r, LEDGER_COL_SEQ_BEGIN, "step", r->n_step, 0, INT32_MAX, r->n_seq));
    BR_TRY(read_column(r, LEDGER_COL_OFFSET, r->n_seq + 1));
    BR_TRY(check_bounds(r, LEDGER_COL_OFFSET, "sequence", r->n_seq, 1, LEDGER_SEQ_TOK_MAX, r->n_tok));
    for (int c = LEDGER_COL_ID; c < LEDGER_COLUMN_COUNT; c++)
        BR_TRY(read_column(r, c, rows[ledger_columns[c].space]));
    BR_TRY(check_fields(r));
    return read_column(r, LEDGER_COL_CONFIG, r->run.n_config);
}

/* ---- the public reader ------------------------------------------------------------------------------------------------ */

br_status ledger_open(const char *path, ledger_reader **out) {
    br_status status;
    ledger_reader *r = NULL;
    h5_scope scope = h5_scope_begin();
    *out = NULL;
    BR_TRY_GOTO(br_mem_alloc((void **)&r, sizeof *r, "the ledger's reader"), exit);
    r->source = (h5_source){.name_rows = name_rows};
    status = read_all(r, path);
    h5_source_close(&r->source);
    if (status == BR_OK)
        *out = r;
    else
        ledger_close(r);
exit:
    h5_scope_end(scope);
    return status;
}

void ledger_close(ledger_reader *r) {
    if (!r)
        return;
    for (int c = 0; c < LEDGER_COLUMN_COUNT; c++)
        br_mem_free(r->column[c]);
    br_mem_free(r);
}

int ledger_is_at(const char *path) {
    char text[H5_TEXT_BYTES];
    h5_source source;
    h5_scope scope = h5_scope_begin();
    const int is = h5_source_open(&source, path) == BR_OK && h5_source_text(&source, "format", text) == BR_OK &&
                   strcmp(text, LEDGER_FORMAT) == 0;
    h5_source_close(&source);
    h5_scope_end(scope);
    return is;
}

const ledger_run *ledger_run_of(const ledger_reader *r) {
    return &r->run;
}

const char *ledger_config_of(const ledger_reader *r) {
    return r->column[LEDGER_COL_CONFIG];
}

int64_t ledger_step_count(const ledger_reader *r) {
    return r->n_step;
}

int64_t ledger_seq_count(const ledger_reader *r) {
    return r->n_seq;
}

int64_t ledger_tok_count(const ledger_reader *r) {
    return r->n_tok;
}

void ledger_record_at(const ledger_reader *r, int64_t step, br_ledger_record *out) {
    BR_ASSERT(step >= 0 && step < r->n_step);
    take_fields(r, LEDGER_SPACE_STEP, step, out);
}

void ledger_seq_at(const ledger_reader *r, int64_t i, int64_t begin, int64_t end, ledger_seq *out) {
    BR_ASSERT(i >= 0 && i < r->n_seq && begin >= 0 && begin <= end && end <= r->n_tok);
    take_fields(r, LEDGER_SPACE_SEQ, i, out);
    for (int c = LEDGER_COL_ID; c < LEDGER_COL_FIELD; c++) {
        const char *row = (const char *)r->column[c] + (size_t)begin * h5_column_row_bytes(&ledger_columns[c]);
        memcpy((char *)out + ledger_columns[c].field, &row, sizeof row);
    }
    out->n_tok = (int32_t)(end - begin);
}
