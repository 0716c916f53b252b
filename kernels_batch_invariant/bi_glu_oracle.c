/* bi_glu, oracle.      Contract: N-ACT, N-FN
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. */
#include "bi_rows.h"

#include "bi_act.h"

static void situ_row(const void *args, int32_t t) {
    const bi_glu_args *a = args;
    const float *g = a->g + (int64_t)t * a->ld, *u = a->u + (int64_t)t * a->ld;
    bi_bf16 *y = a->y + (int64_t)t * a->d;
    float beta = a->act.beta, linear_beta = a->act.linear_beta;
    for (int32_t i = 0; i < a->d; i++)
        y[i] = bi_act_situ(g[i], u[i], beta, linear_beta);
}

static void silu_row(const void *args, int32_t t) {
    const bi_glu_args *a = args;
    const float *g = a->g + (int64_t)t * a->ld, *u = a->u + (int64_t)t * a->ld;
    bi_bf16 *y = a->y + (int64_t)t * a->d;
    for (int32_t i = 0; i < a->d; i++)
        y[i] = bi_act_silu(g[i], u[i]);
}

br_status BI_FN(bi_glu)(bi_ctx *ctx, const bi_glu_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->ld < a->d)
        return br_fail(BR_E_SHAPE, "glu: %d rows of %d at stride %lld: expected n_row >= 0, d >= 1, stride >= d", a->n_row,
                       a->d, (long long)a->ld);
    /* One element costs two tanh and a sigmoid, about 16 plain element steps. */
    bi_rows_run(ctx, a->act.situ ? situ_row : silu_row, a, a->n_row, 16 * (int64_t)a->d);
    return BR_OK;
}
