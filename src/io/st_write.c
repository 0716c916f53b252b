/* The streaming writer of safetensors files; see safetensors.h. */
#include "safetensors.h"

#include "br_file.h"
#include "br_mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { HEADER_ALIGN = 8 };

/* The header being written: bytes NULL while its size is measured. */
typedef struct header_text {
    char *bytes;
    size_t n;
} header_text;

static void put(header_text *h, size_t n_max, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(header_text *h, size_t n_max, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(h->bytes ? h->bytes + h->n : NULL, h->bytes ? n_max - h->n : 0, format, args);
    va_end(args);
    BR_ASSERT(n >= 0);
    h->n += (size_t)n;
}

/* Run twice: measuring, then writing into n_max bytes. */
static void put_header(header_text *h, size_t n_max, const st_out *entry, int64_t n_entry) {
    uint64_t at = 0;
    put(h, n_max, "{");
    for (int64_t i = 0; i < n_entry; i++) {
        const st_out *e = &entry[i];
        put(h, n_max, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "", e->name, e->dtype);
        for (int32_t d = 0; d < e->n_dim; d++)
            put(h, n_max, "%s%lld", d ? "," : "", (long long)e->dim[d]);
        put(h, n_max, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)(at + e->n_byte));
        at += e->n_byte;
    }
    put(h, n_max, "}");
}

static br_status check_entry(const char *path, const st_out *e) {
    int ok;
    uint64_t n_byte = st_tensor_bytes(e->dtype, e->dim, e->n_dim, &ok);
    if (e->n_dim < 0 || e->n_dim > 4 || !ok || n_byte != e->n_byte)
        return br_fail(BR_E_ARG, "%s: tensor '%.200s': %llu bytes do not fit its shape and dtype %.8s", path, e->name,
                       (unsigned long long)e->n_byte, e->dtype);
    for (const char *c = e->name; *c; c++) {
        if ((unsigned char)*c < 0x20 || *c == '"' || *c == '\\')
            return br_fail(BR_E_ARG, "%s: tensor name '%.200s': expected no quote, backslash or control character", path,
                           e->name);
    }
    return BR_OK;
}

static br_status write_header(br_file_part *part, const st_out *entry, int64_t n_entry) {
    header_text measured = {0}, text = {0};
    void *block;
    put_header(&measured, 0, entry, n_entry);
    size_t n_pad = (HEADER_ALIGN - measured.n % HEADER_ALIGN) % HEADER_ALIGN, n_header = measured.n + n_pad;
    BR_TRY(br_mem_alloc(&block, HEADER_ALIGN + n_header + 1, "a safetensors header"));
    unsigned char *bytes = block;
    for (int i = 0; i < HEADER_ALIGN; i++)
        bytes[i] = (unsigned char)((uint64_t)n_header >> (8 * i));
    text.bytes = (char *)bytes + HEADER_ALIGN;
    put_header(&text, measured.n + 1, entry, n_entry);
    memset(text.bytes + measured.n, ' ', n_pad);
    br_status status = br_file_put(part, bytes, HEADER_ALIGN + n_header);
    br_mem_free(block);
    return status;
}

static br_status write_data(br_file_part *part, const st_out *entry, int64_t n_entry, st_fill fill, void *context) {
    br_status status = BR_OK;
    void *bytes;
    BR_TRY(br_mem_alloc(&bytes, ST_WRITE_BYTES, "a write buffer"));
    for (int64_t i = 0; i < n_entry; i++) {
        for (uint64_t at = 0; at < entry[i].n_byte;) {
            uint64_t left = entry[i].n_byte - at;
            size_t n = left < ST_WRITE_BYTES ? (size_t)left : ST_WRITE_BYTES;
            BR_TRY_GOTO(fill(context, i, at, bytes, n), exit);
            BR_TRY_GOTO(br_file_put(part, bytes, n), exit);
            at += n;
        }
    }
exit:
    br_mem_free(bytes);
    return status;
}

br_status st_write(const char *path, const st_out *entry, int64_t n_entry, st_fill fill, void *context) {
    br_file_part part;
    for (int64_t i = 0; i < n_entry; i++)
        BR_TRY(check_entry(path, &entry[i]));
    BR_TRY(br_file_begin(path, &part));
    br_status status = write_header(&part, entry, n_entry);
    if (status == BR_OK)
        status = write_data(&part, entry, n_entry, fill, context);
    return br_file_end(&part, status);
}
