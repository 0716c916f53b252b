/* foreign_parity: how far two files of any stacks are apart, slot by slot. Layer: stats; includes base and io. Reads records only.
 *
 * Sequences join by (uid, sample); token ids must be equal. Compared are the slots of either mask. d is as in parity.h: log-prob of
 * the trainer - log-prob of the rollout, b standing for the trainer when both files have one producer. Passed means: every sequence in
 * both, equal token ids, every slot scored in both, no NaN, and equal 32-bit words; at least one was compared. */
#ifndef FOREIGN_PARITY_H
#define FOREIGN_PARITY_H

#include "foreign_pair.h"
#include "parity.h"

enum { FOREIGN_LISTED_MAX = 20 };

typedef struct foreign_mean {
    int64_t n;
    double mean, square; /* sum of squared distances from the mean */
} foreign_mean;

/* A sequence with a difference: its first, and how many. */
typedef struct foreign_listed {
    parity_place place;
    int64_t n_compared, n_differ;
} foreign_listed;

typedef struct foreign_result {
    int64_t n_joined, n_only_a, n_only_b, n_doubled, n_error; /* n_error: ended in error in a file of ours; not compared */
    int64_t n_tokens_differ, n_mask_differ;                   /* sequences; slots that one mask has */
    int64_t n_compared, n_differ, n_nan, n_missing;           /* slots; missing: one file has no log-prob there */
    int64_t n_above_0[2], n_zero[2], n_short[2];              /* a, b: above 0; +-0; their 16 low bits 0 and not zero */
    int64_t n_b_above, n_b_below;                             /* slots where b is the greater, the smaller */
    int64_t max_ulp;
    double k1, k3, max_abs, max_prob;                         /* max_prob: of |exp(a) - exp(b)| */
    int has_pearson;                                          /* 0: a side is constant */
    double pearson;                                           /* over finite slots */
    foreign_mean prob;                                        /* |exp(a) - exp(b)| */
    int64_t bucket[PARITY_BUCKET_COUNT];
    parity_place first_token;                                 /* the first other token id, ids in the place of bits; pos -1: none */
    int64_t n_seq_differ;
    foreign_listed listed[FOREIGN_LISTED_MAX];                /* the first of these, in the order of a */
    int passed;
    char reason[512];
} foreign_result;

void foreign_compare(const foreign_files *files, foreign_result *out);
void foreign_mean_add(foreign_mean *mean, double x);
double foreign_mean_deviation(const foreign_mean *mean);

#endif
