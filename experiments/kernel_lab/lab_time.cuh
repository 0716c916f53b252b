/* What lab_digest and lab_index share: errors that end the program, numbers from counters, reads alone, medians of launches. Layer: experiments. */
#ifndef LAB_TIME_CUH
#define LAB_TIME_CUH

#include <algorithm>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

static void need(cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

static __host__ __device__ uint64_t mixed(uint64_t x) {
    x = (x + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* n units of 16 bytes; never: where a result goes that nobody has, so that the reads stay. */
static __global__ void __launch_bounds__(512) read_all(const uint4 *at, size_t n, uint32_t *never) {
    const size_t stride = (size_t)gridDim.x * 512;
    uint32_t x = 0;
    for (size_t i = (size_t)blockIdx.x * 512 + threadIdx.x; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = at[i + k * stride];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678u && never)
        *never = x;
}

/* Median of n times in microseconds, behind two that are not counted; before() is not timed. */
template <class B, class F> static double time_of(int n, B before, F launch) {
    cudaEvent_t begin, end;
    std::vector<double> us((size_t)n);
    need(cudaEventCreate(&begin), "event");
    need(cudaEventCreate(&end), "event");
    for (int i = -2; i < n; i++) {
        float ms;
        before();
        need(cudaEventRecord(begin), "event");
        launch();
        need(cudaGetLastError(), "launch");
        need(cudaEventRecord(end), "event");
        need(cudaEventSynchronize(end), "running");
        need(cudaEventElapsedTime(&ms, begin, end), "event");
        us[(size_t)(i < 0 ? 0 : i)] = 1e3 * ms;
    }
    need(cudaEventDestroy(begin), "event");
    need(cudaEventDestroy(end), "event");
    std::sort(us.begin(), us.end());
    return us[(size_t)n / 2];
}

#endif
