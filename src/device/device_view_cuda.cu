/* Views on a GPU; see device_view.h.
 *
 * hash: a block of 256 threads a view, four threads a block of the hash: thread p of them reads piece p of every stripe, 8 stripes before it is
 * used, and has two accumulators of its own. Sums of a round of 64 blocks go to shared memory, and while the next round's pieces are on their
 * way, eight threads take the chain through them. No order: sums are integers.
 * place: the same threads, 8 pieces a thread read before the first is written; then the hash, mostly out of L2.
 * Where rows do not follow each other, a thread reads a few pieces at once, found by their element, and nothing further ahead.
 * fill, check: a block of 256 threads a job, elements by strides. */
#include <cuda_runtime.h>
#define _Noreturn [[noreturn]]
extern "C" {
#include "device_parts.h"
#include "view_core.h"
}

enum { THREADS = 256, AHEAD = 8, STRIDED = 4 /* pieces at once */, ROUND = THREADS / VIEW_PIECES, HASH_PER_SM = 2, WARP = 32 };

static br_status launched(const char *what) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "%s: the GPU refused the launch: %s", what, cudaGetErrorString(error));
}

/* ---- hash ------------------------------------------------------------------------------------------------------------------------- */

typedef struct hash_room {
    uint64_t sum[2][ROUND][BR_XXH3_LANES]; /* of the round at hand and of the one before */
    uint64_t acc[BR_XXH3_LANES], rest[BR_XXH3_LANES];
    uint64_t secret[24];
    uint32_t any, bad, first_bad;
} hash_room;

static __device__ __forceinline__ void begin(hash_room *room) {
    const int t = (int)threadIdx.x;
    if (t < 24)
        room->secret[t] = br_xxh3_words_device[t];
    if (t < BR_XXH3_LANES)
        room->acc[t] = br_xxh3_start(t);
    if (t == 0) {
        room->any = room->bad = 0;
        room->first_bad = UINT32_MAX;
    }
    __syncthreads();
}

/* The chain through n sums, by the threads below BR_XXH3_LANES. */
static __device__ __forceinline__ void chain(hash_room *room, int at, uint32_t n) {
    const int lane = (int)threadIdx.x;
    if (lane >= BR_XXH3_LANES)
        return;
    const uint64_t key = br_xxh3_step_key(lane);
    uint64_t acc = room->acc[lane];
#pragma unroll 8
    for (uint32_t b = 0; b < n; b++)
        acc = br_xxh3_step(acc, room->sum[at][b][lane], key);
    room->acc[lane] = acc;
}

/* Round after round; sum_of(first, sum) gives this thread's two sums of its block of the round that begins with block `first`. */
template <class F> static __device__ __forceinline__ void rounds(hash_room *room, uint32_t n_block, F sum_of) {
    const int p = (int)threadIdx.x % VIEW_PIECES, mine = (int)threadIdx.x / VIEW_PIECES;
    int at = 0;
    for (uint32_t first = 0; first < n_block; first += ROUND, at ^= 1) {
        uint64_t sum[2] = {0, 0};
        if (first)
            chain(room, at ^ 1, ROUND);
        sum_of(first, sum);
        room->sum[at][mine][2 * p] = sum[0];
        room->sum[at][mine][2 * p + 1] = sum[1];
        __syncthreads();
    }
    if (n_block)
        chain(room, at ^ 1, (n_block - 1) % ROUND + 1);
}

/* Pieces on their way to this thread; those of its next block follow those of this one. */
struct ahead {
    const unsigned char *at; /* of the block at hand */
    ulonglong2 piece[AHEAD];
};

static __device__ __forceinline__ void ask(ahead *a, int s, int from, int is_there) {
    if (is_there)
        a->piece[s % AHEAD] = __ldcg((const ulonglong2 *)(a->at + from)); /* of L2, which has what this kernel has stored */
}

/* Where no block is left, the pieces are zero or those of the last one once more, and the sums are nobody's. */
static __device__ __forceinline__ void sum_ahead(ahead *a, const uint64_t *key, int is_there, int is_next, uint64_t sum[2], view_flags *flags) {
#pragma unroll
    for (int s = 0; s < VIEW_STRIPES; s++) {
        const uint64_t word[2] = {a->piece[s % AHEAD].x, a->piece[s % AHEAD].y};
        const int to = (s + AHEAD) % VIEW_STRIPES, later = s + AHEAD >= VIEW_STRIPES;
        ask(a, s, later * ROUND * BR_XXH3_BLOCK + to * BR_XXH3_STRIPE, later ? is_next : is_there);
        view_flag(flags, word);
        br_xxh3_add(sum, word, key + s);
    }
    a->at += ROUND * BR_XXH3_BLOCK;
}

