/* checkpoint: a checkpoint's folder of either form: files of tensors, or generated.json, whose tensors are made from a seed.
 *
 * Layer: engine, which owns the table of recipes (init_presets.h). Everything behind br_weights sees one kind of table.
 * Errors besides those of br_weights_open and recipe_json_read: BR_E_FORMAT when tensors lie beside generated.json,
 * BR_E_UNSUPPORTED for a preset that this build does not have. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "br_weights.h"

br_status checkpoint_open(const char *dir, const br_config *config, br_weights **out);
br_status checkpoint_survey(const char *dir, const br_config *config, br_weights **out); /* as br_weights_survey */
/* What `init` writes: the preset's tensors, config being its shape. */
br_status checkpoint_generate(const char *preset, uint64_t seed, const br_config *config, br_weights **out);
/* BR_E_FORMAT when the folder has files of tensors. */
br_status checkpoint_check_no_files(const char *dir);

#endif
