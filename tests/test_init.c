/* The verb `init` and the weight generator behind it: the same bytes on every machine, files that load as published ones do,
 * numbers with the spread that the recipe names. */
#include "bi_weightgen.h"
#include "br_file.h"
#include "br_hash.h"
#include "br_mem.h"
#include "config_json.h"
#include "init_presets.h"
#include "lora_slots.h"
#include "test_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- generator -------------------------------------------------------------------------------------------------------- */

static bi_weightgen make(bi_weightgen_kind kind, float offset, float spread, int32_t fan) {
    return bi_weightgen_make(bi_weightgen_key(5, "some.tensor"), kind, offset, spread, fan);
}

/* The recipe written out once more: 64-bit counter, sum of four pieces, binary64 in place of the exact binary32 product. */
static double slow_value(uint64_t key, uint64_t i, double offset, double unit) {
    uint64_t bits = test_mix(key + i * 0x9e3779b97f4a7c15ull); /* test_mix adds the increment once more */
    int64_t sum = 0;
    for (int piece = 0; piece < 4; piece++)
        sum += (int64_t)(bits >> (16 * piece) & 0xffff);
    return offset + (double)(sum / 4 - 32768) * unit;
}

START_TEST(values_are_the_written_formula) {
    bi_weightgen gen = make(BI_WEIGHTGEN_NORMAL, 1.0f, 0.1f, 1);
    double unit = (double)gen.unit;
    ck_assert(unit == (double)bi_widen(bi_round(gen.unit))); /* 8 bits, so that a 16-bit step times it is exact */
    for (uint64_t i = 0; i < 20000; i++) {
        ck_assert(bi_weightgen_value(&gen, i) == (float)slow_value(gen.key, i, 1.0, unit));
    }
}
END_TEST

START_TEST(any_range_is_a_part_of_the_whole) {
    enum { N = 700 };
    bi_weightgen normal = make(BI_WEIGHTGEN_NORMAL, 0, 1.0f, 64), fp4 = make(BI_WEIGHTGEN_FP4, 0, 1.0f, 64);
    float f32[N], part_f32[N];
    uint16_t bf16[N], part_bf16[N];
    uint8_t code[N], scale[N], part_code[N], part_scale[N];
    bi_weightgen_fill_f32(&normal, 0, f32, N);
    bi_weightgen_fill_bf16(&normal, 0, bf16, N);
    bi_weightgen_fill_fp4(&fp4, 0, code, N);
    bi_weightgen_fill_scale(&fp4, 0, scale, N);
    for (size_t at = 0, n = 1; at < N; at += n, n = n * 2 + 1) {
        n = n > N - at ? N - at : n;
        bi_weightgen_fill_f32(&normal, at, part_f32 + at, n);
        bi_weightgen_fill_bf16(&normal, at, part_bf16 + at, n);
        bi_weightgen_fill_fp4(&fp4, at, part_code + at, n);
        bi_weightgen_fill_scale(&fp4, at, part_scale + at, n);
    }
    ck_assert(!memcmp(f32, part_f32, sizeof f32) && !memcmp(bf16, part_bf16, sizeof bf16));
    ck_assert(!memcmp(code, part_code, sizeof code) && !memcmp(scale, part_scale, sizeof scale));
    for (size_t i = 0; i < N; i++)
        ck_assert_uint_eq(bf16[i], bi_round(f32[i]));
}
END_TEST

typedef struct moments {
    double mean, spread, min, max;
} moments;

static moments moments_of(const float *x, int n) {
    moments m = {.min = (double)x[0], .max = (double)x[0]};
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)x[i];
        squares += (double)x[i] * (double)x[i];
        m.min = (double)x[i] < m.min ? (double)x[i] : m.min;
        m.max = (double)x[i] > m.max ? (double)x[i] : m.max;
    }
    m.mean = sum / n;
    m.spread = sqrt(squares / n - m.mean * m.mean);
    return m;
}

