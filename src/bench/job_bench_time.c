/* Measuring one row of the verb `bench`; see job_bench.h.
 *
 * First the bits: the digest of the outputs, the same rows at another launch shape, no faults. Then blocks, ours and the peer's
 * in turn, so that both meet the same clocks and temperatures: a block plays a recorded step of a few milliseconds once to
 * warm up and once between two marks. The step goes through the row's operand sets, so that none of them is in a cache. A ceiling has more
 * blocks of a call or two: a card at its power limit gives its best rate only for moments, and some of them fall into such a moment. For the
 * same reason a row begins after a rest, but in quick runs: behind a row of products the card is slower for a while, whatever it does. */
#include "job_bench.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCKS = 9, BLOCKS_QUICK = 3, BLOCKS_CEILING = 36, CALLS_MAX = 512, CHUNK_BYTES = 64 << 20, REST_NS = 300000000 };

static const double BLOCK_US = 4000, BLOCK_QUICK_US = 1000, BLOCK_CEILING_US = 500; /* a recorded step lasts at least so long, if calls allow */

static br_status call(bench *b, const bench_row *row, int32_t variant) {
    return row->op(b, (const unsigned char *)row->args + row->args_bytes * (size_t)variant);
}

/* ---- bits -------------------------------------------------------------------------------------------------------------- */

static br_status hash_output(bench *b, const bench_output *output, unsigned char *chunk, br_hash_stream *stream) {
    for (size_t at = 0; at < output->bytes; at += CHUNK_BYTES) {
        const size_t n = output->bytes - at < CHUNK_BYTES ? output->bytes - at : CHUNK_BYTES;
        BR_TRY(br_device_download(b->device, chunk, (const unsigned char *)output->all + at, n));
        BR_TRY(br_device_wait(b->device));
        br_hash_add(stream, chunk, n);
    }
    return BR_OK;
}

static br_status compare_output(bench *b, const bench_row *row, int32_t i, unsigned char *chunk) {
    const bench_output *output = &row->output[i];
    const size_t n = output->bytes < output->twin_bytes ? output->bytes : output->twin_bytes, half = CHUNK_BYTES / 2;
    for (size_t at = 0; output->twin && at < n; at += half) {
        const size_t part = n - at < half ? n - at : half;
        BR_TRY(br_device_download(b->device, chunk, (const unsigned char *)output->all + at, part));
        BR_TRY(br_device_download(b->device, chunk + half, (const unsigned char *)output->twin + at, part));
        BR_TRY(br_device_wait(b->device));
        for (size_t k = 0; k < part; k++)
            if (chunk[k] != chunk[half + k])
                return br_fail(BR_E_MISMATCH, "output %d differs at byte %zu from that of the same rows in another step", i, at + k);
    }
    return BR_OK;
}

static br_status check_faults(bench *b, const bench_row *row, unsigned char *chunk) {
    const size_t n = sizeof *b->fault * (size_t)row->n_row;
    BR_ASSERT(n <= CHUNK_BYTES && row->n_row <= b->shape->prefill);
    BR_TRY(br_device_download(b->device, chunk, b->fault, n));
    BR_TRY(br_device_wait(b->device));
    for (size_t k = 0; k < n; k++) {
        if (!chunk[k])
            continue;
        memset(chunk, 0, n);
        BR_TRY(br_device_upload(b->device, b->fault, chunk, n)); /* the next row starts clean */
        BR_TRY(br_device_wait(b->device));
        return br_fail(BR_E_NAN, "row %zu reports NaN or Inf", k / sizeof *b->fault);
    }
    return BR_OK;
}

static br_status check_bits(bench *b, const bench_row *row, bench_result *result) {
    br_status status;
    br_hash_stream stream;
    unsigned char *chunk;
    BR_TRY(br_mem_alloc((void **)&chunk, CHUNK_BYTES, "outputs"));
    br_hash_begin(&stream);
    BR_TRY_GOTO(call(b, row, 0), exit);
    if (row->read)
        BR_TRY_GOTO(row->read(b, row->read_args), exit);
    BR_TRY_GOTO(br_device_wait(b->device), exit);
    for (int32_t i = 0; i < row->n_output; i++) {
        if (!row->output[i].hashed)
            continue;
        BR_TRY_GOTO(hash_output(b, &row->output[i], chunk, &stream), exit);
        result->has_digest = 1;
    }
    result->digest = br_hash_end(&stream);
    BR_TRY_GOTO(check_faults(b, row, chunk), exit);
    if (!row->twin)
        goto exit;
    BR_TRY_GOTO(row->op(b, row->twin), exit);
    BR_TRY_GOTO(br_device_wait(b->device), exit);
    for (int32_t i = 0; i < row->n_output; i++)
        BR_TRY_GOTO(compare_output(b, row, i, chunk), exit);
exit:
    br_mem_free(chunk);
    return status;
}

/* ---- times ------------------------------------------------------------------------------------------------------------- */

typedef struct step {
    br_graph *graph; /* NULL: the calls themselves, on a host device */
    int32_t n_pass;  /* times through all operand sets */
} step;

static br_status pass(bench *b, const bench_row *row) {
    for (int32_t i = 0; i < row->n_variant; i++)
        BR_TRY(call(b, row, i));
    return BR_OK;
}

static br_status record(bench *b, const bench_row *row, step *s) {
    br_status status = BR_OK;
    if (row->is_plain || br_device_is_host(b->device))
        return BR_OK;
    BR_TRY(br_graph_begin(b->device));
    for (int32_t i = 0; status == BR_OK && i < s->n_pass; i++)
        status = pass(b, row);
    return status == BR_OK ? br_graph_end(b->device, &s->graph) : br_graph_break(b->device, status);
}

