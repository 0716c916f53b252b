/* A rollout file open for writing; see rollout_stream.h. Layer: io. */
#include "rollout_stream.h"
#include "br_mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Remembers the first failure: the writer then only closes. The disk's own reason comes before what HDF5 made of it. */
static br_status failed(rollout_writer *w, const char *doing) {
    if (w->failed != BR_OK)
        return w->failed;
    if (w->disk.error)
        w->failed = br_fail(w->disk.error == ENOMEM ? BR_E_NOMEM : BR_E_IO, "%s: cannot write (%s): %s", w->path, doing,
                            strerror(w->disk.error));
    else
        w->failed = rollout_h5_fail(BR_E_IO, w->path, "%s", doing);
    return w->failed;
}

static br_status check_disk(rollout_writer *w, const char *doing) {
    return w->disk.error ? failed(w, doing) : BR_OK;
}

static br_status part_path(const char *path, char part[BR_PATH_BYTES]) {
    if ((size_t)snprintf(part, BR_PATH_BYTES, "%s.part", path) >= BR_PATH_BYTES)
        return br_fail(BR_E_LIMIT, "%.200s: path longer than %d bytes", path, BR_PATH_BYTES);
    return BR_OK;
}

/* ---- creation --------------------------------------------------------------------------------------------------------- */

static br_status text_attribute(rollout_writer *w, const char *name, const char *text) {
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, strlen(text) + 1);
    hid_t attribute = H5Acreate2(w->file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    int written = attribute >= 0 && H5Awrite(attribute, type, text) >= 0;
    if (attribute >= 0)
        H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(type);
    return written ? BR_OK : failed(w, name);
}

static br_status write_attributes(rollout_writer *w) {
    char text[ROLLOUT_TEXT_BYTES];
    for (int i = 0; i < ROLLOUT_FIXED_COUNT; i++)
        BR_TRY(text_attribute(w, rollout_fixed_name(i), rollout_fixed_text(i)));
    for (int i = 0; i < ROLLOUT_ATTRIBUTE_COUNT; i++) {
        rollout_attribute_text(i, &w->meta, text);
        BR_TRY(text_attribute(w, rollout_attribute_name(i), text));
    }
    br_digest_text(rollout_meta_digest(&w->meta), text);
    return text_attribute(w, ROLLOUT_META_DIGEST_NAME, text);
}

/* Early allocation puts the 32 bytes of the record right behind the superblock, inside one page, so that a kill cannot cut
 * it. */
static br_status create_commit(rollout_writer *w) {
    hsize_t n = ROLLOUT_COMMIT_WORDS;
    hid_t space = H5Screate_simple(1, &n, NULL), how = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_alloc_time(how, H5D_ALLOC_TIME_EARLY);
    H5Pset_obj_track_times(how, 0);
    w->commit = H5Dcreate2(w->file, ROLLOUT_COMMIT_PATH, H5T_STD_U64LE, space, H5P_DEFAULT, how, H5P_DEFAULT);
    H5Pclose(how);
    H5Sclose(space);
    return w->commit >= 0 ? BR_OK : failed(w, "create " ROLLOUT_COMMIT_PATH);
}

static hid_t column_form(const rollout_writer *w, int column, int packed) {
    hsize_t width = (hsize_t)rollout_column_width(column, &w->meta);
    const rollout_column *spec = &rollout_columns[column];
    hid_t how = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t chunk[2] = {spec->by_token ? ROLLOUT_CHUNK_TOK / width : ROLLOUT_CHUNK_SEQ, width};
    H5Pset_chunk(how, rollout_column_rank(column), chunk);
    H5Pset_obj_track_times(how, 0);
    if (packed && spec->packed) {
        H5Pset_shuffle(how);
        H5Pset_deflate(how, 1);
        H5Pset_fletcher32(how);
    }
    return how;
}

static br_status create_column(rollout_writer *w, int column, int packed) {
    hsize_t width = (hsize_t)rollout_column_width(column, &w->meta);
    hsize_t now[2] = {0, width}, most[2] = {H5S_UNLIMITED, width};
    hid_t type = rollout_column_type(column), space = H5Screate_simple(rollout_column_rank(column), now, most);
    hid_t how = column_form(w, column, packed), link = H5Pcreate(H5P_LINK_CREATE);
    H5Pset_create_intermediate_group(link, 1);
    w->column[column] = H5Dcreate2(w->file, rollout_columns[column].path, type, space, link, how, H5P_DEFAULT);
    H5Pclose(link);
    H5Pclose(how);
    H5Sclose(space);
    H5Tclose(type);
    return w->column[column] >= 0 ? BR_OK : failed(w, rollout_columns[column].path);
}

static br_status create_all(rollout_writer *w, const char *part, int packed) {
    int64_t zero = 0;
    w->file = rollout_disk_create(part, &w->disk);
    if (w->file < 0)
        return failed(w, "create the file");
    BR_TRY(create_commit(w));
    BR_TRY(write_attributes(w));
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        if (rollout_column_present(c, &w->meta))
            BR_TRY(create_column(w, c, packed));
    return rollout_stream_rows(w, ROLLOUT_COL_OFFSET, 0, 1, &zero);
}

