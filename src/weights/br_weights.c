/* Opening a checkpoint: shards, index, one slot a tensor; see br_weights.h.
 *
 * Every tensor knows its slot from its name (br_weight_slot), so a table of 497,220 tensors (K3) fills in one pass: a slot
 * taken twice is a doubled tensor, a slot left empty a missing one. */
#include "br_weights.h"

#include "br_file.h"
#include "br_mem.h"
#include "br_nearest.h"
#include "br_weights_table.h"
#include "st_index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

static br_status take_array(void *out_pointer, int64_t n, size_t bytes, const char *what) {
    void *block;
    BR_TRY(br_mem_alloc(&block, (size_t)n * bytes, what));
    memcpy(out_pointer, &block, sizeof block);
    return BR_OK;
}

static br_status open_shards(const char *dir, const st_index *index, br_weights *w) {
    const char *single[] = {SINGLE_NAME};
    const char *const *name = index->n_file ? index->file : single;
    const int32_t n_shard = index->n_file ? index->n_file : 1;
    BR_TRY(take_array(&w->shard, n_shard, sizeof w->shard[0], "shards"));
    for (int32_t s = 0; s < n_shard; s++) {
        char path[BR_PATH_BYTES];
        BR_TRY(br_file_join(path, dir, name[s]));
        BR_TRY(st_open(path, &w->shard[s]));
        w->n_shard++;
    }
    return BR_OK;
}

static int is_vision(const char *name) {
    static const char *const PREFIX[] = {"vision_tower.", "mm_projector.", "multi_modal_projector."};
    for (size_t i = 0; i < sizeof PREFIX / sizeof PREFIX[0]; i++) {
        if (strncmp(name, PREFIX[i], strlen(PREFIX[i])) == 0)
            return 1;
    }
    return 0;
}

static br_dtype dtype_of(const char *name) {
    static const char *const NAME[] = {
        [BR_DTYPE_BF16] = "BF16", [BR_DTYPE_F32] = "F32", [BR_DTYPE_U8] = "U8", [BR_DTYPE_F16] = "F16"};
    for (int i = 0; i < BR_DTYPE_OTHER; i++) {
        if (strcmp(name, NAME[i]) == 0)
            return (br_dtype)i;
    }
    return BR_DTYPE_OTHER;
}

/* A_log comes as [H], as [H and padding], or as [1, 1, H, 1]; everything else as expected. */
static int shape_fits(const br_config *c, const br_expect *want, const st_entry *e) {
    if (want->cls == BR_W_KDA_A_LOG && e->n_dim == 1)
        return e->dim[0] >= c->kda_n_head && e->dim[0] <= BR_HEAD_MAX;
    if (want->cls == BR_W_KDA_A_LOG && e->n_dim == 4)
        return e->dim[0] == 1 && e->dim[1] == 1 && e->dim[2] == c->kda_n_head && e->dim[3] == 1;
    return e->n_dim == want->n_dim && memcmp(e->dim, want->dim, (size_t)want->n_dim * sizeof want->dim[0]) == 0;
}

enum { SHAPE_BYTES = 192 };

static const char *shape_text(const int64_t *dim, int32_t n_dim, char text[SHAPE_BYTES]) {
    size_t n = 1;
    text[0] = '[';
    for (int32_t d = 0; d < n_dim; d++)
        n += (size_t)snprintf(text + n, SHAPE_BYTES - n, "%s%lld", d ? ", " : "", (long long)dim[d]);
    snprintf(text + n, SHAPE_BYTES - n, "]");
    return text;
}

static br_status check_form(const br_weights *w, const st_file *file, const st_entry *e, const br_expect *want) {
    char expected[SHAPE_BYTES], found[SHAPE_BYTES];
    if (!(want->dtypes & 1u << dtype_of(e->dtype)))
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': dtype %s, expected %s", file->path, e->name, e->dtype,
                       want->dtypes & 1u << BR_DTYPE_U8       ? "U8"
                       : !(want->dtypes & 1u << BR_DTYPE_F32) ? "BF16"
                       : want->dtypes & 1u << BR_DTYPE_BF16   ? "F32 or BF16"
                                                              : "F32");
    if (!shape_fits(&w->config, want, e))
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': shape %s, expected %s", file->path, e->name,
                       shape_text(e->dim, e->n_dim, found), shape_text(want->dim, want->n_dim, expected));
    return BR_OK;
}

/* Shards and index must say the same, else a stale index would load half of another checkpoint. */
static br_status check_index(const st_index *index, const st_file *file, int32_t shard, const st_entry *e) {
    st_index_entry *listed = st_index_find(index, e->name);
    if (!listed)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s' is not listed in " INDEX_NAME, file->path, e->name);
    if (listed->file != shard)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s': " INDEX_NAME " says it is in %s", file->path, e->name,
                       index->file[listed->file]);
    listed->seen = 1;
    return BR_OK;
}

