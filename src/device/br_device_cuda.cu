/* One GPU as a device: memory, one stream, recorded steps; see br_device.h.
 *
 * Every call goes to one stream, its own (non-blocking) or the caller's, so that order is the order of calls; a lane is a device with a
 * stream of its own. The error of a lost device is sticky: CUDA keeps returning it, and so do we. Any other is of one call. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>
#define _Noreturn [[noreturn]]
extern "C" {
#include "br_mem.h"
#include "device_parts.h"
}

struct br_graph {
    const device_ops *op; /* first: br_graph_free finds it there */
    cudaGraphExec_t exec;
};

typedef struct cuda_device {
    br_device base;
    cudaStream_t stream;
    int owns_stream;
    cudaEvent_t mark[BR_DEVICE_MARKS]; /* NULL: never set */
    char name[256];
} cuda_device;

static br_status check(cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return BR_OK;
    cudaGetLastError(); /* forgets what is not sticky, or the next launch would be blamed for it */
    return br_fail(BR_E_DEVICE, "the GPU failed at %s: %s", what, cudaGetErrorString(error));
}

static cudaStream_t stream_of(const br_device *device) {
    return ((const cuda_device *)device)->stream;
}

static void cuda_close(br_device *device) {
    for (int i = 0; i < BR_DEVICE_MARKS; i++)
        if (((cuda_device *)device)->mark[i])
            cudaEventDestroy(((cuda_device *)device)->mark[i]);
    if (((cuda_device *)device)->owns_stream) {
        cudaStreamSynchronize(stream_of(device));
        cudaStreamDestroy(stream_of(device));
    }
    br_mem_free(device);
}

static br_status cuda_memory(br_device *device, size_t *bytes_free, size_t *bytes_total) {
    (void)device;
    return check(cudaMemGetInfo(bytes_free, bytes_total), "asking for its memory");
}

static br_status cuda_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    *out = NULL;
    cudaError_t error = cudaMalloc(out, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        size_t bytes_free = 0, bytes_total = 0;
        cudaGetLastError(); /* this error is not sticky, but is remembered */
        BR_TRY(cuda_memory(device, &bytes_free, &bytes_total));
        return br_fail(BR_E_NOMEM, "%s: %zu bytes of GPU memory wanted, %zu of %zu are free", what, bytes, bytes_free, bytes_total);
    }
    BR_TRY(check(error, "allocating"));
    br_status status = check(cudaMemsetAsync(*out, 0, bytes, stream_of(device)), "clearing memory");
    if (status != BR_OK) {
        cudaFree(*out);
        *out = NULL;
    }
    return status;
}

static void cuda_free(br_device *device, void *block) {
    cudaStreamSynchronize(stream_of(device));
    cudaFree(block);
}

static br_status cuda_upload(br_device *device, void *dst, const void *src, size_t bytes) {
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, stream_of(device)), "an upload");
}

static br_status cuda_download(br_device *device, void *dst, const void *src, size_t bytes) {
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream_of(device)), "a download");
}

static br_status cuda_copy(br_device *device, void *dst, const void *src, size_t bytes) {
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream_of(device)), "a copy");
}

static br_status cuda_wait(br_device *device) {
    return check(cudaStreamSynchronize(stream_of(device)), "a step");
}

static br_status cuda_locked_alloc(br_device *device, size_t bytes, const char *what, void **out) {
    (void)device;
    *out = NULL;
    cudaError_t error = cudaMallocHost(out, bytes ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return br_fail(BR_E_NOMEM, "%s: %zu bytes of page-locked memory are not to be had", what, bytes);
    }
    BR_TRY(check(error, "allocating page-locked memory"));
    memset(*out, 0, bytes);
    return BR_OK;
}

static void cuda_locked_free(br_device *device, void *block) {
    cudaStreamSynchronize(stream_of(device));
    cudaFreeHost(block);
}

static br_status cuda_graph_begin(br_device *device) {
    return check(cudaStreamBeginCapture(stream_of(device), cudaStreamCaptureModeRelaxed), "recording a step");
}

static const device_ops *cuda_ops(void);

