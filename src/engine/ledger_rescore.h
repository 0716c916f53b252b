/* ledger_rescore: steps of a ledger computed again. Layer: engine. */
#ifndef LEDGER_RESCORE_H
#define LEDGER_RESCORE_H

#include "ledger_file.h"

/* Scores the sequences of every step whose rollout adapter is one of the options', all of them or n_recompute a step, and compares bits with
 * the rollout array. Adds a line to the report. BR_E_MISMATCH: they differ, or contract or weights are others, or no step has such an adapter. */
br_status ledger_rescore(const ledger_reader *reader, const br_verify_options *options, const br_watch *watch, br_report *report);

#endif
