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
    return BR_OK;
}

/* Without a name: cuda where a usable GPU is. The oracle computes in host memory, the other backend on the GPU. */
static br_status open_backend(br_loaded *loaded, const char *name) {
    const bi_limits limits = br_model_limits(&loaded->config, lora_rank_max(loaded->adapters), lora_count(loaded->adapters),
                                             loaded->n_row_max, loaded->n_pos_max);
    const char *device = !name ? NULL : strcmp(name, "oracle") == 0 ? "host" : "cuda";
    BR_TRY(br_device_open(device, &loaded->device));
    if (br_device_is_host(loaded->device))
        return bi_backend_oracle_open(&limits, loaded->pool, NULL, &loaded->backend);
    return bi_backend_cuda_open(&limits, loaded->device, &loaded->backend);
}

static br_status open_model(br_loaded *loaded, const br_weights *weights) {
    br_model_options options = {
        .config = &loaded->config, .weights = weights, .adapters = loaded->adapters, .backend = loaded->backend,
        .device = loaded->device, .pool = loaded->pool, .comm = {.rank = 0, .n_rank = 1}, .n_row_max = loaded->n_row_max,
    };
    return br_model_open(&options, &loaded->model);
}

br_status br_loaded_open(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, int32_t whole, br_loaded *out) {
    br_status status;
    br_weights *weights = NULL;
    memset(out, 0, sizeof *out);
    BR_TRY(check_options(options));
    BR_TRY(br_config_read(options->model_dir, &out->config));
    out->config_digest = br_config_digest(&out->config);
    if (n_pos_max > out->config.position_max)
        n_pos_max = out->config.position_max;
    out->n_pos_max = n_pos_max;
    out->n_row_max = whole && n_row_max < n_pos_max ? n_pos_max : n_row_max;
    BR_TRY_GOTO(checkpoint_open(options->model_dir, &out->config, &weights), exit);
    BR_TRY_GOTO(br_weights_check_data(weights), exit);
    out->weights_digest = br_weights_digest(weights);
    BR_TRY_GOTO(lora_open(&out->config, options->adapter, options->n_adapter, options->allow_zero_adapter, &out->adapters), exit);
    BR_TRY_GOTO(br_pool_open(options->n_thread ? options->n_thread : br_pool_core_count(), &out->pool), exit);
    BR_TRY_GOTO(open_backend(out, options->backend), exit);
    BR_TRY_GOTO(open_model(out, weights), exit);
exit:
    br_weights_close(weights);
    if (status != BR_OK)
        br_loaded_close(out);
    return status;
}

void br_loaded_close(br_loaded *loaded) {
    br_model_close(loaded->model);
    bi_backend_close(&loaded->backend);
    br_device_close(loaded->device);
    br_pool_close(loaded->pool);
    lora_close(loaded->adapters);
    memset(loaded, 0, sizeof *loaded);
}

br_status br_loaded_slot(const br_loaded *loaded, const char *adapter, int32_t *slot) {
    *slot = -1;
    if (!adapter || strcmp(adapter, "base") == 0)
        return BR_OK;
    *slot = lora_find(loaded->adapters, adapter);
    if (*slot >= 0)
        return BR_OK;
    char names[256] = "base";
    for (int32_t i = 0; i < lora_count(loaded->adapters); i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, ", %s", lora_name(loaded->adapters, i));
    }
    return br_fail(BR_E_NOT_FOUND, "adapter '%s' is not loaded; loaded are: %s", adapter, names);
}

br_status br_loaded_check_length(const br_loaded *loaded, int32_t n_tok) {
    if (n_tok <= loaded->n_pos_max)
        return BR_OK;
    return br_fail(BR_E_LIMIT, "a sequence of %d tokens: expected at most max_position_embeddings, %d", n_tok, loaded->config.position_max);
}

br_digest br_loaded_adapter_digest(const br_loaded *loaded, int32_t slot) {
    return slot < 0 ? (br_digest){0} : lora_digest(loaded->adapters, slot);
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
        report->adapter_digest[i] = lora_digest(loaded->adapters, i);
        report->n_adapter = i + 1;
    }
    return BR_OK;
}

br_status br_loaded_fault(uint32_t code, int32_t position) {
    return br_fail(BR_E_NAN, "NaN or Inf at layer %d, stage %s, position %d", br_fault_layer(code), br_stage_name(br_fault_stage(code)), position);
}
