/* Damaged files: every flipped bit is found and named, and no file is taken for more than it holds. */
#include "br_file.h"
#include "fake_rollout.h"
#include "h5_edit.h"
#include "rollout_replay.h"
#include "test_support.h"

#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_SEQ = 6 };

static void copy_file(const char *from, const char *to) {
    br_map map;
    CHECK_OK(br_file_map(from, &map));
    CHECK_OK(br_file_write(to, map.bytes, map.n));
    br_file_unmap(&map);
}

/* ---- bits ------------------------------------------------------------------------------------------------------------- */

static const struct column {
    const char *path, *names; /* of the parts that a damage there may be called by */
    size_t row_bytes;
    int by_token;
} columns[] = {
    {"/seq/uid", "identity", 256, 0},
    {"/seq/prompt_index", "identity", 4, 0},
    {"/seq/sample", "identity", 4, 0},
    {"/seq/seed", "identity", 8, 0},
    {"/seq/adapter_name", "adapter", 64, 0},
    {"/seq/adapter_digest", "adapter", 16, 0},
    {"/seq/temperature", "settings", 4, 0},
    {"/seq/min_p", "settings", 4, 0},
    {"/seq/top_p", "settings", 8, 0},
    {"/seq/top_k", "settings", 4, 0},
    {"/seq/max_new", "settings", 4, 0},
    {"/seq/min_new", "settings", 4, 0},
    {"/seq/ignore_eos", "settings", 4, 0},
    {"/seq/n_stop", "settings", 4, 0},
    {"/seq/stop_token", "settings", 64, 0},
    {"/seq/prompt_len", "tokens", 4, 0},
    {"/seq/status", "result", 1, 0},
    {"/seq/stop", "result", 1, 0},
    {"/seq/error_code", "result", 4, 0},
    {"/seq/part_digest", "stored digest", 56, 0},
    {"/seq/receipt", "receipt", 16, 0},
    {"/seq/chain", "chain", 16, 0},
    {"/tokens/id", "tokens", 4, 1},
    {"/tokens/mask", "tokens", 1, 1},
    {"/tokens/logprob", "log-probs", 4, 1},
    {"/tokens/logprob_raw", "log-probs", 4, 1},
    {"/tokens/logprob_kept", "log-probs", 4, 1},
    {"/tokens/entropy", "entropy", 4, 1},
    {"/tokens/top_id", "alternatives", 12, 1},
    {"/tokens/top_logprob", "alternatives", 12, 1},
};

static int64_t owner_of(const int64_t *offset, size_t token) {
    int64_t i = 0;
    while (offset[i + 1] <= (int64_t)token)
        i++;
    return i;
}

/* Flips one bit and expects a refusal that names the sequence, and either the group of fields or the dataset itself. */
static void expect_named(const char *path, const struct column *c, const int64_t *offset, size_t byte, int bit) {
    rollout_replay ledger;
    char where[32];
    size_t row = byte / c->row_bytes;
    int64_t seq = c->by_token ? owner_of(offset, row) : (int64_t)row;
    h5_edit_flip(path, c->path, byte, bit);
    br_status status = fake_replay(path, &ledger);
    snprintf(where, sizeof where, "sequence %lld", (long long)seq);
    ck_assert_msg(status == BR_E_MISMATCH || status == BR_E_FORMAT, "%s byte %zu bit %d: %s", c->path, byte, bit,
                  br_status_name(status));
    ck_assert_msg(strstr(br_last_error(), where) != NULL, "%s byte %zu: expected %s in: %s", c->path, byte, where,
                  br_last_error());
    if (status == BR_E_MISMATCH) {
        ck_assert_msg(strstr(br_last_error(), c->names) != NULL, "%s byte %zu: %s", c->path, byte, br_last_error());
        ck_assert_int_eq(ledger.first_seq, seq);
    }
    h5_edit_flip(path, c->path, byte, bit);
}

