/* The grouped products of MXFP4 experts; see bi_experts_product.cuh and bi_experts_few.cuh.      Contract: N-MOE-1, N-CHAIN, N-FP4 */
#include "bi_experts_few.cuh"

br_status bi_experts_up_fp4(bi_ctx *ctx, const experts_product *p) {
    return launch_product<EXPERTS_UP, true>(ctx, p, BI_K_experts_up);
}

br_status bi_experts_down_fp4(bi_ctx *ctx, const experts_product *p) {
    return launch_product<EXPERTS_DOWN, true>(ctx, p, BI_K_experts_down);
}

br_status bi_experts_up_few(bi_ctx *ctx, const experts_product *p) {
    return launch_few<EXPERTS_UP>(ctx, p, BI_K_experts_up);
}

br_status bi_experts_down_few(bi_ctx *ctx, const experts_product *p) {
    return launch_few<EXPERTS_DOWN>(ctx, p, BI_K_experts_down);
}