static br_status check_index_whole(const st_index *index) {
    for (int64_t i = 0; i < index->n_entry; i++) {
        if (!index->entry[i].seen)
            return br_fail(BR_E_FORMAT, "tensor '%s' is listed in " INDEX_NAME " but not in its shard %s",
                           index->entry[i].name, index->file[index->entry[i].file]);
    }
    return BR_OK;
}

static br_status place(br_weights *w, int32_t shard, const st_entry *e) {
    const st_file *file = &w->shard[shard];
    br_expect want;
    br_class cls;
    int32_t layer, expert;
    if (is_vision(e->name)) {
        w->n_skipped++;
        return BR_OK;
    }
    if (!br_weight_parse(&w->config, e->name, strlen(e->name), &cls, &layer, &expert)) {
        w->unknown[w->n_unknown++] = (br_unknown){.name = e->name, .shard = shard};
        return BR_OK;
    }
    int64_t slot = br_weight_slot(&w->config, cls, layer, expert);
    br_tensor *t = &w->tensor[slot];
    if (t->name)
        return br_fail(BR_E_FORMAT, "%s: tensor '%s' comes twice: also as '%s' in %s", file->path, e->name, t->name,
                       w->shard[t->shard].path);
    br_weight_expect(&w->config, slot, &want);
    BR_TRY(check_form(w, file, e, &want));
    *t = (br_tensor){.cls = cls, .layer = layer, .expert = expert, .dtype = dtype_of(e->dtype), .n_dim = e->n_dim,
                     .data = file->map.bytes + e->begin, .n_byte = e->n_byte, .name = e->name, .shard = shard};
    memcpy(t->dim, e->dim, (size_t)e->n_dim * sizeof t->dim[0]);
    return BR_OK;
}

static br_status place_all(const st_index *index, br_weights *w) {
    int64_t n_entry = 0;
    for (int32_t s = 0; s < w->n_shard; s++)
        n_entry += w->shard[s].n_entry;
    BR_TRY(take_array(&w->tensor, br_weight_expect_count(&w->config), sizeof w->tensor[0], "the table of tensors"));
    BR_TRY(take_array(&w->unknown, n_entry, sizeof w->unknown[0], "unknown tensors"));
    for (int32_t s = 0; s < w->n_shard; s++) {
        for (int64_t i = 0; i < w->shard[s].n_entry; i++) {
            if (index->n_file)
                BR_TRY(check_index(index, &w->shard[s], s, &w->shard[s].entry[i]));
            BR_TRY(place(w, s, &w->shard[s].entry[i]));
        }
    }
    return check_index_whole(index);
}

/* Lists the empty slots and closes the table up. */
static br_status settle(br_weights *w) {
    const int64_t n_slot = br_weight_expect_count(&w->config);
    BR_TRY(take_array(&w->missing, n_slot, sizeof w->missing[0], "missing tensors"));
    for (int64_t slot = 0; slot < n_slot; slot++) {
        br_expect want;
        if (w->tensor[slot].name) {
            w->tensor[w->n_tensor++] = w->tensor[slot];
            continue;
        }
        br_weight_expect(&w->config, slot, &want);
        if (!want.optional)
            w->missing[w->n_missing++] = slot;
    }
    BR_TRY(take_array(&w->leaf, w->n_tensor, sizeof w->leaf[0], "digests"));
    return take_array(&w->by_name, w->n_tensor, sizeof w->by_name[0], "the order of digests");
}

static br_status read_index(const char *dir, st_index *index) {
    char path[BR_PATH_BYTES], single[BR_PATH_BYTES];
    *index = (st_index){0};
    BR_TRY(br_file_join(path, dir, INDEX_NAME));
    BR_TRY(br_file_join(single, dir, SINGLE_NAME));
    if (br_file_exists(path))
        BR_TRY(st_index_read(path, index));
    else if (!br_file_exists(single))
        return br_fail(BR_E_NOT_FOUND, "%s: neither " INDEX_NAME " nor " SINGLE_NAME, dir);
    else
        return BR_OK;
    return index->n_file ? BR_OK : br_fail(BR_E_FORMAT, "%s: weight_map: expected at least one tensor", path);
}

br_status br_weights_survey(const char *dir, const br_config *config, br_weights **out) {
    br_status status;
    st_index index = {0};
    br_weights *w = NULL;
    *out = NULL;
    BR_TRY_GOTO(read_index(dir, &index), exit);
    BR_TRY_GOTO(take_array(&w, 1, sizeof *w, "a checkpoint"), exit);
    w->config = *config;
    BR_TRY_GOTO(open_shards(dir, &index, w), exit);
    BR_TRY_GOTO(place_all(&index, w), exit);
    BR_TRY_GOTO(settle(w), exit);
    *out = w;
    w = NULL;
exit:
    br_weights_close(w);
    st_index_close(&index);
    return status;
}

