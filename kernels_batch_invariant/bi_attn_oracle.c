/* bi_latent_store, bi_attn, bi_attn_gate: absorbed MLA, the C oracle.      Contract: N-ATT, N-CHAIN, N-SUM, N-FN
 *
 * Layer: kernels_batch_invariant, compiled once an ISA. Owns the layout of a latent block; knows no page policy, no model.
 *
 * A latent block is 64 rows [c | k_r | 0] of bf16, padded to 32: 72 KiB at d_latent = 576. A packed panel for the scores and
 * packed rows for the values would be 432 KiB. They would spare a dense query its unpacking, 9 % (AVX-512) to 25 % (AVX2) of
 * it at 6 heads; a selection has to gather and transpose its rows in any case, and then six times the bytes.
 *
 * A query sorts its positions by class and takes them in groups: whole class blocks, at most 64 entries. The scores of a
 * group are one panel product for every 32 entries, whatever classes they are of (a score does not know its class), so 16
 * entries spread over 8 classes cost one panel and not eight. The values then run block by block in the clause's order. */
#include "bi_chain.h"
#include "bi_fn.h"
#include "bi_oracle.h"
#include "bi_rows.h"
#include "bi_sum.h"

enum {
    GROUP = BI_ATT_BLOCK,
    GATE_COST = 8 /* element steps of one sigmoid */
};
_Static_assert(GROUP % BI_PANEL == 0, "a group's scores are whole panels");

static int32_t pad_panel(int32_t n) {
    return (n + BI_PANEL - 1) / BI_PANEL * BI_PANEL;
}

size_t BI_FN(bi_latent_block_bytes)(int32_t d_latent) {
    return sizeof(bi_bf16) * BR_PAGE_TOK * (size_t)pad_panel(d_latent);
}

static int class_of(int32_t position) {
    return (position >> BI_ATT_CLASS_SHIFT) & (BI_ATT_CLASSES - 1);
}

static bi_bf16 *latent_row(const bi_cache *cache, int32_t seq, int32_t position, int32_t d_latent) {
    bi_bf16 *block = (bi_bf16 *)bi_cache_block(cache, seq, position / BR_PAGE_TOK);
    return block + (size_t)(position % BR_PAGE_TOK) * (size_t)pad_panel(d_latent);
}

static void store_row(const void *args, int32_t t) {
    const bi_latent_store_args *a = args;
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
    int32_t *position;                   /* (n_select) class by class, ascending in each */
    bi_bf16 *panel;                      /* (d_score, 32) latent rows transposed, then packed into kf, ke */
    float *kf, *vf;                      /* (d_score, 32); (64, v_ld) packed latent rows of one block */
    int16_t *ke, *ve;
    float *score;                        /* (n_head, 64) of the group */
    float *m, *l, *acc;                  /* (class, n_head), (class, n_head), (class, n_head, d_value) */
    float *out;                          /* (d_value) */
    int32_t end[BI_ATT_CLASSES];         /* where each class's positions end */
    const bi_bf16 *row[GROUP];           /* latent rows of the group */
} work;

/* Lays a query's arrays out. */
static void carve(work *w, br_arena *arena, int32_t n_head, int32_t d_kv_latent, int32_t d_rope, int32_t n_select) {
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
    w->position = BR_ARENA_ARRAY(arena, int32_t, n_select);
    w->panel = BR_ARENA_ARRAY(arena, bi_bf16, d_score * BI_PANEL);
    w->kf = BR_ARENA_ARRAY(arena, float, d_score * BI_PANEL);
    w->ke = BR_ARENA_ARRAY(arena, int16_t, d_score * BI_PANEL);
    w->vf = BR_ARENA_ARRAY(arena, float, GROUP * (size_t)w->v_ld);
    w->ve = BR_ARENA_ARRAY(arena, int16_t, GROUP * (size_t)w->v_ld);
    w->score = BR_ARENA_ARRAY(arena, float, heads * GROUP);
    w->m = BR_ARENA_ARRAY(arena, float, BI_ATT_CLASSES * heads);
    w->l = BR_ARENA_ARRAY(arena, float, BI_ATT_CLASSES * heads);
    w->acc = BR_ARENA_ARRAY(arena, float, BI_ATT_CLASSES * heads * d_value);
    w->out = BR_ARENA_ARRAY(arena, float, d_value);
}

