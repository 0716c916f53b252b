/* The writer of rollout files: create, append, commit, and the two copies, resume and close. Layer: io.
 * See rollout_file.h. */
#include "br_mem.h"
#include "h5_stream.h"
#include "rollout_read.h"

#include <stdio.h>
#include <string.h>

struct rollout_writer {
    h5_stream stream;
    rollout_meta meta;
    h5_column column[ROLLOUT_COLUMN_COUNT];
    int64_t n_seq, n_tok, n_commit, n_pending;
    br_digest link; /* the last of the chain */
};

/* ---- an empty file ---------------------------------------------------------------------------------------------------- */

static br_status write_attributes(rollout_writer *w) {
    char text[H5_TEXT_BYTES];
    for (int i = 0; i < ROLLOUT_FIXED_COUNT; i++)
        BR_TRY(h5_stream_text(&w->stream, rollout_fixed_name(i), rollout_fixed_text(i)));
    for (int i = 0; i < ROLLOUT_ATTRIBUTE_COUNT; i++) {
        rollout_attribute_text(i, &w->meta, text);
        BR_TRY(h5_stream_text(&w->stream, rollout_attribute_name(i), text));
    }
    br_digest_text(rollout_meta_digest(&w->meta), text);
    return h5_stream_text(&w->stream, ROLLOUT_META_DIGEST_NAME, text);
}

static br_status check_meta(const char *path, const rollout_meta *meta) {
    if (meta->n_top < 0 || meta->n_top > BR_TOP_LOGPROBS_MAX || meta->has_entropy < 0 || meta->has_entropy > 1)
        return br_fail(BR_E_ARG, "%s: %d alternatives a token and entropy %d: expected 0 to %d and 0 or 1", path,
                       meta->n_top, meta->has_entropy, BR_TOP_LOGPROBS_MAX);
    return BR_OK;
}

static br_status create_all(rollout_writer *w, const char *path, int packed) {
    const int64_t zero = 0;
    BR_TRY(h5_stream_create(&w->stream, path, packed, w->column, ROLLOUT_COLUMN_COUNT));
    BR_TRY(write_attributes(w));
    BR_TRY(h5_stream_columns(&w->stream));
    return h5_stream_rows(&w->stream, ROLLOUT_COL_OFFSET, 0, 1, &zero);
}

/* A stream that never came to its place leaves nothing. */
static br_status close_writer(rollout_writer *w) {
    br_status status = h5_stream_close(&w->stream);
    h5_stream_discard(&w->stream);
    br_mem_free(w);
    return status;
}

/* ---- a file in its place ---------------------------------------------------------------------------------------------- */

static br_status commit(rollout_writer *w) {
    const uint64_t count[H5_SPACE_MAX] = {
        [ROLLOUT_SPACE_SEQ] = (uint64_t)w->n_seq, [ROLLOUT_SPACE_TOK] = (uint64_t)w->n_tok, (uint64_t)w->n_commit + 1};
    BR_TRY(h5_stream_commit(&w->stream, count));
    w->n_commit++;
    w->n_pending = 0;
    return BR_OK;
}

static br_status copy_columns(rollout_writer *w, const rollout_reader *from) {
    int64_t n_seq = rollout_seq_count(from), n_tok = rollout_tok_count(from);
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        if (w->column[c].width)
            BR_TRY(h5_stream_rows(&w->stream, c, 0, rollout_column_rows(c, n_seq, n_tok), rollout_reader_column(from, c)));
    w->n_seq = n_seq;
    w->n_tok = n_tok;
    if (n_seq > 0)
        w->link = rollout_reader_link(from, n_seq - 1);
    return BR_OK;
}

/* The file with the sequences of `from`, committed and at `path`; with none it stays "path.part" until the first commit. packed: its finished
 * form; else a stream. */
static br_status open_writer(const char *path, const rollout_meta *meta, int packed, const rollout_reader *from, rollout_writer **out) {
    br_status status;
    rollout_writer *w;
    *out = NULL;
    BR_TRY(check_meta(path, meta));
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "the rollout writer"));
    w->meta = *meta;
    w->meta.n_seq_closed = packed ? rollout_seq_count(from) : -1;
    snprintf(w->meta.engine_build, sizeof w->meta.engine_build, "%s", BR_VERSION_TEXT);
    rollout_columns(meta, w->column);
    w->link = rollout_chain_first(meta);
    BR_TRY_GOTO(create_all(w, path, packed), fail);
    if (from) {
        BR_TRY_GOTO(copy_columns(w, from), fail);
        BR_TRY_GOTO(commit(w), fail);
    }
    *out = w;
    return BR_OK;
fail:
    (void)close_writer(w);
    return status;
}

/* The finished form of the file at `path`, which is closed and committed. */
static br_status pack(const char *path) {
    rollout_reader *reader = NULL;
    rollout_writer *w = NULL;
    BR_TRY(rollout_open(path, &reader));
    br_status status = open_writer(path, rollout_reader_meta(reader), 1, reader, &w);
    br_mem_free(w);
    rollout_reader_close(reader);
    return status;
}

/* ---- the public writer ------------------------------------------------------------------------------------------------ */

br_status rollout_create(const char *path, const rollout_meta *meta, rollout_writer **out) {
    h5_scope scope = h5_scope_begin();
    br_status status = open_writer(path, meta, 0, NULL, out);
    h5_scope_end(scope);
    return status;
}

