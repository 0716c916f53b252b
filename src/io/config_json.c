/* The keys of a published config.json, their spellings, bounds and refusals; see config_json.h.
 *
 * Bounds come from the limits in br_config.h, divisibility from what the ops ask: rows of the norms are multiples of 32,
 * every k of a dot product that continues another one is a multiple of 16, a group of MXFP4 has 32 values. */
#include "config_json.h"

#include "br_file.h"
#include "json_scope.h"

#include <string.h>

enum {
    D_FF_MAX = 1 << 17,
    D_HEAD_MAX = 512,
    D_KV_LATENT_MAX = 2048,
    D_INDEX_MAX = 256,
    KDA_D_HEAD_MAX = 256,
    SHARED_MAX = 64,
    FP4_GROUP = 32
};

typedef struct int_field {
    json_int key;
    size_t at; /* of the int32_t in br_config */
} int_field;

#define FIELD(field, names_, min_, max_, step_, absent_) \
    {{.names = names_, .min = min_, .max = max_, .step = step_, .absent = absent_}, offsetof(br_config, field)}

static const int_field TEXT_FIELD[] = {
    FIELD(n_vocab, "vocab_size", 1, BR_VOCAB_MAX, 1, JSON_REQUIRED),
    FIELD(d_model, "hidden_size", 32, BR_D_MODEL_MAX, 32, JSON_REQUIRED),
    FIELD(n_layer, "num_hidden_layers", 1, BR_LAYER_MAX, 1, JSON_REQUIRED),
    FIELD(n_dense_layer, "first_k_dense_replace", 0, BR_LAYER_MAX, 1, 0),
    FIELD(d_ff, "intermediate_size", 16, D_FF_MAX, 16, JSON_REQUIRED),
    FIELD(position_max, "max_position_embeddings|model_max_length", 1, BR_POSITION_MAX, 1, JSON_REQUIRED),
    FIELD(n_head, "num_attention_heads", 1, BR_HEAD_MAX, 1, JSON_REQUIRED),
    FIELD(d_q_latent, "q_lora_rank", 32, BR_D_MODEL_MAX, 32, 0),
    FIELD(d_kv_latent, "kv_lora_rank", 32, D_KV_LATENT_MAX, 32, JSON_REQUIRED),
    FIELD(d_nope, "qk_nope_head_dim", 16, D_HEAD_MAX, 16, JSON_REQUIRED),
    FIELD(d_rope, "qk_rope_head_dim", 16, D_HEAD_MAX, 16, JSON_REQUIRED),
    FIELD(d_v, "v_head_dim", 16, D_HEAD_MAX, 16, JSON_REQUIRED),
    FIELD(n_expert, "num_experts|n_routed_experts|num_local_experts", 1, BR_EXPERT_MAX, 1, JSON_REQUIRED),
    FIELD(n_expert_topk, "num_experts_per_token|num_experts_per_tok", 1, BR_EXPERT_TOPK_MAX, 1, JSON_REQUIRED),
    FIELD(n_shared_expert, "num_shared_experts|n_shared_experts", 1, SHARED_MAX, 1, JSON_REQUIRED),
    FIELD(d_expert_ff, "moe_intermediate_size", 16, D_FF_MAX, 16, JSON_REQUIRED),
    FIELD(d_latent, "routed_expert_hidden_size", 32, BR_D_MODEL_MAX, 32, 0),
    FIELD(res_block, "attn_res_block_size", 1, BR_LAYER_MAX, 1, 0),
};

static const int_field KDA_FIELD[] = {
    FIELD(kda_n_head, "num_heads", 1, BR_HEAD_MAX, 1, JSON_REQUIRED),
    FIELD(kda_d_head, "head_dim", 32, KDA_D_HEAD_MAX, 32, JSON_REQUIRED),
};

/* A bare num_heads or head_dim means the indexer only inside dsa_config: outside it belongs to others. */
static const int_field INDEX_NESTED_FIELD[] = {
    FIELD(index_n_head, "index_n_heads|num_heads|n_heads", 4, BR_HEAD_MAX, 4, JSON_REQUIRED),
    FIELD(index_d_head, "index_head_dim|head_dim", 16, D_INDEX_MAX, 16, JSON_REQUIRED),
    FIELD(index_topk, "index_topk|topk|top_k", 1, BR_POSITION_MAX, 1, JSON_REQUIRED),
};
static const int_field INDEX_FLAT_FIELD[] = {
    FIELD(index_n_head, "index_n_heads", 4, BR_HEAD_MAX, 4, JSON_REQUIRED),
    FIELD(index_d_head, "index_head_dim", 16, D_INDEX_MAX, 16, JSON_REQUIRED),
    FIELD(index_topk, "index_topk", 1, BR_POSITION_MAX, 1, JSON_REQUIRED),
};

