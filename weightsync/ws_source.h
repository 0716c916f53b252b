/* ws_source: a whole version at once, from a PEFT folder or from memory of this process.
 *
 * Layer: weightsync; includes base, lora. Both are begin, chunks and end of ws_stage.h, with its answers: after BR_OK and BR_SWAP_DONE the
 * version is prepared, after an error nothing is. */
#ifndef WS_SOURCE_H
#define WS_SOURCE_H

#include "ws_stage.h"

/* The manifest is that of the folder from then on. Errors besides those of ws_stage: as lora_open. */
br_status ws_from_folder(ws_stage *stage, const char *name, const char *dir, int64_t version, uint32_t flags, int32_t n_old, br_swap_answer *answer);
/* value (n_tensor) of the manifest, 2-byte aligned, read before the call returns; where it may lie: see ws_whole. expected NULL: nothing
 * travelled, any digest will do. */
br_status ws_from_memory(ws_stage *stage, const uint16_t *const *value, int64_t n_tensor, const br_digest *expected, int64_t version,
                         uint32_t flags, int32_t n_old, br_swap_answer *answer);

#endif
