/* fake_rollout: records with made-up tokens and log-probs, for the suites of files, receipts and parity. */
#ifndef FAKE_ROLLOUT_H
#define FAKE_ROLLOUT_H

#include "rollout_replay.h"
#include "rollout_file.h"

enum { FAKE_TOK_MAX = 48, FAKE_TOP = 3 };

typedef struct fake_seq {
    rollout_seq seq; /* points into the arrays */
    int32_t token[FAKE_TOK_MAX], top_token[FAKE_TOK_MAX * FAKE_TOP];
    uint32_t logprob[FAKE_TOK_MAX], logprob_raw[FAKE_TOK_MAX], logprob_kept[FAKE_TOK_MAX], entropy[FAKE_TOK_MAX];
    uint32_t top_logprob[FAKE_TOK_MAX * FAKE_TOP];
    uint8_t mask[FAKE_TOK_MAX];
} fake_seq;

rollout_meta fake_meta(const char *producer, const char *stamp); /* with entropy and FAKE_TOP alternatives */
/* Sequence number i of the made-up run: prompt i / 2, sample i % 2, always the same; with its receipt. */
void fake_make(const rollout_meta *meta, int i, fake_seq *out);
/* What a trainer's file holds of it: prompt tokens scored too, logprob_kept never; receipt made again. */
void fake_score(const rollout_meta *meta, fake_seq *f);
/* Changes made by a test: pointers and receipt again. */
void fake_seal(const rollout_meta *meta, fake_seq *f);
/* Writes sequences order[0 .. n-1] (NULL: 0 .. n-1), a commit each, and closes. `score`: as a trainer. */
void fake_write(const char *path, const rollout_meta *meta, const int *order, int n, int score);
/* "name" in the folder of the test; the text stays. At most a few names a test. */
const char *fake_path(const char *name);
/* Opens and replays the ledger; the status of whichever refuses first. */
br_status fake_replay(const char *path, rollout_replay *out);
/* Fails the running test when the two differ in any field or slot. */
void fake_expect_equal(const rollout_meta *meta, const rollout_seq *a, const rollout_seq *b);

#endif
