/* Golden inputs of the numeric layer; see golden_make.h. */
#include "golden_make.h"
#include "op_rig.h"
#include "slow_block.h"
#include "slow_fn.h"

#include <math.h>

/* ---- block, chain, sum ------------------------------------------------------------------------------------------------ */

/* n rows of n_k products of one family each, the first n_kept kept. family -1: row i is of family i. */
static void make_chain(golden_case *c, int family, uint64_t seed, int32_t n, int32_t n_kept) {
    enum { K_MAX = 512 };
    float *start = golden_add_in(c, GOLDEN_F32, "c", n, 0, 0);
    uint16_t *a = golden_add_in(c, GOLDEN_BF16, "a", n, n_kept, 0), *b = golden_add_in(c, GOLDEN_BF16, "b", n, n_kept, 0);
    for (int32_t i = 0; i < n; i++) {
        uint16_t x[K_MAX], y[K_MAX];
        int32_t n_k = (n_kept + 15) / 16 * 16;
        slow_family(family < 0 ? i : family, seed + (uint64_t)i, n_k, x, y, &start[i]);
        memcpy(a + i * n_kept, x, sizeof *x * (size_t)n_kept);
        memcpy(b + i * n_kept, y, sizeof *y * (size_t)n_kept);
    }
}

/* Products odd * 2^-158 or odd * 2^-159 that add up to exactly 2^-149, the smallest result. The bound of the exponent, -133,
 * keeps bits down to 2^-158: a lower bound lets the second block through, a higher one cuts the first to nothing. */
static void make_floor(golden_case *c) {
    static const uint16_t large[2] = {0x1a84, 0x1a78}, larger[2] = {0x1a82, 0x1a7c}; /* 33, 31 * 2^-79; 65, 63 * 2^-80 */
    golden_add_in(c, GOLDEN_F32, "c", 2, 0, 0);
    uint16_t *a = golden_add_in(c, GOLDEN_BF16, "a", 2, 16, 0), *b = golden_add_in(c, GOLDEN_BF16, "b", 2, 16, 0);
    for (int k = 0; k < 16; k++) {
        a[k] = large[k % 2];
        a[16 + k] = larger[k % 2];
        b[k] = b[16 + k] = 0x1800; /* 2^-79 */
    }
}

static void make_block(golden_set *set) {
    for (int family = 0; family < SLOW_FAMILY_COUNT; family++)
        make_chain(golden_begin(set, "family-%d", family), family, 1000 + 100 * (uint64_t)family, 8, 16);
    make_floor(golden_begin(set, "floor"));
}

static void make_chains(golden_set *set) {
    static const int32_t depth[] = {1, 15, 17, 20, 144, 400};
    make_chain(golden_begin(set, "families-48"), -1, 7, SLOW_FAMILY_COUNT, 48);
    make_chain(golden_begin(set, "families-96"), -1, 8, SLOW_FAMILY_COUNT, 96);
    for (int i = 0; i < 6; i++)
        make_chain(golden_begin(set, "normal-%d", depth[i]), 0, 50 + (uint64_t)i, 3, depth[i]);
}

static void make_sum(golden_set *set) {
    enum { N = 700 };
    static const int32_t length[] = {1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, N};
    for (int i = 0; i < 3; i++) {
        static const row_family family[] = {ROW_NORMAL, ROW_WIDE, ROW_ZEROS};
        golden_case *c = golden_begin(set, "%s", i == 0 ? "normal" : i == 1 ? "wide" : "zeros");
        golden_list_i32(c, "n", length, 16);
        golden_fill_f32(c, "x", family[i], 3, N, 0, 0);
        golden_fill_f32(c, "w", ROW_NORMAL, 4, N, 0, 0);
        golden_fill_bf16(c, "x_bf16", family[i], 5, N, 0, 0);
    }
}

/* ---- functions -------------------------------------------------------------------------------------------------------- */

enum { GRID = 220, DECISIVE_EACH = 2, DECISIVE_MAX = 32 };

