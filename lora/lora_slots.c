/* Adapters by name: files to pairs of matrices, checked; see lora_slots.h. */
#include "lora_slots.h"

#include "br_mem.h"
#include "lora_file.h"
#include "lora_recipe.h"
#include "recipe_json.h"
#include "safetensors.h"

#include <stdio.h>
#include <string.h>

typedef struct lora_adapter {
    char name[LORA_NAME_BYTES_MAX + 1];
    st_file file;
    const unsigned char *bytes; /* of the file */
    lora_pair *pair;            /* (n_map) by br_weight_slot: linear classes are the first slots */
    uint16_t *owned;            /* tensors that could not stay in the file: F32, or at an odd address */
    size_t owned_used;
    bi_weightgen *gen; /* (n_map, 2) A and B of a generated adapter, which has no file */
    int32_t n_pair, has_effect, last_is_zero; /* last: the tensor read last */
    br_digest digest;
} lora_adapter;

struct lora_set {
    br_config config;
    int64_t n_map;
    int32_t n, rank_max;
    lora_adapter adapter[LORA_ADAPTER_MAX];
};

/* ---- one tensor ------------------------------------------------------------------------------------------------------- */

static int is_f32(const st_entry *entry) {
    return strcmp(entry->dtype, "F32") == 0;
}

static int must_copy(const lora_adapter *adapter, const st_entry *entry) {
    return is_f32(entry) || (uintptr_t)(adapter->bytes + entry->begin) % sizeof(uint16_t) != 0;
}

static br_status check_shape(const char *what, const st_entry *entry, int64_t n_row, int64_t n_col) {
    if (strcmp(entry->dtype, "BF16") != 0 && !is_f32(entry))
        return br_fail(BR_E_FORMAT, "%s: tensor '%s' is %s: expected BF16, or F32 that holds bf16 numbers", what,
                       entry->name, entry->dtype);
    if (entry->n_dim != 2 || entry->dim[0] != n_row || entry->dim[1] != n_col)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': expected shape [%lld, %lld], found %d dimensions [%lld, %lld]", what,
                       entry->name, (long long)n_row, (long long)n_col, entry->n_dim,
                       entry->n_dim > 0 ? (long long)entry->dim[0] : 0, entry->n_dim > 1 ? (long long)entry->dim[1] : 0);
    return BR_OK;
}

/* Moves a tensor to the adapter's own memory as bf16. */
static br_status copy_tensor(const char *what, lora_adapter *adapter, const st_entry *entry, int64_t n,
                             const uint16_t **out) {
    const unsigned char *from = adapter->bytes + entry->begin;
    uint16_t *to = adapter->owned + adapter->owned_used;
    if (!is_f32(entry))
        memcpy(to, from, (size_t)n * sizeof *to);
    for (int64_t i = 0; is_f32(entry) && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + (size_t)i * sizeof bits, sizeof bits);
        if (bits & 0xffff)
            return br_fail(BR_E_FORMAT,
                           "%s: tensor '%s' is F32 and element %lld (bits %08x) is no bf16 number: rounding it here would "
                           "run another adapter than the trainer's; write the bf16 values that the trainer computes with",
                           what, entry->name, (long long)i, bits);
        to[i] = (uint16_t)(bits >> 16);
    }
    adapter->owned_used += (size_t)n;
    *out = to;
    return BR_OK;
}

/* Enters one half of one map. */
static br_status put_half(const char *what, const char *name, int is_b, const uint16_t *value, lora_pair half,
                          lora_pair *pair) {
    if (is_b ? pair->b : pair->a)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s' comes twice for its map, here in another spelling", what, name);
    if (pair->rank && pair->rank != half.rank)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s' has rank %d, its other half %d", what, name, half.rank, pair->rank);
    half.a = is_b ? pair->a : value;
    half.b = is_b ? value : pair->b;
    half.alpha = is_b ? half.alpha : pair->alpha;
    *pair = half;
    return BR_OK;
}

static br_status take_values(const char *what, lora_adapter *adapter, const st_entry *entry, int64_t n,
                             const uint16_t **out) {
    uint16_t any = 0;
    if (must_copy(adapter, entry))
        BR_TRY(copy_tensor(what, adapter, entry, n, out));
    else
        *out = (const uint16_t *)(const void *)(adapter->bytes + entry->begin);
    for (int64_t i = 0; i < n; i++) {
        if (((*out)[i] & 0x7f80) == 0x7f80)
            return br_fail(BR_E_FORMAT, "%s: tensor '%s': element %lld is NaN or Inf", what, entry->name, (long long)i);
        any |= (*out)[i] & 0x7fff;
    }
    adapter->last_is_zero = any == 0;
    return BR_OK;
}

