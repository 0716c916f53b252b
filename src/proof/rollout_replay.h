/* rollout_replay: a rollout file's digests replayed: attributes, groups of fields, receipts, chain. Layer: proof; includes base and io.
 *
 * Finds and names any changed bit of a committed sequence or attribute, and sequences dropped, inserted or reordered. It
 * cannot tell whether the numbers were right when they were written; that takes a recomputation. */
#ifndef ROLLOUT_REPLAY_H
#define ROLLOUT_REPLAY_H

#include "rollout_file.h"

enum { REPLAY_LINES_MAX = 16, REPLAY_LINE_BYTES = 512 };

typedef struct rollout_replay {
    int64_t n_seq;
    int64_t n_fault;            /* attribute faults and sequences with a fault */
    int64_t first_seq;          /* -1: none; an attribute fault is of no sequence */
    br_digest link;             /* the last of the chain as stored; the first link when the file is empty */
    int32_t n_line;
    char line[REPLAY_LINES_MAX][REPLAY_LINE_BYTES]; /* the first faults, one each */
} rollout_replay;

/* BR_E_MISMATCH with the first fault as the sentence; BR_OK when everything agrees. */
br_status rollout_replay_check(const rollout_reader *reader, rollout_replay *out);

#endif
