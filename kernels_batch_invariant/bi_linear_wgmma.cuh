/* bi_linear_wgmma: the instructions of the streaming and the wide form: tensor copies, their barriers, wgmma with both operands in
 * shared memory. Internal to bi_linear_*.cu and bi_head.cu. Barriers and tiles are named by 32-bit shared-memory addresses.
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

/* The same into this block and the other of its pair, at the same place of both, and counted by the barriers of both. */
static __device__ __forceinline__ void stream_copy_both(uint32_t to, const void *map, int32_t k, int32_t row, int32_t head, uint32_t barrier,
                                                        uint32_t leader) {
    asm volatile("{.reg .pred p; .reg .b16 both; setp.ne.u32 p, %6, 0; mov.b16 both, 3;\n"
                 "@p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], both;}\n" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(head), "r"(barrier), "r"(leader)
                 : "memory");
}

/* A shared-memory address as block `rank` of the pair has it; arrive there. What is guarded is read and written by tensor copies and wgmma
 * only, and a wider scope would cost a fence of the whole GPU a stage. */
static __device__ __forceinline__ uint32_t stream_of_pair(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
static __device__ __forceinline__ void stream_arrive_pair(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
static __device__ __forceinline__ uint32_t stream_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}
/* All threads of both blocks meet. */
static __device__ __forceinline__ void stream_meet_pair() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

/* First to leave the second-level cache, or as usual. */
static __device__ __forceinline__ uint64_t stream_policy(bool once) {
    uint64_t first, usual;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(first));
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(usual));
    return once ? first : usual;
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
#define WGMMA_D13 WGMMA_D12 ",%48,%49,%50,%51"
#define WGMMA_D14 WGMMA_D13 ",%52,%53,%54,%55"
#define WGMMA_D15 WGMMA_D14 ",%56,%57,%58,%59"
#define WGMMA_D16 WGMMA_D15 ",%60,%61,%62,%63"
#define WGMMA_D17 WGMMA_D16 ",%64,%65,%66,%67"
#define WGMMA_D18 WGMMA_D17 ",%68,%69,%70,%71"
#define WGMMA_D19 WGMMA_D18 ",%72,%73,%74,%75"
#define WGMMA_D20 WGMMA_D19 ",%76,%77,%78,%79"
#define WGMMA_D21 WGMMA_D20 ",%80,%81,%82,%83"
#define WGMMA_D22 WGMMA_D21 ",%84,%85,%86,%87"
#define WGMMA_D23 WGMMA_D22 ",%88,%89,%90,%91"
#define WGMMA_D24 WGMMA_D23 ",%92,%93,%94,%95"
#define WGMMA_D25 WGMMA_D24 ",%96,%97,%98,%99"
#define WGMMA_D26 WGMMA_D25 ",%100,%101,%102,%103"
#define WGMMA_D27 WGMMA_D26 ",%104,%105,%106,%107"
#define WGMMA_D28 WGMMA_D27 ",%108,%109,%110,%111"
#define WGMMA_D29 WGMMA_D28 ",%112,%113,%114,%115"
#define WGMMA_D30 WGMMA_D29 ",%116,%117,%118,%119"
#define WGMMA_D31 WGMMA_D30 ",%120,%121,%122,%123"
#define WGMMA_D32 WGMMA_D31 ",%124,%125,%126,%127"
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
#define WGMMA_IO13 WGMMA_IO12, WGMMA_F(12)
#define WGMMA_IO14 WGMMA_IO13, WGMMA_F(13)
#define WGMMA_IO15 WGMMA_IO14, WGMMA_F(14)
#define WGMMA_IO16 WGMMA_IO15, WGMMA_F(15)
#define WGMMA_IO17 WGMMA_IO16, WGMMA_F(16)
#define WGMMA_IO18 WGMMA_IO17, WGMMA_F(17)
#define WGMMA_IO19 WGMMA_IO18, WGMMA_F(18)
#define WGMMA_IO20 WGMMA_IO19, WGMMA_F(19)
#define WGMMA_IO21 WGMMA_IO20, WGMMA_F(20)
#define WGMMA_IO22 WGMMA_IO21, WGMMA_F(21)
#define WGMMA_IO23 WGMMA_IO22, WGMMA_F(22)
#define WGMMA_IO24 WGMMA_IO23, WGMMA_F(23)
#define WGMMA_IO25 WGMMA_IO24, WGMMA_F(24)
#define WGMMA_IO26 WGMMA_IO25, WGMMA_F(25)
#define WGMMA_IO27 WGMMA_IO26, WGMMA_F(26)
#define WGMMA_IO28 WGMMA_IO27, WGMMA_F(27)
#define WGMMA_IO29 WGMMA_IO28, WGMMA_F(28)
#define WGMMA_IO30 WGMMA_IO29, WGMMA_F(29)
#define WGMMA_IO31 WGMMA_IO30, WGMMA_F(30)
#define WGMMA_IO32 WGMMA_IO31, WGMMA_F(31)
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
WGMMA_STEP(16, 128, "%64", "%65")
WGMMA_STEP(32, 256, "%128", "%129")
#undef WGMMA_STEP

#endif