static br_status take_tensor(const lora_set *set, const lora_peft *peft, lora_adapter *adapter, const st_entry *entry) {
    const char *what = adapter->file.path;
    const uint16_t *value = NULL;
    lora_key key;
    BR_TRY(lora_key_parse(what, &set->config, entry->name, &key));
    if (peft->targets && !lora_peft_is_target(peft, key.module))
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': target_modules of %s does not name its module", what, entry->name,
                       peft->what);
    lora_pair half = {.rank = lora_peft_rank(peft, key.module), .rslora = peft->rslora};
    if (key.is_b)
        half.alpha = lora_peft_alpha(peft, key.module);
    int found = br_linear_shape(&set->config, key.cls, key.layer, &half.n_out, &half.n_in);
    BR_ASSERT(found);
    const int32_t n_row = key.is_b ? half.n_out : half.rank, n_col = key.is_b ? half.rank : half.n_in;
    BR_TRY(check_shape(what, entry, n_row, n_col));
    BR_TRY(take_values(what, adapter, entry, (int64_t)n_row * n_col, &value));
    adapter->has_effect |= key.is_b && !adapter->last_is_zero && half.alpha != 0;
    const int64_t slot = br_weight_slot(&set->config, key.cls, key.layer, key.expert);
    for (int32_t e = 0; e < (key.is_shared ? set->config.n_expert : 1); e++)
        BR_TRY(put_half(what, entry->name, key.is_b, value, half, &adapter->pair[slot + e]));
    return BR_OK;
}

/* ---- one adapter ------------------------------------------------------------------------------------------------------ */

static br_digest digest_of(const uint16_t *value, const bi_weightgen *gen, int64_t n) {
    return gen ? lora_digest_recipe(gen) : lora_digest_matrix(value, n);
}

/* Each map has both halves or none, and those of target_modules have both. Also the digest. */
static br_status check_pairs(const lora_set *set, const lora_peft *peft, lora_adapter *adapter) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    for (int64_t i = 0; i < set->n_map; i++) {
        const lora_pair *pair = &adapter->pair[i];
        br_expect map;
        char name[BR_NAME_BYTES];
        br_weight_expect(&set->config, i, &map);
        size_t n = lora_module_name(&set->config, map.cls, map.layer, map.expert, name);
        int has_a = pair->a || pair->gen_a, has_b = pair->b || pair->gen_b;
        int wanted = has_a || has_b || (peft->targets_are_all && lora_peft_is_target(peft, (lora_module){name, n}));
        if (wanted && !(has_a && has_b))
            return br_fail(BR_E_FORMAT, "%s: the tensor lora_%s of module %s is missing", adapter->file.path, has_a ? "B" : "A", name);
        if (!wanted)
            continue;
        adapter->n_pair++;
        const lora_scale scale = lora_pair_scale(pair);
        lora_digest_add(&stream, name, n, &scale, digest_of(pair->a, pair->gen_a, (int64_t)pair->rank * pair->n_in),
                        digest_of(pair->b, pair->gen_b, (int64_t)pair->rank * pair->n_out));
    }
    adapter->digest = br_hash_end(&stream);
    return BR_OK;
}

static br_status alloc_adapter(const lora_set *set, lora_adapter *adapter) {
    size_t n_owned = 0;
    void *block;
    for (int64_t i = 0; i < adapter->file.n_entry; i++) {
        const st_entry *entry = &adapter->file.entry[i];
        if (must_copy(adapter, entry))
            n_owned += entry->n_byte / (is_f32(entry) ? sizeof(uint32_t) : sizeof(uint16_t));
    }
    BR_TRY(br_mem_alloc(&block, n_owned * sizeof(uint16_t), "an adapter's converted tensors"));
    adapter->owned = block;
    BR_TRY(br_mem_alloc(&block, (size_t)set->n_map * sizeof(lora_pair), "an adapter's table of maps"));
    adapter->pair = block;
    return BR_OK;
}

static br_status check_adapter(lora_set *set, const lora_peft *peft, int32_t allow_zero, lora_adapter *adapter) {
    const char *what = adapter->gen ? peft->what : adapter->file.path;
    BR_TRY(check_pairs(set, peft, adapter));
    BR_TRY(lora_peft_check_patterns(peft));
    if (adapter->n_pair == 0)
        return br_fail(BR_E_FORMAT, "%s: no tensors: expected an adapter on at least one linear map", what);
    if (!adapter->has_effect && !allow_zero)
        return br_fail(BR_E_FORMAT, "%s: every B or its alpha is zero: expected an adapter that has an effect, or --allow-zero-adapter",
                       what);
    for (int64_t i = 0; i < set->n_map; i++)
        if (adapter->pair[i].rank > set->rank_max)
            set->rank_max = adapter->pair[i].rank;
    return BR_OK;
}

