/* numeric on golden cases: block and chain, sums, functions, conversions, draws, the weight generator, a model's constants;
 * see golden_play.h. What an instruction set compiles for itself (the chain, the functions) runs in its own form; the rest
 * is compiled once. */
#include "golden_play.h"

#include "bi_block.h"
#include "bi_chain.h"
#include "bi_fn.h"
#include "bi_philox.h"
#include "bi_sum.h"
#include "bi_weightgen.h"
#include "br_hash.h"
#include "slow_attn.h"
#include "slow_block.h"
#include "slow_fn.h"
#include "slow_head.h"
#include "slow_row.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

enum { K_MAX = 1024 };

/* ---- block and chain -------------------------------------------------------------------------------------------------- */

#define CHAIN_OF(isa)                                                                                                       \
    void bi_pack_row_##isa(const bi_bf16 *, int, int, float *, int16_t *);                                                  \
    void bi_chain_panel_##isa(int, const float *const *, const int16_t *const *, int, const float *, const int16_t *,       \
                              size_t, float *, size_t);
CHAIN_OF(portable)
CHAIN_OF(avx2)
CHAIN_OF(avx512)

typedef struct chain_form {
    const char *backend;
    void (*pack_row)(const bi_bf16 *, int, int, float *, int16_t *);
    void (*panel)(int, const float *const *, const int16_t *const *, int, const float *, const int16_t *, size_t, float *,
                  size_t);
} chain_form;

static const chain_form *form_of(const op_rig *rig) {
    static const chain_form form[] = {
        {"oracle-portable", bi_pack_row_portable, bi_chain_panel_portable},
        {"oracle-avx2", bi_pack_row_avx2, bi_chain_panel_avx2},
        {"oracle-avx512", bi_pack_row_avx512, bi_chain_panel_avx512},
    };
    for (int i = 0; i < 3; i++)
        if (strcmp(form[i].backend, rig->backend.op->name) == 0)
            return &form[i];
    ck_abort_msg("no chain of %s", rig->backend.op->name);
}

/* The chain of one pair of rows, in a lane that moves with the case, beside lanes of zeros. */
static float chain_in_lane(const chain_form *form, float c, const bi_bf16 *a, const bi_bf16 *b, int32_t n_k, int lane) {
    static float af[K_MAX], bf[K_MAX], panel_f[K_MAX * BI_PANEL];
    static int16_t ae[K_MAX], be[K_MAX], panel_e[K_MAX * BI_PANEL];
    int32_t n_pad = bi_pad_k(n_k);
    float acc[BI_PANEL] = {0};
    const float *row_f = af;
    const int16_t *row_e = ae;
    form->pack_row(a, n_k, n_pad, af, ae);
    form->pack_row(b, n_k, n_pad, bf, be);
    for (int32_t i = 0; i < n_pad * BI_PANEL; i++) {
        panel_f[i] = i % BI_PANEL == lane ? bf[i / BI_PANEL] : 0.0f;
        panel_e[i] = i % BI_PANEL == lane ? be[i / BI_PANEL] : (int16_t)BI_EXP_ZERO;
    }
    acc[lane] = c;
    form->panel(1, &row_f, &row_e, n_pad, panel_f, panel_e, BI_PANEL, acc, BI_PANEL);
    return acc[lane];
}

void golden_play_chain(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "a", 0), n_k = golden_dim(c, "a", 1);
    const bi_bf16 *a = golden_bf16(c, "a"), *b = golden_bf16(c, "b");
    const float *start = golden_f32(c, "c");
    float *d = golden_add_out(c, GOLDEN_F32, "d", n, 0, 0);
    ck_assert_int_le(n_k, K_MAX - BI_MMA_K);
    for (int32_t i = 0; i < n; i++, a += n_k, b += n_k)
        d[i] = rig ? chain_in_lane(form_of(rig), start[i], a, b, n_k, i % BI_PANEL) : slow_chain(start[i], a, 1, b, 1, n_k);
}

