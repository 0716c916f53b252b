/* A build without CUDA: asking for its device is answered with a sentence. */
#include "device_parts.h"

br_status br_device_cuda_open(void *const *stream, br_device **out) {
    (void)stream;
    *out = NULL;
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: no nvcc was found when it was configured");
}
