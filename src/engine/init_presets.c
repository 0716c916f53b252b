/* The presets as published files spell them, and the scale of every class of tensor; see init_presets.h. */
#include "init_presets.h"

#include <string.h>

/* A line of JSON, spelled as in the file: the preprocessor quotes its tokens. */
#define TOP(...) "  " #__VA_ARGS__ "\n"
#define TEXT(...) "    " #__VA_ARGS__ "\n"
#define DEEP(...) "      " #__VA_ARGS__ "\n"

/* ---- pieces of K3 and K3.1 -------------------------------------------------------------------------------------------- */

#define K3_TOKENS(line)        \
    line("bos_token_id": 0,)   \
    line("eos_token_id": 1,)   \
    line("pad_token_id": 2,)   \
    line("dtype": "bfloat16",) \
    line("tie_word_embeddings": false,)

/* Published text parts name the older architecture: the top one decides. */
#define K3_BEGIN(architecture, type, dense)           \
    "{\n"                                             \
    TOP("architectures": [architecture],)             \
    TOP("model_type": type,)                          \
    K3_TOKENS(TOP)                                    \
    TOP("text_config": {)                             \
    TEXT("architectures": ["KimiLinearForCausalLM"],) \
    TEXT("model_type": "kimi_linear",)                \
    K3_TOKENS(TEXT)                                   \
    TEXT("hidden_act": "situ",)                       \
    TEXT("activation_situ_beta": 4.0,)                \
    TEXT("activation_situ_linear_beta": 25.0,)        \
    TEXT("rms_norm_eps": 1e-5,)                       \
    TEXT("first_k_dense_replace": dense,)             \
    TEXT("mla_use_nope": true,)                       \
    TEXT("mla_use_output_gate": true,)                \
    TEXT("moe_layer_freq": 1,)                        \
    TEXT("moe_router_activation_func": "sigmoid",)    \
    TEXT("moe_renormalize": true,)                    \
    TEXT("topk_method": "noaux_tc",)                  \
    TEXT("use_grouped_topk": true,)                   \
    TEXT("num_expert_group": 1,)                      \
    TEXT("topk_group": 1,)                            \
    TEXT("routed_scaling_factor": 1.0,)               \
    TEXT("num_shared_experts": 2,)                    \
    TEXT("latent_moe_use_norm": true,)                \
    TEXT("num_nextn_predict_layers": 0,)

#define K31_BEGIN(dense) K3_BEGIN("KimiK31ForConditionalGeneration", "kimi_k31", dense)

#define K3_ATTENTION(head_count, head_size)                                            \
    TEXT("linear_attn_config": {)                                                      \
    DEEP("num_heads": head_count, "head_dim": head_size, "short_conv_kernel_size": 4,) \
    DEEP("gate_lower_bound": -5.0, "use_full_rank_gate": true,)

#define INDEXER(head_count, head_size, topk) \
    TEXT("index_n_heads": head_count,)       \
    TEXT("index_head_dim": head_size,)       \
    TEXT("index_topk": topk,)                \
    TEXT("index_rope": false,)               \
    TEXT("index_hadamard": false,)           \
    TEXT("index_kdtype": "fp8_e4m3_pow2",)

/* The nested spelling of the same. */
#define DSA_CONFIG(head_count, head_size, topk, ...)                                    \
    TEXT("dsa_config": {)                                                               \
    DEEP("index_n_heads": head_count, "index_head_dim": head_size, "index_topk": topk,) \
    DEEP("layers": [__VA_ARGS__]},)

#define K3_END                                                                                                \
    TEXT("quantization_config": {)                                                                            \
    DEEP("quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",)                             \
    DEEP("quantization_status": "compressed", "kv_cache_scheme": null,)                                       \
    DEEP("config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,)                     \
    DEEP("output_activations": null, "weights": {"num_bits": 4, "type": "float", "strategy": "group",)        \
    DEEP("group_size": 32, "symmetric": true, "dynamic": false, "scale_dtype": "torch.uint8",)                \
    DEEP("observer": "minmax"}}},)                                                                            \
    DEEP("ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",) \
    DEEP("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"])                                         \
    TEXT(})                                                                                                   \
    TOP(})                                                                                                    \
    "}\n"

/* ---- shapes ----------------------------------------------------------------------------------------------------------- */

#define NANO_SHAPE                         \
    TEXT("hidden_size": 128,)              \
    TEXT("num_attention_heads": 4,)        \
    TEXT("num_key_value_heads": 4,)        \
    TEXT("intermediate_size": 384,)        \
    TEXT("q_lora_rank": 64,)               \
    TEXT("kv_lora_rank": 64,)              \
    TEXT("qk_nope_head_dim": 32,)          \
    TEXT("qk_rope_head_dim": 16,)          \
    TEXT("v_head_dim": 32,)                \
    TEXT("num_experts": 32,)               \
    TEXT("num_experts_per_token": 4,)      \
    TEXT("moe_intermediate_size": 64,)     \
    TEXT("routed_expert_hidden_size": 64,) \
    TEXT("attn_res_block_size": 3,)        \
    TEXT("max_position_embeddings": 4096,) \
    K3_ATTENTION(4, 32)

#define NANO_LAYERS                          \
    DEEP("full_attn_layers": [4, 8, 9],)     \
    DEEP("kda_layers": [1, 2, 3, 5, 6, 7]},) \
    TEXT("num_hidden_layers": 9,)            \
    TEXT("vocab_size": 2304,)

#define PICO_LAYERS                \
    DEEP("full_attn_layers": [3],) \
    DEEP("kda_layers": [1, 2]},)   \
    TEXT("num_hidden_layers": 3,)  \
    TEXT("vocab_size": 256,)

#define MINI_SHAPE                          \
    TEXT("vocab_size": 4096,)               \
    TEXT("hidden_size": 256,)               \
    TEXT("num_hidden_layers": 5,)           \
    TEXT("num_attention_heads": 2,)         \
    TEXT("num_key_value_heads": 2,)         \
    TEXT("intermediate_size": 512,)         \
    TEXT("q_lora_rank": 128,)               \
    TEXT("kv_lora_rank": 512,)              \
    TEXT("qk_nope_head_dim": 128,)          \
    TEXT("qk_rope_head_dim": 64,)           \
    TEXT("v_head_dim": 128,)                \
    TEXT("num_experts": 32,)                \
    TEXT("num_experts_per_token": 4,)       \
    TEXT("moe_intermediate_size": 128,)     \
    TEXT("routed_expert_hidden_size": 128,) \
    TEXT("attn_res_block_size": 2,)         \
    TEXT("max_position_embeddings": 16384,) \
    K3_ATTENTION(2, 128)                    \
    DEEP("full_attn_layers": [4, 5],)       \
    DEEP("kda_layers": [1, 2, 3]},)

