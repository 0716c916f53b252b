/* lab_index: the indexer's key scan and selection over 64 sequences of 131,072 keys (32 heads of 128, top 2,048), without the other kernels
 * of the op.
 *
 * Layer: experiments. One program that needs nothing installed where it runs, about 5 s. Random e4m3 codes for keys and queries. The scores
 * with bf16 keys must be those of the tree, byte for byte; the selection must be that of a sort on the host. Prints `version,us,share`:
 * medians of REPEATS launches; share of the rate of reads alone. The selection reads the scores of one array, part of which is in L2, as
 * behind the key scan. */
#include <cuda_runtime.h>
#define _Noreturn [[noreturn]]
#define restrict __restrict__
extern "C" {
#include "bi_index.h"
}
#include "lab_index_versions.cuh"
#include "lab_time.cuh"

#include <string.h>

enum { REPEATS = 15, N_SEQ = 64, N_POS = 131072, N_HEAD = 32, DIM = 128, TOPK = 2048, BLOCK_BYTES = BR_PAGE_TOK * (DIM + 4),
       N_BLOCK = N_POS / BR_PAGE_TOK, QUERY_BYTES = N_HEAD * DIM * 2 };

template <class T> static T *on_gpu(size_t n) {
    T *block;
    need(cudaMalloc(&block, n * sizeof *block), "memory");
    return block;
}

/* ---- data ------------------------------------------------------------------------------------------------------------------------------- */

/* Of either sign, below 16, as most codes of a scaled vector are. */
static __host__ __device__ uint8_t code_of(uint64_t x) {
    const uint64_t y = mixed(x);
    return (uint8_t)((y & 0x80) | (y >> 20) % 0x58);
}

static __global__ void make_keys(unsigned char *base) {
    for (uint64_t block = blockIdx.x; block < (uint64_t)N_SEQ * N_BLOCK; block += gridDim.x) {
        unsigned char *to = base + block * BLOCK_BYTES;
        for (int i = (int)threadIdx.x; i < BR_PAGE_TOK * DIM; i += (int)blockDim.x)
            to[i] = code_of(block * BR_PAGE_TOK * DIM + (uint64_t)i);
        for (int i = (int)threadIdx.x; i < BR_PAGE_TOK; i += (int)blockDim.x)
            ((float *)(to + BR_PAGE_TOK * DIM))[i] = i % 3 ? 0.0078125f : 0.015625f;
    }
}

/* The packed queries of both forms, four columns a thread. */
static __global__ void make_queries(unsigned char *as_bf16, unsigned char *as_half) {
    const int seq = (int)blockIdx.x, h = (int)threadIdx.x / 32, four = (int)threadIdx.x % 32;
    uint32_t codes = 0, low, high;
    for (int i = 0; i < 4; i++)
        codes |= (uint32_t)code_of(~(uint64_t)((seq * N_HEAD + h) * DIM + four * 4 + i)) << 8 * i;
    const size_t at = (size_t)seq * QUERY_BYTES;
    index_widen4(codes, &low, &high);
    *(uint32_t *)(as_bf16 + at + index_query_wide_at(N_HEAD / 8, h, four, 0)) = low;
    *(uint32_t *)(as_bf16 + at + index_query_wide_at(N_HEAD / 8, h, four, 1)) = high;
    iwide_widen4(codes, &low, &high);
    *(uint32_t *)(as_half + at + index_query_wide_at(N_HEAD / 8, h, four, 0)) = low;
    *(uint32_t *)(as_half + at + index_query_wide_at(N_HEAD / 8, h, four, 1)) = high;
}

static index_rows make_rows(void) {
    std::vector<bi_seg> seg(N_SEQ);
    std::vector<int32_t> row_seg(N_SEQ), first(N_SEQ);
    std::vector<float> weight(N_SEQ * N_HEAD);
    for (int s = 0; s < N_SEQ; s++) {
        seg[(size_t)s].seq = seg[(size_t)s].row = row_seg[(size_t)s] = s;
        seg[(size_t)s].n_row = 1;
        seg[(size_t)s].pos = N_POS - 1;
        first[(size_t)s] = s * N_BLOCK;
    }
    for (size_t i = 0; i < weight.size(); i++)
        weight[i] = (float)((int)(mixed(i) % 2001) - 1000) * 1e-4f;
    index_rows r = {};
    bi_seg *segs = on_gpu<bi_seg>(N_SEQ);
    int32_t *rows = on_gpu<int32_t>(N_SEQ), *firsts = on_gpu<int32_t>(N_SEQ);
    need(cudaMemcpy(segs, seg.data(), sizeof(bi_seg) * N_SEQ, cudaMemcpyHostToDevice), "segments");
    need(cudaMemcpy(rows, row_seg.data(), sizeof(int32_t) * N_SEQ, cudaMemcpyHostToDevice), "rows");
    need(cudaMemcpy(firsts, first.data(), sizeof(int32_t) * N_SEQ, cudaMemcpyHostToDevice), "blocks");
    r.seg = segs, r.row_seg = rows, r.cache.first = firsts;
    r.cache.base = on_gpu<unsigned char>((size_t)N_SEQ * N_BLOCK * BLOCK_BYTES);
    r.cache.block_bytes = BLOCK_BYTES;
    r.n_row = N_SEQ, r.n_head = N_HEAD, r.n_tile = N_HEAD / 8, r.d_pad = DIM, r.topk = TOPK;
    r.wide = r.swizzled = 1;
    r.query_bytes = QUERY_BYTES;
    r.query = on_gpu<unsigned char>((size_t)N_SEQ * QUERY_BYTES);
    r.weight = on_gpu<float>(N_SEQ * N_HEAD);
    need(cudaMemcpy(r.weight, weight.data(), weight.size() * sizeof(float), cudaMemcpyHostToDevice), "weights");
    r.bad = on_gpu<int32_t>(N_SEQ);
    need(cudaMemset(r.bad, 0, sizeof(int32_t) * N_SEQ), "marks");
    r.score = on_gpu<float>((size_t)N_SEQ * N_POS);
    r.score_ld = N_POS;
    make_keys<<<4096, 256>>>(r.cache.base);
    return r;
}

