/* rollout_layout: datasets and attributes of a rollout file in one table, and the HDF5 calls that both sides need.
 *
 * Layer: io, private to rollout_*.c. A column is a dataset with a row a sequence or a row a token. Types are little-endian
 * and equal in memory and file, so that HDF5 never converts: the bits of a log-prob pass through untouched. */
#ifndef ROLLOUT_LAYOUT_H
#define ROLLOUT_LAYOUT_H

#include "rollout_file.h"

#include <hdf5.h>

#define ROLLOUT_FORMAT "rollout-parity"
#define ROLLOUT_COMMIT_PATH "/commit"
#define ROLLOUT_META_DIGEST_NAME "meta_digest"

enum {
    ROLLOUT_FORMAT_VERSION = 1,
    ROLLOUT_COMMIT_WORDS = 4,    /* sequences, tokens, commits, XXH3-64 of the three */
    ROLLOUT_CHUNK_TOK = 65536,   /* rows of a chunk of a token column */
    ROLLOUT_CHUNK_SEQ = 256,     /* rows of a chunk of a sequence column */
    ROLLOUT_TEXT_BYTES = 256     /* longest text attribute and its end */
};

typedef enum rollout_type {
    ROLLOUT_U8, ROLLOUT_I32, ROLLOUT_U32, ROLLOUT_I64, ROLLOUT_U64, ROLLOUT_F32, ROLLOUT_F64, ROLLOUT_TEXT
} rollout_type;

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

#define ROLLOUT_NO_FIELD ((size_t)-1)

typedef struct rollout_column {
    const char *path;
    rollout_type type;
    int32_t width;    /* elements a row (bytes of a text); 0: n_top of the file */
    int32_t by_token; /* a row a token, else a row a sequence */
    int32_t packed;   /* filters in a finished file; digests do not shrink and have none */
    size_t field;     /* in rollout_seq: the value, or the pointer to the rows of a token column */
} rollout_column;

extern const rollout_column rollout_columns[ROLLOUT_COLUMN_COUNT];

int rollout_column_present(int column, const rollout_meta *meta);
int32_t rollout_column_width(int column, const rollout_meta *meta);
int rollout_column_rank(int column); /* 1, or 2 when a row has several elements */
size_t rollout_column_row_bytes(int column, const rollout_meta *meta);
int64_t rollout_column_rows(int column, int64_t n_seq, int64_t n_tok); /* offsets have a row more than there are sequences */
/* The HDF5 type, to be closed with H5Tclose; the same in memory and in the file. */
hid_t rollout_column_type(int column);

uint64_t rollout_commit_check(const uint64_t commit[ROLLOUT_COMMIT_WORDS]);

/* Attributes, fixed ones apart. Each is stored as text: digests and numbers too, so that any tool shows them. */
enum { ROLLOUT_ATTRIBUTE_COUNT = 9 };
const char *rollout_attribute_name(int i);
void rollout_attribute_text(int i, const rollout_meta *meta, char text[ROLLOUT_TEXT_BYTES]);
/* The reverse; 0 when the text is not a value of this attribute. */
int rollout_attribute_parse(int i, const char *text, rollout_meta *meta);
int rollout_digest_parse(const char *text, br_digest *out); /* 0 when it is not 32 hex digits as we write them */
enum { ROLLOUT_FIXED_COUNT = 4 };
const char *rollout_fixed_name(int i);
const char *rollout_fixed_text(int i);

/* Ranges of the fields of sequence `i`; the sentence names the dataset. Fails with `status`: BR_E_ARG for a caller's
 * sequence, BR_E_FORMAT for a file's. */
br_status rollout_seq_check(br_status status, const char *path, int64_t i, const rollout_meta *meta, const rollout_seq *seq);

/* Opens the exempt scope of the allocation guard and silences HDF5's own printing; end restores both. */
typedef struct rollout_scope {
    const char *phase;
    H5E_auto2_t print;
    void *print_context;
} rollout_scope;
rollout_scope rollout_scope_begin(void);
void rollout_scope_end(rollout_scope scope);

/* "path: cannot <doing>: <what HDF5 said first>". */
br_status rollout_h5_fail(br_status status, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
