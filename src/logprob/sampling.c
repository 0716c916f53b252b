/* Ranges of the sampling settings; see sampling.h. Layer: logprob. */
#include "sampling.h"
#include "br_config.h"

#include <math.h>

br_sampling br_sampling_default(void) {
    return (br_sampling){.temperature = 1, .top_p = 1, .max_new = 16};
}

/* Written so that a NaN fails every range. -0 is refused: it would be greedy under another digest. */
br_status sampling_check_scored(const br_sampling *s) {
    double t = s->temperature;
    if (!(t >= 0x1p-10 && t <= 0x1p10) && !(t == 0 && !signbit(t)))
        return br_fail(BR_E_ARG, "temperature %g: expected 0, or 2^-10 to 2^10", t);
    if (s->entropy != 0 && s->entropy != 1)
        return br_fail(BR_E_ARG, "entropy %d: expected 0 or 1", s->entropy);
    return BR_OK;
}

static br_status check_filters(const br_sampling *s) {
    if (!(s->min_p >= 0 && s->min_p <= 1) || signbit(s->min_p))
        return br_fail(BR_E_ARG, "min_p %g: expected 0 to 1", (double)s->min_p);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return br_fail(BR_E_ARG, "top_p %g: expected more than 0, at most 1", s->top_p);
    if (s->top_k < 0)
        return br_fail(BR_E_ARG, "top_k %d: expected 0 or more", s->top_k);
    return BR_OK;
}

static br_status check_end(const br_sampling *s, int32_t n_vocab) {
    if (s->max_new < 1 || s->max_new > BR_POSITION_MAX)
        return br_fail(BR_E_ARG, "max_new %d: expected 1 to %d", s->max_new, BR_POSITION_MAX);
    if (s->min_new < 0 || s->min_new > s->max_new)
        return br_fail(BR_E_ARG, "min_new %d: expected 0 to max_new, %d", s->min_new, s->max_new);
    if (s->ignore_eos != 0 && s->ignore_eos != 1)
        return br_fail(BR_E_ARG, "ignore_eos %d: expected 0 or 1", s->ignore_eos);
    if (s->n_stop < 0 || s->n_stop > BR_STOP_MAX)
        return br_fail(BR_E_ARG, "%d stop tokens: expected 0 to %d", s->n_stop, BR_STOP_MAX);
    for (int32_t i = 0; i < s->n_stop; i++)
        if (s->stop[i] < 0 || s->stop[i] >= n_vocab)
            return br_fail(BR_E_ARG, "stop token %d: expected 0 to %d", s->stop[i], n_vocab - 1);
    return BR_OK;
}

br_status sampling_check(const br_sampling *s, int32_t n_vocab) {
    BR_TRY(sampling_check_scored(s));
    BR_TRY(check_filters(s));
    BR_TRY(check_end(s, n_vocab));
    if (s->top_logprobs < 0 || s->top_logprobs > BR_TOP_LOGPROBS_MAX)
        return br_fail(BR_E_ARG, "top_logprobs %d: expected 0 to %d", s->top_logprobs, BR_TOP_LOGPROBS_MAX);
    return BR_OK;
}

int sampling_ends(const br_sampling *s, int32_t eos_id, int32_t n_new, int32_t token, br_stop_reason *reason) {
    const int may_stop = n_new >= s->min_new;
    if (may_stop && token == eos_id && !s->ignore_eos) {
        *reason = BR_STOP_EOS;
        return 1;
    }
    for (int32_t i = 0; may_stop && i < s->n_stop; i++) {
        if (token == s->stop[i]) {
            *reason = BR_STOP_TOKEN;
            return 1;
        }
    }
    *reason = BR_STOP_LENGTH;
    return n_new == s->max_new;
}
