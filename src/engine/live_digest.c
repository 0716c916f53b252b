/* Reading an adapter back; see live_digest.h. */
#include "live_digest.h"

#include "lora_file.h"
#include "lora_plan.h"

static br_model_matrix matrix_of(const br_expect *map, int32_t slot, const lora_scale *scale) {
    return (br_model_matrix){.slot = slot, .cls = map->cls, .layer = map->layer, .expert = map->expert, .rank = scale->rank};
}

/* A map without an adapter adds nothing, as long as its memory is what it should be. */
static void add_map(const br_config *config, const br_expect *map, const lora_scale *scale, const br_digest digest[2], int32_t whole,
                    br_hash_stream *stream) {
    char name[BR_NAME_BYTES];
    if (whole && !scale->rank)
        return;
    const size_t n = lora_module_name(config, map->cls, map->layer, map->expert, name);
    lora_digest_add(stream, name, n, scale, digest[0], digest[1]);
}

/* ---- matrix by matrix -------------------------------------------------------------------------------------------------------- */

/* Digests of A and B of one map; what is not intact gets a digest that no matrix has by itself. Returns in *whole whether both are. */
static br_status read_map(br_model_reader *reader, const br_config *config, br_model_matrix at, const lora_scale *scale, uint16_t *value,
                          br_digest digest[2], int32_t *whole) {
    int32_t n_out = 0, n_in = 0;
    *whole = 1;
    br_linear_shape(config, at.cls, at.layer, &n_out, &n_in);
    for (at.is_b = 0; at.is_b < 2; at.is_b++) {
        int32_t intact;
        BR_TRY(br_model_adapter_read(reader, &at, scale->alpha, scale->rslora, value, &intact));
        digest[at.is_b] = lora_digest_matrix(value, (int64_t)at.rank * (at.is_b ? n_out : n_in));
        if (!intact)
            digest[at.is_b] = br_hash_chain(digest[at.is_b], "torn", sizeof "torn");
        *whole &= intact;
    }
    return BR_OK;
}

static br_status read_maps(const br_loaded *loaded, int32_t slot, const lora_scale *plan, br_model_reader *reader, uint16_t *value, br_digest *out) {
    br_expect map;
    br_hash_stream stream;
    br_hash_begin(&stream);
    for (int64_t i = 0; br_weight_expect(&loaded->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        br_digest digest[2];
        int32_t whole;
        BR_TRY(read_map(reader, &loaded->config, matrix_of(&map, slot, &plan[i]), &plan[i], value, digest, &whole));
        add_map(&loaded->config, &map, &plan[i], digest, whole, &stream);
    }
    *out = br_hash_end(&stream);
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

/* ---- all at once, where they lie ------------------------------------------------------------------------------------------------- */

int32_t live_view_max(const br_loaded *loaded) {
    return 2 * (int32_t)lora_map_count(&loaded->config) + loaded->config.n_layer; /* an absorbed A lies there twice */
}

static int32_t owner_max(const br_loaded *loaded) {
    return 2 * (int32_t)lora_map_count(&loaded->config);
}

size_t live_reader_bytes(const br_loaded *loaded) {
    return ws_reader_bytes(live_view_max(loaded), owner_max(loaded));
}

br_status live_reader_open(const br_loaded *loaded, ws_reader **out) {
    return ws_reader_open(loaded->device, live_view_max(loaded), owner_max(loaded), out);
}

typedef struct check_context {
    ws_reader *reader;
    int32_t owner; /* 2 * map + is_b */
} check_context;

static br_status check_one(void *context, const br_fill *fill) {
    const check_context *c = context;
    br_fill owned = *fill;
    owned.owner = c->owner;
    return ws_reader_check(c->reader, &owned);
}

static br_status ask_matrix(const br_loaded *loaded, ws_reader *reader, int64_t i, const br_model_matrix *at, const lora_scale *scale) {
    check_context c = {.reader = reader, .owner = (int32_t)(2 * i) + at->is_b};
    br_view view[2];
    const int32_t n = br_model_adapter_views(loaded->model, at, view);
    for (int32_t k = 0; k < n; k++)
        ws_reader_see(reader, &view[k]);
    BR_TRY(br_model_adapter_room(loaded->model, at, check_one, &c));
    return at->is_b ? BR_OK : br_model_adapter_scales(loaded->model, at, scale->alpha, scale->rslora, check_one, &c);
}

/* The digest of one matrix out of n views of it, which have to agree. */
static br_digest digest_of(const br_seen *seen, int32_t n, uint32_t torn, int32_t *whole) {
    const br_digest digest = n ? seen->digest : lora_digest_matrix(NULL, 0);
    for (int32_t k = 1; k < n; k++)
        torn |= !br_digest_equal(digest, seen[k].digest);
    *whole &= !torn;
    return torn ? br_hash_chain(digest, "torn", sizeof "torn") : digest;
}

static br_digest put_together(const br_loaded *loaded, int32_t slot, const lora_scale *plan, const br_seen *seen, const uint32_t *torn) {
    br_expect map;
    br_hash_stream stream;
    br_hash_begin(&stream);
    for (int64_t i = 0; br_weight_expect(&loaded->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        br_model_matrix at = matrix_of(&map, slot, &plan[i]);
        br_digest digest[2];
        br_view view[2];
        int32_t whole = 1;
        for (at.is_b = 0; at.is_b < 2; at.is_b++) {
            const int32_t n = br_model_adapter_views(loaded->model, &at, view);
            digest[at.is_b] = digest_of(seen, n, torn[2 * i + at.is_b], &whole);
            seen += n;
        }
        add_map(&loaded->config, &map, &plan[i], digest, whole, &stream);
    }
    return br_hash_end(&stream);
}

static br_status by_views(const br_loaded *loaded, ws_reader *reader, int32_t slot, const lora_scale *plan, br_digest *out) {
    br_expect map;
    const br_seen *seen;
    const uint32_t *torn;
    ws_reader_begin(reader);
    for (int64_t i = 0; br_weight_expect(&loaded->config, i, &map) && map.cls < BR_CLASS_LORA_END; i++) {
        br_model_matrix at = matrix_of(&map, slot, &plan[i]);
        for (at.is_b = 0; at.is_b < 2; at.is_b++)
            BR_TRY(ask_matrix(loaded, reader, i, &at, &plan[i]));
    }
    BR_TRY(ws_reader_end(reader, &seen, &torn));
    *out = put_together(loaded, slot, plan, seen, torn);
    return BR_OK;
}

/* ---- either ------------------------------------------------------------------------------------------------------------------------- */

br_status live_digest(const br_loaded *loaded, ws_reader *reader, int32_t slot, const lora_scale *plan, br_digest *out) {
    ws_reader *own = NULL;
    if (!br_model_has_views(loaded->model))
        return by_matrix(loaded, slot, plan, out);
    if (reader)
        return by_views(loaded, reader, slot, plan, out);
    BR_TRY(live_reader_open(loaded, &own));
    const br_status status = by_views(loaded, own, slot, plan, out);
    ws_reader_close(own);
    return status;
}

br_status live_digest_opened(const br_loaded *loaded, ws_reader *reader, int32_t name, br_digest *out) {
    lora_scale *plan;
    BR_TRY(br_mem_alloc((void **)&plan, (size_t)lora_map_count(&loaded->config) * sizeof *plan, "a plan of an adapter"));
    lora_plan_of(loaded->adapters, &loaded->config, name, plan);
    br_status status = live_digest(loaded, reader, name * (loaded->n_way > 1 ? loaded->n_way : 1), plan, out);
    br_mem_free(plan);
    return status;
}
