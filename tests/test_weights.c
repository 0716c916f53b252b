/* The checkpoint table: published names, what the loader accepts and refuses, digests, and the jobs that show them. */
#include "br_weights.h"
#include "test_support.h"

#include "br_file.h"
#include "br_mem.h"
#include "br_nearest.h"
#include "config_json.h"
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void read_golden_config(const char *name, br_config *c) {
    char path[BR_PATH_BYTES];
    br_map map;
    snprintf(path, sizeof path, "%s/golden/configs/%s.json", test_source_dir(), name);
    CHECK_OK(br_file_map(path, &map));
    CHECK_OK(br_config_parse(path, (const char *)map.bytes, map.n, c));
    br_file_unmap(&map);
}

/* ---- the table of names against the published lists -------------------------------------------------------------------- */

typedef struct name_line {
    char name[BR_NAME_BYTES], dtype[8];
    int32_t n_dim;
    int64_t dim[4];
    long long count;
} name_line;

static void parse_line(const char *text, name_line *line) {
    char shape[64];
    ck_assert_int_eq(sscanf(text, "%159s %7s %63s %lld", line->name, line->dtype, shape, &line->count), 4);
    line->n_dim = 0;
    for (char *at = shape; line->n_dim < 4; at++) {
        line->dim[line->n_dim++] = strtoll(at, &at, 10);
        if (*at != 'x')
            break;
    }
}

static int in_set(const br_config *c, const char *pattern, int32_t layer) {
    if (strstr(pattern, "{kda}"))
        return !c->layer_is_mla[layer];
    if (strstr(pattern, "{mla}"))
        return c->layer_is_mla[layer];
    if (strstr(pattern, "{dense}"))
        return layer < c->n_dense_layer;
    if (strstr(pattern, "{moe}"))
        return layer >= c->n_dense_layer;
    return 1;
}

/* The pattern with a layer and an expert put in. */
static void fill_pattern(const char *pattern, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]) {
    size_t n = 0;
    while (*pattern && n < BR_NAME_BYTES - 1) {
        if (*pattern != '{') {
            name[n++] = *pattern++;
            continue;
        }
        n += (size_t)snprintf(name + n, BR_NAME_BYTES - n, "%d", pattern[1] == 'e' ? expert : layer);
        pattern = strchr(pattern, '}') + 1;
    }
    name[n] = 0;
}

/* A published name is a slot of the table, of that shape, and the table names it so. One assertion a name: there are half a
 * million, and each costs a system call. */
static void check_name(const br_config *c, const name_line *line, const char *name, unsigned char *seen) {
    char ours[BR_NAME_BYTES] = "";
    br_class cls;
    int32_t layer, expert;
    br_expect want = {.n_dim = -1};
    const br_dtype dtype = line->dtype[0] == 'U' ? BR_DTYPE_U8 : line->dtype[0] == 'F' ? BR_DTYPE_F32 : BR_DTYPE_BF16;
    int64_t slot = -1;
    if (br_weight_parse(c, name, strlen(name), &cls, &layer, &expert)) {
        br_weight_name(c, cls, layer, expert, ours);
        slot = br_weight_slot(c, cls, layer, expert);
        br_weight_expect(c, slot, &want);
    }
    const int good = slot >= 0 && !seen[slot] && strcmp(ours, name) == 0 && want.cls == cls && want.layer == layer &&
                     want.expert == expert && want.n_dim == line->n_dim && want.dtypes & 1u << dtype &&
                     memcmp(want.dim, line->dim, sizeof(int64_t) * (size_t)line->n_dim) == 0;
    if (!good)
        ck_abort_msg("%s: slot %lld, our name '%s', %d dims, first %lld", name, (long long)slot, ours, want.n_dim, (long long)want.dim[0]);
    seen[slot] = 1;
}

static int64_t check_line(const br_config *c, const name_line *line, unsigned char *seen) {
    char name[BR_NAME_BYTES];
    int64_t count = 0;
    const int layered = strchr(line->name, '{') != NULL, experts = strstr(line->name, "{e}") != NULL;
    for (int32_t l = 0; l < (layered ? c->n_layer : 1); l++) {
        if (layered && !in_set(c, line->name, l))
            continue;
        for (int32_t e = 0; e < (experts ? c->n_expert : 1); e++, count++) {
            fill_pattern(line->name, l, e, name);
            check_name(c, line, name, seen);
        }
    }
    ck_assert_msg(count == line->count, "%s: %lld names, published %lld", line->name, (long long)count, line->count);
    return count;
}

static const struct {
    const char *model;
    int64_t n_tensor;
} PUBLISHED[] = {
    {"kimi-k3", 497220 - 168},       /* 168 of the published count belong to the vision part */
    {"kimi-k31", 497220 - 168 + 120}, /* four weights and a bias in each of 24 layers */
    {"kimi-linear-48b-a3b", 20493},
};

START_TEST(names_are_the_published_ones) {
    const char *model = PUBLISHED[_i].model;
    char path[BR_PATH_BYTES], text[512];
    br_config c;
    int64_t count = 0;
    read_golden_config(model, &c);
    const int64_t n_slot = br_weight_expect_count(&c);
    ck_assert_int_eq(n_slot, PUBLISHED[_i].n_tensor);
    unsigned char *seen = calloc((size_t)n_slot, 1);
    snprintf(path, sizeof path, "%s/golden/names/%s.txt", test_source_dir(), model);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    while (fgets(text, sizeof text, file)) {
        name_line line;
        if (text[0] == '#')
            continue;
        parse_line(text, &line);
        count += check_line(&c, &line, seen);
    }
    fclose(file);
    free(seen);
    ck_assert_int_eq(count, n_slot); /* each slot once, so all of them */
    br_expect past;
    ck_assert(!br_weight_expect(&c, n_slot, &past));
}
END_TEST

