/* N-HEAD, N-SAMPLE and N-RNG word for word, and inputs for them; see slow_head.h. */
#include "slow_head.h"

#include "bi_bits.h"
#include "slow_fn.h"

#include <stdlib.h>
#include <string.h>

/* ---- N-HEAD -------------------------------------------------------------------------------------------------------- */

float slow_z(float x, float temperature) {
    float z = x / (temperature == 0.0f ? 1.0f : temperature);
    if (z > 0x1p118f)
        z = 0x1p118f;
    if (z < -0x1p118f)
        z = -0x1p118f;
    return z == 0.0f ? 0.0f : z;
}

/* SUM(128) with its 256 partials, the upper half of which stays +0. */
static float slow_sum128(const float *x, int n) {
    float p[256];
    for (int i = 0; i < 256; i++)
        p[i] = 0.0f;
    for (int j = 0; j < n; j++)
        p[j % 256] = p[j % 256] + x[j];
    for (int h = 128; h >= 1; h /= 2)
        for (int i = 0; i < h; i++)
            p[i] = p[i] + p[i + h];
    return p[0];
}

slow_softmax slow_softmax_of(const float *x, int n, float temperature) {
    int n_block = (n + 127) / 128;
    float *m = malloc(sizeof *m * (size_t)n_block), *l = malloc(sizeof *l * (size_t)n_block),
          *d = malloc(sizeof *d * (size_t)n_block);
    float max = 0.0f;
    for (int b = 0; b < n_block; b++) {
        int first = b * 128, count = n - first < 128 ? n - first : 128;
        float e[128], product[128];
        m[b] = slow_z(x[first], temperature);
        for (int i = 1; i < count; i++)
            if (slow_z(x[first + i], temperature) > m[b])
                m[b] = slow_z(x[first + i], temperature);
        for (int i = 0; i < count; i++) {
            float below = slow_z(x[first + i], temperature) - m[b];
            e[i] = slow_exp(below);
            product[i] = e[i] * below;
        }
        l[b] = slow_sum128(e, count);
        d[b] = slow_sum128(product, count);
        if (b == 0 || m[b] > max)
            max = m[b];
    }
    float sum = 0.0f, dot = 0.0f;
    for (int b = 0; b < n_block; b++) {
        float shift = m[b] - max, w = slow_exp(shift);
        sum = fmaf(l[b], w, sum);
        dot = fmaf(fmaf(l[b], shift, d[b]), w, dot);
    }
    free(m), free(l), free(d);
    float ratio = dot / sum;
    slow_softmax out = {max, slow_log(sum), slow_log(sum) - ratio};
    return out;
}

float slow_logprob(const slow_softmax *s, float z) {
    float below = z - s->max;
    return below - s->log_sum;
}

/* ---- N-RNG --------------------------------------------------------------------------------------------------------- */

