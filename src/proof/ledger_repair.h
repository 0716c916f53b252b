/* ledger_repair: which single bit was flipped, found by trying all of them against the stored digest. Layer: proof. */
#ifndef LEDGER_REPAIR_H
#define LEDGER_REPAIR_H

#include "ledger_chain.h"

typedef struct ledger_flip {
    const char *dataset;
    int64_t position; /* of a token in its sequence; -1: the value is the sequence's, step's or run's */
    int32_t bit;      /* of the value, from its lowest byte on */
} ledger_flip;

/* The bit of the sequence's bytes that gives the leaf its stored digest. 0: no single bit does, or there are too many to try. */
int ledger_flip_in_leaf(const ledger_seq *seq, int leaf, ledger_flip *out);
/* The bit of n bytes, or of the stored link itself, with which SHA-256(before || bytes) is the stored link; names by `field`. The bytes
 * are repaired; *in_link 1: they were right. */
int ledger_flip_in_record(const uint8_t before[BR_LEDGER_LINK_BYTES], void *bytes, size_t n, const uint8_t link[BR_LEDGER_LINK_BYTES],
                          const char *(*field)(size_t at, size_t *in_row), ledger_flip *out, int *in_link);
/* The bit of n bytes that gives them this digest, as a number of the whole; -1: none. */
int64_t ledger_flip_in_bytes(const void *bytes, size_t n, br_digest want);
/* The one bit in which two values of n bytes differ; -1 when it is not one. */
int32_t ledger_one_bit(const void *a, const void *b, size_t n);

#endif
