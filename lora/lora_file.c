/* PEFT's config keys, patterns and tensor names; see lora_file.h. */
#include "lora_file.h"

#include "br_mem.h"
#include "json_scope.h"
#include "lora_slots.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ALPHA_MAX 65536.0

static const char SIGNS[] = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
static const char OPERATORS[] = "*+?()[]{}|^$";

/* ---- patterns --------------------------------------------------------------------------------------------------------- */

/* The key without a leading '^' and a closing '$'. */
static lora_module pattern_body(const char *key) {
    size_t n = strlen(key), skip = key[0] == '^';
    int is_closed = n > skip && key[n - 1] == '$' && !(n > skip + 1 && key[n - 2] == '\\');
    return (lora_module){.text = key + skip, .n = n - skip - (size_t)is_closed};
}

static int is_run(lora_module key, size_t i) {
    return i + 1 < key.n && key.text[i] == '.' && key.text[i + 1] == '*';
}

static int pattern_is_read(const char *key) {
    lora_module body = pattern_body(key);
    for (size_t i = 0; i < body.n;) {
        if (is_run(body, i)) {
            i += 2;
        } else if (body.text[i] == '\\') {
            if (i + 1 >= body.n || !strchr(SIGNS, body.text[i + 1]))
                return 0;
            i += 2;
        } else if (strchr(OPERATORS, body.text[i])) {
            return 0;
        } else {
            i++;
        }
    }
    return body.n > 0;
}

/* The whole of `text`. A run takes as little as it can and is given one byte more whenever the rest fails: giving it to the
 * last run only is enough, since what an earlier run could reach the last one can reach too. */
static int pattern_matches_whole(lora_module key, const char *text, size_t n) {
    size_t i = 0, j = 0, run = SIZE_MAX, run_text = 0;
    while (j < n || i < key.n) {
        int escaped = i < key.n && key.text[i] == '\\';
        if (is_run(key, i)) {
            i += 2;
            run = i;
            run_text = j;
        } else if (i < key.n && j < n && (key.text[i + (size_t)escaped] == text[j] || key.text[i] == '.')) {
            i += 1 + (size_t)escaped;
            j++;
        } else if (run != SIZE_MAX && run_text < n) {
            i = run;
            j = ++run_text;
        } else {
            return 0;
        }
    }
    return 1;
}

static int pattern_matches(const char *key, lora_module module) {
    lora_module body = pattern_body(key);
    for (size_t i = 0; i < module.n; i++) {
        if ((i == 0 || module.text[i - 1] == '.') && pattern_matches_whole(body, module.text + i, module.n - i))
            return 1;
        if (key[0] == '^')
            return 0;
    }
    return 0;
}

/* The value of the first key that matches; NULL: none. `used` has one flag a key. */
static const json_t *pattern_find(const json_t *pattern, lora_module module, uint8_t *used) {
    const char *key;
    const json_t *value;
    size_t i = 0;
    json_object_foreach((json_t *)(uintptr_t)pattern, key, value) {
        if (pattern_matches(key, module)) {
            used[i] = 1;
            return value;
        }
        i++;
    }
    return NULL;
}

int32_t lora_peft_rank(const lora_peft *peft, lora_module module) {
    const json_t *value = pattern_find(peft->rank_pattern, module, peft->pattern_used);
    return value ? (int32_t)json_integer_value(value) : peft->rank;
}

double lora_peft_alpha(const lora_peft *peft, lora_module module) {
    const json_t *value = pattern_find(peft->alpha_pattern, module, peft->pattern_used + LORA_PATTERN_MAX);
    return value ? json_number_value(value) : peft->alpha;
}

br_status lora_peft_check_patterns(const lora_peft *peft) {
    const json_t *pattern[2] = {peft->rank_pattern, peft->alpha_pattern};
    const char *key;
    const json_t *value;
    for (int p = 0; p < 2; p++) {
        const uint8_t *used = peft->pattern_used + p * LORA_PATTERN_MAX;
        json_object_foreach((json_t *)(uintptr_t)pattern[p], key, value) {
            if (!*used++)
                return br_fail(BR_E_FORMAT,
                               "%s: %s: key '%.200s' matches no module of the adapter, or only after an earlier key",
                               peft->what, p ? "alpha_pattern" : "rank_pattern", key);
        }
    }
    return BR_OK;
}

