/* bi_index_topk: the best visible positions of a row, rising.      Contract: N-IDX-4, P-4
 *
 * Grid: a cluster of BLOCKS blocks of 1,024 threads a row, so many that 64 rows are on the GPU at once and one row alone has eight SMs. Each
 * block has an equal share of the positions, in order, and so has each of its warps. Integers only, so no order of the work matters.
 *
 *   1  Every block finds, in the same sample of the row, a key that somewhat more than topk keys reach.
 *   2  Every warp lists its keys from that one on, in order.
 *   3  Every block gathers the listed keys of the row and finds the topk-th: the k-th key of the row.
 *   4  Every warp counts what it selects, and writes behind what the warps and blocks before it select: among keys equal to the k-th the
 *      lowest positions win.
 *
 * Where the sample misled, equal keys are too many or a list is too long, three histograms of all keys of the row, added up over the
 * cluster, find the k-th key instead, and 4 goes over the scores. */
#ifndef BI_INDEX_TOPK_CUH
#define BI_INDEX_TOPK_CUH

#include "bi_index_parts.cuh"

enum {
    TOPK_BLOCKS_MAX = 8,
    TOPK_THREADS = 1024,
    TOPK_WARPS = TOPK_THREADS / 32,
    TOPK_BINS = 2048,   /* of a digit of 11 bits */
    TOPK_SAMPLE = 4096, /* keys of a long row, in eights; 1,024 of a short one */
    TOPK_SAMPLED = 32,  /* a key of the sample stands for so many, as long as that leaves 1,024 to 4,096 */
    TOPK_COARSE = 13,   /* bits of a key that the sample leaves unknown: 1/1,024 of an octave */
    TOPK_GATHER = 8192, /* listed keys of a row */
    TOPK_LIST = 512,    /* of a warp */
    TOPK_EACH = 8,      /* keys a thread loads at once */
    TOPK_TAKE = 4       /* the same of a list, which is short */
};
static_assert((int)TOPK_BINS == (int)BI_ORDER_BINS, "the oracle's digits");
static_assert((int)TOPK_BINS <= (int)TOPK_GATHER && (int)TOPK_SAMPLE <= (int)TOPK_GATHER, "one room for all three");

#ifdef __CUDACC__

typedef struct topk_shared {
    uint32_t bin[TOPK_BINS];        /* of this block's keys */
    uint32_t gathered[TOPK_GATHER]; /* keys of the sample; of the lists; else the histogram of the row */
    uint32_t warp_sum[TOPK_WARPS];
    uint32_t found[3];              /* the bin of the wanted key, its rank among the keys of that bin, and how many those are */
    uint32_t only;                  /* the one key of the bin */
    uint32_t least, greatest;       /* bounds of the gathered keys */
    uint32_t listed[TOPK_BLOCKS_MAX][TOPK_WARPS]; /* keys that a warp wants to list, too many or not */
    uint32_t above[TOPK_BLOCKS_MAX], equal[TOPK_BLOCKS_MAX]; /* by block: keys above the k-th, keys equal to it */
    uint32_t warp_above[TOPK_WARPS], warp_equal[TOPK_WARPS];
    uint32_t key[TOPK_WARPS][TOPK_LIST];
    int32_t position[TOPK_WARPS][TOPK_LIST];
} topk_shared;

static __device__ __forceinline__ uint32_t topk_cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void topk_cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void topk_cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

static __device__ __forceinline__ void topk_cluster_sync(void) {
    topk_cluster_arrive();
    topk_cluster_wait();
}

/* The other block's word at the place of `own` in this one's shared memory. */
static __device__ __forceinline__ uint32_t topk_remote_load(const uint32_t *own, uint32_t rank) {
    uint32_t value;
    asm volatile("{.reg .u32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.u32 %0, [at];}\n"
                 : "=r"(value)
                 : "r"((uint32_t)__cvta_generic_to_shared(own)), "r"(rank)
                 : "memory");
    return value;
}

static __device__ __forceinline__ void topk_remote_store(const uint32_t *own, uint32_t rank, uint32_t value) {
    asm volatile("{.reg .u32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.u32 [at], %2;}\n" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(own)),
                 "r"(rank), "r"(value)
                 : "memory");
}

/* x of this lane and all before it. */
static __device__ __forceinline__ uint32_t topk_through(uint32_t x, int lane) {
    for (int h = 1; h < 32; h <<= 1) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, x, (unsigned)h);
        x += lane >= h ? before : 0;
    }
    return x;
}

