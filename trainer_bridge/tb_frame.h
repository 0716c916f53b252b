/* tb_frame: the 64 bytes in front of every payload on the wire, and all that can be wrong with them.
 *
 * Layer: trainer_bridge; includes base. Pure functions over bytes. Little-endian, protocol version 2 (in 1 GEN_ABORT
 * did what GEN_DISCARD does, and HELLO had neither rank nor alpha):
 *
 *    0  4  magic "BRTB"                             24  8  session, drawn by the trainer, the same in both directions
 *    4  2  major: must be equal                     32  8  weight version
 *    6  2  minor: a newer one's flags are ignored   40  8  payload bytes, at most TB_PAYLOAD_MAX
 *    8  2  message type    10  2  flags             48  8  XXH64 of the payload
 *   12  4  CRC-32C of the header, this field 0      56  8  subject: request id, or index of a tensor
 *   16  8  sequence number of this direction, from 0
 *
 * Bytes 0 to 7 and the CRC stand where they are in every major version, so that a newer peer is refused as such and not as damage. */
#ifndef TB_FRAME_H
#define TB_FRAME_H

#include "br_status.h"
#include <stddef.h>

enum { TB_HEADER_BYTES = 64, TB_MAJOR = 2, TB_MINOR = 0 };
#define TB_PAYLOAD_MAX ((uint64_t)1 << 30)

/* What went wrong, as ERROR, W_NACK and exit sentences say it. Values are pinned: they go over the wire. */
typedef enum tb_code {
    TB_OK = 0,
    TB_BAD_MAGIC = 1,
    TB_BAD_CRC = 2,
    TB_BAD_MAJOR = 3,
    TB_BAD_LENGTH = 4,    /* above the cap */
    TB_TRUNCATED = 5,     /* fewer bytes than announced */
    TB_BAD_HASH = 6,
    TB_BAD_SEQUENCE = 7,  /* a gap or a repeat */
    TB_BAD_SESSION = 8,
    TB_BAD_TYPE = 9,
    TB_BAD_DIRECTION = 10,
    TB_BAD_PAYLOAD = 11,
    TB_BAD_STATE = 12,    /* the message has no place here */
    TB_DIFFERS = 13,      /* HELLO: another contract, model or tokenizer, or adapters of another rank or alpha */
    TB_SILENT = 14,       /* not heard of for too long, or no greeting in time */
    TB_NO_CREDIT = 15,    /* sent more than was granted */
    TB_BUSY = 16,         /* later, perhaps */
    TB_BAD_VERSION = 17,
    TB_BAD_TENSOR = 18,   /* a weight message that does not fit the manifest or the bytes before it */
    TB_BAD_DIGEST = 19,
    TB_ABORTED = 20,
    TB_NOT_BUILT = 21,
    TB_FAILED = 22,       /* memory, device, engine */
    TB_LOST = 23,         /* the connection ended without BYE */
    TB_CODE_COUNT = 24
} tb_code;

const char *tb_code_name(uint32_t code); /* static string */

typedef struct tb_header {
    uint16_t major, minor, type, flags;
    uint64_t sequence, session, version, n_payload, payload_hash, subject;
} tb_header;

/* CRC-32C (Castagnoli), by the processor's instruction where it has one. _table: the same without it. */
uint32_t tb_crc32c(const void *bytes, size_t n);
uint32_t tb_crc32c_table(const void *bytes, size_t n);

/* Sets n_payload and payload_hash from the payload, then writes the header with its CRC. */
void tb_header_seal(tb_header *header, const void *payload, uint64_t n_payload, unsigned char out[TB_HEADER_BYTES]);
/* Writes the fields as they are, with a CRC that fits them. */
void tb_header_write(const tb_header *header, unsigned char out[TB_HEADER_BYTES]);
/* Checks in this order: length, magic, CRC, major, payload cap. The sentence is br_last_error(). */
tb_code tb_header_read(const void *bytes, size_t n, tb_header *out);
tb_code tb_payload_check(const tb_header *header, const void *payload, uint64_t n); /* TB_TRUNCATED, TB_BAD_HASH */

/* Bytes that grow. After a failed growth nothing more is added and `failed` stays. All zero is an empty one. */
typedef struct tb_buffer {
    unsigned char *bytes; /* 64-byte aligned */
    size_t n, n_max;
    br_status failed;
} tb_buffer;

unsigned char *tb_buffer_take(tb_buffer *buffer, size_t n); /* n zeroed bytes at the end, NULL after a failure */
void tb_buffer_add(tb_buffer *buffer, const void *bytes, size_t n);
#ifdef __GNUC__
#pragma GCC visibility push(default) /* for the trainer's bridge library */
#endif
void tb_buffer_close(tb_buffer *buffer);
#ifdef __GNUC__
#pragma GCC visibility pop
#endif

/* Adds a frame's header, of our version and sealed over the payload, which the caller adds or sends behind it. */
void tb_header_add(const tb_header *header, const void *payload, uint64_t n_payload, tb_buffer *out);

/* As br_fail, for codes. */
tb_code tb_fail(tb_code code, const char *format, ...) __attribute__((format(printf, 2, 3)));
tb_code tb_code_of(br_status status); /* of an op that failed */

#endif
