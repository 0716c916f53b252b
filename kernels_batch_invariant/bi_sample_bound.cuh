/* bi_sample_bound: what the filters of a row keep, found by one block of threads.      Contract: N-SAMPLE, P-4
 *
 * Layer: kernels_batch_invariant, internal to bi_sample.cu. Every filter keeps a prefix of the P-4 order, so what is kept is one bound.
 * All sums are of integers, which have no order, so atomics and any division of the work give the same bound. */
#ifndef BI_SAMPLE_BOUND_CUH
#define BI_SAMPLE_BOUND_CUH

#include "bi_sample_row.cuh"

/* Calls visit(z, index) for every entry of the row whose sub-block's maximum is at least `floor`. Warps take turns; a warp has
 * SAMPLE_AHEAD sub-blocks under way, since one at a time would be the latency of memory and little else. */
template <class Visit> static __device__ __forceinline__ void sample_visit(const sample_view &v, float floor, Visit visit) {
    const int n_warp = (int)blockDim.x / 32;
    for (int first = (int)threadIdx.x / 32; first < v.n_block; first += SAMPLE_AHEAD * n_warp) {
        float x[SAMPLE_AHEAD][SAMPLE_ENTRIES];
        int n_vocab[SAMPLE_AHEAD]; /* 0 where the sub-block is left out */
#pragma unroll
        for (int u = 0; u < SAMPLE_AHEAD; u++) {
            const int b = first + u * n_warp;
            n_vocab[u] = b < v.n_block && v.max[b] >= floor ? v.n_vocab : 0;
        }
#pragma unroll
        for (int u = 0; u < SAMPLE_AHEAD; u++)
            sample_load(v.logit, n_vocab[u], first + u * n_warp, x[u]);
#pragma unroll
        for (int u = 0; u < SAMPLE_AHEAD; u++)
#pragma unroll
            for (int k = 0; k < SAMPLE_ENTRIES; k++)
                if (sample_entry(first + u * n_warp, k) < n_vocab[u])
                    visit(sample_z(x[u][k], v.temperature), sample_entry(first + u * n_warp, k));
    }
}

/* Finds the bin, counted from the last, in which the counts first reach `left`; what is then missing goes to s->left, the bin's own
 * count to s->n_equal. Each thread has neighbouring bins. */
static __device__ __forceinline__ void sample_find_bin(sample_shared *s, uint32_t left) {
    const int own = SAMPLE_BINS / (int)blockDim.x, last = SAMPLE_BINS - 1 - (int)threadIdx.x * own;
    uint32_t mine = 0;
    for (int k = 0; k < own; k++)
        mine += s->count[last - k];
    uint64_t total;
    uint32_t before = (uint32_t)sample_block_before(mine, s->sum, &total);
    if (before < left && left <= before + mine)
        for (int k = 0; k < own; k++) {
            const uint32_t count = s->count[last - k];
            if (before < left && left <= before + count) {
                s->bin = (uint32_t)(last - k);
                s->n_equal = count;
                s->left = left - before;
            }
            before += count;
        }
    __syncthreads();
}

/* The k-th largest of the keys that `each` hands to its argument, 1 <= k <= their number; s->left: how many of exactly this key are
 * among the first k, s->n_equal: how many there are. Three digits of the key, largest first. */
template <class Each> static __device__ __forceinline__ uint32_t sample_kth_key(sample_shared *s, uint32_t k, Each each) {
    uint32_t prefix = 0, mask = 0;
#pragma unroll 1
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        const uint32_t bin_mask = pass < 2 ? 2047 : 1023;
        for (int i = (int)threadIdx.x; i < SAMPLE_BINS; i += (int)blockDim.x)
            s->count[i] = 0;
        __syncthreads();
        each([s, prefix, mask, shift, bin_mask](uint32_t key) {
            if ((key & mask) == prefix)
                atomicAdd(&s->count[(key >> shift) & bin_mask], 1u);
        });
        __syncthreads();
        sample_find_bin(s, k);
        k = (uint32_t)s->left;
        prefix |= s->bin << shift;
        mask |= bin_mask << shift;
        __syncthreads();
    }
    return prefix;
}

