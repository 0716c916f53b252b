/* What each rule of the scheduler's policy plans in a small case: refusals, segments, sharing, room, preemption. */
#include "sched_rig.h"

#include <string.h>
#include <time.h>

/* ---- opening and refusing --------------------------------------------------------------------------------------------- */

START_TEST(test_open_refuses_bad_options) {
    static const struct { size_t at; int32_t value; const char *name; } bad[] = {
        {offsetof(sched_options, n_seq_max), 0, "n_seq_max"},
        {offsetof(sched_options, chunk_tokens), 0, "chunk_tokens"},
        {offsetof(sched_options, n_page), 0, "n_page"},
        {offsetof(sched_options, n_state), -1, "n_state"},
        {offsetof(sched_options, n_queue_max), 0, "n_queue_max"},
        {offsetof(sched_options, n_tok_max), 1 << 21, "n_tok_max"},
        {offsetof(sched_options, state_every), 0, "state_every"},
        {offsetof(sched_options, state_every), 96, "state_every"},
        {offsetof(sched_options, state_every), -64, "state_every"},
        {offsetof(sched_options, preempt_every), -1, "preempt_every"},
        {offsetof(sched_options, prefix_cache), 2, "prefix_cache"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sched_options o = RIG_BASE;
        memcpy((char *)&o + bad[i].at, &bad[i].value, sizeof(int32_t));
        CHECK_FAILS(sched_open(&o, &rig), BR_E_ARG);
        ck_assert_ptr_null(rig);
        ck_assert_msg(strstr(br_last_error(), bad[i].name) != NULL, "%s", br_last_error());
    }
}
END_TEST

/* One allocation makes everything; when it fails that is a status, and afterwards none is made. */
START_TEST(test_open_allocates_once) {
    long before = br_mem_alloc_count();
    br_mem_fail_nth(1);
    CHECK_FAILS(sched_open(&RIG_BASE, &rig), BR_E_NOMEM);
    ck_assert_ptr_null(rig);
    br_mem_fail_nth(0);
    before = br_mem_alloc_count();
    RIG_OPEN(o_.n_page = 4);
    ck_assert_int_eq(br_mem_alloc_count(), before + 1);
    br_mem_seal("a scheduler's run");
    for (uint64_t id = 0; id < 16; id++)
        rig_submit(id, (int32_t)id / 3, 40 + (int32_t)id, 60);
    rig_drive();
    br_mem_unseal(NULL);
    sched_close(rig);
    sched_close(NULL);
}
END_TEST

START_TEST(test_submit_refuses) {
    RIG_OPEN(o_.n_page = 3, o_.n_tok_max = 300, o_.n_queue_max = 2);
    CHECK_FAILS(rig_try_submit(0, 0, 0, 1), BR_E_ARG);
    CHECK_FAILS(rig_try_submit(0, 0, 1, 0), BR_E_ARG);
    CHECK_FAILS(rig_try_submit(0, 0, 200, 101), BR_E_CAPACITY); /* n_tok_max */
    CHECK_FAILS(rig_try_submit(0, 0, 100, 94), BR_E_CAPACITY);  /* position 192 of a fourth page */
    CHECK_FAILS(rig_try_submit(0, 0, INT32_MAX, 5), BR_E_CAPACITY);
    CHECK_OK(rig_try_submit(0, 0, 100, 93));
    CHECK_FAILS(rig_try_submit(0, 1, 10, 1), BR_E_ARG); /* the id is held */
    CHECK_OK(rig_try_submit(1, 1, 10, 1));
    CHECK_FAILS(rig_try_submit(2, 1, 10, 1), BR_E_LIMIT);
    int32_t token[2] = {1, -1};
    CHECK_OK(sched_abort(rig, 1));
    CHECK_FAILS(sched_submit(rig, &(sched_request){.id = 3, .token = token, .n_prompt = 2, .max_new = 1}), BR_E_ARG);
    CHECK_FAILS(sched_abort(rig, 1), BR_E_NOT_FOUND);
    ck_assert_int_eq(sched_n_left(rig), 1);
    sched_close(rig);
}
END_TEST

START_TEST(test_result_refuses_before_it_changes_anything) {
    RIG_OPEN();
    rig_submit(0, 0, 1, 2);
    rig_submit(1, 1, 10, 1);
    const sched_plan *plan = rig_plan();
    ck_assert_int_eq(plan->n_seg, 2);
    sched_outcome good[2] = {{SCHED_GO_ON, 5}, {SCHED_GO_ON, 0}}, bad[2];
    CHECK_FAILS(sched_result(rig, good, 1), BR_E_ARG);
    memcpy(bad, good, sizeof bad);
    bad[1].verdict = (sched_verdict)9;
    CHECK_FAILS(sched_result(rig, bad, 2), BR_E_ARG);
    bad[1] = good[1];
    bad[0].token = -1;
    CHECK_FAILS(sched_result(rig, bad, 2), BR_E_ARG);
    CHECK_OK(sched_check(rig));
    CHECK_OK(sched_result(rig, good, 2));
    CHECK_FAILS(sched_result(rig, good, 2), BR_E_ARG); /* nothing is in flight */
    rig_plan();
    CHECK_FAILS(sched_result(rig, good, 2), BR_E_ARG); /* the second token of two must end it */
    good[0].verdict = good[1].verdict = SCHED_END;
    CHECK_OK(sched_result(rig, good, 2));
    ck_assert_int_eq(sched_n_left(rig), 0);
    ck_assert_int_eq(rig_plan()->n_seg, 0);
    CHECK_OK(sched_result(rig, NULL, 0));
    sched_close(rig);
}
END_TEST

/* ---- what is planned -------------------------------------------------------------------------------------------------- */

/* Prefill is cut at prompt_len - 1 and at multiples of state_every, where states are kept; then one row a token. */
START_TEST(test_segments_end_where_states_are_kept) {
    static const int32_t want[][3] = {{0, 100, 0}, {100, 28, 1}, {128, 71, 1}, {199, 1, 0}, {200, 1, 0}};
    RIG_OPEN(o_.chunk_tokens = 100, o_.state_every = 128);
    rig_submit(0, 0, 200, 2);
    for (int32_t i = 0; i < 5; i++) {
        const sched_plan *plan = rig_plan();
        ck_assert_int_eq(plan->n_seg, 1);
        rig_check_seg(plan, 0, 0, want[i][0], want[i][1]);
        ck_assert_int_eq(plan->n_keep, want[i][2]);
        ck_assert_int_eq(plan->seg[0].sample, i >= 3);
        ck_assert_int_eq(plan->n_page_copy, i == 3); /* the tail kept at 199 is shared now */
        ck_assert_int_eq(plan->seg[0].token[0], i < 4 ? rig_tokens(0)[want[i][0]] : 0);
        rig_answer(plan, RIG_NOBODY);
        if (i == 3) /* the page that is being filled is not in the index */
            ck_assert_int_eq(rig_indexed_count(), 4);
    }
    ck_assert_int_eq(sched_n_left(rig), 0);
    sched_close(rig);
}
END_TEST

/* With no other state to be had a start takes the kept one itself, and the tail page with it: nothing is copied. */
START_TEST(test_last_state_is_handed_over) {
    RIG_OPEN(o_.n_state = 2);
    rig_submit(0, 0, 50, 1);
    rig_drive();
    rig_submit(1, 1, 1, 9);
    rig_submit(2, 0, 50, 3);
    const sched_plan *plan = rig_plan();
    rig_check_seg(plan, 1, 2, 49, 1);
    ck_assert(plan->n_state_copy == 0 && plan->n_page_copy == 0 && rig_indexed_count() == 0);
    rig_answer(plan, RIG_NOBODY);
    rig_drive();
    sched_close(rig);
}
END_TEST

/* n samples of one prompt: its first prompt_len - 1 tokens are computed once, whenever the samples arrive. */
START_TEST(test_samples_share_one_prefill) {
    static const int32_t length[] = {1, 2, 64, 65, 66, 129, 200, 257};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        RIG_OPEN(o_.n_seq_max = 3);
        for (uint64_t id = 0; id < 8; id++)
            rig_submit(id, 0, length[i], 5);
        ck_assert_int_eq(rig_drive(), length[i] - 1 + 8 * 5);
        rig_submit(8, 0, length[i], 5);
        ck_assert_int_eq(rig_drive(), 5);
        ck_assert_int_eq(sched_stats_of(rig).n_hit_tok, 8 * (length[i] - 1));
        sched_close(rig);
    }
}
END_TEST

