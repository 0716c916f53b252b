/* What a run does with its ledger: log-probs and digests that differ are told, what cannot be recorded is refused, a kill at any write loses
 * nothing that was appended, a run that was killed and resumed ends in the same bytes, and the model agrees or verify says where it does not. */
#include "bitroll_ledger.h"
#include "br_file.h"
#include "br_mem.h"
#include "engine_rig.h"
#include "fake_ledger.h"
#include "fake_rollout.h"
#include "faulty_disk.h"
#include "ledger_count.h"
#include "test_support.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char good[512], path[512], root[65];

static void make_good(void) {
    snprintf(good, sizeof good, "%s", fake_path("good.h5"));
    snprintf(path, sizeof path, "%s", fake_path("run.h5"));
    fake_ledger_write(good, FAKE_STEPS, -1, root);
}

#define SAYS(text, part) ck_assert_msg((text) && strstr(text, part) != NULL, "'%s' lacks '%s'", (text) ? (text) : "(null)", part)

/* ---- steps whose two sides differ ------------------------------------------------------------------------------------------- */

START_TEST(differing_log_probs_are_told) {
    static fake_step step;
    char spoiled[65], line[160];
    br_report report;
    double k1 = 0, k3 = 0;
    int n = 0;
    fake_ledger_write(path, FAKE_STEPS, 1, spoiled);
    fake_step_make(1, &step);
    fake_step_spoil(&step, 1);
    fake_step_spoil(&step, 3);
    for (int s = 0; s < FAKE_STEP_SEQS; s++)
        for (int t = 0; t < step.seq[s].n_tok; t++) {
            float a, b;
            memcpy(&a, &step.logprob[s][0][t], sizeof a);
            memcpy(&b, &step.logprob[s][2][t], sizeof b);
            if (!step.mask[s][t])
                continue;
            n++;
            k1 -= (double)b - (double)a;
            k3 += expm1((double)b - (double)a) - ((double)b - (double)a);
        }
    CHECK_FAILS(fake_ledger_verify(path, &report), BR_E_MISMATCH);
    snprintf(line, sizeof line, "step 11: 4 of %d log-probs differ, first at sequence 1 (uid 'step 1 prompt 0', sample 1), position %d: rollout ",
             n, step.seq[1].prompt_len);
    SAYS(report.text, line);
    SAYS(br_last_error(), line);
    ck_assert_int_eq(report.n_differ, 4);
    ck_assert_int_eq(report.first_pos, step.seq[1].prompt_len);
    ck_assert_int_eq(report.first_seq, FAKE_STEP_SEQS + 1);
    snprintf(line, sizeof line, "ledger: 4 steps, 4 of %lld log-probs differ, KL not 0 at 1 steps, at most %.3e, reward ",
             (long long)report.n_compared, k3 / n);
    SAYS(report.summary, line);
    const double scale = (double)report.n_compared;
    ck_assert_double_eq_tol(report.k1, k1 / scale, 1e-15);
    ck_assert_double_eq_tol(report.k3, k3 / scale, 1e-12 * k3);
    br_report_free(&report);
}
END_TEST

static void count_one(uint32_t rollout, uint32_t update, br_ledger_record *out) {
    static const int32_t token[2] = {1, 2};
    static const uint8_t mask[2] = {0, 1};
    const uint32_t a[2] = {BR_UNSCORED, rollout}, b[2] = {BR_UNSCORED, update};
    const ledger_seq seq = {.uid = "u", .prompt_len = 1, .n_tok = 2, .token = token, .mask = mask, .logprob = {a, a, b}};
    ledger_count(&seq, 1, out);
}