START_TEST(every_flipped_bit_is_found_and_named) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    int64_t offset[N_SEQ + 1];
    uint64_t seed = test_seed();
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    h5_edit_read(path, "/seq/offset", offset);
    for (size_t k = 0; k < sizeof columns / sizeof columns[0]; k++) {
        size_t n = h5_edit_bytes(path, columns[k].path), n_try = test_is_long() ? 400 : 8;
        for (size_t i = 0; i < n_try; i++) {
            uint64_t x = test_mix(seed * 1000 + k * 400 + i);
            expect_named(path, &columns[k], offset, x % n, (int)(x >> 60) & 7);
        }
    }
    CHECK_OK(fake_replay(path, &ledger));
    ck_assert_int_eq(ledger.n_fault, 0);
}
END_TEST

START_TEST(moved_offsets_and_the_commit_record_are_found) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    for (size_t byte = 0; byte < 8 * (N_SEQ + 1); byte++) {
        h5_edit_flip(path, "/seq/offset", byte, (int)byte % 8);
        ck_assert_int_ne(fake_replay(path, &ledger), BR_OK);
        h5_edit_flip(path, "/seq/offset", byte, (int)byte % 8);
    }
    for (size_t byte = 0; byte < 32; byte++) {
        h5_edit_flip(path, "/commit", byte, (int)byte % 8);
        CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
        h5_edit_flip(path, "/commit", byte, (int)byte % 8);
    }
    CHECK_OK(fake_replay(path, &ledger));
}
END_TEST

/* Offsets that still rise, but do not cover the tokens: refused before any sequence is looked at. */
START_TEST(offsets_have_to_cover_the_tokens) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    int64_t offset[N_SEQ + 1];
    const struct { int at; int64_t by; } given[] = {{0, 1}, {0, -1}, {N_SEQ, -1}, {N_SEQ, 1}};
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, N_SEQ, 0);
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        h5_edit_read(path, "/seq/offset", offset);
        offset[given[k].at] += given[k].by;
        h5_edit_write(path, "/seq/offset", offset);
        CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
        ck_assert_msg(strstr(br_last_error(), "offset") != NULL, "%s", br_last_error());
        offset[given[k].at] -= given[k].by;
        h5_edit_write(path, "/seq/offset", offset);
    }
}
END_TEST

START_TEST(every_attribute_is_bound) {
    static const char *const name[] = {"format",          "format_version",      "logprob_kind", "sampler",
                                       "producer",        "producer_stamp",      "run_uid",      "base_digest",
                                       "contract_digest", "model_config_digest", "device_name",  "engine_build",
                                       "n_seq_closed",    "meta_digest"};
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, 2, 0);
    for (size_t k = 0; k < sizeof name / sizeof name[0]; k++) {
        size_t n = h5_edit_attribute_bytes(path, name[k]);
        for (size_t byte = 0; byte < n; byte += test_is_long() ? 1 : 3) {
            h5_edit_attribute_flip(path, name[k], byte, (int)(byte + k) % 7);
            br_status status = fake_replay(path, &ledger);
            ck_assert_msg(status == BR_E_MISMATCH || status == BR_E_FORMAT, "%s byte %zu: %s", name[k], byte,
                          br_status_name(status));
            ck_assert_msg(strstr(br_last_error(), "attribute") || strstr(br_last_error(), "commit"), "%s: %s", name[k],
                          br_last_error());
            h5_edit_attribute_flip(path, name[k], byte, (int)(byte + k) % 7);
        }
    }
    CHECK_OK(fake_replay(path, &ledger));
    h5_edit_unlink(path, "/tokens/entropy");
    CHECK_FAILS(fake_replay(path, &ledger), BR_E_MISMATCH);
}
END_TEST

/* ---- files that are not what they say --------------------------------------------------------------------------------- */

