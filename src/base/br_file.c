/* Maps, atomic writes and safe paths; see br_file.h. */
#include "br_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long read_countdown, write_countdown;

static int fault_due(atomic_long *countdown) {
    return atomic_load(countdown) > 0 && atomic_fetch_sub(countdown, 1) == 1;
}

void br_file_fail_nth_read(long n) {
    atomic_store(&read_countdown, n);
}

void br_file_fail_nth_write(long n) {
    atomic_store(&write_countdown, n);
}

/* Of a file that errno says cannot be opened, or with `what` "create" made; a file that stands where its folder should is named. */
static br_status open_failed(const char *path, const char *what) {
    const int error = errno;
    struct stat info;
    char parent[BR_PATH_BYTES];
    snprintf(parent, sizeof parent, "%s", path);
    for (char *slash = error == ENOTDIR ? strrchr(parent, '/') : NULL; slash && slash > parent; slash = strrchr(parent, '/')) {
        *slash = 0;
        if (stat(parent, &info) == 0 && !S_ISDIR(info.st_mode))
            return br_fail(BR_E_IO, "%s: a file: expected a folder, to %s %s", parent, what, path);
    }
    return br_fail(error == ENOENT && strcmp(what, "open") == 0 ? BR_E_NOT_FOUND : BR_E_IO, "%s: cannot %s: %s", path, what, strerror(error));
}

br_status br_file_map(const char *path, br_map *out) {
    br_status status = BR_OK;
    struct stat info;
    *out = (br_map){0};
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe without a writer would hold us up for ever */
    if (fd < 0)
        return open_failed(path, "open");
    if (fstat(fd, &info) != 0) {
        status = br_fail(BR_E_IO, "%s: cannot read its size: %s", path, strerror(errno));
        goto exit;
    }
    if (!S_ISREG(info.st_mode)) {
        status = br_fail(BR_E_IO, "%s: expected a regular file", path);
        goto exit;
    }
    if (info.st_size == 0)
        goto exit;
    void *bytes = fault_due(&read_countdown) ? MAP_FAILED : mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        status = br_fail(BR_E_IO, "%s: cannot map %lld bytes: %s", path, (long long)info.st_size, strerror(errno ? errno : EIO));
        goto exit;
    }
    *out = (br_map){.bytes = bytes, .n = (size_t)info.st_size};
exit:
    close(fd);
    return status;
}

void br_file_unmap(br_map *map) {
    if (map->bytes)
        munmap((void *)(uintptr_t)map->bytes, map->n);
    *map = (br_map){0};
}

br_status br_file_begin(const char *path, br_file_part *out) {
    out->path = path;
    if ((size_t)snprintf(out->part, sizeof out->part, "%s.part", path) >= sizeof out->part)
        return br_fail(BR_E_LIMIT, "%s: path longer than %d bytes", path, BR_PATH_BYTES);
    out->fd = open(out->part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (out->fd < 0)
        return open_failed(out->part, "create");
    return BR_OK;
}

br_status br_file_put(br_file_part *part, const void *bytes, size_t n) {
    const unsigned char *from = bytes;
    while (n > 0) {
        ssize_t done = write(part->fd, from, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return br_fail(BR_E_IO, "%s: cannot write %zu bytes: %s", part->part, n, strerror(errno));
        from += done;
        n -= (size_t)done;
    }
    return BR_OK;
}

br_status br_file_end(br_file_part *part, br_status written) {
    br_status status = written;
    if (status == BR_OK && fault_due(&write_countdown))
        status = br_fail(BR_E_IO, "%s: cannot write: injected fault", part->part);
    if (status == BR_OK && fsync(part->fd) != 0)
        status = br_fail(BR_E_IO, "%s: cannot flush: %s", part->part, strerror(errno));
    if (close(part->fd) != 0 && status == BR_OK)
        status = br_fail(BR_E_IO, "%s: cannot close: %s", part->part, strerror(errno));
    if (status == BR_OK && rename(part->part, part->path) != 0)
        status = br_fail(BR_E_IO, "%s: cannot rename to %s: %s", part->part, part->path, strerror(errno));
    if (status != BR_OK)
        unlink(part->part);
    return status;
}

br_status br_file_write(const char *path, const void *bytes, size_t n) {
    br_file_part part;
    BR_TRY(br_file_begin(path, &part));
    return br_file_end(&part, br_file_put(&part, bytes, n));
}

br_status br_file_make_dir(const char *path) {
    char prefix[BR_PATH_BYTES];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof prefix)
        return br_fail(BR_E_LIMIT, "folder path of %zu bytes: expected 1 to %d", n, BR_PATH_BYTES - 1);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0)
            continue;
        memcpy(prefix, path, i);
        prefix[i] = 0;
        if (mkdir(prefix, 0777) != 0 && errno != EEXIST)
            return br_fail(BR_E_IO, "%s: cannot make the folder: %s", prefix, strerror(errno));
    }
    return BR_OK;
}

int br_file_exists(const char *path) {
    return access(path, F_OK) == 0;
}

br_status br_file_check_regular(const char *path) {
    struct stat info;
    if (stat(path, &info) != 0)
        return open_failed(path, "open");
    return S_ISREG(info.st_mode) ? BR_OK : br_fail(BR_E_IO, "%s: expected a regular file", path);
}

int br_file_is_same(const char *a, const char *b) {
    struct stat of_a, of_b;
    return stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

br_status br_file_join(char out[BR_PATH_BYTES], const char *dir, const char *name) {
    const char *dots = strstr(name, "..");
    if (name[0] == 0 || name[0] == '/' || dots)
        return br_fail(BR_E_FORMAT, "file name '%.200s': expected a relative path inside %s", name, dir);
    if ((size_t)snprintf(out, BR_PATH_BYTES, "%s/%s", dir, name) >= BR_PATH_BYTES)
        return br_fail(BR_E_LIMIT, "%s/%.200s: path longer than %d bytes", dir, name, BR_PATH_BYTES);
    return BR_OK;
}
