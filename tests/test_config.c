/* config.json: published files load with the numbers they state, every spelling and bound, every refusal by name. */
#include "config_json.h"
#include "test_support.h"

#include "br_file.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- helpers: a published file, edited ------------------------------------------------------------------------------- */

static json_t *load_golden(const char *name) {
    char path[BR_PATH_BYTES];
    json_error_t error;
    snprintf(path, sizeof path, "%s/golden/configs/%s", test_source_dir(), name);
    json_t *root = json_load_file(path, 0, &error);
    ck_assert_msg(root != NULL, "%s: %s", path, error.text);
    return root;
}

/* Sets "a.b" to the JSON text `value`; NULL takes the key away. */
static void edit(json_t *root, const char *path, const char *value) {
    const char *dot = strchr(path, '.');
    if (dot) {
        char head[64];
        snprintf(head, sizeof head, "%.*s", (int)(dot - path), path);
        json_t *inner = json_object_get(root, head);
        ck_assert_msg(json_is_object(inner), "no object %s", head);
        edit(inner, dot + 1, value);
    } else if (value) {
        json_t *parsed = json_loads(value, JSON_DECODE_ANY, NULL);
        ck_assert_msg(parsed != NULL, "not JSON: %s", value);
        json_object_set_new(root, path, parsed);
    } else {
        json_object_del(root, path);
    }
}

static br_status parse(const json_t *root, br_config *out) {
    char *text = json_dumps(root, 0);
    br_status status = br_config_parse("config.json", text, strlen(text), out);
    free(text);
    return status;
}

typedef struct edit_pair {
    const char *path, *value;
} edit_pair;

/* A file with up to two edits, and what the parser says. */
static br_status parse_edited(const char *name, const edit_pair *first, const edit_pair *second, br_config *out) {
    json_t *root = load_golden(name);
    if (first)
        edit(root, first->path, first->value);
    if (second)
        edit(root, second->path, second->value);
    br_status status = parse(root, out);
    json_decref(root);
    return status;
}

static int is_zero(const br_config *c) {
    static const br_config zero;
    return memcmp(c, &zero, sizeof zero) == 0;
}

/* ---- published files ------------------------------------------------------------------------------------------------- */

static void check_kimi_k3_skeleton(const br_config *c) {
    ck_assert_int_eq(c->n_vocab, 163840);
    ck_assert_int_eq(c->d_model, 7168);
    ck_assert_int_eq(c->n_layer, 93);
    ck_assert_int_eq(c->n_mla_layer, 24);
    ck_assert_int_eq(c->n_kda_layer, 69);
    for (int l = 0; l < 93; l++) /* 0-based 3, 7, ..., 91 and the last one */
        ck_assert_int_eq(c->layer_is_mla[l], l % 4 == 3 || l == 92);
    ck_assert_int_eq(c->n_dense_layer, 1);
    ck_assert_int_eq(c->d_ff, 33792);
    ck_assert_int_eq(c->position_max, 1048576);
    ck_assert_int_eq(c->eos_id, 163586);
    ck_assert(c->norm_eps == 1e-5f && c->lora_norm_eps == 1e-5f);
    ck_assert_int_eq(c->kda_n_head, 96);
    ck_assert_int_eq(c->kda_d_head, 128);
    ck_assert(c->kda_bounded && c->kda_lower_bound == -5.0f && c->kda_full_gate);
    ck_assert_int_eq(c->kda_d_gate_low, 128);
    ck_assert(c->n_head == 96 && c->d_nope == 128 && c->d_rope == 64 && c->d_v == 128);
    ck_assert(c->d_q_latent == 1536 && c->d_kv_latent == 512 && c->mla_gate);
    ck_assert(c->n_expert == 896 && c->n_expert_topk == 16 && c->n_shared_expert == 2);
    ck_assert(c->d_expert_ff == 3072 && c->d_latent == 3584 && c->latent_norm);
    ck_assert(c->renormalize && c->route_scale == 1.0f && c->experts_fp4);
    ck_assert(c->act_situ && c->situ_beta == 4.0f && c->situ_linear_beta == 25.0f);
    ck_assert_int_eq(c->res_block, 12);
}

