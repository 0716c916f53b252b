/* Gradients of linear, glu and combine, host form.      Contract: N-LIN, N-LORA, N-ACT, N-MOE-2
 *
 * Layer: kernels_batch_invariant. linear: for each head group, T = s A x and U = s dy B of all rows that have an adapter, then dx in
 * blocks of 64 rows x 64 columns, then da and db in blocks of 64 columns or outputs. A block is one job and owns its sums. */
#include "bi_grad_dense_host.h"

enum {
    ROWS = 64 /* rows and outputs of one job */
};

/* ---- linear ---------------------------------------------------------------------------------------------------------- */

typedef struct linear_run {
    const bi_grad_linear_args *args;
    bi_grad_ctx *ctx;
    int32_t head, n_head; /* of this group */
    size_t low_ld;
    double *t, *u;        /* (n_head, n_row, low_ld), of rows with an adapter */
} linear_run;

static size_t low_ld(const bi_limits *limits) {
    return (size_t)(limits->rank > 0 ? bi_pad_rank(limits->rank) : 0);
}

bi_grad_scratch bi_grad_linear_host_scratch(const bi_limits *limits) {
    const size_t n_head = (size_t)(limits->n_head > 1 ? limits->n_head : 1), n_row = (size_t)(limits->n_row > 0 ? limits->n_row : 0);
    const size_t wide = low_ld(limits) > ROWS ? low_ld(limits) : ROWS;
    return (bi_grad_scratch){2 * (sizeof(double) * n_head * n_row * low_ld(limits) + 64),
                             sizeof(grad_piece) + sizeof(double) * ROWS * (3 * wide) + 256};
}

/* What a job works in; acc begins as zeros. */
typedef struct linear_work {
    grad_piece *piece;
    double *acc, *left, *right; /* (ROWS, wide) each */
    size_t wide;
} linear_work;

static linear_work work_of(const linear_run *run, int thread) {
    br_arena arena = bi_grad_thread_arena(run->ctx, thread);
    linear_work w = {.wide = run->low_ld > ROWS ? run->low_ld : ROWS};
    w.piece = BR_ARENA_ARRAY(&arena, grad_piece, 1);
    w.acc = BR_ARENA_ARRAY(&arena, double, ROWS * w.wide);
    w.left = BR_ARENA_ARRAY(&arena, double, ROWS * w.wide);
    w.right = BR_ARENA_ARRAY(&arena, double, ROWS * w.wide);
    memset(w.acc, 0, sizeof *w.acc * ROWS * w.wide);
    return w;
}

static int32_t slot_of(const bi_grad_linear_args *a, int32_t row) {
    return a->lora.slot ? a->lora.row_slot[row] : -1;
}

/* Up to ROWS rows from *row on, below end, that have the slot; *row moves behind them. */
static int32_t take_rows(const bi_grad_linear_args *a, int32_t slot, int32_t *row, int32_t end, int32_t list[ROWS]) {
    int32_t n = 0;
    for (; *row < end && n < ROWS; ++*row)
        if (slot_of(a, *row) == slot)
            list[n++] = *row;
    return n;
}

static void take_x(const bi_grad_linear_args *a, int32_t head, const int32_t *list, int32_t n, int32_t k, int32_t n_k, double *to) {
    for (int32_t i = 0; i < n; i++) {
        const bi_bf16 *x = a->x + list[i] * a->x_ld + head * a->x_head_ld + k;
        for (int32_t j = 0; j < n_k; j++)
            to[i * GRAD_COLS + j] = bi_wide(x[j]);
    }
}

static void take_dy(const bi_grad_linear_args *a, int32_t head, const int32_t *list, int32_t n, int32_t out, int32_t n_out, double *to, size_t ld) {
    for (int32_t i = 0; i < n; i++) {
        const float *dy = a->dy + list[i] * a->dy_ld + head * a->dy_head_ld + out;
        for (int32_t j = 0; j < n_out; j++)
            to[(size_t)i * ld + (size_t)j] = (double)dy[j];
    }
}

static double *low_row(const linear_run *run, double *of, int32_t head, int32_t row) {
    return of + ((size_t)(head - run->head) * (size_t)run->args->n_row + (size_t)row) * run->low_ld;
}

