/* A device that fails in the middle of a job, at any call: the job ends with that error, what is in its file is whole, and going on
 * gives what would have come without the failure. And lanes of a device, which fail with it. */
#include "br_file.h"
#include "br_loaded.h"
#include "engine_rig.h"
#include "rollout_file.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PROMPTS = 6, SAMPLES = 2, SEQS = PROMPTS * SAMPLES, MAX_NEW = 7 };

static rig_model pico;
static char prompts_path[256], whole_path[256], scored_path[256];
static br_digest whole, scored; /* never failed */

static void path_of(char path[256], const char *name) {
    snprintf(path, 256, "%s/%s", test_tmp_dir(), name);
}

static br_status generate(const char *out, int32_t resume, br_digest *digest) {
    br_report report;
    br_generate_options options = {.engine = rig_options(&pico), .prompts_path = prompts_path, .out_path = out, .sampling = br_sampling_default(),
                                   .n_sample = SAMPLES, .seed = 5, .resume = resume, .commit_every = 1};
    options.sampling.max_new = MAX_NEW;
    options.sampling.ignore_eos = 1;
    options.engine.backend = "oracle";
    options.engine.max_seqs = 2; /* texts end at several times */
    const br_status status = br_job_generate(&options, NULL, &report);
    *digest = report.logprob_digest;
    br_report_free(&report);
    return status;
}

static br_status score(const char *out, br_digest *digest) {
    br_report report;
    br_score_options options = {.engine = rig_options(&pico), .in_path = whole_path, .out_path = out, .pack_tokens = 64};
    options.engine.backend = "oracle";
    const br_status status = br_job_score(&options, NULL, &report);
    *digest = report.logprob_digest;
    br_report_free(&report);
    return status;
}

static void make_inputs(void) {
    rig_model_make(&pico, "pico");
    path_of(prompts_path, "prompts.jsonl");
    path_of(whole_path, "whole.h5");
    path_of(scored_path, "scored.h5");
    FILE *file = fopen(prompts_path, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < PROMPTS; i++)
        fprintf(file, "{\"prompt\": [%d, 7, 9, %d]%s}\n", i + 1, 3 * i, i % 2 ? ", \"adapter\": \"a\"" : "");
    fclose(file);
    CHECK_OK(generate(whole_path, 0, &whole));
    CHECK_OK(score(scored_path, &scored));
}

/* Sequences of a file whose chain is whole; -1: no file, nothing had begun. */
static int64_t verified(const char *path) {
    br_report report;
    if (!br_file_exists(path))
        return -1;
    const br_verify_options options = {.path = path};
    CHECK_OK(br_job_verify(&options, NULL, &report));
    const int64_t n = report.n_seq;
    br_report_free(&report);
    return n;
}

static void expect_device_error(br_status status, long n) {
    ck_assert_msg(status == BR_E_DEVICE, "call %ld: %s: %s", n, br_status_name(status), br_last_error());
}

/* Calls that can fail while the model is opened. */
static long opening_calls(void) {
    br_loaded loaded;
    br_engine_options options = rig_options(&pico);
    options.backend = "oracle";
    CHECK_OK(br_loaded_open(&options, 64, 64, 0, &loaded));
    const br_device_count count = br_device_counted(loaded.device);
    br_loaded_close(&loaded);
    return (long)(count.n_upload + count.n_download + count.n_wait);
}

/* The first and the last call of the opening, the first one of the run, and from there every step-th. */
static long next_call(long n, long n_opening, long step) {
    return n == 1 ? n_opening : n == n_opening ? n + 1 : n + step;
}

START_TEST(generate_goes_on) {
    char path[256];
    br_digest digest;
    int64_t n_seq = -1, n_most = -1;
    br_status status = BR_E_DEVICE;
    const long n_opening = opening_calls();
    path_of(path, "fails.h5");
    for (long n = 1; status != BR_OK; n = next_call(n, n_opening, 7)) {
        ck_assert_int_lt(n, 100000);
        unlink(path);
        br_device_fail_nth(n);
        status = generate(path, 0, &digest);
        br_device_fail_nth(0);
        n_seq = verified(path);
        if (status == BR_OK)
            break;
        expect_device_error(status, n);
        ck_assert_int_lt(n_seq, SEQS);
        /* A file only where something was sampled, which the first step of the run has not done yet. */
        ck_assert_msg(n_seq < 0 || n > n_opening + 1, "call %ld of %ld until the model is open: a file of %lld", n, n_opening, (long long)n_seq);
        n_most = n_seq > n_most ? n_seq : n_most;
        CHECK_OK(generate(path, 1, &digest));
        ck_assert_int_eq(verified(path), SEQS);
        ck_assert_msg(br_digest_equal(digest, whole), "call %ld, %lld sequences were there: another digest", n, (long long)n_seq);
    }
    ck_assert_int_gt(n_most, SEQS / 2); /* some failed late */
}
END_TEST

