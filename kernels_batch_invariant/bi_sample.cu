/* bi_sample on the GPU: filters, the draw, and the three log-probs of the drawn token.      Contract: N-HEAD, N-SAMPLE, N-RNG, P-4
 *
 * Five steps in stream order, for SAMPLE_ROWS rows at a time; what a row's settings do not ask for ends at once:
 *   part    grid (pieces, rows), 256 threads, a warp a sub-block: m_b, l_b, d_b at the row's temperature and at 1.
 *   bound   a block of 512 threads a row: M, and what min_p and top_k keep.
 *   weight  grid (1 + pieces, rows), 256 threads: integer weights by sub-block; under top_p also by distance from M. The first block of
 *           a row merges its parts meanwhile: three chains in rising b, L, D and L at T = 1, on a thread each.
 *   top_p   a block of 512 threads a row: the bound that top_p leaves; then `weight` again for these rows.
 *   draw    a block of 512 threads a row: the token, its log-probs, the best n_top.
 * So a row is read twice, and a third time under top_p. Order: SUM128 is folds over the entries of a sub-block (bi_sample_row.cuh), the
 * chains are as written in merge_row, and all else is integers, maxima and compares, which have none. */
#include "bi_sample_bound.cuh"

/* ---- part -------------------------------------------------------------------------------------------------------------------------- */

/* SUM128 of a warp's 128 numbers. */
static __device__ __forceinline__ float sum128(const float x[SAMPLE_ENTRIES]) {
    return bi_row_fold_warp(BI_ADD(BI_ADD(x[0], x[2]), BI_ADD(x[1], x[3])));
}

typedef struct part {
    float max, sum, dot;
} part;

/* A logit that is NaN makes l_b NaN, whatever the maximum is then. */
static __device__ __forceinline__ part part_of(const float x[SAMPLE_ENTRIES], int n_vocab, int b, float temperature, int want_dot) {
    float z[SAMPLE_ENTRIES], e[SAMPLE_ENTRIES];
#pragma unroll
    for (int k = 0; k < SAMPLE_ENTRIES; k++)
        z[k] = sample_entry(b, k) < n_vocab ? sample_z(x[k], temperature) : -BI_HEAD_Z_MAX;
    float max = z[0];
#pragma unroll
    for (int k = 1; k < SAMPLE_ENTRIES; k++)
        max = z[k] > max ? z[k] : max;
    part p = {sample_warp_max(max), 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < SAMPLE_ENTRIES; k++)
        e[k] = sample_entry(b, k) < n_vocab ? bi_exp(BI_SUB(z[k], p.max)) : 0.0f;
    p.sum = sum128(e);
    if (!want_dot)
        return p;
#pragma unroll
    for (int k = 0; k < SAMPLE_ENTRIES; k++)
        e[k] = BI_ADD(0.0f, sample_entry(b, k) < n_vocab ? BI_MUL(e[k], BI_SUB(z[k], p.max)) : 0.0f);
    p.dot = sum128(e);
    return p;
}

BI_ROW_KERNEL part_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    const int r = (int)blockIdx.y, t = s.first + r, lane = (int)threadIdx.x & 31;
    if (s.a.row_fault && s.a.row_fault[t])
        return;
    const sample_view v = sample_view_of(s, r);
    const int want_dot = s.a.setting[t].entropy, n_warp = (int)gridDim.x * BI_ROW_BLOCK / 32;
    int b = (int)blockIdx.x * (BI_ROW_BLOCK / 32) + (int)threadIdx.x / 32;
    float x[SAMPLE_ENTRIES], next[SAMPLE_ENTRIES];
    sample_load(v.logit, v.n_vocab, b, x);
    for (; b < v.n_block; b += n_warp) {
        sample_load(v.logit, v.n_vocab, b + n_warp, next);
        const int64_t at = (int64_t)r * v.n_block + b;
        const part p = part_of(x, v.n_vocab, b, v.temperature, want_dot);
        if (lane == 0) {
            s.max[at] = p.max;
            s.sum[at] = p.sum;
            s.dot[at] = p.dot;
        }
        if (v.temperature != 1.0f) {
            const part raw = part_of(x, v.n_vocab, b, 1.0f, 0);
            if (lane == 0) {
                s.raw_max[at] = raw.max;
                s.raw_sum[at] = raw.sum;
            }
        }
#pragma unroll
        for (int k = 0; k < SAMPLE_ENTRIES; k++)
            x[k] = next[k];
    }
}

