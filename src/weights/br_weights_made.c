/* Checkpoints made from recipes: the table of tensors without files, and the bytes of one tensor; see br_weights.h. */
#include "br_weights.h"

#include "br_mem.h"
#include "br_weights_table.h"

#include <stdio.h>
#include <string.h>

static size_t element_bytes(br_dtype dtype) {
    return dtype == BR_DTYPE_F32 ? 4 : dtype == BR_DTYPE_BF16 ? 2 : 1;
}

static void make_elements(const br_tensor *t, uint64_t first, unsigned char *bytes, size_t n) {
    enum { PIECE = 1024 };
    uint16_t half[PIECE];
    float word[PIECE];
    if (t->dtype == BR_DTYPE_U8 && t->cls < BR_CLASS_LORA_END) /* two MXFP4 codes a byte */
        bi_weightgen_fill_fp4(t->gen, first, bytes, n);
    else if (t->dtype == BR_DTYPE_U8)
        bi_weightgen_fill_scale(t->gen, first, bytes, n);
    for (size_t at = 0; t->dtype != BR_DTYPE_U8 && at < n; at += PIECE) {
        const size_t n_piece = n - at < PIECE ? n - at : PIECE;
        if (t->dtype == BR_DTYPE_BF16) {
            bi_weightgen_fill_bf16(t->gen, first + at, half, n_piece);
            memcpy(bytes + at * sizeof half[0], half, n_piece * sizeof half[0]);
        } else {
            bi_weightgen_fill_f32(t->gen, first + at, word, n_piece);
            memcpy(bytes + at * sizeof word[0], word, n_piece * sizeof word[0]);
        }
    }
}

void br_tensor_make(const br_tensor *t, uint64_t offset, unsigned char *bytes, size_t n) {
    const size_t size = element_bytes(t->dtype);
    const uint64_t first = offset / size, count = n / size;
    BR_ASSERT(t->gen && offset % size == 0 && n % size == 0 && offset + n <= t->n_byte);
    const uint64_t n_drawn = first >= t->n_drawn ? 0 : t->n_drawn - first < count ? t->n_drawn - first : count;
    memset(bytes, 0, n);
    make_elements(t, first, bytes, (size_t)n_drawn);
}

static void make_tensor(br_weights *w, int64_t i, br_tensor_draw draw, void *context) {
    br_tensor *t = &w->tensor[i];
    br_expect want;
    br_weight_expect(&w->config, i, &want);
    br_weight_name(&w->config, want.cls, want.layer, want.expert, w->name[i]);
    *t = (br_tensor){.cls = want.cls, .layer = want.layer, .expert = want.expert, .n_dim = want.n_dim, .name = w->name[i],
                     .gen = &w->gen[i], .shard = -1};
    uint64_t n_element = 1;
    for (int32_t d = 0; d < want.n_dim; d++) {
        t->dim[d] = want.dim[d];
        n_element *= (uint64_t)want.dim[d];
    }
    t->n_drawn = n_element;
    draw(context, t, &w->gen[i]);
    BR_ASSERT((want.dtypes & 1u << t->dtype) && t->n_drawn <= n_element);
    t->n_byte = (size_t)n_element * element_bytes(t->dtype);
}

static br_status make_table(br_weights *w) {
    const size_t n = (size_t)br_weight_expect_count(&w->config);
    BR_TRY(br_mem_alloc((void **)&w->tensor, n * sizeof *w->tensor, "the table of tensors"));
    BR_TRY(br_mem_alloc((void **)&w->gen, n * sizeof *w->gen, "recipes of tensors"));
    BR_TRY(br_mem_alloc((void **)&w->name, n * sizeof *w->name, "names of tensors"));
    BR_TRY(br_mem_alloc((void **)&w->leaf, n * sizeof *w->leaf, "digests"));
    BR_TRY(br_mem_alloc((void **)&w->by_name, n * sizeof *w->by_name, "the order of digests"));
    w->n_tensor = (int64_t)n;
    return BR_OK;
}

br_status br_weights_generate(const br_config *config, const char *origin, br_digest identity, br_tensor_draw draw, void *context,
                              br_weights **out) {
    br_weights *w = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "a checkpoint"));
    w->config = *config;
    w->identity = identity;
    snprintf(w->origin, sizeof w->origin, "%s", origin);
    br_status status = make_table(w);
    if (status != BR_OK) {
        br_weights_close(w);
        return status;
    }
    for (int64_t i = 0; i < w->n_tensor; i++)
        make_tensor(w, i, draw, context);
    *out = w;
    return BR_OK;
}

const char *br_weights_origin(const br_weights *weights) {
    return weights->gen ? weights->origin : NULL;
}
