/* The ops on matrices and logits on golden cases: linear maps with adapters, router, experts, score, sample; see
 * golden_play.h. */
#include "golden_play.h"

#include "bi_bits.h"
#include "slow_block.h"
#include "slow_head.h"
#include "slow_moe.h"
#include "test_support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAP_MAX = 64, VOCAB_MAX = 2048 };

static const float fp4_size[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

/* n_map matrices (n_out, n_in) as bf16 rows, from input `name`, or from `name`_code and `name`_scale in MXFP4. */
typedef struct matrices {
    int32_t n_map, n_out, n_in;
    const bi_bf16 *w;
    const uint8_t *code, *scale; /* NULL: bf16 */
} matrices;

static matrices matrices_of(golden_case *c, const char *name) {
    char code[GOLDEN_NAME_BYTES], scale[GOLDEN_NAME_BYTES];
    snprintf(code, sizeof code, "%s_code", name);
    snprintf(scale, sizeof scale, "%s_scale", name);
    if (!golden_has(c, code))
        return (matrices){
            golden_dim(c, name, 0), golden_dim(c, name, 1), golden_dim(c, name, 2), golden_bf16(c, name), NULL, NULL};
    matrices m = {golden_dim(c, code, 0), golden_dim(c, code, 1), 2 * golden_dim(c, code, 2), NULL,
                  golden_u8(c, code),     golden_u8(c, scale)};
    int64_t n = (int64_t)m.n_map * m.n_out * m.n_in;
    bi_bf16 *w = br_arena_take(c->arena, sizeof *w * (size_t)n, 64);
    for (int64_t i = 0; i < n; i++) {
        int half = m.code[i / 2] >> (i % 2 * 4) & 15;
        float size = ldexpf(fp4_size[half & 7], m.scale[i / 32] - 127); /* a row is whole groups of 32 */
        w[i] = slow_to_bf16(half & 8 ? -size : size);
    }
    m.w = w;
    return m;
}

static bi_mat pack(op_rig *rig, const matrices *m) {
    if (m->code)
        return op_rig_stack_fp4(rig, m->code, m->scale, m->n_map, m->n_out, m->n_in);
    return op_rig_stack(rig, m->w, m->n_map, m->n_out, m->n_in);
}

/* Adapters of n_map maps: a (n_slot * n_map, rank, n_in), b (n_slot * n_map, n_out, rank), s and absent (n_slot * n_map). */
typedef struct adapters {
    int32_t rank;
    const bi_bf16 *a, *b;
    const float *s;
    const int32_t *absent;
} adapters;

static adapters adapters_of(const golden_case *c, const char *suffix) {
    char name[4][GOLDEN_NAME_BYTES];
    static const char *const part[4] = {"a", "b", "s", "absent"};
    for (int i = 0; i < 4; i++)
        snprintf(name[i], sizeof name[i], "%s%s", part[i], suffix);
    return (adapters){golden_dim(c, name[0], 1), golden_bf16(c, name[0]), golden_bf16(c, name[1]), golden_f32(c, name[2]),
                      golden_i32(c, name[3])};
}

static bi_adapter pack_adapter(op_rig *rig, const adapters *l, const matrices *m, int32_t slot) {
    op_low_rank low[MAP_MAX] = {{0}};
    for (int32_t map = 0; map < m->n_map; map++) {
        int32_t i = slot * m->n_map + map;
        if (!l->absent[i])
            low[map] = (op_low_rank){l->a + (int64_t)i * l->rank * m->n_in, l->b + (int64_t)i * l->rank * m->n_out, l->rank, l->s[i]};
    }
    return op_rig_adapter(rig, low, m->n_map, m->n_out, m->n_in);
}

/* slot -1: none. */
static slow_map slow_map_of(const matrices *m, int32_t map, const adapters *l, int32_t slot) {
    slow_map out = {.n_out = m->n_out, .n_in = m->n_in, .w = m->w + (int64_t)map * m->n_out * m->n_in};
    int32_t i = slot * m->n_map + map;
    if (!l || slot < 0 || l->absent[i])
        return out;
    out.a = l->a + (int64_t)i * l->rank * m->n_in;
    out.b = l->b + (int64_t)i * l->rank * m->n_out;
    out.rank = l->rank;
    out.s = l->s[i];
    return out;
}

/* 0 when an element of T of N-LORA is not finite. */
static int t_is_finite(const slow_map *map, const bi_bf16 *x) {
    int finite = 1;
    for (int32_t r = 0; map->a && r < map->rank; r++) {
        float t = map->s * slow_chain(0.0f, x, 1, map->a + r * map->n_in, 1, map->n_in);
        finite &= isfinite(slow_widen(slow_to_bf16(t))) != 0;
    }
    return finite;
}

/* ---- linear ----------------------------------------------------------------------------------------------------------- */

static void linear_oracle(op_rig *rig, golden_case *c, const matrices *w, const adapters *l, float *y, bi_bf16 *narrow,
                          uint32_t *fault) {
    int32_t n = golden_dim(c, "x", 0), n_head = golden_dim(c, "x", 1);
    bi_adapter slot[MAP_MAX];
    bi_linear_args a = {.n_row = n,
                        .n_head = n_head,
                        .x = golden_bf16(c, "x"),
                        .x_ld = (int64_t)n_head * w->n_in,
                        .x_head_ld = w->n_in,
                        .w = pack(rig, w),
                        .y = y,
                        .y_ld = (int64_t)n_head * w->n_out,
                        .y_head_ld = w->n_out,
                        .y_f32 = 1,
                        .check_logits = golden_int(c, "check_logits"),
                        .fault = {fault, GOLDEN_FAULT}};
    if (l) {
        a.lora.n_slot = golden_dim(c, "a", 0) / w->n_map;
        for (int32_t i = 0; i < a.lora.n_slot; i++)
            slot[i] = pack_adapter(rig, l, w, i);
        a.lora.slot = slot;
        a.lora.row_slot = golden_i32(c, "row_slot");
    }
    CHECK_OK(rig->backend.op->linear(rig->backend.ctx, &a));
    a.y = narrow;
    a.y_f32 = a.check_logits = 0;
    CHECK_OK(rig->backend.op->linear(rig->backend.ctx, &a));
}

static void linear_slow(golden_case *c, const matrices *w, const adapters *l, float *y, bi_bf16 *narrow, uint32_t *fault) {
    int32_t n = golden_dim(c, "x", 0), n_head = golden_dim(c, "x", 1);
    for (int32_t i = 0; i < n * n_head; i++) {
        slow_map map = slow_map_of(w, i % n_head, l, l ? golden_i32(c, "row_slot")[i / n_head] : -1);
        const bi_bf16 *x = golden_bf16(c, "x") + (int64_t)i * w->n_in;
        slow_map_apply(&map, x, y + (int64_t)i * w->n_out);
        int finite = t_is_finite(&map, x);
        for (int32_t o = 0; o < w->n_out; o++) {
            float value = y[i * w->n_out + o];
            finite &= !golden_int(c, "check_logits") || isfinite(value);
            narrow[i * w->n_out + o] = slow_to_bf16(value);
        }
        if (!finite)
            fault[i / n_head] = GOLDEN_FAULT;
    }
}

void golden_play_linear(op_rig *rig, golden_case *c) {
    matrices w = matrices_of(c, "w");
    adapters lora, *l = NULL;
    int32_t n = golden_dim(c, "x", 0), width = golden_dim(c, "x", 1) * w.n_out;
    if (golden_has(c, "a")) {
        lora = adapters_of(c, "");
        l = &lora;
    }
    float *y = golden_add_out(c, GOLDEN_F32, "y", n, golden_dim(c, "x", 1), w.n_out);
    bi_bf16 *narrow = golden_add_out(c, GOLDEN_BF16, "y_bf16", n, golden_dim(c, "x", 1), w.n_out);
    uint32_t *fault = golden_add_faults(c, n);
    if (rig)
        linear_oracle(rig, c, &w, l, y, narrow, fault);
    else
        linear_slow(c, &w, l, y, narrow, fault);
    for (int32_t t = 0; t < n; t++) /* of a faulty row nothing else is defined */
        if (fault[t]) {
            memset(y + t * width, 0, sizeof *y * (size_t)width);
            memset(narrow + t * width, 0, sizeof *narrow * (size_t)width);
        }
}

/* ---- router and experts ----------------------------------------------------------------------------------------------- */

/* A row whose logits are not finite takes the first experts with p = +0. */
static void route_slow(bi_route_args *a, const bi_bf16 *w) {
    slow_map map = {.n_out = a->n_expert, .n_in = a->d, .w = w};
    for (int32_t t = 0; t < a->n_row; t++) {
        float *logit = a->logit + t * a->n_expert, *p = a->p + t * a->topk;
        int finite = 1;
        slow_map_apply(&map, a->x + t * a->d, logit);
        for (int32_t e = 0; e < a->n_expert; e++)
            finite &= isfinite(logit[e]) != 0;
        a->fault.row[t] = finite ? 0 : GOLDEN_FAULT;
        if (finite)
            slow_route(logit, a->bias, a->n_expert, a->topk, a->renormalize, a->scale, a->expert + t * a->topk, p);
        for (int32_t i = 0; !finite && i < a->topk; i++) {
            a->expert[t * a->topk + i] = i;
            p[i] = 0.0f;
        }
    }
}

void golden_play_route(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "x", 0), d = golden_dim(c, "x", 1), n_expert = golden_dim(c, "w", 0),
            topk = golden_int(c, "topk");
    bi_route_args a = {.n_row = n,
                       .d = d,
                       .n_expert = n_expert,
                       .topk = topk,
                       .x = golden_bf16(c, "x"),
                       .bias = golden_f32(c, "bias"),
                       .renormalize = golden_int(c, "renormalize"),
                       .scale = golden_float(c, "scale"),
                       .expert = golden_add_out(c, GOLDEN_I32, "expert", n, topk, 0),
                       .p = golden_add_out(c, GOLDEN_F32, "p", n, topk, 0),
                       .logit = golden_add_out(c, GOLDEN_F32, "logit", n, n_expert, 0),
                       .fault = {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (rig) {
        a.w = op_rig_mat(rig, golden_bf16(c, "w"), n_expert, d);
        CHECK_OK(rig->backend.op->route(rig->backend.ctx, &a));
    } else {
        route_slow(&a, golden_bf16(c, "w"));
    }
}

static void experts_slow(const golden_case *c, const bi_experts_args *a, const matrices w[3], const adapters lora[3]) {
    for (int32_t i = 0; i < a->n_row * a->topk; i++) {
        int32_t t = i / a->topk, e = a->expert[i], slot = a->row_slot ? a->row_slot[t] : -1;
        slow_map map[3];
        for (int m = 0; m < 3; m++)
            map[m] = slow_map_of(&w[m], e, golden_has(c, "a1") ? &lora[m] : NULL, slot);
        slow_expert(&map[0], &map[1], &map[2], &a->act, a->x + t * a->d, a->y + i * a->d);
        if (!t_is_finite(&map[0], a->x + t * a->d) || !t_is_finite(&map[1], a->x + t * a->d))
            a->fault.row[t] = GOLDEN_FAULT;
    }
}

void golden_play_experts(op_rig *rig, golden_case *c) {
    static const char *const name[3] = {"w1", "w3", "w2"}, *const suffix[3] = {"1", "3", "2"};
    matrices w[3];
    adapters lora[3];
    bi_mat map[3] = {{0}};
    static bi_adapter slot[3][MAP_MAX];
    int with_lora = golden_has(c, "a1");
    for (int m = 0; m < 3; m++) {
        w[m] = matrices_of(c, name[m]);
        if (with_lora)
            lora[m] = adapters_of(c, suffix[m]);
        if (rig)
            map[m] = pack(rig, &w[m]);
        for (int32_t i = 0; rig && with_lora && i < golden_dim(c, "a1", 0) / w[m].n_map; i++)
            slot[m][i] = pack_adapter(rig, &lora[m], &w[m], i);
    }
    int32_t n = golden_dim(c, "x", 0), d = golden_dim(c, "x", 1), topk = golden_dim(c, "expert", 1);
    bi_experts_args a = {.n_row = n,
                         .d = d,
                         .d_ff = w[0].n_out,
                         .n_expert = w[0].n_map,
                         .topk = topk,
                         .x = golden_bf16(c, "x"),
                         .expert = golden_i32(c, "expert"),
                         .w1 = map[0],
                         .w3 = map[1],
                         .w2 = map[2],
                         .act = {golden_int(c, "situ"), golden_float(c, "beta"), golden_float(c, "linear_beta")},
                         .y = golden_add_out(c, GOLDEN_BF16, "y", n, topk, d),
                         .fault = {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (with_lora) {
        a.lora1 = slot[0], a.lora3 = slot[1], a.lora2 = slot[2], a.n_slot = golden_dim(c, "a1", 0) / w[0].n_map;
        a.row_slot = golden_i32(c, "row_slot");
    }
    if (rig)
        CHECK_OK(rig->backend.op->experts(rig->backend.ctx, &a));
    else
        experts_slow(c, &a, w, lora);
    for (int32_t t = 0; t < n; t++)
        if (a.fault.row[t])
            memset(a.y + t * topk * d, 0, sizeof *a.y * (size_t)(topk * d));
}

void golden_play_combine(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "e", 0), topk = golden_dim(c, "e", 1), d = golden_dim(c, "e", 2);
    bi_combine_args a = {n, d, topk, golden_bf16(c, "e"), golden_f32(c, "p"), golden_add_out(c, GOLDEN_BF16, "y", n, d, 0)};
    if (rig)
        CHECK_OK(rig->backend.op->combine(rig->backend.ctx, &a));
    for (int32_t t = 0; !rig && t < n; t++)
        slow_combine(d, topk, a.e + t * topk * d, a.p + t * topk, a.y + t * d);
}

/* ---- log-probs -------------------------------------------------------------------------------------------------------- */

static void score_slow_row(const bi_score_args *a, const bi_bf16 *w, int32_t t) {
    slow_map map = {.n_out = a->n_vocab, .n_in = a->d, .w = w};
    float logit[VOCAB_MAX];
    slow_map_apply(&map, a->x + t * a->d, logit);
    a->logprob[t] = a->logprob_raw[t] = a->entropy[t] = 0.0f;
    for (int32_t v = 0; v < a->n_vocab; v++)
        if (!isfinite(logit[v]))
            a->fault.row[t] = GOLDEN_FAULT;
    if (a->fault.row[t])
        return;
    slow_softmax scaled = slow_softmax_of(logit, a->n_vocab, a->temperature[t]),
                 raw = slow_softmax_of(logit, a->n_vocab, 1.0f);
    float x = logit[a->token[t]];
    a->logprob[t] = slow_logprob(&scaled, slow_z(x, a->temperature[t]));
    a->logprob_raw[t] = slow_logprob(&raw, slow_z(x, 1.0f));
    a->entropy[t] = scaled.entropy;
}

void golden_play_score(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "x", 0), d = golden_dim(c, "x", 1), n_vocab = golden_dim(c, "w", 0);
    bi_score_args a = {.n_row = n,
                       .d = d,
                       .n_vocab = n_vocab,
                       .x = golden_bf16(c, "x"),
                       .token = golden_i32(c, "token"),
                       .temperature = golden_f32(c, "temperature"),
                       .logprob = golden_add_out(c, GOLDEN_F32, "logprob", n, 0, 0),
                       .logprob_raw = golden_add_out(c, GOLDEN_F32, "logprob_raw", n, 0, 0),
                       .entropy = golden_add_out(c, GOLDEN_F32, "entropy", n, 0, 0),
                       .fault = {golden_add_faults(c, n), GOLDEN_FAULT}};
    ck_assert_int_le(n_vocab, VOCAB_MAX);
    if (rig) {
        a.w = op_rig_mat(rig, golden_bf16(c, "w"), n_vocab, d);
        CHECK_OK(rig->backend.op->score(rig->backend.ctx, &a));
    }
    for (int32_t t = 0; !rig && t < n; t++)
        score_slow_row(&a, golden_bf16(c, "w"), t);
}

static bi_sampling setting_at(const golden_case *c, int32_t t) {
    bi_sampling s = {.temperature = golden_f32(c, "temperature")[t],
                     .min_p = golden_f32(c, "min_p")[t],
                     .top_k = golden_i32(c, "top_k")[t],
                     .top_p_q32 = golden_u64(c, "top_p_q32")[t],
                     .n_top = golden_i32(c, "n_top")[t],
                     .entropy = 1,
                     .seed = golden_u64(c, "seed")[t],
                     .uid_hash = golden_u64(c, "uid_hash")[t],
                     .sample = (uint32_t)golden_i32(c, "sample")[t],
                     .position = golden_i32(c, "position")[t]};
    return s;
}

static void sample_slow_row(const golden_case *c, bi_sample_args *a, int32_t t) {
    slow_sampled row;
    slow_sample(a->logit + t * a->logit_ld, a->n_vocab, &a->setting[t], slow_philox_u64(&a->setting[t]),
                golden_i32(c, "forced")[t], &row);
    a->token[t] = row.token;
    a->logprob[t] = row.logprob;
    a->logprob_raw[t] = row.logprob_raw;
    a->logprob_kept[t] = row.logprob_kept;
    a->entropy[t] = row.entropy;
    for (int i = 0; i < a->setting[t].n_top; i++)
        a->top[t * a->top_ld + i] = row.top[i];
}

void golden_play_sample(op_rig *rig, golden_case *c) {
    enum { ROW_MAX = 64 };
    int32_t n = golden_dim(c, "logit", 0), n_vocab = golden_dim(c, "logit", 1), top_ld = golden_int(c, "top_ld");
    bi_sampling setting[ROW_MAX];
    bi_top *top = br_arena_take(c->arena, sizeof *top * (size_t)(n * top_ld), 64);
    ck_assert_int_le(n, ROW_MAX);
    for (int32_t t = 0; t < n; t++)
        setting[t] = setting_at(c, t);
    bi_sample_args a = {.n_row = n,
                        .n_vocab = n_vocab,
                        .logit = golden_f32(c, "logit"),
                        .logit_ld = n_vocab,
                        .setting = setting,
                        .forced = golden_i32(c, "forced"),
                        .token = golden_add_out(c, GOLDEN_I32, "token", n, 0, 0),
                        .logprob = golden_add_out(c, GOLDEN_F32, "logprob", n, 0, 0),
                        .logprob_raw = golden_add_out(c, GOLDEN_F32, "logprob_raw", n, 0, 0),
                        .logprob_kept = golden_add_out(c, GOLDEN_F32, "logprob_kept", n, 0, 0),
                        .entropy = golden_add_out(c, GOLDEN_F32, "entropy", n, 0, 0),
                        .top = top,
                        .top_ld = top_ld};
    int32_t *top_token = golden_add_out(c, GOLDEN_I32, "top_token", n, top_ld, 0);
    float *top_logprob = golden_add_out(c, GOLDEN_F32, "top_logprob", n, top_ld, 0);
    if (rig)
        CHECK_OK(rig->backend.op->sample(rig->backend.ctx, &a));
    for (int32_t t = 0; t < n; t++) {
        if (!rig)
            sample_slow_row(c, &a, t);
        for (int32_t i = 0; i < setting[t].n_top; i++) { /* the others keep the poison of a new output */
            top_token[t * top_ld + i] = top[t * top_ld + i].token;
            top_logprob[t * top_ld + i] = top[t * top_ld + i].logprob;
        }
    }
}
