/* Adapters from PEFT files: what loads, to which bits, and each refusal with its sentence. Adapters are built in memory, so
 * that each case shows the one thing that is wrong with it. */
#include "br_file.h"
#include "br_mem.h"
#include "config_json.h"
#include "init_presets.h"
#include "lora_file.h"
#include "lora_slots.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

enum { RANK = 4, TENSOR_MAX = 256, FILE_BYTES = 1 << 18, JSON_BYTES = 4096 };

#define PRE "base_model.model."
#define LAYER(n) PRE "language_model.model.layers." #n "."
#define O_PROJ LAYER(0) "self_attn.o_proj" /* pico: (128, 128) */

/* ---- files in memory -------------------------------------------------------------------------------------------------- */

typedef struct tensor {
    char name[200];
    const char *dtype;
    int n_dim;
    int64_t dim[3];
    uint64_t id;   /* values come from a counter of it */
    uint32_t bits; /* not 0: each element is these F32 bits, or for two-byte types their high half */
} tensor;

typedef struct adapter_files {
    br_config config;
    char json[JSON_BYTES];
    tensor tensor[TENSOR_MAX];
    int n_tensor, odd;     /* odd: the data begin at an odd address */
    unsigned char bytes[FILE_BYTES];
    size_t n;
} adapter_files;

static adapter_files files; /* one at a time; each test runs in its own process */

static void use_preset(const char *name) {
    const init_preset *preset = init_preset_find(name);
    CHECK_OK(br_config_parse(name, preset->config_json, strlen(preset->config_json), &files.config));
}

/* keys: more of them, each ended by a comma. */
static void set_json(const char *keys) {
    snprintf(files.json, sizeof files.json, "{%s\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": 8}", keys, RANK);
}

static void begin(const char *preset) {
    memset(&files, 0, sizeof files);
    use_preset(preset);
    set_json("");
}

static tensor *add(const char *module, char half, int64_t n_row, int64_t n_col) {
    tensor *t = &files.tensor[files.n_tensor++];
    ck_assert_int_le(files.n_tensor, TENSOR_MAX);
    *t = (tensor){.dtype = "BF16", .n_dim = 2, .dim = {n_row, n_col}, .id = (uint64_t)files.n_tensor};
    snprintf(t->name, sizeof t->name, "%s.lora_%c.weight", module, half);
    return t;
}

static void add_pair(const char *module, int64_t n_out, int64_t n_in) {
    add(module, 'A', RANK, n_in);
    add(module, 'B', n_out, RANK);
}

static uint32_t value_bits(const tensor *t, int64_t i) {
    if (t->bits)
        return t->bits;
    uint64_t mixed = test_mix(test_mix(t->id) + (uint64_t)i);
    return (uint32_t)(0x3f00 + (mixed & 0x80ff)) << 16; /* sizes 0.5 to 2, both signs */
}

static size_t put_data(unsigned char *to, const tensor *t) {
    const size_t size = strcmp(t->dtype, "F32") == 0 ? 4 : 2;
    int64_t n = 1;
    for (int d = 0; d < t->n_dim; d++)
        n *= t->dim[d];
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = value_bits(t, i);
        for (size_t b = 0; b < size; b++)
            to[(size_t)i * size + b] = (unsigned char)(bits >> (8 * (4 - size + b)));
    }
    return (size_t)n * size;
}