START_TEST(other_names_are_unknown) {
    static const char *const STRANGE[] = {
        "", "model", "lm_head", "lm_head.weight.x", "model.layers.0.self_attn.q_proj", "model.layers.93.input_layernorm.weight",
        "model.layers.00.input_layernorm.weight", "model.layers.-1.input_layernorm.weight", "model.layers..input_layernorm.weight",
        "model.layers.12345.input_layernorm.weight", "model.layers.1x.input_layernorm.weight", "model.layers.input_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.weight" /* a KDA layer */, "model.layers.3.self_attn.k_proj.weight" /* an MLA layer */,
        "model.layers.1.mlp.gate_proj.weight" /* MoE */, "model.layers.0.block_sparse_moe.gate.weight" /* dense */,
        "model.layers.1.block_sparse_moe.experts.896.w1.weight_packed", "model.layers.1.block_sparse_moe.experts.01.w1.weight_packed",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight" /* not MXFP4 */, "model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed_", "model.layers.1.w1.weight_packed",
        "language_model.language_model.lm_head.weight", "model.layers.3.self_attn.q_proj.weight" /* there is a query latent */,
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_shape", "model.layers.1.block_sparse_moe.experts.0.input_layernorm.weight",
        "model.layers.0.self_attn.g_a_proj.weight" /* the gate is full-rank */, "model.layers.0.self_attn.q_proj.base_layerx.weight",
        "model.layers.0.self_attn.q.base_layer_proj.weight", "model.layers.1xinput_layernorm.weight",
    };
    br_config c;
    br_class cls;
    int32_t layer, expert;
    read_golden_config("kimi-k31", &c);
    for (size_t i = 0; i < sizeof STRANGE / sizeof STRANGE[0]; i++)
        ck_assert_msg(!br_weight_parse(&c, STRANGE[i], strlen(STRANGE[i]), &cls, &layer, &expert), "known: '%s'", STRANGE[i]);
    char endless[4096];
    memset(endless, 'a', sizeof endless);
    ck_assert(!br_weight_parse(&c, endless, sizeof endless, &cls, &layer, &expert));
    /* with and without prefix and wrapper; only n bytes are read */
    static const char *const KNOWN[] = {
        "model.layers.3.self_attn.q_b_proj.weight", "language_model.model.layers.3.self_attn.q_b_proj.weight",
        "language_model.model.layers.3.self_attn.q_b_proj.base_layer.weight", "model.layers.3.self_attn.base_layer.q_b_proj.weight",
    };
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        ck_assert_msg(br_weight_parse(&c, KNOWN[i], strlen(KNOWN[i]), &cls, &layer, &expert), "%s", KNOWN[i]);
        ck_assert(cls == BR_W_MLA_Q_B && layer == 3 && expert == -1);
        ck_assert(!br_weight_parse(&c, KNOWN[i], strlen(KNOWN[i]) - 1, &cls, &layer, &expert));
    }
}
END_TEST

START_TEST(linear_shapes) {
    br_config c;
    int32_t n_out = 0, n_in = 0;
    read_golden_config("kimi-k31", &c);
    ck_assert(br_linear_shape(&c, BR_W_EXPERT_W2, 1, &n_out, &n_in) && n_out == 3584 && n_in == 3072); /* unpacked */
    ck_assert(br_linear_shape(&c, BR_W_MLA_KV_B, 92, &n_out, &n_in) && n_out == 24576 && n_in == 512);
    ck_assert(!br_linear_shape(&c, BR_W_MLA_KV_B, 0, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_EXPERT_W2, 0, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_MLA_Q, 3, &n_out, &n_in));
    ck_assert(!br_linear_shape(&c, BR_W_ROUTER, 1, &n_out, &n_in)); /* carries no adapter */
    ck_assert(!br_linear_shape(&c, BR_W_MLA_KV_B, 93, &n_out, &n_in) && !br_linear_shape(&c, BR_W_MLA_KV_B, -1, &n_out, &n_in));
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EXPERT_W1, 1, 896), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EXPERT_W1, 1, -1), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_EMBED, 0, -1), -1);
    ck_assert_int_eq(br_weight_slot(&c, BR_W_ROUTER, 1, 0), -1);
}
END_TEST

/* ---- shards written without the writer: no flush to disk, holes instead of data ----------------------------------------- */

typedef struct shard_text {
    char *header;
    size_t n, n_max;
    uint64_t n_data;
} shard_text;

static void shard_add(shard_text *s, const char *name, const char *dtype, const int64_t *dim, int32_t n_dim) {
    int ok;
    uint64_t n_byte = st_tensor_bytes(dtype, dim, n_dim, &ok);
    if (s->n + 512 > s->n_max)
        s->header = realloc(s->header, s->n_max = 2 * s->n_max + 4096);
    s->n += (size_t)sprintf(s->header + s->n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", s->n ? "," : "{", name, dtype);
    for (int32_t d = 0; d < n_dim; d++)
        s->n += (size_t)sprintf(s->header + s->n, "%s%lld", d ? "," : "", (long long)dim[d]);
    s->n += (size_t)sprintf(s->header + s->n, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)s->n_data,
                            (unsigned long long)(s->n_data + n_byte));
    s->n_data += n_byte;
}

/* Length and header; the file is left open at the first byte of data. */
static FILE *shard_begin(const char *path, shard_text *s) {
    unsigned char length[8];
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    s->header[s->n++] = '}';
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)((uint64_t)s->n >> (8 * i));
    ck_assert_uint_eq(fwrite(length, 1, 8, file), 8);
    ck_assert_uint_eq(fwrite(s->header, 1, s->n, file), s->n);
    free(s->header);
    return file;
}

static void write_file(const char *path, const char *text, size_t n) {
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(text, 1, n, file), n);
    ck_assert_int_eq(fclose(file), 0);
}

/* ---- a small checkpoint on disk, and what can be wrong with it --------------------------------------------------------- */

static const char TINY_K31[] =
    "{\"architectures\":[\"KimiK31ForConditionalGeneration\"],\"vocab_size\":64,\"hidden_size\":32,\"num_hidden_layers\":2,"
    "\"first_k_dense_replace\":1,\"num_attention_heads\":2,\"intermediate_size\":32,\"q_lora_rank\":32,\"kv_lora_rank\":32,"
    "\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,\"v_head_dim\":16,\"num_experts\":3,\"num_experts_per_token\":2,"
    "\"num_shared_experts\":2,\"moe_intermediate_size\":32,\"routed_expert_hidden_size\":32,\"latent_moe_use_norm\":true,"
    "\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,\"mla_use_output_gate\":true,\"attn_res_block_size\":1,"
    "\"max_position_embeddings\":128,\"linear_attn_config\":{\"num_heads\":1,\"head_dim\":32,\"use_full_rank_gate\":true,"
    "\"full_attn_layers\":[2]},\"index_n_heads\":4,\"index_head_dim\":16,\"index_topk\":8,"
    "\"quantization_config\":{\"format\":\"mxfp4-pack-quantized\"}}";

