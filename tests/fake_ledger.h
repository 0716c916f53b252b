/* fake_ledger: made-up steps of a training run, for the suites of its ledger. */
#ifndef FAKE_LEDGER_H
#define FAKE_LEDGER_H

#include "bitroll_ledger.h"
#include "ledger_file.h"

enum { FAKE_STEPS = 4, FAKE_STEP_SEQS = 5, FAKE_LEDGER_TOKS = 40 };

typedef struct fake_step {
    br_ledger_step step; /* points into the rest */
    br_ledger_seq seq[FAKE_STEP_SEQS];
    int32_t token[FAKE_STEP_SEQS][FAKE_LEDGER_TOKS];
    uint8_t mask[FAKE_STEP_SEQS][FAKE_LEDGER_TOKS];
    uint32_t logprob[FAKE_STEP_SEQS][3][FAKE_LEDGER_TOKS]; /* rollout, again, update: equal */
    char uid[FAKE_STEP_SEQS][32];
} fake_step;

br_ledger_run fake_ledger_run(void);
/* Step i, always the same. Sequence 0 is one prompt token alone, sequence 1 has two turns; step 2 has no sequence at all. */
void fake_step_make(int i, fake_step *out);
/* Log-probs of sequence s that differ from the rollout's: `again` at its first sampled token, `update` at its first two. */
void fake_step_spoil(fake_step *step, int s);
/* Creates, appends steps 0 .. n - 1 and closes; the root as text. spoiled: a step whose sequence 1 and 3 differ, -1: none. */
void fake_ledger_write(const char *path, int n, int spoiled, char root[65]);
void fake_root(const uint8_t link[BR_LEDGER_LINK_BYTES], char root[65]);
/* The verdict of `verify`, in the caller's report. */
br_status fake_ledger_verify(const char *path, br_report *report);

void fake_ledger_expect_good(const char *path, int n_step, const char *root); /* verify's last line says so */
void fake_file_copy(const char *from, const char *to, size_t n_max);         /* the first n_max bytes */
int fake_file_same(const char *a, const char *b);

/* Steps of a good file as they lie in it, to be written again in another order, changed, or chained anew. */
typedef struct fake_copy {
    ledger_reader *reader;
    ledger_writer *writer;
    int64_t n_seq_max;
    uint8_t link[BR_LEDGER_LINK_BYTES];
} fake_copy;
void fake_copy_begin(const char *from, const char *to, fake_copy *copy);
/* Step i of the file; change, when not NULL, may do anything to it. sealed: with leaves, digests and link that fit; else as stored. */
void fake_copy_step(fake_copy *copy, int i, int sealed, void (*change)(br_ledger_record *record, ledger_seq *seq));
void fake_copy_end(fake_copy *copy);

#endif
