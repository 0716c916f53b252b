/* bi_latent_store, bi_attn, bi_attn_gate: absorbed MLA, the C oracle.      Contract: N-ATT, N-CHAIN, N-SUM, N-FN
 *
 * Layer: kernels_batch_invariant, compiled once an ISA. Owns the layout of a latent block; knows no page policy, no model.
 *
 * A latent block is 64 rows [c | k_r | 0] of bf16, padded to 32: 72 KiB at d_latent = 576. A packed panel for the scores and
 * packed rows for the values would be 432 KiB. They would spare a dense query its unpacking, 9 % (AVX-512) to 25 % (AVX2) of
 * it at 6 heads; a selection has to gather and transpose its rows in any case, and then six times the bytes.
 *
 * A query takes its positions block by block, 64 of them; the scores of a block are one panel product for every 32 entries.
 * The accumulator of a part joins the row before the next part begins. */
#include "bi_chain.h"
#include "bi_fn.h"
#include "bi_oracle.h"
#include "bi_rows.h"
#include "bi_sum.h"

enum {
    GROUP = BI_ATT_BLOCK,
    GATE_COST = 8 /* element steps of one sigmoid */
};
_Static_assert(GROUP % BI_PANEL == 0, "a block's scores are whole panels");

static int32_t pad_panel(int32_t n) {
    return (n + BI_PANEL - 1) / BI_PANEL * BI_PANEL;
}

size_t BI_FN(bi_latent_block_bytes)(int32_t d_latent) {
    return sizeof(bi_bf16) * BR_PAGE_TOK * (size_t)pad_panel(d_latent);
}

static bi_bf16 *latent_row(const bi_cache *cache, int32_t seq, int32_t position, int32_t d_latent) {
    bi_bf16 *block = (bi_bf16 *)bi_cache_block(cache, seq, position / BR_PAGE_TOK);
    return block + (size_t)(position % BR_PAGE_TOK) * (size_t)pad_panel(d_latent);
}

static void store_row(const void *args, int32_t t) {
    const bi_latent_store_args *a = args;
    if (a->batch->row_seg[t] < 0)
        return;
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    bi_bf16 *row = latent_row(&a->cache, seg->seq, seg->pos + t - seg->row, a->d_latent);
    memcpy(row, a->x + (int64_t)t * a->x_ld, sizeof *row * (size_t)a->d_latent);
    memset(row + a->d_latent, 0, sizeof *row * (size_t)(pad_panel(a->d_latent) - a->d_latent));
}

br_status BI_FN(bi_latent_store)(bi_ctx *ctx, const bi_latent_store_args *a) {
    if (a->d_latent < 1 || a->x_ld < a->d_latent)
        return br_fail(BR_E_SHAPE, "latent_store: rows of %d at stride %d: expected at least 1, stride >= them", a->d_latent,
                       a->x_ld);
    BR_TRY(bi_cache_check("latent_store", &a->cache, BI_FN(bi_latent_block_bytes)(a->d_latent)));
    bi_rows_run(ctx, store_row, a, a->batch->n_row, a->d_latent);
    return BR_OK;
}

/* What one query works in; a thread has one. */
typedef struct work {
    int32_t n_head, d_score, d_value;    /* d_score: d_kv_latent + d_rope to 16; d_value: d_kv_latent to 32 */
    int32_t v_ld;                        /* d_value to an odd multiple of 32: rows 2 KiB apart share 4 sets of L1 */
    bi_bf16 *line;                       /* (max(d_score, 64)) a row on its way to be packed */
    bi_bf16 *zero;                       /* (d_score) the latent row of an absent lane */
    float *qf, *wf;                      /* (n_head, d_score) packed [q~ | q_r]; (n_head, 64) packed R(e) */
    int16_t *qe, *we;
    const float **xf;                    /* (n_head) the rows of a panel product */
    const int16_t **xe;
    bi_bf16 *panel;                      /* (d_score, 32) latent rows transposed, then packed into kf, ke */
    float *kf, *vf;                      /* (d_score, 32); (64, v_ld) packed latent rows of one block */
    int16_t *ke, *ve;
    float *score;                        /* (n_head, 64) of the block */
    float *m, *l, *acc;                  /* of the part: (n_head), (n_head), (n_head, d_value) */
    float *top, *sum, *out;              /* of the parts so far: M, L, O */
    const bi_bf16 *row[GROUP];           /* latent rows of the block */
} work;

