/* libFuzzer target: any bytes as config.json. What loads must have a table of names that agrees with itself. */
#include "br_weights.h"
#include "config_json.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Each slot's name parses back to that slot; a few slots suffice, the table is walked in full elsewhere. */
static void check_names(const br_config *config) {
    const int64_t n = br_weight_expect_count(config);
    for (int64_t i = 0; i < n; i += 1 + n / 64) {
        br_expect want;
        br_class cls;
        int32_t layer, expert;
        char name[BR_NAME_BYTES];
        BR_ASSERT(br_weight_expect(config, i, &want));
        BR_ASSERT(br_weight_slot(config, want.cls, want.layer, want.expert) == i);
        br_weight_name(config, want.cls, want.layer, want.expert, name);
        BR_ASSERT(br_weight_parse(config, name, strlen(name), &cls, &layer, &expert));
        BR_ASSERT(cls == want.cls && layer == want.layer && expert == want.expert);
        for (int32_t d = 0; d < want.n_dim; d++)
            BR_ASSERT(want.dim[d] > 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    br_config config;
    br_class cls;
    int32_t layer, expert;
    if (br_config_parse("fuzz", (const char *)data, size, &config) != BR_OK)
        return 0;
    check_names(&config);
    br_weight_parse(&config, (const char *)data, size, &cls, &layer, &expert);
    return 0;
}
