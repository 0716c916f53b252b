/* bi_rmsnorm, bi_layernorm, oracle.      Contract: N-NORM, N-SUM
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. Rows are staged in blocks as f32 before they are
 * rounded into y: y may be x, and a loop that reads and writes one array does not fill vector lanes. */
#include "bi_rows.h"

#include "bi_fn.h"
#include "bi_sum.h"

enum { NORM_BLOCK = 128 };

static inline int32_t block_end(int32_t begin, int32_t d) {
    return d - begin < NORM_BLOCK ? d : begin + NORM_BLOCK;
}

static void rmsnorm_row(const void *args, int32_t t) {
    const bi_norm_args *a = args;
    const bi_bf16 *x = a->x + (int64_t)t * a->x_ld;
    bi_bf16 *y = a->y + (int64_t)t * a->y_ld;
    float sum = bi_sum_sq_bf16(x, a->d);
    bi_fault_check(&a->fault, t, sum);
    float rstd = bi_rsqrt(sum / (float)a->d + a->eps);
    for (int32_t begin = 0; begin < a->d; begin += NORM_BLOCK) {
        float block[NORM_BLOCK];
        int32_t n = block_end(begin, a->d) - begin;
        for (int32_t i = 0; i < n; i++)
            block[i] = bi_widen(x[begin + i]) * rstd * a->w[begin + i];
        bi_round_row(y + begin, block, n);
    }
}

static void layernorm_row(const void *args, int32_t t) {
    const bi_norm_args *a = args;
    const bi_bf16 *x = a->x + (int64_t)t * a->x_ld;
    bi_bf16 *y = a->y + (int64_t)t * a->y_ld;
    float dev[BR_D_MODEL_MAX];
    float mean = bi_sum_bf16(x, a->d) / (float)a->d;
    for (int32_t i = 0; i < a->d; i++)
        dev[i] = bi_widen(x[i]) - mean;
    float sum = bi_sum_sq_f32(dev, a->d);
    bi_fault_check(&a->fault, t, sum);
    float rstd = bi_rsqrt(sum / (float)a->d + a->eps);
    for (int32_t i = 0; i < a->d; i++)
        dev[i] = dev[i] * rstd * a->w[i];
    for (int32_t i = 0; i < a->d; i++)
        dev[i] += a->b ? a->b[i] : 0.0f; /* a missing b is zeros: the addition still makes -0 a +0 */
    bi_round_row(y, dev, a->d);
}

static br_status check(const bi_norm_args *a, const char *op) {
    if (a->n_row < 0 || a->d < 1 || a->d > BR_D_MODEL_MAX)
        return br_fail(BR_E_SHAPE, "%s: %d rows of %d: expected n_row >= 0 and 1 to %d elements", op, a->n_row, a->d,
                       BR_D_MODEL_MAX);
    if (a->x_ld < a->d || a->y_ld < a->d)
        return br_fail(BR_E_SHAPE, "%s: row strides %d and %d: expected at least %d", op, a->x_ld, a->y_ld, a->d);
    if (a->x == a->y && a->x_ld != a->y_ld)
        return br_fail(BR_E_SHAPE, "%s: in place with row strides %d and %d: expected equal strides", op, a->x_ld, a->y_ld);
    return BR_OK;
}

br_status BI_FN(bi_rmsnorm)(bi_ctx *ctx, const bi_norm_args *a) {
    BR_TRY(check(a, "rmsnorm"));
    bi_rows_run(ctx, rmsnorm_row, a, a->n_row, a->d);
    return BR_OK;
}

br_status BI_FN(bi_layernorm)(bi_ctx *ctx, const bi_norm_args *a) {
    BR_TRY(check(a, "layernorm"));
    bi_rows_run(ctx, layernorm_row, a, a->n_row, a->d);
    return BR_OK;
}
