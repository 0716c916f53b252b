/* numeric: conversions, functions, sums, order, Philox and rounded constants against their literal definitions. */
#include "bi_backend.h"
#include "bi_bits.h"
#include "bi_contract.h"
#include "bi_fn.h"
#include "bi_order.h"
#include "bi_philox.h"
#include "bi_sum.h"
#include "br_hash.h"
#include "br_mem.h"
#include "slow_block.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- conversions ------------------------------------------------------------------------------------------------------ */

/* Low halves at which rounding to the high half decides. */
static const uint32_t low_half[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
enum { N_LOW = sizeof low_half / sizeof low_half[0] };

START_TEST(bf16_round_and_widen) {
    for (uint32_t high = 0; high < 1 << 16; high++)
        for (int i = 0; i < N_LOW; i++) {
            float x = slow_float(high << 16 | low_half[i]);
            bi_bf16 got = bi_round(x), wanted = slow_to_bf16(x);
            ck_assert_msg(got == wanted, "R(%08x) = %04x, wanted %04x", slow_bits(x), got, wanted);
            ck_assert_int_eq(bi_is_nan(x), isnan(x) != 0);
            ck_assert_int_eq(bi_is_finite(x), isfinite(x) != 0);
        }
    for (uint32_t b = 0; b < 1 << 16; b++)
        ck_assert_uint_eq(slow_bits(bi_widen((bi_bf16)b)), b << 16);
}
END_TEST

/* The value of an e4m3 code below 0x7f by the format's definition. */
static double e4m3_value(int code) {
    int field = code >> 3, fraction = code & 7;
    return field ? ldexp(8 + fraction, field - 10) : ldexp(fraction, -9);
}

static int e4m3_nearest(double size) {
    if (size > 448)
        return 0x7e;
    int below = 0;
    while (below < 0x7e && e4m3_value(below + 1) <= size)
        below++;
    double low = size - e4m3_value(below), high = e4m3_value(below + 1) - size;
    return low < high || below == 0x7e || (low == high && below % 2 == 0) ? below : below + 1;
}

START_TEST(e4m3) {
    for (int code = 0; code < 256; code++) {
        float value = bi_e4m3_widen((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            ck_assert(isnan(value));
            continue;
        }
        float wanted = (float)e4m3_value(code & 0x7f);
        ck_assert_uint_eq(slow_bits(value), slow_bits(code & 0x80 ? -wanted : wanted));
        ck_assert_uint_eq(bi_e4m3_of(value), code);
    }
    /* Every high half from 2^-12 to 2^10 with both signs decides every tie; outside, a sample. */
    for (uint32_t high = 0; high < 1 << 16; high += (high & 0x7fff) < 0x3980 || (high & 0x7fff) > 0x4480 ? 31 : 1)
        for (int i = 0; i < N_LOW; i++) {
            float x = slow_float(high << 16 | low_half[i]);
            int wanted = (isnan(x) ? 0x7f : e4m3_nearest(fabs((double)x))) | (high >> 8 & 0x80);
            ck_assert_msg(bi_e4m3_of(x) == wanted, "e4m3(%a) = %d, wanted %d", (double)x, bi_e4m3_of(x), wanted);
        }
}
END_TEST

START_TEST(fp4) {
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int scale = 0; scale <= BI_FP4_SCALE_MAX; scale++)
        for (int code = 0; code < 16; code++) {
            double wanted = ldexp(magnitude[code & 7], scale - 127);
            bi_bf16 got = bi_fp4_to_bf16((uint8_t)code, (uint8_t)scale);
            wanted = code & 8 ? -wanted : wanted;
            ck_assert_msg((double)slow_widen(got) == wanted, "code %d scale %d gives %04x", code, scale, got);
            ck_assert_int_eq(got >> 15, code >> 3);
        }
}
END_TEST

/* ---- functions -------------------------------------------------------------------------------------------------------- */

static long double true_exp(long double x) { return expl(x); }
static long double true_log(long double x) { return logl(x); }
static long double true_log1p(long double x) { return log1pl(x); }
static long double true_sigmoid(long double x) { return 1 / (1 + expl(-x)); }
static long double true_tanh(long double x) { return tanhl(x); }
static long double true_silu(long double x) { return x / (1 + expl(-x)); }
static long double true_softplus(long double x) { return x > 20 ? x : log1pl(expl(x)); }
static long double true_rsqrt(long double x) { return 1 / sqrtl(x); }

typedef struct function {
    const char *name;
    float (*ours)(float);
    long double (*exact)(long double);
    double goal; /* ulp */
    float low, high;
} function;

#define OURS(name) \
    static float call_##name(float x) { return bi_##name(x); }
OURS(exp) OURS(log) OURS(log1p) OURS(sigmoid) OURS(tanh) OURS(silu) OURS(softplus) OURS(rsqrt)

static const function functions[] = {
    {"exp", call_exp, true_exp, 1, -105, 89},         {"log", call_log, true_log, 1, 0, INFINITY},
    {"log1p", call_log1p, true_log1p, 4, -1, INFINITY}, {"sigmoid", call_sigmoid, true_sigmoid, 4, -105, 30},
    {"tanh", call_tanh, true_tanh, 4, -12, 12},       {"silu", call_silu, true_silu, 4, -112, 30},
    {"softplus", call_softplus, true_softplus, 4, -105, 119}, {"rsqrt", call_rsqrt, true_rsqrt, 1.5, 0, INFINITY},
};
enum { N_FUNCTION = sizeof functions / sizeof functions[0] };

/* Distance of got from the exact value in units of the last place of the exact value's binade. */
static double ulp_error(float got, long double exact) {
    int exponent;
    frexpl(exact, &exponent);
    int quantum = exponent - 24 < -149 ? -149 : exponent - 24;
    if (isinf(got))
        return fabsl(exact) >= 0x1.ffffffp127L ? 0 : INFINITY;
    return (double)fabsl(ldexpl((long double)got - exact, -quantum));
}

/* Half of the inputs spread over the patterns of the range, half evenly over its values near zero. */
static float function_input(const function *f, uint64_t r) {
    for (;; r = test_mix(r)) {
        float x = r & 1 ? slow_float((uint32_t)(r >> 32)) : (float)((double)(int64_t)r * 0x1p-63 * 120);
        if (x > f->low && x < f->high)
            return x;
    }
}

START_TEST(function_accuracy) {
    const function *f = &functions[_i];
    int64_t n = test_is_long() ? 20000000 : 300000;
    double worst = 0;
    float at = 0;
    for (int64_t i = 0; i < n; i++) {
        float x = function_input(f, test_mix(test_seed() + (uint64_t)i));
        double error = ulp_error(f->ours(x), f->exact(x));
        if (!(error <= worst)) {
            worst = error;
            at = x;
        }
    }
    ck_assert_msg(worst <= f->goal, "%s: %.3f ulp at %a, goal %.1f", f->name, worst, (double)at, f->goal);
    if (test_is_long())
        printf("numeric: %s at most %.3f ulp, at %a\n", f->name, worst, (double)at);
}
END_TEST

static void check_value(const char *what, float got, float wanted) {
    ck_assert_msg(slow_bits(got) == slow_bits(wanted), "%s: %08x, wanted %08x", what, slow_bits(got), slow_bits(wanted));
}

START_TEST(function_special_values) {
    check_value("exp 0", bi_exp(0.0f), 1.0f);
    check_value("exp -0", bi_exp(-0.0f), 1.0f);
    check_value("exp -Inf", bi_exp(-INFINITY), 0.0f);
    check_value("exp Inf", bi_exp(INFINITY), INFINITY);
    check_value("exp 88.72284", bi_exp(88.72284f), INFINITY);
    check_value("exp -103.9", bi_exp(-103.9f), 0x1p-149f);
    check_value("exp -104", bi_exp(-104.0f), 0.0f);
    check_value("log 1", bi_log(1.0f), 0.0f);
    check_value("log 0", bi_log(0.0f), -INFINITY);
    check_value("log -0", bi_log(-0.0f), -INFINITY);
    check_value("log Inf", bi_log(INFINITY), INFINITY);
    check_value("log1p 0", bi_log1p(0.0f), 0.0f);
    check_value("log1p -1", bi_log1p(-1.0f), -INFINITY);
    check_value("log1p Inf", bi_log1p(INFINITY), INFINITY);
    check_value("sigmoid 0", bi_sigmoid(0.0f), 0.5f);
    check_value("sigmoid Inf", bi_sigmoid(INFINITY), 1.0f);
    check_value("sigmoid -Inf", bi_sigmoid(-INFINITY), 0.0f);
    check_value("tanh Inf", bi_tanh(INFINITY), 1.0f);
    check_value("tanh -Inf", bi_tanh(-INFINITY), -1.0f);
    check_value("tanh -0", bi_tanh(-0.0f), -0.0f);
    check_value("tanh 0", bi_tanh(0.0f), 0.0f);
    check_value("silu Inf", bi_silu(INFINITY), INFINITY);
    check_value("silu -Inf", bi_silu(-INFINITY), -0.0f);
    check_value("silu -1e30", bi_silu(-1e30f), -0.0f);
    check_value("softplus 100", bi_softplus(100.0f), 100.0f);
    check_value("softplus -Inf", bi_softplus(-INFINITY), 0.0f);
    check_value("rsqrt 4", bi_rsqrt(4.0f), 0.5f);
    check_value("rsqrt Inf", bi_rsqrt(INFINITY), 0.0f);
    ck_assert(isnan(bi_log(-1.0f)) && isnan(bi_log(-INFINITY)) && isnan(bi_log1p(-1.0000001f)) && isnan(bi_log(-0x1p-149f)));
    for (int i = 0; i < N_FUNCTION; i++)
        for (uint32_t sign = 0; sign < 2; sign++)
            ck_assert_msg(isnan(functions[i].ours(slow_float(sign << 31 | 0x7fc00001))), "%s(NaN)", functions[i].name);
}
END_TEST

/* exp(x) <= 1 below zero; sigmoid and 1/sqrt are the clause's own formulas. */
START_TEST(function_identities) {
    for (uint64_t i = 0; i < 400000; i++) {
        uint64_t r = test_mix(test_seed() + i);
        float x = i < 100000 ? -slow_float((uint32_t)i * 0x2a00) : slow_float((uint32_t)r);
        if (isnan(x))
            continue;
        float e = bi_exp(-fabsf(x));
        ck_assert_msg(e <= 1.0f && e >= 0.0f, "exp(%a) = %a", (double)-fabsf(x), (double)e);
        check_value("sigmoid", bi_sigmoid(x), x >= 0 ? 1.0f / (1.0f + e) : e / (1.0f + e));
        check_value("rsqrt", bi_rsqrt(fabsf(x)), 1.0f / sqrtf(fabsf(x)));
    }
}
END_TEST

/* The same loop compiled for each instruction set: vectors, and fma as an instruction or a library call. */
enum { N_LOOP = 4096 };
#define FUNCTION_LOOPS(isa, target)                                                      \
    target static void loops_##isa(const float *x, float (*y)[N_LOOP]) {                 \
        for (int i = 0; i < N_LOOP; i++) y[0][i] = bi_exp(x[i]);                         \
        for (int i = 0; i < N_LOOP; i++) y[1][i] = bi_log(x[i]);                         \
        for (int i = 0; i < N_LOOP; i++) y[2][i] = bi_log1p(x[i]);                       \
        for (int i = 0; i < N_LOOP; i++) y[3][i] = bi_sigmoid(x[i]);                     \
        for (int i = 0; i < N_LOOP; i++) y[4][i] = bi_tanh(x[i]);                        \
        for (int i = 0; i < N_LOOP; i++) y[5][i] = bi_silu(x[i]);                        \
        for (int i = 0; i < N_LOOP; i++) y[6][i] = bi_softplus(x[i]);                    \
        for (int i = 0; i < N_LOOP; i++) y[7][i] = bi_rsqrt(x[i]);                       \
        for (int i = 0; i < N_LOOP; i++) y[8][i] = bi_widen(bi_round(x[i]));             \
        for (int i = 0; i < N_LOOP; i++) y[9][i] = bi_e4m3_widen(bi_e4m3_of(x[i]));      \
    }
