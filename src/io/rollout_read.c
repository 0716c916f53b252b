/* The reader of rollout files: everything that was committed, in memory, checked. Layer: io. See rollout_file.h.
 *
 * A file may be anybody's: type, rank, size and place of each dataset are checked before it is read, the values after. */
#include "rollout_read.h"
#include "br_file.h"
#include "br_mem.h"

#include <stdio.h>
#include <string.h>

/* Deflate turns at most 1,032 bytes into one: a dataset that claims more than that of the whole file (it may be stored
 * nowhere) would only be a way to ask for memory. */
enum { DEFLATE_RATIO_MAX = 1032, COMMIT_TRIES = 64 };

/* HDF5 doubles its pause, from 1 ns, each time it finds a block half written: 24 tries are 17 ms, its own 100 are
 * for ever. */
enum { METADATA_TRIES = 24 };

struct rollout_reader {
    char path[BR_PATH_BYTES];
    hid_t file; /* open only inside rollout_open */
    rollout_meta meta;
    br_digest meta_digest;
    int64_t n_seq, n_tok;
    void *column[ROLLOUT_COLUMN_COUNT];
};

static const int64_t *offsets_of(const rollout_reader *r) {
    return r->column[ROLLOUT_COL_OFFSET];
}

/* ---- file and attributes ---------------------------------------------------------------------------------------------- */

/* A file whose writer was killed, or still writes, opens in the second way only. */
static br_status open_file(rollout_reader *r) {
    BR_TRY(br_file_check_regular(r->path));
    r->file = H5Fopen(r->path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (r->file >= 0)
        return BR_OK;
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_metadata_read_attempts(access, METADATA_TRIES);
    r->file = H5Fopen(r->path, H5F_ACC_RDONLY | H5F_ACC_SWMR_READ, access);
    br_status status = r->file >= 0 ? BR_OK : rollout_h5_fail(BR_E_FORMAT, r->path, "open it as an HDF5 file");
    H5Pclose(access);
    return status;
}

static br_status read_text(const rollout_reader *r, const char *name, char text[ROLLOUT_TEXT_BYTES]) {
    hid_t type = H5I_INVALID_HID, space = H5I_INVALID_HID, attribute = H5Aopen(r->file, name, H5P_DEFAULT);
    memset(text, 0, ROLLOUT_TEXT_BYTES);
    br_status status = BR_OK;
    if (attribute < 0 || (type = H5Aget_type(attribute)) < 0 || (space = H5Aget_space(attribute)) < 0)
        status = rollout_h5_fail(BR_E_FORMAT, r->path, "open its attribute %s", name);
    else if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) != 0 || H5Tget_size(type) >= ROLLOUT_TEXT_BYTES ||
             H5Sget_simple_extent_npoints(space) != 1)
        status = br_fail(BR_E_FORMAT, "%s: attribute %s: expected one text of fixed length under %d bytes", r->path, name,
                         ROLLOUT_TEXT_BYTES);
    else if (H5Aread(attribute, type, text) < 0)
        status = rollout_h5_fail(BR_E_FORMAT, r->path, "read its attribute %s", name);
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    if (attribute >= 0)
        H5Aclose(attribute);
    return status;
}

static br_status read_attributes(rollout_reader *r) {
    char text[ROLLOUT_TEXT_BYTES];
    for (int i = 0; i < ROLLOUT_FIXED_COUNT; i++) {
        BR_TRY(read_text(r, rollout_fixed_name(i), text));
        if (strcmp(text, rollout_fixed_text(i)) != 0)
            return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': expected '%s'", r->path, rollout_fixed_name(i), text,
                           rollout_fixed_text(i));
    }
    for (int i = 0; i < ROLLOUT_ATTRIBUTE_COUNT; i++) {
        BR_TRY(read_text(r, rollout_attribute_name(i), text));
        if (!rollout_attribute_parse(i, text, &r->meta))
            return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': not a value of it", r->path, rollout_attribute_name(i),
                           text);
    }
    BR_TRY(read_text(r, ROLLOUT_META_DIGEST_NAME, text));
    if (!rollout_digest_parse(text, &r->meta_digest))
        return br_fail(BR_E_FORMAT, "%s: attribute %s is '%s': expected 32 hex digits", r->path, ROLLOUT_META_DIGEST_NAME,
                       text);
    return BR_OK;
}