static br_status play(bench *b, const bench_row *row, const step *s) {
    if (s->graph)
        return br_graph_run(b->device, s->graph);
    for (int32_t i = 0; i < s->n_pass; i++)
        BR_TRY(pass(b, row));
    return BR_OK;
}

/* Passes that fill a block, from the time of one. */
static br_status choose_passes(bench *b, const bench_row *row, int32_t *n_pass) {
    const double wanted = row->is_ceiling ? BLOCK_CEILING_US : b->options->quick ? BLOCK_QUICK_US : BLOCK_US;
    double us = 0;
    BR_TRY(pass(b, row)); /* the first time pays for what is loaded late */
    BR_TRY(br_device_mark(b->device, 0));
    BR_TRY(pass(b, row));
    BR_TRY(br_device_mark(b->device, 1));
    BR_TRY(br_device_elapsed(b->device, 0, 1, &us));
    const int32_t most = CALLS_MAX / row->n_variant > 1 ? CALLS_MAX / row->n_variant : 1;
    *n_pass = us * most <= wanted ? most : (int32_t)(wanted / us) + 1;
    return BR_OK;
}

static br_status time_block(bench *b, const bench_row *row, const step *s, double *us) {
    BR_TRY(play(b, row, s));
    BR_TRY(br_device_mark(b->device, 0));
    BR_TRY(play(b, row, s));
    BR_TRY(br_device_mark(b->device, 1));
    BR_TRY(br_device_elapsed(b->device, 0, 1, us));
    *us /= (double)s->n_pass * row->n_variant;
    return BR_OK;
}

/* A peer that cannot do this row leaves its columns empty and is told about; one that is gone is asked no more. */
static void ask_peer(bench *b, const bench_row *row, double *us, int *asked) {
    if (!*asked)
        return;
    br_status status = bench_peer_time(b->peer, row->request, us);
    if (status == BR_OK)
        return;
    bench_say(b, "%s: no time of %s: %s", row->name, row->peer_name, br_last_error());
    *asked = 0;
    *us = 0;
    if (status == BR_E_UNSUPPORTED)
        return;
    bench_peer_close(b->peer);
    b->peer = NULL;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static void rest(const bench *b) {
    const struct timespec span = {0, REST_NS};
    if (!b->options->quick && !br_device_is_host(b->device))
        nanosleep(&span, NULL);
}

static br_status time_blocks(bench *b, const bench_row *row, const step *s, bench_result *result) {
    double ours[BLOCKS_CEILING], theirs[BLOCKS_CEILING], ignored;
    const int n = row->is_ceiling ? BLOCKS_CEILING : b->options->quick ? BLOCKS_QUICK : BLOCKS;
    int asked = b->peer && row->request;
    ask_peer(b, row, &ignored, &asked); /* makes its operands */
    rest(b);
    for (int i = 0; i < n; i++) {
        BR_TRY(time_block(b, row, s, &ours[i]));
        ask_peer(b, row, &theirs[i], &asked);
    }
    result->us = median(ours, n);
    result->us_min = ours[0];
    result->us_max = ours[n - 1];
    result->peer_us = asked ? median(theirs, n) : 0;
    result->peer_us_min = asked ? theirs[0] : 0;
    return BR_OK;
}

static double floor_us(const bench *b, const bench_row *row) {
    static const double FP32_RATE = 60e12;
    const double rate = row->unit == BENCH_FP32 ? FP32_RATE : row->unit == BENCH_MMA_F8 ? 2 * b->mma_rate : b->mma_rate;
    if (b->copy_rate <= 0 || rate <= 0 || (row->bytes <= 0 && row->flops <= 0))
        return 0;
    const double memory = 1e6 * row->bytes / b->copy_rate, compute = 1e6 * row->flops / rate;
    return memory > compute ? memory : compute;
}

/* A product, ours or the peer's, that beats the ceiling. At reduced sizes nothing reaches a ceiling, and nothing is said. */
static void check_ceiling(bench *b, const bench_row *row, const bench_result *r) {
    const double us = r->peer_us > 0 && r->peer_us < r->us ? r->peer_us : r->us, rate = 1e6 * row->flops / us;
    if (!b->over || b->shape->dense_divisor != 1 || row->unit != BENCH_MMA || b->mma_rate <= 0 || rate <= b->mma_rate)
        return;
    bench_say(b, "WARNING: %s runs at %.4g TFLOP/s, above the bf16 ceiling of this run, %.4g", row->name, 1e-12 * rate, 1e-12 * b->mma_rate);
    if (b->over->n++ > 0 && rate <= b->over->rate)
        return;
    b->over->rate = rate;
    snprintf(b->over->name, sizeof b->over->name, "%s", row->name);
}

br_status bench_measure(bench *b, const bench_row *row, bench_result *result) {
    bench_result own = {0};
    step s = {0};
    br_status status;
    BR_TRY(check_bits(b, row, &own));
    BR_TRY(choose_passes(b, row, &s.n_pass));
    BR_TRY_GOTO(record(b, row, &s), exit);
    BR_TRY_GOTO(time_blocks(b, row, &s, &own), exit);
    own.floor_us = row->floor_us > 0 ? row->floor_us : floor_us(b, row);
    check_ceiling(b, row, &own);
    status = bench_record(b, row, &own, own.floor_us > 0 ? own.floor_us / own.us : -1, own.peer_us > 0 ? own.peer_us / own.us : -1);
    if (result)
        *result = own;
exit:
    br_graph_free(s.graph);
    return status;
}
