/* Packed bf16 matrices and the linear op.      Contract: N-CHAIN, N-LIN, N-LORA
 *
 * BI_FORM_BF16 is row-major (n_out, ld) with ld = n_in rounded up to 16, zeros there, and bytes rounded up to 256, so that rows
 * are 16-byte aligned and matrices of a stack 256-byte aligned.
 * Up to DENSE_SMALL_ROWS rows, T and y come from one launch of an own kernel, whose weights pass once: bi_linear_stream.cu, or up to
 * 16 rows without adapters bi_linear_tile.cuh (order, grid, shared memory there). A group of maps is one launch of the former.
 * More rows: cuBLASLt makes the chains where it may (bi_linear_lt.cu), else the tiles; with adapters T has a launch of its own and
 * the chains go on through it before they are rounded (bi_linear_lora.cu), all maps of a group together. */
#include "bi_linear_tile.cuh"

/* ---- packing --------------------------------------------------------------------------------------------------------- */

enum { STAGING_BYTES = 4 << 20 };

size_t bi_cuda_mat_bytes(bi_form form, int32_t n_out, int32_t n_in) {
    if (form == BI_FORM_FP4)
        return bi_cuda_fp4_bytes(n_out, n_in);
    return ((size_t)n_out * (size_t)dense_ld(n_in) * sizeof(bi_bf16) + 255) / 256 * 256;
}

int64_t bi_cuda_mat_row(int32_t n_in) {
    return dense_ld(n_in);
}

/* Rows row .. row + n - 1 as they lie packed. */
static void gather_rows(bi_bf16 *dst, int32_t row, int32_t n, int32_t n_in, const bi_bf16 *src, int64_t stride_out, int64_t stride_in) {
    const int32_t ld = dense_ld(n_in);
    for (int32_t r = 0; r < n; r++, dst += ld) {
        const bi_bf16 *from = src + (row + r) * stride_out;
        if (stride_in == 1)
            memcpy(dst, from, sizeof *dst * (size_t)n_in);
        for (int32_t i = 0; i < n_in && stride_in != 1; i++)
            dst[i] = from[i * stride_in];
        memset(dst + n_in, 0, sizeof *dst * (size_t)(ld - n_in));
    }
}

static br_status upload(bi_ctx *ctx, void *dst, const void *src, size_t bytes) {
    BR_TRY(br_device_upload(ctx->device, dst, src, bytes));
    return br_device_wait(ctx->device);
}

br_status bi_cuda_mat_pack_bf16(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out, int64_t stride_in) {
    if (n_out < 1 || n_in < 1)
        return br_fail(BR_E_SHAPE, "mat_pack_bf16: a matrix (%d, %d): expected at least 1 output, inputs in multiples of 1", n_out, n_in);
    const size_t row_bytes = (size_t)dense_ld(n_in) * sizeof(bi_bf16);
    if (stride_in == 1 && stride_out == n_in && n_in == dense_ld(n_in))
        return upload(ctx, dst, src, row_bytes * (size_t)n_out);
    const size_t fit = STAGING_BYTES / row_bytes;
    const int32_t n_rows = fit < 1 ? 1 : fit < (size_t)n_out ? (int32_t)fit : n_out;
    bi_bf16 *staging = NULL;
    br_status status = br_mem_alloc((void **)&staging, row_bytes * (size_t)n_rows, "a matrix to upload");
    for (int32_t row = 0; status == BR_OK && row < n_out; row += n_rows) {
        const int32_t n = n_out - row < n_rows ? n_out - row : n_rows;
        gather_rows(staging, row, n, n_in, src, stride_out, stride_in);
        status = upload(ctx, (unsigned char *)dst + row_bytes * (size_t)row, staging, row_bytes * (size_t)n);
    }
    br_mem_free(staging);
    return status;
}

/* ---- the own kernel's forms ------------------------------------------------------------------------------------------ */

typedef struct tile_form {
    void (*kernel)(const dense_job);
    int rows, tokens, threads, shared;
} tile_form;

#define TILE_FORM(...)                                                                                                  \
    {dense_kernel<dense_shape<__VA_ARGS__>>, dense_shape<__VA_ARGS__>::ROWS, dense_shape<__VA_ARGS__>::TOKENS,          \
     dense_shape<__VA_ARGS__>::THREADS, dense_shape<__VA_ARGS__>::STAGES * dense_shape<__VA_ARGS__>::STAGE_BYTES}

typedef enum form_name { FORM_8_FEW, FORM_8, FORM_16_FEW, FORM_16, FORM_MANY, FORM_T, FORM_ANY, FORM_COUNT } form_name;