/* ---- datasets --------------------------------------------------------------------------------------------------------- */

/* Refuses what would read another file: soft and external links, external storage, virtual datasets. */
static br_status open_dataset(const rollout_reader *r, const char *path, hid_t *out) {
    H5L_info_t link;
    char group[16];
    const char *slash = strchr(path + 1, '/');
    snprintf(group, sizeof group, "%.*s", slash ? (int)(slash - path) : 15, path);
    *out = H5I_INVALID_HID;
    if (H5Lget_info(r->file, group, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD ||
        H5Lget_info(r->file, path, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD)
        return br_fail(BR_E_FORMAT, "%s: %s: expected a dataset of this file", r->path, path);
    hid_t set = H5Dopen2(r->file, path, H5P_DEFAULT);
    if (set < 0)
        return rollout_h5_fail(BR_E_FORMAT, r->path, "open %s", path);
    hid_t how = H5Dget_create_plist(set);
    int plain = how >= 0 && H5Pget_layout(how) != H5D_VIRTUAL && H5Pget_external_count(how) == 0;
    if (how >= 0)
        H5Pclose(how);
    if (!plain) {
        H5Dclose(set);
        return br_fail(BR_E_FORMAT, "%s: %s: expected its data in this file", r->path, path);
    }
    *out = set;
    return BR_OK;
}

/* Type and rank as expected, width exact, at least `rows` rows, and no more bytes than the file can hold. */
static br_status check_dataset(const rollout_reader *r, int column, hid_t set, int64_t rows) {
    hsize_t size[2] = {0, 1};
    hid_t want = rollout_column_type(column), type = H5Dget_type(set), space = H5Dget_space(set);
    int same_type = type >= 0 && H5Tequal(type, want) > 0;
    int rank = space >= 0 ? H5Sget_simple_extent_ndims(space) : -1, rank_wanted = rollout_column_rank(column);
    if (rank == rank_wanted)
        H5Sget_simple_extent_dims(space, size, NULL);
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    H5Tclose(want);
    const char *name = rollout_columns[column].path;
    hsize_t width = rank_wanted == 2 ? (hsize_t)rollout_column_width(column, &r->meta) : 1;
    if (!same_type || rank != rank_wanted || size[1] != width)
        return br_fail(BR_E_FORMAT, "%s: %s: expected the format's type, %d dimensions, rows of %llu; found %s, %d, %llu",
                       r->path, name, rank_wanted, (unsigned long long)width, same_type ? "it" : "another", rank,
                       (unsigned long long)size[1]);
    if (size[0] < (hsize_t)rows)
        return br_fail(BR_E_FORMAT, "%s: %s has %llu rows: %lld are committed", r->path, name, (unsigned long long)size[0],
                       (long long)rows);
    hsize_t file_bytes = 0, needed = (hsize_t)rows * rollout_column_row_bytes(column, &r->meta);
    if (H5Fget_filesize(r->file, &file_bytes) < 0 || file_bytes < needed / DEFLATE_RATIO_MAX)
        return br_fail(BR_E_FORMAT, "%s: %llu bytes: too few for %lld rows of %s", r->path, (unsigned long long)file_bytes,
                       (long long)rows, name);
    return BR_OK;
}

static br_status fail_rows(const rollout_reader *r, int column, int64_t begin, int64_t end) {
    const char *name = rollout_columns[column].path;
    if (!rollout_columns[column].by_token)
        return rollout_h5_fail(BR_E_FORMAT, r->path, "read %s of sequences %lld..%lld", name, (long long)begin,
                               (long long)end - 1);
    const int64_t *offset = offsets_of(r);
    int64_t first = 0, last = r->n_seq - 1;
    while (offset[first + 1] <= begin)
        first++;
    while (offset[last] >= end)
        last--;
    return rollout_h5_fail(BR_E_FORMAT, r->path, "read %s of sequences %lld..%lld (tokens %lld..%lld of the file)", name,
                           (long long)first, (long long)last, (long long)begin, (long long)end - 1);
}

/* Chunk by chunk, so that a chunk whose checksum is wrong is named. */
static br_status read_rows(const rollout_reader *r, int column, hid_t set, int64_t rows) {
    br_status status = BR_OK;
    size_t row_bytes = rollout_column_row_bytes(column, &r->meta);
    hid_t type = rollout_column_type(column), space = H5Dget_space(set);
    int64_t step = rollout_columns[column].by_token ? ROLLOUT_CHUNK_TOK : ROLLOUT_CHUNK_SEQ;
    for (int64_t at = 0; at < rows && status == BR_OK; at += step) {
        int64_t n = rows - at < step ? rows - at : step;
        hsize_t begin[2] = {(hsize_t)at, 0}, count[2] = {(hsize_t)n, (hsize_t)rollout_column_width(column, &r->meta)};
        hid_t to = H5Screate_simple(rollout_column_rank(column), count, NULL);
        if (H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, NULL, count, NULL) < 0 ||
            H5Dread(set, type, to, space, H5P_DEFAULT, (char *)r->column[column] + (size_t)at * row_bytes) < 0)
            status = fail_rows(r, column, at, at + n);
        H5Sclose(to);
    }
    H5Sclose(space);
    H5Tclose(type);
    return status;
}

static br_status read_column(rollout_reader *r, int column) {
    br_status status;
    hid_t set;
    int64_t rows = rollout_column_rows(column, r->n_seq, r->n_tok);
    BR_TRY(open_dataset(r, rollout_columns[column].path, &set));
    BR_TRY_GOTO(check_dataset(r, column, set, rows), exit);
    size_t n_byte = (size_t)rows * rollout_column_row_bytes(column, &r->meta);
    BR_TRY_GOTO(br_mem_alloc(&r->column[column], n_byte, rollout_columns[column].path), exit);
    BR_TRY_GOTO(read_rows(r, column, set, rows), exit);
exit:
    H5Dclose(set);
    return status;
}

/* ---- what is committed ------------------------------------------------------------------------------------------------ */

static br_status read_commit_once(const rollout_reader *r, uint64_t commit[ROLLOUT_COMMIT_WORDS]) {
    hid_t set;
    BR_TRY(open_dataset(r, ROLLOUT_COMMIT_PATH, &set));
    hid_t type = H5Dget_type(set), space = H5Dget_space(set);
    int fits = type >= 0 && H5Tequal(type, H5T_STD_U64LE) > 0 && space >= 0 &&
               H5Sget_simple_extent_npoints(space) == ROLLOUT_COMMIT_WORDS;
    int done = fits && H5Dread(set, H5T_STD_U64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, commit) >= 0;
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    H5Dclose(set);
    if (!fits)
        return br_fail(BR_E_FORMAT, "%s: %s: expected %d words of 64 bits", r->path, ROLLOUT_COMMIT_PATH,
                       ROLLOUT_COMMIT_WORDS);
    return done ? BR_OK : rollout_h5_fail(BR_E_FORMAT, r->path, "read %s", ROLLOUT_COMMIT_PATH);
}

/* Read before any other dataset is opened, so that what it promises is there. A living writer may be in the middle of its
 * 32 bytes: the record is then read again. */
static br_status read_commit(rollout_reader *r) {
    uint64_t commit[ROLLOUT_COMMIT_WORDS] = {0};
    for (int i = 0; i < COMMIT_TRIES; i++) {
        BR_TRY(read_commit_once(r, commit));
        if (commit[3] == rollout_commit_check(commit))
            break;
    }
    if (commit[3] != rollout_commit_check(commit))
        return br_fail(BR_E_FORMAT,
                       "%s: the commit record is damaged: it says %llu sequences, %llu tokens, with another check", r->path,
                       (unsigned long long)commit[0], (unsigned long long)commit[1]);
    if (commit[0] > INT32_MAX || commit[1] > commit[0] * ROLLOUT_SEQ_TOK_MAX || commit[1] < commit[0])
        return br_fail(BR_E_FORMAT, "%s: %llu sequences with %llu tokens: expected 1 to 2^20 tokens each", r->path,
                       (unsigned long long)commit[0], (unsigned long long)commit[1]);
    r->n_seq = (int64_t)commit[0];
    r->n_tok = (int64_t)commit[1];
    return BR_OK;
}

static br_status find_optional(rollout_reader *r) {
    hsize_t size[2] = {0, 0};
    hid_t set;
    const char *top = rollout_columns[ROLLOUT_COL_TOP_TOKEN].path;
    if (H5Lexists(r->file, "/tokens", H5P_DEFAULT) <= 0)
        return br_fail(BR_E_FORMAT, "%s: expected a group /tokens", r->path);
    r->meta.has_entropy = H5Lexists(r->file, rollout_columns[ROLLOUT_COL_ENTROPY].path, H5P_DEFAULT) > 0;
    if (H5Lexists(r->file, top, H5P_DEFAULT) <= 0)
        return BR_OK;
    BR_TRY(open_dataset(r, top, &set));
    hid_t space = H5Dget_space(set);
    if (space >= 0 && H5Sget_simple_extent_ndims(space) == 2)
        H5Sget_simple_extent_dims(space, size, NULL);
    if (space >= 0)
        H5Sclose(space);
    H5Dclose(set);
    if (size[1] < 1 || size[1] > BR_TOP_LOGPROBS_MAX)
        return br_fail(BR_E_FORMAT, "%s: %s has rows of %llu: expected 1 to %d", r->path, top, (unsigned long long)size[1],
                       BR_TOP_LOGPROBS_MAX);
    r->meta.n_top = (int32_t)size[1];
    return BR_OK;
}

static br_status check_offsets(const rollout_reader *r) {
    const int64_t *offset = offsets_of(r);
    if (offset[0] != 0 || offset[r->n_seq] != r->n_tok)
        return br_fail(BR_E_FORMAT, "%s: offsets run from %lld to %lld: expected 0 to %lld", r->path, (long long)offset[0],
                       (long long)offset[r->n_seq], (long long)r->n_tok);
    for (int64_t i = 0; i < r->n_seq; i++)
        if (offset[i] >= offset[i + 1] || offset[i + 1] - offset[i] > ROLLOUT_SEQ_TOK_MAX || offset[i + 1] > r->n_tok)
            return br_fail(BR_E_FORMAT, "%s: sequence %lld: offsets %lld to %lld: expected 1 to 2^20 tokens of %lld",
                           r->path, (long long)i, (long long)offset[i], (long long)offset[i + 1], (long long)r->n_tok);
    return BR_OK;
}

static br_status read_all(rollout_reader *r) {
    BR_TRY(open_file(r));
    BR_TRY(read_attributes(r));
    BR_TRY(read_commit(r));
    BR_TRY(find_optional(r));
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++) {
        if (rollout_column_present(c, &r->meta))
            BR_TRY(read_column(r, c));
        if (c == ROLLOUT_COL_OFFSET)
            BR_TRY(check_offsets(r));
    }
    for (int64_t i = 0; i < r->n_seq; i++) {
        rollout_seq seq;
        rollout_seq_at(r, i, &seq);
        BR_TRY(rollout_seq_check(BR_E_FORMAT, r->path, i, &r->meta, &seq));
    }
    return BR_OK;
}

