/* The names, shapes and dtypes of every tensor, one row a class; see br_weights.h.
 *
 * Layer: weights. A row says where the tensor stands (once, in each KDA layer, ...), which configs have it, and its dims as
 * letters that br_config turns into numbers. */
#include "br_weights.h"

#include <stdio.h>
#include <string.h>

#define MODEL_PREFIX "language_model."
#define LAYER_PREFIX "model.layers."
#define MOE_BLOCK "block_sparse_moe."
#define EXPERT_PREFIX MOE_BLOCK "experts."
#define WRAPPER ".base_layer" /* what adapter libraries put into the names of the maps they wrap */

enum { FP4_GROUP = 32, A_LOG_PAD = 128 };

typedef enum place { ONCE, KDA, MLA, LAYER, DENSE, MOE, EXPERT } place;

typedef enum need {
    ALWAYS, FULL_GATE, LOW_GATE, Q_FULL, Q_LATENT, OUT_GATE, LATENT, LATENT_NORMED, INDEXER, FP4, RESIDUAL_BANK,
} need;

typedef enum dim {
    NONE, ONE, TAPS, D, VOCAB, KDA_WIDTH, KDA_HEAD, KDA_D, KDA_LOW, MLA_QUERY, D_Q, MLA_KV_A, D_KV, MLA_KV_B, MLA_VALUE,
    D_FF, D_SHARED, D_LATENT, D_EXPERT, D_EXPERT_FF, N_EXPERT, INDEX_Q, INDEX_D, INDEX_HEAD,
} dim;

enum {
    BF16 = 1u << BR_DTYPE_BF16,
    F32 = 1u << BR_DTYPE_F32,
    U8 = 1u << BR_DTYPE_U8
};

typedef struct row {
    const char *label, *tail; /* tail: after the layer's or expert's prefix */
    place place;
    need need;
    dim dim[3];
    uint32_t dtypes;
    int32_t optional;
} row;

