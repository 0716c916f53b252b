/* Gradients of the routed experts, host form.      Contract: N-MOE-1, N-ACT, N-LORA
 *
 * Layer: kernels_batch_invariant. The (row, choice) pairs are sorted by expert and adapter slot, stable. One job an expert: it owns
 * the sums of the expert's da and db, and goes through its pairs in tiles of one slot; what each pair adds to dx is kept, and
 * summed by row at the end, choices rising. */
#include "bi_grad_dense_host.h"

enum {
    TILE = 64, /* pairs that share one pass over an expert's weights */
    SUM_COLS = 256
};

typedef enum map_name { MAP_1, MAP_3, MAP_2, MAPS } map_name;

typedef struct experts_run {
    const bi_grad_experts_args *args;
    bi_grad_ctx *ctx;
    size_t low_ld;
    int32_t n_key;   /* slots and base, of one expert */
    int32_t *offset; /* (n_expert * n_key + 1): where the pairs of an expert and slot begin */
    int32_t *pair;   /* (n_row * topk) */
    double *dx;      /* (n_row * topk, d), by pair */
    bi_mat w[MAPS];
    const bi_adapter *lora[MAPS];
    const bi_grad_adapter *want[MAPS];
} experts_run;

/* A tile at work. Arrays are (TILE, width); sums (rank, n_in) and (n_out, rank) of one slot. */
typedef struct work {
    grad_piece *piece;
    int32_t n, expert, slot;
    const int32_t *pair;
    double *x, *dy, *dx;               /* width d */
    double *g, *u, *h, *dh;            /* width d_ff; dg and du take the place of g and u */
    double *t[MAPS], *down[MAPS];      /* width rank: s A x, and s dy B */
    double *da[MAPS], *db[MAPS];
} work;

/* ---- scratch --------------------------------------------------------------------------------------------------------- */

static size_t low_ld(const bi_limits *limits) {
    return (size_t)(limits->rank > 0 ? bi_pad_rank(limits->rank) : 0);
}

static size_t n_in_of(const bi_grad_experts_args *a, int map) {
    return (size_t)(map == MAP_2 ? a->d_ff : a->d);
}
static size_t n_out_of(const bi_grad_experts_args *a, int map) {
    return (size_t)(map == MAP_2 ? a->d : a->d_ff);
}

static void place_work(work *w, br_arena *arena, size_t d, size_t d_ff, size_t low) {
    double **const wide[] = {&w->x, &w->dy, &w->dx, &w->g, &w->u, &w->h, &w->dh};
    w->piece = BR_ARENA_ARRAY(arena, grad_piece, 1);
    for (int i = 0; i < 7; i++)
        *wide[i] = BR_ARENA_ARRAY(arena, double, TILE * (i < 3 ? d : d_ff));
    for (int m = 0; m < MAPS; m++) {
        w->t[m] = BR_ARENA_ARRAY(arena, double, TILE * low);
        w->down[m] = BR_ARENA_ARRAY(arena, double, TILE * low);
        w->da[m] = BR_ARENA_ARRAY(arena, double, low * (m == MAP_2 ? d_ff : d));
        w->db[m] = BR_ARENA_ARRAY(arena, double, low * (m == MAP_2 ? d : d_ff));
    }
}

static void place_run(experts_run *run, br_arena *arena, size_t n_row, size_t topk, size_t n_expert, size_t n_key, size_t d) {
    run->offset = BR_ARENA_ARRAY(arena, int32_t, n_expert * n_key + 1);
    run->pair = BR_ARENA_ARRAY(arena, int32_t, n_row * topk);
    run->dx = BR_ARENA_ARRAY(arena, double, n_row * topk * d);
}

bi_grad_scratch bi_grad_experts_host_scratch(const bi_limits *limits) {
    br_arena shared = {0}, thread = {0};
    experts_run run;
    work w;
    if (limits->n_expert < 1)
        return (bi_grad_scratch){0, 0};
    place_run(&run, &shared, (size_t)limits->n_row, (size_t)limits->n_expert_topk, (size_t)limits->n_expert, (size_t)limits->n_slot + 1,
              (size_t)limits->d_expert);
    place_work(&w, &thread, (size_t)limits->d_expert, (size_t)limits->d_expert_ff, low_ld(limits));
    return (bi_grad_scratch){shared.used + 64, thread.used + 64};
}

