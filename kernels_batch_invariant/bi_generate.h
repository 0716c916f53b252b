/* bi_generate: weights made by recipe (numeric/bi_weightgen.h) in the place where they are used, instead of being read and packed.
 * The bits are those of the source that the recipe stands for, taken through mat_pack_bf16 or mat_pack_fp4, or widened: no clause
 * of its own. Called when a model is opened, by several threads at once; `to.data` and dst are memory of the backend's device.
 * Element e of a recipe is bi_weightgen_value(gen, e), rounded to bf16 where the source holds bf16. */
#ifndef BI_GENERATE_H
#define BI_GENERATE_H

#include "bi_types.h"
#include "bi_weightgen.h"

/* One matrix. BI_FORM_BF16: element (o, i) is element first + o * stride_out + i * stride_in of gen for o < have_out and
 * i < have_in, and zero else. BI_FORM_FP4: its codes are those of elements first + o * n_in + i of gen, its scale bytes those of
 * elements (first + o * n_in + i) / 32 of gen_scale; first is a multiple of n_in, n_in one of 32, and the matrix is filled whole.
 * BR_E_SHAPE: a size below 1, or more elements than the matrix has. */
typedef struct bi_mat_generate_args {
    bi_mat to;
    int32_t have_out, have_in;
    uint64_t first;
    int64_t stride_out, stride_in;
    bi_weightgen gen, gen_scale;
} bi_mat_generate_args;

enum { BI_GENERATE_GROUP = 32 }; /* elements that share a scale byte */

static inline br_status bi_mat_generate_check(const bi_mat_generate_args *a) {
    const bi_mat *to = &a->to;
    const int is_fp4 = to->form == BI_FORM_FP4;
    if (to->n_out < 1 || to->n_in < 1 || (is_fp4 && to->n_in % BI_GENERATE_GROUP))
        return br_fail(BR_E_SHAPE, "mat_generate: a matrix (%d, %d): expected at least 1 output, inputs in multiples of %d", to->n_out,
                       to->n_in, is_fp4 ? BI_GENERATE_GROUP : 1);
    if (a->have_out < 0 || a->have_out > to->n_out || a->have_in < 0 || a->have_in > to->n_in ||
        (is_fp4 && (a->have_out < to->n_out || a->have_in < to->n_in)))
        return br_fail(BR_E_SHAPE, "mat_generate: (%d, %d) elements in a matrix (%d, %d): expected %s", a->have_out, a->have_in, to->n_out,
                       to->n_in, is_fp4 ? "as many" : "at most as many");
    return BR_OK;
}

typedef enum bi_generate_as {
    BI_GENERATE_F32,         /* f32, whose source holds f32 */
    BI_GENERATE_F32_WIDENED, /* f32, widened exactly from the bf16 of the source */
    BI_GENERATE_BF16
} bi_generate_as;

/* dst[i] is element first + i, 0 <= i < n; n 0 is a no-op. */
typedef struct bi_vector_generate_args {
    void *dst;
    int64_t n;
    bi_generate_as as;
    uint64_t first;
    bi_weightgen gen;
} bi_vector_generate_args;

#endif
