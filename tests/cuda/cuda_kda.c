/* Kimi Delta Attention on the GPU: gate, recurrence and gated norm against the oracle, byte for byte.
 *
 * The layout of a state is the backend's own, so states are compared by going on: what a step left behind shows in the outputs of the
 * next. Rows depend on (sequence, position) only, so cutting or packing differently is another way to the same numbers. */
#include "cuda_case.h"
#include "twin.h"

#include "br_mem.h"
#include "dense_forms.h"
#include "test_support.h"

#include <string.h>

enum { CODE = 13, MEMORY = 16 << 20, SEQ_MAX = 70, SEG_MAX = 2048 };

static twin t;

static void setup(void) {
    const bi_limits limits = {.n_row = 512, .d_in = 256, .d_out = 256, .rank = 16, .n_slot = 1, .n_head = 4, .d_kv_latent = 64,
                              .d_rope = 16, .index_n_head = 4, .index_d_head = 32, .n_pos = 256, .n_expert = 8, .n_expert_topk = 2,
                              .d_expert = 64, .d_expert_ff = 64, .kda_n_head = 97, .kda_d_head = 128, .n_vocab = 512, .d_model = 256};
    twin_open(&t, &limits, MEMORY);
}

static void teardown(void) {
    twin_close(&t);
}

/* ---- random rows ---- */

typedef enum family {
    ORDINARY,
    TINY,   /* down to the subnormals: the division by the norm leaves its short form */
    ZEROS,  /* zeros of both signs, now and then a number */
    WIDE,   /* 2^-40 .. 2^40: some norms pass 2^20 */
    HUGE_X, /* squares overflow: every row is a fault, q and k become zeros */
    PLATEAU,
    FAMILIES
} family;

static bi_bf16 sample(op_random *random, family f) {
    const uint64_t r = op_random_u64(random);
    const uint32_t sign = (uint32_t)(r >> 63) << 15, fraction = (uint32_t)r & 0x7f, pick = (uint32_t)(r >> 20) & 0xffff;
    switch (f) {
    case TINY:
        return (bi_bf16)(sign | (pick % 90) << 7 | fraction);
    case ZEROS:
        return (bi_bf16)(sign | (pick % 16 ? 0 : 0x3f80));
    case WIDE:
        return (bi_bf16)(sign | (87 + pick % 81) << 7 | fraction);
    case HUGE_X:
        return (bi_bf16)(sign | (200 + pick % 50) << 7 | fraction);
    case PLATEAU:
        return 0x3fb0;
    default:
        return bi_round(op_random_normal(random));
    }
}

/* Most decays lie in 0.2 .. 1, some are 1, 0 or subnormal, as gates without a bound give. */
static float decay(op_random *random) {
    const uint64_t r = op_random_u64(random);
    switch (r % 12) {
    case 0:
        return 0.0f;
    case 1:
        return 1.0f;
    case 2:
        return 0x1p-149f * (float)(r >> 44);
    default:
        return 0.2f + 0.8f * (float)(r >> 40) * 0x1p-24f;
    }
}

/* ---- gate ---- */

static void gate_case(int n_row, int n_head, int d, int bounded, float scale, int shift) {
    twin_reset(&t);
    op_random random = {(uint64_t)(n_row * 131 + n_head * 17 + d), 0};
    const int width = n_head * d;
    bi_bf16 *f = TWIN_ARRAY(&t, bi_bf16, "f", n_row * width + shift) + shift, *b = TWIN_ARRAY(&t, bi_bf16, "b", n_row * n_head);
    float *a_log = TWIN_ARRAY(&t, float, "a_log", n_head), *bias = TWIN_ARRAY(&t, float, "dt_bias", width);
    float *a = TWIN_ARRAY(&t, float, "a", n_row * width), *beta = TWIN_ARRAY(&t, float, "beta", n_row * n_head);
    op_random_bf16s(&random, scale, f, n_row * width);
    op_random_bf16s(&random, scale, b, n_row * n_head);
    op_random_normals(&random, 1.0f, a_log, n_head);
    op_random_normals(&random, 1.0f, bias, width);
    twin_begin(&t);
    TWIN_RUNS(&t, s) {
        const int side = s;
        const bi_kda_gate_args args = {n_row, n_head, d, twin_at(&t, s, f), twin_at(&t, s, b), twin_at(&t, s, a_log), twin_at(&t, s, bias),
                                       bounded, -5.0f, twin_at(&t, s, a), twin_at(&t, s, beta)};
        CHECK_OK(t.backend[side].op->kda_gate(t.backend[side].ctx, &args));
    }
    twin_compare(&t, "kda_gate");
}

