/* Plans of adapters; see lora_plan.h. */
#include "lora_plan.h"

#include "lora_file.h"

int64_t lora_map_count(const br_config *config) {
    br_expect map;
    int64_t n = 0;
    while (br_weight_expect(config, n, &map) && map.cls < BR_CLASS_LORA_END)
        n++;
    return n;
}

void lora_maps_of(const br_config *config, lora_map *map) {
    br_expect at;
    for (int64_t i = 0; br_weight_expect(config, i, &at) && at.cls < BR_CLASS_LORA_END; i++) {
        map[i] = (lora_map){.cls = at.cls, .layer = at.layer, .expert = at.expert};
        br_linear_shape(config, at.cls, at.layer, &map[i].n_out, &map[i].n_in);
    }
}

void lora_plan_all(const br_config *config, lora_scale scale, lora_scale *plan) {
    for (int64_t i = 0, n = lora_map_count(config); i < n; i++)
        plan[i] = scale;
}

void lora_plan_of(const lora_set *set, const br_config *config, int32_t slot, lora_scale *plan) {
    br_expect map;
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        const lora_pair pair = lora_pair_of(set, slot, map.cls, map.layer, map.expert);
        plan[i] = lora_pair_scale(&pair);
    }
}

static br_status take_maps(const br_config *config, const lora_peft *peft, lora_scale *plan) {
    br_expect map;
    int64_t n_named = 0;
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        char name[BR_NAME_BYTES];
        const lora_module module = {.text = name, .n = lora_module_name(config, map.cls, map.layer, map.expert, name)};
        plan[i] = (lora_scale){0};
        if (!lora_peft_is_target(peft, module))
            continue;
        plan[i] = (lora_scale){.rank = lora_peft_rank(peft, module), .alpha = lora_peft_alpha(peft, module), .rslora = peft->rslora};
        n_named++;
    }
    if (n_named == 0)
        return br_fail(BR_E_FORMAT, "%s: target_modules names no map of this model", peft->what);
    return lora_peft_check_patterns(peft);
}

br_status lora_plan_parse(const br_config *config, const char *what, const char *json, size_t n, lora_scale *plan) {
    br_status status;
    lora_peft peft = {0};
    BR_TRY_GOTO(lora_peft_parse(what, json, n, &peft), exit);
    BR_TRY_GOTO(lora_peft_check_targets(&peft, config), exit);
    if (peft.targets_are_all)
        BR_TRY_GOTO(take_maps(config, &peft, plan), exit);
    else
        status = br_fail(BR_E_FORMAT, "%s: target_modules: expected a list of names, and nothing that takes modules away from it", what);
exit:
    lora_peft_close(&peft);
    return status;
}

br_status lora_plan_check_rank(const br_config *config, const lora_scale *plan, int32_t rank_max) {
    br_expect map;
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        char name[BR_NAME_BYTES];
        if (plan[i].rank <= rank_max)
            continue;
        lora_module_name(config, map.cls, map.layer, map.expert, name);
        return br_fail(BR_E_LIMIT, "rank %d on %s: expected at most %d, which the engine has room for", plan[i].rank, name, rank_max);
    }
    return BR_OK;
}
