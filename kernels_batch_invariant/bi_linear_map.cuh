/* bi_linear_map: tensor maps of operands, for copies of boxes of 64 columns. Internal to bi_linear_*.cu and bi_head.cu.
 *
 * The box is swizzled by 128 bytes; what lies outside the matrix becomes zeros. */
#ifndef BI_LINEAR_MAP_CUH
#define BI_LINEAR_MAP_CUH

#include "bi_linear_parts.cuh"

#include <cuda.h>

typedef CUresult (*dense_encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                 const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

/* n_head matrices of n_row rows, n_k elements each, ld and head_ld elements apart. */
typedef struct dense_operand {
    const bi_bf16 *base;
    int32_t n_k, n_row, n_head;
    int64_t ld, head_ld;
} dense_operand;

/* Boxes of box_rows rows. 0: the driver makes no such map. */
static inline int dense_map(const dense_state *state, CUtensorMap *map, dense_operand m, int32_t box_rows) {
    const cuuint64_t bytes = sizeof *m.base, row = (cuuint64_t)m.ld * bytes, head = (cuuint64_t)m.head_ld * bytes;
    const cuuint64_t size[3] = {(cuuint64_t)m.n_k, (cuuint64_t)m.n_row, (cuuint64_t)m.n_head}, stride[2] = {row, m.n_head > 1 ? head : row};
    const cuuint32_t box[3] = {64, (cuuint32_t)box_rows, 1}, step[3] = {1, 1, 1};
    return ((dense_encode)state->encode)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)(uintptr_t)m.base, size, stride, box, step,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static inline dense_operand dense_x_of(const dense_job *job) {
    const dense_operand x = {job->x, job->n_in, job->n_row, job->n_head, job->x_ld, job->x_head_ld};
    return x;
}

static inline dense_operand dense_w_of(const dense_job *job) {
    const dense_operand w = {job->w, job->w_ld, job->n_out, job->n_head, job->w_ld, job->w_stride};
    return w;
}

#endif
