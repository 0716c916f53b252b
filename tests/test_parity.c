/* Parity: equal files pass, and each planted difference is found, counted and located. */
#include "br_mem.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "parity.h"
#include "test_support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { N_SEQ = 6 };

static char path_a[512], path_b[512];

/* A rollout file, and a trainer's file of it in another order. */
static void write_pair(void) {
    rollout_meta a = fake_meta("rollout", "generate/1"), b = fake_meta("trainer", "score/2");
    int order[N_SEQ] = {3, 1, 5, 0, 4, 2};
    snprintf(path_a, sizeof path_a, "%s/a.h5", test_tmp_dir());
    snprintf(path_b, sizeof path_b, "%s/b.h5", test_tmp_dir());
    fake_write(path_a, &a, NULL, N_SEQ, 0);
    fake_write(path_b, &b, order, N_SEQ, 1);
}

/* Writes file b with sequences order[], sequence `victim` changed by `plant` before it is sealed. */
typedef void (*planter)(fake_seq *f);

static void write_planted(const rollout_meta *meta, const int *order, int n, int victim, planter plant) {
    rollout_writer *w;
    fake_seq f;
    CHECK_OK(rollout_create(path_b, meta, &w));
    for (int k = 0; k < n; k++) {
        fake_make(meta, order ? order[k] : k, &f);
        fake_score(meta, &f);
        if (plant && (order ? order[k] : k) == victim)
            plant(&f);
        CHECK_OK(rollout_append(w, &f.seq));
    }
    CHECK_OK(rollout_close(w));
}

static int64_t sampled_of(int i) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
    fake_make(&meta, i, &f);
    return f.seq.n_tok - f.seq.prompt_len;
}

static int64_t sampled_in_all(void) {
    int64_t n = 0;
    for (int i = 0; i < N_SEQ; i++)
        n += sampled_of(i);
    return n;
}

static int32_t length_of(int i) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
    fake_make(&meta, i, &f);
    return f.seq.n_tok;
}

START_TEST(rollout_and_trainer_agree) {
    br_report report;
    write_pair();
    CHECK_OK(br_job_parity(path_a, path_b, &report));
    ck_assert_int_eq(report.n_compared, sampled_in_all());
    ck_assert_int_eq(report.n_differ, 0);
    ck_assert_int_eq(report.n_seq, N_SEQ);
    ck_assert_int_eq(report.first_seq, -1);
    ck_assert_int_eq(report.first_pos, -1);
    ck_assert_int_eq(report.max_ulp, 0);
    ck_assert(report.k1 == 0 && report.k3 == 0 && report.seconds >= 0);
    ck_assert(report.logprob_digest.lo != 0 && report.weights_digest.lo == 21);
    ck_assert_msg(strstr(report.text, "6 joined, 0 only in the first file") != NULL, "%s", report.text);
    br_report_free(&report);
    CHECK_OK(br_job_parity(path_b, path_a, &report));
    ck_assert_int_eq(report.n_compared, sampled_in_all());
    br_report_free(&report);
}
END_TEST

static void one_ulp(fake_seq *f) {
    f->logprob[f->seq.n_tok - 1] = 0xbf000001u;
}

