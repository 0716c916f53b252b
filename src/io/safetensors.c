/* The header of a safetensors file: 8 bytes of length, JSON, then data without gaps; see safetensors.h. */
#include "safetensors.h"

#include "br_mem.h"
#include "json_scope.h"

#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8 };

static const struct {
    const char *name;
    uint32_t n_bit;
} DTYPE[] = {
    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},
    {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64}, {"I64", 64}, {"U64", 64},
};

uint64_t st_tensor_bytes(const char *dtype, const int64_t *dim, int32_t n_dim, int *ok) {
    uint64_t n_bit = 0;
    for (size_t i = 0; i < sizeof DTYPE / sizeof DTYPE[0]; i++) {
        if (strcmp(dtype, DTYPE[i].name) == 0)
            n_bit = DTYPE[i].n_bit;
    }
    *ok = n_bit != 0;
    for (int32_t d = 0; d < n_dim && *ok; d++)
        *ok = dim[d] >= 0 && !__builtin_mul_overflow(n_bit, (uint64_t)dim[d], &n_bit);
    *ok = *ok && n_bit % 8 == 0;
    return *ok ? n_bit / 8 : 0;
}

/* Fills shape and dtype; the byte range is still relative to the data section. */
static br_status parse_entry(const st_file *file, const char *name, const json_t *value, uint64_t n_data, st_entry *out) {
    const json_t *shape = json_object_get(value, "shape"), *range = json_object_get(value, "data_offsets");
    const json_t *begin = json_array_get(range, 0), *end = json_array_get(range, 1);
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    int ok;
    if (!dtype || !json_is_array(shape) || json_array_size(range) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': expected dtype, shape and two data_offsets", file->path, name);
    if (json_array_size(shape) > ST_DIM_MAX)
        return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': %zu dimensions, expected at most %d", file->path, name,
                       json_array_size(shape), ST_DIM_MAX);
    out->n_dim = (int32_t)json_array_size(shape);
    for (int32_t d = 0; d < out->n_dim; d++) {
        const json_t *dim = json_array_get(shape, (size_t)d);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': dimension %d is not a count", file->path, name, d);
        out->dim[d] = json_integer_value(dim);
    }
    uint64_t n_byte = st_tensor_bytes(dtype, out->dim, out->n_dim, &ok);
    if (!ok)
        return br_fail(BR_E_FORMAT,
                       "%s: tensor '%.200s': dtype '%.20s' is unknown, or its shape is not a whole count of bytes",
                       file->path, name, dtype);
    memcpy(out->dtype, dtype, strlen(dtype) + 1); /* every known name fits */
    json_int_t from = json_integer_value(begin), to = json_integer_value(end);
    if (from < 0 || to < from || (uint64_t)to > n_data)
        return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': bytes %lld to %lld, but the file holds %llu bytes of data",
                       file->path, name, (long long)from, (long long)to, (unsigned long long)n_data);
    if ((uint64_t)(to - from) != n_byte)
        return br_fail(BR_E_FORMAT, "%s: tensor '%.200s': %lld bytes, expected %llu for its shape and dtype %s", file->path,
                       name, (long long)(to - from), (unsigned long long)n_byte, out->dtype);
    out->begin = (uint64_t)from;
    out->n_byte = n_byte;
    return BR_OK;
}

static int by_begin(const void *a, const void *b) {
    const st_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->n_byte != y->n_byte)
        return x->n_byte < y->n_byte ? -1 : 1; /* empty tensors come before the one that begins there */
    return strcmp(x->name, y->name);
}