static const char TINY_LINEAR[] =
    "{\"architectures\":[\"KimiLinearForCausalLM\"],\"vocab_size\":64,\"hidden_size\":32,\"num_hidden_layers\":2,"
    "\"first_k_dense_replace\":1,\"num_attention_heads\":2,\"intermediate_size\":32,\"kv_lora_rank\":32,\"qk_nope_head_dim\":16,"
    "\"qk_rope_head_dim\":16,\"v_head_dim\":16,\"num_experts\":3,\"num_experts_per_token\":2,\"num_shared_experts\":1,"
    "\"moe_intermediate_size\":32,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,\"model_max_length\":128,"
    "\"linear_attn_config\":{\"num_heads\":2,\"head_dim\":32,\"full_attn_layers\":[2]}}";

enum { TENSOR_MAX = 128 };

/* A checkpoint to write: the tensors of a config, each in shard 0 or 1, and room to spoil them. */
typedef struct draft {
    br_config config;
    char name[TENSOR_MAX][BR_NAME_BYTES];
    st_out out[TENSOR_MAX];
    unsigned char *data[TENSOR_MAX];
    int shard[TENSOR_MAX], in_index[TENSOR_MAX]; /* in_index: shard that the index says, -1: not listed */
    int n, use_index, n_shard;
    char dir[BR_PATH_BYTES];
} draft;

static int draft_find(const draft *d, const char *tail) {
    int found = -1;
    for (int i = 0; i < d->n; i++) {
        size_t n = strlen(d->name[i]), n_tail = strlen(tail);
        if (n >= n_tail && strcmp(d->name[i] + n - n_tail, tail) == 0)
            found = i;
    }
    ck_assert_msg(found >= 0, "no tensor ends with %s", tail);
    return found;
}

/* Finite bf16 and f32 values whatever the position: no byte has all exponent bits. */
static void draft_data(draft *d, int i) {
    free(d->data[i]);
    d->data[i] = calloc(d->out[i].n_byte + 1, 1);
    for (uint64_t at = 0; at < d->out[i].n_byte; at++)
        d->data[i][at] = (unsigned char)(test_mix((uint64_t)i << 32 | at) & 0x3f);
}

static void draft_resize(draft *d, int i, const char *dtype, int32_t n_dim, const int64_t *dim) {
    int ok;
    d->out[i].dtype = dtype;
    d->out[i].n_dim = n_dim;
    memcpy(d->out[i].dim, dim, sizeof(int64_t) * (size_t)n_dim);
    d->out[i].n_byte = st_tensor_bytes(dtype, dim, n_dim, &ok);
    ck_assert(ok);
    draft_data(d, i);
}

static int draft_add(draft *d, const char *name, const char *dtype, int32_t n_dim, const int64_t *dim) {
    int i = d->n++;
    ck_assert_int_lt(i, TENSOR_MAX);
    snprintf(d->name[i], BR_NAME_BYTES, "%s", name);
    d->out[i].name = d->name[i];
    d->shard[i] = d->in_index[i] = d->use_index ? i % 2 : 0;
    draft_resize(d, i, dtype, n_dim, dim);
    return i;
}

static void draft_remove(draft *d, int i) {
    free(d->data[i]);
    for (d->n--; i < d->n; i++) {
        memcpy(d->name[i], d->name[i + 1], BR_NAME_BYTES);
        d->out[i] = d->out[i + 1];
        d->out[i].name = d->name[i];
        d->data[i] = d->data[i + 1];
        d->shard[i] = d->shard[i + 1];
        d->in_index[i] = d->in_index[i + 1];
    }
    d->data[d->n] = NULL;
}

static draft *draft_new(const char *config, int use_index) {
    static int n_dir;
    draft *d = calloc(1, sizeof *d);
    br_expect want;
    CHECK_OK(br_config_parse("tiny", config, strlen(config), &d->config));
    d->use_index = use_index;
    d->n_shard = use_index ? 2 : 1;
    snprintf(d->dir, sizeof d->dir, "%s/model%d", test_tmp_dir(), n_dir++);
    CHECK_OK(br_file_make_dir(d->dir));
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, d->dir, "config.json"));
    write_file(path, config, strlen(config));
    for (int64_t i = 0; br_weight_expect(&d->config, i, &want); i++) {
        char name[BR_NAME_BYTES];
        br_weight_name(&d->config, want.cls, want.layer, want.expert, name);
        const char *dtype = want.dtypes & 1u << BR_DTYPE_BF16 ? "BF16" : want.dtypes & 1u << BR_DTYPE_F32 ? "F32" : "U8";
        int at = draft_add(d, name, dtype, want.n_dim, want.dim);
        if (want.cls == BR_W_KDA_A_LOG && want.n_dim == 1) /* zeros after the heads */
            memset(d->data[at] + d->config.kda_n_head * 4, 0, (size_t)(want.dim[0] - d->config.kda_n_head) * 4);
    }
    return d;
}

static void draft_free(draft *d) {
    for (int i = 0; i < d->n; i++)
        free(d->data[i]);
    free(d);
}

static void shard_name(const draft *d, int shard, char name[64]) {
    if (d->use_index)
        snprintf(name, 64, "model-%05d-of-00002.safetensors", shard + 1);
    else
        snprintf(name, 64, "model.safetensors");
}

