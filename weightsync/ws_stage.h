/* ws_stage: the life of one adapter name: a new version comes in beside the live one, is checked whole, and takes its place.
 *
 * Layer: weightsync; includes base, device, weights (names), lora. A state machine over bytes: no file, no clock, no thread, no tensor op.
 * Values go on to a target as soon as a tensor is whole, into memory that no forward reads until the commit; a refused call before the
 * commit drops the version that was coming in and leaves the live one as it is. How many sequences run is told by the caller.
 *
 *              idle                 receiving        prepared               draining
 *   begin      checked; COMMITTED   refused          refused                BUSY
 *              when already live
 *   chunk      refused              checked          refused                refused
 *   end        refused              checked          refused                refused
 *   commit     COMMITTED when       refused          COMMITTED, DRAINING    COMMITTED, DRAINING
 *              already live                          while some must end    while some must end
 *   abort      nothing to do        idle             idle                   idle
 *
 * A refused chunk or end in `receiving` leads to idle, every other refusal leaves the state as it is. */
#ifndef WS_STAGE_H
#define WS_STAGE_H

#include "bitroll.h"
#include "device_view.h"
#include "ws_manifest.h"
#include "ws_seen.h"

/* Where values go. All may be told of any map of the config. Their errors drop the version. */
typedef struct ws_target {
    void *context;
    /* A version of this plan (n_map) comes in; what is not a value of it is seen to here, s too. A failure leaves the stage idle. NULL: scale
     * is told of each s, and put of the maps that this version leaves alone but an earlier one in its place did not. */
    br_status (*begin)(void *context, int32_t way, const lora_scale *plan);
    /* A whole matrix, row-major; NULL: zeros, tensor->rank is 0 then. way: which of the two places of the name. stays 1: value is as it
     * is until flush; else it is read before put returns. seen: who is told what lies there; nobody where there is no flush. */
    br_status (*put)(void *context, int32_t way, const ws_tensor *tensor, const uint16_t *value, int32_t stays, const ws_seen *seen);
    br_status (*scale)(void *context, int32_t way, const ws_tensor *tensor, const lora_scale *scale);
    /* All that was put is in its place, and what lies there was told. NULL: put is done at once, and the stage has looked at
     * the values itself, in the host's memory. */
    br_status (*flush)(void *context);
} ws_target;

typedef struct ws_stage ws_stage;

/* Everything is allocated here. name is the caller's. live: the plan that way 0 holds as version 0; NULL: it holds nothing, and the
 * first version is 0. next: what comes in unless said otherwise; rank_max: of any plan to come. */
typedef struct ws_options {
    const char *name;
    const br_config *config;
    int32_t rank_max;
    const lora_scale *live, *next;
    br_digest live_digest;
    ws_target target;
} ws_options;
br_status ws_open(const ws_options *options, ws_stage **out);
void ws_close(ws_stage *stage); /* NULL is a no-op */

/* Another manifest for what is to come. Idle only. BR_E_LIMIT when a rank is above rank_max. */
br_status ws_define(ws_stage *stage, const lora_scale *plan);
const ws_manifest *ws_manifest_of(const ws_stage *stage);

/* n_old: sequences on the way that is not live. flags: BR_SWAP_INITIAL, BR_SWAP_RESYNC. BR_E_ARG: refused; BR_E_LIMIT: busy. */
br_status ws_begin(ws_stage *stage, int64_t version, uint32_t flags, int32_t n_old, br_swap_answer *answer);
/* Tensors come in any order, one after the other, each in chunks of rising offset without gaps. */
br_status ws_chunk(ws_stage *stage, int64_t tensor, uint64_t offset, const void *bytes, size_t n);
/* A whole tensor at once, whose value is as it is until the end was answered; where the target has flush, not only in the host's memory. */
br_status ws_whole(ws_stage *stage, int64_t tensor, const uint16_t *value);
/* The same of a value that a sender says lies at this offset of a block. BR_E_FORMAT: it leaves the block, or is not 2-byte aligned. */
br_status ws_inside(ws_stage *stage, int64_t tensor, const void *block, size_t block_bytes, uint64_t offset);
br_status ws_end(ws_stage *stage, const br_digest *expected); /* NULL: any */
/* n_wait: sequences that have to end first. COMMITTED: the way flips with this call, if it was not this version before. */
br_status ws_commit(ws_stage *stage, int64_t version, int32_t n_wait, br_swap_answer *answer);
void ws_abort(ws_stage *stage);

typedef struct ws_status {
    br_swap_state state;
    int32_t live_way;
    int64_t live_version, version; /* -1: none; version: coming in */
    br_digest live_digest, digest; /* digest: from prepared on */
    int64_t n_tensor, n_whole;
} ws_status;
ws_status ws_status_of(const ws_stage *stage);
const lora_scale *ws_live_plan(const ws_stage *stage); /* (n_map) */

#endif
