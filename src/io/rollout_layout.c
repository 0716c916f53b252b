/* The table of a rollout file's datasets and attributes; see rollout_layout.h. Layer: io. */
#include "rollout_layout.h"
#include "br_mem.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEQ(path, type, width, packed, field) {path, type, width, 0, packed, offsetof(rollout_seq, field)}
#define TOK(path, type, width, field) {path, type, width, 1, 1, offsetof(rollout_seq, field)}

const rollout_column rollout_columns[ROLLOUT_COLUMN_COUNT] = {
    [ROLLOUT_COL_OFFSET] = {"/seq/offset", ROLLOUT_I64, 1, 0, 1, ROLLOUT_NO_FIELD},
    [ROLLOUT_COL_CHAIN] = {"/seq/chain", ROLLOUT_U64, 2, 0, 0, ROLLOUT_NO_FIELD},
    [ROLLOUT_COL_UID] = SEQ("/seq/uid", ROLLOUT_TEXT, ROLLOUT_UID_BYTES, 1, uid),
    [ROLLOUT_COL_PROMPT_INDEX] = SEQ("/seq/prompt_index", ROLLOUT_U32, 1, 1, prompt_index),
    [ROLLOUT_COL_SAMPLE] = SEQ("/seq/sample", ROLLOUT_U32, 1, 1, sample),
    [ROLLOUT_COL_SEED] = SEQ("/seq/seed", ROLLOUT_U64, 1, 1, seed),
    [ROLLOUT_COL_ADAPTER] = SEQ("/seq/adapter_name", ROLLOUT_TEXT, ROLLOUT_NAME_BYTES, 1, adapter),
    [ROLLOUT_COL_ADAPTER_DIGEST] = SEQ("/seq/adapter_digest", ROLLOUT_U64, 2, 0, adapter_digest),
    [ROLLOUT_COL_TEMPERATURE] = SEQ("/seq/temperature", ROLLOUT_F32, 1, 1, temperature),
    [ROLLOUT_COL_MIN_P] = SEQ("/seq/min_p", ROLLOUT_F32, 1, 1, min_p),
    [ROLLOUT_COL_TOP_P] = SEQ("/seq/top_p", ROLLOUT_F64, 1, 1, top_p),
    [ROLLOUT_COL_TOP_K] = SEQ("/seq/top_k", ROLLOUT_I32, 1, 1, top_k),
    [ROLLOUT_COL_MAX_NEW] = SEQ("/seq/max_new", ROLLOUT_I32, 1, 1, max_new),
    [ROLLOUT_COL_MIN_NEW] = SEQ("/seq/min_new", ROLLOUT_I32, 1, 1, min_new),
    [ROLLOUT_COL_IGNORE_EOS] = SEQ("/seq/ignore_eos", ROLLOUT_I32, 1, 1, ignore_eos),
    [ROLLOUT_COL_N_STOP] = SEQ("/seq/n_stop", ROLLOUT_I32, 1, 1, n_stop),
    [ROLLOUT_COL_STOP_TOKEN] = SEQ("/seq/stop_token", ROLLOUT_I32, BR_STOP_MAX, 1, stop_token),
    [ROLLOUT_COL_PROMPT_LEN] = SEQ("/seq/prompt_len", ROLLOUT_I32, 1, 1, prompt_len),
    [ROLLOUT_COL_STATUS] = SEQ("/seq/status", ROLLOUT_U8, 1, 1, status),
    [ROLLOUT_COL_STOP] = SEQ("/seq/stop", ROLLOUT_U8, 1, 1, stop),
    [ROLLOUT_COL_ERROR] = SEQ("/seq/error_code", ROLLOUT_I32, 1, 1, error),
    [ROLLOUT_COL_PART] = SEQ("/seq/part_digest", ROLLOUT_U64, ROLLOUT_PART_COUNT, 0, part),
    [ROLLOUT_COL_RECEIPT] = SEQ("/seq/receipt", ROLLOUT_U64, 2, 0, receipt),
    [ROLLOUT_COL_TOKEN] = TOK("/tokens/id", ROLLOUT_I32, 1, token),
    [ROLLOUT_COL_MASK] = TOK("/tokens/mask", ROLLOUT_U8, 1, mask),
    [ROLLOUT_COL_LOGPROB] = TOK("/tokens/logprob", ROLLOUT_F32, 1, logprob),
    [ROLLOUT_COL_LOGPROB_RAW] = TOK("/tokens/logprob_raw", ROLLOUT_F32, 1, logprob_raw),
    [ROLLOUT_COL_LOGPROB_KEPT] = TOK("/tokens/logprob_kept", ROLLOUT_F32, 1, logprob_kept),
    [ROLLOUT_COL_ENTROPY] = TOK("/tokens/entropy", ROLLOUT_F32, 1, entropy),
    [ROLLOUT_COL_TOP_TOKEN] = TOK("/tokens/top_id", ROLLOUT_I32, 0, top_token),
    [ROLLOUT_COL_TOP_LOGPROB] = TOK("/tokens/top_logprob", ROLLOUT_F32, 0, top_logprob),
};

