/* bi_glu: the gated activation on f32 accumulators.      Contract: N-ACT, N-FN
 * g, u (n_row, d) f32, row stride ld; y (n_row, d) bf16, dense. SiTU with the config's beta and linear_beta, or SiLU. */
#ifndef BI_GLU_H
#define BI_GLU_H
#include "bi_types.h"
typedef struct bi_act {
    int32_t situ;            /* 1: SiTU, 0: SiLU-GLU */
    float beta, linear_beta; /* SiTU only */
} bi_act;
typedef struct bi_glu_args {
    int32_t n_row, d;
    const float *g, *u;
    int64_t ld;
    bi_act act;
    bi_bf16 *y;
} bi_glu_args;
#endif