uint64_t slow_philox_u64(const bi_sampling *set) {
    uint32_t key[2] = {(uint32_t)set->seed, (uint32_t)(set->seed >> 32)};
    uint32_t c[4] = {(uint32_t)set->position, set->sample * 256u + 0u, (uint32_t)set->uid_hash,
                     (uint32_t)(set->uid_hash >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ key[0], (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ key[1],
                            (uint32_t)p0};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c[0] + ((uint64_t)c[1] << 32);
}

static uint32_t inverse_of(uint32_t odd) {
    uint32_t inverse = odd; /* right to 3 bits; each step doubles them */
    for (int i = 0; i < 5; i++)
        inverse *= 2 - odd * inverse;
    return inverse;
}

bi_sampling slow_setting_drawing(uint64_t u) {
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, i0 = inverse_of(m0), i1 = inverse_of(m1);
    bi_sampling s = SLOW_PLAIN;
    uint32_t c[4];
    for (uint32_t rest = 0; rest == 0 || (c[1] & 255) != 0; rest++) {
        uint32_t key0 = 10 * 0x9E3779B9u, key1 = 10 * 0xBB67AE85u; /* of seed 0 after ten steps */
        c[0] = (uint32_t)u, c[1] = (uint32_t)(u >> 32), c[2] = rest, c[3] = 0;
        for (int round = 0; round < 10; round++) {
            key0 -= 0x9E3779B9u;
            key1 -= 0xBB67AE85u;
            uint32_t c0 = c[3] * i0, c2 = c[1] * i1;
            uint32_t c1 = c[0] ^ key0 ^ (uint32_t)((uint64_t)m1 * c2 >> 32),
                     c3 = c[2] ^ key1 ^ (uint32_t)((uint64_t)m0 * c0 >> 32);
            c[0] = c0, c[1] = c1, c[2] = c2, c[3] = c3;
        }
    }
    s.position = (int32_t)c[0];
    s.sample = c[1] >> 8;
    s.uid_hash = c[2] | (uint64_t)c[3] << 32;
    return s;
}

/* ---- N-SAMPLE ------------------------------------------------------------------------------------------------------ */

static const float *sort_z;

/* P-4: value descending, index ascending. z has no -0. */
static int by_p4(const void *a, const void *b) {
    int i = *(const int *)a, j = *(const int *)b;
    if (sort_z[i] != sort_z[j])
        return sort_z[i] > sort_z[j] ? -1 : 1;
    return i < j ? -1 : 1;
}

typedef struct slow_row {
    int n;
    float max;
    float *z;
    int *order;  /* all ids in P-4 order */
    char *kept;
} slow_row;

static uint64_t weight(const slow_row *row, int i) {
    float below = row->z[i] - row->max;
    return row->kept[i] ? (uint64_t)(slow_exp(below) * 0x1p40f) : 0;
}

static uint64_t weight_sum(const slow_row *row) {
    uint64_t sum = 0;
    for (int i = 0; i < row->n; i++)
        sum += weight(row, i);
    return sum;
}

static void apply_top_p(slow_row *row, uint64_t top_p) {
    unsigned __int128 scaled = (unsigned __int128)top_p * weight_sum(row);
    unsigned __int128 need = (scaled >> 32) + ((scaled & 0xffffffffu) != 0);
    unsigned __int128 sum = 0;
    for (int at = 0; at < row->n; at++) {
        int i = row->order[at];
        if (sum >= need)
            row->kept[i] = 0;
        else
            sum += weight(row, i);
    }
}

static void apply_filters(slow_row *row, const bi_sampling *set) {
    float threshold = set->min_p > 0.0f ? row->max + slow_log(set->min_p) : 0.0f;
    for (int i = 0; i < row->n; i++)
        row->kept[i] = !(set->min_p > 0.0f) || row->z[i] >= threshold;
    int n_kept = 0;
    for (int at = 0; at < row->n; at++)
        if (row->kept[row->order[at]] && set->top_k > 0 && n_kept++ >= set->top_k)
            row->kept[row->order[at]] = 0;
    if (set->top_p_q32 < 1ull << 32)
        apply_top_p(row, set->top_p_q32);
}

static int draw(const slow_row *row, uint64_t u) {
    uint64_t r = (uint64_t)(((unsigned __int128)u * weight_sum(row)) >> 64), sum = 0;
    for (int i = 0; i < row->n; i++) {
        sum += weight(row, i);
        if (sum > r)
            return i;
    }
    return -1;
}

static void choose(slow_row *row, const bi_sampling *set, uint64_t u, int forced, slow_sampled *out) {
    if (set->temperature == 0.0f) {
        for (int i = 0; i < row->n; i++)
            row->kept[i] = i == row->order[0];
        out->token = forced >= 0 ? forced : row->order[0];
        out->logprob_kept = row->kept[out->token] ? 0.0f : -INFINITY;
        return;
    }
    apply_filters(row, set);
    out->token = forced >= 0 ? forced : draw(row, u);
    float below = row->z[out->token] - row->max;
    out->logprob_kept = row->kept[out->token] ? below - slow_log((float)weight_sum(row) * 0x1p-40f) : -INFINITY;
}

void slow_sample(const float *x, int n, const bi_sampling *set, uint64_t u, int forced, slow_sampled *out) {
    slow_row row = {
        .n = n, .z = malloc(sizeof(float) * (size_t)n), .order = malloc(sizeof(int) * (size_t)n), .kept = calloc((size_t)n, 1)};
    for (int i = 0; i < n; i++) {
        row.z[i] = slow_z(x[i], set->temperature);
        row.order[i] = i;
    }
    sort_z = row.z;
    qsort(row.order, (size_t)n, sizeof *row.order, by_p4);
    row.max = row.z[row.order[0]];
    choose(&row, set, u, forced, out);
    out->n_kept = 0;
    for (int i = 0; i < n; i++)
        out->n_kept += row.kept[i];
    slow_softmax scaled = slow_softmax_of(x, n, set->temperature), raw = slow_softmax_of(x, n, 1.0f);
    out->logprob = slow_logprob(&scaled, row.z[out->token]);
    out->logprob_raw = slow_logprob(&raw, slow_z(x[out->token], 1.0f));
    out->entropy = set->entropy ? scaled.entropy : bi_f32_of(0x7fc00000u);
    for (int i = 0; i < set->n_top; i++) {
        out->top[i].token = row.order[i];
        out->top[i].logprob = slow_logprob(&scaled, row.z[row.order[i]]);
    }
    free(row.z), free(row.order), free(row.kept);
}

/* ---- inputs -------------------------------------------------------------------------------------------------------- */

const bi_sampling SLOW_PLAIN = {.temperature = 1.0f, .top_p_q32 = (uint64_t)1 << 32};

void slow_logits(op_random *random, int kind, float *x, int n) {
    static const float zeros[3] = {0.0f, -0.0f, 0x1p-149f};
    for (int i = 0; i < n; i++) {
        float normal = op_random_normal(random);
        switch (kind) {
        case 0: x[i] = 3.0f * normal; break;
        case 1: x[i] = 0.25f; break;                                           /* one plateau */
        case 2: x[i] = (float)op_random_below(random, 3); break;               /* few levels, many ties */
        case 3: x[i] = zeros[op_random_below(random, 3)]; break;
        case 4: x[i] = normal * 0x1p-127f; break;                              /* subnormals */
        case 5: x[i] = normal * 0x1p125f; break;                               /* z and differences overflow */
        case 6: x[i] = -0.5f * (float)(i % 60); break;                         /* weights down to 0 of 2^40 */
        case 7: x[i] = i == n / 2 ? 40.0f : normal; break;                     /* all but one vanish */
        case 8: x[i] = 20.0f * normal; break;
        default: x[i] = normal > 0.0f ? 0x1.8p0f : bi_f32_of(0x3fc00000u - (uint32_t)op_random_below(random, 2)); break;
        }
    }
}

bi_sampling slow_setting(op_random *random, int n_vocab) {
    static const float temperatures[] = {0.0f, 1.0f, 1.0f, 0.7f, 1.5f, 0x1p-10f, 0x1p10f, 0.1f};
    static const float min_ps[] = {0.0f, 0.0f, 0.0f, 0.05f, 0.5f, 1.0f, 1e-30f, 0.9999999f};
    static const double top_ps[] = {1.0, 1.0, 0.95, 0.5, 0.1, 1e-12, 0.9999999999, 0.25};
    bi_sampling s = SLOW_PLAIN;
    s.temperature = temperatures[op_random_below(random, 8)];
    s.min_p = min_ps[op_random_below(random, 8)];
    s.top_p_q32 = bi_sample_top_p(top_ps[op_random_below(random, 8)]);
    s.top_k = op_random_below(random, 2) ? op_random_below(random, n_vocab + 3) : op_random_below(random, 4);
    s.n_top = op_random_below(random, n_vocab < BR_TOP_LOGPROBS_MAX ? n_vocab + 1 : BR_TOP_LOGPROBS_MAX + 1);
    s.entropy = op_random_below(random, 2);
    s.seed = op_random_u64(random);
    s.uid_hash = op_random_u64(random);
    s.sample = (uint32_t)op_random_below(random, 1 << 24);
    s.position = op_random_below(random, 1 << 20);
    return s;
}
