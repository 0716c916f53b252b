/* The ops that read a cache on golden cases; see golden_play.h. One sequence of a paged cache whose blocks are shuffled: the
 * inputs are the rows of all its positions, and the queries are its last positions. */
#include "golden_play.h"

#include "bi_bits.h"
#include "cache_rig.h"
#include "slow_attn.h"
#include "slow_fn.h"
#include "slow_row.h"

enum { SEQ = 1, BLOCK_SEED = 5 };

static void attn_oracle(op_rig *rig, const golden_case *c, bi_attn_args *a) {
    static batch_rig rows;
    cache_rig cache;
    int32_t n_pos = golden_dim(c, "latent", 0), n = golden_dim(c, "q", 0), d_latent = a->d_kv_latent + a->d_rope;
    cache_rig_open(&cache, rig->backend.op->latent_block_bytes(d_latent), 1, BLOCK_SEED);
    batch_rig_begin(&rows);
    batch_rig_add(&rows, SEQ, 0, n_pos);
    bi_latent_store_args store = {&rows.batch, d_latent, golden_bf16(c, "latent"), d_latent, cache.cache};
    CHECK_OK(rig->backend.op->latent_store(rig->backend.ctx, &store));
    batch_rig_begin(&rows);
    batch_rig_add(&rows, SEQ, n_pos - n, n);
    a->batch = &rows.batch;
    a->cache = cache.cache;
    CHECK_OK(rig->backend.op->attn(rig->backend.ctx, a));
    cache_rig_close(&cache);
}

static void attn_slow_row(const golden_case *c, const bi_attn_args *a, int32_t t) {
    int32_t every[4096], n_pos = golden_dim(c, "latent", 0), n = golden_dim(c, "q", 0), width = a->n_head * a->d_kv_latent;
    for (int32_t j = 0; j < n_pos; j++)
        every[j] = j;
    slow_attn row = {a->n_head,      a->d_kv_latent,           a->d_rope, a->q + (int64_t)t * width, a->q_r + t * a->q_r_ld,
                     a->q_r_head_ld, golden_bf16(c, "latent"), every,     n_pos - n + t + 1,         a->alpha};
    if (a->select) {
        row.select = a->select + (int64_t)t * a->select_ld;
        row.n_select = a->n_select[t];
    }
    if (slow_attn_row(&row, a->z + (int64_t)t * width))
        a->fault.row[t] = a->fault.code;
}

void golden_play_attn(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "q", 0), n_head = golden_dim(c, "q", 1), d = golden_dim(c, "q", 2),
            d_rope = golden_dim(c, "q_r", 2);
    int sparse = golden_has(c, "select");
    bi_attn_args a = {.n_head = n_head,
                      .d_kv_latent = d,
                      .d_rope = d_rope,
                      .q = golden_bf16(c, "q"),
                      .q_r = golden_bf16(c, "q_r"),
                      .q_r_ld = n_head * d_rope,
                      .q_r_head_ld = d_rope,
                      .alpha = golden_float(c, "alpha"),
                      .z = golden_add_out(c, GOLDEN_BF16, "z", n, n_head, d),
                      .fault = {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (sparse) {
        a.select = golden_i32(c, "select");
        a.select_ld = golden_dim(c, "select", 1);
        a.n_select = golden_i32(c, "n_select");
    }
    if (rig)
        attn_oracle(rig, c, &a);
    for (int32_t t = 0; t < n; t++) {
        if (!rig)
            attn_slow_row(c, &a, t);
        if (a.fault.row[t])
            memset(a.z + (int64_t)t * n_head * d, 0, sizeof *a.z * (size_t)(n_head * d));
    }
}

void golden_play_attn_gate(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "o", 0), d = golden_dim(c, "o", 1);
    bi_attn_gate_args a = {n, d, golden_f32(c, "o"), golden_has(c, "gate") ? golden_bf16(c, "gate") : NULL,
                           golden_add_out(c, GOLDEN_BF16, "y", n, d, 0)};
    if (rig)
        CHECK_OK(rig->backend.op->attn_gate(rig->backend.ctx, &a));
    for (int32_t i = 0; !rig && i < n * d; i++) {
        float open = a.gate ? slow_sigmoid(bi_widen(a.gate[i])) : 1.0f;
        a.y[i] = slow_round(a.o[i] * open);
    }
}

typedef struct index_out {
    uint32_t *fault_k, *fault_q;
    int32_t *select, *n_select; /* a choice that is not there is -1 */
    float *score;               /* a position that is not visible has +0 */
} index_out;