/* ---- bound ------------------------------------------------------------------------------------------------------------------------- */

/* The largest of the block's numbers, none -0; every thread gets it. */
static __device__ __forceinline__ float block_max(float x, uint32_t *shared) {
    if (threadIdx.x == 0)
        *shared = 0;
    __syncthreads();
    const uint32_t key = __reduce_max_sync(0xffffffffu, bi_order_key(x));
    if ((threadIdx.x & 31) == 0)
        atomicMax(shared, key);
    __syncthreads();
    x = sample_of_key(*shared);
    __syncthreads();
    return x;
}

/* Bins reach four times as far down as the maxima of the sub-blocks do, and no farther than weights. */
static __device__ __forceinline__ float bin_scale(float max, float low) {
    const float spread = BI_MUL(4.0f, BI_SUB(max, low));
    return BI_DIV((float)SAMPLE_BINS, spread > 0x1p-60f && spread < -SAMPLE_NO_WEIGHT ? spread : -SAMPLE_NO_WEIGHT);
}

static __global__ void __launch_bounds__(SAMPLE_ROW_THREADS, 1) bound_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    __shared__ sample_shared shared;
    const int r = (int)blockIdx.x, t = s.first + r;
    const bi_sampling set = s.a.setting[t];
    int skip = s.a.row_fault && s.a.row_fault[t];
    if (skip) {
        if (threadIdx.x == 0)
            s.row[r].skip = 1;
        return;
    }
    const sample_view v = sample_view_of(s, r);
    float max = -BI_HEAD_Z_MAX, lowest = BI_HEAD_Z_MAX;
    for (int b = (int)threadIdx.x; b < v.n_block; b += SAMPLE_ROW_THREADS) {
        max = v.max[b] > max ? v.max[b] : max;
        lowest = v.max[b] < lowest ? v.max[b] : lowest;
        skip |= !bi_is_finite(s.sum[(int64_t)r * v.n_block + b]);
    }
    skip = __syncthreads_or(skip);
    max = block_max(max, &shared.bin);
    lowest = -block_max(BI_SUB(0.0f, lowest), &shared.bin);
    sample_bound kept = {-BI_HEAD_Z_MAX, v.n_vocab - 1};
    if (!skip && set.temperature != 0.0f) {
        if (set.min_p > 0.0f) {
            const sample_bound bound = {BI_ADD(max, bi_log(set.min_p)), INT32_MAX};
            kept = sample_stricter(kept, bound);
        }
        if (set.top_k > 0 && set.top_k < v.n_vocab)
            kept = sample_stricter(kept, sample_top_k(v, &shared, (uint32_t)set.top_k));
        for (int i = (int)threadIdx.x; set.top_p_q32 < SAMPLE_TOP_P_OFF && i < SAMPLE_BINS; i += SAMPLE_ROW_THREADS)
            s.bin[(int64_t)r * SAMPLE_BINS + i] = 0;
    }
    if (threadIdx.x == 0) {
        const sample_row row = {skip, max, 0.0f, 0.0f, 0.0f, 0.0f, kept, bin_scale(max, lowest)};
        s.row[r] = row;
    }
}

/* ---- weight ------------------------------------------------------------------------------------------------------------------------ */

typedef struct merge_shared {
    float2 scaled[BI_ROW_BLOCK], raw[BI_ROW_BLOCK]; /* l_b, exp(m_b - M) */
    float dot[BI_ROW_BLOCK], sum, dot_sum;
    uint32_t key;
} merge_shared;

