/* The verbs from files to files: a run, the scorer's answer and their parity; kills and resumption; dumps of the two forwards;
 * failing allocations and writes; a damaged file. All on pico. */
#include "br_file.h"
#include "br_hash.h"
#include "br_mem.h"
#include "engine_rig.h"
#include "rollout_file.h"
#include "test_support.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static rig_model pico;
static char prompts_path[256];
enum { PROMPTS = 9, SAMPLES = 2, SEQS = PROMPTS * SAMPLES };

static void make_inputs(void) {
    rig_model_make(&pico, "pico");
    snprintf(prompts_path, sizeof prompts_path, "%s/prompts.jsonl", test_tmp_dir());
    FILE *file = fopen(prompts_path, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < PROMPTS; i++) {
        fprintf(file, "{\"prompt\": [");
        for (int t = 0; t < 5 + 9 * i; t++)
            fprintf(file, "%s%d", t ? ", " : "", (int)(test_mix((uint64_t)(i * 1000 + t)) % 256));
        fprintf(file, "]%s}\n", i % 3 == 1 ? ", \"adapter\": \"a\"" : i % 3 == 2 ? ", \"adapter\": \"b\", \"temperature\": 0.8" : "");
    }
    fclose(file);
}

static void path_of(char path[256], const char *name) {
    snprintf(path, 256, "%s/%s", test_tmp_dir(), name);
}

static br_generate_options generate_options(const char *out) {
    br_generate_options options = {.engine = rig_options(&pico), .prompts_path = prompts_path, .out_path = out,
                                   .sampling = br_sampling_default(), .n_sample = SAMPLES, .seed = 5};
    options.sampling.max_new = 7;
    options.sampling.ignore_eos = 1;
    options.engine.max_seqs = 4;
    return options;
}

static br_digest generate(const char *out, br_generate_options options) {
    br_report report;
    options.out_path = out;
    CHECK_OK(br_job_generate(&options, NULL, &report));
    const br_digest digest = report.logprob_digest;
    ck_assert_int_eq(report.n_seq, SEQS);
    br_report_free(&report);
    return digest;
}

static br_digest score(const char *in, const char *out, int32_t pack, int32_t n_thread, const char *override) {
    br_report report;
    br_score_options options = {.engine = rig_options(&pico), .in_path = in, .out_path = out, .pack_tokens = pack, .adapter_override = override};
    options.engine.n_thread = n_thread;
    CHECK_OK(br_job_score(&options, NULL, &report));
    const br_digest digest = report.logprob_digest;
    br_report_free(&report);
    return digest;
}

static void expect_equal(br_digest a, br_digest b, const char *what) {
    char x[BR_DIGEST_TEXT_BYTES], y[BR_DIGEST_TEXT_BYTES];
    br_digest_text(a, x);
    br_digest_text(b, y);
    ck_assert_msg(br_digest_equal(a, b), "%s: %s and %s", what, x, y);
}

START_TEST(rollout_score_parity) {
    char rollout[256], other[256], scored[256];
    br_report report;
    path_of(rollout, "r.h5");
    path_of(other, "r2.h5");
    path_of(scored, "t.h5");
    const br_digest digest = generate(rollout, generate_options(rollout));
    br_generate_options options = generate_options(other);
    options.engine.max_seqs = 2;
    options.engine.preempt_every = 3;
    options.engine.n_thread = 2;
    options.shuffle_seed = 9;
    options.commit_every = 5;
    expect_equal(digest, generate(other, options), "another schedule");
    expect_equal(digest, score(rollout, scored, 128, 2, NULL), "the scorer");
    CHECK_OK(br_job_parity(rollout, scored, &report));
    ck_assert_int_eq(report.n_compared, SEQS * 7);
    ck_assert_int_eq(report.n_differ, 0);
    ck_assert(report.k1 == 0 && report.k3 == 0);
    br_report_free(&report);
    CHECK_OK(br_job_parity(rollout, other, &report)); /* two rollouts of one run join as well */
    br_report_free(&report);
    CHECK_FAILS(br_job_parity(rollout, rollout, &report), BR_E_MISMATCH); /* a file against itself proves nothing */
    br_report_free(&report);
    score(rollout, scored, 64, 1, "base");
    CHECK_FAILS(br_job_parity(rollout, scored, &report), BR_E_MISMATCH);
    ck_assert_int_gt(report.n_differ, 0);
    br_report_free(&report);
}
END_TEST

