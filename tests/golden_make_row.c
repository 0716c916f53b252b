/* Golden inputs of the row-wise ops and of those that read a cache; see golden_make.h. */
#include "golden_make.h"
#include "op_rig.h"
#include "slow_fn.h"
#include "slow_row.h"

#include <math.h>

#define EPS 1e-5f /* of every norm here */

static void make_embed(golden_set *set) {
    static const int32_t token[] = {0, 6, 3, 3, 1};
    golden_case *c = golden_begin(set, "raw-bits");
    golden_list_i32(c, "token", token, 5);
    golden_fill_bf16(c, "table", ROW_RAW, 1, 7, 24, 0);
}

/* ---- norms ------------------------------------------------------------------------------------------------------------ */

static golden_case *norm_case(golden_set *set, const char *name, row_family family, int32_t n, int32_t d, int with_b) {
    golden_case *c = golden_begin(set, "%s-%d", name, d);
    golden_fill_bf16(c, "x", family, (uint64_t)(d * 7 + (int32_t)family), n, d, 0);
    golden_fill_f32(c, "w", ROW_NORMAL, 21, d, 0, 0);
    if (with_b)
        golden_fill_f32(c, "b", ROW_NORMAL, 22, d, 0, 0);
    golden_add_float(c, "eps", EPS);
    return c;
}

/* The sum of squares about the mean with another number of partials than the clause has. */
static float sum_by(const bi_bf16 *x, float mean, int32_t d, int lanes) {
    float p[512] = {0};
    for (int32_t i = 0; i < d; i++) {
        float from_mean = row_case_widen(x[i]) - mean;
        p[i % lanes] = fmaf(from_mean, from_mean, p[i % lanes]);
    }
    for (int half = lanes / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++)
            p[i] += p[i + half];
    return p[0];
}

/* A row that 128 and 512 partials give another 1/sqrt than 256 do: one in six rows is such a one. */
static void draw_decisive_row(bi_bf16 *x, int32_t d, int layer, uint64_t key) {
    float wanted, fewer, more;
    do {
        row_case_fill_bf16(x, d, ROW_NORMAL, key++);
        float mean = 0.0f;
        for (int32_t i = 0; i < d; i++)
            mean += layer ? row_case_widen(x[i]) / (float)d : 0.0f;
        wanted = slow_rsqrt(sum_by(x, mean, d, 256) / (float)d + EPS);
        fewer = slow_rsqrt(sum_by(x, mean, d, 128) / (float)d + EPS);
        more = slow_rsqrt(sum_by(x, mean, d, 512) / (float)d + EPS);
    } while (wanted == fewer || wanted == more);
}

/* Weights that put each y between two bf16: there the last bit of every binary32 step decides. */
static void aim_at_ties(golden_case *c, int layer) {
    int32_t d = golden_dim(c, "x", 1);
    bi_bf16 *x = c->in[0].data;
    float *w = c->in[1].data;
    double mean = 0, square = 0;
    draw_decisive_row(x, d, layer, 1000 + (uint64_t)d * 100);
    for (int32_t i = 0; i < d; i++)
        mean += layer ? (double)row_case_widen(x[i]) / d : 0;
    for (int32_t i = 0; i < d; i++)
        square += ((double)row_case_widen(x[i]) - mean) * ((double)row_case_widen(x[i]) - mean) / d;
    for (int32_t i = 0; i < d; i++) {
        double scaled = ((double)row_case_widen(x[i]) - mean) / sqrt(square + (double)EPS);
        w[i] = (float)((row_case_tie(5, i) - (layer ? (double)golden_f32(c, "b")[i] : 0)) / scaled);
    }
}

static void make_norm(golden_set *set, int layer) {
    for (int f = 0; f < GOLDEN_FAMILIES; f++)
        norm_case(set, golden_families[f].name, golden_families[f].family, 2, f % 2 ? 40 : 300, layer);
    norm_case(set, "no-b", ROW_NORMAL, 2, 31, 0);
    norm_case(set, "one-wide", ROW_NORMAL, 4, 1, layer);
    norm_case(set, "fault", ROW_NORMAL, 3, 32, layer);
    ((bi_bf16 *)set->item[set->n - 1].in[0].data)[32 + 5] = 0x7f80;
    ((bi_bf16 *)set->item[set->n - 1].in[0].data)[64 + 31] = 0x6000; /* its square overflows */
    for (int i = 0; i < 3; i++)
        aim_at_ties(norm_case(set, "ties", ROW_NORMAL, 1, 600 + 8 * i, layer), layer);
}

