/* The ledger of a training run as a file: what goes in comes out and is chained as the header says; every flipped bit is named by its place;
 * steps cannot be dropped, reordered or changed unseen. What a run does with it is in ledger_run. */
#include "bitroll_ledger.h"
#include "br_file.h"
#include "br_hash.h"
#include "engine_rig.h"
#include "fake_ledger.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "test_support.h"

#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char good[512], path[512], root[65];

static void make_good(void) {
    snprintf(good, sizeof good, "%s", fake_path("good.h5"));
    snprintf(path, sizeof path, "%s", fake_path("changed.h5"));
    fake_ledger_write(good, FAKE_STEPS, -1, root);
}

static void copy_file(void) {
    fake_file_copy(good, path, SIZE_MAX);
}

#define SAYS(text, part) ck_assert_msg((text) && strstr(text, part) != NULL, "'%s' lacks '%s'", (text) ? (text) : "(null)", part)

static void expect_bad(const char *file, const char *says) {
    br_report report;
    CHECK_FAILS(fake_ledger_verify(file, &report), BR_E_MISMATCH);
    SAYS(br_last_error(), says);
    br_report_free(&report);
}

/* ---- contents --------------------------------------------------------------------------------------------------------------- */

START_TEST(what_goes_in_comes_out) {
    static fake_step step;
    ledger_reader *r;
    CHECK_OK(ledger_open(good, &r));
    ck_assert_int_eq(ledger_step_count(r), FAKE_STEPS);
    ck_assert_int_eq(ledger_run_of(r)->n_step_closed, FAKE_STEPS);
    ck_assert_int_eq(memcmp(ledger_config_of(r), "seed: 1\n", 8), 0);
    for (int i = 0, at = 0; i < FAKE_STEPS; i++) {
        br_ledger_record record;
        fake_step_make(i, &step);
        ledger_record_at(r, i, &record);
        ck_assert_int_eq(record.step, 10 + i);
        ck_assert_int_eq(record.n_seq, step.step.n_seq);
        for (int64_t s = 0; s < step.step.n_seq; s++, at++) {
            const br_ledger_seq *want = &step.seq[s];
            const int64_t *offset = ledger_offset(r);
            ledger_seq got;
            ledger_seq_at(r, at, offset[at], offset[at + 1], &got);
            ck_assert_str_eq(got.uid, want->uid);
            ck_assert_int_eq(got.n_tok, want->n_tok);
            ck_assert_int_eq(got.prompt_len, want->prompt_len);
            ck_assert(got.sample == want->sample && got.group == want->group && got.reward == want->reward);
            ck_assert(got.advantage == want->advantage && got.temperature == want->temperature && got.version_end == want->version_end);
            ck_assert_int_eq(memcmp(got.token, want->token, (size_t)got.n_tok * 4), 0);
            ck_assert_int_eq(memcmp(got.mask, want->mask, (size_t)got.n_tok), 0);
            ck_assert_int_eq(memcmp(got.logprob[LEDGER_UPDATE], want->update, (size_t)got.n_tok * 4), 0);
        }
    }
    ledger_close(r);
    fake_ledger_expect_good(good, FAKE_STEPS, root);
}
END_TEST

/* Appends to the text of a leaf or record, as bitroll_ledger.h writes them down. */
static unsigned char *put(unsigned char *to, const void *from, size_t n) {
    memcpy(to, from, n);
    return to + n;
}

