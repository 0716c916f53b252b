/* What was broken once, by trying to break it: each test opens with the failure that it guards. All on pico. */
#include "br_file.h"
#include "br_mem.h"
#include "br_pool.h"
#include "engine_rig.h"
#include "rollout_file.h"
#include "test_support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static rig_model pico;
static char prompts_path[256];

static void path_of(char path[256], const char *name) {
    snprintf(path, 256, "%s/%s", test_tmp_dir(), name);
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
}

static void expect_text(const char *path, const char *text) {
    br_map map;
    CHECK_OK(br_file_map(path, &map));
    ck_assert_msg(map.n == strlen(text) && memcmp(map.bytes, text, map.n) == 0, "%s was written to", path);
    br_file_unmap(&map);
}

static const char prompts_text[] = "{\"prompt\": [1, 2, 3]}\n{\"prompt\": [4], \"adapter\": \"a\"}\n{\"prompt\": [5, 6]}\n";
enum { PROMPTS = 3, MAX_NEW = 5 };

static void make_inputs(void) {
    rig_model_make(&pico, "pico");
    path_of(prompts_path, "prompts.jsonl");
    write_text(prompts_path, prompts_text);
}

static br_generate_options generate_options(const char *prompts, const char *out) {
    br_generate_options options = {.engine = rig_options(&pico), .prompts_path = prompts, .out_path = out,
                                   .sampling = br_sampling_default()};
    options.sampling.max_new = MAX_NEW;
    options.sampling.ignore_eos = 1;
    options.engine.n_thread = 1;
    return options;
}

static br_status generate(const char *prompts, const char *out, int64_t *n_error) {
    br_report report;
    const br_generate_options options = generate_options(prompts, out);
    const br_status status = br_job_generate(&options, NULL, &report);
    *n_error = report.n_error;
    br_report_free(&report);
    return status;
}