/* A token is a mismatch once, in however many of its log-probs. */
START_TEST(a_token_is_a_mismatch_once) {
    enum { N = 7 };
    static const int32_t token[N] = {1, 2, 3, 4, 5, 6, 7};
    static const uint8_t mask[N] = {0, 1, 1, 1, 0, 1, 1};
    static const uint32_t none = BR_UNSCORED, is = 0xbf800000u;
    const uint32_t rollout[N] = {none, is, is, is, none, is, is};
    const uint32_t again[N] = {none, is, is ^ 1, is, none, is ^ 2, is ^ 4};
    const uint32_t update[N] = {none, is, is, is ^ 1, none, is ^ 2, is ^ 8};
    const ledger_seq seq = {.uid = "u", .prompt_len = 1, .n_tok = N, .token = token, .mask = mask, .logprob = {rollout, again, update}};
    br_ledger_record record;
    ledger_count(&seq, 1, &record);
    ck_assert_int_eq(record.n_compared, 5);
    ck_assert_int_eq(record.n_differ, 4);
    ck_assert_int_eq(record.n_differ_again, 3);
    ck_assert_int_eq(record.n_differ_update, 3);
    ck_assert_int_eq(record.first_pos, 2);
}
END_TEST

/* Against the library's expm1 here; on another machine that one may give other bits, ours may not. */
START_TEST(kl_is_what_it_says) {
    static const float d[] = {0x1p-24f, -0x1p-24f, 1e-4f, -1e-4f, 0.0625f, 0.124f, -0.126f, 0.7f, -1.0f, 3.0f, -5.5f, 20.0f, -80.0f, 700.0f, -900.0f};
    br_ledger_record record;
    uint32_t zero = 0, bits;
    for (size_t k = 0; k < sizeof d / sizeof d[0]; k++) {
        memcpy(&bits, &d[k], sizeof bits);
        count_one(zero, bits, &record);
        const double want = expm1((double)d[k]) - (double)d[k], close = fabsf(d[k]) < 0.01f ? 1e-8 : 1e-13; /* `want` cancels */
        ck_assert_msg(fabs(record.k3 - want) <= close * want, "d %g: %.17g, wanted %.17g", (double)d[k], record.k3, want);
        ck_assert_double_eq(record.k1, -(double)d[k]);
        ck_assert(record.k3 > 0 && record.n_differ_update == 1 && record.n_differ_again == 0 && record.first_pos == 1);
    }
    count_one(0xff800000u, 0xff800000u, &record); /* equal infinities are equal */
    ck_assert(record.k1 == 0 && record.k3 == 0 && record.n_differ_update == 0);
    count_one(0xbf800000u, 0xff800000u, &record);
    ck_assert(isinf(record.k1) && isinf(record.k3));
}
END_TEST

START_TEST(differing_digests_of_the_two_sides_are_told) {
    static fake_step step;
    br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    br_report report;
    run.base_trainer.lo = 9;
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    fake_step_make(0, &step);
    step.step.adapter_trainer.hi = 78;
    step.seq[2].version_end = 1;
    CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
    CHECK_OK(br_ledger_close(ledger));
    CHECK_FAILS(fake_ledger_verify(path, &report), BR_E_MISMATCH);
    SAYS(report.text, "run: base digests differ: rollout 00000000000000060000000000000005, trainer 00000000000000060000000000000009\n");
    SAYS(report.text, "step 10: adapter digests differ: rollout 000000000000004d0000000000000000, trainer 000000000000004e0000000000000000\n");
    SAYS(report.text, "step 10: 1 sequences were sampled under more than one weight version: not certified\n");
    ck_assert_str_eq(br_last_error(), "run: base digests differ: rollout 00000000000000060000000000000005, trainer 00000000000000060000000000000009 "
                     "(3 findings in all)");
    br_report_free(&report);
}
END_TEST

