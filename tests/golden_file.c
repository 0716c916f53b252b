/* The text form of golden vectors; see golden_file.h. */
#include "golden_file.h"

#include "br_file.h"
#include "test_support.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int size;
} type_of[GOLDEN_TYPES] = {{"u8", 1}, {"bf16", 2}, {"i32", 4}, {"f32", 4}, {"u64", 8}};

enum { LINE_WIDTH = 120 };

void golden_open(golden_set *set) {
    memset(set, 0, sizeof *set);
    CHECK_OK(br_mem_alloc((void **)&set->arena.base, GOLDEN_ARENA_BYTES, "golden vectors"));
    set->arena.size = GOLDEN_ARENA_BYTES;
}

void golden_close(golden_set *set) {
    br_mem_free(set->arena.base);
}

golden_case *golden_begin(golden_set *set, const char *name, ...) {
    ck_assert_int_lt(set->n, GOLDEN_CASE_MAX);
    golden_case *c = &set->item[set->n++];
    va_list args;
    va_start(args, name);
    vsnprintf(c->name, sizeof c->name, name, args);
    va_end(args);
    c->arena = &set->arena;
    return c;
}

int64_t golden_count(const golden_array *a) {
    return (int64_t)a->dim[0] * a->dim[1] * a->dim[2];
}

static size_t bytes_of(const golden_array *a) {
    return (size_t)golden_count(a) * (size_t)type_of[a->type].size;
}

static golden_array *add(golden_case *c, int is_out, golden_type type, const char *name, const int32_t dim[3]) {
    int *n = is_out ? &c->n_out : &c->n_in;
    if (*n == GOLDEN_ARRAY_MAX)
        ck_abort_msg("case %s: more than %d arrays", c->name, GOLDEN_ARRAY_MAX);
    golden_array *a = &(is_out ? c->out : c->in)[(*n)++];
    snprintf(a->name, sizeof a->name, "%s", name);
    a->type = type;
    for (int i = 0; i < 3; i++) {
        a->n_dim += dim[i] > 0 && a->n_dim == i;
        a->dim[i] = dim[i] > 0 ? dim[i] : 1;
    }
    if (a->n_dim == 0)
        ck_abort_msg("case %s, array %s: the first dimension is %d", c->name, name, dim[0]);
    a->data = br_arena_take(c->arena, bytes_of(a), 64);
    return a;
}

void *golden_add_in(golden_case *c, golden_type type, const char *name, int32_t d0, int32_t d1, int32_t d2) {
    return add(c, 0, type, name, (const int32_t[]){d0, d1, d2})->data;
}

void *golden_add_out(golden_case *c, golden_type type, const char *name, int32_t d0, int32_t d1, int32_t d2) {
    golden_array *a = add(c, 1, type, name, (const int32_t[]){d0, d1, d2});
    return memset(a->data, 0xff, bytes_of(a));
}

void golden_add_int(golden_case *c, const char *name, int32_t value) {
    *(int32_t *)golden_add_in(c, GOLDEN_I32, name, 1, 0, 0) = value;
}

void golden_add_float(golden_case *c, const char *name, float value) {
    *(float *)golden_add_in(c, GOLDEN_F32, name, 1, 0, 0) = value;
}

/* ---- inputs by name --------------------------------------------------------------------------------------------------- */

static const golden_array *find(const golden_case *c, const char *name) {
    for (int i = 0; i < c->n_in; i++)
        if (strcmp(c->in[i].name, name) == 0)
            return &c->in[i];
    return NULL;
}

static const golden_array *find_typed(const golden_case *c, const char *name, golden_type type) {
    const golden_array *a = find(c, name);
    if (!a || a->type != type)
        ck_abort_msg("case %s: expected an input %s of type %s, found %s", c->name, name, type_of[type].name,
                     a ? type_of[a->type].name : "none");
    return a;
}

int golden_has(const golden_case *c, const char *name) {
    return find(c, name) != NULL;
}

int32_t golden_dim(const golden_case *c, const char *name, int i) {
    const golden_array *a = find(c, name);
    if (!a)
        ck_abort_msg("case %s: no input %s", c->name, name);
    return a->dim[i];
}

