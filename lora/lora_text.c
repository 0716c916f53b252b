/* The text under an adapter's digest; see lora_text.h. */
#include "lora_text.h"

#include "br_mem.h"
#include "lora_file.h"

#include <string.h>

br_status lora_text_open(const br_config *config, lora_text *out) {
    const size_t n_map = (size_t)lora_map_count(config);
    br_expect map;
    size_t n = 0;
    *out = (lora_text){0};
    for (int64_t i = 0; i < (int64_t)n_map; i++) {
        char name[BR_NAME_BYTES];
        br_weight_expect(config, i, &map);
        n += lora_module_name(config, map.cls, map.layer, map.expert, name) + LORA_DIGEST_SCALE_BYTES + 2 * sizeof(br_digest);
    }
    BR_ASSERT(n <= UINT32_MAX);
    BR_TRY(br_mem_alloc((void **)&out->bytes, n, "the text of an adapter's digest"));
    return br_mem_alloc((void **)&out->at, n_map * sizeof *out->at, "the text of an adapter's digest");
}

void lora_text_close(lora_text *text) {
    br_mem_free(text->bytes);
    br_mem_free(text->at);
    *text = (lora_text){0};
}

void lora_text_set(lora_text *text, const br_config *config, const lora_scale *plan) {
    br_expect map;
    int64_t touched = 0;
    text->n = 0;
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        char name[BR_NAME_BYTES];
        if (!plan[i].rank)
            continue;
        const size_t n = lora_module_name(config, map.cls, map.layer, map.expert, name);
        memcpy(text->bytes + text->n, name, n);
        lora_digest_scale(&plan[i], text->bytes + text->n + n);
        text->n += n + LORA_DIGEST_SCALE_BYTES;
        text->at[touched++] = (uint32_t)text->n;
        text->n += 2 * sizeof(br_digest);
    }
}

void lora_text_put(lora_text *text, int64_t touched, int is_b, br_digest digest) {
    memcpy(text->bytes + text->at[touched] + (is_b ? sizeof digest : 0), &digest, sizeof digest);
}

br_digest lora_text_digest(const lora_text *text) {
    return br_hash_bytes(text->bytes, text->n);
}
