/* Versions of the hash of device_view_cuda.cu, which is version 0; see lab_digest.cu. Layer: experiments. */
#ifndef LAB_DIGEST_VERSIONS_CUH
#define LAB_DIGEST_VERSIONS_CUH

#include "device_view_cuda.cu"

enum { WARP = 32, STRIPES = BR_XXH3_BLOCK / BR_XXH3_STRIPE, PIECES = BR_XXH3_STRIPE / BR_XXH3_PIECE };

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

/* ---- version 3: version 1 over dense sources, each piece stored to its place on the way ---------------------------------------------------- */

/* Elements first .. of the source to where the view says; first is a multiple of those of a piece. */
static __device__ __forceinline__ void place_from(const br_view *v, const uint16_t *src, uint32_t first, uint32_t n_thread) {
    const uint32_t n = view_bytes(v) / 2, by_piece = (uintptr_t)src % BR_XXH3_PIECE ? first : n / VIEW_HALVES * VIEW_HALVES;
    for (uint32_t e = first + threadIdx.x * VIEW_HALVES; e < by_piece; e += n_thread * VIEW_HALVES) {
        const uint4 piece = *(const uint4 *)(src + e);
        const uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (uint32_t k = 0; k < VIEW_HALVES; k++)
            *view_at(v, e + k) = (uint16_t)(word[k / 2] >> 16 * (k % 2));
    }
    for (uint32_t e = max(first, by_piece) + threadIdx.x; e < n; e += n_thread)
        *view_at(v, e) = src[e];
}

template <int WARPS, int AHEAD>
static __device__ __forceinline__ void sum_placing(ahead_of<AHEAD> *ahead, unsigned char **to, const uint64_t *key, int now, int next,
                                                   uint64_t sum[2], flags *f) {
#pragma unroll
    for (int s = 0; s < STRIPES; s++) {
        const ulonglong2 piece = ahead->piece[s % AHEAD];
        const uint64_t word[2] = {piece.x, piece.y};
        const int at = (s + AHEAD) % STRIPES, later = s + AHEAD >= STRIPES;
        ask(ahead, s, later * 8 * WARPS * BR_XXH3_BLOCK + at * BR_XXH3_STRIPE, later ? next : now);
        if (now)
            *(ulonglong2 *)(*to + s * BR_XXH3_STRIPE) = piece;
        take(sum, f, word, key + s);
    }
    ahead->at += 8 * WARPS * BR_XXH3_BLOCK;
    *to += 8 * WARPS * BR_XXH3_BLOCK;
}

template <int WARPS, int AHEAD, int PER_SM>
static __global__ void __launch_bounds__(WARP *WARPS, PER_SM) place_registers(const br_view *view, const uint16_t *const *from, br_seen *seen) {
    __shared__ room_of<WARPS> room;
    const br_view *v = &view[blockIdx.x];
    const uint16_t *src = from[blockIdx.x];
    const uint32_t n_block = br_xxh3_blocks(view_bytes(v)), mine = threadIdx.x / PIECES;
    const int p = (int)threadIdx.x % PIECES;
    const view_form form = view_form_of(v);
    const int dense = form == VIEW_DENSE && (uintptr_t)src % BR_XXH3_PIECE == 0;
    flags f = {0, 0};
    begin(&room);
    place_from(v, src, dense ? n_block * BR_XXH3_BLOCK / 2 : 0, WARP * WARPS);
    __syncthreads(); /* what is left of a dense one, and all of another, is read again from its place */
    if (dense) {
        const size_t at = mine * BR_XXH3_BLOCK + p * BR_XXH3_PIECE;
        ahead_of<AHEAD> ahead = {(const unsigned char *)src + at, {}};
        unsigned char *to = (unsigned char *)v->part[0].at + at;
#pragma unroll
        for (int s = 0; s < AHEAD; s++)
            ask(&ahead, s, s * BR_XXH3_STRIPE, mine < n_block);
        rounds(&room, n_block, [&](uint32_t first, uint64_t sum[2]) {
            sum_placing<WARPS>(&ahead, &to, room.secret + 2 * p, first + mine < n_block, first + 8 * WARPS + mine < n_block, sum, &f);
        });
    } else {
        rounds_strided(v, form, &room, &f);
    }
    __syncthreads();
    end(v, form, &room, f, &seen[blockIdx.x]);
}

#endif
