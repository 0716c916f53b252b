/* slow_head: N-HEAD and N-SAMPLE as literal loops over one row, written from the clauses alone. Shares nothing with the
 * oracle but the settings struct; the functions of N-FN are those of slow_fn. */
#ifndef SLOW_HEAD_H
#define SLOW_HEAD_H

#include "bi_sample.h"
#include "op_rig.h"

typedef struct slow_softmax {
    float max, log_sum, entropy;
} slow_softmax;

float slow_z(float x, float temperature); /* temperature 0: taken at 1 */
slow_softmax slow_softmax_of(const float *x, int n, float temperature);
float slow_logprob(const slow_softmax *s, float z);

typedef struct slow_sampled {
    int token;
    float logprob, logprob_raw, logprob_kept, entropy;
    bi_top top[BR_TOP_LOGPROBS_MAX];
    int n_kept; /* after all filters */
} slow_sampled;

/* u: the uniform 64-bit number of the draw. forced: -1 or a token. */
void slow_sample(const float *x, int n, const bi_sampling *set, uint64_t u, int forced, slow_sampled *out);
uint64_t slow_philox_u64(const bi_sampling *set); /* N-RNG, purpose 0 */
/* A setting whose draw is exactly u: Philox run backwards from (u, rest), until the counter has purpose 0. */
bi_sampling slow_setting_drawing(uint64_t u);

extern const bi_sampling SLOW_PLAIN; /* T = 1, every filter off, seed 0 */
enum { SLOW_LOGIT_KINDS = 10 };
void slow_logits(op_random *random, int kind, float *x, int n); /* plateaus, zeros, subnormals, overflowing spreads, ... */
bi_sampling slow_setting(op_random *random, int n_vocab);       /* any mixture of filters */

#endif
