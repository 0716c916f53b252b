/* br_file: whole files in and out, maps, paths. Layer: base. Every error names the path and the system's reason. */
#ifndef BR_FILE_H
#define BR_FILE_H

#include "br_status.h"
#include <stddef.h>

enum { BR_PATH_BYTES = 4096 };

typedef struct br_map { const unsigned char *bytes; size_t n; } br_map; /* read only; n = 0 has bytes NULL */

br_status br_file_map(const char *path, br_map *out); /* BR_E_IO, BR_E_NOT_FOUND; a folder is BR_E_IO */
void br_file_unmap(br_map *map);
/* Writes to "path.part", flushes to disk, renames: a reader sees the old file or the whole new one. */
br_status br_file_write(const char *path, const void *bytes, size_t n);
/* The same in pieces. After a begin that succeeded comes an end; path lives until then. */
typedef struct br_file_part { const char *path; char part[BR_PATH_BYTES]; int fd; } br_file_part;
br_status br_file_begin(const char *path, br_file_part *out);
br_status br_file_put(br_file_part *part, const void *bytes, size_t n);
/* written: how the writing went. BR_OK: flushes and renames; else removes the part and gives `written` back. */
br_status br_file_end(br_file_part *part, br_status written);
br_status br_file_make_dir(const char *path); /* with parents; an existing folder is fine */
int br_file_exists(const char *path);
br_status br_file_check_regular(const char *path);   /* BR_E_NOT_FOUND, BR_E_IO: before a library opens it by name */
int br_file_is_same(const char *a, const char *b);   /* one file under two names; 0 when either is missing */
/* "dir/name" into out. name must be a relative path without "..": BR_E_FORMAT otherwise. BR_E_LIMIT when too long. */
br_status br_file_join(char out[BR_PATH_BYTES], const char *dir, const char *name);

/* Fault injection for tests: the n-th file read (mapped) or written from now fails, once. 0 switches it off. */
void br_file_fail_nth_read(long n);
void br_file_fail_nth_write(long n);

#endif
