/* The adapters' part of large steps: continues base chains in f32 through B, and checks logits.      Contract: N-LORA, P-5
 *
 * Grid: (tiles of 128 outputs, tiles of 64 tokens, heads). Block: 4 warps, a warp 32 outputs x 64 tokens; no shared memory. Here tokens
 * are on the M side of mma.sync m16n8k16. Column c of fragment n is output 8 * (c / 2) + 2 * n + c % 2 of the warp's 32, so
 * that a thread holds eight neighbouring outputs of a token and moves them 16 bytes at a time. Each accumulator is loaded,
 * takes the k-blocks of its own slot's B in rising order, and is rounded; a token of another slot keeps it by a select. */
#include "bi_linear_parts.cuh"

enum { ADD_WARPS = 4, ADD_OUTS = 32, ADD_M = 4, ADD_N = 4, ADD_TOKENS = ADD_M * 16 };

typedef struct add_base {
    const float *base; /* may be job.y */
    int64_t ld, head_ld;
    int wide; /* 16-byte accesses are aligned */
} add_base;

/* This warp's place. Lane l: tokens token + 16 m + l / 4 (+ 8), outputs out + 8 * (l % 4) .. + 7. */
typedef struct add_place {
    int32_t head, token, out, lane, q;
} add_place;

static __device__ __forceinline__ int32_t token_of(const add_place &place, int m, int half) {
    return place.token + m * 16 + (place.lane >> 2) + half * 8;
}

static __device__ __forceinline__ int32_t slot_of(const dense_job &job, int32_t token) {
    return token < job.n_row ? job.row_slot[token] : -1;
}

static __device__ __forceinline__ uint32_t pair_of(const bi_bf16 *p) {
    return *(const uint32_t *)p;
}

