/* st_index: model.safetensors.index.json, which shard holds which tensor. Layer: io; includes base. A parser of outside
 * files (fuzzed). Refused with BR_E_FORMAT: not JSON, no weight_map, a tensor twice, a shard name that is not text. Whether
 * the shards exist and agree is the reader's business; a name that leaves the folder is refused by br_file_join. */
#ifndef ST_INDEX_H
#define ST_INDEX_H
#include "br_status.h"
#include <stddef.h>
#include <stdint.h>

enum { ST_SHARD_MAX = 4096 };

typedef struct st_index_entry {
    const char *name;
    int32_t file; /* index into the list of files */
    int32_t seen; /* for the reader: 1 once the tensor was met in its file */
} st_index_entry;

typedef struct st_index {
    const char **file; /* in order of first mention */
    int32_t n_file;
    st_index_entry *entry; /* ascending name */
    int64_t n_entry;
    char *names; /* the memory of all names */
} st_index;

br_status st_index_read(const char *path, st_index *out); /* BR_E_NOT_FOUND when there is none */
br_status st_index_parse(const char *what, const char *text, size_t n, st_index *out);
st_index_entry *st_index_find(const st_index *index, const char *name); /* NULL: not listed */
void st_index_close(st_index *index); /* an all-zero index is a no-op */
#endif