/* ---- a key by its rank ----------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void topk_clear(topk_shared &sh) {
    for (int i = (int)threadIdx.x; i < TOPK_BINS; i += TOPK_THREADS)
        sh.bin[i] = 0;
    __syncthreads();
}

/* The bin that holds the left-th largest of the counted keys, and its rank in there, in sh.found. A thread owns two bins, thread 0 the largest. */
static __device__ __forceinline__ void topk_find(topk_shared &sh, const uint32_t *bins, uint32_t left) {
    static_assert((int)TOPK_BINS == 2 * (int)TOPK_THREADS && (int)TOPK_WARPS == 32, "two bins a thread, sums of warps a lane");
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    const uint2 own = *(const uint2 *)&bins[TOPK_BINS - 2 - 2 * tid];
    const uint32_t through = topk_through(own.x + own.y, lane);
    if (lane == 31)
        sh.warp_sum[warp] = through;
    __syncthreads();
    const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? sh.warp_sum[lane] : 0) + through - own.x - own.y;
    if (before < left && left <= before + own.y + own.x) {
        const int second = left > before + own.y;
        sh.found[0] = (uint32_t)(TOPK_BINS - 1 - 2 * tid - second);
        sh.found[1] = left - before - (second ? own.y : 0);
        sh.found[2] = second ? own.x : own.y;
    }
    __syncthreads();
}

/* The rank-th largest of the n gathered keys, by those of them that lie in least .. greatest, and its rank among the keys equal to it. `coarse`
 * lower bits may be left 0; the rank is then that among keys equal in the upper ones. A key that is alone in its bin needs no more digits. */
static __device__ __forceinline__ uint32_t topk_pick(topk_shared &sh, int32_t n, uint32_t least, uint32_t greatest, int coarse, uint32_t *rank) {
    uint32_t prefix = 0, n_left = (uint32_t)n;
    int top = 32 - __clz((int)(greatest - least)), first = 1; /* top: bits that are not known */
    while (top > coarse && (first || n_left > 1)) {
        const int shift = top > 11 ? top - 11 : 0;
        topk_clear(sh);
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += TOPK_THREADS) {
            const uint32_t key = sh.gathered[i], x = key - least;
            if (key >= least && (first || x >> top == prefix >> top))
                atomicAdd(&sh.bin[x >> shift & (TOPK_BINS - 1)], 1u);
        }
        __syncthreads();
        topk_find(sh, sh.bin, *rank);
        prefix |= sh.found[0] << shift;
        *rank = sh.found[1];
        n_left = sh.found[2];
        top = shift;
        first = 0;
    }
    if (top <= coarse || first)
        return least + prefix;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += TOPK_THREADS)
        if (sh.gathered[i] >= least && (sh.gathered[i] - least) >> top == prefix >> top)
            sh.only = sh.gathered[i];
    __syncthreads();
    return sh.only;
}

/* A key that more than topk of the row's n keys reach, unless the sample misleads: an eight of keys out of each of equal parts of the row,
 * somewhere in it, since keys may repeat. The greatest of every `group` keys of a warp are no fewer than the wanted rank, so that the least
 * of them bounds the wanted key, and keys below need no counting. */
static __device__ __forceinline__ uint32_t topk_sample(topk_shared &sh, const float *score, int32_t n, int32_t topk) {
    enum { OWN = TOPK_SAMPLE / TOPK_THREADS };
    const int tid = (int)threadIdx.x;
    const int32_t wanted_own = n / (TOPK_SAMPLED * TOPK_THREADS), n_own = wanted_own < 1 ? 1 : wanted_own < OWN ? wanted_own : (int32_t)OWN;
    const int32_t n_key = n_own * TOPK_THREADS, n_part = n_key / 8;
    const float expected = (float)topk * ((float)n_key / (float)n), more = expected + 5.0f * sqrtf(expected);
    uint32_t key[OWN], rank = (uint32_t)(more < 2.0f * expected ? more : 2.0f * expected) + 1, least = 0xffffffffu, greatest = 0;
    rank = rank < (uint32_t)n_key ? rank : (uint32_t)n_key;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const uint64_t part = (uint64_t)(i * TOPK_THREADS + tid) / 8, begin = part * (uint64_t)(n / 8) / (uint64_t)n_part;
        const uint64_t within = (part * 0x9e3779b1u >> 8 & 0xffff) * (uint64_t)(n / 8 / n_part) >> 16;
        key[i] = i < n_own ? bi_u32_of(score[(begin + within) * 8 + tid % 8]) : 0;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (i >= n_own)
            break;
        key[i] = bi_order_key(bi_f32_of(key[i]));
        sh.gathered[i * TOPK_THREADS + tid] = key[i];
        for (uint32_t group = 1; group < 32 && 2 * group * rank <= (uint32_t)n_key; group *= 2) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, key[i], group);
            key[i] = other > key[i] ? other : key[i];
        }
        least = key[i] < least ? key[i] : least;
        greatest = key[i] > greatest ? key[i] : greatest;
    }
    least = __reduce_min_sync(0xffffffffu, least);
    greatest = __reduce_max_sync(0xffffffffu, greatest);
    if (tid % 32 == 0) {
        atomicMin(&sh.least, least);
        atomicMax(&sh.greatest, greatest);
    }
    __syncthreads();
    return topk_pick(sh, n_key, sh.least, sh.greatest, TOPK_COARSE, &rank);
}

