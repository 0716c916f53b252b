/* The engine's own promises: what ends a text, aborts, refusals with a clear sentence, a NaN that stays with its request, no
 * allocation after open, and every allocation or read that can fail failing once. */
#include "br_file.h"
#include "br_mem.h"
#include "engine_rig.h"
#include "safetensors.h"
#include "test_support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static rig_model pico;
static char poisoned_dir[256];
enum { POISON_TOKEN = 77 };

/* A copy of the checkpoint in which the embedding of one token is 3e38: the first sum of squares over it overflows. */
static void make_poisoned(void) {
    char command[1024];
    snprintf(poisoned_dir, sizeof poisoned_dir, "%s/poisoned", test_tmp_dir());
    snprintf(command, sizeof command, "cp -r %s %s", pico.dir, poisoned_dir);
    ck_assert_int_eq(system(command), 0);
    int n_patched = 0;
    for (int shard = 1; shard < 100; shard++) {
        for (int of = shard; of < 100; of++) {
            char path[512];
            st_file file;
            snprintf(path, sizeof path, "%s/model-%05d-of-%05d.safetensors", poisoned_dir, shard, of);
            if (!br_file_exists(path))
                continue;
            CHECK_OK(st_open(path, &file));
            for (int64_t i = 0; i < file.n_entry; i++) {
                if (!strstr(file.entry[i].name, "embed_tokens.weight"))
                    continue;
                const int64_t width = file.entry[i].dim[1];
                int fd = open(path, O_WRONLY);
                ck_assert_int_ge(fd, 0);
                for (int64_t d = 0; d < width; d++) {
                    const uint16_t huge = 0x7f61;
                    ck_assert_int_eq(pwrite(fd, &huge, 2, (off_t)(file.entry[i].begin + 2 * (uint64_t)(POISON_TOKEN * width + d))), 2);
                }
                close(fd);
                n_patched++;
            }
            st_close(&file);
        }
    }
    ck_assert_int_eq(n_patched, 1);
}

static void make_models(void) {
    rig_model_make(&pico, "pico");
    make_poisoned();
}

static rig_request *some_requests(int n) {
    rig_request *request = rig_alloc((size_t)n, sizeof *request);
    rig_requests(&pico, 21, n, 5, 40, 12, request);
    for (int i = 0; i < n; i++)
        for (int32_t t = 0; t < request[i].n_prompt; t++)
            if (request[i].prompt[t] == POISON_TOKEN)
                request[i].prompt[t] = 78;
    return request;
}

START_TEST(a_nan_ends_its_request_only) {
    enum { N = 7, BAD = 3, AT = 4 };
    rig_request *request = some_requests(N);
    rig_text *want = rig_alloc(N, sizeof *want), *got = rig_alloc(N, sizeof *got);
    br_engine_options options = rig_options(&pico);
    options.model_dir = poisoned_dir;
    request[BAD] = request[0];
    snprintf(request[BAD].uid, sizeof request[BAD].uid, "bad");
    rig_generate(&options, request, NULL, N, want);
    request[BAD].prompt[AT] = POISON_TOKEN;
    for (int32_t chunk = 3; chunk < 40; chunk += 18) {
        options.max_seqs = 3;
        options.chunk_tokens = chunk;
        rig_generate(&options, request, NULL, N, got);
        ck_assert_int_eq(got[BAD].error, BR_E_NAN);
        ck_assert_msg(strstr(got[BAD].sentence, "position 4") && strstr(got[BAD].sentence, "layer 0") &&
                      strstr(got[BAD].sentence, "norm_attn"), "%s", got[BAD].sentence);
        got[BAD] = want[BAD];
        rig_expect_equal(request, want, got, N, "neighbours of a NaN");
    }
    free(request);
    free(want);
    free(got);
}
END_TEST

