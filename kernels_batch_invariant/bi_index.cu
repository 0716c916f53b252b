/* bi_index_store, bi_index_select on the GPU.      Contract: N-IDX, N-CHAIN, P-4
 *
 *   index_store   a warp a key: amax, power-of-two scale, codes
 *   index_query   a block of 1,024 threads a row, a warp a head: the same for queries, widened, and w of N-IDX-2
 *   index_score   scores of the visible positions, by (keys, rows of a segment): bi_index_score_wide.cuh for 32 heads of 128 (and 4 to 8 of
 *                 32), else bi_index_score.cuh
 *   index_topk    bi_index_topk.cuh: the exact selection, a cluster a row
 * Scores pass through scratch, or lie in the caller's array where it wants them. A step's rows run in launches of as many rows as fit
 * into scratch. */
#include "bi_index_parts.cuh"
#include "bi_index_score.cuh"
#include "bi_index_score_wide.cuh"
#include "bi_index_topk.cuh"

enum { STORE_THREADS = 256, QUERY_THREADS = 1024, NARROW_CHUNK = 2048, N_CARVED = 4 /* arrays of a launch, each on 256 bytes */ };
static const size_t SCRATCH_WANTED = (size_t)1 << 30;
static const size_t SHARED_MAX = 227 << 10, SHARED_WANTED = 72 << 10; /* three blocks of the score kernel an SM */

size_t bi_cuda_index_block_bytes(int32_t d) {
    return BR_PAGE_TOK * ((size_t)index_pad(d) + sizeof(float));
}

static br_status check_cache(const char *op, const bi_cache *cache, size_t block_bytes) {
    if (cache->block_bytes < block_bytes)
        return br_fail(BR_E_SHAPE, "%s: a block of %zu bytes: expected at least %zu", op, cache->block_bytes, block_bytes);
    if ((uintptr_t)cache->base % 4 || cache->block_bytes % 4)
        return br_fail(BR_E_ALIGN, "%s: cache at %p, %zu bytes a block: expected multiples of 4", op, (void *)cache->base,
                       cache->block_bytes);
    return BR_OK;
}

/* A key with an element that is not finite is a fault and is kept as zeros. */
static __global__ void __launch_bounds__(STORE_THREADS) index_store(const bi_index_store_args a, const bi_batch batch, const int32_t d_pad) {
    bi_cuda_begin();
    const int32_t t = (int32_t)((int64_t)blockIdx.x * (STORE_THREADS / 32) + threadIdx.x / 32);
    const int lane = (int)threadIdx.x % 32;
    if (t >= batch.n_row || batch.row_seg[t] < 0)
        return;
    const bi_seg seg = batch.seg[batch.row_seg[t]];
    const int32_t position = seg.pos + t - seg.row, key = position % BR_PAGE_TOK;
    const bi_bf16 *x = a.k + (int64_t)t * a.d;
    unsigned char *block = (unsigned char *)bi_cuda_cache_block(a.cache, seg.seq, position / BR_PAGE_TOK);
    int finite;
    const uint32_t amax = index_amax(x, a.d, lane, &finite);
    const float scale = index_scale(finite ? amax : 0);
    const int32_t n = finite ? a.d : 0;
    for (int32_t four = lane; four < d_pad / 4; four += 32) {
        *(uint32_t *)(block + index_code_at(d_pad, key, four)) = index_codes(x, n, four, scale);
    }
    if (lane)
        return;
    ((float *)(block + BR_PAGE_TOK * d_pad))[key] = scale;
    if (!finite)
        bi_cuda_fault(a.fault, t, bi_f32_of(BI_F32_INF));
}

br_status bi_cuda_index_store(bi_ctx *ctx, const bi_index_store_args *a) {
    if (a->d < 1)
        return br_fail(BR_E_SHAPE, "index_store: rows of %d: expected at least 1", a->d);
    BR_TRY(check_cache("index_store", &a->cache, bi_cuda_index_block_bytes(a->d)));
    if (!a->batch->n_row)
        return BR_OK;
    const unsigned n_cta = (unsigned)bi_ceil_div(a->batch->n_row, STORE_THREADS / 32);
    bi_cuda_launch(ctx, index_store, n_cta, STORE_THREADS, 0, *a, *a->batch, index_pad(a->d));
    return bi_cuda_launched(ctx, BI_K_index_store, "index_store");
}

