/* dense_forms: the dense product by one form of the CUDA backend, past the choice that the op makes; arrays are the device's. */
#ifndef DENSE_FORMS_H
#define DENSE_FORMS_H

#include "bi_backend.h"

/* A row of the table of cuBLASLt's configurations. */
typedef struct dense_forms_row {
    int32_t n_in, n_out, f32, rows_from, rows_to;
} dense_forms_row;

int32_t dense_forms_sm_count(const bi_backend *cuda);
int32_t dense_forms_table(int32_t i, dense_forms_row *row); /* 0: no row i */

/* Maps without adapters. library: *done = 0 when cuBLASLt may not, or has no algorithm inside the contract. */
br_status dense_forms_tiles(const bi_backend *cuda, const bi_linear_args *args);
br_status dense_forms_library(const bi_backend *cuda, const bi_linear_args *args, int *done);

br_status dense_forms_poison(const bi_backend *cuda, void *array, size_t bytes);
/* How many words of 4 bytes differ; waits. bytes: a multiple of 4. */
br_status dense_forms_differ(const bi_backend *cuda, const void *a, const void *b, size_t bytes, uint64_t *n);

#endif
