/* The writer of rollout files: create, append, commit, and the two copies, resume and close. Layer: io.
 * See rollout_file.h. */
#include "rollout_read.h"
#include "rollout_stream.h"

#include <string.h>

/* ---- copies ----------------------------------------------------------------------------------------------------------- */

static br_status copy_columns(rollout_writer *w, const rollout_reader *from) {
    int64_t n_seq = rollout_seq_count(from), n_tok = rollout_tok_count(from);
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        if (rollout_column_present(c, &w->meta))
            BR_TRY(rollout_stream_rows(w, c, 0, rollout_column_rows(c, n_seq, n_tok), rollout_reader_column(from, c)));
    w->n_seq = n_seq;
    w->n_tok = n_tok;
    if (n_seq > 0)
        w->link = rollout_reader_link(from, n_seq - 1);
    return BR_OK;
}

/* The finished form of the file at `path`, which is closed and committed. It is renamed only once HDF5 has closed it. */
static br_status pack(const char *path) {
    br_status status;
    rollout_reader *reader = NULL;
    rollout_writer *w = NULL;
    BR_TRY(rollout_open(path, &reader));
    rollout_meta meta = *rollout_reader_meta(reader);
    meta.n_seq_closed = rollout_seq_count(reader);
    BR_TRY_GOTO(rollout_stream_create(path, &meta, 1, &w), exit);
    status = copy_columns(w, reader);
    if (status == BR_OK)
        status = rollout_stream_commit(w);
    br_status closed = rollout_stream_close(w);
    status = status == BR_OK ? closed : status;
    if (status == BR_OK)
        status = rollout_stream_publish(path);
    if (status != BR_OK)
        rollout_stream_discard(path);
exit:
    rollout_reader_close(reader);
    return status;
}

/* ---- the public writer ------------------------------------------------------------------------------------------------ */

static br_status create_stream(const char *path, const rollout_meta *meta, const rollout_reader *prefix,
                               rollout_writer **out) {
    br_status status;
    rollout_meta open_meta = *meta;
    open_meta.n_seq_closed = -1;
    BR_TRY(rollout_stream_create(path, &open_meta, 0, out));
    if (prefix)
        BR_TRY_GOTO(copy_columns(*out, prefix), fail);
    BR_TRY_GOTO(rollout_stream_begin_swmr(*out), fail);
    BR_TRY_GOTO(rollout_stream_commit(*out), fail);
    BR_TRY_GOTO(rollout_stream_publish(path), fail);
    return BR_OK;
fail:
    (void)rollout_stream_close(*out);
    *out = NULL;
    rollout_stream_discard(path);
    return status;
}

br_status rollout_create(const char *path, const rollout_meta *meta, rollout_writer **out) {
    rollout_scope scope = rollout_scope_begin();
    br_status status = create_stream(path, meta, NULL, out);
    rollout_scope_end(scope);
    return status;
}

static br_status check_same_run(const char *path, const rollout_meta *have, const rollout_meta *want) {
    const struct { const char *what; br_digest have, want; } pair[] = {
        {"run_uid", have->run_uid, want->run_uid},
        {"weights digest", have->weights_digest, want->weights_digest},
        {"contract digest", have->contract_digest, want->contract_digest},
        {"config digest", have->config_digest, want->config_digest},
    };
    for (size_t i = 0; i < sizeof pair / sizeof pair[0]; i++) {
        char a[BR_DIGEST_TEXT_BYTES], b[BR_DIGEST_TEXT_BYTES];
        br_digest_text(pair[i].have, a);
        br_digest_text(pair[i].want, b);
        if (strcmp(a, b) != 0)
            return br_fail(BR_E_MISMATCH, "%s: cannot resume: its %s is %s, this run's is %s", path, pair[i].what, a, b);
    }
    if (strcmp(have->producer, want->producer) != 0 || have->has_entropy != want->has_entropy || have->n_top != want->n_top)
        return br_fail(
            BR_E_MISMATCH,
            "%s: cannot resume: it is of a %s with entropy %d and %d alternatives, this run of a %s with %d and %d", path,
            have->producer, have->has_entropy, have->n_top, want->producer, want->has_entropy, want->n_top);
    return BR_OK;
}

br_status rollout_resume(const char *path, const rollout_meta *meta, rollout_writer **out) {
    br_status status;
    rollout_reader *prefix = NULL;
    rollout_scope scope = rollout_scope_begin();
    *out = NULL;
    BR_TRY_GOTO(rollout_open(path, &prefix), exit);
    BR_TRY_GOTO(check_same_run(path, rollout_reader_meta(prefix), meta), exit);
    BR_TRY_GOTO(create_stream(path, meta, prefix, out), exit);
exit:
    rollout_reader_close(prefix);
    rollout_scope_end(scope);
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
        const rollout_column *spec = &rollout_columns[c];
        if (!rollout_column_present(c, &w->meta) || spec->field == ROLLOUT_NO_FIELD)
            continue;
        const void *rows = (const char *)row + spec->field;
        if (spec->by_token)
            memcpy(&rows, rows, sizeof rows);
        BR_TRY(rollout_stream_rows(w, c, spec->by_token ? w->n_tok : w->n_seq, spec->by_token ? row->n_tok : 1, rows));
    }
    BR_TRY(rollout_stream_rows(w, ROLLOUT_COL_OFFSET, w->n_seq + 1, 1, &end));
    BR_TRY(rollout_stream_rows(w, ROLLOUT_COL_CHAIN, w->n_seq, 1, &link));
    w->n_seq++;
    w->n_tok = end;
    w->n_pending++;
    w->link = link;
    return BR_OK;
}

static br_status refuse_failed(const rollout_writer *w) {
    if (w->failed != BR_OK)
        return br_fail(w->failed, "%s: writing failed before; what was committed is intact", w->path);
    return BR_OK;
}

br_status rollout_append(rollout_writer *w, const rollout_seq *seq) {
    BR_TRY(refuse_failed(w));
    if ((w->meta.has_entropy && !seq->entropy) || (w->meta.n_top > 0 && (!seq->top_token || !seq->top_logprob)))
        return br_fail(BR_E_ARG, "%s: sequence %lld comes without the entropy or the alternatives that the file has",
                       w->path, (long long)w->n_seq);
    rollout_seq row = canonical(seq);
    BR_TRY(rollout_seq_check(BR_E_ARG, w->path, w->n_seq, &w->meta, &row));
    rollout_scope scope = rollout_scope_begin();
    br_status status = append_rows(w, &row);
    rollout_scope_end(scope);
    return status;
}

br_status rollout_commit(rollout_writer *w) {
    BR_TRY(refuse_failed(w));
    if (w->n_pending == 0)
        return BR_OK;
    rollout_scope scope = rollout_scope_begin();
    br_status status = rollout_stream_commit(w);
    rollout_scope_end(scope);
    return status;
}

br_status rollout_close(rollout_writer *w) {
    char path[BR_PATH_BYTES];
    if (!w)
        return BR_OK;
    memcpy(path, w->path, sizeof path);
    br_status status = rollout_commit(w);
    rollout_scope scope = rollout_scope_begin();
    br_status closed = rollout_stream_close(w);
    status = status == BR_OK ? closed : status;
    if (status == BR_OK)
        status = pack(path);
    rollout_scope_end(scope);
    return status;
}

void rollout_abandon(rollout_writer *w) {
    if (!w)
        return;
    rollout_scope scope = rollout_scope_begin();
    (void)rollout_stream_close(w);
    rollout_scope_end(scope);
}