START_TEST(spreads_are_those_of_the_recipe) {
    enum { N = 1 << 17 };
    static float x[N];
    bi_weightgen normal = make(BI_WEIGHTGEN_NORMAL, 2.0f, 3.0f, 36), uniform = make(BI_WEIGHTGEN_UNIFORM, -2.0f, 4.0f, 1);
    bi_weightgen_fill_f32(&normal, 0, x, N);
    moments m = moments_of(x, N);
    ck_assert(fabs(m.mean - 2.0) < 0.005 && fabs(m.spread - 0.5) < 0.005); /* 3.6 and 5 sigma of the sample */
    ck_assert(m.max < 2.0 + 0.5 * 3.48 && m.max > 2.0 + 0.5 * 3.1 && m.min < 2.0 - 0.5 * 3.1);
    bi_weightgen_fill_f32(&uniform, 0, x, N);
    m = moments_of(x, N);
    ck_assert(m.min >= -2.0 && m.min < -1.999 && m.max < 2.0 && m.max > 1.99 && fabs(m.mean) < 0.02 &&
              fabs(m.spread - 1.1547) < 0.01);
    for (int32_t fan = 1; fan < 5000; fan = fan * 3 + 1) {
        static uint8_t code[N / 2], scale[N / 32];
        int seen[16] = {0};
        bi_weightgen fp4 = make(BI_WEIGHTGEN_FP4, 0, 1.2f, fan);
        bi_weightgen_fill_fp4(&fp4, 0, code, N / 2);
        bi_weightgen_fill_scale(&fp4, 0, scale, N / 32);
        for (int i = 0; i < N; i++) {
            uint8_t nibble = (uint8_t)(i % 2 ? code[i / 2] >> 4 : code[i / 2] & 15);
            seen[nibble]++;
            ck_assert_int_le(abs(scale[i / 32] - fp4.scale_byte), 1);
            x[i] = bi_widen(bi_fp4_to_bf16(nibble, scale[i / 32]));
        }
        m = moments_of(x, N);
        ck_assert_msg(fabs(m.spread * sqrt(fan) / 1.2 - 1) < 0.08 && fabs(m.mean) < 0.01 * m.spread,
                      "fan %d: mean %g spread %g", fan, m.mean, m.spread); /* what is cut at 6 takes up to 7 % */
        for (int c = 0; c < 16; c++)
            ck_assert_msg(seen[c] > 0, "fan %d: code %d does not come", fan, c);
    }
}
END_TEST

START_TEST(keys_part_seeds_and_names) {
    uint64_t key = bi_weightgen_key(1, "a");
    ck_assert(key == bi_weightgen_key(1, "a") && key != bi_weightgen_key(2, "a") && key != bi_weightgen_key(1, "b"));
    /* Neighbour keys share no run of elements: the first values of a tensor do not come again, shifted, in another. */
    for (uint64_t shift = 0; shift < 64; shift++)
        ck_assert(bi_weightgen_bits(key, shift) != bi_weightgen_bits(bi_weightgen_key(2, "a"), 0));
}
END_TEST

/* ---- presets ---------------------------------------------------------------------------------------------------------- */

static br_config config_of(const char *preset) {
    br_config config;
    const init_preset *p = init_preset_find(preset);
    ck_assert_ptr_nonnull(p);
    CHECK_OK(br_config_parse(preset, p->config_json, strlen(p->config_json), &config));
    return config;
}