/* ---- times and checks ------------------------------------------------------------------------------------------------------------------- */

static void compare(const char *name, const void *found, const void *wanted, size_t bytes) {
    if (memcmp(found, wanted, bytes) == 0)
        return;
    printf("%s: other bytes than expected\n", name);
    exit(1);
}

template <class T> static std::vector<T> from_gpu(const T *at, size_t n) {
    std::vector<T> copy(n);
    need(cudaMemcpy(copy.data(), at, n * sizeof *at, cudaMemcpyDeviceToHost), "reading back");
    return copy;
}

/* Scores must be those of the first version that ran. */
template <class F> static void scan(const char *name, const index_rows &r, double read_us, F launch) {
    static std::vector<float> wanted;
    need(cudaMemset(r.score, 0xee, sizeof(float) * N_SEQ * N_POS), "poison");
    const double us = time_of(REPEATS, []() {}, launch);
    const std::vector<float> score = from_gpu(r.score, (size_t)N_SEQ * N_POS);
    if (wanted.empty())
        wanted = score;
    compare(name, score.data(), wanted.data(), sizeof(float) * N_SEQ * N_POS);
    printf("%s,%.1f,%.3f\n", name, us, read_us / us);
    fflush(stdout);
}

/* Scores falling, positions rising; the first TOPK of these, by position. */
static std::vector<int32_t> sorted(const float *score) {
    std::vector<int32_t> at(N_POS);
    for (int32_t i = 0; i < N_POS; i++)
        at[(size_t)i] = i;
    const auto before = [=](int32_t a, int32_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); };
    std::nth_element(at.begin(), at.begin() + TOPK, at.end(), before);
    at.resize(TOPK);
    std::sort(at.begin(), at.end());
    return at;
}

template <int BLOCKS> static void choose(const char *name, const index_rows &r) {
    int32_t *select = on_gpu<int32_t>(N_SEQ * TOPK), *n_select = on_gpu<int32_t>(N_SEQ);
    need(cudaFuncSetAttribute(index_topk<BLOCKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(topk_shared)), "shared memory");
    const auto launch = [&]() { index_topk<BLOCKS><<<N_SEQ * BLOCKS, TOPK_THREADS, sizeof(topk_shared)>>>(r, select, n_select); };
    const double us = time_of(REPEATS, []() {}, launch);
    const std::vector<int32_t> found = from_gpu(select, N_SEQ * TOPK);
    const std::vector<float> score = from_gpu(r.score, (size_t)N_SEQ * N_POS);
    for (size_t t = 0; t < N_SEQ; t++)
        compare(name, found.data() + t * TOPK, sorted(score.data() + t * N_POS).data(), sizeof(int32_t) * TOPK);
    printf("%s,%.1f,\n", name, us);
}

int main(void) {
    int n_sm;
    need(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    index_rows r = make_rows();
    unsigned char *as_half = on_gpu<unsigned char>((size_t)N_SEQ * QUERY_BYTES);
    make_queries<<<N_SEQ, N_HEAD * 32>>>(r.query, as_half);
    const size_t shared = index_wide_shared(r.n_tile, r.d_pad, 1), n_byte = (size_t)N_SEQ * N_BLOCK * BLOCK_BYTES;
    const int n_chunk = (int)IWIDE_WAVES * (int)IWIDE_PER_SM * n_sm / N_SEQ, n_key = (N_BLOCK + n_chunk - 1) / n_chunk * BR_PAGE_TOK;
    const dim3 grid((unsigned)((N_POS + n_key - 1) / n_key), 1, N_SEQ);
    const auto tree = index_score_wide<4, 4>;
    need(cudaFuncSetAttribute(tree, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    need(cudaFuncSetAttribute(score_bf16, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    uint32_t *never = on_gpu<uint32_t>(1);
    const auto reads = [&]() { read_all<<<(unsigned)(4 * n_sm), 512>>>((const uint4 *)r.cache.base, n_byte / 16, never); };
    const double read_us = time_of(REPEATS, []() {}, reads);
    printf("%.3f GB of keys; reads alone %.1f us, %.0f GB/s\nversion,us,share\n", 1e-9 * (double)n_byte, read_us, 1e-3 * (double)n_byte / read_us);
    scan("keys as bf16", r, read_us, [&]() { score_bf16<<<grid, IWIDE_THREADS, shared>>>(r, n_key); });
    r.query = as_half;
    scan("keys as f16 (the tree's)", r, read_us, [&]() { tree<<<grid, IWIDE_THREADS, shared>>>(r, 1, 1, n_key); });
    choose<8>("selection, 8 blocks a row", r);
    choose<4>("selection, 4", r);
    choose<2>("selection, 2 (the tree's)", r);
    return 0;
}