/* warps M, N; fragments of a warp M, N; columns a stage; stages; x 16 bytes at a time. `few`: for maps of few outputs, whose
 * tiles must still reach every SM. */
static const tile_form FORM[FORM_COUNT] = {
    TILE_FORM(1, 1, 1, 1, 256, 4, true),  /* FORM_8_FEW: 16 x 8, 48 KiB */
    TILE_FORM(4, 1, 1, 1, 128, 4, true),  /* FORM_8: 64 x 8, 72 KiB */
    TILE_FORM(2, 1, 1, 2, 128, 5, true),  /* FORM_16_FEW: 32 x 16, 60 KiB */
    TILE_FORM(4, 1, 1, 2, 128, 4, true),  /* FORM_16: 64 x 16, 80 KiB */
    TILE_FORM(2, 4, 4, 4, 64, 3, true),   /* FORM_MANY: 128 x 128, 96 KiB */
    TILE_FORM(1, 4, 2, 2, 64, 6, true),   /* FORM_T: 32 x 64, 72 KiB */
    TILE_FORM(4, 1, 1, 8, 64, 2, false),  /* FORM_ANY: 64 x 64, 32 KiB */
};

static int is_aligned(const dense_job *job) {
    return (uintptr_t)job->x % DENSE_ALIGN == 0 && job->x_ld % 8 == 0 && (job->n_head == 1 || job->x_head_ld % 8 == 0);
}

/* Few tiles: fewer than reach all SMs, with some left over so that none waits for the last. */
static const tile_form *form_of(const bi_ctx *ctx, const dense_job *job) {
    const int64_t tiles_64 = job->n_head * bi_ceil_div(job->n_out, 64);
    const int few = tiles_64 * 4 < ctx->n_sm * 5;
    if (!is_aligned(job) || (job->n_row > 16 && job->n_row <= DENSE_SMALL_ROWS))
        return &FORM[FORM_ANY];
    if (job->n_row <= 8)
        return &FORM[few ? FORM_8_FEW : FORM_8];
    if (job->n_row <= 16)
        return &FORM[few ? FORM_16_FEW : FORM_16];
    return &FORM[FORM_MANY];
}

static int32_t rank_max(const dense_job *job) {
    int32_t most = 0;
    for (int32_t i = 0; i < job->n_slot; i++)
        most = job->slot[i].rank > most ? job->slot[i].rank : most;
    return most;
}

/* Launches tiles of T, of y, or of both; T is there already where only y is wanted. Tiles without adapters are of one length, and often
 * less than a wave: behind a launch that leaves its SMs one after another they would pile up on the first ones, so they start when all are free. */
static void launch(const tile_form *form, const dense_job *from, int want_t, int want_y, uint32_t *arrived, cudaStream_t stream) {
    dense_job job = *from;
    job.token_tiles = (int32_t)bi_ceil_div(job.n_row, form->tokens);
    job.t_tiles = want_t ? (int32_t)bi_ceil_div(rank_max(&job), form->rows) : 0;
    job.w_tiles = want_y ? (int32_t)bi_ceil_div(job.n_out, form->rows) : 0;
    job.arrived = want_t && want_y ? arrived : NULL;
    const int64_t n_block = (int64_t)job.n_head * job.token_tiles * ((int64_t)job.n_slot * job.t_tiles + job.w_tiles);
    if (job.n_slot)
        bi_cuda_launch_on(stream, form->kernel, (unsigned)n_block, form->threads, (size_t)form->shared, job);
    else
        form->kernel<<<(unsigned)n_block, form->threads, form->shared, stream>>>(job);
}

br_status bi_dense_tiles(bi_ctx *ctx, const dense_job *job, cudaStream_t stream) {
    launch(form_of(ctx, job), job, 0, 1, NULL, stream);
    return bi_cuda_launched(ctx, job->n_row <= DENSE_SMALL_ROWS ? BI_K_linear_small : BI_K_linear_tile, "linear");
}

/* Whether the streaming form is the faster one: measured. Up to 16 rows it pays for maps too small for tiles of 64 outputs, and for the
 * head. */
static int streams(const bi_ctx *ctx, const dense_job *job) {
    const int64_t tiles_64 = job->n_head * bi_ceil_div(job->n_out, 64);
    const int wanted = job->n_row > 16 || 2 * tiles_64 < ctx->n_sm || (job->n_head == 1 && tiles_64 > 1024);
    return job->n_row <= DENSE_SMALL_ROWS && wanted && ((const dense_state *)ctx->dense)->encode && is_aligned(job);
}

