/* lora_digest: the digest of an adapter, one definition for files, chunks and the memory that a forward reads.
 *
 * Layer: lora; includes base and numeric's generator. Map by map in the order of br_weight_expect, over those that the adapter touches:
 *   name of the map, ended by 0 | rank, rslora (int32) | alpha (binary64) | digest of A | digest of B
 * A matrix is hashed alone: XXH3-128 of its row-major bf16 bytes, A (rank, n_in), B (n_out, rank), at the rank of the adapter whatever
 * room it lies in. So the matrices can be hashed in any order, each where it lies, and 16 bytes of each are brought together. */
#ifndef LORA_DIGEST_H
#define LORA_DIGEST_H

#include "bi_weightgen.h"
#include "br_hash.h"

/* What an adapter does to one map besides its values. rank 0: nothing. s = alpha / rank, or alpha / sqrt(rank) when rslora. */
typedef struct lora_scale {
    int32_t rank, rslora;
    double alpha;
} lora_scale;

br_digest lora_digest_matrix(const uint16_t *value, int64_t n);
/* Of a matrix that is made from a recipe: the recipe stands for its values. */
br_digest lora_digest_recipe(const bi_weightgen *gen);
/* What stands between name and digests: the 0, rank, rslora, alpha. */
enum { LORA_DIGEST_SCALE_BYTES = 1 + 2 * sizeof(int32_t) + sizeof(double) };
void lora_digest_scale(const lora_scale *scale, unsigned char out[LORA_DIGEST_SCALE_BYTES]);
/* After br_hash_begin, once a map. name: n bytes, not ended by 0. */
void lora_digest_add(br_hash_stream *stream, const char *name, size_t n, const lora_scale *scale, br_digest a, br_digest b);

#endif