static const struct function {
    const char *name;
    float low, high;
    float edge[14]; /* where the form changes and beside it; 0 ends the list */
} functions[] = {
    {"exp",
     -INFINITY,
     INFINITY,
     {88.72283f, 88.72284f, 88.9f, 89.5f, -87.33654f, -101.5f, -103.2f, -103.97f, -104.1f, 0.34657f}},
    {"log",
     0.0f,
     INFINITY,
     {0x1.6a09e4p-1f, 0x1.6a09e6p-1f, 0x1.6a09e6p+0f, 0x1p-126f, 0x1p-149f, 0x1.fffffep127f, 0.71f, 0.72f, 0.73f, 0.74f,
      1.43f, 1.46f, 5.8f}},
    {"log1p",
     -1.0f,
     INFINITY,
     {-0.9999999f, -0.5f, 0x1p-24f, 0x1p-30f, 1.0f, 0.99999994f, 0x1p24f, 0.5500001f, 0.61f, 0.7000001f, 0.83f, 0.9100001f}},
    {"sigmoid", -INFINITY, INFINITY, {-87.5f, -103.5f, 16.6f, 17.4f, -17.0f}},
    {"tanh", -INFINITY, INFINITY, {0.5625f, 0.5624999f, 0.53f, 0.51f, -0.54f, 0.57f, 9.0f, 9.1f, 44.5f}},
    {"silu", -INFINITY, INFINITY, {-87.5f, -98.0f, -103.0f, -107.9f, -108.2f, -109.5f, -119.5f, -121.0f, 17.4f}},
    {"softplus", -INFINITY, INFINITY, {12.1f, 12.9f, 13.7f, 14.6f, 16.3f, 17.9f, 19.9f, 20.0f, 20.000002f, 20.1f, 88.8f}},
    {"rsqrt", 0.0f, INFINITY, {0x1p-149f, 0x1p-126f, 0x1.fffffep127f, 3.0f}},
};
enum { N_FUNCTION = sizeof functions / sizeof functions[0] };

/* Half of the inputs over the patterns, half evenly over -120 .. 120. */
static float input_of(const struct function *f, uint64_t r) {
    for (;; r = test_mix(r)) {
        float x = r & 1 ? slow_float((uint32_t)(r >> 32)) : (float)((double)(int64_t)r * 0x1p-63 * 120);
        if (x >= f->low && x <= f->high)
            return x;
    }
}

static void make_grid(golden_set *set, const struct function *f) {
    golden_case *c = golden_begin(set, "%s", f->name);
    float *x = golden_add_in(c, GOLDEN_F32, "x", GRID, 0, 0);
    int n = 0;
    x[n++] = 0.0f;
    x[n++] = f->low < 0.0f ? -0.0f : 1.0f;
    x[n++] = INFINITY;
    x[n++] = f->low;
    x[n++] = 0x1p-149f;
    x[n++] = 1.0f;
    for (int i = 0; f->edge[i] != 0.0f; i++)
        x[n++] = f->edge[i];
    while (n < GRID) {
        x[n] = input_of(f, test_mix(77 + (uint64_t)n));
        n++;
    }
}

/* Inputs at which the last bit of one coefficient moves the result. One in 2^18 does, so they are searched for, evenly over
 * low .. high. */
typedef struct search {
    const char *function;
    float (*value)(const slow_fn_numbers *, float);
    float low, high;
} search;

static int find_decisive(const search *s, size_t offset, float *x) {
    slow_fn_numbers changed = slow_fn_exact;
    uint32_t bits;
    int n = 0;
    memcpy(&bits, (char *)&changed + offset, sizeof bits);
    bits ^= 1;
    memcpy((char *)&changed + offset, &bits, sizeof bits);
    for (uint64_t i = 0; i < 1 << 24 && n < DECISIVE_EACH; i++) {
        float at = s->low + (s->high - s->low) * (float)(test_mix(i) >> 40) * 0x1p-24f;
        if (slow_bits(s->value(&slow_fn_exact, at)) != slow_bits(s->value(&changed, at)))
            x[n++] = at;
    }
    return n;
}

static void make_decisive(golden_set *set, search s, const size_t *offset, int n_offset) {
    float x[DECISIVE_MAX];
    int n = 0;
    for (int i = 0; i < n_offset; i++) {
        int n_found = find_decisive(&s, offset[i], x + n);
        if (n_found == 0)
            ck_abort_msg("%s: no input found at which the number at byte %zu decides", s.function, offset[i]);
        n += n_found;
    }
    golden_case *c = golden_begin(set, "%s-decisive", s.function);
    memcpy(golden_add_in(c, GOLDEN_F32, "x", n, 0, 0), x, sizeof *x * (size_t)n);
}

