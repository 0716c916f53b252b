/* rollout_disk: the HDF5 file driver that rollout files are written through. Layer: io, private to rollout_*.c.
 *
 * HDF5 1.10 does not survive a failing write: closing the file crashes or loops, in the library and again at exit. So this
 * driver never tells it of one. The first failing write is kept in rollout_disk.error and nothing is written after it, so
 * that the file stays what it was at that moment, as after a kill; the writer looks at the error after each call and ends
 * with BR_E_IO. */
#ifndef ROLLOUT_DISK_H
#define ROLLOUT_DISK_H

#include <hdf5.h>

typedef struct rollout_disk {
    int fd;    /* -1 when closed */
    int error; /* errno of the first open, write, sync or truncation that failed; 0: none */
} rollout_disk;

/* H5Fcreate through the driver, emptying the file. `disk` must outlive the file. Negative on error. */
hid_t rollout_disk_create(const char *path, rollout_disk *disk);
void rollout_disk_sync(rollout_disk *disk);

#endif
