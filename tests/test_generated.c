/* Checkpoints and adapters made from a recipe at each opening: the same bytes as the files that `init` writes, tensor by tensor,
 * packed, and in log-probs; recipes that lie are refused; the large ones open without a byte of their size being read. */
#include "br_file.h"
#include "br_hash.h"
#include "br_loaded.h"
#include "br_mem.h"
#include "checkpoint.h"
#include "config_json.h"
#include "engine_rig.h"
#include "init_presets.h"
#include "model_parts.h"
#include "op_rig.h"
#include "recipe_json.h"
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK_SAYS(part) ck_assert_msg(strstr(br_last_error(), part) != NULL, "'%s' lacks '%s'", br_last_error(), part)

/* A model and an adapter in both forms. */
typedef struct both {
    char dir[2][256], lora[2][256]; /* files, recipe */
    br_config config;
} both;

/* Each call names new folders, so that tests may share a process. */
static both make_both(const char *preset, int32_t rank) {
    static int n_call;
    both b;
    for (int form = 0; form < 2; form++) {
        br_report report;
        snprintf(b.dir[form], sizeof b.dir[form], "%s/%s-%d-%d", test_tmp_dir(), preset, n_call, form);
        snprintf(b.lora[form], sizeof b.lora[form], "%s/%s-%d-%d-lora", test_tmp_dir(), preset, n_call, form);
        const br_init_options options = {.preset = preset, .out_dir = b.dir[form], .seed = 5, .lora_rank = rank,
                                         .lora_out_dir = b.lora[form], .lora_seed = 6, .recipe = form};
        CHECK_OK(br_job_init(&options, NULL, &report));
        br_report_free(&report);
    }
    n_call++;
    CHECK_OK(br_config_read(b.dir[0], &b.config));
    return b;
}

static void write_text(const char *dir, const char *name, const char *text) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, dir, name));
    CHECK_OK(br_file_write(path, text, strlen(text)));
}

static int has_file(const char *dir, const char *name) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, dir, name));
    return br_file_exists(path);
}

/* ---- equal bytes ---------------------------------------------------------------------------------------------------------- */

static const char *const PRESET[] = {"pico", "nano", "kimi-linear-nano", "k3-nano"};
enum { N_PRESET = sizeof PRESET / sizeof PRESET[0] };

static void check_tensor(const br_tensor *file, const br_tensor *made) {
    unsigned char *bytes = rig_alloc(file->n_byte, 1);
    ck_assert(made->cls == file->cls && made->layer == file->layer && made->expert == file->expert && made->dtype == file->dtype);
    ck_assert(made->n_dim == file->n_dim && memcmp(made->dim, file->dim, sizeof made->dim) == 0 && made->n_byte == file->n_byte);
    ck_assert_str_eq(made->name, file->name);
    ck_assert(!made->data && made->gen && file->data && !file->gen);
    const size_t cut = made->n_byte / 2 / 4 * 4; /* in two pieces */
    br_tensor_make(made, 0, bytes, cut);
    br_tensor_make(made, cut, bytes + cut, made->n_byte - cut);
    ck_assert_msg(memcmp(bytes, file->data, file->n_byte) == 0, "%s", file->name);
    free(bytes);
}

START_TEST(tensors_are_those_of_the_files) {
    const both b = make_both(PRESET[_i], 16);
    br_weights *file, *made;
    CHECK_OK(checkpoint_open(b.dir[0], &b.config, &file));
    CHECK_OK(checkpoint_open(b.dir[1], &b.config, &made));
    CHECK_OK(br_weights_check_data(made));
    ck_assert(!has_file(b.dir[1], "model.safetensors.index.json") && !has_file(b.lora[1], "adapter_model.safetensors"));
    ck_assert_ptr_null(br_weights_origin(file));
    ck_assert_ptr_nonnull(strstr(br_weights_origin(made), PRESET[_i]));
    ck_assert_int_eq(br_weights_count(made), br_weights_count(file));
    for (int64_t i = 0; i < br_weights_count(file); i++)
        check_tensor(br_weights_at(file, i), br_weights_at(made, i));
    br_weights_close(file);
    br_weights_close(made);
}
END_TEST

