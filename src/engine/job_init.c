/* job_init: the verb `init`: writes a random checkpoint of a preset, and random adapters for a checkpoint, the same bytes on
 * every machine.
 *
 * Layer: engine. The files look as published ones do: config.json, three shards with their index, all published names; an
 * adapter as PEFT writes it, on every linear map that may carry one. config.json comes last, so that a killed run leaves no
 * folder that opens. What was written is opened and digested by the same code that a run uses. */
#include "br_file.h"
#include "br_loaded.h"
#include "br_mem.h"
#include "config_json.h"
#include "init_presets.h"
#include "lora_file.h"
#include "report.h"
#include "safetensors.h"

#include <stdio.h>
#include <string.h>

/* ---- tensors to write ------------------------------------------------------------------------------------------------- */

typedef enum fill { FILL_BF16, FILL_F32, FILL_CODES, FILL_SCALES } fill;

static const struct {
    const char *dtype;
    uint64_t n_byte;
    int32_t n_fan; /* summed terms that one element of the last dimension stands for */
} FILL[] = {
    [FILL_BF16] = {"BF16", 2, 1},
    [FILL_F32] = {"F32", 4, 1},
    [FILL_CODES] = {"U8", 1, 2},   /* two MXFP4 codes a byte */
    [FILL_SCALES] = {"U8", 1, 32}, /* one scale a group */
};

typedef struct init_tensor {
    char name[BR_NAME_BYTES];
    fill fill;
    bi_weightgen gen;
    uint64_t n_drawn; /* elements; zeros follow */
} init_tensor;

/* All tensors of a checkpoint or adapter, in file order. */
typedef struct init_plan {
    init_tensor *tensor;
    st_out *out;
    int64_t n, n_max;
    uint64_t seed, n_byte;
    const br_watch *watch;
    const char *watch_what;
    int64_t n_done, first;               /* tensors begun; the first one of the shard being written */
    int64_t shard_end[INIT_SHARD_COUNT]; /* one past the last tensor of a shard */
} init_plan;

static br_status plan_open(init_plan *plan, int64_t n_max) {
    void *block;
    plan->n_max = n_max;
    BR_TRY(br_mem_alloc(&block, (size_t)n_max * sizeof(init_tensor), "tensors to write"));
    plan->tensor = block;
    BR_TRY(br_mem_alloc(&block, (size_t)n_max * sizeof(st_out), "tensors to write"));
    plan->out = block;
    return BR_OK;
}

static void plan_close(init_plan *plan) {
    br_mem_free(plan->tensor);
    br_mem_free(plan->out);
}

/* Adds the tensor whose name stands in the next free place. */
static void plan_add(init_plan *plan, fill how, const init_recipe *recipe, int32_t n_dim, const int64_t *dim) {
    init_tensor *tensor = &plan->tensor[plan->n];
    st_out *out = &plan->out[plan->n];
    BR_ASSERT(plan->n < plan->n_max && n_dim >= 1 && n_dim <= 4);
    *out = (st_out){.name = tensor->name, .dtype = FILL[how].dtype, .n_dim = n_dim};
    tensor->n_drawn = 1;
    for (int32_t d = 0; d < n_dim; d++) {
        out->dim[d] = dim[d];
        tensor->n_drawn *= (uint64_t)dim[d];
    }
    out->n_byte = tensor->n_drawn * FILL[how].n_byte;
    int32_t fan = recipe->fan_in ? (int32_t)dim[n_dim - 1] * FILL[how].n_fan : 1;
    bi_weightgen_kind kind = how == FILL_CODES || how == FILL_SCALES ? BI_WEIGHTGEN_FP4 : recipe->kind;
    tensor->fill = how;
    tensor->gen = bi_weightgen_make(bi_weightgen_key(plan->seed, tensor->name), kind, recipe->offset, recipe->spread, fan);
    plan->n_byte += out->n_byte;
    plan->n++;
}

