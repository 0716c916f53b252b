/* Packed matrices and the linear op of the oracle; see bi_linear.h and bi_gemm.h.
 *
 * The op walks blocks of up to 64 rows. The rows of a block are packed in the order of their adapter slots, so that the rows
 * of one adapter stand together and the tiles of the chain stay full. Two parallel regions a block: pack the rows and make
 * their t; then the panels, where the base chain of all rows is continued group by group through B. Which rows share a
 * block, a tile or a thread moves no bit: each element is one chain of its own. */
#include "bi_gemm.h"
#include "bi_oracle.h"
#include "bi_rows.h"

enum {
    ROWS = BI_GEMM_ROWS,
    TILE_ROWS = 8 /* rows of one packing job, all of one slot */
};

/* Places begin .. end - 1 of the block's order, whose rows have adapter `slot` (-1: base). */
typedef struct span {
    int32_t slot, begin, end;
} span;

typedef struct linear_block {
    const bi_linear_args *args;
    int32_t n_row, head, n_head; /* rows of the block; heads head .. head + n_head - 1 */
    int32_t k_pad, rank_pad;
    int32_t row[ROWS]; /* which row of the op each place holds, sorted by slot */
    span group[ROWS], tile[ROWS];
    int32_t n_group, n_tile;
    int32_t job_rows; /* places of one panel job */
    float *xf, *tf;   /* (n_head, ROWS, k_pad), (n_head, ROWS, rank_pad) */
    int16_t *xe, *te;
} linear_block;

size_t BI_FN(bi_mat_bytes)(int32_t n_out, int32_t n_in) {
    return bi_panel_bytes(n_in) * (size_t)bi_panel_count(n_out);
}

static void put_weight(void *dst, const bi_mat *shape, int32_t o, int32_t i, bi_bf16 value) {
    float *f = (float *)((unsigned char *)dst + bi_panel_bytes(shape->n_in) * (size_t)(o / BI_PANEL));
    int16_t *e = (int16_t *)(f + (size_t)bi_pad_k(shape->n_in) * BI_PANEL);
    size_t at = (size_t)i * BI_PANEL + (size_t)(o % BI_PANEL);
    f[at] = bi_widen(value);
    e[at] = bi_chain_exponent(value);
}

void BI_FN(bi_mat_pack_bf16)(void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out,
                             int64_t stride_in) {
    const bi_mat shape = {dst, n_out, n_in};
    for (int32_t o = 0; o < bi_panel_count(n_out) * BI_PANEL; o++)
        for (int32_t i = 0; i < bi_pad_k(n_in); i++)
            put_weight(dst, &shape, o, i, o < n_out && i < n_in ? src[o * stride_out + i * stride_in] : 0);
}

void BI_FN(bi_mat_pack_fp4)(void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale) {
    const bi_mat shape = {dst, n_out, n_in};
    for (int32_t o = 0; o < bi_panel_count(n_out) * BI_PANEL; o++)
        for (int32_t i = 0; i < bi_pad_k(n_in); i++) {
            bi_bf16 value = 0;
            if (o < n_out && i < n_in) {
                size_t at = (size_t)o * (size_t)n_in + (size_t)i;
                value = bi_fp4_to_bf16((uint8_t)(code[at / 2] >> (i % 2 ? 4 : 0) & 15), scale[at / 32]);
            }
            put_weight(dst, &shape, o, i, value);
        }
}

/* Bytes of one packed value: its binary32 and its exponent. */
enum { PACKED = sizeof(float) + sizeof(int16_t) };

#define BI_IS_portable 1
#if BI_JOIN(BI_IS, BI_ISA) /* the portable copy alone */
bi_scratch bi_linear_scratch(const bi_limits *limits) {
    bi_scratch need = {(size_t)ROWS * PACKED * (size_t)(bi_pad_k(limits->d_in) + bi_pad_k(limits->rank)), 0};
    return need;
}
#endif

static int32_t slot_of(const bi_linear_args *args, int32_t row) {
    return args->lora.slot ? args->lora.row_slot[row] : -1;
}

/* The adapter of a slot on one head, NULL when it leaves the map alone. */
static const bi_adapter *adapter_of(const bi_linear_args *args, int32_t slot, int32_t head) {
    if (slot < 0)
        return NULL;
    const bi_adapter *adapter = &args->lora.slot[(size_t)slot * (size_t)args->n_head + (size_t)head];
    return adapter->a.data ? adapter : NULL;
}

