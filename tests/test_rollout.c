/* Rollout files: what goes in comes out, what was committed survives every kill and every failing write, and no file,
 * however damaged, is taken for more than it holds. */
#include "br_file.h"
#include "br_mem.h"
#include "fake_rollout.h"
#include "faulty_disk.h"
#include "rollout_replay.h"
#include "logprob_digest.h"
#include "test_support.h"

#include <errno.h>
#include <hdf5.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int expect_prefix(const char *path, const rollout_meta *meta) {
    rollout_reader *r;
    fake_seq f;
    rollout_seq seq;
    CHECK_OK(rollout_open(path, &r));
    int n = (int)rollout_seq_count(r);
    for (int i = 0; i < n; i++) {
        fake_make(meta, i, &f);
        rollout_seq_at(r, i, &seq);
        fake_expect_equal(meta, &f.seq, &seq);
    }
    rollout_reader_close(r);
    return n;
}

static br_digest digest_of(const char *path) {
    rollout_reader *r;
    br_digest d;
    CHECK_OK(rollout_open(path, &r));
    CHECK_OK(logprob_digest_of_file(r, &d));
    rollout_reader_close(r);
    return d;
}

/* ---- contents --------------------------------------------------------------------------------------------------------- */

START_TEST(what_goes_in_comes_out) {
    for (int optional = 0; optional < 2; optional++) {
        rollout_meta meta = fake_meta("rollout", "generate/oracle/1");
        rollout_reader *r;
        if (!optional)
            meta.has_entropy = meta.n_top = 0;
        const char *path = fake_path("a.h5");
        fake_write(path, &meta, NULL, 20, 0);
        ck_assert_int_eq(expect_prefix(path, &meta), 20);
        CHECK_OK(rollout_open(path, &r));
        const rollout_meta *read = rollout_reader_meta(r);
        ck_assert_str_eq(read->producer, "rollout");
        ck_assert_str_eq(read->producer_stamp, "generate/oracle/1");
        ck_assert_str_eq(read->backend, "oracle");
        ck_assert_str_eq(read->engine_build, BR_VERSION_TEXT);
        ck_assert(br_digest_equal(read->run_uid, meta.run_uid) &&
                  br_digest_equal(read->weights_digest, meta.weights_digest));
        ck_assert(br_digest_equal(read->contract_digest, meta.contract_digest) &&
                  br_digest_equal(read->config_digest, meta.config_digest));
        ck_assert_int_eq(read->has_entropy, meta.has_entropy);
        ck_assert_int_eq(read->n_top, meta.n_top);
        ck_assert_int_eq(read->n_seq_closed, 20);
        rollout_reader_close(r);
    }
}
END_TEST

START_TEST(a_longer_run_spans_chunks) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    fake_seq f;
    const char *path = fake_path("long.h5");
    int n = 600; /* sequence columns have chunks of 256 rows */
    CHECK_OK(rollout_create(path, &meta, &w));
    for (int i = 0; i < n; i++) {
        fake_make(&meta, i, &f);
        CHECK_OK(rollout_append(w, &f.seq));
        if (i % 100 == 0)
            CHECK_OK(rollout_commit(w));
    }
    CHECK_OK(rollout_close(w));
    ck_assert_int_eq(expect_prefix(path, &meta), n);
}
END_TEST

START_TEST(an_empty_run_is_a_file) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    rollout_replay ledger;
    rollout_reader *r;
    const char *path = fake_path("empty.h5");
    CHECK_OK(rollout_create(path, &meta, &w));
    CHECK_OK(rollout_commit(w)); /* of nothing: nothing is there to see */
    ck_assert(!br_file_exists(path));
    CHECK_OK(rollout_close(w));
    CHECK_OK(rollout_open(path, &r));
    ck_assert_int_eq(rollout_seq_count(r), 0);
    CHECK_OK(rollout_replay_check(r, &ledger));
    rollout_reader_close(r);
}
END_TEST

