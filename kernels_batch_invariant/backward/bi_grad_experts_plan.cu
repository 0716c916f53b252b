/* The plan of the experts' gradients: integers only, so that its order is the pairs'.
 *
 * key_kernel: a thread a pair. count_kernel and place_kernel: a warp a key, through all pairs in steps of 32. scan_kernel: one block
 * of 1,024 over the keys: where each begins, and its tiles. */
#include "bi_grad_experts_parts.cuh"

enum { THREADS = 256, SCAN_THREADS = 1024 };

static __global__ void __launch_bounds__(THREADS) key_kernel(const ge_plan plan, const int32_t *expert, const int32_t *row_slot, int32_t topk,
                                                            int32_t n_expert) {
    const int32_t pair = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    if (pair >= plan.n_pair)
        return;
    const int32_t e = expert[pair], slot = row_slot ? row_slot[pair / topk] : -1;
    plan.key[pair] = e < 0 || e >= n_expert ? -1 : e * plan.n_key + (slot >= 0 && slot < plan.n_key - 1 ? slot + 1 : 0);
}

/* Of 32 pairs, those with the key. */
static __device__ __forceinline__ uint32_t same_key(const ge_plan &plan, int32_t first, int32_t group) {
    const int32_t pair = first + (int32_t)threadIdx.x % 32;
    return __ballot_sync(0xffffffffu, pair < plan.n_pair && plan.key[pair] == group);
}

static __global__ void __launch_bounds__(THREADS) count_kernel(const ge_plan plan) {
    const int32_t group = (int32_t)(blockIdx.x * (THREADS / 32) + threadIdx.x / 32);
    int32_t n = 0;
    if (group >= plan.n_group)
        return;
    for (int32_t first = 0; first < plan.n_pair; first += 32)
        n += __popc(same_key(plan, first, group));
    if (threadIdx.x % 32 == 0)
        plan.offset[group + 1] = n;
}

/* Pairs below bit 32, tiles above. */
static __device__ uint64_t scan_block(uint64_t v, uint64_t *sums) {
    const int32_t i = (int32_t)threadIdx.x;
    sums[i] = v;
    __syncthreads();
    for (int32_t h = 1; h < SCAN_THREADS; h *= 2) {
        const uint64_t from = i >= h ? sums[i - h] : 0;
        __syncthreads();
        sums[i] += from;
        __syncthreads();
    }
    return sums[i];
}

static __global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(const ge_plan plan) {
    __shared__ uint64_t sums[SCAN_THREADS];
    uint64_t carry = 0;
    for (int32_t first = 0; first < plan.n_group; first += SCAN_THREADS) {
        const int32_t group = first + (int32_t)threadIdx.x, n = group < plan.n_group ? plan.offset[group + 1] : 0;
        const int32_t n_tile = (n + GE_PLACES - 1) / GE_PLACES;
        const uint64_t mine = (uint64_t)n_tile << 32 | (uint32_t)n, sum = carry + scan_block(mine, sums), before = sum - mine;
        for (int32_t i = 0; i < n_tile; i++) {
            const int32_t begin = (int32_t)(uint32_t)before + i * GE_PLACES, left = n - i * GE_PLACES;
            const ge_tile tile = {group / plan.n_key, group % plan.n_key - 1, begin, left < GE_PLACES ? left : GE_PLACES};
            plan.tile[(int32_t)(before >> 32) + i] = tile;
        }
        if (group < plan.n_group)
            plan.offset[group + 1] = (int32_t)(uint32_t)sum;
        carry += sums[SCAN_THREADS - 1];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        plan.offset[0] = 0;
        *plan.n_tile = (int32_t)(carry >> 32);
    }
}

static __global__ void __launch_bounds__(THREADS) place_kernel(const ge_plan plan, int32_t topk) {
    const int32_t group = (int32_t)(blockIdx.x * (THREADS / 32) + threadIdx.x / 32), lane = (int32_t)threadIdx.x % 32;
    if (group >= plan.n_group)
        return;
    int32_t at = plan.offset[group];
    const int32_t end = plan.offset[group + 1];
    for (int32_t first = 0; first < plan.n_pair && at < end; first += 32) {
        const uint32_t same = same_key(plan, first, group);
        if (same >> lane & 1) {
            const int32_t place = at + __popc(same & ((1u << lane) - 1)), pair = first + lane;
            plan.pair[place] = pair;
            plan.row[place] = pair / topk;
        }
        at += __popc(same);
    }
}

br_status bi_grad_experts_plan(bi_grad_ctx *ctx, const ge_plan *plan, const int32_t *expert, const int32_t *row_slot, int32_t topk,
                               int32_t n_expert) {
    const cudaStream_t stream = ctx->cuda->stream;
    const unsigned groups = (unsigned)bi_ceil_div(plan->n_group, THREADS / 32);
    if (plan->n_pair > 0) {
        key_kernel<<<(unsigned)bi_ceil_div(plan->n_pair, THREADS), THREADS, 0, stream>>>(*plan, expert, row_slot, topk, n_expert);
        BR_TRY(bi_grad_launched("experts"));
    }
    count_kernel<<<groups, THREADS, 0, stream>>>(*plan);
    BR_TRY(bi_grad_launched("experts"));
    scan_kernel<<<1, SCAN_THREADS, 0, stream>>>(*plan);
    BR_TRY(bi_grad_launched("experts"));
    place_kernel<<<groups, THREADS, 0, stream>>>(*plan, topk);
    return bi_grad_launched("experts");
}
