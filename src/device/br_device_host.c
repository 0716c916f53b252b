/* The host as a device: its memory is ours, everything happens at the call; see br_device.h. */
#include "device_parts.h"

#include "br_mem.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct host_device {
    br_device base;
    double mark[BR_DEVICE_MARKS]; /* microseconds of a clock that only rises */
} host_device;

static void host_close(br_device *device) {
    br_mem_free(device);
}

static br_status host_lane(br_device *device, br_device **out) {
    (void)device;
    return br_device_host_open(out);
}

static br_status host_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    (void)device;
    return br_mem_alloc(out, bytes, what);
}

static void host_free(br_device *device, void *block) {
    (void)device;
    br_mem_free(block);
}

static br_status host_memory(br_device *device, size_t *bytes_free, size_t *bytes_total) {
    (void)device;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *bytes_free = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    *bytes_total = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    return BR_OK;
}

static br_status host_copy(br_device *device, void *dst, const void *src, size_t bytes) {
    (void)device;
    if (dst != src)
        memcpy(dst, src, bytes);
    return BR_OK;
}

static br_status host_nothing(br_device *device) {
    (void)device;
    return BR_OK;
}

static br_status host_graph_end(br_device *device, br_graph **out) {
    (void)device;
    *out = NULL;
    return BR_OK;
}

static br_status host_graph_run(br_device *device, br_graph *graph) {
    (void)device;
    (void)graph;
    return br_fail(BR_E_ARG, "a host device has no recorded steps");
}

static void host_graph_free(br_graph *graph) {
    (void)graph;
}

static br_status host_mark(br_device *device, int32_t i) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((host_device *)device)->mark[i] = 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
    return BR_OK;
}

static br_status host_elapsed(br_device *device, int32_t from, int32_t to, double *microseconds) {
    const host_device *host = (const host_device *)device;
    *microseconds = host->mark[to] - host->mark[from];
    return BR_OK;
}

static br_status host_reach(br_device *device, int32_t i) {
    (void)device;
    (void)i;
    return BR_OK;
}

static br_memory_kind host_kind_of(br_device *device, const void *at, const void **end) {
    (void)device;
    *end = (const char *)at + 1;
    return BR_MEMORY_HOST;
}

static br_status host_import(br_device *device, const uint8_t handle[BR_IPC_HANDLE_BYTES], void **out, size_t *bytes) {
    (void)device;
    (void)handle;
    *out = NULL;
    *bytes = 0;
    return br_fail(BR_E_UNSUPPORTED, "a host device has no GPU memory to share with another process");
}

static void host_unimport(br_device *device, void *block) {
    (void)device;
    (void)block;
}

static const device_ops HOST_OPS = {
    .close = host_close,
    .lane = host_lane,
    .alloc = host_alloc,
    .release = host_free,
    .memory = host_memory,
    .upload = host_copy,
    .download = host_copy,
    .copy = host_copy,
    .wait = host_nothing,
    .locked_alloc = host_alloc,
    .locked_free = host_free,
    .graph_begin = host_nothing,
    .graph_end = host_graph_end,
    .graph_run = host_graph_run,
    .graph_free = host_graph_free,
    .mark = host_mark,
    .elapsed = host_elapsed,
    .reach = host_reach,
    .kind_of = host_kind_of,
    .import = host_import,
    .unimport = host_unimport,
    .place = br_device_host_place,
    .fill = br_device_host_fill,
    .check = br_device_host_check,
    .hash = br_device_host_hash,
};

br_status br_device_host_open(br_device **out) {
    host_device *host = NULL;
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host, "the host device"));
    host->base = (br_device){.op = &HOST_OPS, .name = "host", .is_host = 1};
    *out = &host->base;
    return BR_OK;
}
