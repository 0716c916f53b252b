/* Receipts, chain and digests: every changed bit of a file is found and named, and what must not matter does not. */
#include "br_file.h"
#include "br_mem.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "ledger.h"
#include "logprob_digest.h"
#include "receipt.h"
#include "run_uid.h"
#include "test_support.h"
#include "verify_chain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_SEQ = 6 };

static const char *path_of(const char *name) {
    static char path[4][512];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, 512, "%s/%s", test_tmp_dir(), name);
    return p;
}

static void copy_file(const char *from, const char *to) {
    br_map map;
    CHECK_OK(br_file_map(from, &map));
    CHECK_OK(br_file_write(to, map.bytes, map.n));
    br_file_unmap(&map);
}

/* Opens and replays; the status of whichever refuses first. */
static br_status replay(const char *path, ledger_result *out) {
    rollout_reader *r;
    memset(out, 0, sizeof *out);
    out->first_seq = -1;
    BR_TRY(rollout_open(path, &r));
    br_status status = ledger_check(r, out);
    rollout_reader_close(r);
    return status;
}

/* ---- receipts ------------------------------------------------------------------------------------------------------------ */

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

/* ---- the file as a whole ------------------------------------------------------------------------------------------------- */

static const struct column {
    const char *path, *names; /* of the parts that a damage there may be called by */
    size_t row_bytes;
    int by_token;
} columns[] = {
    {"/seq/uid", "identity", 256, 0},          {"/seq/prompt_index", "identity", 4, 0},   {"/seq/sample", "identity", 4, 0},
    {"/seq/seed", "identity", 8, 0},           {"/seq/adapter_name", "adapter", 64, 0},   {"/seq/adapter_digest", "adapter", 16, 0},
    {"/seq/temperature", "settings", 4, 0},    {"/seq/min_p", "settings", 4, 0},          {"/seq/top_p", "settings", 8, 0},
    {"/seq/top_k", "settings", 4, 0},          {"/seq/max_new", "settings", 4, 0},        {"/seq/min_new", "settings", 4, 0},
    {"/seq/ignore_eos", "settings", 4, 0},     {"/seq/n_stop", "settings", 4, 0},         {"/seq/stop_token", "settings", 64, 0},
    {"/seq/prompt_len", "tokens", 4, 0},       {"/seq/status", "result", 1, 0},           {"/seq/stop", "result", 1, 0},
    {"/seq/error_code", "result", 4, 0},       {"/seq/part_digest", "stored digest", 56, 0}, {"/seq/receipt", "receipt", 16, 0},
    {"/seq/chain", "chain", 16, 0},            {"/tokens/id", "tokens", 4, 1},            {"/tokens/mask", "tokens", 1, 1},
    {"/tokens/logprob", "log-probs", 4, 1},    {"/tokens/logprob_raw", "log-probs", 4, 1}, {"/tokens/logprob_kept", "log-probs", 4, 1},
    {"/tokens/entropy", "entropy", 4, 1},      {"/tokens/top_id", "alternatives", 12, 1}, {"/tokens/top_logprob", "alternatives", 12, 1},
};

static int64_t owner_of(const int64_t *offset, size_t token) {
    int64_t i = 0;
    while (offset[i + 1] <= (int64_t)token)
        i++;
    return i;
}

/* Flips one bit and expects a refusal that names the sequence, and either the group of fields or the dataset itself. */
static void expect_named(const char *path, const struct column *c, const int64_t *offset, size_t byte, int bit) {
    ledger_result ledger;
    char where[32];
    size_t row = byte / c->row_bytes;
    int64_t seq = c->by_token ? owner_of(offset, row) : (int64_t)row;
    h5_edit_flip(path, c->path, byte, bit);
    br_status status = replay(path, &ledger);
    snprintf(where, sizeof where, "sequence %lld", (long long)seq);
    ck_assert_msg(status == BR_E_MISMATCH || status == BR_E_FORMAT, "%s byte %zu bit %d: %s", c->path, byte, bit, br_status_name(status));
    ck_assert_msg(strstr(br_last_error(), where) != NULL, "%s byte %zu: expected %s in: %s", c->path, byte, where, br_last_error());
    if (status == BR_E_MISMATCH) {
        ck_assert_msg(strstr(br_last_error(), c->names) != NULL, "%s byte %zu: %s", c->path, byte, br_last_error());
        ck_assert_int_eq(ledger.first_seq, seq);
    }
    h5_edit_flip(path, c->path, byte, bit);
}