/* ---- the order of the pairs ------------------------------------------------------------------------------------------ */

static int32_t key_of(const experts_run *run, int32_t pair) {
    const bi_grad_experts_args *a = run->args;
    return a->expert[pair] * run->n_key + (a->row_slot ? a->row_slot[pair / a->topk] + 1 : 0);
}

/* Counting sort; offset ends as the begin of each key. */
static void sort_pairs(experts_run *run) {
    const bi_grad_experts_args *a = run->args;
    const int32_t n_pair = a->n_row * a->topk, n_key = a->n_expert * run->n_key;
    memset(run->offset, 0, sizeof *run->offset * ((size_t)n_key + 1));
    for (int32_t i = 0; i < n_pair; i++)
        run->offset[key_of(run, i) + 1]++;
    for (int32_t k = 0; k < n_key; k++)
        run->offset[k + 1] += run->offset[k];
    for (int32_t i = 0; i < n_pair; i++)
        run->pair[run->offset[key_of(run, i)]++] = i;
    memmove(run->offset + 1, run->offset, sizeof *run->offset * (size_t)n_key);
    run->offset[0] = 0;
}

/* ---- one tile -------------------------------------------------------------------------------------------------------- */

static const bi_adapter *adapter_of(const experts_run *run, const work *w, int map) {
    return grad_adapter(run->lora[map], w->slot);
}

static void clear(double *x, size_t n) {
    memset(x, 0, sizeof *x * n);
}

static void scale_rows(double *x, int32_t n, size_t ld, double s) {
    for (size_t i = 0; i < (size_t)n * ld; i++)
        x[i] *= s;
}

/* t = s A x of a map. */
static void make_t(const experts_run *run, work *w, int map, const double *x) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    if (!adapter)
        return;
    const bi_mat a = bi_mat_at(&adapter->a, w->expert);
    clear(w->t[map], TILE * run->low_ld);
    grad_times_wt(w->piece, w->n, x, n_in_of(run->args, map), &a, w->t[map], run->low_ld);
    scale_rows(w->t[map], w->n, run->low_ld, (double)adapter->s[w->expert]);
}

/* down = s dy B of a map. */
static void make_down(const experts_run *run, work *w, int map, const double *dy) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    if (!adapter)
        return;
    const bi_mat b = bi_mat_at(&adapter->b, w->expert);
    clear(w->down[map], TILE * run->low_ld);
    grad_times_w(w->piece, w->n, dy, n_out_of(run->args, map), &b, w->down[map], run->low_ld);
    scale_rows(w->down[map], w->n, run->low_ld, (double)adapter->s[w->expert]);
}

/* y = x W^T + t B^T. */
static void forward(const experts_run *run, work *w, int map, const double *x, double *y) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    const bi_mat one = bi_mat_at(&run->w[map], w->expert);
    const size_t n_out = n_out_of(run->args, map);
    clear(y, (size_t)w->n * n_out);
    grad_times_wt(w->piece, w->n, x, n_in_of(run->args, map), &one, y, n_out);
    if (!adapter)
        return;
    const bi_mat b = bi_mat_at(&adapter->b, w->expert);
    grad_times_wt(w->piece, w->n, w->t[map], run->low_ld, &b, y, n_out);
}

/* dx += dy W + down A. */
static void backward(const experts_run *run, work *w, int map, const double *dy, double *dx) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    const bi_mat one = bi_mat_at(&run->w[map], w->expert);
    const size_t n_in = n_in_of(run->args, map);
    grad_times_w(w->piece, w->n, dy, n_out_of(run->args, map), &one, dx, n_in);
    if (!adapter)
        return;
    const bi_mat a = bi_mat_at(&adapter->a, w->expert);
    grad_times_w(w->piece, w->n, w->down[map], run->low_ld, &a, dx, n_in);
}

