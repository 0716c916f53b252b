/* Made-up records; see fake_rollout.h. */
#include "fake_rollout.h"
#include "receipt.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

rollout_meta fake_meta(const char *producer, const char *stamp) {
    rollout_meta meta = {
        .run_uid = {11, 12},
        .weights_digest = {21, 22},
        .contract_digest = {31, 32},
        .config_digest = {41, 0x8000000000000000ull},
        .has_entropy = 1,
        .n_top = FAKE_TOP,
    };
    snprintf(meta.producer, sizeof meta.producer, "%s", producer);
    snprintf(meta.producer_stamp, sizeof meta.producer_stamp, "%s", stamp);
    snprintf(meta.backend, sizeof meta.backend, "oracle");
    return meta;
}

/* Log-probs of all kinds that a file must carry untouched: -0, subnormals, -Inf, and ordinary ones. */
static uint32_t some_bits(uint64_t x) {
    static const uint32_t rare[] = {0x80000000u, 0x00000000u, 0x80000001u, 0x807fffffu, 0xff800000u, 0xc2f00001u};
    x = test_mix(x);
    return x % 8 == 0 ? rare[(x >> 8) % 6] : 0xbf000000u + (uint32_t)(x % 0x01ffffffu);
}

static void fill_slots(fake_seq *f, uint64_t seed, int32_t begin, int32_t end) {
    for (int32_t t = begin; t < end; t++) {
        uint64_t x = seed * 4096 + (uint64_t)t * 8;
        f->logprob[t] = some_bits(x);
        f->logprob_raw[t] = some_bits(x + 1);
        f->logprob_kept[t] = some_bits(x + 2);
        f->entropy[t] = some_bits(x + 3) & 0x7fffffffu;
        for (int k = 0; k < FAKE_TOP; k++) {
            f->top_token[t * FAKE_TOP + k] = (int32_t)(test_mix(x + 4) % 500) + k;
            f->top_logprob[t * FAKE_TOP + k] = some_bits(x + 5);
        }
    }
}

void fake_seal(const rollout_meta *meta, fake_seq *f) {
    f->seq.token = f->token;
    f->seq.logprob = f->logprob;
    f->seq.logprob_raw = f->logprob_raw;
    f->seq.logprob_kept = f->logprob_kept;
    f->seq.entropy = meta->has_entropy ? f->entropy : NULL;
    f->seq.mask = f->mask;
    f->seq.top_token = meta->n_top ? f->top_token : NULL;
    f->seq.top_logprob = meta->n_top ? f->top_logprob : NULL;
    f->seq.uid_hash = br_hash_xxh64(f->seq.uid, strlen(f->seq.uid));
    CHECK_OK(receipt_make(meta, &f->seq));
}

void fake_make(const rollout_meta *meta, int i, fake_seq *f) {
    uint64_t seed = test_mix((uint64_t)i + 77);
    memset(f, 0, sizeof *f);
    int32_t n_prompt = 1 + (int32_t)(seed % 20), n = n_prompt + 1 + (int32_t)(seed / 32 % 27);
    f->seq = (rollout_seq){
        .prompt_index = (uint32_t)i / 2,
        .sample = (uint32_t)i % 2,
        .seed = seed,
        .adapter_digest = {seed ^ 5, seed ^ 6},
        .temperature = 0.5f + (float)(i % 3),
        .min_p = 0.01f * (float)(i % 2),
        .top_p = 0.9,
        .top_k = i % 5,
        .max_new = 27,
        .min_new = i % 2,
        .ignore_eos = i % 2,
        .n_stop = i % 3,
        .stop_token = {7, 8},
        .prompt_len = n_prompt,
        .n_tok = n,
        .stop = (uint8_t)(i % 4),
    };
    snprintf(f->seq.uid, sizeof f->seq.uid, "prompt-%d", i / 2);
    snprintf(f->seq.adapter, sizeof f->seq.adapter, "%s", i % 4 == 3 ? "math" : "base");
    for (int k = f->seq.n_stop; k < BR_STOP_MAX; k++)
        f->seq.stop_token[k] = -1;
    for (int32_t t = 0; t < FAKE_TOK_MAX; t++)
        f->logprob[t] = f->logprob_raw[t] = f->logprob_kept[t] = f->entropy[t] = BR_UNSCORED;
    for (int32_t t = 0; t < FAKE_TOK_MAX * FAKE_TOP; t++) {
        f->top_token[t] = -1;
        f->top_logprob[t] = BR_UNSCORED;
    }
    for (int32_t t = 0; t < n; t++) {
        f->token[t] = (int32_t)(test_mix(seed + (uint64_t)t) % 512);
        f->mask[t] = t >= n_prompt;
    }
    fill_slots(f, seed, n_prompt, n);
    fake_seal(meta, f);
}

