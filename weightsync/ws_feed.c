/* Values into device memory; see ws_feed.h. */
#include "ws_feed.h"

#include "br_mem.h"
#include "ws_long.h"

#include <string.h>

enum { SLOTS = 2, SLOT_VIEWS = 8192, FIRST_VIEWS = 1024, ALIGN = 16, DIRECT_MIN = 4096 };

/* So many bytes from src to this place of the slot. */
typedef struct feed_run {
    const unsigned char *src;
    size_t at, n;
} feed_run;

typedef struct feed_slot {
    br_device *lane;       /* of all that the device does for this slot; mark 0: it is done with that */
    br_mirror bytes, jobs; /* jobs: views, then sources */
    br_view *view;         /* (SLOT_VIEWS) in jobs */
    const uint16_t **src;  /* (SLOT_VIEWS) in jobs */
    feed_run run[SLOT_VIEWS];  /* across the bus; src NULL: from the slot's own side of the host */
    feed_run copy[SLOT_VIEWS]; /* before that, into the slot, by the pool */
    int32_t n_view, n_run, n_copy;
    int32_t sent, first;   /* views that the device is at, and where their results go: from to[first] on */
    size_t used;
} feed_slot;

struct ws_feed {
    br_device *device;
    br_pool *pool;
    size_t slot_bytes;
    int32_t n_view_max, n_seen, at;
    int32_t full; /* views that send a slot off: few at first, so that the device begins early, then twice as many each time */
    feed_slot slot[SLOTS];
    br_mirror seen; /* (n_view_max) */
    ws_seen *to;    /* (n_view_max) who is told of a result */
    uintptr_t known, known_end; /* addresses of values that stay, of one kind */
    br_memory_kind kind;
};

/* ---- open ------------------------------------------------------------------------------------------------------------------ */

static int32_t view_max(int32_t n_view) {
    return n_view < SLOT_VIEWS ? SLOT_VIEWS : n_view;
}

size_t ws_feed_bytes(size_t slot_bytes, int32_t n_view) {
    return SLOTS * (slot_bytes + SLOT_VIEWS * (sizeof(br_view) + sizeof(uint16_t *))) + (size_t)view_max(n_view) * sizeof(br_seen);
}

static br_status open_slot(ws_feed *f, feed_slot *slot) {
    BR_TRY(br_device_lane_open(f->device, &slot->lane));
    BR_TRY(br_mirror_open(f->device, f->slot_bytes, "values on their way to the device", &slot->bytes));
    BR_TRY(br_mirror_open(f->device, SLOT_VIEWS * (sizeof *slot->view + sizeof *slot->src), "where values go", &slot->jobs));
    slot->view = (br_view *)(void *)slot->jobs.host;
    slot->src = (const uint16_t **)(void *)(slot->view + SLOT_VIEWS);
    return BR_OK;
}

br_status ws_feed_open(br_device *device, br_pool *pool, size_t slot_bytes, int32_t n_view, ws_feed **out) {
    br_status status;
    ws_feed *f = NULL;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&f, sizeof *f, "a feed of values"));
    f->device = device;
    f->pool = pool;
    f->slot_bytes = slot_bytes;
    f->n_view_max = view_max(n_view);
    f->full = FIRST_VIEWS;
    for (int i = 0; i < SLOTS; i++)
        BR_TRY_GOTO(open_slot(f, &f->slot[i]), exit);
    BR_TRY_GOTO(br_mirror_open(device, (size_t)f->n_view_max * sizeof(br_seen), "what was seen of values", &f->seen), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&f->to, (size_t)f->n_view_max * sizeof *f->to, "what was seen of values"), exit);
    BR_TRY_GOTO(br_device_wait(device), exit); /* it zeroes the mirrors in its own order, beside which the lanes write them */
    *out = f;
exit:
    if (status != BR_OK)
        ws_feed_close(f);
    return status;
}

void ws_feed_close(ws_feed *f) {
    if (!f)
        return;
    for (int i = 0; i < SLOTS; i++)
        br_device_close(f->slot[i].lane); /* waits for it, which closing a mirror does not */
    for (int i = 0; i < SLOTS; i++) {
        br_mirror_close(f->device, &f->slot[i].bytes);
        br_mirror_close(f->device, &f->slot[i].jobs);
    }
    br_mirror_close(f->device, &f->seen);
    br_mem_free(f->to);
    br_mem_free(f);
}