/* Scored tokens in front of the fault come, whatever the chunks are; the row that reads the bad token gives none. */
START_TEST(a_nan_ends_a_scored_request_where_it_is) {
    enum { AT = 30, FROM = 9, LONG = 50 };
    int32_t prompt[LONG];
    const char *sentence;
    br_engine_options options = rig_options(&pico);
    options.model_dir = poisoned_dir;
    options.max_seqs = 3;
    for (int32_t t = 0; t < LONG; t++)
        prompt[t] = t == AT ? POISON_TOKEN : t + 1;
    for (int32_t chunk = 3; chunk < 100; chunk += 18) {
        br_engine *engine;
        br_token token[64];
        int32_t n, done = 0, next = FROM;
        uint64_t id;
        options.chunk_tokens = chunk;
        CHECK_OK(br_engine_open(&options, &engine));
        const br_request r = {.uid = "x", .prompt = prompt, .n_prompt = LONG, .sampling = br_sampling_default(), .score_from = FROM};
        CHECK_OK(br_submit(engine, &r, &id));
        while (!done) {
            CHECK_OK(br_poll(engine, token, 64, &n, &done));
            for (int32_t k = 0; k < n; k++) {
                const int ends = next == AT + 1;
                ck_assert(token[k].position == next && token[k].token == (ends ? -1 : prompt[next]) && token[k].last == ends);
                next++;
            }
        }
        ck_assert_int_eq(next, AT + 2);
        ck_assert_int_eq(br_request_error(engine, id, &sentence), BR_E_NAN);
        ck_assert_msg(strstr(sentence, "position 30") && strstr(sentence, "norm_attn"), "%s", sentence);
        br_engine_close(engine);
    }
}
END_TEST

/* Tokens of one request until it ends. */
static int32_t run_one(br_engine *engine, const br_request *request, int32_t *token, br_stop_reason *stop) {
    uint64_t id;
    int32_t n = 0, n_out, done = 0;
    br_token out[16];
    CHECK_OK(br_submit(engine, request, &id));
    while (!done) {
        CHECK_OK(br_poll(engine, out, 16, &n_out, &done));
        for (int32_t k = 0; k < n_out; k++) {
            token[n++] = out[k].token;
            if (out[k].last)
                *stop = out[k].stop;
        }
    }
    return n;
}

START_TEST(what_ends_a_text) {
    br_engine *engine;
    br_stop_reason stop;
    int32_t free_run[64], token[64];
    const int32_t prompt[] = {3, 1, 4, 1, 5, 9, 2, 6};
    const br_engine_options options = rig_options(&pico);
    br_request request = {.uid = "x", .prompt = prompt, .n_prompt = 8, .sampling = br_sampling_default()};
    CHECK_OK(br_engine_open(&options, &engine));
    request.sampling.max_new = 20;
    request.sampling.ignore_eos = 1;
    ck_assert_int_eq(run_one(engine, &request, free_run, &stop), 20);
    ck_assert_int_eq(stop, BR_STOP_LENGTH);
    int32_t at = 5; /* a token that does not come before */
    for (int32_t i = 0; i < at; i++)
        if (free_run[i] == free_run[at]) {
            at++;
            i = -1;
        }
    request.sampling.n_stop = 1;
    request.sampling.stop[0] = free_run[at];
    ck_assert_int_eq(run_one(engine, &request, token, &stop), at + 1);
    ck_assert_int_eq(stop, BR_STOP_TOKEN);
    ck_assert_int_eq(memcmp(token, free_run, (size_t)(at + 1) * sizeof *token), 0);
    request.sampling.min_new = at + 2; /* now it comes too early, and the text goes on as before */
    ck_assert_int_gt(run_one(engine, &request, token, &stop), at + 1);
    ck_assert_int_eq(memcmp(token, free_run, (size_t)(at + 2) * sizeof *token), 0);
    br_engine_close(engine);
}
END_TEST