/* K3's text part calls itself KimiLinearForCausalLM: read there, it would load as the wrong architecture. */
START_TEST(kimi_k3_loads) {
    br_config c;
    CHECK_OK(parse_edited("kimi-k3.json", NULL, NULL, &c));
    ck_assert_int_eq(c.arch, BR_ARCH_KIMI_K3);
    check_kimi_k3_skeleton(&c);
    ck_assert(c.index_n_head == 0 && c.index_d_head == 0 && c.index_topk == 0);
}
END_TEST

START_TEST(kimi_k31_loads) {
    br_config c;
    CHECK_OK(parse_edited("kimi-k31.json", NULL, NULL, &c));
    ck_assert_int_eq(c.arch, BR_ARCH_KIMI_K31);
    check_kimi_k3_skeleton(&c);
    ck_assert(c.index_n_head == 32 && c.index_d_head == 128 && c.index_topk == 2048);
}
END_TEST

START_TEST(kimi_linear_loads) {
    static const int MLA[] = {3, 7, 11, 15, 19, 23, 26};
    br_config c;
    CHECK_OK(parse_edited("kimi-linear-48b-a3b.json", NULL, NULL, &c));
    ck_assert_int_eq(c.arch, BR_ARCH_KIMI_LINEAR);
    ck_assert(c.n_vocab == 163840 && c.d_model == 2304 && c.n_layer == 27 && c.n_mla_layer == 7 && c.n_kda_layer == 20);
    for (size_t i = 0; i < 7; i++)
        ck_assert(c.layer_is_mla[MLA[i]]);
    ck_assert(c.d_q_latent == 0 && c.d_kv_latent == 512 && !c.mla_gate && c.n_head == 32);
    ck_assert(!c.kda_bounded && !c.kda_full_gate && c.kda_n_head == 32 && c.kda_d_gate_low == 128);
    ck_assert(c.n_expert == 256 && c.n_expert_topk == 8 && c.n_shared_expert == 1 && c.d_expert_ff == 1024);
    ck_assert(c.d_latent == 0 && !c.latent_norm && c.res_block == 0 && !c.experts_fp4 && !c.act_situ);
    ck_assert(c.route_scale == 2.446f && c.renormalize && c.position_max == 1048576 && c.d_ff == 9216);
    ck_assert_int_eq(c.eos_id, 163586);
}
END_TEST

/* ---- presets in the flat form ---------------------------------------------------------------------------------------- */

static const struct {
    const char *file;
    int32_t n_layer, n_mla_layer, d_model, index_topk, res_block, n_dense_layer, eos_id;
} PRESET[] = {
    {"nano-flat.json", 9, 3, 128, 16, 3, 1, 1},
    {"small-flat.json", 13, 4, 768, 256, 4, 1, 1},
    {"mini-flat.json", 5, 2, 256, 640, 2, 1, 1},
    {"layer-full-flat.json", 2, 1, 7168, 2048, 12, 0, -1},
    {"slice-full-flat.json", 4, 1, 7168, 2048, 12, 0, -1},
};

START_TEST(flat_presets_load) {
    for (size_t i = 0; i < sizeof PRESET / sizeof PRESET[0]; i++) {
        br_config c;
        CHECK_OK(parse_edited(PRESET[i].file, NULL, NULL, &c));
        ck_assert_int_eq(c.arch, BR_ARCH_KIMI_K31);
        ck_assert_int_eq(c.n_layer, PRESET[i].n_layer);
        ck_assert_int_eq(c.n_mla_layer, PRESET[i].n_mla_layer);
        ck_assert_int_eq(c.d_model, PRESET[i].d_model);
        ck_assert_int_eq(c.index_topk, PRESET[i].index_topk);
        ck_assert_int_eq(c.res_block, PRESET[i].res_block);
        ck_assert_int_eq(c.n_dense_layer, PRESET[i].n_dense_layer);
        ck_assert_int_eq(c.eos_id, PRESET[i].eos_id);
        ck_assert(c.experts_fp4 && c.act_situ && c.kda_bounded);
    }
}
END_TEST