static void index_oracle(op_rig *rig, const golden_case *c, const index_out *out) {
    static batch_rig rows;
    cache_rig cache;
    int32_t n_pos = golden_dim(c, "k", 0), d = golden_dim(c, "k", 1), n = golden_dim(c, "q", 0);
    cache_rig_open(&cache, rig->backend.op->index_block_bytes(d), 1, BLOCK_SEED);
    batch_rig_begin(&rows);
    batch_rig_add(&rows, SEQ, 0, n_pos);
    bi_index_store_args store = {&rows.batch, d, golden_bf16(c, "k"), cache.cache, {out->fault_k, GOLDEN_FAULT}};
    CHECK_OK(rig->backend.op->index_store(rig->backend.ctx, &store));
    batch_rig_begin(&rows);
    batch_rig_add(&rows, SEQ, n_pos - n, n);
    bi_index_select_args a = {&rows.batch,
                              golden_dim(c, "q", 1),
                              d,
                              golden_int(c, "topk"),
                              golden_bf16(c, "q"),
                              golden_f32(c, "w"),
                              golden_float(c, "c"),
                              cache.cache,
                              out->select,
                              out->n_select,
                              out->score,
                              n_pos,
                              {out->fault_q, GOLDEN_FAULT},
                              0};
    CHECK_OK(rig->backend.op->index_select(rig->backend.ctx, &a));
    cache_rig_close(&cache);
}

static int all_finite(const bi_bf16 *x, int32_t n) {
    int finite = 1;
    for (int32_t i = 0; i < n; i++)
        finite &= bi_is_finite(bi_widen(x[i]));
    return finite;
}

/* A key that is not finite counts as zeros; a query that is not finite selects its first positions, all scores +0. */
static void index_slow(golden_case *c, const index_out *out) {
    int32_t n_pos = golden_dim(c, "k", 0), d = golden_dim(c, "k", 1), n = golden_dim(c, "q", 0),
            n_head = golden_dim(c, "q", 1);
    int32_t topk = golden_int(c, "topk");
    bi_bf16 *key = br_arena_take(c->arena, sizeof *key * (size_t)(n_pos * d), 64);
    memcpy(key, golden_bf16(c, "k"), sizeof *key * (size_t)(n_pos * d));
    for (int32_t j = 0; j < n_pos; j++) {
        out->fault_k[j] = all_finite(key + j * d, d) ? 0 : GOLDEN_FAULT;
        if (out->fault_k[j])
            memset(key + j * d, 0, sizeof *key * (size_t)d);
    }
    for (int32_t t = 0; t < n; t++) {
        int32_t visible = n_pos - n + t + 1;
        const float *w = golden_f32(c, "w") + t * n_head;
        slow_index row = {
            n_head, d, topk, visible, golden_bf16(c, "q") + (int64_t)t * n_head * d, w, key, golden_float(c, "c")};
        int finite = all_finite(row.q, n_head * d);
        for (int32_t h = 0; h < n_head; h++)
            finite &= bi_is_finite(w[h]);
        out->fault_q[t] = finite ? 0 : GOLDEN_FAULT;
        if (finite) {
            out->n_select[t] = slow_index_row(&row, out->score + (int64_t)t * n_pos, out->select + (int64_t)t * topk);
            continue;
        }
        out->n_select[t] = visible < topk ? visible : topk;
        for (int32_t i = 0; i < out->n_select[t]; i++)
            out->select[t * topk + i] = i;
        memset(out->score + (int64_t)t * n_pos, 0, sizeof *out->score * (size_t)visible);
    }
}

void golden_play_index(op_rig *rig, golden_case *c) {
    int32_t n_pos = golden_dim(c, "k", 0), n = golden_dim(c, "q", 0), topk = golden_int(c, "topk");
    index_out out = {golden_add_out(c, GOLDEN_I32, "fault_k", n_pos, 0, 0),
                     golden_add_out(c, GOLDEN_I32, "fault_q", n, 0, 0), golden_add_out(c, GOLDEN_I32, "select", n, topk, 0),
                     golden_add_out(c, GOLDEN_I32, "n_select", n, 0, 0),
                     golden_add_out(c, GOLDEN_F32, "score", n, n_pos, 0)};
    memset(out.fault_k, 0, sizeof *out.fault_k * (size_t)n_pos);
    memset(out.fault_q, 0, sizeof *out.fault_q * (size_t)n);
    memset(out.score, 0, sizeof *out.score * (size_t)(n * n_pos));
    if (rig)
        index_oracle(rig, c, &out);
    else
        index_slow(c, &out);
}
