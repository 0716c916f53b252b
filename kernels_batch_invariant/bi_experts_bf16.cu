/* The grouped products of bf16 experts, and T of all experts' adapters; see bi_experts_product.cuh.      Contract: N-MOE-1, N-LORA */
#include "bi_experts_product.cuh"

br_status bi_experts_up_bf16(bi_ctx *ctx, const experts_product *p) {
    return launch_product<EXPERTS_UP>(ctx, p, BI_K_experts_up);
}

br_status bi_experts_down_bf16(bi_ctx *ctx, const experts_product *p) {
    return launch_product<EXPERTS_DOWN>(ctx, p, BI_K_experts_down);
}

br_status bi_experts_t(bi_ctx *ctx, const experts_product *p) {
    return launch_product<EXPERTS_T>(ctx, p, BI_K_experts_t);
}