/* ---- spellings ------------------------------------------------------------------------------------------------------- */

START_TEST(aliases_load) {
    static const struct {
        const char *from, *to;
    } ALIAS[] = {
        {"num_experts", "n_routed_experts"},
        {"num_experts", "num_local_experts"},
        {"num_experts_per_token", "num_experts_per_tok"},
        {"moe_renormalize", "norm_topk_prob"},
        {"num_expert_group", "n_group"},
        {"num_shared_experts", "n_shared_experts"},
        {"max_position_embeddings", "model_max_length"},
        {"dtype", "torch_dtype"},
        {"moe_router_activation_func", "scoring_func"},
    };
    br_config plain, c;
    CHECK_OK(parse_edited("kimi-k31.json", NULL, NULL, &plain));
    for (size_t i = 0; i < sizeof ALIAS / sizeof ALIAS[0]; i++) {
        json_t *root = load_golden("kimi-k31.json"), *text = json_object_get(root, "text_config");
        json_object_set(text, ALIAS[i].to, json_object_get(text, ALIAS[i].from));
        CHECK_OK(parse(root, &c)); /* both spellings with one value */
        ck_assert_mem_eq(&c, &plain, sizeof c);
        json_object_del(text, ALIAS[i].from);
        CHECK_OK(parse(root, &c));
        ck_assert_mem_eq(&c, &plain, sizeof c);
        json_decref(root);
    }
    edit_pair two = {"text_config.n_routed_experts", "895"};
    CHECK_FAILS(parse_edited("kimi-k31.json", &two, NULL, &c), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "n_routed_experts"));
}
END_TEST

START_TEST(text_config_may_be_flat) {
    br_config nested, flat;
    CHECK_OK(parse_edited("kimi-k31.json", NULL, NULL, &nested));
    json_t *root = load_golden("kimi-k31.json"), *text = json_object_get(root, "text_config");
    json_object_del(text, "architectures"); /* the top one stays */
    json_object_del(text, "model_type");
    json_object_update(root, text);
    json_object_del(root, "text_config");
    CHECK_OK(parse(root, &flat));
    ck_assert_mem_eq(&flat, &nested, sizeof flat);
    json_decref(root);
}
END_TEST

START_TEST(indexer_spellings_load) {
    static const char *const DSA[] = {
        "{\"num_heads\":32,\"head_dim\":128,\"topk\":2048}",
        "{\"n_heads\":32,\"index_head_dim\":128,\"top_k\":2048,"
        "\"index_layers\":[4,8,12,16,20,24,28,32,36,40,44,48,52,56,60,64,68,72,76,80,84,88,92,93]}",
        "{\"index_n_heads\":32,\"head_dim\":128,\"index_topk\":2048,\"index_rope\":false}",
    };
    br_config plain, c;
    CHECK_OK(parse_edited("kimi-k31.json", NULL, NULL, &plain));
    for (size_t i = 0; i < sizeof DSA / sizeof DSA[0]; i++) {
        edit_pair one = {"text_config.dsa_config", DSA[i]};
        CHECK_OK(parse_edited("kimi-k31.json", &one, NULL, &c));
        ck_assert_mem_eq(&c, &plain, sizeof c);
    }
    json_t *root = load_golden("kimi-k31.json");
    edit(root, "text_config.index_n_heads", "32");
    edit(root, "text_config.index_head_dim", "128");
    edit(root, "text_config.index_topk", "2048");
    CHECK_OK(parse(root, &c)); /* nested and flat, equal */
    edit(root, "text_config.dsa_config", NULL);
    CHECK_OK(parse(root, &c)); /* flat alone */
    ck_assert_mem_eq(&c, &plain, sizeof c);
    edit(root, "text_config.dsa_config", DSA[0]);
    edit(root, "text_config.index_topk", "1024");
    CHECK_FAILS(parse(root, &c), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "different values"));
    json_decref(root);
}
END_TEST

