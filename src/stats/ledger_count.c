/* Counts and KL of a step of a training run's ledger; see ledger_count.h. Layer: stats. */
#include "ledger_count.h"

#include "parity.h"

#include <math.h>

enum { SERIES_TERMS = 14 };

/* exp(d) - 1 - d by sums and products only: libm's results differ between machines, and a ledger is verified on any. A series for
 * |r| <= 1/8, then expm1(2r) = expm1(r) * (2 + expm1(r)) as often as d was halved. */
static double k3_term(double d) {
    int halved = 0;
    double r = d, term, excess = 0;
    if (d > 800)
        return INFINITY;
    if (d < -800)
        return -1 - d;
    for (; r > 0.125 || r < -0.125; halved++)
        r *= 0.5;
    term = r;
    for (int i = 2; i < SERIES_TERMS; i++) {
        term *= r / i;
        excess += term;
    }
    for (; halved > 0; halved--, r *= 2) {
        const double whole = excess + r;
        excess = whole * whole + 2 * excess;
    }
    return excess;
}

static void count_seq(const ledger_seq *seq, int64_t i, br_ledger_record *out) {
    for (int32_t t = 0; t < seq->n_tok; t++) {
        const uint32_t rollout = seq->logprob[LEDGER_ROLLOUT][t], again = seq->logprob[LEDGER_AGAIN][t], update = seq->logprob[LEDGER_UPDATE][t];
        if (!seq->mask[t])
            continue;
        out->n_compared++;
        out->n_differ_again += again != rollout;
        out->n_differ_update += update != rollout;
        if ((again != rollout || update != rollout) && out->n_differ++ == 0) {
            out->first_seq = i;
            out->first_pos = t;
        }
        if (update == rollout)
            continue; /* adds exactly 0, infinities included */
        const double d = parity_value(update) - parity_value(rollout);
        out->k1 -= d;
        out->k3 += k3_term(d);
    }
}

/* Infinities of both signs leave a NaN whose bits differ between machines. */
static double one_nan(double x) {
    return x == x ? x : NAN;
}

void ledger_count(const ledger_seq *seq, int64_t n, br_ledger_record *out) {
    out->n_seq = n;
    out->n_tok = out->n_compared = out->n_differ = out->n_differ_again = out->n_differ_update = 0;
    out->first_seq = out->first_pos = -1;
    out->k1 = out->k3 = out->reward_mean = 0;
    for (int64_t i = 0; i < n; i++) {
        out->n_tok += seq[i].n_tok;
        out->reward_mean += seq[i].reward;
        count_seq(&seq[i], i, out);
    }
    if (n > 0)
        out->reward_mean = one_nan(out->reward_mean / (double)n);
    if (out->n_compared > 0) {
        out->k1 = one_nan(out->k1 / (double)out->n_compared);
        out->k3 = one_nan(out->k3 / (double)out->n_compared);
    }
}