/* Each sample starts in its own copy of the tail page and of the state, all from the same source. */
START_TEST(test_samples_copy_tail_and_state) {
    RIG_OPEN(o_.n_seq_max = 4);
    for (uint64_t id = 0; id < 4; id++)
        rig_submit(id, 0, 50, 5);
    const sched_plan *plan = rig_plan();
    ck_assert(plan->n_seg == 1 && plan->n_keep == 1);
    int32_t tail = plan->table[plan->seg[0].slot * plan->table_ld], state = plan->keep[0].dst;
    rig_answer(plan, RIG_NOBODY);
    plan = rig_plan();
    ck_assert(plan->n_seg == 4 && plan->n_decode == 4 && plan->n_page_copy == 4 && plan->n_state_copy == 3);
    for (int32_t i = 0; i < 4; i++) {
        ck_assert_int_eq(plan->page_copy[i].src, tail);
        ck_assert_int_eq(plan->page_copy[i].dst, plan->table[plan->seg[i].slot * plan->table_ld]);
        ck_assert(i == 3 || plan->state_copy[i].src == state);
        rig_check_seg(plan, i, (uint64_t)i, 49, 1);
    }
    rig_answer(plan, RIG_NOBODY);
    rig_drive();
    sched_close(rig);
}
END_TEST

