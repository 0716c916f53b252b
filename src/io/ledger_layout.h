/* ledger_layout: the datasets of a ledger in one table, for reader and writer. Layer: io, private to ledger_*.c. */
#ifndef LEDGER_LAYOUT_H
#define LEDGER_LAYOUT_H

#include "h5_column.h"
#include "ledger_file.h"

enum { LEDGER_SPACE_STEP, LEDGER_SPACE_SEQ, LEDGER_SPACE_TOK, LEDGER_SPACE_RUN }; /* the last has one row and is not committed */

typedef enum ledger_column_id {
    LEDGER_COL_CONFIG,    /* rows are bytes */
    LEDGER_COL_SEQ_BEGIN, /* a row more than there are steps */
    LEDGER_COL_OFFSET,    /* a row more than there are sequences */
    LEDGER_COL_ID, LEDGER_COL_MASK, LEDGER_COL_ARRAY, /* three of them */
    LEDGER_COL_FIELD = LEDGER_COL_ARRAY + LEDGER_ARRAY_COUNT, /* from here on: a field of ledger_run, br_ledger_record, ledger_seq each */
    LEDGER_COLUMN_COUNT = LEDGER_COL_FIELD + 39
} ledger_column_id;

extern const h5_column ledger_columns[LEDGER_COLUMN_COUNT];

const void *ledger_reader_column(const ledger_reader *reader, int column); /* all rows */

#endif
