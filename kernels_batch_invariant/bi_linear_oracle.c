/* The linear op of the oracle; see bi_linear.h and bi_gemm.h.
 *
 * The op walks blocks of up to 64 rows. The rows of a block are packed in the order of their adapter slots, so that the rows
 * of one adapter stand together and the tiles of the chain stay full. Two parallel regions a block: pack the rows and make
 * their t; then the panels, where the base chain of all rows is continued group by group through B. Which rows share a
 * block, a tile or a thread moves no bit: each element is one chain of its own. */
#include "bi_lora_rows.h"

enum {
    ROWS = BI_GEMM_ROWS,
    TILE_ROWS = 8 /* rows of one packing job, all of one slot */
};

typedef struct linear_block {
    const bi_linear_args *args;
    int32_t n_row, head, n_head;  /* rows of the block; heads head .. head + n_head - 1 */
    int32_t row[ROWS], slot[ROWS]; /* which row of the op each place holds, and its slot; sorted by slot */
    bi_span group[ROWS], tile[ROWS];
    int32_t n_group, n_tile;
    int32_t job_rows; /* places of one panel job */
    bi_packed x, t;   /* (n_head, ROWS): one head's rows after the other's */
} linear_block;

/* ---- the op ---------------------------------------------------------------------------------------------------------- */

#ifdef BI_ISA_portable
bi_scratch bi_linear_scratch(const bi_limits *limits) {
    bi_scratch need = {(size_t)ROWS * BI_PACKED_BYTES * (size_t)(bi_pad_k(limits->d_in) + bi_pad_rank(limits->rank)), 0};
    return need;
}
#endif

static int32_t slot_of(const bi_linear_args *args, int32_t row) {
    return args->lora.slot ? args->lora.row_slot[row] : -1;
}

static bi_lora_map lora_of(const bi_linear_args *args, int32_t head) {
    return (bi_lora_map){args->lora.slot, args->n_head, head};
}

static br_status check_args(const bi_ctx *ctx, const bi_linear_args *args) {
    if (args->n_row < 0 || args->n_head < 1)
        return br_fail(BR_E_SHAPE, "linear: %d rows of %d maps: expected at least 0 and 1", args->n_row, args->n_head);
    if (args->check_logits && !args->y_f32)
        return br_fail(BR_E_ARG, "linear: check_logits on a bf16 output: expected y_f32");
    const bi_mat *w = &args->w;
    if (w->n_in < 1 || w->n_in > ctx->limits.d_in || w->n_out < 1 || !w->data)
        return br_fail(BR_E_SHAPE, "linear: a map (%d, %d): expected 1 to %d inputs and at least 1 output", w->n_out,
                       w->n_in, ctx->limits.d_in);
    for (int32_t t = 0; t < args->n_row; t++)
        if (t == 0 || slot_of(args, t) != slot_of(args, t - 1))
            BR_TRY(bi_lora_check(ctx, "linear", lora_of(args, 0), slot_of(args, t), w->n_out, w->n_in));
    return BR_OK;
}

/* Sorts the rows by slot, and cuts them into groups of one slot and tiles of those. */
static void order_rows(linear_block *block, int32_t row_begin) {
    for (int32_t i = 0; i < block->n_row; i++) {
        block->row[i] = row_begin + i;
        block->slot[i] = slot_of(block->args, row_begin + i);
    }
    bi_lora_sort(block->row, block->slot, block->n_row);
    block->n_group = bi_lora_cut(block->slot, block->n_row, ROWS, block->group);
    block->n_tile = bi_lora_cut(block->slot, block->n_row, TILE_ROWS, block->tile);
}

static void pack_job(void *context, int job, int thread) {
    (void)thread;
    const linear_block *block = context;
    const bi_linear_args *args = block->args;
    int32_t h = job / block->n_tile, head = block->head + h;
    bi_span tile = block->tile[job % block->n_tile];
    bi_packed x = bi_packed_from(block->x, h * ROWS), t = bi_packed_from(block->t, h * ROWS);
    for (int32_t i = tile.begin; i < tile.end; i++) {
        bi_packed to = bi_packed_from(x, i);
        const bi_bf16 *from = args->x + block->row[i] * args->x_ld + head * args->x_head_ld;
        BI_FN(bi_pack_row)(from, args->w.n_in, (int)x.ld, to.f, to.e);
    }
    bi_lora_t(lora_of(args, head), x, t, tile, block->row, &args->fault);
}

