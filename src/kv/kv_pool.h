/* kv_pool: numbers with reference counts, and rings of numbers. Layer: kv; includes base. Knows no tokens and no requests.
 * Everything lives in the arena of the owner; a layout call takes its arrays and is run twice (br_mem.h). */
#ifndef KV_POOL_H
#define KV_POOL_H

#include "br_mem.h"
#include <stdint.h>

/* Numbers 0..n-1. A number is free (n_ref 0, on the stack) or used (n_ref >= 1). The last one freed is taken first. */
typedef struct kv_pool {
    int32_t n, n_free;
    int32_t *n_ref; /* (n) */
    int32_t *stack; /* (n), the first n_free are the free numbers */
} kv_pool;

void kv_pool_layout(kv_pool *pool, br_arena *arena, int32_t n);
int32_t kv_pool_take(kv_pool *pool); /* with one reference; -1 when none is free */
void kv_pool_hold(kv_pool *pool, int32_t i);
void kv_pool_drop(kv_pool *pool, int32_t i); /* frees the number with its last reference */

/* An ordered list over numbers 0..n-1, each in it at most once; place n is its two ends. */
typedef struct kv_ring {
    int32_t n, n_in;
    int32_t *prev, *next; /* (n + 1); next[i] = -1: i is not in the ring */
} kv_ring;

void kv_ring_layout(kv_ring *ring, br_arena *arena, int32_t n);
void kv_ring_insert(kv_ring *ring, int32_t i, int32_t before); /* before = n appends */
void kv_ring_remove(kv_ring *ring, int32_t i);
static inline int32_t kv_ring_first(const kv_ring *ring) { return ring->next[ring->n]; } /* n when empty */
static inline int32_t kv_ring_last(const kv_ring *ring) { return ring->prev[ring->n]; }  /* n when empty */
static inline int kv_ring_has(const kv_ring *ring, int32_t i) { return ring->next[i] >= 0; }

#endif