static br_status take_fields(const json_scope *scope, const int_field *field, size_t n, br_config *c) {
    for (size_t i = 0; i < n; i++)
        BR_TRY(json_take_int(scope, &field[i].key, (int32_t *)((char *)c + field[i].at)));
    return BR_OK;
}
#define TAKE_FIELDS(scope, table, c) take_fields(scope, table, sizeof(table) / sizeof((table)[0]), c)

/* The top name decides: the text part of K3 and K3.1 calls itself KimiLinearForCausalLM, an older name. */
static br_status take_arch(const char *what, const json_t *root, br_config *c) {
    static const struct {
        const char *name;
        br_arch arch;
    } KNOWN[] = {
        {"KimiK31ForConditionalGeneration", BR_ARCH_KIMI_K31},
        {"KimiK3ForConditionalGeneration", BR_ARCH_KIMI_K3},
        {"KimiLinearForCausalLM", BR_ARCH_KIMI_LINEAR},
    };
    const json_t *list = json_object_get(root, "architectures");
    const char *name = json_array_size(list) == 1 ? json_string_value(json_array_get(list, 0)) : NULL;
    if (!name)
        return br_fail(BR_E_FORMAT, "%s: architectures: expected a list of one name", what);
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        if (strcmp(name, KNOWN[i].name) == 0) {
            c->arch = KNOWN[i].arch;
            return BR_OK;
        }
    }
    return br_fail(BR_E_UNSUPPORTED, "%s: architecture '%.100s': expected %s, %s or %s", what, name, KNOWN[0].name,
                   KNOWN[1].name, KNOWN[2].name);
}

/* Features of the field that change the function computed and that no clause of the contract describes. */
static br_status refuse_features(const json_scope *text, const br_config *c) {
    const json_t *rope;
    int32_t no_rope;
    BR_TRY(json_only_flag(text, "mla_use_nope", 1, "rotary positions are not supported"));
    BR_TRY(json_take_flag(text, "mla_use_nope", 0, &no_rope));
    BR_TRY(json_find(text, "rope_theta|rope_scaling|rope_parameters", &rope));
    if (rope && !no_rope)
        return br_fail(BR_E_UNSUPPORTED, "%s: rope keys without mla_use_nope: rotary positions are not supported",
                       text->what);
    BR_TRY(json_only_int(text, "num_key_value_heads", c->n_head, "grouped key-value heads are not supported"));
    BR_TRY(json_only_int(text, "num_expert_group|n_group", 1, "group-limited routing is not supported"));
    BR_TRY(json_only_int(text, "topk_group", 1, "group-limited routing is not supported"));
    BR_TRY(json_only_int(text, "moe_layer_freq", 1, "dense layers between MoE layers are not supported"));
    BR_TRY(json_only_text(text, "topk_method", "noaux_tc", "only bias-corrected selection (noaux_tc) is supported"));
    BR_TRY(json_only_text(text, "moe_router_activation_func|scoring_func", "sigmoid", "only a sigmoid router is supported"));
    BR_TRY(json_only_flag(text, "tie_word_embeddings", 0, "tied embeddings are not supported"));
    BR_TRY(json_only_flag(text, "attention_bias", 0, "biases in the attention are not supported"));
    BR_TRY(json_only_text(text, "dtype|torch_dtype", "bfloat16", "only bfloat16 models are supported"));
    return BR_OK;
}

static br_status take_act(const json_scope *text, br_config *c) {
    const char *name;
    BR_TRY(json_find_text(text, "hidden_act", &name));
    if (!name)
        return br_fail(BR_E_FORMAT, "%s: hidden_act is missing: expected 'situ' or 'silu'", text->what);
    c->act_situ = strcmp(name, "situ") == 0;
    if (!c->act_situ && strcmp(name, "silu") != 0)
        return br_fail(BR_E_UNSUPPORTED, "%s: hidden_act '%.64s': expected 'situ' or 'silu'", text->what, name);
    if (c->act_situ) {
        BR_TRY(json_take_real(text, "activation_situ_beta", 1e-3, 1e6, 1, &c->situ_beta));
        BR_TRY(json_take_real(text, "activation_situ_linear_beta", 1e-3, 1e6, 1, &c->situ_linear_beta));
    }
    return BR_OK;
}

