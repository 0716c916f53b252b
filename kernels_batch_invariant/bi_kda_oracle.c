/* bi_kda_gate, bi_kda, bi_kda_norm, oracle.      Contract: N-KDA, N-NORM, N-SUM
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. The value columns of a state never meet, so they fill
 * the vector lanes. State of a head: panels of 32 value columns, each [key][32], so that a panel (16 KB at d = 128) stays in
 * the first-level cache while it runs through a tile of tokens. */
#include "bi_rows.h"

#include "bi_contract.h"
#include "bi_fn.h"
#include "bi_sum.h"

#include <string.h>

enum {
    KDA_D_MAX = 256,
    KDA_PANEL = 32, /* d is a multiple of it */
    KDA_TILE = 8,   /* tokens a panel runs through before the next panel is loaded */
    KDA_KEY_BLOCK = BI_KDA_LANES * BI_KDA_KEYS
};
_Static_assert(BI_KDA_KEYS % BI_KDA_CHAINS == 0, "the keys of a lane fall evenly on its chains");

static void gate_row(const void *args, int32_t t) {
    const bi_kda_gate_args *k = args;
    for (int32_t h = 0; h < k->n_head; h++) {
        int64_t at = ((int64_t)t * k->n_head + h) * k->d;
        const float *bias = k->dt_bias + (int64_t)h * k->d;
        float rate = bi_exp(k->a_log[h]);
        if (k->bounded)
            for (int32_t i = 0; i < k->d; i++)
                k->a[at + i] = bi_exp(k->lower_bound * bi_sigmoid(rate * (bi_widen(k->f[at + i]) + bias[i])));
        else
            for (int32_t i = 0; i < k->d; i++)
                k->a[at + i] = bi_exp(-(rate * bi_softplus(bi_widen(k->f[at + i]) + bias[i])));
    }
    for (int32_t h = 0; h < k->n_head; h++)
        k->beta[(int64_t)t * k->n_head + h] = bi_sigmoid(bi_widen(k->b[(int64_t)t * k->n_head + h]));
}

br_status BI_FN(bi_kda_gate)(bi_ctx *ctx, const bi_kda_gate_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "kda_gate: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row,
                       a->n_head, a->d);
    /* One element costs two or three exponentials, about 8 plain element steps. */
    bi_rows_run(ctx, gate_row, a, a->n_row, 8 * (int64_t)a->n_head * a->d);
    return BR_OK;
}

/* Operands of up to KDA_TILE tokens of one head, f32. */
typedef struct kda_tile {
    float k[KDA_TILE][KDA_D_MAX], ak[KDA_TILE][KDA_D_MAX], q[KDA_TILE][KDA_D_MAX];
} kda_tile;

static void load_token(const bi_kda_args *a, int32_t row, int32_t head, kda_tile *tile, int32_t t) {
    int64_t at = (int64_t)row * a->ld + (int64_t)head * a->d;
    const float *decay = a->a + ((int64_t)row * a->n_head + head) * a->d;
    float k_sum = bi_sum_sq_bf16(a->k + at, a->d), q_sum = bi_sum_sq_bf16(a->q + at, a->d);
    bi_fault_check(&a->fault, row, k_sum);
    bi_fault_check(&a->fault, row, q_sum);
    float k_norm = BI_SQRT(k_sum + BI_KDA_L2_EPS), q_norm = BI_SQRT(q_sum + BI_KDA_L2_EPS);
    for (int32_t i = 0; i < a->d; i++) {
        float k = bi_widen(a->k[at + i]) / k_norm;
        tile->k[t][i] = k;
        tile->ak[t][i] = decay[i] * k;
        tile->q[t][i] = bi_widen(a->q[at + i]) / q_norm * a->scale;
    }
}

typedef float kda_lanes[BI_KDA_LANES][KDA_PANEL];