START_TEST(prompts_alone_can_be_scored) {
    char a[256], b[256];
    path_of(a, "p1.h5");
    path_of(b, "p2.h5");
    expect_equal(score(prompts_path, a, 64, 1, NULL), score(prompts_path, b, 1000, 2, NULL), "prompt log-probs in other packs");
    rollout_reader *reader;
    rollout_seq seq;
    CHECK_OK(rollout_open(a, &reader));
    ck_assert_int_eq(rollout_seq_count(reader), PROMPTS);
    rollout_seq_at(reader, 1, &seq);
    ck_assert_uint_eq(seq.logprob[0], BR_UNSCORED);
    for (int32_t t = 1; t < seq.n_tok; t++)
        ck_assert_uint_ne(seq.logprob[t], BR_UNSCORED);
    rollout_reader_close(reader);
}
END_TEST

/* ---- kills --------------------------------------------------------------------------------------------------------------------- */

static int64_t committed(const char *path) {
    rollout_reader *reader;
    if (rollout_open(path, &reader) != BR_OK)
        return -1;
    const int64_t n = rollout_seq_count(reader);
    rollout_reader_close(reader);
    return n;
}

static int kill_at_step(void *context, const char *what, int64_t done, int64_t total) {
    int *left = context;
    (void)what, (void)done, (void)total;
    if (--*left == 0)
        kill(getpid(), SIGKILL);
    usleep(300); /* lets the writing thread come to different points */
    return 0;
}

/* Runs the job in a child that kills itself at its n-th step; 1 when it finished before. */
static int run_and_kill(const br_generate_options *options, int n) {
    int status;
    const pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        br_report report;
        const br_watch watch = {.call = kill_at_step, .context = &n};
        _exit(br_job_generate(options, &watch, &report) == BR_OK ? 0 : 1);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFEXITED(status);
}

START_TEST(a_killed_run_resumes_exactly) {
    char whole[256], cut[256];
    path_of(whole, "whole.h5");
    path_of(cut, "cut.h5");
    const br_digest want = generate(whole, generate_options(whole));
    br_generate_options options = generate_options(cut);
    int finished = 0, n_partial = 0;
    for (int n = 1; !finished; n++) {
        ck_assert_int_lt(n, 1000);
        unlink(cut);
        options.resume = 0;
        finished = run_and_kill(&options, n);
        const int64_t before = committed(cut);
        n_partial += before > 0 && before < SEQS;
        options.resume = 1;
        if (n % 3 == 0 && !finished)
            run_and_kill(&options, 2); /* killed again while it resumes */
        ck_assert_msg(committed(cut) >= before, "resuming lost committed sequences");
        options.engine.max_seqs = 1 + n % 5;
        expect_equal(want, generate(cut, options), "a killed and resumed run");
    }
    ck_assert_int_gt(n_partial, 3);
}
END_TEST

START_TEST(resume_refuses_another_run) {
    char path[256];
    br_report report;
    path_of(path, "other.h5");
    br_generate_options options = generate_options(path);
    generate(path, options);
    options.resume = 1;
    options.seed++;
    CHECK_FAILS(br_job_generate(&options, NULL, &report), BR_E_ARG);
    br_report_free(&report);
    ck_assert_int_eq(committed(path), SEQS);
}
END_TEST

/* ---- failures ------------------------------------------------------------------------------------------------------------------ */

