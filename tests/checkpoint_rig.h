/* checkpoint_rig: small checkpoints that tests write, spoil and write again, and shards of any size without their data.
 * A draft is a model folder in the test's own place: config.json, shards, index. Written without the product's writer: no
 * flush to disk, so that hundreds of spoiled checkpoints take a second. */
#ifndef CHECKPOINT_RIG_H
#define CHECKPOINT_RIG_H

#include "test_support.h"

#include "br_file.h"
#include "br_weights.h"
#include "safetensors.h"

#include <stdio.h>

/* The config of golden/configs/<model>.json. */
void rig_read_golden_config(const char *model, br_config *config);

/* A shard's header, grown tensor by tensor; an all-zero one is empty. */
typedef struct shard_text {
    char *header;
    size_t n, n_max;
    uint64_t n_data;
} shard_text;

void shard_add(shard_text *s, const char *name, const char *dtype, const int64_t *dim, int32_t n_dim);
/* Writes length and header and frees it; the file is left open at the first byte of data. */
FILE *shard_begin(const char *path, shard_text *s);
void rig_write_file(const char *path, const char *text, size_t n);

/* Two layers, one of each kind; the first config has every class of tensor but those of the second. */
extern const char TINY_K31[], TINY_LINEAR[];

enum { TENSOR_MAX = 128 };

typedef struct draft {
    br_config config;
    char name[TENSOR_MAX][BR_NAME_BYTES];
    st_out out[TENSOR_MAX];
    unsigned char *data[TENSOR_MAX];
    int shard[TENSOR_MAX], in_index[TENSOR_MAX]; /* in_index: shard that the index says, -1: not listed */
    int n, use_index, n_shard;
    char dir[BR_PATH_BYTES];
} draft;

draft *draft_new(const char *config, int use_index); /* every tensor of the config; two shards and an index, or one file */
void draft_free(draft *d);
int draft_find(const draft *d, const char *tail); /* the tensor whose name ends so */
int draft_add(draft *d, const char *name, const char *dtype, int32_t n_dim, const int64_t *dim);
void draft_remove(draft *d, int i);
void draft_resize(draft *d, int i, const char *dtype, int32_t n_dim, const int64_t *dim); /* with new data */
void draft_write(const draft *d);
br_status draft_status(const draft *d); /* writes, opens, checks all data, closes */
br_digest draft_digest(const draft *d);
void draft_write_text(const draft *d, const char *name, const char *text); /* any file of the folder */
void draft_drop(const draft *d, const char *name);

#define CHECK_SAYS(part) ck_assert_msg(strstr(br_last_error(), part) != NULL, "'%s' lacks '%s'", br_last_error(), part)

#endif
