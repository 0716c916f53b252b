/* One allocator with a seal and a fault counter; see br_mem.h. */
#include "br_mem.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_ALIGN = 64 };

static _Thread_local const char *sealed_phase;
static atomic_long fail_countdown;
static atomic_long alloc_count;

static int fault_due(void) {
    long left = atomic_load(&fail_countdown);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&fail_countdown, &left, left - 1))
            return left == 1;
    }
    return 0;
}

/* Large blocks come from calloc as pages that are zero already and cost nothing until somebody writes them: a model of 86 GB is
 * then filled by all threads instead of first being cleared by one. What calloc gave stands in front of the block. */
static void *block_new(size_t bytes) {
    if (sealed_phase) {
        fprintf(stderr, "bitroll: allocation of %zu bytes in the sealed phase '%s'\n", bytes, sealed_phase);
        abort();
    }
    atomic_fetch_add(&alloc_count, 1);
    if (fault_due() || bytes > SIZE_MAX - 2 * BLOCK_ALIGN)
        return NULL;
    unsigned char *given = calloc(1, bytes + 2 * BLOCK_ALIGN);
    if (!given)
        return NULL;
    unsigned char *block = given + BLOCK_ALIGN;
    block += (BLOCK_ALIGN - (uintptr_t)block % BLOCK_ALIGN) % BLOCK_ALIGN;
    memcpy(block - sizeof given, &given, sizeof given);
    return block;
}

br_status br_mem_alloc(void **out, size_t bytes, const char *what) {
    *out = block_new(bytes);
    if (!*out)
        return br_fail(BR_E_NOMEM, "no memory for %s: %zu bytes asked", what, bytes);
    return BR_OK;
}

br_status br_mem_grow(void **block, size_t bytes_old, size_t bytes_new, const char *what) {
    void *grown = NULL;
    BR_TRY(br_mem_alloc(&grown, bytes_new, what));
    if (*block && bytes_old)
        memcpy(grown, *block, bytes_old < bytes_new ? bytes_old : bytes_new);
    br_mem_free(*block);
    *block = grown;
    return BR_OK;
}

void br_mem_free(void *block) {
    unsigned char *given;
    if (!block)
        return;
    memcpy(&given, (unsigned char *)block - sizeof given, sizeof given);
    free(given);
}

const char *br_mem_seal(const char *phase) {
    const char *outer = sealed_phase;
    sealed_phase = phase;
    return outer;
}

void br_mem_unseal(const char *outer) {
    sealed_phase = outer;
}

int br_mem_is_sealed(void) {
    return sealed_phase != NULL;
}

const char *br_mem_exempt_begin(void) {
    const char *phase = sealed_phase;
    sealed_phase = NULL;
    return phase;
}

void br_mem_exempt_end(const char *phase) {
    sealed_phase = phase;
}

void br_mem_fail_nth(long n) {
    atomic_store(&fail_countdown, n);
}

long br_mem_alloc_count(void) {
    return atomic_load(&alloc_count);
}

void *br_arena_take(br_arena *arena, size_t bytes, size_t align) {
    size_t begin = (arena->used + align - 1) & ~(align - 1);
    BR_ASSERT(begin >= arena->used && bytes <= SIZE_MAX - begin);
    arena->used = begin + bytes;
    if (!arena->base)
        return NULL;
    BR_ASSERT(arena->used <= arena->size);
    return arena->base + begin;
}

size_t br_arena_measure(br_layout lay_out, void *owner) {
    br_arena arena = {0};
    lay_out(owner, &arena);
    return arena.used;
}

br_status br_arena_open(br_arena *arena, br_layout lay_out, void *owner, const char *what) {
    *arena = (br_arena){.size = br_arena_measure(lay_out, owner)};
    BR_TRY(br_mem_alloc((void **)&arena->base, arena->size, what));
    lay_out(owner, arena);
    return BR_OK;
}