static br_status build_adapter(lora_set *set, const lora_peft *peft, int32_t allow_zero, lora_adapter *adapter) {
    BR_TRY(lora_peft_check_targets(peft, &set->config));
    BR_TRY(alloc_adapter(set, adapter));
    for (int64_t i = 0; i < adapter->file.n_entry; i++)
        BR_TRY(take_tensor(set, peft, adapter, &adapter->file.entry[i]));
    return check_adapter(set, peft, allow_zero, adapter);
}

static bi_weightgen recipe_of(const lora_set *set, const br_expect *map, uint64_t seed, int is_b, int32_t n_term) {
    char name[BR_NAME_BYTES];
    lora_recipe_name(&set->config, map->cls, map->layer, map->expert, is_b, name);
    return lora_recipe_of(seed, name, is_b, n_term);
}

/* No tensors: the maps are those that the targets name. */
static br_status make_adapter(lora_set *set, const lora_peft *peft, uint64_t seed, int32_t allow_zero, lora_adapter *adapter) {
    if (!peft->targets)
        return br_fail(BR_E_FORMAT, "%s: target_modules: expected a list of names, which a generated adapter is made for", peft->what);
    BR_TRY(lora_peft_check_targets(peft, &set->config));
    BR_TRY(br_mem_alloc((void **)&adapter->gen, 2 * (size_t)set->n_map * sizeof *adapter->gen, "recipes of an adapter"));
    BR_TRY(alloc_adapter(set, adapter));
    for (int64_t i = 0; i < set->n_map; i++) {
        br_expect map;
        char name[BR_NAME_BYTES];
        br_weight_expect(&set->config, i, &map);
        const lora_module module = {.text = name, .n = lora_module_name(&set->config, map.cls, map.layer, map.expert, name)};
        if (!lora_peft_is_target(peft, module))
            continue;
        lora_pair *pair = &adapter->pair[i];
        bi_weightgen *gen = &adapter->gen[2 * i];
        *pair = (lora_pair){.rank = lora_peft_rank(peft, module), .alpha = lora_peft_alpha(peft, module), .rslora = peft->rslora,
                            .gen_a = &gen[0], .gen_b = &gen[1]};
        br_linear_shape(&set->config, map.cls, map.layer, &pair->n_out, &pair->n_in);
        gen[0] = recipe_of(set, &map, seed, 0, pair->n_in);
        gen[1] = recipe_of(set, &map, seed, 1, pair->rank);
        adapter->has_effect |= pair->alpha != 0;
    }
    return check_adapter(set, peft, allow_zero, adapter);
}

static br_status open_tensors(const lora_set *set, const char *dir, lora_adapter *adapter, recipe_json *recipe) {
    static const char *const TENSORS[] = {"adapter_model.safetensors"};
    char path[BR_PATH_BYTES];
    if (recipe_json_exists(dir)) {
        BR_TRY(recipe_json_check_alone(dir, TENSORS, 1));
        return recipe_json_read(dir, &set->config, 1, recipe);
    }
    BR_TRY(br_file_join(path, dir, TENSORS[0]));
    BR_TRY(st_open(path, &adapter->file));
    adapter->bytes = adapter->file.map.bytes;
    return BR_OK;
}

static br_status read_adapter(lora_set *set, const char *dir, int32_t allow_zero, lora_adapter *adapter) {
    br_status status;
    br_map json = {0};
    lora_peft peft = {0};
    recipe_json recipe = {0};
    char path[BR_PATH_BYTES];
    BR_TRY_GOTO(open_tensors(set, dir, adapter, &recipe), exit);
    BR_TRY_GOTO(br_file_join(path, dir, "adapter_config.json"), exit);
    BR_TRY_GOTO(br_file_map(path, &json), exit);
    BR_TRY_GOTO(lora_peft_parse(path, (const char *)json.bytes, json.n, &peft), exit);
    if (adapter->bytes)
        BR_TRY_GOTO(build_adapter(set, &peft, allow_zero, adapter), exit);
    else
        BR_TRY_GOTO(make_adapter(set, &peft, recipe.seed, allow_zero, adapter), exit);
exit:
    lora_peft_close(&peft);
    br_file_unmap(&json);
    return status;
}

static br_status empty_adapter(const lora_set *set, lora_adapter *adapter) {
    return br_mem_alloc((void **)&adapter->pair, (size_t)set->n_map * sizeof *adapter->pair, "an adapter's table of maps");
}

/* ---- the set ---------------------------------------------------------------------------------------------------------- */

