/* lab_digest: how fast versions of the hash of device_view_cuda.cu go over an adapter of rank 32 of slice-full, and reads alone.
 *
 * Layer: experiments. One program that needs nothing installed where it runs, about 10 s:
 *   nvcc -std=c++17 -O3 --fmad=false -Xcompiler=-static-libgcc,-static-libstdc++ -Isrc -Isrc/base -Isrc/device \
 *     -gencode=arch=compute_90a,code=sm_90a experiments/kernel_lab/lab_digest.cu -o lab_digest && timeout 90 ./lab_digest
 * Random elements in the shapes of the real maps, among them B of kv_b, half of whose rows lie turned. Every version's answers are compared
 * with those of version 0, the kernel of the tree, and many of them with the library's digest; some matrices hold a NaN, one only zeros.
 * Argument: part of the names of the versions to run beside version 0. Prints `version,registers,blocks_per_sm,us,gbs,share,turned_us`:
 * medians of REPEATS launches; share of the rate of reads alone; the turned matrix alone. */
#include "device_view_cuda.cu"

#include <algorithm>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { REPEATS = 9, RANK = 32, WARP = 32, STRIPES = BR_XXH3_BLOCK / BR_XXH3_STRIPE, PIECES = BR_XXH3_STRIPE / BR_XXH3_PIECE };

extern "C" br_status br_fail(br_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    return status;
}

static void need(cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "lab_digest: %s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

/* ---- what the new versions share --------------------------------------------------------------------------------------------------------- */

/* Four threads a block of the hash, each with two accumulators of its own: thread p reads piece p of every stripe. A warp has 8 blocks. */

struct flags {
    uint32_t any, bad; /* of two elements each: their bits; a sign that the last bit of the exponent carries into when all its bits are set */
};

template <int WARPS> struct room_of {
    uint64_t sum[2][8 * WARPS][BR_XXH3_LANES]; /* of the round at hand and of the one before */
    uint64_t acc[BR_XXH3_LANES], rest[BR_XXH3_LANES], secret[24];
    uint32_t any, bad, first_bad;
};

static __device__ __forceinline__ void take(uint64_t sum[2], flags *f, const uint64_t word[2], const uint64_t *key) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t x = (uint32_t)(word[i / 2] >> 32 * (i % 2));
        f->any |= x;
        f->bad |= (x + 0x00800080u) ^ x;
    }
    br_xxh3_add(sum, word, key);
}

/* As view_read; a piece within a row takes one division for its eight elements. */
static __device__ __forceinline__ void read_strided(const br_view *v, view_form form, uint32_t e, uint64_t word[2]) {
    if (form != VIEW_ANY || v->n_col % VIEW_HALVES || e % VIEW_HALVES) {
        view_read(v, form, e, word);
        return;
    }
    const uint32_t row = e / (uint32_t)v->n_col, r = row % (uint32_t)(v->part[0].n_row + v->part[1].n_row);
    const int64_t step = v->part[r >= (uint32_t)v->part[0].n_row].col;
    const uint16_t *at = view_at(v, e);
    word[0] = word[1] = 0;
#pragma unroll
    for (int i = 0; i < VIEW_HALVES; i++)
        word[i / 4] |= (uint64_t)at[i * step] << 16 * (i % 4);
}

static __device__ __forceinline__ void take_strided(const br_view *v, view_form form, uint32_t byte, int secret, uint64_t sum[2], flags *f) {
    const int p = (int)threadIdx.x % PIECES;
    const uint64_t key[2] = {br_xxh3_secret(secret + BR_XXH3_PIECE * p), br_xxh3_secret(secret + BR_XXH3_PIECE * p + 8)};
    uint64_t word[2];
    read_strided(v, form, (byte + (uint32_t)(BR_XXH3_PIECE * p)) / 2, word);
    take(sum, f, word, key);
}

template <int WARPS> static __device__ __forceinline__ void begin(room_of<WARPS> *r) {
    const int t = (int)threadIdx.x;
    if (t < 24)
        r->secret[t] = br_xxh3_words_device[t];
    if (t < BR_XXH3_LANES)
        r->acc[t] = br_xxh3_start(t);
    if (t == 0)
        r->bad = r->any = 0, r->first_bad = UINT32_MAX;
    __syncthreads();
}