/* The verdict named the first step alone. */
START_TEST(steps_of_other_adapters_are_counted) {
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    br_report report;
    char line[160];
    for (int n_bad = 1; n_bad <= 3; n_bad++) {
        CHECK_OK(br_ledger_create(path, &run, &ledger));
        for (int i = 0; i < FAKE_STEPS; i++) {
            fake_step_make(i, &step);
            step.step.adapter_trainer.hi += i > 0 && i <= n_bad;
            CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
        }
        CHECK_OK(br_ledger_close(ledger));
        CHECK_FAILS(fake_ledger_verify(path, &report), BR_E_MISMATCH);
        snprintf(line, sizeof line, "(%d finding%s in all)", n_bad, n_bad == 1 ? "" : "s");
        SAYS(br_last_error(), line);
        ck_assert_msg(strncmp(br_last_error(), "step 11: adapter digests differ: rollout ", 41) == 0, "%s", br_last_error());
        br_report_free(&report);
    }
}
END_TEST

/* ---- what is refused -------------------------------------------------------------------------------------------------------- */

static void spoil_field(int k, fake_step *step) {
    br_ledger_seq *seq = &step->seq[1];
    const int32_t t = seq->prompt_len;
    switch (k) {
    case 0: step->logprob[1][0][t] = 0x7fc00001u; break;
    case 1: step->logprob[1][1][t] = BR_UNSCORED; break;
    case 2: step->logprob[1][2][t] = 0xffffffffu; break;
    case 3: step->logprob[1][2][0] = 0xbf800000u; break;
    case 4: step->mask[1][0] = 1; break;
    case 5: step->mask[1][t] = 2; break;
    case 6: step->token[1][t] = -1; break;
    case 7: seq->uid = ""; break;
    case 8: seq->prompt_len = 0; break;
    case 9: seq->n_tok = 0; break;
    case 10: seq->reward = NAN; break;
    case 11: seq->advantage = INFINITY; break;
    case 12: seq->stop = 5; break;
    case 13: seq->group = -1; break;
    case 14: seq->sample = 1u << 24; break;
    case 15: step->step.step = 12; break;
    default: seq->temperature = NAN; break;
    }
}

START_TEST(what_cannot_be_recorded_is_refused) {
    static const char *const says[] = {
        "rollout log-prob 7fc00001", "again log-prob 7fc00000", "update log-prob ffffffff", "where nothing was sampled", "0 in a prompt", "mask 2",
        "token -1", "uid is empty", "prompt_len 0", "n_tok 0", "reward or advantage", "reward or advantage", "stop 5", "group -1",
        "sample 16777216", "step 12 cannot follow step 10", "temperature"};
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    fake_step_make(0, &step);
    CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
    for (int k = 0; k < (int)(sizeof says / sizeof says[0]); k++) {
        const int nan = k < 3 || k == 10 || k == 11 || k == 16;
        fake_step_make(1, &step);
        spoil_field(k, &step);
        CHECK_FAILS(br_ledger_append(ledger, &step.step, NULL), nan ? BR_E_NAN : BR_E_ARG);
        SAYS(br_last_error(), says[k]);
        if (k != 15)
            SAYS(br_last_error(), "step 11, sequence 1");
    }
    ck_assert_int_eq(br_ledger_step_count(ledger), 1);
    for (int i = 1; i < FAKE_STEPS; i++) {
        fake_step_make(i, &step);
        CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
    }
    CHECK_OK(br_ledger_close(ledger));
    ck_assert(fake_file_same(path, good));
}
END_TEST

START_TEST(a_ledger_is_no_rollout_file) {
    br_report report;
    CHECK_FAILS(br_job_parity(good, good, &report), BR_E_FORMAT);
    SAYS(br_last_error(), "bitroll verify checks it");
    br_report_free(&report);
    ck_assert(ledger_is_at(good) && !ledger_is_at(fake_path("none.h5")) && !ledger_is_at(test_tmp_dir()));
}
END_TEST

START_TEST(a_cut_file_is_a_sentence) {
    br_map map;
    CHECK_OK(br_file_map(good, &map));
    const size_t n = map.n;
    br_file_unmap(&map);
    for (size_t k = 0; k < 24; k++) {
        br_report report;
        fake_file_copy(good, path, n * k / 24);
        const br_status status = fake_ledger_verify(path, &report);
        ck_assert_msg(status == BR_E_FORMAT || status == BR_E_MISMATCH, "%zu of %zu bytes: %s", n * k / 24, n, br_status_name(status));
        br_report_free(&report);
    }
}
END_TEST

