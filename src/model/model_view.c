/* model_view: where a matrix of an adapter lies in the memory that forwards read, as strides; see br_model.h. Layer: model.
 *
 * A matrix of A or B is one packed matrix, but for kv_b (model_adapter.c): its A lies plain for W_UV and transposed for W_UK, its B in
 * the parts of the heads, W_UK's transposed and W_UV's plain. */
#include "model_parts.h"

#include <string.h>

int br_model_has_views(const br_model *m) {
    return m->backend.op->mat_row != NULL;
}

static uint16_t *place_of(const bi_mat *mat) {
    return (uint16_t *)(uintptr_t)mat->data;
}

static int64_t row_of(const br_model *m, const bi_mat *mat) {
    return m->backend.op->mat_row(mat->n_in);
}

/* Its first rows as they are; group: elements to the next matrix of the stack. */
static br_part plain(const br_model *m, const bi_mat *mat, int32_t n_row) {
    return (br_part){.at = place_of(mat), .group = (int64_t)(mat->stride / sizeof(uint16_t)), .row = row_of(m, mat), .col = 1, .n_row = n_row};
}

/* Its first columns as rows. */
static br_part turned(const br_model *m, const bi_mat *mat, int32_t n_row) {
    return (br_part){.at = place_of(mat), .group = (int64_t)(mat->stride / sizeof(uint16_t)), .row = 1, .col = row_of(m, mat), .n_row = n_row};
}

typedef struct absorbed {
    bi_adapter k, v;
} absorbed;

static absorbed absorbed_at(const br_model *m, const br_model_matrix *at) {
    const mla_weights *w = &m->layer[at->layer].mla;
    return (absorbed){model_absorbed_of(w->lora_uk, at), model_absorbed_of(w->lora_uv, at)};
}

static bi_mat packed_of(const br_model *m, const br_model_matrix *at) {
    const bi_adapter adapter = model_adapter_of(m, at);
    const bi_mat *stack = at->is_b ? &adapter.b : &adapter.a;
    return stack->data ? bi_mat_at(stack, at->expert < 0 ? 0 : at->expert) : (bi_mat){0};
}

int32_t br_model_adapter_views(const br_model *m, const br_model_matrix *at, br_view view[2]) {
    int32_t n_row, n_col;
    if (!at->rank)
        return 0;
    model_adapter_shape(m, at, at->rank, &n_row, &n_col);
    view[0] = view[1] = (br_view){.n_row = n_row, .n_col = n_col};
    if (at->cls != BR_W_MLA_KV_B) {
        const bi_mat mat = packed_of(m, at);
        view[0].part[0] = plain(m, &mat, n_row);
        return mat.data != NULL;
    }
    const absorbed pair = absorbed_at(m, at);
    if (!pair.v.a.data)
        return 0;
    if (at->is_b) {
        view[0].part[0] = turned(m, &pair.k.a, m->config.d_nope);
        view[0].part[1] = plain(m, &pair.v.b, m->config.d_v);
        return 1;
    }
    view[0].part[0] = plain(m, &pair.v.a, n_row);
    view[1].part[0] = turned(m, &pair.k.b, n_row);
    return 2;
}

/* Behind the first n_col of the first n_row rows, and behind these rows. */
static br_status room_of(const br_model *m, bi_mat mat, int32_t n_row, int32_t n_col, br_model_each_fill each, void *context) {
    const int64_t row = row_of(m, &mat), n = (int64_t)(m->backend.op->mat_bytes(BI_FORM_BF16, mat.n_out, mat.n_in) / sizeof(uint16_t));
    const int64_t used = n_col ? n_row * row : 0;
    const br_fill beside = {.at = place_of(&mat) + n_col, .n_run = n_row, .n_half = row - n_col, .pitch = row};
    const br_fill behind = {.at = place_of(&mat) + used, .n_run = 1, .n_half = n - used, .pitch = n - used};
    if (used && beside.n_half > 0)
        BR_TRY(each(context, &beside));
    return behind.n_half > 0 ? each(context, &behind) : BR_OK;
}

br_status br_model_adapter_room(const br_model *m, const br_model_matrix *at, br_model_each_fill each, void *context) {
    const br_config *c = &m->config;
    int32_t n_row, n_col;
    model_adapter_shape(m, at, at->rank, &n_row, &n_col);
    if (at->cls != BR_W_MLA_KV_B) {
        const bi_mat mat = packed_of(m, at);
        return mat.data ? room_of(m, mat, n_row, n_col, each, context) : BR_OK;
    }
    const absorbed pair = absorbed_at(m, at);
    if (!pair.v.a.data)
        return BR_OK;
    if (!at->is_b) {
        BR_TRY(room_of(m, pair.v.a, at->rank, n_col, each, context));
        return room_of(m, pair.k.b, n_col, at->rank, each, context);
    }
    for (int32_t h = 0; h < c->n_head; h++) {
        BR_TRY(room_of(m, bi_mat_at(&pair.k.a, h), at->rank, c->d_nope, each, context));
        BR_TRY(room_of(m, bi_mat_at(&pair.v.b, h), c->d_v, at->rank, each, context));
    }
    return BR_OK;
}

br_status br_model_adapter_scales(const br_model *m, const br_model_matrix *at, double alpha, int32_t rslora, br_model_each_fill each,
                                  void *context) {
    int32_t n;
    const float *s = model_adapter_s(m, at, &n), value = model_adapter_scale(at, alpha, rslora);
    br_fill fill = {.at = (uint16_t *)(uintptr_t)s, .n_run = 1, .n_half = (int64_t)sizeof value / 2 * n};
    memcpy(&fill.word, &value, sizeof value);
    return s ? each(context, &fill) : BR_OK;
}
