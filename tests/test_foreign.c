/* Files of other stacks: what they may hold, what is compared, and each planted mistake with the hint that it must give. */
#include "br_mem.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "test_support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { N_SEQ = 12 };

static char path_a[512], path_b[512];

static uint32_t bits_of(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static double some_logprob(int i, int32_t t) {
    return -0.01 - 6.0 * (double)(test_mix((uint64_t)i * 64 + (uint64_t)t) % 100003) / 100003;
}

/* Sequence i as a stack would have it: log-probs of ordinary size, temperature 0.7. */
static void make(const rollout_meta *meta, int i, fake_seq *f) {
    fake_make(meta, i, f);
    f->seq.temperature = 0.7f;
    f->seq.top_p = 1;
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++) {
        const double x = some_logprob(i, t);
        f->logprob[t] = bits_of(x);
        f->logprob_raw[t] = bits_of(x * 0.8 - 0.1 * (t % 3));
        f->logprob_kept[t] = bits_of(x / (1 + 0.1 * (t % 4)));
        for (int k = 0; k < FAKE_TOP; k++) { /* alternatives 5, 6, 7: gaps that depend on the token */
            f->top_token[t * FAKE_TOP + k] = 5 + k;
            f->top_logprob[t * FAKE_TOP + k] = bits_of(x / 2 - k * (0.5 + t % 4));
        }
    }
    fake_seal(meta, f);
}

typedef void (*planter)(fake_seq *f, int i);

/* A rollout file of ours; as a dump its digests and chain are simply not looked at. */
static void write_ours(const char *path, const int *order, int n, planter plant) {
    const rollout_meta meta = fake_meta("rollout", "generate/1");
    rollout_writer *w;
    fake_seq f;
    CHECK_OK(rollout_create(path, &meta, &w));
    for (int k = 0; k < n; k++) {
        const int i = order ? order[k] : k;
        make(&meta, i, &f);
        if (plant)
            plant(&f, i);
        CHECK_OK(rollout_append(w, &f.seq));
    }
    CHECK_OK(rollout_close(w));
}

static void become_foreign(const char *path, const char *producer, const char *kind) {
    h5_edit_attribute_set(path, "format", "foreign-logprobs");
    h5_edit_attribute_set(path, "producer", producer);
    h5_edit_attribute_set(path, "logprob_kind", kind);
    h5_edit_attribute_set(path, "sampler", NULL);
    h5_edit_attribute_add(path, "source", "vllm_json");
    h5_edit_unlink(path, "/commit");
    h5_edit_unlink(path, "/seq/receipt");
}

static void write_foreign(const char *path, const int *order, int n, planter plant, const char *kind) {
    write_ours(path, order, n, plant);
    become_foreign(path, "trainer", kind);
}

static void set_paths(void) {
    snprintf(path_a, sizeof path_a, "%s/a.h5", test_tmp_dir());
    snprintf(path_b, sizeof path_b, "%s/b.h5", test_tmp_dir());
}

static void setup(void) {
    set_paths();
    write_ours(path_a, NULL, N_SEQ, NULL);
}

static int64_t sampled_in_all(void) {
    const rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
    int64_t n = 0;
    for (int i = 0; i < N_SEQ; i++) {
        fake_make(&meta, i, &f);
        n += f.seq.n_tok - f.seq.prompt_len;
    }
    return n;
}

static void expect(br_status wanted, const char *said, const char *never, br_report *report) {
    CHECK_FAILS(br_job_parity_foreign(path_a, path_b, report), wanted);
    ck_assert_msg(!said || strstr(report->text, said), "expected '%s' in:\n%s", said, report->text);
    ck_assert_msg(!never || !strstr(report->text, never), "did not expect '%s' in:\n%s", never, report->text);
}

/* Plants in a dump of the trainer and looks for one hint, and only one. */
static void expect_hint(planter plant, const char *said) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, plant, "full_softmax_over_T");
    expect(BR_E_MISMATCH, said, NULL, &report);
    const char *hint = strstr(report.text, "hint ");
    ck_assert_msg(hint && !strstr(hint + 1, "\nhint "), "expected one hint:\n%s", report.text);
    br_report_free(&report);
}