START_TEST(gate_equals_oracle) {
    static const int shape[][3] = {{0, 2, 32}, {1, 1, 1}, {3, 2, 33}, {5, 3, 32}, {1, 96, 128}, {37, 4, 128}, {64, 32, 128}, {2, 1, 256}};
    static const float scale[] = {1.0f, 30.0f, 1e-30f, 0.0f};
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        for (int bounded = 0; bounded < 2; bounded++)
            for (int k = 0; k < 4; k++)
                gate_case(shape[i][0], shape[i][1], shape[i][2], bounded, scale[k], k == 1);
}
END_TEST

/* ---- gated norm ---- */

static void norm_case(int n_row, int n_head, int d, float scale, int shift, int broken_row) {
    twin_reset(&t);
    op_random random = {(uint64_t)(n_row * 31 + n_head * 7 + d), 0};
    const int n = n_row * n_head * d;
    float *o = TWIN_ARRAY(&t, float, "o", n + shift) + shift, *w = TWIN_ARRAY(&t, float, "w", d);
    bi_bf16 *gate = TWIN_ARRAY(&t, bi_bf16, "gate", n), *y = TWIN_ARRAY(&t, bi_bf16, "y", n);
    uint32_t *fault = TWIN_ARRAY(&t, uint32_t, "fault", n_row);
    op_random_normals(&random, scale, o, n);
    op_random_normals(&random, 1.0f, w, d);
    op_random_bf16s(&random, 2.0f, gate, n);
    memset(fault, 0, sizeof(uint32_t) * (size_t)n_row);
    if (broken_row >= 0)
        o[broken_row * n_head * d + d / 2] = 0x1p100f;
    twin_begin(&t);
    TWIN_RUNS(&t, s) {
        const int side = s;
        const bi_kda_norm_args args = {n_row, n_head, d, twin_at(&t, s, o), twin_at(&t, s, w), twin_at(&t, s, gate), 1e-5f,
                                       twin_at(&t, s, y), {twin_at(&t, s, fault), CODE}};
        CHECK_OK(t.backend[side].op->kda_norm(t.backend[side].ctx, &args));
    }
    twin_compare(&t, "kda_norm");
    for (int i = 0; i < n_row; i++)
        ck_assert_uint_eq(fault[i], i == broken_row ? CODE : 0);
}

START_TEST(norm_equals_oracle) {
    static const int size[] = {1, 31, 32, 33, 64, 96, 128, 160, 192, 224, 256, 257, 288, 4096};
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        norm_case(0, 3, size[i], 1.0f, 0, -1);
        norm_case(1, 1, size[i], 1e-12f, 0, -1);
        norm_case(7, 3, size[i], 1.0f, 0, 4);
        norm_case(5, 5, size[i], 1e9f, 1, 0);
        norm_case(4, 2, size[i], 0.0f, 0, -1);
    }
    norm_case(16, 96, 128, 0.3f, 0, 15);
}
END_TEST

/* ---- recurrence ---- */

typedef struct kda_rig {
    int n_head, d, ld, n_row_max;
    family family;
    uint64_t seed;
    bi_bf16 *q, *k, *v;
    float *a, *beta, *o;
    uint32_t *fault;
    int32_t *index;
    twin_block state;
    size_t seq_bytes;
    int pos[SEG_MAX];
    /* One element of one token is this pattern instead. */
    int broken_seq, broken_pos, broken_head;
    char broken_array;
    bi_bf16 broken_bits;
} kda_rig;

