/* The row-wise ops on golden cases: embedding, norms, convolution, KDA, activation, residuals; see golden_play.h. */
#include "golden_play.h"
#include "slow_row.h"
#include "test_support.h"

#include <string.h>

/* A row with a fault ends its request: what else it computed is nobody's, so it stands as zeros. */
static void clear_faulty(const uint32_t *fault, int32_t n_row, void *y, size_t row_bytes) {
    for (int32_t t = 0; t < n_row; t++)
        if (fault[t])
            memset((unsigned char *)y + (size_t)t * row_bytes, 0, row_bytes);
}

void golden_play_embed(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "token", 0), d = golden_dim(c, "table", 1);
    bi_embed_args a = {n,
                       d,
                       golden_dim(c, "table", 0),
                       golden_i32(c, "token"),
                       golden_bf16(c, "table"),
                       golden_add_out(c, GOLDEN_BF16, "y", n, d, 0)};
    if (rig)
        CHECK_OK(rig->backend.op->embed(rig->backend.ctx, &a));
    else
        slow_embed(&a);
}

static bi_norm_args norm_args(golden_case *c) {
    int32_t n = golden_dim(c, "x", 0), d = golden_dim(c, "x", 1);
    bi_norm_args a = {n,
                      d,
                      golden_bf16(c, "x"),
                      d,
                      golden_f32(c, "w"),
                      golden_has(c, "b") ? golden_f32(c, "b") : NULL,
                      golden_float(c, "eps"),
                      golden_add_out(c, GOLDEN_BF16, "y", n, d, 0),
                      d,
                      {golden_add_faults(c, n), GOLDEN_FAULT}};
    return a;
}

void golden_play_rmsnorm(op_rig *rig, golden_case *c) {
    bi_norm_args a = norm_args(c);
    if (rig)
        CHECK_OK(rig->backend.op->rmsnorm(rig->backend.ctx, &a));
    else
        slow_rmsnorm(&a);
    clear_faulty(a.fault.row, a.n_row, a.y, sizeof *a.y * (size_t)a.d);
}

void golden_play_layernorm(op_rig *rig, golden_case *c) {
    bi_norm_args a = norm_args(c);
    if (rig)
        CHECK_OK(rig->backend.op->layernorm(rig->backend.ctx, &a));
    else
        slow_layernorm(&a);
    clear_faulty(a.fault.row, a.n_row, a.y, sizeof *a.y * (size_t)a.d);
}

static int32_t sequence_count(const golden_case *c) {
    const int32_t *seg = golden_i32(c, "seg");
    int32_t n = 0;
    for (int32_t i = 0; i < golden_dim(c, "seg", 0); i++)
        n = seg[4 * i + 1] + 1 > n ? seg[4 * i + 1] + 1 : n;
    return n;
}

/* The history is an output: the last three inputs of each sequence. */
void golden_play_conv(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "x", 0), n_chan = golden_dim(c, "x", 1), n_seq = sequence_count(c);
    const bi_bf16 *x = golden_bf16(c, "x");
    bi_bf16 *y = golden_add_out(c, GOLDEN_BF16, "y", n, n_chan, 0);
    bi_bf16 *history = golden_add_out(c, GOLDEN_BF16, "history", n_seq, 3, n_chan);
    golden_step step;
    for (int i = 0; golden_step_of(c, i, &step); i++) {
        int64_t at = (int64_t)step.first_row * n_chan;
        bi_conv_args a = {&step.batch,
                          n_chan,
                          x + at,
                          n_chan,
                          golden_f32(c, "w"),
                          {(unsigned char *)history, sizeof *history * 3 * (size_t)n_chan, NULL},
                          y + at,
                          n_chan};
        if (rig)
            CHECK_OK(rig->backend.op->conv(rig->backend.ctx, &a));
        else
            slow_conv(&a);
    }
}

void golden_play_kda_gate(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "f", 0), n_head = golden_dim(c, "f", 1), d = golden_dim(c, "f", 2);
    bi_kda_gate_args a = {n,
                          n_head,
                          d,
                          golden_bf16(c, "f"),
                          golden_bf16(c, "b"),
                          golden_f32(c, "a_log"),
                          golden_f32(c, "dt_bias"),
                          golden_int(c, "bounded"),
                          golden_float(c, "lower_bound"),
                          golden_add_out(c, GOLDEN_F32, "a", n, n_head, d),
                          golden_add_out(c, GOLDEN_F32, "beta", n, n_head, 0)};
    if (rig)
        CHECK_OK(rig->backend.op->kda_gate(rig->backend.ctx, &a));
    else
        slow_kda_gate(&a);
}

/* The oracle keeps a head as panels of 32 value columns, (d/32, key, 32); the file and the slow form as (key, value). */
static void unfold_state(float *state, const float *panels, int32_t n_head, int32_t d) {
    for (int32_t h = 0; h < n_head; h++, state += d * d, panels += d * d)
        for (int32_t key = 0; key < d; key++)
            for (int32_t value = 0; value < d; value++)
                state[key * d + value] = panels[(value / 32 * d + key) * 32 + value % 32];
}

