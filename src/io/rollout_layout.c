/* The table of a rollout file's datasets and attributes; see rollout_layout.h. Layer: io. */
#include "rollout_layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEQ(path, type, width, packed, field) \
    {path, type, width, (type) != H5_TEXT && (width) != 1 ? 2 : 1, ROLLOUT_SPACE_SEQ, 0, packed, offsetof(rollout_seq, field)}
#define TOK(path, type, width, field) {path, type, width, (width) != 1 ? 2 : 1, ROLLOUT_SPACE_TOK, 1, 1, offsetof(rollout_seq, field)}

/* The width of alternatives is that of the file. */
static const h5_column columns[ROLLOUT_COLUMN_COUNT] = {
    [ROLLOUT_COL_OFFSET] = {"/seq/offset", H5_I64, 1, 1, ROLLOUT_SPACE_SEQ, 0, 1, H5_NO_FIELD},
    [ROLLOUT_COL_CHAIN] = {"/seq/chain", H5_U64, 2, 2, ROLLOUT_SPACE_SEQ, 0, 0, H5_NO_FIELD},
    [ROLLOUT_COL_UID] = SEQ("/seq/uid", H5_TEXT, ROLLOUT_UID_BYTES, 1, uid),
    [ROLLOUT_COL_PROMPT_INDEX] = SEQ("/seq/prompt_index", H5_U32, 1, 1, prompt_index),
    [ROLLOUT_COL_SAMPLE] = SEQ("/seq/sample", H5_U32, 1, 1, sample),
    [ROLLOUT_COL_SEED] = SEQ("/seq/seed", H5_U64, 1, 1, seed),
    [ROLLOUT_COL_ADAPTER] = SEQ("/seq/adapter_name", H5_TEXT, ROLLOUT_NAME_BYTES, 1, adapter),
    [ROLLOUT_COL_ADAPTER_DIGEST] = SEQ("/seq/adapter_digest", H5_U64, 2, 0, adapter_digest),
    [ROLLOUT_COL_TEMPERATURE] = SEQ("/seq/temperature", H5_F32, 1, 1, temperature),
    [ROLLOUT_COL_MIN_P] = SEQ("/seq/min_p", H5_F32, 1, 1, min_p),
    [ROLLOUT_COL_TOP_P] = SEQ("/seq/top_p", H5_F64, 1, 1, top_p),
    [ROLLOUT_COL_TOP_K] = SEQ("/seq/top_k", H5_I32, 1, 1, top_k),
    [ROLLOUT_COL_MAX_NEW] = SEQ("/seq/max_new", H5_I32, 1, 1, max_new),
    [ROLLOUT_COL_MIN_NEW] = SEQ("/seq/min_new", H5_I32, 1, 1, min_new),
    [ROLLOUT_COL_IGNORE_EOS] = SEQ("/seq/ignore_eos", H5_I32, 1, 1, ignore_eos),
    [ROLLOUT_COL_N_STOP] = SEQ("/seq/n_stop", H5_I32, 1, 1, n_stop),
    [ROLLOUT_COL_STOP_TOKEN] = SEQ("/seq/stop_token", H5_I32, BR_STOP_MAX, 1, stop_token),
    [ROLLOUT_COL_PROMPT_LEN] = SEQ("/seq/prompt_len", H5_I32, 1, 1, prompt_len),
    [ROLLOUT_COL_STATUS] = SEQ("/seq/status", H5_U8, 1, 1, status),
    [ROLLOUT_COL_STOP] = SEQ("/seq/stop", H5_U8, 1, 1, stop),
    [ROLLOUT_COL_ERROR] = SEQ("/seq/error_code", H5_I32, 1, 1, error),
    [ROLLOUT_COL_PART] = SEQ("/seq/part_digest", H5_U64, ROLLOUT_PART_COUNT, 0, part),
    [ROLLOUT_COL_RECEIPT] = SEQ("/seq/receipt", H5_U64, 2, 0, receipt),
    [ROLLOUT_COL_TOKEN] = TOK("/tokens/id", H5_I32, 1, token),
    [ROLLOUT_COL_MASK] = TOK("/tokens/mask", H5_U8, 1, mask),
    [ROLLOUT_COL_LOGPROB] = TOK("/tokens/logprob", H5_F32, 1, logprob),
    [ROLLOUT_COL_LOGPROB_RAW] = TOK("/tokens/logprob_raw", H5_F32, 1, logprob_raw),
    [ROLLOUT_COL_LOGPROB_KEPT] = TOK("/tokens/logprob_kept", H5_F32, 1, logprob_kept),
    [ROLLOUT_COL_ENTROPY] = TOK("/tokens/entropy", H5_F32, 1, entropy),
    [ROLLOUT_COL_TOP_TOKEN] = TOK("/tokens/top_id", H5_I32, 0, top_token),
    [ROLLOUT_COL_TOP_LOGPROB] = TOK("/tokens/top_logprob", H5_F32, 0, top_logprob),
};