const uint8_t *golden_u8(const golden_case *c, const char *name) {
    return find_typed(c, name, GOLDEN_U8)->data;
}

const uint16_t *golden_bf16(const golden_case *c, const char *name) {
    return find_typed(c, name, GOLDEN_BF16)->data;
}

const int32_t *golden_i32(const golden_case *c, const char *name) {
    return find_typed(c, name, GOLDEN_I32)->data;
}

const float *golden_f32(const golden_case *c, const char *name) {
    return find_typed(c, name, GOLDEN_F32)->data;
}

const uint64_t *golden_u64(const golden_case *c, const char *name) {
    return find_typed(c, name, GOLDEN_U64)->data;
}

int32_t golden_int(const golden_case *c, const char *name) {
    return golden_i32(c, name)[0];
}

float golden_float(const golden_case *c, const char *name) {
    return golden_f32(c, name)[0];
}

/* ---- elements --------------------------------------------------------------------------------------------------------- */

static uint64_t bits_at(const golden_array *a, int64_t i) {
    const unsigned char *at = (const unsigned char *)a->data + (size_t)i * (size_t)type_of[a->type].size;
    uint64_t bits = 0;
    memcpy(&bits, at, (size_t)type_of[a->type].size); /* little end first, as everywhere in this product */
    return bits;
}

static void set_bits(const golden_array *a, int64_t i, uint64_t bits) {
    memcpy((unsigned char *)a->data + (size_t)i * (size_t)type_of[a->type].size, &bits, (size_t)type_of[a->type].size);
}

void golden_same(const char *file, const char *who, const golden_case *got, const golden_case *want) {
    if (got->n_out != want->n_out)
        ck_abort_msg("%s, case %s, %s: %d outputs, wanted %d", file, got->name, who, got->n_out, want->n_out);
    for (int i = 0; i < got->n_out; i++) {
        const golden_array *g = &got->out[i], *w = &want->out[i];
        if (strcmp(g->name, w->name) != 0 || g->type != w->type || memcmp(g->dim, w->dim, sizeof g->dim) != 0)
            ck_abort_msg("%s, case %s, %s: output %d is %s of %dx%dx%d, wanted %s of %dx%dx%d", file, got->name, who, i,
                         g->name, g->dim[0], g->dim[1], g->dim[2], w->name, w->dim[0], w->dim[1], w->dim[2]);
        int64_t n = golden_count(g), n_differ = 0, first = -1;
        for (int64_t j = 0; j < n; j++)
            if (bits_at(g, j) != bits_at(w, j) && n_differ++ == 0)
                first = j;
        int digits = 2 * type_of[g->type].size;
        if (n_differ)
            ck_abort_msg("%s, case %s, %s: %lld of %lld elements of %s differ; the first, (%lld, %lld, %lld), is %0*llx, "
                         "wanted %0*llx",
                         file, got->name, who, (long long)n_differ, (long long)n, g->name,
                         (long long)(first / g->dim[2] / g->dim[1]), (long long)(first / g->dim[2] % g->dim[1]),
                         (long long)(first % g->dim[2]), digits, (unsigned long long)bits_at(g, first), digits,
                         (unsigned long long)bits_at(w, first));
    }
}

/* ---- text out --------------------------------------------------------------------------------------------------------- */

static void write_array(FILE *out, const char *side, const golden_array *a) {
    fprintf(out, "%s %s %s ", side, type_of[a->type].name, a->name);
    for (int i = 0; i < a->n_dim; i++)
        fprintf(out, "%s%d", i ? "x" : "", a->dim[i]);
    int digits = 2 * type_of[a->type].size, a_line = LINE_WIDTH / (digits + 1);
    for (int64_t i = 0; i < golden_count(a); i++)
        fprintf(out, "%c%0*llx", i % a_line ? ' ' : '\n', digits, (unsigned long long)bits_at(a, i));
    fputc('\n', out);
}