START_TEST(equal_runs_give_equal_bytes) {
    rollout_meta meta = fake_meta("rollout", "s");
    br_map a, b;
    const char *path_a = fake_path("a.h5"), *path_b = fake_path("b.h5");
    fake_write(path_a, &meta, NULL, 10, 0);
    fake_write(path_b, &meta, NULL, 10, 0);
    CHECK_OK(br_file_map(path_a, &a));
    CHECK_OK(br_file_map(path_b, &b));
    ck_assert_uint_eq(a.n, b.n);
    ck_assert(memcmp(a.bytes, b.bytes, a.n) == 0);
    br_file_unmap(&a);
    br_file_unmap(&b);
}
END_TEST

/* Texts shorter than their field and unused stop slots are the writer's to fill: leftovers of a caller would make equal runs
 * differ in bytes. */
START_TEST(leftovers_of_the_caller_do_not_enter) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    rollout_reader *r;
    rollout_seq seq;
    fake_seq f, clean;
    fake_make(&meta, 4, &f);
    fake_make(&meta, 4, &clean);
    memset(f.seq.uid + strlen(f.seq.uid) + 1, 0x55, 20);
    memset(f.seq.adapter + strlen(f.seq.adapter) + 1, 0x55, 20);
    for (int k = f.seq.n_stop; k < BR_STOP_MAX; k++)
        f.seq.stop_token[k] = 123;
    CHECK_OK(rollout_create(fake_path("a.h5"), &meta, &w));
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_close(w));
    CHECK_OK(rollout_open(fake_path("a.h5"), &r));
    rollout_seq_at(r, 0, &seq);
    fake_expect_equal(&meta, &clean.seq, &seq);
    rollout_reader_close(r);
}
END_TEST

START_TEST(append_refuses_what_is_out_of_range) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    fake_seq f;
    CHECK_OK(rollout_create(fake_path("a.h5"), &meta, &w));
#define REFUSED(change)                                     \
    do {                                                    \
        fake_make(&meta, 3, &f);                            \
        change;                                             \
        CHECK_FAILS(rollout_append(w, &f.seq), BR_E_ARG);   \
    } while (0)
    REFUSED(f.seq.uid[0] = 0);
    REFUSED(memset(f.seq.uid, 'x', sizeof f.seq.uid));
    REFUSED(f.seq.adapter[0] = 0);
    REFUSED(f.seq.sample = 1u << 24);
    REFUSED(f.seq.n_tok = 0);
    REFUSED(f.seq.n_tok = ROLLOUT_SEQ_TOK_MAX + 1);
    REFUSED(f.seq.prompt_len = 0);
    REFUSED(f.seq.prompt_len = f.seq.n_tok + 1);
    REFUSED(f.seq.status = 2);
    REFUSED(f.seq.stop = 5);
    REFUSED(f.seq.n_stop = 17);
    REFUSED(f.seq.n_stop = -1);
    REFUSED(f.seq.ignore_eos = 2);
    REFUSED(f.token[1] = -1);
    REFUSED(f.mask[1] = 2);
    REFUSED(f.top_token[2] = -2);
    REFUSED(f.seq.entropy = NULL);
    REFUSED(f.seq.top_token = NULL);
    fake_make(&meta, 0, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_close(w));
    ck_assert_int_eq(expect_prefix(fake_path("a.h5"), &meta), 1);
    meta.n_top = BR_TOP_LOGPROBS_MAX + 1;
    CHECK_FAILS(rollout_create(fake_path("b.h5"), &meta, &w), BR_E_ARG);
}
END_TEST

START_TEST(only_commits_are_visible) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    fake_seq f;
    const char *path = fake_path("a.h5");
    CHECK_OK(rollout_create(path, &meta, &w));
    for (int i = 0; i < 3; i++) {
        fake_make(&meta, i, &f);
        CHECK_OK(rollout_append(w, &f.seq));
        if (i > 0)
            ck_assert_int_eq(expect_prefix(path, &meta), i);
        else
            ck_assert(!br_file_exists(path));
        CHECK_OK(rollout_commit(w));
        ck_assert_int_eq(expect_prefix(path, &meta), i + 1);
    }
    fake_make(&meta, 3, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    rollout_abandon(w);
    ck_assert_int_eq(expect_prefix(path, &meta), 3);
}
END_TEST

