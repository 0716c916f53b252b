/* bi_glu on the GPU.      Contract: N-ACT, N-FN
 *
 * Grid: (pieces of a row, rows); block 256 threads, four elements a thread where all is sixteen-byte aligned, else one. Elements
 * do not meet, so there is no order. beta = 2^n is divided by as a product with 2^-n: both are the same number rounded once. */
#include "bi_row.cuh"

enum { GLU_VEC = 4 };

typedef struct glu_scale {
    float beta, linear_beta;
    float beta_inverse; /* exact, or 0 */
} glu_scale;

/* bi_act_situ, with the division by beta exchanged where that changes no bit. */
static __device__ __forceinline__ bi_bf16 situ(float g, float u, glu_scale s) {
    const float scaled = s.beta_inverse != 0.0f ? BI_MUL(g, s.beta_inverse) : BI_DIV(g, s.beta);
    const float gate = BI_MUL(s.beta, BI_MUL(bi_tanh(scaled), bi_sigmoid(g)));
    const float up = BI_MUL(s.linear_beta, bi_tanh(BI_DIV(u, s.linear_beta)));
    return bi_round(BI_MUL(gate, up));
}

template <int SITU, int WIDE> BI_ROW_KERNEL glu_kernel(const __grid_constant__ bi_glu_args a, const glu_scale s) {
    bi_cuda_begin();
    constexpr int VEC = WIDE ? GLU_VEC : 1;
    const int j = ((int)blockIdx.y * BI_ROW_BLOCK + (int)threadIdx.x) * VEC;
    if (j >= a.d)
        return;
    const int64_t at = (int64_t)blockIdx.x * a.ld + j;
    float g[VEC], u[VEC];
    bi_bf16 y[VEC];
    if (WIDE) {
        *(float4 *)g = __ldcs((const float4 *)(a.g + at));
        *(float4 *)u = __ldcs((const float4 *)(a.u + at));
    } else {
        g[0] = a.g[at];
        u[0] = a.u[at];
    }
#pragma unroll
    for (int k = 0; k < VEC; k++)
        y[k] = SITU ? situ(g[k], u[k], s) : bi_act_silu(g[k], u[k]);
    bi_bf16 *to = a.y + (int64_t)blockIdx.x * a.d + j;
    if (WIDE)
        *(uint2 *)to = make_uint2(y[0] | (uint32_t)y[VEC > 1 ? 1 : 0] << 16, y[VEC > 2 ? 2 : 0] | (uint32_t)y[VEC > 3 ? 3 : 0] << 16);
    else
        to[0] = y[0];
}

/* 1 / x when x is a power of two whose inverse is a normal number, else 0. */
static float exact_inverse(float x) {
    const uint32_t u = bi_u32_of(x), exponent = u >> 23;
    return (u & 0x7fffffu) == 0 && exponent >= 1 && exponent <= 253 ? bi_f32_of((254u - exponent) << 23) : 0.0f;
}

br_status bi_cuda_glu(bi_ctx *ctx, const bi_glu_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->ld < a->d)
        return br_fail(BR_E_SHAPE, "glu: %d rows of %d at stride %lld: expected n_row >= 0, d >= 1, stride >= d", a->n_row, a->d, (long long)a->ld);
    if (a->n_row == 0)
        return BR_OK;
    static void (*const kernel[2][2])(const bi_glu_args, const glu_scale) = {{glu_kernel<0, 0>, glu_kernel<0, 1>},
                                                                             {glu_kernel<1, 0>, glu_kernel<1, 1>}};
    const int wide = bi_row_wide(a->g) && bi_row_wide(a->u) && (uintptr_t)a->y % 8 == 0 && a->ld % GLU_VEC == 0 && a->d % GLU_VEC == 0;
    const glu_scale scale = {a->act.beta, a->act.linear_beta, exact_inverse(a->act.beta)};
    const dim3 grid((unsigned)a->n_row, (unsigned)bi_ceil_div(a->d, BI_ROW_BLOCK * (wide ? GLU_VEC : 1)));
    bi_cuda_launch(ctx, kernel[a->act.situ != 0][wide], grid, BI_ROW_BLOCK, 0, *a, scale);
    return bi_cuda_launched(ctx, BI_K_glu, "glu");
}
