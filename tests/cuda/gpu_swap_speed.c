/* The adapter of slice-full, 4.6 GB: copies of it, its digest, and 20 swaps from page-locked memory, others from pageable and from the
 * GPU's own, each beside the ceiling measured in the same run. */
#include "gpu_swap.h"

#include "br_hash.h"
#include "engine_parts.h"
#include "lora_file.h"
#include "model_parts.h"

#include <stdio.h>
#include <string.h>

enum { SWAPS = 20, OTHER_SWAPS = 5, REPEATS = 9, FAST = 4 };

typedef struct speed {
    const gpu_swap *g;
    br_engine *e;
    br_device *device;
    int64_t n_tensor, version;
    size_t bytes;
    br_mirror values;       /* of all tensors, one after the other, on both sides */
    uint16_t *pageable;
    const uint16_t **value; /* (n_tensor) of the source at hand */
    uint64_t *place;        /* (n_tensor) elements */
    br_digest digest[2];    /* of the two versions that take turns, by the host */
    double bus_us, read_us;
} speed;

/* ---- open ------------------------------------------------------------------------------------------------------------------------ */

static void open_engine(speed *s) {
    char model[GPU_PATH];
    br_report report;
    br_digest manifest;
    snprintf(model, sizeof model, "%.400s/slice", s->g->dir);
    const br_init_options init = {.preset = "slice-full", .out_dir = model, .seed = 1, .recipe = 1};
    GPU_TRY(br_job_init(&init, NULL, &report));
    br_report_free(&report);
    const br_adapter_source source = {"a", NULL};
    const br_engine_options options = {.model_dir = model, .adapter = &source, .n_adapter = 1, .backend = "cuda", .swap_rank = GPU_RANK,
                                       .max_seqs = 1, .kv_pages = 16};
    const double begin = gpu_now_ms();
    GPU_TRY(br_engine_open(&options, &s->e));
    printf("speed: slice-full opened in %.1f s\n", 1e-3 * (gpu_now_ms() - begin));
    s->device = s->e->loaded.device;
    GPU_TRY(br_swap_manifest(s->e, "a", &s->n_tensor, &manifest));
}

static void lay_out(speed *s) {
    uint64_t used = 0;
    s->place = gpu_alloc((size_t)s->n_tensor, sizeof *s->place);
    s->value = gpu_alloc((size_t)s->n_tensor, sizeof *s->value);
    for (int64_t i = 0; i < s->n_tensor; i++) {
        br_swap_tensor t;
        GPU_TRY(br_swap_tensor_at(s->e, "a", i, &t));
        s->place[i] = used;
        used += (uint64_t)t.n_row * (uint64_t)t.n_col;
    }
    s->bytes = used * sizeof(uint16_t);
    GPU_TRY(br_mirror_open(s->device, s->bytes, "an adapter", &s->values));
    s->pageable = gpu_alloc(used, sizeof *s->pageable);
    printf("speed: %lld tensors, %.3f GB\n", (long long)s->n_tensor, 1e-9 * (double)s->bytes);
}

static void fill_some(void *context, int job, int thread) {
    const speed *s = context;
    const size_t n = s->bytes / sizeof(uint64_t), first = n / 64 * (size_t)job, last = job == 63 ? n : first + n / 64;
    uint64_t *to = (uint64_t *)(void *)s->values.host;
    (void)thread;
    for (size_t i = first; i < last; i++)
        to[i] = gpu_mix(i) & 0xbfffbfffbfffbfffu; /* finite */
    memcpy((uint64_t *)(void *)s->pageable + first, to + first, (last - first) * sizeof *to);
}

/* Version 1 differs from version 0 in the sign of the first element of every tensor. */
static void turn(speed *s, uint16_t *memory) {
    for (int64_t i = 0; i < s->n_tensor; i++)
        memory[s->place[i]] ^= 0x8000;
}

static void from(speed *s, const void *memory) {
    for (int64_t i = 0; i < s->n_tensor; i++)
        s->value[i] = (const uint16_t *)memory + s->place[i];
}

/* ---- ceilings ---------------------------------------------------------------------------------------------------------------------- */

static void measure_bus(speed *s) {
    double us[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        GPU_TRY(br_device_mark(s->device, 4));
        GPU_TRY(br_device_upload(s->device, s->values.device, s->values.host, s->bytes));
        GPU_TRY(br_device_mark(s->device, 5));
        GPU_TRY(br_device_elapsed(s->device, 4, 5, &us[i]));
    }
    gpu_row(s->g, "ceiling.bus", "page-locked host memory to the GPU in one copy", us, REPEATS, 0, NULL);
    s->bus_us = us[REPEATS / 2];
    printf("speed: the bus takes %.1f GB/s\n", 1e-3 * (double)s->bytes / s->bus_us);
}