static br_status check_adapter(const bi_ctx *ctx, const bi_linear_args *args, int32_t slot) {
    for (int32_t h = 0; h < args->n_head; h++) {
        const bi_adapter *adapter = adapter_of(args, slot, h);
        if (!adapter)
            continue;
        const bi_mat *a = &adapter->a, *b = &adapter->b, *w = args->w;
        if (a->n_in != w->n_in || b->n_out != w->n_out || a->n_out != b->n_in || !b->data)
            return br_fail(BR_E_SHAPE, "adapter slot %d, head %d: A (%d, %d) and B (%d, %d) do not fit a map (%d, %d)", slot,
                           h, a->n_out, a->n_in, b->n_out, b->n_in, w->n_out, w->n_in);
        if (a->n_out < 1 || bi_pad_k(a->n_out) > bi_pad_k(ctx->limits.rank))
            return br_fail(BR_E_SHAPE, "adapter slot %d, head %d: rank %d, expected 1 to %d", slot, h, a->n_out,
                           bi_pad_k(ctx->limits.rank));
    }
    return BR_OK;
}

static br_status check_args(const bi_ctx *ctx, const bi_linear_args *args) {
    if (args->n_row < 0 || args->n_head < 1)
        return br_fail(BR_E_SHAPE, "linear: %d rows of %d maps, expected at least 0 and 1", args->n_row, args->n_head);
    const bi_mat *w = args->w;
    if (w->n_in < 1 || w->n_in > ctx->limits.d_in || w->n_out < 1 || !w->data)
        return br_fail(BR_E_SHAPE, "linear: a map (%d, %d), expected 1 to %d inputs and at least 1 output", w->n_out,
                       w->n_in, ctx->limits.d_in);
    for (int32_t h = 1; h < args->n_head; h++)
        if (w[h].n_in != w->n_in || w[h].n_out != w->n_out || !w[h].data)
            return br_fail(BR_E_SHAPE, "linear: map %d is (%d, %d), expected (%d, %d) as map 0", h, w[h].n_out, w[h].n_in,
                           w->n_out, w->n_in);
    for (int32_t t = 0; t < args->n_row; t++)
        if (t == 0 || slot_of(args, t) != slot_of(args, t - 1))
            BR_TRY(check_adapter(ctx, args, slot_of(args, t)));
    return BR_OK;
}

/* Sorts the rows by slot, keeping their order within one, and cuts them into groups of one slot and tiles of those. */
static void order_rows(linear_block *block, int32_t row_begin) {
    for (int32_t i = 0; i < block->n_row; i++) {
        int32_t slot = slot_of(block->args, row_begin + i), place = i;
        for (; place > 0 && slot_of(block->args, block->row[place - 1]) > slot; place--)
            block->row[place] = block->row[place - 1];
        block->row[place] = row_begin + i;
    }
    block->n_group = block->n_tile = 0;
    for (int32_t i = 0; i < block->n_row; i++) {
        int32_t slot = slot_of(block->args, block->row[i]);
        int new_group = i == 0 || slot != block->group[block->n_group - 1].slot;
        if (new_group)
            block->group[block->n_group++] = (span){slot, i, i};
        if (new_group || i - block->tile[block->n_tile - 1].begin == TILE_ROWS)
            block->tile[block->n_tile++] = (span){slot, i, i};
        block->group[block->n_group - 1].end = block->tile[block->n_tile - 1].end = i + 1;
    }
}

/* t = R(RN(s * chain(x, A))) of the rows of a tile, packed and padded with zeros to whole k-blocks. */
static void make_t(const linear_block *block, int32_t h, const span *tile, const bi_adapter *adapter) {
    int32_t rank = adapter->a.n_out, n = tile->end - tile->begin;
    size_t place = (size_t)(h * ROWS + tile->begin);
    const float *xf = block->xf + place * (size_t)block->k_pad;
    const int16_t *xe = block->xe + place * (size_t)block->k_pad;
    for (int32_t first = 0; first < rank; first += BI_PANEL) {
        float acc[TILE_ROWS][BI_PANEL] = {{0}};
        bi_bf16 t[BI_PANEL];
        int32_t width = rank - first < BI_PANEL ? rank - first : BI_PANEL, panel = first / BI_PANEL;
        bi_gemm_rows(n, xf, xe, (size_t)block->k_pad, &adapter->a, panel, panel + 1, acc[0], BI_PANEL);
        for (int32_t r = 0; r < n; r++) {
            for (int32_t l = 0; l < width; l++) {
                t[l] = bi_round(BI_MUL(adapter->s, acc[r][l]));
                bi_fault_check(&block->args->fault, block->row[tile->begin + r], bi_widen(t[l]));
            }
            size_t at = (place + (size_t)r) * (size_t)block->rank_pad + (size_t)first;
            BI_FN(bi_pack_row)(t, width, bi_pad_k(width), block->tf + at, block->te + at);
        }
    }
}

static void pack_job(void *context, int job, int thread) {
    (void)thread;
    const linear_block *block = context;
    const bi_linear_args *args = block->args;
    int32_t h = job / block->n_tile, head = block->head + h;
    const span *tile = &block->tile[job % block->n_tile];
    for (int32_t i = tile->begin; i < tile->end; i++) {
        size_t at = (size_t)(h * ROWS + i) * (size_t)block->k_pad;
        const bi_bf16 *x = args->x + block->row[i] * args->x_ld + head * args->x_head_ld;
        BI_FN(bi_pack_row)(x, args->w->n_in, block->k_pad, block->xf + at, block->xe + at);
    }
    const bi_adapter *adapter = adapter_of(args, tile->slot, head);
    if (adapter)
        make_t(block, h, tile, adapter);
}

