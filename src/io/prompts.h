/* prompts: a JSONL file of token-id prompts. Layer: io; includes base. A parser of outside files (fuzzed).
 *
 * A line: {"prompt": [ids], "uid"?: text, "adapter"?: text, "n"?, "seed"?, "temperature"?, "top_k"?, "top_p"?, "min_p"?,
 * "max_new"?, "min_new"?, "stop"?: [ids], "ignore_eos"?: bool}. uid defaults to the line number (0-based) as text. "seed" is
 * an integer up to 2^63 - 1, or text of decimal digits up to 2^64 - 1. "adapter": "base" and none are the same. null counts
 * as absent. Unknown or doubled keys, a uid twice, empty prompts, ids < 0, numbers out of range, control characters in names
 * are BR_E_FORMAT with the line number (1-based, as editors count). Blank lines are skipped but counted. A file without a
 * prompt is BR_E_FORMAT. Whether a setting suits the sampler and the vocabulary is the engine's check. */
#ifndef PROMPTS_H
#define PROMPTS_H
#include "br_status.h"

enum { PROMPT_HAS_N = 1, PROMPT_HAS_SEED = 2 };
typedef struct prompt_line {
    const char *uid, *adapter;  /* adapter NULL: base */
    const int32_t *token;
    int32_t n_token, n_sample;  /* n_sample 0 and seed 0 unless `has` says so */
    uint64_t seed;
    uint32_t has;               /* PROMPT_HAS_* */
    br_sampling sampling;       /* the defaults handed in, with the line's own fields over them */
} prompt_line;

typedef struct prompts prompts;
/* Errors: BR_E_FORMAT, BR_E_NOT_FOUND, BR_E_IO, BR_E_NOMEM. *out is NULL on error. */
br_status prompts_read(const char *path, const br_sampling *defaults, prompts **out);
br_status prompts_parse(const char *what, const char *text, size_t n, const br_sampling *defaults, prompts **out);
void prompts_close(prompts *p); /* NULL is a no-op */
int64_t prompts_count(const prompts *p);
const prompt_line *prompts_at(const prompts *p, int64_t i);
#endif
