/* Swapping adapters of a running engine; see engine_swap.h. */
#include "engine_parts.h"
#include "live_digest.h"
#include "ws_feed.h"
#include "ws_source.h"

#include <stdio.h>
#include <string.h>

typedef struct swap_name {
    br_engine *engine;
    int32_t name;
    ws_stage *stage;
    adapter_image *image[BR_MODEL_WAYS]; /* NULL where the model's memory has no views, and so is the feed */
} swap_name;

/* Memory of another process that a version under way lies in. */
typedef struct shared_block {
    uint8_t handle[BR_IPC_HANDLE_BYTES];
    void *base;
    size_t bytes;
} shared_block;

enum { SHARED_MAX = 64, SLOT_GAPS = 64 }; /* bytes lost to alignment with a map */

struct engine_swap {
    int32_t n, n_shared;
    ws_feed *feed;
    shared_block shared[SHARED_MAX];
    uint64_t epoch; /* rises with each switch in flight: what such sequences leave in the prefix index, no new root leads to */
    swap_name name[LORA_ADAPTER_MAX];
};

/* ---- the model behind a stage ---------------------------------------------------------------------------------------------- */

static int32_t slot_of(const swap_name *s, int32_t way) {
    return s->name * BR_MODEL_WAYS + way;
}

static br_model_matrix matrix_of(const swap_name *s, int32_t way, const ws_tensor *t) {
    return (br_model_matrix){.slot = slot_of(s, way), .cls = t->cls, .layer = t->layer, .expert = t->expert, .is_b = t->is_b, .rank = t->rank};
}

static br_status put(void *context, int32_t way, const ws_tensor *tensor, const uint16_t *value, int32_t stays, const ws_seen *seen) {
    const swap_name *s = context;
    const br_model_matrix at = matrix_of(s, way, tensor);
    (void)stays;
    (void)seen;
    return br_model_adapter_write(s->engine->loaded.model, &at, value);
}

static br_status put_scale(void *context, int32_t way, const ws_tensor *tensor, const lora_scale *scale) {
    const swap_name *s = context;
    const br_model_matrix at = matrix_of(s, way, tensor);
    return br_model_adapter_scale(s->engine->loaded.model, &at, scale->alpha, scale->rslora);
}

/* ---- the same where the model's memory has views: by the feed ------------------------------------------------------------------ */

static br_status feed_begin(void *context, int32_t way, const lora_scale *plan) {
    const swap_name *s = context;
    BR_TRY(adapter_image_lay(s->image[way], plan));
    return adapter_image_surround(s->image[way]);
}

static br_status feed_put(void *context, int32_t way, const ws_tensor *tensor, const uint16_t *value, int32_t stays, const ws_seen *seen) {
    const swap_name *s = context;
    int32_t n;
    const br_view *view = adapter_image_views(s->image[way], tensor->map, tensor->is_b, &n);
    for (int32_t i = 0; i < n; i++)
        BR_TRY(ws_feed_write(s->engine->swap->feed, &view[i], value, stays, i ? NULL : seen));
    return BR_OK;
}

/* What other processes share. Nothing may still be reading it. */
static void let_go(br_engine *e) {
    for (engine_swap *swap = e->swap; swap->n_shared > 0; swap->n_shared--)
        br_device_unimport(e->loaded.device, swap->shared[swap->n_shared - 1].base);
}

static br_status feed_flush(void *context) {
    const swap_name *s = context;
    const br_status status = ws_feed_flush(s->engine->swap->feed);
    let_go(s->engine);
    return status;
}

static ws_target target_of(swap_name *s) {
    if (s->engine->swap->feed)
        return (ws_target){.context = s, .begin = feed_begin, .put = feed_put, .flush = feed_flush};
    return (ws_target){.context = s, .put = put, .scale = put_scale};
}

/* ---- open ------------------------------------------------------------------------------------------------------------------ */

/* Roots of a name: no other name and no earlier epoch has them. */
static void bind_root(br_engine *e, int32_t name, int32_t way) {
    engine_bind_root(e, name * BR_MODEL_WAYS + way, e->swap->epoch << 8 | (uint64_t)(name + 1));
}

