/* br_mem: the only allocator of the tree, and the arenas carved from it.
 *
 * Layer: base. Owns every heap block of ours. Each lifetime (engine, session, job) has one arena whose size is computed by
 * running the same layout code twice: first on a measuring arena (base NULL, only counts), then on a real one.
 * Between br_mem_seal and br_mem_unseal an allocation by this thread is a programmer's error: the process stops and names
 * the phase. Code that must allocate all the same (HDF5's own calls do; ours around them) says so with an exempt scope. */
#ifndef BR_MEM_H
#define BR_MEM_H

#include "br_status.h"
#include <stddef.h>

/* 64-byte aligned, zeroed. Errors: BR_E_NOMEM. *out is NULL on error. bytes 0 gives a valid pointer. */
br_status br_mem_alloc(void **out, size_t bytes, const char *what);
/* Grows a block made by br_mem_alloc, keeps the content, zeroes the rest. *block may be NULL. Only for parsers at open. */
br_status br_mem_grow(void **block, size_t bytes_old, size_t bytes_new, const char *what);
void br_mem_free(void *block); /* NULL is a no-op */

/* Seals this thread; phase: a string literal, shown when the seal is broken. Returns the phase around it, to hand back. */
const char *br_mem_seal(const char *phase);
void br_mem_unseal(const char *outer);
int br_mem_is_sealed(void);
const char *br_mem_exempt_begin(void); /* returns the phase to hand back */
void br_mem_exempt_end(const char *phase);

/* Fault injection for tests: the n-th allocation from now (1 = next) fails, once. 0 switches it off. */
void br_mem_fail_nth(long n);
long br_mem_alloc_count(void); /* allocations since the process began */

typedef struct br_arena {
    unsigned char *base; /* NULL: measuring */
    size_t used, size;
} br_arena;

/* Zeroed, `align` a power of two. A measuring arena returns NULL and counts. A real arena that runs out asserts: its size
 * came from the same code. */
void *br_arena_take(br_arena *arena, size_t bytes, size_t align);
/* Takes the owner's arrays, always the same ones in the same order. */
typedef void (*br_layout)(void *owner, br_arena *arena);
size_t br_arena_measure(br_layout lay_out, void *owner); /* bytes that it takes */
/* Measures, allocates, and lays out for real. base NULL on error. Freed by br_mem_free(arena->base). */
br_status br_arena_open(br_arena *arena, br_layout lay_out, void *owner, const char *what);
#define BR_ARENA_ARRAY(arena, type, count) ((type *)br_arena_take((arena), sizeof(type) * (size_t)(count), 64))
/* Right behind what was taken before, where types are aligned alike. */
#define BR_ARENA_NEXT(arena, type, count) ((type *)br_arena_take((arena), sizeof(type) * (size_t)(count), _Alignof(type)))

#endif
