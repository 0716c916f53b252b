/* Matrices in device memory as views: their hash against the library's for every length and form, on the code that a GPU's threads run;
 * and an engine whose memory is rows of bf16, as a GPU's is, on the host: swaps and digests through views. Its forward is never run. */
#include "adapter_image.h"
#include "br_hash.h"
#include "br_mem.h"
#include "checkpoint.h"
#include "device_parts.h"
#include "engine_parts.h"
#include "live_digest.h"
#include "lora_file.h"
#include "lora_plan.h"
#include "model_parts.h"
#include "swap_rig.h"
#include "test_support.h"
#include "view_core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ELEMENTS = 6016, WIDE = 16 }; /* whole 64s of bytes, as aligned_alloc asks */

static br_device *device;
static uint16_t *memory, *dense;

static void open_device(void) {
    CHECK_OK(br_device_open("host", &device));
    memory = aligned_alloc(64, sizeof *memory * 4 * ELEMENTS);
    dense = aligned_alloc(64, sizeof *dense * ELEMENTS);
    ck_assert(memory && dense);
    for (int i = 0; i < 4 * ELEMENTS; i++)
        memory[i] = (uint16_t)(test_mix((uint64_t)i) & 0xbfff); /* finite */
}

static void close_device(void) {
    br_device_close(device);
    free(memory);
    free(dense);
}

/* ---- hash ---------------------------------------------------------------------------------------------------------------------- */

static br_view plain_view(int32_t n_row, int32_t n_col, int64_t row, int64_t col, int offset) {
    return (br_view){.n_row = n_row, .n_col = n_col, .part[0] = {.at = memory + offset, .row = row, .col = col, .n_row = n_row}};
}

/* Row-major by a rule of its own. */
static void expect_hash(const br_view *v, view_form form, const char *what) {
    const int32_t group = v->part[0].n_row + v->part[1].n_row, n = v->n_row * v->n_col;
    br_seen seen;
    for (int32_t r = 0; r < v->n_row; r++)
        for (int32_t c = 0; c < v->n_col; c++) {
            const int second = r % group >= v->part[0].n_row;
            const br_part *p = &v->part[second];
            dense[r * v->n_col + c] = p->at[r / group * p->group + (r % group - second * v->part[0].n_row) * p->row + c * p->col];
        }
    ck_assert_msg(view_form_of(v) == form, "%s: form %d", what, (int)view_form_of(v));
    CHECK_OK(br_device_hash(device, v, 1, &seen));
    ck_assert_msg(br_digest_equal(seen.digest, br_hash_bytes(dense, sizeof *dense * (size_t)n)), "%s: %d x %d: another digest", what, v->n_row,
                  v->n_col);
    ck_assert(seen.any == 1 && seen.first_bad == UINT32_MAX);
}

START_TEST(short_inputs_of_every_length) {
    for (uint32_t n = 1; n <= BR_XXH3_SHORT; n++)
        ck_assert_msg(br_digest_equal(br_xxh3_short((unsigned char *)memory, n), br_hash_bytes(memory, n)), "%u bytes", n);
}
END_TEST

START_TEST(every_length_and_form) {
    for (int32_t n = 1; n <= ELEMENTS; n += n < 1600 ? 1 : 31) {
        const br_view one = plain_view(1, n, n, 1, 0), odd = plain_view(1, n, n, 1, 1), column = plain_view(n, 1, 3, 1, 0);
        expect_hash(&one, VIEW_DENSE, "dense");
        expect_hash(&odd, VIEW_ANY, "dense, not aligned");
        expect_hash(&column, n == 1 ? VIEW_DENSE : VIEW_ANY, "a column");
    }
    for (int32_t n_row = 2; n_row < 150; n_row++) {
        const br_view rows = plain_view(n_row, WIDE, 2 * WIDE, 1, 8), turned = plain_view(n_row, 24, 1, n_row + 5, 0);
        const br_view narrow = plain_view(n_row, 3, WIDE, 1, 0);
        expect_hash(&rows, VIEW_ROWS, "rows");
        expect_hash(&turned, VIEW_ANY, "turned");
        expect_hash(&narrow, VIEW_ANY, "narrow rows");
    }
}
END_TEST

