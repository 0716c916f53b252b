/* ledger_count: how far the three log-prob arrays of a step are apart. Layer: stats; reads records only. */
#ifndef LEDGER_COUNT_H
#define LEDGER_COUNT_H

#include "ledger_file.h"

/* Fills n_seq .. reward_mean of the record. Sums run in the order of sequences and positions, in arithmetic that every machine does alike. */
void ledger_count(const ledger_seq *seq, int64_t n, br_ledger_record *record);

#endif
