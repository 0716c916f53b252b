/* Views on a GPU; see device_view.h.
 *
 * hash: a block of 256 threads a view, 8 teams of 32. In a round each team reads 4 blocks of the hash, 8 pieces of 16 bytes a thread,
 * all in flight before the first is used: 32 KiB a block of threads, of which three share an SM. Sums of the round go to shared
 * memory, and while the next round's pieces are on their way, eight threads take the chain through them. No order: sums are integers.
 * place, fill, check: a block of 256 threads a job (place: PLACE_PARTS of them), elements or pieces by strides. */
#include <cuda_runtime.h>
#define _Noreturn [[noreturn]]
extern "C" {
#include "device_parts.h"
#include "view_core.h"
}

enum { THREADS = 256, TEAMS = THREADS / VIEW_TEAM, TEAM_BLOCKS = 4, ROUND = TEAMS * TEAM_BLOCKS, PLACE_PARTS = 16, HASH_PER_SM = 3 };

static br_status launched(const char *what) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? BR_OK : br_fail(BR_E_DEVICE, "%s: the GPU refused the launch: %s", what, cudaGetErrorString(error));
}

/* ---- hash ------------------------------------------------------------------------------------------------------------------------- */

typedef struct hash_room {
    uint64_t sum[2][ROUND][BR_XXH3_LANES]; /* of the round at hand and of the one before */
    uint64_t acc[BR_XXH3_LANES];
    uint32_t first_bad, any;
} hash_room;

/* Over the eight threads of equal l % 4. */
static __device__ __forceinline__ void add_up(uint64_t sum[2]) {
#pragma unroll
    for (int h = 16; h >= 4; h >>= 1) {
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], h);
        sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], h);
    }
}

static __device__ __forceinline__ void keep(hash_room *room, const view_notes *notes) {
    if (notes->first_bad != UINT32_MAX)
        atomicMin(&room->first_bad, notes->first_bad);
    const int any = __any_sync(0xffffffffu, notes->any != 0);
    if (any && threadIdx.x % VIEW_TEAM == 0)
        room->any = 1;
}

/* The chain through n sums, by the threads below BR_XXH3_LANES. */
static __device__ __forceinline__ void chain(const uint64_t (*sum)[BR_XXH3_LANES], uint32_t n, uint64_t step_key, uint64_t *acc) {
    const int lane = (int)threadIdx.x;
    if (lane >= BR_XXH3_LANES)
        return;
#pragma unroll 8
    for (uint32_t b = 0; b < n; b++)
        *acc = br_xxh3_step(*acc, sum[b][lane], step_key);
}

