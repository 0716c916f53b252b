/* What a swap leaves in memory: exactly what was sent, bit by bit, in the place that is live; nothing of a version that was not
 * committed; nothing at all when an allocation fails. And other base weights. */
#include "br_mem.h"
#include "engine_parts.h"
#include "model_parts.h"
#include "swap_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is in memory ----------------------------------------------------------------------------------------------------- */

static void expect_flip(br_engine *e, void *at, size_t bytes, uint64_t seed, int seen, const char *what) {
    br_digest before, after;
    unsigned char *byte = (unsigned char *)at + test_mix(seed) % bytes;
    const unsigned char bit = (unsigned char)(1u << test_mix(seed + 1) % 8);
    CHECK_OK(br_engine_adapter_digest(e, "a", &before));
    *byte ^= bit;
    CHECK_OK(br_engine_adapter_live_digest(e, "a", &after));
    *byte ^= bit;
    ck_assert_msg(br_digest_equal(before, after) != seen, "%s: a flipped bit %d of byte %zu is %s", what, bit,
                  (size_t)(byte - (unsigned char *)at), seen ? "not seen" : "seen");
}

static void flip_adapter(br_engine *e, const bi_adapter *slots, int32_t slot, int32_t n, uint64_t seed, int seen, const char *what) {
    const bi_adapter *a = &slots[slot];
    const size_t n_a = a->a.stride ? (size_t)n : 1, n_b = a->b.stride ? (size_t)n : 1;
    const bi_ops *op = br_model_ops(e->loaded.model);
    ck_assert_ptr_nonnull(a->a.data);
    expect_flip(e, (void *)(uintptr_t)a->a.data, n_a * op->mat_bytes(BI_FORM_BF16, a->a.n_out, a->a.n_in), seed, seen, what);
    expect_flip(e, (void *)(uintptr_t)a->b.data, n_b * op->mat_bytes(BI_FORM_BF16, a->b.n_out, a->b.n_in), seed + 1, seen, what);
    expect_flip(e, (void *)(uintptr_t)a->s, (size_t)n * sizeof *a->s, seed + 2, seen, what);
}

static void flip_all(br_engine *e, int32_t slot, uint64_t seed, int seen) {
    const br_model *m = e->loaded.model;
    const br_config *c = &m->config;
    for (int32_t l = 0; l < c->n_layer; l++) {
        const model_layer *w = &m->layer[l];
        if (c->layer_is_mla[l]) {
            flip_adapter(e, w->mla.lora_uk, slot, c->n_head, seed + (uint64_t)l, seen, "kv_b, keys");
            flip_adapter(e, w->mla.lora_uv, slot, c->n_head, seed + (uint64_t)l, seen, "kv_b, values");
            flip_adapter(e, w->mla.o.lora, slot, 1, seed + (uint64_t)l, seen, "o");
        } else {
            flip_adapter(e, w->kda.f_b.lora, slot, 1, seed + (uint64_t)l, seen, "f_b");
            flip_adapter(e, w->kda.b.lora, slot, 1, seed + (uint64_t)l, seen, "b");
        }
        if (l >= c->n_dense_layer)
            flip_adapter(e, w->moe.lora2, slot, c->n_expert, seed + (uint64_t)l, seen, "experts");
        else
            flip_adapter(e, w->mlp.up.lora, slot, 1, seed + (uint64_t)l, seen, "up");
    }
}

/* In stacks of rank 32, a version of rank 3 leaves most of the room zero: a bit there counts as well. */
START_TEST(any_flipped_bit_of_the_live_memory_is_seen) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    swap_expect_live(e, "as opened");
    flip_all(e, 0, 1, 1);
    flip_all(e, 1, 2, 0); /* the place that is not live */
    swap_prepare(e, 3, 1);
    swap_expect_live(e, "beside a prepared one");
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_expect_live(e, "of rank 3");
    flip_all(e, 1, 3, 1);
    flip_all(e, 0, 4, 0);
    br_engine_close(e);
}
END_TEST