void fake_score(const rollout_meta *meta, fake_seq *f) {
    fill_slots(f, f->seq.seed, 1, f->seq.prompt_len);
    for (int32_t t = 0; t < FAKE_TOK_MAX; t++)
        f->logprob_kept[t] = BR_UNSCORED;
    fake_seal(meta, f);
}

void fake_write(const char *path, const rollout_meta *meta, const int *order, int n, int score) {
    rollout_writer *w;
    fake_seq f;
    CHECK_OK(rollout_create(path, meta, &w));
    for (int k = 0; k < n; k++) {
        fake_make(meta, order ? order[k] : k, &f);
        if (score)
            fake_score(meta, &f);
        CHECK_OK(rollout_append(w, &f.seq));
        CHECK_OK(rollout_commit(w));
    }
    CHECK_OK(rollout_close(w));
}

const char *fake_path(const char *name) {
    static char path[8][512];
    char wanted[512];
    int i = 0;
    snprintf(wanted, sizeof wanted, "%s/%s", test_tmp_dir(), name);
    while (path[i][0] && strcmp(path[i], wanted) != 0)
        i++;
    ck_assert_int_lt(i, 7);
    strcpy(path[i], wanted);
    return path[i];
}

br_status fake_replay(const char *path, rollout_replay *out) {
    rollout_reader *r;
    memset(out, 0, sizeof *out);
    out->first_seq = -1;
    BR_TRY(rollout_open(path, &r));
    br_status status = rollout_replay_check(r, out);
    rollout_reader_close(r);
    return status;
}

static void expect_slots(const void *a, const void *b, size_t n, const char *what) {
    ck_assert_msg(!a == !b && (!a || memcmp(a, b, n) == 0), "%s differ", what);
}

void fake_expect_equal(const rollout_meta *meta, const rollout_seq *a, const rollout_seq *b) {
    rollout_seq x = *a, y = *b;
    size_t n = (size_t)a->n_tok, n_top = n * (size_t)meta->n_top * 4;
    ck_assert_int_eq(a->n_tok, b->n_tok);
    ck_assert_int_eq(a->prompt_len, b->prompt_len);
    ck_assert_str_eq(a->uid, b->uid);
    ck_assert_str_eq(a->adapter, b->adapter);
    expect_slots(a->token, b->token, n * 4, "tokens");
    expect_slots(a->logprob, b->logprob, n * 4, "log-probs");
    expect_slots(a->logprob_raw, b->logprob_raw, n * 4, "raw log-probs");
    expect_slots(a->logprob_kept, b->logprob_kept, n * 4, "kept log-probs");
    expect_slots(a->entropy, b->entropy, n * 4, "entropies");
    expect_slots(a->mask, b->mask, n, "masks");
    expect_slots(a->top_token, b->top_token, n_top, "alternatives");
    expect_slots(a->top_logprob, b->top_logprob, n_top, "log-probs of alternatives");
    x.token = y.token = x.top_token = y.top_token = NULL;
    x.logprob = x.logprob_raw = x.logprob_kept = x.entropy = x.top_logprob = NULL;
    y.logprob = y.logprob_raw = y.logprob_kept = y.entropy = y.top_logprob = NULL;
    x.mask = y.mask = NULL;
    ck_assert_msg(memcmp(&x, &y, sizeof x) == 0, "fields of '%s' sample %u differ", a->uid, a->sample);
}
