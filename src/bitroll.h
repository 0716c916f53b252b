/* bitroll: a rollout engine for reinforcement learning whose log-probs are the same bytes as its trainer's.
 *
 * The public header of libbitroll, C99, no other include needed. Two layers:
 *   the engine   open a checkpoint with adapters, submit token ids, poll tokens with the bits of their log-probs;
 *   the jobs     what the command `bitroll` does, one function a verb, from files to files.
 * Only token ids go in and out. Every function returns br_status unless it cannot fail; the sentence of the last error of
 * the calling thread is br_last_error(). Handles are opaque and belong to the caller until the matching close. One engine
 * is used by one thread at a time. Strings are UTF-8, never NULL unless said. */
#ifndef BITROLL_H
#define BITROLL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default) /* all that the library exports: the rest is compiled hidden */
#endif

#define BR_VERSION_TEXT "0.1.0"
#define BR_ABI_VERSION 3

/* Values are pinned: gaps are for later errors of the same kind. */
typedef enum br_status {
    BR_OK = 0,
    BR_E_ARG = 10,         /* an argument or option is out of its range */
    BR_E_SHAPE = 11,       /* a shape is outside what the contract or the limits allow */
    BR_E_ALIGN = 12,       /* a pointer or stride is not aligned as the op asks */
    BR_E_LIMIT = 13,       /* a fixed limit would be exceeded */
    BR_E_IO = 20,          /* the operating system failed a read or write */
    BR_E_FORMAT = 21,      /* a file does not hold what its format or the model asks for */
    BR_E_NOT_FOUND = 22,   /* a file, tensor, adapter or request does not exist */
    BR_E_UNSUPPORTED = 23, /* a known feature that is refused by name */
    BR_E_NOMEM = 30,       /* memory is exhausted */
    BR_E_CAPACITY = 31,    /* the cache cannot hold the request, even alone */
    BR_E_NAN = 40,         /* NaN or Inf at a checked point of the forward; the sentence gives layer, stage, position */
    BR_E_MISMATCH = 41,    /* a check ran and failed: differing bits, a broken chain */
    BR_E_ABORTED = 50,     /* the request was aborted by its owner */
    BR_E_DEVICE = 60       /* the device failed or is missing */
} br_status;

typedef struct br_digest {
    uint64_t lo, hi;
} br_digest;

const char *br_status_name(br_status status); /* static string */
const char *br_last_error(void);              /* of this thread; valid until its next failing call */
const char *br_version(void);
int32_t br_abi_version(void); /* BR_ABI_VERSION of the library that runs: compare before the first call */
br_digest br_contract_digest(void); /* of every constant that can move a bit */

/* ---- engine ---------------------------------------------------------------------------------------------------------- */

typedef struct br_engine br_engine;

typedef struct br_adapter_source {
    const char *name; /* what requests call it; unique, not "base" */
    const char *dir;  /* PEFT folder: adapter_config.json, adapter_model.safetensors or generated.json; NULL with swap_rank: starts empty */
} br_adapter_source;

/* Zero means the default in brackets. */
typedef struct br_engine_options {
    const char *model_dir;
    const br_adapter_source *adapter;
    int32_t n_adapter;
    int32_t allow_zero_adapter; /* accept an adapter whose B is all zero */
    const char *backend;        /* "oracle", "cuda", or NULL: cuda where a usable GPU is */
    int32_t n_thread;           /* [all cores] */
    int32_t max_seqs;           /* sequences that run at once [64] */
    int32_t chunk_tokens;       /* rows of one step: decode rows first, then prefill chunks [256] */
    int32_t kv_pages;           /* pages of 64 tokens in the cache [what max_seqs sequences of 1,024 tokens need] */
    int32_t state_every;        /* keep a KDA state every so many tokens, a multiple of 64 [256]; -1: only at prompt_len - 1 */
    int32_t preempt_every;      /* test aid: preempt the youngest running sequence at every n-th step [0, never] */
    int32_t no_prefix_cache;    /* 1: nothing is shared between sequences */
    int32_t max_tok;            /* longest sequence, prompt and response; cut to what position_max and pages hold [that] */
    int32_t swap_rank;          /* adapters can be swapped, up to this rank: see br_swap_begin; at most 64 names, on cuda 8 [0, never] */
    double swap_alpha;          /* lora_alpha of the manifest of an adapter that starts empty [2 * swap_rank] */
} br_engine_options;