_Static_assert(sizeof(br_digest) == 2 * sizeof(uint64_t), "a digest is a row of two words");

int rollout_column_present(int column, const rollout_meta *meta) {
    if (column == ROLLOUT_COL_ENTROPY)
        return meta->has_entropy;
    if (column == ROLLOUT_COL_TOP_TOKEN || column == ROLLOUT_COL_TOP_LOGPROB)
        return meta->n_top > 0;
    return 1;
}

int32_t rollout_column_width(int column, const rollout_meta *meta) {
    int32_t width = rollout_columns[column].width;
    return width ? width : meta->n_top;
}

int rollout_column_rank(int column) {
    return rollout_columns[column].type == ROLLOUT_TEXT || rollout_columns[column].width == 1 ? 1 : 2;
}

size_t rollout_column_row_bytes(int column, const rollout_meta *meta) {
    static const uint8_t element_bytes[] = {1, 4, 4, 8, 8, 4, 8, 1};
    return element_bytes[rollout_columns[column].type] * (size_t)rollout_column_width(column, meta);
}

int64_t rollout_column_rows(int column, int64_t n_seq, int64_t n_tok) {
    return rollout_columns[column].by_token ? n_tok : n_seq + (column == ROLLOUT_COL_OFFSET);
}

hid_t rollout_column_type(int column) {
    switch (rollout_columns[column].type) {
    case ROLLOUT_U8: return H5Tcopy(H5T_STD_U8LE);
    case ROLLOUT_I32: return H5Tcopy(H5T_STD_I32LE);
    case ROLLOUT_U32: return H5Tcopy(H5T_STD_U32LE);
    case ROLLOUT_I64: return H5Tcopy(H5T_STD_I64LE);
    case ROLLOUT_U64: return H5Tcopy(H5T_STD_U64LE);
    case ROLLOUT_F32: return H5Tcopy(H5T_IEEE_F32LE);
    case ROLLOUT_F64: return H5Tcopy(H5T_IEEE_F64LE);
    case ROLLOUT_TEXT: break;
    }
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, (size_t)rollout_columns[column].width);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    return type;
}

uint64_t rollout_commit_check(const uint64_t commit[ROLLOUT_COMMIT_WORDS]) {
    return br_hash_u64(commit, 3 * sizeof commit[0]);
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

void rollout_attribute_text(int i, const rollout_meta *meta, char text[ROLLOUT_TEXT_BYTES]) {
    const char *field = (const char *)meta + attributes[i].field;
    br_digest digest;
    int64_t number;
    switch (attributes[i].kind) {
    case ATTRIBUTE_TEXT:
        snprintf(text, ROLLOUT_TEXT_BYTES, "%s", field);
        break;
    case ATTRIBUTE_DIGEST:
        memcpy(&digest, field, sizeof digest);
        br_digest_text(digest, text);
        break;
    case ATTRIBUTE_I64:
        memcpy(&number, field, sizeof number);
        snprintf(text, ROLLOUT_TEXT_BYTES, "%" PRId64, number);
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
    char *field = (char *)meta + attributes[i].field, again[ROLLOUT_TEXT_BYTES];
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
    {"logprob_kind", "full_softmax_over_T"},
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
    char text[ROLLOUT_TEXT_BYTES];
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

/* ---- around HDF5 ------------------------------------------------------------------------------------------------------ */

rollout_scope rollout_scope_begin(void) {
    rollout_scope scope = {.phase = br_mem_exempt_begin()};
    H5Eget_auto2(H5E_DEFAULT, &scope.print, &scope.print_context);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return scope;
}

void rollout_scope_end(rollout_scope scope) {
    H5Eset_auto2(H5E_DEFAULT, scope.print, scope.print_context);
    br_mem_exempt_end(scope.phase);
}

static herr_t take_innermost(unsigned n, const H5E_error2_t *error, void *context) {
    if (n == 0 && error->desc)
        snprintf(context, 256, "%s", error->desc);
    return 0;
}

br_status rollout_h5_fail(br_status status, const char *path, const char *format, ...) {
    char doing[256], said[256] = "no reason given";
    va_list args;
    va_start(args, format);
    vsnprintf(doing, sizeof doing, format, args);
    va_end(args);
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_innermost, said);
    return br_fail(status, "%s: cannot %s: %s", path, doing, said);
}
