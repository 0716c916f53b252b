/* grad_check: is a gradient that of a function? The function is the op in binary64, without roundings, as a test writes it down.
 *
 * The derivative along each input is a central difference of fourth order; for a loss of magnitude about 1 and inputs about 1 it is
 * right to about 1e-11. */
#ifndef GRAD_CHECK_H
#define GRAD_CHECK_H

#include "op_rig.h"

/* The loss at the inputs as they stand: usually the sum of dy[i] * y[i]. */
typedef double (*grad_loss)(void *context);

/* Compares dx (n) with the differences of `loss` along x (n, binary64, read by loss; restored afterwards): the norm of the difference
 * over the norm of the gradient must be <= 1e-6. n_probe: how many of the n inputs are tried, spread evenly (0: all). */
void grad_check(const char *what, grad_loss loss, void *context, double *x, int n, const float *dx, int n_probe);

/* Doubles of what an op is given. */
void grad_widen(const bi_bf16 *x, int n, double *out);
void grad_doubles(const float *x, int n, double *out);

#endif