/* ---- targets ---------------------------------------------------------------------------------------------------------- */

static int target_names(const char *target, lora_module module) {
    size_t n = strlen(target);
    if (n > module.n || memcmp(module.text + module.n - n, target, n) != 0)
        return 0;
    return n == module.n || module.text[module.n - n - 1] == '.';
}

int lora_peft_is_target(const lora_peft *peft, lora_module module) {
    for (size_t i = 0; i < json_array_size(peft->targets); i++)
        if (target_names(json_string_value(json_array_get(peft->targets, i)), module))
            return 1;
    return 0;
}

br_status lora_peft_check_targets(const lora_peft *peft, const br_config *config) {
    static const br_class FROZEN[] = {BR_W_ROUTER, BR_W_INDEX_Q, BR_W_INDEX_K, BR_W_INDEX_WEIGHT};
    for (size_t f = 0; f < sizeof FROZEN / sizeof FROZEN[0]; f++) {
        for (int32_t layer = 0; layer < config->n_layer; layer++) {
            char name[BR_NAME_BYTES];
            lora_module module = {.text = name, .n = lora_module_name(config, FROZEN[f], layer, -1, name)};
            if (peft->targets && lora_peft_is_target(peft, module))
                return br_fail(BR_E_UNSUPPORTED,
                               "%s: target_modules: an entry names %s: the router and the indexer stay frozen", peft->what,
                               name);
        }
    }
    return BR_OK;
}

/* ---- adapter_config.json ---------------------------------------------------------------------------------------------- */

/* Keys that are read, or that cannot change what a finished adapter computes. Any other key is a feature that may, so it
 * must be off: null, false, empty, or absent. That holds for features that come after this table was written, too. */
static const char *const HARMLESS_KEYS[] = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias",
    "init_lora_weights", "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
};

/* Starts that leave the base weights alone. The others (PiSSA, OLoRA, LoftQ, CorDA) train on a shifted base, so that adding
 * the adapter to the published base gives another function. */
static const char *const PLAIN_STARTS[] = {"gaussian", "eva", "orthogonal"};

static int is_one_of(const char *text, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(text, list[i]) == 0)
            return 1;
    return 0;
}
#define IS_ONE_OF(text, list) is_one_of(text, list, sizeof(list) / sizeof((list)[0]))

