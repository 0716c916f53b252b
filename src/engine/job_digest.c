/* `bitroll digest`: the digest of each tensor of a checkpoint or adapter, by name, and their Merkle root.
 *
 * Layer: engine. Two folders are compared with plain `diff` of the lines. The root of an adapter's file is not the adapter
 * digest of a run: that one counts ranks and scales by map as well, which takes the model. */
#include "bi_contract.h"
#include "br_mem.h"
#include "checkpoint.h"
#include "config_json.h"
#include "recipe_json.h"
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct digest_lines {
    br_line line;
    void *context;
} digest_lines;

static void say_tensor(void *context, const br_tensor *tensor, br_digest digest) {
    const digest_lines *out = context;
    char text[BR_DIGEST_TEXT_BYTES + BR_NAME_BYTES + 8], hex[BR_DIGEST_TEXT_BYTES], plain[BR_NAME_BYTES];
    br_weight_plain_name(tensor->name, strlen(tensor->name), plain);
    br_digest_text(digest, hex);
    snprintf(text, sizeof text, "%s  %s", hex, plain);
    out->line(out->context, text);
}

/* Name, dtype, shape and bytes of one tensor of an adapter's file. */
static br_digest entry_digest(const st_file *file, const st_entry *entry) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    br_hash_add(&stream, entry->name, strlen(entry->name) + 1);
    br_hash_add(&stream, entry->dtype, strlen(entry->dtype) + 1);
    br_hash_add(&stream, entry->dim, (size_t)entry->n_dim * sizeof entry->dim[0]);
    br_hash_add(&stream, file->map.bytes + entry->begin, (size_t)entry->n_byte);
    return br_hash_end(&stream);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const st_entry *)a)->name, ((const st_entry *)b)->name);
}

static br_status digest_adapter(const char *path, const digest_lines *out) {
    st_file file;
    br_digest *leaf = NULL;
    char text[BR_DIGEST_TEXT_BYTES + 512], hex[BR_DIGEST_TEXT_BYTES];
    BR_TRY(st_open(path, &file));
    br_status status = br_mem_alloc((void **)&leaf, (size_t)file.n_entry * sizeof *leaf, "digests");
    if (status == BR_OK) {
        qsort(file.entry, (size_t)file.n_entry, sizeof *file.entry, by_name);
        for (int64_t i = 0; i < file.n_entry; i++) {
            leaf[i] = entry_digest(&file, &file.entry[i]);
            br_digest_text(leaf[i], hex);
            snprintf(text, sizeof text, "%s  %.500s", hex, file.entry[i].name);
            out->line(out->context, text);
        }
        br_digest_text(br_hash_merkle(leaf, (size_t)file.n_entry), hex);
        snprintf(text, sizeof text, "adapter file, Merkle root %s", hex);
        out->line(out->context, text);
    }
    br_mem_free(leaf);
    st_close(&file);
    return status;
}

/* What the bytes follow from: the recipe and adapter_config.json. */
static br_status digest_generated_adapter(const char *dir, const char *config_path, const digest_lines *out) {
    recipe_json recipe;
    br_map map;
    br_hash_stream stream;
    char text[BR_DIGEST_TEXT_BYTES + 128], hex[BR_DIGEST_TEXT_BYTES];
    BR_TRY(recipe_json_read(dir, NULL, 1, &recipe));
    BR_TRY(br_file_map(config_path, &map));
    const uint64_t number[4] = {RECIPE_FORMAT_VERSION, recipe.seed, recipe.config_digest.hi, recipe.config_digest.lo};
    br_hash_begin(&stream);
    br_hash_add(&stream, number, sizeof number);
    br_hash_add(&stream, map.bytes, map.n);
    br_file_unmap(&map);
    br_digest_text(br_hash_end(&stream), hex);
    snprintf(text, sizeof text, "adapter, generated (seed %llu, recipes of version %d), digest of the recipe %s",
             (unsigned long long)recipe.seed, RECIPE_FORMAT_VERSION, hex);
    out->line(out->context, text);
    return BR_OK;
}

static br_status digest_checkpoint(const char *dir, const digest_lines *out, br_report *report) {
    br_config config;
    br_weights *weights;
    char text[256], hex[BR_DIGEST_TEXT_BYTES];
    BR_TRY(br_config_read(dir, &config));
    BR_TRY(checkpoint_open(dir, &config, &weights));
    report->weights_digest = br_weights_digest_each(weights, say_tensor, (void *)(uintptr_t)out);
    br_digest_text(report->weights_digest, hex);
    if (br_weights_origin(weights))
        snprintf(text, sizeof text, "weights, generated (%s), digest of the recipes %s", br_weights_origin(weights), hex);
    else
        snprintf(text, sizeof text, "weights, Merkle root %s", hex);
    out->line(out->context, text);
    br_weights_close(weights);
    return BR_OK;
}

br_status br_job_digest(const char *dir, br_line line, void *context, br_report *report) {
    const digest_lines lines = {.line = line, .context = context};
    char config[BR_PATH_BYTES], adapter[BR_PATH_BYTES], tensors[BR_PATH_BYTES];
    *report = (br_report){.first_seq = -1, .first_pos = -1, .contract_digest = bi_contract_digest()};
    BR_TRY(br_file_join(config, dir, "config.json"));
    BR_TRY(br_file_join(adapter, dir, "adapter_config.json"));
    BR_TRY(br_file_join(tensors, dir, "adapter_model.safetensors"));
    if (!br_file_exists(config) && br_file_exists(adapter) && recipe_json_exists(dir))
        return digest_generated_adapter(dir, adapter, &lines);
    if (!br_file_exists(config) && br_file_exists(adapter))
        return digest_adapter(tensors, &lines);
    return digest_checkpoint(dir, &lines, report);
}