/* v[2 n + e] = element e of fragment n, in one token. */
static __device__ __forceinline__ void load_token(const dense_job &job, const add_base &from, const add_place &place, int32_t token,
                                                  float v[8]) {
    const int32_t out = place.out + place.q * 8;
    const float *at = from.base + token * from.ld + place.head * from.head_ld + out;
    if (from.wide && token < job.n_row && out + 8 <= job.n_out) {
        const float4 low = *(const float4 *)at, high = *(const float4 *)(at + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = token < job.n_row && out + i < job.n_out ? at[i] : 0.0f;
}

static __device__ __forceinline__ void store_token(const dense_job &job, const add_base &from, const add_place &place, int32_t token,
                                                   const float v[8]) {
    const int32_t out = place.out + place.q * 8;
    if (token >= job.n_row)
        return;
    const int64_t at = token * job.y_ld + place.head * job.y_head_ld + out;
    const bool whole = from.wide && out + 8 <= job.n_out;
    float *y = (float *)job.y + at;
    bi_bf16 *low = (bi_bf16 *)job.y + at;
    if (whole && job.y_f32) {
        *(float4 *)y = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)(y + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else if (whole) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair[i] = bi_round(v[2 * i]) | (uint32_t)bi_round(v[2 * i + 1]) << 16;
        *(uint4 *)low = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (out + i >= job.n_out)
            break;
        if (!whole && job.y_f32)
            y[i] = v[i];
        else if (!whole)
            low[i] = bi_round(v[i]);
        if (job.check)
            bi_cuda_fault(job.fault, token, v[i]);
    }
}

/* Fragment n of B's block k: column lane / 4. */
static __device__ __forceinline__ void take_b(uint32_t f[ADD_N][2], const dense_job &job, const dense_slot &slot, const add_place &place,
                                              int32_t k) {
    const int column = place.lane >> 2;
#pragma unroll
    for (int n = 0; n < ADD_N; n++) {
        const int32_t out = place.out + 8 * (column >> 1) + 2 * n + (column & 1);
        const bi_bf16 *b = slot.b + slot.b_stride * place.head + (int64_t)out * slot.b_ld + k + 2 * place.q;
        f[n][0] = out < job.n_out ? pair_of(b) : 0;
        f[n][1] = out < job.n_out ? pair_of(b + 8) : 0;
    }
}

static __device__ __forceinline__ void continue_slot(const dense_job &job, const dense_slot &slot, const add_place &place,
                                                     float (&acc)[ADD_M][2][8]) {
    int mine = 0; /* bits 2 m + half */
#pragma unroll
    for (int i = 0; i < 2 * ADD_M; i++)
        mine |= (slot_of(job, token_of(place, i >> 1, i & 1)) == slot.slot) << i;
    if (!__any_sync(0xffffffffu, mine))
        return;
    for (int32_t k = 0; k < slot.b_ld; k += BI_MMA_K) {
        uint32_t b[ADD_N][2];
        take_b(b, job, slot, place, k);
#pragma unroll
        for (int m = 0; m < ADD_M; m++) {
            if (!__any_sync(0xffffffffu, mine >> (2 * m) & 3))
                continue;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bi_bf16 *t = job.t + place.head * job.t_head_ld + (int64_t)token_of(place, m, i & 1) * job.t_ld;
                a[i] = mine >> (2 * m + (i & 1)) & 1 ? pair_of(t + k + 2 * place.q + (i >> 1) * 8) : 0;
            }
#pragma unroll
            for (int n = 0; n < ADD_N; n++) {
                float next[4] = {acc[m][0][2 * n], acc[m][0][2 * n + 1], acc[m][1][2 * n], acc[m][1][2 * n + 1]};
                bi_cuda_mma16(next, a, b[n]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float &kept = acc[m][e >> 1][2 * n + (e & 1)];
                    kept = mine >> (2 * m + (e >> 1)) & 1 ? next[e] : kept;
                }
            }
        }
    }
}

static __global__ void __launch_bounds__(ADD_WARPS * 32, 3) lora_add_kernel(const __grid_constant__ dense_job job, const add_base from) {
    add_place place;
    place.lane = (int32_t)threadIdx.x & 31;
    place.q = place.lane & 3;
    place.head = (int32_t)blockIdx.z;
    place.token = (int32_t)blockIdx.y * ADD_TOKENS;
    place.out = ((int32_t)blockIdx.x * ADD_WARPS + ((int32_t)threadIdx.x >> 5)) * ADD_OUTS;
    if (place.out >= job.n_out)
        return;
    float acc[ADD_M][2][8];
#pragma unroll
    for (int i = 0; i < 2 * ADD_M; i++)
        load_token(job, from, place, token_of(place, i >> 1, i & 1), acc[i >> 1][i & 1]);
    for (int32_t i = 0; i < job.n_slot; i++)
        continue_slot(job, job.slot[i], place, acc);
#pragma unroll
    for (int i = 0; i < 2 * ADD_M; i++)
        store_token(job, from, place, token_of(place, i >> 1, i & 1), acc[i >> 1][i & 1]);
}

br_status bi_dense_lora_add(bi_ctx *ctx, const dense_job *job, const float *base, int64_t base_ld, int64_t base_head_ld) {
    const int64_t step = job->y_f32 ? 4 : 8;
    add_base from = {base, base_ld, base_head_ld, 0};
    from.wide = (uintptr_t)base % 16 == 0 && (uintptr_t)job->y % 16 == 0 && base_ld % 4 == 0 && base_head_ld % 4 == 0 &&
                job->y_ld % step == 0 && job->y_head_ld % step == 0;
    const dim3 grid((unsigned)bi_ceil_div(job->n_out, ADD_OUTS * ADD_WARPS), (unsigned)bi_ceil_div(job->n_row, ADD_TOKENS),
                    (unsigned)job->n_head);
    lora_add_kernel<<<grid, ADD_WARPS * 32, 0, ctx->stream>>>(*job, from);
    return bi_cuda_launched(ctx, BI_K_lora_add, "linear");
}