static const row ROW[BR_CLASS_COUNT] = {
    [BR_W_KDA_Q] = {"kda_q", "self_attn.q_proj.weight", KDA, ALWAYS, {KDA_WIDTH, D}, BF16, 0},
    [BR_W_KDA_K] = {"kda_k", "self_attn.k_proj.weight", KDA, ALWAYS, {KDA_WIDTH, D}, BF16, 0},
    [BR_W_KDA_V] = {"kda_v", "self_attn.v_proj.weight", KDA, ALWAYS, {KDA_WIDTH, D}, BF16, 0},
    [BR_W_KDA_G] = {"kda_g", "self_attn.g_proj.weight", KDA, FULL_GATE, {KDA_WIDTH, D}, BF16, 0},
    [BR_W_KDA_G_A] = {"kda_g_a", "self_attn.g_a_proj.weight", KDA, LOW_GATE, {KDA_LOW, D}, BF16, 0},
    [BR_W_KDA_G_B] = {"kda_g_b", "self_attn.g_b_proj.weight", KDA, LOW_GATE, {KDA_WIDTH, KDA_LOW}, BF16, 0},
    [BR_W_KDA_F_A] = {"kda_f_a", "self_attn.f_a_proj.weight", KDA, ALWAYS, {KDA_LOW, D}, BF16, 0},
    [BR_W_KDA_F_B] = {"kda_f_b", "self_attn.f_b_proj.weight", KDA, ALWAYS, {KDA_WIDTH, KDA_LOW}, BF16, 0},
    [BR_W_KDA_B] = {"kda_b", "self_attn.b_proj.weight", KDA, ALWAYS, {KDA_HEAD, D}, BF16, 0},
    [BR_W_KDA_O] = {"kda_o", "self_attn.o_proj.weight", KDA, ALWAYS, {D, KDA_WIDTH}, BF16, 0},
    [BR_W_MLA_Q] = {"mla_q", "self_attn.q_proj.weight", MLA, Q_FULL, {MLA_QUERY, D}, BF16, 0},
    [BR_W_MLA_Q_A] = {"mla_q_a", "self_attn.q_a_proj.weight", MLA, Q_LATENT, {D_Q, D}, BF16, 0},
    [BR_W_MLA_Q_B] = {"mla_q_b", "self_attn.q_b_proj.weight", MLA, Q_LATENT, {MLA_QUERY, D_Q}, BF16, 0},
    [BR_W_MLA_KV_A] = {"mla_kv_a", "self_attn.kv_a_proj_with_mqa.weight", MLA, ALWAYS, {MLA_KV_A, D}, BF16, 0},
    [BR_W_MLA_KV_B] = {"mla_kv_b", "self_attn.kv_b_proj.weight", MLA, ALWAYS, {MLA_KV_B, D_KV}, BF16, 0},
    [BR_W_MLA_G] = {"mla_g", "self_attn.g_proj.weight", MLA, OUT_GATE, {MLA_VALUE, D}, BF16, 0},
    [BR_W_MLA_O] = {"mla_o", "self_attn.o_proj.weight", MLA, ALWAYS, {D, MLA_VALUE}, BF16, 0},
    [BR_W_MLP_GATE] = {"mlp_gate", "mlp.gate_proj.weight", DENSE, ALWAYS, {D_FF, D}, BF16, 0},
    [BR_W_MLP_UP] = {"mlp_up", "mlp.up_proj.weight", DENSE, ALWAYS, {D_FF, D}, BF16, 0},
    [BR_W_MLP_DOWN] = {"mlp_down", "mlp.down_proj.weight", DENSE, ALWAYS, {D, D_FF}, BF16, 0},
    [BR_W_SHARED_GATE] = {"shared_gate", MOE_BLOCK "shared_experts.gate_proj.weight", MOE, ALWAYS, {D_SHARED, D}, BF16, 0},
    [BR_W_SHARED_UP] = {"shared_up", MOE_BLOCK "shared_experts.up_proj.weight", MOE, ALWAYS, {D_SHARED, D}, BF16, 0},
    [BR_W_SHARED_DOWN] = {"shared_down", MOE_BLOCK "shared_experts.down_proj.weight", MOE, ALWAYS, {D, D_SHARED}, BF16, 0},
    [BR_W_LATENT_DOWN] = {"latent_down", MOE_BLOCK "routed_expert_down_proj.weight", MOE, LATENT, {D_LATENT, D}, BF16, 0},
    [BR_W_LATENT_UP] = {"latent_up", MOE_BLOCK "routed_expert_up_proj.weight", MOE, LATENT, {D, D_LATENT}, BF16, 0},
    [BR_W_EXPERT_W1] = {"expert_w1", "w1.weight", EXPERT, ALWAYS, {D_EXPERT_FF, D_EXPERT}, BF16, 0},
    [BR_W_EXPERT_W3] = {"expert_w3", "w3.weight", EXPERT, ALWAYS, {D_EXPERT_FF, D_EXPERT}, BF16, 0},
    [BR_W_EXPERT_W2] = {"expert_w2", "w2.weight", EXPERT, ALWAYS, {D_EXPERT, D_EXPERT_FF}, BF16, 0},
    [BR_W_EXPERT_W1_SCALE] = {"expert_w1_scale", "w1.weight_scale", EXPERT, FP4, {D_EXPERT_FF, D_EXPERT}, U8, 0},
    [BR_W_EXPERT_W3_SCALE] = {"expert_w3_scale", "w3.weight_scale", EXPERT, FP4, {D_EXPERT_FF, D_EXPERT}, U8, 0},
    [BR_W_EXPERT_W2_SCALE] = {"expert_w2_scale", "w2.weight_scale", EXPERT, FP4, {D_EXPERT, D_EXPERT_FF}, U8, 0},
    [BR_W_ROUTER] = {"router", MOE_BLOCK "gate.weight", MOE, ALWAYS, {N_EXPERT, D}, BF16, 0},
    [BR_W_INDEX_Q] = {"index_q", "self_attn.indexer.wq_b.weight", MLA, INDEXER, {INDEX_Q, D_Q}, BF16, 0},
    [BR_W_INDEX_K] = {"index_k", "self_attn.indexer.wk.weight", MLA, INDEXER, {INDEX_D, D}, BF16, 0},
    [BR_W_INDEX_WEIGHT] = {"index_weight", "self_attn.indexer.weights_proj.weight", MLA, INDEXER, {INDEX_HEAD, D}, BF16, 0},
    [BR_W_EMBED] = {"embed", "model.embed_tokens.weight", ONCE, ALWAYS, {VOCAB, D}, BF16, 0},
    [BR_W_HEAD] = {"head", "lm_head.weight", ONCE, ALWAYS, {VOCAB, D}, BF16, 0},
    [BR_W_KDA_CONV_Q] = {"kda_conv_q", "self_attn.q_conv1d.weight", KDA, ALWAYS, {KDA_WIDTH, ONE, TAPS}, F32 | BF16, 0},
    [BR_W_KDA_CONV_K] = {"kda_conv_k", "self_attn.k_conv1d.weight", KDA, ALWAYS, {KDA_WIDTH, ONE, TAPS}, F32 | BF16, 0},
    [BR_W_KDA_CONV_V] = {"kda_conv_v", "self_attn.v_conv1d.weight", KDA, ALWAYS, {KDA_WIDTH, ONE, TAPS}, F32 | BF16, 0},
    [BR_W_KDA_A_LOG] = {"kda_a_log", "self_attn.A_log", KDA, ALWAYS, {KDA_HEAD}, F32, 0},
    [BR_W_KDA_DT_BIAS] = {"kda_dt_bias", "self_attn.dt_bias", KDA, ALWAYS, {KDA_WIDTH}, F32, 0},
    [BR_W_KDA_O_NORM] = {"kda_o_norm", "self_attn.o_norm.weight", KDA, ALWAYS, {KDA_D}, F32 | BF16, 0},
    [BR_W_MLA_Q_NORM] = {"mla_q_norm", "self_attn.q_a_layernorm.weight", MLA, Q_LATENT, {D_Q}, BF16, 0},
    [BR_W_MLA_KV_NORM] = {"mla_kv_norm", "self_attn.kv_a_layernorm.weight", MLA, ALWAYS, {D_KV}, BF16, 0},
    [BR_W_INDEX_K_NORM] = {"index_k_norm", "self_attn.indexer.k_norm.weight", MLA, INDEXER, {INDEX_D}, F32 | BF16, 0},
    [BR_W_INDEX_K_NORM_BIAS] = {"index_k_bias", "self_attn.indexer.k_norm.bias", MLA, INDEXER, {INDEX_D}, F32 | BF16, 1},
    [BR_W_ROUTER_BIAS] = {"router_bias", MOE_BLOCK "gate.e_score_correction_bias", MOE, ALWAYS, {N_EXPERT}, F32, 0},
    [BR_W_LATENT_NORM] = {"latent_norm", MOE_BLOCK "routed_expert_norm.weight", MOE, LATENT_NORMED, {D_LATENT}, BF16, 0},
    [BR_W_INPUT_NORM] = {"input_norm", "input_layernorm.weight", LAYER, ALWAYS, {D}, BF16, 0},
    [BR_W_POST_NORM] = {"post_norm", "post_attention_layernorm.weight", LAYER, ALWAYS, {D}, BF16, 0},
    [BR_W_FINAL_NORM] = {"final_norm", "model.norm.weight", ONCE, ALWAYS, {D}, BF16, 0},
    [BR_W_ATTN_RES_NORM] = {"attn_res_norm", "self_attention_res_norm.weight", LAYER, RESIDUAL_BANK, {D}, BF16, 0},
    [BR_W_ATTN_RES_PROJ] = {"attn_res_proj", "self_attention_res_proj.weight", LAYER, RESIDUAL_BANK, {ONE, D}, BF16, 0},
    [BR_W_MLP_RES_NORM] = {"mlp_res_norm", "mlp_res_norm.weight", LAYER, RESIDUAL_BANK, {D}, BF16, 0},
    [BR_W_MLP_RES_PROJ] = {"mlp_res_proj", "mlp_res_proj.weight", LAYER, RESIDUAL_BANK, {ONE, D}, BF16, 0},
    [BR_W_OUT_RES_NORM] = {"out_res_norm", "model.output_attn_res_norm.weight", ONCE, RESIDUAL_BANK, {D}, BF16, 0},
    [BR_W_OUT_RES_PROJ] = {"out_res_proj", "model.output_attn_res_proj.weight", ONCE, RESIDUAL_BANK, {ONE, D}, BF16, 0},
};

