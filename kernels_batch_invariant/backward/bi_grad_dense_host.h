/* bi_grad_dense_host: products in binary64 with packed matrices, and the derivative of the gated activation. Internal to
 * bi_grad_dense_host.c and bi_grad_experts_host.c.
 *
 * Every element of a product is one sum over rising k, whatever block it is computed in. */
#ifndef BI_GRAD_DENSE_HOST_H
#define BI_GRAD_DENSE_HOST_H

#include "bi_grad_dense_check.h"
#include "bi_grad_host.h"

#include <math.h>

enum {
    GRAD_COLS = 64 /* columns of a matrix that are expanded at once: whole groups of MXFP4 */
};
static_assert(GRAD_COLS % BI_FP4_GROUP == 0, "a piece of a panel is whole groups");

/* c (n) += sum over l of a[l * a_k] * b[l] (n), for two rows of a and c. */
static inline void grad_two_rows(int32_t n, int32_t k, const double *a0, const double *a1, size_t a_k, const double *restrict b, size_t b_ld,
                                 double *restrict c0, double *restrict c1) {
    int32_t l = 0;
    for (; l + 4 <= k; l += 4, a0 += 4 * a_k, a1 += 4 * a_k, b += 4 * b_ld) {
        const double x0 = a0[0], x1 = a0[a_k], x2 = a0[2 * a_k], x3 = a0[3 * a_k];
        const double y0 = a1[0], y1 = a1[a_k], y2 = a1[2 * a_k], y3 = a1[3 * a_k];
        const double *b1 = b + b_ld, *b2 = b1 + b_ld, *b3 = b2 + b_ld;
        for (int32_t j = 0; j < n; j++) {
            c0[j] = c0[j] + x0 * b[j] + x1 * b1[j] + x2 * b2[j] + x3 * b3[j];
            c1[j] = c1[j] + y0 * b[j] + y1 * b1[j] + y2 * b2[j] + y3 * b3[j];
        }
    }
    for (; l < k; l++, a0 += a_k, a1 += a_k, b += b_ld)
        for (int32_t j = 0; j < n; j++) {
            c0[j] += *a0 * b[j];
            c1[j] += *a1 * b[j];
        }
}

static inline void grad_one_row(int32_t n, int32_t k, const double *a, size_t a_k, const double *restrict b, size_t b_ld, double *restrict c) {
    for (int32_t l = 0; l < k; l++, a += a_k, b += b_ld)
        for (int32_t j = 0; j < n; j++)
            c[j] += *a * b[j];
}

/* c (m, n) += a (m, k) b (k, n); element (i, l) of a at i * a_row + l * a_k. */
static inline void grad_product(int32_t m, int32_t n, int32_t k, const double *a, size_t a_row, size_t a_k, const double *b, size_t b_ld, double *c,
                                size_t c_ld) {
    int32_t i = 0;
    for (; i + 2 <= m; i += 2, a += 2 * a_row, c += 2 * c_ld)
        grad_two_rows(n, k, a, a + a_row, a_k, b, b_ld, c, c + c_ld);
    if (i < m)
        grad_one_row(n, k, a, a_k, b, b_ld, c);
}

/* A piece of a panel: `cols` (GRAD_COLS, BI_PANEL) as it lies packed, a column of W a row; `rows` (BI_PANEL, GRAD_COLS) the other way. */
typedef struct grad_piece {
    double value[GRAD_COLS * BI_PANEL];
    float f[GRAD_COLS * BI_PANEL];
    int16_t e[GRAD_COLS * BI_PANEL];
} grad_piece;

static inline const float *grad_panel(grad_piece *piece, const bi_mat *w, int32_t panel, int32_t k, int32_t n_k) {
    if (w->form == BI_FORM_BF16)
        return bi_panel_f(w, panel) + (size_t)k * BI_PANEL;
    bi_panel_expand(w, panel, k, n_k, piece->f, piece->e);
    return piece->f;
}

static inline void grad_cols(grad_piece *piece, const bi_mat *w, int32_t panel, int32_t k, int32_t n_k) {
    const float *f = grad_panel(piece, w, panel, k, n_k);
    for (int32_t i = 0; i < n_k * BI_PANEL; i++)
        piece->value[i] = (double)f[i];
}

static inline void grad_rows(grad_piece *piece, const bi_mat *w, int32_t panel, int32_t k, int32_t n_k) {
    const float *f = grad_panel(piece, w, panel, k, n_k);
    for (int32_t lane = 0; lane < BI_PANEL; lane++)
        for (int32_t i = 0; i < n_k; i++)
            piece->value[lane * GRAD_COLS + i] = (double)f[i * BI_PANEL + lane];
}

static inline int32_t grad_least(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* y (n_row, n_out) += x (n_row, n_in) W^T. */
static inline void grad_times_wt(grad_piece *piece, int32_t n_row, const double *x, size_t x_ld, const bi_mat *w, double *y, size_t y_ld) {
    for (int32_t panel = 0; panel < bi_panel_count(w->n_out); panel++)
        for (int32_t k = 0; k < w->n_in; k += GRAD_COLS) {
            const int32_t n_k = grad_least(GRAD_COLS, w->n_in - k), first = panel * BI_PANEL;
            grad_cols(piece, w, panel, k, n_k);
            grad_product(n_row, grad_least(BI_PANEL, w->n_out - first), n_k, x + k, x_ld, 1, piece->value, BI_PANEL, y + first, y_ld);
        }
}

/* x (n_row, n_in) += y (n_row, n_out) W. */
static inline void grad_times_w(grad_piece *piece, int32_t n_row, const double *y, size_t y_ld, const bi_mat *w, double *x, size_t x_ld) {
    for (int32_t k = 0; k < w->n_in; k += GRAD_COLS)
        for (int32_t panel = 0; panel < bi_panel_count(w->n_out); panel++) {
            const int32_t n_k = grad_least(GRAD_COLS, w->n_in - k), first = panel * BI_PANEL;
            grad_rows(piece, w, panel, k, n_k);
            grad_product(n_row, n_k, grad_least(BI_PANEL, w->n_out - first), y + first, y_ld, 1, piece->value, GRAD_COLS, x + k, x_ld);
        }
}

/* The adapter of a slot, NULL when it leaves the map alone. */
static inline const bi_adapter *grad_adapter(const bi_adapter *lora, int32_t slot) {
    return lora && slot >= 0 && lora[slot].a.data ? &lora[slot] : NULL;
}

/* h = act(g, u), and from its gradient those of g and u. */
typedef struct grad_act {
    double h, dg, du;
} grad_act;

static inline grad_act grad_act_of(const bi_act *act, double g, double u, double dh) {
    const double sigmoid = 1 / (1 + exp(-g));
    double gate = g * sigmoid, gate_slope = sigmoid * (1 + g * (1 - sigmoid)), up = u, up_slope = 1;
    if (act->situ) {
        const double beta = (double)act->beta, linear = (double)act->linear_beta, th = tanh(g / beta), tu = tanh(u / linear);
        gate = beta * th * sigmoid;
        gate_slope = sigmoid * ((1 - th * th) + beta * th * (1 - sigmoid));
        up = linear * tu;
        up_slope = 1 - tu * tu;
    }
    return (grad_act){gate * up, dh * gate_slope * up, dh * gate * up_slope};
}

#endif
