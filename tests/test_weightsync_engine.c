/* Adapters swapped in a running engine: every output is that of its version's cold start, whatever the mode and whatever was cached;
 * memory does not grow, and slots stay where they are. */
#include "br_mem.h"
#include "swap_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- under load ------------------------------------------------------------------------------------------------------------ */

static long resident_kib(void) {
    long size = 0, pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    ck_assert(file && fscanf(file, "%ld %ld", &size, &pages) == 2);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* A swap while r[0] runs; afterwards r[0] is the run under the new version, and the other one the old, if it goes on. */
static void swap_under_load(br_engine *e, swap_run *r[2], lora_set *set, int v, int64_t version, br_swap_mode mode) {
    swap_sender s = {.set = set};
    br_swap_status status;
    swap_begin_version(e, v, version);
    while (!swap_send(e, &s, 40))
        swap_poll(e, r, 2);
    CHECK_OK(br_swap_end(e, "a", lora_digest(set, 0)));
    CHECK_OK(br_swap_status_of(e, "a", &status));
    ck_assert_int_eq(status.state, BR_SWAP_PREPARED);
    ck_assert_int_eq(status.n_old, 0);
    swap_commit(e, version, mode, mode == BR_SWAP_DRAIN && status.n_live > 0 ? BR_SWAP_WAITS : BR_SWAP_COMMITTED);
    while (status.live_version != version) {
        CHECK_OK(br_swap_status_of(e, "a", &status));
        if (status.live_version != version)
            swap_poll(e, r, 2);
    }
    swap_run *fresh = r[1];
    r[1] = r[0];
    r[0] = fresh;
    swap_start(e, r[0]);
    while (r[1]->n_ended < SWAP_N)
        swap_poll(e, r, 2);
}

/* The sanitizer keeps what is freed, and is slow. */
#ifdef __SANITIZE_ADDRESS__
enum { N_SWAP = 60, COUNTS_MEMORY = 0 };
#else
enum { N_SWAP = 1000, COUNTS_MEMORY = 1 };
#endif
/* After N_WARM every place has been written and every tool was used once. From then on a swap allocates SWAP_ALLOCS times, both in
 * br_swap_define, and the process grows by less than SWAP_GROWTH bytes for each. */
enum { N_WARM = 20, SWAP_ALLOCS = 2, SWAP_GROWTH = 512 };

START_TEST(swaps_under_load_give_cold_starts) {
    static const br_swap_mode MODE[] = {BR_SWAP_FINISH_OLD, BR_SWAP_DRAIN, BR_SWAP_STOP};
    lora_set *set[SWAP_VERSIONS];
    br_engine *e = swap_engine(swap_of.dir[0]);
    swap_run *r[2] = {rig_alloc(1, sizeof(swap_run)), rig_alloc(1, sizeof(swap_run))};
    long before = 0, allocs = 0;
    const br_digest addresses = swap_addresses(e);
    swap_open_sets(e, set);
    swap_start(e, r[0]);
    for (int k = 1; k <= N_SWAP; k++) {
        const int v = (int)(test_mix((uint64_t)k) % SWAP_VERSIONS), last = k == 1 ? 0 : (int)(test_mix((uint64_t)k - 1) % SWAP_VERSIONS);
        char what[64];
        snprintf(what, sizeof what, "swap %d, version %d after %d", k, v, last);
        const long n_alloc = br_mem_alloc_count();
        swap_poll(e, r, 2);
        swap_under_load(e, r, set[v], v, k, MODE[k % 3]);
        allocs = k > N_WARM ? allocs + br_mem_alloc_count() - n_alloc : 0;
        swap_expect_cold(r[1], last, k - 1, what);
        ck_assert_msg(br_digest_equal(swap_addresses(e), addresses), "%s: a slot lies elsewhere", what);
        if (k % N_WARM == 0)
            swap_expect_live(e, what);
        if (k == N_WARM)
            before = resident_kib();
    }
    const long grown = resident_kib() - before;
    swap_finish(e, r[0]);
    swap_expect_cold(r[0], (int)(test_mix((uint64_t)N_SWAP) % SWAP_VERSIONS), N_SWAP, "the last version");
    printf("weightsync: %d swaps, after the first %d: resident memory %+ld KiB, %ld allocations\n", N_SWAP, N_WARM, grown, allocs);
    ck_assert_int_eq(allocs, (long)SWAP_ALLOCS * (N_SWAP - N_WARM));
    ck_assert_int_le(COUNTS_MEMORY ? grown : 0, (long)SWAP_GROWTH * (N_SWAP - N_WARM) / 1024);
    swap_close_sets(set);
    br_engine_close(e);
    free(r[0]);
    free(r[1]);
}
END_TEST

/* ---- each mode ------------------------------------------------------------------------------------------------------------- */

START_TEST(drain_waits_and_holds_new_requests_off) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    br_swap_answer answer;
    br_swap_status status;
    uint64_t id;
    swap_run *r = rig_alloc(1, sizeof *r);
    const br_request one = rig_br_request(&swap_of.request[0]);
    br_request other = one;
    other.adapter = "b";
    swap_start(e, r);
    swap_poll(e, &r, 1);
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_DRAIN, BR_SWAP_WAITS);
    CHECK_FAILS(br_submit(e, &one, &id), BR_E_LIMIT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "6 sequences to end before version 1"));
    CHECK_OK(br_submit(e, &other, &id)); /* another name does not wait */
    CHECK_OK(br_swap_status_of(e, "a", &status));
    ck_assert(status.state == BR_SWAP_DRAINING && status.n_live == SWAP_N && status.live_version == 0);
    CHECK_FAILS(br_swap_begin(e, "a", 2, 0, &answer), BR_E_LIMIT);
    ck_assert_int_eq(answer, BR_SWAP_BUSY);
    CHECK_FAILS(br_swap_from_folder(e, "a", swap_of.dir[2], 2, 0, &answer), BR_E_LIMIT);
    ck_assert_int_eq(answer, BR_SWAP_BUSY);
    swap_commit(e, 1, BR_SWAP_DRAIN, BR_SWAP_WAITS); /* asked once more */
    swap_finish(e, r);
    swap_expect_cold(r, 0, 0, "drained");
    CHECK_OK(br_swap_status_of(e, "a", &status));
    ck_assert(status.state == BR_SWAP_IDLE && status.live_version == 1);
    swap_commit(e, 1, BR_SWAP_DRAIN, BR_SWAP_COMMITTED);
    swap_start(e, r);
    swap_poll(e, &r, 1);
    swap_prepare(e, 2, 2);
    swap_commit(e, 2, BR_SWAP_DRAIN, BR_SWAP_WAITS);
    for (int i = 0; i < SWAP_N; i++) { /* the last one that ends may be aborted */
        CHECK_OK(br_swap_status_of(e, "a", &status));
        ck_assert_int_eq(status.live_version, 1);
        CHECK_OK(br_abort(e, r->id[i]));
    }
    CHECK_OK(br_swap_status_of(e, "a", &status));
    ck_assert_int_eq(status.live_version, 2);
    swap_finish(e, r);
    swap_start(e, r);
    swap_poll(e, &r, 1);
    swap_prepare(e, 3, 3);
    swap_commit(e, 3, BR_SWAP_DRAIN, BR_SWAP_WAITS);
    CHECK_OK(br_swap_abort(e, "a")); /* no longer wanted */
    CHECK_OK(br_submit(e, &one, &id));
    swap_finish(e, r);
    swap_expect_cold(r, 2, 2, "a drain called off");
    br_engine_close(e);
    free(r);
}
END_TEST

