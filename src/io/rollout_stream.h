/* rollout_stream: a rollout file open for writing, in rows of columns. Layer: io, private to rollout_*.c.
 *
 * The two forms of a file differ in their filters only: the stream that a run appends to, and the packed file that is
 * written once. All calls belong into a rollout_scope. */
#ifndef ROLLOUT_STREAM_H
#define ROLLOUT_STREAM_H

#include "br_file.h"
#include "rollout_disk.h"
#include "rollout_layout.h"

struct rollout_writer {
    char path[BR_PATH_BYTES];  /* for messages and renames: where the file ends up */
    rollout_meta meta;
    hid_t file, commit, column[ROLLOUT_COLUMN_COUNT]; /* negative: not open */
    int64_t n_seq, n_tok, n_commit, n_pending;
    br_digest link;            /* the last of the chain */
    rollout_disk disk;
    br_status failed;          /* the first error; the writer then only closes */
};

/* Makes "path.part" with every dataset, empty, not committed. packed: with filters; else it becomes a stream. */
br_status rollout_stream_create(const char *path, const rollout_meta *meta, int packed, rollout_writer **out);
/* Writes rows at .. at + n - 1, extending the column. */
br_status rollout_stream_rows(rollout_writer *writer, int column, int64_t at, int64_t n, const void *rows);
br_status rollout_stream_commit(rollout_writer *writer); /* flush, commit record, flush, each down to the disk */
br_status rollout_stream_begin_swmr(rollout_writer *writer);
/* Closes what is open and frees. The status is that of closing: BR_E_IO when HDF5 could not write what it held. */
br_status rollout_stream_close(rollout_writer *writer);
br_status rollout_stream_publish(const char *path); /* syncs "path.part" and renames it to path */
void rollout_stream_discard(const char *path);      /* removes "path.part", after a failure */

#endif
