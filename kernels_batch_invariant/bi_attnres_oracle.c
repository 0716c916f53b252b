/* bi_attnres, bi_attnres_weight, bi_residual, oracle.      Contract: N-RES, N-NORM, N-SUM
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. */
#include "bi_rows.h"

#include "bi_fn.h"
#include "bi_sum.h"

enum { RES_BLOCK = 128 };

typedef struct res_rows {
    const bi_bf16 *v[BR_BANK_MAX + 1]; /* the bank's rows in order, then the running sum */
    float pi[BR_BANK_MAX + 1];
    int32_t n;
} res_rows;

static void score(const bi_attnres_args *a, int32_t t, res_rows *rows) {
    for (int32_t i = 0; i < rows->n; i++) {
        float sum = bi_sum_sq_bf16(rows->v[i], a->d);
        bi_fault_check(&a->fault, t, sum);
        float rstd = bi_rsqrt(sum / (float)a->d + a->eps);
        rows->pi[i] = bi_sum_prod_bf16_f32(rows->v[i], a->w, a->d) * rstd;
    }
}

static void softmax(float *s, int32_t n) {
    float max = s[0];
    for (int32_t i = 1; i < n; i++)
        max = s[i] > max ? s[i] : max;
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        s[i] = bi_exp(s[i] - max);
        sum += s[i];
    }
    for (int32_t i = 0; i < n; i++)
        s[i] /= sum;
}

static void attnres_row(const void *args, int32_t t) {
    const bi_attnres_args *a = args;
    int64_t at = (int64_t)t * a->d;
    res_rows rows = {.n = a->n_bank + 1};
    for (int32_t i = 0; i < a->n_bank; i++)
        rows.v[i] = a->bank[i] + at;
    rows.v[a->n_bank] = a->p + at;
    score(a, t, &rows);
    softmax(rows.pi, rows.n);
    for (int32_t begin = 0; begin < a->d; begin += RES_BLOCK) {
        float out[RES_BLOCK] = {0.0f};
        int32_t n = a->d - begin < RES_BLOCK ? a->d - begin : RES_BLOCK;
        for (int32_t r = 0; r < rows.n; r++)
            for (int32_t i = 0; i < n; i++)
                out[i] = BI_FMA(rows.pi[r], bi_widen(rows.v[r][begin + i]), out[i]);
        bi_round_row(a->y + at + begin, out, n);
    }
}

br_status BI_FN(bi_attnres)(bi_ctx *ctx, const bi_attnres_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->n_bank < 1 || a->n_bank > BR_BANK_MAX)
        return br_fail(BR_E_SHAPE, "attnres: %d rows of %d, bank of %d: expected n_row >= 0, d >= 1, a bank of 1 to %d",
                       a->n_row, a->d, a->n_bank, BR_BANK_MAX);
    bi_rows_run(ctx, attnres_row, a, a->n_row, 2 * (int64_t)a->d * (a->n_bank + 1));
    return BR_OK;
}

br_status BI_FN(bi_attnres_weight)(bi_ctx *ctx, float *w, const float *norm, const float *proj, int32_t d) {
    (void)ctx;
    for (int32_t i = 0; i < d; i++)
        w[i] = norm[i] * proj[i];
    return BR_OK;
}

/* Blocks are staged as f32 because y may be a or b. A sum of finite bf16 can round to Inf, so the rounded row is checked. */
static void residual_row(const void *args, int32_t t) {
    const bi_residual_args *r = args;
    int64_t at = (int64_t)t * r->d;
    uint32_t bad = 0;
    for (int32_t begin = 0; begin < r->d; begin += RES_BLOCK) {
        float sum[RES_BLOCK];
        int32_t n = r->d - begin < RES_BLOCK ? r->d - begin : RES_BLOCK;
        const bi_bf16 *a = r->a + at + begin, *b = r->b + at + begin;
        bi_bf16 *y = r->y + at + begin;
        for (int32_t i = 0; i < n; i++)
            sum[i] = bi_widen(a[i]) + bi_widen(b[i]);
        bi_round_row(y, sum, n);
        for (int32_t i = 0; i < n; i++)
            bad |= !bi_is_finite(bi_widen(y[i]));
    }
    bi_fault_check(&r->fault, t, bad ? bi_f32_of(0x7f800000u) : 0.0f);
}

br_status BI_FN(bi_residual)(bi_ctx *ctx, const bi_residual_args *a) {
    if (a->n_row < 0 || a->d < 1)
        return br_fail(BR_E_SHAPE, "residual: %d rows of %d: expected n_row >= 0 and d >= 1", a->n_row, a->d);
    bi_rows_run(ctx, residual_row, a, a->n_row, a->d);
    return BR_OK;
}
