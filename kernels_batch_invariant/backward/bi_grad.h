/* bi_grad: gradients of the ops, for training adapters on a frozen base.
 *
 * Layer: kernels_batch_invariant; includes the op headers. For every op through which a loss reaches an adapter's A or B: given
 * dL/d(output), dL/d(inputs). What is differentiated is the op WITHOUT its roundings (each R and RN taken as the identity, its
 * gradient as 1), at the inputs as the forward saw them; choices (experts, selected positions, codes) are constants.
 *
 * Not under the bit contract, so exp, log and tanh of the libraries may stand here and nowhere else: a gradient moves f32 masters, and
 * what forwards of the next step read, on both sides, is the bf16 values that are published of them. Forward files include nothing of
 * this folder but this header (tests/tidy_rules.c). What is promised: two runs with the same
 * arguments on the same backend give the same bytes (no float atomics, fixed orders); the host form computes in binary64 and
 * rounds once at the end; the CUDA form accumulates in binary32, feeds the tensor cores with bf16, and stays within 4e-3 of the
 * host form (norm of the difference over the norm, per output).
 *
 * All gradients are f32 and dense (row stride = row length) unless a field says otherwise; outputs are written, not added to; an
 * output that is NULL is not computed. Other arrays are those of the forward op, in the backend's device memory; arrays of
 * pointers and the structs themselves are read at the call, in host memory. Outputs overlap no input and no other output.
 * Errors: BR_E_SHAPE, BR_E_ARG before an output is touched; BR_E_LIMIT when a shape exceeds the limits given at open. Nothing
 * here allocates after open, or waits. */
#ifndef BI_GRAD_H
#define BI_GRAD_H

#include "bi_backend.h"
#include "br_device.h"

typedef struct bi_grad_ctx bi_grad_ctx;

/* N-NORM-1: dy (n_row, d) -> dx (n_row, d). x with row stride x_ld. */
typedef struct bi_grad_norm_args {
    int32_t n_row, d;
    const bi_bf16 *x;
    int32_t x_ld;
    const float *w;
    float eps;
    const float *dy;
    float *dx;
} bi_grad_norm_args;

/* Gradients of one adapter's stacks: da (n_map, rank, n_in), db (n_map, n_out, rank), rank as the adapter's matrices have it.
 * Either NULL: not computed. Zeros where no row uses the adapter. */
typedef struct bi_grad_adapter {
    float *da, *db;
} bi_grad_adapter;

/* N-LIN, N-LORA: y[t,h] = [W_h x + s B_h A_h x]. dy[t,h] at dy + t*dy_ld + h*dy_head_ld, n_out long; dx[t,h] at t*dx_ld + h*dx_head_ld,
 * n_in long (written even where no row has an adapter). Maps that share an input: one call each, the caller adds. A slot's da and db are
 * sums over its rows; the CUDA form multiplies x and dy of all others by zero, so that a NaN or Inf there spreads to them. */
typedef struct bi_grad_linear_args {
    int32_t n_row, n_head;
    const bi_bf16 *x;
    int64_t x_ld, x_head_ld;
    bi_mat w;
    bi_lora lora;
    const float *dy;
    int64_t dy_ld, dy_head_ld;
    float *dx; /* NULL: adapters only */
    int64_t dx_ld, dx_head_ld;
    const bi_grad_adapter *slot; /* (lora.n_slot), NULL: dx only */
} bi_grad_linear_args;

/* N-CONV: every segment of the batch begins at position 0. */
typedef struct bi_grad_conv_args {
    const bi_batch *batch;
    int32_t n_chan;
    const bi_bf16 *x;
    int32_t x_ld;
    const float *w;
    const float *dy;
    float *dx;
} bi_grad_conv_args;

/* N-KDA-1: da (n_row, n_head*d), dbeta (n_row, n_head) -> df (n_row, n_head*d), db (n_row, n_head). */
typedef struct bi_grad_kda_gate_args {
    int32_t n_row, n_head, d;
    const bi_bf16 *f, *b;
    const float *a_log, *dt_bias;
    int32_t bounded;
    float lower_bound;
    const float *da, *dbeta;
    float *df, *db;
} bi_grad_kda_gate_args;

/* N-KDA-2..4, states recomputed from checkpoints: do (n_row, n_head*d) -> dq, dk, dv, da (n_row, n_head*d), dbeta (n_row, n_head).
 * Every segment begins at position 0. All outputs are wanted. */
typedef struct bi_grad_kda_args {
    const bi_batch *batch;
    int32_t n_head, d;
    const bi_bf16 *q, *k, *v;
    int32_t ld;
    const float *a, *beta;
    float scale;
    const float *d_o;
    float *dq, *dk, *dv, *da, *dbeta;
} bi_grad_kda_args;

/* N-KDA-5: dy (n_row, n_head*d) -> do, dgate (n_row, n_head*d). */
typedef struct bi_grad_kda_norm_args {
    int32_t n_row, n_head, d;
    const float *o, *w;
    const bi_bf16 *gate;
    float eps;
    const float *dy;
    float *d_o, *dgate;
} bi_grad_kda_norm_args;

/* N-ATT-1..4 (a plain softmax over the selected positions): dz (n_row, n_head, d_kv_latent) -> dq (n_row, n_head, d_kv_latent), dq_r
 * (n_row, n_head, d_rope), dlatent (n_row, d_kv_latent + d_rope). latent (n_row, latent_ld): the rows that latent_store was given;
 * every segment begins at position 0, so that position j of a segment is its row j. select, n_select as bi_attn. */