static __device__ __forceinline__ void hash_dense(const br_view *v, hash_room *room, view_flags *flags) {
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v)), mine = threadIdx.x / VIEW_PIECES;
    const int p = (int)threadIdx.x % VIEW_PIECES;
    ahead a = {(const unsigned char *)v->part[0].at + mine * BR_XXH3_BLOCK + p * BR_XXH3_PIECE, {}};
#pragma unroll
    for (int s = 0; s < AHEAD; s++)
        ask(&a, s, s * BR_XXH3_STRIPE, mine < n_block);
    rounds(room, n_block, [&](uint32_t first, uint64_t sum[2]) {
        sum_ahead(&a, room->secret + 2 * p, first + mine < n_block, first + ROUND + mine < n_block, sum, flags);
    });
}

static __device__ __forceinline__ void hash_strided(const br_view *v, view_form form, hash_room *room, view_flags *flags) {
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v));
    rounds(room, n_block, [&](uint32_t first, uint64_t sum[2]) {
        const uint32_t block = first + threadIdx.x / VIEW_PIECES;
        if (block >= n_block)
            return;
#pragma unroll 4
        for (uint32_t s = 0; s < VIEW_STRIPES; s++)
            view_take(v, form, block * BR_XXH3_BLOCK + s * BR_XXH3_STRIPE, 8 * (int)s, (int)threadIdx.x % VIEW_PIECES, sum, flags);
    });
}

/* What lies behind the whole blocks, by one warp. */
static __device__ __forceinline__ void hash_rest(const br_view *v, view_form form, hash_room *room, view_flags *flags) {
    const int l = (int)threadIdx.x % WARP;
    uint64_t sum[2] = {0, 0};
#pragma unroll 1
    for (uint32_t s = (uint32_t)(l / VIEW_PIECES); s <= VIEW_STRIPES; s += WARP / VIEW_PIECES)
        view_rest(v, form, s, l % VIEW_PIECES, sum, flags);
    __syncwarp();
#pragma unroll
    for (int h = WARP / 2; h >= VIEW_PIECES; h /= 2) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], h);
        sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], h);
    }
    if (l < VIEW_PIECES) {
        room->rest[2 * l] = sum[0];
        room->rest[2 * l + 1] = sum[1];
    }
}

static __device__ __forceinline__ void end(const br_view *v, view_form form, hash_room *room, view_flags flags, br_seen *seen) {
    const uint32_t n = view_bytes(v);
    if (threadIdx.x >= THREADS - WARP)
        hash_rest(v, form, room, &flags);
    if (view_any(flags))
        room->any = 1;
    if (view_has_bad(flags))
        room->bad = 1;
    __syncthreads();
    if (threadIdx.x < BR_XXH3_LANES)
        room->acc[threadIdx.x] += room->rest[threadIdx.x];
    for (uint32_t e = threadIdx.x; room->bad && e < n / 2; e += THREADS)
        if (view_is_bad(v, e))
            atomicMin(&room->first_bad, e);
    __syncthreads();
    if (threadIdx.x)
        return;
    seen->digest = br_xxh3_long(room->acc, n);
    seen->first_bad = room->first_bad;
    seen->any = room->any;
}

static __device__ __forceinline__ void hash(const br_view *v, view_form form, hash_room *room, br_seen *seen) {
    view_flags flags = {0, 0};
    if (view_bytes(v) <= BR_XXH3_SHORT) {
        if (threadIdx.x == 0)
            *seen = view_short(v);
        return;
    }
    begin(room);
    if (form == VIEW_DENSE)
        hash_dense(v, room, &flags);
    else
        hash_strided(v, form, room, &flags);
    end(v, form, room, flags, seen);
}

static __global__ void __launch_bounds__(THREADS, HASH_PER_SM) hash_views(const br_view *view, br_seen *seen) {
    __shared__ hash_room room;
    const br_view *v = &view[blockIdx.x];
    hash(v, view_form_of(v), &room, &seen[blockIdx.x]);
}

extern "C" br_status br_device_cuda_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen) {
    if (n == 0)
        return BR_OK;
    hash_views<<<(unsigned)n, THREADS, 0, (cudaStream_t)device->stream>>>(view, seen);
    return launched("hashing");
}

