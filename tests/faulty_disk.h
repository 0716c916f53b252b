/* faulty_disk: a disk that can be made to fail, for the suites of files that a kill must leave readable. Our file driver's pwrite and the
 * syncs are resolved to this file. Syncs are counted, not done: a real one of a busy disk would make up nine tenths of those suites' time. */
#ifndef FAULTY_DISK_H
#define FAULTY_DISK_H

typedef enum disk_fault { DISK_FINE, DISK_KILL, DISK_TEAR, DISK_FULL_ONCE, DISK_FULL } disk_fault;

/* From now on: the at-th write, and with DISK_FULL those behind it, do not come through. TEAR: a kill cuts it at a page. */
void faulty_disk_fails(disk_fault kind, long at);
void faulty_disk_syncs(int error); /* 0, or the errno of every sync from now on; the count begins anew */
long faulty_disk_sync_count(void);

#endif
