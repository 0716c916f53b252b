/* Checked reading of HDF5 files; see h5_source.h. Layer: io. */
#include "h5_source.h"
#include "br_mem.h"

#include <stdio.h>
#include <string.h>

/* Deflate turns at most 1,032 bytes into one: a dataset that claims more than that of the whole file (it may be stored
 * nowhere) would only be a way to ask for memory. */
enum { DEFLATE_RATIO_MAX = 1032, COMMIT_TRIES = 64 };

/* HDF5 doubles its pause, from 1 ns, each time it finds a block half written: 24 tries are 17 ms, its own 100 are
 * for ever. */
enum { METADATA_TRIES = 24 };

/* A file whose writer was killed, or still writes, opens in the second way only. */
br_status h5_source_open(h5_source *s, const char *path) {
    s->file = H5I_INVALID_HID;
    if ((size_t)snprintf(s->path, sizeof s->path, "%s", path) >= sizeof s->path)
        return br_fail(BR_E_LIMIT, "%.200s: path longer than %d bytes", path, BR_PATH_BYTES);
    BR_TRY(br_file_check_regular(s->path));
    s->file = H5Fopen(s->path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (s->file >= 0)
        return BR_OK;
    hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_metadata_read_attempts(access, METADATA_TRIES);
    s->file = H5Fopen(s->path, H5F_ACC_RDONLY | H5F_ACC_SWMR_READ, access);
    br_status status = s->file >= 0 ? BR_OK : h5_fail(BR_E_FORMAT, s->path, "open it as an HDF5 file");
    H5Pclose(access);
    return status;
}

void h5_source_close(h5_source *s) {
    if (s->file >= 0)
        H5Fclose(s->file);
    s->file = H5I_INVALID_HID;
}

br_status h5_source_text(const h5_source *s, const char *name, char text[H5_TEXT_BYTES]) {
    hid_t type = H5I_INVALID_HID, space = H5I_INVALID_HID, attribute = H5Aopen(s->file, name, H5P_DEFAULT);
    memset(text, 0, H5_TEXT_BYTES);
    br_status status = BR_OK;
    if (attribute < 0 || (type = H5Aget_type(attribute)) < 0 || (space = H5Aget_space(attribute)) < 0)
        status = h5_fail(BR_E_FORMAT, s->path, "open its attribute %s", name);
    else if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) != 0 || H5Tget_size(type) >= H5_TEXT_BYTES ||
             H5Sget_simple_extent_npoints(space) != 1)
        status = br_fail(BR_E_FORMAT, "%s: attribute %s: expected one text of fixed length under %d bytes", s->path, name,
                         H5_TEXT_BYTES);
    else if (H5Aread(attribute, type, text) < 0)
        status = h5_fail(BR_E_FORMAT, s->path, "read its attribute %s", name);
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    if (attribute >= 0)
        H5Aclose(attribute);
    return status;
}

int h5_source_has(const h5_source *s, const char *path) {
    return H5Lexists(s->file, path, H5P_DEFAULT) > 0;
}

