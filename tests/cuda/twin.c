/* Twin memory for op tests; see twin.h. */
#include "twin.h"

#include "bi_cuda_test.h"
#include "br_mem.h"
#include "launch_list.h"
#include "test_support.h"

#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, POISON = 0xff };

void twin_open(twin *t, const bi_limits *limits, size_t bytes) {
    const char *runs = getenv("BITROLL_GPU_RUNS");
    memset(t, 0, sizeof *t);
    t->size = bytes;
    t->n_gpu_run = runs && strcmp(runs, "1") == 0 ? 1 : 2;
    CHECK_OK(br_pool_open(br_pool_core_count(), &t->pool));
    CHECK_OK(br_device_open("cuda", &t->device));
    CHECK_OK(bi_backend_oracle_open(limits, t->pool, NULL, &t->backend[TWIN_ORACLE]));
    CHECK_OK(bi_backend_cuda_open(limits, t->device, &t->backend[TWIN_CUDA]));
    CHECK_OK(br_mem_alloc((void **)&t->host, bytes, "a twin"));
    CHECK_OK(br_mem_alloc((void **)&t->back, bytes, "a twin"));
    CHECK_OK(br_mem_alloc((void **)&t->first, bytes, "a twin"));
    CHECK_OK(br_device_alloc(t->device, bytes, "a twin", (void **)&t->device_side));
    t->used = bytes - GUARD; /* all is poisoned once, afterwards what a case has used */
    twin_reset(t);
}

void twin_reset(twin *t) {
    CHECK_OK(br_device_wait(t->device));
    for (int i = 0; i < t->n_block; i++) {
        br_mem_free(t->block[i].side[TWIN_ORACLE]);
        br_device_free(t->device, t->block[i].side[TWIN_CUDA]);
        br_mem_free(t->block[i].before);
        br_mem_free(t->block[i].first);
    }
    t->n_block = t->n_array = 0;
    memset(t->host, POISON, t->used + GUARD);
    t->used = 0;
}

void twin_close(twin *t) {
    twin_reset(t);
    br_mem_free(t->host);
    br_mem_free(t->back);
    br_mem_free(t->first);
    br_device_free(t->device, t->device_side);
    bi_backend_close(&t->backend[TWIN_CUDA]);
    bi_backend_close(&t->backend[TWIN_ORACLE]);
    br_device_close(t->device);
    br_pool_close(t->pool);
}

void *twin_take(twin *t, const char *name, size_t bytes) {
    const size_t at = (t->used + GUARD - 1) / GUARD * GUARD + GUARD;
    ck_assert_msg(at + bytes + GUARD <= t->size, "the twin of %zu bytes is too small for %s of %zu", t->size, name, bytes);
    ck_assert_int_lt(t->n_array, TWIN_ARRAY_MAX);
    t->array[t->n_array].name = name;
    t->array[t->n_array].at = at;
    t->array[t->n_array++].bytes = bytes;
    t->used = at + bytes;
    return t->host + at;
}

void *twin_at(const twin *t, twin_side side, const void *host) {
    if (!host)
        return NULL;
    const size_t at = (size_t)((const unsigned char *)host - t->host);
    ck_assert_msg(at < t->size, "an array that is not the twin's");
    return (side == TWIN_ORACLE ? t->host : t->device_side) + at;
}

static twin_block *new_block(twin *t, size_t bytes_oracle, size_t bytes_cuda) {
    ck_assert_int_lt(t->n_block, TWIN_BLOCK_MAX);
    twin_block *block = &t->block[t->n_block++];
    *block = (twin_block){.bytes = {bytes_oracle, bytes_cuda}};
    CHECK_OK(br_mem_alloc(&block->side[TWIN_ORACLE], bytes_oracle, "a twin block"));
    CHECK_OK(br_device_alloc(t->device, bytes_cuda, "a twin block", &block->side[TWIN_CUDA]));
    memset(block->side[TWIN_ORACLE], POISON, bytes_oracle);
    return block;
}

twin_block twin_private(twin *t, size_t bytes_oracle, size_t bytes_cuda) {
    twin_block *block = new_block(t, bytes_oracle, bytes_cuda);
    CHECK_OK(br_mem_alloc((void **)&block->before, bytes_cuda, "a twin block"));
    CHECK_OK(br_mem_alloc((void **)&block->first, bytes_cuda, "a twin block"));
    memset(block->before, POISON, bytes_cuda);
    CHECK_OK(br_device_upload(t->device, block->side[TWIN_CUDA], block->before, bytes_cuda));
    CHECK_OK(br_device_wait(t->device));
    return *block;
}

