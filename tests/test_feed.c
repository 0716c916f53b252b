/* A feed of values on a device that does nothing before somebody waits for it, each lane by itself, as late as a GPU may: when a flush
 * returns, all is in its place and nothing reads the caller's values any more, also where a call failed. */
#include "br_hash.h"
#include "config_json.h"
#include "device_parts.h"
#include "init_presets.h"
#include "test_support.h"
#include "ws_feed.h"
#include "ws_stage.h"

#include <stdlib.h>
#include <string.h>

enum { CALLS = 512, ROWS = 48, COLS = 64, VALUES = ROWS * COLS, VIEWS = 13, A_SLOT = 3 /* views in one */ };

typedef struct late_call {
    void *dst; /* of a copy */
    const void *src;
    size_t bytes;
    const br_view *view; /* of a place */
    const uint16_t *const *from;
    int32_t n;
    br_seen *seen;
} late_call;

typedef struct late_device {
    br_device base;
    late_call call[CALLS];
    int n, done, marked; /* calls so far, those carried out, those before mark 0 */
} late_device;

static late_device *lane_of[4];
static int n_lane;

static late_device *late(br_device *device) {
    return (late_device *)device;
}

static br_status run_until(late_device *l, int end) {
    for (; l->done < end; l->done++) {
        const late_call *c = &l->call[l->done];
        if (c->view)
            BR_TRY(br_device_host_place(&l->base, c->view, c->from, c->n, c->seen));
        else
            memcpy(c->dst, c->src, c->bytes);
    }
    return BR_OK;
}

static br_status late_copy(br_device *device, void *dst, const void *src, size_t bytes) {
    ck_assert_int_lt(late(device)->n, CALLS);
    late(device)->call[late(device)->n++] = (late_call){.dst = dst, .src = src, .bytes = bytes};
    return BR_OK;
}

static br_status late_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen) {
    ck_assert_int_lt(late(device)->n, CALLS);
    late(device)->call[late(device)->n++] = (late_call){.view = view, .from = src, .n = n, .seen = seen};
    return BR_OK;
}

static br_status late_wait(br_device *device) {
    return run_until(late(device), late(device)->n);
}

static br_status late_mark(br_device *device, int32_t i) {
    ck_assert_int_eq(i, 0);
    late(device)->marked = late(device)->n;
    return BR_OK;
}

static br_status late_reach(br_device *device, int32_t i) {
    ck_assert_int_eq(i, 0);
    return run_until(late(device), late(device)->marked);
}

static br_status late_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    (void)device;
    (void)what;
    *out = calloc(1, bytes);
    return BR_OK;
}

static void late_free(br_device *device, void *block) {
    (void)device;
    free(block);
}

static void late_close(br_device *device) {
    CHECK_OK(late_wait(device));
    free(device);
}

/* Every second value is one that the device reads where it lies. */
static br_memory_kind late_kind_of(br_device *device, const void *at, const void **end) {
    (void)device;
    *end = (const char *)at + 1;
    return (uintptr_t)at / (VALUES * sizeof(uint16_t)) % 2 ? BR_MEMORY_LOCKED : BR_MEMORY_HOST;
}

static br_status late_lane(br_device *device, br_device **out) {
    late_device *l = calloc(1, sizeof *l);
    ck_assert(l && n_lane < 4);
    l->base = (br_device){.op = device->op, .name = "late"};
    lane_of[n_lane++] = l;
    *out = &l->base;
    return BR_OK;
}

static const device_ops LATE_OPS = {.close = late_close, .lane = late_lane, .alloc = late_alloc, .release = late_free,
                                    .locked_alloc = late_alloc, .locked_free = late_free, .upload = late_copy, .download = late_copy,
                                    .wait = late_wait, .mark = late_mark, .reach = late_reach, .kind_of = late_kind_of, .place = late_place};

typedef struct rig {
    br_device *device;
    br_pool *pool;
    ws_feed *feed;
    uint16_t *value, *wanted, *place; /* (VIEWS, VALUES) */
    br_seen seen[VIEWS];
} rig;