START_TEST(stop_ends_what_runs_and_what_waits) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    swap_run *r = rig_alloc(1, sizeof *r);
    swap_start(e, r); /* six, of which four swap_run */
    swap_poll(e, &r, 1);
    swap_poll(e, &r, 1);
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_poll(e, &r, 1);
    ck_assert_int_eq(r->n_ended, SWAP_N);
    for (int i = 0; i < SWAP_N; i++)
        ck_assert_int_eq(r->text[i].stop, BR_STOP_ABORT);
    swap_expect_cold(r, 0, 0, "stopped");
    swap_start(e, r);
    swap_finish(e, r);
    swap_expect_cold(r, 1, 1, "after a stop");
    br_engine_close(e);
    free(r);
}
END_TEST

START_TEST(finish_old_keeps_the_next_version_out) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    br_swap_answer answer;
    swap_run *r[2] = {rig_alloc(1, sizeof(swap_run)), rig_alloc(1, sizeof(swap_run))};
    swap_start(e, r[0]);
    swap_poll(e, r, 1);
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_FINISH_OLD, BR_SWAP_COMMITTED);
    CHECK_FAILS(br_swap_begin(e, "a", 2, 0, &answer), BR_E_LIMIT);
    ck_assert_int_eq(answer, BR_SWAP_BUSY);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "6 sequences run on the version before"));
    CHECK_OK(br_swap_begin(e, "a", 1, 0, &answer));
    ck_assert_int_eq(answer, BR_SWAP_COMMITTED);
    CHECK_FAILS(br_swap_from_folder(e, "a", swap_of.dir[2], 2, 0, &answer), BR_E_LIMIT);
    ck_assert_int_eq(answer, BR_SWAP_BUSY);
    while (r[0]->n_ended < SWAP_N)
        swap_poll(e, r, 1);
    swap_prepare(e, 2, 2);
    swap_expect_cold(r[0], 0, 0, "the old version");
    swap_start(e, r[1]);
    swap_finish(e, r[1]);
    swap_expect_cold(r[1], 1, 1, "the live version beside a prepared one");
    br_engine_close(e);
    free(r[0]);
    free(r[1]);
}
END_TEST