static void draft_write(const draft *d) {
    char path[BR_PATH_BYTES], name[64], text[TENSOR_MAX * 256];
    size_t used = (size_t)snprintf(text, sizeof text, "{\"metadata\":{},\"weight_map\":{");
    for (int s = 0; s < d->n_shard; s++) {
        shard_text shard = {0};
        for (int i = 0; i < d->n; i++) {
            if (d->shard[i] == s)
                shard_add(&shard, d->name[i], d->out[i].dtype, d->out[i].dim, d->out[i].n_dim);
        }
        shard_name(d, s, name);
        CHECK_OK(br_file_join(path, d->dir, name));
        FILE *file = shard_begin(path, &shard);
        for (int i = 0; i < d->n; i++) {
            if (d->shard[i] == s)
                ck_assert_uint_eq(fwrite(d->data[i], 1, d->out[i].n_byte, file), d->out[i].n_byte);
        }
        ck_assert_int_eq(fclose(file), 0);
    }
    if (!d->use_index)
        return;
    const char *comma = "";
    for (int i = 0; i < d->n; i++) {
        if (d->in_index[i] < 0)
            continue;
        shard_name(d, d->in_index[i], name);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s\"%s\":\"%s\"", comma, d->name[i], name);
        comma = ",";
    }
    used += (size_t)snprintf(text + used, sizeof text - used, "}}");
    ck_assert_uint_lt(used, sizeof text);
    CHECK_OK(br_file_join(path, d->dir, "model.safetensors.index.json"));
    write_file(path, text, used);
}

/* Writes, opens, reads all data, and closes. */
static br_status draft_status(const draft *d) {
    br_weights *w = NULL;
    draft_write(d);
    br_status status = br_weights_open(d->dir, &d->config, &w);
    ck_assert_int_eq(w != NULL, status == BR_OK);
    if (status == BR_OK)
        status = br_weights_check_data(w);
    br_weights_close(w);
    return status;
}

#define CHECK_SAYS(part) ck_assert_msg(strstr(br_last_error(), part) != NULL, "'%s' lacks '%s'", br_last_error(), part)

static br_digest draft_digest(const draft *d) {
    br_weights *w;
    draft_write(d);
    CHECK_OK(br_weights_open(d->dir, &d->config, &w));
    CHECK_OK(br_weights_check_data(w));
    br_digest digest = br_weights_digest(w);
    br_weights_close(w);
    return digest;
}

START_TEST(good_checkpoints_open) {
    for (int form = 0; form < 4; form++) {
        draft *d = draft_new(form & 1 ? TINY_LINEAR : TINY_K31, form & 2);
        const int64_t one[2] = {2, 2};
        draft_add(d, "vision_tower.encoder.weight", "F16", 2, one);
        draft_add(d, "mm_projector.linear.weight", "F16", 2, one);
        draft_add(d, "multi_modal_projector.linear.weight", "I64", 2, one);
        draft_write(d);
        br_weights *w;
        CHECK_OK(br_weights_open(d->dir, &d->config, &w));
        CHECK_OK(br_weights_check_data(w));
        ck_assert_int_eq(br_weights_count(w), d->n - 3);
        ck_assert_int_eq(br_weights_count(w), br_weight_expect_count(&d->config));
        ck_assert_int_eq(br_weights_skipped(w), 3);
        ck_assert_int_eq(br_weights_shard_count(w), d->n_shard);
        for (int64_t i = 0; i < br_weights_count(w); i++) {
            const br_tensor *t = br_weights_at(w, i);
            int at = draft_find(d, t->name);
            ck_assert_ptr_eq(br_weights_find(w, t->cls, t->layer, t->expert), t);
            ck_assert_int_eq(br_weight_slot(&d->config, t->cls, t->layer, t->expert), i);
            ck_assert_uint_eq(t->n_byte, d->out[at].n_byte);
            ck_assert_mem_eq(t->data, d->data[at], t->n_byte);
            ck_assert_mem_eq(t->dim, d->out[at].dim, sizeof(int64_t) * (size_t)t->n_dim);
        }
        ck_assert_ptr_null(br_weights_find(w, BR_W_EMBED, 0, -1));
        ck_assert_ptr_null(br_weights_find(w, BR_W_MLA_G, 0, -1));
        br_weights_close(w);
        draft_free(d);
    }
}
END_TEST

START_TEST(allowed_forms_open) {
    draft *d = draft_new(TINY_K31, 1);
    const int64_t conv[3] = {32, 1, 4}, a_log[1] = {1}, a_log_4[4] = {1, 1, 1, 1}, norm[1] = {32}, key[1] = {16};
    int at = draft_find(d, "self_attn.A_log");
    ck_assert_int_eq(d->out[at].dim[0], 128); /* written padded, as published */
    draft_resize(d, at, "F32", 1, a_log);
    CHECK_OK(draft_status(d));
    draft_resize(d, at, "F32", 4, a_log_4);
    CHECK_OK(draft_status(d));
    draft_resize(d, draft_find(d, "q_conv1d.weight"), "F32", 3, conv);
    draft_resize(d, draft_find(d, "o_norm.weight"), "F32", 1, norm);
    draft_resize(d, draft_find(d, "k_norm.weight"), "F32", 1, key);
    CHECK_OK(draft_status(d));
    draft_remove(d, draft_find(d, "k_norm.bias")); /* optional */
    CHECK_OK(draft_status(d));
    draft_free(d);
}
END_TEST

/* A checkpoint renamed by a wrapper is the same checkpoint; one changed bit, name or shape is another. */
START_TEST(digests) {
    draft *d = draft_new(TINY_K31, 1);
    br_digest digest = draft_digest(d);
    for (int i = 0; i < d->n; i++) { /* other shards, no prefix */
        d->shard[i] = d->in_index[i] = i % 3 == 0;
        memmove(d->name[i], d->name[i] + strlen("language_model."), BR_NAME_BYTES - strlen("language_model."));
    }
    ck_assert(br_digest_equal(digest, draft_digest(d)));
    int at = draft_find(d, "layers.1.self_attn.o_proj.weight");
    snprintf(d->name[at], BR_NAME_BYTES, "language_model.model.layers.1.self_attn.o_proj.base_layer.weight");
    ck_assert(br_digest_equal(digest, draft_digest(d)));
    for (int i = 0; i < d->n; i++) {
        unsigned char *last = &d->data[i][d->out[i].n_byte - 1];
        if (strstr(d->name[i], "A_log"))
            last = d->data[i]; /* the rest must stay zero */
        *last ^= 1;
        ck_assert_msg(!br_digest_equal(digest, draft_digest(d)), "a bit of %s is not in the digest", d->name[i]);
        *last ^= 1;
    }
    const int64_t reshaped[4] = {1, 1, 1, 1}, flat[1] = {1};
    at = draft_find(d, "self_attn.A_log");
    draft_resize(d, at, "F32", 1, flat);
    digest = draft_digest(d);
    draft_resize(d, at, "F32", 4, reshaped);
    ck_assert(!br_digest_equal(digest, draft_digest(d))); /* same bytes, other shape */
    draft_free(d);
}
END_TEST

