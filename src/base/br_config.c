/* The digest of a model's shape: name and value of each field that a bit can depend on, so that it does not move with the
 * layout of the struct or with fields that only limit or describe. */
#include "br_config.h"

#include "br_hash.h"

#define NUMBERS(X)                                                                                                      \
    X(arch) X(n_vocab) X(d_model) X(n_layer) X(n_dense_layer) X(d_ff)                                                   \
    X(kda_n_head) X(kda_d_head) X(kda_bounded) X(kda_full_gate) X(kda_d_gate_low)                                       \
    X(n_head) X(d_nope) X(d_rope) X(d_v) X(d_q_latent) X(d_kv_latent) X(mla_gate)                                       \
    X(index_n_head) X(index_d_head) X(index_topk)                                                                       \
    X(n_expert) X(n_expert_topk) X(n_shared_expert) X(d_expert_ff) X(d_latent) X(latent_norm) X(renormalize)            \
    X(act_situ) X(res_block) X(eos_id)
#define REALS(X) X(norm_eps) X(lora_norm_eps) X(kda_lower_bound) X(route_scale) X(situ_beta) X(situ_linear_beta)

br_digest br_config_digest(const br_config *config) {
    br_hash_stream stream;
    br_hash_begin(&stream);
#define NUMBER(field)                                        \
    {                                                        \
        const int64_t value = (int64_t)config->field;        \
        br_hash_add(&stream, #field, sizeof #field);         \
        br_hash_add(&stream, &value, sizeof value);          \
    }
#define REAL(field)                                                          \
    {                                                                        \
        br_hash_add(&stream, #field, sizeof #field);                         \
        br_hash_add(&stream, &config->field, sizeof config->field);          \
    }
    NUMBERS(NUMBER)
    REALS(REAL)
    br_hash_add(&stream, config->layer_is_mla, (size_t)config->n_layer);
    return br_hash_end(&stream);
}
