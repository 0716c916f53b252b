/* Reading an adapter back; see live_digest.h. */
#include "live_digest.h"

#include "lora_file.h"
#include "lora_plan.h"

/* ---- matrix by matrix -------------------------------------------------------------------------------------------------------- */

/* Digests of A and B of one map; *whole: all that surrounds both is what it should be. */
static br_status read_map(br_model_reader *reader, const br_config *config, br_model_matrix at, const lora_scale *scale, uint16_t *value,
                          br_digest digest[2], int32_t *whole) {
    int32_t n_out = 0, n_in = 0;
    *whole = 1;
    br_linear_shape(config, at.cls, at.layer, &n_out, &n_in);
    for (at.is_b = 0; at.is_b < 2; at.is_b++) {
        int32_t intact;
        BR_TRY(br_model_adapter_read(reader, &at, scale->alpha, scale->rslora, value, &intact));
        digest[at.is_b] = lora_digest_matrix(value, (int64_t)at.rank * (at.is_b ? n_out : n_in));
        *whole &= intact;
    }
    return BR_OK;
}

/* A map without an adapter adds nothing, as long as its memory is what it should be. */
static br_status read_maps(const br_loaded *loaded, int32_t slot, const lora_scale *plan, br_model_reader *reader, uint16_t *value, br_digest *out) {
    br_expect map;
    br_hash_stream stream;
    int32_t all_whole = 1;
    br_hash_begin(&stream);
    for (int64_t i = 0; br_weight_expect(&loaded->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        const br_model_matrix at = {.slot = slot, .cls = map.cls, .layer = map.layer, .expert = map.expert, .rank = plan[i].rank};
        char name[BR_NAME_BYTES];
        br_digest digest[2];
        int32_t whole;
        BR_TRY(read_map(reader, &loaded->config, at, &plan[i], value, digest, &whole));
        all_whole &= whole;
        if (plan[i].rank)
            lora_digest_add(&stream, name, lora_module_name(&loaded->config, map.cls, map.layer, map.expert, name), &plan[i], digest[0], digest[1]);
    }
    *out = br_hash_end(&stream);
    if (!all_whole)
        *out = br_hash_chain(*out, "torn", sizeof "torn");
    return BR_OK;
}

static br_status by_matrix(const br_loaded *loaded, int32_t slot, const lora_scale *plan, br_digest *out) {
    br_status status;
    br_model_reader *reader = NULL;
    uint16_t *value = NULL;
    BR_TRY_GOTO(br_model_reader_open(loaded->model, &reader), exit);
    BR_TRY_GOTO(br_mem_alloc((void **)&value, br_model_adapter_values(loaded->model) * sizeof *value, "a matrix of an adapter"), exit);
    BR_TRY_GOTO(read_maps(loaded, slot, plan, reader, value, out), exit);
exit:
    br_mem_free(value);
    br_model_reader_close(reader);
    return status;
}

/* ---- either ------------------------------------------------------------------------------------------------------------------------- */

static br_status by_image(adapter_image *image, const lora_scale *plan, br_digest *out) {
    BR_TRY(adapter_image_lay(image, plan));
    return adapter_image_digest(image, out);
}

br_status live_digest(const br_loaded *loaded, adapter_image *image, int32_t slot, const lora_scale *plan, br_digest *out) {
    adapter_image *own = NULL;
    if (!br_model_has_views(loaded->model))
        return by_matrix(loaded, slot, plan, out);
    if (image)
        return by_image(image, plan, out);
    BR_TRY(adapter_image_open(loaded, slot, &own));
    const br_status status = by_image(own, plan, out);
    adapter_image_close(own);
    return status;
}

br_status live_digest_opened(const br_loaded *loaded, adapter_image *image, int32_t name, br_digest *out) {
    lora_scale *plan;
    BR_TRY(br_mem_alloc((void **)&plan, (size_t)lora_map_count(&loaded->config) * sizeof *plan, "a plan of an adapter"));
    lora_plan_of(loaded->adapters, &loaded->config, name, plan);
    br_status status = live_digest(loaded, image, name * (loaded->n_way > 1 ? loaded->n_way : 1), plan, out);
    br_mem_free(plan);
    return status;
}
