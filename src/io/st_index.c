/* The weight map of a sharded checkpoint as a sorted array; see st_index.h. */
#include "st_index.h"

#include "br_file.h"
#include "br_mem.h"
#include "json_scope.h"

#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b) {
    return strcmp(((const st_index_entry *)a)->name, ((const st_index_entry *)b)->name);
}

/* Copies `text` behind the names used so far. */
static const char *keep(char **at, const char *text) {
    size_t n = strlen(text) + 1;
    char *kept = memcpy(*at, text, n);
    *at += n;
    return kept;
}

/* Files are few and mentioned in runs, so the last one is tried first. */
static br_status file_of(st_index *index, const char *what, const char *file, char **at, int32_t *out) {
    if (*out < index->n_file && strcmp(index->file[*out], file) == 0)
        return BR_OK;
    for (*out = 0; *out < index->n_file; ++*out) {
        if (strcmp(index->file[*out], file) == 0)
            return BR_OK;
    }
    if (index->n_file == ST_SHARD_MAX)
        return br_fail(BR_E_LIMIT, "%s: more than %d shards", what, ST_SHARD_MAX);
    index->file[index->n_file++] = keep(at, file);
    return BR_OK;
}

static br_status take_map(const char *what, const json_t *map, st_index *index) {
    size_t names_bytes = 1;
    int32_t file = 0;
    const char *key;
    const json_t *value;
    void *block;
    json_object_foreach((json_t *)(uintptr_t)map, key, value) {
        if (!json_is_string(value))
            return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': expected the name of a shard", what, key);
        names_bytes += strlen(key) + 1 + strlen(json_string_value(value)) + 1;
    }
    BR_TRY(br_mem_alloc(&block, names_bytes, "names of the index"));
    index->names = block;
    BR_TRY(br_mem_alloc(&block, json_object_size(map) * sizeof index->entry[0], "entries of the index"));
    index->entry = block;
    BR_TRY(br_mem_alloc(&block, ST_SHARD_MAX * sizeof index->file[0], "shards of the index"));
    index->file = block;
    char *at = index->names;
    json_object_foreach((json_t *)(uintptr_t)map, key, value) {
        BR_TRY(file_of(index, what, json_string_value(value), &at, &file));
        index->entry[index->n_entry++] = (st_index_entry){.name = keep(&at, key), .file = file};
    }
    qsort(index->entry, (size_t)index->n_entry, sizeof index->entry[0], by_name);
    return BR_OK;
}

br_status st_index_parse(const char *what, const char *text, size_t n, st_index *out) {
    br_status status;
    json_t *root = NULL;
    *out = (st_index){0};
    BR_TRY(json_read_object(what, text, n, &root));
    const json_t *map = json_object_get(root, "weight_map");
    status = json_is_object(map) ? take_map(what, map, out) : br_fail(BR_E_FORMAT, "%s: expected a weight_map object", what);
    json_decref(root);
    if (status != BR_OK)
        st_index_close(out);
    return status;
}

br_status st_index_read(const char *path, st_index *out) {
    br_map map;
    *out = (st_index){0};
    BR_TRY(br_file_map(path, &map));
    br_status status = st_index_parse(path, (const char *)map.bytes, map.n, out);
    br_file_unmap(&map);
    return status;
}

st_index_entry *st_index_find(const st_index *index, const char *name) {
    const st_index_entry key = {.name = name};
    return index->n_entry ? bsearch(&key, index->entry, (size_t)index->n_entry, sizeof key, by_name) : NULL;
}

void st_index_close(st_index *index) {
    br_mem_free(index->file);
    br_mem_free(index->entry);
    br_mem_free(index->names);
    *index = (st_index){0};
}
