/* linear: the block, the chain of each instruction set, packed matrices and the linear op with adapters, against the slow
 * form of slow_block. */
#include "bi_backend.h"
#include "bi_block.h"
#include "br_mem.h"
#include "op_rig.h"
#include "slow_block.h"
#include "test_support.h"

#include <math.h>
#include <string.h>

/* ---- block and chain -------------------------------------------------------------------------------------------------- */

#define CHAIN_OF(isa)                                                                                                   \
    void bi_pack_row_##isa(const bi_bf16 *, int, int, float *, int16_t *);                                              \
    void bi_chain_panel_##isa(int, const float *const *, const int16_t *const *, int, const float *, const int16_t *,   \
                              size_t, float *, size_t);
CHAIN_OF(portable)
CHAIN_OF(avx2)
CHAIN_OF(avx512)

static const struct chain_form {
    const char *isa;
    void (*pack_row)(const bi_bf16 *, int, int, float *, int16_t *);
    void (*panel)(int, const float *const *, const int16_t *const *, int, const float *, const int16_t *, size_t, float *,
                  size_t);
} chain_form[] = {
    {"portable", bi_pack_row_portable, bi_chain_panel_portable},
    {"avx2", bi_pack_row_avx2, bi_chain_panel_avx2},
    {"avx512", bi_pack_row_avx512, bi_chain_panel_avx512},
};

static const struct chain_form *chain_form_of(const char *isa) {
    for (int i = 0; i < 3; i++)
        if (strcmp(chain_form[i].isa, isa) == 0)
            return &chain_form[i];
    ck_abort_msg("no chain of %s", isa);
}

START_TEST(block_equals_slow_form) {
    int family = _i;
    for (int i = 0; i < (test_is_long() ? 3000000 : 20000); i++) {
        uint16_t a[16], b[16];
        float c;
        slow_family(family, test_seed() + (uint64_t)i, 16, a, b, &c);
        uint32_t got = slow_bits(bi_block16(c, a, 1, b, 1)), wanted = slow_bits(slow_block16(c, a, 1, b, 1));
        ck_assert_msg(got == wanted, "%s %d: %08x, wanted %08x", slow_family_name(family), i, got, wanted);
    }
}
END_TEST

/* Corners that a random family could miss, each with its value by hand. */
START_TEST(block_by_hand) {
    uint16_t a[16] = {0}, b[16] = {0};
    ck_assert_uint_eq(slow_bits(bi_block16(-0.0f, a, 1, b, 1)), 0);
    ck_assert_uint_eq(slow_bits(bi_block16(0x1p-149f, a, 1, b, 1)), 1);
    ck_assert_uint_eq(slow_bits(bi_block16(-0x1.fffffep+127f, a, 1, b, 1)), 0xff7fffff);
    a[0] = 0x7f80; /* Inf * 0 */
    ck_assert_uint_eq(slow_bits(bi_block16(1.0f, a, 1, b, 1)), 0x7fffffff);
    b[0] = 0xbf80; /* Inf * -1, then against +Inf */
    ck_assert_uint_eq(slow_bits(bi_block16(1.0f, a, 1, b, 1)), 0xff800000);
    ck_assert_uint_eq(slow_bits(bi_block16(INFINITY, a, 1, b, 1)), 0x7fffffff);
    a[0] = b[0] = 0x7f00; /* 2^127 * 2^127: overflow is Inf, not the largest number */
    ck_assert_uint_eq(slow_bits(bi_block16(0.0f, a, 1, b, 1)), 0x7f800000);
    a[0] = 0x3f80, b[0] = 0x3f80; /* 1 + 2^-26 - 2^-26: each term is cut before the sum */
    a[1] = a[2] = 0x3f80, b[1] = 0x3280, b[2] = 0xb280;
    ck_assert_uint_eq(slow_bits(bi_block16(0.0f, a, 1, b, 1)), 0x3f800000);
    b[0] = 0x3280, b[2] = 0; /* -1 + 2^-26 + 2^-26: both are cut, their sum is not */
    ck_assert_uint_eq(slow_bits(bi_block16(-1.0f, a, 1, b, 1)), 0xbf800000);
    b[0] = b[1] = 0x3300; /* -1 + 2^-25 + 2^-25: kept, the result is cut toward zero */
    ck_assert_uint_eq(slow_bits(bi_block16(-1.0f, a, 1, b, 1)), 0xbf7fffff);
}
END_TEST