static void pack(void) {
    static unsigned char data[FILE_BYTES];
    char *header = (char *)files.bytes + 8;
    size_t n = 0, n_data = 0;
    for (int i = 0; i < files.n_tensor; i++) {
        const tensor *t = &files.tensor[i];
        size_t begin_at = n_data;
        n_data += put_data(data + n_data, t);
        n += (size_t)sprintf(header + n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{", t->name, t->dtype);
        for (int d = 0; d < t->n_dim; d++)
            n += (size_t)sprintf(header + n, "%s%lld", d ? "," : "", (long long)t->dim[d]);
        n += (size_t)sprintf(header + n, "],\"data_offsets\":[%zu,%zu]}", begin_at, n_data);
    }
    n += (size_t)sprintf(header + n, files.n_tensor ? "}" : "{}");
    while (n % 2 != (size_t)files.odd)
        header[n++] = ' ';
    for (int i = 0; i < 8; i++)
        files.bytes[i] = (unsigned char)((uint64_t)n >> (8 * i));
    ck_assert_uint_le(8 + n + n_data, FILE_BYTES);
    memcpy(files.bytes + 8 + n, data, n_data);
    files.n = 8 + n + n_data;
}

static br_status load(int allow_zero, lora_set **out) {
    pack();
    return lora_parse(&files.config, "a", files.json, strlen(files.json), files.bytes, files.n, allow_zero, out);
}

static br_digest digest_of_files(void) {
    lora_set *set;
    CHECK_OK(load(0, &set));
    br_digest digest = lora_digest(set, 0);
    lora_close(set);
    return digest;
}

static void check_refused(br_status wanted, const char *sentence) {
    lora_set *set;
    br_status status = load(0, &set);
    ck_assert_msg(status == wanted, "wanted %s (%s), got %s: %s", br_status_name(wanted), sentence, br_status_name(status),
                  status == BR_OK ? "" : br_last_error());
    ck_assert_ptr_null(set);
    ck_assert_msg(strstr(br_last_error(), sentence) != NULL, "'%s' is not in: %s", sentence, br_last_error());
}

/* ---- what loads ------------------------------------------------------------------------------------------------------- */

START_TEST(one_map_gives_its_pair_and_no_other) {
    lora_set *set;
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    CHECK_OK(load(0, &set));
    lora_pair pair = lora_pair_of(set, 0, BR_W_KDA_O, 0, -1);
    ck_assert(pair.rank == RANK && pair.n_in == 128 && pair.n_out == 128 && pair.alpha == 8 && !pair.rslora);
    for (int i = 0; i < RANK * 128; i++) {
        ck_assert_uint_eq(pair.a[i], value_bits(&files.tensor[0], i) >> 16);
        ck_assert_uint_eq(pair.b[i], value_bits(&files.tensor[1], i) >> 16);
    }
    ck_assert_ptr_null(lora_pair_of(set, 0, BR_W_KDA_Q, 0, -1).a);
    ck_assert_ptr_null(lora_pair_of(set, 0, BR_W_KDA_O, 1, -1).b);
    ck_assert_ptr_null(lora_pair_of(set, 0, BR_W_MLA_O, 0, -1).a);  /* layer 0 is no MLA layer */
    ck_assert_ptr_null(lora_pair_of(set, 0, BR_W_ROUTER, 1, -1).a); /* never carries one */
    ck_assert_int_eq(lora_count(set), 1);
    ck_assert_int_eq(lora_rank_max(set), RANK);
    ck_assert_int_eq(lora_find(set, "a"), 0);
    ck_assert_int_eq(lora_find(set, "b"), -1);
    ck_assert_str_eq(lora_name(set, 0), "a");
    lora_close(set);
    lora_close(NULL);
}
END_TEST

START_TEST(prefix_of_the_text_model_is_optional) {
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    br_digest with = digest_of_files();
    files.n_tensor = 0;
    add_pair(PRE "model.layers.0.self_attn.o_proj", 128, 128);
    ck_assert(br_digest_equal(with, digest_of_files()));
    begin("kimi-linear-nano");
    add_pair(PRE "model.layers.0.self_attn.g_a_proj", 32, 128);
    add_pair(PRE "model.layers.1.block_sparse_moe.experts.15.w2", 128, 64);
    digest_of_files();
}
END_TEST

/* The same adapter written with one A for all experts, and with that A repeated for each. */
START_TEST(shared_a_is_the_a_of_every_expert) {
    lora_set *set;
    br_digest digest[2];
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        begin("pico");
        if (is_shared)
            add(LAYER(1) "block_sparse_moe.experts.w3", 'A', RANK, 64)->id = 1000;
        for (int e = 0; e < files.config.n_expert; e++) {
            char module[160];
            snprintf(module, sizeof module, LAYER(1) "block_sparse_moe.experts.%d.w3", e);
            if (!is_shared)
                add(module, 'A', RANK, 64)->id = 1000;
            add(module, 'B', 64, RANK)->id = (uint64_t)e;
        }
        digest[is_shared] = digest_of_files();
    }
    ck_assert(br_digest_equal(digest[0], digest[1]));
    CHECK_OK(load(0, &set));
    const uint16_t *a = lora_pair_of(set, 0, BR_W_EXPERT_W3, 1, 0).a;
    for (int e = 0; e < files.config.n_expert; e++) {
        lora_pair pair = lora_pair_of(set, 0, BR_W_EXPERT_W3, 1, e);
        ck_assert(pair.a == a && pair.b && pair.rank == RANK && pair.alpha == 8);
    }
    lora_close(set);
    files.n_tensor--; /* the last expert's B */
    check_refused(BR_E_FORMAT, "lora_B of module language_model.model.layers.1.block_sparse_moe.experts.31.w3 is missing");
}
END_TEST

START_TEST(storage_does_not_change_the_adapter) {
    lora_set *set;
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    add_pair(LAYER(0) "self_attn.f_b_proj", 128, 32);
    br_digest plain = digest_of_files();
    files.odd = 1;
    ck_assert(br_digest_equal(plain, digest_of_files()));
    files.tensor[0].dtype = files.tensor[3].dtype = "F32";
    ck_assert(br_digest_equal(plain, digest_of_files()));
    CHECK_OK(load(0, &set));
    ck_assert_uint_eq((uintptr_t)lora_pair_of(set, 0, BR_W_KDA_F_B, 0, -1).a % sizeof(uint16_t), 0);
    lora_close(set);
    tensor first = files.tensor[0];
    files.tensor[0] = files.tensor[3];
    files.tensor[3] = first;
    ck_assert(br_digest_equal(plain, digest_of_files()));
}
END_TEST

START_TEST(digest_sees_every_number_that_matters) {
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    br_digest plain = digest_of_files();
    files.tensor[1].id = 99;
    ck_assert(!br_digest_equal(plain, digest_of_files()));
    files.tensor[1].id = 2;
    ck_assert(br_digest_equal(plain, digest_of_files()));
    set_json("\"use_rslora\": true, ");
    ck_assert(!br_digest_equal(plain, digest_of_files()));
    set_json("\"alpha_pattern\": {\"o_proj\": 16}, ");
    ck_assert(!br_digest_equal(plain, digest_of_files()));
    set_json("\"alpha_pattern\": {\"o_proj\": 8.0}, \"lora_dropout\": 0.5, ");
    ck_assert(br_digest_equal(plain, digest_of_files()));
    set_json("");
    files.n_tensor = 0;
    add_pair(LAYER(1) "self_attn.o_proj", 128, 128);
    ck_assert(!br_digest_equal(plain, digest_of_files()));
}
END_TEST

START_TEST(patterns_set_rank_and_alpha_of_their_modules) {
    lora_set *set;
    begin("pico");
    set_json("\"rank_pattern\": {\"layers.0.self_attn.o_proj\": 2, \"o_proj\": 8}, \"alpha_pattern\": {\"w1\": 0.75}, "
             "\"use_rslora\": true, "
             "\"target_modules\": [\"layers.0.self_attn.o_proj\", \"1.self_attn.o_proj\", \"experts.0.w1\"], ");
    add(LAYER(0) "self_attn.o_proj", 'A', 2, 128);
    add(LAYER(0) "self_attn.o_proj", 'B', 128, 2);
    add(LAYER(1) "self_attn.o_proj", 'A', 8, 128);
    add(LAYER(1) "self_attn.o_proj", 'B', 128, 8);
    for (int layer = 1; layer < 3; layer++)
        add_pair(layer == 1 ? LAYER(1) "block_sparse_moe.experts.0.w1" : LAYER(2) "block_sparse_moe.experts.0.w1", 64, 64);
    CHECK_OK(load(0, &set));
    lora_pair first = lora_pair_of(set, 0, BR_W_KDA_O, 0, -1), second = lora_pair_of(set, 0, BR_W_KDA_O, 1, -1);
    lora_pair expert = lora_pair_of(set, 0, BR_W_EXPERT_W1, 1, 0);
    ck_assert(first.rank == 2 && second.rank == 8 && expert.rank == RANK);
    ck_assert(first.alpha == 8 && expert.alpha == 0.75 && expert.rslora == 1);
    ck_assert_int_eq(lora_rank_max(set), 8);
    lora_close(set);
}
END_TEST

/* PEFT: the key, as an expression, matches the whole name, or its end after a '.'. */
START_TEST(pattern_keys_match_as_in_peft) {
    static const struct {
        const char *key, *module;
        int matches; /* -1: the key is refused */
    } CASE[] = {
        {"o_proj", "model.layers.0.self_attn.o_proj", 1},
        {"proj", "model.layers.0.self_attn.o_proj", 0},
        {"model.layers.0.x", "model.layers.0.x", 1},
        {"layers.0.x", "model.layers.0.x", 1},
        {"layers.0", "model.layers.0.x", 0},
        {"^layers.0.x", "model.layers.0.x", 0},
        {"^model.layers.0.x", "model.layers.0.x", 1},
        {"x$", "model.layers.0.x", 1},
        {"layers\\.0\\.x", "model.layers.0.x", 1},
        {"layers\\.0\\.x", "model.layersa0.x", 0},
        {"layers.*.x", "model.layers.12.y.x", 1},
        {".*", "model", 1},
        {"l.*s.0.x", "model.layers.0.x", 1},
        {"a.*b.*c", "axxbxxbxc", 1},
        {"a.*b.*c", "axxbxxbx", 0},
        {"a.c", "abc", 1},
        {"a\\.c", "abc", 0},
        {"layers.[0-9]+.x", "", -1},
        {"(q|k)_proj", "", -1},
        {"layers.\\d+.x", "", -1},
        {"layers.\\d.x", "", -1},
        {"(q)_proj", "", -1},
        {"a+", "", -1},
        {"", "", -1},
        {"^", "", -1},
        {"a\\", "", -1},
        {"a*", "", -1},
        {"a.*b\\$", "axb$", 1},
        {"x$y", "", -1},
        {".*.*.*.*.*.*.*z", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 0},
    };
    for (size_t i = 0; i < sizeof CASE / sizeof CASE[0]; i++) {
        char json[256], key[64];
        lora_peft peft;
        size_t n = 0;
        for (const char *c = CASE[i].key; *c; c++)
            n += (size_t)snprintf(key + n, sizeof key - n, *c == '\\' ? "\\\\" : "%c", *c);
        key[n] = 0;
        snprintf(json, sizeof json, "{\"r\": 1, \"lora_alpha\": 1, \"rank_pattern\": {\"%s\": 7}}", key);
        br_status status = lora_peft_parse("test", json, strlen(json), &peft);
        ck_assert_msg((status == BR_E_UNSUPPORTED) == (CASE[i].matches < 0), "case %zu: %s", i, br_last_error());
        if (status != BR_OK)
            continue;
        const lora_module module = {CASE[i].module, strlen(CASE[i].module)};
        ck_assert_msg(lora_peft_rank(&peft, module) == (CASE[i].matches ? 7 : 1), "case %zu: %s on %s", i, CASE[i].key,
                      CASE[i].module);
        lora_peft_close(&peft);
    }
}
END_TEST

/* ---- refusals --------------------------------------------------------------------------------------------------------- */

START_TEST(features_are_refused_by_name) {
    static const struct {
        const char *keys, *sentence;
        br_status status;
    } CASE[] = {
        {"\"use_dora\": true, ", "'use_dora' is set", BR_E_UNSUPPORTED},
        {"\"bias\": \"all\", ", "bias", BR_E_UNSUPPORTED},
        {"\"lora_bias\": true, ", "'lora_bias' is set", BR_E_UNSUPPORTED},
        {"\"modules_to_save\": [\"lm_head\"], ", "'modules_to_save' is set", BR_E_UNSUPPORTED},
        {"\"fan_in_fan_out\": true, ", "'fan_in_fan_out' is set", BR_E_UNSUPPORTED},
        {"\"target_parameters\": [\"experts.w\"], ", "'target_parameters' is set", BR_E_UNSUPPORTED},
        {"\"layer_replication\": [[0, 1]], ", "'layer_replication' is set", BR_E_UNSUPPORTED},
        {"\"feature_of_tomorrow\": 3, ", "'feature_of_tomorrow' is set", BR_E_UNSUPPORTED},
        {"\"init_lora_weights\": \"pissa_niter_4\", ", "init_lora_weights is 'pissa_niter_4'", BR_E_UNSUPPORTED},
        {"\"init_lora_weights\": \"olora\", ", "init_lora_weights is 'olora'", BR_E_UNSUPPORTED},
        {"\"init_lora_weights\": \"loftq\", ", "init_lora_weights is 'loftq'", BR_E_UNSUPPORTED},
        {"\"loftq_config\": {\"loftq_bits\": 4}, ", "'loftq_config' is set", BR_E_UNSUPPORTED},
        {"\"target_modules\": [\"o_proj\", \"weights_proj\"], ", "stay frozen", BR_E_UNSUPPORTED},
        {"\"target_modules\": [\"block_sparse_moe.gate\"], ", "stay frozen", BR_E_UNSUPPORTED},
        {"\"target_modules\": [\"q_proj\"], ", "target_modules of adapter_config.json does not name its module",
         BR_E_FORMAT},
        {"\"target_modules\": [\"proj\"], ", "does not name its module", BR_E_FORMAT},
        {"\"target_modules\": [3], ", "target_modules: entry 0", BR_E_FORMAT},
        {"\"target_modules\": {}, ", "target_modules: expected", BR_E_FORMAT},
        {"\"rank_pattern\": {\"w1\": 2}, ", "rank_pattern: key 'w1' matches no module", BR_E_FORMAT},
        {"\"alpha_pattern\": {\"o_proj\": 2, \"attn.o_proj\": 3}, ", "alpha_pattern: key 'attn.o_proj' matches no module",
         BR_E_FORMAT},
        {"\"rank_pattern\": {\"o_proj\": 257}, ", "expected a rank 1 to 256, found 257", BR_E_FORMAT},
        {"\"rank_pattern\": {\"o_proj\": 0}, ", "expected a rank 1 to 256, found 0", BR_E_FORMAT},
        {"\"alpha_pattern\": {\"o_proj\": \"8\"}, ", "expected a number", BR_E_FORMAT},
        {"\"alpha_pattern\": {\"o_proj\": 1e9}, ", "expected a number", BR_E_FORMAT},
        {"\"rank_pattern\": [], ", "rank_pattern: expected an object", BR_E_FORMAT},
        {"\"use_rslora\": 1, ", "use_rslora: expected true or false", BR_E_FORMAT},
        {"\"r\": 3, ", "not JSON", BR_E_FORMAT}, /* twice */
    };
    for (size_t i = 0; i < sizeof CASE / sizeof CASE[0]; i++) {
        begin("pico");
        add_pair(O_PROJ, 128, 128);
        set_json(CASE[i].keys);
        check_refused(CASE[i].status, CASE[i].sentence);
    }
    strcpy(files.json, "{\"peft_type\": \"LOHA\", \"r\": 4, \"lora_alpha\": 8}");
    check_refused(BR_E_UNSUPPORTED, "only LoRA adapters");
    strcpy(files.json, "{\"r\": 4}");
    check_refused(BR_E_FORMAT, "lora_alpha: expected a number");
    strcpy(files.json, "{\"r\": 300, \"lora_alpha\": 8}");
    check_refused(BR_E_FORMAT, "r: expected a rank 1 to 256, found 300");
    strcpy(files.json, "[]");
    check_refused(BR_E_FORMAT, "expected a JSON object");
}
END_TEST

/* Features that are off, and keys that describe the training only, pass. */
START_TEST(features_that_are_off_pass) {
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    set_json("\"use_dora\": false, \"bias\": \"none\", \"modules_to_save\": null, \"loftq_config\": {}, "
             "\"target_parameters\": [], \"init_lora_weights\": \"gaussian\", \"target_modules\": \".*o_proj\", "
             "\"megatron_core\": \"megatron.core\", \"base_model_name_or_path\": \"x\", \"layers_to_transform\": [0], "
             "\"qalora_group_size\": 16, ");
    digest_of_files();
    set_json("\"target_modules\": [\"o_proj\"], \"layers_to_transform\": [0], "); /* so layer 1 may be absent */
    digest_of_files();
    set_json("\"target_modules\": [\"o_proj\"], ");
    check_refused(BR_E_FORMAT, "lora_A of module language_model.model.layers.1.self_attn.o_proj is missing");
}
END_TEST

START_TEST(names_are_refused_by_name) {
    static const struct {
        const char *name, *sentence;
        br_status status;
    } CASE[] = {
        {O_PROJ ".lora_C.weight", "is unknown", BR_E_FORMAT},
        {O_PROJ ".lora_A.default.weight", "is unknown", BR_E_FORMAT},
        {O_PROJ ".base_layer.lora_A.weight", "is unknown", BR_E_FORMAT},
        {"language_model.model.layers.0.self_attn.o_proj.lora_A.weight", "is unknown", BR_E_FORMAT},
        {LAYER(7) "self_attn.o_proj.lora_A.weight", "is unknown", BR_E_FORMAT},
        {LAYER(2) "self_attn.f_a_proj.lora_A.weight", "is unknown", BR_E_FORMAT}, /* an MLA layer */
        {LAYER(1) "block_sparse_moe.experts.32.w1.lora_A.weight", "is unknown", BR_E_FORMAT},
        {PRE ".lora_A.weight", "is unknown", BR_E_FORMAT},
        {"", "is unknown", BR_E_FORMAT},
        {LAYER(1) "block_sparse_moe.experts.w1.lora_B.weight", "a B shared by experts", BR_E_UNSUPPORTED},
        {LAYER(1) "block_sparse_moe.gate.lora_A.weight", "stay frozen", BR_E_UNSUPPORTED},
        {LAYER(2) "self_attn.indexer.wq_b.lora_B.weight", "stay frozen", BR_E_UNSUPPORTED},
        {PRE "language_model.lm_head.lora_A.weight", "adapters on head", BR_E_UNSUPPORTED},
        {LAYER(0) "self_attn.q_conv1d.lora_A.weight", "adapters on kda_conv_q", BR_E_UNSUPPORTED},
        {O_PROJ ".lora_magnitude_vector", "DoRA", BR_E_UNSUPPORTED},
        {O_PROJ ".lora_B.bias", "biases", BR_E_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof CASE / sizeof CASE[0]; i++) {
        begin("pico");
        add_pair(O_PROJ, 128, 128);
        strcpy(add("", 'A', RANK, 128)->name, CASE[i].name);
        check_refused(CASE[i].status, CASE[i].sentence);
        ck_assert_ptr_nonnull(strstr(br_last_error(), CASE[i].name));
    }
}
END_TEST

START_TEST(tensors_are_refused_by_name) {
    begin("pico");
    check_refused(BR_E_FORMAT, "no tensors");
    add_pair(O_PROJ, 128, 128);
    files.tensor[1].dim[1] = RANK + 1;
    check_refused(BR_E_FORMAT, "expected shape [128, 4], found 2 dimensions [128, 5]");
    files.tensor[1].dim[1] = RANK;
    files.tensor[0].dim[1] = 64;
    check_refused(BR_E_FORMAT, "o_proj.lora_A.weight': expected shape [4, 128]");
    files.tensor[0].dim[1] = 128;
    files.tensor[0].n_dim = 3;
    files.tensor[0].dim[2] = 1;
    check_refused(BR_E_FORMAT, "found 3 dimensions");
    files.tensor[0].n_dim = 2;
    files.tensor[0].dtype = "F16";
    check_refused(BR_E_FORMAT, "o_proj.lora_A.weight' is F16: expected BF16");
    files.tensor[0].dtype = "F32";
    files.tensor[0].bits = 0x3f800001;
    check_refused(BR_E_FORMAT, "o_proj.lora_A.weight' is F32 and element 0 (bits 3f800001) is no bf16 number");
    files.tensor[0].bits = 0x7fc00000;
    check_refused(BR_E_FORMAT, "element 0 is NaN or Inf");
    files.tensor[0].dtype = "BF16";
    files.tensor[0].bits = 0xff800000;
    check_refused(BR_E_FORMAT, "o_proj.lora_A.weight': element 0 is NaN or Inf");
    files.tensor[0].bits = 0;
    files.n_tensor = 1;
    check_refused(BR_E_FORMAT, "lora_B of module language_model.model.layers.0.self_attn.o_proj is missing");
    files.n_tensor = 0;
    add(O_PROJ, 'B', 128, RANK);
    check_refused(BR_E_FORMAT, "lora_A of module language_model.model.layers.0.self_attn.o_proj is missing");
    add(O_PROJ, 'A', RANK, 128);
    add(PRE "model.layers.0.self_attn.o_proj", 'A', RANK, 128);
    check_refused(BR_E_FORMAT, "comes twice for its map");
}
END_TEST

START_TEST(adapters_without_effect_are_refused_unless_allowed) {
    lora_set *set;
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    add_pair(LAYER(1) "self_attn.o_proj", 128, 128);
    files.tensor[1].bits = files.tensor[3].bits = 0x80000000; /* -0 */
    check_refused(BR_E_FORMAT, "every B or its alpha is zero");
    CHECK_OK(load(1, &set));
    lora_close(set);
    files.tensor[3].bits = 0;
    digest_of_files(); /* one of two is enough */
    set_json("\"alpha_pattern\": {\"o_proj\": 0}, ");
    check_refused(BR_E_FORMAT, "every B or its alpha is zero");
    files.n_tensor = 0;
    set_json("");
    pack();
    CHECK_FAILS(load(1, &set), BR_E_FORMAT);
}
END_TEST

/* ---- folders ---------------------------------------------------------------------------------------------------------- */

static void write_folder(const char *name, char dir[BR_PATH_BYTES]) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(dir, test_tmp_dir(), name));
    CHECK_OK(br_file_make_dir(dir));
    CHECK_OK(br_file_join(path, dir, "adapter_config.json"));
    CHECK_OK(br_file_write(path, files.json, strlen(files.json)));
    CHECK_OK(br_file_join(path, dir, "adapter_model.safetensors"));
    pack();
    CHECK_OK(br_file_write(path, files.bytes, files.n));
}