/* Loads, checks and packs everything; afterwards nothing of ours allocates until close.
 * Errors: BR_E_ARG, BR_E_NOT_FOUND, BR_E_FORMAT, BR_E_UNSUPPORTED, BR_E_NOMEM, BR_E_LIMIT. *out is NULL on error. */
br_status br_engine_open(const br_engine_options *options, br_engine **out);
void br_engine_close(br_engine *engine); /* NULL is a no-op; requests still running are dropped */
br_digest br_engine_weights_digest(const br_engine *engine);
/* Other base weights: those of a checkpoint with an equal config.json, checked whole first, then copied to where the old ones lie. Adapters
 * stay. expected NULL: any digest. Errors: BR_E_LIMIT while a request has not ended, BR_E_MISMATCH (the digest is another), those of open
 * for the checkpoint; the old weights go on then, unless memory ran out in the middle: the engine can only be closed, and br_poll says so. */
br_status br_engine_reload(br_engine *engine, const char *model_dir, const br_digest *expected);
/* Of the version that new requests run on, as it was loaded. "base" and an adapter that is empty give 0, 0. */
br_status br_engine_adapter_digest(const br_engine *engine, const char *name, br_digest *out);
/* The same, computed now from the memory that forwards read: any bit there that is not as it was loaded gives another digest. Of a
 * generated adapter the values count, not the recipe. Reads all of it, and allocates while it runs. */
br_status br_engine_adapter_live_digest(br_engine *engine, const char *name, br_digest *out);

/* Other base weights from memory: every tensor of the checkpoint is staged in as much host memory as it takes, checked whole, and put where the old
 * ones lie. begin, chunk .., end, commit; a chunk or end that is refused drops what came. Calls belong to the engine's thread, between polls;
 * one that is not of the state is BR_E_ARG. An engine that was opened on MXFP4 experts takes MXFP4 experts, one on bf16 experts bf16. */
typedef struct br_base br_base;
/* model_dir: of an equal config.json; its headers say which tensors there are. *out is closed before the engine, NULL on error: those of open. */
br_status br_base_open(br_engine *engine, const char *model_dir, br_base **out);
void br_base_close(br_base *base); /* NULL is a no-op; what is staged is dropped */
enum { BR_BASE_NAME_BYTES = 160, BR_BASE_DIM_MAX = 4 };
typedef struct br_base_tensor {
    char name[BR_BASE_NAME_BYTES]; /* as in the files */
    char dtype[8];                 /* "BF16", "F32", "U8" */
    int32_t n_dim;
    int64_t dim[BR_BASE_DIM_MAX];
    uint64_t n_byte;
} br_base_tensor;
int64_t br_base_count(const br_base *base);
br_status br_base_tensor_at(const br_base *base, int64_t tensor, br_base_tensor *out); /* BR_E_ARG: no such number */
br_status br_base_find(const br_base *base, const char *name, int64_t *tensor);        /* BR_E_NOT_FOUND */
br_status br_base_begin(br_base *base); /* takes the memory; BR_E_NOMEM */
/* Tensors in any order, each in chunks of rising offset without gaps, read before it returns. BR_E_FORMAT: out of range, overlapping, a gap. */
br_status br_base_chunk(br_base *base, int64_t tensor, uint64_t offset, const void *bytes, size_t n);
/* BR_E_FORMAT: a tensor is not whole, NaN or Inf. BR_E_MISMATCH: the digest (that of br_engine_weights_digest) is another. */
br_status br_base_end(br_base *base, br_digest expected);
/* BR_E_LIMIT while a request has not ended: what is staged stays. Every other error as in br_engine_reload; the stage is dropped. */
br_status br_base_commit(br_base *base);
void br_base_abort(br_base *base); /* also when there is nothing to abort */

enum { BR_STOP_MAX = 16, BR_TOP_LOGPROBS_MAX = 20, BR_UID_BYTES_MAX = 255 };

#define BR_UNSCORED 0x7fc00000u /* bits in the place of a log-prob that was not computed */