/* The switched ones say so, and what they leave in the cache is nobody's: not of the new version, not of the old one come back. */
START_TEST(in_flight_switches_and_is_not_certified) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    swap_run *r = rig_alloc(1, sizeof *r);
    int n_mixed = 0, n_differ = 0;
    swap_start(e, r);
    for (int i = 0; i < 4; i++)
        swap_poll(e, &r, 1);
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_IN_FLIGHT, BR_SWAP_COMMITTED);
    swap_finish(e, r);
    for (int i = 0; i < SWAP_N; i++) {
        const br_versions *v = &r->versions[i];
        int32_t n_tok = 0;
        for (int32_t k = 0; k < v->n_run; k++)
            n_tok += v->run[k].n_tok;
        ck_assert_int_eq(n_tok, r->text[i].n_tok - swap_of.request[i].n_prompt);
        n_mixed += v->n_run == 2 && v->run[0].version == 0 && v->run[1].version == 1 && !v->certified;
        for (int32_t p = swap_of.request[i].n_prompt; p < r->text[i].n_tok; p++)
            n_differ += r->text[i].logprob[0][p] != swap_of.cold[0][i].logprob[0][p];
    }
    ck_assert_int_ge(n_mixed, 2);
    ck_assert_int_gt(n_differ, 0);
    swap_start(e, r);
    swap_finish(e, r);
    swap_expect_cold(r, 1, 1, "new requests after a switch");
    swap_prepare(e, 0, 2);
    swap_commit(e, 2, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_start(e, r);
    swap_finish(e, r);
    swap_expect_cold(r, 0, 2, "the first version come back");
    br_engine_close(e);
    free(r);
}
END_TEST

/* Switched while its prompt comes in, a sequence puts blocks that are half of one version into the cache, under the root it began with. */
START_TEST(a_switch_within_a_prompt_leaves_nothing_to_reuse) {
    swap_run *r = rig_alloc(1, sizeof *r);
    for (int n_step = 1; n_step < 12; n_step += 3) {
        br_engine *e = swap_engine_of_steps(swap_of.dir[0], 16);
        swap_start(e, r);
        for (int i = 0; i < n_step; i++)
            swap_poll(e, &r, 1);
        swap_prepare(e, 1, 1);
        swap_commit(e, 1, BR_SWAP_IN_FLIGHT, BR_SWAP_COMMITTED);
        swap_finish(e, r);
        swap_start(e, r);
        swap_finish(e, r);
        swap_expect_cold(r, 1, 1, "the new version");
        swap_prepare(e, 0, 2);
        swap_commit(e, 2, BR_SWAP_STOP, BR_SWAP_COMMITTED);
        swap_start(e, r);
        swap_finish(e, r);
        swap_expect_cold(r, 0, 2, "the first version come back");
        br_engine_close(e);
    }
    free(r);
}
END_TEST

START_TEST(too_many_switches_are_refused) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    br_swap_answer answer;
    br_token token[4];
    int32_t n, done;
    uint64_t id;
    br_request one = rig_br_request(&swap_of.request[0]);
    one.sampling.max_new = 40;
    one.sampling.ignore_eos = 1;
    CHECK_OK(br_submit(e, &one, &id));
    for (int64_t k = 1; k <= BR_VERSION_RUN_MAX; k++) {
        for (n = 0; n == 0;)
            CHECK_OK(br_poll(e, token, 4, &n, &done));
        swap_prepare(e, (int)(k % 2), k);
        if (k == BR_VERSION_RUN_MAX)
            CHECK_FAILS(br_swap_commit(e, "a", k, BR_SWAP_IN_FLIGHT, &answer), BR_E_LIMIT);
        else
            swap_commit(e, k, BR_SWAP_IN_FLIGHT, BR_SWAP_COMMITTED);
    }
    swap_commit(e, BR_VERSION_RUN_MAX, BR_SWAP_STOP, BR_SWAP_COMMITTED); /* it stayed prepared */
    br_engine_close(e);
}
END_TEST

Suite *test_weightsync_engine_suite(void) {
    Suite *suite = suite_create("weightsync_engine");
    TCase *tcase = tcase_create("swaps");
    tcase_set_timeout(tcase, 1800);
    tcase_add_unchecked_fixture(tcase, swap_models_make, NULL);
    tcase_add_test(tcase, swaps_under_load_give_cold_starts);
    tcase_add_test(tcase, drain_waits_and_holds_new_requests_off);
    tcase_add_test(tcase, stop_ends_what_runs_and_what_waits);
    tcase_add_test(tcase, finish_old_keeps_the_next_version_out);
    tcase_add_test(tcase, in_flight_switches_and_is_not_certified);
    tcase_add_test(tcase, a_switch_within_a_prompt_leaves_nothing_to_reuse);
    tcase_add_test(tcase, too_many_switches_are_refused);
    suite_add_tcase(suite, tcase);
    return suite;
}