/* The chain through n sums, by the threads below 8. */
template <int WARPS> static __device__ __forceinline__ void chain_of(room_of<WARPS> *r, int at, uint32_t n) {
    const int lane = (int)threadIdx.x;
    if (lane >= BR_XXH3_LANES)
        return;
    const uint64_t key = br_xxh3_step_key(lane);
    uint64_t acc = r->acc[lane];
#pragma unroll 8
    for (uint32_t b = 0; b < n; b++)
        acc = br_xxh3_step(acc, r->sum[at][b][lane], key);
    r->acc[lane] = acc;
}

/* Round after round; sum_of(first, sum) gives this thread's two sums of the block first + its own. */
template <int WARPS, class F> static __device__ __forceinline__ void rounds(room_of<WARPS> *r, uint32_t n_block, F sum_of) {
    const int p = (int)threadIdx.x % PIECES, mine = (int)threadIdx.x / PIECES;
    int at = 0;
    for (uint32_t first = 0; first < n_block; first += 8 * WARPS, at ^= 1) {
        uint64_t sum[2] = {0, 0};
        if (first)
            chain_of(r, at ^ 1, 8 * WARPS);
        sum_of(first, sum);
        r->sum[at][mine][2 * p] = sum[0];
        r->sum[at][mine][2 * p + 1] = sum[1];
        __syncthreads();
    }
    if (n_block)
        chain_of(r, at ^ 1, (n_block - 1) % (8 * WARPS) + 1);
}

template <int WARPS> static __device__ __forceinline__ void rounds_strided(const br_view *v, view_form form, room_of<WARPS> *r, flags *f) {
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v));
    rounds(r, n_block, [&](uint32_t first, uint64_t sum[2]) {
        const uint32_t block = first + threadIdx.x / PIECES;
        if (block >= n_block)
            return;
#pragma unroll 1
        for (uint32_t s = 0; s < STRIPES; s++)
            take_strided(v, form, block * BR_XXH3_BLOCK + s * BR_XXH3_STRIPE, 8 * (int)s, sum, f);
    });
}

/* By one warp: the stripes behind the whole blocks, then the last 64 bytes. */
template <int WARPS> static __device__ __forceinline__ void rest_of(const br_view *v, view_form form, room_of<WARPS> *r, flags *f) {
    const int l = (int)threadIdx.x % WARP;
    const uint32_t n = view_bytes(v), begins = br_xxh3_blocks(n) * BR_XXH3_BLOCK;
    uint64_t sum[2] = {0, 0};
#pragma unroll 1
    for (uint32_t s = (uint32_t)(l / PIECES); s <= STRIPES; s += WARP / PIECES) {
        if (s < br_xxh3_stripes(n))
            take_strided(v, form, begins + s * BR_XXH3_STRIPE, 8 * (int)s, sum, f);
        if (s == STRIPES)
            take_strided(v, form, n - BR_XXH3_STRIPE, BR_XXH3_LAST, sum, f);
    }
    __syncwarp();
#pragma unroll
    for (int h = WARP / 2; h >= PIECES; h /= 2) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], h);
        sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], h);
    }
    if (l < PIECES)
        r->rest[2 * l] = sum[0], r->rest[2 * l + 1] = sum[1];
}

template <int WARPS> static __device__ __forceinline__ void end(const br_view *v, view_form form, room_of<WARPS> *r, flags f, br_seen *seen) {
    const uint32_t n = view_bytes(v);
    if (threadIdx.x >= WARP * (WARPS - 1))
        rest_of(v, form, r, &f);
    if (f.any & 0x7fff7fffu)
        r->any = 1;
    if (f.bad & 0x80008000u)
        r->bad = 1;
    __syncthreads();
    if (threadIdx.x < BR_XXH3_LANES)
        r->acc[threadIdx.x] += r->rest[threadIdx.x];
    for (uint32_t e = threadIdx.x; r->bad && e < n / 2; e += WARP * WARPS)
        if ((*view_at(v, e) & 0x7f80) == 0x7f80)
            atomicMin(&r->first_bad, e);
    __syncthreads();
    if (threadIdx.x)
        return;
    seen->digest = br_xxh3_long(r->acc, n);
    seen->first_bad = r->first_bad;
    seen->any = r->any;
}