/* The index of the n-th entry with exactly this z, 1 <= n <= their number. Each warp counts a run of sub-blocks; the warp whose run
 * reaches n goes through it again. */
static __device__ __forceinline__ int32_t sample_nth_equal(const sample_view &v, sample_shared *s, float z, uint32_t n) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, n_warp = (int)blockDim.x / 32;
    const int run = (v.n_block + n_warp - 1) / n_warp, begin = warp * run, end = begin + run < v.n_block ? begin + run : v.n_block;
    uint32_t before = 0;
    for (int again = 0; again < 2; again++) {
        uint32_t seen = before;
        for (int b = begin; b < end; b++) {
            if (v.max[b] < z)
                continue;
            float x[SAMPLE_ENTRIES];
            sample_load(v.logit, v.n_vocab, b, x);
            for (int k = 0; k < SAMPLE_ENTRIES; k++) {
                const bool equal = sample_entry(b, k) < v.n_vocab && sample_z(x[k], v.temperature) == z;
                const uint32_t lanes = __ballot_sync(0xffffffffu, equal);
                if (again && equal && seen + (uint32_t)__popc(lanes & ((2u << lane) - 1)) == n)
                    s->index = sample_entry(b, k);
                seen += (uint32_t)__popc(lanes);
            }
        }
        if (again)
            break;
        uint64_t total;
        before = (uint32_t)sample_block_before(lane == 0 ? seen : 0, s->sum, &total);
        before = __shfl_sync(0xffffffffu, before, 0);
        if (before >= n || __shfl_sync(0xffffffffu, seen, 0) + before < n)
            break;
    }
    __syncthreads();
    const int32_t index = s->index;
    __syncthreads();
    return index;
}

/* The bound of the entries that rank before or are the n-th of those with this z, of which there are n_equal. */
static __device__ __forceinline__ sample_bound sample_bound_at(const sample_view &v, sample_shared *s, float z, uint32_t n, uint32_t n_equal) {
    sample_bound bound = {z, INT32_MAX};
    if (n < n_equal)
        bound.index = sample_nth_equal(v, s, z, n);
    return bound;
}

/* The first k entries by P-4, 1 <= k < n_vocab. None of them lies below the k-th largest maximum of the sub-blocks. */
static __device__ __forceinline__ sample_bound sample_top_k(const sample_view &v, sample_shared *s, uint32_t k) {
    float floor = -BI_HEAD_Z_MAX;
    if (k <= (uint32_t)v.n_block)
        floor = sample_of_key(sample_kth_key(s, k, [&v](auto add) {
            for (int b = (int)threadIdx.x; b < v.n_block; b += (int)blockDim.x)
                add(bi_order_key(v.max[b]));
        }));
    const uint32_t key = sample_kth_key(s, k, [&v, floor](auto add) {
        sample_visit(v, floor, [floor, &add](float z, int) {
            if (z >= floor)
                add(bi_order_key(z));
        });
    });
    const uint32_t n = (uint32_t)s->left, n_equal = s->n_equal;
    __syncthreads();
    return sample_bound_at(v, s, sample_of_key(key), n, n_equal);
}

/* ---- top_p ------------------------------------------------------------------------------------------------------------------------- */

/* The bin of the row's weights in which their sum in P-4 order first reaches `target`; returns what is then missing. */
static __device__ __forceinline__ uint64_t top_p_bin(sample_shared *s, const uint64_t *bins, uint64_t target) {
    const int own = SAMPLE_BINS / (int)blockDim.x, first = (int)threadIdx.x * own;
    uint64_t mine = 0, total;
    for (int k = 0; k < own; k++)
        mine += bins[first + k];
    uint64_t before = sample_block_before(mine, s->sum, &total);
    if (before < target && target <= before + mine)
        for (int k = 0; k < own; k++) {
            const uint64_t weight = bins[first + k];
            if (before < target && target <= before + weight) {
                s->bin = (uint32_t)(first + k);
                s->left = target - before;
            }
            before += weight;
        }
    __syncthreads();
    return s->left;
}

