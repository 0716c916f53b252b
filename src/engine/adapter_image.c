/* An adapter where forwards read it; see adapter_image.h. */
#include "adapter_image.h"

#include "br_mem.h"
#include "lora_text.h"

#include <string.h>

enum { SIZE_BITS = 32, FILLS_MAP = 5, FILLS_HEAD = 4 }; /* behind and beside A and B, s; more for each head of an absorbed map */

struct adapter_image {
    const br_loaded *loaded;
    int32_t slot, is_laid, is_surrounded;
    int64_t n_map;
    lora_scale *plan;              /* (n_map) */
    int32_t *first;                /* (2 * n_map + 1) views of matrix 2 * map + is_b: first[matrix] .. first[matrix + 1] - 1 */
    br_view *view;                 /* (n_view) in this order */
    int32_t *at;                   /* (n_view) where each is on the device */
    int32_t n_view, n_fill, n_view_max, n_fill_max;
    br_mirror views, found, fills; /* (n_view_max) long ones first; (n_view_max) what was seen of these; (n_fill_max) */
    br_mirror torn;                /* a word: something around a matrix is not what it should be */
    lora_text text;
};

/* ---- open -------------------------------------------------------------------------------------------------------------------- */

int32_t adapter_image_view_max(const br_config *c) {
    return 2 * (int32_t)lora_map_count(c) + c->n_layer; /* an absorbed A lies there twice */
}

static int32_t fill_max(const br_config *c, int64_t n_map) {
    return FILLS_MAP * (int32_t)n_map + FILLS_HEAD * c->n_head * c->n_layer;
}

size_t adapter_image_bytes(const br_config *c) {
    const int64_t n_map = lora_map_count(c);
    return (size_t)adapter_image_view_max(c) * (sizeof(br_view) + sizeof(br_seen)) + (size_t)fill_max(c, n_map) * sizeof(br_fill) +
           sizeof(uint32_t);
}

static br_status alloc(adapter_image *m) {
    br_device *device = m->loaded->device;
    const size_t n_map = (size_t)m->n_map, n_view = (size_t)m->n_view_max;
    BR_TRY(br_mem_alloc((void **)&m->plan, n_map * sizeof *m->plan, "a plan of an adapter"));
    BR_TRY(br_mem_alloc((void **)&m->first, (2 * n_map + 1) * sizeof *m->first, "where an adapter lies"));
    BR_TRY(br_mem_alloc((void **)&m->view, n_view * sizeof *m->view, "where an adapter lies"));
    BR_TRY(br_mem_alloc((void **)&m->at, n_view * sizeof *m->at, "where an adapter lies"));
    BR_TRY(br_mirror_open(device, n_view * sizeof(br_view), "where an adapter lies", &m->views));
    BR_TRY(br_mirror_open(device, n_view * sizeof(br_seen), "what was seen of an adapter", &m->found));
    BR_TRY(br_mirror_open(device, (size_t)m->n_fill_max * sizeof(br_fill), "what surrounds an adapter", &m->fills));
    BR_TRY(br_mirror_open(device, sizeof(uint32_t), "what is torn of an adapter", &m->torn));
    return lora_text_open(&m->loaded->config, &m->text);
}

br_status adapter_image_open(const br_loaded *loaded, int32_t slot, adapter_image **out) {
    const br_config *c = &loaded->config;
    const int64_t n_map = lora_map_count(c);
    adapter_image *m = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&m, sizeof *m, "where an adapter lies"));
    *m = (adapter_image){.loaded = loaded, .slot = slot, .n_map = n_map, .n_view_max = adapter_image_view_max(c), .n_fill_max = fill_max(c, n_map)};
    const br_status status = alloc(m);
    if (status == BR_OK)
        *out = m;
    else
        adapter_image_close(m);
    return status;
}

void adapter_image_close(adapter_image *m) {
    if (!m)
        return;
    br_mirror_close(m->loaded->device, &m->views);
    br_mirror_close(m->loaded->device, &m->found);
    br_mirror_close(m->loaded->device, &m->fills);
    br_mirror_close(m->loaded->device, &m->torn);
    lora_text_close(&m->text);
    br_mem_free(m->plan);
    br_mem_free(m->first);
    br_mem_free(m->view);
    br_mem_free(m->at);
    br_mem_free(m);
}

/* ---- laying out ---------------------------------------------------------------------------------------------------------------- */

static br_status take_fill(void *context, const br_fill *fill) {
    adapter_image *m = context;
    BR_ASSERT(m->n_fill < m->n_fill_max);
    ((br_fill *)(void *)m->fills.host)[m->n_fill++] = *fill;
    return BR_OK;
}

static br_status take_matrix(adapter_image *m, const br_model_matrix *at, int32_t matrix, const lora_scale *scale) {
    const br_model *model = m->loaded->model;
    br_view view[2];
    const int32_t n = br_model_adapter_views(model, at, view);
    BR_ASSERT(m->n_view + n <= m->n_view_max);
    m->first[matrix] = m->n_view;
    for (int32_t k = 0; k < n; k++)
        m->view[m->n_view++] = view[k];
    BR_TRY(br_model_adapter_room(model, at, take_fill, m));
    return at->is_b ? BR_OK : br_model_adapter_scales(model, at, scale->alpha, scale->rslora, take_fill, m);
}

static int size_class(const br_view *view) {
    const uint32_t n = (uint32_t)view->n_row * (uint32_t)view->n_col;
    return SIZE_BITS - 1 - __builtin_clz(n);
}