START_TEST(equal_files_pass_in_any_order) {
    const int order[N_SEQ] = {3, 1, 5, 0, 4, 2, 11, 10, 9, 6, 8, 7};
    br_report report;
    write_foreign(path_b, order, N_SEQ, NULL, "full_softmax_over_T");
    expect(BR_OK, "12 joined, 0 only in the first file, 0 only in the second, 0 twice", "hint", &report);
    ck_assert_int_eq(report.n_compared, sampled_in_all());
    ck_assert_int_eq(report.n_differ, 0);
    ck_assert_int_eq(report.first_seq, -1);
    ck_assert(report.k1 == 0 && report.k3 == 0);
    ck_assert_msg(strstr(report.text, "pearson     1\n"), "%s", report.text);
    br_report_free(&report);
    CHECK_OK(br_job_parity_foreign(path_b, path_a, &report));
    br_report_free(&report);
    CHECK_FAILS(br_job_parity(path_a, path_b, &report), BR_E_FORMAT); /* what cannot be verified is no file of ours */
    br_report_free(&report);
}
END_TEST

static int32_t last(const fake_seq *f) {
    return f->seq.n_tok - 1;
}

static void one_ulp(fake_seq *f, int i) {
    if (i == 4)
        f->logprob[last(f)]++;
}

START_TEST(one_ulp_is_located) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, one_ulp, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "first       uid 'prompt-2', sample 0, position ", NULL, &report);
    ck_assert_int_eq(report.n_differ, 1);
    ck_assert_int_eq(report.max_ulp, 1);
    ck_assert_int_eq(report.first_seq, 4);
    ck_assert_msg(strstr(report.text, "\nulp 1 ") && strstr(report.text, "hint        none:"), "%s", report.text);
    ck_assert(report.k1 != 0 && report.k3 > 0);
    const double k1 = report.k1;
    br_report_free(&report);
    CHECK_FAILS(br_job_parity_foreign(path_b, path_a, &report), BR_E_MISMATCH);
    ck_assert(report.k1 == k1); /* the trainer's minus the rollout's, in either order */
    br_report_free(&report);
}
END_TEST

/* ---- hints --------------------------------------------------------------------------------------------------------------------- */

/* A stack's own noise: another last bit in most slots. */
static void noise(fake_seq *f, int i) {
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] += (uint32_t)(test_mix((uint64_t)(i * 64 + t)) % 64) - 32;
}

static void late(fake_seq *f, int i) {
    noise(f, i);
    for (int32_t t = last(f); t > f->seq.prompt_len; t--)
        f->logprob[t] = f->logprob[t - 1];
    f->logprob[f->seq.prompt_len] = 0;
}

static void early_by_two(fake_seq *f, int i) {
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = t + 2 < f->seq.n_tok ? bits_of(some_logprob(i, t + 2)) : 0xbf000000u;
}

/* The response's log-probs at the beginning of the text. */
static void at_the_front(fake_seq *f, int i) {
    const int32_t n = f->seq.n_tok - f->seq.prompt_len, begin = f->seq.prompt_len > 3 ? f->seq.prompt_len - 3 : f->seq.prompt_len;
    (void)i;
    memmove(f->logprob + begin, f->logprob + f->seq.prompt_len, (size_t)n * sizeof f->logprob[0]);
    for (int32_t t = begin; t < f->seq.n_tok; t++) {
        f->mask[t] = t < begin + n;
        f->logprob[t] = f->mask[t] ? f->logprob[t] : BR_UNSCORED;
    }
    f->seq.prompt_len = begin;
}

static void zeros(fake_seq *f, int i) {
    (void)i;
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = 0;
}

static void probabilities(fake_seq *f, int i) {
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = bits_of(exp(some_logprob(i, t)));
}

static void negated(fake_seq *f, int i) {
    (void)i;
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] ^= 0x80000000u;
}

static void base_two(fake_seq *f, int i) {
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = bits_of(some_logprob(i, t) / log(2));
}

static void bfloat16(fake_seq *f, int i) {
    (void)i;
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = (f->logprob[t] + 0x8000u) & 0xffff0000u;
}

static void at_temperature_1(fake_seq *f, int i) {
    noise(f, i);
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = f->logprob_raw[t];
}

