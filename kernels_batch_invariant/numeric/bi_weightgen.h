/* bi_weightgen: random weights by counter, the same bytes on every machine.
 *
 * Layer: numeric; includes base. One source for host and device: the element functions are inline, use integers, one exact
 * product and one rounded sum, and no function of libm. A tensor is a recipe: a key (seed and tensor name) and how an
 * element's 64 random bits become a number. Element i needs no other element, so any range can be made anywhere. Knows no
 * model: which tensor gets which recipe is the engine's table.
 *
 * Numbers are about normal: four 16-bit pieces of the mixed counter are added (Irwin-Hall of 4, cut at 3.46 standard
 * deviations) and kept to 16 bits, the spread is kept to 8 bits, so their product is exact in binary32. */
#ifndef BI_WEIGHTGEN_H
#define BI_WEIGHTGEN_H

#include "bi_bits.h"

#include <stddef.h>
#include <stdint.h>

typedef enum bi_weightgen_kind {
    BI_WEIGHTGEN_NORMAL,  /* offset + spread * normal */
    BI_WEIGHTGEN_UNIFORM, /* offset + spread * [0, 1) in steps of 2^-16 */
    BI_WEIGHTGEN_FP4      /* E2M1 codes and E8M0 scale bytes whose product is about normal with that spread, offset 0 */
} bi_weightgen_kind;

typedef struct bi_weightgen {
    uint64_t key;
    bi_weightgen_kind kind;
    float offset;
    float unit;         /* of one integer step; at most 8 significant bits */
    uint8_t scale_byte; /* FP4: the middle of the three scale bytes used */
} bi_weightgen;

/* The key of a tensor: equal for equal seed and name on every machine. */
uint64_t bi_weightgen_key(uint64_t seed, const char *tensor_name);

/* spread is divided by sqrt(fan), the number of terms that a consumer adds up; fan 1 leaves it alone. 2^-60 <= spread /
 * sqrt(fan) <= 2^60, asserted: recipes are constants of ours. */
bi_weightgen bi_weightgen_make(uint64_t key, bi_weightgen_kind kind, float offset, float spread, int32_t fan);

/* Elements first .. first + n - 1. fp4 makes bytes first .. first + n - 1, byte j holding the codes of elements 2j (low
 * nibble) and 2j + 1. */
void bi_weightgen_fill_f32(const bi_weightgen *gen, uint64_t first, float *out, size_t n);
void bi_weightgen_fill_bf16(const bi_weightgen *gen, uint64_t first, uint16_t *out, size_t n);
void bi_weightgen_fill_fp4(const bi_weightgen *gen, uint64_t first, uint8_t *out, size_t n);
void bi_weightgen_fill_scale(const bi_weightgen *gen, uint64_t first, uint8_t *out, size_t n);

static inline BI_HD uint64_t bi_weightgen_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline BI_HD uint64_t bi_weightgen_bits(uint64_t key, uint64_t i) {
    return bi_weightgen_mix(key + (i + 1) * 0x9e3779b97f4a7c15ull);
}

/* -32768..32767, mean about 0, standard deviation BI_WEIGHTGEN_STD. */
#define BI_WEIGHTGEN_STD 9459.4f
static inline BI_HD int32_t bi_weightgen_normal(uint64_t bits) {
    uint32_t sum = (uint32_t)(bits & 0xffff) + (uint32_t)(bits >> 16 & 0xffff) + (uint32_t)(bits >> 32 & 0xffff) +
                   (uint32_t)(bits >> 48);
    return (int32_t)(sum >> 2) - 32768;
}

static inline BI_HD float bi_weightgen_value(const bi_weightgen *gen, uint64_t i) {
    uint64_t bits = bi_weightgen_bits(gen->key, i);
    int32_t step = gen->kind == BI_WEIGHTGEN_UNIFORM ? (int32_t)(bits >> 48) : bi_weightgen_normal(bits);
    return BI_ADD(gen->offset, BI_MUL((float)step, gen->unit));
}

/* The E2M1 code nearest to the value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 are codes 0..7, bit 3 is the sign; ties go to the smaller
 * magnitude, beyond 6 is 6. */
static inline BI_HD int bi_weightgen_fp4_code(const bi_weightgen *gen, uint64_t i) {
    float value = BI_MUL((float)bi_weightgen_normal(bi_weightgen_bits(gen->key, i)), gen->unit);
    float size = value < 0 ? -value : value;
    int code =
        (size > 0.25f) + (size > 0.75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) + (size > 5.0f);
    return value < 0 ? code + 8 : code;
}

/* One below, equal to, or one above the middle, with odds 1 : 2 : 1. */
static inline BI_HD uint8_t bi_weightgen_fp4_scale(const bi_weightgen *gen, uint64_t i) {
    uint64_t bits = bi_weightgen_bits(gen->key, i) >> 62;
    return (uint8_t)(gen->scale_byte + (bits == 3) - (bits == 0));
}

#endif
