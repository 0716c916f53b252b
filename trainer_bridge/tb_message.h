/* tb_message: what travels in frames. One table says of every type its number, name, direction and fields; encoder, decoder, the
 * tests and `bitroll-worker --protocol` all walk that table.
 *
 * Layer: trainer_bridge; includes base and bitroll.h. Pure functions over bytes. Every field begins at a multiple of 4: a text is its
 * length, its bytes and zeros up to the next multiple; words are their count and themselves; the rest of a payload may be one field.
 * Decoding copies nothing: texts and words point into the payload, which the caller keeps, at a multiple of 4 in memory. */
#ifndef TB_MESSAGE_H
#define TB_MESSAGE_H

#include "tb_frame.h"

typedef enum tb_type {
    TB_HELLO = 1, TB_HELLO_ACK = 2, TB_HEARTBEAT = 3, TB_ERROR = 4, TB_BYE = 5,
    TB_MANIFEST = 16, TB_MANIFEST_ACK = 17, TB_MANIFEST_REQ = 18,
    TB_W_BEGIN = 32, TB_W_CHUNK = 33, TB_W_END = 34, TB_W_PREPARED = 35, TB_W_NACK = 36, TB_W_COMMIT = 37, TB_W_COMMITTED = 38,
    TB_W_ABORT = 39, TB_W_IPC = 40,
    TB_GEN_REQ = 48, TB_GEN_PART = 49, TB_GEN_DONE = 50, TB_GEN_ABORT = 51, TB_GEN_RELEASE = 52, TB_GEN_HELD = 53,
    TB_GEN_DISCARD = 54,
    TB_CREDIT = 64, TB_PAUSE = 65, TB_RESUME = 66, TB_SLEEP = 67, TB_WAKE = 68,
    TB_SCORE_REQ = 80, TB_SCORE_DONE = 81,
    TB_STATS_REQ = 96, TB_STATS = 97
} tb_type;

enum {
    TB_TEXT_MAX = 1024,
    TB_WORDS_MAX = 1 << 20,  /* tokens or log-probs of one message */
    TB_PART_MAX = 1 << 16,   /* of one GEN_PART or GEN_HELD */
    TB_RUN_MAX = 64,         /* runs of equal weight versions in one response */
    TB_TENSOR_MAX = 1 << 21, /* of a manifest: three maps, A and B, of 900 experts in 90 layers are below 500,000 */
    TB_DIM_MAX = 4
};

typedef struct tb_text { const char *p; uint32_t n; } tb_text; /* no zero at the end */
typedef struct tb_words { const uint32_t *p; uint32_t n; } tb_words;
typedef struct tb_bytes { const unsigned char *p; uint64_t n; } tb_bytes;
typedef struct tb_tensors { tb_bytes raw; uint32_t n; } tb_tensors; /* walked by tb_tensor_next */

typedef enum tb_role { TB_TRAINER = 1, TB_WORKER = 2 } tb_role;
enum { TB_CAN_GENERATE = 1, TB_CAN_SCORE = 2, TB_CAN_SWAP = 4, TB_CAN_CERTIFY = 8, TB_CAN_IPC = 16, TB_CAN_FULL = 32 };
typedef struct tb_hello {
    uint32_t role, abi, can, pid, rank;
    uint64_t live_version;
    br_digest contract, config, base, tokenizer, adapter; /* adapter: of the live version */
    tb_text build, alpha; /* alpha: as %.17g. rank and alpha, trainer: of the adapters that it will send; worker: of one that starts empty;
                             rank 0: nothing is said of them */
} tb_hello;

typedef struct tb_error { uint32_t code, fatal; tb_text text; } tb_error;
typedef struct tb_bye { tb_text text; } tb_bye;