/* The first to commit renamed what the other had begun at "path.part": both failed, and the file that stood there before was gone. */
START_TEST(two_writers_do_not_take_each_others_file) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *first, *second;
    fake_seq f;
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, 3, 0);
    fake_make(&meta, 0, &f);
    CHECK_OK(rollout_create(path, &meta, &first));
    CHECK_OK(rollout_create(path, &meta, &second));
    CHECK_OK(rollout_append(first, &f.seq));
    CHECK_FAILS(rollout_commit(first), BR_E_IO);
    ck_assert_msg(strstr(br_last_error(), "another process has replaced or removed it") != NULL, "%s", br_last_error());
    rollout_abandon(first);
    ck_assert_int_eq(expect_prefix(path, &meta), 3);
    CHECK_OK(rollout_append(second, &f.seq));
    CHECK_OK(rollout_close(second));
    ck_assert_int_eq(expect_prefix(path, &meta), 1);
    ck_assert(!br_file_exists(fake_path("a.h5.part")));
}
END_TEST

/* What is in the way is named, and it is not the file that was asked for. */
START_TEST(a_folder_in_the_way_is_named) {
    const rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    const char *part = fake_path("way.h5.part");
    ck_assert_int_eq(mkdir(part, 0777), 0);
    CHECK_FAILS(rollout_create(fake_path("way.h5"), &meta, &w), BR_E_IO);
    ck_assert_msg(strstr(br_last_error(), "way.h5.part: cannot ") != NULL, "%s", br_last_error());
    ck_assert_msg(strstr(br_last_error(), strerror(EISDIR)) != NULL, "%s", br_last_error());
    ck_assert_int_eq(rmdir(part), 0);
}
END_TEST

/* The engine seals the allocator while it runs: the writer has to get along with that. */
START_TEST(a_sealed_thread_may_write) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    fake_seq f;
    CHECK_OK(rollout_create(fake_path("a.h5"), &meta, &w));
    fake_make(&meta, 0, &f);
    br_mem_seal("test");
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_commit(w));
    CHECK_OK(rollout_close(w));
    br_mem_unseal(NULL);
    ck_assert_int_eq(expect_prefix(fake_path("a.h5"), &meta), 1);
}
END_TEST

/* 32 bytes that straddle two pages could be cut by a kill; then no commit at all would be left. */
START_TEST(the_commit_record_lies_in_one_page) {
    rollout_meta meta = fake_meta("rollout", "s");
    fake_write(fake_path("a.h5"), &meta, NULL, 1, 0);
    hid_t file = H5Fopen(fake_path("a.h5"), H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, "/commit", H5P_DEFAULT);
    haddr_t at = H5Dget_offset(set);
    ck_assert_uint_eq(at / 4096, (at + 31) / 4096);
    H5Dclose(set);
    H5Fclose(file);
}
END_TEST

START_TEST(memory_that_runs_out_is_a_status) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    rollout_reader *r;
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, 3, 0);
    br_status status = BR_E_NOMEM;
    int n = 0;
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = rollout_open(path, &r);
        ck_assert(status == BR_OK || (status == BR_E_NOMEM && !r));
    }
    rollout_reader_close(r);
    ck_assert_int_gt(n, 20);
    for (n = 0, status = BR_E_NOMEM; status != BR_OK; n++) {
        br_mem_fail_nth(n + 1);
        status = rollout_resume(path, &meta, &w);
        ck_assert_msg(status == BR_OK || (status == BR_E_NOMEM && !w), "%d: %s: %s", n, br_status_name(status),
                      br_last_error());
        ck_assert(!br_file_exists(fake_path("a.h5.part")));
    }
    ck_assert_int_gt(n, 20);
    br_mem_fail_nth(0);
    CHECK_OK(rollout_close(w));
    ck_assert_int_eq(expect_prefix(path, &meta), 3);
}
END_TEST

