/* job_init: the verb `init`: writes a random checkpoint of a preset, and random adapters for a checkpoint, the same bytes on
 * every machine.
 *
 * Layer: engine. The files look as published ones do: config.json, three shards with their index, all published names; an
 * adapter as PEFT writes it, on every linear map that may carry one. config.json comes last, so that a killed run leaves no
 * folder that opens. What was written is opened and digested by the same code that a run uses. */
#include "br_file.h"
#include "br_loaded.h"
#include "br_mem.h"
#include "checkpoint.h"
#include "config_json.h"
#include "init_presets.h"
#include "job_report.h"
#include "lora_file.h"
#include "lora_recipe.h"
#include "recipe_json.h"
#include "safetensors.h"

#include <stdio.h>
#include <string.h>

/* ---- tensors to write ------------------------------------------------------------------------------------------------- */

/* All tensors of a checkpoint or adapter, in file order; those of a checkpoint belong to `weights`, which are never read. */
typedef struct init_plan {
    br_weights *weights;
    br_tensor *tensor;
    st_out *out;
    char (*name)[BR_NAME_BYTES]; /* of an adapter's tensors, and their recipes */
    bi_weightgen *gen;
    int64_t n, n_max;
    uint64_t n_byte;
    const br_watch *watch;
    const char *watch_what;
    int64_t n_done, first;               /* tensors begun; the first one of the shard being written */
    int64_t shard_end[INIT_SHARD_COUNT]; /* one past the last tensor of a shard */
} init_plan;

static br_status plan_open(init_plan *plan, int64_t n_max) {
    plan->n_max = n_max;
    BR_TRY(br_mem_alloc((void **)&plan->tensor, (size_t)n_max * sizeof *plan->tensor, "tensors to write"));
    return br_mem_alloc((void **)&plan->out, (size_t)n_max * sizeof *plan->out, "tensors to write");
}

static void plan_close(init_plan *plan) {
    br_weights_close(plan->weights);
    br_mem_free(plan->tensor);
    br_mem_free(plan->out);
    br_mem_free(plan->name);
    br_mem_free(plan->gen);
}

static void plan_add(init_plan *plan, const br_tensor *tensor) {
    static const char *const DTYPE[] = {[BR_DTYPE_BF16] = "BF16", [BR_DTYPE_F32] = "F32", [BR_DTYPE_U8] = "U8"};
    st_out *out = &plan->out[plan->n];
    BR_ASSERT(plan->n < plan->n_max);
    *out = (st_out){.name = tensor->name, .dtype = DTYPE[tensor->dtype], .n_dim = tensor->n_dim, .n_byte = tensor->n_byte};
    memcpy(out->dim, tensor->dim, sizeof out->dim);
    plan->tensor[plan->n++] = *tensor;
    plan->n_byte += out->n_byte;
}

/* The writer asks for pieces of ST_WRITE_BYTES, a multiple of every element. */
static br_status fill_tensor(void *context, int64_t entry, uint64_t offset, unsigned char *bytes, size_t n) {
    init_plan *plan = context;
    if (offset == 0)
        BR_TRY(report_progress(plan->watch, plan->watch_what, plan->n_done++, plan->n));
    br_tensor_make(&plan->tensor[plan->first + entry], offset, bytes, n);
    return BR_OK;
}

/* ---- checkpoint ------------------------------------------------------------------------------------------------------- */