START_TEST(every_flipped_bit_is_found_and_named) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    int64_t offset[N_SEQ + 1];
    uint64_t seed = test_seed();
    const char *path = path_of("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    h5_edit_read(path, "/seq/offset", offset);
    for (size_t k = 0; k < sizeof columns / sizeof columns[0]; k++) {
        size_t n = h5_edit_bytes(path, columns[k].path), n_try = test_is_long() ? 400 : 8;
        for (size_t i = 0; i < n_try; i++) {
            uint64_t x = test_mix(seed * 1000 + k * 400 + i);
            expect_named(path, &columns[k], offset, x % n, (int)(x >> 60) & 7);
        }
    }
    CHECK_OK(replay(path, &ledger));
    ck_assert_int_eq(ledger.n_fault, 0);
}
END_TEST

START_TEST(moved_offsets_and_the_commit_record_are_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    const char *path = path_of("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    for (size_t byte = 0; byte < 8 * (N_SEQ + 1); byte++) {
        h5_edit_flip(path, "/seq/offset", byte, (int)byte % 8);
        ck_assert_int_ne(replay(path, &ledger), BR_OK);
        h5_edit_flip(path, "/seq/offset", byte, (int)byte % 8);
    }
    for (size_t byte = 0; byte < 32; byte++) {
        h5_edit_flip(path, "/commit", byte, (int)byte % 8);
        CHECK_FAILS(replay(path, &ledger), BR_E_FORMAT);
        h5_edit_flip(path, "/commit", byte, (int)byte % 8);
    }
    CHECK_OK(replay(path, &ledger));
}
END_TEST

START_TEST(every_attribute_is_bound) {
    static const char *const name[] = {"format", "format_version", "logprob_kind", "sampler", "producer", "producer_stamp", "run_uid",
                                       "base_digest", "contract_digest", "model_config_digest", "device_name", "engine_build",
                                       "n_seq_closed", "meta_digest"};
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    const char *path = path_of("a.h5");
    fake_write(path, &meta, NULL, 2, 0);
    for (size_t k = 0; k < sizeof name / sizeof name[0]; k++) {
        size_t n = h5_edit_attribute_bytes(path, name[k]);
        for (size_t byte = 0; byte < n; byte += test_is_long() ? 1 : 3) {
            h5_edit_attribute_flip(path, name[k], byte, (int)(byte + k) % 7);
            br_status status = replay(path, &ledger);
            ck_assert_msg(status == BR_E_MISMATCH || status == BR_E_FORMAT, "%s byte %zu: %s", name[k], byte, br_status_name(status));
            ck_assert_msg(strstr(br_last_error(), "attribute") || strstr(br_last_error(), "commit"), "%s: %s", name[k], br_last_error());
            h5_edit_attribute_flip(path, name[k], byte, (int)(byte + k) % 7);
        }
    }
    CHECK_OK(replay(path, &ledger));
    h5_edit_unlink(path, "/tokens/entropy");
    CHECK_FAILS(replay(path, &ledger), BR_E_MISMATCH);
}
END_TEST

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
    ledger_result ledger;
    const struct { int n, order[N_SEQ]; int64_t first; } given[] = {
        {5, {0, 1, 3, 4, 5}, 2}, {5, {1, 2, 3, 4, 5}, 0}, {6, {0, 2, 1, 3, 4, 5}, 1}, {6, {5, 4, 3, 2, 1, 0}, 0}, {6, {0, 1, 2, 2, 4, 5}, 3},
    };
    const char *whole = path_of("whole.h5"), *path = path_of("part.h5");
    fake_write(whole, &meta, NULL, N_SEQ, 0);
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        rearranged(whole, path, given[k].order, given[k].n);
        CHECK_FAILS(replay(path, &ledger), BR_E_MISMATCH);
        ck_assert_int_eq(ledger.first_seq, given[k].first);
        ck_assert_msg(strstr(br_last_error(), "dropped, inserted or reordered") != NULL, "%s", br_last_error());
    }
}
END_TEST