static void measure_read(speed *s) {
    double us[REPEATS];
    for (int i = -2; i < REPEATS; i++) {
        GPU_TRY(br_device_mark(s->device, 4));
        gpu_read_all(s->values.device, s->bytes, br_device_stream(s->device));
        GPU_TRY(br_device_mark(s->device, 5));
        GPU_TRY(br_device_elapsed(s->device, 4, 5, &us[i < 0 ? 0 : i]));
    }
    gpu_row(s->g, "ceiling.read", "the same bytes read on the GPU", us, REPEATS, 0, NULL);
    s->read_us = us[REPEATS / 2];
    printf("speed: reads at %.0f GB/s\n", 1e-3 * (double)s->bytes / s->read_us);
}

/* ---- digest ------------------------------------------------------------------------------------------------------------------------ */

static int longer(const void *a, const void *b) {
    const br_view *x = a, *y = b;
    const int64_t n = (int64_t)x->n_row * x->n_col, m = (int64_t)y->n_row * y->n_col;
    return (n < m) - (n > m);
}

/* Where the matrices of a slot lie, long ones first; views: (n_tensor) of them. */
static void views_of(const speed *s, int32_t slot, const br_mirror *views) {
    const br_model *m = s->e->loaded.model;
    br_view *view = (br_view *)(void *)views->host;
    br_expect map;
    int32_t n = 0;
    size_t bytes = 0;
    for (int64_t i = 0; br_weight_expect(&m->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        br_model_matrix at = {.slot = slot, .cls = map.cls, .layer = map.layer, .expert = map.expert, .rank = GPU_RANK};
        for (at.is_b = 0; at.is_b < 2; at.is_b++) {
            br_view both[2];
            if (br_model_adapter_views(m, &at, both)) {
                bytes += (size_t)both[0].n_row * (size_t)both[0].n_col * sizeof(uint16_t);
                view[n++] = both[0];
            }
        }
    }
    GPU_EXPECT(n == s->n_tensor && bytes == s->bytes, "speed: %d views of %zu bytes", n, bytes);
    qsort(view, (size_t)n, sizeof *view, longer);
    GPU_TRY(br_device_upload(s->device, views->device, views->host, (size_t)n * sizeof *view));
}

/* The kernel over all matrices of the live version. */
static void measure_hash(speed *s) {
    br_mirror views, seen;
    double us[REPEATS];
    GPU_TRY(br_mirror_open(s->device, (size_t)s->n_tensor * sizeof(br_view), "views", &views));
    GPU_TRY(br_mirror_open(s->device, (size_t)s->n_tensor * sizeof(br_seen), "digests", &seen));
    views_of(s, br_loaded_live_slot(&s->e->loaded, 0), &views);
    for (int i = -2; i < REPEATS; i++) {
        GPU_TRY(br_device_mark(s->device, 4));
        GPU_TRY(br_device_hash(s->device, (br_view *)(void *)views.device, (int32_t)s->n_tensor, (br_seen *)(void *)seen.device));
        GPU_TRY(br_device_mark(s->device, 5));
        GPU_TRY(br_device_elapsed(s->device, 4, 5, &us[i < 0 ? 0 : i]));
    }
    gpu_row(s->g, "digest.device", "the adapter of slice-full at rank 32; floor: read", us, REPEATS, s->read_us, NULL);
    br_mirror_close(s->device, &views);
    br_mirror_close(s->device, &seen);
}

/* The kernel that writes all matrices of the slot that is not live, each from its place in the values of the swaps. */
static void measure_place(speed *s) {
    br_mirror views, seen, sources;
    double us[REPEATS];
    GPU_TRY(br_mirror_open(s->device, (size_t)s->n_tensor * sizeof(br_view), "views", &views));
    GPU_TRY(br_mirror_open(s->device, (size_t)s->n_tensor * sizeof(br_seen), "digests", &seen));
    GPU_TRY(br_mirror_open(s->device, (size_t)s->n_tensor * sizeof(uint16_t *), "sources", &sources));
    views_of(s, br_loaded_live_slot(&s->e->loaded, 0) ^ 1, &views);
    const br_view *view = (const br_view *)(const void *)views.host;
    const uint16_t **src = (const uint16_t **)(void *)sources.host, *next = (const uint16_t *)(const void *)s->values.device;
    for (int64_t i = 0; i < s->n_tensor; next += (int64_t)view[i].n_row * view[i].n_col, i++)
        src[i] = next;
    GPU_TRY(br_device_upload(s->device, sources.device, sources.host, sources.bytes));
    for (int i = -2; i < REPEATS; i++) {
        GPU_TRY(br_device_mark(s->device, 4));
        GPU_TRY(br_device_place(s->device, (br_view *)(void *)views.device, (const uint16_t *const *)(void *)sources.device,
                                (int32_t)s->n_tensor, (br_seen *)(void *)seen.device));
        GPU_TRY(br_device_mark(s->device, 5));
        GPU_TRY(br_device_elapsed(s->device, 4, 5, &us[i < 0 ? 0 : i]));
    }
    gpu_row(s->g, "place.device", "the same written from the GPU's memory and hashed; floor: read", us, REPEATS, s->read_us, NULL);
    br_mirror_close(s->device, &views);
    br_mirror_close(s->device, &seen);
    br_mirror_close(s->device, &sources);
}

static void measure_digest(speed *s) {
    br_digest live;
    double us[REPEATS];
    for (int i = -1; i < REPEATS; i++) {
        const double begin = gpu_now_ms();
        GPU_TRY(br_engine_adapter_live_digest(s->e, "a", &live));
        us[i < 0 ? 0 : i] = 1e3 * (gpu_now_ms() - begin);
    }
    gpu_row(s->g, "digest.call", "the whole call for the same; floor: read", us, REPEATS, s->read_us, &live);
    double host_us[1] = {-1e3 * gpu_now_ms()};
    br_hash_bytes(s->values.host, s->bytes);
    host_us[0] += 1e3 * gpu_now_ms();
    gpu_row(s->g, "digest.host", "XXH3-128 of the same bytes on one core", host_us, 1, 0, NULL);
}

/* ---- swaps ------------------------------------------------------------------------------------------------------------------------- */

/* The digest of a version, by the host's hash. */
static br_digest digest_by_host(const speed *s) {
    const br_config *c = &s->e->loaded.config;
    const lora_scale scale = {.rank = GPU_RANK, .alpha = 2 * GPU_RANK};
    br_hash_stream stream;
    br_expect map;
    br_hash_begin(&stream);
    for (int64_t i = 0; i < s->n_tensor / 2 && br_weight_expect(c, i, &map); i++) {
        char name[BR_NAME_BYTES];
        br_digest digest[2];
        for (int b = 0; b < 2; b++) {
            const int64_t t = 2 * i + b;
            const uint64_t end = t + 1 < s->n_tensor ? s->place[t + 1] : s->bytes / sizeof(uint16_t);
            digest[b] = lora_digest_matrix((const uint16_t *)(const void *)s->values.host + s->place[t], (int64_t)(end - s->place[t]));
        }
        const size_t n = lora_module_name(c, map.cls, map.layer, map.expert, name);
        lora_digest_add(&stream, name, n, &scale, digest[0], digest[1]);
    }
    return br_hash_end(&stream);
}

static void swap_from(speed *s, const char *row, const char *shape, uint16_t *memory, int is_device, int n_swap, double floor_us) {
    double us[SWAPS], commit_us[SWAPS];
    br_swap_answer answer;
    br_digest live = {0};
    from(s, memory);
    for (int k = 0; k < n_swap; k++, s->version++) {
        if (!is_device && s->version)
            turn(s, memory);
        const br_digest *wanted = &s->digest[is_device ? 0 : s->version % 2];
        const double begin = gpu_now_ms();
        GPU_TRY(br_swap_from_memory(s->e, "a", s->value, s->n_tensor, wanted, s->version, 0, &answer));
        const double prepared = gpu_now_ms();
        GPU_TRY(br_swap_commit(s->e, "a", s->version, BR_SWAP_STOP, &answer));
        us[k] = 1e3 * (gpu_now_ms() - begin);
        commit_us[k] = 1e3 * (gpu_now_ms() - prepared);
        GPU_EXPECT(answer == BR_SWAP_COMMITTED, "speed: not committed");
        gpu_expect_live(s->e, "a", shape);
        GPU_TRY(br_engine_adapter_live_digest(s->e, "a", &live));
    }
    gpu_row(s->g, row, shape, us, n_swap, floor_us, &live);
    gpu_row(s->g, "swap.commit", shape, commit_us, n_swap, 0, NULL);
}

void gpu_swap_speed(const gpu_swap *g) {
    speed *s = gpu_alloc(1, sizeof *s);
    s->g = g;
    open_engine(s);
    lay_out(s);
    uint16_t *locked = (uint16_t *)(void *)s->values.host;
    br_pool_run(s->e->loaded.pool, fill_some, s, 64);
    s->digest[0] = digest_by_host(s);
    turn(s, locked);
    s->digest[1] = digest_by_host(s);
    turn(s, locked);
    GPU_EXPECT(!br_digest_equal(s->digest[0], s->digest[1]), "speed: two versions, one digest");
    measure_bus(s);
    measure_read(s);
    swap_from(s, "swap.locked", "from page-locked memory; floor: the bus", locked, 0, g->quick ? FAST : SWAPS, s->bus_us);
    measure_hash(s);
    measure_place(s);
    measure_digest(s);
    uint16_t *on_gpu = (uint16_t *)(void *)s->values.device;
    swap_from(s, "swap.device", "from the GPU's memory; floor: read", on_gpu, 1, g->quick ? FAST : OTHER_SWAPS, s->read_us);
    if (s->version % 2 == 0) /* the next one is turned when its number is odd */
        turn(s, s->pageable);
    swap_from(s, "swap.pageable", "from pageable memory; floor: the bus", s->pageable, 0, g->quick ? FAST : OTHER_SWAPS, s->bus_us);
    br_mirror_close(s->device, &s->values);
    br_engine_close(s->e);
    free(s->pageable);
    free(s->value);
    free(s->place);
    free(s);
}