/* The packed query of one row and its weights; heads past the last are zeros. */
static __global__ void __launch_bounds__(QUERY_THREADS) index_query(const index_rows r, const bi_index_select_args a) {
    bi_cuda_begin();
    const int32_t t = (int32_t)blockIdx.x, row = r.row0 + t;
    const int lane = (int)threadIdx.x % 32;
    int bad = 0;
    if (r.row_seg[row] < 0)
        return;
    for (int32_t h = (int32_t)threadIdx.x / 32; h < r.n_tile * 8; h += QUERY_THREADS / 32) {
        const bi_bf16 *x = a.q + ((int64_t)row * a.n_head + h) * a.d;
        const int32_t n = h < a.n_head ? a.d : 0;
        const float w = n ? a.w[(int64_t)row * a.n_head + h] : 0.0f;
        int finite;
        const uint32_t amax = index_amax(x, n, lane, &finite);
        const float scale = index_scale(finite ? amax : 0);
        bad |= !finite || !bi_is_finite(w);
        unsigned char *own = r.query + (int64_t)t * r.query_bytes;
        for (int32_t four = lane; four < r.d_pad / 4; four += 32) {
            const uint32_t codes = index_codes(x, finite ? n : 0, four, scale);
            uint32_t low, high;
            if (r.swizzled) {
                iwide_widen4(codes, &low, &high);
                *(uint32_t *)(own + index_query_wide_at(r.n_tile, h, four, 0)) = low;
                *(uint32_t *)(own + index_query_wide_at(r.n_tile, h, four, 1)) = high;
            } else {
                index_widen4(codes, &low, &high);
                *(uint2 *)(own + index_query_at(r.d_pad, h, four)) = make_uint2(low, high);
            }
        }
        if (lane == 0)
            r.weight[(int64_t)t * r.n_tile * 8 + h] = BI_MUL(BI_MUL(w, a.c), scale);
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x)
        return;
    r.bad[t] = bad;
    if (bad)
        bi_cuda_fault(a.fault, row, bi_f32_of(BI_F32_INF));
}

static int64_t score_room(int64_t n_pos) {
    return (n_pos + 63) / 64 * 64;
}

/* Scratch of one row: its packed query, weights, mark, and scores of n_pos positions. */
static size_t row_bytes(int32_t n_head, int32_t d, int64_t n_pos) {
    const int32_t n_tile = (n_head + 7) / 8;
    return index_query_bytes(n_tile, index_pad(d)) + ((size_t)n_tile * 8 + 1 + (size_t)score_room(n_pos)) * sizeof(float);
}

size_t bi_cuda_index_scratch(const bi_limits *limits) {
    const size_t one = row_bytes(limits->index_n_head, limits->index_d_head, limits->n_pos), all = one * (size_t)limits->n_row;
    return limits->index_n_head ? (all < SCRATCH_WANTED ? all : SCRATCH_WANTED) + one + 256 * N_CARVED : 0;
}

static br_status check_select(const bi_limits *limits, const bi_index_select_args *a) {
    if (a->n_head < 4 || a->n_head % 4 || a->n_head > limits->index_n_head || a->d < 1 || a->d > limits->index_d_head || a->topk < 1)
        return br_fail(BR_E_SHAPE, "index_select: the best %d by %d heads of %d: expected at least 1, a multiple of 4 up to %d, 1 to %d",
                       a->topk, a->n_head, a->d, limits->index_n_head, limits->index_d_head);
    if (a->batch->n_row && a->batch->pos_max >= limits->n_pos)
        return br_fail(BR_E_SHAPE, "index_select: positions up to %d: expected at most %d", a->batch->pos_max, limits->n_pos - 1);
    if (a->scored && !a->score)
        return br_fail(BR_E_SHAPE, "index_select: scores that are there already: expected where they are");
    if (a->batch->n_row && a->score && a->batch->pos_max >= a->score_ld)
        return br_fail(BR_E_SHAPE, "index_select: positions up to %d with room for %lld scores: expected at least %d", a->batch->pos_max,
                       (long long)a->score_ld, a->batch->pos_max + 1);
    return check_cache("index_select", &a->cache, bi_cuda_index_block_bytes(a->d));
}

