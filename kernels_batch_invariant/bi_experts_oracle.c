/* bi_experts, bi_combine, oracle.      Contract: N-MOE, N-ACT, N-LORA, N-CHAIN
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. (Row, choice) pairs are grouped by expert and cut into
 * tiles of up to 32; one job a tile, from the input rows to the expert's output rows, everything between in the thread's
 * scratch. The rows of a tile stand in the order of their adapter slots, so that the chains of one adapter run together.
 * Which pairs share a tile or a thread moves no bit: each element is one chain of its own. */
#include "bi_gemm.h"
#include "bi_oracle.h"
#include "bi_rows.h"

#include "bi_act.h"

enum {
    TILE_ROWS = 32,
    PACKED = sizeof(float) + sizeof(int16_t) /* bytes of one packed value */
};

typedef struct tile {
    int32_t expert, begin, end; /* places in experts_run.pair */
} tile;

typedef struct experts_run {
    bi_ctx *ctx;
    const bi_experts_args *args;
    int32_t *pair; /* row * topk + choice, grouped by expert */
    tile *tile;
    int32_t n_tile;
} experts_run;

/* Packed rows: (n_row, ld) values and exponents. */
typedef struct packed {
    float *f;
    int16_t *e;
    size_t ld;
} packed;

/* A tile at work. Rows group[g] .. group[g + 1] - 1 have one slot. */
typedef struct work {
    const bi_experts_args *args;
    int32_t expert, n_row;
    int32_t pair[TILE_ROWS];
    int32_t slot[TILE_ROWS], group[TILE_ROWS + 1], n_group;
    packed x, h, t1, t3; /* input, activation, and T of two maps; T of w2 takes the place of t1 */
} work;

/* ---- scratch ------------------------------------------------------------------------------------------------------- */

static size_t shared_bytes(int32_t n_row, int32_t topk, int32_t n_expert) {
    size_t n_pair = (size_t)n_row * (size_t)topk, n_tile = (size_t)n_expert + n_pair / TILE_ROWS;
    return n_pair * sizeof(int32_t) + n_tile * sizeof(tile) + ((size_t)n_expert + 1) * sizeof(int32_t);
}

static size_t thread_bytes(int32_t d, int32_t d_ff, int32_t rank) {
    return (size_t)TILE_ROWS * PACKED * (size_t)(bi_pad_k(d) + bi_pad_k(d_ff) + 2 * bi_pad_k(rank));
}

#define BI_IS_portable 1
#if BI_JOIN(BI_IS, BI_ISA) /* the portable copy alone */
bi_scratch bi_experts_scratch(const bi_limits *limits) {
    bi_scratch need = {shared_bytes(limits->n_row, limits->n_expert_topk, limits->n_expert),
                       thread_bytes(limits->d_expert, limits->d_expert_ff, limits->rank)};
    return need;
}
#endif

/* All values first, then all exponents: every part stays aligned. */
static void place_scratch(const experts_run *run, int thread, work *w) {
    const bi_experts_args *a = run->args;
    int32_t rank = run->ctx->limits.rank;
    float *f = (float *)bi_thread_scratch(run->ctx, thread, thread_bytes(a->d, a->d_ff, rank));
    packed *part[4] = {&w->x, &w->h, &w->t1, &w->t3};
    const int32_t width[4] = {bi_pad_k(a->d), bi_pad_k(a->d_ff), bi_pad_k(rank), bi_pad_k(rank)};
    for (int i = 0; i < 4; i++) {
        part[i]->f = f;
        part[i]->ld = (size_t)width[i];
        f += (size_t)TILE_ROWS * part[i]->ld;
    }
    int16_t *e = (int16_t *)f;
    for (int i = 0; i < 4; i++) {
        part[i]->e = e;
        e += (size_t)TILE_ROWS * part[i]->ld;
    }
}

/* ---- one tile ------------------------------------------------------------------------------------------------------ */

static int32_t slot_of(const bi_experts_args *a, int32_t pair) {
    return a->row_slot ? a->row_slot[pair / a->topk] : -1;
}

/* The adapter of a slot on one map of an expert, NULL when it leaves the map alone. */
static const bi_adapter *adapter_of(const bi_experts_args *a, const bi_adapter *lora, int32_t slot, int32_t expert) {
    if (!lora || slot < 0)
        return NULL;
    const bi_adapter *adapter = &lora[(size_t)slot * (size_t)a->n_expert + (size_t)expert];
    return adapter->a.data ? adapter : NULL;
}

