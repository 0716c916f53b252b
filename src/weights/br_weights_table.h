/* br_weights_table: the table behind br_weights. Internal to src/weights. */
#ifndef BR_WEIGHTS_TABLE_H
#define BR_WEIGHTS_TABLE_H

#include "br_weights.h"
#include "safetensors.h"

typedef struct br_unknown {
    const char *name;
    int32_t shard;
} br_unknown;

struct br_weights {
    br_config config;
    st_file *shard;
    int32_t n_shard;
    br_tensor *tensor; /* while loading: one place a slot of br_weight_expect; then closed up */
    int64_t n_tensor, n_skipped;
    br_unknown *unknown;
    int64_t n_unknown;
    int64_t *missing; /* slots */
    int64_t n_missing;
    /* Of a generated checkpoint, else NULL and 0. */
    bi_weightgen *gen;            /* (n_tensor) */
    char (*name)[BR_NAME_BYTES];  /* (n_tensor) */
    char origin[160];
    br_digest identity;
    unsigned char *room; /* for data that come from memory; NULL: none */
    /* Room for the digest, which may be asked for when nothing may be allocated any more. */
    br_digest *leaf;
    const br_tensor **by_name;
};

#endif