/* The scalar block of the oracle must agree with its chain of one block. */
void golden_play_block(op_rig *rig, golden_case *c) {
    golden_play_chain(rig, c);
    const float *d = c->out[0].data, *start = golden_f32(c, "c");
    for (int32_t i = 0; rig && i < golden_dim(c, "a", 0); i++) {
        float scalar = bi_block16(start[i], golden_bf16(c, "a") + 16 * i, 1, golden_bf16(c, "b") + 16 * i, 1);
        if (bi_u32_of(scalar) != bi_u32_of(d[i]))
            ck_abort_msg("case %s, block %d: the scalar form gives %08x, the chain %08x", c->name, i, bi_u32_of(scalar),
                         bi_u32_of(d[i]));
    }
}

/* ---- sums ------------------------------------------------------------------------------------------------------------- */

typedef struct sums {
    float *values, *squares_f32, *squares_bf16, *products, *sum64, *sum128;
} sums;

static void sums_oracle(const golden_case *c, int32_t i, int32_t n, const sums *s) {
    const float *x = golden_f32(c, "x"), *w = golden_f32(c, "w");
    const bi_bf16 *narrow = golden_bf16(c, "x_bf16");
    s->values[i] = bi_sum_bf16(narrow, n);
    s->squares_f32[i] = bi_sum_sq_f32(x, n);
    s->squares_bf16[i] = bi_sum_sq_bf16(narrow, n);
    s->products[i] = bi_sum_prod_bf16_f32(narrow, w, n);
    s->sum64[i] = bi_sum64(x, n < 64 ? n : 64);
    s->sum128[i] = bi_sum128(x, n < 128 ? n : 128);
}

static void sums_slow(const golden_case *c, int32_t i, int32_t n, const sums *s) {
    static float wide[K_MAX];
    const float *x = golden_f32(c, "x"), *w = golden_f32(c, "w");
    for (int32_t j = 0; j < n; j++)
        wide[j] = slow_widen(golden_bf16(c, "x_bf16")[j]);
    s->values[i] = slow_sum_of_values(wide, n);
    s->squares_f32[i] = slow_sum_of_products(x, x, n);
    s->squares_bf16[i] = slow_sum_of_products(wide, wide, n);
    s->products[i] = slow_sum_of_products(wide, w, n);
    s->sum64[i] = slow_sum_of_values(x, n < 64 ? n : 64); /* its fold of SUM: the other partials are +0 */
    s->sum128[i] = slow_sum_of_values(x, n < 128 ? n : 128);
}

/* The first n[i] elements, by every SUM there is; SUM64 and SUM128 take at most 64 and 128 of them. */
void golden_play_sum(op_rig *rig, golden_case *c) {
    static const char *const name[] = {"values", "squares_f32", "squares_bf16", "products", "sum64", "sum128"};
    int32_t n_len = golden_dim(c, "n", 0);
    float *out[6];
    for (int i = 0; i < 6; i++)
        out[i] = golden_add_out(c, GOLDEN_F32, name[i], n_len, 0, 0);
    sums s = {out[0], out[1], out[2], out[3], out[4], out[5]};
    for (int32_t i = 0; i < n_len; i++)
        (rig ? sums_oracle : sums_slow)(c, i, golden_i32(c, "n")[i], &s);
}

/* ---- functions -------------------------------------------------------------------------------------------------------- */

enum { N_FUNCTION = 8 };
static const char *const function_name[N_FUNCTION] = {"exp", "log", "log1p", "sigmoid", "tanh", "silu", "softplus", "rsqrt"};

static float (*const slow_function[N_FUNCTION])(float) = {slow_exp,  slow_log,  slow_log1p,    slow_sigmoid,
                                                          slow_tanh, slow_silu, slow_softplus, slow_rsqrt};

/* One function of an array, in the instructions of one set; loops so that they become vectors. */
#define GRID(f)                                                                                                             \
    for (int32_t i = 0; i < n; i++)                                                                                         \
        y[i] = bi_##f(x[i]);                                                                                                \
    break;
#define GRID_OF(isa, target)                                                                                                \
    target static void grid_##isa(int function, const float *x, int32_t n, float *y) {                                      \
        switch (function) {                                                                                                 \
        case 0: GRID(exp)                                                                                                   \
        case 1: GRID(log)                                                                                                   \
        case 2: GRID(log1p)                                                                                                 \
        case 3: GRID(sigmoid)                                                                                               \
        case 4: GRID(tanh)                                                                                                  \
        case 5: GRID(silu)                                                                                                  \
        case 6: GRID(softplus)                                                                                              \
        default: GRID(rsqrt)                                                                                                \
        }                                                                                                                   \
    }