/* Lays a query's arrays out. */
static void carve(work *w, br_arena *arena, int32_t n_head, int32_t d_kv_latent, int32_t d_rope) {
    size_t heads = (size_t)n_head;
    w->n_head = n_head;
    w->d_score = bi_pad_k(d_kv_latent + d_rope);
    w->d_value = pad_panel(d_kv_latent);
    w->v_ld = w->d_value | BI_PANEL;
    size_t d_score = (size_t)w->d_score, d_value = (size_t)w->d_value;
    w->line = BR_ARENA_ARRAY(arena, bi_bf16, d_score > GROUP ? d_score : GROUP);
    w->zero = BR_ARENA_ARRAY(arena, bi_bf16, d_score);
    w->qf = BR_ARENA_ARRAY(arena, float, heads * d_score);
    w->qe = BR_ARENA_ARRAY(arena, int16_t, heads * d_score);
    w->wf = BR_ARENA_ARRAY(arena, float, heads * GROUP);
    w->we = BR_ARENA_ARRAY(arena, int16_t, heads * GROUP);
    w->xf = BR_ARENA_ARRAY(arena, const float *, heads);
    w->xe = BR_ARENA_ARRAY(arena, const int16_t *, heads);
    w->panel = BR_ARENA_ARRAY(arena, bi_bf16, d_score * BI_PANEL);
    w->kf = BR_ARENA_ARRAY(arena, float, d_score * BI_PANEL);
    w->ke = BR_ARENA_ARRAY(arena, int16_t, d_score * BI_PANEL);
    w->vf = BR_ARENA_ARRAY(arena, float, GROUP * (size_t)w->v_ld);
    w->ve = BR_ARENA_ARRAY(arena, int16_t, GROUP * (size_t)w->v_ld);
    w->score = BR_ARENA_ARRAY(arena, float, heads * GROUP);
    w->m = BR_ARENA_ARRAY(arena, float, heads);
    w->l = BR_ARENA_ARRAY(arena, float, heads);
    w->acc = BR_ARENA_ARRAY(arena, float, heads * d_value);
    w->top = BR_ARENA_ARRAY(arena, float, heads);
    w->sum = BR_ARENA_ARRAY(arena, float, heads);
    w->out = BR_ARENA_ARRAY(arena, float, heads * d_value);
}

#ifdef BI_ISA_portable
bi_scratch bi_attn_scratch(const bi_limits *limits) {
    work w;
    br_arena measure = {0};
    carve(&w, &measure, limits->n_head, limits->d_kv_latent, limits->d_rope);
    return (bi_scratch){0, measure.used};
}
#endif

/* Packs the query of row t, [q~ | q_r] a head. */
static void pack_query(const bi_attn_args *a, work *w, int32_t t) {
    int32_t d = a->d_kv_latent, d_latent = d + a->d_rope;
    for (int32_t h = 0; h < a->n_head; h++) {
        size_t at = (size_t)h * (size_t)w->d_score;
        memcpy(w->line, a->q + ((int64_t)t * a->n_head + h) * d, sizeof *w->line * (size_t)d);
        memcpy(w->line + d, a->q_r + t * a->q_r_ld + h * a->q_r_head_ld, sizeof *w->line * (size_t)a->d_rope);
        BI_FN(bi_pack_row)(w->line, d_latent, w->d_score, w->qf + at, w->qe + at);
    }
}

typedef uint16_t half8 __attribute__((vector_size(16)));