/* Whoever waits for an equal prompt takes over when the first one is aborted (in flight or between) or fails. */
START_TEST(test_waiting_sample_takes_over) {
    for (int32_t how = 0; how < 3; how++) {
        RIG_OPEN(o_.chunk_tokens = 30, o_.state_every = -1);
        for (uint64_t id = 0; id < 3; id++)
            rig_submit(id, 0, 100, 2);
        const sched_plan *plan = rig_plan();
        ck_assert_int_eq(plan->n_seg, 1);
        if (how == 0)
            CHECK_OK(sched_abort(rig, 0));
        rig_answer(plan, how == 1 ? 0 : RIG_NOBODY);
        if (how == 2)
            CHECK_OK(sched_abort(rig, 0));
        ck_assert_int_eq(sched_n_left(rig), 2);
        ck_assert_int_eq(sched_stats_of(rig).n_page_free, 32);
        rig_check_seg(rig_plan(), 0, 1, 0, 30);
        rig_answer(&rig->plan, RIG_NOBODY);
        ck_assert_int_eq(rig_drive(), 99 - 30 + 4);
        sched_close(rig);
    }
}
END_TEST

/* Other prompts pass those that wait, and only those. */
START_TEST(test_other_prompts_pass_a_waiting_sample) {
    RIG_OPEN(o_.chunk_tokens = 120);
    rig_submit(0, 0, 90, 2);
    rig_submit(1, 0, 90, 2);
    rig_submit(2, 1, 90, 2);
    const sched_plan *plan = rig_plan();
    ck_assert_int_eq(plan->n_seg, 2);
    rig_check_seg(plan, 0, 0, 0, 64);
    rig_check_seg(plan, 1, 2, 0, 56);
    rig_answer(plan, RIG_NOBODY);
    rig_drive();
    sched_close(rig);
}
END_TEST

START_TEST(test_nothing_is_shared_across_roots) {
    RIG_OPEN();
    rig_submit(0, 0, 200, 2);
    rig_drive();
    rig_total[1] = 202;
    sched_request other = {.id = 1, .token = rig_tokens(0), .n_prompt = 200, .max_new = 2, .root = {5, 7}};
    CHECK_OK(sched_submit(rig, &other));
    ck_assert_int_eq(rig_drive(), 201);
    rig_submit(2, 0, 200, 2);
    ck_assert_int_eq(rig_drive(), 2);
    sched_close(rig);
}
END_TEST

START_TEST(test_nothing_is_shared_without_prefix_cache) {
    RIG_OPEN(o_.prefix_cache = 0, o_.chunk_tokens = 300);
    rig_submit(0, 0, 200, 2);
    rig_submit(1, 0, 200, 2);
    const sched_plan *plan = rig_plan();
    rig_check_seg(plan, 0, 0, 0, 200); /* no cut either */
    rig_check_seg(plan, 1, 1, 0, 100);
    ck_assert_int_eq(plan->n_keep, 0);
    rig_answer(plan, RIG_NOBODY);
    ck_assert_int_eq(rig_drive(), 2 * 201 - 300);
    ck_assert_int_eq(sched_stats_of(rig).n_page_free, 32);
    sched_close(rig);
}
END_TEST