GRID_OF(portable, )
GRID_OF(avx2, __attribute__((target("avx2,fma"))))
GRID_OF(avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))))

/* The case is named after its function: "exp", or "exp-" and a word. */
static int function_of(const golden_case *c) {
    for (int f = 0; f < N_FUNCTION; f++) {
        size_t n = strlen(function_name[f]);
        if (strncmp(c->name, function_name[f], n) == 0 && (c->name[n] == 0 || c->name[n] == '-'))
            return f;
    }
    ck_abort_msg("case %s: no such function", c->name);
}

void golden_play_fn_grid(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "x", 0);
    int f = function_of(c);
    const float *x = golden_f32(c, "x");
    float *y = golden_add_out(c, GOLDEN_F32, "y", n, 0, 0);
    const char *name = rig ? rig->backend.op->name : "";
    for (int32_t i = 0; !rig && i < n; i++)
        y[i] = slow_function[f](x[i]);
    if (rig && strcmp(name, "oracle-portable") == 0)
        grid_portable(f, x, n, y);
    if (rig && strcmp(name, "oracle-avx2") == 0)
        grid_avx2(f, x, n, y);
    if (rig && strcmp(name, "oracle-avx512") == 0)
        grid_avx512(f, x, n, y);
}

/* ---- conversions ------------------------------------------------------------------------------------------------------ */

static uint16_t slow_fp4(uint8_t code, uint8_t scale) {
    static const float size[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float x = ldexpf(size[code & 7], scale - 127);
    return slow_to_bf16(code & 8 ? -x : x);
}

/* x to bf16 and to e4m3; e4m3 codes and pairs (E2M1 code, scale byte) back. */
void golden_play_convert(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "x", 0), n_code = golden_dim(c, "e4m3_code", 0), n_fp4 = golden_dim(c, "fp4_code", 0);
    const float *x = golden_f32(c, "x");
    const uint8_t *code = golden_u8(c, "e4m3_code"), *fp4 = golden_u8(c, "fp4_code"), *scale = golden_u8(c, "fp4_scale");
    bi_bf16 *bf16 = golden_add_out(c, GOLDEN_BF16, "bf16", n, 0, 0);
    uint8_t *e4m3 = golden_add_out(c, GOLDEN_U8, "e4m3", n, 0, 0);
    float *wide = golden_add_out(c, GOLDEN_F32, "e4m3_value", n_code, 0, 0);
    bi_bf16 *fp4_value = golden_add_out(c, GOLDEN_BF16, "fp4_value", n_fp4, 0, 0);
    for (int32_t i = 0; i < n; i++) {
        bf16[i] = rig ? bi_round(x[i]) : slow_to_bf16(x[i]);
        e4m3[i] = rig ? bi_e4m3_of(x[i]) : (uint8_t)(slow_e4m3_code(fabsf(x[i])) | (signbit(x[i]) ? 0x80 : 0));
    }
    for (int32_t i = 0; i < n_code; i++) {
        float size = slow_e4m3_number(code[i] & 0x7f);
        wide[i] = rig ? bi_e4m3_widen(code[i]) : code[i] & 0x80 ? -size : size;
    }
    for (int32_t i = 0; i < n_fp4; i++)
        fp4_value[i] = rig ? bi_fp4_to_bf16(fp4[i], scale[i]) : slow_fp4(fp4[i], scale[i]);
}

/* ---- draws ------------------------------------------------------------------------------------------------------------ */

void golden_play_rng(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "seed", 0);
    uint64_t *u = golden_add_out(c, GOLDEN_U64, "u", n, 0, 0);
    for (int32_t i = 0; i < n; i++) {
        bi_sampling s = {.seed = golden_u64(c, "seed")[i],
                         .uid_hash = golden_u64(c, "uid_hash")[i],
                         .sample = (uint32_t)golden_i32(c, "sample")[i],
                         .position = golden_i32(c, "position")[i]};
        u[i] = rig ? bi_rng_u64(s.seed, (uint32_t)s.position, s.sample, BI_RNG_PURPOSE_SAMPLE, s.uid_hash)
                   : slow_philox_u64(&s);
    }
}

