/* N-FN word for word; see slow_fn.h. Plain loops, one IEEE operation a step. */
#include "slow_fn.h"

#include <math.h>

const slow_fn_numbers slow_fn_exact = {
    .log2e = 0x1.715476p+0f,
    .ln2_hi = 0x1.62e4p-1f,
    .ln2_lo = 0x1.7f7d1cp-20f,
    .e = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b8p-5f, 0x1.1239b4p-7f, 0x1.6a4562p-10f},
    .log_half = 0.5f,
    .l = {0x1.555548p-2f, -0x1.000006p-2f, 0x1.99a478p-3f, -0x1.555c4ep-3f, 0x1.233b78p-3f, -0x1.fc26b2p-4f, 0x1.e6c048p-4f,
          -0x1.de0fbcp-4f, 0x1.148456p-4f},
    .t = {-0x1.555554p-2f, 0x1.111084p-3f, -0x1.b9f484p-5f, 0x1.63cb2ep-6f, -0x1.0d1d3ap-7f, 0x1.1c9e78p-9f},
};

static float horner(const float *c, int n, float x) {
    float p = c[n - 1];
    for (int i = n - 2; i >= 0; i--)
        p = fmaf(p, x, c[i]);
    return p;
}

static float clamp(float x) {
    if (x > 89.0f)
        return 89.0f;
    return x < -120.0f ? -120.0f : x;
}

/* exp(x) = p * 2^n for a clamped x; n is the integer nearest to x * log2(e), a tie to the even one. */
static float exp_parts(const slow_fn_numbers *c, float x, int *n) {
    float fn = (float)rint((double)x * (double)c->log2e);
    float exact = fmaf(fn, -c->ln2_hi, x);
    float r = fmaf(fn, -c->ln2_lo, exact);
    float r_low = fmaf(fn, -c->ln2_lo, exact - r);
    float square = r * r;
    float tail = r + fmaf(square, horner(c->e, 5, r), r_low);
    *n = (int)fn;
    return 1.0f + tail;
}

float slow_exp_by(const slow_fn_numbers *c, float x) {
    int n;
    if (isnan(x))
        return x;
    float p = exp_parts(c, clamp(x), &n);
    return ldexpf(p, n);
}

float slow_log_by(const slow_fn_numbers *c, float x) {
    if (x == 0.0f)
        return -INFINITY;
    if (isnan(x) || x < 0.0f)
        return NAN;
    if (isinf(x))
        return x;
    int k;
    float m = frexpf(x, &k);
    if (m < 0x1.6a09e6p-1f) { /* sqrt(1/2) cut to binary32 */
        m = 2.0f * m;
        k--;
    }
    float f = m - 1.0f, z = f * f;
    float cubic = (horner(c->l, 9, f) * f) * z;
    float low = fmaf((float)k, c->ln2_lo, cubic);
    float near = f + fmaf(-c->log_half, z, low);
    return fmaf((float)k, c->ln2_hi, near);
}

float slow_tanh_by(const slow_fn_numbers *c, float x) {
    float size = fabsf(x), out;
    if (size < 0.5625f) {
        float z = size * size, cube = size * z;
        out = fmaf(cube, horner(c->t, 6, z), size);
    } else {
        float e = slow_exp_by(c, size + size) + 1.0f;
        float part = 2.0f / e;
        out = 1.0f - part;
    }
    return copysignf(out, x);
}

float slow_exp(float x) {
    return slow_exp_by(&slow_fn_exact, x);
}

float slow_log(float x) {
    return slow_log_by(&slow_fn_exact, x);
}

float slow_tanh(float x) {
    return slow_tanh_by(&slow_fn_exact, x);
}

float slow_log1p(float x) {
    float u = 1.0f + x, dropped;
    if (x >= 1.0f)
        dropped = 1.0f - (u - x);
    else
        dropped = x - (u - 1.0f);
    float log_u = slow_log(u);
    return isfinite(log_u) ? log_u + dropped / u : log_u;
}

float slow_sigmoid(float x) {
    if (x >= 0.0f)
        return 1.0f / (1.0f + slow_exp(-x));
    float e = slow_exp(x);
    return e / (1.0f + e);
}

float slow_silu(float x) {
    if (x >= 0.0f)
        return x / (1.0f + slow_exp(-x));
    int n;
    float kept = clamp(x);
    float p = exp_parts(&slow_fn_exact, kept, &n);
    float below = ldexpf(kept * p, n);
    return below / (1.0f + slow_exp(x));
}

float slow_softplus(float x) {
    return x > 20.0f ? x : slow_log1p(slow_exp(x));
}

float slow_rsqrt(float x) {
    float root = sqrtf(x);
    return 1.0f / root;
}
