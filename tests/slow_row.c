/* Literal forms of the row-wise ops; see slow_row.h. */
#include "slow_row.h"

#include "slow_fn.h"

#include <math.h>
#include <string.h>

static float widen(bi_bf16 x) {
    uint32_t u = (uint32_t)x * 65536u;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* The magnitude of a bf16 pattern as a number, Inf standing for 2^128, the number after the largest. */
static double magnitude(uint32_t pattern) {
    return pattern >= 0x7f80u ? 0x1p128 : (double)widen((bi_bf16)pattern);
}

bi_bf16 slow_round(float x) {
    if (isnan(x))
        return 0x7fff;
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = u >> 31 << 15, below = (u & 0x7fffffffu) / 65536u;
    if (isinf(x))
        return (bi_bf16)(sign + 0x7f80u);
    double to_below = fabs((double)x) - magnitude(below), to_above = magnitude(below + 1) - fabs((double)x);
    int up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    return (bi_bf16)(sign + below + (up ? 1u : 0u));
}

/* y is the rounded one when its two ties y - ulp/2 and y + ulp/2 lie on either side: t < d^-1/2 means t * t * d < 1, and a
 * tie has 25 bits, so binary64 squares it exactly and the product with d < 2^9 is within 2^-44 of the truth. */
float slow_inverse_sqrt(int32_t d) {
    float y = (float)(1.0 / sqrt((double)d));
    for (;;) {
        double low = ((double)y + (double)nextafterf(y, 0.0f)) / 2, high = ((double)y + (double)nextafterf(y, 2.0f)) / 2;
        if (low * low * d > 1.0)
            y = nextafterf(y, 0.0f);
        else if (high * high * d < 1.0)
            y = nextafterf(y, 2.0f);
        else
            return y;
    }
}

/* SUM(n): element j joins partial j mod 256 by fma with x[j] * y[j]; then partials h apart are added, h = 128 .. 1. */
float slow_sum_of_products(const float *x, const float *y, int32_t n) {
    float p[256];
    for (int i = 0; i < 256; i++)
        p[i] = 0.0f;
    for (int32_t j = 0; j < n; j++)
        p[j % 256] = fmaf(x[j], y[j], p[j % 256]);
    for (int h = 128; h >= 1; h /= 2)
        for (int i = 0; i < h; i++)
            p[i] = p[i] + p[i + h];
    return p[0];
}

float slow_sum_of_values(const float *x, int32_t n) {
    float p[256];
    for (int i = 0; i < 256; i++)
        p[i] = 0.0f;
    for (int32_t j = 0; j < n; j++)
        p[j % 256] = p[j % 256] + x[j];
    for (int h = 128; h >= 1; h /= 2)
        for (int i = 0; i < h; i++)
            p[i] = p[i] + p[i + h];
    return p[0];
}

static void widen_row(float *out, const bi_bf16 *x, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        out[i] = widen(x[i]);
}

static void report(const bi_fault *fault, int32_t row, float value) {
    if (fault->row && (isnan(value) || isinf(value)) && fault->row[row] == 0)
        fault->row[row] = fault->code;
}

static float rstd_of(float sum, int32_t n, float eps) {
    float mean = sum / (float)n;
    float shifted = mean + eps;
    float root = sqrtf(shifted);
    return 1.0f / root;
}

void slow_embed(const bi_embed_args *a) {
    for (int32_t t = 0; t < a->n_row; t++)
        for (int32_t i = 0; i < a->d_model; i++)
            a->y[t * a->d_model + i] = a->table[a->token[t] * a->d_model + i];
}

void slow_rmsnorm(const bi_norm_args *a) {
    for (int32_t t = 0; t < a->n_row; t++) {
        float x[BR_D_MODEL_MAX];
        widen_row(x, a->x + t * a->x_ld, a->d);
        float sum = slow_sum_of_products(x, x, a->d);
        report(&a->fault, t, sum);
        float rstd = rstd_of(sum, a->d, a->eps);
        for (int32_t i = 0; i < a->d; i++) {
            float scaled = x[i] * rstd;
            float weighted = scaled * a->w[i];
            a->y[t * a->y_ld + i] = slow_round(weighted);
        }
    }
}

void slow_layernorm(const bi_norm_args *a) {
    for (int32_t t = 0; t < a->n_row; t++) {
        float x[BR_D_MODEL_MAX];
        widen_row(x, a->x + t * a->x_ld, a->d);
        float mean = slow_sum_of_values(x, a->d) / (float)a->d;
        for (int32_t i = 0; i < a->d; i++)
            x[i] = x[i] - mean;
        float sum = slow_sum_of_products(x, x, a->d);
        report(&a->fault, t, sum);
        float rstd = rstd_of(sum, a->d, a->eps);
        for (int32_t i = 0; i < a->d; i++) {
            float scaled = x[i] * rstd;
            float weighted = scaled * a->w[i];
            float shifted = weighted + (a->b ? a->b[i] : 0.0f);
            a->y[t * a->y_ld + i] = slow_round(shifted);
        }
    }
}

/* The input of one channel at an absolute position of a segment's sequence. */
static float conv_input(const bi_conv_args *a, const bi_seg *seg, const bi_bf16 *history, int32_t position, int32_t chan) {
    if (position < 0)
        return 0.0f;
    if (position < seg->pos)
        return widen(history[(position - (seg->pos - 3)) * a->n_chan + chan]);
    return widen(a->x[(seg->row + position - seg->pos) * a->x_ld + chan]);
}

static void conv_channel(const bi_conv_args *a, const bi_seg *seg, bi_bf16 *history, int32_t chan) {
    const float *w = a->w + chan * 4;
    for (int32_t t = 0; t < seg->n_row; t++) {
        float c = 0.0f;
        for (int tap = 0; tap < 4; tap++)
            c = fmaf(w[tap], conv_input(a, seg, history, seg->pos + t - 3 + tap, chan), c);
        a->y[(seg->row + t) * a->y_ld + chan] = slow_round(c * slow_sigmoid(c));
    }
    float last[3];
    for (int i = 0; i < 3; i++)
        last[i] = conv_input(a, seg, history, seg->pos + seg->n_row - 3 + i, chan);
    for (int i = 0; i < 3; i++)
        history[i * a->n_chan + chan] = slow_round(last[i]);
}

void slow_conv(const bi_conv_args *a) {
    for (int32_t s = 0; s < a->batch->n_seg; s++) {
        const bi_seg *seg = &a->batch->seg[s];
        bi_bf16 *history = (bi_bf16 *)(void *)bi_state_of(&a->history, seg->seq);
        for (int32_t chan = 0; chan < a->n_chan; chan++)
            conv_channel(a, seg, history, chan);
    }
}

void slow_kda_gate(const bi_kda_gate_args *a) {
    for (int32_t t = 0; t < a->n_row; t++)
        for (int32_t h = 0; h < a->n_head; h++) {
            a->beta[t * a->n_head + h] = slow_sigmoid(widen(a->b[t * a->n_head + h]));
            for (int32_t i = 0; i < a->d; i++) {
                int32_t at = (t * a->n_head + h) * a->d + i;
                float yv = widen(a->f[at]) + a->dt_bias[h * a->d + i];
                float rate = slow_exp(a->a_log[h]);
                float bounded = a->lower_bound * slow_sigmoid(rate * yv);
                float unbounded = -(rate * slow_softplus(yv));
                a->a[at] = slow_exp(a->bounded ? bounded : unbounded);
            }
        }
}

/* dot of one value column: s is the column, `step` floats from key to key. */
static float kda_dot(const float *s, int32_t step, const float *x, int32_t d) {
    float p[8];
    for (int l = 0; l < 8; l++) {
        float even = 0.0f, odd = 0.0f;
        for (int n = 0; n < d / 8; n++) {
            int key = 32 * (n / 4) + 4 * l + n % 4;
            float *chain = n % 2 ? &odd : &even;
            *chain = n < 2 ? s[key * step] * x[key] : fmaf(s[key * step], x[key], *chain);
        }
        p[l] = even + odd;
    }
    for (int h = 4; h >= 1; h /= 2)
        for (int l = 0; l < h; l++)
            p[l] = p[l] + p[l + h];
    return p[0];
}

/* The rows that one token brings to one head. */
typedef struct kda_token {
    const float *a;
    float k[256], q[256], ak[256];
} kda_token;

static void kda_operands(const bi_kda_args *a, int32_t row, int32_t h, kda_token *token) {
    int32_t d = a->d, at = row * a->ld + h * d;
    token->a = a->a + (row * a->n_head + h) * d;
    widen_row(token->k, a->k + at, d);
    widen_row(token->q, a->q + at, d);
    float k_sum = slow_sum_of_products(token->k, token->k, d), q_sum = slow_sum_of_products(token->q, token->q, d);
    report(&a->fault, row, k_sum);
    report(&a->fault, row, q_sum);
    float k_norm = sqrtf(k_sum + 1e-6f), q_norm = sqrtf(q_sum + 1e-6f), scale = slow_inverse_sqrt(d);
    for (int32_t i = 0; i < d; i++) {
        token->k[i] = token->k[i] / k_norm;
        float unit = token->q[i] / q_norm;
        token->q[i] = unit * scale;
        token->ak[i] = token->a[i] * token->k[i];
    }
}

static void kda_step(const bi_kda_args *a, int32_t row, int32_t h, float *state) {
    kda_token token = {0};
    int32_t d = a->d;
    kda_operands(a, row, h, &token);
    for (int32_t j = 0; j < d; j++) {
        float *s = state + j;
        float r = kda_dot(s, d, token.ak, d);
        float left = widen(a->v[row * a->ld + h * d + j]) - r;
        float u = a->beta[row * a->n_head + h] * left;
        for (int32_t i = 0; i < d; i++) {
            float decayed = token.a[i] * s[i * d];
            s[i * d] = fmaf(token.k[i], u, decayed);
        }
        a->o[(row * a->n_head + h) * d + j] = kda_dot(s, d, token.q, d);
    }
}

void slow_kda(const bi_kda_args *a) {
    for (int32_t s = 0; s < a->batch->n_seg; s++) {
        const bi_seg *seg = &a->batch->seg[s];
        float *state = (float *)(void *)bi_state_of(&a->state, seg->seq);
        if (seg->pos == 0)
            for (int32_t i = 0; i < a->n_head * a->d * a->d; i++)
                state[i] = 0.0f;
        for (int32_t t = 0; t < seg->n_row; t++)
            for (int32_t h = 0; h < a->n_head; h++)
                kda_step(a, seg->row + t, h, state + h * a->d * a->d);
    }
}

void slow_kda_norm(const bi_kda_norm_args *a) {
    for (int32_t t = 0; t < a->n_row; t++)
        for (int32_t h = 0; h < a->n_head; h++) {
            int32_t at = (t * a->n_head + h) * a->d;
            float sum = slow_sum_of_products(a->o + at, a->o + at, a->d);
            report(&a->fault, t, sum);
            float rstd = rstd_of(sum, a->d, a->eps);
            for (int32_t i = 0; i < a->d; i++) {
                float scaled = a->o[at + i] * rstd;
                float weighted = scaled * a->w[i];
                float gated = weighted * slow_sigmoid(widen(a->gate[at + i]));
                a->y[at + i] = slow_round(gated);
            }
        }
}

void slow_glu(const bi_glu_args *a) {
    for (int32_t t = 0; t < a->n_row; t++)
        for (int32_t i = 0; i < a->d; i++) {
            float g = a->g[t * a->ld + i], u = a->u[t * a->ld + i], beta = a->act.beta, linear_beta = a->act.linear_beta;
            float out;
            if (a->act.situ) {
                float bent = slow_tanh(g / beta) * slow_sigmoid(g);
                float gate = beta * bent;
                float up = linear_beta * slow_tanh(u / linear_beta);
                out = gate * up;
            } else {
                float gate = slow_silu(g);
                out = gate * u;
            }
            a->y[t * a->d + i] = slow_round(out);
        }
}

void slow_attnres(const bi_attnres_args *a) {
    for (int32_t t = 0; t < a->n_row; t++) {
        float v[BR_BANK_MAX + 1][1024], s[BR_BANK_MAX + 1]; /* the suites keep d <= 1024 */
        int n = a->n_bank + 1;
        for (int i = 0; i < n; i++) {
            widen_row(v[i], (i < a->n_bank ? a->bank[i] : a->p) + t * a->d, a->d);
            float sum = slow_sum_of_products(v[i], v[i], a->d);
            report(&a->fault, t, sum);
            float weighted = slow_sum_of_products(v[i], a->w, a->d);
            s[i] = weighted * rstd_of(sum, a->d, a->eps);
        }
        float max = s[0];
        for (int i = 1; i < n; i++)
            if (s[i] > max)
                max = s[i];
        float e[BR_BANK_MAX + 1], total = 0.0f;
        for (int i = 0; i < n; i++) {
            e[i] = slow_exp(s[i] - max);
            total = total + e[i];
        }
        for (int32_t j = 0; j < a->d; j++) {
            float out = 0.0f;
            for (int i = 0; i < n; i++)
                out = fmaf(e[i] / total, v[i][j], out);
            a->y[t * a->d + j] = slow_round(out);
        }
    }
}

void slow_attnres_weight(float *w, const float *norm, const float *proj, int32_t d) {
    for (int32_t i = 0; i < d; i++)
        w[i] = norm[i] * proj[i];
}

void slow_residual(const bi_residual_args *a) {
    for (int32_t t = 0; t < a->n_row; t++)
        for (int32_t i = 0; i < a->d; i++) {
            bi_bf16 sum = slow_round(widen(a->a[t * a->d + i]) + widen(a->b[t * a->d + i]));
            a->y[t * a->d + i] = sum;
            report(&a->fault, t, widen(sum));
        }
}