/* acc (n, rank) times s, into the rows of T or U. */
static void put_low(const linear_run *run, const linear_work *w, double *of, int32_t head, const bi_adapter *adapter, const int32_t *list,
                    int32_t n) {
    const double s = (double)adapter->s[head];
    for (int32_t i = 0; i < n; i++)
        for (int32_t r = 0; r < adapter->a.n_out; r++)
            low_row(run, of, head, list[i])[r] = s * w->acc[(size_t)i * w->wide + (size_t)r];
}

/* T and U of rows of one slot. */
static void make_low(const linear_run *run, linear_work *w, int32_t head, const bi_adapter *adapter, const int32_t *list, int32_t n) {
    const bi_grad_linear_args *args = run->args;
    const bi_mat a = bi_mat_at(&adapter->a, head), b = bi_mat_at(&adapter->b, head);
    memset(w->acc, 0, sizeof(double) * ROWS * w->wide);
    for (int32_t k = 0; k < a.n_in; k += GRAD_COLS) {
        const int32_t n_k = grad_least(GRAD_COLS, a.n_in - k);
        take_x(args, head, list, n, k, n_k, w->left);
        for (int32_t panel = 0; panel < bi_panel_count(a.n_out); panel++) {
            grad_cols(w->piece, &a, panel, k, n_k);
            grad_product(n, grad_least(BI_PANEL, a.n_out - panel * BI_PANEL), n_k, w->left, GRAD_COLS, 1, w->piece->value, BI_PANEL,
                         w->acc + panel * BI_PANEL, w->wide);
        }
    }
    put_low(run, w, run->t, head, adapter, list, n);
    memset(w->acc, 0, sizeof(double) * ROWS * w->wide);
    for (int32_t panel = 0; panel < bi_panel_count(b.n_out); panel++) {
        const int32_t n_out = grad_least(BI_PANEL, b.n_out - panel * BI_PANEL);
        take_dy(args, head, list, n, panel * BI_PANEL, n_out, w->left, BI_PANEL);
        for (int32_t r = 0; r < b.n_in; r += GRAD_COLS) {
            const int32_t n_r = grad_least(GRAD_COLS, b.n_in - r);
            grad_rows(w->piece, &b, panel, r, n_r);
            grad_product(n, n_r, n_out, w->left, BI_PANEL, 1, w->piece->value, GRAD_COLS, w->acc + r, w->wide);
        }
    }
    put_low(run, w, run->u, head, adapter, list, n);
}

static void low_job(void *context, int job, int thread) {
    const linear_run *run = context;
    const bi_grad_linear_args *a = run->args;
    const int32_t head = run->head + job % run->n_head, first = job / run->n_head * ROWS, end = grad_least(first + ROWS, a->n_row);
    linear_work w = work_of(run, thread);
    for (int32_t slot = 0; slot < a->lora.n_slot; slot++) {
        int32_t list[ROWS], row = first;
        const int32_t n = take_rows(a, slot, &row, end, list);
        const bi_adapter *adapter = grad_adapter(a->lora.slot, slot);
        if (adapter && n)
            make_low(run, &w, head, adapter, list, n);
    }
}

/* acc += u A of the rows that have the slot, columns k .. k + n_k - 1. */
static void add_adapter(const linear_run *run, linear_work *w, int32_t head, const bi_adapter *adapter, int32_t slot, int32_t first, int32_t n,
                        int32_t k, int32_t n_k) {
    const bi_mat a = bi_mat_at(&adapter->a, head);
    for (int32_t panel = 0; panel < bi_panel_count(a.n_out); panel++) {
        int some = 0;
        for (int32_t i = 0; i < n; i++) {
            if (slot_of(run->args, first + i) != slot)
                continue;
            if (!some)
                grad_rows(w->piece, &a, panel, k, n_k);
            some = 1;
            grad_one_row(n_k, grad_least(BI_PANEL, a.n_out - panel * BI_PANEL), low_row(run, run->u, head, first + i) + panel * BI_PANEL, 1,
                         w->piece->value, GRAD_COLS, w->acc + (size_t)i * GRAD_COLS);
        }
    }
}