void engine_swap_bind_roots(br_engine *e) {
    for (int32_t name = 0; name < e->swap->n; name++)
        bind_root(e, name, e->loaded.live_way[name]);
}

static br_status open_name(br_engine *e, int32_t name) {
    br_status status = BR_OK;
    br_loaded *loaded = &e->loaded;
    swap_name *s = &e->swap->name[name];
    lora_scale *plan;
    BR_TRY(br_mem_alloc((void **)&plan, (size_t)lora_map_count(&loaded->config) * sizeof *plan, "a plan of an adapter"));
    const int starts_empty = !e->options.adapter[name].dir;
    br_digest *digest = &loaded->slot_digest[name * BR_MODEL_WAYS];
    *s = (swap_name){.engine = e, .name = name};
    for (int32_t way = 0; way < BR_MODEL_WAYS && e->swap->feed; way++)
        BR_TRY_GOTO(adapter_image_open(loaded, slot_of(s, way), &s->image[way]), exit);
    if (starts_empty)
        lora_plan_all(&loaded->config, (lora_scale){.rank = e->options.swap_rank, .alpha = e->options.swap_alpha}, plan);
    else
        lora_plan_of(loaded->adapters, &loaded->config, name, plan);
    if (lora_is_generated(loaded->adapters, name)) /* its successors are known by their values */
        BR_TRY_GOTO(live_digest_opened(loaded, s->image[0], name, digest), exit);
    const ws_options options = {.name = lora_name(loaded->adapters, name), .config = &loaded->config, .rank_max = e->options.swap_rank,
                                .live = starts_empty ? NULL : plan, .next = plan, .live_digest = *digest,
                                .target = target_of(s)};
    BR_TRY_GOTO(ws_open(&options, &s->stage), exit);
    bind_root(e, name, 0);
exit:
    br_mem_free(plan);
    return status;
}

/* A slot of the feed: long enough that what is done once a slot is small beside its transfer, no longer than a whole version. */
static size_t slot_bytes(const br_loaded *loaded) {
    const size_t most = (size_t)48 << 20, largest = loaded->size.adapter_values * sizeof(uint16_t);
    size_t sum = 0;
    br_expect map;
    for (int64_t i = 0; i < lora_map_count(&loaded->config) && sum < most; i++) {
        int32_t n_out = 0, n_in = 0;
        br_weight_expect(&loaded->config, i, &map);
        br_linear_shape(&loaded->config, map.cls, map.layer, &n_out, &n_in);
        sum += (size_t)loaded->swap_rank * (size_t)(n_out + n_in) * sizeof(uint16_t) + SLOT_GAPS;
    }
    sum = sum < most ? sum : most;
    return sum > largest ? sum : largest;
}

void engine_swap_room(br_loaded *loaded) {
    if (loaded->swap_rank && loaded->backend.op->mat_row)
        br_room_add(&loaded->room, "swaps of adapters",
                    (size_t)(BR_MODEL_WAYS * lora_count(loaded->adapters)) * adapter_image_bytes(&loaded->config) +
                        ws_feed_bytes(slot_bytes(loaded), adapter_image_view_max(&loaded->config)));
}

static br_status open_feed(br_engine *e) {
    const br_loaded *loaded = &e->loaded;
    if (!br_model_has_views(loaded->model))
        return BR_OK;
    return ws_feed_open(loaded->device, loaded->pool, slot_bytes(loaded), adapter_image_view_max(&loaded->config), &e->swap->feed);
}

br_status engine_swap_open(br_engine *e) {
    BR_TRY(br_mem_alloc((void **)&e->swap, sizeof *e->swap, "adapters that are swapped"));
    BR_TRY(open_feed(e));
    for (int32_t name = 0; name < lora_count(e->loaded.adapters); name++) {
        e->swap->n++;
        BR_TRY(open_name(e, name));
    }
    return BR_OK;
}

void engine_swap_close(br_engine *e) {
    for (int32_t i = 0; e->swap && i < e->swap->n; i++) {
        ws_close(e->swap->name[i].stage);
        for (int32_t way = 0; way < BR_MODEL_WAYS; way++)
            adapter_image_close(e->swap->name[i].image[way]);
    }
    if (e->swap) {
        ws_feed_close(e->swap->feed);
        let_go(e);
    }
    br_mem_free(e->swap);
}

