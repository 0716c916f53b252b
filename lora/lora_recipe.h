/* lora_recipe: a random adapter: the names of its tensors and how each is drawn. `init` writes adapters with it, and a generated
 * one (generated.json in place of adapter_model.safetensors) is made from it whenever it is opened: the same bytes.
 *
 * Layer: lora; includes weights (names) and numeric's generator. */
#ifndef LORA_RECIPE_H
#define LORA_RECIPE_H

#include "bi_weightgen.h"
#include "br_weights.h"

/* The name of lora_A.weight, or of lora_B.weight when is_b, as PEFT writes it. */
void lora_recipe_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, int is_b, char name[BR_NAME_BYTES]);
/* n_term: the last dimension, n_in of A and the rank of B. */
bi_weightgen lora_recipe_of(uint64_t seed, const char *tensor_name, int is_b, int32_t n_term);

#endif