static br_status cuda_graph_end(br_device *device, br_graph **out) {
    cudaGraph_t graph;
    *out = NULL;
    BR_TRY(check(cudaStreamEndCapture(stream_of(device), &graph), "recording a step"));
    br_graph *made = NULL;
    const char *phase = br_mem_exempt_begin(); /* once a shape, inside the first step that has it */
    br_status status = br_mem_alloc((void **)&made, sizeof *made, "a recorded step");
    br_mem_exempt_end(phase);
    if (status == BR_OK)
        status = check(cudaGraphInstantiate(&made->exec, graph, 0), "preparing a recorded step");
    cudaGraphDestroy(graph);
    if (status != BR_OK) {
        br_mem_free(made);
        return status;
    }
    made->op = cuda_ops();
    *out = made;
    return BR_OK;
}

static br_status cuda_graph_run(br_device *device, br_graph *graph) {
    return check(cudaGraphLaunch(graph->exec, stream_of(device)), "playing a recorded step");
}

static void cuda_graph_free(br_graph *graph) {
    cudaGraphExecDestroy(graph->exec);
    br_mem_free(graph);
}

static br_status cuda_mark(br_device *device, int32_t i) {
    cudaEvent_t *mark = &((cuda_device *)device)->mark[i];
    if (!*mark)
        BR_TRY(check(cudaEventCreate(mark), "making a mark"));
    return check(cudaEventRecord(*mark, stream_of(device)), "a mark");
}

static br_status cuda_elapsed(br_device *device, int32_t from, int32_t to, double *microseconds) {
    const cudaEvent_t *mark = ((const cuda_device *)device)->mark;
    float milliseconds = 0;
    if (!mark[from] || !mark[to])
        return br_fail(BR_E_ARG, "marks %d and %d of a device: expected both to be set", from, to);
    BR_TRY(check(cudaEventSynchronize(mark[from]), "waiting for a mark"));
    BR_TRY(check(cudaEventSynchronize(mark[to]), "waiting for a mark"));
    BR_TRY(check(cudaEventElapsedTime(&milliseconds, mark[from], mark[to]), "reading a mark"));
    *microseconds = 1e3 * (double)milliseconds;
    return BR_OK;
}

static br_status cuda_reach(br_device *device, int32_t i) {
    const cudaEvent_t mark = ((const cuda_device *)device)->mark[i];
    return mark ? check(cudaEventSynchronize(mark), "waiting for a mark") : BR_OK;
}

/* The allocation on a GPU that an address lies in. */
static int range_of(const void *at, uintptr_t *base, size_t *bytes) {
    typedef int (*address_range)(unsigned long long *base, size_t *bytes, unsigned long long at);
    cudaDriverEntryPointQueryResult found;
    unsigned long long start = 0;
    void *range = NULL;
    if (cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess || ((address_range)range)(&start, bytes, (uintptr_t)at) != 0) {
        cudaGetLastError();
        return 0;
    }
    *base = (uintptr_t)start;
    return 1;
}

static br_memory_kind cuda_kind_of(br_device *device, const void *at, const void **end) {
    cudaPointerAttributes attributes;
    uintptr_t base;
    size_t bytes;
    (void)device;
    *end = (const char *)at + 1;
    if (cudaPointerGetAttributes(&attributes, at) != cudaSuccess) {
        cudaGetLastError();
        return BR_MEMORY_HOST;
    }
    if (attributes.type == cudaMemoryTypeDevice && range_of(at, &base, &bytes))
        *end = (const void *)(base + bytes);
    return attributes.type == cudaMemoryTypeDevice ? BR_MEMORY_DEVICE : attributes.type == cudaMemoryTypeHost ? BR_MEMORY_LOCKED : BR_MEMORY_HOST;
}

/* ---- memory that two processes share ---------------------------------------------------------------------------------------- */

