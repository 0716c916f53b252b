/* bi_mat_pack_f32, bi_mat_unpack: matrices into and out of the backend's packed form, from and to the backend's device.
 *
 * bi_mat_pack_f32: n matrices, the first n of the stack `to` (BF16 form); element (o, i) of matrix m is R(src[m * stride + o * stride_out
 *   + i * stride_in]). This is the one rounding of a trainer's f32 masters.                          Contract: section 2 (R)
 * bi_mat_unpack: the way back, dst (n, n_out, n_in) bf16, dense: exactly the values that a forward on `from` reads, where `from` is as
 *   packing leaves it. What a backend keeps of an element besides (the oracle: 16 low bits, all zero, and the exponent) is not looked at: who
 *   must know that it is whole packs dst again and compares the bytes, as br_model_adapter_read does. */
#ifndef BI_PACK_H
#define BI_PACK_H
#include "bi_types.h"
typedef struct bi_mat_pack_f32_args {
    int32_t n;
    bi_mat to;
    const float *src;
    int64_t stride, stride_out, stride_in;
} bi_mat_pack_f32_args;
typedef struct bi_mat_unpack_args {
    int32_t n;
    bi_mat from;
    bi_bf16 *dst;
} bi_mat_unpack_args;
#endif