template <view_form FORM>
static __device__ __forceinline__ void hash_long(const br_view &v, hash_room *room) {
    const int l = (int)threadIdx.x % VIEW_TEAM, team = (int)threadIdx.x / VIEW_TEAM, lane = (int)threadIdx.x % BR_XXH3_LANES;
    const uint32_t n_block = br_xxh3_blocks(view_bytes(&v));
    const view_keys keys = view_keys_of(l);
    const uint64_t step_key = br_xxh3_step_key(lane);
    uint64_t acc = br_xxh3_start(lane);
    view_notes notes = {UINT32_MAX, 0};
    int at = 0;
    for (uint32_t first = 0; first < n_block; first += ROUND, at ^= 1) {
        uint64_t word[TEAM_BLOCKS][2][2];
#pragma unroll
        for (int k = 0; k < TEAM_BLOCKS; k++) {
            const uint32_t block = first + (uint32_t)(team * TEAM_BLOCKS + k);
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (block < n_block)
                    view_read(&v, FORM, view_piece(block, l, j), word[k][j]);
        }
        if (first)
            chain(room->sum[at ^ 1], ROUND, step_key, &acc);
#pragma unroll
        for (int k = 0; k < TEAM_BLOCKS; k++) {
            const uint32_t block = first + (uint32_t)(team * TEAM_BLOCKS + k);
            uint64_t sum[2] = {0, 0};
            if (block >= n_block)
                break;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                view_note(&notes, view_piece(block, l, j), word[k][j]);
                br_xxh3_add(sum, word[k][j], keys.key[j]);
            }
            add_up(sum);
            if (l < 4) {
                room->sum[at][team * TEAM_BLOCKS + k][2 * l] = sum[0];
                room->sum[at][team * TEAM_BLOCKS + k][2 * l + 1] = sum[1];
            }
        }
        __syncthreads();
    }
    if (n_block)
        chain(room->sum[at ^ 1], (n_block - 1) % ROUND + 1, step_key, &acc);
    if (team == 0) {
        uint64_t sum[2] = {0, 0};
        view_rest(&v, FORM, l, &keys, sum, &notes);
        add_up(sum);
        if (l < BR_XXH3_LANES)
            room->acc[l] = acc;
        __syncwarp();
        if (l < 4) {
            room->acc[2 * l] += sum[0];
            room->acc[2 * l + 1] += sum[1];
        }
    }
    keep(room, &notes);
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, HASH_PER_SM) hash_views(const br_view *view, br_seen *seen) {
    __shared__ hash_room room;
    const br_view v = view[blockIdx.x];
    const uint32_t n = view_bytes(&v);
    if (threadIdx.x == 0) {
        room.first_bad = UINT32_MAX;
        room.any = 0;
    }
    __syncthreads();
    br_seen out;
    if (n <= BR_XXH3_SHORT) {
        view_notes notes = {UINT32_MAX, 0};
        if (threadIdx.x)
            return;
        out.digest = view_short(&v, &notes);
        out.first_bad = notes.first_bad;
        out.any = notes.any != 0;
        seen[blockIdx.x] = out;
        return;
    }
    const view_form form = view_form_of(&v);
    if (form == VIEW_DENSE)
        hash_long<VIEW_DENSE>(v, &room);
    else if (form == VIEW_ROWS)
        hash_long<VIEW_ROWS>(v, &room);
    else
        hash_long<VIEW_ANY>(v, &room);
    if (threadIdx.x)
        return;
    out.digest = br_xxh3_long(room.acc, n);
    out.first_bad = room.first_bad;
    out.any = room.any;
    seen[blockIdx.x] = out;
}

extern "C" br_status br_device_cuda_hash(br_device *device, const br_view *view, int32_t n, br_seen *seen) {
    if (n == 0)
        return BR_OK;
    hash_views<<<(unsigned)n, THREADS, 0, (cudaStream_t)device->stream>>>(view, seen);
    return launched("hashing");
}

/* ---- place, fill, check ------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) place_views(const br_view *view, const uint16_t *const *from) {
    const br_view v = view[blockIdx.x];
    const uint16_t *src = from[blockIdx.x];
    const uint32_t n = view_bytes(&v) / 2, first = blockIdx.y * THREADS + threadIdx.x, stride = PLACE_PARTS * THREADS;
    const view_form form = (uintptr_t)src % BR_XXH3_PIECE ? VIEW_ANY : view_form_of(&v);
    const uint32_t n_piece = form == VIEW_ANY ? 0 : n / VIEW_HALVES;
    for (uint32_t i = first; i < n_piece; i += stride)
        *(uint4 *)(form == VIEW_DENSE ? v.part[0].at + i * VIEW_HALVES : view_at(&v, i * VIEW_HALVES)) = ((const uint4 *)src)[i];
    for (uint32_t e = n_piece * VIEW_HALVES + first; e < n; e += stride)
        *view_at(&v, e) = src[e];
}

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

extern "C" br_status br_device_cuda_place(br_device *device, const br_view *view, const uint16_t *const *src, int32_t n) {
    if (n == 0)
        return BR_OK;
    place_views<<<dim3((unsigned)n, PLACE_PARTS), THREADS, 0, (cudaStream_t)device->stream>>>(view, src);
    return launched("placing");
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
