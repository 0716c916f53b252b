/* job_verify_ledger: `verify` of a training run's ledger. Layer: engine. */
#ifndef JOB_VERIFY_LEDGER_H
#define JOB_VERIFY_LEDGER_H

#include "bitroll.h"

/* BR_E_MISMATCH when a digest, count or link is not what the dumps give, when log-probs or the two sides' digests differ in any step, or when
 * the model says something else. */
br_status job_verify_ledger(const br_verify_options *options, const br_watch *watch, br_report *report);

#endif