START_TEST(a_reader_refuses_what_does_not_fit) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    const char *good = fake_path("good.h5"), *path = fake_path("bad.h5");
    const struct { const char *dataset, *type; int rank; uint64_t size[2];
    } replaced[] = {
        {"/tokens/logprob", "f64", 1, {500, 0}}, {"/tokens/logprob", "f32be", 1, {500, 0}},
        {"/tokens/id", "i64", 1, {500, 0}},      {"/tokens/id", "i32", 2, {500, 1}},
        {"/tokens/id", "vlen", 1, {500, 0}},     {"/tokens/id", "i32", 1, {3, 0}},
        {"/seq/offset", "i64", 1, {3, 0}},       {"/seq/offset", "i64", 1, {7, 0}},
        {"/seq/receipt", "u64", 2, {6, 3}},      {"/seq/receipt", "u64", 1, {12, 0}},
        {"/seq/uid", "u8", 2, {6, 256}},         {"/tokens/top_id", "i32", 2, {500, 21}},
        {"/tokens/top_id", "i32", 1, {500, 0}},  {"/tokens/top_id", "i32", 2, {500, 2}},
        {"/commit", "u64", 1, {3, 0}},           {"/commit", "i64", 1, {4, 0}},
        {"/commit", "u64", 1, {4, 0}},
    };
    fake_write(good, &meta, NULL, N_SEQ, 0);
    for (size_t k = 0; k < sizeof replaced / sizeof replaced[0]; k++) {
        copy_file(good, path);
        h5_edit_replace(path, replaced[k].dataset, replaced[k].type, replaced[k].rank, replaced[k].size);
        ck_assert_msg(fake_replay(path, &ledger) == BR_E_FORMAT, "case %zu, %s: %s", k, replaced[k].dataset,
                      br_last_error());
        ck_assert_msg(strstr(br_last_error(), path) != NULL, "case %zu: %s", k, br_last_error());
    }
    for (size_t k = 0; k < sizeof columns / sizeof columns[0]; k++) {
        copy_file(good, path);
        h5_edit_unlink(path, columns[k].path);
        br_status status = fake_replay(path, &ledger);
        ck_assert_msg(status == BR_E_FORMAT || (status == BR_E_MISMATCH && strstr(columns[k].path, "entropy")) ||
                          (status == BR_E_MISMATCH && strstr(columns[k].path, "top_")),
                      "%s: %s", columns[k].path, br_status_name(status));
        copy_file(good, path);
        h5_edit_link_away(path, columns[k].path);
        CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
    }
}
END_TEST

/* A few hundred bytes that claim 2^30 sequences: datasets that are stored nowhere read as zeros. */
START_TEST(a_small_file_cannot_ask_for_memory) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    uint64_t n = 1ull << 30, commit[4] = {n, n, 1, 0};
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, 1, 0);
    commit[3] = br_hash_u64(commit, 24);
    h5_edit_write(path, "/commit", commit);
    h5_edit_replace(path, "/seq/offset", "i64", 1, (uint64_t[1]){n + 1});
    CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "too few for") != NULL, "%s", br_last_error());
}
END_TEST

START_TEST(a_reader_refuses_wrong_attributes) {
    static const char *const given[][2] = {
        {"format", "rollout"},
        {"format_version", "2"},
        {"logprob_kind", "top_p_renormalised"},
        {"producer", "a name that is far too long"},
        {"run_uid", "12"},
        {"run_uid", "0x000000000000000000000000000000"},
        {"run_uid", "0000000000000000000000000000000G"},
        {"n_seq_closed", "six"},
        {"n_seq_closed", "06"},
        {"meta_digest", ""},
        {"producer_stamp", NULL},
        {"base_digest", NULL},
    };
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    const char *good = fake_path("good.h5"), *path = fake_path("bad.h5");
    fake_write(good, &meta, NULL, 2, 0);
    for (size_t k = 0; k < sizeof given / sizeof given[0]; k++) {
        copy_file(good, path);
        h5_edit_attribute_set(path, given[k][0], given[k][1]);
        ck_assert_msg(fake_replay(path, &ledger) == BR_E_FORMAT, "%s = %s", given[k][0],
                      given[k][1] ? given[k][1] : "(none)");
        ck_assert_msg(strstr(br_last_error(), given[k][0]) != NULL, "%s: %s", given[k][0], br_last_error());
    }
}
END_TEST

