/* Bits against bits; see parity.h. Layer: stats. The only floating point here is on values read from files. */
#include "parity.h"
#include "parity_join.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct compare {
    const rollout_reader *a, *b;
    const rollout_meta *meta_a, *meta_b;
    double sign;           /* d = sign * (b - a) */
    double sum_k1, sum_k3;
    parity_join join;
    parity_result *out;
} compare;

/* ---- slots ------------------------------------------------------------------------------------------------------------ */

int parity_is_nan(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

double parity_value(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return (double)f;
}

/* Patterns in the order of their numbers: ..., -1, -0, +0, 1, ... */
static int64_t ordered(uint32_t bits) {
    return bits >> 31 ? -1 - (int64_t)(bits & 0x7fffffffu) : (int64_t)bits;
}

int64_t parity_ulp(uint32_t a, uint32_t b) {
    int64_t distance = ordered(a) - ordered(b);
    return distance < 0 ? -distance : distance;
}

int parity_bucket(int64_t ulp) {
    int bucket = ulp > 0;
    while (bucket > 0 && ((int64_t)1 << (bucket - 1)) < ulp)
        bucket++;
    return bucket;
}

void parity_bucket_range(int bucket, int64_t *first, int64_t *last) {
    *last = bucket ? (int64_t)1 << (bucket - 1) : 0;
    *first = bucket > 1 ? ((int64_t)1 << (bucket - 2)) + 1 : *last;
}

static void note_first(compare *c, int64_t i, const rollout_seq *a, const rollout_seq *b, int64_t pos) {
    parity_place *first = &c->out->first;
    if (first->seq >= 0)
        return;
    *first = (parity_place){.seq = i, .pos = pos, .sample = a->sample, .bits_a = BR_UNSCORED, .bits_b = BR_UNSCORED};
    memcpy(first->uid, a->uid, sizeof first->uid);
    if (pos < a->n_tok)
        first->bits_a = a->logprob[pos];
    if (pos < b->n_tok)
        first->bits_b = b->logprob[pos];
}

static void add_slot(compare *c, uint32_t a, uint32_t b) {
    parity_result *out = c->out;
    int64_t ulp = parity_ulp(a, b);
    out->n_compared++;
    out->bucket[parity_bucket(ulp)]++;
    if (ulp == 0)
        return; /* adds exactly 0 to both sums, infinities included */
    double d = c->sign * (parity_value(b) - parity_value(a));
    out->n_differ++;
    out->max_ulp = ulp > out->max_ulp ? ulp : out->max_ulp;
    out->max_abs = fabs(d) > out->max_abs ? fabs(d) : out->max_abs;
    c->sum_k1 -= d;
    c->sum_k3 += isinf(d) ? INFINITY : expm1(d) - d;
}

/* A sampled token must have a score in both files, unless its sequence ended in error in the file that lacks it. */
static void compare_sampled(compare *c, int64_t i, const rollout_seq *a, const rollout_seq *b, int64_t t) {
    uint32_t bits_a = a->logprob[t], bits_b = b->logprob[t];
    int excused_a = bits_a == BR_UNSCORED && a->status != 0, excused_b = bits_b == BR_UNSCORED && b->status != 0;
    if ((parity_is_nan(bits_a) && !excused_a) || (parity_is_nan(bits_b) && !excused_b)) {
        c->out->n_nan++;
        note_first(c, i, a, b, t);
        return;
    }
    if (excused_a || excused_b)
        return;
    if (bits_a != bits_b)
        note_first(c, i, a, b, t);
    add_slot(c, bits_a, bits_b);
}

/* Prompt tokens: both score them only when both are trainers. NaN outside the mark of an unscored slot counts as a NaN. */
static void compare_other(compare *c, int64_t i, const rollout_seq *a, const rollout_seq *b, int64_t t) {
    uint32_t bits_a = a->logprob[t], bits_b = b->logprob[t];
    if ((parity_is_nan(bits_a) && bits_a != BR_UNSCORED) || (parity_is_nan(bits_b) && bits_b != BR_UNSCORED)) {
        c->out->n_nan++;
        note_first(c, i, a, b, t);
        return;
    }
    if (bits_a == BR_UNSCORED || bits_b == BR_UNSCORED)
        return;
    c->out->n_other++;
    c->out->n_other_differ += bits_a != bits_b;
}

/* ---- sequences -------------------------------------------------------------------------------------------------------- */

static int same_bytes(const void *a, const void *b, size_t n) {
    return memcmp(a, b, n) == 0;
}

static int same_settings(const rollout_seq *a, const rollout_seq *b) {
    return same_bytes(&a->temperature, &b->temperature, sizeof a->temperature) &&
           same_bytes(&a->min_p, &b->min_p, sizeof a->min_p) && same_bytes(&a->top_p, &b->top_p, sizeof a->top_p) &&
           a->top_k == b->top_k && a->seed == b->seed;
}

/* Tokens that two sequences share from the start: log-probs after the first other token mean something else. */
static int64_t common_length(const rollout_seq *a, const rollout_seq *b) {
    int64_t n = a->n_tok < b->n_tok ? a->n_tok : b->n_tok, t = 0;
    while (t < n && a->token[t] == b->token[t] && a->mask[t] == b->mask[t])
        t++;
    return t;
}

static void compare_seq(compare *c, int64_t i) {
    rollout_seq a, b;
    rollout_seq_at(c->a, i, &a);
    rollout_seq_at(c->b, c->join.in_b[i], &b);
    int64_t n = common_length(&a, &b);
    c->out->n_error += a.status != 0 || b.status != 0;
    c->out->n_settings_differ += !same_settings(&a, &b);
    c->out->n_adapter_differ += !br_digest_equal(a.adapter_digest, b.adapter_digest);
    for (int64_t t = 0; t < n; t++) {
        if (a.mask[t])
            compare_sampled(c, i, &a, &b, t);
        else
            compare_other(c, i, &a, &b, t);
    }
    if (n < a.n_tok || n < b.n_tok) {
        c->out->n_tokens_differ++;
        note_first(c, i, &a, &b, n);
    }
}

/* ---- the verdict ------------------------------------------------------------------------------------------------------ */

static void place_text(const parity_place *p, char *text, size_t n) {
    snprintf(text, n, "first: uid '%.80s', sample %u, position %lld, %08x against %08x", p->uid, p->sample,
             (long long)p->pos, p->bits_a, p->bits_b);
}

static int name_file_difference(const compare *c, char *text, size_t n) {
    const rollout_meta *a = c->meta_a, *b = c->meta_b;
    const struct { const char *what; br_digest a, b; } pair[] = {
        {"run_uid", a->run_uid, b->run_uid},
        {"contract digest", a->contract_digest, b->contract_digest},
        {"weights digest", a->weights_digest, b->weights_digest},
        {"model config digest", a->config_digest, b->config_digest},
    };
    for (size_t i = 0; i < sizeof pair / sizeof pair[0]; i++) {
        char left[BR_DIGEST_TEXT_BYTES], right[BR_DIGEST_TEXT_BYTES];
        br_digest_text(pair[i].a, left);
        br_digest_text(pair[i].b, right);
        if (!br_digest_equal(pair[i].a, pair[i].b)) {
            snprintf(text, n, "not one run: %s %s against %s", pair[i].what, left, right);
            return 1;
        }
    }
    if (strcmp(a->producer_stamp, b->producer_stamp) == 0) {
        snprintf(text, n, "both files have the producer stamp '%s': a copy, or a file with itself, proves nothing",
                 a->producer_stamp);
        return 1;
    }
    return 0;
}

static void judge(compare *c) {
    parity_result *out = c->out;
    char place[256];
    place_text(&out->first, place, sizeof place);
    const struct { int64_t n; const char *what; int with_place; } fault[] = {
        {out->n_doubled, "sequences come twice in their file", 0},
        {out->n_only_a + out->n_only_b, "sequences are in one file only", 0},
        {out->n_adapter_differ, "sequences have different adapter digests", 0},
        {out->n_settings_differ, "sequences have different sampling settings", 0},
        {out->n_tokens_differ, "sequences have different tokens or masks", 1},
        {out->n_nan, "scored slots hold a NaN or no score", 1},
        {out->n_differ, "log-probs differ", 1},
    };
    if (name_file_difference(c, out->reason, sizeof out->reason))
        return;
    for (size_t i = 0; i < sizeof fault / sizeof fault[0]; i++)
        if (fault[i].n > 0) {
            snprintf(out->reason, sizeof out->reason, "%lld %s%s%s", (long long)fault[i].n, fault[i].what,
                     fault[i].with_place ? "; " : "", fault[i].with_place ? place : "");
            return;
        }
    if (out->n_compared == 0) {
        snprintf(out->reason, sizeof out->reason, "no sampled token has a log-prob in both files: nothing was compared");
        return;
    }
    out->passed = 1;
}

br_status parity_compare(const rollout_reader *a, const rollout_reader *b, parity_result *out) {
    compare c = {.a = a, .b = b, .meta_a = rollout_reader_meta(a), .meta_b = rollout_reader_meta(b), .out = out};
    memset(out, 0, sizeof *out);
    out->first.seq = out->first.pos = -1;
    c.sign = strcmp(c.meta_a->producer, "trainer") == 0 && strcmp(c.meta_b->producer, "trainer") != 0 ? -1 : 1;
    BR_TRY(parity_join_open(a, b, &c.join));
    out->n_joined = c.join.n_joined;
    out->n_only_a = c.join.n_only_a;
    out->n_only_b = c.join.n_only_b;
    out->n_doubled = c.join.n_doubled;
    for (int64_t i = 0; i < c.join.n_a; i++)
        if (c.join.in_b[i] >= 0)
            compare_seq(&c, i);
    if (out->n_compared > 0) {
        out->k1 = c.sum_k1 / (double)out->n_compared;
        out->k3 = c.sum_k3 / (double)out->n_compared;
    }
    judge(&c);
    parity_join_close(&c.join);
    return BR_OK;
}