/* L, D and L at T = 1 from the parts in rising b. */
static __device__ __forceinline__ void merge_row(const sample_run &s, int r, merge_shared *shared) {
    const int i = (int)threadIdx.x, n_block = s.n_block;
    const int want_dot = s.a.setting[s.first + r].entropy, want_raw = sample_view_of(s, r).temperature != 1.0f;
    const int64_t at = (int64_t)r * n_block;
    const float max = s.row[r].max;
    float raw_max = -BI_HEAD_Z_MAX, chain = 0.0f;
    for (int b = i; want_raw && b < n_block; b += BI_ROW_BLOCK)
        raw_max = s.raw_max[at + b] > raw_max ? s.raw_max[at + b] : raw_max;
    raw_max = block_max(raw_max, &shared->key);
    for (int first = 0; first < n_block; first += BI_ROW_BLOCK) {
        const int b = first + i, n = n_block - first < BI_ROW_BLOCK ? n_block - first : BI_ROW_BLOCK;
        if (b < n_block) {
            const float shift = BI_SUB(s.max[at + b], max);
            shared->scaled[i] = make_float2(s.sum[at + b], bi_exp(shift));
            shared->dot[i] = want_dot ? BI_FMA(s.sum[at + b], shift, s.dot[at + b]) : 0.0f;
            if (want_raw)
                shared->raw[i] = make_float2(s.raw_sum[at + b], bi_exp(BI_SUB(s.raw_max[at + b], raw_max)));
        }
        __syncthreads();
        if (i == 0 || (i == 64 && want_raw)) {
            const float2 *part = i == 0 ? shared->scaled : shared->raw;
#pragma unroll 8
            for (int k = 0; k < n; k++)
                chain = BI_FMA(part[k].x, part[k].y, chain);
        }
        if (i == 32 && want_dot)
#pragma unroll 8
            for (int k = 0; k < n; k++)
                chain = BI_FMA(shared->dot[k], shared->scaled[k].y, chain);
        __syncthreads();
    }
    if (i == 0)
        s.row[r].log_sum = bi_log(shared->sum = chain);
    if (i == 32)
        shared->dot_sum = chain;
    if (i == 64) {
        s.row[r].raw_max = raw_max;
        s.row[r].raw_log_sum = bi_log(chain);
    }
    __syncthreads();
    if (i == 0 && want_dot)
        s.row[r].entropy = BI_SUB(bi_log(shared->sum), BI_DIV(shared->dot_sum, shared->sum));
}

/* The sum over a warp of lanes' sums below 2^43: two halves, each within 32 bits. */
static __device__ __forceinline__ uint64_t warp_weight(uint64_t w) {
    const uint32_t low = __reduce_add_sync(0xffffffffu, (uint32_t)w & 0x1fffffu), high = __reduce_add_sync(0xffffffffu, (uint32_t)(w >> 21));
    return ((uint64_t)high << 21) + low;
}

/* Weights of sub-blocks first, first + step, .. by warp; bins NULL, or their low 20 bits and the rest by bin. */
static __device__ __forceinline__ void weigh(const sample_run &s, int r, int first, int step, uint32_t (*bins)[SAMPLE_BINS]) {
    const sample_view v = sample_view_of(s, r);
    const sample_row row = s.row[r];
    for (int b = first; b < v.n_block; b += step) {
        uint64_t sum = 0;
        if (v.max[b] >= row.kept.z && BI_SUB(v.max[b], row.max) >= SAMPLE_NO_WEIGHT) {
            float x[SAMPLE_ENTRIES];
            sample_load(v.logit, v.n_vocab, b, x);
#pragma unroll
            for (int k = 0; k < SAMPLE_ENTRIES; k++) {
                const float z = sample_z(x[k], v.temperature);
                const int index = sample_entry(b, k);
                const uint64_t w = index < v.n_vocab && sample_keeps(row.kept, z, index) ? sample_weight(z, row.max) : 0;
                sum += w;
                if (bins && w) {
                    const int bin = sample_bin(z, row.max, row.bin_scale);
                    atomicAdd(&bins[0][bin], (uint32_t)w & 0xfffffu);
                    atomicAdd(&bins[1][bin], (uint32_t)(w >> 20));
                }
            }
            sum = warp_weight(sum);
        }
        if ((threadIdx.x & 31) == 0)
            s.weight[(int64_t)r * v.n_block + b] = sum;
    }
}