/* Refuses what would read another file: soft and external links, external storage, virtual datasets. */
static br_status open_dataset(const h5_source *s, const char *path, hid_t *out) {
    H5L_info_t link;
    char group[16];
    const char *slash = strchr(path + 1, '/');
    snprintf(group, sizeof group, "%.*s", slash ? (int)(slash - path) : 15, path);
    *out = H5I_INVALID_HID;
    if (H5Lget_info(s->file, group, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD ||
        H5Lget_info(s->file, path, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD)
        return br_fail(BR_E_FORMAT, "%s: %s: expected a dataset of this file", s->path, path);
    hid_t set = H5Dopen2(s->file, path, H5P_DEFAULT);
    if (set < 0)
        return h5_fail(BR_E_FORMAT, s->path, "open %s", path);
    hid_t how = H5Dget_create_plist(set);
    int plain = how >= 0 && H5Pget_layout(how) != H5D_VIRTUAL && H5Pget_external_count(how) == 0;
    if (how >= 0)
        H5Pclose(how);
    if (!plain) {
        H5Dclose(set);
        return br_fail(BR_E_FORMAT, "%s: %s: expected its data in this file", s->path, path);
    }
    *out = set;
    return BR_OK;
}

/* Type and rank as expected, width exact, at least `rows` rows, and no more bytes than the file can hold. */
static br_status check_dataset(const h5_source *s, const h5_column *column, hid_t set, int64_t rows) {
    hsize_t size[2] = {0, 1};
    hid_t want = h5_column_type(column), type = H5Dget_type(set), space = H5Dget_space(set);
    int same_type = type >= 0 && H5Tequal(type, want) > 0;
    int rank = space >= 0 ? H5Sget_simple_extent_ndims(space) : -1;
    if (rank == column->rank)
        H5Sget_simple_extent_dims(space, size, NULL);
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    H5Tclose(want);
    const char *name = column->path;
    hsize_t width = column->rank == 2 ? (hsize_t)column->width : 1;
    if (!same_type || rank != column->rank || size[1] != width)
        return br_fail(BR_E_FORMAT, "%s: %s: expected the format's type, %d dimensions, rows of %llu; found %s, %d, %llu",
                       s->path, name, column->rank, (unsigned long long)width, same_type ? "it" : "another", rank,
                       (unsigned long long)size[1]);
    if (size[0] < (hsize_t)rows)
        return br_fail(BR_E_FORMAT, "%s: %s has %llu rows: %lld are committed", s->path, name, (unsigned long long)size[0],
                       (long long)rows);
    hsize_t file_bytes = 0, needed = (hsize_t)rows * h5_column_row_bytes(column);
    if (H5Fget_filesize(s->file, &file_bytes) < 0 || file_bytes < needed / DEFLATE_RATIO_MAX)
        return br_fail(BR_E_FORMAT, "%s: %llu bytes: too few for %lld rows of %s", s->path, (unsigned long long)file_bytes,
                       (long long)rows, name);
    return BR_OK;
}

/* Chunk by chunk, so that a chunk whose checksum is wrong is named. */
static br_status read_rows(const h5_source *s, const h5_column *column, hid_t set, int64_t rows, char *to) {
    br_status status = BR_OK;
    char where[160];
    hid_t type = h5_column_type(column), space = H5Dget_space(set);
    int64_t step = h5_column_chunk_rows(column);
    for (int64_t at = 0; at < rows && status == BR_OK; at += step) {
        int64_t n = rows - at < step ? rows - at : step;
        hsize_t begin[2] = {(hsize_t)at, 0}, count[2] = {(hsize_t)n, (hsize_t)column->width};
        hid_t memory = H5Screate_simple(column->rank, count, NULL);
        if (H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, NULL, count, NULL) < 0 ||
            H5Dread(set, type, memory, space, H5P_DEFAULT, to + (size_t)at * h5_column_row_bytes(column)) < 0) {
            s->name_rows(s->owner, column, at, at + n, where, sizeof where);
            status = h5_fail(BR_E_FORMAT, s->path, "read %s of %s", column->path, where);
        }
        H5Sclose(memory);
    }
    H5Sclose(space);
    H5Tclose(type);
    return status;
}

br_status h5_source_column(const h5_source *s, const h5_column *column, int64_t rows, void **out) {
    br_status status;
    hid_t set;
    BR_TRY(open_dataset(s, column->path, &set));
    BR_TRY_GOTO(check_dataset(s, column, set, rows), exit);
    BR_TRY_GOTO(br_mem_alloc(out, (size_t)rows * h5_column_row_bytes(column), column->path), exit);
    BR_TRY_GOTO(read_rows(s, column, set, rows, *out), exit);
exit:
    H5Dclose(set);
    return status;
}

br_status h5_source_size(const h5_source *s, const char *path, hsize_t size[2]) {
    hid_t set;
    size[0] = size[1] = 0;
    BR_TRY(open_dataset(s, path, &set));
    hid_t space = H5Dget_space(set);
    const int n_dim = space >= 0 ? H5Sget_simple_extent_ndims(space) : 0;
    if (n_dim == 1 || n_dim == 2)
        H5Sget_simple_extent_dims(space, size, NULL);
    if (space >= 0)
        H5Sclose(space);
    H5Dclose(set);
    return BR_OK;
}

static br_status read_commit_once(const h5_source *s, uint64_t commit[H5_COMMIT_WORDS]) {
    hid_t set;
    BR_TRY(open_dataset(s, H5_COMMIT_PATH, &set));
    hid_t type = H5Dget_type(set), space = H5Dget_space(set);
    int fits = type >= 0 && H5Tequal(type, H5T_STD_U64LE) > 0 && space >= 0 &&
               H5Sget_simple_extent_npoints(space) == H5_COMMIT_WORDS;
    int done = fits && H5Dread(set, H5T_STD_U64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, commit) >= 0;
    if (space >= 0)
        H5Sclose(space);
    if (type >= 0)
        H5Tclose(type);
    H5Dclose(set);
    if (!fits)
        return br_fail(BR_E_FORMAT, "%s: %s: expected %d words of 64 bits", s->path, H5_COMMIT_PATH, H5_COMMIT_WORDS);
    return done ? BR_OK : h5_fail(BR_E_FORMAT, s->path, "read %s", H5_COMMIT_PATH);
}

/* A living writer may be in the middle of its 32 bytes: the record is then read again. */
br_status h5_source_commit(const h5_source *s, uint64_t count[H5_SPACE_MAX]) {
    uint64_t commit[H5_COMMIT_WORDS] = {0};
    for (int i = 0; i < COMMIT_TRIES; i++) {
        BR_TRY(read_commit_once(s, commit));
        if (commit[H5_SPACE_MAX] == h5_commit_check(commit))
            break;
    }
    if (commit[H5_SPACE_MAX] != h5_commit_check(commit))
        return br_fail(BR_E_FORMAT, "%s: the commit record is damaged: it counts %llu, %llu and %llu, with another check", s->path,
                       (unsigned long long)commit[0], (unsigned long long)commit[1], (unsigned long long)commit[2]);
    memcpy(count, commit, H5_SPACE_MAX * sizeof commit[0]);
    return BR_OK;
}
