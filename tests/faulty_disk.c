/* Writes and syncs that fail on demand; see faulty_disk.h. */
#include "faulty_disk.h"

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static disk_fault fault_kind;
static long fault_at, n_write;
static long n_sync;
static int sync_errno;

static ssize_t faulty_write(int fd, const void *bytes, size_t n, off_t at) {
    int due = fault_kind != DISK_FINE && ++n_write >= fault_at && fault_at > 0;
    /* A kill cuts a write at a page: the kernel copies page by page and looks for the signal in between. */
    if (due && fault_kind == DISK_TEAR && (at + (off_t)n) / 4096 > at / 4096)
        syscall(SYS_pwrite64, fd, bytes, (size_t)((at + (off_t)n) / 4096 * 4096 - at), at);
    if (due && (fault_kind == DISK_KILL || fault_kind == DISK_TEAR))
        kill(getpid(), SIGKILL);
    if (due && (fault_kind == DISK_FULL || n_write == fault_at)) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, bytes, n, at);
}

/* Visible, so that a library beside the program finds them as well. */
#define HOOK __attribute__((visibility("default")))

HOOK ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at) {
    return faulty_write(fd, bytes, n, at);
}

HOOK ssize_t pwrite64(int fd, const void *bytes, size_t n, off_t at) {
    return faulty_write(fd, bytes, n, at);
}

static int counted_sync(void) {
    n_sync++;
    errno = sync_errno;
    return sync_errno ? -1 : 0;
}

HOOK int fdatasync(int fd) {
    (void)fd;
    return counted_sync();
}

HOOK int fsync(int fd) {
    (void)fd;
    return counted_sync();
}

void faulty_disk_fails(disk_fault kind, long at) {
    fault_kind = kind;
    fault_at = at;
    n_write = 0;
}

void faulty_disk_syncs(int error) {
    sync_errno = error;
    n_sync = 0;
}

long faulty_disk_sync_count(void) {
    return n_sync;
}
