/* bi_index_topk: the best visible positions of a row, rising.      Contract: N-IDX-4, P-4
 *
 * Grid: a cluster of 8 blocks of 256 threads a row, so that 64 rows are on the GPU at once; each has an eighth of the positions, a warp an
 * eighth of that, in order. Integers only, so no order matters: three histograms, of 11, 11 and 10 bits of the key, find the k-th key;
 * each block adds up an eighth of the bins over the cluster and hands the sums to all. The first histogram comes with the scores where
 * one row at a time was scored. After it a warp lists its keys that are still of interest, selected or undecided, and the rest works on
 * the list; when it is too long, on all of its keys again. At the end every warp counts what it selects, and writes behind what the warps and
 * blocks before it select: among keys equal to the k-th the lowest positions win. */
#ifndef BI_INDEX_TOPK_CUH
#define BI_INDEX_TOPK_CUH

#include "bi_index_parts.cuh"

enum {
    TOPK_BLOCKS = 8,
    TOPK_THREADS = 256,
    TOPK_WARPS = TOPK_THREADS / 32,
    TOPK_LIST = 384, /* keys that a warp lists; four blocks an SM */
    TOPK_EACH = 8    /* keys a thread loads at once */
};
static_assert((int)INDEX_BINS == (int)BI_ORDER_BINS, "one table of bins for all digits");

#ifdef __CUDACC__

typedef struct topk_shared {
    uint32_t bin[INDEX_BINS];   /* of this block's keys */
    uint32_t total[INDEX_BINS]; /* of the row's */
    uint32_t warp_sum[TOPK_WARPS];
    uint32_t found[2];          /* the bin of the k-th key, and its rank among the keys of that bin */
    uint32_t above[TOPK_BLOCKS], equal[TOPK_BLOCKS]; /* by block: keys above the k-th, keys equal to it */
    uint32_t warp_above[TOPK_WARPS], warp_equal[TOPK_WARPS];
    uint32_t key[TOPK_WARPS][TOPK_LIST];
    int32_t position[TOPK_WARPS][TOPK_LIST];
} topk_shared;

static __device__ __forceinline__ uint32_t topk_cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void topk_cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
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

/* A warp's keys in order: n of them, from its list or, when that is NULL, from the scores of positions first .. */
typedef struct topk_keys {
    const uint32_t *key;
    const int32_t *position;
    const float *score;
    int32_t first, n;
} topk_keys;

static __device__ __forceinline__ uint32_t topk_key(const topk_keys &s, int32_t i) {
    return s.key ? s.key[i] : bi_order_key(s.score[i]);
}

/* This lane's scores of a step of 32 * TOPK_EACH keys from `at` on. */
static __device__ __forceinline__ void topk_load(float (&score)[TOPK_EACH], const topk_keys &all, int32_t at, int lane) {
#pragma unroll
    for (int i = 0; i < TOPK_EACH; i++)
        score[i] = at + 32 * i + lane < all.n ? all.score[at + 32 * i + lane] : 0.0f;
}

/* Counts this warp's keys that agree with prefix under mask. Scores are on their way while those before them are counted. */
static __device__ __forceinline__ void topk_count(const topk_keys &s, uint32_t *bin, uint32_t prefix, uint32_t mask, int shift, uint32_t bin_mask) {
    const int lane = (int)threadIdx.x % 32;
    if (s.key) {
        for (int32_t i = lane; i < s.n; i += 32)
            if ((s.key[i] & mask) == prefix)
                atomicAdd(&bin[s.key[i] >> shift & bin_mask], 1u);
        return;
    }
    float next[TOPK_EACH], score[TOPK_EACH];
    topk_load(next, s, 0, lane);
    for (int32_t at = 0; at < s.n; at += 32 * TOPK_EACH) {
#pragma unroll
        for (int i = 0; i < TOPK_EACH; i++)
            score[i] = next[i];
        topk_load(next, s, at + 32 * TOPK_EACH, lane);
#pragma unroll
        for (int i = 0; i < TOPK_EACH; i++) {
            const uint32_t key = bi_order_key(score[i]);
            if (at + 32 * i + lane < s.n && (key & mask) == prefix)
                atomicAdd(&bin[key >> shift & bin_mask], 1u);
        }
    }
}

