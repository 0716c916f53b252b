/* swap_rig: pico with eight versions of an adapter and the outputs of each version's cold start, and runs of a few requests beside swaps.
 * Used by the suites of weightsync. */
#ifndef SWAP_RIG_H
#define SWAP_RIG_H

#include "engine_rig.h"
#include "lora_slots.h"

enum { SWAP_VERSIONS = 8, SWAP_N = 6, SWAP_RANK = 32, SWAP_LOW_RANK = 3, SWAP_LOW = 3 }; /* version SWAP_LOW has the lower rank */

typedef struct swap_models {
    rig_model pico;
    char dir[SWAP_VERSIONS][256], made_dir[256]; /* adapters; made: a generated one */
    rig_request request[SWAP_N];                 /* all under "a" */
    rig_text cold[SWAP_VERSIONS][SWAP_N], base[SWAP_N];
} swap_models;
extern swap_models swap_of;

void swap_models_make(void); /* in a fixture of the parent process */
/* An engine whose "a" begins as the adapter of a folder, NULL: empty; "b" as the rig makes it. */
br_engine *swap_engine(const char *first);
br_engine *swap_engine_of_steps(const char *first, int32_t chunk_tokens);
void swap_prepare(br_engine *e, int v, int64_t version);
void swap_commit(br_engine *e, int64_t version, br_swap_mode mode, br_swap_answer wanted);

/* The requests under way: what came of each. */
typedef struct swap_run {
    uint64_t id[SWAP_N];
    rig_text text[SWAP_N];
    br_versions versions[SWAP_N];
    int n_ended;
} swap_run;

int32_t swap_poll(br_engine *e, swap_run **r, int n_run); /* one poll, for as many runs as there are */
void swap_start(br_engine *e, swap_run *r);
void swap_finish(br_engine *e, swap_run *r);
/* Every token and bit as in the cold start; an aborted text is a beginning of it. All under one version, and certified. */
void swap_expect_cold(const swap_run *r, int v, int64_t version, const char *what);
/* The digest of the live memory is the one that was loaded. */
void swap_expect_live(br_engine *e, const char *what);
/* Where the stacks of every slot on every map lie, as one digest: the addresses that forwards read adapters from. */
br_digest swap_addresses(const br_engine *e);

/* A version that comes in tensor by tensor, each in two chunks. */
typedef struct swap_sender {
    lora_set *set;
    int64_t next;
} swap_sender;
int swap_send(br_engine *e, swap_sender *s, int64_t n); /* up to n tensors; 1: none is left */
void swap_begin_version(br_engine *e, int v, int64_t version);
void swap_open_sets(const br_engine *e, lora_set *set[SWAP_VERSIONS]);
void swap_close_sets(lora_set *set[SWAP_VERSIONS]);

#endif
