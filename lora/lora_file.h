/* lora_file: adapter_config.json and the tensor names of an adapter, as PEFT writes them.
 *
 * Layer: lora; includes base, weights (names), io's JSON reads. A parser of outside files (fuzzed). Knows no tensor data.
 *
 * Names of tensors: "base_model.model." MODULE ".lora_A.weight" (rank, in) or ".lora_B.weight" (out, rank), MODULE being the
 * model's own path of the linear map, with or without its "language_model." prefix. Experts: "...experts.{e}.w1". Shared A:
 * "...experts.w1.lora_A.weight", without the expert's number, stands for the A of every expert of that layer.
 *
 * Patterns (rank_pattern, alpha_pattern) are PEFT's: the first key, in the order of the file, that matches MODULE as written
 * in the file, or its end after a '.'. Of the language of regular expressions the plain characters, '.', ".*", '\' before a
 * sign, a leading '^' and a closing '$' are read, all else is refused, so no key is taken for another. */
#ifndef LORA_FILE_H
#define LORA_FILE_H

#include "br_weights.h"

#include <jansson.h>

enum { LORA_CONFIG_BYTES_MAX = 1 << 22, LORA_PATTERN_MAX = 4096 };

typedef struct lora_peft {
    const char *what;          /* the file's name, for sentences; the caller's */
    json_t *root;              /* owns what the others point to */
    int32_t rank, rslora;
    double alpha;
    const json_t *rank_pattern, *alpha_pattern; /* objects; NULL: none */
    const json_t *targets;     /* list of names; NULL: an expression, or none: the tensors alone decide */
    int32_t targets_are_all;   /* nothing in the file takes modules away from the list */
    uint8_t *pattern_used;     /* (LORA_PATTERN_MAX * 2) rank keys, then alpha keys, in order */
} lora_peft;

br_status lora_peft_parse(const char *what, const char *text, size_t n, lora_peft *out);
void lora_peft_close(lora_peft *peft);

/* A MODULE, n bytes, not ended by 0. */
typedef struct lora_module {
    const char *text;
    size_t n;
} lora_module;

int32_t lora_peft_rank(const lora_peft *peft, lora_module module);
double lora_peft_alpha(const lora_peft *peft, lora_module module);
int lora_peft_is_target(const lora_peft *peft, lora_module module); /* peft->targets not NULL */
/* A pattern that no module asked for: its adapter is not the one that was trained. */
br_status lora_peft_check_patterns(const lora_peft *peft);
/* A target that names the router or the indexer, which carry no adapter here. */
br_status lora_peft_check_targets(const lora_peft *peft, const br_config *config);

typedef struct lora_key {
    br_class cls;
    int32_t layer, expert; /* expert 0 when shared */
    int32_t is_b, is_shared;
    lora_module module;    /* points into the name */
} lora_key;

/* Errors: BR_E_FORMAT, BR_E_UNSUPPORTED; the sentence names the tensor. */
br_status lora_key_parse(const char *what, const br_config *config, const char *tensor_name, lora_key *out);
/* MODULE of a map in the model's own spelling. Returns its length. */
size_t lora_module_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]);

#endif