/* Leaves of all five kinds of a sequence, put together by hand. */
static void leaves_by_hand(const br_ledger_seq *seq, unsigned char *leaf[5]) {
    static unsigned char bytes[1024];
    char uid[256] = {0};
    unsigned char *at = bytes;
    const size_t n = (size_t)seq->n_tok;
    memcpy(uid, seq->uid, strlen(seq->uid));
    at = put(put(put(put(put(at, uid, 256), &seq->sample, 4), &seq->group, 4), &seq->stop, 4), &seq->temperature, 4);
    at = put(put(put(put(at, &seq->version_begin, 8), &seq->version_end, 8), &seq->reward, 8), &seq->advantage, 8);
    br_digest d = br_hash_bytes(bytes, (size_t)(at - bytes));
    leaf[0] = put(leaf[0], &d, 16);
    at = put(put(put(put(bytes, &seq->prompt_len, 4), &seq->n_tok, 4), seq->token, 4 * n), seq->mask, n);
    d = br_hash_bytes(bytes, (size_t)(at - bytes));
    leaf[1] = put(leaf[1], &d, 16);
    const uint32_t *const array[3] = {seq->rollout, seq->again, seq->update};
    for (int a = 0; a < 3; a++) {
        d = br_hash_bytes(array[a], 4 * n);
        leaf[2 + a] = put(leaf[2 + a], &d, 16);
    }
}

START_TEST(the_chain_is_what_the_header_says) {
    static fake_step step;
    static unsigned char leaf[5][16 * FAKE_STEP_SEQS];
    const br_ledger_run run = fake_ledger_run();
    const br_digest config = br_hash_bytes(run.config, (size_t)run.n_config);
    unsigned char bytes[32 + 216] = {0}, *at = bytes + 32;
    const int64_t version = 1;
    char text[65];
    at = put(put(put(put(at, "training-ledger", 16), &version, 8), &run.contract, 16), &run.base_rollout, 16);
    at = put(put(put(at, &run.base_trainer, 16), &config, 16), &run.n_config, 8);
    SHA256(bytes, (size_t)(at - bytes), bytes);
    for (int i = 0; i < FAKE_STEPS; i++) {
        unsigned char *end[5] = {leaf[0], leaf[1], leaf[2], leaf[3], leaf[4]};
        int64_t counts[8] = {0, 0, 0, 0, 0, 0, -1, -1};
        double real[3] = {0, 0, 0};
        fake_step_make(i, &step);
        for (int64_t s = 0; s < step.step.n_seq; s++) {
            leaves_by_hand(&step.seq[s], end);
            counts[1] += step.seq[s].n_tok;
            for (int32_t t = 0; t < step.seq[s].n_tok; t++)
                counts[2] += step.mask[s][t];
            real[2] += step.seq[s].reward / (double)step.step.n_seq;
        }
        counts[0] = step.step.n_seq;
        at = put(put(bytes + 32, &step.step.step, 8), &step.step.version, 8);
        at = put(put(at, &step.step.adapter_rollout, 16), &step.step.adapter_trainer, 16);
        for (int k = 0; k < 5; k++) {
            const br_digest d = br_hash_bytes(leaf[k], (size_t)(end[k] - leaf[k]));
            at = put(at, &d, 16);
        }
        at = put(put(at, counts, sizeof counts), real, sizeof real);
        ck_assert_int_eq(at - bytes, sizeof bytes);
        SHA256(bytes, sizeof bytes, bytes);
    }
    fake_root(bytes, text);
    ck_assert_str_eq(text, root);
}
END_TEST

START_TEST(a_rerun_has_the_same_bytes) {
    char again[65];
    fake_ledger_write(path, FAKE_STEPS, -1, again);
    ck_assert_str_eq(again, root);
    ck_assert(fake_file_same(path, good));
    fake_ledger_write(path, FAKE_STEPS, 1, again);
    ck_assert_str_ne(again, root);
}
END_TEST

START_TEST(an_empty_ledger_proves_nothing) {
    char empty[65];
    br_report report;
    fake_ledger_write(path, 0, -1, empty);
    CHECK_FAILS(fake_ledger_verify(path, &report), BR_E_MISMATCH);
    SAYS(br_last_error(), "it holds 0 steps and no sampled token: nothing was compared");
    SAYS(report.summary, "ledger: 0 steps, 0 of 0 log-probs differ, nothing was compared, root ");
    SAYS(report.summary, empty);
    br_report_free(&report);
}
END_TEST

