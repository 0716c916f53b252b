/* h5_stream: an HDF5 file of columns open for writing. Layer: io, private to the writers there.
 *
 * Everything is created at "path.part", then the file switches to single-writer-multiple-readers and only grows: rows, then the commit
 * record. A file whose writer was killed opens for reading and shows exactly the committed prefix. The two forms of a file differ in
 * their filters only: the stream that a run appends to, and the packed file that is written once. All calls belong into an h5_scope. */
#ifndef H5_STREAM_H
#define H5_STREAM_H

#include "br_file.h"
#include "h5_column.h"
#include "h5_disk.h"

typedef struct h5_stream {
    char path[BR_PATH_BYTES]; /* for messages and renames: where the file ends up */
    const h5_column *column;  /* (n_column), the owner's */
    int32_t n_column, packed, in_place; /* in_place: "path.part" is renamed */
    hid_t file, commit, set[H5_COLUMN_MAX]; /* negative: not open */
    h5_disk disk;
    br_status failed;         /* the first error; the stream then only closes */
} h5_stream;

/* Makes "path.part" with the commit record's place. packed: with filters; else it becomes a stream. On error it is to be closed and discarded
 * like any other. */
br_status h5_stream_create(h5_stream *stream, const char *path, int packed, const h5_column *column, int32_t n_column);
br_status h5_stream_text(h5_stream *stream, const char *name, const char *text); /* an attribute of the file */
br_status h5_stream_columns(h5_stream *stream);                                  /* all of them, empty */
/* Writes rows at .. at + n - 1, extending the column. */
br_status h5_stream_rows(h5_stream *stream, int column, int64_t at, int64_t n, const void *rows);
/* Flush, commit record, flush, each down to the disk. The first commit puts the file in its place: a stream switches before it and is
 * renamed behind it; a packed file is closed, then renamed, and takes no other. BR_E_IO where another process has "path.part" by then. */
br_status h5_stream_commit(h5_stream *stream, const uint64_t count[H5_SPACE_MAX]);
/* Closes what is open. The status is that of all that was written: BR_E_IO when HDF5 could not write what it held. */
br_status h5_stream_close(h5_stream *stream);
/* BR_OK, or the first error again: a stream that failed takes nothing more. */
br_status h5_stream_check(const h5_stream *stream);
void h5_stream_discard(const h5_stream *stream); /* removes its "path.part", after a failure; one that is in its place stays */

#endif