enum { N_LOOP_FUNCTION = 10 };
FUNCTION_LOOPS(portable, )
FUNCTION_LOOPS(avx2, __attribute__((target("avx2,fma"))))
FUNCTION_LOOPS(avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))))

static float loop_x[N_LOOP], loop_y[2][N_LOOP_FUNCTION][N_LOOP];

static void compare_loops(const char *isa) {
    for (int f = 0; f < N_LOOP_FUNCTION; f++)
        for (int i = 0; i < N_LOOP; i++) {
            float a = loop_y[0][f][i], b = loop_y[1][f][i];
            ck_assert_msg(slow_bits(a) == slow_bits(b) || (isnan(a) && isnan(b)), "function %d of %a: portable %a, %s %a", f,
                          (double)loop_x[i], (double)a, isa, (double)b);
        }
}

START_TEST(function_loops_equal) {
    static const uint32_t edge[] = {0, 0x80000000u, 1, 0x80000001u, 0x7fffff, 0x800000, 0x7f7fffff, 0x7f800000, 0xff800000u,
                                    0x7fc00000, 0x3f800000, 0xbf800000u, 0x42b17218, 0xc2cff1b5u, 0x41a00000, 0x3f100000};
    for (int round = 0; round < (test_is_long() ? 20000 : 40); round++) {
        for (int i = 0; i < N_LOOP; i++) {
            uint64_t r = test_mix(test_seed() + (uint64_t)(round * N_LOOP + i));
            loop_x[i] = i < 16 ? slow_float(edge[i]) : function_input(&functions[i % N_FUNCTION], r);
        }
        loops_portable(loop_x, loop_y[0]);
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            loops_avx2(loop_x, loop_y[1]);
            compare_loops("avx2");
        }
        if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
            loops_avx512(loop_x, loop_y[1]);
            compare_loops("avx512");
        }
    }
}
END_TEST