/* ---- place -------------------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void place_dense(uint4 *to, const uint4 *from, uint32_t n_piece) {
    for (uint32_t i = threadIdx.x; i < n_piece; i += AHEAD * THREADS) {
        uint4 piece[AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (i + k * THREADS < n_piece)
                piece[k] = __ldcs(from + i + k * THREADS);
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            if (i + k * THREADS < n_piece)
                to[i + k * THREADS] = piece[k];
    }
}

/* Piece i of n_col / VIEW_HALVES a row: neighbours take neighbouring rows, which is how elements that lie by columns follow each other. */
static __device__ __forceinline__ uint32_t strided_piece(const br_view *v, uint32_t i) {
    const uint32_t n_row = (uint32_t)v->n_row;
    return i % n_row * ((uint32_t)v->n_col / VIEW_HALVES) + i / n_row;
}

static __device__ __forceinline__ void place_strided(const br_view *v, view_form form, const uint4 *from, uint32_t n_piece) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n_piece; i += STRIDED * THREADS) {
        uint4 piece[STRIDED];
#pragma unroll
        for (uint32_t k = 0; k < STRIDED; k++)
            if (i + k * THREADS < n_piece)
                piece[k] = __ldcs(from + strided_piece(v, i + k * THREADS));
#pragma unroll
        for (uint32_t k = 0; k < STRIDED && i + k * THREADS < n_piece; k++) {
            const uint32_t e = strided_piece(v, i + k * THREADS) * VIEW_HALVES, word[4] = {piece[k].x, piece[k].y, piece[k].z, piece[k].w};
            const view_place to = view_place_of(v, e);
            if (form == VIEW_ROWS)
                *(uint4 *)to.at = piece[k];
            else
#pragma unroll
                for (int h = 0; h < VIEW_HALVES; h++)
                    to.at[h * to.step] = (uint16_t)(word[h / 2] >> 16 * (h % 2));
        }
    }
}

static __global__ void __launch_bounds__(THREADS, HASH_PER_SM) place_views(const br_view *view, const uint16_t *const *from, br_seen *seen) {
    __shared__ hash_room room;
    const br_view *v = &view[blockIdx.x];
    const uint16_t *src = from[blockIdx.x];
    const view_form form = view_form_of(v);
    const uint32_t n = view_bytes(v) / 2;
    const int by_piece = (uintptr_t)src % BR_XXH3_PIECE == 0 && (form == VIEW_DENSE || v->n_col % VIEW_HALVES == 0);
    const uint32_t n_piece = by_piece ? n / VIEW_HALVES : 0;
    if (form == VIEW_DENSE)
        place_dense((uint4 *)v->part[0].at, (const uint4 *)src, n_piece);
    else
        place_strided(v, form, (const uint4 *)src, n_piece);
    for (uint32_t e = n_piece * VIEW_HALVES + threadIdx.x; e < n; e += THREADS)
        *view_at(v, e) = src[e];
    __syncthreads();
    hash(v, form, &room, &seen[blockIdx.x]);
}

extern "C" br_status br_device_cuda_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n, br_seen *seen) {
    if (n == 0)
        return BR_OK;
    place_views<<<(unsigned)n, THREADS, 0, (cudaStream_t)device->stream>>>(view, src, seen);
    return launched("placing");
}

/* ---- fill, check ---------------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) fill_runs(const br_fill *fill) {
    const br_fill f = fill[blockIdx.x];
    for (int64_t k = threadIdx.x; k < f.n_run * f.n_half; k += THREADS)
        f.at[k / f.n_half * f.pitch + k % f.n_half] = view_fill_half(&f, k % f.n_half);
}

static __global__ void __launch_bounds__(THREADS) check_runs(const br_fill *fill, uint32_t *torn) {
    const br_fill f = fill[blockIdx.x];
    int other = 0;
    for (int64_t k = threadIdx.x; k < f.n_run * f.n_half; k += THREADS)
        other |= f.at[k / f.n_half * f.pitch + k % f.n_half] != view_fill_half(&f, k % f.n_half);
    if (other)
        *torn = 1;
}

extern "C" br_status br_device_cuda_fill(br_device *device, const br_fill *fill, int32_t n) {
    if (n == 0)
        return BR_OK;
    fill_runs<<<(unsigned)n, THREADS, 0, (cudaStream_t)device->stream>>>(fill);
    return launched("filling");
}

extern "C" br_status br_device_cuda_check(br_device *device, const br_fill *fill, int32_t n, uint32_t *torn) {
    if (n == 0)
        return BR_OK;
    check_runs<<<(unsigned)n, THREADS, 0, (cudaStream_t)device->stream>>>(fill, torn);
    return launched("checking");
}