/* Every block's bins added up, to sh.total of every block. */
static __device__ __forceinline__ void topk_sum(topk_shared &sh, uint32_t rank) {
    const int tid = (int)threadIdx.x;
    topk_cluster_sync();
    if (tid < INDEX_BINS / TOPK_BLOCKS) {
        const uint32_t bin = rank * (INDEX_BINS / TOPK_BLOCKS) + (uint32_t)tid;
        uint32_t sum = 0;
        for (uint32_t block = 0; block < TOPK_BLOCKS; block++)
            sum += topk_remote_load(&sh.bin[bin], block);
        for (uint32_t block = 0; block < TOPK_BLOCKS; block++)
            topk_remote_store(&sh.total[bin], block, sum);
    }
    topk_cluster_sync();
}

/* The row's histogram of `width` bits from `shift` on, of the keys that agree with prefix under mask, in sh.total of every block. */
static __device__ __forceinline__ void topk_histogram(const topk_keys &s, topk_shared &sh, uint32_t rank, uint32_t prefix, uint32_t mask, int shift,
                                                      int width) {
    const int tid = (int)threadIdx.x;
    for (int i = tid; i < INDEX_BINS; i += TOPK_THREADS)
        sh.bin[i] = 0;
    __syncthreads();
    topk_count(s, sh.bin, prefix, mask, shift, (1u << width) - 1);
    topk_sum(sh, rank);
}

/* The bin that holds the left-th largest of the row's counted keys, and its rank in there. A thread owns INDEX_BINS / TOPK_THREADS bins,
 * thread 0 the largest. */
static __device__ __forceinline__ void topk_find(topk_shared &sh, uint32_t left) {
    enum { OWN = INDEX_BINS / TOPK_THREADS };
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    uint32_t count[OWN], own = 0;
    static_assert(OWN % 4 == 0, "bins of a thread are read by four");
    for (int i = 0; i < OWN; i += 4) {
        const uint4 four = *(const uint4 *)&sh.total[INDEX_BINS - 4 - (tid * OWN + i)];
        count[i] = four.w, count[i + 1] = four.z, count[i + 2] = four.y, count[i + 3] = four.x;
        own += four.x + four.y + four.z + four.w;
    }
    uint32_t through = own;
    for (int h = 1; h < 32; h <<= 1) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, through, (unsigned)h);
        through += lane >= h ? before : 0;
    }
    if (lane == 31)
        sh.warp_sum[warp] = through;
    __syncthreads();
    for (int w = 0; w < warp; w++)
        through += sh.warp_sum[w];
    uint32_t before = through - own;
    for (int i = 0; i < OWN; i++) {
        if (before < left && left <= before + count[i]) {
            sh.found[0] = (uint32_t)(INDEX_BINS - 1 - (tid * OWN + i));
            sh.found[1] = left - before;
        }
        before += count[i];
    }
    __syncthreads();
}

/* Lists this warp's keys of at least `least` in order. Returns how many there are, listed or not. The next step's scores are on their way
 * while one is at work. */
static __device__ __forceinline__ int32_t topk_list(const topk_keys &all, topk_shared &sh, uint32_t least, int lane, int warp) {
    int32_t n = 0;
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
            const uint32_t vote = __ballot_sync(0xffffffffu, wanted);
            const int32_t place = n + __popc(vote & ((1u << lane) - 1));
            if (wanted && place < TOPK_LIST) {
                sh.key[warp][place] = key;
                sh.position[warp][place] = all.first + at + 32 * i + lane;
            }
            n += __popc(vote);
        }
    }
    return n;
}

/* This warp's keys in order, 32 at a time: votes of those above the k-th and those equal to it. */
static __device__ __forceinline__ void topk_vote(const topk_keys &s, int32_t i, uint32_t kth, uint32_t *above, uint32_t *equal) {
    const uint32_t key = i < s.n ? topk_key(s, i) : 0;
    *above = __ballot_sync(0xffffffffu, i < s.n && key > kth);
    *equal = __ballot_sync(0xffffffffu, i < s.n && key == kth);
}

