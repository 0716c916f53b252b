/* Fuzz entry of adapter files: bytes up to the first 0 are adapter_config.json, the rest is adapter_model.safetensors, for
 * the preset pico. Whatever comes: a status with a sentence, or a set whose every pair can be read and whose digest repeats.
 */
#include "br_status.h"
#include "config_json.h"
#include "init_presets.h"
#include "lora_slots.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t sum_pairs(const br_config *config, const lora_set *set) {
    br_expect map;
    uint64_t sum = 0;
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        lora_pair pair = lora_pair_of(set, 0, map.cls, map.layer, map.expert);
        BR_ASSERT(!pair.a == !pair.b && pair.rank <= lora_rank_max(set));
        for (int64_t j = 0; pair.a && j < (int64_t)pair.rank * pair.n_in; j++)
            sum += pair.a[j];
        for (int64_t j = 0; pair.b && j < (int64_t)pair.rank * pair.n_out; j++)
            sum += pair.b[j];
    }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static br_config config;
    lora_set *set, *again;
    if (!config.n_layer) {
        const init_preset *pico = init_preset_find("pico");
        br_status status = br_config_parse(pico->name, pico->config_json, strlen(pico->config_json), &config);
        BR_ASSERT(status == BR_OK);
    }
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    const size_t n_json = end ? (size_t)(end - data) : size, n_skip = end ? n_json + 1 : size;
    const char *json = (const char *)data;
    br_status status = lora_parse(&config, "fuzz", json, n_json, data + n_skip, size - n_skip, 0, &set);
    BR_ASSERT((status == BR_OK) == (set != NULL));
    if (status != BR_OK) {
        BR_ASSERT(br_last_error()[0]);
        return 0;
    }
    volatile uint64_t sum = sum_pairs(&config, set);
    (void)sum;
    status = lora_parse(&config, "fuzz", json, n_json, data + n_skip, size - n_skip, 0, &again);
    BR_ASSERT(status == BR_OK && br_digest_equal(lora_digest(set, 0), lora_digest(again, 0)));
    lora_close(again);
    lora_close(set);
    return 0;
}
