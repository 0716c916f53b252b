/* Which recipe each tensor gets, and opening either form; see checkpoint.h. */
#include "checkpoint.h"

#include "config_json.h"
#include "init_presets.h"
#include "recipe_json.h"

#include <stdio.h>
#include <string.h>

typedef struct drawing {
    const br_config *config;
    uint64_t seed;
} drawing;

/* Summed terms that one element of the last dimension stands for. */
static int32_t terms_of_element(const br_tensor *t) {
    if (t->dtype != BR_DTYPE_U8)
        return 1;
    return t->cls < BR_CLASS_LORA_END ? 2 : 32; /* two MXFP4 codes a byte, one scale a group */
}

static void draw(void *context, br_tensor *t, bi_weightgen *gen) {
    const drawing *d = context;
    const br_config *c = d->config;
    const init_recipe recipe = init_recipe_of(c, t->cls);
    const int is_fp4 = c->experts_fp4 && t->cls >= BR_W_EXPERT_W1 && t->cls <= BR_W_EXPERT_W2_SCALE;
    t->dtype = is_fp4 ? BR_DTYPE_U8 : recipe.is_f32 ? BR_DTYPE_F32 : BR_DTYPE_BF16;
    if (t->cls == BR_W_KDA_A_LOG)
        t->n_drawn = (uint64_t)c->kda_n_head; /* published padding holds zeros */
    const int32_t fan = recipe.fan_in ? (int32_t)t->dim[t->n_dim - 1] * terms_of_element(t) : 1;
    const bi_weightgen_kind kind = is_fp4 ? BI_WEIGHTGEN_FP4 : recipe.kind;
    *gen = bi_weightgen_make(bi_weightgen_key(d->seed, t->name), kind, recipe.offset, recipe.spread, fan);
}

br_status checkpoint_generate(const char *preset, uint64_t seed, const br_config *config, br_weights **out) {
    drawing d = {.config = config, .seed = seed};
    char origin[128];
    br_hash_stream stream;
    const br_digest shape = br_config_digest(config);
    const uint64_t number[4] = {RECIPE_FORMAT_VERSION, seed, shape.hi, shape.lo};
    snprintf(origin, sizeof origin, "preset %s, seed %llu, recipes of version %d", preset, (unsigned long long)seed, RECIPE_FORMAT_VERSION);
    br_hash_begin(&stream);
    br_hash_add(&stream, number, sizeof number);
    return br_weights_generate(config, origin, br_hash_end(&stream), draw, &d, out);
}

br_status checkpoint_check_no_files(const char *dir) {
    static const char *const TENSORS[] = {"model.safetensors.index.json", "model.safetensors"};
    return recipe_json_check_alone(dir, TENSORS, 2);
}

/* The name says which shape: one that an edited file gives to another is refused. */
static br_status check_preset(const char *dir, const recipe_json *recipe) {
    const init_preset *preset = init_preset_find(recipe->preset);
    br_config config;
    if (!preset)
        return br_fail(BR_E_UNSUPPORTED, "%s/" RECIPE_NAME ": preset '%s' is not one of this build", dir, recipe->preset);
    BR_TRY(br_config_parse(preset->name, preset->config_json, strlen(preset->config_json), &config));
    if (!br_digest_equal(br_config_digest(&config), recipe->config_digest))
        return br_fail(BR_E_FORMAT, "%s/" RECIPE_NAME ": preset '%s' has another shape than config.json", dir, recipe->preset);
    return BR_OK;
}

static br_status open_generated(const char *dir, const br_config *config, br_weights **out) {
    recipe_json recipe;
    *out = NULL;
    BR_TRY(checkpoint_check_no_files(dir));
    BR_TRY(recipe_json_read(dir, config, 0, &recipe));
    BR_TRY(check_preset(dir, &recipe));
    return checkpoint_generate(recipe.preset, recipe.seed, config, out);
}

br_status checkpoint_open(const char *dir, const br_config *config, br_weights **out) {
    return recipe_json_exists(dir) ? open_generated(dir, config, out) : br_weights_open(dir, config, out);
}

br_status checkpoint_survey(const char *dir, const br_config *config, br_weights **out) {
    return recipe_json_exists(dir) ? open_generated(dir, config, out) : br_weights_survey(dir, config, out);
}
