/* The verb `bench`: opens the device, measures the ceilings, goes through the families of rows, writes the table; see
 * job_bench.h. Layer: bench. */
#include "job_bench.h"

#include "job_report.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const bench_shape SHAPES[] = {
    {
        .name = "full", .d_model = 7168, .n_vocab = 163840, .prefill = 8192,
        .n_head = 96, .d_kv_latent = 512, .d_nope = 128, .d_rope = 64, .kda_n_head = 96, .kda_d = 128,
        .index_n_head = 32, .index_d = 128, .topk = 2048, .n_pos = 131072, .attn_n_pos = 32768,
        .d_latent = 3584, .d_ff = 3072, .n_expert = 896, .expert_topk = 16,
        .dense_divisor = 1, .batch_divisor = 1, .slice_preset = "slice-full", .slice_context = 32768,
        .copy_bytes = 1601000000, .spread_bytes = (size_t)240 << 20,
    },
    {
        .name = "tiny", .d_model = 112, .n_vocab = 640, .prefill = 128,
        .n_head = 4, .d_kv_latent = 32, .d_nope = 16, .d_rope = 16, .kda_n_head = 2, .kda_d = 32,
        .index_n_head = 4, .index_d = 32, .topk = 32, .n_pos = 512, .attn_n_pos = 256,
        .d_latent = 64, .d_ff = 96, .n_expert = 16, .expert_topk = 4,
        .dense_divisor = 64, .batch_divisor = 8, .slice_preset = "pico", .slice_context = 200, .copy_bytes = 1 << 20, .spread_bytes = 1 << 16,
    },
};

enum { N_SHAPE = sizeof SHAPES / sizeof SHAPES[0] };

/* In the order of the table. */
static br_status (*const FAMILY[])(bench *) = {
    bench_dense, bench_kda, bench_index, bench_attn, bench_experts, bench_head, bench_row_ops, bench_slice, bench_price,
};

static const char CSV_HEADER[] = "date,commit,gpu,row,shape,us,us_min,us_max,floor_us,share,peer,peer_us,ratio,digest\n";
static const char DEFAULT_PEER[] = "experiments/bench/peer.py";

/* ---- which rows -------------------------------------------------------------------------------------------------------- */

static int has_prefix(const char *prefixes, const char *name) {
    for (const char *at = prefixes;;) {
        const size_t n = strcspn(at, ",");
        if (n > 0 && strncmp(at, name, n) == 0)
            return 1;
        if (!at[n])
            return 0;
        at += n + 1;
    }
}

void bench_say(const bench *b, const char *format, ...) {
    char text[600];
    va_list args;
    if (!b->line)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    b->line(b->context, text);
}

int bench_is_chosen(const bench *b, const char *name) {
    return !b->options->rows || has_prefix(b->options->rows, name);
}

int bench_wants(bench *b, const char *name) {
    if (!bench_is_chosen(b, name))
        return 0;
    b->report->n_seq++;
    if (b->naming) {
        bench_say(b, "%s", name);
        return 0;
    }
    bench_forget(b);
    return 1;
}

br_status bench_settle(bench *b, const char *name, br_status status) {
    char sentence[200];
    if (status == BR_OK)
        return BR_OK;
    snprintf(sentence, sizeof sentence, "%.199s", br_last_error());
    if (status == BR_E_IO || br_device_wait(b->device) != BR_OK) /* a launch that was refused leaves the device as it was */
        return br_fail(status, "%s: %s", name, sentence);
    bench_say(b, "%s: FAILED: %s", name, sentence);
    if (b->report->n_error++ == 0)
        snprintf(b->failure, sizeof b->failure, "%.40s: %s", name, sentence);
    return BR_OK;
}

/* ---- the table --------------------------------------------------------------------------------------------------------- */

/* A text as a field: no comma, no line's end. */
static void put_field(FILE *out, const char *text) {
    for (; *text; text++)
        fputc(*text == ',' || *text == '\n' || *text == '"' ? ' ' : *text, out);
    fputc(',', out);
}

static void put_number(FILE *out, const char *format, double x, int is_there) {
    if (is_there)
        fprintf(out, format, x);
    fputc(',', out);
}

static br_status write_csv(bench *b, const bench_row *row, const bench_result *r, double share, double ratio) {
    char digest[BR_DIGEST_TEXT_BYTES] = "";
    FILE *out = b->csv;
    if (!out)
        return BR_OK;
    if (r->has_digest)
        br_digest_text(r->digest, digest);
    put_field(out, b->date);
    put_field(out, b->options->commit ? b->options->commit : "");
    put_field(out, br_device_name(b->device));
    put_field(out, row->name);
    put_field(out, row->shape);
    put_number(out, "%.3f", r->us, r->us > 0);
    put_number(out, "%.3f", r->us_min, r->us > 0);
    put_number(out, "%.3f", r->us_max, r->us > 0);
    put_number(out, "%.3f", r->floor_us, r->floor_us > 0);
    put_number(out, "%.4f", share, share >= 0);
    put_field(out, ratio >= 0 ? row->peer_name : "");
    put_number(out, "%.3f", r->peer_us, r->peer_us > 0);
    put_number(out, "%.4f", ratio, ratio >= 0);
    fprintf(out, "%s\n", digest);
    if (fflush(out) != 0 || ferror(out))
        return br_fail(BR_E_IO, "%s: cannot write: %s", b->options->csv_path, strerror(errno));
    return BR_OK;
}