START_TEST(presets_have_their_shapes) {
    static const struct {
        const char *name;
        br_arch arch;
        int32_t n_layer, n_vocab, d_model, n_mla_layer, n_expert, topk, res_block, index_topk, fp4, position_max, n_dense, eos, large;
    } CASE[] = {
        {"pico", BR_ARCH_KIMI_K31, 3, 256, 128, 1, 32, 4, 3, 16, 1, 4096, 1, 1, 0},
        {"nano", BR_ARCH_KIMI_K31, 9, 2304, 128, 3, 32, 4, 3, 16, 1, 4096, 1, 1, 0},
        {"mini", BR_ARCH_KIMI_K31, 5, 4096, 256, 2, 32, 4, 2, 640, 1, 16384, 1, 1, 0},
        {"small", BR_ARCH_KIMI_K31, 13, 16384, 768, 4, 64, 8, 4, 256, 1, 65536, 1, 1, 0},
        {"k3-nano", BR_ARCH_KIMI_K3, 9, 2304, 128, 3, 32, 4, 3, 0, 1, 4096, 1, 1, 0},
        {"kimi-linear-nano", BR_ARCH_KIMI_LINEAR, 5, 2304, 128, 1, 16, 4, 0, 0, 0, 4096, 1, 1, 0},
        {"layer-full", BR_ARCH_KIMI_K31, 2, 163840, 7168, 1, 896, 16, 12, 2048, 1, 1 << 20, 0, 1, 1},
        {"slice-full", BR_ARCH_KIMI_K31, 4, 163840, 7168, 1, 896, 16, 12, 2048, 1, 1 << 20, 0, 1, 1},
        {"kimi-linear-48b", BR_ARCH_KIMI_LINEAR, 27, 163840, 2304, 7, 256, 8, 0, 0, 0, 1 << 20, 1, 163586, 1},
    };
    ck_assert_int_eq(init_preset_count(), sizeof CASE / sizeof CASE[0]);
    for (size_t i = 0; i < sizeof CASE / sizeof CASE[0]; i++) {
        br_config c = config_of(CASE[i].name);
        ck_assert_str_eq(init_preset_at((int32_t)i)->name, CASE[i].name);
        ck_assert(c.arch == CASE[i].arch && c.n_layer == CASE[i].n_layer && c.n_vocab == CASE[i].n_vocab &&
                  c.d_model == CASE[i].d_model);
        ck_assert(c.n_mla_layer == CASE[i].n_mla_layer && c.n_expert == CASE[i].n_expert && c.n_expert_topk == CASE[i].topk);
        ck_assert(c.res_block == CASE[i].res_block && c.index_topk == CASE[i].index_topk && c.experts_fp4 == CASE[i].fp4);
        ck_assert(c.position_max == CASE[i].position_max && c.eos_id == CASE[i].eos && c.n_dense_layer == CASE[i].n_dense &&
                  init_preset_at((int32_t)i)->is_large == CASE[i].large);
        ck_assert(c.layer_is_mla[c.n_layer - 1] == (strcmp(CASE[i].name, "kimi-linear-nano") != 0));
    }
    ck_assert_ptr_null(init_preset_find("layer"));
}
END_TEST

/* Every class that a preset has is drawn with some spread: a forgotten row would be a tensor of zeros. */
START_TEST(every_class_has_a_recipe) {
    for (int32_t p = 0; p < init_preset_count(); p++) {
        br_config config = config_of(init_preset_at(p)->name);
        br_expect expect;
        for (int64_t i = 0; br_weight_expect(&config, i, &expect); i++)
            ck_assert_msg(init_recipe_of(&config, expect.cls).spread > 0, "%s has no recipe", br_class_name(expect.cls));
    }
}
END_TEST

/* ---- files ------------------------------------------------------------------------------------------------------------ */

static char model_dir[BR_PATH_BYTES], lora_dir[BR_PATH_BYTES];

/* Each call names new folders, so that tests may share a process. */
static br_init_options options_of(const char *preset) {
    static int n_call;
    char name[64];
    snprintf(name, sizeof name, "%s-%d", preset, n_call++);
    CHECK_OK(br_file_join(model_dir, test_tmp_dir(), name));
    CHECK_OK(br_file_join(lora_dir, model_dir, "lora"));
    return (br_init_options){
        .preset = preset, .out_dir = model_dir, .seed = 11, .lora_rank = 16, .lora_out_dir = lora_dir, .lora_seed = 12};
}

