/* json_scope: typed reads of keys from JSON objects, each failure a sentence with the key, what was expected and found.
 *
 * Layer: io; includes base and the JSON library. Knows no key. A `names` argument lists the spellings of one key, parted by
 * '|': two of them with different values are refused, null counts as absent. */
#ifndef JSON_SCOPE_H
#define JSON_SCOPE_H

#include "br_status.h"
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* Where keys are looked for: object[0], then object[1] for keys that the first lacks. Either may be NULL. */
typedef struct json_scope {
    const char *what; /* file name, for sentences */
    const json_t *object[2];
} json_scope;

#define JSON_REQUIRED INT32_MIN /* as `absent`: the key must be there */

/* Parses an object; a key that comes twice is refused. The caller releases *out with json_decref. Errors: BR_E_FORMAT. */
br_status json_read_object(const char *what, const char *text, size_t n, json_t **out);

/* *out NULL: absent. */
br_status json_find(const json_scope *scope, const char *names, const json_t **out);
br_status json_find_object(const json_scope *scope, const char *names, const json_t **out);
br_status json_find_text(const json_scope *scope, const char *names, const char **out);

/* An integer min..max that `step` divides. */
typedef struct json_int {
    const char *names;
    int32_t min, max, step, absent;
} json_int;
br_status json_take_int(const json_scope *scope, const json_int *key, int32_t *out);
br_status json_take_flag(const json_scope *scope, const char *names, int32_t absent, int32_t *out);
/* A number min..max, rounded to binary32. *out is left alone when the key is absent and not required. */
br_status json_take_real(const json_scope *scope, const char *names, double min, double max, int required, float *out);

/* BR_E_UNSUPPORTED when the key is there with another value. `feature` says what the other value would mean. */
br_status json_only_int(const json_scope *scope, const char *names, int64_t wanted, const char *feature);
br_status json_only_flag(const json_scope *scope, const char *names, int wanted, const char *feature);
br_status json_only_text(const json_scope *scope, const char *names, const char *wanted, const char *feature);

#endif
