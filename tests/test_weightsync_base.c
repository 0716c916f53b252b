/* Other base weights from memory: staged whole, checked, put in place when nothing runs; after any error the old ones go on. */
#include "br_weights.h"
#include "config_json.h"
#include "swap_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char other[300];
static br_digest digest[2]; /* of pico as it is loaded, and of the other one */
static rig_text want[2][SWAP_N];
static rig_request request[SWAP_N];

static void make(void) {
    br_report report;
    swap_models_make();
    snprintf(other, sizeof other, "%s/other", test_tmp_dir());
    const br_init_options init = {.preset = "pico", .out_dir = other, .seed = 77};
    CHECK_OK(br_job_init(&init, NULL, &report));
    digest[1] = report.weights_digest;
    br_report_free(&report);
    rig_requests(&swap_of.pico, 9, SWAP_N, 4, 60, 8, request);
    for (int k = 0; k < 2; k++) {
        br_engine_options options = rig_options(&swap_of.pico);
        options.model_dir = k ? other : swap_of.pico.dir;
        rig_generate(&options, request, NULL, SWAP_N, want[k]);
    }
    ck_assert(memcmp(want[0], want[1], sizeof want[0]) != 0);
}

typedef struct rig {
    br_engine *engine;
    br_base *base;
    br_config config;
    br_weights *source; /* of `other` */
} rig;

static void open_rig(rig *r) {
    const br_engine_options options = rig_options(&swap_of.pico);
    CHECK_OK(br_engine_open(&options, &r->engine));
    digest[0] = br_engine_weights_digest(r->engine);
    CHECK_OK(br_base_open(r->engine, swap_of.pico.dir, &r->base));
    CHECK_OK(br_config_read(other, &r->config));
    CHECK_OK(br_weights_open(other, &r->config, &r->source));
    ck_assert_int_eq(br_base_count(r->base), br_weights_count(r->source));
}

static void close_rig(rig *r) {
    br_weights_close(r->source);
    br_base_close(r->base);
    br_engine_close(r->engine);
}

/* All tensors but `skip`, the last one first, each in pieces; the first value of `spoil` is NaN. */
static void send(const rig *r, int64_t skip, int64_t spoil) {
    static const unsigned char nan[2] = {0xc0, 0x7f};
    CHECK_OK(br_base_begin(r->base));
    for (int64_t i = br_base_count(r->base) - 1; i >= 0; i--) {
        const br_tensor *t = br_weights_at(r->source, i);
        br_base_tensor ours;
        int64_t tensor;
        CHECK_OK(br_base_find(r->base, t->name, &tensor));
        CHECK_OK(br_base_tensor_at(r->base, tensor, &ours));
        ck_assert(strcmp(ours.name, t->name) == 0 && ours.n_byte == t->n_byte && ours.n_dim == t->n_dim);
        for (size_t at = 0, piece; i != skip && at < t->n_byte; at += piece) {
            const unsigned char *bytes = (const unsigned char *)t->data + at;
            const size_t left = t->n_byte - at, most = at ? 5000 : sizeof nan;
            piece = left < most ? left : most;
            CHECK_OK(br_base_chunk(r->base, tensor, at, i == spoil && at == 0 ? nan : bytes, piece));
        }
    }
}

static void expect_texts(br_engine *e, int k, const char *what) {
    for (int i = 0; i < SWAP_N; i++) {
        br_token token[16];
        uint64_t id;
        int32_t n, done = 0, n_seen = 0;
        const br_request r = rig_br_request(&request[i]);
        CHECK_OK(br_submit(e, &r, &id));
        while (!done) {
            CHECK_OK(br_poll(e, token, 16, &n, &done));
            for (int32_t t = 0; t < n; t++, n_seen++)
                if (token[t].token != want[k][i].token[token[t].position] || token[t].logprob != want[k][i].logprob[0][token[t].position])
                    ck_abort_msg("%s: request %d differs at %d", what, i, token[t].position);
        }
        ck_assert_int_eq(n_seen, want[k][i].n_tok - request[i].n_prompt);
    }
}

START_TEST(the_new_weights_are_those_of_a_cold_start) {
    rig r;
    open_rig(&r);
    expect_texts(r.engine, 0, "as loaded"); /* and leaves its cache */
    send(&r, -1, -1);
    expect_texts(r.engine, 0, "while new ones come in");
    CHECK_OK(br_base_end(r.base, digest[1]));
    expect_texts(r.engine, 0, "prepared");
    CHECK_OK(br_base_commit(r.base));
    ck_assert(br_digest_equal(br_engine_weights_digest(r.engine), digest[1]));
    expect_texts(r.engine, 1, "after the commit");
    CHECK_OK(br_engine_reload(r.engine, swap_of.pico.dir, &digest[0])); /* from a folder and back again */
    expect_texts(r.engine, 0, "back again");
    close_rig(&r);
}
END_TEST