/* Temperature 0 is greedy; else 2^-10 <= temperature <= 2^10. Use br_sampling_default() and change fields. */
typedef struct br_sampling {
    float temperature;      /* [1] */
    float min_p;            /* 0: off; <= 1 */
    double top_p;           /* 1: off; 0 < top_p <= 1 */
    int32_t top_k;          /* 0: off */
    int32_t max_new;        /* most tokens to sample, >= 1 [16] */
    int32_t min_new;        /* end-of-sequence and stop tokens do not end the text before so many tokens [0] */
    int32_t ignore_eos;     /* 1: the model's end-of-sequence token does not end the text */
    int32_t top_logprobs;   /* 0..BR_TOP_LOGPROBS_MAX alternatives a token */
    int32_t entropy;        /* 1: entropy of the full softmax at this temperature */
    int32_t n_stop;         /* stop tokens, at most BR_STOP_MAX */
    int32_t stop[BR_STOP_MAX];
} br_sampling;

br_sampling br_sampling_default(void);

typedef struct br_request {
    const char *uid;       /* names the prompt; enters the sampler's counter. 1..BR_UID_BYTES_MAX bytes */
    const int32_t *prompt; /* (n_prompt) token ids, copied; n_prompt >= 1 */
    int32_t n_prompt;
    uint32_t sample;     /* sample number of this prompt, < 2^24 */
    uint64_t seed;
    const char *adapter; /* NULL or "base": no adapter */
    br_sampling sampling;
    int32_t score_from;  /* 0: tokens are sampled. 1 .. n_prompt - 1: none is; the prompt's own tokens from this position on are handed out
                          * in order, each with its log-probs. Of sampling only temperature and entropy count then */
} br_request;

typedef enum br_stop_reason {
    BR_STOP_EOS = 0,
    BR_STOP_LENGTH = 1,
    BR_STOP_ABORT = 2,
    BR_STOP_TOKEN = 3,
    BR_STOP_ERROR = 4
} br_stop_reason;

/* One token, sampled or scored. Log-probs are the bits of binary32 numbers. */
typedef struct br_token {
    uint64_t request;
    int32_t token;
    int32_t position;      /* in the sequence, prompt included */
    uint32_t logprob;      /* full softmax of logits / temperature: the one that trainers mean */
    uint32_t logprob_raw;  /* at temperature 1 */
    uint32_t logprob_kept; /* over what the filters kept; BR_UNSCORED of a scored one */
    uint32_t entropy;      /* BR_UNSCORED unless asked for */
    int32_t last;          /* 1: the sequence ends with this token */
    br_stop_reason stop;   /* meaningful when last */
} br_token;

typedef struct br_top_logprob {
    int32_t token;
    uint32_t logprob;
} br_top_logprob;

/* Queues a request. Errors: BR_E_ARG (token out of range, empty prompt, bad settings or score_from), BR_E_NOT_FOUND (adapter),
 * BR_E_CAPACITY (prompt and max_new can never fit), BR_E_LIMIT (queue full: poll first). Never blocks. */
br_status br_submit(br_engine *engine, const br_request *request, uint64_t *id);
br_status br_abort(br_engine *engine, uint64_t id); /* its last token, BR_STOP_ABORT, is handed out by the next poll */
/* Runs one step if no token is waiting, then hands out up to n_max tokens, oldest first. *done 1 when no request and no token
 * is left. A request that ends without a token (error, abort) hands out token -1 with last = 1; see br_request_error.
 * Errors: of the step itself; the engine can then only be closed. */
br_status br_poll(br_engine *engine, br_token *out, int32_t n_max, int32_t *n_out, int32_t *done);
/* Status and sentence of a request that ended with BR_STOP_ERROR; static until the next poll. */
br_status br_request_error(const br_engine *engine, uint64_t id, const char **sentence);
/* Alternatives of the token handed out last for this request, best first. */
int32_t br_top_logprobs(const br_engine *engine, uint64_t id, br_top_logprob out[BR_TOP_LOGPROBS_MAX]);

/* ---- adapters that change while the engine runs ------------------------------------------------------------------------
 * With swap_rank every adapter name has two places at fixed addresses, of that rank on every map that can carry an adapter. A new version
 * comes into the one that is not live, is checked whole, and goes live between two steps:
 *   br_swap_begin, br_swap_chunk .., br_swap_end   (or br_swap_from_folder, br_swap_from_memory)   then br_swap_commit.
 * Until the commit every error drops what came in, and the live version goes on. Names are independent of each other. Nothing computed
 * under one version is reused under another. All calls belong to the engine's thread, between polls. Errors of all: BR_E_NOT_FOUND (no
 * such adapter, or the engine was opened without swap_rank), BR_E_ARG (not a call of this state; the sentence names both). */