/* ---- requests -------------------------------------------------------------------------------------------------------------- */

/* Requests of a slot that have not ended. */
static int32_t held(const br_engine *e, int32_t slot) {
    int32_t n = 0;
    for (int32_t i = 0; i < e->n_request_max; i++)
        n += e->request[i].id && !e->request[i].ended && e->request[i].slot == slot;
    return n;
}

int64_t engine_swap_version(const br_engine *e, int32_t name) {
    return e->swap && name >= 0 ? ws_status_of(e->swap->name[name].stage).live_version : -1;
}

br_status engine_swap_admit(const br_engine *e, int32_t name) {
    if (!e->swap || name < 0)
        return BR_OK;
    const ws_status status = ws_status_of(e->swap->name[name].stage);
    if (status.state == BR_SWAP_DRAINING)
        return br_fail(BR_E_LIMIT, "adapter '%s' waits for %d sequences to end before version %lld goes live: poll first",
                       lora_name(e->loaded.adapters, name), held(e, slot_of(&e->swap->name[name], status.live_way)), (long long)status.version);
    return BR_OK;
}

/* Running on, under another version. */
static void switch_request(engine_request *r, int32_t slot, int64_t version) {
    br_versions *v = &r->versions;
    if (v->run[v->n_run - 1].n_tok > 0)
        v->n_run++;
    v->run[v->n_run - 1] = (br_version_run){.version = version};
    v->certified = 0;
    r->slot = slot;
}

static br_status check_runs(const br_engine *e, int32_t slot) {
    for (int32_t i = 0; i < e->n_request_max; i++) {
        const engine_request *r = &e->request[i];
        if (r->id && !r->ended && r->slot == slot && r->versions.n_run == BR_VERSION_RUN_MAX && r->versions.run[BR_VERSION_RUN_MAX - 1].n_tok > 0)
            return br_fail(BR_E_LIMIT, "request %llu ran under %d versions: expected no further one in flight", (unsigned long long)r->id,
                           BR_VERSION_RUN_MAX);
    }
    return BR_OK;
}

/* The stage has flipped: new requests run on the other slot, those of the old one go the way of the mode. */
static br_status flip(br_engine *e, swap_name *s, br_swap_mode mode) {
    const ws_status status = ws_status_of(s->stage);
    const int32_t slot = slot_of(s, status.live_way), old = slot_of(s, !status.live_way);
    e->swap->epoch += mode == BR_SWAP_IN_FLIGHT && held(e, old) > 0;
    e->loaded.live_way[s->name] = status.live_way;
    e->loaded.slot_digest[slot] = status.live_digest;
    bind_root(e, s->name, status.live_way);
    for (int32_t i = 0; i < e->n_request_max; i++) {
        engine_request *r = &e->request[i];
        if (!r->id || r->ended || r->slot != old)
            continue;
        if (mode == BR_SWAP_STOP)
            BR_TRY(br_abort(e, r->id));
        if (mode == BR_SWAP_IN_FLIGHT)
            switch_request(r, slot, status.live_version);
    }
    return BR_OK;
}

br_status engine_swap_settle(br_engine *e) {
    for (int32_t i = 0; e->swap && i < e->swap->n; i++) {
        swap_name *s = &e->swap->name[i];
        const ws_status status = ws_status_of(s->stage);
        br_swap_answer answer;
        if (status.state != BR_SWAP_DRAINING || held(e, slot_of(s, status.live_way)) > 0)
            continue;
        BR_TRY(ws_commit(s->stage, status.version, 0, &answer));
        BR_TRY(flip(e, s, BR_SWAP_DRAIN));
    }
    return BR_OK;
}

/* ---- the calls ------------------------------------------------------------------------------------------------------------- */

static br_status find(const br_engine *e, const char *adapter, swap_name **out) {
    int32_t name;
    *out = NULL;
    BR_TRY(br_loaded_name(&e->loaded, adapter, &name));
    if (name < 0)
        return br_fail(BR_E_NOT_FOUND, "the base is no adapter that can be swapped");
    if (!e->swap)
        return br_fail(BR_E_NOT_FOUND, "adapter '%s' cannot be swapped: the engine was opened without swap_rank", adapter);
    *out = &e->swap->name[name];
    return BR_OK;
}