/* Well-formed numbers behind the rank of the version, which no flipped bit gives. */
START_TEST(numbers_behind_the_rank_are_seen) {
    br_engine *e = swap_engine(swap_of.dir[SWAP_LOW]);
    lora_set *set[SWAP_VERSIONS];
    br_digest loaded, live;
    swap_open_sets(e, set);
    const lora_pair pair = lora_pair_of(set[SWAP_LOW], 0, BR_W_KDA_O, 0, -1);
    br_model_matrix at = {.slot = 0, .cls = BR_W_KDA_O, .layer = 0, .expert = -1, .rank = pair.rank + 1};
    uint16_t *value = rig_alloc((size_t)at.rank * (size_t)pair.n_in, sizeof *value);
    memcpy(value, pair.a, (size_t)pair.rank * (size_t)pair.n_in * sizeof *value);
    CHECK_OK(br_model_adapter_write(e->loaded.model, &at, value)); /* zeros there are no difference */
    swap_expect_live(e, "a zero row behind the rank");
    value[(int64_t)pair.rank * pair.n_in] = 0x3f80;
    CHECK_OK(br_model_adapter_write(e->loaded.model, &at, value));
    CHECK_OK(br_engine_adapter_digest(e, "a", &loaded));
    CHECK_OK(br_engine_adapter_live_digest(e, "a", &live));
    ck_assert(!br_digest_equal(loaded, live));
    swap_close_sets(set);
    br_engine_close(e);
    free(value);
}
END_TEST

START_TEST(an_engine_without_swap_has_a_live_digest_too) {
    br_engine *e;
    br_swap_answer answer;
    br_swap_status status;
    const br_adapter_source source = {"a", swap_of.dir[0]}, empty = {"a", NULL};
    br_engine_options options = rig_options(&swap_of.pico);
    options.adapter = &source;
    options.n_adapter = 1;
    CHECK_OK(br_engine_open(&options, &e));
    swap_expect_live(e, "without swap_rank");
    flip_adapter(e, e->loaded.model->layer[0].kda.o.lora, 0, 1, 9, 1, "o");
    CHECK_FAILS(br_swap_begin(e, "a", 1, 0, &answer), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "without swap_rank"));
    CHECK_FAILS(br_swap_status_of(e, "base", &status), BR_E_NOT_FOUND);
    br_engine_close(e);
    options.adapter = &empty;
    CHECK_FAILS(br_engine_open(&options, &e), BR_E_ARG);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "has no folder"));
    options.swap_rank = SWAP_RANK - 1;
    options.adapter = &source;
    CHECK_FAILS(br_engine_open(&options, &e), BR_E_LIMIT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "swap_rank 31: expected at least 32"));
    options.swap_rank = 257;
    CHECK_FAILS(br_engine_open(&options, &e), BR_E_ARG);
    options.swap_rank = SWAP_RANK;
    options.swap_alpha = 1e9;
    CHECK_FAILS(br_engine_open(&options, &e), BR_E_ARG);
}
END_TEST

/* ---- beginnings, failures -------------------------------------------------------------------------------------------------- */

