/* bi_experts_mma: the tensor-core steps of the routed experts: wgmma with A from registers, and its helpers.
 *
 * acc (64, N) += a (64, 16) x b (16, N), one block of N-MMA an element; rows 16 w .. of it belong to warp w, laid out as
 * mma.sync.m16n8k16 does, eight columns after eight. b: shared memory, core matrices of 8 columns x 16 bytes. */
#ifndef BI_EXPERTS_MMA_CUH
#define BI_EXPERTS_MMA_CUH

#include "bi_cuda.cuh"

/* lead: bytes from the first eight k to the next; group: bytes from eight columns to the next eight. */
static __device__ __forceinline__ uint64_t wgmma_desc(uint32_t shared, uint32_t lead, uint32_t group) {
    return (uint64_t)((shared & 0x3ffffu) >> 4) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(group >> 4) << 32;
}
static __device__ __forceinline__ void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int LEFT> static __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}

#define WGMMA_D16 \
    "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D32 \
    WGMMA_D16 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D48 \
    WGMMA_D32 \
    ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D64 \
    WGMMA_D48 \
    ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D80 \
    WGMMA_D64 \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D96 \
    WGMMA_D80 \
    ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D112 \
    WGMMA_D96 \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D128 \
    WGMMA_D112 \
    ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D136 \
    WGMMA_D128 \
    ", %64, %65, %66, %67"
#define WGMMA_D144 \
    WGMMA_D136 \
    ", %68, %69, %70, %71"
#define WGMMA_D152 \
    WGMMA_D144 \
    ", %72, %73, %74, %75"
#define WGMMA_D160 \
    WGMMA_D152 \
    ", %76, %77, %78, %79"
#define WGMMA_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_8(d, i) WGMMA_4(d, i), WGMMA_4(d, i + 4)
#define WGMMA_IO16(d) WGMMA_8(d, 0)
#define WGMMA_IO32(d) WGMMA_IO16(d), WGMMA_8(d, 8)
#define WGMMA_IO48(d) WGMMA_IO32(d), WGMMA_8(d, 16)
#define WGMMA_IO64(d) WGMMA_IO48(d), WGMMA_8(d, 24)
#define WGMMA_IO80(d) WGMMA_IO64(d), WGMMA_8(d, 32)
#define WGMMA_IO96(d) WGMMA_IO80(d), WGMMA_8(d, 40)
#define WGMMA_IO112(d) WGMMA_IO96(d), WGMMA_8(d, 48)
#define WGMMA_IO128(d) WGMMA_IO112(d), WGMMA_8(d, 56)
#define WGMMA_IO136(d) WGMMA_IO128(d), WGMMA_4(d, 64)
#define WGMMA_IO144(d) WGMMA_IO136(d), WGMMA_4(d, 68)
#define WGMMA_IO152(d) WGMMA_IO144(d), WGMMA_4(d, 72)
#define WGMMA_IO160(d) WGMMA_IO152(d), WGMMA_4(d, 76)
/* The operands behind the accumulators: A, the descriptor, d = a b + d, no sign or transposition. */
#define WGMMA_STEP(N, a0, a1, a2, a3, b)                                                                                       \
    template <> __device__ __forceinline__ void wgmma<N>(float *d, const uint32_t (&a)[4], uint64_t desc) {                     \
        asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0;\n"                                                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_D##N "}, {" a0 ", " a1 ", " a2 ", " a3  \
                     "}, " b ", p, 1, 1, 0;}\n"                                                                                \
                     : WGMMA_IO##N(d)                                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));                                                 \
    }

/* d: N / 2 registers. */
template <int N> static __device__ __forceinline__ void wgmma(float *d, const uint32_t (&a)[4], uint64_t desc);

WGMMA_STEP(16, "%8", "%9", "%10", "%11", "%12")
WGMMA_STEP(32, "%16", "%17", "%18", "%19", "%20")
WGMMA_STEP(48, "%24", "%25", "%26", "%27", "%28")
WGMMA_STEP(64, "%32", "%33", "%34", "%35", "%36")
WGMMA_STEP(80, "%40", "%41", "%42", "%43", "%44")
WGMMA_STEP(96, "%48", "%49", "%50", "%51", "%52")
WGMMA_STEP(112, "%56", "%57", "%58", "%59", "%60")
WGMMA_STEP(128, "%64", "%65", "%66", "%67", "%68")
WGMMA_STEP(136, "%68", "%69", "%70", "%71", "%72")
WGMMA_STEP(144, "%72", "%73", "%74", "%75", "%76")
WGMMA_STEP(152, "%76", "%77", "%78", "%79", "%80")
WGMMA_STEP(160, "%80", "%81", "%82", "%83", "%84")

#undef WGMMA_STEP
#undef WGMMA_8
#undef WGMMA_4
#undef WGMMA_D16
#undef WGMMA_IO16
#undef WGMMA_D32
#undef WGMMA_IO32
#undef WGMMA_D48
#undef WGMMA_IO48
#undef WGMMA_D64
#undef WGMMA_IO64
#undef WGMMA_D80
#undef WGMMA_IO80
#undef WGMMA_D96
#undef WGMMA_IO96
#undef WGMMA_D112
#undef WGMMA_IO112
#undef WGMMA_D128
#undef WGMMA_IO128
#undef WGMMA_D136
#undef WGMMA_IO136
#undef WGMMA_D144
#undef WGMMA_IO144
#undef WGMMA_D152
#undef WGMMA_IO152
#undef WGMMA_D160
#undef WGMMA_IO160

#endif
