/* The digest of an adapter, host form; see lora_digest.h. */
#include "lora_digest.h"

#include <string.h>

br_digest lora_digest_matrix(const uint16_t *value, int64_t n) {
    return br_hash_bytes(value, sizeof *value * (size_t)n);
}

br_digest lora_digest_recipe(const bi_weightgen *gen) {
    const uint64_t number[2] = {gen->key, (uint64_t)gen->kind};
    const uint32_t bits[2] = {bi_u32_of(gen->offset), bi_u32_of(gen->unit)};
    br_hash_stream stream;
    br_hash_begin(&stream);
    br_hash_add(&stream, "generated", sizeof "generated");
    br_hash_add(&stream, number, sizeof number);
    br_hash_add(&stream, bits, sizeof bits);
    return br_hash_end(&stream);
}

void lora_digest_scale(const lora_scale *scale, unsigned char out[LORA_DIGEST_SCALE_BYTES]) {
    const int32_t number[2] = {scale->rank, scale->rslora};
    out[0] = 0;
    memcpy(out + 1, number, sizeof number);
    memcpy(out + 1 + sizeof number, &scale->alpha, sizeof scale->alpha);
}

void lora_digest_add(br_hash_stream *stream, const char *name, size_t n, const lora_scale *scale, br_digest a, br_digest b) {
    const br_digest matrix[2] = {a, b};
    unsigned char bytes[LORA_DIGEST_SCALE_BYTES];
    lora_digest_scale(scale, bytes);
    br_hash_add(stream, name, n);
    br_hash_add(stream, bytes, sizeof bytes);
    br_hash_add(stream, matrix, sizeof matrix);
}