/* What the loader never lets differ alone: dtype and shape of equal bytes. */
START_TEST(tensor_digest_covers_the_form) {
    static const unsigned char BYTES[24] = {1, 2, 3};
    const br_tensor good = {.dtype = BR_DTYPE_BF16, .n_dim = 2, .dim = {3, 4, 1}, .data = BYTES, .n_byte = 24, .name = "lm_head.weight"};
    const br_digest digest = br_tensor_digest(&good);
    br_tensor other = good;
    other.dtype = BR_DTYPE_F16;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.dim[0] = 4;
    other.dim[1] = 3;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.n_dim = 3;
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.name = "model.norm.weight";
    ck_assert(!br_digest_equal(digest, br_tensor_digest(&other)));
    other = good;
    other.name = "language_model.lm_head.weight";
    other.shard = 7;
    ck_assert(br_digest_equal(digest, br_tensor_digest(&other)));
}
END_TEST

START_TEST(nearest_names) {
    static const struct {
        const char *target, *name;
        int32_t distance;
    } PAIR[] = {
        {"kitten", "sitting", 3}, {"saturday", "sunday", 3}, {"abcdef", "abcdef", 0}, {"abc", "", 3}, {"", "abc", 3},
        {"axbycz", "abc", 3},     {"xaybzc", "1a2b3c", 3},   {"ab", "ba", 2},
    };
    br_nearest nearest;
    for (size_t i = 0; i < sizeof PAIR / sizeof PAIR[0]; i++) {
        br_nearest_begin(&nearest, PAIR[i].target);
        br_nearest_offer(&nearest, PAIR[i].name);
        ck_assert_int_eq(nearest.n_best, 1);
        ck_assert_msg(nearest.distance[0] == PAIR[i].distance, "%s, %s: %d", PAIR[i].target, PAIR[i].name, nearest.distance[0]);
    }
    static const char *const OFFER[] = {"abcdXXX", "abcdefX", "abXXefg", "language_model.abcdefg", "abcXefg", "aXcdefg", "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq"};
    char text[BR_NEAREST_TEXT_BYTES];
    br_nearest_begin(&nearest, "abcdefg");
    br_nearest_text(&nearest, text);
    ck_assert_str_eq(text, "");
    for (size_t i = 0; i < sizeof OFFER / sizeof OFFER[0]; i++)
        br_nearest_offer(&nearest, OFFER[i]);
    br_nearest_text(&nearest, text); /* the best three, of equal ones the first offered */
    ck_assert_str_eq(text, "; nearest: 'language_model.abcdefg', 'abcdefX', 'abcXefg'");
    br_nearest_begin(&nearest, "abcdefg");
    br_nearest_offer(&nearest, OFFER[6]);
    ck_assert_int_eq(nearest.n_best, 0); /* nothing similar */
}
END_TEST

START_TEST(doubled_tensors_are_refused) {
    draft *d = draft_new(TINY_K31, 1);
    int at = draft_find(d, "lm_head.weight");
    draft_add(d, "lm_head.weight", "BF16", 2, d->out[at].dim); /* the other spelling */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("twice");
    CHECK_SAYS("lm_head.weight");
    draft_free(d);
}
END_TEST

START_TEST(unknown_tensors_are_refused_with_their_nearest) {
    const int64_t dim[1] = {32};
    draft *d = draft_new(TINY_K31, 1);
    int at = draft_find(d, "layers.1.self_attn.kv_a_proj_with_mqa.weight");
    snprintf(d->name[at], BR_NAME_BYTES, "language_model.model.layers.1.self_attn.kv_a_proj_with_mpa.weight"); /* a typing error */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("kv_a_proj_with_mpa.weight");
    CHECK_SAYS("1 unknown, 1 missing");
    CHECK_SAYS("nearest: 'language_model.model.layers.1.self_attn.kv_a_proj_with_mqa.weight'");
    draft_free(d);
    d = draft_new(TINY_K31, 0);
    draft_add(d, "model.layers.2.input_layernorm.weight", "BF16", 1, dim); /* a layer too many */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("1 unknown, 0 missing");
    CHECK_SAYS("'language_model.model.layers.0.input_layernorm.weight'");
    draft_add(d, "no.relation.whatsoever.at.all", "BF16", 1, dim);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("2 unknown");
    draft_free(d);
}
END_TEST

START_TEST(missing_tensors_are_refused) {
    for (int i = 0;; i++) {
        draft *d = draft_new(TINY_K31, i % 2);
        if (i == d->n) {
            draft_free(d);
            break;
        }
        char name[BR_NAME_BYTES];
        memcpy(name, d->name[i], sizeof name);
        draft_remove(d, i);
        if (strstr(name, "k_norm.bias")) {
            CHECK_OK(draft_status(d));
        } else {
            CHECK_FAILS(draft_status(d), BR_E_FORMAT);
            CHECK_SAYS(name);
            CHECK_SAYS("1 missing");
        }
        if (strstr(name, "experts.1.w1.weight_packed"))
            CHECK_SAYS("nearest: 'language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed'");
        draft_free(d);
    }
}
END_TEST

