/* What decides a text, field by field; see resume_check.h. */
#include "resume_check.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { VALUE_BYTES = 320 };

typedef enum value_kind { VALUE_TEXT, VALUE_DIGEST, VALUE_U64, VALUE_I32, VALUE_F32, VALUE_F64 } value_kind;

static const struct setting {
    const char *name;
    value_kind kind;
    size_t field; /* in rollout_seq */
} settings[] = {
    {"uid", VALUE_TEXT, offsetof(rollout_seq, uid)},
    {"adapter", VALUE_TEXT, offsetof(rollout_seq, adapter)},
    {"seed", VALUE_U64, offsetof(rollout_seq, seed)},
    {"temperature", VALUE_F32, offsetof(rollout_seq, temperature)},
    {"top_k", VALUE_I32, offsetof(rollout_seq, top_k)},
    {"top_p", VALUE_F64, offsetof(rollout_seq, top_p)},
    {"min_p", VALUE_F32, offsetof(rollout_seq, min_p)},
    {"max_new", VALUE_I32, offsetof(rollout_seq, max_new)},
    {"min_new", VALUE_I32, offsetof(rollout_seq, min_new)},
    {"ignore_eos", VALUE_I32, offsetof(rollout_seq, ignore_eos)},
    {"number of stop tokens", VALUE_I32, offsetof(rollout_seq, n_stop)},
    {"prompt length", VALUE_I32, offsetof(rollout_seq, prompt_len)},
    {"digest of its adapter", VALUE_DIGEST, offsetof(rollout_seq, adapter_digest)}, /* the last: a request that was refused has none */
};

enum { SETTING_COUNT = sizeof settings / sizeof settings[0] };

/* Values are equal where they print equally: 9 and 17 digits name a binary32 and a binary64. */
static void print_value(const struct setting *s, const rollout_seq *seq, char text[VALUE_BYTES]) {
    const void *at = (const char *)seq + s->field;
    switch (s->kind) {
    case VALUE_TEXT: snprintf(text, VALUE_BYTES, "'%s'", (const char *)at); break;
    case VALUE_DIGEST: br_digest_text(*(const br_digest *)at, text); break;
    case VALUE_U64: snprintf(text, VALUE_BYTES, "%" PRIu64, *(const uint64_t *)at); break;
    case VALUE_I32: snprintf(text, VALUE_BYTES, "%d", *(const int32_t *)at); break;
    case VALUE_F32: snprintf(text, VALUE_BYTES, "%.9g", (double)*(const float *)at); break;
    case VALUE_F64: snprintf(text, VALUE_BYTES, "%.17g", *(const double *)at); break;
    }
}

static br_status differs(const char *path, const rollout_seq *have, const char *name, const char *in_file, const char *here) {
    return br_fail(BR_E_ARG, "%s: cannot resume: the %s of %s#%u is %s there, %s in this run", path, name, have->uid, have->sample, in_file, here);
}

static br_status check_ids(const char *path, const rollout_seq *seq, const char *name, const int32_t *have, const int32_t *want, int32_t n) {
    char a[VALUE_BYTES], b[VALUE_BYTES];
    int32_t i = 0;
    while (i < n && have[i] == want[i])
        i++;
    if (i == n)
        return BR_OK;
    snprintf(a, sizeof a, "%d", have[i]);
    snprintf(b, sizeof b, "%d", want[i]);
    return differs(path, seq, name, a, b);
}

br_status resume_check(const char *path, const rollout_seq *have, const rollout_seq *want) {
    char a[VALUE_BYTES], b[VALUE_BYTES];
    for (int i = 0; i < SETTING_COUNT - (have->status != 0); i++) {
        print_value(&settings[i], have, a);
        print_value(&settings[i], want, b);
        if (strcmp(a, b) != 0)
            return differs(path, have, settings[i].name, a, b);
    }
    BR_TRY(check_ids(path, have, "first other stop token", have->stop_token, want->stop_token, have->n_stop));
    return check_ids(path, have, "first other prompt token", have->token, want->token, have->prompt_len);
}