/* The mantissa's lowest bit of one log-prob, in the sequence that the trainer's file has first. */
START_TEST(one_bit_is_found_and_located) {
    rollout_meta meta = fake_meta("trainer", "score/2");
    br_report report;
    uint32_t bits;
    int64_t offset[N_SEQ + 1];
    int order[N_SEQ] = {3, 1, 5, 0, 4, 2};
    write_pair();
    write_planted(&meta, order, N_SEQ, 3, one_ulp);
    h5_edit_read(path_a, "/seq/offset", offset);
    uint32_t all[N_SEQ * FAKE_TOK_MAX];
    h5_edit_read(path_a, "/tokens/logprob", all);
    bits = 0xbf000000u;
    all[offset[4] - 1] = bits;
    h5_edit_write(path_a, "/tokens/logprob", all);
    CHECK_FAILS(br_job_parity(path_a, path_b, &report), BR_E_MISMATCH);
    ck_assert_int_eq(report.n_differ, 1);
    ck_assert_int_eq(report.n_compared, sampled_in_all());
    ck_assert_int_eq(report.first_seq, 3);
    ck_assert_int_eq(report.first_pos, length_of(3) - 1);
    ck_assert_int_eq(report.max_ulp, 1);
    double d = (double)-0x1.000002p-1 - (double)-0x1p-1, n = (double)report.n_compared;
    ck_assert(report.k1 == -d / n);
    ck_assert(fabs(report.k3 - (exp(d) - 1 - d) / n) < 1e-16 && report.k3 > 0);
    ck_assert_msg(strstr(br_last_error(), "uid 'prompt-1', sample 1") &&
                      strstr(br_last_error(), "bf000000 against bf000001"),
                  "%s", br_last_error());
    ck_assert_msg(strstr(report.text, "ulp 1 ") != NULL, "%s", report.text);
    br_report_free(&report);
    CHECK_FAILS(br_job_parity(path_b, path_a, &report), BR_E_MISMATCH);
    ck_assert(report.k1 == -d / n); /* the sign is that of the producers, not of the order on the command line */
    ck_assert_int_eq(report.first_seq, 0);
    br_report_free(&report);
}
END_TEST

static void nan_slot(fake_seq *f) { f->logprob[f->seq.n_tok - 1] = 0x7fc00001u; }
static void unscored_slot(fake_seq *f) { f->logprob[f->seq.n_tok - 1] = BR_UNSCORED; }
static void nan_in_prompt(fake_seq *f) { f->logprob[0] = 0xffffffffu; }
static void other_token(fake_seq *f) { f->token[f->seq.n_tok - 1] ^= 1; }
static void other_mask(fake_seq *f) { f->mask[f->seq.n_tok - 1] = 0; }
static void shorter(fake_seq *f) { f->seq.n_tok--; }
static void other_adapter(fake_seq *f) { f->seq.adapter_digest.lo ^= 1; }
static void other_temperature(fake_seq *f) { f->seq.temperature *= 2; }
static void other_seed(fake_seq *f) { f->seq.seed ^= 1; }
static void other_uid(fake_seq *f) { f->seq.uid[0] = 'x'; }
static void other_sample(fake_seq *f) { f->seq.sample = 7; }
static void kept_and_raw(fake_seq *f) { f->logprob_kept[f->seq.n_tok - 1] = f->logprob_raw[f->seq.n_tok - 1] = 0; }
static void prompt_score(fake_seq *f) { f->logprob[1] ^= 1; }

static void expect_verdict(planter plant, br_status wanted, const char *said) {
    rollout_meta meta = fake_meta("trainer", "score/2");
    br_report report;
    write_planted(&meta, NULL, N_SEQ, 2, plant);
    CHECK_FAILS(br_job_parity(path_a, path_b, &report), wanted);
    ck_assert_msg(wanted == BR_OK || strstr(br_last_error(), said) != NULL, "expected '%s' in: %s", said, br_last_error());
    br_report_free(&report);
}

START_TEST(each_planted_difference_is_named) {
    write_pair();
    expect_verdict(NULL, BR_OK, "");
    expect_verdict(nan_slot, BR_E_MISMATCH, "1 scored slots hold a NaN");
    expect_verdict(unscored_slot, BR_E_MISMATCH, "1 scored slots hold a NaN or no score");
    expect_verdict(nan_in_prompt, BR_E_MISMATCH, "1 scored slots hold a NaN");
    expect_verdict(other_token, BR_E_MISMATCH, "1 sequences have different tokens");
    expect_verdict(other_mask, BR_E_MISMATCH, "1 sequences have different tokens or masks");
    expect_verdict(shorter, BR_E_MISMATCH, "1 sequences have different tokens");
    expect_verdict(other_adapter, BR_E_MISMATCH, "1 sequences have different adapter digests");
    expect_verdict(other_temperature, BR_E_MISMATCH, "1 sequences have different sampling settings");
    expect_verdict(other_seed, BR_E_MISMATCH, "1 sequences have different sampling settings");
    expect_verdict(other_uid, BR_E_MISMATCH, "2 sequences are in one file only");
    expect_verdict(other_sample, BR_E_MISMATCH, "2 sequences are in one file only");
    expect_verdict(kept_and_raw, BR_OK, ""); /* a trainer has no kept log-probs; parity is of `logprob` */
    expect_verdict(prompt_score, BR_OK, "");
}
END_TEST

