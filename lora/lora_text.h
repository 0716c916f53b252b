/* lora_text: what the digest of an adapter is taken of (lora_digest.h), laid out once a plan: from version to version nothing of it changes
 * but the digests of the matrices. Layer: lora; includes base, weights (names). */
#ifndef LORA_TEXT_H
#define LORA_TEXT_H

#include "lora_plan.h"

typedef struct lora_text {
    unsigned char *bytes;
    uint32_t *at; /* (n_map) where the digests of a map are, by its place among those that the plan touches */
    size_t n;
} lora_text;

/* Room for any plan. */
br_status lora_text_open(const br_config *config, lora_text *out);
void lora_text_close(lora_text *text);
void lora_text_set(lora_text *text, const br_config *config, const lora_scale *plan);
/* Of A or B of the map that is number `touched`, from 0, among those of the plan. */
void lora_text_put(lora_text *text, int64_t touched, int is_b, br_digest digest);
br_digest lora_text_digest(const lora_text *text);

#endif