enum { CHAIN_K_MAX = 1040, CHAIN_ROWS = 9, LANES = 32 };

static struct chain_case {
    uint16_t x[CHAIN_ROWS][CHAIN_K_MAX], w[LANES][CHAIN_K_MAX];
    float xf[CHAIN_ROWS][CHAIN_K_MAX], bf[CHAIN_K_MAX][LANES + 5], acc[CHAIN_ROWS][LANES + 3], begin[CHAIN_ROWS][LANES];
    int16_t xe[CHAIN_ROWS][CHAIN_K_MAX], be[CHAIN_K_MAX][LANES + 5];
} chain;

/* Rows and columns of one family; some columns are of the mild family 0, so that lanes leave the fast form one by one. */
static void chain_fill(const struct chain_form *form, int family, uint64_t seed, int n_row, int n_k) {
    static uint16_t other[CHAIN_K_MAX];
    float c;
    for (int r = 0; r < n_row; r++) {
        slow_family(family, seed + (uint64_t)r * 131, n_k, chain.x[r], other, &c);
        form->pack_row(chain.x[r], n_k, n_k, chain.xf[r], chain.xe[r]);
    }
    for (int l = 0; l < LANES; l++) {
        int mixed = test_mix(seed + (uint64_t)l) % 3 ? family : 0;
        slow_family(mixed, seed + (uint64_t)(l % n_row) * 131, n_k, other, chain.w[l], &c);
        static float f[CHAIN_K_MAX];
        static int16_t e[CHAIN_K_MAX];
        form->pack_row(chain.w[l], n_k, n_k, f, e);
        for (int k = 0; k < n_k; k++) {
            chain.bf[k][l] = f[k];
            chain.be[k][l] = e[k];
        }
        for (int r = 0; r < n_row; r++) {
            slow_family(family, test_mix(seed + (uint64_t)(r * LANES + l)), 16, other, other, &c);
            chain.begin[r][l] = chain.acc[r][l] = r % 3 == 2 ? 0.0f : c; /* +0: where chains begin */
        }
    }
}

static void chain_check(const struct chain_form *form, int family, int n_row, int n_k, int cut) {
    const float *xf[2][CHAIN_ROWS];
    const int16_t *xe[2][CHAIN_ROWS];
    for (int r = 0; r < n_row; r++) {
        xf[0][r] = chain.xf[r], xe[0][r] = chain.xe[r];
        xf[1][r] = chain.xf[r] + cut, xe[1][r] = chain.xe[r] + cut;
        for (int l = LANES; l < LANES + 3; l++)
            chain.acc[r][l] = 7.0f;
    }
    form->panel(n_row, xf[0], xe[0], cut, chain.bf[0], chain.be[0], LANES + 5, chain.acc[0], LANES + 3);
    form->panel(n_row, xf[1], xe[1], n_k - cut, chain.bf[cut], chain.be[cut], LANES + 5, chain.acc[0], LANES + 3);
    for (int r = 0; r < n_row; r++) {
        for (int l = 0; l < LANES; l++) {
            uint32_t got = slow_bits(chain.acc[r][l]);
            uint32_t wanted = slow_bits(slow_chain(chain.begin[r][l], chain.x[r], 1, chain.w[l], 1, n_k));
            ck_assert_msg(got == wanted, "%s, %s: rows %d, K %d cut at %d, row %d lane %d: %08x, wanted %08x", form->isa,
                          slow_family_name(family), n_row, n_k, cut, r, l, got, wanted);
        }
        for (int l = LANES; l < LANES + 3; l++)
            ck_assert(chain.acc[r][l] == 7.0f);
    }
}

START_TEST(chain_equals_slow_form) {
    static const int depth[] = {16, 32, 48, 144, 512, 1040};
    int family = _i;
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa), n_repeat = test_is_long() ? 60 : 1;
    for (int i = 0; i < n_isa; i++) {
        const struct chain_form *form = chain_form_of(isa[i]);
        for (int repeat = 0; repeat < n_repeat; repeat++)
            for (int n_row = 1; n_row <= CHAIN_ROWS; n_row++)
                for (int d = 0; d < (n_row % 4 == 1 ? 6 : 4); d++) {
                    uint64_t seed = test_mix(test_seed() + (uint64_t)(repeat * 64 + n_row * 6 + d));
                    int cut = (int)(seed >> 8) % (depth[d] / 16 + 1) * 16;
                    chain_fill(form, family, seed, n_row, depth[d]);
                    chain_check(form, family, n_row, depth[d], cut < 0 ? 0 : cut);
                }
    }
}
END_TEST

