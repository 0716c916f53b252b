/* The table of a ledger's datasets; see ledger_layout.h. Layer: io. */
#include "ledger_layout.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "what is chained is the memory of the structs");
_Static_assert(offsetof(ledger_run, link) == LEDGER_RUN_BYTES, "record 0 has no padding");
_Static_assert(offsetof(br_ledger_record, link) == LEDGER_RECORD_BYTES, "a record has no padding");
_Static_assert(sizeof(LEDGER_FORMAT) == sizeof(((ledger_run *)0)->format), "the name fills its place");

#define FIELD(path, type, width, space, packed, owner, field) \
    {path, type, width, (type) != H5_TEXT && (width) != 1 ? 2 : 1, space, 0, packed, offsetof(owner, field)}
#define RUN(name, type, width) FIELD("/run/" #name, type, width, LEDGER_SPACE_RUN, 0, ledger_run, name)
#define STEP(name, type, width) FIELD("/step/" #name, type, width, LEDGER_SPACE_STEP, 0, br_ledger_record, name)
#define SEQ(name, type, width) FIELD("/seq/" #name, type, width, LEDGER_SPACE_SEQ, 1, ledger_seq, name)
#define TOKENS(path, type, field) {path, type, 1, 1, LEDGER_SPACE_TOK, 1, 1, offsetof(ledger_seq, field)}

const h5_column ledger_columns[LEDGER_COLUMN_COUNT] = {
    [LEDGER_COL_CONFIG] = {"/run/config", H5_U8, 1, 1, LEDGER_SPACE_RUN, 1, 0, H5_NO_FIELD},
    [LEDGER_COL_SEQ_BEGIN] = {"/step/seq_begin", H5_I64, 1, 1, LEDGER_SPACE_STEP, 0, 1, H5_NO_FIELD},
    [LEDGER_COL_OFFSET] = {"/seq/offset", H5_I64, 1, 1, LEDGER_SPACE_SEQ, 0, 1, H5_NO_FIELD},
    [LEDGER_COL_ID] = TOKENS("/tokens/id", H5_I32, token),
    [LEDGER_COL_MASK] = TOKENS("/tokens/mask", H5_U8, mask),
    [LEDGER_COL_ARRAY + LEDGER_ROLLOUT] = TOKENS("/tokens/rollout", H5_F32, logprob[LEDGER_ROLLOUT]),
    [LEDGER_COL_ARRAY + LEDGER_AGAIN] = TOKENS("/tokens/again", H5_F32, logprob[LEDGER_AGAIN]),
    [LEDGER_COL_ARRAY + LEDGER_UPDATE] = TOKENS("/tokens/update", H5_F32, logprob[LEDGER_UPDATE]),
    [LEDGER_COL_FIELD] = RUN(contract, H5_U64, 2), RUN(base_rollout, H5_U64, 2), RUN(base_trainer, H5_U64, 2), RUN(config_digest, H5_U64, 2),
    RUN(n_config, H5_I64, 1), RUN(link, H5_U8, BR_LEDGER_LINK_BYTES), RUN(n_step_closed, H5_I64, 1),
    STEP(step, H5_I64, 1), STEP(version, H5_I64, 1), STEP(adapter_rollout, H5_U64, 2), STEP(adapter_trainer, H5_U64, 2),
    STEP(sequences, H5_U64, 2), STEP(tokens, H5_U64, 2), STEP(rollout, H5_U64, 2), STEP(again, H5_U64, 2), STEP(update, H5_U64, 2),
    STEP(n_seq, H5_I64, 1), STEP(n_tok, H5_I64, 1), STEP(n_compared, H5_I64, 1), STEP(n_differ, H5_I64, 1),
    STEP(n_differ_again, H5_I64, 1), STEP(n_differ_update, H5_I64, 1), STEP(first_seq, H5_I64, 1), STEP(first_pos, H5_I64, 1),
    STEP(k1, H5_F64, 1), STEP(k3, H5_F64, 1), STEP(reward_mean, H5_F64, 1), STEP(link, H5_U8, BR_LEDGER_LINK_BYTES),
    SEQ(uid, H5_TEXT, LEDGER_UID_BYTES), SEQ(sample, H5_U32, 1), SEQ(group, H5_I32, 1), SEQ(stop, H5_I32, 1), SEQ(temperature, H5_F32, 1),
    SEQ(version_begin, H5_I64, 1), SEQ(version_end, H5_I64, 1), SEQ(reward, H5_F64, 1), SEQ(advantage, H5_F64, 1),
    SEQ(prompt_len, H5_I32, 1), FIELD("/seq/leaf", H5_U64, 2 * LEDGER_LEAF_COUNT, LEDGER_SPACE_SEQ, 0, ledger_seq, leaf),
};

static const char *field_at(int32_t space, size_t at, size_t *in_row) {
    for (int c = LEDGER_COL_FIELD; c < LEDGER_COLUMN_COUNT; c++) {
        const h5_column *column = &ledger_columns[c];
        *in_row = at - column->field;
        if (column->space == space && at >= column->field && *in_row < h5_column_row_bytes(column))
            return column->path;
    }
    *in_row = at;
    return "/run";
}

const char *ledger_run_field(size_t at, size_t *in_row) {
    return field_at(LEDGER_SPACE_RUN, at, in_row);
}

const char *ledger_record_field(size_t at, size_t *in_row) {
    return field_at(LEDGER_SPACE_STEP, at, in_row);
}
