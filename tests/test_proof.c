/* Receipts, chain and digests of runs: what must move them does, and what must not matter does not. */
#include "br_mem.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "rollout_replay.h"
#include "logprob_digest.h"
#include "receipt.h"
#include "run_uid.h"
#include "test_support.h"
#include "verify_chain.h"

#include <string.h>

enum { N_SEQ = 6 };

/* ---- receipts --------------------------------------------------------------------------------------------------------- */

#define MOVES(which, change)                                                                                            \
    do {                                                                                                                \
        fake_make(&meta, 3, &f);                                                                                        \
        rollout_seq before = f.seq;                                                                                     \
        change;                                                                                                         \
        CHECK_OK(receipt_make(&meta, &f.seq));                                                                          \
        for (int p = 0; p < ROLLOUT_PART_COUNT; p++)                                                                    \
            ck_assert_msg((before.part[p] != f.seq.part[p]) == (p == (which)), "%s: part %d", #change, p);              \
        ck_assert_msg(!br_digest_equal(before.receipt, f.seq.receipt), "%s: the receipt stays", #change);               \
    } while (0)

START_TEST(each_field_moves_its_part_and_the_receipt) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
    MOVES(ROLLOUT_PART_IDENTITY, f.seq.uid[0] ^= 1);
    MOVES(ROLLOUT_PART_IDENTITY, f.seq.prompt_index ^= 1);
    MOVES(ROLLOUT_PART_IDENTITY, f.seq.sample ^= 1);
    MOVES(ROLLOUT_PART_IDENTITY, f.seq.seed ^= 1);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.temperature *= 2);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.min_p += 0.1f);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.top_p = 0.8);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.top_k++);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.max_new++);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.min_new++);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.ignore_eos ^= 1);
    MOVES(ROLLOUT_PART_SETTINGS, f.seq.n_stop++);
    MOVES(ROLLOUT_PART_SETTINGS, (f.seq.n_stop = 1, f.seq.stop_token[0]++));
    MOVES(ROLLOUT_PART_ADAPTER, f.seq.adapter[0] ^= 1);
    MOVES(ROLLOUT_PART_ADAPTER, f.seq.adapter_digest.hi ^= 1);
    MOVES(ROLLOUT_PART_TOKENS, f.token[0] ^= 1);
    MOVES(ROLLOUT_PART_TOKENS, f.mask[f.seq.n_tok - 1] = 0);
    MOVES(ROLLOUT_PART_TOKENS, f.seq.prompt_len++);
    MOVES(ROLLOUT_PART_LOGPROBS, f.logprob[f.seq.n_tok - 1] ^= 1);
    MOVES(ROLLOUT_PART_LOGPROBS, f.logprob_raw[f.seq.n_tok - 1] ^= 1);
    MOVES(ROLLOUT_PART_LOGPROBS, f.logprob_kept[f.seq.n_tok - 1] ^= 0x80000000u);
    MOVES(ROLLOUT_PART_EXTRAS, f.entropy[f.seq.n_tok - 1] ^= 1);
    MOVES(ROLLOUT_PART_EXTRAS, f.top_token[f.seq.n_tok * FAKE_TOP - 1] ^= 1);
    MOVES(ROLLOUT_PART_EXTRAS, f.top_logprob[f.seq.n_tok * FAKE_TOP - 1] ^= 1);
    MOVES(ROLLOUT_PART_RESULT, f.seq.status ^= 1);
    MOVES(ROLLOUT_PART_RESULT, f.seq.stop ^= 1);
    MOVES(ROLLOUT_PART_RESULT, f.seq.error = BR_E_NAN);
}
END_TEST

START_TEST(the_file_digests_move_every_receipt) {
    rollout_meta meta = fake_meta("rollout", "s"), other = meta;
    fake_seq f, g;
    fake_make(&meta, 0, &f);
    other.weights_digest.lo ^= 1;
    fake_make(&other, 0, &g);
    ck_assert(!br_digest_equal(f.seq.receipt, g.seq.receipt));
    other = meta;
    other.contract_digest.hi ^= 1;
    fake_make(&other, 0, &g);
    ck_assert(!br_digest_equal(f.seq.receipt, g.seq.receipt));
    ck_assert(memcmp(f.seq.part, g.seq.part, sizeof f.seq.part) == 0);
}
END_TEST

