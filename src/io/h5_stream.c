/* An HDF5 file open for writing; see h5_stream.h. Layer: io. */
#include "h5_stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Remembers the first failure: the writer then only closes. The disk's own reason comes before what HDF5 made of it. */
static br_status failed_at(h5_stream *s, const char *path, const char *doing) {
    if (s->failed != BR_OK)
        return s->failed;
    if (s->disk.error)
        s->failed = br_fail(s->disk.error == ENOMEM ? BR_E_NOMEM : BR_E_IO, "%s: cannot write (%s): %s", path, doing,
                            strerror(s->disk.error));
    else
        s->failed = h5_fail(BR_E_IO, path, "%s", doing);
    return s->failed;
}

static br_status failed(h5_stream *s, const char *doing) {
    return failed_at(s, s->path, doing);
}

static br_status check_disk(h5_stream *s, const char *doing) {
    return s->disk.error ? failed(s, doing) : BR_OK;
}

static void forget_handles(h5_stream *s) {
    s->file = s->commit = H5I_INVALID_HID;
    for (int i = 0; i < H5_COLUMN_MAX; i++)
        s->set[i] = H5I_INVALID_HID;
}

static br_status part_path(const char *path, char part[BR_PATH_BYTES]) {
    if ((size_t)snprintf(part, BR_PATH_BYTES, "%s.part", path) >= BR_PATH_BYTES)
        return br_fail(BR_E_LIMIT, "%.200s: path longer than %d bytes", path, BR_PATH_BYTES);
    return BR_OK;
}

/* ---- creation --------------------------------------------------------------------------------------------------------- */

br_status h5_stream_text(h5_stream *s, const char *name, const char *text) {
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    H5Tset_size(type, strlen(text) + 1);
    hid_t attribute = H5Acreate2(s->file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    int written = attribute >= 0 && H5Awrite(attribute, type, text) >= 0;
    if (attribute >= 0)
        H5Aclose(attribute);
    H5Sclose(space);
    H5Tclose(type);
    return written ? BR_OK : failed(s, name);
}

/* Early allocation puts the 32 bytes of the record right behind the superblock, inside one page, so that a kill cannot cut
 * it. */
static br_status create_commit(h5_stream *s) {
    hsize_t n = H5_COMMIT_WORDS;
    hid_t space = H5Screate_simple(1, &n, NULL), how = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_alloc_time(how, H5D_ALLOC_TIME_EARLY);
    H5Pset_obj_track_times(how, 0);
    s->commit = H5Dcreate2(s->file, H5_COMMIT_PATH, H5T_STD_U64LE, space, H5P_DEFAULT, how, H5P_DEFAULT);
    H5Pclose(how);
    H5Sclose(space);
    return s->commit >= 0 ? BR_OK : failed(s, "create " H5_COMMIT_PATH);
}

static hid_t column_form(const h5_column *column, int packed) {
    hsize_t width = (hsize_t)column->width;
    hid_t how = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t chunk[2] = {column->many ? H5_CHUNK_MANY / width : H5_CHUNK_FEW, width};
    H5Pset_chunk(how, column->rank, chunk);
    H5Pset_obj_track_times(how, 0);
    if (packed && column->packed) {
        H5Pset_shuffle(how);
        H5Pset_deflate(how, 1);
        H5Pset_fletcher32(how);
    }
    return how;
}

/* Made by hand: one that HDF5 makes on the way to a dataset keeps the time. */
static br_status create_group(h5_stream *s, const char *path) {
    char name[16];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(path + 1, "/") + 1, path);
    if (H5Lexists(s->file, name, H5P_DEFAULT) > 0)
        return BR_OK;
    hid_t how = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(how, 0);
    hid_t group = H5Gcreate2(s->file, name, H5P_DEFAULT, how, H5P_DEFAULT);
    H5Pclose(how);
    return group >= 0 && H5Gclose(group) >= 0 ? BR_OK : failed(s, name);
}

static br_status create_column(h5_stream *s, int i) {
    const h5_column *column = &s->column[i];
    hsize_t width = (hsize_t)column->width;
    hsize_t now[2] = {0, width}, most[2] = {H5S_UNLIMITED, width};
    hid_t type = h5_column_type(column), space = H5Screate_simple(column->rank, now, most);
    hid_t how = column_form(column, s->packed);
    s->set[i] = H5Dcreate2(s->file, column->path, type, space, H5P_DEFAULT, how, H5P_DEFAULT);
    H5Pclose(how);
    H5Sclose(space);
    H5Tclose(type);
    return s->set[i] >= 0 ? BR_OK : failed(s, column->path);
}

br_status h5_stream_columns(h5_stream *s) {
    for (int i = 0; i < s->n_column; i++)
        if (s->column[i].width) {
            BR_TRY(create_group(s, s->column[i].path));
            BR_TRY(create_column(s, i));
        }
    return BR_OK;
}

br_status h5_stream_create(h5_stream *s, const char *path, int packed, const h5_column *column, int32_t n_column) {
    char part[BR_PATH_BYTES];
    BR_ASSERT(n_column <= H5_COLUMN_MAX);
    *s = (h5_stream){.column = column, .n_column = n_column, .packed = packed, .disk = {.fd = -1}};
    forget_handles(s);
    BR_TRY(part_path(path, part));
    snprintf(s->path, sizeof s->path, "%s", path);
    unlink(part); /* one that another process still writes stays its own: bytes of two never mix */
    s->file = h5_disk_create(part, !packed, &s->disk);
    if (s->file < 0)
        return failed_at(s, part, "create the file");
    return create_commit(s);
}