#define SMALL_SHAPE                           \
    TEXT("vocab_size": 16384,)                \
    TEXT("hidden_size": 768,)                 \
    TEXT("num_hidden_layers": 13,)            \
    TEXT("num_attention_heads": 6,)           \
    TEXT("num_key_value_heads": 6,)           \
    TEXT("intermediate_size": 3072,)          \
    TEXT("q_lora_rank": 384,)                 \
    TEXT("kv_lora_rank": 512,)                \
    TEXT("qk_nope_head_dim": 128,)            \
    TEXT("qk_rope_head_dim": 64,)             \
    TEXT("v_head_dim": 128,)                  \
    TEXT("num_experts": 64,)                  \
    TEXT("num_experts_per_token": 8,)         \
    TEXT("moe_intermediate_size": 128,)       \
    TEXT("routed_expert_hidden_size": 384,)   \
    TEXT("attn_res_block_size": 4,)           \
    TEXT("max_position_embeddings": 65536,)   \
    K3_ATTENTION(6, 128)                      \
    DEEP("full_attn_layers": [4, 8, 12, 13],) \
    DEEP("kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]},)

/* One layer as published; there are many of them in the model, some here. */
#define FULL_SHAPE                            \
    TEXT("vocab_size": 163840,)               \
    TEXT("hidden_size": 7168,)                \
    TEXT("num_attention_heads": 96,)          \
    TEXT("num_key_value_heads": 96,)          \
    TEXT("intermediate_size": 33792,)         \
    TEXT("q_lora_rank": 1536,)                \
    TEXT("kv_lora_rank": 512,)                \
    TEXT("qk_nope_head_dim": 128,)            \
    TEXT("qk_rope_head_dim": 64,)             \
    TEXT("v_head_dim": 128,)                  \
    TEXT("num_experts": 896,)                 \
    TEXT("num_experts_per_token": 16,)        \
    TEXT("moe_intermediate_size": 3072,)      \
    TEXT("routed_expert_hidden_size": 3584,)  \
    TEXT("attn_res_block_size": 12,)          \
    TEXT("max_position_embeddings": 1048576,) \
    K3_ATTENTION(96, 128)

#define LAYER_LAYERS               \
    DEEP("full_attn_layers": [2],) \
    DEEP("kda_layers": [1]},)      \
    TEXT("num_hidden_layers": 2,)