/* A row padded with zeros, and what the exponents hold. */
START_TEST(pack_row) {
    static const bi_bf16 x[5] = {0x3f80, 0x8000, 0x0001, 0x7f80, 0x7fc0};
    static const int16_t e[5] = {0, -8000, -126, 16000, 16000};
    for (int i = 0; i < 3; i++) {
        float f[16];
        int16_t got[16];
        memset(f, 0xff, sizeof f);
        memset(got, 0x11, sizeof got);
        chain_form[i].pack_row(x, 5, 16, f, got);
        for (int k = 0; k < 16; k++) {
            ck_assert_uint_eq(slow_bits(f[k]), k < 5 ? (uint32_t)x[k] << 16 : 0);
            ck_assert_int_eq(got[k], k < 5 ? e[k] : -8000);
        }
        if (!__builtin_cpu_supports("avx512bw"))
            break;
    }
}
END_TEST

/* ---- linear ----------------------------------------------------------------------------------------------------------- */

enum { SLOTS = 4, HEADS_MAX = 3, RANK_MAX = 40 };

/* One problem: unpacked arrays for the slow form, and the shape. Slot s has rank rank[s] on every head but where absent. */
typedef struct problem {
    int n_row, n_head, n_in, n_out;
    bi_bf16 *x, *w;                 /* (n_row, n_head, n_in), (n_head, n_out, n_in) */
    bi_bf16 *a[SLOTS], *b[SLOTS];   /* (n_head, rank, n_in), (n_head, n_out, rank) */
    float s[SLOTS];
    int32_t *row_slot;
    bi_mat map; /* stacks of n_head */
    bi_adapter slot[SLOTS];
    void *block;
} problem;

static const int rank_of[SLOTS] = {8, 16, 32, 40};

static int slot_absent(const problem *p, int slot, int head) {
    return p->n_head > 1 && slot == 1 && head == 1;
}

static bi_bf16 *random_matrix(op_random *random, unsigned char **at, size_t n) {
    bi_bf16 *out = (bi_bf16 *)*at;
    op_random_bf16s(random, 1.0f, out, (int)n);
    *at += (n * sizeof *out + 63) / 64 * 64;
    return out;
}

static void problem_make(problem *p, op_rig *rig, uint64_t seed, int n_row, int n_head, int n_in, int n_out) {
    op_random random = {seed, 0};
    *p = (problem){.n_row = n_row, .n_head = n_head, .n_in = n_in, .n_out = n_out};
    size_t values = (size_t)n_head * ((size_t)n_row * (size_t)n_in + (size_t)n_out * (size_t)n_in +
                                      SLOTS * RANK_MAX * (size_t)(n_in + n_out)) + 1024;
    CHECK_OK(br_mem_alloc(&p->block, values * 2 + (size_t)n_row * 4 + 4096, "a linear problem"));
    unsigned char *at = p->block;
    p->x = random_matrix(&random, &at, (size_t)n_row * (size_t)n_head * (size_t)n_in);
    p->w = random_matrix(&random, &at, (size_t)n_head * (size_t)n_out * (size_t)n_in);
    p->map = op_rig_stack(rig, p->w, n_head, n_out, n_in);
    for (int s = 0; s < SLOTS; s++) {
        int rank = rank_of[s];
        p->a[s] = random_matrix(&random, &at, (size_t)n_head * (size_t)rank * (size_t)n_in);
        p->b[s] = random_matrix(&random, &at, (size_t)n_head * (size_t)rank * (size_t)n_out);
        p->s[s] = 0.3f + (float)s;
        op_low_rank low[HEADS_MAX] = {{0}};
        for (int h = 0; h < n_head; h++)
            if (!slot_absent(p, s, h))
                low[h] = (op_low_rank){p->a[s] + h * rank * n_in, p->b[s] + h * rank * n_out, rank, p->s[s]};
        p->slot[s] = op_rig_adapter(rig, low, n_head, n_out, n_in);
    }
    p->row_slot = (int32_t *)at;
    for (int t = 0; t < n_row; t++)
        p->row_slot[t] = op_random_below(&random, SLOTS + 2) - 1;
    for (int t = 0; t < n_row; t++)
        p->row_slot[t] = p->row_slot[t] == SLOTS ? -1 : p->row_slot[t];
}

