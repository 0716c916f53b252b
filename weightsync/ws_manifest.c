/* Manifests of adapters; see ws_manifest.h. */
#include "ws_manifest.h"

#include "br_mem.h"
#include "lora_file.h"
#include "lora_recipe.h"
#include "ws_long.h"

#include <string.h>

br_status ws_manifest_open(ws_manifest *manifest, const br_config *config) {
    *manifest = (ws_manifest){.config = config, .n_map = lora_map_count(config)};
    BR_TRY(br_mem_alloc((void **)&manifest->map, (size_t)manifest->n_map * sizeof *manifest->map, "the maps of a model"));
    lora_maps_of(config, manifest->map);
    BR_TRY(lora_text_open(config, &manifest->text));
    BR_TRY(br_mem_alloc((void **)&manifest->plan, (size_t)manifest->n_map * sizeof *manifest->plan, "a plan of an adapter"));
    BR_TRY(br_mem_alloc((void **)&manifest->order, 2 * (size_t)manifest->n_map * sizeof *manifest->order, "a plan of an adapter"));
    return br_mem_alloc((void **)&manifest->touched, (size_t)manifest->n_map * sizeof *manifest->touched, "a plan of an adapter");
}

void ws_manifest_close(ws_manifest *manifest) {
    lora_text_close(&manifest->text);
    br_mem_free(manifest->map);
    br_mem_free(manifest->touched);
    br_mem_free(manifest->order);
    br_mem_free(manifest->plan);
    *manifest = (ws_manifest){0};
}

static br_digest digest_of(const ws_manifest *manifest) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    for (int64_t i = 0; i < manifest->n_tensor; i++) {
        char name[BR_NAME_BYTES];
        const ws_tensor t = ws_manifest_at(manifest, i);
        const lora_scale *scale = &manifest->plan[t.map];
        const int32_t number[5] = {t.is_b, BR_DTYPE_BF16, t.n_row, t.n_col, scale->rslora};
        ws_manifest_name(manifest, i, name);
        br_hash_add(&stream, name, strlen(name) + 1);
        br_hash_add(&stream, number, sizeof number);
        br_hash_add(&stream, &scale->alpha, sizeof scale->alpha);
    }
    return br_hash_end(&stream);
}

static uint64_t bytes_at(const ws_manifest *manifest, int64_t i) {
    const ws_tensor t = ws_manifest_at(manifest, i);
    return ws_tensor_bytes(&t);
}

static void order(ws_manifest *manifest) {
    const int64_t n = manifest->n_tensor;
    uint64_t sum = 0;
    int64_t k = 0;
    for (int64_t i = 0; i < n; i++)
        sum += bytes_at(manifest, i);
    for (int is_long = 1; is_long >= 0; is_long--)
        for (int64_t i = 0; i < n; i++)
            if (ws_is_long(bytes_at(manifest, i), sum, (uint64_t)n) == is_long)
                manifest->order[k++] = (int32_t)i;
}

void ws_manifest_set(ws_manifest *manifest, const lora_scale *plan) {
    memmove(manifest->plan, plan, (size_t)manifest->n_map * sizeof *plan);
    manifest->n_tensor = 0;
    for (int64_t i = 0; i < manifest->n_map; i++) {
        if (!plan[i].rank)
            continue;
        manifest->touched[manifest->n_tensor / 2] = i;
        manifest->n_tensor += 2;
    }
    order(manifest);
    lora_text_set(&manifest->text, manifest->config, plan);
    manifest->digest = digest_of(manifest);
}

ws_tensor ws_manifest_at(const ws_manifest *manifest, int64_t i) {
    BR_ASSERT(i >= 0 && i < manifest->n_tensor);
    const int64_t at = manifest->touched[i / 2];
    const int32_t is_b = (int32_t)(i % 2), rank = manifest->plan[at].rank;
    const lora_map *map = &manifest->map[at];
    return (ws_tensor){.map = at, .cls = map->cls, .layer = map->layer, .expert = map->expert, .is_b = is_b, .rank = rank,
                       .n_row = is_b ? map->n_out : rank, .n_col = is_b ? rank : map->n_in};
}

void ws_manifest_name(const ws_manifest *manifest, int64_t i, char name[BR_NAME_BYTES]) {
    const ws_tensor t = ws_manifest_at(manifest, i);
    lora_recipe_name(manifest->config, t.cls, t.layer, t.expert, t.is_b, name);
}

br_status ws_manifest_find(const ws_manifest *manifest, const char *name, int64_t *i) {
    lora_key key;
    *i = -1;
    if (lora_key_parse("the manifest", manifest->config, name, &key) != BR_OK)
        return br_fail_context(BR_E_NOT_FOUND, "no tensor of this adapter");
    if (key.is_shared)
        return br_fail(BR_E_NOT_FOUND, "tensor '%.200s' is an A that experts share: expected one a expert", name);
    const int64_t map = br_weight_slot(manifest->config, key.cls, key.layer, key.expert);
    for (int64_t low = 0, high = manifest->n_tensor / 2; low < high;) {
        const int64_t middle = (low + high) / 2, at = manifest->touched[middle];
        if (at == map) {
            *i = 2 * middle + key.is_b;
            return BR_OK;
        }
        low = at < map ? middle + 1 : low;
        high = at < map ? high : middle;
    }
    return br_fail(BR_E_NOT_FOUND, "tensor '%.200s': the adapter does not touch its module", name);
}