static void check_half(const uint16_t *value, const bi_weightgen *gen, size_t n) {
    uint16_t *made = rig_alloc(n, sizeof *made);
    bi_weightgen_fill_bf16(gen, 0, made, n);
    ck_assert_int_eq(memcmp(made, value, n * sizeof *made), 0);
    free(made);
}

START_TEST(adapters_are_those_of_the_files) {
    const both b = make_both(PRESET[_i], 16);
    const br_adapter_source source[2] = {{"file", b.lora[0]}, {"made", b.lora[1]}};
    lora_set *set;
    br_expect map;
    CHECK_OK(lora_open(&b.config, source, 2, 0, &set));
    ck_assert_int_eq(lora_rank_max(set), 16);
    for (int64_t i = 0; br_weight_expect(&b.config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        const lora_pair file = lora_pair_of(set, 0, map.cls, map.layer, map.expert), made = lora_pair_of(set, 1, map.cls, map.layer, map.expert);
        ck_assert(file.rank == 16 && made.rank == 16 && made.alpha == file.alpha && made.rslora == file.rslora);
        ck_assert(made.n_in == file.n_in && made.n_out == file.n_out && !made.a && !made.b && !file.gen_a && !file.gen_b);
        check_half(file.a, made.gen_a, 16 * (size_t)file.n_in);
        check_half(file.b, made.gen_b, 16 * (size_t)file.n_out);
    }
    lora_close(set);
}
END_TEST

static void open_oracle(const both *b, int form, br_loaded *loaded) {
    const br_adapter_source source = {"x", b->lora[form]};
    const br_engine_options options = {.model_dir = b->dir[form], .adapter = &source, .n_adapter = 1, .backend = "oracle", .n_thread = 2};
    CHECK_OK(br_loaded_open(&options, 64, 256, 0, loaded));
}

START_TEST(packed_bytes_are_equal) {
    const both b = make_both(PRESET[_i], 24); /* a rank that is filled up to 32 */
    br_loaded file, made;
    open_oracle(&b, 0, &file);
    open_oracle(&b, 1, &made);
    const br_arena *x = &file.model->memory, *y = &made.model->memory;
    ck_assert(x->size == y->size && x->used == y->used);
    ck_assert_int_eq(memcmp(x->base, y->base, x->used), 0);
    br_loaded_close(&file);
    br_loaded_close(&made);
}
END_TEST

enum { N_REQUEST = 9 };

/* Two adapters of different ranks in each form. */
static rig_model rig_of(const char *preset, int form) {
    rig_model m = {.n_vocab = strcmp(preset, "pico") == 0 ? 256 : 2304};
    snprintf(m.preset, sizeof m.preset, "%s", preset);
    snprintf(m.dir, sizeof m.dir, "%s/rig-%s-%d", test_tmp_dir(), preset, form);
    for (int i = 0; i < RIG_ADAPTERS; i++) {
        br_report report;
        snprintf(m.adapter_dir[i], sizeof m.adapter_dir[i], "%s/rig-%s-%d-%d", test_tmp_dir(), preset, form, i);
        const br_init_options options = {.preset = preset, .out_dir = m.dir, .seed = 1, .lora_rank = 8 + 8 * i, .lora_out_dir = m.adapter_dir[i],
                                         .lora_seed = (uint64_t)(7 + i), .lora_only = i > 0, .recipe = form && i == 0};
        CHECK_OK(br_job_init(&options, NULL, &report));
        br_report_free(&report);
        ck_assert_int_eq(has_file(m.adapter_dir[i], RECIPE_NAME), form); /* the second takes the form of its checkpoint */
    }
    return m;
}

START_TEST(log_probs_are_equal) {
    static rig_request request[N_REQUEST];
    static rig_text text[2][N_REQUEST], scored[2][N_REQUEST];
    for (int form = 0; form < 2; form++) {
        rig_model m = rig_of(PRESET[_i], form);
        for (int i = 0; i < RIG_ADAPTERS; i++)
            m.adapter[i] = (br_adapter_source){.name = i ? "b" : "a", .dir = m.adapter_dir[i]};
        rig_requests(&m, 3, N_REQUEST, 5, 70, 12, request);
        const br_engine_options options = rig_options(&m);
        rig_generate(&options, request, NULL, N_REQUEST, text[form]);
        rig_score(&m, 96, 1, request, text[form], N_REQUEST, scored[form]);
        rig_expect_scored(request, text[form], scored[form], N_REQUEST, "scored");
    }
    rig_expect_equal(request, text[0], text[1], N_REQUEST, "files and recipe");
    rig_expect_equal(request, scored[0], scored[1], N_REQUEST, "files and recipe, scored");
}
END_TEST

/* ---- the ops ---------------------------------------------------------------------------------------------------------------- */

static const bi_limits LIMITS = {.n_row = 1, .d_in = 64, .d_out = 64};

static void check_bf16(const bi_backend *backend, bi_mat_generate_args args) {
    const int32_t n_out = args.to.n_out, n_in = args.to.n_in;
    const size_t bytes = backend->op->mat_bytes(BI_FORM_BF16, n_out, n_in);
    bi_bf16 *source = rig_alloc((size_t)n_out * (size_t)n_in, sizeof *source);
    void *packed = rig_alloc(bytes, 1), *made = rig_alloc(bytes, 1);
    for (int64_t o = 0; o < args.have_out; o++)
        for (int64_t i = 0; i < args.have_in; i++)
            bi_weightgen_fill_bf16(&args.gen, args.first + (uint64_t)(o * args.stride_out + i * args.stride_in), &source[o * n_in + i], 1);
    CHECK_OK(backend->op->mat_pack_bf16(backend->ctx, packed, n_out, n_in, source, n_in, 1));
    args.to.data = made;
    CHECK_OK(backend->op->mat_generate(backend->ctx, &args));
    ck_assert_msg(memcmp(packed, made, bytes) == 0, "(%d, %d)", n_out, n_in);
    free(source);
    free(packed);
    free(made);
}

static void check_fp4(const bi_backend *backend, int32_t n_out, int32_t n_in, uint64_t first, const bi_weightgen *gen) {
    const size_t bytes = backend->op->mat_bytes(BI_FORM_FP4, n_out, n_in), n = (size_t)n_out * (size_t)n_in;
    uint8_t *code = rig_alloc(n / 2, 1), *scale = rig_alloc(n / 32, 1);
    void *packed = rig_alloc(bytes, 1), *made = rig_alloc(bytes, 1);
    bi_weightgen_fill_fp4(gen, first / 2, code, n / 2);
    bi_weightgen_fill_scale(&gen[1], first / 32, scale, n / 32);
    CHECK_OK(backend->op->mat_pack_fp4(backend->ctx, packed, n_out, n_in, code, scale));
    const bi_mat_generate_args args = {.to = {.data = made, .n_out = n_out, .n_in = n_in, .form = BI_FORM_FP4}, .have_out = n_out,
                                       .have_in = n_in, .first = first, .gen = gen[0], .gen_scale = gen[1]};
    CHECK_OK(backend->op->mat_generate(backend->ctx, &args));
    ck_assert_msg(memcmp(packed, made, bytes) == 0, "(%d, %d)", n_out, n_in);
    free(code);
    free(scale);
    free(packed);
    free(made);
}

static void check_vectors(const bi_backend *backend, const bi_weightgen *gen) {
    enum { N = 100, FIRST = 12345 };
    float f32[N], got[N];
    bi_bf16 bf16[N], got_bf16[N];
    bi_weightgen_fill_f32(gen, FIRST, f32, N);
    bi_weightgen_fill_bf16(gen, FIRST, bf16, N);
    bi_vector_generate_args args = {.dst = got, .n = N, .as = BI_GENERATE_F32, .first = FIRST, .gen = *gen};
    CHECK_OK(backend->op->vector_generate(backend->ctx, &args));
    ck_assert_int_eq(memcmp(got, f32, sizeof f32), 0);
    args.as = BI_GENERATE_F32_WIDENED;
    CHECK_OK(backend->op->vector_generate(backend->ctx, &args));
    for (int i = 0; i < N; i++)
        ck_assert(bi_u32_of(got[i]) == (uint32_t)bf16[i] << 16);
    args.as = BI_GENERATE_BF16;
    args.dst = got_bf16;
    CHECK_OK(backend->op->vector_generate(backend->ctx, &args));
    ck_assert_int_eq(memcmp(got_bf16, bf16, sizeof bf16), 0);
    args = (bi_vector_generate_args){.n = 0};
    CHECK_OK(backend->op->vector_generate(backend->ctx, &args));
    args.n = -1;
    CHECK_FAILS(backend->op->vector_generate(backend->ctx, &args), BR_E_SHAPE);
}

static void check_refusals(const bi_backend *backend, const bi_weightgen *gen) {
    const bi_mat_generate_args good = {.to = {.n_out = 8, .n_in = 32}, .have_out = 8, .have_in = 32, .stride_out = 32, .stride_in = 1, .gen = *gen};
    bi_mat_generate_args bad[] = {good, good, good, good, good, good};
    bad[0].to.n_out = 0;
    bad[1].to.n_in = 0;
    bad[2].have_out = 9;
    bad[3].have_in = -1;
    bad[4].to.form = bad[5].to.form = BI_FORM_FP4;
    bad[4].to.n_in = bad[4].have_in = 48;
    bad[5].have_out = 7;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_FAILS(backend->op->mat_generate(backend->ctx, &bad[i]), BR_E_SHAPE);
}

START_TEST(ops_pack_what_they_make) {
    const char *isa[OP_RIG_ISA_MAX];
    const int n_isa = op_rig_isas(isa);
    const uint64_t key = bi_weightgen_key(9, "op");
    const bi_weightgen gen = bi_weightgen_make(key, BI_WEIGHTGEN_NORMAL, 0.5f, 2.0f, 3);
    const bi_weightgen fp4[2] = {bi_weightgen_make(key, BI_WEIGHTGEN_FP4, 0, 1.0f, 64),
                                 bi_weightgen_make(bi_weightgen_key(9, "scale"), BI_WEIGHTGEN_FP4, 0, 1.0f, 64)};
    static const int32_t SIZE[] = {1, 2, 15, 16, 31, 32, 33, 64, 97};
    enum { N = sizeof SIZE / sizeof SIZE[0] };
    for (int k = 0; k < n_isa; k++) {
        op_rig rig;
        op_rig_open(&rig, &LIMITS, isa[k], 1);
        for (int o = 0; o < N; o++)
            for (int i = 0; i < N; i++) {
                const bi_mat to = {.n_out = SIZE[o], .n_in = SIZE[i]};
                const bi_mat_generate_args rows = {.to = to, .have_out = to.n_out, .have_in = to.n_in, .first = 77, .stride_out = to.n_in,
                                                   .stride_in = 1, .gen = gen};
                const bi_mat_generate_args part = {.to = to, .have_out = to.n_out - 1, .have_in = to.n_in / 2, .first = 1ull << 40,
                                                   .stride_out = 1, .stride_in = 1000, .gen = gen};
                check_bf16(&rig.backend, rows);
                check_bf16(&rig.backend, part);
                check_fp4(&rig.backend, to.n_out, 32 * (1 + i % 3), (uint64_t)(96 * 5 * i), fp4);
            }
        check_vectors(&rig.backend, &gen);
        check_refusals(&rig.backend, &gen);
        op_rig_close(&rig);
    }
}
END_TEST

/* ---- what is refused -------------------------------------------------------------------------------------------------------- */

#define RECIPE(version, kind, preset, seed, more) \
    "{\"format_version\": " version ", \"generates\": \"" kind "\"" preset ", \"seed\": " seed ", \"config_digest\": \"%s\"" more "}"
#define PICO ", \"preset\": \"pico\""

/* %s: the digest of the model's shape. */
static const struct {
    const char *text;
    br_status status;
    const char *sentence;
} damaged[] = {
    {RECIPE("1", "checkpoint", PICO, "\"5\"", ""), BR_OK, ""},
    {RECIPE("1", "checkpoint", PICO, "\"18446744073709551615\"", ""), BR_OK, ""},
    {"", BR_E_FORMAT, "not JSON"},
    {"{\"format_version\": 1,", BR_E_FORMAT, "not JSON"},
    {"[1]", BR_E_FORMAT, "expected a JSON object"},
    {"{}", BR_E_FORMAT, "format_version"},
    {RECIPE("2", "checkpoint", PICO, "\"5\"", ""), BR_E_UNSUPPORTED, "format_version 2: this build makes version 1"},
    {RECIPE("0", "checkpoint", PICO, "\"5\"", ""), BR_E_FORMAT, "format_version"},
    {RECIPE("\"1\"", "checkpoint", PICO, "\"5\"", ""), BR_E_FORMAT, "format_version"},
    {RECIPE("1", "adapter", "", "\"5\"", ""), BR_E_FORMAT, "generates 'adapter': expected 'checkpoint'"},
    {RECIPE("1", "checkpoint", "", "\"5\"", ""), BR_E_FORMAT, "preset is missing"},
    {RECIPE("1", "checkpoint", ", \"preset\": \"\"", "\"5\"", ""), BR_E_FORMAT, "preset ''"},
    {RECIPE("1", "checkpoint", ", \"preset\": \"huge\"", "\"5\"", ""), BR_E_UNSUPPORTED, "preset 'huge' is not one of this build"},
    {RECIPE("1", "checkpoint", ", \"preset\": \"nano\"", "\"5\"", ""), BR_E_FORMAT, "preset 'nano' has another shape"},
    {RECIPE("1", "checkpoint", PICO, "5", ""), BR_E_FORMAT, "seed"},
    {RECIPE("1", "checkpoint", PICO, "\"-5\"", ""), BR_E_FORMAT, "seed '-5'"},
    {RECIPE("1", "checkpoint", PICO, "\"5x\"", ""), BR_E_FORMAT, "seed '5x'"},
    {RECIPE("1", "checkpoint", PICO, "\"18446744073709551616\"", ""), BR_E_FORMAT, "seed '18446744073709551616'"},
    {RECIPE("1", "checkpoint", PICO, "\"5\"", ", \"scale\": 2"), BR_E_FORMAT, "key 'scale' is not one of a recipe's"},
    {RECIPE("1", "checkpoint", PICO, "\"5\"", ", \"seed\": \"6\""), BR_E_FORMAT, "not JSON"},
    {"{\"format_version\": 1, \"generates\": \"checkpoint\"" PICO ", \"seed\": \"5\"}", BR_E_FORMAT, "config_digest is missing"},
    {"{\"format_version\": 1, \"generates\": \"checkpoint\"" PICO ", \"seed\": \"5\", \"config_digest\": \"123\"}", BR_E_FORMAT,
     "config_digest '123': expected 32 hex digits"},
    {"{\"format_version\": 1, \"generates\": \"checkpoint\"" PICO ", \"seed\": \"5\", \"config_digest\": \"00000000000000000000000000000000\"}",
     BR_E_FORMAT, "config.json has another shape"},
};

enum { N_DAMAGED = sizeof damaged / sizeof damaged[0] };

START_TEST(damaged_recipes_are_refused) {
    const both b = make_both("pico", 8);
    char text[512], hex[BR_DIGEST_TEXT_BYTES], begin[600];
    br_digest_text(br_config_digest(&b.config), hex);
    for (int i = 0; i < N_DAMAGED; i++) {
        br_weights *weights;
        const char *at = strstr(damaged[i].text, "%s");
        snprintf(text, sizeof text, "%.*s%s%s", at ? (int)(at - damaged[i].text) : 0, damaged[i].text, at ? hex : "", at ? at + 2 : damaged[i].text);
        write_text(b.dir[1], RECIPE_NAME, text);
        const br_status status = checkpoint_open(b.dir[1], &b.config, &weights);
        ck_assert_msg(status == damaged[i].status, "%s: %s (%s)", text, br_status_name(status), status == BR_OK ? "" : br_last_error());
        if (status == BR_OK) {
            br_weights_close(weights);
            continue;
        }
        ck_assert_ptr_null(weights);
        CHECK_SAYS(damaged[i].sentence);
        snprintf(begin, sizeof begin, "%s/%s", b.dir[1], RECIPE_NAME);
        ck_assert_msg(strncmp(br_last_error(), begin, strlen(begin)) == 0, "no file is named: %s", br_last_error());
    }
}
END_TEST

START_TEST(adapters_follow_their_config) {
    static const char CONFIG[] = "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 16, \"target_modules\": %s%s}";
    const both b = make_both("pico", 8);
    const br_adapter_source source = {"x", b.lora[1]};
    char text[512];
    lora_set *set;
    snprintf(text, sizeof text, CONFIG, "[\"o_proj\"]", ", \"rank_pattern\": {\"layers.1.self_attn.o_proj\": 4}");
    write_text(b.lora[1], "adapter_config.json", text);
    CHECK_OK(lora_open(&b.config, &source, 1, 0, &set));
    ck_assert_int_eq(lora_pair_of(set, 0, BR_W_KDA_O, 0, -1).rank, 8);
    ck_assert_int_eq(lora_pair_of(set, 0, BR_W_KDA_O, 1, -1).rank, 4);
    ck_assert_int_eq(lora_pair_of(set, 0, BR_W_KDA_Q, 0, -1).rank, 0);
    const br_digest digest = lora_digest(set, 0);
    lora_close(set);
    br_loaded loaded; /* ranks of one slot that differ from map to map */
    open_oracle(&b, 1, &loaded);
    ck_assert(br_digest_equal(lora_digest(loaded.adapters, 0), digest));
    br_loaded_close(&loaded);
    snprintf(text, sizeof text, CONFIG, "\"all-linear\"", "");
    write_text(b.lora[1], "adapter_config.json", text);
    CHECK_FAILS(lora_open(&b.config, &source, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("target_modules: expected a list of names");
    snprintf(text, sizeof text, CONFIG, "[\"nothing\"]", "");
    write_text(b.lora[1], "adapter_config.json", text);
    CHECK_FAILS(lora_open(&b.config, &source, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("no tensors");
    snprintf(text, sizeof text, CONFIG, "[\"o_proj\"]", ", \"alpha_pattern\": {\"o_proj\": 0}");
    write_text(b.lora[1], "adapter_config.json", text);
    CHECK_FAILS(lora_open(&b.config, &source, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("is zero");
}
END_TEST

START_TEST(an_adapter_of_another_model_is_refused) {
    const both pico = make_both("pico", 8), nano = make_both("nano", 8);
    const br_adapter_source source = {"x", nano.lora[1]}, checkpoint = {"x", pico.dir[1]};
    lora_set *set;
    CHECK_FAILS(lora_open(&pico.config, &source, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("config.json has another shape");
    CHECK_FAILS(lora_open(&pico.config, &checkpoint, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("generates 'checkpoint': expected 'adapter'");
}
END_TEST

/* Which form is opened may not depend on which is looked for first. */
START_TEST(both_forms_in_one_folder_are_refused) {
    const both b = make_both("pico", 8);
    br_init_options options = {.preset = "pico", .out_dir = b.dir[0], .recipe = 1};
    br_report report;
    br_weights *weights;
    lora_set *set;
    CHECK_FAILS(br_job_init(&options, NULL, &report), BR_E_ARG);
    CHECK_SAYS("model.safetensors.index.json is there: expected a folder without files of tensors for generated.json; "
               "delete its *.safetensors and their index first"); /* it said that both were there */
    options = (br_init_options){.preset = "pico", .out_dir = b.dir[1]};
    CHECK_FAILS(br_job_init(&options, NULL, &report), BR_E_ARG);
    CHECK_SAYS("generated.json is there");
    options = (br_init_options){.out_dir = b.dir[0], .lora_only = 1, .lora_rank = 8, .lora_out_dir = b.lora[1]};
    CHECK_FAILS(br_job_init(&options, NULL, &report), BR_E_ARG);
    options = (br_init_options){.out_dir = b.dir[1], .lora_only = 1, .lora_rank = 8, .lora_out_dir = b.lora[0]};
    CHECK_FAILS(br_job_init(&options, NULL, &report), BR_E_ARG);
    CHECK_SAYS("adapter_model.safetensors is there: expected a folder without files of tensors");
    write_text(b.dir[1], "model.safetensors", "x");
    CHECK_FAILS(checkpoint_open(b.dir[1], &b.config, &weights), BR_E_FORMAT);
    CHECK_SAYS("both generated.json and model.safetensors are there");
    write_text(b.lora[1], "adapter_model.safetensors", "x");
    const br_adapter_source source = {"x", b.lora[1]};
    CHECK_FAILS(lora_open(&b.config, &source, 1, 0, &set), BR_E_FORMAT);
    CHECK_SAYS("both generated.json and adapter_model.safetensors are there");
}
END_TEST

/* ---- digests and lines ------------------------------------------------------------------------------------------------------ */

static br_report init_report(const char *preset, uint64_t seed, const char *name) {
    char dir[256], lora[512];
    br_report report;
    snprintf(dir, sizeof dir, "%s/%s", test_tmp_dir(), name);
    snprintf(lora, sizeof lora, "%s/lora", dir);
    const br_init_options options = {.preset = preset, .out_dir = dir, .seed = seed, .lora_rank = 32, .lora_out_dir = lora, .lora_seed = seed,
                                     .recipe = 1};
    CHECK_OK(br_job_init(&options, NULL, &report));
    return report;
}

/* They stand in rollout files: the same recipe must keep its digest. A wanted change raises RECIPE_FORMAT_VERSION and prints the
 * new lines. */
START_TEST(digests_are_pinned) {
    static const struct {
        const char *preset, *weights, *adapter;
    } PINNED[] = {
        {"nano", "88395f00140ff4d87594ee56e98f5ff8", "94a2442e54ac95990d245ff00afb7ac6"},
        {"layer-full", "a4e78809858102fbaf734559f9ea39dd", "8d48cca003e8e220d2178b80e647d7ef"},
        {"slice-full", "e900796b0b67463bea31cb87053e7bbb", "0b57be076b7f99e55dc1fc5da87b190b"},
        {"kimi-linear-48b", "0a83498b237b6eb7a51613862cad48dd", "d505e8a377148d61a80838be6f4ba00c"},
    };
    int n_differ = 0;
    for (size_t i = 0; i < sizeof PINNED / sizeof PINNED[0]; i++) {
        char weights[BR_DIGEST_TEXT_BYTES], adapter[BR_DIGEST_TEXT_BYTES];
        br_report report = init_report(PINNED[i].preset, 1, PINNED[i].preset);
        br_digest_text(report.weights_digest, weights);
        br_digest_text(report.adapter_digest[0], adapter);
        br_report_free(&report);
        if (strcmp(weights, PINNED[i].weights) != 0 || strcmp(adapter, PINNED[i].adapter) != 0) {
            n_differ++;
            printf("        {\"%s\", \"%s\", \"%s\"},\n", PINNED[i].preset, weights, adapter);
        }
    }
    fflush(stdout); /* the failing process ends without it */
    ck_assert_int_eq(n_differ, 0);
}
END_TEST

START_TEST(digests_part_seeds_and_forms) {
    br_report one = init_report("pico", 1, "one"), again = init_report("pico", 1, "again"), two = init_report("pico", 2, "two");
    const both b = make_both("pico", 8);
    br_weights *file, *made;
    ck_assert(br_digest_equal(one.weights_digest, again.weights_digest) && br_digest_equal(one.adapter_digest[0], again.adapter_digest[0]));
    ck_assert(!br_digest_equal(one.weights_digest, two.weights_digest) && !br_digest_equal(one.adapter_digest[0], two.adapter_digest[0]));
    CHECK_OK(checkpoint_open(b.dir[0], &b.config, &file));
    CHECK_OK(checkpoint_open(b.dir[1], &b.config, &made));
    ck_assert(!br_digest_equal(br_weights_digest(file), br_weights_digest(made)));
    br_weights_close(file);
    br_weights_close(made);
    br_report_free(&one);
    br_report_free(&again);
    br_report_free(&two);
}
END_TEST

typedef struct lines {
    char text[1 << 18];
    size_t n;
} lines;

static void take_line(void *context, const char *line) {
    lines *l = context;
    l->n += (size_t)snprintf(l->text + l->n, sizeof l->text - l->n, "%s\n", line);
    ck_assert_uint_lt(l->n, sizeof l->text);
}

START_TEST(inspect_and_digest_say_so) {
    static lines l;
    const both b = make_both("pico", 8);
    br_report report;
    CHECK_OK(br_job_inspect(b.dir[1], take_line, &l));
    ck_assert_ptr_nonnull(strstr(l.text, "generated, in no file: preset pico, seed 5, recipes of version 1\n"));
    l.n = 0;
    CHECK_OK(br_job_digest(b.dir[1], take_line, &l, &report));
    ck_assert_ptr_nonnull(strstr(l.text, "weights, generated (preset pico, seed 5, recipes of version 1), digest of the recipes "));
    l.n = 0;
    CHECK_OK(br_job_digest(b.lora[1], take_line, &l, &report));
    ck_assert_int_eq(strncmp(l.text, "adapter, generated (seed 6, recipes of version 1), digest of the recipe ", 72), 0);
}
END_TEST

/* ---- size and failures ------------------------------------------------------------------------------------------------------ */

START_TEST(what_does_not_fit_is_said_at_once) {
    char dir[256];
    br_report report = init_report("slice-full", 1, "slice");
    br_loaded loaded;
    br_report_free(&report);
    snprintf(dir, sizeof dir, "%s/slice", test_tmp_dir());
    const br_engine_options options = {.model_dir = dir, .backend = "oracle", .n_thread = 1}; /* 6 bytes a weight: 700 GB */
    CHECK_FAILS(br_loaded_open(&options, 64, 256, 0, &loaded), BR_E_NOMEM);
    CHECK_SAYS(" GB of host memory wanted, ");
    CHECK_SAYS("packed weights ");
}
END_TEST

static br_status open_all(const both *b) {
    const br_adapter_source source = {"x", b->lora[1]};
    br_weights *weights = NULL;
    lora_set *set = NULL;
    br_status status = checkpoint_open(b->dir[1], &b->config, &weights);
    if (status == BR_OK)
        status = lora_open(&b->config, &source, 1, 0, &set);
    lora_close(set);
    br_weights_close(weights);
    return status;
}

START_TEST(each_failure_ends_in_a_status) {
    static void (*const FAIL_NTH[])(long) = {br_mem_fail_nth, br_file_fail_nth_read};
    static const br_status WANTED[] = {BR_E_NOMEM, BR_E_IO};
    static const int AT_LEAST[] = {9, 3};
    const both b = make_both("pico", 8);
    for (int kind = 0; kind < 2; kind++) {
        long n_failed = 0;
        for (long n = 1;; n++) {
            FAIL_NTH[kind](n);
            const br_status status = open_all(&b);
            FAIL_NTH[kind](0);
            if (status == BR_OK)
                break;
            n_failed = n;
            ck_assert_msg(status == WANTED[kind], "kind %d, n %ld: %s", kind, n, br_last_error());
        }
        ck_assert_int_ge(n_failed, AT_LEAST[kind]);
    }
}
END_TEST

Suite *test_generated_suite(void) {
    Suite *suite = suite_create("generated");
    TCase *tcase = tcase_create("generated");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, tensors_are_those_of_the_files, 0, N_PRESET);
    tcase_add_loop_test(tcase, adapters_are_those_of_the_files, 0, N_PRESET);
    tcase_add_loop_test(tcase, packed_bytes_are_equal, 0, N_PRESET);
    tcase_add_loop_test(tcase, log_probs_are_equal, 0, N_PRESET);
    tcase_add_test(tcase, ops_pack_what_they_make);
    tcase_add_test(tcase, damaged_recipes_are_refused);
    tcase_add_test(tcase, adapters_follow_their_config);
    tcase_add_test(tcase, an_adapter_of_another_model_is_refused);
    tcase_add_test(tcase, both_forms_in_one_folder_are_refused);
    tcase_add_test(tcase, digests_are_pinned);
    tcase_add_test(tcase, digests_part_seeds_and_forms);
    tcase_add_test(tcase, inspect_and_digest_say_so);
    tcase_add_test(tcase, what_does_not_fit_is_said_at_once);
    tcase_add_test(tcase, each_failure_ends_in_a_status);
    suite_add_tcase(suite, tcase);
    return suite;
}