typedef struct bi_grad_attn_args {
    const bi_batch *batch;
    int32_t n_head, d_kv_latent, d_rope;
    const bi_bf16 *q, *q_r;
    int64_t q_r_ld, q_r_head_ld;
    const bi_bf16 *latent;
    int32_t latent_ld;
    const int32_t *select, *n_select;
    int32_t select_ld;
    float alpha;
    const float *dz;
    float *dq, *dq_r, *dlatent;
} bi_grad_attn_args;

/* N-ATT-5: gate NULL: do = dy, dgate untouched. */
typedef struct bi_grad_attn_gate_args {
    int32_t n_row, d;
    const float *o;
    const bi_bf16 *gate;
    const float *dy;
    float *d_o, *dgate;
} bi_grad_attn_gate_args;

/* N-ROUTE-1 through p, the normaliser included: dp (n_row, topk) -> dx (n_row, d). expert (n_row, topk): what route chose. */
typedef struct bi_grad_route_args {
    int32_t n_row, d, n_expert, topk;
    const bi_bf16 *x;
    bi_mat w;
    const int32_t *expert;
    int32_t renormalize;
    float scale;
    const float *dp;
    float *dx;
} bi_grad_route_args;

/* N-MOE-1: dy (n_row, topk, d) -> dx (n_row, d), the sum over the chosen experts in rising id; slot1, slot3, slot2 (n_slot): gradients
 * of lora1 (w1), lora3 (w3), lora2 (w2), stacks of n_expert; zeros for experts that no row uses. NULL: dx only. */
typedef struct bi_grad_experts_args {
    int32_t n_row, d, d_ff, n_expert, topk;
    const bi_bf16 *x;
    const int32_t *expert;
    bi_mat w1, w3, w2;
    const bi_adapter *lora1, *lora3, *lora2;
    int32_t n_slot;
    const int32_t *row_slot;
    bi_act act;
    const float *dy;
    float *dx;
    const bi_grad_adapter *slot1, *slot3, *slot2;
} bi_grad_experts_args;

/* N-MOE-2: dy (n_row, d) -> de (n_row, topk, d), dp (n_row, topk). */
typedef struct bi_grad_combine_args {
    int32_t n_row, d, topk;
    const bi_bf16 *e;
    const float *p;
    const float *dy;
    float *de, *dp;
} bi_grad_combine_args;

/* N-ACT-1: dy (n_row, d) -> dg, du (n_row, d), dense; g, u with row stride ld. */
typedef struct bi_grad_glu_args {
    int32_t n_row, d;
    const float *g, *u;
    int64_t ld;
    bi_act act;
    const float *dy;
    float *dg, *du;
} bi_grad_glu_args;

/* N-RES-1: dy (n_row, d) -> dbank[i] (n_bank arrays of (n_row, d)), dp (n_row, d). */
typedef struct bi_grad_attnres_args {
    int32_t n_row, d, n_bank;
    const bi_bf16 *const *bank;
    const bi_bf16 *p;
    const float *w;
    float eps;
    const float *dy;
    float *const *dbank;
    float *dp;
} bi_grad_attnres_args;

/* N-HEAD-1: dlogprob (n_row), of the log-prob at the row's temperature (0: taken at 1) -> dx (n_row, d). */
typedef struct bi_grad_score_args {
    int32_t n_row, d, n_vocab;
    const bi_bf16 *x;
    bi_mat w;
    const int32_t *token;
    const float *temperature;
    const float *dlogprob;
    float *dx;
} bi_grad_score_args;

typedef struct bi_grad_ops {
    const char *name; /* "host", "cuda" */
    void (*close)(bi_grad_ctx *);
    br_status (*rmsnorm)(bi_grad_ctx *, const bi_grad_norm_args *);
    br_status (*linear)(bi_grad_ctx *, const bi_grad_linear_args *);
    br_status (*conv)(bi_grad_ctx *, const bi_grad_conv_args *);
    br_status (*kda_gate)(bi_grad_ctx *, const bi_grad_kda_gate_args *);
    br_status (*kda)(bi_grad_ctx *, const bi_grad_kda_args *);
    br_status (*kda_norm)(bi_grad_ctx *, const bi_grad_kda_norm_args *);
    br_status (*attn)(bi_grad_ctx *, const bi_grad_attn_args *);
    br_status (*attn_gate)(bi_grad_ctx *, const bi_grad_attn_gate_args *);
    br_status (*route)(bi_grad_ctx *, const bi_grad_route_args *);
    br_status (*experts)(bi_grad_ctx *, const bi_grad_experts_args *);
    br_status (*combine)(bi_grad_ctx *, const bi_grad_combine_args *);
    br_status (*glu)(bi_grad_ctx *, const bi_grad_glu_args *);
    br_status (*attnres)(bi_grad_ctx *, const bi_grad_attnres_args *);
    br_status (*score)(bi_grad_ctx *, const bi_grad_score_args *);
} bi_grad_ops;

typedef struct bi_grad {
    const bi_grad_ops *op;
    bi_grad_ctx *ctx;
} bi_grad;

/* Matrices and adapters are those that the oracle has packed. The pool stays the caller's and must outlive this. limits: as for
 * the forward backend, n_row the rows of a training batch. Errors: BR_E_NOMEM. */
br_status bi_grad_host_open(const bi_limits *limits, br_pool *pool, bi_grad *out);

/* Matrices and adapters are those that the CUDA backend has packed; work goes to the device's stream. Errors: BR_E_UNSUPPORTED (a build
 * without CUDA, a host device), BR_E_NOMEM, BR_E_DEVICE. */
br_status bi_grad_cuda_open(const bi_limits *limits, br_device *device, bi_grad *out);

static inline void bi_grad_close(bi_grad *grad) {
    if (grad->ctx)
        grad->op->close(grad->ctx);
    *grad = (bi_grad){NULL, NULL};
}

#endif