/* Takes the tile's pairs in the order of their slots and packs their input rows. */
static void gather(const experts_run *run, const tile *of, work *w) {
    const bi_experts_args *a = run->args;
    w->expert = of->expert;
    w->n_row = of->end - of->begin;
    w->n_group = 0;
    for (int32_t i = 0; i < w->n_row; i++) {
        int32_t pair = run->pair[of->begin + i], slot = slot_of(a, pair), place = i;
        for (; place > 0 && w->slot[place - 1] > slot; place--) {
            w->slot[place] = w->slot[place - 1];
            w->pair[place] = w->pair[place - 1];
        }
        w->slot[place] = slot;
        w->pair[place] = pair;
    }
    for (int32_t i = 0; i < w->n_row; i++) {
        if (i == 0 || w->slot[i] != w->slot[i - 1])
            w->group[w->n_group++] = i;
        size_t at = (size_t)i * w->x.ld;
        const bi_bf16 *x = a->x + (size_t)(w->pair[i] / a->topk) * (size_t)a->d;
        BI_FN(bi_pack_row)(x, a->d, (int32_t)w->x.ld, w->x.f + at, w->x.e + at);
    }
    w->group[w->n_group] = w->n_row;
}

/* T = R(RN(s * chain(x, A))) of rows begin .. end - 1, packed and padded with zeros to whole k-blocks. */
static void make_t(const work *w, const packed *x, const bi_adapter *adapter, int32_t begin, int32_t end, const packed *t) {
    int32_t rank = adapter->a.n_out;
    for (int32_t first = 0; first < rank; first += BI_PANEL) {
        float acc[TILE_ROWS][BI_PANEL] = {{0}};
        int32_t width = rank - first < BI_PANEL ? rank - first : BI_PANEL, panel = first / BI_PANEL;
        size_t at = (size_t)begin * x->ld;
        bi_gemm_rows(end - begin, x->f + at, x->e + at, x->ld, &adapter->a, panel, panel + 1, acc[0], BI_PANEL);
        for (int32_t i = begin; i < end; i++) {
            bi_bf16 rounded[BI_PANEL];
            for (int32_t l = 0; l < width; l++) {
                rounded[l] = bi_round(BI_MUL(adapter->s, acc[i - begin][l]));
                bi_fault_check(&w->args->fault, w->pair[i] / w->args->topk, bi_widen(rounded[l]));
            }
            at = (size_t)i * t->ld + (size_t)first;
            BI_FN(bi_pack_row)(rounded, width, bi_pad_k(width), t->f + at, t->e + at);
        }
    }
}

static void make_all_t(const work *w, const packed *x, const bi_adapter *lora, const packed *t) {
    for (int32_t g = 0; g < w->n_group; g++) {
        const bi_adapter *adapter = adapter_of(w->args, lora, w->slot[w->group[g]], w->expert);
        if (adapter)
            make_t(w, x, adapter, w->group[g], w->group[g + 1], t);
    }
}

/* One panel of a map for all rows of the tile: the base chain, continued group by group through B. */
static void chain_panel(const work *w, const packed *x, const bi_mat *map, const bi_adapter *lora, const packed *t,
                        int32_t panel, float acc[TILE_ROWS][BI_PANEL]) {
    memset(acc, 0, sizeof *acc * (size_t)w->n_row);
    bi_gemm_rows(w->n_row, x->f, x->e, x->ld, map, panel, panel + 1, acc[0], BI_PANEL);
    for (int32_t g = 0; g < w->n_group; g++) {
        int32_t begin = w->group[g], end = w->group[g + 1];
        const bi_adapter *adapter = adapter_of(w->args, lora, w->slot[begin], w->expert);
        size_t at = (size_t)begin * t->ld;
        if (adapter)
            bi_gemm_rows(end - begin, t->f + at, t->e + at, t->ld, &adapter->b, panel, panel + 1, acc[begin], BI_PANEL);
    }
}

static inline void act_row(const bi_act *act, const float *restrict g, const float *restrict u, int32_t n,
                           bi_bf16 *restrict h) {
    if (act->situ)
        for (int32_t l = 0; l < n; l++)
            h[l] = bi_act_situ(g[l], u[l], act->beta, act->linear_beta);
    else
        for (int32_t l = 0; l < n; l++)
            h[l] = bi_act_silu(g[l], u[l]);
}

