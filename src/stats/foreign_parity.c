/* The comparison of two stacks; see foreign_parity.h. Layer: stats. */
#include "foreign_parity.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct compare {
    const foreign_files *files;
    foreign_result *out;
    foreign_listed seq;    /* of the sequence under way; place.pos -1: no difference yet */
    double sign;           /* d = sign * (b - a) */
    double sum_k1, sum_k3;
    double cross;          /* sum of (a - mean a)(b - mean b) */
    foreign_mean side[2];
} compare;

void foreign_mean_add(foreign_mean *mean, double x) {
    const double before = x - mean->mean;
    mean->n++;
    mean->mean += before / (double)mean->n;
    mean->square += before * (x - mean->mean);
}

double foreign_mean_deviation(const foreign_mean *mean) {
    return mean->n > 0 ? sqrt(mean->square / (double)mean->n) : 0;
}

static void add_correlation(compare *c, double a, double b) {
    if (!isfinite(a) || !isfinite(b))
        return;
    const double before = b - c->side[1].mean;
    foreign_mean_add(&c->side[0], a);
    foreign_mean_add(&c->side[1], b);
    c->cross += before * (a - c->side[0].mean);
}

static void add_side(foreign_result *out, int side, uint32_t bits) {
    const int is_zero = (bits & 0x7fffffffu) == 0;
    out->n_above_0[side] += !is_zero && !(bits >> 31);
    out->n_zero[side] += is_zero;
    out->n_short[side] += !is_zero && (bits & 0xffffu) == 0;
}

static void add_slot(compare *c, uint32_t bits_a, uint32_t bits_b) {
    foreign_result *out = c->out;
    const double a = parity_value(bits_a), b = parity_value(bits_b), apart = fabs(expm1(a) - expm1(b));
    const int64_t ulp = parity_ulp(bits_a, bits_b);
    out->n_compared++;
    out->bucket[parity_bucket(ulp)]++;
    add_side(out, 0, bits_a);
    add_side(out, 1, bits_b);
    add_correlation(c, a, b);
    if (isfinite(apart))
        foreign_mean_add(&out->prob, apart);
    out->max_prob = apart > out->max_prob ? apart : out->max_prob;
    if (ulp == 0)
        return; /* adds exactly 0 to the sums, infinities included */
    const double d = c->sign * (b - a);
    out->n_differ++;
    out->n_b_above += b > a;
    out->n_b_below += b < a;
    out->max_ulp = ulp > out->max_ulp ? ulp : out->max_ulp;
    out->max_abs = fabs(d) > out->max_abs ? fabs(d) : out->max_abs;
    c->sum_k1 -= d;
    c->sum_k3 += isinf(d) ? INFINITY : expm1(d) - d;
}

static parity_place place_of(int64_t i, const rollout_seq *seq, int64_t pos, uint32_t a, uint32_t b) {
    parity_place place = {.seq = i, .pos = pos, .sample = seq->sample, .bits_a = a, .bits_b = b};
    memcpy(place.uid, seq->uid, sizeof place.uid);
    return place;
}

static void compare_slot(compare *c, int64_t i, const foreign_pair *pair, int32_t t) {
    const uint32_t a = pair->bits_a[t], b = pair->bits_b[t];
    c->out->n_mask_differ += pair->a.mask[t] != pair->b.mask[t];
    c->seq.n_compared++;
    if (a != b || parity_is_nan(a)) {
        c->seq.n_differ++;
        if (c->seq.place.pos < 0)
            c->seq.place = place_of(i, &pair->a, t, a, b);
    }
    if (a == BR_UNSCORED || b == BR_UNSCORED)
        c->out->n_missing++;
    else if (parity_is_nan(a) || parity_is_nan(b))
        c->out->n_nan++;
    else
        add_slot(c, a, b);
}

static void compare_tokens(compare *c, int64_t i, const foreign_pair *pair) {
    const int32_t n = pair->n;
    if (n == pair->a.n_tok && n == pair->b.n_tok)
        return;
    c->out->n_tokens_differ++;
    if (c->out->first_token.pos < 0)
        c->out->first_token = place_of(i, &pair->a, n, n < pair->a.n_tok ? (uint32_t)pair->a.token[n] : UINT32_MAX,
                                       n < pair->b.n_tok ? (uint32_t)pair->b.token[n] : UINT32_MAX);
}

static void compare_pair(compare *c, int64_t i, const foreign_pair *pair) {
    if (pair->a.status || pair->b.status) {
        c->out->n_error++;
        return;
    }
    c->seq = (foreign_listed){.place = {.pos = -1}};
    compare_tokens(c, i, pair);
    for (int32_t t = 0; t < pair->n; t++)
        if (foreign_slot(pair, t))
            compare_slot(c, i, pair, t);
    if (c->seq.place.pos < 0)
        return;
    if (c->out->n_seq_differ < FOREIGN_LISTED_MAX)
        c->out->listed[c->out->n_seq_differ] = c->seq;
    c->out->n_seq_differ++;
}

static void judge(foreign_result *out) {
    const struct { int64_t n; const char *what; } fault[] = {
        {out->n_doubled, "sequences come twice in their file"},
        {out->n_only_a + out->n_only_b, "sequences are in one file only"},
        {out->n_tokens_differ, "sequences have different token ids"},
        {out->n_nan, "compared slots hold a NaN"},
        {out->n_missing, "slots have a log-prob in one file only, or in none"},
        {out->n_differ, "log-probs differ"},
    };
    for (size_t i = 0; i < sizeof fault / sizeof fault[0]; i++)
        if (fault[i].n > 0) {
            snprintf(out->reason, sizeof out->reason, "%lld %s", (long long)fault[i].n, fault[i].what);
            return;
        }
    out->passed = out->n_compared > 0;
    if (!out->passed)
        snprintf(out->reason, sizeof out->reason, "no token of either mask has a log-prob in both files: nothing was compared");
}

void foreign_compare(const foreign_files *files, foreign_result *out) {
    compare c = {.files = files, .out = out};
    foreign_pair pair;
    memset(out, 0, sizeof *out);
    out->first_token.pos = -1;
    out->n_joined = files->join.n_joined;
    out->n_only_a = files->join.n_only_a;
    out->n_only_b = files->join.n_only_b;
    out->n_doubled = files->join.n_doubled;
    c.sign = strcmp(files->meta_a->producer, "trainer") == 0 && strcmp(files->meta_b->producer, "trainer") != 0 ? -1 : 1;
    for (int64_t i = 0; i < files->join.n_a; i++)
        if (foreign_pair_at(files, i, &pair))
            compare_pair(&c, i, &pair);
    if (out->n_compared > 0) {
        out->k1 = c.sum_k1 / (double)out->n_compared;
        out->k3 = c.sum_k3 / (double)out->n_compared;
    }
    out->has_pearson = c.side[0].square > 0 && c.side[1].square > 0;
    out->pearson = out->has_pearson ? c.cross / sqrt(c.side[0].square * c.side[1].square) : 0;
    judge(out);
}