START_TEST(rows_in_two_places) {
    for (int32_t n_group = 1; n_group < 9; n_group++) {
        br_view v = {.n_row = n_group * 12, .n_col = WIDE};
        v.part[0] = (br_part){.at = memory, .group = 320, .row = 1, .col = 8, .n_row = 7};
        v.part[1] = (br_part){.at = memory + ELEMENTS, .group = 200, .row = 32, .col = 1, .n_row = 5};
        expect_hash(&v, VIEW_ANY, "one part turned");
        v.part[0] = (br_part){.at = memory + 160, .group = 320, .row = 24, .col = 1, .n_row = 7};
        expect_hash(&v, VIEW_ROWS, "both plain");
    }
}
END_TEST

/* One element that is Inf or NaN, anywhere; all zeros of either sign. */
START_TEST(what_is_not_finite_is_found) {
    static const uint16_t BAD[] = {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81};
    for (int32_t n = 1; n < 2000; n += n < 40 ? 1 : 97) {
        const int32_t at = (int32_t)(test_mix((uint64_t)n) % (uint64_t)n);
        const br_view v = plain_view(1, n, n, 1, 0), odd = plain_view(n, 1, 2, 1, 1);
        br_seen seen;
        for (int k = 0; k < 2; k++) {
            uint16_t *place = k ? memory + 1 + 2 * at : memory + at, was = *place;
            *place = BAD[n % 5];
            CHECK_OK(br_device_hash(device, k ? &odd : &v, 1, &seen));
            ck_assert_msg(seen.first_bad == (uint32_t)at, "%d elements: %u for %d", n, seen.first_bad, at);
            *place = was;
        }
    }
    const br_view v = plain_view(1, 1111, 1111, 1, 0);
    br_seen seen;
    for (int i = 0; i < 1111; i++)
        memory[i] = i % 3 ? 0 : 0x8000;
    CHECK_OK(br_device_hash(device, &v, 1, &seen));
    ck_assert(!seen.any && seen.first_bad == UINT32_MAX);
    memory[1110] = 1;
    CHECK_OK(br_device_hash(device, &v, 1, &seen));
    ck_assert(seen.any);
}
END_TEST

START_TEST(fills_are_written_and_checked) {
    const br_fill fill[2] = {{.at = memory + 3, .n_run = 5, .n_half = 7, .pitch = 11, .word = 0},
                             {.at = memory + 100, .n_run = 1, .n_half = 6, .pitch = 6, .word = 0x3f80abcd}};
    uint32_t torn = 0, word;
    memcpy(dense, memory, sizeof *dense * 120);
    CHECK_OK(br_device_fill(device, fill, 2));
    CHECK_OK(br_device_check(device, fill, 2, &torn));
    ck_assert(!torn);
    for (int i = 0; i < 100; i++)
        ck_assert_int_eq(memory[i], i >= 3 && i < 3 + 5 * 11 && (i - 3) % 11 < 7 ? 0 : dense[i]);
    memcpy(&word, memory + 104, sizeof word);
    ck_assert_uint_eq(word, 0x3f80abcd);
    memory[3 + 4 * 11 + 6] = 1;
    CHECK_OK(br_device_check(device, fill, 2, &torn));
    ck_assert(torn);
    torn = 0;
    CHECK_OK(br_device_check(device, fill + 1, 1, &torn));
    ck_assert(!torn);
    memory[105] ^= 0x8000;
    CHECK_OK(br_device_check(device, fill + 1, 1, &torn));
    ck_assert(torn);
}
END_TEST

/* ---- an engine whose memory is rows ------------------------------------------------------------------------------------------------ */

static int64_t rows_row(int32_t n_in) {
    return (n_in + WIDE - 1) / WIDE * WIDE;
}

