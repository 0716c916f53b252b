/* bi_latent_store, bi_attn, bi_attn_gate on the GPU.      Contract: N-ATT
 *
 * Attention is two passes over a row's selected latent rows, because every merge weight of N-ATT-4 needs the row's largest score:
 *   attn_lists   a row's selected positions class by class (N-ATT-2); not launched where every visible position is read
 *   attn_score   scores, weights R(e), f, m and l: bi_attn_score_wide.cuh, by (row, classes, heads), where a step fills the GPU with
 *                that; else bi_attn_score.cuh, by (row, class, fewer heads)
 *   attn_value   values and the merge, all classes in order: bi_attn_value_wide.cuh, by (row, half of the columns, heads), where a step
 *                fills the GPU with that; else bi_attn_value.cuh, by (row, fewer columns, fewer heads)
 * Weights pass through scratch, 128 bytes a head and block of 64 entries; accumulators never leave the registers. A step's rows run in
 * launches of as many rows as fit into scratch.
 * latent_store: 16 bytes a thread. attn_gate: four elements a thread. attn_lists: a block of 512 threads a row, a stable partition by
 * ballots. None of them adds floats. */
#include "bi_attn_parts.cuh"
#include "bi_attn_score.cuh"
#include "bi_attn_score_wide.cuh"
#include "bi_attn_value.cuh"
#include "bi_attn_value_wide.cuh"

enum {
    LIST_THREADS = 512,
    LIST_WARPS = LIST_THREADS / 32,
    LIST_EACH = 4, /* entries a thread holds at once */
    LIST_AT_ONCE = LIST_THREADS * LIST_EACH,
    ROW_THREADS = 256,
    N_CARVED = 5 /* arrays of a launch, each on 256 bytes */
};
static const size_t SCRATCH_WANTED = (size_t)384 << 20; /* enough rows a launch to fill the GPU many times over */
static const int SHARED_MAX = 227 << 10;

static int on16(const void *p) {
    return (uintptr_t)p % 16 == 0;
}

static int cache_wide(const bi_cache *cache) {
    return on16(cache->base) && cache->block_bytes % 16 == 0;
}

static br_status check_cache(const char *op, const bi_cache *cache, size_t block_bytes) {
    if (cache->block_bytes < block_bytes)
        return br_fail(BR_E_SHAPE, "%s: a block of %zu bytes: expected at least %zu", op, cache->block_bytes, block_bytes);
    if ((uintptr_t)cache->base % 4 || cache->block_bytes % 4)
        return br_fail(BR_E_ALIGN, "%s: cache at %p, %zu bytes a block: expected multiples of 4", op, (void *)cache->base,
                       cache->block_bytes);
    return BR_OK;
}

size_t bi_cuda_latent_block_bytes(int32_t d_latent) {
    return sizeof(bi_bf16) * BR_PAGE_TOK * (size_t)attn_row_ld(d_latent);
}

/* A thread moves one unit of 8; the cache row's padding becomes zeros. */
static __global__ void __launch_bounds__(ROW_THREADS) latent_store(const bi_latent_store_args a, const bi_batch batch, const int32_t row_ld,
                                                                   const int32_t wide) {
    const int64_t i = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    const int32_t n_unit = row_ld / ATTN_UNIT, t = (int32_t)(i / n_unit), k = (int32_t)(i % n_unit) * ATTN_UNIT;
    if (t >= batch.n_row || batch.row_seg[t] < 0)
        return;
    const bi_seg seg = batch.seg[batch.row_seg[t]];
    const int32_t position = seg.pos + t - seg.row;
    unsigned char *block = (unsigned char *)bi_cuda_cache_block(a.cache, seg.seq, position / BR_PAGE_TOK);
    bi_bf16 *to = (bi_bf16 *)block + (int64_t)(position % BR_PAGE_TOK) * row_ld + k;
    const bi_bf16 *from = a.x + (int64_t)t * a.x_ld + k;
    if (wide) {
        *(uint4 *)to = *(const uint4 *)from;
        return;
    }
    for (int e = 0; e < ATTN_UNIT; e++)
        to[e] = k + e < a.d_latent ? from[e] : (bi_bf16)0;
}