/* ---- a slot ---------------------------------------------------------------------------------------------------------------- */

static void copy_one(void *context, int i, int thread) {
    const feed_slot *slot = context;
    (void)thread;
    memcpy(slot->bytes.host + slot->copy[i].at, slot->copy[i].src, slot->copy[i].n);
}

static size_t bytes_of(const br_view *v) {
    return (size_t)v->n_row * (size_t)v->n_col * sizeof(uint16_t);
}

/* Long values go first (ws_long.h). to: where results of this slot go. Copies and runs go by place, not by number. */
static void long_first(feed_slot *slot, ws_seen *to) {
    size_t sum = 0;
    int32_t n_long = 0;
    for (int32_t i = 0; i < slot->n_view; i++)
        sum += bytes_of(&slot->view[i]);
    for (int32_t i = 0; i < slot->n_view; i++) {
        if (!ws_is_long(bytes_of(&slot->view[i]), sum, (uint64_t)slot->n_view))
            continue;
        const int32_t k = n_long++;
        const br_view view = slot->view[k];
        const uint16_t *src = slot->src[k];
        const ws_seen seen = to[k];
        slot->view[k] = slot->view[i];
        slot->src[k] = slot->src[i];
        to[k] = to[i];
        slot->view[i] = view;
        slot->src[i] = src;
        to[i] = seen;
    }
}

/* Beside what the other slot's lane still does: their views, sources and results lie apart. */
static br_status enqueue(ws_feed *f, feed_slot *slot) {
    const size_t n = (size_t)slot->n_view;
    br_view *view = (br_view *)br_mirror_at(&slot->jobs, slot->view);
    const uint16_t **src = br_mirror_at(&slot->jobs, slot->src);
    br_seen *seen = (br_seen *)(void *)f->seen.device + slot->first;
    for (int32_t i = 0; i < slot->n_run; i++) {
        const feed_run *r = &slot->run[i];
        BR_TRY(br_device_upload(slot->lane, slot->bytes.device + r->at, r->src ? r->src : slot->bytes.host + r->at, r->n));
    }
    BR_TRY(br_device_upload(slot->lane, view, slot->view, n * sizeof *view));
    BR_TRY(br_device_upload(slot->lane, src, slot->src, n * sizeof *src));
    BR_TRY(br_device_place(slot->lane, view, src, slot->n_view, seen));
    BR_TRY(br_device_download(slot->lane, (br_seen *)(void *)f->seen.host + slot->first, seen, n * sizeof *seen));
    slot->sent = slot->n_view;
    return br_device_mark(slot->lane, 0);
}

/* Results of a slot that the device has done with. */
static void hand_out(ws_feed *f, feed_slot *slot) {
    const br_seen *seen = (const br_seen *)(const void *)f->seen.host;
    for (int32_t i = slot->first; i < slot->first + slot->sent; i++)
        if (f->to[i].take)
            f->to[i].take(f->to[i].context, f->to[i].i, &seen[i]);
    slot->sent = 0;
}

/* Sends the slot off and goes on with the next, once the device has done with that. */
static br_status send_slot(ws_feed *f) {
    feed_slot *slot = &f->slot[f->at];
    if (slot->n_view == 0)
        return BR_OK;
    slot->first = f->n_seen - slot->n_view;
    br_pool_run(f->pool, copy_one, slot, slot->n_copy);
    long_first(slot, f->to + slot->first);
    const br_status status = enqueue(f, slot);
    slot->n_view = slot->n_run = slot->n_copy = 0;
    slot->used = 0;
    f->full = f->full < SLOT_VIEWS ? 2 * f->full : (int32_t)SLOT_VIEWS;
    f->at = (f->at + 1) % SLOTS;
    BR_TRY(status);
    slot = &f->slot[f->at];
    BR_TRY(br_device_reach(slot->lane, 0));
    hand_out(f, slot);
    return BR_OK;
}

/* ---- what goes in ---------------------------------------------------------------------------------------------------------- */