void golden_write(const golden_set *set, const char *path, const char *head) {
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    ck_assert_ptr_nonnull(out);
    fputs(head, out);
    for (int i = 0; i < set->n; i++) {
        const golden_case *c = &set->item[i];
        fprintf(out, "case %s\n", c->name);
        for (int k = 0; k < c->n_in; k++)
            write_array(out, "in", &c->in[k]);
        for (int k = 0; k < c->n_out; k++)
            write_array(out, "out", &c->out[k]);
    }
    ck_assert_int_eq(fclose(out), 0);
    CHECK_OK(br_file_write(path, text, n));
    free(text);
}

/* ---- text in ---------------------------------------------------------------------------------------------------------- */

typedef struct reader {
    const char *path;
    const char *at, *end;
    int line;
} reader;

/* The next word; 0 at the end of the file. Comments run to the end of their line. */
static int next_word(reader *r, char word[GOLDEN_NAME_BYTES]) {
    while (r->at < r->end && (isspace((unsigned char)*r->at) || *r->at == '#')) {
        if (*r->at == '#')
            while (r->at < r->end && *r->at != '\n')
                r->at++;
        if (r->at < r->end)
            r->line += *r->at++ == '\n';
    }
    int n = 0;
    while (r->at < r->end && !isspace((unsigned char)*r->at)) {
        if (n == GOLDEN_NAME_BYTES - 1)
            ck_abort_msg("%s:%d: a word of more than %d characters", r->path, r->line, GOLDEN_NAME_BYTES - 1);
        word[n++] = *r->at++;
    }
    word[n] = 0;
    return n;
}

static void need_word(reader *r, char word[GOLDEN_NAME_BYTES]) {
    if (!next_word(r, word))
        ck_abort_msg("%s: the file ends at line %d inside a case", r->path, r->line);
}

static golden_type type_named(const reader *r, const char *name) {
    for (int t = 0; t < GOLDEN_TYPES; t++)
        if (strcmp(type_of[t].name, name) == 0)
            return (golden_type)t;
    ck_abort_msg("%s:%d: '%s' is no type", r->path, r->line, name);
}

static void read_dims(const reader *r, const char *text, int32_t dim[3]) {
    int n_dim = sscanf(text, "%dx%dx%d", &dim[0], &dim[1], &dim[2]);
    if (n_dim < 1)
        ck_abort_msg("%s:%d: '%s' is no shape", r->path, r->line, text);
    for (int i = n_dim; i < 3; i++)
        dim[i] = 0;
}

static void read_array(reader *r, golden_case *c, int is_out) {
    char type[GOLDEN_NAME_BYTES], name[GOLDEN_NAME_BYTES], word[GOLDEN_NAME_BYTES];
    int32_t dim[3];
    need_word(r, type);
    need_word(r, name);
    need_word(r, word);
    read_dims(r, word, dim);
    golden_array *a = add(c, is_out, type_named(r, type), name, dim);
    for (int64_t i = 0; i < golden_count(a); i++) {
        need_word(r, word);
        char *rest;
        uint64_t bits = strtoull(word, &rest, 16);
        if (*rest || strlen(word) != 2 * (size_t)type_of[a->type].size)
            ck_abort_msg("%s:%d: '%s' is no %s", r->path, r->line, word, type_of[a->type].name);
        set_bits(a, i, bits);
    }
}

void golden_read(golden_set *set, const char *path) {
    br_map map;
    char word[GOLDEN_NAME_BYTES];
    golden_case *c = NULL;
    CHECK_OK(br_file_map(path, &map));
    reader r = {path, (const char *)map.bytes, (const char *)map.bytes + map.n, 1};
    golden_open(set);
    while (next_word(&r, word)) {
        if (strcmp(word, "case") == 0) {
            need_word(&r, word);
            c = golden_begin(set, "%s", word);
        } else if (c && (strcmp(word, "in") == 0 || strcmp(word, "out") == 0)) {
            read_array(&r, c, word[0] == 'o');
        } else {
            ck_abort_msg("%s:%d: expected case, in or out, found '%s'", path, r.line, word);
        }
    }
    br_file_unmap(&map);
}