/* ---- every flipped bit ------------------------------------------------------------------------------------------------------ */

typedef struct dataset {
    const char *name;
    size_t row_bytes;
    char space; /* of run, step, sequence or token; b: bounds of steps, o: of sequences; c: bytes of the config */
} dataset;

static const dataset datasets[] = {
    {"/run/contract", 16, 'r'}, {"/run/base_rollout", 16, 'r'}, {"/run/base_trainer", 16, 'r'}, {"/run/config_digest", 16, 'r'},
    {"/run/link", 32, 'r'}, {"/run/config", 1, 'c'}, {"/step/step", 8, 's'}, {"/step/version", 8, 's'}, {"/step/adapter_rollout", 16, 's'},
    {"/step/adapter_trainer", 16, 's'}, {"/step/sequences", 16, 's'}, {"/step/tokens", 16, 's'}, {"/step/rollout", 16, 's'},
    {"/step/again", 16, 's'}, {"/step/update", 16, 's'}, {"/step/n_seq", 8, 's'}, {"/step/n_tok", 8, 's'}, {"/step/n_compared", 8, 's'},
    {"/step/n_differ", 8, 's'}, {"/step/n_differ_again", 8, 's'}, {"/step/n_differ_update", 8, 's'}, {"/step/first_seq", 8, 's'},
    {"/step/first_pos", 8, 's'}, {"/step/k1", 8, 's'}, {"/step/k3", 8, 's'}, {"/step/reward_mean", 8, 's'}, {"/step/link", 32, 's'},
    {"/step/seq_begin", 8, 'b'},
    {"/seq/uid", 256, 'q'}, {"/seq/sample", 4, 'q'}, {"/seq/group", 4, 'q'}, {"/seq/stop", 4, 'q'}, {"/seq/temperature", 4, 'q'},
    {"/seq/version_begin", 8, 'q'}, {"/seq/version_end", 8, 'q'}, {"/seq/reward", 8, 'q'}, {"/seq/advantage", 8, 'q'},
    {"/seq/prompt_len", 4, 'q'}, {"/seq/leaf", 80, 'q'}, {"/seq/offset", 8, 'o'}, {"/tokens/id", 4, 't'}, {"/tokens/mask", 1, 't'},
    {"/tokens/rollout", 4, 't'}, {"/tokens/again", 4, 't'}, {"/tokens/update", 4, 't'},
};

/* Where a sequence of the file is: its step's number and its number there. */
static void place_of(const ledger_reader *r, int64_t seq, int64_t *step, int64_t *in_step) {
    int64_t i = 0;
    while (ledger_seq_begin(r)[i + 1] <= seq)
        i++;
    *step = 10 + i;
    *in_step = seq - ledger_seq_begin(r)[i];
}

/* What verify must say about bit `bit` of row `row`. */
static void expected(const ledger_reader *r, const dataset *d, int64_t row, int bit, char where[64], char what[96]) {
    int64_t step = 0, in_step = 0, seq = d->space == 'o' ? row - 1 : row;
    where[0] = 0;
    snprintf(what, 96, "%s%s: bit %d was flipped", d->name, d->space == 'o' || d->space == 'b' ? " behind it" : "", bit);
    if (d->space == 'r' || d->space == 'c')
        strcpy(where, "run: ");
    if (d->space == 'c')
        snprintf(what, 96, "/run/config: byte %lld: bit %d was flipped", (long long)row, bit);
    if (strcmp(d->name, "/seq/leaf") == 0)
        snprintf(what, 96, ": bit %d was flipped", bit);
    if (d->space == 's' || d->space == 'b')
        snprintf(where, 64, "step %lld: ", strcmp(d->name, "/step/step") == 0 ? 10ll + row : 10ll + row - (d->space == 'b'));
    if (d->space == 't')
        for (seq = 0; ledger_offset(r)[seq + 1] <= row;)
            seq++;
    if (d->space == 't' || d->space == 'q' || d->space == 'o') {
        place_of(r, seq, &step, &in_step);
        const int n = snprintf(where, 64, "step %lld, sequence %lld (uid ", (long long)step, (long long)in_step);
        ck_assert_int_lt(n, 64);
    }
    if (d->space == 't')
        snprintf(what, 96, ", position %lld: %s: bit %d was flipped", (long long)(row - ledger_offset(r)[seq]), d->name, bit);
}

