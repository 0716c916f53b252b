/* bi_score on CUDA.      Contract: N-HEAD, N-CHAIN, N-SUM
 *
 * Rows in parts of up to 2,048. More than 64 rows, a vocabulary of whole tiles of 256 and no entropies: no logit is ever stored, see
 * bi_head_wide.cuh. Else the vocabulary in parts whose f32 logits (32 MiB at most) are still in the second-level cache when they
 * are reduced; no more of them exists. head: grid (32 sub-blocks, rows), a warp four sub-blocks of 128 logits, lane l
 * holding entries l, l + 32, l + 64, l + 96 of each: the folds of SUM128 are two adds inside the lane, then halves of the warp. It
 * leaves m_b, l_b, d_b at the row's temperature, m_b and l_b at T = 1 where that is another, and the token's logit.
 * head_merge: a block a row. M and the factors exp(m_b - M) are made by all threads; the chains of L and D over b in rising order
 * are one thread's each, 12 KiB of shared memory a part of 1,024 sub-blocks. */
#include "bi_linear_wide.cuh"

enum {
    HEAD_ROWS = 2048,               /* rows of a part */
    HEAD_LOGIT_BYTES = 32 << 20,    /* of a part of the vocabulary */
    HEAD_WARPS = 8,
    HEAD_GROUP = 4,                 /* sub-blocks of a warp */
    HEAD_COLUMNS = HEAD_GROUP * BI_HEAD_BLOCK,
    MERGE_THREADS = 256,
    MERGE_BLOCKS = 1024             /* sub-blocks a round */
};

/* Scratch of a part of n_row rows; all of it is written before it is read. */
typedef struct head_work {
    float *z;       /* (n_row, z_ld) logits */
    float4 *scaled; /* (n_row, n_block) m_b, l_b, d_b */
    float2 *raw;    /* (n_row, n_block) m_b, l_b at T = 1 */
    float *logit;   /* (n_row) of the token */
    int64_t z_ld;
    int32_t n_block;
} head_work;

static head_work carve(bi_carver *carver, int32_t n_row, int32_t n_vocab) {
    head_work work;
    const int64_t n_block = bi_ceil_div(n_vocab, BI_HEAD_BLOCK), fit = HEAD_LOGIT_BYTES / (int64_t)sizeof(float) / n_row / BI_HEAD_BLOCK;
    work.n_block = (int32_t)n_block;
    work.z_ld = (fit < 1 ? 1 : fit < n_block ? fit : n_block) * BI_HEAD_BLOCK;
    work.z = (float *)bi_carve(carver, sizeof(float) * (size_t)(n_row * work.z_ld));
    work.scaled = (float4 *)bi_carve(carver, sizeof(float4) * (size_t)(n_row * n_block));
    work.raw = (float2 *)bi_carve(carver, sizeof(float2) * (size_t)(n_row * n_block));
    work.logit = (float *)bi_carve(carver, sizeof(float) * (size_t)n_row);
    return work;
}

static int32_t part_rows(const bi_limits *limits) {
    return limits->n_row < 1 ? 1 : limits->n_row < HEAD_ROWS ? limits->n_row : HEAD_ROWS;
}

/* Fewer rows may take more logits, up to HEAD_LOGIT_BYTES. */
size_t bi_cuda_head_scratch(const bi_limits *limits) {
    if (limits->n_vocab < 1)
        return 0;
    bi_carver carver = {NULL, 0, 0};
    carve(&carver, part_rows(limits), limits->n_vocab);
    return carver.used + HEAD_LOGIT_BYTES;
}

static __device__ __forceinline__ float score_temperature(const bi_score_args &a, int32_t t) {
    const float temperature = a.temperature[t];
    return temperature == 0.0f ? 1.0f : temperature;
}

/* z of a logit: RN(x/T), within +-BI_HEAD_Z_MAX, -0 made +0. */
static __device__ __forceinline__ float z_of(float x, float temperature) {
    float z = temperature == 1.0f ? x : BI_DIV(x, temperature);
    z = z > BI_HEAD_Z_MAX ? BI_HEAD_Z_MAX : z;
    z = z < -BI_HEAD_Z_MAX ? -BI_HEAD_Z_MAX : z;
    return BI_ADD(z, 0.0f);
}

#define HEAD_NEAR -86.0f /* above it exp is a normal number */