static void expect_file_verdict(const rollout_meta *meta, const int *order, int n, const char *said) {
    br_report report;
    write_planted(meta, order, n, -1, NULL);
    CHECK_FAILS(br_job_parity(path_a, path_b, &report), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), said) != NULL, "expected '%s' in: %s", said, br_last_error());
    br_report_free(&report);
}

START_TEST(each_difference_of_files_is_named) {
    rollout_meta meta = fake_meta("trainer", "score/2"), other;
    int doubled[N_SEQ + 1] = {0, 1, 2, 3, 4, 5, 2};
    write_pair();
    other = meta, other.run_uid.lo++;
    expect_file_verdict(&other, NULL, N_SEQ, "run_uid");
    other = meta, other.weights_digest.lo++;
    expect_file_verdict(&other, NULL, N_SEQ, "weights digest");
    other = meta, other.contract_digest.hi++;
    expect_file_verdict(&other, NULL, N_SEQ, "contract digest");
    other = meta, other.config_digest.hi++;
    expect_file_verdict(&other, NULL, N_SEQ, "model config digest");
    other = meta, strcpy(other.producer_stamp, "generate/1");
    expect_file_verdict(&other, NULL, N_SEQ, "producer stamp");
    expect_file_verdict(&meta, NULL, N_SEQ - 1, "1 sequences are in one file only");
    expect_file_verdict(&meta, doubled, N_SEQ + 1, "1 sequences come twice");
    expect_file_verdict(&meta, NULL, 0, "6 sequences are in one file only");
    br_report report;
    CHECK_FAILS(br_job_parity(path_a, path_a, &report), BR_E_MISMATCH);
    br_report_free(&report);
    CHECK_FAILS(br_job_parity(path_a, "/nonexistent/b.h5", &report), BR_E_NOT_FOUND);
    br_report_free(&report);
}
END_TEST

START_TEST(nothing_compared_is_not_a_pass) {
    rollout_meta a = fake_meta("rollout", "generate/1"), b = fake_meta("trainer", "score/2");
    br_report report;
    write_pair();
    fake_write(path_a, &a, NULL, 0, 0);
    fake_write(path_b, &b, NULL, 0, 1);
    CHECK_FAILS(br_job_parity(path_a, path_b, &report), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), "nothing was compared") != NULL, "%s", br_last_error());
    br_report_free(&report);
}
END_TEST

static void ended_in_error(fake_seq *f) {
    f->seq.status = 1;
    f->seq.error = BR_E_NAN;
    for (int32_t t = 0; t < f->seq.n_tok; t++)
        f->logprob[t] = BR_UNSCORED;
}

/* A trainer that met the same NaN has no scores to compare; the tokens still have to be the same. */
START_TEST(a_sequence_that_ended_in_error_is_counted_not_failed) {
    rollout_meta meta = fake_meta("trainer", "score/2");
    br_report report;
    write_pair();
    write_planted(&meta, NULL, N_SEQ, 2, ended_in_error);
    CHECK_OK(br_job_parity(path_a, path_b, &report));
    ck_assert_int_eq(report.n_error, 1);
    ck_assert_int_eq(report.n_compared, sampled_in_all() - sampled_of(2));
    br_report_free(&report);
}
END_TEST