/* ---- kills, full disks, resumption ------------------------------------------------------------------------------------------ */

static br_status append_steps(br_ledger *ledger, int first, int n, int acked) {
    static fake_step step;
    for (int i = first; i < n; i++) {
        fake_step_make(i, &step);
        BR_TRY(br_ledger_append(ledger, &step.step, NULL));
        if (acked >= 0 && write(acked, "s", 1) != 1)
            _exit(9);
    }
    return BR_OK;
}

/* Writes the run in a child under a disk fault, which tells the parent by a byte after each step that was acknowledged. */
static int write_in_child(disk_fault kind, long at, int *wait_status) {
    int link[2], n_acked = 0;
    char byte;
    ck_assert_int_eq(pipe(link), 0);
    pid_t child = fork();
    if (child == 0) {
        const br_ledger_run run = fake_ledger_run();
        br_ledger *ledger = NULL;
        faulty_disk_fails(kind, at);
        br_status status = br_ledger_create(path, &run, &ledger);
        if (status == BR_OK)
            status = append_steps(ledger, 0, FAKE_STEPS, link[1]);
        const br_status closed = br_ledger_close(ledger);
        _exit(status == BR_OK && closed == BR_OK ? 0 : status == BR_E_IO || closed == BR_E_IO ? 1 : 2);
    }
    close(link[1]);
    while (read(link[0], &byte, 1) == 1)
        n_acked++;
    close(link[0]);
    waitpid(child, wait_status, 0);
    return n_acked;
}

/* What is left holds the steps that were acknowledged, and is gone on with to the file of a run that was never stopped. */
static void expect_goes_on(int n_acked) {
    const br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    ledger_reader *reader;
    if (!br_file_exists(path)) {
        ck_assert_int_eq(n_acked, 0);
        return;
    }
    CHECK_OK(ledger_open(path, &reader));
    const int64_t n = ledger_step_count(reader);
    ledger_close(reader);
    ck_assert_int_ge(n, n_acked);
    br_report report;
    const br_status wanted = n > 0 ? BR_OK : BR_E_MISMATCH; /* none was compared */
    CHECK_FAILS(fake_ledger_verify(path, &report), wanted);
    ck_assert(n == FAKE_STEPS || strstr(report.text, "not closed  its run goes on or was stopped; this is the committed part\n") != NULL);
    br_report_free(&report);
    CHECK_OK(br_ledger_resume(path, &run, n_acked, &ledger)); /* a checkpoint may be older than the ledger */
    CHECK_OK(append_steps(ledger, n_acked, FAKE_STEPS, -1));
    CHECK_OK(br_ledger_close(ledger));
    ck_assert(fake_file_same(path, good));
    fake_ledger_expect_good(path, FAKE_STEPS, root);
}

static void at_every_write(disk_fault kind, long step) {
    int wait_status = 1, n_hit = 0;
    for (long at = 1;; at += step) {
        unlink(path);
        const int n_acked = write_in_child(kind, at, &wait_status);
        const int killed = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL;
        const int failed = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 1;
        ck_assert_msg(killed || failed || wait_status == 0, "write %ld: child ended with %x", at, wait_status);
        if (wait_status == 0)
            break;
        n_hit++;
        expect_goes_on(n_acked);
    }
    ck_assert_int_gt(n_hit, 10);
}

START_TEST(a_kill_at_any_write_keeps_the_steps) {
    at_every_write(DISK_KILL, test_is_long() ? 1 : 7);
}
END_TEST

START_TEST(a_kill_inside_a_write_keeps_the_steps) {
    at_every_write(DISK_TEAR, test_is_long() ? 1 : 11);
}
END_TEST

START_TEST(a_full_disk_keeps_the_steps) {
    at_every_write(DISK_FULL, test_is_long() ? 1 : 13);
}
END_TEST

