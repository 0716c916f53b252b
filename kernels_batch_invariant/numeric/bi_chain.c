/* The fast form of the block: see bi_chain.h. Compiled once for each instruction set, in vectors of its registers' width.
 *
 * Why it is exact. In each lane let Q be the larger of |c| and 2^T, T the largest exponent among the products, and take
 * lanes whose Q is in 2^-100 .. 2^101; then 2^Emax of N-MMA is Q without its mantissa. A product of two bf16 has 16
 * significant bits, so a*b is exact in binary32 unless it is below 2^-133, where the clause leaves nothing of it either.
 * Times 2^(25 - Emax), exact again, it is below 2^27, and the conversion to an integer cuts toward zero as the clause asks.
 * c is cut the same way and is below 2^26; the products add up to at most 16 * 255^2 * 2^11 < 2^31. The sum modulo 2^32 is
 * therefore the sum wherever its size comes out below 2^31 - 2^26. Its conversion to binary32 is the one operation that
 * rounds, and while a panel is computed the processor rounds toward zero: that is the clause's last cut. The result is zero
 * or at least 2^-125, so its scaling is exact.
 * Q = 0, where nothing votes, is taken too: every term is 0 at any finite scale, and the result is +0.
 * A block of which some lane is in neither range is left to the clause itself. */
#include "bi_chain.h"
#include "bi_block.h"

#include <immintrin.h>

#if defined(BI_ISA_avx512)
enum { LANES = 16, ROWS = 4 };
typedef __m512i bi_register;
#define SIMD(operation) _mm512_##operation
#elif defined(BI_ISA_avx2)
enum { LANES = 8, ROWS = 2 };
typedef __m256i bi_register;
#define SIMD(operation) _mm256_##operation
#else
enum { LANES = 4, ROWS = 2 };
typedef __m128i bi_register;
#define SIMD(operation) _mm_##operation
#endif

/* ROWS rows times TILE vectors is what the registers hold with sums and scales. */
enum { TILE = 2, VECTORS = BI_PANEL / LANES, PAIRS = VECTORS / 2 };

enum {
    NOTHING_VOTES = -4000, /* above any exponent with BI_EXP_ZERO in it, below any other */
    FIELD_ONE = 127,       /* the exponent field of 1.0f; a field begins at bit 23 */
    Q_LEAST = (FIELD_ONE - BI_EXP_FAST_MAX) << 23,
    Q_RANGE = (2 * BI_EXP_FAST_MAX + 1) << 23
};

typedef float vec_f __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_i __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_u __attribute__((vector_size(4 * LANES)));
typedef int16_t vec_pair __attribute__((vector_size(4 * LANES))); /* of the columns of two vectors */

/* ---- what C's operators on vectors do not give -------------------------------------------------------------------------- */