/* A value that is the default may be absent; what is optional changes one field only. */
START_TEST(optional_keys) {
    br_config c;
    edit_pair eps = {"text_config.mla_lora_norm_eps", "1e-6"};
    CHECK_OK(parse_edited("kimi-k3.json", &eps, NULL, &c));
    ck_assert(c.lora_norm_eps == 1e-6f && c.norm_eps == 1e-5f);
    edit_pair eos = {"eos_token_id", "[7]"};
    CHECK_OK(parse_edited("kimi-k3.json", &eos, NULL, &c));
    ck_assert_int_eq(c.eos_id, 7);
    edit_pair no_eos = {"eos_token_id", "null"}, no_kda = {"text_config.linear_attn_config.kda_layers", NULL};
    CHECK_OK(parse_edited("kimi-k3.json", &no_eos, &no_kda, &c));
    ck_assert(c.eos_id == -1 && c.n_kda_layer == 69);
    edit_pair plain = {"text_config.quantization_config", NULL}, mtp = {"text_config.num_nextn_predict_layers", "1"};
    CHECK_OK(parse_edited("kimi-k3.json", &plain, &mtp, &c));
    ck_assert_int_eq(c.experts_fp4, 0);
    edit_pair no_norm = {"text_config.latent_moe_use_norm", "false"}, no_renorm = {"text_config.moe_renormalize", "false"};
    CHECK_OK(parse_edited("kimi-k3.json", &no_norm, &no_renorm, &c));
    ck_assert(!c.latent_norm && !c.renormalize);
    edit_pair no_scale = {"text_config.routed_scaling_factor", NULL},
              no_bound = {"text_config.linear_attn_config.gate_lower_bound", "null"};
    CHECK_OK(parse_edited("kimi-k3.json", &no_scale, &no_bound, &c));
    ck_assert(c.route_scale == 1.0f && !c.kda_bounded);
}
END_TEST

/* ---- bounds ---------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *path;
    long min, max, step;
} BOUND[] = {
    {"text_config.vocab_size", 163840, BR_VOCAB_MAX, 1}, /* pad 163839 needs it so large */
    {"text_config.hidden_size", 32, BR_D_MODEL_MAX, 32},
    {"text_config.num_hidden_layers", 93, 93, 1},
    {"text_config.first_k_dense_replace", 0, 93, 1},
    {"text_config.intermediate_size", 16, 1 << 17, 16},
    {"text_config.max_position_embeddings", 1, BR_POSITION_MAX, 1},
    {"text_config.q_lora_rank", 32, BR_D_MODEL_MAX, 32},
    {"text_config.kv_lora_rank", 32, 2048, 32},
    {"text_config.qk_nope_head_dim", 16, 512, 16},
    {"text_config.qk_rope_head_dim", 16, 512, 16},
    {"text_config.v_head_dim", 16, 512, 16},
    {"text_config.num_experts", 16, BR_EXPERT_MAX, 1},
    {"text_config.num_experts_per_token", 1, BR_EXPERT_TOPK_MAX, 1},
    {"text_config.num_shared_experts", 1, 42, 1}, /* 42 * 3072 <= 2^17 */
    {"text_config.moe_intermediate_size", 32, 1 << 16, 32},
    {"text_config.routed_expert_hidden_size", 32, BR_D_MODEL_MAX, 32},
    {"text_config.attn_res_block_size", 3, BR_LAYER_MAX, 1}, /* 93 layers, 32 bank rows */
    {"text_config.linear_attn_config.num_heads", 1, BR_HEAD_MAX, 1},
    {"text_config.linear_attn_config.head_dim", 32, 256, 32},
    {"text_config.dsa_config.index_n_heads", 4, BR_HEAD_MAX, 4},
    {"text_config.dsa_config.index_head_dim", 16, 256, 16},
    {"text_config.dsa_config.index_topk", 1, BR_POSITION_MAX, 1},
};