/* da += down^T x, db += dy^T t. */
static void add_sums(const experts_run *run, work *w, int map, const double *x, const double *dy) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    if (!adapter || !run->want[map])
        return;
    const int32_t rank = adapter->a.n_out, n_in = (int32_t)n_in_of(run->args, map), n_out = (int32_t)n_out_of(run->args, map);
    if (run->want[map][w->slot].da)
        grad_product(rank, n_in, w->n, w->down[map], 1, run->low_ld, x, (size_t)n_in, w->da[map], (size_t)n_in);
    if (run->want[map][w->slot].db)
        grad_product(n_out, rank, w->n, dy, 1, (size_t)n_out, w->t[map], run->low_ld, w->db[map], run->low_ld);
}

static void gather(const experts_run *run, work *w) {
    const bi_grad_experts_args *a = run->args;
    const size_t d = (size_t)a->d;
    for (size_t i = 0; i < (size_t)w->n; i++) {
        const size_t pair = (size_t)w->pair[i];
        const bi_bf16 *x = a->x + pair / (size_t)a->topk * d;
        const float *dy = a->dy + pair * d;
        for (size_t c = 0; c < d; c++) {
            w->x[i * d + c] = bi_wide(x[c]);
            w->dy[i * d + c] = (double)dy[c];
        }
    }
}

static void act_slopes(const experts_run *run, work *w) {
    const size_t n = (size_t)w->n * (size_t)run->args->d_ff;
    for (size_t i = 0; i < n; i++) {
        const grad_act slope = grad_act_of(&run->args->act, w->g[i], w->u[i], w->dh[i]);
        w->h[i] = slope.h;
        w->g[i] = slope.dg;
        w->u[i] = slope.du;
    }
}

static void run_tile(const experts_run *run, work *w) {
    const bi_grad_experts_args *a = run->args;
    gather(run, w);
    make_t(run, w, MAP_1, w->x);
    make_t(run, w, MAP_3, w->x);
    forward(run, w, MAP_1, w->x, w->g);
    forward(run, w, MAP_3, w->x, w->u);
    make_down(run, w, MAP_2, w->dy);
    clear(w->dh, (size_t)w->n * (size_t)a->d_ff);
    backward(run, w, MAP_2, w->dy, w->dh);
    act_slopes(run, w);
    make_t(run, w, MAP_2, w->h);
    make_down(run, w, MAP_1, w->g);
    make_down(run, w, MAP_3, w->u);
    add_sums(run, w, MAP_1, w->x, w->g);
    add_sums(run, w, MAP_3, w->x, w->u);
    add_sums(run, w, MAP_2, w->h, w->dy);
    if (!a->dx)
        return;
    clear(w->dx, (size_t)w->n * (size_t)a->d);
    backward(run, w, MAP_1, w->g, w->dx);
    backward(run, w, MAP_3, w->u, w->dx);
    for (size_t i = 0; i < (size_t)w->n; i++)
        memcpy(run->dx + (size_t)w->pair[i] * (size_t)a->d, w->dx + i * (size_t)a->d, sizeof(double) * (size_t)a->d);
}

/* ---- one expert ------------------------------------------------------------------------------------------------------ */

static void clear_sums(const experts_run *run, work *w) {
    for (int m = 0; m < MAPS; m++) {
        clear(w->da[m], run->low_ld * n_in_of(run->args, m));
        clear(w->db[m], run->low_ld * n_out_of(run->args, m));
    }
}

static void put_sums(const experts_run *run, const work *w, int map) {
    const bi_adapter *adapter = adapter_of(run, w, map);
    if (!adapter || !run->want[map])
        return;
    const size_t rank = (size_t)adapter->a.n_out, n_in = n_in_of(run->args, map), n_out = n_out_of(run->args, map);
    float *da = run->want[map][w->slot].da, *db = run->want[map][w->slot].db;
    for (size_t i = 0; da && i < rank * n_in; i++)
        da[(size_t)w->expert * rank * n_in + i] = (float)w->da[map][i];
    for (size_t o = 0; db && o < n_out; o++)
        for (size_t r = 0; r < rank; r++)
            db[((size_t)w->expert * n_out + o) * rank + r] = (float)w->db[map][o * run->low_ld + r];
}