static void kept(fake_seq *f, int i) {
    (void)i;
    memcpy(f->logprob, f->logprob_kept, sizeof f->logprob);
}

static void raised(fake_seq *f, int i) {
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        f->logprob[t] = bits_of(some_logprob(i, t) + 0.004 * (t % 9));
}

/* Alternatives at another temperature than the file says. */
static void other_gaps(fake_seq *f, int i) {
    noise(f, i);
    for (int32_t t = f->seq.prompt_len; t < f->seq.n_tok; t++)
        for (int k = 0; k < FAKE_TOP; k++)
            f->top_logprob[t * FAKE_TOP + k] = bits_of(some_logprob(i, t) / 3 - 1.4 * k * (0.5 + t % 4));
}

START_TEST(each_planted_mistake_gives_its_hint) {
    expect_hint(noise, "hint        none:");
    expect_hint(late, "hint        shift: the second file's log-probs stand one token too late: read so, ");
    expect_hint(early_by_two, "hint        shift: the second file's log-probs stand two tokens too early");
    expect_hint(at_the_front, "hint        offset: ");
    expect_hint(zeros, "hint        zeros: every log-prob of the second file is 0");
    expect_hint(base_two, "hint        unit: the second file's log-probs are 1.4427 times");
    expect_hint(bfloat16, "hint        precision: every log-prob of the second file");
    expect_hint(at_temperature_1, "hint        temperature: the second file agrees with the first's log-probs at temperature 1");
    expect_hint(kept, "hint        truncation: the second file agrees with the first's log-probs over the kept tokens only");
    expect_hint(raised, "hint        truncation: the second file is the higher in ");
    expect_hint(other_gaps, "hint        temperature: the gaps between two alternatives of a token are 1.4 times as wide");
}
END_TEST

/* Two hints, both right: neither is a log-prob. */
START_TEST(what_is_no_logprob_is_said_as_well) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, probabilities, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "hint        probabilities: the second file holds probabilities", NULL, &report);
    ck_assert_msg(strstr(report.text, "hint        range: "), "%s", report.text);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, negated, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "hint        unit: the second file's log-probs are -1 times", NULL, &report);
    br_report_free(&report);
}
END_TEST

/* ---- what is not comparable ---------------------------------------------------------------------------------------------------------- */

static void nan_slot(fake_seq *f, int i) {
    if (i == 2)
        f->logprob[last(f)] = 0xffc00000u;
}

static void unscored_slot(fake_seq *f, int i) {
    if (i == 2)
        f->logprob[last(f)] = BR_UNSCORED;
}

static void other_token(fake_seq *f, int i) {
    if (i == 2)
        f->token[last(f)] = 9999;
}

static void token_in_front(fake_seq *f, int i) {
    (void)i;
    memmove(f->token + 1, f->token, sizeof f->token - sizeof f->token[0]);
    f->token[0] = 1;
}

static void other_uid(fake_seq *f, int i) {
    snprintf(f->seq.uid, sizeof f->seq.uid, "chatcmpl-%d", i);
}

static void empty_mask(fake_seq *f, int i) {
    (void)i;
    memset(f->mask, 0, sizeof f->mask);
}

START_TEST(nan_missing_and_other_tokens_fail) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, nan_slot, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "0 differ, 1 NaN, 0 in one file only", NULL, &report);
    ck_assert_msg(strstr(report.text, "hint        NaN: 1 slots") && strstr(report.text, "(ffc00000); 1 of "), "%s", report.text);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, unscored_slot, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "0 differ, 0 NaN, 1 in one file only", NULL, &report);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, other_token, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "first id    uid 'prompt-1', sample 0, position ", NULL, &report);
    ck_assert_msg(strstr(report.text, " against 9999 "), "%s", report.text);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, token_in_front, "full_softmax_over_T");
    expect(BR_E_ARG, "hint        token ids: the second file's sequences are the first's moved by +1", "pearson", &report);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "nothing was compared: 12 of 12 sequences that are in both have other token ids"));
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ - 2, NULL, "full_softmax_over_T");
    expect(BR_E_MISMATCH, "10 joined, 2 only in the first file", NULL, &report);
    ck_assert(strstr(br_last_error(), "2 sequences are in one file only") != NULL);
    br_report_free(&report);
}
END_TEST