/* One id, or a list of one id; -1 when absent. Several end tokens would need several compares in the sampler's loop. */
static br_status take_token(const json_scope *text, const char *name, int32_t n_vocab, int32_t *out) {
    const json_t *value;
    *out = -1;
    BR_TRY(json_find(text, name, &value));
    if (json_array_size(value) > 1)
        return br_fail(BR_E_UNSUPPORTED, "%s: %s: a list of %zu ids, only one is supported", text->what, name,
                       json_array_size(value));
    if (json_is_array(value))
        value = json_array_get(value, 0);
    if (!value)
        return BR_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) >= n_vocab)
        return br_fail(BR_E_FORMAT, "%s: %s: expected a token id 0 to %d", text->what, name, n_vocab - 1);
    *out = (int32_t)json_integer_value(value);
    return BR_OK;
}

/* member[l] = 1 for each 1-based layer of the list. */
static br_status take_layers(const json_scope *scope, const char *names, int32_t n_layer, uint8_t member[BR_LAYER_MAX],
                             int32_t *n_member) {
    const json_t *list;
    BR_TRY(json_find(scope, names, &list));
    *n_member = -1;
    memset(member, 0, BR_LAYER_MAX);
    if (!list)
        return BR_OK;
    if (!json_is_array(list))
        return br_fail(BR_E_FORMAT, "%s: %s: expected a list of layers", scope->what, names);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        json_int_t layer = json_integer_value(value);
        if (!json_is_integer(value) || layer < 1 || layer > n_layer)
            return br_fail(BR_E_FORMAT, "%s: %s: entry %zu: expected a layer 1 to %d", scope->what, names, i, n_layer);
        if (member[layer - 1])
            return br_fail(BR_E_FORMAT, "%s: %s: layer %lld comes twice", scope->what, names, (long long)layer);
        member[layer - 1] = 1;
    }
    *n_member = (int32_t)json_array_size(list);
    return BR_OK;
}

static br_status take_layer_kinds(const json_scope *kda, br_config *c) {
    uint8_t is_kda[BR_LAYER_MAX];
    BR_TRY(take_layers(kda, "full_attn_layers", c->n_layer, c->layer_is_mla, &c->n_mla_layer));
    BR_TRY(take_layers(kda, "kda_layers", c->n_layer, is_kda, &c->n_kda_layer));
    if (c->n_mla_layer < 1 || c->n_mla_layer >= c->n_layer)
        return br_fail(BR_E_FORMAT, "%s: full_attn_layers: expected 1 to %d of the %d layers", kda->what, c->n_layer - 1,
                       c->n_layer);
    for (int32_t l = 0; l < c->n_layer && c->n_kda_layer >= 0; l++) {
        if (c->layer_is_mla[l] == is_kda[l])
            return br_fail(BR_E_FORMAT, "%s: layer %d is in %s of full_attn_layers and kda_layers, expected in one",
                           kda->what, l + 1, is_kda[l] ? "both" : "none");
    }
    c->n_kda_layer = c->n_layer - c->n_mla_layer;
    return BR_OK;
}

static br_status take_kda(const json_scope *text, br_config *c) {
    const json_t *object;
    BR_TRY(json_find_object(text, "linear_attn_config", &object));
    if (!object)
        return br_fail(BR_E_FORMAT, "%s: linear_attn_config is missing", text->what);
    json_scope kda = {.what = text->what, .object = {object}};
    BR_TRY(TAKE_FIELDS(&kda, KDA_FIELD, c));
    BR_TRY(json_only_int(&kda, "short_conv_kernel_size", BR_CONV_TAP, "only convolutions of 4 taps are supported"));
    BR_TRY(json_take_flag(&kda, "use_full_rank_gate", 0, &c->kda_full_gate));
    BR_TRY(json_take_real(&kda, "gate_lower_bound", -1e3, -1e-3, 0, &c->kda_lower_bound));
    c->kda_bounded = c->kda_lower_bound != 0;
    c->kda_d_gate_low = c->kda_d_head;
    return take_layer_kinds(&kda, c);
}

/* The indexer sits in every MLA layer: a list of its layers may only repeat full_attn_layers. */
static br_status check_index_layers(const json_scope *nested, const br_config *c) {
    uint8_t member[BR_LAYER_MAX];
    int32_t n_member;
    BR_TRY(take_layers(nested, "layers|index_layers|dsa_layers|full_attn_layers", c->n_layer, member, &n_member));
    if (n_member >= 0 && memcmp(member, c->layer_is_mla, BR_LAYER_MAX) != 0)
        return br_fail(BR_E_FORMAT, "%s: dsa_config: its %d layers differ from the %d of full_attn_layers", nested->what,
                       n_member, c->n_mla_layer);
    return BR_OK;
}

