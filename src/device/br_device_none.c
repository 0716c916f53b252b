/* A build without CUDA: asking for its device is answered with a sentence. */
#include "device_parts.h"

br_status br_device_cuda_export(const void *at, br_ipc *out) {
    (void)at;
    *out = (br_ipc){0};
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: no memory of a GPU can be shared");
}

br_status br_device_cuda_open(void *const *stream, br_device **out) {
    (void)stream;
    *out = NULL;
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: " NO_CUDA_REASON);
}
