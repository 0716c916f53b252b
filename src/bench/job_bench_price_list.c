/* The ops of a step, in the order of the forward pass of K3.1 and the calls around it; see job_bench_price.h. The verb's test holds
 * the list to what a model calls. */
#include "job_bench_price.h"

#include <string.h>

const char *price_kind_name(price_kind kind) {
    static const char *const NAME[PRICE_KIND_COUNT] = {
        [PRICE_EMBED] = "embed", [PRICE_RMSNORM] = "rmsnorm", [PRICE_LAYERNORM] = "layernorm", [PRICE_LINEAR] = "linear",
        [PRICE_CONV] = "conv", [PRICE_KDA_GATE] = "kda_gate", [PRICE_KDA] = "kda", [PRICE_KDA_NORM] = "kda_norm",
        [PRICE_LATENT_STORE] = "latent_store", [PRICE_ATTN] = "attn", [PRICE_ATTN_GATE] = "attn_gate",
        [PRICE_INDEX_STORE] = "index_store", [PRICE_INDEX_SELECT] = "index_select", [PRICE_ROUTE] = "route",
        [PRICE_EXPERTS] = "experts", [PRICE_COMBINE] = "combine", [PRICE_GLU] = "glu", [PRICE_ATTNRES] = "attnres",
        [PRICE_RESIDUAL] = "residual", [PRICE_GATHER] = "gather", [PRICE_SAMPLE] = "sample", [PRICE_SCORE] = "score",
    };
    return NAME[kind];
}

void price_list_add(price_list *list, price_op op) {
    op.count = 1;
    for (int32_t i = 0; i < list->n; i++) { /* compared as bytes: the struct has no holes */
        price_op same = list->op[i];
        same.count = 1;
        if (memcmp(&same, &op, sizeof op) != 0)
            continue;
        list->op[i].count++;
        return;
    }
    BR_ASSERT(list->n < PRICE_OP_MAX);
    list->op[list->n++] = op;
}

/* An op that its kind and one width tell apart. */
static void add(price_list *l, price_kind kind, int32_t d) {
    price_list_add(l, (price_op){.kind = kind, .d = d});
}

static void add_norm(price_list *l, price_kind kind, int32_t d, int32_t ld) {
    price_list_add(l, (price_op){.kind = kind, .d = d, .ld = ld});
}

static void add_heads(price_list *l, price_kind kind, int32_t n_head, int32_t d) {
    price_list_add(l, (price_op){.kind = kind, .d = d, .n_head = n_head});
}

static price_op maps_of(int32_t d) {
    return (price_op){.kind = PRICE_LINEAR, .d = d, .n_head = 1};
}

static void put_map(price_op *op, int32_t n_out, int32_t f32) {
    op->f32 |= (uint32_t)f32 << op->n_map;
    op->n_out[op->n_map++] = n_out;
}

static void add_map(price_list *l, int32_t n_head, int32_t n_in, int32_t n_out, int32_t f32) {
    price_op op = maps_of(n_in);
    op.n_head = n_head;
    put_map(&op, n_out, f32);
    price_list_add(l, op);
}

static void add_kda(price_list *l, const br_config *c) {
    const int32_t p = br_config_kda_width(c), low = c->kda_d_gate_low;
    price_op first = maps_of(c->d_model), second = maps_of(low);
    for (int i = 0; i < 3; i++)
        put_map(&first, p, 0);
    put_map(&first, low, 0);
    put_map(&first, c->kda_n_head, 0);
    put_map(&first, c->kda_full_gate ? p : low, 0);
    price_list_add(l, first);
    put_map(&second, p, 0);
    if (!c->kda_full_gate)
        put_map(&second, p, 0);
    price_list_add(l, second);
    price_list_add(l, (price_op){.kind = PRICE_CONV, .d = p, .n_map = BI_CONV_GROUP_MAX});
    add_heads(l, PRICE_KDA_GATE, c->kda_n_head, c->kda_d_head);
    add_heads(l, PRICE_KDA, c->kda_n_head, c->kda_d_head);
    add_heads(l, PRICE_KDA_NORM, c->kda_n_head, c->kda_d_head);
    add_map(l, 1, p, c->d_model, 0);
}