static __device__ __forceinline__ int has_top_p(const sample_run &s, int r) {
    const bi_sampling *set = &s.a.setting[s.first + r];
    return set->temperature != 0.0f && set->top_p_q32 < SAMPLE_TOP_P_OFF;
}

BI_ROW_KERNEL weight_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    __shared__ union {
        merge_shared merge;
        uint32_t bins[2][SAMPLE_BINS];
    } shared;
    const int r = (int)blockIdx.y, warps = BI_ROW_BLOCK / 32;
    if (s.row[r].skip)
        return;
    if (blockIdx.x == 0) {
        merge_row(s, r, &shared.merge);
        return;
    }
    if (s.a.setting[s.first + r].temperature == 0.0f)
        return;
    const int first = ((int)blockIdx.x - 1) * warps + (int)threadIdx.x / 32, step = ((int)gridDim.x - 1) * warps;
    if (!has_top_p(s, r)) {
        weigh(s, r, first, step, NULL);
        return;
    }
    for (int i = (int)threadIdx.x; i < SAMPLE_BINS; i += BI_ROW_BLOCK)
        shared.bins[0][i] = shared.bins[1][i] = 0;
    __syncthreads();
    weigh(s, r, first, step, shared.bins);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SAMPLE_BINS; i += BI_ROW_BLOCK) {
        const uint64_t w = ((uint64_t)shared.bins[1][i] << 20) + shared.bins[0][i];
        if (w)
            atomicAdd((unsigned long long *)&s.bin[(int64_t)r * SAMPLE_BINS + i], (unsigned long long)w);
    }
}

BI_ROW_KERNEL weight_again_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    const int r = (int)blockIdx.y, warps = BI_ROW_BLOCK / 32;
    if (!s.row[r].skip && has_top_p(s, r))
        weigh(s, r, (int)blockIdx.x * warps + (int)threadIdx.x / 32, (int)gridDim.x * warps, NULL);
}

static __global__ void __launch_bounds__(SAMPLE_ROW_THREADS, 1) top_p_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    __shared__ sample_shared shared;
    const int r = (int)blockIdx.x;
    if (s.row[r].skip || !has_top_p(s, r))
        return;
    const sample_view v = sample_view_of(s, r);
    const sample_row row = s.row[r];
    uint64_t sum = 0;
    for (int b = (int)threadIdx.x; b < v.n_block; b += SAMPLE_ROW_THREADS)
        sum += s.weight[(int64_t)r * v.n_block + b];
    sum = sample_block_sum(sum, shared.sum);
    const sample_bound kept = sample_top_p(v, row, &shared, s.bin + (int64_t)r * SAMPLE_BINS, sum, s.a.setting[s.first + r].top_p_q32);
    if (threadIdx.x == 0)
        s.row[r].kept = kept;
}

/* ---- draw -------------------------------------------------------------------------------------------------------------------------- */

/* The entry that P-4 puts first: the first one that is the maximum, in the first sub-block that has it. */
static __device__ __forceinline__ int32_t greedy(const sample_view &v, sample_shared *s, float max) {
    if (threadIdx.x == 0)
        s->index = INT32_MAX;
    __syncthreads();
    for (int b = (int)threadIdx.x; b < v.n_block; b += SAMPLE_ROW_THREADS)
        if (v.max[b] == max) {
            atomicMin(&s->index, b);
            break;
        }
    __syncthreads();
    const int b = s->index;
    int32_t best = INT32_MAX;
    float x[SAMPLE_ENTRIES];
    sample_load(v.logit, v.n_vocab, b, x);
    for (int k = SAMPLE_ENTRIES - 1; k >= 0; k--) {
        const bool first = sample_entry(b, k) < v.n_vocab && sample_z(x[k], v.temperature) == max;
        const uint32_t lanes = __ballot_sync(0xffffffffu, first);
        best = lanes ? b * BI_HEAD_BLOCK + 32 * k + __ffs((int)lanes) - 1 : best;
    }
    __syncthreads();
    return best;
}

