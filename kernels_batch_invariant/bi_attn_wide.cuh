/* bi_attn_wide: what the wgmma passes of attention share: barriers in shared memory, products of 64 rows.      Contract: N-MMA
 *
 * Internal to bi_attn.cu. A wide kernel is two warpgroups that compute and one that feeds them: the feeders copy latent rows into a ring
 * of stages, `full` counts what has landed, `empty` what the readers are done with.
 * Latent rows land by cp.async, whose arrival at `full` follows their bytes. Between that barrier and the tensor cores there is no fence of
 * the async proxy, which PTX asks for; the bits are the same with one (wide_publish after wide_wait) and without. */
#ifndef BI_ATTN_WIDE_CUH
#define BI_ATTN_WIDE_CUH

#include "bi_attn_parts.cuh"

enum {
    WIDE_GROUP = 128,
    WIDE_THREADS = 3 * WIDE_GROUP,
    WIDE_CHUNK_BYTES = BI_ATT_BLOCK * ATTN_CHUNK * (int)sizeof(bi_bf16), /* 64 latent rows, 64 columns */
    WIDE_ATOM = 1024                                                      /* eight rows of 128 bytes */
};

#ifdef __CUDACC__

static __device__ __forceinline__ void wide_sync(int barrier, int n_thread) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(n_thread) : "memory");
}

/* What this thread stored to shared memory is seen by the tensor cores of whoever it meets at a barrier. */
static __device__ __forceinline__ void wide_publish(void) {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_bar_init(uint64_t *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(attn_shared(bar)), "r"(count) : "memory");
}

static __device__ __forceinline__ void wide_bar_init_done(void) {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}

static __device__ __forceinline__ void wide_arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(attn_shared(bar)) : "memory");
}

/* Arrives when this thread's copies so far have landed. */
static __device__ __forceinline__ void wide_arrive_copied(uint64_t *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(attn_shared(bar)) : "memory");
}

/* Arrives, and the phase ends only when so many bytes of bulk copies have landed too. */
static __device__ __forceinline__ void wide_arrive_expect(uint64_t *bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(attn_shared(bar)), "r"(bytes) : "memory");
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

static __device__ __forceinline__ void wide_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(attn_shared(to)), "l"(from),
                 "r"(bytes), "r"(attn_shared(bar))
                 : "memory");
}

/* A line on its way to the L1; one that is not read does no harm. */
static __device__ __forceinline__ void wide_prefetch(const void *at) {
    asm volatile("prefetch.global.L1 [%0];\n" ::"l"(at));
}

/* Rows of 128 bytes, eights of rows 1,024 bytes apart, units swizzled by 128 bytes: K along a row, or, transposed, M along a row. */
static __device__ __forceinline__ uint64_t wide_matrix(const void *at) {
    return (uint64_t)(attn_shared(at) >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(WIDE_ATOM >> 4) << 32 | (uint64_t)1 << 62;
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

#define WIDE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

/* d (64, 8 * N8) = a (64, 16) x b (8 * N8, 16)^T, plus d where `keep`. TRANS: a lies by columns of 64. */
template <int TRANS>
static __device__ __forceinline__ void wide_mma(float (&d)[12][4], uint64_t a, uint64_t b, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
                 "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "
                 "%48, %49, p, 1, 1, %51, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3), WIDE_D4(4), WIDE_D4(5), WIDE_D4(6), WIDE_D4(7), WIDE_D4(8), WIDE_D4(9),
                   WIDE_D4(10), WIDE_D4(11)
                 : "l"(a), "l"(b), "r"(keep), "n"(TRANS));
}

template <int TRANS>
static __device__ __forceinline__ void wide_mma(float (&d)[4][4], uint64_t a, uint64_t b, int keep) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "%16, %17, p, 1, 1, %19, 0;}\n"
                 : WIDE_D4(0), WIDE_D4(1), WIDE_D4(2), WIDE_D4(3)
                 : "l"(a), "l"(b), "r"(keep), "n"(TRANS));
}
#undef WIDE_D4

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

/* Where a feeding thread reads: its unit of the first chunk in each of four rows; of an absent row nothing, which gives zeros. Rows of
 * thread k are k / 8 + 16i. */
struct wide_rows {
    const unsigned char *from[4];
    uint32_t bytes[4];

    __device__ __forceinline__ void set(const attn_rows &r, const int32_t id[4], int32_t unit) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned char *row = attn_row_at(r, id[i]);
            from[i] = (row ? row : r.cache.base) + unit * 16;
            bytes[i] = row ? 16 : 0;
        }
    }
};

/* Copies a unit of row I of four, CHUNK chunks further on, to the same place behind `to`. */
template <int I, int CHUNK>
static __device__ __forceinline__ void wide_copy(uint32_t to, const wide_rows &rows) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;\n" ::"r"(to), "l"(rows.from[I]), "r"(rows.bytes[I]),
                 "n"(I * 2 * WIDE_ATOM + CHUNK * WIDE_CHUNK_BYTES), "n"(CHUNK * 128)
                 : "memory");
}

/* A block of a class: block b of class c; c >= end: none is left. */
struct wide_place {
    int32_t c, b, end;

    /* Moves on to the first block that exists from (c, b) on. */
    __device__ __forceinline__ void settle(const attn_class *classes, int32_t step) {
        while (c < end && b * BI_ATT_BLOCK >= classes[c].n) {
            c += step;
            b = 0;
        }
    }
    __device__ __forceinline__ int done(void) const {
        return c >= end;
    }
};

#endif
#endif
