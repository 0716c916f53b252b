/* The rate at which a GPU reads: 16 bytes a thread, four in flight, nothing written but what never happens. */
#include <cuda_runtime.h>
#include <stdint.h>

enum { THREADS = 512, BLOCKS = 132 * 4, UNROLL = 4 };

static __global__ void __launch_bounds__(THREADS) read_all(const uint4 *at, size_t n, uint32_t *never) {
    const size_t stride = (size_t)gridDim.x * THREADS;
    uint32_t x = 0;
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * stride < n; i += UNROLL * stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            v[k] = at[i + k * stride];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += stride)
        x ^= at[i].x;
    if (x == 0x12345678u && never)
        *never = x;
}

extern "C" void gpu_read_all(const void *at, size_t n, void *stream) {
    read_all<<<BLOCKS, THREADS, 0, (cudaStream_t)stream>>>((const uint4 *)at, n / sizeof(uint4), (uint32_t *)at);
}
