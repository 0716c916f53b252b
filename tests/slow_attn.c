/* Literal loops of N-ATT and N-IDX; see slow_attn.h. */
#include "slow_attn.h"
#include "bi_bits.h"
#include "slow_block.h"
#include "slow_fn.h"

enum { CLASSES = 8, BLOCK = 64, CHAIN_K = 2048, HEADS = 64, POSITIONS = 4096 };

typedef struct class_state {
    int n; /* entries of the class */
    float m, l, acc[CHAIN_K];
} class_state;

static float fold64(const float *e) {
    float p[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        p[i] = 0.0f + e[i];
    for (int h = 32; h >= 1; h /= 2)
        for (int i = 0; i < h; i++)
            p[i] = p[i] + p[i + h];
    return p[0];
}

static float score_of(const slow_attn *a, int head, int position) {
    int d_latent = a->d_kv_latent + a->d_rope;
    bi_bf16 query[CHAIN_K] = {0};
    for (int k = 0; k < a->d_kv_latent; k++)
        query[k] = a->q[head * a->d_kv_latent + k];
    for (int k = 0; k < a->d_rope; k++)
        query[a->d_kv_latent + k] = a->q_r[head * a->q_r_head_ld + k];
    return a->alpha * slow_chain(0.0f, query, 1, a->latent + (int64_t)position * d_latent, 1, d_latent);
}

/* Up to 64 entries of one class join its state; absent entries have e = +0 and a zero row. */
static void join_block(const slow_attn *a, class_state *c, const int32_t *position, const float *s, int n) {
    float e[BLOCK] = {0}, m = c->n ? c->m : s[0];
    bi_bf16 weight[BLOCK] = {0};
    for (int i = 0; i < n; i++)
        m = s[i] > m ? s[i] : m;
    for (int i = 0; i < n; i++) {
        e[i] = slow_exp(s[i] - m);
        weight[i] = bi_round(e[i]);
    }
    float f = c->n ? slow_exp(c->m - m) : 0.0f;
    c->l = c->n ? fmaf(c->l, f, fold64(e)) : fold64(e);
    for (int d = 0; d < a->d_kv_latent; d++) {
        bi_bf16 column[BLOCK] = {0};
        for (int i = 0; i < n; i++)
            column[i] = a->latent[(int64_t)position[i] * (a->d_kv_latent + a->d_rope) + d];
        c->acc[d] = slow_chain(c->n ? c->acc[d] * f : 0.0f, weight, 1, column, 1, BLOCK);
    }
    c->m = m;
    c->n += n;
}

static void merge(const slow_attn *a, const class_state *c, bi_bf16 *z) {
    int first = 1;
    float top = 0.0f, sum = 0.0f;
    for (int i = 0; i < CLASSES; i++) {
        if (c[i].n && (first || c[i].m > top)) {
            top = c[i].m;
            first = 0;
        }
    }
    for (int i = 0; i < CLASSES; i++)
        sum = c[i].n ? fmaf(c[i].l, slow_exp(c[i].m - top), sum) : sum;
    for (int d = 0; d < a->d_kv_latent; d++) {
        float o = 0.0f;
        for (int i = 0; i < CLASSES; i++)
            o = c[i].n ? fmaf(c[i].acc[d], slow_exp(c[i].m - top), o) : o;
        z[d] = bi_round(o * (1.0f / sum));
    }
}

static int attend_head(const slow_attn *a, int head, bi_bf16 *z) {
    static class_state state[CLASSES];
    int bad = 0;
    for (int c = 0; c < CLASSES; c++) {
        int32_t position[BLOCK];
        float s[BLOCK];
        int n = 0;
        state[c].n = 0;
        for (int i = 0; i < a->n_select; i++) {
            if (a->select[i] / 64 % 8 != c)
                continue;
            position[n] = a->select[i];
            s[n] = score_of(a, head, a->select[i]);
            bad |= !bi_is_finite(s[n]);
            if (++n == BLOCK) {
                join_block(a, &state[c], position, s, n);
                n = 0;
            }
        }
        if (n)
            join_block(a, &state[c], position, s, n);
    }
    merge(a, state, z);
    return bad;
}

int slow_attn_row(const slow_attn *a, bi_bf16 *z) {
    int bad = 0;
    for (int h = 0; h < a->n_head; h++)
        bad |= attend_head(a, h, z + h * a->d_kv_latent);
    return bad;
}

/* The non-negative e4m3 numbers in order; the index is the code. */
float slow_e4m3_number(int code) {
    int field = code >> 3, fraction = code & 7;
    return field ? ldexpf((float)(8 + fraction), field - 10) : ldexpf((float)fraction, -9);
}

int slow_e4m3_code(float magnitude) {
    int best = 0;
    for (int code = 1; code < 127; code++) {
        double here = fabs((double)slow_e4m3_number(code) - (double)magnitude);
        double before = fabs((double)slow_e4m3_number(best) - (double)magnitude);
        if (here < before || (here == before && code % 2 == 0))
            best = code;
    }
    return best;
}

void slow_index_quantise(const bi_bf16 *x, int d, float *value, float *scale) {
    float amax = 1e-4f;
    for (int i = 0; i < d; i++)
        amax = fabsf(bi_widen(x[i])) > amax ? fabsf(bi_widen(x[i])) : amax;
    int power = -100;
    while (ldexp(448.0, power) < (double)amax)
        power++;
    *scale = ldexpf(1.0f, power);
    for (int i = 0; i < d; i++) {
        float scaled = bi_widen(x[i]) / *scale, size = slow_e4m3_number(slow_e4m3_code(fabsf(scaled)));
        value[i] = scaled < 0 ? -size : size;
    }
}

/* The e4m3 numbers of x / *scale as bf16. */
static void quantise_bf16(const bi_bf16 *x, int d, bi_bf16 *out, float *scale) {
    float value[CHAIN_K];
    slow_index_quantise(x, d, value, scale);
    for (int i = 0; i < d; i++)
        out[i] = bi_round(value[i]);
}

static float index_score(const slow_index *x, const bi_bf16 *query, const float *scale_q, int position) {
    float scale_k, p[4] = {0};
    bi_bf16 key[CHAIN_K];
    quantise_bf16(x->k + (int64_t)position * x->d, x->d, key, &scale_k);
    for (int h = 0; h < x->n_head; h++) {
        float w = (x->w[h] * x->c) * scale_q[h];
        float acc = slow_chain(0.0f, query + (int64_t)h * x->d, 1, key, 1, x->d);
        p[h / 2 % 4] = fmaf(w, acc > 0 ? acc : 0.0f, p[h / 2 % 4]);
    }
    return ((p[0] + p[1]) + (p[2] + p[3])) * scale_k;
}

/* Earlier in the order of P-4: the larger value, of equal ones the lower index; -0 equals +0. */
int slow_index_row(const slow_index *x, float *score, int32_t *select) {
    static bi_bf16 query[HEADS * CHAIN_K];
    static unsigned char taken[POSITIONS];
    float scale_q[HEADS];
    for (int h = 0; h < x->n_head; h++)
        quantise_bf16(x->q + (int64_t)h * x->d, x->d, query + (int64_t)h * x->d, &scale_q[h]);
    int n = x->n_pos < x->topk ? x->n_pos : x->topk, n_out = 0;
    for (int j = 0; j < x->n_pos; j++) {
        score[j] = index_score(x, query, scale_q, j);
        taken[j] = 0;
    }
    for (int i = 0; i < n; i++) {
        int best = -1;
        for (int j = 0; j < x->n_pos; j++)
            if (!taken[j] && (best < 0 || score[j] > score[best]))
                best = j;
        taken[best] = 1;
    }
    for (int j = 0; j < x->n_pos; j++)
        if (taken[j])
            select[n_out++] = j;
    return n_out;
}