START_TEST(the_commit_waits_for_what_runs) {
    rig r;
    uint64_t id;
    br_token token[64];
    int32_t n, done = 0;
    open_rig(&r);
    const br_request one = rig_br_request(&request[0]);
    send(&r, -1, -1);
    CHECK_OK(br_base_end(r.base, digest[1]));
    CHECK_OK(br_submit(r.engine, &one, &id));
    CHECK_FAILS(br_base_commit(r.base), BR_E_LIMIT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "1 requests run"));
    while (!done)
        CHECK_OK(br_poll(r.engine, token, 64, &n, &done));
    CHECK_OK(br_base_commit(r.base));
    expect_texts(r.engine, 1, "after the wait");
    close_rig(&r);
}
END_TEST

START_TEST(what_is_refused_leaves_the_old_ones) {
    rig r;
    br_base *none;
    br_base_tensor t;
    int64_t tensor;
    const uint16_t x = 0;
    open_rig(&r);
    CHECK_FAILS(br_base_open(r.engine, "/nonexistent", &none), BR_E_NOT_FOUND);
    CHECK_FAILS(br_base_tensor_at(r.base, br_base_count(r.base), &t), BR_E_ARG);
    CHECK_FAILS(br_base_find(r.base, "model.layers.99.none", &tensor), BR_E_NOT_FOUND);
    CHECK_FAILS(br_base_chunk(r.base, 0, 0, &x, 2), BR_E_ARG); /* nothing begun */
    CHECK_FAILS(br_base_end(r.base, digest[1]), BR_E_ARG);
    CHECK_FAILS(br_base_commit(r.base), BR_E_ARG);
    br_base_abort(r.base);
    CHECK_OK(br_base_begin(r.base));
    CHECK_FAILS(br_base_begin(r.base), BR_E_ARG);
    static const struct { int64_t tensor; uint64_t offset; size_t n; } bad[] = {{-1, 0, 2}, {1 << 20, 0, 2}, {0, 2, 2}, {0, UINT64_MAX, 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_FAILS(br_base_chunk(r.base, bad[i].tensor, bad[i].offset, &x, bad[i].n), BR_E_FORMAT);
        CHECK_FAILS(br_base_chunk(r.base, 0, 0, &x, 2), BR_E_ARG); /* it was dropped */
        CHECK_OK(br_base_begin(r.base));
    }
    CHECK_OK(br_base_chunk(r.base, 0, 0, &x, 2));
    CHECK_FAILS(br_base_chunk(r.base, 0, 0, &x, 2), BR_E_FORMAT); /* doubled */
    send(&r, 3, -1);
    CHECK_FAILS(br_base_end(r.base, digest[1]), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "0 of ") != NULL, "%s", br_last_error());
    send(&r, -1, 5);
    CHECK_FAILS(br_base_end(r.base, digest[1]), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "NaN") != NULL, "%s", br_last_error());
    send(&r, -1, -1);
    CHECK_FAILS(br_base_end(r.base, digest[0]), BR_E_MISMATCH);
    CHECK_FAILS(br_base_commit(r.base), BR_E_ARG);
    send(&r, -1, -1);
    CHECK_OK(br_base_end(r.base, digest[1]));
    CHECK_FAILS(br_base_chunk(r.base, 0, 0, &x, 2), BR_E_ARG);
    br_base_abort(r.base);
    CHECK_FAILS(br_base_commit(r.base), BR_E_ARG);
    ck_assert(br_digest_equal(br_engine_weights_digest(r.engine), digest[0]));
    expect_texts(r.engine, 0, "after all that");
    close_rig(&r);
}
END_TEST

/* By its config.json: a checkpoint of recipes has no file of tensors to look at. */
START_TEST(another_model_is_refused) {
    char nano[300];
    br_report report;
    br_base *base;
    rig r;
    snprintf(nano, sizeof nano, "%s/nano", test_tmp_dir());
    const br_init_options init = {.preset = "nano", .out_dir = nano, .seed = 1, .recipe = 1};
    CHECK_OK(br_job_init(&init, NULL, &report));
    br_report_free(&report);
    open_rig(&r);
    CHECK_FAILS(br_base_open(r.engine, nano, &base), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "describes another model"));
    close_rig(&r);
}
END_TEST

Suite *test_weightsync_base_suite(void) {
    Suite *s = suite_create("weightsync_base");
    TCase *t = tcase_create("base");
    tcase_add_unchecked_fixture(t, make, NULL);
    tcase_set_timeout(t, 300);
    tcase_add_test(t, the_new_weights_are_those_of_a_cold_start);
    tcase_add_test(t, the_commit_waits_for_what_runs);
    tcase_add_test(t, what_is_refused_leaves_the_old_ones);
    tcase_add_test(t, another_model_is_refused);
    suite_add_tcase(s, t);
    return s;
}
