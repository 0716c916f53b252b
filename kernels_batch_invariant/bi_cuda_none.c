/* A build without CUDA: asking for its backend is answered with a sentence. */
#include "bi_cuda_open.h"
#include "bi_cuda_test.h"
#include "bi_grad.h"

br_status bi_backend_cuda_open(const bi_limits *limits, br_device *device, bi_backend *out) {
    (void)limits;
    (void)device;
    *out = (bi_backend){NULL, NULL};
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: " NO_CUDA_REASON);
}

br_status bi_grad_cuda_open(const bi_limits *limits, br_device *device, bi_grad *out) {
    (void)limits;
    (void)device;
    *out = (bi_grad){NULL, NULL};
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: " NO_CUDA_REASON);
}

void bi_cuda_note(const bi_backend *backend, char note[BI_CUDA_NOTE_BYTES]) {
    (void)backend;
    note[0] = 0;
}

int64_t bi_cuda_launch_count(const bi_backend *backend, const char *name) {
    (void)backend;
    (void)name;
    return 0;
}

void bi_cuda_launch_reset(const bi_backend *backend) {
    (void)backend;
}

br_status bi_cuda_poison(const bi_backend *backend) {
    (void)backend;
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: no scratch of it to poison");
}

br_status bi_grad_cuda_poison(const bi_grad *grad) {
    (void)grad;
    return br_fail(BR_E_UNSUPPORTED, "this build has no CUDA: no scratch of it to poison");
}