/* Only written here: packing leaves no byte of a matrix out. */
static twin_mat new_stack(twin *t, bi_form form, int n, int n_out, int n_in) {
    twin_mat mat;
    size_t stride[2];
    for (int side = 0; side < 2; side++)
        stride[side] = t->backend[side].op->mat_bytes(form, n_out, n_in);
    const twin_block *block = new_block(t, stride[0] * (size_t)n, stride[1] * (size_t)n);
    for (int side = 0; side < 2; side++)
        mat.side[side] = (bi_mat){.data = block->side[side], .n_out = n_out, .n_in = n_in, .form = form, .stride = stride[side]};
    return mat;
}

twin_mat twin_stack(twin *t, const bi_bf16 *w, int n, int n_out, int n_in) {
    twin_mat mat = new_stack(t, BI_FORM_BF16, n, n_out, n_in);
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < n; i++)
            CHECK_OK(t->backend[side].op->mat_pack_bf16(t->backend[side].ctx, (void *)bi_mat_at(&mat.side[side], i).data, n_out, n_in,
                                                        w + (size_t)i * (size_t)n_out * (size_t)n_in, n_in, 1));
    return mat;
}

twin_mat twin_stack_fp4(twin *t, const uint8_t *code, const uint8_t *scale, int n, int n_out, int n_in) {
    twin_mat mat = new_stack(t, BI_FORM_FP4, n, n_out, n_in);
    const size_t weights = (size_t)n_out * (size_t)n_in;
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < n; i++)
            CHECK_OK(t->backend[side].op->mat_pack_fp4(t->backend[side].ctx, (void *)bi_mat_at(&mat.side[side], i).data, n_out, n_in,
                                                       code + (size_t)i * weights / 2, scale + (size_t)i * weights / 32));
    return mat;
}

void twin_begin(twin *t) {
    for (int i = 0; i < t->n_block; i++)
        if (t->block[i].before)
            CHECK_OK(br_device_download(t->device, t->block[i].before, t->block[i].side[TWIN_CUDA], t->block[i].bytes[TWIN_CUDA]));
    CHECK_OK(br_device_upload(t->device, t->device_side, t->host, t->used + GUARD));
    CHECK_OK(bi_cuda_poison(&t->backend[TWIN_CUDA]));
    CHECK_OK(br_device_wait(t->device));
    bi_cuda_launch_reset(&t->backend[TWIN_CUDA]);
    t->run = 0;
}

br_status twin_wait(twin *t) {
    return br_device_wait(t->device);
}

static const char *array_at(const twin *t, size_t at, size_t *index) {
    for (int i = t->n_array - 1; i >= 0; i--) {
        if (at < t->array[i].at)
            continue;
        *index = at - t->array[i].at;
        return *index < t->array[i].bytes ? t->array[i].name : "the gap behind an array";
    }
    *index = at;
    return "the first gap";
}

/* Fails when two states of the memory differ. */
static void compare(const twin *t, const char *what, const unsigned char *wanted, const char *of_wanted) {
    size_t n_differ = 0, first = 0, index;
    for (size_t i = 0; i < t->used + GUARD; i++) {
        if (wanted[i] == t->back[i])
            continue;
        first = n_differ++ ? first : i;
    }
    if (!n_differ)
        return;
    uint32_t expected, found;
    const char *name = array_at(t, first, &index);
    memcpy(&expected, wanted + first / 4 * 4, sizeof expected);
    memcpy(&found, t->back + first / 4 * 4, sizeof found);
    ck_abort_msg("%s: %zu bytes differ, the first at byte %zu of %s: %08x from the GPU, %08x from %s", what, n_differ, index, name, found,
                 expected, of_wanted);
}

