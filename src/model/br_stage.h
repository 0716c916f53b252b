/* br_stage: the named points of the forward pass where two runs can be compared. Layer: model; numbers and names only.
 * The order is the order of computation inside a layer, so the first differing line of two dumps names the op. */
#ifndef BR_STAGE_H
#define BR_STAGE_H

#include <stdint.h>

typedef enum br_stage {
    BR_STAGE_EMBED,
    BR_STAGE_RES_ATTN,
    BR_STAGE_NORM_ATTN,
    BR_STAGE_QKV,
    BR_STAGE_CONV,
    BR_STAGE_GATE,
    BR_STAGE_KDA,
    BR_STAGE_INDEX_TOPK,
    BR_STAGE_MLA,
    BR_STAGE_ATTN_OUT,
    BR_STAGE_RES_MLP,
    BR_STAGE_NORM_MLP,
    BR_STAGE_ROUTE,
    BR_STAGE_EXPERTS,
    BR_STAGE_FFN_OUT,
    BR_STAGE_FINAL,
    BR_STAGE_LOGPROB,
    BR_STAGE_COUNT
} br_stage;

const char *br_stage_name(br_stage stage); /* "embed", "res_attn", ... */

/* A fault code names where P-5 caught NaN or Inf. Layer -1: before the first layer. Never 0. */
static inline uint32_t br_fault_code(int32_t layer, br_stage stage) {
    return ((uint32_t)(layer + 2) << 8) | (uint32_t)(stage + 1);
}
static inline int32_t br_fault_layer(uint32_t code) { return (int32_t)(code >> 8) - 2; }
static inline br_stage br_fault_stage(uint32_t code) { return (br_stage)((code & 255) - 1); }

/* What a stage shows of each row: some pieces of memory, piece after piece. */
typedef struct br_piece {
    const void *data;
    int64_t row_stride; /* bytes */
    int64_t row_bytes;
    const int32_t *row_count; /* NULL, or (n_row): row t shows row_count[t] * row_bytes bytes */
} br_piece;

/* Called between ops with rows of the step in batch order, in the device's memory; the watcher may read, never write. */
typedef struct br_trace {
    void (*rows)(void *context, br_stage stage, int32_t layer, const br_piece *piece, int32_t n_piece);
    void *context;
} br_trace;

#endif