/* Bounds that do not rise, and a text without an end, are refused before anything is replayed; the sentence names them too. */
static void expect_named(const dataset *d, int64_t row, int bit, const char *where, const char *what) {
    br_report report;
    const br_status status = fake_ledger_verify(path, &report);
    const int may_refuse = d->space == 'o' || d->space == 'b' || strcmp(d->name, "/seq/uid") == 0;
    ck_assert_msg(status == BR_E_MISMATCH || (status == BR_E_FORMAT && may_refuse), "%s row %lld bit %d: %s", d->name, (long long)row, bit,
                  br_status_name(status));
    if (status == BR_E_FORMAT) {
        SAYS(br_last_error(), d->name);
    } else {
        SAYS(br_last_error(), where);
        SAYS(br_last_error(), what);
        SAYS(br_last_error(), "(1 fault in all)");
    }
    br_report_free(&report);
}

START_TEST(every_flipped_bit_is_named) {
    const dataset *d = &datasets[_i];
    const int n_try = test_is_long() ? 200 : 12;
    char where[64], what[96];
    ledger_reader *r;
    CHECK_OK(ledger_open(good, &r));
    copy_file();
    const size_t n = h5_edit_bytes(path, d->name);
    ck_assert_uint_eq(n % d->row_bytes, 0);
    for (int k = 0; k < n_try; k++) {
        const size_t byte = (size_t)(test_mix((uint64_t)(1000 * _i + k)) % n);
        const int bit = (int)(test_mix((uint64_t)(1000 * _i + k) + 500) % 8);
        const int64_t row = (int64_t)(byte / d->row_bytes);
        expected(r, d, row, (int)(8 * (byte % d->row_bytes)) + bit, where, what);
        h5_edit_flip(path, d->name, byte, bit);
        expect_named(d, row, bit, where, what);
        h5_edit_flip(path, d->name, byte, bit);
    }
    ledger_close(r);
    fake_ledger_expect_good(path, FAKE_STEPS, root);
}
END_TEST

/* Numbers that bound the reading, and marks of the file: refused by name. */
START_TEST(bounds_and_marks_are_refused) {
    br_report report;
    static const char *const name[] = {"/run/n_config", "/run/n_step_closed", "/commit"};
    for (size_t k = 0; k < sizeof name / sizeof name[0]; k++)
        for (size_t bit = 0; bit < 64; bit += 7) {
            copy_file();
            h5_edit_flip(path, name[k], bit / 8, (int)bit % 8);
            const br_status status = fake_ledger_verify(path, &report);
            ck_assert_msg(status == BR_E_FORMAT || (k == 0 && status == BR_E_MISMATCH), "%s bit %zu: %s", name[k], bit, br_status_name(status));
            ck_assert_msg(strstr(br_last_error(), k == 2 ? "commit record" : k == 0 ? "/run/" : name[k]) != NULL, "%s", br_last_error());
            br_report_free(&report);
        }
    copy_file();
    h5_edit_attribute_set(path, "format_version", "2");
    CHECK_FAILS(fake_ledger_verify(path, &report), BR_E_FORMAT);
    SAYS(br_last_error(), "format_version");
    br_report_free(&report);
}
END_TEST

