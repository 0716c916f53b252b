/* Lines of JSON into prompts; see prompts.h. Layer: io. */
#include "prompts.h"
#include "br_config.h"
#include "br_file.h"
#include "br_mem.h"
#include "json_scope.h"
#include "rollout_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WHAT_BYTES = 512 };

typedef struct bytes {
    void *block;
    size_t used, size;
} bytes;

/* Until all lines are read, texts and tokens are known by their place: the blocks still move. */
typedef struct entry {
    prompt_line line;
    size_t uid_at, adapter_at, token_at;
    int64_t number; /* of the line in the file, from 1 */
} entry;

struct prompts {
    bytes entries, names, tokens;
    entry **by_uid;
    int64_t count;
};

typedef struct line_parser {
    prompts *p;
    json_scope scope;
    entry e;
} line_parser;

static br_status push(bytes *b, const void *data, size_t n, const char *what) {
    if (b->size - b->used < n) {
        size_t size = b->size ? b->size : 4096;
        while (size - b->used < n)
            size *= 2;
        BR_TRY(br_mem_grow(&b->block, b->used, size, what));
        b->size = size;
    }
    memcpy((char *)b->block + b->used, data, n);
    b->used += n;
    return BR_OK;
}

static br_status push_name(prompts *p, const char *name, size_t *at) {
    *at = p->names.used;
    return push(&p->names, name, strlen(name) + 1, "the names of the prompts");
}

/* ---- the fields of a line --------------------------------------------------------------------------------------------- */

static br_status refuse_unknown_keys(const line_parser *l, json_t *object) {
    static const char *const known[] = {"prompt", "uid",     "adapter", "n",       "seed", "temperature", "top_k",
                                        "top_p",  "min_p",   "max_new", "min_new", "stop", "ignore_eos"};
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        size_t i = 0;
        while (i < sizeof known / sizeof known[0] && strcmp(key, known[i]) != 0)
            i++;
        if (i == sizeof known / sizeof known[0])
            return br_fail(BR_E_FORMAT, "%s: unknown key '%.64s'", l->scope.what, key);
    }
    return BR_OK;
}

static br_status check_name(const line_parser *l, const char *key, const char *name, size_t most) {
    size_t n = strlen(name);
    if (n < 1 || n > most)
        return br_fail(BR_E_FORMAT, "%s: %s of %zu bytes: expected 1 to %zu", l->scope.what, key, n, most);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return br_fail(BR_E_FORMAT, "%s: %s: byte %zu is a control character", l->scope.what, key, i);
    return BR_OK;
}

static br_status take_names(line_parser *l) {
    char number[24];
    const char *uid, *adapter;
    BR_TRY(json_find_text(&l->scope, "uid", &uid));
    BR_TRY(json_find_text(&l->scope, "adapter", &adapter));
    snprintf(number, sizeof number, "%lld", (long long)l->e.number - 1);
    uid = uid ? uid : number;
    BR_TRY(check_name(l, "uid", uid, BR_UID_BYTES_MAX));
    BR_TRY(push_name(l->p, uid, &l->e.uid_at));
    l->e.adapter_at = SIZE_MAX;
    if (!adapter || strcmp(adapter, "base") == 0)
        return BR_OK;
    BR_TRY(check_name(l, "adapter", adapter, ROLLOUT_NAME_BYTES - 1));
    return push_name(l->p, adapter, &l->e.adapter_at);
}

static br_status take_ids(const line_parser *l, const char *key, const json_t *list, size_t most, bytes *to, int32_t *n) {
    if (!list || !json_is_array(list) || json_array_size(list) < 1 || json_array_size(list) > most)
        return br_fail(BR_E_FORMAT, "%s: %s: expected a list of 1 to %zu token ids", l->scope.what, key, most);
    *n = (int32_t)json_array_size(list);
    for (int32_t i = 0; i < *n; i++) {
        const json_t *value = json_array_get(list, (size_t)i);
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= BR_VOCAB_MAX)
            return br_fail(BR_E_FORMAT, "%s: %s: entry %d: expected a token id 0 to %d", l->scope.what, key, i,
                           BR_VOCAB_MAX - 1);
        int32_t token = (int32_t)id;
        BR_TRY(push(to, &token, sizeof token, "the tokens of the prompts"));
    }
    return BR_OK;
}

static br_status take_prompt(line_parser *l) {
    const json_t *list;
    BR_TRY(json_find(&l->scope, "prompt", &list));
    l->e.token_at = l->p->tokens.used;
    return take_ids(l, "prompt", list, BR_POSITION_MAX, &l->p->tokens, &l->e.line.n_token);
}