static br_status score(const char *in, const char *out, int64_t *n_error) {
    br_report report;
    const br_score_options options = {.engine = rig_options(&pico), .in_path = in, .out_path = out};
    const br_status status = br_job_score(&options, NULL, &report);
    *n_error = report.n_error;
    br_report_free(&report);
    return status;
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

typedef struct tally {
    atomic_int count[8];
    atomic_int in_use[BR_THREAD_MAX];
} tally;

static void count_job(void *context, int job, int thread) {
    tally *t = context;
    ck_assert_int_eq(atomic_fetch_add(&t->in_use[thread], 1), 0);
    atomic_fetch_add(&t->count[job], 1);
    atomic_fetch_sub(&t->in_use[thread], 1);
}

/* A run of the pool waited until it had seen each of its workers, and they spun in each other's way: 256 threads on 2 cores
 * took 25 ms a region and minutes for 40 tokens of pico. 2,000 regions are 50 s then, and 2 s with a pool that does not. */
START_TEST(more_threads_than_cores_go_on) {
    static tally t;
    br_pool *pool;
    CHECK_OK(br_pool_open(BR_THREAD_MAX, &pool));
    for (int run = 1; run <= 2000; run++) {
        br_pool_run(pool, count_job, &t, 8);
        for (int job = 0; job < 8; job++)
            ck_assert_int_eq(atomic_load(&t.count[job]), run);
    }
    br_pool_close(pool);
}
END_TEST

/* ---- paths ----------------------------------------------------------------------------------------------------------- */

/* A rollout ended in a rename over whatever stood at its path: /dev/null became a regular file for the whole machine, and
 * `--out` given the prompts, a config.json or the rollout to score replaced them without a word. */
START_TEST(an_output_replaces_rollouts_only) {
    char pipe_path[256], out[256], config[300], nowhere[256];
    int64_t n_error;
    path_of(pipe_path, "pipe");
    path_of(out, "out.h5");
    path_of(nowhere, "no/folder.h5");
    snprintf(config, sizeof config, "%s/config.json", pico.adapter_dir[0]);
    write_text(config, "{}");
    ck_assert_int_eq(mkfifo(pipe_path, 0600), 0);
    CHECK_FAILS(generate(prompts_path, prompts_path, &n_error), BR_E_ARG);
    expect_text(prompts_path, prompts_text);
    CHECK_FAILS(generate(prompts_path, config, &n_error), BR_E_ARG);
    expect_text(config, "{}");
    CHECK_FAILS(generate(prompts_path, pipe_path, &n_error), BR_E_IO);
    CHECK_FAILS(generate(prompts_path, test_tmp_dir(), &n_error), BR_E_IO);
    br_report report;
    br_generate_options options = generate_options(prompts_path, nowhere);
    options.engine.model_dir = nowhere; /* the model is not looked for: a large one takes minutes to load */
    CHECK_FAILS(br_job_generate(&options, NULL, &report), BR_E_IO);
    br_report_free(&report);
    struct stat info;
    ck_assert(stat(pipe_path, &info) == 0 && S_ISFIFO(info.st_mode));
    write_text(out, ""); /* as mktemp leaves it */
    CHECK_OK(generate(prompts_path, out, &n_error));
    CHECK_OK(generate(prompts_path, out, &n_error));
    CHECK_FAILS(score(out, out, &n_error), BR_E_ARG);
    char alias[256];
    path_of(alias, "alias.h5");
    ck_assert_int_eq(link(out, alias), 0);
    CHECK_FAILS(score(out, alias, &n_error), BR_E_ARG);
}
END_TEST

/* A named pipe without a writer in the place of an input held every verb up for ever. */
START_TEST(a_pipe_is_no_file) {
    char pipe_path[256], out[256];
    br_map map;
    rollout_reader *reader;
    int64_t n_error;
    path_of(pipe_path, "pipe");
    path_of(out, "out.h5");
    ck_assert_int_eq(mkfifo(pipe_path, 0600), 0);
    CHECK_FAILS(br_file_map(pipe_path, &map), BR_E_IO);
    CHECK_FAILS(rollout_open(pipe_path, &reader), BR_E_IO);
    CHECK_FAILS(generate(pipe_path, out, &n_error), BR_E_IO);
}
END_TEST

static int replace_output(void *context, const char *what, int64_t done, int64_t total) {
    const char *const *path = context;
    (void)what;
    (void)total;
    if (done <= MAX_NEW || access(path[0], F_OK) != 0)
        return 0;
    for (int i = 0; i < 10000 && access(path[1], F_OK) != 0; i++)
        usleep(1000); /* the first sequence has ended: the writing thread puts the file there */
    ck_assert_int_eq(rename(path[0], path[1]), 0);
    return 0;
}

/* Two processes with one --out: both said ok, and the file they left held 7 of 72 sequences. */
START_TEST(a_replaced_output_is_noticed) {
    char other[256], out[256];
    const char *paths[] = {other, out};
    const br_watch watch = {.call = replace_output, .context = paths};
    int64_t n_error;
    br_report report;
    path_of(other, "other.h5");
    path_of(out, "out.h5");
    char one[256];
    path_of(one, "one.jsonl");
    write_text(one, "{\"prompt\": [1]}\n");
    CHECK_OK(generate(one, other, &n_error));
    br_generate_options options = generate_options(prompts_path, out);
    options.engine.max_seqs = 1; /* the first is there while the others run */
    CHECK_FAILS(br_job_generate(&options, &watch, &report), BR_E_IO);
    br_report_free(&report);
}
END_TEST

/* ---- sequences that cannot run --------------------------------------------------------------------------------------- */

static void count_line(void *context, const char *line) {
    (void)line;
    ++*(int *)context;
}

static br_status dump(const char *in, int *n_line) {
    br_report report;
    const br_dump_options options = {.engine = rig_options(&pico), .in_path = in, .seq = -1, .pos_min = -1, .pos_max = -1};
    *n_line = 0;
    const br_status status = br_job_dump(&options, count_line, n_line, &report);
    br_report_free(&report);
    return status;
}

static void write_long_prompts(const char *path, int32_t n) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fprintf(file, "{\"prompt\": [1");
    for (int32_t t = 1; t < n; t++)
        fprintf(file, ",%d", t % 256);
    fprintf(file, "]}\n{\"prompt\": [1, 2, 3]}\n");
    fclose(file);
}