const char *br_class_name(br_class cls) {
    BR_ASSERT(cls >= 0 && cls < BR_CLASS_COUNT);
    return ROW[cls].label;
}

static int64_t dim_of(const br_config *c, dim letter) {
    switch (letter) {
    case NONE: break;
    case ONE: return 1;
    case TAPS: return BR_CONV_TAP;
    case D: return c->d_model;
    case VOCAB: return c->n_vocab;
    case KDA_WIDTH: return br_config_kda_width(c);
    case KDA_HEAD: return c->kda_n_head;
    case KDA_D: return c->kda_d_head;
    case KDA_LOW: return c->kda_d_gate_low;
    case MLA_QUERY: return (int64_t)c->n_head * (c->d_nope + c->d_rope);
    case D_Q: return c->d_q_latent;
    case MLA_KV_A: return br_config_latent_dim(c);
    case D_KV: return c->d_kv_latent;
    case MLA_KV_B: return (int64_t)c->n_head * (c->d_nope + c->d_v);
    case MLA_VALUE: return (int64_t)c->n_head * c->d_v;
    case D_FF: return c->d_ff;
    case D_SHARED: return (int64_t)c->n_shared_expert * c->d_expert_ff;
    case D_LATENT: return c->d_latent;
    case D_EXPERT: return br_config_expert_width(c);
    case D_EXPERT_FF: return c->d_expert_ff;
    case N_EXPERT: return c->n_expert;
    case INDEX_Q: return (int64_t)c->index_n_head * c->index_d_head;
    case INDEX_D: return c->index_d_head;
    case INDEX_HEAD: return c->index_n_head;
    }
    return 0;
}

