/* Random inputs of the verb `bench` in device memory; see job_bench.h. */
#include "job_bench.h"

#include <string.h>

/* splitmix64: numbers from counters. */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Eight uniforms of 8 bits: deviation 209.0 about their middle, so that a factor 1/209 makes it 1. */
static float normal(uint64_t i) {
    int32_t sum = -1020;
    for (uint64_t u = mix(i), k = 0; k < 8; k++, u >>= 8)
        sum += (int32_t)(u & 255);
    return (float)(2 * sum + 1) * (0.5f / 209.0f);
}

/* x * 2^-6, exact; numbers that would be subnormal do not occur. */
static bi_bf16 to_weight(bi_bf16 x) {
    return (x >> 7 & 255) > BENCH_WEIGHT_SHIFT ? (bi_bf16)(x - (BENCH_WEIGHT_SHIFT << 7)) : (bi_bf16)(x & 0x8000);
}

br_status bench_data_open(bench *b) {
    BR_TRY(br_mem_alloc((void **)&b->unit, sizeof *b->unit * BENCH_PERIOD, "random numbers"));
    BR_TRY(br_mem_alloc((void **)&b->weight, sizeof *b->weight * BENCH_PERIOD, "random numbers"));
    for (size_t i = 0; i < BENCH_PERIOD; i++) {
        b->unit[i] = bi_round(normal(i));
        b->weight[i] = to_weight(b->unit[i]);
    }
    return br_device_alloc(b->device, sizeof *b->fault * (size_t)b->shape->prefill, "fault words", (void **)&b->fault);
}

void bench_data_close(bench *b) {
    bench_forget(b);
    br_device_free(b->device, b->fault);
    br_mem_free(b->unit);
    br_mem_free(b->weight);
}

void bench_forget(bench *b) {
    while (b->n_block > 0)
        br_device_free(b->device, b->block[--b->n_block]);
    b->draw = 0;
}

br_status bench_take(bench *b, size_t bytes, const char *what, void **out) {
    BR_ASSERT(b->n_block < BENCH_BLOCK_MAX);
    BR_TRY(br_device_alloc(b->device, bytes, what, out));
    b->block[b->n_block++] = *out;
    return BR_OK;
}

br_status bench_upload(bench *b, const void *host, size_t bytes, const char *what, void **out) {
    BR_TRY(bench_take(b, bytes, what, out));
    BR_TRY(br_device_upload(b->device, *out, host, bytes));
    return br_device_wait(b->device);
}

/* The next n numbers, going round. */
static void draw(bench *b, const bi_bf16 *from, bi_bf16 *to, int64_t n) {
    while (n > 0) {
        const size_t at = b->draw % BENCH_PERIOD, room = BENCH_PERIOD - at, part = (size_t)n < room ? (size_t)n : room;
        memcpy(to, from + at, sizeof *to * part);
        to += part;
        n -= (int64_t)part;
        b->draw += part;
    }
}

br_status bench_bf16(bench *b, int64_t n, const bi_bf16 **out) {
    bi_bf16 *host;
    void *device = NULL;
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host * (size_t)n, "random numbers"));
    draw(b, b->unit, host, n);
    br_status status = bench_upload(b, host, sizeof *host * (size_t)n, "random numbers", &device);
    br_mem_free(host);
    *out = device;
    return status;
}

br_status bench_uniform(bench *b, int64_t n, float low, float high, const float **out) {
    float *host;
    void *device = NULL;
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host * (size_t)n, "random numbers"));
    for (int64_t i = 0; i < n; i++)
        host[i] = low + (high - low) * (float)(mix(b->draw++) >> 40) * 0x1p-24f;
    br_status status = bench_upload(b, host, sizeof *host * (size_t)n, "random numbers", &device);
    br_mem_free(host);
    *out = device;
    return status;
}