static float slow_element(const problem *p, int t, int h, int o, int slot) {
    const bi_bf16 *x = p->x + (size_t)(t * p->n_head + h) * (size_t)p->n_in;
    float acc = slow_chain(0.0f, x, 1, p->w + (size_t)(h * p->n_out + o) * (size_t)p->n_in, 1, p->n_in);
    if (slot < 0 || slot_absent(p, slot, h))
        return acc;
    int rank = rank_of[slot];
    uint16_t low[RANK_MAX];
    for (int r = 0; r < rank; r++)
        low[r] = slow_to_bf16(p->s[slot] * slow_chain(0.0f, x, 1, p->a[slot] + (h * rank + r) * p->n_in, 1, p->n_in));
    return slow_chain(acc, low, 1, p->b[slot] + (size_t)(h * p->n_out + o) * (size_t)rank, 1, rank);
}

static bi_linear_args problem_args(const problem *p, float *y, int with_lora) {
    bi_linear_args args = {.n_row = p->n_row, .n_head = p->n_head, .x = p->x, .x_ld = (int64_t)p->n_head * p->n_in,
                           .x_head_ld = p->n_in, .w = p->map, .y = y, .y_ld = (int64_t)p->n_head * p->n_out,
                           .y_head_ld = p->n_out, .y_f32 = 1};
    if (with_lora) {
        args.lora.slot = p->slot;
        args.lora.n_slot = SLOTS;
        args.lora.row_slot = p->row_slot;
    }
    return args;
}

static size_t problem_outputs(const problem *p) {
    return (size_t)p->n_row * (size_t)p->n_head * (size_t)p->n_out;
}

static void run_linear(op_rig *rig, const bi_linear_args *args) {
    op_rig_poison(rig);
    CHECK_OK(rig->backend.op->linear(rig->backend.ctx, args));
}

static const bi_limits linear_limits = {.n_row = 64, .d_in = 1040, .rank = 48};

/* Mixed adapters and base rows, f32 and bf16, every instruction set: all elements, or a sample of a large one. */
static void check_against_slow(op_rig *rig, uint64_t seed, int n_row, int n_head, int n_in, int n_out) {
    problem p;
    problem_make(&p, rig, seed, n_row, n_head, n_in, n_out);
    size_t n = problem_outputs(&p);
    void *block;
    CHECK_OK(br_mem_alloc(&block, (n + 1) * 6, "two outputs"));
    float *y = block;
    bi_bf16 *narrow = (bi_bf16 *)(y + n + 1);
    bi_linear_args args = problem_args(&p, y, 1);
    y[n] = 7.0f, narrow[n] = 0x1234;
    run_linear(rig, &args);
    args.y = narrow, args.y_f32 = 0;
    run_linear(rig, &args);
    ck_assert(y[n] == 7.0f && narrow[n] == 0x1234);
    size_t step = n > 6000 && !test_is_long() ? n / 3000 | 1 : 1;
    for (size_t i = 0; i < n; i += step) {
        int o = (int)i % n_out, h = (int)i / n_out % n_head, t = (int)i / n_out / n_head;
        float wanted = slow_element(&p, t, h, o, p.row_slot[t]);
        ck_assert_msg(slow_bits(y[i]) == slow_bits(wanted),
                      "%s, %d rows, %d maps (%d, %d): row %d map %d output %d: %a, wanted %a", rig->backend.op->name, n_row,
                      n_head, n_out, n_in, t, h, o, (double)y[i], (double)wanted);
        ck_assert_uint_eq(narrow[i], slow_to_bf16(wanted));
    }
    br_mem_free(block);
    br_mem_free(p.block);
}

START_TEST(linear_equals_slow_form) {
    static const int shape[][4] = {{1, 1, 16, 32},   {1, 1, 1040, 64}, {7, 1, 20, 5},    {3, 3, 48, 33},   {9, 2, 130, 70},
                                   {64, 1, 100, 40}, {65, 3, 37, 31},  {130, 1, 256, 96}, {17, 3, 1040, 33}, {0, 1, 16, 32}};
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa);
    for (int i = 0; i < n_isa; i++) {
        op_rig rig;
        op_rig_open(&rig, &linear_limits, isa[i], test_thread_count());
        for (size_t s = 0; s < sizeof shape / sizeof shape[0]; s++)
            check_against_slow(&rig, test_seed() + s, shape[s][0], shape[s][1], shape[s][2], shape[s][3]);
        op_rig_close(&rig);
    }
}
END_TEST