/* A text too long to try each of its bits: the slot is the one where the array differs from the others. */
START_TEST(a_flipped_bit_of_a_long_text_is_named) {
    enum { N = 100000, AT = 77777 };
    static fake_step step;
    const br_ledger_run run = fake_ledger_run();
    int32_t *token = rig_alloc(N, sizeof *token);
    uint32_t *bits = rig_alloc(N, sizeof *bits);
    uint8_t *mask = rig_alloc(N, 1);
    br_ledger *ledger;
    fake_step_make(0, &step);
    for (int t = 0; t < N; t++) {
        mask[t] = t > 0;
        bits[t] = t ? 0xbf000000u + (uint32_t)t : BR_UNSCORED;
    }
    step.seq[2].n_tok = N;
    step.seq[2].prompt_len = 1;
    step.seq[2].token = token;
    step.seq[2].mask = mask;
    step.seq[2].rollout = step.seq[2].again = step.seq[2].update = bits;
    CHECK_OK(br_ledger_create(path, &run, &ledger));
    CHECK_OK(br_ledger_append(ledger, &step.step, NULL));
    CHECK_OK(br_ledger_close(ledger));
    const size_t before = (size_t)(step.seq[0].n_tok + step.seq[1].n_tok);
    h5_edit_flip(path, "/tokens/again", 4 * (before + AT) + 1, 3);
    expect_bad(path, "step 10, sequence 2 (uid 'step 0 prompt 1', sample 0), position 77777: /tokens/again: bit 11 was flipped");
    h5_edit_flip(path, "/tokens/again", 4 * (before + AT) + 1, 3);
    h5_edit_flip(path, "/tokens/id", 4 * (before + AT), 0); /* which bit, nothing tells in bounded time; where, the leaf does */
    expect_bad(path, "step 10, sequence 2 (uid 'step 0 prompt 1', sample 0): prompt length, ids or mask: changed");
    free(token);
    free(bits);
    free(mask);
}
END_TEST

/* ---- steps changed, dropped, reordered -------------------------------------------------------------------------------------- */

static void copy_steps(const int *order, int n, int sealed, void (*change)(br_ledger_record *, ledger_seq *)) {
    fake_copy copy;
    fake_copy_begin(good, path, &copy);
    for (int k = 0; k < n; k++)
        fake_copy_step(&copy, order[k], sealed, order[k] == 1 ? change : NULL);
    fake_copy_end(&copy);
}

START_TEST(dropped_and_reordered_steps_are_named) {
    char prefix[65];
    br_report report;
    copy_steps((int[]){0, 2, 3}, 3, 0, NULL);
    expect_bad(path, "step 12: its record does not match its link: one of them was changed, or a step before it was dropped");
    copy_steps((int[]){0, 2, 1, 3}, 4, 0, NULL);
    expect_bad(path, "step 12, record 2: chained behind record 3, not 1: steps were dropped, inserted or reordered here");
    copy_steps((int[]){0, 1, 1, 2, 3}, 5, 0, NULL);
    expect_bad(path, "step 11, record 3: chained behind record 1, not 2: steps were dropped, inserted or reordered here");
    copy_steps((int[]){1, 2, 3}, 3, 0, NULL);
    expect_bad(path, "step 11: its record does not match its link");
    copy_steps((int[]){0, 2, 3}, 3, 1, NULL); /* chained anew: the numbers tell */
    expect_bad(path, "step 12 follows step 10: expected step 11");
    /* The end cut off: nothing in the file tells. Only a root that was published does. */
    copy_steps((int[]){0, 1, 2}, 3, 0, NULL);
    CHECK_OK(fake_ledger_verify(path, &report));
    fake_ledger_write(fake_path("prefix.h5"), 3, -1, prefix);
    SAYS(report.summary, prefix);
    ck_assert_ptr_null(strstr(report.summary, root));
    br_report_free(&report);
}
END_TEST

static void change_many_bits(br_ledger_record *record, ledger_seq *seq) {
    (void)seq;
    record->adapter_trainer.lo ^= 0xff;
}