/* ---- the keys of a warp ---------------------------------------------------------------------------------------------------------------- */

/* n keys in order: of a list, or of the scores of positions first .. where key is NULL. */
typedef struct topk_keys {
    const uint32_t *key;
    const int32_t *position;
    const float *score;
    int32_t first, n;
} topk_keys;

/* The keys of warp `number` of n_warp. */
static __device__ __forceinline__ topk_keys topk_share(const float *score, int32_t n, int32_t number, int32_t n_warp) {
    const int32_t share = ((n + n_warp - 1) / n_warp + 31) / 32 * 32;
    const int64_t first = (int64_t)number * share, left = n - first;
    const topk_keys all = {NULL, NULL, score + first, (int32_t)first, (int32_t)(left < 0 ? 0 : left < share ? left : share)};
    return all;
}

/* This lane's scores of a step of 32 * TOPK_EACH keys from `at` on. */
static __device__ __forceinline__ void topk_load(float (&score)[TOPK_EACH], const topk_keys &all, int32_t at, int lane) {
#pragma unroll
    for (int i = 0; i < TOPK_EACH; i++)
        score[i] = at + 32 * i + lane < all.n ? all.score[at + 32 * i + lane] : 0.0f;
}

/* Lists keys of at least `least` in order, as long as there is room. Returns how many there are. The next step's scores are on their way while
 * one is at work. */
static __device__ __forceinline__ uint32_t topk_list(const topk_keys &all, topk_shared &sh, uint32_t least, int lane, int warp) {
    uint32_t n = 0;
    float next[TOPK_EACH], score[TOPK_EACH];
    topk_load(next, all, 0, lane);
    for (int32_t at = 0; at < all.n; at += 32 * TOPK_EACH) {
#pragma unroll
        for (int i = 0; i < TOPK_EACH; i++)
            score[i] = next[i];
        topk_load(next, all, at + 32 * TOPK_EACH, lane);
#pragma unroll
        for (int i = 0; i < TOPK_EACH; i++) {
            const uint32_t key = bi_order_key(score[i]);
            const int wanted = at + 32 * i + lane < all.n && key >= least;
            const uint32_t vote = __ballot_sync(0xffffffffu, wanted), place = n + (uint32_t)__popc(vote & ((1u << lane) - 1));
            if (wanted && place < TOPK_LIST) {
                sh.key[warp][place] = key;
                sh.position[warp][place] = all.first + at + 32 * i + lane;
            }
            n += (uint32_t)__popc(vote);
        }
    }
    return n;
}

/* The keys of the row's lists, a block after the other, to sh.gathered, the greatest to sh.greatest. A warp takes the lists of the same warp of
 * all blocks, side by side. Returns how many there are; more than TOPK_GATHER when one list was too long. */
template <int BLOCKS> static __device__ __forceinline__ int32_t topk_gather(topk_shared &sh, int lane, int warp) {
    uint32_t n = 0, longest = 0, longest_own = 0, greatest = 0, n_key[BLOCKS], place[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const uint32_t own = sh.listed[b][lane], through = topk_through(own, lane);
        n_key[b] = __shfl_sync(0xffffffffu, own, warp);
        place[b] = n + __shfl_sync(0xffffffffu, through, warp) - n_key[b];
        longest = own > longest ? own : longest;
        longest_own = n_key[b] > longest_own ? n_key[b] : longest_own;
        n += __shfl_sync(0xffffffffu, through, 31);
    }
    if (__reduce_max_sync(0xffffffffu, longest) > TOPK_LIST || n > TOPK_GATHER)
        return TOPK_GATHER + 1;
    for (uint32_t i = (uint32_t)lane; i < longest_own; i += 32) {
        uint32_t key[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            key[b] = i < n_key[b] ? topk_remote_load(&sh.key[warp][i], (uint32_t)b) : 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (i < n_key[b])
                sh.gathered[place[b] + i] = key[b];
            greatest = key[b] > greatest ? key[b] : greatest;
        }
    }
    greatest = __reduce_max_sync(0xffffffffu, greatest);
    if (lane == 0)
        atomicMax(&sh.greatest, greatest);
    __syncthreads();
    return (int32_t)n;
}