/* ---- kills and full disks --------------------------------------------------------------------------------------------- */

enum { KILL_SEQ = 5 };

/* Writes the whole run in a child under a disk fault, telling the parent by a byte after each commit that was acknowledged.
 * Returns how many; *wait_status as waitpid gives it. */
static int write_in_child(const char *path, const rollout_meta *meta, disk_fault kind, long at, int *wait_status) {
    int link[2], n_acked = 0;
    char byte;
    ck_assert_int_eq(pipe(link), 0);
    pid_t child = fork();
    if (child == 0) {
        rollout_writer *w;
        fake_seq f;
        br_status status;
        faulty_disk_fails(kind, at);
        status = br_file_exists(path) ? rollout_resume(path, meta, &w) : rollout_create(path, meta, &w);
        for (int i = 0; status == BR_OK && i < KILL_SEQ; i++) {
            fake_make(meta, i, &f);
            status = rollout_append(w, &f.seq);
            status = status == BR_OK ? rollout_commit(w) : status;
            if (status == BR_OK && write(link[1], "c", 1) != 1)
                _exit(9);
        }
        br_status closed = w ? rollout_close(w) : status;
        exit(status == BR_OK && closed == BR_OK ? 0 : status == BR_E_IO || closed == BR_E_IO ? 1 : 2);
    }
    close(link[1]);
    while (read(link[0], &byte, 1) == 1)
        n_acked++;
    close(link[0]);
    waitpid(child, wait_status, 0);
    return n_acked;
}

/* Continues a run of which `n` sequences are there, to the end. */
static void finish(const char *path, int n) {
    rollout_meta meta = fake_meta("rollout", "resumed");
    rollout_writer *w;
    fake_seq f;
    if (n < 0)
        CHECK_OK(rollout_create(path, &meta, &w));
    else
        CHECK_OK(rollout_resume(path, &meta, &w));
    for (int i = n < 0 ? 0 : n; i < KILL_SEQ; i++) {
        fake_make(&meta, i, &f);
        CHECK_OK(rollout_append(w, &f.seq));
    }
    CHECK_OK(rollout_close(w));
}

/* What a fault left behind: every acknowledged commit, at most the one that was under way besides; and the run can go on to
 * the digest of an uninterrupted one. */
static void expect_survived(const char *path, const rollout_meta *meta, int n_acked, br_digest whole) {
    rollout_reader *r;
    rollout_replay ledger;
    int n = br_file_exists(path) ? expect_prefix(path, meta) : -1;
    ck_assert_msg(n >= (n_acked ? n_acked : -1) && n <= n_acked + 1, "%d commits acknowledged, %d found", n_acked, n);
    finish(path, n);
    ck_assert_int_eq(expect_prefix(path, meta), KILL_SEQ);
    ck_assert(br_digest_equal(digest_of(path), whole));
    CHECK_OK(rollout_open(path, &r));
    CHECK_OK(rollout_replay_check(r, &ledger));
    rollout_reader_close(r);
}

/* Runs the fault at every write of the run, or at every `step`-th in the short form; returns the number of writes. */
static long at_every_write(disk_fault kind, long step) {
    rollout_meta meta = fake_meta("rollout", "first");
    int wait_status, n_hit = 0;
    long at = 1;
    const char *whole = fake_path("whole.h5");
    fake_write(whole, &meta, NULL, KILL_SEQ, 0);
    br_digest digest = digest_of(whole);
    for (;; at += step) {
        const char *path = fake_path("killed.h5");
        unlink(path);
        int n_acked = write_in_child(path, &meta, kind, at, &wait_status);
        int killed = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL;
        int failed = WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 1;
        ck_assert_msg(killed || failed || wait_status == 0, "write %ld: child ended with %x", at, wait_status);
        if (wait_status == 0)
            break;
        n_hit++;
        expect_survived(path, &meta, n_acked, digest);
    }
    ck_assert_msg(n_hit * step > 20, "only %ld writes were seen: HDF5 does not write through the hook", at);
    return at;
}

