/* golden_play: one op on the inputs of one golden case, by the oracle or by the slow form.
 *
 * Layer: tests. The writer and the test of the golden files share it, so a file says all there is to say about a case. */
#ifndef GOLDEN_PLAY_H
#define GOLDEN_PLAY_H

#include "bi_backend.h"
#include "golden_file.h"
#include "op_rig.h"

/* Adds the op's outputs to c. rig NULL: the slow form. */
typedef void (*golden_play_fn)(op_rig *rig, golden_case *c);

typedef struct golden_op {
    const char *name;    /* golden/ops/NAME.txt */
    const char *clauses; /* of CONTRACT.md */
    golden_play_fn play;
} golden_op;

extern const golden_op golden_ops[];
extern const int golden_op_count;

const golden_op *golden_op_named(const char *name);

/* out: c's inputs (shared) and the outputs of a run on one instruction set; isa NULL: of the slow form. */
void golden_run(const golden_op *op, const char *isa, const golden_case *c, golden_case *out);

/* ---- for the files golden_play_*.c ------------------------------------------------------------------------------------ */

enum { GOLDEN_FAULT = 9, GOLDEN_SEQ_MAX = 3 };

/* The segments of one step: in i32 seg of n_segx4, rows (step, sequence, first position, number of rows). */
typedef struct golden_step {
    bi_batch batch;
    bi_seg seg[GOLDEN_SEQ_MAX];
    int32_t row_seg[256];
    int32_t first_row; /* of the case's rows */
} golden_step;

int golden_step_of(const golden_case *c, int step, golden_step *out); /* 0: no such step */
uint32_t *golden_add_faults(golden_case *c, int32_t n_row);            /* out i32 fault, all zero */

void golden_play_block(op_rig *rig, golden_case *c);
void golden_play_chain(op_rig *rig, golden_case *c);
void golden_play_sum(op_rig *rig, golden_case *c);
void golden_play_fn_grid(op_rig *rig, golden_case *c);
void golden_play_convert(op_rig *rig, golden_case *c);
void golden_play_rng(op_rig *rig, golden_case *c);
void golden_play_weightgen(op_rig *rig, golden_case *c);
void golden_play_constants(op_rig *rig, golden_case *c);
void golden_play_embed(op_rig *rig, golden_case *c);
void golden_play_rmsnorm(op_rig *rig, golden_case *c);
void golden_play_layernorm(op_rig *rig, golden_case *c);
void golden_play_conv(op_rig *rig, golden_case *c);
void golden_play_kda_gate(op_rig *rig, golden_case *c);
void golden_play_kda(op_rig *rig, golden_case *c);
void golden_play_kda_norm(op_rig *rig, golden_case *c);
void golden_play_glu(op_rig *rig, golden_case *c);
void golden_play_attnres(op_rig *rig, golden_case *c);
void golden_play_residual(op_rig *rig, golden_case *c);
void golden_play_attn(op_rig *rig, golden_case *c);
void golden_play_attn_gate(op_rig *rig, golden_case *c);
void golden_play_index(op_rig *rig, golden_case *c);
void golden_play_linear(op_rig *rig, golden_case *c);
void golden_play_route(op_rig *rig, golden_case *c);
void golden_play_experts(op_rig *rig, golden_case *c);
void golden_play_combine(op_rig *rig, golden_case *c);
void golden_play_score(op_rig *rig, golden_case *c);
void golden_play_sample(op_rig *rig, golden_case *c);

#endif
