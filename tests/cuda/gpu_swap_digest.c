/* Digests made on the GPU against the host's: of views of every length and form, and of whole adapters, ranks that fill the stacks and
 * ranks that do not; and a bit that flips anywhere in a slot. */
#include "gpu_swap.h"

#include "br_hash.h"
#include "engine_parts.h"
#include "model_parts.h"

#include <stdio.h>
#include <string.h>

enum { ELEMENTS = 1 << 20, VIEWS = 8192 };

/* Lengths from 1 to 4,000 elements and a few long ones, dense, as rows, turned, and in two places by turns. */
static int32_t make_views(br_view *view, uint16_t *at) {
    int32_t n_view = 0;
    for (int32_t n = 1; n <= 4000; n += n < 700 ? 1 : 13) {
        view[n_view++] = (br_view){.n_row = 1, .n_col = n, .part[0] = {at + 8 * n, 0, n, 1, 1}};
        view[n_view++] = (br_view){.n_row = n, .n_col = 1, .part[0] = {at + 3 * n + 1, 0, 3, 1, n}};
        view[n_view++] = (br_view){.n_row = n, .n_col = 16, .part[0] = {at + 16, 0, 32, 1, n}};
        view[n_view++] = (br_view){.n_row = 3 * n, .n_col = 8, .part = {{at, 128, 1, 16, 2}, {at + 64, 64, 16, 1, 1}}};
    }
    for (int32_t n = 1; n < 60; n++)
        view[n_view++] = (br_view){.n_row = 32, .n_col = 500 * n + n % 3, .part[0] = {at, 0, 500 * n + n % 3, 1, 32}};
    return n_view;
}

static void check_views(void) {
    br_device *gpu, *host;
    br_mirror memory, views, found;
    uint16_t bad = 0;
    GPU_TRY(br_device_open("cuda", &gpu));
    GPU_TRY(br_device_open("host", &host));
    GPU_TRY(br_mirror_open(gpu, ELEMENTS * sizeof(uint16_t), "values", &memory));
    GPU_TRY(br_mirror_open(gpu, VIEWS * sizeof(br_view), "views", &views));
    GPU_TRY(br_mirror_open(gpu, VIEWS * sizeof(br_seen), "digests", &found));
    uint16_t *value = (uint16_t *)(void *)memory.host;
    br_view *view = gpu_alloc(VIEWS, sizeof *view), *on_gpu = (br_view *)(void *)views.host;
    br_seen *wanted = gpu_alloc(VIEWS, sizeof *wanted), *seen = (br_seen *)(void *)found.host;
    for (size_t i = 0; i < ELEMENTS; i++)
        value[i] = (uint16_t)(gpu_mix(i) & 0xbfff);
    value[5000] = 0xff81; /* what lies over it says so */
    const int32_t n = make_views(view, value);
    GPU_TRY(br_device_hash(host, view, n, wanted));
    for (int32_t i = 0; i < n; i++) {
        on_gpu[i] = view[i];
        for (int p = 0; p < 2; p++)
            on_gpu[i].part[p].at = view[i].part[p].at ? br_mirror_at(&memory, view[i].part[p].at) : NULL;
        bad += wanted[i].first_bad != UINT32_MAX;
    }
    GPU_TRY(br_device_upload(gpu, memory.device, memory.host, memory.bytes));
    GPU_TRY(br_device_upload(gpu, views.device, views.host, views.bytes));
    GPU_TRY(br_device_hash(gpu, (br_view *)(void *)views.device, n, (br_seen *)(void *)found.device));
    GPU_TRY(br_device_download(gpu, found.host, found.device, found.bytes));
    GPU_TRY(br_device_wait(gpu));
    for (int32_t i = 0; i < n; i++)
        GPU_EXPECT(memcmp(&seen[i], &wanted[i], sizeof *seen) == 0, "view %d, %d x %d: another digest, or first_bad %u, any %u: expected %u, %u", i,
                   view[i].n_row, view[i].n_col, seen[i].first_bad, seen[i].any, wanted[i].first_bad, wanted[i].any);
    GPU_EXPECT(bad > 100, "%d views hold the number that is none", bad);
    printf("digest: %d views equal the host's, %d with a number that is none\n", n, bad);
    br_mirror_close(gpu, &memory);
    br_mirror_close(gpu, &views);
    br_mirror_close(gpu, &found);
    br_device_close(gpu);
    br_device_close(host);
    free(view);
    free(wanted);
}

