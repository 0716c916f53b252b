/* lab_row: one row through large maps, where nothing but the reading of weights counts: the op of the tree beside kernels of one warp a tile of
 * 16 or 8 outputs, which need neither barriers of a block nor tensor maps.
 *
 * Layer: experiments. Links bitroll_static; about 5 s. Random weights, beyond the L2. A version's outputs must be those of the tree, byte for
 * byte. Prints `n_in,n_out,version,us,share`: medians of REPEATS launches; share of the rate of reads alone.
 *
 * direct: codes go from memory to fragments, AHEAD k-blocks of 32 bytes a row on their way. ring: each warp has a ring of its own in shared
 * memory, a stage of 16 rows and COLS columns, each row one bulk copy of neighbours. In a block of 16 columns the order is free, so that a
 * lane takes four neighbours of a row: columns 4r .. 4r + 3 stand in the fragment's columns 2r, 2r + 1, 2r + 8, 2r + 9, of weights and x. eights: as direct, 8 outputs on the N side. */
#include <cuda_runtime.h>
#define _Noreturn [[noreturn]]
#define restrict __restrict__
extern "C" {
#include "bi_cuda_open.h"
}
#include "bi_cuda.cuh"
#include "bi_linear_wgmma.cuh"
#include "lab_time.cuh"

#include <string.h>

enum { REPEATS = 15, N_IN_MAX = 12288, N_OUT_MAX = 163840, N_WEIGHT = 7168 * N_OUT_MAX, TILE = 16 };

static void need_ok(br_status status) {
    if (status == BR_OK)
        return;
    fprintf(stderr, "lab_row: %s\n", br_last_error());
    exit(2);
}

static __global__ void fill(bi_bf16 *p, size_t n, uint64_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint64_t r = mixed(seed + i);
        p[i] = (bi_bf16)((r >> 20 & 0x8000) | (121 + (r >> 40) % 4) << 7 | (r >> 50 & 127));
    }
}

/* ---- versions --------------------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint2 load_once(const bi_bf16 *at) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

/* x of one row, as all blocks have it in shared memory. */
static __device__ __forceinline__ void take_x(bi_bf16 *to, const bi_bf16 *x, int32_t n_in) {
    for (int32_t i = (int32_t)threadIdx.x; i < n_in / 8; i += (int32_t)blockDim.x)
        ((uint4 *)to)[i] = ((const uint4 *)x)[i];
    __syncthreads();
}

/* One k-block: rows lane / 4 and + 8 of the tile; the row of x stands in the first column of the other side. */
static __device__ __forceinline__ void add_block(float (&acc)[4], uint2 low, uint2 high, const bi_bf16 *x, int32_t k, int lane) {
    const uint32_t a[4] = {low.x, high.x, low.y, high.y};
    uint2 own = make_uint2(0, 0);
    if (lane < 4)
        own = *(const uint2 *)(x + k + 4 * lane);
    const uint32_t b[2] = {own.x, own.y};
    bi_cuda_mma16(acc, a, b);
}

static __device__ __forceinline__ void put(float *y, int32_t out, const float (&acc)[4], int lane) {
    if (lane % 4)
        return;
    y[out + lane / 4] = acc[0];
    y[out + lane / 4 + 8] = acc[2];
}

template <int WARPS, int AHEAD>
static __global__ void __launch_bounds__(32 * WARPS) direct(const bi_bf16 *w, const bi_bf16 *x, float *y, int32_t n_in, int32_t n_out) {
    extern __shared__ __align__(128) unsigned char lab_shared[];
    bi_bf16 *own_x = (bi_bf16 *)lab_shared;
    take_x(own_x, x, n_in);
    const int lane = (int)threadIdx.x % 32;
    const int32_t out = ((int32_t)blockIdx.x * WARPS + (int32_t)threadIdx.x / 32) * TILE;
    if (out >= n_out)
        return;
    const bi_bf16 *low = w + (int64_t)(out + lane / 4) * n_in + lane % 4 * 4, *high = low + 8 * (int64_t)n_in;
    uint2 a[AHEAD], b[AHEAD];
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        a[i] = load_once(low + i * BI_MMA_K);
        b[i] = load_once(high + i * BI_MMA_K);
    }
    for (int32_t k = 0; k < n_in; k += AHEAD * BI_MMA_K) { /* AHEAD divides the blocks of a row */
        const int more = k + AHEAD * BI_MMA_K < n_in;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            add_block(acc, a[i], b[i], own_x, k + i * BI_MMA_K, lane);
            if (more) {
                a[i] = load_once(low + k + (AHEAD + i) * BI_MMA_K);
                b[i] = load_once(high + k + (AHEAD + i) * BI_MMA_K);
            }
        }
    }
    put(y, out, acc, lane);
}