/* Ranges in file order must touch: a gap could hide bytes that no digest sees, an overlap two tensors in one place. */
static br_status check_ranges(st_file *file, uint64_t n_data, uint64_t data_begin) {
    uint64_t at = 0;
    qsort(file->entry, (size_t)file->n_entry, sizeof file->entry[0], by_begin);
    for (int64_t i = 0; i < file->n_entry; i++) {
        st_entry *e = &file->entry[i];
        if (e->begin != at)
            return br_fail(BR_E_FORMAT, "%s: tensor '%.200s' begins at byte %llu of the data, expected %llu: %s", file->path,
                           e->name, (unsigned long long)e->begin, (unsigned long long)at,
                           e->begin < at ? "it overlaps another" : "a gap");
        at += e->n_byte;
        e->begin += data_begin;
    }
    if (at != n_data)
        return br_fail(BR_E_FORMAT, "%s: %llu bytes of data, expected %llu: bytes after the last tensor", file->path,
                       (unsigned long long)n_data, (unsigned long long)at);
    return BR_OK;
}

static br_status take_entries(st_file *file, const json_t *root, uint64_t n_data) {
    size_t names_bytes = 1, n_max = json_object_size(root);
    const char *key;
    const json_t *value;
    void *block;
    json_object_foreach((json_t *)(uintptr_t)root, key, value) names_bytes += strlen(key) + 1;
    BR_TRY(br_mem_alloc(&file->names, names_bytes, "tensor names"));
    BR_TRY(br_mem_alloc(&block, n_max * sizeof(st_entry), "tensor entries"));
    file->entry = block;
    char *name = file->names;
    json_object_foreach((json_t *)(uintptr_t)root, key, value) {
        size_t n = strlen(key) + 1;
        if (strcmp(key, "__metadata__") == 0)
            continue;
        memcpy(name, key, n);
        st_entry *e = &file->entry[file->n_entry++];
        e->name = name;
        name += n;
        BR_TRY(parse_entry(file, e->name, value, n_data, e));
    }
    return BR_OK;
}

static br_status parse_into(const unsigned char *bytes, size_t n, st_file *file) {
    uint64_t n_header = 0;
    json_t *root = NULL;
    if (n < LENGTH_BYTES)
        return br_fail(BR_E_FORMAT, "%s: %zu bytes, expected at least the 8 of the header's length", file->path, n);
    for (int i = 0; i < LENGTH_BYTES; i++)
        n_header |= (uint64_t)bytes[i] << (8 * i);
    if (n_header > ST_HEADER_BYTES_MAX)
        return br_fail(BR_E_FORMAT, "%s: a header of %llu bytes, expected at most %d", file->path,
                       (unsigned long long)n_header, ST_HEADER_BYTES_MAX);
    if (n_header > n - LENGTH_BYTES)
        return br_fail(BR_E_FORMAT, "%s: truncated: a header of %llu bytes in a file of %zu", file->path,
                       (unsigned long long)n_header, n);
    uint64_t data_begin = LENGTH_BYTES + n_header, n_data = n - data_begin;
    BR_TRY(json_read_object(file->path, (const char *)bytes + LENGTH_BYTES, (size_t)n_header, &root));
    br_status status = take_entries(file, root, n_data);
    json_decref(root);
    BR_TRY(status);
    return check_ranges(file, n_data, data_begin);
}

br_status st_parse(const char *what, const unsigned char *bytes, size_t n, st_file *out) {
    void *path;
    *out = (st_file){0};
    BR_TRY(br_mem_alloc(&path, strlen(what) + 1, "a file name"));
    out->path = path;
    memcpy(out->path, what, strlen(what) + 1);
    br_status status = parse_into(bytes, n, out);
    if (status != BR_OK)
        st_close(out);
    return status;
}

br_status st_open(const char *path, st_file *out) {
    br_map map;
    *out = (st_file){0};
    BR_TRY(br_file_map(path, &map));
    br_status status = st_parse(path, map.bytes, map.n, out);
    if (status != BR_OK) {
        br_file_unmap(&map);
        return status;
    }
    out->map = map;
    return BR_OK;
}

void st_close(st_file *file) {
    br_file_unmap(&file->map);
    br_mem_free(file->entry);
    br_mem_free(file->names);
    br_mem_free(file->path);
    *file = (st_file){0};
}