/* The end cut off, with a commit record that is right for what is left: only the count at closing tells. */
START_TEST(a_cut_off_end_is_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    int64_t offset[N_SEQ + 1];
    const char *path = path_of("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    h5_edit_read(path, "/seq/offset", offset);
    uint64_t commit[4] = {N_SEQ - 1, (uint64_t)offset[N_SEQ - 1], N_SEQ, 0};
    commit[3] = br_hash_u64(commit, 24);
    h5_edit_write(path, "/commit", commit);
    CHECK_FAILS(replay(path, &ledger), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), "closed with 6 sequences and holds 5") != NULL, "%s", br_last_error());
}
END_TEST

START_TEST(a_resumed_run_has_the_chain_of_a_whole_one) {
    rollout_meta meta = fake_meta("rollout", "one"), later = fake_meta("rollout", "two");
    rollout_writer *w;
    rollout_reader *a, *b;
    fake_seq f;
    CHECK_OK(rollout_create(path_of("cut.h5"), &meta, &w));
    for (int i = 0; i < N_SEQ; i++) {
        fake_make(&meta, i, &f);
        CHECK_OK(rollout_append(w, &f.seq));
        CHECK_OK(rollout_commit(w));
        if (i == 2) {
            rollout_abandon(w);
            CHECK_OK(rollout_resume(path_of("cut.h5"), &later, &w));
        }
    }
    CHECK_OK(rollout_close(w));
    fake_write(path_of("whole.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(rollout_open(path_of("cut.h5"), &a));
    CHECK_OK(rollout_open(path_of("whole.h5"), &b));
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
    const char *path = path_of("a.h5");
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
    CHECK_OK(rollout_create(path_of("a.h5"), &meta, &w));
    fake_make(&meta, 0, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_commit(w));
    rollout_abandon(w);
    CHECK_OK(rollout_open(path_of("a.h5"), &r));
    CHECK_OK(verify_chain(r, &report));
    ck_assert(strstr(report.text, "unfinished") != NULL);
    br_report_free(&report);
    rollout_reader_close(r);
}
END_TEST

/* ---- digests of runs ----------------------------------------------------------------------------------------------------- */

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
    fake_write(path_of("a.h5"), &meta, NULL, N_SEQ, 0);
    fake_write(path_of("b.h5"), &meta, order, N_SEQ, 0);
    fake_write(path_of("c.h5"), &trainer, order, N_SEQ, 1);
    ck_assert(br_digest_equal(file_digest(path_of("a.h5")), file_digest(path_of("b.h5"))));
    ck_assert(br_digest_equal(file_digest(path_of("a.h5")), file_digest(path_of("c.h5"))));
    fake_write(path_of("d.h5"), &meta, NULL, N_SEQ - 1, 0);
    ck_assert(!br_digest_equal(file_digest(path_of("a.h5")), file_digest(path_of("d.h5"))));
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
    const run_identity base = {.contract = {1, 1}, .weights = {2, 2}, .n_adapter = 2, .adapter_name = name, .adapter_digest = digest,
                               .n_sample = 4, .seed = 9};
    const char *text = "{\"prompt\": [1, 2], \"uid\": \"a\"}\n{\"prompt\": [3], \"uid\": \"b\"}";
    br_digest before = uid_of(text, &base);
    run_identity run = base;
    run.adapter_name = swapped, run.adapter_digest = swapped_digest;
    ck_assert(br_digest_equal(before, uid_of(text, &run)));
    ck_assert(br_digest_equal(before, uid_of("{\"prompt\": [1, 2], \"uid\": \"a\", \"n\": 4, \"seed\": \"9\"}\n\n{\"uid\": \"b\", \"prompt\": [3]}\n", &base)));
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

/* ---- files that are not what they say ------------------------------------------------------------------------------------ */

START_TEST(a_reader_refuses_what_does_not_fit) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    const char *good = path_of("good.h5"), *path = path_of("bad.h5");
    const struct { const char *dataset, *type; int rank; uint64_t size[2]; } replaced[] = {
        {"/tokens/logprob", "f64", 1, {500, 0}},   {"/tokens/logprob", "f32be", 1, {500, 0}}, {"/tokens/id", "i64", 1, {500, 0}},
        {"/tokens/id", "i32", 2, {500, 1}},        {"/tokens/id", "vlen", 1, {500, 0}},       {"/tokens/id", "i32", 1, {3, 0}},
        {"/seq/offset", "i64", 1, {3, 0}},         {"/seq/offset", "i64", 1, {7, 0}},
        {"/seq/receipt", "u64", 2, {6, 3}},        {"/seq/receipt", "u64", 1, {12, 0}},       {"/seq/uid", "u8", 2, {6, 256}},
        {"/tokens/top_id", "i32", 2, {500, 21}},   {"/tokens/top_id", "i32", 1, {500, 0}},    {"/tokens/top_id", "i32", 2, {500, 2}},
        {"/commit", "u64", 1, {3, 0}},             {"/commit", "i64", 1, {4, 0}},             {"/commit", "u64", 1, {4, 0}},
    };
    fake_write(good, &meta, NULL, N_SEQ, 0);
    for (size_t k = 0; k < sizeof replaced / sizeof replaced[0]; k++) {
        copy_file(good, path);
        h5_edit_replace(path, replaced[k].dataset, replaced[k].type, replaced[k].rank, replaced[k].size);
        ck_assert_msg(replay(path, &ledger) == BR_E_FORMAT, "case %zu, %s: %s", k, replaced[k].dataset, br_last_error());
        ck_assert_msg(strstr(br_last_error(), path) != NULL, "case %zu: %s", k, br_last_error());
    }
    for (size_t k = 0; k < sizeof columns / sizeof columns[0]; k++) {
        copy_file(good, path);
        h5_edit_unlink(path, columns[k].path);
        br_status status = replay(path, &ledger);
        ck_assert_msg(status == BR_E_FORMAT || (status == BR_E_MISMATCH && strstr(columns[k].path, "entropy")) ||
                          (status == BR_E_MISMATCH && strstr(columns[k].path, "top_")), "%s: %s", columns[k].path, br_status_name(status));
        copy_file(good, path);
        h5_edit_link_away(path, columns[k].path);
        CHECK_FAILS(replay(path, &ledger), BR_E_FORMAT);
    }
}
END_TEST

/* A few hundred bytes that claim 2^30 sequences: datasets that are stored nowhere read as zeros. */
START_TEST(a_small_file_cannot_ask_for_memory) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    uint64_t n = 1ull << 30, commit[4] = {n, n, 1, 0};
    const char *path = path_of("a.h5");
    fake_write(path, &meta, NULL, 1, 0);
    commit[3] = br_hash_u64(commit, 24);
    h5_edit_write(path, "/commit", commit);
    h5_edit_replace(path, "/seq/offset", "i64", 1, (uint64_t[1]){n + 1});
    CHECK_FAILS(replay(path, &ledger), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "too few for") != NULL, "%s", br_last_error());
}
END_TEST

