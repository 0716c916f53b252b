/* bi_linear_out: from accumulators to y, where tokens are on the M side of wgmma.      Contract: N-LIN, N-LORA, P-5
 *
 * A warp has 16 tokens and 8 NT outputs: element e of fragment n is token lane / 4 (+ 8 where e >= 2), output 8 n + 2 (lane % 4)
 * + e % 2. What adapters add runs on mma.sync m16n8k16, whose accumulators lie the same way. */
#ifndef BI_LINEAR_OUT_CUH
#define BI_LINEAR_OUT_CUH

#include "bi_linear_parts.cuh"

/* Marks the row where the value is not finite, unless it is marked; of the maps of one launch, whose codes begin at `lowest`, the
 * lowest code stays. */
template <class JOB> static __device__ __forceinline__ void dense_fault(const JOB &job, int32_t row, float value) {
    if (!job.fault.row || bi_is_finite(value))
        return;
    uint32_t seen = atomicCAS(&job.fault.row[row], 0u, job.fault.code);
    while (job.lowest && seen >= (uint32_t)job.lowest && seen > job.fault.code) {
        const uint32_t before = seen;
        seen = atomicCAS(&job.fault.row[row], before, job.fault.code);
        if (seen == before)
            return;
    }
}

/* This warp's first token and output. */
typedef struct dense_place {
    int32_t head, token, out;
} dense_place;

template <class JOB> static __device__ __forceinline__ int32_t dense_slot_of(const JOB &job, int32_t token) {
    return token < job.n_row ? job.row_slot[token] : -1;
}

static __device__ __forceinline__ uint32_t dense_pair(const bi_bf16 *p) {
    return __ldcg((const unsigned int *)p);
}

/* Two accumulators as bf16, the first in the low half; NaN becomes 0x7fff, as bi_round has it. */
static __device__ __forceinline__ uint32_t dense_round2(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

/* Continues the chains of this warp's tokens that have the slot through its B; the others' keep theirs by a select, not by a zero T:
 * B may hold Inf. t: all of T. Fragments of B come four at a time, so that their loads are under way together. */
template <int NT, class JOB>
static __device__ __forceinline__ void dense_continue(const JOB &job, const dense_place &place, const dense_slot &slot, const bi_bf16 *all_t,
                                                      float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    const int32_t token = place.token + (lane >> 2);
    const bool mine[2] = {dense_slot_of(job, token) == slot.slot, dense_slot_of(job, token + 8) == slot.slot};
    if (!__any_sync(0xffffffffu, mine[0] || mine[1]))
        return;
    const bi_bf16 *b = slot.b + slot.b_stride * place.head, *t = all_t + place.head * job.t_head_ld + (int64_t)token * job.t_ld + 2 * q;
    for (int32_t k = 0; k < slot.b_ld; k += BI_MMA_K) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = mine[i & 1] ? dense_pair(t + (i & 1) * 8 * (int64_t)job.t_ld + k + (i >> 1) * 8) : 0;
#pragma unroll
        for (int first = 0; first < NT; first += 4) {
            uint32_t w[4][2];
#pragma unroll
            for (int i = 0; i < 4 && first + i < NT; i++) {
                const int32_t out = place.out + (first + i) * 8 + (lane >> 2);
                const bi_bf16 *at = b + (int64_t)out * slot.b_ld + k + 2 * q;
                w[i][0] = out < job.n_out ? dense_pair(at) : 0;
                w[i][1] = out < job.n_out ? dense_pair(at + 8) : 0;
            }
#pragma unroll
            for (int i = 0; i < 4 && first + i < NT; i++) {
                float(&kept)[4] = acc[first + i];
                float next[4] = {kept[0], kept[1], kept[2], kept[3]};
                bi_cuda_mma16(next, x, w[i]);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    kept[e] = mine[e >> 1] ? next[e] : kept[e];
            }
        }
    }
}

