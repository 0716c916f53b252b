/* lora_plan: which maps an adapter touches, at what rank and scale, before any value of it is there.
 *
 * Layer: lora; includes base, weights (names). A plan is an array (lora_map_count) of lora_scale in the order of br_weight_expect, whose
 * first entries are the maps that can carry an adapter. */
#ifndef LORA_PLAN_H
#define LORA_PLAN_H

#include "lora_slots.h"

int64_t lora_map_count(const br_config *config);
/* Such a map; (lora_map_count) of them, for those who look at each again and again. */
typedef struct lora_map {
    br_class cls;
    int32_t layer, expert, n_out, n_in; /* expert -1: not of an expert */
} lora_map;
void lora_maps_of(const br_config *config, lora_map *map);
/* Every map alike. */
void lora_plan_all(const br_config *config, lora_scale scale, lora_scale *plan);
/* Of a loaded adapter. */
void lora_plan_of(const lora_set *set, const br_config *config, int32_t slot, lora_scale *plan);
/* From the text of an adapter_config.json: the maps that target_modules names, which must be a list, with rank_pattern, alpha_pattern
 * and use_rslora. Errors: as lora_open; BR_E_FORMAT also when no map is named. *plan is not valid then. */
br_status lora_plan_parse(const br_config *config, const char *what, const char *json, size_t n, lora_scale *plan);
/* BR_E_LIMIT naming the first map whose rank is above rank_max. */
br_status lora_plan_check_rank(const br_config *config, const lora_scale *plan, int32_t rank_max);

#endif
