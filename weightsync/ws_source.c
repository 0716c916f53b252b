/* Sources of whole versions; see ws_source.h. */
#include "ws_source.h"

#include "br_mem.h"

/* Tensor i of a loaded adapter; a generated one is made in room (of the largest tensor). */
static const uint16_t *value_of(const lora_set *set, const ws_tensor *t, uint16_t *room) {
    const lora_pair pair = lora_pair_of(set, 0, t->cls, t->layer, t->expert);
    const bi_weightgen *gen = t->is_b ? pair.gen_b : pair.gen_a;
    if (!gen)
        return t->is_b ? pair.b : pair.a;
    bi_weightgen_fill_bf16(gen, 0, room, (size_t)t->n_row * (size_t)t->n_col);
    return room;
}

static br_status feed_set(ws_stage *stage, const lora_set *set) {
    const ws_manifest *manifest = ws_manifest_of(stage);
    const int generated = lora_is_generated(set, 0);
    const br_digest digest = lora_digest(set, 0);
    uint16_t *room = NULL;
    uint64_t most = 0;
    br_status status = BR_OK;
    for (int64_t i = 0; i < manifest->n_tensor && generated; i++) {
        const ws_tensor t = ws_manifest_at(manifest, i);
        most = ws_tensor_bytes(&t) > most ? ws_tensor_bytes(&t) : most;
    }
    BR_TRY_GOTO(br_mem_alloc((void **)&room, most, "a tensor that is made"), exit);
    for (int64_t i = 0; i < manifest->n_tensor; i++) {
        const ws_tensor t = ws_manifest_at(manifest, i);
        const uint16_t *value = value_of(set, &t, room);
        BR_TRY_GOTO(value == room ? ws_chunk(stage, i, 0, value, ws_tensor_bytes(&t)) : ws_whole(stage, i, value), exit);
    }
    status = ws_end(stage, generated ? NULL : &digest); /* the digest of recipes is another one */
exit:
    br_mem_free(room);
    if (status != BR_OK)
        ws_abort(stage);
    return status;
}

static br_status define_from(ws_stage *stage, const lora_set *set) {
    const ws_manifest *manifest = ws_manifest_of(stage);
    lora_scale *plan;
    BR_TRY(br_mem_alloc((void **)&plan, (size_t)manifest->n_map * sizeof *plan, "a plan of an adapter"));
    lora_plan_of(set, manifest->config, 0, plan);
    br_status status = ws_define(stage, plan);
    br_mem_free(plan);
    return status;
}

br_status ws_from_folder(ws_stage *stage, const char *name, const char *dir, int64_t version, uint32_t flags, int32_t n_old, br_swap_answer *answer) {
    br_status status;
    lora_set *set = NULL;
    const br_adapter_source source = {.name = name, .dir = dir};
    if (ws_status_of(stage).state == BR_SWAP_DRAINING)
        return ws_begin(stage, version, flags, n_old, answer); /* busy */
    *answer = BR_SWAP_REFUSED;
    BR_TRY_GOTO(lora_open(ws_manifest_of(stage)->config, &source, 1, (flags & BR_SWAP_INITIAL) != 0, &set), exit);
    BR_TRY_GOTO(define_from(stage, set), exit);
    BR_TRY_GOTO(ws_begin(stage, version, flags, n_old, answer), exit);
    if (*answer == BR_SWAP_DONE)
        status = feed_set(stage, set);
exit:
    lora_close(set);
    if (status != BR_OK && *answer == BR_SWAP_DONE)
        *answer = BR_SWAP_REFUSED;
    return status;
}

br_status ws_from_memory(ws_stage *stage, const uint16_t *const *value, int64_t n_tensor, const br_digest *expected, int64_t version,
                         uint32_t flags, int32_t n_old, br_swap_answer *answer) {
    const ws_manifest *manifest = ws_manifest_of(stage);
    *answer = BR_SWAP_REFUSED;
    if (n_tensor != manifest->n_tensor)
        return br_fail(BR_E_ARG, "%lld tensors: expected the %lld of the manifest", (long long)n_tensor, (long long)manifest->n_tensor);
    BR_TRY(ws_begin(stage, version, flags, n_old, answer));
    if (*answer != BR_SWAP_DONE)
        return BR_OK;
    *answer = BR_SWAP_REFUSED;
    for (int64_t i = 0; i < n_tensor; i++)
        if (!value[i])
            return ws_whole(stage, i, NULL); /* refused: the caller's first, not the first on its way */
    for (int64_t k = 0; k < n_tensor; k++)
        BR_TRY(ws_whole(stage, manifest->order[k], value[manifest->order[k]]));
    BR_TRY(ws_end(stage, expected));
    *answer = BR_SWAP_DONE;
    return BR_OK;
}