/* p_l + p_{l+4}, then + 2, then + 1. */
static inline void fold(kda_lanes p, float *restrict out) {
    for (int h = BI_KDA_LANES / 2; h > 0; h /= 2)
        for (int l = 0; l < h; l++)
            for (int i = 0; i < KDA_PANEL; i++)
                p[l][i] += p[l + h][i];
    memcpy(out, p[0], sizeof p[0]);
}

/* Chains begin at -0: fma(s, x, -0) is the rounded product that the clause asks for, sign of zero included. */
static inline void begin_chains(float chain[BI_KDA_CHAINS][KDA_PANEL]) {
    for (int c = 0; c < BI_KDA_CHAINS; c++)
        for (int i = 0; i < KDA_PANEL; i++)
            chain[c][i] = -0.0f;
}

static inline void end_chains(float chain[BI_KDA_CHAINS][KDA_PANEL], float *restrict p) {
    for (int i = 0; i < KDA_PANEL; i++) {
        p[i] = chain[0][i];
        for (int c = 1; c < BI_KDA_CHAINS; c++)
            p[i] += chain[c][i];
    }
}

/* out = dot(S, x). */
static void dot(const float *restrict s, const float *restrict x, int32_t d, float *restrict out) {
    kda_lanes p;
    for (int l = 0; l < BI_KDA_LANES; l++) {
        float chain[BI_KDA_CHAINS][KDA_PANEL];
        begin_chains(chain);
        for (int32_t key = BI_KDA_KEYS * l; key < d; key += KDA_KEY_BLOCK)
            for (int n = 0; n < BI_KDA_KEYS; n++)
                for (int i = 0; i < KDA_PANEL; i++) {
                    float *c = &chain[n % BI_KDA_CHAINS][i];
                    *c = BI_FMA(s[(key + n) * KDA_PANEL + i], x[key + n], *c);
                }
        end_chains(chain, p[l]);
    }
    fold(p, out);
}

/* S = fma(k, u, RN(a*S)), out = dot(S, q), in one pass over S. */
static void update_dot(float *restrict s, const float *restrict a, const float *restrict k, const float *restrict u,
                       const float *restrict q, int32_t d, float *restrict out) {
    kda_lanes p;
    for (int l = 0; l < BI_KDA_LANES; l++) {
        float chain[BI_KDA_CHAINS][KDA_PANEL];
        begin_chains(chain);
        for (int32_t key = BI_KDA_KEYS * l; key < d; key += KDA_KEY_BLOCK)
            for (int n = 0; n < BI_KDA_KEYS; n++)
                for (int i = 0; i < KDA_PANEL; i++) {
                    float *at = &s[(key + n) * KDA_PANEL + i], *c = &chain[n % BI_KDA_CHAINS][i];
                    *at = BI_FMA(k[key + n], u[i], a[key + n] * *at);
                    *c = BI_FMA(*at, q[key + n], *c);
                }
        end_chains(chain, p[l]);
    }
    fold(p, out);
}

/* One token through one panel of 32 value columns. */
static void run_token(const bi_kda_args *a, int32_t row, int32_t head, const kda_tile *tile, int32_t t, int32_t panel,
                      float *s) {
    int64_t at = ((int64_t)row * a->n_head + head) * a->d;
    const bi_bf16 *v = a->v + (int64_t)row * a->ld + (int64_t)head * a->d + panel * KDA_PANEL;
    float beta = a->beta[(int64_t)row * a->n_head + head];
    float r[KDA_PANEL], u[KDA_PANEL];
    dot(s, tile->ak[t], a->d, r);
    for (int i = 0; i < KDA_PANEL; i++)
        u[i] = beta * (bi_widen(v[i]) - r[i]);
    update_dot(s, a->a + at, tile->k[t], u, tile->q[t], a->d, a->o + at + panel * KDA_PANEL);
}

