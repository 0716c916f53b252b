/* Digests by xxHash, inlined from its header; see br_hash.h. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "br_hash.h"

#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(XXH3_state_t) <= sizeof(((br_hash_stream *)0)->state), "br_hash_stream is too small");

static br_digest digest_of(XXH128_hash_t h) {
    return (br_digest){.lo = h.low64, .hi = h.high64};
}

br_digest br_hash_bytes(const void *bytes, size_t n) {
    return digest_of(XXH3_128bits(bytes, n));
}

br_digest br_hash_chain(br_digest before, const void *bytes, size_t n) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    br_hash_add(&stream, &before, sizeof before);
    br_hash_add(&stream, bytes, n);
    return br_hash_end(&stream);
}

br_digest br_hash_merkle(br_digest *leaf, size_t n) {
    if (n == 0)
        return br_hash_bytes("", 0);
    while (n > 1) {
        size_t n_up = 0;
        for (size_t i = 0; i + 1 < n; i += 2)
            leaf[n_up++] = br_hash_chain(leaf[i], &leaf[i + 1], sizeof leaf[0]);
        if (n % 2)
            leaf[n_up++] = leaf[n - 1];
        n = n_up;
    }
    return leaf[0];
}

uint64_t br_hash_u64(const void *bytes, size_t n) {
    return XXH3_64bits(bytes, n);
}

uint64_t br_hash_xxh64(const void *bytes, size_t n) {
    return XXH64(bytes, n, 0);
}

int br_digest_equal(br_digest a, br_digest b) {
    return a.lo == b.lo && a.hi == b.hi;
}

void br_digest_text(br_digest digest, char text[BR_DIGEST_TEXT_BYTES]) {
    snprintf(text, BR_DIGEST_TEXT_BYTES, "%016llx%016llx", (unsigned long long)digest.hi, (unsigned long long)digest.lo);
}

void br_hash_begin(br_hash_stream *stream) {
    memset(stream, 0, sizeof *stream);
    XXH3_128bits_reset((XXH3_state_t *)stream->state);
}

void br_hash_add(br_hash_stream *stream, const void *bytes, size_t n) {
    XXH3_128bits_update((XXH3_state_t *)stream->state, bytes, n);
}

br_digest br_hash_end(const br_hash_stream *stream) {
    return digest_of(XXH3_128bits_digest((const XXH3_state_t *)stream->state));
}