/* Of an expert that no row uses. */
static void put_zeros(const experts_run *run, size_t expert) {
    for (int m = 0; m < MAPS; m++)
        for (int32_t slot = 0; run->want[m] && slot < run->args->n_slot; slot++) {
            const size_t rank = (size_t)run->lora[m][slot].a.n_out, n_a = rank * n_in_of(run->args, m), n_b = rank * n_out_of(run->args, m);
            if (run->want[m][slot].da)
                memset(run->want[m][slot].da + expert * n_a, 0, sizeof(float) * n_a);
            if (run->want[m][slot].db)
                memset(run->want[m][slot].db + expert * n_b, 0, sizeof(float) * n_b);
        }
}

static void expert_job(void *context, int expert, int thread) {
    const experts_run *run = context;
    const bi_grad_experts_args *a = run->args;
    br_arena arena = bi_grad_thread_arena(run->ctx, thread);
    work w = {.expert = expert};
    if (run->offset[expert * run->n_key] == run->offset[(expert + 1) * run->n_key]) {
        put_zeros(run, (size_t)expert);
        return;
    }
    place_work(&w, &arena, (size_t)a->d, (size_t)a->d_ff, run->low_ld);
    for (int32_t key = 0; key < run->n_key; key++) {
        const int32_t *offset = run->offset + expert * run->n_key + key;
        w.slot = key - 1;
        clear_sums(run, &w);
        for (int32_t at = offset[0]; at < offset[1]; at += TILE) {
            w.pair = run->pair + at;
            w.n = grad_least(TILE, offset[1] - at);
            run_tile(run, &w);
        }
        for (int m = 0; m < MAPS; m++)
            put_sums(run, &w, m);
    }
}

static void sum_job(void *context, int t, int thread) {
    (void)thread;
    const experts_run *run = context;
    const bi_grad_experts_args *a = run->args;
    const double *from = run->dx + (size_t)t * (size_t)a->topk * (size_t)a->d;
    for (int32_t first = 0; first < a->d; first += SUM_COLS) {
        const int32_t n = grad_least(SUM_COLS, a->d - first);
        double sum[SUM_COLS] = {0};
        for (int32_t i = 0; i < a->topk; i++)
            for (int32_t c = 0; c < n; c++)
                sum[c] += from[(size_t)i * (size_t)a->d + (size_t)(first + c)];
        for (int32_t c = 0; c < n; c++)
            a->dx[(size_t)t * (size_t)a->d + (size_t)(first + c)] = (float)sum[c];
    }
}

/* ---- the op ---------------------------------------------------------------------------------------------------------- */

static br_status check_choices(const bi_grad_experts_args *a) {
    for (int32_t i = 0; i < a->n_row * a->topk; i++)
        if (a->expert[i] < 0 || a->expert[i] >= a->n_expert)
            return br_fail(BR_E_SHAPE, "gradient of experts: row %d chose expert %d: expected 0 to %d", i / a->topk, a->expert[i], a->n_expert - 1);
    for (int32_t t = 0; a->row_slot && t < a->n_row; t++)
        if (a->row_slot[t] < -1 || a->row_slot[t] >= a->n_slot)
            return br_fail(BR_E_SHAPE, "gradient of experts: row %d has slot %d: expected -1 to %d", t, a->row_slot[t], a->n_slot - 1);
    return BR_OK;
}

br_status bi_grad_experts_host(bi_grad_ctx *ctx, const bi_grad_experts_args *a) {
    BR_TRY(bi_grad_check_experts(&ctx->limits, a));
    BR_TRY(check_choices(a));
    br_arena arena = bi_grad_shared_arena(ctx);
    experts_run run = {.args = a, .ctx = ctx, .low_ld = low_ld(&ctx->limits), .n_key = a->n_slot + 1};
    run.w[MAP_1] = a->w1, run.w[MAP_3] = a->w3, run.w[MAP_2] = a->w2;
    run.lora[MAP_1] = a->lora1, run.lora[MAP_3] = a->lora3, run.lora[MAP_2] = a->lora2;
    run.want[MAP_1] = a->slot1, run.want[MAP_3] = a->slot3, run.want[MAP_2] = a->slot2;
    place_run(&run, &arena, (size_t)a->n_row, (size_t)a->topk, (size_t)a->n_expert, (size_t)run.n_key, (size_t)a->d);
    sort_pairs(&run);
    br_pool_run(ctx->pool, expert_job, &run, a->n_expert);
    if (a->dx)
        br_pool_run(ctx->pool, sum_job, &run, a->n_row);
    return BR_OK;
}