static int has_many_short(const dense_job *job) {
    return job->n_head == 1 && job->n_in <= 2048 && job->n_out >= 16384;
}

/* Whether cuBLASLt is: also for few rows where chains are short and outputs are many. */
static int by_library(const bi_ctx *ctx, const dense_job *job) {
    const int pays = job->n_row > DENSE_SMALL_ROWS || (job->n_row > 8 && has_many_short(job));
    return pays && ((const dense_state *)ctx->dense)->lt && bi_dense_lt_fits(job);
}

br_status bi_dense_base(bi_ctx *ctx, const dense_job *job) {
    const dense_state *state = (const dense_state *)ctx->dense;
    int done = 0;
    if (by_library(ctx, job))
        BR_TRY(bi_dense_lt_run(ctx, state->lt, job, &done));
    if (!done && streams(ctx, job))
        BR_TRY(bi_dense_stream(ctx, job, 1, &done));
    return done ? BR_OK : bi_dense_tiles(ctx, job, ctx->stream);
}

dense_job bi_dense_job(const bi_mat *w, int32_t n_row, int32_t n_head, const bi_bf16 *x, int64_t x_ld, int64_t x_head_ld) {
    dense_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.x_ld = x_ld;
    job.x_head_ld = x_head_ld;
    job.w = (const bi_bf16 *)w->data;
    job.w_stride = (int64_t)(w->stride / sizeof(bi_bf16));
    job.w_ld = dense_ld(w->n_in);
    job.n_row = n_row;
    job.n_head = n_head;
    job.n_in = w->n_in;
    job.n_out = w->n_out;
    return job;
}

/* ---- the op ---------------------------------------------------------------------------------------------------------- */

/* T of one stack of maps, or of all maps of a group. */
size_t bi_cuda_linear_scratch(const bi_limits *limits) {
    const int64_t n_row = limits->n_row > 0 ? limits->n_row : 1;
    const int64_t n_map = limits->n_head > BI_LINEAR_GROUP_MAX ? limits->n_head : BI_LINEAR_GROUP_MAX;
    const int64_t t = n_row * n_map * bi_pad_rank(limits->rank) * (int64_t)sizeof(bi_bf16);
    return limits->rank > 0 ? (size_t)(t + 256 * BI_LINEAR_GROUP_MAX) : 0;
}

static br_status check_slot(const bi_ctx *ctx, const bi_linear_args *args, int32_t i) {
    const bi_adapter *adapter = &args->lora.slot[i];
    const bi_mat *a = &adapter->a, *b = &adapter->b;
    const int32_t n_in = args->w.n_in, n_out = args->w.n_out;
    if (a->n_in != n_in || b->n_out != n_out || a->n_out != b->n_in || !b->data || !adapter->s)
        return br_fail(BR_E_SHAPE, "linear: slot %d, A (%d, %d), B (%d, %d): expected A (r, %d), B (%d, r)", i, a->n_out, a->n_in, b->n_out,
                       b->n_in, n_in, n_out);
    if (a->n_out < 1 || bi_pad_rank(a->n_out) > bi_pad_rank(ctx->limits.rank))
        return br_fail(BR_E_SHAPE, "linear: slot %d, rank %d: expected 1 to %d", i, a->n_out, bi_pad_rank(ctx->limits.rank));
    return BR_OK;
}

static br_status check_args(const bi_ctx *ctx, const bi_linear_args *args) {
    if (args->n_row < 0 || args->n_head < 1)
        return br_fail(BR_E_SHAPE, "linear: %d rows of %d maps: expected at least 0 and 1", args->n_row, args->n_head);
    if (args->check_logits && !args->y_f32)
        return br_fail(BR_E_ARG, "linear: check_logits on a bf16 output: expected y_f32");
    const bi_mat *w = &args->w;
    if (w->n_in < 1 || w->n_in > ctx->limits.d_in || w->n_out < 1 || !w->data)
        return br_fail(BR_E_SHAPE, "linear: a map (%d, %d): expected 1 to %d inputs and at least 1 output", w->n_out, w->n_in,
                       ctx->limits.d_in);
    if (w->form != BI_FORM_BF16)
        return br_fail(BR_E_UNSUPPORTED, "linear: a map in MXFP4: expected bf16; only experts are kept in MXFP4");
    return BR_OK;
}