#ifdef BI_ISA_portable
bi_scratch bi_attn_scratch(const bi_limits *limits) {
    work w;
    br_arena measure = {0};
    carve(&w, &measure, limits->n_head, limits->d_kv_latent, limits->d_rope, limits->n_pos);
    return (bi_scratch){0, measure.used};
}
#endif

/* Sorts the row's positions by class: those of select, or 0 .. n - 1 when it is NULL. */
static void sort_by_class(work *w, const int32_t *select, int32_t n, int32_t own) {
    int32_t *end = w->end, sum = 0, before = -1;
    memset(end, 0, sizeof w->end);
    for (int32_t i = 0; i < n; i++) {
        int32_t position = select ? select[i] : i;
        BR_ASSERT(position > before && position <= own);
        before = position;
        end[class_of(position)]++;
    }
    for (int c = 0; c < BI_ATT_CLASSES; c++) {
        int32_t count = end[c];
        end[c] = sum;
        sum += count;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t position = select ? select[i] : i;
        w->position[end[class_of(position)]++] = position;
    }
}

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

/* score (n_head, 64) = RN(alpha * chain) of the group's n rows. Returns 0 when one is not finite. */
static int score_group(work *w, float alpha, int n) {
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

/* One head takes a block's n scores: m, l and R(e) of the block, and what is left of its accumulator. */
static void weigh(work *w, int c, int32_t h, const float *s, int n, int first_block) {
    size_t at = (size_t)c * (size_t)w->n_head + (size_t)h;
    float *acc = w->acc + at * (size_t)w->d_value;
    float e[GROUP], top = first_block ? s[0] : w->m[at];
    for (int i = 0; i < n; i++)
        top = s[i] > top ? s[i] : top;
    for (int i = 0; i < n; i++)
        e[i] = bi_exp(BI_SUB(s[i], top));
    for (int i = 0; i < n; i++)
        w->line[i] = bi_round(e[i]);
    BI_FN(bi_pack_row)(w->line, n, bi_pad_k(n), w->wf + (size_t)h * GROUP, w->we + (size_t)h * GROUP);
    if (first_block) {
        w->l[at] = bi_sum64(e, n);
        memset(acc, 0, sizeof *acc * (size_t)w->d_value);
    } else {
        float f = bi_exp(BI_SUB(w->m[at], top));
        w->l[at] = BI_FMA(w->l[at], f, bi_sum64(e, n));
        for (int32_t d = 0; d < w->d_value; d++)
            acc[d] = BI_MUL(acc[d], f);
    }
    w->m[at] = top;
}

/* A block of class c, entries first .. first + n - 1 of the group, joins the class. */
static void join_block(work *w, int c, int32_t d_kv_latent, int first, int n, int first_block) {
    int32_t d = w->d_value, n_k = bi_pad_k(n);
    for (int32_t h = 0; h < w->n_head; h++)
        weigh(w, c, h, w->score + (size_t)h * GROUP + first, n, first_block);
    size_t v_ld = (size_t)w->v_ld;
    for (int32_t i = 0; i < n; i++)
        BI_FN(bi_pack_row)(w->row[first + i], d_kv_latent, d, w->vf + (size_t)i * v_ld, w->ve + (size_t)i * v_ld);
    BI_FN(bi_pack_row)(w->zero, 0, (n_k - n) * w->v_ld, w->vf + (size_t)n * v_ld, w->ve + (size_t)n * v_ld);
    set_rows(w, w->wf, w->we, GROUP);
    float *acc = w->acc + (size_t)c * (size_t)w->n_head * (size_t)d;
    for (int32_t lane = 0; lane < d; lane += BI_PANEL)
        BI_FN(bi_chain_panel)(w->n_head, w->xf, w->xe, n_k, w->vf + lane, w->ve + lane, v_ld, acc + lane, (size_t)d);
}

/* Class lists are cut every 64 entries: the end of the block that begins at `begin`, itself a cut. */
static int32_t block_end(const work *w, int32_t begin) {
    int32_t end = w->end[class_of(w->position[begin])];
    return end - begin > BI_ATT_BLOCK ? begin + BI_ATT_BLOCK : end;
}

static int is_first_block(const work *w, int c, int32_t begin) {
    return begin == (c ? w->end[c - 1] : 0);
}

/* Takes every class list through scores, weights and values. Returns 0 when a score is not finite. */
static int attend(const bi_attn_args *a, work *w, int32_t seq, int32_t n) {
    int finite = 1;
    for (int32_t begin = 0, end; begin < n; begin = end) {
        end = block_end(w, begin);
        while (end < n && block_end(w, end) - begin <= GROUP)
            end = block_end(w, end);
        for (int32_t i = begin; i < end; i++)
            w->row[i - begin] = latent_row(&a->cache, seq, w->position[i], a->d_kv_latent + a->d_rope);
        finite &= score_group(w, a->alpha, end - begin);
        for (int32_t at = begin, stop; at < end; at = stop) {
            int c = class_of(w->position[at]);
            stop = block_end(w, at);
            join_block(w, c, a->d_kv_latent, at - begin, stop - at, is_first_block(w, c, at));
        }
    }
    return finite;
}

/* Merges the classes that have entries, in class order. */
static void merge(work *w, int32_t h, int32_t d_kv_latent, bi_bf16 *z) {
    int32_t d = w->d_value;
    size_t n_head = (size_t)w->n_head;
    float top = 0.0f, sum = 0.0f;
    int n_class = 0;
    for (size_t c = 0; c < BI_ATT_CLASSES; c++) {
        if (is_first_block(w, (int)c, w->end[c]))
            continue;
        float m = w->m[c * n_head + (size_t)h];
        top = n_class++ == 0 || m > top ? m : top;
    }
    memset(w->out, 0, sizeof *w->out * (size_t)d);
    for (size_t c = 0; c < BI_ATT_CLASSES; c++) {
        if (is_first_block(w, (int)c, w->end[c]))
            continue;
        size_t at = c * n_head + (size_t)h;
        float weight = bi_exp(BI_SUB(w->m[at], top));
        const float *acc = w->acc + at * (size_t)d;
        sum = BI_FMA(w->l[at], weight, sum);
        for (int32_t i = 0; i < d; i++)
            w->out[i] = BI_FMA(acc[i], weight, w->out[i]);
    }
    float inverse = BI_DIV(1.0f, sum);
    for (int32_t i = 0; i < d_kv_latent; i++)
        z[i] = bi_round(BI_MUL(w->out[i], inverse));
}

typedef struct attn_call {
    const bi_ctx *ctx;
    const bi_attn_args *a;
} attn_call;

static void attn_job(void *context, int t, int thread) {
    const attn_call *call = context;
    const bi_attn_args *a = call->a;
    const bi_seg *seg = &a->batch->seg[a->batch->row_seg[t]];
    int32_t own = seg->pos + t - seg->row;
    int32_t n = a->select ? a->n_select[t] : own + 1;
    work w;
    br_arena arena = bi_thread_arena(call->ctx, thread);
    carve(&w, &arena, a->n_head, a->d_kv_latent, a->d_rope, n);
    memset(w.zero, 0, sizeof *w.zero * (size_t)w.d_score);
    sort_by_class(&w, a->select ? a->select + (int64_t)t * a->select_ld : NULL, n, own);
    pack_query(a, &w, t);
    if (!attend(a, &w, seg->seq, n))
        bi_fault_check(&a->fault, t, INFINITY);
    for (int32_t h = 0; h < a->n_head; h++)
        merge(&w, h, a->d_kv_latent, a->z + ((int64_t)t * a->n_head + h) * a->d_kv_latent);
}

static br_status check_attn(const bi_limits *limits, const bi_attn_args *a) {
    if (a->n_head < 1 || a->d_kv_latent < 1 || a->d_rope < 0 || a->n_head > limits->n_head ||
        a->d_kv_latent > limits->d_kv_latent || a->d_rope > limits->d_rope)
        return br_fail(BR_E_SHAPE, "attn: %d heads of %d + %d: expected 1 to %d heads of 1 to %d + 0 to %d", a->n_head,
                       a->d_kv_latent, a->d_rope, limits->n_head, limits->d_kv_latent, limits->d_rope);
    for (int32_t t = 0; t < a->batch->n_row; t++) {
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
