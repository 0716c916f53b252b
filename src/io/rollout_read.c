/* The reader of rollout files: everything that was committed, in memory, checked. Layer: io. See rollout_file.h. */
#include "rollout_read.h"
#include "br_mem.h"
#include "h5_source.h"
#include "ledger_file.h"

#include <stdio.h>
#include <string.h>

struct rollout_reader {
    h5_source source; /* open only inside rollout_open */
    rollout_meta meta;
    br_digest meta_digest;
    int64_t n_seq, n_tok;
    h5_column form[ROLLOUT_COLUMN_COUNT];
    void *column[ROLLOUT_COLUMN_COUNT];
};

static const int64_t *offsets_of(const rollout_reader *r) {
    return r->column[ROLLOUT_COL_OFFSET];
}

/* ---- file and attributes ---------------------------------------------------------------------------------------------- */

static br_status read_fixed(const rollout_reader *r, const char *name, const char *wanted) {
    char text[H5_TEXT_BYTES];
    BR_TRY(h5_source_text(&r->source, name, text));
    if (strcmp(text, wanted) != 0)
        return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': expected '%s'", r->source.path, name, text, wanted);
    return BR_OK;
}

static br_status read_attributes(rollout_reader *r) {
    char text[H5_TEXT_BYTES];
    for (int i = 0; i < ROLLOUT_FIXED_COUNT; i++)
        BR_TRY(read_fixed(r, rollout_fixed_name(i), rollout_fixed_text(i)));
    for (int i = 0; i < ROLLOUT_ATTRIBUTE_COUNT; i++) {
        BR_TRY(h5_source_text(&r->source, rollout_attribute_name(i), text));
        if (!rollout_attribute_parse(i, text, &r->meta))
            return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': not a value of it", r->source.path, rollout_attribute_name(i),
                           text);
    }
    BR_TRY(h5_source_text(&r->source, ROLLOUT_META_DIGEST_NAME, text));
    if (!rollout_digest_parse(text, &r->meta_digest))
        return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': expected 32 hex digits", r->source.path, ROLLOUT_META_DIGEST_NAME,
                       text);
    snprintf(r->meta.logprob_kind, sizeof r->meta.logprob_kind, "%s", ROLLOUT_LOGPROB_KIND);
    snprintf(r->meta.source, sizeof r->meta.source, "bitroll");
    return BR_OK;
}

static br_status read_foreign_text(const rollout_reader *r, const char *name, char *field, size_t n_byte) {
    char text[H5_TEXT_BYTES];
    BR_TRY(h5_source_text(&r->source, name, text));
    if (strlen(text) == 0 || strlen(text) >= n_byte)
        return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': expected a text of 1 to %zu bytes", r->source.path, name, text, n_byte - 1);
    memcpy(field, text, strlen(text) + 1);
    return BR_OK;
}

static br_status read_foreign_attributes(rollout_reader *r) {
    r->meta.is_foreign = 1;
    BR_TRY(read_fixed(r, "format_version", "1"));
    BR_TRY(read_foreign_text(r, "producer", r->meta.producer, sizeof r->meta.producer));
    BR_TRY(read_foreign_text(r, "source", r->meta.source, sizeof r->meta.source));
    return read_foreign_text(r, "logprob_kind", r->meta.logprob_kind, sizeof r->meta.logprob_kind);
}

/* ---- datasets --------------------------------------------------------------------------------------------------------- */

static void name_rows(const void *owner, const h5_column *column, int64_t begin, int64_t end, char *text, size_t n) {
    const rollout_reader *r = owner;
    const int64_t *offset = offsets_of(r);
    int64_t first = 0, last = r->n_seq - 1;
    if (column->space == ROLLOUT_SPACE_SEQ) {
        snprintf(text, n, "sequences %lld..%lld", (long long)begin, (long long)end - 1);
        return;
    }
    while (offset[first + 1] <= begin)
        first++;
    while (offset[last] >= end)
        last--;
    snprintf(text, n, "sequences %lld..%lld (tokens %lld..%lld of the file)", (long long)first, (long long)last,
             (long long)begin, (long long)end - 1);
}

