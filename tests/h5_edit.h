/* h5_edit: changes in a finished rollout file behind its writer's back, for tests that expect to be caught. */
#ifndef H5_EDIT_H
#define H5_EDIT_H

#include <stddef.h>
#include <stdint.h>

size_t h5_edit_bytes(const char *path, const char *dataset);                        /* of all rows */
void h5_edit_read(const char *path, const char *dataset, void *bytes);              /* all rows, as stored */
void h5_edit_write(const char *path, const char *dataset, const void *bytes);
void h5_edit_flip(const char *path, const char *dataset, size_t byte, int bit);
size_t h5_edit_attribute_bytes(const char *path, const char *name);
void h5_edit_attribute_flip(const char *path, const char *name, size_t byte, int bit);
void h5_edit_attribute_set(const char *path, const char *name, const char *text); /* NULL: removed */
void h5_edit_attribute_add(const char *path, const char *name, const char *text);
void h5_edit_unlink(const char *path, const char *dataset);
/* A new dataset in the place of `dataset`: n rows of zeros. type: an HDF5 native type as "i32", "f64", "u8", "vlen". */
void h5_edit_replace(const char *path, const char *dataset, const char *type, int rank, const uint64_t *size);
void h5_edit_break_header(const char *path, const char *object); /* a bit of its object header */
void h5_edit_link_away(const char *path, const char *dataset); /* moves it and leaves a soft link */

#endif
