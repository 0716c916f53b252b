/* hw_probe: what one tensor-core instruction of this GPU gives, bit for bit, and whether the functions of numeric/ have the
 * host's bits on it.
 *
 *   hw_probe OUT_DIR   writes OUT_DIR/block16.txt: family, c, 16 x (a, b), result of mma.sync.m16n8k16; prints mismatches of
 *                      mma.sync and wgmma.m64n8k16 against the slow block model over many more inputs, of wgmma in f16 on numbers
 *                      that are e4m3 codes against the same model of these as bf16, and of each function against the host over
 *                      a sample of all binary32 patterns.
 *
 * Grid: one warp (mma.sync) or one warpgroup (wgmma) works on 8 independent blocks: block i sits on the diagonal, row i of A,
 * column i of B, so an instruction's other outputs are not looked at. Inputs are the families of tests/slow_block.h. */
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "bi_fn.h"
extern "C" {
#include "slow_block.h"
}

#define CUDA_OK(call)                                                                              \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));        \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

enum { GROUP = 8, K = 16, FILE_SEEDS = 96, CHECK_SEEDS = 1 << 17 };

struct block {
    float c;
    uint16_t a[K], b[K];
};

static __device__ uint32_t pair_of(const uint16_t *x, int k) {
    return (uint32_t)x[k] | (uint32_t)x[k + 1] << 16;
}

/* Fragments of m16n8k16: lane = 4 * g + t holds A rows g, g + 8 at k = 2t, 2t + 8; B column g likewise; D rows g, columns 2t. */
static __device__ void load_fragments(const block *in, int lane, uint32_t a[4], uint32_t b[2], float d[4]) {
    const int g = lane >> 2, t = lane & 3;
    a[0] = pair_of(in[g].a, 2 * t);
    a[1] = 0;
    a[2] = pair_of(in[g].a, 2 * t + 8);
    a[3] = 0;
    b[0] = pair_of(in[g].b, 2 * t);
    b[1] = pair_of(in[g].b, 2 * t + 8);
    d[0] = 2 * t == g ? in[g].c : 0.0f;
    d[1] = 2 * t + 1 == g ? in[g].c : 0.0f;
    d[2] = d[3] = 0.0f;
}

static __device__ void store_diagonal(const float d[4], int lane, float *out) {
    const int g = lane >> 2, t = lane & 3;
    if (2 * t == g)
        out[g] = d[0];
    if (2 * t + 1 == g)
        out[g] = d[1];
}

__global__ void run_mma(const block *in, float *out, int n_group) {
    const int group = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = (int)threadIdx.x % 32;
    if (group >= n_group)
        return;
    uint32_t a[4], b[2];
    float d[4];
    load_fragments(in + (size_t)group * GROUP, lane, a, b, d);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    store_diagonal(d, lane, out + (size_t)group * GROUP);
}

/* Two e4m3 codes, k first, as f16. */
static __device__ uint32_t half_pair(uint32_t codes) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)codes));
    return pair;
}

/* A from registers; B (8 columns x 16) K-major without swizzle: two core matrices of 8 rows x 16 bytes, 128 bytes apart. Warp 0 of
 * the warpgroup holds rows 0..15 of A; the other rows are zero. HALF: a and b hold e4m3 codes, which are multiplied as f16. */
template <bool HALF> __global__ void run_wgmma(const block *in, float *out) {
    __shared__ __align__(128) uint16_t tile[2 * 8 * 8];
    const int group = (int)blockIdx.x, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const block *blocks = in + (size_t)group * GROUP;
    const int column = (int)threadIdx.x / 16, k = (int)threadIdx.x % 16;
    const uint16_t own = blocks[column].b[k];
    tile[(k / 8) * 64 + column * 8 + k % 8] = HALF ? (uint16_t)half_pair(own) : own;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    uint32_t a[4] = {0, 0, 0, 0}, unused[2];
    float d[4] = {0, 0, 0, 0};
    if (warp == 0)
        load_fragments(blocks, lane, a, unused, d);
    for (int i = 0; i < 4 && HALF; i++) /* a code in each half of the word */
        a[i] = half_pair((a[i] & 0xff) | (a[i] >> 8 & 0xff00));
    const uint64_t at = (uint64_t)__cvta_generic_to_shared(tile) >> 4 & 0x3fff;
    const uint64_t descriptor = at | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if constexpr (HALF)
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;}"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;}"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (warp == 0)
        store_diagonal(d, lane, out + (size_t)group * GROUP);
}

