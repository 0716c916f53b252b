/* kv_prefix: the nodes of the index, one step below br_kv.h: linking, finding, removing. Layer: kv; private to src/kv. */
#ifndef KV_PREFIX_H
#define KV_PREFIX_H

#include "br_kv.h"

void kv_prefix_layout(kv_cache *kv, br_arena *arena);
/* The node of exactly these tokens under this parent; -1. */
int32_t kv_prefix_node(const kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok);
void kv_prefix_link(kv_cache *kv, int32_t page, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok);
/* Takes an idle leaf out, with its state and the index's reference; then its parent, if that is now an idle leaf without a
 * state, and so on up (K-6). */
void kv_prefix_remove(kv_cache *kv, int32_t page);
/* Takes a leaf out whatever holds it; its state is released, the index's reference is dropped. The parent stays as it is. */
void kv_prefix_unlink(kv_cache *kv, int32_t page);
void kv_prefix_set_state(kv_cache *kv, int32_t page, int32_t state);
int32_t kv_prefix_detach_state(kv_cache *kv, int32_t page); /* the caller owns it now */
static inline int kv_prefix_is_dead(const kv_cache *kv, int32_t page) { /* idle is the caller's business */
    return kv->node[page].n_child == 0 && kv->node[page].state < 0;
}

#endif