static br_status take_counts(rollout_reader *r, uint64_t n_seq, uint64_t n_tok) {
    if (n_seq > INT32_MAX || n_tok > n_seq * ROLLOUT_SEQ_TOK_MAX || n_tok < n_seq)
        return br_fail(BR_E_FORMAT, "%s: %llu sequences with %llu tokens: expected 1 to 2^20 tokens each", r->source.path,
                       (unsigned long long)n_seq, (unsigned long long)n_tok);
    r->n_seq = (int64_t)n_seq;
    r->n_tok = (int64_t)n_tok;
    return BR_OK;
}

static br_status read_commit(rollout_reader *r) {
    uint64_t count[H5_SPACE_MAX];
    BR_TRY(h5_source_commit(&r->source, count));
    return take_counts(r, count[ROLLOUT_SPACE_SEQ], count[ROLLOUT_SPACE_TOK]);
}

/* A dump of another stack is whole or not there: its sizes are those of its datasets. */
static br_status read_foreign_counts(rollout_reader *r) {
    hsize_t offset[2], token[2];
    BR_TRY(h5_source_size(&r->source, r->form[ROLLOUT_COL_OFFSET].path, offset));
    BR_TRY(h5_source_size(&r->source, r->form[ROLLOUT_COL_TOKEN].path, token));
    if (offset[0] < 1)
        return br_fail(BR_E_FORMAT, "%s: %s has no row: expected one more than there are sequences", r->source.path,
                       r->form[ROLLOUT_COL_OFFSET].path);
    return take_counts(r, offset[0] - 1, token[0]);
}

static br_status find_optional(rollout_reader *r) {
    hsize_t size[2];
    const h5_source *s = &r->source;
    const char *top = r->form[ROLLOUT_COL_TOP_TOKEN].path;
    if (!h5_source_has(s, "/tokens"))
        return br_fail(BR_E_FORMAT, "%s: expected a group /tokens", s->path);
    r->meta.has_entropy = !r->meta.is_foreign && h5_source_has(s, r->form[ROLLOUT_COL_ENTROPY].path);
    if (!h5_source_has(s, top))
        return BR_OK;
    BR_TRY(h5_source_size(s, top, size));
    if (size[1] < 1 || size[1] > BR_TOP_LOGPROBS_MAX)
        return br_fail(BR_E_FORMAT, "%s: %s has rows of %llu: expected 1 to %d", s->path, top, (unsigned long long)size[1],
                       BR_TOP_LOGPROBS_MAX);
    r->meta.n_top = (int32_t)size[1];
    return BR_OK;
}

static br_status check_offsets(const rollout_reader *r) {
    const int64_t *offset = offsets_of(r);
    if (offset[0] != 0 || offset[r->n_seq] != r->n_tok)
        return br_fail(BR_E_FORMAT, "%s: offsets run from %lld to %lld: expected 0 to %lld", r->source.path, (long long)offset[0],
                       (long long)offset[r->n_seq], (long long)r->n_tok);
    for (int64_t i = 0; i < r->n_seq; i++)
        if (offset[i] >= offset[i + 1] || offset[i + 1] - offset[i] > ROLLOUT_SEQ_TOK_MAX || offset[i + 1] > r->n_tok)
            return br_fail(BR_E_FORMAT, "%s: sequence %lld: offsets %lld to %lld: expected 1 to 2^20 tokens of %lld",
                           r->source.path, (long long)i, (long long)offset[i], (long long)offset[i + 1], (long long)r->n_tok);
    return BR_OK;
}

static br_status read_columns(rollout_reader *r) {
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++) {
        if (r->form[c].width)
            BR_TRY(h5_source_column(&r->source, &r->form[c], rollout_column_rows(c, r->n_seq, r->n_tok), &r->column[c]));
        if (c == ROLLOUT_COL_OFFSET)
            BR_TRY(check_offsets(r));
    }
    return BR_OK;
}