/* ---- writing ---------------------------------------------------------------------------------------------------------- */

br_status h5_stream_rows(h5_stream *s, int i, int64_t at, int64_t n, const void *rows) {
    const h5_column *column = &s->column[i];
    if (n == 0)
        return BR_OK;
    hsize_t width = (hsize_t)column->width;
    hsize_t size[2] = {(hsize_t)(at + n), width}, begin[2] = {(hsize_t)at, 0}, count[2] = {(hsize_t)n, width};
    hid_t to = H5I_INVALID_HID, from = H5Screate_simple(column->rank, count, NULL), type = h5_column_type(column);
    int written = H5Dset_extent(s->set[i], size) >= 0 && (to = H5Dget_space(s->set[i])) >= 0 &&
                  H5Sselect_hyperslab(to, H5S_SELECT_SET, begin, NULL, count, NULL) >= 0 &&
                  H5Dwrite(s->set[i], type, from, to, H5P_DEFAULT, rows) >= 0;
    br_status status = written ? check_disk(s, column->path) : failed(s, column->path);
    if (to >= 0)
        H5Sclose(to);
    H5Sclose(from);
    H5Tclose(type);
    return status;
}

/* Two syncs a commit cost 0.9 ms on a virtual disk; what is committed took far longer than that to make. */
static br_status flush_to_disk(h5_stream *s) {
    if (H5Fflush(s->file, H5F_SCOPE_LOCAL) < 0)
        return failed(s, "flush");
    h5_disk_sync(&s->disk);
    return check_disk(s, "flush");
}

static br_status write_commit(h5_stream *s, const uint64_t count[H5_SPACE_MAX]) {
    uint64_t commit[H5_COMMIT_WORDS];
    memcpy(commit, count, H5_SPACE_MAX * sizeof commit[0]);
    commit[H5_SPACE_MAX] = h5_commit_check(commit);
    BR_TRY(flush_to_disk(s));
    if (H5Dwrite(s->commit, H5T_STD_U64LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, commit) < 0)
        return failed(s, "write " H5_COMMIT_PATH);
    return flush_to_disk(s);
}

/* The switch drops what HDF5 holds in memory and reads it again: it must be on the disk before. */
static br_status begin_swmr(h5_stream *s) {
    BR_TRY(flush_to_disk(s));
    return H5Fstart_swmr_write(s->file) >= 0 ? check_disk(s, "switch to a stream") : failed(s, "switch to a stream");
}

/* Whether the stream's own file is at `part`, and not one that another process has begun since. */
static int is_own(const h5_stream *s, const char *part) {
    struct stat now;
    return stat(part, &now) == 0 && now.st_dev == s->disk.device && now.st_ino == s->disk.inode;
}

/* Syncs "path.part" and renames it. */
static br_status publish(const h5_stream *s) {
    br_status status = BR_OK;
    const char *path = s->path;
    char part[BR_PATH_BYTES];
    BR_TRY(part_path(path, part));
    if (!is_own(s, part))
        return br_fail(BR_E_IO, "%s: another process has replaced or removed it: expected one writer of %s", part, path);
    int fd = open(part, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0)
        status = br_fail(BR_E_IO, "%s: cannot flush to disk: %s", part, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (status == BR_OK && rename(part, path) != 0)
        status = br_fail(BR_E_IO, "%s: cannot rename to %s: %s", part, path, strerror(errno));
    return status;
}

br_status h5_stream_commit(h5_stream *s, const uint64_t count[H5_SPACE_MAX]) {
    if (s->in_place)
        return write_commit(s, count);
    if (!s->packed)
        BR_TRY(begin_swmr(s));
    BR_TRY(write_commit(s, count));
    if (s->packed) /* renamed only once HDF5 has closed it */
        BR_TRY(h5_stream_close(s));
    BR_TRY(publish(s));
    s->in_place = 1;
    return BR_OK;
}

void h5_stream_discard(const h5_stream *s) {
    char part[BR_PATH_BYTES];
    if (part_path(s->path, part) == BR_OK && is_own(s, part))
        unlink(part);
}

br_status h5_stream_close(h5_stream *s) {
    for (int i = 0; i < s->n_column; i++)
        if (s->set[i] >= 0 && H5Dclose(s->set[i]) < 0)
            (void)failed(s, "close a dataset");
    if (s->commit >= 0 && H5Dclose(s->commit) < 0)
        (void)failed(s, "close " H5_COMMIT_PATH);
    if (s->file >= 0 && H5Fclose(s->file) < 0)
        (void)failed(s, "close the file");
    forget_handles(s);
    br_status status = check_disk(s, "close the file");
    return s->failed != BR_OK ? s->failed : status;
}

br_status h5_stream_check(const h5_stream *s) {
    if (s->failed != BR_OK)
        return br_fail(s->failed, "%s: writing failed before; what was committed is intact", s->path);
    return BR_OK;
}