START_TEST(a_kill_at_any_write_keeps_the_commits) {
    at_every_write(DISK_KILL, test_is_long() ? 1 : 7);
}
END_TEST

START_TEST(a_kill_inside_a_write_keeps_the_commits) {
    at_every_write(DISK_TEAR, test_is_long() ? 1 : 11);
}
END_TEST

START_TEST(a_full_disk_keeps_the_commits) {
    at_every_write(DISK_FULL, test_is_long() ? 1 : 13);
}
END_TEST

START_TEST(a_single_failing_write_keeps_the_commits) {
    at_every_write(DISK_FULL_ONCE, test_is_long() ? 1 : 13);
}
END_TEST

/* The same through the kernel: a limit on the file's size. */
START_TEST(a_size_limit_is_an_error_not_a_loss) {
    rollout_meta meta = fake_meta("rollout", "s");
    int wait_status;
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {3 << 20, 3 << 20};
        rollout_writer *w;
        fake_seq f;
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        br_status status = rollout_create(fake_path("../limit.h5"), &meta, &w);
        int i = 0;
        for (; status == BR_OK && i < 5000; i++) {
            fake_make(&meta, i, &f);
            status = rollout_append(w, &f.seq);
            if (status == BR_OK && i % 50 == 0)
                status = rollout_commit(w);
        }
        int named = strstr(br_last_error(), "File too large") != NULL;
        int stays = rollout_append(w, &f.seq) == BR_E_IO && rollout_commit(w) == BR_E_IO;
        br_status closed = rollout_close(w);
        exit(status == BR_E_IO && closed == BR_E_IO && named && stays && i > 100 ? 0 : 1);
    }
    waitpid(child, &wait_status, 0);
    ck_assert_int_eq(wait_status, 0);
}
END_TEST