/* The first entry of sub-block b at which the weights so far exceed `left`; a whole warp. */
static __device__ __forceinline__ int32_t draw_in_block(const sample_view &v, const sample_row &row, int b, uint64_t left) {
    float x[SAMPLE_ENTRIES];
    sample_load(v.logit, v.n_vocab, b, x);
    for (int k = 0; k < SAMPLE_ENTRIES; k++) {
        const float z = sample_z(x[k], v.temperature);
        const int index = sample_entry(b, k);
        uint64_t upto = index < v.n_vocab && sample_keeps(row.kept, z, index) ? sample_weight(z, row.max) : 0;
        for (int h = 1; h < 32; h <<= 1) {
            const uint64_t other = __shfl_up_sync(0xffffffffu, upto, h);
            upto += (int)(threadIdx.x & 31) >= h ? other : 0;
        }
        const uint32_t lanes = __ballot_sync(0xffffffffu, upto > left);
        if (lanes)
            return b * BI_HEAD_BLOCK + 32 * k + __ffs((int)lanes) - 1;
        left -= __shfl_sync(0xffffffffu, upto, 31);
    }
    return v.n_vocab - 1;
}

/* The first id whose inclusive prefix sum exceeds r = floor(u * W / 2^64); *sum is W. */
static __device__ __forceinline__ int32_t draw(const sample_view &v, const sample_row &row, sample_shared *s, const uint64_t *weight,
                                               const bi_sampling *set, int want, uint64_t *sum) {
    const int own = (v.n_block + SAMPLE_ROW_THREADS - 1) / SAMPLE_ROW_THREADS, first = (int)threadIdx.x * own;
    uint64_t mine = 0;
    for (int b = first; b < first + own && b < v.n_block; b++)
        mine += weight[b];
    uint64_t before = sample_block_before(mine, s->sum, sum);
    if (!want)
        return 0;
    const uint64_t u = bi_rng_u64(set->seed, (uint32_t)set->position, set->sample, BI_RNG_PURPOSE_SAMPLE, set->uid_hash);
    const uint64_t at = __umul64hi(u, *sum);
    if (before <= at && at < before + mine) {
        int b = first;
        for (; at >= before + weight[b]; b++)
            before += weight[b];
        s->index = b;
        s->left = at - before;
    }
    __syncthreads();
    const int32_t token = draw_in_block(v, row, s->index, s->left);
    __syncthreads();
    return token;
}

/* The best n by P-4, n <= SAMPLE_BINS: all entries of a bound, put in order by counting who comes before. */
static __device__ __forceinline__ void write_top(const sample_view &v, const sample_row &row, sample_shared *s, int n, bi_top *top) {
    sample_bound bound = {-BI_HEAD_Z_MAX, INT32_MAX};
    if (n < v.n_vocab)
        bound = sample_top_k(v, s, (uint32_t)n);
    if (threadIdx.x == 0)
        s->n_list = 0;
    __syncthreads();
    sample_visit(v, bound.z, [&](float z, int index) {
        if (!sample_keeps(bound, z, index))
            return;
        const int at = atomicAdd(&s->n_list, 1);
        if (at < n) {
            s->list_key[at] = bi_order_key(z);
            s->list_index[at] = index;
        }
    });
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += SAMPLE_ROW_THREADS) {
        const uint32_t key = s->list_key[i];
        int rank = 0;
        for (int j = 0; j < n; j++)
            rank += s->list_key[j] > key || (s->list_key[j] == key && s->list_index[j] < s->list_index[i]);
        top[rank].token = s->list_index[i];
        top[rank].logprob = BI_SUB(BI_SUB(sample_of_key(key), row.max), row.log_sum);
    }
}