/* ---- sums ------------------------------------------------------------------------------------------------------------- */

/* SUM(n) as the clause says it, term(j) joining partial j mod 256; kind 0 values, 1 squares, 2 products. */
static float literal_sum(const float *x, const float *w, int n, int kind) {
    float p[256] = {0};
    for (int i = 0; i < 256; i++)
        for (int j = i; j < n; j += 256)
            p[i] = kind == 0 ? p[i] + x[j] : kind == 1 ? fmaf(x[j], x[j], p[i]) : fmaf(x[j], w[j], p[i]);
    for (int h = 128; h >= 1; h /= 2)
        for (int i = 0; i < h; i++)
            p[i] += p[i + h];
    return p[0];
}

START_TEST(sums) {
    enum { N_MAX = 1300 };
    static float x[N_MAX], wide[N_MAX], w[N_MAX];
    static bi_bf16 narrow[N_MAX];
    for (int n = 0; n <= N_MAX; n += n < 300 ? 1 : 37) {
        for (int i = 0; i < n; i++) {
            uint64_t r = test_mix((uint64_t)(n * N_MAX + i));
            x[i] = (float)(int32_t)r * 0x1p-20f;
            w[i] = (float)(int32_t)(r >> 32) * 0x1p-31f;
            narrow[i] = (bi_bf16)(slow_bits(x[i]) >> 16);
            wide[i] = slow_widen(narrow[i]);
        }
        check_value("sum bf16", bi_sum_bf16(narrow, n), literal_sum(wide, w, n, 0));
        check_value("squares f32", bi_sum_sq_f32(x, n), literal_sum(x, w, n, 1));
        check_value("squares bf16", bi_sum_sq_bf16(narrow, n), literal_sum(wide, w, n, 1));
        check_value("products bf16 f32", bi_sum_prod_bf16_f32(narrow, w, n), literal_sum(wide, w, n, 2));
        if (n <= 64)
            check_value("SUM64", bi_sum64(x, n), literal_sum(x, w, n, 0));
        if (n <= 128)
            check_value("SUM128", bi_sum128(x, n), literal_sum(x, w, n, 0));
    }
    static const float zero[64] = {-0.0f};
    check_value("SUM64 of -0", bi_sum64(zero, 64), 0.0f);
}
END_TEST