/* Zero B, absent adapters and slot -1 give the base bits; a real adapter does not. */
START_TEST(zero_adapter_is_base) {
    op_rig rig;
    op_rig_open(&rig, &linear_limits, NULL, 1);
    problem p;
    problem_make(&p, &rig, 3, 40, 2, 80, 50);
    size_t n = problem_outputs(&p);
    static float base[40 * 100], y[40 * 100];
    bi_linear_args args = problem_args(&p, base, 0);
    run_linear(&rig, &args);
    args = problem_args(&p, y, 1);
    run_linear(&rig, &args);
    ck_assert(memcmp(base, y, n * 4) != 0);
    for (int t = 0; t < p.n_row; t++)
        ck_assert_int_eq(memcmp(base + t * 100, y + t * 100, 400) == 0, p.row_slot[t] < 0);
    for (int s = 0; s < SLOTS; s++) {
        static const bi_bf16 zero[2 * 50 * RANK_MAX];
        p.slot[s].b = op_rig_stack(&rig, zero, 2, 50, rank_of[s]);
    }
    run_linear(&rig, &args);
    ck_assert(memcmp(base, y, n * 4) == 0);
    for (int s = 0; s < SLOTS; s++)
        p.slot[s] = (bi_adapter){0};
    run_linear(&rig, &args);
    ck_assert(memcmp(base, y, n * 4) == 0);
    br_mem_free(p.block);
    op_rig_close(&rig);
}
END_TEST

/* The fused op equals its parts: A as a map of its own, t rounded, the base accumulator in f32, [B t] added to its chain;
 * and one map of stacked outputs equals the maps it was stacked from. */
START_TEST(fused_equals_composition) {
    enum { ROWS = 20, IN = 96, OUT = 40 };
    op_rig rig;
    op_rig_open(&rig, &linear_limits, NULL, 2);
    problem p;
    problem_make(&p, &rig, 5, ROWS, 1, IN, OUT);
    static float fused[ROWS][OUT], base[ROWS][OUT], low[ROWS][RANK_MAX], stacked[ROWS][OUT + 32];
    bi_linear_args args = problem_args(&p, fused[0], 1), plain = problem_args(&p, base[0], 0);
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int t = 0; t < ROWS; t++)
            p.row_slot[t] = slot;
        run_linear(&rig, &args);
        run_linear(&rig, &plain);
        bi_linear_args down = plain;
        down.w = p.slot[slot].a, down.y = low[0], down.y_ld = RANK_MAX;
        run_linear(&rig, &down);
        for (int t = 0; t < ROWS; t++)
            for (int o = 0; o < OUT; o++) {
                uint16_t r[RANK_MAX];
                for (int i = 0; i < rank_of[slot]; i++)
                    r[i] = slow_to_bf16(p.s[slot] * low[t][i]);
                float wanted = slow_chain(base[t][o], r, 1, p.b[slot] + o * rank_of[slot], 1, rank_of[slot]);
                ck_assert_uint_eq(slow_bits(fused[t][o]), slow_bits(wanted));
            }
    }
    static bi_bf16 both[(OUT + 32) * IN];
    memcpy(both, p.w, sizeof(bi_bf16) * OUT * IN);
    memcpy(both + OUT * IN, p.a[2], sizeof(bi_bf16) * 32 * IN);
    bi_mat stack = op_rig_mat(&rig, both, OUT + 32, IN);
    bi_linear_args one = plain, down = plain;
    one.w = stack, one.y = stacked[0], one.y_ld = OUT + 32;
    down.w = p.slot[2].a, down.y = low[0], down.y_ld = RANK_MAX;
    run_linear(&rig, &one);
    run_linear(&rig, &down);
    for (int t = 0; t < ROWS; t++)
        ck_assert(memcmp(stacked[t], base[t], sizeof base[t]) == 0 && memcmp(stacked[t] + OUT, low[t], 32 * 4) == 0);
    br_mem_free(p.block);
    op_rig_close(&rig);
}
END_TEST