static br_status cuda_import(br_device *device, const uint8_t handle[BR_IPC_HANDLE_BYTES], void **out, size_t *bytes) {
    cudaIpcMemHandle_t memory;
    uintptr_t base;
    static_assert(sizeof memory == BR_IPC_HANDLE_BYTES, "a handle is CUDA's");
    (void)device;
    *out = NULL;
    *bytes = 0;
    memcpy(&memory, handle, sizeof memory);
    const cudaError_t error = cudaIpcOpenMemHandle(out, memory, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
        cudaGetLastError(); /* what a peer sends does no harm to this device */
        *out = NULL;
        return br_fail(BR_E_NOT_FOUND, "GPU memory of another process cannot be opened: %s", cudaGetErrorString(error));
    }
    if (range_of(*out, &base, bytes)) {
        *bytes -= (uintptr_t)*out - base; /* the handle may be of a part of what the driver maps */
        return BR_OK;
    }
    cudaIpcCloseMemHandle(*out);
    *out = NULL;
    *bytes = 0;
    return br_fail(BR_E_NOT_FOUND, "GPU memory of another process was opened, but the driver does not say how large it is");
}

static void cuda_unimport(br_device *device, void *block) {
    cudaStreamSynchronize(stream_of(device));
    cudaIpcCloseMemHandle(block);
}

/* A handle is of the whole allocation, whose base the driver knows. */
extern "C" br_status br_device_cuda_export(const void *at, br_ipc *out) {
    cudaIpcMemHandle_t memory;
    uintptr_t base;
    size_t bytes;
    memset(out, 0, sizeof *out);
    if (!range_of(at, &base, &bytes))
        return br_fail(BR_E_NOT_FOUND, "the address is no memory of a GPU: only that can be shared with another process");
    const cudaError_t error = cudaIpcGetMemHandle(&memory, (void *)base);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return br_fail(BR_E_UNSUPPORTED, "this GPU memory cannot be shared with another process: %s", cudaGetErrorString(error));
    }
    memcpy(out->handle, &memory, sizeof memory);
    out->offset = (uintptr_t)at - base;
    return BR_OK;
}

static br_status cuda_lane(br_device *device, br_device **out);

static const device_ops *cuda_ops(void) {
    static const device_ops OPS = {
        cuda_close, cuda_lane, cuda_alloc, cuda_free, cuda_memory, cuda_upload, cuda_download, cuda_copy, cuda_wait,
        cuda_locked_alloc, cuda_locked_free, cuda_graph_begin, cuda_graph_end, cuda_graph_run, cuda_graph_free,
        cuda_mark, cuda_elapsed, cuda_reach, cuda_kind_of, cuda_import, cuda_unimport,
        br_device_cuda_place, br_device_cuda_fill, br_device_cuda_check, br_device_cuda_hash,
    };
    return &OPS;
}

/* stream NULL: one of its own. */
static br_status make(const char *name, void *const *stream, br_device **out) {
    cuda_device *device = NULL;
    BR_TRY(br_mem_alloc((void **)&device, sizeof *device, "the CUDA device"));
    snprintf(device->name, sizeof device->name, "%s", name);
    br_status status = BR_OK;
    if (stream)
        device->stream = (cudaStream_t)*stream;
    else
        status = check(cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking), "opening a stream");
    device->owns_stream = !stream;
    if (status != BR_OK) {
        br_mem_free(device);
        return status;
    }
    device->base.op = cuda_ops();
    device->base.name = device->name;
    device->base.stream = device->stream;
    *out = &device->base;
    return BR_OK;
}

static br_status cuda_lane(br_device *device, br_device **out) {
    return make(device->name, NULL, out);
}

/* Without a driver CUDA speaks of its version, 0: nobody has to upgrade then. */
static br_status no_device(cudaError_t error) {
    int version = -1;
    if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&version) == cudaSuccess && version == 0)
        return br_fail(BR_E_DEVICE, "no CUDA device: there is no NVIDIA driver here");
    return br_fail(BR_E_DEVICE, "no CUDA device: %s", cudaGetErrorString(error));
}

extern "C" br_status br_device_cuda_open(void *const *stream, br_device **out) {
    cudaDeviceProp prop;
    *out = NULL;
    cudaError_t error = cudaGetDeviceProperties(&prop, 0);
    if (error != cudaSuccess)
        return no_device(error);
    if (prop.major != 9 || prop.minor != 0)
        return br_fail(BR_E_UNSUPPORTED, "%s has compute capability %d.%d: the kernels are for 9.0 (H100, H200)", prop.name, prop.major,
                       prop.minor);
    return make(prop.name, stream, out);
}