/* extra: elements between rows; shift: elements before the first. 4 and 3 keep no row on 16 bytes. */
static kda_rig kda_new(int n_head, int d, int n_seq, int n_row_max, family f, int extra, int shift) {
    twin_reset(&t);
    kda_rig rig = {.n_head = n_head, .d = d, .ld = n_head * d + extra, .n_row_max = n_row_max, .family = f, .broken_seq = -1};
    rig.seed = (uint64_t)(n_head * 1009 + d * 31 + (int)f);
    const int span = n_row_max * rig.ld + shift;
    rig.q = TWIN_ARRAY(&t, bi_bf16, "q", span) + shift;
    rig.k = TWIN_ARRAY(&t, bi_bf16, "k", span) + shift;
    rig.v = TWIN_ARRAY(&t, bi_bf16, "v", span) + shift;
    rig.a = TWIN_ARRAY(&t, float, "a", n_row_max * n_head * d);
    rig.beta = TWIN_ARRAY(&t, float, "beta", n_row_max * n_head);
    rig.o = TWIN_ARRAY(&t, float, "o", n_row_max * n_head * d);
    rig.fault = TWIN_ARRAY(&t, uint32_t, "fault", n_row_max);
    rig.index = TWIN_ARRAY(&t, int32_t, "index", n_seq);
    for (int i = 0; i < n_seq; i++)
        rig.index[i] = (i + 1) % n_seq;
    rig.seq_bytes = t.backend[TWIN_CUDA].op->kda_state_bytes(n_head, d) + (shift ? 4 : 64);
    const size_t oracle_bytes = t.backend[TWIN_ORACLE].op->kda_state_bytes(n_head, d);
    ck_assert_uint_eq(oracle_bytes, t.backend[TWIN_CUDA].op->kda_state_bytes(n_head, d));
    rig.state = twin_private(&t, rig.seq_bytes * (size_t)n_seq, rig.seq_bytes * (size_t)n_seq);
    return rig;
}

static void fill_row(const kda_rig *rig, int row, int seq, int pos) {
    op_random random = {rig->seed + (uint64_t)seq * 100003 + (uint64_t)pos, 0};
    for (int i = 0; i < rig->n_head * rig->d; i++) {
        rig->q[row * rig->ld + i] = sample(&random, rig->family);
        rig->k[row * rig->ld + i] = sample(&random, rig->family);
        rig->v[row * rig->ld + i] = sample(&random, rig->family == HUGE_X || rig->family == WIDE ? ORDINARY : rig->family);
        rig->a[row * rig->n_head * rig->d + i] = decay(&random);
    }
    for (int h = 0; h < rig->n_head; h++)
        rig->beta[row * rig->n_head + h] = (float)(op_random_u64(&random) >> 40) * 0x1p-24f;
    if (seq == rig->broken_seq && pos == rig->broken_pos) {
        bi_bf16 *array = rig->broken_array == 'q' ? rig->q : rig->broken_array == 'k' ? rig->k : rig->v;
        array[row * rig->ld + rig->broken_head * rig->d + 5] = rig->broken_bits;
    }
}

static void one_nan(float *x, size_t n) {
    const uint32_t pattern = BI_F32_NAN;
    for (size_t i = 0; i < n; i++)
        if (bi_is_nan(x[i]))
            memcpy(&x[i], &pattern, sizeof pattern);
}

/* NaN bits are nobody's promise: make them one before comparing. */
static void settle_nans(const kda_rig *rig) {
    const size_t n = (size_t)(rig->n_row_max * rig->n_head * rig->d);
    float *copy;
    CHECK_OK(br_mem_alloc((void **)&copy, n * sizeof(float), "outputs"));
    CHECK_OK(br_device_download(t.device, copy, twin_at(&t, TWIN_CUDA, rig->o), n * sizeof(float)));
    CHECK_OK(br_device_wait(t.device));
    one_nan(copy, n);
    one_nan(rig->o, n);
    CHECK_OK(br_device_upload(t.device, twin_at(&t, TWIN_CUDA, rig->o), copy, n * sizeof(float)));
    CHECK_OK(br_device_wait(t.device));
    br_mem_free(copy);
}