/* ---- version 1: pieces in registers, each asked for AHEAD stripes before it is used ----------------------------------------------------- */

template <int AHEAD> struct ahead_of {
    const unsigned char *at; /* of the block at hand */
    ulonglong2 piece[AHEAD];
};

template <int AHEAD> static __device__ __forceinline__ void ask(ahead_of<AHEAD> *ahead, int s, int from, int is_there) {
    if (is_there)
        ahead->piece[s % AHEAD] = *(const ulonglong2 *)(ahead->at + from);
}

/* Where no block is left, words are zero or those of the last one once more, and the sums are nobody's. */
template <int WARPS, int AHEAD>
static __device__ __forceinline__ void sum_ahead(ahead_of<AHEAD> *ahead, const uint64_t *key, int now, int next, uint64_t sum[2], flags *f) {
#pragma unroll
    for (int s = 0; s < STRIPES; s++) {
        const uint64_t word[2] = {ahead->piece[s % AHEAD].x, ahead->piece[s % AHEAD].y};
        const int to = (s + AHEAD) % STRIPES, later = s + AHEAD >= STRIPES;
        ask(ahead, s, later * 8 * WARPS * BR_XXH3_BLOCK + to * BR_XXH3_STRIPE, later ? next : now);
        take(sum, f, word, key + s);
    }
    ahead->at += 8 * WARPS * BR_XXH3_BLOCK;
}

template <int WARPS, int AHEAD, int PER_SM>
static __global__ void __launch_bounds__(WARP *WARPS, PER_SM) hash_registers(const br_view *view, int, br_seen *seen) {
    __shared__ room_of<WARPS> room;
    const br_view *v = &view[blockIdx.x];
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v)), mine = threadIdx.x / PIECES;
    const int p = (int)threadIdx.x % PIECES;
    const view_form form = view_form_of(v);
    flags f = {0, 0};
    begin(&room);
    if (form == VIEW_DENSE) {
        ahead_of<AHEAD> ahead = {(const unsigned char *)v->part[0].at + mine * BR_XXH3_BLOCK + p * BR_XXH3_PIECE, {}};
#pragma unroll
        for (int s = 0; s < AHEAD; s++)
            ask(&ahead, s, s * BR_XXH3_STRIPE, mine < n_block);
        rounds(&room, n_block, [&](uint32_t first, uint64_t sum[2]) {
            sum_ahead<WARPS>(&ahead, room.secret + 2 * p, first + mine < n_block, first + 8 * WARPS + mine < n_block, sum, &f);
        });
    } else {
        rounds_strided(v, form, &room, &f);
    }
    end(v, form, &room, f, &seen[blockIdx.x]);
}

/* ---- version 2: bulk copies into a ring of STAGES x 8 blocks a warp; where threads stay, copies run on into their next view --------------- */

static __device__ __forceinline__ uint32_t shared_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void open_barrier(uint64_t *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_at(barrier)) : "memory");
}

static __device__ __forceinline__ void wait_for(uint64_t *barrier, uint32_t phase) {
    asm volatile("{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
                     shared_at(barrier)),
                 "r"(phase)
                 : "memory");
}

static __device__ __forceinline__ void copy_to(void *to, const void *from, uint32_t n, uint64_t *barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(n) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_at(to)), "l"(from),
                 "r"(n), "r"(shared_at(barrier))
                 : "memory");
}

template <int WARPS, int STAGES> struct ring_of {
    unsigned char stage[WARPS][STAGES][8 * BR_XXH3_BLOCK];
    uint64_t full[WARPS][STAGES];
    room_of<WARPS> room;
};

/* The next piece of 8 blocks that a warp has to fetch. */
struct cursor {
    int at;
    uint32_t block, n_block, n_fetched;
    const unsigned char *from;
};

/* The next view, from c->at on, of which this warp has blocks. */
static __device__ __forceinline__ void look(cursor *c, const br_view *view, int n) {
    for (; c->at < n; c->at += (int)gridDim.x) {
        c->block = 8 * (threadIdx.x / WARP);
        c->n_block = view_form_of(&view[c->at]) == VIEW_DENSE ? br_xxh3_blocks(view_bytes(&view[c->at])) : 0;
        c->from = (const unsigned char *)view[c->at].part[0].at;
        if (c->block < c->n_block)
            return;
    }
}

