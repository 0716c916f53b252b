/* br_weights: the checkpoint as one table of typed tensors, each known by (class, layer, expert).
 *
 * Layer: weights; includes base and io's safetensors reader. Owns the maps of the shards; tensor data point into them, read
 * only, until br_weights_close. Every tensor that the config asks for is present with its shape and an allowed dtype, no
 * tensor of the text model is unknown, none comes twice: else BR_E_FORMAT naming the tensor, the file, what was expected,
 * and for unknown or missing ones the nearest names. Vision tensors ("vision_tower.", "mm_projector.",
 * "multi_modal_projector.") are counted and skipped. Shards are those of model.safetensors.index.json, which must agree with
 * them, or without that file the one model.safetensors. Opening reads headers only: the shards may be sparse files that hold
 * nothing else.
 * A generated checkpoint has recipes in place of data; its table looks the same and nothing of its size is ever read. One whose data come
 * from memory has room for them (br_weights_like). */
#ifndef BR_WEIGHTS_H
#define BR_WEIGHTS_H

#include "bi_weightgen.h"
#include "br_config.h"
#include "br_hash.h"
#include "br_status.h"

typedef enum br_dtype { BR_DTYPE_BF16, BR_DTYPE_F32, BR_DTYPE_U8, BR_DTYPE_F16, BR_DTYPE_OTHER } br_dtype;

/* Linear maps come first: these can carry an adapter (all but the router and the indexer). */
typedef enum br_class {
    BR_W_KDA_Q, BR_W_KDA_K, BR_W_KDA_V, BR_W_KDA_G, BR_W_KDA_G_A, BR_W_KDA_G_B, BR_W_KDA_F_A, BR_W_KDA_F_B, BR_W_KDA_B,
    BR_W_KDA_O,
    BR_W_MLA_Q, BR_W_MLA_Q_A, BR_W_MLA_Q_B, BR_W_MLA_KV_A, BR_W_MLA_KV_B, BR_W_MLA_G, BR_W_MLA_O,
    BR_W_MLP_GATE, BR_W_MLP_UP, BR_W_MLP_DOWN,          /* dense MLP */
    BR_W_SHARED_GATE, BR_W_SHARED_UP, BR_W_SHARED_DOWN, /* shared experts */
    BR_W_LATENT_DOWN, BR_W_LATENT_UP,                   /* routed_expert_{down,up}_proj */
    BR_W_EXPERT_W1, BR_W_EXPERT_W3, BR_W_EXPERT_W2,     /* gate, up, down; MXFP4: the packed codes */
    BR_CLASS_LORA_END,
    BR_W_EXPERT_W1_SCALE = BR_CLASS_LORA_END, BR_W_EXPERT_W3_SCALE, BR_W_EXPERT_W2_SCALE,
    BR_W_ROUTER, BR_W_INDEX_Q, BR_W_INDEX_K, BR_W_INDEX_WEIGHT,
    BR_W_EMBED, BR_W_HEAD,
    BR_W_KDA_CONV_Q, BR_W_KDA_CONV_K, BR_W_KDA_CONV_V, BR_W_KDA_A_LOG, BR_W_KDA_DT_BIAS, BR_W_KDA_O_NORM,
    BR_W_MLA_Q_NORM, BR_W_MLA_KV_NORM, BR_W_INDEX_K_NORM, BR_W_INDEX_K_NORM_BIAS, /* the bias is optional */
    BR_W_ROUTER_BIAS, BR_W_LATENT_NORM,
    BR_W_INPUT_NORM, BR_W_POST_NORM, BR_W_FINAL_NORM,
    BR_W_ATTN_RES_NORM, BR_W_ATTN_RES_PROJ, BR_W_MLP_RES_NORM, BR_W_MLP_RES_PROJ, BR_W_OUT_RES_NORM, BR_W_OUT_RES_PROJ,
    BR_CLASS_COUNT
} br_class;

enum { BR_NAME_BYTES = 160 };

typedef struct br_tensor {
    br_class cls;
    int32_t layer, expert; /* -1: not of a layer, not of an expert */
    br_dtype dtype;
    int32_t n_dim;
    int64_t dim[4];
    const void *data; /* row-major, as in the file; may be unaligned. NULL when generated */
    size_t n_byte;
    const bi_weightgen *gen; /* how a generated one is made (br_tensor_make), else NULL */
    uint64_t n_drawn;        /* elements made by gen; zeros follow */
    const char *name; /* as in the file */
    int32_t shard;
} br_tensor;

typedef struct br_weights br_weights;

br_status br_weights_open(const char *dir, const br_config *config, br_weights **out);
void br_weights_close(br_weights *weights); /* NULL is a no-op */
/* Every tensor of the config, optional ones too, made by recipe. Told of a tensor's class, place, dims and name, `draw` fills its
 * dtype, n_drawn and *gen. origin: what to say about the checkpoint; identity: digest of what the recipes came from. */