/* Tiles of 8 outputs, on the N side; x is the first row of the M side. */
template <int WARPS, int AHEAD>
static __global__ void __launch_bounds__(32 * WARPS) eights(const bi_bf16 *w, const bi_bf16 *x, float *y, int32_t n_in, int32_t n_out) {
    extern __shared__ __align__(128) unsigned char lab_shared[];
    bi_bf16 *own_x = (bi_bf16 *)lab_shared;
    take_x(own_x, x, n_in);
    const int lane = (int)threadIdx.x % 32;
    const int32_t out = ((int32_t)blockIdx.x * WARPS + (int32_t)threadIdx.x / 32) * 8;
    if (out >= n_out)
        return;
    const bi_bf16 *at = w + (int64_t)(out + lane / 4) * n_in + lane % 4 * 4;
    uint2 b[AHEAD];
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        b[i] = load_once(at + i * BI_MMA_K);
    for (int32_t k = 0; k < n_in; k += AHEAD * BI_MMA_K) {
        const int more = k + AHEAD * BI_MMA_K < n_in;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint2 own = make_uint2(0, 0);
            if (lane < 4)
                own = *(const uint2 *)(own_x + k + i * BI_MMA_K + 4 * lane);
            const uint32_t rows[4] = {own.x, 0, own.y, 0}, outs[2] = {b[i].x, b[i].y};
            bi_cuda_mma16(acc, rows, outs);
            if (more)
                b[i] = load_once(at + k + (AHEAD + i) * BI_MMA_K);
        }
    }
    if (lane < 4)
        *(float2 *)(y + out + 2 * lane) = make_float2(acc[0], acc[1]);
}

static __device__ __forceinline__ uint32_t shared_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

template <int COLS> static __host__ __device__ constexpr int pitch_of() {
    return COLS * 2 + 16;
}

/* A stage: lane i brings row i. */
template <int COLS>
static __device__ __forceinline__ void bring(uint32_t stage, uint32_t bar, const bi_bf16 *from, int32_t n_in, int lane, uint64_t policy) {
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(TILE * COLS * 2) : "memory");
    __syncwarp();
    if (lane < TILE)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::"r"(
                         stage + (uint32_t)(lane * pitch_of<COLS>())),
                     "l"(from + (int64_t)lane * n_in), "r"(COLS * 2), "r"(bar), "l"(policy)
                     : "memory");
}

template <int WARPS, int STAGES, int COLS> static constexpr size_t ring_shared() {
    return (size_t)WARPS * STAGES * (TILE * pitch_of<COLS>() + 8) + N_IN_MAX * 2;
}

/* Tiles warp, warp + all warps, ..; the ring goes on from one to the next. */
template <int WARPS, int STAGES, int COLS>
static __global__ void __launch_bounds__(32 * WARPS) ring(const bi_bf16 *w, const bi_bf16 *x, float *y, int32_t n_in, int32_t n_out) {
    extern __shared__ __align__(128) unsigned char lab_shared[];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int32_t n_warp = (int32_t)gridDim.x * WARPS, n_stage = n_in / COLS, mine = (int32_t)blockIdx.x * WARPS + warp;
    const int32_t n = mine < n_out / TILE ? (n_out / TILE - mine + n_warp - 1) / n_warp * n_stage : 0;
    bi_bf16 *own_x = (bi_bf16 *)lab_shared;
    unsigned char *stage = lab_shared + N_IN_MAX * 2 + warp * STAGES * TILE * pitch_of<COLS>();
    const uint32_t bar = shared_at(lab_shared + N_IN_MAX * 2 + WARPS * STAGES * TILE * pitch_of<COLS>()) + (uint32_t)(warp * STAGES * 8);
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
    if (lane < STAGES)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::"r"(
                         bar + (uint32_t)(lane * 8))
                     : "memory");
    take_x(own_x, x, n_in);
    const auto bring_number = [&](int32_t i) {
        const int32_t tile = mine + i / n_stage * n_warp;
        bring<COLS>(shared_at(stage + i % STAGES * TILE * pitch_of<COLS>()), bar + (uint32_t)(i % STAGES * 8),
                    w + (int64_t)tile * TILE * n_in + i % n_stage * COLS, n_in, lane, policy);
    };
    for (int32_t i = 0; i < STAGES && i < n; i++)
        bring_number(i);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t i = 0; i < n; i++) {
        const unsigned char *at = stage + i % STAGES * TILE * pitch_of<COLS>() + lane / 4 * pitch_of<COLS>() + lane % 4 * 8;
        stream_wait(bar + (uint32_t)(i % STAGES * 8), (uint32_t)(i / STAGES) & 1);
#pragma unroll 16
        for (int k = 0; k < COLS; k += BI_MMA_K)
            add_block(acc, *(const uint2 *)(at + 2 * k), *(const uint2 *)(at + 8 * pitch_of<COLS>() + 2 * k), own_x, i % n_stage * COLS + k, lane);
        __syncwarp();
        if (i + STAGES < n)
            bring_number(i + STAGES);
        if (i % n_stage < n_stage - 1)
            continue;
        put(y, (mine + i / n_stage * n_warp) * TILE, acc, lane);
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    }
}