/* Keeps what the first run left, and puts everything but scratch back to where that began. */
static void begin_again(twin *t) {
    CHECK_OK(br_device_download(t->device, t->first, t->device_side, t->used + GUARD));
    CHECK_OK(br_device_upload(t->device, t->device_side, t->host, t->used + GUARD));
    for (int i = 0; i < t->n_block; i++) {
        const twin_block *block = &t->block[i];
        if (!block->before)
            continue;
        CHECK_OK(br_device_download(t->device, block->first, block->side[TWIN_CUDA], block->bytes[TWIN_CUDA]));
        CHECK_OK(br_device_upload(t->device, block->side[TWIN_CUDA], block->before, block->bytes[TWIN_CUDA]));
    }
    CHECK_OK(br_device_wait(t->device));
}

static void compare_runs(twin *t) {
    CHECK_OK(br_device_download(t->device, t->back, t->device_side, t->used + GUARD));
    CHECK_OK(br_device_wait(t->device));
    compare(t, "two runs of the GPU", t->first, "the first run");
    for (int i = 0; i < t->n_block; i++) {
        const twin_block *block = &t->block[i];
        if (!block->before)
            continue;
        CHECK_OK(br_device_download(t->device, block->before, block->side[TWIN_CUDA], block->bytes[TWIN_CUDA]));
        CHECK_OK(br_device_wait(t->device));
        ck_assert_msg(memcmp(block->before, block->first, block->bytes[TWIN_CUDA]) == 0, "two runs of the GPU: block %d differs", i);
    }
}

int twin_next(twin *t, twin_side *side) {
    *side = t->run < t->n_gpu_run ? TWIN_CUDA : TWIN_ORACLE;
    if (t->run == 1 && t->n_gpu_run == 2)
        begin_again(t);
    if (t->run == 2 && t->n_gpu_run == 2)
        compare_runs(t);
    return t->run++ <= t->n_gpu_run;
}

void twin_compare(twin *t, const char *what) {
    CHECK_OK(br_device_download(t->device, t->back, t->device_side, t->used + GUARD));
    CHECK_OK(br_device_wait(t->device));
    compare(t, what, t->host, "the oracle");
}

/* Of all runs since twin_begin; names: "a|b". Cuts them apart. */
static int launched(const bi_backend *cuda, char *names) {
    int sum = 0;
    for (const char *name = strtok(names, "|"); name; name = strtok(NULL, "|"))
        sum += (int)bi_cuda_launch_count(cuda, name);
    return sum;
}

void twin_launched(twin *t, const char *what, const char *list) {
    const bi_backend *cuda = &t->backend[TWIN_CUDA];
    const char *at = list;
    char names[LAUNCH_NAMES_BYTES], cut[LAUNCH_NAMES_BYTES];
    int n, sum = 0, left, found;
    while ((left = launch_list_next(&at, names, &n)) > 0) {
        sum += n;
        found = launched(cuda, strcpy(cut, names));
        ck_assert_msg(found == t->n_gpu_run * n, "%s: %d launches of %s in %d runs: expected %s a run", what, found, names, t->n_gpu_run, list);
    }
    ck_assert_msg(left == 0, "%s: '%s' is no list of launches", what, list);
    found = (int)bi_cuda_launch_count(cuda, NULL);
    ck_assert_msg(found == t->n_gpu_run * sum, "%s: %d launches in %d runs: expected %s a run", what, found, t->n_gpu_run, list);
}

twin_batch twin_batch_of(twin *t, const bi_seg *seg, int n_seg) {
    int32_t n_row = 0;
    bi_batch batch = {.n_seg = n_seg};
    for (int i = 0; i < n_seg; i++)
        n_row += seg[i].n_row;
    bi_seg *segs = TWIN_ARRAY(t, bi_seg, "segments", n_seg);
    int32_t *row_seg = TWIN_ARRAY(t, int32_t, "row_seg", n_row);
    for (int i = 0, row = 0; i < n_seg; i++) {
        segs[i] = seg[i];
        segs[i].row = row;
        for (int32_t k = 0; k < seg[i].n_row; k++)
            row_seg[row++] = i;
        if (seg[i].n_row > batch.seg_row_max)
            batch.seg_row_max = seg[i].n_row;
        if (seg[i].pos + seg[i].n_row - 1 > batch.pos_max)
            batch.pos_max = seg[i].pos + seg[i].n_row - 1;
    }
    batch.n_row = n_row;
    twin_batch both;
    for (int side = 0; side < 2; side++) {
        both.side[side] = batch;
        both.side[side].seg = twin_at(t, (twin_side)side, segs);
        both.side[side].row_seg = twin_at(t, (twin_side)side, row_seg);
    }
    return both;
}