static void store_row(const bi_linear_args *args, int32_t row, int64_t at, const float *acc, int32_t n) {
    if (args->y_f32) {
        memcpy((float *)args->y + at, acc, sizeof *acc * (size_t)n);
        for (int32_t l = 0; args->check_y && l < n; l++)
            bi_fault_check(&args->fault, row, acc[l]);
    } else {
        bi_bf16 *y = (bi_bf16 *)args->y + at;
        bi_round_row(y, acc, n);
        for (int32_t l = 0; args->check_y && l < n; l++)
            bi_fault_check(&args->fault, row, bi_widen(y[l]));
    }
}

/* One panel of one head for the places begin .. end - 1. */
static void panel_job(void *context, int job, int thread) {
    (void)thread;
    const linear_block *block = context;
    const bi_linear_args *args = block->args;
    int32_t n_panel = bi_panel_count(args->w->n_out), panel = job % n_panel;
    int32_t h = job / n_panel % block->n_head, head = block->head + h;
    int32_t begin = job / n_panel / block->n_head * block->job_rows;
    int32_t end = block->n_row - begin < block->job_rows ? block->n_row : begin + block->job_rows;
    size_t place = (size_t)h * ROWS, k_pad = (size_t)block->k_pad, rank_pad = (size_t)block->rank_pad;
    float acc[ROWS][BI_PANEL] = {{0}};
    size_t x_at = (place + (size_t)begin) * k_pad;
    bi_gemm_rows(end - begin, block->xf + x_at, block->xe + x_at, k_pad, &args->w[head], panel, panel + 1, acc[0], BI_PANEL);
    for (int32_t g = 0; g < block->n_group; g++) {
        const bi_adapter *adapter = adapter_of(args, block->group[g].slot, head);
        int32_t from = block->group[g].begin > begin ? block->group[g].begin : begin;
        int32_t to = block->group[g].end < end ? block->group[g].end : end;
        if (!adapter || from >= to)
            continue;
        size_t t_at = (place + (size_t)from) * rank_pad;
        bi_gemm_rows(to - from, block->tf + t_at, block->te + t_at, rank_pad, &adapter->b, panel, panel + 1,
                     acc[from - begin], BI_PANEL);
    }
    int32_t width = args->w->n_out - panel * BI_PANEL < BI_PANEL ? args->w->n_out - panel * BI_PANEL : BI_PANEL;
    for (int32_t i = begin; i < end; i++) {
        int64_t at = block->row[i] * args->y_ld + head * args->y_head_ld + panel * BI_PANEL;
        store_row(args, block->row[i], at, acc[i - begin], width);
    }
}

br_status BI_FN(bi_linear)(bi_ctx *ctx, const bi_linear_args *args) {
    BR_TRY(check_args(ctx, args));
    linear_block block = {.args = args, .k_pad = bi_pad_k(args->w->n_in), .rank_pad = bi_pad_k(ctx->limits.rank)};
    bi_scratch need = bi_linear_scratch(&ctx->limits);
    unsigned char *base = bi_shared_scratch(ctx, need.shared);
    size_t values = (size_t)ROWS * (size_t)(block.k_pad + block.rank_pad);
    int32_t head_max = (int32_t)(need.shared / (values * PACKED)), n_panel = bi_panel_count(args->w->n_out);
    for (int32_t row = 0; row < args->n_row; row += ROWS) {
        block.n_row = args->n_row - row < ROWS ? args->n_row - row : ROWS;
        order_rows(&block, row);
        for (block.head = 0; block.head < args->n_head; block.head += head_max) {
            block.n_head = args->n_head - block.head < head_max ? args->n_head - block.head : head_max;
            size_t n_x = (size_t)block.n_head * ROWS * (size_t)block.k_pad;
            size_t n_t = (size_t)block.n_head * ROWS * (size_t)block.rank_pad;
            block.xf = (float *)base;
            block.tf = block.xf + n_x;
            block.xe = (int16_t *)(block.tf + n_t);
            block.te = block.xe + n_x;
            br_pool_run(ctx->pool, pack_job, &block, block.n_head * block.n_tile);
            /* Few panels and many threads: cut the rows as well, at the price of reading the panel more than once. */
            int32_t n_job = block.n_head * n_panel;
            block.job_rows = n_job >= 2 * br_pool_thread_count(ctx->pool) ? ROWS : TILE_ROWS;
            int32_t n_cut = (block.n_row + block.job_rows - 1) / block.job_rows;
            br_pool_run(ctx->pool, panel_job, &block, n_job * n_cut);
        }
    }
    return BR_OK;
}
