/* Loading in order: config, checkpoint, adapters, pool, backend, model; see br_loaded.h. */
#include "br_loaded.h"

#include "bi_cuda_open.h"
#include "checkpoint.h"
#include "config_json.h"

#include <stdio.h>
#include <string.h>

static br_status check_options(const br_engine_options *options) {
    if (!options->model_dir)
        return br_fail(BR_E_ARG, "no model folder given");
    if (options->backend && strcmp(options->backend, "oracle") != 0 && strcmp(options->backend, "cuda") != 0)
        return br_fail(BR_E_UNSUPPORTED, "backend '%s': expected oracle or cuda", options->backend);
    if (options->n_thread < 0 || options->n_thread > BR_THREAD_MAX)
        return br_fail(BR_E_ARG, "%d threads: expected 1 to %d", options->n_thread, BR_THREAD_MAX);
    if (options->swap_rank < 0 || options->swap_rank > LORA_RANK_MAX)
        return br_fail(BR_E_ARG, "swap_rank %d: expected 0 to %d", options->swap_rank, LORA_RANK_MAX);
    for (int32_t i = 0; i < options->n_adapter && options->adapter && !options->swap_rank; i++)
        if (!options->adapter[i].dir)
            return br_fail(BR_E_ARG, "adapter %d of %d has no folder: only with swap_rank one may start empty", i, options->n_adapter);
    return BR_OK;
}

/* Without a name: cuda where a usable GPU is. The oracle computes in host memory, the other backend on the GPU. */
static br_status open_backend(br_loaded *loaded, const char *name) {
    const int32_t rank = lora_rank_max(loaded->adapters), n_slot = lora_count(loaded->adapters) * loaded->n_way;
    const int32_t rank_max = loaded->swap_rank > rank ? loaded->swap_rank : rank;
    const bi_limits limits = br_model_limits(&loaded->config, rank_max, n_slot, loaded->n_row_max, loaded->n_pos_max);
    const char *device = !name ? NULL : strcmp(name, "oracle") == 0 ? "host" : "cuda";
    const br_status opened = br_device_open(device, &loaded->device);
    if (opened == BR_E_DEVICE || opened == BR_E_UNSUPPORTED)
        return br_fail(opened, "%s: backend oracle computes the same bits without a GPU", br_last_error());
    BR_TRY(opened);
    if (br_device_is_host(loaded->device))
        return bi_backend_oracle_open(&limits, loaded->pool, NULL, &loaded->backend);
    const br_status status = bi_backend_cuda_open(&limits, loaded->device, &loaded->backend);
    if (status == BR_E_LIMIT && loaded->swap_rank)
        br_fail_context(status, "adapters that are swapped own %d slots a name", loaded->n_way);
    return status;
}

static br_model_options model_options(const br_loaded *loaded, const br_weights *weights) {
    return (br_model_options){
        .config = &loaded->config, .weights = weights, .adapters = loaded->adapters, .backend = loaded->backend,
        .device = loaded->device, .pool = loaded->pool, .comm = {.rank = 0, .n_rank = 1}, .n_row_max = loaded->n_row_max,
        .swap_rank = loaded->swap_rank,
    };
}

/* What lies on the device so far is the backend's. */
static void measure_model(br_loaded *loaded) {
    const br_model_options options = model_options(loaded, loaded->weights);
    br_model_measure(&options, &loaded->size);
    loaded->room = (br_room){.taken = (size_t)br_device_counted(loaded->device).alloc_bytes};
    br_room_add(&loaded->room, "packed weights", loaded->size.weights);
    br_room_add(&loaded->room, "work buffers", loaded->size.work);
}

static br_status open_model(br_loaded *loaded) {
    const br_model_options options = model_options(loaded, loaded->weights);
    BR_TRY(br_room_check(&loaded->room, loaded->device));
    return br_model_open(&options, &loaded->model);
}

/* Slots, and what they hold. A generated adapter that can be swapped is known by its values, as its successors are: see engine_swap.c. */
static br_status bind_adapters(br_loaded *loaded, int32_t swap_rank) {
    const int32_t rank = lora_rank_max(loaded->adapters);
    loaded->swap_rank = swap_rank;
    loaded->n_way = swap_rank ? BR_MODEL_WAYS : 1;
    for (int32_t i = 0; i < lora_count(loaded->adapters); i++)
        loaded->slot_digest[i * loaded->n_way] = lora_digest(loaded->adapters, i);
    if (swap_rank && rank > swap_rank)
        return br_fail(BR_E_LIMIT, "swap_rank %d: expected at least %d, the rank of an adapter that is loaded", swap_rank, rank);
    return BR_OK;
}

br_status br_loaded_prepare(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, int32_t whole, br_loaded *out) {
    br_status status;
    memset(out, 0, sizeof *out);
    BR_TRY(check_options(options));
    BR_TRY(br_config_read(options->model_dir, &out->config));
    out->config_digest = br_config_digest(&out->config);
    if (n_pos_max > out->config.position_max)
        n_pos_max = out->config.position_max;
    out->n_pos_max = n_pos_max;
    out->n_row_max = whole && n_row_max < n_pos_max ? n_pos_max : n_row_max;
    BR_TRY_GOTO(checkpoint_open(options->model_dir, &out->config, &out->weights), exit);
    BR_TRY_GOTO(br_weights_check_data(out->weights), exit);
    out->weights_digest = br_weights_digest(out->weights);
    BR_TRY_GOTO(lora_open(&out->config, options->adapter, options->n_adapter, options->allow_zero_adapter, &out->adapters), exit);
    BR_TRY_GOTO(bind_adapters(out, options->swap_rank), exit);
    BR_TRY_GOTO(br_pool_open(options->n_thread ? options->n_thread : br_pool_core_count(), &out->pool), exit);
    BR_TRY_GOTO(open_backend(out, options->backend), exit);
    measure_model(out);
exit:
    if (status != BR_OK)
        br_loaded_close(out);
    return status;
}

