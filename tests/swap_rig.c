/* Swaps of adapters for the suites of weightsync; see swap_rig.h. */
#include "swap_rig.h"

#include "br_mem.h"
#include "engine_parts.h"
#include "lora_file.h"
#include "model_parts.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NEW = 6 };

swap_models swap_of;

static void make_adapter(const char *path, uint64_t seed, int32_t rank, int32_t recipe) {
    br_report report;
    const br_init_options options = {.out_dir = swap_of.pico.dir, .lora_rank = rank, .lora_out_dir = path, .lora_seed = seed, .lora_only = 1,
                                     .recipe = recipe};
    CHECK_OK(br_job_init(&options, NULL, &report));
    br_report_free(&report);
}

/* A request that two of them answered alike could not tell which one it ran under. */
static void expect_apart(int v, const rig_text *other, const char *what, int u) {
    for (int i = 0; i < SWAP_N; i++)
        ck_assert_msg(memcmp(&swap_of.cold[v][i], &other[i], sizeof *other) != 0, "request %d: version %d gives what %s %d gives", i, v, what, u);
}

static void expect_all_apart(void) {
    for (int v = 0; v < SWAP_VERSIONS; v++) {
        expect_apart(v, swap_of.base, "the base beside version", v);
        for (int u = 0; u < v; u++)
            expect_apart(v, swap_of.cold[u], "version", u);
    }
}

void swap_models_make(void) {
    rig_model_make(&swap_of.pico, "pico");
    rig_requests(&swap_of.pico, 5, SWAP_N, 3, 90, MAX_NEW, swap_of.request);
    for (int i = 0; i < SWAP_N; i++)
        swap_of.request[i].adapter = 0;
    for (int v = 0; v < SWAP_VERSIONS; v++) {
        snprintf(swap_of.dir[v], sizeof swap_of.dir[v], "%s/version-%d", test_tmp_dir(), v);
        make_adapter(swap_of.dir[v], (uint64_t)(100 + v), v == SWAP_LOW ? SWAP_LOW_RANK : SWAP_RANK, 0);
        const br_adapter_source source = {"a", swap_of.dir[v]};
        br_engine_options options = rig_options(&swap_of.pico);
        options.adapter = &source;
        options.n_adapter = 1;
        rig_generate(&options, swap_of.request, NULL, SWAP_N, swap_of.cold[v]);
    }
    snprintf(swap_of.made_dir, sizeof swap_of.made_dir, "%s/made", test_tmp_dir());
    make_adapter(swap_of.made_dir, 55, SWAP_RANK, 1);
    br_engine_options options = rig_options(&swap_of.pico);
    rig_request plain[SWAP_N];
    memcpy(plain, swap_of.request, sizeof plain);
    for (int i = 0; i < SWAP_N; i++)
        plain[i].adapter = -1;
    rig_generate(&options, plain, NULL, SWAP_N, swap_of.base);
    expect_all_apart();
}

br_engine *swap_engine(const char *first) {
    return swap_engine_of_steps(first, 0);
}

br_engine *swap_engine_of_steps(const char *first, int32_t chunk_tokens) {
    br_engine *e;
    const br_adapter_source source[2] = {{"a", first}, swap_of.pico.adapter[1]};
    br_engine_options options = rig_options(&swap_of.pico);
    options.adapter = source;
    options.swap_rank = SWAP_RANK;
    options.max_seqs = 4;
    options.chunk_tokens = chunk_tokens;
    CHECK_OK(br_engine_open(&options, &e));
    return e;
}

void swap_prepare(br_engine *e, int v, int64_t version) {
    br_swap_answer answer;
    CHECK_OK(br_swap_from_folder(e, "a", swap_of.dir[v], version, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_DONE);
}

void swap_commit(br_engine *e, int64_t version, br_swap_mode mode, br_swap_answer wanted) {
    br_swap_answer answer;
    CHECK_OK(br_swap_commit(e, "a", version, mode, &answer));
    ck_assert_int_eq(answer, wanted);
}

static void take(br_engine *e, swap_run *r, int i, const br_token *token) {
    rig_text *text = &r->text[i];
    if (token->token >= 0) {
        const uint32_t bits[RIG_LOGPROBS] = {token->logprob, token->logprob_raw, token->logprob_kept};
        text->token[token->position] = token->token;
        for (int k = 0; k < RIG_LOGPROBS; k++)
            text->logprob[k][token->position] = bits[k];
        text->n_tok = token->position + 1;
    }
    if (!token->last)
        return;
    text->stop = token->stop;
    r->n_ended++;
    CHECK_OK(br_request_versions(e, token->request, &r->versions[i]));
}

int32_t swap_poll(br_engine *e, swap_run **r, int n_run) {
    br_token token[64];
    int32_t n, done;
    CHECK_OK(br_poll(e, token, 64, &n, &done));
    for (int32_t k = 0; k < n; k++)
        for (int j = 0; j < n_run; j++)
            for (int i = 0; i < SWAP_N; i++)
                if (r[j] && r[j]->id[i] == token[k].request)
                    take(e, r[j], i, &token[k]);
    return done;
}

void swap_start(br_engine *e, swap_run *r) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < SWAP_N; i++) {
        const br_request submitted = rig_br_request(&swap_of.request[i]);
        br_status status;
        r->text[i].n_tok = swap_of.request[i].n_prompt;
        while ((status = br_submit(e, &submitted, &r->id[i])) == BR_E_LIMIT) /* those that ended make room at the next poll */
            swap_poll(e, &r, 1);
        CHECK_OK(status);
    }
}