typedef void (*score_kernel)(index_rows, int32_t, int32_t, int32_t);

/* The wide form's kernel for these shapes; NULL: the other form. */
static score_kernel wide_kernel(const index_rows *r) {
    if (!r->wide)
        return NULL;
    if (r->n_head == 32 && r->d_pad == 128)
        return index_score_wide<4, 4>;
    return r->n_tile == 1 && r->d_pad == 32 ? index_score_wide<1, 1> : NULL;
}

/* How a launch is cut: rows of a segment in groups that share the keys, keys in chunks. */
typedef struct score_cut {
    score_kernel kernel;
    int64_t n_row_max, n_group, n_chunk_key;
} score_cut;

/* Keys of a chunk of the wide form: chunks x n_group blocks of threads fill whole waves of n_place, at least IWIDE_WAVES of them. */
static int64_t wide_chunk(int64_t visible, int64_t n_group, int64_t n_place) {
    const int64_t n_block = bi_ceil_div(visible, BR_PAGE_TOK);
    for (int64_t n_wave = IWIDE_WAVES;; n_wave++) {
        const int64_t n_chunk = n_wave * n_place / n_group, size = n_chunk ? bi_ceil_div(n_block, n_chunk) : n_block;
        if (size <= IWIDE_BLOCKS_MAX)
            return BR_PAGE_TOK * (size > IWIDE_BLOCKS_MIN ? size : (int64_t)IWIDE_BLOCKS_MIN);
    }
}

/* Of the other form: as long as 12 blocks of threads an SM are left, four rounds of three. */
static int64_t narrow_chunk(int64_t visible, int64_t n_group, int64_t n_sm) {
    int64_t n = NARROW_CHUNK;
    while (n > (int)SCORE_WARPS * (int)INDEX_KEYS && bi_ceil_div(visible, n) * n_group < 12 * n_sm)
        n /= 2;
    return n;
}

static score_cut cut_of(const bi_ctx *ctx, const bi_batch *batch, const index_rows *r) {
    const int64_t seg_row = batch->seg_row_max < r->n_row ? batch->seg_row_max : r->n_row, visible = (int64_t)batch->pos_max + 1;
    const size_t one = index_score_shared(r->n_tile, r->d_pad, 1), wide = (size_t)(seg_row > 1 ? IWIDE_SHARED_MORE : IWIDE_SHARED_ONE);
    const size_t wanted = r->swizzled ? wide : SHARED_WANTED;
    const size_t base = r->swizzled ? index_wide_shared(r->n_tile, r->d_pad, 0) : 0;
    score_cut cut;
    cut.kernel = r->swizzled ? wide_kernel(r) : r->d_pad > 32 * SCORE_PIECES ? index_score<1> : index_score<0>;
    cut.n_row_max = seg_row < SCORE_ROWS_MAX ? seg_row : (int64_t)SCORE_ROWS_MAX;
    while (cut.n_row_max > 1 && base + one * (size_t)cut.n_row_max > wanted)
        cut.n_row_max--;
    cut.n_group = bi_ceil_div(seg_row, cut.n_row_max);
    const int64_t n_group = cut.n_group * batch->n_seg, per_sm = cut.n_row_max > 1 ? (int)IWIDE_PER_SM_MORE : (int)IWIDE_PER_SM;
    cut.n_chunk_key = r->swizzled ? wide_chunk(visible, n_group, per_sm * ctx->n_sm) : narrow_chunk(visible, n_group, ctx->n_sm);
    return cut;
}

/* Scores of the launch's rows. */
static br_status score_rows(bi_ctx *ctx, const bi_batch *batch, const index_rows *r, const score_cut *cut) {
    const size_t one = index_score_shared(r->n_tile, r->d_pad, 1);
    const int32_t n_row_max = (int32_t)cut->n_row_max;
    const size_t bytes = r->swizzled ? index_wide_shared(r->n_tile, r->d_pad, n_row_max) : one * (size_t)n_row_max;
    if (one > SHARED_MAX)
        return br_fail(BR_E_LIMIT, "index_select: %d heads of %d: expected their queries in %zu bytes of shared memory, not %zu", r->n_head,
                       r->d_pad, SHARED_MAX, one);
    const dim3 grid((unsigned)bi_ceil_div((int64_t)batch->pos_max + 1, cut->n_chunk_key), (unsigned)cut->n_group, (unsigned)batch->n_seg);
    cudaFuncSetAttribute(cut->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)SHARED_MAX);
    const unsigned n_thread = r->swizzled ? (unsigned)IWIDE_THREADS : (unsigned)SCORE_THREADS;
    bi_cuda_launch(ctx, cut->kernel, grid, n_thread, bytes, *r, (int32_t)cut->n_group, n_row_max, (int32_t)cut->n_chunk_key);
    return bi_cuda_launched(ctx, BI_K_index_score, "index_select");
}