typedef void (*br_tensor_draw)(void *context, br_tensor *tensor, bi_weightgen *gen);
br_status br_weights_generate(const br_config *config, const char *origin, br_digest identity, br_tensor_draw draw, void *context,
                              br_weights **out);
/* The same tensors by name, dtype and shape, whose data are to come from memory: the room for them, zeroed, is taken and dropped. A table
 * without room has no data. */
br_status br_weights_like(const br_weights *weights, br_weights **out);
br_status br_weights_take_room(br_weights *weights);
void br_weights_drop_room(br_weights *weights); /* without room a no-op */
unsigned char *br_weights_room(const br_weights *weights, int64_t i); /* of tensor i, (n_byte) */
const char *br_weights_origin(const br_weights *weights); /* NULL: read from files */
const br_config *br_weights_config(const br_weights *weights);
int64_t br_weights_count(const br_weights *weights);
int64_t br_weights_skipped(const br_weights *weights); /* vision tensors */
int32_t br_weights_shard_count(const br_weights *weights);
const br_tensor *br_weights_at(const br_weights *weights, int64_t i); /* sorted by (class, layer, expert) */
const br_tensor *br_weights_find(const br_weights *weights, br_class cls, int32_t layer, int32_t expert); /* NULL: absent */

/* Bytes offset .. offset + n - 1 of a generated tensor's data, as `init` would write them; both whole elements. */
void br_tensor_make(const br_tensor *tensor, uint64_t offset, unsigned char *bytes, size_t n);

/* The data, apart from opening because a checkpoint of headers has none: BR_E_FORMAT naming the tensor and element when a
 * bf16 or f32 value is NaN or Inf, a scale byte of MXFP4 is 253..255 (no bf16 number, N-FP4), or an entry of A_log past the
 * heads is not zero. Reads every byte. Recipes need no check. */
br_status br_weights_check_data(const br_weights *weights);
/* Digest of name, dtype, shape and bytes; the root is the Merkle root over tensors sorted by name. The name counts without
 * "language_model." and ".base_layer", so that a checkpoint renamed by a wrapper keeps its digest. Reads every byte.
 * Of a generated tensor the recipe (key, kind, numbers, n_drawn) stands for the bytes, and the root is chained to the identity of
 * the whole; so a generated checkpoint never has the digest of the files that hold the same bytes. */
br_digest br_tensor_digest(const br_tensor *tensor);
br_digest br_weights_digest(const br_weights *weights);
/* One tensor at a time in the order of the root, for lists of digests. */
typedef void (*br_tensor_seen)(void *context, const br_tensor *tensor, br_digest digest);
br_digest br_weights_digest_each(const br_weights *weights, br_tensor_seen seen, void *context);

/* For `inspect`: opens also when tensors are unknown or missing, and lists them. Everything else is refused as in open. */
br_status br_weights_survey(const char *dir, const br_config *config, br_weights **out);
int64_t br_weights_unknown_count(const br_weights *weights);
const char *br_weights_unknown_at(const br_weights *weights, int64_t i);
int64_t br_weights_missing_count(const br_weights *weights);
void br_weights_missing_at(const br_weights *weights, int64_t i, char name[BR_NAME_BYTES]);
/* The sentence of br_weights_open about unknown and missing tensors with nearest names; BR_OK when there are none. */
br_status br_weights_complete(const br_weights *weights);

/* ---- names: one table, used by the loader, `inspect`, init and adapters ----------------------------------------------- */

typedef struct br_expect {
    br_class cls;
    int32_t layer, expert;
    int32_t n_dim;
    int64_t dim[4]; /* A_log: as published, padded to a multiple of 128 in K3 and K3.1; zeros follow the heads */
    int32_t optional;
    uint32_t dtypes; /* bit (1 << br_dtype) for each allowed */
} br_expect;

const char *br_class_name(br_class cls);
/* The file's name of a tensor for this config ("language_model." prefix for K3 and K3.1). */
void br_weight_name(const br_config *config, br_class cls, int32_t layer, int32_t expert, char name[BR_NAME_BYTES]);
/* Walks every tensor the config asks for, in class, layer, expert order; i from 0; returns 0 past the end. */
int br_weight_expect(const br_config *config, int64_t i, br_expect *out);
int64_t br_weight_expect_count(const br_config *config);
/* The i of br_weight_expect; -1 when the config asks for no such tensor. */
int64_t br_weight_slot(const br_config *config, br_class cls, int32_t layer, int32_t expert);
/* The reverse of br_weight_name, with or without "language_model." and ".base_layer"; 0 when the name is not one of this
 * config's. */
int br_weight_parse(const br_config *config, const char *name, size_t n, br_class *cls, int32_t *layer, int32_t *expert);
/* A name without "language_model." and ".base_layer" parts; 0 when it is too long to be a tensor of ours. */
int br_weight_plain_name(const char *name, size_t n, char plain[BR_NAME_BYTES]);
/* (out, in) of a linear class; 0 when the config has no such map in that layer. */
int br_linear_shape(const br_config *config, br_class cls, int32_t layer, int32_t *n_out, int32_t *n_in);

#endif