void swap_finish(br_engine *e, swap_run *r) {
    while (r->n_ended < SWAP_N)
        swap_poll(e, &r, 1);
}

void swap_expect_cold(const swap_run *r, int v, int64_t version, const char *what) {
    for (int i = 0; i < SWAP_N; i++) {
        const rig_text *got = &r->text[i], *want = &swap_of.cold[v][i];
        ck_assert_msg(got->stop == BR_STOP_ABORT ? got->n_tok <= want->n_tok : got->n_tok == want->n_tok && got->stop == want->stop,
                      "%s: request %d: %d tokens, stop %d; wanted %d, %d", what, i, got->n_tok, got->stop, want->n_tok, want->stop);
        for (int32_t p = swap_of.request[i].n_prompt; p < got->n_tok; p++)
            if (got->token[p] != want->token[p] || got->logprob[0][p] != want->logprob[0][p] || got->logprob[1][p] != want->logprob[1][p] ||
                got->logprob[2][p] != want->logprob[2][p])
                ck_abort_msg("%s: request %d position %d: token %d, bits %08x; wanted %d, %08x", what, i, p, got->token[p], got->logprob[0][p],
                             want->token[p], want->logprob[0][p]);
        const br_versions *versions = &r->versions[i];
        ck_assert_msg(versions->certified && versions->n_run == 1 && versions->run[0].version == version &&
                      versions->run[0].n_tok == got->n_tok - swap_of.request[i].n_prompt, "%s: request %d: versions", what, i);
    }
}

void swap_expect_live(br_engine *e, const char *what) {
    br_digest loaded, live;
    CHECK_OK(br_engine_adapter_digest(e, "a", &loaded));
    CHECK_OK(br_engine_adapter_live_digest(e, "a", &live));
    ck_assert_msg(br_digest_equal(loaded, live), "%s: the live memory has another digest", what);
}

static void add_addresses(br_hash_stream *stream, bi_adapter slot) {
    const void *const at[] = {slot.a.data, slot.b.data, slot.s};
    ck_assert(at[0] && at[1] && at[2]);
    br_hash_add(stream, at, sizeof at);
}

br_digest swap_addresses(const br_engine *e) {
    const br_model *model = e->loaded.model;
    br_hash_stream stream;
    br_expect map;
    int64_t i = 0;
    br_hash_begin(&stream);
    for (; br_weight_expect(&model->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++)
        for (int32_t slot = 0; slot < model->n_slot; slot++) {
            const br_model_matrix at = {.slot = slot, .cls = map.cls, .layer = map.layer, .expert = map.expert};
            const mla_weights *mla = &model->layer[map.layer].mla;
            add_addresses(&stream, map.cls == BR_W_MLA_KV_B ? model_absorbed_of(mla->lora_uk, &at) : model_adapter_of(model, &at));
            if (map.cls == BR_W_MLA_KV_B)
                add_addresses(&stream, model_absorbed_of(mla->lora_uv, &at));
        }
    ck_assert(i > 0 && model->n_slot > 0);
    return br_hash_end(&stream);
}

int swap_send(br_engine *e, swap_sender *s, int64_t n) {
    int64_t n_tensor;
    br_digest manifest;
    CHECK_OK(br_swap_manifest(e, "a", &n_tensor, &manifest));
    for (; n > 0 && s->next < n_tensor; n--, s->next++) {
        br_swap_tensor t;
        lora_key key;
        CHECK_OK(br_swap_tensor_at(e, "a", s->next, &t));
        CHECK_OK(lora_key_parse("test", &e->loaded.config, t.name, &key));
        const lora_pair pair = lora_pair_of(s->set, 0, key.cls, key.layer, key.expert);
        const size_t size = (size_t)t.n_row * (size_t)t.n_col * 2, cut = size / 3;
        const unsigned char *bytes = (const void *)(t.is_b ? pair.b : pair.a);
        CHECK_OK(br_swap_chunk(e, "a", s->next, 0, bytes, cut));
        CHECK_OK(br_swap_chunk(e, "a", s->next, cut, bytes + cut, size - cut));
    }
    return s->next == n_tensor;
}

void swap_open_sets(const br_engine *e, lora_set *set[SWAP_VERSIONS]) {
    for (int v = 0; v < SWAP_VERSIONS; v++) {
        const br_adapter_source source = {"a", swap_of.dir[v]};
        CHECK_OK(lora_open(&e->loaded.config, &source, 1, 0, &set[v]));
    }
}

void swap_begin_version(br_engine *e, int v, int64_t version) {
    char json[256];
    br_swap_answer answer;
    FILE *file;
    snprintf(json, sizeof json, "%s/adapter_config.json", swap_of.dir[v]);
    file = fopen(json, "r");
    ck_assert_ptr_nonnull(file);
    char text[4096];
    const size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    CHECK_OK(br_swap_define(e, "a", text, n));
    CHECK_OK(br_swap_begin(e, "a", version, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_DONE);
}

void swap_close_sets(lora_set *set[SWAP_VERSIONS]) {
    for (int v = 0; v < SWAP_VERSIONS; v++)
        lora_close(set[v]);
}
