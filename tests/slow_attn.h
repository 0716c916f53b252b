/* slow_attn: the literal forms of N-ATT and N-IDX that the oracle must equal, one row at a time.
 *
 * Layer: tests. Written from the clauses alone, with the functions of slow_fn; shares nothing with the oracle but the bf16
 * conversions of bi_bits.h, which have their own tests. Plain arrays in position order, no cache, no packing, no panels. */
#ifndef SLOW_ATTN_H
#define SLOW_ATTN_H

#include "bi_types.h"

typedef struct slow_attn {
    int32_t n_head, d_kv_latent, d_rope;
    const bi_bf16 *q;      /* (n_head, d_kv_latent) */
    const bi_bf16 *q_r;    /* head h at q_r + h * q_r_head_ld */
    int64_t q_r_head_ld;
    const bi_bf16 *latent; /* (n_pos, d_kv_latent + d_rope) */
    const int32_t *select; /* (n_select) ascending */
    int32_t n_select;
    float alpha;
} slow_attn;

/* z (n_head, d_kv_latent). Returns 1 when some score is not finite. */
int slow_attn_row(const slow_attn *a, bi_bf16 *z);

/* The non-negative e4m3 numbers in rising order, code 0..126; and the code nearest to a magnitude, a tie to the even one. */
float slow_e4m3_number(int code);
int slow_e4m3_code(float magnitude);

/* value[i]: the e4m3 number of x[i] / *scale. Every x finite. */
void slow_index_quantise(const bi_bf16 *x, int d, float *value, float *scale);

typedef struct slow_index {
    int32_t n_head, d, topk, n_pos; /* n_pos: the visible positions */
    const bi_bf16 *q;               /* (n_head, d) */
    const float *w;                 /* (n_head) */
    const bi_bf16 *k;               /* (n_pos, d) before quantisation */
    float c;
} slow_index;

/* score (n_pos); select (topk). Returns how many are selected. */
int slow_index_row(const slow_index *x, float *score, int32_t *select);

#endif