/* ---- times and checks ---------------------------------------------------------------------------------------------------------------------- */

typedef struct map_of {
    bi_bf16 *w; /* sets of weights, so many that none is in the L2 when its turn comes */
    int32_t n_in, n_out, n_set;
    double read_us;
    std::vector<float> wanted;
} map_of;

static br_device *device;
static bi_backend backend;
static bi_bf16 *x;
static float *y;
static int turn;

static std::vector<float> outputs(int32_t n_out) {
    std::vector<float> copy((size_t)n_out);
    need(cudaMemcpy(copy.data(), y, copy.size() * sizeof *y, cudaMemcpyDeviceToHost), "reading back");
    return copy;
}

template <class F> static void row(map_of *m, const char *version, F launch) {
    const bi_bf16 *first = m->w;
    need(cudaMemset(y, 0xee, sizeof *y * N_OUT_MAX), "poison");
    launch(first);
    need(cudaDeviceSynchronize(), version);
    const std::vector<float> found = outputs(m->n_out);
    if (m->wanted.empty())
        m->wanted = found;
    if (memcmp(found.data(), m->wanted.data(), found.size() * sizeof(float)) != 0) {
        printf("%d,%d,%s: other bytes than the tree's\n", m->n_in, m->n_out, version);
        exit(1);
    }
    const double us = time_of(REPEATS, []() {}, [&]() { launch(m->w + (size_t)(turn++ % m->n_set) * (size_t)m->n_out * m->n_in); });
    printf("%d,%d,%s,%.1f,%.3f\n", m->n_in, m->n_out, version, us, m->read_us / us);
    fflush(stdout);
}

template <int WARPS, int AHEAD> static void row_direct(map_of *m, const char *version) {
    const unsigned n_block = (unsigned)((m->n_out / TILE + WARPS - 1) / WARPS);
    row(m, version, [&](const bi_bf16 *w) { direct<WARPS, AHEAD><<<n_block, 32 * WARPS, N_IN_MAX * 2>>>(w, x, y, m->n_in, m->n_out); });
}

template <int WARPS, int AHEAD> static void row_eights(map_of *m, const char *version) {
    const unsigned n_block = (unsigned)((m->n_out / 8 + WARPS - 1) / WARPS);
    row(m, version, [&](const bi_bf16 *w) { eights<WARPS, AHEAD><<<n_block, 32 * WARPS, N_IN_MAX * 2>>>(w, x, y, m->n_in, m->n_out); });
}

template <int WARPS, int STAGES, int COLS> static void row_ring(map_of *m, const char *version, int n_sm) {
    constexpr size_t bytes = ring_shared<WARPS, STAGES, COLS>();
    static_assert(1024 % COLS == 0 && bytes <= 227 << 10, "stages of a row, in shared memory");
    need(cudaFuncSetAttribute(ring<WARPS, STAGES, COLS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), "shared memory");
    row(m, version, [&](const bi_bf16 *w) { ring<WARPS, STAGES, COLS><<<(unsigned)n_sm, 32 * WARPS, bytes>>>(w, x, y, m->n_in, m->n_out); });
}