_Static_assert(sizeof(br_digest) == 2 * sizeof(uint64_t), "a digest is a row of two words");

/* What a dump of another stack has; alternatives where it kept some. */
static int is_foreign_column(int column) {
    switch (column) {
    case ROLLOUT_COL_OFFSET:
    case ROLLOUT_COL_UID:
    case ROLLOUT_COL_SAMPLE:
    case ROLLOUT_COL_TEMPERATURE:
    case ROLLOUT_COL_PROMPT_LEN:
    case ROLLOUT_COL_TOKEN:
    case ROLLOUT_COL_MASK:
    case ROLLOUT_COL_LOGPROB:
    case ROLLOUT_COL_TOP_TOKEN:
    case ROLLOUT_COL_TOP_LOGPROB: return 1;
    default: return 0;
    }
}

void rollout_columns(const rollout_meta *meta, h5_column column[ROLLOUT_COLUMN_COUNT]) {
    memcpy(column, columns, sizeof columns);
    column[ROLLOUT_COL_ENTROPY].width = meta->has_entropy;
    column[ROLLOUT_COL_TOP_TOKEN].width = column[ROLLOUT_COL_TOP_LOGPROB].width = meta->n_top;
    for (int c = 0; c < ROLLOUT_COLUMN_COUNT; c++)
        if (meta->is_foreign && !is_foreign_column(c))
            column[c].width = 0;
}

int64_t rollout_column_rows(int column, int64_t n_seq, int64_t n_tok) {
    return columns[column].space == ROLLOUT_SPACE_TOK ? n_tok : n_seq + (column == ROLLOUT_COL_OFFSET);
}

/* ---- attributes ------------------------------------------------------------------------------------------------------- */

typedef enum attribute_kind { ATTRIBUTE_TEXT, ATTRIBUTE_DIGEST, ATTRIBUTE_I64 } attribute_kind;

static const struct attribute {
    const char *name;
    attribute_kind kind;
    size_t field, n_byte; /* in rollout_meta */
} attributes[ROLLOUT_ATTRIBUTE_COUNT] = {
#define ATTRIBUTE(name, kind, field) {name, kind, offsetof(rollout_meta, field), sizeof(((rollout_meta *)0)->field)}
    ATTRIBUTE("producer", ATTRIBUTE_TEXT, producer),
    ATTRIBUTE("producer_stamp", ATTRIBUTE_TEXT, producer_stamp),
    ATTRIBUTE("run_uid", ATTRIBUTE_DIGEST, run_uid),
    ATTRIBUTE("base_digest", ATTRIBUTE_DIGEST, weights_digest),
    ATTRIBUTE("contract_digest", ATTRIBUTE_DIGEST, contract_digest),
    ATTRIBUTE("model_config_digest", ATTRIBUTE_DIGEST, config_digest),
    ATTRIBUTE("device_name", ATTRIBUTE_TEXT, backend),
    ATTRIBUTE("engine_build", ATTRIBUTE_TEXT, engine_build),
    ATTRIBUTE("n_seq_closed", ATTRIBUTE_I64, n_seq_closed),
};

