/* Reading and writing generated.json; see recipe_json.h. */
#include "recipe_json.h"

#include "br_file.h"
#include "br_hash.h"
#include "json_scope.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A key of a later format could change what is made. */
static br_status check_keys(const char *what, const json_t *root, int is_adapter) {
    static const char *const KNOWN[] = {"format_version", "generates", "seed", "config_digest", "preset"};
    const size_t n_known = sizeof KNOWN / sizeof KNOWN[0] - (is_adapter ? 1 : 0);
    const char *key;
    const json_t *value;
    json_object_foreach((json_t *)(uintptr_t)root, key, value) {
        size_t i = 0;
        while (i < n_known && strcmp(KNOWN[i], key) != 0)
            i++;
        if (i == n_known)
            return br_fail(BR_E_FORMAT, "%s: key '%.100s' is not one of a recipe's", what, key);
    }
    return BR_OK;
}

static br_status take_text(const json_scope *scope, const char *key, const char **out) {
    BR_TRY(json_find_text(scope, key, out));
    return *out ? BR_OK : br_fail(BR_E_FORMAT, "%s: %s is missing", scope->what, key);
}

static br_status take_seed(const json_scope *scope, uint64_t *out) {
    const char *text;
    char *end;
    BR_TRY(take_text(scope, "seed", &text));
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno)
        return br_fail(BR_E_FORMAT, "%s: seed '%.40s': expected text of a whole number from 0 to 2^64 - 1", scope->what, text);
    return BR_OK;
}

static br_status take_shape(const json_scope *scope, const br_config *config, br_digest *out) {
    const char *text;
    char half[17] = "", wanted[BR_DIGEST_TEXT_BYTES];
    BR_TRY(take_text(scope, "config_digest", &text));
    if (strlen(text) != BR_DIGEST_TEXT_BYTES - 1 || strspn(text, "0123456789abcdef") != BR_DIGEST_TEXT_BYTES - 1)
        return br_fail(BR_E_FORMAT, "%s: config_digest '%.40s': expected 32 hex digits", scope->what, text);
    memcpy(half, text, 16);
    *out = (br_digest){.hi = strtoull(half, NULL, 16), .lo = strtoull(text + 16, NULL, 16)};
    if (!config)
        return BR_OK;
    br_digest_text(br_config_digest(config), wanted);
    if (strcmp(text, wanted) != 0)
        return br_fail(BR_E_FORMAT, "%s: config_digest %.40s: the model's config.json has another shape, %s", scope->what, text, wanted);
    return BR_OK;
}

static br_status take_all(const json_scope *scope, const br_config *config, int is_adapter, recipe_json *out) {
    static const json_int VERSION = {.names = "format_version", .min = 1, .max = INT_MAX, .step = 1, .absent = JSON_REQUIRED};
    const char *kind, *preset, *const wanted = is_adapter ? "adapter" : "checkpoint";
    int32_t version;
    BR_TRY(json_take_int(scope, &VERSION, &version));
    if (version != RECIPE_FORMAT_VERSION)
        return br_fail(BR_E_UNSUPPORTED, "%s: format_version %d: this build makes version %d", scope->what, version, RECIPE_FORMAT_VERSION);
    BR_TRY(take_text(scope, "generates", &kind));
    if (strcmp(kind, wanted) != 0)
        return br_fail(BR_E_FORMAT, "%s: generates '%.40s': expected '%s'", scope->what, kind, wanted);
    BR_TRY(check_keys(scope->what, scope->object[0], is_adapter));
    BR_TRY(take_seed(scope, &out->seed));
    BR_TRY(take_shape(scope, config, &out->config_digest));
    if (is_adapter)
        return BR_OK;
    BR_TRY(take_text(scope, "preset", &preset));
    if (!preset[0] || strlen(preset) >= RECIPE_PRESET_BYTES)
        return br_fail(BR_E_FORMAT, "%s: preset '%.80s': expected 1 to %d bytes", scope->what, preset, RECIPE_PRESET_BYTES - 1);
    memcpy(out->preset, preset, strlen(preset) + 1);
    return BR_OK;
}

br_status recipe_json_parse(const char *what, const char *text, size_t n, const br_config *config, int is_adapter, recipe_json *out) {
    json_t *root = NULL;
    memset(out, 0, sizeof *out);
    if (n > RECIPE_FILE_BYTES_MAX)
        return br_fail(BR_E_FORMAT, "%s: %zu bytes: expected at most %d", what, n, RECIPE_FILE_BYTES_MAX);
    BR_TRY(json_read_object(what, text, n, &root));
    const json_scope scope = {.what = what, .object = {root}};
    br_status status = take_all(&scope, config, is_adapter, out);
    json_decref(root);
    return status;
}

int recipe_json_exists(const char *dir) {
    char path[BR_PATH_BYTES];
    return br_file_join(path, dir, RECIPE_NAME) == BR_OK && br_file_exists(path);
}

br_status recipe_json_read(const char *dir, const br_config *config, int is_adapter, recipe_json *out) {
    char path[BR_PATH_BYTES];
    br_map map;
    memset(out, 0, sizeof *out);
    BR_TRY(br_file_join(path, dir, RECIPE_NAME));
    BR_TRY(br_file_map(path, &map));
    br_status status = recipe_json_parse(path, (const char *)map.bytes, map.n, config, is_adapter, out);
    br_file_unmap(&map);
    return status;
}

br_status recipe_json_write(const char *dir, const recipe_json *recipe) {
    char path[BR_PATH_BYTES], text[512], hex[BR_DIGEST_TEXT_BYTES];
    const int is_adapter = !recipe->preset[0];
    br_digest_text(recipe->config_digest, hex);
    int n = snprintf(text, sizeof text, "{\n  \"format_version\": %d,\n  \"generates\": \"%s\",\n", RECIPE_FORMAT_VERSION,
                     is_adapter ? "adapter" : "checkpoint");
    if (!is_adapter)
        n += snprintf(text + n, sizeof text - (size_t)n, "  \"preset\": \"%s\",\n", recipe->preset);
    n += snprintf(text + n, sizeof text - (size_t)n, "  \"seed\": \"%llu\",\n  \"config_digest\": \"%s\"\n}\n",
                  (unsigned long long)recipe->seed, hex);
    BR_ASSERT(n > 0 && (size_t)n < sizeof text);
    BR_TRY(br_file_join(path, dir, RECIPE_NAME));
    return br_file_write(path, text, (size_t)n);
}

br_status recipe_json_check_alone(const char *dir, const char *const *file, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        char path[BR_PATH_BYTES];
        BR_TRY(br_file_join(path, dir, file[i]));
        if (!br_file_exists(path))
            continue;
        if (recipe_json_exists(dir))
            return br_fail(BR_E_FORMAT, "%s: both " RECIPE_NAME " and %s are there: expected one of them", dir, file[i]);
        return br_fail(BR_E_ARG, "%s: %s is there: expected a folder without files of tensors for " RECIPE_NAME "; delete its *.safetensors%s first",
                       dir, file[i], strstr(file[i], ".index.json") ? " and their index" : "");
    }
    return BR_OK;
}