START_TEST(an_empty_adapter_begins_with_version_0) {
    br_engine *e = swap_engine(NULL);
    br_swap_answer answer;
    br_digest manifest, digest;
    int64_t n;
    uint64_t id;
    swap_run *r = rig_alloc(1, sizeof *r);
    const br_request one = rig_br_request(&swap_of.request[0]);
    CHECK_FAILS(br_submit(e, &one, &id), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "is empty"));
    CHECK_OK(br_engine_adapter_live_digest(e, "a", &digest));
    ck_assert(digest.lo == 0 && digest.hi == 0);
    CHECK_OK(br_swap_manifest(e, "a", &n, &manifest));
    uint16_t **value = rig_alloc((size_t)n, sizeof *value);
    for (int64_t i = 0; i < n; i++) { /* as training begins: B zero */
        br_swap_tensor t;
        int64_t found;
        CHECK_OK(br_swap_tensor_at(e, "a", i, &t));
        CHECK_OK(br_swap_find(e, "a", t.name, &found));
        ck_assert_int_eq(found, i);
        value[i] = rig_alloc((size_t)t.n_row * (size_t)t.n_col, sizeof **value);
        for (int64_t k = 0; k < (int64_t)t.n_row * t.n_col && !t.is_b; k++)
            value[i][k] = (uint16_t)(0x3c00 + test_mix((uint64_t)(i * 99991 + k)) % 256);
    }
    const uint16_t *const *values = (const uint16_t *const *)value;
    CHECK_FAILS(br_swap_from_memory(e, "a", values, n, NULL, 0, 0, &answer), BR_E_FORMAT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "every B or its alpha is zero"));
    CHECK_FAILS(br_swap_from_memory(e, "a", values, n - 1, NULL, 0, BR_SWAP_INITIAL, &answer), BR_E_ARG);
    CHECK_OK(br_swap_from_memory(e, "a", values, n, NULL, 0, BR_SWAP_INITIAL, &answer));
    swap_commit(e, 0, BR_SWAP_DRAIN, BR_SWAP_COMMITTED);
    swap_expect_live(e, "zero B");
    swap_start(e, r);
    swap_finish(e, r);
    for (int i = 0; i < SWAP_N; i++)
        for (int32_t p = swap_of.request[i].n_prompt; p < r->text[i].n_tok; p++)
            ck_assert(r->text[i].token[p] == swap_of.base[i].token[p] && r->text[i].logprob[0][p] == swap_of.base[i].logprob[0][p]);
    swap_prepare(e, 4, 1);
    swap_commit(e, 1, BR_SWAP_DRAIN, BR_SWAP_COMMITTED);
    swap_start(e, r);
    swap_finish(e, r);
    swap_expect_cold(r, 4, 1, "version 1 of an empty adapter");
    for (int64_t i = 0; i < n; i++)
        free(value[i]);
    free(value);
    free(r);
    br_engine_close(e);
}
END_TEST

START_TEST(a_generated_adapter_is_swapped_by_its_values) {
    br_engine *e = swap_engine(swap_of.made_dir);
    br_swap_answer answer;
    br_digest opened, again;
    swap_expect_live(e, "generated");
    CHECK_OK(br_engine_adapter_digest(e, "a", &opened));
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    CHECK_OK(br_swap_from_folder(e, "a", swap_of.made_dir, 2, 0, &answer));
    swap_commit(e, 2, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    CHECK_OK(br_engine_adapter_digest(e, "a", &again));
    ck_assert(br_digest_equal(opened, again));
    swap_expect_live(e, "generated, swapped in");
    br_engine_close(e);
}
END_TEST

/* Whoever sends may be gone at any point: the live version goes on, and what lies half written shows nowhere. */
START_TEST(a_sender_that_is_gone_leaves_no_trace) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    lora_set *set[SWAP_VERSIONS];
    br_swap_answer answer;
    swap_run *r = rig_alloc(1, sizeof *r);
    swap_open_sets(e, set);
    swap_start(e, r);
    for (int64_t n = 0; n < 300; n += 77) {
        swap_sender s = {.set = set[1]};
        swap_begin_version(e, 1, 1);
        swap_send(e, &s, n);
        swap_poll(e, &r, 1);
        CHECK_OK(br_swap_abort(e, "a"));
        swap_expect_live(e, "aborted");
    }
    swap_sender s = {.set = set[1]};
    swap_begin_version(e, 1, 1);
    swap_send(e, &s, INT64_MAX);
    CHECK_FAILS(br_swap_end(e, "a", lora_digest(set[2], 0)), BR_E_MISMATCH); /* another adapter than the one that was meant */
    CHECK_FAILS(br_swap_commit(e, "a", 1, BR_SWAP_STOP, &answer), BR_E_ARG);
    swap_finish(e, r);
    swap_expect_cold(r, 0, 0, "beside a sender that is gone");
    swap_prepare(e, 3, 1);
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_expect_live(e, "rank 3 over the rest of rank 32");
    swap_start(e, r);
    swap_finish(e, r);
    swap_expect_cold(r, 3, 1, "rank 3 over the rest of rank 32");
    swap_close_sets(set);
    br_engine_close(e);
    free(r);
}
END_TEST