static br_status name_adapter(lora_set *set, const char *name) {
    int printable = name && name[0];
    for (const char *at = name; printable && *at; at++)
        printable = (unsigned char)*at >= 0x20 && *at != 0x7f; /* as in prompts: names stand in lines of reports */
    if (!printable || strlen(name) > LORA_NAME_BYTES_MAX || strcmp(name, "base") == 0)
        return br_fail(BR_E_ARG, "adapter name '%.80s': expected 1 to %d bytes, no control characters, not \"base\"", name ? name : "",
                       LORA_NAME_BYTES_MAX);
    if (lora_find(set, name) >= 0)
        return br_fail(BR_E_ARG, "adapter name '%s' comes twice", name);
    strcpy(set->adapter[set->n++].name, name);
    return BR_OK;
}

static br_status new_set(const br_config *config, lora_set **out) {
    void *block;
    br_expect map;
    *out = NULL;
    BR_TRY(br_mem_alloc(&block, sizeof(lora_set), "a set of adapters"));
    *out = block;
    (*out)->config = *config;
    while (br_weight_expect(config, (*out)->n_map, &map) && map.cls < BR_CLASS_LORA_END)
        (*out)->n_map++;
    return BR_OK;
}

static br_status give_set(br_status status, lora_set **out) {
    if (status == BR_OK)
        return BR_OK;
    lora_close(*out);
    *out = NULL;
    return status;
}

br_status lora_open(const br_config *config, const br_adapter_source *source, int32_t n_source, int32_t allow_zero,
                    lora_set **out) {
    br_status status;
    *out = NULL;
    if (n_source < 0 || n_source > LORA_ADAPTER_MAX)
        return br_fail(BR_E_LIMIT, "%d adapters: expected 0 to %d", n_source, LORA_ADAPTER_MAX);
    if (n_source > 0 && !source)
        return br_fail(BR_E_ARG, "%d adapters, but no list of them", n_source);
    BR_TRY_GOTO(new_set(config, out), exit);
    for (int32_t i = 0; i < n_source; i++) {
        BR_TRY_GOTO(name_adapter(*out, source[i].name), exit);
        if (source[i].dir)
            status = read_adapter(*out, source[i].dir, allow_zero, &(*out)->adapter[i]);
        else
            status = empty_adapter(*out, &(*out)->adapter[i]);
        if (status != BR_OK) {
            br_fail_context(status, "adapter '%s'", source[i].name);
            goto exit;
        }
    }
exit:
    return give_set(status, out);
}

br_status lora_parse(const br_config *config, const char *name, const char *json, size_t n_json,
                     const unsigned char *tensors, size_t n_tensors, int32_t allow_zero, lora_set **out) {
    br_status status;
    lora_peft peft = {0};
    BR_TRY_GOTO(new_set(config, out), exit);
    BR_TRY_GOTO(name_adapter(*out, name), exit);
    lora_adapter *adapter = &(*out)->adapter[0];
    BR_TRY_GOTO(st_parse("adapter_model.safetensors", tensors, n_tensors, &adapter->file), exit);
    adapter->bytes = tensors;
    BR_TRY_GOTO(lora_peft_parse("adapter_config.json", json, n_json, &peft), exit);
    BR_TRY_GOTO(build_adapter(*out, &peft, allow_zero, adapter), exit);
exit:
    lora_peft_close(&peft);
    return give_set(status, out);
}

void lora_close(lora_set *set) {
    for (int32_t i = 0; set && i < set->n; i++) {
        st_close(&set->adapter[i].file);
        br_mem_free(set->adapter[i].owned);
        br_mem_free(set->adapter[i].pair);
        br_mem_free(set->adapter[i].gen);
    }
    br_mem_free(set);
}

int32_t lora_count(const lora_set *set) {
    return set->n;
}

const char *lora_name(const lora_set *set, int32_t slot) {
    return set->adapter[slot].name;
}

int32_t lora_find(const lora_set *set, const char *name) {
    for (int32_t i = 0; i < set->n; i++)
        if (strcmp(set->adapter[i].name, name) == 0)
            return i;
    return -1;
}

br_digest lora_digest(const lora_set *set, int32_t slot) {
    return set->adapter[slot].digest;
}

int lora_is_generated(const lora_set *set, int32_t slot) {
    return set->adapter[slot].gen != NULL;
}

lora_pair lora_pair_of(const lora_set *set, int32_t slot, br_class cls, int32_t layer, int32_t expert) {
    int64_t i = cls < BR_CLASS_LORA_END ? br_weight_slot(&set->config, cls, layer, expert) : -1;
    return i < 0 ? (lora_pair){0} : set->adapter[slot].pair[i];
}

int32_t lora_rank_max(const lora_set *set) {
    return set->rank_max;
}
