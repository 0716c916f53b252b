/* Headers on the wire: written, read, refused; see tb_frame.h. Layer: trainer_bridge. */
#include "tb_frame.h"

#include "br_hash.h"
#include "br_mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words go over the wire as they lie in memory");

enum { AT_MAGIC = 0, AT_MAJOR = 4, AT_MINOR = 6, AT_TYPE = 8, AT_FLAGS = 10, AT_CRC = 12, AT_SEQUENCE = 16, AT_SESSION = 24,
       AT_VERSION = 32, AT_LENGTH = 40, AT_HASH = 48, AT_SUBJECT = 56 };

static const unsigned char magic[4] = {'B', 'R', 'T', 'B'};

const char *tb_code_name(uint32_t code) {
    static const char *const name[TB_CODE_COUNT] = {
        "ok", "bad magic", "bad header CRC", "another major version", "payload too long", "truncated", "bad payload hash",
        "bad sequence number", "another session", "unknown type", "wrong direction", "bad payload", "out of place", "differs",
        "silent", "no credit", "busy", "bad version", "bad tensor", "bad digest", "aborted", "not built in", "failed", "connection lost",
    };
    return code < TB_CODE_COUNT ? name[code] : "unknown code";
}

tb_code tb_fail(tb_code code, const char *format, ...) {
    char text[4 * BR_SENTENCE_BYTES]; /* br_fail shortens it in the middle */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    (void)br_fail(BR_E_FORMAT, "%s", text);
    return code;
}

tb_code tb_code_of(br_status status) {
    switch (status) {
    case BR_OK: return TB_OK;
    case BR_E_LIMIT: return TB_BUSY;
    case BR_E_MISMATCH: return TB_BAD_DIGEST;
    case BR_E_UNSUPPORTED: return TB_NOT_BUILT;
    case BR_E_ABORTED: return TB_ABORTED;
    case BR_E_ARG:
    case BR_E_SHAPE:
    case BR_E_FORMAT:
    case BR_E_NOT_FOUND:
    case BR_E_NAN: return TB_BAD_TENSOR;
    default: return TB_FAILED;
    }
}

/* ---- CRC-32C ------------------------------------------------------------------------------------------------------------- */

/* The reflected polynomial 0x82f63b78, four bits at a time: sixteen words of table, a header is 128 steps. */
uint32_t tb_crc32c_table(const void *bytes, size_t n) {
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
        0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    const unsigned char *p = bytes;
    uint32_t crc = ~(uint32_t)0;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        crc = table[crc & 15] ^ crc >> 4;
        crc = table[crc & 15] ^ crc >> 4;
    }
    return ~crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static uint32_t crc32c_instruction(const void *bytes, size_t n) {
    const unsigned char *p = bytes;
    uint64_t crc = ~(uint32_t)0, word;
    for (; n >= sizeof word; p += sizeof word, n -= sizeof word) {
        memcpy(&word, p, sizeof word);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    uint32_t last = (uint32_t)crc;
    for (; n > 0; p++, n--)
        last = __builtin_ia32_crc32qi(last, *p);
    return ~last;
}
#endif

uint32_t tb_crc32c(const void *bytes, size_t n) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_instruction(bytes, n);
#endif
    return tb_crc32c_table(bytes, n);
}

/* ---- headers ------------------------------------------------------------------------------------------------------------- */

static uint32_t header_crc(const unsigned char header[TB_HEADER_BYTES]) {
    unsigned char copy[TB_HEADER_BYTES];
    memcpy(copy, header, sizeof copy);
    memset(copy + AT_CRC, 0, 4);
    return tb_crc32c(copy, sizeof copy);
}

void tb_header_write(const tb_header *header, unsigned char out[TB_HEADER_BYTES]) {
    memset(out, 0, TB_HEADER_BYTES);
    memcpy(out + AT_MAGIC, magic, sizeof magic);
    memcpy(out + AT_MAJOR, &header->major, 2);
    memcpy(out + AT_MINOR, &header->minor, 2);
    memcpy(out + AT_TYPE, &header->type, 2);
    memcpy(out + AT_FLAGS, &header->flags, 2);
    memcpy(out + AT_SEQUENCE, &header->sequence, 8);
    memcpy(out + AT_SESSION, &header->session, 8);
    memcpy(out + AT_VERSION, &header->version, 8);
    memcpy(out + AT_LENGTH, &header->n_payload, 8);
    memcpy(out + AT_HASH, &header->payload_hash, 8);
    memcpy(out + AT_SUBJECT, &header->subject, 8);
    const uint32_t crc = header_crc(out);
    memcpy(out + AT_CRC, &crc, 4);
}

