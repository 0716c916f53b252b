/* Writing checkpoints for tests; see checkpoint_rig.h. */
#include "checkpoint_rig.h"

#include "config_json.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void rig_read_golden_config(const char *model, br_config *config) {
    char path[BR_PATH_BYTES];
    br_map map;
    snprintf(path, sizeof path, "%s/golden/configs/%s.json", test_source_dir(), model);
    CHECK_OK(br_file_map(path, &map));
    CHECK_OK(br_config_parse(path, (const char *)map.bytes, map.n, config));
    br_file_unmap(&map);
}

/* ---- shards written without the writer: no flush to disk, holes instead of data -------------------------------------- */

void shard_add(shard_text *s, const char *name, const char *dtype, const int64_t *dim, int32_t n_dim) {
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

FILE *shard_begin(const char *path, shard_text *s) {
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

void rig_write_file(const char *path, const char *text, size_t n) {
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(text, 1, n, file), n);
    ck_assert_int_eq(fclose(file), 0);
}

/* ---- a small checkpoint on disk, and what can be wrong with it ------------------------------------------------------- */

const char TINY_K31[] =
    "{\"architectures\":[\"KimiK31ForConditionalGeneration\"],\"vocab_size\":64,\"hidden_size\":32,\"num_hidden_layers\":2,"
    "\"first_k_dense_replace\":1,\"num_attention_heads\":2,\"intermediate_size\":32,\"q_lora_rank\":32,\"kv_lora_rank\":32,"
    "\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,\"v_head_dim\":16,\"num_experts\":3,\"num_experts_per_token\":2,"
    "\"num_shared_experts\":2,\"moe_intermediate_size\":32,\"routed_expert_hidden_size\":32,\"latent_moe_use_norm\":true,"
    "\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,\"mla_use_output_gate\":true,\"attn_res_block_size\":1,"
    "\"max_position_embeddings\":128,\"linear_attn_config\":{\"num_heads\":1,\"head_dim\":32,\"use_full_rank_gate\":true,"
    "\"full_attn_layers\":[2]},\"index_n_heads\":4,\"index_head_dim\":16,\"index_topk\":8,"
    "\"quantization_config\":{\"format\":\"mxfp4-pack-quantized\"}}";

const char TINY_LINEAR[] =
    "{\"architectures\":[\"KimiLinearForCausalLM\"],\"vocab_size\":64,\"hidden_size\":32,\"num_hidden_layers\":2,"
    "\"first_k_dense_replace\":1,\"num_attention_heads\":2,\"intermediate_size\":32,\"kv_lora_rank\":32,"
    "\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,\"v_head_dim\":16,\"num_experts\":3,\"num_experts_per_token\":2,"
    "\"num_shared_experts\":1,\"moe_intermediate_size\":32,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,"
    "\"model_max_length\":128,\"linear_attn_config\":{\"num_heads\":2,\"head_dim\":32,\"full_attn_layers\":[2]}}";

int draft_find(const draft *d, const char *tail) {
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

void draft_resize(draft *d, int i, const char *dtype, int32_t n_dim, const int64_t *dim) {
    int ok;
    d->out[i].dtype = dtype;
    d->out[i].n_dim = n_dim;
    memcpy(d->out[i].dim, dim, sizeof(int64_t) * (size_t)n_dim);
    d->out[i].n_byte = st_tensor_bytes(dtype, dim, n_dim, &ok);
    ck_assert(ok);
    draft_data(d, i);
}

int draft_add(draft *d, const char *name, const char *dtype, int32_t n_dim, const int64_t *dim) {
    int i = d->n++;
    ck_assert_int_lt(i, TENSOR_MAX);
    snprintf(d->name[i], BR_NAME_BYTES, "%s", name);
    d->out[i].name = d->name[i];
    d->shard[i] = d->in_index[i] = d->use_index ? i % 2 : 0;
    draft_resize(d, i, dtype, n_dim, dim);
    return i;
}

void draft_remove(draft *d, int i) {
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

draft *draft_new(const char *config, int use_index) {
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
    rig_write_file(path, config, strlen(config));
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

void draft_free(draft *d) {
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

void draft_write(const draft *d) {
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
    rig_write_file(path, text, used);
}

br_status draft_status(const draft *d) {
    br_weights *w = NULL;
    draft_write(d);
    br_status status = br_weights_open(d->dir, &d->config, &w);
    ck_assert_int_eq(w != NULL, status == BR_OK);
    if (status == BR_OK)
        status = br_weights_check_data(w);
    br_weights_close(w);
    return status;
}

br_digest draft_digest(const draft *d) {
    br_weights *w;
    draft_write(d);
    CHECK_OK(br_weights_open(d->dir, &d->config, &w));
    CHECK_OK(br_weights_check_data(w));
    br_digest digest = br_weights_digest(w);
    br_weights_close(w);
    return digest;
}

void draft_write_text(const draft *d, const char *name, const char *text) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, d->dir, name));
    rig_write_file(path, text, strlen(text));
}

void draft_drop(const draft *d, const char *name) {
    char path[BR_PATH_BYTES];
    CHECK_OK(br_file_join(path, d->dir, name));
    ck_assert_int_eq(unlink(path), 0);
}
