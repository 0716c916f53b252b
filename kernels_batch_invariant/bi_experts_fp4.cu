/* The grouped products of MXFP4 experts; see bi_experts_wide.cuh and bi_experts_few.cuh.      Contract: N-MOE-1, N-CHAIN, N-FP4 */
#include "bi_experts_few.cuh"
#include "bi_experts_wide.cuh"

br_status bi_experts_rows_fp4(bi_ctx *ctx, const experts_product *p, bi_bf16 *to) {
    wide_rows_kernel<<<(unsigned)(ctx->n_sm * WIDE_GATHER_BLOCKS), WIDE_GATHER_THREADS, 0, ctx->stream>>>(*p, to);
    return bi_cuda_launched(ctx, BI_K_experts_plan, "experts");
}

br_status bi_experts_up_fp4(bi_ctx *ctx, const experts_product *p, int32_t n_row) {
    return launch_wide<EXPERTS_UP>(ctx, p, n_row, BI_K_experts_up);
}

br_status bi_experts_down_fp4(bi_ctx *ctx, const experts_product *p, int32_t n_row) {
    return launch_wide<EXPERTS_DOWN>(ctx, p, n_row, BI_K_experts_down);
}

br_status bi_experts_up_few(bi_ctx *ctx, const experts_product *p) {
    return launch_few<EXPERTS_UP>(ctx, p, BI_K_experts_up);
}

br_status bi_experts_down_few(bi_ctx *ctx, const experts_product *p) {
    return launch_few<EXPERTS_DOWN>(ctx, p, BI_K_experts_down);
}
