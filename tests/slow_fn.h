/* slow_fn: the functions of N-FN written a second time, with every number spelled out.
 *
 * Layer: tests. Shares nothing with numeric/bi_fn.h, so that a constant changed there parts the two. The reduction differs
 * in form (an integer from binary64, ldexp, frexp); the rounded steps are those of the clause. */
#ifndef SLOW_FN_H
#define SLOW_FN_H

float slow_exp(float x);
float slow_log(float x);
float slow_log1p(float x);
float slow_sigmoid(float x);
float slow_tanh(float x);
float slow_silu(float x);
float slow_softplus(float x);
float slow_rsqrt(float x);

/* The coefficients. golden_write looks for inputs at which the last bit of one of them decides. */
typedef struct slow_fn_numbers {
    float log2e, ln2_hi, ln2_lo, e[5], log_half, l[9], t[6];
} slow_fn_numbers;

extern const slow_fn_numbers slow_fn_exact;
float slow_exp_by(const slow_fn_numbers *c, float x);
float slow_log_by(const slow_fn_numbers *c, float x);
float slow_tanh_by(const slow_fn_numbers *c, float x);

#endif