/* Four neighbouring words of four lanes, turned: lane q of each four gets word q of all. */
static __device__ __forceinline__ uint4 dense_turn4(const uint32_t w[4], int q) {
    const bool odd = q & 1, high = q & 2;
    const uint32_t got0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[1], 1), got1 = __shfl_xor_sync(0xffffffffu, odd ? w[2] : w[3], 1);
    const uint32_t r0 = odd ? got0 : w[0], r1 = odd ? w[1] : got0, r2 = odd ? got1 : w[2], r3 = odd ? w[3] : got1;
    const uint32_t far0 = __shfl_xor_sync(0xffffffffu, high ? r0 : r2, 2), far1 = __shfl_xor_sync(0xffffffffu, high ? r1 : r3, 2);
    return high ? make_uint4(far0, far1, r2, r3) : make_uint4(r0, r1, far0, far1);
}

/* Outputs out and out + 1 of a token. */
template <class JOB> static __device__ __forceinline__ void dense_store_pair(const JOB &job, int64_t at, int32_t out, float v0, float v1, int wide) {
    if (wide && out + 1 < job.n_out) {
        if (job.y_f32)
            *(float2 *)((float *)job.y + at) = make_float2(v0, v1);
        else
            *(uint32_t *)((bi_bf16 *)job.y + at) = dense_round2(v0, v1);
        return;
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
        if (out + e < job.n_out) {
            if (job.y_f32)
                ((float *)job.y)[at + e] = e ? v1 : v0;
            else
                ((bi_bf16 *)job.y)[at + e] = bi_round(e ? v1 : v0);
        }
}

template <int NT, class JOB>
static __device__ __forceinline__ void dense_store(const JOB &job, const dense_place &place, int wide, const float (&acc)[NT][4]) {
    const int lane = (int)threadIdx.x & 31, q = lane & 3;
    const bool fours = wide && !job.y_f32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t token = place.token + (lane >> 2) + half * 8;
        const int64_t row = token * job.y_ld + place.head * job.y_head_ld;
#pragma unroll
        for (int n = 0; n + 4 <= NT; n += 4) {
            uint32_t word[4];
            if (!fours || place.out + n * 8 + 32 > job.n_out)
                continue;
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = dense_round2(acc[n + i][half * 2], acc[n + i][half * 2 + 1]);
            const uint4 eight = dense_turn4(word, q);
            if (token < job.n_row)
                *(uint4 *)((bi_bf16 *)job.y + row + place.out + (n + q) * 8) = eight;
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int32_t out = place.out + n * 8 + q * 2;
            const float v0 = acc[n][half * 2], v1 = acc[n][half * 2 + 1];
            if (token >= job.n_row || out >= job.n_out)
                continue;
            if (!(fours && n / 4 * 4 + 4 <= NT && place.out + n / 4 * 32 + 32 <= job.n_out))
                dense_store_pair(job, row + out, out, v0, v1, wide);
            if (job.check) {
                dense_fault(job, token, v0);
                if (out + 1 < job.n_out)
                    dense_fault(job, token, v1);
            }
        }
    }
}

/* Whether y may be written 16 bytes at a time. */
static inline int dense_is_wide(const dense_job *job) {
    const int64_t step = job->y_f32 ? 4 : 8;
    return (uintptr_t)job->y % 16 == 0 && job->y_ld % step == 0 && (job->n_head == 1 || job->y_head_ld % step == 0);
}

/* What every map of a launch takes over from its job. */
template <class MAP> static inline void dense_fill_map(MAP *map, const dense_job *job, int32_t first_slot) {
    map->y = job->y;
    map->y_ld = job->y_ld;
    map->y_head_ld = job->y_head_ld;
    map->fault = job->fault;
    map->row_slot = job->row_slot;
    map->t = job->t;
    map->t_head_ld = job->t_head_ld;
    map->n_row = job->n_row;
    map->n_in = job->n_in;
    map->n_out = job->n_out;
    map->t_ld = job->t_ld;
    map->y_f32 = job->y_f32;
    map->check = job->check;
    map->lowest = job->lowest;
    map->wide = dense_is_wide(job);
    map->n_slot = job->n_slot;
    map->first_slot = first_slot;
}

#endif
