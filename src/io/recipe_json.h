/* recipe_json: generated.json, which stands in a folder in place of a checkpoint's or adapter's tensors: they are made from a
 * seed whenever the folder is opened (numeric/bi_weightgen), so tens of gigabytes take no disk and no reading.
 *
 * Layer: io; includes base. A parser of outside files. Knows no tensor. The file is one object of exactly these keys:
 *   "format_version"  RECIPE_FORMAT_VERSION; it rises whenever the same seed would give other bytes
 *   "generates"       "checkpoint" or "adapter"
 *   "preset"          a checkpoint's shape, as `init` names it; an adapter has no such key
 *   "seed"            text of a whole number up to 2^64 - 1, which JSON's numbers need not hold
 *   "config_digest"   32 hex digits: of the model's shape (br_config_digest), so that no other config.json goes with it */
#ifndef RECIPE_JSON_H
#define RECIPE_JSON_H

#include "br_config.h"
#include "br_status.h"
#include <stddef.h>
#include <stdint.h>

#define RECIPE_NAME "generated.json"
enum { RECIPE_FORMAT_VERSION = 1, RECIPE_FILE_BYTES_MAX = 1 << 16, RECIPE_PRESET_BYTES = 64 };

typedef struct recipe_json {
    char preset[RECIPE_PRESET_BYTES]; /* "": of an adapter */
    uint64_t seed;
    br_digest config_digest;
} recipe_json;

/* A folder that has the file. */
int recipe_json_exists(const char *dir);
/* Also refuses a recipe of the other kind and one whose shape is not config's (NULL: not asked). Errors: BR_E_FORMAT naming the key, what was
 * expected and found; BR_E_UNSUPPORTED: another format_version; BR_E_NOT_FOUND, BR_E_IO. */
br_status recipe_json_read(const char *dir, const br_config *config, int is_adapter, recipe_json *out);
br_status recipe_json_parse(const char *what, const char *text, size_t n, const br_config *config, int is_adapter, recipe_json *out);
br_status recipe_json_write(const char *dir, const recipe_json *recipe);
/* BR_E_FORMAT when the folder also has one of the n files, whose tensors would be other ones. */
br_status recipe_json_check_alone(const char *dir, const char *const *file, int32_t n);

#endif