/* By the first thread of a warp. */
template <int WARPS, int STAGES> static __device__ __forceinline__ void fetch(ring_of<WARPS, STAGES> *ring, cursor *c, const br_view *view, int n) {
    const int warp = (int)threadIdx.x / WARP;
    if (threadIdx.x % WARP || c->at >= n)
        return;
    const uint32_t left = min(8u, c->n_block - c->block), s = c->n_fetched++ % STAGES;
    copy_to(ring->stage[warp][s], c->from + BR_XXH3_BLOCK * (size_t)c->block, BR_XXH3_BLOCK * left, &ring->full[warp][s]);
    c->block += 8 * WARPS;
    if (c->block < c->n_block)
        return;
    c->at += (int)gridDim.x;
    look(c, view, n);
}

template <int WARPS, int STAGES, int PER_SM>
static __global__ void __launch_bounds__(WARP *WARPS, PER_SM) hash_ring(const br_view *view, int n, br_seen *seen) {
    extern __shared__ __align__(128) unsigned char shared[];
    ring_of<WARPS, STAGES> *ring = (ring_of<WARPS, STAGES> *)shared;
    const int l = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    const uint64_t *key = ring->room.secret + 2 * (l % PIECES);
    uint32_t n_used = 0;
    cursor c = {(int)blockIdx.x, 0, 0, 0, NULL};
    for (int s = 0; s < STAGES && l == 0; s++)
        open_barrier(&ring->full[warp][s]);
    look(&c, view, n);
    for (int s = 0; s < STAGES; s++)
        fetch(ring, &c, view, n);
    __syncwarp();
    for (int i = (int)blockIdx.x; i < n; i += (int)gridDim.x) {
        const br_view *v = &view[i];
        const view_form form = view_form_of(v);
        const uint32_t n_block = br_xxh3_blocks(view_bytes(v));
        flags f = {0, 0};
        begin(&ring->room);
        if (form == VIEW_DENSE)
            rounds(&ring->room, n_block, [&](uint32_t first, uint64_t sum[2]) {
                if (first + 8 * (uint32_t)warp >= n_block)
                    return;
                const uint32_t s = n_used % STAGES, phase = n_used++ / STAGES % 2;
                const unsigned char *from = ring->stage[warp][s] + BR_XXH3_BLOCK * (l / PIECES) + BR_XXH3_PIECE * (l % PIECES);
                wait_for(&ring->full[warp][s], phase);
                if (first + threadIdx.x / PIECES < n_block) {
#pragma unroll
                    for (int q = 0; q < STRIPES; q++) {
                        const ulonglong2 x = *(const ulonglong2 *)(from + BR_XXH3_STRIPE * q);
                        const uint64_t word[2] = {x.x, x.y};
                        take(sum, &f, word, key + q);
                    }
                }
                __syncwarp();
                fetch(ring, &c, view, n);
            });
        else
            rounds_strided(v, form, &ring->room, &f);
        end(v, form, &ring->room, f, &seen[i]);
        __syncthreads();
    }
}

/* ---- reads alone ------------------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(512) read_all(const uint4 *at, size_t n, uint32_t *never) {
    const size_t stride = (size_t)gridDim.x * 512;
    uint32_t x = 0;
    for (size_t i = (size_t)blockIdx.x * 512 + threadIdx.x; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = at[i + k * stride];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678u && never)
        *never = x;
}

/* ---- the adapter ------------------------------------------------------------------------------------------------------------------------- */

static __global__ void make_random(uint64_t *to, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        to[i] = (x ^ x >> 31) & 0xbfffbfffbfffbfffu; /* finite */
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

template <class F> static double time_of(F launch) {
    cudaEvent_t begin, end;
    double us[REPEATS];
    need(cudaEventCreate(&begin), "event");
    need(cudaEventCreate(&end), "event");
    for (int i = -2; i < REPEATS; i++) {
        float ms;
        need(cudaEventRecord(begin), "event");
        launch();
        need(cudaGetLastError(), "launch");
        need(cudaEventRecord(end), "event");
        need(cudaEventSynchronize(end), "running");
        need(cudaEventElapsedTime(&ms, begin, end), "event");
        us[i < 0 ? 0 : i] = 1e3 * ms;
    }
    std::sort(us, us + REPEATS);
    return us[REPEATS / 2];
}

static br_view *views_device;
static br_seen *seen_device;
static std::vector<br_seen> of_tree;
static const char *wanted = "";
static double read_us;
static int n_sm;

static int is_right(const char *name) {
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
        return 0;
    }
    return 1;
}