br_status br_loaded_pack(br_loaded *loaded) {
    const br_status status = open_model(loaded);
    br_weights_close(loaded->weights);
    loaded->weights = NULL;
    if (status != BR_OK)
        br_loaded_close(loaded);
    return status;
}

br_status br_loaded_open(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, int32_t whole, br_loaded *out) {
    BR_TRY(br_loaded_prepare(options, n_row_max, n_pos_max, whole, out));
    return br_loaded_pack(out);
}

br_status br_loaded_open_like(const br_loaded *loaded, const char *dir, br_weights **out) {
    br_config config;
    *out = NULL;
    BR_TRY(br_config_read(dir, &config));
    if (!br_digest_equal(br_config_digest(&config), loaded->config_digest))
        return br_fail(BR_E_FORMAT, "%s: its config.json describes another model than the one that is loaded", dir);
    return checkpoint_open(dir, &loaded->config, out);
}

br_status br_loaded_put(br_loaded *loaded, const br_weights *weights, br_digest digest, int32_t *changed) {
    const br_model_options options = model_options(loaded, weights);
    BR_TRY(br_model_reload(loaded->model, &options, changed));
    loaded->weights_digest = digest;
    return BR_OK;
}

void br_loaded_close(br_loaded *loaded) {
    br_weights_close(loaded->weights);
    br_model_close(loaded->model);
    bi_backend_close(&loaded->backend);
    br_device_close(loaded->device);
    br_pool_close(loaded->pool);
    lora_close(loaded->adapters);
    memset(loaded, 0, sizeof *loaded);
}

br_status br_loaded_name(const br_loaded *loaded, const char *adapter, int32_t *name) {
    *name = -1;
    if (!adapter || strcmp(adapter, "base") == 0)
        return BR_OK;
    *name = lora_find(loaded->adapters, adapter);
    if (*name >= 0)
        return BR_OK;
    char names[256] = "base";
    for (int32_t i = 0; i < lora_count(loaded->adapters); i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, ", %s", lora_name(loaded->adapters, i));
    }
    return br_fail(BR_E_NOT_FOUND, "adapter '%s' is not loaded: --adapter %s=DIR loads it; loaded are: %s", adapter, adapter, names);
}

br_status br_loaded_slot(const br_loaded *loaded, const char *adapter, int32_t *slot) {
    BR_TRY(br_loaded_name(loaded, adapter, slot));
    if (*slot < 0 || loaded->n_way <= 1)
        return BR_OK;
    *slot = br_loaded_live_slot(loaded, *slot);
    if (br_digest_equal(loaded->slot_digest[*slot], (br_digest){0}))
        return br_fail(BR_E_NOT_FOUND, "adapter '%s' is empty: expected a version to be committed first", adapter);
    return BR_OK;
}

br_status br_loaded_check_length(const br_loaded *loaded, int32_t n_tok) {
    if (n_tok <= loaded->n_pos_max)
        return BR_OK;
    return br_fail(BR_E_LIMIT, "a sequence of %d tokens: expected at most max_position_embeddings, %d", n_tok, loaded->config.position_max);
}

br_digest br_loaded_adapter_digest(const br_loaded *loaded, int32_t slot) {
    if (slot < 0)
        return (br_digest){0};
    return loaded->n_way > 1 ? loaded->slot_digest[slot] : lora_digest(loaded->adapters, slot);
}

br_status br_loaded_report(const br_loaded *loaded, br_report *report) {
    const int32_t n = lora_count(loaded->adapters);
    report->weights_digest = loaded->weights_digest;
    report->contract_digest = br_contract_digest();
    if (n == 0)
        return BR_OK;
    BR_TRY(br_mem_alloc((void **)&report->adapter_name, (size_t)n * sizeof(char *), "the report"));
    BR_TRY(br_mem_alloc((void **)&report->adapter_digest, (size_t)n * sizeof(br_digest), "the report"));
    for (int32_t i = 0; i < n; i++) {
        const char *name = lora_name(loaded->adapters, i);
        char *copy = NULL;
        BR_TRY(br_mem_alloc((void **)&copy, strlen(name) + 1, "the report"));
        memcpy(copy, name, strlen(name) + 1);
        report->adapter_name[i] = copy;
        report->adapter_digest[i] = br_loaded_adapter_digest(loaded, br_loaded_live_slot(loaded, i));
        report->n_adapter = i + 1;
    }
    return BR_OK;
}

br_status br_loaded_fault(uint32_t code, int32_t position) {
    return br_fail(BR_E_NAN, "NaN or Inf at layer %d, stage %s, position %d", br_fault_layer(code), br_stage_name(br_fault_stage(code)), position);
}