START_TEST(after_a_failed_sync_nothing_more_is_taken) {
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    CHECK_OK(append_steps(ledger, 0, 1, -1));
    faulty_disk_syncs(EIO);
    fake_step_make(1, &step);
    CHECK_FAILS(br_ledger_append(ledger, &step.step, NULL), BR_E_IO);
    faulty_disk_syncs(0);
    CHECK_FAILS(br_ledger_append(ledger, &step.step, NULL), BR_E_IO);
    SAYS(br_last_error(), "writing failed before");
    ck_assert_int_eq(br_ledger_step_count(ledger), 1);
    CHECK_FAILS(br_ledger_close(ledger), BR_E_IO);
    expect_goes_on(1);
}
END_TEST

START_TEST(resumption_cuts_and_goes_on) {
    br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    for (int n = 0; n <= FAKE_STEPS; n++) {
        fake_file_copy(good, path, SIZE_MAX);
        CHECK_OK(br_ledger_resume(path, &run, n, &ledger));
        ck_assert_int_eq(br_ledger_step_count(ledger), n);
        CHECK_OK(append_steps(ledger, n, FAKE_STEPS, -1));
        CHECK_OK(br_ledger_close(ledger));
        ck_assert(fake_file_same(path, good));
    }
    CHECK_FAILS(br_ledger_resume(path, &run, FAKE_STEPS + 1, &ledger), BR_E_ARG);
    SAYS(br_last_error(), "cannot keep 5 steps: it has 4");
    CHECK_FAILS(br_ledger_resume(path, &run, -1, &ledger), BR_E_ARG);
    run.config = "seed: 2\n";
    run.n_config = 8;
    CHECK_FAILS(br_ledger_resume(path, &run, 2, &ledger), BR_E_MISMATCH);
    SAYS(br_last_error(), "cannot resume: its config digest is ");
    run = fake_ledger_run();
    run.base_trainer.hi = 7;
    CHECK_FAILS(br_ledger_resume(path, &run, 2, &ledger), BR_E_MISMATCH);
    SAYS(br_last_error(), "trainer base digest");
    CHECK_FAILS(br_ledger_resume(fake_path("none.h5"), &run, 0, &ledger), BR_E_NOT_FOUND);
    ck_assert(fake_file_same(path, good));
}
END_TEST

START_TEST(memory_that_runs_out_is_a_status) {
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    br_ledger *ledger;
    br_report report;
    br_status status = BR_E_NOMEM;
    int n = 0;
    fake_step_make(2, &step);
    fake_file_copy(good, path, SIZE_MAX);
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = br_ledger_resume(path, &run, 2, &ledger);
        ck_assert(status == BR_OK || (status == BR_E_NOMEM && !ledger));
    }
    ck_assert_int_gt(n, 30);
    for (n = 0, status = BR_E_NOMEM; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = br_ledger_append(ledger, &step.step, NULL);
        ck_assert(status == BR_OK || status == BR_E_NOMEM);
    }
    br_mem_fail_nth(0);
    ck_assert_int_gt(n, 1);
    CHECK_OK(append_steps(ledger, 3, FAKE_STEPS, -1));
    CHECK_OK(br_ledger_close(ledger));
    ck_assert(fake_file_same(path, good));
    for (n = 0, status = BR_E_NOMEM; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = fake_ledger_verify(path, &report);
        br_report_free(&report);
        ck_assert(status == BR_OK || status == BR_E_NOMEM);
    }
    br_mem_fail_nth(0);
    ck_assert_int_gt(n, 30);
}
END_TEST

/* ---- the model's word ------------------------------------------------------------------------------------------------------- */

enum { MODEL_SEQS = 6, MODEL_NEW = 9 };

static rig_model pico;
static rig_request request[MODEL_SEQS];
static rig_text text[MODEL_SEQS];

static void make_model(void) {
    make_good();
    rig_model_make(&pico, "pico");
    rig_requests(&pico, 3, MODEL_SEQS, 2, 90, MODEL_NEW, request);
}