START_TEST(every_allocation_of_a_run_may_fail) {
    char path[256];
    br_report report;
    path_of(path, "alloc.h5");
    br_generate_options options = generate_options(path);
    br_status status = BR_E_NOMEM;
    long n = 1;
    for (; status != BR_OK; n++) {
        ck_assert_int_lt(n, 100000);
        const int stood = br_file_exists(path);
        br_mem_fail_nth(n);
        status = br_job_generate(&options, NULL, &report);
        br_mem_fail_nth(0);
        ck_assert_msg(br_file_exists(path) == (stood || committed(path) > 0), "allocation %ld: %d", n, stood);
        ck_assert_msg(status == BR_OK || status == BR_E_NOMEM, "allocation %ld: %s: %s", n, br_status_name(status), br_last_error());
        br_report_free(&report);
    }
    ck_assert_int_eq(committed(path), SEQS);
}
END_TEST

typedef struct lines {
    char *text;
    size_t used, room;
    int n;
} lines;

static void keep_line(void *context, const char *line) {
    lines *l = context;
    const size_t n = strlen(line);
    if (l->used + n + 2 > l->room) {
        l->room = 2 * (l->used + n + 2);
        l->text = realloc(l->text, l->room);
        ck_assert_ptr_nonnull(l->text);
    }
    memcpy(l->text + l->used, line, n);
    l->used += n;
    l->text[l->used++] = '\n';
    l->text[l->used] = 0;
    l->n++;
}

static br_status run_job(int job, const char *rollout, const char *out, br_report *report) {
    const br_engine_options engine = rig_options(&pico);
    const br_score_options score_options = {.engine = engine, .in_path = rollout, .out_path = out};
    const br_verify_options verify_options = {.engine = engine, .path = rollout, .n_recompute = 2};
    const br_dump_options dump_options = {.engine = engine, .in_path = rollout, .through_engine = job == 3, .seq = 0, .pos_min = -1, .pos_max = -1};
    lines ignored = {0};
    br_status status;
    switch (job) {
    case 0: return br_job_score(&score_options, NULL, report);
    case 1: return br_job_verify(&verify_options, NULL, report);
    case 2:
    case 3:
        status = br_job_dump(&dump_options, keep_line, &ignored, report);
        free(ignored.text);
        return status;
    default: return br_job_parity(rollout, out, report);
    }
}

/* What failed left the file that stood there before, byte by byte, and nothing beside it; until finished sequences stand in its place: some of a
 * rollout, which can be resumed, all of a scoring, of which only the packing failed. */
START_TEST(a_job_that_fails_leaves_the_older_file) {
    char rollout[256], out[256], part[300];
    br_report report;
    br_map before, after;
    path_of(rollout, "in.h5");
    path_of(out, "older.h5");
    snprintf(part, sizeof part, "%s.part", out);
    generate(rollout, generate_options(rollout));
    br_generate_options options = generate_options(out);
    generate(out, options);
    options.seed++;
    CHECK_OK(br_file_map(out, &before));
    br_status status = BR_E_NOMEM;
    int n_left = 0;
    for (long n = 1; status != BR_OK; n++) {
        br_mem_fail_nth(n);
        status = _i ? br_job_generate(&options, NULL, &report) : run_job(0, rollout, out, &report);
        br_mem_fail_nth(0);
        br_report_free(&report);
        ck_assert_msg(!br_file_exists(part), "allocation %ld left %s", n, part);
        CHECK_OK(br_file_map(out, &after));
        const int same = after.n == before.n && memcmp(after.bytes, before.bytes, after.n) == 0;
        br_file_unmap(&after);
        ck_assert_msg(same == (status != BR_OK) || committed(out) >= (_i ? 1 : SEQS), "allocation %ld: %s", n, br_status_name(status));
        if (!same)
            break;
        n_left++;
    }
    ck_assert_int_gt(n_left, 10);
    br_file_unmap(&before);
}
END_TEST

static int stop_at_once(void *context, const char *what, int64_t done, int64_t total) {
    (void)context, (void)what, (void)done, (void)total;
    return 1;
}

