/* The hash table of nodes; see kv_prefix.h. Hash values are not stored: a bucket is walked and tokens are compared, so equal
 * hashes cost time only. */
#include "kv_prefix.h"

#include "br_hash.h"
#include <string.h>

void kv_prefix_layout(kv_cache *kv, br_arena *arena) {
    int32_t n_page = kv->page.n;
    kv->n_bucket = 1;
    while (kv->n_bucket < n_page)
        kv->n_bucket *= 2;
    kv->node = BR_ARENA_ARRAY(arena, kv_node, n_page);
    kv->token = BR_ARENA_ARRAY(arena, int32_t, (size_t)n_page * BR_PAGE_TOK);
    kv->bucket = BR_ARENA_ARRAY(arena, int32_t, kv->n_bucket);
    if (!arena->base)
        return;
    for (int32_t i = 0; i < n_page; i++)
        kv->node[i] = (kv_node){.parent = -1, .state = -1, .next = -1};
    for (int32_t i = 0; i < kv->n_bucket; i++)
        kv->bucket[i] = -1;
}

/* All tails of one parent that begin with one token share a bucket, so that the longest that fits is found in one walk. */
static int32_t *bucket_of(const kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok) {
    struct { br_digest root; int32_t parent, first; } key = {root, parent, token[0]};
    uint64_t hash = br_hash_u64(&key, sizeof key);
    if (n_tok == BR_PAGE_TOK)
        hash ^= br_hash_u64(token, sizeof *token * BR_PAGE_TOK);
    return &kv->bucket[hash & (uint64_t)(kv->n_bucket - 1)];
}

static int node_is(const kv_cache *kv, int32_t page, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok) {
    const kv_node *node = &kv->node[page];
    return node->n_tok == n_tok && node->parent == parent && br_digest_equal(node->root, root) &&
           memcmp(kv->token + (size_t)page * BR_PAGE_TOK, token, sizeof *token * (size_t)n_tok) == 0;
}

int32_t kv_prefix_node(const kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok) {
    int32_t page = *bucket_of(kv, root, parent, token, n_tok);
    while (page >= 0 && !node_is(kv, page, root, parent, token, n_tok))
        page = kv->node[page].next;
    return page;
}

/* The longest tail with a state whose tokens begin token[0..n_tok-1]; -1. */
static int32_t tail_under(const kv_cache *kv, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok) {
    int32_t best = -1;
    if (n_tok == 0)
        return -1;
    for (int32_t page = *bucket_of(kv, root, parent, token, 1); page >= 0; page = kv->node[page].next) {
        const kv_node *node = &kv->node[page];
        if (node->n_tok < BR_PAGE_TOK && node->n_tok <= n_tok && node->state >= 0 &&
            (best < 0 || node->n_tok > kv->node[best].n_tok) && node_is(kv, page, root, parent, token, node->n_tok))
            best = page;
    }
    return best;
}

kv_hit kv_find(const kv_cache *kv, br_digest root, const int32_t *token, int32_t n_tok, int32_t *page) {
    int32_t depth = 0, deepest = 0; /* blocks matched; blocks up to the last one with a state */
    while ((depth + 1) * BR_PAGE_TOK <= n_tok) {
        int32_t parent = depth ? page[depth - 1] : -1;
        int32_t found = kv_prefix_node(kv, root, parent, token + depth * BR_PAGE_TOK, BR_PAGE_TOK);
        if (found < 0)
            break;
        page[depth++] = found;
        if (kv->node[found].state >= 0)
            deepest = depth;
    }
    for (; depth >= deepest; depth--) {
        int32_t done = depth * BR_PAGE_TOK;
        int32_t tail = tail_under(kv, root, depth ? page[depth - 1] : -1, token + done, n_tok - done);
        if (tail >= 0) {
            page[depth] = tail;
            return (kv_hit){.n_tok = done + kv->node[tail].n_tok, .n_page = depth + 1};
        }
    }
    return (kv_hit){.n_tok = deepest * BR_PAGE_TOK, .n_page = deepest};
}

void kv_prefix_link(kv_cache *kv, int32_t page, br_digest root, int32_t parent, const int32_t *token, int32_t n_tok) {
    int32_t *bucket = bucket_of(kv, root, parent, token, n_tok);
    BR_ASSERT(kv->node[page].n_tok == 0 && n_tok >= 1 && n_tok <= BR_PAGE_TOK);
    kv->node[page] = (kv_node){.root = root, .parent = parent, .n_tok = n_tok, .state = -1, .next = *bucket};
    *bucket = page;
    memcpy(kv->token + (size_t)page * BR_PAGE_TOK, token, sizeof *token * (size_t)n_tok);
    if (parent >= 0)
        kv->node[parent].n_child++;
    kv_pool_hold(&kv->page, page);
}

void kv_prefix_set_state(kv_cache *kv, int32_t page, int32_t state) {
    BR_ASSERT(kv->node[page].state < 0 && kv->state_page[state] < 0);
    kv->node[page].state = state;
    kv->state_page[state] = page;
    kv_ring_insert(&kv->kept, state, kv->kept.n);
}

int32_t kv_prefix_detach_state(kv_cache *kv, int32_t page) {
    int32_t state = kv->node[page].state;
    BR_ASSERT(state >= 0);
    kv->node[page].state = -1;
    kv->state_page[state] = -1;
    kv_ring_remove(&kv->kept, state);
    return state;
}

void kv_prefix_unlink(kv_cache *kv, int32_t page) {
    kv_node *node = &kv->node[page];
    BR_ASSERT(node->n_tok > 0 && node->n_child == 0);
    int32_t *at = bucket_of(kv, node->root, node->parent, kv->token + (size_t)page * BR_PAGE_TOK, node->n_tok);
    while (*at != page)
        at = &kv->node[*at].next;
    *at = node->next;
    if (node->state >= 0)
        kv_pool_drop(&kv->state, kv_prefix_detach_state(kv, page));
    if (node->parent >= 0)
        kv->node[node->parent].n_child--;
    *node = (kv_node){.parent = -1, .state = -1, .next = -1};
    kv_pool_drop(&kv->page, page);
}

void kv_prefix_remove(kv_cache *kv, int32_t page) {
    do {
        int32_t parent = kv->node[page].parent;
        kv_ring_remove(&kv->idle, page);
        kv_prefix_unlink(kv, page);
        page = parent;
    } while (page >= 0 && kv_ring_has(&kv->idle, page) && kv_prefix_is_dead(kv, page));
}