START_TEST(distances_count_representable_numbers) {
    ck_assert_int_eq(parity_ulp(0x3f800000u, 0x3f800000u), 0);
    ck_assert_int_eq(parity_ulp(0x3f800000u, 0x3f800001u), 1);
    ck_assert_int_eq(parity_ulp(0xbf800001u, 0xbf800000u), 1);
    ck_assert_int_eq(parity_ulp(0x00000000u, 0x80000000u), 1);
    ck_assert_int_eq(parity_ulp(0x00000001u, 0x80000001u), 3);
    ck_assert_int_eq(parity_ulp(0x7f800000u, 0xff800000u), 2 * 0x7f800000ll + 1);
    ck_assert_int_eq(parity_ulp(0x007fffffu, 0x00800000u), 1);
    int64_t before = -1;
    for (int bucket = 0; bucket < PARITY_BUCKET_COUNT; bucket++) {
        int64_t first, last;
        parity_bucket_range(bucket, &first, &last);
        ck_assert_int_eq(first, before + 1);
        before = last;
        ck_assert_int_eq(parity_bucket(first), bucket);
        ck_assert_int_eq(parity_bucket(last), bucket);
    }
    ck_assert_int_eq(parity_bucket(2 * 0x7f800000ll + 1), PARITY_BUCKET_COUNT - 1);
}
END_TEST

static void minus_zero(fake_seq *f) { f->logprob[f->seq.n_tok - 1] = 0x80000000u; }
static void plus_zero(fake_seq *f) { f->logprob[f->seq.n_tok - 1] = 0x00000000u; }
static void minus_infinity(fake_seq *f) { f->logprob[f->seq.n_tok - 1] = 0xff800000u; }

/* What a comparison of floats would miss, and what would poison its sums. */
START_TEST(zeros_and_infinities_are_compared_as_bits) {
    rollout_meta a = fake_meta("rollout", "generate/1"), b = fake_meta("trainer", "score/2");
    br_report report;
    char kept[512];
    write_pair();
    snprintf(kept, sizeof kept, "%s", path_b);
    const struct { planter a, b; br_status status;
    } given[] = {
        {minus_zero, plus_zero, BR_E_MISMATCH},
        {minus_infinity, minus_infinity, BR_OK},
        {minus_infinity, plus_zero, BR_E_MISMATCH},
    };
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        snprintf(path_b, sizeof path_b, "%s", path_a);
        write_planted(&a, NULL, N_SEQ, 2, given[k].a);
        snprintf(path_b, sizeof path_b, "%s", kept);
        write_planted(&b, NULL, N_SEQ, 2, given[k].b);
        CHECK_FAILS(br_job_parity(path_a, path_b, &report), given[k].status);
        ck_assert_int_eq(report.n_differ, given[k].status != BR_OK);
        ck_assert_int_eq(report.first_seq, given[k].status != BR_OK ? 2 : -1);
        ck_assert(!isnan(report.k1) && !isnan(report.k3));
        ck_assert(k != 2 || (isinf(report.k3) && isinf(report.k1)));
        br_report_free(&report);
    }
}
END_TEST

START_TEST(memory_that_runs_out_is_a_status) {
    br_report report;
    br_status status = BR_E_NOMEM;
    int n = 0;
    write_pair();
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = br_job_parity(path_a, path_b, &report);
        ck_assert_msg(status == BR_OK || status == BR_E_NOMEM, "%d: %s", n, br_status_name(status));
        br_report_free(&report);
    }
    ck_assert_int_gt(n, 60);
}
END_TEST

Suite *test_parity_suite(void) {
    Suite *suite = suite_create("parity");
    TCase *all = tcase_create("parity");
    tcase_set_timeout(all, 60);
    tcase_add_test(all, rollout_and_trainer_agree);
    tcase_add_test(all, one_bit_is_found_and_located);
    tcase_add_test(all, each_planted_difference_is_named);
    tcase_add_test(all, each_difference_of_files_is_named);
    tcase_add_test(all, nothing_compared_is_not_a_pass);
    tcase_add_test(all, a_sequence_that_ended_in_error_is_counted_not_failed);
    tcase_add_test(all, distances_count_representable_numbers);
    tcase_add_test(all, zeros_and_infinities_are_compared_as_bits);
    tcase_add_test(all, memory_that_runs_out_is_a_status);
    suite_add_tcase(suite, all);
    return suite;
}