/* ---- order ------------------------------------------------------------------------------------------------------------ */

static const float *sort_x;

static int by_order(const void *left, const void *right) {
    int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    if (sort_x[a] != sort_x[b])
        return sort_x[a] > sort_x[b] ? -1 : 1;
    return a < b ? -1 : 1;
}

static int by_index(const void *left, const void *right) {
    return *(const int32_t *)left < *(const int32_t *)right ? -1 : 1;
}

/* Few distinct values make ties; both zeros and both infinities are among them. */
static float order_value(uint64_t r, int kind) {
    static const float few[8] = {0.0f, -0.0f, 1.5f, -1.5f, 0x1p-149f, -0x1p-149f, INFINITY, -INFINITY};
    if (kind == 0)
        return (float)(int32_t)r * 0x1p-16f;
    return kind == 1 ? few[r % 8] : kind == 2 ? 1.0f : slow_float(0x3f800000u + (uint32_t)(r & 0xfff));
}

static void check_topk(int32_t n, int32_t k, int kind, float *x, int32_t *sorted, int32_t *got) {
    for (int32_t i = 0; i < n; i++) {
        x[i] = order_value(test_mix((uint64_t)i + (uint64_t)n * 77), kind);
        sorted[i] = i;
    }
    sort_x = x;
    qsort(sorted, (size_t)n, sizeof *sorted, by_order);
    int32_t wanted = k < n ? k : n;
    ck_assert_int_eq(bi_order_topk(x, n, k, got), wanted);
    qsort(sorted, (size_t)wanted, sizeof *sorted, by_index);
    for (int32_t i = 0; i < wanted; i++)
        ck_assert_msg(got[i] == sorted[i], "n %d k %d kind %d: place %d has %d, not %d", n, k, kind, i, got[i], sorted[i]);
}