typedef enum br_swap_state {
    BR_SWAP_IDLE = 0,
    BR_SWAP_RECEIVING = 1,
    BR_SWAP_PREPARED = 2, /* whole and checked */
    BR_SWAP_DRAINING = 3, /* committed as soon as the sequences of the version before have ended */
    BR_SWAP_STATE_COUNT = 4
} br_swap_state;

typedef enum br_swap_answer {
    BR_SWAP_DONE = 0,
    BR_SWAP_COMMITTED = 1, /* the version is live, by this call or before it */
    BR_SWAP_WAITS = 2,     /* draining */
    BR_SWAP_BUSY = 3,      /* with BR_E_LIMIT: sequences run on the other place, or draining; poll and ask again */
    BR_SWAP_REFUSED = 4    /* with the error */
} br_swap_answer;

typedef enum br_swap_flag {
    BR_SWAP_INITIAL = 1, /* version 0: every B may be zero */
    BR_SWAP_RESYNC = 2   /* after a restart of the sender: any version may follow */
} br_swap_flag;

/* What becomes of the requests of the version before, waiting ones included. */
typedef enum br_swap_mode {
    BR_SWAP_DRAIN = 0,      /* the commit waits until they have ended; br_submit under this adapter is BR_E_LIMIT until then */
    BR_SWAP_STOP = 1,       /* they end with BR_STOP_ABORT */
    BR_SWAP_FINISH_OLD = 2, /* they keep their version; the next begin is busy until they have ended */
    BR_SWAP_IN_FLIGHT = 3   /* they go on under the new version: what they computed so far is the old one's, they are not certified */
} br_swap_mode;

/* The tensors of a version, in order, bf16, row-major. They are known by their number. */
enum { BR_SWAP_NAME_BYTES = 160 };
typedef struct br_swap_tensor {
    char name[BR_SWAP_NAME_BYTES]; /* as PEFT writes it */
    int32_t is_b;                  /* 0: A (rank, n_in); 1: B (n_out, rank) */
    int32_t n_row, n_col;
    int32_t expert;                /* -1: not of an expert */
} br_swap_tensor;

/* An adapter that starts empty has a manifest of all maps at swap_rank, another one that of its folder. The digest is over names, kinds,
 * shapes, alpha and rslora: two sides that agree on it mean the same numbers. */
br_status br_swap_manifest(const br_engine *engine, const char *adapter, int64_t *n_tensor, br_digest *digest);
br_status br_swap_tensor_at(const br_engine *engine, const char *adapter, int64_t tensor, br_swap_tensor *out); /* BR_E_ARG: no such number */
br_status br_swap_find(const br_engine *engine, const char *adapter, const char *tensor_name, int64_t *tensor); /* BR_E_NOT_FOUND */
/* Another manifest, from the text of an adapter_config.json whose target_modules is a list. Idle only. Errors: as for a folder. */
br_status br_swap_define(br_engine *engine, const char *adapter, const char *json, size_t n);

/* version: that of the live one + 1, 0 for an adapter that is empty (a folder is version 0), any with BR_SWAP_RESYNC. One that is live
 * already is answered COMMITTED and changes nothing; its digest tells whether the same bytes are meant. answer is never NULL. */
br_status br_swap_begin(br_engine *engine, const char *adapter, int64_t version, uint32_t flags, br_swap_answer *answer);
/* Tensors in any order, one after the other, each in chunks of rising offset without gaps; bytes are read before the call returns.
 * BR_E_FORMAT: out of range, overlapping, a gap, a tensor twice or left in the middle, NaN or Inf. */
br_status br_swap_chunk(br_engine *engine, const char *adapter, int64_t tensor, uint64_t offset, const void *bytes, size_t n);
/* The same without a copy through the host: a whole tensor in GPU memory of another process of this machine, which has to keep it as it is
 * until the end was answered. Only on cuda. BR_E_NOT_FOUND, BR_E_UNSUPPORTED: cannot be opened here; send the bytes, begin anew. BR_E_FORMAT:
 * the tensor leaves the allocation, or its offset is odd. */
enum { BR_IPC_HANDLE_BYTES = 64 };
typedef struct br_ipc {
    uint8_t handle[BR_IPC_HANDLE_BYTES]; /* of the allocation, as CUDA makes it */
    uint64_t offset;                     /* bytes from its base to the tensor */
} br_ipc;
int32_t br_swap_takes_ipc(const br_engine *engine); /* 1: on cuda, with swap_rank */
br_status br_swap_ipc(br_engine *engine, const char *adapter, int64_t tensor, const br_ipc *from);
/* The other side, which needs no engine: of an address of its own in GPU memory from cudaMalloc. Errors as above. */
br_status br_ipc_export(const void *gpu_memory, br_ipc *out);
/* BR_E_FORMAT: a tensor is missing, no B has an effect, or, on cuda, which looks at values where they lie, NaN or Inf. BR_E_MISMATCH: the
 * digest (that of br_engine_adapter_digest) is another. */