/* ---- the k-th key out of all ------------------------------------------------------------------------------------------------------------ */

/* Counts a digit of this warp's keys that agree with prefix under mask. */
static __device__ __forceinline__ void topk_count(const topk_keys &all, uint32_t *bin, uint32_t prefix, uint32_t mask, int shift, uint32_t bin_mask) {
    const int lane = (int)threadIdx.x % 32;
    for (int32_t at = 0; at < all.n; at += 32 * TOPK_EACH) {
        float score[TOPK_EACH];
        topk_load(score, all, at, lane);
#pragma unroll
        for (int i = 0; i < TOPK_EACH; i++) {
            const uint32_t key = bi_order_key(score[i]);
            if (at + 32 * i + lane < all.n && (key & mask) == prefix)
                atomicAdd(&bin[key >> shift & bin_mask], 1u);
        }
    }
}

/* Every block's bins added up, to `total` of every block, each of which adds up its share of them. */
template <int BLOCKS> static __device__ __forceinline__ void topk_sum(topk_shared &sh, uint32_t *total, uint32_t rank) {
    topk_cluster_sync();
    for (int i = (int)threadIdx.x; i < TOPK_BINS / BLOCKS; i += TOPK_THREADS) {
        const uint32_t bin = rank * (TOPK_BINS / BLOCKS) + (uint32_t)i;
        uint32_t sum = 0;
        for (uint32_t block = 0; block < BLOCKS; block++)
            sum += topk_remote_load(&sh.bin[bin], block);
        for (uint32_t block = 0; block < BLOCKS; block++)
            topk_remote_store(&total[bin], block, sum);
    }
    topk_cluster_sync();
}

/* The rank-th largest key of the row, and its rank among those equal to it. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t topk_pick_of_all(const topk_keys &all, topk_shared &sh, uint32_t block, uint32_t *rank) {
    uint32_t prefix = 0, mask = 0, *total = sh.gathered;
    for (int digit = 0; digit < 3; digit++) {
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        const uint32_t bin_mask = digit == 2 ? 1023 : 2047;
        topk_clear(sh);
        topk_count(all, sh.bin, prefix, mask, shift, bin_mask);
        topk_sum<BLOCKS>(sh, total, block);
        topk_find(sh, total, *rank);
        prefix |= sh.found[0] << shift;
        mask |= bin_mask << shift;
        *rank = sh.found[1];
    }
    return prefix;
}

/* ---- what is selected ------------------------------------------------------------------------------------------------------------------- */

/* This lane's keys of a step from `at` on; 0 past the last, where nothing is above the k-th key. */
static __device__ __forceinline__ void topk_take(uint32_t (&key)[TOPK_TAKE], const topk_keys &s, int32_t at, int lane) {
#pragma unroll
    for (int i = 0; i < TOPK_TAKE; i++) {
        const int32_t own = at + 32 * i + lane;
        key[i] = own >= s.n ? 0 : s.key ? s.key[own] : bi_order_key(s.score[own]);
    }
}