#define SLICE_LAYERS                \
    DEEP("full_attn_layers": [4],)  \
    DEEP("kda_layers": [1, 2, 3]},) \
    TEXT("num_hidden_layers": 4,)

/* Kimi-Linear's file is flat, with its own spelling of the longest position. */
#define KIMI_LINEAR_BEGIN                            \
    "{\n"                                            \
    TOP("architectures": ["KimiLinearForCausalLM"],) \
    TOP("model_type": "kimi_linear",)

#define KIMI_LINEAR_COMMON           \
    TOP("first_k_dense_replace": 1,) \
    TOP("hidden_act": "silu",)       \
    TOP("rms_norm_eps": 1e-5,)       \
    TOP("q_lora_rank": null,)

#define KIMI_LINEAR_HEADS(head_count, head_size)                                       \
    TOP("mla_use_nope": true,)                                                         \
    TOP("mla_use_output_gate": false,)                                                 \
    TOP("linear_attn_config": {)                                                       \
    TEXT("num_heads": head_count, "head_dim": head_size, "short_conv_kernel_size": 4,) \
    TEXT("gate_lower_bound": null, "use_full_rank_gate": false,)

#define KIMI_LINEAR_ROUTER                        \
    TOP("moe_layer_freq": 1,)                     \
    TOP("moe_router_activation_func": "sigmoid",) \
    TOP("moe_renormalize": true,)                 \
    TOP("use_grouped_topk": true,)                \
    TOP("num_expert_group": 1,)                   \
    TOP("topk_group": 1,)

#define KIMI_LINEAR_END(position_count)     \
    TOP("num_shared_experts": 1,)           \
    TOP("latent_moe_use_norm": false,)      \
    TOP("routed_scaling_factor": 2.446,)    \
    TOP("num_nextn_predict_layers": 0,)     \
    TOP("model_max_length": position_count) \
    "}\n"

#define KIMI_LINEAR_NANO               \
    KIMI_LINEAR_BEGIN                  \
    K3_TOKENS(TOP)                     \
    TOP("vocab_size": 2304,)           \
    TOP("hidden_size": 128,)           \
    TOP("num_hidden_layers": 5,)       \
    TOP("num_attention_heads": 4,)     \
    TOP("num_key_value_heads": 4,)     \
    TOP("intermediate_size": 384,)     \
    KIMI_LINEAR_COMMON                 \
    TOP("kv_lora_rank": 64,)           \
    TOP("qk_nope_head_dim": 32,)       \
    TOP("qk_rope_head_dim": 16,)       \
    TOP("v_head_dim": 32,)             \
    KIMI_LINEAR_HEADS(4, 32)           \
    TEXT("full_attn_layers": [4],)     \
    TEXT("kda_layers": [1, 2, 3, 5]},) \
    KIMI_LINEAR_ROUTER                 \
    TOP("num_experts": 16,)            \
    TOP("num_experts_per_token": 4,)   \
    TOP("moe_intermediate_size": 64,)  \
    KIMI_LINEAR_END(4096)