const char *rollout_attribute_name(int i) {
    return attributes[i].name;
}

void rollout_attribute_text(int i, const rollout_meta *meta, char text[H5_TEXT_BYTES]) {
    const char *field = (const char *)meta + attributes[i].field;
    br_digest digest;
    int64_t number;
    switch (attributes[i].kind) {
    case ATTRIBUTE_TEXT:
        snprintf(text, H5_TEXT_BYTES, "%s", field);
        break;
    case ATTRIBUTE_DIGEST:
        memcpy(&digest, field, sizeof digest);
        br_digest_text(digest, text);
        break;
    case ATTRIBUTE_I64:
        memcpy(&number, field, sizeof number);
        snprintf(text, H5_TEXT_BYTES, "%" PRId64, number);
        break;
    }
}

/* A value has one spelling: what prints differently was not one. */
int rollout_digest_parse(const char *text, br_digest *out) {
    char again[BR_DIGEST_TEXT_BYTES], half[17] = "";
    if (strlen(text) != BR_DIGEST_TEXT_BYTES - 1)
        return 0;
    memcpy(half, text, 16);
    *out = (br_digest){.lo = strtoull(text + 16, NULL, 16), .hi = strtoull(half, NULL, 16)};
    br_digest_text(*out, again);
    return strcmp(again, text) == 0;
}

int rollout_attribute_parse(int i, const char *text, rollout_meta *meta) {
    char *field = (char *)meta + attributes[i].field, again[H5_TEXT_BYTES];
    br_digest digest = {0, 0};
    int64_t number;
    switch (attributes[i].kind) {
    case ATTRIBUTE_TEXT:
        if (strlen(text) < attributes[i].n_byte)
            memcpy(field, text, strlen(text) + 1);
        break;
    case ATTRIBUTE_DIGEST:
        (void)rollout_digest_parse(text, &digest);
        memcpy(field, &digest, sizeof digest);
        break;
    case ATTRIBUTE_I64:
        number = strtoll(text, NULL, 10);
        memcpy(field, &number, sizeof number);
        break;
    }
    rollout_attribute_text(i, meta, again);
    return strcmp(again, text) == 0;
}

static const char *const fixed_attributes[ROLLOUT_FIXED_COUNT][2] = {
    {"format", ROLLOUT_FORMAT},
    {"format_version", "1"},
    {"logprob_kind", ROLLOUT_LOGPROB_KIND},
    {"sampler", "philox4x32-10"},
};
_Static_assert(ROLLOUT_FORMAT_VERSION == 1, "the table above spells the version");

const char *rollout_fixed_name(int i) {
    return fixed_attributes[i][0];
}

const char *rollout_fixed_text(int i) {
    return fixed_attributes[i][1];
}

br_digest rollout_meta_digest(const rollout_meta *meta) {
    br_hash_stream stream;
    char text[H5_TEXT_BYTES];
    int32_t optional[2] = {meta->has_entropy, meta->n_top};
    br_hash_begin(&stream);
    for (int i = 0; i < ROLLOUT_ATTRIBUTE_COUNT; i++) {
        rollout_attribute_text(i, meta, text);
        br_hash_add(&stream, text, strlen(text) + 1);
    }
    br_hash_add(&stream, optional, sizeof optional);
    return br_hash_end(&stream);
}

br_digest rollout_chain_first(const rollout_meta *meta) {
    br_digest bound[4] = {meta->run_uid, meta->weights_digest, meta->contract_digest, meta->config_digest};
    return br_hash_bytes(bound, sizeof bound);
}