START_TEST(a_nan_in_a_scored_slot_has_no_receipt) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
#define REFUSED(change)                                        \
    do {                                                       \
        fake_make(&meta, 2, &f);                               \
        change;                                                \
        CHECK_FAILS(receipt_make(&meta, &f.seq), BR_E_NAN);    \
    } while (0)
    REFUSED(f.logprob[f.seq.n_tok - 1] = 0x7fc00001u);
    REFUSED(f.logprob[f.seq.n_tok - 1] = 0xffc00000u);
    REFUSED(f.logprob[f.seq.n_tok - 1] = BR_UNSCORED); /* sampled, yet not scored */
    REFUSED(f.logprob[0] = 0x7f800001u);               /* a prompt slot: only the mark may stand there */
    REFUSED(f.logprob_raw[f.seq.n_tok - 1] = 0x7fffffffu);
    REFUSED(f.logprob_kept[f.seq.n_tok - 1] = 0x7fffffffu);
    REFUSED(f.entropy[f.seq.n_tok - 1] = 0xffffffffu);
    fake_make(&meta, 2, &f);
    f.seq.status = 1; /* ended in error: its last token may be without a score */
    f.logprob[f.seq.n_tok - 1] = BR_UNSCORED;
    CHECK_OK(receipt_make(&meta, &f.seq));
}
END_TEST

/* ---- the file as a whole ---------------------------------------------------------------------------------------------- */

/* Writes the sequences of order[], then gives each the link that it had in the whole file: rows moved with all they have. */
static void rearranged(const char *whole, const char *path, const int *order, int n) {
    rollout_meta meta = fake_meta("rollout", "s");
    br_digest had[N_SEQ], link[N_SEQ];
    fake_write(path, &meta, order, n, 0);
    h5_edit_read(whole, "/seq/chain", had);
    for (int k = 0; k < n; k++)
        link[k] = had[order[k]];
    h5_edit_write(path, "/seq/chain", link);
}

START_TEST(dropped_inserted_and_reordered_sequences_are_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    const struct { int n, order[N_SEQ]; int64_t first;
    } given[] = {
        {5, {0, 1, 3, 4, 5}, 2},    {5, {1, 2, 3, 4, 5}, 0},    {6, {0, 2, 1, 3, 4, 5}, 1},
        {6, {5, 4, 3, 2, 1, 0}, 0}, {6, {0, 1, 2, 2, 4, 5}, 3},
    };
    const char *whole = fake_path("whole.h5"), *path = fake_path("part.h5");
    fake_write(whole, &meta, NULL, N_SEQ, 0);
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        rearranged(whole, path, given[k].order, given[k].n);
        CHECK_FAILS(fake_replay(path, &ledger), BR_E_MISMATCH);
        ck_assert_int_eq(ledger.first_seq, given[k].first);
        ck_assert_msg(strstr(br_last_error(), "dropped, inserted or reordered") != NULL, "%s", br_last_error());
    }
}
END_TEST

/* The end cut off, with a commit record that is right for what is left: only the count at closing tells. */
START_TEST(a_cut_off_end_is_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    int64_t offset[N_SEQ + 1];
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    h5_edit_read(path, "/seq/offset", offset);
    uint64_t commit[4] = {N_SEQ - 1, (uint64_t)offset[N_SEQ - 1], N_SEQ, 0};
    commit[3] = br_hash_u64(commit, 24);
    h5_edit_write(path, "/commit", commit);
    CHECK_FAILS(fake_replay(path, &ledger), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), "closed with 6 sequences and holds 5") != NULL, "%s", br_last_error());
}
END_TEST

/* Written so from the start, digests and all: still no log-prob. */
START_TEST(a_nan_under_valid_digests_is_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    rollout_replay ledger;
    fake_seq f;
    fake_make(&meta, 1, &f);
    f.logprob[f.seq.n_tok - 1] = 0x7fc00001u;
    receipt_parts(&meta, &f.seq, f.seq.part);
    f.seq.receipt = receipt_of_parts(&meta, f.seq.part);
    CHECK_OK(rollout_create(fake_path("a.h5"), &meta, &w));
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_close(w));
    CHECK_FAILS(fake_replay(fake_path("a.h5"), &ledger), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), "NaN") != NULL, "%s", br_last_error());
}
END_TEST