/* The slots that touch the map, into the job. */
static br_status take_slots(const bi_ctx *ctx, const bi_linear_args *args, dense_job *job) {
    job->row_slot = args->lora.row_slot;
    for (int32_t i = 0; args->lora.slot && i < args->lora.n_slot; i++) {
        const bi_adapter *adapter = &args->lora.slot[i];
        if (!adapter->a.data)
            continue;
        BR_TRY(check_slot(ctx, args, i));
        if (job->n_slot == DENSE_SLOT_MAX)
            return br_fail(BR_E_LIMIT, "linear: more than %d adapters on one map: expected at most that", (int)DENSE_SLOT_MAX);
        dense_slot *slot = &job->slot[job->n_slot++];
        slot->a = (const bi_bf16 *)adapter->a.data;
        slot->b = (const bi_bf16 *)adapter->b.data;
        slot->s = adapter->s;
        slot->a_stride = (int64_t)(adapter->a.stride / sizeof(bi_bf16));
        slot->b_stride = (int64_t)(adapter->b.stride / sizeof(bi_bf16));
        slot->slot = i;
        slot->rank = adapter->a.n_out;
        slot->a_ld = dense_ld(adapter->a.n_in);
        slot->b_ld = dense_ld(adapter->b.n_in);
    }
    job->t_ld = bi_pad_rank(rank_max(job));
    return BR_OK;
}

/* Rows row .. row + n - 1 of a job. */
static dense_job rows_of(const dense_job *job, int32_t row, int32_t n) {
    dense_job part = *job;
    part.n_row = n;
    part.x += row * job->x_ld;
    part.y = (unsigned char *)job->y + row * job->y_ld * (int64_t)(job->y_f32 ? sizeof(float) : sizeof(bi_bf16));
    part.row_slot = job->row_slot ? job->row_slot + row : NULL;
    part.fault.row = job->fault.row ? job->fault.row + row : NULL;
    return part;
}

/* More than DENSE_SMALL_ROWS rows with adapters, of which the wide form can not take all: one map, element by element where
 * it has to be. */
static br_status run_tiles(bi_ctx *ctx, const dense_job *job) {
    launch(&FORM[is_aligned(job) ? FORM_T : FORM_ANY], job, 1, 0, NULL, ctx->stream);
    BR_TRY(bi_cuda_launched(ctx, BI_K_lora_t, "linear"));
    launch(form_of(ctx, job), job, 0, 1, NULL, ctx->stream);
    return bi_cuda_launched(ctx, BI_K_linear_tile, "linear");
}

/* A part with T's place given. */
static br_status run_part(bi_ctx *ctx, const dense_job *job) {
    const dense_state *state = (const dense_state *)ctx->dense;
    int done = 0;
    if (state->encode && is_aligned(job))
        BR_TRY(job->n_row > DENSE_SMALL_ROWS ? bi_dense_many(ctx, job, 1, &done) : bi_dense_stream(ctx, job, 1, &done));
    if (done)
        return BR_OK;
    if (job->n_row > DENSE_SMALL_ROWS)
        return run_tiles(ctx, job);
    launch(form_of(ctx, job), job, 1, 1, state->arrived, ctx->stream);
    return bi_cuda_launched(ctx, BI_K_linear_small, "linear");
}

/* Adapters: in parts of as many rows as the scratch takes. */
static br_status run_adapters(bi_ctx *ctx, const dense_job *job) {
    const int64_t t_row = (int64_t)job->n_head * job->t_ld * (int64_t)sizeof(bi_bf16);
    int64_t fit = ((int64_t)ctx->scratch_bytes - 256) / t_row;
    if (fit < 1)
        return br_fail(BR_E_LIMIT, "linear: %d maps (%d, %d) with adapters: expected a width within the backend's limits", job->n_head,
                       job->n_out, job->n_in);
    fit = fit > 256 ? fit / 256 * 256 : fit;
    for (int32_t row = 0; row < job->n_row; row += (int32_t)fit) {
        dense_job part = rows_of(job, row, (int32_t)(job->n_row - row < fit ? job->n_row - row : fit));
        bi_carver carver = bi_cuda_scratch(ctx);
        part.t = (bi_bf16 *)bi_carve(&carver, (size_t)(t_row * part.n_row));
        part.t_head_ld = (int64_t)part.n_row * part.t_ld;
        BR_TRY(run_part(ctx, &part));
    }
    return BR_OK;
}

static br_status job_of(const bi_ctx *ctx, const bi_linear_args *args, dense_job *job) {
    BR_TRY(check_args(ctx, args));
    *job = bi_dense_job(&args->w, args->n_row, args->n_head, args->x, args->x_ld, args->x_head_ld);
    job->y = args->y;
    job->y_ld = args->y_ld;
    job->y_head_ld = args->y_head_ld;
    job->y_f32 = args->y_f32;
    job->check = args->check_logits;
    job->fault = args->fault;
    return take_slots(ctx, args, job);
}

