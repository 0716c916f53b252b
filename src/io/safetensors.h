/* safetensors: the header of one file, checked. Layer: io; includes base. A parser of outside files (fuzzed).
 * Refused with BR_E_FORMAT naming file and tensor: truncated, header too large, not JSON, name twice, unknown dtype, shape
 * times size != byte range, range outside the file, overlapping or gapped ranges, bytes after the last one. The data are
 * never read here: a sparse file that holds its header only opens like any other. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H
#include "br_file.h"
#include <stdint.h>

/* The format's own limit of a header; shapes of more than 8 dimensions are refused (vision towers have up to 5). */
enum { ST_HEADER_BYTES_MAX = 100000000, ST_DIM_MAX = 8 };

typedef struct st_entry {
    const char *name; /* owned by the file */
    char dtype[8];    /* "BF16", "F32", "U8", ... */
    int32_t n_dim;
    int64_t dim[ST_DIM_MAX];
    uint64_t begin, n_byte; /* in the file */
} st_entry;

typedef struct st_file {
    char *path;
    br_map map;
    st_entry *entry; /* ascending begin */
    int64_t n_entry;
    void *names; /* the memory of the names */
} st_file;

br_status st_open(const char *path, st_file *out);
br_status st_parse(const char *what, const unsigned char *bytes, size_t n, st_file *out); /* map left empty */
void st_close(st_file *file); /* an all-zero file is a no-op */

/* Writer: entries in the given order; data are gathered by a callback so that no whole tensor need be in memory. Each call
 * asks for the n bytes of `entry` that begin at `offset`, ascending, at most ST_WRITE_BYTES at once. The header is padded so
 * that the data begin at a multiple of 8. Written to "path.part", flushed, renamed; on error path is as it was. Errors:
 * BR_E_ARG (n_byte is not shape times size, unknown dtype, a name with a quote, backslash or control character), BR_E_IO,
 * BR_E_NOMEM, and whatever `fill` returns. */
enum { ST_WRITE_BYTES = 1 << 20 };
typedef struct st_out { const char *name, *dtype; int32_t n_dim; int64_t dim[4]; uint64_t n_byte; } st_out;
typedef br_status (*st_fill)(void *context, int64_t entry, uint64_t offset, unsigned char *bytes, size_t n);
br_status st_write(const char *path, const st_out *entry, int64_t n_entry, st_fill fill, void *context);

/* Bytes of a tensor; 0 in *ok for an unknown dtype, a size that overflows or is not whole bytes. */
uint64_t st_tensor_bytes(const char *dtype, const int64_t *dim, int32_t n_dim, int *ok);
#endif