static void run_tree(const map_of *m, const bi_bf16 *w) {
    bi_linear_args a = {};
    a.n_row = a.n_head = 1, a.x = x, a.x_ld = m->n_in, a.y = y, a.y_ld = m->n_out, a.y_f32 = 1;
    a.w.data = w, a.w.n_out = m->n_out, a.w.n_in = m->n_in, a.w.form = BI_FORM_BF16;
    need_ok(backend.op->linear(backend.ctx, &a));
    need(cudaStreamSynchronize((cudaStream_t)br_device_stream(device)), "the tree's");
}

/* The tree's launches are on the device's own stream: timed there. */
static void row_tree(map_of *m) {
    run_tree(m, m->w);
    m->wanted = outputs(m->n_out);
    std::vector<double> us;
    for (int i = -2; i < REPEATS; i++) {
        double one;
        need_ok(br_device_mark(device, 0));
        bi_linear_args a = {};
        a.n_row = a.n_head = 1, a.x = x, a.x_ld = m->n_in, a.y = y, a.y_ld = m->n_out, a.y_f32 = 1;
        a.w.data = m->w + (size_t)(turn++ % m->n_set) * (size_t)m->n_out * (size_t)m->n_in, a.w.n_out = m->n_out, a.w.n_in = m->n_in, a.w.form = BI_FORM_BF16;
        need_ok(backend.op->linear(backend.ctx, &a));
        need_ok(br_device_mark(device, 1));
        need_ok(br_device_elapsed(device, 0, 1, &one));
        if (i >= 0)
            us.push_back(one);
    }
    std::sort(us.begin(), us.end());
    printf("%d,%d,tree,%.1f,%.3f\n", m->n_in, m->n_out, us[REPEATS / 2], m->read_us / us[REPEATS / 2]);
}

int main(void) {
    const int32_t shape[][2] = {{7168, 163840}, {7168, 49152}, {7168, 15872}, {12288, 7168}, {7168, 12288}};
    bi_limits limits = {};
    int n_sm;
    limits.n_row = 64, limits.d_in = N_IN_MAX, limits.d_out = N_OUT_MAX;
    need_ok(br_device_open("cuda", &device));
    need_ok(bi_backend_cuda_open(&limits, device, &backend));
    need(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    bi_bf16 *w;
    const size_t n_weight = N_WEIGHT;
    need(cudaMalloc(&w, n_weight * sizeof *w), "weights");
    need(cudaMalloc(&x, N_IN_MAX * sizeof *x), "a row");
    need(cudaMalloc(&y, N_OUT_MAX * sizeof *y), "outputs");
    fill<<<4096, 256>>>(w, n_weight, 1);
    fill<<<8, 256>>>(x, N_IN_MAX, (uint64_t)1 << 40);
    need(cudaDeviceSynchronize(), "filling");
    printf("n_in,n_out,version,us,share\n");
    for (const auto &of : shape) {
        const size_t n = (size_t)of[0] * (size_t)of[1];
        map_of m = {w, of[0], of[1], (int32_t)(n_weight / n), 0, {}};
        m.read_us = time_of(REPEATS, []() {}, [&]() {
            read_all<<<(unsigned)(4 * n_sm), 512>>>((const uint4 *)(w + (size_t)(turn++ % m.n_set) * n), n / 8, NULL);
        });
        printf("%d,%d,reads alone,%.1f,1.000\n", m.n_in, m.n_out, m.read_us);
        row_tree(&m);
        row_direct<4, 4>(&m, "direct 4 warps, 4 ahead");
        row_direct<4, 8>(&m, "direct 4 warps, 8 ahead");
        row_direct<4, 16>(&m, "direct 4 warps, 16 ahead");
        row_direct<2, 16>(&m, "direct 2 warps, 16 ahead");
        row_eights<4, 16>(&m, "eights 4 warps, 16 ahead");
        row_eights<4, 32>(&m, "eights 4 warps, 32 ahead");
        row_eights<8, 16>(&m, "eights 8 warps, 16 ahead");
        row_eights<1, 32>(&m, "eights 1 warp, 32 ahead");
        row_ring<6, 4, 256>(&m, "ring 6 warps, 4 x 256", n_sm);
        row_ring<4, 6, 256>(&m, "ring 4 warps, 6 x 256", n_sm);
        row_ring<6, 2, 512>(&m, "ring 6 warps, 2 x 512", n_sm);
        row_ring<4, 3, 512>(&m, "ring 4 warps, 3 x 512", n_sm);
        row_ring<8, 3, 256>(&m, "ring 8 warps, 3 x 256", n_sm);
    }
    return 0;
}