/* launch(view, n) starts the kernel k. */
template <class K, class F> static void run(const char *name, K k, int threads, size_t shared, F launch) {
    cudaFuncAttributes attributes;
    int per_sm;
    const int n = (int)views.size();
    if (!strstr(name, wanted))
        return;
    need(cudaFuncGetAttributes(&attributes, k), "attributes");
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k, threads, shared), "occupancy");
    need(cudaMemset(seen_device, 0xee, sizeof(br_seen) * (size_t)n), "poison");
    const double us = time_of([&]() { launch(views_device, n, per_sm); });
    if (!is_right(name))
        return;
    const size_t turned = (size_t)(std::find_if(views.begin(), views.end(), [](const br_view &v) { return v.part[1].n_row; }) - views.begin());
    const double turned_us = time_of([&]() { launch(views_device + turned, 1, per_sm); });
    printf("%s,%d,%d,%.1f,%.0f,%.3f,%.1f\n", name, attributes.numRegs, per_sm, us, 1e-3 * (double)n_byte / us, read_us / us, turned_us);
    fflush(stdout);
}

template <int WARPS, int AHEAD, int PER_SM> static void run_registers(const char *name) {
    const auto k = hash_registers<WARPS, AHEAD, PER_SM>;
    run(name, k, WARP * WARPS, 0, [&](const br_view *view, int n, int) { k<<<(unsigned)n, WARP * WARPS>>>(view, n, seen_device); });
}

template <int WARPS, int STAGES, int PER_SM> static void run_ring(const char *name, int stays) {
    const auto k = hash_ring<WARPS, STAGES, PER_SM>;
    const size_t shared = sizeof(ring_of<WARPS, STAGES>);
    need(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    run(name, k, WARP * WARPS, shared, [&](const br_view *view, int n, int per_sm) {
        k<<<(unsigned)(stays ? std::min(n, per_sm * n_sm) : n), WARP * WARPS, shared>>>(view, n, seen_device);
    });
}

int main(int n_arg, char **arg) {
    need(cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    uint16_t *memory = make_adapter();
    need(cudaMalloc(&views_device, views.size() * sizeof(br_view)), "memory");
    need(cudaMalloc(&seen_device, views.size() * sizeof(br_seen)), "memory");
    need(cudaMemcpy(views_device, views.data(), views.size() * sizeof(br_view), cudaMemcpyHostToDevice), "views");
    read_us = time_of([&]() { read_all<<<(unsigned)(4 * n_sm), 512>>>((const uint4 *)memory, n_byte / 16, (uint32_t *)memory); });
    printf("%zu views, %.3f GB; reads alone %.1f us, %.0f GB/s\n", views.size(), 1e-9 * (double)n_byte, read_us, 1e-3 * (double)n_byte / read_us);
    printf("version,registers,blocks_per_sm,us,gbs,share,turned_us\n");
    run("0 tree", hash_views, THREADS, 0, [&](const br_view *view, int n, int) { hash_views<<<(unsigned)n, THREADS>>>(view, seen_device); });
    wanted = n_arg > 1 ? arg[1] : "";
    run_registers<4, 8, 5>("1 registers: 4 warps and 8 ahead");
    run_registers<4, 16, 3>("1 registers: 4 warps and 16 ahead");
    run_registers<8, 8, 2>("1 registers: 8 warps and 8 ahead");
    run_ring<4, 2, 3>("2 ring: 4 warps x 2 stages", 0);
    run_ring<4, 2, 3>("2 ring: 4 warps x 2 stages that stay", 1);
    run_ring<4, 3, 2>("2 ring: 4 warps x 3 stages", 0);
    run_ring<4, 3, 2>("2 ring: 4 warps x 3 stages that stay", 1);
    run_ring<8, 1, 3>("2 ring: 8 warps x 1 stage", 0);
    run_ring<8, 1, 3>("2 ring: 8 warps x 1 stage that stays", 1);
    return 0;
}
