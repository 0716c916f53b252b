/* bi_cuda_test: what only tests and the kernel lab ask of the CUDA backend.
 *
 * Layer: kernels_batch_invariant. */
#ifndef BI_CUDA_TEST_H
#define BI_CUDA_TEST_H

#include "bi_backend.h"

struct bi_grad;

/* Every byte of the ops' scratch becomes 0xff, in stream order: no op may lean on what another left there. Errors: BR_E_UNSUPPORTED
 * (a build without CUDA), BR_E_DEVICE. */
br_status bi_cuda_poison(const bi_backend *backend);
/* Also that of the forward backend inside. */
br_status bi_grad_cuda_poison(const struct bi_grad *grad);

/* Kernels launched since the backend was opened or the count reset, by name (NULL: all): which ran? A step that is recorded counts once,
 * when it is recorded. */
int64_t bi_cuda_launch_count(const bi_backend *backend, const char *name);
void bi_cuda_launch_reset(const bi_backend *backend);

#endif