/* A next turn: prompt, response and more tokens start from the last kept state, generated tokens included. */
START_TEST(test_response_is_hit_by_the_next_turn) {
    RIG_OPEN();
    rig_submit(0, 0, 100, 100); /* computes positions 0..198 */
    rig_drive();
    int32_t turn[300];
    memcpy(turn, rig_tokens(0), sizeof turn);
    memset(turn + 100, 0, sizeof *turn * 100); /* rig_answer() says the request's id, 0 */
    rig_total[1] = 251;
    CHECK_OK(sched_submit(rig, &(sched_request){.id = 1, .token = turn, .n_prompt = 250, .max_new = 1, .root = {5, 6}}));
    rig_drive();
    ck_assert_int_eq(sched_stats_of(rig).n_hit_tok, 192);
    sched_close(rig);
}
END_TEST

/* What a failed step computed is gone, what earlier steps computed stays. */
START_TEST(test_failure_keeps_only_earlier_steps) {
    RIG_OPEN();
    rig_submit(0, 0, 200, 5);
    rig_answer(rig_plan(), RIG_NOBODY);
    rig_answer(rig_plan(), RIG_NOBODY);
    rig_answer(rig_plan(), 0); /* positions 128.. */
    ck_assert_int_eq(sched_n_left(rig), 0);
    ck_assert_int_eq(sched_stats_of(rig).n_page_free, 30);
    rig_submit(1, 0, 200, 5);
    rig_check_seg(rig_plan(), 0, 1, 128, 64);
    rig_answer(&rig->plan, RIG_NOBODY);
    rig_drive();
    sched_close(rig);
}
END_TEST

/* Decode rows come first, but the oldest sequence has a row even in its prefill; the rest of the chunk is prefill. */
START_TEST(test_rows_of_a_full_chunk) {
    RIG_OPEN(o_.chunk_tokens = 4, o_.n_seq_max = 6, o_.prefix_cache = 0);
    for (uint64_t id = 0; id < 5; id++)
        rig_submit(id, (int32_t)id, id ? 1 : 40, 30);
    rig_submit(5, 5, 40, 30);
    const sched_plan *plan = rig_plan();
    rig_check_seg(plan, 0, 0, 0, 4); /* alone: it takes the chunk */
    rig_answer(plan, RIG_NOBODY);
    sched_close(rig);
    RIG_OPEN(o_.chunk_tokens = 4, o_.n_seq_max = 6, o_.prefix_cache = 0);
    rig_submit(0, 0, 2, 30);
    for (uint64_t id = 1; id < 5; id++)
        rig_submit(id, (int32_t)id, 1, 30);
    plan = rig_plan();
    rig_check_seg(plan, 0, 1, 0, 1);
    rig_check_seg(plan, 1, 2, 0, 1);
    rig_check_seg(plan, 2, 0, 0, 2);
    rig_answer(plan, RIG_NOBODY);
    sched_abort(rig, 0);
    rig_submit(5, 5, 40, 30);
    rig_answer(rig_plan(), RIG_NOBODY); /* 1, 2, 3, 4 */
    plan = rig_plan();
    ck_assert(plan->n_seg == 4 && plan->n_decode == 4);
    rig_answer(plan, RIG_NOBODY);
    for (uint64_t id = 1; id < 5; id++)
        sched_abort(rig, id);
    plan = rig_plan();
    rig_check_seg(plan, 0, 5, 0, 4);
    rig_answer(plan, RIG_NOBODY);
    rig_submit(6, 6, 1, 30);
    plan = rig_plan();
    ck_assert_int_eq(plan->n_seg, 1); /* the prefill fills the chunk, nothing starts */
    rig_answer(plan, RIG_NOBODY);
    sched_close(rig);
}
END_TEST