br_status bi_cuda_latent_store(bi_ctx *ctx, const bi_latent_store_args *a) {
    if (a->d_latent < 1 || a->x_ld < a->d_latent)
        return br_fail(BR_E_SHAPE, "latent_store: rows of %d at stride %d: expected at least 1, stride >= them", a->d_latent, a->x_ld);
    BR_TRY(check_cache("latent_store", &a->cache, bi_cuda_latent_block_bytes(a->d_latent)));
    const int32_t row_ld = attn_row_ld(a->d_latent);
    const int64_t n = (int64_t)a->batch->n_row * (row_ld / ATTN_UNIT);
    if (!n)
        return BR_OK;
    latent_store<<<(unsigned)bi_ceil_div(n, ROW_THREADS), ROW_THREADS, 0, ctx->stream>>>(
        *a, *a->batch, row_ld, cache_wide(&a->cache) && on16(a->x) && a->x_ld % ATTN_UNIT == 0 && a->d_latent % ATTN_UNIT == 0);
    return bi_cuda_launched(ctx, BI_K_latent_store, "latent_store");
}

static __device__ __forceinline__ bi_bf16 gated(float o, int has_gate, uint32_t gate) {
    return bi_round(has_gate ? BI_MUL(o, bi_sigmoid(bi_widen((bi_bf16)gate))) : o);
}

/* Elements 4i .. 4i + 3 of n. */
static __global__ void __launch_bounds__(ROW_THREADS)
    attn_gate(const float *o, const bi_bf16 *gate, bi_bf16 *y, const int64_t n, const int32_t wide) {
    const int64_t i = 4 * ((int64_t)blockIdx.x * ROW_THREADS + threadIdx.x);
    if (wide && i + 4 <= n) {
        const float4 x = *(const float4 *)(o + i);
        const uint2 g = gate ? *(const uint2 *)(gate + i) : make_uint2(0, 0);
        *(uint2 *)(y + i) = make_uint2(gated(x.x, gate != NULL, g.x & 0xffff) | (uint32_t)gated(x.y, gate != NULL, g.x >> 16) << 16,
                                       gated(x.z, gate != NULL, g.y & 0xffff) | (uint32_t)gated(x.w, gate != NULL, g.y >> 16) << 16);
        return;
    }
    for (int64_t j = i; j < n && j < i + 4; j++)
        y[j] = gated(o[j], gate != NULL, gate ? gate[j] : 0);
}

br_status bi_cuda_attn_gate(bi_ctx *ctx, const bi_attn_gate_args *a) {
    if (a->n_row < 0 || a->d < 1)
        return br_fail(BR_E_SHAPE, "attn_gate: %d rows of %d: expected n_row >= 0 and d >= 1", a->n_row, a->d);
    const int64_t n = (int64_t)a->n_row * a->d;
    if (!n)
        return BR_OK;
    const int wide = on16(a->o) && (uintptr_t)a->y % 8 == 0 && (uintptr_t)a->gate % 8 == 0;
    attn_gate<<<(unsigned)bi_ceil_div(n, 4 * ROW_THREADS), ROW_THREADS, 0, ctx->stream>>>(a->o, a->gate, a->y, n, wide);
    return bi_cuda_launched(ctx, BI_K_attn_gate, "attn_gate");
}

/* Votes of a warp over 32 entries: how many of its lanes before this one hold the same class, and in lane c how many hold class c. c: this
 * lane's, 8 for none. */
static __device__ __forceinline__ int list_rank(int c, int lane, int32_t *count) {
    int rank = 0, of_class = 0;
    for (int i = 0; i < BI_ATT_CLASSES; i++) {
        const uint32_t vote = __ballot_sync(0xffffffffu, c == i);
        rank = c == i ? __popc(vote & ((1u << lane) - 1)) : rank;
        of_class = lane == i ? __popc(vote) : of_class;
    }
    *count = of_class;
    return rank;
}