static int is_off(const json_t *value) {
    return json_is_null(value) || json_is_false(value) || (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

static br_status refuse_features(const lora_peft *peft, const json_scope *scope) {
    const char *key;
    const json_t *value;
    json_object_foreach(peft->root, key, value) {
        if (!IS_ONE_OF(key, HARMLESS_KEYS) && !is_off(value))
            return br_fail(BR_E_UNSUPPORTED,
                           "%s: '%.100s' is set: expected null, false or empty, this feature is not supported", peft->what,
                           key);
    }
    BR_TRY(json_only_text(scope, "peft_type", "LORA", "only LoRA adapters are supported"));
    BR_TRY(json_only_text(scope, "bias", "none", "adapters with biases are not supported"));
    value = json_object_get(peft->root, "init_lora_weights");
    if (value && !json_is_null(value) && !json_is_boolean(value) &&
        !(json_is_string(value) && IS_ONE_OF(json_string_value(value), PLAIN_STARTS)))
        return br_fail(
            BR_E_UNSUPPORTED,
            "%s: init_lora_weights is '%.64s': expected true, false or a start that leaves the base weights as published",
            peft->what, json_is_string(value) ? json_string_value(value) : "(not text)");
    return BR_OK;
}

static br_status check_alpha(const lora_peft *peft, const char *key, const json_t *value) {
    double alpha = json_number_value(value);
    if (!json_is_number(value) || !(fabs(alpha) <= ALPHA_MAX))
        return br_fail(BR_E_FORMAT, "%s: %.100s: expected a number from -%g to %g", peft->what, key, ALPHA_MAX, ALPHA_MAX);
    return BR_OK;
}

static br_status check_rank(const lora_peft *peft, const char *key, const json_t *value) {
    json_int_t rank = json_integer_value(value);
    if (!json_is_integer(value) || rank < 1 || rank > LORA_RANK_MAX)
        return br_fail(BR_E_FORMAT, "%s: %.100s: expected a rank 1 to %d, found %lld", peft->what, key, LORA_RANK_MAX,
                       (long long)rank);
    return BR_OK;
}

static br_status take_pattern(const lora_peft *peft, const json_scope *scope, const char *name,
                              br_status (*check)(const lora_peft *, const char *, const json_t *), const json_t **out) {
    const char *key;
    const json_t *value;
    BR_TRY(json_find_object(scope, name, out));
    if (json_object_size(*out) > LORA_PATTERN_MAX)
        return br_fail(BR_E_LIMIT, "%s: %s has %zu keys: expected at most %d", peft->what, name, json_object_size(*out),
                       LORA_PATTERN_MAX);
    json_object_foreach((json_t *)(uintptr_t)*out, key, value) {
        if (!pattern_is_read(key))
            return br_fail(BR_E_UNSUPPORTED,
                           "%s: %s: key '%.200s': of regular expressions only '.', '.*', '\\' before a sign, '^' and "
                           "'$' at the ends are supported",
                           peft->what, name, key);
        BR_TRY(check(peft, key, value));
    }
    return BR_OK;
}

static br_status take_targets(const json_scope *scope, lora_peft *out) {
    const json_t *value, *fewer_layers, *excluded;
    BR_TRY(json_find(scope, "target_modules", &value));
    BR_TRY(json_find(scope, "layers_to_transform", &fewer_layers));
    BR_TRY(json_find(scope, "exclude_modules", &excluded));
    if (!value || json_is_string(value))
        return BR_OK;
    if (!json_is_array(value) || json_array_size(value) > LORA_PATTERN_MAX)
        return br_fail(BR_E_FORMAT, "%s: target_modules: expected text or a list of at most %d names", scope->what,
                       LORA_PATTERN_MAX);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *name = json_array_get(value, i);
        if (json_string_length(name) == 0)
            return br_fail(BR_E_FORMAT, "%s: target_modules: entry %zu: expected a name", scope->what, i);
    }
    out->targets = value;
    out->targets_are_all = !fewer_layers && (!excluded || is_off(excluded));
    return BR_OK;
}

static br_status take_keys(lora_peft *out) {
    json_scope scope = {.what = out->what, .object = {out->root}};
    const json_t *rank, *alpha;
    BR_TRY(refuse_features(out, &scope));
    BR_TRY(json_find(&scope, "r", &rank));
    BR_TRY(json_find(&scope, "lora_alpha", &alpha));
    BR_TRY(check_rank(out, "r", rank));
    BR_TRY(check_alpha(out, "lora_alpha", alpha));
    out->rank = (int32_t)json_integer_value(rank);
    out->alpha = json_number_value(alpha);
    BR_TRY(json_take_flag(&scope, "use_rslora", 0, &out->rslora));
    BR_TRY(take_pattern(out, &scope, "rank_pattern", check_rank, &out->rank_pattern));
    BR_TRY(take_pattern(out, &scope, "alpha_pattern", check_alpha, &out->alpha_pattern));
    return take_targets(&scope, out);
}

br_status lora_peft_parse(const char *what, const char *text, size_t n, lora_peft *out) {
    br_status status;
    void *used = NULL;
    *out = (lora_peft){.what = what};
    if (n > LORA_CONFIG_BYTES_MAX)
        return br_fail(BR_E_FORMAT, "%s: %zu bytes: expected at most %d", what, n, LORA_CONFIG_BYTES_MAX);
    BR_TRY(json_read_object(what, text, n, &out->root));
    BR_TRY_GOTO(br_mem_alloc(&used, 2 * LORA_PATTERN_MAX, "pattern flags of an adapter"), exit);
    out->pattern_used = used;
    BR_TRY_GOTO(take_keys(out), exit);
exit:
    if (status != BR_OK)
        lora_peft_close(out);
    return status;
}

void lora_peft_close(lora_peft *peft) {
    json_decref(peft->root);
    br_mem_free(peft->pattern_used);
    *peft = (lora_peft){0};
}

/* ---- names of tensors ------------------------------------------------------------------------------------------------- */

static const char PREFIX[] = "base_model.model.";

static int ends_with(const char *name, size_t n, const char *end) {
    size_t n_end = strlen(end);
    return n >= n_end && memcmp(name + n - n_end, end, n_end) == 0;
}

size_t lora_module_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]) {
    br_weight_name(config, cls, layer, expert, name);
    size_t n = strlen(name);
    n -= ends_with(name, n, ".weight_packed") ? strlen(".weight_packed") : strlen(".weight");
    name[n] = 0;
    return n;
}