static void store_row(const bi_linear_args *args, int32_t row, int64_t at, const float *acc, int32_t n) {
    if (args->y_f32)
        memcpy((float *)args->y + at, acc, sizeof *acc * (size_t)n);
    else
        bi_round_row((bi_bf16 *)args->y + at, acc, n);
    for (int32_t l = 0; args->check_logits && l < n; l++)
        bi_fault_check(&args->fault, row, acc[l]);
}

/* One panel of one head for the places begin .. end - 1. */
static void panel_job(void *context, int job, int thread) {
    (void)thread;
    const linear_block *block = context;
    const bi_linear_args *args = block->args;
    int32_t n_panel = bi_panel_count(args->w.n_out), panel = job % n_panel;
    int32_t h = job / n_panel % block->n_head, head = block->head + h;
    int32_t begin = job / n_panel / block->n_head * block->job_rows;
    int32_t end = block->n_row - begin < block->job_rows ? block->n_row : begin + block->job_rows;
    float acc[ROWS][BI_PANEL];
    bi_lora_panel(&args->w, lora_of(args, head), bi_packed_from(block->x, h * ROWS),
                  bi_packed_from(block->t, h * ROWS), block->group, block->n_group, begin, end, panel, acc);
    int32_t first = panel * BI_PANEL, width = args->w.n_out - first < BI_PANEL ? args->w.n_out - first : BI_PANEL;
    for (int32_t i = begin; i < end; i++) {
        int64_t at = block->row[i] * args->y_ld + head * args->y_head_ld + first;
        store_row(args, block->row[i], at, acc[i - begin], width);
    }
}

/* Lays the packed rows of block->n_head heads out in the shared scratch. */
static void place_rows(linear_block *block, unsigned char *base) {
    size_t n = (size_t)block->n_head * ROWS;
    block->x.f = (float *)base;
    block->t.f = block->x.f + n * block->x.ld;
    block->x.e = (int16_t *)(block->t.f + n * block->t.ld);
    block->t.e = block->x.e + n * block->x.ld;
}

br_status BI_FN(bi_linear)(bi_ctx *ctx, const bi_linear_args *args) {
    BR_TRY(check_args(ctx, args));
    linear_block block = {.args = args};
    block.x.ld = (size_t)bi_pad_k(args->w.n_in);
    block.t.ld = (size_t)bi_pad_rank(ctx->limits.rank);
    bi_scratch need = bi_linear_scratch(&ctx->limits);
    unsigned char *base = bi_shared_scratch(ctx, need.shared);
    int32_t head_max = (int32_t)(need.shared / (ROWS * BI_PACKED_BYTES * (block.x.ld + block.t.ld)));
    for (int32_t row = 0; row < args->n_row; row += ROWS) {
        block.n_row = args->n_row - row < ROWS ? args->n_row - row : ROWS;
        order_rows(&block, row);
        for (block.head = 0; block.head < args->n_head; block.head += head_max) {
            block.n_head = args->n_head - block.head < head_max ? args->n_head - block.head : head_max;
            place_rows(&block, base);
            br_pool_run(ctx->pool, pack_job, &block, block.n_head * block.n_tile);
            /* Few panels and many threads: cut the rows as well, at the price of reading the panel more than once. */
            int32_t n_job = block.n_head * bi_panel_count(args->w.n_out);
            block.job_rows = n_job >= 2 * br_pool_thread_count(ctx->pool) ? ROWS : TILE_ROWS;
            int32_t n_cut = (block.n_row + block.job_rows - 1) / block.job_rows;
            br_pool_run(ctx->pool, panel_job, &block, n_job * n_cut);
        }
    }
    return BR_OK;
}

br_status BI_FN(bi_linear_group)(bi_ctx *ctx, const bi_linear_args *args, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        BR_TRY(BI_FN(bi_linear)(ctx, &args[i]));
    return BR_OK;
}