/* An empty list takes the default's stop tokens away. */
static br_status take_stop(line_parser *l) {
    const json_t *list;
    br_sampling *s = &l->e.line.sampling;
    BR_TRY(json_find(&l->scope, "stop", &list));
    if (!list)
        return BR_OK;
    memset(s->stop, 0, sizeof s->stop);
    s->n_stop = 0;
    if (json_is_array(list) && json_array_size(list) == 0)
        return BR_OK;
    size_t at = l->p->tokens.used;
    BR_TRY(take_ids(l, "stop", list, BR_STOP_MAX, &l->p->tokens, &s->n_stop));
    memcpy(s->stop, (char *)l->p->tokens.block + at, (size_t)s->n_stop * sizeof s->stop[0]);
    l->p->tokens.used = at;
    return BR_OK;
}

static br_status take_seed(line_parser *l) {
    const json_t *value;
    BR_TRY(json_find(&l->scope, "seed", &value));
    if (!value)
        return BR_OK;
    l->e.line.has |= PROMPT_HAS_SEED;
    l->e.line.seed = (uint64_t)json_integer_value(value);
    if (json_is_integer(value) && json_integer_value(value) >= 0)
        return BR_OK;
    const char *text = json_is_string(value) ? json_string_value(value) : "";
    uint64_t seed = 0;
    int fits = text[0] != 0;
    for (; fits && *text; text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        fits = *text >= '0' && *text <= '9' && seed <= (UINT64_MAX - digit) / 10;
        seed = seed * 10 + digit;
    }
    if (!fits)
        return br_fail(BR_E_FORMAT, "%s: seed: expected an integer 0 to 2^63 - 1, or text of decimal digits up to 2^64 - 1",
                       l->scope.what);
    l->e.line.seed = seed;
    return BR_OK;
}

/* *out is left alone when the key is absent. Zero comes out as +0, so that it has one pattern in digests. */
static br_status take_number(const line_parser *l, const char *key, int above_0, double max, double *out) {
    const json_t *value;
    BR_TRY(json_find(&l->scope, key, &value));
    if (!value)
        return BR_OK;
    double number = json_is_number(value) ? json_number_value(value) : (double)NAN;
    if (!(number >= 0 && number <= max) || (above_0 && number == 0))
        return br_fail(BR_E_FORMAT, "%s: %s: expected a number %s %g", l->scope.what, key, above_0 ? "above 0, at most" : "0 to", max);
    *out = number == 0 ? 0 : number;
    return BR_OK;
}

static br_status take_settings(line_parser *l) {
    br_sampling *s = &l->e.line.sampling;
    double temperature = s->temperature, min_p = s->min_p;
    const json_int top_k = {"top_k", 0, INT32_MAX, 1, s->top_k}, max_new = {"max_new", 1, BR_POSITION_MAX, 1, s->max_new},
                   min_new = {"min_new", 0, BR_POSITION_MAX, 1, s->min_new}, n = {"n", 1, ROLLOUT_SAMPLE_END, 1, 0};
    BR_TRY(take_number(l, "temperature", 0, 1024, &temperature));
    BR_TRY(take_number(l, "min_p", 0, 1, &min_p));
    BR_TRY(take_number(l, "top_p", 1, 1, &s->top_p));
    if (temperature > 0 && temperature < 0x1p-10) /* a tiny one would round to 0 and turn greedy */
        return br_fail(BR_E_FORMAT, "%s: temperature: expected 0 or 2^-10 to 2^10, found %g", l->scope.what, temperature);
    s->temperature = (float)temperature;
    s->min_p = (float)min_p;
    BR_TRY(json_take_int(&l->scope, &top_k, &s->top_k));
    BR_TRY(json_take_int(&l->scope, &max_new, &s->max_new));
    BR_TRY(json_take_int(&l->scope, &min_new, &s->min_new));
    BR_TRY(json_take_flag(&l->scope, "ignore_eos", s->ignore_eos, &s->ignore_eos));
    BR_TRY(json_take_int(&l->scope, &n, &l->e.line.n_sample));
    if (l->e.line.n_sample > 0)
        l->e.line.has |= PROMPT_HAS_N;
    return take_seed(l);
}

