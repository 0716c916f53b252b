/* bi_attn_wide: what the wide form of attention is made of: barriers in shared memory, products of 64 rows.      Contract: N-MMA
 *
 * Internal to bi_attn.cu. Latent rows land by cp.async, whose arrival at a barrier follows their bytes; whoever has waited there, and is to
 * have the tensor cores read them, fences (wide_proxy_fence) before. */
#ifndef BI_ATTN_WIDE_CUH
#define BI_ATTN_WIDE_CUH

#include "bi_attn_parts.cuh"

enum {
    WIDE_GROUP = 128,
    WIDE_CHUNK_BYTES = BI_ATT_BLOCK * ATTN_CHUNK * (int)sizeof(bi_bf16), /* 64 latent rows, 64 columns */
    WIDE_ATOM = 1024                                                      /* eight rows of 128 bytes */
};

#ifdef __CUDACC__

static __device__ __forceinline__ void wide_sync(int barrier, int n_thread) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(n_thread) : "memory");
}

/* What others stored to shared memory, and this thread has waited for, is seen by the tensor cores too. */
static __device__ __forceinline__ void wide_proxy_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_bar_init(uint64_t *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(attn_shared(bar)), "r"(count) : "memory");
}

static __device__ __forceinline__ void wide_bar_init_done(void) {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(attn_shared(bar)) : "memory");
}

/* Arrives when this thread's copies so far have landed. */
static __device__ __forceinline__ void wide_arrive_copied(uint64_t *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(attn_shared(bar)) : "memory");
}

static __device__ __forceinline__ void wide_wait(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}\n"
                     : "=r"(done)
                     : "r"(attn_shared(bar)), "r"(parity)
                     : "memory");
    } while (!done);
}

/* The low half of a matrix descriptor; the high half is WIDE_MATRIX_HIGH. Rows of 128 bytes, eights of rows 1,024 bytes apart, units swizzled
 * by 128 bytes: K along a row, or, transposed, M along a row. Sums with it are made anew where they are used: kept, they would fill the
 * registers. */
static __device__ __forceinline__ uint32_t wide_matrix(const void *at) {
    uint32_t low = (attn_shared(at) >> 4 & 0x3fff) | 1u << 16;
    asm volatile("" : "+r"(low));
    return low;
}

static __device__ __forceinline__ void wide_mma_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_mma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int N>
static __device__ __forceinline__ void wide_mma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

#define WIDE_MATRIX_HIGH (1u << 30 | WIDE_ATOM >> 4)
#define WIDE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

/* d (64, 8 * N8) = a (64, 16) x b (8 * N8, 16)^T, plus d where `keep`. TRANS: a lies by columns of 64. */
template <int TRANS>
static __device__ __forceinline__ void wide_mma(float (&d)[6][4], uint32_t a, uint32_t b, int keep) {
    asm volatile("{.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %26, 0;\nmov.b64 a, {%24, %28};\nmov.b64 b, {%25, %28};\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, "
                 "a, b, p, 1, 1, %27, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3), WIDE_D4(4), WIDE_D4(5)
                 : "r"(a), "r"(b), "r"(keep), "n"(TRANS), "n"(WIDE_MATRIX_HIGH));
}

template <int TRANS>
static __device__ __forceinline__ void wide_mma(float (&d)[4][4], uint32_t a, uint32_t b, int keep) {
    asm volatile("{.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\nmov.b64 a, {%16, %20};\nmov.b64 b, {%17, %20};\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "a, b, p, 1, 1, %19, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3)
                 : "r"(a), "r"(b), "r"(keep), "n"(TRANS), "n"(WIDE_MATRIX_HIGH));
}
#undef WIDE_D4
#undef WIDE_MATRIX_HIGH

static __device__ __forceinline__ uint32_t wide_pair(float low, float high) {
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

/* Four 8 x 8 matrices of a warp, transposed: lane 8m + i gives where column i of matrix m goes, 16 bytes. */
static __device__ __forceinline__ void wide_store_trans(void *at, const uint32_t x[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(attn_shared(at)), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3])
                 : "memory");
}

/* An 8 x 8 matrix of a warp, transposed. */
static __device__ __forceinline__ uint32_t wide_transpose(uint32_t x) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(out) : "r"(x));
    return out;
}

/* Where a feeding thread reads: its unit of the first chunk in each of four rows, or, of an absent row, no bytes, which gives zeros. Rows of
 * thread k are k / 8 + 16i. */
struct wide_rows {
    const unsigned char *from[4];
    uint32_t bytes[4];
};

/* Copies a unit of each of four rows, CHUNK chunks further on, to the same place of chunk CHUNK behind `to`. */
template <int CHUNK>
static __device__ __forceinline__ void wide_copy(uint32_t to, const wide_rows &rows) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("cp.async.cg.shared.global [%0], [%1 + %3], 16, %2;\n" ::"r"(to + (uint32_t)(i * 2 * WIDE_ATOM + CHUNK * WIDE_CHUNK_BYTES)),
                     "l"(rows.from[i]), "r"(rows.bytes[i]), "n"(CHUNK * 128)
                     : "memory");
}

#endif
#endif