static void add_run(feed_slot *slot, const unsigned char *src, size_t at, size_t n) {
    feed_run *last = slot->n_run ? &slot->run[slot->n_run - 1] : NULL;
    if (last && !last->src && !src) {
        last->n = at + n - last->at;
        return;
    }
    if (last && last->src && src == last->src + last->n && at == last->at + last->n) {
        last->n += n;
        return;
    }
    slot->run[slot->n_run++] = (feed_run){src, at, n};
}

static int follows(const feed_slot *slot, const unsigned char *src) {
    const feed_run *last = slot->n_run ? &slot->run[slot->n_run - 1] : NULL;
    return last && last->src && src == last->src + last->n;
}

/* Room for n bytes in the slot at hand: page-locked neighbours stay neighbours, so that they cross together. */
static br_status take_room(ws_feed *f, const unsigned char *src, size_t n, size_t *at) {
    feed_slot *slot = &f->slot[f->at];
    *at = follows(slot, src) ? slot->used : (slot->used + ALIGN - 1) / ALIGN * ALIGN;
    if (*at + n > f->slot_bytes || slot->n_view == f->full) {
        BR_TRY(send_slot(f));
        *at = 0;
    }
    f->slot[f->at].used = *at + n;
    return BR_OK;
}

/* To ask for thousands of values of one block takes longer than to copy them on a GPU. What does not stay may be another's by the next call. */
static br_memory_kind kind_of(ws_feed *f, const uint16_t *value, int32_t stays) {
    const uintptr_t at = (uintptr_t)value;
    const void *end;
    if (stays && at >= f->known && at < f->known_end)
        return f->kind;
    const br_memory_kind kind = br_device_kind_of(f->device, value, &end);
    if (stays) {
        f->known = at;
        f->known_end = (uintptr_t)end;
        f->kind = kind;
    }
    return kind;
}

br_status ws_feed_write(ws_feed *f, const br_view *to, const uint16_t *value, int32_t stays, const ws_seen *seen) {
    const size_t n = bytes_of(to);
    const unsigned char *bytes = (const unsigned char *)value;
    const br_memory_kind kind = kind_of(f, value, stays);
    const uint16_t *src = value;
    size_t at = 0;
    BR_ASSERT(n <= f->slot_bytes);
    if (f->n_seen == f->n_view_max)
        BR_TRY(ws_feed_flush(f));
    BR_TRY(take_room(f, bytes, kind == BR_MEMORY_DEVICE ? 0 : n, &at));
    feed_slot *slot = &f->slot[f->at];
    if (kind != BR_MEMORY_DEVICE) {
        const int direct = kind == BR_MEMORY_LOCKED && stays && n >= DIRECT_MIN;
        src = (const uint16_t *)(void *)(slot->bytes.device + at);
        add_run(slot, direct ? bytes : NULL, at, n);
        if (!direct && stays)
            slot->copy[slot->n_copy++] = (feed_run){bytes, at, n};
        if (!direct && !stays)
            memcpy(slot->bytes.host + at, bytes, n);
    }
    slot->view[slot->n_view] = *to;
    slot->src[slot->n_view++] = src;
    f->to[f->n_seen++] = seen ? *seen : (ws_seen){0};
    return kind == BR_MEMORY_DEVICE && !stays ? ws_feed_flush(f) : BR_OK;
}

/* After a failure: values that lanes may still read are about to go. By marks, which a lane takes as long as the GPU answers, half a slot or
 * not; where it does not, nothing reads. */
static void settle(ws_feed *f) {
    for (int i = 0; i < SLOTS; i++)
        if (br_device_mark(f->slot[i].lane, 0) == BR_OK)
            br_device_reach(f->slot[i].lane, 0);
}

/* Slots come in the order in which they were sent, so that results are handed out while the device is at a later one. A failure forgets
 * what was waiting. */
br_status ws_feed_flush(ws_feed *f) {
    br_status status;
    BR_TRY_GOTO(send_slot(f), exit);
    for (int i = 0; i < SLOTS; i++) {
        feed_slot *slot = &f->slot[(f->at + i) % SLOTS];
        BR_TRY_GOTO(br_device_wait(slot->lane), exit);
        hand_out(f, slot);
    }
exit:
    if (status != BR_OK)
        settle(f);
    for (int i = 0; i < SLOTS; i++)
        f->slot[i].sent = 0;
    f->n_seen = 0;
    f->full = FIRST_VIEWS;
    f->known_end = 0;
    return status;
}