/* One prompt longer than max_position_embeddings, refused by the rollout as it should be, kept the whole file from being
 * scored, dumped or verified. 300,000 tokens also show a write behind the arrays of a pack to the sanitizer. */
START_TEST(a_refused_sequence_does_not_stop_the_others) {
    char lines[256], out[256], scored[256];
    int64_t n_error;
    br_report report;
    path_of(lines, "long.jsonl");
    path_of(out, "out.h5");
    path_of(scored, "scored.h5");
    write_long_prompts(lines, 300000);
    CHECK_OK(generate(lines, out, &n_error));
    ck_assert_int_eq(n_error, 1);
    CHECK_OK(score(out, scored, &n_error));
    ck_assert_int_eq(n_error, 1);
    CHECK_OK(br_job_parity(out, scored, &report));
    ck_assert_int_eq(report.n_compared, 5);
    ck_assert_int_eq(report.n_differ, 0);
    br_report_free(&report);
    const br_verify_options verify = {.engine = rig_options(&pico), .path = out};
    CHECK_OK(br_job_verify(&verify, NULL, &report));
    br_report_free(&report);
    CHECK_OK(score(lines, scored, &n_error));
    ck_assert_int_eq(n_error, 1);
    int n_line;
    CHECK_OK(dump(out, &n_line));
    ck_assert_int_gt(n_line, 0);
    write_text(lines, "{\"prompt\": [1000000]}\n"); /* refused alone: nothing asks for room, and the older file stays */
    CHECK_OK(generate(lines, out, &n_error));
    ck_assert_int_eq(n_error, 1);
    CHECK_OK(dump(out, &n_line));
}
END_TEST

/* ---- sentences and names --------------------------------------------------------------------------------------------- */

/* Names from files stood in sentences as they were: one with a line break made two lines of one sentence, one with an escape
 * sequence wrote to the terminal. A path of 4,000 bytes pushed the reason out of the sentence. */
START_TEST(a_sentence_is_one_line_with_its_reason) {
    static char name[5000];
    br_fail(BR_E_IO, "a\nb\033[31m: cannot");
    ck_assert_str_eq(br_last_error(), "a?b?[31m: cannot");
    memset(name, 'd', sizeof name - 1);
    br_fail(BR_E_IO, "%s: cannot open: %s", name, "it is not there");
    const char *sentence = br_last_error();
    const size_t n = strlen(sentence);
    ck_assert_uint_lt(n, 1024);
    ck_assert_str_eq(sentence + n - 28, "cannot open: it is not there");
    const br_failure failure = br_failure_keep(BR_E_IO);
    br_fail(BR_E_NAN, "another");
    ck_assert_int_eq(br_fail_again(&failure), BR_E_IO);
    br_fail_context(BR_E_IO, "adapter '%s'", "x\ty");
    ck_assert_msg(strncmp(br_last_error(), "adapter 'x?y': dddd", 19) == 0, "%s", br_last_error());
    for (size_t long_by = 1020; long_by < 1028; long_by++) { /* around the size of the buffer */
        name[long_by] = 0;
        br_fail(BR_E_IO, "%s", name);
        ck_assert_uint_eq(strlen(br_last_error()), long_by < 1024 ? long_by : 1023);
        name[long_by] = 'd';
    }
}
END_TEST

/* An adapter's name may stand in reports and in --json; a request could not even use one with a line break. Adapters counted
 * but not given were read through NULL. */
