/* Versions of placing beside that of device_view_cuda.cu; see lab_digest.cu. Layer: experiments. */
#ifndef LAB_DIGEST_VERSIONS_CUH
#define LAB_DIGEST_VERSIONS_CUH

#include "device_view_cuda.cu"

/* ---- two kernels: places by PARTS blocks of threads a view, whose hash is another launch ------------------------------------------------ */

enum { PARTS = 8, PARTS_PER_SM = 4 };

static __global__ void __launch_bounds__(THREADS, PARTS_PER_SM) place_parts(const br_view *view, const uint16_t *const *from) {
    const br_view *v = &view[blockIdx.x];
    const uint16_t *src = from[blockIdx.x];
    const uint32_t n = view_bytes(v) / 2, piece = AHEAD * THREADS * VIEW_HALVES;
    const int dense = view_form_of(v) == VIEW_DENSE && (uintptr_t)src % BR_XXH3_PIECE == 0;
    for (uint32_t e = blockIdx.y * piece; dense && e < n; e += PARTS * piece)
        place_dense((uint4 *)(v->part[0].at + e), (const uint4 *)(src + e), min(n - e, piece) / VIEW_HALVES);
    for (uint32_t e = (dense ? n / VIEW_HALVES * VIEW_HALVES : 0) + blockIdx.y * THREADS + threadIdx.x; e < n; e += PARTS * THREADS)
        *view_at(v, e) = src[e];
}

/* ---- the hash of what is stored: over dense sources, each piece is stored to its place on the way -------------------------------------------- */

static __device__ __forceinline__ void sum_placing(ahead *a, unsigned char **to, const uint64_t *key, int is_there, int is_next, uint64_t sum[2],
                                                   view_flags *flags) {
#pragma unroll
    for (int s = 0; s < VIEW_STRIPES; s++) {
        const ulonglong2 piece = a->piece[s % AHEAD];
        const uint64_t word[2] = {piece.x, piece.y};
        const int at = (s + AHEAD) % VIEW_STRIPES, later = s + AHEAD >= VIEW_STRIPES;
        ask(a, s, later * ROUND * BR_XXH3_BLOCK + at * BR_XXH3_STRIPE, later ? is_next : is_there);
        if (is_there)
            *(ulonglong2 *)(*to + s * BR_XXH3_STRIPE) = piece;
        view_flag(flags, word);
        br_xxh3_add(sum, word, key + s);
    }
    a->at += ROUND * BR_XXH3_BLOCK;
    *to += ROUND * BR_XXH3_BLOCK;
}

static __global__ void __launch_bounds__(THREADS, HASH_PER_SM) place_summing(const br_view *view, const uint16_t *const *from, br_seen *seen) {
    __shared__ hash_room room;
    const br_view *v = &view[blockIdx.x];
    const uint16_t *src = from[blockIdx.x];
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v)), mine = threadIdx.x / VIEW_PIECES;
    const view_form form = view_form_of(v);
    const int dense = form == VIEW_DENSE && (uintptr_t)src % BR_XXH3_PIECE == 0;
    view_flags flags = {0, 0};
    begin(&room);
    for (uint32_t e = (dense ? n_block * BR_XXH3_BLOCK / 2 : 0) + threadIdx.x; e < view_bytes(v) / 2; e += THREADS)
        *view_at(v, e) = src[e];
    __syncthreads(); /* what is left of a dense one, and all of another, is read again from its place */
    if (dense) {
        const size_t at = mine * BR_XXH3_BLOCK + threadIdx.x % VIEW_PIECES * BR_XXH3_PIECE;
        ahead a = {(const unsigned char *)src + at, {}};
        unsigned char *to = (unsigned char *)v->part[0].at + at;
#pragma unroll
        for (int s = 0; s < AHEAD; s++)
            ask(&a, s, s * BR_XXH3_STRIPE, mine < n_block);
        rounds(&room, n_block, [&](uint32_t first, uint64_t sum[2]) {
            sum_placing(&a, &to, room.secret + 2 * (threadIdx.x % VIEW_PIECES), first + mine < n_block, first + ROUND + mine < n_block, sum, &flags);
        });
    } else {
        hash_strided(v, form, &room, &flags);
    }
    __syncthreads();
    end(v, form, &room, flags, &seen[blockIdx.x]);
}

#endif