br_status br_weights_open(const char *dir, const br_config *config, br_weights **out) {
    BR_TRY(br_weights_survey(dir, config, out));
    br_status status = br_weights_complete(*out);
    if (status != BR_OK) {
        br_weights_close(*out);
        *out = NULL;
    }
    return status;
}

void br_weights_close(br_weights *w) {
    if (!w)
        return;
    for (int32_t s = 0; s < w->n_shard; s++)
        st_close(&w->shard[s]);
    br_mem_free(w->shard);
    br_mem_free(w->tensor);
    br_mem_free(w->unknown);
    br_mem_free(w->missing);
    br_mem_free(w->room);
    br_mem_free(w->gen);
    br_mem_free(w->name);
    br_mem_free(w->leaf);
    br_mem_free(w->by_name);
    br_mem_free(w);
}

/* An unknown tensor is compared with the names still missing, or with all names when none is. */
static br_status fail_unknown(const br_weights *w) {
    const br_unknown *first = &w->unknown[0];
    const int64_t n = w->n_missing ? w->n_missing : br_weight_expect_count(&w->config);
    br_nearest nearest;
    char name[BR_NAME_BYTES], text[BR_NEAREST_TEXT_BYTES];
    br_nearest_begin(&nearest, first->name);
    for (int64_t i = 0; i < n; i++) {
        br_expect want;
        br_weight_expect(&w->config, w->n_missing ? w->missing[i] : i, &want);
        br_weight_name(&w->config, want.cls, want.layer, want.expert, name);
        br_nearest_offer(&nearest, name);
    }
    br_nearest_text(&nearest, text);
    return br_fail(BR_E_FORMAT, "%s: tensor '%.200s' is not one of this model (%lld unknown, %lld missing)%s",
                   w->shard[first->shard].path, first->name, (long long)w->n_unknown, (long long)w->n_missing, text);
}

/* Without unknown tensors the names nearest to a missing one are those of its neighbours, which shows what does exist. */
static br_status fail_missing(const br_weights *w) {
    br_nearest nearest;
    char name[BR_NAME_BYTES], text[BR_NEAREST_TEXT_BYTES];
    br_weights_missing_at(w, 0, name);
    br_nearest_begin(&nearest, name);
    for (int64_t i = 0; i < w->n_tensor; i++)
        br_nearest_offer(&nearest, w->tensor[i].name);
    br_nearest_text(&nearest, text);
    return br_fail(BR_E_FORMAT, "tensor '%s' is missing in all %d shards (%lld missing)%s", name, w->n_shard,
                   (long long)w->n_missing, text);
}

br_status br_weights_complete(const br_weights *weights) {
    if (weights->n_unknown)
        return fail_unknown(weights);
    return weights->n_missing ? fail_missing(weights) : BR_OK;
}

const br_config *br_weights_config(const br_weights *weights) {
    return &weights->config;
}

int64_t br_weights_count(const br_weights *weights) {
    return weights->n_tensor;
}

int64_t br_weights_skipped(const br_weights *weights) {
    return weights->n_skipped;
}

int32_t br_weights_shard_count(const br_weights *weights) {
    return weights->n_shard;
}

int64_t br_weights_unknown_count(const br_weights *weights) {
    return weights->n_unknown;
}

const char *br_weights_unknown_at(const br_weights *weights, int64_t i) {
    BR_ASSERT(i >= 0 && i < weights->n_unknown);
    return weights->unknown[i].name;
}

int64_t br_weights_missing_count(const br_weights *weights) {
    return weights->n_missing;
}

void br_weights_missing_at(const br_weights *weights, int64_t i, char name[BR_NAME_BYTES]) {
    br_expect want;
    BR_ASSERT(i >= 0 && i < weights->n_missing);
    br_weight_expect(&weights->config, weights->missing[i], &want);
    br_weight_name(&weights->config, want.cls, want.layer, want.expert, name);
}

const br_tensor *br_weights_at(const br_weights *weights, int64_t i) {
    BR_ASSERT(i >= 0 && i < weights->n_tensor);
    return &weights->tensor[i];
}

static int by_place(const void *a, const void *b) {
    const br_tensor *x = a, *y = b;
    if (x->cls != y->cls)
        return x->cls < y->cls ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

const br_tensor *br_weights_find(const br_weights *weights, br_class cls, int32_t layer, int32_t expert) {
    const br_tensor key = {.cls = cls, .layer = layer, .expert = expert};
    return weights->n_tensor ? bsearch(&key, weights->tensor, (size_t)weights->n_tensor, sizeof key, by_place) : NULL;
}