/* The next n[i] rows of sequence seq[i]; 0 rows are a padding segment. */
static void kda_step(kda_rig *rig, const int *seq, const int *n, int n_seg) {
    bi_seg seg[SEG_MAX] = {{0}};
    int n_row = 0;
    ck_assert_int_le(n_seg, SEG_MAX);
    for (int i = 0; i < n_seg; i++) {
        seg[i] = (bi_seg){.seq = seq[i], .n_row = n[i], .pos = n[i] ? rig->pos[seq[i]] : 1};
        for (int r = 0; r < n[i]; r++)
            fill_row(rig, n_row++, seq[i], rig->pos[seq[i]]++);
    }
    ck_assert_int_le(n_row, rig->n_row_max);
    memset(rig->fault, 0, sizeof(uint32_t) * (size_t)rig->n_row_max);
    memset(rig->o, 0xff, sizeof(float) * (size_t)(rig->n_row_max * rig->n_head * rig->d));
    const twin_batch batch = twin_batch_of(&t, seg, n_seg);
    twin_begin(&t);
    TWIN_RUNS(&t, s) {
        const int side = s;
        const bi_kda_args args = {.batch = &batch.side[side], .n_head = rig->n_head, .d = rig->d, .ld = rig->ld,
                                  .q = twin_at(&t, s, rig->q), .k = twin_at(&t, s, rig->k), .v = twin_at(&t, s, rig->v),
                                  .a = twin_at(&t, s, rig->a), .beta = twin_at(&t, s, rig->beta), .scale = bi_const_kda_scale(rig->d),
                                  .state = {rig->state.side[side], rig->seq_bytes, twin_at(&t, s, rig->index)},
                                  .o = twin_at(&t, s, rig->o), .fault = {twin_at(&t, s, rig->fault), CODE}};
        CHECK_OK(t.backend[side].op->kda(t.backend[side].ctx, &args));
    }
    CHECK_OK(twin_wait(&t));
    if (rig->broken_seq >= 0)
        settle_nans(rig);
    twin_compare(&t, "kda");
}

static void kda_one(kda_rig *rig, int seq, int n) {
    kda_step(rig, &seq, &n, 1);
}

/* Every head size, aligned or not, every family: prefill, one row, prefill again, then anew from position 0 on a used state. */
START_TEST(every_shape) {
    for (int d = 32; d <= 256; d += 32)
        for (int odd = 0; odd < 2; odd++) {
            kda_rig rig = kda_new(d <= 128 ? 3 : 2, d, 2, 20, ORDINARY, odd ? 3 : 0, odd);
            kda_one(&rig, 1, 17);
            kda_one(&rig, 1, 1);
            kda_one(&rig, 1, 5);
            kda_one(&rig, 0, 9);
            rig.pos[1] = 0;
            kda_one(&rig, 1, 4);
        }
    for (int f = 0; f < FAMILIES; f++)
        for (int d = 64; d <= 128; d += 64)
            for (int odd = 0; odd < 2; odd++) {
                kda_rig rig = kda_new(2, d, 1, 16, (family)f, odd ? 4 : 8, odd);
                kda_one(&rig, 0, 11);
                kda_one(&rig, 0, 1);
                kda_one(&rig, 0, 1);
                kda_one(&rig, 0, 2);
            }
}
END_TEST

/* Head counts on both sides of every change of tiling with one sequence, and with enough for the packed one. */
START_TEST(every_tiling) {
    static const int heads[] = {1, 5, 16, 17, 33, 34, 49, 50, 66, 67, 96, 97};
    static const int seq[] = {0, 1, 2, 3}, n[] = {9, 8, 10, 2};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        kda_rig rig = kda_new(heads[i], 128, 1, 19, ORDINARY, 0, 0);
        kda_one(&rig, 0, 19);
        twin_launched(&t, "one long segment", "kda_prefill 1");
        kda_one(&rig, 0, 1);
        twin_launched(&t, "one row", "kda_decode 1");
        kda_one(&rig, 0, 3);
    }
    for (size_t i = 4; i < sizeof heads / sizeof heads[0]; i += 3) {
        kda_rig rig = kda_new(heads[i], 128, 4, 29, ORDINARY, 0, 0);
        kda_step(&rig, seq, n, 4);
        kda_step(&rig, seq, n, 4);
    }
    /* Five long segments of so many heads take the widest tiling, the odd head a block of its own. */
    static const int several[] = {4, 2, 0, 1, 3}, rows[] = {9, 9, 9, 9, 9};
    for (int n_head = 96; n_head <= 97; n_head++) {
        kda_rig rig = kda_new(n_head, 128, 5, 45, ORDINARY, 0, 0);
        kda_step(&rig, several, rows, 5);
        kda_step(&rig, several, rows, 5);
    }
}
END_TEST