static br_status take_index(const json_scope *text, br_config *c) {
    const json_t *object, *flat;
    BR_TRY(json_find_object(text, "dsa_config", &object));
    BR_TRY(json_find(text, "index_topk", &flat));
    if (c->arch != BR_ARCH_KIMI_K31 && (object || flat))
        return br_fail(BR_E_UNSUPPORTED, "%s: an indexer (%s) is supported in KimiK31ForConditionalGeneration only",
                       text->what, object ? "dsa_config" : "index_topk");
    if (c->arch != BR_ARCH_KIMI_K31)
        return BR_OK;
    if (!object && !flat)
        return br_fail(BR_E_FORMAT, "%s: dsa_config is missing, and so are flat index_n_heads, index_head_dim, index_topk",
                       text->what);
    json_scope keys = {.what = text->what, .object = {object ? object : text->object[0], object ? NULL : text->object[1]}};
    br_config other = *c;
    BR_TRY(object ? TAKE_FIELDS(&keys, INDEX_NESTED_FIELD, c) : TAKE_FIELDS(&keys, INDEX_FLAT_FIELD, c));
    if (object && flat) {
        BR_TRY(TAKE_FIELDS(text, INDEX_FLAT_FIELD, &other));
        if (memcmp(&other, c, sizeof other) != 0)
            return br_fail(BR_E_FORMAT, "%s: dsa_config and the flat index_* keys have different values", text->what);
    }
    if (object)
        BR_TRY(check_index_layers(&keys, c));
    BR_TRY(json_only_flag(&keys, "index_rope", 0, "rotary positions in the indexer are not supported"));
    BR_TRY(json_only_flag(&keys, "index_hadamard", 0, "a Hadamard transform in the indexer is not supported"));
    return json_only_text(&keys, "index_kdtype", "fp8_e4m3_pow2", "index keys are e4m3 with power-of-two scales");
}

/* Experts are MXFP4 when quantization_config says so in the one form published, else bf16. */
static br_status take_experts_format(const json_scope *text, br_config *c) {
    const json_t *object, *groups, *group;
    const char *name, *format;
    BR_TRY(json_find_object(text, "quantization_config", &object));
    if (!object)
        return BR_OK;
    json_scope q = {.what = text->what, .object = {object}};
    BR_TRY(json_find_text(&q, "format", &format));
    BR_TRY(json_only_text(&q, "quant_method", "compressed-tensors", "only compressed-tensors is supported"));
    if (!format || strcmp(format, "mxfp4-pack-quantized") != 0)
        return br_fail(BR_E_UNSUPPORTED, "%s: quantization_config: format '%.64s': expected 'mxfp4-pack-quantized'",
                       text->what, format ? format : "");
    c->experts_fp4 = 1;
    BR_TRY(json_find_object(&q, "config_groups", &groups));
    json_object_foreach((json_t *)(uintptr_t)groups, name, group) {
        const json_t *weights, *activations;
        json_scope g = {.what = text->what, .object = {json_is_object(group) ? group : NULL}};
        BR_TRY(json_find(&g, "input_activations", &activations));
        if (activations)
            return br_fail(BR_E_UNSUPPORTED, "%s: quantization_config: %.64s: quantised activations are not supported",
                           text->what, name);
        BR_TRY(json_find_object(&g, "weights", &weights));
        json_scope w = {.what = text->what, .object = {weights}};
        BR_TRY(json_only_int(&w, "num_bits", 4, "quantised weights have 4 bits"));
        BR_TRY(json_only_int(&w, "group_size", FP4_GROUP, "a group of MXFP4 has 32 values"));
        BR_TRY(json_only_text(&w, "type", "float", "quantised weights are E2M1 numbers"));
    }
    return BR_OK;
}

