/* bi_grad_dense: what the CUDA forms of the dense and the experts' gradients share. Internal to bi_grad_dense.cu and
 * bi_grad_experts.cu. */
#ifndef BI_GRAD_DENSE_CUH
#define BI_GRAD_DENSE_CUH

#include "bi_grad_cuda.cuh"
extern "C" {
#include "bi_grad_dense_check.h"
}

/* Row stride of scratch in bf16: whole 16s, zeros behind the row. */
static inline int32_t grad_ld(int32_t n) {
    return (n + 15) / 16 * 16;
}

/* Blocks that walk over n rows in the y direction. */
static inline unsigned grad_rows_y(int64_t n) {
    return (unsigned)(n < 32768 ? n : 32768);
}

/* h = act(g, u), and from its gradient those of g and u. */
typedef struct grad_act {
    float h, dg, du;
} grad_act;

static __device__ __forceinline__ grad_act grad_act_of(const bi_act &act, float g, float u, float dh) {
    const float sigmoid = bi_sigmoid(g);
    float gate = g * sigmoid, gate_slope = sigmoid * (1.0f + g * (1.0f - sigmoid)), up = u, up_slope = 1.0f;
    if (act.situ) {
        const float th = bi_tanh(g / act.beta), tu = bi_tanh(u / act.linear_beta);
        gate = act.beta * th * sigmoid;
        gate_slope = sigmoid * ((1.0f - th * th) + act.beta * th * (1.0f - sigmoid));
        up = act.linear_beta * tu;
        up_slope = 1.0f - tu * tu;
    }
    const grad_act out = {gate * up, dh * gate_slope * up, dh * gate * up_slope};
    return out;
}

#endif