void tb_header_seal(tb_header *header, const void *payload, uint64_t n_payload, unsigned char out[TB_HEADER_BYTES]) {
    BR_ASSERT(n_payload <= TB_PAYLOAD_MAX);
    header->n_payload = n_payload;
    header->payload_hash = br_hash_xxh64(payload, n_payload);
    tb_header_write(header, out);
}

tb_code tb_header_read(const void *bytes, size_t n, tb_header *out) {
    const unsigned char *p = bytes;
    uint32_t crc;
    memset(out, 0, sizeof *out);
    if (n < TB_HEADER_BYTES)
        return tb_fail(TB_TRUNCATED, "a frame's header: %zu bytes of %d came", n, TB_HEADER_BYTES);
    if (memcmp(p + AT_MAGIC, magic, sizeof magic) != 0)
        return tb_fail(TB_BAD_MAGIC, "a frame begins with %02x%02x%02x%02x: expected the magic 42525442, the peer does not speak this protocol",
                       p[0], p[1], p[2], p[3]);
    memcpy(&crc, p + AT_CRC, 4);
    if (crc != header_crc(p))
        return tb_fail(TB_BAD_CRC, "a frame's header has CRC %08x: its bytes give %08x", crc, header_crc(p));
    memcpy(&out->major, p + AT_MAJOR, 2);
    memcpy(&out->minor, p + AT_MINOR, 2);
    memcpy(&out->type, p + AT_TYPE, 2);
    memcpy(&out->flags, p + AT_FLAGS, 2);
    memcpy(&out->sequence, p + AT_SEQUENCE, 8);
    memcpy(&out->session, p + AT_SESSION, 8);
    memcpy(&out->version, p + AT_VERSION, 8);
    memcpy(&out->n_payload, p + AT_LENGTH, 8);
    memcpy(&out->payload_hash, p + AT_HASH, 8);
    memcpy(&out->subject, p + AT_SUBJECT, 8);
    if (out->major != TB_MAJOR)
        return tb_fail(TB_BAD_MAJOR, "the peer speaks version %u.%u of the protocol: this side speaks %d.%d, and majors must be equal", out->major,
                       out->minor, TB_MAJOR, TB_MINOR);
    if (out->n_payload > TB_PAYLOAD_MAX)
        return tb_fail(TB_BAD_LENGTH, "a frame announces %llu bytes: at most %llu are accepted", (unsigned long long)out->n_payload,
                       (unsigned long long)TB_PAYLOAD_MAX);
    return TB_OK;
}

tb_code tb_payload_check(const tb_header *header, const void *payload, uint64_t n) {
    if (n != header->n_payload)
        return tb_fail(TB_TRUNCATED, "frame %llu: %llu bytes of %llu came", (unsigned long long)header->sequence, (unsigned long long)n,
                       (unsigned long long)header->n_payload);
    const uint64_t hash = br_hash_xxh64(payload, n);
    if (hash != header->payload_hash)
        return tb_fail(TB_BAD_HASH, "frame %llu: its payload hashes to %016llx, the header says %016llx", (unsigned long long)header->sequence,
                       (unsigned long long)hash, (unsigned long long)header->payload_hash);
    return TB_OK;
}

/* ---- bytes that grow ----------------------------------------------------------------------------------------------------- */

static unsigned char *make_room(tb_buffer *buffer, size_t n) {
    if (buffer->failed == BR_OK && n > buffer->n_max - buffer->n) {
        size_t more = buffer->n_max ? 2 * buffer->n_max : 4096;
        more = more < buffer->n + n ? buffer->n + n : more;
        buffer->failed = br_mem_grow((void **)&buffer->bytes, buffer->n, more, "a message");
        buffer->n_max = buffer->failed == BR_OK ? more : buffer->n_max;
    }
    if (buffer->failed != BR_OK)
        return NULL;
    buffer->n += n;
    return buffer->bytes + buffer->n - n;
}

unsigned char *tb_buffer_take(tb_buffer *buffer, size_t n) {
    unsigned char *at = make_room(buffer, n);
    if (at)
        memset(at, 0, n);
    return at;
}

void tb_buffer_add(tb_buffer *buffer, const void *bytes, size_t n) {
    unsigned char *at = make_room(buffer, n);
    if (at && n)
        memcpy(at, bytes, n);
}

void tb_header_add(const tb_header *header, const void *payload, uint64_t n_payload, tb_buffer *out) {
    unsigned char head[TB_HEADER_BYTES];
    tb_header h = *header;
    h.major = TB_MAJOR;
    h.minor = TB_MINOR;
    tb_header_seal(&h, payload, n_payload, head);
    tb_buffer_add(out, head, sizeof head);
}

void tb_buffer_close(tb_buffer *buffer) {
    br_mem_free(buffer->bytes);
    *buffer = (tb_buffer){0};
}
