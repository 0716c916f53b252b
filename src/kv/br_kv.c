/* Taking, holding and releasing pages and states; what is evicted for them. See br_kv.h. */
#include "br_kv.h"

#include "kv_prefix.h"

void kv_layout(kv_cache *kv, br_arena *arena, int32_t n_page, int32_t n_state) {
    kv->n_page_evicted = kv->n_state_evicted = 0;
    kv_pool_layout(&kv->page, arena, n_page);
    kv_pool_layout(&kv->state, arena, n_state);
    kv_ring_layout(&kv->idle, arena, n_page);
    kv_ring_layout(&kv->kept, arena, n_state);
    kv->state_page = BR_ARENA_ARRAY(arena, int32_t, n_state);
    kv->mark = BR_ARENA_ARRAY(arena, int32_t, n_page > n_state ? n_page : n_state);
    kv_prefix_layout(kv, arena);
    if (!arena->base)
        return;
    for (int32_t i = 0; i < n_state; i++)
        kv->state_page[i] = -1;
}

int kv_page_indexed(const kv_cache *kv, int32_t page) {
    return kv->node[page].n_tok > 0;
}

int32_t kv_page_available(const kv_cache *kv) {
    return kv->page.n_free + kv->idle.n_in;
}

/* The first idle node is a leaf, since children stand before their parents (K-5). */
int32_t kv_page_take(kv_cache *kv) {
    if (kv->page.n_free == 0 && kv->idle.n_in > 0) {
        int32_t n_idle = kv->idle.n_in;
        kv_prefix_remove(kv, kv_ring_first(&kv->idle));
        kv->n_page_evicted += n_idle - kv->idle.n_in;
    }
    return kv_pool_take(&kv->page);
}

void kv_page_hold(kv_cache *kv, int32_t page) {
    kv_pool_hold(&kv->page, page);
    if (kv_ring_has(&kv->idle, page))
        kv_ring_remove(&kv->idle, page);
}

void kv_page_release(kv_cache *kv, int32_t page) {
    kv_pool_drop(&kv->page, page);
    if (!kv_page_indexed(kv, page) || kv->page.n_ref[page] > 1)
        return;
    kv_ring_insert(&kv->idle, page, kv->idle.n);
    if (kv_prefix_is_dead(kv, page))
        kv_prefix_remove(kv, page);
}

int kv_state_available(const kv_cache *kv) {
    return kv->state.n_free > 0 || kv->kept.n_in > 0;
}

static void evict_state(kv_cache *kv) {
    int32_t state = kv_ring_first(&kv->kept);
    int32_t page = kv->state_page[state];
    kv_pool_drop(&kv->state, kv_prefix_detach_state(kv, page));
    kv->n_state_evicted++;
    if (kv_ring_has(&kv->idle, page) && kv_prefix_is_dead(kv, page))
        kv_prefix_remove(kv, page);
}

int32_t kv_state_take(kv_cache *kv) {
    if (kv->state.n_free == 0 && kv->kept.n_in > 0)
        evict_state(kv);
    return kv_pool_take(&kv->state);
}

void kv_state_release(kv_cache *kv, int32_t state) {
    BR_ASSERT(kv->state_page[state] < 0);
    kv_pool_drop(&kv->state, state);
}

int32_t kv_state_start(kv_cache *kv, int32_t page, int32_t *src) {
    int32_t kept = kv->node[page].state;
    kv_ring_remove(&kv->kept, kept); /* used now: the last to be evicted */
    kv_ring_insert(&kv->kept, kept, kv->kept.n);
    *src = kept;
    if (kv->state.n_free > 0 || kv->kept.n_in > 1)
        return kv_state_take(kv);
    *src = -1;
    return kv_prefix_detach_state(kv, page);
}

int32_t kv_insert(kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok, int32_t page,
                  int32_t state) {
    BR_ASSERT(kv->page.n_ref[page] == 1 && !kv_page_indexed(kv, page));
    int32_t node = kv_prefix_node(kv, root, parent, token, n_tok);
    if (node < 0) {
        kv_prefix_link(kv, page, root, parent, token, n_tok);
        node = page;
    } else {
        kv_page_hold(kv, node);
        kv_page_release(kv, page);
    }
    if (state >= 0 && kv->node[node].state < 0)
        kv_prefix_set_state(kv, node, state);
    else if (state >= 0)
        kv_state_release(kv, state);
    return node;
}

int kv_take_back(kv_cache *kv, int32_t page) {
    BR_ASSERT(kv_page_indexed(kv, page) && kv->node[page].n_tok < BR_PAGE_TOK);
    if (kv->page.n_ref[page] != 2)
        return 0;
    kv_prefix_unlink(kv, page);
    return 1;
}