#define KIMI_LINEAR_48B                                                                             \
    KIMI_LINEAR_BEGIN                                                                               \
    TOP("bos_token_id": 163584,)                                                                    \
    TOP("eos_token_id": 163586,)                                                                    \
    TOP("pad_token_id": 163839,)                                                                    \
    TOP("dtype": "bfloat16",)                                                                       \
    TOP("tie_word_embeddings": false,)                                                              \
    TOP("vocab_size": 163840,)                                                                      \
    TOP("hidden_size": 2304,)                                                                       \
    TOP("num_hidden_layers": 27,)                                                                   \
    TOP("num_attention_heads": 32,)                                                                 \
    TOP("num_key_value_heads": 32,)                                                                 \
    TOP("intermediate_size": 9216,)                                                                 \
    KIMI_LINEAR_COMMON                                                                              \
    TOP("kv_lora_rank": 512,)                                                                       \
    TOP("qk_nope_head_dim": 128,)                                                                   \
    TOP("qk_rope_head_dim": 64,)                                                                    \
    TOP("v_head_dim": 128,)                                                                         \
    KIMI_LINEAR_HEADS(32, 128)                                                                      \
    TEXT("full_attn_layers": [4, 8, 12, 16, 20, 24, 27],)                                           \
    TEXT("kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]},) \
    KIMI_LINEAR_ROUTER                                                                              \
    TOP("num_experts": 256,)                                                                        \
    TOP("num_experts_per_token": 8,)                                                                \
    TOP("moe_intermediate_size": 1024,)                                                             \
    KIMI_LINEAR_END(1048576)

static const init_preset presets[] = {
    {"pico", K31_BEGIN(1) NANO_SHAPE PICO_LAYERS INDEXER(4, 32, 16) K3_END, 0},
    {"nano", K31_BEGIN(1) NANO_SHAPE NANO_LAYERS INDEXER(4, 32, 16) K3_END, 0},
    {"mini", K31_BEGIN(1) MINI_SHAPE DSA_CONFIG(32, 128, 640, 4, 5) K3_END, 0},
    {"small", K31_BEGIN(1) SMALL_SHAPE DSA_CONFIG(32, 128, 256, 4, 8, 12, 13) K3_END, 0},
    {"k3-nano", K3_BEGIN("KimiK3ForConditionalGeneration", "kimi_k3", 1) NANO_SHAPE NANO_LAYERS K3_END, 0},
    {"kimi-linear-nano", KIMI_LINEAR_NANO, 0},
    {"layer-full", K31_BEGIN(0) FULL_SHAPE LAYER_LAYERS INDEXER(32, 128, 2048) K3_END, 1},
    {"slice-full", K31_BEGIN(0) FULL_SHAPE SLICE_LAYERS INDEXER(32, 128, 2048) K3_END, 1},
    {"kimi-linear-48b", KIMI_LINEAR_48B, 1},
};

int32_t init_preset_count(void) {
    return (int32_t)(sizeof presets / sizeof presets[0]);
}

const init_preset *init_preset_at(int32_t i) {
    return &presets[i];
}

const init_preset *init_preset_find(const char *name) {
    for (int32_t i = 0; i < init_preset_count(); i++)
        if (strcmp(presets[i].name, name) == 0)
            return &presets[i];
    return NULL;
}

/* adapter_config.json with every key that PEFT writes. */
const char INIT_ADAPTER_CONFIG[] =
    "{\n"
    TOP("alora_invocation_tokens": null,)
    TOP("alpha_pattern": {},)
    TOP("auto_mapping": null,)
    TOP("base_model_name_or_path": null,)
    TOP("bias": "none",)
    TOP("corda_config": null,)
    TOP("ensure_weight_tying": false,)
    TOP("eva_config": null,)
    TOP("exclude_modules": null,)
    TOP("fan_in_fan_out": false,)
    TOP("inference_mode": true,)
    TOP("init_lora_weights": true,)
    TOP("layer_replication": null,)
    TOP("layers_pattern": null,)
    TOP("layers_to_transform": null,)
    TOP("loftq_config": {},)
    "  \"lora_alpha\": %d,\n"
    TOP("lora_bias": false,)
    TOP("lora_dropout": 0.0,)
    TOP("megatron_config": null,)
    TOP("megatron_core": "megatron.core",)
    TOP("modules_to_save": null,)
    TOP("peft_type": "LORA",)
    TOP("qalora_group_size": 16,)
    "  \"r\": %d,\n"
    TOP("rank_pattern": {},)
    TOP("revision": null,)
    "  \"target_modules\": [%s],\n"
    TOP("target_parameters": null,)
    TOP("task_type": "CAUSAL_LM",)
    TOP("trainable_token_indices": null,)
    TOP("use_dora": false,)
    TOP("use_qalora": false,)
    TOP("use_rslora": false)
    "}\n";

/* ---- scales ----------------------------------------------------------------------------------------------------------- */

#define SPREAD(kind_, offset_, spread_) {.kind = BI_WEIGHTGEN_##kind_, .offset = offset_, .spread = spread_}
#define SPREAD_F32(kind_, offset_, spread_) {.kind = BI_WEIGHTGEN_##kind_, .offset = offset_, .spread = spread_, .is_f32 = 1}
/* A linear map whose outputs are about `gain` times the root mean square of its inputs. */
#define GAIN(gain) {.kind = BI_WEIGHTGEN_NORMAL, .spread = gain, .fan_in = 1}
#define NORM SPREAD(NORMAL, 1, 0.1f)

static const init_recipe RECIPE[BR_CLASS_COUNT] = {
    [BR_W_KDA_Q] = GAIN(1.0f),
    [BR_W_KDA_K] = GAIN(1.0f),
    [BR_W_KDA_V] = GAIN(1.0f),
    [BR_W_KDA_G] = GAIN(1.0f),
    [BR_W_KDA_G_A] = GAIN(1.0f),
    [BR_W_KDA_G_B] = GAIN(1.0f),
    [BR_W_KDA_F_A] = GAIN(1.0f),
    [BR_W_KDA_F_B] = GAIN(0.3f),
    [BR_W_KDA_B] = GAIN(1.0f),
    [BR_W_KDA_O] = GAIN(0.75f),
    [BR_W_MLA_Q] = GAIN(1.4f),
    [BR_W_MLA_Q_A] = GAIN(1.0f),
    [BR_W_MLA_Q_B] = GAIN(1.4f),
    [BR_W_MLA_KV_A] = GAIN(1.0f),
    [BR_W_MLA_KV_B] = GAIN(1.3f),
    [BR_W_MLA_G] = GAIN(1.0f),
    [BR_W_MLA_O] = GAIN(1.0f),
    [BR_W_MLP_GATE] = GAIN(1.2f),
    [BR_W_MLP_UP] = GAIN(1.2f),
    [BR_W_MLP_DOWN] = GAIN(1.0f),
    [BR_W_SHARED_GATE] = GAIN(1.2f),
    [BR_W_SHARED_UP] = GAIN(1.2f),
    [BR_W_SHARED_DOWN] = GAIN(0.8f),
    [BR_W_LATENT_DOWN] = GAIN(1.0f),
    [BR_W_LATENT_UP] = GAIN(0.25f),
    [BR_W_EXPERT_W1] = GAIN(1.2f),
    [BR_W_EXPERT_W3] = GAIN(1.2f),
    [BR_W_EXPERT_W2] = GAIN(0.3f),
    [BR_W_EXPERT_W1_SCALE] = GAIN(1.2f), /* scale bytes follow from the recipe of their codes */
    [BR_W_EXPERT_W3_SCALE] = GAIN(1.2f),
    [BR_W_EXPERT_W2_SCALE] = GAIN(0.3f),
    [BR_W_ROUTER] = GAIN(1.0f),
    [BR_W_INDEX_Q] = GAIN(1.0f),
    [BR_W_INDEX_K] = GAIN(1.0f),
    [BR_W_INDEX_WEIGHT] = GAIN(1.0f),
    [BR_W_EMBED] = SPREAD(NORMAL, 0, 3.0f),
    [BR_W_HEAD] = GAIN(2.2f),
    [BR_W_KDA_CONV_Q] = SPREAD_F32(NORMAL, 0, 0.25f),
    [BR_W_KDA_CONV_K] = SPREAD_F32(NORMAL, 0, 0.25f),
    [BR_W_KDA_CONV_V] = SPREAD_F32(NORMAL, 0, 0.25f),
    [BR_W_KDA_A_LOG] = SPREAD_F32(UNIFORM, 0, 2.0f), /* log of 1 to 7.4 */
    [BR_W_KDA_DT_BIAS] = SPREAD_F32(UNIFORM, -2.0f, 2.25f),
    [BR_W_KDA_O_NORM] = SPREAD_F32(NORMAL, 1, 0.1f),
    [BR_W_MLA_Q_NORM] = NORM,
    [BR_W_MLA_KV_NORM] = NORM,
    [BR_W_INDEX_K_NORM] = NORM,
    [BR_W_INDEX_K_NORM_BIAS] = SPREAD(NORMAL, 0, 0.1f),
    [BR_W_ROUTER_BIAS] = SPREAD_F32(NORMAL, 0, 0.01f),
    [BR_W_LATENT_NORM] = NORM,
    [BR_W_INPUT_NORM] = NORM,
    [BR_W_POST_NORM] = NORM,
    [BR_W_FINAL_NORM] = NORM,
    [BR_W_ATTN_RES_NORM] = NORM,
    [BR_W_ATTN_RES_PROJ] = GAIN(0.5f),
    [BR_W_MLP_RES_NORM] = NORM,
    [BR_W_MLP_RES_PROJ] = GAIN(0.5f),
    [BR_W_OUT_RES_NORM] = NORM,
    [BR_W_OUT_RES_PROJ] = GAIN(0.5f),
};

/* Without a lower bound the gate is -exp(A_log) * softplus(.), which reaches the same decays with smaller arguments. */
static const init_recipe RECIPE_DT_BIAS_UNBOUNDED = SPREAD_F32(UNIFORM, -6.0f, 5.0f);

init_recipe init_recipe_of(const br_config *config, br_class cls) {
    return cls == BR_W_KDA_DT_BIAS && !config->kda_bounded ? RECIPE_DT_BIAS_UNBOUNDED : RECIPE[cls];
}