static int32_t held_old(const swap_name *s) {
    return held(s->engine, slot_of(s, !ws_status_of(s->stage).live_way));
}

br_status br_swap_manifest(const br_engine *e, const char *adapter, int64_t *n_tensor, br_digest *digest) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    *n_tensor = ws_manifest_of(s->stage)->n_tensor;
    *digest = ws_manifest_of(s->stage)->digest;
    return BR_OK;
}

br_status br_swap_tensor_at(const br_engine *e, const char *adapter, int64_t tensor, br_swap_tensor *out) {
    swap_name *s;
    _Static_assert((int)BR_SWAP_NAME_BYTES == (int)BR_NAME_BYTES, "names have equal room");
    BR_TRY(find(e, adapter, &s));
    const ws_manifest *manifest = ws_manifest_of(s->stage);
    if (tensor < 0 || tensor >= manifest->n_tensor)
        return br_fail(BR_E_ARG, "tensor number %lld: expected 0 to %lld", (long long)tensor, (long long)manifest->n_tensor - 1);
    const ws_tensor t = ws_manifest_at(manifest, tensor);
    *out = (br_swap_tensor){.is_b = t.is_b, .n_row = t.n_row, .n_col = t.n_col, .expert = t.expert};
    ws_manifest_name(manifest, tensor, out->name);
    return BR_OK;
}

br_status br_swap_find(const br_engine *e, const char *adapter, const char *tensor_name, int64_t *tensor) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    return ws_manifest_find(ws_manifest_of(s->stage), tensor_name, tensor);
}

br_status br_swap_define(br_engine *e, const char *adapter, const char *json, size_t n) {
    swap_name *s;
    lora_scale *plan;
    BR_TRY(find(e, adapter, &s));
    BR_TRY(br_mem_alloc((void **)&plan, (size_t)ws_manifest_of(s->stage)->n_map * sizeof *plan, "a plan of an adapter"));
    br_status status = lora_plan_parse(&e->loaded.config, "adapter_config.json", json, n, plan);
    if (status == BR_OK)
        status = ws_define(s->stage, plan);
    br_mem_free(plan);
    return status;
}

br_status br_swap_begin(br_engine *e, const char *adapter, int64_t version, uint32_t flags, br_swap_answer *answer) {
    swap_name *s;
    *answer = BR_SWAP_REFUSED;
    BR_TRY(find(e, adapter, &s));
    return ws_begin(s->stage, version, flags, held_old(s), answer);
}

br_status br_swap_chunk(br_engine *e, const char *adapter, int64_t tensor, uint64_t offset, const void *bytes, size_t n) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    return ws_chunk(s->stage, tensor, offset, bytes, n);
}

/* A block that another process shares, opened once a version. */
static br_status share(br_engine *e, const uint8_t handle[BR_IPC_HANDLE_BYTES], shared_block *out) {
    engine_swap *swap = e->swap;
    for (int32_t i = 0; i < swap->n_shared; i++) {
        *out = swap->shared[i];
        if (memcmp(out->handle, handle, BR_IPC_HANDLE_BYTES) == 0)
            return BR_OK;
    }
    if (swap->n_shared == SHARED_MAX)
        BR_TRY(feed_flush(&swap->name[0]));
    memcpy(out->handle, handle, BR_IPC_HANDLE_BYTES);
    BR_TRY(br_device_import(e->loaded.device, handle, &out->base, &out->bytes));
    swap->shared[swap->n_shared++] = *out;
    return BR_OK;
}

int32_t br_swap_takes_ipc(const br_engine *e) {
    return e->swap && e->swap->feed && !br_device_is_host(e->loaded.device);
}

br_status br_swap_ipc(br_engine *e, const char *adapter, int64_t tensor, const br_ipc *from) {
    swap_name *s;
    shared_block block;
    BR_TRY(find(e, adapter, &s));
    if (ws_status_of(s->stage).state != BR_SWAP_RECEIVING)
        return ws_whole(s->stage, tensor, NULL); /* refuses it; what is prepared stays */
    const br_status status = share(e, from->handle, &block);
    if (status != BR_OK) {
        ws_abort(s->stage);
        return status;
    }
    return ws_inside(s->stage, tensor, block.base, block.bytes, from->offset);
}