static br_status plan_checkpoint(const br_init_options *options, const br_config *config, init_plan *plan) {
    BR_TRY(checkpoint_generate(options->preset, options->seed, config, &plan->weights));
    BR_TRY(plan_open(plan, br_weights_count(plan->weights)));
    for (int64_t i = 0; i < br_weights_count(plan->weights); i++)
        plan_add(plan, br_weights_at(plan->weights, i));
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

/* The other form lies there: what is opened later must not depend on which of them is looked for first. */
static br_status refuse_recipe(const char *dir) {
    if (!recipe_json_exists(dir))
        return BR_OK;
    return br_fail(BR_E_ARG, "%s: " RECIPE_NAME " is there: expected a folder without it for files of tensors", dir);
}

static br_status write_shards(const br_init_options *options, const br_config *config, const br_watch *watch) {
    br_status status;
    char path[BR_PATH_BYTES], name[64];
    init_plan plan = {.watch = watch, .watch_what = "weights"};
    BR_TRY_GOTO(refuse_recipe(options->out_dir), exit);
    BR_TRY_GOTO(plan_checkpoint(options, config, &plan), exit);
    cut_shards(&plan);
    for (int32_t shard = 0; shard < INIT_SHARD_COUNT; shard++) {
        int64_t end = plan.shard_end[shard];
        shard_name(shard, name);
        BR_TRY_GOTO(br_file_join(path, options->out_dir, name), exit);
        BR_TRY_GOTO(st_write(path, plan.out + plan.first, end - plan.first, fill_tensor, &plan), exit);
        plan.first = end;
    }
    BR_TRY_GOTO(write_index(options->out_dir, &plan), exit);
exit:
    plan_close(&plan);
    return status;
}

static br_status write_recipe(const char *dir, const char *preset, uint64_t seed, const br_config *config) {
    recipe_json recipe = {.seed = seed, .config_digest = br_config_digest(config)};
    snprintf(recipe.preset, sizeof recipe.preset, "%s", preset);
    return recipe_json_write(dir, &recipe);
}

static br_status write_checkpoint(const br_init_options *options, const init_preset *preset, const br_config *config, const br_watch *watch) {
    char path[BR_PATH_BYTES];
    BR_TRY(br_file_make_dir(options->out_dir));
    if (options->recipe || preset->is_large) {
        BR_TRY(checkpoint_check_no_files(options->out_dir));
        BR_TRY(write_recipe(options->out_dir, preset->name, options->seed, config));
    } else {
        BR_TRY(write_shards(options, config, watch));
    }
    BR_TRY(br_file_join(path, options->out_dir, "config.json"));
    return br_file_write(path, preset->config_json, strlen(preset->config_json));
}

/* ---- adapter ---------------------------------------------------------------------------------------------------------- */

#define ADAPTER_FILE "adapter_model.safetensors"

enum { ADAPTER_CONFIG_BYTES = 8192, TARGETS_BYTES = 4096 };

/* Maps come first in the walk of tensors, so the walk ends at the first that carries no adapter. */
static int next_map(const br_config *config, int64_t i, br_expect *map) {
    return br_weight_expect(config, i, map) && map->cls < BR_CLASS_LORA_END;
}

static void add_half(init_plan *plan, uint64_t seed, const br_config *config, const br_expect *map, int is_b, int32_t n_row, int32_t n_col) {
    char *name = plan->name[plan->n];
    bi_weightgen *gen = &plan->gen[plan->n];
    lora_recipe_name(config, map->cls, map->layer, map->expert, is_b, name);
    *gen = lora_recipe_of(seed, name, is_b, n_col);
    const uint64_t n = (uint64_t)n_row * (uint64_t)n_col;
    plan_add(plan, &(br_tensor){.cls = map->cls, .layer = map->layer, .expert = map->expert, .dtype = BR_DTYPE_BF16, .n_dim = 2,
                                .dim = {n_row, n_col}, .n_byte = (size_t)n * sizeof(bi_bf16), .gen = gen, .n_drawn = n, .name = name});
}

static br_status plan_adapter(const br_init_options *options, const br_config *config, init_plan *plan) {
    br_expect map;
    int64_t n_map = 0;
    while (next_map(config, n_map, &map))
        n_map++;
    BR_TRY(plan_open(plan, 2 * n_map));
    BR_TRY(br_mem_alloc((void **)&plan->name, 2 * (size_t)n_map * sizeof *plan->name, "names of tensors"));
    BR_TRY(br_mem_alloc((void **)&plan->gen, 2 * (size_t)n_map * sizeof *plan->gen, "recipes of tensors"));
    for (int64_t i = 0; next_map(config, i, &map); i++) {
        int32_t n_out = 0, n_in = 0;
        br_linear_shape(config, map.cls, map.layer, &n_out, &n_in);
        add_half(plan, options->lora_seed, config, &map, 0, options->lora_rank, n_in);
        add_half(plan, options->lora_seed, config, &map, 1, n_out, options->lora_rank);
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

static br_status write_adapter_file(const br_init_options *options, const br_config *config, const br_watch *watch) {
    br_status status;
    char path[BR_PATH_BYTES];
    init_plan plan = {.watch = watch, .watch_what = "adapter"};
    BR_TRY_GOTO(refuse_recipe(options->lora_out_dir), exit);
    BR_TRY_GOTO(plan_adapter(options, config, &plan), exit);
    BR_TRY_GOTO(br_file_join(path, options->lora_out_dir, ADAPTER_FILE), exit);
    BR_TRY_GOTO(st_write(path, plan.out, plan.n, fill_tensor, &plan), exit);
exit:
    plan_close(&plan);
    return status;
}

/* Takes the form of its checkpoint, or that of a recipe when asked to. */
static br_status write_adapter(const br_init_options *options, const br_config *config, const br_watch *watch) {
    static const char *const TENSORS[] = {ADAPTER_FILE};
    BR_TRY(br_file_make_dir(options->lora_out_dir));
    if (options->recipe || recipe_json_exists(options->out_dir)) {
        BR_TRY(recipe_json_check_alone(options->lora_out_dir, TENSORS, 1));
        BR_TRY(write_recipe(options->lora_out_dir, "", options->lora_seed, config));
    } else {
        BR_TRY(write_adapter_file(options, config, watch));
    }
    return write_adapter_config(config, options->lora_out_dir, options->lora_rank);
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
    BR_TRY_GOTO(checkpoint_open(options->out_dir, config, &weights), exit);
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
        BR_TRY(write_checkpoint(options, preset, &config, watch));
    }
    if (with_adapter)
        BR_TRY(write_adapter(options, &config, watch));
    report->seconds = report_clock() - begin;
    return report_written(options, &config, with_adapter, report);
}
