/* Weights made by recipe, packed for the oracle; see bi_generate.h.
 *
 * A panel of the packed form depends on its own 32 outputs only, so the source is made 32 rows at a time and packed by the op that
 * packs what is read: a matrix of any size needs a few hundred kilobytes on the way. */
#include "bi_oracle.h"

#include "bi_gemm.h"

/* Rows row .. row + n - 1 of the source, zeros where it has none. */
static void make_rows(const bi_mat_generate_args *a, int32_t row, int32_t n, bi_bf16 *out) {
    for (int32_t o = row; o < row + n; o++, out += a->to.n_in) {
        const uint64_t first = a->first + (uint64_t)(o * a->stride_out);
        memset(out, 0, sizeof *out * (size_t)a->to.n_in);
        for (int32_t i = 0; i < a->have_in && o < a->have_out; i++)
            out[i] = bi_round(bi_weightgen_value(&a->gen, first + (uint64_t)(i * a->stride_in)));
    }
}

static br_status generate_bf16(bi_ctx *ctx, const bi_mat_generate_args *a, unsigned char *at, int32_t row, int32_t n, void *rows) {
    make_rows(a, row, n, rows);
    return BI_FN(bi_mat_pack_bf16)(ctx, at, n, a->to.n_in, rows, a->to.n_in, 1);
}

static br_status generate_fp4(bi_ctx *ctx, const bi_mat_generate_args *a, unsigned char *at, int32_t row, int32_t n, void *rows) {
    const size_t n_element = (size_t)n * (size_t)a->to.n_in;
    const uint64_t first = a->first + (uint64_t)row * (uint64_t)a->to.n_in;
    uint8_t *code = rows, *scale = code + n_element / 2;
    bi_weightgen_fill_fp4(&a->gen, first / 2, code, n_element / 2);
    bi_weightgen_fill_scale(&a->gen_scale, first / BI_GENERATE_GROUP, scale, n_element / BI_GENERATE_GROUP);
    return BI_FN(bi_mat_pack_fp4)(ctx, at, n, a->to.n_in, code, scale);
}

br_status BI_FN(bi_mat_generate)(bi_ctx *ctx, const bi_mat_generate_args *a) {
    BR_TRY(bi_mat_generate_check(a));
    br_status status = BR_OK;
    void *rows;
    BR_TRY(br_mem_alloc(&rows, sizeof(bi_bf16) * BI_PANEL * (size_t)a->to.n_in, "rows of a matrix to make"));
    for (int32_t panel = 0; status == BR_OK && panel < bi_panel_count(a->to.n_out); panel++) {
        const int32_t row = panel * BI_PANEL, n = a->to.n_out - row < BI_PANEL ? a->to.n_out - row : BI_PANEL;
        unsigned char *at = (unsigned char *)(uintptr_t)a->to.data + bi_panel_bytes(a->to.form, a->to.n_in) * (size_t)panel;
        status = a->to.form == BI_FORM_FP4 ? generate_fp4(ctx, a, at, row, n, rows) : generate_bf16(ctx, a, at, row, n, rows);
    }
    br_mem_free(rows);
    return status;
}

br_status BI_FN(bi_vector_generate)(bi_ctx *ctx, const bi_vector_generate_args *a) {
    (void)ctx;
    if (a->n < 0)
        return br_fail(BR_E_SHAPE, "vector_generate: %lld elements: expected at least 0", (long long)a->n);
    for (int64_t i = 0; i < a->n; i++) {
        const float value = bi_weightgen_value(&a->gen, a->first + (uint64_t)i);
        if (a->as == BI_GENERATE_BF16)
            ((bi_bf16 *)a->dst)[i] = bi_round(value);
        else
            ((float *)a->dst)[i] = a->as == BI_GENERATE_F32 ? value : bi_widen(bi_round(value));
    }
    return BR_OK;
}