static void check_bound(const char *path, long value, int good) {
    char text[32];
    br_config c;
    snprintf(text, sizeof text, "%ld", value);
    edit_pair one = {path, text};
    br_status status = parse_edited("kimi-k31.json", &one, NULL, &c);
    ck_assert_msg((status == BR_OK) == good, "%s = %ld: %s (%s)", path, value, br_status_name(status), br_last_error());
    if (!good) {
        ck_assert_int_eq(status, BR_E_FORMAT);
        ck_assert(is_zero(&c));
    }
}

START_TEST(integers_are_bounded) {
    for (size_t i = 0; i < sizeof BOUND / sizeof BOUND[0]; i++) {
        check_bound(BOUND[i].path, BOUND[i].min, 1);
        check_bound(BOUND[i].path, BOUND[i].max, 1);
        check_bound(BOUND[i].path, BOUND[i].min - 1, 0);
        check_bound(BOUND[i].path, BOUND[i].max + 1, 0);
        check_bound(BOUND[i].path, -BOUND[i].max, 0);
        if (BOUND[i].step > 1)
            check_bound(BOUND[i].path, BOUND[i].min + BOUND[i].step / 2, 0);
        edit_pair real = {BOUND[i].path, "64.0"}, text = {BOUND[i].path, "\"64\""},
                  huge = {BOUND[i].path, "9223372036854775807"};
        br_config c;
        CHECK_FAILS(parse_edited("kimi-k31.json", &real, NULL, &c), BR_E_FORMAT);
        CHECK_FAILS(parse_edited("kimi-k31.json", &text, NULL, &c), BR_E_FORMAT);
        CHECK_FAILS(parse_edited("kimi-k31.json", &huge, NULL, &c), BR_E_FORMAT);
        ck_assert_msg(strstr(br_last_error(), strrchr(BOUND[i].path, '.') + 1) != NULL, "%s: %s", BOUND[i].path,
                      br_last_error());
    }
    /* heads are bounded apart, because num_key_value_heads must follow */
    edit_pair heads = {"text_config.num_attention_heads", "257"}, kv = {"text_config.num_key_value_heads", "257"};
    br_config c;
    CHECK_FAILS(parse_edited("kimi-k31.json", &heads, &kv, &c), BR_E_FORMAT);
    heads.value = kv.value = "256";
    CHECK_OK(parse_edited("kimi-k31.json", &heads, &kv, &c));
}
END_TEST

/* ---- refusals -------------------------------------------------------------------------------------------------------- */

#define GROUP "text_config.quantization_config.config_groups.group_0"

