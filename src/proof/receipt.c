/* Digests of a sequence by groups of fields; see receipt.h. Layer: proof. */
#include "receipt.h"

#include <string.h>

static void add_text(br_hash_stream *s, const char *text) {
    br_hash_add(s, text, strlen(text) + 1);
}

#define ADD(stream, value) br_hash_add((stream), &(value), sizeof(value))

static void add_identity(br_hash_stream *s, const rollout_seq *seq) {
    add_text(s, seq->uid);
    ADD(s, seq->prompt_index);
    ADD(s, seq->sample);
    ADD(s, seq->seed);
}

static void add_settings(br_hash_stream *s, const rollout_seq *seq) {
    ADD(s, seq->temperature);
    ADD(s, seq->min_p);
    ADD(s, seq->top_p);
    ADD(s, seq->top_k);
    ADD(s, seq->max_new);
    ADD(s, seq->min_new);
    ADD(s, seq->ignore_eos);
    ADD(s, seq->n_stop);
    br_hash_add(s, seq->stop_token, (size_t)seq->n_stop * sizeof seq->stop_token[0]);
}

static void add_tokens(br_hash_stream *s, const rollout_seq *seq) {
    ADD(s, seq->prompt_len);
    ADD(s, seq->n_tok);
    br_hash_add(s, seq->token, (size_t)seq->n_tok * sizeof seq->token[0]);
    br_hash_add(s, seq->mask, (size_t)seq->n_tok);
}

static void add_logprobs(br_hash_stream *s, const rollout_seq *seq) {
    size_t n_byte = (size_t)seq->n_tok * sizeof seq->logprob[0];
    br_hash_add(s, seq->logprob, n_byte);
    br_hash_add(s, seq->logprob_raw, n_byte);
    br_hash_add(s, seq->logprob_kept, n_byte);
}

static void add_extras(br_hash_stream *s, const rollout_meta *meta, const rollout_seq *seq) {
    size_t n_slot = (size_t)seq->n_tok * (size_t)meta->n_top;
    if (meta->has_entropy)
        br_hash_add(s, seq->entropy, (size_t)seq->n_tok * sizeof seq->entropy[0]);
    if (meta->n_top > 0) {
        br_hash_add(s, seq->top_token, n_slot * sizeof seq->top_token[0]);
        br_hash_add(s, seq->top_logprob, n_slot * sizeof seq->top_logprob[0]);
    }
}

static uint64_t part_digest(const rollout_meta *meta, const rollout_seq *seq, rollout_part part) {
    br_hash_stream s;
    br_hash_begin(&s);
    switch (part) {
    case ROLLOUT_PART_IDENTITY: add_identity(&s, seq); break;
    case ROLLOUT_PART_SETTINGS: add_settings(&s, seq); break;
    case ROLLOUT_PART_ADAPTER:
        add_text(&s, seq->adapter);
        ADD(&s, seq->adapter_digest);
        break;
    case ROLLOUT_PART_TOKENS: add_tokens(&s, seq); break;
    case ROLLOUT_PART_LOGPROBS: add_logprobs(&s, seq); break;
    case ROLLOUT_PART_EXTRAS: add_extras(&s, meta, seq); break;
    case ROLLOUT_PART_RESULT:
        ADD(&s, seq->status);
        ADD(&s, seq->stop);
        ADD(&s, seq->error);
        break;
    case ROLLOUT_PART_COUNT: break;
    }
    return br_hash_end(&s).lo;
}

const char *receipt_part_name(rollout_part part) {
    static const char *const name[ROLLOUT_PART_COUNT] = {
        "identity (uid, prompt index, sample, seed)", "sampling settings", "adapter", "tokens", "log-probs",
        "entropy or alternatives", "result (status, stop, error)",
    };
    return name[part];
}

int32_t receipt_find_nan(const rollout_seq *seq) {
    for (int32_t t = 0; t < seq->n_tok; t++) {
        int missing = seq->mask[t] && seq->status == 0 && seq->logprob[t] == BR_UNSCORED;
        if (missing || receipt_is_stray_nan(seq->logprob[t]) || receipt_is_stray_nan(seq->logprob_raw[t]) ||
            receipt_is_stray_nan(seq->logprob_kept[t]) || (seq->entropy && receipt_is_stray_nan(seq->entropy[t])))
            return t;
    }
    return -1;
}

void receipt_parts(const rollout_meta *meta, const rollout_seq *seq, uint64_t part[ROLLOUT_PART_COUNT]) {
    for (int p = 0; p < ROLLOUT_PART_COUNT; p++)
        part[p] = part_digest(meta, seq, (rollout_part)p);
}

br_digest receipt_of_parts(const rollout_meta *meta, const uint64_t part[ROLLOUT_PART_COUNT]) {
    br_hash_stream s;
    br_hash_begin(&s);
    ADD(&s, meta->contract_digest);
    ADD(&s, meta->weights_digest);
    br_hash_add(&s, part, ROLLOUT_PART_COUNT * sizeof part[0]);
    return br_hash_end(&s);
}

br_status receipt_make(const rollout_meta *meta, rollout_seq *seq) {
    int32_t t = receipt_find_nan(seq);
    if (t >= 0)
        return br_fail(BR_E_NAN,
                       "sequence '%s' sample %u: position %d: log-prob bits %08x: expected a number in a scored slot",
                       seq->uid, seq->sample, t, seq->logprob[t]);
    receipt_parts(meta, seq, seq->part);
    seq->receipt = receipt_of_parts(meta, seq->part);
    return BR_OK;
}
