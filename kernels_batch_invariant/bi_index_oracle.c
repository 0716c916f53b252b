/* bi_index_store, bi_index_select: the DSA indexer, the C oracle.      Contract: N-IDX, N-CHAIN, P-4
 *
 * Layer: kernels_batch_invariant, compiled once an ISA. Owns the layout of an index block; knows no page policy, no model.
 *
 * An index block is two panels of 32 positions, each (d to 16, 32) packed values and exponents, and the 64 scales. It is
 * kept packed because every query reads every key: unpacking would cost 4 heads of 32 a fifth of the scan. */
#include "bi_chain.h"
#include "bi_oracle.h"
#include "bi_order.h"
#include "bi_rows.h"

enum {
    N_PANEL = BR_PAGE_TOK / BI_PANEL,
    STORE_COST = 8 /* element steps of one quantised and scattered element */
};

/* One block, or one panel copied out of it, as arrays. */
typedef struct key_panel {
    float *f;     /* (d_pad, 32) */
    int16_t *e;   /* (d_pad, 32) */
    float *scale; /* (32) */
} key_panel;

size_t BI_FN(bi_index_block_bytes)(int32_t d) {
    return BR_PAGE_TOK * (BI_PACKED_BYTES * (size_t)bi_pad_k(d) + sizeof(float));
}

/* Panel p of a block: all values, then all scales, then all exponents. */
static key_panel panel_of(unsigned char *block, int32_t d, int p) {
    size_t panel = (size_t)bi_pad_k(d) * BI_PANEL;
    float *f = (float *)block, *scale = f + N_PANEL * panel;
    int16_t *e = (int16_t *)(scale + BR_PAGE_TOK);
    key_panel out = {f + (size_t)p * panel, e + (size_t)p * panel, scale + p * BI_PANEL};
    return out;
}

static int all_finite(const bi_bf16 *x, int32_t d) {
    int finite = 1;
    for (int32_t i = 0; i < d; i++)
        finite &= (x[i] & 0x7f80) != 0x7f80;
    return finite;
}

/* The smallest power of two with scale * 448 >= max(amax, 1e-4): for amax = m * 2^e and 448 = 1.75 * 2^8 it is 2^(e-8) up to
 * m = 1.75 and 2^(e-7) above. x (d) finite. */
static float scale_of(const bi_bf16 *x, int32_t d) {
    uint32_t amax = bi_u32_of(BI_IDX_AMAX_MIN), top = bi_u32_of(BI_IDX_E4M3_MAX);
    for (int32_t i = 0; i < d; i++) {
        uint32_t size = (uint32_t)(x[i] & 0x7fff) << 16;
        amax = size > amax ? size : amax;
    }
    uint32_t field = (amax >> 23) - (top >> 23) + ((amax & 0x7fffffu) > (top & 0x7fffffu));
    return bi_f32_of((field + 127) << 23);
}

/* The e4m3 number of x / scale, exact in bf16. */
static inline bi_bf16 quantise(bi_bf16 x, float scale) {
    return (bi_bf16)(bi_u32_of(bi_e4m3_widen(bi_e4m3_of(BI_DIV(bi_widen(x), scale)))) >> 16);
}

/* A key with an element that is not finite ends its request; it is kept as zeros, so that nothing it meets turns to NaN. */
static void store_row(const void *args, int32_t t) {
    const bi_index_store_args *a = args;
    if (a->batch->row_seg[t] < 0)
        return;
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    const bi_bf16 *k = a->k + (int64_t)t * a->d;
    int32_t position = seg->pos + t - seg->row, lane = position % BI_PANEL;
    key_panel panel = panel_of(bi_cache_block(&a->cache, seg->seq, position / BR_PAGE_TOK), a->d,
                               position % BR_PAGE_TOK / BI_PANEL);
    int32_t n = all_finite(k, a->d) ? a->d : 0;
    if (n == 0)
        bi_fault_check(&a->fault, t, INFINITY);
    float scale = scale_of(k, n);
    for (int32_t i = 0; i < bi_pad_k(a->d); i++) {
        bi_bf16 value = i < n ? quantise(k[i], scale) : 0;
        panel.f[i * BI_PANEL + lane] = bi_widen(value);
        panel.e[i * BI_PANEL + lane] = bi_chain_exponent(value);
    }
    panel.scale[lane] = scale;
}

br_status BI_FN(bi_index_store)(bi_ctx *ctx, const bi_index_store_args *a) {
    if (a->d < 1)
        return br_fail(BR_E_SHAPE, "index_store: rows of %d: expected at least 1", a->d);
    BR_TRY(bi_cache_check("index_store", &a->cache, BI_FN(bi_index_block_bytes)(a->d)));
    bi_rows_run(ctx, store_row, a, a->batch->n_row, (int64_t)a->d * STORE_COST);
    return BR_OK;
}

