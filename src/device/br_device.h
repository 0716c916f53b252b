/* br_device: where the ops' memory lives: allocated once, filled and read in order, steps recorded and played again.
 *
 * Layer: device; includes base. Two kinds, one interface: "host", where device memory is host memory and everything happens
 * at the call, and "cuda", where it is the memory of one GPU and everything happens in the order of one stream; what has to run beside
 * that goes to lanes. It knows no tensor and no op. Nothing here allocates after open but the calls named alloc, graph and lane.
 *
 * Errors of the device itself are BR_E_DEVICE. A lost device fails every later call with it; a call that is only refused, as a launch or
 * a copy of a wrong size is, fails alone, and what was queued before it goes on: whoever keeps such a device waits before he touches host
 * memory that it reads or writes. Freeing and closing a mirror wait for the device's stream, not for its lanes. */
#ifndef BR_DEVICE_H
#define BR_DEVICE_H

#include "br_status.h"
#include <stddef.h>

struct br_arena; /* of br_mem.h, which is not installed */
typedef struct br_device br_device;
typedef struct br_graph br_graph; /* a recorded step */

/* kind: "host", "cuda", or NULL: cuda where a usable GPU is, else host. BR_E_UNSUPPORTED: this build has no CUDA, or the GPU is of
 * another architecture than sm_90; BR_E_DEVICE: no GPU; BR_E_ARG: another name. */
br_status br_device_open(const char *kind, br_device **out);
/* The same, on a stream of the caller's (a cudaStream_t; a host device ignores it), which outlives the device: for callers whose other
 * work lies on it. kind is not NULL. */
br_status br_device_open_on(const char *kind, void *stream, br_device **out);
/* A second order of calls on the same device: what goes to the lane runs beside the device's stream and beside other lanes; only waits and
 * marks of the lane itself say that it is done, and what it reads has to be there, as after br_device_wait. Its memory, counts and failures
 * are the device's. Closed before the device; closing it waits for what it still does. On a host device everything happens at the call. */
br_status br_device_lane_open(br_device *device, br_device **out);
void br_device_close(br_device *device); /* a lane too; NULL is a no-op */
int br_device_is_host(const br_device *device);
const char *br_device_name(const br_device *device); /* "host", or the GPU's name */

/* Zeroed, 256-byte aligned. BR_E_NOMEM: the sentence has the bytes wanted and the bytes free. Not while this thread is sealed (br_mem.h):
 * a step allocates nothing, on a GPU neither. */
br_status br_device_alloc(br_device *device, size_t bytes, const char *what, void **out);
void br_device_free(br_device *device, void *block); /* NULL is a no-op */
br_status br_device_memory(br_device *device, size_t *bytes_free, size_t *bytes_total);

/* In stream order. The host side must stay as it is until br_device_wait returns, which says that all before it is done. On a
 * host device a copy onto itself is a no-op. */
br_status br_device_upload(br_device *device, void *dst, const void *src, size_t bytes);
br_status br_device_download(br_device *device, void *dst, const void *src, size_t bytes);
br_status br_device_copy(br_device *device, void *dst, const void *src, size_t bytes);
br_status br_device_wait(br_device *device);

/* What was asked of a device since it was opened, the same on every kind: calls and their bytes. Memory is that of the device, a mirror's
 * too; what a recorded step does again is not counted. */
typedef struct br_device_count {
    int64_t n_download, download_bytes, n_upload, upload_bytes, n_alloc, alloc_bytes, n_wait;
} br_device_count;
br_device_count br_device_counted(const br_device *device);

/* One block seen from both sides at equal offsets; one and the same memory on a host device, page-locked on the host's side
 * on any other. */
typedef struct br_mirror {
    unsigned char *host, *device;
    size_t bytes;
} br_mirror;
br_status br_mirror_open(br_device *device, size_t bytes, const char *what, br_mirror *out);
/* As large as lay_out (br_layout of br_mem.h) asks for, which then lays out the host's side. */
br_status br_mirror_lay_out(br_device *device, void (*lay_out)(void *owner, struct br_arena *arena), void *owner, const char *what, br_mirror *out);
void br_mirror_close(br_device *device, br_mirror *mirror);
/* The device's address of what lies at `host` inside the mirror. */
static inline void *br_mirror_at(const br_mirror *mirror, const void *host) {
    return mirror->device + ((const unsigned char *)host - mirror->host);
}

/* Between begin and end calls are recorded instead of run. A host device records nothing: *out is NULL, and the caller runs the
 * step itself. */
br_status br_graph_begin(br_device *device);
br_status br_graph_end(br_device *device, br_graph **out);
/* Ends a recording in which a call failed with `status`. Returns `status`, with that call's sentence: ending such a recording may fail as well,
 * and says less. */
br_status br_graph_break(br_device *device, br_status status);
br_status br_graph_run(br_device *device, br_graph *graph);
void br_graph_free(br_graph *graph); /* NULL is a no-op */

/* Time on the device: mark i, 0..15, is set when all before it in stream order is done. elapsed waits for both marks; `from` and
 * `to` were set before. Not between begin and end. BR_E_ARG: another mark. */
enum { BR_DEVICE_MARKS = 16 };
br_status br_device_mark(br_device *device, int32_t i);
br_status br_device_elapsed(br_device *device, int32_t from, int32_t to, double *microseconds);
/* Waits until all before mark i is done; one that was never set is done. */
br_status br_device_reach(br_device *device, int32_t i);

/* What an address is to this device, and all from there to *end, as far as that is known; to a host device all are BR_MEMORY_HOST. */
typedef enum br_memory_kind {
    BR_MEMORY_HOST,   /* a copy of it is a copy by the processor first */
    BR_MEMORY_LOCKED, /* host memory that the device reads by itself */
    BR_MEMORY_DEVICE
} br_memory_kind;
br_memory_kind br_device_kind_of(br_device *device, const void *at, const void **end);

/* Device memory of another process of the same machine, from its base on, and how many bytes of it are there; its owner keeps it until
 * unimport. BR_E_UNSUPPORTED: a host device; BR_E_NOT_FOUND: nobody's, or it cannot be reached from this GPU. */
br_status br_device_export(const void *at, br_ipc *out); /* see br_ipc_export */
br_status br_device_import(br_device *device, const uint8_t handle[BR_IPC_HANDLE_BYTES], void **out, size_t *bytes);
void br_device_unimport(br_device *device, void *block); /* NULL is a no-op */

void *br_device_stream(const br_device *device); /* a cudaStream_t; NULL on a host device */

/* For tests, of the whole process. The n-th upload, download, copy or wait from now (1 = next) fails, and all later ones of that device, as
 * those of a lost GPU do; 0 switches it off, for devices that have not failed. And: every device says that so many bytes are there and free;
 * 0: what is true. */
void br_device_fail_nth(long n);
void br_device_pretend_memory(size_t bytes);

#endif
