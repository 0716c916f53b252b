/* bi_experts, bi_combine, oracle.      Contract: N-MOE, N-ACT, N-LORA, N-CHAIN
 *
 * Layer: kernels_batch_invariant. Compiled once an instruction set. (Row, choice) pairs are grouped by expert and cut into
 * tiles of up to 32; one job a tile, from the input rows to the expert's output rows, everything between in the thread's
 * scratch. The rows of a tile stand in the order of their adapter slots, so that the chains of one adapter run together.
 * Which pairs share a tile or a thread moves no bit: each element is one chain of its own. */
#include "bi_act.h"
#include "bi_lora_rows.h"

enum { TILE_ROWS = BI_LORA_ROWS };

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

/* A tile at work: its pairs sorted by slot, and the row of the op that each belongs to. */
typedef struct work {
    const bi_experts_args *args;
    int32_t expert, n_row, n_group;
    int32_t pair[TILE_ROWS], row[TILE_ROWS];
    bi_span group[TILE_ROWS];
    bi_packed x, h, t1, t3; /* input, activation, and T of two maps; T of w2 takes the place of t1 */
} work;

/* ---- scratch ------------------------------------------------------------------------------------------------------- */

static size_t shared_bytes(int32_t n_row, int32_t topk, int32_t n_expert) {
    size_t n_pair = (size_t)n_row * (size_t)topk, n_tile = (size_t)n_expert + n_pair / TILE_ROWS;
    return n_pair * sizeof(int32_t) + n_tile * sizeof(tile) + ((size_t)n_expert + 1) * sizeof(int32_t);
}

static size_t thread_bytes(int32_t d, int32_t d_ff, int32_t rank) {
    return (size_t)TILE_ROWS * BI_PACKED_BYTES * (size_t)(bi_pad_k(d) + bi_pad_k(d_ff) + 2 * bi_pad_rank(rank));
}

#ifdef BI_ISA_portable
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
    bi_packed *part[4] = {&w->x, &w->h, &w->t1, &w->t3};
    const int32_t width[4] = {bi_pad_k(a->d), bi_pad_k(a->d_ff), bi_pad_rank(rank), bi_pad_rank(rank)};
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

static bi_lora_map lora_of(const bi_experts_args *a, const bi_adapter *slot, int32_t expert) {
    return (bi_lora_map){slot, a->n_expert, expert};
}

/* Takes the tile's pairs in the order of their slots and packs their input rows. */
static void gather(const experts_run *run, const tile *of, work *w) {
    const bi_experts_args *a = run->args;
    int32_t slot[TILE_ROWS];
    w->expert = of->expert;
    w->n_row = of->end - of->begin;
    for (int32_t i = 0; i < w->n_row; i++) {
        w->pair[i] = run->pair[of->begin + i];
        slot[i] = slot_of(a, w->pair[i]);
    }
    bi_lora_sort(w->pair, slot, w->n_row);
    w->n_group = bi_lora_cut(slot, w->n_row, TILE_ROWS, w->group);
    for (int32_t i = 0; i < w->n_row; i++) {
        w->row[i] = w->pair[i] / a->topk;
        bi_packed to = bi_packed_from(w->x, i);
        BI_FN(bi_pack_row)(a->x + (size_t)w->row[i] * (size_t)a->d, a->d, (int32_t)to.ld, to.f, to.e);
    }
}

static void make_t(const work *w, bi_packed x, const bi_adapter *slot, bi_packed t) {
    for (int32_t g = 0; g < w->n_group; g++)
        bi_lora_t(lora_of(w->args, slot, w->expert), x, t, w->group[g], w->row, &w->args->fault);
}

/* One panel of a map for all rows of the tile. */
static void chain_panel(const work *w, bi_packed x, const bi_mat *map, const bi_adapter *slot, bi_packed t, int32_t panel,
                        float acc[TILE_ROWS][BI_PANEL]) {
    bi_lora_panel(map, lora_of(w->args, slot, w->expert), x, t, w->group, w->n_group, 0, w->n_row, panel, acc);
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
        chain_panel(w, w->x, &a->w1, a->lora1, w->t1, panel, g);
        chain_panel(w, w->x, &a->w3, a->lora3, w->t3, panel, u);
        for (int32_t i = 0; i < w->n_row; i++) {
            bi_packed to = bi_packed_from(w->h, i);
            act_row(&a->act, g[i], u[i], BI_PANEL, h);
            BI_FN(bi_pack_row)(h, width, bi_pad_k(width), to.f + first, to.e + first);
        }
    }
}

static void down(const work *w) {
    const bi_experts_args *a = w->args;
    for (int32_t panel = 0; panel < bi_panel_count(a->d); panel++) {
        float acc[TILE_ROWS][BI_PANEL];
        int32_t first = panel * BI_PANEL, width = a->d - first < BI_PANEL ? a->d - first : BI_PANEL;
        chain_panel(w, w->h, &a->w2, a->lora2, w->t1, panel, acc);
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
    make_t(&w, w.x, a->lora1, w.t1);
    make_t(&w, w.x, a->lora3, w.t3);
    gate_and_up(&w);
    make_t(&w, w.h, a->lora2, w.t1);
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

static br_status check_map(const bi_mat *map, const char *name, int32_t n_out, int32_t n_in) {
    if (!map->data || map->n_out != n_out || map->n_in != n_in)
        return br_fail(BR_E_SHAPE, "experts: %s is (%d, %d): expected (%d, %d)", name, map->n_out, map->n_in, n_out, n_in);
    return BR_OK;
}

static br_status check_lora(const bi_ctx *ctx, const bi_experts_args *a, int32_t slot) {
    BR_TRY(bi_lora_check(ctx, "experts: w1", lora_of(a, a->lora1, 0), slot, a->d_ff, a->d));
    BR_TRY(bi_lora_check(ctx, "experts: w3", lora_of(a, a->lora3, 0), slot, a->d_ff, a->d));
    return bi_lora_check(ctx, "experts: w2", lora_of(a, a->lora2, 0), slot, a->d, a->d_ff);
}

static br_status check_choice(const bi_experts_args *a, int32_t pair) {
    int32_t e = a->expert[pair];
    if (e < 0 || e >= a->n_expert)
        return br_fail(BR_E_SHAPE, "experts: row %d chose expert %d: expected 0 to %d", pair / a->topk, e, a->n_expert - 1);
    return BR_OK;
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
    BR_TRY(check_map(&a->w1, "w1", a->d_ff, a->d));
    BR_TRY(check_map(&a->w3, "w3", a->d_ff, a->d));
    BR_TRY(check_map(&a->w2, "w2", a->d, a->d_ff));
    for (int32_t i = 0; i < a->n_row * a->topk; i++)
        BR_TRY(check_choice(a, i));
    for (int32_t t = 0; a->row_slot && t < a->n_row; t++)
        if (t == 0 || a->row_slot[t] != a->row_slot[t - 1])
            BR_TRY(check_lora(ctx, a, a->row_slot[t]));
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