/* Requests that were refused at once were committed alone, in the place of a good file, while the others still ran. */
START_TEST(refused_requests_alone_leave_the_older_file) {
    char prompts[256], out[256];
    br_report report;
    const br_watch watch = {.call = stop_at_once};
    path_of(prompts, "first.jsonl");
    path_of(out, "older.h5");
    generate(out, generate_options(out));
    FILE *file = fopen(prompts, "w");
    ck_assert_ptr_nonnull(file);
    fprintf(file, "{\"prompt\": [1], \"adapter\": \"nobody\"}\n{\"prompt\": [1, 2, 3]}\n");
    fclose(file);
    br_generate_options options = generate_options(out);
    options.prompts_path = prompts;
    CHECK_FAILS(br_job_generate(&options, &watch, &report), BR_E_ABORTED);
    br_report_free(&report);
    ck_assert_int_eq(committed(out), SEQS);
}
END_TEST

START_TEST(a_scoring_that_is_stopped_leaves_the_older_file) {
    char rollout[256], out[256];
    br_report report;
    const br_watch watch = {.call = stop_at_once};
    path_of(rollout, "in.h5");
    path_of(out, "older.h5");
    generate(rollout, generate_options(rollout));
    score(prompts_path, out, 64, 1, NULL);
    const br_score_options options = {.engine = rig_options(&pico), .in_path = rollout, .out_path = out, .pack_tokens = 64};
    ck_assert_int_ne(br_job_score(&options, &watch, &report), BR_OK);
    br_report_free(&report);
    ck_assert_int_eq(committed(out), PROMPTS);
}
END_TEST

/* score, verify, dump, dump through the engine, parity */
START_TEST(every_allocation_of_a_job_may_fail) {
    char rollout[256], out[256];
    br_report report;
    path_of(rollout, "ra.h5");
    path_of(out, "ta.h5");
    generate(rollout, generate_options(rollout));
    score(rollout, out, 64, 1, NULL);
    br_status status = BR_E_NOMEM;
    long n = 1;
    for (; status != BR_OK; n++) {
        ck_assert_int_lt(n, 100000);
        br_mem_fail_nth(n);
        status = run_job(_i, rollout, out, &report);
        br_mem_fail_nth(0);
        ck_assert_msg(status == BR_OK || status == BR_E_NOMEM, "job %d, allocation %ld: %s: %s", _i, n, br_status_name(status), br_last_error());
        br_report_free(&report);
    }
    ck_assert_int_gt(n, 3);
}
END_TEST

static void expect_same_order(const char *a, const char *b) {
    rollout_reader *reader_a, *reader_b;
    rollout_seq x, y;
    CHECK_OK(rollout_open(a, &reader_a));
    CHECK_OK(rollout_open(b, &reader_b));
    ck_assert_int_eq(rollout_seq_count(reader_a), rollout_seq_count(reader_b));
    for (int64_t i = 0; i < rollout_seq_count(reader_a); i++) {
        rollout_seq_at(reader_a, i, &x);
        rollout_seq_at(reader_b, i, &y);
        ck_assert_str_eq(x.uid, y.uid);
    }
    rollout_reader_close(reader_a);
    rollout_reader_close(reader_b);
}

START_TEST(refused_requests_are_listed_and_the_rest_completes) {
    char path[256], prompts[256], scored[256];
    br_report report;
    path_of(path, "refused.h5");
    path_of(scored, "refused-t.h5");
    path_of(prompts, "refused.jsonl");
    FILE *file = fopen(prompts, "w");
    fprintf(file,
            "{\"prompt\": [1, 2, 3]}\n{\"prompt\": [1, 999]}\n{\"prompt\": [4], \"adapter\": \"nobody\"}\n"
                  "{\"prompt\": [5], \"max_new\": 100000}\n{\"prompt\": [6, 7]}\n");
    fclose(file);
    br_generate_options options = generate_options(path);
    options.prompts_path = prompts;
    options.n_sample = 1;
    CHECK_OK(br_job_generate(&options, NULL, &report));
    ck_assert_int_eq(report.n_error, 3);
    ck_assert_msg(strstr(report.text, "999") && strstr(report.text, "nobody") && strstr(report.text, "error: 3#0"), "%s", report.text);
    ck_assert_int_eq(report.n_tok, 14);
    br_report_free(&report);
    br_score_options score_options = {.engine = rig_options(&pico), .in_path = path, .out_path = scored};
    CHECK_OK(br_job_score(&score_options, NULL, &report));
    ck_assert_int_eq(report.n_error, 3);
    br_report_free(&report);
    expect_same_order(path, scored); /* refused ones were once written before the pack that they stood behind */
    CHECK_OK(br_job_parity(path, scored, &report));
    ck_assert_int_eq(report.n_compared, 14);
    br_report_free(&report);
}
END_TEST

