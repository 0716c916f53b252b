/* row_case: what the suites of the row-wise ops share: input families, memory of one test, the backends to try, and the
 * comparisons that name the first wrong place.
 *
 * Layer: tests. A test's memory is one arena, poisoned with NaN patterns, so that an op which reads what it was not given
 * or leaves an output unwritten shows. */
#ifndef ROW_CASE_H
#define ROW_CASE_H

#include "bi_backend.h"
#include "br_mem.h"
#include "test_support.h"

#include <string.h>

enum { ROW_CASE_ISAS = 3, ROW_CASE_BYTES = 24 << 20 };
static const char *const row_case_isa[ROW_CASE_ISAS] = {"portable", "avx2", "avx512"};
static br_arena row_case_arena;

static inline void row_case_setup(void) {
    CHECK_OK(br_mem_alloc((void **)&row_case_arena.base, ROW_CASE_BYTES, "a test"));
    row_case_arena.used = 0;
    row_case_arena.size = ROW_CASE_BYTES;
}

static inline void row_case_teardown(void) {
    br_mem_free(row_case_arena.base);
}

#define ROW_CASE_ARRAY(type, count) ((type *)row_case_poisoned(sizeof(type) * (size_t)(count)))

static inline void *row_case_poisoned(size_t bytes) {
    return memset(br_arena_take(&row_case_arena, bytes, 64), 0xff, bytes);
}

/* 0 when this processor lacks the instruction set. */
static inline int row_case_open(int isa, int n_thread, bi_backend *backend, br_pool **pool) {
    bi_limits limits = {.n_row = 256, .d_in = 1024, .rank = 32, .n_head = 4, .d_kv_latent = 64, .d_rope = 16,
                        .index_n_head = 4, .index_d_head = 32, .n_pos = 256, .n_expert = 8, .n_expert_topk = 2,
                        .d_expert = 64, .d_expert_ff = 64, .n_vocab = 512, .d_model = 1024};
    CHECK_OK(br_pool_open(n_thread, pool));
    br_status status = bi_backend_oracle_open(&limits, *pool, row_case_isa[isa], backend);
    if (status == BR_E_UNSUPPORTED) {
        br_pool_close(*pool);
        return 0;
    }
    CHECK_OK(status);
    return 1;
}

static inline void row_case_close(bi_backend *backend, br_pool *pool) {
    bi_backend_close(backend);
    br_pool_close(pool);
}

typedef enum row_family {
    ROW_NORMAL,    /* about -4 .. 4 */
    ROW_WIDE,      /* exponents -40 .. 40 */
    ROW_PLATEAU,   /* all equal */
    ROW_ZEROS,     /* +0 and -0, now and then a one */
    ROW_SUBNORMAL, /* every number below 2^-126 */
    ROW_HUGE,      /* squares leave binary32: every row is a fault */
    ROW_RAW,       /* any finite bits */
    ROW_FAMILIES
} row_family;

/* 32 bits of a finite binary32. */
static inline uint32_t row_case_bits(row_family family, uint64_t key, int64_t i) {
    uint64_t r = test_mix(key * 0x100000001b3ull + (uint64_t)i);
    uint32_t sign = (uint32_t)(r >> 63) << 31, fraction = (uint32_t)r & 0x7fffffu, pick = (uint32_t)(r >> 32) & 0xffffu;
    switch (family) {
    case ROW_NORMAL: return sign | (119u + pick % 10u) << 23 | fraction;
    case ROW_WIDE: return sign | (87u + pick % 81u) << 23 | fraction;
    case ROW_PLATEAU: return 0x3fb00000u;
    case ROW_ZEROS: return pick % 16u ? sign : sign | 0x3f800000u;
    case ROW_SUBNORMAL: return sign | fraction;
    case ROW_HUGE: return sign | (220u + pick % 34u) << 23 | fraction;
    default: return sign | pick % 255u << 23 | fraction;
    }
}