static br_status check_same_run(const char *path, const rollout_meta *have, const rollout_meta *want) {
    const struct { const char *what; br_digest have, want; } pair[] = {
        {"weights digest", have->weights_digest, want->weights_digest},
        {"contract digest", have->contract_digest, want->contract_digest},
        {"config digest", have->config_digest, want->config_digest},
    };
    for (size_t i = 0; i < sizeof pair / sizeof pair[0]; i++) {
        char a[BR_DIGEST_TEXT_BYTES], b[BR_DIGEST_TEXT_BYTES];
        br_digest_text(pair[i].have, a);
        br_digest_text(pair[i].want, b);
        if (strcmp(a, b) != 0)
            return br_fail(BR_E_ARG, "%s: cannot resume: its %s is %s, this run's is %s", path, pair[i].what, a, b);
    }
    if (strcmp(have->producer, want->producer) != 0 || have->has_entropy != want->has_entropy || have->n_top != want->n_top)
        return br_fail(
            BR_E_ARG,
            "%s: cannot resume: it is of a %s with entropy %d and %d alternatives, this run of a %s with %d and %d", path,
            have->producer, have->has_entropy, have->n_top, want->producer, want->has_entropy, want->n_top);
    if (!br_digest_equal(have->run_uid, want->run_uid)) /* what it holds is as this run would have it, or the caller has not looked */
        return br_fail(BR_E_ARG, "%s: cannot resume: of what it does not hold yet, prompts, samples, settings or adapters are others than when it "
                       "was begun", path);
    return BR_OK;
}

br_status rollout_resume(const char *path, const rollout_meta *meta, rollout_writer **out) {
    br_status status;
    rollout_reader *prefix = NULL;
    h5_scope scope = h5_scope_begin();
    *out = NULL;
    BR_TRY_GOTO(rollout_open(path, &prefix), exit);
    BR_TRY_GOTO(check_same_run(path, rollout_reader_meta(prefix), meta), exit);
    BR_TRY_GOTO(open_writer(path, meta, 0, prefix, out), exit);
exit:
    rollout_reader_close(prefix);
    h5_scope_end(scope);
    return status;
}

/* What lies behind the end of a text, and in unused stop slots, is not the caller's to choose: equal runs give
 * equal bytes. */
static rollout_seq canonical(const rollout_seq *seq) {
    rollout_seq row = *seq;
    memset(row.uid, 0, sizeof row.uid);
    memcpy(row.uid, seq->uid, strnlen(seq->uid, sizeof seq->uid));
    memset(row.adapter, 0, sizeof row.adapter);
    memcpy(row.adapter, seq->adapter, strnlen(seq->adapter, sizeof seq->adapter));
    for (int i = row.n_stop < 0 ? 0 : row.n_stop; i < BR_STOP_MAX; i++)
        row.stop_token[i] = -1;
    return row;
}

static br_status append_rows(rollout_writer *w, const rollout_seq *row) {
    int64_t end = w->n_tok + row->n_tok;
    br_digest link = br_hash_chain(w->link, &row->receipt, sizeof row->receipt);
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++) {
        const h5_column *form = &w->column[c];
        const int by_token = form->space == ROLLOUT_SPACE_TOK;
        if (!form->width || form->field == H5_NO_FIELD)
            continue;
        const void *rows = (const char *)row + form->field;
        if (by_token)
            memcpy(&rows, rows, sizeof rows);
        BR_TRY(h5_stream_rows(&w->stream, c, by_token ? w->n_tok : w->n_seq, by_token ? row->n_tok : 1, rows));
    }
    BR_TRY(h5_stream_rows(&w->stream, ROLLOUT_COL_OFFSET, w->n_seq + 1, 1, &end));
    BR_TRY(h5_stream_rows(&w->stream, ROLLOUT_COL_CHAIN, w->n_seq, 1, &link));
    w->n_seq++;
    w->n_tok = end;
    w->n_pending++;
    w->link = link;
    return BR_OK;
}

br_status rollout_append(rollout_writer *w, const rollout_seq *seq) {
    BR_TRY(h5_stream_check(&w->stream));
    if ((w->meta.has_entropy && !seq->entropy) || (w->meta.n_top > 0 && (!seq->top_token || !seq->top_logprob)))
        return br_fail(BR_E_ARG, "%s: sequence %lld comes without the entropy or the alternatives that the file has",
                       w->stream.path, (long long)w->n_seq);
    rollout_seq row = canonical(seq);
    BR_TRY(rollout_seq_check(BR_E_ARG, w->stream.path, w->n_seq, &w->meta, &row));
    h5_scope scope = h5_scope_begin();
    br_status status = append_rows(w, &row);
    h5_scope_end(scope);
    return status;
}

br_status rollout_commit(rollout_writer *w) {
    BR_TRY(h5_stream_check(&w->stream));
    if (w->n_pending == 0)
        return BR_OK;
    h5_scope scope = h5_scope_begin();
    br_status status = commit(w);
    h5_scope_end(scope);
    return status;
}

br_status rollout_close(rollout_writer *w) {
    char path[BR_PATH_BYTES];
    if (!w)
        return BR_OK;
    memcpy(path, w->stream.path, sizeof path);
    br_status status = rollout_commit(w);
    h5_scope scope = h5_scope_begin();
    if (status == BR_OK && !w->stream.in_place)
        status = commit(w); /* of no sequence */
    br_status closed = close_writer(w);
    status = status == BR_OK ? closed : status;
    if (status == BR_OK)
        status = pack(path);
    h5_scope_end(scope);
    return status;
}

void rollout_abandon(rollout_writer *w) {
    if (!w)
        return;
    h5_scope scope = h5_scope_begin();
    (void)close_writer(w);
    h5_scope_end(scope);
}