/* Three steps of the engine's own texts, under the base, adapter a, adapter b, or only those from `first` on. flipped: a bit of adapter
 * a's step, in all three arrays, so that only the model can tell. trainer: the adapter that the trainer's records name, the rollout's when NULL. */
static void write_model_run(int first, int flipped, const char *trainer) {
    static uint8_t mask[MODEL_SEQS][RIG_TOK_MAX];
    const br_engine_options options = rig_options(&pico);
    br_ledger_run run = fake_ledger_run();
    br_engine *engine;
    br_ledger *ledger;
    CHECK_OK(br_engine_open(&options, &engine));
    run.base_rollout = run.base_trainer = br_engine_weights_digest(engine);
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    for (int i = first; i < 3; i++) {
        br_ledger_seq seq[MODEL_SEQS];
        br_ledger_step step = {.step = i, .version = i, .seq = seq, .n_seq = MODEL_SEQS};
        CHECK_OK(br_engine_adapter_digest(engine, i == 1 ? "a" : i == 2 ? "b" : "base", &step.adapter_rollout));
        step.adapter_trainer = step.adapter_rollout;
        if (trainer)
            CHECK_OK(br_engine_adapter_digest(engine, trainer, &step.adapter_trainer));
        for (int s = 0; s < MODEL_SEQS; s++)
            request[s].adapter = i - 1;
        rig_generate(&options, request, NULL, MODEL_SEQS, text);
        if (i == 1 && flipped)
            text[4].logprob[0][request[4].n_prompt + 2] ^= 1;
        for (int s = 0; s < MODEL_SEQS; s++) {
            for (int32_t t = 0; t < text[s].n_tok; t++)
                mask[s][t] = t >= request[s].n_prompt;
            seq[s] = (br_ledger_seq){.uid = request[s].uid, .sample = request[s].sample, .prompt_len = request[s].n_prompt, .n_tok = text[s].n_tok,
                                     .stop = (int32_t)text[s].stop, .temperature = request[s].temperature, .token = text[s].token, .mask = mask[s],
                                     .rollout = text[s].logprob[0], .again = text[s].logprob[0], .update = text[s].logprob[0]};
        }
        CHECK_OK(br_ledger_append(ledger, &step, NULL));
    }
    CHECK_OK(br_ledger_close(ledger));
    br_engine_close(engine);
}

static br_status verify_with(int32_t n_adapter, int32_t n_recompute, br_report *report) {
    br_verify_options options = {.engine = rig_options(&pico), .path = path, .n_recompute = n_recompute};
    options.engine.n_adapter = n_adapter;
    return br_job_verify(&options, NULL, report);
}

START_TEST(the_model_scores_again) {
    br_report report;
    char line[128];
    write_model_run(0, 0, NULL);
    CHECK_OK(verify_with(2, 0, &report));
    snprintf(line, sizeof line, "recomputed  18 sequences of 3 steps: 0 of %lld log-probs differ\n", (long long)report.n_compared);
    SAYS(report.text, line);
    br_report_free(&report);
    CHECK_OK(verify_with(1, 2, &report)); /* the base and adapter a */
    SAYS(report.text, "recomputed  4 sequences of 2 steps: 0 of ");
    br_report_free(&report);
    write_model_run(0, 1, NULL);
    CHECK_OK(fake_ledger_verify(path, &report)); /* no model, no difference */
    br_report_free(&report);
    CHECK_FAILS(verify_with(2, 0, &report), BR_E_MISMATCH);
    snprintf(line, sizeof line, "step 1: %s#%u position %d: log-prob ", request[4].uid, request[4].sample, request[4].n_prompt + 2);
    SAYS(br_last_error(), line);
    SAYS(report.text, "of 3 steps: 1 of ");
    br_report_free(&report);
}
END_TEST

