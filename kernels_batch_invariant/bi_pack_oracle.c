/* Packed matrices of the oracle: into the form of bi_gemm.h and back; see bi_pack.h and bi_backend.h. */
#include "bi_gemm.h"
#include "bi_oracle.h"

#include <string.h>

size_t BI_FN(bi_mat_bytes)(bi_form form, int32_t n_out, int32_t n_in) {
    return bi_panel_bytes(form, n_in) * (size_t)bi_panel_count(n_out);
}

static br_status check_pack(const char *op, int32_t n_out, int32_t n_in, int32_t n_in_multiple) {
    if (n_out < 1 || n_in < 1 || n_in % n_in_multiple)
        return br_fail(BR_E_SHAPE, "%s: a matrix (%d, %d): expected at least 1 output, inputs in multiples of %d", op, n_out,
                       n_in, n_in_multiple);
    return BR_OK;
}

/* Matrices of the BF16 form, which alone holds values that a trainer rounds. */
static br_status check_bf16(const char *op, int32_t n, const bi_mat *mat) {
    BR_TRY(check_pack(op, mat->n_out, mat->n_in, 1));
    if (n < 0 || mat->form != BI_FORM_BF16)
        return br_fail(BR_E_ARG, "%s: %d matrices of form %d: expected at least 0 of bf16", op, n, (int)mat->form);
    return BR_OK;
}

/* Products k .. k + 15 of a panel, 32 columns each, as they lie in it. */
static void put_block(void *dst, int32_t n_in, int32_t panel, int32_t k, bi_bf16 block[BI_MMA_K][BI_PANEL]) {
    float *f = (float *)((unsigned char *)dst + bi_panel_bytes(BI_FORM_BF16, n_in) * (size_t)panel);
    int16_t *e = (int16_t *)(f + (size_t)bi_pad_k(n_in) * BI_PANEL);
    size_t at = (size_t)k * BI_PANEL;
    BI_FN(bi_pack_row)(block[0], BI_MMA_K * BI_PANEL, BI_MMA_K * BI_PANEL, f + at, e + at);
}

br_status BI_FN(bi_mat_pack_bf16)(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src,
                                  int64_t stride_out, int64_t stride_in) {
    (void)ctx;
    BR_TRY(check_pack("mat_pack_bf16", n_out, n_in, 1));
    for (int32_t panel = 0; panel < bi_panel_count(n_out); panel++) {
        int32_t first = panel * BI_PANEL, width = n_out - first < BI_PANEL ? n_out - first : BI_PANEL;
        for (int32_t k = 0; k < n_in; k += BI_MMA_K) {
            bi_bf16 block[BI_MMA_K][BI_PANEL] = {{0}};
            int32_t depth = n_in - k < BI_MMA_K ? n_in - k : BI_MMA_K;
            const bi_bf16 *from = src + first * stride_out + k * stride_in;
            for (int32_t l = 0; l < width; l++)
                for (int32_t i = 0; i < depth; i++)
                    block[i][l] = from[l * stride_out + i * stride_in];
            put_block(dst, n_in, panel, k, block);
        }
    }
    return BR_OK;
}

br_status BI_FN(bi_mat_pack_fp4)(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code,
                                 const uint8_t *scale) {
    (void)ctx;
    BR_TRY(check_pack("mat_pack_fp4", n_out, n_in, BI_FP4_GROUP));
    const size_t panel_bytes = bi_panel_bytes(BI_FORM_FP4, n_in), n_group = (size_t)n_in / BI_FP4_GROUP;
    memset(dst, 0, panel_bytes * (size_t)bi_panel_count(n_out)); /* code 0 is zero at any scale */
    for (size_t o = 0; o < (size_t)n_out; o++) {
        const size_t lane = o % BI_PANEL;
        const int shift = lane < BI_FP4_PAIR ? 0 : 4;
        const uint8_t *from = code + o * (size_t)n_in / 2;
        uint8_t *to = (uint8_t *)dst + panel_bytes * (o / BI_PANEL) + lane % BI_FP4_PAIR;
        uint8_t *to_scale = (uint8_t *)dst + panel_bytes * (o / BI_PANEL) + (size_t)n_in * BI_FP4_PAIR + lane;
        for (size_t i = 0; i < (size_t)n_in / 2; i++, to += 2 * BI_FP4_PAIR) {
            to[0] |= (uint8_t)((from[i] & 15) << shift);
            to[BI_FP4_PAIR] |= (uint8_t)((from[i] >> 4) << shift);
        }
        for (size_t g = 0; g < n_group; g++)
            to_scale[g * BI_PANEL] = scale[o * n_group + g];
    }
    return BR_OK;
}

/* ---- from a trainer's masters, and back ------------------------------------------------------------------------------ */

br_status BI_FN(bi_mat_pack_f32)(bi_ctx *ctx, const bi_mat_pack_f32_args *args) {
    (void)ctx;
    const bi_mat *to = &args->to;
    BR_TRY(check_bf16("mat_pack_f32", args->n, to));
    for (int32_t m = 0; m < args->n; m++) {
        const float *src = args->src + m * args->stride;
        const bi_mat one = bi_mat_at(to, m);
        for (int32_t panel = 0; panel < bi_panel_count(to->n_out); panel++)
            for (int32_t k = 0; k < to->n_in; k += BI_MMA_K) {
                bi_bf16 block[BI_MMA_K][BI_PANEL] = {{0}};
                for (int32_t l = 0; l < BI_PANEL && panel * BI_PANEL + l < to->n_out; l++)
                    for (int32_t i = 0; i < BI_MMA_K && k + i < to->n_in; i++)
                        block[i][l] = bi_round(src[(panel * BI_PANEL + l) * args->stride_out + (k + i) * args->stride_in]);
                put_block((void *)one.data, to->n_in, panel, k, block);
            }
    }
    return BR_OK;
}

br_status BI_FN(bi_mat_unpack)(bi_ctx *ctx, const bi_mat_unpack_args *args) {
    (void)ctx;
    const bi_mat *from = &args->from;
    BR_TRY(check_bf16("mat_unpack", args->n, from));
    bi_bf16 *dst = args->dst;
    for (int32_t m = 0; m < args->n; m++) {
        const bi_mat one = bi_mat_at(from, m);
        for (int32_t o = 0; o < from->n_out; o++) {
            const float *f = bi_panel_f(&one, o / BI_PANEL) + o % BI_PANEL;
            for (int32_t k = 0; k < from->n_in; k++)
                *dst++ = (bi_bf16)(bi_u32_of(f[(size_t)k * BI_PANEL]) >> 16);
        }
    }
    return BR_OK;
}