START_TEST(order) {
    for (uint32_t i = 0; i < 100000; i++) {
        uint64_t r = test_mix(i);
        float a = slow_float((uint32_t)r), b = i % 2 ? slow_float((uint32_t)r + 1) : slow_float((uint32_t)(r >> 32));
        if (!isnan(a) && !isnan(b))
            ck_assert_int_eq((bi_order_key(a) > bi_order_key(b)) - (bi_order_key(a) < bi_order_key(b)), (a > b) - (a < b));
    }
    ck_assert_uint_eq(bi_order_key(0.0f), bi_order_key(-0.0f));
    int32_t n_max = 1 << 20;
    void *block = NULL;
    CHECK_OK(br_mem_alloc(&block, (size_t)n_max * 12, "the order test"));
    float *x = block;
    int32_t *sorted = (int32_t *)(x + n_max), *got = sorted + n_max;
    static const int32_t size[] = {1, 2, 7, 64, 896, 5000};
    for (int s = 0; s < 6; s++)
        for (int32_t k = 0; k <= size[s] + 1; k += k < 20 ? 1 : size[s] / 5)
            for (int kind = 0; kind < 4; kind++)
                check_topk(size[s], k, kind, x, sorted, got);
    check_topk(n_max, 2048, 0, x, sorted, got);
    check_topk(n_max, 2048, 3, x, sorted, got);
    br_mem_free(block);
}
END_TEST

/* ---- Philox ----------------------------------------------------------------------------------------------------------- */

START_TEST(philox_known_answers) {
    /* Key, counter, output: the vectors that Random123 publishes for philox4x32 with 10 rounds. */
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0xa4093822, 0x299f31d0, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344,
         0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        const uint32_t *v = known[i];
        bi_philox4 out = bi_philox(v[0], v[1], v[2], v[3], v[4], v[5]);
        for (int w = 0; w < 4; w++)
            ck_assert_uint_eq(out.word[w], v[6 + w]);
    }
    /* The third vector again through the sampler's counter: position, sample and purpose, uid hash, seed. */
    uint64_t u = bi_rng_u64(0x299f31d0a4093822ull, 0x243f6a88, 0x85a308, 0xd3, 0x0370734413198a2eull);
    ck_assert_uint_eq(u, 0x94fdccebd16cfe09ull);
}
END_TEST

/* Where binary32 ends: subnormal neighbours, the step to zero and the step to Inf. At rank 1 alpha is the quotient, so that
 * its conversion is the answer; over sqrt n, alpha sits within a step of binary64 of a middle. */
