/* sampling: the default settings of a request, and which settings are one. Layer: logprob; includes base. */
#ifndef SAMPLING_H
#define SAMPLING_H

#include "br_status.h"

/* BR_E_ARG naming the setting, what was expected and found. (The contract's ranges: N-HEAD for temperature, N-SAMPLE for
 * filters.) */
br_status sampling_check(const br_sampling *sampling, int32_t n_vocab);
br_status sampling_check_scored(const br_sampling *sampling); /* of what counts when given tokens are scored */

/* 1 when the text ends with `token` as its n_new-th new one, and why. eos_id -1: the model has none. */
int sampling_ends(const br_sampling *sampling, int32_t eos_id, int32_t n_new, int32_t token, br_stop_reason *reason);

#endif
