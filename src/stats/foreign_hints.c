/* Other readings of two files, and which of them agrees; see foreign_hints.h. Layer: stats. */
#include "foreign_hints.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

enum { SHIFT_MAX = 2 };

/* Where a reading takes the log-prob of slot t: from a and b, or nowhere (0). */
typedef struct reading {
    const char *sentence;
    int (*take)(const foreign_files *files, const foreign_pair *pair, int32_t t, int shift, double *a, double *b);
    int shift;
} reading;

static int scored(const uint32_t *bits, int64_t t, int64_t n, double *x) {
    if (!bits || t < 0 || t >= n || parity_is_nan(bits[t]))
        return 0;
    *x = parity_value(bits[t]);
    return isfinite(*x);
}

static int as_it_is(const foreign_files *files, const foreign_pair *pair, int32_t t, int shift, double *a, double *b) {
    (void)files;
    return scored(pair->bits_a, t, pair->n, a) && scored(pair->bits_b, (int64_t)t + shift, pair->n, b);
}

static int from_its_first(const foreign_files *files, const foreign_pair *pair, int32_t t, int shift, double *a, double *b) {
    (void)shift;
    return pair->begin_a != pair->begin_b && as_it_is(files, pair, t, pair->begin_b - pair->begin_a, a, b);
}

static int quantity_of_a(const foreign_files *files, const foreign_pair *pair, int32_t t, int quantity, double *a, double *b) {
    const uint32_t *other = foreign_bits(files->meta_a, &pair->a, (foreign_quantity)quantity);
    return other != pair->bits_a && scored(other, t, pair->n, a) && scored(pair->bits_b, t, pair->n, b);
}

static int quantity_of_b(const foreign_files *files, const foreign_pair *pair, int32_t t, int quantity, double *a, double *b) {
    const uint32_t *other = foreign_bits(files->meta_b, &pair->b, (foreign_quantity)quantity);
    return other != pair->bits_b && scored(pair->bits_a, t, pair->n, a) && scored(other, t, pair->n, b);
}

static int probability_in_b(const foreign_files *files, const foreign_pair *pair, int32_t t, int shift, double *a, double *b) {
    if (!as_it_is(files, pair, t, shift, a, b) || *b <= 0)
        return 0;
    *a = expm1(*a) + 1;
    return 1;
}

static int probability_in_a(const foreign_files *files, const foreign_pair *pair, int32_t t, int shift, double *a, double *b) {
    if (!as_it_is(files, pair, t, shift, a, b) || *a <= 0)
        return 0;
    *b = expm1(*b) + 1;
    return 1;
}

static const reading readings[] = {
    {"shift: the second file's log-probs stand one token too late", as_it_is, 1},
    {"shift: the second file's log-probs stand one token too early", as_it_is, -1},
    {"shift: the second file's log-probs stand two tokens too late", as_it_is, 2},
    {"shift: the second file's log-probs stand two tokens too early", as_it_is, -2},
    {"offset: the log-probs of the two files begin at different tokens and agree from their first on; prompt and response were counted "
     "differently", from_its_first, 0},
    {"temperature: the second file agrees with the first's log-probs at temperature 1; it did not divide by the temperature", quantity_of_a,
     FOREIGN_RAW},
    {"temperature: the first file agrees with the second's log-probs at temperature 1; it did not divide by the temperature", quantity_of_b,
     FOREIGN_RAW},
    {"temperature: the second file agrees with the first's log-probs divided by the temperature", quantity_of_a, FOREIGN_OVER_T},
    {"temperature: the first file agrees with the second's log-probs divided by the temperature", quantity_of_b, FOREIGN_OVER_T},
    {"truncation: the second file agrees with the first's log-probs over the kept tokens only; it renormalised after top-k, top-p or min-p",
     quantity_of_a, FOREIGN_PROCESSED},
    {"truncation: the first file agrees with the second's log-probs over the kept tokens only; it renormalised after top-k, top-p or min-p",
     quantity_of_b, FOREIGN_PROCESSED},
    {"probabilities: the second file holds probabilities, not their logarithms", probability_in_b, 0},
    {"probabilities: the first file holds probabilities, not their logarithms", probability_in_a, 0},
};
enum { READING_COUNT = sizeof readings / sizeof readings[0] };

typedef struct attempt {
    int64_t n, n_equal;
    double sum, sum_before; /* of |d| in these slots, and as it was */
} attempt;

