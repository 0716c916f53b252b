/* The ranges of a sequence's fields, checked before a file takes it and before a reader shows it. Layer: io. */
#include "rollout_layout.h"

#include <string.h>

typedef struct check {
    br_status status;
    const char *path;
    int64_t i;
} check;

static br_status bad(const check *c, const char *dataset, long long found, const char *wanted) {
    return br_fail(c->status, "%s: sequence %lld: %s is %lld: expected %s", c->path, (long long)c->i, dataset, found,
                   wanted);
}

static br_status check_text(const check *c, const char *dataset, const char *text, size_t n_byte) {
    size_t n = strnlen(text, n_byte);
    if (n == 0 || n == n_byte)
        return br_fail(c->status, "%s: sequence %lld: %s has %s: expected 1 to %zu bytes", c->path, (long long)c->i, dataset,
                       n ? "no end" : "no text", n_byte - 1);
    for (size_t i = n; i < n_byte; i++)
        if (text[i] != 0)
            return bad(c, dataset, text[i], "zeros behind its end");
    return BR_OK;
}

static br_status check_shape(const check *c, const rollout_seq *seq) {
    if (seq->sample >= ROLLOUT_SAMPLE_END)
        return bad(c, "sample", seq->sample, "less than 2^24");
    if (seq->n_tok < 1 || seq->n_tok > ROLLOUT_SEQ_TOK_MAX)
        return bad(c, "its token count", seq->n_tok, "1 to 2^20");
    if (seq->prompt_len < 1 || seq->prompt_len > seq->n_tok)
        return bad(c, "prompt_len", seq->prompt_len, "1 to the token count");
    return BR_OK;
}

static br_status check_settings(const check *c, const rollout_seq *seq) {
    if (seq->n_stop < 0 || seq->n_stop > BR_STOP_MAX)
        return bad(c, "n_stop", seq->n_stop, "0 to 16");
    for (int32_t i = seq->n_stop; i < BR_STOP_MAX; i++)
        if (seq->stop_token[i] != -1)
            return bad(c, "an unused stop_token", seq->stop_token[i], "-1");
    if (seq->ignore_eos != 0 && seq->ignore_eos != 1)
        return bad(c, "ignore_eos", seq->ignore_eos, "0 or 1");
    if (seq->status > 1)
        return bad(c, "status", seq->status, "0 or 1");
    if (seq->stop > BR_STOP_ERROR)
        return bad(c, "stop", seq->stop, "0 to 4");
    return BR_OK;
}

static br_status check_tokens(const check *c, const rollout_meta *meta, const rollout_seq *seq) {
    for (int32_t t = 0; t < seq->n_tok; t++) {
        if (seq->token[t] < 0)
            return bad(c, "a token id", seq->token[t], "0 or more");
        if (seq->mask[t] > 1)
            return bad(c, "a mask byte", seq->mask[t], "0 or 1");
    }
    for (int64_t t = 0; t < (int64_t)seq->n_tok * meta->n_top; t++)
        if (seq->top_token[t] < -1)
            return bad(c, "a top_id", seq->top_token[t], "-1 or more");
    return BR_OK;
}

br_status rollout_seq_check(br_status status, const char *path, int64_t i, const rollout_meta *meta,
                            const rollout_seq *seq) {
    check c = {.status = status, .path = path, .i = i};
    BR_TRY(check_text(&c, "uid", seq->uid, sizeof seq->uid));
    BR_TRY(check_shape(&c, seq));
    if (!meta->is_foreign) {
        BR_TRY(check_text(&c, "adapter_name", seq->adapter, sizeof seq->adapter));
        BR_TRY(check_settings(&c, seq));
    }
    return check_tokens(&c, meta, seq);
}
