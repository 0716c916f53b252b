/* lab_digest: how fast device_view_cuda.cu hashes and places an adapter of rank 32 of slice-full, beside reads and copies alone, and versions of
 * placing.
 *
 * Layer: experiments. One program that needs nothing installed where it runs, about 10 s:
 *   nvcc -std=c++17 -O3 --fmad=false -Xcompiler=-static-libgcc,-static-libstdc++ -Isrc -Isrc/base -Isrc/device \
 *     -gencode=arch=compute_90a,code=sm_90a experiments/kernel_lab/lab_digest.cu -o lab_digest && timeout 90 ./lab_digest
 * Random elements in the shapes of the real maps, among them B of kv_b, half of whose rows lie turned. Every version's answers are compared
 * with those of the tree's kernel, and many of them with the library's digest; some matrices hold a NaN, one only zeros.
 * Then placing: dense sources to where the views say and the hash of what went there, in one kernel or in two; what lies there is hashed again
 * by the tree's kernel. Prints `version,registers,blocks_per_sm,us,gbs,share,turned_us`, placing without gbs: medians of REPEATS launches;
 * share of the rate of reads (placing: of copies) alone; the turned matrix alone. */
#include "lab_digest_versions.cuh"
#include "lab_time.cuh"

#include <stdarg.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { REPEATS = 9, RANK = 32 };

extern "C" br_status br_fail(br_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    return status;
}

/* ---- the adapter ------------------------------------------------------------------------------------------------------------------------- */

static __global__ void make_random(uint64_t *to, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        to[i] = mixed(i) & 0xbfffbfffbfffbfffu; /* finite */
    }
}

static std::vector<br_view> views; /* long ones first; their parts begin at element numbers, then in device memory */
static size_t n_element, n_byte;

static void add(int32_t n_row, int32_t n_col) {
    br_view v = {};
    v.n_row = n_row, v.n_col = n_col;
    v.part[0] = br_part{(uint16_t *)(2 * n_element), 0, n_col, 1, n_row};
    views.push_back(v);
    n_element += ((size_t)n_row * (size_t)n_col + 127) / 128 * 128;
}

static void add_maps(int n, int32_t n_in, int32_t n_out) {
    for (int i = 0; i < n; i++) {
        add(RANK, n_in);
        add(n_out, RANK);
    }
}

/* B of kv_b: of each head 128 rows turned, then 128 plain. */
static void add_turned(void) {
    add(96 * 256, RANK);
    br_view *v = &views.back();
    v->part[1] = br_part{v->part[0].at + 96 * 128 * RANK, 128 * RANK, RANK, 1, 128};
    v->part[0] = br_part{v->part[0].at, 128 * RANK, 1, 128, 128};
}

static uint16_t *make_adapter(void) {
    uint16_t *memory;
    const uint16_t nan = 0xffc1;
    add_turned();
    add_maps(17, 7168, 12288);
    add_maps(3, 128, 12288);
    add_maps(6, 7168, 128);
    add_maps(1, 1536, 18432);
    add_maps(1, 7168, 576);
    add_maps(12, 7168, 6144);
    add_maps(8, 7168, 3584);
    add_maps(4 * 896 * 2, 3584, 3072);
    add_maps(4 * 896, 3072, 3584);
    add(7, 41); /* not a whole number of pieces */
    add(3, 171);
    add(512, 1);
    add(1, 513);
    std::stable_sort(views.begin(), views.end(), [](const br_view &a, const br_view &b) { return view_bytes(&a) > view_bytes(&b); });
    need(cudaMalloc(&memory, n_element * sizeof *memory), "memory");
    make_random<<<1024, 256>>>((uint64_t *)memory, n_element / 4);
    for (br_view &v : views) {
        n_byte += view_bytes(&v);
        for (br_part &p : v.part)
            p.at = (uint16_t *)((unsigned char *)memory + (size_t)p.at);
    }
    need(cudaMemcpy(views[3].part[0].at + 16 * 1024, &nan, 2, cudaMemcpyHostToDevice), "a NaN");
    need(cudaMemcpy(views[5].part[0].at + view_bytes(&views[5]) / 2 - 3, &nan, 2, cudaMemcpyHostToDevice), "a NaN");
    need(cudaMemcpy(views[7].part[0].at + 100001, &nan, 2, cudaMemcpyHostToDevice), "a NaN");
    need(cudaMemset(views[60].part[0].at, 0, view_bytes(&views[60])), "zeros");
    return memory;
}