START_TEST(adapters_have_a_name_and_a_folder) {
    br_engine *engine;
    br_engine_options options = rig_options(&pico);
    br_adapter_source source = {.name = "a\nb", .dir = pico.adapter_dir[0]};
    options.adapter = &source;
    options.n_adapter = 1;
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_ARG);
    source.name = "a";
    source.dir = NULL;
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_ARG);
    options.adapter = NULL;
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_ARG);
    ck_assert_ptr_null(engine);
}
END_TEST

/* ---- the library ----------------------------------------------------------------------------------------------------- */

enum { LIB_REQUESTS = 6, LIB_NEW = 6 };

typedef struct lib_run {
    br_engine_options options;
    uint64_t hash; /* of what came out, by request */
    br_status status;
} lib_run;

static br_request request_of(int i, const int32_t prompt[4]) {
    static const char *const uid[LIB_REQUESTS] = {"0", "1", "2", "3", "4", "5"};
    br_request r = {.uid = uid[i], .prompt = prompt, .n_prompt = 1 + i % 4, .seed = 7, .adapter = i % 2 ? "a" : NULL,
                    .sampling = br_sampling_default()};
    r.sampling.max_new = LIB_NEW;
    r.sampling.ignore_eos = 1;
    return r;
}

static void take(lib_run *run, const uint64_t id[LIB_REQUESTS], const br_token *token) {
    for (uint64_t i = 0; i < LIB_REQUESTS; i++)
        if (id[i] == token->request) { /* a sum: the order between requests is the scheduler's */
            const uint64_t place = i << 40 | (uint64_t)token->position << 20 | (uint64_t)token->token;
            run->hash += test_mix(test_mix(place) + token->logprob);
        }
}

static void *run_engine(void *argument) {
    static const int32_t prompt[4] = {9, 8, 7, 6};
    lib_run *run = argument;
    br_engine *engine;
    uint64_t id[LIB_REQUESTS];
    int32_t n, done = 0;
    br_token token[3];
    run->status = br_engine_open(&run->options, &engine);
    for (int i = 0; i < LIB_REQUESTS && run->status == BR_OK; i++) {
        const br_request r = request_of(i, prompt);
        run->status = br_submit(engine, &r, &id[i]);
    }
    while (run->status == BR_OK && !done) {
        run->status = br_poll(engine, token, 3, &n, &done);
        for (int32_t k = 0; k < n; k++)
            take(run, id, &token[k]);
    }
    br_engine_close(engine);
    return NULL;
}

/* Nothing broke here: engines share no state, side by side on two threads as alone. */
START_TEST(engines_on_two_threads_give_equal_bits) {
    lib_run run[3];
    pthread_t thread[2];
    for (int i = 0; i < 3; i++)
        run[i] = (lib_run){.options = rig_options(&pico)};
    run[1].options.n_thread = 2;
    run[2].options.max_seqs = 3; /* room for all requests, not for all to run */
    run_engine(&run[0]);
    for (int i = 1; i < 3; i++)
        ck_assert_int_eq(pthread_create(&thread[i - 1], NULL, run_engine, &run[i]), 0);
    for (int i = 1; i < 3; i++) {
        pthread_join(thread[i - 1], NULL);
        ck_assert_int_eq(run[i].status, BR_OK);
        ck_assert_uint_eq(run[i].hash, run[0].hash);
    }
    ck_assert_uint_ne(run[0].hash, 0);
}
END_TEST

