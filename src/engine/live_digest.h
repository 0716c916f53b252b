/* live_digest: the digest of an adapter out of the memory that forwards read. Layer: engine. Where that memory has views it is hashed where
 * it lies (ws_reader.h); else it is read back matrix by matrix, as a diagnosis, and allocates while it runs. */
#ifndef LIVE_DIGEST_H
#define LIVE_DIGEST_H

#include "br_loaded.h"
#include "ws_reader.h"

/* A reader for all matrices of one adapter; only where br_model_has_views. */
size_t live_reader_bytes(const br_loaded *loaded); /* of the device's memory */
br_status live_reader_open(const br_loaded *loaded, ws_reader **out);
int32_t live_view_max(const br_loaded *loaded); /* views of one adapter */

/* plan (lora_map_count): what the slot should hold. Equal to lora_digest of that adapter exactly when every bit is as it was written.
 * reader NULL: one is opened, where it is needed. */
br_status live_digest(const br_loaded *loaded, ws_reader *reader, int32_t slot, const lora_scale *plan, br_digest *out);
/* The same of what was opened with the engine, way 0 of a name. */
br_status live_digest_opened(const br_loaded *loaded, ws_reader *reader, int32_t name, br_digest *out);

#endif
