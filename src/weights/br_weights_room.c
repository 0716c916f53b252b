/* Tables whose data come from memory; see br_weights.h. */
#include "br_weights.h"

#include "br_mem.h"
#include "br_weights_table.h"

#include <stdio.h>
#include <string.h>

enum { ROOM_ALIGN = 64 };

static br_status make_table(const br_weights *from, br_weights *w) {
    const size_t n = (size_t)from->n_tensor;
    BR_TRY(br_mem_alloc((void **)&w->tensor, n * sizeof *w->tensor, "the table of tensors"));
    BR_TRY(br_mem_alloc((void **)&w->name, n * sizeof *w->name, "names of tensors"));
    BR_TRY(br_mem_alloc((void **)&w->leaf, n * sizeof *w->leaf, "digests"));
    return br_mem_alloc((void **)&w->by_name, n * sizeof *w->by_name, "the order of digests");
}

br_status br_weights_like(const br_weights *weights, br_weights **out) {
    br_weights *w = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&w, sizeof *w, "a checkpoint"));
    const br_status status = make_table(weights, w);
    if (status != BR_OK) {
        br_weights_close(w);
        return status;
    }
    w->config = weights->config;
    w->n_tensor = weights->n_tensor;
    for (int64_t i = 0; i < w->n_tensor; i++) {
        const br_tensor *t = &weights->tensor[i];
        snprintf(w->name[i], sizeof w->name[i], "%s", t->name);
        w->tensor[i] = (br_tensor){.cls = t->cls, .layer = t->layer, .expert = t->expert, .dtype = t->dtype, .n_dim = t->n_dim,
                                   .n_byte = t->n_byte, .name = w->name[i], .shard = -1};
        memcpy(w->tensor[i].dim, t->dim, sizeof t->dim);
    }
    *out = w;
    return BR_OK;
}

br_status br_weights_take_room(br_weights *w) {
    size_t n = 0;
    for (int64_t i = 0; i < w->n_tensor; i++)
        n += (w->tensor[i].n_byte + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;
    BR_TRY(br_mem_alloc((void **)&w->room, n, "weights from memory"));
    n = 0;
    for (int64_t i = 0; i < w->n_tensor; i++) {
        w->tensor[i].data = w->room + n;
        n += (w->tensor[i].n_byte + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;
    }
    return BR_OK;
}

void br_weights_drop_room(br_weights *w) {
    for (int64_t i = 0; i < w->n_tensor; i++)
        w->tensor[i].data = NULL;
    br_mem_free(w->room);
    w->room = NULL;
}

unsigned char *br_weights_room(const br_weights *w, int64_t i) {
    BR_ASSERT(w->room && i >= 0 && i < w->n_tensor);
    return w->room + ((const unsigned char *)w->tensor[i].data - w->room);
}