static void rig_open(rig *r) {
    br_device kind = {.op = &LATE_OPS};
    const size_t bytes = VIEWS * VALUES * sizeof(uint16_t);
    n_lane = 0;
    CHECK_OK(late_lane(&kind, &r->device));
    CHECK_OK(br_pool_open(2, &r->pool));
    CHECK_OK(ws_feed_open(r->device, r->pool, A_SLOT * VALUES * sizeof(uint16_t), VIEWS, &r->feed));
    ck_assert_int_eq(n_lane, 3);
    r->value = malloc(bytes);
    r->wanted = malloc(bytes);
    r->place = calloc(1, bytes);
    ck_assert(r->value && r->wanted && r->place);
    for (int i = 0; i < VIEWS * VALUES; i++)
        r->wanted[i] = (uint16_t)(test_mix((uint64_t)i) & 0xbfff); /* finite */
    memcpy(r->value, r->wanted, bytes);
    memset(r->seen, 0, sizeof r->seen);
}

static void rig_close(rig *r) {
    ws_feed_close(r->feed);
    br_device_close(r->device);
    br_pool_close(r->pool);
    free(r->value);
    free(r->wanted);
    free(r->place);
}

static void take(void *context, int64_t i, const br_seen *seen) {
    ((rig *)context)->seen[i] = *seen;
}

/* all_stay 0: every third value goes as soon as it was put. */
static br_status put_all(rig *r, int32_t all_stay) {
    for (int i = 0; i < VIEWS; i++) {
        const int32_t stays = all_stay || i % 3;
        const br_view view = {.n_row = ROWS, .n_col = COLS, .part[0] = {.at = r->place + i * VALUES, .row = COLS, .col = 1, .n_row = ROWS}};
        BR_TRY(ws_feed_write(r->feed, &view, r->value + i * VALUES, stays, &(ws_seen){take, r, i}));
        if (!stays)
            memset(r->value + i * VALUES, 0xff, VALUES * sizeof(uint16_t));
    }
    return BR_OK;
}

START_TEST(all_is_in_its_place_after_a_flush) {
    for (int32_t all_stay = 0; all_stay < 2; all_stay++) {
        rig r;
        rig_open(&r);
        CHECK_OK(put_all(&r, all_stay));
        ck_assert(lane_of[1]->done < lane_of[1]->n || lane_of[2]->done < lane_of[2]->n); /* they are late */
        ck_assert(lane_of[1]->done > 0 && lane_of[2]->done > 0);
        ck_assert_int_eq(r.seen[0].any, 1); /* a slot is handed out when its turn comes again */
        CHECK_OK(ws_feed_flush(r.feed));
        memset(r.value, 0xff, VIEWS * VALUES * sizeof *r.value);
        ck_assert_int_eq(lane_of[0]->n, 0); /* the device's own stream */
        for (int i = 0; i < VIEWS; i++) {
            ck_assert_mem_eq(r.place + i * VALUES, r.wanted + i * VALUES, VALUES * sizeof *r.place);
            ck_assert(br_digest_equal(r.seen[i].digest, br_hash_bytes(r.wanted + i * VALUES, VALUES * sizeof *r.wanted)));
            ck_assert(r.seen[i].any == 1 && r.seen[i].first_bad == UINT32_MAX);
        }
        rig_close(&r);
    }
}
END_TEST

START_TEST(after_a_failure_nothing_is_under_way) {
    br_status status = BR_E_DEVICE;
    long n = 0;
    while (status != BR_OK) {
        rig r;
        rig_open(&r);
        br_device_fail_nth(++n);
        status = put_all(&r, 1);
        const br_status flushed = ws_feed_flush(r.feed);
        br_device_fail_nth(0);
        for (int i = 1; i < n_lane; i++)
            ck_assert_msg(lane_of[i]->done == lane_of[i]->n, "call %ld: lane %d did %d of %d", n, i, lane_of[i]->done, lane_of[i]->n);
        ck_assert(status == BR_OK || (status == BR_E_DEVICE && flushed == BR_E_DEVICE));
        ck_assert(flushed == BR_OK || flushed == BR_E_DEVICE);
        status = flushed;
        rig_close(&r);
    }
    ck_assert_int_gt(n, VIEWS); /* uploads, downloads and waits */
}
END_TEST

/* ---- two names, one feed ------------------------------------------------------------------------------------------------------ */

enum { NAMES = 2, TENSORS_MAX = 512 };

typedef struct named {
    ws_feed *feed;
    ws_stage *stage;
    uint16_t *value[TENSORS_MAX], *place[2][TENSORS_MAX]; /* place: by way, map and half */
    br_digest digest;
} named;

