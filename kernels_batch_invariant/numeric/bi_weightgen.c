/* Recipes and bulk fills on the host; see bi_weightgen.h. */
#include "bi_weightgen.h"

#include "br_hash.h"
#include "br_status.h"

/* The scale bytes stray by one with odds 1 : 2 : 1, which multiplies the variance by (1/4 + 2 + 4) / 4 = 25/16. */
#define FP4_SCALE_SPREAD 1.25f
/* Codes, which reach 6, spread by 1.5 to 3: then a group's largest value is about where a quantiser puts it, and every code
 * occurs. */
#define FP4_CODE_SPREAD_MIN 1.5f

uint64_t bi_weightgen_key(uint64_t seed, const char *tensor_name) {
    size_t n = 0;
    while (tensor_name[n])
        n++;
    return bi_weightgen_mix(bi_weightgen_mix(seed + 0x9e3779b97f4a7c15ull) ^ br_hash_xxh64(tensor_name, n));
}

static float eight_bits(float x) {
    return bi_widen(bi_round(x));
}

bi_weightgen bi_weightgen_make(uint64_t key, bi_weightgen_kind kind, float offset, float spread, int32_t fan) {
    BR_ASSERT(fan >= 1);
    float size = BI_DIV(spread, BI_SQRT((float)fan));
    BR_ASSERT(size >= 0x1p-60f && size <= 0x1p60f);
    bi_weightgen gen = {.key = key, .kind = kind, .offset = offset};
    if (kind == BI_WEIGHTGEN_FP4) {
        /* The power of two of the size goes to the scale byte, the rest to the codes. */
        uint32_t bits = bi_u32_of(BI_DIV(size, FP4_SCALE_SPREAD * FP4_CODE_SPREAD_MIN));
        gen.scale_byte = (uint8_t)(bits >> 23);
        size = BI_MUL(bi_f32_of((bits & 0x7fffffu) | 127u << 23), FP4_CODE_SPREAD_MIN);
    }
    gen.unit = eight_bits(BI_DIV(size, kind == BI_WEIGHTGEN_UNIFORM ? 65536.0f : BI_WEIGHTGEN_STD));
    return gen;
}

void bi_weightgen_fill_f32(const bi_weightgen *gen, uint64_t first, float *out, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = bi_weightgen_value(gen, first + i);
}

void bi_weightgen_fill_bf16(const bi_weightgen *gen, uint64_t first, uint16_t *out, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = bi_round(bi_weightgen_value(gen, first + i));
}

void bi_weightgen_fill_fp4(const bi_weightgen *gen, uint64_t first, uint8_t *out, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint64_t element = 2 * (first + i);
        out[i] = (uint8_t)(bi_weightgen_fp4_code(gen, element) | bi_weightgen_fp4_code(gen, element + 1) << 4);
    }
}

void bi_weightgen_fill_scale(const bi_weightgen *gen, uint64_t first, uint8_t *out, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = bi_weightgen_fp4_scale(gen, first + i);
}