/* What one query works in; a thread has one. */
typedef struct work {
    int32_t n_head, d, d_pad;
    bi_bf16 *line;      /* (d) one head quantised */
    float *qf;          /* (n_head, d_pad) packed */
    int16_t *qe;
    const float **xf;   /* (n_head) the rows of a panel product */
    const int16_t **xe;
    float *w;           /* (n_head) RN(RN(chain * C) * scale_q) */
    float *acc;         /* (n_head, 32) */
    key_panel tail;     /* the visible lanes of the last panel, zeros beside them */
    float *score;       /* (n_pos to 32) */
} work;

/* Lays a query's arrays out. */
static void carve(work *w, br_arena *arena, int32_t n_head, int32_t d, int32_t n_pos) {
    size_t heads = (size_t)n_head, d_pad = (size_t)bi_pad_k(d);
    w->n_head = n_head;
    w->d = d;
    w->d_pad = bi_pad_k(d);
    w->line = BR_ARENA_ARRAY(arena, bi_bf16, d_pad);
    w->qf = BR_ARENA_ARRAY(arena, float, heads * d_pad);
    w->qe = BR_ARENA_ARRAY(arena, int16_t, heads * d_pad);
    w->xf = BR_ARENA_ARRAY(arena, const float *, heads);
    w->xe = BR_ARENA_ARRAY(arena, const int16_t *, heads);
    w->w = BR_ARENA_ARRAY(arena, float, heads);
    w->acc = BR_ARENA_ARRAY(arena, float, heads * BI_PANEL);
    w->tail.f = BR_ARENA_ARRAY(arena, float, d_pad * BI_PANEL);
    w->tail.e = BR_ARENA_ARRAY(arena, int16_t, d_pad * BI_PANEL);
    w->tail.scale = BR_ARENA_ARRAY(arena, float, BI_PANEL);
    w->score = BR_ARENA_ARRAY(arena, float, (size_t)n_pos + BI_PANEL);
}

#ifdef BI_ISA_portable
bi_scratch bi_index_scratch(const bi_limits *limits) {
    work w;
    br_arena measure = {0};
    carve(&w, &measure, limits->index_n_head, limits->index_d_head, limits->n_pos);
    return (bi_scratch){0, measure.used};
}
#endif

/* Quantises and packs the query of row t. Returns 0, with nothing of use in w, when an element of q or w is not finite. */
static int pack_query(const bi_index_select_args *a, work *w, int32_t t) {
    const bi_bf16 *q = a->q + (int64_t)t * a->n_head * a->d;
    const float *weight = a->w + (int64_t)t * a->n_head;
    for (int32_t h = 0; h < a->n_head; h++) {
        const bi_bf16 *x = q + (int64_t)h * a->d;
        if (!all_finite(x, a->d) || !bi_is_finite(weight[h]))
            return 0;
        float scale = scale_of(x, a->d);
        for (int32_t i = 0; i < a->d; i++)
            w->line[i] = quantise(x[i], scale);
        size_t at = (size_t)h * (size_t)w->d_pad;
        BI_FN(bi_pack_row)(w->line, a->d, w->d_pad, w->qf + at, w->qe + at);
        w->xf[h] = w->qf + at;
        w->xe[h] = w->qe + at;
        w->w[h] = BI_MUL(BI_MUL(weight[h], a->c), scale);
    }
    return 1;
}

/* score (32) of one panel: four chains over the heads, then the key's scale. Finite operands can still overflow to
 * Inf - Inf; that NaN gets one pattern, since P-4 orders patterns. */
static void score_panel(const work *w, const key_panel *k, float *score) {
    float p[BI_IDX_CHAINS][BI_PANEL] = {{0}};
    memset(w->acc, 0, sizeof *w->acc * (size_t)w->n_head * BI_PANEL);
    BI_FN(bi_chain_panel)(w->n_head, w->xf, w->xe, w->d_pad, k->f, k->e, BI_PANEL, w->acc, BI_PANEL);
    for (int32_t h = 0; h < w->n_head; h++) {
        const float *acc = w->acc + (size_t)h * BI_PANEL;
        float *chain = p[h / BI_IDX_PAIR % BI_IDX_CHAINS];
        for (int i = 0; i < BI_PANEL; i++)
            chain[i] = BI_FMA(w->w[h], acc[i] > 0.0f ? acc[i] : 0.0f, chain[i]);
    }
    for (int i = 0; i < BI_PANEL; i++) {
        float sum = BI_ADD(BI_ADD(p[0][i], p[1][i]), BI_ADD(p[2][i], p[3][i]));
        float scaled = BI_MUL(sum, k->scale[i]);
        score[i] = bi_is_nan(scaled) ? bi_f32_of(BI_F32_NAN) : scaled;
    }
}

