/* config_json: a published config.json into br_config. Layer: io; includes base. A parser of outside files (fuzzed).
 * Accepts text fields at top level or in "text_config", "dsa_config" nested or flat index_* keys, and the aliases of the
 * field (num_experts / n_routed_experts / num_local_experts, ...). Dispatches on the top "architectures". Unknown keys are
 * ignored: published files carry many that move no number. *out is all zero on error. Errors:
 * BR_E_FORMAT naming the key, what was expected and found; BR_E_UNSUPPORTED naming a feature (rope, groups, other act). */
#ifndef CONFIG_JSON_H
#define CONFIG_JSON_H
#include "br_config.h"
#include "br_status.h"
#include <stddef.h>

enum { BR_CONFIG_BYTES_MAX = 1 << 20 };

br_status br_config_read(const char *model_dir, br_config *out); /* also BR_E_NOT_FOUND, BR_E_IO */
br_status br_config_parse(const char *what, const char *text, size_t n, br_config *out); /* what: for messages */
#endif