static inline BI_HD vec_f load_f(const float *p) {
    vec_f v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline BI_HD vec_pair load_pair(const int16_t *p) {
    vec_pair v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline BI_HD vec_pair min_pair(vec_pair a, vec_pair b) {
    return (vec_pair)SIMD(min_epi16)((bi_register)a, (bi_register)b);
}

static inline BI_HD vec_pair max_pair(vec_pair a, vec_pair b) {
    return (vec_pair)SIMD(max_epi16)((bi_register)a, (bi_register)b);
}

/* b where either is NaN. */
static inline BI_HD vec_f max_f(vec_f a, vec_f b) {
    return SIMD(max_ps)(a, b);
}

static inline BI_HD vec_f magnitude(vec_f a) {
    return (vec_f)((vec_u)a & 0x7fffffffu);
}

/* Half 0 or 1 of numbers that are not negative, as 32 bits each. */
static inline BI_HD vec_u widen_half(vec_pair a, int half) {
    bi_register r = (bi_register)a;
#if defined(BI_ISA_avx512)
    return (vec_u)_mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(r, 1) : _mm512_castsi512_si256(r));
#elif defined(BI_ISA_avx2)
    return (vec_u)_mm256_cvtepu16_epi32(half ? _mm256_extracti128_si256(r, 1) : _mm256_castsi256_si128(r));
#else
    return (vec_u)(half ? _mm_unpackhi_epi16(r, _mm_setzero_si128()) : _mm_unpacklo_epi16(r, _mm_setzero_si128()));
#endif
}

/* Is any bit set? */
static inline BI_HD int any(vec_u a) {
    bi_register r = (bi_register)a;
#if defined(BI_ISA_avx512)
    return _mm512_test_epi32_mask(r, r) != 0;
#elif defined(BI_ISA_avx2)
    return !_mm256_testz_si256(r, r);
#else
    return _mm_movemask_epi8(_mm_cmpeq_epi32(r, _mm_setzero_si128())) != 0xffff;
#endif
}

/* ---- one block of n_row <= ROWS rows ------------------------------------------------------------------------------------- */

/* The exponent field of 2^T: 0 where all products are 0, 255 where one is NaN or Inf. A T below -126 counts as -126, which
 * changes neither whether Q is in range nor Q where it is. */
static inline BI_HD void top_fields(int n_row, const int16_t *const *xe, int k_begin, const int16_t *be, size_t b_ld,
                                    vec_pair field[][PAIRS]) {
    const vec_pair zero = {0};
    vec_pair top[ROWS][PAIRS];
    for (int r = 0; r < n_row; r++)
        for (int p = 0; p < PAIRS; p++)
            top[r][p] = zero + (int16_t)INT16_MIN;
#pragma GCC unroll 2
    for (int k = 0; k < BI_MMA_K; k++, be += b_ld)
        for (int p = 0; p < PAIRS; p++) {
            vec_pair b = load_pair(be + p * 2 * LANES);
            for (int r = 0; r < n_row; r++)
                top[r][p] = max_pair(top[r][p], b + xe[r][k_begin + k]);
        }
    for (int r = 0; r < n_row; r++)
        for (int p = 0; p < PAIRS; p++) {
            vec_pair f = min_pair(max_pair(top[r][p] + (int16_t)FIELD_ONE, zero + (int16_t)1), zero + (int16_t)255);
            field[r][p] = f & (top[r][p] > NOTHING_VOTES);
        }
}

/* The bits of 2^Emax. Returns 0 when Q of every lane is in range. */
static inline BI_HD int block_powers(int n_row, vec_pair field[][PAIRS], const float *acc, size_t acc_ld,
                                     vec_u power[][VECTORS]) {
    vec_u outside = {0};
    for (int r = 0; r < n_row; r++)
        for (int v = 0; v < VECTORS; v++) {
            vec_f c = load_f(acc + (size_t)r * acc_ld + v * LANES);
            vec_u q = (vec_u)max_f((vec_f)(widen_half(field[r][v / 2], v % 2) << 23), magnitude(c));
            /* With Q_LEAST moved to the least int32, one signed comparison sees both ends of the range. */
            vec_i moved = (vec_i)(q + (0x80000000u - Q_LEAST));
            outside |= (vec_u)(moved > INT32_MIN + (Q_RANGE - 1)) & q;
            power[r][v] = q & 0x7f800000u;
        }
    return any(outside);
}

/* TILE vectors of columns: bf, acc and y (n_row, BI_PANEL), the results, begin there. *largest: of the sizes of the sums. */
static inline BI_HD void block_tile(int n_row, const float *const *xf, int k_begin, const float *bf, size_t b_ld,
                                    const float *acc, size_t acc_ld, vec_u power[][VECTORS], int v_begin, float *y,
                                    vec_f *largest) {
    vec_f scale[ROWS][TILE];
    vec_u sum[ROWS][TILE];
    for (int r = 0; r < n_row; r++)
        for (int v = 0; v < TILE; v++) {
            scale[r][v] = (vec_f)(((2u * FIELD_ONE + BI_MMA_FRACTION) << 23) - power[r][v_begin + v]);
            vec_f c = load_f(acc + (size_t)r * acc_ld + v * LANES);
            sum[r][v] = (vec_u)__builtin_convertvector(c * scale[r][v], vec_i);
        }
#pragma GCC unroll 2
    for (int k = 0; k < BI_MMA_K; k++, bf += b_ld)
        for (int v = 0; v < TILE; v++) {
            vec_f b = load_f(bf + v * LANES);
            for (int r = 0; r < n_row; r++)
                sum[r][v] += (vec_u)__builtin_convertvector((xf[r][k_begin + k] * b) * scale[r][v], vec_i);
        }
    for (int r = 0; r < n_row; r++)
        for (int v = 0; v < TILE; v++) {
            vec_f cut = __builtin_convertvector((vec_i)sum[r][v], vec_f);
            *largest = max_f(*largest, magnitude(cut));
            cut *= (vec_f)power[r][v_begin + v] * (1.0f / (1 << BI_MMA_FRACTION));
            memcpy(y + r * BI_PANEL + v * LANES, &cut, sizeof cut);
        }
}

/* Returns 0, and leaves acc as it was, when some lane of some row is not for the fast form. */
static inline BI_HD int fast_block(int n_row, const float *const *xf, const int16_t *const *xe, int k_begin, const float *bf,
                                   const int16_t *be, size_t b_ld, float *acc, size_t acc_ld) {
    vec_pair field[ROWS][PAIRS];
    vec_u power[ROWS][VECTORS];
    float y[ROWS][BI_PANEL];
    vec_f largest = {0};
    top_fields(n_row, xe, k_begin, be, b_ld, field);
    if (block_powers(n_row, field, acc, acc_ld, power))
        return 0;
#pragma GCC unroll 1
    for (int v = 0; v < VECTORS; v += TILE)
        block_tile(n_row, xf, k_begin, bf + v * LANES, b_ld, acc + v * LANES, acc_ld, power, v, y[0] + v * LANES, &largest);
    if (any((vec_u)(largest >= 0x1p31f - 0x1p26f)))
        return 0;
    for (int r = 0; r < n_row; r++)
        memcpy(acc + (size_t)r * acc_ld, y[r], sizeof y[r]);
    return 1;
}

/* One row's block by the clause itself. */
static __attribute__((noinline)) void slow_block(const float *xf, const float *bf, size_t b_ld, float *acc) {
    bi_bf16 a[BI_MMA_K], b[BI_MMA_K];
    for (int k = 0; k < BI_MMA_K; k++)
        a[k] = (bi_bf16)(bi_u32_of(xf[k]) >> 16);
    for (int l = 0; l < BI_PANEL; l++) {
        for (int k = 0; k < BI_MMA_K; k++)
            b[k] = (bi_bf16)(bi_u32_of(bf[(size_t)k * b_ld + (size_t)l]) >> 16);
        acc[l] = bi_block16(acc[l], a, 1, b, 1);
    }
}

/* ---- chains ---------------------------------------------------------------------------------------------------------------- */

static inline BI_HD void chain_rows(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf,
                                    const int16_t *be, size_t b_ld, float *acc, size_t acc_ld) {
    for (int k = 0; k < n_k; k += BI_MMA_K, bf += BI_MMA_K * b_ld, be += BI_MMA_K * b_ld) {
        if (fast_block(n_row, xf, xe, k, bf, be, b_ld, acc, acc_ld))
            continue;
        for (int r = 0; r < n_row; r++) {
            float *lane = acc + (size_t)r * acc_ld;
            if (n_row == 1 || !fast_block(1, xf + r, xe + r, k, bf, be, b_ld, lane, acc_ld))
                slow_block(xf[r] + k, bf, b_ld, lane);
        }
    }
}

/* Expects the processor to round toward zero. Not inlined, so that no arithmetic moves out to where it does not. */
static __attribute__((noinline)) void chain_panel_cutting(int n_row, const float *const *xf, const int16_t *const *xe, int n_k,
                                                          const float *bf, const int16_t *be, size_t b_ld, float *acc,
                                                          size_t acc_ld) {
    int r = 0;
    for (; r + ROWS <= n_row; r += ROWS)
        chain_rows(ROWS, xf + r, xe + r, n_k, bf, be, b_ld, acc + (size_t)r * acc_ld, acc_ld);
    for (; r < n_row; r++)
        chain_rows(1, xf + r, xe + r, n_k, bf, be, b_ld, acc + (size_t)r * acc_ld, acc_ld);
}

void BI_FN(bi_chain_panel)(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf,
                           const int16_t *be, size_t b_ld, float *acc, size_t acc_ld) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_ROUND_TOWARD_ZERO);
    chain_panel_cutting(n_row, xf, xe, n_k, bf, be, b_ld, acc, acc_ld);
    _mm_setcsr(mode);
}

void BI_FN(bi_pack_row)(const bi_bf16 *x, int n, int n_pad, float *f, int16_t *e) {
    for (int k = 0; k < n; k++) {
        f[k] = bi_widen(x[k]);
        e[k] = bi_chain_exponent(x[k]);
    }
    for (int k = n; k < n_pad; k++) {
        f[k] = 0.0f;
        e[k] = BI_EXP_ZERO;
    }
}
