/* br_config: the shape of a model, numbers only. Layer: base. Filled by io/config_json from a published config.json.
 * Shape letters: H heads, d head size, D d_model. Indices of layers are 0-based here (the file's lists are 1-based). */
#ifndef BR_CONFIG_H
#define BR_CONFIG_H

#include "bitroll.h" /* br_digest */

typedef enum br_arch {
    BR_ARCH_KIMI_K31,   /* KDA + MLA with an indexer (DSA), AttnRes, latent MoE */
    BR_ARCH_KIMI_K3,    /* the same with dense MLA */
    BR_ARCH_KIMI_LINEAR /* KDA + MLA without q latent and gate, plain residuals, MoE at full width */
} br_arch;

enum {
    BR_LAYER_MAX = 128,
    BR_VOCAB_MAX = 1 << 20,
    BR_D_MODEL_MAX = 16384,
    BR_HEAD_MAX = 256,
    BR_EXPERT_MAX = 4096,
    BR_EXPERT_TOPK_MAX = 64,
    BR_BANK_MAX = 32,      /* AttnRes rows saved */
    BR_CONV_TAP = 4,
    BR_PAGE_TOK = 64,      /* tokens of a cache page */
    BR_POSITION_MAX = 1 << 20
};

typedef struct br_config {
    br_arch arch;
    int32_t n_vocab, d_model, n_layer;
    uint8_t layer_is_mla[BR_LAYER_MAX]; /* else KDA */
    int32_t n_mla_layer, n_kda_layer;
    int32_t n_dense_layer;              /* first_k_dense_replace */
    int32_t d_ff;                       /* intermediate_size of the dense MLP */
    int32_t position_max;
    int32_t eos_id;                     /* -1: none */
    float norm_eps, lora_norm_eps;      /* rms_norm_eps; eps of q_a and kv_a norms (equal unless the file says so) */
    /* KDA */
    int32_t kda_n_head, kda_d_head;
    int32_t kda_bounded;                /* 1: gate_lower_bound * sigmoid form */
    float kda_lower_bound;
    int32_t kda_full_gate;              /* 1: g_proj; 0: g_a_proj, g_b_proj */
    int32_t kda_d_gate_low;             /* width of f_a (and g_a) = kda_d_head */
    /* MLA */
    int32_t n_head, d_nope, d_rope, d_v;
    int32_t d_q_latent;                 /* 0: q_proj */
    int32_t d_kv_latent;
    int32_t mla_gate;                   /* 1: sigmoid output gate */
    /* indexer, K3.1 only */
    int32_t index_n_head, index_d_head, index_topk; /* 0: none */
    /* MoE */
    int32_t n_expert, n_expert_topk, n_shared_expert;
    int32_t d_expert_ff;                /* moe_intermediate_size; the shared MLP is n_shared_expert times as wide */
    int32_t d_latent;                   /* routed_expert_hidden_size; 0: experts work at d_model */
    int32_t latent_norm;
    int32_t renormalize;
    float route_scale;
    int32_t experts_fp4;                /* 1: MXFP4 packed experts */
    int32_t act_situ;                   /* 1: SiTU; 0: SiLU */
    float situ_beta, situ_linear_beta;
    int32_t res_block;                  /* AttnRes: a bank write before every res_block-th layer; 0: plain residuals */
} br_config;

br_digest br_config_digest(const br_config *config);

static inline int32_t br_config_expert_width(const br_config *c) { return c->d_latent ? c->d_latent : c->d_model; }
static inline int32_t br_config_latent_dim(const br_config *c) { return c->d_kv_latent + c->d_rope; }
static inline int32_t br_config_kda_width(const br_config *c) { return c->kda_n_head * c->kda_d_head; }

#endif