/* Writes the positions above the k-th key and the first n_tie equal to it. */
static __device__ __forceinline__ void topk_write(const topk_keys &s, topk_shared &sh, uint32_t rank, uint32_t kth, uint32_t n_tie, int32_t *select) {
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    uint32_t n_above = 0, n_equal = 0, above, equal;
    for (int32_t i = 0; i < s.n; i += 32) {
        topk_vote(s, i + lane, kth, &above, &equal);
        n_above += (uint32_t)__popc(above);
        n_equal += (uint32_t)__popc(equal);
    }
    if (lane == 0) {
        sh.warp_above[warp] = n_above;
        sh.warp_equal[warp] = n_equal;
    }
    __syncthreads();
    if (tid < TOPK_BLOCKS) {
        uint32_t sum_above = 0, sum_equal = 0;
        for (int w = 0; w < TOPK_WARPS; w++) {
            sum_above += sh.warp_above[w];
            sum_equal += sh.warp_equal[w];
        }
        topk_remote_store(&sh.above[rank], (uint32_t)tid, sum_above);
        topk_remote_store(&sh.equal[rank], (uint32_t)tid, sum_equal);
    }
    topk_cluster_sync();
    uint32_t before_above = 0, before_equal = 0;
    for (uint32_t block = 0; block < rank; block++) {
        before_above += sh.above[block];
        before_equal += sh.equal[block];
    }
    for (int w = 0; w < warp; w++) {
        before_above += sh.warp_above[w];
        before_equal += sh.warp_equal[w];
    }
    for (int32_t i = 0; i < s.n; i += 32) {
        topk_vote(s, i + lane, kth, &above, &equal);
        const uint32_t low = (1u << lane) - 1, mine_above = before_above + (uint32_t)__popc(above & low);
        const uint32_t mine_equal = before_equal + (uint32_t)__popc(equal & low), is_equal = equal >> lane & 1;
        if ((above >> lane & 1) || (is_equal && mine_equal < n_tie))
            select[mine_above + (mine_equal < n_tie ? mine_equal : n_tie)] = s.key ? s.position[i + lane] : s.first + i + lane;
        before_above += (uint32_t)__popc(above);
        before_equal += (uint32_t)__popc(equal);
    }
}

/* This warp's keys that can still be selected once the k-th is known to lie in bin sh.found[0] of the first digit: its list, or everything when
 * that is too long. */
static __device__ __forceinline__ topk_keys topk_narrow(const topk_keys &all, topk_shared &sh, int lane, int warp) {
    topk_keys s = all;
    const int32_t n = topk_list(all, sh, sh.found[0] << INDEX_DIGIT, lane, warp);
    __syncwarp();
    if (n <= TOPK_LIST) {
        s.key = sh.key[warp];
        s.position = sh.position[warp];
        s.n = n;
    }
    return s;
}

static __global__ void __cluster_dims__(TOPK_BLOCKS, 1, 1) __launch_bounds__(TOPK_THREADS, 4)
    index_topk(const index_rows r, int32_t *select, int32_t *n_select) {
    bi_cuda_begin();
    extern __shared__ __align__(128) unsigned char index_shared[];
    topk_shared &sh = *(topk_shared *)index_shared;
    const int32_t t = (int32_t)blockIdx.x / TOPK_BLOCKS, row = r.row0 + t, tid = (int32_t)threadIdx.x, lane = tid % 32, warp = tid / 32;
    const uint32_t rank = topk_cluster_rank();
    if (r.row_seg[row] < 0)
        return;
    const int32_t n = index_visible(r.seg[r.row_seg[row]], row), n_out = n < r.topk ? n : r.topk;
    int32_t *out = select + (int64_t)row * r.topk;
    if (rank == 0 && tid == 0)
        n_select[row] = n_out;
    if (n <= r.topk || (r.bad && r.bad[t])) { /* all of them, or ties everywhere */
        for (int32_t i = (int32_t)rank * TOPK_THREADS + tid; i < n_out; i += TOPK_BLOCKS * TOPK_THREADS)
            out[i] = i;
        return;
    }
    const int32_t per_warp = ((n + TOPK_BLOCKS * TOPK_WARPS - 1) / (TOPK_BLOCKS * TOPK_WARPS) + 31) / 32 * 32;
    const int32_t first = ((int32_t)rank * TOPK_WARPS + warp) * per_warp, left = n - first;
    topk_keys s = {NULL, NULL, r.score + t * r.score_ld + first, first, left < 0 ? 0 : left < per_warp ? left : per_warp};
    uint32_t prefix = 0, mask = 0, rest = (uint32_t)r.topk;
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? INDEX_DIGIT : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
        if (pass == 0 && r.count) {
            for (int32_t i = tid; i < INDEX_BINS; i += TOPK_THREADS)
                sh.total[i] = r.count[(int64_t)t * INDEX_BINS + i];
            topk_cluster_sync(); /* all blocks of the cluster have begun */
        } else
            topk_histogram(s, sh, rank, prefix, mask, shift, width);
        topk_find(sh, rest);
        prefix |= sh.found[0] << shift;
        mask |= ((1u << width) - 1) << shift;
        rest = sh.found[1];
        if (pass == 0)
            s = topk_narrow(s, sh, lane, warp);
    }
    topk_write(s, sh, rank, prefix, rest, out);
}

#endif
#endif