static void kda_run(op_rig *rig, golden_case *c, const bi_kda_args *whole) {
    golden_step step;
    for (int i = 0; golden_step_of(c, i, &step); i++) {
        int64_t at = (int64_t)step.first_row * whole->ld, head_at = (int64_t)step.first_row * whole->n_head;
        bi_kda_args a = *whole;
        a.batch = &step.batch;
        a.q += at, a.k += at, a.v += at, a.a += at, a.o += at;
        a.beta += head_at;
        a.fault.row += step.first_row;
        if (rig)
            CHECK_OK(rig->backend.op->kda(rig->backend.ctx, &a));
        else
            slow_kda(&a);
    }
}

void golden_play_kda(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "q", 0), n_head = golden_dim(c, "q", 1), d = golden_dim(c, "q", 2), n_seq = sequence_count(c);
    size_t n_state = (size_t)(n_seq * n_head * d) * (size_t)d;
    float *o = golden_add_out(c, GOLDEN_F32, "o", n, n_head, d),
          *state = golden_add_out(c, GOLDEN_F32, "state", n_seq * n_head, d, d);
    float *kept = br_arena_take(c->arena, sizeof *kept * n_state, 64);
    bi_kda_args a = {.n_head = n_head,
                     .d = d,
                     .q = golden_bf16(c, "q"),
                     .k = golden_bf16(c, "k"),
                     .v = golden_bf16(c, "v"),
                     .ld = n_head * d,
                     .a = golden_f32(c, "a"),
                     .beta = golden_f32(c, "beta"),
                     .scale = golden_float(c, "scale"),
                     .state = {(unsigned char *)kept, sizeof *kept * (size_t)(n_head * d * d), NULL},
                     .o = o,
                     .fault = {golden_add_faults(c, n), GOLDEN_FAULT}};
    kda_run(rig, c, &a);
    if (rig)
        unfold_state(state, kept, n_seq * n_head, d);
    else
        memcpy(state, kept, sizeof *kept * n_state);
}

void golden_play_kda_norm(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "o", 0), n_head = golden_dim(c, "o", 1), d = golden_dim(c, "o", 2);
    bi_kda_norm_args a = {n,
                          n_head,
                          d,
                          golden_f32(c, "o"),
                          golden_f32(c, "w"),
                          golden_bf16(c, "gate"),
                          golden_float(c, "eps"),
                          golden_add_out(c, GOLDEN_BF16, "y", n, n_head, d),
                          {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (rig)
        CHECK_OK(rig->backend.op->kda_norm(rig->backend.ctx, &a));
    else
        slow_kda_norm(&a);
    clear_faulty(a.fault.row, n, a.y, sizeof *a.y * (size_t)(n_head * d));
}

void golden_play_glu(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "g", 0), d = golden_dim(c, "g", 1);
    bi_glu_args a = {n,
                     d,
                     golden_f32(c, "g"),
                     golden_f32(c, "u"),
                     d,
                     {golden_int(c, "situ"), golden_float(c, "beta"), golden_float(c, "linear_beta")},
                     golden_add_out(c, GOLDEN_BF16, "y", n, d, 0)};
    if (rig)
        CHECK_OK(rig->backend.op->glu(rig->backend.ctx, &a));
    else
        slow_glu(&a);
}

/* W of N-RES is made first, from norm and proj. */
void golden_play_attnres(op_rig *rig, golden_case *c) {
    int32_t n_bank = golden_dim(c, "bank", 0), n = golden_dim(c, "bank", 1), d = golden_dim(c, "bank", 2);
    const bi_bf16 *row[BR_BANK_MAX], *bank = golden_bf16(c, "bank");
    for (int32_t i = 0; i < n_bank; i++)
        row[i] = bank + (int64_t)i * n * d;
    float *w = golden_add_out(c, GOLDEN_F32, "w", d, 0, 0);
    bi_attnres_args a = {n,
                         d,
                         n_bank,
                         row,
                         golden_bf16(c, "p"),
                         w,
                         golden_float(c, "eps"),
                         golden_add_out(c, GOLDEN_BF16, "y", n, d, 0),
                         {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (rig) {
        CHECK_OK(rig->backend.op->attnres_weight(rig->backend.ctx, w, golden_f32(c, "norm"), golden_f32(c, "proj"), d));
        CHECK_OK(rig->backend.op->attnres(rig->backend.ctx, &a));
    } else {
        slow_attnres_weight(w, golden_f32(c, "norm"), golden_f32(c, "proj"), d);
        slow_attnres(&a);
    }
    clear_faulty(a.fault.row, n, a.y, sizeof *a.y * (size_t)d);
}

void golden_play_residual(op_rig *rig, golden_case *c) {
    int32_t n = golden_dim(c, "a", 0), d = golden_dim(c, "a", 1);
    bi_residual_args a = {n,
                          d,
                          golden_bf16(c, "a"),
                          golden_bf16(c, "b"),
                          golden_add_out(c, GOLDEN_BF16, "y", n, d, 0),
                          {golden_add_faults(c, n), GOLDEN_FAULT}};
    if (rig)
        CHECK_OK(rig->backend.op->residual(rig->backend.ctx, &a));
    else
        slow_residual(&a);
    clear_faulty(a.fault.row, n, a.y, sizeof *a.y * (size_t)d);
}