/* Every tensor, with a wrong dtype and with each dimension one larger. */
START_TEST(misshaped_tensors_are_refused) {
    draft *d = draft_new(TINY_K31, 1);
    for (int i = 0; i < d->n; i++) {
        const st_out good = d->out[i];
        unsigned char *data = d->data[i];
        d->data[i] = NULL;
        for (int32_t dim = 0; dim < good.n_dim; dim++) {
            int64_t wrong[4];
            memcpy(wrong, good.dim, sizeof wrong);
            wrong[dim]++;
            if (strstr(d->name[i], "A_log"))
                wrong[dim] = BR_HEAD_MAX + 1; /* any padding up to the most heads is fine */
            draft_resize(d, i, good.dtype, good.n_dim, wrong);
            CHECK_FAILS(draft_status(d), BR_E_FORMAT);
            CHECK_SAYS(d->name[i]);
            CHECK_SAYS("shape [");
        }
        draft_resize(d, i, "F16", good.n_dim, good.dim);
        CHECK_FAILS(draft_status(d), BR_E_FORMAT);
        CHECK_SAYS(d->name[i]);
        CHECK_SAYS("dtype F16, expected");
        free(d->data[i]);
        d->data[i] = data;
        d->out[i] = good;
    }
    int at = draft_find(d, "self_attn.A_log");
    const int64_t none[1] = {0};
    draft_resize(d, at, "F32", 1, none);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    draft_free(d);
}
END_TEST

static void put_u16(unsigned char *at, uint16_t bits) {
    memcpy(at, &bits, sizeof bits);
}

static void put_u32(unsigned char *at, uint32_t bits) {
    memcpy(at, &bits, sizeof bits);
}

/* NaN, Inf and -Inf at the first, a middle and the last element of every tensor of numbers. */
START_TEST(values_that_are_not_numbers_are_refused) {
    static const uint32_t BAD[] = {0x7fc00000u, 0x7f800000u, 0xff800000u, 0xff810000u};
    draft *d = draft_new(TINY_K31, 1);
    int n_checked = 0;
    for (int i = 0; i < d->n; i++) {
        const int is_bf16 = strcmp(d->out[i].dtype, "BF16") == 0;
        const uint64_t size = is_bf16 ? 2 : 4, n = d->out[i].n_byte / size, place[3] = {0, n / 2, n - 1};
        if (strcmp(d->out[i].dtype, "U8") == 0)
            continue;
        const int p = n_checked++ % 3; /* each place and pattern is met many times over the tensors */
        unsigned char *at = d->data[i] + place[p] * size, kept[4];
        memcpy(kept, at, size);
        if (is_bf16)
            put_u16(at, (uint16_t)(BAD[n_checked % 4] >> 16));
        else
            put_u32(at, BAD[n_checked % 4]);
        CHECK_FAILS(draft_status(d), BR_E_FORMAT);
        CHECK_SAYS(d->name[i]);
        char where[64];
        snprintf(where, sizeof where, "element %llu is NaN or Inf", (unsigned long long)place[p]);
        CHECK_SAYS(where);
        memcpy(at, kept, size);
    }
    ck_assert_int_gt(n_checked, 40);
    int at = draft_find(d, "layers.1.input_layernorm.weight"); /* the largest finite numbers and subnormals are fine */
    put_u16(d->data[at], 0x7f7f);
    put_u16(d->data[at] + 2, 0x0001);
    at = draft_find(d, "dt_bias");
    put_u32(d->data[at], 0xff7fffffu);
    CHECK_OK(draft_status(d));
    draft_free(d);
}
END_TEST

START_TEST(scale_bytes_and_padding_are_checked) {
    draft *d = draft_new(TINY_K31, 0);
    static const char *const SCALE[] = {"experts.0.w1.weight_scale", "experts.1.w2.weight_scale", "experts.2.w3.weight_scale"};
    for (size_t s = 0; s < 3; s++) {
        int at = draft_find(d, SCALE[s]);
        unsigned char *last = &d->data[at][d->out[at].n_byte - 1];
        for (int byte = 252; byte <= 255; byte++) {
            *last = (unsigned char)byte;
            br_status status = draft_status(d);
            ck_assert_msg(status == (byte == 252 ? BR_OK : BR_E_FORMAT), "scale byte %d: %s", byte, br_status_name(status));
            if (byte > 252)
                CHECK_SAYS(SCALE[s]);
        }
        *last = 0;
        CHECK_OK(draft_status(d));
    }
    int codes = draft_find(d, "experts.0.w1.weight_packed");
    memset(d->data[codes], 0xff, d->out[codes].n_byte); /* every code is a number */
    CHECK_OK(draft_status(d));
    int at = draft_find(d, "self_attn.A_log");
    put_u32(d->data[at] + 4, 0x80000000u); /* -0 is a zero */
    CHECK_OK(draft_status(d));
    put_u32(d->data[at] + 127 * 4, 1);
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("element 127 is not zero");
    draft_free(d);
}
END_TEST

/* ---- index and shards -------------------------------------------------------------------------------------------------- */

static void write_text(const draft *d, const char *name, const char *text) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, d->dir, name));
    write_file(path, text, strlen(text));
}

static void drop(const draft *d, const char *name) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, d->dir, name));
    ck_assert_int_eq(unlink(path), 0);
}

START_TEST(index_and_shards_must_agree) {
    draft *d = draft_new(TINY_K31, 1);
    br_weights *w;
    d->in_index[5] = 1 - d->in_index[5];
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS(d->name[5]);
    CHECK_SAYS("index.json says");
    d->in_index[5] = -1;
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("not listed");
    d->in_index[5] = d->shard[5];
    d->shard[5] = 2; /* listed, written nowhere */
    CHECK_FAILS(draft_status(d), BR_E_FORMAT);
    CHECK_SAYS("not in its shard");
    d->shard[5] = d->in_index[5];
    CHECK_OK(draft_status(d));
    drop(d, "model-00002-of-00002.safetensors");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_NOT_FOUND);
    CHECK_SAYS("model-00002-of-00002.safetensors");
    write_text(d, "model-00002-of-00002.safetensors", "short");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
    drop(d, "model.safetensors.index.json");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_NOT_FOUND);
    CHECK_SAYS("neither");
    write_text(d, "model.safetensors.index.json", "{\"weight_map\":{}}");
    CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
    CHECK_SAYS("at least one");
    static const char *const ESCAPE[] = {"../model.safetensors", "/etc/passwd", "a/../../b", ""};
    for (size_t i = 0; i < sizeof ESCAPE / sizeof ESCAPE[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"lm_head.weight\":\"%s\"}}", ESCAPE[i]);
        write_text(d, "model.safetensors.index.json", text);
        CHECK_FAILS(br_weights_open(d->dir, &d->config, &w), BR_E_FORMAT);
        CHECK_SAYS("relative path inside");
    }
    draft_free(d);
}
END_TEST

