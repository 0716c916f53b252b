/* parity_join: which sequence of one rollout file is which of another, by (uid, sample). Layer: stats; includes base
 * and io. */
#ifndef PARITY_JOIN_H
#define PARITY_JOIN_H

#include "rollout_file.h"

typedef struct parity_join {
    int64_t n_a;
    int64_t *in_b;                /* (n_a) index in b; -1: b lacks it */
    int64_t n_joined, n_only_a, n_only_b;
    int64_t n_doubled;            /* sequences that come again in their own file; not joined */
    int64_t only_b;               /* the first that a lacks; -1: none */
} parity_join;

br_status parity_join_open(const rollout_reader *a, const rollout_reader *b, parity_join *out); /* BR_E_NOMEM */
void parity_join_close(parity_join *join);

#endif
