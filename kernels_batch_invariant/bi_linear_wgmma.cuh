/* bi_linear_wgmma: the instructions of the streaming form: tensor copies, their barriers, wgmma with both operands in shared
 * memory. Internal to bi_linear_stream.cu. Barriers and tiles are named by 32-bit shared-memory addresses.
 *
 * A tile is rows of 64 elements (128 bytes), eight rows to 1,024 bytes, swizzled by 128 bytes as the tensor copies write it. */
#ifndef BI_LINEAR_WGMMA_CUH
#define BI_LINEAR_WGMMA_CUH

#include <stdint.h>

enum { WGMMA_ATOM = 1024 }; /* bytes of eight rows of a tile */

static __device__ __forceinline__ void stream_barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

/* After init, before anyone else uses a barrier (and a __syncthreads). */
static __device__ __forceinline__ void stream_barrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}

static __device__ __forceinline__ void stream_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void stream_expect(uint32_t barrier, int bytes, uint32_t leader) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0;\n@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;}\n" ::"r"(barrier), "r"(bytes),
                 "r"(leader)
                 : "memory");
}

/* 1 on one thread of a whole warp. */
static __device__ __forceinline__ uint32_t stream_leader() {
    uint32_t leader;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}\n" : "=r"(leader));
    return leader;
}

static __device__ __forceinline__ void stream_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

/* The box of a map at column k of row `row` of matrix `head`, by the leader; what lies outside the tensor becomes zeros. */
static __device__ __forceinline__ void stream_copy(uint32_t to, const void *map, int32_t k, int32_t row, int32_t head, uint32_t barrier,
                                                   uint32_t leader) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %6, 0;\n"
                 "@p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];}\n" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(head), "r"(barrier), "r"(leader)
                 : "memory");
}

/* The same with a say in what the second-level cache does with it. */
static __device__ __forceinline__ void stream_copy_kept(uint32_t to, const void *map, int32_t k, int32_t row, int32_t head, uint32_t barrier,
                                                        uint64_t policy, uint32_t leader) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %7, 0;\n"
                 "@p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;}\n" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(head), "r"(barrier), "l"(policy), "r"(leader)
                 : "memory");
}

/* The same into the second-level cache only. */
static __device__ __forceinline__ void stream_prefetch(const void *map, int32_t k, int32_t row, int32_t head, uint32_t leader) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0;\n"
                 "@p cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];}\n" ::"l"(map),
                 "r"(k), "r"(row), "r"(head), "r"(leader)
                 : "memory");
}

/* First to leave the second-level cache, or as usual. */
static __device__ __forceinline__ uint64_t stream_policy(bool once) {
    uint64_t first, usual;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(usual));
    return once ? first : usual;
}

/* The launch before this one: the next may start while this one runs; everything of the one before is done and seen. */
static __device__ __forceinline__ void stream_let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
static __device__ __forceinline__ void stream_await_before() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

/* The half of a tile's descriptor that names its place, equal in all threads of a warp, and the half that all tiles share. */
static __device__ __forceinline__ uint32_t wgmma_tile(uint32_t shared) {
    return __shfl_sync(0xffffffffu, (shared >> 4 & 0x3fff) | 1u << 16, 0);
}
#define WGMMA_TILE_HIGH "0x40000040"

static __device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int LEFT> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}

/* d (64, 8 N8) += a (64, 16) b (8 N8, 16)^T: fragment n as mma.sync.m16n8k16 lays it out, a warp 16 rows. */
template <int N8> static __device__ __forceinline__ void wgmma(float (*d)[4], uint32_t a, uint32_t b);

#define WGMMA_D1 "%0,%1,%2,%3"
#define WGMMA_D2 WGMMA_D1 ",%4,%5,%6,%7"
#define WGMMA_D3 WGMMA_D2 ",%8,%9,%10,%11"
#define WGMMA_D4 WGMMA_D3 ",%12,%13,%14,%15"
#define WGMMA_D5 WGMMA_D4 ",%16,%17,%18,%19"
#define WGMMA_D6 WGMMA_D5 ",%20,%21,%22,%23"
#define WGMMA_D7 WGMMA_D6 ",%24,%25,%26,%27"
#define WGMMA_D8 WGMMA_D7 ",%28,%29,%30,%31"
#define WGMMA_D9 WGMMA_D8 ",%32,%33,%34,%35"
#define WGMMA_D10 WGMMA_D9 ",%36,%37,%38,%39"
#define WGMMA_D11 WGMMA_D10 ",%40,%41,%42,%43"
#define WGMMA_D12 WGMMA_D11 ",%44,%45,%46,%47"
#define WGMMA_F(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_IO1 WGMMA_F(0)
#define WGMMA_IO2 WGMMA_IO1, WGMMA_F(1)
#define WGMMA_IO3 WGMMA_IO2, WGMMA_F(2)
#define WGMMA_IO4 WGMMA_IO3, WGMMA_F(3)
#define WGMMA_IO5 WGMMA_IO4, WGMMA_F(4)
#define WGMMA_IO6 WGMMA_IO5, WGMMA_F(5)
#define WGMMA_IO7 WGMMA_IO6, WGMMA_F(6)
#define WGMMA_IO8 WGMMA_IO7, WGMMA_F(7)
#define WGMMA_IO9 WGMMA_IO8, WGMMA_F(8)
#define WGMMA_IO10 WGMMA_IO9, WGMMA_F(9)
#define WGMMA_IO11 WGMMA_IO10, WGMMA_F(10)
#define WGMMA_IO12 WGMMA_IO11, WGMMA_F(11)
/* Behind the descriptors: d is added to, no signs, both operands with k innermost. */
#define WGMMA_STEP(N8, N, a_at, b_at)                                                                                  \
    template <> __device__ __forceinline__ void wgmma<N8>(float (*d)[4], uint32_t a, uint32_t b) {                      \
        asm volatile("{.reg .pred p; .reg .b64 x, w; setp.eq.u32 p, 0, 0;\n"                                           \
                     "mov.b64 x, {" a_at ", " WGMMA_TILE_HIGH "}; mov.b64 w, {" b_at ", " WGMMA_TILE_HIGH "};\n"       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_D##N8 "}, x, w, p, 1, 1, 0, 0;}\n" \
                     : WGMMA_IO##N8                                                                                    \
                     : "r"(a), "r"(b));                                                                                \
    }
WGMMA_STEP(2, 16, "%8", "%9")
WGMMA_STEP(3, 24, "%12", "%13")
WGMMA_STEP(4, 32, "%16", "%17")
WGMMA_STEP(6, 48, "%24", "%25")
WGMMA_STEP(7, 56, "%28", "%29")
WGMMA_STEP(8, 64, "%32", "%33")
WGMMA_STEP(10, 80, "%40", "%41")
WGMMA_STEP(12, 96, "%48", "%49")
#undef WGMMA_STEP

#endif