/* A row alone, the batch permuted, other thread counts, other instruction sets: the same bits. */
START_TEST(linear_is_batch_invariant) {
    enum { ROWS = 71, HEADS = 2, IN = 150, OUT = 45, WIDTH = HEADS * OUT };
    static float whole[ROWS][WIDTH], other[ROWS][WIDTH];
    static bi_bf16 shuffled[ROWS][HEADS * IN];
    static int32_t shuffled_slot[ROWS];
    static const int thread_count[] = {1, 2, 5};
    const char *isa[OP_RIG_ISA_MAX];
    int n_isa = op_rig_isas(isa), order[ROWS];
    op_random random = {9, 0};
    op_random_order(&random, order, ROWS);
    for (int form = 0; form < 3 * n_isa; form++) {
        op_rig rig;
        op_rig_open(&rig, &linear_limits, isa[form / 3], thread_count[form % 3]);
        problem p;
        problem_make(&p, &rig, 11, ROWS, HEADS, IN, OUT);
        bi_linear_args args = problem_args(&p, form ? other[0] : whole[0], 1);
        run_linear(&rig, &args);
        ck_assert(form == 0 || memcmp(whole, other, sizeof whole) == 0);
        for (int t = 0; t < ROWS; t++) {
            memcpy(shuffled[t], p.x + order[t] * HEADS * IN, sizeof shuffled[t]);
            shuffled_slot[t] = p.row_slot[order[t]];
        }
        args.x = shuffled[0], args.lora.row_slot = shuffled_slot, args.y = other[0];
        run_linear(&rig, &args);
        for (int t = 0; t < ROWS; t++)
            ck_assert_msg(memcmp(other[t], whole[order[t]], sizeof other[t]) == 0, "row %d permuted", order[t]);
        for (int t = 0; t < ROWS; t += 10) {
            args = problem_args(&p, other[0], 1);
            args.n_row = 1, args.x += t * HEADS * IN, args.lora.row_slot += t;
            run_linear(&rig, &args);
            ck_assert_msg(memcmp(other[0], whole[t], sizeof other[0]) == 0, "row %d alone", t);
        }
        br_mem_free(p.block);
        op_rig_close(&rig);
    }
}
END_TEST

/* NaN and Inf in one row: its fault is set once, where t is not finite or logits are checked; its neighbours keep their
 * bits. */
START_TEST(faults_stay_in_their_row) {
    enum { ROWS = 12, IN = 64, OUT = 40 };
    op_rig rig;
    op_rig_open(&rig, &linear_limits, NULL, 2);
    problem p;
    problem_make(&p, &rig, 21, ROWS, 1, IN, OUT);
    static float clean[ROWS][OUT], y[ROWS][OUT];
    bi_linear_args args = problem_args(&p, clean[0], 1);
    for (int t = 0; t < ROWS; t++)
        p.row_slot[t] = t % 3 - 1; /* rows 0, 3, 6, 9 are base */
    run_linear(&rig, &args);
    p.x[1 * IN + 7] = 0x7f80, p.x[3 * IN + 7] = 0x7fc0, p.x[5 * IN] = 0xff80;
    for (int check = 0; check < 3; check++) {
        uint32_t row[ROWS] = {0, 0, 0, 0, 0, 77};
        args.y = y[0], args.check_logits = check == 1, args.y_f32 = check < 2, args.fault = (bi_fault){row, 42};
        run_linear(&rig, &args);
        for (int t = 0; t < ROWS; t++) {
            uint32_t wanted = t == 1 ? 42 : t == 3 ? (check == 1 ? 42 : 0) : t == 5 ? 77 : 0;
            ck_assert_msg(row[t] == wanted, "check %d row %d: fault %u, wanted %u", check, t, row[t], wanted);
            if (check < 2 && t != 1 && t != 3 && t != 5)
                ck_assert(memcmp(clean[t], y[t], sizeof y[t]) == 0);
        }
    }
    /* Logits leave in f32: a check of a rounded output is refused. */
    args.check_logits = 1, args.y_f32 = 0;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &args), BR_E_ARG);
    br_mem_free(p.block);
    op_rig_close(&rig);
}
END_TEST

