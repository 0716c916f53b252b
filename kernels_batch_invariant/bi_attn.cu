/* bi_latent_store, bi_attn, bi_attn_gate on the GPU.      Contract: N-ATT
 *
 * Attention has two forms, of the same bits; the work of both is cut into parts of rows (N-ATT-2):
 *   wide     bi_attn_fused.cuh, one pass, for latents of 512 + 64 columns on 16 bytes
 *   narrow   bi_attn_score.cuh, scores by (row, part, blocks, heads), and bi_attn_value.cuh, weights and values by (row, part, columns,
 *            heads): any widths. Scores pass through scratch, 256 bytes a head and block of 64 entries
 * Where a row may have several parts, their m, l and acc pass through scratch and attn_merge joins them. A step's rows, and in the narrow
 * form the parts of a row, run in launches of as many as fit.
 * latent_store: 16 bytes a thread. attn_gate: four elements a thread. Neither adds floats. */
#include "bi_attn_parts.cuh"
#include "bi_attn_fused.cuh"
#include "bi_attn_score.cuh"
#include "bi_attn_value.cuh"

enum {
    ROW_THREADS = 256,
    N_CARVED = 2 /* arrays of a launch, each on 256 bytes */
};
static const size_t SCORES_WANTED = (size_t)256 << 20, PARTS_WANTED = (size_t)128 << 20; /* enough to fill the GPU many times over */
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
    bi_cuda_begin();
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
    bi_cuda_launch(ctx, latent_store, (unsigned)bi_ceil_div(n, ROW_THREADS), ROW_THREADS, 0, *a, *a->batch, row_ld,
                   cache_wide(&a->cache) && on16(a->x) && a->x_ld % ATTN_UNIT == 0 && a->d_latent % ATTN_UNIT == 0);
    return bi_cuda_launched(ctx, BI_K_latent_store, "latent_store");
}

static __device__ __forceinline__ bi_bf16 gated(float o, int has_gate, uint32_t gate) {
    return bi_round(has_gate ? BI_MUL(o, bi_sigmoid(bi_widen((bi_bf16)gate))) : o);
}

/* Elements 4i .. 4i + 3 of n. */
static __global__ void __launch_bounds__(ROW_THREADS)
    attn_gate(const float *o, const bi_bf16 *gate, bi_bf16 *y, const int64_t n, const int32_t wide) {
    bi_cuda_begin();
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
    bi_cuda_launch(ctx, attn_gate, (unsigned)bi_ceil_div(n, 4 * ROW_THREADS), ROW_THREADS, 0, a->o, a->gate, a->y, n, wide);
    return bi_cuda_launched(ctx, BI_K_attn_gate, "attn_gate");
}

/* Scratch: scores of one part, and what a row of several parts leaves. */
typedef struct attn_room {
    int32_t n_head_pad, n_part;
    size_t score_bytes, row_bytes;
} attn_room;

static attn_room room_for(int32_t n_head, int32_t d_kv_latent, int64_t n_entry) {
    attn_room room;
    room.n_head_pad = (n_head + ATTN_HEADS - 1) / ATTN_HEADS * ATTN_HEADS;
    room.n_part = (int32_t)bi_ceil_div(n_entry, BI_ATT_PART);
    room.score_bytes = (size_t)room.n_head_pad * ATTN_BLOCKS * ATTN_S_BYTES;
    room.row_bytes = room.n_part > 1 ? (size_t)room.n_part * (size_t)n_head * ((size_t)d_kv_latent * sizeof(float) + sizeof(float2)) : 0;
    return room;
}

/* n pieces, or as many as fit into what is wanted, or one. */
static size_t scratch_of(size_t piece, size_t n, size_t wanted) {
    const size_t all = piece * n;
    return all < wanted ? all : piece > wanted ? piece : wanted;
}

static size_t scratch_scores(const attn_room *room, int64_t n_row) {
    return scratch_of(room->score_bytes, (size_t)n_row * (size_t)room->n_part, SCORES_WANTED);
}