/* The oldest is in its prefill behind three decoders in a chunk of three: it gets one row of each step. */
START_TEST(test_oldest_prefill_is_not_starved) {
    RIG_OPEN(o_.chunk_tokens = 5, o_.prefix_cache = 0);
    rig_submit(0, 0, 8, 4);
    for (uint64_t id = 1; id < 4; id++)
        rig_submit(id, (int32_t)id, 1, 60);
    rig_answer(rig_plan(), RIG_NOBODY);
    rig_answer(rig_plan(), RIG_NOBODY); /* 0 has its 8, and two of the others start */
    rig_answer(rig_plan(), RIG_NOBODY);
    ck_assert_int_eq(rig->n_running, 4);
    rig->opt.chunk_tokens = 3;
    rig->seq[rig->running[0]].pos -= 3; /* as if it had resumed with more to compute than fits */
    const sched_plan *plan = sched_plan_step(rig);
    ck_assert(plan->n_seg == 3 && plan->n_decode == 2 && plan->seg[2].id == 0 && plan->seg[2].n_tok == 1);
    sched_close(rig);
}
END_TEST

/* ---- room ------------------------------------------------------------------------------------------------------------- */

/* As many pages as one sequence needs, one state: everything runs, one after the other. */
START_TEST(test_smallest_cache) {
    static const int32_t length[] = {1, 2, 63, 64, 65, 66, 127, 128};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        for (int32_t max_new = 1; max_new <= 66; max_new += 13) {
            RIG_OPEN(o_.n_state = 1, o_.n_page = (length[i] + max_new - 2) / 64 + 1);
            for (uint64_t id = 0; id < 6; id++)
                rig_submit(id, (int32_t)id / 2, length[i], max_new);
            rig_drive();
            sched_close(rig);
        }
    }
}
END_TEST

/* A start leaves the pages that running prefills still need, and has one more than its own tokens need. */
START_TEST(test_start_leaves_room) {
    RIG_OPEN(o_.chunk_tokens = 100, o_.n_page = 6);
    rig_submit(0, 0, 200, 1);
    rig_submit(1, 1, 70, 1); /* 2 pages and 1 of 6 - 4 */
    const sched_plan *plan = rig_plan();
    rig_check_seg(plan, 0, 0, 0, 64);
    ck_assert_int_eq(plan->n_seg, 1);
    rig_answer(plan, RIG_NOBODY);
    sched_close(rig);
    RIG_OPEN(o_.n_page = 3, o_.chunk_tokens = 200);
    rig_submit(0, 0, 10, 1);
    rig_submit(1, 1, 70, 1); /* 2 pages and 1 of 3 - 1 */
    plan = rig_plan();
    ck_assert_int_eq(plan->n_seg, 1);
    rig_answer(plan, RIG_NOBODY);
    sched_close(rig);
}
END_TEST

/* Four sequences outgrow five pages: the youngest give way, the oldest never, and all get to their end. */
START_TEST(test_youngest_is_preempted_for_room) {
    RIG_OPEN(o_.n_page = 5, o_.state_every = -1);
    for (uint64_t id = 0; id < 4; id++)
        rig_submit(id, (int32_t)id, 20, 150);
    int32_t ended = -1;
    while (sched_n_left(rig)) {
        const sched_plan *plan = rig_plan();
        for (int32_t i = 0; i < plan->n_seg; i++)
            if (plan->seg[i].sample && plan->seg[i].pos + plan->seg[i].n_tok + 1 == rig_total[plan->seg[i].id]) {
                ck_assert_int_eq((int32_t)plan->seg[i].id, ended + 1); /* in order of arrival */
                ended++;
            }
        rig_answer(plan, RIG_NOBODY);
    }
    ck_assert_int_eq(ended, 3);
    ck_assert_int_ge(sched_stats_of(rig).n_preempt, 2);
    sched_close(rig);
}
END_TEST

/* A preempted sequence goes on where it was: the segments that sample cover each position once. */
START_TEST(test_forced_preemption_keeps_the_text) {
    for (int32_t every = 1; every <= 5; every++) {
        for (int32_t cache = 0; cache < 2; cache++) {
            RIG_OPEN(o_.preempt_every = every, o_.prefix_cache = cache, o_.chunk_tokens = 7);
            int32_t next[4];
            for (uint64_t id = 0; id < 4; id++) {
                rig_submit(id, (int32_t)id, 30, 50);
                next[id] = 30;
            }
            while (sched_n_left(rig)) {
                const sched_plan *plan = rig_plan();
                for (int32_t i = 0; i < plan->n_seg; i++)
                    if (plan->seg[i].sample)
                        ck_assert_int_eq(plan->seg[i].pos + plan->seg[i].n_tok, next[plan->seg[i].id]++);
                rig_answer(plan, RIG_NOBODY);
            }
            ck_assert(next[0] == 80 && next[3] == 80);
            ck_assert_int_ge(sched_stats_of(rig).n_preempt_forced, 20);
            sched_close(rig);
        }
    }
}
END_TEST