static void make_rmsnorm(golden_set *set) {
    make_norm(set, 0);
}

static void make_layernorm(golden_set *set) {
    make_norm(set, 1);
}

/* ---- convolution and KDA ---------------------------------------------------------------------------------------------- */

/* Two sequences, each cut twice at other places: (step, sequence, position, rows). */
static const int32_t cut[] = {0, 0, 0, 5, 0, 1, 0, 2, 1, 1, 2, 3, 1, 0, 5, 1, 2, 0, 6, 1};
enum { CUT_SEGS = 5, CUT_ROWS = 12 };

static void add_cut(golden_case *c) {
    memcpy(golden_add_in(c, GOLDEN_I32, "seg", CUT_SEGS, 4, 0), cut, sizeof cut);
}

static void make_conv(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES; f++) {
        golden_case *c = golden_begin(set, "%s", golden_families[f].name);
        int32_t n_chan = f == 1 ? 33 : 16;
        add_cut(c);
        golden_fill_bf16(c, "x", golden_families[f].family, 31, CUT_ROWS, n_chan, 0);
        golden_fill_f32(c, "w", ROW_NORMAL, 32, n_chan, 4, 0);
    }
}

static void make_kda_gate(golden_set *set) {
    for (int i = 0; i < 2 * GOLDEN_FAMILIES; i++) {
        const struct golden_family *f = &golden_families[i / 2];
        golden_case *c = golden_begin(set, "%s-%s", f->name, i % 2 ? "bounded" : "softplus");
        golden_fill_bf16(c, "f", f->family, 41 + (uint64_t)i, 2, 2, i % 2 ? 32 : 50);
        golden_fill_bf16(c, "b", f->family, 42, 2, 2, 0);
        golden_fill_f32(c, "a_log", ROW_NORMAL, 43, 2, 0, 0);
        golden_fill_f32(c, "dt_bias", ROW_NORMAL, 44, 2, i % 2 ? 32 : 50, 0);
        golden_add_int(c, "bounded", i % 2);
        golden_add_float(c, "lower_bound", -5.0f);
    }
}

/* Most decays in 0.2 .. 1, some exactly 0, 1 and subnormal, as gates without a bound give. */
static float decay(uint64_t i) {
    uint64_t r = test_mix(i * 77 + 5);
    switch (r % 12) {
    case 0: return 0.0f;
    case 1: return 1.0f;
    case 2: return 0x1p-149f * (float)(r >> 44);
    default: return 0.2f + 0.8f * (float)(r >> 40) * 0x1p-24f;
    }
}

static void kda_case(golden_set *set, const char *name, row_family family, float scale, int32_t n_head, int32_t d) {
    golden_case *c = golden_begin(set, "%s-%d", name, d);
    static const char *const operand[] = {"q", "k", "v"};
    add_cut(c);
    for (uint64_t i = 0; i < 3; i++) {
        golden_fill_bf16(c, operand[i], family, 51 + i, CUT_ROWS, n_head, d);
        bi_bf16 *x = c->in[c->n_in - 1].data;
        for (int32_t j = 0; j < CUT_ROWS * n_head * d; j++)
            x[j] = slow_round(row_case_widen(x[j]) * scale);
    }
    golden_add_float(c, "scale", slow_inverse_sqrt(d));
    float *a = golden_add_in(c, GOLDEN_F32, "a", CUT_ROWS, n_head, d);
    float *beta = golden_add_in(c, GOLDEN_F32, "beta", CUT_ROWS, n_head, 0);
    for (int32_t i = 0; i < CUT_ROWS * n_head * d; i++)
        a[i] = decay((uint64_t)i);
    for (int32_t i = 0; i < CUT_ROWS * n_head; i++)
        beta[i] = (float)(test_mix(91 + (uint64_t)i) >> 40) * 0x1p-24f;
}

