/* bi_grad_experts_parts: what the files of the experts' gradients share: the plan, the job, the launches. Internal to
 * bi_grad_experts.cu and bi_grad_experts_plan.cu.
 *
 * The pairs are sorted by key = expert * n_key + slot + 1, stable; a place is an index into that order. */
#ifndef BI_GRAD_EXPERTS_PARTS_CUH
#define BI_GRAD_EXPERTS_PARTS_CUH

#include "bi_grad_dense.cuh"

enum {
    GE_PLACES = 64, /* of a tile */
    GE_SLOT_MAX = 16
};

typedef struct __align__(16) ge_tile {
    int32_t expert, slot, begin, n; /* places begin .. begin + n - 1; of one expert and slot */
} ge_tile;

/* Device memory, made by bi_grad_experts_plan. */
typedef struct ge_plan {
    int32_t n_key, n_group, n_pair, tile_max; /* keys of an expert, of all; tile_max: what the shapes allow */
    int32_t *key;                             /* of a pair; -1: an expert that does not exist */
    int32_t *offset;                          /* (n_group + 1): where each key begins */
    int32_t *pair, *row;                      /* of a place */
    ge_tile *tile;
    int32_t *n_tile;
} ge_plan;

br_status bi_grad_experts_plan(bi_grad_ctx *ctx, const ge_plan *plan, const int32_t *expert, const int32_t *row_slot, int32_t topk,
                               int32_t n_expert);

#endif
