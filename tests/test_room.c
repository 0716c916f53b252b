/* Too little memory is said before anything is packed, with each part in GB; and what is said is what is then taken, to the byte. */
#include "adapter_image.h"
#include "br_room.h"
#include "engine_parts.h"
#include "engine_rig.h"
#include "scorer.h"
#include "test_support.h"
#include "ws_feed.h"

#include <stdio.h>
#include <string.h>

static rig_model pico;

static void make_models(void) {
    rig_model_make(&pico, "pico");
}

static size_t taken(const br_device *device) {
    return (size_t)br_device_counted(device).alloc_bytes;
}

static const struct {
    int32_t max_seqs, chunk_tokens, kv_pages, max_tok, swap_rank;
} SIZE[] = {{0}, {.max_seqs = 3, .chunk_tokens = 7, .kv_pages = 100, .max_tok = 200}, {.max_seqs = 100, .kv_pages = 9, .swap_rank = 32}};

enum { N_SIZE = sizeof SIZE / sizeof SIZE[0] };

static br_engine_options options_of(int i) {
    br_engine_options options = rig_options(&pico);
    options.backend = "oracle";
    options.max_seqs = SIZE[i].max_seqs;
    options.chunk_tokens = SIZE[i].chunk_tokens;
    options.kv_pages = SIZE[i].kv_pages;
    options.max_tok = SIZE[i].max_tok;
    options.swap_rank = SIZE[i].swap_rank;
    return options;
}

/* With as many bytes as an engine has taken another one opens; with one less it does not. */
START_TEST(an_engine_takes_what_it_asks_for) {
    br_engine *engine;
    const br_engine_options options = options_of(_i);
    CHECK_OK(br_engine_open(&options, &engine));
    const size_t all = taken(engine->loaded.device);
    ck_assert_uint_eq(br_room_sum(&engine->loaded.room), all);
    br_engine_close(engine);
    br_device_pretend_memory(all);
    CHECK_OK(br_engine_open(&options, &engine));
    br_engine_close(engine);
    br_device_pretend_memory(all - 1);
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_NOMEM);
    ck_assert_ptr_null(engine);
}
END_TEST

START_TEST(a_scorer_takes_what_it_asks_for) {
    br_loaded loaded;
    scorer *s;
    const br_engine_options options = options_of(0);
    CHECK_OK(scorer_load(&options, 64, 500, &loaded));
    CHECK_OK(scorer_open(&loaded, &s));
    const size_t all = taken(loaded.device);
    ck_assert_uint_eq(br_room_sum(&loaded.room), all);
    scorer_close(s);
    br_loaded_close(&loaded);
    br_device_pretend_memory(all - 1);
    CHECK_FAILS(scorer_load(&options, 64, 500, &loaded), BR_E_NOMEM);
    ck_assert(!loaded.device && !loaded.model && !loaded.weights);
}
END_TEST

/* The oracle's memory has no views, so that its engine has neither of the two. */
START_TEST(swaps_take_what_they_ask_for) {
    br_engine *engine;
    ws_feed *feed;
    adapter_image *image;
    const br_engine_options options = options_of(0);
    CHECK_OK(br_engine_open(&options, &engine));
    const br_loaded *loaded = &engine->loaded;
    const size_t before = taken(loaded->device);
    CHECK_OK(ws_feed_open(loaded->device, NULL, 12345, 5000, &feed));
    ck_assert_uint_eq(ws_feed_bytes(12345, 5000), taken(loaded->device) - before);
    CHECK_OK(adapter_image_open(loaded, 0, &image));
    ck_assert_uint_eq(ws_feed_bytes(12345, 5000) + adapter_image_bytes(&loaded->config), taken(loaded->device) - before);
    adapter_image_close(image);
    ws_feed_close(feed);
    br_engine_close(engine);
}
END_TEST

START_TEST(each_part_is_named) {
    br_engine *engine;
    br_loaded loaded;
    char wanted[64];
    br_engine_options options = options_of(0);
    options.kv_pages = 500000;
    options.max_seqs = 1000;
    options.chunk_tokens = 1000;
    CHECK_OK(br_loaded_prepare(&options, 1000, 100, 0, &loaded));
    const struct {
        const char *what;
        size_t bytes;
    } part[] = {{"packed weights", loaded.size.weights}, {"work buffers", loaded.size.work}, {"cache pages", loaded.size.page * 500000},
                {"KDA states", loaded.size.state * 2016}, {"logits", 1000 * (256 * 4 + (size_t)loaded.config.d_model * 2)}};
    ck_assert(loaded.size.page && loaded.size.state && loaded.size.weights && loaded.size.work);
    br_loaded_close(&loaded);
    br_device_pretend_memory(123456789);
    CHECK_FAILS(br_engine_open(&options, &engine), BR_E_NOMEM);
    ck_assert_ptr_nonnull(strstr(br_last_error(), " GB of host memory wanted, 0.123 GB are there: "));
    for (size_t i = 0; i < sizeof part / sizeof part[0]; i++) {
        snprintf(wanted, sizeof wanted, "%s %.3f GB", part[i].what, 1e-9 * (double)part[i].bytes);
        ck_assert_msg(strstr(br_last_error(), wanted), "no '%s' in: %s", wanted, br_last_error());
    }
    ck_assert_ptr_nonnull(strstr(br_last_error(), "rows of a step "));
}
END_TEST

/* What an opened backend holds is beside the sum, and named. */
START_TEST(what_is_taken_is_named) {
    br_device *device;
    br_room room = {.taken = 2500000000};
    CHECK_OK(br_device_open("host", &device));
    br_room_add(&room, "this", 1000000000);
    br_room_add(&room, "that", 500000000);
    br_room_add(&room, "this", 1000000000);
    br_device_pretend_memory(2500000000);
    CHECK_OK(br_room_check(&room, device));
    br_device_pretend_memory(2499999999);
    CHECK_FAILS(br_room_check(&room, device), BR_E_NOMEM);
    ck_assert_str_eq(br_last_error(), "2.500 GB of host memory wanted, 2.500 GB are there: this 2.000 GB, that 0.500 GB; scratch of the ops, "
                                      "2.500 GB, is taken already");
    br_device_close(device);
}
END_TEST

Suite *test_room_suite(void) {
    Suite *suite = suite_create("room");
    TCase *tcase = tcase_create("room");
    tcase_add_unchecked_fixture(tcase, make_models, NULL);
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, an_engine_takes_what_it_asks_for, 0, N_SIZE);
    tcase_add_test(tcase, a_scorer_takes_what_it_asks_for);
    tcase_add_test(tcase, swaps_take_what_they_ask_for);
    tcase_add_test(tcase, each_part_is_named);
    tcase_add_test(tcase, what_is_taken_is_named);
    suite_add_tcase(suite, tcase);
    return suite;
}