START_TEST(folders_open_by_name) {
    char one[BR_PATH_BYTES], two[BR_PATH_BYTES];
    lora_set *set;
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    write_folder("one", one);
    br_digest digest = digest_of_files();
    files.tensor[0].id = 77;
    write_folder("two", two);
    br_adapter_source source[3] = {{"math", one}, {"code", two}, {"math", one}};
    CHECK_OK(lora_open(&files.config, source, 2, 0, &set));
    ck_assert_int_eq(lora_find(set, "code"), 1);
    ck_assert(br_digest_equal(lora_digest(set, 0), digest) && !br_digest_equal(lora_digest(set, 1), digest));
    lora_close(set);
    CHECK_OK(lora_open(&files.config, NULL, 0, 0, &set));
    ck_assert_int_eq(lora_count(set), 0);
    ck_assert_int_eq(lora_rank_max(set), 0);
    lora_close(set);
    CHECK_FAILS(lora_open(&files.config, source, 3, 0, &set), BR_E_ARG);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "'math' comes twice"));
    CHECK_FAILS(lora_open(&files.config, source, LORA_ADAPTER_MAX + 1, 0, &set), BR_E_LIMIT);
    const char *bad[] = {"base", "", NULL, "a234567890123456789012345678901234567890123456789012345678901234"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        source[0].name = bad[i];
        CHECK_FAILS(lora_open(&files.config, source, 1, 0, &set), BR_E_ARG);
    }
    source[0] = (br_adapter_source){"math", "/nonexistent"};
    CHECK_FAILS(lora_open(&files.config, source, 1, 0, &set), BR_E_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(br_last_error(), "adapter 'math'"));
}
END_TEST

