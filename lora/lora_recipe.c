/* Names and spreads of random adapters; see lora_recipe.h. */
#include "lora_recipe.h"

#include "lora_file.h"

#include <stdio.h>

/* B is small, as after some training: the adapter's share of an output is a few hundredths of the base's. */
static const float SPREAD_A = 1.0f, SPREAD_B = 0.02f;

void lora_recipe_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, int is_b, char name[BR_NAME_BYTES]) {
    char module[BR_NAME_BYTES];
    lora_module_name(config, cls, layer, expert, module);
    snprintf(name, BR_NAME_BYTES, "base_model.model.%.*s.lora_%c.weight", BR_NAME_BYTES - 40, module, is_b ? 'B' : 'A');
}

bi_weightgen lora_recipe_of(uint64_t seed, const char *tensor_name, int is_b, int32_t n_term) {
    return bi_weightgen_make(bi_weightgen_key(seed, tensor_name), BI_WEIGHTGEN_NORMAL, 0, is_b ? SPREAD_B : SPREAD_A, n_term);
}