static __device__ __forceinline__ void skip_row(const bi_sample_args &a, int t) {
    a.token[t] = -1;
    a.logprob[t] = a.logprob_raw[t] = a.logprob_kept[t] = 0.0f;
    a.entropy[t] = bi_f32_of(SAMPLE_NOT_ASKED);
}

/* RN(RN(z - m) - log(RN(W) * 2^-40)); W < 2^61. */
static __device__ __forceinline__ float kept_logprob(const sample_row &row, float z, int32_t token, uint64_t sum) {
    if (!sample_keeps(row.kept, z, token))
        return bi_f32_of(SAMPLE_MINUS_INF);
    const float scaled = BI_MUL(__ll2float_rn((int64_t)sum), 1.0f / (float)((uint64_t)1 << BI_SAMPLE_WEIGHT_BITS));
    return BI_SUB(BI_SUB(z, row.max), bi_log(scaled));
}

static __global__ void __launch_bounds__(SAMPLE_ROW_THREADS, 1) draw_kernel(const __grid_constant__ sample_run s) {
    bi_cuda_begin();
    __shared__ sample_shared shared;
    const bi_sample_args &a = s.a;
    const int r = (int)blockIdx.x, t = s.first + r;
    const sample_row row = s.row[r];
    if (row.skip) {
        if (threadIdx.x == 0)
            skip_row(a, t);
        return;
    }
    const bi_sampling *set = &a.setting[t];
    const sample_view v = sample_view_of(s, r);
    const int32_t forced = a.forced ? a.forced[t] : -1;
    int32_t token;
    float kept = 0.0f;
    if (set->temperature == 0.0f) {
        const int32_t best = greedy(v, &shared, row.max);
        token = forced >= 0 ? forced : best;
        kept = token == best ? 0.0f : bi_f32_of(SAMPLE_MINUS_INF);
    } else {
        uint64_t sum;
        token = draw(v, row, &shared, s.weight + (int64_t)r * v.n_block, set, forced < 0, &sum);
        token = forced >= 0 ? forced : token;
        kept = kept_logprob(row, sample_z(v.logit[token], v.temperature), token, sum);
    }
    if (threadIdx.x == 0) {
        const float z = sample_z(v.logit[token], v.temperature), raw = sample_z(v.logit[token], 1.0f);
        a.token[t] = token;
        a.logprob_kept[t] = kept;
        a.logprob[t] = BI_SUB(BI_SUB(z, row.max), row.log_sum);
        a.logprob_raw[t] = v.temperature == 1.0f ? BI_SUB(BI_SUB(z, row.max), row.log_sum) : BI_SUB(BI_SUB(raw, row.raw_max), row.raw_log_sum);
        a.entropy[t] = set->entropy ? row.entropy : bi_f32_of(SAMPLE_NOT_ASKED);
    }
    int n_top = set->n_top < a.top_ld ? set->n_top : a.top_ld;
    n_top = n_top < BR_TOP_LOGPROBS_MAX ? n_top : BR_TOP_LOGPROBS_MAX;
    if (n_top > 0)
        write_top(v, row, &shared, n_top < v.n_vocab ? n_top : v.n_vocab, a.top + (int64_t)t * a.top_ld);
}

/* ---- host -------------------------------------------------------------------------------------------------------------------------- */

static int32_t rows_at_once(const bi_limits *limits) {
    return limits->n_row < 1 ? 1 : limits->n_row < SAMPLE_ROWS ? limits->n_row : SAMPLE_ROWS;
}

