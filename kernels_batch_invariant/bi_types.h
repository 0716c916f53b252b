/* bi_types: what all ops share: matrices, adapters, rows of a step, caches, faults.
 *
 * Layer: kernels_batch_invariant; includes base and numeric. All op arguments are plain structs of pointers and sizes owned
 * by the caller. Ops never allocate, never keep a pointer after they return, and return BR_E_SHAPE, BR_E_ALIGN or BR_E_ARG
 * (with a sentence `op: what is found: expected range`) before they touch an output. Row t of an output depends on row t of
 * the inputs, on the weights, and where the op says so on the rows of the same sequence that lie before it; on nothing else
 * (P-2). */
#ifndef BI_TYPES_H
#define BI_TYPES_H

#include "bi_bits.h"
#include "bi_contract.h"
#include "br_config.h"
#include "br_status.h"

typedef struct bi_ctx bi_ctx; /* a backend opened: threads and scratch */

/* Where an op reports NaN or Inf at a point that P-5 names: row[t] = code if it was 0. A row with a fault computes on; its
 * request ends, its neighbours keep their bits. row NULL: not checked. */
typedef struct bi_fault {
    uint32_t *row; /* (n_row) */
    uint32_t code; /* not 0; the model's (layer, stage) */
} bi_fault;

/* A weight matrix in the backend's packed form; y[n_out] = W x[n_in]. data NULL: absent. */
typedef struct bi_mat {
    const void *data;
    int32_t n_out, n_in;
} bi_mat;

/* One adapter on one linear map: t = R(RN(s * A x)), then k-blocks [B t] continue the base chain (N-LORA).
 * a (rank, n_in), b (n_out, rank). a.data NULL: this adapter leaves the map alone. */
typedef struct bi_adapter {
    bi_mat a, b;
    float s;
} bi_adapter;

/* The adapters of a step. slot NULL: no adapter touches this map. row_slot[t] = -1: base. */
typedef struct bi_lora {
    const bi_adapter *slot;
    const int32_t *row_slot; /* (n_row) */
} bi_lora;

/* Rows row .. row + n_row - 1 of the step are positions pos .. of sequence seq. One segment a sequence and step at most. */
typedef struct bi_seg {
    int32_t seq; /* index into block tables and states */
    int32_t row, n_row, pos;
} bi_seg;

typedef struct bi_batch {
    int32_t n_row, n_seg;
    const bi_seg *seg;      /* (n_seg), ascending row, covering 0..n_row-1 */
    const int32_t *row_seg; /* (n_row) */
} bi_batch;

/* One layer's cache of one kind, in blocks of BR_PAGE_TOK positions; what a block holds is the backend's business, so blocks
 * are copied whole. Block b of sequence s lies at
 *   base + block_bytes * (table ? table[s * table_ld + b] : first[s] + b)
 * table: paged (rollout); first: contiguous (scoring). */
typedef struct bi_cache {
    unsigned char *base;
    size_t block_bytes;
    const int32_t *table;
    int32_t table_ld;
    const int32_t *first;
} bi_cache;

/* Per-sequence state of one layer: sequence s at base + seq_bytes * (index ? index[s] : s). Its content before position 0
 * is never read. */
typedef struct bi_state {
    unsigned char *base;
    size_t seq_bytes;
    const int32_t *index;
} bi_state;

/* The rank that an adapter is computed at: zeros fill it up. */
static inline int32_t bi_pad_rank(int32_t rank) {
    return (rank + BI_LORA_RANK_PAD - 1) / BI_LORA_RANK_PAD * BI_LORA_RANK_PAD;
}

static inline unsigned char *bi_cache_block(const bi_cache *c, int32_t seq, int32_t block) {
    int64_t at = c->table ? c->table[(int64_t)seq * c->table_ld + block] : (int64_t)c->first[seq] + block;
    return c->base + c->block_bytes * (size_t)at;
}

static inline unsigned char *bi_state_of(const bi_state *s, int32_t seq) {
    return s->base + s->seq_bytes * (size_t)(s->index ? s->index[seq] : seq);
}

/* The largest shapes a backend will be asked for; its scratch is sized from them at open. */
typedef struct bi_limits {
    int32_t n_row;                       /* rows of a step */
    int32_t d_in, rank;                  /* of any linear map, of any adapter */
    int32_t n_head, d_kv_latent, d_rope; /* MLA */
    int32_t index_n_head, index_d_head;
    int32_t n_pos;                       /* longest sequence */
    int32_t n_expert, n_expert_topk, d_expert, d_expert_ff;
    int32_t n_vocab, d_model;
} bi_limits;

#endif