/* ---- dump and verify ------------------------------------------------------------------------------------------------------------ */

static lines dump(const char *in, int through_engine, const char *override) {
    br_report report;
    lines l = {0};
    br_dump_options options = {.engine = rig_options(&pico), .in_path = in, .through_engine = through_engine, .choices = 1, .seq = -1, .pos_min = -1,
                               .pos_max = -1, .adapter_override = override};
    options.engine.chunk_tokens = 11;
    options.engine.max_seqs = 5;
    options.engine.preempt_every = through_engine ? 6 : 0;
    CHECK_OK(br_job_dump(&options, keep_line, &l, &report));
    br_report_free(&report);
    return l;
}

START_TEST(both_forwards_show_the_same_stages) {
    char rollout[256];
    path_of(rollout, "d.h5");
    generate(rollout, generate_options(rollout));
    const char *const input[] = {rollout, prompts_path};
    for (int i = 0; i < 2; i++) {
        lines scored = dump(input[i], 0, NULL), rolled = dump(input[i], 1, NULL), base = dump(input[i], 0, "base");
        ck_assert_int_gt(scored.n, 1000);
        ck_assert_str_eq(scored.text, rolled.text);
        ck_assert_str_ne(scored.text, base.text);
        ck_assert_ptr_nonnull(strstr(scored.text, "index_topk"));
        ck_assert_ptr_nonnull(strstr(scored.text, " logprob "));
        free(scored.text);
        free(rolled.text);
        free(base.text);
    }
}
END_TEST

/* A score file has no logprob_kept: verify once took that for damage. */
START_TEST(verify_takes_a_score_file) {
    char rollout[256], scored[256];
    br_report report;
    path_of(rollout, "vr.h5");
    path_of(scored, "vt.h5");
    generate(rollout, generate_options(rollout));
    score(rollout, scored, 64, 1, NULL);
    br_verify_options verify = {.engine = rig_options(&pico), .path = scored, .n_recompute = 3};
    CHECK_OK(br_job_verify(&verify, NULL, &report));
    ck_assert_int_gt(report.n_compared, 0);
    br_report_free(&report);
}
END_TEST

/* Two adapters differ in every tensor and in the root; the lines are those of one folder, name for name. */
START_TEST(digest_of_adapters) {
    br_report report;
    lines a = {0}, b = {0};
    CHECK_OK(br_job_digest(pico.adapter_dir[0], keep_line, &a, &report));
    br_report_free(&report);
    CHECK_OK(br_job_digest(pico.adapter_dir[1], keep_line, &b, &report));
    br_report_free(&report);
    ck_assert_int_gt(a.n, 100);
    ck_assert_int_eq(a.n, b.n);
    ck_assert_ptr_nonnull(strstr(a.text, "adapter file, Merkle root "));
    const char *x = a.text, *y = b.text;
    for (int i = 0; i < a.n - 1; i++) {
        const size_t n = strcspn(x, "\n");
        if (memcmp(x, y, 32) == 0 || memcmp(x + 32, y + 32, n - 32) != 0)
            ck_abort_msg("line %d: %.200s", i, x);
        x += n + 1;
        y += n + 1;
    }
    free(a.text);
    free(b.text);
}
END_TEST