static __device__ __forceinline__ float larger(float a, float b) {
    return b > a ? b : a;
}

static __device__ __forceinline__ float fold_step(float a, float b, int want_max) {
    return want_max ? larger(a, b) : BI_ADD(a, b);
}

/* v[b] of the lanes folded over h = 16 .. 1 for four sub-blocks at once: lanes 8 b .. 8 b + 7 get that of sub-block b. A half
 * of the warp gives away what the other half goes on with, so the pairs are those of SUM128; their two orders give one bit pattern. */
static __device__ __forceinline__ float fold4(const float v[HEAD_GROUP], int lane, int want_max) {
    const bool high = lane & 16, odd = lane & 8;
    const float from0 = __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 16), from1 = __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 16);
    const float even_sum = fold_step(high ? v[2] : v[0], from0, want_max), odd_sum = fold_step(high ? v[3] : v[1], from1, want_max);
    float p = fold_step(odd ? odd_sum : even_sum, __shfl_xor_sync(0xffffffffu, odd ? even_sum : odd_sum, 8), want_max);
#pragma unroll
    for (int h = 4; h > 0; h >>= 1)
        p = fold_step(p, __shfl_xor_sync(0xffffffffu, p, h), want_max);
    return p;
}

/* bi_exp of HEAD_NEAR .. 0 with fewer instructions and the same bits: neither the argument nor 2^n needs a clamp, and the product
 * with it is exact. */
static __device__ __forceinline__ float exp_near(float x) {
    const float shifted = BI_FMA(x, BI_FN_LOG2E, BI_FN_ROUND_MAGIC), fn = BI_SUB(shifted, BI_FN_ROUND_MAGIC);
    const float exact = BI_FMA(fn, -BI_FN_LN2_HI, x), r = BI_FMA(fn, -BI_FN_LN2_LO, exact);
    const float r_low = BI_FMA(fn, -BI_FN_LN2_LO, BI_SUB(exact, r));
    float q = BI_FMA(BI_FN_E4, r, BI_FN_E3);
    q = BI_FMA(q, r, BI_FN_E2);
    q = BI_FMA(q, r, BI_FN_E1);
    q = BI_FMA(q, r, BI_FN_E0);
    const float p = BI_ADD(1.0f, BI_ADD(r, BI_FMA(BI_MUL(r, r), q, r_low)));
    return bi_f32_of(bi_u32_of(p) + (bi_u32_of(shifted) << 23)); /* the magic's own bits leave at the top */
}

/* z of logits whose size is between 2^-40 and 2^40, at a temperature between 2^-10 and 2^10 whose reciprocal is given: two steps
 * of division, the second of which rounds a / b as an exact quotient is; nothing is cut or zero. */
static __device__ __forceinline__ float z_plain(float x, float temperature, float reciprocal) {
    const float q = BI_MUL(x, reciprocal), near = BI_FMA(BI_FMA(-q, temperature, x), reciprocal, q);
    return BI_FMA(BI_FMA(-near, temperature, x), reciprocal, near);
}

static __device__ __forceinline__ bool is_plain(float x) {
    return (bi_u32_of(x) << 1) - ((127u - 40) << 24) < 80u << 24;
}

/* Four times four z of one lane: of the entries lane + 32 i of sub-block b; of all of them the first n are present. */
static __device__ __forceinline__ void z_all(float z[HEAD_GROUP][4], const float x[HEAD_GROUP][4], int32_t n, int lane, float temperature,
                                             bool plain) {
    if (plain && temperature == 1.0f) {
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            z[i >> 2][i & 3] = x[i >> 2][i & 3];
    } else if (plain && temperature >= 0x1p-10f && temperature <= 0x1p10f) {
        const float reciprocal = BI_DIV(1.0f, temperature);
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            z[i >> 2][i & 3] = z_plain(x[i >> 2][i & 3], temperature, reciprocal);
    } else {
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            z[i >> 2][i & 3] = (i >> 2) * BI_HEAD_BLOCK + lane + 32 * (i & 3) < n ? z_of(x[i >> 2][i & 3], temperature) : -BI_HEAD_Z_MAX;
    }
}