START_TEST(each_failing_allocation_of_a_swap_leaves_the_live_version) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    br_swap_answer answer;
    br_digest before, after;
    br_status status = BR_E_NOMEM;
    long n = 1;
    CHECK_OK(br_engine_adapter_digest(e, "a", &before));
    for (; status != BR_OK; n++) {
        br_mem_fail_nth(n);
        status = br_swap_from_folder(e, "a", swap_of.dir[1], 1, 0, &answer);
        br_mem_fail_nth(0);
        ck_assert_msg(status == BR_OK || (status == BR_E_NOMEM && answer == BR_SWAP_REFUSED), "allocation %ld: %s", n, br_last_error());
        CHECK_OK(br_engine_adapter_digest(e, "a", &after));
        ck_assert(br_digest_equal(before, after));
    }
    ck_assert_int_gt(n, 5);
    for (status = BR_E_NOMEM, n = 1; status != BR_OK; n++) {
        br_mem_fail_nth(n);
        status = br_engine_adapter_live_digest(e, "a", &after);
        br_mem_fail_nth(0);
        ck_assert(status == BR_OK || status == BR_E_NOMEM);
    }
    ck_assert(br_digest_equal(before, after));
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    br_engine_close(e);
}
END_TEST

/* Chunks, end and commit are called between steps: nothing of ours is allocated there. */
START_TEST(chunks_and_commit_allocate_nothing) {
    br_engine *e = swap_engine(swap_of.dir[0]);
    lora_set *set[SWAP_VERSIONS];
    swap_open_sets(e, set);
    swap_sender s = {.set = set[1]};
    swap_begin_version(e, 1, 1);
    const long before = br_mem_alloc_count();
    swap_send(e, &s, INT64_MAX);
    CHECK_OK(br_swap_end(e, "a", lora_digest(set[1], 0)));
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    ck_assert_int_eq(br_mem_alloc_count(), before);
    swap_close_sets(set);
    br_engine_close(e);
}
END_TEST

START_TEST(every_allocation_of_open_may_fail) {
    br_engine *engine = NULL;
    const br_adapter_source source[2] = {{"a", swap_of.dir[0]}, {"b", NULL}};
    br_engine_options options = rig_options(&swap_of.pico);
    options.adapter = source;
    options.swap_rank = SWAP_RANK;
    options.max_seqs = 2;
    br_status status = BR_E_NOMEM;
    for (long n = 1; status != BR_OK; n += 1 + n / 60) { /* the first ones are those of every open */
        br_mem_fail_nth(n);
        status = br_engine_open(&options, &engine);
        br_mem_fail_nth(0);
        ck_assert_msg(status == BR_OK || (status == BR_E_NOMEM && !engine), "allocation %ld: %s: %s", n, br_status_name(status), br_last_error());
    }
    br_engine_close(engine);
}
END_TEST

/* ---- base weights ---------------------------------------------------------------------------------------------------------- */