br_status br_swap_end(br_engine *engine, const char *adapter, br_digest expected);
/* BR_E_LIMIT: in-flight, and a request has BR_VERSION_RUN_MAX versions already; the version stays prepared. */
br_status br_swap_commit(br_engine *engine, const char *adapter, int64_t version, br_swap_mode mode, br_swap_answer *answer);
br_status br_swap_abort(br_engine *engine, const char *adapter); /* also when there is nothing to abort */
/* begin to end in one call. From a folder the manifest is the folder's from then on. value (n_tensor) of the manifest, 2-byte aligned;
 * expected NULL: any digest. After DONE the version is prepared. */
br_status br_swap_from_folder(br_engine *engine, const char *adapter, const char *dir, int64_t version, uint32_t flags, br_swap_answer *answer);
/* On cuda a value may lie in the host's memory or on the GPU; from page-locked memory it is read without a copy on the host. */
br_status br_swap_from_memory(br_engine *engine, const char *adapter, const uint16_t *const *value, int64_t n_tensor,
                              const br_digest *expected, int64_t version, uint32_t flags, br_swap_answer *answer);

typedef struct br_swap_status {
    br_swap_state state;
    int64_t live_version, version; /* -1: none; version: the one that comes in */
    br_digest live_digest, digest; /* digest: from prepared on */
    int64_t n_tensor, n_whole;     /* of the one that comes in */
    int32_t n_live, n_old;         /* requests that have not ended: on the live version; on the one before */
} br_swap_status;
br_status br_swap_status_of(const br_engine *engine, const char *adapter, br_swap_status *out);

/* Which versions sampled the tokens of a request, in order. */
enum { BR_VERSION_RUN_MAX = 16 };
typedef struct br_version_run {
    int64_t version; /* -1: base, or an engine without swap_rank */
    int32_t n_tok;
} br_version_run;
typedef struct br_versions {
    br_version_run run[BR_VERSION_RUN_MAX];
    int32_t n_run;
    int32_t certified; /* 1: one version from the first prompt token on */
} br_versions;
/* From submit until the poll after its last token, as br_request_error. BR_E_NOT_FOUND: no such request. */
br_status br_request_versions(const br_engine *engine, uint64_t id, br_versions *out);

/* ---- jobs: one a verb ------------------------------------------------------------------------------------------------- */

/* What every job reports. Arrays belong to the report and are freed by br_report_free. */
typedef struct br_report {
    int64_t n_seq, n_tok;  /* sequences; tokens generated or scored */
    int64_t n_error;       /* requests that ended in error; br_last_error() then says how many and which first, though the status is BR_OK */
    double seconds;        /* of the run itself, loading excluded */
    double forward_seconds; /* score: of these, from a pack's tokens to its log-probs on the host; files are not in it */
    int32_t peak_seqs;      /* generate: the most sequences that one step held */
    br_digest weights_digest, contract_digest, logprob_digest; /* 0: the job has none */
    int32_t n_adapter;
    const char **adapter_name;
    br_digest *adapter_digest;
    /* parity and verify */
    int64_t n_compared, n_differ;
    int64_t first_seq, first_pos; /* first differing place, -1 when none; the text says which sequence that is */
    int64_t max_ulp;
    double k1, k3; /* mean log-ratio and mean exp(r) - 1 - r */
    char *text;    /* lines for the reader: errors by request, tables, histograms; may be NULL */
    char *summary; /* the one line that says it all, of a job that words it itself; may be NULL */
} br_report;

void br_report_free(br_report *report);

/* Told about progress between steps: done of total units; return nonzero to stop the job with BR_E_ABORTED. */
typedef int (*br_progress)(void *context, const char *what, int64_t done, int64_t total);
typedef struct br_watch {
    br_progress call; /* NULL: silent */
    void *context;
} br_watch;