/* What a warp holds of a row's list: entries first + 32i + lane of it, and lane c's totals of class c. */
struct list_part {
    int32_t position[LIST_EACH], c[LIST_EACH], rank[LIST_EACH], before[LIST_EACH], total;

    __device__ __forceinline__ void load(const int32_t *select, int32_t n, int32_t first, int lane) {
#pragma unroll
        for (int i = 0; i < LIST_EACH; i++) {
            const int32_t at = first + 32 * i + lane;
            position[i] = at < n ? select[at] : -1;
        }
        total = 0;
#pragma unroll
        for (int i = 0; i < LIST_EACH; i++) {
            int32_t count;
            c[i] = position[i] < 0 ? BI_ATT_CLASSES : position[i] / BI_ATT_BLOCK % BI_ATT_CLASSES;
            rank[i] = list_rank(c[i], lane, &count);
            before[i] = total;
            total += count;
        }
    }
};

/* A row's selected positions, as ids of latent rows, class by class and rising in each; and how many each class has. A warp takes 32 *
 * LIST_EACH entries at a time, a block LIST_AT_ONCE. */
static __global__ void __launch_bounds__(LIST_THREADS) attn_lists(const attn_rows r, const int32_t *select, const int32_t *n_select,
                                                                  const int32_t select_ld, int32_t *list, int32_t *count) {
    __shared__ int32_t warp_count[LIST_WARPS][BI_ATT_CLASSES], start[BI_ATT_CLASSES];
    const int32_t t = (int32_t)blockIdx.x, row = r.row0 + t, tid = (int32_t)threadIdx.x, lane = tid % 32, warp = tid / 32;
    attn_let_next();
    if (r.row_seg[row] < 0)
        return;
    const int32_t seq = r.seg[r.row_seg[row]].seq, n = n_select[row];
    const int32_t *own = select + (int64_t)row * select_ld;
    list_part part;
    int32_t total = 0;
    for (int32_t first = (n - 1) / LIST_AT_ONCE * LIST_AT_ONCE; first >= 0; first -= LIST_AT_ONCE) { /* the first part comes last and stays */
        part.load(own, n, first + warp * 32 * LIST_EACH, lane);
        total += part.total;
    }
    if (lane < BI_ATT_CLASSES)
        warp_count[warp][lane] = total;
    __syncthreads();
    if (warp == 0) {
        int32_t sum = 0, through;
        for (int w = 0; w < LIST_WARPS && lane < BI_ATT_CLASSES; w++)
            sum += warp_count[w][lane];
        through = sum;
        for (int h = 1; h < BI_ATT_CLASSES; h <<= 1) {
            const int32_t other = __shfl_up_sync(0xffffffffu, through, (unsigned)h);
            through += lane >= h ? other : 0;
        }
        if (lane < BI_ATT_CLASSES) {
            start[lane] = through - sum;
            count[t * BI_ATT_CLASSES + lane] = sum;
        }
    }
    for (int32_t first = 0; first < n; first += LIST_AT_ONCE) {
        if (first)
            part.load(own, n, first + warp * 32 * LIST_EACH, lane);
        __syncthreads();
        if (lane < BI_ATT_CLASSES)
            warp_count[warp][lane] = part.total;
        __syncthreads();
        int32_t base = lane < BI_ATT_CLASSES ? start[lane] : 0;
        for (int w = 0; w < warp && lane < BI_ATT_CLASSES; w++)
            base += warp_count[w][lane];
#pragma unroll
        for (int i = 0; i < LIST_EACH; i++) {
            const int32_t from = __shfl_sync(0xffffffffu, base + part.before[i], part.c[i] % 32);
            if (part.position[i] >= 0)
                list[(int64_t)t * r.list_ld + from + part.rank[i]] =
                    attn_block_at(r.cache, seq, part.position[i] / BR_PAGE_TOK) * BR_PAGE_TOK + part.position[i] % BR_PAGE_TOK;
        }
        __syncthreads();
        if (tid < BI_ATT_CLASSES)
            for (int w = 0; w < LIST_WARPS; w++)
                start[tid] += warp_count[w][tid];
    }
}