/* Packing through strides, and FP4 against the same matrix expanded to bf16: equal outputs. */
START_TEST(packed_forms_agree) {
    enum { ROWS = 5, OUT = 37, IN = 96 };
    const char *isa[OP_RIG_ISA_MAX];
    op_random random = {31, 0};
    static bi_bf16 w[OUT][IN], turned[IN][OUT];
    static uint8_t code[OUT][IN / 2], scale[OUT][IN / 32];
    static bi_bf16 x[ROWS][IN];
    static float y[2][ROWS][OUT];
    op_random_bf16s(&random, 1.0f, x[0], ROWS * IN);
    for (int o = 0; o < OUT; o++)
        for (int i = 0; i < IN; i++) {
            if (i % 32 == 0)
                scale[o][i / 32] = o == 0 ? 0 : (uint8_t)(120 + op_random_below(&random, 12));
            int nibble = op_random_below(&random, 16);
            code[o][i / 2] |= (uint8_t)(nibble << (i % 2 ? 4 : 0));
            static const float value[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
            float wide = ldexpf(value[nibble & 7], scale[o][i / 32] - 127);
            w[o][i] = turned[i][o] = (bi_bf16)(slow_bits(nibble & 8 ? -wide : wide) >> 16);
        }
    for (int i = 0; i < op_rig_isas(isa); i++) {
        op_rig rig;
        op_rig_open(&rig, &linear_limits, isa[i], 1);
        size_t bytes = rig.backend.op->mat_bytes(BI_FORM_BF16, OUT, IN);
        ck_assert_uint_eq(bytes, 64 * 96 * 6);
        bi_mat plain = op_rig_mat(&rig, w[0], OUT, IN), strided = op_rig_mat(&rig, w[0], OUT, IN);
        bi_mat packed = op_rig_mat_fp4(&rig, code[0], scale[0], OUT, IN);
        ck_assert_uint_eq(rig.backend.op->mat_bytes(BI_FORM_FP4, OUT, IN), 64 * (96 / 2 + 96 / 32));
        memset((void *)(uintptr_t)strided.data, 0xff, bytes);
        void *to = (void *)(uintptr_t)strided.data;
        CHECK_OK(rig.backend.op->mat_pack_bf16(rig.backend.ctx, to, OUT, IN, turned[0], 1, OUT));
        ck_assert(memcmp(plain.data, strided.data, bytes) == 0);
        bi_linear_args a = {.n_row = ROWS, .n_head = 1, .x = x[0], .x_ld = IN, .w = plain, .y = y[0], .y_ld = OUT, .y_f32 = 1};
        CHECK_OK(rig.backend.op->linear(rig.backend.ctx, &a));
        a.w = packed, a.y = y[1];
        CHECK_OK(rig.backend.op->linear(rig.backend.ctx, &a));
        ck_assert(memcmp(y[0], y[1], sizeof y[0]) == 0);
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- errors and constants --------------------------------------------------------------------------------------------- */

START_TEST(linear_refuses_bad_shapes) {
    op_rig rig;
    op_rig_open(&rig, &linear_limits, NULL, 1);
    problem p;
    problem_make(&p, &rig, 41, 4, 2, 64, 40);
    float y[4 * 80] = {5.0f};
    bi_linear_args good = problem_args(&p, y, 1), args = good;
    args.n_row = -1;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &args), BR_E_SHAPE);
    args = good, args.w.data = NULL;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &args), BR_E_SHAPE);
    args = good, args.w.n_in = 1041, args.lora.slot = NULL;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &args), BR_E_SHAPE);
    ck_assert(strstr(br_last_error(), "1041") && strstr(br_last_error(), "1 to 1040"));
    p.row_slot[3] = 0;
    p.slot[0].a.n_in = 65;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &good), BR_E_SHAPE);
    p.slot[0].a.n_in = 64, p.slot[0].a.n_out = p.slot[0].b.n_in = 49;
    CHECK_FAILS(rig.backend.op->linear(rig.backend.ctx, &good), BR_E_SHAPE);
    ck_assert(strstr(br_last_error(), "rank 49") && strstr(br_last_error(), "48"));
    ck_assert(y[0] == 5.0f);
    const bi_ops *op = rig.backend.op;
    CHECK_FAILS(op->mat_pack_bf16(rig.backend.ctx, y, 0, 16, p.x, 16, 1), BR_E_SHAPE);
    CHECK_FAILS(op->mat_pack_bf16(rig.backend.ctx, y, 1, 0, p.x, 16, 1), BR_E_SHAPE);
    CHECK_FAILS(op->mat_pack_fp4(rig.backend.ctx, y, 1, 48, (uint8_t *)p.x, (uint8_t *)p.x), BR_E_SHAPE);
    ck_assert(strstr(br_last_error(), "(1, 48)") && y[0] == 5.0f);
    br_mem_free(p.block);
    op_rig_close(&rig);
}
END_TEST