/* n rows at once equal m rows and the rest, whatever is cut off, rows one by one included. */
START_TEST(every_cut) {
    enum { N = 26 };
    for (int cut = 1; cut < N; cut++) {
        kda_rig rig = kda_new(2, 128, 2, N, ORDINARY, 0, 0);
        kda_one(&rig, 1, cut);
        kda_one(&rig, 1, N - cut);
        kda_one(&rig, 1, 1);
    }
    kda_rig rig = kda_new(2, 128, 2, N, ORDINARY, 0, 0);
    for (int i = 0; i < N; i++)
        kda_one(&rig, 0, 1);
    kda_one(&rig, 0, N);
    rig = kda_new(1, 128, 1, 500, ORDINARY, 0, 0);
    kda_one(&rig, 0, 500);
    kda_one(&rig, 0, 3);
}
END_TEST

/* Single rows, long ones and padding in one step; the longest first, last and in the middle; sequences trade places. */
START_TEST(mixed_steps) {
    static const int order[][6] = {{0, 1, 2, 3, 4, 5}, {5, 3, 1, 0, 2, 4}, {2, 0, 4, 5, 1, 3}, {4, 5, 0, 2, 3, 1}};
    static const int rows[][6] = {{30, 1, 2, 1, 0, 0}, {1, 1, 40, 7, 8, 1}, {1, 1, 1, 1, 1, 33}, {1, 1, 1, 1, 1, 0}};
    for (int odd = 0; odd < 2; odd++) {
        kda_rig rig = kda_new(3, 128, 6, 60, ORDINARY, odd, odd);
        for (int i = 0; i < 12; i++)
            kda_step(&rig, order[i % 4], rows[(i + i / 4) % 4], 6);
    }
}
END_TEST

/* Many sequences, one row each, as decoding sees them; then several each. */
START_TEST(many_sequences) {
    int seq[SEQ_MAX], n[SEQ_MAX];
    kda_rig rig = kda_new(2, 128, SEQ_MAX, 3 * SEQ_MAX, ORDINARY, 0, 0);
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < SEQ_MAX; i++) {
            seq[i] = (i * 11 + step) % SEQ_MAX;
            n[i] = step < 3 ? 1 : 1 + (i + step) % 4;
        }
        kda_step(&rig, seq, n, SEQ_MAX);
    }
}
END_TEST

/* So many states that decoding streams them: single rows, sequences trading places; then with longer segments, padding and faults. */
START_TEST(many_states) {
    enum { N_HEAD = 17 };
    int seq[SEQ_MAX], n[SEQ_MAX];
    kda_rig rig = kda_new(N_HEAD, 128, SEQ_MAX, SEQ_MAX + 4, ORDINARY, 8, 0);
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < SEQ_MAX; i++) {
            seq[i] = (i * 11 + step) % SEQ_MAX;
            n[i] = step < 3 ? 1 : i == 5 ? 3 : i == 7 ? 2 : i < SEQ_MAX - 1;
        }
        if (step == 2)
            rig.broken_seq = 9, rig.broken_pos = rig.pos[9], rig.broken_head = 3, rig.broken_array = 'q', rig.broken_bits = 0x7f80;
        kda_step(&rig, seq, n, SEQ_MAX);
        twin_launched(&t, "many states", step < 3 ? "kda_decode_ring 1" : "kda_prefill 1, kda_decode_ring 1");
    }
    rig = kda_new(97, 128, 12, 12, TINY, 0, 0);
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 12; i++)
            seq[i] = i, n[i] = 1;
        kda_step(&rig, seq, n, 12);
    }
}
END_TEST

/* Single rows on both sides of where decoding streams: eight (sequence, head) an SM. */
START_TEST(floor_of_the_ring) {
    const int floor = 8 * dense_forms_sm_count(&t.backend[TWIN_CUDA]);
    int seq[SEG_MAX], n[SEG_MAX];
    for (int i = 0; i < SEG_MAX; i++)
        seq[i] = i, n[i] = 1;
    for (int below = 0; below < 2; below++) {
        kda_rig rig = kda_new(1, 128, floor - below, floor, ORDINARY, 0, 0);
        for (int step = 0; step < 2; step++) {
            kda_step(&rig, seq, n, floor - below);
            twin_launched(&t, "single rows", below ? "kda_decode 1" : "kda_decode_ring 1");
        }
    }
}
END_TEST