/* Nothing broke here: polls that take nothing, refused requests and aborts at any moment leave the engine whole. */
START_TEST(odd_orders_of_calls_are_fine) {
    static const int32_t prompt[4] = {1, 2, 3, 4};
    const br_engine_options options = rig_options(&pico);
    br_engine *engine;
    br_token token[64];
    int32_t n, done, n_last = 0;
    uint64_t id[LIB_REQUESTS], none;
    CHECK_OK(br_engine_open(&options, &engine));
    CHECK_OK(br_poll(engine, NULL, 0, &n, &done));
    ck_assert(n == 0 && done == 1);
    for (int i = 0; i < LIB_REQUESTS; i++) {
        br_request r = request_of(i, prompt);
        CHECK_OK(br_submit(engine, &r, &id[i]));
        r.adapter = "nobody";
        CHECK_FAILS(br_submit(engine, &r, &none), BR_E_NOT_FOUND);
    }
    CHECK_OK(br_abort(engine, id[5])); /* waits still */
    for (int i = 0; i < 20; i++) {
        CHECK_OK(br_poll(engine, NULL, 0, &n, &done)); /* one step at most: then tokens wait */
        ck_assert(n == 0 && done == 0);
    }
    CHECK_OK(br_abort(engine, id[0])); /* its first token waits in the queue */
    CHECK_FAILS(br_abort(engine, id[0]), BR_E_NOT_FOUND);
    CHECK_FAILS(br_abort(engine, 0), BR_E_NOT_FOUND);
    for (done = 0; !done;) {
        CHECK_OK(br_poll(engine, token, 1, &n, &done));
        n_last += n == 1 && token[0].last;
    }
    ck_assert_int_eq(n_last, LIB_REQUESTS);
    CHECK_FAILS(br_abort(engine, id[1]), BR_E_NOT_FOUND);
    br_engine_close(engine);
}
END_TEST

/* Nothing broke here: an open and close leaves nothing behind; under the sanitizer a leak ends the suite. */
START_TEST(engines_come_and_go) {
    const br_engine_options options = rig_options(&pico);
    for (int i = 0; i < (test_is_long() ? 200 : 12); i++) {
        br_engine *engine;
        CHECK_OK(br_engine_open(&options, &engine));
        br_engine_close(engine);
    }
}
END_TEST

/* ---- the command ----------------------------------------------------------------------------------------------------- */

#ifndef __SANITIZE_ADDRESS__ /* the sanitized build has no command */

static void expect_exit(int code, const char *line) {
    const int status = system(line);
    ck_assert_msg(status == code << 8, "%s: status %x, expected exit %d", line, status, code);
}

/* A limit of file size ended the command by a signal, without a sentence. An empty path, which a script leaves where a
 * variable is unset, was the root: `digest ""` looked for /config.json. */
START_TEST(the_command_holds_its_ground) {
    char line[2048], out[256];
    const char *bin = BITROLL_BINARY_DIR "/bitroll";
    path_of(out, "out.h5");
    snprintf(line, sizeof line, "test \"$(%s digest '' 2>&1)\" = \"bitroll: digest: expected a path, found ''\"", bin);
    expect_exit(0, line);
    snprintf(line, sizeof line, "ulimit -f 16; %s generate --model %s --prompts %s --adapter a=%s --out %s 2>%s.txt", bin,
             pico.dir, prompts_path, pico.adapter_dir[0], out, out);
    expect_exit(2, line);
}
END_TEST
#endif

Suite *test_broken_suite(void) {
    Suite *suite = suite_create("broken");
    TCase *tcase = tcase_create("broken once");
    tcase_set_timeout(tcase, 20);
    tcase_add_unchecked_fixture(tcase, make_inputs, NULL);
    tcase_add_test(tcase, more_threads_than_cores_go_on);
    tcase_add_test(tcase, an_output_replaces_rollouts_only);
    tcase_add_test(tcase, a_pipe_is_no_file);
    tcase_add_test(tcase, a_replaced_output_is_noticed);
    tcase_add_test(tcase, a_refused_sequence_does_not_stop_the_others);
    tcase_add_test(tcase, a_sentence_is_one_line_with_its_reason);
    tcase_add_test(tcase, adapters_have_a_name_and_a_folder);
    tcase_add_test(tcase, engines_on_two_threads_give_equal_bits);
    tcase_add_test(tcase, odd_orders_of_calls_are_fine);
    tcase_add_test(tcase, engines_come_and_go);
#ifndef __SANITIZE_ADDRESS__
    tcase_add_test(tcase, the_command_holds_its_ground);
#endif
    suite_add_tcase(suite, tcase);
    return suite;
}
