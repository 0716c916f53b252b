/* ledger_replay: a training run's ledger recomputed from its dumps: leaves, digests, counts, links. Layer: proof; includes base and io.
 *
 * Names any flipped bit by step, sequence, position and dataset, and steps that were changed, dropped, inserted or reordered. It cannot tell
 * whether the numbers were right when they were written; that takes a recomputation. */
#ifndef LEDGER_REPLAY_H
#define LEDGER_REPLAY_H

#include "ledger_file.h"

enum { LEDGER_REPLAY_LINES_MAX = 16, LEDGER_REPLAY_LINE_BYTES = 512 };

typedef struct ledger_replay {
    int64_t n_fault;
    int64_t first_seq, first_pos; /* of the file; -1: the first fault is of no sequence, of no position */
    int32_t n_line;
    char line[LEDGER_REPLAY_LINES_MAX][LEDGER_REPLAY_LINE_BYTES]; /* the first faults, one each */
} ledger_replay;

/* counted: (steps) n_seq .. reward_mean as src/stats counts them. BR_E_MISMATCH with the first fault as the sentence; BR_OK when everything
 * agrees; BR_E_NOMEM. */
br_status ledger_replay_check(const ledger_reader *reader, const br_ledger_record *counted, ledger_replay *out);

#endif
