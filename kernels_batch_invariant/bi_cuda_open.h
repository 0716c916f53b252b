/* bi_cuda_open: the CUDA backend's door, with bi_cuda_test.h all of it that C code sees.
 *
 * Layer: kernels_batch_invariant. */
#ifndef BI_CUDA_OPEN_H
#define BI_CUDA_OPEN_H

#include "bi_backend.h"
#include "br_device.h"

/* The device stays the caller's and must outlive the backend. Scratch is sized from the limits and taken here. Errors:
 * BR_E_UNSUPPORTED (a build without CUDA, a host device), BR_E_NOMEM, BR_E_DEVICE. */
br_status bi_backend_cuda_open(const bi_limits *limits, br_device *device, bi_backend *out);

/* What the backend found when it was opened, for a log: one line about cuBLASLt, and a second one that warns when its version is another than
 * the one that the table of its configurations was made with. "" of another backend. */
enum { BI_CUDA_NOTE_BYTES = 320 };
void bi_cuda_note(const bi_backend *backend, char note[BI_CUDA_NOTE_BYTES]);

#endif
