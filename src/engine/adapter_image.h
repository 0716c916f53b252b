/* adapter_image: one adapter in the memory that forwards read: where its matrices lie, what has to surround them, and what its digest is
 * taken of. Layer: engine. Only where br_model_has_views.
 *
 * A slot does not move and a plan seldom changes, so all of this is laid out once and lies on the device: to read a version of thousands
 * of matrices back is one call. Everything is allocated at open. */
#ifndef ADAPTER_IMAGE_H
#define ADAPTER_IMAGE_H

#include "br_loaded.h"

typedef struct adapter_image adapter_image;

size_t adapter_image_bytes(const br_config *config); /* of the device's memory */
int32_t adapter_image_view_max(const br_config *config); /* views of all matrices of any plan */
br_status adapter_image_open(const br_loaded *loaded, int32_t slot, adapter_image **out);
void adapter_image_close(adapter_image *image); /* NULL is a no-op */

/* plan (lora_map_count): what the slot holds, or is going to. Nothing is done when it is the one at hand. */
br_status adapter_image_lay(adapter_image *image, const lora_scale *plan);
/* Writes what surrounds the matrices, where that was not done since the plan changed: zeros behind the rank, and s. In stream
 * order; no byte of the matrices themselves is written, so that these may come in meanwhile (ws_feed.h). */
br_status adapter_image_surround(adapter_image *image);
/* Where matrix A or B of a map lies: n views, 0 to 2, as br_model_adapter_views. */
const br_view *adapter_image_views(const adapter_image *image, int64_t map, int32_t is_b, int32_t *n);
/* Equal to lora_digest of the adapter exactly when every bit is as it was written. */
br_status adapter_image_digest(adapter_image *image, br_digest *out);

#endif