static void fill_elements(const init_tensor *tensor, uint64_t first, unsigned char *bytes, size_t n) {
    enum { PIECE = 1024 };
    uint16_t half[PIECE];
    float word[PIECE];
    if (tensor->fill == FILL_CODES)
        bi_weightgen_fill_fp4(&tensor->gen, first, bytes, n);
    if (tensor->fill == FILL_SCALES)
        bi_weightgen_fill_scale(&tensor->gen, first, bytes, n);
    for (size_t at = 0; FILL[tensor->fill].n_byte > 1 && at < n; at += PIECE) {
        size_t n_piece = n - at < PIECE ? n - at : PIECE;
        if (tensor->fill == FILL_BF16) {
            bi_weightgen_fill_bf16(&tensor->gen, first + at, half, n_piece);
            memcpy(bytes + at * sizeof half[0], half, n_piece * sizeof half[0]);
        } else {
            bi_weightgen_fill_f32(&tensor->gen, first + at, word, n_piece);
            memcpy(bytes + at * sizeof word[0], word, n_piece * sizeof word[0]);
        }
    }
}

/* The writer asks for pieces of ST_WRITE_BYTES, a multiple of every element. */
static br_status fill_tensor(void *context, int64_t entry, uint64_t offset, unsigned char *bytes, size_t n) {
    init_plan *plan = context;
    const init_tensor *tensor = &plan->tensor[plan->first + entry];
    const uint64_t size = FILL[tensor->fill].n_byte, first = offset / size, count = n / size;
    BR_ASSERT(offset % size == 0 && n % size == 0);
    if (offset == 0)
        BR_TRY(report_progress(plan->watch, plan->watch_what, plan->n_done++, plan->n));
    uint64_t n_drawn = first >= tensor->n_drawn ? 0 : tensor->n_drawn - first < count ? tensor->n_drawn - first : count;
    memset(bytes, 0, n);
    fill_elements(tensor, first, bytes, (size_t)n_drawn);
    return BR_OK;
}

/* ---- checkpoint ------------------------------------------------------------------------------------------------------- */

static fill fill_of(const br_expect *expect, const init_recipe *recipe) {
    if (expect->dtypes & 1u << BR_DTYPE_U8)
        return expect->cls < BR_CLASS_LORA_END ? FILL_CODES : FILL_SCALES;
    return recipe->is_f32 ? FILL_F32 : FILL_BF16;
}

static br_status plan_checkpoint(const br_config *config, init_plan *plan) {
    br_expect expect;
    BR_TRY(plan_open(plan, br_weight_expect_count(config)));
    for (int64_t i = 0; br_weight_expect(config, i, &expect); i++) {
        const init_recipe recipe = init_recipe_of(config, expect.cls);
        init_tensor *tensor = &plan->tensor[plan->n];
        br_weight_name(config, expect.cls, expect.layer, expect.expert, tensor->name);
        plan_add(plan, fill_of(&expect, &recipe), &recipe, expect.n_dim, expect.dim);
        if (expect.cls == BR_W_KDA_A_LOG)
            tensor->n_drawn = (uint64_t)config->kda_n_head; /* published padding holds zeros */
    }
    return BR_OK;
}

static void shard_name(int32_t shard, char name[64]) {
    snprintf(name, 64, "model-%05d-of-%05d.safetensors", shard + 1, INIT_SHARD_COUNT);
}

/* Shards are about equal in bytes. */
static void cut_shards(init_plan *plan) {
    uint64_t n_byte = 0;
    int64_t end = 0;
    for (int32_t shard = 0; shard < INIT_SHARD_COUNT; shard++) {
        int is_last = shard == INIT_SHARD_COUNT - 1;
        uint64_t wanted = is_last ? plan->n_byte : plan->n_byte / INIT_SHARD_COUNT * (uint64_t)(shard + 1);
        while (end < plan->n && n_byte < wanted)
            n_byte += plan->out[end++].n_byte;
        plan->shard_end[shard] = end;
    }
}

static br_status write_index(const char *dir, const init_plan *plan) {
    char path[BR_PATH_BYTES], file[64];
    const size_t n_max = (size_t)plan->n * (BR_NAME_BYTES + 64) + 128;
    void *block;
    BR_TRY(br_file_join(path, dir, "model.safetensors.index.json"));
    BR_TRY(br_mem_alloc(&block, n_max, "the index of shards"));
    char *text = block;
    size_t n = (size_t)snprintf(text, n_max, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
                                (unsigned long long)plan->n_byte);
    int32_t shard = 0;
    for (int64_t i = 0; i < plan->n; i++) {
        while (i == plan->shard_end[shard])
            shard++;
        shard_name(shard, file);
        n += (size_t)snprintf(text + n, n_max - n, "%s\n    \"%s\": \"%s\"", i ? "," : "", plan->tensor[i].name, file);
    }
    n += (size_t)snprintf(text + n, n_max - n, "\n  }\n}\n");
    br_status status = br_file_write(path, text, n);
    br_mem_free(block);
    return status;
}

