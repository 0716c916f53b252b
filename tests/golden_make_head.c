/* Golden inputs of score and sample; see golden_make.h. */
#include "golden_make.h"
#include "slow_head.h"

/* ---- score ------------------------------------------------------------------------------------------------------------ */

typedef struct score_shape {
    const char *name;
    int32_t n, d, n_vocab;
    float x_scale, w_scale;
} score_shape;

static golden_case *score_case(golden_set *set, const score_shape *s) {
    static const float temperature[] = {1.0f, 0.0f, 0.7f, 1.3f, 0x1p-10f, 0x1p10f};
    golden_case *c = golden_begin(set, "%s", s->name);
    op_random random = {400 + (uint64_t)set->n, 0};
    op_random_bf16s(&random, s->x_scale, golden_add_in(c, GOLDEN_BF16, "x", s->n, s->d, 0), s->n * s->d);
    op_random_bf16s(&random, s->w_scale, golden_add_in(c, GOLDEN_BF16, "w", s->n_vocab, s->d, 0), s->n_vocab * s->d);
    int32_t *token = golden_add_in(c, GOLDEN_I32, "token", s->n, 0, 0);
    float *t = golden_add_in(c, GOLDEN_F32, "temperature", s->n, 0, 0);
    for (int32_t i = 0; i < s->n; i++) {
        token[i] = i ? op_random_below(&random, s->n_vocab) : s->n_vocab - 1;
        t[i] = temperature[i % 6];
    }
    return c;
}

static void make_score(golden_set *set) {
    static const score_shape shape[] = {
        {"regular", 6, 16, 256, 1.0f, 0.4f},    {"ragged", 6, 18, 300, 1.0f, 0.4f},
        {"one-token", 2, 16, 1, 1.0f, 0.4f},    {"short-block", 3, 16, 130, 1.0f, 2.0f},
        {"plateau", 3, 16, 140, 1.0f, 0.0f},    {"subnormal", 3, 16, 40, 0x1p-70f, 0x1p-70f},
        {"huge", 6, 16, 150, 0x1p60f, 0x1p56f}, /* z and the spread of z leave binary32 */
    };
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        score_case(set, &shape[i]);
    const score_shape fault = {"fault", 3, 16, 20, 1.0f, 0.4f};
    ((bi_bf16 *)score_case(set, &fault)->in[0].data)[16] = 0x7f80;
}

/* ---- sample ----------------------------------------------------------------------------------------------------------- */

static void put_settings(golden_case *c, const bi_sampling *setting, const int32_t *forced, int32_t n) {
    float *temperature = golden_add_in(c, GOLDEN_F32, "temperature", n, 0, 0),
          *min_p = golden_add_in(c, GOLDEN_F32, "min_p", n, 0, 0);
    int32_t *top_k = golden_add_in(c, GOLDEN_I32, "top_k", n, 0, 0), *n_top = golden_add_in(c, GOLDEN_I32, "n_top", n, 0, 0);
    uint64_t *top_p = golden_add_in(c, GOLDEN_U64, "top_p_q32", n, 0, 0),
             *seed = golden_add_in(c, GOLDEN_U64, "seed", n, 0, 0);
    uint64_t *uid = golden_add_in(c, GOLDEN_U64, "uid_hash", n, 0, 0);
    int32_t *sample = golden_add_in(c, GOLDEN_I32, "sample", n, 0, 0),
            *position = golden_add_in(c, GOLDEN_I32, "position", n, 0, 0);
    int32_t top_ld = 1;
    for (int32_t i = 0; i < n; i++) {
        temperature[i] = setting[i].temperature, min_p[i] = setting[i].min_p, top_p[i] = setting[i].top_p_q32;
        top_k[i] = setting[i].top_k, n_top[i] = setting[i].n_top, seed[i] = setting[i].seed, uid[i] = setting[i].uid_hash;
        sample[i] = (int32_t)setting[i].sample, position[i] = setting[i].position;
        top_ld = setting[i].n_top > top_ld ? setting[i].n_top : top_ld;
    }
    golden_list_i32(c, "forced", forced, n);
    golden_add_int(c, "top_ld", top_ld);
}

/* Every kind of logits with any mixture of filters; every third token is given, not drawn. */
static void mixed_case(golden_set *set, int32_t n, int32_t n_vocab) {
    enum { ROW_MAX = 40 };
    bi_sampling setting[ROW_MAX];
    int32_t forced[ROW_MAX];
    golden_case *c = golden_begin(set, "mixed-%d", n_vocab);
    op_random random = {500 + (uint64_t)n_vocab, 0};
    float *logit = golden_add_in(c, GOLDEN_F32, "logit", n, n_vocab, 0);
    for (int32_t t = 0; t < n; t++) {
        slow_logits(&random, t % SLOW_LOGIT_KINDS, logit + t * n_vocab, n_vocab);
        setting[t] = slow_setting(&random, n_vocab);
        setting[t].n_top = setting[t].n_top < 6 ? setting[t].n_top : 6;
        forced[t] = t % 3 == 2 ? op_random_below(&random, n_vocab) : -1;
    }
    put_settings(c, setting, forced, n);
}

/* Draws at both ends of the number line. The last token's weight is 1 of 2^40, so one bit less and it could not be drawn;
 * top_p and min_p at values that keep exactly what they should. */
static void edge_case(golden_set *set) {
    enum { N = 8, N_VOCAB = 20 };
    bi_sampling setting[N];
    int32_t forced[N];
    golden_case *c = golden_begin(set, "edges");
    float *logit = golden_add_in(c, GOLDEN_F32, "logit", N, N_VOCAB, 0);
    for (int32_t t = 0; t < N; t++) {
        for (int32_t i = 0; i < N_VOCAB; i++)
            logit[t * N_VOCAB + i] = i == N_VOCAB - 1 ? -27.7f : -0.25f * (float)(i % 5);
        setting[t] = slow_setting_drawing(t % 2 ? ~(uint64_t)0 : 0);
        setting[t].n_top = t;
        forced[t] = -1;
    }
    setting[2].top_p_q32 = setting[3].top_p_q32 = 1;
    setting[4].top_p_q32 = setting[5].top_p_q32 = ((uint64_t)1 << 32) - 1;
    setting[6].top_k = setting[7].top_k = 4; /* the first of five levels has four */
    put_settings(c, setting, forced, N);
}

static void make_sample(golden_set *set) {
    mixed_case(set, 30, 130);
    mixed_case(set, 10, 300);
    mixed_case(set, 20, 7);
    mixed_case(set, 3, 1);
    edge_case(set);
}

const golden_maker golden_make_head[] = {{"score", make_score}, {"sample", make_sample}, {NULL, NULL}};