static size_t rows_bytes(bi_form form, int32_t n_out, int32_t n_in) {
    (void)form;
    return ((size_t)n_out * (size_t)rows_row(n_in) * sizeof(uint16_t) + 255) / 256 * 256;
}

static br_status rows_pack(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const bi_bf16 *src, int64_t stride_out, int64_t stride_in) {
    (void)ctx;
    for (int32_t o = 0; o < n_out; o++)
        for (int64_t i = 0; i < rows_row(n_in); i++)
            ((uint16_t *)dst)[o * rows_row(n_in) + i] = i < n_in ? src[o * stride_out + i * stride_in] : 0;
    return BR_OK;
}

static br_status rows_fp4(bi_ctx *ctx, void *dst, int32_t n_out, int32_t n_in, const uint8_t *code, const uint8_t *scale) {
    (void)ctx, (void)dst, (void)n_out, (void)n_in, (void)code, (void)scale;
    return BR_OK; /* the base is not looked at */
}

static br_status rows_unpack(bi_ctx *ctx, const bi_mat_unpack_args *args) {
    (void)ctx;
    for (int64_t e = 0; e < (int64_t)args->from.n_out * args->from.n_in; e++)
        args->dst[e] = ((const uint16_t *)args->from.data)[e / args->from.n_in * rows_row(args->from.n_in) + e % args->from.n_in];
    return BR_OK;
}

static bi_ops rows_ops;

/* The engine of swap_engine, its model opened again on this backend. */
static br_engine *rows_engine(const char *first) {
    br_engine *e = swap_engine(first);
    br_loaded *l = &e->loaded;
    br_weights *weights;
    const br_adapter_source source[2] = {{"a", first}, swap_of.pico.adapter[1]};
    e->options.adapter = source; /* those of open are gone */
    rows_ops = *l->backend.op;
    rows_ops.mat_row = rows_row;
    rows_ops.mat_bytes = rows_bytes;
    rows_ops.mat_pack_bf16 = rows_pack;
    rows_ops.mat_pack_fp4 = rows_fp4;
    rows_ops.mat_unpack = rows_unpack;
    engine_swap_close(e);
    e->swap = NULL;
    br_model_close(l->model);
    l->backend.op = &rows_ops;
    CHECK_OK(checkpoint_open(swap_of.pico.dir, &l->config, &weights));
    const br_model_options options = {.config = &l->config, .weights = weights, .adapters = l->adapters, .backend = l->backend, .device = l->device,
                                      .pool = l->pool, .comm = {.n_rank = 1}, .n_row_max = l->n_row_max, .swap_rank = l->swap_rank};
    CHECK_OK(br_model_open(&options, &l->model));
    br_weights_close(weights);
    ck_assert(br_model_has_views(l->model));
    CHECK_OK(engine_swap_open(e));
    return e;
}

