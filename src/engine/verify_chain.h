/* verify_chain: the part of `verify` that needs no model: a rollout file's hash chain replayed. Layer: engine. */
#ifndef VERIFY_CHAIN_H
#define VERIFY_CHAIN_H

#include "rollout_file.h"

/* Draws `need` of `left` things without repetition, asked for one after the other: 1 when number i is drawn. */
static inline int verify_draw(uint64_t seed, int64_t i, int64_t *left, int64_t *need) {
    const uint64_t counter[2] = {seed, (uint64_t)i};
    const int drawn = br_hash_u64(counter, sizeof counter) % (uint64_t)(*left)-- < (uint64_t)*need;
    *need -= drawn;
    return drawn;
}

/* Fills counts, digests, first_seq and lines of the report. BR_E_MISMATCH naming the sequence and the group of fields. A
 * file whose writer was killed passes with its committed prefix; a line says so. */
br_status verify_chain(const rollout_reader *reader, br_report *report);

#endif
