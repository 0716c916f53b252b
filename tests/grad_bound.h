/* grad_bound: which element of a gradient is farther from its reference than rounding to bf16 explains. A norm over the whole says little
 * of one element: of n equal ones a wrong one is 1 / sqrt(n) of it.
 *
 * A gradient (n_row, width) is a sum of products of which one factor is rounded once or twice, to 2^-8 of itself. Where many terms are
 * added, an element is off by 0.003 of the root mean square of its row at the most likely, and by 0.015 once in a million. Where one
 * product makes the element (few rows of a batch, one position that all weight goes to), it is off by up to 2^-7 of itself, or of what
 * it could have been: a row whose factor is small by chance keeps the error of a common one, which its columns show in other rows. So an
 * element may be off by 0.02 of the larger of its row's root mean square and its column's largest, and by 0.01 of itself. */
#ifndef GRAD_BOUND_H
#define GRAD_BOUND_H

#include <math.h>
#include <stdint.h>

#define GRAD_BOUND_SCALE 2e-2
#define GRAD_BOUND_OWN 1e-2

/* The first element of `found` that is farther off than this; n_row * width when none is. largest (width): to write to. */
static inline int64_t grad_bound_first(const float *reference, const float *found, int64_t n_row, int64_t width, float *largest) {
    for (int64_t c = 0; c < width; c++)
        largest[c] = 0.0f;
    for (int64_t i = 0; i < n_row * width; i++)
        if (fabsf(reference[i]) > largest[i % width])
            largest[i % width] = fabsf(reference[i]);
    for (int64_t r = 0; r < n_row; r++) {
        const float *row = reference + r * width;
        double square = 0;
        for (int64_t c = 0; c < width; c++)
            square += (double)row[c] * row[c];
        const double size = sqrt(square / (double)width);
        for (int64_t c = 0; c < width; c++) {
            const double scale = size > largest[c] ? size : largest[c], off = fabs((double)found[r * width + c] - row[c]);
            if (!(off <= GRAD_BOUND_SCALE * scale + GRAD_BOUND_OWN * fabs((double)row[c])))
                return r * width + c;
        }
    }
    return n_row * width;
}

#endif