br_status bench_below(bench *b, int64_t n, int32_t bound, const int32_t **out) {
    int32_t *host;
    void *device = NULL;
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host * (size_t)n, "random integers"));
    for (int64_t i = 0; i < n; i++)
        host[i] = (int32_t)(mix(b->draw++) % (uint64_t)bound);
    br_status status = bench_upload(b, host, sizeof *host * (size_t)n, "random integers", &device);
    br_mem_free(host);
    *out = device;
    return status;
}

/* ---- matrices ---------------------------------------------------------------------------------------------------------- */

/* The first `have` of n blocks of `stride` bytes are there: the others become copies of them. */
static br_status repeat(bench *b, unsigned char *base, size_t stride, int32_t have, int32_t n) {
    for (int32_t done = have; done < n; done *= 2) {
        const int32_t part = bench_least(done, n - done);
        BR_TRY(br_device_copy(b->device, base + stride * (size_t)done, base, stride * (size_t)part));
    }
    return br_device_wait(b->device);
}

br_status bench_mat(bench *b, int32_t n_out, int32_t n_in, int32_t n_copy, bi_mat *out) {
    const size_t stride = b->backend.op->mat_bytes(BI_FORM_BF16, n_out, n_in);
    const int64_t n = (int64_t)n_out * n_in;
    void *data = NULL;
    bi_bf16 *host;
    BR_TRY(bench_take(b, stride * (size_t)n_copy, "a packed matrix", &data));
    BR_TRY(br_mem_alloc((void **)&host, sizeof *host * (size_t)n, "a matrix"));
    draw(b, b->weight, host, n);
    br_status status = b->backend.op->mat_pack_bf16(b->backend.ctx, data, n_out, n_in, host, n_in, 1);
    br_mem_free(host);
    *out = (bi_mat){.data = data, .n_out = n_out, .n_in = n_in, .form = BI_FORM_BF16, .stride = stride};
    BR_TRY(status);
    return repeat(b, data, stride, 1, n_copy);
}

/* Codes of any kind, and scales 2^-8 .. 2^-5: weights of about 2^-6. */
static br_status pack_fp4(bench *b, unsigned char *dst, int32_t n_out, int32_t n_in) {
    const size_t n_code = (size_t)n_out * (size_t)n_in / 2, n_scale = n_code / 16;
    uint8_t *code;
    BR_TRY(br_mem_alloc((void **)&code, n_code + n_scale + 8, "a matrix"));
    for (size_t i = 0; i < n_code + n_scale; i += 8) {
        const uint64_t u = mix(b->draw++);
        memcpy(code + i, &u, sizeof u);
    }
    for (size_t i = n_code; i < n_code + n_scale; i++)
        code[i] = (uint8_t)(119 + (code[i] & 3));
    br_status status = b->backend.op->mat_pack_fp4(b->backend.ctx, dst, n_out, n_in, code, code + n_code);
    br_mem_free(code);
    return status;
}

br_status bench_mat_fp4(bench *b, int32_t n_out, int32_t n_in, int32_t n, bi_mat *out) {
    enum { DRAWN = 8 };
    const size_t stride = b->backend.op->mat_bytes(BI_FORM_FP4, n_out, n_in);
    const int32_t n_drawn = bench_least(DRAWN, n);
    void *data = NULL;
    BR_TRY(bench_take(b, stride * (size_t)n, "packed experts", &data));
    for (int32_t i = 0; i < n_drawn; i++)
        BR_TRY(pack_fp4(b, (unsigned char *)data + stride * (size_t)i, n_out, n_in));
    *out = (bi_mat){.data = data, .n_out = n_out, .n_in = n_in, .form = BI_FORM_FP4, .stride = stride};
    return repeat(b, data, stride, n_drawn, n);
}

/* ---- steps and caches -------------------------------------------------------------------------------------------------- */

/* Lays the segments out and puts both arrays on the device. */
static br_status put_batch(bench *b, bi_seg *seg, int32_t *row_seg, bi_batch *batch) {
    void *seg_at = NULL, *row_seg_at = NULL;
    BR_TRY(bench_upload(b, seg, sizeof *seg * (size_t)batch->n_seg, "segments", &seg_at));
    BR_TRY(bench_upload(b, row_seg, sizeof *row_seg * (size_t)batch->n_row, "segments of rows", &row_seg_at));
    batch->seg = seg_at;
    batch->row_seg = row_seg_at;
    return BR_OK;
}