typedef struct hints {
    const foreign_files *files;
    const foreign_result *result;
    foreign_say say;
    void *context;
    int n_said;
    attempt tried[READING_COUNT];
    foreign_mean factor, gap; /* b / a; the same of gaps between two alternatives */
    int64_t n_token_shifted[2 * SHIFT_MAX + 1], n_token;
} hints;

static void tell(hints *h, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void tell(hints *h, const char *format, ...) {
    char text[640];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    h->say(h->context, text);
    h->n_said++;
}

/* ---- one walk over all slots ------------------------------------------------------------------------------------------------- */

static void try_readings(hints *h, const foreign_pair *pair, int32_t t) {
    double a, b, plain_a, plain_b;
    const int is_plain = as_it_is(h->files, pair, t, 0, &plain_a, &plain_b);
    for (int i = 0; i < READING_COUNT; i++) {
        attempt *at = &h->tried[i];
        if (!readings[i].take(h->files, pair, t, readings[i].shift, &a, &b))
            continue;
        at->n++;
        at->n_equal += a == b;
        at->sum += fabs(a - b);
        at->sum_before += is_plain ? fabs(plain_a - plain_b) : fabs(a) + fabs(b); /* a slot with one log-prob explains nothing yet */
    }
    if (is_plain && fabs(plain_a) > 1e-3)
        foreign_mean_add(&h->factor, plain_b / plain_a);
}

static double of_alternative(const rollout_meta *meta, const rollout_seq *seq, int32_t t, int32_t id) {
    for (int k = 0; k < meta->n_top; k++)
        if (seq->top_token[(int64_t)t * meta->n_top + k] == id)
            return parity_value(seq->top_logprob[(int64_t)t * meta->n_top + k]);
    return NAN;
}

/* At temperature T the log-probs of two tokens are (x_i - x_j) / T apart, whatever the rest of the vocabulary is: the ratio of the gap
 * in one file to that in the other is that of their temperatures. Of the widest gap between alternatives that both files list. */
static void try_gap(hints *h, const foreign_pair *pair, int32_t t) {
    const rollout_meta *meta = h->files->meta_a;
    double high_a = NAN, high_b = NAN, low_a = NAN, low_b = NAN;
    for (int k = 0; k < meta->n_top && h->files->meta_b->n_top > 0; k++) {
        const int32_t id = pair->a.top_token[(int64_t)t * meta->n_top + k];
        const double a = of_alternative(meta, &pair->a, t, id), b = of_alternative(h->files->meta_b, &pair->b, t, id);
        if (id < 0 || !isfinite(a) || !isfinite(b))
            continue;
        if (isnan(high_a) || a > high_a)
            high_a = a, high_b = b;
        if (isnan(low_a) || a < low_a)
            low_a = a, low_b = b;
    }
    if (high_a - low_a > 0.25)
        foreign_mean_add(&h->gap, (high_b - low_b) / (high_a - low_a));
}

static void try_tokens(hints *h, const foreign_pair *pair) {
    for (int32_t t = SHIFT_MAX; t < pair->a.n_tok - SHIFT_MAX && t < pair->b.n_tok - SHIFT_MAX; t++) {
        h->n_token++;
        for (int s = -SHIFT_MAX; s <= SHIFT_MAX; s++)
            h->n_token_shifted[s + SHIFT_MAX] += pair->a.token[t] == pair->b.token[t + s];
    }
}

static void walk(hints *h) {
    foreign_pair pair;
    for (int64_t i = 0; i < h->files->join.n_a; i++) {
        if (!foreign_pair_at(h->files, i, &pair) || pair.a.status || pair.b.status)
            continue;
        if (pair.n < pair.a.n_tok || pair.n < pair.b.n_tok)
            try_tokens(h, &pair);
        for (int32_t t = 0; t < pair.n; t++) {
            if (!foreign_slot(&pair, t))
                continue;
            try_readings(h, &pair, t);
            try_gap(h, &pair, t);
        }
    }
}

/* ---- what it showed ------------------------------------------------------------------------------------------------------------ */

static void tell_tokens(hints *h) {
    for (int s = -SHIFT_MAX; s <= SHIFT_MAX; s++)
        if (s && h->n_token >= FOREIGN_HINT_SLOTS_MIN && h->n_token_shifted[s + SHIFT_MAX] * 10 >= h->n_token * 9)
            tell(h, "token ids: the second file's sequences are the first's moved by %+d: %lld of %lld ids agree then (a begin-of-text token "
                 "in one of them?)", s, (long long)h->n_token_shifted[s + SHIFT_MAX], (long long)h->n_token);
}

/* Of the readings that explain, the one that leaves least. */
static void tell_reading(hints *h) {
    const int64_t n_slot = h->result->n_compared + h->result->n_missing;
    int best = -1;
    for (int i = 0; i < READING_COUNT; i++) {
        const attempt *t = &h->tried[i];
        if (t->n < FOREIGN_HINT_SLOTS_MIN || 2 * t->n < n_slot || !(t->sum <= 0.1 * t->sum_before) || t->sum_before == 0)
            continue;
        if (best < 0 || t->sum / (double)t->n < h->tried[best].sum / (double)h->tried[best].n)
            best = i;
    }
    if (best < 0)
        return;
    const attempt *t = &h->tried[best];
    tell(h, "%s: read so, %lld of %lld log-probs are equal and the mean |d| is %.3g instead of %.3g", readings[best].sentence,
         (long long)t->n_equal, (long long)t->n, t->sum / (double)t->n, t->sum_before / (double)t->n);
}

static int is_steady(const foreign_mean *ratio) {
    return ratio->n >= FOREIGN_HINT_SLOTS_MIN && foreign_mean_deviation(ratio) <= 0.02 * fabs(ratio->mean) && ratio->mean != 0 &&
           fabs(ratio->mean - 1) >= 0.02;
}

static void tell_ratios(hints *h) {
    if (is_steady(&h->gap))
        tell(h, "temperature: the gaps between two alternatives of a token are %.4g times as wide in the second file, at %lld tokens: its "
             "temperature is that of the first divided by %.4g", h->gap.mean, (long long)h->gap.n, h->gap.mean);
    if (is_steady(&h->factor))
        tell(h, "unit: the second file's log-probs are %.5g times the first's at every token (-1: the sign; 1.4427: base 2; 0.43429: base 10)",
             h->factor.mean);
}

static void tell_values(hints *h) {
    static const char *const which[2] = {"first", "second"};
    const foreign_result *r = h->result;
    for (int side = 0; side < 2; side++) {
        if (r->n_compared > 0 && r->n_zero[side] == r->n_compared && r->n_zero[!side] < r->n_compared)
            tell(h, "zeros: every log-prob of the %s file is 0: the stack was not asked for them, or sampled greedily and renormalised",
                 which[side]);
        else if (r->n_above_0[side] > 0)
            tell(h, "range: %lld log-probs of the %s file are above 0: they are no log-probs", (long long)r->n_above_0[side], which[side]);
        if (r->n_short[side] >= FOREIGN_HINT_SLOTS_MIN && r->n_short[side] + r->n_zero[side] == r->n_compared &&
            r->n_short[!side] + r->n_zero[!side] < r->n_compared)
            tell(h, "precision: every log-prob of the %s file has at most 8 significant bits: it was stored or computed as bfloat16",
                 which[side]);
    }
    if (r->n_nan > 0)
        tell(h, "NaN: %lld slots hold one; a comparison that takes means over them, or masks them, hides where it began", (long long)r->n_nan);
}

/* Renormalising can only raise a log-prob; noise of two engines goes both ways. Only where nothing else explains. */
static void tell_sign(hints *h) {
    const foreign_result *r = h->result;
    const int64_t n = r->n_b_above + r->n_b_below, few = r->n_b_above < r->n_b_below ? r->n_b_above : r->n_b_below;
    if (h->n_said == 0 && n >= 2 * FOREIGN_HINT_SLOTS_MIN && few * 100 <= n)
        tell(h, "truncation: the %s file is the higher in %lld of the %lld differing slots, by %.3g at most: it may hold log-probs that were "
             "renormalised over the tokens that top-k, top-p or min-p kept; two engines differ both ways",
             r->n_b_above > r->n_b_below ? "second" : "first", (long long)(n - few), (long long)n, r->max_abs);
}

void foreign_hints(const foreign_files *files, const foreign_result *result, foreign_say say, void *context) {
    hints h = {.files = files, .result = result, .say = say, .context = context};
    if (result->passed)
        return;
    walk(&h);
    tell_tokens(&h);
    tell_reading(&h);
    tell_ratios(&h);
    tell_values(&h);
    tell_sign(&h);
    if (h.n_said == 0 && result->n_compared > 0)
        tell(&h, "none: no shift, offset, temperature, truncation, unit, precision or constant explains the differences; compare hashes of "
             "stages");
}
