/* libFuzzer target: any bytes as a prompts file. What is accepted must keep its promises: every range of prompts.h, every
 * uid once. */
#include "br_config.h"
#include "prompts.h"
#include "sampling.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_line(const prompt_line *l) {
    const br_sampling *s = &l->sampling;
    size_t n_uid = strlen(l->uid);
    BR_ASSERT(n_uid >= 1 && n_uid <= BR_UID_BYTES_MAX);
    BR_ASSERT(!l->adapter || (strlen(l->adapter) >= 1 && strcmp(l->adapter, "base") != 0));
    BR_ASSERT(l->n_token >= 1 && l->n_token <= BR_POSITION_MAX);
    for (int32_t i = 0; i < l->n_token; i++)
        BR_ASSERT(l->token[i] >= 0 && l->token[i] < BR_VOCAB_MAX);
    BR_ASSERT(s->temperature == 0 || (s->temperature >= 0x1p-10f && s->temperature <= 0x1p10f));
    BR_ASSERT(!signbit(s->temperature) && !signbit(s->min_p) && s->min_p <= 1 && s->top_p >= 0 && s->top_p <= 1);
    BR_ASSERT(s->top_k >= 0 && s->max_new >= 1 && s->min_new >= 0 && s->n_stop >= 0 && s->n_stop <= BR_STOP_MAX);
    BR_ASSERT((l->n_sample > 0) == ((l->has & PROMPT_HAS_N) != 0));
    BR_ASSERT(l->seed == 0 || (l->has & PROMPT_HAS_SEED));
    (void)sampling_check(s, BR_VOCAB_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    br_sampling defaults = br_sampling_default();
    prompts *p;
    if (prompts_parse("fuzz", size ? (const char *)data : "", size, &defaults, &p) != BR_OK)
        return 0;
    BR_ASSERT(prompts_count(p) >= 1);
    for (int64_t i = 0; i < prompts_count(p); i++) {
        check_line(prompts_at(p, i));
        for (int64_t k = 0; k < i; k++)
            BR_ASSERT(strcmp(prompts_at(p, i)->uid, prompts_at(p, k)->uid) != 0);
    }
    prompts_close(p);
    return 0;
}