/* Interleaves rows i and i + 4. Element (row, column) is at a 6-bit address that this rotates by one: three times is a
 * transpose. */
static inline void interleave8(half8 *out, const half8 *in) {
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __builtin_shufflevector(in[i], in[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
        out[2 * i + 1] = __builtin_shufflevector(in[i], in[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
}

/* panel (d, 32) = the 32 rows transposed; d a multiple of 16. Eight by eight in registers: 0.2 ns an element, not 0.7. */
static void transpose(bi_bf16 *panel, const bi_bf16 *const *row, int32_t d) {
    for (int lane = 0; lane < BI_PANEL; lane += 8) {
        for (int32_t k = 0; k < d; k += 8) {
            half8 x[8], y[8];
            for (int i = 0; i < 8; i++)
                memcpy(&x[i], row[lane + i] + k, sizeof x[i]);
            interleave8(y, x);
            interleave8(x, y);
            interleave8(y, x);
            for (int i = 0; i < 8; i++)
                memcpy(panel + (k + i) * BI_PANEL + lane, &y[i], sizeof y[i]);
        }
    }
}

static void set_rows(work *w, const float *f, const int16_t *e, int32_t ld) {
    for (int32_t h = 0; h < w->n_head; h++) {
        w->xf[h] = f + (size_t)h * (size_t)ld;
        w->xe[h] = e + (size_t)h * (size_t)ld;
    }
}

/* score (n_head, 64) = RN(alpha * chain) of the block's n rows. Returns 0 when one is not finite. */
static int score_block(work *w, float alpha, int n) {
    int finite = 1;
    int32_t d = w->d_score;
    set_rows(w, w->qf, w->qe, d);
    memset(w->score, 0, sizeof *w->score * (size_t)w->n_head * GROUP);
    for (int first = 0; first < n; first += BI_PANEL) {
        const bi_bf16 *row[BI_PANEL];
        for (int i = 0; i < BI_PANEL; i++)
            row[i] = first + i < n ? w->row[first + i] : w->zero;
        transpose(w->panel, row, d);
        BI_FN(bi_pack_row)(w->panel, d * BI_PANEL, d * BI_PANEL, w->kf, w->ke);
        BI_FN(bi_chain_panel)(w->n_head, w->xf, w->xe, d, w->kf, w->ke, BI_PANEL, w->score + first, GROUP);
    }
    for (int32_t h = 0; h < w->n_head; h++) {
        float *s = w->score + (size_t)h * GROUP;
        for (int i = 0; i < n; i++) {
            s[i] = BI_MUL(alpha, s[i]);
            finite &= bi_is_finite(s[i]);
        }
    }
    return finite;
}

/* The sum of a block's n weights: sixteens fold to one each, then the four. */
static float sum_weights(const float *e, int n) {
    float p[GROUP / BI_MMA_K];
    for (int i = 0; i < GROUP / BI_MMA_K; i++) {
        int left = n - i * BI_MMA_K;
        p[i] = bi_sum_short(e + i * BI_MMA_K, left < 0 ? 0 : left < BI_MMA_K ? left : BI_MMA_K, BI_MMA_K);
    }
    return bi_sum_fold(p, GROUP / BI_MMA_K / 2);
}

/* One head takes a block's n scores: m, l and R(e) of the block, and what is left of its accumulator. */
static void weigh(work *w, int32_t h, const float *s, int n, int first_block) {
    float *acc = w->acc + (size_t)h * (size_t)w->d_value;
    float e[GROUP], top = first_block ? s[0] : w->m[h];
    for (int i = 0; i < n; i++)
        top = s[i] > top ? s[i] : top;
    for (int i = 0; i < n; i++)
        e[i] = bi_exp(BI_SUB(s[i], top));
    for (int i = 0; i < n; i++)
        w->line[i] = bi_round(e[i]);
    BI_FN(bi_pack_row)(w->line, n, bi_pad_k(n), w->wf + (size_t)h * GROUP, w->we + (size_t)h * GROUP);
    if (first_block) {
        w->l[h] = sum_weights(e, n);
        memset(acc, 0, sizeof *acc * (size_t)w->d_value);
    } else {
        float f = bi_exp(BI_SUB(w->m[h], top));
        w->l[h] = BI_FMA(w->l[h], f, sum_weights(e, n));
        for (int32_t d = 0; d < w->d_value; d++)
            acc[d] = BI_MUL(acc[d], f);
    }
    w->m[h] = top;
}

/* A block of n entries joins its part. */
static void join_block(work *w, int32_t d_kv_latent, int n, int first_block) {
    int32_t d = w->d_value, n_k = bi_pad_k(n);
    for (int32_t h = 0; h < w->n_head; h++)
        weigh(w, h, w->score + (size_t)h * GROUP, n, first_block);
    size_t v_ld = (size_t)w->v_ld;
    for (int32_t i = 0; i < n; i++)
        BI_FN(bi_pack_row)(w->row[i], d_kv_latent, d, w->vf + (size_t)i * v_ld, w->ve + (size_t)i * v_ld);
    BI_FN(bi_pack_row)(w->zero, 0, (n_k - n) * w->v_ld, w->vf + (size_t)n * v_ld, w->ve + (size_t)n * v_ld);
    set_rows(w, w->wf, w->we, GROUP);
    for (int32_t lane = 0; lane < d; lane += BI_PANEL)
        BI_FN(bi_chain_panel)(w->n_head, w->xf, w->xe, n_k, w->vf + lane, w->ve + lane, v_ld, w->acc + lane, (size_t)d);
}

/* A part joins the row, which so far is the parts before it. */
static void join_part(work *w, int first_part) {
    size_t d = (size_t)w->d_value;
    for (int32_t h = 0; h < w->n_head; h++) {
        const float *acc = w->acc + (size_t)h * d;
        float *out = w->out + (size_t)h * d;
        if (first_part) {
            w->top[h] = w->m[h];
            w->sum[h] = w->l[h];
            memcpy(out, acc, sizeof *out * d);
            continue;
        }
        float top = w->m[h] > w->top[h] ? w->m[h] : w->top[h];
        float f = bi_exp(BI_SUB(w->top[h], top)), weight = bi_exp(BI_SUB(w->m[h], top));
        w->top[h] = top;
        w->sum[h] = BI_FMA(w->l[h], weight, BI_MUL(w->sum[h], f));
        for (size_t i = 0; i < d; i++)
            out[i] = BI_FMA(acc[i], weight, BI_MUL(out[i], f));
    }
}

/* Takes the row's n entries, those of select or 0 .. n - 1 when it is NULL, through scores, weights and values. Returns 0 when a score is
 * not finite. */
static int attend(const bi_attn_args *a, work *w, int32_t seq, const int32_t *select, int32_t n, int32_t own) {
    int finite = 1;
    int32_t before = -1;
    for (int32_t begin = 0; begin < n; begin += GROUP) {
        int32_t left = n - begin, n_entry = left < GROUP ? left : GROUP, end = begin + n_entry;
        for (int32_t i = begin; i < end; i++) {
            int32_t position = select ? select[i] : i;
            BR_ASSERT(position > before && position <= own);
            before = position;
            w->row[i - begin] = latent_row(&a->cache, seq, position, a->d_kv_latent + a->d_rope);
        }
        finite &= score_block(w, a->alpha, n_entry);
        join_block(w, a->d_kv_latent, n_entry, begin % BI_ATT_PART == 0);
        if (end == n || end % BI_ATT_PART == 0)
            join_part(w, begin < BI_ATT_PART);
    }
    return finite;
}

/* z of one head. */
static void finish(const work *w, int32_t h, int32_t d_kv_latent, bi_bf16 *z) {
    const float *out = w->out + (size_t)h * (size_t)w->d_value;
    float inverse = BI_DIV(1.0f, w->sum[h]);
    for (int32_t i = 0; i < d_kv_latent; i++)
        z[i] = bi_round(BI_MUL(out[i], inverse));
}

typedef struct attn_call {
    const bi_ctx *ctx;
    const bi_attn_args *a;
} attn_call;

static void attn_job(void *context, int t, int thread) {
    const attn_call *call = context;
    const bi_attn_args *a = call->a;
    if (a->batch->row_seg[t] < 0)
        return;
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    int32_t own = seg->pos + t - seg->row;
    int32_t n = a->select ? a->n_select[t] : own + 1;
    work w;
    br_arena arena = bi_thread_arena(call->ctx, thread);
    carve(&w, &arena, a->n_head, a->d_kv_latent, a->d_rope);
    memset(w.zero, 0, sizeof *w.zero * (size_t)w.d_score);
    pack_query(a, &w, t);
    if (!attend(a, &w, seg->seq, a->select ? a->select + (int64_t)t * a->select_ld : NULL, n, own))
        bi_fault_check(&a->fault, t, INFINITY);
    for (int32_t h = 0; h < a->n_head; h++)
        finish(&w, h, a->d_kv_latent, a->z + ((int64_t)t * a->n_head + h) * a->d_kv_latent);
}

static br_status check_attn(const bi_limits *limits, const bi_attn_args *a) {
    if (a->n_head < 1 || a->d_kv_latent < 1 || a->d_rope < 0 || a->n_head > limits->n_head ||
        a->d_kv_latent > limits->d_kv_latent || a->d_rope > limits->d_rope)
        return br_fail(BR_E_SHAPE, "attn: %d heads of %d + %d: expected 1 to %d heads of 1 to %d + 0 to %d", a->n_head,
                       a->d_kv_latent, a->d_rope, limits->n_head, limits->d_kv_latent, limits->d_rope);
    for (int32_t t = 0; t < a->batch->n_row && a->batch->row_seg[t] >= 0; t++) {
        const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
        int32_t visible = seg->pos + t - seg->row + 1;
        if (visible < 1 || visible > limits->n_pos)
            return br_fail(BR_E_SHAPE, "attn: row %d at position %d: expected 0 to %d", t, visible - 1, limits->n_pos - 1);
        if (a->select && (a->n_select[t] < 1 || a->n_select[t] > a->select_ld || a->n_select[t] > visible))
            return br_fail(BR_E_SHAPE, "attn: row %d at position %d selects %d: expected 1 to %d", t, visible - 1,
                           a->n_select[t], visible < a->select_ld ? visible : a->select_ld);
    }
    return bi_cache_check("attn", &a->cache, BI_FN(bi_latent_block_bytes)(a->d_kv_latent + a->d_rope));
}

br_status BI_FN(bi_attn)(bi_ctx *ctx, const bi_attn_args *a) {
    BR_TRY(check_attn(&ctx->limits, a));
    attn_call call = {ctx, a};
    br_pool_run(ctx->pool, attn_job, &call, a->batch->n_row);
    return BR_OK;
}

static void gate_row(const void *args, int32_t t) {
    const bi_attn_gate_args *a = args;
    int64_t at = (int64_t)t * a->d;
    const float *o = a->o + at;
    bi_bf16 *y = a->y + at;
    if (!a->gate) {
        bi_round_row(y, o, a->d);
        return;
    }
    for (int32_t i = 0; i < a->d; i++)
        y[i] = bi_round(BI_MUL(o[i], bi_sigmoid(bi_widen(a->gate[at + i]))));
}

br_status BI_FN(bi_attn_gate)(bi_ctx *ctx, const bi_attn_gate_args *a) {
    if (a->n_row < 0 || a->d < 1)
        return br_fail(BR_E_SHAPE, "attn_gate: %d rows of %d: expected n_row >= 0 and d >= 1", a->n_row, a->d);
    bi_rows_run(ctx, gate_row, a, a->n_row, (int64_t)a->d * GATE_COST);
    return BR_OK;
}
