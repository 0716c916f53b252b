/* br_hash: XXH3-128 digests as 16 bytes, and the Merkle root over them. Layer: base. Finds accidents, not forgers. */
#ifndef BR_HASH_H
#define BR_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "bitroll.h" /* br_digest: two words, lo and hi */

enum { BR_DIGEST_TEXT_BYTES = 33 }; /* 32 hex digits and the end */

br_digest br_hash_bytes(const void *bytes, size_t n);
/* Digest of `n` bytes chained onto `before`: hash(before || bytes). */
br_digest br_hash_chain(br_digest before, const void *bytes, size_t n);
/* Merkle root: leaves in order, pairs hashed, an odd last one carried up. n = 0 gives the digest of no bytes. Overwrites leaf. */
br_digest br_hash_merkle(br_digest *leaf, size_t n);
uint64_t br_hash_u64(const void *bytes, size_t n); /* XXH3-64, for stage lines */
uint64_t br_hash_xxh64(const void *bytes, size_t n); /* XXH64 seed 0: N-RNG counts with it */
int br_digest_equal(br_digest a, br_digest b);
void br_digest_text(br_digest digest, char text[BR_DIGEST_TEXT_BYTES]);

/* A digest built from pieces; the state is inline so that no stream allocates. */
typedef struct br_hash_stream { _Alignas(64) unsigned char state[640]; } br_hash_stream;
void br_hash_begin(br_hash_stream *stream);
void br_hash_add(br_hash_stream *stream, const void *bytes, size_t n);
br_digest br_hash_end(const br_hash_stream *stream);

#endif