/* m_b, l_b and d_b of sub-block lane / 8 of four, whose first n logits altogether are present; plain: all are, and is_plain. */
static __device__ __forceinline__ float4 part_of(const float x[HEAD_GROUP][4], int32_t n, int lane, float temperature, bool plain,
                                                 int want_dot) {
    float z[HEAD_GROUP][4], e[HEAD_GROUP][4], v[HEAD_GROUP], d[HEAD_GROUP];
    z_all(z, x, n, lane, temperature, plain);
#pragma unroll
    for (int b = 0; b < HEAD_GROUP; b++)
        v[b] = larger(larger(z[b][0], z[b][1]), larger(z[b][2], z[b][3]));
    const float max = fold4(v, lane, 1);
    bool near = plain;
#pragma unroll
    for (int i = 0; i < HEAD_GROUP * 4; i++) {
        z[i >> 2][i & 3] = BI_SUB(z[i >> 2][i & 3], __shfl_sync(0xffffffffu, max, (i >> 2) * 8));
        near &= z[i >> 2][i & 3] >= HEAD_NEAR;
    }
    if (__all_sync(0xffffffffu, near)) {
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            e[i >> 2][i & 3] = exp_near(z[i >> 2][i & 3]);
    } else {
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            e[i >> 2][i & 3] = (i >> 2) * BI_HEAD_BLOCK + lane + 32 * (i & 3) < n ? bi_exp(z[i >> 2][i & 3]) : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < HEAD_GROUP; b++) {
        v[b] = BI_ADD(BI_ADD(e[b][0], e[b][2]), BI_ADD(e[b][1], e[b][3]));
        if (!want_dot)
            continue;
#pragma unroll
        for (int i = 0; i < 4; i++) /* an absent entry is +0 times a number */
            e[b][i] = BI_ADD(0.0f, BI_MUL(e[b][i], z[b][i]));
        d[b] = BI_ADD(BI_ADD(e[b][0], e[b][2]), BI_ADD(e[b][1], e[b][3]));
    }
    return make_float4(max, fold4(v, lane, 0), want_dot ? fold4(d, lane, 0) : 0.0f, 0.0f);
}

static __global__ void __launch_bounds__(HEAD_WARPS * 32, 3) head_kernel(const bi_score_args a, const head_work work, int32_t first) {
    const int lane = (int)threadIdx.x & 31;
    const int32_t t = (int32_t)blockIdx.y, group = (int32_t)blockIdx.x * HEAD_WARPS + ((int32_t)threadIdx.x >> 5);
    const int32_t column = group * HEAD_COLUMNS;
    const int64_t width = a.n_vocab - first < work.z_ld ? a.n_vocab - first : work.z_ld; /* of this part of the vocabulary */
    if (column >= width)
        return;
    const int32_t n = width - column < HEAD_COLUMNS ? (int32_t)(width - column) : HEAD_COLUMNS;
    const float *logit = work.z + t * work.z_ld + column;
    const float temperature = score_temperature(a, t);
    const int32_t token = a.token[t] - first - column;
    if (lane == 0 && token >= 0 && token < n)
        work.logit[t] = logit[token];
    float x[HEAD_GROUP][4];
    bool plain = n == HEAD_COLUMNS;
#pragma unroll
    for (int i = 0; i < HEAD_GROUP * 4; i++) {
        const int32_t j = (i >> 2) * BI_HEAD_BLOCK + lane + 32 * (i & 3);
        x[i >> 2][i & 3] = j < n ? logit[j] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < HEAD_GROUP * 4; i++)
        plain &= is_plain(x[i >> 2][i & 3]);
    plain = __all_sync(0xffffffffu, plain);
    uint32_t bad = 0; /* bit b: a logit of sub-block b is not finite */
    if (!plain) {
#pragma unroll
        for (int i = 0; i < HEAD_GROUP * 4; i++)
            bad |= (uint32_t)!bi_is_finite(x[i >> 2][i & 3]) << (i >> 2);
        bad = __reduce_or_sync(0xffffffffu, bad);
    }
    const int32_t block = lane >> 3; /* whose part this lane has */
    const int64_t at = (int64_t)t * work.n_block + (first + column) / BI_HEAD_BLOCK + block;
    const bool writes = (lane & 7) == 0 && block * BI_HEAD_BLOCK < n;
    float4 part = part_of(x, n, lane, temperature, plain, a.entropy != NULL);
    part.y = bad >> block & 1 ? bi_f32_of(BI_F32_NAN) : part.y; /* no later step of the merge loses it */
    if (writes)
        work.scaled[at] = part;
    if (temperature == 1.0f)
        return;
    part = part_of(x, n, lane, 1.0f, plain, 0);
    if (writes)
        work.raw[at] = make_float2(part.x, part.y);
}

