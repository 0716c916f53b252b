/* A file driver over pread and pwrite; see h5_disk.h. Layer: io. */
#include "h5_disk.h"
#include "br_mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096 };

typedef struct disk_file {
    H5FD_t common; /* first: HDF5 fills it */
    h5_disk *disk;
    haddr_t end_allocated, end_written;
} disk_file;

static void note_error(h5_disk *disk) {
    if (!disk->error)
        disk->error = errno ? errno : EIO;
}

static H5FD_t *disk_open(const char *name, unsigned flags, hid_t access, haddr_t address_max) {
    h5_disk *const *disk = H5Pget_driver_info(access);
    disk_file *file = NULL;
    struct stat made;
    (void)flags, (void)address_max;
    if (br_mem_alloc((void **)&file, sizeof *file, "the driver of an HDF5 file") != BR_OK) {
        (*disk)->error = ENOMEM;
        return NULL;
    }
    file->disk = *disk;
    file->disk->fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file->disk->fd >= 0 && fstat(file->disk->fd, &made) == 0) {
        file->disk->device = made.st_dev;
        file->disk->inode = made.st_ino;
        return &file->common;
    }
    note_error(file->disk);
    if (file->disk->fd >= 0)
        close(file->disk->fd);
    file->disk->fd = -1;
    br_mem_free(file);
    return NULL;
}

static herr_t disk_close(H5FD_t *common) {
    disk_file *file = (disk_file *)common;
    if (close(file->disk->fd) != 0)
        note_error(file->disk);
    file->disk->fd = -1;
    br_mem_free(file);
    return 0;
}

/* What the system driver of HDF5 says of itself. */
static herr_t disk_query(const H5FD_t *common, unsigned long *flags) {
    (void)common;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_SUPPORTS_SWMR_IO | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t disk_get_allocated(const H5FD_t *common, H5FD_mem_t type) {
    (void)type;
    return ((const disk_file *)common)->end_allocated;
}

static herr_t disk_set_allocated(H5FD_t *common, H5FD_mem_t type, haddr_t end) {
    (void)type;
    ((disk_file *)common)->end_allocated = end;
    return 0;
}

static haddr_t disk_get_written(const H5FD_t *common, H5FD_mem_t type) {
    (void)type;
    return ((const disk_file *)common)->end_written;
}

/* Beyond the end of the file there are zeros. */
static herr_t disk_read(H5FD_t *common, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t n, void *to) {
    disk_file *file = (disk_file *)common;
    char *bytes = to;
    (void)type, (void)transfer;
    while (n > 0) {
        ssize_t done = pread(file->disk->fd, bytes, n, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -1;
        if (done == 0)
            break;
        bytes += done;
        at += (haddr_t)done;
        n -= (size_t)done;
    }
    memset(bytes, 0, n);
    return 0;
}

static herr_t disk_write(H5FD_t *common, H5FD_mem_t type, hid_t transfer, haddr_t at, size_t n, const void *from) {
    disk_file *file = (disk_file *)common;
    const char *bytes = from;
    (void)type, (void)transfer;
    if (at + n > file->end_written)
        file->end_written = at + n;
    while (n > 0 && !file->disk->error) {
        ssize_t done = pwrite(file->disk->fd, bytes, n, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0) {
            note_error(file->disk);
            break;
        }
        bytes += done;
        at += (haddr_t)done;
        n -= (size_t)done;
    }
    return 0;
}

static herr_t disk_truncate(H5FD_t *common, hid_t transfer, hbool_t closing) {
    disk_file *file = (disk_file *)common;
    (void)transfer, (void)closing;
    if (file->end_allocated == file->end_written)
        return 0;
    if (!file->disk->error && ftruncate(file->disk->fd, (off_t)file->end_allocated) != 0)
        note_error(file->disk);
    file->end_written = file->end_allocated;
    return 0;
}

/* Nothing is locked: readers must be able to come at any time. But only for a driver with a lock does HDF5 mark the file as
 * being written, and without that mark a stream whose writer was killed would not open at all. */
static herr_t disk_lock(H5FD_t *common, hbool_t to_write) {
    (void)common, (void)to_write;
    return 0;
}

static herr_t disk_unlock(H5FD_t *common) {
    (void)common;
    return 0;
}

static const H5FD_class_t disk_class = {
    .name = "h5_disk",
    .maxaddr = (haddr_t)INT64_MAX,
    .fc_degree = H5F_CLOSE_WEAK,
    .fapl_size = sizeof(h5_disk *),
    .open = disk_open,
    .close = disk_close,
    .query = disk_query,
    .get_eoa = disk_get_allocated,
    .set_eoa = disk_set_allocated,
    .get_eof = disk_get_written,
    .read = disk_read,
    .write = disk_write,
    .truncate = disk_truncate,
    .lock = disk_lock,
    .unlock = disk_unlock,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

/* A file that is not paged has no time in it, so that equal runs give equal bytes; of the pages HDF5 keeps one that has. */
hid_t h5_disk_create(const char *path, int paged, h5_disk *disk) {
    hid_t form = H5Pcreate(H5P_FILE_CREATE), access = H5Pcreate(H5P_FILE_ACCESS), driver = H5FDregister(&disk_class);
    *disk = (h5_disk){.fd = -1};
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
    H5Pset_driver(access, driver, &disk);
    H5Pset_obj_track_times(form, 0); /* of the root group */
    if (paged) {
        H5Pset_file_space_strategy(form, H5F_FSPACE_STRATEGY_PAGE, 0, 1);
        H5Pset_file_space_page_size(form, PAGE_BYTES);
    }
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, form, access);
    H5Pclose(form);
    H5Pclose(access);
    H5FDunregister(driver);
    return file;
}

void h5_disk_sync(h5_disk *disk) {
    if (!disk->error && fdatasync(disk->fd) != 0)
        note_error(disk);
}
