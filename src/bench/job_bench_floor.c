/* Floors of whole steps; see job_bench_floor.h. */
#include "job_bench_floor.h"

typedef struct floor_of {
    double copy, mma, seconds;
    double h, rows, context; /* d_model, rows of the step, visible positions */
    const int32_t *lora_rows; /* (n_lora) rows that each adapter has */
    int32_t n_lora;
    const br_config *c;
} floor_of;

static void add(floor_of *f, double bytes, double operations, double rate) {
    const double memory = bytes / f->copy, compute = operations / rate;
    f->seconds += memory > compute ? memory : compute;
}

/* A product with so many bf16 parameters. */
static void add_product(floor_of *f, double parameters) {
    add(f, 2 * parameters, 2 * parameters * f->rows, f->mma);
}

/* The same of each adapter, for its own rows. */
static void add_lora(floor_of *f, double parameters) {
    for (int32_t i = 0; i < f->n_lora; i++)
        if (f->lora_rows[i] > 0)
            add(f, 2 * parameters, 2 * parameters * f->lora_rows[i], f->mma);
}

static double rank_32(double n_in, double n_out) {
    return 32 * (n_in + n_out);
}

static double active_experts(const br_config *c, int32_t n_row) {
    double none = 1;
    for (int32_t i = 0; i < n_row; i++)
        none *= 1 - (double)c->n_expert_topk / c->n_expert;
    return c->n_expert * (1 - none);
}

static void add_moe(floor_of *f) {
    const br_config *c = f->c;
    const double d = br_config_expert_width(c), ff = c->d_expert_ff, expert = 3 * d * ff, lora = 2 * rank_32(d, ff) + rank_32(ff, d);
    const double latent = c->d_latent ? 2 * f->h * d : 0, shared = 3.0 * c->n_shared_expert * f->h * ff;
    const double touched = active_experts(c, (int32_t)f->rows);
    const double bytes_a_weight = c->experts_fp4 ? 0.53125 : 2, pairs = f->rows * c->n_expert_topk;
    add_product(f, (double)c->n_expert * f->h + latent + shared);
    add(f, touched * expert * bytes_a_weight, 2 * pairs * expert, f->mma);
    for (int32_t i = 0; i < f->n_lora; i++)
        add(f, active_experts(c, f->lora_rows[i]) * lora * 2, 2.0 * f->lora_rows[i] * c->n_expert_topk * lora, f->mma);
}

static void add_kda(floor_of *f) {
    const br_config *c = f->c;
    const double p = br_config_kda_width(c), low = c->kda_d_gate_low, heads = c->kda_n_head, d = c->kda_d_head;
    const double lora = 4 * rank_32(f->h, p) + rank_32(p, f->h) + rank_32(f->h, low) + rank_32(low, p) + rank_32(f->h, heads);
    const double state = p * d * 4, history = 3 * p * 3 * 2, rows_bytes = p * 2 * 6;
    add_product(f, 4 * f->h * p + f->h * low + f->h * heads + low * p + p * f->h);
    add_lora(f, lora);
    if (f->context > 0)
        add(f, f->rows * (2 * state + 2 * history + rows_bytes), 7 * f->rows * p * d, f->mma);
    else /* a whole sequence: rows stream through once */
        add(f, f->rows * 5 * p * 2 + 2 * state, 0, f->mma);
}

static double selected(const floor_of *f, double visible) {
    return f->c->index_topk && visible > f->c->index_topk ? f->c->index_topk : visible;
}

static void add_mla(floor_of *f) {
    const br_config *c = f->c;
    const double heads = c->n_head, q = c->d_q_latent, kv = c->d_kv_latent, rope = c->d_rope, d_query = c->d_nope + rope, v = c->d_v;
    const double index = (double)c->index_n_head * c->index_d_head;
    const double maps = f->h * q + q * heads * d_query + f->h * (kv + rope) + kv * heads * (c->d_nope + v) + 2 * f->h * heads * v;
    const double lora = rank_32(f->h, q) + rank_32(q, heads * d_query) + rank_32(f->h, kv + rope) + rank_32(kv, heads * (c->d_nope + v)) +
                        2 * rank_32(f->h, heads * v);
    const double pairs = f->context > 0 ? f->rows * f->context : f->rows * f->rows / 2;
    const double kept = f->rows * selected(f, f->context > 0 ? f->context : f->rows), fp8 = 2 * f->mma;
    add_product(f, maps + q * index + f->h * c->index_d_head + f->h * c->index_n_head);
    add_lora(f, lora);
    if (index > 0)
        add(f, f->context > 0 ? pairs * (c->index_d_head + 4) : pairs * 4, pairs * index * 2, fp8);
    add(f, f->context > 0 ? kept * (kv + rope) * 2 : 0, kept * heads * (2 * kv + rope) * 2, f->mma);
}

static double step_us(floor_of *f) {
    const br_config *c = f->c;
    for (int32_t l = 0; l < c->n_layer; l++) {
        if (c->layer_is_mla[l])
            add_mla(f);
        else
            add_kda(f);
        if (l < c->n_dense_layer)
            add_product(f, 3 * f->h * c->d_ff);
        else
            add_moe(f);
    }
    add_product(f, f->h * c->n_vocab);
    return 1e6 * f->seconds;
}

double bench_floor_decode(const bench *b, const br_config *config, int32_t n, int32_t context, const int32_t *lora_rows, int32_t n_lora) {
    floor_of f = {.copy = b->copy_rate, .mma = b->mma_rate, .h = config->d_model, .rows = n, .context = context, .lora_rows = lora_rows,
                  .n_lora = n_lora, .c = config};
    return f.copy > 0 && f.mma > 0 ? step_us(&f) : 0;
}

double bench_floor_score(const bench *b, const br_config *config, int32_t n, int with_lora) {
    floor_of f = {.copy = b->copy_rate, .mma = b->mma_rate, .h = config->d_model, .rows = n, .lora_rows = &n, .n_lora = with_lora, .c = config};
    return f.copy > 0 && f.mma > 0 ? step_us(&f) : 0;
}