typedef struct br_init_options {
    const char *preset, *out_dir;
    uint64_t seed;
    int32_t lora_rank;        /* 0: no adapter */
    const char *lora_out_dir; /* with lora_rank; NULL: no adapter */
    uint64_t lora_seed;
    int32_t lora_only;        /* 1: leave the checkpoint as it is, write the adapter only */
    int32_t recipe;           /* 1: generated.json in place of tensors, which are then made at each opening; the large presets, and
                               * adapters of checkpoints in this form, have it always */
} br_init_options;
br_status br_job_init(const br_init_options *options, const br_watch *watch, br_report *report);

typedef struct br_generate_options {
    br_engine_options engine;
    const char *prompts_path, *out_path;
    br_sampling sampling;   /* for lines that do not set their own */
    int32_t n_sample;       /* samples a prompt [1] */
    uint64_t seed;
    uint64_t shuffle_seed;  /* 0: arrival in file order */
    int32_t resume;         /* continue after a killed run of the same settings */
    int32_t commit_every;   /* sequences a commit [1] */
} br_generate_options;
br_status br_job_generate(const br_generate_options *options, const br_watch *watch, br_report *report);

typedef struct br_score_options {
    br_engine_options engine; /* model, adapters, backend, threads; the rest is not used */
    const char *in_path, *out_path; /* rollout .h5, or .jsonl of prompts */
    int32_t pack_tokens;            /* rows scored at once [2048] */
    const char *adapter_override;   /* NULL: each sequence's own; else a loaded name or "base" */
} br_score_options;
br_status br_job_score(const br_score_options *options, const br_watch *watch, br_report *report);

br_status br_job_parity(const char *path_a, const char *path_b, br_report *report);
/* The same of files of any stacks, as bitroll.importers write them, or ours: no digests are compared, and the report's text says what
 * simple mistake would explain the differences. BR_E_ARG: the files hold log-probs of different kinds or temperatures, or nothing that can be
 * compared: no sequence of one name, no text that begins alike, no token with a log-prob in both. */
br_status br_job_parity_foreign(const char *path_a, const char *path_b, br_report *report);

typedef struct br_verify_options {
    br_engine_options engine; /* model_dir NULL: replay the hash chain only */
    const char *path;
    int32_t n_recompute;      /* sequences to compute again, drawn by seed [4; of a ledger all]; of a ledger as many a step */
    uint64_t seed;
} br_verify_options;
/* A rollout file, or the ledger of a training run (bitroll_ledger.h). With a model, of a ledger the steps are computed again whose adapter
 * is among those given, scored only: a run on a GPU can be checked on any machine. */
br_status br_job_verify(const br_verify_options *options, const br_watch *watch, br_report *report);

/* Lines are handed out one at a time, sorted by (sequence, position, layer, stage). */
typedef void (*br_line)(void *context, const char *line);
typedef struct br_dump_options {
    br_engine_options engine;
    const char *in_path;          /* rollout .h5 or prompts .jsonl */
    int32_t through_engine;       /* 0: the scoring forward; 1: the paged engine, the given tokens forced */
    int32_t choices;              /* 1: also the chosen experts and index sets */
    int32_t seq, pos_min, pos_max; /* -1: all */
    const char *adapter_override;
} br_dump_options;
br_status br_job_dump(const br_dump_options *options, br_line line, void *context, br_report *report);

/* Times the ops at the widths of K3.1, a line a row. */
typedef struct br_bench_options {
    const char *backend;  /* NULL: "cuda"; "oracle" with scale "tiny" only, a dry run */
    int32_t n_thread;     /* of the oracle [all cores] */
    const char *scale;    /* NULL: "full"; "tiny": small shapes */
    const char *rows;     /* NULL: all; else the beginnings of their names, commas between */
    const char *peer;     /* command of the peer's process; "none"; NULL: the script of the repository where it is at hand */
    const char *csv_path; /* NULL: none; else appended to */
    const char *commit;   /* text of that column; NULL: empty */
    int32_t quick;        /* 1: fewer and shorter repetitions */
    int32_t list;         /* 1: only the names of the rows */
} br_bench_options;
/* n_seq of the report: rows; n_error: rows that failed, BR_E_MISMATCH then. BR_E_DEVICE, BR_E_UNSUPPORTED: no usable GPU. */
br_status br_job_bench(const br_bench_options *options, br_line line, void *context, br_report *report);

br_status br_job_inspect(const char *model_dir, br_line line, void *context); /* model_dir NULL: limits, layouts, constants */
br_status br_job_digest(const char *dir, br_line line, void *context, br_report *report);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
