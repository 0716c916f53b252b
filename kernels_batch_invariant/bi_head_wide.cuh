/* bi_head_wide: the parts of sub-blocks straight from the accumulators of the head's product.      Contract: N-HEAD, N-SUM
 *
 * An epilogue of bi_linear_wide.cuh for whole sub-blocks; internal to bi_head.cu. A warp holds 16 tokens x 2 sub-blocks; of a token and
 * sub-block a lane has entries 8 n + 2 q + e, q = lane % 4: the folds of SUM128 over 64, 32, 16 and 8 are adds inside the lane,
 * those over 4 and 2 meet lanes q ^ 2 and q ^ 1, the last is inside again. Where all rows of the warp are taken at T = 1 and no
 * logit is huge or not a number, all is done from the accumulators' own registers, with the short exp where none is far from its
 * sub-block's maximum; else the four pairs of token row and sub-block take turns at the same registers. */
#ifndef BI_HEAD_WIDE_CUH
#define BI_HEAD_WIDE_CUH

enum { HEAD_N = BI_HEAD_BLOCK / 8, HEAD_OUTS = 2 * BI_HEAD_BLOCK };

#define HEAD_PLAIN_MAX 0x1p40f /* numbers up to this size are neither cut nor make another one infinite */

/* The folds over 4 and 2 entries and the last, of what is left of 128 in four lanes. */
static __device__ __forceinline__ float fold_lanes(float low, float high) {
    low = BI_ADD(low, __shfl_xor_sync(0xffffffffu, low, 2));
    high = BI_ADD(high, __shfl_xor_sync(0xffffffffu, high, 2));
    low = BI_ADD(low, __shfl_xor_sync(0xffffffffu, low, 1));
    high = BI_ADD(high, __shfl_xor_sync(0xffffffffu, high, 1));
    return BI_ADD(low, high);
}

/* SUM128 of the sums over 64 entries; v is used up. */
static __device__ __forceinline__ float fold_half(float (&v)[HEAD_N / 2][2]) {
#pragma unroll
    for (int half = HEAD_N / 4; half > 0; half /= 2)
#pragma unroll
        for (int n = 0; n < half; n++) {
            v[n][0] = BI_ADD(v[n][0], v[n + half][0]);
            v[n][1] = BI_ADD(v[n][1], v[n + half][1]);
        }
    return fold_lanes(v[0][0], v[0][1]);
}

/* Of two numbers; NaN where one is. Zeros of both signs may change places. */
static __device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
static __device__ __forceinline__ float min_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

/* Turn 2 s + h: sub-block s of the tile, tokens of half h. */
#define HEAD_AT(acc, turn, n, e) acc[((turn) >> 1) * HEAD_N + (n)][((turn) & 1) * 2 + (e)]

/* Maximum of a turn's entries in four lanes; whether all are plain, and near it. */
template <int TURN> static __device__ __forceinline__ float turn_max(const float (&acc)[2 * HEAD_N][4], bool &plain, bool &near) {
    float max = HEAD_AT(acc, TURN, 0, 0), min = max;
#pragma unroll
    for (int i = 1; i < 2 * HEAD_N; i++) {
        max = max_nan(max, HEAD_AT(acc, TURN, i >> 1, i & 1));
        min = min_nan(min, HEAD_AT(acc, TURN, i >> 1, i & 1));
    }
#pragma unroll
    for (int h = 1; h < 4; h *= 2) {
        max = max_nan(max, __shfl_xor_sync(0xffffffffu, max, h));
        min = min_nan(min, __shfl_xor_sync(0xffffffffu, min, h));
    }
    plain = plain && max <= HEAD_PLAIN_MAX && min >= -HEAD_PLAIN_MAX;
    near = near && BI_SUB(min, max) >= HEAD_NEAR;
    return BI_ADD(max, 0.0f);
}

