/* The row ops on the GPU against the oracle: embed, norms, conv, glu, attnres, residual, gather, seg_fault. Each shape is tried with
 * arrays aligned for wide moves and one element off, so that both paths of an op run. */
#include "cuda_case.h"
#include "test_support.h"
#include "twin.h"

#include <stdio.h>
#include <string.h>

enum { CODE = 77, N_FAMILY = 4, ROW_BYTES = 12 << 20 };
static twin t;
static op_random rnd;

static void open_twin(void) {
    const bi_limits limits = {.n_row = 256, .d_in = 256, .d_out = 256, .rank = 16, .n_slot = 2, .n_head = 2, .d_kv_latent = 64, .d_rope = 16,
                              .index_n_head = 4, .index_d_head = 32, .n_pos = 256, .n_expert = 8, .n_expert_topk = 2, .d_expert = 64,
                              .d_expert_ff = 64, .kda_n_head = 2, .kda_d_head = 64, .n_vocab = 512, .d_model = 256};
    twin_open(&t, &limits, ROW_BYTES);
    rnd = (op_random){test_seed(), 0};
}

static void close_twin(void) {
    twin_close(&t);
}

/* Numbers near 1; zeros, subnormals and few levels; numbers whose squares overflow; any bits, NaN and Inf among them. */
static bi_bf16 number(int family) {
    static const bi_bf16 corner[] = {0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x3f80, 0xbf80, 0x4000, 0x3f81, 0x0d00, 0x3380};
    bi_bf16 x;
    switch (family) {
    case 0: op_random_bf16s(&rnd, 1.0f, &x, 1); return x;
    case 1: return corner[op_random_below(&rnd, 12)];
    case 2: return (bi_bf16)(0x5f00 + op_random_below(&rnd, 0x300));
    default: return (bi_bf16)op_random_u64(&rnd);
    }
}

/* n numbers, `off` elements behind an address for wide moves. Every fourth row of a family with faults has none. */
static bi_bf16 *numbers(const char *name, int family, int n_row, int ld, int off) {
    bi_bf16 *x = TWIN_ARRAY(&t, bi_bf16, name, (int64_t)n_row * ld + off);
    for (int r = 0; r < n_row; r++)
        for (int i = 0; i < ld; i++)
            x[off + (int64_t)r * ld + i] = number(family >= 2 && r % 4 == 3 ? 0 : family);
    return x + off;
}

static bi_bf16 *outputs(const char *name, int64_t n, int off) {
    return TWIN_ARRAY(&t, bi_bf16, name, n + off) + off;
}

static float *weights(const char *name, int n, int off) {
    float *w = TWIN_ARRAY(&t, float, name, n + off) + off;
    op_random_normals(&rnd, 1.0f, w, n);
    return w;
}

static uint32_t *faults(int n_row) {
    uint32_t *fault = TWIN_ARRAY(&t, uint32_t, "fault", n_row);
    for (int r = 0; r < n_row; r++)
        fault[r] = r % 7 == 6 ? 5 : 0; /* the first fault is kept */
    return fault;
}

#define AT(pointer) twin_at(&t, side, (pointer))
#define BOTH for (twin_side side = TWIN_ORACLE; side <= TWIN_CUDA; side = (twin_side)(side + 1))
#define RUN(name, args) CHECK_OK(t.backend[side].op->name(t.backend[side].ctx, &(args)))

/* ---- norms ------------------------------------------------------------------------------------------------------------------------- */

typedef struct norm_case {
    int layer, n_row, d, gap, family, in_place, off, no_b, no_fault;
} norm_case;

static void try_norm(norm_case c) {
    twin_reset(&t);
    const int ld = c.d + c.gap;
    bi_bf16 *x = numbers("x", c.family, c.n_row, ld, c.off), *y = c.in_place ? x : outputs("y", (int64_t)c.n_row * ld, c.off);
    float *w = weights("w", c.d, c.off), *b = c.no_b ? NULL : weights("b", c.d, c.off);
    uint32_t *fault = c.no_fault ? NULL : faults(c.n_row);
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_norm_args a = {c.n_row, c.d, AT(x), ld, AT(w), AT(b), 1e-5f, AT(y), ld, {AT(fault), CODE}};
        if (c.layer)
            RUN(layernorm, a);
        else
            RUN(rmsnorm, a);
    }
    twin_compare(&t, c.layer ? "layernorm" : "rmsnorm");
    twin_launched(&t, "a norm", !c.n_row ? "" : c.layer ? "layernorm 1" : "rmsnorm 1");
}