static br_status write_checkpoint(const br_init_options *options, const char *config_json, const br_config *config,
                                  const br_watch *watch) {
    br_status status;
    char path[BR_PATH_BYTES], name[64];
    init_plan plan = {.seed = options->seed, .watch = watch, .watch_what = "weights"};
    BR_TRY_GOTO(br_file_make_dir(options->out_dir), exit);
    BR_TRY_GOTO(plan_checkpoint(config, &plan), exit);
    cut_shards(&plan);
    for (int32_t shard = 0; shard < INIT_SHARD_COUNT; shard++) {
        int64_t end = plan.shard_end[shard];
        shard_name(shard, name);
        BR_TRY_GOTO(br_file_join(path, options->out_dir, name), exit);
        BR_TRY_GOTO(st_write(path, plan.out + plan.first, end - plan.first, fill_tensor, &plan), exit);
        plan.first = end;
    }
    BR_TRY_GOTO(write_index(options->out_dir, &plan), exit);
    BR_TRY_GOTO(br_file_join(path, options->out_dir, "config.json"), exit);
    BR_TRY_GOTO(br_file_write(path, config_json, strlen(config_json)), exit);
exit:
    plan_close(&plan);
    return status;
}

/* ---- adapter ---------------------------------------------------------------------------------------------------------- */

enum { ADAPTER_CONFIG_BYTES = 8192, TARGETS_BYTES = 4096 };

/* Maps come first in the walk of tensors, so the walk ends at the first that carries no adapter. */
static int next_map(const br_config *config, int64_t i, br_expect *map) {
    return br_weight_expect(config, i, map) && map->cls < BR_CLASS_LORA_END;
}

static void add_half(init_plan *plan, const char *module, const char *half, const init_recipe *recipe, int64_t n_row,
                     int64_t n_col) {
    snprintf(plan->tensor[plan->n].name, BR_NAME_BYTES, "base_model.model.%.*s.lora_%s.weight", BR_NAME_BYTES - 40, module,
             half);
    plan_add(plan, FILL_BF16, recipe, 2, (int64_t[2]){n_row, n_col});
}

static br_status plan_adapter(const br_config *config, int32_t rank, init_plan *plan) {
    br_expect map;
    int64_t n_map = 0;
    while (next_map(config, n_map, &map))
        n_map++;
    BR_TRY(plan_open(plan, 2 * n_map));
    for (int64_t i = 0; next_map(config, i, &map); i++) {
        char module[BR_NAME_BYTES];
        int32_t n_out = 0, n_in = 0;
        br_linear_shape(config, map.cls, map.layer, &n_out, &n_in);
        lora_module_name(config, map.cls, map.layer, map.expert, module);
        add_half(plan, module, "A", &INIT_RECIPE_LORA_A, rank, n_in);
        add_half(plan, module, "B", &INIT_RECIPE_LORA_B, n_out, rank);
    }
    return BR_OK;
}

/* The last parts of the maps' names, each once, as a JSON list. */
static void list_targets(const br_config *config, char list[TARGETS_BYTES]) {
    br_expect map;
    size_t n = 0;
    list[0] = 0;
    for (int64_t i = 0; next_map(config, i, &map); i++) {
        char module[BR_NAME_BYTES], quoted[BR_NAME_BYTES];
        lora_module_name(config, map.cls, map.layer, map.expert, module);
        snprintf(quoted, sizeof quoted, "\"%s\"", strrchr(module, '.') + 1);
        if (!strstr(list, quoted))
            n += (size_t)snprintf(list + n, TARGETS_BYTES - n, "%s%s", n ? ", " : "", quoted);
    }
}

