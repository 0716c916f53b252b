/* bench_chain: multiply-adds a second of the packed chain, one core, one line an instruction set.
 *
 *   bench_chain   prints "chain_dense,ISA,GMAC/s" for those that this processor has
 *
 * Shape: 64 rows x 768 products x 32 columns, a dense layer of the preset `small`; operands of size 1, as after a norm. The
 * best of five windows of a fifth of a second: the machine may be shared, and the best is what the code can do. */
#define BI_ISA portable /* names of the shared header only */
#include "bi_chain.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { N_ROW = 64, N_K = 768, WINDOWS = 5 };

typedef void pack_row(const bi_bf16 *x, int n, int n_pad, float *f, int16_t *e);
typedef void chain_panel(int n_row, const float *const *xf, const int16_t *const *xe, int n_k, const float *bf,
                         const int16_t *be, size_t b_ld, float *acc, size_t acc_ld);

pack_row bi_pack_row_portable, bi_pack_row_avx2, bi_pack_row_avx512;
chain_panel bi_chain_panel_portable, bi_chain_panel_avx2, bi_chain_panel_avx512;

static struct {
    float xf[N_ROW][N_K], bf[N_K * BI_PANEL], acc[N_ROW * BI_PANEL];
    int16_t xe[N_ROW][N_K], be[N_K * BI_PANEL];
    const float *row_f[N_ROW];
    const int16_t *row_e[N_ROW];
} work;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Numbers of about 1 from a Lehmer generator: a sign, three exponents, all mantissas. */
static void fill(bi_bf16 *x, int n) {
    static uint64_t state = 1;
    for (int i = 0; i < n; i++) {
        state = state * 48271 % 2147483647;
        x[i] = (bi_bf16)((state & 1) << 15 | (125 + state / 2 % 3) << 7 | (state >> 8 & 127));
    }
}

static void prepare(pack_row *pack) {
    bi_bf16 x[N_K], b[BI_PANEL];
    for (int r = 0; r < N_ROW; r++) {
        fill(x, N_K);
        pack(x, N_K, N_K, work.xf[r], work.xe[r]);
        work.row_f[r] = work.xf[r];
        work.row_e[r] = work.xe[r];
    }
    for (int k = 0; k < N_K; k++) {
        fill(b, BI_PANEL);
        pack(b, BI_PANEL, BI_PANEL, work.bf + k * BI_PANEL, work.be + k * BI_PANEL);
    }
}

static double macs_per_second(chain_panel *panel) {
    double best = 0;
    for (int w = 0; w < WINDOWS; w++) {
        const double begin = seconds();
        double took = 0;
        int n = 0;
        for (; took < 0.2; took = seconds() - begin, n++)
            panel(N_ROW, work.row_f, work.row_e, N_K, work.bf, work.be, BI_PANEL, work.acc, BI_PANEL);
        const double rate = (double)n * N_ROW * N_K * BI_PANEL / took;
        best = rate > best ? rate : best;
    }
    return best;
}

int main(void) {
    const struct {
        const char *name;
        int supported;
        pack_row *pack;
        chain_panel *panel;
    } isa[] = {
        {"portable", 1, bi_pack_row_portable, bi_chain_panel_portable},
        {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), bi_pack_row_avx2, bi_chain_panel_avx2},
        {"avx512", __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
         bi_pack_row_avx512, bi_chain_panel_avx512},
    };
    for (size_t i = 0; i < sizeof isa / sizeof isa[0]; i++) {
        if (!isa[i].supported)
            continue;
        prepare(isa[i].pack);
        printf("chain_dense,%s,%.3f\n", isa[i].name, 1e-9 * macs_per_second(isa[i].panel));
    }
    return 0;
}
