/* lab_index: the indexer's key scan and selection over 64 sequences of 131,072 keys (32 heads of 128, top 2,048), those of the tree beside
 * versions of them, without the other kernels of the op.
 *
 * Layer: experiments. One program that needs nothing installed where it runs, about 5 s. Random e4m3 codes for keys and queries. A version's
 * scores, histogram and selection must be those of the tree, byte for byte. Prints `version,us,share`: medians of REPEATS launches; share of
 * the rate of reads alone. Selections read the scores of one array, part of which is in L2, as behind the key scan. */
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
    index_widen4(codes, &low, &high);
    const size_t at = (size_t)seq * QUERY_BYTES;
    *(uint32_t *)(as_bf16 + at + index_query_wide_at(N_HEAD / 8, h, four, 0)) = low;
    *(uint32_t *)(as_bf16 + at + index_query_wide_at(N_HEAD / 8, h, four, 1)) = high;
    *(uint32_t *)(as_half + at + index_query_wide_at(N_HEAD / 8, h, four, 0)) = half_two(codes);
    *(uint32_t *)(as_half + at + index_query_wide_at(N_HEAD / 8, h, four, 1)) = half_two(codes >> 16);
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
    r.count = on_gpu<uint32_t>(N_SEQ * INDEX_BINS);
    make_keys<<<4096, 256>>>(r.cache.base);
    return r;
}

/* ---- times and checks ------------------------------------------------------------------------------------------------------------------- */

static uint32_t *counts; /* of the tree */
static float *scores;
static int32_t *selects, *select_at, *n_select;

static void compare(const char *name, const void *found, const void *wanted, size_t bytes) {
    std::vector<unsigned char> a(bytes), b(bytes);
    need(cudaMemcpy(a.data(), found, bytes, cudaMemcpyDeviceToHost), "reading back");
    need(cudaMemcpy(b.data(), wanted, bytes, cudaMemcpyDeviceToHost), "reading back");
    if (memcmp(a.data(), b.data(), bytes) == 0)
        return;
    printf("%s: other bytes than the tree's\n", name);
    exit(1);
}

template <class F> static void scan(const char *name, const index_rows &r, double read_us, F launch) {
    const double us = time_of(REPEATS, [&]() { need(cudaMemset(r.count, 0, sizeof(uint32_t) * N_SEQ * INDEX_BINS), "counts"); }, launch);
    if (!scores) {
        scores = on_gpu<float>((size_t)N_SEQ * N_POS);
        counts = on_gpu<uint32_t>(N_SEQ * INDEX_BINS);
        need(cudaMemcpy(scores, r.score, sizeof(float) * N_SEQ * N_POS, cudaMemcpyDeviceToDevice), "scores");
        need(cudaMemcpy(counts, r.count, sizeof(uint32_t) * N_SEQ * INDEX_BINS, cudaMemcpyDeviceToDevice), "counts");
    }
    compare(name, r.score, scores, sizeof(float) * N_SEQ * N_POS);
    compare(name, r.count, counts, sizeof(uint32_t) * N_SEQ * INDEX_BINS);
    printf("%s,%.1f,%.3f\n", name, us, read_us / us);
    fflush(stdout);
}

template <class K> static void choose(const char *name, const index_rows &r, K kernel) {
    need(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(topk_shared)), "shared memory");
    need(cudaMemset(select_at, 0xee, sizeof(int32_t) * N_SEQ * TOPK), "poison");
    const auto launch = [&]() { kernel<<<N_SEQ * TOPK_BLOCKS, TOPK_THREADS, sizeof(topk_shared)>>>(r, select_at, n_select); };
    const double us = time_of(REPEATS, []() {}, launch);
    if (!selects) {
        selects = on_gpu<int32_t>(N_SEQ * TOPK);
        need(cudaMemcpy(selects, select_at, sizeof(int32_t) * N_SEQ * TOPK, cudaMemcpyDeviceToDevice), "selections");
    }
    compare(name, select_at, selects, sizeof(int32_t) * N_SEQ * TOPK);
    printf("%s,%.1f,\n", name, us);
    fflush(stdout);
}

int main(void) {
    int n_sm;
    need(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    index_rows r = make_rows();
    unsigned char *as_half = on_gpu<unsigned char>((size_t)N_SEQ * QUERY_BYTES);
    make_queries<<<N_SEQ, N_HEAD * 32>>>(r.query, as_half);
    const size_t shared = index_wide_shared(r.n_tile, r.d_pad, 1, 1), n_byte = (size_t)N_SEQ * N_BLOCK * BLOCK_BYTES;
    const int n_chunk = (int)IWIDE_WAVES * (int)IWIDE_PER_SM * n_sm / N_SEQ, n_key = (N_BLOCK + n_chunk - 1) / n_chunk * BR_PAGE_TOK;
    const dim3 grid((unsigned)((N_POS + n_key - 1) / n_key), 1, N_SEQ);
    const auto tree = index_score_wide<4, 4>;
    need(cudaFuncSetAttribute(tree, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    need(cudaFuncSetAttribute(score_half, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    const auto reads = [&]() { read_all<<<(unsigned)(4 * n_sm), 512>>>((const uint4 *)r.cache.base, n_byte / 16, r.count); };
    const double read_us = time_of(REPEATS, []() {}, reads);
    printf("%.3f GB of keys; reads alone %.1f us, %.0f GB/s\nversion,us,share\n", 1e-9 * (double)n_byte, read_us, 1e-3 * (double)n_byte / read_us);
    scan("tree: key scan", r, read_us, [&]() { tree<<<grid, IWIDE_THREADS, shared>>>(r, 1, 1, n_key); });
    unsigned char *as_bf16 = r.query;
    r.query = as_half;
    scan("f16: key scan", r, read_us, [&]() { score_half<<<grid, IWIDE_THREADS, shared>>>(r, n_key); });
    r.query = as_bf16;
    scan("tree: key scan again", r, read_us, [&]() { tree<<<grid, IWIDE_THREADS, shared>>>(r, 1, 1, n_key); });
    select_at = on_gpu<int32_t>(N_SEQ * TOPK);
    n_select = on_gpu<int32_t>(N_SEQ);
    choose("tree: selection with the scan's histogram", r, index_topk);
    r.count = NULL;
    choose("tree: selection alone", r, index_topk);
    choose("by a sample: selection alone", r, topk_sampled);
    return 0;
}
