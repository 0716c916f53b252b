/* The block model against what the H200's tensor core gave, one instruction at a time (golden/hw_probe, clause N-MMA-1).
 * The slow form, the scalar block of the oracle and its fast chain must all give the recorded bits. */
#include "bi_block.h"
#include "slow_block.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

enum { K = 16, VECTOR_COUNT = 19 * 96, LANES = 32 };

typedef struct vector {
    int family;
    float c;
    uint16_t a[K], b[K];
    uint32_t result;
} vector;

static vector vectors[VECTOR_COUNT];

static void read_halves(const char *text, uint16_t out[K]) {
    for (int k = 0; k < K; k++) {
        unsigned half;
        ck_assert_int_eq(sscanf(text + 4 * k, "%4x", &half), 1);
        out[k] = (uint16_t)half;
    }
}

static void read_vectors(void) {
    char path[1024], line[256], a[65], b[65];
    snprintf(path, sizeof path, "%s/golden/hw_probe/h200/block16.txt", test_source_dir());
    FILE *file = fopen(path, "r");
    ck_assert_msg(file != NULL, "%s: cannot open", path);
    int n = 0;
    while (fgets(line, sizeof line, file)) {
        uint32_t c, result;
        if (line[0] == '#')
            continue;
        ck_assert_int_lt(n, VECTOR_COUNT);
        ck_assert_int_eq(sscanf(line, "%d %8x %64s %64s %8x", &vectors[n].family, &c, a, b, &result), 5);
        read_halves(a, vectors[n].a);
        read_halves(b, vectors[n].b);
        memcpy(&vectors[n].c, &c, sizeof c);
        vectors[n++].result = result;
    }
    fclose(file);
    ck_assert_int_eq(n, VECTOR_COUNT);
}

static void expect(const vector *v, float got, const char *form) {
    ck_assert_msg(slow_bits(got) == v->result, "%s, family %s: %08x, the tensor core gave %08x", form,
                  slow_family_name(v->family), slow_bits(got), v->result);
}

START_TEST(scalar_forms_give_the_recorded_bits) {
    for (int i = 0; i < VECTOR_COUNT; i++) {
        const vector *v = &vectors[i];
        expect(v, slow_block16(v->c, v->a, 1, v->b, 1), "slow form");
        expect(v, bi_block16(v->c, v->a, 1, v->b, 1), "scalar block");
    }
}
END_TEST

#define CHAIN_OF(isa)                                                                                                                     \
    void bi_pack_row_##isa(const bi_bf16 *x, int n, int n_pad, float *f, int16_t *e);                                                     \
    void bi_chain_panel_##isa(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf, const int16_t *be, \
                              size_t b_ld, float *acc, size_t acc_ld);
CHAIN_OF(portable)
CHAIN_OF(avx2)
CHAIN_OF(avx512)

typedef void (*pack_row)(const bi_bf16 *, int, int, float *, int16_t *);
typedef void (*chain_panel)(int, const float *const *, const int16_t *const *, int, const float *, const int16_t *, size_t, float *, size_t);

/* Vector i in a lane of its own; the other lanes hold its neighbours, so that a slow lane sits among fast ones. */
static void check_chain(pack_row pack, chain_panel chain, const char *form) {
    for (int first = 0; first + LANES <= VECTOR_COUNT; first += LANES) {
        float bf[K * LANES], acc[LANES], xf[K];
        int16_t be[K * LANES], xe[K];
        for (int lane = 0; lane < LANES; lane++) {
            float f[K];
            int16_t e[K];
            pack(vectors[first + lane].b, K, K, f, e);
            for (int k = 0; k < K; k++) {
                bf[k * LANES + lane] = f[k];
                be[k * LANES + lane] = e[k];
            }
        }
        for (int lane = 0; lane < LANES; lane++) {
            const vector *v = &vectors[first + lane];
            const float *xf_row = xf;
            const int16_t *xe_row = xe;
            for (int l = 0; l < LANES; l++)
                acc[l] = v->c;
            pack(v->a, K, K, xf, xe);
            chain(1, &xf_row, &xe_row, K, bf, be, LANES, acc, LANES);
            expect(v, acc[lane], form);
        }
    }
}

START_TEST(fast_chain_gives_the_recorded_bits) {
    check_chain(bi_pack_row_portable, bi_chain_panel_portable, "portable chain");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        check_chain(bi_pack_row_avx2, bi_chain_panel_avx2, "AVX2 chain");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        check_chain(bi_pack_row_avx512, bi_chain_panel_avx512, "AVX-512 chain");
}
END_TEST

Suite *test_hw_probe_suite(void) {
    Suite *suite = suite_create("hw_probe");
    TCase *tcase = tcase_create("block16");
    tcase_set_timeout(tcase, 60);
    tcase_add_unchecked_fixture(tcase, read_vectors, NULL);
    tcase_add_test(tcase, scalar_forms_give_the_recorded_bits);
    tcase_add_test(tcase, fast_chain_gives_the_recorded_bits);
    suite_add_tcase(suite, tcase);
    return suite;
}