static int has(const br_config *c, need what) {
    switch (what) {
    case ALWAYS: return 1;
    case FULL_GATE: return c->kda_full_gate;
    case LOW_GATE: return !c->kda_full_gate;
    case Q_FULL: return c->d_q_latent == 0;
    case Q_LATENT: return c->d_q_latent != 0;
    case OUT_GATE: return c->mla_gate;
    case LATENT: return c->d_latent != 0;
    case LATENT_NORMED: return c->latent_norm;
    case INDEXER: return c->index_n_head != 0;
    case FP4: return c->experts_fp4;
    case RESIDUAL_BANK: return c->res_block != 0;
    }
    return 0;
}

static int in_place(const br_config *c, place where, int32_t layer) {
    if (where == ONCE)
        return layer == -1;
    if (layer < 0 || layer >= c->n_layer)
        return 0;
    switch (where) {
    case KDA: return !c->layer_is_mla[layer];
    case MLA: return c->layer_is_mla[layer];
    case DENSE: return layer < c->n_dense_layer;
    case MOE:
    case EXPERT: return layer >= c->n_dense_layer;
    case ONCE:
    case LAYER: break;
    }
    return 1;
}

static int64_t place_count(const br_config *c, place where) {
    switch (where) {
    case ONCE: return 1;
    case KDA: return c->n_kda_layer;
    case MLA: return c->n_mla_layer;
    case LAYER: return c->n_layer;
    case DENSE: return c->n_dense_layer;
    case MOE: return c->n_layer - c->n_dense_layer;
    case EXPERT: return (int64_t)(c->n_layer - c->n_dense_layer) * c->n_expert;
    }
    return 0;
}