static inline float row_case_f32(row_family family, uint64_t key, int64_t i) {
    uint32_t u = row_case_bits(family, key, i);
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float row_case_widen(bi_bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline void row_case_fill_bf16(bi_bf16 *x, int64_t n, row_family family, uint64_t key) {
    for (int64_t i = 0; i < n; i++)
        x[i] = (bi_bf16)(row_case_bits(family, key, i) >> 16);
}

static inline void row_case_fill_f32(float *x, int64_t n, row_family family, uint64_t key) {
    for (int64_t i = 0; i < n; i++)
        x[i] = row_case_f32(family, key, i);
}

static inline bi_bf16 *row_case_bf16_array(int64_t n, row_family family, uint64_t key) {
    bi_bf16 *x = ROW_CASE_ARRAY(bi_bf16, n);
    row_case_fill_bf16(x, n, family, key);
    return x;
}

static inline float *row_case_f32_array(int64_t n, row_family family, uint64_t key) {
    float *x = ROW_CASE_ARRAY(float, n);
    row_case_fill_f32(x, n, family, key);
    return x;
}

/* Comparisons call Check on a difference only: an assertion that holds still costs Check a system call. */
static inline void row_case_same_bf16(const char *what, const bi_bf16 *got, const bi_bf16 *want, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i])
            ck_abort_msg("%s: element %lld is %04x, wanted %04x", what, (long long)i, got[i], want[i]);
}

/* Bytes that an op must leave as the arena poisoned them. */
static inline void row_case_untouched(const char *what, const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const unsigned char *)bytes)[i] != 0xff)
            ck_abort_msg("%s: byte %zu was written", what, i);
}

/* NaN equals NaN: N-F32 leaves its payload open. */
static inline void row_case_same_f32(const char *what, const float *got, const float *want, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t g, w;
        memcpy(&g, &got[i], sizeof g);
        memcpy(&w, &want[i], sizeof w);
        int nan = (g & 0x7fffffffu) > 0x7f800000u && (w & 0x7fffffffu) > 0x7f800000u;
        if (!nan && g != w)
            ck_abort_msg("%s: element %lld is %08x, wanted %08x", what, (long long)i, g, w);
    }
}

/* A number half way between two bf16 neighbours. Weights that put results there make the last bit of every binary32 step
 * decide; on random data it decides in one element of 2^16 only, and a wrong order of two products passes. */
static inline double row_case_tie(uint64_t key, int64_t i) {
    return (double)((test_mix(key + (uint64_t)i) % 128 + 128) * 2 + 1) / 256;
}

/* Runs an op on the rows pick[0..n-1] of the test's inputs and compares row i with row pick[i] of the slow form. */
typedef void (*row_case_try)(const bi_backend *backend, const int32_t *pick, int32_t n);

/* The part of the survival list that is about rows, for 1, 2 and 5 threads: the whole batch, the same again, a shuffled
 * batch with a row twice, every row alone, no rows. */
static inline void row_case_survive(row_case_try attempt, int isa, int32_t n_row) {
    static const int threads[] = {1, 2, 5};
    for (int i = 0; i < 3; i++) {
        bi_backend backend;
        br_pool *pool;
        if (!row_case_open(isa, threads[i], &backend, &pool))
            return;
        size_t used = row_case_arena.used;
        int32_t *pick = ROW_CASE_ARRAY(int32_t, n_row + 1);
        for (int32_t t = 0; t < n_row; t++)
            pick[t] = t;
        attempt(&backend, pick, n_row);
        attempt(&backend, pick, n_row);
        attempt(&backend, pick, 0);
        for (int32_t t = n_row - 1; t > 0; t--) {
            int32_t other = (int32_t)(test_mix((uint64_t)t) % (uint64_t)(t + 1)), kept = pick[t];
            pick[t] = pick[other];
            pick[other] = kept;
        }
        pick[n_row] = pick[0];
        attempt(&backend, pick, n_row + 1);
        for (int32_t t = 0; t < n_row; t++)
            attempt(&backend, &t, 1);
        row_case_arena.used = used;
        row_case_close(&backend, pool);
    }
}

#endif