/* ---- weight generator ------------------------------------------------------------------------------------------------- */

/* A recipe once more: how an element's 64 bits become a number. */
typedef struct slow_recipe {
    uint64_t key;
    int kind;
    float offset, unit;
    int scale_byte;
} slow_recipe;

static uint64_t slow_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t slow_bits64(const slow_recipe *r, uint64_t i) {
    return slow_mix(r->key + (i + 1) * 0x9e3779b97f4a7c15u);
}

static slow_recipe slow_recipe_of(const golden_case *c) {
    slow_recipe r = {.kind = golden_int(c, "kind"), .offset = golden_float(c, "offset")};
    uint64_t name = br_hash_xxh64(golden_u8(c, "name"), (size_t)golden_dim(c, "name", 0));
    r.key = slow_mix(slow_mix(golden_u64(c, "seed")[0] + 0x9e3779b97f4a7c15u) ^ name);
    float size = golden_float(c, "spread") / sqrtf((float)golden_int(c, "fan"));
    if (r.kind == BI_WEIGHTGEN_FP4) {
        int power;
        float rest = 2.0f * frexpf(size / 1.875f, &power); /* 1.25 for the stray of the scales, 1.5 for the codes */
        r.scale_byte = power - 1 + 127;
        size = rest * 1.5f;
    }
    r.unit = slow_widen(slow_to_bf16(size / (r.kind == BI_WEIGHTGEN_UNIFORM ? 65536.0f : 9459.4f)));
    return r;
}

static int slow_normal(uint64_t bits) {
    int64_t sum = 0;
    for (int piece = 0; piece < 4; piece++)
        sum += (int64_t)(bits >> (16 * piece) & 65535);
    return (int)(sum / 4) - 32768;
}

static float slow_value(const slow_recipe *r, uint64_t i) {
    uint64_t bits = slow_bits64(r, i);
    int step = r->kind == BI_WEIGHTGEN_UNIFORM ? (int)(bits >> 48) : slow_normal(bits);
    return fmaf((float)step, r->unit, r->offset); /* the product has 24 bits */
}