/* Writes the positions above the k-th key and the first n_tie equal to it. */
template <int BLOCKS>
static __device__ __forceinline__ void topk_write(const topk_keys &s, topk_shared &sh, uint32_t rank, uint32_t kth, uint32_t n_tie, int32_t *select) {
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    uint32_t n_above = 0, n_equal = 0, key[TOPK_TAKE];
    for (int32_t at = 0; at < s.n; at += 32 * TOPK_TAKE) {
        topk_take(key, s, at, lane);
#pragma unroll
        for (int i = 0; i < TOPK_TAKE; i++) {
            n_above += (uint32_t)__popc(__ballot_sync(0xffffffffu, key[i] > kth));
            n_equal += (uint32_t)__popc(__ballot_sync(0xffffffffu, at + 32 * i + lane < s.n && key[i] == kth));
        }
    }
    if (lane == 0) {
        sh.warp_above[warp] = n_above;
        sh.warp_equal[warp] = n_equal;
    }
    __syncthreads();
    const uint32_t own_above = sh.warp_above[lane], own_equal = sh.warp_equal[lane];
    const uint32_t block_above = __reduce_add_sync(0xffffffffu, own_above), block_equal = __reduce_add_sync(0xffffffffu, own_equal);
    if (tid < BLOCKS) {
        topk_remote_store(&sh.above[rank], (uint32_t)tid, block_above);
        topk_remote_store(&sh.equal[rank], (uint32_t)tid, block_equal);
    }
    uint32_t before_above = __reduce_add_sync(0xffffffffu, lane < warp ? own_above : 0);
    uint32_t before_equal = __reduce_add_sync(0xffffffffu, lane < warp ? own_equal : 0);
    topk_cluster_sync();
    for (uint32_t block = 0; block < rank; block++) {
        before_above += sh.above[block];
        before_equal += sh.equal[block];
    }
    for (int32_t at = 0; at < s.n; at += 32 * TOPK_TAKE) {
        topk_take(key, s, at, lane);
#pragma unroll
        for (int i = 0; i < TOPK_TAKE; i++) {
            const int32_t own = at + 32 * i + lane;
            const int is_equal = own < s.n && key[i] == kth;
            const uint32_t above = __ballot_sync(0xffffffffu, key[i] > kth), equal = __ballot_sync(0xffffffffu, is_equal);
            const uint32_t low = (1u << lane) - 1, mine_above = before_above + (uint32_t)__popc(above & low);
            const uint32_t mine_equal = before_equal + (uint32_t)__popc(equal & low);
            if (key[i] > kth || (is_equal && mine_equal < n_tie))
                select[mine_above + (mine_equal < n_tie ? mine_equal : n_tie)] = s.key ? s.position[own] : s.first + own;
            before_above += (uint32_t)__popc(above);
            before_equal += (uint32_t)__popc(equal);
        }
    }
}

template <int BLOCKS>
static __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(TOPK_THREADS, 1)
    index_topk(const index_rows r, int32_t *select, int32_t *n_select) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char index_shared[];
    topk_shared &sh = *(topk_shared *)index_shared;
    const int32_t t = (int32_t)blockIdx.x / BLOCKS, row = r.row0 + t, tid = (int32_t)threadIdx.x, lane = tid % 32, warp = tid / 32;
    const uint32_t rank = topk_cluster_rank();
    if (r.row_seg[row] < 0)
        return;
    const int32_t n = index_visible(r.seg[r.row_seg[row]], row), n_out = n < r.topk ? n : r.topk;
    const float *score = r.score + t * r.score_ld;
    int32_t *out = select + (int64_t)row * r.topk;
    if (rank == 0 && tid == 0)
        n_select[row] = n_out;
    if (n <= r.topk || (r.bad && r.bad[t])) { /* all of them, or ties everywhere */
        for (int32_t i = (int32_t)rank * TOPK_THREADS + tid; i < n_out; i += BLOCKS * TOPK_THREADS)
            out[i] = i;
        return;
    }
    topk_cluster_arrive();
    if (tid == 0) {
        sh.least = 0xffffffffu;
        sh.greatest = 0;
    }
    __syncthreads();
    topk_keys s = topk_share(score, n, (int32_t)rank * TOPK_WARPS + warp, BLOCKS * TOPK_WARPS);
    const uint32_t least = n <= TOPK_GATHER ? 0 : topk_sample(sh, score, n, r.topk), n_own = topk_list(s, sh, least, lane, warp);
    topk_cluster_wait(); /* all blocks have begun */
    if (lane < BLOCKS)
        topk_remote_store(&sh.listed[rank][warp], (uint32_t)lane, n_own);
    topk_cluster_sync();
    const int32_t n_listed = topk_gather<BLOCKS>(sh, lane, warp);
    uint32_t kth, n_tie = (uint32_t)r.topk;
    if (n_listed >= r.topk && n_listed <= TOPK_GATHER) {
        kth = topk_pick(sh, n_listed, least, sh.greatest, 0, &n_tie);
        s.key = sh.key[warp];
        s.position = sh.position[warp];
        s.n = (int32_t)n_own;
    } else
        kth = topk_pick_of_all<BLOCKS>(s, sh, rank, &n_tie);
    topk_write<BLOCKS>(s, sh, rank, kth, n_tie, out);
}

#endif
#endif
