/* The order-free digest of a run; see logprob_digest.h. Layer: proof. */
#include "logprob_digest.h"
#include "br_mem.h"

#include <stdlib.h>
#include <string.h>

static int any_sampled(const rollout_seq *seq) {
    return memchr(seq->mask, 1, (size_t)seq->n_tok) != NULL;
}

logprob_leaf logprob_leaf_of(const rollout_seq *seq) {
    br_hash_stream s;
    int by_mask = any_sampled(seq);
    br_hash_begin(&s);
    br_hash_add(&s, seq->uid, strlen(seq->uid) + 1);
    br_hash_add(&s, &seq->sample, sizeof seq->sample);
    br_hash_add(&s, &seq->n_tok, sizeof seq->n_tok);
    br_hash_add(&s, seq->token, (size_t)seq->n_tok * sizeof seq->token[0]);
    for (int32_t t = 0; t < seq->n_tok; t++)
        if (seq->logprob[t] != BR_UNSCORED && (seq->mask[t] || !by_mask)) {
            br_hash_add(&s, &t, sizeof t);
            br_hash_add(&s, &seq->logprob[t], sizeof seq->logprob[t]);
        }
    return (logprob_leaf){.prompt_index = seq->prompt_index, .sample = seq->sample, .digest = br_hash_end(&s)};
}

static int by_prompt_and_sample(const void *left, const void *right) {
    const logprob_leaf *a = left, *b = right;
    if (a->prompt_index != b->prompt_index)
        return a->prompt_index < b->prompt_index ? -1 : 1;
    if (a->sample != b->sample)
        return a->sample < b->sample ? -1 : 1;
    return memcmp(&a->digest, &b->digest, sizeof a->digest);
}

br_digest logprob_digest(logprob_leaf *leaf, int64_t n) {
    br_hash_stream s;
    qsort(leaf, (size_t)n, sizeof leaf[0], by_prompt_and_sample);
    br_hash_begin(&s);
    for (int64_t i = 0; i < n; i++)
        br_hash_add(&s, &leaf[i].digest, sizeof leaf[i].digest);
    return br_hash_end(&s);
}

br_status logprob_digest_of_file(const rollout_reader *reader, br_digest *out) {
    logprob_leaf *leaf;
    int64_t n = rollout_seq_count(reader);
    *out = (br_digest){0, 0};
    BR_TRY(br_mem_alloc((void **)&leaf, (size_t)n * sizeof leaf[0], "the leaves of the log-prob digest"));
    for (int64_t i = 0; i < n; i++) {
        rollout_seq seq;
        rollout_seq_at(reader, i, &seq);
        leaf[i] = logprob_leaf_of(&seq);
    }
    *out = logprob_digest(leaf, n);
    br_mem_free(leaf);
    return BR_OK;
}