/* The small ones are where 1e-6 beside the sum of squares shows. */
static void make_kda(golden_set *set) {
    kda_case(set, "normal", ROW_NORMAL, 1.0f, 1, 32);
    kda_case(set, "normal", ROW_NORMAL, 1.0f, 1, 64);
    kda_case(set, "small", ROW_NORMAL, 0x1p-12f, 1, 32);
    kda_case(set, "zeros", ROW_ZEROS, 1.0f, 1, 32);
    kda_case(set, "subnormal", ROW_SUBNORMAL, 1.0f, 1, 32);
}

static void make_kda_norm(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES + 1; f++) {
        int fault = f == GOLDEN_FAMILIES;
        golden_case *c = golden_begin(set, "%s", fault ? "fault" : golden_families[f].name);
        row_family family = fault ? ROW_NORMAL : golden_families[f].family;
        golden_fill_f32(c, "o", family, 61, 3, 2, 48);
        golden_fill_f32(c, "w", ROW_NORMAL, 62, 48, 0, 0);
        golden_fill_bf16(c, "gate", ROW_NORMAL, 63, 3, 96, 0);
        golden_add_float(c, "eps", EPS);
        if (fault)
            ((float *)c->in[0].data)[100] = 0x1p70f;
    }
}

/* ---- activation and residuals ----------------------------------------------------------------------------------------- */

static void make_glu(golden_set *set) {
    for (int i = 0; i < 2 * GOLDEN_FAMILIES; i++) {
        const struct golden_family *f = &golden_families[i / 2];
        golden_case *c = golden_begin(set, "%s-%s", f->name, i % 2 ? "situ" : "silu");
        golden_fill_f32(c, "g", f->family, 71 + (uint64_t)i, 2, 45, 0);
        golden_fill_f32(c, "u", i % 4 < 2 ? f->family : ROW_NORMAL, 72 + (uint64_t)i, 2, 45, 0);
        golden_add_int(c, "situ", i % 2);
        golden_add_float(c, "beta", i % 2 ? 4.0f : 0.0f);
        golden_add_float(c, "linear_beta", i % 2 ? 25.0f : 0.0f);
    }
}

static void attnres_case(golden_set *set, const char *name, row_family family, int32_t n_bank, int32_t d) {
    golden_case *c = golden_begin(set, "%s-%d-%d", name, n_bank, d);
    golden_fill_bf16(c, "bank", family, 81, n_bank, 2, d);
    golden_fill_bf16(c, "p", family, 82, 2, d, 0);
    golden_fill_f32(c, "norm", ROW_NORMAL, 83, d, 0, 0);
    golden_fill_f32(c, "proj", ROW_NORMAL, 84, d, 0, 0);
    golden_add_float(c, "eps", EPS);
}

static void make_attnres(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES; f++)
        attnres_case(set, golden_families[f].name, golden_families[f].family, 1 + f % 3, f % 2 ? 40 : 300);
    attnres_case(set, "ragged", ROW_NORMAL, 7, 17);
    attnres_case(set, "fault", ROW_NORMAL, 2, 24);
    ((bi_bf16 *)set->item[set->n - 1].in[0].data)[30] = 0x7f80;
}

static void make_residual(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES + 1; f++) {
        golden_case *c = golden_begin(set, "%s", f < GOLDEN_FAMILIES ? golden_families[f].name : "raw-bits");
        row_family family = f < GOLDEN_FAMILIES ? golden_families[f].family : ROW_RAW;
        golden_fill_bf16(c, "a", family, 91, 3, 37, 0);
        golden_fill_bf16(c, "b", f == 2 ? ROW_NORMAL : family, 92, 3, 37, 0);
    }
    golden_case *c = golden_begin(set, "fault");
    golden_fill_bf16(c, "a", ROW_PLATEAU, 1, 3, 8, 0);
    golden_fill_bf16(c, "b", ROW_NORMAL, 2, 3, 8, 0);
    ((bi_bf16 *)c->in[0].data)[8] = ((bi_bf16 *)c->in[1].data)[8] = 0x7f7f; /* their sum rounds to Inf */
    ((bi_bf16 *)c->in[1].data)[20] = 0xff80;
}

/* ---- attention -------------------------------------------------------------------------------------------------------- */