typedef enum tb_dtype { TB_BF16 = 1, TB_F32 = 2, TB_F8_E4M3 = 3, TB_U8 = 4 } tb_dtype;
typedef enum tb_kind { TB_BASE = 1, TB_LORA_A = 2, TB_LORA_B = 3 } tb_kind;
typedef struct tb_tensor {
    tb_text name; /* as on Hugging Face, of an adapter as PEFT has it */
    uint32_t dtype, kind, n_dim;
    uint64_t dim[TB_DIM_MAX];
    uint64_t n_bytes; /* computed; may be 0 */
} tb_tensor;
typedef struct tb_manifest_req { tb_text adapter; } tb_manifest_req; /* answered by the worker's own MANIFEST */
typedef struct tb_manifest { tb_tensors tensors; } tb_manifest;
typedef struct tb_manifest_ack { uint64_t hash, n_bytes; uint32_t n_tensor; } tb_manifest_ack; /* hash: XXH64 of MANIFEST's payload */

enum { TB_INITIAL = 1, TB_RESYNC = 2 };            /* flags of W_BEGIN; INITIAL of adapters only */
enum { TB_W_ADAPTER = 1, TB_W_FULL = 2, TB_W_KIND_COUNT = 2 };
typedef struct tb_w_begin {
    uint32_t flags, kind;
    uint64_t base_version, n_bytes, manifest; /* the header's version is counted by kind: of the adapter, or of the base */
    tb_text adapter;
} tb_w_begin;
typedef struct tb_w_chunk { uint64_t offset; tb_bytes data; } tb_w_chunk; /* the header's subject: index of the tensor */
/* In place of W_CHUNK where the worker CAN_IPC: the whole tensor lies in GPU memory of the trainer, as br_ipc_export names it, and stays as it
 * is until W_PREPARED. A worker that cannot open it answers W_NACK; then the bytes are sent. */
typedef struct tb_w_ipc { uint64_t offset; tb_bytes handle; } tb_w_ipc;
typedef struct tb_w_digest { br_digest digest; } tb_w_digest;           /* W_END, W_PREPARED */
typedef struct tb_w_nack { uint32_t code; tb_text text; } tb_w_nack;
typedef struct tb_w_committed { uint64_t step; br_digest digest; } tb_w_committed; /* digest: of the live memory; of full weights, as staged */

enum { TB_CERTIFY = 1 }; /* flags of GEN_REQ: log-prob bits stay with the worker until GEN_RELEASE */
typedef struct tb_gen_req {
    uint32_t flags, sample;
    uint64_t seed;
    uint32_t temperature, min_p; /* bits of binary32 */
    uint64_t top_p;              /* bits of binary64 */
    uint32_t top_k, max_new, min_new, ignore_eos;
    tb_text uid, adapter;        /* adapter empty: base */
    tb_words stop, prompt;
} tb_gen_req;
typedef struct tb_gen_part {
    uint32_t first;          /* place of token[0] in the response */
    tb_words token, logprob; /* logprob: as many, or none when certifying */
    br_digest digest;        /* XXH3-128 of the bits of these log-probs, sent or not */
} tb_gen_part;
typedef struct tb_gen_done {
    uint32_t stop, status, n_tok, certified; /* certified 0: versions changed on the way */
    uint64_t version_begin, version_end;
    br_digest digest;                        /* of the bits of all log-probs */
    tb_words runs;                           /* three words a run: version low, high, tokens */
    tb_text text;                            /* of an error */
} tb_gen_done;
typedef struct tb_gen_release { br_digest certificate; } tb_gen_release; /* digest of the trainer's bits of this request */
typedef struct tb_gen_held { uint32_t first, n_tok, equal; tb_words logprob; } tb_gen_held; /* equal: the certificate is our digest */

typedef struct tb_credit { uint32_t requests; uint64_t bytes; } tb_credit; /* granted on top of what was before */
typedef enum tb_pause_mode { TB_DRAIN = 0, TB_STOP = 1, TB_FINISH_OLD = 2, TB_IN_FLIGHT = 3, TB_PAUSE_MODE_COUNT = 4 } tb_pause_mode;
typedef struct tb_pause { uint32_t mode; } tb_pause;

typedef struct tb_score_req {
    uint32_t first_asked, temperature; /* first_asked: position of the first token whose log-prob is asked for; 0 is as 1 */
    tb_text adapter;                   /* empty: base */
    tb_words token;
} tb_score_req;
/* logprob: one a token, BR_UNSCORED before first_asked; none when status is not BR_OK. */
typedef struct tb_score_done { uint32_t status; tb_words logprob; tb_text text; } tb_score_done;

