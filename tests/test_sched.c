/* The scheduler as a whole: random schedules on the hash device of sim_sched.h, right ones and ones with a fault planted,
 * and the invariants S-1 .. S-11 broken once each. The rules one by one are in test_sched_rules.c. */
#include "sched_rig.h"
#include "sim_sched.h"

#include <inttypes.h>
#include <string.h>

/* ---- invariants ------------------------------------------------------------------------------------------------------- */

/* A plan in flight: 0 decodes in slot 0, 1 is in its prefill with a keep planned, 2 waits. */
static sched_seq *seq_of(uint64_t id) {
    for (int32_t i = 0; i < rig->opt.n_queue_max; i++)
        if (rig->seq_pool.n_ref[i] && rig->seq[i].id == id)
            return &rig->seq[i];
    return NULL;
}
static int32_t *row_of(uint64_t id) { return sched_row_of(rig, seq_of(id)); }
static sched_seg *seg_of(uint64_t id) { return rig->seg[0].id == id ? &rig->seg[0] : &rig->seg[1]; }

static void break_waiting(void) { seq_of(2)->pos = 3; }
static void break_order(void) { seq_of(0)->arrival = 9; }
static void break_both_lists(void) { kv_ring_insert(&rig->waiting, rig->running[0], rig->waiting.n); }
static void break_count(void) { rig->n_running--; }
static void break_computed(void) { seq_of(0)->pos = seq_of(0)->n_tok; }
static void break_entry(void) { row_of(0)[2] = 7; }
static void break_no_page(void) { row_of(0)[1] = -1; }
static void break_tokens(void) { seq_of(0)->token[20]++; }
static void break_root(void) { seq_of(0)->root.lo++; }
static void break_indexed(void) { seq_of(0)->n_indexed = 0; }
static void break_named_twice(void) { row_of(1)[1] = row_of(0)[1]; }
static void break_writes_shared(void) { kv_page_hold(&rig->kv, row_of(0)[1]); }
static void break_seg_pos(void) { seg_of(1)->pos++; }
static void break_seg_sample(void) { seg_of(1)->sample = 1; }
static void break_seg_rows(void) { seg_of(1)->n_tok++; }
static void break_row_count(void) { rig->plan.n_row++; }
static void break_chunk(void) { rig->opt.chunk_tokens = rig->plan.n_row - 1; }
static void break_decode_first(void) { rig->plan.n_decode = 2; }
static void break_left_out(void) {
    rig->plan.n_row -= rig->seg[0].n_tok;
    rig->plan.n_seg = 1;
    rig->plan.n_decode = 0;
    rig->seg[0] = rig->seg[1];
    rig->seg_seq[0] = rig->seg_seq[1];
    seq_of(0)->n_row = 0;
}
static void break_keep_place(void) { rig->opt.state_every = 256; }
static void break_keep_lost(void) { rig->plan.n_keep = 0; }
static void break_state_shared(void) { rig->state_index[seq_of(0)->slot] = rig->state_index[seq_of(1)->slot]; }
static void break_state_none(void) { rig->state_index[seq_of(0)->slot] = -1; }
static void break_cache_off(void) { rig->opt.prefix_cache = 0; }

static const struct { const char *id; void (*apply)(void); } breaks[] = {
    {"S-1:", break_waiting},      {"S-2:", break_order},        {"S-1:", break_both_lists},    {"S-2:", break_count},
    {"S-3:", break_computed},     {"S-3:", break_entry},        {"S-3:", break_no_page},       {"S-4:", break_tokens},
    {"S-4:", break_root},         {"S-4:", break_indexed},      {"S-5:", break_named_twice},   {"K-1:", break_writes_shared},
    {"S-7:", break_seg_pos},      {"S-7:", break_seg_sample},   {"S-7:", break_seg_rows},      {"S-8:", break_row_count},
    {"S-8:", break_chunk},        {"S-8:", break_decode_first}, {"S-9:", break_left_out},      {"S-10:", break_keep_place},
    {"S-10:", break_keep_lost},   {"K-7:", break_state_shared}, {"K-7:", break_state_none},    {"S-11:", break_cache_off},
};

START_TEST(test_check_names_what_is_broken) {
    RIG_OPEN(o_.n_seq_max = 2, o_.chunk_tokens = 80);
    rig_submit(0, 0, 66, 50);
    rig_submit(1, 1, 200, 5);
    rig_submit(2, 2, 10, 5);
    for (int32_t i = 0; i < 3; i++)
        rig_answer(rig_plan(), RIG_NOBODY);
    const sched_plan *plan = rig_plan();
    ck_assert(plan->n_seg == 2 && plan->n_keep == 1 && plan->seg[0].id == 0);
    ck_assert(seq_of(0)->n_block == 2 && seq_of(2)->slot < 0);
    breaks[_i].apply();
    CHECK_FAILS(sched_check(rig), BR_E_MISMATCH);
    ck_assert_msg(strncmp(br_last_error(), breaks[_i].id, strlen(breaks[_i].id)) == 0, "wanted %s %s", breaks[_i].id,
                  br_last_error());
    br_mem_free(rig);
}
END_TEST

