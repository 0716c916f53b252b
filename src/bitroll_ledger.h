/* bitroll_ledger: the proof ledger of a training run: what was sampled, its log-probs three times, and a chain over all of it.
 *
 * Public, C99. One HDF5 file a run, written as the run goes: a step is on the disk when br_ledger_append returns, and a killed run leaves
 * the steps before it. `bitroll verify FILE` recomputes everything from the file. Three log-probs of every sampled token, as bits:
 *   rollout   what the engine sampled with
 *   again     the trainer's forward without gradients, in another packing
 *   update    the trainer's forward whose backward makes the update, taken before the optimizer's step
 *
 * What is chained. Each sequence has five leaves, XXH3-128 of its bytes, little-endian, one after the other without gaps:
 *   sequence  uid (256 bytes, zeros behind its end), sample u32, group i32, stop i32, temperature f32, version_begin i64, version_end i64,
 *             reward f64, advantage f64
 *   tokens    prompt_len i32, n_tok i32, ids i32 (n_tok), mask u8 (n_tok)
 *   rollout, again, update   u32 (n_tok)
 * A step's record holds, per leaf, XXH3-128 over the step's leaves in order (16 bytes each, lo before hi), and the counts; its bytes are
 * those of br_ledger_record before `link`. Record 0 is the run: "training-ledger" and a zero, the format's version i64 (1), contract,
 * base_rollout, base_trainer, XXH3-128 of the config text, its length i64: 96 bytes.
 *   link 0 = SHA-256(32 zero bytes || record 0)        link of a step = SHA-256(link before || record of the step)
 * The root is the last link. No times, hosts or process numbers are in it: a run that is repeated, or killed and resumed, has the same. */
#ifndef BITROLL_LEDGER_H
#define BITROLL_LEDGER_H

#include "bitroll.h"

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

enum { BR_LEDGER_LINK_BYTES = 32, BR_LEDGER_CONFIG_BYTES_MAX = 1 << 20 };

typedef struct br_ledger br_ledger;

typedef struct br_ledger_run {
    br_digest contract;                    /* br_contract_digest of both sides */
    br_digest base_rollout, base_trainer;  /* of the base weights, as each side has them */
    const char *config;                    /* the text of the run's configuration, kept as it is; n_config bytes, no end needed */
    int64_t n_config;                      /* at most BR_LEDGER_CONFIG_BYTES_MAX */
} br_ledger_run;

/* One text: a prompt, then sampled tokens, and between them what an environment said. */
typedef struct br_ledger_seq {
    const char *uid;                       /* names the prompt; 1..BR_UID_BYTES_MAX bytes */
    uint32_t sample;                       /* < 2^24 */
    int32_t group;                         /* texts that share a baseline; >= 0 */
    int32_t prompt_len, n_tok;             /* 1 <= prompt_len <= n_tok <= 2^20 */
    int32_t stop;                          /* br_stop_reason */
    float temperature;
    int64_t version_begin, version_end;    /* weight versions that the first and the last token were sampled under */
    double reward, advantage;
    const int32_t *token;                  /* (n_tok) */
    const uint8_t *mask;                   /* (n_tok) 1: sampled by the policy, never in the prompt */
    const uint32_t *rollout, *again, *update; /* (n_tok) bits; BR_UNSCORED where mask is 0, never where it is 1 */
} br_ledger_seq;

typedef struct br_ledger_step {
    int64_t step;                          /* that of the step before + 1; a run may begin anywhere */
    int64_t version;                       /* of the weights that the trainer's forwards ran on */
    br_digest adapter_rollout, adapter_trainer; /* of the memory that each side's forward read */
    const br_ledger_seq *seq;              /* (n_seq) */
    int64_t n_seq;                         /* >= 0 */
} br_ledger_step;

/* One link of the chain. No padding: the bytes before `link` are what is chained. */
typedef struct br_ledger_record {
    int64_t step, version;
    br_digest adapter_rollout, adapter_trainer;
    br_digest sequences, tokens, rollout, again, update; /* over the leaves */
    int64_t n_seq, n_tok;
    int64_t n_compared, n_differ;          /* sampled tokens; those whose three log-probs are not all the same bits */
    int64_t n_differ_again, n_differ_update; /* tokens where that array is not the rollout's bits */
    int64_t first_seq, first_pos;          /* first differing place: sequence of the step, position in it; -1: none */
    double k1, k3;                         /* update against rollout, d = update - rollout: mean of -d, mean of exp(d) - 1 - d */
    double reward_mean;
    uint8_t link[BR_LEDGER_LINK_BYTES];
} br_ledger_record;

/* Writes a new file; one that is at `path` lives until the new one can be read. *out is NULL on error. Errors: BR_E_ARG, BR_E_LIMIT,
 * BR_E_IO, BR_E_NOMEM. The caller closes *out; nothing of path and run is kept. */
br_status br_ledger_create(const char *path, const br_ledger_run *run, br_ledger **out);
/* Goes on with the file of an equal run, finished or killed: keeps its first n_step steps, drops the others. Besides: BR_E_NOT_FOUND,
 * BR_E_FORMAT, BR_E_MISMATCH (another run), BR_E_ARG (fewer steps are there). */
br_status br_ledger_resume(const char *path, const br_ledger_run *run, int64_t n_step, br_ledger **out);
/* How many steps the file at `path` has, finished or killed. Errors: BR_E_NOT_FOUND, BR_E_FORMAT, BR_E_IO, BR_E_NOMEM. */
br_status br_ledger_steps(const char *path, int64_t *n_step);
/* Appends a step; log-probs that differ are counted and recorded, not refused. What step points to is read before the call returns; record
 * may be NULL. BR_E_NAN: a sampled token without a log-prob or with a NaN, a reward that is not finite. BR_E_ARG: another field out of range.
 * Nothing is appended then. After BR_E_IO (full disk) the ledger can only be closed; what was appended before is intact. */
br_status br_ledger_append(br_ledger *ledger, const br_ledger_step *step, br_ledger_record *record);
int64_t br_ledger_step_count(const br_ledger *ledger);
void br_ledger_root(const br_ledger *ledger, uint8_t link[BR_LEDGER_LINK_BYTES]); /* the last link */
/* Packs the file and frees the ledger whatever happens; when packing fails the file stays as it was. NULL is a no-op. */
br_status br_ledger_close(br_ledger *ledger);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