static br_config config;
static lora_scale plan[TENSORS_MAX];
static int uploads_to_failure; /* 0: none. That call alone fails: a GPU that refuses one call goes on */

static br_status refusing_upload(br_device *device, void *dst, const void *src, size_t bytes) {
    if (uploads_to_failure > 0 && --uploads_to_failure == 0)
        return br_fail(BR_E_DEVICE, "one call is refused");
    return late_copy(device, dst, src, bytes);
}

static br_status named_begin(void *context, int32_t way, const lora_scale *scale) {
    (void)context;
    (void)way;
    (void)scale;
    return BR_OK;
}

static br_status named_put(void *context, int32_t way, const ws_tensor *t, const uint16_t *value, int32_t stays, const ws_seen *seen) {
    named *n = context;
    uint16_t *at = n->place[way][2 * t->map + t->is_b];
    const br_view view = {.n_row = t->n_row, .n_col = t->n_col, .part[0] = {.at = at, .row = t->n_col, .col = 1, .n_row = t->n_row}};
    return ws_feed_write(n->feed, &view, value, stays, seen);
}

static br_status named_flush(void *context) {
    return ws_feed_flush(((named *)context)->feed);
}

static void names_open(rig *r, named name[NAMES], const device_ops *ops) {
    static const char ONE_CLASS[] = "{\"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"o_proj\", \"q_proj\"]}";
    br_device kind = {.op = ops};
    n_lane = 0;
    CHECK_OK(late_lane(&kind, &r->device));
    CHECK_OK(br_pool_open(2, &r->pool));
    CHECK_OK(br_config_parse("pico", init_preset_find("pico")->config_json, strlen(init_preset_find("pico")->config_json), &config));
    ck_assert_int_le(2 * lora_map_count(&config), TENSORS_MAX);
    CHECK_OK(lora_plan_parse(&config, "test", ONE_CLASS, strlen(ONE_CLASS), plan));
    CHECK_OK(ws_feed_open(r->device, r->pool, 4096, 64, &r->feed));
    for (int k = 0; k < NAMES; k++) {
        const ws_options o = {.name = k ? "B" : "A", .config = &config, .rank_max = 4, .next = plan,
                              .target = {.context = &name[k], .begin = named_begin, .put = named_put, .flush = named_flush}};
        lora_text text;
        name[k] = (named){.feed = r->feed};
        CHECK_OK(ws_open(&o, &name[k].stage));
        CHECK_OK(lora_text_open(&config, &text));
        lora_text_set(&text, &config, plan);
        for (int64_t i = 0; i < ws_manifest_of(name[k].stage)->n_tensor; i++) {
            const ws_tensor t = ws_manifest_at(ws_manifest_of(name[k].stage), i);
            const size_t bytes = ws_tensor_bytes(&t);
            name[k].value[i] = malloc(bytes);
            for (int way = 0; way < 2; way++)
                name[k].place[way][2 * t.map + t.is_b] = calloc(1, bytes);
            for (size_t e = 0; e < bytes / 2; e++)
                name[k].value[i][e] = (uint16_t)(test_mix((uint64_t)(i + 1) << 32 | e << 1 | (unsigned)k) & 0xbfff);
            lora_text_put(&text, i / 2, i % 2, br_hash_bytes(name[k].value[i], bytes));
        }
        name[k].digest = lora_text_digest(&text);
        lora_text_close(&text);
    }
}

static void names_close(rig *r, named name[NAMES]) {
    for (int k = 0; k < NAMES; k++) {
        ws_close(name[k].stage);
        for (int i = 0; i < TENSORS_MAX; i++) {
            free(name[k].value[i]);
            free(name[k].place[0][i]);
            free(name[k].place[1][i]);
        }
    }
    ws_feed_close(r->feed);
    br_device_close(r->device);
    br_pool_close(r->pool);
}

static br_status send_one(named *n, int64_t i, int32_t stays) {
    const ws_tensor t = ws_manifest_at(ws_manifest_of(n->stage), i);
    return stays ? ws_whole(n->stage, i, n->value[i]) : ws_chunk(n->stage, i, 0, n->value[i], ws_tensor_bytes(&t));
}

static void begin_next(named *n) {
    br_swap_answer answer;
    CHECK_OK(ws_begin(n->stage, ws_status_of(n->stage).live_version + 1, 0, 0, &answer));
}

