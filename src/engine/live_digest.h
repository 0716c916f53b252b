/* live_digest: the digest of an adapter out of the memory that forwards read. Layer: engine. Where that memory has views it is hashed where
 * it lies (adapter_image.h); else it is read back matrix by matrix, as a diagnosis, and allocates while it runs. */
#ifndef LIVE_DIGEST_H
#define LIVE_DIGEST_H

#include "adapter_image.h"

/* plan (lora_map_count): what the slot should hold. Equal to lora_digest of that adapter exactly when every bit is as it was written.
 * image: of that slot; NULL: one is opened, where it is needed. */
br_status live_digest(const br_loaded *loaded, adapter_image *image, int32_t slot, const lora_scale *plan, br_digest *out);
/* The same of what was opened with the engine, way 0 of a name. */
br_status live_digest_opened(const br_loaded *loaded, adapter_image *image, int32_t name, br_digest *out);

#endif
