/* bitroll_cuda_swap [--csv FILE --commit TEXT] [--quick] [PART...]: see gpu_swap.h; parts: digest ipc load speed stream, without one all. */
#include "gpu_swap.h"

#include "br_device.h"
#include "br_hash.h"
#include "engine_parts.h"
#include "lora_file.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

void gpu_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\nFAILED\n");
    exit(1);
}

uint64_t gpu_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

double gpu_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

void *gpu_alloc(size_t n, size_t bytes) {
    void *block = calloc(n ? n : 1, bytes);
    GPU_EXPECT(block, "no memory for %zu x %zu bytes", n, bytes);
    return block;
}

static int rising(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void gpu_row(const gpu_swap *g, const char *row, const char *shape, double *us, int n, double floor_us, const br_digest *digest) {
    char date[16] = "", text[BR_DIGEST_TEXT_BYTES] = "", floor[64] = ",";
    const time_t now = time(NULL);
    qsort(us, (size_t)n, sizeof *us, rising);
    if (digest)
        br_digest_text(*digest, text);
    if (floor_us > 0)
        snprintf(floor, sizeof floor, "%.3f,%.4f", floor_us, floor_us / us[n / 2]);
    printf("%-24s %-44s %12.1f us (%.1f .. %.1f)", row, shape, us[n / 2], us[0], us[n - 1]);
    if (floor_us > 0)
        printf("  floor %.1f us, share %.3f, %.3f x", floor_us, floor_us / us[n / 2], us[n / 2] / floor_us);
    printf("\n");
    fflush(stdout);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    FILE *csv = g->csv ? fopen(g->csv, "a") : NULL;
    if (!csv)
        return;
    fprintf(csv, "%s,%s,%s,%s,%s,%.3f,%.3f,%.3f,%s,,,,%s\n", date, g->commit ? g->commit : "", g->gpu, row, shape, us[n / 2], us[0], us[n - 1], floor,
            text);
    fclose(csv);
}

void gpu_make_model(const gpu_swap *g, const char *preset, char dir[GPU_PATH]) {
    struct stat there;
    br_report report;
    snprintf(dir, GPU_PATH, "%.400s/%s", g->dir, preset);
    const br_init_options options = {.preset = preset, .out_dir = dir, .seed = 1};
    if (stat(dir, &there) == 0)
        return;
    GPU_TRY(br_job_init(&options, NULL, &report));
    br_report_free(&report);
}

void gpu_make_adapter(const gpu_swap *g, const char *model_dir, const char *name, uint64_t seed, int32_t rank, char dir[GPU_PATH]) {
    br_report report;
    snprintf(dir, GPU_PATH, "%.400s/%s", g->dir, name);
    const br_init_options options = {.out_dir = model_dir, .lora_rank = rank, .lora_seed = seed, .lora_out_dir = dir, .lora_only = 1};
    GPU_TRY(br_job_init(&options, NULL, &report));
    br_report_free(&report);
}

const uint16_t **gpu_values(const br_engine *e, const char *adapter, const lora_set *set, int64_t *n) {
    br_digest manifest;
    GPU_TRY(br_swap_manifest(e, adapter, n, &manifest));
    const uint16_t **value = gpu_alloc((size_t)*n, sizeof *value);
    for (int64_t i = 0; i < *n; i++) {
        br_swap_tensor t;
        lora_key key;
        GPU_TRY(br_swap_tensor_at(e, adapter, i, &t));
        GPU_TRY(lora_key_parse("swap", &e->loaded.config, t.name, &key));
        const lora_pair pair = lora_pair_of(set, 0, key.cls, key.layer, key.expert);
        value[i] = t.is_b ? pair.b : pair.a;
        GPU_EXPECT(value[i], "%s: not in the set", t.name);
    }
    return value;
}

void gpu_expect_live(br_engine *e, const char *adapter, const char *what) {
    br_digest loaded, live;
    char text[2][BR_DIGEST_TEXT_BYTES];
    GPU_TRY(br_engine_adapter_digest(e, adapter, &loaded));
    GPU_TRY(br_engine_adapter_live_digest(e, adapter, &live));
    br_digest_text(loaded, text[0]);
    br_digest_text(live, text[1]);
    GPU_EXPECT(br_digest_equal(loaded, live), "%s: the live memory has digest %s, loaded was %s", what, text[1], text[0]);
}

static int wants(const char *part, int argc, char **argv) {
    int n_named = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], part) == 0)
            return 1;
        i += strcmp(argv[i], "--csv") == 0 || strcmp(argv[i], "--commit") == 0;
        n_named += i < argc && argv[i][0] != '-' && strncmp(argv[i - 1], "--c", 3) != 0;
    }
    return n_named == 0;
}

static const struct {
    const char *name;
    void (*run)(const gpu_swap *);
} PART[] = {{"digest", gpu_swap_digest}, {"ipc", gpu_swap_ipc}, {"load", gpu_swap_load}, {"speed", gpu_swap_speed}, {"stream", gpu_swap_stream}};

int main(int argc, char **argv) {
    gpu_swap g = {.dir = "/tmp/bitroll-swap-XXXXXX"};
    br_device *device;
    char remove[GPU_PATH + 16];
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            g.csv = argv[i + 1];
        if (strcmp(argv[i], "--commit") == 0 && i + 1 < argc)
            g.commit = argv[i + 1];
        g.quick |= strcmp(argv[i], "--quick") == 0;
    }
    if (wants("ipc", argc, argv))
        gpu_swap_ipc_fork();
    if (br_device_open("cuda", &device) != BR_OK) {
        fprintf(stderr, "%s\n", br_last_error());
        return 2;
    }
    GPU_EXPECT(mkdtemp(g.dir), "no folder like %s", g.dir);
    snprintf(g.gpu, sizeof g.gpu, "%s", br_device_name(device));
    br_device_close(device);
    for (size_t i = 0; i < sizeof PART / sizeof PART[0]; i++) {
        const double begin = gpu_now_ms();
        if (!wants(PART[i].name, argc, argv))
            continue;
        PART[i].run(&g);
        printf("%s: ok, %.1f s\n", PART[i].name, 1e-3 * (gpu_now_ms() - begin));
        fflush(stdout);
    }
    snprintf(remove, sizeof remove, "rm -rf '%s'", g.dir);
    return system(remove) != 0;
}
