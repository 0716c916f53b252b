/* parity: do two files hold the same log-probs, bit for bit? Layer: stats; includes base and io. Reads records only.
 *
 * Pass means: one run (run_uid, weights, contract, adapters, settings, tokens, masks), two producers (the stamps differ: a
 * copy proves nothing), every sequence in both, no NaN in a scored slot, and `logprob` equal as 32-bit words on every
 * sampled token; at least one was compared. Statistics are in binary64 over the compared slots, in the file order of a:
 *   d = log-prob of the trainer - log-prob of the rollout, k1 = mean(-d), k3 = mean(exp(d) - 1 - d).
 * When both files have one producer, b stands for the trainer. */
#ifndef PARITY_H
#define PARITY_H

#include "rollout_file.h"

enum { PARITY_BUCKET_COUNT = 34 }; /* 0 ulp, 1, 2, 3..4, 5..8, ... up to 2^32 */

typedef struct parity_place {
    int64_t seq, pos;       /* sequence of a, in its file order; -1: no such place */
    char uid[ROLLOUT_UID_BYTES];
    uint32_t sample, bits_a, bits_b;
} parity_place;

typedef struct parity_result {
    int64_t n_joined, n_only_a, n_only_b, n_doubled;
    int64_t n_error;        /* joined sequences of which either ended in error: compared where both have scores */
    int64_t n_settings_differ, n_adapter_differ, n_tokens_differ; /* sequences; tokens: or masks */
    int64_t n_compared, n_differ, n_nan; /* slots with mask 1 */
    int64_t n_other, n_other_differ;    /* slots with mask 0 that both score (prompts): not part of the verdict */
    parity_place first;                 /* first differing log-prob, NaN or token */
    int64_t max_ulp;
    double k1, k3, max_abs;
    int64_t bucket[PARITY_BUCKET_COUNT];
    int passed;
    char reason[512];                   /* the first that failed; "" when passed */
} parity_result;

/* Errors: BR_E_NOMEM. A failed comparison is not an error here: see passed. */
br_status parity_compare(const rollout_reader *a, const rollout_reader *b, parity_result *out);
/* Distance in representable numbers between two patterns that are no NaN; -0 and +0 are one apart. */
int64_t parity_ulp(uint32_t a, uint32_t b);
int parity_is_nan(uint32_t bits);
double parity_value(uint32_t bits);
/* Which bucket; and its range for a reader. */
int parity_bucket(int64_t ulp);
void parity_bucket_range(int bucket, int64_t *first, int64_t *last);

#endif