/* What it says it holds is what lies there. */
static void end_and_check(named *n) {
    br_swap_answer answer;
    CHECK_OK(ws_end(n->stage, &n->digest));
    CHECK_OK(ws_commit(n->stage, ws_status_of(n->stage).version, 0, &answer));
    for (int64_t i = 0; i < ws_manifest_of(n->stage)->n_tensor; i++) {
        const ws_tensor t = ws_manifest_at(ws_manifest_of(n->stage), i);
        ck_assert_mem_eq(n->place[ws_status_of(n->stage).live_way][2 * t.map + t.is_b], n->value[i], ws_tensor_bytes(&t));
    }
}

/* Tensors of both in turn; one is dropped and begun again while the other comes in. */
START_TEST(two_names_share_a_feed) {
    static named name[NAMES];
    rig r;
    names_open(&r, name, &LATE_OPS);
    const int64_t n = ws_manifest_of(name[0].stage)->n_tensor;
    for (int64_t drop_at = 0; drop_at <= n; drop_at++) {
        begin_next(&name[0]);
        begin_next(&name[1]);
        for (int64_t i = 0; i < n; i++) {
            if (i == drop_at && drop_at % 2)
                ws_abort(name[0].stage);
            if (i == drop_at && drop_at % 2 == 0)
                CHECK_FAILS(ws_chunk(name[0].stage, -1, 0, "", 1), BR_E_FORMAT);
            if (i == drop_at)
                begin_next(&name[0]);
            CHECK_OK(send_one(&name[0], i < drop_at ? i : n - 1 - (i - drop_at), i % 2));
            CHECK_OK(send_one(&name[1], i, i % 3 != 0));
        }
        end_and_check(&name[1]);
        for (int64_t i = 0; i < drop_at && drop_at < n; i++)
            CHECK_OK(send_one(&name[0], i, 1));
        end_and_check(&name[0]);
        for (int i = 0; i < n_lane; i++) /* all is done: the lists begin anew */
            lane_of[i]->n = lane_of[i]->done = lane_of[i]->marked = 0;
    }
    names_close(&r, name);
}
END_TEST

/* A call that the device refuses at one name costs the other values as well: that one is told so and never goes live with what lay there. */
START_TEST(what_was_lost_at_another_name_is_no_version) {
    device_ops ops = LATE_OPS;
    ops.upload = refusing_upload;
    int n_lost = 0;
    for (int at = 1, n_refused = 1; n_refused > 0; at++) {
        static named name[NAMES];
        rig r;
        names_open(&r, name, &ops);
        const int64_t n = ws_manifest_of(name[0].stage)->n_tensor;
        br_status status[NAMES] = {BR_OK, BR_OK};
        begin_next(&name[0]);
        begin_next(&name[1]);
        uploads_to_failure = at;
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < NAMES; k++)
                status[k] = status[k] == BR_OK ? send_one(&name[k], i, 1) : status[k];
        for (int k = 0; k < NAMES; k++)
            status[k] = status[k] == BR_OK ? ws_end(name[k].stage, NULL) : status[k];
        n_refused = uploads_to_failure == 0;
        uploads_to_failure = 0;
        for (int k = 0; k < NAMES; k++) {
            ck_assert(status[k] == BR_OK || status[k] == BR_E_DEVICE);
            for (int64_t i = 0; i < n && status[k] == BR_OK; i++) {
                const ws_tensor t = ws_manifest_at(ws_manifest_of(name[k].stage), i);
                ck_assert_mem_eq(name[k].place[!ws_status_of(name[k].stage).live_way][2 * t.map + t.is_b], name[k].value[i], ws_tensor_bytes(&t));
            }
            n_lost += status[k] != BR_OK && strstr(br_last_error(), "lost on their way") != NULL;
        }
        names_close(&r, name);
    }
    ck_assert_int_gt(n_lost, 0);
}
END_TEST

Suite *test_feed_suite(void) {
    Suite *suite = suite_create("feed");
    TCase *tcase = tcase_create("feed");
    tcase_add_test(tcase, all_is_in_its_place_after_a_flush);
    tcase_add_test(tcase, after_a_failure_nothing_is_under_way);
    tcase_add_test(tcase, two_names_share_a_feed);
    tcase_add_test(tcase, what_was_lost_at_another_name_is_no_version);
    suite_add_tcase(suite, tcase);
    return suite;
}