START_TEST(an_abort_ends_a_request_at_once) {
    br_engine *engine;
    uint64_t id[2];
    int32_t n, done;
    br_token token[16];
    const char *sentence;
    const int32_t prompt[] = {7, 7, 7};
    const br_engine_options options = rig_options(&pico);
    br_request request = {.uid = "x", .prompt = prompt, .n_prompt = 3, .sampling = br_sampling_default()};
    request.sampling.ignore_eos = 1;
    CHECK_OK(br_engine_open(&options, &engine));
    CHECK_OK(br_submit(engine, &request, &id[0]));
    request.sample = 1;
    CHECK_OK(br_submit(engine, &request, &id[1]));
    CHECK_OK(br_poll(engine, token, 16, &n, &done));
    CHECK_OK(br_abort(engine, id[0]));
    CHECK_FAILS(br_abort(engine, id[0]), BR_E_NOT_FOUND);
    int n_aborted = 0, n_full = 0;
    while (!done) {
        CHECK_OK(br_poll(engine, token, 16, &n, &done));
        for (int32_t k = 0; k < n; k++) {
            if (token[k].request == id[0] && token[k].last && token[k].stop == BR_STOP_ABORT && token[k].token == -1) {
                n_aborted++;
                ck_assert_int_eq(br_request_error(engine, id[0], &sentence), BR_E_ABORTED);
            }
            n_full += token[k].request == id[1] && token[k].last && token[k].stop == BR_STOP_LENGTH;
        }
    }
    ck_assert_int_eq(n_aborted, 1);
    ck_assert_int_eq(n_full, 1);
    CHECK_FAILS(br_abort(engine, 12345), BR_E_NOT_FOUND);
    br_engine_close(engine);
}
END_TEST

START_TEST(bad_requests_are_refused_with_a_sentence) {
    br_engine *engine;
    uint64_t id;
    int32_t prompt[200] = {3, 1, 256};
    br_engine_options options = rig_options(&pico);
    options.kv_pages = 2;
    br_request request = {.uid = "x", .prompt = prompt, .n_prompt = 3, .sampling = br_sampling_default()};
    CHECK_OK(br_engine_open(&options, &engine));
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_ARG);
    ck_assert_msg(strstr(br_last_error(), "256") && strstr(br_last_error(), "position 2"), "%s", br_last_error());
    request.n_prompt = 0;
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_ARG);
    prompt[2] = 1;
    request.n_prompt = 130;
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_CAPACITY);
    ck_assert_msg(strstr(br_last_error(), "a prompt of 130 tokens and a response of 16 need kv_pages 3, there are 2"), "%s", br_last_error());
    request.n_prompt = 100;
    request.sampling.max_new = 28; /* two whole pages */
    CHECK_OK(br_submit(engine, &request, &id));
    request.sampling.max_new = 29;
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_CAPACITY);
    request.sampling.max_new = 1 << 20; /* no number of pages helps */
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_CAPACITY);
    ck_assert_msg(strstr(br_last_error(), "exceed the longest sequence"), "%s", br_last_error());
    request.sampling.max_new = 16;
    request.n_prompt = 3;
    request.adapter = "nobody";
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "nobody"));
    request.adapter = NULL;
    request.uid = "";
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_ARG);
    request.uid = "x";
    request.sampling.top_p = -1;
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_ARG);
    request.sampling.top_p = 1;
    request.sample = 1u << 24;
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_ARG);
    br_engine_close(engine);
}
END_TEST

/* A prompt behind max_position_embeddings once reached the ops, which broke the whole engine. */
START_TEST(a_prompt_behind_the_last_position_is_refused) {
    enum { LONG = 4200 };
    br_engine *engine;
    uint64_t id;
    int32_t *prompt = rig_alloc(LONG, sizeof *prompt);
    br_engine_options options = rig_options(&pico);
    options.max_tok = 2 * LONG;
    options.kv_pages = 2 * LONG / 64;
    br_request request = {.uid = "x", .prompt = prompt, .n_prompt = LONG, .sampling = br_sampling_default()};
    CHECK_OK(br_engine_open(&options, &engine));
    CHECK_FAILS(br_submit(engine, &request, &id), BR_E_CAPACITY);
    br_engine_close(engine);
    free(prompt);
}
END_TEST

