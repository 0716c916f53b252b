/* Opens the host form of the gradients: the table, the scratch, and the way back from a packed matrix. */
#include "bi_grad_host.h"

static void close_host(bi_grad_ctx *ctx) {
    br_mem_free(ctx->shared);
    br_mem_free(ctx->thread);
    br_mem_free(ctx);
}

static const bi_grad_ops table = {
    .name = "host",
    .close = close_host,
    .rmsnorm = bi_grad_rmsnorm_host,
    .linear = bi_grad_linear_host,
    .conv = bi_grad_conv_host,
    .kda_gate = bi_grad_kda_gate_host,
    .kda = bi_grad_kda_host,
    .kda_norm = bi_grad_kda_norm_host,
    .attn = bi_grad_attn_host,
    .attn_gate = bi_grad_attn_gate_host,
    .route = bi_grad_route_host,
    .experts = bi_grad_experts_host,
    .combine = bi_grad_combine_host,
    .glu = bi_grad_glu_host,
    .attnres = bi_grad_attnres_host,
    .score = bi_grad_score_host,
};

static bi_grad_scratch scratch_for(const bi_limits *limits) {
    bi_grad_scratch (*const family[])(const bi_limits *) = {
        bi_grad_linear_host_scratch, bi_grad_experts_host_scratch, bi_grad_kda_host_scratch, bi_grad_attn_host_scratch,
        bi_grad_score_host_scratch,
    };
    bi_grad_scratch most = {0, 0};
    for (size_t i = 0; i < sizeof family / sizeof family[0]; i++) {
        const bi_grad_scratch need = family[i](limits);
        most.shared = need.shared > most.shared ? need.shared : most.shared;
        most.thread = need.thread > most.thread ? need.thread : most.thread;
    }
    most.thread = (most.thread + 63) / 64 * 64; /* each slice starts on a cache line of its own */
    return most;
}

br_status bi_grad_host_open(const bi_limits *limits, br_pool *pool, bi_grad *out) {
    const bi_grad_scratch scratch = scratch_for(limits);
    bi_grad_ctx *ctx = NULL;
    br_status status = BR_OK;
    *out = (bi_grad){NULL, NULL};
    BR_TRY(br_mem_alloc((void **)&ctx, sizeof *ctx, "the gradients"));
    *ctx = (bi_grad_ctx){.pool = pool, .limits = *limits, .shared_bytes = scratch.shared, .thread_bytes = scratch.thread};
    BR_TRY_GOTO(br_mem_alloc((void **)&ctx->shared, scratch.shared, "shared scratch of the gradients"), fail);
    BR_TRY_GOTO(br_mem_alloc((void **)&ctx->thread, scratch.thread * (size_t)br_pool_thread_count(pool), "thread scratch of the gradients"),
                fail);
    *out = (bi_grad){&table, ctx};
    return BR_OK;
fail:
    close_host(ctx);
    return status;
}

void bi_grad_mat_row(const bi_mat *w, int32_t o, double *row) {
    const int32_t panel = o / BI_PANEL, lane = o % BI_PANEL;
    if (w->form == BI_FORM_BF16) {
        const float *f = bi_panel_f(w, panel) + lane;
        for (int32_t k = 0; k < w->n_in; k++)
            row[k] = (double)f[(size_t)k * BI_PANEL];
        return;
    }
    for (int32_t k = 0; k < w->n_in; k += BI_FP4_GROUP) { /* n_in is whole groups */
        float f[BI_FP4_GROUP * BI_PANEL];
        int16_t e[BI_FP4_GROUP * BI_PANEL];
        bi_panel_expand(w, panel, k, BI_FP4_GROUP, f, e);
        for (int32_t i = 0; i < BI_FP4_GROUP; i++)
            row[k + i] = (double)f[i * BI_PANEL + lane];
    }
}
