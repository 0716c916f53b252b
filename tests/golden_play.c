/* The ops that have golden files, and how one is run; see golden_play.h. */
#include "golden_play.h"

#include "test_support.h"

#include <string.h>

const golden_op golden_ops[] = {
    {"block", "N-MMA-1", golden_play_block},
    {"chain", "N-CHAIN-1,N-CHAIN-2", golden_play_chain},
    {"sum", "N-SUM-1,N-SUM-2", golden_play_sum},
    {"fn", "N-FN-1,N-FN-2", golden_play_fn_grid},
    {"convert", "N-CHAIN-1,N-IDX-1,N-FP4-1", golden_play_convert},
    {"rng", "N-RNG-1", golden_play_rng},
    {"weightgen", "-", golden_play_weightgen},
    {"constants", "N-F32-2,N-LORA-1,N-ATT-1,N-IDX-2,N-KDA-2", golden_play_constants},
    {"embed", "N-EMB-1", golden_play_embed},
    {"rmsnorm", "N-NORM-1", golden_play_rmsnorm},
    {"layernorm", "N-NORM-2", golden_play_layernorm},
    {"linear", "N-LIN-1,N-LORA-1,N-FP4-1", golden_play_linear},
    {"conv", "N-CONV-1", golden_play_conv},
    {"kda_gate", "N-KDA-1", golden_play_kda_gate},
    {"kda", "N-KDA-2,N-KDA-3,N-KDA-4", golden_play_kda},
    {"kda_norm", "N-KDA-5", golden_play_kda_norm},
    {"attn", "N-ATT-1,N-ATT-2,N-ATT-3,N-ATT-4", golden_play_attn},
    {"attn_gate", "N-ATT-5", golden_play_attn_gate},
    {"index", "N-IDX-1,N-IDX-2,N-IDX-3,N-IDX-4,P-4", golden_play_index},
    {"route", "N-ROUTE-1,P-4", golden_play_route},
    {"experts", "N-MOE-1,N-ACT-1,N-LORA-1", golden_play_experts},
    {"combine", "N-MOE-2", golden_play_combine},
    {"glu", "N-ACT-1", golden_play_glu},
    {"attnres", "N-RES-1", golden_play_attnres},
    {"residual", "N-RES-2,N-MOE-3", golden_play_residual},
    {"score", "N-HEAD-1,N-HEAD-2,N-HEAD-3", golden_play_score},
    {"sample", "N-SAMPLE-1,N-SAMPLE-2,N-SAMPLE-3,N-HEAD-2,P-4", golden_play_sample},
};

const int golden_op_count = sizeof golden_ops / sizeof golden_ops[0];

const golden_op *golden_op_named(const char *name) {
    for (int i = 0; i < golden_op_count; i++)
        if (strcmp(golden_ops[i].name, name) == 0)
            return &golden_ops[i];
    ck_abort_msg("no golden op '%s'", name);
}

/* Room for every golden case; the largest are small. */
static const bi_limits limits = {.n_row = 1100,
                                 .d_in = 1024,
                                 .rank = 48,
                                 .n_head = 8,
                                 .d_kv_latent = 128,
                                 .d_rope = 64,
                                 .index_n_head = 32,
                                 .index_d_head = 128,
                                 .n_pos = 2560,
                                 .n_expert = 64,
                                 .n_expert_topk = 16,
                                 .d_expert = 128,
                                 .d_expert_ff = 128,
                                 .n_vocab = 2048,
                                 .d_model = 1024};

void golden_run(const golden_op *op, const char *isa, const golden_case *c, golden_case *out) {
    *out = *c;
    out->n_out = 0;
    memset(out->out, 0, sizeof out->out);
    if (!isa) {
        op->play(NULL, out);
        return;
    }
    op_rig rig;
    op_rig_open(&rig, &limits, isa, test_thread_count());
    op_rig_poison(&rig);
    op->play(&rig, out);
    op_rig_close(&rig);
}

int golden_step_of(const golden_case *c, int step, golden_step *out) {
    const int32_t *seg = golden_i32(c, "seg");
    memset(out, 0, sizeof *out);
    for (int32_t i = 0; i < golden_dim(c, "seg", 0); i++, seg += 4) {
        if (seg[0] < step)
            out->first_row += seg[3];
        if (seg[0] != step)
            continue;
        bi_batch *b = &out->batch;
        ck_assert(b->n_seg < GOLDEN_SEQ_MAX && b->n_row + seg[3] <= 256);
        out->seg[b->n_seg] = (bi_seg){seg[1], b->n_row, seg[3], seg[2]};
        for (int32_t t = 0; t < seg[3]; t++)
            out->row_seg[b->n_row++] = b->n_seg;
        b->n_seg++;
    }
    out->batch.seg = out->seg;
    out->batch.row_seg = out->row_seg;
    return out->batch.n_seg > 0;
}

uint32_t *golden_add_faults(golden_case *c, int32_t n_row) {
    void *fault = golden_add_out(c, GOLDEN_I32, "fault", n_row, 0, 0);
    return memset(fault, 0, sizeof(uint32_t) * (size_t)n_row);
}
