/* h5_disk: the HDF5 file driver that our files are written through. Layer: io, private to the writers there.
 *
 * HDF5 1.10 does not survive a failing write: closing the file crashes or loops, in the library and again at exit. So this
 * driver never tells it of one. The first failing write is kept in h5_disk.error and nothing is written after it, so
 * that the file stays what it was at that moment, as after a kill; the writer looks at the error after each call and ends
 * with BR_E_IO. */
#ifndef H5_DISK_H
#define H5_DISK_H

#include <hdf5.h>
#include <sys/types.h>

typedef struct h5_disk {
    int fd;    /* -1 when closed */
    int error; /* errno of the first open, write, sync or truncation that failed; 0: none */
    dev_t device;
    ino_t inode; /* of the file, whatever stands at its path by now; 0: none was made */
} h5_disk;

/* H5Fcreate through the driver, emptying the file. `disk` must outlive the file. paged: for a stream, whose metadata are rewritten in place
 * while it can be killed: they keep inside pages of the size that a kill can cut a write at. Negative on error. */
hid_t h5_disk_create(const char *path, int paged, h5_disk *disk);
void h5_disk_sync(h5_disk *disk);

#endif