/* h = act(gate, up), panel by panel straight into its packed form. */
static void gate_and_up(const work *w) {
    const bi_experts_args *a = w->args;
    for (int32_t panel = 0; panel < bi_panel_count(a->d_ff); panel++) {
        float g[TILE_ROWS][BI_PANEL], u[TILE_ROWS][BI_PANEL];
        bi_bf16 h[BI_PANEL];
        int32_t first = panel * BI_PANEL, width = a->d_ff - first < BI_PANEL ? a->d_ff - first : BI_PANEL;
        chain_panel(w, &w->x, &a->w1[w->expert], a->lora1, &w->t1, panel, g);
        chain_panel(w, &w->x, &a->w3[w->expert], a->lora3, &w->t3, panel, u);
        for (int32_t i = 0; i < w->n_row; i++) {
            size_t at = (size_t)i * w->h.ld + (size_t)first;
            act_row(&a->act, g[i], u[i], BI_PANEL, h);
            BI_FN(bi_pack_row)(h, width, bi_pad_k(width), w->h.f + at, w->h.e + at);
        }
    }
}

static void down(const work *w) {
    const bi_experts_args *a = w->args;
    for (int32_t panel = 0; panel < bi_panel_count(a->d); panel++) {
        float acc[TILE_ROWS][BI_PANEL];
        int32_t first = panel * BI_PANEL, width = a->d - first < BI_PANEL ? a->d - first : BI_PANEL;
        chain_panel(w, &w->h, &a->w2[w->expert], a->lora2, &w->t1, panel, acc);
        for (int32_t i = 0; i < w->n_row; i++)
            bi_round_row(a->y + (size_t)w->pair[i] * (size_t)a->d + first, acc[i], width);
    }
}

static void tile_job(void *context, int job, int thread) {
    const experts_run *run = context;
    const bi_experts_args *a = run->args;
    work w = {.args = a};
    place_scratch(run, thread, &w);
    gather(run, &run->tile[job], &w);
    make_all_t(&w, &w.x, a->lora1, &w.t1);
    make_all_t(&w, &w.x, a->lora3, &w.t3);
    gate_and_up(&w);
    make_all_t(&w, &w.h, a->lora2, &w.t1);
    down(&w);
}

/* ---- the op -------------------------------------------------------------------------------------------------------- */

/* Counting sort of the pairs by expert, then tiles. offset (n_expert + 1): scratch. */
static void group_pairs(experts_run *run, int32_t *offset) {
    const bi_experts_args *a = run->args;
    int32_t n_pair = a->n_row * a->topk;
    memset(offset, 0, sizeof *offset * ((size_t)a->n_expert + 1));
    for (int32_t i = 0; i < n_pair; i++)
        offset[a->expert[i] + 1]++;
    run->n_tile = 0;
    for (int32_t e = 0; e < a->n_expert; e++) {
        int32_t begin = offset[e], end = begin + offset[e + 1];
        for (int32_t at = begin; at < end; at += TILE_ROWS)
            run->tile[run->n_tile++] = (tile){e, at, end - at < TILE_ROWS ? end : at + TILE_ROWS};
        offset[e + 1] = end;
    }
    for (int32_t i = 0; i < n_pair; i++)
        run->pair[offset[a->expert[i]]++] = i;
}

static br_status check_map(const bi_mat *map, const char *name, int32_t expert, int32_t n_out, int32_t n_in) {
    if (!map->data || map->n_out != n_out || map->n_in != n_in)
        return br_fail(BR_E_SHAPE, "experts: %s of expert %d is (%d, %d): expected (%d, %d)", name, expert, map->n_out,
                       map->n_in, n_out, n_in);
    return BR_OK;
}

static br_status check_adapter(const bi_ctx *ctx, const bi_adapter *adapter, int32_t expert, int32_t n_out, int32_t n_in) {
    if (!adapter)
        return BR_OK;
    const bi_mat *a = &adapter->a, *b = &adapter->b;
    if (!b->data || a->n_in != n_in || b->n_out != n_out || a->n_out != b->n_in || a->n_out < 1 ||
        bi_pad_k(a->n_out) > bi_pad_k(ctx->limits.rank))
        return br_fail(BR_E_SHAPE,
                       "experts: A (%d, %d), B (%d, %d) on a map (%d, %d) of expert %d: expected a rank of 1 to %d",
                       a->n_out, a->n_in, b->n_out, b->n_in, n_out, n_in, expert, bi_pad_k(ctx->limits.rank));
    return BR_OK;
}