/* Every allocation and every read fails once: always a status, never a leak (the sanitizer run sees those). */
START_TEST(each_failure_ends_in_a_status) {
    char dir[BR_PATH_BYTES];
    lora_set *set;
    begin("pico");
    add_pair(O_PROJ, 128, 128);
    files.tensor[0].dtype = "F32";
    write_folder("one", dir);
    const br_adapter_source source = {"math", dir};
    int n_failed[2] = {0};
    for (int kind = 0; kind < 2; kind++) {
        void (*fail_nth)(long) = kind ? br_file_fail_nth_read : br_mem_fail_nth;
        for (long n = 1;; n++) {
            fail_nth(n);
            br_status status = lora_open(&files.config, &source, 1, 0, &set);
            fail_nth(0);
            if (status == BR_OK)
                break;
            n_failed[kind]++;
            ck_assert_int_eq(status, kind ? BR_E_IO : BR_E_NOMEM);
            ck_assert_ptr_null(set);
        }
        lora_close(set);
    }
    ck_assert_int_ge(n_failed[0], 5); /* set, path, names, entries, converted tensors, maps, pattern flags */
    ck_assert_int_eq(n_failed[1], 2); /* two files */
}
END_TEST

Suite *test_lora_suite(void) {
    Suite *suite = suite_create("lora");
    TCase *tcase = tcase_create("lora");
    tcase_set_timeout(tcase, 30);
    tcase_add_test(tcase, one_map_gives_its_pair_and_no_other);
    tcase_add_test(tcase, prefix_of_the_text_model_is_optional);
    tcase_add_test(tcase, shared_a_is_the_a_of_every_expert);
    tcase_add_test(tcase, storage_does_not_change_the_adapter);
    tcase_add_test(tcase, digest_sees_every_number_that_matters);
    tcase_add_test(tcase, patterns_set_rank_and_alpha_of_their_modules);
    tcase_add_test(tcase, pattern_keys_match_as_in_peft);
    tcase_add_test(tcase, features_are_refused_by_name);
    tcase_add_test(tcase, features_that_are_off_pass);
    tcase_add_test(tcase, names_are_refused_by_name);
    tcase_add_test(tcase, tensors_are_refused_by_name);
    tcase_add_test(tcase, adapters_without_effect_are_refused_unless_allowed);
    tcase_add_test(tcase, folders_open_by_name);
    tcase_add_test(tcase, each_failure_ends_in_a_status);
    suite_add_tcase(suite, tcase);
    return suite;
}