/* The rules between keys. */
static br_status check_whole(const char *what, const br_config *c) {
    const int kimi_k3 = c->arch != BR_ARCH_KIMI_LINEAR;
    if (c->n_dense_layer > c->n_layer)
        return br_fail(BR_E_FORMAT, "%s: first_k_dense_replace is %d: expected at most num_hidden_layers, %d", what,
                       c->n_dense_layer, c->n_layer);
    if (c->n_expert_topk > c->n_expert)
        return br_fail(BR_E_FORMAT, "%s: num_experts_per_token is %d: expected at most num_experts, %d", what,
                       c->n_expert_topk, c->n_expert);
    if (c->n_shared_expert * c->d_expert_ff > D_FF_MAX)
        return br_fail(BR_E_FORMAT, "%s: shared experts are %d wide together: expected at most %d", what,
                       c->n_shared_expert * c->d_expert_ff, D_FF_MAX);
    if (c->experts_fp4 && c->d_expert_ff % FP4_GROUP != 0)
        return br_fail(BR_E_FORMAT, "%s: moe_intermediate_size is %d: expected a multiple of 32 with MXFP4 experts", what,
                       c->d_expert_ff);
    if (kimi_k3 && (!c->res_block || !c->d_latent))
        return br_fail(BR_E_FORMAT, "%s: %s is missing: this architecture has it", what,
                       c->res_block ? "routed_expert_hidden_size" : "attn_res_block_size");
    if (!kimi_k3 && (c->res_block || c->d_latent))
        return br_fail(BR_E_UNSUPPORTED, "%s: %s is not supported in KimiLinearForCausalLM", what,
                       c->res_block ? "attn_res_block_size" : "routed_expert_hidden_size");
    if (c->res_block && (c->n_layer + c->res_block - 1) / c->res_block > BR_BANK_MAX)
        return br_fail(BR_E_FORMAT, "%s: attn_res_block_size is %d: %d layers would write more than %d bank rows", what,
                       c->res_block, c->n_layer, BR_BANK_MAX);
    if (c->arch == BR_ARCH_KIMI_K31 && !c->d_q_latent)
        return br_fail(BR_E_FORMAT, "%s: q_lora_rank is missing: the indexer reads the query latent", what);
    if (c->latent_norm && !c->d_latent)
        return br_fail(BR_E_UNSUPPORTED, "%s: latent_moe_use_norm without routed_expert_hidden_size is not supported", what);
    return BR_OK;
}

static br_status take_text(const json_scope *text, br_config *c) {
    BR_TRY(TAKE_FIELDS(text, TEXT_FIELD, c));
    BR_TRY(refuse_features(text, c));
    BR_TRY(json_take_real(text, "rms_norm_eps", 1e-12, 1.0, 1, &c->norm_eps));
    c->lora_norm_eps = c->norm_eps;
    BR_TRY(json_take_real(text, "mla_lora_norm_eps", 1e-12, 1.0, 0, &c->lora_norm_eps));
    BR_TRY(json_take_flag(text, "mla_use_output_gate", 0, &c->mla_gate));
    BR_TRY(json_take_flag(text, "latent_moe_use_norm", 0, &c->latent_norm));
    BR_TRY(json_take_flag(text, "moe_renormalize|norm_topk_prob", 1, &c->renormalize));
    c->route_scale = 1;
    BR_TRY(json_take_real(text, "routed_scaling_factor", 1e-6, 1e6, 0, &c->route_scale));
    BR_TRY(take_act(text, c));
    BR_TRY(take_token(text, "eos_token_id", c->n_vocab, &c->eos_id));
    int32_t unused; /* ids that no bit depends on are read for their range only */
    BR_TRY(take_token(text, "bos_token_id", c->n_vocab, &unused));
    BR_TRY(take_token(text, "pad_token_id", c->n_vocab, &unused));
    BR_TRY(take_kda(text, c));
    BR_TRY(take_index(text, c));
    BR_TRY(take_experts_format(text, c));
    return check_whole(text->what, c);
}

br_status br_config_parse(const char *what, const char *text, size_t n, br_config *out) {
    br_status status;
    json_t *root = NULL;
    const json_t *nested;
    memset(out, 0, sizeof *out);
    if (n > BR_CONFIG_BYTES_MAX)
        return br_fail(BR_E_FORMAT, "%s: %zu bytes: expected at most %d", what, n, BR_CONFIG_BYTES_MAX);
    BR_TRY(json_read_object(what, text, n, &root));
    json_scope top = {.what = what, .object = {root}};
    BR_TRY_GOTO(json_find_object(&top, "text_config", &nested), exit);
    BR_TRY_GOTO(take_arch(what, root, out), exit);
    json_scope scope = {.what = what, .object = {nested ? nested : root, nested ? root : NULL}};
    BR_TRY_GOTO(take_text(&scope, out), exit);
exit:
    json_decref(root);
    if (status != BR_OK)
        memset(out, 0, sizeof *out);
    return status;
}

br_status br_config_read(const char *model_dir, br_config *out) {
    char path[BR_PATH_BYTES];
    br_map map;
    memset(out, 0, sizeof *out);
    BR_TRY(br_file_join(path, model_dir, "config.json"));
    BR_TRY(br_file_map(path, &map));
    br_status status = br_config_parse(path, (const char *)map.bytes, map.n, out);
    br_file_unmap(&map);
    return status;
}
