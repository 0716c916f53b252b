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

/* 16 bytes by this thread, and its arrival at a barrier when all of them so far have come. */
static __device__ __forceinline__ void kda_copy16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

static __device__ __forceinline__ void kda_copies_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/* The other way, in groups that the thread which starts them commits; but<N>: all except the last N groups have been read. */
static __device__ __forceinline__ void kda_copy_out(void *dst, uint32_t src, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void kda_copies_out_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void kda_copies_out_but() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void kda_copies_out_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Between using shared memory and letting a bulk copy write or read it. */
static __device__ __forceinline__ void kda_copy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A store that needs no branch: branches around shuffles cost a convergence check each. */
static __device__ __forceinline__ void kda_store_if(float *p, float x, int yes) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p st.global.f32 [%0], %1;\n\t}" ::"l"(p), "f"(x), "r"(yes) : "memory");
}

/* A store whose line leaves the second-level cache before others. */
static __device__ __forceinline__ void kda_store_once(float *p, float4 x) {
    uint64_t first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(first)
                 : "memory");
}

/* An event for a profiler; for anyone else it is an instruction that does nothing, across which the compiler moves none. */
static __device__ __forceinline__ void kda_fence_order() {
    asm volatile("pmevent 1;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void kda_registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void kda_registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
#endif