typedef void (*topk_kernel)(index_rows, int32_t *, int32_t *);

/* As many blocks a row as leave every row a place. */
static topk_kernel topk_of(int64_t n_row, int64_t n_sm, int64_t *n_block) {
    *n_block = n_row * 8 <= n_sm ? 8 : n_row * 4 <= n_sm ? 4 : 2;
    return *n_block == 8 ? index_topk<8> : *n_block == 4 ? index_topk<4> : index_topk<2>;
}

static br_status select_rows(bi_ctx *ctx, const bi_index_select_args *a, const index_rows *r) {
    const score_cut cut = cut_of(ctx, a->batch, r);
    if (!a->scored) {
        bi_cuda_launch(ctx, index_query, (unsigned)r->n_row, QUERY_THREADS, 0, *r, *a);
        BR_TRY(bi_cuda_launched(ctx, BI_K_index_query, "index_select"));
    }
    if (!a->scored && (r->all || a->batch->pos_max >= r->topk))
        BR_TRY(score_rows(ctx, a->batch, r, &cut));
    int64_t n_block;
    const topk_kernel topk = topk_of(r->n_row, ctx->n_sm, &n_block);
    cudaFuncSetAttribute(topk, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(topk_shared));
    bi_cuda_launch(ctx, topk, (unsigned)(r->n_row * n_block), TOPK_THREADS, sizeof(topk_shared), *r, a->select, a->n_select);
    return bi_cuda_launched(ctx, BI_K_index_topk, "index_select");
}

br_status bi_cuda_index_select(bi_ctx *ctx, const bi_index_select_args *a) {
    BR_TRY(check_select(&ctx->limits, a));
    const bi_batch *batch = a->batch;
    const int64_t n_pos = (int64_t)batch->pos_max + 1;
    const size_t one = row_bytes(a->n_head, a->d, a->score ? 0 : n_pos), left = bi_cuda_index_scratch(&ctx->limits) - 256 * N_CARVED;
    const size_t n_fit = left / one < (size_t)batch->n_row ? left / one : (size_t)batch->n_row;
    bi_carver carver = bi_cuda_scratch(ctx);
    if (!batch->n_row)
        return BR_OK;
    index_rows r = {batch->seg, batch->row_seg, a->cache, 0, 0, a->n_head, (a->n_head + 7) / 8, index_pad(a->d), a->topk,
                    (uintptr_t)a->cache.base % 16 == 0 && a->cache.block_bytes % 16 == 0, 0, a->score != NULL, 0, NULL, NULL, NULL, NULL,
                    a->score ? a->score_ld : score_room(n_pos)};
    r.query_bytes = (int32_t)index_query_bytes(r.n_tile, r.d_pad);
    r.swizzled = wide_kernel(&r) != NULL;
    r.query = (unsigned char *)bi_carve(&carver, n_fit * (size_t)r.query_bytes);
    r.weight = (float *)bi_carve(&carver, n_fit * (size_t)r.n_tile * 8 * sizeof *r.weight);
    int32_t *bad = (int32_t *)bi_carve(&carver, n_fit * sizeof *r.bad);
    r.bad = a->scored ? NULL : bad;
    float *score = a->score ? NULL : (float *)bi_carve(&carver, n_fit * (size_t)r.score_ld * sizeof *score);
    for (r.row0 = 0; r.row0 < batch->n_row; r.row0 += (int32_t)n_fit) {
        r.n_row = batch->n_row - r.row0 < (int32_t)n_fit ? batch->n_row - r.row0 : (int32_t)n_fit;
        r.score = a->score ? a->score + r.row0 * a->score_ld : score;
        BR_TRY(select_rows(ctx, a, &r));
    }
    return BR_OK;
}