static const struct {
    const char *file, *path, *value;
    br_status status;
    const char *says;
} REFUSED[] = {
    {"kimi-k3.json", "architectures", "[\"LlamaForCausalLM\"]", BR_E_UNSUPPORTED, "LlamaForCausalLM"},
    {"kimi-k3.json", "architectures", "[]", BR_E_FORMAT, "architectures"},
    {"kimi-k3.json", "architectures", NULL, BR_E_FORMAT, "architectures"},
    {"kimi-k3.json", "architectures", "[3]", BR_E_FORMAT, "architectures"},
    {"kimi-k3.json", "text_config", "[]", BR_E_FORMAT, "text_config"},
    {"kimi-k3.json", "text_config.mla_use_nope", "false", BR_E_UNSUPPORTED, "rotary"},
    {"kimi-k3.json", "text_config.num_key_value_heads", "8", BR_E_UNSUPPORTED, "grouped"},
    {"kimi-k3.json", "text_config.num_expert_group", "8", BR_E_UNSUPPORTED, "group-limited"},
    {"kimi-k3.json", "text_config.topk_group", "4", BR_E_UNSUPPORTED, "group-limited"},
    {"kimi-k3.json", "text_config.moe_layer_freq", "2", BR_E_UNSUPPORTED, "moe_layer_freq"},
    {"kimi-k3.json", "text_config.topk_method", "\"greedy\"", BR_E_UNSUPPORTED, "greedy"},
    {"kimi-k3.json", "text_config.moe_router_activation_func", "\"softmax\"", BR_E_UNSUPPORTED, "softmax"},
    {"kimi-k3.json", "text_config.tie_word_embeddings", "true", BR_E_UNSUPPORTED, "tied"},
    {"kimi-k3.json", "text_config.attention_bias", "true", BR_E_UNSUPPORTED, "biases"},
    {"kimi-k3.json", "text_config.dtype", "\"float16\"", BR_E_UNSUPPORTED, "float16"},
    {"kimi-k3.json", "text_config.hidden_act", "\"gelu\"", BR_E_UNSUPPORTED, "gelu"},
    {"kimi-k3.json", "text_config.hidden_act", NULL, BR_E_FORMAT, "hidden_act"},
    {"kimi-k3.json", "text_config.hidden_act", "5", BR_E_FORMAT, "hidden_act"},
    {"kimi-k3.json", "text_config.activation_situ_beta", NULL, BR_E_FORMAT, "activation_situ_beta"},
    {"kimi-k3.json", "text_config.activation_situ_linear_beta", "0", BR_E_FORMAT, "activation_situ_linear_beta"},
    {"kimi-k3.json", "text_config.rms_norm_eps", NULL, BR_E_FORMAT, "rms_norm_eps"},
    {"kimi-k3.json", "text_config.rms_norm_eps", "-1e-5", BR_E_FORMAT, "rms_norm_eps"},
    {"kimi-k3.json", "text_config.rms_norm_eps", "\"1e-5\"", BR_E_FORMAT, "rms_norm_eps"},
    {"kimi-k3.json", "text_config.routed_scaling_factor", "0.0", BR_E_FORMAT, "routed_scaling_factor"},
    {"kimi-k3.json", "text_config.mla_use_output_gate", "1", BR_E_FORMAT, "mla_use_output_gate"},
    {"kimi-k3.json", "text_config.dsa_config", "{\"topk\":4}", BR_E_UNSUPPORTED, "dsa_config"},
    {"kimi-k3.json", "text_config.index_topk", "2048", BR_E_UNSUPPORTED, "index_topk"},
    {"kimi-k3.json", "text_config.num_experts_per_token", "65", BR_E_FORMAT, "num_experts_per_tok"},
    {"kimi-k3.json", "text_config.num_experts", "15", BR_E_FORMAT, "at most num_experts"},
    {"kimi-k3.json", "text_config.attn_res_block_size", NULL, BR_E_FORMAT, "attn_res_block_size"},
    {"kimi-k3.json", "text_config.attn_res_block_size", "2", BR_E_FORMAT, "bank rows"},
    {"kimi-k3.json", "text_config.routed_expert_hidden_size", NULL, BR_E_FORMAT, "routed_expert_hidden_size"},
    {"kimi-k3.json", "text_config.num_shared_experts", "43", BR_E_FORMAT, "shared experts"},
    {"kimi-k3.json", "text_config.moe_intermediate_size", "48", BR_E_FORMAT, "MXFP4"},
    {"kimi-k3.json", "text_config.first_k_dense_replace", "94", BR_E_FORMAT, "first_k_dense_replace"},
    {"kimi-k3.json", "eos_token_id", "163840", BR_E_FORMAT, "eos_token_id"},
    {"kimi-k3.json", "eos_token_id", "-1", BR_E_FORMAT, "eos_token_id"},
    {"kimi-k3.json", "eos_token_id", "[1, 2]", BR_E_UNSUPPORTED, "eos_token_id"},
    {"kimi-k3.json", "text_config.linear_attn_config", NULL, BR_E_FORMAT, "linear_attn_config"},
    {"kimi-k3.json", "text_config.linear_attn_config", "7", BR_E_FORMAT, "linear_attn_config"},
    {"kimi-k3.json", "text_config.linear_attn_config.short_conv_kernel_size", "3", BR_E_UNSUPPORTED, "4 taps"},
    {"kimi-k3.json", "text_config.linear_attn_config.gate_lower_bound", "0", BR_E_FORMAT, "gate_lower_bound"},
    {"kimi-k3.json", "text_config.linear_attn_config.gate_lower_bound", "5.0", BR_E_FORMAT, "gate_lower_bound"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", NULL, BR_E_FORMAT, "full_attn_layers"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[]", BR_E_FORMAT, "full_attn_layers"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[0, 4]", BR_E_FORMAT, "entry 0"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[4, 94]", BR_E_FORMAT, "entry 1"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[4, 4]", BR_E_FORMAT, "twice"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[4.5]", BR_E_FORMAT, "entry 0"},
    {"kimi-k3.json", "text_config.linear_attn_config.full_attn_layers", "[4]", BR_E_FORMAT, "none"},
    {"kimi-k3.json", "text_config.linear_attn_config.kda_layers", "[4]", BR_E_FORMAT, "none"},
    {"kimi-k3.json", "text_config.quantization_config.format", "\"nvfp4-pack-quantized\"", BR_E_UNSUPPORTED, "nvfp4"},
    {"kimi-k3.json", "text_config.quantization_config.format", NULL, BR_E_UNSUPPORTED, "format"},
    {"kimi-k3.json", "text_config.quantization_config.quant_method", "\"fp8\"", BR_E_UNSUPPORTED, "fp8"},
    {"kimi-k3.json", GROUP ".weights.num_bits", "8", BR_E_UNSUPPORTED, "4 bits"},
    {"kimi-k3.json", GROUP ".weights.group_size", "16", BR_E_UNSUPPORTED, "32 values"},
    {"kimi-k3.json", GROUP ".weights.type", "\"int\"", BR_E_UNSUPPORTED, "E2M1"},
    {"kimi-k3.json", GROUP ".input_activations", "{}", BR_E_UNSUPPORTED, "activations"},
    {"kimi-k31.json", "text_config.dsa_config", NULL, BR_E_FORMAT, "dsa_config"},
    {"kimi-k31.json", "text_config.dsa_config.index_topk", NULL, BR_E_FORMAT, "index_topk"},
    {"kimi-k31.json", "text_config.dsa_config.layers", "[4, 8]", BR_E_FORMAT, "layers"},
    {"kimi-k31.json", "text_config.dsa_config.layers", "[]", BR_E_FORMAT, "layers"},
    {"kimi-k31.json", "text_config.dsa_config.index_rope", "true", BR_E_UNSUPPORTED, "rotary"},
    {"kimi-k31.json", "text_config.dsa_config.index_hadamard", "true", BR_E_UNSUPPORTED, "Hadamard"},
    {"kimi-k31.json", "text_config.dsa_config.index_kdtype", "\"mxfp4\"", BR_E_UNSUPPORTED, "mxfp4"},
    {"kimi-k31.json", "text_config.q_lora_rank", "null", BR_E_FORMAT, "q_lora_rank"},
    {"kimi-linear-48b-a3b.json", "mla_use_nope", NULL, BR_E_UNSUPPORTED, "rope"},
    {"kimi-linear-48b-a3b.json", "mla_use_nope", "false", BR_E_UNSUPPORTED, "rotary"},
    {"kimi-linear-48b-a3b.json", "attn_res_block_size", "4", BR_E_UNSUPPORTED, "attn_res_block_size"},
    {"kimi-linear-48b-a3b.json", "routed_expert_hidden_size", "1024", BR_E_UNSUPPORTED, "routed_expert_hidden_size"},
    {"kimi-linear-48b-a3b.json", "latent_moe_use_norm", "true", BR_E_UNSUPPORTED, "latent_moe_use_norm"},
    {"kimi-linear-48b-a3b.json", "dsa_config", "{}", BR_E_UNSUPPORTED, "dsa_config"},
    {"kimi-linear-48b-a3b.json", "num_attention_heads", NULL, BR_E_FORMAT, "num_attention_heads"},
};

