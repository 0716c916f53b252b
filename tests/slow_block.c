/* The slow form: see slow_block.h. Integers and exact binary64 steps, one clause line at a time. */
#include "slow_block.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

uint32_t slow_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float slow_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float slow_widen(uint16_t x) {
    return slow_float((uint32_t)x << 16);
}

/* The bf16 below in magnitude or the one above, whichever is nearer; the even one at equal distance. */
uint16_t slow_to_bf16(float x) {
    if (isnan(x))
        return 0x7fff;
    uint16_t below = (uint16_t)(slow_bits(x) >> 16), above = (uint16_t)(below + 1);
    if (isinf(x))
        return below;
    double size = fabs((double)x), low = fabs((double)slow_widen(below)), high = fabs((double)slow_widen(above));
    if (isinf(high))
        high = 0x1p128;
    if (size - low == high - size)
        return below % 2 ? above : below;
    return size - low < high - size ? below : above;
}

typedef struct number {
    int sign; /* 1 or -1 */
    int64_t s;
    int e; /* value = sign * s * 2^(e - fraction bits of its format) */
} number;

static number decode(uint32_t bits, int width, int fraction) {
    int field = (int)(bits >> fraction) & 255;
    number n;
    n.sign = bits >> (width - 1) & 1 ? -1 : 1;
    n.s = (int64_t)(bits & ((1u << fraction) - 1)) + (field ? (int64_t)1 << fraction : 0);
    n.e = (field > 1 ? field : 1) - 127;
    return n;
}

/* T(s, e, P) = sign * floor(|s| * 2^(25 - P) / 2^(Emax - e)) */
static int64_t aligned(number n, int p, int e_max) {
    return n.sign * (int64_t)floor(ldexp((double)n.s, 25 - p - (e_max - n.e)));
}

/* S * 2^(Emax - 25) toward zero. |S| < 2^33, so every binary64 here is exact. */
static float cut_to_float(int64_t sum, int e_max) {
    double value = ldexp((double)sum, e_max - 25);
    int exponent;
    frexp(value, &exponent); /* 2^(exponent - 1) <= |value| */
    int quantum = exponent - 24 < -149 ? -149 : exponent - 24;
    double cut = ldexp(trunc(ldexp(value, -quantum)), quantum);
    if (cut == 0)
        return 0.0f;
    return fabs(cut) >= 0x1p128 ? copysignf(INFINITY, (float)sum) : (float)cut;
}

float slow_block16(float c, const uint16_t *a, ptrdiff_t a_stride, const uint16_t *b, ptrdiff_t b_stride) {
    int nan = isnan(c), plus_inf = isinf(c) && c > 0, minus_inf = isinf(c) && c < 0;
    for (int k = 0; k < 16; k++) {
        float x = slow_widen(a[k * a_stride]), y = slow_widen(b[k * b_stride]);
        if (isnan(x) || isnan(y) || (isinf(x) && y == 0) || (x == 0 && isinf(y)))
            nan = 1;
        else if (isinf(x) || isinf(y))
            *(signbit(x) == signbit(y) ? &plus_inf : &minus_inf) = 1;
    }
    if (nan || (plus_inf && minus_inf))
        return slow_float(0x7fffffff);
    if (plus_inf || minus_inf)
        return plus_inf ? INFINITY : -INFINITY;
    number product[16], acc = decode(slow_bits(c), 32, 23);
    int e_max = -133;
    for (int k = 0; k < 16; k++) {
        number x = decode(a[k * a_stride], 16, 7), y = decode(b[k * b_stride], 16, 7);
        product[k] = (number){x.sign * y.sign, x.s * y.s, x.e + y.e};
        if (product[k].s != 0 && product[k].e > e_max)
            e_max = product[k].e;
    }
    if (acc.s != 0 && acc.e > e_max)
        e_max = acc.e;
    int64_t sum = acc.s ? aligned(acc, 23, e_max) : 0;
    for (int k = 0; k < 16; k++)
        if (product[k].s)
            sum += aligned(product[k], 14, e_max);
    return cut_to_float(sum, e_max);
}

float slow_chain(float c, const uint16_t *a, ptrdiff_t a_stride, const uint16_t *b, ptrdiff_t b_stride, int n_k) {
    for (int first = 0; first < n_k; first += 16) {
        uint16_t x[16] = {0}, y[16] = {0};
        for (int k = 0; k < 16 && first + k < n_k; k++) {
            x[k] = a[(first + k) * a_stride];
            y[k] = b[(first + k) * b_stride];
        }
        c = slow_block16(c, x, 1, y, 1);
    }
    return c;
}

/* ---- families --------------------------------------------------------------------------------------------------------- */

static const char *const family_name[SLOW_FAMILY_COUNT] = {
    "normal",             "wide exponents",   "narrow",      "cancelling pairs", "c is minus a product",
    "subnormal factors",  "zeros times huge", "overflow",    "raw bits",         "signed zeros",
    "alignment boundary", "one product",      "large c",     "tiny products",    "tiny c",
    "around the floor",   "NaN and Inf",      "fast range edge", "largest sums",
};