/* A sequence left with a tail that is still in the index, though its next row writes there. */
START_TEST(test_check_finds_a_write_into_the_index) {
    RIG_OPEN();
    rig_submit(0, 0, 50, 5);
    rig_answer(rig_plan(), RIG_NOBODY);
    int32_t tail = row_of(0)[0];
    const sched_plan *plan = rig_plan();
    ck_assert(plan->n_page_copy == 1 && plan->page_copy[0].src == tail);
    kv_page_release(&rig->kv, row_of(0)[0]);
    kv_page_hold(&rig->kv, tail);
    row_of(0)[0] = tail;
    CHECK_FAILS(sched_check(rig), BR_E_MISMATCH);
    ck_assert_msg(strncmp(br_last_error(), "S-6:", 4) == 0, "%s", br_last_error());
    br_mem_free(rig);
}
END_TEST

/* ---- random schedules ------------------------------------------------------------------------------------------------- */

/* BITROLL_TEST_SEED replays from a seed that failed. */
START_TEST(test_random_schedules) {
    static sim_case c;
    uint64_t seed = test_seed(), n = test_is_long() ? 2000000 : 100000;
    sched_stats sum = {0}; /* n_hit_tok: schedules with a hit */
    sim_report report, again;
    for (uint64_t i = seed; i < seed + n; i++) {
        sim_case_draw(i, &c);
        int ok = sim_case_run(&c, i, SIM_FAULT_NONE, &report);
        ck_assert_msg(ok, "BITROLL_TEST_SEED=%" PRIu64 ": %s", i, report.sentence);
        if (i % 16 == 0) {
            sim_case_run(&c, i, SIM_FAULT_NONE, &again);
            ck_assert_msg(again.plan_hash == report.plan_hash, "BITROLL_TEST_SEED=%" PRIu64 ": two runs, two plans", i);
        }
        sum.n_hit_tok += report.stats.n_hit_tok > 0;
        sum.n_preempt += report.stats.n_preempt;
        sum.n_preempt_forced += report.stats.n_preempt_forced;
        sum.n_page_evicted += report.stats.n_page_evicted;
        sum.n_state_evicted += report.stats.n_state_evicted;
    }
    /* The draw must keep meeting what it is for. */
    int64_t few = (int64_t)n / 100;
    ck_assert_int_gt(sum.n_hit_tok, (int64_t)n / 4);
    ck_assert_int_gt(sum.n_preempt, few);
    ck_assert_int_gt(sum.n_preempt_forced, few);
    ck_assert_int_gt(sum.n_page_evicted, few);
    ck_assert_int_gt(sum.n_state_evicted, few);
}
END_TEST

/* Each kind of wrong doing is noticed, and not once in a thousand: of the schedules that it touches at least a fifth. */
START_TEST(test_planted_faults_are_noticed) {
    static sim_case c;
    int32_t n_planted = 0, n_noticed = 0;
    sim_report report;
    for (uint64_t i = 1; i <= 500; i++) {
        sim_case_draw(i, &c);
        int ok = sim_case_run(&c, i, (sim_fault)_i, &report);
        n_planted += report.n_planted > 0;
        n_noticed += report.n_planted > 0 && !ok;
    }
    ck_assert_msg(n_planted >= 5 && n_noticed * 5 >= n_planted, "fault %d: planted in %d, noticed in %d", _i, n_planted,
                  n_noticed);
}
END_TEST

Suite *test_sched_suite(void);
Suite *test_sched_suite(void) {
    Suite *suite = suite_create("sched");
    TCase *invariants = tcase_create("invariants"), *simulation = tcase_create("simulation");
    tcase_set_timeout(invariants, 20);
    tcase_add_loop_test(invariants, test_check_names_what_is_broken, 0, (int)(sizeof breaks / sizeof *breaks));
    tcase_add_test(invariants, test_check_finds_a_write_into_the_index);
    tcase_set_timeout(simulation, test_is_long() ? 3600 : 240);
    tcase_add_test(simulation, test_random_schedules);
    tcase_add_loop_test(simulation, test_planted_faults_are_noticed, SIM_FAULT_NONE + 1, SIM_FAULT_COUNT);
    suite_add_tcase(suite, invariants);
    suite_add_tcase(suite, simulation);
    return suite;
}
