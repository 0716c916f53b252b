/* op_rig: backends opened for op tests, on each instruction set this processor has, and random numbers for their inputs. */
#ifndef OP_RIG_H
#define OP_RIG_H

#include "bi_backend.h"

enum { OP_RIG_ISA_MAX = 3, OP_RIG_MAT_MAX = 4096 };

typedef struct op_rig {
    br_pool *pool;
    bi_backend backend;
    void *mat[OP_RIG_MAT_MAX];
    int n_mat;
} op_rig;

/* Fills names with what the processor can run; returns how many, at least 1: "portable". */
int op_rig_isas(const char *names[OP_RIG_ISA_MAX]);
void op_rig_open(op_rig *rig, const bi_limits *limits, const char *isa, int n_thread);
void op_rig_close(op_rig *rig);
/* The backend's packed form of w (n_out, n_in); the rig owns it. */
bi_mat op_rig_mat(op_rig *rig, const bi_bf16 *w, int n_out, int n_in);
bi_mat op_rig_mat_fp4(op_rig *rig, const uint8_t *code, const uint8_t *scale, int n_out, int n_in);
/* Stacks of n. w (n, n_out, n_in); codes and scales likewise. */
bi_mat op_rig_stack(op_rig *rig, const bi_bf16 *w, int n, int n_out, int n_in);
bi_mat op_rig_stack_fp4(op_rig *rig, const uint8_t *code, const uint8_t *scale, int n, int n_out, int n_in);
/* What an adapter adds to one map: a (rank, n_in), b (n_out, rank); rank 0: nothing. */
typedef struct op_low_rank {
    const bi_bf16 *a, *b;
    int rank;
    float s;
} op_low_rank;
/* One adapter on n maps, of the largest rank; maps that it leaves alone and lower ranks are filled up with zeros. */
bi_adapter op_rig_adapter(op_rig *rig, const op_low_rank *map, int n, int n_out, int n_in);
void op_rig_poison(op_rig *rig); /* all scratch becomes NaN and negative integers */

typedef struct op_random {
    uint64_t seed, at;
} op_random;

uint64_t op_random_u64(op_random *random);
int op_random_below(op_random *random, int n);
float op_random_normal(op_random *random);            /* about N(0, 1) */
void op_random_normals(op_random *random, float scale, float *x, int n);
void op_random_bf16s(op_random *random, float scale, bi_bf16 *x, int n);
void op_random_order(op_random *random, int *order, int n); /* a permutation */

#endif