/* What one row takes of the scratch when it reads at most n_entry positions. */
typedef struct attn_room {
    int32_t n_head_pad, n_block_max, list_ld;
    size_t row_bytes;
} attn_room;

static attn_room room_for(int32_t n_head, int64_t n_entry, int listed) {
    attn_room room;
    room.n_head_pad = (n_head + 31) / 32 * 32;
    room.n_block_max = (int32_t)bi_ceil_div(n_entry, BI_ATT_BLOCK) + (listed ? BI_ATT_CLASSES : 0);
    room.list_ld = listed ? (int32_t)n_entry : 0;
    room.row_bytes = (size_t)room.n_head_pad * ((size_t)room.n_block_max * (ATTN_P_BYTES + sizeof(float)) + BI_ATT_CLASSES * sizeof(float2)) +
                     ((size_t)room.list_ld + BI_ATT_CLASSES) * sizeof(int32_t);
    return room;
}

size_t bi_cuda_attn_scratch(const bi_limits *limits) {
    const size_t one = room_for(limits->n_head, limits->n_pos, 1).row_bytes, all = one * (size_t)limits->n_row;
    return (all < SCRATCH_WANTED ? all : one > SCRATCH_WANTED ? one : SCRATCH_WANTED) + one + 256 * N_CARVED;
}

static br_status check_attn(const bi_limits *limits, const bi_attn_args *a) {
    if (a->n_head < 1 || a->d_kv_latent < 1 || a->d_rope < 0 || a->n_head > limits->n_head || a->d_kv_latent > limits->d_kv_latent ||
        a->d_rope > limits->d_rope)
        return br_fail(BR_E_SHAPE, "attn: %d heads of %d + %d: expected 1 to %d heads of 1 to %d + 0 to %d", a->n_head, a->d_kv_latent,
                       a->d_rope, limits->n_head, limits->d_kv_latent, limits->d_rope);
    if (a->batch->n_row && a->batch->pos_max >= limits->n_pos)
        return br_fail(BR_E_SHAPE, "attn: positions up to %d: expected at most %d", a->batch->pos_max, limits->n_pos - 1);
    return check_cache("attn", &a->cache, bi_cuda_latent_block_bytes(a->d_kv_latent + a->d_rope));
}

template <int NJ> static br_status launch_score(bi_ctx *ctx, const attn_rows *r, const attn_query *q, int32_t n_row) {
    const size_t bytes = attn_score_shared(32 * NJ, q->n_chunk);
    const int64_t n_cta = (int64_t)n_row * BI_ATT_CLASSES * (r->n_head_pad / (32 * NJ));
    if (bytes > (size_t)SHARED_MAX)
        return br_fail(BR_E_LIMIT, "attn: latent rows of %d + %d: expected their queries in %d bytes of shared memory, not %zu",
                       r->d_kv_latent, r->d_rope, SHARED_MAX, bytes);
    cudaFuncSetAttribute(attn_score<NJ>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    attn_score<NJ><<<(unsigned)n_cta, ATTN_THREADS, bytes, ctx->stream>>>(*r, *q);
    return bi_cuda_launched(ctx, BI_K_attn_score, "attn");
}

/* Launches a wide kernel; early: it waits itself for what the kernel before it writes. */
template <typename... A>
static void launch_wide(bi_ctx *ctx, void (*kernel)(A...), int64_t n_cta, size_t bytes, int early, A... args) {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)n_cta);
    config.blockDim = dim3(WIDE_THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = ctx->stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    (void)cudaLaunchKernelEx(&config, kernel, args...); /* the caller asks for the last error */
}

/* Does a launch of n_cta blocks, one an SM, leave little of the GPU idle? */
static int fills(const bi_ctx *ctx, int64_t n_cta) {
    return n_cta * 10 >= (int64_t)ctx->n_sm * 9;
}