static void adapter_digests(char text_of[2][BR_DIGEST_TEXT_BYTES]) {
    static const char *const name[] = {"a", "b"};
    const br_engine_options options = rig_options(&pico);
    br_engine *engine;
    br_digest digest;
    CHECK_OK(br_engine_open(&options, &engine));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(br_engine_adapter_digest(engine, name[i], &digest));
        br_digest_text(digest, text_of[i]);
    }
    br_engine_close(engine);
}

/* As the adapter after a run's last update is. */
START_TEST(another_adapter_is_refused_with_both_digests) {
    br_report report;
    char line[256], text_of[2][BR_DIGEST_TEXT_BYTES];
    adapter_digests(text_of);
    write_model_run(2, 0, NULL);
    for (int32_t n = 0; n < 2; n++) {
        CHECK_FAILS(verify_with(n, 1, &report), BR_E_MISMATCH);
        snprintf(line, sizeof line, "given is %s, the last step ran on %s, which a training run leaves in its folder adapter_last_step",
                 n ? text_of[0] : "none", text_of[1]);
        SAYS(br_last_error(), line);
        br_report_free(&report);
    }
}
END_TEST

/* Of a stale run the kept adapter is the trainer's: it was said to be missing although it was given. */
START_TEST(the_trainers_adapter_of_a_stale_run_is_not_asked_for) {
    br_report report;
    char line[320], text_of[2][BR_DIGEST_TEXT_BYTES];
    adapter_digests(text_of);
    write_model_run(2, 0, "a");
    for (int32_t n = 0; n < 2; n++) {
        CHECK_FAILS(verify_with(n, 1, &report), BR_E_MISMATCH);
        snprintf(line, sizeof line, "given is %s, the rollout of the last step ran on %s, which a run of arm M3 leaves in its folder "
                 "adapter_last_rollout; adapter_last_step is what its trainer ran on, %s", n ? text_of[0] : "none", text_of[1], text_of[0]);
        SAYS(br_last_error(), line);
        br_report_free(&report);
    }
}
END_TEST

START_TEST(another_model_is_refused) {
    br_report report;
    br_verify_options options = {.engine = rig_options(&pico), .path = good};
    CHECK_FAILS(br_job_verify(&options, NULL, &report), BR_E_MISMATCH);
    SAYS(br_last_error(), "made with other base weights than");
    br_report_free(&report);
}
END_TEST

Suite *test_ledger_run_suite(void) {
    Suite *suite = suite_create("ledger_run");
    TCase *sides = tcase_create("sides"), *faults = tcase_create("faults"), *model = tcase_create("model");
    TCase *const all[] = {sides, faults, model};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tcase_add_checked_fixture(all[i], all[i] == model ? make_model : make_good, NULL);
        tcase_set_timeout(all[i], test_is_long() ? 900 : 120);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_test(sides, differing_log_probs_are_told);
    tcase_add_test(sides, a_token_is_a_mismatch_once);
    tcase_add_test(sides, kl_is_what_it_says);
    tcase_add_test(sides, differing_digests_of_the_two_sides_are_told);
    tcase_add_test(sides, steps_of_other_adapters_are_counted);
    tcase_add_test(sides, what_cannot_be_recorded_is_refused);
    tcase_add_test(sides, a_ledger_is_no_rollout_file);
    tcase_add_test(faults, a_cut_file_is_a_sentence);
    tcase_add_test(faults, a_kill_at_any_write_keeps_the_steps);
    tcase_add_test(faults, a_kill_inside_a_write_keeps_the_steps);
    tcase_add_test(faults, a_full_disk_keeps_the_steps);
    tcase_add_test(faults, after_a_failed_sync_nothing_more_is_taken);
    tcase_add_test(faults, resumption_cuts_and_goes_on);
    tcase_add_test(faults, memory_that_runs_out_is_a_status);
    tcase_add_test(model, the_model_scores_again);
    tcase_add_test(model, another_adapter_is_refused_with_both_digests);
    tcase_add_test(model, the_trainers_adapter_of_a_stale_run_is_not_asked_for);
    tcase_add_test(model, another_model_is_refused);
    return suite;
}
