/* Reading what lies in device memory; see ws_reader.h. */
#include "ws_reader.h"

#include "br_mem.h"

enum { FILLS = 8192, SIZE_BITS = 32 };

struct ws_reader {
    br_device *device;
    int32_t n_view_max, n_owner, n_view, n_fill;
    br_view *view;                 /* (n_view_max) in the order of the caller */
    br_mirror views, found, fills; /* (n_view_max) long ones first; (n_view_max) in that order; (FILLS) */
    br_mirror torn;                /* (n_owner) */
    br_seen *seen;                 /* (n_view_max) in the order of the caller */
};

size_t ws_reader_bytes(int32_t n_view_max, int32_t n_owner) {
    return (size_t)n_view_max * (sizeof(br_view) + sizeof(br_seen)) + FILLS * sizeof(br_fill) + (size_t)n_owner * sizeof(uint32_t);
}

br_status ws_reader_open(br_device *device, int32_t n_view_max, int32_t n_owner, ws_reader **out) {
    br_status status;
    ws_reader *r = NULL;
    const size_t n = (size_t)n_view_max;
    *out = NULL;
    BR_TRY(br_mem_alloc((void **)&r, sizeof *r, "a reader of adapters"));
    *r = (ws_reader){.device = device, .n_view_max = n_view_max, .n_owner = n_owner};
    BR_TRY_GOTO(br_mem_alloc((void **)&r->view, n * sizeof *r->view, "matrices to read"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&r->seen, n * sizeof *r->seen, "what was seen of matrices"), exit);
    BR_TRY_GOTO(br_mirror_open(device, n * sizeof *r->view, "matrices to read", &r->views), exit);
    BR_TRY_GOTO(br_mirror_open(device, n * sizeof *r->seen, "what was seen of matrices", &r->found), exit);
    BR_TRY_GOTO(br_mirror_open(device, FILLS * sizeof(br_fill), "runs to check", &r->fills), exit);
    BR_TRY_GOTO(br_mirror_open(device, (size_t)n_owner * sizeof(uint32_t), "what is torn", &r->torn), exit);
    *out = r;
exit:
    if (status != BR_OK)
        ws_reader_close(r);
    return status;
}

void ws_reader_close(ws_reader *r) {
    if (!r)
        return;
    br_mirror_close(r->device, &r->views);
    br_mirror_close(r->device, &r->found);
    br_mirror_close(r->device, &r->fills);
    br_mirror_close(r->device, &r->torn);
    br_mem_free(r->view);
    br_mem_free(r->seen);
    br_mem_free(r);
}

static uint32_t *torn_of(const ws_reader *r) {
    return (uint32_t *)(void *)r->torn.host;
}

void ws_reader_begin(ws_reader *r) {
    r->n_view = r->n_fill = 0;
    for (int32_t i = 0; i < r->n_owner; i++)
        torn_of(r)[i] = 0;
}

int32_t ws_reader_see(ws_reader *r, const br_view *view) {
    BR_ASSERT(r->n_view < r->n_view_max);
    r->view[r->n_view] = *view;
    return r->n_view++;
}

/* torn is brought together on the host: a fill says no more than that something of its owner differs. */
static br_status run_checks(ws_reader *r) {
    if (r->n_fill == 0)
        return BR_OK;
    const size_t torn_bytes = (size_t)r->n_owner * sizeof(uint32_t);
    BR_TRY(br_device_upload(r->device, r->torn.device, r->torn.host, torn_bytes));
    BR_TRY(br_device_upload(r->device, r->fills.device, r->fills.host, (size_t)r->n_fill * sizeof(br_fill)));
    BR_TRY(br_device_check(r->device, (br_fill *)(void *)r->fills.device, r->n_fill, (uint32_t *)(void *)r->torn.device));
    BR_TRY(br_device_download(r->device, r->torn.host, r->torn.device, torn_bytes));
    r->n_fill = 0;
    return br_device_wait(r->device);
}

br_status ws_reader_check(ws_reader *r, const br_fill *fill) {
    BR_ASSERT(fill->owner >= 0 && fill->owner < r->n_owner);
    if (r->n_fill == FILLS)
        BR_TRY(run_checks(r));
    ((br_fill *)(void *)r->fills.host)[r->n_fill++] = *fill;
    return BR_OK;
}

static int size_class(const br_view *view) {
    const uint32_t n = (uint32_t)view->n_row * (uint32_t)view->n_col;
    return SIZE_BITS - 1 - __builtin_clz(n);
}

/* Where each view goes when they are ordered by the power of two below their size, the largest first. */
static void order(const ws_reader *r, int32_t next[SIZE_BITS]) {
    int32_t count[SIZE_BITS] = {0}, sum = 0;
    for (int32_t i = 0; i < r->n_view; i++)
        count[size_class(&r->view[i])]++;
    for (int c = SIZE_BITS - 1; c >= 0; c--) {
        next[c] = sum;
        sum += count[c];
    }
}

br_status ws_reader_end(ws_reader *r, const br_seen **seen, const uint32_t **torn) {
    int32_t next[SIZE_BITS];
    br_view *sorted = (br_view *)(void *)r->views.host;
    const br_seen *found = (const br_seen *)(const void *)r->found.host;
    *seen = r->seen;
    *torn = torn_of(r);
    order(r, next);
    for (int32_t i = 0; i < r->n_view; i++)
        sorted[next[size_class(&r->view[i])]++] = r->view[i];
    BR_TRY(br_device_upload(r->device, r->views.device, r->views.host, (size_t)r->n_view * sizeof *sorted));
    BR_TRY(br_device_hash(r->device, (br_view *)(void *)r->views.device, r->n_view, (br_seen *)(void *)r->found.device));
    BR_TRY(br_device_download(r->device, r->found.host, r->found.device, (size_t)r->n_view * sizeof *found));
    BR_TRY(run_checks(r));
    BR_TRY(br_device_wait(r->device));
    order(r, next);
    for (int32_t i = 0; i < r->n_view; i++)
        r->seen[i] = found[next[size_class(&r->view[i])]++];
    return BR_OK;
}