static br_status check_pair(const bi_ctx *ctx, const bi_experts_args *a, int32_t pair) {
    int32_t e = a->expert[pair], slot = slot_of(a, pair);
    if (e < 0 || e >= a->n_expert)
        return br_fail(BR_E_SHAPE, "experts: row %d chose expert %d of %d", pair / a->topk, e, a->n_expert);
    BR_TRY(check_map(&a->w1[e], "w1", e, a->d_ff, a->d));
    BR_TRY(check_map(&a->w3[e], "w3", e, a->d_ff, a->d));
    BR_TRY(check_map(&a->w2[e], "w2", e, a->d, a->d_ff));
    BR_TRY(check_adapter(ctx, adapter_of(a, a->lora1, slot, e), e, a->d_ff, a->d));
    BR_TRY(check_adapter(ctx, adapter_of(a, a->lora3, slot, e), e, a->d_ff, a->d));
    return check_adapter(ctx, adapter_of(a, a->lora2, slot, e), e, a->d, a->d_ff);
}

static br_status check_args(const bi_ctx *ctx, const bi_experts_args *a) {
    const bi_limits *l = &ctx->limits;
    if (a->n_row < 0 || a->n_row > l->n_row || a->topk < 1 || a->topk > l->n_expert_topk || a->n_expert < 1 ||
        a->n_expert > l->n_expert)
        return br_fail(BR_E_SHAPE, "experts: %d rows, %d of %d experts: expected 0 to %d, 1 to %d, 1 to %d", a->n_row,
                       a->topk, a->n_expert, l->n_row, l->n_expert_topk, l->n_expert);
    if (a->d < 1 || a->d > l->d_expert || a->d_ff < 1 || a->d_ff > l->d_expert_ff)
        return br_fail(BR_E_SHAPE, "experts: widths %d and %d: expected 1 to %d, 1 to %d", a->d, a->d_ff, l->d_expert,
                       l->d_expert_ff);
    for (int32_t i = 0; i < a->n_row * a->topk; i++)
        BR_TRY(check_pair(ctx, a, i));
    return BR_OK;
}

br_status BI_FN(bi_experts)(bi_ctx *ctx, const bi_experts_args *a) {
    BR_TRY(check_args(ctx, a));
    size_t n_pair = (size_t)a->n_row * (size_t)a->topk;
    experts_run run = {.ctx = ctx, .args = a};
    run.pair = (int32_t *)bi_shared_scratch(ctx, shared_bytes(a->n_row, a->topk, a->n_expert));
    run.tile = (tile *)(run.pair + n_pair);
    group_pairs(&run, (int32_t *)(run.tile + (size_t)a->n_expert + n_pair / TILE_ROWS));
    br_pool_run(ctx->pool, tile_job, &run, run.n_tile);
    return BR_OK;
}

/* ---- combine ------------------------------------------------------------------------------------------------------- */

static void combine_row(const void *args, int32_t t) {
    const bi_combine_args *a = args;
    const bi_bf16 *e = a->e + (size_t)t * (size_t)a->topk * (size_t)a->d;
    const float *p = a->p + (size_t)t * (size_t)a->topk;
    enum { CHUNK = 256 };
    for (int32_t first = 0; first < a->d; first += CHUNK) {
        float acc[CHUNK] = {0};
        int32_t n = a->d - first < CHUNK ? a->d - first : CHUNK;
        for (int32_t i = 0; i < a->topk; i++) {
            const bi_bf16 *from = e + (size_t)i * (size_t)a->d + first;
            for (int32_t c = 0; c < n; c++)
                acc[c] = BI_FMA(p[i], bi_widen(from[c]), acc[c]);
        }
        bi_round_row(a->y + (size_t)t * (size_t)a->d + first, acc, n);
    }
}

br_status BI_FN(bi_combine)(bi_ctx *ctx, const bi_combine_args *a) {
    if (a->n_row < 0 || a->d < 1 || a->topk < 1)
        return br_fail(BR_E_SHAPE, "combine: %d rows of %d from %d experts: expected n_row >= 0, d >= 1, topk >= 1",
                       a->n_row, a->d, a->topk);
    bi_rows_run(ctx, combine_row, a, a->n_row, (int64_t)a->d * a->topk);
    return BR_OK;
}
