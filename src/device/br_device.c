/* Choosing a device, and the mirrors, which look alike on all of them; see br_device.h. */
#include "br_mem.h"
#include "device_parts.h"

#include <string.h>

static br_device *root_of(br_device *device) {
    return device->root ? device->root : device;
}

static br_device_count *counts_of(br_device *device) {
    return &root_of(device)->count;
}

/* Weights are uploaded by several threads at once. */
static void count(int64_t *n, int64_t *sum, size_t bytes) {
    __atomic_fetch_add(n, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(sum, (int64_t)bytes, __ATOMIC_RELAXED);
}

static long fail_countdown;
static size_t pretended_bytes;

void br_device_fail_nth(long n) {
    __atomic_store_n(&fail_countdown, n, __ATOMIC_RELAXED);
}

void br_device_pretend_memory(size_t bytes) {
    pretended_bytes = bytes;
}

static br_status check_fault(br_device *device) {
    int *failed = &root_of(device)->failed;
    if (__atomic_load_n(&fail_countdown, __ATOMIC_RELAXED) > 0 && __atomic_sub_fetch(&fail_countdown, 1, __ATOMIC_RELAXED) == 0)
        __atomic_store_n(failed, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(failed, __ATOMIC_RELAXED))
        return br_fail(BR_E_DEVICE, "the device '%s' failed, as a test asked", device->name);
    return BR_OK;
}

br_device_count br_device_counted(const br_device *device) {
    return device->root ? device->root->count : device->count;
}

static br_status open_kind(const char *kind, void *const *stream, br_device **out) {
    *out = NULL;
    if (strcmp(kind, "host") == 0)
        return br_device_host_open(out);
    if (strcmp(kind, "cuda") == 0)
        return br_device_cuda_open(stream, out);
    return br_fail(BR_E_ARG, "device '%s': expected host or cuda", kind);
}

br_status br_device_open(const char *kind, br_device **out) {
    if (kind)
        return open_kind(kind, NULL, out);
    return open_kind("cuda", NULL, out) == BR_OK ? BR_OK : open_kind("host", NULL, out);
}

br_status br_device_open_on(const char *kind, void *stream, br_device **out) {
    return open_kind(kind, &stream, out);
}

br_status br_device_lane_open(br_device *device, br_device **out) {
    *out = NULL;
    BR_TRY(device->op->lane(device, out));
    (*out)->root = root_of(device);
    return BR_OK;
}

void br_device_close(br_device *device) {
    if (device)
        device->op->close(device);
}

int br_device_is_host(const br_device *device) {
    return device->is_host;
}

const char *br_device_name(const br_device *device) {
    return device->name;
}

void *br_device_stream(const br_device *device) {
    return device->stream;
}

br_status br_device_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    BR_ASSERT(!br_mem_is_sealed());
    count(&counts_of(device)->n_alloc, &counts_of(device)->alloc_bytes, bytes);
    return device->op->alloc(device, bytes, what, out);
}

void br_device_free(br_device *device, void *block) {
    if (block)
        device->op->release(device, block);
}

br_status br_device_memory(br_device *device, size_t *bytes_free, size_t *bytes_total) {
    BR_TRY(device->op->memory(device, bytes_free, bytes_total));
    if (pretended_bytes)
        *bytes_free = *bytes_total = pretended_bytes;
    return BR_OK;
}

br_status br_device_upload(br_device *device, void *dst, const void *src, size_t bytes) {
    BR_TRY(check_fault(device));
    count(&counts_of(device)->n_upload, &counts_of(device)->upload_bytes, bytes);
    return device->op->upload(device, dst, src, bytes);
}

br_status br_device_download(br_device *device, void *dst, const void *src, size_t bytes) {
    BR_TRY(check_fault(device));
    count(&counts_of(device)->n_download, &counts_of(device)->download_bytes, bytes);
    return device->op->download(device, dst, src, bytes);
}

br_status br_device_copy(br_device *device, void *dst, const void *src, size_t bytes) {
    BR_TRY(check_fault(device));
    return device->op->copy(device, dst, src, bytes);
}