/* l_b of a turn of plain entries at T = 1. */
template <int TURN, bool NEAR> static __device__ __forceinline__ float turn_sum(const float (&acc)[2 * HEAD_N][4], float max) {
    float v[HEAD_N / 2][2];
#pragma unroll
    for (int n = 0; n < HEAD_N / 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float z0 = BI_SUB(HEAD_AT(acc, TURN, n, e), max), z1 = BI_SUB(HEAD_AT(acc, TURN, n + HEAD_N / 2, e), max);
            v[n][e] = NEAR ? BI_ADD(exp_near(z0), exp_near(z1)) : BI_ADD(bi_exp(z0), bi_exp(z1));
        }
    return fold_half(v);
}

/* How z is made: any numbers, or plain ones. */
template <bool PLAIN> static __device__ __forceinline__ float wide_z(float x, float temperature, float reciprocal) {
    return PLAIN ? z_plain(x, temperature, reciprocal) : z_of(x, temperature);
}

/* m_b and l_b of one sub-block at a temperature. False, and no part, where an entry of plain ones is far from the maximum. */
template <bool PLAIN> static __device__ __forceinline__ bool wide_part(float2 &made, const float (&x)[HEAD_N][2], float temperature) {
    float v[HEAD_N / 2][2], max = -BI_HEAD_Z_MAX;
    const float reciprocal = BI_DIV(1.0f, temperature);
    bool near = true;
#pragma unroll
    for (int i = 0; i < 2 * HEAD_N; i++)
        max = larger(max, wide_z<PLAIN>(x[i >> 1][i & 1], temperature, reciprocal));
    max = larger(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = larger(max, __shfl_xor_sync(0xffffffffu, max, 2));
#pragma unroll
    for (int n = 0; n < HEAD_N / 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float z0 = BI_SUB(wide_z<PLAIN>(x[n][e], temperature, reciprocal), max);
            const float z1 = BI_SUB(wide_z<PLAIN>(x[n + HEAD_N / 2][e], temperature, reciprocal), max);
            near = near && z0 >= HEAD_NEAR && z1 >= HEAD_NEAR;
            v[n][e] = PLAIN ? BI_ADD(exp_near(z0), exp_near(z1)) : BI_ADD(bi_exp(z0), bi_exp(z1));
        }
    if (PLAIN && !__all_sync(0xffffffffu, near))
        return false;
    made = make_float2(max, fold_half(v));
    return true;
}

/* Read anew wherever it is asked for: no register is left to keep it. */
static __device__ __forceinline__ int32_t lane_of() {
    int32_t lane;
    asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
    return lane;
}

typedef struct head_wide {
    static constexpr bool ADAPTERS = false;
    bi_score_args a;
    head_work work;

    __device__ __forceinline__ float temperature_of(int32_t t) const {
        return t < a.n_row ? score_temperature(a, t) : 1.0f;
    }

    /* The given token's logit of row t, where it is in sub-block s; token: counted from the tile's first. */
    template <int TURN> __device__ __forceinline__ void keep_logit(const float (&acc)[2 * HEAD_N][4], int32_t t, int32_t token) const {
        const bool mine = token >> 7 == TURN >> 1 && (token >> 1 & 3) == ((int)threadIdx.x & 3);
        if (!__any_sync(0xffffffffu, mine))
            return;
        const int32_t wanted = (token >> 3 & 15) * 2 + (token & 1);
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * HEAD_N; i++)
            logit = wanted == i ? HEAD_AT(acc, TURN, i >> 1, i & 1) : logit;
        if (mine)
            work.logit[t] = logit;
    }

    template <int TURN, bool NEAR>
    __device__ __forceinline__ void finish(const float (&acc)[2 * HEAD_N][4], int32_t t, int32_t out, float max) const {
        const float sum = turn_sum<TURN, NEAR>(acc, max);
        const int32_t row = t + (TURN & 1) * 8;
        if (row < a.n_row && (threadIdx.x & 3) == 0)
            work.scaled[(int64_t)row * work.n_block + out / BI_HEAD_BLOCK + (TURN >> 1)] = make_float4(max, sum, 0.0f, 0.0f);
    }

    template <bool NEAR>
    __device__ __forceinline__ void finish_all(const float (&acc)[2 * HEAD_N][4], int32_t t, int32_t out, const float max[4]) const {
        finish<0, NEAR>(acc, t, out, max[0]);
        finish<1, NEAR>(acc, t, out, max[1]);
        finish<2, NEAR>(acc, t, out, max[2]);
        finish<3, NEAR>(acc, t, out, max[3]);
    }

    /* All turns at T = 1; false, and nothing done but logits kept, where that is not allowed. */
    __device__ __forceinline__ bool all_at_one(const float (&acc)[2 * HEAD_N][4], int32_t t, int32_t out) const {
        const int32_t low = t < a.n_row ? a.token[t] - out : -1, high = t + 8 < a.n_row ? a.token[t + 8] - out : -1;
        bool plain = temperature_of(t) == 1.0f && temperature_of(t + 8) == 1.0f, near = true;
        float max[4];
        max[0] = turn_max<0>(acc, plain, near);
        max[1] = turn_max<1>(acc, plain, near);
        max[2] = turn_max<2>(acc, plain, near);
        max[3] = turn_max<3>(acc, plain, near);
        keep_logit<0>(acc, t, low);
        keep_logit<1>(acc, t + 8, high);
        keep_logit<2>(acc, t, low);
        keep_logit<3>(acc, t + 8, high);
        if (!__all_sync(0xffffffffu, plain))
            return false;
        near = __all_sync(0xffffffffu, near);
        if (near)
            finish_all<true>(acc, t, out, max);
        else
            finish_all<false>(acc, t, out, max);
        return true;
    }

    /* Row t and the sub-block whose first logit is `first`, of four lanes, whatever the numbers are. */
    __device__ __forceinline__ void part(int32_t t, int32_t first, const float (&x)[HEAD_N][2]) const {
        const float temperature = temperature_of(t);
        bool plain = temperature >= 0x1p-10f && temperature <= 0x1p10f, bad = false;
#pragma unroll
        for (int i = 0; i < 2 * HEAD_N; i++) {
            plain &= is_plain(x[i >> 1][i & 1]);
            bad |= !bi_is_finite(x[i >> 1][i & 1]);
        }
        plain = __all_sync(0xffffffffu, plain || t >= a.n_row);
        bad = (__ballot_sync(0xffffffffu, bad) >> (threadIdx.x & 28) & 15) != 0;
        const int64_t at = (int64_t)t * work.n_block + first / BI_HEAD_BLOCK;
        const int scaled = __any_sync(0xffffffffu, temperature != 1.0f);
#pragma unroll 1
        for (int pass = 0; pass <= scaled; pass++) {
            float2 made;
            if (!plain || !wide_part<true>(made, x, pass ? 1.0f : temperature))
                wide_part<false>(made, x, pass ? 1.0f : temperature);
            made.y = bad ? bi_f32_of(BI_F32_NAN) : made.y; /* no later step of the merge loses it */
            if (t < a.n_row && (threadIdx.x & 3) == 0 && !pass)
                work.scaled[at] = make_float4(made.x, made.y, 0.0f, 0.0f);
            if (t < a.n_row && (threadIdx.x & 3) == 0 && pass)
                work.raw[at] = made;
        }
    }

    template <int NT> __device__ __forceinline__ void operator()(const wide_map &, const wide_tile &tile, int32_t token, float (&acc)[NT][4]) const {
        const int32_t t = token + lane_of() / 4;
        if (tile.out >= a.n_vocab) /* of a pair's second block */
            return;
        if (all_at_one(acc, t, tile.out))
            return;
#pragma unroll 1
        for (int turn = 0; turn < 4; turn++) {
            float x[HEAD_N][2];
#pragma unroll
            for (int n = 0; n < HEAD_N; n++) {
                x[n][0] = acc[n][0], x[n][1] = acc[n][1];
                acc[n][0] = acc[n][2], acc[n][1] = acc[n][3];
                acc[n][2] = acc[n + HEAD_N][0], acc[n][3] = acc[n + HEAD_N][1];
                acc[n + HEAD_N][0] = acc[n + HEAD_N][2], acc[n + HEAD_N][1] = acc[n + HEAD_N][3];
            }
            part(t + (turn & 1) * 8, tile.out + (turn >> 1) * BI_HEAD_BLOCK, x);
        }
    }
} head_wide;

#endif