size_t bi_cuda_attn_scratch(const bi_limits *limits) {
    const attn_room room = room_for(limits->n_head, limits->d_kv_latent, limits->n_pos);
    return scratch_scores(&room, limits->n_row) + scratch_of(room.row_bytes, (size_t)limits->n_row, PARTS_WANTED) + 256 * N_CARVED;
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

/* The narrow form over rows and parts of one launch. */
static br_status narrow(bi_ctx *ctx, const attn_rows *r, const attn_query *q) {
    const size_t bytes = attn_score_shared(q->n_chunk);
    const int64_t n = (int64_t)r->n_row * r->n_part * (r->n_head_pad / ATTN_HEADS);
    const int32_t n_column = (int32_t)bi_ceil_div(r->d_kv_latent, VALUE_COLUMNS);
    int32_t n_span = 4;
    if (bytes > (size_t)SHARED_MAX)
        return br_fail(BR_E_LIMIT, "attn: latent rows of %d + %d: expected their queries in %d bytes of shared memory, not %zu",
                       r->d_kv_latent, r->d_rope, SHARED_MAX, bytes);
    while (n_span < ATTN_BLOCKS && n * n_span < 2 * ctx->n_sm)
        n_span *= 2;
    cudaFuncSetAttribute(attn_score, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    bi_cuda_launch(ctx, attn_score, (unsigned)(n * n_span), ATTN_THREADS, bytes, *r, *q, n_span);
    BR_TRY(bi_cuda_launched(ctx, BI_K_attn_score, "attn"));
    cudaFuncSetAttribute(attn_value, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    bi_cuda_launch(ctx, attn_value, (unsigned)(n * n_column), ATTN_THREADS, VALUE_SHARED, *r, n_column);
    return bi_cuda_launched(ctx, BI_K_attn_value, "attn");
}

template <int N8> static br_status launch_fused(bi_ctx *ctx, const attn_rows *r, const attn_query *q) {
    const int64_t n = (int64_t)r->n_row * r->n_part * (r->n_head_pad / (8 * N8));
    static_assert(fused_shared<N8>::BYTES <= 227 << 10, "a block fits an SM");
    cudaFuncSetAttribute(attn_fused<N8>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    bi_cuda_launch(ctx, attn_fused<N8>, (unsigned)(n < ctx->n_sm ? n : ctx->n_sm), FUSED_THREADS, fused_shared<N8>::BYTES, *r, *q);
    return bi_cuda_launched(ctx, BI_K_attn_fused, "attn");
}

/* Can the wide form? Then it is the faster one, from one row on. */
static int fused_can(const attn_rows *r, const attn_query *q) {
    return r->d_kv_latent == FUSED_KV && r->d_rope == FUSED_ROPE && r->wide && q->wide && (uintptr_t)r->z % 8 == 0;
}

/* The parts of a launch's rows, as many at once as there is room for scores. */
static br_status narrow_parts(bi_ctx *ctx, attn_rows *r, const attn_query *q, int64_t n_score) {
    const int32_t each = n_score < r->n_part_max ? (int32_t)n_score : r->n_part_max;
    for (r->part0 = 0; r->part0 < r->n_part_max; r->part0 += each) {
        r->n_part = r->n_part_max - r->part0 < each ? r->n_part_max - r->part0 : each;
        BR_TRY(narrow(ctx, r, q));
    }
    return BR_OK;
}

/* n_score: parts that there is room for the scores of; n_kept: rows whose parts may be kept. */
static br_status attend(bi_ctx *ctx, attn_rows *r, const attn_query *q, int64_t n_row, int64_t n_score, int64_t n_kept) {
    const int fused = fused_can(r, q);
    const int64_t scored = n_score < r->n_part_max ? 1 : n_score / r->n_part_max, each = fused || n_kept < scored ? n_kept : scored;
    for (r->row0 = 0; r->row0 < n_row; r->row0 += (int32_t)each) {
        r->n_row = (int32_t)(n_row - r->row0 < each ? n_row - r->row0 : each);
        r->n_part = r->n_part_max;
        if (!fused)
            BR_TRY(narrow_parts(ctx, r, q, n_score));
        else
            BR_TRY(r->n_head_pad % 48 == 0 ? launch_fused<6>(ctx, r, q) : launch_fused<4>(ctx, r, q));
        if (r->n_part_max == 1)
            continue;
        bi_cuda_launch(ctx, attn_merge, (unsigned)(r->n_row * r->n_head), MERGE_THREADS, 0, *r);
        BR_TRY(bi_cuda_launched(ctx, BI_K_attn_merge, "attn"));
    }
    return BR_OK;
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
    const int64_t visible = (int64_t)a->batch->pos_max + 1, n_row = a->batch->n_row;
    const attn_room room = room_for(a->n_head, a->d_kv_latent, a->select && a->select_ld < visible ? a->select_ld : visible);
    const size_t scores = scratch_scores(&room, n_row), parts = scratch_of(room.row_bytes, (size_t)n_row, PARTS_WANTED);
    const attn_query q = query_of(a);
    bi_carver carver = bi_cuda_scratch(ctx);
    if (!n_row)
        return BR_OK;
    attn_rows r = {a->batch->seg, a->batch->row_seg, a->cache, 0, 0, 0, 0, attn_row_ld(a->d_kv_latent + a->d_rope), cache_wide(&a->cache), a->n_head,
                   room.n_head_pad, a->d_kv_latent, a->d_rope, a->select, a->n_select, a->select_ld, NULL, room.n_part, NULL, NULL, a->z};
    const int64_t n_score = (int64_t)(scores / room.score_bytes), n_kept = room.n_part > 1 ? (int64_t)(parts / room.row_bytes) : n_row;
    r.score = (float *)bi_carve(&carver, scores);
    r.stat = (float2 *)bi_carve(&carver, parts);
    r.acc = (float *)(r.stat + (room.n_part > 1 ? n_kept * room.n_part * a->n_head : 0));
    return attend(ctx, &r, &q, n_row, n_score, n_kept);
}