br_status br_ipc_export(const void *gpu_memory, br_ipc *out) {
    return br_device_export(gpu_memory, out);
}

br_status br_swap_end(br_engine *e, const char *adapter, br_digest expected) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    return ws_end(s->stage, &expected);
}

br_status br_swap_commit(br_engine *e, const char *adapter, int64_t version, br_swap_mode mode, br_swap_answer *answer) {
    swap_name *s;
    *answer = BR_SWAP_REFUSED;
    BR_TRY(find(e, adapter, &s));
    if ((int)mode < BR_SWAP_DRAIN || mode > BR_SWAP_IN_FLIGHT)
        return br_fail(BR_E_ARG, "mode %d: expected one of br_swap_mode", (int)mode);
    const ws_status before = ws_status_of(s->stage);
    const int32_t live = slot_of(s, before.live_way);
    if (mode == BR_SWAP_IN_FLIGHT && before.state != BR_SWAP_IDLE)
        BR_TRY(check_runs(e, live));
    BR_TRY(ws_commit(s->stage, version, mode == BR_SWAP_DRAIN ? held(e, live) : 0, answer));
    if (*answer != BR_SWAP_COMMITTED || before.state == BR_SWAP_IDLE)
        return BR_OK;
    return flip(e, s, mode);
}

br_status br_swap_abort(br_engine *e, const char *adapter) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    ws_abort(s->stage);
    return BR_OK;
}

br_status br_swap_from_folder(br_engine *e, const char *adapter, const char *dir, int64_t version, uint32_t flags, br_swap_answer *answer) {
    swap_name *s;
    *answer = BR_SWAP_REFUSED;
    BR_TRY(find(e, adapter, &s));
    if (!dir)
        return br_fail(BR_E_ARG, "adapter '%s': no folder given", adapter);
    return ws_from_folder(s->stage, adapter, dir, version, flags, held_old(s), answer);
}

br_status br_swap_from_memory(br_engine *e, const char *adapter, const uint16_t *const *value, int64_t n_tensor, const br_digest *expected,
                              int64_t version, uint32_t flags, br_swap_answer *answer) {
    swap_name *s;
    *answer = BR_SWAP_REFUSED;
    BR_TRY(find(e, adapter, &s));
    return ws_from_memory(s->stage, value, n_tensor, expected, version, flags, held_old(s), answer);
}

br_status br_swap_status_of(const br_engine *e, const char *adapter, br_swap_status *out) {
    swap_name *s;
    BR_TRY(find(e, adapter, &s));
    const ws_status status = ws_status_of(s->stage);
    *out = (br_swap_status){.state = status.state, .live_version = status.live_version, .version = status.version,
                            .live_digest = status.live_digest, .digest = status.digest, .n_tensor = status.n_tensor, .n_whole = status.n_whole,
                            .n_live = held(e, slot_of(s, status.live_way)), .n_old = held_old(s)};
    return BR_OK;
}

br_status br_request_versions(const br_engine *e, uint64_t id, br_versions *out) {
    const engine_request *r = engine_find(e, id);
    if (!r)
        return br_fail(BR_E_NOT_FOUND, "request %llu is not held", (unsigned long long)id);
    *out = r->versions;
    return BR_OK;
}

br_status br_engine_adapter_live_digest(br_engine *e, const char *name, br_digest *out) {
    int32_t index;
    *out = (br_digest){0};
    BR_TRY(br_loaded_name(&e->loaded, name, &index));
    if (index < 0)
        return BR_OK;
    if (!e->swap)
        return live_digest_opened(&e->loaded, NULL, index, out);
    const ws_stage *stage = e->swap->name[index].stage;
    const ws_status status = ws_status_of(stage);
    if (status.live_version < 0)
        return BR_OK;
    return live_digest(&e->loaded, e->swap->name[index].image[status.live_way], index * BR_MODEL_WAYS + status.live_way, ws_live_plan(stage), out);
}