START_TEST(faults_end_in_a_status) {
    draft *d = draft_new(TINY_K31, 1);
    draft_write(d);
    for (int kind = 0; kind < 2; kind++) { /* allocations, reads */
        long n = 1;
        for (;; n++) {
            br_weights *w;
            (kind ? br_file_fail_nth_read : br_mem_fail_nth)(n);
            br_status status = br_weights_open(d->dir, &d->config, &w);
            if (status == BR_OK) {
                br_weights_close(w);
                break;
            }
            ck_assert_int_eq(status, kind ? BR_E_IO : BR_E_NOMEM);
            ck_assert_ptr_null(w);
        }
        br_mem_fail_nth(0);
        br_file_fail_nth_read(0);
        ck_assert_int_eq(n, kind ? 4 : 17); /* index and two shards; three arrays of the index, the rest ours and the shards' */
    }
    draft_free(d);
}
END_TEST

/* ---- inspect and digest ------------------------------------------------------------------------------------------------ */

typedef struct lines {
    char *text;
    size_t n, n_max;
} lines;

static void take_line(void *context, const char *line) {
    lines *l = context;
    size_t n = strlen(line);
    ck_assert_ptr_null(strchr(line, '\n'));
    if (l->n + n + 2 > l->n_max)
        l->text = realloc(l->text, l->n_max = 2 * l->n_max + n + 2);
    memcpy(l->text + l->n, line, n);
    memcpy(l->text + l->n + n, "\n", 2);
    l->n += n + 1;
}

#define CHECK_LINE(l, line) ck_assert_msg(strstr((l).text, line "\n") != NULL, "no line '%s' in\n%s", line, (l).text)

START_TEST(inspect_without_a_model) {
    lines l = {0};
    CHECK_OK(br_job_inspect(NULL, take_line, &l));
    CHECK_LINE(l, "  layers               128");
    CHECK_LINE(l, "  page                 64 positions of one sequence, all MLA layers");
    CHECK_LINE(l, "  BI_MMA_FRACTION 25");
    CHECK_LINE(l, "  BI_ATT_CLASSES 8");
    CHECK_LINE(l, "contract version 1");
    ck_assert_ptr_nonnull(strstr(l.text, "contract digest "));
    free(l.text);
}
END_TEST

START_TEST(inspect_lists_strays) {
    const int64_t dim[1] = {32};
    draft *d = draft_new(TINY_K31, 1);
    lines l = {0};
    draft_write(d);
    CHECK_OK(br_job_inspect(d->dir, take_line, &l));
    CHECK_LINE(l, "model KimiK31");
    CHECK_LINE(l, "tensors              73 in 2 shards: 73 of the text model, 0 of vision (skipped), 0 unknown; 0 missing");
    CHECK_LINE(l, "  expert_w1               3           1536");                 /* 32 * 16 bytes each */
    CHECK_LINE(l, "  cache a token      116: latent 96, index 20");                /* (32+16)*2 + 16+4 */
    CHECK_LINE(l, "  state a sequence   4672: KDA 4096, conv 576");                /* 32*32*4; 3*3*32*2 */
    l.n = 0;
    draft_remove(d, draft_find(d, "experts.1.w3.weight_scale"));
    draft_add(d, "model.strange", "F64", 1, dim);
    draft_write(d);
    CHECK_FAILS(br_job_inspect(d->dir, take_line, &l), BR_E_FORMAT);
    CHECK_LINE(l, "  unknown            model.strange");
    CHECK_LINE(l, "  missing            language_model.model.layers.1.block_sparse_moe.experts.1.w3.weight_scale");
    CHECK_LINE(l, "tensors              73 in 2 shards: 72 of the text model, 0 of vision (skipped), 1 unknown; 1 missing");
    free(l.text);
    draft_free(d);
}
END_TEST

START_TEST(digest_job) {
    draft *d = draft_new(TINY_LINEAR, 1);
    lines l = {0};
    br_report report;
    char hex[BR_DIGEST_TEXT_BYTES], last[64];
    br_digest digest = draft_digest(d);
    CHECK_OK(br_job_digest(d->dir, take_line, &l, &report));
    ck_assert(br_digest_equal(report.weights_digest, digest));
    br_digest_text(digest, hex);
    snprintf(last, sizeof last, "weights %s\n", hex);
    ck_assert_str_eq(l.text + l.n - strlen(last), last);
    int n_line = 0;
    char previous[BR_NAME_BYTES] = "";
    for (char *at = strtok(l.text, "\n"); at; at = strtok(NULL, "\n"), n_line++) {
        if (n_line == d->n)
            break;
        const char *name = strstr(at, "  ") + 2;
        ck_assert_str_lt(previous, name); /* by name */
        snprintf(previous, sizeof previous, "%s", name);
    }
    ck_assert_int_eq(n_line, d->n);
    free(l.text);
    l = (lines){0};
    write_text(d, "adapter_config.json", "{}");
    drop(d, "config.json");
    CHECK_FAILS(br_job_digest(d->dir, take_line, &l, &report), BR_E_UNSUPPORTED);
    CHECK_SAYS("adapter");
    drop(d, "adapter_config.json");
    CHECK_FAILS(br_job_digest(d->dir, take_line, &l, &report), BR_E_NOT_FOUND);
    draft_free(d);
}
END_TEST

/* ---- full-size checkpoints that hold headers only ---------------------------------------------------------------------- */

enum { SPARSE_SHARDS = 96, VISION_TENSORS = 168 };