START_TEST(bad_options_are_refused_with_a_sentence) {
    br_engine *engine;
    static const struct { size_t at; int32_t value; } bad[] = {
        {offsetof(br_engine_options, max_seqs), -1}, {offsetof(br_engine_options, chunk_tokens), -5}, {offsetof(br_engine_options, kv_pages), -1},
        {offsetof(br_engine_options, state_every), 65}, {offsetof(br_engine_options, preempt_every), -1},
                {offsetof(br_engine_options, n_thread), 1000},
        {offsetof(br_engine_options, max_tok), -1},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        br_engine_options options = rig_options(&pico);
        memcpy((char *)&options + bad[i].at, &bad[i].value, sizeof bad[i].value);
        CHECK_FAILS(br_engine_open(&options, &engine), BR_E_ARG);
        ck_assert_ptr_null(engine);
    }
    br_engine_options options = rig_options(&pico);
    options.backend = "abacus";
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_UNSUPPORTED);
    options.backend = NULL;
    options.model_dir = "/nonexistent";
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_NOT_FOUND);
}
END_TEST

START_TEST(nothing_is_allocated_after_open) {
    br_engine *engine;
    br_token token[16];
    int32_t n, done = 0;
    uint64_t id;
    const br_engine_options options = rig_options(&pico);
    rig_request *request = some_requests(6);
    CHECK_OK(br_engine_open(&options, &engine));
    const long before = br_mem_alloc_count();
    for (int i = 0; i < 6; i++) {
        const br_request r = rig_br_request(&request[i]);
        CHECK_OK(br_submit(engine, &r, &id));
    }
    while (!done)
        CHECK_OK(br_poll(engine, token, 16, &n, &done));
    ck_assert_int_eq(br_mem_alloc_count(), before);
    br_engine_close(engine);
    free(request);
}
END_TEST

/* The guard itself: an allocation in a sealed phase ends the process and names the phase. */
START_TEST(an_allocation_in_a_sealed_phase_is_caught) {
    void *block;
    br_mem_seal("test phase");
    (void)br_mem_alloc(&block, 8, "nothing");
}
END_TEST

START_TEST(every_allocation_of_open_may_fail) {
    br_engine *engine = NULL;
    const br_engine_options options = rig_options(&pico);
    br_status status = BR_E_NOMEM;
    long n = 1;
    for (; status != BR_OK; n++) {
        ck_assert_int_lt(n, 100000);
        br_mem_fail_nth(n);
        status = br_engine_open(&options, &engine);
        br_mem_fail_nth(0);
        ck_assert_msg(status == BR_OK || (status == BR_E_NOMEM && !engine), "allocation %ld: %s: %s", n, br_status_name(status), br_last_error());
    }
    ck_assert_int_gt(n, 10);
    br_engine_close(engine);
}
END_TEST

START_TEST(every_read_of_open_may_fail) {
    br_engine *engine = NULL;
    const br_engine_options options = rig_options(&pico);
    br_status status = BR_E_IO;
    long n = 1;
    for (; status != BR_OK; n++) {
        ck_assert_int_lt(n, 1000);
        br_file_fail_nth_read(n);
        status = br_engine_open(&options, &engine);
        br_file_fail_nth_read(0);
        ck_assert_msg(status == BR_OK || (status == BR_E_IO && !engine), "read %ld: %s: %s", n, br_status_name(status), br_last_error());
    }
    ck_assert_int_gt(n, 3);
    br_engine_close(engine);
}
END_TEST

Suite *test_engine_suite(void) {
    Suite *suite = suite_create("engine");
    TCase *tcase = tcase_create("promises");
    tcase_set_timeout(tcase, 300);
    tcase_add_unchecked_fixture(tcase, make_models, NULL);
    tcase_add_test(tcase, a_nan_ends_its_request_only);
    tcase_add_test(tcase, a_nan_ends_a_scored_request_where_it_is);
    tcase_add_test(tcase, what_ends_a_text);
    tcase_add_test(tcase, an_abort_ends_a_request_at_once);
    tcase_add_test(tcase, bad_requests_are_refused_with_a_sentence);
    tcase_add_test(tcase, a_prompt_behind_the_last_position_is_refused);
    tcase_add_test(tcase, bad_options_are_refused_with_a_sentence);
    tcase_add_test(tcase, nothing_is_allocated_after_open);
    tcase_add_test_raise_signal(tcase, an_allocation_in_a_sealed_phase_is_caught, 6);
    tcase_add_test(tcase, every_allocation_of_open_may_fail);
    tcase_add_test(tcase, every_read_of_open_may_fail);
    suite_add_tcase(suite, tcase);
    return suite;
}
