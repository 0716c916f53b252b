/* h5_source: an HDF5 file of columns open for reading. Layer: io, private to the readers there.
 *
 * A file may be anybody's: type, rank, size and place of each dataset are checked before it is read; its values are the owner's to
 * check. All calls belong into an h5_scope. */
#ifndef H5_SOURCE_H
#define H5_SOURCE_H

#include "br_file.h"
#include "h5_column.h"

typedef struct h5_source {
    char path[BR_PATH_BYTES];
    hid_t file; /* negative: not open */
    /* Names rows of a column in the owner's words, for the sentence about a chunk that cannot be read. */
    void (*name_rows)(const void *owner, const h5_column *column, int64_t begin, int64_t end, char *text, size_t n);
    const void *owner;
} h5_source;

/* Finished, still written, or left by a writer that was killed. */
br_status h5_source_open(h5_source *source, const char *path);
void h5_source_close(h5_source *source);
br_status h5_source_text(const h5_source *source, const char *name, char text[H5_TEXT_BYTES]); /* an attribute of the file */
int h5_source_has(const h5_source *source, const char *path);
/* Read before any other dataset is opened, so that what it promises is there. */
br_status h5_source_commit(const h5_source *source, uint64_t count[H5_SPACE_MAX]);
br_status h5_source_size(const h5_source *source, const char *path, hsize_t size[2]); /* of one or two dimensions; else 0, 0 */
/* Loads `rows` rows into a block of br_mem, which is set even when the status is an error. */
br_status h5_source_column(const h5_source *source, const h5_column *column, int64_t rows, void **out);

#endif
