/* bi_embed: y[t] = table[token[t]].      Contract: N-EMB-1
 * token (n_row) ids 0..n_vocab-1 (else BR_E_SHAPE); table (n_vocab, d_model) bf16, not packed; y (n_row, d_model) bf16. */
#ifndef BI_EMBED_H
#define BI_EMBED_H
#include "bi_types.h"
typedef struct bi_embed_args {
    int32_t n_row, d_model, n_vocab;
    const int32_t *token;
    const bi_bf16 *table;
    bi_bf16 *y;
} bi_embed_args;
#endif