static void make_blocks(int family, uint64_t seed0, std::vector<block> &blocks) {
    for (size_t i = 0; i < blocks.size(); i++)
        slow_family(family, seed0 + i, K, blocks[i].a, blocks[i].b, &blocks[i].c);
}

static void model_blocks(const std::vector<block> &blocks, std::vector<float> &out) {
    const unsigned n_thread = std::thread::hardware_concurrency();
    std::vector<std::thread> team;
    for (unsigned t = 0; t < n_thread; t++)
        team.emplace_back([&, t] {
            for (size_t i = t; i < blocks.size(); i += n_thread)
                out[i] = slow_block16(blocks[i].c, blocks[i].a, 1, blocks[i].b, 1);
        });
    for (auto &member : team)
        member.join();
}

static size_t mismatches(const std::vector<float> &a, const std::vector<float> &b) {
    size_t n = 0;
    for (size_t i = 0; i < a.size(); i++)
        n += memcmp(&a[i], &b[i], sizeof a[i]) != 0;
    return n;
}

/* What the device makes of the blocks; launch: a kernel over (inputs, outputs, groups). */
template <class F> static std::vector<float> run_device(const std::vector<block> &blocks, F launch) {
    std::vector<float> result(blocks.size());
    block *in;
    float *out;
    CUDA_OK(cudaMalloc(&in, blocks.size() * sizeof(block)));
    CUDA_OK(cudaMalloc(&out, blocks.size() * sizeof(float)));
    CUDA_OK(cudaMemcpy(in, blocks.data(), blocks.size() * sizeof(block), cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemset(out, 0xff, blocks.size() * sizeof(float)));
    launch(in, out, (int)(blocks.size() / GROUP));
    CUDA_OK(cudaMemcpy(result.data(), out, blocks.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CUDA_OK(cudaFree(in));
    CUDA_OK(cudaFree(out));
    return result;
}

static std::vector<float> by_mma(const std::vector<block> &blocks) {
    return run_device(blocks, [](const block *in, float *out, int n) { run_mma<<<(n + 3) / 4, 128>>>(in, out, n); });
}

template <bool HALF> static std::vector<float> by_wgmma(const std::vector<block> &blocks) {
    return run_device(blocks, [](const block *in, float *out, int n) { run_wgmma<HALF><<<n, 128>>>(in, out); });
}

static void write_vectors(const char *dir) {
    const std::string path = std::string(dir) + "/block16.txt";
    FILE *file = fopen(path.c_str(), "w");
    if (!file) {
        perror(path.c_str());
        exit(2);
    }
    fprintf(file, "# family c a[16] b[16] result of mma.sync.m16n8k16.f32.bf16.bf16.f32, hex bits\n");
    for (int family = 0; family < SLOW_FAMILY_COUNT; family++) {
        std::vector<block> blocks(FILE_SEEDS);
        make_blocks(family, 1, blocks);
        const std::vector<float> found = by_mma(blocks);
        for (size_t i = 0; i < blocks.size(); i++) {
            fprintf(file, "%d %08x ", family, slow_bits(blocks[i].c));
            for (int k = 0; k < K; k++)
                fprintf(file, "%04x", blocks[i].a[k]);
            fputc(' ', file);
            for (int k = 0; k < K; k++)
                fprintf(file, "%04x", blocks[i].b[k]);
            fprintf(file, " %08x\n", slow_bits(found[i]));
        }
    }
    fclose(file);
}

static size_t check_model() {
    size_t bad = 0;
    for (int family = 0; family < SLOW_FAMILY_COUNT; family++) {
        std::vector<block> blocks(CHECK_SEEDS);
        std::vector<float> model(blocks.size());
        make_blocks(family, 1000000, blocks);
        model_blocks(blocks, model);
        const size_t bad_mma = mismatches(model, by_mma(blocks)), bad_wgmma = mismatches(model, by_wgmma<false>(blocks));
        printf("block %-20s %zu inputs: %zu mma.sync and %zu wgmma mismatches\n", slow_family_name(family), blocks.size(), bad_mma, bad_wgmma);
        bad += bad_mma + bad_wgmma;
    }
    return bad;
}

/* Codes from one of the lowest to the greatest, zeros among them; c of a family, or what another block of codes gives. */
static void make_codes(int family, uint64_t seed0, std::vector<block> &codes, std::vector<block> &as_bf16) {
    for (size_t i = 0; i < codes.size(); i++) {
        uint64_t state = (seed0 + i) * 0x9e3779b97f4a7c15u;
        slow_family(family, seed0 + i, K, codes[i].a, codes[i].b, &codes[i].c);
        for (int k = 0; k < 2 * K; k++) {
            state = (state ^ state >> 29) * 0xbf58476d1ce4e5b9u + 1;
            const uint32_t low = i % 3 == 0 ? 0x10 : 0x7f, size = (uint32_t)(state >> 40) % low; /* 0x7f is NaN */
            const uint8_t code = (uint8_t)((state >> 20 & 0x80) | (state >> 32 & 7 ? size : 0));
            (k < K ? codes[i].a : codes[i].b)[k % K] = code;
            (k < K ? as_bf16[i].a : as_bf16[i].b)[k % K] = (uint16_t)(slow_bits(bi_e4m3_widen(code)) >> 16);
        }
        if (i % 2)
            codes[i].c = slow_block16(0.0f, as_bf16[i - 1].a, 1, as_bf16[i - 1].b, 1);
        as_bf16[i].c = codes[i].c;
    }
}

static size_t check_half() {
    size_t bad = 0;
    for (int family = 0; family < SLOW_FAMILY_COUNT; family++) {
        std::vector<block> codes(CHECK_SEEDS), as_bf16(CHECK_SEEDS);
        std::vector<float> model(CHECK_SEEDS);
        make_codes(family, 2000000, codes, as_bf16);
        model_blocks(as_bf16, model);
        const size_t n = mismatches(model, by_wgmma<true>(codes));
        printf("e4m3 as f16, c of %-20s %zu inputs: %zu wgmma mismatches\n", slow_family_name(family), codes.size(), n);
        bad += n;
    }
    return bad;
}

/* ---- functions ----------------------------------------------------------------------------------------------------------------- */

enum { FUNCTION_COUNT = 8, FUNCTION_SAMPLES = 1 << 24 };
static const char *const function_name[FUNCTION_COUNT] = {"exp", "log", "log1p", "sigmoid", "tanh", "silu", "softplus", "rsqrt"};

static __host__ __device__ uint32_t function_bits(int function, uint32_t i) {
    const float x = bi_f32_of(i * 0x9e3779b1u); /* an odd factor walks all patterns */
    float y;
    switch (function) {
    case 0: y = bi_exp(x); break;
    case 1: y = bi_log(x); break;
    case 2: y = bi_log1p(x); break;
    case 3: y = bi_sigmoid(x); break;
    case 4: y = bi_tanh(x); break;
    case 5: y = bi_silu(x); break;
    case 6: y = bi_softplus(x); break;
    default: y = bi_rsqrt(x); break;
    }
    return bi_is_nan(y) ? 0x7fffffffu : bi_u32_of(y); /* NaN bits are nobody's business */
}

__global__ void run_function(int function, uint32_t *out) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = function_bits(function, i);
}

static size_t check_functions() {
    size_t bad = 0;
    uint32_t *out;
    std::vector<uint32_t> device(FUNCTION_SAMPLES);
    CUDA_OK(cudaMalloc(&out, FUNCTION_SAMPLES * sizeof *out));
    for (int function = 0; function < FUNCTION_COUNT; function++) {
        run_function<<<FUNCTION_SAMPLES / 256, 256>>>(function, out);
        CUDA_OK(cudaMemcpy(device.data(), out, FUNCTION_SAMPLES * sizeof *out, cudaMemcpyDeviceToHost));
        const unsigned n_thread = std::thread::hardware_concurrency();
        std::vector<size_t> part(n_thread, 0);
        std::vector<std::thread> team;
        for (unsigned t = 0; t < n_thread; t++)
            team.emplace_back([&, t] {
                for (uint32_t i = t; i < FUNCTION_SAMPLES; i += n_thread)
                    part[t] += function_bits(function, i) != device[i];
            });
        for (auto &member : team)
            member.join();
        size_t n = 0;
        for (size_t x : part)
            n += x;
        printf("function %-10s %d inputs: %zu mismatches with the host\n", function_name[function], FUNCTION_SAMPLES, n);
        bad += n;
    }
    CUDA_OK(cudaFree(out));
    return bad;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: hw_probe OUT_DIR\n");
        return 2;
    }
    cudaDeviceProp device;
    CUDA_OK(cudaGetDeviceProperties(&device, 0));
    printf("device %s, compute %d.%d\n", device.name, device.major, device.minor);
    write_vectors(argv[1]);
    const size_t bad = check_model() + check_half() + check_functions();
    printf("%zu mismatches\n", bad);
    return bad != 0;
}
