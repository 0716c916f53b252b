/* bi_sample: filters, the draw, and the three log-probs of the drawn token.      Contract: N-HEAD, N-SAMPLE, N-RNG, P-4
 * logit (n_row, n_vocab) f32 (finite unless the row has a fault: then the row is skipped, token -1). Row i has setting[i].
 * Outputs (n_row): token, logprob, logprob_raw, logprob_kept, entropy (0x7fc00000 unless asked). top (n_row, top_ld) best
 * first, the n_top of each setting. forced (n_row) or NULL: >= 0 takes this token instead of drawing (log-probs are the
 * function of the token; logprob_kept of a token that the filters drop is -Inf). */
#ifndef BI_SAMPLE_H
#define BI_SAMPLE_H
#include "bi_types.h"
typedef struct bi_sampling {
    float temperature;    /* 0, or 2^-10..2^10 */
    float min_p;          /* 0: off */
    int32_t top_k;        /* 0: off */
    uint64_t top_p_q32;   /* P of N-SAMPLE; 2^32: off */
    int32_t n_top, entropy;
    uint64_t seed, uid_hash; /* XXH64(uid, 0) */
    uint32_t sample;
    int32_t position;     /* of the token being drawn */
} bi_sampling;
/* P of N-SAMPLE: min(2^32, max(1, trunc(top_p * 2^32))); the product is exact. top_p in (0, 1]. */
static inline uint64_t bi_sample_top_p(double top_p) {
    const uint64_t p = (uint64_t)(top_p * 4294967296.0);
    return p < 1 ? 1 : p;
}
typedef struct bi_top { int32_t token; float logprob; } bi_top;
typedef struct bi_sample_args {
    int32_t n_row, n_vocab;
    const float *logit;
    int64_t logit_ld;
    const bi_sampling *setting;
    const int32_t *forced;
    int32_t *token;
    float *logprob, *logprob_raw, *logprob_kept, *entropy;
    bi_top *top;
    int32_t top_ld;
    const uint32_t *row_fault; /* NULL or (n_row): nonzero rows are skipped */
} bi_sample_args;
#endif
