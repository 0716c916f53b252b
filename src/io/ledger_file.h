/* ledger_file: the file of a training run's ledger in HDF5, written as a stream and readable after a kill.
 *
 * Layer: io; includes base and HDF5. Format "training-ledger" version 1: groups /run, /step, /seq, /tokens, and /commit last, written as
 * rollout files are (h5_stream.h). It moves columns; digests, counts and links are made and checked by src/proof and src/stats. */
#ifndef LEDGER_FILE_H
#define LEDGER_FILE_H

#include "bitroll_ledger.h"
#include "br_status.h"

#define LEDGER_FORMAT "training-ledger"

enum { LEDGER_FORMAT_VERSION = 1, LEDGER_UID_BYTES = BR_UID_BYTES_MAX + 1, LEDGER_SEQ_TOK_MAX = 1 << 20, LEDGER_SAMPLE_END = 1 << 24 };
enum { LEDGER_RUN_BYTES = 96, LEDGER_RECORD_BYTES = 216 }; /* of what is chained */

typedef enum ledger_array { LEDGER_ROLLOUT, LEDGER_AGAIN, LEDGER_UPDATE, LEDGER_ARRAY_COUNT } ledger_array;
typedef enum ledger_leaf {
    LEDGER_LEAF_SEQUENCE, LEDGER_LEAF_TOKENS, LEDGER_LEAF_ARRAY, /* three of them */
    LEDGER_LEAF_COUNT = LEDGER_LEAF_ARRAY + LEDGER_ARRAY_COUNT
} ledger_leaf;

/* Record 0; the bytes before `link` are what is chained. */
typedef struct ledger_run {
    char format[16];
    int64_t version;
    br_digest contract, base_rollout, base_trainer, config_digest;
    int64_t n_config;
    uint8_t link[BR_LEDGER_LINK_BYTES];
    int64_t n_step_closed; /* steps of the finished file; -1: its writer was killed, or lives */
} ledger_run;

/* One sequence. Pointers belong to the caller (writer) or to the file (reader, valid until close). */
typedef struct ledger_seq {
    char uid[LEDGER_UID_BYTES]; /* zeros behind its end */
    uint32_t sample;
    int32_t group, stop;
    float temperature;
    int64_t version_begin, version_end;
    double reward, advantage;
    int32_t prompt_len, n_tok;
    const int32_t *token;
    const uint8_t *mask;
    const uint32_t *logprob[LEDGER_ARRAY_COUNT];
    br_digest leaf[LEDGER_LEAF_COUNT]; /* as stored */
} ledger_seq;

typedef struct ledger_reader ledger_reader;
typedef struct ledger_writer ledger_writer;

/* Made as "path.part" and renamed when it is readable. config: run->n_config bytes. prefix: NULL, or the file whose first n_step steps it
 * begins with, which may be the one at `path`. */
br_status ledger_writer_open(const char *path, const ledger_run *run, const char *config, const ledger_reader *prefix, int64_t n_step,
                             ledger_writer **out);
/* A whole step, durable and visible when it returns. After BR_E_IO the writer stays failed; what was committed before is intact. */
br_status ledger_writer_append(ledger_writer *writer, const br_ledger_record *record, const ledger_seq *seq);
/* Packs the file with filters; frees the writer whatever happens. NULL is a no-op. */
br_status ledger_writer_close(ledger_writer *writer);

/* 1 when the file at `path` says that it is a ledger. */
int ledger_is_at(const char *path);
/* Loads the committed prefix into memory. Checks types, sizes and what bounds the reading; values that a digest covers are for whoever
 * replays it. Errors: BR_E_NOT_FOUND, BR_E_FORMAT, BR_E_NOMEM; *out is NULL. */
br_status ledger_open(const char *path, ledger_reader **out);
void ledger_close(ledger_reader *reader); /* NULL is a no-op */
const ledger_run *ledger_run_of(const ledger_reader *reader);
const char *ledger_config_of(const ledger_reader *reader); /* n_config bytes */
int64_t ledger_step_count(const ledger_reader *reader);
int64_t ledger_seq_count(const ledger_reader *reader);
int64_t ledger_tok_count(const ledger_reader *reader);
void ledger_record_at(const ledger_reader *reader, int64_t step, br_ledger_record *out);
const int64_t *ledger_seq_begin(const ledger_reader *reader); /* (steps + 1) */
const int64_t *ledger_offset(const ledger_reader *reader);    /* (sequences + 1) */
/* Sequence i with the tokens begin .. end - 1 of the file: those of its offsets, or what a search takes them for. */
void ledger_seq_at(const ledger_reader *reader, int64_t i, int64_t begin, int64_t end, ledger_seq *out);

/* The dataset that holds byte `at` of a chained record, and where in its row that byte is. */
const char *ledger_run_field(size_t at, size_t *in_row);
const char *ledger_record_field(size_t at, size_t *in_row);

#endif