START_TEST(open_picks_an_instruction_set) {
    const bi_limits limits = {.n_row = 1, .d_in = 16};
    br_pool *pool;
    CHECK_OK(br_pool_open(1, &pool));
    bi_backend backend;
    CHECK_FAILS(bi_backend_oracle_open(&limits, pool, "sse9", &backend), BR_E_ARG);
    ck_assert(strstr(br_last_error(), "sse9") && !backend.op && !backend.ctx);
    CHECK_OK(bi_backend_oracle_open(&limits, pool, "portable", &backend));
    ck_assert_str_eq(backend.op->name, "oracle-portable");
    bi_backend_close(&backend);
    ck_assert(!backend.ctx);
    bi_backend_close(&backend);
    br_pool_close(pool);
}
END_TEST

/* The constant is nearest to the exact value when the exact value lies between the middles toward its two neighbours:
 * value^2 * n against alpha^2, in long double, whose 64 bits hold the square of a 25-bit middle times n < 2^14. */
static void check_constant(float got, double alpha, int n) {
    long double below = ((long double)got + nextafterf(got, 0)) / 2, above = ((long double)got + nextafterf(got, 99)) / 2;
    long double square = (long double)alpha * alpha;
    int nearest = below * below * n <= square && square <= above * above * n;
    ck_assert_msg(nearest, "%a is not RN(%a / sqrt %d)", (double)got, alpha, n);
}

START_TEST(constants_are_rounded_once) {
    for (int n = 1; n < 16384; n++)
        check_constant(bi_const_attn_alpha(n, 0), 1, n);
    check_constant(bi_const_attn_alpha(128, 64), 1, 192);
    check_constant(bi_const_index_c(64, 128), 1, 8192);
    ck_assert(bi_const_lora_s(64, 32, 0) == 2.0f && bi_const_lora_s(-1, 4, 1) == -0.5f && bi_const_lora_s(0, 8, 0) == 0.0f);
    ck_assert(bi_const_lora_s(1, 3, 0) == 1.0f / 3.0f && bi_const_lora_s(32, 24, 0) == 32.0f / 24.0f);
    for (int n = 1; n < 300; n++) {
        check_constant(bi_const_lora_s(16, n, 1), 16, n);
        ck_assert(bi_const_lora_s(7, n, 0) == 7.0f / (float)n);
    }
    /* Exactly in the middle of two floats: the even one. */
    ck_assert(bi_const_lora_s(3 * (1 + 0x1p-24), 3, 0) == 1.0f && bi_const_lora_s(3 * (1 + 0x3p-24), 3, 0) == 1 + 0x1p-22f);
    ck_assert(bi_const_kda_scale(64) == 0.125f);
    for (int n = 32; n <= 256; n += 32)
        check_constant(bi_const_kda_scale(n), 1, n);
    /* alpha nearest to middle * sqrt n: the quotient is closer to the middle than binary64 can tell. alpha^2 = p + rest. */
    for (int i = 0; i < 2000; i++) {
        int n = 2 + i % 61;
        double middle = 1 + (2 * (double)(test_mix((uint64_t)i) % 8388608) + 1) * 0x1p-24, alpha = middle * sqrt(n);
        double p = alpha * alpha, rest = fma(alpha, alpha, -p);
        long double above = (long double)p - (long double)middle * middle * n + rest;
        float got = bi_const_lora_s(alpha, n, 1);
        ck_assert_msg(above == 0 || (got > middle) == (above > 0), "%a / sqrt %d gives %a", alpha, n, (double)got);
    }
}
END_TEST

Suite *test_linear_suite(void) {
    Suite *suite = suite_create("linear");
    TCase *chains = tcase_create("block and chain"), *linear = tcase_create("linear");
    tcase_set_timeout(chains, test_is_long() ? 600 : 30);
    tcase_add_loop_test(chains, block_equals_slow_form, 0, SLOW_FAMILY_COUNT);
    tcase_add_test(chains, block_by_hand);
    tcase_add_loop_test(chains, chain_equals_slow_form, 0, SLOW_FAMILY_COUNT);
    tcase_add_test(chains, pack_row);
    suite_add_tcase(suite, chains);
    tcase_set_timeout(linear, test_is_long() ? 600 : 30);
    tcase_add_test(linear, linear_equals_slow_form);
    tcase_add_test(linear, zero_adapter_is_base);
    tcase_add_test(linear, fused_equals_composition);
    tcase_add_test(linear, linear_is_batch_invariant);
    tcase_add_test(linear, faults_stay_in_their_row);
    tcase_add_test(linear, packed_forms_agree);
    tcase_add_test(linear, linear_refuses_bad_shapes);
    tcase_add_test(linear, open_picks_an_instruction_set);
    tcase_add_test(linear, constants_are_rounded_once);
    suite_add_tcase(suite, linear);
    return suite;
}
