/* rollout_layout: datasets and attributes of a rollout file in one table, for reader and writer.
 * Layer: io, private to rollout_*.c. */
#ifndef ROLLOUT_LAYOUT_H
#define ROLLOUT_LAYOUT_H

#include "rollout_file.h"

#include "h5_column.h"

#define ROLLOUT_FORMAT "rollout-parity"
#define ROLLOUT_FORMAT_FOREIGN "foreign-logprobs"
#define ROLLOUT_LOGPROB_KIND "full_softmax_over_T"
#define ROLLOUT_META_DIGEST_NAME "meta_digest"

enum { ROLLOUT_FORMAT_VERSION = 1 };
enum { ROLLOUT_SPACE_SEQ, ROLLOUT_SPACE_TOK }; /* what is committed: sequences, tokens, and how many commits there were */

typedef enum rollout_column_id {
    ROLLOUT_COL_OFFSET, /* first: the others are bounded by it */
    ROLLOUT_COL_CHAIN,
    ROLLOUT_COL_UID, ROLLOUT_COL_PROMPT_INDEX, ROLLOUT_COL_SAMPLE, ROLLOUT_COL_SEED,
    ROLLOUT_COL_ADAPTER, ROLLOUT_COL_ADAPTER_DIGEST,
    ROLLOUT_COL_TEMPERATURE, ROLLOUT_COL_MIN_P, ROLLOUT_COL_TOP_P, ROLLOUT_COL_TOP_K,
    ROLLOUT_COL_MAX_NEW, ROLLOUT_COL_MIN_NEW, ROLLOUT_COL_IGNORE_EOS, ROLLOUT_COL_N_STOP, ROLLOUT_COL_STOP_TOKEN,
    ROLLOUT_COL_PROMPT_LEN, ROLLOUT_COL_STATUS, ROLLOUT_COL_STOP, ROLLOUT_COL_ERROR,
    ROLLOUT_COL_PART, ROLLOUT_COL_RECEIPT,
    ROLLOUT_COL_TOKEN, ROLLOUT_COL_MASK,
    ROLLOUT_COL_LOGPROB, ROLLOUT_COL_LOGPROB_RAW, ROLLOUT_COL_LOGPROB_KEPT,
    ROLLOUT_COL_ENTROPY, ROLLOUT_COL_TOP_TOKEN, ROLLOUT_COL_TOP_LOGPROB, /* optional */
    ROLLOUT_COLUMN_COUNT
} rollout_column_id;

/* The columns of a file with these attributes; fields are those of rollout_seq. */
void rollout_columns(const rollout_meta *meta, h5_column column[ROLLOUT_COLUMN_COUNT]);
int64_t rollout_column_rows(int column, int64_t n_seq, int64_t n_tok); /* offsets have a row more than there are sequences */

/* Attributes, fixed ones apart. Each is stored as text: digests and numbers too, so that any tool shows them. */
enum { ROLLOUT_ATTRIBUTE_COUNT = 9 };
const char *rollout_attribute_name(int i);
void rollout_attribute_text(int i, const rollout_meta *meta, char text[H5_TEXT_BYTES]);
/* The reverse; 0 when the text is not a value of this attribute. */
int rollout_attribute_parse(int i, const char *text, rollout_meta *meta);
int rollout_digest_parse(const char *text, br_digest *out); /* 0 when it is not 32 hex digits as we write them */
enum { ROLLOUT_FIXED_COUNT = 4 };
const char *rollout_fixed_name(int i);
const char *rollout_fixed_text(int i);

/* Ranges of the fields of sequence `i`; the sentence names the dataset. Fails with `status`: BR_E_ARG for a caller's
 * sequence, BR_E_FORMAT for a file's. */
br_status rollout_seq_check(br_status status, const char *path, int64_t i, const rollout_meta *meta, const rollout_seq *seq);

#endif