typedef struct tb_stats {
    uint64_t live_version, n_done, n_tok;
    uint32_t n_held, n_running, n_unreleased, weights, paused, mode, asleep; /* weights: tb_weights_state */
    uint64_t base_version; /* 0: as loaded */
    br_digest adapter;     /* of live_version: in the answer to STATS_REQ computed now from the memory that forwards read */
    br_digest base;        /* of base_version */
} tb_stats;

typedef union tb_message {
    tb_hello hello;
    tb_error error;
    tb_bye bye;
    tb_manifest_req manifest_req;
    tb_manifest manifest;
    tb_manifest_ack manifest_ack;
    tb_w_begin w_begin;
    tb_w_chunk w_chunk;
    tb_w_ipc w_ipc;
    tb_w_digest w_digest;
    tb_w_nack w_nack;
    tb_w_committed w_committed;
    tb_gen_req gen_req;
    tb_gen_part gen_part;
    tb_gen_done gen_done;
    tb_gen_release gen_release;
    tb_gen_held gen_held;
    tb_credit credit;
    tb_pause pause;
    tb_score_req score_req;
    tb_score_done score_done;
    tb_stats stats;
} tb_message;

typedef enum tb_field_kind { TB_END, TB_U32, TB_U64, TB_DIGEST, TB_TEXT, TB_WORDS, TB_REST, TB_TENSORS } tb_field_kind;
typedef struct tb_field {
    tb_field_kind kind;
    uint32_t at;       /* in the message's struct */
    uint64_t min, max; /* of a number; of the length of anything else */
    const char *name;
} tb_field;

typedef struct tb_spec {
    tb_type type;
    const char *name;
    uint32_t from; /* roles that may send it */
    uint32_t paid; /* 1: its payload counts against the receiver's byte credit */
    const tb_field *field; /* ends with TB_END; NULL: no payload */
} tb_spec;

extern const tb_spec tb_specs[];
extern const int32_t tb_spec_count;
const tb_spec *tb_spec_of(uint32_t type); /* NULL: no such type */
tb_code tb_spec_none(uint32_t type); /* TB_BAD_TYPE, with the sentence */
const char *tb_type_name(uint32_t type);  /* "type?" when there is none */
void tb_spec_bounds(const tb_spec *spec, uint64_t *min, uint64_t *max); /* payload bytes, from the fields */
void tb_spec_line(const tb_spec *spec, char *out, size_t n);            /* a line of the protocol's table */

/* May it be encoded: TB_BAD_TYPE; TB_BAD_PAYLOAD with the field's name, out of its bounds or without its bytes. */
tb_code tb_message_check(tb_type type, const tb_message *message);
/* Adds the payload to `out`. A message that tb_message_check refuses is the caller's fault and asserts. BR_E_NOMEM through out->failed. */
void tb_message_encode(tb_type type, const tb_message *message, tb_buffer *out);
/* TB_BAD_PAYLOAD with the field's name, TB_BAD_TYPE. `n` bytes at `payload`, a multiple of 4 in memory. */
tb_code tb_message_decode(uint32_t type, const void *payload, uint64_t n, tb_message *out);

#ifdef __GNUC__
#pragma GCC visibility push(default) /* for the trainer's bridge library */
#endif
/* Builds tb_tensors.raw. Through raw->failed: BR_E_ARG, more than TB_DIM_MAX dimensions or a name not of 1 to TB_TEXT_MAX bytes; BR_E_NOMEM. */
void tb_tensor_add(tb_buffer *raw, const tb_tensor *tensor);
/* Hands out the next tensor of a list that was decoded; *at starts at 0. Returns 0 at the end. */
int tb_tensor_next(const tb_tensors *tensors, uint64_t *at, tb_tensor *out);
#ifdef __GNUC__
#pragma GCC visibility pop
#endif
uint64_t tb_dtype_bytes(uint32_t dtype); /* 0: no such dtype */

tb_text tb_text_of(const char *text); /* of a string */
int tb_text_equal(tb_text a, tb_text b);

#endif