/* Shards and index of every tensor the config asks for; with_bias 0 leaves the optional ones out. */
static void write_sparse(const char *dir, const br_config *c, int with_bias) {
    static shard_text shard[SPARSE_SHARDS];
    char path[BR_PATH_BYTES + 64], name[BR_NAME_BYTES];
    const int64_t n = br_weight_expect_count(c), vision[4] = {1152, 3, 14, 14};
    br_expect want;
    memset(shard, 0, sizeof shard);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    FILE *index = fopen(path, "wb");
    ck_assert_ptr_nonnull(index);
    fprintf(index, "{\"weight_map\":{");
    for (int64_t i = 0; br_weight_expect(c, i, &want); i++) {
        const int s = (int)(i * SPARSE_SHARDS / n);
        if (want.optional && !with_bias)
            continue;
        br_weight_name(c, want.cls, want.layer, want.expert, name);
        const char *dtype = want.dtypes & 1u << BR_DTYPE_F32 ? "F32" : want.dtypes & 1u << BR_DTYPE_BF16 ? "BF16" : "U8";
        shard_add(&shard[s], name, dtype, want.dim, want.n_dim);
        fprintf(index, "\"%s\":\"s%d.safetensors\",", name, s);
    }
    for (int i = 0; i < VISION_TENSORS; i++) {
        snprintf(name, sizeof name, "vision_tower.part.%d.weight", i);
        shard_add(&shard[i % SPARSE_SHARDS], name, "BF16", vision, 4);
        fprintf(index, "\"%s\":\"s%d.safetensors\"%s", name, i % SPARSE_SHARDS, i == VISION_TENSORS - 1 ? "}}" : ",");
    }
    fclose(index);
    for (int s = 0; s < SPARSE_SHARDS; s++) {
        snprintf(path, sizeof path, "%s/s%d.safetensors", dir, s);
        FILE *file = shard_begin(path, &shard[s]);
        ck_assert_int_eq(fflush(file), 0);
        ck_assert_int_eq(ftruncate(fileno(file), (off_t)(8 + shard[s].n + shard[s].n_data)), 0); /* the data are a hole */
        fclose(file);
    }
}

static void copy_config(const char *model, const char *dir) {
    char from[BR_PATH_BYTES], to[BR_PATH_BYTES];
    br_map map;
    snprintf(from, sizeof from, "%s/golden/configs/%s.json", test_source_dir(), model);
    CHECK_OK(br_file_map(from, &map));
    CHECK_OK(br_file_join(to, dir, "config.json"));
    write_file(to, (const char *)map.bytes, map.n);
    br_file_unmap(&map);
}

/* 1.56 TB by their sizes, about 100 MB on disk: opening must read headers only, and take seconds (2 on one core of 2024). The
 * bound leaves room for sanitizers and catches what is quadratic in half a million. */
static void check_sparse(const char *model, int with_bias, const char *tensors, const char *weights) {
    char dir[BR_PATH_BYTES];
    br_config c;
    lines l = {0};
    struct timespec begin, end;
    read_golden_config(model, &c);
    snprintf(dir, sizeof dir, "%s/%s-%d", test_tmp_dir(), model, with_bias);
    CHECK_OK(br_file_make_dir(dir));
    copy_config(model, dir);
    write_sparse(dir, &c, with_bias);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    CHECK_OK(br_job_inspect(dir, take_line, &l));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    ck_assert_msg(seconds < 40, "inspect took %.1f s of processor time", seconds);
    ck_assert_msg(strstr(l.text, tensors) != NULL, "no '%s' in\n%s", tensors, l.text);
    ck_assert_msg(strstr(l.text, weights) != NULL, "no '%s' in\n%s", weights, l.text);
    free(l.text);
}

START_TEST(full_size_kimi_k3_opens) {
    check_sparse("kimi-k3", 1,
                 "tensors              497220 in 96 shards: 497052 of the text model, 168 of vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1559");
}
END_TEST

START_TEST(full_size_kimi_k31_opens) {
    if (!test_is_long())
        return;
    check_sparse("kimi-k31", 0,
                 "tensors              497316 in 96 shards: 497148 of the text model, 168 of vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1560");
    check_sparse("kimi-k31", 1,
                 "tensors              497340 in 96 shards: 497172 of the text model, 168 of vision (skipped), 0 unknown; 0 missing\n",
                 "  weights            1560");
}
END_TEST

Suite *test_weights_suite(void) {
    Suite *suite = suite_create("weights");
    TCase *names = tcase_create("names"), *checkpoint = tcase_create("checkpoint"), *jobs = tcase_create("jobs"), *full = tcase_create("full size");
    tcase_set_timeout(names, 60);
    tcase_set_timeout(checkpoint, 60);
    tcase_set_timeout(jobs, 30);
    tcase_set_timeout(full, 300);
    tcase_add_loop_test(names, names_are_the_published_ones, 0, sizeof PUBLISHED / sizeof PUBLISHED[0]);
    tcase_add_test(names, other_names_are_unknown);
    tcase_add_test(names, linear_shapes);
    tcase_add_test(checkpoint, good_checkpoints_open);
    tcase_add_test(checkpoint, allowed_forms_open);
    tcase_add_test(checkpoint, digests);
    tcase_add_test(checkpoint, tensor_digest_covers_the_form);
    tcase_add_test(checkpoint, nearest_names);
    tcase_add_test(checkpoint, doubled_tensors_are_refused);
    tcase_add_test(checkpoint, unknown_tensors_are_refused_with_their_nearest);
    tcase_add_test(checkpoint, missing_tensors_are_refused);
    tcase_add_test(checkpoint, misshaped_tensors_are_refused);
    tcase_add_test(checkpoint, values_that_are_not_numbers_are_refused);
    tcase_add_test(checkpoint, scale_bytes_and_padding_are_checked);
    tcase_add_test(checkpoint, index_and_shards_must_agree);
    tcase_add_test(checkpoint, faults_end_in_a_status);
    tcase_add_test(jobs, inspect_without_a_model);
    tcase_add_test(jobs, inspect_lists_strays);
    tcase_add_test(jobs, digest_job);
    tcase_add_test(full, full_size_kimi_k3_opens);
    tcase_add_test(full, full_size_kimi_k31_opens);
    suite_add_tcase(suite, names);
    suite_add_tcase(suite, checkpoint);
    suite_add_tcase(suite, jobs);
    suite_add_tcase(suite, full);
    return suite;
}
