/* br_loaded: a checkpoint with its adapters, packed and ready to run: what the rollout engine and the scorer both stand on.
 *
 * Layer: engine. Owns pool, device, backend, model and adapters; the checkpoint's files are closed again before open returns. */
#ifndef BR_LOADED_H
#define BR_LOADED_H

#include "br_model.h"
#include "br_room.h"

typedef struct br_loaded {
    br_config config;
    br_digest weights_digest, config_digest;
    lora_set *adapters; /* never NULL: may hold none */
    br_pool *pool;
    br_device *device;
    bi_backend backend;
    br_weights *weights;               /* from prepare to pack, else NULL */
    br_model_sizes size;
    br_room room;                      /* of the device */
    br_model *model;
    int32_t n_row_max, n_pos_max;
    int32_t swap_rank;                 /* 0: none */
    int32_t n_way;                     /* slots of an adapter name: BR_MODEL_WAYS when they can be swapped; 0 or 1: slot = name */
    int32_t live_way[LORA_ADAPTER_MAX]; /* by name */
    br_digest slot_digest[BR_MODEL_WAYS * LORA_ADAPTER_MAX]; /* with two ways: of what each slot holds */
} br_loaded;

/* n_row_max: rows of a step. n_pos_max: the longest sequence to come, cut to max_position_embeddings; whole: n_row_max is
 * raised so that it fits into one step. Errors as br_engine_open; *out is closed again on error. */
br_status br_loaded_open(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, int32_t whole, br_loaded *out);
/* The same in two parts: between them the owner adds to out->room what it will take of the device itself, so that too little memory is said, in
 * full, before the first weight is packed. */
br_status br_loaded_prepare(const br_engine_options *options, int32_t n_row_max, int32_t n_pos_max, int32_t whole, br_loaded *out);
br_status br_loaded_pack(br_loaded *loaded);
void br_loaded_close(br_loaded *loaded);
/* Another checkpoint of the same config, its data not looked at: BR_E_FORMAT when config.json is another. */
br_status br_loaded_open_like(const br_loaded *loaded, const char *dir, br_weights **out);
/* Its weights, which were checked; digest: theirs. As br_model_reload. */
br_status br_loaded_put(br_loaded *loaded, const br_weights *weights, br_digest digest, int32_t *changed);

/* The number of an adapter's name, -1 for NULL or "base". */
br_status br_loaded_name(const br_loaded *loaded, const char *adapter, int32_t *name);
/* The slot that new requests of a name run on; -1: base. */
static inline int32_t br_loaded_live_slot(const br_loaded *loaded, int32_t name) {
    return loaded->n_way > 1 && name >= 0 ? name * loaded->n_way + loaded->live_way[name] : name;
}
/* -1 for NULL or "base", else that slot; one that is empty is BR_E_NOT_FOUND; BR_E_NOT_FOUND names the adapter and those that are loaded. */
br_status br_loaded_slot(const br_loaded *loaded, const char *adapter, int32_t *slot);
/* BR_E_LIMIT when a sequence of n_tok has positions behind n_pos_max. */
br_status br_loaded_check_length(const br_loaded *loaded, int32_t n_tok);
br_digest br_loaded_adapter_digest(const br_loaded *loaded, int32_t slot); /* slot -1: 0, 0 */
/* Fills the digests and adapter names of a report. */
br_status br_loaded_report(const br_loaded *loaded, br_report *report);
/* The sentence and status of a row fault: which layer, stage and position held NaN or Inf. */
br_status br_loaded_fault(uint32_t code, int32_t position);

#endif