START_TEST(norms) {
    static const int width[] = {1, 8, 31, 32, 128, 255, 256, 257, 512, 1000, 1016, 1023, 1024, 1025, 1032, 1536, 2049, 7168, 16384};
    for (int i = 0; i < 19; i++)
        for (int k = 0; k < 8; k++) {
            int layer = k % 2, rows = width[i] > 2000 ? 3 : 1 + (i * 8 + k) % 19;
            try_norm((norm_case){layer, rows, width[i], k & 4 ? 8 : 0, k / 2, i % 2, 0, k > 4, k == 6});
            try_norm((norm_case){layer, rows, width[i], k & 4 ? 3 : 0, k / 2, k % 3 == 1, i % 2, k > 4, k == 6});
        }
    try_norm((norm_case){0, 300, 64, 0, 0, 0, 0, 0, 0});
    try_norm((norm_case){0, 300, 1536, 0, 0, 0, 0, 0, 0});
    try_norm((norm_case){0, 0, 64, 0, 0, 0, 0, 0, 0});
}
END_TEST

/* ---- conv -------------------------------------------------------------------------------------------------------------------------- */

enum { CONV_MOST = BI_CONV_GROUP_MAX + 1 }; /* one more than fit a launch */

/* Rows behind the segments that belong to none. */
static twin_batch padded(const bi_seg *seg, int n_seg, int n_pad) {
    twin_batch batch = twin_batch_of(&t, seg, n_seg);
    const int n_row = batch.side[0].n_row;
    int32_t *row_seg = TWIN_ARRAY(&t, int32_t, "row_seg with padding", n_row + n_pad);
    for (int i = 0; i < n_row + n_pad; i++)
        row_seg[i] = i < n_row ? batch.side[0].row_seg[i] : -1;
    BOTH {
        batch.side[side].n_row = n_row + n_pad;
        batch.side[side].row_seg = AT(row_seg);
    }
    return batch;
}

/* seg: {seq, 0, n_row, pos}; sequences lie at seq_gap bytes behind 3 * n_chan inputs. n > 1: a group of so many; odd: its last member
 * is aligned otherwise than the rest. */
static void try_conv_group(int n, int odd, const bi_seg *seg, int n_seg, int n_seq, int n_chan, int gap, int family, int off, int use_index) {
    twin_reset(&t);
    twin_batch batch = padded(seg, n_seg, n_seg % 3);
    const int n_row = batch.side[0].n_row, ld = n_chan + gap, kept = 3 * n_chan + gap;
    bi_bf16 *x[CONV_MOST], *y[CONV_MOST], *history[CONV_MOST];
    float *w[CONV_MOST];
    for (int i = 0; i < n; i++) {
        const int shift = odd && i == n - 1 ? !off : off;
        x[i] = numbers("x", family, n_row, ld, shift), y[i] = outputs("y", (int64_t)n_row * ld, shift);
        history[i] = numbers("history", family, n_seq, kept, shift);
        w[i] = weights("w", n_chan * 4, 0);
    }
    int32_t *index = use_index ? TWIN_ARRAY(&t, int32_t, "index", n_seq) : NULL;
    for (int i = 0; index && i < n_seq; i++)
        index[i] = n_seq - 1 - i;
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_conv_args a[CONV_MOST];
        for (int i = 0; i < n; i++)
            a[i] = (bi_conv_args){.batch = &batch.side[side], .n_chan = n_chan, .x = AT(x[i]), .x_ld = ld, .w = AT(w[i]), .y = AT(y[i]),
                                  .y_ld = ld, .history = {AT(history[i]), (size_t)kept * sizeof(bi_bf16), AT(index)}};
        if (n == 1)
            RUN(conv, a[0]);
        else
            CHECK_OK(t.backend[side].op->conv_group(t.backend[side].ctx, a, n));
    }
    twin_compare(&t, "conv");
    /* A group is one call where its members are alike and fit; segments of up to 4 rows keep their own history, longer ones take tiles and
     * then a launch for the histories. */
    char list[32];
    const int n_call = n <= BI_CONV_GROUP_MAX && !odd ? 1 : n;
    snprintf(list, sizeof list, "conv %d", n_call * (batch.side[TWIN_CUDA].seg_row_max <= 4 ? 1 : 2));
    twin_launched(&t, "conv", list);
}

