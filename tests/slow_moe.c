/* The router and the experts word for word; see slow_moe.h. */
#include "slow_moe.h"

#include "bi_bits.h"
#include "slow_block.h"
#include "slow_fn.h"

void slow_map_apply(const slow_map *map, const bi_bf16 *x, float *y) {
    bi_bf16 t[SLOW_MOE_WIDTH_MAX];
    for (int r = 0; map->a && r < map->rank; r++) {
        float product = map->s * slow_chain(0.0f, x, 1, map->a + r * map->n_in, 1, map->n_in);
        t[r] = bi_round(product);
    }
    for (int o = 0; o < map->n_out; o++) {
        y[o] = slow_chain(0.0f, x, 1, map->w + o * map->n_in, 1, map->n_in);
        if (map->a)
            y[o] = slow_chain(y[o], t, 1, map->b + o * map->rank, 1, map->rank);
    }
}

static bi_bf16 act_of(const bi_act *act, float g, float u) {
    if (!act->situ) {
        float product = slow_silu(g) * u;
        return bi_round(product);
    }
    float g_scaled = g / act->beta, u_scaled = u / act->linear_beta;
    float bent = slow_tanh(g_scaled) * slow_sigmoid(g);
    float gate = act->beta * bent, up = act->linear_beta * slow_tanh(u_scaled);
    float product = gate * up;
    return bi_round(product);
}

void slow_expert(const slow_map *w1, const slow_map *w3, const slow_map *w2, const bi_act *act, const bi_bf16 *x,
                 bi_bf16 *y) {
    float g[SLOW_MOE_WIDTH_MAX], u[SLOW_MOE_WIDTH_MAX], out[SLOW_MOE_WIDTH_MAX];
    bi_bf16 h[SLOW_MOE_WIDTH_MAX];
    slow_map_apply(w1, x, g);
    slow_map_apply(w3, x, u);
    for (int i = 0; i < w1->n_out; i++)
        h[i] = act_of(act, g[i], u[i]);
    slow_map_apply(w2, h, out);
    for (int i = 0; i < w2->n_out; i++)
        y[i] = bi_round(out[i]);
}

void slow_combine(int d, int topk, const bi_bf16 *e, const float *p, bi_bf16 *y) {
    for (int c = 0; c < d; c++) {
        float acc = 0.0f;
        for (int i = 0; i < topk; i++)
            acc = fmaf(p[i], bi_widen(e[i * d + c]), acc);
        y[c] = bi_round(acc);
    }
}

void slow_route(const float *logit, const float *bias, int n_expert, int topk, int renormalize, float scale, int *expert,
                float *p) {
    float s[BR_EXPERT_MAX], rank[BR_EXPERT_MAX];
    char taken[BR_EXPERT_MAX] = {0};
    for (int e = 0; e < n_expert; e++) {
        s[e] = slow_sigmoid(logit[e]);
        rank[e] = s[e] + bias[e];
    }
    for (int i = 0; i < topk; i++) {
        int best = -1;
        for (int e = 0; e < n_expert; e++) /* the lowest index of the largest: `>` keeps the first, and -0 > +0 is false */
            if (!taken[e] && (best < 0 || rank[e] > rank[best]))
                best = e;
        taken[best] = 1;
    }
    float sum = 0.0f;
    int n = 0;
    for (int e = 0; e < n_expert; e++)
        if (taken[e]) {
            sum = sum + s[e];
            expert[n++] = e;
        }
    float divisor = sum + 1e-20f;
    for (int i = 0; i < topk; i++) {
        float share = renormalize ? s[expert[i]] / divisor : s[expert[i]];
        p[i] = share * scale;
    }
}