static void change_count(br_ledger_record *record, ledger_seq *seq) {
    (void)seq;
    record->n_differ = 3;
}

static void change_digest(br_ledger_record *record, ledger_seq *seq) {
    (void)record;
    seq[3].leaf[LEDGER_LEAF_ARRAY].lo ^= 0xf0f0;
}

static void change_tokens(br_ledger_record *record, ledger_seq *seq) {
    static int32_t other[FAKE_LEDGER_TOKS];
    (void)record;
    memcpy(other, seq[3].token, (size_t)seq[3].n_tok * sizeof other[0]);
    other[2] ^= 0x70;
    seq[3].token = other;
}

static uint32_t forged[3][FAKE_LEDGER_TOKS];

static void forge(ledger_seq *seq, uint32_t first, uint32_t last) {
    for (int a = 0; a < 3; a++) {
        memcpy(forged[a], seq->logprob[a], (size_t)seq->n_tok * sizeof forged[a][0]);
        seq->logprob[a] = forged[a];
    }
    forged[0][seq->prompt_len] = first;
    forged[2][seq->n_tok - 1] = last;
}

static void change_to_nan(br_ledger_record *record, ledger_seq *seq) {
    (void)record;
    forge(&seq[3], forged[0][seq[3].prompt_len], 0xffc00001u);
    forged[0][seq[3].prompt_len] = seq[2].logprob[0][seq[2].prompt_len];
}

static void change_to_unscored(br_ledger_record *record, ledger_seq *seq) {
    (void)record;
    forge(&seq[3], BR_UNSCORED, seq[3].logprob[2][seq[3].n_tok - 1]);
}

START_TEST(changed_steps_are_named) {
    const int all[] = {0, 1, 2, 3};
    copy_steps(all, 4, 0, change_many_bits);
    expect_bad(path, "step 11: its record does not match its link: one of them was changed");
    copy_steps(all, 4, 1, change_count); /* chained anew: what is counted tells */
    expect_bad(path, "step 11: /step/n_differ holds 0000000000000003: recomputed it is 0000000000000000 (1 fault in all)");
    copy_steps(all, 4, 0, change_digest);
    expect_bad(path, "step 11, sequence 3 (uid 'step 1 prompt 1', sample 1): /tokens/rollout: changed, and not in a single bit (2 faults");
    copy_steps(all, 4, 0, change_tokens);
    expect_bad(path, "step 11, sequence 3 (uid 'step 1 prompt 1', sample 1): prompt length, ids or mask: changed, and not in a single bit (1 fault");
    copy_steps(all, 4, 1, change_to_nan);
    expect_bad(path, "update log-prob ffc00001: expected a number in a scored slot");
    copy_steps(all, 4, 1, change_to_unscored);
    expect_bad(path, "rollout log-prob 7fc00000: expected a number in a scored slot");
}
END_TEST

Suite *test_train_ledger_suite(void) {
    Suite *suite = suite_create("train_ledger");
    TCase *contents = tcase_create("contents"), *flips = tcase_create("flips"), *steps = tcase_create("steps");
    TCase *const all[] = {contents, flips, steps};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tcase_add_checked_fixture(all[i], make_good, NULL);
        tcase_set_timeout(all[i], test_is_long() ? 900 : 120);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_test(contents, what_goes_in_comes_out);
    tcase_add_test(contents, the_chain_is_what_the_header_says);
    tcase_add_test(contents, a_rerun_has_the_same_bytes);
    tcase_add_test(contents, an_empty_ledger_proves_nothing);
    tcase_add_loop_test(flips, every_flipped_bit_is_named, 0, sizeof datasets / sizeof datasets[0]);
    tcase_add_test(flips, bounds_and_marks_are_refused);
    tcase_add_test(flips, a_flipped_bit_of_a_long_text_is_named);
    tcase_add_test(steps, dropped_and_reordered_steps_are_named);
    tcase_add_test(steps, changed_steps_are_named);
    return suite;
}