static br_status check_meta(const char *path, const rollout_meta *meta) {
    if (meta->n_top < 0 || meta->n_top > BR_TOP_LOGPROBS_MAX || meta->has_entropy < 0 || meta->has_entropy > 1)
        return br_fail(BR_E_ARG, "%s: %d alternatives a token and entropy %d: expected 0 to %d and 0 or 1", path,
                       meta->n_top, meta->has_entropy, BR_TOP_LOGPROBS_MAX);
    return BR_OK;
}

br_status rollout_stream_create(const char *path, const rollout_meta *meta, int packed, rollout_writer **out) {
    br_status status;
    char part[BR_PATH_BYTES];
    rollout_writer *w;
    *out = NULL;
    BR_TRY(check_meta(path, meta));
    BR_TRY(part_path(path, part));
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "the rollout writer"));
    snprintf(w->path, sizeof w->path, "%s", path);
    w->meta = *meta;
    w->file = w->commit = H5I_INVALID_HID;
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        w->column[c] = H5I_INVALID_HID;
    snprintf(w->meta.engine_build, sizeof w->meta.engine_build, "%s", BR_VERSION_TEXT);
    w->link = rollout_chain_first(meta);
    BR_TRY_GOTO(create_all(w, part, packed), fail);
    *out = w;
    return BR_OK;
fail:
    (void)rollout_stream_close(w);
    unlink(part);
    return status;
}

/* ---- writing ---------------------------------------------------------------------------------------------------------- */

br_status rollout_stream_rows(rollout_writer *w, int column, int64_t at, int64_t n, const void *rows) {
    if (n == 0)
        return BR_OK;
    hsize_t width = (hsize_t)rollout_column_width(column, &w->meta);
    hsize_t size[2] = {(hsize_t)(at + n), width}, begin[2] = {(hsize_t)at, 0}, count[2] = {(hsize_t)n, width};
    hid_t to = H5I_INVALID_HID, from = H5Screate_simple(rollout_column_rank(column), count, NULL),
          type = rollout_column_type(column);
    int written = H5Dset_extent(w->column[column], size) >= 0 && (to = H5Dget_space(w->column[column])) >= 0 &&
                  H5Sselect_hyperslab(to, H5S_SELECT_SET, begin, NULL, count, NULL) >= 0 &&
                  H5Dwrite(w->column[column], type, from, to, H5P_DEFAULT, rows) >= 0;
    br_status status = written ? check_disk(w, rollout_columns[column].path) : failed(w, rollout_columns[column].path);
    if (to >= 0)
        H5Sclose(to);
    H5Sclose(from);
    H5Tclose(type);
    return status;
}

/* Two syncs a commit cost 0.9 ms on a virtual disk; a rollout takes far longer than that to sample. */
static br_status flush_to_disk(rollout_writer *w) {
    if (H5Fflush(w->file, H5F_SCOPE_LOCAL) < 0)
        return failed(w, "flush");
    rollout_disk_sync(&w->disk);
    return check_disk(w, "flush");
}

br_status rollout_stream_commit(rollout_writer *w) {
    uint64_t commit[ROLLOUT_COMMIT_WORDS] = {(uint64_t)w->n_seq, (uint64_t)w->n_tok, (uint64_t)w->n_commit + 1, 0};
    commit[3] = rollout_commit_check(commit);
    BR_TRY(flush_to_disk(w));
    if (H5Dwrite(w->commit, H5T_STD_U64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, commit) < 0)
        return failed(w, "write " ROLLOUT_COMMIT_PATH);
    BR_TRY(flush_to_disk(w));
    w->n_commit++;
    w->n_pending = 0;
    return BR_OK;
}

/* The switch drops what HDF5 holds in memory and reads it again: it must be on the disk before. */
br_status rollout_stream_begin_swmr(rollout_writer *w) {
    BR_TRY(flush_to_disk(w));
    return H5Fstart_swmr_write(w->file) >= 0 ? check_disk(w, "switch to a stream") : failed(w, "switch to a stream");
}

br_status rollout_stream_publish(const char *path) {
    br_status status = BR_OK;
    char part[BR_PATH_BYTES];
    BR_TRY(part_path(path, part));
    int fd = open(part, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0)
        status = br_fail(BR_E_IO, "%s: cannot flush to disk: %s", part, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (status == BR_OK && rename(part, path) != 0)
        status = br_fail(BR_E_IO, "%s: cannot rename to %s: %s", part, path, strerror(errno));
    return status;
}

void rollout_stream_discard(const char *path) {
    char part[BR_PATH_BYTES];
    if (part_path(path, part) == BR_OK)
        unlink(part);
}

br_status rollout_stream_close(rollout_writer *w) {
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        if (w->column[c] >= 0 && H5Dclose(w->column[c]) < 0)
            (void)failed(w, "close a dataset");
    if (w->commit >= 0 && H5Dclose(w->commit) < 0)
        (void)failed(w, "close " ROLLOUT_COMMIT_PATH);
    if (w->file >= 0 && H5Fclose(w->file) < 0)
        (void)failed(w, "close the file");
    br_status status = check_disk(w, "close the file");
    status = w->failed != BR_OK ? w->failed : status;
    br_mem_free(w);
    return status;
}