static void kda_head(const void *args, int32_t job) {
    const bi_kda_args *a = args;
    const bi_seg *seg = &a->batch->seg[job / a->n_head];
    int32_t head = job % a->n_head;
    size_t head_len = (size_t)a->d * (size_t)a->d;
    float *state = (float *)(void *)bi_state_of(&a->state, seg->seq) + head_len * (size_t)head;
    if (seg->pos == 0)
        memset(state, 0, sizeof(float) * head_len);
    kda_tile tile;
    for (int32_t begin = 0; begin < seg->n_row; begin += KDA_TILE) {
        int32_t n = seg->n_row - begin < KDA_TILE ? seg->n_row - begin : KDA_TILE;
        for (int32_t t = 0; t < n; t++)
            load_token(a, seg->row + begin + t, head, &tile, t);
        for (int32_t panel = 0; panel < a->d / KDA_PANEL; panel++)
            for (int32_t t = 0; t < n; t++)
                run_token(a, seg->row + begin + t, head, &tile, t, panel, state + (size_t)(panel * KDA_PANEL * a->d));
    }
}

/* (n_head, d, d) binary32, keys in panels of columns. */
size_t BI_FN(bi_kda_state_bytes)(int32_t n_head, int32_t d) {
    return sizeof(float) * (size_t)n_head * (size_t)d * (size_t)d;
}

br_status BI_FN(bi_kda)(bi_ctx *ctx, const bi_kda_args *a) {
    if (a->batch->n_row < 0 || a->n_head < 1 || a->d < KDA_PANEL || a->d > KDA_D_MAX || a->d % KDA_PANEL)
        return br_fail(BR_E_SHAPE,
                       "kda: %d rows of %d heads of %d: expected n_row >= 0, n_head >= 1, d a multiple of %d up to %d",
                       a->batch->n_row, a->n_head, a->d, KDA_PANEL, KDA_D_MAX);
    if (a->ld < a->n_head * a->d)
        return br_fail(BR_E_SHAPE, "kda: row stride %d: expected at least %d", a->ld, a->n_head * a->d);
    if (((uintptr_t)a->state.base | a->state.seq_bytes) % sizeof(float))
        return br_fail(BR_E_ALIGN, "kda: state at %p, %zu bytes a sequence: expected multiples of %zu",
                       (void *)a->state.base, a->state.seq_bytes, sizeof(float));
    if (a->batch->n_row == 0 || a->batch->n_seg == 0)
        return BR_OK;
    int64_t cost = (int64_t)a->batch->n_row * a->d * a->d / a->batch->n_seg;
    bi_rows_run(ctx, kda_head, a, a->batch->n_seg * a->n_head, cost + 1);
    return BR_OK;
}

static void kda_norm_row(const void *args, int32_t t) {
    const bi_kda_norm_args *a = args;
    for (int32_t h = 0; h < a->n_head; h++) {
        int64_t at = ((int64_t)t * a->n_head + h) * a->d;
        float sum = bi_sum_sq_f32(a->o + at, a->d);
        bi_fault_check(&a->fault, t, sum);
        float rstd = bi_rsqrt(sum / (float)a->d + a->eps);
        for (int32_t i = 0; i < a->d; i++) {
            float gate = bi_sigmoid(bi_widen(a->gate[at + i]));
            a->y[at + i] = bi_round(a->o[at + i] * rstd * a->w[i] * gate);
        }
    }
}

br_status BI_FN(bi_kda_norm)(bi_ctx *ctx, const bi_kda_norm_args *a) {
    if (a->n_row < 0 || a->n_head < 1 || a->d < 1)
        return br_fail(BR_E_SHAPE, "kda_norm: %d rows of %d heads of %d: expected n_row >= 0, n_head and d >= 1", a->n_row,
                       a->n_head, a->d);
    /* One element costs a square and a sigmoid, about 8 plain element steps. */
    bi_rows_run(ctx, kda_norm_row, a, a->n_row, 8 * (int64_t)a->n_head * a->d);
    return BR_OK;
}