static int64_t class_count(const br_config *c, br_class cls) {
    return has(c, ROW[cls].need) ? place_count(c, ROW[cls].place) : 0;
}

int64_t br_weight_expect_count(const br_config *config) {
    int64_t n = 0;
    for (int cls = 0; cls < BR_CLASS_COUNT; cls++)
        n += class_count(config, (br_class)cls);
    return n;
}

int64_t br_weight_slot(const br_config *config, br_class cls, int32_t layer, int32_t expert) {
    const row *r = &ROW[cls];
    int64_t slot = 0, nth = 0;
    if (!has(config, r->need) || !in_place(config, r->place, layer))
        return -1;
    if (r->place == EXPERT ? expert < 0 || expert >= config->n_expert : expert != -1)
        return -1;
    for (int before = 0; before < (int)cls; before++)
        slot += class_count(config, (br_class)before);
    for (int32_t l = 0; l < layer; l++)
        nth += in_place(config, r->place, l);
    return slot + (r->place == EXPERT ? nth * config->n_expert + expert : nth);
}

/* Dims and dtypes in the file: two MXFP4 codes a byte, one scale a group, A_log as published. */
static void fill_expect(const br_config *c, br_class cls, br_expect *out) {
    const row *r = &ROW[cls];
    out->dtypes = r->dtypes;
    out->optional = r->optional;
    while (out->n_dim < 3 && r->dim[out->n_dim] != NONE) {
        out->dim[out->n_dim] = dim_of(c, r->dim[out->n_dim]);
        out->n_dim++;
    }
    if (cls == BR_W_KDA_A_LOG && c->arch == BR_ARCH_KIMI_LINEAR) {
        out->n_dim = 4;
        memcpy(out->dim, (int64_t[4]){1, 1, c->kda_n_head, 1}, sizeof out->dim);
    } else if (cls == BR_W_KDA_A_LOG) {
        out->dim[0] = (c->kda_n_head + A_LOG_PAD - 1) / A_LOG_PAD * A_LOG_PAD;
    } else if (r->place == EXPERT && r->need == FP4) {
        out->dim[1] /= FP4_GROUP;
    } else if (r->place == EXPERT && c->experts_fp4) {
        out->dim[1] /= 2;
        out->dtypes = U8;
    }
}

int br_weight_expect(const br_config *config, int64_t i, br_expect *out) {
    *out = (br_expect){.layer = -1, .expert = -1};
    for (int cls = 0; cls < BR_CLASS_COUNT; cls++) {
        int64_t n = class_count(config, (br_class)cls);
        if (i >= n) {
            i -= n;
            continue;
        }
        place where = ROW[cls].place;
        int64_t nth = where == EXPERT ? i / config->n_expert : i;
        out->cls = (br_class)cls;
        if (where != ONCE) {
            for (out->layer = 0; nth > 0 || !in_place(config, where, out->layer); out->layer++)
                nth -= in_place(config, where, out->layer);
        }
        if (where == EXPERT)
            out->expert = (int32_t)(i % config->n_expert);
        fill_expect(config, (br_class)cls, out);
        return 1;
    }
    return 0;
}

void br_weight_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]) {
    const row *r = &ROW[cls];
    const char *prefix = config->arch == BR_ARCH_KIMI_LINEAR ? "" : MODEL_PREFIX;
    const char *packed = r->place == EXPERT && r->need == ALWAYS && config->experts_fp4 ? "_packed" : "";
    if (r->place == ONCE)
        snprintf(name, BR_NAME_BYTES, "%s%s", prefix, r->tail);
    else if (r->place == EXPERT)
        snprintf(name, BR_NAME_BYTES, "%s" LAYER_PREFIX "%d." EXPERT_PREFIX "%d.%s%s", prefix, layer, expert, r->tail,
                 packed);
    else
        snprintf(name, BR_NAME_BYTES, "%s" LAYER_PREFIX "%d.%s", prefix, layer, r->tail);
}