static void flip(br_engine *e, const void *at, size_t bytes, uint64_t seed, const char *what) {
    br_device *d = e->loaded.device;
    br_digest loaded, live;
    unsigned char byte, other;
    void *place = (unsigned char *)(uintptr_t)at + gpu_mix(seed) % bytes;
    GPU_TRY(br_device_download(d, &byte, place, 1));
    GPU_TRY(br_device_wait(d));
    other = byte ^ (unsigned char)(1u << seed % 8);
    GPU_TRY(br_device_upload(d, place, &other, 1));
    GPU_TRY(br_device_wait(d));
    GPU_TRY(br_engine_adapter_digest(e, "a", &loaded));
    GPU_TRY(br_engine_adapter_live_digest(e, "a", &live));
    GPU_EXPECT(!br_digest_equal(loaded, live), "%s: a flipped bit is not seen", what);
    GPU_TRY(br_device_upload(d, place, &byte, 1));
    GPU_TRY(br_device_wait(d));
}

static void flip_some(br_engine *e) {
    const br_model *m = e->loaded.model;
    const bi_ops *op = br_model_ops(m);
    for (int32_t l = 0; l < m->config.n_layer; l++) {
        const model_layer *w = &m->layer[l];
        const int is_mla = m->config.layer_is_mla[l];
        const bi_adapter *pair[] = {is_mla ? w->mla.lora_uk : w->kda.b.lora, is_mla ? w->mla.lora_uv : w->kda.o.lora,
                                    l < m->config.n_dense_layer ? w->mlp.up.lora : w->moe.lora2};
        for (int k = 0; k < 3 && l < 6; k++) {
            const bi_adapter *a = &pair[k][e->loaded.live_way[0]];
            flip(e, a->a.data, op->mat_bytes(BI_FORM_BF16, a->a.n_out, a->a.n_in), (uint64_t)(l * 8 + k), "A");
            flip(e, a->b.data, op->mat_bytes(BI_FORM_BF16, a->b.n_out, a->b.n_in), (uint64_t)(l * 8 + k + 100), "B");
            flip(e, a->s, sizeof *a->s, (uint64_t)(l * 8 + k + 200), "s");
        }
    }
}

static void check_adapter(const gpu_swap *g, const char *preset) {
    char model[GPU_PATH], full[GPU_PATH], low[GPU_PATH], name[64];
    br_engine *e;
    br_swap_answer answer;
    gpu_make_model(g, preset, model);
    snprintf(name, sizeof name, "%s-full", preset);
    gpu_make_adapter(g, model, name, 3, GPU_RANK, full);
    snprintf(name, sizeof name, "%s-low", preset);
    gpu_make_adapter(g, model, name, 4, 3, low);
    const br_adapter_source source = {"a", full};
    const br_engine_options options = {.model_dir = model, .adapter = &source, .n_adapter = 1, .backend = "cuda", .swap_rank = GPU_RANK,
                                       .max_seqs = 4, .kv_pages = 64};
    GPU_TRY(br_engine_open(&options, &e));
    gpu_expect_live(e, "a", preset);
    flip_some(e);
    for (int k = 1; k < 5; k++) { /* both ranks in both places, over each other */
        GPU_TRY(br_swap_from_folder(e, "a", k % 3 ? low : full, k, 0, &answer));
        GPU_TRY(br_swap_commit(e, "a", k, BR_SWAP_STOP, &answer));
        GPU_EXPECT(answer == BR_SWAP_COMMITTED, "%s: version %d is not committed", preset, k);
        gpu_expect_live(e, "a", preset);
        if (k > 2)
            flip_some(e);
    }
    br_engine_close(e);
    const br_engine_options plain = {.model_dir = model, .adapter = &source, .n_adapter = 1, .backend = "cuda", .max_seqs = 4, .kv_pages = 64};
    GPU_TRY(br_engine_open(&plain, &e));
    gpu_expect_live(e, "a", "without swap_rank");
    br_engine_close(e);
    printf("digest: %s, ranks %d and 3: equal the host's, every flipped bit seen\n", preset, GPU_RANK);
    fflush(stdout);
}

void gpu_swap_digest(const gpu_swap *g) {
    static const char *const PRESET[] = {"pico", "nano", "k3-nano", "kimi-linear-nano", "mini", "small"};
    check_views();
    for (size_t i = 0; i < sizeof PRESET / sizeof PRESET[0]; i++)
        check_adapter(g, PRESET[i]);
}