static void dx_job(void *context, int job, int thread) {
    const linear_run *run = context;
    const bi_grad_linear_args *a = run->args;
    const int32_t n_col = (a->w.n_in + GRAD_COLS - 1) / GRAD_COLS, k = job % n_col * GRAD_COLS, n_k = grad_least(GRAD_COLS, a->w.n_in - k);
    const int32_t head = run->head + job / n_col % run->n_head, first = job / n_col / run->n_head * ROWS, n = grad_least(ROWS, a->n_row - first);
    const bi_mat one = bi_mat_at(&a->w, head);
    linear_work w = work_of(run, thread);
    int32_t list[ROWS];
    for (int32_t i = 0; i < n; i++)
        list[i] = first + i;
    for (int32_t panel = 0; panel < bi_panel_count(one.n_out); panel++) {
        const int32_t n_out = grad_least(BI_PANEL, one.n_out - panel * BI_PANEL);
        take_dy(a, head, list, n, panel * BI_PANEL, n_out, w.left, BI_PANEL);
        grad_rows(w.piece, &one, panel, k, n_k);
        grad_product(n, n_k, n_out, w.left, BI_PANEL, 1, w.piece->value, GRAD_COLS, w.acc, GRAD_COLS);
    }
    for (int32_t slot = 0; a->lora.slot && slot < a->lora.n_slot; slot++)
        if (grad_adapter(a->lora.slot, slot))
            add_adapter(run, &w, head, &a->lora.slot[slot], slot, first, n, k, n_k);
    for (int32_t i = 0; i < n; i++) {
        float *dx = a->dx + (first + i) * a->dx_ld + head * a->dx_head_ld + k;
        for (int32_t j = 0; j < n_k; j++)
            dx[j] = (float)w.acc[i * GRAD_COLS + j];
    }
}

static void take_low(const linear_run *run, double *of, int32_t head, const int32_t *list, int32_t n, double *to) {
    for (int32_t i = 0; i < n; i++)
        memcpy(to + (size_t)i * run->low_ld, low_row(run, of, head, list[i]), sizeof *to * run->low_ld);
}

/* da of columns k .. : the sum over the slot's rows of u x. */
static void da_block(const linear_run *run, linear_work *w, int32_t head, int32_t slot, int32_t k) {
    const bi_grad_linear_args *a = run->args;
    const int32_t rank = a->lora.slot[slot].a.n_out, n_in = a->w.n_in, n_k = grad_least(GRAD_COLS, n_in - k);
    int32_t list[ROWS], n, row = 0;
    while ((n = take_rows(a, slot, &row, a->n_row, list)) > 0) {
        take_low(run, run->u, head, list, n, w->left);
        take_x(a, head, list, n, k, n_k, w->right);
        grad_product(rank, n_k, n, w->left, 1, run->low_ld, w->right, GRAD_COLS, w->acc, GRAD_COLS);
    }
    float *da = a->slot[slot].da + (size_t)head * (size_t)rank * (size_t)n_in + k;
    for (int32_t r = 0; r < rank; r++)
        for (int32_t j = 0; j < n_k; j++)
            da[(size_t)r * (size_t)n_in + (size_t)j] = (float)w->acc[r * GRAD_COLS + j];
}

/* db of outputs out .. : the sum over the slot's rows of dy t. */
static void db_block(const linear_run *run, linear_work *w, int32_t head, int32_t slot, int32_t out) {
    const bi_grad_linear_args *a = run->args;
    const int32_t rank = a->lora.slot[slot].a.n_out, n_out = grad_least(ROWS, a->w.n_out - out);
    int32_t list[ROWS], n, row = 0;
    while ((n = take_rows(a, slot, &row, a->n_row, list)) > 0) {
        take_dy(a, head, list, n, out, n_out, w->left, ROWS);
        take_low(run, run->t, head, list, n, w->right);
        grad_product(n_out, rank, n, w->left, 1, ROWS, w->right, run->low_ld, w->acc, w->wide);
    }
    float *db = a->slot[slot].db + ((size_t)head * (size_t)a->w.n_out + (size_t)out) * (size_t)rank;
    for (int32_t o = 0; o < n_out; o++)
        for (int32_t r = 0; r < rank; r++)
            db[(size_t)o * (size_t)rank + (size_t)r] = (float)w->acc[(size_t)o * w->wide + (size_t)r];
}

static void adapter_job(void *context, int job, int thread) {
    const linear_run *run = context;
    const bi_grad_linear_args *a = run->args;
    const int32_t n_a = (a->w.n_in + GRAD_COLS - 1) / GRAD_COLS, n_b = (a->w.n_out + ROWS - 1) / ROWS, at = job % (n_a + n_b);
    const int32_t head = run->head + job / (n_a + n_b) % run->n_head, slot = job / (n_a + n_b) / run->n_head;
    linear_work w = work_of(run, thread);
    if (at < n_a && a->slot[slot].da)
        da_block(run, &w, head, slot, at * GRAD_COLS);
    if (at >= n_a && a->slot[slot].db)
        db_block(run, &w, head, slot, (at - n_a) * ROWS);
}

