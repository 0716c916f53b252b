/* linear_rig: cases of bi_linear for twin tests: inputs of several families, adapters mixed over rows, gaps and misalignment. */
#ifndef LINEAR_RIG_H
#define LINEAR_RIG_H

#include "twin.h"

enum { LINEAR_SLOT_MAX = 16 };

/* How inputs are drawn. */
typedef enum linear_family { LINEAR_NORMAL, LINEAR_WIDE, LINEAR_TINY, LINEAR_FAMILIES } linear_family;

typedef struct linear_case {
    int n_row, n_head, n_in, n_out;
    int y_f32, check;
    int x_shift, x_gap, y_gap; /* elements before x, between rows of x and of y */
    int n_slot;                /* 0: no adapters */
    int slots_used;            /* rows draw slots below this one, and -1 */
    int run;                   /* rows of one slot that follow each other; 0: one */
    int heads_apart;           /* heads lie behind each other instead of side by side in a row */
    linear_family family;
    int bad_row, bad_b;        /* a row of x with a NaN (-1: none); slot 0's B has an Inf */
} linear_case;

/* Everything a case needs on both sides. */
typedef struct linear_setup {
    bi_linear_args args[2];
    bi_adapter slot[2][LINEAR_SLOT_MAX];
} linear_setup;

void linear_fill(op_random *random, linear_family family, bi_bf16 *x, size_t n);
void linear_set_up(twin *t, op_random *random, const linear_case *c, linear_setup *s); /* takes arrays and stacks of the twin */
br_status linear_run(twin *t, const linear_setup *s, twin_side side);
void linear_run_case(twin *t, op_random *random, const linear_case *c);

#endif
