/* bi_types: what all ops share: matrices, adapters, rows of a step, caches, faults.
 *
 * Layer: kernels_batch_invariant; includes base and numeric. All op arguments are plain structs of pointers and sizes owned
 * by the caller. The structs themselves, and the arrays `slot` of bi_lora and of bi_experts_args and `bank` of bi_attnres_args, are
 * read at the call, in host memory; every other pointer in them is memory of the backend's device (br_device.h). Ops never
 * allocate, never keep a pointer after they return, and return BR_E_SHAPE, BR_E_ALIGN or BR_E_ARG (with a sentence `op: what is
 * found: expected range`) before they touch an output. Row t of an output depends on row t of the inputs, on the weights, and
 * where the op says so on the rows of the same sequence that lie before it; on nothing else (P-2). */
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

/* What a packed matrix holds; MXFP4 stays four bits a weight where the backend can expand it on the way (N-FP4). */
typedef enum bi_form { BI_FORM_BF16, BI_FORM_FP4 } bi_form;

/* A stack of weight matrices of one shape in the backend's packed form, matrix i at data + i * stride; a single one is a
 * stack of one. y[n_out] = W x[n_in]. data NULL: absent. */
typedef struct bi_mat {
    const void *data;
    int32_t n_out, n_in;
    bi_form form;
    size_t stride;
} bi_mat;

/* One adapter on a stack of maps: t = R(RN(s * A x)), then k-blocks [B t] continue the base chain (N-LORA).
 * a (rank, n_in), b (n_out, rank), one of each a map, bf16; s one a map. a.data NULL: this adapter leaves the maps alone;
 * where it touches some of them only, the others have zeros, which give the base bits. */
typedef struct bi_adapter {
    bi_mat a, b;
    const float *s;
} bi_adapter;

/* The adapters of a step. slot NULL: no adapter touches this map. row_slot[t] = -1: base. */
typedef struct bi_lora {
    const bi_adapter *slot; /* (n_slot) */
    int32_t n_slot;
    const int32_t *row_slot; /* (n_row) */
} bi_lora;

/* Rows row .. row + n_row - 1 of the step are positions pos .. of sequence seq. One segment a sequence and step at most. */
typedef struct bi_seg {
    int32_t seq; /* index into block tables and states */
    int32_t row, n_row, pos;
} bi_seg;

/* seg_row_max and pos_max let a backend choose its launch shapes; no bit depends on them. Padding: a segment may have no
 * rows, and a row behind all segments has row_seg -1; ops write nothing that is kept for either. */
typedef struct bi_batch {
    int32_t n_row, n_seg;
    int32_t seg_row_max;    /* rows of the longest segment */
    int32_t pos_max;        /* no row has a larger position */
    const bi_seg *seg;      /* (n_seg), ascending row; together they are a prefix of the rows, padding follows */
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

/* Matrix i of a stack, by itself. */
static inline bi_mat bi_mat_at(const bi_mat *stack, int32_t i) {
    bi_mat one = *stack;
    one.data = (const unsigned char *)stack->data + stack->stride * (size_t)i;
    return one;
}

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
    int32_t d_in, d_out, rank, n_slot;   /* of any linear map but the head, of any adapter; adapters */
    int32_t n_head, d_kv_latent, d_rope; /* MLA */
    int32_t index_n_head, index_d_head;
    int32_t n_pos;                       /* longest sequence */
    int32_t n_expert, n_expert_topk, d_expert, d_expert_ff;
    int32_t kda_n_head, kda_d_head;
    int32_t n_vocab, d_model;
} bi_limits;

#endif