/* Written so from the start, digests and all: still no log-prob. */
START_TEST(a_nan_under_valid_digests_is_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    ledger_result ledger;
    fake_seq f;
    fake_make(&meta, 1, &f);
    f.logprob[f.seq.n_tok - 1] = 0x7fc00001u;
    receipt_parts(&meta, &f.seq, f.seq.part);
    f.seq.receipt = receipt_of_parts(&meta, f.seq.part);
    CHECK_OK(rollout_create(path_of("a.h5"), &meta, &w));
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_close(w));
    CHECK_FAILS(replay(path_of("a.h5"), &ledger), BR_E_MISMATCH);
    ck_assert_msg(strstr(br_last_error(), "NaN") != NULL, "%s", br_last_error());
}
END_TEST

START_TEST(a_reader_refuses_wrong_attributes) {
    static const char *const given[][2] = {
        {"format", "rollout"}, {"format_version", "2"}, {"logprob_kind", "top_p_renormalised"}, {"producer", "a name that is far too long"},
        {"run_uid", "12"}, {"run_uid", "0x000000000000000000000000000000"}, {"run_uid", "0000000000000000000000000000000G"},
        {"n_seq_closed", "six"}, {"n_seq_closed", "06"}, {"meta_digest", ""}, {"producer_stamp", NULL}, {"base_digest", NULL},
    };
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    const char *good = path_of("good.h5"), *path = path_of("bad.h5");
    fake_write(good, &meta, NULL, 2, 0);
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        copy_file(good, path);
        h5_edit_attribute_set(path, given[k][0], given[k][1]);
        ck_assert_msg(replay(path, &ledger) == BR_E_FORMAT, "%s = %s", given[k][0], given[k][1] ? given[k][1] : "(none)");
        ck_assert_msg(strstr(br_last_error(), given[k][0]) != NULL, "%s: %s", given[k][0], br_last_error());
    }
}
END_TEST

