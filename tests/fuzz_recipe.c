/* libFuzzer target: any bytes as generated.json, of a checkpoint and of an adapter. What is accepted keeps the promises of
 * recipe_json.h. */
#include "recipe_json.h"

#include <stdint.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *text = size ? (const char *)data : "";
    for (int is_adapter = 0; is_adapter < 2; is_adapter++) {
        recipe_json recipe;
        if (recipe_json_parse("fuzz", text, size, NULL, is_adapter, &recipe) != BR_OK)
            continue;
        const size_t n = strnlen(recipe.preset, sizeof recipe.preset);
        BR_ASSERT(n < sizeof recipe.preset && (n == 0) == is_adapter);
    }
    return 0;
}