typedef struct attn_shape {
    const char *name;
    int32_t n_pos, n_row, n_head, d, d_rope;
    row_family latent, query;
} attn_shape;

static golden_case *attn_case(golden_set *set, const attn_shape *s) {
    golden_case *c = golden_begin(set, "%s", s->name);
    golden_fill_bf16(c, "latent", s->latent, 101, s->n_pos, s->d + s->d_rope, 0);
    golden_fill_bf16(c, "q", s->query, 102, s->n_row, s->n_head, s->d);
    golden_fill_bf16(c, "q_r", s->query, 103, s->n_row, s->n_head, s->d_rope);
    golden_add_float(c, "alpha", slow_rsqrt((float)(s->d + s->d_rope)));
    return c;
}

/* Rows of topk positions, ascending; step: about how far apart. */
static void add_select(golden_case *c, int32_t topk, int32_t step) {
    int32_t n_pos = golden_dim(c, "latent", 0), n = golden_dim(c, "q", 0);
    int32_t *select = golden_add_in(c, GOLDEN_I32, "select", n, topk, 0),
            *n_select = golden_add_in(c, GOLDEN_I32, "n_select", n, 0, 0);
    for (int32_t t = 0; t < n; t++) {
        int32_t position = -1;
        for (int32_t i = 0; i < topk; i++) {
            position += 1 + (int32_t)(test_mix((uint64_t)(t * 1000 + i)) % (uint64_t)(2 * step - 1));
            if (position > n_pos - n + t)
                break;
            select[t * topk + i] = position;
            n_select[t] = i + 1;
        }
    }
}

/* Latents and queries along one direction: the score is +-200 * position / n_pos, so a later block moves the
 * maximum, or its weights vanish. */
static void slope(golden_case *c, float top) {
    int32_t n_pos = golden_dim(c, "latent", 0), d = golden_dim(c, "latent", 1);
    bi_bf16 *latent = c->in[0].data;
    for (int32_t i = 0; i < n_pos * d; i++) {
        float value =
            top * (float)(i / d) / (float)n_pos / (1.375f * sqrtf((float)d)); /* 1.375: the plateau of the queries */
        latent[i] = slow_round(value);
    }
}

static void make_attn(golden_set *set) {
    static const attn_shape shape[] = {
        {"dense", 130, 2, 2, 24, 8, ROW_NORMAL, ROW_NORMAL},
        {"one-position", 1, 1, 2, 16, 8, ROW_NORMAL, ROW_NORMAL},
        {"ragged", 67, 3, 3, 5, 3, ROW_NORMAL, ROW_NORMAL},
        {"plateau", 70, 2, 1, 16, 4, ROW_PLATEAU, ROW_NORMAL},
        {"zeros", 66, 1, 2, 16, 4, ROW_ZEROS, ROW_NORMAL},
        {"subnormal", 66, 1, 2, 16, 4, ROW_SUBNORMAL, ROW_SUBNORMAL},
        {"many-blocks", 540, 2, 2, 12, 4, ROW_NORMAL, ROW_NORMAL},
    };
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        attn_case(set, &shape[i]);
    attn_shape s = {"sparse", 200, 3, 2, 12, 4, ROW_NORMAL, ROW_NORMAL};
    add_select(attn_case(set, &s), 40, 4);
    s.name = "sparse-short";
    s.n_pos = 40;
    add_select(attn_case(set, &s), 3, 9);
    attn_shape sloped = {"rising", 540, 1, 1, 6, 2, ROW_PLATEAU, ROW_PLATEAU};
    slope(attn_case(set, &sloped), 200.0f);
    sloped.name = "falling";
    slope(attn_case(set, &sloped), -200.0f);
    attn_shape parts = {"several-parts", 2100, 1, 1, 6, 2, ROW_NORMAL, ROW_NORMAL};
    attn_case(set, &parts);
    attn_shape fault = {"fault", 5, 3, 2, 16, 4, ROW_NORMAL, ROW_NORMAL};
    golden_case *c = attn_case(set, &fault);
    ((bi_bf16 *)c->in[0].data)[4 * 20] = 0x7f80; /* position 4: only the last row sees it */
}