/* A number of the table, or a dash. */
static const char *cell(char text[24], const char *format, double x, int is_there) {
    if (is_there)
        snprintf(text, 24, format, x);
    return is_there ? text : "-";
}

static void say_header(bench *b) {
    bench_say(b, "%-28s %11s %11s %11s %11s %6s  %-28s %11s %6s  %-32s %s", "row", "us", "min", "max", "floor us", "share", "peer", "peer us",
              "ratio", "digest", "shape");
}

br_status bench_record(bench *b, const bench_row *row, const bench_result *r, double share, double ratio) {
    char us[24], low[24], high[24], floor[24], part[24], peer[24], times[24], digest[BR_DIGEST_TEXT_BYTES] = "-";
    if (r->has_digest)
        br_digest_text(r->digest, digest);
    bench_say(b, "%-28s %11s %11s %11s %11s %6s  %-28s %11s %6s  %-32s %s", row->name, cell(us, "%.2f", r->us, r->us > 0),
              cell(low, "%.2f", r->us_min, r->us > 0), cell(high, "%.2f", r->us_max, r->us > 0),
              cell(floor, "%.2f", r->floor_us, r->floor_us > 0), cell(part, "%.3f", share, share >= 0), ratio >= 0 ? row->peer_name : "-",
              cell(peer, "%.2f", r->peer_us, r->peer_us > 0), cell(times, "%.3f", ratio, ratio >= 0), digest, row->shape);
    return write_csv(b, row, r, share, ratio);
}