static void try_conv(const bi_seg *seg, int n_seg, int n_seq, int n_chan, int gap, int family, int off, int use_index) {
    try_conv_group(1, 0, seg, n_seg, n_seq, n_chan, gap, family, off, use_index);
}

START_TEST(conv) {
    static const bi_seg decode[] = {{4, 0, 1, 0}, {0, 0, 1, 1}, {5, 0, 1, 2}, {2, 0, 1, 3}, {1, 0, 1, 900}, {0, 0, 0, 0}, {0, 0, 0, 0}};
    static const bi_seg brief[] = {{0, 0, 2, 0}, {1, 0, 4, 1}, {2, 0, 3, 2}, {3, 0, 1, 3}, {4, 0, 4, 0}, {5, 0, 2, 40}};
    static const bi_seg mixed[] = {{3, 0, 1, 7}, {1, 0, 2, 1}, {0, 0, 37, 0}, {5, 0, 5, 2}, {4, 0, 64, 100}, {2, 0, 3, 0}, {6, 0, 0, 0}};
    static const bi_seg five[] = {{0, 0, 5, 0}};
    static const bi_seg long_one[] = {{1, 0, 203, 1}};
    static const int chans[] = {1, 3, 4, 36, 128, 257, 1028, 2560};
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 4; k++) {
            const int gap = k % 2 ? 4 : i % 2, off = k == 3;
            try_conv(decode, 7, 7, chans[i], gap, k, off, k % 2);
            try_conv(brief, 6, 7, chans[i], gap, k, off, k / 2);
            try_conv(mixed, 7, 7, chans[i], gap, k, off, k % 2);
            try_conv(five, 1, 2, chans[i], gap, k, off, 0);
            try_conv(long_one, 1, 2, chans[i], gap, k, off, 1);
        }
    for (int n = 2; n <= CONV_MOST; n++)
        for (int i = 2; i < 8; i += 2)
            for (int k = 0; k < 4; k++) {
                try_conv_group(n, k == 2, decode, 7, 7, chans[i], 0, k, k == 3, k % 2);
                try_conv_group(n, k == 2, mixed, 7, 7, chans[i], 4, k, k == 3, k / 2);
            }
    try_conv_group(BI_CONV_GROUP_MAX, 0, decode, 5, 7, 12288, 0, 0, 0, 0);
    try_conv(decode, 5, 7, 12288, 0, 0, 0, 0);
    try_conv(mixed, 6, 7, 12288, 0, 0, 0, 0);
}
END_TEST

/* ---- glu --------------------------------------------------------------------------------------------------------------------------- */

static float gate_number(int family) {
    static const float corner[] = {0.0f, -0.0f, 0x1p-149f, -0x1p-126f, 88.0f, -88.0f, -104.0f, 0.5625f, -1e30f, 1e30f, 2.25f, 56.25f};
    if (family == 0)
        return op_random_normal(&rnd);
    if (family == 1)
        return corner[op_random_below(&rnd, 12)];
    if (family == 2)
        return 40.0f * op_random_normal(&rnd);
    uint32_t u = (uint32_t)op_random_u64(&rnd);
    return bi_f32_of(u);
}

static void try_glu(int n_row, int d, int gap, int family, int off, bi_act act) {
    twin_reset(&t);
    float *g = TWIN_ARRAY(&t, float, "g", n_row * (d + gap) + off) + off, *u = TWIN_ARRAY(&t, float, "u", n_row * (d + gap) + off) + off;
    bi_bf16 *y = outputs("y", (int64_t)n_row * d, off);
    for (int i = 0; i < n_row * (d + gap); i++) {
        g[i] = gate_number(family);
        u[i] = gate_number(family);
    }
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_glu_args a = {n_row, d, AT(g), AT(u), d + gap, act, AT(y)};
        RUN(glu, a);
    }
    twin_compare(&t, "glu");
    twin_launched(&t, "glu", "glu 1");
}

