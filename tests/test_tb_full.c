/* Full weights through the worker's state machine, beside those of an adapter; what STATS says of both, what a manifest has to be. */
#include "tb_drive.h"

#include <string.h>

/* Version 1 of the base until it is prepared. */
static void prepare_full(void) {
    moved = TB_W_FULL;
    give_manifest();
    give_begin(1, 0);
    give_whole(1);
    give_end(1);
    ck_assert_uint_eq(state().weights, TB_PREPARED);
    forget();
}

START_TEST(test_full_weights_have_their_own_versions) {
    unsigned char bytes[2][FAKE_BYTES];
    reach(TB_IDLE);
    const br_digest loaded = state().base;
    ck_assert(br_digest_equal(loaded, rig_hello(TB_WORKER).base) && state().base_version == 0);
    prepare_full();
    give(TB_W_COMMIT, 1, 0, NULL);
    fake_version(1, bytes);
    const answer *committed_1 = first_of(TB_W_COMMITTED);
    ck_assert_ptr_nonnull(committed_1);
    ck_assert_uint_eq(committed_1->header.version, 1);
    ck_assert(br_digest_equal(committed_1->message.w_committed.digest, fake_digest(bytes)));
    ck_assert(br_digest_equal(state().base, fake_digest(bytes)) && state().base_version == 1 && state().live_version == LIVE);
    ck_assert(worker.full.n_commit == 1 && worker.weights.n_commit == 0);
    give_request(1, "one", 2, 0, 1);
    give_request(2, "two", 2, 0, 1);
    settle();
    ck_assert_uint_eq(first_of(TB_GEN_DONE)->message.gen_done.version_begin, LIVE); /* under the adapter */
    forget();
    const uint32_t prompt[1] = {1};
    give(TB_GEN_REQ, 0, 3, &(tb_message){.gen_req = {.max_new = 2, .uid = tb_text_of("three"), .prompt = {prompt, 1}}});
    settle();
    ck_assert_uint_eq(first_of(TB_GEN_DONE)->message.gen_done.version_begin, 1); /* on the base */
    forget();
    give_begin(1, 0); /* again: it is live */
    ck_assert_int_eq(heard[0].header.type, TB_W_COMMITTED);
    forget();
    give_begin(LIVE + 1, 0); /* not the adapter's count */
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_VERSION);
    moved = TB_W_ADAPTER; /* whose manifest is still in force */
    const uint64_t full_hash = manifest_hash;
    give_manifest();
    ck_assert(manifest_hash != full_hash);
    forget();
    give_begin(NEXT, 0);
    ck_assert_int_eq(n_heard, 0);
    ck_assert_uint_eq(state().weights, TB_RECEIVING);
    tb_session_broken(worker.session, now, TB_LOST, "gone");
    ck_assert_int_eq(worker.weights.n_abort, 1);
    ck_assert_int_eq(worker.full.n_abort, 0);
    tb_session_connect(worker.session, now); /* who comes next is told of the base that is live */
    sequence = 0;
    say(TB_HELLO, 0, 0, &(tb_message){.hello = rig_hello(TB_TRAINER)});
    ck_assert_uint_eq(heard[0].message.error.code, TB_DIFFERS);
    close_session();
}
END_TEST

/* Whatever the mode: until the engine says that nothing runs. */
START_TEST(test_full_weights_wait_for_the_engine) {
    for (int mode = 0; mode < TB_PAUSE_MODE_COUNT; mode++) {
        reach(TB_IDLE);
        give(TB_PAUSE, 0, 0, &(tb_message){.pause = {.mode = (uint32_t)mode}});
        give(TB_RESUME, 0, 0, NULL);
        give_request(1, "one", 12, 0, 1);
        prepare_full();
        worker.full.busy = 3;
        give(TB_W_COMMIT, 1, 0, NULL);
        give_request(2, "two", 3, 0, 1);
        ck_assert_ptr_null(first_of(TB_W_COMMITTED));
        settle();
        ck_assert_ptr_nonnull(first_of(TB_W_COMMITTED));
        for (int i = 0; i < n_heard; i++)
            if (heard[i].header.type == TB_GEN_DONE)
                ck_assert(heard[i].message.gen_done.certified && heard[i].message.gen_done.version_end == LIVE);
        close_session();
    }
}
END_TEST