static br_status write_adapter_config(const br_config *config, const char *dir, int32_t rank) {
    char path[BR_PATH_BYTES], targets[TARGETS_BYTES], text[ADAPTER_CONFIG_BYTES];
    list_targets(config, targets);
    int n = snprintf(text, sizeof text, INIT_ADAPTER_CONFIG, rank * INIT_LORA_ALPHA_PER_RANK, rank, targets);
    BR_ASSERT(n > 0 && (size_t)n < sizeof text);
    BR_TRY(br_file_join(path, dir, "adapter_config.json"));
    return br_file_write(path, text, (size_t)n);
}

static br_status write_adapter(const br_init_options *options, const br_config *config, const br_watch *watch) {
    br_status status;
    char path[BR_PATH_BYTES];
    init_plan plan = {.seed = options->lora_seed, .watch = watch, .watch_what = "adapter"};
    BR_TRY_GOTO(br_file_make_dir(options->lora_out_dir), exit);
    BR_TRY_GOTO(plan_adapter(config, options->lora_rank, &plan), exit);
    BR_TRY_GOTO(br_file_join(path, options->lora_out_dir, "adapter_model.safetensors"), exit);
    BR_TRY_GOTO(st_write(path, plan.out, plan.n, fill_tensor, &plan), exit);
    BR_TRY_GOTO(write_adapter_config(config, options->lora_out_dir, options->lora_rank), exit);
exit:
    plan_close(&plan);
    return status;
}

/* ---- the job ---------------------------------------------------------------------------------------------------------- */

static br_status refuse_preset(const char *name) {
    char list[256] = "";
    for (int32_t i = 0, n = 0; i < init_preset_count(); i++)
        n += snprintf(list + n, sizeof list - (size_t)n, "%s%s", i ? ", " : "", init_preset_at(i)->name);
    return br_fail(BR_E_ARG, "preset '%.80s': expected one of %s", name ? name : "", list);
}

static br_status check_options(const br_init_options *o) {
    if (!o->out_dir || !o->out_dir[0])
        return br_fail(BR_E_ARG, "init: out_dir is missing: expected the folder of the checkpoint");
    if (o->lora_rank < 0 || o->lora_rank > LORA_RANK_MAX)
        return br_fail(BR_E_ARG, "init: lora_rank is %d: expected 0 to %d", o->lora_rank, LORA_RANK_MAX);
    if (o->lora_only && (!o->lora_rank || !o->lora_out_dir))
        return br_fail(BR_E_ARG, "init: lora_only without lora_rank and lora_out_dir leaves nothing to write");
    return BR_OK;
}

/* Opens what was written, as a run would, and fills the digests. */
static br_status report_written(const br_init_options *options, const br_config *config, int with_adapter,
                                br_report *report) {
    br_status status;
    br_weights *weights = NULL;
    br_loaded loaded = {.config = *config};
    const br_adapter_source source = {.name = "lora", .dir = options->lora_out_dir};
    BR_TRY_GOTO(br_weights_open(options->out_dir, config, &weights), exit);
    loaded.weights_digest = br_weights_digest(weights);
    BR_TRY_GOTO(lora_open(config, &source, with_adapter, 0, &loaded.adapters), exit);
    BR_TRY_GOTO(br_loaded_report(&loaded, report), exit);
exit:
    lora_close(loaded.adapters);
    br_weights_close(weights);
    return status;
}

/* lora_only: the shape is that of the checkpoint in out_dir, made by us or not; preset is not looked at. */
br_status br_job_init(const br_init_options *options, const br_watch *watch, br_report *report) {
    br_config config;
    *report = (br_report){.first_seq = -1, .first_pos = -1};
    BR_TRY(check_options(options));
    const double begin = report_clock();
    const int with_adapter = options->lora_rank > 0 && options->lora_out_dir;
    if (options->lora_only) {
        BR_TRY(br_config_read(options->out_dir, &config));
    } else {
        const init_preset *preset = options->preset ? init_preset_find(options->preset) : NULL;
        if (!preset)
            return refuse_preset(options->preset);
        BR_TRY(br_config_parse(preset->name, preset->config_json, strlen(preset->config_json), &config));
        BR_TRY(write_checkpoint(options, preset->config_json, &config, watch));
    }
    if (with_adapter)
        BR_TRY(write_adapter(options, &config, watch));
    report->seconds = report_clock() - begin;
    return report_written(options, &config, with_adapter, report);
}