/* The first n lanes of a panel. The others may never have been written, and nothing unwritten becomes an operand. */
static void copy_lanes(key_panel *to, const key_panel *from, int32_t d_pad, int n) {
    size_t size = (size_t)d_pad * BI_PANEL;
    memset(to->f, 0, sizeof *to->f * size);
    memset(to->scale, 0, sizeof *to->scale * BI_PANEL);
    for (size_t i = 0; i < size; i++)
        to->e[i] = BI_EXP_ZERO;
    for (size_t row = 0; row < size; row += BI_PANEL) {
        memcpy(to->f + row, from->f + row, sizeof *to->f * (size_t)n);
        memcpy(to->e + row, from->e + row, sizeof *to->e * (size_t)n);
    }
    memcpy(to->scale, from->scale, sizeof *to->scale * (size_t)n);
}

/* w->score of positions 0 .. n - 1. */
static void scan(const bi_cache *cache, work *w, int32_t seq, int32_t n) {
    for (int32_t first = 0; first < n; first += BI_PANEL) {
        key_panel panel = panel_of(bi_cache_block(cache, seq, first / BR_PAGE_TOK), w->d, first % BR_PAGE_TOK / BI_PANEL);
        if (n - first < BI_PANEL) {
            copy_lanes(&w->tail, &panel, w->d_pad, n - first);
            panel = w->tail;
        }
        score_panel(w, &panel, w->score + first);
    }
}

typedef struct select_call {
    const bi_ctx *ctx;
    const bi_index_select_args *a;
} select_call;

static void select_job(void *context, int t, int thread) {
    const select_call *call = context;
    const bi_index_select_args *a = call->a;
    if (a->batch->row_seg[t] < 0)
        return;
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    int32_t visible = seg->pos + t - seg->row + 1;
    work w;
    br_arena arena = bi_thread_arena(call->ctx, thread);
    carve(&w, &arena, a->n_head, a->d, visible);
    int finite = a->scored || pack_query(a, &w, t), everything = visible <= a->topk;
    if (a->scored) {
        memcpy(w.score, a->score + t * a->score_ld, sizeof *w.score * (size_t)visible);
    } else if (!finite) {
        bi_fault_check(&a->fault, t, INFINITY);
        memset(w.score, 0, sizeof *w.score * (size_t)visible); /* ties everywhere: the first positions win */
    } else if (!everything || a->score) {
        scan(&a->cache, &w, seg->seq, visible);
    }
    int32_t *select = a->select + (int64_t)t * a->topk;
    if (everything)
        for (int32_t i = 0; i < visible; i++)
            select[i] = i;
    else
        bi_order_topk(w.score, visible, a->topk, select);
    a->n_select[t] = everything ? visible : a->topk;
    if (a->score && !a->scored)
        memcpy(a->score + t * a->score_ld, w.score, sizeof *w.score * (size_t)visible);
}

static br_status check_select(const bi_limits *limits, const bi_index_select_args *a) {
    if (a->n_head < 4 || a->n_head % 4 || a->n_head > limits->index_n_head || a->d < 1 || a->d > limits->index_d_head ||
        a->topk < 1)
        return br_fail(BR_E_SHAPE,
                       "index_select: the best %d by %d heads of %d: expected at least 1, a multiple of 4 up to %d, 1 to %d",
                       a->topk, a->n_head, a->d, limits->index_n_head, limits->index_d_head);
    if (a->scored && !a->score)
        return br_fail(BR_E_SHAPE, "index_select: scores that are there already: expected where they are");
    for (int32_t t = 0; t < a->batch->n_row && a->batch->row_seg[t] >= 0; t++) {
        const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
        int32_t position = seg->pos + t - seg->row;
        if (position < 0 || position >= limits->n_pos)
            return br_fail(BR_E_SHAPE, "index_select: row %d at position %d: expected 0 to %d", t, position,
                           limits->n_pos - 1);
        if (a->score && position >= a->score_ld)
            return br_fail(BR_E_SHAPE, "index_select: row %d at position %d with room for %lld scores: expected at least %d",
                           t, position, (long long)a->score_ld, position + 1);
    }
    return bi_cache_check("index_select", &a->cache, BI_FN(bi_index_block_bytes)(a->d));
}

br_status BI_FN(bi_index_select)(bi_ctx *ctx, const bi_index_select_args *a) {
    BR_TRY(check_select(&ctx->limits, a));
    select_call call = {ctx, a};
    br_pool_run(ctx->pool, select_job, &call, a->batch->n_row);
    return BR_OK;
}
