/* receipt: what a sequence is, as digests. Layer: proof; includes base and io's records. Works on bytes only.
 *
 * Each group of fields (rollout_part) has a 64-bit digest, so that a difference can be named; the receipt is the 128-bit
 * digest over contract, weights and all of them. Log-prob bits enter as they are; the only NaN among them is BR_UNSCORED,
 * any other is an error, because NaN bits differ between machines that agree on every number. */
#ifndef RECEIPT_H
#define RECEIPT_H

#include "rollout_file.h"

/* Fills seq->part and seq->receipt from all other fields. Errors: BR_E_NAN naming the position, when a scored slot holds a
 * NaN or a sampled token of a finished sequence has no log-prob. */
br_status receipt_make(const rollout_meta *meta, rollout_seq *seq);
/* The digests alone, whatever the slots hold. */
void receipt_parts(const rollout_meta *meta, const rollout_seq *seq, uint64_t part[ROLLOUT_PART_COUNT]);
br_digest receipt_of_parts(const rollout_meta *meta, const uint64_t part[ROLLOUT_PART_COUNT]);
const char *receipt_part_name(rollout_part part);

/* 1 when the bits are a NaN that is not the mark of an unscored slot. */
static inline int receipt_is_stray_nan(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u && bits != BR_UNSCORED;
}

/* Finds the first slot of the sequence with a NaN where there must be none; -1: there is none. */
int32_t receipt_find_nan(const rollout_seq *seq);

#endif