/* Every matrix of the live slot, read back by the backend's own op, is that of the set, and what surrounds it is intact. */
static void expect_values(br_engine *e, const lora_set *set, int32_t slot) {
    const br_config *c = &e->loaded.config;
    br_model_reader *reader;
    br_expect map;
    uint16_t *value = rig_alloc(br_model_adapter_values(e->loaded.model), sizeof *value);
    CHECK_OK(br_model_reader_open(e->loaded.model, &reader));
    for (int64_t i = 0; br_weight_expect(c, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        const lora_pair pair = lora_pair_of(set, 0, map.cls, map.layer, map.expert);
        br_model_matrix at = {.slot = slot, .cls = map.cls, .layer = map.layer, .expert = map.expert, .rank = pair.rank};
        for (at.is_b = 0; at.is_b < 2; at.is_b++) {
            int32_t intact;
            const size_t n = (size_t)pair.rank * (size_t)(at.is_b ? pair.n_out : pair.n_in);
            CHECK_OK(br_model_adapter_read(reader, &at, pair.alpha, pair.rslora, value, &intact));
            ck_assert_msg(intact, "map %lld, %c: not intact", (long long)i, "AB"[at.is_b]);
            const uint16_t *wanted = at.is_b ? pair.b : pair.a;
            ck_assert_msg(memcmp(value, wanted, n * sizeof *value) == 0, "map %lld, %c: other values", (long long)i, "AB"[at.is_b]);
        }
    }
    br_model_reader_close(reader);
    free(value);
}

START_TEST(versions_come_in_by_views) {
    br_engine *e = rows_engine(swap_of.dir[0]);
    lora_set *set[SWAP_VERSIONS];
    br_digest digest;
    swap_open_sets(e, set);
    swap_expect_live(e, "as opened");
    for (int k = 1; k < 7; k++) { /* SWAP_LOW comes over and under rank 32 in both places */
        const int v = k == 2 || k == 5 ? SWAP_LOW : k;
        if (k % 2) {
            swap_prepare(e, v, k);
        } else {
            swap_sender s = {.set = set[v]};
            swap_begin_version(e, v, k);
            swap_send(e, &s, INT64_MAX);
            CHECK_OK(br_swap_end(e, "a", lora_digest(set[v], 0)));
        }
        swap_expect_live(e, "beside a prepared one");
        swap_commit(e, k, BR_SWAP_STOP, BR_SWAP_COMMITTED);
        CHECK_OK(br_engine_adapter_digest(e, "a", &digest));
        ck_assert(br_digest_equal(digest, lora_digest(set[v], 0)));
        swap_expect_live(e, "committed");
        expect_values(e, set[v], k % 2);
    }
    swap_close_sets(set);
    br_engine_close(e);
}
END_TEST

static int bit_is_seen(br_engine *e, void *at, size_t bytes, uint64_t seed) {
    br_digest before, after;
    unsigned char *byte = (unsigned char *)at + test_mix(seed) % bytes;
    CHECK_OK(br_engine_adapter_digest(e, "a", &before));
    *byte ^= (unsigned char)(1u << seed % 8);
    CHECK_OK(br_engine_adapter_live_digest(e, "a", &after));
    *byte ^= (unsigned char)(1u << seed % 8);
    return !br_digest_equal(before, after);
}

static int n_unseen(br_engine *e, const bi_adapter *slots, int32_t slot, int32_t n, uint64_t seed) {
    const bi_adapter *a = &slots[slot];
    const size_t n_a = a->a.stride ? (size_t)n : 1, n_b = a->b.stride ? (size_t)n : 1;
    int unseen = 0;
    for (uint64_t k = 0; k < 8; k++) {
        unseen += !bit_is_seen(e, (void *)(uintptr_t)a->a.data, n_a * rows_bytes(BI_FORM_BF16, a->a.n_out, a->a.n_in), seed + 3 * k);
        unseen += !bit_is_seen(e, (void *)(uintptr_t)a->b.data, n_b * rows_bytes(BI_FORM_BF16, a->b.n_out, a->b.n_in), seed + 3 * k + 1);
        unseen += !bit_is_seen(e, (void *)(uintptr_t)a->s, (size_t)n * sizeof *a->s, seed + 3 * k + 2);
    }
    return unseen;
}

/* Under both ranks; with the low one most of the room is zero. */
START_TEST(any_flipped_bit_is_seen_by_views) {
    br_engine *e = rows_engine(swap_of.dir[0]);
    for (int32_t slot = 0; slot < 2; slot++) {
        const br_model *m = e->loaded.model;
        for (int32_t l = 0; l < m->config.n_layer; l++) {
            const model_layer *w = &m->layer[l];
            const uint64_t seed = (uint64_t)(1000 * slot + 50 * l);
            if (m->config.layer_is_mla[l]) {
                ck_assert_int_eq(n_unseen(e, w->mla.lora_uk, slot, m->config.n_head, seed), 0);
                ck_assert_int_eq(n_unseen(e, w->mla.lora_uv, slot, m->config.n_head, seed + 1), 0);
            } else {
                ck_assert_int_eq(n_unseen(e, w->kda.b.lora, slot, 1, seed), 0);
            }
            if (l >= m->config.n_dense_layer)
                ck_assert_int_eq(n_unseen(e, w->moe.lora2, slot, m->config.n_expert, seed + 2), 0);
        }
        swap_prepare(e, SWAP_LOW, slot + 1);
        swap_commit(e, slot + 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    }
    ck_assert(bit_is_seen(e, (void *)(uintptr_t)e->loaded.model->layer[0].kda.o.lora[0].b.data, 64, 5)); /* slot 0 is live again */
    ck_assert(!bit_is_seen(e, (void *)(uintptr_t)e->loaded.model->layer[0].kda.o.lora[1].b.data, 64, 5));
    br_engine_close(e);
}
END_TEST

/* Values are judged where they lie, so the end says it. */
START_TEST(bad_versions_are_refused_at_the_end) {
    br_engine *e = rows_engine(swap_of.dir[0]);
    lora_set *set[SWAP_VERSIONS];
    br_swap_answer answer;
    br_swap_tensor t;
    br_digest manifest;
    int64_t n;
    swap_open_sets(e, set);
    swap_begin_version(e, 1, 1);
    CHECK_OK(br_swap_abort(e, "a"));
    CHECK_OK(br_swap_manifest(e, "a", &n, &manifest));
    const uint16_t **value = rig_alloc((size_t)n, sizeof *value);
    uint16_t *changed = NULL;
    for (int64_t i = 0; i < n; i++) {
        lora_key key;
        CHECK_OK(br_swap_tensor_at(e, "a", i, &t));
        CHECK_OK(lora_key_parse("test", &e->loaded.config, t.name, &key));
        const lora_pair pair = lora_pair_of(set[1], 0, key.cls, key.layer, key.expert);
        value[i] = t.is_b ? pair.b : pair.a;
    }
    CHECK_OK(br_swap_tensor_at(e, "a", n / 2, &t));
    changed = rig_alloc((size_t)t.n_row * (size_t)t.n_col, sizeof *changed);
    memcpy(changed, value[n / 2], (size_t)t.n_row * (size_t)t.n_col * sizeof *changed);
    changed[41] = 0x7f80;
    value[n / 2] = changed;
    CHECK_FAILS(br_swap_from_memory(e, "a", value, n, NULL, 1, 0, &answer), BR_E_FORMAT);
    ck_assert_msg(strstr(br_last_error(), "element 41 is NaN or Inf") && strstr(br_last_error(), t.name), "%s", br_last_error());
    changed[41] = 0x3f80;
    const br_digest wanted = lora_digest(set[1], 0);
    CHECK_FAILS(br_swap_from_memory(e, "a", value, n, &wanted, 1, 0, &answer), BR_E_MISMATCH);
    swap_expect_live(e, "after refusals");
    CHECK_OK(br_swap_from_memory(e, "a", value, n, NULL, 1, 0, &answer));
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_expect_live(e, "the changed one");
    const br_ipc nobody = {{0}, 0};
    CHECK_OK(br_swap_from_memory(e, "a", value, n, NULL, 2, 0, &answer));
    CHECK_FAILS(br_swap_ipc(e, "a", 0, &nobody), BR_E_ARG);
    swap_commit(e, 2, BR_SWAP_STOP, BR_SWAP_COMMITTED); /* it was not dropped */
    CHECK_OK(br_swap_begin(e, "a", 3, 0, &answer));
    CHECK_FAILS(br_swap_ipc(e, "a", 0, &nobody), BR_E_UNSUPPORTED);
    CHECK_FAILS(br_swap_end(e, "a", wanted), BR_E_ARG); /* it was dropped */
    swap_close_sets(set);
    free(changed);
    free(value);
    br_engine_close(e);
}
END_TEST

/* Values that wait for a slot to fill are let go of when the call fails: their memory may be gone afterwards. */
START_TEST(a_failed_version_holds_on_to_nothing) {
    br_engine *e = rows_engine(NULL);
    br_swap_answer answer;
    br_swap_tensor t;
    br_digest manifest;
    int64_t n;
    CHECK_OK(br_swap_manifest(e, "a", &n, &manifest));
    const size_t bytes = br_model_adapter_values(e->loaded.model) * sizeof(uint16_t);
    const uint16_t **value = rig_alloc((size_t)n, sizeof *value);
    for (int turn = 0; turn < 2; turn++) {
        uint16_t *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ck_assert(map != MAP_FAILED);
        for (size_t i = 0; i < bytes / sizeof *map; i++)
            map[i] = (uint16_t)(0x3c00 + i % 64);
        for (int64_t i = 0; i < n; i++)
            value[i] = map;
        if (turn == 0) {
            value[n - 1] = NULL;
            CHECK_OK(br_swap_tensor_at(e, "a", n - 1, &t));
            CHECK_FAILS(br_swap_from_memory(e, "a", value, n, NULL, 0, 0, &answer), BR_E_FORMAT);
            ck_assert_msg(strstr(br_last_error(), t.name) != NULL, "%s", br_last_error());
        } else {
            CHECK_OK(br_swap_from_memory(e, "a", value, n, NULL, 0, 0, &answer));
        }
        ck_assert_int_eq(mprotect(map, bytes, PROT_NONE), 0); /* not unmapped: the next one may not lie there */
    }
    swap_commit(e, 0, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_expect_live(e, "after a failed one");
    free(value);
    br_engine_close(e);
}
END_TEST

/* Bytes of a chunk are the caller's again when it returns; between begin and commit nothing of ours is allocated. */
START_TEST(chunks_are_read_at_once) {
    br_engine *e = rows_engine(swap_of.dir[0]);
    lora_set *set[SWAP_VERSIONS];
    br_swap_tensor t;
    br_digest manifest;
    int64_t n;
    swap_open_sets(e, set);
    swap_begin_version(e, 2, 1);
    CHECK_OK(br_swap_manifest(e, "a", &n, &manifest));
    unsigned char *bytes = rig_alloc(br_model_adapter_values(e->loaded.model), sizeof(uint16_t));
    const long before = br_mem_alloc_count();
    for (int64_t i = 0; i < n; i++) {
        lora_key key;
        CHECK_OK(br_swap_tensor_at(e, "a", i, &t));
        CHECK_OK(lora_key_parse("test", &e->loaded.config, t.name, &key));
        const lora_pair pair = lora_pair_of(set[2], 0, key.cls, key.layer, key.expert);
        const size_t size = (size_t)t.n_row * (size_t)t.n_col * sizeof(uint16_t);
        memcpy(bytes, t.is_b ? pair.b : pair.a, size);
        CHECK_OK(br_swap_chunk(e, "a", i, 0, bytes, size));
        memset(bytes, 0xff, size);
    }
    CHECK_OK(br_swap_end(e, "a", lora_digest(set[2], 0)));
    swap_commit(e, 1, BR_SWAP_STOP, BR_SWAP_COMMITTED);
    swap_expect_live(e, "sent in chunks");
    ck_assert_int_eq(br_mem_alloc_count(), before);
    swap_close_sets(set);
    free(bytes);
    br_engine_close(e);
}
END_TEST

/* ---- a look that is broken off -------------------------------------------------------------------------------------------------------- */

static struct {
    void *dst[4];
    const void *src[4];
    size_t bytes[4];
    int n, n_to_refusal; /* n_to_refusal: the download that is refused, alone; 0: none */
} late;

/* Downloads come as late as a GPU may do them: when the next call of the stream begins, or at a wait. */
static void run_late(void) {
    for (int i = 0; i < late.n; i++)
        memcpy(late.dst[i], late.src[i], late.bytes[i]);
    late.n = 0;
}

static br_status late_download(br_device *d, void *dst, const void *src, size_t bytes) {
    (void)d;
    if (late.n_to_refusal > 0 && --late.n_to_refusal == 0)
        return br_fail(BR_E_DEVICE, "one download is refused");
    ck_assert_int_lt(late.n, 4);
    late.dst[late.n] = dst, late.src[late.n] = src, late.bytes[late.n++] = bytes;
    return BR_OK;
}

static br_status late_upload(br_device *d, void *dst, const void *src, size_t bytes) {
    (void)d;
    run_late();
    memcpy(dst, src, bytes);
    return BR_OK;
}

static br_status late_check(br_device *d, const br_fill *fill, int32_t n, uint32_t *torn) {
    run_late();
    return br_device_host_check(d, fill, n, torn);
}

static br_status late_hash(br_device *d, const br_view *view, int32_t n, br_seen *seen) {
    run_late();
    return br_device_host_hash(d, view, n, seen);
}

static br_status late_wait(br_device *d) {
    (void)d;
    run_late();
    return BR_OK;
}

/* A look whose second download was refused left the first under way, which then wrote "torn" into the word that the next look begins with:
 * of an adapter that had been written anew meanwhile. */
START_TEST(a_look_begins_with_nothing_torn) {
    br_engine *e = rows_engine(swap_of.dir[0]);
    br_device *d = e->loaded.device;
    const device_ops *host = d->op;
    device_ops ops = *host;
    uint32_t *s = (uint32_t *)(uintptr_t)e->loaded.model->layer[0].kda.o.lora[0].s;
    lora_scale *plan = rig_alloc((size_t)lora_map_count(&e->loaded.config), sizeof *plan);
    adapter_image *image;
    br_digest wanted, digest;
    ops.upload = late_upload;
    ops.download = late_download;
    ops.check = late_check;
    ops.hash = late_hash;
    ops.wait = late_wait;
    CHECK_OK(br_engine_adapter_digest(e, "a", &wanted));
    lora_plan_of(e->loaded.adapters, &e->loaded.config, 0, plan);
    d->op = &ops;
    d->is_host = 0; /* the two sides of a mirror lie apart */
    CHECK_OK(adapter_image_open(&e->loaded, 0, &image));
    CHECK_OK(adapter_image_lay(image, plan));
    for (int refused = 0; refused <= 2; refused++) {
        *s ^= 1;
        late.n_to_refusal = refused;
        if (refused) {
            CHECK_FAILS(adapter_image_digest(image, &digest), BR_E_DEVICE);
            ck_assert_str_eq(br_last_error(), "one download is refused");
        } else {
            CHECK_OK(adapter_image_digest(image, &digest));
            ck_assert(!br_digest_equal(digest, wanted));
        }
        *s ^= 1;
        CHECK_OK(adapter_image_digest(image, &digest));
        ck_assert_msg(br_digest_equal(digest, wanted), "download %d was refused: the next look finds it torn", refused);
    }
    adapter_image_close(image);
    d->is_host = 1;
    d->op = host;
    free(plan);
    br_engine_close(e);
}
END_TEST

Suite *test_device_view_suite(void) {
    Suite *suite = suite_create("device_view");
    TCase *hash = tcase_create("views"), *engine = tcase_create("engine");
    tcase_add_checked_fixture(hash, open_device, close_device);
    tcase_add_test(hash, short_inputs_of_every_length);
    tcase_add_test(hash, every_length_and_form);
    tcase_add_test(hash, rows_in_two_places);
    tcase_add_test(hash, what_is_not_finite_is_found);
    tcase_add_test(hash, fills_are_written_and_checked);
    suite_add_tcase(suite, hash);
    tcase_set_timeout(engine, 300);
    tcase_add_unchecked_fixture(engine, swap_models_make, NULL);
    tcase_add_test(engine, versions_come_in_by_views);
    tcase_add_test(engine, any_flipped_bit_is_seen_by_views);
    tcase_add_test(engine, bad_versions_are_refused_at_the_end);
    tcase_add_test(engine, a_failed_version_holds_on_to_nothing);
    tcase_add_test(engine, chunks_are_read_at_once);
    tcase_add_test(engine, a_look_begins_with_nothing_torn);
    suite_add_tcase(suite, engine);
    return suite;
}
