/* Literal loops of N-ATT and N-IDX; see slow_attn.h. */
#include "slow_attn.h"
#include "bi_bits.h"
#include "slow_block.h"
#include "slow_fn.h"

enum { PART = 2048, BLOCK = 64, CHAIN_K = 2048, HEADS = 64, POSITIONS = 4096 };

typedef struct state {
    int n; /* what has joined */
    float m, l, acc[CHAIN_K];
} state;

/* Sixteens fold by halves, then the four that are left. */
static float fold64(const float *e) {
    float p[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        p[i] = 0.0f + e[i];
    for (int first = 0; first < BLOCK; first += 16)
        for (int h = 8; h >= 1; h /= 2)
            for (int i = first; i < first + h; i++)
                p[i] = p[i] + p[i + h];
    return (p[0] + p[32]) + (p[16] + p[48]);
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

/* Up to 64 entries join a part; absent entries have e = +0 and a zero row. */
static void join_block(const slow_attn *a, state *c, const int32_t *position, const float *s, int n) {
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

/* A part joins the parts before it. */
static void join_part(const slow_attn *a, state *row, const state *part) {
    if (!row->n) {
        *row = *part;
        return;
    }
    float top = part->m > row->m ? part->m : row->m, f = slow_exp(row->m - top), w = slow_exp(part->m - top);
    row->l = fmaf(part->l, w, row->l * f);
    for (int d = 0; d < a->d_kv_latent; d++)
        row->acc[d] = fmaf(part->acc[d], w, row->acc[d] * f);
    row->m = top;
    row->n += part->n;
}

static int attend_head(const slow_attn *a, int head, bi_bf16 *z) {
    static state row, part;
    int bad = 0;
    row.n = 0;
    for (int first = 0; first < a->n_select; first += PART) {
        part.n = 0;
        for (int begin = first; begin < first + PART && begin < a->n_select; begin += BLOCK) {
            float s[BLOCK];
            int n = a->n_select - begin < BLOCK ? a->n_select - begin : BLOCK;
            for (int i = 0; i < n; i++) {
                s[i] = score_of(a, head, a->select[begin + i]);
                bad |= !bi_is_finite(s[i]);
            }
            join_block(a, &part, a->select + begin, s, n);
        }
        join_part(a, &row, &part);
    }
    for (int d = 0; d < a->d_kv_latent; d++)
        z[d] = bi_round(row.acc[d] * (1.0f / row.l));
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