START_TEST(a_resumed_run_has_the_chain_of_a_whole_one) {
    rollout_meta meta = fake_meta("rollout", "one"), later = fake_meta("rollout", "two");
    rollout_writer *w;
    rollout_reader *a, *b;
    fake_seq f;
    CHECK_OK(rollout_create(fake_path("cut.h5"), &meta, &w));
    for (int i = 0; i < N_SEQ; i++) {
        fake_make(&meta, i, &f);
        CHECK_OK(rollout_append(w, &f.seq));
        CHECK_OK(rollout_commit(w));
        if (i == 2) {
            rollout_abandon(w);
            CHECK_OK(rollout_resume(fake_path("cut.h5"), &later, &w));
        }
    }
    CHECK_OK(rollout_close(w));
    fake_write(fake_path("whole.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(rollout_open(fake_path("cut.h5"), &a));
    CHECK_OK(rollout_open(fake_path("whole.h5"), &b));
    ck_assert_str_eq(rollout_reader_meta(a)->producer_stamp, "two");
    for (int i = 0; i < N_SEQ; i++)
        ck_assert(br_digest_equal(rollout_reader_link(a, i), rollout_reader_link(b, i)));
    rollout_reader_close(a);
    rollout_reader_close(b);
}
END_TEST

START_TEST(verify_reports_what_the_ledger_finds) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_reader *r;
    br_report report = {0};
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    CHECK_OK(rollout_open(path, &r));
    CHECK_OK(verify_chain(r, &report));
    ck_assert_int_eq(report.n_seq, N_SEQ);
    ck_assert_int_eq(report.n_tok, rollout_tok_count(r));
    ck_assert_int_eq(report.first_seq, -1);
    ck_assert(report.logprob_digest.lo != 0 && br_digest_equal(report.weights_digest, meta.weights_digest));
    ck_assert(strstr(report.text, "6 sequences, 0 faults") != NULL);
    br_report_free(&report);
    rollout_reader_close(r);
    h5_edit_flip(path, "/tokens/logprob", h5_edit_bytes(path, "/tokens/logprob") - 4, 0);
    CHECK_OK(rollout_open(path, &r));
    CHECK_FAILS(verify_chain(r, &report), BR_E_MISMATCH);
    ck_assert_int_eq(report.first_seq, N_SEQ - 1);
    ck_assert(strstr(report.text, "log-probs") != NULL);
    br_report_free(&report);
    br_status status = BR_E_NOMEM;
    for (int n = 1; status == BR_E_NOMEM; n++) {
        br_mem_fail_nth(n);
        status = verify_chain(r, &report);
        br_report_free(&report);
    }
    ck_assert_int_eq(status, BR_E_MISMATCH);
    br_mem_fail_nth(0);
    rollout_reader_close(r);
}
END_TEST

START_TEST(a_stopped_run_verifies_as_unfinished) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    rollout_reader *r;
    br_report report = {0};
    fake_seq f;
    CHECK_OK(rollout_create(fake_path("a.h5"), &meta, &w));
    fake_make(&meta, 0, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_commit(w));
    rollout_abandon(w);
    CHECK_OK(rollout_open(fake_path("a.h5"), &r));
    CHECK_OK(verify_chain(r, &report));
    ck_assert(strstr(report.text, "not closed  its run goes on or was stopped") != NULL);
    br_report_free(&report);
    rollout_reader_close(r);
}
END_TEST

/* ---- digests of runs -------------------------------------------------------------------------------------------------- */

static br_digest file_digest(const char *path) {
    rollout_reader *r;
    br_digest d;
    CHECK_OK(rollout_open(path, &r));
    CHECK_OK(logprob_digest_of_file(r, &d));
    rollout_reader_close(r);
    return d;
}

START_TEST(the_logprob_digest_knows_no_order_and_no_producer) {
    rollout_meta meta = fake_meta("rollout", "s"), trainer = fake_meta("trainer", "t");
    int order[N_SEQ] = {4, 0, 5, 2, 1, 3};
    fake_write(fake_path("a.h5"), &meta, NULL, N_SEQ, 0);
    fake_write(fake_path("b.h5"), &meta, order, N_SEQ, 0);
    fake_write(fake_path("c.h5"), &trainer, order, N_SEQ, 1);
    ck_assert(br_digest_equal(file_digest(fake_path("a.h5")), file_digest(fake_path("b.h5"))));
    ck_assert(br_digest_equal(file_digest(fake_path("a.h5")), file_digest(fake_path("c.h5"))));
    fake_write(fake_path("d.h5"), &meta, NULL, N_SEQ - 1, 0);
    ck_assert(!br_digest_equal(file_digest(fake_path("a.h5")), file_digest(fake_path("d.h5"))));
}
END_TEST

START_TEST(the_logprob_digest_covers_what_was_sampled) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_seq f;
    fake_make(&meta, 3, &f);
    br_digest before = logprob_leaf_of(&f.seq).digest;
#define LEAF(same, change)                                                                            \
    do {                                                                                              \
        fake_make(&meta, 3, &f);                                                                      \
        change;                                                                                       \
        ck_assert_msg(br_digest_equal(before, logprob_leaf_of(&f.seq).digest) == (same), "%s", #change); \
    } while (0)
    LEAF(0, f.logprob[f.seq.n_tok - 1] ^= 1);
    LEAF(0, f.logprob[f.seq.prompt_len] ^= 0x80000000u);
    LEAF(0, f.token[0]++);
    LEAF(0, f.seq.n_tok--);
    LEAF(0, f.seq.uid[0]++);
    LEAF(0, f.seq.sample++);
    LEAF(1, f.logprob[0] = 0x3f800000u); /* a prompt token's: only a trainer has it */
    LEAF(1, f.logprob_kept[f.seq.n_tok - 1]++);
    LEAF(1, f.entropy[f.seq.n_tok - 1]++);
    memset(f.mask, 0, sizeof f.mask); /* prompts that were only scored: all slots count */
    before = logprob_leaf_of(&f.seq).digest;
    f.logprob[1] = 0x3f800001u;
    ck_assert(!br_digest_equal(before, logprob_leaf_of(&f.seq).digest));
}
END_TEST