/* Looks up the base tensor of a module. number: put before the last part, for an A that all experts share. */
static int parse_module(const br_config *config, lora_module module, const char *number, lora_key *out) {
    static const char *const SUFFIX[] = {".weight", ".weight_packed"};
    char name[BR_NAME_BYTES];
    size_t n_last = 0;
    while (n_last < module.n && module.text[module.n - n_last - 1] != '.')
        n_last++;
    int n_head = (int)(module.n - n_last);
    for (size_t i = 0; i < 2; i++) {
        int n = snprintf(name, sizeof name, "%.*s%s%.*s%s", n_head, module.text, number, (int)n_last, module.text + n_head,
                         SUFFIX[i]);
        if ((size_t)n < sizeof name && br_weight_parse(config, name, (size_t)n, &out->cls, &out->layer, &out->expert))
            return 1;
    }
    return 0;
}

static br_status refuse_name(const char *what, const char *name, size_t n) {
    if (ends_with(name, n, ".lora_magnitude_vector") || ends_with(name, n, ".lora_magnitude_vector.weight"))
        return br_fail(BR_E_UNSUPPORTED, "%s: tensor '%.200s': DoRA is not supported", what, name);
    if (ends_with(name, n, ".bias"))
        return br_fail(BR_E_UNSUPPORTED, "%s: tensor '%.200s': adapters with biases are not supported", what, name);
    return br_fail(BR_E_FORMAT,
                   "%s: tensor '%.200s' is unknown: expected %s(module).lora_A.weight or .lora_B.weight of a linear map of "
                   "this model; was the adapter made for another checkpoint?",
                   what, name, PREFIX);
}

br_status lora_key_parse(const char *what, const br_config *config, const char *tensor_name, lora_key *out) {
    size_t n = strlen(tensor_name), n_prefix = strlen(PREFIX), n_end = strlen(".lora_A.weight");
    *out = (lora_key){.is_b = ends_with(tensor_name, n, ".lora_B.weight")};
    if (strncmp(tensor_name, PREFIX, n_prefix) != 0 || n <= n_prefix + n_end || n >= BR_NAME_BYTES ||
        strstr(tensor_name, ".base_layer") || !(out->is_b || ends_with(tensor_name, n, ".lora_A.weight")))
        return refuse_name(what, tensor_name, n);
    out->module = (lora_module){.text = tensor_name + n_prefix, .n = n - n_prefix - n_end};
    if (!parse_module(config, out->module, "", out)) {
        out->is_shared = parse_module(config, out->module, "0.", out);
        if (!out->is_shared)
            return refuse_name(what, tensor_name, n);
        if (out->is_b)
            return br_fail(BR_E_UNSUPPORTED, "%s: tensor '%.200s': a B shared by experts is not supported, only a shared A",
                           what, tensor_name);
    }
    if (out->cls < BR_CLASS_LORA_END)
        return BR_OK;
    if (out->cls == BR_W_ROUTER || out->cls == BR_W_INDEX_Q || out->cls == BR_W_INDEX_K || out->cls == BR_W_INDEX_WEIGHT)
        return br_fail(BR_E_UNSUPPORTED, "%s: tensor '%.200s': the router and the indexer stay frozen", what, tensor_name);
    return br_fail(BR_E_UNSUPPORTED, "%s: tensor '%.200s': adapters on %s are not supported", what, tensor_name,
                   br_class_name(out->cls));
}