static void carve(bi_carver *carver, const bi_limits *limits, sample_run *s) {
    const size_t n_row = (size_t)rows_at_once(limits), n = n_row * (size_t)bi_ceil_div(limits->n_vocab, BI_HEAD_BLOCK);
    s->row = (sample_row *)bi_carve(carver, n_row * sizeof(sample_row));
    s->max = (float *)bi_carve(carver, n * sizeof(float));
    s->sum = (float *)bi_carve(carver, n * sizeof(float));
    s->dot = (float *)bi_carve(carver, n * sizeof(float));
    s->raw_max = (float *)bi_carve(carver, n * sizeof(float));
    s->raw_sum = (float *)bi_carve(carver, n * sizeof(float));
    s->weight = (uint64_t *)bi_carve(carver, n * sizeof(uint64_t));
    s->bin = (uint64_t *)bi_carve(carver, n_row * SAMPLE_BINS * sizeof(uint64_t));
}

size_t bi_cuda_sample_scratch(const bi_limits *limits) {
    bi_carver carver = {NULL, 0, 0};
    sample_run s;
    carve(&carver, limits, &s);
    return carver.used;
}

/* All steps of n rows. */
static br_status sample_rows(bi_ctx *ctx, const sample_run *s, int32_t n) {
    const int64_t warps = BI_ROW_BLOCK / 32, most = bi_ceil_div(s->n_block, warps), least = bi_ceil_div(s->n_block, SAMPLE_BLOCK_MAX);
    int64_t pieces = bi_ceil_div(16 * (int64_t)ctx->n_sm, n);
    pieces = pieces > most ? most : pieces < least ? least : pieces;
    const unsigned again = (unsigned)(most < 8 ? most : 8), n_row = (unsigned)n;
    bi_cuda_launch(ctx, part_kernel, dim3((unsigned)pieces, n_row), BI_ROW_BLOCK, 0, *s);
    BR_TRY(bi_cuda_launched(ctx, BI_K_sample, "sample"));
    bi_cuda_launch(ctx, bound_kernel, n_row, SAMPLE_ROW_THREADS, 0, *s);
    BR_TRY(bi_cuda_launched(ctx, BI_K_sample, "sample"));
    bi_cuda_launch(ctx, weight_kernel, dim3((unsigned)pieces + 1, n_row), BI_ROW_BLOCK, 0, *s);
    BR_TRY(bi_cuda_launched(ctx, BI_K_sample, "sample"));
    bi_cuda_launch(ctx, top_p_kernel, n_row, SAMPLE_ROW_THREADS, 0, *s);
    BR_TRY(bi_cuda_launched(ctx, BI_K_sample, "sample"));
    bi_cuda_launch(ctx, weight_again_kernel, dim3(again, n_row), BI_ROW_BLOCK, 0, *s);
    BR_TRY(bi_cuda_launched(ctx, BI_K_sample, "sample"));
    bi_cuda_launch(ctx, draw_kernel, n_row, SAMPLE_ROW_THREADS, 0, *s);
    return bi_cuda_launched(ctx, BI_K_sample, "sample");
}

br_status bi_cuda_sample(bi_ctx *ctx, const bi_sample_args *a) {
    if (a->n_row < 0 || a->n_vocab < 1 || a->n_vocab > ctx->limits.n_vocab || a->logit_ld < a->n_vocab)
        return br_fail(BR_E_SHAPE, "sample: %d rows of %d logits at stride %lld: expected n_row >= 0, 1 to %d logits, stride >= them",
                       a->n_row, a->n_vocab, (long long)a->logit_ld, ctx->limits.n_vocab);
    bi_carver carver = bi_cuda_scratch(ctx);
    sample_run s;
    s.a = *a;
    s.n_block = (int32_t)bi_ceil_div(a->n_vocab, BI_HEAD_BLOCK);
    carve(&carver, &ctx->limits, &s);
    const int32_t at_once = rows_at_once(&ctx->limits);
    for (s.first = 0; s.first < a->n_row; s.first += at_once)
        BR_TRY(sample_rows(ctx, &s, a->n_row - s.first < at_once ? a->n_row - s.first : at_once));
    return BR_OK;
}
