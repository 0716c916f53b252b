/* A feed of values on a device that does nothing before somebody waits for it, each lane by itself, as late as a GPU may: when a flush
 * returns, all is in its place and nothing reads the caller's values any more, also where a call failed. */
#include "br_hash.h"
#include "device_parts.h"
#include "test_support.h"
#include "ws_feed.h"

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

Suite *test_feed_suite(void) {
    Suite *suite = suite_create("feed");
    TCase *tcase = tcase_create("feed");
    tcase_add_test(tcase, all_is_in_its_place_after_a_flush);
    tcase_add_test(tcase, after_a_failure_nothing_is_under_way);
    suite_add_tcase(suite, tcase);
    return suite;
}