/* Only the first was named, as if the others were as they should be. */
START_TEST(verify_counts_the_sequences_of_other_adapters) {
    char rollout[256], whole[512];
    br_report report;
    path_of(rollout, "v2.h5");
    generate(rollout, generate_options(rollout));
    const br_adapter_source swapped[2] = {{.name = "a", .dir = pico.adapter_dir[1]}, {.name = "b", .dir = pico.adapter_dir[0]}},
                            one[2] = {pico.adapter[0], {.name = "b", .dir = pico.adapter_dir[0]}};
    br_verify_options verify = {.engine = rig_options(&pico), .path = rollout, .n_recompute = 1};
    for (int n = 1; n <= 2; n++) { /* a third of the sequences is a's, a third b's */
        verify.engine.adapter = n == 1 ? one : swapped;
        CHECK_FAILS(br_job_verify(&verify, NULL, &report), BR_E_MISMATCH);
        snprintf(whole, sizeof whole, " than the one given (%d sequences in all)", n * SEQS / 3);
        ck_assert_msg(strstr(br_last_error(), whole) && strstr(br_last_error(), ": made with another adapter '"), "%s", br_last_error());
        br_report_free(&report);
    }
    verify.engine.n_adapter = 1; /* the name that is not there has as many, and comes before the other one, which is wrong or right */
    const br_adapter_source alone[3] = {pico.adapter[0], swapped[0], swapped[1]};
    for (int i = 0; i < 3; i++) {
        verify.engine.adapter = &alone[i];
        CHECK_FAILS(br_job_verify(&verify, NULL, &report), BR_E_NOT_FOUND);
        snprintf(whole, sizeof whole, " (%d sequences in all)", SEQS / 3);
        ck_assert_msg(strstr(br_last_error(), i < 2 ? "'b'" : "'a'") && strstr(br_last_error(), whole), "%s", br_last_error());
        br_report_free(&report);
    }
}
END_TEST

START_TEST(verify_draws_again) {
    char rollout[256];
    br_report report;
    path_of(rollout, "v.h5");
    br_generate_options options = generate_options(rollout);
    options.sampling.entropy = 1;
    options.sampling.top_p = 0.9;
    options.sampling.min_p = 0.01f;
    generate(rollout, options);
    br_verify_options verify = {.engine = rig_options(&pico), .path = rollout, .n_recompute = SEQS};
    CHECK_OK(br_job_verify(&verify, NULL, &report));
    ck_assert_int_eq(report.n_tok, SEQS * 7);
    ck_assert_int_eq(report.n_compared, SEQS * 7 * 4);
    br_report_free(&report);
    br_adapter_source swapped[2] = {{.name = "a", .dir = pico.adapter_dir[1]}, {.name = "b", .dir = pico.adapter_dir[0]}};
    verify.engine.adapter = swapped;
    verify.n_recompute = 1; /* the adapters of all sequences are compared, whichever is drawn */
    CHECK_FAILS(br_job_verify(&verify, NULL, &report), BR_E_MISMATCH);
    br_report_free(&report);
}
END_TEST

Suite *test_jobs_suite(void) {
    Suite *suite = suite_create("jobs");
    TCase *tcase = tcase_create("files");
    tcase_set_timeout(tcase, 300);
    tcase_add_unchecked_fixture(tcase, make_inputs, NULL);
    tcase_add_test(tcase, rollout_score_parity);
    tcase_add_test(tcase, prompts_alone_can_be_scored);
    tcase_add_test(tcase, a_killed_run_resumes_exactly);
    tcase_add_test(tcase, resume_refuses_another_run);
    tcase_add_test(tcase, every_allocation_of_a_run_may_fail);
    tcase_add_loop_test(tcase, a_job_that_fails_leaves_the_older_file, 0, 2);
    tcase_add_test(tcase, refused_requests_alone_leave_the_older_file);
    tcase_add_test(tcase, a_scoring_that_is_stopped_leaves_the_older_file);
    tcase_add_loop_test(tcase, every_allocation_of_a_job_may_fail, 0, 5);
    tcase_add_test(tcase, refused_requests_are_listed_and_the_rest_completes);
    tcase_add_test(tcase, both_forwards_show_the_same_stages);
    tcase_add_test(tcase, verify_takes_a_score_file);
    tcase_add_test(tcase, digest_of_adapters);
    tcase_add_test(tcase, verify_counts_the_sequences_of_other_adapters);
    tcase_add_test(tcase, verify_draws_again);
    suite_add_tcase(suite, tcase);
    return suite;
}
