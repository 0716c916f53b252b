/* ws_manifest: the tensors of one adapter version, in order: what a sender and this engine have to agree on before any byte moves.
 *
 * Layer: weightsync; includes base, weights (names), lora. Made from a plan (lora_plan.h): map by map in the order of br_weight_expect,
 * A then B, each bf16, row-major, A (rank, n_in), B (n_out, rank). A tensor is known by its number from then on. */
#ifndef WS_MANIFEST_H
#define WS_MANIFEST_H

#include "lora_text.h"

typedef struct ws_tensor {
    int64_t map; /* entry of the plan */
    br_class cls;
    int32_t layer, expert; /* expert -1: not of an expert */
    int32_t is_b, rank, n_row, n_col;
} ws_tensor;

typedef struct ws_manifest {
    const br_config *config; /* the caller's */
    int64_t n_map, n_tensor;
    lora_map *map;    /* (n_map) */
    lora_scale *plan; /* (n_map) */
    int64_t *touched; /* (n_map) the n_tensor / 2 maps that the plan touches come first */
    int32_t *order;   /* (n_tensor) tensors in the order in which they had best come in: long ones first (ws_long.h) */
    lora_text text;   /* of a version's digest */
    br_digest digest; /* of name, kind, dtype, shape, alpha and rslora of each tensor */
} ws_manifest;

/* Room for any plan; it is empty, no tensor, until set. */
br_status ws_manifest_open(ws_manifest *manifest, const br_config *config);
void ws_manifest_close(ws_manifest *manifest);
void ws_manifest_set(ws_manifest *manifest, const lora_scale *plan); /* allocates nothing; the plan is copied */
ws_tensor ws_manifest_at(const ws_manifest *manifest, int64_t i);
/* As PEFT writes it. */
void ws_manifest_name(const ws_manifest *manifest, int64_t i, char name[BR_NAME_BYTES]);
/* BR_E_NOT_FOUND: not a tensor of this manifest; the sentence says why. */
br_status ws_manifest_find(const ws_manifest *manifest, const char *name, int64_t *i);
static inline uint64_t ws_tensor_bytes(const ws_tensor *t) { return (uint64_t)t->n_row * (uint64_t)t->n_col * sizeof(uint16_t); }

#endif