/* Ordered by the power of two below their size, the largest first. */
static void order(adapter_image *m) {
    int32_t next[SIZE_BITS] = {0}, sum = 0;
    br_view *sorted = (br_view *)(void *)m->views.host;
    for (int32_t i = 0; i < m->n_view; i++)
        next[size_class(&m->view[i])]++;
    for (int c = SIZE_BITS - 1; c >= 0; c--) {
        sum += next[c];
        next[c] = sum - next[c];
    }
    for (int32_t i = 0; i < m->n_view; i++) {
        m->at[i] = next[size_class(&m->view[i])]++;
        sorted[m->at[i]] = m->view[i];
    }
}

static br_status lay(adapter_image *m, const lora_scale *plan) {
    const br_loaded *l = m->loaded;
    br_expect map;
    m->n_view = m->n_fill = 0;
    memcpy(m->plan, plan, (size_t)m->n_map * sizeof *plan);
    for (int32_t i = 0; br_weight_expect(&l->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        br_model_matrix at = {.slot = m->slot, .cls = map.cls, .layer = map.layer, .expert = map.expert, .rank = plan[i].rank};
        for (at.is_b = 0; at.is_b < 2; at.is_b++)
            BR_TRY(take_matrix(m, &at, 2 * i + at.is_b, &plan[i]));
    }
    m->first[2 * m->n_map] = m->n_view;
    order(m);
    lora_text_set(&m->text, &l->config, plan);
    BR_TRY(br_device_upload(l->device, m->views.device, m->views.host, (size_t)m->n_view * sizeof(br_view)));
    BR_TRY(br_device_upload(l->device, m->fills.device, m->fills.host, (size_t)m->n_fill * sizeof(br_fill)));
    return br_device_wait(l->device);
}

br_status adapter_image_lay(adapter_image *m, const lora_scale *plan) {
    if (m->is_laid && memcmp(m->plan, plan, (size_t)m->n_map * sizeof *plan) == 0)
        return BR_OK;
    m->is_laid = m->is_surrounded = 0;
    BR_TRY(lay(m, plan));
    m->is_laid = 1;
    return BR_OK;
}

/* Nothing waits for this fill. It is beside the lanes of a feed, which write other bytes: room_of in model_view.c is what views leave of a
 * packed matrix, and s is apart. Steps and digests come later in the same stream; lay waits before it changes what a fill reads. */
br_status adapter_image_surround(adapter_image *m) {
    if (m->is_surrounded)
        return BR_OK;
    BR_TRY(br_device_fill(m->loaded->device, (br_fill *)(void *)m->fills.device, m->n_fill));
    m->is_surrounded = 1;
    return BR_OK;
}

const br_view *adapter_image_views(const adapter_image *m, int64_t map, int32_t is_b, int32_t *n) {
    const int64_t matrix = 2 * map + is_b;
    *n = m->first[matrix + 1] - m->first[matrix];
    return &m->view[m->first[matrix]];
}

/* ---- reading back ---------------------------------------------------------------------------------------------------------------- */

static br_status ask(adapter_image *m) {
    br_device *device = m->loaded->device;
    memset(m->torn.host, 0, m->torn.bytes);
    BR_TRY(br_device_upload(device, m->torn.device, m->torn.host, m->torn.bytes));
    BR_TRY(br_device_check(device, (br_fill *)(void *)m->fills.device, m->n_fill, (uint32_t *)(void *)m->torn.device));
    BR_TRY(br_device_hash(device, (br_view *)(void *)m->views.device, m->n_view, (br_seen *)(void *)m->found.device));
    BR_TRY(br_device_download(device, m->torn.host, m->torn.device, m->torn.bytes));
    return br_device_download(device, m->found.host, m->found.device, (size_t)m->n_view * sizeof(br_seen));
}

/* Waits where a call was refused as well: what was queued before it would write `torn` behind the back of the next look, which then began
 * with what this one saw. */
static br_status look(adapter_image *m) {
    const br_status status = ask(m);
    if (status == BR_OK)
        return br_device_wait(m->loaded->device);
    const br_failure failure = br_failure_keep(status);
    (void)br_device_wait(m->loaded->device);
    return br_fail_again(&failure);
}

/* Of one matrix; its copies have to agree. One for which nothing was reserved has no values. */
static br_digest digest_of(const adapter_image *m, int64_t matrix, uint32_t *torn) {
    const br_seen *found = (const br_seen *)(const void *)m->found.host;
    const int32_t first = m->first[matrix], end = m->first[matrix + 1];
    const br_digest digest = first < end ? found[m->at[first]].digest : lora_digest_matrix(NULL, 0);
    for (int32_t i = first + 1; i < end; i++)
        *torn |= !br_digest_equal(digest, found[m->at[i]].digest);
    return digest;
}

br_status adapter_image_digest(adapter_image *m, br_digest *out) {
    uint32_t torn;
    int64_t touched = 0;
    BR_TRY(look(m));
    memcpy(&torn, m->torn.host, sizeof torn);
    for (int64_t i = 0; i < m->n_map; i++)
        if (m->plan[i].rank) {
            lora_text_put(&m->text, touched, 0, digest_of(m, 2 * i, &torn));
            lora_text_put(&m->text, touched++, 1, digest_of(m, 2 * i + 1, &torn));
        }
    *out = lora_text_digest(&m->text);
    if (torn)
        *out = br_hash_chain(*out, "torn", sizeof "torn");
    return BR_OK;
}
