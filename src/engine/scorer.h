/* scorer: the trainer's forward. Whole sequences from position 0, packed side by side, contiguous caches and states.
 *
 * Layer: engine. It shares with the rollout engine the op table and src/model, and nothing else: no scheduler, no pages, no
 * prefix cache. That is what makes its log-probs a proof. */
#ifndef SCORER_H
#define SCORER_H

#include "br_loaded.h"

typedef struct scorer_seq {
    const int32_t *token;
    int32_t n_tok;
    int32_t first_asked; /* first position whose log-prob is asked for: logits are checked from there on, as when sampling */
    int32_t slot;        /* adapter slot, -1 base */
    float temperature;
    /* out, written by scorer_logprobs: (n_tok) bits, slot 0 left alone. entropy may be NULL. */
    uint32_t *logprob, *logprob_raw, *entropy;
    /* out, written by scorer_faults and scorer_logprobs: code of the first fault by position, 0 when none */
    uint32_t fault;
    int32_t fault_pos;
} scorer_seq;

typedef struct scorer scorer;

enum { SCORER_PACK_MAX = 32 }; /* sequences of a pack: a state each; small's takes 3.7 MB */

/* br_loaded_open, with room for the scorer too. */
br_status scorer_load(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, br_loaded *out);
void scorer_room(br_loaded *loaded); /* adds to loaded->room what open will take */
/* n_row_max of `loaded` is the size of a pack; each sequence must fit into one. */
br_status scorer_open(br_loaded *loaded, scorer **out);
void scorer_close(scorer *s);
/* How many of seq[0..n-1], in order, fit into the next pack: at least 1 of n > 0. BR_E_LIMIT when seq[0] alone does not. */
br_status scorer_fit(const scorer *s, const scorer_seq *seq, int32_t n, int32_t *n_fit);
/* The forward of a pack, on its way when this returns: scorer_faults or scorer_logprobs, with the same pack, waits for it. Row r of the
 * pack's only or first sequence is row r of *final; the others follow; *final is device memory. */
br_status scorer_forward(scorer *s, const scorer_seq *seq, int32_t n, const br_trace *trace, const bi_bf16 **final);
/* Waits, and notes faults of rows. The last row of a sequence predicts nothing, so its faults are nobody's (unless it is the only one). */
br_status scorer_faults(scorer *s, scorer_seq *seq, int32_t n);
const bi_batch *scorer_batch(const scorer *s);              /* of the last forward, host side */
const uint32_t *scorer_row_fault(const scorer *s);          /* of the last forward, device side */
/* Log-probs of every token but the first, from the rows of the last forward; BR_UNSCORED where a logit in front of first_asked
 * is not finite. Waits once for all of the pack, and notes faults of rows too. */
br_status scorer_logprobs(scorer *s, scorer_seq *seq, int32_t n, const bi_bf16 *final);

#endif
