/* verify_chain: the part of `verify` that needs no model: a file's hash chain replayed. Layer: engine. */
#ifndef VERIFY_CHAIN_H
#define VERIFY_CHAIN_H

#include "rollout_file.h"

/* Fills counts, digests, first_seq and lines of the report. BR_E_MISMATCH naming the sequence and the group of fields. A
 * file whose writer was killed passes with its committed prefix; a line says so. */
br_status verify_chain(const rollout_reader *reader, br_report *report);

#endif