/* Steps over `text` when the rest begins with it. */
static int skip(const char **at, const char *text) {
    size_t n = strlen(text);
    if (strncmp(*at, text, n) != 0)
        return 0;
    *at += n;
    return 1;
}

/* "12." without leading zeros, at most 9999; -1 otherwise. */
static int32_t skip_number(const char **at) {
    int32_t value = 0, n = 0;
    const char *c = *at;
    for (; *c >= '0' && *c <= '9' && n < 4; c++, n++)
        value = value * 10 + (*c - '0');
    if (n == 0 || (n > 1 && **at == '0') || *c != '.')
        return -1;
    *at = c + 1;
    return value;
}

static int tail_matches(const br_config *c, const row *r, const char *tail) {
    if (!skip(&tail, r->tail))
        return 0;
    if (r->place == EXPERT && r->need == ALWAYS && c->experts_fp4)
        return strcmp(tail, "_packed") == 0;
    return *tail == 0;
}

/* Copies a name without WRAPPER parts; 0 when it is too long to be one of ours. */
static int unwrap(const char *name, size_t n, char out[BR_NAME_BYTES]) {
    const size_t n_wrapper = strlen(WRAPPER);
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        const size_t end = i + n_wrapper;
        if (end <= n && memcmp(name + i, WRAPPER, n_wrapper) == 0 && (end == n || name[end] == '.')) {
            i = end;
            continue;
        }
        if (used + 1 >= BR_NAME_BYTES || name[i] == 0)
            return 0;
        out[used++] = name[i++];
    }
    out[used] = 0;
    return 1;
}

int br_weight_plain_name(const char *name, size_t n, char plain[BR_NAME_BYTES]) {
    const size_t n_prefix = strlen(MODEL_PREFIX);
    const int prefixed = n >= n_prefix && memcmp(name, MODEL_PREFIX, n_prefix) == 0;
    return unwrap(name + (prefixed ? n_prefix : 0), n - (prefixed ? n_prefix : 0), plain);
}

int br_weight_parse(const br_config *config, const char *name, size_t n, br_class *cls, int32_t *layer, int32_t *expert) {
    char plain[BR_NAME_BYTES];
    const char *at = plain;
    int32_t l = -1, e = -1;
    if (!br_weight_plain_name(name, n, plain))
        return 0;
    if (skip(&at, LAYER_PREFIX)) {
        l = skip_number(&at);
        if (l < 0)
            return 0;
        if (skip(&at, EXPERT_PREFIX)) {
            e = skip_number(&at);
            if (e < 0)
                return 0;
        }
    }
    for (int i = 0; i < BR_CLASS_COUNT; i++) {
        const row *r = &ROW[i];
        if ((r->place == EXPERT) != (e >= 0) || (r->place == ONCE) != (l < 0) || !tail_matches(config, r, at))
            continue;
        if (br_weight_slot(config, (br_class)i, l, e) < 0)
            continue; /* KDA and MLA layers share tails */
        *cls = (br_class)i;
        *layer = l;
        *expert = e;
        return 1;
    }
    return 0;
}

int br_linear_shape(const br_config *config, br_class cls, int32_t layer, int32_t *n_out, int32_t *n_in) {
    const row *r = &ROW[cls];
    if (cls >= BR_CLASS_LORA_END || br_weight_slot(config, cls, layer, r->place == EXPERT ? 0 : -1) < 0)
        return 0;
    *n_out = (int32_t)dim_of(config, r->dim[0]);
    *n_in = (int32_t)dim_of(config, r->dim[1]);
    return 1;
}