/* A fault marks its row and stays in its sequence; a NaN in v passes unmarked. */
START_TEST(faults_stay_in_their_sequence) {
    static const struct {
        char array;
        bi_bf16 bits;
    } broken[] = {{'k', 0x7fc1}, {'q', 0xff80}, {'k', 0x6000}, {'q', 0x6000}, {'v', 0x7f80}};
    static const int seq[] = {0, 1, 2}, single[] = {1, 1, 1}, several[] = {12, 10, 9};
    for (int d = 64; d <= 128; d += 64)
        for (int many = 0; many < 2; many++)
            for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
                kda_rig rig = kda_new(2, d, 3, 31, ORDINARY, 0, 0);
                rig.broken_seq = 1, rig.broken_pos = many ? 4 : 1, rig.broken_head = 1;
                rig.broken_array = broken[i].array, rig.broken_bits = broken[i].bits;
                kda_step(&rig, seq, many ? several : single, 3);
                kda_step(&rig, seq, single, 3);
                ck_assert_uint_eq(rig.fault[1], !many && broken[i].array != 'v' ? CODE : 0);
                kda_step(&rig, seq, single, 3);
            }
}
END_TEST

/* The published shape, a few rows: 96 heads of 128, three sequences among single rows. */
START_TEST(full_width) {
    static const int seq[] = {3, 0, 1, 2}, n[] = {1, 24, 17, 1};
    kda_rig rig = kda_new(96, 128, 4, 43, ORDINARY, 0, 0);
    kda_step(&rig, seq, n, 4);
    kda_step(&rig, seq, n, 4);
}
END_TEST

START_TEST(refuses_what_the_oracle_refuses) {
    twin_reset(&t);
    const bi_batch batch = {.n_row = 1, .n_seg = 1, .seg_row_max = 1};
    const bi_batch none = {0};
    static const int wrong[] = {0, 16, 33, 48, 288};
    for (int side = 0; side < 2; side++) {
        const bi_backend *backend = &t.backend[side];
        const bi_kda_args good = {.batch = &none, .n_head = 1, .d = 32, .ld = 32};
        CHECK_OK(backend->op->kda(backend->ctx, &good));
        bi_kda_args args = good;
        args.batch = &batch;
        for (int i = 0; i < 5; i++) {
            args.d = wrong[i], args.ld = 512;
            CHECK_FAILS(backend->op->kda(backend->ctx, &args), BR_E_SHAPE);
        }
        args.d = 32, args.ld = 31;
        CHECK_FAILS(backend->op->kda(backend->ctx, &args), BR_E_SHAPE);
        args.ld = 32, args.state.seq_bytes = 4098;
        CHECK_FAILS(backend->op->kda(backend->ctx, &args), BR_E_ALIGN);
        const bi_kda_gate_args gate = {.n_row = -1, .n_head = 1, .d = 32};
        CHECK_FAILS(backend->op->kda_gate(backend->ctx, &gate), BR_E_SHAPE);
        const bi_kda_norm_args norm = {.n_row = 1, .n_head = 0, .d = 32};
        CHECK_FAILS(backend->op->kda_norm(backend->ctx, &norm), BR_E_SHAPE);
    }
}
END_TEST

Suite *cuda_kda_suite(void) {
    Suite *suite = suite_create("cuda kda");
    CUDA_CASE_IN(suite, gate_equals_oracle, setup, teardown);
    CUDA_CASE_IN(suite, norm_equals_oracle, setup, teardown);
    CUDA_CASE_IN(suite, every_shape, setup, teardown);
    CUDA_CASE_IN(suite, every_tiling, setup, teardown);
    CUDA_CASE_IN(suite, every_cut, setup, teardown);
    CUDA_CASE_IN(suite, mixed_steps, setup, teardown);
    CUDA_CASE_IN(suite, many_sequences, setup, teardown);
    CUDA_CASE_IN(suite, many_states, setup, teardown);
    CUDA_CASE_IN(suite, floor_of_the_ring, setup, teardown);
    CUDA_CASE_IN(suite, faults_stay_in_their_sequence, setup, teardown);
    CUDA_CASE_IN(suite, full_width, setup, teardown);
    CUDA_CASE_IN(suite, refuses_what_the_oracle_refuses, setup, teardown);
    return suite;
}