START_TEST(refusals_name_their_reason) {
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        edit_pair one = {REFUSED[i].path, REFUSED[i].value};
        br_config c;
        br_status status = parse_edited(REFUSED[i].file, &one, NULL, &c);
        ck_assert_msg(status == REFUSED[i].status, "%s = %s: got %s (%s)", one.path, one.value ? one.value : "absent",
                      br_status_name(status), br_last_error());
        ck_assert_msg(strstr(br_last_error(), REFUSED[i].says) != NULL, "%s: '%s' lacks '%s'", one.path, br_last_error(),
                      REFUSED[i].says);
        ck_assert(is_zero(&c));
    }
}
END_TEST

static br_status parse_text(const char *text, br_config *c) {
    return br_config_parse("x", text, strlen(text), c);
}

START_TEST(broken_text_is_refused) {
    static const char *const BROKEN[] = {"",      "[]", "7", "{", "{}", "{\"architectures\":[\"KimiLinearForCausalLM\"]}",
                                         "{} {}", "nul"};
    br_config c;
    for (size_t i = 0; i < sizeof BROKEN / sizeof BROKEN[0]; i++)
        CHECK_FAILS(parse_text(BROKEN[i], &c), BR_E_FORMAT);
    CHECK_FAILS(parse_text("{\"vocab_size\": 1, \"vocab_size\": 1}", &c), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "vocab_size")); /* a key twice */
    char *large = malloc(BR_CONFIG_BYTES_MAX + 2);
    memset(large, ' ', BR_CONFIG_BYTES_MAX + 1);
    CHECK_FAILS(br_config_parse("x", large, BR_CONFIG_BYTES_MAX + 1, &c), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "at most"));
    free(large);
    /* no prefix of a good file is a good file */
    json_t *root = load_golden("kimi-k31.json");
    char *text = json_dumps(root, JSON_COMPACT);
    for (size_t n = 0; n < strlen(text); n += test_is_long() ? 1 : 13)
        CHECK_FAILS(br_config_parse("x", text, n, &c), BR_E_FORMAT);
    free(text);
    json_decref(root);
}
END_TEST