/* ---- the public reader ------------------------------------------------------------------------------------------------ */

br_status rollout_open(const char *path, rollout_reader **out) {
    br_status status;
    rollout_reader *r = NULL;
    rollout_scope scope = rollout_scope_begin();
    *out = NULL;
    BR_TRY_GOTO(br_mem_alloc((void **)&r, sizeof *r, "the rollout reader"), exit);
    r->file = H5I_INVALID_HID;
    if ((size_t)snprintf(r->path, sizeof r->path, "%s", path) >= sizeof r->path) {
        status = br_fail(BR_E_LIMIT, "%.200s: path longer than %d bytes", path, BR_PATH_BYTES);
        goto exit;
    }
    BR_TRY_GOTO(read_all(r), exit);
    *out = r;
exit:
    if (r && r->file >= 0)
        H5Fclose(r->file);
    if (status != BR_OK)
        rollout_reader_close(r);
    rollout_scope_end(scope);
    return status;
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
        const rollout_column *spec = &rollout_columns[c];
        if (!r->column[c] || spec->field == ROLLOUT_NO_FIELD)
            continue;
        size_t row_bytes = rollout_column_row_bytes(c, &r->meta);
        const char *row = (const char *)r->column[c] + row_bytes * (size_t)(spec->by_token ? offset[i] : i);
        if (spec->by_token)
            memcpy((char *)out + spec->field, &row, sizeof row);
        else
            memcpy((char *)out + spec->field, row, row_bytes);
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