/* The other checkpoint under the adapter that is live, then the first one again. */
START_TEST(base_weights_change_under_the_adapters) {
    static rig_text want[2][SWAP_N];
    char other[256];
    br_report report;
    br_engine *e = swap_engine(swap_of.dir[0]);
    br_digest digest[2];
    uint64_t id;
    swap_run *r = rig_alloc(1, sizeof *r);
    snprintf(other, sizeof other, "%s/other", test_tmp_dir());
    const br_init_options init = {.preset = "pico", .out_dir = other, .seed = 77};
    CHECK_OK(br_job_init(&init, NULL, &report));
    digest[1] = report.weights_digest;
    br_report_free(&report);
    digest[0] = br_engine_weights_digest(e);
    swap_prepare(e, 1, 1);
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    const br_adapter_source source = {"a", swap_of.dir[1]};
    for (int k = 0; k < 2; k++) {
        br_engine_options options = rig_options(&swap_of.pico);
        options.model_dir = k ? other : swap_of.pico.dir;
        options.adapter = &source;
        options.n_adapter = 1;
        rig_generate(&options, swap_of.request, NULL, SWAP_N, want[k]);
    }
    ck_assert(memcmp(want[0], want[1], sizeof want[0]) != 0);
    for (int turn = 0; turn < 3; turn++) {
        const int k = turn % 2;
        if (turn)
            CHECK_OK(br_engine_reload(e, k ? other : swap_of.pico.dir, &digest[k]));
        ck_assert(br_digest_equal(br_engine_weights_digest(e), digest[k]));
        memcpy(swap_of.cold[1], want[k], sizeof want[k]);
        swap_start(e, r);
        swap_finish(e, r);
        swap_expect_cold(r, 1, 1, "after a change of the base");
        swap_expect_live(e, "after a change of the base");
    }
    int32_t n, done;
    br_token token[4];
    const br_request one = rig_br_request(&swap_of.request[0]);
    CHECK_FAILS(br_engine_reload(e, other, &digest[0]), BR_E_MISMATCH);
    CHECK_FAILS(br_engine_reload(e, "/nonexistent", NULL), BR_E_NOT_FOUND);
    CHECK_OK(br_submit(e, &one, &id));
    CHECK_FAILS(br_engine_reload(e, other, NULL), BR_E_LIMIT);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "1 requests run"));
    for (done = 0; !done;)
        CHECK_OK(br_poll(e, token, 4, &n, &done));
    br_status status = BR_E_NOMEM;
    int n_usable = 0;
    for (long nth = 1; status != BR_OK; nth++) { /* before anything was changed it goes on, afterwards it says so */
        br_mem_fail_nth(nth);
        status = br_engine_reload(e, other, NULL);
        br_mem_fail_nth(0);
        ck_assert_int_eq(status == BR_OK ? BR_E_NOMEM : status, BR_E_NOMEM);
        const br_status usable = br_poll(e, token, 4, &n, &done);
        ck_assert(usable == BR_OK || usable == BR_E_NOMEM);
        if (usable != BR_OK)
            break;
        n_usable++;
        if (status != BR_OK) {
            swap_start(e, r);
            swap_finish(e, r);
            swap_expect_cold(r, 1, 1, "after a failed change of the base");
        }
    }
    ck_assert_int_gt(n_usable, 5);
    br_engine_close(e);
    free(r);
}
END_TEST

Suite *test_weightsync_memory_suite(void) {
    Suite *suite = suite_create("weightsync_memory");
    TCase *tcase = tcase_create("memory");
    tcase_set_timeout(tcase, 300);
    tcase_add_unchecked_fixture(tcase, swap_models_make, NULL);
    tcase_add_test(tcase, any_flipped_bit_of_the_live_memory_is_seen);
    tcase_add_test(tcase, numbers_behind_the_rank_are_seen);
    tcase_add_test(tcase, an_engine_without_swap_has_a_live_digest_too);
    tcase_add_test(tcase, an_empty_adapter_begins_with_version_0);
    tcase_add_test(tcase, a_generated_adapter_is_swapped_by_its_values);
    tcase_add_test(tcase, a_sender_that_is_gone_leaves_no_trace);
    tcase_add_test(tcase, each_failing_allocation_of_a_swap_leaves_the_live_version);
    tcase_add_test(tcase, chunks_and_commit_allocate_nothing);
    tcase_add_test(tcase, every_allocation_of_open_may_fail);
    tcase_add_test(tcase, base_weights_change_under_the_adapters);
    suite_add_tcase(suite, tcase);
    return suite;
}
