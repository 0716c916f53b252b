/* Free stacks and rings; see kv_pool.h. */
#include "kv_pool.h"

void kv_pool_layout(kv_pool *pool, br_arena *arena, int32_t n) {
    *pool = (kv_pool){.n = n, .n_free = n};
    pool->n_ref = BR_ARENA_ARRAY(arena, int32_t, n);
    pool->stack = BR_ARENA_ARRAY(arena, int32_t, n);
    if (!arena->base)
        return;
    for (int32_t i = 0; i < n; i++)
        pool->stack[i] = n - 1 - i; /* number 0 is taken first */
}

int32_t kv_pool_take(kv_pool *pool) {
    if (pool->n_free == 0)
        return -1;
    int32_t i = pool->stack[--pool->n_free];
    BR_ASSERT(pool->n_ref[i] == 0);
    pool->n_ref[i] = 1;
    return i;
}

void kv_pool_hold(kv_pool *pool, int32_t i) {
    BR_ASSERT(i >= 0 && i < pool->n && pool->n_ref[i] > 0);
    pool->n_ref[i]++;
}

void kv_pool_drop(kv_pool *pool, int32_t i) {
    BR_ASSERT(i >= 0 && i < pool->n && pool->n_ref[i] > 0);
    if (--pool->n_ref[i] == 0)
        pool->stack[pool->n_free++] = i;
}

void kv_ring_layout(kv_ring *ring, br_arena *arena, int32_t n) {
    *ring = (kv_ring){.n = n};
    ring->prev = BR_ARENA_ARRAY(arena, int32_t, n + 1);
    ring->next = BR_ARENA_ARRAY(arena, int32_t, n + 1);
    if (!arena->base)
        return;
    for (int32_t i = 0; i < n; i++)
        ring->prev[i] = ring->next[i] = -1;
    ring->prev[n] = ring->next[n] = n;
}

void kv_ring_insert(kv_ring *ring, int32_t i, int32_t before) {
    BR_ASSERT(i >= 0 && i < ring->n && !kv_ring_has(ring, i) && kv_ring_has(ring, before));
    ring->prev[i] = ring->prev[before];
    ring->next[i] = before;
    ring->next[ring->prev[i]] = i;
    ring->prev[before] = i;
    ring->n_in++;
}

void kv_ring_remove(kv_ring *ring, int32_t i) {
    BR_ASSERT(i >= 0 && i < ring->n && kv_ring_has(ring, i));
    ring->next[ring->prev[i]] = ring->next[i];
    ring->prev[ring->next[i]] = ring->prev[i];
    ring->prev[i] = ring->next[i] = -1;
    ring->n_in--;
}
