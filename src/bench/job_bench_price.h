/* job_bench_price: the ops of a step of a model as a list, and what each takes alone.
 *
 * Layer: bench. The list follows from the configuration alone, as the forward pass does; equal ops are one entry with a count. The
 * price of invariance of a step is its time over the sum, op by op, of the faster of ours and the library's. */
#ifndef JOB_BENCH_PRICE_H
#define JOB_BENCH_PRICE_H

#include "br_config.h"
#include "job_bench.h"

typedef enum price_kind {
    PRICE_EMBED,
    PRICE_RMSNORM,
    PRICE_LAYERNORM,
    PRICE_LINEAR,
    PRICE_CONV,
    PRICE_KDA_GATE,
    PRICE_KDA,
    PRICE_KDA_NORM,
    PRICE_LATENT_STORE,
    PRICE_ATTN,
    PRICE_ATTN_GATE,
    PRICE_INDEX_STORE,
    PRICE_INDEX_SELECT,
    PRICE_ROUTE,
    PRICE_EXPERTS,
    PRICE_COMBINE,
    PRICE_GLU,
    PRICE_ATTNRES,
    PRICE_RESIDUAL,
    PRICE_GATHER,
    PRICE_SAMPLE,
    PRICE_SCORE,
    PRICE_KIND_COUNT
} price_kind;

enum { PRICE_OP_MAX = 48 };

/* d: inputs of a map, else the width of a row. Fields that a kind does not know are 0. */
typedef struct price_op {
    price_kind kind;
    int32_t count;
    int32_t d;
    int32_t ld;                                 /* norms: from row to row */
    int32_t n_head;                             /* LINEAR, KDA: maps or heads side by side */
    int32_t n_bank;                             /* ATTNRES */
    int32_t n_map, n_out[BI_LINEAR_GROUP_MAX];  /* LINEAR: maps of equal inputs in one call; CONV: streams in one call */
    uint32_t f32;                               /* LINEAR: bit i: map i leaves float32 */
    int32_t logits;                             /* LINEAR: of the head */
} price_op;

typedef struct price_list {
    price_op op[PRICE_OP_MAX];
    int32_t n;
} price_list;

/* A step: n_seq sequences of n_tok new tokens each behind pos others; score: log-probs of given tokens, else tokens are drawn. */
typedef struct price_step {
    const br_config *c;
    int32_t n_seq, n_tok, pos, score;
} price_step;

/* BR_E_UNSUPPORTED: an architecture other than K3.1. */
br_status price_list_make(const br_config *c, int32_t score, price_list *out);
void price_list_add(price_list *list, price_op op); /* count 1 */
const char *price_kind_name(price_kind kind);

/* Times op alone as row `name`, and the library's beside it where one does the same. */
br_status price_measure(bench *b, const price_step *step, const price_op *op, const char *name, bench_result *result);

#endif