static br_report run(const br_init_options *options) {
    br_report report;
    CHECK_OK(br_job_init(options, NULL, &report));
    return report;
}

static br_digest digest_of(const char *dir, const char *file) {
    char path[BR_PATH_BYTES];
    br_map map;
    CHECK_OK(br_file_join(path, dir, file));
    CHECK_OK(br_file_map(path, &map));
    br_digest digest = br_hash_bytes(map.bytes, map.n);
    br_file_unmap(&map);
    return digest;
}

/* What init writes must not change by accident: golden rollouts hang on it. A wanted change prints the new lines. */
START_TEST(bytes_of_pico_are_pinned) {
    static const struct {
        int in_lora;
        const char *file, *digest;
    } PINNED[] = {
        {0, "config.json", "ff88cdb7aec1f485eadc6c801a7d5563"},
        {0, "model.safetensors.index.json", "5ace354f87ad2b6d8991e7d237558713"},
        {0, "model-00001-of-00003.safetensors", "c1c1493c44f773f56ca4782dda630793"},
        {0, "model-00002-of-00003.safetensors", "d7dc7bd022c073aa93cd20819dce8851"},
        {0, "model-00003-of-00003.safetensors", "77b6816fda21ad71895a45a6421f33a6"},
        {1, "adapter_config.json", "5254a2771f2c0aa482446ebe39edf702"},
        {1, "adapter_model.safetensors", "ec1773e1c4f66e368354fbaf860079eb"},
    };
    br_init_options options = options_of("pico");
    br_report report = run(&options);
    br_report_free(&report);
    int n_differ = 0;
    for (size_t i = 0; i < sizeof PINNED / sizeof PINNED[0]; i++) {
        char text[BR_DIGEST_TEXT_BYTES];
        br_digest_text(digest_of(PINNED[i].in_lora ? lora_dir : model_dir, PINNED[i].file), text);
        if (strcmp(text, PINNED[i].digest) != 0) {
            n_differ++;
            printf("        {%d, \"%s\", \"%s\"},\n", PINNED[i].in_lora, PINNED[i].file, text);
        }
    }
    fflush(stdout); /* the failing process ends without it */
    ck_assert_int_eq(n_differ, 0);
}
END_TEST

static int is_zero(const void *data, size_t n) {
    const unsigned char *bytes = data;
    for (size_t i = 0; i < n; i++)
        if (bytes[i])
            return 0;
    return 1;
}

static void check_tensors(const br_config *config) {
    br_weights *weights;
    CHECK_OK(br_weights_open(model_dir, config, &weights));
    ck_assert_int_eq(br_weights_count(weights), br_weight_expect_count(config)); /* the optional ones too */
    ck_assert_int_eq(br_weights_skipped(weights), 0);
    int shards = 0;
    for (int64_t i = 0; i < br_weights_count(weights); i++) {
        const br_tensor *t = br_weights_at(weights, i);
        shards |= 1 << t->shard;
        ck_assert_msg(!is_zero(t->data, t->n_byte), "%s is all zero", t->name);
        if (t->cls == BR_W_KDA_A_LOG) {
            const unsigned char *padding = (const unsigned char *)t->data + sizeof(float) * (size_t)config->kda_n_head;
            ck_assert(is_zero(padding, t->n_byte - sizeof(float) * (size_t)config->kda_n_head));
        }
        for (size_t b = 0; t->cls >= BR_W_EXPERT_W1_SCALE && t->cls <= BR_W_EXPERT_W2_SCALE && b < t->n_byte; b++)
            ck_assert_int_le(((const uint8_t *)t->data)[b], BI_FP4_SCALE_MAX);
    }
    ck_assert_int_eq(shards, 7); /* all three are used */
    br_weights_close(weights);
}