START_TEST(glu) {
    static const bi_act act[] = {{0, 0.0f, 0.0f}, {1, 4.0f, 25.0f}, {1, 3.7f, 0.5f}, {1, 0x1p-100f, 1e6f}};
    static const int width[] = {1, 3, 4, 100, 1023, 1024, 1028, 3072};
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 4; k++)
            for (int family = 0; family < N_FAMILY; family++) {
                try_glu(1 + i, width[i], family % 2 ? 4 : 0, family, 0, act[k]);
                try_glu(1 + i, width[i], family % 2, family, k == 3, act[k]);
            }
}
END_TEST

/* ---- the residual stream ----------------------------------------------------------------------------------------------------------- */

static void try_attnres(int n_row, int d, int n_bank, int family, int off, int fault_on) {
    twin_reset(&t);
    const bi_bf16 *bank[BR_BANK_MAX];
    for (int i = 0; i < n_bank; i++)
        bank[i] = numbers("bank", i % 3 ? family : family % 2, n_row, d, off);
    bi_bf16 *p = numbers("p", family, n_row, d, off), *y = outputs("y", (int64_t)n_row * d, off);
    float *norm = weights("norm", d, 0), *proj = weights("proj", d, 0), *w = weights("w", d, 0);
    uint32_t *fault = fault_on ? faults(n_row) : NULL;
    for (int i = 0; i < d; i++)
        proj[i] = BI_MUL(proj[i], 0.0625f);
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        const bi_bf16 *v[BR_BANK_MAX];
        for (int i = 0; i < n_bank; i++)
            v[i] = AT(bank[i]);
        CHECK_OK(t.backend[side].op->attnres_weight(t.backend[side].ctx, AT(w), AT(norm), AT(proj), d));
        bi_attnres_args a = {n_row, d, n_bank, v, AT(p), AT(w), 1e-5f, AT(y), {AT(fault), CODE}};
        RUN(attnres, a);
    }
    twin_compare(&t, "attnres");
    twin_launched(&t, "attnres", "attnres_weight 1, attnres 1");
}

START_TEST(attnres) {
    static const int width[] = {1, 8, 33, 255, 256, 264, 1000, 2048, 7168}, bank[] = {1, 2, 3, 8, BR_BANK_MAX};
    for (int i = 0; i < 9; i++)
        for (int k = 0; k < 5; k++)
            for (int family = 0; family < N_FAMILY; family++)
                if (width[i] < 2000 || family == (i + k) % N_FAMILY)
                    try_attnres(width[i] > 2000 ? 2 : 5, width[i], bank[k], family, (k + family) % 2, family != 1);
    try_attnres(40, 512, 8, 0, 0, 1);
    try_attnres(2, 7168, 13, 0, 0, 1); /* all rows fit */
    try_attnres(2, 7168, 14, 0, 0, 1); /* one does not */
    try_attnres(2, 16384, 9, 0, 0, 1);
}
END_TEST

static void try_residual(int n_row, int d, int family, int off, int where, int fault_on) {
    twin_reset(&t);
    bi_bf16 *a = numbers("a", family, n_row, d, off), *b = numbers("b", family, n_row, d, off);
    bi_bf16 *y = where == 0 ? outputs("y", (int64_t)n_row * d, off) : where == 1 ? a : b;
    uint32_t *fault = fault_on ? faults(n_row) : NULL;
    if (n_row > 1)
        a[d] = b[d] = 0x7f7f; /* finite, and their sum is not */
    twin_begin(&t);
    TWIN_RUNS(&t, side) {
        bi_residual_args args = {n_row, d, AT(a), AT(b), AT(y), {AT(fault), CODE}};
        RUN(residual, args);
    }
    twin_compare(&t, "residual");
    twin_launched(&t, "residual", "residual 1");
}

START_TEST(residual) {
    static const int width[] = {1, 7, 8, 255, 1000, 2047, 2048, 2056, 7168};
    for (int i = 0; i < 9; i++)
        for (int k = 0; k < 12; k++)
            try_residual(1 + (i + k) % 6, width[i], k % N_FAMILY, k == 5, k % 3, k != 7);
}
END_TEST