START_TEST(files_are_read) {
    char dir[BR_PATH_BYTES], path[BR_PATH_BYTES];
    br_config c, again;
    snprintf(dir, sizeof dir, "%s/model", test_tmp_dir());
    CHECK_FAILS(br_config_read(dir, &c), BR_E_NOT_FOUND);
    CHECK_OK(br_file_make_dir(dir));
    CHECK_OK(br_file_join(path, dir, "config.json"));
    json_t *root = load_golden("nano-flat.json");
    ck_assert_int_eq(json_dump_file(root, path, 0), 0);
    CHECK_OK(br_config_read(dir, &c));
    CHECK_OK(parse(root, &again));
    json_decref(root);
    ck_assert_mem_eq(&c, &again, sizeof c);
    br_file_fail_nth_read(1);
    CHECK_FAILS(br_config_read(dir, &c), BR_E_IO);
    ck_assert(is_zero(&c));
    CHECK_OK(br_file_write(path, "", 0));
    CHECK_FAILS(br_config_read(dir, &c), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), path));
}
END_TEST

Suite *test_config_suite(void) {
    Suite *suite = suite_create("config");
    TCase *loads = tcase_create("loads"), *refused = tcase_create("refused");
    tcase_set_timeout(loads, 20);
    tcase_set_timeout(refused, 60);
    tcase_add_test(loads, kimi_k3_loads);
    tcase_add_test(loads, kimi_k31_loads);
    tcase_add_test(loads, kimi_linear_loads);
    tcase_add_test(loads, flat_presets_load);
    tcase_add_test(loads, aliases_load);
    tcase_add_test(loads, text_config_may_be_flat);
    tcase_add_test(loads, indexer_spellings_load);
    tcase_add_test(loads, optional_keys);
    tcase_add_test(loads, files_are_read);
    tcase_add_test(refused, integers_are_bounded);
    tcase_add_test(refused, refusals_name_their_reason);
    tcase_add_test(refused, broken_text_is_refused);
    suite_add_tcase(suite, loads);
    suite_add_tcase(suite, refused);
    return suite;
}