#include "bi_head_wide.cuh"

/* The largest of all threads' values, to all. */
static __device__ float block_max(float max, float *shared) {
    shared[threadIdx.x] = max;
    __syncthreads();
    for (int h = MERGE_THREADS / 2; h > 0; h >>= 1) {
        if ((int)threadIdx.x < h)
            shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + h]);
        __syncthreads();
    }
    max = shared[0];
    __syncthreads();
    return max;
}

typedef struct merged {
    float max, sum, dot; /* M, L, D */
} merged;

/* part (n_block) of 4 or 2 floats each, m_b and l_b first. */
template <int FLOATS>
static __device__ merged merge(const float *part, int32_t n_block, float shared[3][MERGE_BLOCKS]) {
    merged row = {part[0], 0.0f, 0.0f};
    for (int32_t b = (int32_t)threadIdx.x; b < n_block; b += MERGE_THREADS)
        row.max = larger(row.max, part[(int64_t)b * FLOATS]);
    row.max = block_max(row.max, shared[0]);
    float chain = 0.0f; /* thread 0: L; thread 32: D */
    for (int32_t first = 0; first < n_block; first += MERGE_BLOCKS) {
        const int32_t n = n_block - first < MERGE_BLOCKS ? n_block - first : MERGE_BLOCKS;
        for (int32_t b = (int32_t)threadIdx.x; b < n; b += MERGE_THREADS) {
            const float *p = part + (int64_t)(first + b) * FLOATS;
            const float shift = BI_SUB(p[0], row.max);
            shared[0][b] = bi_exp(shift);
            shared[1][b] = p[1];
            if (FLOATS == 4)
                shared[2][b] = BI_FMA(p[1], shift, p[2]);
        }
        __syncthreads();
        if (threadIdx.x == 0 || (FLOATS == 4 && threadIdx.x == 32)) {
            const float *term = shared[threadIdx.x ? 2 : 1];
#pragma unroll 8
            for (int32_t b = 0; b < n; b++)
                chain = BI_FMA(term[b], shared[0][b], chain);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        shared[0][0] = chain;
    if (threadIdx.x == 32)
        shared[0][1] = chain;
    __syncthreads();
    row.sum = shared[0][0];
    row.dot = shared[0][1];
    __syncthreads();
    return row;
}

static __device__ __forceinline__ float logprob_of(const merged &row, float z) {
    return BI_SUB(BI_SUB(z, row.max), bi_log(row.sum));
}

static __global__ void __launch_bounds__(MERGE_THREADS, 4) head_merge_kernel(const bi_score_args a, const head_work work) {
    __shared__ float shared[3][MERGE_BLOCKS];
    const int32_t t = (int32_t)blockIdx.x;
    const float temperature = score_temperature(a, t);
    const merged scaled = merge<4>((const float *)(work.scaled + (int64_t)t * work.n_block), work.n_block, shared);
    merged raw = scaled;
    if (temperature != 1.0f)
        raw = merge<2>((const float *)(work.raw + (int64_t)t * work.n_block), work.n_block, shared);
    if (threadIdx.x)
        return;
    const float log_sum = bi_log(scaled.sum);
    const int finite = bi_is_finite(log_sum);
    const float x = finite && a.token[t] >= 0 && a.token[t] < a.n_vocab ? work.logit[t] : 0.0f;
    bi_cuda_fault(a.fault, t, log_sum);
    a.logprob[t] = finite ? logprob_of(scaled, z_of(x, temperature)) : 0.0f;
    a.logprob_raw[t] = finite ? logprob_of(raw, z_of(x, 1.0f)) : 0.0f;
    if (a.entropy)
        a.entropy[t] = finite ? BI_SUB(log_sum, BI_DIV(scaled.dot, scaled.sum)) : 0.0f;
}

static br_status check_args(const bi_ctx *ctx, const bi_score_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->d > ctx->limits.d_model || a->n_vocab < 1 || a->n_vocab > ctx->limits.n_vocab)
        return br_fail(BR_E_SHAPE, "score: %d rows of %d, %d tokens: expected n_row >= 0, 1 to %d, 1 to %d", a->n_row, a->d, a->n_vocab,
                       ctx->limits.d_model, ctx->limits.n_vocab);
    if (!a->w.data || a->w.n_out != a->n_vocab || a->w.n_in != a->d)
        return br_fail(BR_E_SHAPE, "score: the head is (%d, %d): expected (%d, %d)", a->w.n_out, a->w.n_in, a->n_vocab, a->d);
    if (a->w.form != BI_FORM_BF16)
        return br_fail(BR_E_UNSUPPORTED, "score: a head in MXFP4: expected bf16");
    return BR_OK;
}

/* Rows row .. row + n - 1 of the op. */
static bi_score_args rows_of(const bi_score_args *a, int32_t row, int32_t n) {
    bi_score_args part = *a;
    part.n_row = n;
    part.x += (int64_t)row * a->d;
    part.token += row;
    part.temperature += row;
    part.logprob += row;
    part.logprob_raw += row;
    part.entropy = a->entropy ? a->entropy + row : NULL;
    part.fault.row = a->fault.row ? a->fault.row + row : NULL;
    return part;
}

typedef wide_args<1, 1> args_head;

br_status bi_dense_head_open(void) {
    return wide_allow<HEAD_OUTS, args_head, head_wide>();
}

/* Many rows, whole tiles of the vocabulary, no entropies: the logits stay in registers. */
static br_status fused_parts(bi_ctx *ctx, const bi_score_args *a, const head_work *work, const dense_job *job, int *done) {
    const dense_state *state = (const dense_state *)ctx->dense;
    const int aligned = a->d % 8 == 0 && (uintptr_t)a->x % DENSE_ALIGN == 0, fits = a->n_row > DENSE_SMALL_ROWS && a->n_vocab % HEAD_OUTS == 0;
    args_head args;
    *done = 0;
    if (a->entropy || !fits || !aligned || !state->encode || !wide_set(state, &args, job, 1, HEAD_OUTS))
        return BR_OK;
    *done = 1;
    wide_launch<HEAD_OUTS>(ctx, args, head_wide{*a, *work}, 0);
    return bi_cuda_launched(ctx, BI_K_head, "score");
}

/* The logits of a part of the vocabulary at a time, in scratch. */
static br_status stored_parts(bi_ctx *ctx, const bi_score_args *a, const head_work &work, dense_job job) {
    job.y = work.z;
    job.y_ld = work.z_ld;
    job.y_f32 = 1;
    for (int64_t first = 0; first < a->n_vocab; first += work.z_ld) {
        job.w = (const bi_bf16 *)a->w.data + first * job.w_ld;
        job.n_out = (int32_t)(a->n_vocab - first < work.z_ld ? a->n_vocab - first : work.z_ld);
        BR_TRY(bi_dense_base(ctx, &job));
        const dim3 grid((unsigned)bi_ceil_div(job.n_out, HEAD_COLUMNS * HEAD_WARPS), (unsigned)a->n_row);
        head_kernel<<<grid, HEAD_WARPS * 32, 0, ctx->stream>>>(*a, work, (int32_t)first);
        BR_TRY(bi_cuda_launched(ctx, BI_K_head, "score"));
    }
    return BR_OK;
}

static br_status score_part(bi_ctx *ctx, const bi_score_args *a) {
    bi_carver carver = bi_cuda_scratch(ctx);
    const head_work work = carve(&carver, a->n_row, a->n_vocab);
    const dense_job job = bi_dense_job(&a->w, a->n_row, 1, a->x, a->d, 0);
    int done = 0;
    BR_TRY(fused_parts(ctx, a, &work, &job, &done));
    if (!done)
        BR_TRY(stored_parts(ctx, a, work, job));
    head_merge_kernel<<<(unsigned)a->n_row, MERGE_THREADS, 0, ctx->stream>>>(*a, work);
    return bi_cuda_launched(ctx, BI_K_head_merge, "score");
}

br_status bi_cuda_score(bi_ctx *ctx, const bi_score_args *a) {
    BR_TRY(check_args(ctx, a));
    const int32_t n_part = part_rows(&ctx->limits);
    for (int32_t row = 0; row < a->n_row; row += n_part) {
        const bi_score_args part = rows_of(a, row, a->n_row - row < n_part ? a->n_row - row : n_part);
        BR_TRY(score_part(ctx, &part));
    }
    return BR_OK;
}