/* ---- checks and times ---------------------------------------------------------------------------------------------------------------------- */

/* What the library says of a view, element by element from a copy of its parts. */
static br_seen expected(const br_view &device_view) {
    br_view v = device_view;
    const uint32_t n = view_bytes(&v);
    std::vector<uint16_t> part[2], flat(n / 2);
    br_seen seen = {{0, 0}, UINT32_MAX, 0};
    for (int i = 0; i < 2 && v.part[i].n_row; i++) {
        part[i].resize(v.part[1].n_row ? n / 4 : n / 2);
        need(cudaMemcpy(part[i].data(), v.part[i].at, part[i].size() * 2, cudaMemcpyDeviceToHost), "reading back");
        v.part[i].at = part[i].data();
    }
    for (uint32_t e = 0; e < n / 2; e++) {
        flat[e] = *view_at(&v, e);
        if ((flat[e] & 0x7f80) == 0x7f80 && seen.first_bad == UINT32_MAX)
            seen.first_bad = e;
        seen.any |= (flat[e] & 0x7fff) != 0;
    }
    const XXH128_hash_t h = XXH3_128bits(flat.data(), n);
    seen.digest.lo = h.low64;
    seen.digest.hi = h.high64;
    return seen;
}

static br_view *views_device;
static br_seen *seen_device;
static std::vector<br_seen> of_tree;
static double read_us;
static int n_sm;

/* Ends the program where it is not. */
static void check(const char *name) {
    std::vector<br_seen> seen(views.size());
    need(cudaMemcpy(seen.data(), seen_device, sizeof(br_seen) * seen.size(), cudaMemcpyDeviceToHost), "reading back");
    if (of_tree.empty())
        of_tree = seen;
    for (size_t i = 0; i < seen.size(); i++) {
        const int by_library = i < 80 || i + 20 > seen.size() || i % 499 == 0;
        const br_seen right = by_library ? expected(views[i]) : of_tree[i];
        if (memcmp(&seen[i], &right, sizeof right) == 0)
            continue;
        printf("%s: view %zu of %u bytes is wrong (first bad %u for %u, any %u for %u)\n", name, i, view_bytes(&views[i]), seen[i].first_bad,
               right.first_bad, seen[i].any, right.any);
        exit(1);
    }
}

/* launch(view, n) starts the kernel k. */
template <class K, class F> static void run(const char *name, K k, F launch) {
    cudaFuncAttributes attributes;
    int per_sm;
    const int n = (int)views.size();
    need(cudaFuncGetAttributes(&attributes, k), "attributes");
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k, THREADS, 0), "occupancy");
    need(cudaMemset(seen_device, 0xee, sizeof(br_seen) * (size_t)n), "poison");
    const double us = time_of(REPEATS, []() {}, [&]() { launch(views_device, n); });
    check(name);
    const size_t turned = (size_t)(std::find_if(views.begin(), views.end(), [](const br_view &v) { return v.part[1].n_row; }) - views.begin());
    const double turned_us = time_of(REPEATS, []() {}, [&]() { launch(views_device + turned, 1); });
    printf("%s,%d,%d,%.1f,%.0f,%.3f,%.1f\n", name, attributes.numRegs, per_sm, us, 1e-3 * (double)n_byte / us, read_us / us, turned_us);
    fflush(stdout);
}

