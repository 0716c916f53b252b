/* ledger_chain: what a training run's ledger chains: leaves of sequences, digests over leaves, SHA-256 over records. Layer: proof; includes
 * base, io's records and libcrypto. Works on bytes only. The bytes themselves are written down in bitroll_ledger.h. */
#ifndef LEDGER_CHAIN_H
#define LEDGER_CHAIN_H

#include "br_hash.h"
#include "ledger_file.h"

/* A leaf is hashed piece after piece. */
typedef struct ledger_piece {
    const char *dataset; /* where the file has it */
    const void *at;
    size_t n;
    size_t row_bytes;    /* of a token's row; 0: one value a sequence */
} ledger_piece;
enum { LEDGER_PIECES_MAX = 9 };

int ledger_leaf_pieces(const ledger_seq *seq, int leaf, ledger_piece piece[LEDGER_PIECES_MAX]); /* returns how many */
br_digest ledger_leaf_of(const ledger_seq *seq, int leaf);
void ledger_leaves(ledger_seq *seq); /* fills seq->leaf */

/* Ranges of the fields, and that a sampled token has a log-prob in every array and no other has. BR_E_ARG or BR_E_NAN; the sentence names
 * field and position. */
br_status ledger_seq_check(const ledger_seq *seq);

/* SHA-256(before || bytes). BR_E_NOMEM: libcrypto could not. */
br_status ledger_link(const uint8_t before[BR_LEDGER_LINK_BYTES], const void *bytes, size_t n, uint8_t out[BR_LEDGER_LINK_BYTES]);
br_status ledger_link_run(const ledger_run *run, uint8_t out[BR_LEDGER_LINK_BYTES]);
static inline br_status ledger_link_record(const uint8_t before[BR_LEDGER_LINK_BYTES], const br_ledger_record *record,
                                           uint8_t out[BR_LEDGER_LINK_BYTES]) {
    return ledger_link(before, record, LEDGER_RECORD_BYTES, out);
}
br_digest *ledger_record_digest(br_ledger_record *record, int leaf); /* the one over these leaves */
/* All of them, from the leaves of the sequences. */
void ledger_fill_digests(const ledger_seq *seq, int64_t n, br_ledger_record *record);

#endif