static void add_mla(price_list *l, const br_config *c) {
    const int32_t d_query = c->d_nope + c->d_rope, d_value = c->n_head * c->d_v, d_latent = br_config_latent_dim(c);
    price_op first = maps_of(c->d_model), second = maps_of(c->d_q_latent);
    put_map(&first, d_latent, 0);
    put_map(&first, c->d_q_latent, 0);
    put_map(&first, c->index_d_head, 0);
    put_map(&first, c->index_n_head, 1);
    if (c->mla_gate)
        put_map(&first, d_value, 0);
    price_list_add(l, first);
    add_norm(l, PRICE_RMSNORM, c->d_kv_latent, d_latent);
    add(l, PRICE_LATENT_STORE, d_latent);
    add_norm(l, PRICE_RMSNORM, c->d_q_latent, c->d_q_latent);
    put_map(&second, c->n_head * d_query, 0);
    put_map(&second, c->index_n_head * c->index_d_head, 0);
    price_list_add(l, second);
    add_map(l, c->n_head, c->d_nope, c->d_kv_latent, 0);
    add_norm(l, PRICE_LAYERNORM, c->index_d_head, c->index_d_head);
    add(l, PRICE_INDEX_STORE, c->index_d_head);
    add_heads(l, PRICE_INDEX_SELECT, c->index_n_head, c->index_d_head);
    add_heads(l, PRICE_ATTN, c->n_head, c->d_kv_latent);
    add_map(l, c->n_head, c->d_kv_latent, c->d_v, 1);
    add(l, PRICE_ATTN_GATE, d_value);
    add_map(l, 1, d_value, c->d_model, 0);
}

static void add_mlp(price_list *l, const br_config *c) {
    price_op first = maps_of(c->d_model);
    put_map(&first, c->d_ff, 1);
    put_map(&first, c->d_ff, 1);
    price_list_add(l, first);
    add(l, PRICE_GLU, c->d_ff);
    add_map(l, 1, c->d_ff, c->d_model, 0);
}

static void add_moe(price_list *l, const br_config *c) {
    const int32_t d_shared = c->n_shared_expert * c->d_expert_ff;
    price_op first = maps_of(c->d_model);
    add(l, PRICE_ROUTE, c->d_model);
    put_map(&first, c->d_latent, 0);
    put_map(&first, d_shared, 1);
    put_map(&first, d_shared, 1);
    price_list_add(l, first);
    add(l, PRICE_EXPERTS, c->d_latent);
    add(l, PRICE_COMBINE, c->d_latent);
    if (c->latent_norm)
        add_norm(l, PRICE_RMSNORM, c->d_latent, c->d_latent);
    add_map(l, 1, c->d_latent, c->d_model, 0);
    add(l, PRICE_GLU, d_shared);
    add_map(l, 1, d_shared, c->d_model, 0);
    add(l, PRICE_RESIDUAL, c->d_model);
}

static void add_mix(price_list *l, const br_config *c, int32_t n_bank) {
    price_list_add(l, (price_op){.kind = PRICE_ATTNRES, .d = c->d_model, .n_bank = n_bank});
}

/* Tokens drawn from all rows, or the log-probs of given ones. */
static void add_head(price_list *l, const br_config *c, int32_t score) {
    price_op logits = maps_of(c->d_model);
    if (score) {
        add(l, PRICE_SCORE, c->d_model);
        return;
    }
    add(l, PRICE_GATHER, c->d_model * (int32_t)sizeof(bi_bf16));
    add(l, PRICE_GATHER, (int32_t)sizeof(uint32_t));
    put_map(&logits, c->n_vocab, 1);
    logits.logits = 1;
    price_list_add(l, logits);
    add(l, PRICE_SAMPLE, c->n_vocab);
}

br_status price_list_make(const br_config *c, int32_t score, price_list *out) {
    int32_t n_bank = 0;
    out->n = 0;
    if (c->arch != BR_ARCH_KIMI_K31 || !c->d_q_latent || !c->d_latent)
        return br_fail(BR_E_UNSUPPORTED, "the ops of a step are listed for K3.1 only");
    add(out, PRICE_EMBED, c->d_model);
    for (int32_t l = 0; l < c->n_layer; l++) {
        if (n_bank > 0)
            add_mix(out, c, n_bank);
        add_norm(out, PRICE_RMSNORM, c->d_model, c->d_model);
        if (c->layer_is_mla[l])
            add_mla(out, c);
        else
            add_kda(out, c);
        if (l % c->res_block == 0)
            n_bank++;
        else
            add(out, PRICE_RESIDUAL, c->d_model);
        add_mix(out, c, n_bank);
        add_norm(out, PRICE_RMSNORM, c->d_model, c->d_model);
        if (l < c->n_dense_layer)
            add_mlp(out, c);
        else
            add_moe(out, c);
        add(out, PRICE_RESIDUAL, c->d_model);
    }
    add_mix(out, c, n_bank);
    add_norm(out, PRICE_RMSNORM, c->d_model, c->d_model);
    add_head(out, c, score);
    return BR_OK;
}