#define AT(field) offsetof(slow_fn_numbers, field)
#define ELEMENT(field, i) (AT(field) + sizeof(float) * (i))

static void make_fn(golden_set *set) {
    static const size_t exp_at[] = {AT(log2e),     AT(ln2_hi),    AT(ln2_lo),    ELEMENT(e, 0),
                                    ELEMENT(e, 1), ELEMENT(e, 2), ELEMENT(e, 3), ELEMENT(e, 4)};
    static const size_t log_at[] = {AT(ln2_hi),    AT(ln2_lo),    AT(log_half),  ELEMENT(l, 0),
                                    ELEMENT(l, 1), ELEMENT(l, 2), ELEMENT(l, 3), ELEMENT(l, 4),
                                    ELEMENT(l, 5), ELEMENT(l, 6), ELEMENT(l, 7), ELEMENT(l, 8)};
    static const size_t tanh_at[] = {ELEMENT(t, 0), ELEMENT(t, 1), ELEMENT(t, 2),
                                     ELEMENT(t, 3), ELEMENT(t, 4), ELEMENT(t, 5)};
    for (int f = 0; f < N_FUNCTION; f++)
        make_grid(set, &functions[f]);
    make_decisive(set, (search){"exp", slow_exp_by, -100.0f, 88.0f}, exp_at, 8);
    make_decisive(set, (search){"log", slow_log_by, 0.5f, 4.0f}, log_at, 12);
    make_decisive(set, (search){"tanh", slow_tanh_by, 0.25f, 0.5625f}, tanh_at, 6);
}

/* ---- conversions ------------------------------------------------------------------------------------------------------ */

/* Patterns whose low half decides, then e4m3 ties and edges: 2^-10 is half of the smallest, 448 the largest, 464 its tie. */
static void make_convert(golden_set *set) {
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    static const float edge[] = {0x1p-10f,   0x1.000002p-10f, 0x1.8p-9f, 0x1p-6f,  0x1.fffffep-7f, 448.0f,
                                 464.0f,     463.9f,          500.0f,    0x1.1p0f, 0x1.3p0f,       0x1.5p0f,
                                 -0x1.1p-3f, -0x1.3p4f,       INFINITY,  -INFINITY};
    enum { N_HIGH = 40, N_X = N_HIGH * 6 + 16, N_CODE = 254, N_FP4 = 128 };
    golden_case *c = golden_begin(set, "all");
    float *x = golden_add_in(c, GOLDEN_F32, "x", N_X, 0, 0);
    uint8_t *code = golden_add_in(c, GOLDEN_U8, "e4m3_code", N_CODE, 0, 0),
            *fp4 = golden_add_in(c, GOLDEN_U8, "fp4_code", N_FP4, 0, 0);
    uint8_t *scale = golden_add_in(c, GOLDEN_U8, "fp4_scale", N_FP4, 0, 0);
    for (uint32_t i = 0; i < N_HIGH; i++) {
        uint32_t high = i < 4 ? i * 0x2aaa : (uint32_t)(test_mix(i) % 0xff80);
        high = (high & 0x7fff) >= 0x7f80 ? 0x7f7f : high; /* no NaN: a payload is nobody's */
        for (uint32_t k = 0; k < 6; k++)
            x[i * 6 + k] = slow_float(high << 16 | low[k]);
    }
    memcpy(x + N_HIGH * 6, edge, sizeof edge);
    for (int i = 0; i < N_CODE; i++)
        code[i] = (uint8_t)(i < 127 ? i : i + 1);
    for (int i = 0; i < N_FP4; i++) {
        static const uint8_t scales[8] = {0, 1, 2, 3, 126, 127, 128, 252};
        fp4[i] = (uint8_t)(i % 16);
        scale[i] = scales[i / 16];
    }
}

/* ---- draws, weights, constants ---------------------------------------------------------------------------------------- */