START_TEST(constants_at_the_ends_of_the_range) {
    static const double alpha[] = {0x1p-149,  0x1.8p-149, 0x1.8000001p-149, 0x1p-150,  0x1.0000000000001p-150,
                                   0x1p-151,  0x1p-1000,  0x1.000003p-127,  0x1.fffffffp127, 0x1.fffffefp127,
                                   0x1.ffffffp127, 0x1.fffffefffffffp127, 0x1p128, 0x1p1000, 0};
    for (size_t i = 0; i < sizeof alpha / sizeof alpha[0]; i++)
        for (int rslora = 0; rslora < 2; rslora++) {
            ck_assert_uint_eq(slow_bits(bi_const_lora_s(alpha[i], 1, rslora)), slow_bits((float)alpha[i]));
            if (alpha[i] > 0)
                ck_assert_uint_eq(slow_bits(bi_const_lora_s(-alpha[i], 1, rslora)), slow_bits((float)-alpha[i]));
        }
    /* middle * sqrt n is rounded below or above the exact product; alpha^2 - middle^2 n tells which, in long double. */
    for (int i = 0; i < 4000; i++) {
        int n = 2 + i % 61, k = i < 2000 ? (int)(test_mix((uint64_t)i) % 60) : 0x7fffff - (int)(test_mix((uint64_t)i) % 60);
        double middle = i < 2000 ? (2 * (double)k + 1) * 0x1p-150 : (0x1p24 + 2 * (double)k + 1) * 0x1p103;
        double root = sqrt(n), scale = i < 2000 ? 0x1p140 : 0x1p-120, alpha_near = middle * root;
        double a = alpha_near * scale, p = a * a, rest = fma(a, a, -p);
        long double m = (long double)middle * scale, above = (long double)p - m * m * n + rest;
        float got = bi_const_lora_s(alpha_near, n, 1);
        double value = isinf(got) ? 0x1p128 : got;
        ck_assert_msg(above == 0 || (value > middle) == (above > 0), "%a / sqrt %d gives %a", alpha_near, n, value);
    }
}
END_TEST

/* ---- contract --------------------------------------------------------------------------------------------------------- */

/* The digest again from the printed lines: each text must read back as the very number that is hashed, and the bytes are
 * those that bi_contract.h promises. */
START_TEST(contract_digest) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    char line[128], name[200][128];
    int n = 0;
    for (; bi_contract_line(n, line, (int)sizeof line); n++) {
        char *value = strchr(line, ' '), *end;
        ck_assert_msg(value && strncmp(line, "BI_", 3) == 0, "'%s'", line);
        *value++ = 0;
        double number = strtod(value, &end);
        ck_assert_msg(end != value && *end == 0, "%s has value '%s'", line, value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        unsigned char byte[8];
        for (int b = 0; b < 8; b++)
            byte[b] = (unsigned char)(bits / (1ull << 8 * b) % 256);
        br_hash_add(&stream, line, strlen(line) + 1);
        br_hash_add(&stream, byte, sizeof byte);
        strcpy(name[n], line);
        for (int i = 0; i < n; i++)
            ck_assert_msg(strcmp(name[i], line) != 0, "%s stands twice", line);
    }
    ck_assert_int_gt(n, 50);
    ck_assert(br_digest_equal(br_hash_end(&stream), bi_contract_digest()));
    ck_assert_int_eq(bi_contract_line(-1, line, (int)sizeof line), 0);
}
END_TEST

/* The spelling of a line: decimal integers, hexadecimal fractions without trailing zeros, a bare power of two. */
START_TEST(contract_lines) {
    static const char *const wanted[] = {"BI_MMA_EXP_MIN -133", "BI_KDA_L2_EPS 0x1.0c6f7ap-20", "BI_HEAD_Z_MAX 0x1p+118",
                                         "BI_PHILOX_MUL0 3528531795", "BI_FN_L1 -0x1.000006p-2", "BI_FN_LOG_HALF 0x1p-1"};
    for (size_t w = 0; w < sizeof wanted / sizeof wanted[0]; w++) {
        char line[128];
        int found = 0;
        for (int i = 0; bi_contract_line(i, line, (int)sizeof line) && !found; i++)
            found = strcmp(line, wanted[w]) == 0;
        ck_assert_msg(found, "no line '%s'", wanted[w]);
    }
}
END_TEST

Suite *test_numeric_suite(void) {
    Suite *suite = suite_create("numeric");
    TCase *tcase = tcase_create("numeric");
    tcase_set_timeout(tcase, test_is_long() ? 600 : 30);
    tcase_add_test(tcase, bf16_round_and_widen);
    tcase_add_test(tcase, e4m3);
    tcase_add_test(tcase, fp4);
    tcase_add_loop_test(tcase, function_accuracy, 0, N_FUNCTION);
    tcase_add_test(tcase, function_special_values);
    tcase_add_test(tcase, function_identities);
    tcase_add_test(tcase, function_loops_equal);
    tcase_add_test(tcase, sums);
    tcase_add_test(tcase, order);
    tcase_add_test(tcase, philox_known_answers);
    tcase_add_test(tcase, constants_at_the_ends_of_the_range);
    tcase_add_test(tcase, contract_digest);
    tcase_add_test(tcase, contract_lines);
    suite_add_tcase(suite, tcase);
    return suite;
}