/* ---- moved without arithmetic ------------------------------------------------------------------------------------------------------ */

START_TEST(embed) {
    static const int width[] = {1, 7, 8, 200, 1000, 7168};
    for (int i = 0; i < 6; i++)
        for (int off = 0; off < 2; off++) {
            enum { N_ROW = 33, N_VOCAB = 50 };
            twin_reset(&t);
            bi_bf16 *table = numbers("table", 3, N_VOCAB, width[i], off), *y = outputs("y", N_ROW * width[i], 0);
            int32_t *token = TWIN_ARRAY(&t, int32_t, "token", N_ROW);
            for (int r = 0; r < N_ROW; r++)
                token[r] = r == 0 ? N_VOCAB - 1 : op_random_below(&rnd, N_VOCAB);
            twin_begin(&t);
            TWIN_RUNS(&t, side) {
                bi_embed_args a = {N_ROW, width[i], N_VOCAB, AT(token), AT(table), AT(y)};
                RUN(embed, a);
            }
            twin_compare(&t, "embed");
            twin_launched(&t, "embed", "embed 1");
        }
}
END_TEST

START_TEST(gather) {
    static const int words[] = {0, 1, 3, 4, 8, 257, 1024, 40000};
    for (int i = 0; i < 8; i++)
        for (int off = 0; off < 2; off++) {
            enum { N = 17, N_FROM = 9 };
            twin_reset(&t);
            uint32_t *x = TWIN_ARRAY(&t, uint32_t, "x", N_FROM * words[i] + off), *y = TWIN_ARRAY(&t, uint32_t, "y", N * words[i]);
            int32_t *row = TWIN_ARRAY(&t, int32_t, "row", N);
            for (int k = 0; k < N_FROM * words[i] + off; k++)
                x[k] = (uint32_t)op_random_u64(&rnd);
            for (int k = 0; k < N; k++)
                row[k] = op_random_below(&rnd, N_FROM + 1) - 1;
            twin_begin(&t);
            TWIN_RUNS(&t, side) {
                bi_gather_args a = {N, sizeof(uint32_t) * (size_t)words[i], AT(x + off), AT(row), AT(y)};
                RUN(gather, a);
            }
            twin_compare(&t, "gather");
            twin_launched(&t, "gather", words[i] ? "gather 1" : "");
        }
}
END_TEST

START_TEST(seg_fault) {
    static const bi_seg seg[] = {{0, 0, 1, 9}, {1, 0, 300, 0}, {2, 0, 1000, 50}, {3, 0, 7, 3}, {4, 0, 1, 0}, {5, 0, 0, 0}};
    for (int round = 0; round < 12; round++) {
        twin_reset(&t);
        twin_batch batch = twin_batch_of(&t, seg, 6);
        const int n_row = batch.side[0].n_row;
        uint32_t *fault = TWIN_ARRAY(&t, uint32_t, "fault", n_row);
        bi_first_fault *out = TWIN_ARRAY(&t, bi_first_fault, "out", 6);
        for (int r = 0; r < n_row; r++)
            fault[r] = op_random_below(&rnd, 1 << round) ? 0 : (uint32_t)r + 1;
        twin_begin(&t);
        TWIN_RUNS(&t, side) {
            bi_seg_fault_args a = {&batch.side[side], AT(fault), AT(out)};
            RUN(seg_fault, a);
        }
        twin_compare(&t, "seg_fault");
        twin_launched(&t, "seg_fault", "seg_fault 1");
    }
}
END_TEST

Suite *cuda_row_suite(void) {
    Suite *suite = suite_create("row");
    CUDA_CASE_IN(suite, norms, open_twin, close_twin);
    CUDA_CASE_IN(suite, conv, open_twin, close_twin);
    CUDA_CASE_IN(suite, glu, open_twin, close_twin);
    CUDA_CASE_IN(suite, attnres, open_twin, close_twin);
    CUDA_CASE_IN(suite, residual, open_twin, close_twin);
    CUDA_CASE_IN(suite, embed, open_twin, close_twin);
    CUDA_CASE_IN(suite, gather, open_twin, close_twin);
    CUDA_CASE_IN(suite, seg_fault, open_twin, close_twin);
    return suite;
}