static uint8_t slow_nibble(const slow_recipe *r, uint64_t i) {
    static const double size[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    double value = (double)slow_normal(slow_bits64(r, i)) * (double)r->unit;
    int best = 0;
    for (int code = 1; code < 8; code++) /* a tie stays with the smaller magnitude */
        if (fabs(fabs(value) - size[code]) < fabs(fabs(value) - size[best]))
            best = code;
    return (uint8_t)(value < 0 ? best + 8 : best);
}

static uint8_t slow_scale(const slow_recipe *r, uint64_t i) {
    static const int stray[4] = {-1, 0, 0, 1};
    return (uint8_t)(r->scale_byte + stray[slow_bits64(r, i) >> 62]);
}

static bi_weightgen recipe_of(const golden_case *c) {
    char name[256] = {0};
    memcpy(name, golden_u8(c, "name"), (size_t)golden_dim(c, "name", 0));
    uint64_t key = bi_weightgen_key(golden_u64(c, "seed")[0], name);
    return bi_weightgen_make(key, (bi_weightgen_kind)golden_int(c, "kind"), golden_float(c, "offset"),
                             golden_float(c, "spread"), golden_int(c, "fan"));
}

/* Elements first .. first + n - 1 as f32 and bf16; of an FP4 tensor bytes and scales of these numbers. */
void golden_play_weightgen(op_rig *rig, golden_case *c) {
    int32_t n = golden_int(c, "n");
    uint64_t first = golden_u64(c, "first")[0];
    bi_weightgen gen = recipe_of(c);
    slow_recipe r = slow_recipe_of(c);
    *(uint64_t *)golden_add_out(c, GOLDEN_U64, "key", 1, 0, 0) = rig ? gen.key : r.key;
    *(float *)golden_add_out(c, GOLDEN_F32, "unit", 1, 0, 0) = rig ? gen.unit : r.unit;
    if (r.kind == BI_WEIGHTGEN_FP4) {
        uint8_t *code = golden_add_out(c, GOLDEN_U8, "code", n, 0, 0),
                *scale = golden_add_out(c, GOLDEN_U8, "scale", n, 0, 0);
        if (rig) {
            bi_weightgen_fill_fp4(&gen, first, code, (size_t)n);
            bi_weightgen_fill_scale(&gen, first, scale, (size_t)n);
        }
        for (int32_t i = 0; !rig && i < n; i++) {
            uint64_t at = first + (uint64_t)i;
            code[i] = (uint8_t)(slow_nibble(&r, 2 * at) | slow_nibble(&r, 2 * at + 1) << 4);
            scale[i] = slow_scale(&r, at);
        }
        return;
    }
    float *f32 = golden_add_out(c, GOLDEN_F32, "f32", n, 0, 0);
    bi_bf16 *bf16 = golden_add_out(c, GOLDEN_BF16, "bf16", n, 0, 0);
    if (rig) {
        bi_weightgen_fill_f32(&gen, first, f32, (size_t)n);
        bi_weightgen_fill_bf16(&gen, first, bf16, (size_t)n);
    }
    for (int32_t i = 0; !rig && i < n; i++) {
        f32[i] = slow_value(&r, first + (uint64_t)i);
        bf16[i] = slow_to_bf16(f32[i]);
    }
}

/* ---- constants of a model --------------------------------------------------------------------------------------------- */

/* RN(alpha / sqrt n): a middle of two neighbours has 25 bits and n at most 14, so its square times n is exact in 64 bits,
 * which is what x87 has; alpha has at most 24. */
static float slow_over_sqrt(double alpha, int32_t n) {
    float y = (float)(alpha / sqrt((double)n));
    for (;;) {
        long double low = ((long double)y + nextafterf(y, 0.0f)) / 2, high = ((long double)y + nextafterf(y, INFINITY)) / 2;
        long double square = (long double)alpha * (long double)alpha;
        if (low * low * n > square)
            y = nextafterf(y, 0.0f);
        else if (high * high * n < square)
            y = nextafterf(y, INFINITY);
        else
            return y;
    }
}

/* alpha of N-ATT, C of N-IDX, d^-1/2 of N-KDA, s of N-LORA. */
void golden_play_constants(op_rig *rig, golden_case *c) {
    int32_t n_att = golden_dim(c, "d_nope", 0), n_idx = golden_dim(c, "n_head", 0), n_kda = golden_dim(c, "kda_d", 0);
    const int32_t *d_nope = golden_i32(c, "d_nope"), *d_rope = golden_i32(c, "d_rope"), *n_head = golden_i32(c, "n_head");
    const int32_t *d = golden_i32(c, "d"), *kda_d = golden_i32(c, "kda_d"), *rank = golden_i32(c, "rank");
    const float *lora_alpha = golden_f32(c, "lora_alpha");
    float *alpha = golden_add_out(c, GOLDEN_F32, "alpha", n_att, 0, 0);
    float *index = golden_add_out(c, GOLDEN_F32, "c", n_idx, 0, 0);
    float *scale = golden_add_out(c, GOLDEN_F32, "scale", n_kda, 0, 0);
    float *s = golden_add_out(c, GOLDEN_F32, "s", golden_dim(c, "rank", 0), 0, 0);
    for (int32_t i = 0; i < n_att; i++)
        alpha[i] = rig ? bi_const_attn_alpha(d_nope[i], d_rope[i]) : slow_over_sqrt(1, d_nope[i] + d_rope[i]);
    for (int32_t i = 0; i < n_idx; i++)
        index[i] = rig ? bi_const_index_c(n_head[i], d[i]) : slow_over_sqrt(1, n_head[i] * d[i]);
    for (int32_t i = 0; i < n_kda; i++)
        scale[i] = rig ? bi_const_kda_scale(kda_d[i]) : slow_inverse_sqrt(kda_d[i]);
    for (int32_t i = 0; i < golden_dim(c, "rank", 0); i++) {
        int32_t rslora = golden_i32(c, "rslora")[i];
        double size = (double)lora_alpha[i];
        float plain = lora_alpha[i] / (float)rank[i];
        s[i] = rig ? bi_const_lora_s(size, rank[i], rslora) : rslora ? slow_over_sqrt(size, rank[i]) : plain;
    }
}
