/* Keys by spelling, ranges and refusals; see json_scope.h. */
#include "json_scope.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FOUND_BYTES = 80, KEY_BYTES = 64 };

static const char *found(const json_t *value, char text[FOUND_BYTES]) {
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    case JSON_NULL: return "null";
    case JSON_STRING: snprintf(text, FOUND_BYTES, "'%.64s'", json_string_value(value)); return text;
    case JSON_INTEGER: snprintf(text, FOUND_BYTES, "%lld", (long long)json_integer_value(value)); return text;
    case JSON_REAL: snprintf(text, FOUND_BYTES, "%.17g", json_real_value(value)); return text;
    }
    return "something else";
}

br_status json_read_object(const char *what, const char *text, size_t n, json_t **out) {
    json_error_t error;
    *out = json_loadb(n ? text : "", n, JSON_REJECT_DUPLICATES, &error);
    if (!*out)
        return br_fail(BR_E_FORMAT, "%s: not JSON, line %d column %d: %s", what, error.line, error.column, error.text);
    if (json_is_object(*out))
        return BR_OK;
    json_decref(*out);
    *out = NULL;
    return br_fail(BR_E_FORMAT, "%s: expected a JSON object", what);
}

static const json_t *lookup(const json_scope *scope, const char *key) {
    for (int i = 0; i < 2; i++) {
        const json_t *value = scope->object[i] ? json_object_get(scope->object[i], key) : NULL;
        if (value && !json_is_null(value))
            return value;
    }
    return NULL;
}

br_status json_find(const json_scope *scope, const char *names, const json_t **out) {
    *out = NULL;
    for (const char *name = names; *name;) {
        char key[KEY_BYTES];
        size_t n = strcspn(name, "|");
        BR_ASSERT(n < sizeof key);
        memcpy(key, name, n);
        key[n] = 0;
        const json_t *value = lookup(scope, key);
        if (value && *out && !json_equal(value, *out))
            return br_fail(BR_E_FORMAT, "%s: two spellings of %s have different values", scope->what, names);
        if (value)
            *out = value;
        name += n + (name[n] == '|');
    }
    return BR_OK;
}

br_status json_find_object(const json_scope *scope, const char *names, const json_t **out) {
    char text[FOUND_BYTES];
    BR_TRY(json_find(scope, names, out));
    if (*out && !json_is_object(*out))
        return br_fail(BR_E_FORMAT, "%s: %s: expected an object, found %s", scope->what, names, found(*out, text));
    return BR_OK;
}

br_status json_find_text(const json_scope *scope, const char *names, const char **out) {
    char text[FOUND_BYTES];
    const json_t *value;
    *out = NULL;
    BR_TRY(json_find(scope, names, &value));
    if (!value)
        return BR_OK;
    if (!json_is_string(value))
        return br_fail(BR_E_FORMAT, "%s: %s: expected text, found %s", scope->what, names, found(value, text));
    *out = json_string_value(value);
    return BR_OK;
}

br_status json_take_int(const json_scope *scope, const json_int *key, int32_t *out) {
    char text[FOUND_BYTES];
    const json_t *value;
    BR_TRY(json_find(scope, key->names, &value));
    if (!value && key->absent == JSON_REQUIRED)
        return br_fail(BR_E_FORMAT, "%s: %s is missing: expected an integer %d to %d", scope->what, key->names, key->min,
                       key->max);
    if (!value) {
        *out = key->absent;
        return BR_OK;
    }
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < key->min || number > key->max)
        return br_fail(BR_E_FORMAT, "%s: %s: expected an integer %d to %d, found %s", scope->what, key->names, key->min,
                       key->max, found(value, text));
    if (number % key->step != 0)
        return br_fail(BR_E_FORMAT, "%s: %s: expected a multiple of %d, found %s", scope->what, key->names, key->step,
                       found(value, text));
    *out = (int32_t)number;
    return BR_OK;
}

br_status json_take_flag(const json_scope *scope, const char *names, int32_t absent, int32_t *out) {
    char text[FOUND_BYTES];
    const json_t *value;
    BR_TRY(json_find(scope, names, &value));
    if (value && !json_is_boolean(value))
        return br_fail(BR_E_FORMAT, "%s: %s: expected true or false, found %s", scope->what, names, found(value, text));
    *out = value ? json_is_true(value) : absent;
    return BR_OK;
}

br_status json_take_real(const json_scope *scope, const char *names, double min, double max, int required, float *out) {
    char text[FOUND_BYTES];
    const json_t *value;
    BR_TRY(json_find(scope, names, &value));
    if (!value && required)
        return br_fail(BR_E_FORMAT, "%s: %s is missing: expected a number %g to %g", scope->what, names, min, max);
    if (!value)
        return BR_OK;
    double number = json_is_number(value) ? json_number_value(value) : (double)NAN;
    if (!(number >= min && number <= max))
        return br_fail(BR_E_FORMAT, "%s: %s: expected a number %g to %g, found %s", scope->what, names, min, max,
                       found(value, text));
    *out = (float)number;
    return BR_OK;
}

static br_status refuse(const json_scope *scope, const char *names, const json_t *value, const char *feature) {
    char text[FOUND_BYTES];
    return br_fail(BR_E_UNSUPPORTED, "%s: %s is %s: %s", scope->what, names, found(value, text), feature);
}

br_status json_only_int(const json_scope *scope, const char *names, int64_t wanted, const char *feature) {
    const json_t *value;
    BR_TRY(json_find(scope, names, &value));
    if (value && !(json_is_integer(value) && json_integer_value(value) == wanted))
        return refuse(scope, names, value, feature);
    return BR_OK;
}

br_status json_only_flag(const json_scope *scope, const char *names, int wanted, const char *feature) {
    const json_t *value;
    BR_TRY(json_find(scope, names, &value));
    if (value && !(json_is_boolean(value) && json_is_true(value) == (wanted != 0)))
        return refuse(scope, names, value, feature);
    return BR_OK;
}

br_status json_only_text(const json_scope *scope, const char *names, const char *wanted, const char *feature) {
    const json_t *value;
    BR_TRY(json_find(scope, names, &value));
    if (value && !(json_is_string(value) && strcmp(json_string_value(value), wanted) == 0))
        return refuse(scope, names, value, feature);
    return BR_OK;
}
