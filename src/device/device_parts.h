/* device_parts: the table that each kind of device fills. Internal to src/device. */
#ifndef DEVICE_PARTS_H
#define DEVICE_PARTS_H

#include "device_view.h"

typedef struct device_ops {
    void (*close)(br_device *); /* waits, where the stream is its own */
    br_status (*lane)(br_device *, br_device **out);
    br_status (*alloc)(br_device *, size_t bytes, const char *what, void **out);
    void (*release)(br_device *, void *block);
    br_status (*memory)(br_device *, size_t *bytes_free, size_t *bytes_total);
    br_status (*upload)(br_device *, void *dst, const void *src, size_t bytes);
    br_status (*download)(br_device *, void *dst, const void *src, size_t bytes);
    br_status (*copy)(br_device *, void *dst, const void *src, size_t bytes);
    br_status (*wait)(br_device *);
    br_status (*locked_alloc)(br_device *, size_t bytes, const char *what, void **out); /* host memory for transfers, zeroed */
    void (*locked_free)(br_device *, void *block);
    br_status (*graph_begin)(br_device *);
    br_status (*graph_end)(br_device *, br_graph **out);
    br_status (*graph_run)(br_device *, br_graph *graph);
    void (*graph_free)(br_graph *graph);
    br_status (*mark)(br_device *, int32_t i);
    br_status (*elapsed)(br_device *, int32_t from, int32_t to, double *microseconds);
    br_status (*reach)(br_device *, int32_t i);
    br_memory_kind (*kind_of)(br_device *, const void *at, const void **end);
    br_status (*import)(br_device *, const uint8_t handle[BR_IPC_HANDLE_BYTES], void **out, size_t *bytes);
    void (*unimport)(br_device *, void *block);
    br_status (*place)(br_device *, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen);
    br_status (*fill)(br_device *, const br_fill *fill, int32_t n);
    br_status (*check)(br_device *, const br_fill *fill, int32_t n, uint32_t *torn);
    br_status (*hash)(br_device *, const br_view *view, int32_t n, br_seen *seen);
} device_ops;

struct br_device {
    const device_ops *op;
    br_device *root; /* that this is a lane of; NULL: of none */
    const char *name;
    void *stream;
    int is_host;
    br_device_count count; /* several threads add to it, and set what follows: see br_device.c */
    int failed;            /* by br_device_fail_nth */
};

br_status br_device_host_open(br_device **out);
/* stream NULL: one of its own. In br_device_cuda.cu, or what a build without CUDA says. */
br_status br_device_cuda_open(void *const *stream, br_device **out);
br_status br_device_cuda_export(const void *at, br_ipc *out);

/* device_view_host.c, device_view_cuda.cu */
br_status br_device_host_place(br_device *, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen);
br_status br_device_host_fill(br_device *, const br_fill *fill, int32_t n);
br_status br_device_host_check(br_device *, const br_fill *fill, int32_t n, uint32_t *torn);
br_status br_device_host_hash(br_device *, const br_view *view, int32_t n, br_seen *seen);
br_status br_device_cuda_place(br_device *, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen);
br_status br_device_cuda_fill(br_device *, const br_fill *fill, int32_t n);
br_status br_device_cuda_check(br_device *, const br_fill *fill, int32_t n, uint32_t *torn);
br_status br_device_cuda_hash(br_device *, const br_view *view, int32_t n, br_seen *seen);

#endif