static void check_adapter(const br_config *config) {
    lora_set *set;
    const br_adapter_source source = {"x", lora_dir};
    br_expect map;
    CHECK_OK(lora_open(config, &source, 1, 0, &set));
    for (int64_t i = 0; br_weight_expect(config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        lora_pair pair = lora_pair_of(set, 0, map.cls, map.layer, map.expert);
        ck_assert_msg(pair.a && pair.b && pair.rank == 16 && pair.alpha == 32, "%s of layer %d", br_class_name(map.cls),
                      map.layer);
        ck_assert(!is_zero(pair.a, 2 * (size_t)pair.rank * (size_t)pair.n_in) &&
                  !is_zero(pair.b, 2 * (size_t)pair.rank * (size_t)pair.n_out));
    }
    lora_close(set);
}

START_TEST(checkpoints_and_adapters_load_whole) {
    const init_preset *preset = init_preset_at(_i);
    if (preset->is_large || (strcmp(preset->name, "small") == 0 && !test_is_long()))
        return; /* those of test_generated.c, and 180 MB */
    br_config config = config_of(preset->name);
    br_init_options options = options_of(preset->name);
    br_report report = run(&options);
    ck_assert_int_eq(report.n_adapter, 1);
    ck_assert(report.weights_digest.lo && report.adapter_digest[0].lo && report.first_seq == -1);
    br_report_free(&report);
    check_tensors(&config);
    check_adapter(&config);
}
END_TEST

START_TEST(adapter_alone_leaves_the_checkpoint) {
    br_init_options options = options_of("k3-nano");
    br_report both = run(&options);
    br_digest adapter = digest_of(lora_dir, "adapter_model.safetensors");
    char other[BR_PATH_BYTES], config_path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(other, model_dir, "other"));
    /* Its own config.json decides, so that checkpoints not made by us get adapters too; weights are not written again. */
    options.preset = NULL;
    options.seed = 99;
    options.lora_only = 1;
    options.lora_out_dir = other;
    br_report alone = run(&options);
    ck_assert(br_digest_equal(both.weights_digest, alone.weights_digest));
    ck_assert(br_digest_equal(both.adapter_digest[0], alone.adapter_digest[0]));
    ck_assert(br_digest_equal(adapter, digest_of(other, "adapter_model.safetensors")));
    br_report_free(&alone);
    options.lora_seed++;
    alone = run(&options);
    ck_assert(!br_digest_equal(both.adapter_digest[0], alone.adapter_digest[0]));
    br_report_free(&alone);
    br_report_free(&both);
    CHECK_OK(br_file_join(config_path, model_dir, "config.json"));
    ck_assert_int_eq(remove(config_path), 0);
    CHECK_FAILS(br_job_init(&options, NULL, &alone), BR_E_NOT_FOUND);
}
END_TEST

START_TEST(seed_and_rank_decide_the_bytes) {
    br_init_options options = options_of("pico");
    options.lora_rank = 0; /* no adapter then, even with a folder */
    br_report first = run(&options);
    ck_assert_int_eq(first.n_adapter, 0);
    ck_assert(!br_file_exists(lora_dir));
    options.seed++;
    br_report second = run(&options);
    ck_assert(!br_digest_equal(first.weights_digest, second.weights_digest));
    options.seed--;
    br_report third = run(&options);
    ck_assert(br_digest_equal(first.weights_digest, third.weights_digest));
}
END_TEST

/* ---- refusals and failures -------------------------------------------------------------------------------------------- */

static void check_refused(const br_init_options *options, const char *sentence) {
    br_report report;
    CHECK_FAILS(br_job_init(options, NULL, &report), BR_E_ARG);
    ck_assert_msg(strstr(br_last_error(), sentence) != NULL, "'%s' is not in: %s", sentence, br_last_error());
    br_report_free(&report);
}