static void make_rng(golden_set *set) {
    enum { N = 48 };
    golden_case *c = golden_begin(set, "draws");
    uint64_t *seed = golden_add_in(c, GOLDEN_U64, "seed", N, 0, 0), *uid = golden_add_in(c, GOLDEN_U64, "uid_hash", N, 0, 0);
    int32_t *sample = golden_add_in(c, GOLDEN_I32, "sample", N, 0, 0),
            *position = golden_add_in(c, GOLDEN_I32, "position", N, 0, 0);
    op_random random = {11, 0};
    for (int i = 0; i < N; i++) {
        seed[i] = i < 2 ? (uint64_t)-i : i < 10 ? (uint64_t)i : op_random_u64(&random);
        uid[i] = i < 2 ? (uint64_t)-i : op_random_u64(&random);
        sample[i] = i == 0 ? 0 : i == 1 ? (1 << 24) - 1 : op_random_below(&random, i < 24 ? 8 : 1 << 24);
        position[i] = i == 1 ? 0x7fffffff : i < 24 ? i : op_random_below(&random, 1 << 20);
    }
}

static void make_tensor(golden_set *set, const char *name, int32_t kind, float offset, float spread, int32_t fan,
                        uint64_t first) {
    golden_case *c = golden_begin(set, "%s-%d", kind == 0 ? "normal" : kind == 1 ? "uniform" : "fp4", set->n);
    *(uint64_t *)golden_add_in(c, GOLDEN_U64, "seed", 1, 0, 0) = 1 + (uint64_t)set->n;
    memcpy(golden_add_in(c, GOLDEN_U8, "name", (int32_t)strlen(name), 0, 0), name, strlen(name));
    *(uint64_t *)golden_add_in(c, GOLDEN_U64, "first", 1, 0, 0) = first;
    golden_add_int(c, "kind", kind);
    golden_add_float(c, "offset", offset);
    golden_add_float(c, "spread", spread);
    golden_add_int(c, "fan", fan);
    golden_add_int(c, "n", 64);
}

static void make_weightgen(golden_set *set) {
    make_tensor(set, "language_model.model.embed_tokens.weight", 0, 0.0f, 1.0f, 1, 0);
    make_tensor(set, "model.layers.3.self_attn.q_proj.weight", 0, 0.0f, 1.0f, 7168, (uint64_t)1 << 33);
    make_tensor(set, "model.norm.weight", 0, 1.0f, 0.1f, 1, 12345);
    make_tensor(set, "x", 1, -2.0f, 4.0f, 1, 0);
    make_tensor(set, "model.layers.3.block_sparse_moe.experts.7.w1.weight_packed", 2, 0.0f, 1.2f, 3584, 0);
    make_tensor(set, "model.layers.3.block_sparse_moe.experts.7.w2.weight_packed", 2, 0.0f, 1.0f, 1, 1000003);
}

static void make_constants(golden_set *set) {
    static const int32_t nope[] = {128, 128, 64, 48, 1, 3, 100, 192}, rope[] = {64, 0, 32, 16, 0, 2, 7, 64};
    static const int32_t heads[] = {64, 32, 4, 8, 12, 64, 16}, width[] = {128, 128, 16, 20, 36, 64, 128};
    static const int32_t kda[] = {32, 64, 96, 128, 160, 192, 224, 256};
    static const int32_t rank[] = {8, 16, 32, 64, 3, 7, 48, 128, 16, 32}, rslora[] = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1};
    static const float alpha[] = {16.0f, 32.0f, 64.0f, 16.0f, 1.0f, 10.0f, 16.0f, 128.0f, 0.5f, 7.25f};
    golden_case *c = golden_begin(set, "all");
    golden_list_i32(c, "d_nope", nope, 8);
    golden_list_i32(c, "d_rope", rope, 8);
    golden_list_i32(c, "n_head", heads, 7);
    golden_list_i32(c, "d", width, 7);
    golden_list_i32(c, "kda_d", kda, 8);
    golden_list_i32(c, "rank", rank, 10);
    golden_list_i32(c, "rslora", rslora, 10);
    memcpy(golden_add_in(c, GOLDEN_F32, "lora_alpha", 10, 0, 0), alpha, sizeof alpha);
}

const golden_maker golden_make_numeric[] = {
    {"block", make_block},
    {"chain", make_chains},
    {"sum", make_sum},
    {"fn", make_fn},
    {"convert", make_convert},
    {"rng", make_rng},
    {"weightgen", make_weightgen},
    {"constants", make_constants},
    {NULL, NULL},
};