static void no_logprob(fake_seq *f, int i) {
    (void)i;
    for (int32_t t = 0; t < f->seq.n_tok; t++)
        f->logprob[t] = BR_UNSCORED;
}

static void other_text(fake_seq *f, int i) {
    (void)i;
    for (int32_t t = 0; t < f->seq.n_tok; t++)
        f->token[t] = 7777 + t;
}

/* "0 of 0 log-probs differ" and a hint to look at stage hashes say nothing of two dumps of different prompts. */
START_TEST(nothing_in_common_is_one_sentence) {
    const struct { planter plant; int n_a, n_b; const char *said; } dump[] = {
        {other_uid, N_SEQ, N_SEQ, "no sequence is in both; they are joined by (uid, sample), such as ('prompt-0', 0) in the first file and "
                                  "('chatcmpl-0', 0) in the second: give equal texts equal uids in both dumps"},
        {NULL, N_SEQ, 0, "the second file holds no sequence"},
        {NULL, 0, 0, "the first file holds no sequence"},
        {no_logprob, N_SEQ, N_SEQ, "no token of either mask has a log-prob in both files"},
        {other_text, N_SEQ, N_SEQ, "12 of 12 sequences that are in both have other token ids before the first log-prob"},
    };
    for (size_t k = 0; k < sizeof dump / sizeof dump[0]; k++) {
        br_report report;
        char wanted[2048];
        write_ours(path_a, NULL, dump[k].n_a, NULL);
        write_foreign(path_b, NULL, dump[k].n_b, dump[k].plant, "full_softmax_over_T");
        snprintf(wanted, sizeof wanted, "%s and %s: nothing was compared: %s", path_a, path_b, dump[k].said);
        CHECK_FAILS(br_job_parity_foreign(path_a, path_b, &report), BR_E_ARG);
        ck_assert_ptr_nonnull(strstr(br_last_error(), wanted));
        ck_assert_msg(!report.text || !strstr(report.text, "hint"), "%s", report.text);
        ck_assert_int_eq(report.text != NULL, dump[k].plant == no_logprob || dump[k].plant == other_text); /* the counts of what was joined */
        br_report_free(&report);
    }
}
END_TEST

/* A scorer of plain token ids has an empty mask: the other file's counts. */
START_TEST(one_mask_is_enough) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, empty_mask, "full_softmax_over_T");
    expect(BR_OK, "tokens in one mask only", NULL, &report);
    ck_assert_int_eq(report.n_compared, sampled_in_all());
    br_report_free(&report);
}
END_TEST

static void temperature_1(fake_seq *f, int i) {
    (void)i;
    f->seq.temperature = 1;
}

static void raw_only(fake_seq *f, int i) {
    (void)i;
    memcpy(f->logprob, f->logprob_raw, sizeof f->logprob);
}

static void raw_at_1(fake_seq *f, int i) {
    temperature_1(f, i);
    raw_only(f, i);
}

static void expect_refused(const char *said) {
    br_report report;
    CHECK_FAILS(br_job_parity_foreign(path_a, path_b, &report), BR_E_ARG);
    ck_assert_msg(strstr(br_last_error(), said) != NULL, "expected '%s' in: %s", said, br_last_error());
    br_report_free(&report);
}

/* A file of ours holds three quantities: the one that the dump has is compared. Two dumps must have been told the same. */
START_TEST(only_one_quantity_is_compared) {
    br_report report;
    write_foreign(path_b, NULL, N_SEQ, raw_only, "raw");
    expect(BR_OK, "log-probs of kind raw", NULL, &report);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, raw_at_1, "full_softmax_over_T");
    expect(BR_OK, "log-probs of kind raw", NULL, &report);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, kept, "processed");
    expect(BR_OK, "log-probs of kind processed", NULL, &report);
    br_report_free(&report);
    write_foreign(path_b, NULL, N_SEQ, NULL, "entropy");
    expect_refused("the second (vllm_json) of kind entropy");
    write_foreign(path_a, NULL, N_SEQ, NULL, "full_softmax_over_T");
    write_foreign(path_b, NULL, N_SEQ, temperature_1, "full_softmax_over_T");
    expect_refused("temperature 0.699999988 in the first file, 1 in the second");
    write_foreign(path_b, NULL, N_SEQ, NULL, "raw");
    expect_refused("the first file (vllm_json) holds log-probs of kind full_softmax_over_T, the second (vllm_json) of kind raw");
}
END_TEST

