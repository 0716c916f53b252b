/* run_uid: the name of a run by what decides its bits. Layer: proof; includes base and io.
 *
 * Two runs with one run_uid must produce the same tokens and log-prob bits. Threads, batch sizes, arrival order, cache sizes
 * and what is recorded besides (entropy, alternatives) are not in it. */
#ifndef RUN_UID_H
#define RUN_UID_H

#include "br_hash.h"
#include "prompts.h"

typedef struct run_identity {
    br_digest contract, weights;
    int32_t n_adapter;
    const char *const *adapter_name; /* (n_adapter), any order */
    const br_digest *adapter_digest; /* (n_adapter) */
    int32_t n_sample;                /* for lines that do not set their own */
    uint64_t seed;
    const prompts *lines;            /* with the default settings under each line's own */
} run_identity;

br_digest run_uid(const run_identity *run);

#endif