/* Between the least and the greatest; halved until nothing is left. Products of quotients by the middle cannot overflow. */
double bench_geomean(const double *x, int n) {
    double low = x[0], high = x[0];
    for (int i = 1; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    for (int step = 0; step < 60; step++) {
        const double middle = low + (high - low) / 2;
        double product = 1;
        for (int i = 0; i < n; i++)
            product *= x[i] / middle;
        *(product > 1 ? &low : &high) = middle;
    }
    return low + (high - low) / 2;
}

/* ---- open and close ---------------------------------------------------------------------------------------------------- */

static br_status check_options(const br_bench_options *options, const bench_shape **shape) {
    const int is_oracle = options->backend && strcmp(options->backend, "oracle") == 0;
    *shape = NULL;
    for (int i = 0; i < N_SHAPE; i++)
        if (strcmp(SHAPES[i].name, options->scale ? options->scale : "full") == 0)
            *shape = &SHAPES[i];
    if (!*shape)
        return br_fail(BR_E_ARG, "scale '%s': expected full or tiny", options->scale);
    if (options->backend && !is_oracle && strcmp(options->backend, "cuda") != 0)
        return br_fail(BR_E_UNSUPPORTED, "backend '%s': expected oracle or cuda", options->backend);
    if (is_oracle && *shape == &SHAPES[0] && !options->list)
        return br_fail(BR_E_ARG, "the oracle at full scale would take days: expected scale tiny, a dry run");
    if (options->n_thread < 0 || options->n_thread > BR_THREAD_MAX)
        return br_fail(BR_E_ARG, "%d threads: expected 1 to %d", options->n_thread, BR_THREAD_MAX);
    return BR_OK;
}

static bi_limits limits_of(const bench_shape *s) {
    const int32_t width = 12288 / s->dense_divisor, kda = s->kda_n_head * s->kda_d;
    return (bi_limits){
        .n_row = s->prefill, .d_in = width > kda ? width : kda, .d_out = 49152 / s->dense_divisor, .rank = BENCH_LORA_RANK, .n_slot = 1,
        .n_head = s->n_head, .d_kv_latent = s->d_kv_latent, .d_rope = s->d_rope, .index_n_head = s->index_n_head,
        .index_d_head = s->index_d, .n_pos = s->n_pos, .n_expert = s->n_expert, .n_expert_topk = s->expert_topk, .d_expert = s->d_latent,
        .d_expert_ff = s->d_ff, .kda_n_head = s->kda_n_head, .kda_d_head = s->kda_d, .n_vocab = s->n_vocab, .d_model = s->d_model,
    };
}

static br_status open_backend(bench *b) {
    const bi_limits limits = limits_of(b->shape);
    const int is_oracle = b->options->backend && strcmp(b->options->backend, "oracle") == 0;
    const br_status opened = br_device_open(is_oracle ? "host" : "cuda", &b->device);
    if (opened == BR_E_DEVICE || opened == BR_E_UNSUPPORTED)
        return br_fail(opened, "%s: --backend oracle --scale tiny is a dry run without a GPU", br_last_error());
    BR_TRY(opened);
    if (!is_oracle)
        return bi_backend_cuda_open(&limits, b->device, &b->backend);
    BR_TRY(br_pool_open(b->options->n_thread ? b->options->n_thread : br_pool_core_count(), &b->pool));
    return bi_backend_oracle_open(&limits, b->pool, NULL, &b->backend);
}

/* Without a word about it the peer is the script of this repository, where it stands and runs. */
static br_status open_peer(bench *b) {
    const char *command = b->options->peer;
    char text[64];
    if (command && strcmp(command, "none") == 0)
        return BR_OK;
    if (command)
        BR_TRY(bench_peer_open(command, &b->peer));
    else if (!br_device_is_host(b->device) && access(DEFAULT_PEER, R_OK) == 0) {
        snprintf(text, sizeof text, "exec python3 %s", DEFAULT_PEER);
        if (bench_peer_open(text, &b->peer) != BR_OK)
            bench_say(b, "no peer: %s", br_last_error());
    }
    if (b->peer)
        bench_say(b, "peer: %s", bench_peer_name(b->peer));
    return BR_OK;
}

static br_status open_csv(bench *b) {
    const char *path = b->options->csv_path;
    if (!path)
        return BR_OK;
    b->csv = fopen(path, "a");
    if (!b->csv)
        return br_fail(BR_E_IO, "%s: cannot append: %s", path, strerror(errno));
    fseek(b->csv, 0, SEEK_END);
    if (ftell(b->csv) == 0)
        fputs(CSV_HEADER, b->csv);
    return fflush(b->csv) == 0 ? BR_OK : br_fail(BR_E_IO, "%s: cannot write: %s", path, strerror(errno));
}

static void say_backend(const bench *b) {
    char note[BI_CUDA_NOTE_BYTES];
    bi_cuda_note(&b->backend, note);
    if (note[0])
        bench_say(b, "%s", note);
}

static br_status open_bench(bench *b) {
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(b->date, sizeof b->date, "%Y-%m-%d", &utc);
    BR_TRY(open_backend(b));
    BR_TRY(open_csv(b));
    BR_TRY(bench_data_open(b));
    BR_TRY(open_peer(b));
    say_header(b);
    say_backend(b);
    return bench_ceilings(b);
}

static void close_bench(bench *b) {
    bench_peer_close(b->peer);
    if (b->device)
        bench_data_close(b);
    bi_backend_close(&b->backend);
    br_device_close(b->device);
    br_pool_close(b->pool);
    if (b->csv)
        fclose(b->csv);
}

/* The warning of the table: floors of a run whose ceiling was beaten are too low. */
static br_status record_over(bench *b) {
    const bench_result nothing = {0};
    bench_row row = {.name = "ceiling.mm.exceeded"};
    if (!b->over->n)
        return BR_OK;
    snprintf(row.shape, sizeof row.shape, "by %d rows; %.30s: %.4g against %.4g TFLOP/s", b->over->n, b->over->name, 1e-12 * b->over->rate,
             1e-12 * b->mma_rate);
    bench_say(b, "WARNING: the bf16 ceiling of this run is too low, and so are its floors and shares");
    return bench_record(b, &row, &nothing, -1, -1);
}

/* Errors: BR_E_ARG when no row is chosen. */
static br_status run_families(bench *b, int naming, br_line line) {
    b->naming = naming;
    b->line = line;
    b->report->n_seq = 0;
    for (size_t i = 0; i < sizeof FAMILY / sizeof FAMILY[0]; i++)
        BR_TRY(FAMILY[i](b));
    if (b->report->n_seq == 0)
        return br_fail(BR_E_ARG, "no row begins with any of '%s'; --list names them", b->options->rows);
    return BR_OK;
}

br_status br_job_bench(const br_bench_options *options, br_line line, void *context, br_report *report) {
    br_status status;
    bench_over over = {0};
    bench b = {.options = options, .context = context, .report = report, .over = &over};
    const double begin = report_clock();
    *report = (br_report){.first_seq = -1, .first_pos = -1, .contract_digest = br_contract_digest()};
    BR_TRY(check_options(options, &b.shape));
    BR_TRY(run_families(&b, 1, options->list ? line : NULL));
    if (options->list)
        return BR_OK;
    b.line = line;
    BR_TRY_GOTO(open_bench(&b), exit);
    BR_TRY_GOTO(run_families(&b, 0, line), exit);
    BR_TRY_GOTO(record_over(&b), exit);
    if (report->n_error > 0)
        status = br_fail(BR_E_MISMATCH, "%lld rows failed, the first: %s", (long long)report->n_error, b.failure);
exit:
    close_bench(&b);
    report->seconds = report_clock() - begin;
    return status;
}