br_status bench_batch(bench *b, int32_t n_seg, int32_t n_row, int32_t seq, int32_t pos, bi_batch *out) {
    bi_seg *seg = NULL;
    int32_t *row_seg = NULL;
    br_status status;
    *out = (bi_batch){.n_row = n_seg * n_row, .n_seg = n_seg, .seg_row_max = n_row, .pos_max = pos + n_row - 1};
    BR_TRY_GOTO(br_mem_alloc((void **)&seg, sizeof *seg * (size_t)n_seg, "segments"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&row_seg, sizeof *row_seg * (size_t)out->n_row, "segments"), exit);
    for (int32_t i = 0; i < n_seg; i++)
        seg[i] = (bi_seg){.seq = seq + i, .row = i * n_row, .n_row = n_row, .pos = pos};
    for (int32_t i = 0; i < out->n_row; i++)
        row_seg[i] = i / n_row;
    status = put_batch(b, seg, row_seg, out);
exit:
    br_mem_free(seg);
    br_mem_free(row_seg);
    return status;
}

br_status bench_cache(bench *b, size_t block_bytes, int32_t n_seq, int32_t n_pos, int shared, bi_cache *out) {
    const int32_t n_page = (n_pos + BR_PAGE_TOK - 1) / BR_PAGE_TOK;
    const int64_t n_entry = (int64_t)n_seq * n_page, n_block = shared ? n_page : n_entry;
    int32_t *table;
    void *base = NULL, *table_at = NULL;
    BR_TRY(bench_take(b, block_bytes * (size_t)n_block, "a cache", &base));
    BR_TRY(br_mem_alloc((void **)&table, sizeof *table * (size_t)n_entry, "a block table"));
    const int64_t step = n_block % 7919 ? 7919 : 1; /* a prime: pages of a sequence lie apart, as they do after a while */
    for (int64_t i = 0; i < n_entry; i++)
        table[i] = (int32_t)(i % n_block * step % n_block);
    br_status status = bench_upload(b, table, sizeof *table * (size_t)n_entry, "a block table", &table_at);
    br_mem_free(table);
    *out = (bi_cache){.base = base, .block_bytes = block_bytes, .table = table_at, .table_ld = n_page};
    return status;
}

br_status bench_sweep_open(bench *b, int32_t n_seq, int32_t n_pos, bench_sweep *out) {
    int32_t n_row = bench_least(b->shape->prefill, n_pos);
    bi_seg *seg = NULL;
    int32_t *row_seg = NULL;
    br_status status;
    while (n_pos % n_row) /* parts of one size */
        n_row--;
    const int32_t n_part = n_pos / n_row;
    *out = (bench_sweep){.n_batch = n_seq * n_part, .n_row = n_row};
    out->batch = (bi_batch){.n_row = n_row, .n_seg = n_seq * n_part, .seg_row_max = n_row, .pos_max = n_pos - 1};
    BR_TRY_GOTO(br_mem_alloc((void **)&seg, sizeof *seg * (size_t)out->n_batch, "segments"), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&row_seg, sizeof *row_seg * (size_t)n_row, "segments"), exit); /* all 0 */
    for (int32_t i = 0; i < out->n_batch; i++)
        seg[i] = (bi_seg){.seq = i / n_part, .n_row = n_row, .pos = i % n_part * n_row};
    status = put_batch(b, seg, row_seg, &out->batch);
    out->batch.n_seg = 1;
exit:
    br_mem_free(seg);
    br_mem_free(row_seg);
    return status;
}

bi_batch bench_sweep_at(const bench_sweep *sweep, int32_t i) {
    bi_batch batch = sweep->batch;
    batch.seg += i;
    return batch;
}