const char *slow_family_name(int family) {
    return family_name[family];
}

/* Random sign and fraction, exponent field in field .. field + spread - 1. */
static uint16_t draw(uint64_t r, int field, int spread) {
    return (uint16_t)((r & 0x807f) | ((uint64_t)field + (r >> 32) % (uint64_t)spread) << 7);
}

static float draw_float(uint64_t r, int field, int spread) {
    return slow_float((uint32_t)((r & 0x807fffff) | ((uint64_t)field + (r >> 32) % (uint64_t)spread) << 23));
}

static uint16_t draw_special(uint64_t r) {
    static const uint16_t special[8] = {0x7f80, 0xff80, 0x7fff, 0x7fc0, 0xff81, 0, 0x8000, 0x0001};
    return special[r % 8];
}

/* One pair (x, y); r and q are independent random words, k the place of the pair. */
static void pair(int family, uint64_t r, uint64_t q, int k, uint16_t *x, uint16_t *y) {
    *x = draw(r, 120, 14), *y = draw(q, 120, 14);
    switch (family) {
    case 1: *x = draw(r, 67, 120), *y = draw(q, 67, 120); break;
    case 2: *x = draw(r, 126, 2), *y = draw(q, 126, 2); break;
    case 5: *x = draw(r, 0, 2), *y = draw(q, 100, 150); break;
    case 6: *x = r >> 20 & 1 ? 0 : draw(r, 100, 20), *y = *x ? draw(q, 100, 20) : draw(q, 250, 5); break;
    case 7: *x = draw(r, 186, 6), *y = draw(q, 186, 6); break;
    case 8: *x = (uint16_t)r, *y = (uint16_t)q; break;
    case 9: *x = r >> 20 & 3 ? (uint16_t)(r & 0x8000) : *x, *y = q >> 20 & 3 ? (uint16_t)(q & 0x8000) : *y; break;
    case 10: *x = draw(r, 127, 1), *y = k % 16 == 3 ? draw(q, 135, 1) : draw(q, 105, 23); break;
    case 11: *x = k % 16 == 5 ? *x : (uint16_t)(r & 0x8000); break;
    case 13: *x = draw(r, 0, 64), *y = draw(q, 0, 64); break;
    case 14: *x = k / 16 % 2 ? 0 : draw(r, 30, 30), *y = draw(q, 30, 30); break; /* and blocks of zeros */
    case 15: *x = draw(r, 0, 4), *y = draw(q, 100, 16); break; /* exponents -153..-136: the floor decides */
    case 16: *x = r >> 20 & 31 ? *x : draw_special(r >> 25), *y = q >> 20 & 31 ? *y : draw_special(q >> 25); break;
    case 17: *x = draw(r, 77, 1), *y = draw(q, 74 + k / 16 % 4, 1); break; /* -103..-100, one a block */
    case 18: *x = draw(r, 127, 1) & 0x7fff, *x |= 0x7c, *y = draw(q, 127, 1) & 0x7fff, *y |= 0x7c; break;
    default: break;
    }
}

static float accumulator(int family, uint64_t r, const uint16_t *a, const uint16_t *b) {
    switch (family) {
    case 4: return -slow_widen(a[0]) * slow_widen(b[0]);
    case 7: return draw_float(r, 250, 5);
    case 8: return slow_float((uint32_t)r);
    case 9: return slow_float((uint32_t)r & 0x80000000u);
    case 10: return draw_float(r, 110, 30);
    case 12: return draw_float(r, 140, 20);
    case 13: return r >> 40 & 1 ? 0.0f : draw_float(r, 0, 3);
    case 14: return r >> 40 & 3 ? draw_float(r, 0, 1) : 0.0f;
    case 15: return r >> 40 & 7 ? 0.0f : draw_float(r, 0, 2);
    case 16: return r >> 40 & 7 ? draw_float(r, 120, 10) : slow_widen(draw_special(r >> 44));
    case 17: return r >> 40 & 1 ? 0.0f : draw_float(r, 22, 4);
    case 18: return slow_float((uint32_t)(r & 0x7fffff) | 0x3f800000u);
    default: return r >> 40 & 1 ? 0.0f : draw_float(r, 118, 16);
    }
}

void slow_family(int family, uint64_t seed, int n_k, uint16_t *a, uint16_t *b, float *c) {
    for (int k = 0; k < n_k; k++) {
        uint64_t r = test_mix(seed * 4096 + (uint64_t)k);
        pair(family, r, test_mix(r), k, &a[k], &b[k]);
    }
    if (family == 3) /* every second product is minus the one before, sometimes one unit away */
        for (int k = 1; k < n_k; k += 2) {
            a[k] = (uint16_t)(a[k - 1] ^ 0x8000);
            b[k] = (uint16_t)(b[k - 1] ^ (test_mix(seed ^ (uint64_t)k) % 5 == 0));
        }
    *c = accumulator(family, test_mix(seed ^ 0x5eed), a, b);
}