START_TEST(test_full_weights_that_are_not_built_in) {
    open_session(LIVE);
    tb_session_options o = rig_session_options(&worker);
    o.full = NULL;
    tb_session_close(worker.session);
    CHECK_OK(tb_session_open(&o, &worker.session));
    sequence = 0;
    tb_session_connect(worker.session, now);
    greet();
    moved = TB_W_FULL;
    forget();
    give_manifest();
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_NOT_BUILT);
    forget();
    give_begin(0, 0);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_NOT_BUILT);
    ck_assert_uint_eq(state().weights, TB_IDLE);
    close_session();
}
END_TEST

/* The digest in the answer to STATS_REQ is of the memory as it is now; one bit of it shows. */
START_TEST(test_stats_look_at_the_live_memory) {
    reach(TB_PREPARED);
    give(TB_W_COMMIT, NEXT, 0, NULL);
    const br_digest committed = first_of(TB_W_COMMITTED)->message.w_committed.digest;
    for (int flipped = 0; flipped < 2; flipped++) {
        worker.weights.live[1][7] ^= (unsigned char)flipped;
        say(TB_STATS_REQ, 0, 0, NULL);
        ck_assert(br_digest_equal(heard[0].message.stats.adapter, committed) == !flipped);
        say(TB_WAKE, 0, 0, NULL); /* tells what was committed */
        ck_assert(br_digest_equal(heard[0].message.stats.adapter, committed));
    }
    worker.weights.late = BR_E_NOMEM;
    say(TB_STATS_REQ, 0, 0, NULL);
    ck_assert_int_eq(heard[0].header.type, TB_ERROR);
    ck_assert_uint_eq(heard[0].message.error.fatal, 0);
    ck_assert_int_eq(channel()->phase, TB_OPEN);
    close_session();
}
END_TEST

START_TEST(test_a_manifest_is_told) {
    tb_buffer raw = {0};
    tb_message m;
    fake_manifest(TB_W_ADAPTER, &raw, &m);
    reach(TB_IDLE);
    say(TB_MANIFEST_REQ, 0, 0, &(tb_message){.manifest_req = {tb_text_of("any")}});
    ck_assert_int_eq(heard[0].header.type, TB_MANIFEST);
    const tb_tensors told = heard[0].message.manifest.tensors;
    ck_assert_uint_eq(told.n, m.manifest.tensors.n);
    ck_assert_uint_eq(told.raw.n, raw.n);
    ck_assert_mem_eq(told.raw.p, raw.bytes, raw.n);
    forget();
    say(TB_MANIFEST_REQ, 0, 0, &(tb_message){.manifest_req = {tb_text_of("stranger")}});
    ck_assert_int_eq(heard[0].header.type, TB_W_NACK);
    ck_assert_uint_eq(heard[0].message.w_nack.code, TB_BAD_TENSOR);
    tb_buffer_close(&raw);
    close_session();
}
END_TEST

Suite *test_tb_full_suite(void) {
    Suite *s = suite_create("tb_full");
    TCase *t = tcase_create("full");
    tcase_add_test(t, test_full_weights_have_their_own_versions);
    tcase_add_test(t, test_full_weights_wait_for_the_engine);
    tcase_add_test(t, test_full_weights_that_are_not_built_in);
    tcase_add_test(t, test_stats_look_at_the_live_memory);
    tcase_add_test(t, test_a_manifest_is_told);
    suite_add_tcase(s, t);
    return s;
}