/* How many classes a block of attn_score_wide takes; 0: it leaves too much of the GPU idle, or its queries do not fit. */
template <int N8> static int32_t wide_span(const bi_ctx *ctx, const attn_rows *r, const attn_query *q, int32_t n_row) {
    const int64_t n = (int64_t)n_row * (r->n_head_pad / (8 * N8));
    int32_t span = BI_ATT_CLASSES;
    while (span > 2 && !fills(ctx, n * (BI_ATT_CLASSES / span)))
        span /= 2;
    return fills(ctx, n * (BI_ATT_CLASSES / span)) && r->n_head_pad % (8 * N8) == 0 && q->n_chunk <= SWIDE_CHUNKS_MAX &&
                   score_wide_shared<N8>::bytes(q->n_chunk) <= (size_t)SHARED_MAX
               ? span
               : 0;
}

template <int N8> static br_status launch_score_wide(bi_ctx *ctx, const attn_rows *r, const attn_query *q, int32_t n_row, int32_t span) {
    const int64_t n_cta = (int64_t)n_row * (BI_ATT_CLASSES / span) * (r->n_head_pad / (8 * N8));
    launch_wide(ctx, attn_score_wide<N8>, n_cta, score_wide_shared<N8>::bytes(q->n_chunk), r->list != NULL, *r, *q, span);
    return bi_cuda_launched(ctx, BI_K_attn_score, "attn");
}

template <int N8> static br_status launch_value_wide(bi_ctx *ctx, const attn_rows *r, bi_bf16 *z, int32_t n_row) {
    const int32_t n_column = (int32_t)bi_ceil_div(r->d_kv_latent, VWIDE_COLUMNS);
    const int64_t n_cta = (int64_t)n_row * n_column * (r->n_head_pad / (8 * N8));
    static_assert(value_wide_shared<N8>::BYTES <= 227 << 10, "the ring fits");
    launch_wide(ctx, attn_value_wide<N8>, n_cta, (size_t)value_wide_shared<N8>::BYTES, 1, *r, z, n_column);
    return bi_cuda_launched(ctx, BI_K_attn_value, "attn");
}