START_TEST(options_out_of_range_are_refused) {
    br_init_options options = options_of("pico");
    options.preset = "nan";
    check_refused(&options, "preset 'nan': expected one of pico, nano, mini, small, k3-nano, kimi-linear-nano, layer-full");
    options.preset = NULL;
    check_refused(&options, "preset '': expected one of");
    options = options_of("pico");
    options.out_dir = NULL;
    check_refused(&options, "out_dir");
    options = options_of("pico");
    options.lora_rank = 257;
    check_refused(&options, "lora_rank is 257");
    options.lora_rank = -1;
    check_refused(&options, "lora_rank is -1");
    options.lora_rank = 0;
    options.lora_only = 1;
    check_refused(&options, "lora_only");
    ck_assert(!br_file_exists(model_dir));
}
END_TEST

static int stop_at(void *context, const char *what, int64_t done, int64_t total) {
    ck_assert(done < total && (strcmp(what, "weights") == 0 || strcmp(what, "adapter") == 0));
    return --*(int *)context == 0;
}

START_TEST(a_watcher_stops_it) {
    int left = 5;
    br_report report;
    const br_watch watch = {stop_at, &left};
    char path[BR_PATH_BYTES];
    br_init_options options = options_of("pico");
    CHECK_FAILS(br_job_init(&options, &watch, &report), BR_E_ABORTED);
    CHECK_OK(br_file_join(path, model_dir, "config.json"));
    ck_assert(!br_file_exists(path)); /* nothing there opens as a checkpoint */
    left = 1 << 30;
    CHECK_OK(br_job_init(&options, &watch, &report));
    br_report_free(&report);
}
END_TEST

/* Allocations, reads and writes fail in turn: always a status, and what was there before stays or is whole. */
START_TEST(each_failure_ends_in_a_status) {
    static void (*const FAIL_NTH[])(long) = {br_mem_fail_nth, br_file_fail_nth_read, br_file_fail_nth_write};
    static const br_status WANTED[] = {BR_E_NOMEM, BR_E_IO, BR_E_IO};
    static const int AT_LEAST[] = {12, 6, 7};
    const long step = test_is_long() ? 1 : 3; /* a run flushes seven files to disk */
    br_init_options options = options_of("pico");
    for (int kind = 0; kind < 3; kind++) {
        long n_failed = 0;
        for (long n = 1;; n += kind == 0 ? step : 1) {
            br_report report;
            FAIL_NTH[kind](n);
            br_status status = br_job_init(&options, NULL, &report);
            FAIL_NTH[kind](0);
            br_report_free(&report);
            if (status == BR_OK)
                break;
            n_failed = n;
            ck_assert_msg(status == WANTED[kind], "kind %d, n %ld: %s", kind, n, br_last_error());
        }
        ck_assert_int_ge(n_failed, AT_LEAST[kind]);
    }
}
END_TEST

Suite *test_init_suite(void) {
    Suite *suite = suite_create("init");
    TCase *tcase = tcase_create("init");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, values_are_the_written_formula);
    tcase_add_test(tcase, any_range_is_a_part_of_the_whole);
    tcase_add_test(tcase, spreads_are_those_of_the_recipe);
    tcase_add_test(tcase, keys_part_seeds_and_names);
    tcase_add_test(tcase, presets_have_their_shapes);
    tcase_add_test(tcase, every_class_has_a_recipe);
    tcase_add_test(tcase, bytes_of_pico_are_pinned);
    tcase_add_loop_test(tcase, checkpoints_and_adapters_load_whole, 0, init_preset_count());
    tcase_add_test(tcase, adapter_alone_leaves_the_checkpoint);
    tcase_add_test(tcase, seed_and_rank_decide_the_bytes);
    tcase_add_test(tcase, options_out_of_range_are_refused);
    tcase_add_test(tcase, a_watcher_stops_it);
    tcase_add_test(tcase, each_failure_ends_in_a_status);
    suite_add_tcase(suite, tcase);
    return suite;
}