START_TEST(a_truncated_file_is_refused) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    br_map map;
    const char *path = fake_path("bad.h5");
    fake_write(fake_path("good.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(br_file_map(fake_path("good.h5"), &map));
    for (size_t n = 0; n < map.n; n += test_is_long() ? 97 : map.n / 20) {
        CHECK_OK(br_file_write(path, map.bytes, n));
        CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
    }
    br_file_unmap(&map);
    CHECK_FAILS(fake_replay(fake_path("none.h5"), &ledger), BR_E_NOT_FOUND);
    CHECK_FAILS(fake_replay(test_tmp_dir(), &ledger), BR_E_IO); /* a folder */
}
END_TEST

/* The checksum of a packed chunk says no more than that something in it changed: the sentence names the sequences in it. */
START_TEST(a_damaged_chunk_is_named_by_its_sequences) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_replay ledger;
    br_map map;
    const char *path = fake_path("bad.h5");
    fake_write(fake_path("good.h5"), &meta, NULL, N_SEQ, 0);
    hid_t file = H5Fopen(fake_path("good.h5"), H5F_ACC_RDONLY, H5P_DEFAULT),
          set = H5Dopen2(file, "/tokens/logprob", H5P_DEFAULT);
    hsize_t first[1] = {0}, size = 0;
    unsigned mask;
    haddr_t at = 0;
    ck_assert(H5Dget_chunk_info_by_coord(set, first, &mask, &at, &size) >= 0);
    H5Dclose(set);
    H5Fclose(file);
    CHECK_OK(br_file_map(fake_path("good.h5"), &map));
    unsigned char *bytes = malloc(map.n);
    memcpy(bytes, map.bytes, map.n);
    bytes[at + size / 2] ^= 1;
    CHECK_OK(br_file_write(path, bytes, map.n));
    free(bytes);
    br_file_unmap(&map);
    CHECK_FAILS(fake_replay(path, &ledger), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "/tokens/logprob of sequences 0..5") != NULL, "%s", br_last_error());
}
END_TEST

/* In a process that ends at once: HDF5 leaks blocks of metadata that it could not read, and complains of them at exit. */
static br_status replay_apart(const char *path) {
    rollout_replay ledger;
    int wait_status;
    pid_t child = fork();
    if (child == 0)
        _exit((int)fake_replay(path, &ledger));
    waitpid(child, &wait_status, 0);
    ck_assert_msg(WIFEXITED(wait_status), "ended with %x", wait_status);
    return (br_status)WEXITSTATUS(wait_status);
}

START_TEST(a_raw_flip_anywhere_is_refused) {
    rollout_meta meta = fake_meta("rollout", "s");
    br_map map;
    int n_found = 0;
    const char *path = fake_path("bad.h5");
    fake_write(fake_path("good.h5"), &meta, NULL, N_SEQ, 0);
    CHECK_OK(br_file_map(fake_path("good.h5"), &map));
    unsigned char *bytes = malloc(map.n);
    for (size_t at = 0; at < map.n; at += test_is_long() ? 61 : map.n / 60) {
        memcpy(bytes, map.bytes, map.n);
        bytes[at] ^= 0x10;
        CHECK_OK(br_file_write(path, bytes, map.n));
        br_status status = replay_apart(path); /* a byte that nothing uses may pass */
        n_found += status != BR_OK;
        ck_assert_msg(status == BR_OK || status == BR_E_FORMAT || status == BR_E_MISMATCH, "byte %zu: %s", at,
                      br_status_name(status));
    }
    ck_assert_int_gt(n_found, 5);
    free(bytes);
    br_file_unmap(&map);
}
END_TEST

Suite *test_damage_suite(void) {
    Suite *suite = suite_create("damage");
    TCase *bits = tcase_create("bits"), *files = tcase_create("files");
    tcase_set_timeout(bits, test_is_long() ? 900 : 120);
    tcase_add_test(bits, every_flipped_bit_is_found_and_named);
    tcase_add_test(bits, moved_offsets_and_the_commit_record_are_found);
    tcase_add_test(bits, offsets_have_to_cover_the_tokens);
    tcase_add_test(bits, every_attribute_is_bound);
    tcase_set_timeout(files, test_is_long() ? 900 : 120);
    tcase_add_test(files, a_reader_refuses_what_does_not_fit);
    tcase_add_test(files, a_small_file_cannot_ask_for_memory);
    tcase_add_test(files, a_reader_refuses_wrong_attributes);
    tcase_add_test(files, a_truncated_file_is_refused);
    tcase_add_test(files, a_damaged_chunk_is_named_by_its_sequences);
    tcase_add_test(files, a_raw_flip_anywhere_is_refused);
    suite_add_tcase(suite, bits);
    suite_add_tcase(suite, files);
    return suite;
}
