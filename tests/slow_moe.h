/* slow_moe: N-ROUTE, N-MOE, N-ACT and N-LORA as literal loops over one row, written from the clauses alone. Shares nothing
 * with the oracle but the bf16 conversions of bi_bits.h; functions and chain are those of slow_fn and slow_block. */
#ifndef SLOW_MOE_H
#define SLOW_MOE_H

#include "bi_glu.h"

enum { SLOW_MOE_WIDTH_MAX = 1024 }; /* of any row here */

/* y = W x, with one adapter when a is not NULL. All row-major. */
typedef struct slow_map {
    int n_out, n_in;
    const bi_bf16 *w;
    const bi_bf16 *a, *b; /* (rank, n_in), (n_out, rank) */
    int rank;
    float s;
} slow_map;

/* f32 accumulators of [x | T] against [W | B]. */
void slow_map_apply(const slow_map *map, const bi_bf16 *x, float *y);
void slow_expert(const slow_map *w1, const slow_map *w3, const slow_map *w2, const bi_act *act, const bi_bf16 *x,
                 bi_bf16 *y);
void slow_combine(int d, int topk, const bi_bf16 *e, const float *p, bi_bf16 *y);
/* From finite logits; expert ascending. */
void slow_route(const float *logit, const float *bias, int n_expert, int topk, int renormalize, float scale, int *expert,
                float *p);

#endif