static void make_attn_gate(golden_set *set) {
    for (int f = 0; f < GOLDEN_FAMILIES + 1; f++) {
        golden_case *c = golden_begin(set, "%s", f < GOLDEN_FAMILIES ? golden_families[f].name : "no-gate");
        golden_fill_f32(c, "o", f < GOLDEN_FAMILIES ? golden_families[f].family : ROW_WIDE, 111, 3, 37, 0);
        if (f < GOLDEN_FAMILIES)
            golden_fill_bf16(c, "gate", ROW_NORMAL, 112, 3, 37, 0);
    }
}

/* ---- indexer ---------------------------------------------------------------------------------------------------------- */

typedef struct index_shape {
    const char *name;
    int32_t n_pos, n_row, n_head, d, topk;
    row_family key, query, weight;
} index_shape;

static golden_case *index_case(golden_set *set, const index_shape *s) {
    golden_case *c = golden_begin(set, "%s", s->name);
    golden_fill_bf16(c, "k", s->key, 121, s->n_pos, s->d, 0);
    golden_fill_bf16(c, "q", s->query, 122, s->n_row, s->n_head, s->d);
    golden_fill_f32(c, "w", s->weight, 123, s->n_row, s->n_head, 0);
    golden_add_float(c, "c", slow_rsqrt((float)(s->n_head * s->d)));
    golden_add_int(c, "topk", s->topk);
    return c;
}

/* Keys whose largest element is 1.75 * 2^e, just above it, and around 1e-4, where the scale stops falling. */
static void make_scale_edges(golden_case *c) {
    static const bi_bf16 top[] = {0x3fe0, 0x3fe1, 0x3fdf, 0x4060, 0x4061, 0x38d1, 0x38d2, 0x38d0, 0x3700, 0x0001};
    int32_t n_pos = golden_dim(c, "k", 0), d = golden_dim(c, "k", 1);
    bi_bf16 *k = c->in[0].data;
    for (int32_t j = 0; j < n_pos; j++)
        for (int32_t i = 0; i < d; i++) {
            float size = row_case_widen(top[j % 10]), part = (float)(test_mix((uint64_t)(j * d + i)) >> 40) * 0x1p-24f;
            float small =
                ldexpf(size, -(int)(test_mix((uint64_t)(j + i * n_pos)) % 18)); /* down to where e4m3 has subnormals */
            k[j * d + i] = i == j % d ? top[j % 10] : slow_round(small * (2.0f * part - 1.0f) * 0.99f);
        }
}

static void make_index(golden_set *set) {
    static const index_shape shape[] = {
        {"normal", 40, 3, 16, 32, 8, ROW_NORMAL, ROW_NORMAL, ROW_NORMAL},
        {"ragged", 35, 4, 4, 20, 34, ROW_NORMAL, ROW_NORMAL, ROW_NORMAL},
        {"plateau", 34, 2, 8, 16, 5, ROW_PLATEAU, ROW_NORMAL, ROW_NORMAL},
        {"zeros", 34, 2, 8, 16, 5, ROW_ZEROS, ROW_ZEROS, ROW_NORMAL},
        {"wide", 33, 2, 8, 16, 9, ROW_WIDE, ROW_WIDE, ROW_NORMAL},
        {"subnormal", 20, 2, 8, 16, 4, ROW_SUBNORMAL, ROW_NORMAL, ROW_NORMAL},
    };
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        index_case(set, &shape[i]);
    index_shape s = {"scale-edges", 30, 2, 8, 16, 6, ROW_NORMAL, ROW_NORMAL, ROW_NORMAL};
    make_scale_edges(index_case(set, &s));
    s.name = "fault";
    golden_case *c = index_case(set, &s);
    ((bi_bf16 *)c->in[0].data)[3 * 16] = 0xff80;
    ((float *)c->in[2].data)[8] = INFINITY; /* the second row's weights */
}

const golden_maker golden_make_row[] = {
    {"embed", make_embed},         {"rmsnorm", make_rmsnorm},
    {"layernorm", make_layernorm}, {"conv", make_conv},
    {"kda_gate", make_kda_gate},   {"kda", make_kda},
    {"kda_norm", make_kda_norm},   {"glu", make_glu},
    {"attnres", make_attnres},     {"residual", make_residual},
    {"attn", make_attn},           {"attn_gate", make_attn_gate},
    {"index", make_index},         {NULL, NULL},
};
