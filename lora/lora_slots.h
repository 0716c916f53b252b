/* lora_slots: PEFT adapters of a run, by name; what each does to each linear map.
 *
 * Layer: lora; includes base, weights (names and shapes), io's safetensors. No arithmetic. Owns the maps of the files.
 * A folder with generated.json in place of adapter_model.safetensors holds a generated adapter (lora_recipe.h): its maps are those
 * that target_modules names, with the ranks and scales of adapter_config.json, and no value is ever read.
 * Loads rank_pattern, alpha_pattern, use_rslora, per-expert and shared-A experts (spellings: lora_file.h), tensors in BF16,
 * or in F32 when every value is a bf16 number: a rounding here would run another adapter than the trainer's. Refuses by name
 * (BR_E_UNSUPPORTED): DoRA, biases, modules_to_save, fan_in_fan_out, target_parameters, any other feature that is switched
 * on, indexer and router targets, PiSSA / OLoRA / LoftQ / CorDA starts. An unknown, missing, doubled or misshaped tensor, a
 * rank over 256, another dtype, NaN or Inf values are BR_E_FORMAT naming it. The tensors must be those of target_modules
 * where that is a list: one that is absent, and one that PEFT would not load, are refused alike. An adapter without effect
 * (no tensors, or all B or every alpha zero) is BR_E_FORMAT unless allow_zero; no tensors at all never passes. */
#ifndef LORA_SLOTS_H
#define LORA_SLOTS_H

#include "br_weights.h"
#include "lora_digest.h"

/* A name is at most LORA_NAME_BYTES_MAX bytes: rollout files have that room. */
enum { LORA_RANK_MAX = 256, LORA_ADAPTER_MAX = 64, LORA_NAME_BYTES_MAX = 63 };

/* One adapter on one linear map. a (rank, n_in), b (n_out, rank), bf16, 2-byte aligned, valid until lora_close; of a generated
 * adapter these are NULL, and recipes stand in their place. Absent: rank 0 and all NULL. */
typedef struct lora_pair {
    const uint16_t *a, *b;
    const bi_weightgen *gen_a, *gen_b;
    int32_t rank, n_in, n_out;
    double alpha;   /* after alpha_pattern; s = alpha / rank, or alpha / sqrt(rank) when rslora */
    int32_t rslora;
} lora_pair;

static inline lora_scale lora_pair_scale(const lora_pair *pair) {
    return (lora_scale){.rank = pair->rank, .rslora = pair->rslora, .alpha = pair->alpha};
}

typedef struct lora_set lora_set;

/* A source without a folder is an adapter that starts empty: no pairs, digest 0, 0.
 * Errors besides those above: BR_E_ARG (a name twice, empty, too long, or "base"), BR_E_LIMIT, BR_E_NOT_FOUND, BR_E_IO,
 * BR_E_NOMEM; the sentence begins with the adapter's name. *out is NULL on error. */
br_status lora_open(const br_config *config, const br_adapter_source *source, int32_t n_source, int32_t allow_zero,
                    lora_set **out);
/* One adapter from the bytes of its two files, which stay the caller's and must outlive the set. */
br_status lora_parse(const br_config *config, const char *name, const char *json, size_t n_json,
                     const unsigned char *tensors, size_t n_tensors, int32_t allow_zero, lora_set **out);
void lora_close(lora_set *set);
int32_t lora_count(const lora_set *set);
const char *lora_name(const lora_set *set, int32_t slot);
/* The slot; -1: not loaded. "base" and NULL are the caller's business. */
int32_t lora_find(const lora_set *set, const char *name);
/* lora_digest.h: equal however the files spell or store the adapter. Of a generated one the recipes stand for the values. */
br_digest lora_digest(const lora_set *set, int32_t slot);
lora_pair lora_pair_of(const lora_set *set, int32_t slot, br_class cls, int32_t layer, int32_t expert);
int lora_is_generated(const lora_set *set, int32_t slot);
int32_t lora_rank_max(const lora_set *set);                /* 0 when there is no adapter */

#endif
