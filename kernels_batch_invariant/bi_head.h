/* bi_score: log-probs of given tokens straight from the final rows.      Contract: N-HEAD
 * x (n_row, d) bf16, final norm applied; w packed (n_vocab, d); token (n_row); temperature (n_row) f32 (0: taken at 1).
 * logprob, logprob_raw (n_row) f32; entropy NULL or (n_row) f32, at the row's temperature. No (n_row, n_vocab) array need
 * exist. Logits for sampling: bi_linear with check_logits. Fault: a logit is not finite (its outputs are then +0). */
#ifndef BI_HEAD_H
#define BI_HEAD_H
#include "bi_types.h"
typedef struct bi_score_args {
    int32_t n_row, d, n_vocab;
    const bi_bf16 *x;
    bi_mat w;
    const int32_t *token;
    const float *temperature;
    float *logprob, *logprob_raw, *entropy;
    bi_fault fault;
} bi_score_args;
#endif
