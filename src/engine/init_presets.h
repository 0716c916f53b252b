/* init_presets: what `init` can make: the config.json of each preset, and how each class of tensor is filled.
 *
 * Layer: engine; includes weights (classes) and numeric's recipes. Data only: tables, no branch on a preset's name. */
#ifndef INIT_PRESETS_H
#define INIT_PRESETS_H

#include "bi_weightgen.h"
#include "br_weights.h"

typedef struct init_preset {
    const char *name, *config_json; /* the file's whole text */
    int32_t is_large;               /* 1: tens of gigabytes, made from a recipe and never written */
} init_preset;

int32_t init_preset_count(void);
const init_preset *init_preset_at(int32_t i);
const init_preset *init_preset_find(const char *name); /* NULL: no such preset */

/* How a class is drawn. Experts in MXFP4 take the spread only. */
typedef struct init_recipe {
    bi_weightgen_kind kind;
    float offset, spread;
    int32_t fan_in; /* 1: the spread is divided by the root of the last dimension */
    int32_t is_f32; /* 1: F32 in the file, as published */
} init_recipe;

init_recipe init_recipe_of(const br_config *config, br_class cls);

/* A format: alpha, rank, the quoted names of the targets. */
extern const char INIT_ADAPTER_CONFIG[];

enum { INIT_LORA_ALPHA_PER_RANK = 2, INIT_SHARD_COUNT = 3 };

#endif