/* ---- placing -------------------------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(256) take_out(const br_view *view, uint16_t *to) {
    for (uint32_t e = blockIdx.x * 256 + threadIdx.x; e < view_bytes(view) / 2; e += gridDim.x * 256)
        to[e] = *view_at(view, e);
}

static br_view *placed_device;
static const uint16_t **src_device;
static uint16_t *placed;
static double copy_us;

/* A second adapter beside the first, and dense sources of the same values. */
static void make_places(const uint16_t *memory) {
    std::vector<br_view> there = views;
    std::vector<const uint16_t *> src;
    need(cudaMalloc(&placed, n_element * sizeof *placed), "memory");
    for (size_t i = 0; i < views.size(); i++) {
        uint16_t *dense = views[i].part[0].at;
        for (br_part &part : there[i].part)
            part.at = placed + (part.at - memory);
        if (view_form_of(&views[i]) != VIEW_DENSE) {
            need(cudaMalloc(&dense, view_bytes(&views[i]) + 16), "memory");
            take_out<<<256, 256>>>(views_device + i, dense);
        }
        src.push_back(dense);
    }
    need(cudaMalloc(&placed_device, there.size() * sizeof(br_view)), "memory");
    need(cudaMalloc(&src_device, src.size() * sizeof(uint16_t *)), "memory");
    need(cudaMemcpy(placed_device, there.data(), there.size() * sizeof(br_view), cudaMemcpyHostToDevice), "views");
    need(cudaMemcpy(src_device, src.data(), src.size() * sizeof(uint16_t *), cudaMemcpyHostToDevice), "sources");
    copy_us = time_of(REPEATS, []() {}, [&]() { need(cudaMemcpyAsync(placed, memory, n_byte, cudaMemcpyDeviceToDevice), "copying"); });
    printf("placing: copies alone %.1f us\nversion,registers,blocks_per_sm,us,share of copies,turned_us\n", copy_us);
}

/* launch(view, src, n) places, and hashes where so said; the tree's kernel then says what lies there. */
template <class K, class F> static void run_placing(const char *name, int hashes, K k, F launch) {
    cudaFuncAttributes attributes;
    int per_sm;
    const int n = (int)views.size();
    need(cudaFuncGetAttributes(&attributes, k), "attributes");
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k, THREADS, 0), "occupancy");
    need(cudaMemset(placed, 0xee, n_element * sizeof *placed), "poison");
    need(cudaMemset(seen_device, 0xee, sizeof(br_seen) * (size_t)n), "poison");
    const double us = time_of(REPEATS, []() {}, [&]() { launch(placed_device, src_device, n); });
    if (hashes)
        check(name);
    hash_views<<<(unsigned)n, THREADS>>>(placed_device, seen_device);
    check(name);
    const size_t turned = (size_t)(std::find_if(views.begin(), views.end(), [](const br_view &v) { return v.part[1].n_row; }) - views.begin());
    const double turned_us = time_of(REPEATS, []() {}, [&]() { launch(placed_device + turned, src_device + turned, 1); });
    printf("%s,%d,%d,%.1f,%.3f,%.1f\n", name, attributes.numRegs, per_sm, us, copy_us / us, turned_us);
    fflush(stdout);
}

int main(void) {
    need(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    uint16_t *memory = make_adapter();
    need(cudaMalloc(&views_device, views.size() * sizeof(br_view)), "memory");
    need(cudaMalloc(&seen_device, views.size() * sizeof(br_seen)), "memory");
    need(cudaMemcpy(views_device, views.data(), views.size() * sizeof(br_view), cudaMemcpyHostToDevice), "views");
    read_us = time_of(REPEATS, []() {}, [&]() { read_all<<<(unsigned)(4 * n_sm), 512>>>((const uint4 *)memory, n_byte / 16, (uint32_t *)memory); });
    printf("%zu views, %.3f GB; reads alone %.1f us, %.0f GB/s\n", views.size(), 1e-9 * (double)n_byte, read_us, 1e-3 * (double)n_byte / read_us);
    printf("version,registers,blocks_per_sm,us,gbs,share,turned_us\n");
    run("tree", hash_views, [&](const br_view *view, int n) { hash_views<<<(unsigned)n, THREADS>>>(view, seen_device); });
    make_places(memory);
    run_placing("tree", 1, place_views, [&](const br_view *view, const uint16_t *const *src, int n) {
        place_views<<<(unsigned)n, THREADS>>>(view, src, seen_device);
    });
    run_placing("two kernels: the first alone", 0, place_parts, [&](const br_view *view, const uint16_t *const *src, int n) {
        place_parts<<<dim3((unsigned)n, PARTS), THREADS>>>(view, src);
    });
    run_placing("two kernels", 1, place_parts, [&](const br_view *view, const uint16_t *const *src, int n) {
        place_parts<<<dim3((unsigned)n, PARTS), THREADS>>>(view, src);
        hash_views<<<(unsigned)n, THREADS>>>(view, seen_device);
    });
    run_placing("the hash of what is stored", 1, place_summing, [&](const br_view *view, const uint16_t *const *src, int n) {
        place_summing<<<(unsigned)n, THREADS>>>(view, src, seen_device);
    });
    return 0;
}