static br_status check_slots(const bi_grad_linear_args *a) {
    for (int32_t t = 0; a->lora.slot && t < a->n_row; t++)
        if (slot_of(a, t) < -1 || slot_of(a, t) >= a->lora.n_slot)
            return br_fail(BR_E_SHAPE, "gradient of linear: row %d has slot %d: expected -1 to %d", t, slot_of(a, t), a->lora.n_slot - 1);
    return BR_OK;
}

br_status bi_grad_linear_host(bi_grad_ctx *ctx, const bi_grad_linear_args *a) {
    BR_TRY(bi_grad_check_linear(&ctx->limits, a));
    BR_TRY(check_slots(a));
    const int32_t n_block = (a->n_row + ROWS - 1) / ROWS, head_max = ctx->limits.n_head > 1 ? ctx->limits.n_head : 1;
    const int32_t n_a = (a->w.n_in + GRAD_COLS - 1) / GRAD_COLS, n_b = (a->w.n_out + ROWS - 1) / ROWS;
    const size_t n_low = a->lora.slot ? (size_t)grad_least(head_max, a->n_head) * (size_t)a->n_row * low_ld(&ctx->limits) : 0;
    br_arena arena = bi_grad_shared_arena(ctx);
    linear_run run = {.args = a, .ctx = ctx, .low_ld = low_ld(&ctx->limits)};
    run.t = BR_ARENA_ARRAY(&arena, double, n_low);
    run.u = BR_ARENA_ARRAY(&arena, double, n_low);
    for (; run.head < a->n_head; run.head += head_max) {
        run.n_head = grad_least(head_max, a->n_head - run.head);
        if (a->lora.slot)
            br_pool_run(ctx->pool, low_job, &run, n_block * run.n_head);
        if (a->dx)
            br_pool_run(ctx->pool, dx_job, &run, n_block * run.n_head * n_a);
        if (a->slot)
            br_pool_run(ctx->pool, adapter_job, &run, a->lora.n_slot * run.n_head * (n_a + n_b));
    }
    return BR_OK;
}

/* ---- glu ------------------------------------------------------------------------------------------------------------- */

static void glu_job(void *context, int t, int thread) {
    (void)thread;
    const bi_grad_glu_args *a = context;
    const float *g = a->g + t * a->ld, *u = a->u + t * a->ld;
    const size_t first = (size_t)t * (size_t)a->d;
    for (int32_t i = 0; i < a->d; i++) {
        const size_t at = first + (size_t)i;
        const grad_act slope = grad_act_of(&a->act, (double)g[i], (double)u[i], (double)a->dy[at]);
        if (a->dg)
            a->dg[at] = (float)slope.dg;
        if (a->du)
            a->du[at] = (float)slope.du;
    }
}

br_status bi_grad_glu_host(bi_grad_ctx *ctx, const bi_grad_glu_args *a) {
    bi_grad_glu_args args = *a;
    BR_TRY(bi_grad_check_glu(a));
    br_pool_run(ctx->pool, glu_job, &args, a->n_row);
    return BR_OK;
}

/* ---- combine --------------------------------------------------------------------------------------------------------- */

static void combine_job(void *context, int t, int thread) {
    (void)thread;
    const bi_grad_combine_args *a = context;
    const float *dy = a->dy + (size_t)t * (size_t)a->d;
    for (int32_t i = 0; i < a->topk; i++) {
        const size_t pair = (size_t)t * (size_t)a->topk + (size_t)i, at = pair * (size_t)a->d;
        const double p = (double)a->p[pair];
        double dp = 0;
        for (int32_t c = 0; c < a->d; c++) {
            dp += (double)dy[c] * bi_wide(a->e[at + (size_t)c]);
            if (a->de)
                a->de[at + (size_t)c] = (float)((double)dy[c] * p);
        }
        if (a->dp)
            a->dp[pair] = (float)dp;
    }
}

br_status bi_grad_combine_host(bi_grad_ctx *ctx, const bi_grad_combine_args *a) {
    bi_grad_combine_args args = *a;
    BR_TRY(bi_grad_check_combine(a));
    br_pool_run(ctx->pool, combine_job, &args, a->n_row);
    return BR_OK;
}