br_status br_device_wait(br_device *device) {
    BR_TRY(check_fault(device));
    __atomic_fetch_add(&counts_of(device)->n_wait, 1, __ATOMIC_RELAXED);
    return device->op->wait(device);
}

br_status br_mirror_open(br_device *device, size_t bytes, const char *what, br_mirror *out) {
    *out = (br_mirror){0};
    void *block;
    BR_ASSERT(!br_mem_is_sealed());
    count(&counts_of(device)->n_alloc, &counts_of(device)->alloc_bytes, bytes);
    BR_TRY(device->op->locked_alloc(device, bytes, what, &block));
    out->host = block;
    out->device = block;
    out->bytes = bytes;
    if (device->is_host)
        return BR_OK;
    br_status status = device->op->alloc(device, bytes, what, &block);
    out->device = block;
    if (status != BR_OK)
        br_mirror_close(device, out);
    return status;
}

br_status br_mirror_lay_out(br_device *device, br_layout lay_out, void *owner, const char *what, br_mirror *out) {
    BR_TRY(br_mirror_open(device, br_arena_measure(lay_out, owner), what, out));
    br_arena arena = {.base = out->host, .size = out->bytes};
    lay_out(owner, &arena);
    return BR_OK;
}

void br_mirror_close(br_device *device, br_mirror *mirror) {
    if (mirror->device && mirror->device != mirror->host)
        device->op->release(device, mirror->device);
    if (mirror->host)
        device->op->locked_free(device, mirror->host);
    *mirror = (br_mirror){0};
}

br_status br_graph_begin(br_device *device) {
    return device->op->graph_begin(device);
}

br_status br_graph_end(br_device *device, br_graph **out) {
    return device->op->graph_end(device, out);
}

br_status br_graph_break(br_device *device, br_status status) {
    const br_failure failure = br_failure_keep(status);
    br_graph *part = NULL;
    (void)br_graph_end(device, &part);
    br_graph_free(part);
    return br_fail_again(&failure);
}

br_status br_graph_run(br_device *device, br_graph *graph) {
    return device->op->graph_run(device, graph);
}

void br_graph_free(br_graph *graph) {
    if (graph)
        (*(const device_ops *const *)(void *)graph)->graph_free(graph); /* a graph begins with its device's table */
}

static br_status check_mark(int32_t i) {
    return i >= 0 && i < BR_DEVICE_MARKS ? BR_OK : br_fail(BR_E_ARG, "mark %d of a device: expected 0 to %d", i, BR_DEVICE_MARKS - 1);
}

br_status br_device_mark(br_device *device, int32_t i) {
    BR_TRY(check_mark(i));
    return device->op->mark(device, i);
}

br_status br_device_elapsed(br_device *device, int32_t from, int32_t to, double *microseconds) {
    BR_TRY(check_mark(from));
    BR_TRY(check_mark(to));
    return device->op->elapsed(device, from, to, microseconds);
}

br_status br_device_reach(br_device *device, int32_t i) {
    BR_TRY(check_mark(i));
    return device->op->reach(device, i);
}

br_memory_kind br_device_kind_of(br_device *device, const void *at, const void **end) {
    return device->op->kind_of(device, at, end);
}

br_status br_device_export(const void *at, br_ipc *out) {
    return br_device_cuda_export(at, out);
}

br_status br_device_import(br_device *device, const uint8_t handle[BR_IPC_HANDLE_BYTES], void **out, size_t *bytes) {
    return device->op->import(device, handle, out, bytes);
}

void br_device_unimport(br_device *device, void *block) {
    if (block)
        device->op->unimport(device, block);
}

/* ---- views: device_view.h ------------------------------------------------------------------------------------------------- */

br_status br_device_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen) {
    return device->op->place(device, view, src, n, seen);
}

br_status br_device_fill(br_device *device, const br_fill *fill, int32_t n) {
    return device->op->fill(device, fill, n);
}

br_status br_device_check(br_device *device, const br_fill *fill, int32_t n, uint32_t *torn) {
    return device->op->check(device, fill, n, torn);
}

br_status br_device_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen) {
    return device->op->hash(device, view, n, seen);
}