static br_digest uid_of(const char *text, const run_identity *form) {
    br_sampling defaults = br_sampling_default();
    prompts *lines;
    run_identity run = *form;
    CHECK_OK(prompts_parse("test", text, strlen(text), &defaults, &lines));
    run.lines = lines;
    br_digest d = run_uid(&run);
    prompts_close(lines);
    return d;
}

START_TEST(the_run_uid_is_moved_by_all_that_decides_bits) {
    const char *const name[2] = {"math", "code"}, *const swapped[2] = {"code", "math"};
    const br_digest digest[2] = {{1, 2}, {3, 4}}, swapped_digest[2] = {{3, 4}, {1, 2}}, other_digest[2] = {{1, 2}, {3, 5}};
    const run_identity base = {.contract = {1, 1},
                               .weights = {2, 2},
                               .n_adapter = 2,
                               .adapter_name = name,
                               .adapter_digest = digest,
                               .n_sample = 4,
                               .seed = 9};
    const char *text = "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\"}";
    br_digest before = uid_of(text, &base);
    run_identity run = base;
    run.adapter_name = swapped, run.adapter_digest = swapped_digest;
    ck_assert(br_digest_equal(before, uid_of(text, &run)));
    ck_assert(br_digest_equal(
        before,
        uid_of("{\"prompt\": [1, 2], \"uid\": \"a\", \"n\": 4, \"seed\": \"9\"}\n\n{\"uid\": \"b\", \"prompt\": [3]}\n",
               &base)));
#define RUN(change)                                                            \
    do {                                                                       \
        run = base;                                                            \
        change;                                                                \
        ck_assert_msg(!br_digest_equal(before, uid_of(text, &run)), #change);  \
    } while (0)
    RUN(run.contract.lo++);
    RUN(run.weights.hi++);
    RUN(run.adapter_digest = other_digest);
    RUN(run.n_adapter = 1);
    RUN(run.n_sample = 5);
    RUN(run.seed++);
    static const char *const other_text[] = {
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [4], \"uid\": \"b\"}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"c\"}",
        "{\"prompt\": [3], \"uid\": \"b\"}\n{\"prompt\": [1, 2], \"uid\": \"a\"}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"temperature\": 0.5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"top_p\": 0.5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"top_k\": 5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"min_p\": 0.5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"max_new\": 5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"min_new\": 5}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"ignore_eos\": true}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"stop\": [5]}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"adapter\": \"math\"}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"n\": 1}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\", \"seed\": 1}",
        "{\"prompt\": [1, 2], \"uid\": \"a\"}",
    };
    for (size_t i = 0; i < sizeof other_text / sizeof other_text[0]; i++)
        ck_assert_msg(!br_digest_equal(before, uid_of(other_text[i], &base)), "%s", other_text[i]);
}
END_TEST

Suite *test_proof_suite(void) {
    Suite *suite = suite_create("proof");
    TCase *receipts = tcase_create("receipts"), *ledger = tcase_create("ledger"), *digests = tcase_create("digests");
    tcase_set_timeout(receipts, 20);
    tcase_add_test(receipts, each_field_moves_its_part_and_the_receipt);
    tcase_add_test(receipts, the_file_digests_move_every_receipt);
    tcase_add_test(receipts, a_nan_in_a_scored_slot_has_no_receipt);
    tcase_set_timeout(ledger, 120);
    tcase_add_test(ledger, dropped_inserted_and_reordered_sequences_are_found);
    tcase_add_test(ledger, a_cut_off_end_is_found);
    tcase_add_test(ledger, a_nan_under_valid_digests_is_found);
    tcase_add_test(ledger, a_resumed_run_has_the_chain_of_a_whole_one);
    tcase_add_test(ledger, verify_reports_what_the_ledger_finds);
    tcase_add_test(ledger, a_stopped_run_verifies_as_unfinished);
    tcase_set_timeout(digests, 60);
    tcase_add_test(digests, the_logprob_digest_knows_no_order_and_no_producer);
    tcase_add_test(digests, the_logprob_digest_covers_what_was_sampled);
    tcase_add_test(digests, the_run_uid_is_moved_by_all_that_decides_bits);
    suite_add_tcase(suite, receipts);
    suite_add_tcase(suite, ledger);
    suite_add_tcase(suite, digests);
    return suite;
}