START_TEST(a_commit_is_synced_before_and_after_its_record) {
    rollout_meta meta = fake_meta("rollout", "s");
    rollout_writer *w;
    fake_seq f;
    const char *path = fake_path("a.h5");
    CHECK_OK(rollout_create(path, &meta, &w));
    fake_make(&meta, 0, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    CHECK_OK(rollout_commit(w)); /* comes to its place */
    fake_make(&meta, 1, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    faulty_disk_syncs(0);
    CHECK_OK(rollout_commit(w));
    ck_assert_int_eq(faulty_disk_sync_count(), 2);
    CHECK_OK(rollout_commit(w)); /* nothing new: nothing to do */
    ck_assert_int_eq(faulty_disk_sync_count(), 2);
    fake_make(&meta, 2, &f);
    CHECK_OK(rollout_append(w, &f.seq));
    faulty_disk_syncs(EIO);
    CHECK_FAILS(rollout_commit(w), BR_E_IO);
    ck_assert_msg(strstr(br_last_error(), strerror(EIO)) != NULL, "%s", br_last_error());
    CHECK_FAILS(rollout_close(w), BR_E_IO);
    faulty_disk_syncs(0);
    ck_assert_int_eq(expect_prefix(path, &meta), 2);
}
END_TEST

START_TEST(a_kill_between_commits_resumes_in_any_order) {
    rollout_meta meta = fake_meta("rollout", "first");
    fake_seq f;
    rollout_writer *w;
    int order[4] = {3, 0, 2, 1}, whole[4] = {0, 1, 2, 3};
    const char *path = fake_path("a.h5"), *path_whole = fake_path("b.h5");
    fake_write(path_whole, &meta, whole, 4, 0);
    CHECK_OK(rollout_create(path, &meta, &w));
    for (int k = 0; k < 4; k++) {
        fake_make(&meta, order[k], &f);
        CHECK_OK(rollout_append(w, &f.seq));
        CHECK_OK(rollout_commit(w));
        rollout_abandon(w);
        CHECK_OK(rollout_resume(path, &meta, &w));
    }
    CHECK_OK(rollout_close(w));
    ck_assert(br_digest_equal(digest_of(path), digest_of(path_whole)));
}
END_TEST

START_TEST(resume_refuses_another_run) {
    rollout_meta meta = fake_meta("rollout", "s"), other;
    rollout_writer *w;
    const char *path = fake_path("a.h5");
    fake_write(path, &meta, NULL, 2, 0);
#define OTHER(change)                                                \
    do {                                                             \
        other = meta;                                                \
        change;                                                      \
        CHECK_FAILS(rollout_resume(path, &other, &w), BR_E_ARG);     \
        ck_assert_ptr_null(w);                                       \
    } while (0)
    OTHER(other.run_uid.lo++);
    OTHER(other.weights_digest.hi++);
    OTHER(other.contract_digest.lo++);
    OTHER(other.config_digest.lo++);
    OTHER(other.has_entropy = 0);
    OTHER(other.n_top = 1);
    OTHER(strcpy(other.producer, "trainer"));
    CHECK_FAILS(rollout_resume(fake_path("none.h5"), &meta, &w), BR_E_NOT_FOUND);
    ck_assert_int_eq(expect_prefix(path, &meta), 2);
}
END_TEST

START_TEST(create_keeps_the_old_file_until_the_new_is_readable) {
    rollout_meta meta = fake_meta("rollout", "s");
    const char *path = fake_path("a.h5");
    int wait_status;
    fake_write(path, &meta, NULL, 2, 0);
    pid_t child = fork();
    if (child == 0) {
        rollout_writer *w;
        faulty_disk_fails(DISK_KILL, 1);
        (void)rollout_create(path, &meta, &w);
        exit(0);
    }
    waitpid(child, &wait_status, 0);
    ck_assert(WIFSIGNALED(wait_status));
    ck_assert_int_eq(expect_prefix(path, &meta), 2);
}
END_TEST

Suite *test_rollout_suite(void) {
    Suite *suite = suite_create("rollout");
    TCase *contents = tcase_create("contents"), *faults = tcase_create("faults");
    tcase_set_timeout(contents, 60);
    tcase_add_test(contents, what_goes_in_comes_out);
    tcase_add_test(contents, a_longer_run_spans_chunks);
    tcase_add_test(contents, an_empty_run_is_a_file);
    tcase_add_test(contents, equal_runs_give_equal_bytes);
    tcase_add_test(contents, leftovers_of_the_caller_do_not_enter);
    tcase_add_test(contents, append_refuses_what_is_out_of_range);
    tcase_add_test(contents, only_commits_are_visible);
    tcase_add_test(contents, two_writers_do_not_take_each_others_file);
    tcase_add_test(contents, a_folder_in_the_way_is_named);
    tcase_add_test(contents, a_sealed_thread_may_write);
    tcase_add_test(contents, the_commit_record_lies_in_one_page);
    tcase_add_test(contents, memory_that_runs_out_is_a_status);
    tcase_set_timeout(faults, test_is_long() ? 900 : 120);
    tcase_add_test(faults, a_kill_at_any_write_keeps_the_commits);
    tcase_add_test(faults, a_kill_inside_a_write_keeps_the_commits);
    tcase_add_test(faults, a_full_disk_keeps_the_commits);
    tcase_add_test(faults, a_single_failing_write_keeps_the_commits);
    tcase_add_test(faults, a_size_limit_is_an_error_not_a_loss);
    tcase_add_test(faults, a_commit_is_synced_before_and_after_its_record);
    tcase_add_test(faults, a_kill_between_commits_resumes_in_any_order);
    tcase_add_test(faults, resume_refuses_another_run);
    tcase_add_test(faults, create_keeps_the_old_file_until_the_new_is_readable);
    suite_add_tcase(suite, contents);
    suite_add_tcase(suite, faults);
    return suite;
}