START_TEST(a_truncated_file_is_refused) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    br_map map;
    const char *path = path_of("bad.h5");
    fake_write(path_of("good.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(br_file_map(path_of("good.h5"), &map));
    for (size_t n = 0; n < map.n; n += test_is_long() ? 97 : map.n / 20) {
        CHECK_OK(br_file_write(path, map.bytes, n));
        CHECK_FAILS(replay(path, &ledger), BR_E_FORMAT);
    }
    br_file_unmap(&map);
    CHECK_FAILS(replay(path_of("none.h5"), &ledger), BR_E_NOT_FOUND);
    CHECK_FAILS(replay(test_tmp_dir(), &ledger), BR_E_FORMAT);
}
END_TEST

/* A damaged chunk is named by its dataset and sequences: the checksum tells no more. */
START_TEST(a_raw_flip_in_a_packed_chunk_is_refused) {
    rollout_meta meta = fake_meta("rollout", "s");
    ledger_result ledger;
    br_map map;
    int n_found = 0;
    const char *path = path_of("bad.h5");
    fake_write(path_of("good.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(br_file_map(path_of("good.h5"), &map));
    unsigned char *bytes = malloc(map.n);
    for (size_t at = 0; at < map.n; at += test_is_long() ? 61 : map.n / 60) {
        memcpy(bytes, map.bytes, map.n);
        bytes[at] ^= 0x10;
        CHECK_OK(br_file_write(path, bytes, map.n));
        br_status status = replay(path, &ledger); /* a byte that nothing uses may pass */
        n_found += status != BR_OK;
        ck_assert_msg(status == BR_OK || status == BR_E_FORMAT || status == BR_E_MISMATCH, "byte %zu: %s", at, br_status_name(status));
    }
    ck_assert_int_gt(n_found, 5);
    free(bytes);
    br_file_unmap(&map);
}
END_TEST

Suite *test_proof_suite(void) {
    Suite *suite = suite_create("proof");
    TCase *receipts = tcase_create("receipts"), *ledger = tcase_create("ledger"), *digests = tcase_create("digests"),
          *damage = tcase_create("damage");
    tcase_set_timeout(receipts, 20);
    tcase_add_test(receipts, each_field_moves_its_part_and_the_receipt);
    tcase_add_test(receipts, the_file_digests_move_every_receipt);
    tcase_add_test(receipts, a_nan_in_a_scored_slot_has_no_receipt);
    tcase_set_timeout(ledger, test_is_long() ? 900 : 120);
    tcase_add_test(ledger, every_flipped_bit_is_found_and_named);
    tcase_add_test(ledger, moved_offsets_and_the_commit_record_are_found);
    tcase_add_test(ledger, every_attribute_is_bound);
    tcase_add_test(ledger, dropped_inserted_and_reordered_sequences_are_found);
    tcase_add_test(ledger, a_cut_off_end_is_found);
    tcase_add_test(ledger, a_resumed_run_has_the_chain_of_a_whole_one);
    tcase_add_test(ledger, verify_reports_what_the_ledger_finds);
    tcase_add_test(ledger, a_stopped_run_verifies_as_unfinished);
    tcase_set_timeout(digests, 60);
    tcase_add_test(digests, the_logprob_digest_knows_no_order_and_no_producer);
    tcase_add_test(digests, the_logprob_digest_covers_what_was_sampled);
    tcase_add_test(digests, the_run_uid_is_moved_by_all_that_decides_bits);
    tcase_set_timeout(damage, test_is_long() ? 900 : 120);
    tcase_add_test(damage, a_reader_refuses_what_does_not_fit);
    tcase_add_test(damage, a_small_file_cannot_ask_for_memory);
    tcase_add_test(damage, a_nan_under_valid_digests_is_found);
    tcase_add_test(damage, a_reader_refuses_wrong_attributes);
    tcase_add_test(damage, a_truncated_file_is_refused);
    tcase_add_test(damage, a_raw_flip_in_a_packed_chunk_is_refused);
    suite_add_tcase(suite, receipts);
    suite_add_tcase(suite, ledger);
    suite_add_tcase(suite, digests);
    suite_add_tcase(suite, damage);
    return suite;
}