br_status bi_cuda_linear(bi_ctx *ctx, const bi_linear_args *args) {
    dense_job job;
    BR_TRY(job_of(ctx, args, &job));
    if (args->n_row == 0)
        return BR_OK;
    return job.n_slot ? run_adapters(ctx, &job) : bi_dense_base(ctx, &job);
}

/* Gives each job with adapters its T; whether the scratch takes them all. */
static int give_t(bi_ctx *ctx, dense_job *job, int32_t n) {
    bi_carver carver = bi_cuda_scratch(ctx);
    size_t need = 0;
    for (int32_t i = 0; i < n; i++)
        need += ((size_t)job[i].n_head * (size_t)job[i].n_row * (size_t)job[i].t_ld * sizeof(bi_bf16) + 255) / 256 * 256;
    for (int32_t i = 0; need <= ctx->scratch_bytes && i < n; i++) {
        job[i].t_head_ld = (int64_t)job[i].n_row * job[i].t_ld;
        job[i].t = (bi_bf16 *)bi_carve(&carver, (size_t)job[i].n_head * (size_t)job[i].t_head_ld * sizeof(bi_bf16));
    }
    return need <= ctx->scratch_bytes;
}

enum { GROUP_ROWS = 512 }; /* up to here one launch of the wide form is faster than one of cuBLASLt a map: measured */

/* Whether one launch may take a group. */
static int is_group(const bi_ctx *ctx, const bi_linear_args *args, int32_t n) {
    return n > 1 && n <= BI_LINEAR_GROUP_MAX && args->n_row > 0 && ((const dense_state *)ctx->dense)->encode;
}

/* Whether one launch is the faster one for a group, where none has adapters: not of few rows and many short chains, measured. */
static int pays_together(const dense_job *job, int32_t n) {
    int many_short = 0;
    for (int32_t i = 0; i < n; i++)
        many_short |= has_many_short(&job[i]);
    return job->n_row <= GROUP_ROWS && !(many_short && job->n_row <= DENSE_SMALL_ROWS);
}

br_status bi_cuda_linear_group(bi_ctx *ctx, const bi_linear_args *args, int32_t n) {
    dense_job job[BI_LINEAR_GROUP_MAX];
    int done = 0, n_slot = 0, together = is_group(ctx, args, n);
    for (int32_t i = 0; together && i < n; i++) {
        BR_TRY(job_of(ctx, &args[i], &job[i]));
        job[i].lowest = (int32_t)args->fault.code; /* codes ascend: none of this launch is lower */
        n_slot += job[i].n_slot;
        together = args[i].n_row == args->n_row && is_aligned(&job[i]);
    }
    if (together && (n_slot || pays_together(job, n)) && give_t(ctx, job, n))
        BR_TRY(args->n_row > DENSE_SMALL_ROWS ? bi_dense_many(ctx, job, n, &done) : bi_dense_stream(ctx, job, n, &done));
    for (int32_t i = 0; !done && i < n; i++)
        BR_TRY(bi_cuda_linear(ctx, &args[i]));
    return BR_OK;
}

/* ---- open and close -------------------------------------------------------------------------------------------------- */

br_status bi_cuda_linear_open(bi_ctx *ctx) {
    dense_state *state = NULL;
    BR_TRY(br_mem_alloc((void **)&state, sizeof *state, "the dense products"));
    ctx->dense = state;
    for (int i = 0; i < FORM_COUNT; i++)
        if (cudaFuncSetAttribute((const void *)FORM[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FORM[i].shared) != cudaSuccess)
            return br_fail(BR_E_DEVICE, "linear: the GPU grants no %d bytes of shared memory", FORM[i].shared);
    BR_TRY(br_device_alloc(ctx->device, 256, "counters of the dense products", (void **)&state->arrived));
    BR_TRY(bi_dense_lt_open(ctx, &state->lt));
    BR_TRY(bi_dense_stream_open(state));
    BR_TRY(bi_dense_many_open());
    BR_TRY(bi_dense_head_open());
    memset(ctx->launch, 0, sizeof ctx->launch); /* what opening launched is nobody's step */
    return BR_OK;
}

void bi_cuda_linear_note(const bi_ctx *ctx, char *note, size_t n) {
    bi_dense_lt_note(((const dense_state *)ctx->dense)->lt, note, n);
}

void bi_cuda_linear_close(bi_ctx *ctx) {
    dense_state *state = (dense_state *)ctx->dense;
    if (!state)
        return;
    if (state->lt)
        bi_dense_lt_close(ctx, state->lt);
    br_device_free(ctx->device, state->arrived);
    br_mem_free(state);
    ctx->dense = NULL;
}
