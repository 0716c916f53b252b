/* h5_column: what our HDF5 files are made of: columns, each a dataset with a row a sequence, a token or whatever its file counts.
 *
 * Layer: io, private to the readers and writers there. Types are little-endian and equal in memory and file, so that HDF5 never
 * converts: the bits of a log-prob pass through untouched. */
#ifndef H5_COLUMN_H
#define H5_COLUMN_H

#include "br_status.h"

#include <hdf5.h>

#define H5_COMMIT_PATH "/commit"

enum {
    H5_COLUMN_MAX = 48,     /* columns of a file */
    H5_SPACE_MAX = 3,       /* row counts that a file commits; what else it has is fixed when it is made */
    H5_COMMIT_WORDS = 4,    /* those counts, and XXH3-64 of them */
    H5_CHUNK_MANY = 65536,  /* elements of a chunk of a column of many rows */
    H5_CHUNK_FEW = 256,     /* rows of a chunk of any other */
    H5_TEXT_BYTES = 256     /* longest text attribute and its end */
};

typedef enum h5_type { H5_U8, H5_I32, H5_U32, H5_I64, H5_U64, H5_F32, H5_F64, H5_TEXT } h5_type;

#define H5_NO_FIELD ((size_t)-1)

typedef struct h5_column {
    const char *path;
    h5_type type;
    int32_t width;  /* elements a row (bytes of a text); 0: this file does not have the column */
    int32_t rank;   /* dimensions of the dataset: 1, or 2 where a row can have several elements */
    int32_t space;  /* which of the file's row counts it follows */
    int32_t many;   /* rows are so many that they are read and written in large chunks */
    int32_t packed; /* filters in a finished file; digests do not shrink and have none */
    size_t field;   /* in the record of its space: the value, or the pointer to its rows */
} h5_column;

size_t h5_column_row_bytes(const h5_column *column);
int64_t h5_column_chunk_rows(const h5_column *column);
hid_t h5_column_type(const h5_column *column); /* the same in memory and in the file; to be closed with H5Tclose */

uint64_t h5_commit_check(const uint64_t commit[H5_COMMIT_WORDS]);

/* Opens the exempt scope of the allocation guard and silences HDF5's own printing; end restores both. */
typedef struct h5_scope {
    const char *phase;
    H5E_auto2_t print;
    void *print_context;
} h5_scope;
h5_scope h5_scope_begin(void);
void h5_scope_end(h5_scope scope);

/* "path: cannot <doing>: <what HDF5 said first>". */
br_status h5_fail(br_status status, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