/* What the file says about itself, and how many rows it has. */
static br_status read_head(rollout_reader *r, int may_be_foreign) {
    char format[H5_TEXT_BYTES];
    BR_TRY(h5_source_text(&r->source, "format", format));
    rollout_columns(&r->meta, r->form);
    if (strcmp(format, LEDGER_FORMAT) == 0)
        return br_fail(BR_E_FORMAT, "%s: the ledger of a training run, not a rollout file: bitroll verify checks it", r->source.path);
    if (strcmp(format, ROLLOUT_FORMAT_FOREIGN) == 0) {
        if (!may_be_foreign)
            return br_fail(BR_E_FORMAT, "%s: a dump of another stack, not a rollout file: bitroll parity --foreign compares it", r->source.path);
        BR_TRY(read_foreign_attributes(r));
        return read_foreign_counts(r);
    }
    BR_TRY(read_attributes(r));
    return read_commit(r);
}

static br_status read_all(rollout_reader *r, const char *path, int may_be_foreign) {
    BR_TRY(h5_source_open(&r->source, path));
    BR_TRY(read_head(r, may_be_foreign));
    BR_TRY(find_optional(r));
    rollout_columns(&r->meta, r->form);
    BR_TRY(read_columns(r));
    for (int64_t i = 0; i < r->n_seq; i++) {
        rollout_seq seq;
        rollout_seq_at(r, i, &seq);
        BR_TRY(rollout_seq_check(BR_E_FORMAT, r->source.path, i, &r->meta, &seq));
    }
    return BR_OK;
}

/* ---- the public reader ------------------------------------------------------------------------------------------------ */

static br_status open_reader(const char *path, int may_be_foreign, rollout_reader **out) {
    br_status status;
    rollout_reader *r = NULL;
    h5_scope scope = h5_scope_begin();
    *out = NULL;
    BR_TRY_GOTO(br_mem_alloc((void **)&r, sizeof *r, "the rollout reader"), exit);
    r->source = (h5_source){.name_rows = name_rows, .owner = r};
    status = read_all(r, path, may_be_foreign);
    h5_source_close(&r->source);
    if (status == BR_OK)
        *out = r;
    else
        rollout_reader_close(r);
exit:
    h5_scope_end(scope);
    return status;
}

br_status rollout_open(const char *path, rollout_reader **out) {
    return open_reader(path, 0, out);
}

br_status rollout_open_foreign(const char *path, rollout_reader **out) {
    return open_reader(path, 1, out);
}

void rollout_reader_close(rollout_reader *r) {
    if (!r)
        return;
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        br_mem_free(r->column[c]);
    br_mem_free(r);
}

const rollout_meta *rollout_reader_meta(const rollout_reader *r) {
    return &r->meta;
}

int64_t rollout_seq_count(const rollout_reader *r) {
    return r->n_seq;
}

int64_t rollout_tok_count(const rollout_reader *r) {
    return r->n_tok;
}

const void *rollout_reader_column(const rollout_reader *r, int column) {
    return r->column[column];
}

void rollout_seq_at(const rollout_reader *r, int64_t i, rollout_seq *out) {
    const int64_t *offset = offsets_of(r);
    BR_ASSERT(i >= 0 && i < r->n_seq);
    memset(out, 0, sizeof *out);
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++) {
        const h5_column *form = &r->form[c];
        if (!r->column[c] || form->field == H5_NO_FIELD)
            continue;
        size_t row_bytes = h5_column_row_bytes(form);
        const char *row = (const char *)r->column[c] + row_bytes * (size_t)(form->space == ROLLOUT_SPACE_TOK ? offset[i] : i);
        if (form->space == ROLLOUT_SPACE_TOK)
            memcpy((char *)out + form->field, &row, sizeof row);
        else
            memcpy((char *)out + form->field, row, row_bytes);
    }
    out->n_tok = (int32_t)(offset[i + 1] - offset[i]);
    out->uid_hash = br_hash_xxh64(out->uid, strnlen(out->uid, sizeof out->uid));
}

br_digest rollout_reader_link(const rollout_reader *r, int64_t i) {
    br_digest link;
    BR_ASSERT(i >= 0 && i < r->n_seq);
    memcpy(&link, (const char *)r->column[ROLLOUT_COL_CHAIN] + (size_t)i * sizeof link, sizeof link);
    return link;
}

br_digest rollout_reader_meta_digest(const rollout_reader *r) {
    return r->meta_digest;
}
