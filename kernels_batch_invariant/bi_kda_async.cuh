/* bi_kda_async: bulk copies to shared memory, the barriers that they complete, and two more instructions that have no function in
 * CUDA C++. Internal to bi_kda*.cu. Barriers and copies are named by 32-bit shared-memory addresses. */
#ifndef BI_KDA_ASYNC_CUH
#define BI_KDA_ASYNC_CUH
#ifdef __CUDACC__
#include <stdint.h>

static __device__ __forceinline__ uint32_t kda_shared(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void kda_barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* After init, before anyone else uses a barrier (and a __syncthreads). */
static __device__ __forceinline__ void kda_barrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void kda_arrive(uint32_t barrier) {
    asm volatile("{\n\t.reg .b64 t;\n\tmbarrier.arrive.shared.b64 t, [%0];\n\t}" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void kda_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("{\n\t.reg .b64 t;\n\tmbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;\n\t}" ::"r"(barrier), "r"(bytes) : "memory");
}

/* One warp waits for the phase of a parity; one vote keeps its threads together. */
static __device__ __forceinline__ bool kda_passed(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return __all_sync(0xffffffffu, done);
}

static __device__ __forceinline__ void kda_wait(uint32_t barrier, uint32_t parity) {
    while (!kda_passed(barrier, parity))
        ;
}

/* The same for a warp that others must not notice: it sleeps between two looks. */
template <int NANOSECONDS> static __device__ __forceinline__ void kda_wait_asleep(uint32_t barrier, uint32_t parity) {
    while (!kda_passed(barrier, parity))
        __nanosleep(NANOSECONDS);
}

/* bytes a multiple of 16, both addresses too. */
static __device__ __forceinline__ void kda_copy(uint32_t dst, const void *src, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Between reading shared memory and letting a bulk copy write it. */
static __device__ __forceinline__ void kda_copy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A store that needs no branch: branches around shuffles cost a convergence check each. */
static __device__ __forceinline__ void kda_store_if(float *p, float x, int yes) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p st.global.f32 [%0], %1;\n\t}" ::"l"(p), "f"(x), "r"(yes) : "memory");
}

template <int N> static __device__ __forceinline__ void kda_registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void kda_registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
#endif
