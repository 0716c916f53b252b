/* rollout_file: rollouts and scores in HDF5, written as a stream and readable after a kill.
 *
 * Layer: io; includes base and HDF5. Layout: format "rollout-parity" version 1; flat token arrays with offsets, /commit
 * last. A writer creates everything, switches to single-writer-multiple-readers, and then only appends: write, flush,
 * commit, flush. A file whose writer was killed opens for reading and shows exactly the committed prefix. All HDF5 calls run
 * in a named exempt scope of the allocation guard, one thread at a time.
 *
 * The stream has no filters: a filtered chunk that grows is written anew at every commit (500 commits of 128 tokens took 240
 * MB and 15 ms a commit with gzip, 1.6 MB and 0.2 ms without), and a checksum over a half rewritten chunk would make the
 * committed part unreadable. rollout_close writes the filtered file beside it and renames. */
#ifndef ROLLOUT_FILE_H
#define ROLLOUT_FILE_H

#include "br_hash.h"
#include "br_status.h"

enum { ROLLOUT_NAME_BYTES = 64, ROLLOUT_STAMP_BYTES = 64, ROLLOUT_UID_BYTES = BR_UID_BYTES_MAX + 1 };
enum { ROLLOUT_SEQ_TOK_MAX = 1 << 20, ROLLOUT_SAMPLE_END = 1 << 24 };

/* Groups of fields with a digest of their own, so that a damaged file tells what was damaged. */
typedef enum rollout_part {
    ROLLOUT_PART_IDENTITY, /* uid, prompt index, sample, seed */
    ROLLOUT_PART_SETTINGS, /* temperature .. stop tokens */
    ROLLOUT_PART_ADAPTER,  /* name and digest */
    ROLLOUT_PART_TOKENS,   /* ids, mask, prompt length */
    ROLLOUT_PART_LOGPROBS, /* logprob, logprob_raw, logprob_kept */
    ROLLOUT_PART_EXTRAS,   /* entropy, alternatives */
    ROLLOUT_PART_RESULT,   /* status, stop, error */
    ROLLOUT_PART_COUNT
} rollout_part;

/* Attributes of the file. Text fields end with 0. */
typedef struct rollout_meta {
    char producer[16];                  /* "rollout" or "trainer" */
    char producer_stamp[ROLLOUT_STAMP_BYTES]; /* verb, backend, process nonce: differs between any two runs */
    br_digest run_uid;      /* of contract, weights, adapters, prompts, settings: a rerun joins */
    br_digest weights_digest, contract_digest;
    br_digest config_digest;
    char backend[32];
    int32_t has_entropy, n_top;         /* optional datasets; n_top at most BR_TOP_LOGPROBS_MAX */
    char engine_build[16];  /* set by the writer */
    int64_t n_seq_closed;   /* set by rollout_close: sequences of the finished file; -1: its writer was killed, or lives */
    int32_t is_foreign;     /* set by the reader: a dump of another stack; what it has no column for is 0 or NULL */
    char logprob_kind[32], source[32]; /* set by the reader: what `logprob` is; the importer, "bitroll" where it is ours */
} rollout_meta;

/* One sequence. Pointers belong to the caller (writer) or to the file (reader, valid until close). */
typedef struct rollout_seq {
    uint64_t uid_hash;                  /* XXH64(uid, 0); made by the reader, not stored */
    char uid[ROLLOUT_UID_BYTES];
    uint32_t prompt_index, sample;
    uint64_t seed;
    char adapter[ROLLOUT_NAME_BYTES];   /* "base" */
    br_digest adapter_digest;
    float temperature, min_p;
    double top_p;
    int32_t top_k;
    int32_t max_new, min_new, ignore_eos; /* what decided where the text ends; 0 where it was never sampled */
    int32_t n_stop, stop_token[BR_STOP_MAX];
    int32_t prompt_len, n_tok;          /* n_tok: prompt and response */
    uint8_t status, stop;               /* status 0 done, 1 error; stop: br_stop_reason */
    int32_t error;                      /* br_status of an error */
    const int32_t *token;               /* (n_tok) */
    const uint32_t *logprob, *logprob_raw, *logprob_kept; /* (n_tok) bits; BR_UNSCORED where not scored */
    const uint32_t *entropy;            /* (n_tok) bits, or NULL */
    const uint8_t *mask;                /* (n_tok) 1: sampled by the policy */
    const int32_t *top_token;           /* (n_tok, n_top) or NULL; -1 where absent */
    const uint32_t *top_logprob;        /* (n_tok, n_top), BR_UNSCORED where absent */
    uint64_t part[ROLLOUT_PART_COUNT];  /* proof/receipt */
    br_digest receipt;                  /* proof/receipt */
} rollout_seq;

typedef struct rollout_writer rollout_writer;
/* Made as "path.part" and renamed by the first commit of a sequence, or by close: a writer that fails before leaves an older file at `path` as
 * it was, and nothing beside it. */
br_status rollout_create(const char *path, const rollout_meta *meta, rollout_writer **out);
/* Appends to a finished or killed file with equal run_uid: keeps the committed prefix (copied to a clean file first, then
 * renamed over). `meta` gives the new stamp. BR_E_ARG when the run, its digests or the optional datasets differ. Which
 * sequences are there is read with rollout_open before. */
br_status rollout_resume(const char *path, const rollout_meta *meta, rollout_writer **out);
/* Not yet visible. BR_E_ARG when a field is out of its range. After BR_E_IO (full disk) the writer stays failed; what was
 * committed before is intact. */
br_status rollout_append(rollout_writer *writer, const rollout_seq *seq);
br_status rollout_commit(rollout_writer *writer);                         /* what was appended is now durable and visible */
/* Commits, then packs the file with filters; frees the writer whatever happens. When packing fails the file stays as it was
 * committed. NULL is a no-op. */
br_status rollout_close(rollout_writer *writer);
/* Ends without a commit, as a kill would: what was appended since the last commit is lost. NULL is a no-op. */
void rollout_abandon(rollout_writer *writer);

typedef struct rollout_reader rollout_reader;
/* Loads the committed prefix into memory and checks every type, offset and bound. Errors: BR_E_NOT_FOUND, BR_E_FORMAT,
 * BR_E_NOMEM; *out is NULL. */
br_status rollout_open(const char *path, rollout_reader **out);
/* The same, or a dump of another stack as bitroll.importers write it: format "foreign-logprobs" version 1, which has the attributes
 * producer, source and logprob_kind, and of our columns offset, uid, sample, temperature, prompt_len, id, mask, logprob and, where the
 * stack kept alternatives, top_id and top_logprob. No digests, no chain: nothing of it can be verified. */
br_status rollout_open_foreign(const char *path, rollout_reader **out);
void rollout_reader_close(rollout_reader *reader); /* NULL is a no-op */
const rollout_meta *rollout_reader_meta(const rollout_reader *reader);
int64_t rollout_seq_count(const rollout_reader *reader);
int64_t rollout_tok_count(const rollout_reader *reader);
void rollout_seq_at(const rollout_reader *reader, int64_t i, rollout_seq *out);

/* The hash chain: link i = chain(link i-1, receipt i), from a first link that binds run, weights, contract and model. The
 * stamp is not in it: a resumed run has the chain of an uninterrupted one. The digest of the attributes covers the rest. */
br_digest rollout_chain_first(const rollout_meta *meta);
br_digest rollout_reader_link(const rollout_reader *reader, int64_t i);      /* as stored */
br_digest rollout_meta_digest(const rollout_meta *meta);                     /* as it should be */
br_digest rollout_reader_meta_digest(const rollout_reader *reader);          /* as stored */

#endif