/* ---- the reader ------------------------------------------------------------------------------------------------------------------------ */

static void expect_damage(const char *said) {
    rollout_reader *r;
    CHECK_FAILS(rollout_open_foreign(path_b, &r), BR_E_FORMAT);
    ck_assert(!r);
    ck_assert_msg(strstr(br_last_error(), said) != NULL, "expected '%s' in: %s", said, br_last_error());
    write_foreign(path_b, NULL, 2, NULL, "raw");
}

START_TEST(a_damaged_dump_is_refused) {
    const uint64_t no_row[1] = {0}, huge[1] = {1ull << 40};
    write_foreign(path_b, NULL, 2, NULL, "raw");
    h5_edit_attribute_set(path_b, "format", "something-else");
    expect_damage("attribute format is 'something-else'");
    h5_edit_attribute_set(path_b, "format_version", "2");
    expect_damage("attribute format_version is '2': expected '1'");
    h5_edit_attribute_set(path_b, "source", "");
    expect_damage("attribute source is ''");
    h5_edit_attribute_set(path_b, "producer", "more than fifteen bytes");
    expect_damage("attribute producer is");
    h5_edit_attribute_set(path_b, "logprob_kind", NULL);
    expect_damage("logprob_kind");
    h5_edit_unlink(path_b, "/tokens/logprob");
    expect_damage("/tokens/logprob: expected a dataset");
    h5_edit_replace(path_b, "/seq/offset", "i64", 1, no_row);
    expect_damage("/seq/offset has no row");
    h5_edit_replace(path_b, "/tokens/id", "i32", 1, huge);
    expect_damage("2 sequences with 1099511627776 tokens");
    h5_edit_replace(path_b, "/seq/offset", "i64", 1, huge);
    expect_damage("sequences with");
    h5_edit_flip(path_b, "/tokens/mask", 0, 3);
    expect_damage("a mask byte is 8");
    h5_edit_write(path_b, "/seq/prompt_len", (int32_t[]){0, 1});
    expect_damage("prompt_len is 0");
    h5_edit_link_away(path_b, "/seq/uid");
    expect_damage("/seq/uid: expected a dataset");
}
END_TEST

START_TEST(memory_that_runs_out_is_a_status) {
    br_report report;
    br_status status = BR_E_NOMEM;
    int n = 0;
    write_foreign(path_b, NULL, N_SEQ, late, "full_softmax_over_T");
    for (; status != BR_E_MISMATCH; n++) {
        br_mem_fail_nth(n + 1);
        status = br_job_parity_foreign(path_a, path_b, &report);
        ck_assert_msg(status == BR_E_MISMATCH || status == BR_E_NOMEM, "%d: %s", n, br_status_name(status));
        br_report_free(&report);
    }
    br_mem_fail_nth(0);
    ck_assert_int_gt(n, 40);
}
END_TEST

Suite *test_foreign_suite(void) {
    Suite *suite = suite_create("foreign");
    TCase *all = tcase_create("foreign");
    tcase_set_timeout(all, 60);
    tcase_add_checked_fixture(all, setup, NULL);
    tcase_add_test(all, equal_files_pass_in_any_order);
    tcase_add_test(all, one_ulp_is_located);
    tcase_add_test(all, each_planted_mistake_gives_its_hint);
    tcase_add_test(all, what_is_no_logprob_is_said_as_well);
    tcase_add_test(all, nan_missing_and_other_tokens_fail);
    tcase_add_test(all, nothing_in_common_is_one_sentence);
    tcase_add_test(all, one_mask_is_enough);
    tcase_add_test(all, only_one_quantity_is_compared);
    tcase_add_test(all, a_damaged_dump_is_refused);
    tcase_add_test(all, memory_that_runs_out_is_a_status);
    suite_add_tcase(suite, all);
    return suite;
}
