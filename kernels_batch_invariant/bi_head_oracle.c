/* bi_score, oracle.      Contract: N-HEAD, N-CHAIN
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. Rows in chunks of 64; one job a sub-block of the
 * vocabulary: its 128 columns times the rows of the chunk, reduced to one part a row while the logits are still in cache. */
#include "bi_gemm.h"
#include "bi_oracle.h"
#include "bi_rows.h"

#include "bi_head_row.h"

enum {
    ROWS = BI_GEMM_ROWS,
    BLOCK_PANELS = BI_HEAD_BLOCK / BI_PANEL
};

typedef struct score_run {
    bi_ctx *ctx;
    const bi_score_args *args;
    int32_t first, n_row; /* rows of the chunk */
    int32_t k_pad, n_block;
    float *xf;            /* (ROWS, k_pad) */
    bi_head_part *scaled; /* (ROWS, n_block) at the row's temperature */
    bi_head_part *raw;    /* (ROWS, n_block) at T = 1; unused where that is the row's temperature */
    float *logit;         /* (ROWS) of the token */
    int16_t *xe;          /* (ROWS, k_pad) */
} score_run;

static size_t shared_bytes(int32_t k_pad, int32_t n_block) {
    return (size_t)ROWS * ((size_t)k_pad * BI_PACKED_BYTES + (size_t)n_block * 2 * sizeof(bi_head_part) + sizeof(float));
}

enum { THREAD_BYTES = sizeof(float[ROWS][BI_HEAD_BLOCK]) };

#ifdef BI_ISA_portable
bi_scratch bi_head_scratch(const bi_limits *limits) {
    size_t row = bi_sample_row_bytes(limits->n_vocab);
    bi_scratch need = {shared_bytes(bi_pad_k(limits->d_model), bi_head_block_count(limits->n_vocab)),
                       row > THREAD_BYTES ? row : THREAD_BYTES};
    return need;
}
#endif

/* A logit that is not finite makes l_b NaN, which no later step of the merge loses. */
static bi_head_part part_of(const float *logit, int32_t n, float temperature, int want_dot) {
    float z[BI_HEAD_BLOCK];
    bi_head_z_block(logit, n, temperature, z);
    bi_head_part part = bi_head_block_part(z, n, want_dot);
    int finite = 1;
    for (int32_t i = 0; i < n; i++)
        finite &= bi_is_finite(logit[i]);
    part.sum = finite ? part.sum : bi_f32_of(BI_F32_NAN);
    return part;
}

static void block_job(void *context, int block, int thread) {
    const score_run *run = context;
    const bi_score_args *a = run->args;
    float(*logit)[BI_HEAD_BLOCK] = (float(*)[BI_HEAD_BLOCK])bi_thread_scratch(run->ctx, thread, THREAD_BYTES);
    memset(logit, 0, sizeof *logit * (size_t)run->n_row);
    int32_t panel = block * BLOCK_PANELS, n_panel = bi_panel_count(a->n_vocab);
    int32_t panel_end = n_panel - panel < BLOCK_PANELS ? n_panel : panel + BLOCK_PANELS;
    bi_gemm_rows(run->n_row, run->xf, run->xe, (size_t)run->k_pad, &a->w, panel, panel_end, logit[0], BI_HEAD_BLOCK);
    int32_t n = bi_head_block_size(a->n_vocab, block);
    for (int32_t r = 0; r < run->n_row; r++) {
        float temperature = bi_head_score_temperature(a->temperature[run->first + r]);
        size_t at = (size_t)r * (size_t)run->n_block + (size_t)block;
        run->scaled[at] = part_of(logit[r], n, temperature, a->entropy != NULL);
        if (temperature != 1.0f)
            run->raw[at] = part_of(logit[r], n, 1.0f, 0);
        int32_t token = a->token[run->first + r] - block * BI_HEAD_BLOCK;
        if (token >= 0 && token < n)
            run->logit[r] = logit[r][token];
    }
}

static void finish_row(const score_run *run, int32_t r) {
    const bi_score_args *a = run->args;
    int32_t t = run->first + r;
    float temperature = bi_head_score_temperature(a->temperature[t]), x = run->logit[r];
    size_t at = (size_t)r * (size_t)run->n_block;
    bi_head_row scaled = bi_head_merge(run->scaled + at, run->n_block);
    bi_head_row raw = temperature == 1.0f ? scaled : bi_head_merge(run->raw + at, run->n_block);
    int finite = bi_is_finite(scaled.log_sum);
    bi_fault_check(&a->fault, t, scaled.log_sum);
    a->logprob[t] = finite ? bi_head_logprob(&scaled, bi_head_z(x, temperature)) : 0.0f;
    a->logprob_raw[t] = finite ? bi_head_logprob(&raw, bi_head_z(x, 1.0f)) : 0.0f;
    if (a->entropy)
        a->entropy[t] = finite ? scaled.entropy : 0.0f;
}

static br_status check_args(const bi_ctx *ctx, const bi_score_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->d > ctx->limits.d_model || a->n_vocab < 1 || a->n_vocab > ctx->limits.n_vocab)
        return br_fail(BR_E_SHAPE, "score: %d rows of %d, %d tokens: expected n_row >= 0, 1 to %d, 1 to %d", a->n_row, a->d,
                       a->n_vocab, ctx->limits.d_model, ctx->limits.n_vocab);
    if (!a->w.data || a->w.n_out != a->n_vocab || a->w.n_in != a->d)
        return br_fail(BR_E_SHAPE, "score: the head is (%d, %d): expected (%d, %d)", a->w.n_out, a->w.n_in, a->n_vocab,
                       a->d);
    for (int32_t t = 0; t < a->n_row; t++) {
        if (a->token[t] < 0 || a->token[t] >= a->n_vocab)
            return br_fail(BR_E_SHAPE, "score: row %d asks for token %d: expected 0 to %d", t, a->token[t], a->n_vocab - 1);
        if (!bi_head_temperature_ok(a->temperature[t]))
            return br_fail(BR_E_ARG, "score: row %d has temperature %g: expected 0 or 2^-10 to 2^10", t,
                           (double)a->temperature[t]);
    }
    return BR_OK;
}

br_status BI_FN(bi_score)(bi_ctx *ctx, const bi_score_args *a) {
    BR_TRY(check_args(ctx, a));
    score_run run = {.ctx = ctx, .args = a, .k_pad = bi_pad_k(a->d), .n_block = bi_head_block_count(a->n_vocab)};
    run.xf = (float *)bi_shared_scratch(ctx, shared_bytes(run.k_pad, run.n_block));
    run.scaled = (bi_head_part *)(run.xf + (size_t)ROWS * (size_t)run.k_pad);
    run.raw = run.scaled + (size_t)ROWS * (size_t)run.n_block;
    run.logit = (float *)(run.raw + (size_t)ROWS * (size_t)run.n_block);
    run.xe = (int16_t *)(run.logit + ROWS);
    for (run.first = 0; run.first < a->n_row; run.first += ROWS) {
        run.n_row = a->n_row - run.first < ROWS ? a->n_row - run.first : ROWS;
        for (int32_t r = 0; r < run.n_row; r++) {
            size_t at = (size_t)r * (size_t)run.k_pad;
            BI_FN(bi_pack_row)(a->x + (size_t)(run.first + r) * (size_t)a->d, a->d, run.k_pad, run.xf + at, run.xe + at);
        }
        br_pool_run(ctx->pool, block_job, &run, run.n_block);
        for (int32_t r = 0; r < run.n_row; r++)
            finish_row(&run, r);
    }
    return BR_OK;
}