START_TEST(test_forced_preemption_comes_at_every_nth_step) {
    for (int32_t every = 1; every <= 4; every++) {
        RIG_OPEN(o_.preempt_every = every);
        rig_submit(0, 0, 1, 100);
        rig_submit(1, 1, 1, 100);
        for (int32_t i = 1; i <= 12; i++) {
            rig_answer(rig_plan(), RIG_NOBODY);
            ck_assert_int_eq(sched_stats_of(rig).n_preempt_forced, every == 1 ? i - 1 : i / every); /* step 1 has nobody */
        }
        sched_close(rig);
    }
}
END_TEST

/* 64 sequences decode: the fastest step, planned and answered, in a small part of the 50 us that it may cost. */
START_TEST(test_decode_step_is_cheap) {
    enum { N = 64, STEPS = 400 };
    RIG_OPEN(o_.n_seq_max = N, o_.n_queue_max = RIG_ID_MAX, o_.n_page = 2000, o_.n_state = 160, o_.chunk_tokens = 256,
         o_.n_tok_max = 1024);
    for (uint64_t id = 0; id < 100; id++)
        rig_submit(id, (int32_t)id / 8, 100, 800);
    double best = 1;
    for (int32_t i = 0; i < STEPS; i++) {
        sched_outcome outcome[N];
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        const sched_plan *plan = sched_plan_step(rig);
        int full = plan->n_decode == N;
        for (int32_t k = 0; k < plan->n_seg; k++)
            outcome[k] = (sched_outcome){.token = k};
        CHECK_OK(sched_result(rig, outcome, plan->n_seg));
        clock_gettime(CLOCK_MONOTONIC, &b);
        double seconds = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
        if (full && seconds < best)
            best = seconds;
    }
    ck_assert_msg(best < 20e-6, "a step of %d decoding sequences takes %.1f us", N, best * 1e6);
    sched_close(rig);
}
END_TEST

Suite *test_sched_rules_suite(void);
Suite *test_sched_rules_suite(void) {
    Suite *suite = suite_create("sched_rules");
    TCase *tcase = tcase_create("rules");
    tcase_set_timeout(tcase, 20);
    tcase_add_test(tcase, test_open_refuses_bad_options);
    tcase_add_test(tcase, test_open_allocates_once);
    tcase_add_test(tcase, test_submit_refuses);
    tcase_add_test(tcase, test_result_refuses_before_it_changes_anything);
    tcase_add_test(tcase, test_segments_end_where_states_are_kept);
    tcase_add_test(tcase, test_last_state_is_handed_over);
    tcase_add_test(tcase, test_samples_share_one_prefill);
    tcase_add_test(tcase, test_samples_copy_tail_and_state);
    tcase_add_test(tcase, test_waiting_sample_takes_over);
    tcase_add_test(tcase, test_other_prompts_pass_a_waiting_sample);
    tcase_add_test(tcase, test_nothing_is_shared_across_roots);
    tcase_add_test(tcase, test_nothing_is_shared_without_prefix_cache);
    tcase_add_test(tcase, test_response_is_hit_by_the_next_turn);
    tcase_add_test(tcase, test_failure_keeps_only_earlier_steps);
    tcase_add_test(tcase, test_rows_of_a_full_chunk);
    tcase_add_test(tcase, test_oldest_prefill_is_not_starved);
    tcase_add_test(tcase, test_smallest_cache);
    tcase_add_test(tcase, test_start_leaves_room);
    tcase_add_test(tcase, test_youngest_is_preempted_for_room);
    tcase_add_test(tcase, test_forced_preemption_keeps_the_text);
    tcase_add_test(tcase, test_forced_preemption_comes_at_every_nth_step);
    tcase_add_test(tcase, test_decode_step_is_cheap);
    suite_add_tcase(suite, tcase);
    return suite;
}