static br_status parse_line(prompts *p, const char *what, int64_t number, const char *text, size_t n,
                            const br_sampling *defaults) {
    br_status status;
    json_t *object = NULL;
    line_parser l = {.p = p, .scope = {.what = what}, .e = {.number = number, .line.sampling = *defaults}};
    BR_TRY(json_read_object(what, text, n, &object));
    l.scope.object[0] = object;
    BR_TRY_GOTO(refuse_unknown_keys(&l, object), exit);
    BR_TRY_GOTO(take_names(&l), exit);
    BR_TRY_GOTO(take_prompt(&l), exit);
    BR_TRY_GOTO(take_stop(&l), exit);
    BR_TRY_GOTO(take_settings(&l), exit);
    BR_TRY_GOTO(push(&p->entries, &l.e, sizeof l.e, "the prompts"), exit);
    p->count++;
exit:
    json_decref(object);
    return status;
}

/* ---- the whole file --------------------------------------------------------------------------------------------------- */

static int is_blank(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (text[i] != ' ' && text[i] != '\t' && text[i] != '\r')
            return 0;
    return 1;
}

static br_status parse_lines(prompts *p, const char *what, const char *text, size_t n, const br_sampling *defaults) {
    char place[WHAT_BYTES];
    int64_t number = 1;
    for (size_t at = 0; at < n; number++) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t n_line = end ? (size_t)(end - (text + at)) : n - at;
        snprintf(place, sizeof place, "%.460s: line %lld", what, (long long)number);
        if (!is_blank(text + at, n_line))
            BR_TRY(parse_line(p, place, number, text + at, n_line, defaults));
        at += n_line + 1;
    }
    if (p->count < 1 || p->count > INT32_MAX)
        return br_fail(BR_E_FORMAT, "%s: %lld prompts: expected 1 to 2^31 - 1", what, (long long)p->count);
    return BR_OK;
}

static void point_lines(prompts *p) {
    for (int64_t i = 0; i < p->count; i++) {
        entry *e = (entry *)p->entries.block + i;
        e->line.uid = (char *)p->names.block + e->uid_at;
        e->line.adapter = e->adapter_at == SIZE_MAX ? NULL : (char *)p->names.block + e->adapter_at;
        e->line.token = (int32_t *)((char *)p->tokens.block + e->token_at);
    }
}

static int by_uid_and_number(const void *left, const void *right) {
    const entry *a = *(entry *const *)left, *b = *(entry *const *)right;
    int order = strcmp(a->line.uid, b->line.uid);
    return order ? order : (a->number > b->number) - (a->number < b->number);
}

static br_status refuse_doubled_uids(prompts *p, const char *what) {
    BR_TRY(br_mem_alloc((void **)&p->by_uid, (size_t)p->count * sizeof p->by_uid[0], "the order of the prompts"));
    for (int64_t i = 0; i < p->count; i++)
        p->by_uid[i] = (entry *)p->entries.block + i;
    qsort(p->by_uid, (size_t)p->count, sizeof p->by_uid[0], by_uid_and_number);
    for (int64_t i = 1; i < p->count; i++)
        if (strcmp(p->by_uid[i - 1]->line.uid, p->by_uid[i]->line.uid) == 0)
            return br_fail(BR_E_FORMAT, "%s: line %lld: uid '%.80s' is that of line %lld too", what,
                           (long long)p->by_uid[i]->number, p->by_uid[i]->line.uid, (long long)p->by_uid[i - 1]->number);
    return BR_OK;
}

br_status prompts_parse(const char *what, const char *text, size_t n, const br_sampling *defaults, prompts **out) {
    br_status status;
    prompts *p;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&p, sizeof *p, "the prompts"));
    BR_TRY_GOTO(parse_lines(p, what, text, n, defaults), fail);
    point_lines(p);
    BR_TRY_GOTO(refuse_doubled_uids(p, what), fail);
    *out = p;
    return BR_OK;
fail:
    prompts_close(p);
    return status;
}

br_status prompts_read(const char *path, const br_sampling *defaults, prompts **out) {
    br_map map;
    *out = NULL;
    BR_TRY(br_file_map(path, &map));
    br_status status = prompts_parse(path, map.n ? (const char *)map.bytes : "", map.n, defaults, out);
    br_file_unmap(&map);
    return status;
}

void prompts_close(prompts *p) {
    if (!p)
        return;
    br_mem_free(p->by_uid);
    br_mem_free(p->tokens.block);
    br_mem_free(p->names.block);
    br_mem_free(p->entries.block);
    br_mem_free(p);
}

int64_t prompts_count(const prompts *p) {
    return p->count;
}

const prompt_line *prompts_at(const prompts *p, int64_t i) {
    BR_ASSERT(i >= 0 && i < p->count);
    return &((const entry *)p->entries.block + i)->line;
}
