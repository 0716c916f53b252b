/* Central differences against gradients; see grad_check.h. */
#include "grad_check.h"
#include "test_support.h"

#include <math.h>

static double slope(grad_loss loss, void *context, double *x) {
    const double at = *x, h = 0x1p-10 * (fabs(at) > 0x1p-6 ? fabs(at) : 0x1p-6) * 8;
    double f[4];
    const double step[4] = {-2 * h, -h, h, 2 * h};
    for (int i = 0; i < 4; i++) {
        *x = at + step[i];
        f[i] = loss(context);
    }
    *x = at;
    return (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
}

void grad_check(const char *what, grad_loss loss, void *context, double *x, int n, const float *dx, int n_probe) {
    double off = 0, size = 0;
    if (n_probe <= 0 || n_probe > n)
        n_probe = n;
    for (int i = 0; i < n_probe; i++) {
        const int at = (int)((int64_t)i * n / n_probe);
        const double want = slope(loss, context, &x[at]), difference = (double)dx[at] - want;
        off += difference * difference;
        size += want * want;
    }
    ck_assert_msg(size > 0, "%s: the function does not depend on this input: the check could not fail", what);
    ck_assert_msg(sqrt(off) <= 1e-6 * sqrt(size), "%s: off by %.3e of the gradient's norm %.3e", what, sqrt(off / size), sqrt(size));
}

void grad_widen(const bi_bf16 *x, int n, double *out) {
    for (int i = 0; i < n; i++)
        out[i] = (double)bi_widen(x[i]);
}

void grad_doubles(const float *x, int n, double *out) {
    for (int i = 0; i < n; i++)
        out[i] = (double)x[i];
}
