/* logprob_digest: one digest over what a run sampled and its log-probs. Layer: proof; includes base and io.
 *
 * It does not depend on the order in which sequences ended: leaves are taken by (prompt index, sample). Of each sequence it
 * covers uid, sample, tokens, and the log-prob bits of the sampled tokens, so that rollout and trainer, who scores the
 * prompt as well, have equal digests. A sequence of which nothing was sampled (prompts that were only scored) has all its
 * scored slots in. */
#ifndef LOGPROB_DIGEST_H
#define LOGPROB_DIGEST_H

#include "rollout_file.h"

typedef struct logprob_leaf {
    uint32_t prompt_index, sample;
    br_digest digest;
} logprob_leaf;

logprob_leaf logprob_leaf_of(const rollout_seq *seq);
br_digest logprob_digest(logprob_leaf *leaf, int64_t n); /* sorts the leaves */
br_status logprob_digest_of_file(const rollout_reader *reader, br_digest *out); /* BR_E_NOMEM */

#endif
