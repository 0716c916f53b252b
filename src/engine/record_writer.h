/* record_writer: finished sequences go to the rollout file on a thread of their own, so that no step waits for the disk.
 *
 * Layer: engine. Owns a fixed number of records; a sequence fills one while it runs and hands it over when it ends. HDF5
 * allocates inside its calls: that happens on this thread only, in the exempt scopes of io/rollout_file. Sequences that ended in error are
 * not committed alone: they wait for one that finished, since the first commit replaces an older file. */
#ifndef RECORD_WRITER_H
#define RECORD_WRITER_H

#include "rollout_file.h"

typedef struct record {
    rollout_seq seq;  /* arrays below belong to the record */
    int32_t *token;
    uint32_t *logprob, *logprob_raw, *logprob_kept, *entropy, *top_logprob;
    uint8_t *mask;
    int32_t *top_token;
} record;

typedef struct record_writer record_writer;

/* n_record records of at most n_tok_max tokens. The file stays the caller's. commit_every: sequences a commit. */
br_status record_writer_open(rollout_writer *file, int32_t n_record, int32_t n_tok_max, int32_t n_top, int32_t commit_every, record_writer **out);
/* Writes what was handed over, commits if a sequence of it finished, stops the thread. The status is the first that a write met. */
br_status record_writer_close(record_writer *writer);
/* An empty record, all slots BR_UNSCORED; waits for the disk when all are handed over. *out NULL and BR_E_LIMIT when the
 * caller itself holds all of them. */
br_status record_take(record_writer *writer, record **out);
br_status record_return(record_writer *writer, record *r); /* unused after all: empty again */
/* The record is complete. Returns the first status that a write met, so that a run on a full disk ends. */
br_status record_give(record_writer *writer, record *r);

#endif