/* Is the entry one of the kept of this bin, with a weight? */
static __device__ __forceinline__ bool top_p_candidate(const sample_row &row, int bin, float z, int index) {
    return sample_keeps(row.kept, z, index) && BI_SUB(z, row.max) >= SAMPLE_NO_WEIGHT && sample_bin(z, row.max, row.bin_scale) == bin;
}

/* Lists the candidates of bin s->bin: keys in s->list_key, number s->n_list, which may pass the end of the list; and their range. */
static __device__ __forceinline__ void top_p_list(const sample_view &v, const sample_row &row, sample_shared *s, float floor) {
    const int bin = (int)s->bin;
    if (threadIdx.x == 0) {
        s->n_list = 0;
        s->key_low = 0xffffffffu;
        s->key_high = 0;
    }
    __syncthreads();
    uint32_t low = 0xffffffffu, high = 0;
    sample_visit(v, floor, [&](float z, int index) {
        if (!top_p_candidate(row, bin, z, index))
            return;
        const uint32_t key = bi_order_key(z);
        low = key < low ? key : low;
        high = key > high ? key : high;
        const int at = atomicAdd(&s->n_list, 1);
        if (at < SAMPLE_BINS)
            s->list_key[at] = key;
    });
    if (high) {
        atomicMin(&s->key_low, low);
        atomicMax(&s->key_high, high);
    }
    __syncthreads();
}

/* The sum of the candidates' weights from this key on; *n_equal: how many have exactly it. From the list, or when that is too short
 * from the row. */
static __device__ __forceinline__ uint64_t top_p_sum(const sample_view &v, const sample_row &row, sample_shared *s, float floor, uint32_t key,
                                                     uint32_t *n_equal) {
    uint64_t sum = 0;
    uint32_t equal = 0;
    if (s->n_list <= SAMPLE_BINS) {
        for (int i = (int)threadIdx.x; i < s->n_list; i += (int)blockDim.x) {
            const uint32_t other = s->list_key[i];
            sum += other >= key ? sample_weight(sample_of_key(other), row.max) : 0;
            equal += other == key;
        }
    } else {
        const int bin = (int)s->bin;
        sample_visit(v, floor, [&](float z, int index) {
            const uint32_t other = bi_order_key(z);
            if (other < key || !top_p_candidate(row, bin, z, index))
                return;
            sum += sample_weight(z, row.max);
            equal += other == key;
        });
    }
    *n_equal = (uint32_t)sample_block_sum(equal, s->sum);
    return sample_block_sum(sum, s->sum);
}

/* The shortest P-4 prefix of what is kept whose weight is at least ceil(P * W / 2^32). The key that reaches it is found in its bin by
 * halving the range of keys. */
static __device__ __forceinline__ sample_bound sample_top_p(const sample_view &v, const sample_row &row, sample_shared *s, const uint64_t *bins,
                                                            uint64_t weight_sum, uint64_t top_p) {
    const unsigned __int128 scaled = (unsigned __int128)top_p * weight_sum + (SAMPLE_TOP_P_OFF - 1);
    const uint64_t left = top_p_bin(s, bins, (uint64_t)(scaled >> BI_SAMPLE_P_BITS));
    const float floor = row.kept.z;
    top_p_list(v, row, s, floor);
    uint32_t low = s->key_low, high = s->key_high, n_equal;
    while (low < high) {
        const uint32_t middle = low + (high - low + 1) / 2;
        if (top_p_sum(v, row, s, floor, middle, &n_equal) >= left)
            low = middle;
        else
            high = middle - 1;
    }
    const uint64_t from = top_p_sum(v, row, s, floor, low, &n_equal), weight = sample_weight(sample_of_key(low), row.max);
    const uint64_t missing = left - (from - weight * n_equal);
    const sample_bound bound = sample_bound_at(v, s, sample_of_key(low), (uint32_t)((missing + weight - 1) / weight), n_equal);
    return sample_stricter(row.kept, bound);
}

#endif