/* It has no --resume: it leaves nothing, and is asked again. */
START_TEST(score_ends_with_the_error) {
    char path[256];
    br_digest digest;
    br_status status = BR_E_DEVICE;
    long late = 0;
    const long n_opening = opening_calls();
    path_of(path, "fails-t.h5");
    for (long n = 1; status != BR_OK; n = next_call(n, n_opening, 1)) {
        ck_assert_int_lt(n, 100000);
        unlink(path);
        br_device_fail_nth(n);
        status = score(path, &digest);
        br_device_fail_nth(0);
        if (status != BR_OK) {
            expect_device_error(status, n);
            ck_assert_int_eq(access(path, F_OK), -1);
            late += n > n_opening;
            CHECK_OK(score(path, &digest));
        }
        ck_assert(br_digest_equal(digest, scored));
        ck_assert_int_eq(verified(path), SEQS);
    }
    ck_assert_int_gt(late, 1);
}
END_TEST

/* An engine whose step failed can only be closed, and says so. */
START_TEST(a_failed_engine_stays_failed) {
    br_engine *engine;
    br_token token[8];
    int32_t n, done, prompt[3] = {1, 2, 3};
    uint64_t id;
    br_engine_options options = rig_options(&pico);
    options.backend = "oracle";
    CHECK_OK(br_engine_open(&options, &engine));
    const br_request r = {.uid = "x", .prompt = prompt, .n_prompt = 3, .sampling = br_sampling_default()};
    CHECK_OK(br_submit(engine, &r, &id));
    br_device_fail_nth(2);
    CHECK_FAILS(br_poll(engine, token, 8, &n, &done), BR_E_DEVICE);
    br_device_fail_nth(0);
    ck_assert_int_eq(n, 0);
    CHECK_FAILS(br_poll(engine, token, 8, &n, &done), BR_E_DEVICE);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "it can only be closed"));
    br_engine_close(engine);
}
END_TEST

/* ---- lanes ----------------------------------------------------------------------------------------------------------------- */

START_TEST(calls_of_a_lane_are_counted_with_its_device) {
    br_device *device, *lane, *second;
    br_mirror mirror;
    CHECK_OK(br_device_open("host", &device));
    CHECK_OK(br_device_lane_open(device, &lane));
    CHECK_OK(br_device_lane_open(lane, &second)); /* of the same device */
    ck_assert(lane != device && br_device_is_host(lane));
    ck_assert_str_eq(br_device_name(lane), br_device_name(device));
    CHECK_OK(br_mirror_open(second, 8, "eight bytes", &mirror));
    CHECK_OK(br_device_upload(lane, mirror.device, "1234567", 8));
    ck_assert_str_eq((char *)mirror.host, "1234567"); /* done at the call */
    CHECK_OK(br_device_upload(device, mirror.device, "abc", 4));
    char text[4];
    CHECK_OK(br_device_download(second, text, mirror.device, 4));
    ck_assert_str_eq(text, "abc");
    CHECK_OK(br_device_mark(lane, 0));
    CHECK_OK(br_device_reach(lane, 0));
    CHECK_OK(br_device_wait(lane));
    const br_device_count c = br_device_counted(device), of_lane = br_device_counted(second);
    ck_assert_mem_eq(&c, &of_lane, sizeof c);
    ck_assert(c.n_upload == 2 && c.upload_bytes == 12 && c.n_download == 1 && c.download_bytes == 4);
    ck_assert(c.n_wait == 1 && c.n_alloc == 1 && c.alloc_bytes == 8);
    br_mirror_close(second, &mirror);
    br_device_close(second);
    br_device_close(lane);
    br_device_close(device);
}
END_TEST

/* Whichever of the three the call was that failed. */
START_TEST(a_lane_fails_with_its_device) {
    for (int first = 0; first < 3; first++) {
        br_device *all[3], *other;
        char byte = 0;
        CHECK_OK(br_device_open("host", &all[0]));
        CHECK_OK(br_device_lane_open(all[0], &all[1]));
        CHECK_OK(br_device_lane_open(all[0], &all[2]));
        CHECK_OK(br_device_open("host", &other));
        br_device_fail_nth(2);
        CHECK_OK(br_device_upload(all[(first + 1) % 3], &byte, "x", 1));
        CHECK_FAILS(br_device_upload(all[first], &byte, "y", 1), BR_E_DEVICE);
        ck_assert_int_eq(byte, 'x');
        br_device_fail_nth(0);
        for (int i = 0; i < 3; i++) {
            CHECK_FAILS(br_device_upload(all[i], &byte, "y", 1), BR_E_DEVICE);
            CHECK_FAILS(br_device_wait(all[i]), BR_E_DEVICE);
        }
        CHECK_OK(br_device_wait(other));
        br_device_close(other);
        for (int i = 2; i >= 0; i--)
            br_device_close(all[i]);
    }
}
END_TEST

Suite *test_device_fails_suite(void) {
    Suite *suite = suite_create("device_fails");
    TCase *tcase = tcase_create("device_fails"), *lanes = tcase_create("lanes");
    tcase_add_unchecked_fixture(tcase, make_inputs, NULL);
    tcase_set_timeout(tcase, 120);
    tcase_add_test(tcase, generate_goes_on);
    tcase_add_test(tcase, score_ends_with_the_error);
    tcase_add_test(tcase, a_failed_engine_stays_failed);
    suite_add_tcase(suite, tcase);
    tcase_add_test(lanes, calls_of_a_lane_are_counted_with_its_device);
    tcase_add_test(lanes, a_lane_fails_with_its_device);
    suite_add_tcase(suite, lanes);
    return suite;
}
