/* foreign_pair: two files of any stacks as pairs of sequences that hold one quantity. Layer: stats, private to foreign_*.c; includes
 * base and io. */
#ifndef FOREIGN_PAIR_H
#define FOREIGN_PAIR_H

#include "parity_join.h"

/* What a log-prob is of. A file of ours holds all three; a dump holds the one that its importer was told, and at temperature 1 the
 * first two are one. */
typedef enum foreign_quantity {
    FOREIGN_OVER_T,    /* "full_softmax_over_T": softmax of x / T over the whole vocabulary */
    FOREIGN_RAW,       /* "raw": softmax of x */
    FOREIGN_PROCESSED, /* "processed": over what top-k, top-p, min-p and the like left */
    FOREIGN_QUANTITY_COUNT
} foreign_quantity;

typedef struct foreign_files {
    const rollout_reader *a, *b;
    const rollout_meta *meta_a, *meta_b;
    parity_join join;
    foreign_quantity quantity;
} foreign_files;

/* One joined pair. */
typedef struct foreign_pair {
    rollout_seq a, b;
    const uint32_t *bits_a, *bits_b; /* of the quantity */
    int32_t n;                       /* tokens that both share from the start */
    int32_t begin_a, begin_b;        /* the first of them in each mask; n: none */
} foreign_pair;

const char *foreign_quantity_name(foreign_quantity quantity);
/* Joins, and picks the quantity. BR_E_ARG: the files have none in common; BR_E_NOMEM. */
br_status foreign_files_open(const rollout_reader *a, const rollout_reader *b, foreign_files *out);
void foreign_files_close(foreign_files *files);
/* Pair number i of the sequences of a; 0 when b lacks it. */
int foreign_pair_at(const foreign_files *files, int64_t i, foreign_pair *out);
/* Slots of either mask are compared: a scorer of plain token ids has an empty one. */
int foreign_slot(const foreign_pair *pair, int32_t t);
/* The bits of a quantity in a sequence, NULL where its file does not hold it. */
const uint32_t *foreign_bits(const rollout_meta *meta, const rollout_seq *seq, foreign_quantity quantity);
double foreign_temperature(const rollout_seq *seq); /* 1 where sampling was greedy, whose distribution that is */

#endif