template <int MT> static br_status launch_value(bi_ctx *ctx, const attn_rows *r, bi_bf16 *z, int32_t n_row) {
    const int32_t n_column = (int32_t)bi_ceil_div(r->d_kv_latent, VALUE_COLUMNS);
    const int64_t n_cta = (int64_t)n_row * n_column * (r->n_head_pad / (32 * MT));
    const size_t bytes = attn_value_shared(32 * MT);
    cudaFuncSetAttribute(attn_value<MT>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    attn_value<MT><<<(unsigned)n_cta, ATTN_THREADS, bytes, ctx->stream>>>(*r, z, n_column);
    return bi_cuda_launched(ctx, BI_K_attn_value, "attn");
}

static br_status score_rows(bi_ctx *ctx, const attn_rows *r, const attn_query *q, int32_t n_row) {
    const int by96 = r->n_head_pad % 96 == 0;
    const int32_t span = by96 ? wide_span<12>(ctx, r, q, n_row) : wide_span<4>(ctx, r, q, n_row);
    if (span)
        return by96 ? launch_score_wide<12>(ctx, r, q, n_row, span) : launch_score_wide<4>(ctx, r, q, n_row, span);
    if (by96 && n_row * BI_ATT_CLASSES >= ctx->n_sm && attn_score_shared(96, q->n_chunk) <= (size_t)SHARED_MAX)
        return launch_score<3>(ctx, r, q, n_row);
    return launch_score<1>(ctx, r, q, n_row);
}

static br_status value_rows(bi_ctx *ctx, const attn_rows *r, bi_bf16 *z, int32_t n_row) {
    const int by96 = r->n_head_pad % 96 == 0;
    const int64_t n = (int64_t)n_row * (r->n_head_pad / (by96 ? 96 : 32));
    if (fills(ctx, n * bi_ceil_div(r->d_kv_latent, VWIDE_COLUMNS)))
        return by96 ? launch_value_wide<12>(ctx, r, z, n_row) : launch_value_wide<4>(ctx, r, z, n_row);
    if (by96 && n * bi_ceil_div(r->d_kv_latent, VALUE_COLUMNS) >= ctx->n_sm)
        return launch_value<3>(ctx, r, z, n_row);
    return launch_value<1>(ctx, r, z, n_row);
}

/* Rows r->row0 .. + n_row - 1. Groups of 96 heads where that leaves no SM idle, else of 32. */
static br_status attend(bi_ctx *ctx, const bi_attn_args *a, const attn_rows *r, const attn_query *q, int32_t *list, int32_t *count, int32_t n_row) {
    if (a->select) {
        attn_lists<<<(unsigned)n_row, LIST_THREADS, 0, ctx->stream>>>(*r, a->select, a->n_select, a->select_ld, list, count);
        BR_TRY(bi_cuda_launched(ctx, BI_K_attn_lists, "attn"));
    }
    BR_TRY(score_rows(ctx, r, q, n_row));
    return value_rows(ctx, r, a->z, n_row);
}

static attn_query query_of(const bi_attn_args *a) {
    attn_query q;
    q.q = a->q;
    q.q_r = a->q_r;
    q.q_r_ld = a->q_r_ld;
    q.q_r_head_ld = a->q_r_head_ld;
    q.alpha = a->alpha;
    q.wide = on16(a->q) && a->d_kv_latent % ATTN_UNIT == 0 &&
             (a->d_rope == 0 || (on16(a->q_r) && a->d_rope % ATTN_UNIT == 0 && a->q_r_ld % ATTN_UNIT == 0 && a->q_r_head_ld % ATTN_UNIT == 0));
    q.n_chunk = (int32_t)bi_ceil_div(a->d_kv_latent + a->d_rope, ATTN_CHUNK);
    q.fault = a->fault;
    return q;
}

br_status bi_cuda_attn(bi_ctx *ctx, const bi_attn_args *a) {
    BR_TRY(check_attn(&ctx->limits, a));
    const int64_t visible = (int64_t)a->batch->pos_max + 1;
    const attn_room room = room_for(a->n_head, a->select && a->select_ld < visible ? a->select_ld : visible, a->select != NULL);
    const size_t left = bi_cuda_attn_scratch(&ctx->limits) - 256 * N_CARVED;
    const int64_t most = (int64_t)(left / room.row_bytes), fit = most > ctx->n_sm ? most - most % ctx->n_sm : most; /* a row a block: whole waves */
    const int64_t n_fit = fit < a->batch->n_row ? fit : a->batch->n_row;
    const attn_query q = query_of(a);
    bi_carver carver = bi_cuda_scratch(ctx);
    if (!a->batch->n_row)
        return BR_OK;
    int32_t *list = (int32_t *)bi_carve(&carver, (size_t)n_fit * (size_t)room.list_ld * sizeof *list);
    int32_t *count = (int32_t *)bi_carve(&carver, (size_t)n_fit * BI_ATT_CLASSES * sizeof *count);
    attn_rows r = {a->batch->seg, a->batch->row_seg, a->cache, 0, attn_row_ld(a->d_kv_latent + a->d_rope), cache_wide(&a->cache), a->n_head,
                   room.n_head_pad, a->d_kv_latent, a->d_rope, room.n_block_max, a->select ? list : NULL, count, room.list_ld, NULL, NULL, NULL};
    const size_t heads = (size_t)n_fit * (size_t)room.n_head_pad;
    r.weight = (unsigned char *)bi_carve(&carver, heads * (size_t)room.n_block_max * ATTN_P_BYTES);
    r.scale = (float *)bi_carve(&carver, heads * (size_t)room.n_block_max * sizeof *r.scale);
    r.stat = (float2 *)bi_carve(&carver, heads * BI_ATT_CLASSES * sizeof *r.stat);
    for (r.row0 = 0; r.row0 < a->batch->n_row; r.row0 += (int32_t)n_fit) {
        const int64_t n = a->batch->n_row - r.row0;
        BR_TRY(attend(ctx, a, &r, &q, list, count, (int32_t)(n < n_fit ? n : n_fit)));
    }
    return BR_OK;
}
