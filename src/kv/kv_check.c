/* The invariants K-1 .. K-8 of br_kv.h, walked in full. */
#include "kv_prefix.h"

#include "br_hash.h"

static br_status check_pool(const kv_cache *kv, const kv_pool *pool, const char *what) {
    int32_t n_unused = 0;
    for (int32_t i = 0; i < pool->n; i++) {
        n_unused += pool->n_ref[i] == 0;
        kv->mark[i] = 0;
    }
    if (n_unused != pool->n_free)
        return br_fail(BR_E_MISMATCH, "K-2: %d %s without references, %d on the free stack", n_unused, what, pool->n_free);
    for (int32_t i = 0; i < pool->n_free; i++) {
        if (pool->stack[i] < 0 || pool->stack[i] >= pool->n || pool->n_ref[pool->stack[i]] != 0)
            return br_fail(BR_E_MISMATCH, "K-2: %s %d is free and used", what, pool->stack[i]);
        if (kv->mark[pool->stack[i]]++)
            return br_fail(BR_E_MISMATCH, "K-2: %s %d is twice on the free stack", what, pool->stack[i]);
    }
    return BR_OK;
}

static br_status check_parent(const kv_cache *kv, int32_t page, int held) {
    const kv_node *node = &kv->node[page];
    if (node->parent < 0)
        return BR_OK;
    const kv_node *parent = &kv->node[node->parent];
    if (parent->n_tok != BR_PAGE_TOK || !br_digest_equal(parent->root, node->root))
        return br_fail(BR_E_MISMATCH, "K-4: page %d has parent %d, which is no full node of its root", page, node->parent);
    if (held && kv_ring_has(&kv->idle, node->parent))
        return br_fail(BR_E_MISMATCH, "K-8: page %d is in use, its parent %d is idle", page, node->parent);
    return BR_OK;
}

static br_status check_node(const kv_cache *kv, int32_t page, int held) {
    const kv_node *node = &kv->node[page];
    int idle = kv_ring_has(&kv->idle, page);
    if (node->n_tok == 0) {
        if (idle || node->state >= 0 || node->n_child)
            return br_fail(BR_E_MISMATCH, "K-5: page %d is not in the index but idle, with a state or with children", page);
        return BR_OK;
    }
    if (kv_prefix_node(kv, node->root, node->parent, kv->token + (size_t)page * BR_PAGE_TOK, node->n_tok) != page)
        return br_fail(BR_E_MISMATCH, "K-3: page %d is not what a look-up of its tokens finds", page);
    if (idle == held)
        return br_fail(BR_E_MISMATCH, "K-5: page %d is %s and %s", page, idle ? "idle" : "not idle",
                       held ? "held" : "not held");
    if (idle && kv_prefix_is_dead(kv, page))
        return br_fail(BR_E_MISMATCH, "K-6: page %d is an idle leaf without a state", page);
    if (node->n_child && node->n_tok < BR_PAGE_TOK)
        return br_fail(BR_E_MISMATCH, "K-4: page %d is a tail of %d tokens with children", page, node->n_tok);
    if (node->state >= 0 && kv->state_page[node->state] != page)
        return br_fail(BR_E_MISMATCH, "K-7: page %d keeps state %d, which names page %d", page, node->state,
                       kv->state_page[node->state]);
    return check_parent(kv, page, held);
}

static br_status check_children(const kv_cache *kv) {
    for (int32_t i = 0; i < kv->page.n; i++)
        kv->mark[i] = 0;
    for (int32_t i = 0; i < kv->page.n; i++)
        if (kv->node[i].n_tok > 0 && kv->node[i].parent >= 0)
            kv->mark[kv->node[i].parent]++;
    for (int32_t i = 0; i < kv->page.n; i++)
        if (kv->mark[i] != kv->node[i].n_child)
            return br_fail(BR_E_MISMATCH, "K-4: page %d counts %d children, %d nodes name it", i, kv->node[i].n_child,
                           kv->mark[i]);
    return BR_OK;
}

/* The walk is bounded by the ring's count, so that a broken ring ends it too. */
static br_status check_idle_order(const kv_cache *kv) {
    int32_t n_seen = 0, page = kv_ring_first(&kv->idle);
    for (int32_t i = 0; i < kv->page.n; i++)
        kv->mark[i] = 0;
    for (; page < kv->page.n && n_seen <= kv->idle.n_in; page = kv->idle.next[page], n_seen++) {
        if (kv->node[page].parent >= 0 && kv->mark[kv->node[page].parent])
            return br_fail(BR_E_MISMATCH, "K-5: idle page %d stands after its parent %d", page, kv->node[page].parent);
        kv->mark[page] = 1;
    }
    if (n_seen != kv->idle.n_in)
        return br_fail(BR_E_MISMATCH, "K-5: %d idle pages counted, %d found", kv->idle.n_in, n_seen);
    return BR_OK;
}

static br_status check_states(const kv_cache *kv, const int32_t *state_held) {
    int32_t n_kept = 0;
    for (int32_t i = 0; i < kv->state.n; i++) {
        int kept = kv->state_page[i] >= 0;
        n_kept += kept;
        if (kept + state_held[i] != kv->state.n_ref[i] || kv->state.n_ref[i] > 1)
            return br_fail(BR_E_MISMATCH, "K-7: state %d has %d references, %d sequences and %d nodes own it", i,
                           kv->state.n_ref[i], state_held[i], kept);
        if (kept != kv_ring_has(&kv->kept, i) || (kept && kv->node[kv->state_page[i]].state != i))
            return br_fail(BR_E_MISMATCH, "K-7: kept state %d is not in the ring or not its node's", i);
    }
    if (n_kept != kv->kept.n_in)
        return br_fail(BR_E_MISMATCH, "K-7: %d states kept, %d counted", n_kept, kv->kept.n_in);
    return BR_OK;
}

br_status kv_check(const kv_cache *kv, const int32_t *page_held, const int32_t *state_held) {
    BR_TRY(check_pool(kv, &kv->page, "page"));
    BR_TRY(check_pool(kv, &kv->state, "state"));
    for (int32_t i = 0; i < kv->page.n; i++) {
        if (kv->page.n_ref[i] != page_held[i] + (kv->node[i].n_tok > 0))
            return br_fail(BR_E_MISMATCH, "K-1: page %d has %d references, %d sequences name it and it is %s the index", i,
                           kv->page.n_ref[i], page_held[i], kv->node[i].n_tok ? "in" : "not in");
        BR_TRY(check_node(kv, i, page_held[i] > 0));
    }
    BR_TRY(check_children(kv));
    BR_TRY(check_idle_order(kv));
    return check_states(kv, state_held);
}
